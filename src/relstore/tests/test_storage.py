"""What ZODB's suites do not ask: pages, edges, several undos at once, wrappers, bounded pools and caches.

Where history is kept a FileStorage is the oracle: the same script with the same tids runs on both, and both answer
the same questions.
"""
import os
import random
import tempfile
import time
import unittest
from contextlib import closing, contextmanager
from unittest import mock

import psycopg2
import transaction
import ZODB
from BTrees.Length import Length
from BTrees.OOBTree import OOBTree
from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from psycopg2.extensions import make_dsn
from ZODB.BaseStorage import TransactionRecord
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.POSException import (
    ConflictError,
    POSError,
    POSKeyError,
    ReadConflictError,
    ReadOnlyError,
    ReadOnlyHistoryError,
    UndoError,
)
from ZODB.tests.MinPO import MinPO
from ZODB.utils import maxtid, oid_repr, p64, u64, z64

import relstore
from relstore.errors import StorageError, Unavailable
from relstore.references import unpack
from relstore.sessions.session import Session
from relstore.tests.support.backends import (
    BY_EVERY_DRIVER,
    HISTORY_FREE,
    HISTORY_PRESERVING,
    MYSQL,
    PYMYSQL_ON_MYSQL,
    PostgreSQLBackend,
    SQLiteBackend,
    cases,
)
from relstore.tests.support.commits import perform
from relstore.tests.support.hexadecimal import MVCCHexStorage
from relstore.tests.support.records import counter, state

FIRST_TID = u64(TimeStamp(2020, 2, 29, 23, 59, 59.5).raw())


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.opened()

    def opened(self, name='main', **options):
        """Open a storage that is closed after the test."""
        storage = self.open_storage(name, **options)
        self.addCleanup(storage.close)
        return storage

    def commit(self, *changes, storage=None, user='anna', description='', extension=None, tid=None):
        """Run changes(transaction) in one transaction; return its tid."""
        return perform(self.storage if storage is None else storage, *changes, user=user, description=description,
                       extension=extension, tid=tid)

    def store(self, oid, state, base=z64, **options):
        """Commit one state; return its tid."""
        storage = options.get('storage', self.storage)
        return self.commit(lambda txn: storage.store(oid, base, state, '', txn), **options)

    def database(self, storage=None, **options):
        db = ZODB.DB(self.storage if storage is None else storage, **options)
        self.addCleanup(db.close)
        return db


# Compared with FileStorage


def outcome(work, *arguments):
    """Return what work(*arguments) returns, or the class of the exception that it raises."""
    try:
        return work(*arguments)
    except UndoError:       # FileStorage has a class of its own for several
        return UndoError
    except (POSError, ValueError) as e:
        return type(e)


class Script:
    """A random history, the same for every storage that it is run on."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.oids = [p64(n) for n in range(8)]
        self.steps = [self.step(number) for number in range(40)]

    def step(self, number):
        """One transaction: (user, description, extension, what it does, what that is done with)."""
        chance = self.random
        what = chance.choice(['store'] * 4 + ['undo'] * 2 + ['undo many', 'delete', 'nothing'])
        if what == 'store':
            # Half of the objects are counters, which resolve conflicts.
            oids = chance.sample(self.oids, chance.randint(1, 4))
            how = [(oid, (counter if u64(oid) % 2 else state)(chance.randrange(4))) for oid in oids]
        elif what == 'undo':
            how = [chance.choice([0, 0, 0, 1, 2, 5])]
        elif what == 'undo many':
            how = sorted(chance.sample(range(5), chance.randint(2, 3)), reverse=chance.random() < 0.1)
        else:
            how = chance.choice(self.oids)
        return chance.choice(['anna', 'bo']), f'{number}: {what}', chance.choice([None, {'n': number % 3}]), what, how

    def run(self, storage):
        """Run it; return what each step led to: a tid, or the class of the exception that ended it."""
        return [outcome(self.run_step, storage, p64(FIRST_TID + 1000 * number), *step)
                for number, step in enumerate(self.steps)]

    def run_step(self, storage, tid, user, description, extension, what, how):
        def change(txn):
            if what == 'store':
                for oid, state in how:
                    storage.store(oid, self.current(storage, oid), state, '', txn)
            elif what == 'delete':
                storage.deleteObject(how, storage.load(how)[1], txn)
            elif what != 'nothing':
                log = storage.undoLog(0, 10)
                for index in how:
                    if index < len(log):
                        storage.undo(log[index]['id'], txn)
        return perform(storage, change, user=user, description=description, extension=extension, tid=tid)

    @staticmethod
    def current(storage, oid):
        """The tid of an object's newest revision, that of a deletion too."""
        try:
            return storage.history(oid, 1)[0]['tid']
        except KeyError:
            return z64


