"""The databases that a suite runs on: mix one of these into a test case.

    class Test(PostgreSQL2HistoryFree, unittest.TestCase): ...

`self.address()` leads to an empty database, and `self.open_storage()` opens it; other names are other databases.

A suite runs on each server with one driver where history is kept, and with the other where it is not.
RELSTORE_TEST_THOROUGH=1 adds each driver in the other mode, and what else takes long and is hardly different. How many
tests that are is told at the end of a plain run.
"""
import importlib.util
import itertools
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pymysql
from psycopg2.extensions import make_dsn

import relstore
from relstore.adapters.addresses import Address
from relstore.errors import StorageError
from relstore.sessions.session import Session
from relstore.tests.support import overdue
from relstore.tests.support.emptying import Emptying, EmptyingMySQL, EmptyingPostgreSQL
from relstore.tests.support.layers import SQLiteFiles
from relstore.tests.support.left import THOROUGH, leave
from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.servers import MariaDBLayer, MySQLLayer, PgBouncerLayer, PostgreSQLLayer, cannot_run
from relstore.tests.support.watch import AnyWatch, MySQLWatch, Watch

MYSQLCLIENT = importlib.util.find_spec('MySQLdb') is not None


class Backend:
    keep_history = True
    # May a record have no bytes?
    takes_empty_records = True

    def setUp(self):
        overdue.limit(self)
        super().setUp()

    def address(self, name: str = 'main') -> Address:
        raise NotImplementedError

    def open_storage(self, name: str = 'main', **options) -> relstore.RelStore:
        return relstore.RelStore(self.address(name), keep_history=self.keep_history, **options)

    def refresh_statistics(self) -> None:
        """Have the size of tables estimated anew, where it is an estimate."""


class ServerBackend(Backend):
    """Where there is a server, it can be watched, and reached through a proxy."""
    # What the databases of a server are called, by what they are for: made once, emptied before each test.
    _databases: dict[tuple, str] = {}
    _numbers = itertools.count()
    _emptying: Emptying

    def setUp(self):
        self.layer.require(self)
        self._emptied = set()
        super().setUp()

    def _database(self, name: str) -> str:
        """Return what a database is called that was emptied when this test first named it."""
        key = self.layer.server, name, self.keep_history
        database = self._databases.get(key)
        if database is not None and name not in self._emptied and not self._empty(database):
            database = None
        if database is None:
            database = f'{name}_{"hp" if self.keep_history else "hf"}_{next(self._numbers)}'
            self._create(database)
            self._databases[key] = database
        self._emptied.add(name)
        return database

    def _create(self, database: str) -> None:
        self.layer.server.create_database(database)

    def _empty(self, database: str) -> bool:
        """Empty a database. False if that cannot be done: an earlier test has spoilt it, or left it to its threads."""
        try:
            with closing(self._watch(database)) as watch:
                self._disconnect(watch, database)
                self._emptying.empty((self.layer.server, database), watch, lambda: self._address_to(database),
                                     self.keep_history)
            return True
        except (AssertionError, StorageError, psycopg2.Error, pymysql.Error) as e:
            warnings.warn(f'{self.id()} gets a new database, for the old one cannot be emptied: {e}', stacklevel=1)
            return False

    def _disconnect(self, watch: AnyWatch, database: str) -> None:
        """End the connections of others to a database: what an earlier test left open would hold locks."""
        raise NotImplementedError

    def _watch(self, database: str) -> AnyWatch:
        """Return a connection to a database of this name."""
        raise NotImplementedError

    def _address_to(self, database: str) -> Address:
        """Return the address of a database of this name, as the administrator."""
        raise NotImplementedError

    def new_watch(self) -> AnyWatch:
        """Return a connection of the test's own to the database `main`."""
        raise NotImplementedError

    def new_proxy(self) -> CuttingProxy:
        """Return a new proxy to the server, not started."""
        return CuttingProxy(self.layer.server.address)

    def address_through(self, proxy: CuttingProxy) -> Address:
        """Return the address of the database `main` that reaches it through a proxy that was started."""
        raise NotImplementedError

    def follow_clock(self, adapter: relstore.adapters.base.Adapter) -> None:
        """Have the server take the time of each commit of an adapter to `main` from this process: a test moves it."""
        clock = self

        class Commit(adapter.commit_type):
            def finish(self):
                clock.set_clock(self.session, time.time())
                return super().finish()

        adapter.commit_type = Commit

    def set_clock(self, session: Session, now: float) -> None:
        """Set the clock that the server shows to a transaction."""
        raise NotImplementedError


class SQLiteBackend(Backend):
    layer = SQLiteFiles

    def setUp(self):
        self._directory = Path(tempfile.mkdtemp(prefix='relstore-sqlite-'))
        self.addCleanup(shutil.rmtree, self._directory)
        super().setUp()

    def address(self, name='main'):
        return relstore.SQLite(str(self._directory / name))


