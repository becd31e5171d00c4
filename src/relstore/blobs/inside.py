"""BlobsInDatabase: the data is in the table blob_chunk, and files of it are in a directory that is a cache."""
from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import IO

from ZODB.blob import BlobFile
from ZODB.interfaces import IBlob
from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.adapters.base import Adapter
from relstore.adapters.chunks import Data, verified
from relstore.adapters.commits.base import AnyCommit
from relstore.blobs.base import INSIDE, BlobsAtAPlace, Files, Pending, Read
from relstore.blobs.cache import BlobCache
from relstore.errors import StorageError
from relstore.sessions.session import Session


class BlobsInDatabase(BlobsAtAPlace):
    """fill_on_commit: whether what this process commits is put into the cache."""
    place = INSIDE

    def __init__(self, adapter: Adapter, cache: BlobCache, fill_on_commit: bool):
        super().__init__(adapter)
        self.cache, self.fill_on_commit = cache, fill_on_commit

    def new_instance(self) -> BlobsInDatabase:
        other = BlobsInDatabase(self._adapter, self.cache.new_instance(), self.fill_on_commit)
        other._known = self._known
        return other

    def new_pending(self) -> Pending:
        return PendingInDatabase(self)

    def load(self, read: Read, oid: int, tid: int) -> str:
        self.refuse_elsewhere()
        return self.cache.find(oid, tid) or self._get(read, oid, tid)

    def open(self, read: Read, oid: int, tid: int, blob: IBlob | None = None) -> IO[bytes]:
        self.refuse_elsewhere()
        while True:
            file = (self.cache.open(oid, tid) if blob is None else
                    self.cache.open(oid, tid, lambda path: BlobFile(path, 'r', blob)))
            if file is not None:
                return file
            self._get(read, oid, tid)       # another process may remove it before it is open

    def _get(self, read: Read, oid: int, tid: int) -> str:
        """Return the path of a file with what is not cached."""
        path: str = read(oid, self._fetch, oid, tid)
        return path

    def _fetch(self, session: Session, oid: int, tid: int) -> str:
        chunks = self._adapter.chunks
        data = chunks.open(session, oid, tid)
        if data is None:
            self.refuse_if_moved(session)
            raise POSKeyError(p64(oid), p64(tid))
        if data.record is not None:
            return self.cache.add(oid, tid, data.record.size, verified(data, oid, tid))
        pieces = data.pieces
        first, second = next(pieces), next(pieces, None)
        if second is None:
            return self.cache.add(oid, tid, len(first), [first])
        size = chunks.size(session, oid, tid)
        if size is None:
            raise POSKeyError(p64(oid), p64(tid))       # it has just been replaced
        return self.cache.add(oid, tid, size, chain([first, second], pieces))

    def has(self, session: Session, oid: int, tid: int) -> bool:
        return self._adapter.chunks.size(session, oid, tid) is not None

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        return self._adapter.chunks.open(session, oid, tid)

    def verify(self, session: Session, oid: int, tid: int) -> bool:
        try:
            return sum(1 for _ in self._adapter.chunks.read(session, oid, tid)) > 0
        except POSKeyError:
            return False

    @property
    def temporary_directory(self) -> str:
        return self.cache.temporary_directory()

    def new_path(self, oid: int) -> str:
        return self.cache.new_path(oid)

    def end_view(self) -> None:
        self.cache.forget_large()

    def close(self) -> None:
        self.cache.close()


class PendingInDatabase(Files):
    """The files of one transaction, which go into the database."""

    def __init__(self, blobs: BlobsInDatabase):
        super().__init__(blobs)
        self._cache, self._fill = blobs.cache, blobs.fill_on_commit

    def send(self, commit: AnyCommit) -> None:
        self.record()
        commit.send_blobs(self.paths, self.records)

    def copy(self, commit: AnyCommit, copies: Mapping[int, int]) -> None:
        commit.copy_blobs(copies)
        commit.repeat_records(copies)

    def committed(self, tid: int) -> None:
        if not self._fill:
            self._cache.discard(self.paths.values())
            self.paths.clear()
        for oid, path in self.paths.items():
            with suppress(StorageError):         # then it is fetched when it is wanted
                self._cache.adopt(oid, tid, path)
