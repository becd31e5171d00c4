"""The rules of reading and committing, each tried on a real server: what waits for what, what is seen when, and what
a round trip costs.
"""
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from unittest import TestCase
from unittest.mock import patch

from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from psycopg2.extensions import make_dsn
from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, POSKeyError, ReadConflictError, StorageError
from ZODB.tests.ConflictResolution import PCounter
from ZODB.utils import p64, u64, z64

import relstore
from relstore import spool
from relstore.errors import Unavailable
from relstore.references import references
from relstore.tests.support.backends import (
    BY_EVERY_DRIVER,
    HISTORY_PRESERVING,
    MYSQL,
    PGBOUNCER,
    PYMYSQL_ON_MYSQL,
    MySQLBackend,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.crashing import Crashing
from relstore.tests.support.objects import exists
from relstore.tests.support.proxy import join_all_but
from relstore.tests.support.records import counter, state, value_of
from relstore.tests.support.servers import PostgreSQLServer, postgresql_programs, require_postgresql
from relstore.tests.support.watch import AnyWatch, Watch

POSTGRESQL = Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree
POSTGRESQL_HP, POSTGRESQL_HF = POSTGRESQL[::2], POSTGRESQL[1::2]

COMMIT_LOCK = -1
NOUGHT = state(0)
LOCKS = ("SELECT (classid::bigint << 32) | objid::bigint, mode, granted FROM pg_locks "
         "JOIN pg_database d ON d.oid = database WHERE locktype = 'advisory' AND datname = current_database()")


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self._threads = ThreadPoolExecutor(8)
        self.addCleanup(self._threads.shutdown)
        self.storage, self.other = self.opened(), self.opened()     # as two processes have it
        self.view = self.storage.new_instance()
        self.view.poll_invalidations()
        self.view.afterCompletion()

    def opened(self, **options):
        storage = self.open_storage(**{'commit_lock_timeout': 20} | options)
        self.addCleanup(storage.close)
        return storage

    def started(self, work: Callable, *arguments) -> Future:
        return self._threads.submit(work, *arguments)

    def enter(self, context):
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def objects(self, count=1, record=NOUGHT) -> list[bytes]:
        """Return the oids of new objects that both storages see."""
        oids = [self.other.new_oid() for _ in range(count)]
        commit(self.other, *((oid, z64, record) for oid in oids))
        return oids

    def voted(self, storage, *changes, read=(), tid=None):
        """Bring a transaction up to its vote; return it, with what vote returned."""
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        try:
            for oid, base, record in changes:
                storage.store(oid, base, record, '', txn)
            for oid, serial in read:
                storage.checkCurrentSerialInTransaction(oid, serial, txn)
            return txn, storage.tpc_vote(txn)
        except BaseException:
            storage.tpc_abort(txn)
            raise


class ServerSuite(Suite):

    def setUp(self):
        super().setUp()
        self.watch = self.watching()

    def watching(self) -> AnyWatch:
        """Return a new watch, which is closed after the test."""
        return self.enter(closing(self.new_watch()))

    def behind_proxy(self, **options):
        """Return a storage and the proxy through which it talks to its server."""
        self.addCleanup(join_all_but, threading.enumerate())
        proxy = self.enter(self.new_proxy())
        storage = relstore.RelStore(self.adapter_through(proxy), keep_history=self.keep_history,
                                    commit_lock_timeout=20, **options)
        self.addCleanup(storage.close)
        return storage, proxy


class Locks(ServerSuite):

    def test_vote_reads_after_it_has_waited(self):
        [oid] = self.objects(record=counter(0))
        self.view.poll_invalidations()
        base = self.view.load(oid)[1]
        first, _ = self.voted(self.other, (oid, base, counter(1)))
        second = self.started(self.voted, self.view, (oid, base, counter(10)))
        self.watch.until_somebody_waits()
        tid = self.other.tpc_finish(first)
        txn, resolved = second.result(30)
        self.assertEqual(resolved, [oid])
        self.assertGreater(self.view.tpc_finish(txn), tid)
        self.assertEqual(value_of(self.other.load(oid)[0]), 11)

    def test_a_lock_is_waited_for_as_long_as_the_option_says(self):
        [oid] = self.objects()
        impatient = self.opened(commit_lock_timeout=0.05)
        first, _ = self.voted(self.other, (oid, self.other.getTid(oid), state(1)))
        with self.assertRaises(relstore.errors.LockTimeout) as raised:
            self.voted(impatient, (oid, self.other.getTid(oid), state(2)))
        self.told_to_wait(str(raised.exception), oid)
        self.other.tpc_abort(first)
        txn, _ = self.voted(impatient, (oid, self.other.getTid(oid), state(2)))
        impatient.tpc_finish(txn)

    def told_to_wait(self, message, oid):
        """Check the message of a LockTimeout."""

    def test_a_dependency_on_what_is_being_changed_does_not_wait(self):
        """If it waited, this single thread would get a LockTimeout."""
        read, mine = self.objects(2)
        tid = self.other.getTid(read)
        first, _ = self.voted(self.other, (read, tid, state(1)))
        with self.assertRaises(ReadConflictError):
            self.voted(self.view, (mine, tid, state(1)), read=[(read, tid)])
        self.other.tpc_finish(first)
        with self.assertRaises(ReadConflictError) as raised:
            self.voted(self.view, (mine, tid, state(1)), read=[(read, tid)])
        self.assertEqual(raised.exception.oid, read)
        self.assertEqual(value_of(self.other.load(mine)[0]), 0)

    def test_dependencies_do_not_exclude_each_other(self):
        read, first, second = self.objects(3)
        tid = self.other.getTid(read)
        one, _ = self.voted(self.other, (first, tid, state(1)), read=[(read, tid)])
        two, _ = self.voted(self.view, (second, tid, state(1)), read=[(read, tid)])
        self.other.tpc_finish(one)
        self.view.tpc_finish(two)

    def test_a_dependency_holds_until_the_commit(self):
        read, mine = self.objects(2)
        tid = self.other.getTid(read)
        one, _ = self.voted(self.other, (mine, tid, state(1)), read=[(read, tid)])
        two = self.started(self.voted, self.view, (read, tid, state(2)))
        self.watch.until_somebody_waits()
        earlier = self.other.tpc_finish(one)
        txn, _ = two.result(30)
        self.assertGreater(self.view.tpc_finish(txn), earlier)

    def test_a_dependency_is_changed_while_vote_waits_for_something_else(self):
        read, mine = self.objects(2)
        tid = self.other.getTid(read)
        blocker, _ = self.voted(self.other, (mine, tid, state(1)))

        def vote():
            return self.voted(self.view, (mine, tid, state(2)), read=[(read, tid)])

        work = self.started(vote)
        self.watch.until_somebody_waits()
        changed = commit(self.opened(), (read, tid, state(1)))
        self.other.tpc_abort(blocker)
        with self.assertRaises(ReadConflictError) as raised:
            work.result(30)
        self.assertEqual((raised.exception.oid, raised.exception.serials), (read, (changed, tid)))

    def test_whoever_restores_has_the_commit_lock_from_vote_on(self):
        """Its tid is given: nobody may get a larger one first."""
        oid, ahead = self.view.new_oid(), TimeStamp(2099, 1, 1, 0, 0, 0).raw()
        mine, _ = self.voted(self.other, (self.other.new_oid(), z64, state(1)))
        txn = TransactionMetaData()
        self.view.tpc_begin(txn, ahead)
        self.view.restore(oid, ahead, state(1), '', None, txn)
        self.view.tpc_vote(txn)
        finish = self.started(self.other.tpc_finish, mine)
        self.watch.until_somebody_waits()
        self.assertEqual(self.view.tpc_finish(txn), ahead)
        self.assertGreater(finish.result(30), ahead)


class AdvisoryLocks(Locks):
    """Those of PostgreSQL."""

    def told_to_wait(self, message, oid):
        holder = self.other._txn._session.backend_pid
        self.assertRegex(message, f'^The object {u64(oid):#x} was held for 0.05 s .* by the server process {holder} '
                                  r'\(.*in a transaction since \d\d:\d\d:\d\d UTC\)\.$')

    def test_waiting_is_measured(self):
        """In seconds, and nothing where nobody was in the way."""
        [oid, free] = self.objects(2)
        base = self.other.getTid(oid)
        seen = []
        vote = self.view._adapter.vote

        def noted(session, ballot):
            seen.append(vote(session, ballot))
            return seen[-1]

        with patch.object(self.view._adapter, 'vote', noted):
            first, _ = self.voted(self.other, (oid, base, state(1)))
            second = self.started(self.voted, self.view, (oid, base, state(2)), (free, base, state(2)))
            self.watch.until_somebody_waits()
            since = time.monotonic()
            self.watch.rows('SELECT pg_sleep(0.05)')
            self.other.tpc_abort(first)
            txn, _ = second.result(30)
        [[where, seconds]] = seen[-1].waits
        self.assertEqual(where, u64(oid))
        self.assertLess(0.05, seconds)
        self.assertLess(seconds, time.monotonic() - since + 5)
        self.view.tpc_abort(txn)

    def test_one_keeps_all_others_out(self):
        """Also those of the version before, who lock -3 shared as well."""
        [mine, theirs] = self.objects(2)
        base = self.other.getTid(mine)
        alone = self.opened()
        vote = alone._adapter.vote
        with patch.object(alone._adapter, 'vote', lambda session, ballot: vote(session, replace(ballot, alone=True))):
            earlier, _ = self.voted(self.other, (theirs, base, state(1)))
            large = self.started(self.voted, alone, (mine, base, state(1)))
            self.watch.until_somebody_waits()
            self.other.tpc_finish(earlier)
            txn, _ = large.result(30)
        impatient = self.opened(commit_lock_timeout=0.05)
        for what in (mine, theirs):
            with self.assertRaises(relstore.errors.LockTimeout) as raised:
                self.voted(impatient, (what, self.other.getTid(what), state(2)))
            self.assertIn('a large transaction', str(raised.exception))
            self.assertIn(f'process {alone._txn._session.backend_pid} ', str(raised.exception))
        alone.tpc_finish(txn)
        txn, _ = self.voted(impatient, (mine, self.other.getTid(mine), state(2)))
        impatient.tpc_finish(txn)

    def test_in_one_snapshot_it_would_read_what_was_before(self):
        """Why vote says READ COMMITTED."""
        [oid] = self.objects(record=counter(0))
        self.view.poll_invalidations()
        base = self.view.load(oid)[1]
        text = self.storage._adapter.sql.vote
        self.assertIn('READ COMMITTED', text)
        self.storage._adapter.sql.vote = text.replace('READ COMMITTED', 'REPEATABLE READ')
        first, _ = self.voted(self.other, (oid, base, counter(1)))
        second = self.started(self.voted, self.view, (oid, base, counter(10)))
        self.watch.until_somebody_waits()
        self.other.tpc_finish(first)
        txn, resolved = second.result(30)
        self.view.tpc_abort(txn)
        self.assertEqual(resolved, [], 'the first commit went unseen')

    def test_new_objects_need_no_locks(self):
        one, _ = self.voted(self.other, *((self.other.new_oid(), z64, state(1)) for _ in range(20)))
        exclusive = [key for key, mode, _ in self.watch.rows(LOCKS) if mode == 'ExclusiveLock']
        self.assertEqual(exclusive, [])
        two, _ = self.voted(self.view, *((self.view.new_oid(), z64, state(1)) for _ in range(20)))
        self.view.tpc_finish(two)
        self.other.tpc_finish(one)

    def test_new_objects_whose_oid_came_from_elsewhere_are_locked(self):
        oid = p64(1_000_000)
        one, _ = self.voted(self.other, (oid, z64, state(1)))
        self.assertIn((1_000_000, 'ExclusiveLock', True), self.watch.rows(LOCKS))
        two = self.started(self.voted, self.view, (oid, z64, state(2)))
        self.watch.until_somebody_waits()
        self.other.tpc_finish(one)
        with self.assertRaises(ConflictError):
            two.result(30)
        self.assertEqual(value_of(self.other.load(oid)[0]), 1)

    def test_locks_are_taken_in_the_order_of_oids(self):
        low, middle, high = sorted(self.objects(3))
        base = self.other.getTid(low)
        third = self.watching()
        third.rows('SELECT pg_advisory_lock(%s)', u64(middle))
        work = self.started(self.voted, self.view, *((oid, base, state(1)) for oid in (high, low, middle)))
        self.watch.until_somebody_waits()
        locks = {key: granted for key, _, granted in sorted(self.watch.rows(LOCKS), key=lambda row: -row[2])}
        self.assertTrue(locks[u64(low)])
        self.assertNotIn(u64(high), locks)
        third.rows('SELECT pg_advisory_unlock(%s)', u64(middle))
        txn, _ = work.result(30)
        self.view.tpc_abort(txn)

    def test_storages_in_two_schemas_do_not_lock_each_other_out(self):
        self.watch.rows('DROP SCHEMA IF EXISTS elsewhere CASCADE')
        self.watch.rows('CREATE SCHEMA elsewhere')
        away = relstore.RelStore(relstore.PostgreSQL(self.dsn(), driver=self.driver, schema='elsewhere'),
                                 keep_history=self.keep_history, commit_lock_timeout=1)
        self.addCleanup(away.close)
        [oid] = self.objects()
        here, _ = self.voted(self.other, (oid, self.other.getTid(oid), state(1)))
        there, _ = self.voted(away, (oid, z64, state(2)))
        third = self.watching()
        third.rows('SELECT pg_advisory_lock(%s)', COMMIT_LOCK)      # of the schema public
        away.tpc_finish(there)
        third.rows('SELECT pg_advisory_unlock(%s)', COMMIT_LOCK)
        self.other.tpc_finish(here)
        self.assertEqual([value_of(s.load(oid)[0]) for s in (self.other, away)], [1, 2])
        away.close()
        self.watch.rows('DROP SCHEMA elsewhere CASCADE')


class PatientFinish(ServerSuite):
    """On PostgreSQL finish goes on waiting where vote had given up: failing would tear a larger transaction."""

    def finished(self, options: str = '') -> None:
        """Finish a commit, while somebody has locked the table against writers for twice commit-lock-timeout."""
        dsn = make_dsn(self.dsn(), options=options)
        storage = relstore.RelStore(relstore.PostgreSQL(dsn, driver=self.driver), keep_history=self.keep_history,
                                    commit_lock_timeout=0.1)
        self.addCleanup(storage.close)
        [oid] = self.objects()
        txn, _ = self.voted(storage, (oid, self.other.getTid(oid), state(1)))
        third = self.watching()
        third.rows('BEGIN')
        third.rows('LOCK TABLE object_state IN SHARE MODE')
        finish = self.started(storage.tpc_finish, txn)
        waits = ("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
                 "AND wait_event_type = 'Lock' AND clock_timestamp() > query_start + interval '0.2 s')")
        self.watch.until(lambda: finish.done() or self.watch.one(waits))
        third.rows('COMMIT')
        self.assertEqual(finish.result(30), self.other.getTid(oid))

    def test_other_locks_than_that_of_commits(self):
        self.finished()

    def test_a_role_whose_statements_may_not_take_long(self):
        self.finished('-c statement_timeout=150')


class BesideAPack(ServerSuite):
    """RelStorage's pack removes current_object's rows and takes none of the locks of commits."""

    def test_what_it_removes_while_finish_waits_is_there_again(self):
        for staged in False, True:
            with self.subTest(staged=staged), \
                    patch.object(self.storage._adapter, 'message_size', 1 if staged else 1 << 20):
                removed, kept = self.objects(2)
                base, new = self.other.getTid(removed), self.other.new_oid()
                oids = removed, kept, new
                txn, _ = self.voted(self.view, *((oid, z64 if oid == new else base, state(1)) for oid in oids))
                pack = self.watching()
                pack.rows('BEGIN')
                pack.rows('DELETE FROM current_object WHERE zoid = %s', u64(removed))
                finish = self.started(self.view.tpc_finish, txn)
                self.watch.until("EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
                                 "AND wait_event_type = 'Lock')")
                pack.rows('COMMIT')
                tid = finish.result(30)
                self.assertEqual(self.watch.rows('SELECT tid FROM current_object WHERE zoid IN (%s, %s, %s)',
                                                 *map(u64, oids)), 3 * [(u64(tid),)])
                commit(self.other, *((oid, tid, state(2)) for oid in oids))


class WaitingInVote(ServerSuite):
    """On PostgreSQL."""

    def test_less_than_a_millisecond(self):
        """is not 0, which would tell the server to wait for ever."""
        [oid] = self.objects()
        base = self.other.getTid(oid)
        first, _ = self.voted(self.other, (oid, base, state(1)))
        second = self.started(self.voted, self.opened(commit_lock_timeout=0.0001), (oid, base, state(2)))
        try:
            self.assertIsInstance(second.exception(5), relstore.errors.LockTimeout)
        finally:
            self.other.tpc_abort(first)

    def test_the_database_is_emptied_while_vote_waits(self):
        """Nothing else would be in the way of a new object."""
        oid, third = p64(1_000_000), self.watching()
        third.rows('SELECT pg_advisory_lock(%s)', u64(oid))
        work = self.started(self.voted, self.view, (oid, z64, state(1)))
        self.watch.until_somebody_waits()
        self.other.zap_all()
        third.rows('SELECT pg_advisory_unlock(%s)', u64(oid))
        with self.assertRaisesRegex(Unavailable, 'nothing was stored'):
            work.result(30)

    def test_who_waits_for_a_large_transaction_holds_nothing(self):
        """It might want the commit lock next, and whoever restores has that."""
        oids = self.objects(2)
        base = self.other.getTid(oids[0])
        third = self.watching()
        third.rows('SELECT pg_advisory_lock(-3)')
        work = self.started(self.voted, self.view, *((oid, base, state(1)) for oid in oids))
        self.watch.until_somebody_waits()
        self.assertEqual([mode for _, mode, granted in self.watch.rows(LOCKS) if granted], ['ExclusiveLock'])
        third.rows('SELECT pg_advisory_unlock(-3)')
        txn, _ = work.result(30)
        self.view.tpc_abort(txn)


class Patience(ServerSuite):

    def test_finish_waits_longer_than_vote(self):
        """Failing would tear a transaction over several databases."""
        impatient = self.opened(commit_lock_timeout=1 if isinstance(self, MySQLBackend) else 0.05)
        txn, _ = self.voted(impatient, (impatient.new_oid(), z64, state(1)))
        third = self.watching()
        third.take_commit_lock()
        finish = self.started(impatient.tpc_finish, txn)
        self.watch.until_somebody_waits()
        with self.assertRaises(TimeoutError):
            finish.exception(1.5 if isinstance(self, MySQLBackend) else 0.2)
        third.release_commit_lock()
        self.assertGreater(finish.result(30), z64)


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
        adapter, seen = self.mine._adapter, []
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
        adapter = sys.modules[type(self.storage._adapter).__module__]
        self.enter(patch.object(adapter, 'ORPHAN_PATIENCE', 1 if isinstance(self, MySQLBackend) else 0.05))
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
        connect, refused = self.mine._adapter.connect, []

        def full():
            if len(refused) < 3:
                refused.append(1)
                raise relstore.errors.Unavailable('Too many connections')
            return connect()

        self.mine.lastTransaction()     # there is a session for the commit
        self.enter(patch.object(self.mine._pool, '_connect', full))
        finish = self._orphaned()
        self.third.release_commit_lock()
        self.assertEqual(finish.result(30), self.other.getTid(self.oids[0]))
        self.assertEqual(len(refused), 3)

    def test_no_server_can_be_asked(self):
        self.enter(patch('relstore.commit.OUTCOME_PATIENCE', 0.2))
        finish = self._orphaned(held_back=True)
        # It asks: whichever of client and server speaks first in a new connection.
        self.proxy.wait_until(lambda: self.proxy.sent + self.proxy.received > self.arrived)
        self.proxy.stop()
        with self.assertRaises(relstore.errors.OutcomeUnknown):
            finish.result(60)
        self.third.release_commit_lock()
        self.proxy.start()
        self.watch.until_nothing_is_open()
        self.assertEqual(self.mine._pool.lent, 0)


class Views(ServerSuite):

    def setUp(self):
        super().setUp()
        self.oids = self.objects(2)
        self.cold = self.opened(cache_local_mb=0).new_instance()
        self.addCleanup(self.cold.release)
        self.cold.poll_invalidations()

    def _change(self):
        for value in (1, 2):
            commit(self.other, *((oid, self.other.getTid(oid), state(value)) for oid in self.oids))

    def _values(self):
        return [value_of(self.cold.load(oid)[0]) for oid in self.oids]

    def test_a_view_does_not_see_later_commits(self):
        self._change()
        self.assertEqual(self._values(), [0, 0])
        self.cold.prefetch(self.oids)
        self.assertEqual(set(self.cold.poll_invalidations()), set(self.oids))
        self.assertEqual(self._values(), [2, 2])

    def test_a_view_begins_with_its_poll(self):
        """Not with its first load: what is committed between the two is not seen."""
        self.cold.afterCompletion()
        self.cold.poll_invalidations()
        self._change()
        self.assertEqual(self._values(), [0, 0])

    def test_prefetch_fills_the_cache_with_what_the_view_sees(self):
        self.view.poll_invalidations()
        self._change()
        self.view.prefetch(self.oids)
        self.view.afterCompletion()     # a load that is no hit fails now, where history is not kept
        self.assertEqual([value_of(self.view.load(oid)[0]) for oid in self.oids], [0, 0])
        self.assertEqual(self.view._cache.stats()['objects'], 2)

    def _nothing_is_open_after(self, end):
        self.cold.load(self.oids[0])
        self.assertEqual(self.watch.open_transactions(), 0 if self.keep_history else 1)
        end()
        self.watch.until_nothing_is_open()
        self.assertEqual(self.cold._pool.lent, 0)

    def test_nothing_is_open_after_the_transaction(self):
        self._nothing_is_open_after(self.cold.afterCompletion)

    def test_nothing_is_open_after_release(self):
        self._nothing_is_open_after(self.cold.release)

    def test_nothing_is_open_after_close(self):
        self._nothing_is_open_after(self.cold.close)

    def test_nothing_is_open_after_a_commit_or_an_abort(self):
        for end in (self.cold.tpc_finish, self.cold.tpc_abort):
            self.cold.poll_invalidations()
            txn, _ = self.voted(self.cold, (self.oids[0], self.other.getTid(self.oids[0]), state(1)))
            end(txn)
            self.watch.until_nothing_is_open()
            self.assertEqual(self.cold._pool.lent, 0)

    def test_nothing_is_open_after_a_conflict(self):
        self._change()
        with self.assertRaises(ConflictError):
            self.voted(self.cold, (self.oids[0], p64(1), state(1)))
        self.watch.until_nothing_is_open()
        self.assertEqual(self.cold._pool.lent, 0)

    def test_a_load_after_the_transaction(self):
        """What was overwritten since is gone where no history is kept, and the application is to try again."""
        self.cold.afterCompletion()
        self._change()
        if self.keep_history:
            self.assertEqual(self._values(), [0, 0])
        else:
            with self.assertRaises(ReadConflictError):
                self.cold.load(self.oids[0])
        with self.assertRaises(POSKeyError):
            self.cold.load(p64(1_000_000))

    def test_one_session_is_enough_for_an_instance(self):
        small = self.opened(pool_size=2, pool_timeout=0.1)
        views = [small.new_instance() for _ in range(2)]
        for view in views:
            view.poll_invalidations()
            view.load(self.oids[0])
        for view, oid in zip(views, self.oids, strict=True):
            txn, _ = self.voted(view, (oid, self.other.getTid(oid), state(1)))
            view.tpc_finish(txn)
        self.assertEqual(small._pool.lent, 0)


class Zap(Suite):

    def test_a_zapped_database_is_another_one(self):
        [oid] = self.objects()
        view = self.view
        view.poll_invalidations()
        view.load(oid)
        view.afterCompletion()
        epoch = self.storage._database.epochs.now
        self.other.zap_all()
        again = self.other.new_oid()
        commit(self.other, (again, z64, state(5)))
        with self.assertRaises(TransientError):
            self.voted(view, (view.new_oid(), z64, state(1)))
        self.assertIsNone(view.poll_invalidations())
        self.assertNotEqual(self.storage._database.epochs.now, epoch)
        self.assertEqual(value_of(view.load(again)[0]), 5)
        self.assertNotEqual(view.load(again)[0], state(0))
        view.afterCompletion()
        txn, _ = self.voted(view, (again, view.load(again)[1], state(6)))
        view.tpc_finish(txn)


class RoundTrips(ServerSuite):
    """Counted between transaction managers in explicit mode and the server."""

    def setUp(self):
        super().setUp()
        self._open()
        with self.manager:
            root = self.connection.root()
            for n in range(100):
                root[n] = PersistentMapping(value=0)
            root['counter'] = PCounter()
        self.other_db = DB(self.other)
        self.addCleanup(self.other_db.close)
        self._cost(lambda: None)     # sessions are open from here on

    def _open(self):
        """Begin anew, with nothing cached but the root."""
        self.mine, self.proxy = self.behind_proxy()
        db = DB(self.mine)
        self.addCleanup(db.close)
        self.manager = TransactionManager(explicit=True)
        self.connection = db.open(self.manager)
        self.addCleanup(self.connection.close)
        with self.manager:
            self.connection.root()._p_activate()

    def _cost(self, work) -> int:
        """Return the round trips of one transaction."""
        self.proxy.reset()
        with self.manager:
            work()
        return self.proxy.round_trips

    def _touch(self, count):
        for n in range(count):
            self.connection.root()[n]['value'] += 1

    def test_a_transaction_that_reads_what_is_cached(self):
        self._cost(lambda: [self.connection.root()[n]['value'] for n in range(100)])
        self.connection.cacheMinimize()
        cost = self._cost(lambda: [self.connection.root()[n]['value'] for n in range(100)])
        self.assertEqual(cost, 1 if self.keep_history else 2)

    def test_a_miss(self):
        """One round trip each, where nothing tells which object will be next."""
        self._open()
        view = self.mine.new_instance()
        self.addCleanup(view.release)
        oids = [self.connection.root()[n]._p_oid for n in range(10)]
        view.poll_invalidations()
        self.proxy.reset()
        for oid in oids:
            view.load(oid)
        self.assertEqual(self.proxy.round_trips, 10)

    def test_misses_of_siblings(self):
        """Four are fetched with the first, eight with the next."""
        self._open()
        empty = self._cost(lambda: None)
        cost = self._cost(lambda: [self.connection.root()[n]['value'] for n in range(14)])
        self.assertEqual(cost - empty, 2)

    def test_prefetch(self):
        self._open()
        empty = self._cost(lambda: None)
        objects = list(self.connection.root().values())
        cost = self._cost(lambda: (self.connection.prefetch(objects), [it._p_activate() for it in objects]))
        self.assertEqual(cost - empty, 1)

    def test_a_commit(self):
        """Poll, vote, finish; where no history is kept also the end of the snapshot."""
        limit = 4 if self.keep_history else 5
        for count in (1, 100):
            self._cost(lambda: self._touch(100))
            self.assertLessEqual(self._cost(lambda count=count: self._touch(count)), limit, f'{count} objects')

    def test_a_conflict(self):
        with self.manager:
            self.connection.root()['counter'].inc()
        plain = self._cost(lambda: self.connection.root()['counter'].inc())

        def conflict():
            self.connection.root()['counter'].inc()
            manager = TransactionManager()
            with closing(self.other_db.open(manager)) as connection:
                connection.root()['counter'].inc(10)
                manager.commit()

        self._cost(lambda: self.connection.root()['counter']._value)
        self.assertLessEqual(self._cost(conflict) - plain, 2)
        self.manager.begin()
        self.assertEqual(self.connection.root()['counter']._value, 13)
        self.manager.abort()

    def test_many_conflicts(self):
        """With nothing in the cache, where history is kept: else they could not be resolved."""
        oids = [self.other.new_oid() for _ in range(30)]
        base = commit(self.other, *((oid, z64, counter(0)) for oid in oids))
        view = self.mine.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        if not self.keep_history:
            view.prefetch(oids)
        tid = commit(self.other, *((oid, base, counter(1)) for oid in oids))
        new = view.new_oid()
        self.proxy.reset()
        plain = commit(view, (new, z64, counter(0)))
        costs = self.proxy.round_trips
        self.proxy.reset()
        resolved = commit(view, *((oid, base, counter(10)) for oid in oids))
        self.assertLessEqual(self.proxy.round_trips - costs, 2)
        self.assertEqual({value_of(self.other.loadSerial(oid, resolved)) for oid in oids}, {11})
        self.assertTrue(tid < plain < resolved)

    def test_new_oids(self):
        self.proxy.reset()
        self.mine._database.oids.forget()
        oids = {self.mine.new_oid() for _ in range(16)}
        self.assertEqual((len(oids), self.proxy.round_trips), (16, 1))
        for _ in range(5000):
            self.mine.new_oid()
        self.assertLess(self.proxy.round_trips, 15, 'who needs many gets many at once')


class Tids(ServerSuite):

    def _is_now(self, tid):
        self.assertAlmostEqual(TimeStamp(tid).timeTime(), self.watch.now(), delta=5)

    def test_the_clock_of_a_client_does_not_matter(self):
        for wrong in (1_000_000_000.0, 4_000_000_000.0):
            with patch('time.time', lambda wrong=wrong: wrong):
                oid = self.view.new_oid()
                self._is_now(commit(self.view, (oid, z64, state(1))))

    def test_it_is_the_timestamp_that_zodb_would_make(self):
        """Month ends and the fraction of a minute included."""
        for text in ('2024-02-29 23:59:59.999', '2025-01-01 00:00:00', '2031-12-31 12:34:56.789'):
            date, hour = text.split()
            hours, minutes, seconds = hour.split(':')
            wanted = TimeStamp(*map(int, date.split('-')), int(hours), int(minutes), float(seconds)).raw()
            self.assertAlmostEqual(self._made_at(text), u64(wanted), delta=8)     # in 14 ns

    def _made_at(self, text) -> int:
        """Return the tid of a commit when the server's clock says so."""
        if not isinstance(self, MySQLBackend):
            return self.watch.one('SELECT relstore_tid_1(%s::timestamp)', text)
        sql, clock = self.storage._adapter.sql, 'UTC_TIMESTAMP(6)'
        before = sql.begin_finish
        self.assertIn(clock, before)
        sql.begin_finish = before.replace(clock, f"CAST('{text}' AS DATETIME(6))")
        try:
            return u64(commit(self.view, (self.view.new_oid(), z64, state(1))))
        finally:
            sql.begin_finish = before

    def test_they_rise_when_the_last_one_lies_in_the_future(self):
        ahead = TimeStamp(2099, 1, 1, 0, 0, 0).raw()
        oid = self.view.new_oid()

        def restore(txn):
            self.view.restore(oid, ahead, state(0), '', None, txn)

        self.assertEqual(commit(self.view, tid=ahead, work=restore), ahead)
        tids = [ahead]
        for n in range(5):
            storage = (self.view, self.other)[n % 2]
            tids.append(commit(storage, (oid, tids[-1], state(n))))
        self.assertEqual(tids, [p64(u64(ahead) + n) for n in range(6)])
        with self.assertRaises(StorageError):
            commit(self.view, tid=ahead, work=restore)


class Pieces(Suite):
    """A transaction that is larger than a message."""

    def setUp(self):
        super().setUp()
        self.storage._adapter.message_size = 1000
        self.oids = self.objects(30)
        self.base = self.other.getTid(self.oids[0])
        self.sizes = [10 ** (n % 5) for n in range(30)]

    def _vote(self):
        return self.voted(self.view, *((oid, self.base, state('x' * size)) for oid, size in
                                       zip(self.oids, self.sizes, strict=True)), (self.view.new_oid(), z64, state(1)))

    def test_commit(self):
        txn, _ = self._vote()
        tid = self.view.tpc_finish(txn)
        self.assertEqual([self.other.load(oid) for oid in self.oids],
                         [(state('x' * size), tid) for size in self.sizes])
        self.assertEqual(list(self.other.iterator(tid))[-1].tid, tid)
        self.assertEqual(len(list(list(self.other.iterator(tid))[-1])), 31)

    def test_abort_after_vote(self):
        txn, _ = self._vote()
        self.view.tpc_abort(txn)
        self.assertEqual({self.other.load(oid) for oid in self.oids}, {(state(0), self.base)})
        self.assertEqual(self.storage._pool.lent, 0)
        self.test_commit()

    def test_one_after_the_other_on_one_session(self):
        for _ in range(3):
            txn, _ = self._vote()
            self.base = self.view.tpc_finish(txn)
        self.assertEqual({self.other.getTid(oid) for oid in self.oids}, {self.base})

    def test_restored(self):
        destination = self.open_storage('destination')
        self.addCleanup(destination.close)
        txn, _ = self._vote()
        self.view.tpc_finish(txn)
        destination._adapter.message_size = 1000
        destination.copyTransactionsFrom(self.other)
        self.assertEqual([destination.load(oid) for oid in self.oids], [self.other.load(oid) for oid in self.oids])


class Deletions(Suite):

    def _delete(self, storage, oid, tid):
        return commit(storage, work=lambda txn: storage.deleteObject(oid, tid, txn))

    def test_delete(self):
        doomed, kept = self.objects(2)
        tid = self.other.getTid(doomed)
        self.view.poll_invalidations()
        deleted = self._delete(self.other, doomed, tid)
        if self.keep_history:
            self.assertEqual(value_of(self.view.load(doomed)[0]), 0, 'the view is older')
            self.assertEqual(self.other.loadBefore(doomed, deleted), (state(0), tid, deleted))
        self.assertEqual(self.view.poll_invalidations(), [doomed])
        for storage in (self.view, self.other):
            for read in (storage.load, storage.getTid, lambda oid, s=storage: s.loadSerial(oid, deleted)):
                with self.assertRaises(POSKeyError):
                    read(doomed)
            self.assertEqual(value_of(storage.load(kept)[0]), 0)
        self.view.afterCompletion()

    def test_what_was_changed_since_is_not_deleted(self):
        [oid] = self.objects()
        old = self.other.getTid(oid)
        commit(self.other, (oid, old, state(1)))
        with self.assertRaises(ConflictError):
            self._delete(self.view, oid, old)
        self.assertEqual(value_of(self.other.load(oid)[0]), 1)

    def test_what_was_deleted_since_is_not_changed(self):
        [oid] = self.objects(record=counter(0))
        self.view.poll_invalidations()
        tid = self.view.load(oid)[1]
        self._delete(self.other, oid, tid)
        for change in (lambda: commit(self.view, (oid, tid, counter(1))),
                       lambda: self._delete(self.view, oid, tid)):
            with self.assertRaises(ConflictError):
                change()
        self.assertFalse(exists(self.other, oid))


class RowsSuite(Suite):
    """What a commit writes beside the states."""

    def setUp(self):
        super().setUp()
        self.db, self.other_db = DB(self.storage), DB(self.other)
        self.addCleanup(self.db.close)
        self.addCleanup(self.other_db.close)

    def _rows(self, storage, columns):
        with storage._pool.session() as session:
            return session.all(f'SELECT {columns} FROM object_state ORDER BY zoid, tid')

    def _check(self, storage):
        """Compare every row with its state; return its references by (oid, tid)."""
        more = 'md5, prev_tid' if self.keep_history else 'refs_tid, NULL'
        found, newest = {}, {}
        for oid, tid, record, size, refs, md5, earlier in self._rows(
                storage, f'zoid, tid, state, state_size, refs, {more}'):
            self.assertEqual(refs, references(record))
            self.assertEqual(size, len(record or b''))
            if self.keep_history:
                self.assertEqual(earlier, newest.get(oid, 0), 'it replaced another revision')
                newest[oid] = tid
                self.assertEqual(md5, hashlib.md5(record).hexdigest() if record is not None else None)
            else:
                self.assertEqual(md5, tid, 'references of another revision')
            found[oid, tid] = refs
        return found

    def _conflict(self):
        """Leave a counter, with a partner, that was changed twice from one state."""
        managers = [TransactionManager(), TransactionManager()]
        first, second = (db.open(manager) for db, manager in zip((self.db, self.other_db), managers, strict=True))
        try:
            first.root()['counter'] = it = PCounter()
            it.inc()
            it.partner = first.root()['partner'] = PersistentMapping()
            managers[0].commit()
            managers[1].begin()
            for connection, step in ((first, 1), (second, 10)):
                connection.root()['counter'].inc(step)
            managers[0].commit()
            managers[1].commit()
            return second.root()['counter']._p_oid
        finally:
            for manager, connection in zip(managers, (first, second), strict=True):
                manager.abort()
                connection.close()

    def _data_tid_is(self, storage, oid, tid, wanted):
        rows = {row[:2]: row[2] for row in self._rows(storage, 'zoid, tid, data_tid')}
        self.assertEqual(rows[u64(oid), u64(tid)], None if wanted is None else u64(wanted))
        [record] = [r for txn in storage.iterator(tid, tid) for r in txn if r.oid == oid]
        self.assertEqual(record.data_txn, wanted)


class Rows(RowsSuite):

    def test_store_and_conflict_resolution(self):
        oid = self._conflict()
        self.assertEqual(self.other.load(oid)[0].count(b'partner'), 1)
        found = self._check(self.storage)
        self.assertEqual(len(found[u64(oid), u64(self.other.getTid(oid))]), 8)
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, 12)

    def test_restore(self):
        self._conflict()
        destination = self.open_storage('destination')
        self.addCleanup(destination.close)
        destination.copyTransactionsFrom(self.storage)
        self.assertEqual(self._check(destination), self._check(self.storage))

    def test_deletion(self):
        oid = self._conflict()
        self.view.poll_invalidations()      # who refers to it was changed since
        tid = commit(self.view, work=lambda txn: self.view.deleteObject(oid, self.view.getTid(oid), txn))
        self.assertEqual(self._check(self.storage)[u64(oid), u64(tid)], b'')

    def test_in_pieces(self):
        self.other._adapter.message_size = 50
        oid = self._conflict()
        self.assertEqual(len(self._check(self.storage)[u64(oid), u64(self.other.getTid(oid))]), 8)

    def test_from_a_file(self):
        self.enter(patch.object(spool, 'IN_MEMORY', 0))
        oid = self._conflict()
        self.assertEqual(len(self._check(self.storage)[u64(oid), u64(self.other.getTid(oid))]), 8)
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, 12)


