"""A copy that goes on after garbage was removed from its destination would lack what is linked again: it is refused."""
import time
from contextlib import closing
from itertools import zip_longest
from unittest import mock

from persistent.mapping import PersistentMapping
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.POSException import ConflictError, POSKeyError, StorageError
from ZODB.tests.hexstorage import HexStorage

import relstore
from relstore import bulk, copying
from relstore.errors import Unavailable
from relstore.packing.packs import Packs
from relstore.tests.support.backends import (
    HISTORY_FREE,
    HISTORY_PRESERVING,
    Psycopg2HistoryFree,
    Psycopg2PooledHistoryFree,
    Psycopg2PooledHistoryPreserving,
    Psycopg3HistoryPreserving,
    PyMySQLHistoryFree,
    cases,
)
from relstore.tests.support.commands import Commands
from relstore.tests.support.ended import end
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.patience import within

EMPTY = 'copy into an empty database'


class Interrupted(Exception):
    pass


class Interrupting:
    """A storage that does something before the nth record, from 0, of one transaction is read, and after the last."""

    def __init__(self, storage, tid, act):
        self._storage, self._tid, self._act = storage, tid, act

    def iterator(self, start=None, stop=None):
        for transaction in self._storage.iterator(start, stop):
            yield _Interrupting(transaction, self._act) if transaction.tid == self._tid else transaction


class _Interrupting:

    def __init__(self, transaction, act):
        self._transaction, self._act = transaction, act

    def __getattr__(self, name):
        return getattr(self._transaction, name)

    def __iter__(self):
        n = 0
        for n, record in enumerate(self._transaction, 1):
            self._act(n - 1)
            yield record
        self._act(n)


class Suite(Commands):
    """A FileStorage whose third transaction unlinks an object, and whose fifth links it again, unchanged."""

    def setUp(self):
        super().setUp()
        # A batch has one transaction, so that something can happen between any two.
        patch = mock.patch.object(bulk, 'BATCH_BYTES', 0)
        patch.start()
        self.addCleanup(patch.stop)
        with closing(DB(FileStorage(str(self.here / 'Data.fs')))) as db, closing(db.open()) as connection:
            root, manager = connection.root(), connection.transaction_manager
            root['kept'] = kept = PersistentMapping(text='kept')
            manager.commit()
            self.kept = kept._p_oid
            del root['kept']
            manager.commit()
            root['n'] = 1
            manager.commit()
            root['again'] = kept
            manager.commit()
            root['n'] = 2
            manager.commit()
        self.source = FileStorage(str(self.here / 'Data.fs'))
        self.addCleanup(self.source.close)
        self.tids = [txn.tid for txn in self.source.iterator()]
        self.assertEqual(len(self.tids), 6)
        self.storage, self.other = self.opened(), self.opened()     # as two processes have it

    def opened(self, **options):
        storage = self.open_storage(**options)
        self.addCleanup(storage.close)
        return storage

    def pack(self, **options):
        """As another process does it."""
        self.other.pack(None, **options)

    def copy(self, *acts, storage=None):
        """Copy, and do something after the transactions 1, 2, ... of the source: None is nothing."""
        acts = dict(zip(self.tids, acts, strict=False))
        (storage or self.storage).copyTransactionsFrom(
            self.source, lambda tid, records, size: (acts.get(tid) or (lambda: None))())

    def interrupt(self):
        raise Interrupted

    def copy_half(self):
        """Up to the transaction after the one that unlinks it."""
        with self.assertRaises(Interrupted):
            self.copy(None, None, None, self.interrupt)
        self.assertEqual(self.storage.lastTransaction(), self.tids[3])

    def assertComplete(self):
        self.assertEqual(self.storage.lastTransaction(), self.tids[-1])
        self.assertEqual(self.storage.load(self.kept), self.source.load(self.kept))
        view = self.storage.new_instance()
        view.poll_invalidations()
        self.assertEqual(view.load(self.kept), self.source.load(self.kept))
        view.release()

    def assertGone(self):
        with self.assertRaises(POSKeyError):
            self.other.load(self.kept)

    def start_afresh(self):
        """What the error has said: nothing else will do."""
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy()
        self.storage.zap_all()
        self.copy()
        self.assertComplete()

    def keeper(self):
        """Return a list that gets the session which keeps packs out of the storage."""
        lock, sessions = self.storage.database.adapter.pack_lock, []
        keep = lock.keep_packs_out

        def keep_and_tell(session, then):
            sessions.append(session)
            return keep(session, then)

        patch = mock.patch.object(lock, 'keep_packs_out', keep_and_tell)
        patch.start()
        self.addCleanup(patch.stop)
        return sessions


