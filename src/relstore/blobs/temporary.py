"""Temporary: directories for files that are not committed, in a directory of blobs.

ZODB and applications have one, `tmp`, and what is there is told to be left behind by its age alone. Files that are
about to be committed, or have just been fetched, are in one that each process has of its own, below `.relstore`. It
keeps a file there locked. The system gives that lock back however a process ends, so a directory whose lock is free was
left behind, and is removed with what is in it. It has to be of some age besides, since one that was just made is not
locked yet. On a file system without locks nothing is removed: nobody could tell.
"""
import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress

from relstore.blobs.files import explained

log = logging.getLogger('relstore')

PREFIX = 'relstore-'
LOCK = '.lock'


class Temporary:
    """directory: that of the blobs. Threads share this object."""

    def __init__(self, directory: str):
        self._public, self._parent = os.path.join(directory, 'tmp'), os.path.join(directory, '.relstore')
        self._process, self._lock = os.getpid(), threading.Lock()       # guards what follows
        self._own = ''
        self._pid = self._descriptor = -1
        self._numbers = itertools.count()

    def public(self) -> str:
        """Return the directory for what is not stored yet, where ZODB's other storages have it."""
        with explained(f'The directory {self._public} cannot be made'):
            os.makedirs(self._public, exist_ok=True)
        return self._public

    def _directory(self) -> str:
        """Return the directory of this process. One that was forked makes another."""
        if self._process != os.getpid():        # the lock may be that of a thread that is not here
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            if self._pid != os.getpid() or not os.path.isdir(self._own):
                with explained(f'No temporary directory can be made in {self._parent}'):
                    self._make()
            return self._own

    def name(self, stem: str) -> str:
        """Return the path of a file that is not there yet."""
        return os.path.join(self._directory(), f'{stem}.{next(self._numbers)}')

    def remove_debris(self, older_than: float) -> None:
        """Remove what killed processes have left there, once it is older than so many seconds."""
        before = time.time() - older_than
        for entry in (*_entries(self._public), *_entries(self._parent)):
            try:
                status = entry.stat(follow_symlinks=False)
                if max(status.st_mtime, status.st_ctime) >= before:     # a file that was moved here keeps its mtime
                    continue
                if entry.name.startswith(PREFIX):
                    _remove_abandoned(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue        # somebody else looks, too
            except OSError as e:
                log.info('%s was left behind by a process that was killed, and cannot be removed: %s.', entry.path, e)

    def close(self) -> None:
        """Give the directory up, and remove it if it is empty."""
        with self._lock:
            if self._pid == os.getpid() and self._descriptor >= 0:
                with suppress(OSError):
                    if os.listdir(self._own) == [LOCK]:
                        os.unlink(os.path.join(self._own, LOCK))
                        os.rmdir(self._own)
                os.close(self._descriptor)
            self._pid = self._descriptor = -1

    def _make(self) -> None:
        os.makedirs(self._parent, exist_ok=True)
        own = tempfile.mkdtemp('', f'{PREFIX}{os.getpid()}-', self._parent)
        descriptor = os.open(os.path.join(own, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):     # there are no locks here: nobody will remove it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if self._descriptor >= 0:
            os.close(self._descriptor)      # of one that was removed, or the parent's, who keeps it locked
        self._own, self._pid, self._descriptor = own, os.getpid(), descriptor


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(directory))
    except FileNotFoundError:
        return []


def _remove_abandoned(directory: str) -> None:
    """Remove a directory whose process has ended; one without a lock is of one that was killed when it made it."""
    try:
        descriptor = os.open(os.path.join(directory, LOCK), os.O_RDWR)
    except FileNotFoundError:
        shutil.rmtree(directory)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return          # it is in use
    else:
        shutil.rmtree(directory)
    finally:
        os.close(descriptor)
