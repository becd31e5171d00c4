"""Ledger: what all processes were told and were served, and whether that can be true of a database that loses nothing.

Each commit writes a value that no other writes, and names what it was derived from.  So a value tells who wrote it, and
when; whether it may be seen follows from what its writer was told.  Times are those of time.monotonic(), which is one
clock for all processes of a machine.
"""
from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ACKNOWLEDGED, FAILED, UNKNOWN = 'acknowledged', 'failed', 'unknown'


class Revision(NamedTuple):
    """What a view showed of an object. Values that nobody has written since the beginning are negative."""
    oid: int
    tid: int
    value: int


@dataclass
class Attempt:
    """One commit, as its writer knows it. bases: what it replaces; others: what else it was derived from."""
    value: int
    begun: float
    bases: list[Revision]
    others: list[Revision]
    outcome: str = UNKNOWN
    tid: int = 0                    # of an acknowledged one
    told: float = float('inf')
    why: str = ''                   # it failed

    @property
    def sources(self) -> list[Revision]:
        return self.bases + self.others


class Served(NamedTuple):
    """What a transaction that began at `begun` was served at `at`, and by whom: a cache, or the database."""
    begun: float
    at: float
    by: str
    revision: Revision


@dataclass
class Ledger:
    """Of one database. crashes: (about to be killed, accepting connections again)."""
    attempts: dict[int, Attempt] = field(default_factory=dict)      # by value
    served: list[Served] = field(default_factory=list)
    crashes: list[tuple[float, float]] = field(default_factory=list)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)  # (oid, tid) -> value: what is there in the end
    keeps_history: bool = True

    def faults(self) -> list[str]:
        """Return what should not have been, in words."""
        return [*self.lost(), *self.stored(), *self.derived(), *self.torn(), *self.tids(), *self.contents(),
                *self.late(), *self.stale()]

    def phantoms(self) -> collections.Counter[str]:
        """Return how many commits were seen that a crash then took away, by who served them."""
        return collections.Counter(by for by, _ in {(served.by, served.revision.value) for served in self.served
                                                    if self._crash_of(served.revision.value)})

    def with_outcome(self, outcome: str) -> list[Attempt]:
        return [attempt for attempt in self.attempts.values() if attempt.outcome == outcome]

    # what must be, and what must not

    def lost(self) -> Iterable[str]:
        """What was acknowledged is there; in a history-free database something newer may have taken its place."""
        current: dict[int, int] = {}
        for oid, tid in self.rows:
            current[oid] = max(tid, current.get(oid, 0))
        for attempt in self.with_outcome(ACKNOWLEDGED):
            for oid, *_ in attempt.bases:
                replaced = not self.keeps_history and current.get(oid, 0) > attempt.tid
                if self.rows.get((oid, attempt.tid)) != attempt.value and not replaced:
                    yield f'lost: {attempt}, of object {oid}'

    def stored(self) -> Iterable[str]:
        """What failed is not there."""
        there = set(self.rows.values())
        yield from (f'stored: {attempt}' for attempt in self.with_outcome(FAILED) if attempt.value in there)

    def derived(self) -> Iterable[str]:
        """Nothing is there that was derived from what is not."""
        for attempt in map(self.attempts.get, self._happened()):
            yield from (f'derived from what was lost: {attempt}, from {source}'
                        for source in attempt.sources if self._is(FAILED, source.value))

    def torn(self) -> Iterable[str]:
        """Each commit replaces the one before it, of each object."""
        chains = collections.defaultdict(list)
        for value, tid in self._happened().items():
            for base in self.attempts[value].bases:
                chains[base.oid].append((tid, base.tid, self.attempts[value]))
        for oid, chain in chains.items():
            chain.sort(key=lambda link: link[0])
            for (tid, _, before), (_, base, attempt) in zip(chain, chain[1:], strict=False):
                if base != tid:
                    yield f'torn: of object {oid}, {before} was ignored by {attempt}'

    def tids(self) -> Iterable[str]:
        """A commit has a higher tid than all that anybody knew of before it began, also if that was lost since."""
        known = [(attempt.told, attempt.tid) for attempt in self.with_outcome(ACKNOWLEDGED)]
        known += [(served.at, served.revision.tid) for served in self.served]
        highest = _Highest(known)
        for attempt in self.with_outcome(ACKNOWLEDGED):
            if attempt.tid <= (before := highest.before(attempt.begun)):
                yield f'fallen: {attempt}, though tid {before} was known'

    def contents(self) -> Iterable[str]:
        """A tid names one content of an object, everywhere and always."""
        contents = dict(self.rows)
        for served in self.served:
            oid, tid, value = served.revision
            if contents.setdefault((oid, tid), value) != value:
                yield f'two contents: {served}, which elsewhere is {contents[oid, tid]}'

    def late(self) -> Iterable[str]:
        """Nobody is served what failed, but a transaction that began before a crash that took it away was over."""
        for served in self.served:
            value = served.revision.value
            if self._is(FAILED, value):
                crash = self._crash_of(value)
                if crash is None or served.begun > crash[1]:
                    yield f'late: {served}, of {self.attempts[value]}'

    def stale(self) -> Iterable[str]:
        """A transaction sees what was acknowledged before it began."""
        acknowledged = collections.defaultdict(list)
        for attempt in self.with_outcome(ACKNOWLEDGED):
            for base in attempt.bases:
                acknowledged[base.oid].append((attempt.told, attempt.tid))
        highest = {oid: _Highest(known) for oid, known in acknowledged.items()}
        for served in self.served:
            oid, tid, _ = served.revision
            if oid in highest and tid < (before := highest[oid].before(served.begun)):
                yield f'stale: {served}, though tid {before} was acknowledged'

    # for these

    def _is(self, outcome: str, value: int) -> bool:
        return value in self.attempts and self.attempts[value].outcome == outcome

    def _happened(self) -> dict[int, int]:
        """Return {value: tid} of all commits that are there, or were until they were replaced."""
        values = {value: tid for (_, tid), value in self.rows.items()}
        happened = {}
        for attempt in self.with_outcome(ACKNOWLEDGED):
            values |= {source.value: source.tid for source in attempt.sources}
        for attempt in self.attempts.values():
            if attempt.outcome == ACKNOWLEDGED:
                happened[attempt.value] = attempt.tid
            elif attempt.outcome == UNKNOWN and attempt.value in values:
                happened[attempt.value] = values[attempt.value]
        return happened

    def _crash_of(self, value: int) -> tuple[float, float] | None:
        """Return the last crash that can have taken a failed commit away."""
        if not self._is(FAILED, value):
            return None
        attempt = self.attempts[value]
        return next((crash for crash in reversed(self.crashes)
                     if attempt.begun < crash[1] and crash[0] < attempt.told), None)


class _Highest:
    """The highest tid that was known, at any time. known: (since when, tid)."""

    def __init__(self, known: list[tuple[float, int]]):
        self._times, self._tids = [], []
        highest = 0
        for time, tid in sorted(known):
            highest = max(highest, tid)
            self._times.append(time)
            self._tids.append(highest)

    def before(self, time: float) -> int:
        """Return 0 if nothing was known."""
        at = bisect.bisect_left(self._times, time)
        return self._tids[at - 1] if at else 0
