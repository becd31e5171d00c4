"""MariaDB and MySQL: servers of our own, and a staging server of either kind.

MariaDB is Debian's package. MySQL 9.7 is in a folder that `buildbot/fetch-mysql` fills, var/mysql-9.7 of the project or
the one that RELSTORE_MYSQL_HOME names; it comes with all its libraries, and is run through its own dynamic loader.
"""

import os
import shutil
import unittest
import uuid
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql

from relstore.tests.support.layers import Long
from relstore.tests.support.servers.server import Server, SharedServer, cannot_run

PROJECT = Path(__file__).resolve().parents[5]

DEFAULTS = {'max_connections': 300, 'bind_address': '127.0.0.1', 'skip_name_resolve': None}
NOT_DURABLE = {
    'innodb_flush_method': 'nosync', 'innodb_flush_log_at_trx_commit': 0, 'innodb_doublewrite': 'OFF', 'sync_binlog': 0,
}  # fmt: skip

# The user of the tests comes through TCP too, where nobody is called localhost. FLUSH: the server that makes the data
# runs without users until then.
USER = """
FLUSH PRIVILEGES;
CREATE USER IF NOT EXISTS root@'127.0.0.1';
GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;
"""


class MySQLDatabases:
    """The databases of one server. Subclasses say where it is: arguments() and tcp_arguments(), those of an adapter."""

    prefix = ''  # of the names there

    def create_database(self, name: str) -> dict[str, Any]:
        """Create an empty database and return its arguments. A name that is taken is an error."""
        self.run(f'CREATE DATABASE `{self.prefix}{name}` CHARACTER SET utf8mb4')
        return self.arguments(name)

    def drop_database(self, name: str) -> None:
        """Drop a database that create_database() made, whoever is connected to it."""
        self.disconnect(name)
        self.run(f'DROP DATABASE IF EXISTS `{self.prefix}{name}`')

    def disconnect(self, name: str) -> None:
        """End all connections to a database, so that nothing in it is locked."""
        where = f"db = '{self.prefix}{name}'"
        for (connection,) in self.run(f'SELECT id FROM information_schema.processlist WHERE {where}'):
            try:
                self.run(f'KILL {connection}')
            except pymysql.OperationalError as e:  # 1094, no such connection: it ended meanwhile
                if e.args[0] != 1094:
                    raise

    def run(self, sql: str) -> tuple[tuple, ...]:
        """Run a statement on the server as its administrator, in no database; return the rows."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def connect(self, database: str | None = None, **more) -> pymysql.Connection:
        """Return a connection in autocommit."""
        arguments = self.arguments(database)
        renamed = {'database': arguments.pop('db', None), 'password': arguments.pop('passwd', '')}
        # As MySQLWatch: see there.
        return pymysql.connect(**renamed, **arguments, autocommit=True, ssl_disabled='unix_socket' in arguments, **more)

    @cached_property
    def is_mariadb(self) -> bool:
        [[version]] = self.run('SELECT version()')
        return 'MariaDB' in version

    def arguments(self, database: str | None = None) -> dict[str, Any]:
        """Return what an adapter needs to be told of a database: db, user, unix_socket and so on."""
        raise NotImplementedError

    def tcp_arguments(self, database: str | None = None, port: int | None = None) -> dict[str, Any]:
        """Return the arguments of a database, through TCP; `port` is that of a proxy on the loopback address."""
        raise NotImplementedError


class MySQLFamilyServer(MySQLDatabases, Server):
    """A server of our own. `settings` are those of my.cnf; None as a value stands for a flag.

    Without `durable` nothing is flushed to disk: fast, and meaningless after kill().
    """

    user = 'mysql'
    ready = 'ready for connections'
    usual: dict[str, Any] = {}
    not_durable: dict[str, Any] = {}

    def __init__(self, settings: dict | None = None, durable: bool = False):
        hasty = {} if durable else NOT_DURABLE | self.not_durable
        super().__init__(DEFAULTS | self.usual | hasty | (settings or {}))

    def stop(self) -> None:
        """Remove it. What it would write when it is shut down goes too."""
        self.kill()
        super().stop()

    def arguments(self, database: str | None = None) -> dict[str, Any]:
        return _named(database) | {'user': 'root', 'unix_socket': str(self.directory / 'socket')}

    def tcp_arguments(self, database: str | None = None, port: int | None = None) -> dict[str, Any]:
        return _named(database) | {'user': 'root', 'host': '127.0.0.1', 'port': port or self.port}

    def _options(self) -> list[str]:
        return [f'--{name}' if value is None else f'--{name}={value}' for name, value in self.settings.items()]

    def _where(self) -> list[str]:
        return [
            f'--datadir={self.directory / "data"}', f'--socket={self.directory / "socket"}', f'--port={self.port}',
        ]  # fmt: skip

    def _user_file(self) -> Path:
        file = self.directory / 'user.sql'
        file.write_text(USER)
        return file

    def _environment(self) -> dict[str, str]:
        ours = {name: value for name, value in super()._environment().items() if not name.startswith('MYSQL')}
        # MariaDB 10.11 empties the directory of temporary tables when it starts: of everybody's, were it /tmp.
        return ours | {'TMPDIR': str(self.directory)}


# MariaDB


def mariadb_programs() -> tuple[str, str] | None:
    """Return mariadbd and mariadb-install-db here, or None."""
    path = os.pathsep.join([os.environ.get('PATH', os.defpath), '/usr/sbin', '/usr/bin'])
    programs = shutil.which('mariadbd', path=path), shutil.which('mariadb-install-db', path=path)
    return programs if all(programs) else None


def require_mariadb(test: unittest.TestCase) -> None:
    """Skip the test if it cannot start a MariaDB of its own; fail it where CI=true."""
    if mariadb_programs() is None:
        cannot_run(test, 'MariaDB is not installed (apt-get install mariadb-server)')


class MariaDBServer(MySQLFamilyServer):
    name = 'MariaDB'

    def _initialize(self) -> list[str | Path]:
        _, install = mariadb_programs()
        return [
            install, '--no-defaults', f'--datadir={self.directory / "data"}', '--skip-test-db', '--skip-name-resolve',
            '--auth-root-authentication-method=normal', f'--extra-file={self._user_file()}',
        ]  # fmt: skip

    def _command(self) -> list[str | Path]:
        program, _ = mariadb_programs()
        return [program, '--no-defaults', *self._where(), *self._options()]


# MySQL


def mysql_home() -> Path:
    """Return the folder where MySQL is, or should be."""
    return Path(os.environ.get('RELSTORE_MYSQL_HOME') or PROJECT / 'var' / 'mysql-9.7')


def mysql_program() -> Path:
    return mysql_home() / 'usr' / 'sbin' / 'mysqld'


def mysql_unavailable() -> str:
    """Return why MySQL cannot run here; '' if it can."""
    if not mysql_program().exists():
        return f'MySQL is not in {mysql_home()} (buildbot/fetch-mysql brings it there)'
    if os.geteuid() == 0 and not all(path.stat().st_mode & 0o001 for path in mysql_home().resolve().parents):
        return f'MySQL in {mysql_home()} cannot be reached by the user who would run it instead of root'
    return ''


def require_mysql(test: unittest.TestCase) -> None:
    """Skip the test if it cannot start a MySQL of its own, also where CI=true: no release of Debian has a package."""
    reason = mysql_unavailable()
    if reason:
        cannot_run(test, reason, excused=True)


class MySQLServer(MySQLFamilyServer):
    name = 'MySQL'
    # Without TLS, which PyMySQL would use wherever it is offered: a proxy is to see what is sent.
    usual = {
        'mysqlx': 'OFF', 'secure_file_priv': '', 'innodb_redo_log_capacity': '32M', 'tls_version': '',
        'auto_generate_certs': 'OFF',
    }  # fmt: skip
    not_durable = {'skip_log_bin': None}

    def _initialize(self) -> list[str | Path]:
        return [*self._mysqld(), '--initialize-insecure', f'--init-file={self._user_file()}', *self._options()]

    def _command(self) -> list[str | Path]:
        return [*self._mysqld(), *self._options()]

    def _mysqld(self) -> list[str | Path]:
        """Its libraries are newer than the machine's, so its own loader takes them from where they are."""
        home = mysql_home()
        [loader] = [*home.glob('usr/lib64/ld-linux-*'), *home.glob('usr/lib/ld-linux-*')][:1]
        libraries = ':'.join(str(path) for path in home.glob('usr/lib/*-linux-gnu'))
        return [
            loader, '--library-path', libraries, mysql_program(), '--no-defaults', f'--basedir={home / "usr"}',
            *self._where(),
        ]  # fmt: skip


