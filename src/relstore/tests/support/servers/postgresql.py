"""PostgreSQL: servers of our own, and a staging server."""

import os
import re
import shutil
import signal
import subprocess
import time
import unittest
import uuid
from contextlib import closing
from pathlib import Path

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn, quote_ident

from relstore.tests.support.layers import Long
from relstore.tests.support.servers.server import Server, SharedServer, cannot_run

DEFAULTS = {'max_connections': 300, 'listen_addresses': '127.0.0.1'}
NOT_DURABLE = {'fsync': 'off', 'full_page_writes': 'off', 'synchronous_commit': 'off'}

SECONDS_TO_CATCH_UP = 60

# One CREATE DATABASE at a time: PostgreSQL refuses the second to copy the same template, after five seconds.
CREATE_DATABASE_LOCK = 0x72656C73746F7265


def postgresql_programs() -> Path | None:
    """Return the directory of the newest initdb and postgres here, or None."""
    packaged = Path('/usr/lib/postgresql').glob('*/bin/initdb')
    newest = max(packaged, key=lambda path: float(path.parts[-3]), default=None) or shutil.which('initdb')
    return newest and Path(newest).parent


def postgresql_version() -> int:
    """Return the major version of the PostgreSQL that is started here."""
    told = subprocess.run([postgresql_programs() / 'postgres', '--version'], capture_output=True, text=True, check=True)
    return int(re.search(r'\d+', told.stdout)[0])


def require_postgresql(test: unittest.TestCase) -> None:
    """Skip the test if it cannot start a PostgreSQL of its own; fail it where CI=true."""
    if postgresql_programs() is None:
        cannot_run(test, 'PostgreSQL is not installed (apt-get install postgresql)')


