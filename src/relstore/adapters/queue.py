"""Queue: the order in which writers to one SQLite file get its lock for writers.

SQLite has no order: a writer that finds the lock taken tries again and again, and may never succeed. So the threads of
a process wait for each other here, first come, first served, and one thread of a process at a time waits for other
processes.

Handing on every turn would be slow: the lock would be idle until the next thread or process is awake, which takes as
long as a commit. The thread that has just written is awake, and may have another transaction. So a turn that ends is
free for whoever comes first, until a thread has waited for PATIENCE_SECONDS: from then on nobody passes it. Meanwhile
the first waiting thread keeps looking whether the turn is free, because nobody else may come.

This is about order only. SQLite's lock is what protects the data. So nothing is lost if a writer takes no part (an
older relstore, RelStorage, the program sqlite3, a file system without locks), and a writer that has waited in vain may
try all the same.

Between processes there are two system locks, on bytes of the file writers.lock. The process that writes has CURRENT;
the next one, if its patience has ended, has NEXT. A process that finds both free takes both at once and gives NEXT
back; if one is taken, it takes neither. So a process that has just written cannot be quicker than the one that has
NEXT. But for SLICE_SECONDS after its turn has come, a process takes CURRENT all the same if it is free: otherwise, as
soon as several wait, each would write once in its turn, and waking the next one takes as long as two commits. The
system wakes those that wait for NEXT in any order, and releases the locks of a process that ends. Locks belong to a
process, so a child of fork() has none of its parent's. A process that is stopped while it waits (docker pause, a
debugger) keeps NEXT. So a thread that has waited for STALLED_SECONDS and then finds SQLite's lock free several times in
a row goes ahead, and so does its process until the system lock comes. A third byte is PRESENT: all relstore processes
share its lock as long as they have the database open, which tells them from strangers (neighbours.py).
"""
import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger('relstore')

NEXT, CURRENT, PRESENT = 0, 1, 2
# After so long without a turn, a process looks whether SQLite's lock is free: LOOKS times in a row, else somebody was
# about to take it.
STALLED_SECONDS, LOOKS, BETWEEN_SECONDS = 0.5, 3, 0.02
PATIENCE_SECONDS = 0.02         # how long others may pass a thread that waits
THREAD_PAUSES_SECONDS = 0.001, 0.002, 0.005, 0.012      # between its looks: each takes the interpreter from the others
SLICE_SECONDS = 0.02            # how long a process may go on though another one waits
PROCESS_PAUSE_SECONDS = 0.001   # between the looks of a process
BUSY = errno.EACCES, errno.EAGAIN       # what the system may say where a lock is taken


