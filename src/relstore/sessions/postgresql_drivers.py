"""psycopg and psycopg2.

Errors are told apart by SQLSTATE, because the two disagree about exception classes: if pgbouncer loses its server, it
reports 08P01, which psycopg calls a ProtocolViolation and psycopg2 an OperationalError.
"""
import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    Missing,
    NotAllowed,
    OutOfLocks,
    Unavailable,
)
from relstore.sessions.driver import Driver
from relstore.sessions.pipeline import Connection, Row
from relstore.sessions.statement import PARAMETER, Statement

# The setting that PostgreSQL names when too many locks have used up its shared memory.
LOCKS = 'max_locks_per_transaction'
# The version of libpq that introduced pipelines.
PIPELINES_VERSION = 140000
# What psycopg2 asks for at a time when it sends what a COPY takes.
READ_BYTES = 1 << 16
# These replace libpq's own messages about a dsn.
UNREADABLE = ("it cannot be read; it is key='value' for each key that libpq knows, with a backslash before a quote, "
              'or postgresql://user:password@host/dbname, with %40 for @ and so on')
AMBIGUOUS = ('the server cannot be found; what is neither a letter nor a digit in the user or password of an URI is '
             'written as %40 for @, %2F for / and so on')

Result = TypeVar('Result')


def _classify(error: Any) -> type[Exception]:
    state = _sqlstate(error)
    if state is None:       # the client library noticed it, not the server
        return Disconnected if _is_connection_loss(error) else DatabaseError
    if state == '40P01':
        return Deadlock
    if state == '55P03':                                 # lock_not_available
        return LockTimeout
    # 0A000, 25006: a standby has no epoch and is read-only; another server serves, or this one once it is promoted.
    if state[:2] == '08' or state in ('57P01', '57P02', '57P03', '57P05', '25P03', '25P04', '0A000', '25006'):
        return Disconnected
    # Serialization failure; too many connections; cancelled, by a user or by the role's statement_timeout.
    if state in ('40001', '53300', '57014'):
        return Unavailable
    if state == '53200' and LOCKS in (error.diag.message_hint or ''):
        return OutOfLocks
    if state == '42501':                                # insufficient_privilege
        return NotAllowed
    if state in ('3F000', '42P01', '42883'):            # a schema, a table, a function
        return Missing
    if state in ('28000', '28P01', '3D000', '53200'):
        return ConfigurationError
    return DatabaseError


def _sqlstate(error: Exception) -> str | None:
    return getattr(error, 'sqlstate', None) or getattr(error, 'pgcode', None)


def _message(error: Exception) -> str:
    diagnosis = getattr(error, 'diag', None)
    if diagnosis is not None and diagnosis.message_primary:
        # Insufficient resources (53...): the hint names the setting.
        hint = diagnosis.message_hint if (diagnosis.sqlstate or '').startswith('53') else None
        return '; '.join(filter(None, (diagnosis.message_primary, diagnosis.message_detail, hint)))
    # The client library's own message, whose hints are indented.
    return ' '.join(line for line in str(error).splitlines() if not line.startswith('\t'))


def _is_connection_loss(error: Exception) -> bool:
    return type(error).__name__ in ('OperationalError', 'InterfaceError', 'DatabaseError', 'ConnectionTimeout')


def _libpq_defaults(dsn: str) -> dict[str, Any]:
    """Return settings for libpq besides the dsn: the encoding, because psycopg makes no text of SQL_ASCII; and a
    connect_timeout, unless the dsn has one, so that a dead host does not cost minutes.
    """
    return {'fallback_application_name': 'relstore', 'client_encoding': 'UTF8'} | (
        {} if 'connect_timeout' in dsn else {'connect_timeout': 10})


def _connect_psycopg2(psycopg2: ModuleType, dsn: str) -> Any:
    connection = _discreetly(psycopg2, dsn, lambda: psycopg2.connect(dsn, **_libpq_defaults(dsn)))
    connection.autocommit = True
    return connection


def _connect_psycopg(psycopg: ModuleType, dsn: str) -> Connection:
    if psycopg.pq.version() < PIPELINES_VERSION:
        raise ConfigurationError(f'psycopg has found version {psycopg.pq.version() // 10000} of libpq, which knows no '
                                 'pipelines: install libpq 14 or newer, or relstore[psycopg], which brings its own.')
    return _discreetly(psycopg, dsn, lambda: Connection(psycopg, dsn, **_libpq_defaults(dsn)))


