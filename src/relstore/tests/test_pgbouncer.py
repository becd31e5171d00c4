"""pgbouncer in transaction mode stands between: sessions are swapped, their servers go and come back."""
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from unittest import TestCase
from unittest.mock import patch

from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ReadConflictError
from ZODB.utils import z64

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.support.backends import (
    PGBOUNCER,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg2PooledHistoryFree,
    Psycopg2PooledHistoryPreserving,
    Psycopg3HistoryPreserving,
    Psycopg3PooledHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit, voted
from relstore.tests.support.objects import exists
from relstore.tests.support.records import state, value_of
from relstore.tests.support.servers import DurableLayer, PgBouncerServer, require_pgbouncer, require_postgresql
from relstore.tests.support.watch import Watch

BACKEND = 'SELECT pg_backend_pid()'
MODES = [('psycopg2', True), ('psycopg2', False), ('psycopg', True), ('psycopg', False)]


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self.storage, self.other = self.opened(), self.opened()     # as two processes have it

    def opened(self, **options):
        storage = self.open_storage(**{'commit_lock_timeout': 20} | options)
        self.addCleanup(storage.close)
        return storage

    def watching(self) -> Watch:
        """Return a connection past the pooler, which is closed after the test."""
        watch = self.new_watch()
        self.addCleanup(watch.close)
        return watch


class Swapped(Suite):

    def test_one_session_is_served_by_several_servers(self):
        """Of three servers two are kept busy, each time others."""
        served = set()
        with ExitStack() as stack:
            one, *blockers = (stack.enter_context(self.storage.database.pool.session()) for _ in range(3))
            for busy in (0, 1, 2):
                for blocker in blockers[:busy]:
                    blocker.run('BEGIN')
                    blocker.all(BACKEND)
                served |= set(one.all(BACKEND))
                for blocker in blockers[:busy]:
                    blocker.run('ROLLBACK')
        self.assertGreater(len(served), 1)
        self.assertNotIn((one.backend_pid,), served, 'the pooler has made it up')

    def test_more_clients_than_servers(self):
        watch = self.watching()
        with ExitStack() as stack:
            sessions = [stack.enter_context(self.storage.database.pool.session()) for _ in range(20)]
            with ThreadPoolExecutor(20) as threads:
                list(threads.map(lambda session: [session.all(BACKEND) for _ in range(10)], sessions))
            self.assertEqual(watch.connections(), 3)


class Commits(Suite):

    def test_each_is_told_its_own_tid(self):
        """It is carried over the COMMIT of the message, after which the server could serve another."""
        told: dict[bytes, bytes] = {}
        start = threading.Barrier(8)

        def write():
            instance = self.storage.new_instance()
            start.wait(30)
            for n in range(40):
                oid = instance.new_oid()
                told[oid] = commit(instance, (oid, z64, state(n)))
            instance.release()

        with ThreadPoolExecutor(8) as threads:
            for job in [threads.submit(write) for _ in range(8)]:
                job.result(60)
        with closing(relstore.RelStore(relstore.PostgreSQL(self.dsn(), driver=self.driver),
                                       keep_history=self.keep_history)) as direct:
            self.assertEqual({oid: direct.getTid(oid) for oid in told}, told)
        self.assertEqual(len(set(told.values())), 8 * 40)

    def test_the_pool_is_smaller_than_what_commits(self):
        """Whoever waits for a lock keeps a server from the one that holds it: more of them than servers."""
        oid = self.other.new_oid()
        tid = commit(self.other, (oid, z64, state(0)))
        txn = voted(self.other, (oid, tid, state(1)))
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(commit, self.storage.new_instance(), (oid, tid, state(2))) for _ in range(2)]
            self.watching().until_somebody_waits()
            self.other.tpc_finish(txn)
            for job in waiting:
                self.assertIsInstance(job.exception(30), Exception)
        self.assertEqual(value_of(self.other.load(oid)[0]), 1)