class Queue:
    """The order in one process: one queue for each file. A turn belongs to a session, and ends with its transaction.

    What could interleave, all of it under one lock:

    * A turn comes at the moment when its thread gives up: a thread that gives up too late hands the turn on.
    * A turn is left free at the moment when the first waiting thread loses patience: it looks once more then, and a
      thread that has taken the turn in between hands it on to it.
    * The first waiting thread leaves, with the turn or without, while the next one sleeps: the next is woken, and looks
      from now on; unless it has no patience left, for then the turn will be handed on to it, if anybody has the turn.
    """

    def __init__(self, path: Path):
        self._processes = Processes(path)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew in a child process, where nobody waits."""
        self._lock = threading.Lock()       # guards what follows
        self.holder: object = None      # whose turn it is
        self.waiting: deque[_Waiter] = deque()     # in the order in which they came
        self._processes.after_fork()

    def join(self, writes: bool = True) -> None:
        """Be visible to others as long as this queue exists. A process that only reads creates no file for that."""
        self._processes.join(writes)

    def take(self, who: object, timeout: float, is_free: Callable[[], bool] | None = None) -> bool:
        """Wait up to `timeout` seconds for the turn of `who`; return whether it came.

        is_free: whether SQLite's lock is free. It is asked while another process has the turn and does not use it.
        """
        deadline = time.monotonic() + timeout if timeout > 0 else 0.0
        with self._lock:
            free = self.holder is None or self.holder is who
            if free:
                self.holder = who
        if not free and not (timeout > 0 and self._wait(who, deadline)):
            return False
        try:
            if self._processes.take(deadline, is_free):
                return True
        except BaseException:
            self._hand_on(who)
            raise
        self._hand_on(who)
        return False

    def seize(self, who: object) -> None:
        """Record that `who` has the lock, in turn or not: the one before may not have ended its turn."""
        with self._lock:
            self.holder = who

    def end(self, who: object) -> None:
        """End the turn of `who`, if it has one."""
        if self.holder is who:
            self._processes.end()
            self._hand_on(who)

    def _wait(self, who: object, deadline: float) -> bool:
        waiter = _Waiter(who)
        with self._lock:
            self.waiting.append(waiter)
        try:
            if self._await(waiter, deadline):
                return True
        except BaseException:
            if not self._leave(waiter):
                self._hand_on(who)
            raise
        return not self._leave(waiter)

    def _await(self, waiter: '_Waiter', deadline: float) -> bool:
        """Wait for the turn; return whether it came."""
        pauses = iter(THREAD_PAUSES_SECONDS)
        while True:
            now = time.monotonic()
            with self._lock:
                if waiter.came:
                    return True
                first = self.waiting[0] is waiter
                if first and self.holder is None:
                    self.waiting.popleft()
                    self.holder = waiter.who
                    self._wake_first()
                    return True
            if now >= deadline:
                return False
            wait = deadline - now
            if first and now < waiter.since + PATIENCE_SECONDS:
                wait = min(next(pauses, PATIENCE_SECONDS), wait, waiter.since + PATIENCE_SECONDS - now)
            waiter.woken.acquire(timeout=wait)

    def _wake_first(self) -> None:
        """Let the first waiting thread look by itself, unless the turn will be handed on to it."""
        if self.waiting and (self.holder is None or not self.waiting[0].is_due()):
            self.waiting[0].wake()

    def _leave(self, waiter: '_Waiter') -> bool:
        """Stop waiting; False if the turn has come meanwhile."""
        with self._lock, suppress(ValueError):
            self.waiting.remove(waiter)
            self._wake_first()
            return True
        return False

    def _hand_on(self, who: object) -> None:
        """End the turn of `who`. It is free then, or goes to a thread that has waited too long."""
        with self._lock:
            if self.holder is who:
                self.holder = None
                if self.waiting and self.waiting[0].is_due():
                    waiter = self.waiting.popleft()
                    self.holder, waiter.came = waiter.who, True
                    waiter.wake()
                    self._wake_first()


class _Waiter:
    """A thread of this process that waits for the turn. since: when it came. came: the turn was handed on to it."""
    __slots__ = ('came', 'since', 'who', 'woken')

    def __init__(self, who: object):
        self.who, self.since, self.came, self.woken = who, time.monotonic(), False, threading.Lock()
        self.woken.acquire()

    def is_due(self) -> bool:
        return time.monotonic() >= self.since + PATIENCE_SECONDS

    def wake(self) -> None:
        """Called under the lock of the queue."""
        if self.woken.locked():
            self.woken.release()


class Processes:
    """The order between processes. One thread at a time uses it, besides the one that waits for the system.

    A wait for a system lock has no time limit. So a thread of its own does it, and gives a lock back at once if nobody
    wants it any more.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None
        self._readable: int | None = None       # the same file, where it cannot be written
        self._useless = False           # the file cannot be locked
        self.after_fork()

    def after_fork(self) -> None:
        self._lock = threading.Lock()           # guards what follows
        self._coming: _Coming | None = None     # what is being waited for
        self._present = False
        self._slice_ends = 0.0

    def __del__(self) -> None:
        for file in self._file, self._readable:     # both: closing one releases the locks of the other
            if file is not None:
                os.close(file)

    def join(self, writes: bool) -> None:
        with self._lock:
            if self._present:
                return
            try:
                if writes and not self._useless:
                    self._open()
            except OSError as e:
                self._do_without(e)
            with suppress(OSError):         # neighbours.py then goes by the files that are open
                file = self._readable if self._file is None else self._file
                if file is None:
                    file = self._readable = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, PRESENT)
                self._present = True

    def take(self, deadline: float, is_free: Callable[[], bool] | None = None) -> bool:
        """Wait until a time of the monotonic clock (0: do not wait); return whether the turn came.

        It always comes if the file cannot be locked, or if those ahead have stopped.
        """
        with self._lock:
            if self._coming.stalled if self._coming else self._useless or self._at_once():
                return True
            if not deadline:
                return False
            looks = self._coming is None
        if looks and self._look(deadline):
            return True
        if time.monotonic() >= deadline:
            return False
        with self._lock:
            coming = self._coming or self._wait()
            coming.wanted = True
        try:
            stalled = self._await(coming, deadline, is_free)
        except BaseException:
            if not self._give_up(coming):
                self.end()
            raise
        if not self._give_up(coming):
            return True
        coming.stalled = stalled
        return stalled

    def _look(self, deadline: float) -> bool:
        """Look for PATIENCE_SECONDS whether the turn is free; return whether it was taken."""
        patience = time.monotonic() + PATIENCE_SECONDS
        while (now := time.monotonic()) < min(patience, deadline):
            time.sleep(min(PROCESS_PAUSE_SECONDS, deadline - now))
            with self._lock:
                if self._at_once():
                    return True
        return False

    def _await(self, coming: '_Coming', deadline: float, is_free: Callable[[], bool] | None) -> bool:
        """Wait for the turn; return whether those ahead have stopped."""
        wait, looks = STALLED_SECONDS, 0
        while not coming.came.wait(max(0, min(wait, deadline - time.monotonic()))) and time.monotonic() < deadline:
            looks, wait = looks + 1 if is_free and is_free() else 0, BETWEEN_SECONDS
            if looks == LOOKS:
                return True
        return False

    def end(self) -> None:
        if self._file is not None:
            _unlock(self._file, CURRENT)

    def _at_once(self) -> bool:
        """Take the turn if it is free and nobody has to go first."""
        try:
            file = self._file
            if file is None:
                file = self._open()
            now = time.monotonic()
            if now < self._slice_ends:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, CURRENT)
            else:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 2, NEXT)      # CURRENT is beside it
                fcntl.lockf(file, fcntl.LOCK_UN, 1, NEXT)
                self._slice_ends = now + SLICE_SECONDS
        except OSError as e:
            if self._file is not None and e.errno in BUSY:
                self._slice_ends = 0.0
                return False
            self._do_without(e)
        return True

    def _open(self) -> int:
        file = self._file
        if file is None:
            file = self._file = _open(self._path)
        return file

    def _wait(self) -> '_Coming':
        self._coming = coming = _Coming()
        try:
            threading.Thread(target=self._fetch, args=(coming,), name='relstore-queue', daemon=True).start()
        except RuntimeError:            # the interpreter ends
            coming.came.set()
        return coming

    def _fetch(self, coming: '_Coming') -> None:
        try:
            file = self._open()
            fcntl.lockf(file, fcntl.LOCK_EX, 1, NEXT)
            fcntl.lockf(file, fcntl.LOCK_EX, 1, CURRENT)
            _unlock(file, NEXT)
        except OSError as e:
            if e.errno != errno.EDEADLK:        # the system may suspect a deadlock if threads wait for several locks
                self._do_without(e)
        with self._lock:
            if coming.wanted:
                self._slice_ends = time.monotonic() + SLICE_SECONDS
                coming.came.set()
            else:
                self._coming = None
                self.end()

    def _give_up(self, coming: '_Coming') -> bool:
        """Stop waiting; False if the turn has come meanwhile."""
        with self._lock:
            if coming.came.is_set():
                self._coming = None
                return False
            coming.wanted = False
            return True

    def _do_without(self, error: OSError) -> None:
        if self._path not in _warned:
            _warned.add(self._path)
            log.warning('The file %s cannot be locked (%s): processes that write to this database at the same time '
                        'wait for each other in no order.', self._path, error.strerror)
        self._useless = True


class _Coming:
    """A turn that a thread waits for. wanted: somebody still wants it. stalled: nobody waits until it has come."""

    def __init__(self) -> None:
        self.came, self.wanted, self.stalled = threading.Event(), True, False


def _open(path: Path) -> int:
    """Open the file of the locks; if it is new, for all users who may write to the database."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with suppress(OSError):         # another user has created it
            os.fchmod(file, os.stat(path.with_name('main.sqlite3')).st_mode & 0o777)
        return file


def _unlock(file: int, place: int) -> None:
    with suppress(OSError):             # it could not be locked either
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


_warned: set[Path] = set()
_queues: weakref.WeakValueDictionary[Path, Queue] = weakref.WeakValueDictionary()
_making = threading.Lock()


def queue_of(path: Path) -> Queue:
    """Return the queue for a file: one for the whole process, which ends with its last user.

    Whichever path is used: closing a second file would release the locks on the first.
    """
    path = path.resolve()
    with _making:
        queue = _queues.get(path)
        if queue is None:
            queue = _queues[path] = Queue(path.with_name('writers.lock'))
        return queue


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    for queue in list(_queues.values()):
        queue.after_fork()


os.register_at_fork(after_in_child=_after_fork)
