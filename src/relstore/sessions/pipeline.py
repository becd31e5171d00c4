"""psycopg 3 without its cursors: PostgreSQL's extended protocol, through libpq.

Parameters are sent beside the statement, with bytes unchanged, and several statements with parameters form one message.
psycopg's own cursors send such a message only as text, in which bytes are twice as long, or through a pipeline that
costs more time than it saves. And a load takes 47 us through them, 14 us here: they do much that a Session never needs.
"""
import select
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from relstore.sessions.statement import split

TEXT, BINARY = 0, 1
READABLE, EITHER = select.POLLIN, select.POLLIN | select.POLLOUT

Row = tuple[Any, ...]
Sending = tuple[Any, ...]       # the function that sends a statement, and its arguments


class Connection:
    """As much of a DB-API connection as a Session needs, in autocommit."""

    def __init__(self, psycopg: ModuleType, dsn: str, **defaults: Any):
        self._real = psycopg.connect(dsn, autocommit=True, prepare_threshold=None, **defaults)
        self._pq = self._real.pgconn
        self._encoding = self._real.info.encoding
        self._rows = psycopg.adapt.Transformer(self._real)
        self._errors, self._status = psycopg.errors, psycopg.pq.ExecStatus
        self._names: dict[bytes, bytes] = {}        # of prepared statements, by text
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(self._pq.socket, READABLE)
        self._either.register(self._pq.socket, EITHER)

    @property
    def info(self) -> Any:
        return self._real.info

    @property
    def in_transaction(self) -> bool:
        return self._pq.transaction_status != 0

    def cursor(self) -> 'Cursor':
        return Cursor(self)

    def close(self) -> None:
        self._real.close()

    def prepare(self, scripts: Iterable[str]) -> None:
        """Prepare each statement, in one message: from now on it is sent by name."""
        texts = [text for script in scripts for text, _ in _statements(script, self._encoding)]
        names = {text: b'relstore_%d' % n for n, text in enumerate(dict.fromkeys(texts))}
        self._pipeline([(self._pq.send_prepare, name, text) for text, name in names.items()])
        self._names = names

    def script(self, sql: str, parameters: Sequence[Any]) -> list[list[Row]]:
        """Send several statements as one message; return the rows of each."""
        statements = _statements(sql, self._encoding)
        if len(statements) == 1:
            return [self.rows(self.execute(sql, parameters))]
        rest = iter(self._encoded(parameters))
        sends = [self._sending(text, [next(rest) for _ in range(count)]) for text, count in statements]
        return [self.rows(result) for result in self._pipeline(sends)]

    def execute(self, sql: str, parameters: Sequence[Any]) -> Any:
        """Send one statement; return libpq's result."""
        send, *arguments = self._sending(_numbered(sql, self._encoding)[0], self._encoded(parameters))
        send(*arguments)
        self._flush()
        return self._succeeded(self._receive())

    def copy_in(self, sql: str, chunks: Iterable[bytes]) -> None:
        """Run a COPY .. FROM STDIN with these data."""
        with self._real.cursor() as cursor, cursor.copy(sql) as copy:
            for chunk in chunks:
                copy.write(chunk)

    def rows(self, result: Any) -> list[Row]:
        self._rows.set_pgresult(result)
        rows = self._rows.load_rows(0, result.ntuples, tuple)
        self._rows.set_pgresult(None)       # it may be large
        return rows

    def _pipeline(self, sends: Sequence[Sending]) -> list[Any]:
        """Send statements as one message; return the results. After one fails none runs, and its error is raised."""
        results = []
        self._pq.enter_pipeline_mode()
        for send, *arguments in sends:
            send(*arguments)
        self._pq.pipeline_sync()
        self._flush()
        try:
            for _ in sends:
                results.append(self._receive())
            self._wait()
            end = self._pq.get_result()
            if end is not None and end.status == self._status.FATAL_ERROR:
                results.append(end)         # the implicit commit failed, which comes last without a BEGIN
                self._receive()
                self._wait()
                self._pq.get_result()
            self._pq.exit_pipeline_mode()
        except self._errors.OperationalError:
            # If the server said why before it closed the connection, raise that.
            for result in results:
                self._succeeded(result)
            raise
        return [self._succeeded(result) for result in results]

    def _sending(self, text: bytes, parameters: Sequence[tuple[bytes | None, int]]) -> Sending:
        """Return the function that sends a statement, and its arguments."""
        values, formats = [value for value, _ in parameters], [form for _, form in parameters]
        name = self._names.get(text)
        if name is None:
            return self._pq.send_query_params, text, values, None, formats, BINARY
        return self._pq.send_query_prepared, name, values, formats, BINARY

    def _encoded(self, parameters: Sequence[Any]) -> list[tuple[bytes | None, int]]:
        return [(value, BINARY) if isinstance(value, bytes) else (self._text(value), TEXT) for value in parameters]

    def _text(self, value: object) -> bytes | None:
        """Return a value as text, which the server reads as the type that the statement needs."""
        if value is None:
            return None
        if isinstance(value, int):
            return b'%d' % value
        if not isinstance(value, str):
            raise TypeError(f'a parameter is a {type(value).__name__}')
        if '\0' in value:       # the client library would cut it off there
            raise self._errors.DataError('PostgreSQL has no text with a NUL in it')
        return value.encode(self._encoding)

    def _flush(self) -> None:
        while self._pq.flush():
            [[_, event]] = self._either.poll()
            if event != select.POLLOUT:
                self._pq.consume_input()

    def _wait(self) -> None:
        # The client library's own waiting would keep all other threads from running.
        while self._pq.is_busy():
            self._readable.poll()
            self._pq.consume_input()

    def _receive(self) -> Any:
        """Return the result of one statement; of several results the first error, or else the first.

        Rows do not mean success: without a BEGIN, the commit comes after them, and may fail.
        """
        found = None
        while True:
            try:
                self._wait()
            except self._errors.OperationalError:
                if found is None or found.status != self._status.FATAL_ERROR:
                    raise
                return found
            result = self._pq.get_result()
            if result is None:
                return found
            if found is None or result.status == self._status.FATAL_ERROR != found.status:
                found = result

    def _succeeded(self, result: Any) -> Any:
        """Return a result, or raise its error."""
        if result is None:
            raise self._errors.OperationalError('the connection was lost')
        if result.status in (self._status.TUPLES_OK, self._status.COMMAND_OK):
            return result
        raise self._errors.error_from_result(result, encoding=self._encoding)


class Cursor:
    """The answer to one statement."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._result = self._connection.execute(sql, parameters)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        for row in rows:
            self.execute(sql, row)

    @property
    def rowcount(self) -> int:
        return self._result.command_tuples or 0

    def fetchall(self) -> list[Row]:
        return self._connection.rows(self._result)

    def close(self) -> None:
        """Nothing to do: a result is complete when execute() returns."""


@lru_cache(maxsize=500)
def _statements(script: str, encoding: str) -> list[tuple[bytes, int]]:
    """Return each statement with numbered parameters, and how many it has."""
    return [_numbered(sql, encoding) for sql in split(script)]


@lru_cache(maxsize=500)
def _numbered(sql: str, encoding: str) -> tuple[bytes, int]:
    first, *rest = sql.split('%s')
    text = first + ''.join(f'${n}{piece}' for n, piece in enumerate(rest, 1))
    return text.replace('%%', '%').encode(encoding), len(rest)