class RowsOfUndo(RowsSuite):

    def test_undo(self):
        oid = self._conflict()
        before, undone = [entry['tid'] for entry in reversed(self.other.history(oid, 3))][1:]
        tid = commit(self.view, work=lambda txn: self.view.undo(undone, txn))
        found = self._check(self.storage)
        self.assertEqual(found[u64(oid), u64(tid)], found[u64(oid), u64(before)])
        self._data_tid_is(self.storage, oid, tid, before)
        destination = self.open_storage('destination')
        self.addCleanup(destination.close)
        destination.copyTransactionsFrom(self.storage)
        self._data_tid_is(destination, oid, tid, before)
        self.assertEqual(self._check(destination), found)

    def test_undo_by_conflict_resolution(self):
        oid = self._conflict()
        first_inc = self.other.history(oid, 3)[1]['tid']
        tid = commit(self.view, work=lambda txn: self.view.undo(first_inc, txn))
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, 11)
        self.assertEqual(len(self._check(self.storage)[u64(oid), u64(tid)]), 8)
        self._data_tid_is(self.storage, oid, tid, None)


class GroupCommitLayer:
    """A server that waits for a standby which never comes, when told to."""

    server: PostgreSQLServer | None = None

    @classmethod
    def setUp(cls):
        if postgresql_programs():
            cls.server = PostgreSQLServer({'max_wal_senders': 1}, durable=True)
            cls.server.start()

    @classmethod
    def tearDown(cls):
        if cls.server is not None:
            cls.server.stop()
            cls.server = None


