"""A database that RelStorage made is opened as it is: nothing is lost, nothing is copied, no oid is given twice.

RelStorage itself is not needed: the tables are made here, as version 4.3 makes them.
"""
import re
import sqlite3
import unittest
from contextlib import closing
from hashlib import md5

import psycopg2
import transaction
import ZODB
from persistent.mapping import PersistentMapping
from ZODB.MappingStorage import MappingStorage
from ZODB.POSException import POSKeyError
from ZODB.tests.MinPO import MinPO
from ZODB.tests.StorageTestBase import zodb_pickle
from ZODB.utils import p64, u64, z64

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.servers import PostgreSQLLayer
from relstore.tests.test_storage import commit

#: {id} {bytes} {bool} {chunk} {md5} are the database's types, {yes} {no} its booleans.
PRESERVING = """
CREATE TABLE commit_row_lock (tid {id} PRIMARY KEY);
INSERT INTO commit_row_lock VALUES (0);
CREATE TABLE "transaction" (
    tid {id} NOT NULL PRIMARY KEY,
    packed {bool} DEFAULT {no} NOT NULL,
    is_empty {bool} DEFAULT {no} NOT NULL,
    username {bytes} NOT NULL, description {bytes} NOT NULL, extension {bytes});
INSERT INTO "transaction" (tid, username, description) VALUES (0, CAST('system' AS {bytes}), CAST('' AS {bytes}));
CREATE TABLE object_state (
    zoid {id} NOT NULL,
    tid {id} NOT NULL REFERENCES "transaction" CHECK (tid > 0),
    prev_tid {id} NOT NULL REFERENCES "transaction",
    md5 {md5}, state_size {id} NOT NULL CHECK (state_size >= 0), state {bytes},
    CONSTRAINT object_state_pk PRIMARY KEY (zoid, tid));
CREATE INDEX object_state_tid ON object_state (tid);
CREATE INDEX object_state_prev_tid ON object_state (prev_tid);
CREATE TABLE blob_chunk (
    zoid {id} NOT NULL, tid {id} NOT NULL, chunk_num {id} NOT NULL, chunk {chunk} NOT NULL,
    CONSTRAINT blob_chunk_pk PRIMARY KEY (zoid, tid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid, tid) REFERENCES object_state (zoid, tid) ON DELETE CASCADE);
CREATE INDEX blob_chunk_lookup ON blob_chunk (zoid, tid);
CREATE TABLE current_object (
    zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL,
    FOREIGN KEY (zoid, tid) REFERENCES object_state (zoid, tid));
CREATE INDEX current_object_tid ON current_object (tid);
CREATE TABLE object_ref (
    zoid {id} NOT NULL, tid {id} NOT NULL, to_zoid {id} NOT NULL, PRIMARY KEY (tid, zoid, to_zoid));
CREATE TABLE object_refs_added (tid {id} NOT NULL PRIMARY KEY);
CREATE TABLE pack_object (
    zoid {id} NOT NULL PRIMARY KEY, keep {bool} NOT NULL, keep_tid {id} NOT NULL, visited {bool} DEFAULT {no} NOT NULL);
CREATE TABLE pack_state (tid {id} NOT NULL, zoid {id} NOT NULL, PRIMARY KEY (tid, zoid));
CREATE TABLE pack_state_tid (tid {id} NOT NULL PRIMARY KEY);
CREATE VIEW current_object_state AS
    SELECT zoid, tid, state FROM object_state INNER JOIN current_object USING (zoid, tid);
"""

FREE = """
CREATE TABLE commit_row_lock (tid {id} PRIMARY KEY);
INSERT INTO commit_row_lock VALUES (0);
CREATE TABLE object_state (
    zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL CHECK (tid > 0),
    state_size {id} NOT NULL CHECK (state_size >= 0), state {bytes});
CREATE INDEX object_state_tid ON object_state (tid);
CREATE TABLE blob_chunk (
    zoid {id} NOT NULL, chunk_num {id} NOT NULL, tid {id} NOT NULL, chunk {chunk} NOT NULL,
    CONSTRAINT blob_chunk_pk PRIMARY KEY (zoid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid) REFERENCES object_state (zoid) ON DELETE CASCADE);
CREATE INDEX blob_chunk_lookup ON blob_chunk (zoid);
CREATE TABLE object_ref (zoid {id} NOT NULL, to_zoid {id} NOT NULL, tid {id} NOT NULL, PRIMARY KEY (zoid, to_zoid));
CREATE TABLE object_refs_added (zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL);
CREATE TABLE pack_object (
    zoid {id} NOT NULL PRIMARY KEY, keep {bool} NOT NULL, keep_tid {id} NOT NULL, visited {bool} DEFAULT {no} NOT NULL);
"""

