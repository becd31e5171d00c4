"""Salvage: a damaged Data.fs, of which everything is read that can be, and each piece that cannot is named.

A piece is skipped up to the next place where something can be read. A record is known by the position of its
transaction, which it carries; a transaction by its length, which it begins and ends with, and by its first record. A
copy of another Data.fs that somebody has stored in this one is not taken for a part of it: its positions are others.

Nothing of ZODB's own FileStorage is used, which finds its objects by reading the file up to the damage.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from BTrees.LLBTree import LLBTree
from ZODB.BaseStorage import DataRecord
from ZODB.FileStorage.format import TxnHeader
from ZODB.POSException import POSKeyError
from ZODB.utils import oid_repr, p64, u64

from relstore.converting.filestorage import MAGIC, BlobsBeside
from relstore.converting.transactions import (
    BEGIN,
    LENGTH_BYTES,
    UNREADABLE,
    FileTransactions,
    between,
    risen,
)
from relstore.errors import ConfigurationError
from relstore.references import references

PIECE_BYTES = 1 << 20
TLOC_AT = 24        # where a record has the position of its transaction
# What may be the header of a transaction: a tid, a length below 2^48, a status. The matches may overlap.
_TRANSACTION = re.compile(rb'(?s)(?=.{8}\0\0.{6}[ up])')
HEADER_BYTES = 17      # of that

# Told what is left out, in a sentence.
Tell = Callable[[str], None]


class SalvagedFileStorage(BlobsBeside):
    """A FileStorage as a source of a copy. What cannot be read in it is left out, and told.

    ConfigurationError: it is no FileStorage, or nothing in it can be read.
    """

    def __init__(self, path: str, blobs: str, tell: Tell) -> None:
        super().__init__(blobs)
        self._path, self._tell = path, tell
        self._file = open(path, 'rb')       # noqa: SIM115
        self._end = os.fstat(self._file.fileno()).st_size
        self._newest: tuple[bytes, LLBTree[int, int]] = b'', LLBTree()
        self._last = bytes(8)
        try:
            if self._file.read(BEGIN) not in MAGIC:
                raise ConfigurationError(f'{path} does not begin as a FileStorage does.')
            for transaction in self.iterator():
                self._last = risen(transaction.tid, self._last)
            if not u64(self._last):
                raise ConfigurationError(f'{path} has no transaction that can be read.')
        except BaseException:
            self.close()
            raise

    rises = False       # as far as known

    def getName(self) -> str:
        return self._path

    def getSize(self) -> int:
        return self._end

    def supportsUndo(self) -> bool:
        return True

    def lastTransaction(self) -> bytes:
        return self._last

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        return between(_Salvaged(self._path, self._file.fileno(), self._end, self._tell), start, stop)

    def loadBefore(self, oid: bytes, tid: bytes) -> tuple[bytes, bytes, None]:
        """Return (data, serial, None) of the last readable revision before a tid. POSKeyError: there is none."""
        before, newest = self._newest
        if before != tid:
            _, newest = self._newest = tid, self._index(tid)
        position = newest.get(u64(oid))
        if position is None:
            raise POSKeyError(oid)
        record = self._transactions().record_at(position)
        if record.data is None:
            raise POSKeyError(oid)
        return record.data, record.tid, None

    def _index(self, before: bytes) -> LLBTree[int, int]:
        positions: LLBTree[int, int] = LLBTree()
        for transaction in self.iterator(None, p64(u64(before) - 1)):
            for position, record in transaction.positioned():
                positions[u64(record.oid)] = position
        return positions

    def _transactions(self) -> _Salvaged:
        return _Salvaged(self._path, self._file.fileno(), self._end, self._tell)

    def close(self) -> None:
        self._file.close()


class _Salvaged(FileTransactions):

    def __init__(self, path: str, descriptor: int, end: int, tell: Tell) -> None:
        super().__init__(path, descriptor, end)
        self._tell = tell

    def _header(self, pos: int) -> TxnHeader:
        try:
            return super()._header(pos)
        except UNREADABLE:
            # Perhaps just its second length is wrong: then another transaction begins where it says that it ends.
            header = self._read_txn_header(pos)
            behind = pos + header.tlen + LENGTH_BYTES
            if header.status not in ' up' or not self._is_record(pos + header.headerlen(), pos, pos + header.tlen) or (
                    behind != self._end and not self._is_transaction(behind)):
                raise
            return header

    def _record(self, pos: int, begin: int, end: int) -> tuple[DataRecord | None, int]:
        record, behind = super()._record(pos, begin, end)
        # Where no record follows, it may be that one that is damaged, or the length of this one.
        if record is not None and behind < end and not self._is_record(behind, begin, end) and (
                references(record.data) is None):
            raise ValueError('its length is wrong, or its data')
        return record, behind

    def _past_transaction(self, pos: int, error: Exception) -> int:
        behind = next(self._found(_TRANSACTION, HEADER_BYTES, pos + 1, self._end, self._is_transaction), self._end)
        if behind < self._end or self._read(pos + HEADER_BYTES - 1, 1) != b'c':     # else its site is writing it
            self._left_out(pos, behind, f'no transaction can be read: {error}')
        return behind

    def _past_record(self, pos: int, begin: int, end: int, error: Exception) -> int:
        mark = re.compile(b'(?s)(?=.{%d}%s)' % (TLOC_AT, re.escape(p64(begin))))
        found = self._found(mark, TLOC_AT + 8, pos + 1, end, lambda at: self._is_record(at, begin, end))
        behind = next(found, end)
        what = 'no record can'
        if self._is_record(pos, begin, end):
            what = f'the record of object {oid_repr(self._read(pos, 8))} cannot'
        self._left_out(pos, behind, f'{what} be read: {error}')
        return behind

    def _left_out(self, pos: int, behind: int, why: str) -> None:
        self._tell(f'{self._path}: {behind - pos:,} bytes from byte {pos} on. There {why}.')

    def record_at(self, pos: int) -> Any:
        """Return the record at a position at which one was read before."""
        record, _ = super()._record(pos, self._read_data_header(pos).tloc, self._end)
        return record

    def _is_transaction(self, pos: int) -> bool:
        try:
            header = super()._header(pos)
        except UNREADABLE:
            return False
        end = pos + header.tlen
        return header.tlen == header.headerlen() or self._is_record(pos + header.headerlen(), pos, end)

    def _is_record(self, pos: int, begin: int, end: int) -> bool:
        try:
            header = self._read_data_header(pos)
        except UNREADABLE:
            return False
        return header.tloc == begin and pos + header.recordlen() <= end

    def _found(self, pattern: re.Pattern[bytes], width: int, start: int, end: int,
               is_right: Callable[[int], bool]) -> Iterator[int]:
        """Yield where a pattern of so many bytes is found, and what stands there is right."""
        while start < end:
            piece = self._read(start, min(PIECE_BYTES, end - start))
            yield from filter(is_right, (start + match.start() for match in pattern.finditer(piece)))
            if len(piece) < PIECE_BYTES:
                break
            start += len(piece) - width

    def _read(self, pos: int, count: int) -> bytes:
        self._file.seek(pos)
        return bytes(self._file.read(count))
