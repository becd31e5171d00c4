"""Group commit survives crashes: what was acknowledged is there, and what was only seen leaves no trace.

See crash/__init__.py for why. RELSTORE_CRASH_SECONDS says how long the storm takes.
"""
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from threading import Event
from unittest.mock import Mock, patch

from persistent.TimeStamp import TimeStamp
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64, z64

import relstore
from relstore.caching import memcached
from relstore.sessions.session import Session
from relstore.tests.crash.clients import data_of, wrong_data
from relstore.tests.crash.ledger import ACKNOWLEDGED, FAILED, UNKNOWN, Attempt, Ledger, Revision, Served
from relstore.tests.crash.storm import Storm
from relstore.tests.crash.window import GATE, Crashes, between_its_commits, without_the_second
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state, value_of
from relstore.tests.support.servers import (
    DurableLayer,
    MemcachedServer,
    PgBouncerServer,
    require_memcached,
    require_pgbouncer,
    require_postgresql,
)
from relstore.tests.support.watch import Watch

# The last tid before the crash. The clock is far behind, so that the next one is this one more: before the crash, and
# again after it. Then tids tell nothing from each other, and the epoch alone does.
FUTURE = TimeStamp(2100, 1, 1, 0, 0, 0.0).raw()
LOST = p64(u64(FUTURE) + 1)
FORK = multiprocessing.get_context('fork')
SECONDS = 60        # far more than it takes
OLD, PHANTOM, DERIVED, NEW = range(4)


class Suite(unittest.TestCase):
    layer = DurableLayer

    def setUp(self):
        require_postgresql(self)
        self.server = self.layer.server

    def database(self, name: str, keep_history: bool = True) -> str:
        """Return the DSN of a new database, of which only commits write the log."""
        dsn = self.server.create_database(f'{self._testMethodName[-40:]}_{name}')
        relstore.RelStore(relstore.PostgreSQL(dsn), keep_history=keep_history).close()
        self.crashes = Crashes(self.server, dsn)
        self.addCleanup(self.crashes.close)
        return dsn


class TestWindow(Suite):
    """What the other tests rest on: a commit that nobody has written to the disk is lost, although it was seen."""

    def both(self, work):
        """Call work(DSN, the way to crash) for each way."""
        for way in 'kill_server', 'kill_backend':
            with self.subTest(way):
                dsn = self.database(way)
                self.crashes.hold_back_log()
                work(dsn, getattr(self.crashes, way))

    def test_rows_are_seen_that_have_no_columns(self):
        with closing(Watch(self.server.dsn())) as watch:
            self.assertEqual(watch.rows('SELECT FROM generate_series(1, 2)'), [(), ()])
            self.assertEqual(watch.rows('SELECT WHERE false'), [])
            self.assertEqual(watch.rows('SET application_name = DEFAULT'), [])

    def test_an_asynchronous_commit_is_lost(self):
        def work(dsn, crash):
            with closing(Watch(dsn)) as writer, closing(Watch(dsn)) as reader:
                writer.rows('CREATE TABLE seen (n integer)')
                writer.rows('INSERT INTO seen VALUES (1)')
                writer.rows('SET synchronous_commit = off')
                writer.rows('INSERT INTO seen VALUES (2)')
                self.assertEqual(reader.rows('SELECT n FROM seen'), [(1,), (2,)])
                crash()
            with closing(Watch(dsn)) as reader:
                self.assertEqual(reader.rows('SELECT n FROM seen'), [(1,)])

        self.both(work)

    def test_what_is_acknowledged_is_there(self):
        def work(dsn, crash):
            with closing(relstore.RelStore(relstore.PostgreSQL(dsn))) as storage:
                oid = storage.new_oid()
                commit(storage, (oid, z64, state(OLD)))
                crash()
                self.assertEqual(value_of(storage.load(oid)[0]), OLD)

        self.both(work)

    def test_without_the_second_commit_it_would_not_be(self):
        def work(dsn, crash):
            with closing(relstore.RelStore(relstore.PostgreSQL(dsn))) as storage:
                oid = storage.new_oid()
                tid = commit(storage, (oid, z64, state(OLD)))
                with without_the_second(storage):
                    commit(storage, (oid, tid, state(PHANTOM)))
                self.assertEqual(value_of(storage.load(oid)[0]), PHANTOM)
                crash()
                self.assertEqual(value_of(storage.load(oid)[0]), OLD)

        self.both(work)


