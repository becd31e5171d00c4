"""mysqlclient and PyMySQL. Errors are told apart by their number, which says more than SQLSTATE here."""
import importlib
import ssl
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import ModuleType
from typing import Any

from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    Missing,
    NotAllowed,
    Unavailable,
)
from relstore.sessions.driver import Driver
from relstore.sessions.pipeline import Row

# How a connection to MySQL or MariaDB is encrypted, and who may answer. Checking the certificate without the name in it
# is not offered: MariaDB's client library cannot do that.
TLS_MODES = 'disabled', 'preferred', 'required', 'verify_identity'
TLS_DEMANDED = TLS_MODES[2:]
# In no SQL file: it is sent before there is an adapter.
CIPHER = "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
# The first version of PyMySQL that does not go on without TLS when it is demanded.
TLS_IS_NOT_LEFT_OUT_VERSION = (1, 2)


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


def _classify(error: Exception) -> type[Exception]:
    code = error.args[0] if error.args else None
    if isinstance(code, int) and code:
        return _MYSQL_KINDS.get(code, DatabaseError)
    # Without a number: the connection is closed, or out of step with its server.
    return Disconnected if type(error).__name__ in ('Error', 'InterfaceError', 'InternalError') else DatabaseError


def _message(error: Exception) -> str:
    return str(error.args[-1]) if error.args else ''


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
    cursor.execute(CIPHER)
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
            if pymysql.VERSION < TLS_IS_NOT_LEFT_OUT_VERSION:
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


def _script(connection: Any, sql: str, parameters: Sequence[Any]) -> list[list[Row]]:
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


DRIVERS = (
    Driver('mysqlclient', 'MySQLdb', 'relstore[mysql]', '%s',
           connect=_connect_mysqlclient, classify=_classify, message=_message,
           in_transaction=attrgetter('in_transaction'),
           script=_script, fetch=lambda cursor: list(cursor.fetchall()),
           literal_size=_literal_size_mysqlclient),
    Driver('pymysql', 'pymysql', 'relstore[pymysql]', '%s',
           connect=_connect_pymysql, classify=_classify, message=_message,
           in_transaction=lambda connection: connection.server_status & 1 != 0,     # SERVER_STATUS_IN_TRANS
           script=_script, fetch=lambda cursor: list(cursor.fetchall()),
           literal_size=_literal_size_pymysql),
)
