"""Databases that RelStorage made, for tests: without it, the tables are made as version 4.3 makes them."""
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
from ZODB.tests.MinPO import MinPO
from ZODB.tests.StorageTestBase import zodb_pickle
from ZODB.utils import u64

from relstore.tests.support.servers import PostgreSQLLayer

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


class Adopted(unittest.TestCase):
    """Mixed with a backend, and one of the classes below: the database `adopted` is RelStorage's, and has a site."""
    # Else it is empty.
    has_site = True

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

    def schema(self):
        """What there is in the database: tables and columns."""
        raise NotImplementedError


class AdoptedSQLite:
    COUNTER = 63            # 63 * 16 > 1004: where RelStorage's counter stands

    def make(self):
        self.directory = self.address('adopted').data_dir
        self.directory.mkdir()
        self.path = self.directory / 'main.sqlite3'
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute('PRAGMA journal_mode = WAL')
            if not self.has_site:
                return
            connection.executescript((PRESERVING if self.keep_history else FREE).format(**SQLITE))
            self.fill(connection.execute, bytes)
        with closing(sqlite3.connect(self.directory / 'oids.sqlite3')) as connection, connection:
            connection.execute('CREATE TABLE new_oid (zoid INTEGER PRIMARY KEY NOT NULL)')
            connection.execute('INSERT INTO new_oid VALUES (?)', (self.COUNTER,))

    def execute(self, sql):
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(sql).fetchall()

    def schema(self):
        return self.execute('SELECT name, sql FROM sqlite_master ORDER BY name')


class AdoptedPostgreSQL:
    layer = PostgreSQLLayer
    COUNTER = 2             # 2 * 16 < 1004: behind

    def make(self):
        with closing(psycopg2.connect(self.dsn('adopted'))) as connection, connection, connection.cursor() as cursor:
            cursor.execute('DROP SCHEMA public CASCADE; CREATE SCHEMA public')
            if not self.has_site:
                self.addCleanup(self.execute, 'DROP SCHEMA public CASCADE; CREATE SCHEMA public')
                return
            cursor.execute((PRESERVING if self.keep_history else FREE).format(**POSTGRESQL))
            cursor.execute(f"CREATE SEQUENCE zoid_seq; SELECT setval('zoid_seq', {self.COUNTER})")
            self.fill(lambda sql, parameters: cursor.execute(sql.replace('?', '%s'), parameters), psycopg2.Binary)

    def execute(self, sql):
        with closing(psycopg2.connect(self.dsn('adopted'))) as connection, connection, connection.cursor() as cursor:
            cursor.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
            return [tuple(bytes(value) if isinstance(value, memoryview) else value for value in row) for row in rows]

    def schema(self):
        return self.execute('SELECT attrelid::regclass::text, attname, atttypid::regtype::text FROM pg_attribute '
                            "WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace) "
                            'ORDER BY 1, 2')


class AdoptedMySQL:
    """RelStorage 4 makes such a database on MySQL only, and history-free; others come from older servers."""
    COUNTER = 2             # behind

    def make(self):
        server, database = self.layer.server, f'adopted_{"hp" if self.keep_history else "hf"}'
        server.drop_database(database)
        server.create_database(database)
        self._databases[server, 'adopted', self.keep_history] = database
        self._emptied.add('adopted')
        self.connection = server.connect(database)
        self.addCleanup(self.connection.close)
        self.execute("SET sql_mode = 'STRICT_ALL_TABLES,ANSI_QUOTES,NO_AUTO_VALUE_ON_ZERO'")
        if not self.has_site:
            return
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
