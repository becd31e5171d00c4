"""Session: one DB-API connection.

Sessions run in autocommit: a transaction is there only where the SQL says BEGIN. Nothing relies on what an earlier
statement has set, so any session can serve any caller, also behind pgbouncer in transaction mode.
"""
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, TypeVar

from relstore.errors import Deadlock, Disconnected
from relstore.sessions import process
from relstore.sessions.drivers import Driver
from relstore.sessions.pipeline import Row as Row

Result = TypeVar('Result')


class Session:
    """The only gateway to a driver: whatever it raises is translated here."""

    def __init__(self, driver: Driver, *arguments: Any):
        module = driver.load()
        self._driver = driver
        self._errors = module.Error
        self.pid = process.pid
        self.broken = False
        # The epoch of what this session reads, see Database. A connection to the server itself ends with its epoch,
        # unless the database is emptied under it.
        self.epoch = ''
        # Does a pooler stand between, which may give it another server? Then each load asks for the epoch.
        self.pooled = False
        # Of the pool it belongs to; see SessionPool.retire.
        self.era = 0
        # Were the adapter's statements prepared in it? Then others may have to be sent instead of some.
        self.prepared = False
        self._instead: dict[str, str] = {}
        # A random number, for an adapter that leaves a row in the database for each session.
        self.key = secrets.randbits(62)
        self._kept: list[IO[Any]] = []
        self._connection = self._do(driver.connect, module, *arguments)
        self._cursor = self._connection.cursor
        self._fetch = driver.fetch

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement that returns nothing; return how many rows it touched."""
        return self._do(_run, self._cursor, sql, parameters)

    def all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return all rows. Whoever calls this has bounded them in the SQL."""
        return self._do(_all, self._cursor, self._fetch, self._instead.get(sql, sql), parameters)

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the only row, or None if there is none."""
        rows = self._do(_all, self._cursor, self._fetch, self._instead.get(sql, sql), parameters)
        if not rows:
            return None
        [row] = rows
        return row

    def series(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> list[Row]:
        """Run one statement after the other; return all rows of the last. For a database that needs no messages."""
        return self._do(_series, self._cursor, self._fetch, statements)

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each of `rows`."""
        self._do(_many, self._cursor, sql, rows)

    def script(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run several statements, sent as one message; return the rows of the last."""
        return self.results(sql, parameters)[-1]

    def results(self, sql: str, parameters: Sequence[Any] = ()) -> list[list[Row]]:
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

    def keep(self, thing: IO[Any]) -> None:
        """Close something else when this is closed."""
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


def _run(new_cursor: Callable[[], Any], sql: str, parameters: Sequence[Any]) -> int:
    cursor = new_cursor()
    cursor.execute(sql, parameters)
    return cursor.rowcount


def _all(new_cursor: Callable[[], Any], fetch: Callable[[Any], list[Row]], sql: str, parameters: Sequence[Any]
         ) -> list[Row]:
    cursor = new_cursor()
    cursor.execute(sql, parameters)
    return fetch(cursor)


def _series(new_cursor: Callable[[], Any], fetch: Callable[[Any], list[Row]],
            statements: Iterable[tuple[str, Sequence[Any]]]) -> list[Row]:
    cursor = new_cursor()
    try:
        for sql, parameters in statements:
            cursor.execute(sql, parameters)
        return fetch(cursor)
    finally:
        cursor.close()      # a statement that still has rows would keep SQLite's connection open after its close()


def _many(new_cursor: Callable[[], Any], sql: str, rows: Iterable[Sequence[Any]]) -> None:
    new_cursor().executemany(sql, rows)


def _close(connection: Any) -> None:
    connection.close()
