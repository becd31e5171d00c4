"""Places: where the databases of a soak are, how their server is disturbed, and what it tells about itself."""
import importlib.util
import multiprocessing
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2

import relstore
from relstore.tests.support.servers import (
    MariaDBServer,
    MemcachedServer,
    MySQLServer,
    PostgreSQLServer,
    StagingMySQL,
    StagingPostgreSQL,
    mariadb_programs,
    memcached_program,
    mysql_unavailable,
    postgresql_programs,
)

IDLE_SECONDS = 5        # a transaction that waits for its client for so long was forgotten
POLL_INTERVAL = 2       # seconds that a commit may stay unseen if its process could not reach the memcached
SECONDS_DOWN = 2        # of a memcached that was killed: clients commit meanwhile
PACKED_UPTO = 30        # seconds ago: no view is as old as that
SECONDS_TO_PACK = 120
SPAWN = multiprocessing.get_context('spawn')
MODES = {'preserving': True, 'free': False}


@dataclass(frozen=True)
class Site:
    """One database; a process gets it by pickle, and opens it."""
    mode: str                       # one of MODES
    adapter: str                    # the name of its class
    arguments: Mapping[str, Any]

    @property
    def keep_history(self) -> bool:
        return MODES[self.mode]

    def open(self, options: Mapping[str, Any]) -> relstore.RelStore:
        address = getattr(relstore, self.adapter)(**self.arguments)
        return relstore.RelStore(address, keep_history=self.keep_history, **options)


def pack(site: Site) -> None:
    with closing(site.open({})) as storage:
        storage.pack(time.time() - PACKED_UPTO)


class Place:
    """A server, or a directory, with one site for each mode.

    disturbances        by name, what can be done to the server; each returns when clients can connect again
    unnoticed           by name, what no client may notice; of what is done to the memcached no more than that a commit
                        is seen POLL_INTERVAL late
    options             of RelStore, that only the place knows
    may_kill_clients    whether nobody is harmed by a client that dies
    dead                what the server keeps that nobody wants, in words
    """
    dead = ''
    may_kill_clients = True

    def __init__(self):
        self.sites: list[Site] = []
        self.disturbances: dict[str, Callable[[], None]] = {}
        self.unnoticed: dict[str, Callable[[], None]] = {'pack': self._pack, 'kill -9 of a pack': self._kill_pack}
        self.options: dict[str, Any] = {}
        self.memcached: MemcachedServer | None = None

    def __enter__(self) -> 'Place':
        return self

    def __exit__(self, *exc_info) -> None:
        try:
            self.stop()
        finally:
            if self.memcached is not None:
                self.memcached.stop()

    def add_memcached(self) -> None:
        """Start a memcached that all processes share."""
        self.memcached = MemcachedServer()
        self.memcached.start()
        self.options = {'cache_servers': self.memcached.where, 'poll_interval': POLL_INTERVAL}
        self.unnoticed |= {'restart of memcached': self.memcached.restart, 'kill -9 of memcached': self._kill_memcached}

    def _pack(self) -> None:
        for site in self.sites:
            packer = SPAWN.Process(target=pack, args=(site,))
            packer.start()
            packer.join(SECONDS_TO_PACK)
            if packer.exitcode != 0:
                packer.kill()
                raise RuntimeError(f'A pack ({site.mode}) has ended with status {packer.exitcode}, or not at all')

    def _kill_pack(self) -> None:
        """Somewhere: it takes a second to begin, about."""
        for site in self.sites:
            packer = SPAWN.Process(target=pack, args=(site,))
            packer.start()
            packer.join(random.uniform(0.5, 3))
            packer.kill()
            packer.join()

    def _kill_memcached(self) -> None:
        self.memcached.kill()
        time.sleep(SECONDS_DOWN)
        self.memcached.start()

    def stop(self) -> None:
        """Remove everything."""
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def figures(self, pids: list[int]) -> dict[str, float]:
        """Return what there is now: sessions, forgotten (transactions), dead, and by mode size_... and rows_...

        pids: the processes of the clients.
        """
        raise NotImplementedError


class OnServer(Place):

    def __init__(self, server, own: bool):
        super().__init__()
        self.server, self.may_kill_clients = server, own
        server.start()
        if own:
            self.disturbances = {'restart': server.restart, 'kill -9': self._kill}
        self.sites = [self._site(mode, server.create_database(f'soak_{mode}')) for mode in MODES]

    def _site(self, mode: str, where) -> Site:
        raise NotImplementedError

    def _kill(self) -> None:
        self.server.kill()
        self.server.start()

    def stop(self) -> None:
        self.server.stop()


class PostgreSQLPlace(OnServer):
    dead = 'dead rows'

    def _site(self, mode, where):
        return Site(mode, 'PostgreSQL', {'dsn': where})

    def version(self):
        [[version]] = self._rows(self.sites[0], 'SHOW server_version')
        return f'PostgreSQL {version}'

    def figures(self, pids):
        [[sessions, forgotten]] = self._rows(self.sites[0], """
            SELECT count(*), count(*) FILTER (WHERE state LIKE 'idle in transaction%%'
                                              AND clock_timestamp() - state_change > %s * interval '1 second')
            FROM pg_stat_activity
            WHERE datname = ANY(%s) AND backend_type = 'client backend' AND pid <> pg_backend_pid()
            """, IDLE_SECONDS, [self._database(site) for site in self.sites])
        figures = {'sessions': sessions, 'forgotten': forgotten, 'dead': 0}
        for site in self.sites:
            [[dead, size]] = self._rows(site, """
                SELECT sum(n_dead_tup), pg_database_size(current_database()) FROM pg_stat_user_tables""")
            figures['dead'] += int(dead or 0)
            figures[f'size_{site.mode}'] = size
            if not site.keep_history:
                [[figures[f'rows_{site.mode}']]] = self._rows(site, 'SELECT count(*) FROM object_state')
        return figures

    @staticmethod
    def _database(site: Site) -> str:
        return psycopg2.extensions.parse_dsn(site.arguments['dsn'])['dbname']

    @staticmethod
    def _rows(site: Site, sql: str, *values) -> list[tuple]:
        with closing(psycopg2.connect(site.arguments['dsn'])) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            cursor.execute(sql, values)
            return cursor.fetchall()