class Committer:
    """A process that changes an object, and is held when all can see it and the disk has nothing."""

    def __init__(self, open_storage, oid: bytes):
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_commit, args=(theirs, open_storage, oid), daemon=True)
        self._process.start()
        theirs.close()
        assert self.told() == 'voted'

    def go(self) -> None:
        self._pipe.send(None)

    def told(self):
        """Return what happened next."""
        if not self._pipe.poll(SECONDS):
            raise TimeoutError(f'the committer said nothing for {SECONDS} s')
        return self._pipe.recv()

    @contextmanager
    def stopped(self):
        """In this context it asks nobody what became of its commit."""
        pid = self._process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()


def _commit(pipe, open_storage, oid: bytes) -> None:
    """Be the process of a Committer."""
    with closing(open_storage()) as storage, between_its_commits(storage):
        view = storage.new_instance()
        view.poll_invalidations()
        _, tid = view.load(oid)
        txn = voted(view, (oid, tid, state(PHANTOM)))
        pipe.send('voted')
        pipe.recv()
        try:
            pipe.send(view.tpc_finish(txn))
        except Exception as e:
            pipe.send(e)


def voted(view, *changes) -> TransactionMetaData:
    txn = stored(view, *changes)
    view.tpc_vote(txn)
    return txn


def stored(view, *changes) -> TransactionMetaData:
    txn = TransactionMetaData()
    view.tpc_begin(txn)
    for oid, tid, record in changes:
        view.store(oid, tid, record, '', txn)
    return txn


class Reader:
    """A storage as a process has it, with one view."""

    def __init__(self, storage):
        self.storage, self.view = storage, storage.new_instance()

    def begin(self) -> list[bytes] | None:
        self.view.afterCompletion()
        return self.view.poll_invalidations()

    def load(self, oid: bytes) -> tuple[int, bytes]:
        record, tid = self.view.load(oid)
        return value_of(record), tid

    def close(self) -> None:
        self.view.release()
        self.storage.close()


# History, driver, whether a pooler stands between, way to crash.
CELLS = [(True, 'psycopg2', False, 'kill_server'), (False, 'psycopg', True, 'kill_backend'),
         (True, 'psycopg', True, 'kill_server'), (False, 'psycopg2', False, 'kill_backend')]


