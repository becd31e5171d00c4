"""Bulk: copies many transactions of a source as one transaction of the database.

Each keeps its tid and its metadata, and the rows are those that it would leave if it were committed alone. While the
database takes a batch, in a thread, the next one is read from the source. Only the newest tid in the database tells
where a copy goes on, so a batch is there as a whole or not at all.

What a batch is committed with is what an ordinary commit is: a vote with the tid of its first transaction, and the
commit lock from then on. What could interleave:

* Others commit between two batches: the vote compares the newest tid, under the lock. Others commit during one: they
  wait for the lock, up to a second, and have a later tid; as long as they would wait for a large transaction. No lock
  is held while the source is read.
* Others have voted and not finished: they wait likewise. What they were based on is not compared again; nor is it where
  transactions are copied one by one.
* A pack ends between two batches, or sweeps during one: see whole.py and links.py. The links of a batch are looked at
  together: what any of its transactions links anew is new for the batch. Marks are taken off as by any commit.
* The database is restarted, replaced or emptied: the vote compares the epoch, and what this process knows to be there.
* The connection, the server or this process dies before the COMMIT: nothing of the batch is there. During it: the
  outcome is asked for, or the next run finds the newest tid.
* Another process copies the same source: one of the two is second at the lock, and its tids are not after the newest.

A batch that is refused, or fails before its COMMIT for whatever reason, is copied again one by one: what has to wait,
to be tried again or to be told is done there. One by one goes also what needs more than rows, a blob or a deletion; and
a transaction that is too large to be held in memory.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

from ZODB.BaseStorage import DataRecord
from ZODB.POSException import ConflictError
from ZODB.utils import p64, u64

from relstore import readers
from relstore.adapters.base import LARGEST
from relstore.adapters.commits.base import AnyCommit, Ballot, Copy, Metadata, newest
from relstore.caching.epochs import Origin
from relstore.database import Database
from relstore.errors import StorageError
from relstore.outcome import outcome
from relstore.packing.links import Links
from relstore.spool import ROW_BYTES, Pending, described
from relstore.unreadable import NAMED, Unreadable
from relstore.view import View

log = logging.getLogger('relstore')

# A batch ends with the transaction by which it has so many bytes, or has been gathered for so long.
BATCH_BYTES = 8 << 20
BATCH_SECONDS = 1.0
# A transaction of more bytes goes one by one.
LARGE_BYTES = 32 << 20

# (tid, transaction, its records) -> (number of records, their bytes): commits one
Single = Callable[[bytes, Any, Iterable[Any]], tuple[int, int]]
Progress = Callable[[bytes, int, int], None]


class Bulk:
    """Takes the transactions of a source, in the order of their tids; all are committed when it is left.

    view, lock: of the instance of the storage; the lock is held by who commits.
    single: commits one. look: called for each record and before each batch; its error ends the copy.
    progress: called with (tid, number of records, their bytes) of each that is committed.
    unreadable: told each record of them whose references are unknown; those of `single` it tells itself.
    """

    def __init__(self, database: Database, view: View, lock: threading.Lock, single: Single, look: Callable[[], None],
                 progress: Progress, unreadable: Unreadable):
        self._database, self._view, self._lock = database, view, lock
        self._single, self._look, self._progress, self._unreadable = single, look, progress, unreadable
        self._batch = _Batch()
        self._under_way: tuple[_Batch, Future[Exception | None]] | None = None
        self._thread = ThreadPoolExecutor(1, 'relstore bulk')

    def __enter__(self) -> Bulk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            self._thread.shutdown()     # waits for what is under way
            if self._under_way is not None:     # nobody asks for its result: something else has ended the copy
                batch, future = self._under_way
                error = future.exception() or future.result()
                if error is None:
                    self._name(batch)
                log.info('%d more transactions were %s', len(batch.taken),
                         'copied.' if error is None else f'not copied: {error}')

    def ahead(self, transactions: Iterable[Any]) -> Iterator[Any]:
        """Yield the transactions that are to be added, read ahead by other processes where that helps.

        Where the source fails, what came before is committed.
        """
        # How records are unwrapped cannot be told to another process.
        read = readers.ahead(transactions, self._database.adapter.keep_history)
        try:
            yield from transactions if self._database.is_wrapped else read
        except Exception:
            self._end()
            raise

    def add(self, tid: bytes, transaction: Any) -> None:
        """Take a transaction. Errors may be of any that were taken before."""
        records = iter(transaction)
        taken = _Taken(tid, transaction)
        try:
            left = self._take(taken, records)
        except Exception:       # the source's
            self._end()
            raise
        if left is not None:
            self._end()
            self._progress(tid, *self._single(tid, transaction, chain(taken.again(), left, records)))
            return
        batch = self._batch
        batch.taken.append(taken)
        batch.size += taken.bytes + (taken.count + 1) * ROW_BYTES
        if batch.size >= BATCH_BYTES or time.monotonic() > batch.began + BATCH_SECONDS:
            self._send()

    def _take(self, taken: _Taken, records: Iterator[Any]) -> list[Any] | None:
        """Read the records of a transaction. If one of them has to go one by one, return it, unread."""
        database, rows, look = self._database, taken.rows, self._look
        digest, largest = database.adapter.keep_history, min(database.adapter.largest_state, LARGE_BYTES)
        untransform = database.untransform
        if u64(taken.tid) > LARGEST:
            return []
        found = getattr(taken.transaction, 'rows', None)
        if found is not None and max([row[0] for row in found], default=0) <= LARGEST:
            look()
            for oid, md5, refs, data_tid, state in found:
                size = len(state)
                rows[oid] = Pending(oid, 0, True, size, md5, refs, data_tid, state, -1)
                if refs is None:
                    taken.unreadable.add(oid)
                taken.bytes += size
            taken.count = len(found)
            return None
        count = sizes = 0
        try:
            for record in records:
                look()
                state, oid = record.data, int.from_bytes(record.oid, 'big')     # half as long as u64
                if type(state) is not bytes or oid > LARGEST:
                    return [record]
                size = len(state)
                if size > largest or sizes + count * ROW_BYTES > LARGE_BYTES:
                    return [record]
                md5, refs, is_of_blob = described(state, untransform, digest)
                if is_of_blob:
                    return [record]
                data_tid = record.data_txn
                rows[oid] = Pending(oid, 0, True, size, md5, refs, u64(data_tid) if data_tid else None, state, -1)
                if refs is None:
                    taken.unreadable.add(oid)
                count += 1
                sizes += size
        finally:
            taken.count, taken.bytes = count, sizes
        return None

    def _send(self) -> None:
        """Hand the batch to the thread, when it has done the one before."""
        self._wait()
        self._look()
        batch, self._batch = self._batch, _Batch()
        if batch.taken:
            self._under_way = batch, self._thread.submit(self._commit, batch, self._view.begin_commit())

    def _end(self) -> None:
        """See that all is committed."""
        self._send()
        self._wait()
        self._batch = _Batch()

    def _wait(self) -> None:
        """Wait for the batch that is under way, and tell of its transactions."""
        if self._under_way is None:
            return
        (batch, future), self._under_way = self._under_way, None
        error = future.result()
        if error is None:
            self._view.committed(u64(batch.taken[-1].tid))
            self._name(batch)
            for taken in batch.taken:
                self._progress(taken.tid, taken.count, taken.bytes)
            return
        log.info('%d transactions are copied one by one: %s', len(batch.taken), error)
        for taken in batch.taken:
            self._progress(taken.tid, *self._single(taken.tid, taken.transaction, taken.again()))

    def _name(self, batch: _Batch) -> None:
        """Tell what cannot be read in a batch that is committed. Of two records of one object the last counts."""
        for taken in batch.taken:
            if taken.unreadable:
                rows = [row for oid in sorted(taken.unreadable) if (row := taken.rows[oid]).refs is None]
                self._unreadable.add(taken.tid, len(rows), [(row.oid, self._database.plain(row.held or b''))
                                                            for row in rows[:NAMED]])

    # In the thread ------------------------------------------------------------------------------------------------

    def _commit(self, batch: _Batch, origin: Origin) -> Exception | None:
        """Commit a batch. Return the error because of which nothing was stored, if it came before the COMMIT."""
        database, adapter = self._database, self._database.adapter
        copies = [taken.copy() for taken in batch.taken]
        session = commit = None
        with self._lock:
            try:
                session = database.pool.borrow()
                commit = adapter.commit_type(adapter, session, copies[-1].metadata, copies[-1].tid)
                done = self._vote(commit, copies, origin)
                commit.stage_copies(copies)
            except BaseException as e:
                if session is not None:
                    database.pool.give_back(session)
                if not isinstance(e, (StorageError, ConflictError)):
                    raise
                return e
            self._finish(commit, copies)
            database.committed(copies[-1].tid, [row.oid for row in copies[-1].rows])
            database.conflicts.committed(0.0)
            done()
            return None

    def _vote(self, commit: AnyCommit, copies: list[Copy], origin: Origin) -> Callable[[], None]:
        """Vote for all. Return what to call after the commit. StorageError or ConflictError: they are refused."""
        database, adapter, session = self._database, self._database.adapter, commit.session
        rows = [row for copy in copies for row in copy.rows]
        oids = sorted({row.oid for row in rows})
        epoch = database.epochs.of(origin.generation)
        verdict = commit.vote(Ballot(
            epoch=epoch, timeout=database.options.commit_lock_timeout, bases=(), locks=(), restored=oids,
            restored_tid=copies[0].tid, at=origin.at, known=() if adapter.keep_history else database.changed_last()))
        for lock, seconds in verdict.waits:
            database.conflicts.waited(lock, seconds)
        if verdict.is_refusal:
            raise StorageError('The vote has refused them.')
        database.whole.look(session, epoch, verdict.sweeps)
        links = Links(database, session, rows, origin, set())
        links.look(verdict, copied=True)
        taken_off = None
        if database.marks is not None:
            taken_off = database.marks.take_off(session, verdict.sweeps, verdict.sweeping, links)
        highest = max(oids, default=0)
        if highest > database.oids.highest:
            adapter.reserve_oids(session, highest)

        def done() -> None:
            database.oids.highest = max(database.oids.highest, highest)
            if taken_off is not None:
                taken_off()

        return done

    def _finish(self, commit: AnyCommit, copies: list[Copy]) -> None:
        """COMMIT. An error means that nothing was stored, unless it is OutcomeUnknown."""
        pool, session = self._database.pool, commit.session
        with self._database.announced():
            try:
                commit.finish_copies()
            except Exception as e:
                session.broken = True
                pool.give_back(session)
                # The tid by which it is looked up is the first that is left.
                first = min((tid for tid, _ in newest(copies).values()), default=copies[0].tid)
                tid = copies[0].tid if self._database.adapter.keep_history else first
                outcome(self._database, commit, [row.oid for copy in copies if copy.tid == tid for row in copy.rows], e)
            except BaseException:
                session.broken = True
                pool.give_back(session)
                raise
            else:
                pool.take_back(session)


class _Batch:

    def __init__(self) -> None:
        self.taken: list[_Taken] = []
        self.size, self.began = 0, time.monotonic()


class _Taken:
    """A transaction with those of its records that were read. count, bytes: of records."""

    def __init__(self, tid: bytes, transaction: Any):
        self.tid, self.transaction = tid, transaction
        self.rows: dict[int, Pending] = {}
        self.count = self.bytes = 0
        self.unreadable: set[int] = set()       # oids

    def copy(self) -> Copy:
        return Copy(u64(self.tid), Metadata.of(self.transaction, self.transaction.status == 'p'),
                    [self.rows[oid] for oid in sorted(self.rows)])

    def again(self) -> Iterator[DataRecord]:
        """Yield the records that were read; of two of one object the last."""
        for row in self.rows.values():
            yield DataRecord(p64(row.oid), self.tid, row.held, None if row.data_tid is None else p64(row.data_tid))