class Wrapped(Suite):
    """Through a storage around it that copies by itself: no lock keeps packs out."""

    def setUp(self):
        super().setUp()
        self.wrapped = HexStorage(self.storage)

    def copy(self, *acts):
        """As above: acts come before the transactions 2, 3, ... of the source."""
        self.copy_from(Acting(self.source, acts))

    def copy_from(self, source):
        try:
            self.wrapped.copyTransactionsFrom(source)
        finally:
            if self.wrapped.tpc_transaction() is not None:
                self.wrapped.tpc_abort(self.wrapped.tpc_transaction())

    def load(self):
        self.assertEqual(self.storage.lastTransaction(), self.tids[-1])
        self.assertEqual(self.wrapped.load(self.kept), self.source.load(self.kept))

    def test_packed_in_the_middle(self):
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy(None, None, None, self.pack)
        self.assertGone()
        self.assertEqual(self.storage.lastTransaction(), self.tids[3])
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy_rest()
        self.storage.zap_all()
        self.copy()
        self.load()

    def test_packed_without_collecting_garbage(self):
        self.copy(None, None, None, lambda: self.pack(gc=False))
        self.load()

    def test_packed_where_there_is_no_garbage(self):
        self.copy(None, self.pack, None, None, self.pack)
        self.load()

    def test_a_sweep_begins_in_the_middle(self):
        """What it has on its list nobody links, and when it has ended nothing is added."""
        def pack():
            with mock.patch.object(Packs, 'end_sweep', side_effect=Interrupted), \
                    self.assertRaises(Interrupted):
                self.pack()
            self.assertGone()

        with self.assertRaises(ConflictError):
            self.copy(None, None, pack)
        self.assertEqual(self.storage.lastTransaction(), self.tids[3])
        self.pack()
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy_rest()

    def test_goes_on_in_another_process(self):
        """Where nothing was removed; and then where it was."""
        self.interrupt_copy()
        self.storage = self.opened()
        self.wrapped = HexStorage(self.storage)
        self.copy_rest(until=4)
        self.assertEqual(self.storage.lastTransaction(), self.tids[3])
        self.pack()
        self.wrapped = HexStorage(self.opened())
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy_rest()

    def test_where_relstorage_may_write(self):
        """An empty database is whole, until another process goes on."""
        self.storage.database.adapter.writers.set('any')
        self.interrupt_copy()
        self.copy_rest(until=4)
        self.wrapped = HexStorage(self.opened())
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy_rest()

    def interrupt_copy(self):
        with self.assertRaises(Interrupted):
            self.copy(None, None, self.interrupt)
        self.assertEqual(self.storage.lastTransaction(), self.tids[2])

    def copy_rest(self, until=None):
        last = self.tids.index(self.storage.lastTransaction())
        for each in self.tids[last + 1:until]:
            self.copy_from(Acting(self.source, (), each, each))


class Acting:
    """A storage that does something before its transactions 2, 3, ... are read."""

    def __init__(self, storage, acts, *limits):
        self._storage, self._acts, self._limits = storage, acts, limits

    def iterator(self):
        with closing(self._storage.iterator(*self._limits)) as transactions:
            for transaction, act in zip_longest(transactions, (None, *self._acts)):
                if act is not None:
                    act()
                if transaction is not None:
                    yield transaction


