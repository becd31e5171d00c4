"""What a caller may hand in, and in which order: what is refused is refused at once, and leaves nothing behind."""
import pickle
import unittest
from contextlib import closing
from unittest import mock

import ZODB
from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, POSKeyError, StorageError, StorageTransactionError, UndoError
from ZODB.tests.hexstorage import HexStorage
from ZODB.tests.MinPO import MinPO
from ZODB.tests.StorageTestBase import zodb_pickle
from ZODB.utils import newTid, p64, u64, z64

from relstore import spool
from relstore.adapters.base import LARGEST, MAX_TID
from relstore.errors import ConfigurationError
from relstore.packing import pack, packtime
from relstore.tests.support.backends import HISTORY_FREE, HISTORY_PRESERVING, MYSQL, cases
from relstore.tests.support.commits import perform
from relstore.tests.support.records import state

ANY = HISTORY_PRESERVING + HISTORY_FREE


class Unreadable:
    """Its pickle names what is not there any more, and worse."""

    def __init__(self, error: type[Exception]):
        self._error = error

    def __reduce__(self):
        return _fail, (self._error,)


def _fail(error):
    raise error('while it is unpickled')


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.opened()

    def opened(self, name='main', **options):
        storage = self.open_storage(name, **options)
        self.addCleanup(storage.close)
        return storage

    def store(self, oid, state, base=z64, **options):
        return perform(self.storage, lambda txn: self.storage.store(oid, base, state, '', txn), **options)

    def begin(self, *arguments):
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn, *arguments)
        return txn

    def ends(self, txn):
        """Abort it; then nothing is held, and the storage goes on."""
        self.storage.tpc_abort(txn)
        self.assertIsNone(self.storage.tpc_transaction())
        self.assertEqual(self.storage.database.pool.lent, 0)
        oid = self.storage.new_oid()
        tid = self.store(oid, state(1))
        self.assertEqual(self.storage.load(oid), (state(1), tid))


class Bytes(Suite):

    def test_what_is_like_bytes_is_stored_as_bytes(self):
        class Derived(bytes):
            pass

        for kind in bytearray, memoryview, Derived:
            for room in spool.IN_MEMORY_BYTES, 0:         # in memory, or through the file
                with self.subTest(kind, room=room), mock.patch.object(spool, 'IN_MEMORY_BYTES', room):
                    oid = self.storage.new_oid()
                    tid = self.store(oid, kind(state(7)))
                    instance = self.storage.new_instance()
                    self.addCleanup(instance.release)
                    instance.poll_invalidations()
                    for storage in instance, self.opened():
                        data, found = storage.load(oid)
                        self.assertEqual((type(data), data, found), (bytes, state(7), tid))

    def test_what_is_not_is_refused(self):
        oid = self.storage.new_oid()
        for data in 'text', 7, [1], None:
            with self.subTest(data=data):
                txn = self.begin()
                with self.assertRaises(TypeError):
                    self.storage.store(oid, z64, data, '', txn)
                self.ends(txn)
                with self.assertRaises(POSKeyError):
                    self.storage.load(oid)