def _discreetly(module: ModuleType, dsn: str, connect: Callable[[], Result]) -> Result:
    """Return connect(). Hide libpq's message about a dsn that it cannot parse, or misreads: it may quote a password."""
    try:
        return connect()
    except module.ProgrammingError:         # it cannot parse the dsn
        kind, message = module.ProgrammingError, UNREADABLE
    except module.OperationalError as e:
        if not _is_ambiguous(dsn) or _sqlstate(e) is not None:
            raise
        kind, message = module.OperationalError, AMBIGUOUS
    raise kind(message)         # not from the caught error, which would appear in the traceback


def _is_ambiguous(dsn: str) -> bool:
    """Whether part of a URI's password may be taken for its host, port or database."""
    scheme, separator, rest = dsn.partition('://')
    credentials = re.split('[@/?#]', rest, maxsplit=1)[0]
    return bool(separator) and '@' in rest[len(credentials) + 1:]


def _libpq_pid(connection: Any) -> int:
    return connection.info.backend_pid


def _script_psycopg2(connection: Any, sql: str, parameters: Sequence[Any]) -> list[list[Row]]:
    cursor = connection.cursor()
    cursor.execute(sql, parameters)         # keeps the last result only
    return [_fetch_psycopg2(cursor) if cursor.description else []]


def _fetch_psycopg2(cursor: Any) -> list[Row]:
    # psycopg2 returns a memoryview for bytea. A type caster in Python would get the text, and take three times as long.
    return [tuple([bytes(value) if type(value) is memoryview else value for value in row])
            for row in cursor.fetchall()]


def _prepare_psycopg2(connection: Any, statements: Iterable[Statement]) -> dict[str, str]:
    prepare, execute = [], dict[str, str]()
    for number, sql in enumerate(statements):
        first, *rest = sql.split('%s')
        text = first + ''.join(f'${n}{piece}' for n, piece in enumerate(rest, 1))
        prepare.append(f'PREPARE relstore_{number} AS {text}')
        values = ', '.join(f'${name}' for name in PARAMETER.findall(sql.named))
        execute[sql] = Statement(f'EXECUTE relstore_{number} ({values})', sql.parameters, sql.placeholder)
    connection.cursor().execute(';\n'.join(prepare), ())
    return execute


def _copy_in_psycopg2(connection: Any, sql: str, chunks: Iterable[bytes]) -> None:
    connection.cursor().copy_expert(sql, _Chunks(chunks), size=READ_BYTES)


class _Chunks:
    """Chunks of data as a file."""

    def __init__(self, chunks: Iterable[bytes]):
        self._chunks, self._rest = iter(chunks), memoryview(b'')

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b''))
        piece, self._rest = self._rest[:size], self._rest[size:]
        return bytes(piece)


def _prepare_psycopg(connection: Connection, scripts: Iterable[Statement]) -> dict[str, str]:
    connection.prepare(scripts)
    return {}


DRIVERS = (
    Driver('psycopg2', 'psycopg2', 'relstore[postgresql]', '%s',
           connect=_connect_psycopg2, classify=_classify, message=_message,
           in_transaction=lambda connection: connection.info.transaction_status != 0,
           script=_script_psycopg2, fetch=_fetch_psycopg2, copy_in=_copy_in_psycopg2,
           backend_pid=_libpq_pid, prepare=_prepare_psycopg2),
    Driver('psycopg', 'psycopg', 'relstore[psycopg]', '%s',
           connect=_connect_psycopg, classify=_classify, message=_message,
           in_transaction=attrgetter('in_transaction'),
           script=lambda connection, sql, parameters: connection.script(sql, parameters),
           backend_pid=_libpq_pid, binds=True, prepare=_prepare_psycopg,
           copy_in=lambda connection, sql, chunks: connection.copy_in(sql, chunks),
           # Without its C part a load takes longer than with psycopg2.
           fit=lambda psycopg: psycopg.pq.__impl__ != 'python' and psycopg.pq.version() >= PIPELINES_VERSION),
)
