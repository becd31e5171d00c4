"""Iterate: goes through a storage transaction by transaction, in pages, never all at once.

With history each page is read as it is now: revisions do not move. Without history all pages are read from one
snapshot; see walk.py.
"""
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ZODB.BaseStorage import DataRecord, TransactionRecord
from ZODB.POSException import StorageError
from ZODB.utils import p64, u64

from relstore.adapters.base import MAX_TID
from relstore.database import Database
from relstore.pages import Pages
from relstore.sessions.session import Row
from relstore.walk import Walks

TRANSACTIONS = 500      # per page
RECORDS = 100

# Calls its first argument with a session and the other arguments, and returns the result.
Read = Callable[..., Any]


def _over(work: Callable[..., Any], *arguments: Any) -> NoReturn:
    raise StorageError('The iterator is closed.')


class TransactionIterator:
    """The transactions with start <= tid <= stop, as the database holds them now; see IStorageIteration.

    It can be iterated over once, its transactions any number of times: without history also after it has come to its
    end, but not after its close().
    unwrap: converts stored records into those to return, or None.
    """
    unwrap: Callable[[bytes], bytes] | None = None

    def __init__(self, database: Database, walks: Walks, start: int = 0, stop: int = MAX_TID):
        self._pages = Pages(database.adapter)
        self._leave: Callable[[], Callable[[], None] | None] = lambda: None
        if database.adapter.keep_history:
            self._read: Read = database.pool.attempt
            stop = min(stop, self._read(database.adapter.last_tid))
        else:
            walk = walks.half(start, stop)
            self._read = walk.read
            self._leave = weakref.WeakMethod(walk.leave)
        self._start, self._stop = start, stop
        # The other half may still come: then it needs the snapshot.
        self._keeps = start > 0 and stop == MAX_TID
        self._page: Iterator[Row] = iter(())
        self._has_more, self._closed = True, False

    def __iter__(self) -> 'TransactionIterator':
        return self

    def __next__(self) -> 'Transaction':
        if self._closed:
            raise StorageError('The iterator is closed.')
        row = next(self._page, None)
        if row is None and self._has_more:
            row = self._turn()
        if row is None:
            if not self._keeps:
                self._read = _over      # the snapshot ends with the last transaction still referred to
            raise StopIteration
        tid, packed, user, description, extension = row
        return Transaction(self._pages, self._read, tid, 'p' if packed else ' ', bytes(user or b''),
                           bytes(description or b''), bytes(extension or b''), self.unwrap)

    def _turn(self) -> Row | None:
        """Read the next page; return its first row, if there is any."""
        rows = self._read(self._pages.transactions, self._start, self._stop, TRANSACTIONS)
        if rows:
            self._start = rows[-1][0] + 1
        self._page, self._has_more = iter(rows), len(rows) == TRANSACTIONS
        return next(self._page, None)

    def close(self) -> None:
        leave = None if self._closed else self._leave()
        self._closed, self._read = True, _over
        if leave is not None:
            leave()


class Transaction(TransactionRecord):
    """One transaction; iterating over it yields its records in oid order."""

    def __init__(self, pages: Pages, read: Read, tid: int, status: str, user: bytes, description: bytes,
                 extension: bytes, unwrap: Callable[[bytes], bytes] | None = None):
        super().__init__(p64(tid), status, user, description, extension)
        self._pages, self._read, self._unwrap = pages, read, unwrap

    def __iter__(self) -> Iterator[DataRecord]:
        tid, after = u64(self.tid), -1
        while True:
            rows = self._read(self._pages.records, tid, after, RECORDS)
            for oid, state, data_tid in rows:
                if state and self._unwrap is not None:
                    state = self._unwrap(state)
                yield DataRecord(p64(oid), self.tid, state, p64(data_tid) if data_tid else None)
            if len(rows) < RECORDS:
                return
            after = rows[-1][0]
