"""Edges: the largest and the smallest, nothing, twice, and many at once."""
import random
from contextlib import contextmanager
from unittest import mock

from BTrees.OOBTree import OOBTree
from psycopg2.extensions import make_dsn
from ZODB.BaseStorage import TransactionRecord
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import (
    POSKeyError,
    ReadConflictError,
    ReadOnlyError,
)
from ZODB.tests.MinPO import MinPO
from ZODB.utils import maxtid, p64, u64, z64

import relstore
from relstore.errors import StorageError, Unavailable
from relstore.tests.support import sent
from relstore.tests.support.backends import (
    HISTORY_FREE,
    HISTORY_PRESERVING,
    PYMYSQL_ON_MYSQL,
    PostgreSQLBackend,
    cases,
)
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.records import state
from relstore.tests.support.storage_suite import FIRST_TID, Suite


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
            b'\0', b"'%s' {} ? \\x00 $1", bytes(range(256)), random.Random(1).randbytes(70_000), '✓'.encode()]
        states += [b''] if self.takes_empty_records else []
        oids = [p64(n + 1) for n in range(len(states))]
        self.commit(*[lambda txn, oid=oid, data=data: self.storage.store(oid, z64, data, '', txn)
                      for oid, data in zip(oids, states, strict=True)])
        fresh = self.opened_again()
        for oid, data in zip(oids, states, strict=True):
            self.assertEqual(fresh.load(oid)[0], data)
        [txn] = fresh.iterator()
        self.assertEqual([record.data for record in txn], states)

    def opened_again(self):
        storage = self.open_storage()
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
        self.where = self.address()
        if isinstance(self, PostgreSQLBackend):
            # Counting up to the oid would take years, and fill the disk: rather fail.
            self.where = relstore.PostgreSQL(make_dsn(self.dsn(), options='-c statement_timeout=2000'),
                                             driver=self.driver)
        self.storage = relstore.RelStore(self.where, keep_history=self.keep_history)
        self.addCleanup(self.storage.close)

    def test_is_stored_and_new_oids_are_larger(self):
        for oid in p64(2 ** 32), p64(2 ** 40), p64(2 ** 62):
            tid = self.store(oid, state(1))
            self.assertEqual(self.storage.load(oid), (state(1), tid))
            self.assertEqual(self.storage.loadBefore(oid, maxtid), (state(1), tid, None))
            self.assertEqual(self.storage.loadBefore(oid, b'\xff' * 8), (state(1), tid, None))
            self.assertIsNone(self.storage.loadBefore(oid, tid))
            self.assertEqual([txn.tid for txn in self.storage.iterator(tid, b'\xff' * 8)], [tid])
            again = relstore.RelStore(self.where, keep_history=self.keep_history)
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
        messages = []
        with sent.told(lambda text, arguments: messages.append(arguments)):
            yield messages

    @staticmethod
    def statements(messages):
        """Those of what was asked of a driver that have a text."""
        return [arguments for arguments in messages if any(isinstance(argument, str) for argument in arguments)]

    def test_one_statement(self):
        with self.messages() as messages:
            self.view.prefetch([*self.oids, p64(99)])
            self.assertEqual(len(self.statements(messages)), 1, messages)
            for oid in self.oids:
                self.assertEqual(self.view.load(oid)[0], state(u64(oid)))
            self.assertEqual(len(self.statements(messages)), 1, messages)
            self.view.prefetch(self.oids)
            self.view.prefetch([])
            self.assertEqual(len(self.statements(messages)), 1, messages)

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


cases(globals(), Edges, LargeOids, Prefetch,
      backends=HISTORY_PRESERVING + HISTORY_FREE + PYMYSQL_ON_MYSQL + ORACLE)
del Suite, Edges, LargeOids, Prefetch
