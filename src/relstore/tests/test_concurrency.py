"""Threads and processes on one database: what one commits the others see, once, in order, and nothing is lost."""
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from unittest import TestCase

from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.tests.ConflictResolution import PCounter
from ZODB.utils import z64

import relstore
from relstore.tests.support.backends import (
    MYSQL,
    PGBOUNCER,
    MySQLBackend,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.patience import within
from relstore.tests.support.places import PATIENCE, Place, place_of
from relstore.tests.support.records import state, value_of

POSTGRESQL = Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree

SPAWN = multiprocessing.get_context('spawn')


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self.place = place_of(self)
        self.storage = self.place.open()
        self.addCleanup(self.storage.close)


def increment(db: DB, times: int) -> None:
    """Add 1 to the root's counter so often, each time until it is committed."""
    manager = TransactionManager()
    with closing(db.open(manager)) as connection:
        for _ in range(times):
            for _ in within('the counter is changed', PATIENCE):
                try:
                    with manager:
                        connection.root()['counter'].inc()
                    break
                except TransientError:
                    continue


def in_threads(count: int, work: Callable, *arguments) -> list:
    with ThreadPoolExecutor(count) as threads:
        jobs = [threads.submit(work, *arguments) for _ in range(count)]
        return [job.result() for job in jobs]


def in_processes(count: int, work: Callable, *arguments) -> list:
    with ProcessPoolExecutor(count, mp_context=SPAWN) as processes:
        jobs = [processes.submit(work, *arguments) for _ in range(count)]
        return [job.result() for job in jobs]


def increment_in_two_threads(place: Place, times: int) -> None:
    with closing(DB(place.open())) as db:
        in_threads(2, increment, db, times)


def take_oids(place: Place, count: int) -> list[bytes]:
    """Take oids in two threads, and use some: an object is created with each tenth."""
    with closing(place.open()) as storage:
        def take():
            instance = storage.new_instance()
            oids = []
            for n in range(count):
                oids.append(instance.new_oid())
                if n % 50 == 0:
                    commit(instance, (oids[-1], z64, state(n)))
            return oids

        return [oid for oids in in_threads(2, take) for oid in oids]


class CounterSuite(Suite):

    def _make_counter(self, db):
        with db.transaction() as connection:
            connection.root()['counter'] = counter = PCounter()
            counter.inc(0)      # its class resolves conflicts of states that have a value

    def _assert_counted(self, expected):
        fresh = DB(self.place.open())
        self.addCleanup(fresh.close)
        with fresh.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, expected)


class Counter(CounterSuite):

    def test_eight_threads(self):
        db = DB(self.storage)
        self.addCleanup(db.close)
        self._make_counter(db)
        in_threads(8, increment, db, 15)
        self._assert_counted(8 * 15)
        self.assertEqual(self.storage.database.pool.lent, 0)


class CounterOfProcesses(CounterSuite):

    def test_four_processes_of_two_threads(self):
        db = DB(self.storage)
        self.addCleanup(db.close)
        self._make_counter(db)
        in_processes(4, increment_in_two_threads, self.place, 25)
        self._assert_counted(4 * 2 * 25)
        with db.transaction() as connection:    # whose process saw nothing of it
            self.assertEqual(connection.root()['counter']._value, 4 * 2 * 25)


class Oids(Suite):

    def test_four_processes_never_get_the_same(self):
        taken = in_processes(4, take_oids, self.place, 400)
        oids = [oid for some in taken for oid in some]
        self.assertEqual(len(oids), 4 * 2 * 400)
        self.assertEqual(len(set(oids)), len(oids))


class Order(Suite):

    def test_tids_rise_in_the_order_of_the_commits(self):
        """Whoever has seen a tid will not see a smaller one appear: or polls would miss it."""
        committed: list[tuple[bytes, bytes]] = []
        done = threading.Event()
        start = threading.Barrier(10)

        def write():
            instance = self.storage.new_instance()
            start.wait(PATIENCE)
            for n in range(12):
                oid = instance.new_oid()
                committed.append((commit(instance, (oid, z64, state(n))), oid))

        def look():
            """Return what each look at the table found that was not there before."""
            seen, found = {0}, []
            start.wait(PATIENCE)
            with closing(self.place.open()) as other, other.database.pool.session() as session:
                while True:
                    last = done.is_set()
                    now = {tid for tid, in session.all('SELECT DISTINCT tid FROM object_state')} - seen
                    found.append((max(seen), now))
                    seen |= now
                    if last:
                        return found

        def poll():
            """Return the oids that polls reported, each time it is reported."""
            with closing(self.place.open()) as other:
                view = other.new_instance()
                view.poll_invalidations()
                view.afterCompletion()
                start.wait(PATIENCE)
                reported = []
                while True:
                    last = done.is_set()
                    reported += view.poll_invalidations()
                    view.afterCompletion()
                    if last:
                        return reported

        with ThreadPoolExecutor(10) as threads:
            watchers = [threads.submit(look), threads.submit(poll)]
            writers = [threads.submit(write) for _ in range(8)]
            try:
                for writer in writers:
                    writer.result(PATIENCE)
            finally:
                done.set()
            looks, polls = [watcher.result(PATIENCE) for watcher in watchers]
        for newest, appeared in looks:
            self.assertFalse([tid for tid in appeared if tid < newest], 'a commit became visible after a later one')
        self.assertEqual(len({tid for tid, _ in committed}), 8 * 12)
        self.assertEqual(sorted(polls), sorted(oid for _, oid in committed), 'each commit is reported once')