# Staging


class StagingMySQL(MySQLDatabases):
    """A server that somebody else runs: used, never stopped, left as it was found.

    The URL is mysql://user:password@host:port/, and any other option of the adapter follows as ?unix_socket=/path&...
    The tests' databases have a prefix there, which the tests neither see nor give.
    """

    def __init__(self, url: str):
        parts = urlsplit(url)
        given = {
            'host': parts.hostname, 'port': parts.port, 'user': parts.username and unquote(parts.username),
            'passwd': parts.password and unquote(parts.password), **dict(parse_qsl(parts.query)),
        }  # fmt: skip
        self.base = {name: value for name, value in given.items() if value is not None}
        self.prefix = f'relstore_test_{uuid.uuid4().hex[:8]}_'
        self.created: set[str] = set()

    def start(self) -> None:
        """Connect once, so that a wrong URL is told once."""
        self.connect().close()

    def stop(self) -> None:
        """Drop the databases that the tests left."""
        for name in list(self.created):
            self.drop_database(name)

    def create_database(self, name: str) -> dict[str, Any]:
        arguments = super().create_database(name)
        self.created.add(name)
        return arguments

    def drop_database(self, name: str) -> None:
        super().drop_database(name)
        self.created.discard(name)

    def arguments(self, database: str | None = None) -> dict[str, Any]:
        return self.base | _named(database and self.prefix + database)

    def tcp_arguments(self, database: str | None = None, port: int | None = None) -> dict[str, Any]:
        arguments = self.arguments(database)
        if port is not None:
            arguments.pop('unix_socket', None)
            arguments |= {'host': '127.0.0.1', 'port': port}
        return arguments

    @property
    def address(self) -> tuple[str, int] | str:
        return self.base.get('unix_socket') or (self.base.get('host', 'localhost'), self.base.get('port', 3306))


