"""What waits for which lock on a server, and what does not."""
import time
from dataclasses import replace
from unittest.mock import patch

from persistent.TimeStamp import TimeStamp
from psycopg2.extensions import make_dsn
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, ReadConflictError
from ZODB.utils import p64, u64, z64

import relstore
from relstore.adapters.commits.postgresql import PostgreSQLCommit
from relstore.errors import Unavailable
from relstore.tests.support.backends import (
    MYSQL,
    MySQLBackend,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.records import counter, state, value_of
from relstore.tests.support.server_suite import POSTGRESQL, ServerSuite

POSTGRESQL_HP, POSTGRESQL_HF = POSTGRESQL[::2], POSTGRESQL[1::2]

COMMIT_LOCK = -1
LOCKS = ("SELECT (classid::bigint << 32) | objid::bigint, mode, granted FROM pg_locks "
         "JOIN pg_database d ON d.oid = database WHERE locktype = 'advisory' AND datname = current_database()")


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
        holder = self.other.committing.session.backend_pid
        self.assertRegex(message, f'^The object {u64(oid):#x} was held for 0.05 s .* by the server process {holder} '
                                  r'\(.*in a transaction since \d\d:\d\d:\d\d UTC\)\.$')

    def test_waiting_is_measured(self):
        """In seconds, and nothing where nobody was in the way."""
        [oid, free] = self.objects(2)
        base = self.other.getTid(oid)
        seen = []

        class Noted(PostgreSQLCommit):
            def vote(self, ballot):
                seen.append(super().vote(ballot))
                return seen[-1]

        with patch.object(self.view.database.adapter, 'commit_type', Noted):
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

        class Alone(PostgreSQLCommit):
            def vote(self, ballot):
                return super().vote(replace(ballot, alone=True))

        with patch.object(alone.database.adapter, 'commit_type', Alone):
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
            self.assertIn(f'process {alone.committing.session.backend_pid} ', str(raised.exception))
        alone.tpc_finish(txn)
        txn, _ = self.voted(impatient, (mine, self.other.getTid(mine), state(2)))
        impatient.tpc_finish(txn)

    def test_in_one_snapshot_it_would_read_what_was_before(self):
        """Why vote says READ COMMITTED."""
        [oid] = self.objects(record=counter(0))
        self.view.poll_invalidations()
        base = self.view.load(oid)[1]
        text = self.storage.database.adapter.sql.vote
        self.assertIn('READ COMMITTED', text)
        self.storage.database.adapter.sql.vote = text.replace('READ COMMITTED', 'REPEATABLE READ')
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
                    patch.object(self.storage.database.adapter, 'message_size', 1 if staged else 1 << 20):
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


cases(globals(), Locks, backends=MYSQL)
cases(globals(), AdvisoryLocks, PatientFinish, backends=POSTGRESQL)
cases(globals(), BesideAPack, backends=POSTGRESQL_HP[:1])
cases(globals(), WaitingInVote, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryFree))
cases(globals(), Patience, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryFree, MYSQL[0]))
del ServerSuite, Locks, AdvisoryLocks, PatientFinish, BesideAPack, WaitingInVote, Patience