class OneCache(Suite):
    """Views at different tids share the cache of their process."""

    def test_what_an_old_view_loads_is_not_given_to_new_ones(self):
        other = self.place.open()
        self.addCleanup(other.close)
        oid = other.new_oid()
        base = commit(other, (oid, z64, state(1)))
        old, new = self.storage.new_instance(), self.storage.new_instance()
        self.addCleanup(old.release)
        self.addCleanup(new.release)
        old.poll_invalidations()
        commit(other, (oid, base, state(2)))
        new.poll_invalidations()
        for _ in range(2):
            self.assertEqual(value_of(old.load(oid)[0]), 1)
            self.assertEqual(value_of(new.load(oid)[0]), 2)


def obey(place: Place, pipe) -> None:
    """The other process: do what comes through the pipe, and send back what came of it."""
    with closing(DB(place.open())) as db:
        manager = TransactionManager()
        connection = db.open(manager)
        pipe.send('ready')
        while True:
            command, *arguments = pipe.recv()
            try:
                if command == 'write':
                    with manager:
                        connection.root()['x'] = arguments[0]
                    pipe.send(None)
                elif command == 'read':
                    manager.begin()
                    pipe.send(connection.root().get('x'))
                elif command == 'read in a new connection':
                    with closing(db.open(TransactionManager())) as other:
                        pipe.send(other.root().get('x'))
                else:
                    break
            except Exception:
                pipe.send(traceback.format_exc())
        manager.abort()
        connection.close()


class TwoProcesses(Suite):

    def setUp(self):
        super().setUp()
        self.db = DB(self.storage)
        self.addCleanup(self.db.close)
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=obey, args=(self.place, theirs))
        self.process.start()
        self.addCleanup(self._end)
        self._answer('ready')

    def _end(self):
        self.pipe.send(('end',))
        self.process.join(PATIENCE)
        self.assertEqual(self.process.exitcode, 0)
        self.pipe.close()

    def _answer(self, expected):
        self.assertTrue(self.pipe.poll(PATIENCE), 'no answer')
        self.assertEqual(self.pipe.recv(), expected)

    def _they(self, *command, answer=None):
        self.pipe.send(command)
        self._answer(answer)

    def test_invalidations_cross(self):
        manager = TransactionManager()
        with closing(self.db.open(manager)) as connection:
            for n in range(0, 20, 2):
                self._they('write', n)
                manager.begin()
                self.assertEqual(connection.root()['x'], n)
                connection.root()['x'] = n + 1
                manager.commit()
                self._they('read', answer=n + 1)

    def test_a_new_connection_sees_what_others_committed(self):
        """Though its process has cached what was before."""
        with self.db.transaction() as connection:
            connection.root()['x'] = 'mine'
        self._they('read', answer='mine')
        for n in range(5):
            with self.db.transaction() as connection:
                connection.root()['x'] = n
            self._they('read in a new connection', answer=n)

    def test_a_commit_between_open_and_first_load(self):
        """A connection sees what was there when its transaction began, whatever the cache of its process has."""
        self._they('write', 0)
        held = TransactionManager(explicit=True)
        holding = self.db.open(held)
        held.begin()
        self.assertEqual(holding.root()['x'], 0)
        used = None
        for n, begins in enumerate((True, False, True, False)):
            # Explicit: the transaction begins with begin(). Implicit: with open().
            with self.subTest('a connection that was closed' if used else 'a new one', explicit=begins):
                manager = TransactionManager(explicit=begins)
                connection = self.db.open(manager)
                if used is None:
                    self.assertIsNot(connection, holding)
                self._they('write', 2 * n + 1)
                if begins:
                    manager.begin()
                    self._they('write', 2 * n + 2)
                expected = 2 * n + 1 if begins else 2 * n
                self.assertEqual(connection.root()['x'], expected)
                connection.cacheMinimize()
                self.assertEqual(connection.root()['x'], expected)
                manager.abort()
                manager.begin()
                self.assertEqual(connection.root()['x'], expected + 1)
                manager.abort()
                if not begins:
                    self._they('write', 2 * n + 2)
                connection.close()
                self.assertIs(connection, used or connection, 'it is another than the one that was closed')
                used = connection
        holding.cacheMinimize()
        self.assertEqual(holding.root()['x'], 0)
        held.abort()
        holding.close()

    def test_an_old_view_does_not_spoil_the_cache_for_new_ones(self):
        self._they('write', 'old')
        managers = [TransactionManager() for _ in range(3)]
        old, new, third = (self.db.open(manager) for manager in managers)
        try:
            managers[0].begin()
            self.assertEqual(old.root()['x'], 'old')
            self._they('write', 'new')
            managers[1].begin()
            self.assertEqual(new.root()['x'], 'new')
            for _ in range(2):
                for connection, expected in ((old, 'old'), (new, 'new')):
                    connection.cacheMinimize()
                    self.assertEqual(connection.root()['x'], expected)
            self._they('write', 'newest')
            old.cacheMinimize()
            self.assertEqual(old.root()['x'], 'old')
            managers[2].begin()
            self.assertEqual(third.root()['x'], 'newest')
        finally:
            for manager, connection in zip(managers, (old, new, third), strict=True):
                manager.abort()
                connection.close()


