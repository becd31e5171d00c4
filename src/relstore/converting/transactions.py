"""The transactions of a Data.fs, read strictly: each byte belongs to one, or it is told where none can be read.

ZODB's own iterator ends where it meets what it does not understand, as if that were the end of the file. Nor does it
find its way into a file to which a site is just writing. What could interleave:

* A site writes a transaction: until that is complete its status is `c`. It is no part of the file yet, as it is none
  where the site was killed meanwhile.
* A transaction is completed, or taken back, after the file was opened: only what was complete then is read.
* A pack puts another file in the place of this one: what is open is still the old one.

Where tids do not rise, each transaction has to be told as of a moment after the one before it, and that depends on all
before it: see `risen`.
"""
from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from persistent.TimeStamp import TimeStamp
from ZODB.BaseStorage import DataRecord, TransactionRecord
from ZODB.FileStorage.format import (
    DATA_HDR,
    DATA_HDR_LEN,
    TRANS_HDR_LEN,
    CorruptedError,
    FileStorageFormatter,
    TxnHeader,
    TxnHeaderFromString,
)
from ZODB.utils import oid_repr, u64

from relstore.errors import StorageError
from relstore.readers import Place

BEGIN = 4       # behind the magic bytes
LENGTH_BYTES = 8        # a transaction is followed by its length
BUFFER_BYTES = 1 << 16
LAST_TID = b'\x7f' + b'\xff' * 6 + b'\0'      # of a time that is still some thousand years away
LONGEST_BYTES = 1 << 48         # of a transaction that is being written
_unpacked = struct.Struct(DATA_HDR).unpack
UNREADABLE = CorruptedError, ValueError, struct.error, AssertionError       # what the format's functions raise