class PostgreSQLBackend(ServerBackend):
    layer = PostgreSQLLayer
    driver = ''
    _emptying = EmptyingPostgreSQL()

    def address(self, name='main', **options):
        return relstore.PostgreSQL(**self.arguments(name), **options)

    def arguments(self, name='main') -> dict:
        """Return the arguments of the address."""
        return {'dsn': self.dsn(name), 'driver': self.driver}

    def address_through(self, proxy):
        dsn = make_dsn(self.dsn(), host='127.0.0.1', port=proxy.port, sslmode='disable', gssencmode='disable')
        return relstore.PostgreSQL(dsn, driver=self.driver)

    def new_watch(self):
        return Watch(self.dsn())

    def follow_clock(self, adapter):
        """A copy of the function that finishes commits asks another clock, in whatever schema that is first found."""
        name = re.search(r'relstore_finish_\d+', adapter.sql.finish)[0]
        with closing(self.new_watch()) as watch:
            text = watch.one('SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname = %s', name)
            watch.rows('CREATE SCHEMA IF NOT EXISTS clock')
            watch.rows('CREATE OR REPLACE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS '
                       "$$ SELECT to_timestamp(current_setting('clock.now')::double precision) $$")
            watch.rows(re.sub(r'\bclock_timestamp\(\)', 'clock.clock_timestamp()',
                              text.replace(f'FUNCTION public.{name}', 'FUNCTION clock.finish')))
        self.addCleanup(self._drop_clock)
        adapter.sql.finish = adapter.sql.finish.replace(f'"public".{name}', 'clock.finish')
        super().follow_clock(adapter)

    def _drop_clock(self):
        with closing(self.new_watch()) as watch:
            watch.rows('DROP SCHEMA IF EXISTS clock CASCADE')

    def set_clock(self, session, now):
        session.all("SELECT set_config('clock.now', %s, true)", (str(now),))

    def dsn(self, name='main') -> str:
        """Return the DSN of a database that was emptied when this test first named it."""
        return self.layer.server.dsn(self._database(name))

    def _watch(self, database):
        return Watch(self.layer.server.dsn(database))

    def _disconnect(self, watch, database):
        # All, again and again: a pooler would lend what is about to end.
        def ended():
            return watch.rows(f'SELECT pg_terminate_backend(pid) FROM ({watch.others}) others')
        watch.until(lambda: not ended())

    def _address_to(self, database):
        return relstore.PostgreSQL(self.layer.server.dsn(database), driver=self.driver)


class PgBouncerBackend(PostgreSQLBackend):
    """Through pgbouncer, which has fewer servers than we have sessions. dsn() leads past it."""
    layer = PgBouncerLayer

    def arguments(self, name='main'):
        return {'dsn': self.layer.bouncer.dsn(self.dsn(name)), 'driver': self.driver}

    def new_proxy(self):
        return CuttingProxy(self.layer.bouncer.address)

    def address_through(self, proxy):
        dsn = make_dsn(self.arguments()['dsn'], host='127.0.0.1', port=proxy.port, sslmode='disable',
                       gssencmode='disable')
        return relstore.PostgreSQL(dsn, driver=self.driver)


class MySQLBackend(ServerBackend):
    """On MariaDB, unless a subclass says otherwise."""
    layer = MariaDBLayer
    driver = ''
    _emptying = EmptyingMySQL()

    def setUp(self):
        if self.driver == 'mysqlclient' and not MYSQLCLIENT:
            cannot_run(self, 'mysqlclient is not installed (it is compiled with gcc, pkg-config, libmariadb-dev and '
                             'the headers of Python)')
        super().setUp()

    def address(self, name='main', **options):
        return relstore.MySQL(**self.arguments(name), driver=self.driver, **options)

    def arguments(self, name='main') -> dict:
        """Return the arguments of a database that was emptied when this test first named it."""
        return self.layer.server.arguments(self._database(name))

    def address_through(self, proxy):
        server = self.layer.server
        return relstore.MySQL(**server.tcp_arguments(self._database('main'), proxy.port), driver=self.driver)

    def new_watch(self):
        return MySQLWatch(self.arguments())

    def set_clock(self, session, now):
        session.run('SET SESSION timestamp = %s', (now,))

    def refresh_statistics(self):
        with closing(self.new_watch()) as watch:
            watch.rows('ANALYZE TABLE object_state')

    def _watch(self, database):
        return MySQLWatch(self.layer.server.arguments(database))

    def _disconnect(self, watch, database):
        for pid, in watch.rows(watch.others):
            try:
                watch.rows(f'KILL {pid}')
            except pymysql.OperationalError as e:
                if e.args[0] != 1094:           # it has ended meanwhile
                    raise

    def _address_to(self, database):
        return relstore.MySQL(**self.layer.server.arguments(database), driver=self.driver)


