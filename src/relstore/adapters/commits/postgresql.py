"""A commit in PostgreSQL: each phase is one message, to one function on the server (postgresql_functions.sql)."""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from relstore.adapters.arrays import array, binary_array, known, starts
from relstore.adapters.chunks import Record
from relstore.adapters.commits.base import Ballot, Commit, Copy, Verdict, lock_timeout
from relstore.adapters.commits.postgresql_blobs import NewBlobs
from relstore.adapters.commits.postgresql_copies import Copies
from relstore.errors import ConfigurationError, OutcomeUnknown, OutOfLocks, StorageError
from relstore.sessions.postgresql_drivers import LOCKS
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.postgresql import PostgreSQLAdapter  # noqa: F401 (what Commit is of)
    from relstore.spool import Batch

FINISH_TIMEOUT_SECONDS = 600.0      # failing after the vote would tear apart a transaction over several databases
ORPHAN_DEADLINE_SECONDS = 60.0      # then the outcome is unknown
ORPHAN_PATIENCE_SECONDS = 5.0       # how long a backend whose client is gone may still wait before it is ended


class PostgreSQLCommit(Commit['PostgreSQLAdapter', Session]):
    """From the vote on: process of the server, number of its transaction, the newest tid then, epoch."""
    finish_waits = True
    backend: int
    number: int
    since: int
    epoch: str
    _blobs: NewBlobs | None = None
    _waited = 0.0               # seconds that choose_tid waited for the commit lock

    def send_blobs(self, files: Mapping[int, str], records: Mapping[int, Record]) -> None:
        self._new_blobs().add(files, records)

    def copy_blobs(self, copies: Mapping[int, int]) -> None:
        self._new_blobs().copy(copies)

    def repeat_records(self, copies: Mapping[int, int]) -> None:
        self._new_blobs().repeated = copies

    def delete_blobs(self, oids: Collection[int]) -> None:
        self._new_blobs().deleted = oids

    def _new_blobs(self) -> NewBlobs:
        if self._blobs is None:
            self._blobs = NewBlobs(self._adapter, self.session)
        return self._blobs

    def send_ahead(self, batches: Iterable[Batch]) -> bool:
        if not self.session.in_transaction:     # blobs were not sent before
            self.session.run(self._sql.begin)
        for batch in batches:
            self._send(batch)
        return True

    def _send(self, batch: Batch) -> None:
        self.session.all(self._sql.stage, _arrays(batch, self.session.binds))

    def send_again(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.session.run(self._sql.unstage, (self._adapter.oid_list(row.oid for row in batch),))
            self._send(batch)

    def vote(self, ballot: Ballot) -> Verdict:
        """If RelStorage writes, each object is locked: it does not know the lock that keeps all others out."""
        adapter, session = self._adapter, self.session
        instead = (ballot.alone or ballot.deletes) and adapter.writes_alone(session)
        new_array = binary_array if session.binds else array
        lists = ballot.locks, *_columns(ballot.bases), *_columns(ballot.reads), *_columns(ballot.known)
        try:
            rows = session.script(self._sql.vote_staged if session.in_transaction else self._sql.vote, (
                ballot.epoch, milliseconds(ballot.timeout), ballot.restored_tid, instead or ballot.deletes,
                not instead, ballot.at, *(new_array('bigint', values) for values in lists)))
        except OutOfLocks as e:
            raise self._out_of_locks(len(ballot.locks) + len(ballot.reads), instead) from e
        if instead:
            self._see_that_relstore_writes_alone()
        self.epoch = ballot.epoch
        verdict = Verdict()
        for kind, oid, tid, state in rows:
            if kind == 'epoch':
                verdict.epoch_changed = True
            elif kind == 'read':
                verdict.outdated.append((oid, tid))
            elif kind == 'locked':
                verdict.locked = oid
            elif kind == 'busy':
                raise lock_timeout(oid, ballot.timeout, holder(tid, bytes(state or b'').decode()))
            elif kind == 'waited':
                verdict.waits.append((oid, tid / 1e6))
            elif kind == 'late':
                verdict.last_tid = tid
            elif kind == 'conflict':
                verdict.conflicts.append((oid, tid, state))
            elif kind == 'since':
                self.since, verdict.sweeps = tid, oid
            elif kind == 'sweeping':
                verdict.see(oid)
            else:
                self.backend, self.number = oid, tid
        return verdict

    def _out_of_locks(self, count: int, alone: bool) -> StorageError:
        adapter, session = self._adapter, self.session
        session.rollback()
        [[most]] = session.all(self._sql.max_locks)
        message = (f'A transaction that locks {count:,} objects met a full lock table: raise {LOCKS} of the server, '
                   f'{most}')
        if alone or adapter.writes_alone(session):
            return OutOfLocks(f'{message}.')
        message += (', or, if no RelStorage process writes to this database any more, say so with "relstore writers", '
                    'and large transactions will need no such room.')
        # Trying again helps only if most of the locks are those of other transactions.
        return (ConfigurationError if count > adapter.most_locks else OutOfLocks)(message)

    def stage(self, batches: Iterator[Batch]) -> None:
        """Leave a small transaction to finish; send one that has grown too large because conflicts were resolved."""
        first, second = next(batches, []), next(batches, None)
        if second is None:
            self._left = first
            return
        for batch in chain((first, second), batches):
            self._send(batch)

    def choose_tid(self) -> int:
        """If a tid was given, it is that one, and the vote has taken the lock."""
        if self._tid is None:
            [[self._tid, waited]] = self.session.all(self._sql.choose_tid, (milliseconds(FINISH_TIMEOUT_SECONDS),))
            self._waited = waited / 1e6
        return self._tid

    def finish(self) -> tuple[int, float]:
        metadata, left, blobs = self._metadata, self._left, self._blobs
        values = (
            self.number, milliseconds(FINISH_TIMEOUT_SECONDS), self._tid, metadata.packed, metadata.user,
            metadata.description, metadata.extension, left is None, *_arrays(left or [], self.session.binds))
        [[answer, *_]] = self.session.script(self._sql.finish, values) if blobs is None else blobs.finish(values)
        tid, waited = answer.split()
        return int(tid), self._waited + int(waited) / 1e6

    def stage_copies(self, copies: Sequence[Copy]) -> None:
        Copies(self._adapter, self.session, not self.since).write(copies)

    def finish_copies(self) -> None:
        self.session.run(self._sql.commit)

    def outcome(self, session: Session, oids: Sequence[int]) -> int | None:
        """A lost connection proves nothing: the backend may still wait for the commit lock, and commit later.

        So wait until the server knows. If that takes long, end the orphaned backend. Then a commit of our own makes the
        answer durable before it is given. After a crash in between all of this begins again.
        """
        adapter, sql = self._adapter, self._sql
        # Asked now and once more at the end, because a pooler's connection outlives its server.
        now = adapter.epoch(session)
        crashed = adapter.lasting(now) != adapter.lasting(self.epoch)
        if now != self.epoch and self._was_lost(session, oids, crashed):
            return None
        deadline = time.monotonic() + ORPHAN_DEADLINE_SECONDS
        patience = time.monotonic() + ORPHAN_PATIENCE_SECONDS
        while True:
            [[still, status]] = session.all(sql.transaction_status, (str(self.number), now))
            if not still:
                return self.outcome(session, oids)
            if status != 'in progress':
                break
            if time.monotonic() > deadline:
                raise OutcomeUnknown(f'the server process {self.backend} is still busy with it')
            if time.monotonic() > patience:
                session.all(sql.terminate, (self.backend,))
                patience = time.monotonic() + ORPHAN_PATIENCE_SECONDS
            time.sleep(0.01)
        session.all(sql.make_durable)
        if adapter.epoch(session) != now:
            return self.outcome(session, oids)
        if status != 'committed':
            return None
        [[tid]] = session.all(sql.tid_of, (self.since, str(self.number)))
        if crashed and (tid is None or not all(adapter.load_serial(session, oid, tid) for oid in oids)):
            raise OutcomeUnknown('the server has crashed since, and the objects were changed again')
        if tid is None and self._tid is not None:
            tid = self._tid
        if tid is None:
            # Without history, others may have overwritten all of it. Any tid in between will do: a poll corrects it.
            later = [current for oid in oids if (current := adapter.current_tid(session, oid))]
            tid = min(later, default=self.since + 1) - 1
        return tid

    def _was_lost(self, session: Session, oids: Sequence[int], crashed: bool) -> bool:
        """Whether a crash or a restored copy has certainly undone it: numbers that left no trace are used again."""
        [[first]] = session.all(self._sql.epoch_transaction)     # after the crash; what was durable has a lower number
        return (crashed and (self.number - first) % 2 ** 32 < 2 ** 31
                or any((self._adapter.current_tid(session, oid) or 0) <= self.since for oid in oids))

    def finish_holders(self, session: Session) -> str:
        return ', '.join(holder(*row) if row[0] else 'a prepared transaction'
                         for row in session.all(self._sql.blockers, (self.backend,)))


def holder(backend: int, who: str) -> str:
    """Return the words for a process of the server; 0: it has ended."""
    return f'the server process {backend} ({who})' if backend else 'a transaction that has just ended'


def milliseconds(seconds: float) -> str:
    """Return a time limit as a setting of the server."""
    return str(max(int(seconds * 1000), 1))     # 0 would mean: wait for ever


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[int], Sequence[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _arrays(batch: Batch, binary: bool) -> tuple[Any, ...]:
    """Return a batch as the parameters of relstore_rows_1."""
    states = [row.held or b'' for row in batch]
    refs = [row.refs or b'' for row in batch]
    new_array: Callable[[str, Sequence[Any]], str | bytes] = binary_array if binary else array
    refs_sizes = [None if row.refs is None else len(row.refs) for row in batch]
    return (
        new_array('bigint', [row.oid for row in batch]),
        new_array('integer', starts(states)), new_array('integer', [row.size for row in batch]),
        new_array('text', known([row.md5 for row in batch])),
        new_array('bigint', known([row.data_tid for row in batch])),
        new_array('integer', starts(refs)), new_array('integer', refs_sizes),
        b''.join(states), b''.join(refs))
