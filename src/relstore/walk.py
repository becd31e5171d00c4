"""Walk: one snapshot of the database, for reading all of it page by page.

Without history a changed object moves behind a reader that goes on by tid, and a link may move from an object not yet
read to one already read. So all pages are read in one transaction, on a separate session: one from the pool would be
missing there for hours. If the session dies halfway, nothing can replace it, and the walk says so.

What could interleave: several threads read a walk's pages, or one ends it while another reads: there is a lock. All
references to it are dropped while nobody reads: it ends with the last one. The process forks: the child can neither use
the session nor close it towards the server.

Reading a page may take long. So a thread that holds the lock of all walks never waits for the lock of one: walks to be
ended are taken out under the former, and ended after it is released.
"""
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from persistent.TimeStamp import TimeStamp
from ZODB.POSException import ConflictError, StorageError
from ZODB.utils import p64, u64

from relstore.adapters.base import MAX_TID, Adapter
from relstore.errors import Disconnected, Unavailable
from relstore.halves import Halves
from relstore.pages import Pages
from relstore.sessions.session import Result, Session

# How long a walk is kept for a next call that may never come; and one that began at a given oid, until its second call:
# most of those look for a single object.
IDLE_SECONDS, SEEK_IDLE_SECONDS = 1800.0, 60.0
# Walks kept like that by one storage instance.
KEPT = 8

# Sessions of the parent process, if this one was forked.
_abandoned: list[Session] = []


