"""The pool lends a bounded number of sessions, and takes back what it should keep."""
import threading
import unittest
from contextlib import closing

from psycopg2.extensions import make_dsn

import relstore
from relstore.errors import Disconnected, LockTimeout, Unavailable
from relstore.sessions.pool import SessionPool
from relstore.tests.support.backends import (
    Psycopg2HistoryPreserving,
    Psycopg3HistoryPreserving,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.patience import within


class Pool(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.open_storage().close()
        self.adapter = self.address().bind(self.keep_history)
        self.pool = SessionPool(self.adapter.connect, size=2, timeout=0.2)
        self.addCleanup(self.pool.close)

    def test_a_session_that_came_back_is_lent_again(self):
        with self.pool.session() as first:
            self.assertEqual(self.pool.lent, 1)
        with self.pool.session() as second:
            self.assertIs(first, second)
        self.assertEqual(self.pool.lent, 0)

    def test_no_more_than_its_size(self):
        with self.pool.session(), self.pool.session(), self.assertRaisesRegex(Unavailable, 'All 2 database sessions'):
            self.pool.borrow()
        with self.pool.session(), self.pool.session():
            self.assertEqual(self.pool.lent, 2)

    def test_who_waits_gets_what_comes_back(self):
        pool = SessionPool(self.adapter.connect, size=1, timeout=30)
        self.addCleanup(pool.close)
        session, got = pool.borrow(), []
        thread = threading.Thread(target=lambda: got.append(pool.borrow()))
        thread.start()
        for _ in within('somebody waits for a session'):
            self.assertTrue(thread.is_alive())
            if pool._waiting:
                break
        pool.give_back(session)
        thread.join(10)
        self.assertEqual(got, [session])
        pool.give_back(session)

    def test_never_more_sessions_than_size_under_threads(self):
        pool = SessionPool(self.adapter.connect, size=3, timeout=30)
        self.addCleanup(pool.close)
        lock, lent, most = threading.Lock(), set(), [0]

        def work():
            for _ in range(300):
                with pool.session() as session:
                    with lock:
                        self.assertNotIn(session, lent)
                        lent.add(session)
                        most[0] = max(most[0], len(lent))
                    session.one('SELECT 1')
                    with lock:
                        lent.remove(session)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual((pool.lent, lent), (0, set()))
        self.assertLessEqual(most[0], 3)

    def test_an_open_transaction_is_rolled_back(self):
        with self.pool.session() as session:
            session.run('BEGIN')
        self.assertFalse(session.in_transaction)

    def test_retired_sessions_are_not_lent_again(self):
        with self.pool.session() as lent:
            with self.pool.session() as idle:
                self.assertIsNot(idle, lent)
            self.pool.retire()
            self.assertEqual((idle.broken, lent.broken), (True, False))
            with self.pool.session() as new:
                self.assertIsNot(new, idle)
        self.assertTrue(lent.broken)
        with self.pool.session() as later:
            self.assertIs(later, new)

    def test_a_dead_session_is_tried_once_more_on_a_new_one(self):
        with self.pool.session() as session:
            session._connection.close()     # as a server does: nobody here is told
        self.assertEqual(self.pool.attempt(lambda s: s.one('SELECT 1')), (1,))
        self.assertEqual(self.pool.lent, 0)

    def test_a_failing_work_keeps_no_session(self):
        def fail(session):
            raise Disconnected('again and again')

        self.assertRaises(Disconnected, self.pool.attempt, fail)
        self.assertEqual(self.pool.lent, 0)

    def test_a_closed_pool_lends_nothing(self):
        with self.pool.session() as lent:
            self.pool.close()
        self.assertTrue(lent.broken)
        self.assertRaises(Unavailable, self.pool.borrow)


class Cancelled(unittest.TestCase):

    def test_a_statement_timeout_is_no_lock_timeout(self):
        self.open_storage().close()
        address = relstore.PostgreSQL(make_dsn(self.dsn(), options='-c statement_timeout=50'), driver=self.driver)
        adapter = address.bind(self.keep_history)
        with closing(adapter.connect()) as session, self.assertRaises(Unavailable) as caught:
            session.all('SELECT pg_sleep(60)')
        self.assertNotIsInstance(caught.exception, LockTimeout)
        self.assertIn('statement timeout', str(caught.exception))


cases(globals(), Pool, backends=(SQLiteHistoryPreserving,))
cases(globals(), Cancelled, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryPreserving), each_driver=True)
del Pool, Cancelled
