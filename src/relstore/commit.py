"""Transaction: one two-phase commit, from begin to finish or abort.

Between begin and vote nothing is sent to the database: stores gather in a spool. Vote locks and compares, finish
writes. Undo, restore and deletion are stores like any other.
"""
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from ZODB.interfaces import IStorageTransactionMetaData
from ZODB.POSException import ReadConflictError, UndoError
from ZODB.utils import p64

from relstore.adapters.base import LARGEST, MAX_TID
from relstore.adapters.commits.base import AnyCommit, Ballot, Metadata, Verdict
from relstore.caching.epochs import Origin
from relstore.database import Database
from relstore.errors import (
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    OutOfLocks,
    StorageError,
    Unavailable,
)
from relstore.outcome import outcome
from relstore.packing.links import Links
from relstore.resolving import class_of, explained, resolve_conflicts
from relstore.sessions.session import Session
from relstore.spool import Spool
from relstore.undo import Undo

# How far a transaction has got, and what is wrong with calling anything else now.
OPEN = 'it has not voted: tpc_vote comes before tpc_finish'
FAILED = 'its vote has failed, and nothing but tpc_abort can follow'
VOTED = 'it has voted, and nothing but tpc_finish or tpc_abort can follow'
# For a finish that need not be watched.
UNWATCHED = nullcontext()


