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
    """Lends at most `size` sessions, each to one caller at a time, the most recently used first.

    A caller waits up to `timeout` seconds for one, then gets Unavailable. While idle sessions are available, borrowing
    and giving back take no lock: operations at the ends of a deque are atomic. A caller that has to wait first says so
    (`_waiting`) and then looks again; a caller that gives back looks for that afterwards: one of them sees the other.
    """

    def __init__(self, connect: Callable[[], Session], size: int, timeout: float):
        self._connect, self._size, self._timeout = connect, size, timeout
        self.idle: deque[Session] = deque()
        self._changed = threading.Condition()   # guards what follows
        self._waiting = 0
        self._total = 0
        self._era = 0
        self._closed = False

    @property
    def lent(self) -> int:
        return self._total - len(self.idle)

    def borrow(self) -> Session:
        """Return a session, to be given back with `give_back`; prefer `session()`."""
        try:
            return self.idle.pop()
        except IndexError:
            return self._wait() or self._new()

    def give_back(self, session: Session) -> None:
        """Take a session back: roll it back if a transaction is open in it, drop it if it is broken or retired."""
        try:
            if session.pid == process.pid:
                session.rollback()
        except StorageError:
            session.broken = True       # a transaction that cannot be rolled back ends with its connection
        except BaseException:
            session.broken = True       # interrupted: the next user must not find a transaction
            raise
        finally:
            self.take_back(session)

    def take_back(self, session: Session) -> None:
        """As give_back, for a session in which no transaction is open."""
        if session.pid != process.pid:
            self._abandoned.append(session)
            return
        if session.broken or session.era != self._era:
            self._drop(session)
        else:
            self.idle.append(session)
            if session.era != self._era:
                self._drop_idle()           # it was retired just now
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
        """Return work(session, *arguments). If the pooled connection proves dead, repeat it once on a new one.

        Only for work that is safe to repeat, and leaves no transaction open on success.
        """
        session = self.borrow()
        try:
            result = work(session, *arguments)
        except Disconnected:
            self.retire()           # whatever killed one connection has probably killed them all
            self.give_back(session)
        except BaseException:
            self.give_back(session)
            raise
        else:
            self.take_back(session)
            return result
        with self.session() as session:
            return work(session, *arguments)

    def retire(self) -> None:
        """Drop every existing session: the idle ones at once, the others when they are given back."""
        with self._changed:
            self._era += 1
        self._drop_idle()

    def close(self) -> None:
        """Close the idle sessions now, and each of the others when it is given back."""
        self._closed = True
        self.retire()

    def _wait(self) -> Session | None:
        """Return an idle session, or None after counting a new one that the caller is to make."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._waiting += 1
            try:
                while not self._closed:
                    with suppress(IndexError):
                        return self.idle.pop()
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
        for _ in range(len(self.idle)):
            with suppress(IndexError):
                session = self.idle.popleft()
                if session.era == self._era:
                    self.idle.append(session)
                else:
                    self._drop(session)

    def _drop(self, session: Session) -> None:
        try:
            session.close()
        except Unavailable:
            session.broken = True       # the connection is dead: nothing more to do
        self._one_less()

    def _one_less(self) -> None:
        with self._changed:
            self._total -= 1
            self._changed.notify()

    def after_fork(self) -> None:
        """Start afresh in a child process, which must not use its parent's connections.

        They are kept, untouched, so that nothing closes them towards the server.
        """
        self._abandoned = self.idle
        self.idle, self._changed = deque(), threading.Condition()
        self._waiting = self._total = 0
        self._era += 1