class Positioned(io.RawIOBase):
    """A file by its descriptor, with a position of its own; closing it leaves that open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position = descriptor, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [buffer], self._position)
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._descriptor).st_size}
        self._position = base[whence] + offset
        return self._position


class FileTransactions(FileStorageFormatter):
    """Those from `start` to `end`, positions in an open file, and up to the first one later than `stop`.

    An iterator; it and its transactions raise StorageError where the file is damaged.
    wanted: whether a record, of an object and at a position, is told at all. None: all are.
    """

    def __init__(self, path: str, descriptor: int, end: int, start: int = BEGIN, stop: bytes | None = None,
                 wanted: Callable[[bytes, int], bool] | None = None) -> None:
        self._path, self._end, self._pos, self._stop, self._wanted = path, end, start, stop, wanted
        self._file = io.BufferedReader(Positioned(descriptor), BUFFER_BYTES)
        status = os.fstat(descriptor)
        self._known = path, status.st_dev, status.st_ino, end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._pos < self._end:
            try:
                header = self._header(self._pos)
            except UNREADABLE as error:
                self._pos = self._past_transaction(self._pos, error)
                continue
            if self._stop is not None and header.tid > self._stop:
                break
            begin, self._pos = self._pos, self._pos + header.tlen + LENGTH_BYTES
            if header.status != 'u':        # undone by a ZODB of long ago, which kept it for none to see
                return _Transaction(self, begin, header)
        raise StopIteration

    def close(self) -> None:
        self._file.close()

    def header(self, pos: int) -> TxnHeader:
        """Return the header of the transaction at a position. StorageError: there is none."""
        try:
            return self._header(pos)
        except UNREADABLE as error:
            raise self._damaged(pos, f'no transaction can be read there: {error}') from error

    def _header(self, pos: int) -> TxnHeader:
        header = self._read_txn_header(pos)
        behind = pos + header.tlen
        if (header.status not in ' up' or header.tlen < header.headerlen() or behind + LENGTH_BYTES > self._end
                or self._read_num(behind) != header.tlen):
            raise ValueError('its header makes no sense, or does not fit its length')
        if header.tid > LAST_TID:
            raise ValueError('its tid makes no sense')
        return header

    def first_from(self, tid: bytes) -> int:
        """Return the position of the first transaction, from here on, that is not before a tid, where tids rise."""
        pos = self._pos
        while pos < self._end:
            header = self.header(pos)
            if header.tid >= tid:
                break
            pos += header.tlen + LENGTH_BYTES
        return pos

    def tid_before(self, pos: int) -> bytes:
        """Return the tid of the last transaction before a position, b'' if none ends there."""
        before = pos - LENGTH_BYTES - self._read_num(pos - LENGTH_BYTES) if pos > BEGIN else 0
        try:
            return bytes(self.header(before).tid) if before >= BEGIN else b''
        except StorageError:
            return b''

    def place(self, begin: int, header: TxnHeader) -> Place | None:
        """Return where another process reads a transaction; None: some of its records are not wanted."""
        if self._wanted is not None:
            return None
        return Place(_transactions_of, self._known, begin, begin + header.tlen + LENGTH_BYTES, self._end - begin)

    def records(self, begin: int, header: TxnHeader) -> Iterator[tuple[int, DataRecord]]:
        """Yield the records of a transaction, each with its position. StorageError: one cannot be read."""
        pos, end = begin + header.headerlen(), begin + header.tlen
        while pos < end:
            try:
                record, behind = self._record(pos, begin, end)
            except UNREADABLE as error:
                pos = self._past_record(pos, begin, end, error)
                continue
            if record is not None:
                yield pos, record
            pos = behind

    def _record(self, pos: int, begin: int, end: int) -> tuple[DataRecord | None, int]:
        """Return a record, None if it is not wanted, and the position behind it. begin, end: of its transaction."""
        # What _read_data_header does, in a third of the time: it is done for each record of a site.
        read = self._file.read
        self._file.seek(pos)
        oid, tid, _, tloc, version, size = _unpacked(read(DATA_HDR_LEN))
        back = 0 if size else u64(read(LENGTH_BYTES))
        behind = pos + DATA_HDR_LEN + (size or LENGTH_BYTES)
        if version or tloc != begin or behind > end:
            raise ValueError('it is not of its transaction, or longer than that')
        if self._wanted is not None and not self._wanted(oid, pos):
            return None, behind
        data, data_tid = read(size) if size else None, None
        if back:
            data, data_tid = self._at(oid, back, pos)
        return DataRecord(oid, tid, data, data_tid), behind

    def _past_transaction(self, pos: int, error: Exception) -> int:
        """Return where to go on after what cannot be read. Here that is nowhere."""
        raise self._damaged(pos, f'no transaction can be read there: {error}') from error

    def _past_record(self, pos: int, begin: int, end: int, error: Exception) -> int:
        """Likewise, within the transaction from `begin` to `end`."""
        raise self._damaged(pos, f'no record can be read there: {error}') from error

    def _at(self, oid: bytes, back: int, before: int) -> tuple[bytes | None, bytes]:
        """Return the data that an earlier record of an object has, and the tid of that record."""
        tid = b''
        while True:
            found = self._read_data_header(back) if back < before else None
            if found is None or found.oid != oid or back + found.recordlen() > before:
                raise ValueError(f'its object {oid_repr(oid)} has no record at byte {back}, where it refers to')
            tid = tid or found.tid
            if not found.back:
                return self._file.read(found.plen) if found.plen else None, tid
            back, before = found.back, back

    def _damaged(self, pos: int, what: str) -> StorageError:
        return damaged(self._path, pos, what)


class _Transaction(TransactionRecord):

    def __init__(self, transactions: FileTransactions, begin: int, header: TxnHeader) -> None:
        super().__init__(header.tid, header.status, header.user, header.descr, header.ext)
        self._transactions, self._begin, self._header = transactions, begin, header
        self.place = transactions.place(begin, header)

    def __iter__(self) -> Iterator[DataRecord]:
        return (record for _, record in self.positioned())

    @property
    def position(self) -> int:
        """Where in the file it begins."""
        return self._begin

    def positioned(self) -> Iterator[tuple[int, DataRecord]]:
        """Yield the records, each with its position in the file."""
        return self._transactions.records(self._begin, self._header)


def risen(tid: bytes, previous: bytes) -> bytes:
    """Return a tid, or if that is not after the previous one, a tid of just after that."""
    return tid if tid > previous else bytes(TimeStamp(tid).laterThan(TimeStamp(previous)).raw())


def between(transactions: Iterator[Any], start: bytes | None, stop: bytes | None) -> Iterator[Any]:
    """Yield those of all transactions of a file that are from `start` to `stop`, with tids that rise."""
    previous = bytes(8)
    for transaction in transactions:
        transaction.tid = previous = risen(transaction.tid, previous)
        if stop is not None and previous > stop:
            break
        if start is None or previous >= start:
            yield transaction


def _transactions_of(known: tuple[str, int, int, int], begin: int, end: int) -> Iterator[Any]:
    """Yield the transactions from one position up to another; none if there is another file by now."""
    path, device, inode, file_end = known
    with open(path, 'rb') as file:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != (device, inode):
            return
        for transaction in FileTransactions(path, file.fileno(), file_end, begin):
            if transaction.place.begin >= end:
                break
            yield transaction


def check_end(path: str, descriptor: int, end: int) -> None:
    """See that behind the end that was found is at most what a site is writing. StorageError: the file is damaged."""
    data = os.pread(descriptor, TRANS_HDR_LEN, end)
    if not data:
        return
    try:
        header = TxnHeaderFromString(data)
        if is_being_written(header, os.fstat(descriptor).st_size - end):
            return
        length = header.tlen + LENGTH_BYTES
        if header.status not in ' up' or header.tlen < header.headerlen():
            raise ValueError('its header makes no sense')
        # A site writes its status at last, so the size is looked at after that.
        left = os.fstat(descriptor).st_size - end
        if left < length:
            raise ValueError(f'it has {length} bytes, of which only {left} are left')
    except UNREADABLE as error:
        raise damaged(path, end, f'a transaction cannot be read there: {error}') from error


def is_being_written(header: TxnHeader, left: int) -> bool:
    """Whether a site may be writing a transaction, at the end of the file. left: the bytes from there on."""
    return (header.status == 'c' and header.headerlen() <= header.tlen < LONGEST_BYTES
            and left <= header.tlen + LENGTH_BYTES)


def damaged(path: str, pos: int, what: str) -> StorageError:
    return StorageError(f'{path} is damaged at byte {pos}: {what}. With --skip-damaged all else is copied, and each '
                        'piece that is left out is named.')
