"""Polls that are shared with other threads, or saved because nothing was committed."""
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import patch

import ZODB
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, ReadConflictError
from ZODB.utils import z64

import relstore
from relstore.caching import polling
from relstore.caching.polling import AT_ONCE, Polling
from relstore.errors import Unavailable
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)

PATIENCE = 30


class Counter:
    """Counts commits, for storages that are told of it."""

    def __init__(self):
        self.count = 0
        self.asked = 0

    def value(self):
        self.asked += 1
        return self.count


class TestByTurns(unittest.TestCase):

    def setUp(self):
        self.polling = Polling(None, 0)

    def test_an_answer_is_younger_than_the_question(self):
        """Sixteen threads ask for a number that only grows; each gets one as large as it was when it began to ask."""
        newest, wrong, asked = 0, [], []

        def ask():
            asked.append(1)
            seen = newest
            time.sleep(.0005)       # the network
            return seen, 0

        def want():
            nonlocal newest
            for _ in range(100):
                newest += 1
                before = newest
                got, _ = self.polling.by_turns(ask)
                if got < before:
                    wrong.append((got, before))

        with ThreadPoolExecutor(16) as threads:
            for future in [threads.submit(want) for _ in range(16)]:
                future.result(PATIENCE)
        self.assertEqual(wrong, [])
        self.assertEqual(len(asked) + self.polling.saved, 1600)
        self.assertLess(len(asked), 1000)

    def occupied(self, threads, release):
        """Have as many questions under way as may be; return their futures."""
        sent = threading.Semaphore(0)

        def ask():
            sent.release()
            release.wait(PATIENCE)
            return 1, 0

        futures = [threads.submit(self.polling.by_turns, ask) for _ in range(AT_ONCE)]
        for _ in futures:
            self.assertTrue(sent.acquire(timeout=PATIENCE))
        return futures

    def test_so_many_at_once_and_no_more(self):
        release, more = threading.Event(), []
        with ThreadPoolExecutor(2 * AT_ONCE) as threads:
            first = self.occupied(threads, release)
            late = [threads.submit(self.polling.by_turns, lambda: (more.append(1), (2, 0))[1]) for _ in range(AT_ONCE)]
            self.assertEqual(more, [])
            release.set()
            self.assertEqual({future.result(PATIENCE) for future in first}, {(1, 0)})
            self.assertEqual({future.result(PATIENCE) for future in late}, {(2, 0)}, 'sent after they began to ask')

    def test_a_question_that_fails_is_its_own_alone(self):
        release = threading.Event()

        def fail():
            raise ValueError('lost')

        with ThreadPoolExecutor(2 * AT_ONCE) as threads:
            self.occupied(threads, release)
            failing = threads.submit(self.polling.by_turns, fail)
            others = [threads.submit(self.polling.by_turns, lambda: (2, 0)) for _ in range(3)]
            release.set()
            self.assertIsInstance(failing.exception(PATIENCE) or ValueError(), ValueError)
            self.assertEqual({future.result(PATIENCE) for future in others}, {(2, 0)})
        self.assertEqual(self.polling.by_turns(lambda: (3, 0)), (3, 0))

    def test_nobody_waits_for_ever_for_another(self):
        release = threading.Event()
        with patch.object(polling, 'PATIENCE_SECONDS', .05), ThreadPoolExecutor(AT_ONCE) as threads:
            self.occupied(threads, release)
            self.assertEqual(self.polling.by_turns(lambda: (2, 0)), (2, 0))
            release.set()


