"""Promises that are kept when something goes wrong: nothing is stored that was refused, nothing told that is not so,
no oid given twice, nothing held that others wait for.
"""
import contextlib
import io
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from unittest import TestCase
from unittest.mock import patch

from persistent.mapping import PersistentMapping
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.POSException import POSKeyError, ReadConflictError, StorageError, UndoError
from ZODB.utils import p64, u64, z64

import relstore
from relstore import spool
from relstore.cli import main, statements
from relstore.errors import LockTimeout, Unavailable
from relstore.oids import OidAllocator
from relstore.sessions.drivers import DRIVERS
from relstore.sessions.session import Session
from relstore.tests.support import adopted
from relstore.tests.support.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit, voted
from relstore.tests.support.crashing import Crashing
from relstore.tests.support.faults import Faults
from relstore.tests.support.objects import exists
from relstore.tests.support.records import state, value_of
from relstore.tests.support.watch import Watch

POSTGRESQL = Psycopg2HistoryPreserving, Psycopg2HistoryFree
SQLITE = SQLiteHistoryPreserving, SQLiteHistoryFree
HISTORY_PRESERVING = SQLiteHistoryPreserving, Psycopg2HistoryPreserving, *MYSQL[::2]
HISTORY_FREE = SQLiteHistoryFree, Psycopg2HistoryFree, *MYSQL[1::2]

MINUTE = 1 << 32        # of a tid


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self.storage, self.other = self.opened(), self.opened()     # as two processes have it
        self.view = self.storage.new_instance()
        self.addCleanup(self.view.release)

    def opened(self, **options):
        storage = self.open_storage(**{'commit_lock_timeout': 10} | options)
        self.addCleanup(storage.close)
        return storage

    def enter(self, context):
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def objects(self, count: int) -> tuple[list[bytes], bytes]:
        """Return the oids of new objects that both storages see, and their tid."""
        oids = sorted(self.other.new_oid() for _ in range(count))
        return oids, commit(self.other, *((oid, z64, state(0)) for oid in oids))

    def refused(self, storage, error: type[Exception], oid: bytes, record: bytes, **metadata) -> Exception:
        """Check that vote refuses it, and that the storage goes on; return the exception."""
        txn = TransactionMetaData(**metadata)
        storage.tpc_begin(txn)
        storage.store(oid, z64, record, '', txn)
        with self.assertRaises(error) as raised:
            storage.tpc_vote(txn)
        storage.tpc_abort(txn)
        self.assertFalse(exists(self.other, oid))
        self.assertEqual(storage.database.pool.lent, 0)
        return raised.exception


class LateAnswers(Suite):
    """Another thread of the process learns that the database was emptied, while this one waits."""

    def setUp(self):
        super().setUp()
        (self.first, self.second), _ = self.objects(2)
        self.database = self.storage.database
        self.view.poll_invalidations()
        self.addCleanup(self.view.afterCompletion)

    def empty(self):
        self.other.zap_all()
        self.storage.database.pool.attempt(self.database.poll)

    def test_a_poll(self):
        """What it says of the time before is not taken for another change of epoch."""
        self.view.afterCompletion()
        poll = self.database.adapter.poll

        def late(*arguments):
            with patch.object(self.database.adapter, 'poll', poll):
                answer = poll(*arguments)
                self.empty()
            return answer

        with patch.object(self.database.adapter, 'poll', late), self.storage.database.pool.session() as session:
            _, generation = self.database.poll(session)
        self.assertNotEqual(generation, self.database.cache.generation)
        with self.other.database.pool.session() as session:
            self.assertEqual(self.database.epochs.now, session.epoch)

    def test_states(self):
        """They are of a database that is no more."""
        view = self.view.view
        ask, asked = view._read, []

        def late(*arguments):
            result = ask(*arguments)
            self.database.cache.restart(self.database.cache.head)
            asked.append(result)
            return result

        def load_two(oid):
            with patch.object(view.ahead, 'beside', lambda *_: [u64(self.second)]):
                self.view.load(oid)

        reads = self.view.load, load_two, lambda oid: self.view.prefetch([oid])
        for read in reads:
            with patch.object(view, '_read', late):
                read(self.first)
            self.assertEqual(self.storage.cache_stats()['objects'], 0)
            self.view.afterCompletion()
            self.view.poll_invalidations()
        self.assertEqual(len(asked), len(reads))