class Order(Suite):

    def setUp(self):
        super().setUp()
        self.oid, self.new = self.storage.new_oid(), self.storage.new_oid()
        self.tid = self.store(self.oid, state(0))

    def changes(self):
        """Return what adds something to a transaction: name -> change(txn)."""
        changes = {
            'store': lambda txn: self.storage.store(self.new, z64, state(2), '', txn),
            'restore': lambda txn: self.storage.restore(self.new, self.tid, state(2), '', None, txn),
            'deleteObject': lambda txn: self.storage.deleteObject(self.oid, self.tid, txn),
            'checkCurrentSerialInTransaction': lambda txn: self.storage.checkCurrentSerialInTransaction(
                self.oid, self.tid, txn)}
        if self.keep_history:
            changes['undo'] = lambda txn: self.storage.undo(self.tid, txn)
        return changes

    def voted(self):
        txn = self.begin()
        self.storage.store(self.oid, self.tid, state(1), '', txn)
        self.storage.tpc_vote(txn)
        return txn

    def failed(self):
        txn = self.begin()
        self.storage.store(self.oid, p64(u64(self.tid) - 1), state(1), '', txn)
        with self.assertRaises(ConflictError):
            self.storage.tpc_vote(txn)
        return txn

    def refused(self, act, txn, *words):
        with self.assertRaisesRegex(StorageTransactionError, '.*'.join(words)):
            act(txn)

    def test_nothing_is_added_after_the_vote(self):
        for name, change in self.changes().items():
            for vote, words in (self.voted, 'has voted'), (self.failed, 'failed'):
                with self.subTest(name, vote=vote.__name__):
                    txn = vote()
                    self.refused(change, txn, words)
                    self.ends(txn)
                    self.assertEqual(self.storage.load(self.oid), (state(0), self.tid))

    def test_what_has_voted_is_finished_all_the_same(self):
        """The cache and the database have the same."""
        txn = self.voted()
        for change in self.changes().values():
            self.refused(change, txn, 'has voted')
        tid = self.storage.tpc_finish(txn)
        instance = self.storage.new_instance()
        self.addCleanup(instance.release)
        instance.poll_invalidations()
        for storage in instance, self.opened():
            self.assertEqual(storage.load(self.oid), (state(1), tid))
            with self.assertRaises(POSKeyError):
                storage.load(self.new)

    def test_votes_once(self):
        for vote, words in (self.voted, 'has voted'), (self.failed, 'failed'):
            txn = vote()
            lent = self.storage.database.pool.lent
            for _ in range(3):
                self.refused(self.storage.tpc_vote, txn, words)
            self.assertEqual(self.storage.database.pool.lent, lent)
            self.ends(txn)

    def test_finish_comes_after_the_vote(self):
        txn = self.begin()
        self.changes()['store'](txn)
        self.refused(self.storage.tpc_finish, txn, 'has not voted', 'tpc_vote')
        self.ends(txn)
        txn = self.failed()
        self.refused(self.storage.tpc_finish, txn, 'failed', 'tpc_abort')
        self.ends(txn)
        self.assertEqual(self.storage.load(self.oid), (state(0), self.tid))

    def test_it_may_vote_after_it_was_told(self):
        txn = self.begin()
        self.changes()['store'](txn)
        self.refused(self.storage.tpc_finish, txn, 'has not voted')
        self.storage.tpc_vote(txn)
        tid = self.storage.tpc_finish(txn)
        self.assertEqual(self.storage.load(self.new), (state(2), tid))
        self.ends(txn)


