"""A commit in Oracle: a block of PL/SQL for vote, one message for what is written, and a block for finish.

What is written is staged in tables whose rows each session has for itself, until its transaction ends. So a rollback,
or the end of the connection, leaves nothing; and finish has nothing to send but the transaction's own texts.
"""
from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from relstore.adapters.chunks import Record, pieces
from relstore.adapters.commits.base import Ballot, Commit, Copy, Metadata, Verdict, lock_timeout, newest, revisions
from relstore.adapters.numbers import COMMIT_LOCK, SOME_OBJECTS
from relstore.errors import LockTimeout, OutcomeUnknown, StorageError
from relstore.sessions.oracle_drivers import NONE_REFERRED
from relstore.sessions.session import Row, Session
from relstore.sessions.statement import Statement

if TYPE_CHECKING:
    from relstore.adapters.oracle import OracleAdapter
    from relstore.spool import Batch, Pending

# Rows of relstore_lock, besides that of the counter.
LOCKS = 64
# Bytes of the columns of `transaction`, which are RelStorage's.
USER_BYTES, TEXT_BYTES = 500, 2000
OUTCOME_DEADLINE_SECONDS = 60.0         # then it is unknown

log = logging.getLogger('relstore')


class OracleCommit(Commit['OracleAdapter', Session]):
    """From the vote on: key of the session, number of the vote, epoch."""
    _adapter: OracleAdapter
    key = number = 0
    epoch = ''

    def _begin(self) -> None:
        """Begin the transaction ahead of the vote."""
        if not self.session.in_transaction:
            self.session.run(self._sql.begin)

    def send_ahead(self, batches: Iterable[Batch]) -> bool:
        self._begin()
        self._stage(batches)
        return True

    def send_blobs(self, files: Mapping[int, str], records: Mapping[int, Record]) -> None:
        self._begin()
        rows: list[Row] = []
        size = 0
        for oid, path in files.items():
            with open(path, 'rb', buffering=0) as file:
                for number, chunk in enumerate(pieces(file, self._adapter.blob_chunk_bytes)):
                    if rows and size + len(chunk) > self._adapter.message_size:
                        self.session.many(self._sql.stage_chunk, rows)
                        rows, size = [], 0
                    rows.append((oid, number, chunk))
                    size += len(chunk)
        self.session.many(self._sql.stage_chunk, rows)
        self.session.many(self._sql.stage_record, [(oid, *record) for oid, record in records.items()])

    def copy_blobs(self, copies: Mapping[int, int]) -> None:
        self.session.run(self._sql.repeat_chunks, (self._adapter.revision_list([*copies.items()]),))

    def repeat_records(self, copies: Mapping[int, int]) -> None:
        self.session.run(self._sql.repeat_records, (self._adapter.revision_list([*copies.items()]),))

    def delete_blobs(self, oids: Collection[int]) -> None:
        """There is nothing to do: finish knows the deletions, which are staged as objects without a state."""

    def vote(self, ballot: Ballot) -> Verdict:
        adapter, session, sql = self._adapter, self.session, self._sql
        seconds = max(math.ceil(ballot.timeout), 1)
        self.key, self.number = session.key, secrets.randbits(62)
        bases, reads = dict(ballot.bases), dict(ballot.reads)
        alone = ballot.deletes and adapter.writes_alone(session)
        in_line = ballot.restored_tid is not None or ballot.deletes and not alone
        try:
            [[(_, epoch, *numbers)], changed] = session.results(waiting(sql.vote, seconds), (
                session.in_transaction, ballot.alone or ballot.deletes, in_line, self.key, self.number,
                sorted({oid % LOCKS for oid in ballot.locks if not bases[oid]}),
                sorted({*bases, *ballot.restored, *reads}),
                adapter.revision_list([*ballot.bases, *ballot.reads]),
                ballot.at or 0 if adapter.keep_history else adapter.revision_list(ballot.known)))
        except LockTimeout as e:
            raise self._lock_timeout(ballot, seconds, COMMIT_LOCK if in_line else SOME_OBJECTS) from e
        if alone:
            self._see_that_relstore_writes_alone()
        self.epoch = epoch
        last, sweeps, told, is_gone = map(int, numbers)
        if epoch != ballot.epoch or is_gone:
            return Verdict(epoch_changed=True)
        verdict = Verdict(sweeps=sweeps)
        verdict.see(told)
        current = {oid: (tid, state) for oid, tid, state in changed}
        verdict.outdated = [(oid, current[oid][0]) for oid, tid in reads.items()
                            if oid in current and current[oid][0] != tid]
        if ballot.restored_tid is not None and ballot.restored_tid <= last:
            verdict.last_tid = last
        verdict.conflicts = [(oid, *current[oid]) for oid, base in ballot.bases
                             if oid in current and current[oid][0] != base]
        return verdict

    def _lock_timeout(self, ballot: Ballot, seconds: float, lock: int) -> LockTimeout:
        """Return an error that says which object was locked, if that can be found out; else `lock`."""
        session = self.session
        with suppress(StorageError):
            session.rollback()
            wanted = {oid for oid, _ in (*ballot.bases, *ballot.reads)} | {*ballot.restored}
            there = self._adapter.current_tids(session, sorted(wanted))
            session.run(self._sql.begin)
            free = {oid for oid, in session.all(self._sql.lock_free, (self._adapter.oid_list(sorted(wanted)),))}
            session.rollback()
            lock = min((oid for oid, tid in there.items() if tid is not None and oid not in free), default=lock)
        return lock_timeout(lock, seconds, 'another session')

    def stage(self, batches: Iterator[Batch]) -> None:
        if self._adapter.keep_history:
            self._metadata = _fitting(self._metadata)
        self._stage(batches)

    def send_again(self, batches: Iterable[Batch]) -> None:
        if self._adapter.keep_history:
            self._metadata = _fitting(self._metadata)
        for batch in batches:
            self.session.many(self._sql.unstage, [(row.oid,) for row in batch])
            self._stage([batch])

    def _stage(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.session.many(self._sql.stage, [
                (row.oid, row.md5, row.size or 0, row.data_tid, referred(row.refs), _state(row)) for row in batch])

    def choose_tid(self) -> int:
        [[[tid]]] = self.session.results(self._sql.choose_tid, (self._tid or 0, self.key, self.number))
        self._tid = int(tid)
        return self._tid

    def finish(self) -> tuple[int, float]:
        metadata = self._metadata
        texts = (metadata.packed, metadata.user, metadata.description, metadata.extension)
        [[[tid]]] = self.session.results(self._sql.finish, (
            self._tid or 0, self.key, self.number, *(texts if self._adapter.keep_history else ())))
        return int(tid), 0.0

    def stage_copies(self, copies: Sequence[Copy]) -> None:
        adapter, session, sql, last = self._adapter, self.session, self._sql, newest(copies)
        if not adapter.keep_history:
            session.many(sql.stage_copy, [(oid, tid, row.size or 0, referred(row.refs), _state(row))
                                          for oid, (tid, row) in last.items()])
            session.run(sql.merge_copies)
            return
        fitting = [(copy.tid, _fitting(copy.metadata)) for copy in copies]
        session.many(sql.insert_transaction, [(tid, metadata.packed, metadata.user, metadata.description,
                                               metadata.extension) for tid, metadata in fitting])
        current: dict[int, int] = dict(session.all(sql.current_tids_of, (adapter.oid_list(last),)))
        session.many(sql.insert_copy, [
            (row.oid, tid, before, row.md5, row.size or 0, row.data_tid, referred(row.refs), _state(row))
            for tid, before, row in revisions(copies, current)])
        session.many(sql.point_copied, [(oid, tid) for oid, (tid, _) in last.items()])

    def finish_copies(self) -> None:
        self.session.results(self._sql.finish_copies, (self._tid, self.key, self.number))

    def outcome(self, session: Session, oids: Sequence[int]) -> int | None:
        """A lost connection proves nothing: the server may still wait for the commit lock, and commit later.

        So wait for the lock on the row that the vote wrote. To end a session takes rights that no site needs.
        """
        deadline = time.monotonic() + OUTCOME_DEADLINE_SECONDS
        while True:
            session.run(self._sql.begin)
            try:
                rows = session.all(self._sql.outcome, (self.key, self.number))
            except LockTimeout as e:
                if time.monotonic() > deadline:
                    raise OutcomeUnknown('its session of the server is still busy with it') from e
            else:
                break
            finally:
                session.rollback()
        if not rows or not rows[0][0]:
            if self._adapter.epoch(session) != self.epoch:
                raise OutcomeUnknown('another database answers, which may not have it yet')
            return None
        session.run(self._sql.make_durable, (self.key,))
        return rows[0][0]


def referred(refs: bytes | None) -> bytes | None:
    """Return what is stored of references: nothing at all would be NULL, which means that they are not known."""
    return NONE_REFERRED if refs == b'' else refs


def _state(row: Pending) -> bytes | None:
    """Return the state of an object. StorageError: it has no bytes, which would be NULL, a deletion."""
    if row.held == b'':
        raise StorageError(f'The record of the object {row.oid:#x} has no bytes, which Oracle cannot tell from none.')
    return row.held


def _fitting(metadata: Metadata) -> Metadata:
    """Cut off texts that have no room. StorageError: the extension, which is a pickle, has none."""
    if len(metadata.extension or b'') > TEXT_BYTES:
        raise StorageError(f'The extension of the transaction has {len(metadata.extension):,} bytes; Oracle takes '
                           f'{TEXT_BYTES:,} at most.')
    user, description = _cut(metadata.user, USER_BYTES), _cut(metadata.description, TEXT_BYTES)
    return Metadata(user, description, metadata.extension, metadata.packed)


def _cut(text: bytes, size: int) -> bytes:
    if len(text) <= size:
        return text
    log.warning('A text of a transaction has %d bytes and is cut off after %d: %r...', len(text), size, text[:60])
    return text[:size].decode('utf-8', 'ignore').encode('utf-8')


@lru_cache(100)
def waiting(sql: Statement, seconds: float) -> Statement:
    """Return a statement that waits so long for locks; for less than a second not at all."""
    return sql.changed('WAIT 10', f'WAIT {math.ceil(seconds)}' if seconds >= 1 else 'NOWAIT')