class CopyOfPacked(Suite):
    """What was packed away cannot be put back, neither in the source nor in a copy of it."""

    def setUp(self):
        super().setUp()
        directory = self.enter(tempfile.TemporaryDirectory())
        source = DB(FileStorage(str(Path(directory) / 'Data.fs')))
        self.addCleanup(source.close)
        for n in range(3):
            with source.transaction() as connection:
                connection.root()['n'] = n
                connection.root().setdefault('kept', PersistentMapping())
        source.pack(time.time() + 1)
        with source.transaction() as connection:
            connection.root()['n'] = 'after'
        self.source = source.storage
        self.storage.copyTransactionsFrom(self.source)

    def test_the_mark_is_kept(self):
        found = [(txn.tid, txn.status) for txn in self.storage.iterator()]
        self.assertIn('p', [status for _, status in found])
        self.assertEqual(found, [(txn.tid, txn.status) for txn in self.source.iterator()])

    def test_the_same_can_be_undone(self):
        offered = [entry['time'] for entry in self.storage.undoLog(0, 100)]
        self.assertEqual(offered, [entry['time'] for entry in self.source.undoLog(0, 100)])

    def test_undo_removes_nothing(self):
        packed = [txn.tid for txn in self.source.iterator() if txn.status == 'p']
        before = records(self.storage)
        for tid in packed:
            with self.assertRaises(UndoError):
                commit(self.storage, work=lambda txn, tid=tid: self.storage.undo(tid, txn))
        self.assertEqual(records(self.storage), before)


class Emptied(Suite):
    """Another process empties the database."""

    def test_no_oid_is_given_twice(self):
        self.storage.new_oid()
        self.other.zap_all()
        self.view.poll_invalidations()
        self.view.afterCompletion()
        given = [storage.new_oid() for storage in (self.other, self.view) for _ in range(40)]
        self.assertEqual(len(set(given)), len(given))

    def test_who_empties_it_can_commit(self):
        [oid], tid = self.objects(1)
        self.view.poll_invalidations()
        self.view.load(oid)
        self.view.zap_all()
        self.assertFalse(exists(self.view, oid))
        commit(self.view, (oid, z64, state(1)))
        self.assertEqual(value_of(self.other.load(oid)[0]), 1)

    def test_prefetch_does_not_mix_the_two(self):
        """The object is there again, older than the view: only the epoch tells that it is another."""
        [oid], tid = self.objects(1)
        self.view.poll_invalidations()
        self.view.afterCompletion()
        self.other.zap_all()
        commit(self.other, (oid, z64, state('another')), tid=p64(u64(tid) - MINUTE))
        self.storage.database.pool.retire()     # the session of the prefetch is to be a new one
        self.view.prefetch([oid])
        with self.assertRaises(ReadConflictError):
            self.view.load(oid)
        self.assertIsNone(self.view.poll_invalidations())
        self.assertEqual(value_of(self.view.load(oid)[0]), 'another')
        self.view.afterCompletion()