class GroupCommit(TestCase):
    """A disk that takes as long as the test wants: a commit that waits for a standby is as one that waits for it."""

    layer = GroupCommitLayer

    def setUp(self):
        require_postgresql(self)

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
            epoch = storage._database.epochs.now
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
            self.assertNotEqual(storage._database.epochs.now, epoch)
            self.assertEqual(storage._pool.lent, 0)
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
            self.assertEqual(storage._cache.stats()['objects'], 1)
            self._crash(dsn)
            self.assertIsNone(view.poll_invalidations())
            self.assertEqual(storage._cache.stats()['objects'], 0)
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


cases(globals(), Locks, backends=MYSQL)
cases(globals(), Outcome, Views, RoundTrips, Tids, backends=POSTGRESQL + MYSQL)
cases(globals(), RoundTrips, backends=PYMYSQL_ON_MYSQL + PGBOUNCER[:2])
cases(globals(), AdvisoryLocks, PatientFinish, backends=POSTGRESQL)
cases(globals(), BesideAPack, backends=POSTGRESQL_HP[:1])
cases(globals(), WaitingInVote, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryFree))
cases(globals(), Patience, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryFree, MYSQL[0]))
cases(globals(), Zap, Pieces, Deletions, Rows, backends=BY_EVERY_DRIVER)
cases(globals(), RowsOfUndo, backends=HISTORY_PRESERVING)
del Suite, ServerSuite, Locks, AdvisoryLocks, PatientFinish, BesideAPack, WaitingInVote, Patience
del Outcome, Views, Zap, RoundTrips, Tids, Pieces, Deletions, RowsSuite, Rows, RowsOfUndo