class TestPhantom(Suite):
    """A commit is seen, by all kinds of caches, and then it never was."""

    def setUp(self):
        require_memcached(self)
        super().setUp()
        # On a busy machine memcached may be slow, and would be left alone.
        for name in 'SLOW_SECONDS', 'TIMEOUT_SECONDS':
            patience = patch.object(memcached, name, 5.0)
            patience.start()
            self.addCleanup(patience.stop)
        self.memcached = MemcachedServer()
        self.addCleanup(self.memcached.stop)
        self.memcached.start()
        self.directory = tempfile.mkdtemp(prefix='relstore-crash-')
        self.addCleanup(shutil.rmtree, self.directory)

    def prepare(self, keep_history: bool, driver: str, pooled: bool) -> None:
        """Make a database with two objects, of which self.x will be changed by self.committer."""
        mode = f'{driver}_{"hp" if keep_history else "hf"}'
        self.dsn = where = self.database(mode, keep_history)
        if pooled:
            require_pgbouncer(self)
            bouncer = PgBouncerServer(self.server, {'default_pool_size': 20})
            self.addCleanup(bouncer.stop)
            bouncer.start()
            where = bouncer.dsn(where)
        self.open = lambda **options: relstore.RelStore(
            relstore.PostgreSQL(where, driver=driver), keep_history=keep_history, **options)
        self.shared = {'cache_servers': self.memcached.where, 'cache_prefix': mode}
        with closing(self.open()) as storage:
            self.x, self.y = storage.new_oid(), storage.new_oid()

            def restore(txn):
                for oid in self.x, self.y:
                    storage.restore(oid, FUTURE, state(OLD), '', None, txn)
            commit(storage, tid=FUTURE, work=restore)
        self.committer = Committer(partial(self.open, **self.shared), self.x)
        self.addCleanup(self.committer.kill)
        self.watch = Watch(self.dsn)
        self.addCleanup(self.watch.close)
        self.watch.rows('SELECT pg_advisory_lock(%s)', GATE)
        self.crashes.hold_back_log()

    def reader(self, **options) -> Reader:
        reader = Reader(self.open(**options))
        self.addCleanup(reader.close)
        return reader

    def appear(self) -> None:
        """Have the phantom appear."""
        self.committer.go()
        self.watch.until('EXISTS (SELECT FROM object_state WHERE tid = %s)', u64(LOST))

    def crash(self, way: str) -> None:
        """Have it never been.

        The death of a backend closes its connection before the server hears of it. The committer could ask meanwhile,
        and would be told that its commit has happened, and be told the truth: see TestOutcome.
        """
        if way == 'kill_backend':
            with self.committer.stopped():
                self.crashes.kill_backend()
        else:
            getattr(self.crashes, way)()
        with closing(Watch(self.dsn)) as watch:
            self.assertEqual(watch.rows('SELECT FROM object_state WHERE tid = %s', u64(LOST)), [], 'it was on disk')

    def on_each(self, work, cells=CELLS):
        """Call work(the way to crash) in each cell."""
        for keep_history, driver, pooled, way in cells:
            with self.subTest(keep_history=keep_history, driver=driver, pooled=pooled, way=way):
                self.prepare(keep_history, driver, pooled)
                work(way)

    def test_no_cache_serves_it_and_nothing_derived_is_stored(self):
        def work(way):
            directory = os.path.join(self.directory, way + self.shared['cache_prefix'])
            readers = {
                'process': self.reader(),
                'memcached': self.reader(**self.shared),
                'memcached, filled by another': self.reader(**self.shared),
                'file': self.reader(cache_local_dir=directory),
            }
            for reader in readers.values():
                reader.begin()
                self.assertEqual(reader.load(self.x), (OLD, FUTURE))
            self.appear()
            for name, reader in readers.items():
                with self.subTest(name):
                    self.assertEqual(reader.begin(), [self.x])
                    self.assertEqual(reader.load(self.x), (PHANTOM, LOST))
                    reader.begin()      # and what was loaded is shared
            self.assertGreater(readers['memcached, filled by another'].storage.cache_stats()['shared_hits'], 0)
            derived = []
            for name in 'process', 'process', 'memcached', 'file':
                voter = Reader(readers[name].storage)
                voter.begin()
                self.assertEqual(voter.load(self.x), (PHANTOM, LOST))
                # The other object did not change: its tid tells nothing.
                changed = self.x if len(derived) == 1 else self.y
                derived.append((voter.view, stored(voter.view, (changed, voter.load(changed)[1], state(DERIVED)))))
            ends = self.reader(cache_local_dir=directory + '2')
            ends.begin()
            ends.load(self.x)
            ends.storage.close()
            with open(ends.storage.database.warm.path, 'rb') as file:
                self.assertIn(state(PHANTOM), file.read())

            self.crash(way)

            told = self.committer.told()
            self.assertIsInstance(told, TransientError, 'the committer was told so')
            self.refused(*derived[0])       # whose process knows of no crash yet
            for name, reader in readers.items():
                with self.subTest(name):
                    self.assertIsNone(reader.begin())
                    self.assertEqual(reader.load(self.x), (OLD, FUTURE))
            # Now the tid is given again, by one that shares no cache.
            with closing(self.open()) as storage:
                self.assertEqual(commit(storage, (self.x, FUTURE, state(NEW))), LOST)
            readers['memcached, afresh'] = self.reader(**self.shared)
            readers['file, afresh'] = self.reader(cache_local_dir=directory + '2')
            readers['file, afresh'].storage.database.warm.filled.wait(SECONDS)
            for name, reader in readers.items():
                with self.subTest(name):
                    reader.begin()
                    self.assertEqual(reader.load(self.x), (NEW, LOST))
            for view, txn in derived[1:]:
                self.refused(view, txn)

        self.on_each(work)

    def refused(self, view, txn):
        """What was derived from the phantom is not stored, whatever the tids say."""
        with self.assertRaises(TransientError):
            view.tpc_vote(txn)
        view.tpc_abort(txn)
        view.release()

    def test_who_asks_nobody_does_not_go_on_with_it(self):
        """Between the two processes is the commit counter. The committer may be killed too, and balances it never."""
        def work(way):
            reader = self.reader(**self.shared, poll_interval=3600)
            stats = reader.storage.cache_stats
            for _ in range(2):
                reader.begin()
                self.assertEqual(reader.load(self.x), (OLD, FUTURE))
            self.assertEqual(stats()['polls_saved'], 1)
            counter = reader.storage.database.counter
            count = counter.value
            reader.storage.database.polling.forget()

            def value():
                """Read the counter just before the commit begins: the poll that is sent then shows it."""
                before = count()
                self.appear()
                return before

            with patch.object(counter, 'value', value):
                self.assertEqual(reader.begin(), [self.x])
            self.assertIsNotNone(reader.storage.database.polling._seen[0][0], 'its next polls could be saved')
            sent = stats()['polls_sent']
            self.assertEqual(reader.load(self.x), (PHANTOM, LOST))
            reader.begin()
            self.assertEqual(reader.load(self.x), (PHANTOM, LOST))
            self.assertEqual(stats()['polls_sent'], sent + 1)
            if way == 'kill_server':
                self.committer.kill()
                self.crash(way)
            else:
                self.crash(way)
                self.assertIsInstance(self.committer.told(), TransientError)
            self.assertIsNone(reader.begin())
            self.assertEqual(reader.load(self.x), (OLD, FUTURE))

        self.on_each(work, CELLS[:2])


