"""Storages of others that work on this one: a server of ZEO, and ZODB's DemoStorage."""
import importlib.util
import threading
import unittest
from contextlib import closing
from unittest import mock

import transaction
import ZODB
from BTrees.Length import Length
from persistent.mapping import PersistentMapping
from ZODB.Connection import TransactionMetaData
from ZODB.DemoStorage import DemoStorage
from ZODB.FileStorage import FileStorage
from ZODB.MappingStorage import MappingStorage
from ZODB.POSException import ConflictError, POSKeyError
from ZODB.tests import BasicStorage, ConflictResolution, RevisionStorage, StorageTestBase, Synchronization
from ZODB.utils import p64, z64

from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state
from relstore.tests.support.servers import cannot_run

PATIENCE = 60       # seconds
HISTORY_PRESERVING = SQLiteHistoryPreserving, Psycopg2HistoryPreserving, MySQLdbHistoryPreserving
HISTORY_FREE = SQLiteHistoryFree, Psycopg2HistoryFree, MySQLdbHistoryFree


class Served(unittest.TestCase):
    """A server of ZEO and its clients, over the loopback."""

    def setUp(self):
        super().setUp()
        if importlib.util.find_spec('ZEO') is None:
            cannot_run(self, 'ZEO is not installed')
        from ZEO.StorageServer import StorageServer
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)
        server = StorageServer(('127.0.0.1', 0), {'1': self.storage})
        thread = threading.Thread(target=server.loop, kwargs={'timeout': .1}, daemon=True)
        thread.start()
        self.addCleanup(thread.join, PATIENCE)
        self.addCleanup(server.close)
        self.address = server.acceptor.addr

    def client(self):
        """Open a database on the server."""
        from ZEO.ClientStorage import ClientStorage
        db = ZODB.DB(ClientStorage(self.address, wait_timeout=PATIENCE))
        self.addCleanup(db.close)
        return db

    def opened(self, db):
        connection = db.open(transaction.TransactionManager())
        self.addCleanup(connection.close)
        return connection

    def test_clients(self):
        one, other = self.opened(self.client()), self.opened(self.client())
        root = one.root()
        root['length'], root['a'] = Length(), PersistentMapping(n=1)
        one.transaction_manager.commit()
        other._storage._storage.ping()
        other.sync()
        self.assertEqual(other.root()['a']['n'], 1)
        other.root()['length']()
        root['length'].change(1)
        root['a']['n'] = 2
        one.transaction_manager.commit()
        if not self.keep_history:
            other.sync()                        # what it has seen is nowhere any more
        other.root()['length'].change(2)
        other.transaction_manager.commit()      # resolved
        self.assertEqual(self.opened(self.client()).root()['length'](), 3)
        self.assertEqual(self.opened(self.client()).root()['a']['n'], 2)
        self.assertIsNone(self.storage.tpc_transaction())
        self.assertEqual(self.storage.database.pool.lent, 0)

    def test_conflicts_and_aborts(self):
        db = self.client()
        one, other = self.opened(db), self.opened(self.client())
        one.root()['a'] = PersistentMapping()
        one.transaction_manager.commit()
        other._storage._storage.ping()
        other.sync()
        other.root()['a']['b'] = 1
        one.root()['a']['b'] = 2
        one.transaction_manager.commit()
        with self.assertRaises(ConflictError):
            other.transaction_manager.commit()
        other.transaction_manager.abort()
        client = db.storage
        txn = TransactionMetaData()
        client.tpc_begin(txn)
        client.store(p64(99), z64, state(1), '', txn)
        client.tpc_vote(txn)
        self.assertIsNotNone(self.storage.tpc_transaction())
        client.tpc_abort(txn)
        client.ping()
        self.assertIsNone(self.storage.tpc_transaction())
        self.assertEqual(self.storage.database.pool.lent, 0)
        with self.assertRaises(POSKeyError):
            client.load(p64(99))

    def test_history_and_undo(self):
        if not self.keep_history:
            self.skipTest('needs undo')
        db = self.client()
        for n in 1, 2:
            with db.transaction() as connection:
                connection.root()['n'] = n
        self.assertEqual(len(db.history(z64, 10)), 3)
        manager = transaction.TransactionManager()
        db.undo(db.undoInfo(0, 1)[0]['id'], manager.get())
        manager.commit()
        self.assertEqual(self.opened(self.client()).root()['n'], 1)
        db.pack()
        self.assertEqual(len(db.history(z64, 10)), 1)