SQLITE = {'id': 'INTEGER', 'bytes': 'BLOB', 'bool': 'INTEGER', 'chunk': 'BLOB', 'md5': 'TEXT', 'no': '0'}
POSTGRESQL = {'id': 'BIGINT', 'bytes': 'BYTEA', 'bool': 'BOOLEAN', 'chunk': 'OID', 'md5': 'CHAR(32)', 'no': 'FALSE'}

MYSQL_TYPES = {'bytes': 'LONGBLOB', 'bool': 'BOOLEAN', 'chunk': 'LONGBLOB', 'md5': 'CHAR(32) CHARACTER SET ascii',
               'no': 'FALSE'}
UNSIGNED = ('commit_row_lock', 'transaction', 'pack_object')

DELETED = 5         # an object that was deleted


def site():
    """Return the transactions of a small site: (tid, user, {oid: state, None where it was deleted}), as integers."""
    db = ZODB.DB(MappingStorage())
    manager = transaction.TransactionManager()
    root = db.open(manager).root()
    for n in range(3):
        if n == 1:
            for _ in range(1000):
                db.storage.new_oid()
        manager.get().setUser('anna')
        root[f'child {n}'] = PersistentMapping(n=n)
        root['count'] = n
        manager.commit()
    transactions = [(u64(txn.tid), txn.user, {u64(record.oid): record.data for record in txn})
                    for txn in db.storage.iterator()]
    last = transactions[-1][0]
    db.close()
    return [*transactions, (last + 10, b'bo', {DELETED: zodb_pickle(MinPO(1))}), (last + 20, b'bo', {DELETED: None})]


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.site = site()
        self.current = {oid: (state, tid) for tid, _, states in self.site for oid, state in states.items()}
        self.largest = max(self.current)
        self.make()

    def make(self):
        """Make the database, as RelStorage leaves it."""
        raise NotImplementedError

    def fill(self, execute, binary):
        """Insert the site. Objects that were deleted have no row where no history is kept."""
        current = {}
        for tid, user, states in self.site:
            if self.keep_history:
                execute('INSERT INTO "transaction" (tid, username, description, extension) VALUES (?, ?, ?, ?)',
                        (tid, binary(user), binary(b'by RelStorage'), binary(b'')))
            for oid, state in states.items():
                data = None if state is None else binary(state)
                if self.keep_history:
                    execute('INSERT INTO object_state (zoid, tid, prev_tid, md5, state_size, state) '
                            'VALUES (?, ?, ?, ?, ?, ?)',
                            (oid, tid, current.get(oid, 0), None if state is None else md5(state).hexdigest(),
                             len(state or b''), data))
                current[oid] = tid
        for oid, (state, tid) in self.current.items():
            if self.keep_history:
                execute('INSERT INTO current_object (zoid, tid) VALUES (?, ?)', (oid, tid))
            elif state is not None:
                execute('INSERT INTO object_state (zoid, tid, state_size, state) VALUES (?, ?, ?, ?)',
                        (oid, tid, len(state), binary(state)))

    def execute(self, sql):
        """Run a statement without relstore; return its rows."""
        raise NotImplementedError

    def opened(self, **options):
        storage = self.open_storage('adopted', **options)
        self.addCleanup(storage.close)
        return storage

    def test_objects_are_there(self):
        storage = self.opened()
        for oid, (state, tid) in self.current.items():
            if state is None:
                with self.assertRaises(POSKeyError):
                    storage.load(p64(oid))
            else:
                self.assertEqual(storage.load(p64(oid)), (state, p64(tid)))

    def test_transactions_are_there(self):
        if not self.keep_history:
            self.skipTest('needs history')
        found = [(u64(txn.tid), txn.user, {u64(record.oid): record.data for record in txn})
                 for txn in self.opened().iterator()]
        self.assertEqual(found, self.site)

    def test_rows_stay_as_they_were(self):
        names = 'zoid, tid, prev_tid, md5, state_size, state' if self.keep_history else 'zoid, tid, state_size, state'
        before = self.execute(f'SELECT {names} FROM object_state ORDER BY zoid, tid')
        self.opened().close()
        self.assertEqual(self.execute(f'SELECT {names} FROM object_state ORDER BY zoid, tid'), before)
        self.assertEqual(self.execute('SELECT count(*) FROM object_state WHERE refs IS NOT NULL'), [(0,)])

    def test_opening_it_again_changes_nothing(self):
        self.opened().close()
        before = self.schema()
        self.opened(create_schema=False)
        self.assertEqual(self.schema(), before)

    def test_new_oids_are_new(self):
        """Also where the counter is behind, as after a restore of half a backup."""
        storage = self.opened()
        oids = [u64(storage.new_oid()) for _ in range(200)]
        self.assertEqual(len(set(oids)), 200)
        self.assertGreater(min(oids), self.largest)

    def test_site_goes_on(self):
        db = ZODB.DB(self.opened())
        with db.transaction() as connection:
            root = connection.root()
            self.assertEqual([root[f'child {n}']['n'] for n in range(3)], [0, 1, 2])
            root['child 1']['n'] = 'changed'
            root['new'] = PersistentMapping()
        db.close()
        db = ZODB.DB(self.opened())
        with db.transaction() as connection:
            self.assertEqual(connection.root()['child 1']['n'], 'changed')
            self.assertGreater(u64(connection.root()['new']._p_oid), self.largest)
        db.close()

    def test_undo_of_what_relstorage_wrote(self):
        if not self.keep_history:
            self.skipTest('needs history')
        storage = self.opened()
        db = ZODB.DB(storage)
        for tid in self.site[-1][0], self.site[-3][0]:      # the deletion, and the last change of the root
            manager = transaction.TransactionManager()
            db.undo(next(entry['id'] for entry in db.undoInfo() if u64(entry['id']) == tid), manager.get())
            manager.commit()
        self.assertEqual(storage.load(p64(DELETED))[0], zodb_pickle(MinPO(1)))
        with db.transaction() as connection:
            self.assertEqual(connection.root()['count'], 1)
        db.close()

    def test_other_history_mode_is_refused(self):
        before = self.schema()
        with self.assertRaisesRegex(ConfigurationError, 'keep-history'):
            relstore.RelStore(self.adapter('adopted'), keep_history=not self.keep_history)
        self.assertEqual(self.schema(), before)

    def test_nothing_is_added_where_that_is_not_allowed(self):
        before = self.schema()
        for options in {'create_schema': False}, {'read_only': True}:
            with self.assertRaisesRegex(ConfigurationError, 'relstore_meta.*refs'):
                self.open_storage('adopted', **options)
        self.assertEqual(self.schema(), before)

    def schema(self):
        """What there is in the database: tables and columns."""
        raise NotImplementedError


