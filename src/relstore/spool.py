"""Spool: what a transaction is going to store, until the database has it."""
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import md5
from typing import IO

from relstore.references import references

# States of one transaction stay in memory up to this many bytes; the rest goes to a temporary file.
IN_MEMORY = 16 * 1024 * 1024


@dataclass(slots=True)
class Pending:
    """One object to be stored."""
    oid: int
    base: int               # the tid the change was based on; 0: the object is new
    restored: bool          # copied from elsewhere: written whatever is there
    size: int | None        # None: a deletion, or the undoing of a creation
    md5: str | None
    refs: bytes | None      # see references.py; None: unknown
    data_tid: int | None    # the earlier transaction whose state this one repeats, if it does
    held: bytes | None      # the state, or None if it is in the file
    start: int              # where in the file


class Spool:
    """Pending states by oid: the newest for each. Memory for the states is bounded, not for the list of them.

    untransform: from a stored record to the pickle in it, as ZODB's storage wrappers define it.
    digest: whether md5s are wanted.
    """

    def __init__(self, untransform: Callable[[bytes], bytes], digest: bool):
        self._untransform, self._digest = untransform, digest
        self._pending: dict[int, Pending] = {}
        self._held = 0
        self._file: IO[bytes] | None = None
        self._end = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def get(self, oid: int) -> Pending | None:
        return self._pending.get(oid)

    def put(self, oid: int, base: int, state: bytes | None, *, restored: bool = False,
            data_tid: int | None = None) -> None:
        """Add a state. A second one for an oid replaces the first and keeps the base that was given first."""
        earlier = self._pending.get(oid)
        if earlier is not None:
            base = earlier.base
            self._held -= len(earlier.held or b'')
        if state is None:
            self._pending[oid] = Pending(oid, base, restored, None, None, b'', data_tid, None, 0)
            return
        size = len(state)
        digest = md5(state, usedforsecurity=False).hexdigest() if self._digest else None
        refs = references(self._untransform(state))
        if self._held + size <= IN_MEMORY:
            self._held += size
            self._pending[oid] = Pending(oid, base, restored, size, digest, refs, data_tid, state, 0)
        else:
            self._pending[oid] = Pending(oid, base, restored, size, digest, refs, data_tid, None, self._write(state))

    def state(self, pending: Pending) -> bytes | None:
        if pending.size is None or pending.held is not None:
            return pending.held
        self._file.seek(pending.start)
        return self._file.read(pending.size)

    def batches(self, limit: int) -> Iterator[list[tuple[Pending, bytes | None]]]:
        """Yield everything in oid order, in lists of about `limit` bytes: locks and rows are taken in that order."""
        batch: list[tuple[Pending, bytes | None]] = []
        size = 0
        for oid in sorted(self._pending):
            pending = self._pending[oid]
            batch.append((pending, self.state(pending)))
            size += (pending.size or 0) + 200
            if size >= limit:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, state: bytes) -> int:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix='relstore-')     # noqa: SIM115 (closed by close())
        start, self._end = self._end, self._end + len(state)
        self._file.seek(start)
        self._file.write(state)
        return start
