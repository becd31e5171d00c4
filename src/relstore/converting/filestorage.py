"""LiveFileStorage: a Data.fs that is only read, while its site may go on writing."""
from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from ZODB.blob import FilesystemHelper
from ZODB.FileStorage import FileStorage
from ZODB.FileStorage.FileStorage import FileStorageError
from ZODB.FileStorage.format import CorruptedError
from ZODB.interfaces import IBlobStorage
from ZODB.POSException import POSKeyError
from ZODB.utils import z64
from zope.interface import alsoProvides

from relstore.converting.transactions import BEGIN, FileTransactions, check_end
from relstore.errors import ConfigurationError, StorageError

MAGIC = b'FS21', b'FS30'        # the first bytes of a file
NO_TID = bytes(8)

# Of files by device and inode: a position up to which their tids rise, and the last tid before it.
_rising: dict[tuple[int, int], tuple[int, bytes]] = {}


class LiveFileStorage(FileStorage):
    """A FileStorage as it is when it is opened. Nothing is written, neither to it nor beside it.

    blobs: the directory of its blobs; '': it is opened without.
    StorageError: the file is damaged. ConfigurationError: it is none of a FileStorage, or nothing was ever stored in
    it; the directory of the blobs is not there, or cannot be read.
    """

    def __init__(self, path: str, blobs: str = '') -> None:
        if blobs and not (os.path.isdir(blobs) and os.access(blobs, os.R_OK | os.X_OK)):
            raise ConfigurationError(f'{blobs} is no directory of blobs that can be read.')
        with readable(path):
            super().__init__(path, read_only=True)
        self._blob_files = FilesystemHelper(blobs) if blobs else None
        if blobs:
            alsoProvides(self, IBlobStorage)
        try:
            check_end(path, self._file.fileno(), self._pos)
            with readable(path):
                self.load(z64)
        except POSKeyError:
            self.close()
            raise ConfigurationError(f'{path} holds no root object: nothing was ever stored in it.') from None
        except BaseException:
            self.close()
            raise

    def iterator(self, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Any]:
        """Return the transactions from `start` on, and up to the first that is later than `stop`.

        StorageError: the file is damaged, or its tids do not rise, so it cannot be told where to begin.
        """
        # Not by the last tid: where tids do not rise, an earlier one may be greater.
        stop = None if stop is None or stop >= self.lastTransaction() else stop
        return FileTransactions(self._file_name, self._file.fileno(), self._pos, self._position(start), stop)

    def _position(self, start: bytes | None) -> int:
        if start is None:
            return BEGIN
        descriptor = self._file.fileno()
        status = os.fstat(descriptor)
        begin, last = _rising.get((status.st_dev, status.st_ino), (BEGIN, NO_TID))
        scan = FileTransactions(self._file_name, descriptor, self._pos)
        if begin > self._pos or begin > BEGIN and scan.tid_before(begin) != last:
            begin, last = BEGIN, NO_TID     # it is another file
        for transaction in FileTransactions(self._file_name, descriptor, self._pos, begin):
            if transaction.tid <= last:
                raise StorageError(f'{self._file_name} has a transaction with a tid that is not after the one before, '
                                   'so a copy cannot go on: begin it again, with --clear.')
            last = transaction.tid
        _rising[status.st_dev, status.st_ino] = self._pos, last
        return scan.first_from(start)

    def openCommittedBlobFile(self, oid: bytes, serial: bytes, blob: object = None) -> IO[bytes]:
        """Return the file of a blob, open for reading. POSKeyError: there is none."""
        if self._blob_files is not None:
            with suppress(FileNotFoundError):
                return open(self._blob_files.getBlobFilename(oid, serial), 'rb')
        raise POSKeyError(oid, serial)


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn what ZODB raises for a file that is no FileStorage, or a damaged one, into a sentence."""
    try:
        yield
    except (FileStorageError, CorruptedError, ValueError, struct.error) as error:
        raise ConfigurationError(
            f'{path} cannot be read as a FileStorage ({type(error).__name__}: {error}).') from error


def is_filestorage(path: str) -> bool:
    """Whether a file begins as that of a FileStorage does."""
    try:
        with open(path, 'rb') as file:
            return file.read(4) in MAGIC
    except OSError:
        return False