class OnSQLite(Suite):
    COUNTER = 63            # 63 * 16 > 1004: where RelStorage's counter stands

    def make(self):
        self.directory = self.adapter('adopted').data_dir
        self.directory.mkdir()
        self.path = self.directory / 'main.sqlite3'
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute('PRAGMA journal_mode = WAL')
            connection.executescript((PRESERVING if self.keep_history else FREE).format(**SQLITE))
            self.fill(connection.execute, bytes)
        with closing(sqlite3.connect(self.directory / 'oids.sqlite3')) as connection, connection:
            connection.execute('CREATE TABLE new_oid (zoid INTEGER PRIMARY KEY NOT NULL)')
            connection.execute('INSERT INTO new_oid VALUES (?)', (self.COUNTER,))

    def execute(self, sql):
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(sql).fetchall()

    def schema(self):
        return self.execute('SELECT name, sql FROM sqlite_master ORDER BY name')

    def counter(self):
        with closing(sqlite3.connect(self.directory / 'oids.sqlite3')) as connection:
            [[value]] = connection.execute('SELECT zoid FROM new_oid')
            return value

    def set_counter(self, value):
        with closing(sqlite3.connect(self.directory / 'oids.sqlite3')) as connection, connection:
            connection.execute('UPDATE new_oid SET zoid = ?', (value,))

    def test_counter_of_relstorage_goes_with_ours(self):
        """RelStorage trusts it blindly, when the site goes back."""
        storage = self.opened()
        for _ in range(100):
            self.assertLessEqual(u64(storage.new_oid()), 16 * self.counter())

    def test_counter_of_relstorage_is_ahead(self):
        """It has given out oids of objects that are not stored yet, or are packed away."""
        self.set_counter(10_000)
        self.assertGreater(u64(self.opened().new_oid()), 160_000)

    def test_counter_of_relstorage_is_behind(self):
        self.set_counter(2)
        oid = u64(self.opened().new_oid())
        self.assertGreater(oid, self.largest)
        self.assertGreaterEqual(16 * self.counter(), oid)

    def test_counter_of_relstorage_is_gone(self):
        """As after a backup of main.sqlite3 alone."""
        (self.directory / 'oids.sqlite3').unlink()
        self.assertGreater(u64(self.opened().new_oid()), self.largest)
        self.assertFalse((self.directory / 'oids.sqlite3').exists())

    def test_its_indexes_are_kept(self):
        """Also the one that a new database does without."""
        before = self.indexes(self.path)
        self.opened().close()
        after = self.indexes(self.path)
        self.assertLessEqual(before, after)
        new, storage = self.adapter('new'), self.open_storage('new')
        self.addCleanup(storage.close)
        missing = {'current_object_tid'} if self.keep_history else set()
        self.assertEqual(after - self.indexes(new.path) - {'object_state_prev_tid'}, missing)
        storage.database.adapter.make_index_for_relstorage()
        self.assertEqual(missing - self.indexes(new.path), set())

    def indexes(self, path):
        with closing(sqlite3.connect(path)) as connection:
            return {name for name, in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'index' "
                "AND tbl_name IN ('object_state', 'current_object')")}

    def test_relstorage_counted_on_between(self):
        storage = self.opened()
        storage.new_oid()
        storage.close()
        self.set_counter(500)
        self.assertGreater(u64(self.opened().new_oid()), 8000)