class MySQLPlace(OnServer):
    dead = 'old revisions (history list)'

    def _site(self, mode, where):
        driver = 'mysqlclient' if importlib.util.find_spec('MySQLdb') else 'pymysql'
        return Site(mode, 'MySQL', where | {'driver': driver})

    def version(self):
        [[version]] = self.server.run('SELECT version()')
        return f'{"MariaDB" if self.server.is_mariadb else "MySQL"} {version}'

    def figures(self, pids):
        names = ', '.join(f"'{site.arguments['db']}'" for site in self.sites)
        if self.server.is_mariadb:
            clients, of_client, in_transaction = 'information_schema.processlist', '', """
                information_schema.innodb_trx ON trx_mysql_thread_id = client.id"""
        else:   # where those two are an error (3854) while a statement is at work in which a state is no UTF-8
            clients, of_client, in_transaction = 'performance_schema.threads', 'processlist_', """
                performance_schema.events_transactions_current AS now
                ON now.thread_id = client.thread_id AND now.state = 'ACTIVE'"""
        here = f'client.{of_client}db IN ({names})'
        [[sessions]] = self.server.run(f'SELECT count(*) FROM {clients} AS client WHERE {here}')
        [[forgotten]] = self.server.run(f"""
            SELECT count(*) FROM {clients} AS client JOIN {in_transaction}
            WHERE {here} AND client.{of_client}command = 'Sleep' AND client.{of_client}time > {IDLE_SECONDS}""")
        [[dead]] = self.server.run(
            "SELECT `count` FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'")
        figures = {'sessions': sessions, 'forgotten': forgotten, 'dead': dead}
        spaces = 'innodb_sys_tablespaces' if self.server.is_mariadb else 'innodb_tablespaces'
        for site in self.sites:
            name = site.arguments['db']
            [[figures[f'size_{site.mode}']]] = self.server.run(
                f"SELECT cast(sum(file_size) AS signed) FROM information_schema.{spaces} WHERE name LIKE '{name}/%'")
            if not site.keep_history:
                [[figures[f'rows_{site.mode}']]] = self.server.run(f'SELECT count(*) FROM `{name}`.object_state')
        return figures


class SQLitePlace(Place):
    dead = 'free pages'

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-soak-'))
        self.sites = [Site(mode, 'SQLite', {'data_dir': str(self.directory / mode)}) for mode in MODES]

    def stop(self):
        shutil.rmtree(self.directory)

    def version(self):
        return f'SQLite {sqlite3.sqlite_version}'

    def figures(self, pids):
        figures = {'sessions': sum(map(self._opened_by, pids)), 'forgotten': 0, 'dead': 0}
        for site in self.sites:
            files = Path(site.arguments['data_dir']).glob('main.sqlite3*')
            figures[f'size_{site.mode}'] = sum(file.stat().st_size for file in files)
            with closing(sqlite3.connect(Path(site.arguments['data_dir']) / 'main.sqlite3', timeout=60)) as connection:
                [[free]] = connection.execute('PRAGMA freelist_count')
                figures['dead'] += free
                if not site.keep_history:
                    [[figures[f'rows_{site.mode}']]] = connection.execute('SELECT count(*) FROM object_state')
        return figures

    def _opened_by(self, pid: int) -> int:
        """Return how many connections a process has: each has the database open once."""
        opened = 0
        for link in Path(f'/proc/{pid}/fd').glob('*'):
            try:
                opened += os.readlink(link).endswith('main.sqlite3')
            except FileNotFoundError:   # closed meanwhile
                continue
        return opened


def unavailable(adapter: str, memcached: bool = False) -> str:
    """Return why there is no such place here; '' if there can be one."""
    if memcached and memcached_program() is None:
        return 'memcached is not installed (apt-get install memcached)'
    if memcached and not any(map(importlib.util.find_spec, ('pymemcache', 'pylibmc'))):
        return 'there is no client of memcached (pip install pymemcache)'
    if adapter == 'postgresql' and not (os.environ.get('RELSTORE_TEST_POSTGRESQL') or postgresql_programs()):
        return 'PostgreSQL is not installed (apt-get install postgresql)'
    if adapter == 'mariadb' and not mariadb_programs():
        return 'MariaDB is not installed (apt-get install mariadb-server)'
    if adapter == 'mysql' and not os.environ.get('RELSTORE_TEST_MYSQL'):
        return mysql_unavailable()
    return ''


def place(adapter: str) -> Place:
    """Make a place: for 'postgresql' and 'mysql' on the staging server, if there is one."""
    if adapter == 'sqlite':
        return SQLitePlace()
    if adapter == 'mariadb':
        return MySQLPlace(MariaDBServer(durable=True), own=True)
    of_postgresql = adapter == 'postgresql'
    staging = os.environ.get('RELSTORE_TEST_POSTGRESQL' if of_postgresql else 'RELSTORE_TEST_MYSQL')
    if of_postgresql:
        server = StagingPostgreSQL(staging) if staging else PostgreSQLServer(durable=True)
        return PostgreSQLPlace(server, own=not staging)
    return MySQLPlace(StagingMySQL(staging) if staging else MySQLServer(durable=True), own=not staging)


PLACES = 'postgresql', 'mariadb', 'mysql', 'sqlite'
