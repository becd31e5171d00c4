"""Salvage: a damaged Data.fs, of which everything is read that can be, and each piece that cannot is named.

A piece is skipped up to the next place where something can be read. A record is known by the position of its
transaction, which it carries; a transaction by its length, which it begins and ends with, and by its first record. A
copy of another Data.fs that somebody has stored in this one is not taken for a part of it: its positions are others.

Nothing of ZODB's own FileStorage is used, which finds its objects by reading the file up to the damage.
"""
from __future__ import annotations

import io
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from BTrees.LLBTree import LLBTree
from ZODB.BaseStorage import DataRecord
from ZODB.FileStorage.format import TRANS_HDR_LEN, TxnHeader, TxnHeaderFromString
from ZODB.POSException import POSKeyError, ReadOnlyError
from ZODB.utils import oid_repr, p64, u64
from zodbpickle.pickle import Unpickler

from relstore.converting.filestorage import MAGIC, BlobsBeside, warn_of_risen
from relstore.converting.transactions import (
    BEGIN,
    LENGTH_BYTES,
    UNREADABLE,
    FileTransactions,
    between,
    is_being_written,
    risen,
)
from relstore.errors import ConfigurationError

PIECE_BYTES = 1 << 20
TLOC_AT = 24        # where a record has the position of its transaction
LAST_OID = b'\x7f' + b'\xff' * 7
COMPRESSED = b'.z'      # how zlibstorage's records begin
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
        self._unwrap: Callable[[bytes], bytes] = bytes
        self.rises = True       # whether the tids do
        self._lock = threading.RLock()      # what wraps a storage may take it
        try:
            if self._file.read(BEGIN) not in MAGIC:
                raise ConfigurationError(f'{path} does not begin as a FileStorage does.')
            count = 0
            for transaction in self._transactions():
                count += transaction.tid <= self._last
                self._last = risen(transaction.tid, self._last)
            self.rises = not count
            if count:
                warn_of_risen(path, count)
            if not u64(self._last):
                raise ConfigurationError(f'{path} has no transaction that can be read.')
        except BaseException:
            self.close()
            raise

    def getName(self) -> str:
        return self._path

    def getSize(self) -> int:
        return self._end

    def supportsUndo(self) -> bool:
        return True

    def isReadOnly(self) -> bool:
        return True

    def registerDB(self, db: Any) -> None:
        """Learn how what is around this storage unwraps records. What it cannot unwrap is left out."""
        self._unwrap = db.untransform_record_data

    # What a DemoStorage takes from its changes.

    def sortKey(self) -> str:
        return self._path

    def tpc_transaction(self) -> None:
        return None

    def undo(self, *arguments: object) -> None:
        """As any way to write, and to find out what could be undone."""
        raise ReadOnlyError

    undoLog = undoInfo = undo

    def lastTransaction(self) -> bytes:
        return self._last

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        return between(self._transactions(), start, stop)

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
        return _Salvaged(self._path, self._file.fileno(), self._end, self._tell, self._unwrap)

    def close(self) -> None:
        self._file.close()


def _ends_right(data: bytes) -> bool | None:
    """Whether a record ends where its two pickles do, or zlibstorage's compressed data; None: it is neither."""
    if data[:2] == COMPRESSED:
        inner = zlib.decompressobj()
        try:
            inner.decompress(data[2:])
        except zlib.error:
            return None
        return inner.eof and not inner.unused_data
    file = io.BytesIO(data)
    try:
        unpickler = Unpickler(file, encoding='bytes')
        unpickler.persistent_load = id
        unpickler.noload()
        unpickler.noload()
    except Exception:       # as in references.py: damage shows as anything
        return None
    return file.tell() == len(data)


def _tloc(begin: int) -> re.Pattern[bytes]:
    """Return a pattern for records of the transaction at a position."""
    return re.compile(b'(?s)(?=.{%d}%s)' % (TLOC_AT, re.escape(p64(begin))))


