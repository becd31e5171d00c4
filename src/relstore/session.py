"""A Session is one DB-API connection; the SessionPool lends them, a bounded number at a time.

Sessions run in autocommit: a transaction is there only where the SQL says BEGIN. Nothing relies on what an earlier
statement has set, so any session can serve any caller, also behind pgbouncer in transaction mode.
"""
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar

from relstore.adapters.drivers import Driver
from relstore.errors import Deadlock, Disconnected, StorageError, Unavailable

# The process this is: asking the system each time would cost a tenth of a load from SQLite.
_pid = os.getpid()


def _now_in_child() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_now_in_child)

Row = tuple[Any, ...]
Result = TypeVar('Result')


class Session:
    """The only gateway to a driver: whatever it raises is translated here."""

    def __init__(self, driver: Driver, *arguments):
        module = driver.load()
        self._driver = driver
        self._errors = module.Error
        self.pid = _pid
        self.broken = False
        # The epoch of what this session reads, see Database. A connection to the server itself ends with its epoch,
        # unless the database is emptied under it.
        self.epoch: str | None = None
        # Does a pooler stand between, which may give it another server? Then each load asks for the epoch.
        self.pooled = False
        # Of the pool it belongs to; see SessionPool.retire.
        self.era = 0
        # Were the adapter's statements prepared in it? Then others may have to be sent instead of some.
        self.prepared = False
        self._instead: dict[str, str] = {}
        # A random number, for an adapter that leaves a row in the database for each session.
        self.key = secrets.randbits(62)
        self._kept: list[IO] = []
        self._connection = self._do(driver.connect, module, *arguments)
        self._cursor = self._connection.cursor
        self._fetch = driver.fetch

    def run(self, sql: str, parameters: Sequence = ()) -> int:
        """Run a statement that returns nothing; return how many rows it touched."""
        return self._do(_run, self._cursor, sql, parameters)

    def all(self, sql: str, parameters: Sequence = ()) -> list[Row]:
        """Return all rows. Whoever calls this has bounded them in the SQL."""
        return self._do(_all, self._cursor, self._fetch, self._instead.get(sql, sql), parameters)

    def one(self, sql: str, parameters: Sequence = ()) -> Row | None:
        """Return the only row, or None if there is none."""
        rows = self._do(_all, self._cursor, self._fetch, self._instead.get(sql, sql), parameters)
        if not rows:
            return None
        [row] = rows
        return row

    def series(self, statements: Iterable[tuple[str, Sequence]]) -> list[Row]:
        """Run one statement after the other; return all rows of the last. For a database that needs no messages."""
        return self._do(_series, self._cursor, self._fetch, statements)

    def many(self, sql: str, rows: Iterable[Sequence]) -> None:
        """Run one statement for each of `rows`."""
        self._do(_many, self._cursor, sql, rows)

    def script(self, sql: str, parameters: Sequence = ()) -> list[Row]:
        """Run several statements, sent as one message; return the rows of the last."""
        return self.results(sql, parameters)[-1]

    def results(self, sql: str, parameters: Sequence = ()) -> list[list[Row]]:
        """Run several statements, sent as one message; return the rows of each, as far as the driver keeps them.

        After the first that fails none is run, and its error is raised; what was done before it stays.
        """
        return self._do(self._driver.script, self._connection, sql, parameters)

    @property
    def in_transaction(self) -> bool:
        return self._do(self._driver.in_transaction, self._connection)

    @property
    def binds(self) -> bool:
        """Do parameters travel beside the statement, bytes as they are?"""
        return self._driver.binds

    def prepare(self, scripts: Iterable[str]) -> None:
        """Have the server keep the statements of these scripts, and their plans: they take less time from now on."""
        self._instead = self._do(self._driver.prepare, self._connection, scripts)
        self.prepared = True

    @property
    def backend_pid(self) -> int:
        """The process that serves this session, as it said when the session began: a pooler makes one up."""
        return self._driver.backend_pid(self._connection)

    def rollback(self) -> None:
        """End the transaction, if one is open, without effect."""
        if not self.broken and self.in_transaction:
            self.run('ROLLBACK')

    def retire(self) -> None:
        """Have the pool close it when it comes back."""
        self.era = -1

    def keep(self, thing: IO) -> None:
        """Close something else when this is closed."""
        self._kept.append(thing)

    def close(self) -> None:
        self.broken = True
        try:
            self._do(_close, self._connection)
        finally:
            for thing in self._kept:
                thing.close()

    def _do(self, act: Callable[..., Result], *arguments) -> Result:
        if self.pid != _pid:
            raise Disconnected('The connection belongs to the process that this one was forked from.')
        try:
            return act(*arguments)
        except self._errors as error:
            raise self._translate(error) from error
        except BaseException:
            self.broken = True      # interrupted: what is left of the answer would be taken for the next one's
            raise

    def _translate(self, error: Exception) -> Exception:
        kind = self._driver.classify(error)
        if kind is Disconnected:
            self.broken = True
        message = ' '.join(self._driver.message(error).split()) or type(error).__name__
        return kind(message) if kind is not Deadlock else Deadlock(message=message[:2000])


def _run(new_cursor: Callable, sql: str, parameters: Sequence) -> int:
    cursor = new_cursor()
    cursor.execute(sql, parameters)
    return cursor.rowcount


def _all(new_cursor: Callable, fetch: Callable, sql: str, parameters: Sequence) -> list[Row]:
    cursor = new_cursor()
    cursor.execute(sql, parameters)
    return fetch(cursor)


def _series(new_cursor: Callable, fetch: Callable, statements: Iterable[tuple[str, Sequence]]) -> list[Row]:
    cursor = new_cursor()
    try:
        for sql, parameters in statements:
            cursor.execute(sql, parameters)
        return fetch(cursor)
    finally:
        cursor.close()      # a statement that still has rows would keep SQLite's connection open after its close()


def _many(new_cursor: Callable, sql: str, rows: Iterable[Sequence]) -> None:
    new_cursor().executemany(sql, rows)


def _close(connection) -> None:
    connection.close()


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
            if session.pid == _pid:
                session.rollback()
        except StorageError:
            session.broken = True       # what cannot be rolled back ends with its connection
        except BaseException:
            session.broken = True       # interrupted half-way: the next user must not find a transaction
            raise
        finally:
            self._take_back(session)

    def _take_back(self, session: Session) -> None:
        if session.pid != _pid:
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
    def session(self):
        session = self.borrow()
        try:
            yield session
        finally:
            self.give_back(session)

    def attempt(self, work: Callable[..., Result], *arguments) -> Result:
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
