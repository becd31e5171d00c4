"""RelStore: the storage, as ZODB sees it. Oids and tids are bytes here, ints inside."""
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ZODB.interfaces import (
    IBlobStorageRestoreable,
    IExternalGC,
    IMultiCommitStorage,
    IMVCCAfterCompletionStorage,
    IMVCCPrefetchStorage,
    IStorageCurrentRecordIteration,
    IStorageIteration,
    IStorageRestoreable,
    IStorageTransactionMetaData,
    IStorageUndoable,
    IStorageWrapper,
    ReadVerifyingStorage,
)
from ZODB.mvccadapter import HistoricalStorageAdapter
from ZODB.POSException import (
    ConflictError,
    POSKeyError,
    ReadOnlyError,
    StorageTransactionError,
    Unsupported,
)
from ZODB.UndoLogCompatible import UndoLogCompatible
from ZODB.utils import p64, u64
from zope.interface import alsoProvides, implementer

from relstore import bulk, copying, history, iterate
from relstore.adapters.addresses import Address
from relstore.adapters.base import MAX_TID
from relstore.administration import Administration
from relstore.blobmethods import BlobMethods
from relstore.commit import OPEN, VOTED, Transaction
from relstore.database import Database
from relstore.oids import number_of
from relstore.options import Options
from relstore.unreadable import Unreadable
from relstore.view import View
from relstore.walk import Walks
from relstore.wrapping import Wrapping


@implementer(IMVCCPrefetchStorage, IMVCCAfterCompletionStorage, IMultiCommitStorage, ReadVerifyingStorage,
             IStorageRestoreable, IStorageIteration, IStorageCurrentRecordIteration, IExternalGC)
