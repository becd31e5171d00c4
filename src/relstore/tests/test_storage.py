"""Wrappers, two databases in one place, bounded pools and caches."""
import random
import time
from contextlib import closing

import psycopg2
import transaction
from BTrees.Length import Length
from persistent.mapping import PersistentMapping
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import (
    ConflictError,
    POSKeyError,
    ReadConflictError,
)
from ZODB.tests.MinPO import MinPO
from ZODB.utils import maxtid, p64, u64, z64

import relstore
from relstore.errors import Unavailable
from relstore.references import unpack
from relstore.tests.support.backends import (
    HISTORY_FREE,
    HISTORY_PRESERVING,
    MYSQL,
    PostgreSQLBackend,
    SQLiteBackend,
    cases,
)
from relstore.tests.support.hexadecimal import MVCCHexStorage
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.records import state
from relstore.tests.support.storage_suite import Suite, closing_view


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
        with self.storage.database.pool.session() as session:
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
        again = self.open_storage()
        self.addCleanup(again.close)
        self.assertEqual(self.storage.sortKey(), again.sortKey())

    def test_same_objects_do_not_lock_each_other_out(self):
        """Both have an object 0; it is locked in both at the same time, by different sessions."""
        self.change(1)
        self.storage.database.options.__dict__['commit_lock_timeout'] = 0.5
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
        address = relstore.PostgreSQL(self.dsn(), driver=self.driver, schema='other')
        storage = relstore.RelStore(address, keep_history=self.keep_history)
        self.addCleanup(storage.close)
        return storage


class Bounds(Suite):

    def test_pool_is_exhausted(self):
        storage = self.opened(pool_size=2, pool_timeout=0.05)
        with storage.database.pool.session(), storage.database.pool.session():
            started = time.monotonic()
            with self.assertRaisesRegex(Unavailable, 'pool-size'):
                storage.lastTransaction()
            self.assertGreaterEqual(time.monotonic() - started, 0.05)
        self.assertEqual(storage.lastTransaction(), z64)

    def test_new_instance_never_waits(self):
        """ZODB holds a lock while it makes one: all its threads would wait too."""
        storage = self.opened(pool_size=2, pool_timeout=30)
        with storage.database.pool.session(), storage.database.pool.session():
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
                self.assertEqual(storage.database.pool.lent, 0)
        for name, work in [
                ('load', lambda: storage.load(p64(9))), ('history', lambda: storage.history(p64(9))),
                ('record_iternext', lambda: storage.record_iternext(p64(9)))]:
            with self.subTest(name):
                with self.assertRaises((KeyError, ValueError)):
                    work()
                self.assertEqual(storage.database.pool.lent, 0)

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
        self.assertEqual(storage.database.pool.lent, 0)
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
        self.assertEqual(storage.database.pool.lent, 0)

    def test_idle_connections_hold_no_session(self):
        """Many connections are open in a site, most of them between requests."""
        db = self.database(storage=self.opened(pool_size=2, pool_timeout=0.05), pool_size=20)
        managers = [transaction.TransactionManager(explicit=True) for _ in range(10)]
        connections = [db.open(manager) for manager in managers]
        for manager, connection in zip(managers, connections, strict=True):
            manager.begin()
            connection.root()
            manager.commit()
        self.assertEqual(db.storage.database.pool.lent, 0)
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
        stats = storage.database.cache.stats()
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
            self.assertEqual(storage.database.cache.stats()['log'], 2)


cases(globals(), Wrapped)
cases(globals(), Bounds, backends=HISTORY_PRESERVING + HISTORY_FREE + ORACLE)
cases(globals(), TwoPlaces, backends=MYSQL + tuple(
    backend for backend in HISTORY_PRESERVING + HISTORY_FREE if issubclass(backend, SQLiteBackend)))
cases(globals(), TwoSchemas, backends=tuple(
    backend for backend in HISTORY_PRESERVING + HISTORY_FREE if issubclass(backend, PostgreSQLBackend)))
del Suite, Wrapped, Bounds, TwoDatabases, TwoPlaces, TwoSchemas