class Walk:
    """A snapshot; `tid` is its newest transaction. Whoever begins it is its first user.

    It ends when it is closed, when its last user leaves, or when nothing refers to it.
    """

    def __init__(self, adapter: Adapter):
        try:
            self._session, self.tid = _begin(adapter)
        except Disconnected:            # nothing was read yet, so a new session will do
            self._session, self.tid = _begin(adapter)
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _close, self._session)
        self._lost: BaseException | None = None
        self._users, self._counting = 1, threading.Lock()       # never held for long
        self.used = time.monotonic()        # when it was last used

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def read(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return work(session, *arguments). Unavailable if the snapshot is lost: start over."""
        if self._session.pid != os.getpid():
            raise Unavailable('The snapshot belongs to the process that this one was forked from; begin again.')
        with self._lock:
            if self._lost is not None:
                raise _lost(self._lost) from self._lost
            if not self._end.alive:
                raise StorageError('What this was read from is closed.')
            try:
                return work(self._session, *arguments)
            except BaseException as e:
                self._lost = e
                self._end()
                if isinstance(e, (StorageError, ConflictError)):
                    raise _lost(e) from e
                raise
            finally:
                self.used = time.monotonic()

    def use(self) -> bool:
        """Add a user, who has to call `leave` in the end. Return False if the walk has ended."""
        with self._counting:
            if not self._users or not self.is_open:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """Remove a user. After the last one the walk ends, as soon as nobody reads."""
        if self._session.pid != os.getpid():
            return
        with self._counting:
            self._users -= 1
            if self._users:
                return
        self.close()

    def close(self) -> None:
        if self._session.pid == os.getpid():
            with self._lock:
                self._end()


def _begin(adapter: Adapter) -> tuple[Session, int]:
    """Return a session with a snapshot, and the snapshot's newest tid."""
    session = adapter.connect()
    try:
        return session, adapter.begin_snapshot(session)
    except BaseException:
        _close(session)
        raise


def _lost(error: BaseException) -> Unavailable:
    return Unavailable(f'The snapshot that is read was lost before its end, and what is left cannot be read from '
                       f'another one; begin again. {error}')


def _close(session: Session) -> None:
    if session.pid != os.getpid():
        _abandoned.append(session)
        return
    try:
        session.close()
    except Unavailable:
        session.broken = True       # the connection is dead: nothing more to do


class Walks:
    """The walks of one storage instance. Some of them go on from one call to the next.

    Those are kept by name, which the caller passes back as bytes. The caller may be at the other end of a network, so
    it is unknown whether it has given up: a walk is kept until nobody has asked for it for some time.

    After a walk through one half of the transactions, the other half may still be asked for: see halves.py.
    """

    def __init__(self, adapter: Adapter):
        self._adapter, self._pages = adapter, Pages(adapter)
        self._halves = Halves()
        self._begin_in_process()

    def _begin_in_process(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._beginning = threading.Lock()      # held while a half is begun, including its queries
        self._all: weakref.WeakSet[Walk] = weakref.WeakSet()
        self._kept: dict[bytes, tuple[Walk, float]] = {}        # with the seconds that each may be idle
        self._timer: threading.Timer | None = None
        self._due = 0.0                         # when the timer goes off

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._begin_in_process()
            self._halves.forked()

    def begin(self) -> Walk:
        self._check_process()
        walk = Walk(self._adapter)
        with self._lock:
            self._all.add(walk)
        return walk

    def half(self, start: int, stop: int) -> Walk:
        """Return the walk for the transactions of a range; the caller has to call its `leave`.

        It is a new walk, or that of the other half. Transactions committed since that began are later than this range,
        so none is missed. Unavailable if the other half's walk is gone.
        """
        self._check_process()
        if start:
            return self._younger(start) if stop == MAX_TID and start <= _tid_now() else self.begin()
        with self._lock:
            walk = self._halves.older(stop)
        return walk or self.begin()

    def _younger(self, start: int) -> Walk:
        with self._beginning:
            walk = self.begin()
            with self._lock:
                candidates = self._halves.candidates(start)
            enough = [other for other in candidates if self._has_all(other, walk, start)]
            with self._lock:
                left = self._halves.add(start, walk, enough)
                self._look_later()
        for other in left:
            other.leave()
        return walk

    def _has_all(self, other: Walk, walk: Walk, tid: int) -> bool:
        """Whether an older walk has everything that this one has up to a tid."""
        return other.tid >= tid or not walk.read(self._pages.transactions, other.tid + 1, tid, 1)

    def record(self, cookie: bytes | None) -> tuple[int, int, bytes, bytes | None]:
        """Return (oid, tid, state, cookie of the next object or None).

        cookie: from an earlier call; or the oid from which to begin a walk. ValueError if there is no object from
        there on.
        """
        if cookie and len(cookie) not in (8, 16):
            raise ValueError(f'This is neither an oid nor what the last call returned: {cookie!r}.')
        start, name = min(u64(cookie[:8]), MAX_TID) if cookie else 0, cookie[8:] if cookie else b''
        walk = self._named(name) if name else self.begin()
        rows = walk.read(self._pages.current, start, 2)
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
            self._keep(name, walk, SEEK_IDLE_SECONDS if cookie else IDLE_SECONDS)
        return oid, tid, state, p64(rest[0][0]) + name

    def _named(self, name: bytes) -> Walk:
        self._check_process()
        with self._lock:
            walk, _ = self._kept.get(name, (None, 0))
            if walk is not None:
                self._kept[name] = walk, IDLE_SECONDS
                return walk
        raise Unavailable('The snapshot from which the objects before this one were read is gone: the walk has come to '
                          f'its end, nobody went on within {IDLE_SECONDS:g} s (within {SEEK_IDLE_SECONDS:g} s after a '
                          f'first call with an oid), {KEPT} others were kept instead, or it was begun by another '
                          'process or by a storage that was closed. Begin again.')

    def _keep(self, name: bytes, walk: Walk, idle: float) -> None:
        pushed_out = None
        with self._lock:
            self._kept[name] = walk, idle
            if len(self._kept) > KEPT:
                # First those that began at an oid and have not gone on, even this one.
                pushed_out, _ = self._kept.pop(min(self._kept, key=self._priority))
            self._look_later()
        if pushed_out is not None:
            pushed_out.leave()

    def _priority(self, name: bytes) -> tuple[float, float]:
        walk, idle = self._kept[name]
        return idle, walk.used

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._kept.pop(name, None)
            self._look_later()

    def _look_later(self) -> None:
        """Set the timer for when the first kept walk or half may be idle; stop it if nothing is kept."""
        now = time.monotonic()
        waits = [walk.used + idle - now for walk, idle in self._kept.values()]
        half = self._halves.due()
        if half is not None:
            waits.append(half)
        if not waits:
            self._stop_looking()
            return
        wait = max(min(waits), 0.01)
        if self._timer is not None:
            if self._due <= now + wait:
                return
            self._stop_looking()
        self._due = now + wait
        self._timer = timer = threading.Timer(wait, _look, (weakref.ref(self),))
        timer.daemon = True
        timer.start()
        self._stop = weakref.finalize(self, timer.cancel)       # a dropped storage must leave no thread

    def _stop_looking(self) -> threading.Timer | None:
        timer, self._timer = self._timer, None
        if timer is not None:
            self._stop()
        return timer

    def drop_idle(self) -> None:
        """Drop the walks that have been idle for too long."""
        now = time.monotonic()
        with self._lock:
            names = [name for name, (walk, idle) in self._kept.items() if now - walk.used >= idle]
            left = [self._kept.pop(name)[0] for name in names] + self._halves.idle()
            self._stop_looking()
            self._look_later()
        for walk in left:
            walk.leave()

    def close(self) -> None:
        """End all walks, including those that iterators read."""
        if self._pid != os.getpid() or not self._all:
            return
        with self._lock:
            walks = list(self._all)
            self._kept.clear()
            self._halves.give_up()
            timer = self._stop_looking()
        if timer is not None:
            timer.join()
        for walk in walks:
            walk.close()


def _look(walks: weakref.ref[Walks]) -> None:
    this = walks()      # weak, so that the timer does not keep a dropped storage alive
    if this is not None:
        this.drop_idle()


def _tid_now() -> int:
    now = time.time()
    return u64(TimeStamp(*time.gmtime(now)[:5], now % 60).raw())
