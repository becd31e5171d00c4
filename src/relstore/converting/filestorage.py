"""LiveFileStorage: a Data.fs that is only read, while its site may go on writing."""
from __future__ import annotations

import logging
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

from ZODB.blob import FilesystemHelper
from ZODB.FileStorage import FileStorage
from ZODB.FileStorage.FileStorage import FileStorageError
from ZODB.FileStorage.format import CorruptedError
from ZODB.interfaces import IBlobStorage
from ZODB.POSException import POSKeyError
from ZODB.utils import z64
from zope.interface import alsoProvides

from relstore.converting.transactions import BEGIN, FileTransactions, between, check_end, risen
from relstore.errors import ConfigurationError

MAGIC = b'FS21', b'FS30'        # the first bytes of a file
NO_TID = bytes(8)
UNREADABLE_FILE = ('{} cannot be read as a FileStorage: {}. With --skip-damaged everything is copied that can be read.')

# Of so many transactions one is remembered, so that any other is found without reading the file from its end.
MARK_EVERY = 100

log = logging.getLogger('relstore')

class _Scan(NamedTuple):
    """What is known of the tids of a file up to a position: the last one, as it is read and as it is told.

    risen_ones: how many are not after the one before. marks: (tid, position) of some transactions, in order.
    """
    position: int = BEGIN
    last: bytes = NO_TID
    risen: bytes = NO_TID
    risen_ones: int = 0
    marks: tuple[tuple[bytes, int], ...] = ()


# Of files by device and inode.
_scans: dict[tuple[int, int], _Scan] = {}


class BlobsBeside:
    """The data of blobs in a directory of ZODB's, which is only read.

    directory: '' if there is none. ConfigurationError: it is not there, or cannot be read.
    """

    def __init__(self, directory: str) -> None:
        if directory and not (os.path.isdir(directory) and os.access(directory, os.R_OK | os.X_OK)):
            raise ConfigurationError(f'{directory} is not a readable directory of blobs.')
        self._blob_files = FilesystemHelper(directory) if directory else None
        if directory:
            alsoProvides(self, IBlobStorage)

    def openCommittedBlobFile(self, oid: bytes, serial: bytes, blob: object = None) -> IO[bytes]:
        """Return the file of a blob, open for reading. POSKeyError: there is none."""
        if self._blob_files is not None:
            with suppress(FileNotFoundError):
                return open(self._blob_files.getBlobFilename(oid, serial), 'rb')
        raise POSKeyError(oid, serial)


class LiveFileStorage(BlobsBeside, FileStorage):
    """A FileStorage as it is when it is opened. Nothing is written, neither to it nor beside it.

    blobs: the directory of its blobs; '': it is opened without.
    StorageError: the file is damaged. ConfigurationError: it is none of a FileStorage, or nothing was ever stored in
    it; the directory of the blobs is not there, or cannot be read.
    """

    def __init__(self, path: str, blobs: str = '') -> None:
        BlobsBeside.__init__(self, blobs)
        with readable(path):
            FileStorage.__init__(self, path, read_only=True)
        try:
            check_end(path, self._file.fileno(), self._pos)
            with readable(path), suppress(POSKeyError):
                self.load(z64)      # opens the file that loads read, before a pack puts another in its place
            if self._pos == BEGIN:
                raise ConfigurationError(f'{path} is empty: nothing was ever stored in it.')
        except BaseException:
            self.close()
            raise

    def lastTransaction(self) -> bytes:
        """Return the last tid. Where tids do not rise, that of just after the one before it, and so on."""
        return self._scan().risen

    @property
    def rises(self) -> bool:
        """Whether all tids do, so that one can be found without reading what is before it."""
        return not self._scan().risen_ones

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        """Return the transactions from `start` to `stop`; StorageError: the file is damaged.

        Where tids do not rise, each is told as lastTransaction() does. Those of records stay as they are.
        """
        return self._told(start, stop)

    def current_iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        """Do the same as iterator, but tell of each object its last record alone; the others are not read."""
        last = self._index.get
        return self._told(start, stop, wanted=lambda oid, pos: last(oid) == pos)

    def _told(self, start: bytes | None, stop: bytes | None, **more: Any) -> Iterator[Any]:
        if not self.rises:
            return between(self._transactions(BEGIN, **more), start, stop)
        return self._transactions(BEGIN if start is None else self._position(start), stop, **more)

    def _position(self, tid: bytes) -> int:
        """Return where the first transaction is that is not before a tid."""
        marks = self._scan().marks
        number = bisect_left(marks, (tid, 0))
        return self._transactions(marks[number - 1][1] if number else BEGIN).first_from(tid)

    def _transactions(self, position: int, stop: bytes | None = None, **more: Any) -> FileTransactions:
        return FileTransactions(self._file_name, self._file.fileno(), self._pos, position, stop, **more)

    def _scan(self) -> _Scan:
        status = os.fstat(self._file.fileno())
        scan = _scans.get((status.st_dev, status.st_ino), _Scan())
        if scan.position > self._pos or (
                scan.position > BEGIN and self._transactions(BEGIN).tid_before(scan.position) != scan.last):
            scan = _Scan()      # it is another file
        if scan.position < self._pos:
            last, told, count, marks = scan.last, scan.risen, 0, [*scan.marks]
            for number, transaction in enumerate(self._transactions(scan.position)):
                last = transaction.tid
                count += last <= told
                told = risen(last, told)
                if number % MARK_EVERY == 0:
                    marks.append((last, transaction.position))
            if count:
                warn_of_risen(self._file_name, count)
            scan = _scans[status.st_dev, status.st_ino] = _Scan(self._pos, last, told, scan.risen_ones + count,
                                                                     tuple(marks))
        return scan


def warn_of_risen(path: str, count: int) -> None:
    """Tell of transactions that risen() has moved."""
    log.warning('%s: transactions whose time is not after that of the one before: %d. Each was moved to just after it.',
                path, count)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn what ZODB raises for a file that is no FileStorage, or a damaged one, into a sentence."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise ConfigurationError(UNREADABLE_FILE.format(path, error)) from error
    except (FileStorageError, CorruptedError, ValueError, struct.error) as error:
        raise ConfigurationError(UNREADABLE_FILE.format(path, ' '.join(str(error).split()))) from error


def is_filestorage(path: str) -> bool:
    """Whether a file begins as that of a FileStorage does."""
    try:
        with open(path, 'rb') as file:
            return file.read(4) in MAGIC
    except OSError:
        return False
