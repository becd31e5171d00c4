"""BlobMethods: what ZODB asks a storage about blobs, and a little more where they are in an object storage."""
from __future__ import annotations

from typing import IO, TYPE_CHECKING

from ZODB.blob import FilesystemHelper
from ZODB.interfaces import IBlob, IStorageTransactionMetaData
from ZODB.utils import u64

from relstore.commit import Transaction
from relstore.database import Database
from relstore.oids import number_of
from relstore.view import View

if TYPE_CHECKING:
    from relstore.blobs.base import Blobs


class BlobMethods:
    """A part of RelStore, whose attributes it uses: IBlobStorageRestoreable."""
    _database: Database
    view: View
    _blobs: Blobs

    if TYPE_CHECKING:
        def store(self, oid: bytes, serial: bytes | None, data: bytes, version: str,
                  transaction: IStorageTransactionMetaData) -> None: ...

        def restore(self, oid: bytes, serial: bytes, data: bytes | None, version: str, prev_txn: bytes | None,
                    transaction: IStorageTransactionMetaData) -> None: ...

        def _current(self, transaction: IStorageTransactionMetaData) -> Transaction: ...

    def storeBlob(self, oid: bytes, oldserial: bytes | None, data: bytes, blobfilename: str, version: str,
                  transaction: IStorageTransactionMetaData) -> None:
        """Store an object with the data of a blob. The file is the storage's from now on, and must not be open."""
        if isinstance(oldserial, str):      # as ZODB's own tests have it
            oldserial = oldserial.encode('latin-1')
        self.store(oid, oldserial, data, '', transaction)
        self._current(transaction).blobs.put(u64(oid), blobfilename)

    def restoreBlob(self, oid: bytes, serial: bytes, data: bytes, blobfilename: str, prev_txn: bytes | None,
                    transaction: IStorageTransactionMetaData) -> None:
        self.restore(oid, serial, data, '', prev_txn, transaction)
        self._current(transaction).blobs.put(u64(oid), blobfilename)

    def loadBlob(self, oid: bytes, serial: bytes) -> str:
        """Return the path of a file with the data of a revision; it may be removed when the transaction has ended.

        POSKeyError: there is none.
        """
        return self._blobs.load(self.view.read, number_of(oid), u64(serial))

    def openCommittedBlobFile(self, oid: bytes, serial: bytes, blob: IBlob | None = None) -> IO[bytes]:
        """Return that file, open for reading: a BlobFile where its Blob is given. It stays while it is open."""
        return self._blobs.open(self.view.read, number_of(oid), u64(serial), blob)

    def temporaryDirectory(self) -> str:
        """Return where uncommitted data is best kept; what is older than a day there is removed."""
        return self._blobs.temporary_directory

    def blob_url(self, oid: bytes, serial: bytes, expires: int = 3600, filename: str | None = None,
                 content_type: str | None = None) -> str:
        """Return a URL from which anybody can fetch the data of a revision for so many seconds, with blob-store alone.

        filename: under which a browser saves it; None: it shows what it can. content_type: that the server tells.
        A site that redirects there has seen to it that the data may be read. POSKeyError: there is none.
        """
        return self._blobs.url(self.view.read, number_of(oid), u64(serial), expires, filename, content_type)

    def blob_part(self, oid: bytes, serial: bytes, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end` of the data of a revision, as far as there are any.

        From an object storage nothing else is fetched, so they are compared with no digest. POSKeyError: there is none.
        """
        if start < 0:
            raise ValueError(f'A part of a blob cannot begin at {start}.')
        return self._blobs.part(self.view.read, number_of(oid), u64(serial), start, end)

    @property
    def fshelper(self) -> FilesystemHelper:
        """ZODB's helper for the files of blobs, by which other programs find them; where they are in blob-dir alone."""
        return self._database.blobs.helper
