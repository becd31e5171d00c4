"""Neighbours: the other processes that have a database open, as far as the system tells. Linux does, in /proc.

A connection to a database in WAL mode holds a lock on one byte of main.sqlite3-shm as long as it is open. A relstore
process also holds a lock on a byte of writers.lock (queue.py), and takes that one first. A process with the former
lock and without the latter is a stranger. It is RelStorage if it has RelStorage's counter of oids open. RelStorage
opens that with its first new oid. So a stranger is also RelStorage if it has RelStorage's compiled modules loaded and
the database open for writing, but not writers.lock: a relstore process may have these modules loaded, and that file
open but not locked. Other strangers are the program sqlite3, a backup, a relstore that only reads, or an older one.

RelStorage and relstore must not write to a directory at the same time: RelStorage's connections do not know what
relstore promises its own. A process that has ended, however that was, holds no locks, so it keeps nobody out. Processes
of other containers are not seen.
"""
from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from relstore.adapters.queue import PRESENT

log = logging.getLogger('relstore')

# In /proc/locks: mode, process, file, first and last byte. An arrow marks a process that waits for a lock.
_LOCK = re.compile(r'\d+: POSIX +ADVISORY +(READ|WRITE) (\d+) (\S+) (\d+) (\d+)$')
# A module of RelStorage's, as the system maps it.
_COMPILED = re.compile(r'/relstorage/(cache/)?(_objectindex|_inthashmap|cache)\.\S*\.so$', re.MULTILINE)
WRITING_BYTE, OPEN_BYTE = 120, 128      # of main.sqlite3-shm: locked by the writer, and by all who have it open
LOOKS, BETWEEN_SECONDS = 3, 0.01        # a process may be seen at the moment when it comes or goes


class Neighbours:
    """Who else uses the database at `path`."""

    def __init__(self, path: Path):
        self._path = path

    def writer(self) -> str:
        """Return who holds the lock for writers."""
        holders = self._holders('-shm', WRITING_BYTE, 'WRITE')
        if not holders:
            return 'another process or thread'
        [pid, *_] = holders
        return 'another thread of this process' if pid == os.getpid() else f'the process {pid} ({_name(pid)})'

    def strangers(self) -> list[str]:
        """Return the other processes that have the database open and are not relstore."""
        return [f'the process {pid} ({_name(pid)})' for pid in sorted(self._seen(self._strangers))]

    def relstorage(self) -> str | None:
        """Return a process that certainly uses the database with RelStorage, or None."""
        found = self._seen(lambda: {pid for pid in self._strangers() if self._is_relstorage(pid)})
        return f'the process {min(found)} ({_name(min(found))})' if found else None

    def _seen(self, look: Callable[[], set[int]]) -> set[int]:
        """Return the processes that are found each time."""
        found = look()
        for _ in range(LOOKS - 1):
            if found:
                time.sleep(BETWEEN_SECONDS)
                found &= look()
        return found

    def _strangers(self) -> set[int]:
        here = self._holders('-shm', OPEN_BYTE, 'READ')
        return here and here - self._holders('', PRESENT, 'READ', 'writers.lock') - {os.getpid()}

    def _holders(self, suffix: str, byte: int, how: str, name: str = '') -> set[int]:
        path = self._path.resolve()
        path = path.with_name(name or path.name + suffix)
        return {pid for pid, kind, first, last in _locks(path) if kind == how and first <= byte <= last}

    def _is_relstorage(self, pid: int) -> bool:
        with suppress(OSError):         # it has ended, or is another user's
            files = list(_files(pid))
            if self._is_among(files, 'oids.sqlite3'):
                return True
            if self._is_among([file for file in files if file[1]], '') and not self._is_among(files, 'writers.lock'):
                return bool(_COMPILED.search(Path(f'/proc/{pid}/maps').read_text(errors='replace')))
        return False

    def _is_among(self, files: list[tuple[os.stat_result, bool]], name: str) -> bool:
        path = self._path.resolve()
        with suppress(FileNotFoundError):
            mine = os.stat(path.with_name(name or path.name))
            return any(os.path.samestat(mine, status) for status, _ in files)
        return False

    def look_for_myself(self) -> None:
        """Warn once if the locks of this process, which has the database open, are not listed."""
        path = self._path.resolve()
        shm = path.with_name(f'{path.name}-shm')
        listed = Path('/proc/locks').exists() and shm.exists()
        if listed and os.getpid() not in self._holders('-shm', OPEN_BYTE, 'READ') and self._path not in _warned:
            _warned.add(self._path)
            log.warning('The locks on %s cannot be found in /proc/locks, by reason of its file system: whether '
                        'RelStorage has the database open is not checked. It must not write to it now.', shm)


def _locks(path: Path) -> Iterator[tuple[int, str, int, int]]:
    """Yield (process, READ or WRITE, first byte, last byte) of each lock on a file.

    Not by fcntl, which needs the file to be open: closing it again would release all locks of this process on it.
    """
    with suppress(OSError):
        status = os.stat(path)
        file = f'{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}'
        for line in Path('/proc/locks').read_text().splitlines():
            lock = file in line and _LOCK.match(line)
            if lock and lock[3] == file and lock[5] != 'EOF':
                yield int(lock[2]), lock[1], int(lock[4]), int(lock[5])


def _files(pid: int) -> Iterator[tuple[os.stat_result, bool]]:
    """Yield (status, whether it is open for writing) of the files that a process has open."""
    for number in os.listdir(f'/proc/{pid}/fd'):
        with suppress(OSError):         # it is closed
            file = f'/proc/{pid}/fd/{number}'
            yield os.stat(file), bool(os.lstat(file).st_mode & stat.S_IWUSR)


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()
    return '?'


_warned: set[Path] = set()
