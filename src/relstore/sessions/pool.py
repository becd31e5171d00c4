"""SessionPool: lends sessions, a bounded number at a time."""
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from relstore.errors import Disconnected, StorageError, Unavailable
from relstore.sessions import process
from relstore.sessions.session import Result, Session


class SessionPool:
    """Lends sessions to one caller at a time, at most `size`, newest first.

    A caller waits up to `timeout` seconds for one, then gets Unavailable. Where an idle session is there, borrowing
    and giving back take no lock: the ends of a deque are atomic. Whoever has to wait says so first (`_waiting`) and
    looks again, whoever gives back looks for that afterwards: one of the two sees the other.
    """

    def __init__(self, connect: Callable[[], Session], size: int, timeout: float):
        self._connect, self._size, self._timeout = connect, size, timeout
        self._idle: deque[Session] = deque()
        self._changed = threading.Condition()   # guards what follows
        self._waiting = 0
        self._total = 0
        self._era = 0
        self._closed = False

    @property
    def lent(self) -> int:
        return self._total - len(self._idle)

    def borrow(self) -> Session:
        """Return a session, to be given back with `give_back`; prefer `session()`."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._wait() or self._new()

    def give_back(self, session: Session) -> None:
        """Take a session back: rolled back if a transaction is open in it, dropped if it is broken or retired."""
        try:
            if session.pid == process.pid:
                session.rollback()
        except StorageError:
            session.broken = True       # what cannot be rolled back ends with its connection
        except BaseException:
            session.broken = True       # interrupted half-way: the next user must not find a transaction
            raise
        finally:
            self._take_back(session)

    def _take_back(self, session: Session) -> None:
        if session.pid != process.pid:
            self._abandoned.append(session)
            return
        if session.broken or session.era != self._era:
            self._drop(session)
        else:
            self._idle.append(session)
            if session.era != self._era:
                self._drop_idle()           # retired in this very moment
        if self._waiting:
            with self._changed:
                self._changed.notify()

    @contextmanager
    def session(self) -> Iterator[Session]:
        session = self.borrow()
        try:
            yield session
        finally:
            self.give_back(session)

    def attempt(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return work(session, *arguments). If the pooled connection proves to be dead, do it once more on a new one.

        For work that is safe to repeat, and leaves no transaction open where it succeeds.
        """
        session = self.borrow()
        try:
            result = work(session, *arguments)
        except Disconnected:
            self.retire()           # what killed one connection has likely killed them all
            self.give_back(session)
        except BaseException:
            self.give_back(session)
            raise
        else:
            self._take_back(session)
            return result
        with self.session() as session:
            return work(session, *arguments)

    def retire(self) -> None:
        """Drop every session that there is now: the idle ones at once, the others when they come back."""
        with self._changed:
            self._era += 1
        self._drop_idle()

    def close(self) -> None:
        """Close the idle sessions now, and each of the others when it comes back."""
        self._closed = True
        self.retire()

    def _wait(self) -> Session | None:
        """Return an idle session, or None when there is room for a new one, which is then counted."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._waiting += 1
            try:
                while not self._closed:
                    with suppress(IndexError):
                        return self._idle.pop()
                    if self._total < self._size:
                        self._total += 1
                        return None
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise Unavailable(
                            f'All {self._size} database sessions of this process are in use and none came back within '
                            f'{self._timeout:g} s; raise pool-size, or look for what holds them.')
                raise Unavailable('The storage is closed.')
            finally:
                self._waiting -= 1

    def _new(self) -> Session:
        era = self._era
        try:
            session = self._connect()
        except BaseException:
            self._one_less()
            raise
        session.era = era
        return session

    def _drop_idle(self) -> None:
        for _ in range(len(self._idle)):
            with suppress(IndexError):
                session = self._idle.popleft()
                if session.era == self._era:
                    self._idle.append(session)
                else:
                    self._drop(session)

    def _drop(self, session: Session) -> None:
        try:
            session.close()
        except Unavailable:
            session.broken = True       # closing a dead connection: nothing more to do with it
        self._one_less()

    def _one_less(self) -> None:
        with self._changed:
            self._total -= 1
            self._changed.notify()

    def after_fork(self) -> None:
        """Begin anew in a child process, which must not talk over its parent's connections.

        They are kept, untouched, so that nothing says goodbye to the server.
        """
        self._abandoned = self._idle
        self._idle, self._changed = deque(), threading.Condition()
        self._waiting = self._total = 0
        self._era += 1