class Resumed(Suite):

    def test_not_packed(self):
        self.copy_half()
        self.copy()
        self.assertComplete()

    def test_packed(self):
        self.copy_half()
        self.pack()
        self.assertGone()
        self.pack()
        self.pack(gc=False)
        self.start_afresh()

    def test_packed_without_collecting_garbage(self):
        self.copy_half()
        self.pack(gc=False)
        self.copy()
        self.assertComplete()
        self.pack(gc=False)
        self.pack()             # there is no garbage now
        self.pack(gc=False)
        self.copy()

    def test_a_sweep_was_interrupted(self):
        """It has removed nothing yet, or all."""
        self.copy_half()
        with mock.patch.object(self.other.database.adapter, 'sweep', side_effect=Interrupted), \
                self.assertRaises(Interrupted):
            self.pack()
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy()

    def test_what_the_source_has_since(self):
        """The copy was complete, and packed."""
        self.copy_half()
        self.copy()
        connection = DB(self.source).open()
        root, manager = connection.root(), connection.transaction_manager
        kept = root.pop('again')
        manager.commit()
        self.copy()
        self.pack()
        self.assertGone()
        root['once more'] = kept
        manager.commit()
        self.tids = [txn.tid for txn in self.source.iterator()]
        self.start_afresh()

    def test_into_what_commits_have_filled(self):
        """A database that relstore made, and nobody has packed: what was copied from it is copied back."""
        with closing(self.open_storage('elsewhere')) as elsewhere:
            with DB(elsewhere).transaction() as connection:
                connection.root()['here'] = 1
            there = FileStorage(str(self.here / 'There.fs'))
            self.addCleanup(there.close)
            there.copyTransactionsFrom(elsewhere)
            with DB(there).transaction() as connection:
                connection.root()['there'] = 1
            elsewhere.copyTransactionsFrom(there)
            self.assertEqual(elsewhere.lastTransaction(), there.lastTransaction())
            elsewhere.pack(None)        # there was no garbage
            elsewhere.copyTransactionsFrom(there)
            with DB(there).transaction() as connection:
                connection.root()['garbage'] = PersistentMapping()
            with DB(there).transaction() as connection:
                del connection.root()['garbage']
            elsewhere.copyTransactionsFrom(there)
            elsewhere.pack(None)
            with self.assertRaisesRegex(StorageError, EMPTY):
                elsewhere.copyTransactionsFrom(there)

    def test_where_relstorage_may_have_packed(self):
        self.copy_half()
        adapter = self.storage.database.adapter
        adapter.writers.set('any')
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy()
        adapter.writers.set('relstore')
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy()
        adapter.writers.set('any')
        self.storage.zap_all()
        self.copy_half()
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy()
        adapter.writers.set('relstore')
        self.storage.zap_all()
        self.copy_half()
        self.copy()
        self.assertComplete()


