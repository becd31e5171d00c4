"""A database that RelStorage made is opened as it is: nothing is lost, nothing is copied, no oid is given twice."""
import sqlite3
from contextlib import closing

import psycopg2
import transaction
import ZODB
from persistent.mapping import PersistentMapping
from ZODB.POSException import POSKeyError
from ZODB.tests.MinPO import MinPO
from ZODB.tests.StorageTestBase import zodb_pickle
from ZODB.utils import p64, u64, z64

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.support.adopted import DELETED, Adopted, AdoptedMySQL, AdoptedPostgreSQL, AdoptedSQLite
from relstore.tests.support.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import perform


class Suite(Adopted):

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
            relstore.RelStore(self.address('adopted'), keep_history=not self.keep_history)
        self.assertEqual(self.schema(), before)

    def test_nothing_is_added_where_that_is_not_allowed(self):
        before = self.schema()
        for options in {'create_schema': False}, {'read_only': True}:
            with self.assertRaisesRegex(ConfigurationError, 'relstore_meta.*refs'):
                self.open_storage('adopted', **options)
        self.assertEqual(self.schema(), before)


class OnSQLite(AdoptedSQLite, Suite):

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

    def test_counter_of_relstorage_falls_behind(self):
        """As where a backup of it takes its place, between two processes of ours."""
        storage = self.opened()
        oid = max(u64(storage.new_oid()) for _ in range(100))
        storage.close()
        self.set_counter(2)
        self.opened().close()
        self.assertGreaterEqual(16 * self.counter(), oid)

    def test_counter_of_relstorage_was_ahead_and_is_gone(self):
        """Ours counts on from there: whether that was ahead when we came, or came to be while we were there."""
        self.set_counter(10_000)
        self.opened().close()
        self.assertGreater(self.first_without_counter(), 160_000)
        storage = self.opened()
        self.set_counter(20_000)
        self.assertGreater(max(u64(storage.new_oid()) for _ in range(50)), 320_000)
        storage.close()
        self.assertGreater(self.first_without_counter(), 320_000)

    def first_without_counter(self):
        """Return the first oid that is given where RelStorage's counter is not there."""
        path = self.directory / 'oids.sqlite3'
        aside = path.rename(path.with_suffix('.aside'))
        storage = self.opened()
        oid = u64(storage.new_oid())
        storage.close()
        aside.rename(path)
        return oid

    def test_objects_that_bring_their_oids_along(self):
        """RelStorage does not give these, nor the others of their block."""
        storage = self.opened()
        for oid in 80_001, 160_000, 240_015:
            perform(storage, lambda txn, oid=oid: storage.store(p64(oid), z64, b'', '', txn))
            self.assertGreaterEqual(16 * self.counter(), oid)
            self.assertLess(16 * self.counter(), oid + 16)

    def test_relstorage_makes_its_counter(self):
        """The file is there, and no table in it yet."""
        (self.directory / 'oids.sqlite3').write_bytes(b'')
        self.assertGreater(u64(self.opened().new_oid()), self.largest)

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
        new, storage = self.address('new'), self.open_storage('new')
        self.addCleanup(storage.close)
        missing = {'current_object_tid'} if self.keep_history else set()
        self.assertEqual(after - self.indexes(new.path) - {'object_state_prev_tid'}, missing)
        storage.database.adapter.writers.make_index()
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


class OnPostgreSQL(AdoptedPostgreSQL, Suite):

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
        storage.database.adapter.writers.make_index()
        self.addCleanup(self.drop_index)
        self.assertEqual(missing - self.indexes('new'), set())

    def test_index_that_was_not_finished(self):
        """PostgreSQL leaves it where it is, and CREATE INDEX IF NOT EXISTS is content."""
        if not self.keep_history:
            self.skipTest('there is no such index')
        storage = self.open_storage('new')
        self.addCleanup(storage.close)
        self.addCleanup(self.drop_index)
        perform(storage, *[lambda txn, n=n: storage.store(p64(n), z64, b'', '', txn) for n in (1, 2)])
        with closing(psycopg2.connect(self.dsn('new'))) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            with self.assertRaises(psycopg2.errors.UniqueViolation):
                cursor.execute('CREATE UNIQUE INDEX CONCURRENTLY current_object_tid ON current_object (tid)')
            valid = "SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = 'current_object_tid'::regclass"
            cursor.execute(valid)
            self.assertEqual(cursor.fetchall(), [(False, True)])
            storage.database.adapter.writers.make_index()
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


class OnMySQL(AdoptedMySQL, Suite):

    def test_counter_of_relstorage_goes_on(self):
        """RelStorage trusts it, when the site goes back: value n stands for the oids up to 16n."""
        oid = u64(self.opened().new_oid())
        self.execute('INSERT INTO new_oid VALUES (NULL)')
        [[block]] = self.execute('SELECT LAST_INSERT_ID()')
        self.assertGreater(16 * block - 15, oid)


CASES = [
    *cases(globals(), OnMySQL, backends=MYSQL),
    *cases(globals(), OnSQLite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree)),
    *cases(globals(), OnPostgreSQL,
           backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving))]
del Suite, OnSQLite, OnPostgreSQL, OnMySQL