class TestOutcome(Suite):
    """The server crashes while somebody asks it what became of a commit. Through a pooler the connection goes on."""

    def setUp(self):
        require_pgbouncer(self)
        super().setUp()

    def change(self, storage) -> tuple[bytes, TransactionMetaData]:
        """Vote to change an object. Return its oid and the transaction."""
        oid = storage.new_oid()
        tid = commit(storage, (oid, z64, state(OLD)))
        return oid, voted(storage, (oid, tid, state(PHANTOM)))

    def lost_while_asked(self, keep_history: bool, statement: str) -> None:
        """Have a commit that is seen lose its connection; crash before that statement is sent to ask for it."""
        dsn = self.database(f'{keep_history}_{statement}'.lower(), keep_history)
        bouncer = PgBouncerServer(self.server)
        self.addCleanup(bouncer.stop)
        bouncer.start()
        storage = relstore.RelStore(relstore.PostgreSQL(bouncer.dsn(dsn)), keep_history=keep_history)
        with closing(storage), closing(Watch(dsn)) as watch, ThreadPoolExecutor(1) as threads:
            oid, txn = self.change(storage)
            backend = storage.committing.commit.backend
            watch.rows('SELECT pg_advisory_lock(%s)', GATE)
            self.crashes.hold_back_log()
            asked, send = getattr(storage.database.adapter.sql, statement), Session.all
            about, crashed = Event(), Event()

            def crash_first(session, sql, *parameters):
                if sql == asked:
                    about.set()
                    crashed.wait(SECONDS)
                return send(session, sql, *parameters)

            with between_its_commits(storage), patch.object(Session, 'all', crash_first):
                finish = threads.submit(storage.tpc_finish, txn)
                watch.until_somebody_waits()
                self.assertEqual(value_of(storage.load(oid)[0]), PHANTOM)
                watch.rows('SELECT pg_terminate_backend(%s)', backend)
                self.assertTrue(about.wait(SECONDS))
                self.crashes.kill_server()      # here: a server ends with the thread that has started it
                crashed.set()
                told = finish.exception(SECONDS)
            self.assertEqual(value_of(storage.load(oid)[0]), OLD)
            self.assertIsInstance(told, TransientError, 'success was told for what is not there')

    def test_a_crash_before_it_is_known(self):
        self.lost_while_asked(True, 'transaction_status')

    def test_a_crash_before_it_is_durable(self):
        for keep_history in True, False:
            with self.subTest(keep_history=keep_history):
                self.lost_while_asked(keep_history, 'make_durable')

    @contextmanager
    def seen(self, keep_history: bool = True, make_durable: str = ''):
        """In this context a commit can be seen, and its storage has another connection, with which it can ask.

        Yields the storage, the oid of the object, the pid of the backend, and what will be told. make_durable: what to
        send instead of that statement.
        """
        dsn = self.database(str(keep_history).lower(), keep_history)
        storage = relstore.RelStore(relstore.PostgreSQL(dsn), keep_history=keep_history)
        with closing(storage), closing(Watch(dsn)) as watch, ThreadPoolExecutor(1) as threads:
            oid, txn = self.change(storage)
            backend = storage.committing.commit.backend
            watch.rows('SELECT pg_advisory_lock(%s)', GATE)
            self.crashes.hold_back_log()
            sql = storage.database.adapter.sql
            with between_its_commits(storage), patch.object(sql, 'make_durable', make_durable or sql.make_durable):
                finish = threads.submit(storage.tpc_finish, txn)
                watch.until_somebody_waits()
                self.assertEqual(value_of(storage.load(oid)[0]), PHANTOM)
                yield storage, oid, backend, finish

    def test_what_is_told_before_a_crash_is_noticed_is_true_after_it(self):
        for keep_history in True, False:
            with self.subTest(keep_history=keep_history), self.seen(keep_history) as (storage, oid, backend, finish):
                self.crashes.kill_backend(pid=backend, unnoticed=lambda told=finish: told.result(SECONDS))
                record, tid = storage.load(oid)
                self.assertEqual((tid, value_of(record)), (finish.result(), PHANTOM))

    def test_without_making_it_durable_it_would_not_be(self):
        with self.seen(make_durable='SELECT 1') as (storage, oid, backend, finish):
            self.crashes.kill_backend(pid=backend, unnoticed=lambda: finish.result(SECONDS))
            record, tid = storage.load(oid)
            self.assertLess(tid, finish.result())
            self.assertEqual(value_of(record), OLD)

    def test_a_server_that_is_killed_answers_nobody(self):
        """However long that takes: the other tests rest on it."""
        send = signal.pidfd_send_signal

        def send_slowly(process, number):
            send(process, number)
            if number == signal.SIGKILL:
                time.sleep(0.1)

        with self.seen() as (storage, oid, _, finish):
            with patch.object(signal, 'pidfd_send_signal', send_slowly):
                self.crashes.kill_server()
            self.assertIsInstance(finish.exception(SECONDS), TransientError)
            self.assertEqual(value_of(storage.load(oid)[0]), OLD)