class _Salvaged(FileTransactions):

    def __init__(self, path: str, descriptor: int, end: int, tell: Tell, unwrap: Callable[[bytes], bytes]) -> None:
        super().__init__(path, descriptor, end)
        self._tell, self._unwrap = tell, unwrap

    def place(self, begin: int, header: TxnHeader) -> None:
        """No other process reads it, for that would not look for damage as this one does."""

    def _header(self, pos: int) -> TxnHeader:
        """Return a header that is right, or of which the second length, or what follows, is damaged."""
        try:
            header = super()._header(pos)
            if self._has_own(pos, header):
                return header
            raise ValueError('none of its records can be read as one of its own')
        except UNREADABLE:
            header = self._read_txn_header(pos)
            first = pos + header.headerlen()
            if header.status not in ' up' or not self._is_record(first, pos, sys.maxsize) or (
                    self._read_data_header(first).tid != header.tid):
                raise
        # It ends where it says, or before that, where another one begins, or with the file.
        behind = pos + header.tlen + LENGTH_BYTES
        if behind != self._end and not (behind < self._end and self._is_transaction(behind)):
            header.tlen = self._next_transaction(pos + 1) - LENGTH_BYTES - pos
        self._record(first, pos, pos + header.tlen)     # else there is nothing in it
        return header

    def _has_own(self, pos: int, header: TxnHeader) -> bool:
        """Whether a transaction has something that says to be its record, or none at all."""
        start, end = pos + header.headerlen(), pos + header.tlen
        return start == end or self._read(start + TLOC_AT, 8) == p64(pos) or (
            next(self._found(_tloc(pos), TLOC_AT + 8, start, end, lambda at: True), None) is not None)

    def _next_transaction(self, start: int) -> int:
        return next(self._found(_TRANSACTION, HEADER_BYTES, start, self._end, self._is_transaction), self._end)

    def _own_records(self, start: int, begin: int, end: int) -> Iterator[int]:
        """Yield where records of the transaction at `begin` may begin."""
        return self._found(_tloc(begin), TLOC_AT + 8, start, end, lambda at: self._is_record(at, begin, end))

    def _record(self, pos: int, begin: int, end: int) -> tuple[DataRecord | None, int]:
        record, behind = super()._record(pos, begin, end)
        if record is not None and record.oid > LAST_OID:
            raise ValueError('its oid makes no sense')
        if record is None or not record.data:
            return record, behind
        right = _ends_right(record.data)
        if right is False:
            raise ValueError('its data does not end where it says')
        # Of data that is no pickle nobody knows where it ends. Where no record follows, the length may be wrong.
        if right is None and behind < end and not self._is_record(behind, begin, end):
            raise ValueError('its length is wrong, or its data')
        try:
            self._unwrap(record.data)
        except Exception as error:      # whatever a wrapper raises
            raise ValueError(f'its data cannot be unwrapped: {error}') from error
        return record, behind

    def _past_transaction(self, pos: int, error: Exception) -> int:
        behind = self._next_transaction(pos + 1)
        if behind < self._end or not self._is_being_written(pos):
            self._left_out(pos, behind, f'No transaction can be read there: {error}')
        return behind

    def _is_being_written(self, pos: int) -> bool:
        try:
            return is_being_written(TxnHeaderFromString(self._read(pos, TRANS_HDR_LEN)), self._end - pos)
        except UNREADABLE:
            return False

    def _past_record(self, pos: int, begin: int, end: int, error: Exception) -> int:
        behind = next(self._own_records(pos + 1, begin, end), end)
        what = 'No record can'
        if self._is_record(pos, begin, end):
            what = f'The record of object {oid_repr(self._read(pos, 8))} cannot'
        self._left_out(pos, behind, f'{what} be read there: {error}')
        return behind

    def _left_out(self, pos: int, behind: int, why: str) -> None:
        self._tell(f'{self._path}: {behind - pos:,} bytes from byte {pos} on. {why}.')

    def record_at(self, pos: int) -> Any:
        """Return the record at a position at which one was read before."""
        record, _ = super()._record(pos, self._read_data_header(pos).tloc, self._end)
        return record

    def _is_transaction(self, pos: int) -> bool:
        try:
            header = super()._header(pos)
        except UNREADABLE:
            return False
        return self._has_own(pos, header)

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
