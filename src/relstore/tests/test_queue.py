"""The order in which those who write to one SQLite file get its lock."""
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from shutil import rmtree
from unittest import TestCase, skipUnless
from unittest.mock import patch

from transaction import TransactionManager
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.utils import z64

from relstore.adapters import queue
from relstore.adapters.queue import STALLED_SECONDS, Queue, queue_of
from relstore.adapters.sqlite import BUSY_TIMEOUT_SECONDS
from relstore.errors import LockTimeout
from relstore.tests.support.backends import SQLiteHistoryFree, SQLiteHistoryPreserving, cases
from relstore.tests.support.layers import Processes
from relstore.tests.support.patience import until
from relstore.tests.support.records import state

PATIENCE = 60   # seconds

# Takes the turn of a file and tells so, again and again; gives it back when it is told to.
CHILD = textwrap.dedent("""\
    import sys
    from pathlib import Path
    from relstore.adapters.queue import queue_of

    queue, me = queue_of(Path(sys.argv[1])), object()
    for line in sys.stdin:
        print(queue.take(me, float(line)), flush=True)
        sys.stdin.readline()
        queue.end(me)
        print('ended', flush=True)
    """)


# Is next, and takes nothing.
NEXT = textwrap.dedent("""\
    import fcntl, sys
    from pathlib import Path
    from relstore.adapters import queue

    file = open(Path(sys.argv[1]).with_name('writers.lock'), 'r+b')
    fcntl.lockf(file, fcntl.LOCK_EX, 1, queue.NEXT)
    print('next', flush=True)
    sys.stdin.readline()
    """)


class Child:
    """Another process, that wants to write to the same file."""

    def __init__(self, path: Path, program: str = CHILD, *arguments: str):
        environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([sys.executable, '-c', program, path, *arguments], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)

    def tell(self, what: str) -> None:
        self.process.stdin.write(f'{what}\n')
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        self.tell(what)
        return self.answer()

    def waits(self) -> bool:
        """Whether the system lists it as waiting for a lock."""
        return any('->' in line and f' {self.process.pid} ' in line
                   for line in Path('/proc/locks').read_text().splitlines())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@skipUnless(Path('/proc/locks').exists(), 'Linux alone lists its locks')
