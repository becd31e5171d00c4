"""Copied transactions in MySQL and MariaDB: rows into the tables themselves, many in a statement."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from relstore.adapters.commits.base import Copy, newest, revisions
from relstore.adapters.mysql_messages import with_rows
from relstore.errors import StorageError
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.mysql import MySQLAdapter

ROW_BYTES = 300             # of a row besides its values, at most
TEXT_BYTES = 65_535         # user, description, extension: the columns are BLOBs, which a server may cut off


class Copies:
    """Writes transactions after a vote that holds the commit lock. current: tids of the objects that are there."""

    def __init__(self, adapter: MySQLAdapter, session: Session, current: dict[int, int]):
        self._adapter, self._sql, self._session, self._current = adapter, adapter.sql, session, current

    def write(self, copies: Sequence[Copy]) -> None:
        sql, last = self._sql, newest(copies)
        if self._adapter.keep_history:
            self._insert(sql.insert_transactions, map(_transaction, copies))
            self._insert(sql.insert_copies, (
                (row.oid, tid, before, row.md5, row.size or 0, row.held, row.refs, row.data_tid)
                for tid, before, row in revisions(copies, self._current)))
            self._insert(sql.point_copied, ((oid, tid) for oid, (tid, _) in last.items()))
        else:
            self._insert(sql.insert_copies, (
                (oid, tid, row.size or 0, row.held, row.refs, tid) for oid, (tid, row) in last.items()))

    def _insert(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        for some in self._pieces(rows):
            self._session.run(with_rows(sql, len(some)), [value for row in some for value in row])

    def _pieces(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
        """Yield rows in lists that fit into a message. StorageError: one does not."""
        most, size_of = self._adapter.packet - ROW_BYTES, self._session.literal_size
        wanted = min(most, self._adapter.message_size)
        piece: list[tuple[Any, ...]] = []
        size = 0
        for row in rows:
            length = ROW_BYTES + sum([size_of(value) for value in row if type(value) is bytes])
            if length > most:
                raise StorageError(f'A row has {length:,} bytes in SQL.')
            if size + length > wanted and piece:
                yield piece
                piece, size = [], 0
            piece.append(row)
            size += length
        if piece:
            yield piece


def _transaction(copy: Copy) -> tuple[Any, ...]:
    metadata = copy.metadata
    texts = metadata.user, metadata.description, metadata.extension
    if max(map(len, (text or b'' for text in texts))) > TEXT_BYTES:
        raise StorageError('A text of the transaction is too long.')
    return copy.tid, metadata.packed, *texts
