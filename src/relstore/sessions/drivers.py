"""The DB-API modules: one record each, imported only when used.

`classify` maps a driver's exception to the class of `relstore.errors` that says what to do about it. It goes by
SQLSTATE, because drivers disagree about exception classes: pgbouncer, for one, reports a lost server as 08P01, which
psycopg calls a ProtocolViolation and psycopg2 an OperationalError. For MySQL and MariaDB it goes by the error number,
which says more there. SQLite's errors are told apart by their text: Python 3.10 gives no code.
"""
import importlib
import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import methodcaller
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
from relstore.sessions.pipeline import Connection, Row

# The setting that PostgreSQL names when too many locks have used up its shared memory.
LOCKS = 'max_locks_per_transaction'
# The version of libpq that introduced pipelines.
PIPELINES = 140000
# These replace libpq's own messages about a dsn.
UNREADABLE = ("it cannot be read; it is key='value' for each key that libpq knows, with a backslash before a quote, "
              'or postgresql://user:password@host/dbname, with %40 for @ and so on')
AMBIGUOUS = ('the server cannot be found; what is neither a letter nor a digit in the user or password of an URI is '
             'written as %40 for @, %2F for / and so on')

# How a connection to MySQL or MariaDB is encrypted, and who may answer. Checking the certificate without the name in it
# is not offered: MariaDB's client library cannot do that.
TLS_MODES = 'disabled', 'preferred', 'required', 'verify_identity'
TLS_DEMANDED = TLS_MODES[2:]
# The first version of PyMySQL that does not go on without TLS when it is demanded.
TLS_IS_NOT_LEFT_OUT = (1, 2)

Result = TypeVar('Result')


def _no_pid(connection: Any) -> int:
    raise NotImplementedError('This driver is told of no process')


def _no_plans(connection: Any, scripts: Iterable[str]) -> dict[str, str]:
    raise NotImplementedError('This driver prepares no statements')


@dataclass(frozen=True)
class Driver:
    name: str                               # as in the option `driver`
    module: str                             # what to import
    package: str                            # what to install, for the message when it is missing
    placeholder: str                        # how its SQL marks a parameter
    connect: Callable[..., Any]             # (module, *arguments) -> connection, in autocommit
    classify: Callable[[Exception], type[Exception]]
    message: Callable[[Exception], str]     # the error's text, without the statement
    in_transaction: Callable[[Any], bool]   # (connection), without asking the server
    # (connection, several statements, their parameters) -> the rows of each, or only of the last if it keeps no others
    script: Callable[[Any, str, Sequence[Any]], list[list[Row]]]
    fetch: Callable[[Any], list[Row]] = methodcaller('fetchall')     # (cursor) -> all rows
    # (connection) -> the process id reported at connect: the server's, or one made up by a pooler in between
    backend_pid: Callable[[Any], int] = _no_pid
    # Are parameters sent beside the statement, with bytes unchanged? Otherwise they are part of its text.
    binds: bool = False
    # (connection, scripts): have the server keep their statements -> what to send instead of each, where different
    prepare: Callable[[Any, Iterable[str]], dict[str, str]] = _no_plans
    # (module): would one choose it, as it is installed?
    fit: Callable[[ModuleType], bool] = lambda module: True
    # (bytes) -> their length in the text of a statement, if they are sent in that
    literal_size: Callable[[bytes], int] = len

    def is_fit(self) -> bool:
        """Is it installed, and would one choose it?"""
        try:
            return self.fit(importlib.import_module(self.module))
        except ImportError:
            return False

    def load(self) -> ModuleType:
        """Import the driver. ConfigurationError says what to install."""
        try:
            return importlib.import_module(self.module)
        except ImportError as e:
            raise ConfigurationError(
                f'The database driver {self.name} cannot be imported ({e}); install {self.package}.') from e


def _classify_postgresql(error: Any) -> type[Exception]:
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