class SameAsFileStorage(Suite):
    SEEDS = range(4)

    def histories(self):
        """Yield (oracle, storage, script), for each of some random histories."""
        # Pages of a few rows: the seams between them are where such code breaks.
        for name, rows in [('history.PAGE', 3), ('iterate.TRANSACTIONS', 4), ('iterate.RECORDS', 2)]:
            patch = mock.patch(f'relstore.{name}', rows)
            patch.start()
            self.addCleanup(patch.stop)
        for seed in self.SEEDS:
            script = Script(seed)
            self.storage.zap_all()
            with tempfile.TemporaryDirectory() as directory, \
                    closing(FileStorage(os.path.join(directory, 'Data.fs'))) as oracle:
                self.assertEqual(script.run(self.storage), script.run(oracle), f'seed {seed}')
                yield oracle, self.storage, script

    def same(self, oracle, storage, method, *arguments, view=lambda answer: answer):
        """Both answer the same, or raise the same."""
        expected = outcome(getattr(oracle, method), *arguments)
        found = outcome(getattr(storage, method), *arguments)
        if not isinstance(expected, type):
            expected = view(expected)
        if not isinstance(found, type):
            found = view(found)
        self.assertEqual(found, expected, f'{method}{arguments}')

    def test_revisions(self):
        for oracle, storage, script in self.histories():
            tids = {txn.tid for txn in oracle.iterator()}
            edges = {p64(max(u64(tid) + step, 0)) for tid in tids for step in (-1, 0, 1)} | {z64, maxtid, p64(1)}
            for oid in [*script.oids, p64(99)]:
                self.same(oracle, storage, 'load', oid)
                for tid in edges:
                    self.same(oracle, storage, 'loadBefore', oid, tid)
                    self.same(oracle, storage, 'loadSerial', oid, tid)
            self.same(oracle, storage, 'lastTransaction')

    def test_revisions_through_a_view(self):
        """What a connection reads is the same, loaded from the database and from the cache."""
        for oracle, storage, script in self.histories():
            with closing_view(storage) as view:
                view.poll_invalidations()
                for _ in range(2):
                    for oid in [*script.oids, p64(99)]:
                        self.same(oracle, view, 'load', oid)

    def test_history(self):
        keys = ('tid', 'time', 'user_name', 'description', 'n')

        def view(entries):
            return [{key: entry.get(key) for key in keys} for entry in entries]

        for oracle, storage, script in self.histories():
            for oid in [*script.oids, p64(99)]:
                for size in 1, 2, 3, 7, 10_000, 2 ** 70:
                    self.same(oracle, storage, 'history', oid, size, view=view)

    def test_undo_log(self):
        keys = ('time', 'user_name', 'description', 'n')

        def view(entries):
            return [{key: entry.get(key) for key in keys} for entry in entries]

        slices = [(0, -20), (0, 1), (0, 3), (0, 4), (2, 5), (2, -5), (5, 2), (0, 0), (0, 10_000), (7, -10_000),
                  (38, 60), (10_000, -20), (0, -1)]
        filters = [None, lambda entry: entry['user_name'] == b'bo', lambda entry: entry.get('n') == 1,
                   lambda entry: False]
        for oracle, storage, _ in self.histories():
            for first, last in slices:
                for accept in filters:
                    self.same(oracle, storage, 'undoLog', first, last, accept, view=view)
                for specification in None, {}, {'user_name': b'anna'}, {'user_name': b'bo', 'n': 2}, {'n': 7}:
                    self.same(oracle, storage, 'undoInfo', first, last, specification, view=view)

    def test_iterator(self):
        def content(storage, start, stop):
            return [(txn.tid, txn.user, txn.description, txn.extension_bytes,
                     {record.oid: (record.data, record.data_txn) for record in txn})
                    for txn in storage.iterator(start, stop)]

        for oracle, storage, _ in self.histories():
            tids = [txn.tid for txn in oracle.iterator()]
            edges = [None, z64, maxtid, *tids[::6], *[p64(u64(tid) + 1) for tid in tids[::6]]]
            for start in edges:
                for stop in edges:
                    self.assertEqual(content(storage, start, stop), content(oracle, start, stop), (start, stop))

    def test_record_iternext(self):
        def walk(storage):
            oid, found = None, []
            while True:
                *record, oid = storage.record_iternext(oid)
                found.append(tuple(record))
                if oid is None:
                    return found

        for oracle, storage, _ in self.histories():
            self.assertEqual(walk(storage), list(walk_file_storage(oracle)))


def walk_file_storage(storage):
    """Its record_iternext() stops with POSKeyError at the first object whose creation was undone."""
    for n in range(8):
        try:
            state, tid = storage.load(p64(n))
        except POSKeyError:
            continue
        yield p64(n), tid, state


@contextmanager
def closing_view(storage):
    view = storage.new_instance()
    try:
        yield view
    finally:
        view.release()


