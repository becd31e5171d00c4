"""Databases of other encodings than UTF-8, and settings that ask for others: text travels as UTF-8 all the same."""
import unittest
from contextlib import closing

import transaction
from persistent.mapping import PersistentMapping
from ZODB import DB

import relstore
from relstore.errors import DatabaseError
from relstore.tests.support.backends import PGBOUNCER, Psycopg2HistoryPreserving, Psycopg3HistoryPreserving, cases
from relstore.tests.support.watch import Watch

USER, DESCRIPTION = 'Jürgen', 'Größe geändert: 日本'


class Encodings(unittest.TestCase):

    def database(self, encoding):
        """Return the DSN of a new database."""
        server, name = self.layer.server, f'encoding_{encoding.lower()}'
        self.addCleanup(server.drop_database, name)
        return server.create_database(name, encoding)

    def use(self, direct, *texts):
        bouncer = getattr(self.layer, 'bouncer', None)
        dsn = bouncer.dsn(direct) if bouncer else direct
        for _ in range(2):
            storage = relstore.RelStore(relstore.PostgreSQL(dsn, driver=self.driver), keep_history=True)
            with closing(DB(storage)) as db:
                with db.transaction() as connection:
                    connection.root()['ü'] = PersistentMapping(ü='ß')
                    connection.transaction_manager.get().setUser(USER)
                    connection.transaction_manager.get().note(DESCRIPTION)
                [newest, *_] = db.undoLog(0, 1)
                self.assertEqual((newest['user_name'].split()[-1], newest['description']),
                                 (USER, DESCRIPTION))
                with db.transaction() as connection:
                    self.assertEqual(connection.root()['ü']['ü'], 'ß')
                for text in texts:
                    with closing(storage.database.adapter.connect()) as session:
                        with self.assertRaisesRegex(DatabaseError, text):
                            session.run(f'SELECT "{text}"')
                        self.assertEqual(session.all('SELECT %s::text', (text,)), [(text,)])
                        [[encoding]] = session.all('SHOW client_encoding')
                        self.assertEqual(encoding, 'UTF8')
        transaction.abort()

    def test_sql_ascii(self):
        self.use(self.database('SQL_ASCII'), 'Größe', '日本')

    def test_latin1(self):
        self.use(self.database('LATIN1'), 'Größe')

    def test_setting_of_the_database(self):
        direct = self.database('UTF8')
        with closing(Watch(direct)) as watch:
            watch.rows('ALTER DATABASE encoding_utf8 SET client_encoding = SQL_ASCII')
        self.use(direct, 'Größe', '日本')

    def test_setting_of_the_database_to_another(self):
        direct = self.database('UTF8')
        with closing(Watch(direct)) as watch:
            watch.rows('ALTER DATABASE encoding_utf8 SET client_encoding = LATIN1')
        self.use(direct, 'Größe', '日本')


cases(globals(), Encodings, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryPreserving, *PGBOUNCER[::2]),
      each_driver=True)
del Encodings
