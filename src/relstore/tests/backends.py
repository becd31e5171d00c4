"""The databases that a suite runs on: mix one of these into a test case.

    class Test(PostgreSQL2HistoryFree, unittest.TestCase): ...

`self.adapter()` leads to an empty database, and `self.open_storage()` opens it; other names are other databases.
"""
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import psycopg2

import relstore
from relstore.tests.servers import PostgreSQLLayer


class Backend:
    keep_history = True

    def adapter(self, name: str = 'main') -> relstore.adapters.base.Adapter:
        raise NotImplementedError

    def open_storage(self, name: str = 'main', **options) -> relstore.RelStore:
        return relstore.RelStore(self.adapter(name), keep_history=self.keep_history, **options)


class SQLiteBackend(Backend):

    def setUp(self):
        self._directory = Path(tempfile.mkdtemp(prefix='relstore-sqlite-'))
        self.addCleanup(shutil.rmtree, self._directory)
        super().setUp()

    def adapter(self, name='main'):
        return relstore.SQLite(str(self._directory / name))


class PostgreSQLBackend(Backend):
    layer = PostgreSQLLayer
    driver = ''
    # (server, database) pairs there are, made once and emptied before each test that uses them.
    _databases: set = set()

    def setUp(self):
        self.layer.require(self)
        self._emptied = set()
        super().setUp()

    def adapter(self, name='main'):
        return relstore.PostgreSQL(self.dsn(name), driver=self.driver)

    def dsn(self, name='main') -> str:
        """Return the DSN of a database that was emptied when this test first named it."""
        server = self.layer.server
        database = f'{name}_{"hp" if self.keep_history else "hf"}'
        if (server, database) not in self._databases:
            server.create_database(database)
            self._databases.add((server, database))
        elif name not in self._emptied:
            self._empty(server.dsn(database))
        self._emptied.add(name)
        return server.dsn(database)

    def _empty(self, dsn: str) -> None:
        with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
            # Whatever an earlier test left open would make TRUNCATE wait.
            cursor.execute('SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
                           'WHERE datname = current_database() AND pid <> pg_backend_pid()')
        storage = relstore.RelStore(relstore.PostgreSQL(dsn, driver=self.driver), keep_history=self.keep_history)
        storage.zap_all()
        storage.close()


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


HISTORY_PRESERVING = (SQLiteHistoryPreserving, Psycopg2HistoryPreserving, Psycopg3HistoryPreserving)
HISTORY_FREE = (SQLiteHistoryFree, Psycopg2HistoryFree, Psycopg3HistoryFree)


def cases(namespace: dict, *suites: type, backends: tuple = HISTORY_PRESERVING + HISTORY_FREE) -> list[type]:
    """Add to a module's `namespace` one test case for each suite on each backend; return them."""
    made = []
    for suite in suites:
        for backend in backends:
            name = f'{suite.__name__}{backend.__name__}'
            namespace[name] = type(name, (backend, suite), {'__module__': namespace['__name__']})
            made.append(namespace[name])
    return made