class SessionState(Suite):
    """Nothing is left in a server that the next client could find, and nothing is expected there."""

    def _work(self):
        storage = self.storage
        storage.database.adapter.message_size = 50      # transactions are staged
        view = storage.new_instance()
        oids = [view.new_oid() for _ in range(3)]
        tid = commit(view, *((oid, z64, state('x' * 100)) for oid in oids))
        view.poll_invalidations()
        view.prefetch(oids)
        self.assertEqual([value_of(view.load(oid)[0]) for oid in oids], ['x' * 100] * 3)
        view.afterCompletion()
        storage.database.adapter.message_size = 1 << 20
        tid = commit(view, (oids[0], tid, state(1)))
        if self.keep_history:
            commit(view, work=lambda txn: view.undo(tid, txn))
            self.assertEqual(value_of(self.other.load(oids[0])[0]), 'x' * 100)
        self.assertEqual(len(list(self.other.iterator(tid))), 2 if self.keep_history else 1)
        view.release()

    def test_nothing_is_left(self):
        self._work()
        with self.storage.database.pool.session() as session:
            for what, sql in {
                    'prepared statements': 'SELECT name FROM pg_prepared_statements',
                    'cursors': "SELECT name FROM pg_cursors WHERE name <> ''",     # that of this very statement
                    'temporary tables': "SELECT relname FROM pg_class WHERE relpersistence = 't'",
                    'channels': 'SELECT pg_listening_channels()',
                    'locks': "SELECT objid FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
                    # What pgbouncer itself sets for each client, and the variable that carries a tid.
                    'settings': "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name NOT IN "
                                "('application_name', 'client_encoding', 'DateStyle', 'TimeZone', "
                                "'standard_conforming_strings', 'relstore.tid')"}.items():
                with self.subTest(what):
                    self.assertEqual(session.all(sql), [])

    def test_nothing_is_expected(self):
        """All that a session has is discarded after each transaction."""
        bouncer = self.layer.bouncer
        bouncer.ask("SET server_reset_query = 'DISCARD ALL'")
        bouncer.ask('SET server_reset_query_always = 1')
        try:
            self._work()
        finally:
            bouncer.ask('SET server_reset_query_always = 0')


class Prepared(TestCase):
    """Which sessions prepare the statement of a load."""

    through_pooler = False

    def _prepares(self, storage) -> bool:
        oid = storage.new_oid()
        commit(storage, (oid, z64, state(1)))
        view = storage.new_instance()
        view.poll_invalidations()
        view.prefetch([])
        storage.database.cache.clear()
        self.assertEqual(value_of(view.load(oid)[0]), 1)
        with storage.database.pool.session() as session:
            prepared = session.all('SELECT name FROM pg_prepared_statements')
            self.assertEqual(bool(prepared), session.prepared)
            self.assertEqual(session.pooled, self.through_pooler and not session.prepared)
        view.release()
        return bool(prepared)

    def _opened(self, setting):
        storage = relstore.RelStore(self.address(prepared_statements=setting), keep_history=self.keep_history)
        self.addCleanup(storage.close)
        return storage

    def test_auto(self):
        self.assertEqual(self._prepares(self._opened('auto')), not self.through_pooler)

    def test_false(self):
        self.assertFalse(self._prepares(self._opened('false')))

    def test_something_else(self):
        with self.assertRaisesRegex(ConfigurationError, 'auto, true, false'):
            self.address(prepared_statements='perhaps')


class PreparedDirectly(Prepared):

    def test_true(self):
        self.assertTrue(self._prepares(self._opened('true')))


class PreparedThroughPooler(Prepared):
    through_pooler = True

    def test_true(self):
        """The operator vouches that a client keeps its server; in session mode that is so."""
        bouncer = PgBouncerServer(self.layer.server, {'pool_mode': 'session'})
        self.addCleanup(bouncer.stop)
        bouncer.start()
        with patch.object(self.layer, 'bouncer', bouncer):
            self.assertTrue(self._prepares(self._opened('true')))