class TestUnlessKnown(unittest.TestCase):

    def setUp(self):
        self.counter = Counter()
        self.polling = Polling(self.counter, 3600)
        self.asked = self.generation = 0

    def take(self, meanwhile=lambda: None):
        def ask():
            self.asked += 1
            meanwhile()
            return 1, 0
        return self.polling.unless_known(ask, lambda: (5, self.generation))

    def assert_asks(self, count):
        self.asked = 0
        self.take()
        self.assertEqual(self.asked, count)

    def test_what_is_known_is_not_asked(self):
        self.assert_asks(1)
        self.assert_asks(0)
        self.assertEqual(self.take(), (5, 0))
        self.assertEqual(self.polling.saved, 2)

    def test_a_commit_anywhere(self):
        self.take()
        self.counter.count += 1
        self.assert_asks(1)
        self.assert_asks(0)

    def test_a_commit_that_nobody_could_count(self):
        """Of another thread of this process."""
        self.take()
        self.polling.forget()
        self.assert_asks(1)

    def test_a_commit_while_the_question_is_under_way(self):
        """The answer need not show it."""
        def commit():
            self.counter.count += 1
        self.take(meanwhile=commit)
        self.assert_asks(1)
        self.take(meanwhile=self.polling.forget)
        self.assert_asks(0)         # that answer was not the one that was remembered
        self.polling.forget()
        self.take(meanwhile=self.polling.forget)
        self.assert_asks(1)

    def test_news_while_the_question_is_under_way(self):
        """The answer need not show them."""
        self.take(meanwhile=self.polling.forget)
        self.assert_asks(1)
        self.assert_asks(0)

    def test_an_unknown_count(self):
        self.take()
        self.counter.count = None
        self.assert_asks(1)
        self.assert_asks(1)

    def test_another_epoch(self):
        self.take()
        self.polling.forget()
        self.assert_asks(1)

    def test_an_answer_of_an_earlier_generation(self):
        """Another thread has learnt of a new epoch, and began it at an earlier tid, meanwhile."""
        def begin():
            self.generation += 1
            self.polling.forget()
        self.take(meanwhile=begin)
        self.assert_asks(1)
        self.assert_asks(0)

    def test_the_interval_is_over(self):
        self.polling = Polling(self.counter, .02)
        self.take()
        time.sleep(.03)
        self.assert_asks(1)

    def test_a_failure_is_not_remembered(self):
        def fail():
            raise ValueError
        with self.assertRaises(ValueError):
            self.take(meanwhile=fail)
        self.assert_asks(1)

    def test_without_a_counter_all_is_asked(self):
        self.polling = Polling(None, 3600)
        self.assert_asks(1)
        self.assert_asks(1)


