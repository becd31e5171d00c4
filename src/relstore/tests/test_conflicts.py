"""Conflicts say what they are about and with whom; waiting for locks is measured, and who was waited for is told."""
import logging
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import TestCase
from unittest.mock import patch

import zodbpickle.pickle
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, ReadConflictError
from ZODB.utils import oid_repr, p64, readable_tid_repr, u64, z64

import relstore
from relstore import conflicts, references, resolving
from relstore.adapters.numbers import COMMIT_LOCK, EVERYBODY, SOME_OBJECTS
from relstore.conflicts import Conflicts
from relstore.errors import Deadlock, Disconnected, LockTimeout, StorageError
from relstore.references import class_name, plain
from relstore.tests.support.backends import (
    MySQLdbHistoryPreserving,
    MySQLdbOnMySQLHistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    PyMySQLHistoryFree,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit, voted
from relstore.tests.support.records import counter, state, value_of
from relstore.tests.support.watch import Watch

COUNTER, MINPO = 'ZODB.tests.ConflictResolution.PCounter', 'ZODB.tests.MinPO.MinPO'
SERVERS = (Psycopg2HistoryPreserving, Psycopg3HistoryFree, MySQLdbHistoryPreserving, PyMySQLHistoryFree,
           MySQLdbOnMySQLHistoryFree)
LONG = 0.25     # seconds that a lock is held

#: A class that can be imported only once anybody does.
TRAP = b'\x80\x03crelstore.tests.no_such_module\nTrap\nq\x00.\x80\x03}q\x00.'


class Suite(TestCase):
    """Two storages, as two processes have them."""

    def setUp(self):
        super().setUp()
        self.mine, self.other = self.opened(), self.opened()
        self._threads = ThreadPoolExecutor(2)
        self.addCleanup(self._threads.shutdown)

    def opened(self, **options):
        storage = self.open_storage(**{'commit_lock_timeout': 20} | options)
        self.addCleanup(storage.close)
        return storage

    def started(self, work: Callable, *arguments) -> Future:
        return self._threads.submit(work, *arguments)

    def object(self, record: bytes) -> tuple[bytes, bytes]:
        """Return the oid and the tid of a new object."""
        oid = self.other.new_oid()
        return oid, commit(self.other, (oid, z64, record))

    def see(self, oid: bytes) -> None:
        """Have the object in the cache of `mine`, as it is now: without history it is there alone afterwards."""
        view = self.mine.new_instance()
        view.poll_invalidations()
        view.load(oid)
        view.release()

    def conflict(self, kind=ConflictError, record=state, user='', description='', read=False) -> ConflictError:
        """Change an object in both storages; return the error, checked for what each has to be."""
        oid, base = self.object(record(0))
        self.see(oid)
        tid = self.other.tpc_finish(voted(self.other, (oid, base, record(1)), user=user, description=description))
        with self.assertRaises(ConflictError) as raised:
            if read:
                voted(self.mine, (self.mine.new_oid(), z64, record(2)), read=[(oid, base)])
            else:
                voted(self.mine, (oid, base, record(2)))
        error = raised.exception
        self.assertIs(type(error), kind)
        self.assertIsInstance(error, TransientError)
        self.assertEqual((error.oid, error.serials), (oid, (tid, base)))
        self.assertEqual((error.get_oid(), error.get_old_serial(), error.get_new_serial()), (oid, base, tid))
        text = str(error)
        for said in oid_repr(oid), readable_tid_repr(base), readable_tid_repr(tid):
            self.assertIn(said, text)
        self.assertLessEqual(len(text.encode()), 2000)
        self.assertTrue(text.isprintable(), text)
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), str(again), again.class_name), (kind, text, error.class_name))
        return error


