"""The data of the blobs of one commit in MySQL and MariaDB, on its way to its rows.

Small blobs travel in the message of finish. Others are sent before the vote, outside all locks, in the transaction that
the vote then continues: a rollback, or the end of the connection, leaves nothing. The tid is not known yet, so they
wait for it in one of two places:

* In blob_chunk itself, under an oid that no object has: a random one below 0, for each blob another. Finish gives them
  theirs. InnoDB leaves what it stores outside of a row where it is, so that takes
  a fifth of the time of a copy (200 MB: 0.25 s instead of 1.2 s in MariaDB 10.11; the server reads them). Nobody else
  ever sees these rows, for they are not committed, nor waits for them, for nobody looks for such an oid.
* In a temporary table, from which finish copies them, where the server logs whole rows (log_bin, or a cluster, with
  binlog_row_image=FULL). There a change of the key would be logged with the data of before and after: thrice as much as
  a copy, all of it while the commit lock is held (200 MB: 1.5 s to 8 s instead of 1.5 s).

What is recorded of blobs travels in the message of finish. Of too many for that it waits in relstore_blob, in the first
way.
"""
from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, count
from typing import TYPE_CHECKING

from relstore.adapters.chunks import Record, pieces
from relstore.adapters.mysql_messages import LIST, Statement, lists, send, with_rows
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.adapters.mysql import MySQLAdapter

SMALL = 64 * 1024           # bytes of all blobs that travel with finish
OVERHEAD = 1000             # bytes of a message besides its rows, roughly
ROW_OVERHEAD = 100          # bytes of a row besides its chunk: at most
RECORD_BYTES = 150          # of what is recorded of a blob, in SQL: at most


class ChunkRows:
    """ahead: whether rows wait, in a transaction. size: bytes that last_statements() have in SQL because of blobs.

    repeated: oid -> tid of the revision of which a new one repeats what is recorded. deleted: oids.
    """

    def __init__(self, adapter: MySQLAdapter, session: Session):
        self._adapter, self._session, self._sql = adapter, session, adapter.sql
        self._places = count(-secrets.randbits(62) - 1, -1)
        self._replaced: list[int] = []
        self._waiting: list[tuple[int, int]] = []       # (oid, place)
        self._small: list[Row] = []
        self._records: Mapping[int, Record] = {}
        self._records_waiting: list[tuple[int, int]] = []
        self.repeated: Mapping[int, int] = {}
        self.deleted: Collection[int] = ()
        self.ahead, self.size = False, 0

    def send(self, files: Mapping[int, str], records: Mapping[int, Record]) -> None:
        """See Commit.send_blobs."""
        self._send_data(files)
        self._records = records
        if len(records) <= LIST:
            self.size += len(records) * RECORD_BYTES
        else:
            self._send_records(records)

    def _send_data(self, files: Mapping[int, str]) -> None:
        self._replaced = [*files]
        if len(files) <= LIST and sum(map(os.path.getsize, files.values())) <= SMALL:
            self._small = [(oid, number, chunk) for oid, path in files.items()
                           for number, chunk in enumerate(_pieces(path, SMALL))]
            self.size = sum(self._size_of(row) for row in self._small)
        else:
            self._send(files)

    def _send(self, files: Mapping[int, str]) -> None:
        statements: list[Statement] = [(self._sql.begin_chunks, ())]
        for rows in self._messages(files):
            statements.append((with_rows(self._sql.send_chunks, len(rows)), [*chain.from_iterable(rows)]))
            send(self._session, statements)
            statements = []
        self.ahead = True

    def _send_records(self, records: Mapping[int, Record]) -> None:
        if not self.ahead:
            send(self._session, [(self._sql.begin_chunks, ())])
            self.ahead = True
        self._records_waiting = [(oid, next(self._places)) for oid in records]
        for some in lists((place, *records[oid]) for oid, place in self._records_waiting):
            send(self._session, [(with_rows(self._sql.send_records, len(some)), [*chain.from_iterable(some)])])

    def _messages(self, files: Mapping[int, str]) -> Iterator[list[Row]]:
        """Yield the rows of all files in lists, each of which fits into a message."""
        room = min(self._adapter.message_size, self._adapter.packet - OVERHEAD)
        longest = min(self._adapter.blob_chunk_bytes, room // 2 - ROW_OVERHEAD)     # in SQL it may be twice as long
        rows: list[Row] = []
        size = 0
        for oid, path in files.items():
            place = self._wait(oid)
            for number, chunk in enumerate(_pieces(path, longest)):
                row = place, number, chunk
                length = self._size_of(row)
                if rows and size + length > room:
                    yield rows
                    rows, size = [], 0
                rows.append(row)
                size += length
        yield rows

    def _wait(self, oid: int) -> int:
        place = next(self._places)
        self._waiting.append((oid, place))
        return place

    def _size_of(self, row: Row) -> int:
        return self._session.literal_size(row[-1]) + ROW_OVERHEAD

    def repeat(self, copies: Mapping[int, int]) -> None:
        """See Commit.copy_blobs: the data is copied in the server, before anything waits for the commit lock."""
        statements: list[Statement] = [] if self.ahead else [(self._sql.make_chunks, ())]
        triples = [(oid, tid, self._wait(oid)) for oid, tid in copies.items()]
        send(self._session, [*statements, (self._sql.repeat_chunks, (json.dumps(triples),))])
        self.ahead = True

    def last_statements(self) -> list[Statement]:
        """Return what is left for finish, after the states."""
        adapter, sql = self._adapter, self._sql
        statements: list[Statement] = []
        if not adapter.keep_history:
            for sql_of, oids in ((sql.remove_chunks, [*self._replaced, *self.deleted]),
                                 (sql.remove_records, [*self._records, *self.deleted])):
                if oids:
                    statements.append((sql_of, (adapter.oid_list(oids),)))
        if self._small:
            statements.append((with_rows(sql.insert_chunks, len(self._small)), [*chain.from_iterable(self._small)]))
        if self.ahead:
            statements.append((sql.take_chunks, (json.dumps(self._waiting),)))
        if self._records_waiting:
            statements.append((sql.take_records, (json.dumps(self._records_waiting),)))
        elif self._records:
            statements.append((with_rows(sql.insert_records, len(self._records)), [
                value for oid, record in self._records.items() for value in (oid, *record)]))
        if self.repeated:
            statements.append((sql.repeat_records, (adapter.revision_list([*self.repeated.items()]),)))
        return statements


def _pieces(path: str, size: int) -> Iterator[bytes]:
    with open(path, 'rb', buffering=0) as file:
        yield from pieces(file, size)
