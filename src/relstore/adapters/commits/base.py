"""Commit: the database's side of one commit, from the vote to its outcome.

One object for each, an Adapter.commit_type; it remembers from one step to the next what the database will need to
know. A database's own module says how each step is done there, and why. The other side is commit.Transaction.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relstore.adapters.numbers import COMMIT_LOCK, EVERYBODY, SOME_OBJECTS
from relstore.errors import LockTimeout, Unavailable
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.spool import Batch

SomeAdapter = TypeVar('SomeAdapter', bound='Adapter')
SomeSession = TypeVar('SomeSession', bound=Session)


@dataclass(slots=True)
class Ballot:
    """What a transaction asks of vote."""
    epoch: str
    timeout: float                          # seconds to wait for locks
    bases: Sequence[tuple[int, int]]        # (oid, tid it was based on), in oid order; tid 0: the object is new
    locks: Sequence[int]                    # those of these oids that somebody else may be writing
    restored: Sequence[int] = ()            # oids that are written whatever is there
    reads: Sequence[tuple[int, int]] = ()   # (oid, tid that must still be current at the commit)
    restored_tid: int | None = None         # given when a transaction is copied with its tid
    alone: bool = False         # where only relstore writes: keep all others out instead of locking each object
    deletes: bool = False                   # keep all others out, RelStorage too: see Transaction
    at: int | None = None                   # where the view stood; and what is known to have been there then:
    known: Sequence[tuple[int, int]] = ()   # (oid, tid), see proof.py


@dataclass(slots=True)
class Verdict:
    """What vote answers. Anything in the first four refuses the commit.

    epoch_changed: or what the transaction stands on is gone.

    conflicts: the states of the first TOGETHER are there, for the others None.
    waits: (oid, seconds), for each lock that was not free; see numbers.py for what stands in the place of an oid.
    """
    epoch_changed: bool = False
    outdated: list[tuple[int, int]] = field(default_factory=list)   # reads: (oid, tid that is current)
    locked: int | None = None                                       # a read object that somebody is writing
    last_tid: int | None = None                                     # restored_tid is not after this one
    conflicts: list[tuple[int, int, bytes | None]] = field(default_factory=list)    # (oid, current tid, its state)
    waits: list[tuple[int, float]] = field(default_factory=list)
    sweeps: int = 0         # how many sweeps of a pack have ended
    sweeping: int = 0       # the pack_id of the one that is under way; 0: none is
    deleted: int = 0        # views of before this tid may hold objects that were deleted; 0: nobody knows of any

    @property
    def is_refusal(self) -> bool:
        return bool(self.epoch_changed or self.outdated or self.locked is not None or self.last_tid is not None)

    def see(self, told: int) -> None:
        """Take over what a vote tells: `sweeping`, or `deleted` with its sign turned."""
        self.sweeping, self.deleted = max(told, 0), max(-told, 0)


@dataclass(slots=True)
class Metadata:
    """What a transaction record holds besides its tid."""
    user: bytes
    description: bytes
    extension: bytes
    packed: bool


class Commit(Generic[SomeAdapter, SomeSession]):
    """One commit, of one transaction, in one session: send_ahead, vote, stage or send_again, finish; outcome.

    session: not to be used any more after a finish that has failed; then `outcome` asks in another one.
    tid: given where a transaction is copied with it, else None.
    """
    # May finish() wait long for others, and can they be told?
    finish_waits = False

    def __init__(self, adapter: SomeAdapter, session: SomeSession, metadata: Metadata, tid: int | None):
        self.session = session
        self._adapter, self._sql = adapter, adapter.sql
        self._metadata, self._tid = metadata, tid
        self._left: Batch | None = None         # what finish is to write itself; None: all was sent before

    def send_ahead(self, batches: Iterable[Batch]) -> bool:
        """Send what is large before the vote, so that nobody has to wait for that.

        Return whether it was done. Then `send_again` takes the place of `stage`, and nothing is left for `finish`.
        Called for transactions of more than Adapter.message_size alone.
        """
        return False

    def send_blobs(self, files: Mapping[int, str]) -> None:
        """Send the data of blobs before the vote, where the database takes it without a lock; at most once.

        files: by oid the path of the file that holds it, which stays as it is until the commit has ended. Small ones
        may travel with a later message. The data of an object's revision before is replaced where no history is kept.
        Nobody sees any of it before finish, and nothing of it is left where the commit does not happen.
        """
        raise NotImplementedError

    def copy_blobs(self, copies: Mapping[int, int]) -> None:
        """After the vote: have new revisions repeat the blobs of earlier ones, oid -> tid of the earlier one.

        Where history is kept. There may be none: then the new one has none either.
        """
        raise NotImplementedError

    def choose_tid(self) -> int:
        """After all was staged: take the commit lock, and return the tid that finish will use.

        For blobs in files: their names have it, and they are to be there before the commit.
        """
        raise NotImplementedError

    def vote(self, ballot: Ballot) -> Verdict:
        """Begin a transaction, lock what it changes, and compare with what is committed.

        After a refusal the caller rolls back. LockTimeout says who had a lock for too long.
        """
        raise NotImplementedError

    def _see_that_relstore_writes_alone(self) -> None:
        """Raise Unavailable if, before everybody else was locked out, RelStorage was let in, who is not."""
        if not self._adapter.writes_alone(self.session):
            raise Unavailable(f'{self._adapter} has just been opened to RelStorage as a writer.')

    def tell_deletion(self) -> None:
        """Within a vote that was alone: let those that follow know that something is deleted."""
        self.session.run(self._sql.tell_deletion)

    def send_again(self, batches: Iterable[Batch]) -> None:
        """End the vote: replace rows that were sent ahead, because conflicts were resolved."""
        raise NotImplementedError

    def stage(self, batches: Iterator[Batch]) -> None:
        """End the vote: do ahead of `finish` what may fail or is large."""
        raise NotImplementedError

    def finish(self) -> tuple[int, float]:
        """Choose the tid (or take the one given), write what is left, COMMIT.

        Return the tid, and the seconds that the commit lock had to be waited for.
        """
        raise NotImplementedError

    def finish_holders(self, session: Session) -> str:
        """Return who keeps finish() waiting, as another session can tell; '' if nobody does."""
        return ''

    def outcome(self, session: SomeSession, oids: Sequence[int]) -> int | None:
        """After a finish that has failed: return the tid if it was committed, else None. Waits until that is decided.

        session: another one. oids: what was changed. OutcomeUnknown if asking again would not help, Unavailable if it
        may.
        """
        raise NotImplementedError


AnyCommit = Commit[Any, Any]


def lock_timeout(lock: int, seconds: float, holder: str) -> LockTimeout:
    """Return the error that says for whom a vote has waited. lock: an oid, or what stands for one."""
    what = {COMMIT_LOCK: 'The commit lock', SOME_OBJECTS: 'An object',
            EVERYBODY: 'The lock that a large transaction or a pack takes alone'}.get(lock, f'The object {lock:#x}')
    error = LockTimeout(f'{what} was held for {seconds:g} s (commit-lock-timeout) by {holder}.')
    error.lock = lock
    return error
