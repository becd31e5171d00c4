"""BlobsInDirectory: the data is in files of a directory that all processes share, as ZODB's own storages lay them out.

A file is named after the tid, and is to be there before others see the transaction. So finish takes the commit lock and
chooses the tid first, then the files get their names, and then the transaction is committed. If it is not, the files
stay: another transaction may be given the same tid, and have its files under the same names by then. They belong to no
revision, and `relstore blobs --fix` finds them.

A pack removes the files of the revisions that it removes. It lets all others be, for a copy of the database may be led
to the directory of the original, and know nothing of what that has committed since.
"""
from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, islice
from operator import itemgetter
from typing import IO, NamedTuple

from ZODB.blob import BlobFile, FilesystemHelper
from ZODB.interfaces import IBlob
from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.adapters.base import Adapter
from relstore.adapters.chunks import Data, damaged
from relstore.adapters.commits.base import AnyCommit
from relstore.blobs.base import SHARED, BlobsAtAPlace, Files, Pending, Read
from relstore.blobs.directory import SharedDirectory
from relstore.blobs.files import explained
from relstore.errors import ConfigurationError
from relstore.sessions.session import Session

log = logging.getLogger('relstore')

# Files that are looked up at a time.
LOOKED_UP = 1000
# Blobs of which the size is asked for at a time.
ASKED_TOGETHER = 200
# Blobs of which a process keeps in mind how large they are.
REMEMBERED = 100_000
# Seconds after which what a process has left that was killed is removed.
DEBRIS_SECONDS = 24 * 3600.0


class File(NamedTuple):
    """size: in bytes. modified: seconds since 1970. end: the tid of the object's next file; of the last one its own."""
    oid: int
    tid: int
    size: int
    modified: float
    end: int


