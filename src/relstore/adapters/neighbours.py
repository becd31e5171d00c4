"""Neighbours: the other processes that have a database open, as far as the system tells. Linux does, in /proc.

A connection to a database in WAL mode holds a lock on one byte of main.sqlite3-shm as long as it is open. A relstore
process holds one on a byte of writers.lock besides (queue.py), and takes it first. Who has the former and not the
latter is a stranger. It is RelStorage if it has its counter of oids open as well; and that is opened with the first
new oid, so also if RelStorage's compiled modules are loaded and it has the database open to write, but not
writers.lock: relstore may have those modules loaded, and that file open but not locked. All others are the program
sqlite3, a backup, a relstore that reads, or one of before.

RelStorage and relstore must not write to one directory at once: RelStorage's connections cannot be told what relstore
promises its own. A process that has ended, in whichever way, holds no locks: what it left behind keeps nobody out.
Processes of other containers are not seen.
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

# In /proc/locks: how, the process, the file, and which bytes of it. Who waits for a lock is marked by an arrow.
_LOCK = re.compile(r'\d+: POSIX +ADVISORY +(READ|WRITE) (\d+) (\S+) (\d+) (\d+)$')
# A module of RelStorage's, as the system maps it.
_COMPILED = re.compile(r'/relstorage/(cache/)?(_objectindex|_inthashmap|cache)\.\S*\.so$', re.MULTILINE)
WRITING_BYTE, OPEN_BYTE = 120, 128      # of main.sqlite3-shm: locked by who writes, and by all who have it open
LOOKS, BETWEEN_SECONDS = 3, 0.01        # a process may be seen in the moment in which it comes or goes


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
        """Return a process that uses the database with RelStorage, for certain."""
        found = self._seen(lambda: {pid for pid in self._strangers() if self._is_relstorage(pid)})
        return f'the process {min(found)} ({_name(min(found))})' if found else None

    def _seen(self, look: Callable[[], set[int]]) -> set[int]:
        """Return the processes that are found again and again."""
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
        """Warn, once, where the locks of this process, which has the database open, are not listed."""
        path = self._path.resolve()
        shm = path.with_name(f'{path.name}-shm')
        listed = Path('/proc/locks').exists() and shm.exists()
        if listed and os.getpid() not in self._holders('-shm', OPEN_BYTE, 'READ') and self._path not in _warned:
            _warned.add(self._path)
            log.warning('The locks on %s cannot be found in /proc/locks, by reason of its file system: whether '
                        'RelStorage has the database open is not checked. It must not write to it now.', shm)


def _locks(path: Path) -> Iterator[tuple[int, str, int, int]]:
    """Yield (process, READ or WRITE, first byte, last byte) of the locks on a file.

    Asking for them by fcntl would need the file to be opened, and closing it again would drop all the locks that this
    process has on it.
    """
    with suppress(OSError):
        status = os.stat(path)
        file = f'{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}'
        for line in Path('/proc/locks').read_text().splitlines():
            lock = file in line and _LOCK.match(line)
            if lock and lock[3] == file and lock[5] != 'EOF':
                yield int(lock[2]), lock[1], int(lock[4]), int(lock[5])


def _files(pid: int) -> Iterator[tuple[os.stat_result, bool]]:
    """Yield the files that a process has open, and whether to write."""
    for number in os.listdir(f'/proc/{pid}/fd'):
        with suppress(OSError):         # it is closed
            file = f'/proc/{pid}/fd/{number}'
            yield os.stat(file), bool(os.lstat(file).st_mode & stat.S_IWUSR)


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()
    return '?'


_warned: set[Path] = set()