class FullDisk(Suite):

    def test_it_is_told_at_vote(self):
        """The newest tid is in the future, so the next commit, whoever's it is, gets the very next."""
        [oid], tid = self.objects(1)
        newest = commit(self.other, (oid, tid, state(1)), tid=p64(u64(tid) + 1000 * MINUTE))
        with self.other.database.pool.session() as session:
            [[pages]] = session.all('PRAGMA page_count')
        address = relstore.SQLite(str(self._directory / 'main'), pragmas={'max_page_count': pages + 5})
        small = relstore.RelStore(address, keep_history=self.keep_history)
        self.addCleanup(small.close)
        mine = small.new_oid()
        error = self.refused(small, StorageError, mine, state('x' * 1_000_000))
        self.assertIn('full', str(error))
        theirs = commit(self.other, (oid, newest, state(2)))
        self.assertEqual(u64(theirs), u64(newest) + 1)
        self.assertEqual(value_of(small.load(oid)[0]), 2)
        self.assertFalse(exists(small, mine))
        commit(small, (mine, z64, state(3)))
        self.assertEqual(value_of(self.other.load(mine)[0]), 3)


class Interrupted(Suite):

    def test_a_rollback(self):
        """What it leaves in the session, staged objects also, is in no later transaction."""
        self.storage.database.adapter.message_size = 50
        mine, next_one = self.view.new_oid(), self.view.new_oid()
        txn = voted(self.view, (mine, z64, state(1)))
        session = self.view.committing.session
        with patch.object(Session, 'rollback', side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            self.view.tpc_abort(txn)
        commit(self.view, (next_one, z64, state(2)))
        self.assertFalse(exists(self.other, mine))
        self.assertTrue(exists(self.other, next_one))
        self.assertTrue(session.broken)
        self.assertEqual(self.storage.database.pool.lent, 0)


class InterruptedSnapshot(Suite):

    def test_tpc_begin(self):
        [oid], tid = self.objects(1)
        self.view.poll_invalidations()
        self.view.load(oid)
        with patch.object(Session, 'rollback', side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            self.view.tpc_begin(TransactionMetaData())
        self.assertFalse(self.view._commit_lock.locked())
        commit(self.view, (oid, tid, state(1)))


class Ticket(Suite):

    def test_only_the_transaction_that_has_voted_is_finished(self):
        mine = self.view.new_oid()
        txn = voted(self.view, (mine, z64, state(1)))
        earlier = self.view.committing.commit.number
        self.view.tpc_abort(txn)
        txn = voted(self.view, (mine, z64, state(2)))
        self.view.committing.commit.number = earlier
        with self.assertRaisesRegex(StorageError, 'not the transaction that has voted'):
            self.view.tpc_finish(txn)
        self.assertFalse(exists(self.other, mine))


class Locks(Suite):
    """Whose keys are those of the locks? With RelStorage's, both can work on one database."""

    def setUp(self):
        super().setUp()
        self.watch = self.enter(closing(Watch(self.dsn())))
        self.watch.rows('DROP SCHEMA IF EXISTS elsewhere CASCADE')
        self.watch.rows('CREATE SCHEMA elsewhere')
        self.addCleanup(self._drop)
        self.oid = p64(1000)

    def _drop(self):
        with closing(Watch(self.dsn())) as watch:
            watch.rows('DROP SCHEMA elsewhere CASCADE')

    def _elsewhere(self):
        address = relstore.PostgreSQL(self.dsn(), driver=self.driver, schema='elsewhere')
        storage = relstore.RelStore(address, keep_history=self.keep_history, commit_lock_timeout=0.1)
        self.addCleanup(storage.close)
        return storage

    def _kept_as(self):
        return self.watch.one("SELECT value FROM elsewhere.relstore_meta WHERE name = 'locks'")

    def test_relstorage_was_there_before(self):
        tables = adopted.PRESERVING if self.keep_history else adopted.FREE
        self.watch.rows(f'SET search_path = elsewhere; {tables.format(**adopted.POSTGRESQL)}')
        for storage in self._elsewhere(), self._elsewhere():    # the first adopts it, the second reads how
            self.watch.rows('SELECT pg_advisory_lock(%s)', u64(self.oid))
            with self.assertRaises(LockTimeout):
                commit(storage, (self.oid, z64, state(1)))
            self.watch.rows('SELECT pg_advisory_unlock(%s)', u64(self.oid))
        commit(storage, (self.oid, z64, state(1)))
        self.assertEqual(self._kept_as(), 'plain')

    def test_relstore_made_it(self):
        self.watch.rows('SELECT pg_advisory_lock(%s)', u64(self.oid))
        base = z64
        for storage in self._elsewhere(), self._elsewhere():
            base = commit(storage, (self.oid, base, state(1)))
        self.assertEqual(self._kept_as(), 'hashed')


class FailedUndo(Suite):

    def test_nothing_of_it_is_committed(self):
        """Of three objects the middle one cannot be undone; in whatever order, one comes before it."""
        oids, first = self.objects(3)
        second = commit(self.other, *((oid, first, state(1)) for oid in oids))
        commit(self.other, (oids[1], second, state(2)))
        another = self.storage.new_oid()

        def work(txn):
            with self.assertRaises(UndoError):
                self.storage.undo(second, txn)
            self.storage.store(another, z64, state(3), '', txn)

        tid = commit(self.storage, work=work)
        [txn] = self.other.iterator(tid, tid)
        self.assertEqual([record.oid for record in txn], [another])
        self.assertEqual([value_of(self.other.load(oid)[0]) for oid in oids], [1, 2, 1])


class Refused(Suite):
    """After the vote it is too late to say no: another database may have committed."""

    def test_metadata_that_cannot_be_pickled(self):
        oid = self.storage.new_oid()
        self.refused(self.storage, TypeError, oid, state(1), extension={'lock': threading.Lock()})
        commit(self.storage, (oid, z64, state(1)))

    def test_an_object_that_is_too_large(self):
        oid, record = self.storage.new_oid(), state('x' * 2000)
        self.storage.database.adapter.largest_state = 1000
        error = self.refused(self.storage, StorageError, oid, record)
        self.assertIn(f'{u64(oid):#x}', str(error))
        self.assertIn(f'{len(record):,} bytes', str(error))
        commit(self.storage, (oid, z64, state(1)))

    def test_a_tid_that_is_not_above_the_last(self):
        [oid], last = self.objects(1)
        for tid in last, p64(u64(last) - 1):
            txn = TransactionMetaData()
            self.storage.tpc_begin(txn, tid)
            self.storage.restore(oid, tid, state(1), '', None, txn)
            with self.assertRaisesRegex(StorageError, 'the newest'):
                self.storage.tpc_vote(txn)
            self.storage.tpc_abort(txn)


class Staged(Suite):

    def test_one_large_object_goes_ahead(self):
        self.storage.database.adapter.message_size = 1000
        oid, record = self.storage.new_oid(), state('x' * 2000)
        txn = voted(self.storage, (oid, z64, record))
        self.assertEqual(self.storage.committing.session.all('SELECT state FROM pg_temp.relstore_stage'), [(record,)])
        self.storage.tpc_finish(txn)
        self.assertEqual(self.other.load(oid)[0], record)


class AfterCommit(Suite):

    def test_loads_see_one_state(self):
        """Without a poll; and the next poll reports all since the last one."""
        (mine, unread, early), tid = self.objects(3)
        self.view.poll_invalidations()
        self.assertEqual(value_of(self.view.load(mine)[0]), 0)
        theirs = commit(self.other, (early, tid, state(1)))
        own = commit(self.view, (mine, tid, state(1)))
        self.assertGreater(own, theirs)
        seen = [value_of(self.view.load(oid)[0]) for oid in (mine, early)]
        commit(self.other, (mine, own, state(2)), (unread, tid, state(2)))
        self.assertEqual([*seen, value_of(self.view.load(unread)[0])], [1, 1, 0])
        self.assertEqual(set(self.view.poll_invalidations()), {mine, unread, early})
        self.assertEqual([value_of(self.view.load(oid)[0]) for oid in (mine, early, unread)], [2, 1, 2])
        self.view.afterCompletion()

    def test_its_own_changes_are_not_reported(self):
        """ZODB would load again what it has just written."""
        (mine, theirs), tid = self.objects(2)
        self.view.poll_invalidations()
        own = commit(self.view, (mine, tid, state(1)))
        self.assertEqual(self.view.poll_invalidations(), [])
        self.view.afterCompletion()
        commit(self.view, (mine, own, state(2)))
        commit(self.other, (theirs, tid, state(2)))
        self.assertEqual(self.view.poll_invalidations(), [theirs])
        self.view.afterCompletion()

    def test_what_is_cached_is_not_loaded(self):
        (mine, cached), tid = self.objects(2)
        self.view.poll_invalidations()
        self.view.load(cached)
        commit(self.view, (mine, tid, state(1)))
        with patch.object(self.view.view, '_read', side_effect=AssertionError):
            self.assertEqual(value_of(self.view.load(cached)[0]), 0)
        self.view.afterCompletion()

    def test_the_spool_is_not_needed_any_more(self):
        self.enter(patch.object(spool, 'IN_MEMORY_BYTES', 10))
        oid = self.view.new_oid()
        txn = voted(self.view, (oid, z64, state(1)))
        self.view.committing._spool._file.close()
        tid = self.view.tpc_finish(txn)
        self.assertEqual(self.other.load(oid), (state(1), tid))


class SmallPool(Suite):

    def test_what_is_missing_needs_no_second_session(self):
        small = self.opened(pool_size=2, pool_timeout=0.1)
        views = [small.new_instance() for _ in range(2)]
        for view in views:
            view.poll_invalidations()
        for view in views:
            with self.assertRaises(POSKeyError):
                view.load(p64(1000))
            view.release()


class Crashes(Crashing):
    """The server itself is killed."""

    def _open(self, dsn, driver, mode):
        """Return a storage whose sessions say what a pooler's would: the epoch that was when they began."""
        storage = super()._open(dsn, driver, mode)
        connect, epoch = storage.database.pool._connect, storage.database.epochs.now

        def connect_through_pooler():
            session = connect()
            session.epoch = epoch
            return session

        storage.database.pool._connect = connect_through_pooler
        return storage

    def test_our_number_is_given_to_another_behind_a_pooler(self):
        self._number_is_given_again(10)

    def _finished(self, kind: str, driver: str, keep_history: bool) -> tuple[Future, bool]:
        """Kill the server as finish is sent ('killed') or when it has committed ('lost'), and start it again.

        Return what tpc_finish did, and whether the object is there.
        """
        dsn = self.server.create_database(f'{kind}_{driver}_{"hp" if keep_history else "hf"}')
        trouble = ServerTrouble(self.server)
        faults = Faults(trouble)
        with (patch.dict(DRIVERS, {driver: faults.driver(DRIVERS[driver])}), ThreadPoolExecutor(1) as threads,
              closing(super()._open(dsn, driver, 'hp' if keep_history else 'hf')) as storage):
            oid = storage.new_oid()
            txn = voted(storage, (oid, z64, state(1)))
            faults.arm(kind, 1)
            finish = threads.submit(storage.tpc_finish, txn)
            self.assertTrue(trouble.killed.wait(30))
            faults.disarm()
            # Not by that thread: the server would end with it.
            self.server.start()
            finish.exception(60)
            return finish, exists(storage, oid)

    def test_it_had_committed(self):
        for driver, keep_history in ('psycopg2', True), ('psycopg', False):
            with self.subTest(driver=driver):
                finish, there = self._finished('lost', driver, keep_history)
                self.assertTrue(there)
                self.assertIsNone(finish.exception())

    def test_it_had_not(self):
        finish, there = self._finished('killed', 'psycopg2', True)
        self.assertFalse(there)
        self.assertIsInstance(finish.exception(), TransientError)


class ServerTrouble:
    """Faults that kill the whole server."""

    def __init__(self, server):
        self._server = server
        self.killed = threading.Event()

    def kill(self, connection) -> None:
        self._server.kill()
        self.killed.set()


class Oids(Suite):
    """Storages that are opened or fed move the sequence on while others take oids from it."""

    def test_many_at_once(self):
        """Long ways and short ones."""
        adapter = self.storage.database.adapter
        given, storages = [], [self.opened(pool_size=4) for _ in range(2)]

        def take(storage):
            for _ in range(60):
                given.extend(storage.database.pool.attempt(lambda session: adapter.new_oids(session, 3)))

        def reserve(storage, step):
            for n in range(30):
                storage.database.pool.attempt(lambda session, n=n: adapter.reserve_oids(session, 16 * step * n))

        with ThreadPoolExecutor(8) as threads:
            work = [threads.submit(take, storage) for storage in storages * 2]
            work += [threads.submit(reserve, storage, step) for storage in storages for step in (20, 150_000)]
            for each in work:
                each.result(60)
        self.assertEqual(len(given), len(set(given)))

    def test_the_same_way_together(self):
        """Processes that are restored into, or start, at once: nobody is told of a conflict."""
        adapter, pool = self.storage.database.adapter, self.opened(pool_size=8).database.pool
        start = threading.Barrier(8)

        def reserve():
            for n in range(40):
                start.wait(30)
                pool.attempt(lambda session: adapter.reserve_oids(session, 16 * 50 * n))

        with ThreadPoolExecutor(8) as threads:
            for each in [threads.submit(reserve) for _ in range(8)]:
                each.result(60)


    def test_between_vote_and_finish(self):
        """Whoever has voted with oids from elsewhere keeps no other from it, who may have the lock of the commit."""
        mine, theirs = voted(self.storage, (p64(70_000_000), z64, state(0))), TransactionMetaData()
        tid = p64(u64(self.other.lastTransaction()) + 1)
        with ThreadPoolExecutor(1) as threads:
            def restore():
                self.other.tpc_begin(theirs, tid)
                self.other.restore(p64(80_000_000), tid, state(0), '', None, theirs)
                self.other.tpc_vote(theirs)
                return self.other.tpc_finish(theirs)

            self.assertEqual(threads.submit(restore).result(30), tid)
        self.assertGreater(self.storage.tpc_finish(mine), tid)
        self.assertGreater(u64(self.opened().new_oid()), 80_000_000)


class TestOidAllocator(TestCase):

    def setUp(self):
        self.asked = []
        self.blocks = count(10, 2)        # another process has every other one

        def take(wanted):
            self.asked.append(wanted)
            return [next(self.blocks) for _ in range(wanted)][::-1]

        self.allocator = OidAllocator(take, 1)

    def test_which_were_issued_here(self):
        """For the others a new object is locked."""
        given = {self.allocator.new() for _ in range(16 * 3)}
        self.assertEqual({oid for oid in range(1, max(given) + 40) if self.allocator.issued(oid)}, given)
        self.assertEqual(self.allocator.highest, max(given))
        self.allocator.forget()
        self.assertFalse(any(map(self.allocator.issued, given)))
        self.assertEqual(self.allocator.highest, 0)

    def test_who_needs_many_asks_seldom(self):
        for _ in range(16 * 4000):
            self.allocator.new()
        self.assertEqual(self.asked, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024])


class Sequence(Suite):

    def test_it_never_goes_back(self):
        """Whoever moves it looks where it is when it is his turn."""
        watch, blocker = (self.enter(closing(Watch(self.dsn()))) for _ in range(2))
        blocker.rows('SELECT pg_advisory_lock(-5)')
        with ThreadPoolExecutor(1) as threads:
            work = threads.submit(self.storage.database.pool.attempt,
                                  lambda session: self.storage.database.adapter.reserve_oids(session, 16 * 200_000))
            watch.until_somebody_waits()
            watch.rows("SELECT setval('zoid_seq', 300000)")
            blocker.rows('SELECT pg_advisory_unlock(-5)')
            work.result(30)
        self.assertGreater(u64(self.other.new_oid()), 16 * 300_000)


    def test_somebody_ends_the_statement(self):
        """It leaves no lock behind, for its session lives on."""
        watch, blocker = (self.enter(closing(Watch(self.dsn()))) for _ in range(2))
        reserve = self.storage.database.adapter.reserve_oids
        with self.storage.database.pool.session() as session, ThreadPoolExecutor(1) as threads:
            blocker.rows('BEGIN')
            blocker.rows('ALTER SEQUENCE zoid_seq OWNER TO CURRENT_USER')
            work = threads.submit(reserve, session, 16 * 200_000)
            watch.until('EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = %s)', session.backend_pid)
            watch.rows('SELECT pg_cancel_backend(%s)', session.backend_pid)
            with self.assertRaises(StorageError):
                work.result(30)
            blocker.rows('ROLLBACK')
            self.assertEqual(watch.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), 0)
            self.other.database.pool.attempt(reserve, 16 * 200_000)


