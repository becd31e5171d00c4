"""Places: where the data of blobs may be kept, as whoever moves it from one to the other sees them.

Each takes the same few calls; see Place. There is nothing here of caches, of transactions under way, or of views.
"""
from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from relstore.adapters.base import PAGE, Adapter
from relstore.adapters.chunks import Data, Record
from relstore.blobs.base import INSIDE, SHARED, STORED, Attempt
from relstore.blobs.bucket import Bucket, object_name
from relstore.blobs.directory import SharedDirectory
from relstore.blobs.store import ObjectStore
from relstore.errors import ConfigurationError
from relstore.sessions.session import Session

Revision = tuple[int, int]      # (oid, tid)


class Place(Protocol):
    """name: as relstore_meta has it, under the key of blobs. told: as a sentence has it. option: what leads to it.

    is_transactional: whether what is put here is part of the session's transaction.
    """
    name: str
    told: str
    option: str
    is_transactional: bool

    def begin(self, session: Session) -> None:
        """Before anything is put here. ConfigurationError: it is none for the blobs of this database."""

    def pages(self, session: Session) -> Iterator[list[Revision]]:
        """Yield the revisions that have data here, each once, some at a time."""

    def those(self, session: Session, revisions: Sequence[Revision]) -> list[Revision]:
        """Return those of these revisions that have data here."""

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        """Return the bytes of a revision's data, None where there is none."""

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        """Return the data of a revision, and what is recorded of it; None: there is none."""

    def put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> bool:
        """Keep the data of a revision, all or nothing, in the place of what may be there.

        Within a transaction, if it is_transactional.

        Return False, with nothing done, where the revision is gone. What `pieces` raises is raised.
        """

    def drop(self, session: Session, oid: int, tid: int) -> None:
        """Remove the data of a revision."""


class InDatabase:
    """In the table blob_chunk."""
    name, told = INSIDE, 'the database'
    option = 'shared-blob-dir false, and blob-dir to an empty directory, for a cache'
    is_transactional = True

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def begin(self, session: Session) -> None:
        """A database is always one."""

    def pages(self, session: Session) -> Iterator[list[Revision]]:
        page = [(-1, -1)]
        while page:
            after = page[-1] if self._adapter.keep_history else page[-1][:1]
            page = [(oid, tid) for oid, tid in session.all(self._adapter.sql.chunks_there, (*after, PAGE))]
            yield page

    def those(self, session: Session, revisions: Sequence[Revision]) -> list[Revision]:
        return [(oid, tid) for oid, tid in session.all(
            self._adapter.sql.chunks_of, (self._adapter.revision_list(revisions),))]

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        return self._adapter.chunks.size(session, oid, tid)

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        return self._adapter.chunks.open(session, oid, tid)

    def put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> bool:
        return self._adapter.chunks.put(session, oid, tid, pieces)

    def drop(self, session: Session, oid: int, tid: int) -> None:
        with self._adapter.writing(session):
            session.run(self._adapter.sql.drop_chunks, (oid, tid))


class InDirectory:
    """In files that all processes share."""
    name = SHARED
    is_transactional = False

    def __init__(self, adapter: Adapter, directory: SharedDirectory):
        self._adapter, self._directory = adapter, directory
        self.told = f'the directory {directory.directory}'
        self.option = f'shared-blob-dir true, and blob-dir to {directory.directory}'

    def begin(self, session: Session) -> None:
        directory, name = self._directory, self._adapter.meta(session)['database']
        owner = directory.owner
        if owner != name and (owner or next(directory.files(), None)):
            raise ConfigurationError(f'The directory {directory.directory} holds the blobs of another site, or of '
                                     'nobody knows which: name an empty one.')
        directory.owner = name

    def pages(self, session: Session) -> Iterator[list[Revision]]:
        files = self._directory.files()
        while some := [(oid, tid) for oid, tid, *_ in islice(files, PAGE)]:
            rows = session.all(self._adapter.sql.existing, (self._adapter.revision_list(some),))
            yield [(oid, tid) for oid, tid in rows]

    def those(self, session: Session, revisions: Sequence[Revision]) -> list[Revision]:
        return [revision for revision in revisions if self._directory.size(*revision) is not None]

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        return self._directory.size(oid, tid)

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        if self._directory.size(oid, tid) is None:
            return None
        return Data(self._adapter.chunks.record(session, oid, tid), self._directory.read(oid, tid))

    def put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> bool:
        self._directory.put(oid, tid, pieces)
        return True

    def drop(self, session: Session, oid: int, tid: int) -> None:
        self._directory.remove(oid, tid)


class InStore:
    """In an object storage. What is put here is shared by all revisions that have the same data."""
    name = STORED
    is_transactional = False

    def __init__(self, adapter: Adapter, store: ObjectStore):
        self._adapter, self._store = adapter, store
        self._bucket, self._objects = Bucket(adapter, store), adapter.objects
        self.told = f'the object storage {store.address}'
        self.option = (f'blob-store to the URL of {store.address}, leave shared-blob-dir out, and set blob-dir to an '
                       'empty directory, for a cache')

    def begin(self, session: Session) -> None:
        self._bucket.settle(_with(session))

    def pages(self, session: Session) -> Iterator[list[Revision]]:
        page = [(-1, -1)]
        while page:
            after = page[-1] if self._adapter.keep_history else page[-1][:1]
            page = [(oid, tid) for oid, tid in session.all(self._adapter.sql.stored_there, (*after, PAGE))]
            yield page

    def those(self, session: Session, revisions: Sequence[Revision]) -> list[Revision]:
        return [(oid, tid) for oid, tid in session.all(
            self._adapter.sql.stored_of, (self._adapter.revision_list(revisions),))]

    def size(self, session: Session, oid: int, tid: int) -> int | None:
        stored = self._objects.find(session, oid, tid)
        if stored is None or stored.version is None:
            return None
        return self._store.size(object_name(stored.record.digest, stored.version))

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        stored = self._objects.find(session, oid, tid)
        if stored is None or stored.version is None:
            return None
        return self._bucket.data(stored, oid, tid)

    def put(self, session: Session, oid: int, tid: int, pieces: Iterable[bytes]) -> bool:
        """What a killed process has uploaded stays, and is used by the next one."""
        with tempfile.NamedTemporaryFile() as file:
            digest, size = hashlib.sha256(), 0
            for piece in pieces:
                digest.update(piece)
                size += file.write(piece)
            file.flush()
            record = Record(size, digest.digest())
            self._adapter.chunks.add_record(session, oid, tid, record)
            stored = self._objects.find(session, oid, tid)
            if stored is None:
                return False
            if stored.record == record:     # else it is damaged, as whoever moves it sees
                self._bucket.keep(_with(session), record, file.name, secrets.token_hex(8))
        return True

    def drop(self, session: Session, oid: int, tid: int) -> None:
        """Nothing: other revisions may have the same data, and the move has not put it where they are to be read."""


def _with(session: Session) -> Attempt:
    """Return what does something with a session: this one."""
    def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(session, *arguments)
    return attempt
