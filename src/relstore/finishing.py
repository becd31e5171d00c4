"""Finishing: watches the commits that this process is finishing, and logs what keeps them waiting.

A finish is one message, which waits for the commit lock on the server, for minutes if it has to: failing then would
tear apart a transaction over several databases. A waiting thread cannot report anything, so another thread looks once
a second, asks the server on its own connection, and logs who is in the way. It ends after a while without commits.
"""
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from relstore.adapters.base import Adapter
from relstore.adapters.commits.base import AnyCommit
from relstore.errors import StorageError

log = logging.getLogger('relstore')

LOOK_EVERY_SECONDS = 1.0    # also the time after which a commit is late
REPEAT_SECONDS = 10.0       # between warnings about one commit
IDLE_SECONDS = 60.0         # without a commit, after which the thread ends


class Finishing:

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._under_way: dict[_Watched, _Watched] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, commit: AnyCommit) -> Iterator[None]:
        """Watch a commit while it is being finished."""
        watched = _Watched(commit)
        self._under_way[watched] = watched
        if self._thread is None:
            self._start()
        try:
            yield
        finally:
            self._under_way.pop(watched, None)      # None: a child process has cleared it
            if watched.told:
                log.info('A commit in %s has waited no longer, after %.1f s.', self._adapter,
                         time.monotonic() - watched.begun)

    def close(self) -> None:
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join(LOOK_EVERY_SECONDS)      # it may be waiting for a server that is gone

    def after_fork(self) -> None:
        closed, self._closed = self._closed.is_set(), threading.Event()
        if closed:
            self._closed.set()
        self._under_way.clear()
        self._lock, self._thread = threading.Lock(), None

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._watch, name='relstore finishing', daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        """Look regularly. Before ending look once more, for commits that saw this thread; others start a new one."""
        busy = time.monotonic()
        while not self._closed.wait(LOOK_EVERY_SECONDS):
            if self._under_way:
                busy = time.monotonic()
                self._look(busy)
            elif time.monotonic() > busy + IDLE_SECONDS:
                self._thread = None
                if self._under_way:
                    self._start()
                return

    def _look(self, now: float) -> None:
        for watched in list(self._under_way):
            if now > watched.begun + LOOK_EVERY_SECONDS and (not watched.told or now > watched.told + REPEAT_SECONDS):
                who = self._who(watched.commit)
                if who and watched in self._under_way:
                    watched.told = now
                    log.warning('A commit in %s has waited for %.1f s to be finished: %s is in its way.', self._adapter,
                                now - watched.begun, who)

    def _who(self, commit: AnyCommit) -> str:
        try:
            with closing(self._adapter.connect()) as session:
                return commit.finish_holders(session)
        except StorageError as e:
            return f'who cannot be asked ({e})'


class _Watched:
    """told: when it was last logged; 0.0: never."""
    __slots__ = ('begun', 'commit', 'told')

    def __init__(self, commit: AnyCommit):
        self.begun, self.commit, self.told = time.monotonic(), commit, 0.0
