"""Bases: overwritten revisions that an open view may have read, and may be changing now.

A history-free database no longer has them, and a conflict cannot be resolved without the state that the change is based
on. The states kept here are facts of the past, what a transaction gave an object, so they cannot be wrong; the question
is only how long they are useful. A revision is useful while a view stands at its tid or later, but before the tid of
the next one: ZODB keeps what it has loaded, across transactions, until a poll reports that it changed.

A new view registers as standing at the cache's head or anywhere above before it asks where, so that it misses nothing
that is overwritten meanwhile. It cannot see what two newer revisions had replaced in the cache before that: both were
committed before its answer.
"""
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakSet

ANYWHERE = 1 << 63      # above every tid


class Base(NamedTuple):
    """The state that `tid` gave an object, and `before`: the tid of the next one, as far as known."""
    tid: int
    before: int
    state: bytes


# Memory of a base besides its state: itself with the collector's header, both tids, the header of the state, a slot in
# a tuple. And of an object: its oid, the tuple, two dictionary slots and one in the order.
BASE_BYTES = 80 + 2 * 32 + 33 + 8
OBJECT_BYTES = 32 + 56 + 160


class Standing:
    """Where a view stands: `between` is (lowest, highest) tid, both the same once that is known; None: nowhere.

    `between` is replaced as a whole, without a lock.
    """
    __slots__ = ('between', '__weakref__')

    def __init__(self) -> None:
        self.between: tuple[int, int] | None = None


class Bases:
    """Overwritten revisions, within `limit` bytes. The caller holds the cache's lock.

    An object has at most one for each tid that views stand at. At the limit, the objects that were overwritten longest
    ago go first: only idle views might need those, and objects that change often stay.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = 0
        self._views: WeakSet[Standing] = WeakSet()
        self._kept: OrderedDict[int, tuple[Base, ...]] = OrderedDict()

    def add(self, view: Standing) -> None:
        """Keep what this view may need, for as long as it lives."""
        self._views.add(view)

    def get(self, oid: int, tid: int) -> bytes | None:
        """Return the state that the transaction `tid` gave the object, or None if it is not kept."""
        for base in self._kept.get(oid, ()):
            if base.tid == tid:
                return base.state
        return None

    def keep(self, overwritten: Iterable[tuple[int, Base]]) -> None:
        """Keep each (oid, revision) that a view may need; forget others that none needs, or beyond the limit."""
        is_needed = self._is_needed()
        for oid, base in overwritten:
            if is_needed(base):
                self._set(oid, filter(is_needed, _in_order((*self._kept.get(oid, ()), base))))
        self._shrink(is_needed)

    def prune(self) -> None:
        """Forget all that no view needs."""
        is_needed = self._is_needed()
        for oid, bases in list(self._kept.items()):     # in turn, so that the order stays
            self._set(oid, filter(is_needed, bases))

    def clear(self) -> None:
        self._kept = OrderedDict()
        self.bytes = 0

    def after_fork(self) -> None:
        self._views = WeakSet(self._views)      # another thread may have been going through them

    def _is_needed(self) -> Callable[[Base], bool]:
        stands = [between for view in self._views if (between := view.between) is not None]
        known = sorted({low for low, high in stands if low == high})
        lowest = min((low for low, high in stands if low != high), default=ANYWHERE)

        def is_needed(base: Base) -> bool:
            place = bisect_left(known, base.tid)
            return base.before > lowest or place < len(known) and known[place] < base.before
        return is_needed

    def _set(self, oid: int, bases: Iterable[Base]) -> None:
        """Set the bases of an object, and make it the last to go."""
        new = tuple(bases)
        self.bytes += _size(new) - _size(self._kept.pop(oid, ()))
        if new:
            self._kept[oid] = new

    def _shrink(self, is_needed: Callable[[Base], bool]) -> None:
        while self._kept:
            oid, bases = next(iter(self._kept.items()))
            if self.bytes <= self.limit and any(map(is_needed, bases)):
                break
            self._set(oid, ())


def _size(bases: tuple[Base, ...]) -> int:
    return sum(BASE_BYTES + len(base.state) for base in bases) + (OBJECT_BYTES if bases else 0)


def _in_order(bases: tuple[Base, ...]) -> list[Base]:
    """Return them oldest first, without duplicates, each with its `before` lowered to the next one's tid."""
    ordered = [*{base.tid: base for base in sorted(bases, reverse=True)}.values()][::-1]
    for place, (base, following) in enumerate(pairwise(ordered)):
        ordered[place] = base._replace(before=min(base.before, following.tid))
    return ordered