class Fork(Suite):
    """A child of fork() has copies of its parent's connections, and must leave them alone."""

    def setUp(self):
        super().setUp()
        self.storage = relstore.RelStore(self.address(), keep_history=self.keep_history, cache_local_mb=0)
        self.addCleanup(self.storage.close)
        self.oid = self.storage.new_oid()
        commit(self.storage, (self.oid, z64, state(1)))
        self.view = self.storage.new_instance()
        self.addCleanup(self.view.release)

    def _in_child(self, work: Callable[[], object]) -> None:
        """Run work() in a child process; fail as it fails."""
        theirs, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work()
                text = b''
            except BaseException:
                text = traceback.format_exc().encode()
            os.write(ours, text)
            os._exit(0)
        os.close(ours)
        with open(theirs, 'rb') as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        if text:
            self.fail(text.decode())

    def _backend(self, storage) -> int:
        with storage.database.pool.session() as session:
            connection = session._connection
            return connection.thread_id() if isinstance(self, MySQLBackend) else connection.info.backend_pid

    def test_it_makes_its_own(self):
        parents = self._backend(self.storage)

        def work():
            self.assertEqual(value_of(self.storage.load(self.oid)[0]), 1)
            self.assertNotEqual(self._backend(self.storage), parents)
            instance = self.storage.new_instance()
            instance.poll_invalidations()
            commit(instance, (self.oid, instance.load(self.oid)[1], state(2)))
            instance.release()
            self.storage.close()

        self._in_child(work)
        self.assertEqual(self._backend(self.storage), parents)
        self.assertEqual(value_of(self.storage.load(self.oid)[0]), 2)

    def test_what_was_in_use_stays_the_parents(self):
        """The child ends an instance that was in the middle of a transaction, as a worker does when it cleans up."""
        reading, committing = self.view, self.storage.new_instance()
        self.addCleanup(committing.release)
        reading.poll_invalidations()
        txn = self._voted(committing, (self.oid, self.storage.getTid(self.oid), state(2)))

        def work():
            reading.release()
            committing.release()
            self.assertEqual(value_of(self.storage.load(self.oid)[0]), 1)
            self.storage.close()

        self._in_child(work)
        committing.tpc_finish(txn)
        self.assertEqual(value_of(reading.load(self.oid)[0]), 1, 'its snapshot is there still')
        self.assertEqual(value_of(self.storage.load(self.oid)[0]), 2)

    def _voted(self, instance, *changes):
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        for oid, base, record in changes:
            instance.store(oid, base, record, '', txn)
        instance.tpc_vote(txn)
        return txn

    def test_oids_are_not_shared(self):
        """What is left of a block belongs to the parent."""
        mine = self.storage.new_oid()
        theirs, ours = os.pipe()
        self._in_child(lambda: os.write(ours, b''.join(self.storage.new_oid() for _ in range(20))))
        os.close(ours)
        with open(theirs, 'rb') as pipe:
            text = pipe.read()
        childs = {text[n:n + 8] for n in range(0, len(text), 8)}
        self.assertEqual(len(childs), 20)
        own = {mine, *(self.storage.new_oid() for _ in range(20))}
        self.assertFalse(childs & own)


cases(globals(), Counter, Oids, Order, OneCache, TwoProcesses)
cases(globals(), CounterOfProcesses, Fork, backends=POSTGRESQL + MYSQL)
cases(globals(), Counter, backends=PGBOUNCER[::3])
# Not history-free: there the views that these hold open at once need more servers than the pooler has.
cases(globals(), TwoProcesses, backends=PGBOUNCER[:1])
del Suite, CounterSuite, Counter, CounterOfProcesses, Oids, Order, OneCache, TwoProcesses, Fork
