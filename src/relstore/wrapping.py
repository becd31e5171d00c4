"""Wrapping: an instance that wraps records itself, because its wrapper has no new_instance of its own.

A wrapper is a storage around this one that compresses or encrypts records, say; see IStorageWrapper.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ZODB.interfaces import IStorageTransactionMetaData, IStorageWrapper

from relstore.database import Database
from relstore.iterate import TransactionIterator

if TYPE_CHECKING:
    from relstore.storage import RelStore as Storage
else:
    Storage = object


class Wrapping(Storage):
    """Comes before the storage whose records are to be wrapped as they come in, and unwrapped as they go out.

    Below that, in the cache and in memcached too, they are what the database holds: an encrypted one is nowhere kept
    in clear.
    """

    def __init__(self, database: Database, wrapper: IStorageWrapper):
        super().__init__(database)
        self._wrapper = wrapper
        self._wrap: Callable[[bytes], bytes] = wrapper.transform_record_data
        self._unwrap: Callable[[bytes], bytes] = wrapper.untransform_record_data

    def registerDB(self, wrapper: IStorageWrapper) -> None:
        """Leave records to this wrapper: it has a new_instance of its own, which has wrapped the instance."""
        super().registerDB(wrapper)
        self._wrap = self._unwrap = lambda record: record

    def load(self, oid: bytes, version: str = '') -> tuple[bytes, bytes]:
        state, tid = super().load(oid)
        return self._unwrap(state), tid

    def loadBefore(self, oid: bytes, tid: bytes) -> tuple[bytes, bytes, bytes | None] | None:
        found = super().loadBefore(oid, tid)
        return found and (self._unwrap(found[0]), *found[1:])

    def loadSerial(self, oid: bytes, serial: bytes) -> bytes:
        return self._unwrap(super().loadSerial(oid, serial))

    def store(self, oid: bytes, serial: bytes | None, data: bytes, version: str,
              transaction: IStorageTransactionMetaData) -> None:
        super().store(oid, serial, self._wrap(data), version, transaction)

    def restore(self, oid: bytes, serial: bytes, data: bytes | None, version: str, prev_txn: bytes | None,
                transaction: IStorageTransactionMetaData) -> None:
        super().restore(oid, serial, data and self._wrap(data), version, prev_txn, transaction)

    def bulk(self, *arguments: object) -> None:
        """Records are wrapped one by one."""

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> TransactionIterator:
        transactions = super().iterator(start, stop)
        transactions.unwrap = self._unwrap
        return transactions

    def record_iternext(self, next: bytes | None = None) -> tuple[bytes, bytes, bytes, bytes | None]:
        oid, tid, state, following = super().record_iternext(next)
        return oid, tid, self._unwrap(state), following