class Forked(Suite):

    def test_the_cache_was_being_written(self):
        [oid], tid = self.objects(1)
        self.view.poll_invalidations()
        with self.storage.database.cache._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)        # ends it, should it wait for a thread that is not there
                try:
                    self.view.poll_invalidations()
                    os._exit(value_of(self.view.load(oid)[0]))
                finally:
                    os._exit(99)
        _, status = os.waitpid(pid, 0)
        self.assertEqual(status, 0)

    def test_conflicts_were_being_counted(self):
        """They are the parent's."""
        conflicts = self.storage.database.conflicts
        conflicts.conflict(1, 'a.B', resolved=True)
        with conflicts._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                try:
                    before = len(self.storage.conflicts())
                    conflicts.conflict(2, 'a.B', resolved=True)
                    os._exit(10 * before + len(self.storage.conflicts()))
                finally:
                    os._exit(99)
        _, status = os.waitpid(pid, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 1)
        self.assertEqual(len(self.storage.conflicts()), 1)


class Command(TestCase):

    def test_what_the_database_says_is_one_sentence(self):
        for error in Unavailable('The server is away.'), StorageError('The database is another.'):
            with (self.subTest(error=error), patch.object(statements, 'run', side_effect=error),
                  contextlib.redirect_stderr(io.StringIO()) as printed):
                self.assertEqual(main.main(['statements', 'sqlite']), 2)
                self.assertEqual(printed.getvalue(), f'relstore: {error}\n')


def records(storage) -> list[tuple]:
    """Return what record_iternext tells of every object."""
    found, following = [], None
    while True:
        *record, following = storage.record_iternext(following)
        found.append(tuple(record))
        if following is None:
            return found


cases(globals(), LateAnswers, backends=SQLITE[:1] + POSTGRESQL[:1])
cases(globals(), Emptied, Interrupted, Refused, AfterCommit, backends=SQLITE + POSTGRESQL + MYSQL)
cases(globals(), CopyOfPacked, FailedUndo, Forked, backends=HISTORY_PRESERVING)
cases(globals(), InterruptedSnapshot, SmallPool, backends=HISTORY_FREE)
cases(globals(), Ticket, Locks, Staged, Sequence, backends=POSTGRESQL)
cases(globals(), Oids, backends=POSTGRESQL + MYSQL)
cases(globals(), FullDisk, backends=SQLITE)
del CopyOfPacked, Emptied, FullDisk, Interrupted, InterruptedSnapshot, Ticket, Locks, FailedUndo, Refused, Staged
del AfterCommit, LateAnswers, SmallPool, Oids, Sequence, Forked
