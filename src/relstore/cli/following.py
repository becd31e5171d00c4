"""Following: `relstore convert --follow`, which goes on copying what is committed to the source."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from persistent.TimeStamp import TimeStamp
from transaction.interfaces import TransientError

from relstore.cli import databases
from relstore.cli.errors import sentence
from relstore.cli.progress import counted, duration
from relstore.cli.signals import Signals
from relstore.converting.conversion import Conversion
from relstore.errors import OutcomeUnknown

PAUSE_SECONDS = 1.0     # between two looks for what is new in the source
MISSED_LOOKS = 5        # at a file that is not there; then it is an error
TOLD_SECONDS = 10.0     # between two lines that tell how far behind a copy is


class Stopped(Exception):
    """By a signal, after a whole transaction."""


class Follower:
    """source: as it is named. again: opens it anew. conversion: has copied what there was."""

    def __init__(self, source: databases.Named, again: Callable[[], Conversion], conversion: Conversion,
                 stopped: Signals):
        self._source, self._again, self._conversion, self._stopped = source, again, conversion, stopped
        self._states: list[object] = []     # of the files of FileStorages in the source, when they were looked at last
        self._missed = 0        # how often since then one of them was not there
        self._told = time.monotonic()

    def follow(self, until_idle: float | None) -> Conversion:
        """Copy what comes. Return what has done that, when nothing has come for so many seconds.

        Stopped: by a signal.
        """
        print('All is copied. Following.', flush=True)
        new = time.monotonic()
        lost = ''       # how a connection was
        while until_idle is None or time.monotonic() - new < until_idle:
            if self._stopped:
                raise Stopped
            time.sleep(PAUSE_SECONDS)
            before = self._conversion.copied.transactions
            try:
                if not self._look_again():
                    continue
                self._conversion.copy(self._advance)
            except (TransientError, OutcomeUnknown) as error:
                # Whether the source is idle is not known then, nor whether a file was read to its end.
                new, self._states = time.monotonic(), []
                if str(error) != lost:
                    lost = str(error)
                    print(f'{sentence(error)} Trying again.', file=sys.stderr, flush=True)
                continue
            lost = ''
            if self._conversion.copied.transactions > before:
                new = time.monotonic()
            self._tell(self._conversion.destination.lastTransaction())
        return self._conversion

    def _advance(self, tid: bytes, records: int, size: int) -> None:
        self._tell(tid)
        if self._stopped:
            raise Stopped

    def _tell(self, tid: bytes) -> None:
        """Tell now and then how far behind a copy is that has a transaction as its newest."""
        now = time.monotonic()
        if now - self._told > TOLD_SECONDS:
            self._told = now
            copied = counted(self._conversion.copied.transactions, 'transaction')
            print(f'{copied} copied, up to {TimeStamp(tid)!s:.19}: {behind(tid, self._conversion.last_of_source)}.',
                  flush=True)

    def _look_again(self) -> bool:
        """Whether there may be something new. A FileStorage is as it was when it was opened, so it is opened again."""
        if self._source.paths:
            states = [_state(path) for path in self._source.paths]
            if None in states and self._missed < MISSED_LOOKS:
                self._missed += 1
                return False
            if states == self._states:
                return False
            self._states, self._missed = states, 0
            copied, self._conversion = self._conversion.copied, self._again()
            self._conversion.copied = copied
        return True


def behind(tid: bytes, last: bytes) -> str:
    """Return how far behind a copy is whose newest transaction has this tid. last: that of the source."""
    if tid >= last:
        return 'level with the source'
    return f'{duration(TimeStamp(last).timeTime() - TimeStamp(tid).timeTime())} behind the source'


def _state(path: str) -> object:
    """Return what changes with a file. None: it is not there, for a moment where a pack puts another into its place."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
