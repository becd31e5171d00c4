"""Commit: the database's side of one commit, from the vote to its outcome.

There is one object for each commit, an Adapter.commit_type. It remembers from one step to the next what the database
needs to know. The module of each database says how a step is done there, and why. The other side is commit.Transaction.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ZODB.interfaces import IStorageTransactionMetaData

from relstore.adapters.chunks import Record
from relstore.adapters.numbers import COMMIT_LOCK, EVERYBODY, SOME_OBJECTS
from relstore.errors import LockTimeout, Unavailable
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.spool import Batch, Pending

SomeAdapter = TypeVar('SomeAdapter', bound='Adapter')
SomeSession = TypeVar('SomeSession', bound=Session)


@dataclass(slots=True)
class Ballot:
    """What a transaction asks a vote to lock and to check."""
    epoch: str
    timeout: float                          # seconds to wait for locks
    bases: Sequence[tuple[int, int]]        # (oid, tid it was based on), in oid order; tid 0: the object is new
    locks: Sequence[int]                    # those of these oids that another transaction may be writing
    restored: Sequence[int] = ()            # oids that are written whatever their current revision is
    reads: Sequence[tuple[int, int]] = ()   # (oid, tid that must still be current at the commit)
    restored_tid: int | None = None         # of a transaction that is copied with its tid
    alone: bool = False         # if only relstore writes: keep all others out instead of locking each object
    deletes: bool = False                   # keep all others out, RelStorage too: see Transaction
    at: int | None = None                   # where the view stood, and what is known to have been there then:
    known: Sequence[tuple[int, int]] = ()   # (oid, tid), see proof.py


@dataclass(slots=True)
class Verdict:
    """The answer of a vote. Anything in the first four fields refuses the commit.

    epoch_changed: also if the revisions on which the transaction is based are gone.
    conflicts: with the states of the first TOGETHER; for the others None.
    waits: (oid, seconds) for each lock that was not free; numbers.py says what may stand in the place of an oid.
    """
    epoch_changed: bool = False
    outdated: list[tuple[int, int]] = field(default_factory=list)   # reads: (oid, tid that is current)
    locked: int | None = None                                       # a read object that is being written
    last_tid: int | None = None                                     # restored_tid is not after this one
    conflicts: list[tuple[int, int, bytes | None]] = field(default_factory=list)    # (oid, current tid, its state)
    waits: list[tuple[int, float]] = field(default_factory=list)
    sweeps: int = 0         # how many sweeps of a pack have ended
    sweeping: int = 0       # the pack_id of the one that is under way, or 0
    deleted: int = 0        # views older than this tid may have objects that were deleted since; 0: there are none

    @property
    def is_refusal(self) -> bool:
        return bool(self.epoch_changed or self.outdated or self.locked is not None or self.last_tid is not None)

    def see(self, told: int) -> None:
        """Take over what the database reports in one number: `sweeping`, or minus `deleted`."""
        self.sweeping, self.deleted = max(told, 0), max(-told, 0)


@dataclass(slots=True)
class Metadata:
    """What a transaction record holds besides its tid."""
    user: bytes
    description: bytes
    extension: bytes
    packed: bool

    @classmethod
    def of(cls, transaction: IStorageTransactionMetaData, packed: bool) -> Metadata:
        """ZODB makes bytes of what a transaction is made with, but not of what is assigned to it later."""
        user, description = transaction.user, transaction.description
        if not (isinstance(user, bytes) and isinstance(description, bytes)):
            user, description = _bytes(user), _bytes(description)
        return cls(user, description, transaction.extension_bytes, packed)


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode('utf-8')


@dataclass(slots=True)
class Copy:
    """A transaction that is copied with its tid. rows: with their states, in oid order, each object once."""
    tid: int
    metadata: Metadata
    rows: Batch


class Commit(Generic[SomeAdapter, SomeSession]):
    """One commit of one transaction in one session: send_ahead, vote, stage or send_again, finish; outcome.

    session: not used any more after a finish that failed; then `outcome` asks in another one.
    tid: of a transaction that is copied with its tid, else None.
    """
    # May finish() wait for long, and can finish_holders() tell for whom?
    finish_waits = False

    def __init__(self, adapter: SomeAdapter, session: SomeSession, metadata: Metadata, tid: int | None):
        self.session = session
        self._adapter, self._sql = adapter, adapter.sql
        self._metadata, self._tid = metadata, tid
        self._left: Batch | None = None         # what finish has to write; None: all of it was sent before

    def send_ahead(self, batches: Iterable[Batch]) -> bool:
        """Send the states before the vote, so that no lock is held meanwhile.

        Return whether that was done. Then `send_again` takes the place of `stage`, and finish has nothing left to do.
        Only called for transactions that are larger than Adapter.message_size.
        """
        return False

    def send_blobs(self, files: Mapping[int, str], records: Mapping[int, Record]) -> None:
        """Send the data of blobs before the vote, where the database takes it without a lock; at most once.

        files: by oid the path of the file that holds it, which stays as it is until the commit has ended. Small ones
        may travel with a later message. The data of an object's revision before is replaced where no history is kept.
        records: by oid what is to be recorded of the data; of what goes to another place than the database, too.
        Nobody sees any of it before finish, and nothing of it is left where the commit does not happen.
        """
        raise NotImplementedError

    def copy_blobs(self, copies: Mapping[int, int]) -> None:
        """After the vote, with history: give new revisions the blobs of earlier ones. copies: oid -> the earlier tid.

        If the earlier revision has no blob, the new one has none either.
        """
        raise NotImplementedError

    def repeat_records(self, copies: Mapping[int, int]) -> None:
        """Likewise, have new revisions repeat what is recorded of the blobs of earlier ones."""
        raise NotImplementedError

    def delete_blobs(self, oids: Collection[int]) -> None:
        """Where no history is kept: have finish remove the blobs of objects that are deleted, and what is recorded."""
        raise NotImplementedError

    def choose_tid(self) -> int:
        """After `stage`: take the commit lock, and return the tid that finish will use.

        For blobs in files, which must be in their place before the commit: the tid is part of their names.
        """
        raise NotImplementedError

    def vote(self, ballot: Ballot) -> Verdict:
        """Begin a transaction, lock what it changes, and compare that with what is committed.

        After a refusal the caller rolls back. LockTimeout says who held a lock for too long.
        """
        raise NotImplementedError

    def _see_that_relstore_writes_alone(self) -> None:
        """Unavailable: RelStorage was let in before everybody else was locked out, and RelStorage was not."""
        if not self._adapter.writes_alone(self.session):
            raise Unavailable(f'{self._adapter} has just been opened to RelStorage as a writer.')

    def tell_deletion(self) -> None:
        """Within a vote that keeps all others out: let later votes know that something is deleted."""
        self.session.run(self._sql.tell_deletion)

    def send_again(self, batches: Iterable[Batch]) -> None:
        """End the vote: replace states that were sent ahead, because their conflicts were resolved."""
        raise NotImplementedError

    def stage(self, batches: Iterator[Batch]) -> None:
        """End the vote: do everything that may fail, or that is large, so that `finish` need not."""
        raise NotImplementedError

    def finish(self) -> tuple[int, float]:
        """Choose the tid (or take the one given), write what is left, COMMIT.

        Return the tid, and how long this waited for the commit lock, in seconds.
        """
        raise NotImplementedError

    def stage_copies(self, copies: Sequence[Copy]) -> None:
        """End a vote with the tid of the first: write all of these transactions, whose tids rise, without blobs.

        The ballot's `restored` were all of their objects.
        """
        raise NotImplementedError

    def finish_copies(self) -> None:
        """After stage_copies: COMMIT. The tid of the commit is that of the last."""
        raise NotImplementedError

    def finish_holders(self, session: Session) -> str:
        """Return who keeps finish() waiting, or ''. session: another one."""
        return ''

    def outcome(self, session: SomeSession, oids: Sequence[int]) -> int | None:
        """Wait until the outcome of a finish that failed is decided; return the tid if it committed, else None.

        session: another one. oids: of the changed objects. OutcomeUnknown: asking again would not help. Unavailable: it
        may.
        """
        raise NotImplementedError


AnyCommit = Commit[Any, Any]


def revisions(copies: Iterable[Copy], current: Mapping[int, int]) -> Iterator[tuple[int, int, Pending]]:
    """Yield (tid, tid of the revision before or 0, row) of all rows. current: the tids of the objects before all."""
    now = dict(current)
    before = now.get
    for copy in copies:
        tid = copy.tid
        for row in copy.rows:
            oid = row.oid
            yield tid, before(oid, 0), row
            now[oid] = tid


def newest(copies: Iterable[Copy]) -> dict[int, tuple[int, Pending]]:
    """Return (tid, row) of each object's last revision, by oid and in this order."""
    found = {row.oid: (copy.tid, row) for copy in copies for row in copy.rows}
    return dict(sorted(found.items()))


def lock_timeout(lock: int, seconds: float, holder: str) -> LockTimeout:
    """Return the error that says for what and whom a vote waited. lock: an oid, or what stands for one."""
    what = {COMMIT_LOCK: 'The commit lock', SOME_OBJECTS: 'An object',
            EVERYBODY: 'The lock that a large transaction or a pack takes alone'}.get(lock, f'The object {lock:#x}')
    error = LockTimeout(f'{what} was held for {seconds:g} s (commit-lock-timeout) by {holder}.')
    error.lock = lock
    return error
