"""A real site goes in, and comes out again as it was."""
import os
import tempfile
import unittest
from contextlib import closing
from itertools import zip_longest
from unittest import mock

from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.POSException import POSKeyError, StorageError
from ZODB.utils import z64

from relstore import bulk
from relstore.tests.support.backends import (
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.plone import unpacked_site

INTERRUPTED_AFTER = 200     # transactions, of 336 and ours


class Interrupted(Exception):
    pass


def commit(storage, description, change, **extension):
    txn = TransactionMetaData('boris émigré', description, extension or None)
    storage.tpc_begin(txn)
    change(txn)
    storage.tpc_vote(txn)
    return storage.tpc_finish(txn)


def add_what_a_site_may_have(path):
    """Commit to a FileStorage what this one lacks: extensions, undone changes and creations, deletions."""
    def undo_last(txn):
        storage.undo(storage.undoLog(0, 1)[0]['id'], txn)

    with closing(FileStorage(path)) as storage:
        root, tid = storage.load(z64)
        commit(storage, 'change', lambda txn: storage.store(z64, tid, root + b' ', '', txn), request='/folder')
        commit(storage, 'undo', undo_last)
        commit(storage, 'undo the undo', undo_last, number=1)
        oid, other = storage.new_oid(), storage.new_oid()
        commit(storage, 'create', lambda txn: storage.store(oid, z64, root, '', txn))
        commit(storage, 'undo the creation', undo_last)
        commit(storage, 'create another', lambda txn: storage.store(other, z64, root, '', txn))
        tid = storage.lastTransaction()
        commit(storage, 'delete it', lambda txn: storage.deleteObject(other, tid, txn))
        commit(storage, '', lambda txn: None)


def transactions(storage):
    """Yield all there is in a storage."""
    with closing(storage.iterator()) as iterator:
        for txn in iterator:
            records = {record.oid: (record.tid, record.data, record.data_txn) for record in txn}
            yield txn.tid, txn.status, txn.user, txn.description, txn.extension_bytes, records


def load(storage, oid):
    try:
        return storage.load(oid)
    except POSKeyError:
        return None


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        path = unpacked_site(self)
        add_what_a_site_may_have(path)
        self.source = FileStorage(path, read_only=True)
        self.addCleanup(self.source.close)
        self.storage = self.open_storage()
        self.addCleanup(lambda: self.storage.close())

    def reopen(self):
        """Nothing of what follows comes from a cache."""
        self.storage.close()
        self.storage = self.open_storage()

    def interrupted_copy(self):
        """Copy, stop in the middle, and copy once more; return the tids that were copied each time."""
        def progress(tid, records, size):
            copied[-1].append(tid)
            if len(copied) == 1 and len(copied[0]) == INTERRUPTED_AFTER:
                raise Interrupted

        copied = [[]]
        # Each transaction in a batch of its own: of a larger one all is there when the first is told.
        with mock.patch.object(bulk, 'BATCH_BYTES', 0), self.assertRaises(Interrupted):
            self.storage.copyTransactionsFrom(self.source, progress=progress)
        self.assertEqual(self.storage.lastTransaction(), copied[0][-1])
        self.reopen()
        copied.append([])
        self.storage.copyTransactionsFrom(self.source, progress=progress)
        self.reopen()
        return copied


class Preserving(Suite):

    def equal(self, ones, others):
        count = 0
        for one, other in zip_longest(transactions(ones), transactions(others)):
            self.assertEqual(one, other)
            count += 1
        self.assertEqual(count, 344)

    def test_there_and_back(self):
        before, after = self.interrupted_copy()
        self.assertEqual(before + after, [txn.tid for txn in self.source.iterator()])
        self.equal(self.source, self.storage)
        self.storage.copyTransactionsFrom(self.source, progress=lambda *_: self.fail('there was nothing to copy'))

        with tempfile.TemporaryDirectory() as directory, \
                closing(FileStorage(os.path.join(directory, 'Data.fs'))) as back:
            back.copyTransactionsFrom(self.storage)
            self.equal(self.source, back)


class Free(Suite):

    def test_every_object(self):
        self.interrupted_copy()
        oids = {oid for *_, records in transactions(self.source) for oid in records}
        for oid in oids:
            self.assertEqual(load(self.storage, oid), load(self.source, oid))
        self.assertGreater(len(oids), 14_000)

        oid, found = None, {}
        while True:
            current, tid, state, oid = self.storage.record_iternext(oid)
            found[current] = state, tid
            if oid is None:
                break
        self.assertEqual(found, {oid: load(self.source, oid) for oid in oids if load(self.source, oid)})


class Destination(unittest.TestCase):

    def test_with_other_content_is_refused(self):
        self.source = FileStorage(unpacked_site(self), read_only=True)
        self.addCleanup(self.source.close)
        with closing(self.open_storage()) as storage:
            tid = commit(storage, 'ours', lambda txn: storage.store(z64, z64, b'ours', '', txn))
            with self.assertRaisesRegex(StorageError, 'empty'):
                storage.copyTransactionsFrom(self.source, progress=lambda *_: self.fail('copied'))
            self.assertEqual(storage.load(z64), (b'ours', tid))
            self.assertEqual(storage.lastTransaction(), tid)


cases(globals(), Preserving, backends=(SQLiteHistoryPreserving, Psycopg2HistoryPreserving))
cases(globals(), Free, backends=(SQLiteHistoryFree, Psycopg2HistoryFree))
cases(globals(), Destination)
del Suite, Preserving, Free, Destination