class Transaction:
    """One ZODB transaction in one storage: what it changes, and from the vote on the database's side of the commit.

    metadata: the object that tpc_begin was given.
    refused: see Links.
    tid: only for a copy of a transaction that has a tid already.
    packed: whether that transaction was packed, so that it cannot be undone.
    """

    def __init__(self, database: Database, metadata: IStorageTransactionMetaData, origin: Origin, refused: set[int],
                 tid: int | None = None, packed: bool = False):
        self._database, self._adapter = database, database.adapter
        if tid is not None and tid > LARGEST:
            raise StorageError(f'A transaction with the tid {tid:#x} cannot be added: the largest is {LARGEST:#x}, for '
                               'each later one needs a larger one.')
        self.metadata = metadata
        self.phase = OPEN
        self._epoch, self._origin = database.epochs.of(origin.generation), origin
        self._refused, self._tid, self._packed = refused, tid, packed
        self._record: Metadata     # from vote on
        self._spool = Spool(database.untransform, digest=self._adapter.keep_history)
        self.blobs = database.blobs.new_pending()
        self._reads: dict[int, int] = {}
        self._deleted: set[int] = set()     # by an external collector: see `_look_at_deletions`
        self.commit: AnyCommit = None      # type: ignore[assignment]  # from vote on; saves a check at each use
        self._generation = database.cache.generation
        self._highest = 0       # the largest new oid that this process did not issue
        self._taken: Callable[[], None] | None = None       # called after the commit: see Marks
        self._sweeps = 0        # how many there were when the database said where blobs are
        self._sent = False      # were the states sent ahead of the vote?

    # Before vote --------------------------------------------------------------------------------------------------

    def store(self, oid: int, base: int, state: bytes) -> None:
        if state is None:
            raise TypeError('None is not a state; use deleteObject.')
        self._spool.put(oid, base, state)

    def restore(self, oid: int, state: bytes | None, data_tid: int | None) -> None:
        self._spool.put(oid, 0, state, restored=True, data_tid=data_tid)

    def delete(self, oid: int, base: int) -> None:
        self._spool.put(oid, base, None)
        self._deleted.add(oid)

    def read_current(self, oid: int, tid: int) -> None:
        if oid > MAX_TID or tid > MAX_TID:
            raise StorageError(f'There is no object {oid:#x} with the tid {tid:#x}: both end at {MAX_TID:#x}.')
        self._reads[oid] = tid

    def undo(self, tid: int) -> list[int]:
        """Put back what transaction `tid` changed; return the oids. UndoError names the objects that cannot be."""
        return Undo(self._database, self._spool, tid).run()

    # Vote ---------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        return self.commit.session

    def vote(self) -> list[int]:
        """Lock, compare, resolve conflicts, and do all that can fail. Return the oids of the resolved ones."""
        self.phase = FAILED     # until it succeeds
        database, spool = self._database, self._spool
        self._record = Metadata.of(self.metadata, self._packed)
        if self.blobs.oids:
            self.blobs.prepare(database.pool.attempt)
        verdict = self._verdict(self._ballot())
        self._refuse(verdict)
        commit = self.commit
        session = commit.session
        if self._tid is not None:
            database.whole.look(session, self._epoch, verdict.sweeps)
        resolved = []
        if verdict.conflicts:
            resolved = resolve_conflicts(database, session, spool, verdict.conflicts)
        if spool.blobs or spool.deleted:
            database.blobs.refuse_change(session, spool.blobs, spool.deleted)
        links = Links(database, session, spool, self._origin, self._refused)
        links.look(verdict, copied=self._tid is not None)
        if self._deleted:
            self._look_at_deletions(links)
        if database.marks is not None:
            self._taken = database.marks.take_off(session, verdict.sweeps, verdict.sweeping, links)
        if self._highest > database.oids.highest:
            self._reserve_oids()
        if spool.blobs:
            self._repeat_blobs(verdict.sweeps)
        if spool.deleted and database.blobs.supported and not self._adapter.keep_history:
            self._delete_blobs()
        if self._sent:
            commit.send_again(spool.batches(self._adapter.message_size, resolved))
        else:
            commit.stage(spool.batches(self._adapter.message_size))
        self.phase = VOTED
        return resolved

    def _repeat_blobs(self, sweeps: int) -> None:
        """An undo puts back the earlier revision's blob, too. A copy may lack a blob that its source lacks."""
        blobs, session, copies = self._database.blobs, self.session, {}
        if not blobs.supported:
            return
        blobs.say_where(session, sweeps)
        self._sweeps = sweeps
        for oid in self._spool.blobs - self.blobs.oids:
            row = self._spool[oid]
            if row.data_tid is None and not row.restored:
                raise StorageError(f'The blob {oid:#x} is stored without its data: storeBlob brings that along.')
            if row.data_tid and self._adapter.keep_history and (
                    not row.restored or blobs.has(session, oid, row.data_tid)):
                copies[oid] = row.data_tid
        if copies:
            self.blobs.copy(self.commit, copies)
        self.blobs.hold(session)
        for oid, tid in copies.items():     # checked last: what is removed never comes back
            if not blobs.has(session, oid, tid):
                raise UndoError('The data of the blob to go back to is not there.', p64(oid))

    def _delete_blobs(self) -> None:
        """Without history nothing needs the data of what is deleted any more."""
        oids = self._adapter.chunks.of(self.session, self._spool.deleted)
        if oids:
            self.commit.delete_blobs(oids)

    def _verdict(self, ballot: Ballot) -> Verdict:
        """Send the vote, again if that may help, and count what it waited for."""
        conflicts, began = self._database.conflicts, time.monotonic()
        try:
            try:
                verdict = self._ask(ballot)
            except Disconnected:
                # A pooled connection had died unnoticed. Nothing was done on it, so a new one may try.
                self._give_back()
                self._database.pool.retire()
                verdict = self._ask(ballot)
            except OutOfLocks:
                # Other transactions hold too many. Alone, this one needs a single lock.
                self._give_back()
                verdict = self._ask(replace(ballot, alone=True))
            except Deadlock:
                # It was rolled back, and the other one goes on. MariaDB 10.11 reports deadlocks that are none: it
                # queues a SKIP LOCKED for a moment, and whoever waits for the lock holder then sees a circle.
                conflicts.deadlock()
                self._give_back()
                verdict = self._ask(ballot)
            except DatabaseError:
                if self.commit is not None:        # there was a session
                    self._database.refuse_another_version(self.session)
                raise
        except LockTimeout as e:
            conflicts.lock_timeout(time.monotonic() - began, e.lock, self._class_of(e.lock))
            raise
        except Deadlock:
            conflicts.deadlock()
            raise
        for lock, seconds in verdict.waits:
            conflicts.waited(lock, seconds, self._class_of(lock))
        return verdict

    def _ask(self, ballot: Ballot) -> Verdict:
        adapter, spool = self._adapter, self._spool
        self.commit = commit = adapter.commit_type(adapter, self._database.pool.borrow(), self._record, self._tid)
        if self.blobs.oids:
            self.blobs.send(commit)
        self._sent = spool.size >= adapter.message_size and commit.send_ahead(spool.batches(adapter.message_size))
        return commit.vote(ballot)

    def _ballot(self) -> Ballot:
        """Walk through what is to be stored: once, because it may be large."""
        adapter, database = self._adapter, self._database
        issued, largest = database.oids.issued, adapter.largest_state
        bases, locks, restored, self._highest = [], [], [], 0
        for row in self._spool.rows():
            oid, base, size = row.oid, row.base, row.size
            if size is not None and size > largest:
                raise StorageError(f'Object {oid:#x} has {size:,} bytes; {adapter} takes {largest:,} at most.')
            others = base or not issued(oid)        # may others write this object?
            if not base and others:
                self._highest = oid         # rows come in the order of oids
            if row.restored:
                restored.append(oid)
                continue
            bases.append((oid, base))
            if others:
                locks.append(oid)
        reads = sorted((oid, tid) for oid, tid in self._reads.items() if oid not in self._spool) if self._reads else []
        lags = adapter.may_lag      # this node may not have what this process knows of
        known = () if lags or adapter.keep_history else database.changed_last()
        return Ballot(
            epoch=self._epoch if self._generation >= database.epochs.first else '',
            at=None if lags else self._origin.at, known=known, bases=bases, locks=locks,
            timeout=database.options.commit_lock_timeout, restored=restored, reads=reads, restored_tid=self._tid,
            alone=len(locks) + len(reads) > adapter.most_locks, deletes=bool(self._deleted))

    def _reserve_oids(self) -> None:
        """See that no new object is ever given an oid that an object of this transaction has brought along."""
        if self._highest > LARGEST:
            raise StorageError(f'The object {self._highest:#x} cannot be added: the largest that brings its oid along '
                               f'is {LARGEST:#x}, for new objects need larger ones.')
        self._adapter.reserve_oids(self.session, self._highest)

    def _refuse(self, verdict: Verdict) -> None:
        went_back = bool(verdict.conflicts or verdict.outdated) and self._went_back(verdict)
        if verdict.epoch_changed or went_back:
            self.session.rollback()
            # So that the next attempt knows, even if its instance never polls.
            self._database.poll(self.session, went_back)
            raise Unavailable('The database was restarted after a crash, failed over, or restored since this '
                              'transaction read from it; nothing was stored.')
        if verdict.outdated:
            oid, tid = verdict.outdated[0]
            error = ReadConflictError(oid=p64(oid), serials=(p64(tid), p64(self._reads[oid])))
            raise explained(self._database, self.session, error)
        if verdict.locked is not None:
            tid = p64(self._reads[verdict.locked])
            error = ReadConflictError('An object that was read is being changed by another transaction',
                                      oid=p64(verdict.locked), serials=(tid, tid))
            raise explained(self._database, self.session, error)
        if verdict.last_tid is not None:
            raise StorageError(f'A transaction with the tid {self._tid:#x} cannot be added: the newest in the '
                               f'database has {verdict.last_tid:#x}.')

    def _went_back(self, verdict: Verdict) -> bool:
        """Whether an object is older in the database than the revision on which this transaction is based.

        That counts only if this process knows of the newer revision: a caller may claim any tid.
        """
        if self._adapter.may_lag:
            return False
        cache = self._database.cache
        bases = [(oid, tid, self._spool[oid].base) for oid, tid, _ in verdict.conflicts]
        bases += [(oid, tid, self._reads[oid]) for oid, tid in verdict.outdated]
        return any(0 < tid < base and cache.knows(oid, base) for oid, tid, base in bases)

    def _look_at_deletions(self, links: Links) -> None:
        """An external collector deletes what it takes for garbage. See that nothing has linked it since its view.

        This vote keeps all others out. So what voted earlier is seen here, and what votes later sees the deletion.
        Without a view nobody knows when the collector looked.
        """
        if self._origin.at is not None:
            links.look_since(self._origin.at, self._deleted)
        self.commit.tell_deletion()

    def _class_of(self, lock: int | None) -> str:
        pending = None if lock is None else self._spool.get(lock)
        return class_of(self._database, pending.held) if pending else ''

    # Finish -------------------------------------------------------------------------------------------------------

    def unreadable(self, limit: int) -> tuple[int, list[tuple[int, bytes]]]:
        """Return of how many records the references are unknown, and (oid, record) of the first of them."""
        oids, plain = self._spool.unreadable, self._database.plain
        return len(oids), [(oid, plain(self._spool[oid].held or b'')) for oid in sorted(oids)[:limit]]

    def finish(self) -> int:
        """Make it permanent and return the tid.

        After an Exception nothing was stored, unless it is OutcomeUnknown. After an interrupt (KeyboardInterrupt, say)
        the outcome is not looked up: the commit may have happened.
        """
        database, commit = self._database, self.commit
        with database.announced(), database.finishing.watched(commit) if commit.finish_waits else UNWATCHED:
            try:
                if self.blobs.oids:
                    self.blobs.place(commit)
                tid, waited = commit.finish()
            except Exception as e:
                tid, waited = self._outcome(e), 0.0
            except BaseException:
                commit.session.broken = True
                raise
        self.commit = None     # type: ignore[assignment]  # as in __init__
        if commit.session is not None:
            database.pool.take_back(commit.session)     # its transaction has ended
        if self.blobs.oids:
            self.blobs.committed(tid)
        if self._spool.blobs:
            database.blobs.said(self._sweeps)
        written, states = [], []
        for row in self._spool:
            if row.size is not None:
                written.append(row.oid)
            if row.held is not None:        # states in the file would push too much out of the cache
                states.append((row.oid, row.held))
        database.committed(tid, written)
        database.cache.committed(tid, states, self._generation)
        if database.tier is not None:
            database.tier.committed(tid, ((row.oid, row.held, row.refs) for row in self._spool if row.held is not None),
                                    self._generation)
        database.oids.highest = max(database.oids.highest, self._highest)
        if self._taken is not None:
            self._taken()
        database.conflicts.committed(waited)
        return tid

    def _outcome(self, error: Exception) -> int:
        """Return the tid if the database has committed in spite of the error; else raise it."""
        self.session.broken = True
        self._give_back()
        return outcome(self._database, self.commit, [row.oid for row in self._spool], error)

    def close(self) -> None:
        """Roll back what was not committed, and return the session."""
        if self.commit is not None:
            self._give_back()
        self.blobs.close()
        self._spool.close()

    def _give_back(self) -> None:
        commit = self.commit
        if commit is not None and commit.session is not None:
            session, commit.session = commit.session, None
            self._database.pool.give_back(session)
