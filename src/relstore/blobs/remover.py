"""Remover: removes files that nobody needs any more in a thread of its own, so that no commit waits for it.

ZODB empties a file of a blob as it opens it to write. ext4 then gives such a file its blocks when it is closed, and to
free them again may take longer than all the rest of a small commit: with the option `discard` the disk is told of each.
"""
import logging
import os
import threading
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from relstore.blobs.files import remove

log = logging.getLogger('relstore')

WAITING = 100           # files, from which on whoever brings one removes it himself
IDLE_SECONDS = 1.0      # after which the thread ends


class Remover:
    """Threads share it. A process that was forked removes nothing of its parent's."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process, self._paths = os.getpid(), SimpleQueue[str | None]()
        self._lock = threading.Lock()       # guards what follows
        self._thread: threading.Thread | None = None

    def remove(self, paths: Iterable[str]) -> None:
        """Have files removed soon."""
        if self._process != os.getpid():
            self._begin()
        for path in paths:
            if self._paths.qsize() >= WAITING:
                _remove(path)
                continue
            self._paths.put(path)       # before one looks for the thread, which ends when nothing is there
            if not self._started() and (waiting := self._paths.get()) is not None:
                _remove(waiting)

    def close(self) -> None:
        """Wait until all are removed."""
        if self._process == os.getpid() and (thread := self._thread) is not None:
            self._paths.put(None)
            thread.join()

    def _started(self) -> bool:
        """See that there is a thread; there can be none once the interpreter is ending."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name='relstore blob files', daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            try:
                path = self._paths.get(timeout=IDLE_SECONDS)
            except Empty:
                path = None
            if path is not None:
                _remove(path)
                continue
            with self._lock:
                if self._paths.empty():
                    self._thread = None
                    return


def _remove(path: str) -> None:
    try:
        remove(path)
    except OSError as e:
        log.warning('The file %s of a blob that was committed cannot be removed: %s.', path, e)
