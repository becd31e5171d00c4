"""Views of a source: up to a time, and without its history, for a copy that will have none."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from persistent.TimeStamp import TimeStamp
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64
from zope.interface import directlyProvides, providedBy

from relstore.errors import StorageError


class Until:
    """A storage up to a tid: what comes later its iterator leaves out.

    Some iterators just end where their storage is damaged. So if there is a transaction of this tid, it has to be the
    last one, else the iterator raises StorageError.
    """

    def __init__(self, source: Any, at: bytes):
        self._source, self._at = source, at
        directlyProvides(self, providedBy(source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        to_end = stop is None or stop >= self._at
        transactions = self._told(start, self._at if to_end else stop)
        newest = None
        try:
            for transaction in transactions:
                newest = transaction.tid
                yield transaction
        finally:
            if hasattr(transactions, 'close'):
                transactions.close()
        if to_end and newest != self._at and (start is None or start <= self._at) and self._is_there():
            raise StorageError(f'The source ends in the middle: it told no transaction after '
                               f'{_named(newest)}, but has one of {_named(self._at)}. It seems to be damaged there.')

    def _told(self, start: bytes | None, stop: bytes | None) -> Iterator[Any]:
        return self._source.iterator(start, stop)

    def _is_there(self) -> bool:
        transactions = self._source.iterator(self._at, self._at)
        try:
            return any(transaction.tid == self._at for transaction in transactions)
        finally:
            if hasattr(transactions, 'close'):
                transactions.close()


class Current(Until):
    """What a storage has at a tid: its iterator has of each object the one revision that is current then.

    Transactions that have none are left out. Of an object that is gone by then only its end is told: a destination that
    was copied into before has to learn of it.
    """

    def __init__(self, source: Any, at: bytes):
        super().__init__(source, at)
        # A file knows where the last record of an object is, so that the others need not be read. Asked of the class:
        # what wraps a file would pass it on, and has records of its own.
        self._by_place = hasattr(type(source), 'current_iterator') and at >= source.lastTransaction()

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        transactions = super().iterator(start, stop)
        try:
            for transaction in transactions:
                records = (record for record in transaction if self._is_current(record))
                first = next(records, None)
                if first is not None:
                    yield _Part(transaction, chain([first], records))
        finally:
            if hasattr(transactions, 'close'):
                transactions.close()

    def supportsUndo(self) -> bool:
        """What is current in it now may be so no more later, and then it is gone from it."""
        return False

    def _told(self, start: bytes | None, stop: bytes | None) -> Iterator[Any]:
        return self._source.current_iterator(start, stop) if self._by_place else super()._told(start, stop)

    def _is_current(self, record: Any) -> bool:
        if self._by_place:
            return True
        try:
            found = self._source.loadBefore(record.oid, p64(u64(self._at) + 1))
        except POSKeyError:
            return record.data is None
        return found is None or found[1] == record.tid


def _named(tid: bytes | None) -> str:
    return 'its beginning' if tid is None else str(TimeStamp(tid))


class _Part:
    """A transaction with some of its records."""

    def __init__(self, transaction: Any, records: Iterator[Any]):
        self._transaction, self._records = transaction, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    def __iter__(self) -> Iterator[Any]:
        return self._records
