"""pgbouncer in transaction mode: a pooler in front of a PostgreSQL server."""

import os
import shutil
import unittest
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn

from relstore.tests.support.servers.postgresql import PostgreSQLLayer, PostgreSQLServer, StagingPostgreSQL
from relstore.tests.support.servers.server import Server, cannot_run

# Few servers for many clients, so that sessions are swapped. Nobody is to wait for one longer than a test does.
DEFAULTS = {
    'pool_mode': 'transaction', 'default_pool_size': 3, 'max_client_conn': 500, 'query_wait_timeout': 30,
    'server_login_retry': 1, 'server_tls_sslmode': 'prefer', 'auth_type': 'any', 'log_connections': 0,
    'log_disconnections': 0, 'ignore_startup_parameters': 'extra_float_digits',
}  # fmt: skip


def pgbouncer_program() -> str | None:
    """Return the path of pgbouncer, or None."""
    return shutil.which('pgbouncer', path=os.environ.get('PATH', '') + ':/usr/sbin:/sbin')


def require_pgbouncer(test: unittest.TestCase) -> None:
    """Skip the test if it cannot start a pgbouncer of its own; fail it where CI=true."""
    if pgbouncer_program() is None:
        cannot_run(test, 'pgbouncer is not installed (apt-get install pgbouncer)')


class PgBouncerServer(Server):
    """A pgbouncer of our own in front of `server`, for all its databases. `settings` are those of pgbouncer.ini."""

    name = 'pgbouncer'
    user = 'postgres'
    ready = 'process up:'

    def __init__(self, server: PostgreSQLServer | StagingPostgreSQL, settings: Mapping | None = None):
        super().__init__(DEFAULTS | dict(settings or {}))
        self._server = parse_dsn(server.dsn())

    def dsn(self, direct: str) -> str:
        """Return the DSN that leads through pgbouncer where the DSN `direct` leads."""
        return make_dsn(host=str(self.directory), port=self.port, user=self._user, dbname=parse_dsn(direct)['dbname'])

    def ask(self, command: str) -> list[tuple]:
        """Return the rows that the administrator's console shows."""
        with closing(psycopg2.connect(self.dsn('dbname=pgbouncer'))) as connection:
            connection.autocommit = True    # it knows no BEGIN
            with connection.cursor() as cursor:
                cursor.execute(command)
                return cursor.fetchall() if cursor.description else []

    def lead_to(self, server: PostgreSQLServer) -> None:
        """From now on be in front of this server, which has the same databases; clients stay connected."""
        self._server = parse_dsn(server.dsn())
        self._make_data()
        self.ask('RELOAD')

    @property
    def _user(self) -> str:
        return self._server.get('user', 'postgres')

    def _make_data(self) -> None:
        to = {name: self._server[name] for name in ('host', 'port', 'user', 'password') if name in self._server}
        where = ' '.join(f"{name}='{value}'" for name, value in ({'user': self._user} | to).items())
        settings = self.settings | {
            'unix_socket_dir': self.directory, 'listen_addr': '127.0.0.1', 'listen_port': self.port,
            'admin_users': self._user,
        }  # fmt: skip
        lines = ['[databases]', f'* = {where}', '[pgbouncer]']
        lines += [f'{name} = {value}' for name, value in settings.items()]
        self._ini.touch(0o600)      # there may be a password in it
        self._ini.write_text('\n'.join(lines) + '\n')
        if os.geteuid() == 0:
            owner = self.directory.stat()
            os.chown(self._ini, owner.st_uid, owner.st_gid)

    def _command(self) -> list[str | Path]:
        return [pgbouncer_program(), self._ini]

    @property
    def _ini(self) -> Path:
        return self.directory / 'pgbouncer.ini'


class PgBouncerLayer:
    """A layer of zope.testrunner: a pgbouncer in front of the PostgreSQL server that all tests share."""

    __name__, __module__, __bases__ = 'PgBouncerLayer', __name__, (PostgreSQLLayer,)

    def __init__(self):
        self.bouncer: PgBouncerServer | None = None

    @property
    def server(self) -> PostgreSQLServer | StagingPostgreSQL | None:
        """The one behind it."""
        return PostgreSQLLayer.server

    def setUp(self) -> None:
        if self.server is not None and pgbouncer_program() is not None:
            self.bouncer = PgBouncerServer(self.server)
            self.bouncer.start()

    def tearDown(self) -> None:
        if self.bouncer is not None:
            self.bouncer.stop()
            self.bouncer = None

    def require(self, test: unittest.TestCase) -> None:
        """Skip the test if one of the two is missing; fail it where CI=true."""
        PostgreSQLLayer.require(test)
        require_pgbouncer(test)


PgBouncerLayer = PgBouncerLayer()
