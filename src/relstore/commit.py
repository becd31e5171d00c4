"""Transaction: one two-phase commit, from begin to finish or abort.

Between begin and vote nothing is sent to the database: stores gather in a spool. Vote locks and compares, finish
writes. Undo, restore and deletion are stores like any other.
"""
import time
from collections.abc import Callable

from ZODB.ConflictResolution import ConflictResolvingStorage
from ZODB.POSException import ConflictError, MultipleUndoErrors, ReadConflictError, UndoError
from ZODB.utils import p64

from relstore.adapters.base import Ballot, Metadata
from relstore.database import Database
from relstore.errors import Disconnected, OutcomeUnknown, StorageError, Unavailable
from relstore.session import Session
from relstore.spool import Spool

# Seconds to go on asking for the outcome of a commit, while no server can be reached.
OUTCOME_PATIENCE = 60.0


class Transaction:
    """What one ZODB transaction changes in one storage, and the session that it commits with, once it has voted.

    metadata: the object that tpc_begin was given.
    epoch: that of what it read.
    tid: given when the transaction is a copy of one that has a tid already.
    packed: whether that one was packed: then it cannot be undone.
    """

    def __init__(self, database: Database, metadata, epoch: str, tid: int | None = None, packed: bool = False):
        self._database, self._adapter = database, database.adapter
        self.metadata = metadata
        self._epoch = epoch
        self._tid, self._packed = tid, packed
        self._record: Metadata | None = None
        self._spool = Spool(database.untransform, digest=self._adapter.keep_history)
        self._reads: dict[int, int] = {}
        self._session: Session | None = None
        self._ticket: list = []
        self._generation = database.cache.generation
        self._highest = 0       # the largest oid that is new here and was not issued here
        self._batches = None

    # Before vote --------------------------------------------------------------------------------------------------

    def store(self, oid: int, base: int, state: bytes) -> None:
        self._spool.put(oid, base, state)

    def restore(self, oid: int, state: bytes | None, data_tid: int | None) -> None:
        self._spool.put(oid, 0, state, restored=True, data_tid=data_tid)

    def delete(self, oid: int, base: int) -> None:
        self._spool.put(oid, base, None)

    def read_current(self, oid: int, tid: int) -> None:
        self._reads[oid] = tid

    def undo(self, tid: int) -> list[int]:
        """Put back what transaction `tid` changed; return the oids. UndoError names what cannot be."""
        def changes(session):
            if not self._adapter.is_undoable(session, tid):
                raise UndoError('The transaction does not exist, or has been packed.')
            return self._adapter.changes_to_undo(session, tid)

        rows = self._database.pool.attempt(changes)
        undone, failures = [], []
        for oid, *row in rows:
            try:
                undone.append((oid, *self._undone(tid, oid, *row)))
            except UndoError as e:
                failures.append(e)
        if len(failures) > 1:
            raise MultipleUndoErrors([(failure._oid, failure._reason) for failure in failures])
        if failures:
            raise failures[0]
        for oid, base, state, data_tid in undone:       # all or nothing: the caller may go on after an UndoError
            self._spool.put(oid, base, state, data_tid=data_tid)
        return [oid for oid, *_ in rows]

    def _undone(self, tid: int, oid: int, written: str | None, current_tid: int, current: str | None, replaced: int,
                before: int | None) -> tuple[int, bytes | None, int | None]:
        """Return (base, state, data_tid) to put an object back. written, current: md5s, None where there is none."""
        if replaced and before is None:
            raise UndoError('The revision to go back to has been packed.', p64(oid))
        pending = self._spool.get(oid)
        if pending is not None:
            current = pending.md5
        if current == written:
            return current_tid, self._state(oid, before) if before else None, before
        return current_tid, self._undo_by_resolution(oid, tid, current_tid, before), None

    def _undo_by_resolution(self, oid: int, tid: int, current_tid: int, before: int | None) -> bytes:
        """Return what the object's class makes of going back from `tid` while keeping what came later."""
        pending = self._spool.get(oid)
        now = self._spool.state(pending) if pending is not None else self._state(oid, current_tid)
        undone, wanted = self._state(oid, tid), self._state(oid, before) if before else None
        if None in (now, undone, wanted):
            raise UndoError('A later transaction changed it, or removed it.', p64(oid))
        try:
            return self._resolve(oid, tid, undone, current_tid, now, wanted)
        except ConflictError as e:
            raise UndoError('A later transaction changed it, and its class cannot resolve that.', p64(oid)) from e

    def _state(self, oid: int, tid: int) -> bytes | None:
        row = self._database.pool.attempt(lambda session: self._adapter.load_serial(session, oid, tid))
        if row is None:
            raise UndoError('The revision to go back to has been packed.', p64(oid))
        return row[0]

    # Vote ---------------------------------------------------------------------------------------------------------

    def vote(self) -> list[int]:
        """Lock, compare, resolve conflicts, and do all that can fail. Return the oids of the resolved ones."""
        self._check_sizes()
        self._record = Metadata(_bytes(self.metadata.user), _bytes(self.metadata.description),
                                self.metadata.extension_bytes, self._packed)
        pool = self._database.pool
        self._session = pool.borrow()
        try:
            verdict = self._ask()
        except Disconnected:
            # A pooled connection that died unnoticed: nothing was done with it yet, so a new one may try.
            self._give_back()
            pool.retire()
            self._session = pool.borrow()
            verdict = self._ask()
        self._refuse(verdict)
        resolved = [self._resolve_conflict(*conflict) for conflict in verdict.conflicts]
        self._ticket = verdict.ticket
        self._reserve_oids()
        self._batches = self._adapter.stage(self._session, self._ticket, self._tid, self._record,
                                            self._spool.batches(self._adapter.message_size))
        return resolved

    def _check_sizes(self) -> None:
        largest = self._adapter.largest_state
        for row in self._spool:
            if row.size is not None and row.size > largest:
                raise StorageError(f'Object {row.oid:#x} has {row.size:,} bytes; {self._adapter} takes {largest:,} at '
                                   'most.')

    def _ask(self):
        spool, issued = self._spool, self._database.oids.issued
        bases = sorted((row.oid, row.base) for row in spool if not row.restored)
        reads = sorted((oid, tid) for oid, tid in self._reads.items() if spool.get(oid) is None)
        return self._adapter.vote(self._session, Ballot(
            epoch=self._epoch, timeout=self._database.options.commit_lock_timeout,
            bases=bases, locks=[oid for oid, base in bases if base or not issued(oid)],
            restored=[row.oid for row in spool if row.restored], reads=reads, restored_tid=self._tid))

    def _reserve_oids(self) -> None:
        """Objects that come with their oids must not meet others later, that are given the same."""
        oids = self._database.oids
        self._highest = max((row.oid for row in self._spool if not row.base and not oids.issued(row.oid)), default=0)
        if self._highest > oids.highest:
            self._adapter.reserve_oids(self._session, self._highest)

    def _refuse(self, verdict) -> None:
        if verdict.epoch_changed:
            self._session.rollback()
            self._database.poll(self._session)      # the next attempt is to know, also that of one who never polls
            raise Unavailable('The database was restarted after a crash, failed over, or restored since this '
                              'transaction read from it; nothing was stored.')
        if verdict.outdated:
            oid, tid = verdict.outdated[0]
            raise ReadConflictError(oid=p64(oid), serials=(p64(tid), p64(self._reads[oid])))
        if verdict.locked is not None:
            raise ReadConflictError('An object that was read is being changed by another transaction',
                                    oid=p64(verdict.locked))
        if verdict.last_tid is not None:
            raise StorageError(f'A transaction with the tid {self._tid:#x} cannot be added: the newest in the '
                               f'database has {verdict.last_tid:#x}.')

    def _resolve_conflict(self, oid: int, current_tid: int, current: bytes | None) -> int:
        pending = self._spool.get(oid)
        mine, base = self._spool.state(pending), pending.base
        old = self._old_state(oid, base) if base and mine is not None and current is not None else None
        if old is None:
            raise ConflictError(oid=p64(oid), serials=(p64(current_tid), p64(base)),
                                data=self._database.untransform(mine) if mine else None)
        self._spool.put(oid, base, self._resolve(oid, base, old, current_tid, current, mine))
        return oid

    def _old_state(self, oid: int, tid: int) -> bytes | None:
        """Return the state a change was based on. A history-free database has overwritten it: the cache may not."""
        state = self._database.cache.revision(oid, tid)
        if state is None and self._adapter.keep_history:
            [state] = self._adapter.load_serial(self._session, oid, tid) or [None]
        return state

    def _resolve(self, oid: int, old_tid: int, old: bytes, current_tid: int, current: bytes, mine: bytes) -> bytes:
        resolver = _Resolver(self._database, old)
        return resolver.tryToResolveConflict(p64(oid), p64(current_tid), p64(old_tid), mine, current)

    # Finish -------------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Make it permanent and return the tid.

        After an Exception nothing was stored, unless it is OutcomeUnknown. An interrupt (of the keyboard, say) asks
        no questions: the commit may have happened.
        """
        with self._database.announced():
            try:
                tid, _ = self._adapter.finish(self._session, self._ticket, self._tid, self._record, self._batches)
            except Exception as e:
                tid = self._outcome(e)
            except BaseException:
                self._session.broken = True
                raise
        # What went to the file would only push others out.
        rows = [row for row in self._spool if row.held is not None]
        self._database.cache.committed(tid, ((row.oid, row.held) for row in rows), self._generation)
        if self._database.tier is not None:
            self._database.tier.committed(tid, ((row.oid, row.held, row.refs) for row in rows), self._generation)
        self._database.oids.highest = max(self._database.oids.highest, self._highest)
        self.close()
        return tid

    def _outcome(self, error: Exception) -> int:
        """Return the tid if the database has committed in spite of the error; else raise it."""
        self._session.broken = True
        self._give_back()
        oids = [row.oid for row in self._spool]
        deadline = time.monotonic() + OUTCOME_PATIENCE
        while True:
            try:
                tid = self._database.pool.attempt(lambda s: self._adapter.outcome(s, self._ticket, oids))
                break
            except (StorageError, ConflictError) as e:
                # A server that recovers from a crash refuses connections for a while.
                if not isinstance(e, Disconnected) or time.monotonic() > deadline:
                    raise OutcomeUnknown(f'The commit was sent, then the connection failed ({error}); whether it '
                                         f'happened cannot be told: {e}') from error
                time.sleep(0.1)
        if tid is None:
            raise error
        return tid

    def close(self) -> None:
        """End it: whatever was not committed is rolled back, and the session returned."""
        self._give_back()
        self._spool.close()

    def _give_back(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._database.pool.give_back(session)


def _bytes(text: bytes | str) -> bytes:
    """ZODB converts what it is given at first, not what is assigned to the attribute later."""
    return text if isinstance(text, bytes) else text.encode('utf-8')


class _Resolver(ConflictResolvingStorage):
    """What ZODB's conflict resolution wants of a storage, for one object."""

    def __init__(self, database: Database, old: bytes):
        self._old = old
        self._crs_transform_record_data: Callable = database.transform
        self._crs_untransform_record_data: Callable = database.untransform

    def loadSerial(self, oid: bytes, serial: bytes) -> bytes:
        return self._old
