"""Chunks: the data of blobs that is in the database, as RelStorage keeps it in the table blob_chunk.

Here as rows: the chunks of a revision have the numbers from 0 on, and an empty blob one chunk of no bytes, so that it
is not taken for none.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter

# Bytes of a blob that are in memory at a time, at most.
PIECE_BYTES = 4 * 1024 * 1024
# Chunks that are asked for at first, before it is known how long they are.
FIRST = 4


class Chunks:
    """The blobs of one database, as far as they are in it: each in one chunk or several, by oid and tid."""
    # Bytes that a server sends in one row, at most.
    longest_row = PIECE_BYTES

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def there(self, session: Session) -> bool:
        """Whether there are any."""
        return bool(session.all(self._adapter.sql.has_blobs))

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        """Return the bytes of a revision's blob, or None if it has none."""
        [[size]] = session.all(self._adapter.sql.blob_size, (oid, tid))
        return None if size is None else int(size)

    def read(self, session: Session, oid: int, tid: int) -> Iterator[bytes]:
        """Yield the data in pieces; nothing where there is none. A small blob takes one round trip.

        Chunks may have any size: of long ones a part is asked for at a time.

        POSKeyError: it is gone, or a chunk is missing: what was yielded is not all.
        """
        most = min(PIECE_BYTES, self.longest_row)
        number, start, size, limit = 0, 1, most // FIRST, FIRST
        last = None     # the number of the last chunk, as the first answer has it: what is gone later is missed
        while last is None or number <= last:
            rows = session.all(self._adapter.sql.chunk_rows, (oid, tid, number, start, size, limit))
            if last is None:
                if not rows:
                    return
                last = rows[0][0]
            elif not rows:
                raise _missing(oid, tid, number)
            longest = 1
            for _, found, length, piece in rows:
                if found != number:
                    raise _missing(oid, tid, number)
                piece = piece or b''        # SQLite makes NULL of a part of nothing
                yield piece
                longest, start = max(longest, length), start + len(piece)
                if start <= length:
                    break       # the rest of a long one comes next
                number, start = number + 1, 1
            limit = max(most // longest, 1)
            size = most // limit


def pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield what is in a file in pieces of this size; an empty file is one empty piece."""
    piece = file.read(size)
    while True:
        yield piece
        piece = file.read(size)
        if not piece:
            return


def _missing(oid: int, tid: int, number: int) -> POSKeyError:
    return POSKeyError(f'The piece {number} of the blob is not there', p64(oid), p64(tid))
