"""BlobCache: blobs of a database as files in a directory that many processes share, with a bound that always holds.

Files lie as in the caches of ZEO and RelStorage, whose warm cache is used on: <oid % 997>/<oid // 997>.<tid>.blob. A
revision never changes, so a file that is there is right, and it is served without a lock and without a question.

A file is written to the temporary directory of its process (temporary.py), which does not count. When it is complete
room is made, and it is renamed to where it belongs; where there is a bound, under one lock of all processes (clock.py).
So a process that is killed leaves nothing that counts, and nobody sees a part of a file.

A blob that finds no room, because it is larger than the bound or all others are open, is served from the temporary
directory, to one connection and until its transaction ends.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import BinaryIO, cast, overload

from ZODB.blob import LAYOUT_MARKER

from relstore.blobs.clock import Clock
from relstore.blobs.files import (
    File,
    commit_mode,
    explained,
    explanation,
    lock_open,
    move,
    remove,
    remove_if_closed,
    size_of,
    use,
)
from relstore.blobs.remover import Remover
from relstore.blobs.temporary import Temporary
from relstore.errors import ConfigurationError, StorageError, Unavailable

log = logging.getLogger('relstore')

# What ZEO and RelStorage call it.
LAYOUT = 'zeocache'
# What killed processes have left is removed after so many seconds.
ABANDONED = 24 * 3600

_open_file = partial(open, mode='rb')


class BlobCache:
    """The cache in `directory`, of at most `limit` bytes; None: without a bound.

    find() and open() may be called by any thread of any process. One connection, which is one thread at a time, has a
    cache of its own from new_instance(): it has its own large files.

    ConfigurationError: the directory cannot be used, or is none of a cache.
    """

    def __init__(self, directory: str, limit: int | None):
        self.directory = os.path.abspath(directory)
        with explained(f'The blob cache {self.directory} cannot be used'):
            os.makedirs(self.directory, exist_ok=True)
            self._check_layout()
            self._shared = _Shared(self.directory, limit)
        self._large = _Large()

    def new_instance(self) -> BlobCache:
        """Return the same cache for another connection."""
        other = object.__new__(BlobCache)
        other.directory, other._shared, other._large = self.directory, self._shared, _Large()
        return other

    def find(self, oid: int, tid: int) -> str | None:
        """Return the path of a blob that is cached. The file is there until others need the room."""
        path = self._shared.clock.path(oid, tid)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return self._large.find(oid, tid)
        except OSError as e:
            raise explanation(f'The blob {oid:#x} cannot be read in {self.directory}', e) from e
        use(path, status)
        return path

    @overload
    def open(self, oid: int, tid: int) -> BinaryIO | None: ...

    @overload
    def open(self, oid: int, tid: int, opener: Callable[[str], File]) -> File | None: ...

    def open(self, oid: int, tid: int, opener: Callable[[str], File] | None = None) -> File | BinaryIO | None:
        """Open a blob that is cached. The file is there until it is closed.

        opener: opens a path for reading, if it shall be something else than a BinaryIO. For ZODB's open blobs:
        lambda path: BlobFile(path, 'r', blob).
        """
        opener = cast(Callable[[str], File], opener or _open_file)
        try:
            file = lock_open(self._shared.clock.path(oid, tid), opener)
            if file is None and (path := self._large.find(oid, tid)) is not None:
                file = lock_open(path, opener)
        except OSError as e:
            raise explanation(f'The blob {oid:#x} cannot be opened in {self.directory}', e) from e
        return file

    def add(self, oid: int, tid: int, size: int, pieces: Iterable[bytes]) -> str:
        """Make fetched data a cached file, and return its path. It may be there already.

        StorageError: there are not `size` bytes, or they cannot be written. Then nothing is left of them.
        """
        source = self._shared.temporary.name(f'{oid:x}.{tid:x}')
        try:
            self._write(source, oid, size, pieces)
            return self._place(source, oid, tid, size)
        except BaseException:
            remove(source)
            raise

    def adopt(self, oid: int, tid: int, path: str) -> str:
        """Make a file that was committed a cached one, and return its path. The file at `path` is gone then.

        StorageError: it cannot be done. The file may be there or not; nothing else is left.
        """
        source = self._shared.temporary.name(f'{oid:x}.{tid:x}')
        try:
            with self._explained(oid):
                move(path, source)
                size = os.stat(source).st_size
            return self._place(source, oid, tid, size)
        except BaseException:
            remove(source)
            raise

    def discard(self, paths: Iterable[str]) -> None:
        """Remove files of new_path() that nobody needs any more, soon: nobody waits for that but close()."""
        self._shared.remover.remove(paths)

    def forget_large(self) -> None:
        """Remove the files that found no room, when the transaction has ended: but those that are open next time."""
        self._large.forget()

    def temporary_directory(self) -> str:
        """Return where uncommitted data goes: on the same file system, and not counted."""
        return self._shared.temporary.public()

    def new_path(self, oid: int) -> str:
        """Return the path of a file of this process's own that is not there yet, likewise."""
        return self._shared.temporary.name(f'{oid:x}')

    def size(self) -> int:
        """Return how many bytes are cached."""
        with explained(f'The blob cache {self.directory} cannot be counted'):
            return self._shared.clock.size()

    def close(self) -> None:
        """Give up the temporary directory, for all instances of this process."""
        self.forget_large()
        self._shared.remover.close()
        self._shared.temporary.close()

    def _check_layout(self) -> None:
        """A directory of blobs in another layout holds the only copy of them, perhaps."""
        marker = os.path.join(self.directory, LAYOUT_MARKER)
        try:
            with open(marker, encoding='utf-8') as file:
                layout = file.read().strip()
        except FileNotFoundError:
            layout = ''
        if not layout and any(name.startswith('0x') for name in os.listdir(self.directory)):
            layout = 'lawn'         # as ZODB calls what has no marker
        if not layout:
            with open(marker, 'w', encoding='utf-8') as file:
                file.write(LAYOUT)
        elif layout != LAYOUT:
            raise ConfigurationError(f'The directory {self.directory} holds blobs in the layout {layout}, and is no '
                                     'blob cache: either shared-blob-dir is true, or blob-dir is another directory.')

    def _write(self, path: str, oid: int, size: int, pieces: Iterable[bytes]) -> None:
        with self._explained(oid):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            written = 0
            for piece in pieces:
                written += len(piece)
                if written > size:
                    break
                with self._explained(oid):
                    _write_all(file, piece)
        finally:
            os.close(file)
        if written != size:
            found = 'more' if written > size else f'only {written}'
            raise StorageError(f'The blob {oid:#x} was to have {size} bytes, and has {found}.')

    def _place(self, source: str, oid: int, tid: int, size: int) -> str:
        with self._explained(oid):
            commit_mode(source, self.directory)
            path = self._shared.clock.put(source, oid, tid, size)
            if path is None:
                log.info('The blob %#x of %d bytes finds no room in the blob cache %s.', oid, size, self.directory)
                path = self._large.keep(oid, tid, source)
        return path

    def _explained(self, oid: int) -> AbstractContextManager[None]:
        return explained(f'The blob {oid:#x} cannot be kept in {self.directory}')


