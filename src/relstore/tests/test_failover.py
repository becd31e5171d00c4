"""Servers are restarted, killed and replaced, connections ended by them: the application goes on without a restart.

A transaction that was under way may meet a TransientError; the next one works, and nobody who was between two
transactions notices.
"""
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from unittest import TestCase

from psycopg2.extensions import make_dsn, parse_dsn
from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.tests.MinPO import MinPO
from ZODB.utils import u64, z64

import relstore
from relstore.sessions.session import Session
from relstore.tests.support.backends import (
    PGBOUNCER,
    MySQLBackend,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    PyMySQLHistoryFree,
    cases,
)
from relstore.tests.support.commits import voted
from relstore.tests.support.objects import exists
from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.records import state
from relstore.tests.support.servers import (
    PgBouncerServer,
    PostgreSQLServer,
    Server,
    StandbyServer,
    postgresql_programs,
    require_pgbouncer,
    require_postgresql,
)
from relstore.tests.support.watch import Watch


class PrimaryLayer:
    """A server of our own to be replaced: each test that promotes another leaves that here."""

    server: PostgreSQLServer | None = None

    @classmethod
    def setUp(cls):
        if postgresql_programs():
            # What is acknowledged was written, and only then streamed; nothing has to survive the machine.
            cls.server = PostgreSQLServer({'synchronous_commit': 'on'})
            cls.server.start()

    @classmethod
    def tearDown(cls):
        if cls.server is not None:
            cls.server.stop()
            cls.server = None


class Application:
    """What goes on running: a database connection of ZODB's, and a record in it."""

    def __init__(self, storage: relstore.RelStore):
        self.storage, self.db = storage, DB(storage)
        self.manager = TransactionManager(explicit=True)
        self.connection = self.db.open(self.manager)

    @property
    def record(self) -> MinPO:
        return self.connection.root()['record']

    def create(self) -> None:
        with self.manager:
            self.connection.root()['record'] = MinPO(0)

    def read(self) -> int:
        with self.manager:
            return self.record.value

    def write(self, value: int) -> None:
        with self.manager:
            self.record.value = value

    def close(self) -> None:
        self.connection.close()
        self.db.close()


@dataclass(frozen=True)
class Route:
    """How clients find the server that may be written."""
    # Both servers are named in the dsn ('hosts'), or a proxy or pgbouncer ('pooler') is switched over; 'held' is a
    # proxy whose answers can be held back.
    way: str
    driver: str
    keep_history: bool

    def __str__(self) -> str:
        return f'{self.way}_{self.driver}_{"hp" if self.keep_history else "hf"}'


HOSTS = [Route('hosts', driver, keep_history) for driver in ('psycopg2', 'psycopg') for keep_history in (True, False)]
SWITCHED = [Route('proxy', 'psycopg2', True), Route('proxy', 'psycopg', False),
            Route('pooler', 'psycopg2', False), Route('pooler', 'psycopg', True)]
HELD = [Route('held', 'psycopg2', True), Route('held', 'psycopg', False)]

# What an application meets, up to each act of a failover. It is given a function that opens the storage.
Story = Iterator[None]


