"""A schema that is renamed, or changes places with another, while it is in use."""
import unittest
from contextlib import closing

from ZODB.utils import z64

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.support.backends import Psycopg2HistoryFree, Psycopg3HistoryPreserving, cases
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state


class Renamed(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)
        self.run_sql('DROP SCHEMA IF EXISTS one CASCADE; DROP SCHEMA IF EXISTS other CASCADE; CREATE SCHEMA one')

    def run_sql(self, sql):
        with closing(self.watch._connection.cursor()) as cursor:
            cursor.execute(sql)

    def opened(self, schema):
        storage = relstore.RelStore(relstore.PostgreSQL(self.dsn(), driver=self.driver, schema=schema),
                                    keep_history=self.keep_history)
        self.addCleanup(storage.close)
        return storage

    def test_it_is_told(self):
        storage = self.opened('one')
        commit(storage, (storage.new_oid(), z64, state(0)))
        reader = storage.new_instance()
        self.addCleanup(reader.release)
        reader.poll_invalidations()
        reader.afterCompletion()
        self.run_sql('ALTER SCHEMA one RENAME TO other')
        with self.assertRaisesRegex(ConfigurationError, r'Schema one .* renamed or dropped .*one'):
            reader.poll_invalidations()
        self.run_sql('ALTER SCHEMA other RENAME TO one')
        reader.poll_invalidations()
        reader.afterCompletion()

    def test_another_takes_its_name(self):
        storage = self.opened('one')
        oid = storage.new_oid()
        commit(storage, (oid, z64, state(0)))
        reader = storage.new_instance()
        self.addCleanup(reader.release)
        reader.poll_invalidations()
        reader.load(oid)
        reader.afterCompletion()
        self.run_sql('ALTER SCHEMA one RENAME TO other; CREATE SCHEMA one')
        self.opened('one')
        with self.assertLogs('relstore', 'WARNING') as logs:
            reader.poll_invalidations()
        self.assertIn('another has its name now', '\n'.join(logs.output))
        self.assertRaises(KeyError, reader.load, oid)
        reader.afterCompletion()


cases(globals(), Renamed, backends=(Psycopg2HistoryFree, Psycopg3HistoryPreserving))
del Renamed