class Errors(Suite):

    def test_says_class_and_both_transactions(self):
        for read, kind in (False, ConflictError), (True, ReadConflictError):
            with self.subTest(read=read):
                error = self.conflict(kind, user='/Plone/acl_users editor', description='/Plone/news/edit', read=read)
                self.assertEqual(error.class_name, MINPO)
                self.assertIn(MINPO, str(error))
                for said in 'editor', '/Plone/news/edit':
                    self.assertEqual(said in str(error), self.keep_history)

    def test_hostile_texts_are_cut_and_on_one_line(self):
        for user, description in (('u' * 60_000, 'd' * 60_000), ('ü' * 9_000, '\N{SNOWMAN}' * 9_000),
                                  ('\n\x1b[31m\0', 'a\r\nb\u2028c\u202ed'), ('', ''), ('%s{0}', '%(x)s"\\')):
            with self.subTest(user[:5]):
                error = self.conflict(user=user, description=description)
                if description.startswith('a') and self.keep_history:
                    self.assertIn('"a b c d"', str(error))

    def test_class_that_cannot_be_imported(self):
        error = self.conflict(record=lambda n: TRAP + b'%d' % n)
        self.assertEqual(error.class_name, 'relstore.tests.no_such_module.Trap')

    def test_what_is_no_record(self):
        for record in b'', b'abc', b'\x80', b'c\xff\n\xff\n', b'(', b'\x80\x03K\x01.':
            with self.subTest(record):
                base_of = iter((b'0', record, record))
                self.conflict(record=lambda n: next(base_of))

    def test_created_twice(self):
        oid, tid = self.object(state(1))
        with self.assertRaisesRegex(ConflictError, 'MinPO') as raised:
            voted(self.mine, (oid, z64, state(2)))
        self.assertEqual(raised.exception.serials, (tid, z64))

    def test_deleted_here_and_changed_there(self):
        oid, base = self.object(counter(1))
        commit(self.other, (oid, base, counter(2)))
        txn = TransactionMetaData()
        self.mine.tpc_begin(txn)
        self.mine.deleteObject(oid, base, txn)
        with self.assertRaisesRegex(ConflictError, 'PCounter'):
            self.mine.tpc_vote(txn)
        self.mine.tpc_abort(txn)

    def test_with_an_object_that_is_not_there(self):
        """Nobody else is to blame; least of all who made the database, in tid 0."""
        oid, base = self.mine.new_oid(), p64(7)
        with self.assertRaises(ConflictError) as raised:
            voted(self.mine, (oid, base, state(2)))
        self.assertEqual((raised.exception.oid, raised.exception.serials), (oid, (z64, base)))
        self.assertNotIn('other transaction', str(raised.exception))

    def test_holds_no_lock_and_no_session(self):
        """From when the error is raised: the application may take its time to abort."""
        oid, base = self.object(state(0))
        tid = commit(self.other, (oid, base, state(1)))
        txn = TransactionMetaData()
        self.mine.tpc_begin(txn)
        self.mine.store(oid, base, state(2), '', txn)
        with self.assertRaises(ConflictError):
            self.mine.tpc_vote(txn)
        impatient = self.opened(commit_lock_timeout=1)
        commit(impatient, (oid, tid, state(3)))
        self.mine.tpc_abort(txn)
        self.assertEqual(self.mine.database.pool.lent, 0)

    def test_nothing_more_can_be_found_out(self):
        """What happened is known, so that is what is said, with what is known without the database."""
        with patch.object(resolving, '_author', side_effect=Disconnected('by the test')):
            error = self.conflict(user='editor')
        self.assertEqual(error.class_name, MINPO)
        self.assertNotIn('editor', str(error))

    def test_wrapped_records(self):
        """As zlibstorage does it: only the wrapper can read them; and it may fail."""
        class Wrapper:
            def transform_record_data(self, record):
                return b'.z' + record[::-1]

            def untransform_record_data(self, record):
                if record[:2] != b'.z':
                    raise RuntimeError('not mine')
                return record[:1:-1]

        wrap = Wrapper().transform_record_data
        for storage in self.mine, self.other:
            storage.registerDB(Wrapper())
        self.assertEqual(self.conflict(record=lambda n: wrap(state(n))).class_name, MINPO)
        oid, base = self.object(wrap(counter(0)))
        self.see(oid)
        commit(self.other, (oid, base, wrap(counter(1))))
        commit(self.mine, (oid, base, wrap(counter(10))))
        self.assertEqual(value_of(Wrapper().untransform_record_data(self.mine.loadSerial(
            oid, self.other.getTid(oid)))), 11)
        self.assertEqual([found.class_name for found in self.mine.conflicts()], [COUNTER, MINPO])