class TestStorm(unittest.TestCase):
    """Writers and readers of all kinds, while the server is killed again and again."""

    layer = DurableLayer

    def setUp(self):
        for require in require_postgresql, require_memcached, require_pgbouncer:
            require(self)

    def test_nothing_is_lost_and_no_phantom_is_left(self):
        seconds = float(os.environ.get('RELSTORE_CRASH_SECONDS', 10))
        storm = Storm(self.layer.server, seconds, random.randrange(1 << 32))
        storm.go()
        self.assertFalse(storm.faults[:1], storm.report())
        for ledger in storm.ledgers.values():
            self.assertTrue(ledger.with_outcome(ACKNOWLEDGED))
        self.assertTrue(all(storm.blobs.values()), storm.report())
        self.assertTrue(any(ledger.phantoms() for ledger in storm.ledgers.values()), storm.report())


class TestBlobs(unittest.TestCase):
    """The storm notices when the data of a blob is not what was stored."""

    def wrong(self, data: bytes) -> str:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            return wrong_data(Mock(loadBlob=lambda oid, tid: file.name), Revision(1, 10, 5))

    def test_data(self):
        self.assertEqual(self.wrong(data_of(5)), '')
        self.assertRegex(self.wrong(data_of(6)), '^other data: ')
        self.assertRegex(self.wrong(data_of(5)[:-1]), '^other data: ')
        self.assertRegex(wrong_data(Mock(loadBlob=Mock(side_effect=POSKeyError)), Revision(1, 10, 5)), '^no data: ')


