"""Large objects: the chunks of blobs on PostgreSQL, read by plain functions.

Between two pieces anybody may replace the blob or pack it. A row of blob_chunk goes together with its large object, and
each piece is asked for by way of the row: by oid and tid, which are never given to another one.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.adapters import chunks
from relstore.errors import NotAllowed
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.postgresql import PostgreSQLAdapter


class ChunksOnPostgreSQL(chunks.Chunks):
    _adapter: PostgreSQLAdapter

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        with explained(self._adapter):
            [[count, size]] = session.all(self._adapter.sql.blob_size, (oid, tid))
        return size if count else None

    def open(self, session: Session, oid: int, tid: int) -> chunks.Data | None:
        size = chunks.PIECE_BYTES
        with explained(self._adapter):
            rows = session.all(self._adapter.sql.chunks, (oid, tid, size))
        if not rows:
            return None
        if any(number != wanted or piece is None for wanted, (number, piece, *_) in enumerate(rows)):
            raise POSKeyError(p64(oid))
        _, piece, *record = rows[0]
        return chunks.Data(chunks.recorded(record), self._rest(session, oid, tid, piece, len(rows)))

    def _rest(self, session: Session, oid: int, tid: int, piece: bytes, count: int) -> Iterator[bytes]:
        """piece: the first one. count: of chunks."""
        size = chunks.PIECE_BYTES
        for number in range(count):
            start = 0
            if number:
                piece = self._piece(session, oid, tid, number, start, size)
            yield piece         # of an empty blob, too: then there is one
            while len(piece) == size:
                start += size
                piece = self._piece(session, oid, tid, number, start, size)
                yield piece

    def _put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> None:
        sql, new_array = self._adapter.sql, self._adapter.oid_list
        with explained(self._adapter):
            [[_, chunk]] = session.all(sql.new_chunks, (new_array([0]), new_array([0]), b''))
            start = 0
            for piece in pieces:
                session.all(sql.continue_chunk, (chunk, start, piece))
                start += len(piece)
            session.run(sql.put_chunk, (oid, tid, 0, chunk))

    def _piece(self, session: Session, oid: int, tid: int, number: int, start: int, size: int) -> bytes:
        with explained(self._adapter):
            row = session.one(self._adapter.sql.chunk_piece, (oid, tid, number, start, size))
        if row is None:
            raise POSKeyError(p64(oid))
        return row[0]


@contextmanager
def explained(adapter: PostgreSQLAdapter) -> Iterator[None]:
    """Say why a large object may not be read or removed: it has an owner, as tables have."""
    try:
        yield
    except NotAllowed as e:
        raise NotAllowed(
            f'The user of {adapter} lacks rights for its blobs: {e}; a blob belongs to the role that stored it, and '
            'to read, replace or pack it takes that role (GRANT it to the user, and to the owner of blob_chunk), or '
            'lo_compat_privileges.') from e