class Undo(Suite):

    def undo(self, *indexes):
        """Undo the transactions at these places of the log, in one transaction; return the oids."""
        storage, oids = self.storage, []
        ids = [storage.undoLog(index, index + 1)[0]['id'] for index in indexes]
        self.commit(*[lambda txn, id=id: oids.extend(storage.undo(id, txn)[1]) for id in ids])
        return oids

    def state(self, oid):
        return outcome(lambda: self.storage.load(oid)[0])

    def test_several_undos_of_one_object_in_one_transaction(self):
        one, other = p64(1), p64(2)
        tid = self.store(one, state(1))
        tid = self.store(one, state(2), tid)
        self.store(other, state(7))
        self.store(one, state(3), tid)
        self.assertEqual(self.undo(0, 2), [one, one])
        self.assertEqual((self.state(one), self.state(other)), (state(1), state(7)))
        self.undo(0)
        self.assertEqual(self.state(one), state(3))

    def test_undos_in_the_wrong_order(self):
        """The older one alone cannot be undone, whatever comes after it."""
        tid = self.store(p64(1), state(1))
        tid = self.store(p64(1), state(2), tid)
        self.store(p64(1), state(3), tid)
        with self.assertRaises(UndoError):
            self.undo(1, 0)
        self.assertEqual(self.state(p64(1)), state(3))

    def test_undo_and_store_in_one_transaction(self):
        tid = self.store(p64(1), state(1))
        self.store(p64(1), state(2), tid)
        id = self.storage.undoLog(0, 1)[0]['id']
        self.commit(lambda txn: self.storage.undo(id, txn),
                    lambda txn: self.storage.store(p64(2), z64, state(9), '', txn))
        self.assertEqual((self.state(p64(1)), self.state(p64(2))), (state(1), state(9)))

    def test_creation(self):
        self.store(p64(1), state(1))
        self.assertEqual(self.undo(0), [p64(1)])
        self.assertIs(self.state(p64(1)), POSKeyError)
        self.assertEqual(len(self.storage.history(p64(1), 9)), 2)
        self.undo(0)
        self.assertEqual(self.state(p64(1)), state(1))
        self.undo(0)
        self.assertIs(self.state(p64(1)), POSKeyError)

    def test_creation_that_was_changed_since(self):
        tid = self.store(p64(1), state(1))
        self.store(p64(1), state(2), tid)
        with self.assertRaises(UndoError):
            self.undo(1)
        self.undo(0, 1)
        self.assertIs(self.state(p64(1)), POSKeyError)

    def test_deletion(self):
        tid = self.store(p64(1), state(1))
        self.commit(lambda txn: self.storage.deleteObject(p64(1), tid, txn))
        self.assertIs(self.state(p64(1)), POSKeyError)
        self.undo(0)
        self.assertEqual(self.state(p64(1)), state(1))

    def test_change_before_a_deletion(self):
        tid = self.store(p64(1), state(1))
        tid = self.store(p64(1), state(2), tid)
        self.commit(lambda txn: self.storage.deleteObject(p64(1), tid, txn))
        with self.assertRaises(UndoError):
            self.undo(1)
        self.undo(0, 1)
        self.assertEqual(self.state(p64(1)), state(1))

    def test_deletion_after_which_it_was_created_again(self):
        tid = self.store(p64(1), state(1))
        tid = self.commit(lambda txn: self.storage.deleteObject(p64(1), tid, txn))
        self.store(p64(1), state(2), tid)
        with self.assertRaises(UndoError):
            self.undo(1)
        self.assertEqual(self.state(p64(1)), state(2))

    def test_by_conflict_resolution(self):
        """Undoing +2 keeps the +4 that came after it, and can itself be undone."""
        oid = p64(1)
        tid = self.store(oid, counter(1))
        tid = self.store(oid, counter(3), tid)
        self.store(oid, counter(7), tid)
        self.undo(1)
        self.assertEqual(self.state(oid), counter(5))
        self.undo(0)
        self.assertEqual(self.state(oid), counter(7))
        self.undo(2, 1)         # the +4, and the first undo: -4 + 2
        self.assertEqual(self.state(oid), counter(5))

    def test_error_names_the_object(self):
        tid = self.store(p64(0x123), state(1))
        tid = self.store(p64(0x123), state(2), tid)
        self.store(p64(0x123), state(3), tid)
        with self.assertRaisesRegex(UndoError, oid_repr(p64(0x123))):
            self.undo(1)

    def test_nothing_of_a_transaction_that_cannot_be_undone_as_a_whole(self):
        one, other = p64(1), p64(2)
        self.commit(*[lambda txn, oid=oid: self.storage.store(oid, z64, state(1), '', txn) for oid in (one, other)])
        tid = self.storage.lastTransaction()
        self.commit(*[lambda txn, oid=oid: self.storage.store(oid, tid, state(2), '', txn) for oid in (one, other)])
        self.store(other, state(3), self.storage.lastTransaction())
        with self.assertRaises(UndoError):
            self.undo(1)
        self.assertEqual((self.state(one), self.state(other)), (state(2), state(3)))

    def test_transaction_that_is_none(self):
        self.store(p64(1), state(1))
        for id in z64, p64(u64(self.storage.lastTransaction()) - 1), maxtid:
            with self.assertRaises(UndoError):
                self.commit(lambda txn, id=id: self.storage.undo(id, txn))

    def test_changed_while_the_undo_is_under_way(self):
        tid = self.store(p64(1), state(1))
        tid = self.store(p64(1), state(2), tid)
        id = self.storage.undoLog(0, 1)[0]['id']
        with closing_view(self.storage) as other, self.assertRaises(ConflictError):
            self.commit(lambda txn: self.storage.undo(id, txn),
                        lambda txn: self.store(p64(1), state(3), tid, storage=other))
        self.assertEqual(self.state(p64(1)), state(3))

    def test_more_transactions_than_a_page(self):
        with mock.patch('relstore.history.PAGE', 7):
            tid = z64
            for n in range(30):
                tid = self.store(p64(1), state(n), tid, user='bo' if n % 10 == 3 else 'anna')
            entries = self.storage.undoInfo(0, -20, {'user_name': b'bo'})
            self.assertEqual([entry['user_name'] for entry in entries], [b'bo'] * 3)
            self.assertEqual(self.storage.undoInfo(1, 2, {'user_name': b'bo'}), entries[1:2])

    def test_extension_that_cannot_be_read(self):
        """Its class may be gone; the transaction is listed all the same, and its bytes are kept."""
        damaged = b'\x80\x03cno.such.module\nThing\n.'
        txn = TransactionMetaData('anna', 'damaged', damaged)
        self.storage.tpc_begin(txn)
        self.storage.store(p64(1), z64, state(1), '', txn)
        self.storage.tpc_vote(txn)
        self.storage.tpc_finish(txn)
        [entry] = self.storage.undoLog()
        self.assertEqual(entry['description'], b'damaged')
        [record] = self.storage.history(p64(1))
        self.assertEqual(record['description'], b'damaged')
        [txn] = self.storage.iterator()
        self.assertEqual(txn.extension_bytes, damaged)