class Promoted(TestCase):
    """The primary goes, and a standby takes its place: one that has everything, or lacks the last commits."""

    layer = PrimaryLayer

    def setUp(self):
        require_postgresql(self)
        require_pgbouncer(self)
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.primary = self.layer.server
        self.stream, self.proxy, self.held = (
            self.stack.enter_context(CuttingProxy(self.primary.address)) for _ in range(3))
        self.standby = StandbyServer(self.primary, self.stream.port)
        self.stack.callback(self._succeed)
        self.standby.start()
        self.bouncer = PgBouncerServer(self.primary, {'query_wait_timeout': 1})
        self.stack.callback(self.bouncer.stop)
        self.bouncer.start()

    def _succeed(self):
        """The next test begins where this one has ended, unless the old server is there still."""
        old = self.standby
        if self.primary.process is None:
            self.layer.server, old = self.standby, self.primary
        old.stop()

    def _dsn(self, route: Route, database: str) -> str:
        direct = self.primary.dsn(database)
        if route.way in ('proxy', 'held'):
            return self.primary.tcp_dsn(database, getattr(self, route.way).port)
        if route.way == 'pooler':
            return self.bouncer.dsn(direct)
        both = [parse_dsn(server.dsn(database)) for server in (self.primary, self.standby)]
        return make_dsn(direct, host=','.join(where['host'] for where in both), target_session_attrs='read-write',
                        port=','.join(where['port'] for where in both))

    def _play(self, scenes: Mapping[Callable[..., Story], list[Route]], *acts: Callable[[], None]) -> None:
        """Tell each story for each of its routes up to its first yield; then comes the first act, and so on."""
        with ExitStack() as stack:
            def opened(route, database):
                address = relstore.PostgreSQL(self._dsn(route, database), driver=route.driver)
                return stack.enter_context(closing(relstore.RelStore(
                    address, keep_history=route.keep_history, commit_lock_timeout=10)))

            told = {}
            for story, route in [(story, route) for story, routes in scenes.items() for route in routes]:
                database = f'{len(acts)}{story.__name__}_{route}'
                self.primary.create_database(database)
                told[database] = story(partial(opened, route, database))
            for act in (*acts, lambda: None):
                for database, story in told.items():
                    with self.subTest(database):
                        next(story, None)
                act()

    def _switch(self):
        """Those between lead to the standby, promoted or not."""
        for proxy in self.proxy, self.held:
            proxy.target = self.standby.address
            proxy.cut()
        self.bouncer.lead_to(self.standby)

    def test_killed(self):
        """The standby lacks what the primary has acknowledged last, and is a while in coming."""
        def isolate():
            self.standby.catch_up()
            self.stream.pause()

        def kill():
            self.primary.kill()
            self._switch()

        self._play({self.lost_commit: HOSTS + SWITCHED, self.lost_answer_and_commit: HELD},
                   isolate, kill, self.standby.promote)

    def lost_commit(self, opened) -> Story:
        """It was acknowledged, seen and cached. Nothing that was derived from it can be stored."""
        busy, other, late = (Application(opened()) for _ in range(3))
        busy.create()
        self.assertEqual([other.read(), late.read()], [0, 0])
        epoch = busy.storage.database.epochs.now
        yield
        busy.write(1)
        self.assertEqual(other.read(), 1)
        late.manager.begin()
        late.record.value += 10
        view = busy.storage.new_instance()
        view.poll_invalidations()
        mine = view.new_oid()
        txn = voted(view, (mine, z64, state(1)))
        yield
        for _ in range(2):
            with self.assertRaises(TransientError):     # the only server cannot be written
                other.read()
            other.manager.abort()
        other.storage.database.oids.forget()
        with self.assertRaises(TransientError):
            other.storage.new_oid()
        yield
        with self.assertRaises(TransientError):
            late.manager.commit()
        late.manager.abort()
        with self.assertRaises(TransientError):
            view.tpc_finish(txn)
        view.tpc_abort(txn)
        self.assertFalse(exists(busy.storage, mine))
        self.assertEqual([app.read() for app in (busy, other, late)], [0, 0, 0])
        for n, app in enumerate((other, busy, late), 1):
            app.write(n)
            self.assertNotEqual(app.storage.database.epochs.now, epoch)
        self.assertEqual([app.read() for app in (busy, other, late)], [3, 3, 3])
        view.release()
        for app in busy, other, late:
            self.assertEqual(app.storage.database.pool.lent, 0)
            app.close()

    def lost_answer_and_commit(self, opened) -> Story:
        """Who commits learns from the next primary what became of it."""
        commit = self._commit_without_answer(opened())
        yield next(commit)
        yield next(commit)
        self.held.resume()      # it asks the standby, which does not know yet
        yield
        finish, there = next(commit)
        self.assertFalse(there)
        self.assertIsInstance(finish.exception(30), TransientError)

    def test_shut_down(self):
        """In order, so the standby has everything."""
        def replace():
            self.primary.shut_down()
            self.standby.promote()
            self._switch()

        self._play({self.between_transactions: HOSTS + SWITCHED, self.lost_answer: HELD}, lambda: None, replace)

    def between_transactions(self, opened) -> Story:
        """Who is idle notices nothing, though none of its sessions lives."""
        busy, idle = (Application(opened()) for _ in range(2))
        busy.create()
        idle.write(1)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(idle.storage.database.pool.session())
        yield
        busy.manager.begin()
        busy.record.value += 1
        yield
        with idle.manager:
            idle.record.value += 1
        with self.assertRaises(TransientError):
            busy.manager.commit()
        busy.manager.abort()
        self.assertEqual(busy.read(), 2)
        busy.write(3)
        self.assertEqual(idle.read(), 3)
        for app in busy, idle:
            self.assertEqual(app.storage.database.pool.lent, 0)
            app.close()

    def lost_answer(self, opened) -> Story:
        commit = self._commit_without_answer(opened())
        yield next(commit)
        yield next(commit)
        finish, there = next(commit)
        self.assertTrue(there)
        self.assertIsInstance(finish.result(30), bytes)

    def _commit_without_answer(self, storage) -> Iterator:
        """Vote; finish, whose answer is held back; yield what it came to at last, and whether the object is there."""
        oid = storage.new_oid()
        txn = voted(storage, (oid, z64, state(1)))
        yield
        with ThreadPoolExecutor(1) as threads:
            self.held.pause(sent=False)
            finish = threads.submit(storage.tpc_finish, txn)
            with closing(Watch(self.primary.dsn(storage.database.adapter._database))) as watch:
                watch.until('EXISTS (SELECT FROM object_state WHERE zoid = %s)', u64(oid))
            self.assertFalse(finish.done())
            yield
            self.held.resume()
            finish.exception(30)
        self.assertEqual(storage.database.pool.lent, 0)
        yield finish, exists(storage, oid)


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage(commit_lock_timeout=10)
        self.app = Application(self.storage)
        self.addCleanup(self.app.close)
        self.app.create()
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)
        self._several_sessions()

    def _several_sessions(self) -> None:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(self.storage.database.pool.session())

    def _voted(self) -> tuple:
        """Return an instance that has voted, and its transaction, which creates an object."""
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        return view, voted(view, (view.new_oid(), z64, state(1)))

    def _is_told(self, finish: Callable[[], object]) -> None:
        """finish() does not, and says so; the next transaction works, and is the only one there."""
        before = len(self.storage)
        with self.assertRaises(TransientError):
            finish()
        self._goes_on()
        self.assertEqual(len(self.storage), before)

    def _goes_on(self) -> None:
        self.value = self.app.read() + 1
        self.app.write(self.value)
        with closing(Application(self.open_storage())) as fresh:
            self.assertEqual(fresh.read(), self.value)
        self.watch.until_nothing_is_open()


