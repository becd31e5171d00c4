"""Blobs: what a storage does with the data of ZODB's blobs, wherever that is."""
from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from typing import IO, Any, Protocol

from ZODB.blob import FilesystemHelper, rename_or_copy_blob
from ZODB.interfaces import IBlob
from ZODB.POSException import Unsupported

from relstore.adapters.base import Adapter
from relstore.adapters.chunks import Data, Record, record_of
from relstore.adapters.commits.base import AnyCommit
from relstore.blobs.files import explained
from relstore.errors import ConfigurationError
from relstore.sessions.session import Session

# Where the data is, as relstore_meta tells under this key: in blob_chunk, in a directory that all processes share, or
# in an object storage.
KEY, INSIDE, SHARED, STORED = 'blobs', 'database', 'directory', 'store'
# For messages: where that is, and what to do about options that say otherwise.
PLACES = {INSIDE: ('in itself', 'set shared-blob-dir false, and leave blob-store out'),
          SHARED: ('in a directory', 'set shared-blob-dir true, and leave blob-store out'),
          STORED: ('in an object storage', 'name it with blob-store')}
# There once a move has begun: then chunks in the database tell nothing of where blobs are.
MOVED = 'blobs-moved'


class Read(Protocol):
    """Return read(session, *arguments) as a view sees the object `oid`: see View.read."""

    def __call__(self, oid: int, read: Callable[..., Any], /, *arguments: Any) -> Any: ...


class Attempt(Protocol):
    """Return work(session, *arguments), with a session of its own."""

    def __call__(self, work: Callable[..., Any], /, *arguments: Any) -> Any: ...


class Pending:
    """The files of the blobs of one transaction. They are ours from when they were stored.

    Of what is to be there, `prepare` comes first, then `send` before each vote, `copy` and `hold` after it, `place`
    before finish, and then `committed`, if it was. `close` ends it in any case.

    oids: of the objects that bring a file.
    """
    oids: Set[int] = frozenset()

    def put(self, oid: int, path: str) -> None:
        """Take over a file that holds the data of an object. A second one for an oid replaces the first."""
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    def prepare(self, attempt: Attempt) -> None:
        """Do what takes time while no session is held. attempt: as SessionPool.attempt."""

    def send(self, commit: AnyCommit) -> None:
        """Do ahead of the vote what takes time."""

    def copy(self, commit: AnyCommit, copies: Mapping[int, int]) -> None:
        """Have objects repeat the data of earlier revisions, oid -> tid."""

    def hold(self, session: Session) -> None:
        """Keep others from removing, until the commit has happened, what it relies on. Unavailable: it is gone."""

    def place(self, commit: AnyCommit) -> None:
        """Have the data where it is to be when the commit has happened."""

    def committed(self, tid: int) -> None:
        """The commit has happened."""

    def close(self) -> None:
        """Nothing is left of what was not committed."""


class Files(Pending):
    """Where there is a directory, which files are moved into at once: who has stored one may remove its own.

    paths: by oid, of those that are there. records: of the data, by oid; see record().
    """

    def __init__(self, blobs: Blobs):
        self._blobs = blobs
        self.paths: dict[int, str] = {}
        self.records: dict[int, Record] = {}
        self.oids: set[int] = set()

    def put(self, oid: int, path: str) -> None:
        own = self._blobs.new_path(oid)
        rename_or_copy_blob(path, own, chmod=False)
        self._remove(oid)
        self.paths[oid] = own
        self.oids.add(oid)

    def record(self) -> None:
        """Read the files, and note what is to be recorded of each. Later it is known, also where they are gone."""
        for oid, path in self.paths.items():
            if oid not in self.records:
                with explained(f'The blob {oid:#x} cannot be read'):
                    self.records[oid] = record_of(path)

    def close(self) -> None:
        for oid in list(self.paths):
            self._remove(oid)

    def _remove(self, oid: int) -> None:
        self.records.pop(oid, None)
        path = self.paths.pop(oid, None)
        if path is not None:
            with suppress(FileNotFoundError):
                os.unlink(path)