class Turns(TestCase):
    layer = Processes

    def setUp(self):
        directory = Path(tempfile.mkdtemp(prefix='relstore-queue-'))
        self.addCleanup(rmtree, directory)
        self.path = directory / 'main.sqlite3'
        self.queue = queue_of(self.path)
        self.me = object()

    def child(self) -> Child:
        child = Child(self.path)
        self.addCleanup(child.end)
        return child

    def test_one_for_all_in_a_process(self):
        self.assertIs(queue_of(self.path), self.queue)
        self.assertIsNot(queue_of(self.path.with_name('other.sqlite3')), self.queue)

    def test_who_comes_first(self):
        """Threads get it in the order in which they came, except for those that gave up."""
        self.assertTrue(self.queue.take(self.me, 0))
        self.assertFalse(self.queue.take('another', 0))
        got = []

        def wait(who: int, timeout: float) -> bool:
            came = self.queue.take(who, timeout)
            got.append(who)
            self.queue.end(who)
            return came

        with ThreadPoolExecutor(9) as threads:
            waiting = []
            for n in range(9):
                waiting.append(threads.submit(wait, n, 0.05 if n % 3 == 1 else PATIENCE))
                until(lambda: n in {waiter.who for waiter in self.queue.waiting} or waiting[-1].done())
            self.assertEqual([waiting[n].result(PATIENCE) for n in (1, 4, 7)], [False] * 3)
            del got[:]
            self.queue.end('somebody else')
            self.assertEqual(got, [])
            self.queue.end(self.me)
            self.assertEqual([waiting[n].result(PATIENCE) for n in (0, 2, 3, 5, 6, 8)], [True] * 6)
        self.assertEqual(got, [0, 2, 3, 5, 6, 8])
        self.assertTrue(self.queue.take(self.me, 0))

    def test_who_has_waited_for_long_is_not_passed(self):
        """Before that whoever has just ended his turn may have another; the one who waits does not look here."""
        with patch.object(queue, 'THREAD_PAUSES_SECONDS', (PATIENCE,)), \
                patch.object(queue, 'PATIENCE_SECONDS', PATIENCE), ThreadPoolExecutor(1) as threads:
            self.assertTrue(self.queue.take(self.me, 0))
            waiting = threads.submit(self.queue.take, 'another', PATIENCE)
            until(lambda: self.queue.waiting)
            for _ in range(3):
                self.queue.end(self.me)
                self.assertTrue(self.queue.take(self.me, 0))
            with patch.object(queue, 'PATIENCE_SECONDS', 0):
                self.queue.end(self.me)
            self.assertFalse(self.queue.take(self.me, 0))
            self.assertTrue(waiting.result(PATIENCE))

    def test_who_waits_looks(self):
        """Whoever may pass him need not come."""
        with patch.object(queue, 'PATIENCE_SECONDS', PATIENCE), ThreadPoolExecutor(2) as threads:
            self.assertTrue(self.queue.take(self.me, 0))
            waiting = [threads.submit(self.queue.take, who, PATIENCE) for who in ('another', 'a third')]
            until(lambda: len(self.queue.waiting) == 2)
            self.queue.end(self.me)
            done, _ = wait(waiting, PATIENCE / 2, FIRST_COMPLETED)
            self.assertEqual([future.result() for future in done], [True])
            self.queue.end(self.queue.holder)
            self.assertEqual([future.result(PATIENCE / 2) for future in waiting], [True, True])

    def test_the_first_goes_when_the_turn_is_free(self):
        """The next one has lost his patience, and nobody is there to hand it on to him."""
        first = queue._Waiter('first')
        with ThreadPoolExecutor(1) as threads:
            with patch.object(queue, 'PATIENCE_SECONDS', PATIENCE):
                self.assertTrue(self.queue.take(self.me, 0))
                self.queue.waiting.append(first)
                waiting = threads.submit(self.queue.take, 'another', PATIENCE)
                until(lambda: len(self.queue.waiting) == 2)
                self.queue.end(self.me)
                self.assertIsNone(self.queue.holder)
            with patch.object(queue, 'PATIENCE_SECONDS', 0):
                self.assertTrue(self.queue._leave(first))
                self.assertTrue(waiting.result(PATIENCE / 2))

    def test_handed_on_and_seized(self):
        """Who is handed the turn has had it, though somebody else has got the lock before he was awake."""
        def wake(waiter):
            self.queue.holder = 'who was quicker'
            woken(waiter)

        woken = queue._Waiter.wake
        with patch.object(queue._Waiter, 'wake', wake), patch.object(queue, 'PATIENCE_SECONDS', 0), \
                ThreadPoolExecutor(1) as threads:
            self.assertTrue(self.queue.take(self.me, 0))
            waiting = threads.submit(self.queue.take, 'another', PATIENCE)
            until(lambda: self.queue.waiting)
            self.queue.end(self.me)
            self.assertTrue(waiting.result(PATIENCE / 2))

    def test_giving_up_in_the_moment_in_which_it_comes(self):
        """Many threads that wait a moment only, and two that wait for longer: none is left behind, no turn is lost."""
        had = [0] * 8

        def be_patient(n: int) -> None:
            for _ in range(50):
                who = object()
                self.assertTrue(self.queue.take(who, PATIENCE))
                self.queue.end(who)

        def hurry(n: int) -> None:
            for _ in range(200):
                who = object()
                if self.queue.take(who, 0.0005):
                    had[n] += 1
                    time.sleep(0.0004)
                    self.queue.end(who)

        with ThreadPoolExecutor(10) as threads:
            waiting = [threads.submit(be_patient, n) for n in range(2)]
            list(threads.map(hurry, range(8)))
            for future in waiting:
                future.result(PATIENCE)
        self.assertGreater(sum(had), 0)
        self.assertFalse(self.queue.waiting)
        self.assertTrue(self.queue.take(self.me, 0))

    def test_interrupted(self):
        """Whoever waits is interrupted, by a signal; for a thread of this process, and for another process."""
        def interrupt(*_):
            raise InterruptedError

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
        child = self.child()
        for child_has_it in False, True:
            with self.subTest(child_has_it=child_has_it):
                self.assertTrue(child_has_it or self.queue.take('another', 0))
                self.assertEqual(child.ask('60') if child_has_it else 'True', 'True')
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with self.assertRaises(InterruptedError):
                    self.queue.take(self.me, PATIENCE)
                self.assertEqual(child.ask('end') if child_has_it else 'ended', 'ended')
                self.queue.end('another')
                self.assertTrue(self.queue.take(self.me, PATIENCE))
                self.queue.end(self.me)

    def test_out_of_turn(self):
        """Who gets the lock though somebody has forgotten to end his turn, goes on in his place."""
        self.assertTrue(self.queue.take('forgetful', 0))
        self.assertFalse(self.queue.take(self.me, 0.01))
        self.queue.seize(self.me)
        with ThreadPoolExecutor(1) as threads:
            after = threads.submit(self.queue.take, 'after', PATIENCE)
            until(lambda: self.queue.waiting)
            self.queue.end('forgetful')
            self.assertFalse(after.done())
            self.queue.end(self.me)
            self.assertTrue(after.result(PATIENCE))

    def test_between_processes(self):
        """Who has just had it is not quicker than who waits."""
        child = self.child()
        self.assertTrue(self.queue.take(self.me, 0))
        for _ in range(5):
            child.tell('60')
            until(child.waits)
            self.queue.end(self.me)
            self.assertFalse(self.queue.take(self.me, 0))
            self.assertEqual(child.answer(), 'True')
            self.assertFalse(self.queue.take(self.me, 0.01))
            self.assertEqual(child.ask('end'), 'ended')
            self.assertTrue(self.queue.take(self.me, PATIENCE))

    def test_a_slice(self):
        """While it lasts, who has just had it takes it again though another process is next; then no more."""
        with patch.object(queue, 'SLICE_SECONDS', PATIENCE):
            self.assertTrue(self.queue.take(self.me, 0))
        first = Child(self.path, NEXT)
        self.addCleanup(first.end)
        self.assertEqual(first.answer(), 'next')
        for _ in range(3):
            self.queue.end(self.me)
            self.assertTrue(self.queue.take(self.me, 0))
        self.queue.end(self.me)
        with patch.object(queue.time, 'monotonic', lambda now=time.monotonic: now() + PATIENCE):
            self.assertFalse(self.queue.take(self.me, 0))
        first.end()
        self.assertTrue(self.queue.take(self.me, 0))

    def test_who_does_not_wait_keeps_nobody_from_being_next(self):
        child, other = self.child(), self.child()
        self.assertEqual(child.ask('60'), 'True')
        self.assertFalse(self.queue.take(self.me, 0))
        other.tell('20')
        until(other.waits)
        self.assertEqual(child.ask('end'), 'ended')
        self.assertEqual(other.answer(), 'True')

    def test_given_up_and_wanted_again(self):
        """The thread that waits for the system is there once; what comes too late is given back."""
        child = self.child()
        self.assertEqual(child.ask('60'), 'True')
        for _ in range(3):
            self.assertFalse(self.queue.take(self.me, 0.1))
        fetching = [thread for thread in threading.enumerate() if thread.name == 'relstore-queue']
        self.assertEqual(len(fetching), 1)
        self.assertEqual(child.ask('end'), 'ended')
        fetching[0].join(PATIENCE)
        self.assertEqual(child.ask('60'), 'True')
        self.assertEqual(child.ask('end'), 'ended')
        self.assertTrue(self.queue.take(self.me, PATIENCE))

    def test_a_process_that_ends(self):
        child, other = self.child(), self.child()
        self.assertEqual(child.ask('60'), 'True')
        other.tell('60')
        until(other.waits)
        with ThreadPoolExecutor(1) as threads:
            came = threads.submit(self.queue.take, self.me, PATIENCE)
            until(lambda: self.queue._processes._coming)
            child.end()
            self.assertEqual(other.answer(), 'True')
            other.end()
            self.assertTrue(came.result(PATIENCE))

    def test_forked(self):
        """The child of a process has nobody who waits, and no lock of its parent's."""
        self.assertTrue(self.queue.take(self.me, 0))
        pid = os.fork()
        if pid == 0:
            came = True
            with suppress(BaseException):
                came = self.queue.take('child', 0) or self.queue.waiting
                self.queue.end(self.me)
            os._exit(int(bool(came)))
        _, status = os.waitpid(pid, 0)
        self.assertEqual(status, 0)
        child = self.child()
        self.assertEqual(child.ask('0.01'), 'False')
        self.assertEqual(child.ask('end'), 'ended')
        self.queue.end(self.me)
        self.assertEqual(child.ask('60'), 'True')

    def test_where_nothing_can_be_locked(self):
        self.path.with_name('writers.lock').mkdir()
        with self.assertLogs('relstore', 'WARNING') as logged:
            for _ in range(3):
                queue = Queue(self.path.with_name('writers.lock'))
                self.assertTrue(queue.take(self.me, 0))
                self.assertFalse(queue.take('another', 0))
                queue.end(self.me)
        self.assertEqual(len(logged.records), 1)
        self.assertIn('writers.lock cannot be locked', logged.output[0])