class Historical(Suite):

    def test_connections(self):
        db = self.database()
        manager = transaction.TransactionManager()
        tids = []
        for n in range(4):
            connection = db.open(manager)
            connection.root()['n'] = n
            manager.commit()
            tids.append(self.storage.lastTransaction())
            connection.close()
        for n, tid in enumerate(tids):
            self.assertEqual(self.read(db, at=tid), n)
            self.assertEqual(self.read(db, before=p64(u64(tid) + 1)), n)
            if n:
                self.assertEqual(self.read(db, before=tid), n - 1)

    def test_connections_do_not_move(self):
        db = self.database()
        manager = transaction.TransactionManager()
        connection = db.open(manager)
        connection.root()['n'] = 0
        manager.commit()
        old = db.open(transaction.TransactionManager(), at=self.storage.lastTransaction())
        connection.root()['n'] = 1
        manager.commit()
        old.sync()
        self.assertEqual(old.root()['n'], 0)
        old.root()['n'] = 5
        with self.assertRaises(ReadOnlyHistoryError):
            old.transaction_manager.commit()
        old.transaction_manager.abort()
        old.close()

    def read(self, db, **when):
        connection = db.open(transaction.TransactionManager(), **when)
        try:
            return connection.root()['n']
        finally:
            connection.close()


# On every database, with history and without


