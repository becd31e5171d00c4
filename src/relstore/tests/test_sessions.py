"""Sessions with the server: none is held between transactions, and who waits for one keeps nobody else waiting."""
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from transaction import TransactionManager
from ZODB import DB

from relstore.adapters import addresses, base
from relstore.errors import Unavailable
from relstore.sessions.session import Session
from relstore.tests.support.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.patience import within

POSTGRESQL = Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree
CONNECTIONS = 100
THREADS = 4


class Suite(TestCase):

    def opened(self, **options) -> DB:
        db = DB(self.open_storage(**options), pool_size=2 * CONNECTIONS)
        self.addCleanup(db.close)
        with db.transaction() as connection:
            connection.root()['n'] = 0
        return db


class Opening(Suite):

    def test_one_connection_is_made(self):
        """To begin one is what takes the server longest."""
        made = []
        self.open_storage().close()
        with patch.object(addresses, 'Session', lambda *arguments: made.append(arguments) or Session(*arguments)):
            storage = self.open_storage()
        self.assertEqual(len(made), 1)
        with closing(self.new_watch()) as watch:
            self.assertEqual(watch.connections(), 1)
            self.assertEqual(storage.database.pool._total, 1)
            storage.close()
            watch.until(lambda: not watch.connections())

    def test_none_is_left_where_it_fails(self):
        self.open_storage().close()
        with patch.object(base.Adapter, 'meta', side_effect=Unavailable('by this test')), \
                self.assertRaises(Unavailable):
            self.open_storage()
        with closing(self.new_watch()) as watch:
            watch.until(lambda: not watch.connections())


class Idle(Suite):
    """A hundred connections of ZODB between their transactions."""

    def setUp(self):
        super().setUp()
        self.db = self.opened()
        self.pool = self.db.storage.database.pool
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)

    def _opened(self, explicit=True):
        managers = [TransactionManager(explicit=explicit) for _ in range(CONNECTIONS)]
        return [(manager, self.db.open(manager)) for manager in managers]

    def _use(self, n, manager, connection):
        with manager:
            connection.root()['n']
            connection.cacheMinimize()
            if n % 4 == 0:
                connection.root()['n'] = n

    def _nothing_is_held(self, sessions: int):
        self.assertEqual(self.pool.lent, 0)
        self.watch.until_nothing_is_open()
        self.assertLessEqual(self.watch.connections(), sessions)

    def test_open_between_transactions(self):
        opened = self._opened()
        self._nothing_is_held(1)
        for n, each in enumerate(opened):
            self._use(n, *each)
        self._nothing_is_held(1)    # one transaction at a time has run
        self._in_threads(opened)
        self._nothing_is_held(THREADS)
        for _, connection in opened:
            connection.close()
        self._nothing_is_held(THREADS)

    def _in_threads(self, opened):
        start = threading.Barrier(THREADS)

        def work(some):
            start.wait(30)
            for manager, connection in some:
                manager.begin()
                connection.root()['n']
                connection.cacheMinimize()
                connection.root()['n']
                manager.abort()

        with ThreadPoolExecutor(THREADS) as threads:
            for job in [threads.submit(work, opened[n::THREADS]) for n in range(THREADS)]:
                job.result(60)

    def test_closed(self):
        """Of a manager that begins transactions by itself, too: ZODB polls then when a connection is opened."""
        for explicit in (True, False):
            for n in range(CONNECTIONS):
                manager = TransactionManager(explicit=explicit)
                with closing(self.db.open(manager)) as connection:
                    self._use(n, manager, connection)
            self._nothing_is_held(1)


class IdleWithHistory(Idle):
    """With history no transaction is needed to read, whether one began or not."""

    test_closed = test_open_between_transactions = None

    def test_open_in_transactions(self):
        opened = self._opened(explicit=False)
        for _, connection in opened:
            connection.root()['n']
        self._nothing_is_held(1)
        for n, each in enumerate(opened):
            self._use(n, *each)
        self._nothing_is_held(1)
        for _, connection in opened:
            connection.close()


class Exhausted(Suite):
    """All sessions are lent, and somebody waits for one."""

    def setUp(self):
        super().setUp()
        self.db = self.opened(pool_size=2, pool_timeout=60)
        self.pool = self.db.storage.database.pool
        self.lent = [self.pool.borrow() for _ in range(2)]
        self.addCleanup(self._give_back)
        self.threads = ThreadPoolExecutor(4)
        self.addCleanup(self.threads.shutdown)
        self.addCleanup(self._give_back)        # first of all, so that nobody waits

    def _give_back(self):
        while self.lent:
            self.pool.give_back(self.lent.pop())

    def _waiting(self, work):
        """Start a thread that has to wait for a session; return its future, once it waits."""
        before = self.pool._waiting
        future = self.threads.submit(work)
        for _ in within('somebody waits for a session'):
            self.assertFalse(future.done())
            if self.pool._waiting != before:
                return future

    def test_others_can_open_and_close(self):
        waiting = [self._waiting(lambda: self.db.open(TransactionManager()).close()),       # polls at once
                   self._waiting(self.db.storage.lastTransaction)]
        self.threads.submit(lambda: self.db.open(TransactionManager(explicit=True)).close()).result(20)
        self.threads.submit(self.db.connectionDebugInfo).result(20)
        self.assertEqual([future.done() for future in waiting], [False, False])
        self._give_back()
        for future in waiting:
            future.result(20)
        self.assertEqual(self.pool.lent, 0)

    def test_who_wants_oids_does_not_wait_for_everybody_before(self):
        storage = self.opened(pool_size=2, pool_timeout=0.5).storage
        storage.database.oids.forget()
        with storage.database.pool.session(), storage.database.pool.session(), ThreadPoolExecutor(10) as threads:
            started = time.monotonic()
            for waiting in [threads.submit(storage.new_oid) for _ in range(10)]:
                self.assertIsInstance(waiting.exception(20), Unavailable)
            self.assertLess(time.monotonic() - started, 2.5)    # not 10 times as long as one
        storage.new_oid()

    def test_it_is_told_after_a_while(self):
        self.pool._timeout = 0.1
        for explicit in (True, False):
            manager = TransactionManager(explicit=explicit)

            def work():
                connection = self.db.open(manager)
                manager.begin()
                connection.root()['n']

            with self.assertRaisesRegex(Unavailable, 'pool-size') as raised:
                work()
            self.assertTrue(manager._retryable(type(raised.exception), raised.exception))
        self._give_back()
        gc.collect()        # DB.close() fails on a connection whose open() has failed, while there is one
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['n'], 0)
        self.assertEqual(self.pool.lent, 0)


cases(globals(), Opening, backends=POSTGRESQL)
cases(globals(), Idle, backends=POSTGRESQL + MYSQL)
cases(globals(), IdleWithHistory, backends=POSTGRESQL[::2] + MYSQL[::2])
cases(globals(), Exhausted, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree, *POSTGRESQL[:2]))
del Suite, Opening, Idle, IdleWithHistory, Exhausted
