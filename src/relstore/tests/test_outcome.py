"""What became of a commit whose connection was lost; what is lost when the server crashes."""
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from unittest import TestCase
from unittest.mock import patch

from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ReadConflictError
from ZODB.utils import u64, z64

import relstore
from relstore.tests.support.backends import (
    MYSQL,
    MySQLBackend,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.crashing import Crashing
from relstore.tests.support.objects import exists
from relstore.tests.support.records import state, value_of
from relstore.tests.support.server_suite import POSTGRESQL, ServerSuite
from relstore.tests.support.servers import PostgreSQLServer, SharedServer, postgresql_programs, require_postgresql
from relstore.tests.support.watch import Watch


class Outcome(ServerSuite):
    """The connection is lost in finish while the backend, an orphan now, waits for the commit lock."""

    def setUp(self):
        super().setUp()
        self.mine, self.proxy = self.behind_proxy()
        self.third = self.watching()
        self.oids = self.objects(2)
        self.base = self.other.getTid(self.oids[0])

    def _orphaned(self, held_back=False) -> Future:
        txn, _ = self.voted(self.mine, *((oid, self.base, state(1)) for oid in self.oids))
        self.third.take_commit_lock()
        finish = self.started(self.mine.tpc_finish, txn)
        self.watch.until_somebody_waits()
        if held_back:
            self.proxy.pause()      # for the connection that will ask
        self.arrived = self.proxy.sent + self.proxy.received
        self.proxy.cut()
        return finish

    def test_what_is_told_can_be_seen(self):
        """MariaDB lets a commit's locks go a moment before others see it."""
        if not isinstance(self, MySQLBackend):
            self.skipTest('there a commit is seen when its status is told')
        adapter, seen = self.mine.database.adapter, []
        current_tid = adapter.current_tid

        def late(*arguments):
            seen.append(current_tid(*arguments))
            return seen[-1] if len(seen) > 10 else u64(self.base)

        finish = self._orphaned()
        self.watch.until_outcome_is_asked()
        with patch.object(adapter, 'current_tid', late):
            self.third.release_commit_lock()
            tid = finish.result(30)
        self.assertEqual(seen[-1], u64(tid))
        self.assertGreater(len(seen), 10)

    def test_the_orphan_commits_after_we_asked(self):
        finish = self._orphaned()
        self.watch.until_outcome_is_asked()
        self.third.release_commit_lock()
        tid = finish.result(30)
        self.assertEqual([self.other.getTid(oid) for oid in self.oids], [tid, tid])
        commit(self.mine, (self.oids[0], tid, state(2)))

    def test_the_orphan_waits_too_long_and_is_ended(self):
        module = sys.modules[self.storage.database.adapter.commit_type.__module__]
        self.enter(patch.object(module, 'ORPHAN_PATIENCE_SECONDS', 1 if isinstance(self, MySQLBackend) else 0.05))
        finish = self._orphaned()
        with self.assertRaises(TransientError):
            finish.result(30)
        self.third.release_commit_lock()
        self.watch.until_nothing_is_open()
        self.assertEqual([self.other.getTid(oid) for oid in self.oids], [self.base] * 2)
        commit(self.mine, (self.oids[0], self.base, state(2)))

    def test_others_overwrite_it_before_we_ask(self):
        finish = self._orphaned(held_back=True)
        self.third.release_commit_lock()
        self.watch.until('(SELECT max(tid) FROM object_state) > %s', u64(self.base))
        mine = self.other.getTid(self.oids[0])
        theirs = commit(self.other, *((oid, mine, state(2)) for oid in self.oids))
        self.proxy.resume()
        tid = finish.result(30)
        if self.keep_history:
            self.assertEqual(tid, mine)
        self.assertTrue(self.base < tid < theirs)
        view = self.mine.new_instance()
        view.poll_invalidations()
        self.assertEqual([value_of(view.load(oid)[0]) for oid in self.oids], [2, 2])
        view.release()

    def test_the_server_has_no_room_at_first(self):
        """Where connections were lost, all come at once, and there may be as many as it takes."""
        connect, refused = self.mine.database.adapter.connect, []

        def full():
            if len(refused) < 3:
                refused.append(1)
                raise relstore.errors.Unavailable('Too many connections')
            return connect()

        self.mine.lastTransaction()     # there is a session for the commit
        self.enter(patch.object(self.mine.database.pool, '_connect', full))
        finish = self._orphaned()
        self.third.release_commit_lock()
        self.assertEqual(finish.result(30), self.other.getTid(self.oids[0]))
        self.assertEqual(len(refused), 3)

    def test_no_server_can_be_asked(self):
        self.enter(patch('relstore.outcome.OUTCOME_PATIENCE_SECONDS', 0.2))
        finish = self._orphaned(held_back=True)
        # It asks: whichever of client and server speaks first in a new connection.
        self.proxy.wait_until(lambda: self.proxy.sent + self.proxy.received > self.arrived)
        self.proxy.stop()
        with self.assertRaises(relstore.errors.OutcomeUnknown):
            finish.result(60)
        self.third.release_commit_lock()
        self.proxy.start()
        self.watch.until_nothing_is_open()
        self.assertEqual(self.mine.database.pool.lent, 0)


# A server that waits for a standby which never comes, when told to.
GroupCommitLayer = SharedServer(
    'GroupCommitLayer', __name__,
    lambda: PostgreSQLServer({'max_wal_senders': 1}, durable=True) if postgresql_programs() else None,
    require_postgresql)


class GroupCommit(TestCase):
    """A disk that takes as long as the test wants: a commit that waits for a standby is as one that waits for it."""

    layer = GroupCommitLayer

    def setUp(self):
        self.layer.require(self)

    def _hold(self, watch, standby):
        watch.rows(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'")
        watch.rows('SELECT pg_reload_conf()')
        watch.until("current_setting('synchronous_standby_names') = %s", standby)

    def _together(self, driver, keep_history, **options):
        """Two commits wait for the disk; return (how many of them a reader sees, how many wait for a lock)."""
        dsn = self.layer.server.create_database(f'group_{driver}_{keep_history}_{len(options)}')
        with ExitStack() as stack:
            storages = [stack.enter_context(closing(relstore.RelStore(
                relstore.PostgreSQL(dsn, driver=driver, **options), keep_history=keep_history,
                commit_lock_timeout=20))) for _ in range(3)]
            *writers, reader = storages
            watch = stack.enter_context(closing(Watch(dsn)))
            threads = stack.enter_context(ThreadPoolExecutor(2))
            oids = [writer.new_oid() for writer in writers]
            self._hold(watch, 'nobody')
            try:
                commits = [threads.submit(commit, writer, (oid, z64, state(1)))
                           for writer, oid in zip(writers, oids, strict=True)]
                watch.until("(SELECT count(*) FROM pg_stat_activity WHERE wait_event IN ('SyncRep', 'advisory') "
                            'AND datname = current_database()) = 2')
                seen = sum(exists(reader, oid) for oid in oids)
                waiting = watch.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' "
                                    'AND datname = current_database()')
                self.assertEqual([commit.done() for commit in commits], [False, False])
            finally:
                self._hold(watch, '')
            tids = [each.result(30) for each in commits]
            self.assertEqual(sorted(tids), sorted(reader.getTid(oid) for oid in oids))
        return seen, waiting

    def test_the_disk_is_waited_for_together(self):
        """Without the commit lock; and nobody is told of the commit before."""
        for driver in ('psycopg2', 'psycopg'):
            for keep_history in (True, False):
                with self.subTest(driver=driver, keep_history=keep_history):
                    self.assertEqual(self._together(driver, keep_history), (2, 0))

    def test_off(self):
        """One holds the lock until its commit is on disk, and only then is it seen."""
        self.assertEqual(self._together('psycopg2', True, group_commit=False), (0, 1))


class Crash(Crashing):
    """A backend is killed: the server recovers, and what was unlogged is empty."""

    def test_a_killed_backend_begins_a_new_epoch(self):
        def work(storage, other, dsn, keep_history):
            oids = [other.new_oid() for _ in range(2)]
            tid = commit(other, *((oid, z64, state(0)) for oid in oids))
            views = [storage.new_instance() for _ in range(2)]
            for view in views:
                view.poll_invalidations()
                view.load(oids[0])
            txn = TransactionMetaData()
            views[1].tpc_begin(txn)
            views[1].store(oids[0], tid, state(1), '', txn)
            epoch = storage.database.epochs.now
            self._crash(dsn)
            with self.assertRaises(ReadConflictError if keep_history else TransientError):
                views[0].load(oids[1])
            with self.assertRaises(TransientError):
                views[1].tpc_vote(txn)
            views[1].tpc_abort(txn)
            for view in views:
                view.afterCompletion()
                self.assertIsNone(view.poll_invalidations())
                self.assertEqual(value_of(view.load(oids[1])[0]), 0)
                view.afterCompletion()
            self.assertNotEqual(storage.database.epochs.now, epoch)
            self.assertEqual(storage.database.pool.lent, 0)
            later = commit(views[1], (oids[0], tid, state(2)))
            self.assertGreater(later, tid)
            self.assertEqual(value_of(other.load(oids[0])[0]), 2)

        self._on_each(work)

    def test_what_was_cached_before_is_dropped(self):
        def work(storage, other, dsn, keep_history):
            oid = storage.new_oid()
            commit(storage, (oid, z64, state(0)))
            view, late = storage.new_instance(), storage.new_instance()
            for instance in (view, late):
                instance.poll_invalidations()
                instance.load(oid)
                instance.afterCompletion()
            self.assertEqual(storage.database.cache.stats()['objects'], 1)
            self._crash(dsn)
            self.assertIsNone(view.poll_invalidations())
            self.assertEqual(storage.database.cache.stats()['objects'], 0)
            view.load(oid)
            view.afterCompletion()
            with self.assertRaises(ReadConflictError):
                late.load(oid)      # though the cache has it: of another epoch

        self._on_each(work)

    def test_an_instance_without_a_view_goes_on_too(self):
        def work(storage, other, dsn, keep_history):
            self._crash(dsn)
            oid = storage.new_oid()
            with self.assertRaises(TransientError):
                commit(storage, (oid, z64, state(1)))
            commit(storage, (oid, z64, state(1)))
            self.assertEqual(value_of(other.load(oid)[0]), 1)

        self._on_each(work, drivers=('psycopg2',))

    def test_the_number_of_our_transaction_is_given_again(self):
        """Recovery does so with what left no trace in the log, as a transaction that has only voted."""
        self._number_is_given_again(0)

    def test_the_number_of_our_transaction_is_given_to_another_commit(self):
        self._number_is_given_again(10)


cases(globals(), Outcome, backends=POSTGRESQL + MYSQL, each_driver=True)
del ServerSuite, Outcome