class Edges(Suite):

    def test_objects_that_never_were(self):
        self.store(p64(1), state(1))
        for method, arguments in [('load', ()), ('getTid', ()), ('loadBefore', (maxtid,)), ('loadSerial', (z64,)),
                                  ('history', ())]:
            with self.subTest(method), self.assertRaises(POSKeyError):
                getattr(self.storage, method)(p64(99), *arguments)

    def test_states_of_any_kind(self):
        """Bytes in, the same bytes out: a storage around this one may have changed them in any way."""
        states = [
            b'', b'\0', b"'%s' {} ? \\x00 $1", bytes(range(256)), random.Random(1).randbytes(70_000), '✓'.encode()]
        oids = [p64(n + 1) for n in range(len(states))]
        self.commit(*[lambda txn, oid=oid, data=data: self.storage.store(oid, z64, data, '', txn)
                      for oid, data in zip(oids, states, strict=True)])
        fresh = self.opened_again()
        for oid, data in zip(oids, states, strict=True):
            self.assertEqual(fresh.load(oid)[0], data)
        [txn] = fresh.iterator()
        self.assertEqual([record.data for record in txn], states)

    def opened_again(self):
        storage = relstore.RelStore(self.storage._adapter, keep_history=self.keep_history)
        self.addCleanup(storage.close)
        return storage

    def test_metadata_of_any_kind(self):
        tid = self.store(p64(1), state(1), user="O'Neill ✓\\ %s", description='{} "?"\n\t',
                         extension={'ключ': [None]})
        fresh = self.opened_again()
        [txn] = fresh.iterator()
        self.assertEqual(txn.tid, tid)
        if self.keep_history:
            self.assertEqual((txn.user.decode(), txn.description.decode(), txn.extension),
                             ("O'Neill ✓\\ %s", '{} "?"\n\t', {'ключ': [None]}))

    def test_close_and_open(self):
        tid = self.store(p64(1), state(1))
        oid = self.storage.new_oid()
        self.storage.close()
        with self.assertRaises(Unavailable):
            self.storage.load(p64(1))
        storage = self.opened_again()
        self.assertEqual(storage.load(p64(1)), (state(1), tid))
        self.assertEqual(storage.lastTransaction(), tid)
        self.assertGreater(storage.new_oid(), oid)

    def test_oids_that_were_not_issued_here(self):
        """An object that came with its oid, by an import say, is never met by a new one."""
        self.store(p64(1000), state(1))
        issued = {u64(self.storage.new_oid()) for _ in range(1200)}
        self.assertNotIn(1000, issued)
        other = self.opened_again()
        self.assertFalse({u64(other.new_oid()) for _ in range(100)} & (issued | {1000}))

    def test_record_iternext_over_all(self):
        tids = {}
        for n in 0, 1, 5, 7, 3000:
            tids[p64(n)] = self.store(p64(n), state(n))
        self.commit(lambda txn: self.storage.deleteObject(p64(5), tids.pop(p64(5)), txn))
        oid, found = None, {}
        while True:
            current, tid, data, oid = self.storage.record_iternext(oid)
            found[current] = tid
            self.assertEqual(data, state(u64(current)))
            if oid is None:
                break
        self.assertEqual(found, tids)
        self.assertEqual(self.storage.record_iternext(p64(2))[0], p64(7))

    def test_len_and_size(self):
        self.assertEqual(len(self.storage), 0)
        self.assertGreater(self.storage.getSize(), 0)
        for n in range(3):
            self.store(p64(n), random.Random(n).randbytes(500_000))
        self.assertEqual(len(self.storage), 3)
        self.refresh_statistics()
        self.assertGreater(self.storage.getSize(), 1_500_000)       # MySQL's tables do not shrink when they are emptied

    def test_history_of_no_size(self):
        self.store(p64(1), state(1))
        self.assertEqual(self.storage.history(p64(1), 0), [])
        self.assertEqual(self.storage.history(p64(99), 0), [])
        self.assertEqual(len(self.storage.history(p64(1), 2 ** 80)), 1)

    def test_zap_all(self):
        db = self.database()
        with db.transaction() as connection:
            connection.root()['tree'] = OOBTree({n: MinPO(n) for n in range(100)})
        view = self.storage.new_instance()
        view.poll_invalidations()
        view.load(z64)
        view.afterCompletion()      # a snapshot would keep the tables locked
        self.storage.zap_all()
        self.assertEqual((len(self.storage), self.storage.lastTransaction()), (0, z64))
        self.assertEqual(list(self.storage.iterator()), [])
        with self.assertRaises((POSKeyError, ReadConflictError)):
            self.storage.load(z64)
        with self.assertRaises(ReadConflictError):
            view.load(p64(1))
        self.assertIsNone(view.poll_invalidations())
        with self.assertRaises(POSKeyError):
            view.load(z64)
        view.release()
        tid = self.store(z64, state(1))
        self.assertEqual(self.storage.load(z64), (state(1), tid))
        self.assertEqual(self.storage.new_oid(), p64(1))

    def test_read_only(self):
        tid = self.store(p64(1), state(1))
        storage = self.opened(read_only=True)
        self.assertTrue(storage.isReadOnly())
        txn = TransactionMetaData()
        for method, *arguments in [
                ('new_oid',), ('tpc_begin', txn), ('store', p64(1), tid, b'', '', txn), ('tpc_vote', txn),
                ('restore', p64(1), tid, b'', '', None, txn), ('deleteObject', p64(1), tid, txn), ('undo', tid, txn),
                ('checkCurrentSerialInTransaction', p64(1), tid, txn), ('tpc_finish', txn), ('zap_all',)]:
            with self.subTest(method), self.assertRaises(ReadOnlyError):
                getattr(storage, method)(*arguments)
        self.assertEqual(storage.load(p64(1)), (state(1), tid))
        self.assertEqual([txn.tid for txn in storage.iterator()], [tid])

    def test_read_only_sees_what_others_write(self):
        storage = self.opened(read_only=True)
        db = self.database(storage=self.storage)
        with db.transaction() as connection:
            connection.root()['n'] = 1
        with self.database(storage=storage).transaction() as connection:
            self.assertEqual(connection.root()['n'], 1)

    def test_copy_from_a_clock_that_went_back(self):
        """The tids rise, as they must, and nothing else changes."""
        class Source:
            def iterator(self, start=None, stop=None):
                for n, tid in enumerate([FIRST_TID, FIRST_TID + 5, FIRST_TID + 5, FIRST_TID + 2, FIRST_TID + 900]):
                    yield Txn(p64(tid), ' ', b'anna', str(n).encode(), b'')

        class Txn(TransactionRecord):
            def __iter__(self):
                yield mock.Mock(oid=p64(int(self.description)), data=state(1), data_txn=None)

        with self.assertLogs('relstore', 'WARNING') as logs:
            self.storage.copyTransactionsFrom(Source())
        tids = [u64(self.storage.getTid(p64(n))) for n in range(5)]
        self.assertEqual(tids, sorted(set(tids)))
        self.assertEqual((tids[0], tids[-1]), (FIRST_TID, FIRST_TID + 900))
        self.assertEqual(len(logs.records), 2)

    def test_a_copy_closes_the_iterators_of_its_source(self):
        """Those of a FileStorage hold a file open. Also when the copy is interrupted, and when it is refused."""
        class Source:
            tids = [FIRST_TID, FIRST_TID + 5]
            iterators = []

            def iterator(self, start=None, stop=None):
                closing = mock.MagicMock()
                closing.__iter__.return_value = (
                    TransactionRecord(p64(tid), ' ', b'', b'', b'') for tid in self.tids)
                self.iterators.append(closing)
                return closing

        with mock.patch.object(TransactionRecord, '__iter__', lambda it: iter(()), create=True):
            with self.assertRaises(ZeroDivisionError):
                self.storage.copyTransactionsFrom(Source(), progress=lambda *_: 1 / 0)
            self.storage.zap_all()
            self.storage.copyTransactionsFrom(Source())
            Source.tids = [FIRST_TID + 7]
            if self.keep_history:   # an empty transaction leaves no trace elsewhere
                with self.assertRaises(StorageError):
                    self.storage.copyTransactionsFrom(Source())
        self.assertGreaterEqual(len(Source.iterators), 2)
        for iterator in Source.iterators:
            iterator.close.assert_called_once_with()


class LargeOids(Suite):
    """An object with a large oid, as an import may bring it, costs no more than one with a small one."""

    def setUp(self):
        super().setUp()
        self.storage.close()
        adapter = self.adapter()
        if isinstance(self, PostgreSQLBackend):
            # Counting up to the oid would take years, and fill the disk: rather fail.
            adapter = relstore.PostgreSQL(make_dsn(self.dsn(), options='-c statement_timeout=2000'), driver=self.driver)
        self.storage = relstore.RelStore(adapter, keep_history=self.keep_history)
        self.addCleanup(self.storage.close)

    def test_is_stored_and_new_oids_are_larger(self):
        for oid in p64(2 ** 32), p64(2 ** 40), p64(2 ** 62):
            tid = self.store(oid, state(1))
            self.assertEqual(self.storage.load(oid), (state(1), tid))
            self.assertEqual(self.storage.loadBefore(oid, maxtid), (state(1), tid, None))
            self.assertEqual(self.storage.loadBefore(oid, b'\xff' * 8), (state(1), tid, None))
            self.assertIsNone(self.storage.loadBefore(oid, tid))
            self.assertEqual([txn.tid for txn in self.storage.iterator(tid, b'\xff' * 8)], [tid])
            again = relstore.RelStore(self.storage._adapter, keep_history=self.keep_history)
            self.addCleanup(again.close)
            self.assertGreater(again.new_oid(), oid)


