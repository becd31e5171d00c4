"""Spool: what a transaction is going to store, until the database has it."""
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import md5

from relstore.references import references

# States stay in memory up to this many bytes, then go to a temporary file.
IN_MEMORY = 16 * 1024 * 1024


@dataclass(slots=True)
class Pending:
    """One object to be stored. The state itself is in the spool, at `start`."""
    oid: int
    base: int               # the tid the change was based on; 0: the object is new
    restored: bool          # copied from elsewhere: written whatever is there
    start: int
    size: int | None        # None: a deletion, or the undoing of a creation
    md5: str | None
    refs: bytes | None      # see references.py; None: unknown
    data_tid: int | None    # the earlier transaction whose state this one repeats, if it does


class Spool:
    """Pending states by oid: the newest for each, in bounded memory.

    untransform: from a stored record to the pickle in it, as ZODB's storage wrappers define it.
    """

    def __init__(self, untransform=lambda state: state):
        self._untransform = untransform
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)
        self._end = 0
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def get(self, oid: int) -> Pending | None:
        return self._pending.get(oid)

    @property
    def size(self) -> int:
        """Bytes written; at least as many as the pending states have."""
        return self._end

    def put(self, oid: int, base: int, state: bytes | None, *, restored: bool = False,
            data_tid: int | None = None) -> Pending:
        """Add a state. A second one for an oid replaces the first and keeps the base that was given first."""
        earlier = self._pending.get(oid)
        pending = Pending(oid, base if earlier is None else earlier.base, restored, self._end, None, None, b'', data_tid)
        if state is not None:
            self._file.seek(self._end)
            self._file.write(state)
            self._end += len(state)
            pending.size = len(state)
            pending.md5 = md5(state, usedforsecurity=False).hexdigest()
            pending.refs = references(self._untransform(state))
        self._pending[oid] = pending
        return pending

    def state(self, pending: Pending) -> bytes | None:
        if pending.size is None:
            return None
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
        self._file.close()
