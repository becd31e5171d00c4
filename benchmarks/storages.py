"""The storages under test: how each is made, opened and removed, and why one may be missing."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import ZODB
from ZODB.FileStorage import FileStorage

import relstore
from benchmarks.servers import (
    MARIADB,
    MYSQL,
    POSTGRESQL,
    DurableMariaDB,
    DurableMySQL,
    DurablePostgreSQL,
    SlowDisk,
    Unavailable,
    ZEOServer,
)
from relstore.tests.support.servers import (
    MemcachedServer,
    mariadb_programs,
    memcached_program,
    mysql_unavailable,
    postgresql_programs,
)

# Megabytes for the storage's cache in each process, and the largest object in it: the same for all.
CACHE_MB = 64
CACHE_OBJECT_MAX = 1 << 20
SLOW_MICROSECONDS = 3000
POLL_INTERVAL = 60  # seconds that a count in memcached is believed; longer than anything that is measured

DURABILITY = (
    'An acknowledged commit is on disk, everywhere: PostgreSQL with fsync=on and synchronous_commit=on, one server for '
    'all; MariaDB and MySQL with innodb_flush_log_at_trx_commit=1, MySQL with a binary log and sync_binlog=1 besides; '
    'SQLite with journal_mode=WAL and synchronous=FULL, for RelStorage too (its own default is NORMAL); '
    'FileStorage and ZEO flush with fsync.'
)


@dataclass(frozen=True)
class Kind:
    """A storage under test. `opened(where, keep_history, cache_mb, **options)` returns it open."""

    name: str
    colour: str
    server: str  # one of SERVERS, 'zeo', or '' for files
    opened: Callable | None = None
    requires: tuple[str, ...] = ()
    processes: bool = True  # may several processes open it?
    mark: str = 'o-'
    reason: str = ''  # why it cannot be tested at all
    history_free: bool = False  # whatever the others do: RelStorage has no other mode on MySQL
    variant: str = ''  # of which kind, with something turned off or added: for the part that is about that
    memcached: bool = False  # does it share one?

    def unavailable(self) -> str:
        """Return why it cannot run here; '' if it can."""
        if self.reason:
            return self.reason
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if missing:
            return f'not installed: {", ".join(missing)}'
        if self.server == 'postgresql' and postgresql_programs() is None:
            return 'PostgreSQL is not installed (apt-get install postgresql)'
        if self.server == 'mariadb' and mariadb_programs() is None:
            return 'MariaDB is not installed (apt-get install mariadb-server)'
        if self.memcached and memcached_program() is None:
            return 'memcached is not installed (apt-get install memcached)'
        return mysql_unavailable() if self.server == 'mysql' else ''


class NothingAhead:
    """Takes the place of a ReadAhead, and never wants anything but what was asked for."""

    def saw(self, oid: int | None, state: bytes, refs: bytes | None) -> None:
        """Remember nothing."""

    def beside(self, oid: int, at: int, hit: bytes | None) -> list[int]:
        return []

    def wake(self) -> None:
        """Nothing rests."""


class WithoutReadAhead(relstore.RelStore):
    """relstore without read-ahead, for which it has no option: what it gains and costs is to be seen."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        if {name for name in dir(self.view.ahead) if not name.startswith('_')} != {'saw', 'beside', 'wake'}:
            raise Unavailable('relstore has another kind of read-ahead than this benchmark can turn off')
        self.view.ahead = NothingAhead()

    def new_instance(self) -> WithoutReadAhead:
        return WithoutReadAhead(self._database)


def _relstore(adapter, keep_history: bool, cache_mb: int, cls: type = relstore.RelStore, **more):
    return cls(
        adapter, keep_history=keep_history, cache_local_mb=cache_mb, cache_local_object_max=CACHE_OBJECT_MAX,
        pool_size=256,  # the memory part opens a hundred history-free connections, each with a snapshot
        **more,
    )


def _relstore_sqlite(where: str, keep_history: bool, cache_mb: int, cls: type = relstore.RelStore, **more):
    return _relstore(relstore.SQLite(where, pragmas={'synchronous': 'FULL'}), keep_history, cache_mb, cls, **more)


def _relstore_psycopg(where: str, keep_history: bool, cache_mb: int, cls: type = relstore.RelStore, **more):
    return _relstore(relstore.PostgreSQL(where, driver='psycopg'), keep_history, cache_mb, cls, **more)


def _relstore_psycopg2(where: str, keep_history: bool, cache_mb: int, **more):
    return _relstore(relstore.PostgreSQL(where, driver='psycopg2'), keep_history, cache_mb, **more)


def _relstorage_options(keep_history: bool, cache_mb: int, **more):
    from relstorage.options import Options

    return Options(
        keep_history=keep_history, cache_local_mb=cache_mb, cache_local_object_max=CACHE_OBJECT_MAX, **more
    )


