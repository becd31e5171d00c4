"""Walk: one snapshot of the database, for whoever reads all of it page by page.

Without history a changed object moves behind a reader who goes on by tid, and a link moves from an object that is not
read yet to one that is. So all pages are read in one transaction, on a session of its own: that of a pool would be
kept from others for hours. Where the session dies in the middle nothing else will do, and the walk says so.

What could interleave: a walk's pages are read by several threads, or it is ended by one while another reads: there is a
lock. It is dropped while nobody reads: then it ends with the last who could. A process forks: the child can neither
use the session nor say goodbye in its name.
"""
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable

from persistent.TimeStamp import TimeStamp
from ZODB.POSException import ConflictError, StorageError
from ZODB.utils import p64, u64

from relstore.adapters.base import MAX_TID, Adapter
from relstore.errors import Unavailable
from relstore.session import Result, Session

# Seconds for which a walk is kept of which nobody but the next call can tell that it goes on.
IDLE, HALF_IDLE = 1800.0, 300.0
# Walks that are kept like that by one storage instance.
KEPT = 8
# The name of the walk of which the other half may still come.
HALF = b''

# Of the process that this one was forked from.
_abandoned: list[Session] = []


class Walk:
    """A snapshot; `tid` is its newest transaction. It ends when it is closed, or when nothing refers to it."""

    def __init__(self, adapter: Adapter):
        session = adapter.connect()
        try:
            self.tid = adapter.begin_snapshot(session)
        except BaseException:
            session.close()
            raise
        self._session, self._lock = session, threading.Lock()
        self._end = weakref.finalize(self, _close, session)
        self._lost: Exception | None = None
        self._users = 0
        self.used = time.monotonic()        # when, for the last time

    @property
    def is_closed(self) -> bool:
        """Whether somebody has ended it. One whose session has died is not closed: it is to be missed."""
        return not self._end.alive and self._lost is None

    def read(self, work: Callable[[Session], Result]) -> Result:
        """Return work(session). Unavailable if the snapshot is lost: begin from the beginning."""
        if self._session.pid != os.getpid():
            raise Unavailable('The snapshot belongs to the process that this one was forked from; begin again.')
        with self._lock:
            if self._lost is not None:
                raise _lost(self._lost) from self._lost
            if not self._end.alive:
                raise StorageError('What this was read from is closed.')
            try:
                return work(self._session)
            except BaseException as e:
                self._lost = e
                self._end()
                if isinstance(e, (StorageError, ConflictError)):
                    raise _lost(e) from e
                raise
            finally:
                self.used = time.monotonic()

    def use(self) -> 'Walk':
        """Say that one more needs it, who will call `leave` if he does not any longer."""
        with self._lock:
            self._users += 1
        return self

    def leave(self) -> None:
        """End it if nobody else needs it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._end()

    def close(self) -> None:
        if self._session.pid == os.getpid():
            with self._lock:
                self._end()


def _lost(error: Exception) -> Unavailable:
    return Unavailable(f'The snapshot that is read was lost before its end, and what is left cannot be read from '
                       f'another one; begin again. {error}')


def _close(session: Session) -> None:
    if session.pid != os.getpid():
        _abandoned.append(session)
        return
    try:
        session.close()
    except Unavailable:
        session.broken = True       # closing a dead connection: nothing more to do with it


class Walks:
    """The walks of one storage instance, and those of them that go on from one call to the next.

    The latter are kept by a name, which travels as bytes: the caller may be at the other end of a network, so nobody
    here can tell whether he has given up. They are kept until nobody has asked for some time.

    Whoever collects garbage reads what is younger than a time, and then what is older: two halves of one snapshot. The
    second joins the first as long as that is there, kept by its iterator or here.
    """

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._begin_in_process()

    def _begin_in_process(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._all: weakref.WeakSet[Walk] = weakref.WeakSet()
        self._kept: dict[bytes, tuple[Walk, float]] = {}        # with the seconds that it may be idle
        self._halves: weakref.WeakValueDictionary[int, Walk] = weakref.WeakValueDictionary()
        self._given_up: int | None = None       # where the last half began that nobody asked for in time
        self._timer: threading.Timer | None = None

    def begin(self) -> Walk:
        if self._pid != os.getpid():
            self._begin_in_process()
        walk = Walk(self._adapter)
        with self._lock:
            self._all.add(walk)
        return walk

    def half(self, start: int, stop: int) -> Walk:
        """Return the walk for the transactions of a range: a new one, or that of the other half.

        What was committed since that began has a later tid than what it is asked for, so it is not missed.
        """
        other = None if start else self._halves.get(stop)
        if other is not None and not other.is_closed:
            return other
        if not start and stop == self._given_up:
            raise Unavailable('What is younger was read from a snapshot that is gone, because the rest was not asked '
                              f'for within {HALF_IDLE:g} s; begin again with what is younger.')
        walk = self.begin()
        if start and stop == MAX_TID and start <= _tid_now():
            with self._lock:
                self._halves[start], self._given_up = walk, None
            self._keep(HALF, walk, HALF_IDLE)
        return walk

    def record(self, cookie: bytes | None) -> tuple[int, int, bytes, bytes | None]:
        """Return (oid, tid, state, cookie of the next object or None).

        cookie: of the object, from an earlier call; or an oid, where a walk is to begin. ValueError if there is no
        object from there on.
        """
        start, name = min(u64(cookie[:8]), MAX_TID) if cookie else 0, cookie[8:] if cookie else b''
        walk = self._named(name) if name else self.begin()
        rows = walk.read(lambda session: self._adapter.current_records(session, start, 2))
        if len(rows) < 2:
            self._forget(name)
            walk.close()
        if not rows:
            raise ValueError(f'There is no object from oid {start:#x} on.')
        [(oid, tid, state), *rest] = rows
        if not rest:
            return oid, tid, state, None
        if not name:
            name = secrets.token_bytes(8)
            self._keep(name, walk, IDLE)
        return oid, tid, state, p64(rest[0][0]) + name

    def _named(self, name: bytes) -> Walk:
        walk, _ = self._kept.get(name, (None, 0)) if self._pid == os.getpid() else (None, 0)
        if walk is None:
            raise Unavailable('The snapshot from which the objects before this one were read is gone: the walk has '
                              f'come to its end, nobody went on within {IDLE:g} s, or the storage was closed. '
                              'Begin again.')
        return walk

    def _keep(self, name: bytes, walk: Walk, idle: float) -> None:
        with self._lock:
            self._drop(name)
            self._kept[name] = walk.use(), idle
            while len(self._kept) > KEPT:
                self._drop(min(self._kept, key=lambda name: self._kept[name][0].used))
            if self._timer is None:
                self._look_later()

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._drop(name)
            if not self._kept:
                self._stop_looking()

    def _drop(self, name: bytes) -> None:
        walk, _ = self._kept.pop(name, (None, 0))
        if walk is not None:
            walk.leave()

    def _look_later(self) -> None:
        wait = min(idle for _, idle in self._kept.values())
        self._timer = timer = threading.Timer(wait, _look, (weakref.ref(self),))
        timer.daemon = True
        timer.start()
        self._stop = weakref.finalize(self, timer.cancel)       # a storage that was dropped leaves no thread

    def _stop_looking(self) -> threading.Timer | None:
        timer, self._timer = self._timer, None
        if timer is not None:
            self._stop()
        return timer

    def drop_idle(self) -> None:
        """Let go what nobody has used for its time."""
        now = time.monotonic()
        with self._lock:
            idle = {name: walk for name, (walk, idle) in self._kept.items() if now - walk.used >= idle}
            if HALF in idle:
                self._given_up = next((start for start, walk in self._halves.items() if walk is idle[HALF]), None)
            for name in idle:
                self._drop(name)
            self._stop_looking()
            if self._kept:
                self._look_later()

    def close(self) -> None:
        """End all, also those that iterators read."""
        if self._pid != os.getpid() or not self._all:
            return
        with self._lock:
            walks = list(self._all)
            self._kept.clear()
            self._halves.clear()
            timer = self._stop_looking()
        if timer is not None:
            timer.join()
        for walk in walks:
            walk.close()


def _look(walks: weakref.ref[Walks]) -> None:
    this = walks()      # a storage that was dropped is not to live as long as this waits
    if this is not None:
        this.drop_idle()


def _tid_now() -> int:
    now = time.time()
    return u64(TimeStamp(*time.gmtime(now)[:5], now % 60).raw())
