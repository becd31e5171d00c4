"""A commit in MySQL and MariaDB: each phase is one message of several statements, and the client compares."""
from __future__ import annotations

import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from relstore.adapters.chunks import Record
from relstore.adapters.commits.base import Ballot, Commit, Copy, Verdict, lock_timeout
from relstore.adapters.commits.mysql_blobs import ChunkRows
from relstore.adapters.commits.mysql_copies import TEXT_BYTES, Copies
from relstore.adapters.mysql_messages import LIST, Statement, block, lists, send, with_rows
from relstore.adapters.numbers import COMMIT_LOCK, SOME_OBJECTS, TOGETHER
from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    LockTimeout,
    NotAllowed,
    OutcomeUnknown,
    StorageError,
    Unavailable,
)
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.adapters.mysql import MySQLAdapter
    from relstore.spool import Batch

FINISH_TIMEOUT_SECONDS = 600        # failing after the vote would tear apart a transaction over several databases
ORPHAN_DEADLINE_SECONDS = 60.0      # then the outcome is unknown
ORPHAN_PATIENCE_SECONDS = 5         # how long a connection whose client is gone may still wait before it is ended
SEEN_PATIENCE_SECONDS = 1.0         # after this, what is committed is certainly seen
SEEN_OBJECTS = 5                    # looked at for that
SHORTEST_WAIT_MICROSECONDS = 1000   # a lock that takes this long was waited for
OVERHEAD_BYTES = 20_000             # of a message of finish besides its rows, roughly
ROW_OVERHEAD_BYTES = 300            # of a row besides its state and references, at most

# What stands for locks that are not those of one object, by the word in their rows.
NO_OBJECTS = {'created': SOME_OBJECTS, 'commit': COMMIT_LOCK}
log = logging.getLogger('relstore')


