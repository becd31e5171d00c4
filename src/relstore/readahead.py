"""ReadAhead: what else to fetch when a load misses.

ZODB loads one object at a time, and a batch of 32 costs the database as much as two or three single loads. Whoever
reads one child of a folder or of a tree's node often goes on to the next. So when an object is missed which a state
seen a moment ago refers to, its *siblings* are fetched with it: what that state refers to after it.

Guessing wrong is worse than not guessing. Each referrer has a window, how many siblings to fetch: it doubles when
most of the last ones were used, and is halved when most were not, down to none; then only siblings that are missed in
a row open it again. New referrers start with what served the others.
"""
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ZODB.utils import p64

from relstore.cache import Cache
from relstore.references import references, unpack

LARGEST = 32            # siblings fetched at once
FIRST = 4               # the window of the first referrer
REFERRERS = 8           # that are remembered
LOADED = 8              # states loaded last, whose references are remembered
LARGEST_STATE = 65536   # bytes of a state that is fetched without being asked for
LARGEST_HIT = 65536     # bytes of a cached state that is searched for references


@dataclass(slots=True, eq=False)
class _Referrer:
    """A state that others were found through."""
    refs: bytes                                         # 8 bytes for each, in the order of the state
    window: int
    last: int = -2                                      # which of them was missed last
    fetched: list[int] = field(default_factory=list)    # the siblings that were fetched then


class Counts:
    """How many objects were fetched ahead, and how many of them were used: about, for threads take no lock."""

    def __init__(self):
        self.fetched = self.used = 0


class ReadAhead:
    """The guesses for one view, used by one thread at a time; `counts` is shared.

    untransform: from a stored record to the pickle in it, as ZODB's storage wrappers define it.
    """

    def __init__(self, cache: Cache, counts: Counts, untransform: Callable[[bytes], bytes]):
        self._cache, self._counts, self._untransform = cache, counts, untransform
        self._first = FIRST
        self._referrers: deque[_Referrer] = deque()         # last used first
        self._loaded: deque[bytes] = deque(maxlen=LOADED)   # references of states, newest first

    def saw(self, refs: bytes | None, state: bytes) -> None:
        """Remember what a state that was loaded refers to: it may be missed next. refs: None if not known."""
        if refs is None:
            refs = references(self._untransform(state)) or b''
        if len(refs) > 8:       # of one reference there are no siblings
            self._loaded.appendleft(refs)

    def siblings(self, oid: int, at: int, hit: bytes | None) -> list[int]:
        """Return which objects to fetch with one that a view at `at` has missed.

        hit: the state that the view has last found in the cache, if any.
        """
        packed = p64(oid)
        referrer = self._known(packed) or self._found(packed, hit)
        if referrer is None:
            return []
        place = _place(packed, referrer.refs)
        self._judge(referrer)
        if place == referrer.last + 1 and not referrer.window:
            referrer.window = 2
        referrer.last = place
        following = referrer.refs[8 * (place + 1):8 * (place + 1 + referrer.window)]
        referrer.fetched = [oid for oid in unpack(following) if not self._cache.holds(oid, at)]
        self._counts.fetched += len(referrer.fetched)
        return referrer.fetched

    def _known(self, packed: bytes) -> _Referrer | None:
        """Return a referrer of the object, if possible one that it is not the last in.

        The bucket of a tree is referred to by the one before it, which knows no other, and by its node.
        """
        last = None
        for referrer in self._referrers:
            if packed in referrer.refs:
                place = _place(packed, referrer.refs)
                if 0 <= place < len(referrer.refs) // 8 - 1:
                    self._referrers.remove(referrer)
                    self._referrers.appendleft(referrer)
                    return referrer
                if place >= 0:
                    last = referrer
        return last

    def _found(self, packed: bytes, hit: bytes | None) -> _Referrer | None:
        """Look whether a state seen lately refers to the object."""
        for refs in self._loaded:
            if packed in refs and _place(packed, refs) >= 0:
                return self._remembered(refs)
        if hit is not None and len(hit) <= LARGEST_HIT and packed in (state := self._untransform(hit)):
            refs = references(state) or b''
            if _place(packed, refs) >= 0:
                return self._remembered(refs)
        return None

    def _remembered(self, refs: bytes) -> _Referrer:
        if len(self._referrers) == REFERRERS:
            self._judge(self._referrers.pop())
        self._referrers.appendleft(_Referrer(refs, self._first))
        return self._referrers[0]

    def _judge(self, referrer: _Referrer) -> None:
        """See what became of what was fetched last, and set the window by that."""
        fetched, referrer.fetched = referrer.fetched, []
        if not fetched:
            return
        used = sum(map(self._cache.was_used, fetched))
        self._counts.used += used
        if 2 * used >= len(fetched):
            referrer.window = min(2 * referrer.window, LARGEST)
            self._first = min(2 * self._first or 1, LARGEST)
        else:
            referrer.window //= 2
            self._first //= 2


def _place(packed: bytes, refs: bytes) -> int:
    """Return which of the packed references is the object, or -1."""
    found = refs.find(packed)
    while found % 8 and found >= 0:
        found = refs.find(packed, found + 1)
    return found // 8 if found >= 0 else -1
