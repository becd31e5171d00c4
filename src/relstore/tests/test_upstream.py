"""ZODB's own test suites, unmodified, on every database and history mode, with every driver; and once on each server
as a user who has just the rights that are told.
"""
import re
import unittest

from ZODB.tests import (
    BasicStorage,
    ConflictResolution,
    HistoryStorage,
    IteratorStorage,
    MTStorage,
    PackableStorage,
    PersistentStorage,
    ReadOnlyStorage,
    RecoveryStorage,
    RevisionStorage,
    StorageTestBase,
    Synchronization,
    TransactionalUndoStorage,
)
from ZODB.tests.testMVCCMappingStorage import MVCCTests

from relstore.tests.support.backends import (
    HISTORY_PRESERVING,
    PGBOUNCER,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    ServerBackend,
    SQLiteHistoryFree,
    cases,
)
from relstore.tests.support.granted import RUNNING, RUNNING_AND_PACKING
from relstore.tests.support.servers import MemcachedServer, require_memcached

#: Tests that ask of a history-free storage what it is made not to have: reason -> names, without test or check at the
#: beginning.
NOT_HISTORY_FREE = {
    'needs undo': {
        'UndoZombie', 'LoadBeforeUndo', 'RestoreAcrossPack', 'RestoreWithMultipleObjectsInUndoRedo',
        'RestoreWithMultipleUndoRedo'},
    'loads, lists or iterates over revisions that were replaced': {
        'SimpleIteration', 'ExtendedIteration', 'LoadSerial', 'LoadBefore', 'LoadBeforeEdges',
        'PackAllRevisions', 'PackJustOldRevisions', 'PackOnlyOneObject',
        'LoadBeforeOld', 'LoadBeforeConsecutiveTids', 'SimpleHistory'},
    'iterates over transaction metadata, which is not kept': {'TransactionExtensionFromIterator'},
}
#: A test that lets no transaction conflict. One that begins without a question to the database, because memcached tells
#: that nothing was committed, and then reads for the first time what was replaced since, has to, without history.
LETS_NOTHING_CONFLICT = 'race_load_vs_external_invalidate'
#: A test that moves the clock of its process, and compares it with tids. A server's come from its own clock.
MOVES_THE_CLOCK = 'PackUndoLog'


class Suite(StorageTestBase.StorageTestBase):
    use_extension_bytes = True

    def setUp(self):
        test = re.sub('^(test|check)', '', self._testMethodName)
        skips = {} if self.keep_history else NOT_HISTORY_FREE
        for reason, names in skips.items():
            if test in names:
                self.skipTest(reason)
        super().setUp()
        self.open()

    def open(self, **options):
        self._storage = self.open_storage(**options)

    def _new_storage_client(self):
        return self.open_storage()


class Running(
        Suite,
        BasicStorage.BasicStorage,
        ConflictResolution.ConflictResolvingStorage,
        HistoryStorage.HistoryStorage,
        IteratorStorage.IteratorStorage,
        IteratorStorage.ExtendedIteratorStorage,
        MTStorage.MTStorage,
        MVCCTests,
        PersistentStorage.PersistentStorage,
        ReadOnlyStorage.ReadOnlyStorage,
        RevisionStorage.RevisionStorage,
        Synchronization.SynchronizedStorage):
    """What packs nothing."""


class Storage(Running, PackableStorage.PackableStorage):
    pass


class Packing(Suite, PackableStorage.PackableStorage):
    pass


class Pooled(
        Suite,
        BasicStorage.BasicStorage,
        ConflictResolution.ConflictResolvingStorage,
        MTStorage.MTStorage,
        MVCCTests):
    """What a pooler that swaps sessions could harm. BasicStorage brings ZODB's racetest."""


class Shared(Pooled):
    """With a memcached that holds revisions and counts commits: no poll is sent where none was counted."""

    def setUp(self):
        if not self.keep_history and self._testMethodName.endswith(LETS_NOTHING_CONFLICT):
            self.skipTest('reads revisions that were replaced')
        require_memcached(self)
        server = MemcachedServer()
        self.addCleanup(server.stop)
        server.start()
        self._shared = {'cache_servers': server.where, 'poll_interval': 3600}
        super().setUp()

    def open(self, **options):
        super().open(**self._shared, **options)

    def _new_storage_client(self):
        return self.open_storage(**self._shared)


class Undo(
        Suite,
        ConflictResolution.ConflictResolvingTransUndoStorage,
        PackableStorage.PackableUndoStorage,
        TransactionalUndoStorage.TransactionalUndoStorage):

    def open(self, **options):
        super().open(**options)
        if isinstance(self, ServerBackend) and self._testMethodName.endswith(MOVES_THE_CLOCK):
            self.follow_clock(self._storage.database.adapter)


class Recovery(Suite, RecoveryStorage.RecoveryStorage):

    def open(self):
        super().open()
        self._dst = self.open_storage('destination')

    def tearDown(self):
        self._dst.close()
        super().tearDown()


CASES = [*cases(globals(), Storage, Recovery), *cases(globals(), Undo, backends=HISTORY_PRESERVING),
         *cases(globals(), Pooled, backends=PGBOUNCER[::3]),
         *cases(globals(), Shared, backends=(SQLiteHistoryFree, Psycopg2HistoryPreserving),
                thorough=(Psycopg2HistoryFree,)),
         *cases(globals(), Running, backends=RUNNING),
         *cases(globals(), Packing, Recovery, backends=RUNNING_AND_PACKING),
         *cases(globals(), Undo, backends=RUNNING_AND_PACKING[:1])]


def test_suite():
    """ZODB 5 calls its tests check..., ZODB 6 test...."""
    suite = unittest.TestSuite()
    for prefix in ('test', 'check'):
        loader = unittest.TestLoader()
        loader.testMethodPrefix = prefix
        suite.addTests(loader.loadTestsFromTestCase(case) for case in CASES if loader.getTestCaseNames(case))
    return suite