class TestLedger(unittest.TestCase):
    """A history of three commits to one object, with a crash; and each way in which it could be wrong."""

    def setUp(self):
        first, second = Revision(1, 10, -1), Revision(1, 20, 1)
        self.ledger = Ledger(crashes=[(3.0, 4.0)], rows={(1, 10): -1, (1, 20): 1, (1, 40): 3}, attempts={
            1: Attempt(1, 1.0, [first], [], ACKNOWLEDGED, 20, 1.5),
            2: Attempt(2, 2.0, [second], [], FAILED, 0, 4.5),
            3: Attempt(3, 5.0, [second], [Revision(2, 10, -1)], ACKNOWLEDGED, 40, 5.5),
        }, served=[
            Served(1.6, 1.7, 'process', second), Served(2.1, 2.2, 'memcached', Revision(1, 30, 2)),
            Served(4.1, 4.2, 'database', second), Served(5.6, 5.7, 'file', Revision(1, 40, 3)),
        ])

    def wrong(self, *words: str) -> None:
        """Expect these faults, by their first word."""
        self.assertEqual([fault.partition(':')[0] for fault in self.ledger.faults()], list(words))

    def serve(self, begun: float, *revision: int) -> None:
        self.ledger.served.append(Served(begun, begun + 0.1, 'process', Revision(*revision)))

    def test_all_is_well(self):
        self.wrong()
        self.assertEqual(self.ledger.phantoms(), {'memcached': 1})
        self.ledger.keeps_history = False
        del self.ledger.rows[1, 10], self.ledger.rows[1, 20]
        self.wrong()

    def test_unknown(self):
        """It may have happened, or not; if others build upon it, it has."""
        self.ledger.attempts[3].outcome, self.ledger.attempts[3].tid = UNKNOWN, 0
        self.wrong()
        del self.ledger.rows[1, 40]
        self.ledger.served.pop()
        self.wrong()

    def test_lost(self):
        del self.ledger.rows[1, 40]
        self.wrong('lost')
        self.ledger.keeps_history = False
        self.wrong('lost')

    def test_stored(self):
        self.ledger.rows[1, 30] = 2
        self.wrong('stored')

    def test_derived(self):
        self.ledger.attempts[3].others.append(Revision(1, 30, 2))
        self.wrong('derived from what was lost')

    def test_torn(self):
        self.ledger.attempts[3].bases[0] = Revision(1, 10, -1)
        self.wrong('torn')

    def test_fallen(self):
        """Also behind what was lost."""
        self.serve(2.5, 1, 41, 2)
        self.wrong('fallen')

    def test_two_contents(self):
        self.serve(5.8, 1, 40, 1)
        self.wrong('two contents')

    def test_late(self):
        self.serve(3.9, 1, 30, 2)       # begun before the server was there again
        self.wrong()
        self.serve(4.3, 1, 30, 2)
        self.wrong('late')

    def test_what_failed_without_a_crash_is_never_seen(self):
        self.ledger.crashes = []
        self.wrong('late')

    def test_stale(self):
        self.serve(5.6, 1, 20, 1)
        self.wrong('stale')


del Suite