class Counted(Suite):

    def test_resolved_and_failed(self):
        oid, base = self.object(counter(0))
        self.see(oid)
        for n in range(1, 3):
            commit(self.other, (oid, self.other.getTid(oid), counter(n)))
        before = time.time()
        commit(self.mine, (oid, base, counter(10)))
        self.assertEqual(value_of(self.mine.loadSerial(oid, self.mine.getTid(oid))), 12)
        error = self.conflict()
        found = {each.oid: each for each in self.mine.new_instance().conflicts()}
        self.assertEqual(found[error.oid][:5], (error.oid, MINPO, 1, 0, 1))
        self.assertTrue(before <= found[error.oid].last <= time.time())
        self.assertEqual(found[oid][:5], (oid, COUNTER, 1, 1, 0))
        stats = self.mine.commit_stats()
        self.assertEqual((stats['commits'], stats['conflicts_resolved'], stats['conflicts_failed']),
                         (1, 1, 1))
        self.assertEqual(self.other.commit_stats()['conflicts_failed'], 0, 'it was first each time')
        self.mine.close()
        self.assertEqual(self.mine.conflicts(), [])

    def test_commits_alone_count_nothing_else(self):
        oid, tid = self.object(state(0))
        for n in range(3):
            tid = commit(self.mine, (oid, tid, state(n)), (self.mine.new_oid(), z64, state(n)))
        stats = self.mine.commit_stats()
        # On MySQL a slow disk looks like waiting.
        self.assertEqual({name: value for name, value in stats.items() if value and 'wait' not in name}, {'commits': 3})
        self.assertEqual([each for each in self.mine.conflicts() if each.conflicts], [])