class SavedPolls(unittest.TestCase):
    """Two storages on one database, as in two processes, that share a counter."""

    def setUp(self):
        super().setUp()
        self.counter = Counter()
        self.ours = self.enterContext(closing(self.opened()))
        self.theirs = self.enterContext(closing(self.opened()))
        self.oids = [self.theirs.new_oid() for _ in range(3)]
        self.serials = dict.fromkeys(self.oids, z64)
        self.commit(*self.oids)
        self.view = self.ours.new_instance()
        self.addCleanup(self.view.release)
        self.view.poll_invalidations()

    def enterContext(self, manager):        # unittest has it since Python 3.11
        self.addCleanup(manager.__exit__, None, None, None)
        return manager.__enter__()

    def opened(self):
        storage = self.open_storage()
        storage.database.polling = Polling(self.counter, 3600)
        return storage

    def commit(self, *oids, told=True):
        """Commit in the other process. told: did it reach the counter?"""
        txn = TransactionMetaData()
        self.theirs.tpc_begin(txn)
        self.states = dict.fromkeys(oids, b'%d' % (self.counter.count + told))
        for oid in oids:
            self.theirs.store(oid, self.serials[oid], self.states[oid], '', txn)
        self.theirs.tpc_vote(txn)
        tid = self.theirs.tpc_finish(txn)
        self.counter.count += told
        self.serials.update(dict.fromkeys(oids, tid))

    def next_transaction(self):
        self.view.afterCompletion()
        return self.view.poll_invalidations()

    def sent(self):
        return self.ours.cache_stats()['polls_sent']

    def test_an_unchanged_site_is_not_asked(self):
        state = self.view.load(self.oids[0])
        self.assertEqual(self.next_transaction(), [])
        sent = self.sent()
        for _ in range(5):
            self.assertEqual(self.next_transaction(), [])
            self.assertEqual(self.view.load(self.oids[0]), state)
        self.assertEqual(self.sent(), sent)
        self.assertEqual(self.ours.database.pool.lent, 0, 'a session for what is cached')

    def test_a_new_connection_is_not_asked_for_either(self):
        self.next_transaction()
        sent = self.sent()
        other = self.ours.new_instance()
        self.addCleanup(other.release)
        self.assertEqual(other.poll_invalidations(), [])
        self.assertEqual(other.lastTransaction(), self.view.lastTransaction())
        self.assertEqual(self.sent(), sent)

    def test_a_change_is_seen_at_the_next_transaction(self):
        self.next_transaction()
        self.commit(self.oids[0])
        self.assertEqual(self.next_transaction(), [self.oids[0]])
        self.assertEqual(self.view.load(self.oids[0]), (self.states[self.oids[0]], self.serials[self.oids[0]]))

    def test_own_commits_are_seen_though_nobody_counted_them(self):
        self.next_transaction()
        txn = TransactionMetaData()
        self.view.tpc_begin(txn)
        self.view.store(self.oids[0], self.serials[self.oids[0]], b'mine', '', txn)
        self.view.tpc_vote(txn)
        tid = self.view.tpc_finish(txn)
        self.assertEqual(self.view.load(self.oids[0]), (b'mine', tid))
        self.next_transaction()
        self.assertEqual(self.view.load(self.oids[0]), (b'mine', tid))
        other = self.ours.new_instance()
        self.addCleanup(other.release)
        other.poll_invalidations()
        self.assertEqual(other.load(self.oids[0]), (b'mine', tid))

    def test_a_commit_that_was_not_counted_does_not_mix_views(self):
        """It is not seen; and what the database knows no more as it was is a conflict."""
        self.next_transaction()
        old = {oid: self.serials[oid] for oid in self.oids}
        self.commit(self.oids[0], told=False)
        self.assertEqual(self.next_transaction(), [])
        self.assertEqual(self.view.load(self.oids[1])[1], old[self.oids[1]])
        if self.keep_history:
            self.assertEqual(self.view.load(self.oids[0])[1], old[self.oids[0]])
        else:
            with self.assertRaises(ReadConflictError):
                self.view.load(self.oids[0])
        self.assertEqual(self.view.load(self.oids[2])[1], old[self.oids[2]], 'in the snapshot that is open now')

    def test_a_retry_after_a_conflict_asks(self):
        """Nobody has counted what it has met; else each retry would fail as the first one did."""
        def change(txn):
            self.view.store(self.oids[0], self.view.load(self.oids[0])[1], b'mine', '', txn)

        def rely(txn):
            self.view.checkCurrentSerialInTransaction(self.oids[0], self.view.load(self.oids[0])[1], txn)
            self.view.store(self.view.new_oid(), z64, b'new', '', txn)

        for work in change, rely:
            with self.subTest(work.__name__):
                self.next_transaction()
                self.view.load(self.oids[0])
                self.commit(self.oids[0], told=False)
                self.next_transaction()
                with self.assertRaises(ConflictError):
                    self.attempt(work)
                self.next_transaction()
                self.attempt(work)
                self.serials[self.oids[0]] = self.theirs.getTid(self.oids[0])

    def attempt(self, work):
        txn = TransactionMetaData()
        self.view.tpc_begin(txn)
        try:
            work(txn)
            self.view.tpc_vote(txn)
            self.view.tpc_finish(txn)
        finally:
            self.view.tpc_abort(txn)

    def test_a_commit_between_the_view_and_its_first_miss(self):
        self.next_transaction()
        self.next_transaction()
        old = {oid: self.serials[oid] for oid in self.oids}
        self.commit(self.oids[0])
        self.assertEqual(self.view.load(self.oids[1])[1], old[self.oids[1]])
        self.commit(self.oids[2])
        if self.view.database.adapter.reads_in_snapshot:    # it stands where it was opened
            self.assertEqual(self.view.load(self.oids[2])[1], old[self.oids[2]])
        if self.keep_history:
            self.assertEqual(self.view.load(self.oids[0])[1], old[self.oids[0]])
        else:
            with self.assertRaises(ReadConflictError):
                self.view.load(self.oids[0])
        self.assertEqual(sorted(self.next_transaction()), sorted([self.oids[0], self.oids[2]]))
        for oid in self.oids:
            self.assertEqual(self.view.load(oid)[1], self.serials[oid])

    def test_no_snapshot_beside_a_commit(self):
        """An instance holds one session at most, and its commit will need that."""
        self.next_transaction()
        self.next_transaction()
        txn = TransactionMetaData()
        self.view.tpc_begin(txn)
        self.view.load(self.oids[1])
        self.assertEqual(self.ours.database.pool.lent, 0)
        self.view.tpc_abort(txn)

    def test_an_object_that_never_was(self):
        self.next_transaction()
        self.next_transaction()
        with self.assertRaises(KeyError):
            self.view.load(b'\0\0\0\x01\0\0\0\0')


