"""Chunks: the data of blobs that is in the database, as RelStorage keeps it in the table blob_chunk.

Here as rows: the chunks of a revision have the numbers from 0 on, and an empty blob one chunk of no bytes, so that it
is not taken for none.

What the data of a revision is, its size and its digest, is recorded in the table relstore_blob when it is stored,
wherever the data goes. RelStorage records nothing: its blobs are taken as they are.
"""
from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.errors import DamagedBlob
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter

# Bytes of a blob that are in memory at a time, at most.
PIECE_BYTES = 4 * 1024 * 1024
# Chunks that are asked for at first, before it is known how long they are.
FIRST = 4
# Bytes of a file that are read at a time to record it.
READ_BYTES = 256 * 1024
# Bytes of a statement besides a chunk: at most.
OVERHEAD = 1000
# Objects that are looked up at a time.
LOOKED_UP = 10_000


class Record(NamedTuple):
    """What the data of a blob is. size: in bytes. digest: SHA-256, 32 bytes."""
    size: int
    digest: bytes


class Data(NamedTuple):
    """The data of a revision as it is found. record: what it should be, None where nobody has recorded that."""
    record: Record | None
    pieces: Iterator[bytes]


class Chunks:
    """The blobs of one database, as far as they are in it: each in one chunk or several, by oid and tid."""
    # Bytes that a server sends in one row, at most.
    longest_row = PIECE_BYTES

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def there(self, session: Session) -> bool:
        """Whether there are any."""
        return bool(session.all(self._adapter.sql.has_blobs))

    def of(self, session: Session, oids: Iterable[int]) -> list[int]:
        """Return those of these objects that have blobs, in the database or recorded. Without history alone."""
        oids, found = iter(oids), set()
        while some := list(islice(oids, LOOKED_UP)):
            found |= {oid for oid, in session.all(self._adapter.sql.blobs_of, (self._adapter.oid_list(some),))}
        return sorted(found)

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        """Return the bytes of a revision's blob, or None if it has none."""
        [[size]] = session.all(self._adapter.sql.blob_size, (oid, tid))
        return None if size is None else int(size)

    def record(self, session: Session, oid: int, tid: int) -> Record | None:
        """Return what is recorded of a revision's blob, wherever its data is; None: nothing."""
        return recorded(session.one(self._adapter.sql.blob_record, (oid, tid)) or (None, None))

    def sizes(self, session: Session, oid: int, limit: int) -> dict[tuple[int, int], int]:
        """Return what is recorded of the sizes of an object's blobs, and of those of the next objects, by (oid, tid).

        That are so many revisions, in the order of oids, or all there are.
        """
        return {(oid, tid): size for oid, tid, size in session.all(self._adapter.sql.blob_sizes, (oid, limit))}

    def add_record(self, session: Session, oid: int, tid: int, record: Record) -> None:
        """Record what the data of a revision is, where nobody has. Nothing happens where that is gone by now."""
        with self._adapter.writing(session):
            if not self._adapter.keep_history:
                session.run(self._adapter.sql.forget_record, (oid, tid))
            session.run(self._adapter.sql.add_record, (*record, oid, tid))

    def put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> bool:
        """Within a transaction: keep the data of a revision that is kept elsewhere. Return False if that is gone."""
        sql = self._adapter.sql
        if session.one(sql.lock_revision, (oid, tid)) is None:
            return False
        session.run(sql.drop_chunks, (oid, tid))
        self._put(session, oid, tid, pieces)
        return True

    def _put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> None:
        size = min(self._adapter.blob_chunk_bytes, self.longest_row - OVERHEAD)
        chunks = (piece[start:start + size] for piece in pieces for start in range(0, max(len(piece), 1), size))
        for number, chunk in enumerate(chunks):
            session.run(self._adapter.sql.put_chunk, (oid, tid, number, chunk))

    def read(self, session: Session, oid: int, tid: int) -> Iterator[bytes]:
        """Yield the data in pieces, whatever is recorded of it; nothing where there is none. As open."""
        data = self.open(session, oid, tid)
        if data is not None:
            yield from data.pieces

    def open(self, session: Session, oid: int, tid: int) -> Data | None:
        """Return the data, in pieces; None where there is none. A small blob takes one round trip.

        Chunks may have any size: of long ones a part is asked for at a time.

        POSKeyError, while it is read: it is gone, or a chunk is missing: what was yielded is not all.
        """
        most = min(PIECE_BYTES, self.longest_row)
        rows = self._rows(session, oid, tid, 0, 1, most // FIRST, FIRST)
        return Data(recorded(rows[0][4:]), self._pieces(session, oid, tid, rows, most)) if rows else None

    def _rows(self, session: Session, oid: int, tid: int, number: int, start: int, size: int, limit: int) -> list[Row]:
        """Return rows of chunks: (number of the last, its own, length, the first `size` bytes, size, digest).

        Of the chunk with this number the bytes from `start` on, which counts from 1.
        """
        return session.all(self._adapter.sql.chunk_rows, (oid, tid, number, start, size, limit))

    def _pieces(self, session: Session, oid: int, tid: int, rows: list[Row], most: int) -> Iterator[bytes]:
        """rows: the first. most: bytes that are asked for at a time."""
        number, start = 0, 1
        last = rows[0][0]       # the number of the last chunk, as the first answer has it: what is gone later is missed
        while True:
            longest = 1
            for _, found, length, piece, *_ in rows:
                if found != number:
                    raise _missing(oid, tid, number)
                piece = piece or b''        # SQLite makes NULL of a part of nothing
                yield piece
                longest, start = max(longest, length), start + len(piece)
                if start <= length:
                    break       # the rest of a long one comes next
                number, start = number + 1, 1
            if number > last:
                return
            limit = max(most // longest, 1)
            rows = self._rows(session, oid, tid, number, start, most // limit, limit)
            if not rows:
                raise _missing(oid, tid, number)


class ChunksOnOracle(Chunks):
    """Of a chunk that is longer than a piece, as RelStorage's may be, parts are read by its locator, one at a time."""

    def _rows(self, session: Session, oid: int, tid: int, number: int, start: int, size: int, limit: int) -> list[Row]:
        rows = super()._rows(session, oid, tid, number, start, size, limit)
        for place, (last, found, length, piece, *record) in enumerate(rows):
            if piece is None and length:
                first = start if found == number else 1
                piece = session.read_part(self._adapter.sql.long_chunk, (oid, tid, found), first, size)
                return [*rows[:place], (last, found, length, piece, *record)]
        return rows


def recorded(row: Sequence[Any]) -> Record | None:
    """Return what a row of (size, digest) says; both are None where nothing is recorded."""
    size, digest = row
    return None if size is None else Record(size, bytes(digest))


def measured(pieces: Iterator[bytes]) -> Record:
    """Return what is to be recorded of data."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return Record(size, digest.digest())


def record_of(path: str) -> Record:
    """Return what is to be recorded of the data in a file."""
    digest, size = hashlib.sha256(), 0
    with open(path, 'rb', buffering=0) as file:
        buffer = memoryview(bytearray(min(max(os.fstat(file.fileno()).st_size, 1), READ_BYTES)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return Record(size, digest.digest())


def verified(data: Data, oid: int, tid: int) -> Iterator[bytes]:
    """Yield the data of a revision. DamagedBlob, at the end or before: it is not what is recorded.

    Of data that is longer only so much is yielded as there should be.
    """
    if data.record is None:
        yield from data.pieces
        return
    digest, size = hashlib.sha256(), 0
    for piece in data.pieces:
        size += len(piece)
        if size <= data.record.size:
            digest.update(piece)
            yield piece
    found = Record(size, digest.digest())
    if found != data.record:
        raise damaged(oid, tid, data.record.size, size)


def damaged(oid: int, tid: int, size: int, found: int) -> DamagedBlob:
    """Return what to raise for a blob that should have `size` bytes, and has as many as were found, or other ones."""
    what = (f'{size:,} bytes were committed, and {found:,} are there' if size != found else
            f'it has {size:,} bytes, as many as were committed, but others')
    return DamagedBlob(f'The blob {oid:#x} of the transaction {tid:#x} is damaged: {what}; restore it from a backup.')


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