class Blobs:
    """The blobs of one database, as one process has them.

    there: whether loads have to ask refuse_load.
    """
    there = False
    # Whether blobs can be loaded and stored.
    supported = False

    def begin(self, session: Session, meta: Mapping[str, str]) -> None:
        """See that the database has its blobs where the options say. ConfigurationError: it has not."""

    def forget(self) -> None:
        """The database may have been emptied, or restored."""

    def look_again(self, session: Session) -> None:
        """Something has changed in the database: look whether blobs are where they were."""

    def emptied(self, session: Session) -> None:
        """The database was emptied by this process."""

    def refuse_load(self, oid: int, state: bytes) -> None:
        """Raise Unsupported if this is the record of a blob that must not be loaded."""

    def refuse_change(self, session: Session, changed: Collection[int], deleted: Collection[int]) -> None:
        """Raise Unsupported if a transaction would cut a blob off from its data.

        changed: the oids to which it gives the record of a Blob. deleted: those to which it gives none.
        """

    def say_where(self, session: Session, sweeps: int) -> None:
        """Within the vote of a transaction with blobs: have the database remember where they are.

        sweeps: see Verdict. ConfigurationError: another process has them elsewhere.
        """

    def said(self, sweeps: int) -> None:
        """That was committed."""

    def new_instance(self) -> Blobs:
        """Return what one connection uses, for one transaction after the other."""
        return self

    def new_pending(self) -> Pending:
        return Pending()

    def load(self, read: Read, oid: int, tid: int) -> str:
        """Return the path of a file that holds the data of a revision. POSKeyError: there is none."""
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    def open(self, read: Read, oid: int, tid: int, blob: IBlob | None = None) -> IO[bytes]:
        """Return that file, open for reading: a BlobFile where a Blob is given."""
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    def part(self, read: Read, oid: int, tid: int, start: int, end: int) -> bytes:
        """Return a part of the data of a revision: see RelStore.blob_part."""
        with self.open(read, oid, tid) as file:
            file.seek(start)
            return file.read(max(min(end, os.fstat(file.fileno()).st_size) - start, 0))

    def url(self, read: Read, oid: int, tid: int, expires: int, filename: str | None, content_type: str | None) -> str:
        """Return a URL by which anybody can read the data of a revision for so many seconds: see RelStore.blob_url."""
        raise Unsupported('Blobs have URLs in an object storage alone: name one with blob-store.')

    @property
    def temporary_directory(self) -> str:
        """Where uncommitted data is best kept."""
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    def new_path(self, oid: int) -> str:
        """Return the path of a file for data that was stored and is not committed."""
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    @property
    def helper(self) -> FilesystemHelper:
        """ZODB's, where the files lie as those of its own storages do."""
        raise AttributeError('The files of blobs are a cache, and do not lie as ZODB lays them out; or there are none.')

    def has(self, session: Session, oid: int, tid: int) -> bool:
        """Whether there is data of a revision."""
        return False

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        """Return the data of a revision where it is kept, and what is recorded of it; None: there is none.

        POSKeyError, while it is read: it is gone, or a part of it is.
        """
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    def verify(self, session: Session, oid: int, tid: int) -> bool:
        """Whether the data of a revision is all there, as far as that can be told."""
        raise Unsupported('Blobs need a directory: name one with blob-dir.')

    def before_pack(self, session: Session) -> set[tuple[int, int]]:
        """Return (oid, tid) of the revisions that have files which a pack would have to remove with them."""
        return set()

    def after_pack(self, session: Session, before: set[tuple[int, int]], pack_tid: int) -> tuple[int, int]:
        """A pack to this tid has removed what it found: remove the files of that. Return how many, and their bytes."""
        return 0, 0

    def end_view(self) -> None:
        """A connection's transaction has ended."""

    def close(self) -> None:
        """The storage is closed."""


class _Known:
    """What a process knows of where the blobs are. sweeps: how many sweeps there were when the database said so."""
    sweeps: int | None = None
    elsewhere = ''      # where they were moved to, since it was opened


class BlobsAtAPlace(Blobs):
    """adapter: of the database. place: where its blobs are, one of PLACES.

    They may be moved while it is open, which counts as a sweep: see move.py. Instances share what is known.
    """
    supported = True
    place = ''

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._known = _Known()

    def begin(self, session: Session, meta: Mapping[str, str]) -> None:
        is_inside = MOVED not in meta and self._adapter.chunks.there(session)     # RelStorage says it by these alone
        said = INSIDE if is_inside else meta.get(KEY, self.place)
        if said != self.place:
            where, mend = PLACES[said]
            raise ConfigurationError(f'{self._adapter} has its blobs {where}: {mend}.')

    def forget(self) -> None:
        self._known.sweeps = None

    def look_again(self, session: Session) -> None:
        said = self._adapter.meta(session).get(KEY, self.place)
        self._known.elsewhere = said if said != self.place else ''

    def refuse_elsewhere(self) -> None:
        """ConfigurationError if the blobs were moved."""
        if self._known.elsewhere:
            where, mend = PLACES[self._known.elsewhere]
            raise ConfigurationError(f'{self._adapter} has its blobs {where}: they were moved, so {mend}, and start '
                                     'again.')

    def refuse_if_moved(self, session: Session) -> None:
        """Look, and raise ConfigurationError if the blobs are elsewhere by now."""
        self.look_again(session)
        self.refuse_elsewhere()

    def before_pack(self, session: Session) -> set[tuple[int, int]]:
        self.refuse_if_moved(session)
        return set()

    def emptied(self, session: Session) -> None:
        session.run(self._adapter.sql.forget_place)

    def say_where(self, session: Session, sweeps: int) -> None:
        self.refuse_elsewhere()
        if self._known.sweeps == sweeps:
            return
        session.run(self._adapter.sql.add_meta, (KEY, self.place))      # it waits for who says so at the same time
        said = self._adapter.meta(session)[KEY]
        if said != self.place:
            where, mend = PLACES[said]
            raise ConfigurationError(f'{self._adapter} has its blobs {where}: another process has stored the first '
                                     f'there, or they were moved, so {mend}, and start again.')

    def said(self, sweeps: int) -> None:
        self._known.sweeps = sweeps