class Unguarded(Suite):
    """The session that keeps packs out ends in the middle."""

    def test_packed_in_the_middle(self):
        sessions = self.keeper()

        def pack():
            end(self, sessions[-1])
            self.pack()
            self.assertGone()

        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy(None, None, None, pack)
        self.assertEqual(self.storage.lastTransaction(), self.tids[3])
        self.start_afresh()

    def test_packed_before_the_last(self):
        """There was no garbage, but RelStorage might have packed, too."""
        sessions = self.keeper()

        def pack():
            end(self, sessions[-1])
            self.pack()

        with self.assertRaisesRegex(Unavailable, 'connection that kept packs out of .* was lost'):
            self.copy(None, None, None, None, pack)
        self.copy()
        self.assertComplete()

    def test_emptied_in_the_middle(self):
        sessions = self.keeper()

        def empty():
            end(self, sessions[-1])
            self.other.zap_all()

        with self.assertRaises((StorageError, Unavailable)):
            self.copy(None, None, None, empty)
        self.copy()
        self.assertComplete()

    def test_nothing_has_happened(self):
        """None that leaves a trace: RelStorage's packs do not. It is told at the end."""
        sessions = self.keeper()
        with self.assertRaisesRegex(Unavailable, 'connection that kept packs out of .* was lost'):
            self.copy(None, None, lambda: end(self, sessions[-1]))
        self.assertEqual(self.storage.lastTransaction(), self.tids[-1])
        self.copy()
        self.assertComplete()

    def test_it_is_told_soon(self):
        sessions = self.keeper()
        with mock.patch.object(copying, 'PROVE_EVERY_SECONDS', 0), \
                self.assertRaisesRegex(Unavailable, 'connection that kept packs out of .* was lost'):
            self.copy(None, None, lambda: end(self, sessions[-1]))
        self.assertEqual(self.storage.lastTransaction(), self.tids[2])
        self.copy()
        self.assertComplete()

    def test_it_is_told_within_a_transaction(self):
        """Before its next record is read; and before it is finished, where it has no more."""
        sessions = self.keeper()
        for at in 1, 2:
            read = []

            def act(n, at=at, read=read):
                read.append(n)
                if n == at:
                    end(self, sessions[-1])

            with mock.patch.object(copying, 'PROVE_EVERY_SECONDS', 0), \
                    self.assertRaisesRegex(Unavailable, 'connection that kept packs out of .* was lost'):
                self.storage.copyTransactionsFrom(Interrupting(self.source, self.tids[1], act))
            self.assertEqual(read, list(range(at + 1)))
            self.assertEqual(self.storage.lastTransaction(), self.tids[0])
        self.copy()
        self.assertComplete()


cases(globals(), Resumed, Unguarded, Wrapped, backends=HISTORY_PRESERVING + HISTORY_FREE + ORACLE)
del Resumed, Unguarded, Wrapped


class Pooled(Suite):
    """The lock cannot be had through a pooler; who packs leads past it."""

    def setUp(self):
        super().setUp()
        self.other = relstore.RelStore(relstore.PostgreSQL(self.dsn(), driver=self.driver),
                                       keep_history=self.keep_history)
        self.addCleanup(self.other.close)

    def test_packed_in_the_middle(self):
        with self.assertLogs('relstore', 'WARNING') as logs, \
                self.assertRaisesRegex(StorageError, EMPTY):
            self.copy(None, None, None, self.pack)
        self.assertIn('Let nobody pack', logs.output[0])
        self.start_afresh()

    def test_interrupted(self):
        self.copy_half()
        self.copy()
        self.assertComplete()

    def test_interrupted_and_packed(self):
        self.copy_half()
        self.pack()
        self.assertGone()
        with self.assertRaisesRegex(StorageError, EMPTY):
            self.copy()


cases(globals(), Pooled, backends=(Psycopg2PooledHistoryPreserving, Psycopg2PooledHistoryFree))
del Pooled


class Slow(Suite):
    """The source takes longer than the server lets a session be idle."""

    def test_it_is_kept_out_all_the_time(self):
        storage = relstore.RelStore(self.impatient_address(), keep_history=self.keep_history)
        self.addCleanup(storage.close)
        with closing(storage.database.adapter.connect()) as other:
            def wait():
                with self.assertRaises(StorageError):
                    for _ in within('the server ends an idle session'):
                        time.sleep(1.5)
                        other.all('SELECT 1')
            self.copy(None, None, None, wait, storage=storage)
        self.assertComplete()


class SlowPostgreSQL(Slow):

    def impatient_address(self):
        return relstore.PostgreSQL(f"{self.dsn()} options='-c idle_session_timeout=1000'", driver=self.driver)


class SlowMySQL(Slow):

    def impatient_address(self):
        watch = self.new_watch()
        self.addCleanup(watch.close)
        before = watch.one('SELECT @@global.wait_timeout')
        self.addCleanup(watch.rows, f'SET GLOBAL wait_timeout = {before}')
        watch.rows('SET GLOBAL wait_timeout = 1')
        return self.address()


cases(globals(), SlowPostgreSQL, backends=(Psycopg2HistoryFree, Psycopg3HistoryPreserving))
cases(globals(), SlowMySQL, backends=(PyMySQLHistoryFree,))
del Suite, Slow, SlowPostgreSQL, SlowMySQL
