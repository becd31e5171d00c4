"""Storages around this one that change records: ZODB's HexStorage, and zc.zlibstorage, as a site configures it.

They hand new_instance() down, so the connections of a database read and write past them.
"""
import importlib.util
import tempfile
import time
import unittest
from contextlib import closing
from unittest import mock

import transaction
import ZODB
import ZODB.config
from BTrees.Length import Length
from persistent.mapping import PersistentMapping
from ZODB.FileStorage import FileStorage
from ZODB.POSException import ConflictError, POSKeyError
from ZODB.tests.hexstorage import HexStorage, ServerHexStorage
from ZODB.utils import p64, u64, z64

from relstore.storage import RelStore
from relstore.tests.support.backends import (
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import perform
from relstore.tests.support.hexadecimal import MVCCHexStorage
from relstore.tests.support.servers import MemcachedServer, cannot_run, require_memcached
from relstore.view import View

LONG = 'x' * 999        # is worth to be compressed


def zlibstorage(test):
    if importlib.util.find_spec('zc.zlibstorage') is None:
        cannot_run(test, 'zc.zlibstorage is not installed')
    import zc.zlibstorage
    return zc.zlibstorage


def innermost(storage):
    return storage if isinstance(storage, RelStore) else innermost(storage.base)


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.opened()

    def opened(self, name='main'):
        """Open a storage that is closed after the test."""
        storage = self.open_storage(name)
        self.addCleanup(storage.close)
        return storage

    def database(self, storage=None):
        db = ZODB.DB(self.storage if storage is None else storage)
        self.addCleanup(db.close)
        return db


class Wrapper(Suite):
    # What its records begin with.
    mark = b''

    def wrap(self, storage):
        raise NotImplementedError

    def opened(self, name='main'):
        return self.wrap(super().opened(name))

    def setUp(self):
        super().setUp()
        self.db = self.database()
        with self.db.transaction() as connection:
            root = connection.root()
            root['text'], root['length'] = PersistentMapping(a=LONG), Length()
            root['gone'] = PersistentMapping(a=LONG)
        with self.db.transaction() as connection:
            root = connection.root()
            self.gone = root['gone']._p_oid
            self.oids = [z64, root['text']._p_oid]

    def fresh(self, db=None, **arguments):
        """Open a connection that has loaded nothing, over a cache that holds nothing."""
        (db or self.db).storage.base.database.cache.clear()
        connection = (db or self.db).open(transaction.TransactionManager(), **arguments)
        self.addCleanup(connection.close)
        connection.cacheMinimize()
        return connection

    def change(self, key='text', value=LONG + '!'):
        with self.db.transaction() as connection:
            connection.root()[key]['a'] = value
            tid = connection.root()[key]._p_serial
        with self.db.transaction() as connection:
            self.assertNotEqual(connection.root()[key]._p_serial, tid)
            return connection.root()[key]._p_serial

    def assertHolds(self, storage, *oids):
        """What the database has of these objects is what the wrapper makes of their pickles."""
        for oid in oids:
            inner = innermost(storage)
            record, tid = inner.load(oid)
            self.assertTrue(record.startswith(self.mark))
            pickle, _ = storage.load(oid)
            self.assertTrue(pickle.startswith(b'\x80'))
            self.assertEqual(inner.database.transform(pickle), record)
            instance = storage.new_instance()
            instance.poll_invalidations()
            self.assertEqual(instance.load(oid), (pickle, tid))
            self.assertEqual(instance.load(oid), (pickle, tid), 'from the cache')
            self.assertEqual(instance.loadSerial(oid, tid), pickle)
            self.assertEqual(instance.loadBefore(oid, p64(u64(tid) + 1)), (pickle, tid, None))
            self.assertIsNone(instance.loadBefore(oid, p64(1)))
            instance.release()

    def test_connections(self):
        self.assertEqual(self.fresh().root()['text']['a'], LONG)
        self.assertHolds(self.storage, *self.oids)
        tid = self.change()
        self.assertEqual(self.fresh().root()['text']['a'], LONG + '!')
        self.assertHolds(self.storage, *self.oids)
        self.assertEqual(self.db.history(self.oids[1])[0]['tid'], tid)

    def test_another_process(self):
        other = self.database(self.opened())
        self.assertEqual(self.fresh(other).root()['text']['a'], LONG)
        self.change()
        self.assertEqual(self.fresh(other).root()['text']['a'], LONG + '!')

    def test_cache_holds_what_the_database_does(self):
        self.fresh().root()['text']['a']
        cached = {p64(oid): record for oid, _, record in self.storage.base.database.cache.current()[1]}
        for oid in self.oids:
            self.assertTrue(cached[oid].startswith(self.mark))
        self.change()
        cached = {p64(oid): record for oid, _, record in self.storage.base.database.cache.current()[1]}
        self.assertTrue(cached[self.oids[1]].startswith(self.mark))

    def test_prefetch(self):
        connection = self.fresh()
        connection.prefetch(self.oids)
        with mock.patch.object(View, '_read', side_effect=AssertionError):
            self.assertEqual(connection.root()['text']['a'], LONG)

    def test_savepoints(self):
        connection = self.fresh()
        connection.root()['text']['a'] = 'before'
        savepoint = connection.transaction_manager.savepoint()
        connection.root()['text']['a'] = 'after'
        savepoint.rollback()
        connection.transaction_manager.commit()
        self.assertEqual(self.fresh().root()['text']['a'], 'before')

    def test_conflicts(self):
        one, other = self.fresh(), self.fresh()
        for connection, change in (one, 2), (other, 3):
            connection.root()['length'].change(change)
        one.transaction_manager.commit()
        other.transaction_manager.commit()
        self.assertEqual(self.fresh().root()['length'](), 5)
        self.assertHolds(self.storage, *self.oids)
        for connection in one, other:
            connection.root()['text'][str(id(connection))] = LONG
        one.transaction_manager.commit()
        with self.assertRaisesRegex(ConflictError, 'PersistentMapping'):
            other.transaction_manager.commit()
        other.transaction_manager.abort()

    def test_undo(self):
        if not self.keep_history:
            self.skipTest('needs undo')
        with self.db.transaction() as connection:
            connection.root()['length'].change(2)
            connection.root()['text']['a'] = 'changed'
        with self.db.transaction() as connection:
            connection.root()['length'].change(3)
        manager = transaction.TransactionManager()
        self.db.undo(self.db.undoInfo(1, 2)[0]['id'], manager.get())
        manager.commit()
        root = self.fresh().root()
        self.assertEqual((root['length'](), root['text']['a']), (3, LONG))
        self.assertHolds(self.storage, *self.oids)

    def test_as_of_an_earlier_time(self):
        if not self.keep_history:
            self.skipTest('needs history')
        tid = self.change()
        self.assertEqual(self.fresh(before=tid).root()['text']['a'], LONG)
        self.assertEqual(self.fresh(at=tid).root()['text']['a'], LONG + '!')

    def test_pack(self):
        with self.db.transaction() as connection:
            del connection.root()['gone']
        self.change()
        self.db.pack(time.time())
        self.assertEqual(self.fresh().root()['text']['a'], LONG + '!')
        with self.assertRaises(POSKeyError):
            self.storage.load(self.gone)

    def test_copies(self):
        """Of another storage: through the wrapper, through an instance, and from one wrapper to another."""
        with tempfile.TemporaryDirectory() as directory:
            source = FileStorage(f'{directory}/Data.fs')
            with closing(ZODB.DB(source)) as db:
                with db.transaction() as connection:
                    connection.root()['text'] = text = PersistentMapping(a=LONG)
                    connection.root()['deleted'] = deleted = PersistentMapping()
                oids = [z64, text._p_oid]
                perform(source, lambda txn: source.deleteObject(deleted._p_oid, deleted._p_serial, txn))
                self.storage.zap_all()
                self.storage.copyTransactionsFrom(source)
                instances = []
                for number in range(2):
                    storage = self.opened(f'copy{number}')
                    instances.append(storage.new_instance())
                    instances[number].copyTransactionsFrom(instances[number - 1] if number else source)
                    self.assertHolds(storage, *oids)
                    with self.assertRaises(POSKeyError):
                        storage.load(deleted._p_oid)
                self.assertHolds(self.storage, *oids)
                self.assertEqual(self.database().open().root()['text']['a'], LONG)

    def test_all_there_is(self):
        """Iterators of the wrapper and of an instance tell the same."""
        self.change()
        instance = self.db.storage.new_instance()
        there = [[(record.oid, record.data) for txn in storage.iterator() for record in txn]
                 for storage in (self.storage, instance)]
        self.assertEqual(*there)
        self.assertTrue(all(data.startswith(b'\x80') for _, data in there[0]))
        oid, tid, state, following = instance.record_iternext()
        self.assertEqual((oid, tid, state), self.storage.record_iternext()[:3])
        self.assertEqual(instance.record_iternext(following)[:3],
                         self.storage.record_iternext(self.storage.record_iternext()[3])[:3])
        self.assertEqual((oid, (state, tid)), (z64, self.storage.load(z64)))


class Hexadecimal(Wrapper):
    """It raises where it did not wrap."""
    mark = b'.h'

    def wrap(self, storage):
        return HexStorage(storage)


class Compressed(Wrapper):
    mark = b'.z'

    def wrap(self, storage):
        return zlibstorage(self).ZlibStorage(storage)

    def test_not_compressed_any_more(self):
        """As ``compress false`` has it: what is compressed is read, and written plain when it changes."""
        db = self.database(zlibstorage(self).ZlibStorage(self.open_storage(), False))
        self.assertEqual(self.fresh(db).root()['text']['a'], LONG)
        with db.transaction() as connection:
            connection.root()['text']['b'] = LONG
        self.assertTrue(db.storage.base.load(self.oids[1])[0].startswith(b'\x80'))
        self.assertEqual(self.fresh().root()['text'].data, {'a': LONG, 'b': LONG})


class Both(Wrapper):
    """What is compressed is made hexadecimal."""
    mark = b'.h2e7a'

    def wrap(self, storage):
        return zlibstorage(self).ZlibStorage(HexStorage(storage))


class Instances(Hexadecimal):
    """A wrapper that wraps instances, too: RelStorage, in the same process, makes such of zc.zlibstorage's."""

    def wrap(self, storage):
        return MVCCHexStorage(storage)


class Others(Suite):
    """What is around a storage, and leaves the records alone."""

    def test_server_of_wrapped_records(self):
        """Clients of ZEO wrap and unwrap; the server needs to know how, and no more."""
        server = ServerHexStorage(self.storage)
        instance = server.new_instance()
        record = b'.h' + b'80'
        tid = perform(instance, lambda txn: instance.store(p64(1), z64, record, '', txn))
        for storage in self.storage, server, instance:
            self.assertEqual(storage.loadSerial(p64(1), tid), record)
        self.assertIs(type(instance), RelStore)

    def test_connections_of_a_storage_without_a_wrapper(self):
        self.assertIs(type(self.storage.new_instance()), RelStore)
        # As a server of ZEO registers itself: it is no storage.
        self.storage.registerDB(mock.Mock(spec=['transform_record_data', 'untransform_record_data']))
        self.assertIs(type(self.storage.new_instance()), RelStore)


class Configured(SQLiteHistoryPreserving, unittest.TestCase):

    def test_sections(self):
        zlibstorage(self)
        config = f"""
            %import relstore
            %import zc.zlibstorage
            <zodb>
              <zlibstorage>
                <relstore>
                  <sqlite3>
                    data-dir {self.address().path.parent}
                  </sqlite3>
                </relstore>
              </zlibstorage>
            </zodb>
            """
        for number in range(3):
            with closing(ZODB.config.databaseFromString(config)) as db:
                with db.transaction() as connection:
                    root = connection.root()
                    self.assertEqual(root.get(number - 1, LONG), LONG)
                    root[number] = LONG
                self.assertEqual(db.storage.base.load(z64)[0][:2], b'.z')


class Shared(unittest.TestCase):
    """Through memcached."""

    def test_what_is_in_memcached_is_wrapped(self):
        require_memcached(self)
        server = MemcachedServer()
        self.addCleanup(server.stop)
        server.start()
        storages = [HexStorage(self.open_storage(cache_servers=server.where)) for _ in range(2)]
        put = storages[0].base.database.tier._client.set_many
        with (mock.patch.object(storages[0].base.database.tier._client, 'set_many', wraps=put) as sent,
              closing(ZODB.DB(storages[0])) as db, db.transaction() as connection):
            connection.root()['text'] = PersistentMapping(a=LONG)
        values = [value for call in sent.call_args_list for value in call.args[0].values()]
        self.assertTrue(any(LONG.encode().hex().encode() in value for value in values))
        self.assertFalse(any(LONG.encode() in value for value in values))
        with closing(ZODB.DB(storages[1])) as db, db.transaction() as connection:
            self.assertEqual(connection.root()['text']['a'], LONG)
            self.assertGreater(storages[1].base.cache_stats()['shared_hits'], 0)


BACKENDS = SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving, Psycopg2HistoryFree
cases(globals(), Hexadecimal, Compressed, backends=BACKENDS)
cases(globals(), Both, Instances, Others, Shared, backends=BACKENDS[:1])
del Suite, Wrapper, Hexadecimal, Compressed, Both, Instances, Others, Shared