def _message_postgresql(error: Exception) -> str:
    diagnosis = getattr(error, 'diag', None)
    if diagnosis is not None and diagnosis.message_primary:
        # Insufficient resources (53...): the hint names the setting.
        hint = diagnosis.message_hint if (diagnosis.sqlstate or '').startswith('53') else None
        return '; '.join(filter(None, (diagnosis.message_primary, diagnosis.message_detail, hint)))
    # The client library's own message, whose hints are indented.
    return ' '.join(line for line in str(error).splitlines() if not line.startswith('\t'))


def _is_connection_loss(error: Exception) -> bool:
    return type(error).__name__ in ('OperationalError', 'InterfaceError', 'DatabaseError', 'ConnectionTimeout')


def _classify_sqlite(error: Exception) -> type[Exception]:
    message = str(error)
    if 'locked' in message or 'busy' in message:
        return LockTimeout
    if 'closed database' in message:
        return Disconnected
    if any(hint in message for hint in ('not a database', 'malformed', 'unable to open', 'readonly', 'read-only')):
        return ConfigurationError
    return DatabaseError


# What to do about the error numbers of servers and clients.
_MYSQL_CODES: dict[type[Exception], tuple[int, ...]] = {
    # 1180, 3101: refused at COMMIT, by a cluster's certification; 1020: changed since it was read
    Deadlock: (1020, 1180, 1213, 1614, 3101),
    LockTimeout: (1205, 3572),
    # interrupted, or over a time limit; too many connections
    Unavailable: (1317, 1969, 3024, 1040, 1203, 1226),
    # shut down or killed; idle for too long; connection lost; unreachable
    Disconnected: (1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 3169, 4031,
                   2000, 2002, 2003, 2005, 2006, 2012, 2013, 2014, 2026, 2027, 2055,
                   # read-only, or not in the cluster: another server may serve by now
                   1047, 1290, 1836),
    NotAllowed: (1044, 1142, 1143, 1227, 1370),
    Missing: (1146, 1305),
    ConfigurationError: (1045, 1049, 1129, 1130, 1251, 1524, 1698, 1820, 1862, 3118, 3159, 3161,
                         2019, 2054, 2058, 2059, 2061),
}
_MYSQL_KINDS = {code: kind for kind, codes in _MYSQL_CODES.items() for code in codes}


def _classify_mysql(error: Exception) -> type[Exception]:
    code = error.args[0] if error.args else None
    if isinstance(code, int) and code:
        return _MYSQL_KINDS.get(code, DatabaseError)
    # Without a number: the connection is closed, or out of step with its server.
    return Disconnected if type(error).__name__ in ('Error', 'InterfaceError', 'InternalError') else DatabaseError


def _message_mysql(error: Exception) -> str:
    return str(error.args[-1]) if error.args else ''


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
    if psycopg.pq.version() < PIPELINES:
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


def _connect_sqlite(sqlite3: ModuleType, path: str, timeout: float) -> Any:
    # A session is used by one thread at a time, but not always by the same one.
    return sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False, uri=True)


# MariaDB and MySQL return decimals for unsigned numbers, as RelStorage's tids are, mixed with others. All are integral.
WHOLE_NUMBERS = {246: int}      # FIELD_TYPE.NEWDECIMAL


@cache
def _mysqlclient_connection(connections: ModuleType) -> type:
    class Connection(connections.Connection):    # type: ignore[name-defined]  # it is imported late
        """A connection that infers from what is sent whether a transaction is open: mysqlclient does not show it.

        It errs on the safe side: it assumes an open transaction after an error that may have ended it, and for a state
        that contains START TRANSACTION. Then a ROLLBACK is sent needlessly.
        """
        in_transaction = False
        server_thread: int | None = None
        _commits = False

        def query(self, query: bytes) -> None:
            self._commits = query.endswith((b'COMMIT', b'COMMIT;\nEND'))
            self.in_transaction |= b'START TRANSACTION' in query
            super().query(query)
            if self.server_thread not in (None, self.thread_id()):
                # `reconnect` in an option file: this is a new session, without our settings and transaction.
                raise self.OperationalError(2006, 'The connection was lost, and the client library made a new one')
            if query in (b'COMMIT', b'ROLLBACK'):
                self.in_transaction = False

        def next_result(self) -> int:
            status = super().next_result()
            if status == -1:        # there are no more
                # libmariadb 3.3 also says so if the connection was lost between two results.
                if self.errno():
                    raise self.OperationalError(self.errno(), self.error())
                if self._commits:
                    self.in_transaction = False
            return status

    return Connection