class Prefetch(Suite):

    def setUp(self):
        super().setUp()
        self.oids = [p64(n) for n in range(40)]
        self.commit(*[lambda txn, oid=oid: self.storage.store(oid, z64, state(u64(oid)), '', txn)
                      for oid in self.oids])
        self.storage = self.opened()        # with a cache that is empty
        self.view = self.storage.new_instance()
        self.addCleanup(self.view.release)
        self.view.poll_invalidations()

    @contextmanager
    def messages(self):
        """Yield a list that grows by what is sent to the database."""
        sent = []

        def act(session, *arguments):
            sent.append(arguments)
            return real(session, *arguments)

        real = Session._do
        with mock.patch.object(Session, '_do', act):
            yield sent

    @staticmethod
    def statements(sent):
        """Those of what was asked of a driver that have a text."""
        return [arguments for arguments in sent if any(isinstance(argument, str) for argument in arguments)]

    def test_one_statement(self):
        with self.messages() as sent:
            self.view.prefetch([*self.oids, p64(99)])
            self.assertEqual(len(self.statements(sent)), 1, sent)
            for oid in self.oids:
                self.assertEqual(self.view.load(oid)[0], state(u64(oid)))
            self.assertEqual(len(self.statements(sent)), 1, sent)
            self.view.prefetch(self.oids)
            self.view.prefetch([])
            self.assertEqual(len(self.statements(sent)), 1, sent)

    def test_what_the_view_sees(self):
        other = self.storage.new_instance()
        self.addCleanup(other.release)
        tid = self.store(p64(3), b'newer', self.storage.getTid(p64(3)), storage=other)
        self.view.prefetch(self.oids)
        if self.keep_history:
            self.assertEqual(self.view.load(p64(3))[0], state(3))
        self.view.poll_invalidations()
        self.view.prefetch(self.oids)
        self.assertEqual(self.view.load(p64(3)), (b'newer', tid))

    def test_deleted_objects(self):
        tid = self.storage.getTid(p64(3))
        self.commit(lambda txn: self.storage.deleteObject(p64(3), tid, txn))
        self.view.poll_invalidations()
        self.view.prefetch(self.oids)
        with self.assertRaises(POSKeyError):
            self.view.load(p64(3))
        self.assertEqual(self.view.load(p64(4))[0], state(4))

    def test_from_a_connection(self):
        db = self.database(storage=self.storage)
        with db.transaction() as connection:
            connection.prefetch(self.oids)


class Wrapped(Suite):

    def setUp(self):
        super().setUp()
        self.db = self.database(MVCCHexStorage(self.storage))

    def test_records_are_wrapped(self):
        with self.db.transaction() as connection:
            connection.root()['key'] = MinPO('value')
        state, _ = self.storage.load(z64)
        self.assertTrue(state.startswith(b'.h'))
        with self.db.transaction() as connection:
            connection.cacheMinimize()
            self.assertEqual(connection.root()['key'].value, 'value')

    def test_references_are_those_of_the_pickle(self):
        with self.db.transaction() as connection:
            connection.root()['key'] = target = MinPO('value')
        table = 'current_object JOIN object_state USING (zoid, tid)' if self.keep_history else 'object_state'
        with self.storage._pool.session() as session:
            [[refs]] = session.all(f'SELECT refs FROM {table} WHERE zoid = 0')
        self.assertEqual(unpack(refs), (u64(target._p_oid),))

    def test_conflicts_are_resolved(self):
        with self.db.transaction() as connection:
            connection.root()['length'] = Length()
        one, other = transaction.TransactionManager(), transaction.TransactionManager()
        for manager, change in (one, 2), (other, 3):
            self.db.open(manager).root()['length'].change(change)
        one.commit()
        other.commit()
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['length'](), 5)

    def test_undo_resolves(self):
        if not self.keep_history:
            self.skipTest('needs undo')
        with self.db.transaction() as connection:
            connection.root()['length'] = Length()
        for change in 2, 3:
            with self.db.transaction() as connection:
                connection.root()['length'].change(change)
        manager = transaction.TransactionManager()
        self.db.undo(self.db.undoInfo(1, 2)[0]['id'], manager.get())
        manager.commit()
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['length'](), 3)

    def test_conflict_error_names_the_class(self):
        with self.db.transaction() as connection:
            connection.root()['key'] = PersistentMapping()
        one, other = transaction.TransactionManager(), transaction.TransactionManager()
        for manager in one, other:
            self.db.open(manager).root()['key']['n'] = str(id(manager))
        one.commit()
        with self.assertRaisesRegex(ConflictError, 'PersistentMapping'):
            other.commit()
        other.abort()


