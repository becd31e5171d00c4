"""File: which file bears the name of an SQLite database, and which one a session has open.

A backup may be renamed into the place of the file while sessions have it open. They would go on with the deleted
file, and what they commit would be lost with it. So each poll and each vote compares the file that the session has open
with the one that bears the name: by device and inode, which no other file can have while the session is open.

SQLite makes it worse, because it finds the files that belong to a database by name only:

* The last connection to be closed removes the write-ahead log that bears the name. By then that is the log of the new
  file, with commits in it. So a connection to a replaced file is never closed, not even when the process ends.
* If the old file's log and index are left, they are taken for those of the new file, and pages are mixed. A process
  that knows them as those of the old file does not open the new one. A process that was started later cannot know.
"""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relstore.errors import Disconnected, Unavailable

if TYPE_CHECKING:
    from relstore.adapters.filesession import FileSession

BESIDE = '-wal', '-shm'


class File:
    """The file of one database, as the sessions of this process have known it."""

    def __init__(self, path: Path):
        self.path, self._name = path, str(path)
        self._beside: dict[str, set[str]] = {}      # by file: the log and index that lay beside it

    def now(self) -> str:
        """Return an identity of the file that bears the name. No other file can have it while the file is open."""
        try:
            return _identity(self.path)
        except OSError as e:
            raise Unavailable(f'The database {self.path} is not there: {e.strerror}.') from e

    def about_to_open(self) -> str:
        """Return the file. Unavailable: what lies beside it belongs to a file that it has replaced."""
        file, beside = self.now(), self._lies_beside()
        for other, theirs in self._beside.items():
            if other != file and beside & theirs:
                raise Unavailable(
                    f'{self.path} was replaced while it was in use, and the write-ahead log beside it is that of the '
                    f'old file: stop whatever has it open, remove {self.path.name}-wal and {self.path.name}-shm, and '
                    'put the backup in its place again.')
        return file

    def opened(self, session: FileSession) -> None:
        """Remember what lies beside the file, after the session has read from it.

        Each session does, because the log is a new one if nobody had the file open in between.
        """
        beside = self._lies_beside()
        if not self.is_replaced(session):
            self._beside[session.file] = beside

    def _lies_beside(self) -> set[str]:
        found = set()
        for suffix in BESIDE:
            with suppress(FileNotFoundError):
                found.add(suffix + _identity(f'{self.path}{suffix}'))
        return found

    def is_replaced(self, session: FileSession) -> bool:
        try:
            return session.file != self.now()
        except Unavailable:
            return True

    def compare(self, session: FileSession) -> None:
        """Disconnected: the session has another file open than the one that bears the name."""
        try:
            status = os.stat(self._name)
            same = session.file == f'.{status.st_dev}.{status.st_ino}'      # as _identity
        except OSError:
            same = session.file == self.now()
        if not same:
            session.broken = True
            raise Disconnected(f'The file {self.path} that was open has been replaced.')


def _identity(path: Path | str) -> str:
    status = os.stat(path)
    return f'.{status.st_dev}.{status.st_ino}'