def _relstorage_sqlite(where: str, keep_history: bool, cache_mb: int, **more):
    from relstorage.adapters.sqlite.adapter import Sqlite3Adapter
    from relstorage.storage import RelStorage

    options = _relstorage_options(keep_history, cache_mb, **more)
    return RelStorage(Sqlite3Adapter(where, pragmas={'synchronous': 'FULL'}, options=options), options=options)


def _relstorage_postgresql(where: str, keep_history: bool, cache_mb: int, **more):
    from relstorage.adapters.postgresql import PostgreSQLAdapter
    from relstorage.storage import RelStorage

    options = _relstorage_options(keep_history, cache_mb, driver='psycopg2', **more)
    return RelStorage(PostgreSQLAdapter(dsn=where, options=options), options=options)


def _relstore_mysql(where: dict, keep_history: bool, cache_mb: int, **more):
    return _relstore(relstore.MySQL(**where, driver='mysqlclient'), keep_history, cache_mb, **more)


def _relstorage_mysql(where: dict, keep_history: bool, cache_mb: int, **more):
    from relstorage.adapters.mysql import MySQLAdapter
    from relstorage.storage import RelStorage

    options = _relstorage_options(keep_history, cache_mb, driver='MySQLdb', **more)
    return RelStorage(MySQLAdapter(options=options, **where), options=options)


def _zeo(where: str, keep_history: bool, cache_mb: int):
    from ZEO.ClientStorage import ClientStorage

    return ClientStorage(where, cache_size=max(cache_mb, 1) << 20, wait_timeout=30)


def _filestorage(where: str, keep_history: bool, cache_mb: int, blob_dir: str | None = None, **more):
    return FileStorage(str(Path(where) / 'Data.fs'), blob_dir=blob_dir)


SERVERS = {'postgresql': DurablePostgreSQL, 'mariadb': DurableMariaDB, 'mysql': DurableMySQL}
KINDS = {
    kind.name: kind
    for kind in (
        Kind('relstore PostgreSQL', '#1f4fd8', 'postgresql', _relstore_psycopg, ('psycopg',)),
        Kind('relstore PostgreSQL, psycopg2', '#7a5cd6', 'postgresql', _relstore_psycopg2, ('psycopg2',), mark='v-'),
        Kind('RelStorage PostgreSQL', '#d1351b', 'postgresql', _relstorage_postgresql, ('relstorage', 'psycopg2'),
             mark='s-'),
        Kind('relstore SQLite', '#39a7e8', '', _relstore_sqlite, mark='o--'),
        Kind('RelStorage SQLite', '#f59a23', '', _relstorage_sqlite, ('relstorage',), mark='s--'),
        Kind('FileStorage', '#6b6b6b', '', _filestorage, processes=False, mark='^:'),
        Kind('ZEO', '#2c9f4b', 'zeo', _zeo, ('ZEO',), mark='D-.'),
        Kind('relstore MariaDB', '#00838f', 'mariadb', _relstore_mysql, ('MySQLdb',), mark='o-'),
        Kind('relstore MySQL, history-free', '#4dd0e1', 'mysql', _relstore_mysql, ('MySQLdb',), mark='o-',
             history_free=True),
        Kind('RelStorage MySQL, history-free', '#ff8a65', 'mysql', _relstorage_mysql, ('relstorage', 'MySQLdb'),
             mark='s-', history_free=True),
        Kind('relstore PostgreSQL, without read-ahead', '#9db4f0', 'postgresql',
             partial(_relstore_psycopg, cls=WithoutReadAhead), ('psycopg',), mark='o:',
             variant='relstore PostgreSQL'),
        Kind('relstore SQLite, without read-ahead', '#a9dcf8', '',
             partial(_relstore_sqlite, cls=WithoutReadAhead), mark='o:', variant='relstore SQLite'),
        Kind('relstore PostgreSQL, memcached', '#0b2a86', 'postgresql', _relstore_psycopg, ('psycopg', 'pymemcache'),
             mark='o--', variant='relstore PostgreSQL', memcached=True),
    )
}  # fmt: skip
ALL = [name for name, kind in KINDS.items() if not kind.variant]
MAIN = [name for name in ALL if 'psycopg2' not in name]


@dataclass(frozen=True)
class Site:
    """A database of one kind; other processes can open it too."""

    kind: str
    where: str | tuple[str, int] | dict[str, Any]  # DSN, directory, address, or arguments
    keep_history: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # that only a run knows

    def open(self, cache_mb: int = CACHE_MB):
        """Return the storage."""
        return KINDS[self.kind].opened(self.where, self.keep_history, cache_mb, **self.options)

    def open_db(self, cache_mb: int = CACHE_MB, **options) -> ZODB.DB:
        """Return a ZODB DB whose connections keep every object."""
        return ZODB.DB(self.open(cache_mb), cache_size=1_000_000, **options)

    def at(self, where: str | tuple[str, int] | dict[str, Any]) -> Site:
        """Return the same database by another address."""
        return replace(self, where=where)


