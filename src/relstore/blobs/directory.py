"""SharedDirectory: the data of blobs in a directory that all processes share, as ZODB's own storages lay it out.

A transaction's files are staged in the temporary directory of its process: moved there, or copied, and written through
to the disk. So when the commit has a tid, nothing is left to do but to rename them. Whatever fails before that leaves
nothing that anybody sees, and a process that is killed leaves files that remove_debris() finds; or, between place() and
the commit in the database, files whose tid is in no transaction: files() finds these.

What could interleave: a pack removes the last file of a directory, and the directory with it, while a commit is about
to rename another file into it. Only an empty directory can be removed, so no file is lost: the commit finds that the
directory is gone and makes it again.
"""
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import IO

from ZODB.blob import LAYOUT_MARKER, FilesystemHelper, auto_layout_select
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64

from relstore.adapters.chunks import PIECE_BYTES, pieces
from relstore.blobs.files import commit_mode, explained, explanation, move, remove, size_of, sync
from relstore.blobs.temporary import Temporary
from relstore.errors import ConfigurationError

log = logging.getLogger('relstore')

LAYOUTS = 'bushy', 'lawn'
NAME = re.compile(r'0x[0-9a-f]{1,16}\.blob')


class SharedDirectory:
    """The blobs in `directory`; what ZODB calls its layout is found out. A directory that is not there is made.

    ConfigurationError: it cannot be used, or its files lie in no layout of ZODB's. Threads share it.
    """

    def __init__(self, directory: str):
        self.directory = os.path.abspath(directory)
        with explained(f'The directory of blobs {self.directory} cannot be used'):
            os.makedirs(self.directory, exist_ok=True)
            layout = auto_layout_select(self.directory)
            if layout not in LAYOUTS:
                raise ConfigurationError(
                    f'The directory {self.directory} has the layout {layout}, which is no place for the only copy of a '
                    'blob: either shared-blob-dir is false, and it is a cache, or blob-dir is another directory.')
            self._mark(layout)
            self.helper = FilesystemHelper(self.directory, layout)
            os.makedirs(self.helper.temp_dir, exist_ok=True)
        self._temporary = Temporary(self.directory)

    @property
    def owner(self) -> str:
        """The name of the database whose blobs these are; '' where nobody has said so."""
        try:
            with open(self._owner_path, encoding='utf-8') as file:
                return file.read().strip()
        except FileNotFoundError:
            return ''

    @owner.setter
    def owner(self, name: str) -> None:
        path = self.new_path(0)
        with explained(f'Nobody can be made the owner of {self.directory}'):
            with open(path, 'w', encoding='utf-8') as file:
                file.write(name)
            os.replace(path, self._owner_path)

    @property
    def _owner_path(self) -> str:
        return os.path.join(self.directory, '.relstore-database')

    def path(self, oid: int, tid: int) -> str:
        """Return where the blob of a revision is, or would be."""
        return self.helper.getBlobFilename(oid, tid)

    def find(self, oid: int, tid: int) -> str | None:
        """Return the path of the blob of a revision, or None if it is not there."""
        return None if self.size(oid, tid) is None else self.path(oid, tid)

    def size(self, oid: int, tid: int) -> int | None:
        """Return the bytes of the blob of a revision, or None if it is not there."""
        try:
            return size_of(self.path(oid, tid))
        except OSError as e:
            raise explanation(f'The blob {oid:#x} cannot be read in {self.directory}', e) from e

    def read(self, oid: int, tid: int) -> Iterator[bytes]:
        """Yield the data of a revision in pieces. POSKeyError: it is not there."""
        with self._explained(oid, 'read'):
            try:
                with open(self.path(oid, tid), 'rb', buffering=0) as file:
                    yield from pieces(file, PIECE_BYTES)
            except FileNotFoundError as e:
                raise POSKeyError(p64(oid), p64(tid)) from e

    def temporary_directory(self) -> str:
        """Return where uncommitted data goes: on the same file system."""
        return self._temporary.public()

    def new_path(self, oid: int) -> str:
        """Return the path of a file of this process's own that is not there yet, likewise."""
        return self._temporary.name(f'{oid:x}')

    def stage(self, oid: int, source: str) -> str:
        """Take a file for a transaction, and return where it is now: written through to the disk, and not visible.

        StorageError: it cannot be done. The source is still there, and nothing else.
        """
        staged = self._temporary.name(f'{oid:x}')
        with self._explained(oid):
            move(source, staged)
            try:
                sync(staged)
            except BaseException:
                move(staged, source)
                raise
        return staged

    def place(self, staged: Mapping[int, str], tid: int) -> None:
        """Make files visible as the blobs of a transaction, by oid. They survive a power cut.

        One that is there already is replaced: it was left by a commit of the same tid that did not happen.

        StorageError: it cannot be done. None is visible, and all are staged as before, but for those that were there.
        """
        new = {oid: path for oid, path in staged.items() if self.find(oid, tid) is None}
        try:
            for oid, path in staged.items():
                with self._explained(oid):
                    self._place(oid, tid, path)
            with explained(f'The directories of blobs below {self.directory} cannot be written to the disk'):
                self._sync_directories(staged)
        except BaseException:
            self._take_back(new, tid)
            raise

    def put(self, oid: int, tid: int, pieces: Iterable[bytes]) -> None:
        """Keep the data of a revision that has been committed. It survives a power cut. Or nothing is left."""
        path = self.new_path(oid)
        try:
            with self._explained(oid):
                file = open(path, 'xb', buffering=0)        # noqa: SIM115 (what `pieces` raises is not explained here)
            with file:
                for piece in pieces:
                    with self._explained(oid):
                        _write_all(file, piece)
            staged = self.stage(oid, path)
        except BaseException:
            remove(path)
            raise
        try:
            self.place({oid: staged}, tid)
        except BaseException:
            remove(staged)
            raise

    def discard(self, staged: Mapping[int, str]) -> None:
        """Remove what was staged for a transaction, as far as it is there."""
        for oid, path in staged.items():
            with explained(f'The blob {oid:#x} of a transaction that was aborted cannot be removed from {path}'):
                remove(path)

    def remove(self, oid: int, tid: int) -> None:
        """Remove the blob of a revision, if it is there, and the directories that are empty then."""
        path = self.path(oid, tid)
        with explained(f'The blob {oid:#x} cannot be removed from {self.directory}'):
            remove(path)
            self._remove_empty(os.path.dirname(path))

    def files(self) -> Iterator[tuple[int, int, str, int, float]]:
        """Yield (oid, tid, path, size, mtime) of all blobs. What comes or goes meanwhile may be missing."""
        with explained(f'The directory of blobs {self.directory} cannot be read'):
            yield from self._walk(self.directory)

    def remove_debris(self, older_than_seconds: float) -> None:
        """Remove the temporary files that killed processes have left."""
        with explained(f'The directory of blobs {self.directory} cannot be read'):
            self._temporary.remove_debris(older_than_seconds)

    def close(self) -> None:
        self._temporary.close()

    def _mark(self, layout: str) -> None:
        """Say which layout it is, before there is anything else: a directory without a mark is taken for a lawn."""
        marker = os.path.join(self.directory, LAYOUT_MARKER)
        if not os.path.exists(marker):
            own = f'{marker}.{os.urandom(8).hex()}'
            with open(own, 'w', encoding='utf-8') as file:
                file.write(layout)
            os.replace(own, marker)      # nobody sees an empty one

    def _place(self, oid: int, tid: int, staged: str) -> None:
        path = self.path(oid, tid)
        directory = os.path.dirname(path)
        while True:
            try:
                os.makedirs(directory, exist_ok=True)
                commit_mode(staged, directory)
                os.replace(staged, path)
                return
            except (FileNotFoundError, FileExistsError):
                if not (os.path.exists(staged) and _may_be_directory(directory)):
                    raise           # else a pack has removed a directory while it was empty

    def _take_back(self, staged: Mapping[int, str], tid: int) -> None:
        for oid, path in staged.items():
            if size_of(path) is None:
                try:
                    os.replace(self.path(oid, tid), path)
                    self._remove_empty(os.path.dirname(self.path(oid, tid)))
                except OSError as e:
                    log.error('%s belongs to a transaction that was not committed, and cannot be removed: %s.',
                              self.path(oid, tid), e)

    def _sync_directories(self, oids: Iterable[int]) -> None:
        """All above a file: they may be new, and whoever has made them may not have come so far."""
        above: dict[str, None] = {}
        for oid in oids:
            directory = self.helper.getPathForOID(oid)
            while directory not in above and len(directory) >= len(self.directory):
                above[directory] = None
                directory = os.path.dirname(directory)
        for directory in above:
            sync(directory)

    def _remove_empty(self, directory: str) -> None:
        """Remove a directory, and those above it, as far as they are empty."""
        with suppress(OSError):     # it is not
            while len(directory) > len(self.directory):
                os.rmdir(directory)
                directory = os.path.dirname(directory)

    def _walk(self, directory: str) -> Iterator[tuple[int, int, str, int, float]]:
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name):
                    yield from self._blob(entry)
                elif entry.name.startswith('0x') and entry.is_dir(follow_symlinks=False):
                    yield from self._walk(entry.path)

    def _blob(self, entry: os.DirEntry[str]) -> Iterator[tuple[int, int, str, int, float]]:
        try:
            oid, tid = map(u64, self.helper.splitBlobFilename(entry.path))
            status = entry.stat(follow_symlinks=False)
        except (ValueError, FileNotFoundError):     # in the directory of no oid, or gone
            return
        if stat.S_ISREG(status.st_mode) and entry.path == self.path(oid, tid):
            yield oid, tid, entry.path, status.st_size, status.st_mtime

    def _explained(self, oid: int, done: str = 'stored') -> AbstractContextManager[None]:
        return explained(f'The blob {oid:#x} cannot be {done} in {self.directory}')


def _write_all(file: IO[bytes], piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest):]


def _may_be_directory(path: str) -> bool:
    """Whether there is one, or nothing."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True