class PostgreSQLDatabases:
    """The databases of one PostgreSQL server. Subclasses say where it is: dsn() and tcp_dsn()."""

    prefix = ''  # of the names there

    def create_database(self, name: str, encoding: str = 'UTF8', template: str | None = None) -> str:
        """Create a database and return its DSN. A name that is taken is an error.

        It is empty, or a copy of one that create_database() made and nobody is connected to.
        """
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute('SELECT pg_advisory_lock(%s)', (CREATE_DATABASE_LOCK,))
            name_there = quote_ident(self.prefix + name, cursor)
            template_there = quote_ident(self.prefix + template, cursor) if template else 'template0'
            cursor.execute(f"CREATE DATABASE {name_there} ENCODING '{encoding}' TEMPLATE {template_there}")
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database that create_database() made, whoever is connected to it."""
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f'DROP DATABASE IF EXISTS {quote_ident(self.prefix + name, cursor)} WITH (FORCE)')

    def _connect(self):
        connection = psycopg2.connect(self.dsn())
        connection.autocommit = True
        return connection


class PostgreSQLServer(PostgreSQLDatabases, Server):
    """A PostgreSQL of our own. `settings` are those of postgresql.conf.

    Without `durable` nothing is flushed to disk: fast, and meaningless after kill().
    """

    name = 'PostgreSQL'
    user = 'postgres'
    ready = 'database system is ready to accept'
    shutdown = signal.SIGINT  # "fast": does not wait for clients
    abandoned = 'QUIT'  # its children go too

    def __init__(self, settings: dict | None = None, durable: bool = False):
        super().__init__(DEFAULTS | ({} if durable else NOT_DURABLE) | (settings or {}))

    def _initialize(self) -> list[str | Path]:
        return [
            postgresql_programs() / 'initdb', '--pgdata=data', '--auth=trust', '--username=postgres', '--locale=C',
            '--encoding=UTF8', '--no-sync',
        ]  # fmt: skip

    def _command(self) -> list[str | Path]:
        options = [f'--{name}={value}' for name, value in self.settings.items()]
        return [
            postgresql_programs() / 'postgres', '-D', self.directory / 'data', '-k', self.directory,
            '-p', str(self.port), *options,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in super()._environment().items() if not name.startswith('PG')}

    def dsn(self, database: str = 'postgres') -> str:
        """Return the libpq DSN of a database, through the unix socket."""
        return make_dsn(host=str(self.directory), port=self.port, user='postgres', dbname=database)

    def tcp_dsn(self, database: str = 'postgres', port: int | None = None) -> str:
        """Return the libpq DSN of a database, through TCP; `port` is that of a proxy."""
        return make_dsn(
            host='127.0.0.1', port=port or self.port, user='postgres', dbname=database,
            sslmode='disable', gssencmode='disable',  # no exchange before the first message
        )  # fmt: skip


class StandbyServer(PostgreSQLServer):
    """A copy of `primary` that follows it: a hot standby, which may be read, and written after promote().

    port: that of a proxy to the primary, where what is streamed goes through one.
    """

    def __init__(self, primary: PostgreSQLServer, port: int | None = None):
        super().__init__(primary.settings)
        self._primary, self._through = primary, port

    def promote(self) -> None:
        """Make it a primary; return when it may be written."""
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute('SELECT pg_promote()')
            [[promoted]] = cursor.fetchall()
        if not promoted:
            raise RuntimeError(f'{self.directory} was not promoted:\n{self.log_tail()}')

    def catch_up(self) -> None:
        """Return when all that the primary has committed is here."""
        with closing(self._primary._connect()) as connection, connection.cursor() as cursor:
            cursor.execute('SELECT pg_current_wal_lsn()')
            [[there]] = cursor.fetchall()
        deadline = time.monotonic() + SECONDS_TO_CATCH_UP
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            behind = True
            while behind:
                cursor.execute('SELECT pg_last_wal_replay_lsn() < %s::pg_lsn, pg_sleep(0.002)', (there,))
                [[behind, _]] = cursor.fetchall()
                if time.monotonic() > deadline:
                    raise TimeoutError(f'not at {there} after {SECONDS_TO_CATCH_UP} s:\n{self.log_tail()}')

    def _initialize(self) -> list[str | Path]:
        return [
            postgresql_programs() / 'pg_basebackup', '--pgdata=data', '--write-recovery-conf', '--checkpoint=fast',
            '--no-sync', f'--dbname={self._primary.tcp_dsn(port=self._through)}',
        ]  # fmt: skip


class StagingPostgreSQL(PostgreSQLDatabases):
    """A server that somebody else runs: used, never stopped, left as it was found.

    The tests' databases have a prefix there, which the tests neither see nor give.
    """

    def __init__(self, dsn: str):
        self.base = dsn
        self.prefix = f'relstore_test_{uuid.uuid4().hex[:8]}_'
        self.created: set[str] = set()

    def start(self) -> None:
        """Connect once, so that a wrong DSN is told once."""
        self._connect().close()

    def stop(self) -> None:
        """Drop the databases that the tests left."""
        for name in list(self.created):
            self.drop_database(name)

    def create_database(self, name: str, encoding: str = 'UTF8', template: str | None = None) -> str:
        dsn = super().create_database(name, encoding, template)
        self.created.add(name)
        return dsn

    def drop_database(self, name: str) -> None:
        super().drop_database(name)
        self.created.discard(name)

    def dsn(self, database: str | None = None) -> str:
        return make_dsn(self.base, **({'dbname': self.prefix + database} if database else {}))

    def tcp_dsn(self, database: str | None, port: int) -> str:
        """Return the DSN of a database, through the proxy at this port of the loopback address."""
        return make_dsn(self.dsn(database), host='127.0.0.1', port=port)

    @property
    def address(self) -> tuple[str, int] | str:
        parsed = parse_dsn(self.base)
        host, port = parsed.get('host', 'localhost'), int(parsed.get('port', 5432))
        return f'{host}/.s.PGSQL.{port}' if host.startswith('/') else (host, port)


def _find() -> PostgreSQLServer | StagingPostgreSQL | None:
    staging = os.environ.get('RELSTORE_TEST_POSTGRESQL')
    if staging:
        return StagingPostgreSQL(staging)
    return PostgreSQLServer() if postgresql_programs() else None


PostgreSQLLayer = SharedServer('PostgreSQLLayer', __name__, _find, require_postgresql, (Long,))


class DurableLayer:
    """A layer of zope.testrunner: a server of our own that keeps what it has acknowledged, for tests that kill it.

    What nobody waits for stays off the disk for long: the log is written when a commit wants it, or 10 s later.
    """

    server: PostgreSQLServer | None = None
    settings = {
        'wal_level': 'minimal', 'max_wal_senders': 0,   # above minimal the next transaction's number is logged at times
        'wal_writer_delay': '10s', 'wal_writer_flush_after': '1GB', 'wal_buffers': '32MB',
        'bgwriter_lru_maxpages': 0, 'autovacuum': 'off',        # who writes a page has the log written first
    }  # fmt: skip

    @classmethod
    def setUp(cls) -> None:
        if postgresql_programs():
            # Recovery flushes each file, which takes it most of a second. The operating system has not crashed.
            quick = {'recovery_init_sync_method': 'syncfs'} if postgresql_version() >= 14 else {}
            cls.server = PostgreSQLServer(cls.settings | quick, durable=True)
            cls.server.start()

    @classmethod
    def tearDown(cls) -> None:
        if cls.server is not None:
            cls.server.stop()
            cls.server = None