class Changes(unittest.TestCase):
    """A DemoStorage that keeps its changes here, over a base."""

    def setUp(self):
        super().setUp()
        self.base = MappingStorage()
        db = ZODB.DB(self.base)
        with db.transaction() as connection:
            connection.root()['a'] = PersistentMapping(n=0)
            connection.root()['b'] = PersistentMapping(n=0)
        self.changes = self.open_storage()
        self.db = ZODB.DB(DemoStorage(base=self.base, changes=self.changes))
        self.addCleanup(self.db.close)

    def test_changes_lie_over_the_base(self):
        for n in 1, 2:
            with self.db.transaction() as connection:
                root = connection.root()
                self.assertEqual((root['a']['n'], root['b']['n']), (n - 1, 0))
                root['a']['n'] = n
                root[n] = PersistentMapping()
                connection.add(root[n])
                oid = root[n]._p_oid
        self.assertTrue(self.changes.load(oid))
        self.assertEqual(len(self.changes), 4)      # the root, a, and two that are new
        self.assertEqual(self.changes.database.pool.lent, 0)

    def test_conflicts(self):
        one, other = (self.db.open(transaction.TransactionManager()) for _ in range(2))
        for connection, n in (one, 1), (other, 2):
            connection.root()['a']['n'] = n
        one.transaction_manager.commit()
        with self.assertRaises(ConflictError):
            other.transaction_manager.commit()
        other.transaction_manager.abort()
        other.root()['a']['n'] = 3
        other.transaction_manager.commit()
        one.sync()
        self.assertEqual(one.root()['a']['n'], 3)
        self.assertEqual(self.changes.database.pool.lent, 0)
        one.close()
        other.close()

    def test_new_objects_are_not_looked_for(self):
        asked, current_tid = [], self.changes.database.adapter.current_tid

        def ask(session, oid):
            asked.append(oid)
            return current_tid(session, oid)

        with mock.patch.object(self.changes.database.adapter, 'current_tid', ask), self.db.transaction() as connection:
            connection.root()['new'] = PersistentMapping()
        self.assertEqual(asked, [0])

    def test_a_storage_that_has_no_base(self):
        """A change of what is not there is a conflict: it was removed, or it is of another database."""
        with closing(self.open_storage('alone')) as storage:
            oid, base = storage.new_oid(), self.base.lastTransaction()
            with self.assertRaises(ConflictError):
                commit(storage, (oid, base, state(1)))
            with self.assertRaises(POSKeyError):
                storage.load(oid)

    def test_undo_of_changes(self):
        if not self.keep_history:
            self.skipTest('needs undo')
        for n in 1, 2:
            with self.db.transaction() as connection:
                connection.root()['a']['n'] = n
        manager = transaction.TransactionManager()
        self.db.undo(self.db.undoInfo(0, 1)[0]['id'], manager.get())
        manager.commit()
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['a']['n'], 1)


class Upstream(
        StorageTestBase.StorageTestBase,
        BasicStorage.BasicStorage,
        ConflictResolution.ConflictResolvingStorage,
        RevisionStorage.RevisionStorage,
        Synchronization.SynchronizedStorage):
    """Those of ZODB's tests for DemoStorage that fit where its changes are kept elsewhere."""

    def setUp(self):
        super().setUp()
        self._storage = DemoStorage(base=FileStorage('Base.fs'), changes=self.open_storage())

    def testLoadBeforeUndo(self):
        """DemoStorage offers the undo of its changes, but does not know how to load what that has put back."""


cases(globals(), Served, Changes, backends=HISTORY_PRESERVING + HISTORY_FREE)
cases(globals(), Upstream, backends=HISTORY_PRESERVING)
del Served, Changes, Upstream
