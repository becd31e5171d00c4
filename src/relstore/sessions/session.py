"""Session: one DB-API connection.

Sessions run in autocommit: there is a transaction only after an explicit BEGIN. Nothing relies on settings made by an
earlier statement, so any session can serve any caller, even behind pgbouncer in transaction mode.
"""
from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, TypeVar

from relstore.errors import Deadlock, Disconnected
from relstore.sessions import process
from relstore.sessions.driver import Driver
from relstore.sessions.pipeline import Row as Row
from relstore.sessions.statement import Statement, arranged

Result = TypeVar('Result')

# In no SQL file: a session knows no adapter.
ROLLBACK = 'ROLLBACK'

FORKED = 'The connection belongs to the process that this one was forked from.'


class Session:
    """The only way to a driver, whose errors are translated here."""

    def __init__(self, driver: Driver, *arguments: Any):
        module = driver.load()
        self._driver = driver
        self._errors = module.Error
        self.pid = process.pid
        self.broken = False
        # The epoch of what this session reads, see Database. A direct connection ends with its epoch, unless the
        # database is emptied meanwhile.
        self.epoch = ''
        # Is there a pooler in between, which may switch to another server? Then each load asks for the epoch.
        self.pooled = False
        # The era of its pool when it was made; see SessionPool.retire.
        self.era = 0
        # Have the adapter's statements been prepared in it? Then `_instead` may replace some.
        self.prepared = False
        self._instead: dict[str, str] = {}
        # A random number, for an adapter that leaves a row in the database for each session.
        self.key = secrets.randbits(62)
        self._kept: list[IO[Any] | Session] = []
        self._connection = self._do(driver.connect, module, *arguments)
        self._cursor = self._connection.cursor
        self._fetch = driver.fetch

    # The next five are written out, each with its own `try`: a function that they shared would be a call more for each
    # statement.

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement that returns nothing; return how many rows it touched."""
        if self.pid != process.pid:
            raise Disconnected(FORKED)
        try:
            cursor = self._cursor()
            if sql.__class__ is Statement and sql.order is not None:     # saves a call where there is nothing to do
                parameters = arranged(sql, parameters)
            cursor.execute(sql, parameters)
            return cursor.rowcount
        except BaseException as error:
            raise self._failure(error)      # noqa: B904 - which has a cause, if it is another

    def all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return all rows. The SQL must bound their number."""
        if self.pid != process.pid:
            raise Disconnected(FORKED)
        try:
            cursor, sql = self._cursor(), self._instead.get(sql, sql)
            if sql.__class__ is Statement and sql.order is not None:
                parameters = arranged(sql, parameters)
            cursor.execute(sql, parameters)
            return self._fetch(cursor)
        except BaseException as error:
            raise self._failure(error)      # noqa: B904

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the only row, or None if there is none."""
        if self.pid != process.pid:
            raise Disconnected(FORKED)
        try:
            cursor, sql = self._cursor(), self._instead.get(sql, sql)
            if sql.__class__ is Statement and sql.order is not None:
                parameters = arranged(sql, parameters)
            cursor.execute(sql, parameters)
            rows = self._fetch(cursor)
        except BaseException as error:
            raise self._failure(error)      # noqa: B904
        if not rows:
            return None
        [row] = rows
        return row

    def series(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> list[Row]:
        """Run statements one by one; return all rows of the last. For a database without a network in between."""
        if self.pid != process.pid:
            raise Disconnected(FORKED)
        try:
            cursor = self._cursor()
            try:
                for sql, parameters in statements:
                    if sql.__class__ is Statement and sql.order is not None:
                        parameters = arranged(sql, parameters)
                    cursor.execute(sql, parameters)
                return self._fetch(cursor)
            finally:
                cursor.close()      # a statement with rows left would keep SQLite's connection open after its close()
        except BaseException as error:
            raise self._failure(error)      # noqa: B904

    def fill(self, statements: Iterable[tuple[str, Iterable[Sequence[Any]]]]) -> None:
        """Run statements one by one, each for all of its rows. For a database without a network in between."""
        if self.pid != process.pid:
            raise Disconnected(FORKED)
        try:
            cursor = self._cursor()
            try:
                for sql, rows in statements:
                    if sql.__class__ is Statement and sql.order is not None:
                        rows = [arranged(sql, row) for row in rows]
                    cursor.executemany(sql, rows)
            finally:
                cursor.close()      # as in series: a kept exception would keep this frame alive
        except BaseException as error:
            raise self._failure(error)      # noqa: B904

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each of `rows`."""
        self.fill([(sql, rows)])

    def script(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run several statements, sent as one message; return the rows of the last."""
        return self.results(sql, parameters)[-1]

    def results(self, sql: str, parameters: Sequence[Any] = ()) -> list[list[Row]]:
        """Run several statements, sent as one message; return the rows of each, as far as the driver keeps them.

        After the first failure no other runs, and the error is raised; what was done before it stays.
        """
        return self._do(self._driver.script, self._connection, sql, arranged(sql, parameters))

    def copy_in(self, sql: str, chunks: Iterable[bytes]) -> None:
        """Run a COPY .. FROM STDIN with these data."""
        self._do(self._driver.copy_in, self._connection, sql, chunks)

    def read_part(self, sql: str, parameters: Sequence[Any], start: int, size: int) -> bytes | None:
        """Return a part of the one large object that a statement selects, the first byte being 1; None: no row."""
        return self._do(self._driver.read_part, self._connection, sql, arranged(sql, parameters), start, size)

    @property
    def in_transaction(self) -> bool:
        """As far as the driver knows: the server is not asked."""
        return self._do(self._driver.in_transaction, self._connection)

    @property
    def binds(self) -> bool:
        """Are parameters sent beside the statement, with bytes unchanged?"""
        return self._driver.binds

    def literal_size(self, value: bytes) -> int:
        """Return the length of bytes in the text of a statement, if they are sent in that."""
        return self._driver.literal_size(value)

    def prepare(self, scripts: Iterable[Statement]) -> None:
        """Have the server keep the statements of these scripts, and their plans: from now on they run faster."""
        self._instead = self._do(self._driver.prepare, self._connection, scripts)
        self.prepared = True

    @property
    def backend_pid(self) -> int:
        """The id of the server process, as reported when the session began; a pooler makes one up."""
        return self._driver.backend_pid(self._connection)

    def rollback(self) -> None:
        """Roll back the transaction, if one is open."""
        if not self.broken and self._do(self._driver.in_transaction, self._connection):
            self.run(ROLLBACK)

    def retire(self) -> None:
        """Have the pool close this session when it is given back."""
        self.era = -1

    def keep(self, thing: IO[Any] | Session) -> None:
        """Close `thing` when this session is closed."""
        self._kept.append(thing)

    def close(self) -> None:
        self.broken = True
        try:
            self._do(_close, self._connection)
        finally:
            for thing in self._kept:
                thing.close()

    def _do(self, act: Callable[..., Result], *arguments: Any) -> Result:
        if self.pid != process.pid:
            raise Disconnected(FORKED)
        try:
            return act(*arguments)
        except BaseException as error:
            raise self._failure(error)      # noqa: B904

    def _failure(self, error: BaseException) -> BaseException:
        """Return what to raise in the place of an error of the driver's; any other as it is."""
        if not isinstance(error, self._errors):
            self.broken = True      # interrupted: the rest of this answer would be taken for the next one
            return error
        translated = self._translate(error)
        translated.__cause__ = error
        return translated

    def _translate(self, error: Exception) -> Exception:
        kind = self._driver.classify(error)
        if kind is Disconnected:
            self.broken = True
        message = ' '.join(self._driver.message(error).split()) or type(error).__name__
        return kind(message) if kind is not Deadlock else Deadlock(message=message[:2000])


def _close(connection: Any) -> None:
    connection.close()
