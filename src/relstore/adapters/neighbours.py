"""Neighbours: the other processes that have a database open, as far as the system tells. Linux does, in /proc.

A connection to a database in WAL mode holds a lock on one byte of main.sqlite3-shm as long as it is open. A relstore
process holds one on a byte of writers.lock besides (queue.py), and takes it first. Who has the former and not the
latter is a stranger: RelStorage, if it has its counter of oids open as well, or RelStorage's compiled modules loaded;
else the program sqlite3, a backup, or a relstore of before.

RelStorage and relstore must not write to one directory at once: RelStorage's connections cannot be told what relstore
promises its own. A process that has ended, in whichever way, holds no locks: what it left behind keeps nobody out.
Processes of other containers are not seen.
"""
from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from relstore.adapters.queue import PRESENT

# In /proc/locks: how, the process, the file, and which bytes of it. Who waits for a lock is marked by an arrow.
_LOCK = re.compile(r'\d+: POSIX +ADVISORY +(READ|WRITE) (\d+) (\S+) (\d+) (\d+)$')
# A module of RelStorage's, as the system maps it.
_COMPILED = re.compile(r'/relstorage/(cache/)?(_objectindex|_inthashmap|cache)\.\S*\.so$', re.MULTILINE)
WRITING, OPEN = 120, 128        # bytes of main.sqlite3-shm: locked by who writes, and by all who have it open
LOOKS, BETWEEN = 3, 0.01        # a process may be seen in the moment in which it comes or goes


class Neighbours:
    """Who else uses the database at `path`."""

    def __init__(self, path: Path):
        self._path = path

    def writer(self) -> str:
        """Return who holds the lock for writers."""
        holders = self._holders('-shm', WRITING, 'WRITE')
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
                time.sleep(BETWEEN)
                found &= look()
        return found

    def _strangers(self) -> set[int]:
        here = self._holders('-shm', OPEN, 'READ')
        return here and here - self._holders('', PRESENT, 'READ', 'writers.lock') - {os.getpid()}

    def _holders(self, suffix: str, byte: int, how: str, name: str = '') -> set[int]:
        path = self._path.with_name(name or self._path.name + suffix)
        return {pid for pid, kind, first, last in _locks(path) if kind == how and first <= byte <= last}

    def _is_relstorage(self, pid: int) -> bool:
        with suppress(OSError):         # it has ended, or is another user's
            if _COMPILED.search(Path(f'/proc/{pid}/maps').read_text(errors='replace')):
                return True
            oids = os.stat(self._path.with_name('oids.sqlite3'))
            for file in os.listdir(f'/proc/{pid}/fd'):
                with suppress(OSError):
                    if os.path.samestat(os.stat(f'/proc/{pid}/fd/{file}'), oids):
                        return True
        return False


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


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()
    return '?'
