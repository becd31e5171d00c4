"""A commit in SQLite: a series of plain statements, under the lock for writers.

The lock is held from the vote on. So no object needs a lock, nobody can change what was compared, and the tid can be
chosen and everything written before finish, because the disk may be full. Only COMMIT is left for finish.
"""
from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ZODB.utils import newTid, p64, u64

from relstore.adapters.chunks import Record, pieces
from relstore.adapters.commits.base import Ballot, Commit, Copy, Verdict, lock_timeout, newest, revisions
from relstore.adapters.filesession import FileSession
from relstore.adapters.numbers import COMMIT_LOCK, TOGETHER
from relstore.errors import LockTimeout
from relstore.sessions.session import Row

if TYPE_CHECKING:
    from relstore.adapters.sqlite import SQLiteAdapter
    from relstore.spool import Batch

LARGE_OBJECTS = 1000        # a transaction with more would read much of the file
# How often a vote looks whether RelStorage has come.
LOOK_AGAIN_SECONDS = 3.0


class SQLiteCommit(Commit['SQLiteAdapter', FileSession]):
    """last: the newest tid at the vote; current: those of the objects. written: our tid, if nobody else can use it."""
    last: int
    current: dict[int, int]
    written: int | None = None
    _files: Mapping[int, str] = {}
    _records: Mapping[int, Record] = {}
    _copies: Mapping[int, int] = {}
    _repeated: Mapping[int, int] = {}
    _deleted: Collection[int] = ()

    def send_blobs(self, files: Mapping[int, str], records: Mapping[int, Record]) -> None:
        """Nothing is sent: to write to the file takes the lock for writers. `stage` does, so a large blob holds it."""
        self._files, self._records = files, records

    def copy_blobs(self, copies: Mapping[int, int]) -> None:
        self._copies = copies

    def repeat_records(self, copies: Mapping[int, int]) -> None:
        self._repeated = copies

    def delete_blobs(self, oids: Collection[int]) -> None:
        self._deleted = oids

    def choose_tid(self) -> int:
        assert self.written is not None
        return self.written

    def vote(self, ballot: Ballot) -> Verdict:
        adapter, session = self._adapter, self.session
        wanted = [*dict((*ballot.bases, *ballot.reads, *ballot.known)), *ballot.restored]
        if time.monotonic() > adapter.looked_around + LOOK_AGAIN_SECONDS:
            adapter.look_around()
        if len(wanted) > LARGE_OBJECTS:
            session.run(self._sql.map_nothing)
            session.retire()        # later users are to read as fast as ever
        vote = self._sql.vote, (ballot.at, str(wanted))
        rows = session.try_to_write(self._sql.begin_write, [vote])
        waits: list[tuple[int, float]] = []
        if rows is None:
            if ballot.reads:
                verdict = self._verdict(ballot, session.series([vote]))
                if verdict.outdated:        # it will fail: it need not wait for that
                    return verdict
            waits = [(COMMIT_LOCK, wait_to_write(adapter, session, ballot.timeout))]
            rows = session.series([vote])
        adapter.file.compare(session)
        verdict = self._verdict(ballot, rows)
        verdict.waits = waits
        if verdict.epoch_changed:
            return verdict
        for oid, base in ballot.bases:
            tid = self.current.get(oid, 0)
            if tid != base:
                few = len(verdict.conflicts) < TOGETHER
                [state] = few and adapter.load_serial(session, oid, tid) or [None]
                verdict.conflicts.append((oid, tid, state))
        return verdict

    def _verdict(self, ballot: Ballot, rows: Sequence[Row]) -> Verdict:
        """Return what the rows of a vote say, without the conflicts."""
        (epoch, self.last), (sweeps, sweeping), (is_gone, packed_to), *found = rows
        current: dict[int, int] = dict(found)
        self.current = current
        # See proof.py for what a transaction may stand on.
        if (epoch is None or epoch + self.session.file != ballot.epoch
                or is_gone and ballot.at is not None and ballot.at > packed_to
                or ballot.known and any(current.get(oid, tid) < tid for oid, tid in ballot.known)):
            return Verdict(epoch_changed=True)
        verdict = Verdict(sweeps=sweeps)
        if sweeping:
            verdict.see(sweeping)
        if ballot.reads:
            verdict.outdated = [(oid, current.get(oid, 0)) for oid, tid in ballot.reads if current.get(oid, 0) != tid]
        if ballot.restored_tid is not None and ballot.restored_tid <= self.last:
            verdict.last_tid = self.last
        return verdict

    def stage(self, batches: Iterator[Batch]) -> None:
        """Write everything."""
        metadata, replaced, sql = self._metadata, self.current, self._sql
        tid = self._tid
        if tid is None:
            tid = u64(newTid(p64(self.last) if self.last else None))
        keeps = self._adapter.keep_history
        statements: list[tuple[str, Sequence[Row]]] = []
        if keeps:
            statements.append((sql.insert_transaction, [
                (tid, metadata.packed, metadata.user, metadata.description, metadata.extension)]))
        for batch in batches:
            states: list[Row] = []
            pointers = []
            for row in batch:
                if keeps:
                    states.append((row.oid, tid, replaced.get(row.oid, 0), row.md5, row.size or 0, row.held, row.refs,
                                   row.data_tid))
                    pointers.append((row.oid, tid))
                else:
                    states.append((row.oid, tid, row.size or 0, row.held, row.refs))
            statements.append((sql.insert_state, states))
            if keeps:
                statements.append((sql.point_current, pointers))
            self.session.fill(statements)
            statements = []
        if statements:
            self.session.fill(statements)
        if self._files or self._records or self._copies or self._repeated or self._deleted:
            self._stage_blobs(tid)
        self.written = tid

    def stage_copies(self, copies: Sequence[Copy]) -> None:
        sql, last = self._sql, newest(copies)
        if self._adapter.keep_history:
            self.session.fill([
                (sql.insert_transaction, [(copy.tid, metadata.packed, metadata.user, metadata.description,
                                           metadata.extension)
                                          for copy in copies for metadata in [copy.metadata]]),
                (sql.insert_state, [(row.oid, tid, before, row.md5, row.size or 0, row.held, row.refs, row.data_tid)
                                    for tid, before, row in revisions(copies, self.current)]),
                (sql.point_current, [(oid, tid) for oid, (tid, _) in last.items()])])
        else:
            self.session.fill([(sql.insert_state, [
                (oid, tid, row.size or 0, row.held, row.refs) for oid, (tid, row) in last.items()])])
        self.written = self._tid

    def finish_copies(self) -> None:
        self.finish()

    def _stage_blobs(self, tid: int) -> None:
        session, sql = self.session, self._sql
        for oid, path in self._files.items():
            if not self._adapter.keep_history:
                session.run(sql.remove_chunks, (oid,))
            with open(path, 'rb', buffering=0) as file:
                session.many(sql.insert_chunk, ((oid, tid, number, chunk) for number, chunk in enumerate(
                    pieces(file, self._adapter.blob_chunk_bytes))))
        if self._records:
            session.many(sql.insert_record, [(oid, tid, *record) for oid, record in self._records.items()])
        for oid, earlier in self._copies.items():
            session.run(sql.copy_chunks, (tid, oid, earlier))
        for oid, earlier in self._repeated.items():
            session.run(sql.copy_record, (tid, oid, earlier))
        for oid in self._deleted:
            session.run(sql.remove_chunks, (oid,))
            session.run(sql.remove_record, (oid,))

    def finish(self) -> tuple[int, float]:
        self._adapter.file.compare(self.session)
        try:
            self.session.run(self._sql.commit)
        except Exception:
            if not self.session.broken and self.session.in_transaction:
                self.written = None        # it did not happen, and another process may use the tid from now on
            raise
        assert self.written is not None
        return self.written, 0.0       # the lock has been held since the vote

    def outcome(self, session: FileSession, oids: Sequence[int]) -> int | None:
        """The process that commits is the database: what is not there now never will be."""
        tid = self.written
        return tid if tid is not None and session.all(self._sql.transactions, (tid, tid, 1)) else None


def wait_to_write(adapter: SQLiteAdapter, session: FileSession, timeout: float) -> float:
    """Do the same as FileSession.wait_to_write; the LockTimeout says who has the lock."""
    try:
        return session.wait_to_write(adapter.sql.begin_write, timeout)
    except LockTimeout as e:
        raise lock_timeout(COMMIT_LOCK, timeout, adapter.neighbours.writer()) from e
