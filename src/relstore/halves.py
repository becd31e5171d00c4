"""Halves: snapshots from which a caller has read what is newer than a tid, and may still read what is older.

A garbage collector calls iterator(T) in every database, and then iterator(None, T). Both must read one snapshot:
otherwise an object that is changed in between is in neither. The collector may be at the other end of a network, and
may never come for the rest. So the snapshot is kept for some time; once it is gone, asking for the rest is an error,
until somebody begins at T again.

One snapshot may serve for several that were begun: up to T, an older one has everything that a newer one has, provided
that nothing up to T was committed between them, and also what was changed or deleted since. So of those that begin at
one T the first is kept; and when no more can be kept, another one that has everything is used.

Not thread-safe: the owner locks.
"""
from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from relstore.errors import Unavailable

if TYPE_CHECKING:
    from relstore.walk import Walk

# How long a snapshot that nobody reads is kept: a collector reads the first half of all its databases before the second
# half of any.
HALF_IDLE_SECONDS = 3600.0
# Snapshots kept like that by one storage instance.
KEPT = 8
# Tids remembered, with or without a snapshot.
REMEMBERED = 10000


def _nothing() -> None:
    """Stands for a weak reference to a walk that is gone."""


class Half:
    """The snapshot for what is older than one tid.

    readers: the walks from which the newer half is read; while they are used, this half is not idle.
    """

    def __init__(self, walk: Walk, kept: bool):
        self._walk: Callable[[], Walk | None] = weakref.ref(walk)      # its iterator may keep it longer than we do
        self.kept = walk if kept and walk.use() else None
        self.readers: weakref.WeakSet[Walk] = weakref.WeakSet([walk])
        self.asked_for = False              # has anybody asked for the older half?

    @property
    def walk(self) -> Walk | None:
        walk = self._walk()
        return walk if walk is not None and walk.is_open else None

    @property
    def used(self) -> float:
        return max(walk.used for walk in [self.kept, *self.readers] if walk is not None)

    def unkeep(self) -> list[Walk]:
        """Return the walk that is no longer needed here: the caller has to leave it."""
        walk, self.kept = self.kept, None
        return [walk] if walk is not None else []

    def give_up(self) -> list[Walk]:
        self._walk = _nothing
        return self.unkeep()


class Halves:

    def __init__(self) -> None:
        self._at: dict[int, Half] = {}

    def older(self, tid: int) -> Walk | None:
        """Return the snapshot for what is older; the caller has to call its `leave`. None if none ever began there.

        Unavailable if it is gone.
        """
        half = self._at.get(tid)
        if half is None:
            return None
        half.asked_for = True
        walk = half.walk
        if walk is None or not walk.use():
            raise Unavailable('What is younger was read from a snapshot that is gone: nobody read from it for '
                              f'{HALF_IDLE_SECONDS:g} s, its connection was lost, its storage or process is another '
                              f'one or closed, {KEPT} others were kept already, or somebody else began there too; '
                              'begin again with what is younger.')
        return walk

    def candidates(self, tid: int) -> list[Walk]:
        """Return the walks for which `add` needs to know whether they have everything up to tid."""
        half = self._at.get(tid)
        if half is not None and half.walk is not None:
            return [half.walk]
        kept = self._walks()
        return list(kept) if len(kept) >= KEPT else []

    def add(self, tid: int, walk: Walk, enough: list[Walk]) -> list[Walk]:
        """Remember that what is newer than tid is read from a walk. Return the walks that the caller has to leave.

        enough: those candidates, all older, that have everything that this walk has up to tid.
        """
        half = self._at.get(tid)
        if half is not None and half.walk is not None:
            if half.walk not in enough:
                return half.give_up()       # a later caller might mean either of them
            half.readers.add(walk)
        elif half is None or half.asked_for:
            self._at.pop(tid, None)
            self._at[tid] = self._new(walk, enough)
            return self._forget()
        # Otherwise a caller still has to be told that its snapshot is gone.
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
        """Stop keeping idle walks. Return them: the caller has to leave them."""
        now = time.monotonic()
        return [walk for half in self._kept() if now - half.used >= HALF_IDLE_SECONDS for walk in half.unkeep()]

    def due(self) -> float | None:
        """Return the seconds until the first half may be idle, or None."""
        now = time.monotonic()
        return min((half.used + HALF_IDLE_SECONDS - now for half in self._kept()), default=None)

    def _kept(self) -> list[Half]:
        return [half for half in self._at.values() if half.kept is not None]

    def give_up(self) -> list[Walk]:
        """Remember only where the halves began. Return the walks that the caller has to leave."""
        return [walk for half in self._at.values() for walk in half.give_up()]

    def forked(self) -> None:
        """Give up the parent's halves in a child process; asking for one is an error."""
        for half in self._at.values():
            half.give_up()
            half.asked_for = True       # the caller that began it is not in this process
