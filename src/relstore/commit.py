"""Transaction: one two-phase commit, from begin to finish or abort.

Between begin and vote nothing is sent to the database: stores gather in a spool. Vote locks and compares, finish
writes. Undo, restore and deletion are stores like any other.
"""
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from ZODB.ConflictResolution import ConflictResolvingStorage
from ZODB.interfaces import IStorageTransactionMetaData
from ZODB.POSException import ConflictError, MultipleUndoErrors, ReadConflictError, UndoError
from ZODB.utils import p64, u64

from relstore.adapters.base import LARGEST, MAX_TID
from relstore.adapters.commits.base import AnyCommit, Ballot, Metadata, Verdict
from relstore.adapters.numbers import TOGETHER
from relstore.caching.epochs import Origin
from relstore.database import Database
from relstore.errors import (
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    OutcomeUnknown,
    OutOfLocks,
    StorageError,
    Unavailable,
)
from relstore.packing.links import Links, is_in_any
from relstore.references import class_name, plain
from relstore.sessions.session import Row, Session
from relstore.spool import Spool

# Seconds to go on asking for the outcome of a commit, while no server can be reached.
OUTCOME_PATIENCE = 60.0
# Objects that tell in a vote, where no history does, that what was read is still there.
PROBES = 5
# How far a transaction is, and what that means for whoever wants to go on otherwise.
OPEN = 'it has not voted: tpc_vote comes before tpc_finish'
FAILED = 'its vote has failed, and nothing but tpc_abort can follow'
VOTED = 'it has voted, and nothing but tpc_finish or tpc_abort can follow'
# Around a finish that nobody need look at.
UNWATCHED = nullcontext()
# Bytes of another transaction's user and description that a ConflictError quotes: in all it is to have 2 kB at most.
LONGEST_USER, LONGEST_DESCRIPTION = 200, 800