class BlobsInDirectory(BlobsAtAPlace):
    place = SHARED

    def __init__(self, adapter: Adapter, directory: SharedDirectory):
        super().__init__(adapter)
        self.directory = directory
        self._name = ''
        self._sizes: dict[tuple[int, int], int | None] = {}

    def begin(self, session: Session, meta: Mapping[str, str]) -> None:
        super().begin(session, meta)
        self._name, owner = meta['database'], self.directory.owner
        if owner and owner != self._name:
            raise ConfigurationError(
                f'The directory {self.directory.directory} holds the blobs of another database than {self._adapter}: '
                'name the right one with blob-dir.')
        if not (owner or self._adapter.read_only or next(self.directory.files(), None)):
            self.directory.owner = self._name

    @property
    def is_ours(self) -> bool:
        """Whether files may be removed: what was there before relstore came may be of another site."""
        return self.directory.owner == self._name

    def take_over(self) -> None:
        """Say that the directory is of this database alone."""
        self.directory.owner = self._name

    def new_pending(self) -> Pending:
        return PendingInDirectory(self)

    def load(self, read: Read, oid: int, tid: int) -> str:
        self.refuse_elsewhere()
        found = self.directory.size(oid, tid)
        if found is None:
            read(oid, self.refuse_if_moved)
            raise POSKeyError(p64(oid), p64(tid))
        size = self._size(read, oid, tid)
        if size not in (None, found):
            raise damaged(oid, tid, size, found)
        return self.directory.path(oid, tid)

    def _size(self, read: Read, oid: int, tid: int) -> int | None:
        """Return how many bytes were committed, None where nobody has recorded that.

        A revision never changes, so it is asked for once by each process; and with it the next ones, because blobs that
        came together are often read together. It is compared with the file each time, whose size the system tells with
        whether it is there.
        """
        revision = oid, tid
        if revision not in self._sizes:
            chunks = self._adapter.chunks
            found: dict[tuple[int, int], int | None] = read(oid, chunks.sizes, oid, ASKED_TOGETHER)
            if revision not in found:
                record = None
                if len(found) == ASKED_TOGETHER and max(found)[0] == oid:       # it has more revisions than that
                    record = read(oid, chunks.record, oid, tid)
                found[revision] = None if record is None else record.size
            self.remember(found)
            return found[revision]
        return self._sizes[revision]

    def remember(self, sizes: Mapping[tuple[int, int], int | None]) -> None:
        """Keep what is known of blobs, by (oid, tid)."""
        if len(self._sizes) > REMEMBERED:
            self._sizes.clear()
        self._sizes.update(sizes)

    def forget(self) -> None:
        super().forget()
        self._sizes.clear()

    def open(self, read: Read, oid: int, tid: int, blob: IBlob | None = None) -> IO[bytes]:
        path = self.load(read, oid, tid)
        try:
            return open(path, 'rb') if blob is None else BlobFile(path, 'r', blob)
        except FileNotFoundError as e:
            raise POSKeyError(p64(oid), p64(tid)) from e        # packed just now

    @property
    def temporary_directory(self) -> str:
        return self.directory.temporary_directory()

    def new_path(self, oid: int) -> str:
        return self.directory.new_path(oid)

    @property
    def helper(self) -> FilesystemHelper:
        return self.directory.helper

    def before_pack(self, session: Session) -> set[tuple[int, int]]:
        super().before_pack(session)
        if not self.is_ours:
            log.warning('The directory %s had blobs before relstore came to it. A pack removes none of its files until '
                        '"relstore blobs --take-over" says that nothing else uses them.', self.directory.directory)
            return set()
        return self._there(session)

    def after_pack(self, session: Session, before: set[tuple[int, int]], pack_tid: int) -> tuple[int, int]:
        """Without history a file stays as long as a revision would: until it was replaced before the pack's time.

        Others that belong to no revision stay: in a copy of the database they may be what the original has committed
        since. See orphans().
        """
        removed = []
        if self.is_ours:
            now = self._there(session)
            goes = (_goes_of_history(before - now) if self._adapter.keep_history
                    else _goes(dict(before), dict(now), pack_tid))
            for file in _files(self.directory.files()):
                if goes(file):
                    self.directory.remove(file.oid, file.tid)
                    removed.append(file.size)
        self.directory.remove_debris(DEBRIS_SECONDS)
        return len(removed), sum(removed)

    def _there(self, session: Session) -> set[tuple[int, int]]:
        """Return (oid, tid) of the revisions that have files; without history what is current of their objects."""
        if self._adapter.keep_history:
            return {revision for some in self._pages() for revision in self._existing(session, some)}
        return {(oid, tid) for some in self._pages() for oid, tid in self._adapter.current_tids(
            session, {oid for oid, _ in some}).items() if tid is not None}

    def _pages(self) -> Iterator[list[tuple[int, int]]]:
        files = self.directory.files()
        while some := [(oid, tid) for oid, tid, *_ in islice(files, LOOKED_UP)]:
            yield some

    def _existing(self, session: Session, revisions: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return those of these revisions that are there."""
        rows = session.all(self._adapter.sql.existing, (self._adapter.revision_list([*revisions]),))
        return {(oid, tid) for oid, tid in rows}

    def orphans(self, session: Session) -> Iterator[File]:
        """Yield the files that belong to no revision, but for those that may be about to be committed."""
        last = self._adapter.last_tid(session)
        files = _files(file for file in self.directory.files() if file[1] <= last)
        while some := {(file.oid, file.tid): file for file in islice(files, LOOKED_UP)}:
            for revision in some.keys() - self._existing(session, some):
                yield some[revision]

    def has(self, session: Session, oid: int, tid: int) -> bool:
        return self.directory.find(oid, tid) is not None

    verify = has

    def data(self, session: Session, oid: int, tid: int) -> Data | None:
        if not self.has(session, oid, tid):
            return None
        return Data(self._adapter.chunks.record(session, oid, tid), self.directory.read(oid, tid))


def _goes_of_history(gone: set[tuple[int, int]]) -> Callable[[File], bool]:
    return lambda file: (file.oid, file.tid) in gone


def _goes(before: Mapping[int, int], now: Mapping[int, int], pack_tid: int) -> Callable[[File], bool]:
    """Return what tells, without history, whether a file goes. before, now: by oid the tid of what is current."""
    def goes(file: File) -> bool:
        current = now.get(file.oid)
        if current is None:
            return file.tid <= before.get(file.oid, 0)      # the pack has removed the object
        replaced = current if file.end == file.tid else file.end
        return file.tid < current and replaced <= pack_tid
    return goes


def _files(files: Iterator[tuple[int, int, str, int, float]]) -> Iterator[File]:
    """Yield what comes object by object."""
    for oid, some in groupby(files, key=itemgetter(0)):
        revisions = sorted((tid, size, modified) for _, tid, _, size, modified in some)
        ends = [tid for tid, *_ in revisions[1:]] + [revisions[-1][0]]
        for (tid, size, modified), end in zip(revisions, ends, strict=True):
            yield File(oid, tid, size, modified, end)


class PendingInDirectory(Files):
    """The files of one transaction, which get their names when its tid is known."""

    def __init__(self, blobs: BlobsInDirectory):
        super().__init__(blobs)
        self._remember, self._directory = blobs.remember, blobs.directory
        self._staged: dict[int, str] = {}

    def send(self, commit: AnyCommit) -> None:
        self.record()
        for oid, path in list(self.paths.items()):
            self._staged[oid] = self._directory.stage(oid, path)
            del self.paths[oid]
        commit.send_blobs({}, self.records)

    def copy(self, commit: AnyCommit, copies: Mapping[int, int]) -> None:
        for oid, tid in copies.items():
            path = self._directory.find(oid, tid)
            if path is not None:
                own = self._blobs.new_path(oid)
                self.paths[oid] = own
                with explained(f'The blob {oid:#x} cannot be repeated'):
                    shutil.copyfile(path, own)
                self._staged[oid] = self._directory.stage(oid, own)
                del self.paths[oid]
                self.oids.add(oid)
        commit.repeat_records(copies)

    def place(self, commit: AnyCommit) -> None:
        """From here on the files stay, whatever comes: somebody else may be given the same tid, and the same names."""
        if self._staged:
            self._directory.place(self._staged, commit.choose_tid())
            self._staged = {}

    def committed(self, tid: int) -> None:
        self._remember({(oid, tid): record.size for oid, record in self.records.items()})

    def close(self) -> None:
        self._directory.discard(self._staged)
        super().close()
