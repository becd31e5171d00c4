"""Blobs in a database that RelStorage made: without blob-dir all is refused that would cut them off from their data.

The data is in blob_chunk; rows are added there by SQL, as RelStorage adds them.
"""
import pickle
import shutil
import tempfile
from contextlib import closing
from unittest.mock import patch

import ZODB
from persistent.mapping import PersistentMapping
from ZODB.blob import Blob
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError, Unsupported
from ZODB.tests.hexstorage import HexStorage
from ZODB.utils import p64, u64, z64

from relstore.blobs.without import WithoutBlobs
from relstore.errors import ConfigurationError
from relstore.tests.support.adopted import Adopted, AdoptedMySQL, AdoptedPostgreSQL, AdoptedSQLite
from relstore.tests.support.backends import (
    MYSQL,
    PostgreSQLBackend,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import perform
from relstore.tests.support.records import Reference, pickled, state
from relstore.tests.support.servers import MemcachedServer, require_memcached

BLOB, BESIDE, NEW = p64(2000), p64(2001), p64(2002)
# A Blob's record: that of each is the same.
RECORD = pickle.dumps(Blob, 3) + pickle.dumps(None, 3)
SENTENCE = r'^Object 0x[0-9a-f]+ is a blob, which can.* without blob-dir.*\.$'


def referring(*oids):
    """Return the record of an object that refers to others."""
    return pickled(PersistentMapping, {'data': {n: Reference((oid, None)) for n, oid in enumerate(oids)}})


class Suite:
    """A site with a blob that was changed once, and an object beside it."""

    def setUp(self):
        super().setUp()
        self.storage = self.opened()
        [(_, self.root)] = [self.storage.load(z64)]
        self.first = self.commit(BLOB, RECORD, z64)
        self.second = self.commit(BLOB, RECORD, self.first)
        self.third = self.commit(BESIDE, state(2), self.commit(BESIDE, state(1), z64))

    def commit(self, *stores, storage=None):
        """Commit (oid, state, base), one after the other; return the tid."""
        storage = self.storage if storage is None else storage     # an empty one is false
        stores = [stores[n:n + 3] for n in range(0, len(stores), 3)]
        return perform(storage, *[lambda txn, oid=oid, state=state, base=base: storage.store(oid, base, state, '', txn)
                                  for oid, state, base in stores])

    def rows(self, sql):
        return self.storage.database.pool.attempt(lambda session: session.all(sql))

    def run_sql(self, sql):
        self.storage.database.pool.attempt(lambda session: session.run(sql))

    def add_chunk(self, tid, oid=BLOB, chunk=None):
        chunk = chunk or ("lo_from_bytea(0, 'data')" if isinstance(self, PostgreSQLBackend) else "'data'")
        self.run_sql(f'INSERT INTO blob_chunk (zoid, tid, chunk_num, chunk) '
                     f'VALUES ({u64(oid)}, {u64(tid)}, 0, {chunk})')

    def add_chunks(self):
        """Give each revision of the blob its data."""
        for tid in (self.first, self.second) if self.keep_history else (self.second,):
            self.add_chunk(tid)

    def chunks(self):
        """Return the tids of the revisions that have their data, readable on PostgreSQL."""
        if isinstance(self, PostgreSQLBackend):
            rows = self.rows(f'SELECT tid, lo_get(chunk) FROM blob_chunk WHERE zoid = {u64(BLOB)} ORDER BY tid')
            self.assertTrue(all(bytes(data) == b'data' for _, data in rows))
        else:
            rows = self.rows(f'SELECT tid, 1 FROM blob_chunk WHERE zoid = {u64(BLOB)} ORDER BY tid')
        return [p64(tid) for tid, _ in rows]

    def large_objects(self):
        return self.rows('SELECT count(*) FROM pg_largeobject_metadata')[0][0]

    def reopened(self, **options):
        """Return a process without blob-dir that was there before the first blob, and has seen that there are some."""
        with self.assertLogs('relstore', 'WARNING') as logs, patch.object(
                WithoutBlobs, 'begin', lambda blobs, session, meta: blobs.look(session)):
            storage = self.opened(**options)
        self.assertRegex(logs.output[0], 'which this one cannot do without blob-dir')
        return storage

    def with_directory(self):
        """Open it as it is to be opened."""
        directory = tempfile.mkdtemp(prefix='relstore-blobs-')
        self.addCleanup(shutil.rmtree, directory)
        return self.opened(blob_dir=directory)

    def view(self, storage):
        view = storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        return view

    def refused(self, change, storage=None):
        """Check that a transaction with such a change is refused, and gives all back."""
        storage, before = self.storage if storage is None else storage, self.chunks()
        last = storage.lastTransaction()
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        with self.assertRaisesRegex(Unsupported, SENTENCE):
            change(storage, txn)
            storage.tpc_vote(txn)
        storage.tpc_abort(txn)
        self.assertEqual(storage.database.pool.lent, 0)
        self.assertEqual(storage.lastTransaction(), last)
        self.assertEqual(self.chunks(), before)

    def not_loaded(self, storage):
        view = self.view(storage)
        view.prefetch([BLOB, BESIDE])
        for _ in range(2):
            for instance in view, storage:
                with self.assertRaisesRegex(Unsupported, SENTENCE):
                    instance.load(BLOB)
                with self.assertRaisesRegex(Unsupported, SENTENCE):
                    instance.loadBefore(BLOB, b'\x7f' * 8)
                with self.assertRaisesRegex(Unsupported, SENTENCE):
                    instance.loadSerial(BLOB, self.second)
                self.assertEqual(instance.load(BESIDE), (state(2), self.third))
        self.assertFalse(view.database.cache.holds(u64(BLOB), view.view.at))
        self.assertTrue(view.database.cache.holds(u64(BESIDE), view.view.at))
        view.release()


class Refused(Suite):

    CHANGES = {
        'store': lambda self, storage, txn: storage.store(BLOB, self.second, RECORD, '', txn),
        'store a new one': lambda self, storage, txn: storage.store(NEW, z64, RECORD, '', txn),
        'restore': lambda self, storage, txn: storage.restore(NEW, self.second, RECORD, '', None, txn),
        'restore a deletion': lambda self, storage, txn: storage.restore(BLOB, self.second, None, '', None, txn),
        'delete': lambda self, storage, txn: storage.deleteObject(BLOB, self.second, txn)}

    def test_not_opened(self):
        self.add_chunks()
        with self.assertRaisesRegex(ConfigurationError, 'has blobs: name a directory to cache them with blob-dir'):
            self.opened()

    def test_not_loaded(self):
        self.add_chunks()
        self.not_loaded(self.reopened())

    def test_not_changed(self):
        self.add_chunks()
        storage = self.reopened()
        for name, change in self.CHANGES.items():
            with self.subTest(name):
                self.refused(lambda storage, txn, change=change: change(self, storage, txn), storage)

    def test_others_are(self):
        self.add_chunks()
        storage = self.reopened()
        tid = self.commit(BESIDE, state(3), self.third, NEW, state(1), z64, storage=storage)
        self.assertEqual(storage.load(BESIDE), (state(3), tid))
        perform(storage, lambda txn: storage.deleteObject(BESIDE, tid, txn))
        with self.assertRaises(POSKeyError):
            storage.load(BESIDE)

    def test_first_blob_while_it_runs(self):
        """RelStorage stores one; nobody tells."""
        self.assertFalse(self.storage.database.blobs.there)
        for change in self.CHANGES.values():
            self.storage.database.blobs.there = False
            self.run_sql('DELETE FROM blob_chunk')
            self.add_chunks()
            self.refused(lambda storage, txn, change=change: change(self, storage, txn))
        self.storage.database.cache.clear()
        self.not_loaded(self.storage)

    def test_no_blobs(self):
        """Where RelStorage keeps them in files, say."""
        tid = self.commit(BLOB, RECORD, self.second)
        self.assertEqual(self.view(self.storage).load(BLOB), (RECORD, tid))
        tid = perform(self.storage, lambda txn: self.storage.deleteObject(BLOB, tid, txn))
        self.assertFalse(self.storage.database.blobs.there)

    def test_wrapped_records(self):
        self.add_chunks()
        plain, storage = self.storage, HexStorage(self.reopened())
        for oid, tid, data in self.rows('SELECT zoid, tid, state FROM object_state WHERE state IS NOT NULL'):
            wrapped = self.hexadecimal(b'.h' + data.hex().encode())
            self.run_sql(f'UPDATE object_state SET state = {wrapped} WHERE zoid = {oid} AND tid = {tid}')
        with closing(ZODB.DB(storage)):
            for instance in storage, storage.new_instance():
                with self.assertRaisesRegex(Unsupported, SENTENCE):
                    instance.load(BLOB)
            txn = TransactionMetaData()
            storage.tpc_begin(txn)
            storage.store(NEW, z64, RECORD, '', txn)
            with self.assertRaisesRegex(Unsupported, SENTENCE):
                storage.tpc_vote(txn)
            storage.tpc_abort(txn)
        self.assertEqual(plain.database.pool.lent, 0)

    def hexadecimal(self, state):
        return f"'\\x{state.hex()}'" if isinstance(self, PostgreSQLBackend) else f"x'{state.hex()}'"

    def test_emptied(self):
        self.add_chunks()
        storage = self.reopened()
        storage.zap_all()
        tid = self.commit(BLOB, RECORD, z64, storage=storage)
        self.assertEqual(self.view(storage).load(BLOB), (RECORD, tid))


class Undone(Suite):

    def setUp(self):
        super().setUp()
        if not self.keep_history:
            self.skipTest('needs undo')

    def test_a_change_and_the_creation(self):
        for tids in (self.second,), (self.second, self.first):
            def undo(storage, txn, tids=tids):
                for tid in tids:
                    storage.undo(tid, txn)
            self.storage.database.blobs.there = False
            self.run_sql('DELETE FROM blob_chunk')
            self.add_chunks()       # while it runs
            self.refused(undo)
            self.refused(undo, self.reopened())

    def test_that_of_others(self):
        self.add_chunks()
        storage = self.reopened()
        perform(storage, lambda txn: storage.undo(self.third, txn))
        self.assertEqual(storage.load(BESIDE)[0], state(1))


class Packed(Suite):

    def setUp(self):
        super().setUp()
        root = referring(BLOB, BESIDE)
        self.root = self.commit(z64, root, self.root)

    def pack(self, tid=None, **options):
        self.with_directory().pack(None if tid is None else u64(tid), None, **options)

    def test_what_stays_keeps_its_data(self):
        self.add_chunks()
        self.storage.database.adapter.writers.set('relstore')
        if self.keep_history:
            self.pack(self.first)
            self.assertEqual(self.chunks(), [self.first, self.second])
        self.pack()
        self.assertEqual(self.chunks(), [self.second])
        if isinstance(self, PostgreSQLBackend):
            self.assertEqual(self.large_objects(), self.others + 1)
        self.commit(z64, referring(BESIDE), self.root)
        self.pack()
        self.assertEqual(self.chunks(), [])
        if isinstance(self, PostgreSQLBackend):
            self.assertEqual(self.large_objects(), self.others)
        with self.assertRaises(POSKeyError):
            self.opened().load(BLOB)

    def add_chunks(self):
        if isinstance(self, PostgreSQLBackend):
            self.others = self.large_objects()
        super().add_chunks()

    def test_without_garbage_collection(self):
        self.add_chunks()
        self.commit(z64, referring(BESIDE), self.root)
        self.pack(gc=False)
        self.assertEqual(self.chunks(), [self.second])


class SharedData(Packed):
    """RelStorage's undo gives a new revision the large object of an older one."""

    def shared(self):
        self.others = self.large_objects()
        self.add_chunk(self.first)
        self.add_chunk(self.second, chunk=f'(SELECT chunk FROM blob_chunk WHERE zoid = {u64(BLOB)})')

    def test_what_stays_keeps_its_data(self):
        self.shared()
        self.storage.database.adapter.writers.set('relstore')
        self.pack()
        self.assertEqual(self.chunks(), [self.second])
        self.assertEqual(self.large_objects(), self.others + 1)
        self.commit(z64, referring(BESIDE), self.root)
        self.pack()
        self.assertEqual(self.large_objects(), self.others)

    def test_both_go_at_once(self):
        self.shared()
        self.storage.database.adapter.writers.set('relstore')
        self.commit(z64, referring(BESIDE), self.root)
        self.pack()
        self.assertEqual(self.chunks(), [])
        self.assertEqual(self.large_objects(), self.others)

    def test_trigger_of_an_earlier_relstore(self):
        """It is replaced when the database is opened."""
        for sql in ('DROP TRIGGER blob_chunk_delete ON blob_chunk', 'DROP FUNCTION relstore_unlink_chunk_3()',
                    'CREATE FUNCTION relstore_unlink_chunk_1() RETURNS trigger LANGUAGE plpgsql AS '
                    '$$ BEGIN PERFORM lo_unlink(OLD.chunk); RETURN OLD; END $$',
                    'CREATE TRIGGER blob_chunk_delete BEFORE DELETE ON blob_chunk FOR EACH ROW '
                    'EXECUTE FUNCTION relstore_unlink_chunk_1()'):
            self.run_sql(sql)
        self.test_what_stays_keeps_its_data()
        self.assertEqual(self.rows("SELECT proname FROM pg_proc WHERE strpos(proname, 'relstore_unlink') = 1"),
                         [('relstore_unlink_chunk_3',)])

    def test_emptied(self):
        self.shared()
        self.with_directory().zap_all()
        self.assertEqual(self.large_objects(), self.others)

    test_without_garbage_collection = None


class Caches(Suite):
    """What another process has cached, before the database had blobs or in an earlier version."""

    def test_saved_file(self):
        directory = tempfile.mkdtemp(prefix='relstore-cache-')
        self.addCleanup(shutil.rmtree, directory)
        storage = self.opened(cache_local_dir=directory)
        view = self.view(storage)
        self.assertEqual([view.load(oid)[0] for oid in (BLOB, BESIDE)], [RECORD, state(2)])
        view.release()
        storage.close()
        self.add_chunks()
        storage = self.reopened(cache_local_dir=directory)
        self.assertTrue(storage.database.warm.filled.wait(60))
        self.assertTrue(storage.database.cache.holds(u64(BESIDE), u64(self.third)))
        self.not_loaded(storage)
        for _ in range(2):
            for oid, _, found in storage.database.cache.current()[1]:
                self.assertNotEqual((p64(oid), found), (BLOB, RECORD))
            storage.database.cache._evict()

    def test_memcached(self):
        require_memcached(self)
        server = MemcachedServer()
        self.addCleanup(server.stop)
        server.start()
        view = self.view(self.opened(cache_servers=server.where))
        self.assertEqual([view.load(oid)[0] for oid in (BLOB, BESIDE)], [RECORD, state(2)])
        view.release()
        self.add_chunks()
        storage = self.reopened(cache_servers=server.where)
        self.not_loaded(storage)
        self.assertGreater(storage.cache_stats()['shared_hits'], 1)


class OnMySQL(AdoptedMySQL, Adopted):
    pass


class OnSQLite(AdoptedSQLite, Adopted):
    pass


class OnPostgreSQL(AdoptedPostgreSQL, Adopted):
    pass


ADOPTED = [
    *cases({'__name__': __name__}, OnMySQL, backends=MYSQL),
    *cases({'__name__': __name__}, OnSQLite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree)),
    *cases({'__name__': __name__}, OnPostgreSQL,
           backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving))]
POSTGRESQL = [case for case in ADOPTED if issubclass(case, PostgreSQLBackend) and case.keep_history]


def adopted(namespace, *suites, cases=ADOPTED):
    """Run suites on databases that RelStorage made. Their setUp comes after the database's."""
    for suite in suites:
        for case in cases:
            name = f'{suite.__name__}{case.__name__}'
            namespace[name] = type(name, (suite, case), {'__module__': __name__})


adopted(globals(), Refused, Undone, Packed)
adopted(globals(), SharedData, cases=POSTGRESQL)
adopted(globals(), Caches, cases=[case for case in ADOPTED if issubclass(
    case, SQLiteHistoryPreserving | Psycopg2HistoryPreserving)])