class _Large:
    """The files of one connection that found no room. A process that was forked has none of its parent's."""

    def __init__(self) -> None:
        self._process, self._paths = os.getpid(), dict[tuple[int, int], str]()

    def find(self, oid: int, tid: int) -> str | None:
        path = self._mine().get((oid, tid))
        return None if path is None or size_of(path) is None else path

    def keep(self, oid: int, tid: int, path: str) -> str:
        """Return where it is: here, or where it was before."""
        there = self.find(oid, tid)
        if there is None:
            self._mine()[oid, tid] = path
            return path
        os.unlink(path)
        return there

    def forget(self) -> None:
        for key, path in list(self._mine().items()):
            if remove_if_closed(path):
                self._paths.pop(key, None)

    def _mine(self) -> dict[tuple[int, int], str]:
        if self._process != os.getpid():
            self._process, self._paths = os.getpid(), {}
        return self._paths


class _Shared:
    """What all instances of a process have together."""

    def __init__(self, directory: str, limit: int | None):
        self.temporary = Temporary(directory)
        self.temporary.remove_debris(ABANDONED)
        self.remover = Remover()
        self.clock = Clock(directory, limit)
        try:
            self.clock.begin()
        except Unavailable as e:
            log.warning('%s', e)        # what others have put there is counted later


def _write_all(descriptor: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest):]