def _connect_mysqlclient(MySQLdb: ModuleType, settings: Mapping[str, Any]) -> Any:
    settings, mode, files = _tls(settings)
    if settings.get('host') == 'localhost' and 'port' in settings and 'unix_socket' not in settings:
        # For 'localhost' the client library would use a socket and ignore the port. A certificate matches either case.
        settings |= {'host': 'LOCALHOST'}
    tls = {'ssl_mode': mode.upper()} if mode else {}
    conversions = importlib.import_module('MySQLdb.converters').conversions | WHOLE_NUMBERS
    connection = _mysqlclient_connection(importlib.import_module('MySQLdb.connections'))(
        autocommit=True, binary_prefix=True, conv=conversions, **settings, **tls, **({'ssl': files} if files else {}))
    connection.server_thread = connection.thread_id()
    if mode == 'required' and not _is_encrypted(connection):
        connection.close()
        raise MySQLdb.OperationalError(2026, 'TLS is required (ssl_mode), and the server offers none')
    return connection


def _is_encrypted(connection: Any) -> bool:
    """Ask the server: libmariadb 3.3 goes on without TLS if it is not offered, unless it checks the certificate."""
    cursor = connection.cursor()
    cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
    [(_, cipher)] = cursor.fetchall()
    return bool(cipher)


def _connect_pymysql(pymysql: ModuleType, settings: Mapping[str, Any]) -> Any:
    flag = importlib.import_module('pymysql.constants.CLIENT').MULTI_STATEMENTS
    settings, mode, files = _tls(settings)
    # libmysqlclient does without TLS on a unix socket, unless told otherwise; PyMySQL would take 25 ms before each
    # connection to read the machine's certificates.
    told = any(name.startswith('read_default_') for name in settings)
    try:
        tls: dict[str, Any]
        if mode in TLS_DEMANDED:
            if pymysql.VERSION < TLS_IS_NOT_LEFT_OUT:
                raise ConfigurationError(f'PyMySQL {pymysql.__version__} goes on without TLS where the server offers '
                                         'none; install PyMySQL 1.2 or newer.')
            tls = {'ssl': _tls_context(mode, files)}
        else:
            tls = {'ssl_disabled': mode == 'disabled' or 'unix_socket' in settings and not told}
        conversions = importlib.import_module('pymysql.converters').conversions | WHOLE_NUMBERS
        return pymysql.connect(autocommit=True, binary_prefix=True, client_flag=flag, conv=conversions, **settings,
                               **tls)
    except (AttributeError, KeyError) as e:
        raise ConfigurationError(f"PyMySQL does not know the charset {settings['charset']}") from e
    except (RuntimeError, ValueError, NotImplementedError, OSError) as e:
        # A package for an authentication method is missing, or a file is missing or invalid.
        raise ConfigurationError(f'PyMySQL cannot connect: {e}') from e