class OnPostgreSQL(Suite):
    layer = PostgreSQLLayer
    COUNTER = 2             # 2 * 16 < 1004: behind

    def make(self):
        with closing(psycopg2.connect(self.dsn('adopted'))) as connection, connection, connection.cursor() as cursor:
            cursor.execute('DROP SCHEMA public CASCADE; CREATE SCHEMA public')
            cursor.execute((PRESERVING if self.keep_history else FREE).format(**POSTGRESQL))
            cursor.execute(f"CREATE SEQUENCE zoid_seq; SELECT setval('zoid_seq', {self.COUNTER})")
            self.fill(lambda sql, parameters: cursor.execute(sql.replace('?', '%s'), parameters), psycopg2.Binary)

    def execute(self, sql):
        with closing(psycopg2.connect(self.dsn('adopted'))) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return [tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)
                    for row in cursor.fetchall()]

    def schema(self):
        return self.execute('SELECT attrelid::regclass::text, attname, atttypid::regtype::text FROM pg_attribute '
                            "WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace) "
                            'ORDER BY 1, 2')

    def test_its_indexes_are_kept(self):
        """Also the one that a new database does without, where to change an object then changes no index."""
        before = self.indexes('adopted')
        self.opened().close()
        after = self.indexes('adopted')
        self.assertLessEqual(before, after)
        storage = self.open_storage('new')
        self.addCleanup(storage.close)
        missing = {'current_object_tid'} if self.keep_history else set()
        self.assertEqual(after - self.indexes('new') - {'object_state_prev_tid'}, missing)
        storage.database.adapter.make_index_for_relstorage()
        self.addCleanup(self.drop_index)
        self.assertEqual(missing - self.indexes('new'), set())

    def test_index_that_was_not_finished(self):
        """PostgreSQL leaves it where it is, and CREATE INDEX IF NOT EXISTS is content."""
        if not self.keep_history:
            self.skipTest('there is no such index')
        storage = self.open_storage('new')
        self.addCleanup(storage.close)
        self.addCleanup(self.drop_index)
        commit(storage, *[lambda txn, n=n: storage.store(p64(n), z64, b'', '', txn) for n in (1, 2)])
        with closing(psycopg2.connect(self.dsn('new'))) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            with self.assertRaises(psycopg2.errors.UniqueViolation):
                cursor.execute('CREATE UNIQUE INDEX CONCURRENTLY current_object_tid ON current_object (tid)')
            valid = "SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = 'current_object_tid'::regclass"
            cursor.execute(valid)
            self.assertEqual(cursor.fetchall(), [(False, True)])
            storage.database.adapter.make_index_for_relstorage()
            cursor.execute(valid)
            self.assertEqual(cursor.fetchall(), [(True, False)])

    def drop_index(self):
        with closing(psycopg2.connect(self.dsn('new'))) as connection, connection, connection.cursor() as cursor:
            cursor.execute('DROP INDEX IF EXISTS current_object_tid')

    def indexes(self, name):
        with closing(psycopg2.connect(self.dsn(name))) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT indexname FROM pg_indexes WHERE tablename IN ('object_state', 'current_object')")
            return {name for name, in cursor.fetchall()}

    def test_large_objects_are_unlinked_with_their_chunks(self):
        """RelStorage's trigger does it where it is there; it is not here, so ours has come."""
        self.opened().close()
        [[count]] = self.execute("SELECT count(*) FROM pg_trigger WHERE tgname = 'blob_chunk_delete'")
        self.assertEqual(count, 1)