class Unanswered(unittest.TestCase):
    """The server goes just when ZODB polls inside of commit() or open(), as it does for implicit managers."""

    def setUp(self):
        super().setUp()
        self.proxy = self.new_proxy()
        self.proxy.start()
        self.addCleanup(self.proxy.stop)
        self.db = ZODB.DB(relstore.RelStore(self.address_through(self.proxy), keep_history=self.keep_history))
        self.addCleanup(self.db.close)      # KeyError, if ZODB lost a connection

    def test_a_commit_that_is_done_does_not_fail(self):
        manager = TransactionManager()
        connection = self.db.open(manager)
        other = connection.root()['other'] = PersistentMapping()
        manager.commit()
        connection.root()['count'] = 1
        tpc_finish = connection._storage.tpc_finish

        def finish(*arguments):
            tid = tpc_finish(*arguments)
            self.proxy.stop()
            return tid

        with patch.object(connection._storage, 'tpc_finish', finish):
            manager.commit()
        self.assertEqual(connection.root()['count'], 1)
        self.db.storage.database.cache.clear()
        other._p_deactivate()
        for _ in range(2):
            with self.assertRaisesRegex(Unavailable, 'could not be asked when this transaction began'):
                other._p_activate()
        with self.assertRaises(Unavailable):
            manager.begin()
        with closing(self.open_storage()) as storage:
            change(storage, other._p_oid)
        self.proxy.start()
        with self.assertRaisesRegex(Unavailable, 'could not be asked when this transaction began'):
            other._p_activate()
        for _ in range(2):      # one more, to abort the one that failed to begin
            manager.abort()
        manager.begin()
        self.assertEqual(connection.root()['count'], 1)
        self.assertEqual(dict(other), {'changed': True})
        manager.abort()
        connection.close()

    def test_the_view_before_is_no_more(self):
        """Not even for what is cached."""
        with self.db.transaction() as connection:
            oid = connection.root()._p_oid
        view = self.db.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        view.load(oid)
        view.afterCompletion()
        self.proxy.stop()
        view.sync(False)
        self.assertEqual(view.poll_invalidations(), [])
        with self.assertRaises(Unavailable):
            view.load(oid)
        self.proxy.start()

    def test_no_connection_is_lost(self):
        self.proxy.stop()
        for _ in range(3):
            manager = TransactionManager()
            connection = self.db.open(manager)
            connection.cacheMinimize()
            self.db.storage.database.cache.clear()
            with self.assertRaises(Unavailable) as caught:
                connection.root()._p_activate()
            self.assertIsInstance(caught.exception, TransientError)
            manager.abort()
            connection.close()
        self.proxy.start()
        with self.db.transaction() as connection:
            connection.root()['count'] = 1
        self.assertEqual(self.db.storage.database.pool.lent, 0)


def change(storage, oid):
    """Let another process change the mapping."""
    with closing(ZODB.DB(storage)) as db, db.transaction() as connection:
        connection.get(oid)['changed'] = True


cases(globals(), Unanswered, backends=(
    Psycopg2HistoryPreserving, Psycopg2HistoryFree, MySQLdbHistoryPreserving, MySQLdbHistoryFree))
cases(globals(), SavedPolls, backends=(
    SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving, Psycopg2HistoryFree,
    MySQLdbHistoryPreserving, MySQLdbHistoryFree))
del SavedPolls, Unanswered