class MySQLCommit(Commit['MySQLAdapter', Session]):
    """From the vote on: key of the session, number of the vote, connection, epoch, current tids of the objects."""
    finish_waits = True
    key: int
    number: int
    connection: int
    epoch: str
    current: dict[int, int]
    _blobs: ChunkRows | None = None
    _waited = 0.0           # by choose_tid

    def send_blobs(self, files: Mapping[int, str], records: Mapping[int, Record]) -> None:
        self._rows_of_blobs().send(files, records)

    def copy_blobs(self, copies: Mapping[int, int]) -> None:
        self._rows_of_blobs().repeat(copies)

    def repeat_records(self, copies: Mapping[int, int]) -> None:
        self._rows_of_blobs().repeated = copies

    def delete_blobs(self, oids: Collection[int]) -> None:
        self._rows_of_blobs().deleted = oids

    def _rows_of_blobs(self) -> ChunkRows:
        if self._blobs is None:
            self._blobs = ChunkRows(self._adapter, self.session)
        return self._blobs

    def vote(self, ballot: Ballot) -> Verdict:
        adapter, session, sql = self._adapter, self.session, self._sql
        seconds = max(math.ceil(ballot.timeout), 1)
        self.key, self.number = session.key, secrets.randbits(62)
        bases, reads = dict(ballot.bases), dict(ballot.reads)
        look = adapter.epoch_table.is_time_to_look()
        statements: list[Statement] = [(sql.made, ())] if look else []
        begin = sql.continue_vote if self._blobs is not None and self._blobs.ahead else sql.begin_vote
        statements.append((begin, (seconds, self.key, self.number)))
        if 0 < len(reads) <= LIST and 0 not in reads.values():
            statements.append((sql.look_at_reads, (len(reads), tuple(reads), tuple(set(reads.values())))))
        statements += [(with_rows(sql.lock_created, len(some)), (*some, adapter.oid_list(some)))
                       for some in lists(oid for oid in ballot.locks if not bases[oid])]
        statements += [(sql.lock_current, (some,)) for some in lists(sorted({*bases, *ballot.restored}))]
        statements += [(sql.lock_read, (some,)) for some in lists(reads)]
        # Before the commit lock: those who hold this lock wait for that one.
        statements.append((sql.lock_sweep_alone if ballot.alone or ballot.deletes else sql.lock_sweep, ()))
        alone = ballot.deletes and adapter.writes_alone(session)
        in_line = ballot.restored_tid is not None or ballot.deletes and not alone
        if in_line:
            statements.append((sql.lock_commit, ()))
        statements.append((sql.voted, (
            ballot.at if adapter.keep_history else adapter.revision_list(ballot.known),)))
        try:
            *results, [(epoch, last, self.connection, is_gone)] = send(session, statements)
        except LockTimeout as e:
            raise self._lock_timeout(ballot, seconds, COMMIT_LOCK if in_line else SOME_OBJECTS) from e
        if alone:
            self._see_that_relstore_writes_alone()
        if look:
            made, *results = results    # when the epoch's table was created
            adapter.epoch_table.see(made)
        waits = list(_waits(results))
        self.epoch = f'{epoch}.{adapter.epoch_table.made}'
        if self.epoch != ballot.epoch or is_gone:
            return Verdict(epoch_changed=True, waits=waits)
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for kind, oid, tid, _ in chain.from_iterable(results):
            found[kind][oid] = tid
        self.current = current = found['current']
        shared, read = found['shared'], found['read']
        verdict = Verdict(waits=waits)
        [(verdict.sweeps, told)] = found['sweep'].items()
        verdict.see(told)
        verdict.outdated = [(oid, read.get(oid, 0)) for oid, tid in reads.items() if read.get(oid, 0) != tid]
        verdict.locked = next((oid for oid in read if oid not in shared), None)
        if ballot.restored_tid is not None and ballot.restored_tid <= last:
            verdict.last_tid = last
        changed = [oid for oid, base in ballot.bases if current.get(oid, 0) != base]
        if changed and not verdict.outdated:
            rows = send(session, [(sql.current_states, (some,)) for some in lists(changed[:TOGETHER])])
            states = {oid: (tid, state) for oid, tid, state in chain.from_iterable(rows)}
            verdict.conflicts = [(oid, *states.get(oid, (current.get(oid, 0), None))) for oid in changed]
        return verdict

    def _lock_timeout(self, ballot: Ballot, seconds: float, lock: int) -> LockTimeout:
        """Return an error that says which object was locked and by whom, if that can be found out; else `lock`."""
        who = 'another transaction'
        session = self.session
        with suppress(StorageError):
            session.rollback()
            wanted = sorted({oid for oid, _ in ballot.bases} | {*ballot.restored})
            found: dict[str, set[int]] = defaultdict(set)
            for kind, oid in chain.from_iterable(send(session, [
                    (self._sql.lock_free, (some,)) for some in lists(wanted)])):
                found[kind].add(oid)
            lock = min(found['there'] - found['free'], default=lock)
            who = holder(self._adapter, session, lock)
        return lock_timeout(lock, seconds, who)

    def stage(self, batches: Iterator[Batch]) -> None:
        """Leave everything to the message of finish if it fits; else send all of it now, into a temporary table.

        StorageError: an object does not fit into any message.
        """
        adapter, session, metadata, current = self._adapter, self.session, self._metadata, self.current
        texts = {}          # without history there is no table for them
        if adapter.keep_history:
            texts = {'user': metadata.user, 'description': metadata.description, 'extension': metadata.extension or b''}
        for name, text in texts.items():
            if len(text) > TEXT_BYTES:
                raise StorageError(f'The {name} of the transaction has {len(text):,} bytes; {adapter} takes '
                                   f'{TEXT_BYTES:,} at most.')
        room = adapter.packet - OVERHEAD_BYTES - sum(map(session.literal_size, texts.values()))
        if self._blobs is not None:
            room -= self._blobs.size
        pieces = self._pieces(batches, room)
        first, second = next(pieces, []), next(pieces, None)
        if second is None and sum(row.size or 0 for row in first) < adapter.message_size:
            self._left = first
            return
        session.results(self._sql.begin_stage)
        for piece in chain(filter(None, (first, second)), pieces):
            session.run(with_rows(self._sql.stage, len(piece)), [value for row in piece for value in (
                row.oid, current.get(row.oid, 0), row.md5, row.size or 0, row.held, row.refs, row.data_tid)])

    def _pieces(self, batches: Iterable[Batch], room: int) -> Iterator[Batch]:
        """Yield the rows of all batches in lists, each of which is shorter than `room` in SQL."""
        adapter, size_of = self._adapter, self.session.literal_size
        piece: Batch = []
        size, wanted = 0, min(room, adapter.message_size)
        for row in chain.from_iterable(batches):
            length = size_of(row.held or b'') + size_of(row.refs or b'') + ROW_OVERHEAD_BYTES
            if size + length > wanted and piece:
                yield piece
                piece, size = [], 0
            if length > room:
                raise StorageError(
                    f'Object {row.oid:#x} has {row.size:,} bytes, {length:,} in SQL, and {adapter} takes {room:,} '
                    f'at most: raise max_allowed_packet of the server, now {adapter.packet:,}, and open the storage '
                    'again.')
            piece.append(row)
            size += length
        if piece:
            yield piece

    def choose_tid(self) -> int:
        [tid, waited] = send(self.session, [self._begin_finish(), (self._sql.chosen_tid, ())])[-1][0]
        self._tid, self._waited = _decided(tid), _seconds(waited)
        return self._tid

    def _begin_finish(self) -> Statement:
        return self._sql.begin_finish, (FINISH_TIMEOUT_SECONDS, self._tid, self.key, self.number)

    def finish(self) -> tuple[int, float]:
        adapter, sql, metadata, batch, current = self._adapter, self._sql, self._metadata, self._left, self.current
        vote = self.key, self.number
        statements = [self._begin_finish()]
        if adapter.keep_history:
            statements.append((sql.insert_transaction, (
                metadata.packed, metadata.user, metadata.description, metadata.extension)))
        if batch is None:
            statements.append((sql.insert_staged, ()))
        elif batch and adapter.keep_history:
            statements.append((with_rows(sql.insert_states, len(batch)), [value for row in batch for value in (
                row.oid, current.get(row.oid, 0), row.md5, row.size or 0, row.held, row.refs, row.data_tid)]))
            statements.append((with_rows(sql.point_current, len(batch)), [row.oid for row in batch]))
        elif batch:
            statements.append((with_rows(sql.insert_states, len(batch)), [value for row in batch for value in (
                row.oid, row.size or 0, row.held, row.refs)]))
        if self._blobs is not None:
            statements += self._blobs.last_statements()
        statements.append((sql.end_finish, vote))
        if adapter.may_lag and adapter.product == 'MariaDB':
            statements = [block([(sql.check_vote, vote), *statements])]
        *_, [[tid, waited]], _ = send(self.session, statements)
        return _decided(tid), self._waited + _seconds(waited)

    def stage_copies(self, copies: Sequence[Copy]) -> None:
        Copies(self._adapter, self.session, self.current).write(copies)

    def finish_copies(self) -> None:
        *_, [[tid, _]], _ = send(self.session, [self._begin_finish(), (self._sql.end_finish, (self.key, self.number))])
        _decided(tid)

    def outcome(self, session: Session, oids: Sequence[int]) -> int | None:
        """A lost connection proves nothing: the server may still wait for the commit lock, and commit later.

        So wait for the lock on the row that the vote wrote. If that takes long, end the orphaned connection.
        """
        adapter = self._adapter
        deadline = time.monotonic() + ORPHAN_DEADLINE_SECONDS
        while True:
            try:
                *_, rows, _, _ = session.results(self._sql.outcome, (ORPHAN_PATIENCE_SECONDS, self.key, self.number))
            except (LockTimeout, Deadlock) as e:
                session.rollback()
                if time.monotonic() > deadline:
                    raise OutcomeUnknown(f'the connection {self.connection} of the server is still busy with it') from e
                if isinstance(e, LockTimeout) and adapter.epoch(session) == self.epoch:
                    self._kill(session)     # only there: on another server the number is another connection's
            else:
                break
        if rows:
            self._until_seen(session, rows[0][0], oids)
            return rows[0][0]
        if _server(adapter.epoch(session)) != _server(self.epoch):
            raise OutcomeUnknown('another server answers, which may not have it yet')
        return None

    def _until_seen(self, session: Session, tid: int, oids: Sequence[int]) -> None:
        """Wait until new views show a transaction.

        MariaDB releases its locks with the commit, but shows it in views a moment later. If it only deleted objects,
        nothing tells that it is shown: so this ends after a time that is long enough in any case.
        """
        deadline = time.monotonic() + SEEN_PATIENCE_SECONDS
        while (not any((self._adapter.current_tid(session, oid) or 0) >= tid for oid in oids[:SEEN_OBJECTS])
               and time.monotonic() < deadline):
            time.sleep(0.001)

    def _kill(self, session: Session) -> None:
        try:
            session.run(self._sql.kill, (self.connection,))
        except DatabaseError as e:
            log.info('The connection %d was not ended: %s', self.connection, e)     # it has just ended by itself

    def finish_holders(self, session: Session) -> str:
        """Return what it waits for, if this user may not see who holds the lock: it may see its own connections."""
        if _server(session.epoch) != _server(self.epoch):
            return ''       # there the number is another connection's
        who = 'another transaction'
        try:
            holders = session.all(self._sql.blockers, (self.connection,))
        except NotAllowed:
            holders, who = [], 'a transaction that this user may not see'
        if holders:
            return ', '.join(connection(row) if row[0] else 'a prepared transaction' for row in holders)
        with suppress(DatabaseError):       # MySQL 9.7 cannot show a connection that is sending bytes
            for state, in session.all(self._sql.waits_for, (self.connection,)):
                return f'what the server calls "{state}"' if state else who
        return ''


