"""The blobs of a commit in PostgreSQL: each is one large object, as RelStorage keeps them, and a row of blob_chunk.

RelStorage reads the first chunk of a blob alone, so there is one, however large. Large objects are made and removed by
plain functions, which are part of the transaction: where it ends otherwise than by COMMIT none is left. What is more
than SMALL goes ahead of the vote, outside of all locks, in messages of PIECE_BYTES. What is less goes with the message
of finish. What could interleave:

* An undo repeats the blob of an earlier revision, that is, shares its large object, while a pack removes that revision.
  So the earlier row is locked from the vote on. The pack waits; when it goes on, the trigger of blob_chunk, which looks
  after the wait, finds that the large object has another row. Or the pack was first: then we wait, and the revision is
  gone, which refuses the vote.
* Without history somebody reads the blob that is replaced: see Chunks.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import IO, TYPE_CHECKING, Any

from ZODB.POSException import UndoError
from ZODB.utils import p64

from relstore.adapters import chunks
from relstore.adapters.arrays import starts
from relstore.adapters.large_objects import explained
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.postgresql import PostgreSQLAdapter

SMALL = 64 * 1024       # bytes of all blobs of a transaction, up to which they go with the message of finish


class NewBlobs:
    """What a commit adds to blob_chunk and relstore_blob.

    repeated: oid -> tid of the revision of which a new one repeats what is recorded. deleted: oids.
    """

    def __init__(self, adapter: PostgreSQLAdapter, session: Session):
        self._adapter, self._sql, self._session = adapter, adapter.sql, session
        self._oids: list[int] = []          # of the new blobs
        self._chunks: list[int] = []        # the large objects of those that were sent ahead, in the same order
        self._small: list[bytes] = []       # the data of those that were not
        self._records: Mapping[int, chunks.Record] = {}
        self._copies: Mapping[int, int] = {}
        self.repeated: Mapping[int, int] = {}
        self.deleted: Collection[int] = ()

    def add(self, files: Mapping[int, str], records: Mapping[int, chunks.Record]) -> None:
        """Send what is large; see Commit.send_blobs."""
        self._oids, self._records = sorted(files), records
        paths = [files[oid] for oid in self._oids]
        if sum(map(os.path.getsize, paths)) <= SMALL:
            self._small = list(map(_content, paths))
            return
        with explained(self._adapter):
            self._send(paths)

    def _send(self, paths: list[str]) -> None:
        """The beginnings of many in one message, so that those of less than a piece need no more."""
        held: list[bytes] = []
        room = chunks.PIECE_BYTES
        for path in paths:
            with open(path, 'rb', buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if held and size > room:
                    self._begin(held)
                    held, room = [], chunks.PIECE_BYTES
                held.append(_piece(file))
                room -= len(held[-1])
                if room <= 0:
                    self._begin(held)
                    held, room = [], chunks.PIECE_BYTES
                    self._go_on(file)
        if held:
            self._begin(held)

    def _begin(self, pieces: list[bytes]) -> None:
        """Make large objects, each of one piece."""
        sql = self._sql.new_chunks if self._session.in_transaction else self._sql.begin_with_chunks
        self._chunks += [chunk for _, chunk in sorted(self._session.script(sql, self._joined(pieces)))]

    def _go_on(self, file: IO[bytes]) -> None:
        """Append the rest of a file to the large object that was made last."""
        while piece := _piece(file):
            self._session.all(self._sql.continue_chunk, (self._chunks[-1], file.tell() - len(piece), piece))

    def _joined(self, pieces: list[bytes]) -> tuple[str, str, bytes]:
        new_array = self._adapter.oid_list
        return new_array(starts(pieces)), new_array(map(len, pieces)), b''.join(pieces)

    def copy(self, copies: Mapping[int, int]) -> None:
        """See Commit.copy_blobs. UndoError: the revision is there no more."""
        self._copies = copies
        for oid, in self._session.script(self._sql.lock_copied, self._arrays(copies)):
            raise UndoError('The revision to go back to has been packed.', p64(oid))

    def _arrays(self, copies: Mapping[int, int]) -> tuple[str, str]:
        new_array = self._adapter.oid_list
        return new_array(copies), new_array(copies.values())

    def finish(self, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Send the message of finish, with what it takes beside the blobs. Return its rows."""
        new_array = self._adapter.oid_list
        records = self._records
        values += (
            new_array(self._oids), new_array(self._chunks), *self._joined(self._small),
            new_array(records), new_array(record.size for record in records.values()),
            b''.join(record.digest for record in records.values()))
        if self._adapter.keep_history:
            values += *self._arrays(self._copies), *self._arrays(self.repeated)
        else:
            values += new_array({*self._oids, *records, *self.deleted}),
        with explained(self._adapter):
            return self._session.script(self._sql.finish_with_blobs, values)


def _content(path: str) -> bytes:
    with open(path, 'rb') as file:
        return file.read()


def _piece(file: IO[bytes]) -> bytes:
    """Return the next piece, whole unless it is the last: a read of the system may return less."""
    parts: list[bytes] = []
    left = chunks.PIECE_BYTES
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b''.join(parts)
