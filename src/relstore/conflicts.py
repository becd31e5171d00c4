"""Conflicts: counts which objects cause conflicts, and how long commits wait for locks."""
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ZODB.utils import p64

from relstore.adapters.numbers import COMMIT_LOCK, EVERYBODY, SOME_OBJECTS

OBJECTS = 1000          # remembered
PERIOD_SECONDS = 60.0   # at least, between two lines in the log
TOP = 5                 # objects in a line

log = logging.getLogger('relstore.conflicts')       # a separate logger, so that it can have its own level


class ObjectConflicts(NamedTuple):
    """What one object has cost, in this process.

    conflicts: how often a transaction was based on a revision that was no longer current when it was committed; each
    was resolved or failed. waited: seconds that commits waited for its lock, including in vain. last: when any of this
    last happened, in seconds since 1970.
    """
    oid: bytes
    class_name: str     # with its module; '' if unknown
    conflicts: int
    resolved: int
    failed: int
    waited: float
    last: float


@dataclass(slots=True)
class _Tally:
    class_name: str = ''
    resolved: int = 0
    failed: int = 0
    waited: float = 0.0
    last: float = 0.0

    @property
    def rank(self) -> tuple[int, float, float]:
        return self.resolved + self.failed, self.waited, self.last


@dataclass(slots=True)
class _Period:
    """Counts since one moment. With too many objects, the quarter with the fewest conflicts is forgotten."""
    began: float = field(default_factory=time.monotonic)
    resolved: int = 0
    failed: int = 0
    deadlocks: int = 0
    lock_timeouts: int = 0
    waited_objects: float = 0.0
    waited_commit: float = 0.0
    waited_everybody: float = 0.0
    waited_in_vain: float = 0.0
    longest_wait: float = 0.0
    objects: dict[int, _Tally] = field(default_factory=dict)

    def conflict(self, oid: int, class_name: str, resolved: bool) -> None:
        tally = self._tally(oid, class_name)
        for counts in self, tally:
            counts.resolved += resolved
            counts.failed += not resolved

    def wait(self, lock: int, class_name: str, seconds: float) -> None:
        self.longest_wait = max(self.longest_wait, seconds)
        if lock == COMMIT_LOCK:
            self.waited_commit += seconds
        elif lock == EVERYBODY:
            self.waited_everybody += seconds
        else:
            self.waited_objects += seconds
            if lock != SOME_OBJECTS:
                self._tally(lock, class_name).waited += seconds

    def lock_timeout(self, lock: int | None, class_name: str, seconds: float) -> None:
        self.longest_wait = max(self.longest_wait, seconds)
        self.lock_timeouts += 1
        self.waited_in_vain += seconds
        if lock is not None and lock >= 0:
            self._tally(lock, class_name).waited += seconds

    def deadlock(self) -> None:
        self.deadlocks += 1

    def top(self, count: int) -> list[tuple[int, _Tally]]:
        return sorted(self.objects.items(), key=lambda item: item[1].rank, reverse=True)[:count]

    def _tally(self, oid: int, class_name: str) -> _Tally:
        if oid not in self.objects and len(self.objects) >= OBJECTS:
            self.objects = dict(self.top(OBJECTS * 3 // 4))
        tally = self.objects.setdefault(oid, _Tally())
        tally.class_name = class_name or tally.class_name
        tally.last = time.time()
        return tally


class Conflicts:
    """Counts since this process opened the database. Thread-safe and bounded; a commit without conflicts or waits
    takes no lock, unless earlier ones have not been logged yet.

    Counts are logged together in one line, at most once a minute: as a WARNING if transactions failed, otherwise as
    INFO. Single events are logged as DEBUG.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Start afresh in a child process: the parent's counts are the parent's."""
        self._lock = threading.Lock()
        self._commits = 0
        self._all = _Period()
        self._untold: _Period | None = None     # what has not been logged yet, if anything
        self._told = -PERIOD_SECONDS            # when it was last logged, by the monotonic clock

    def committed(self, waited: float) -> None:
        """Count a commit, and the seconds that its finish waited for the commit lock."""
        self._commits += 1
        if waited:
            self.waited(COMMIT_LOCK, waited)
        elif self._untold is not None:
            self._tell()

    def conflict(self, oid: int, class_name: str, resolved: bool) -> None:
        log.debug('Conflict on oid %#x, class %s: %s', oid, class_name, 'resolved' if resolved else 'failed')
        self._count(lambda period: period.conflict(oid, class_name, resolved))

    def waited(self, lock: int, seconds: float, class_name: str = '') -> None:
        """Count the wait of a commit for an object's lock or another; see adapters.base."""
        log.debug('Waited %.3f s for lock %#x %s', seconds, lock, class_name)
        self._count(lambda period: period.wait(lock, class_name, seconds))

    def lock_timeout(self, seconds: float, lock: int | None = None, class_name: str = '') -> None:
        """Count a commit that was given up because a lock was not free: an object's, another, or None: unknown."""
        self._count(lambda period: period.lock_timeout(lock, class_name, seconds))

    def deadlock(self) -> None:
        self._count(_Period.deadlock)

    def objects(self) -> list[ObjectConflicts]:
        """Return what is known of each object, the most conflicts first."""
        with self._lock:
            return [ObjectConflicts(p64(oid), tally.class_name, tally.resolved + tally.failed, tally.resolved,
                                    tally.failed, tally.waited, tally.last) for oid, tally in self._all.top(OBJECTS)]

    def stats(self) -> dict[str, int | float]:
        counts = self._all
        return {
            'commits': self._commits,
            'conflicts_resolved': counts.resolved,
            'conflicts_failed': counts.failed,
            'deadlocks': counts.deadlocks,
            'lock_timeouts': counts.lock_timeouts,
            'waited_objects': counts.waited_objects,
            'waited_commit': counts.waited_commit,
            'waited_everybody': counts.waited_everybody,
            'waited_in_vain': counts.waited_in_vain,
            'longest_wait': counts.longest_wait,
        }

    def close(self) -> None:
        """Log what was not logged yet, and forget everything."""
        self._tell(at_once=True)
        self.after_fork()

    def _count(self, event: Callable[[_Period], None]) -> None:
        with self._lock:
            if self._untold is None:
                self._untold = _Period()
            for period in self._all, self._untold:
                event(period)
        self._tell()

    def _tell(self, at_once: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            if self._untold is None or now < self._told + PERIOD_SECONDS and not at_once:
                return
            untold, self._untold, self._told = self._untold, None, now
        log.log(logging.WARNING if untold.failed or untold.deadlocks or untold.lock_timeouts else logging.INFO,
                '%s', _line(untold, now))


def _line(period: _Period, now: float) -> str:
    waited = period.waited_objects + period.waited_commit + period.waited_everybody + period.waited_in_vain
    facts = [(period.resolved, 'conflicts resolved'), (period.failed, 'conflicts failed'),
             (period.deadlocks, 'deadlocks'), (period.lock_timeouts, 'lock timeouts')]
    said = [f'{count} {what}' for count, what in facts if count]
    if waited:
        said.append(f'{waited:.3f} s waited for locks (the longest {period.longest_wait:.3f} s)')
    line = f'In the last {now - period.began:.0f} s: {", ".join(said)}.'
    for oid, tally in period.top(TOP):
        line += (f' Oid {oid:#x}, class {tally.class_name or "?"}: {tally.resolved} resolved, {tally.failed} failed, '
                 f'{tally.waited:.3f} s waited.')
    return line