class Numbers(Suite):

    def test_oids_that_leave_no_room(self):
        changes = {
            'store': lambda oid, txn: self.storage.store(oid, z64, state(1), '', txn),
            'restore': lambda oid, txn: self.storage.restore(oid, z64, state(1), '', None, txn),
            'deleteObject': lambda oid, txn: self.storage.deleteObject(oid, z64, txn)}
        for oid in LARGEST + 1, 2 ** 63 - 17, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1:
            for name, change in changes.items():
                with self.subTest(name, oid=oid):
                    txn = self.begin()
                    with self.assertRaisesRegex(StorageError, f'{oid:#x}.*cannot be (added|stored)'):
                        change(p64(oid), txn)
                        self.storage.tpc_vote(txn)
                    self.ends(txn)
                    self.assertLess(self.storage.new_oid(), p64(LARGEST))

    def test_the_largest_oid(self):
        oid = p64(LARGEST)
        tid = self.store(oid, state(1))
        self.assertEqual(self.storage.load(oid), (state(1), tid))
        for storage in self.storage, self.opened():
            oids = [storage.new_oid() for _ in range(100)]
            self.assertGreater(min(oids), oid)
            tid = perform(storage, *[lambda txn, oid=oid, storage=storage: storage.store(oid, z64, state(2), '', txn)
                                     for oid in oids])
            self.assertEqual(self.storage.load(oids[-1]), (state(2), tid))
            tid = perform(self.storage, lambda txn, oid=oids[0], tid=tid: self.storage.store(
                oid, tid, state(3), '', txn))     # there already, whoever has made it
            self.assertEqual(self.storage.load(oids[0]), (state(3), tid))

    def test_tids_there_cannot_be(self):
        tid, beyond = self.store(p64(1), state(1)), p64(2 ** 63)
        for change in (
                lambda txn: self.storage.store(p64(1), beyond, state(2), '', txn),
                lambda txn: self.storage.deleteObject(p64(1), beyond, txn),
                lambda txn: self.storage.restore(p64(1), tid, state(2), '', beyond, txn),
                lambda txn: self.storage.checkCurrentSerialInTransaction(p64(1), beyond, txn),
                lambda txn: self.storage.checkCurrentSerialInTransaction(beyond, tid, txn)):
            txn = self.begin()
            with self.assertRaises(StorageError):
                change(txn)
            self.ends(txn)
        self.assertEqual(self.storage.load(p64(1)), (state(1), tid))

    def test_tids_that_leave_no_room(self):
        for tid in LARGEST + 1, 2 ** 63 - 2, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1:
            txn = TransactionMetaData()
            with self.assertRaisesRegex(StorageError, f'{tid:#x}.*{LARGEST:#x}'):
                self.storage.tpc_begin(txn, p64(tid))
            self.ends(txn)

    def test_the_largest_tid(self):
        """It lies in the year 5908, and later transactions count on from there."""
        self.store(p64(1), state(1), tid=p64(LARGEST))
        last = p64(LARGEST)
        for number in range(3):
            tid = self.store(p64(2 + number), state(1))
            self.assertGreater(tid, last)
            last = tid
        self.assertGreater(newTid(last), last)
        self.assertGreater(TimeStamp(last).laterThan(TimeStamp(last)).raw(), last)
        self.assertEqual(self.opened().history(p64(4))[0]['tid'], last)

    def test_serials_that_never_were(self):
        """Whoever takes the newest tid for that of an object has a conflict, and nobody else notices."""
        one, other = self.storage.new_oid(), self.storage.new_oid()
        tid = self.store(one, state(1))
        self.store(other, state(1))
        beside = self.opened()
        instance = beside.new_instance()
        self.addCleanup(instance.release)
        instance.poll_invalidations()
        instance.load(other)
        epoch, newest = beside.database.epochs.now, self.storage.lastTransaction()
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        for act in (lambda txn: view.checkCurrentSerialInTransaction(one, newest, txn),
                    lambda txn: view.store(one, newest, state(2), '', txn)):
            txn = TransactionMetaData()
            view.tpc_begin(txn)
            act(txn)
            view.store(self.storage.new_oid(), z64, state(3), '', txn)
            self.assertRaises(ConflictError, view.tpc_vote, txn)
            view.tpc_abort(txn)
            view.poll_invalidations()
        instance.poll_invalidations()
        self.assertEqual(instance.load(one), (state(1), tid))
        self.assertEqual((beside.database.epochs.now, self.storage.database.epochs.now), (epoch, epoch))

    def test_nothing_is_found_beyond(self):
        self.store(p64(1), state(1))
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        for oid in p64(2 ** 63 - 1), p64(2 ** 63), b'\xff' * 8, b'', b'\1' * 7, b'\1' * 9:
            for storage in self.storage, view:
                for name, read in {
                        'load': storage.load,
                        'loadBefore': lambda oid, storage=storage: storage.loadBefore(oid, p64(MAX_TID)),
                        'loadSerial': lambda oid, storage=storage: storage.loadSerial(oid, p64(1)),
                        'getTid': storage.getTid,
                        'history': storage.history}.items():
                    with self.subTest(name, oid=oid), self.assertRaises(POSKeyError) as raised:
                        read(oid)
                    self.assertEqual(raised.exception.args, (oid,))
        for tid in p64(2 ** 63), b'\xff' * 8:
            with self.assertRaises(POSKeyError):
                view.loadSerial(p64(1), tid)
            self.assertEqual(view.loadBefore(p64(1), tid), (state(1), view.getTid(p64(1)), None))
            self.assertEqual(list(view.iterator(tid)), [])
            with self.assertRaises(ValueError):
                view.record_iternext(tid)
        view.prefetch([p64(2 ** 63), p64(1)])
        self.assertEqual(self.storage.database.pool.lent, 1 if view.view.snapshot.session else 0)
        view.release()
        self.assertEqual(self.storage.database.pool.lent, 0)

    def test_transactions_that_cannot_be_undone(self):
        if not self.keep_history:
            self.skipTest('needs undo')
        for tid in 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1:
            txn = self.begin()
            with self.assertRaises(UndoError):
                self.storage.undo(p64(tid), txn)
            self.ends(txn)


class Extension(Suite):

    def test_one_that_cannot_be_read(self):
        broken = [pickle.dumps({'x': Unreadable(error)}, 3)
                  for error in (KeyError, RuntimeError, OSError, RecursionError, AssertionError)]
        broken += [b'\x80\x03}garbage', b'\x80', b'(lp0\n.', b'\x80\x03]q\x00.', b'h\x07.', b'\x80\x03I7\n.']
        tids = []
        for number, extension in enumerate([{'told': 'before'}, *broken, {'told': 'after'}]):
            base = tids[-1] if tids else z64
            tids.append(self.store(p64(1), state(number), base, extension=extension, user=str(number)))
        for tell in (lambda: self.storage.undoLog(0, -100), lambda: self.storage.undoInfo(0, -100),
                     lambda: self.storage.history(p64(1), 100)):
            entries = tell()
            self.assertEqual([entry['user_name'] for entry in entries],
                             [str(number).encode() for number in reversed(range(len(tids)))])
            self.assertEqual([entry.get('told') for entry in entries], ['after', *[None] * len(broken), 'before'])
        copied = [(txn.tid, txn.extension_bytes) for txn in self.storage.iterator()]
        self.assertEqual([tid for tid, _ in copied], tids)
        self.assertEqual([extension for _, extension in copied[1:-1]], broken)