class TwoDatabases(Suite):
    """One transaction over two storages."""

    def setUp(self):
        super().setUp()
        self.other = self.second()
        self.databases = {}
        self.db = self.database(databases=self.databases, database_name='main')
        self.database(self.other, databases=self.databases, database_name='other')
        self.manager = transaction.TransactionManager()
        self.connection = self.db.open(self.manager)

    def second(self):
        raise NotImplementedError

    def change(self, value):
        self.connection.root()['n'] = self.connection.get_connection('other').root()['n'] = value

    def values(self):
        with self.db.transaction() as connection:
            return connection.root().get('n'), connection.get_connection('other').root().get('n')

    def test_both(self):
        self.change(1)
        self.manager.commit()
        self.assertEqual(self.values(), (1, 1))
        self.assertEqual((len(self.storage), len(self.other)), (1, 1))

    def test_neither(self):
        """A conflict in either of them undoes what the other had voted for."""
        self.change(1)
        self.manager.commit()
        for name in 'main', 'other':
            with self.subTest(name):
                self.change(2)
                self.connection.get_connection('other' if name == 'main' else 'main')
                with self.databases[name].transaction() as connection:
                    connection.root()['n'] = f'meanwhile in {name}'
                with self.assertRaises(ConflictError):
                    self.manager.commit()
                self.manager.abort()
        self.assertEqual(self.values(), ('meanwhile in main', 'meanwhile in other'))
        self.change(3)
        self.manager.commit()
        self.assertEqual(self.values(), (3, 3))

    def test_are_voted_for_in_one_order_everywhere(self):
        """Otherwise two processes that each hold the lock of one storage wait for that of the other."""
        self.assertNotEqual(self.storage.sortKey(), self.other.sortKey())
        again = relstore.RelStore(self.storage._adapter, keep_history=self.keep_history)
        self.addCleanup(again.close)
        self.assertEqual(self.storage.sortKey(), again.sortKey())

    def test_same_objects_do_not_lock_each_other_out(self):
        """Both have an object 0; it is locked in both at the same time, by different sessions."""
        self.change(1)
        self.storage._database.options.__dict__['commit_lock_timeout'] = 0.5
        started = time.monotonic()
        self.manager.commit()
        self.assertLess(time.monotonic() - started, 0.5)


class TwoPlaces(TwoDatabases):
    """Two directories, or two databases of one server."""

    def second(self):
        return self.opened('other')


class TwoSchemas(TwoDatabases):
    def second(self):
        with closing(psycopg2.connect(self.dsn())) as connection, connection, connection.cursor() as cursor:
            cursor.execute('DROP SCHEMA IF EXISTS other CASCADE; CREATE SCHEMA other')
        adapter = relstore.PostgreSQL(self.dsn(), driver=self.driver, schema='other')
        storage = relstore.RelStore(adapter, keep_history=self.keep_history)
        self.addCleanup(storage.close)
        return storage