def _named(database: str | None) -> dict[str, Any]:
    return {'db': database} if database else {}


def _find_mariadb() -> MariaDBServer | StagingMySQL | None:
    staging = os.environ.get('RELSTORE_TEST_MYSQL')
    if staging:
        return StagingMySQL(staging)
    return MariaDBServer() if mariadb_programs() else None


def _find_mysql() -> MySQLServer | None:
    return None if mysql_unavailable() else MySQLServer()


MariaDBLayer = SharedServer('MariaDBLayer', __name__, _find_mariadb, require_mariadb, (Long,))
MySQLLayer = SharedServer('MySQLLayer', __name__, _find_mysql, require_mysql, (Long,))


class DurableMariaDBLayer:
    """A layer of zope.testrunner: a server of our own that keeps what it has acknowledged, for tests that kill it.

    What nobody waits for stays off the disk for long, as in DurableLayer.
    """

    server: MariaDBServer | None = None
    settings = {'innodb_flush_log_at_timeout': 2700, 'innodb_max_dirty_pages_pct': 99}

    @classmethod
    def setUp(cls) -> None:
        if mariadb_programs():
            cls.server = MariaDBServer(cls.settings, durable=True)
            cls.server.start()

    @classmethod
    def tearDown(cls) -> None:
        if cls.server is not None:
            cls.server.stop()
            cls.server = None
