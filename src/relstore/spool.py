"""Spool: holds what a transaction is going to store, until the database has it."""
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import md5
from operator import attrgetter
from typing import IO

from ZODB.blob import is_blob_record

from relstore.adapters.base import MAX_TID
from relstore.errors import StorageError
from relstore.references import references

# How much of a transaction's states stays in memory; the rest goes to a temporary file.
IN_MEMORY_BYTES = 16 * 1024 * 1024
# What a row adds to a message besides its state, roughly.
ROW_BYTES = 200

# In the file: the md5 (zeros: none) and the length of the references (-1: unknown), then references and state.
HEADER = struct.Struct('<32si')


@dataclass(slots=True)
class Pending:
    """One object to be stored."""
    oid: int
    base: int               # the tid that the change is based on; 0: the object is new
    restored: bool          # copied from elsewhere: written no matter what is there
    size: int | None        # None: a deletion, or undo of a creation
    md5: str | None         # None: not wanted, or in the file
    refs: bytes | None      # see references.py; None: unknown, or in the file
    data_tid: int | None    # the earlier transaction whose state this one repeats, if any
    held: bytes | None      # the state, or None if it is in the file
    start: int              # offset in the file; -1: not in the file


Batch = list[Pending]       # with their states
_by_oid = attrgetter('oid')


def described(state: bytes, untransform: Callable[[bytes], bytes], digest: bool
              ) -> tuple[str | None, bytes | None, bool]:
    """Return (md5 if wanted, references or None, whether it is a Blob's) of a state."""
    record = untransform(state)
    return (md5(state, usedforsecurity=False).hexdigest() if digest else None, references(record),
            is_blob_record(record))


class Spool:
    """Pending states by oid: the newest for each. Memory for the states is bounded; besides, each object takes 300
    bytes.

    untransform: returns the pickle in a stored record, as ZODB's storage wrappers define it.
    digest: whether md5s are wanted.
    """

    def __init__(self, untransform: Callable[[bytes], bytes], digest: bool):
        self._untransform, self._digest = untransform, digest
        self._pending: dict[int, Pending] = {}
        self._rows: list[Pending] | None = None     # the same in oid order, once asked for
        self.blobs: set[int] = set()        # oids whose state is a Blob's
        self.deleted: set[int] = set()      # oids without a state
        self.unreadable: set[int] = set()   # oids of which the references are unknown
        self.size = 0               # bytes of all states, and of their rows
        self._held = 0
        self._file: IO[bytes] | None = None
        self._end = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def __contains__(self, oid: int) -> bool:
        return oid in self._pending

    def rows(self) -> list[Pending]:
        """Return all in oid order, the order of locks and writes; those in the file without their states."""
        if self._rows is None:
            self._rows = sorted(self._pending.values(), key=_by_oid)
        return self._rows

    def get(self, oid: int) -> Pending | None:
        """Return what is pending for an object, with its state."""
        return self[oid] if oid in self._pending else None

    def __getitem__(self, oid: int) -> Pending:
        """As get, for an object that has something pending."""
        pending = self._pending[oid]
        return pending if pending.start < 0 else self._read(pending)

    def put(self, oid: int, base: int, state: bytes | None, *, restored: bool = False,
            data_tid: int | None = None) -> None:
        """Add a state. A second one for an oid replaces the first, but keeps the first one's base.

        TypeError if the state is not bytes-like, StorageError if the oid or a tid is out of range.
        """
        if oid > MAX_TID or base > MAX_TID or (data_tid or 0) > MAX_TID:
            raise StorageError(f'The object {oid:#x}, based on the tid {base:#x}, cannot be stored: oids and tids end '
                               f'at {MAX_TID:#x}.')
        if state is not None and type(state) is not bytes:      # some drivers would store its repr()
            state = bytes(memoryview(state))
        self._rows = None
        earlier = self._pending.get(oid)
        if earlier is not None:
            self.blobs.discard(oid)
            self.deleted.discard(oid)
            self.unreadable.discard(oid)
            base = earlier.base
            self._held -= len(earlier.held or b'')
            self.size -= ROW_BYTES + (earlier.size or 0)
        self.size += ROW_BYTES + len(state or b'')
        if state is None:
            self.deleted.add(oid)
            self._pending[oid] = Pending(oid, base, restored, None, None, b'', data_tid, None, -1)
            return
        size = len(state)
        digest, refs, is_of_blob = described(state, self._untransform, self._digest)
        if is_of_blob:
            self.blobs.add(oid)
        if refs is None:
            self.unreadable.add(oid)
        if self._held + size <= IN_MEMORY_BYTES:
            self._held += size
            self._pending[oid] = Pending(oid, base, restored, size, digest, refs, data_tid, state, -1)
        else:
            start = self._write(digest, refs, state)
            self._pending[oid] = Pending(oid, base, restored, size, None, None, data_tid, None, start)

    def batches(self, limit: int, oids: Collection[int] | None = None) -> Iterator[Batch]:
        """Return everything, or these oids, in oid order: in one list if everything has less than `limit` bytes.

        Otherwise in lists of about a quarter of `limit`, because a driver makes several copies of each.
        """
        if oids is None and self.size < limit and self._file is None:
            return iter([self._rows or self.rows()] if self._pending else [])
        return self._pieces(limit if self.size < limit else limit // 4, sorted(self._pending if oids is None else oids))

    def _pieces(self, limit: int, oids: Iterable[int]) -> Iterator[Batch]:
        batch: Batch = []
        size = 0
        for oid in oids:
            pending = self[oid]
            batch.append(pending)
            size += (pending.size or 0) + ROW_BYTES
            if size >= limit:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, digest: str | None, refs: bytes | None, state: bytes) -> int:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix='relstore-')     # noqa: SIM115 (closed by close())
        start = self._end
        header = HEADER.pack((digest or '').encode(), -1 if refs is None else len(refs))
        self._file.seek(start)
        self._end += self._file.write(b''.join((header, refs or b'', state)))
        return start

    def _read(self, pending: Pending) -> Pending:
        assert self._file is not None
        self._file.seek(pending.start)
        digest, length = HEADER.unpack(self._file.read(HEADER.size))
        refs = None if length < 0 else self._file.read(length)
        return replace(pending, md5=digest.decode() if self._digest else None, refs=refs,
                       held=self._file.read(pending.size or 0))
