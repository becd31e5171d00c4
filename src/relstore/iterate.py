"""Walk through a storage: transaction by transaction, or object by object. In pages, never all at once."""
from collections.abc import Callable, Iterator

from ZODB.BaseStorage import DataRecord, TransactionRecord
from ZODB.POSException import StorageError
from ZODB.utils import p64, u64

from relstore.adapters.base import MAX_TID
from relstore.database import Database

TRANSACTIONS = 500      # rows a page
RECORDS = 100


class TransactionIterator:
    """The transactions with start <= tid <= stop as the database holds them now; see IStorageIteration.

    Its transactions can be iterated over as often as one likes, itself once.
    unwrap: what makes of a stored record the one that its records are to have, or None.
    """
    unwrap: Callable[[bytes], bytes] | None = None

    def __init__(self, database: Database, start: int = 0, stop: int = MAX_TID):
        self._database = database
        newest = database.pool.attempt(database.adapter.last_tid)
        self._transactions = self._pages(start, min(stop, newest))
        self._closed = False

    def __iter__(self):
        return self

    def __next__(self) -> 'Transaction':
        if self._closed:
            raise StorageError('The iterator is closed.')
        return next(self._transactions)

    def close(self) -> None:
        self._closed = True

    def _pages(self, start: int, stop: int) -> Iterator['Transaction']:
        adapter, pool = self._database.adapter, self._database.pool
        while True:
            rows = pool.attempt(lambda s: adapter.transactions(s, start, stop, TRANSACTIONS))
            for tid, packed, user, description, extension in rows:
                yield Transaction(self._database, tid, 'p' if packed else ' ', bytes(user or b''),
                                  bytes(description or b''), bytes(extension or b''), self.unwrap)
            if len(rows) < TRANSACTIONS:
                return
            start = rows[-1][0] + 1


class Transaction(TransactionRecord):
    """One transaction; iterating over it yields its records in oid order."""

    def __init__(self, database: Database, tid: int, status: str, user: bytes, description: bytes, extension: bytes,
                 unwrap: Callable[[bytes], bytes] | None = None):
        super().__init__(p64(tid), status, user, description, extension)
        self._database, self._unwrap = database, unwrap

    def __iter__(self) -> Iterator[DataRecord]:
        adapter, pool, tid = self._database.adapter, self._database.pool, u64(self.tid)
        after = -1
        while True:
            rows = pool.attempt(lambda s: adapter.records(s, tid, after, RECORDS))
            for oid, state, data_tid in rows:
                if state and self._unwrap is not None:
                    state = self._unwrap(state)
                yield DataRecord(p64(oid), self.tid, state, p64(data_tid) if data_tid else None)
            if len(rows) < RECORDS:
                return
            after = rows[-1][0]


def next_record(database: Database, start: int) -> tuple[int, int, bytes, int | None]:
    """Return (oid, tid, state, oid of the next object or None) of the first object from oid `start`.

    Raises ValueError if there is none.
    """
    rows = database.pool.attempt(lambda session: database.adapter.current_records(session, start, 2))
    if not rows:
        raise ValueError(f'There is no object from oid {start:#x} on.')
    [(oid, tid, state), *rest] = rows
    return oid, tid, state, rest[0][0] if rest else None