class Waiting(Suite):
    """On servers, where objects have locks."""

    def setUp(self):
        super().setUp()
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)

    def held(self, work: Callable) -> float:
        """Call work() when somebody has waited for LONG at least; return how long it was, by the clock here."""
        self.watch.until_somebody_waits()
        began = time.monotonic()
        time.sleep(LONG)
        waited = time.monotonic() - began
        work()
        return waited

    def test_for_an_object(self):
        others = [self.object(state(0)) for _ in range(2)]
        oid, base = self.object(counter(0))
        others += [self.object(state(0)) for _ in range(2)]     # none of them is to be blamed
        self.mine.loadSerial(oid, base)
        first = voted(self.other, (oid, base, state(1)))
        second = self.started(voted, self.mine, (oid, base, state(2)), *((*each, state(1)) for each in others))
        waited = self.held(lambda: self.other.tpc_finish(first))
        self.assertIsInstance(second.exception(30), ConflictError)
        found, *others = self.mine.conflicts()
        self.assertEqual((found.oid, found.class_name, found.failed), (oid, MINPO, 1))
        self.assertGreaterEqual(found.waited, waited)
        self.assertLess(found.waited, waited + 5)
        self.assertLess(sum(other.waited for other in others), waited / 2)
        stats = self.mine.commit_stats()
        self.assertGreaterEqual(stats['waited_objects'], found.waited)
        self.assertEqual(stats['longest_wait'], found.waited)

    def test_for_an_object_that_is_created_elsewhere(self):
        oid = p64(1 << 40)
        first = voted(self.other, (oid, z64, state(1)))
        second = self.started(voted, self.mine, (oid, z64, state(2)))
        waited = self.held(lambda: self.other.tpc_finish(first))
        self.assertIsInstance(second.exception(30), ConflictError)
        self.assertGreaterEqual(self.mine.commit_stats()['waited_objects'], waited)

    def test_for_the_commit_lock(self):
        txn = voted(self.mine, (self.mine.new_oid(), z64, state(1)))
        self.watch.take_commit_lock()
        finish = self.started(self.mine.tpc_finish, txn)
        watch, self.watch = self.watch, self.new_watch()
        self.addCleanup(self.watch.close)
        waited = self.held(watch.release_commit_lock)
        finish.result(30)
        stats = self.mine.commit_stats()
        self.assertGreaterEqual(stats['waited_commit'], waited)
        self.assertLess(stats['waited_commit'], waited + 5)
        self.assertLess(stats['waited_objects'], waited / 2)

    def test_in_vain(self):
        impatient = self.opened(commit_lock_timeout=1)
        free, (oid, base) = self.object(state(0)), self.object(state(0))
        first = voted(self.other, (oid, base, state(1)))
        with self.assertRaises(LockTimeout) as raised:
            voted(impatient, (*free, state(2)), (oid, base, state(2)))
        self.check_holder(str(raised.exception), oid)
        stats = impatient.commit_stats()
        self.assertEqual(stats['lock_timeouts'], 1)
        self.assertGreaterEqual(stats['waited_in_vain'], 0.9)
        [found] = [each for each in impatient.conflicts() if each.waited > 0.5]
        self.assertEqual(found[:5], (oid, MINPO, 0, 0, 0))
        self.assertEqual(impatient.database.pool.lent, 0)
        self.other.tpc_finish(first)
        commit(impatient, (*free, state(2)))

    def check_holder(self, text: str, oid: bytes) -> None:
        self.assertIn(f'{u64(oid):#x}', text)
        self.assertIn('(commit-lock-timeout)', text)
        self.assertIn(f' {self.number()} ', text)
        self.assertRegex(text, r'in a transaction (for \d+ s|since \d\d:\d\d:\d\d UTC)\)')
        self.assertLessEqual(len(text.encode()), 2000)

    def number(self) -> int:
        """Return the server's number of the connection that is in a transaction."""
        if isinstance(self.watch, Watch):
            return self.watch.one("SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                                  "AND state = 'idle in transaction'")
        return self.watch.one('SELECT id FROM information_schema.innodb_trx JOIN information_schema.processlist '
                              'ON id = trx_mysql_thread_id WHERE db = DATABASE()')

    def test_read_and_being_changed(self):
        oid, base = self.object(counter(0))
        first = voted(self.other, (oid, base, counter(1)))
        with self.assertRaises(ReadConflictError) as raised:
            voted(self.mine, (self.mine.new_oid(), z64, state(1)), read=[(oid, base)])
        self.other.tpc_abort(first)
        error = raised.exception
        self.assertEqual((error.oid, error.class_name, error.serials), (oid, COUNTER, (base, base)))
        self.assertIn('is being changed', str(error))
        self.assertEqual(self.mine.conflicts()[0][:5], (oid, COUNTER, 1, 0, 1))


class Outdated(Suite):
    """What has read something that was changed since fails whatever it waits for."""

    def test_it_waits_for_no_lock(self):
        locked, free, reads = self.object(state(0)), self.object(state(0)), [self.object(state(0)) for _ in range(3)]
        oid, base = reads[1]
        tid = commit(self.other, (oid, base, state(1)))
        impatient = self.opened(commit_lock_timeout=2)
        first = voted(self.other, (*locked, state(1)))
        for _ in range(2):
            with self.assertRaises(ReadConflictError) as raised:
                voted(impatient, (*free, state(2)), (*locked, state(2)), read=reads)
            self.assertEqual((raised.exception.oid, raised.exception.serials), (oid, (tid, base)))
        stats = impatient.commit_stats()
        self.assertEqual((stats['longest_wait'], stats['lock_timeouts']), (0, 0))
        reads[1] = oid, tid
        with self.assertRaises(LockTimeout):
            voted(impatient, (*free, state(2)), (*locked, state(2)), read=reads)
        self.other.tpc_finish(first)
        impatient.tpc_finish(voted(impatient, (*free, state(2)), read=reads))
        with self.assertRaises(ReadConflictError):
            voted(impatient, (impatient.new_oid(), z64, state(2)), read=[locked])


class WaitingOnPostgreSQL(Suite):

    def setUp(self):
        super().setUp()
        self.watch, self.large = self.new_watch(), self.new_watch()
        for watch in self.watch, self.large:
            self.addCleanup(watch.close)

    def test_for_a_large_transaction(self):
        impatient = self.opened(commit_lock_timeout=0.1)
        change = impatient.new_oid(), z64, state(1)
        self.large.rows('SELECT pg_advisory_lock(-3)')
        with self.assertRaisesRegex(LockTimeout, 'large transaction') as raised:
            voted(impatient, change)
        self.assertIn(f' {self.large.one("SELECT pg_backend_pid()")} ', str(raised.exception))
        second = self.started(voted, self.mine, change)
        self.watch.until_somebody_waits()
        began = time.monotonic()
        time.sleep(LONG)
        waited = time.monotonic() - began
        self.large.rows('SELECT pg_advisory_unlock(-3)')
        self.mine.tpc_finish(second.result(30))
        self.assertGreaterEqual(self.mine.commit_stats()['waited_everybody'], waited)


    def test_another_database_is_not_blamed(self):
        """Advisory locks are those of one database, and the same oids are in all."""
        impatient = self.opened(commit_lock_timeout=0.1)
        oid, base = self.object(state(0))
        elsewhere = Watch(self.dsn('elsewhere'))
        self.addCleanup(elsewhere.close)
        elsewhere.rows('BEGIN; SELECT pg_advisory_xact_lock(%s)', u64(oid))
        first = voted(self.other, (oid, base, state(1)))
        with self.assertRaises(LockTimeout) as raised:
            voted(impatient, (oid, base, state(2)))
        self.assertIn(f' {self.other.committing.session.backend_pid} ', str(raised.exception))
        self.other.tpc_abort(first)


class DeadlocksOnPostgreSQL(Suite):
    """Others may lock in another order than relstore does."""

    def setUp(self):
        super().setUp()
        self.impatient = relstore.RelStore(
            relstore.PostgreSQL(f'{self.dsn()} options=-cdeadlock_timeout=50ms', driver=self.driver),
            keep_history=self.keep_history, commit_lock_timeout=20)
        self.addCleanup(self.impatient.close)
        self.watch, self.third = self.new_watch(), self.new_watch()
        for watch in self.watch, self.third:
            self.addCleanup(watch.close)
        self.third.rows("SET deadlock_timeout = '20s'")      # who has waited longer is not to notice it

    def check_told(self, deadlocks: int, commits: int) -> None:
        stats = self.impatient.commit_stats()
        self.assertEqual((stats['deadlocks'], stats['commits']), (deadlocks, commits))
        self.assertEqual(self.impatient.database.pool.lent, 0)

    def test_in_vote(self):
        """It is asked again, and waits for whoever has won."""
        low, middle, high = sorted(self.object(state(0))[0] for _ in range(3))
        base = [self.other.getTid(oid) for oid in (low, middle, high)]
        self.watch.rows('SELECT pg_advisory_lock(%s)', u64(middle))
        vote = self.started(voted, self.impatient, *(
            (oid, tid, state(1)) for oid, tid in zip((low, middle, high), base, strict=True)))
        self.watch.until_somebody_waits()
        self.third.rows('BEGIN')
        self.third.rows('SELECT pg_advisory_xact_lock(%s)', u64(high))
        wanted = self.started(self.third.rows, 'SELECT pg_advisory_xact_lock(%s)', u64(low))
        self.watch.until("(SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' "
                         'AND datname = current_database()) = 2')
        self.watch.rows('SELECT pg_advisory_unlock(%s)', u64(middle))
        wanted.result(30)
        self.watch.until_somebody_waits()
        self.assertFalse(vote.done())
        self.third.rows('ROLLBACK')
        self.impatient.tpc_finish(vote.result(30))
        self.check_told(deadlocks=1, commits=1)
        self.assertEqual([value_of(self.other.load(oid)[0]) for oid in (low, middle, high)], [1, 1, 1])

    def test_twice_in_vote(self):
        oid, base = self.object(state(0))
        with patch.object(self.impatient.database.adapter.commit_type, 'vote',
                          side_effect=Deadlock(message='of this test')), self.assertRaises(ConflictError):
            voted(self.impatient, (oid, base, state(1)))
        self.check_told(deadlocks=2, commits=0)
        commit(self.impatient, (oid, base, state(1)))

    def test_in_finish(self):
        oid, base = self.object(state(0))
        txn = voted(self.impatient, (oid, base, state(1)))
        self.third.rows('BEGIN')
        self.third.rows('SELECT pg_advisory_xact_lock(-1)')
        wanted = self.started(self.third.rows, 'SELECT pg_advisory_xact_lock(%s)', u64(oid))
        self.watch.until_somebody_waits()
        with self.assertRaises(Deadlock) as raised:
            self.impatient.tpc_finish(txn)
        self.impatient.tpc_abort(txn)
        self.assertIsInstance(raised.exception, ConflictError)
        wanted.result(30)
        self.check_told(deadlocks=1, commits=0)
        self.third.rows('ROLLBACK')
        commit(self.impatient, (oid, base, state(1)))


class WaitingOnMySQL(Suite):

    def test_who_may_not_see_others_is_told_less(self):
        """A user with no rights but those on the database."""
        server, database = self.layer.server, self._database('main')
        server.run("CREATE USER IF NOT EXISTS modest@'%' IDENTIFIED BY 'modest'")
        self.addCleanup(server.run, "DROP USER modest@'%'")
        server.run(f"GRANT ALL ON {server.prefix}{database}.* TO modest@'%'")
        arguments = self.arguments() | {'user': 'modest', 'passwd': 'modest'}
        modest = relstore.RelStore(relstore.MySQL(**arguments, driver=self.driver), keep_history=self.keep_history,
                                   commit_lock_timeout=1)
        self.addCleanup(modest.close)
        oid, base = self.object(state(0))
        first = voted(self.other, (oid, base, state(1)))
        with self.assertRaises(LockTimeout) as raised:
            voted(modest, (oid, base, state(2)))
        self.other.tpc_abort(first)
        self.assertRegex(str(raised.exception), f'^The object {u64(oid):#x} was held for 1 s .* by one of 1 '
                                                r'transactions that have voted and not finished, the oldest \d+ s ago')
        commit(modest, (oid, base, state(2)))


HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute('BEGIN IMMEDIATE')
print('held', flush=True)
sys.stdin.read()
"""


class WaitingOnSQLite(Suite):

    def setUp(self):
        super().setUp()
        self.impatient = self.opened(commit_lock_timeout=0.2)
        self.oids = [self.impatient.new_oid() for _ in range(2)]

    def in_vain(self) -> str:
        """Return what is said where the lock cannot be had."""
        with self.assertRaises(LockTimeout) as raised:
            voted(self.impatient, (self.oids[0], z64, state(1)))
        stats = self.impatient.commit_stats()
        self.assertEqual(stats['lock_timeouts'], 1)
        self.assertGreaterEqual(stats['waited_in_vain'], 0.2)
        self.assertEqual(self.impatient.database.pool.lent, 0)
        text = str(raised.exception)
        self.assertRegex(text, r'^The commit lock was held for 0\.2 s \(commit-lock-timeout\) by ')
        return text

    def test_for_another_thread(self):
        first = voted(self.other, (self.oids[1], z64, state(1)))
        said = self.in_vain()
        self.assertIn(' by another ', said)
        if sys.platform == 'linux':
            self.assertIn('another thread of this process', said)
        second = self.started(voted, self.mine, (self.oids[0], z64, state(1)))
        began = time.monotonic()
        while time.monotonic() < began + LONG:
            self.assertFalse(second.done())
            time.sleep(0.01)
        self.other.tpc_finish(first)
        self.mine.tpc_finish(second.result(30))
        waited = self.mine.commit_stats()['waited_commit']
        self.assertGreater(waited, LONG / 2)
        self.assertLess(waited, LONG + 5)
        self.assertEqual(self.mine.conflicts(), [])

    def test_for_another_process(self):
        with subprocess.Popen([sys.executable, '-c', HOLDER, str(self.address().path)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as holder:
            self.assertEqual(holder.stdout.readline(), b'held\n')
            said = self.in_vain()
            holder.stdin.close()
        self.assertIn(f'the process {holder.pid} (python' if sys.platform == 'linux' else 'another process', said)
        commit(self.impatient, (self.oids[0], z64, state(1)))       # SQLite's own locks are as they were

    def test_asking_who_it_is_drops_no_lock(self):
        """Whoever closes a file drops all the locks that the process has on it."""
        first = voted(self.other, (self.oids[1], z64, state(1)))
        self.in_vain()
        with subprocess.Popen([sys.executable, '-c', HOLDER, str(self.address().path)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE) as thief:
            second = self.started(thief.stdout.readline)
            with self.assertRaises(TimeoutError):
                second.result(LONG)
            self.other.tpc_finish(first)
            self.assertEqual(second.result(30), b'held\n')


    def test_what_is_not_the_vote_waits_as_before(self):
        """Whichever way the session before had the lock: at once, after a while, or not at all."""
        def commit_at_once():
            commit(self.impatient, (self.impatient.new_oid(), z64, state(1)))

        def commit_after_a_while():
            first = voted(self.other, (self.oids[1], z64, state(1)))
            second = self.started(voted, self.impatient, (self.oids[0], z64, state(1)))
            with self.assertRaises(TimeoutError):
                second.result(0.05)
            self.other.tpc_abort(first)
            self.impatient.tpc_finish(second.result(30))

        def commit_in_vain():
            first = voted(self.other, (self.oids[1], z64, state(1)))
            self.in_vain()
            self.other.tpc_abort(first)

        def fail_to_begin():
            with patch.object(adapter.sql, 'begin_write', 'BEGIN EVENTUALLY'), self.assertRaises(StorageError):
                commit_at_once()

        pool, adapter = self.impatient.database.pool, self.impatient.database.adapter
        for before in commit_in_vain, commit_at_once, commit_after_a_while, fail_to_begin:
            with self.subTest(before.__name__):
                before()
                first = voted(self.other, (self.oids[1], z64, state(1)))
                try:
                    oids = self.started(pool.attempt, lambda session: adapter.new_oids(session, 1))
                    with self.assertRaises(TimeoutError):
                        oids.result(0.05)
                finally:
                    self.other.tpc_abort(first)
                self.assertEqual(len(oids.result(30)), 1)


class Table(TestCase):

    def setUp(self):
        self.conflicts = Conflicts()

    def oids(self) -> list[int]:
        return [u64(each.oid) for each in self.conflicts.objects()]

    def test_most_conflicts_first(self):
        for oid, times in (1, 2), (2, 5), (3, 1):
            for _ in range(times):
                self.conflicts.conflict(oid, 'a.B', resolved=True)
        self.conflicts.waited(4, 100.0)
        self.conflicts.waited(5, 200.0)
        self.assertEqual(self.oids(), [2, 1, 3, 5, 4])

    def test_is_bounded_and_keeps_the_worst(self):
        for oid in range(1, 6):
            for _ in range(oid + 1):
                self.conflicts.conflict(oid, 'a.B', resolved=False)
        for oid in range(100, 100 + 10 * conflicts.OBJECTS):
            self.conflicts.conflict(oid, 'a.C', resolved=True)
            self.conflicts.waited(oid, 0.5)
            self.assertLessEqual(len(self.conflicts._all.objects), conflicts.OBJECTS)
        oids = self.oids()
        self.assertEqual(oids[:5], [5, 4, 3, 2, 1])
        self.assertGreaterEqual(len(oids), conflicts.OBJECTS // 2)
        self.assertIn(100 + 10 * conflicts.OBJECTS - 1, oids)
        self.assertEqual(self.conflicts.stats()['conflicts_resolved'], 10 * conflicts.OBJECTS)

    def test_many_threads(self):
        """While the log is told all the time."""
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)
        self.addCleanup(conflicts.log.setLevel, conflicts.log.level)
        conflicts.log.setLevel(logging.CRITICAL)
        often = patch.object(conflicts, 'PERIOD_SECONDS', 0.0)
        often.start()
        self.addCleanup(often.stop)

        def work(first):
            for n in range(400):
                self.conflicts.conflict(n % 7, 'a.B', resolved=n % 2 == 0)
                self.conflicts.waited(first + n, 0.5)
                self.conflicts.committed(0.25)
                self.conflicts.objects() if n % 100 == 0 else None

        with ThreadPoolExecutor(8) as threads:
            for job in [threads.submit(work, 10_000 * n) for n in range(1, 9)]:
                job.result()
        stats = self.conflicts.stats()
        self.assertEqual((stats['conflicts_resolved'], stats['conflicts_failed']), (1600, 1600))
        self.assertEqual((stats['waited_objects'], stats['waited_commit']), (1600, 800))
        self.assertEqual(sum(each.conflicts for each in self.conflicts.objects()), 3200)

    def test_kinds_of_waiting(self):
        for lock, seconds in (COMMIT_LOCK, 1.0), (SOME_OBJECTS, 2.0), (EVERYBODY, 4.0), (7, 8.0):
            self.conflicts.waited(lock, seconds)
        stats = self.conflicts.stats()
        self.assertEqual([stats[name] for name in (
            'waited_commit', 'waited_objects', 'waited_everybody', 'longest_wait')], [1, 10, 4, 8])
        self.assertEqual([(u64(each.oid), each.waited, each.conflicts) for each in self.conflicts.objects()],
                         [(7, 8.0, 0)])

    def test_after_a_fork_the_child_begins_anew(self):
        self.conflicts.conflict(1, 'a.B', resolved=True)
        with self.conflicts._lock:      # held by another thread at that moment
            self.conflicts.after_fork()
        self.conflicts.conflict(2, 'a.B', resolved=True)
        self.assertEqual(self.oids(), [2])


class Log(TestCase):

    def setUp(self):
        self.conflicts = Conflicts()

    def lines(self, work: Callable) -> list[tuple[int, str]]:
        """Return (level, message) of what work() has the log told, from INFO on."""
        with self.assertLogs('relstore', logging.INFO) as logs:
            logging.getLogger('relstore').info('only to have one')
            work()
        return [(record.levelno, record.getMessage()) for record in logs.records[1:]]

    def minute_later(self) -> None:
        self.conflicts._told -= conflicts.PERIOD_SECONDS

    def test_one_line_a_minute(self):
        def work():
            for oid in range(1000):
                self.conflicts.conflict(oid % 10, 'a.B', resolved=True)

        [(level, first)] = self.lines(work)
        self.assertEqual(level, logging.INFO)
        self.assertIn('1 conflicts resolved', first)
        self.assertEqual(self.lines(work), [])
        self.minute_later()
        [(level, second)] = self.lines(lambda: self.conflicts.committed(0.0))
        self.assertEqual(level, logging.INFO)
        self.assertIn('1999 conflicts resolved', second)
        self.assertEqual(second.count('class a.B'), conflicts.TOP)
        self.minute_later()
        self.assertEqual(self.lines(lambda: self.conflicts.committed(0.0)), [])

    def test_failures_are_warnings(self):
        for failure in (lambda: self.conflicts.conflict(1, 'a.B', resolved=False),
                        lambda: self.conflicts.lock_timeout(3.5), self.conflicts.deadlock):
            [(level, line)] = self.lines(failure)
            self.assertEqual(level, logging.WARNING, line)
            self.minute_later()

    def test_waits_are_told(self):
        [(level, line)] = self.lines(lambda: self.conflicts.waited(0x1f, 3.25, 'a.B'))
        self.assertEqual(level, logging.INFO)
        self.assertIn('3.250 s waited for locks', line)
        self.assertIn('Oid 0x1f, class a.B', line)

    def test_the_rest_at_close(self):
        self.conflicts.conflict(1, 'a.B', resolved=True)
        self.conflicts.conflict(2, 'a.B', resolved=True)
        [(_, line)] = self.lines(self.conflicts.close)
        self.assertIn('Oid 0x2', line)
        self.assertEqual(self.lines(self.conflicts.close), [])

    def test_each_on_demand(self):
        with self.assertLogs('relstore.conflicts', logging.DEBUG) as logs:
            self.conflicts.conflict(0x1f, 'a.B', resolved=True)
            self.conflicts.conflict(0x1f, 'a.B', resolved=True)
        self.assertEqual(sum(record.levelno == logging.DEBUG for record in logs.records), 2)

    def test_line_is_short(self):
        for oid in range(conflicts.OBJECTS):
            self.conflicts.conflict(oid, class_name(b'cm\n' + b'n' * 3500 + b'\n.'), resolved=True)
        [(_, line)] = self.lines(self.conflicts.close)
        self.assertLess(len(line), 4000)


class ClassNames(TestCase):

    def test_of_what_zodb_writes(self):
        """Class alone, class with arguments, names with arguments; by every protocol there is, of both picklers."""
        for pickler in pickle, zodbpickle.pickle:
            for protocol in range(pickler.HIGHEST_PROTOCOL + 1):
                for meta in Named, (Named, (1, 'two')), ((Named.__module__, 'Named'), None):
                    with self.subTest(pickler=pickler.__name__, protocol=protocol, meta=meta):
                        record = pickler.dumps(meta, protocol) + pickler.dumps({}, protocol)
                        self.assertEqual(class_name(record), f'{Named.__module__}.Named')

    def test_imports_and_runs_nothing(self):
        self.assertEqual(class_name(TRAP), 'relstore.tests.no_such_module.Trap')
        self.assertEqual(class_name(pickle.dumps(Bomb())), 'builtins.exec')

    def test_of_what_cannot_be_read(self):
        noise = random.Random(1)
        whole = pickle.dumps((Named, (1, 'two')), 4)
        for record in (None, b'', b'.', b'\x80', b'abc', whole[:9], b'}.', b'\x80\x03K\x01.'):
            self.assertEqual(class_name(record), '')
        for n in range(5000):
            damaged = bytearray(pickle.dumps((Named, (1, 'two')), n % 6))
            for _ in range(3):
                damaged[noise.randrange(len(damaged))] = noise.randrange(256)
            name = class_name(bytes(damaged))
            self.assertTrue(name.isprintable() and len(name.encode()) <= references.NAME_BYTES, name)

    def test_plain(self):
        for text, limit, expected in (
                ('abc', 3, 'abc'), ('abcd', 3, '...'), (b'a\xffb', 10, 'a\ufffdb'), ('a\n\tb', 10, 'a b'),
                ('\ud800a\x1b', 10, 'a'), ('\N{SNOWMAN}' * 5, 10, '\N{SNOWMAN}' * 2 + '...'), ('', 10, ''),
                (b'x' * 10 ** 6, 10, 'xxxxxxx...'), ('\n' * 10 ** 6 + 'x', 10, '')):
            with self.subTest(text[:10]):
                self.assertEqual(plain(text, limit), expected)


class Named:
    """A class to be named."""


class Bomb:
    def __reduce__(self):
        return exec, ('raise SystemExit',)


cases(globals(), Errors, Counted, Outdated, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree, *SERVERS))
cases(globals(), Waiting, backends=SERVERS)
cases(globals(), WaitingOnPostgreSQL, DeadlocksOnPostgreSQL, backends=(Psycopg2HistoryPreserving,))
cases(globals(), WaitingOnMySQL, backends=(MySQLdbHistoryPreserving, MySQLdbOnMySQLHistoryFree))
cases(globals(), WaitingOnSQLite, backends=(SQLiteHistoryPreserving,))
del Suite, Errors, Counted, Outdated, Waiting
del WaitingOnPostgreSQL, DeadlocksOnPostgreSQL, WaitingOnMySQL, WaitingOnSQLite