class Bounds(Suite):

    def test_pool_is_exhausted(self):
        storage = self.opened(pool_size=2, pool_timeout=0.05)
        with storage._pool.session(), storage._pool.session():
            started = time.monotonic()
            with self.assertRaisesRegex(Unavailable, 'pool-size'):
                storage.lastTransaction()
            self.assertGreaterEqual(time.monotonic() - started, 0.05)
        self.assertEqual(storage.lastTransaction(), z64)

    def test_new_instance_never_waits(self):
        """ZODB holds a lock while it makes one: all its threads would wait too."""
        storage = self.opened(pool_size=2, pool_timeout=30)
        with storage._pool.session(), storage._pool.session():
            instance = storage.new_instance()
            historical = storage.before_instance(maxtid)
            instance.sync()
            instance.afterCompletion()
            instance.release()
            historical.release()

    def test_every_way_out_gives_the_session_back(self):
        storage = self.opened(pool_size=2, pool_timeout=0.05)
        tid = self.store(p64(1), state(1), storage=storage)
        stale = p64(u64(tid) - 1)
        for name, error, change in [
                ('conflict', ConflictError, lambda txn: storage.store(p64(1), stale, state(2), '', txn)),
                ('creation of what is there', ConflictError,
                 lambda txn: storage.store(p64(1), z64, state(2), '', txn)),
                ('outdated read', ReadConflictError,
                 lambda txn: storage.checkCurrentSerialInTransaction(p64(1), stale, txn)),
                ('deletion of what changed', ConflictError, lambda txn: storage.deleteObject(p64(1), stale, txn)),
                ('application', ZeroDivisionError, lambda txn: 1 / 0)]:
            with self.subTest(name):
                with self.assertRaises(error):
                    self.commit(change, storage=storage)
                self.assertEqual(storage._pool.lent, 0)
        for name, work in [
                ('load', lambda: storage.load(p64(9))), ('history', lambda: storage.history(p64(9))),
                ('record_iternext', lambda: storage.record_iternext(p64(9)))]:
            with self.subTest(name):
                with self.assertRaises((KeyError, ValueError)):
                    work()
                self.assertEqual(storage._pool.lent, 0)

    def test_error_in_the_callback_of_finish(self):
        """The transaction is committed by then."""
        storage = self.opened(pool_size=2, pool_timeout=0.05)
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        storage.store(p64(1), z64, state(1), '', txn)
        storage.tpc_vote(txn)
        with self.assertRaises(ZeroDivisionError):
            storage.tpc_finish(txn, lambda tid: 1 / 0)
        storage.tpc_abort(txn)
        self.assertEqual(storage._pool.lent, 0)
        self.assertEqual(storage.load(p64(1))[0], state(1))
        self.store(p64(2), state(2), storage=storage)

    def test_abandoned_transactions_give_the_session_back(self):
        storage = self.opened(pool_size=2, pool_timeout=0.05)
        for _ in range(4):
            view = storage.new_instance()
            view.poll_invalidations()
            txn = TransactionMetaData()
            view.tpc_begin(txn)
            view.store(view.new_oid(), z64, state(1), '', txn)
            view.tpc_vote(txn)
            view.release()
        self.assertEqual(storage._pool.lent, 0)

    def test_idle_connections_hold_no_session(self):
        """Many connections are open in a site, most of them between requests."""
        db = self.database(storage=self.opened(pool_size=2, pool_timeout=0.05), pool_size=20)
        managers = [transaction.TransactionManager(explicit=True) for _ in range(10)]
        connections = [db.open(manager) for manager in managers]
        for manager, connection in zip(managers, connections, strict=True):
            manager.begin()
            connection.root()
            manager.commit()
        self.assertEqual(db.storage._pool.lent, 0)
        for connection in connections:
            connection.close()

    def test_cache(self):
        storage = self.opened(cache_local_mb=1, cache_local_object_max=100_000)
        with closing_view(storage) as view:
            for n in range(60):
                self.store(p64(n), random.Random(n).randbytes(50_000), storage=storage)
            view.poll_invalidations()
            for n in range(60):
                view.load(p64(n))
        stats = storage._cache.stats()
        self.assertLessEqual(stats['bytes'], 1 << 20)
        self.assertGreater(stats['bytes'], 1 << 19)
        self.assertGreater(stats['evictions'], 40)

    def test_log_of_changes(self):
        storage = self.opened(poll_limit=10)
        with closing_view(storage) as view, closing_view(storage) as writer:
            view.poll_invalidations()
            tid = self.store(p64(1), state(1), storage=writer)
            self.assertEqual(view.poll_invalidations(), [p64(1)])
            self.commit(*[lambda txn, n=n: writer.store(p64(n), z64, state(n), '', txn) for n in range(2, 14)],
                        storage=writer)
            self.assertIsNone(view.poll_invalidations())
            self.assertEqual(view.load(p64(1)), (state(1), tid))

    def test_all_sorts_of_rows_in_one_transaction(self):
        """Undone, changed, deleted and new: some have no state, and some have that of another transaction."""
        storage, other = self.opened(), self.opened()
        with closing_view(storage) as view, closing_view(other) as writer:
            undone, changed, deleted, new = (p64(n) for n in range(1, 5))
            first = self.commit(*[lambda txn, oid=oid: writer.store(oid, z64, state(0), '', txn)
                                  for oid in (undone, changed, deleted)], storage=writer)
            second = self.store(undone, state(1), first, storage=writer)
            view.poll_invalidations()
            for oid in undone, changed, deleted:
                view.load(oid)
            changes = [lambda txn: writer.store(changed, first, state(2), '', txn),
                       lambda txn: writer.deleteObject(deleted, first, txn),
                       lambda txn: writer.store(new, z64, state(3), '', txn)]
            if self.keep_history:
                changes.append(lambda txn: writer.undo(writer.undoInfo(0, -1)[0]['id'], txn))
            tid = self.commit(*changes, storage=writer)
            self.assertEqual(set(view.poll_invalidations()),
                             {undone, changed, deleted, new} if self.keep_history else {changed, deleted, new})
            self.assertEqual(view.load(undone), (state(0), tid) if self.keep_history else (state(1), second))
            self.assertEqual([view.load(oid) for oid in (changed, new)], [(state(2), tid), (state(3), tid)])
            with self.assertRaises(POSKeyError):
                view.load(deleted)
            self.assertEqual([(record.oid, record.data, record.data_txn) for record in list(storage.iterator())[-1]],
                             [(undone, state(0), first)] * self.keep_history
                             + [(changed, state(2), None), (deleted, None, None), (new, state(3), None)])
            self.store(new, state(4), tid, storage=writer)    # what is current is known
            with self.assertRaises(ConflictError):
                self.store(changed, state(4), first, storage=writer)

    def test_an_object_that_changed_several_times(self):
        storage, other = self.opened(), self.opened()
        with closing_view(storage) as view, closing_view(other) as writer:
            tid = self.store(p64(1), state(0), storage=writer)
            self.store(p64(2), state(0), storage=writer)
            view.poll_invalidations()
            for n in range(3):
                tid = self.store(p64(1), state(n), tid, storage=writer)
            self.assertEqual(view.poll_invalidations(), [p64(1)])
            self.assertEqual(view.load(p64(1)), (state(2), tid))
            self.assertEqual(view.poll_invalidations(), [])
            self.assertEqual(storage._cache.stats()['log'], 2)


cases(globals(), SameAsFileStorage, Undo, Historical, backends=HISTORY_PRESERVING)
cases(globals(), Wrapped, Bounds)
cases(globals(), Edges, LargeOids, Prefetch, backends=BY_EVERY_DRIVER + PYMYSQL_ON_MYSQL)
cases(globals(), TwoPlaces, backends=MYSQL + tuple(
    backend for backend in HISTORY_PRESERVING + HISTORY_FREE if issubclass(backend, SQLiteBackend)))
cases(globals(), TwoSchemas, backends=tuple(
    backend for backend in HISTORY_PRESERVING + HISTORY_FREE if issubclass(backend, PostgreSQLBackend)))
del Suite, SameAsFileStorage, Undo, Historical, Edges, LargeOids, Prefetch, Wrapped, Bounds
del TwoDatabases, TwoPlaces, TwoSchemas