class Writers(TestCase):
    """Storages that commit."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage(commit_lock_timeout=PATIENCE)
        self.addCleanup(self.storage.close)
        self.queue = queue_of(self.address().path)

    def voted(self, storage) -> tuple:
        instance, txn = storage.new_instance(), TransactionMetaData()
        instance.tpc_begin(txn)
        instance.store(storage.new_oid(), z64, state(1), '', txn)
        instance.tpc_vote(txn)
        return instance, txn

    def test_commits_are_done_in_the_order_of_their_votes(self):
        """By threads of several storages, and by new_oid() and reserve_oids() too."""
        other = self.open_storage(commit_lock_timeout=PATIENCE)
        self.addCleanup(other.close)
        for storage in self.storage, other:     # nobody is to ask for oids in between
            self.assertTrue([storage.new_oid() for _ in range(3)])
        tids = []

        def commit(storage):
            instance, txn = self.voted(storage)
            tids.append(instance.tpc_finish(txn))
            return tids[-1]

        instance, txn = self.voted(self.storage)
        with ThreadPoolExecutor(8) as threads:
            commits = []
            for n in range(8):
                commits.append(threads.submit(commit, (self.storage, other)[n % 2]))
                until(lambda: len(self.queue.waiting) == n + 1)
            instance.tpc_finish(txn)
            order = [future.result(PATIENCE) for future in commits]
        self.assertEqual(order, sorted(order))
        self.assertEqual(order, tids)
        self.assertIsNone(self.queue.holder)

    def test_a_turn_ends_with_its_transaction(self):
        for end in 'tpc_finish', 'tpc_abort':
            instance, txn = self.voted(self.storage)
            self.assertIsNotNone(self.queue.holder)
            getattr(instance, end)(txn)
            self.assertIsNone(self.queue.holder)
        instance, txn = self.voted(self.storage)
        with closing(self.open_storage(commit_lock_timeout=0.05)) as impatient:
            impatient.database.oids._free.extend([1000])
            with self.assertRaises(LockTimeout):
                self.voted(impatient)
        self.assertFalse(self.queue.waiting)
        instance.tpc_abort(txn)
        self.voted(self.storage)[0].release()
        self.assertIsNone(self.queue.holder)

    def test_who_takes_no_part(self):
        """SQLite's own lock protects: from a program that knows no order, and whatever becomes of the order."""
        program = textwrap.dedent("""\
            import sqlite3, sys
            connection = sqlite3.connect(sys.argv[1], isolation_level=None)
            connection.execute('BEGIN IMMEDIATE')
            print('begun', flush=True)
            sys.stdin.readline()
            connection.execute('COMMIT')
            """)
        with subprocess.Popen([sys.executable, '-c', program, self.address().path], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as process:
            self.assertEqual(process.stdout.readline(), 'begun\n')
            with ThreadPoolExecutor(1) as threads:
                self.storage.new_instance()
                voting = threads.submit(self.voted, self.storage)
                until(lambda: self.queue.holder is not None)
                with self.assertRaises(TimeoutError):
                    voting.result(0.1)
                process.stdin.write('\n')
                process.stdin.close()
                instance, txn = voting.result(PATIENCE)
                instance.tpc_finish(txn)
        self.assertTrue(self.queue.take('forgetful', 0))
        with closing(self.open_storage(commit_lock_timeout=0.1)) as impatient:
            impatient.database.oids._free.extend([1000])
            instance, txn = self.voted(impatient)
            self.assertNotEqual(self.queue.holder, 'forgetful')
            instance.tpc_finish(txn)
        self.assertIsNone(self.queue.holder)
        instance, txn = self.voted(self.storage)
        instance.tpc_finish(txn)

    def test_the_lock_is_taken_by_who_takes_no_part(self):
        """Nobody waits for longer than he is to; and for what is not the lock he waits as ever."""
        adapter = self.storage.database.adapter
        with closing(sqlite3.connect(adapter.path, isolation_level=None)) as connection, \
                closing(adapter.connect()) as session:
            patient = session.all('PRAGMA busy_timeout')
            self.assertEqual(patient, [(1000 * BUSY_TIMEOUT_SECONDS,)])
            connection.execute('BEGIN IMMEDIATE')
            for wait in (lambda: self.assertIsNone(session.try_to_write('BEGIN IMMEDIATE')),
                         lambda: self.assertRaises(LockTimeout, session.wait_to_write, 'BEGIN IMMEDIATE', 0.1)):
                began = time.monotonic()
                wait()
                self.assertLess(time.monotonic() - began, BUSY_TIMEOUT_SECONDS / 2)
                self.assertEqual(session.all('PRAGMA busy_timeout'), patient)
                session.rollback()
                self.assertIsNone(self.queue.holder)
            connection.execute('COMMIT')
            for begin in session.try_to_write, lambda begin: session.wait_to_write(begin, 0):
                self.assertIsNotNone(begin('BEGIN IMMEDIATE'))
                self.assertEqual(session.all('PRAGMA busy_timeout'), patient)
                session.rollback()

    def test_a_turn_ends_with_its_session(self):
        session = self.storage.database.adapter.connect()
        session.begin_write('BEGIN IMMEDIATE', 0)
        self.assertIs(self.queue.holder, session)
        session.close()
        self.assertIsNone(self.queue.holder)

    def test_a_stopped_process_that_waits(self):
        """It keeps its place in the order, and the lock is free: it costs the others a moment, once."""
        program = textwrap.dedent("""\
            import sys, relstore
            from relstore.tests.support.commits import commit
            from relstore.tests.support.records import state
            storage = relstore.RelStore(
                relstore.SQLite(sys.argv[1]), keep_history=sys.argv[2] == 'True', commit_lock_timeout=60)
            oid = storage.new_oid()
            print('open', flush=True)
            for line in sys.stdin:
                print(commit(storage, (oid, bytes(8), state(1))).hex(), flush=True)
                oid = storage.new_oid()
            """)
        child = Child(self.address().data_dir, program, str(self.keep_history))
        self.addCleanup(child.end)
        self.assertEqual(child.answer(), 'open')
        self.storage.new_oid()
        instance, txn = self.voted(self.storage)
        child.tell('commit')
        until(child.waits)
        child.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        instance.tpc_finish(txn)
        for _ in range(40):
            instance, txn = self.voted(self.storage)
            last = instance.tpc_finish(txn)
            self.assertLess(time.monotonic() - began, 40 * STALLED_SECONDS)
        child.process.send_signal(signal.SIGCONT)
        self.assertGreater(bytes.fromhex(child.answer()), last)
        until(lambda: self.queue._processes._coming is None)
        instance, txn = self.voted(self.storage)    # in order again
        child.tell('commit')
        until(child.waits)
        last = instance.tpc_finish(txn)
        self.assertGreater(bytes.fromhex(child.answer()), last)

    def test_sixty_four_threads(self):
        """Each gets its share, but for those who come first: nobody has waited for long then."""
        db, done, stop = DB(self.storage, pool_size=64), [0] * 64, threading.Event()
        self.addCleanup(db.close)
        with db.transaction() as connection:
            for n in range(64):
                connection.root()[n] = type(connection.root())()
        start = threading.Barrier(64)

        def write(n: int) -> None:
            manager = TransactionManager(explicit=True)
            with closing(db.open(manager)) as connection:
                start.wait(PATIENCE)
                while not stop.is_set():
                    with manager:
                        connection.root()[n]['n'] = done[n]
                    done[n] += 1
                    if min(done) == 8:
                        stop.set()
                with manager:
                    pass

        with ThreadPoolExecutor(64) as threads:
            list(threads.map(write, range(64)))
        self.assertLess(max(done), 80, done)


cases(globals(), Writers, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Writers
