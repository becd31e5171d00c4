"""Conversion: one storage copied into another, and compared with it, whatever the two are."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from ZODB.interfaces import IStorageRestoreable
from ZODB.utils import u64

from relstore import copying
from relstore.converting.compare import Comparison
from relstore.converting.current import Current, Until
from relstore.converting.salvage import Tell
from relstore.errors import ConfigurationError
from relstore.storage import RelStore
from relstore.unreadable import Unreadable

NO_TID = bytes(8)

# Transactions of the first ranges that are compared apart; after so many ranges they are twice as large, and so on.
RANGE_TRANSACTIONS, RANGES_OF_A_SIZE, RANGE_DOUBLINGS = 16, 32, 6


@dataclass
class Copied:
    """What was copied; size is the bytes of records, without those of blobs. unreadable: of these records."""
    transactions: int = 0
    records: int = 0
    size: int = 0
    unreadable: Unreadable = field(default_factory=Unreadable)


class Conversion:
    """source, destination: open. inner, source_inner: the storages of relstore's in them, if there are any.

    at: the tid up to which is copied; '' stands for all.
    left_out: is told each blob that the source lacks, which then is no error.
    ConfigurationError: the source cannot be iterated over, or nothing can be restored into the destination.
    """

    def __init__(self, source: Any, destination: Any, inner: RelStore | None = None, at: bytes = b'',
                 left_out: Tell | None = None, source_inner: RelStore | None = None):
        if not hasattr(source, 'iterator'):
            raise ConfigurationError(f'{source.getName()} cannot tell its transactions, so it cannot be copied.')
        if not IStorageRestoreable.providedBy(destination):
            raise ConfigurationError(f'{destination.getName()} cannot be copied into: it takes no transactions of the '
                                     'past.')
        self._source, self.destination, self._inner, self._at = source, destination, inner, at
        self._left_out, self._source_inner = left_out, source_inner
        # Without history only what is current is wanted.
        self._keeps_history = bool(getattr(destination, 'supportsUndo', lambda: True)())
        self.copied = Copied()
        self._known = b''       # the newest that the destination has of the source

    @property
    def source(self) -> Any:
        """What is copied of the source, as it is now. ConfigurationError: it does not have any more what was then."""
        last = self._source.lastTransaction()
        if self._at and self._at < last and self._has_lost(self._at):
            raise ConfigurationError('The source keeps no history, or was packed, so it does not have what was there '
                                     'at this time.')
        if self._at and not getattr(self._source, 'rises', True):
            raise ConfigurationError('The times of the source do not rise, so what was there at one of them cannot be '
                                     'told.')
        if not _keeps_history(self._source):
            # What has changed after a tid that is asked for before would be missing: its iterator knows one state.
            return self._source
        at = min(self._at or last, last)
        return Until(self._source, at) if self._keeps_history else Current(self._source, at)

    @property
    def last_of_source(self) -> bytes:
        """The tid of the newest transaction of the source."""
        return bytes(self._source.lastTransaction())

    def size_left(self, relstore: RelStore | None) -> int:
        """Return about how many bytes of records the source has that the destination has not.

        relstore: the storage of relstore's in the source, if there is one. Of others only the size of all is known.
        """
        if relstore is None:
            return int(self._source.getSize())
        sql, last = relstore.database.adapter.sql, u64(self.destination.lastTransaction())
        [[size]] = relstore.database.pool.attempt(lambda session: session.all(sql.states_size, (last,)))
        return int(size)

    @property
    def has_something(self) -> bool:
        """Whether there is something to copy into an empty destination."""
        with copying.iterated(self.source) as transactions:
            return any(True for _ in transactions)

    def _has_lost(self, at: bytes) -> bool:
        """Whether of what was there at a tid something may be gone: a pack marks the transactions before its time."""
        if not _keeps_history(self._source):
            return True
        with copying.iterated(self._source, (u64(at) + 1).to_bytes(8, 'big')) as transactions:
            return any(transaction.status == 'p' for transaction in islice(transactions, 1))

    def copy(self, progress: copying.Progress | None = None) -> None:
        """Copy what the destination has not yet. It may be interrupted, and goes on the next time.

        progress: see copying.copy_transactions, as for the errors.
        """
        def advance(tid: bytes, records: int, size: int) -> None:
            copied = self.copied
            copied.transactions, copied.records, copied.size = (
                copied.transactions + 1, copied.records + records, copied.size + size)
            if progress is not None:
                progress(tid, records, size)

        source = self.source
        files = self._files(source)
        guarding = (nullcontext(copying.Unguarded()) if self._inner is None
                    else copying.guarded(self._inner.database.adapter))
        with guarding as guard:
            copying.copy_transactions(source, self.destination, guard, advance, files, self._known,
                                      self.copied.unreadable, self._inner)
        self._known = self.destination.lastTransaction()

    def _files(self, source: Any) -> copying.BlobFiles:
        plain = self._inner.database.untransform if self._inner is not None else bytes
        return copying.BlobFiles(source, self.destination, plain, strict=True, left_out=self._left_out)

    def look_again(self, last: bytes, advance: Callable[[int], None]) -> None:
        """Read what was copied before, up to a tid, so that what was left out then is told again.

        advance: called after each transaction with the bytes of its records.
        """
        source = self.source
        files = self._files(source)
        with copying.iterated(source, None, last) as transactions:
            for transaction in transactions:
                size = 0
                for record in transaction:
                    files.look(record)
                    size += len(record.data or b'')
                advance(size)

    def to_copy(self) -> Iterator[Any]:
        """Yield the transactions that copy() would begin with, if nothing else is in the destination."""
        last = self.destination.lastTransaction()
        yield from self.source.iterator((u64(last) + 1).to_bytes(8, 'big') if u64(last) else None)

    def comparison(self) -> Comparison:
        """Return a comparison of all that was copied, or where nothing was copied now, of all that is in the source."""
        source, last = self._compared
        return Comparison(source, Until(self.destination, last), self._keeps_history, self._left_out,
                          self._source_inner, self._inner, partial(self._is_newer, last))

    def _is_newer(self, tid: bytes, oid: bytes) -> bool:
        """Whether a copy that has no history has a newer revision of an object than a tid, be it its end.

        It is asked for what a snapshot does not have any more, so what is there now is not older than that.
        """
        if self._keeps_history or self._inner is None:
            return False
        found = self._inner.database.pool.attempt(self._inner.database.adapter.current_tid, u64(oid))
        return found is not None and found > u64(tid)

    @property
    def _compared(self) -> tuple[Any, bytes]:
        """What is compared of the source, and up to which tid.

        What is committed to the source after it was copied, or to a copy that is in use already, is no difference.
        """
        last = self._at or self._known or self.last_of_source
        source = self.source
        if _keeps_history(self._source):
            source = (Until if self._keeps_history else Current)(self._source, min(last, self.last_of_source))
        return source, last

    @property
    def newer_ones(self) -> int:
        """How many transactions the copy has that are newer than all of the source: they are not compared."""
        last = self._at or max(self._known, self.last_of_source)
        with copying.iterated(self.destination, (u64(last) + 1).to_bytes(8, 'big')) as transactions:
            return sum(1 for _ in transactions)

    def leave_out(self, what: str) -> None:
        """Tell what another process has found to be damaged."""
        if self._left_out is not None:
            self._left_out(what)

    def ranges(self) -> Iterator[tuple[bytes | None, bytes]]:
        """Yield (start, stop): ranges of tids that can be compared one by one, and hold all of the source.

        They have few transactions at first, so that a small source is shared, too.
        """
        source, last = self._compared
        start, count, size, tid = None, 0, 0, last
        with copying.iterated(source) as transactions:
            for transaction in transactions:
                if size == RANGE_TRANSACTIONS << min(count // RANGES_OF_A_SIZE, RANGE_DOUBLINGS):
                    yield start, tid
                    start, count, size = (u64(tid) + 1).to_bytes(8, 'big'), count + 1, 0
                size, tid = size + 1, transaction.tid
        yield start, last

    @property
    def is_divisible(self) -> bool:
        """Whether ranges can be compared apart: what is in them stays, and each can be found without those before."""
        return _keeps_history(self._source) and getattr(self._source, 'rises', True)


def _keeps_history(storage: Any) -> bool:
    return bool(getattr(storage, 'supportsUndo', lambda: False)())