class OnMySQL(Suite):
    """RelStorage 4 makes such a database on MySQL only, and history-free; others come from older servers."""
    COUNTER = 2             # behind

    def make(self):
        server, database = self.layer.server, self._database('adopted')
        server.drop_database(database)
        server.create_database(database)
        self._databases.add((server, database))
        self._emptied.add('adopted')
        self.connection = server.connect(database)
        self.addCleanup(self.connection.close)
        self.execute("SET sql_mode = 'STRICT_ALL_TABLES,ANSI_QUOTES,NO_AUTO_VALUE_ON_ZERO'")
        for statement in (PRESERVING if self.keep_history else FREE).strip().split(';\n'):
            self.execute(self._as_there(statement).rstrip(';'))
        self.execute('CREATE TABLE new_oid (zoid BIGINT UNSIGNED NOT NULL PRIMARY KEY AUTO_INCREMENT)')
        self.execute(f'INSERT INTO new_oid VALUES ({self.COUNTER})')
        self.fill(lambda sql, parameters: self.execute(sql.replace('?', '%s'), parameters), bytes)

    @staticmethod
    def _as_there(statement):
        """Ids are signed in some tables and not in others, and references between them were ignored."""
        table = re.match(r'\s*CREATE TABLE "?(\w+)', statement)
        unsigned = ' UNSIGNED' if table and table[1] in UNSIGNED else ''
        statement = statement.replace(' REFERENCES "transaction"', '').replace('AS {bytes}', 'AS BINARY')
        return statement.format(id=f'BIGINT{unsigned}', **MYSQL_TYPES)

    def execute(self, sql, parameters=None):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall())

    def schema(self):
        return self.execute('SELECT table_name, column_name, column_type FROM information_schema.columns '
                            'WHERE table_schema = DATABASE() ORDER BY 1, 2')

    def test_counter_of_relstorage_goes_on(self):
        """RelStorage trusts it, when the site goes back: value n stands for the oids up to 16n."""
        oid = u64(self.opened().new_oid())
        self.execute('INSERT INTO new_oid VALUES (NULL)')
        [[block]] = self.execute('SELECT LAST_INSERT_ID()')
        self.assertGreater(16 * block - 15, oid)


cases(globals(), OnMySQL, backends=MYSQL)
cases(globals(), OnSQLite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
cases(globals(), OnPostgreSQL, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving))
del Suite, OnSQLite, OnPostgreSQL, OnMySQL