class Restarts(TestCase):
    """Of the pooler, and of the server behind it."""

    layer = DurableLayer

    def setUp(self):
        require_postgresql(self)
        require_pgbouncer(self)
        self.server = self.layer.server
        # How long a client waits for a server that does not come; 120 s where nothing is said.
        self.bouncer = PgBouncerServer(self.server, {'query_wait_timeout': 3})
        self.addCleanup(self.bouncer.stop)
        self.bouncer.start()

    def on_each(self, work: Callable[[relstore.RelStore, Watch], None], modes=MODES) -> None:
        """Call work(storage through the pooler, watch past it) for each driver and history mode."""
        for driver, keep_history in modes:
            mode = 'hp' if keep_history else 'hf'
            direct = self.server.create_database(f'{self._testMethodName[-40:]}_{driver}_{mode}')
            address = relstore.PostgreSQL(self.bouncer.dsn(direct), driver=driver)
            with (self.subTest(driver=driver, mode=mode),
                  closing(relstore.RelStore(address, keep_history=keep_history, commit_lock_timeout=10)) as storage):
                work(storage, direct)
                self.assertEqual(storage.database.pool.lent, 0)

    def crash(self):
        self.server.kill()
        self.server.start()

    def test_the_next_transaction_works(self):
        def kill_pooler():
            self.bouncer.kill()
            self.bouncer.start()

        def work(storage, direct):
            db = DB(storage)
            manager = TransactionManager(explicit=True)
            connection = db.open(manager)
            for n, disturb in enumerate([self.bouncer.restart, kill_pooler, self.server.restart, self.crash]):
                disturb()
                with manager:
                    connection.root()[n] = n
                with manager:
                    self.assertEqual(connection.root()[n], n)
            connection.close()

        self.on_each(work, MODES[::3])

    def test_what_is_down_is_told_and_comes_back(self):
        def work(storage, direct):
            db = DB(storage)
            for server in self.bouncer, self.server:
                server.kill()
                try:
                    with self.assertRaises(TransientError), db.transaction():
                        raise AssertionError('a transaction began')
                finally:
                    server.start()
                until_it_works(db)

        self.on_each(work, MODES[:1])

    def test_an_open_view_does_not_survive_its_epoch(self):
        """The client's session does, and is served by a server that may have lost what the view has seen."""
        def work(storage, direct):
            oids = [storage.new_oid() for _ in range(4)]
            commit(storage, *((oid, z64, state(0)) for oid in oids))
            storage.database.cache.clear()
            views = [storage.new_instance() for _ in range(3)]
            for view in views:
                view.poll_invalidations()
                view.load(oids[0])
            view, prefetching, late = views
            late.afterCompletion()      # it may still be asked, without a snapshot
            with storage.database.pool.session() as session:
                pid = session.all(BACKEND)
            self.crash()
            cached = storage.database.cache.stats()['objects']
            if storage.database.adapter.keep_history:
                prefetching.prefetch(oids[1:])
                self.assertEqual(storage.database.cache.stats()['objects'], cached)
                self.assertFalse(session.broken)
            else:
                with self.assertRaises(TransientError):
                    prefetching.prefetch(oids[1:])
            for instance, error in (late, ReadConflictError), (view, view_error(storage)):
                with self.assertRaises(error):
                    instance.load(oids[1])
            with storage.database.pool.session() as session:
                self.assertNotEqual(session.all(BACKEND), pid)
            for instance in views:
                instance.afterCompletion()
                self.assertIsNone(instance.poll_invalidations())
                self.assertEqual(value_of(instance.load(oids[1])[0]), 0)
                instance.release()

        self.on_each(work)

    def test_nothing_based_on_a_lost_epoch_is_stored(self):
        def work(storage, direct):
            oid = storage.new_oid()
            tid = commit(storage, (oid, z64, state(0)))
            view = storage.new_instance()
            view.poll_invalidations()
            view.load(oid)
            txn = TransactionMetaData()
            view.tpc_begin(txn)
            view.store(oid, tid, state(1), '', txn)
            self.crash()
            with self.assertRaises(TransientError):
                view.tpc_vote(txn)
            view.tpc_abort(txn)
            self.assertEqual(value_of(storage.load(oid)[0]), 0)
            view.release()

        self.on_each(work, MODES[:2])

    def test_outcome_of_a_commit_whose_pooler_died(self):
        """Its server is an orphan then: it waits for the commit lock still, and will commit, or is ended."""
        def work(storage, direct):
            for ends, patience in ('commits', 60), ('is ended', 0.1):
                oid = storage.new_oid()
                txn = voted(storage, (oid, z64, state(1)))
                with (self.subTest(ends), closing(Watch(direct)) as watch, ThreadPoolExecutor(1) as threads,
                      patch('relstore.adapters.commits.postgresql.ORPHAN_PATIENCE_SECONDS', patience)):
                    watch.take_commit_lock()
                    finish = threads.submit(storage.tpc_finish, txn)
                    watch.until_somebody_waits()
                    self.bouncer.kill()
                    self.bouncer.start()
                    watch.until_outcome_is_asked()
                    if ends == 'commits':
                        watch.release_commit_lock()
                        self.assertEqual(finish.result(30), storage.getTid(oid))
                    else:
                        self.assertIsInstance(finish.exception(30), TransientError)
                        self.assertFalse(exists(storage, oid))

        self.on_each(work, MODES[1:3])


def view_error(storage) -> type[Exception]:
    """Where a view is a snapshot its connection is lost; another one could serve it, but for the epoch."""
    return ReadConflictError if storage.database.adapter.keep_history else TransientError


def until_it_works(db: DB) -> None:
    """Run a transaction, again as long as it is told to."""
    deadline = time.monotonic() + 20
    while True:
        try:
            with db.transaction() as connection:
                connection.root()['there'] = True
            return
        except TransientError:
            if time.monotonic() > deadline:
                raise


cases(globals(), Swapped, backends=PGBOUNCER[:1])
cases(globals(), Commits, backends=PGBOUNCER)
cases(globals(), SessionState, backends=PGBOUNCER, each_driver=True)
cases(globals(), PreparedDirectly, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving))
cases(globals(), PreparedThroughPooler, backends=(
    Psycopg2PooledHistoryPreserving, Psycopg2PooledHistoryFree, Psycopg3PooledHistoryPreserving))
del Suite, Swapped, Commits, SessionState, Prepared, PreparedDirectly, PreparedThroughPooler