class Ended(Suite):
    """Somebody ends all connections at once."""

    def test_idle(self):
        """They are noticed before they are used: the first attempt to write succeeds, and nothing is logged."""
        with self.assertNoLogs('relstore', 'WARNING'):
            self.watch.terminate_all()
            self.app.write(1)
            self._several_sessions()
            self.app.manager.begin()
            self.app.record.value += 1
            self.watch.terminate_all()      # after the poll, so it is the vote that meets them
            self.app.manager.commit()
            self.assertEqual(self.app.read(), 2)
            self._several_sessions()
            self.watch.terminate_all()
            self.storage.database.oids.forget()
            self.storage.new_oid()

    def test_reading(self):
        """Where history is kept, another session shows the same."""
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        self.watch.terminate_all()
        self.storage.database.cache.clear()
        if self.keep_history:
            view.load(z64)
        else:
            with self.assertRaises(TransientError):
                view.load(z64)
        view.afterCompletion()
        self._goes_on()

    def test_voted(self):
        view, txn = self._voted()
        self.watch.terminate_all()
        self._is_told(lambda: view.tpc_finish(txn))

    def test_finishing(self):
        view, txn = self._voted()
        with ThreadPoolExecutor(1) as threads:
            self.watch.take_commit_lock()
            finish = threads.submit(view.tpc_finish, txn)
            self.watch.until_somebody_waits()
            self.watch.terminate_all()
            finish.exception(30)
            self.watch.release_commit_lock()
        self._is_told(finish.result)


class Expired(Suite):
    """The server ends those that are idle for too long."""

    def _expire(self, sessions: Iterable[Session]) -> None:
        for session in sessions:        # by one statement: it may strike before another one comes
            setting = ('wait_timeout = 1' if isinstance(self, MySQLBackend) else
                       "idle_in_transaction_session_timeout = '20ms'" if session.in_transaction else
                       "idle_session_timeout = '20ms'")
            session.run(f'SET SESSION {setting}')
        self.watch.until(lambda: not self.watch.connections())

    def test_idle_and_voted(self):
        view, txn = self._voted()
        self._expire([*self.storage.database.pool.idle, view.committing.session])
        with self.assertNoLogs('relstore', 'WARNING'):
            self.app.write(1)
            self._is_told(lambda: view.tpc_finish(txn))


class Restarted(Suite):
    """The server is shut down in order, and comes back."""

    def test_the_next_transaction_works(self):
        if not isinstance(self.layer.server, Server):
            self.skipTest('a staging server is not restarted')
        view, txn = self._voted()
        reader = self.storage.new_instance()
        self.addCleanup(reader.release)
        reader.poll_invalidations()
        reader.load(z64)
        self.layer.server.restart()
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)
        self.app.write(5)
        self.assertEqual(self.app.read(), 5)
        self._is_told(lambda: view.tpc_finish(txn))
        reader.afterCompletion()
        reader.poll_invalidations()
        self.assertEqual(reader.load(z64), self.storage.load(z64))
        reader.afterCompletion()


DIRECT = (Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree,
          MySQLdbHistoryPreserving, PyMySQLHistoryFree)
cases(globals(), Ended, backends=DIRECT + PGBOUNCER)
cases(globals(), Expired, backends=DIRECT)
cases(globals(), Restarted, backends=DIRECT[1:3] + DIRECT[4:])
del Suite, Ended, Expired, Restarted
