"""Halves: the snapshots from which somebody has read what is younger than a tid, and may read what is older.

Whoever collects garbage calls iterator(T), in every database, and then iterator(None, T). Both have to be of one
snapshot: an object that is changed in between is in neither otherwise. He may be at the other end of a network, and
nothing tells whether he will come for the rest. So its snapshot is kept for some time, and when it is gone the rest is
an error, for good, until somebody begins at T again.

One snapshot may stand for several that were begun: what an older one has up to T is all that a newer one has up to T,
as long as nothing up to T was committed between them, and what was changed or deleted since. So of those that begin at
one T the first is kept; and where no more are kept, another one that has all of it.

Not thread-safe: its owner locks.
"""
from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from relstore.errors import Unavailable

if TYPE_CHECKING:
    from relstore.walk import Walk

# Seconds for which a snapshot is kept that nobody reads: all databases of a collector have their first half before the
# first one has its second.
HALF_IDLE = 3600.0
# Snapshots that are kept like that by one storage instance.
KEPT = 8
# Tids that are remembered, with or without a snapshot.
REMEMBERED = 10000


def _nothing() -> None:
    """What a reference to a walk returns that is not there any more."""


class Half:
    """The snapshot for what is older than one tid.

    readers: those from which what is younger is read; while they are used this is not idle.
    """

    def __init__(self, walk: Walk, kept: bool):
        self._walk: Callable[[], Walk | None] = weakref.ref(walk)      # its iterator may keep it for longer than we do
        self.kept = walk if kept and walk.use() else None
        self.readers: weakref.WeakSet[Walk] = weakref.WeakSet([walk])
        self.asked_for = False              # has anybody come for what is older?

    @property
    def walk(self) -> Walk | None:
        walk = self._walk()
        return walk if walk is not None and walk.is_open else None

    @property
    def used(self) -> float:
        return max(walk.used for walk in [self.kept, *self.readers] if walk is not None)

    def unkeep(self) -> list[Walk]:
        """Return what is not needed here any more: the caller leaves it."""
        walk, self.kept = self.kept, None
        return [walk] if walk is not None else []

    def give_up(self) -> list[Walk]:
        self._walk = _nothing
        return self.unkeep()


class Halves:

    def __init__(self) -> None:
        self._at: dict[int, Half] = {}

    def older(self, tid: int) -> Walk | None:
        """Return the snapshot for what is older, for which the caller has to `leave`; None if none ever began there.

        Unavailable if it is gone.
        """
        half = self._at.get(tid)
        if half is None:
            return None
        half.asked_for = True
        walk = half.walk
        if walk is None or not walk.use():
            raise Unavailable('What is younger was read from a snapshot that is gone: nobody read from it for '
                              f'{HALF_IDLE:g} s, its connection was lost, its storage or process is another one or '
                              f'closed, {KEPT} others were kept already, or somebody else began there too; begin '
                              'again with what is younger.')
        return walk

    def candidates(self, tid: int) -> list[Walk]:
        """Return the walks of which `add` has to know whether they have all up to tid."""
        half = self._at.get(tid)
        if half is not None and half.walk is not None:
            return [half.walk]
        kept = self._walks()
        return list(kept) if len(kept) >= KEPT else []

    def add(self, tid: int, walk: Walk, enough: list[Walk]) -> list[Walk]:
        """Remember that what is younger than tid is read from a walk. Return those that the caller is to leave.

        enough: of the candidates, which are older, those that have all that this walk has up to tid.
        """
        half = self._at.get(tid)
        if half is not None and half.walk is not None:
            if half.walk not in enough:
                return half.give_up()       # nobody could tell which of both was meant
            half.readers.add(walk)
        elif half is None or half.asked_for:
            self._at.pop(tid, None)
            self._at[tid] = self._new(walk, enough)
            return self._forget()
        # Otherwise there is one who has to be told yet that what he began is gone.
        return []

    def _new(self, walk: Walk, enough: list[Walk]) -> Half:
        kept = self._walks()
        if len(kept) < KEPT:
            return Half(walk, True)
        other = next((other for other in enough if other in kept and other.is_open), None)
        half = Half(other or walk, other is not None)
        half.readers.add(walk)
        return half

    def _walks(self) -> set[Walk]:
        return {half.kept for half in self._kept() if half.kept is not None and half.kept.is_open}

    def _forget(self) -> list[Walk]:
        if len(self._at) <= REMEMBERED:
            return []
        first = next((tid for tid, half in self._at.items() if half.kept is None), next(iter(self._at)))
        return self._at.pop(first).give_up()

    def idle(self) -> list[Walk]:
        """Keep what is idle no longer. Return it: the caller leaves it."""
        now = time.monotonic()
        return [walk for half in self._kept() if now - half.used >= HALF_IDLE for walk in half.unkeep()]

    def due(self) -> float | None:
        """Return the seconds until one may be idle, or None."""
        now = time.monotonic()
        return min((half.used + HALF_IDLE - now for half in self._kept()), default=None)

    def _kept(self) -> list[Half]:
        return [half for half in self._at.values() if half.kept is not None]

    def give_up(self) -> list[Walk]:
        """Remember where they began, and nothing else."""
        return [walk for half in self._at.values() for walk in half.give_up()]

    def forked(self) -> None:
        """Of the parent's nothing can be used here; whoever comes for a rest is told."""
        for half in self._at.values():
            half.give_up()
            half.asked_for = True       # who began is not here