class Transaction:
    """What one ZODB transaction changes in one storage, and from the vote on what the database does for it.

    metadata: the object that tpc_begin was given.
    refused: see Links.
    tid: given when the transaction is a copy of one that has a tid already.
    packed: whether that one was packed: then it cannot be undone.
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
        self._deleted: set[int] = set()     # by a collector outside: see `_look_at_deletions`
        self._commit: AnyCommit = None      # type: ignore[assignment]  # from vote on: no check where it is used
        self._generation = database.cache.generation
        self._highest = 0       # the largest oid that is new here and was not issued here
        self._taken: Callable[[], None] | None = None       # to be called when it is committed: see Marks
        self._sent = False      # were the states sent ahead of the vote?

    # Before vote --------------------------------------------------------------------------------------------------

    def store(self, oid: int, base: int, state: bytes) -> None:
        if state is None:
            raise TypeError('None is no state; deleteObject deletes.')
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
        """Put back what transaction `tid` changed; return the oids. UndoError names what cannot be."""
        def changes(session: Session) -> list[Row]:
            if tid > MAX_TID or session.one(self._adapter.sql.transaction_is_undoable, (tid,)) is None:
                raise UndoError('The transaction does not exist, or has been packed.')
            return session.all(self._adapter.sql.undo, (tid,))

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
        now = pending.held if pending is not None else self._state(oid, current_tid)
        undone, wanted = self._state(oid, tid), self._state(oid, before) if before else None
        if now is None or undone is None or wanted is None:
            raise UndoError('A later transaction changed it, or removed it.', p64(oid))
        resolved = self._resolve(oid, tid, undone, current_tid, now, wanted)
        if resolved is None:
            raise UndoError('A later transaction changed it, and its class cannot resolve that.', p64(oid))
        return resolved

    def _state(self, oid: int, tid: int) -> bytes | None:
        row = self._database.pool.attempt(self._adapter.load_serial, oid, tid)
        if row is None:
            raise UndoError('The revision to go back to has been packed.', p64(oid))
        return row[0]

    # Vote ---------------------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        return self._commit.session

    def vote(self) -> list[int]:
        """Lock, compare, resolve conflicts, and do all that can fail. Return the oids of the resolved ones."""
        self.phase = FAILED     # until it has not
        database, spool, metadata = self._database, self._spool, self.metadata
        user, description = metadata.user, metadata.description
        if not (isinstance(user, bytes) and isinstance(description, bytes)):
            user, description = _bytes(user), _bytes(description)
        self._record = Metadata(user, description, metadata.extension_bytes, self._packed)
        verdict = self._verdict(self._ballot())
        self._refuse(verdict)
        commit = self._commit
        session = commit.session
        if self._tid is not None:
            database.whole.look(session, self._epoch, verdict.sweeps)
        resolved = self._resolve_conflicts(verdict.conflicts) if verdict.conflicts else []
        if spool.blobs or spool.deleted:
            database.blobs.refuse_change(session, spool.blobs, spool.deleted)
        links = Links(database, session, spool, self._refused)
        self._look_at_links(links, verdict)
        if self._deleted:
            self._look_at_deletions(links)
        if database.marks is not None:
            self._taken = database.marks.take_off(session, verdict.sweeps, verdict.sweeping, links)
        if self._highest > database.oids.highest:
            self._reserve_oids()
        if spool.blobs:
            self._repeat_blobs()
        if self._sent:
            commit.send_again(spool.batches(self._adapter.message_size, resolved))
        else:
            commit.stage(spool.batches(self._adapter.message_size))
        self.phase = VOTED
        return resolved

    def _repeat_blobs(self) -> None:
        """What puts an earlier revision back, an undo, puts back its blob. A copy may lack what its source lacks."""
        blobs, session, copies = self._database.blobs, self._session, {}
        if not blobs.supported:
            return
        blobs.say_where(session)
        for oid in self._spool.blobs - self.blobs.oids:
            row = self._spool[oid]
            if row.data_tid is None and not row.restored:
                raise StorageError(f'The blob {oid:#x} is stored without its data: storeBlob brings that along.')
            if row.data_tid and self._adapter.keep_history and (
                    not row.restored or blobs.has(session, oid, row.data_tid)):
                copies[oid] = row.data_tid
        if copies:
            self.blobs.copy(self._commit, copies)
        for oid, tid in copies.items():     # asked afterwards, for what goes never comes back
            if not blobs.has(session, oid, tid):
                raise UndoError('The data of the blob to go back to is not there.', p64(oid))

    def _verdict(self, ballot: Ballot) -> Verdict:
        """Ask, and count what had to be waited for."""
        conflicts, began = self._database.conflicts, time.monotonic()
        try:
            try:
                verdict = self._ask(ballot)
            except Disconnected:
                # A pooled connection that died unnoticed: nothing was done with it yet, so a new one may try.
                self._give_back()
                self._database.pool.retire()
                verdict = self._ask(ballot)
            except OutOfLocks:
                # Others hold many; alone it needs a single one.
                self._give_back()
                verdict = self._ask(replace(ballot, alone=True))
            except Deadlock:
                # Nothing of it is left, and the other goes on. MariaDB finds deadlocks that are none: it queues a
                # SKIP LOCKED for a moment, in which whoever waits for the lock holder sees a circle (10.11).
                conflicts.deadlock()
                self._give_back()
                verdict = self._ask(ballot)
            except DatabaseError:
                if self._commit is not None:        # else there was no session
                    self._database.refuse_another_version(self._session)
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
        self._commit = commit = adapter.commit_type(adapter, self._database.pool.borrow(), self._record, self._tid)
        if self.blobs:
            self.blobs.send(commit)
        self._sent = spool.size >= adapter.message_size and commit.send_ahead(spool.batches(adapter.message_size))
        return commit.vote(ballot)

    def _ballot(self) -> Ballot:
        """Walk through what is to be stored: once, for there may be much of it."""
        adapter, database = self._adapter, self._database
        issued, largest = database.oids.issued, adapter.largest_state
        bases, locks, restored, self._highest = [], [], [], 0
        for row in self._spool.rows():
            oid, base, size = row.oid, row.base, row.size
            if size is not None and size > largest:
                raise StorageError(f'Object {oid:#x} has {size:,} bytes; {adapter} takes {largest:,} at most.')
            others = base or not issued(oid)        # may others write it?
            if not base and others:
                self._highest = oid         # they come in order
            if row.restored:
                restored.append(oid)
                continue
            bases.append((oid, base))
            if others:
                locks.append(oid)
        reads = sorted((oid, tid) for oid, tid in self._reads.items() if oid not in self._spool) if self._reads else []
        lags = adapter.may_lag      # there what is known may not have arrived
        known = () if lags or adapter.keep_history else database.changed_last(PROBES)
        return Ballot(
            epoch=self._epoch if database.epochs.is_current(self._generation) else '',
            at=None if lags else self._origin.at, known=known, bases=bases, locks=locks,
            timeout=database.options.commit_lock_timeout, restored=restored, reads=reads, restored_tid=self._tid,
            alone=len(locks) + len(reads) > adapter.most_locks, deletes=bool(self._deleted))

    def _reserve_oids(self) -> None:
        """Objects that come with their oids must not meet others later, that are given the same."""
        if self._highest > LARGEST:
            raise StorageError(f'The object {self._highest:#x} cannot be added: the largest that brings its oid along '
                               f'is {LARGEST:#x}, for new objects need larger ones.')
        self._adapter.reserve_oids(self._session, self._highest)

    def _refuse(self, verdict: Verdict) -> None:
        went_back = bool(verdict.conflicts or verdict.outdated) and self._went_back(verdict)
        if verdict.epoch_changed or went_back:
            self._session.rollback()
            # The next attempt is to know, also that of one who never polls.
            self._database.poll(self._session, went_back)
            raise Unavailable('The database was restarted after a crash, failed over, or restored since this '
                              'transaction read from it; nothing was stored.')
        if verdict.outdated:
            oid, tid = verdict.outdated[0]
            raise self._conflict(ReadConflictError(oid=p64(oid), serials=(p64(tid), p64(self._reads[oid]))))
        if verdict.locked is not None:
            tid = p64(self._reads[verdict.locked])
            raise self._conflict(ReadConflictError('An object that was read is being changed by another transaction',
                                                   oid=p64(verdict.locked), serials=(tid, tid)))
        if verdict.last_tid is not None:
            raise StorageError(f'A transaction with the tid {self._tid:#x} cannot be added: the newest in the '
                               f'database has {verdict.last_tid:#x}.')

    def _went_back(self, verdict: Verdict) -> bool:
        """Whether an object is older than the revision which this transaction is based on, that was there.

        As far as this process knows: what a caller says may be any number.
        """
        if self._adapter.may_lag:
            return False
        cache = self._database.cache
        bases = [(oid, tid, self._spool[oid].base) for oid, tid, _ in verdict.conflicts]
        bases += [(oid, tid, self._reads[oid]) for oid, tid in verdict.outdated]
        return any(0 < tid < base and cache.knows(oid, base) for oid, tid, base in bases)

    def _look_at_links(self, links: Links, verdict: Verdict) -> None:
        """See that nothing refers to what a pack removes, or has removed since the connection began; see links.py.

        Nor to what was deleted since then. What is copied with its tid may refer to what comes later.
        """
        epochs, origin = self._database.epochs, self._origin
        swept: Sequence[Sequence[int]] | None = []
        if self._tid is None and verdict.sweeps != (known := epochs.sweeps_of(origin.began)):
            swept = epochs.swept(known, verdict.sweeps)
        if self._tid is None and (verdict.sweeping or origin.since < verdict.deleted
                                  or self._refused and not self._refused.isdisjoint(links.linked)):
            swept = None
        if verdict.sweeping or swept != []:
            links.look(verdict.sweeping, swept, lambda oid: self._may_have_seen(oid, verdict))

    def _may_have_seen(self, oid: int, verdict: Verdict) -> bool:
        """Whether the view may have shown an object that is not there now, so that a younger one helps.

        RelStorage leaves no trace of what it removes; during a sweep a deletion does not either.
        """
        if self._origin.at is None or self._origin.at < verdict.deleted or verdict.sweeping or self._adapter.may_lag:
            return True
        swept = self._database.epochs.swept(self._database.epochs.sweeps_of(self._origin.generation), verdict.sweeps)
        if swept is None or is_in_any(swept, oid) or not self._adapter.writes_alone(self._session):
            return True
        if not self._adapter.keep_history:
            return False
        before = self._adapter.load_before(self._session, oid, self._origin.at + 1)
        return before is not None and before[0] is not None     # its creation was undone since

    def _look_at_deletions(self, links: Links) -> None:
        """An outside collector deletes what it takes for garbage. See that nobody has linked that since its view.

        This transaction has kept all others out, so those that voted before are seen here, and those that vote after it
        see that something was deleted. Where there is no view nobody knows when the collector looked.
        """
        if self._origin.at is not None:
            links.look_since(self._origin.at, self._deleted)
        self._commit.tell_deletion()

    def _resolve_conflicts(self, conflicts: list[tuple[int, int, bytes | None]]) -> list[int]:
        resolved = []
        for start in range(0, len(conflicts), TOGETHER):
            some = conflicts[start:start + TOGETHER]
            if start:
                states = self._adapter.load_serials(self._session, [(oid, tid) for oid, tid, _ in some])
                some = [(oid, tid, states.get(oid)) for oid, tid, _ in some]
            old = self._old_states([oid for oid, _, current in some if current is not None])
            resolved += [self._resolve_conflict(*conflict, old.get(conflict[0])) for conflict in some]
        return resolved

    def _resolve_conflict(self, oid: int, current_tid: int, current: bytes | None, old: bytes | None) -> int:
        pending = self._spool[oid]
        mine, base = pending.held, pending.base
        resolved = None
        if old is not None and current is not None and mine is not None:
            resolved = self._resolve(oid, base, old, current_tid, current, mine)
        if resolved is None:
            raise self._conflict(ConflictError(oid=p64(oid), serials=(p64(current_tid), p64(base))), mine or current)
        self._database.conflicts.conflict(oid, self._class_name(mine), resolved=True)
        self._spool.put(oid, base, resolved)
        return oid

    def _old_states(self, oids: list[int]) -> dict[int, bytes | None]:
        """Return the states that changes were based on, by oid, as far as there are any.

        A history-free database has overwritten them: the cache may not.
        """
        bases = {row.oid: row.base for row in map(self._spool.__getitem__, oids) if row.base and row.size is not None}
        found = {oid: self._database.cache.revision(oid, base) for oid, base in bases.items()}
        missing = [(oid, base) for oid, base in bases.items() if found[oid] is None]
        if missing and self._adapter.keep_history:
            found |= self._adapter.load_serials(self._session, missing)
        return found

    def _resolve(
        self, oid: int, old_tid: int, old: bytes, current_tid: int, current: bytes, mine: bytes
    ) -> bytes | None:
        """Return what the object's class makes of both changes, or None if it cannot."""
        resolver = _Resolver(self._database, old)
        try:
            return resolver.tryToResolveConflict(p64(oid), p64(current_tid), p64(old_tid), mine, current)
        except (ConflictError, IndexError, TypeError, ValueError):
            return None     # the others are ZODB's, where it looks for the class in what is no record

    def _conflict(self, error: ConflictError, record: bytes | None = None) -> ConflictError:
        """Add to an error what is known of the object and of the other transaction; count it, and return it.

        The transaction ends here: others may wait for its locks. error: with oid and serials. record: a state of the
        object, if one is at hand.
        """
        oid, (theirs, mine) = u64(error.oid), map(u64, error.serials)
        record, author = record or self._database.cache.revision(oid, mine), None
        with suppress(StorageError):        # that it failed is certain; what more can be told is not
            self._session.rollback()
            if record is None:
                record, _ = self._adapter.load_now(self._session, oid) or (None, 0)
            if theirs not in (mine, 0):         # 0: no revision is current
                author = self._author(theirs)
        name = self._class_name(record)
        self._database.conflicts.conflict(oid, name, resolved=False)
        error.class_name = name or None
        if author is not None:
            user, description = author
            texts = [('user', plain(user or b'', LONGEST_USER)),
                     ('description', plain(description or b'', LONGEST_DESCRIPTION))]
            said = ', '.join(f'{what} "{text}"' for what, text in texts if text)
            error.message += f'; the other transaction: {said}' if said else ''
        return error

    def _author(self, tid: int) -> Row | None:
        """Return the beginnings of a transaction's user and description, or None if there is no such record."""
        return self._session.one(self._adapter.sql.author, (tid,)) if self._adapter.keep_history else None

    def _class_of(self, lock: int | None) -> str:
        pending = None if lock is None else self._spool.get(lock)
        return self._class_name(pending.held) if pending else ''

    def _class_name(self, record: bytes | None) -> str:
        return class_name(self._database.plain(record)) if record else ''

    # Finish -------------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Make it permanent and return the tid.

        After an Exception nothing was stored, unless it is OutcomeUnknown. An interrupt (of the keyboard, say) asks
        no questions: the commit may have happened.
        """
        database, commit = self._database, self._commit
        with database.announced(), database.finishing.watched(commit) if commit.finish_waits else UNWATCHED:
            try:
                if self.blobs:
                    self.blobs.place(commit)
                tid, waited = commit.finish()
            except Exception as e:
                tid, waited = self._outcome(e), 0.0
            except BaseException:
                commit.session.broken = True
                raise
        self._commit = None     # type: ignore[assignment]  # as in __init__
        if commit.session is not None:
            database.pool.take_back(commit.session)     # no transaction is open in it any more
        if self.blobs:
            self.blobs.committed(tid)
        if self._spool.blobs:
            database.blobs.said()
        written, states = [], []
        for row in self._spool:
            if row.size is not None:
                written.append(row.oid)
            if row.held is not None:        # what went to the file would only push others out
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
        self._session.broken = True
        self._give_back()
        oids = [row.oid for row in self._spool]
        deadline = time.monotonic() + OUTCOME_PATIENCE
        while True:
            try:
                tid = self._database.pool.attempt(self._commit.outcome, oids)
                break
            except (StorageError, ConflictError) as e:
                # A server that recovers from a crash refuses connections for a while, and then all come at once.
                if not isinstance(e, Unavailable) or time.monotonic() > deadline:
                    raise OutcomeUnknown(f'The commit was sent, then the connection failed ({error}); whether it '
                                         f'happened cannot be told: {e}') from error
                time.sleep(0.1)
        if tid is None:
            if isinstance(error, Deadlock):
                self._database.conflicts.deadlock()
            raise error
        return tid

    def close(self) -> None:
        """End it: whatever was not committed is rolled back, and the session returned."""
        if self._commit is not None:
            self._give_back()
        self.blobs.close()
        self._spool.close()

    def _give_back(self) -> None:
        commit = self._commit
        if commit is not None and commit.session is not None:
            session, commit.session = commit.session, None
            self._database.pool.give_back(session)


def _bytes(text: bytes | str) -> bytes:
    """ZODB converts what it is given at first, not what is assigned to the attribute later."""
    return text if isinstance(text, bytes) else text.encode('utf-8')


class _Resolver(ConflictResolvingStorage):
    """What ZODB's conflict resolution wants of a storage, for one object."""

    def __init__(self, database: Database, old: bytes):
        self._old = old
        self._crs_transform_record_data: Callable[[bytes], bytes] = database.transform
        self._crs_untransform_record_data: Callable[[bytes], bytes] = database.untransform

    def loadSerial(self, oid: bytes, serial: bytes) -> bytes:
        return self._old
