"""The commits of this process that are being finished, watched for those that wait.

To finish is one message, which waits for the commit lock on the server for minutes, if it has to: to fail then would
tear a transaction over several databases. Whoever waits cannot tell anybody, so a thread looks at them once a second,
asks the server on a connection of its own, and logs who keeps them waiting. It ends after a while without commits.
"""
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from relstore.adapters.base import Adapter, Ticket
from relstore.errors import StorageError

log = logging.getLogger('relstore')

EVERY = 1.0         # seconds between looks, and after which a commit is late
REPEAT = 10.0       # seconds between warnings of one commit
IDLE = 60.0         # seconds without a commit after which the thread ends


class Finishing:

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._under_way: dict[_Commit, _Commit] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, ticket: Ticket) -> Iterator[None]:
        """While a commit is being finished. ticket: as vote has given it."""
        commit = _Commit(ticket)
        self._under_way[commit] = commit
        if self._thread is None and self._adapter.finish_waits:
            self._start()
        try:
            yield
        finally:
            self._under_way.pop(commit, None)       # a child process has forgotten it
            if commit.told:
                log.info('A commit in %s has waited no longer, after %.1f s.', self._adapter,
                         time.monotonic() - commit.begun)

    def close(self) -> None:
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join(EVERY)      # it may be waiting for a server that is gone

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
        """Before it ends it looks once more: who has begun before that sees it, and who begins afterwards a new one."""
        busy = time.monotonic()
        while not self._closed.wait(EVERY):
            if self._under_way:
                busy = time.monotonic()
                self._look(busy)
            elif time.monotonic() > busy + IDLE:
                self._thread = None
                if self._under_way:
                    self._start()
                return

    def _look(self, now: float) -> None:
        for commit in list(self._under_way):
            if now > commit.begun + EVERY and (not commit.told or now > commit.told + REPEAT):
                who = self._who(commit)
                if who and commit in self._under_way:
                    commit.told = now
                    log.warning('A commit in %s has waited for %.1f s to be finished: %s is in its way.', self._adapter,
                                now - commit.begun, who)

    def _who(self, commit: '_Commit') -> str:
        try:
            with closing(self._adapter.connect()) as session:
                return self._adapter.finish_holders(session, commit.ticket)
        except StorageError as e:
            return f'who cannot be asked ({e})'


class _Commit:
    """told: when it was logged, 0.0: never."""
    __slots__ = ('begun', 'ticket', 'told')

    def __init__(self, ticket: Ticket):
        self.begun, self.ticket, self.told = time.monotonic(), ticket, 0.0
