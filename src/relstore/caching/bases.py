"""Bases: revisions that were overwritten, one of which an open view may have read and be changing now.

A history-free database has them no longer, and without what a change is based on its conflict cannot be resolved. What
is kept here are facts of the past, the state that a transaction gave an object, so nothing can be wrong; the question
is only how long it is of use. A revision is as long as a view stands at its tid or later, and before that of the next
one: ZODB keeps what it has loaded, in whichever transaction, until a poll tells that it changed.

A view that begins says that it stands at the cache's head or anywhere above, before it asks where; so nothing is missed
that is overwritten meanwhile. What two newer revisions had overwritten in the cache before that, it will not see: both
are committed, and its answer is of after that.
"""
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakSet

ANYWHERE = 1 << 63      # above every tid


class Base(NamedTuple):
    """`tid` gave the object this state, and `before`, as far as is known, the next one."""
    tid: int
    before: int
    state: bytes


# What a base takes beside its state: itself with the collector's header, both tids, the head of the state, and a place
# in a tuple. And an object: its oid, the tuple, two places in dictionaries and one in the order.
BASE_BYTES = 80 + 2 * 32 + 33 + 8
OBJECT_BYTES = 32 + 56 + 160


class Standing:
    """Where a view stands: `between` the lowest and the highest tid, both the same once it is known; None: nowhere.

    It is replaced as a whole, without a lock.
    """
    __slots__ = ('between', '__weakref__')

    def __init__(self) -> None:
        self.between: tuple[int, int] | None = None


class Bases:
    """Such revisions, in `limit` bytes. Whoever calls holds the cache's lock.

    There are not more of an object than tids at which views stand. Where the limit is reached, those of the objects go
    that were not overwritten for the longest time: what views that idle might need, rather than what is changed a lot.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = 0
        self._views: WeakSet[Standing] = WeakSet()
        self._kept: OrderedDict[int, tuple[Base, ...]] = OrderedDict()

    def add(self, view: Standing) -> None:
        """Keep what this view may need, as long as it lives."""
        self._views.add(view)

    def get(self, oid: int, tid: int) -> bytes | None:
        """Return the state that the transaction `tid` gave the object, or None if it is not kept."""
        for base in self._kept.get(oid, ()):
            if base.tid == tid:
                return base.state
        return None

    def keep(self, overwritten: Iterable[tuple[int, Base]]) -> None:
        """Keep those of (oid, revision) that a view may need; forget others that none needs, or that are too many."""
        is_needed = self._is_needed()
        for oid, base in overwritten:
            if is_needed(base):
                self._set(oid, filter(is_needed, _in_order((*self._kept.get(oid, ()), base))))
        self._shrink(is_needed)

    def prune(self) -> None:
        """Forget all that no view needs."""
        is_needed = self._is_needed()
        for oid, bases in list(self._kept.items()):     # each in its turn: the order stays
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
        """Keep these of an object, as the last of all that goes."""
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
    """Return them from the oldest on, each once, and each before the next one."""
    ordered = [*{base.tid: base for base in sorted(bases, reverse=True)}.values()][::-1]
    for place, (base, following) in enumerate(pairwise(ordered)):
        ordered[place] = base._replace(before=min(base.before, following.tid))
    return ordered