class RelStore(Administration, BlobMethods, UndoLogCompatible):
    """A ZODB storage: RelStore(SQLite(data_dir)), RelStore(PostgreSQL(dsn), keep_history=False).

    ZODB makes an instance for each connection with new_instance(). One thread at a time uses it. From one
    poll_invalidations() to the next it sees the database as of one tid: its view. An instance that never polls has no
    view and reads what is committed now. The one that the application makes (DB.storage) is of this kind, and several
    threads may call it at once.
    """

    def __init__(self, address: Address | Database, options: Options | None = None, **kw: Any):
        database = address if isinstance(address, Database) else Database(address, options or Options.make(**kw))
        self._database = database
        self._adapter, self._pool, self._cache = self._database.adapter, self._database.pool, self._database.cache
        self.__name__ = self._database.options.name or f'relstore {self._adapter.name}'
        self.view, self._blobs = View(self._database), self._database.blobs.new_instance()
        self._poll_may_fail = True              # may the next poll_invalidations raise an error?
        self._refused: set[int] = set()         # see Links
        self.committing: Transaction | None = None
        self.walks = Walks(self._adapter)
        self._wrapper = None                    # a storage around this one, see registerDB
        # Held while a commit is visible, but ZODB has not been told; see lastTransaction.
        self._finish_lock = threading.RLock()
        self._over_base = False                 # are these the changes of a DemoStorage? See _lock.
        self._commit_lock = threading.Lock()    # held from tpc_begin to tpc_finish or tpc_abort
        if self._adapter.keep_history:
            alsoProvides(self, IStorageUndoable)
        if database.blobs.supported:
            alsoProvides(self, IBlobStorageRestoreable)

    @property
    def database(self) -> Database:
        """What all instances share; for commands."""
        return self._database

    # IStorage: what it is -----------------------------------------------------------------------------------------

    def getName(self) -> str:
        return self.__name__

    def sortKey(self) -> str:
        """Return the same in every process: a transaction over several databases locks them in this order."""
        return f'relstore:{self._database.name}'

    def isReadOnly(self) -> bool:
        return self._database.options.read_only

    def registerDB(self, wrapper: IStorageWrapper) -> None:
        """Learn how a wrapper around this storage changes records."""
        self._wrapper = wrapper
        self._database.transform = wrapper.transform_record_data
        self._database.untransform = wrapper.untransform_record_data

    def close(self) -> None:
        self.release()
        self._database.close()

    # IMVCCStorage: instances and views ----------------------------------------------------------------------------

    def new_instance(self) -> 'RelStore':
        """Return an instance for one connection. It changes records as the wrapper around this storage does.

        Most wrappers have no new_instance of their own and pass this call on, so nothing wraps the new instance. A
        wrapper whose load is ours (ServerZlibStorage, say) leaves records alone when they are read.
        """
        if getattr(self._wrapper, 'load', self.load) == self.load:
            return RelStore(self._database)
        return _Wrapped(self._database, self._wrapper)

    def before_instance(self, before: bytes) -> HistoricalStorageAdapter:
        """Return a read-only instance that sees the database as it was before that tid."""
        return HistoricalStorageAdapter(self.new_instance(), before)

    def release(self) -> None:
        self.afterCompletion()
        self.walks.close()
        if self.committing is not None:
            self._end(self.committing)

    def sync(self, force: bool = True) -> None:
        """Do nothing: poll_invalidations, which ZODB calls next, asks the database.

        force: False if ZODB is inside of commit() or open().
        """
        self._poll_may_fail = force

    def afterCompletion(self) -> None:
        """Leave nothing open in the database between transactions."""
        self.view.end()
        self._blobs.end_view()

    def poll_invalidations(self) -> list[bytes] | None:
        """Move the view to now. Return the oids that changed since the last view; None if any object may have changed.

        If the database cannot be asked, this must not raise inside of commit(), which is done and would be repeated,
        nor inside of open(), where ZODB would lose the connection. Then the new transaction's first load raises.
        """
        changed = self.view.begin(self._poll_may_fail)
        return None if changed is None else [p64(oid) for oid in changed]

    # Reading ------------------------------------------------------------------------------------------------------

    def load(self, oid: bytes, version: str = '') -> tuple[bytes, bytes]:
        """Return (state, tid) as the view sees the object; without a view, as it is now."""
        view, cache = self.view, self._cache
        at = view.at
        if at is not None and view.generation == cache.generation:
            hit = cache.find(int.from_bytes(oid, 'big'), at)        # half as long as u64
            if hit is not None:
                view.hit = state = hit.state
                return state, hit.tid.to_bytes(8, 'big')
        number = int.from_bytes(oid, 'big')
        if len(oid) != 8 or number > MAX_TID:       # as in number_of, without a call
            raise POSKeyError(oid)
        row = view.load(number)
        if row is None or row[0] is None:
            raise POSKeyError(oid)
        if self._database.blobs.there:
            self._database.blobs.refuse_load(u64(oid), row[0])
        return row[0], p64(row[1])

    def loadBefore(self, oid: bytes, tid: bytes) -> tuple[bytes, bytes, bytes | None] | None:
        number, before = number_of(oid), min(u64(tid), MAX_TID)
        row = self._pool.attempt(self._adapter.load_before, number, before)
        if row is None:
            if self._pool.attempt(self._adapter.load_now, number) is None:
                raise POSKeyError(oid)
            return None
        state, start, end = row
        if state is None:
            raise POSKeyError(oid)
        self._database.blobs.refuse_load(number, state)
        return state, p64(start), p64(end) if end is not None else None

    def loadSerial(self, oid: bytes, serial: bytes) -> bytes:
        number, tid = number_of(oid), u64(serial)
        state = self._cache.revision(number, tid)
        if state is None and tid <= MAX_TID:
            row = self._pool.attempt(self._adapter.load_serial, number, tid)
            state = row and row[0]
        if state is None:
            raise POSKeyError(oid)
        self._database.blobs.refuse_load(number, state)
        return state

    def prefetch(self, oids: Iterable[bytes]) -> None:
        """Load objects into the cache, with one statement for many."""
        self.view.prefetch(map(u64, oids))

    def getTid(self, oid: bytes) -> bytes:
        number = number_of(oid)
        row = self._pool.attempt(self._adapter.load_now, number)
        if row is None or row[0] is None:
            raise POSKeyError(oid)
        return p64(row[1])

    def lastTransaction(self) -> bytes:
        """Return the tid of this view's state; without a view, of the newest transaction."""
        if self.view.at is not None:
            return p64(self.view.at)
        # A caller with a cache of its own learns of our commits by the `func` of tpc_finish. That must come first.
        with self._finish_lock:
            return p64(self._pool.attempt(self._adapter.last_tid))

    # Committing: IStorage, IMultiCommitStorage, ReadVerifyingStorage, IExternalGC, IStorageRestoreable ----------------

    def new_oid(self) -> bytes:
        self._check_writable()
        return p64(self._database.oids.new())

    def tpc_begin(self, transaction: IStorageTransactionMetaData, tid: bytes | None = None, status: str = ' ') -> None:
        if self._database.options.read_only:
            raise ReadOnlyError()
        if self.committing is not None and self.committing.metadata is transaction:
            raise StorageTransactionError('Duplicate tpc_begin calls for same transaction')
        self._commit_lock.acquire()
        try:
            origin = self.view.begin_commit()      # an instance holds one session at most
            self.committing = Transaction(self._database, transaction, origin, self._refused,
                                    None if tid is None else u64(tid), packed=status == 'p')
        except BaseException:
            self._commit_lock.release()
            raise

    def store(self, oid: bytes, serial: bytes | None, data: bytes, version: str,
              transaction: IStorageTransactionMetaData) -> None:
        txn, base = self._current(transaction), u64(serial) if serial else 0
        if base and self._over_base and self._pool.attempt(self._adapter.current_tid, u64(oid)) is None:
            base = 0        # of an object in the base, to which the DemoStorage has compared it
        txn.store(u64(oid), base, data)

    def restore(self, oid: bytes, serial: bytes, data: bytes | None, version: str, prev_txn: bytes | None,
                transaction: IStorageTransactionMetaData) -> None:
        self._current(transaction).restore(u64(oid), data, u64(prev_txn) if prev_txn else None)

    def deleteObject(self, oid: bytes, serial: bytes, transaction: IStorageTransactionMetaData) -> None:
        self._current(transaction).delete(u64(oid), u64(serial))

    def checkCurrentSerialInTransaction(self, oid: bytes, serial: bytes, transaction: IStorageTransactionMetaData
                                        ) -> None:
        self._current(transaction).read_current(u64(oid), u64(serial))

    def tpc_vote(self, transaction: IStorageTransactionMetaData) -> list[bytes]:
        txn = self._current(transaction)
        try:
            return list(map(p64, txn.vote()))
        except ConflictError:
            self._database.polling.forget()     # the other commit may not be counted yet: the next attempt must ask
            raise

    def tpc_finish(self, transaction: IStorageTransactionMetaData, func: Callable[[bytes], None] | None = None
                   ) -> bytes:
        txn = self._current(transaction, VOTED)
        if self.view.unshared:
            self.view.share()      # while there is a view
        try:
            with self._finish_lock:
                tid = txn.finish()
                self.view.committed(tid)
                if func is not None:
                    func(p64(tid))
                return p64(tid)
        finally:
            self._end(txn)

    def tpc_abort(self, transaction: IStorageTransactionMetaData) -> None:
        if self.committing is not None and self.committing.metadata is transaction:
            self._end(self.committing)

    def _current(self, transaction: IStorageTransactionMetaData, phase: str = OPEN) -> Transaction:
        """Return the transaction that is being committed. StorageTransactionError: it is another one, or too late."""
        txn = self.committing
        if txn is None or txn.metadata is not transaction:
            self._check_writable()      # such a storage never has one
            raise StorageTransactionError('This is not the transaction that the storage is committing.')
        if txn.phase is not phase:
            raise StorageTransactionError(f'This cannot be done with the transaction now: {txn.phase}.')
        return txn

    def _end(self, txn: Transaction) -> None:
        try:
            txn.close()
        finally:
            self.committing = None
            self._commit_lock.release()

    def tpc_transaction(self) -> IStorageTransactionMetaData | None:
        """Return the transaction that is being committed, or None. A ZEO server asks."""
        txn = self.committing         # another thread may end it
        return None if txn is None else txn.metadata

    @property
    def _lock(self) -> threading.RLock:
        """A DemoStorage takes the lock of its changes. So we learn that objects may be in its base."""
        self._over_base = True
        return self._finish_lock

    # IStorageUndoable ---------------------------------------------------------------------------------------------

    def supportsUndo(self) -> bool:
        return self._adapter.keep_history

    def undo(self, transaction_id: bytes, transaction: IStorageTransactionMetaData) -> tuple[None, list[bytes]]:
        """Undo a transaction as part of this one; return (None, oids of the objects that are put back)."""
        txn = self._current(transaction)
        self._check_history()
        return None, [p64(oid) for oid in txn.undo(u64(transaction_id))]

    def undoLog(self, first: int = 0, last: int = -20, filter: Callable[[dict[str, Any]], bool] | None = None
                ) -> list[dict[str, Any]]:
        self._check_history()
        return history.undo_log(self._database, first, last, filter)

    def _check_history(self) -> None:
        if not self._adapter.keep_history:
            raise Unsupported('A history-free storage keeps nothing to go back to.')

    # History and iteration: IStorage, IStorageIteration, IStorageCurrentRecordIteration -------------------------------

    def history(self, oid: bytes, size: int = 1) -> list[dict[str, Any]]:
        return history.history(self._database, number_of(oid), size)

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> iterate.TransactionIterator:
        return iterate.TransactionIterator(self._database, self.walks, min(u64(start), MAX_TID) if start else 0,
                                           min(u64(stop), MAX_TID) if stop else MAX_TID)

    def record_iternext(self, next: bytes | None = None) -> tuple[bytes, bytes, bytes, bytes | None]:
        """Return (oid, tid, state, next), all from one snapshot. The last `next` is None.

        next: None, or an oid to begin at; or what the last call returned. That is valid in this instance only, for half
        an hour (a minute after a call with an oid), and its first 8 bytes are the oid of the next object.
        ValueError: there is nothing, or `next` is none of these. Unavailable: the snapshot is gone, begin again.
        """
        oid, tid, state, following = self.walks.record(next)
        return p64(oid), p64(tid), state, following

    def bulk(self, single: bulk.Single, look: Callable[[], None], progress: copying.Progress, unreadable: Unreadable
             ) -> bulk.Bulk | None:
        """Return what takes many transactions at once; see there. None: they have to come one by one."""
        self._check_writable()
        if self._adapter.may_lag:
            return None
        return bulk.Bulk(self._database, self.view, self._commit_lock, single, look, progress, unreadable)

    def unreadable(self, transaction: IStorageTransactionMetaData, limit: int) -> tuple[int, list[tuple[int, bytes]]]:
        """Tell of a transaction that has voted of how many records the references are unknown.

        Return their number, and (oid, record) of so many of them at most.
        """
        return self._current(transaction, VOTED).unreadable(limit)

    def copyTransactionsFrom(self, other: Any, progress: copying.Progress | None = None) -> None:
        """Copy all transactions of another storage; see copying.copy_transactions.

        Nobody can pack meanwhile: a transaction that is still to come may link what is garbage now. Unavailable: packs
        could not be kept out to the end, so copy again. StorageError: nothing can be added to what is here.
        """
        self._check_writable()
        with copying.guarded(self._adapter) as guard:
            copying.copy_transactions(other, self, guard, progress)


class _Wrapped(Wrapping, RelStore):
    """An instance that wraps and unwraps records itself."""