def _tls(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Return the settings that do not concern TLS, one of TLS_MODES or '', and the files: ca, cert, key.

    Naming a CA means verify_identity.
    """
    others = {name: value for name, value in settings.items() if not name.startswith('ssl_')}
    files = {name: settings[f'ssl_{name}'] for name in ('ca', 'cert', 'key') if f'ssl_{name}' in settings}
    mode = settings.get('ssl_mode') or ('verify_identity' if 'ca' in files else 'required' if files else '')
    return others, mode, files


def _tls_context(mode: str, files: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.get('ca'))
    if mode != 'verify_identity':
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # MySQL generates CAs that Python 3.13's strict check rejects on formal grounds.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if 'cert' in files:
        context.load_cert_chain(files['cert'], files.get('key'))
    return context


def _script_mysql(connection: Any, sql: str, parameters: Sequence[Any]) -> list[list[Row]]:
    cursor = connection.cursor()
    cursor.execute(sql, parameters)
    results = [cursor.fetchall()]
    while cursor.nextset():             # raises the error of a later statement
        results.append(cursor.fetchall())
    return results


def _literal_size_mysqlclient(value: bytes) -> int:
    return len(value) + sum(map(value.count, (b'\0', b'\n', b'\r', b'\x1a', b'"', b"'", b'\\'))) + len("_binary''")


def _literal_size_pymysql(value: bytes) -> int:
    return 2 * len(value) + len("X''")      # hexadecimal


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


def _prepare_psycopg2(connection: Any, scripts: Iterable[str]) -> dict[str, str]:
    prepare, execute = [], {}
    for number, sql in enumerate(scripts):
        first, *rest = sql.split('%s')
        text = first + ''.join(f'${n}{piece}' for n, piece in enumerate(rest, 1))
        prepare.append(f'PREPARE relstore_{number} AS {text}')
        execute[sql] = f'EXECUTE relstore_{number} ({", ".join(["%s"] * len(rest))})'
    connection.cursor().execute(';\n'.join(prepare), ())
    return execute


def _prepare_psycopg(connection: Connection, scripts: Iterable[str]) -> dict[str, str]:
    connection.prepare(scripts)
    return {}


def _script_sqlite(connection: Any, sql: str, parameters: Sequence[Any]) -> list[list[Row]]:
    raise NotImplementedError('SQLite is in this process: there is no message to save')


DRIVERS = {driver.name: driver for driver in (
    Driver('sqlite3', 'sqlite3', 'a Python with the module sqlite3', '?',
           connect=_connect_sqlite, classify=_classify_sqlite, message=str,
           in_transaction=lambda connection: connection.in_transaction,
           script=_script_sqlite),
    Driver('psycopg2', 'psycopg2', 'relstore[postgresql]', '%s',
           connect=_connect_psycopg2, classify=_classify_postgresql, message=_message_postgresql,
           in_transaction=lambda connection: connection.info.transaction_status != 0,
           script=_script_psycopg2, fetch=_fetch_psycopg2,
           backend_pid=_libpq_pid, prepare=_prepare_psycopg2),
    Driver('psycopg', 'psycopg', 'relstore[psycopg]', '%s',
           connect=_connect_psycopg, classify=_classify_postgresql, message=_message_postgresql,
           in_transaction=lambda connection: connection.in_transaction,
           script=lambda connection, sql, parameters: connection.script(sql, parameters),
           backend_pid=_libpq_pid, binds=True, prepare=_prepare_psycopg,
           # Without its C part a load takes longer than with psycopg2.
           fit=lambda psycopg: psycopg.pq.__impl__ != 'python' and psycopg.pq.version() >= PIPELINES),
    Driver('mysqlclient', 'MySQLdb', 'relstore[mysql]', '%s',
           connect=_connect_mysqlclient, classify=_classify_mysql, message=_message_mysql,
           in_transaction=lambda connection: connection.in_transaction,
           script=_script_mysql, fetch=lambda cursor: list(cursor.fetchall()),
           literal_size=_literal_size_mysqlclient),
    Driver('pymysql', 'pymysql', 'relstore[pymysql]', '%s',
           connect=_connect_pymysql, classify=_classify_mysql, message=_message_mysql,
           in_transaction=lambda connection: connection.server_status & 1 != 0,     # SERVER_STATUS_IN_TRANS
           script=_script_mysql, fetch=lambda cursor: list(cursor.fetchall()),
           literal_size=_literal_size_pymysql),
)}


def find_driver(name: str, *choices: str) -> Driver:
    """Return the driver called `name`, one of `choices`; for 'auto' the first of them that is fit, or else the first.

    ConfigurationError names the choices.
    """
    if name == 'auto':
        return DRIVERS[next((choice for choice in choices if DRIVERS[choice].is_fit()), choices[0])]
    if name not in choices:
        raise ConfigurationError(f'There is no driver {name!r} here; choose one of: {", ".join(choices)}.')
    return DRIVERS[name]
