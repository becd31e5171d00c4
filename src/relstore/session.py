"""A Session is one DB-API connection; the SessionPool lends them, a bounded number at a time.

Sessions run in autocommit: a transaction is there only where the SQL says BEGIN. No session keeps settings
between statements, so any of them can serve any caller, also behind pgbouncer in transaction mode.
"""
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from relstore.adapters.drivers import Driver
from relstore.errors import Deadlock, Disconnected, Unavailable

Row = tuple[Any, ...]
Result = TypeVar('Result')


class Session:
    """The only gateway to a driver: whatever it raises is translated here."""

    def __init__(self, driver: Driver, *arguments):
        module = driver.load()
        self._driver = driver
        self._errors = module.Error
        self._connection = None
        self.broken = False
        # The epoch the database had when this session began; see Database.
        self.epoch: str | None = None
        # Of the pool it belongs to; see SessionPool.retire.
        self.era = 0
        with self._translated():
            self._connection = driver.connect(module, *arguments)

    def run(self, sql: str, parameters: Sequence = ()) -> int:
        """Run a statement that returns nothing; return how many rows it touched."""
        with self._translated():
            cursor = self._connection.cursor()
            cursor.execute(sql, parameters)
            return cursor.rowcount

    def all(self, sql: str, parameters: Sequence = ()) -> list[Row]:
        """Return all rows. Whoever calls this has bounded them in the SQL."""
        with self._translated():
            cursor = self._connection.cursor()
            cursor.execute(sql, parameters)
            return cursor.fetchall()

    def one(self, sql: str, parameters: Sequence = ()) -> Row | None:
        """Return the only row, or None if there is none."""
        rows = self.all(sql, parameters)
        if not rows:
            return None
        [row] = rows
        return row

    def many(self, sql: str, rows: Iterable[Sequence]) -> None:
        """Run one statement for each of `rows`."""
        with self._translated():
            self._connection.cursor().executemany(sql, rows)

    def script(self, sql: str, parameters: Sequence = ()) -> list[Row]:
        """Run several statements, sent as one message; return the rows of the last."""
        with self._translated():
            return self._driver.script(self._connection, sql, parameters)

    @property
    def in_transaction(self) -> bool:
        return self._driver.in_transaction(self._connection)

    def rollback(self) -> None:
        """End the transaction, if one is open, without effect."""
        if self.in_transaction:
            self.run('ROLLBACK')

    def close(self) -> None:
        self.broken = True
        with self._translated():
            self._connection.close()

    def _translated(self):
        return _Translation(self)

    def translate(self, error: Exception) -> Exception:
        kind = self._driver.classify(error)
        if kind is Disconnected:
            self.broken = True
        message = ' '.join(str(error).split()) or type(error).__name__
        return kind(message) if kind is not Deadlock else Deadlock(message=message[:2000])


class _Translation:
    """`with` this around every call of a driver. A class: contextlib's generators cost three times as much."""

    __slots__ = ('session',)

    def __init__(self, session: Session):
        self.session = session

    def __enter__(self):
        return None

    def __exit__(self, kind, error, traceback):
        if error is not None and isinstance(error, self.session._errors):
            raise self.session.translate(error) from error


class SessionPool:
    """Lends sessions to one caller at a time, at most `size`, newest first.

    A caller waits up to `timeout` seconds for one, then gets Unavailable.
    """

    def __init__(self, connect: Callable[[], Session], size: int, timeout: float):
        self._connect, self._size, self._timeout = connect, size, timeout
        self._returned = threading.Condition()
        self._idle: list[Session] = []
        self._lent = 0
        self._era = 0
        self._closed = False
        # A child process must not talk over its parent's connections.
        pool = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: pool() and pool()._abandon())

    @property
    def lent(self) -> int:
        return self._lent

    def borrow(self, fresh: bool = False) -> Session:
        """Return a session, to be given back with `give_back`; prefer `session()`. fresh: a new connection."""
        deadline = time.monotonic() + self._timeout
        with self._returned:
            while self._lent >= self._size:
                if not self._returned.wait(deadline - time.monotonic()):
                    raise Unavailable(f'All {self._size} database sessions of this process are in use and none came '
                                      f'back within {self._timeout:g} s; raise pool-size, or look for what holds them.')
            if self._closed:
                raise Unavailable('The storage is closed.')
            self._lent += 1
            session = self._idle.pop() if self._idle and not fresh else None
            era = self._era
        if session is not None:
            return session
        try:
            session = self._connect()
            session.era = era
            return session
        except BaseException:
            self._one_less()
            raise

    def give_back(self, session: Session) -> None:
        """Take a session back: rolled back if a transaction is open in it, dropped if it is broken or retired."""
        try:
            if not session.broken:
                session.rollback()
        except Disconnected:
            session.broken = True
        finally:
            with self._returned:
                keep = not session.broken and not self._closed and session.era == self._era
                if keep:
                    self._idle.append(session)
            if not keep:
                _close(session)
            self._one_less()

    @contextmanager
    def session(self, fresh: bool = False):
        session = self.borrow(fresh)
        try:
            yield session
        finally:
            self.give_back(session)

    def attempt(self, work: Callable[[Session], Result]) -> Result:
        """Return work(session). If the pooled connection proves to be dead, do it once more on a new one.

        For work that is safe to repeat: reads outside a transaction.
        """
        with self.session() as session:
            try:
                return work(session)
            except Disconnected:
                self.retire()       # what killed one connection has likely killed them all
        with self.session(fresh=True) as session:
            return work(session)

    def retire(self) -> None:
        """Drop every session that there is now: the idle ones at once, the others when they come back."""
        with self._returned:
            self._era += 1
            idle, self._idle = self._idle, []
        for session in idle:
            _close(session)

    def close(self) -> None:
        """Close the idle sessions now, and each of the others when it comes back."""
        self._closed = True
        self.retire()

    def _one_less(self) -> None:
        with self._returned:
            self._lent -= 1
            self._returned.notify()

    def _abandon(self) -> None:
        # The connections are the parent's: forget them without a word to the server.
        self._abandoned = self._idle
        self._idle, self._lent, self._returned = [], 0, threading.Condition()


def _close(session: Session) -> None:
    try:
        session.close()
    except Unavailable:
        session.broken = True       # closing a dead connection: nothing more to do with it