class SQLiteHistoryPreserving(SQLiteBackend):
    keep_history = True


class SQLiteHistoryFree(SQLiteBackend):
    keep_history = False


class Psycopg2HistoryPreserving(PostgreSQLBackend):
    driver, keep_history = 'psycopg2', True


class Psycopg2HistoryFree(PostgreSQLBackend):
    driver, keep_history = 'psycopg2', False


class Psycopg3HistoryPreserving(PostgreSQLBackend):
    driver, keep_history = 'psycopg', True


class Psycopg3HistoryFree(PostgreSQLBackend):
    driver, keep_history = 'psycopg', False


class Psycopg2PooledHistoryPreserving(PgBouncerBackend):
    driver, keep_history = 'psycopg2', True


class Psycopg2PooledHistoryFree(PgBouncerBackend):
    driver, keep_history = 'psycopg2', False


class Psycopg3PooledHistoryPreserving(PgBouncerBackend):
    driver, keep_history = 'psycopg', True


class Psycopg3PooledHistoryFree(PgBouncerBackend):
    driver, keep_history = 'psycopg', False


class MySQLdbHistoryPreserving(MySQLBackend):
    driver, keep_history = 'mysqlclient', True


class MySQLdbHistoryFree(MySQLBackend):
    driver, keep_history = 'mysqlclient', False


class PyMySQLHistoryPreserving(MySQLBackend):
    driver, keep_history = 'pymysql', True


class PyMySQLHistoryFree(MySQLBackend):
    driver, keep_history = 'pymysql', False


class MySQLdbOnMySQLHistoryPreserving(MySQLdbHistoryPreserving):
    layer = MySQLLayer


class MySQLdbOnMySQLHistoryFree(MySQLdbHistoryFree):
    layer = MySQLLayer


class PyMySQLOnMySQLHistoryPreserving(PyMySQLHistoryPreserving):
    layer = MySQLLayer


class PyMySQLOnMySQLHistoryFree(PyMySQLHistoryFree):
    layer = MySQLLayer


MYSQL = (MySQLdbHistoryPreserving, MySQLdbHistoryFree, PyMySQLHistoryPreserving, PyMySQLHistoryFree,
         MySQLdbOnMySQLHistoryPreserving, MySQLdbOnMySQLHistoryFree)
# For what a driver has to do with. All else runs with one driver on MySQL.
PYMYSQL_ON_MYSQL = PyMySQLOnMySQLHistoryPreserving, PyMySQLOnMySQLHistoryFree

PGBOUNCER = (Psycopg2PooledHistoryPreserving, Psycopg2PooledHistoryFree,
             Psycopg3PooledHistoryPreserving, Psycopg3PooledHistoryFree)

HISTORY_PRESERVING = (SQLiteHistoryPreserving, Psycopg2HistoryPreserving, Psycopg3HistoryPreserving, *MYSQL[::2])
HISTORY_FREE = (SQLiteHistoryFree, Psycopg2HistoryFree, Psycopg3HistoryFree, *MYSQL[1::2])


# One mode of each database, for what hardly depends on the database, and takes long for another reason.
EITHER_MODE = (SQLiteHistoryPreserving, Psycopg3HistoryFree, MYSQL[0])
OTHER_MODE = tuple(backend for backend in HISTORY_PRESERVING + HISTORY_FREE if backend not in EITHER_MODE)


def cases(namespace: dict, *suites: type, backends: Iterable[type] = HISTORY_PRESERVING + HISTORY_FREE,
          thorough: Iterable[type] = (), each_driver: bool = False) -> list[type]:
    """Add to a module's `namespace` one test case for each suite on each backend; return them.

    thorough: backends for THOROUGH runs alone. each_driver: in each history mode, where that makes a difference.
    """
    run = tuple(backends) if each_driver or THOROUGH else tuple(_one_driver(tuple(backends)))
    made = []
    for suite in suites:
        for backend in (*backends, *thorough):
            name = f'{suite.__name__}{backend.__name__}'
            case = type(name, (backend, suite), {'__module__': namespace['__name__']})
            if THOROUGH or backend in run:
                namespace[name] = case
                made.append(case)
            else:
                leave(case)
    return made


def _one_driver(backends: tuple[type, ...]) -> Iterator[type]:
    """Yield the backends with one driver for each server and history mode: the first with history, the last without."""
    groups: dict[tuple, list[type]] = {}
    for backend in backends:
        groups.setdefault((getattr(backend, 'layer', backend), backend.keep_history), []).append(backend)
    for (_, keep_history), group in groups.items():
        usable = [backend for backend in group if MYSQLCLIENT or getattr(backend, 'driver', '') != 'mysqlclient']
        yield (usable or group)[0 if keep_history else -1]