def holder(adapter: MySQLAdapter, session: Session, lock: int) -> str:
    """Return who has a lock, or may have it, as far as this user may see other connections."""
    with suppress(ConfigurationError, DatabaseError):
        rows = session.all(adapter.sql.lock_holders, (str(lock),))
        if rows:
            return ' or '.join(map(connection, rows))
    [[count, age]] = session.script(adapter.sql.unfinished, (session.key,))
    if count:
        return f'one of {count} transactions that have voted and not finished, the oldest {age} s ago'
    return 'another transaction'


def connection(row: Row) -> str:
    """Return the words for a connection. row: (number, user, host, seconds)."""
    number, user, host, seconds = row
    return f'connection {number} ({user}@{host}' + (
        ')' if seconds is None else f', in a transaction for {seconds} s)')      # that is not always measured


def _server(epoch: str) -> str:
    """Return the part of an epoch that names the server."""
    return epoch.partition('.')[2].rpartition('.')[0]


def _decided(tid: int | None) -> int:
    if tid is None:
        raise Unavailable('the transaction that has voted is gone')
    return tid


def _seconds(waited: int) -> float:
    return waited / 1e6 if waited >= SHORTEST_WAIT_MICROSECONDS else 0.0


def _waits(results: Iterable[Sequence[Row]]) -> Iterator[tuple[int, float]]:
    """Yield (oid or what stands for it, seconds) for each lock that was waited for.

    results: for each statement, rows (kind, oid, tid, microseconds since it began), in the order of the locks.
    """
    for rows in results:
        before = 0
        for kind, oid, _, after in rows if rows and rows[-1][3] >= SHORTEST_WAIT_MICROSECONDS else ():
            if after - before >= SHORTEST_WAIT_MICROSECONDS:
                if kind in NO_OBJECTS:
                    oid = NO_OBJECTS[kind]
                yield oid, (after - before) / 1e6
            before = after