class Metadata(Suite):

    def test_more_than_the_columns_take(self):
        """Where no history is kept nothing is stored of it."""
        oid, long = self.storage.new_oid(), 'x' * 70_000
        tid = z64
        for texts in {'user': long}, {'description': long}, {'extension': {'x': long}}:
            tid = self.store(oid, state(1), tid, **texts)
            self.assertEqual(self.storage.load(oid), (state(1), tid))


class Zapped(Suite):

    def test_through_the_storage_of_a_connection(self):
        """Whatever the connection holds is gone."""
        with closing(ZODB.DB(self.storage)) as db:
            with db.transaction() as connection:
                connection.root()['a'] = PersistentMapping()
            connection = db.open()
            oid = connection.root()['a']._p_oid
            connection._storage.zap_all()
            self.assertIsNone(connection._storage.poll_invalidations())
            self.assertEqual(connection._storage.poll_invalidations(), [])
            self.assertRaises(POSKeyError, connection._storage.load, oid)
            connection._storage.zap_all()
            connection.sync()
            with self.assertRaises(POSKeyError):
                connection.root()['a']
            connection.close()

    def test_first_poll_of_a_new_instance(self):
        instance = self.storage.new_instance()
        self.addCleanup(instance.release)
        instance.zap_all()
        self.assertEqual(instance.poll_invalidations(), [])


class PackTime(Suite):

    def setUp(self):
        super().setUp()
        self.tids = [perform(self.storage, lambda txn: self.storage.store(z64, z64, state(0), '', txn))]
        for number in range(1, 4):
            self.tids.append(self.store(z64, state(number), self.tids[-1]))

    def left(self):
        return [entry['tid'] for entry in reversed(self.storage.history(z64, 100))]

    def test_a_tid(self):
        """What was current at that transaction stays, and what is later."""
        for first in 1, 2:
            self.storage.pack(u64(self.tids[first]), None)
            self.assertEqual(self.left(), self.tids[first:])
        self.storage.pack(u64(self.tids[2]) - 1, None)
        self.assertEqual(self.left(), self.tids[2:])
        HexStorage(self.storage).pack(u64(self.tids[3]), None)
        self.assertEqual(self.left(), self.tids[3:])

    def test_a_tid_in_the_future(self):
        self.storage.pack(MAX_TID, None)
        self.assertEqual(self.left(), self.tids[3:])

    def test_before_everything(self):
        self.storage.pack(packtime.FIRST_TID, None)
        self.storage.pack(0, None)
        self.assertEqual(self.left(), self.tids)

    def test_neither(self):
        seconds = TimeStamp(self.tids[-1]).timeTime()
        for pack_time in (int(seconds * 1000), seconds * 1000, seconds * 1e9, float(u64(self.tids[1])), 2 ** 63,
                          float('nan'), float('inf')):
            with self.subTest(pack_time=pack_time), self.assertRaisesRegex(ConfigurationError, 'seconds.*tid'):
                self.storage.pack(pack_time, None)
        self.assertEqual(self.left(), self.tids)


class PackTimeWithoutHistory(Suite):

    def test_a_tid(self):
        """As a time: what was found to be garbage before that goes."""
        root, oid = zodb_pickle(MinPO(1)), p64(1)
        tid = perform(self.storage, lambda txn: self.storage.store(z64, z64, root, '', txn),
                      lambda txn: self.storage.store(oid, z64, state(1), '', txn))
        last = self.store(z64, root, tid)
        with mock.patch.object(pack, 'PRESENT_SECONDS', 0):
            for _ in range(2):      # it was found, but not before that
                self.storage.pack(u64(last), None)
                self.assertTrue(self.storage.load(oid))
        self.storage.pack(u64(last), None)          # that is the present
        self.assertRaises(POSKeyError, self.storage.load, oid)


cases(globals(), Bytes, Order, Numbers, Zapped)
cases(globals(), Extension, PackTime, backends=HISTORY_PRESERVING)
cases(globals(), Metadata, backends=MYSQL[1::2])
cases(globals(), PackTimeWithoutHistory, backends=HISTORY_FREE)
del Suite, Bytes, Order, Numbers, Extension, Metadata, Zapped, PackTime, PackTimeWithoutHistory