def empty_storage_cache(storage) -> None:
    """Drop what the storage has cached. FileStorage has no cache of its own."""
    cache = getattr(storage, '_cache', None)
    if cache is not None:
        cache.clear()


class Lab:
    """Where the storages live: a temporary directory, and the servers, each started when first wanted."""

    def __init__(self):
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-benchmarks-'))
        self._servers: dict[tuple[str, bool], DurablePostgreSQL | DurableMariaDB | DurableMySQL] = {}
        self._slow_disk: SlowDisk | None = None
        self._memcached: MemcachedServer | None = None
        self._numbers = count(1)
        self.settings = {
            'durability': DURABILITY,
            'postgresql.conf': POSTGRESQL,
            'my.cnf': {'MariaDB': MARIADB, 'MySQL': MYSQL},
            'cache': f'{CACHE_MB} MB per process, objects up to {CACHE_OBJECT_MAX} bytes, wherever there is one',
            'connections': 'servers are reached through unix sockets, but for those that a proxy watches',
        }

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc_info) -> None:
        for server in self._servers.values():
            server.stop()
        if self._memcached is not None:
            self._memcached.stop()
        if self._slow_disk is not None:
            self._slow_disk.remove()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def slow_disk(self) -> SlowDisk:
        """The library that makes a disk slow; Unavailable says why there is none."""
        if self._slow_disk is None:
            self._slow_disk = SlowDisk()
        return self._slow_disk

    def server(self, name: str, slow: bool = False) -> DurablePostgreSQL | DurableMariaDB | DurableMySQL:
        """Return the running server, one of SERVERS, the same for all storages."""
        if (name, slow) not in self._servers:
            server = SERVERS[name](self.slow_disk.environment(SLOW_MICROSECONDS) if slow else None)
            server.start()
            self._servers[name, slow] = server
        return self._servers[name, slow]

    @property
    def memcached(self) -> MemcachedServer:
        """The running memcached, on a unix socket."""
        if self._memcached is None:
            server = MemcachedServer(unix=True)
            server.start()
            self._memcached = server
        return self._memcached

    def variant(self, site: Site, name: str) -> Site:
        """Return the same database as a kind opens it that is a variant of the site's."""
        options = {}
        if KINDS[name].memcached:
            options = {'cache_servers': self.memcached.where, 'poll_interval': POLL_INTERVAL}
        return replace(site, kind=name, options=options)

    def by_tcp(self, site: Site, port: int | None = None) -> Site:
        """Return the site of one of SERVERS as reached through TCP; `port` is that of a proxy."""
        server = self.server(KINDS[site.kind].server)
        if isinstance(site.where, dict):
            return site.at(server.tcp_arguments(site.where['db'], port))
        return site.at(server.tcp_dsn(site.where.rpartition('dbname=')[2], port))

    @contextmanager
    def site(self, name: str, keep_history: bool = True, slow: bool = False) -> Iterator[Site]:
        """Make an empty database of a kind; remove it afterwards. Unavailable says why it cannot be had."""
        kind = KINDS[name]
        reason = kind.unavailable()
        if reason:
            raise Unavailable(reason)
        keep_history = keep_history and not kind.history_free
        if kind.server in SERVERS:
            server, database = self.server(kind.server, slow), f'bench_{next(self._numbers)}'
            where = server.create_database(database)
            try:
                yield Site(name, where, keep_history)
            finally:
                server.drop_database(database)
            return
        directory = self.directory / f'{next(self._numbers)}'
        directory.mkdir()
        server = None
        try:
            if kind.server == 'zeo':
                server = ZEOServer(directory, self.slow_disk.environment(SLOW_MICROSECONDS) if slow else None)
            yield Site(name, server.socket if server else str(directory), keep_history)
        finally:
            if server is not None:
                server.stop()
            shutil.rmtree(directory)

    @contextmanager
    def copy(self, site: Site) -> Iterator[Site]:
        """Make a copy of a database that nobody has open, on PostgreSQL or in files; remove it afterwards."""
        number = next(self._numbers)
        if not KINDS[site.kind].server:
            directory = shutil.copytree(site.where, self.directory / f'{number}')
            try:
                yield site.at(str(directory))
            finally:
                shutil.rmtree(directory)
            return
        server, database = self.server(KINDS[site.kind].server), f'bench_{number}'
        where = server.copy_database(site.where.rpartition('dbname=')[2], database)
        try:
            yield site.at(where)
        finally:
            server.drop_database(database)


def available(results, part: str, names: list[str]) -> list[str]:
    """Return the kinds that can run here; record the reasons of the others."""
    for name in names:
        if reason := KINDS[name].unavailable():
            results.cannot(part, name, reason)
    return [name for name in names if not KINDS[name].unavailable()]
