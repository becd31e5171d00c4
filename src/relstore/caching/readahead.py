"""ReadAhead: what else to fetch when a load misses.

ZODB loads one object at a time, and a batch of 32 costs the database as much as two or three single loads. Whoever
reads one child of a folder or of a tree's node often goes on to the next. So when an object is missed, others are
fetched with it that its *referrer*, a state seen before, leads to:

along       what the referrer refers to after it, then what the referrer's own siblings refer to: the values of a tree
            come as one stream, bucket after bucket. Where the stream is at full speed and comes to a sibling that was
            not seen, that one is fetched too, as if it was missed.
across      what the referrer's siblings refer to at the same place: the tree of each folder, the annotations of each
            file.

Guessing wrong is worse than not guessing. Either way has a window, how many objects to fetch: it grows while most of
them are used, and is halved when most are not, down to none; then only objects that are missed in the order in which
they would have been fetched open it again. What served one referrer is what others of its class start with.

Nor may it cost much to have no guess: who goes on and on missing such objects has most of them not looked at.
"""
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from struct import Struct

from relstore.caching.cache import Cache
from relstore.references import references, unpack

LARGEST = 64            # objects fetched beside one
LARGEST_STATE = 32768   # bytes of a state that is fetched without being asked for
GROWTH = 4
REOPENED = 2            # the window after two were missed in order
SMALL = 8               # of so few references, those before a missed one are as likely as those after it
UNJUDGED = 4            # batches that wait for their objects to be used
DEPTH = 2               # how far up from the values of a tree its nodes are fetched as if they were missed
REMEMBERED = 1024       # references, and about as many that were used before them: up to 170 KB a connection
CLASSES = 2000          # that are told apart
LARGEST_HIT = 65536     # bytes of a cached state that is searched for references
PATIENCE = 8            # where guesses were wrong, one miss in so many is looked at, and one such state
LARGEST_OID = 2 ** 63 - 1
PROTO = b'\x80'         # what a pickle begins with
TIRED = 64              # misses in a row without a guess, after which only some are looked at:
LOOKED_AT = 48          # so many, after a rest of so many that are not, which doubles while there is no guess
REST, LONGEST_REST = 96, 384

_pack = Struct('>Q').pack


class Kind:
    """What the views of a database have learnt about the referrers of a class: the windows that new ones start with."""

    __slots__ = ('contains', 'along', 'across')

    def __init__(self, name: bytes):
        # Containers refer to many things of one sort, other objects to a few things of various use.
        self.contains = name.startswith((b'cBTrees.', b'cpersistent.'))
        self.along = 3 if self.contains else 0
        self.across = 0 if self.contains else 2


class Counts:
    """What the views of a database share: about, for threads take no lock.

    fetched, used   how many objects were fetched ahead, and how many of these were used
    kinds           by the name of the class
    """

    def __init__(self) -> None:
        self.fetched = self.used = 0
        self.kinds: dict[bytes, Kind] = {}


Found = dict[int, None]         # oids, in the order in which they are to be fetched


class _Window:
    """How many objects to fetch one way, and which were fetched last."""

    __slots__ = ('kind', 'way', 'size', 'fetched')

    def __init__(self, kind: Kind, way: str):
        self.kind, self.way = kind, way
        self.size: int = getattr(kind, way)
        self.fetched: list[int] = []            # empty when they were judged


class _Class:
    """The referrers of a class, in one view."""

    __slots__ = ('kind', 'across', 'last', 'last_oid', 'passed')

    def __init__(self, kind: Kind):
        self.kind = kind
        self.across: _Window | None = None      # made when it is needed
        self.last: _Referrer | None = None      # through which an object was missed last
        self.last_oid = 0                       # and which
        self.passed = 0                         # misses where no window was open


class _Referrer:
    """A state that others are found through."""

    __slots__ = ('oid', 'refs', 'cls', 'along')

    def __init__(self, oid: int | None, refs: bytes, cls: _Class):
        self.oid = oid
        self.refs = refs                        # 8 bytes for each, in the order of the state
        self.cls = cls
        self.along: _Window | None = None       # made when it is needed


class ReadAhead:
    """The guesses for one view, used by one thread at a time; `counts` is shared.

    plain: from a stored record to the pickle in it, where a storage wrapper has changed it.
    """

    def __init__(self, cache: Cache, counts: Counts, plain: Callable[[bytes], bytes]):
        self._cache, self._counts, self._plain = cache, counts, plain
        self._classes: dict[bytes, _Class] = {}
        self._last_class: _Class | None = None
        self._last_start = b''      # how its records begin
        self._unjudged: deque[tuple[_Window, list[int]]] = deque()
        self._left_alone = 0
        self._resting = False       # are misses not looked at?
        self._left = TIRED          # misses until that changes, if there is no guess
        self._rest = REST           # and how many will not be looked at then
        # Referrers by their own oid, and by what they refer to: those used last, and those used before them.
        self._states: dict[int, _Referrer] = {}
        self._parents: dict[int, _Referrer] = {}
        self._older_states, self._older_parents = self._states, self._parents

    def wake(self) -> None:
        """Begin to look again: what follows may be read in order."""
        self._resting, self._left, self._rest = False, TIRED, REST

    def _turn(self) -> None:
        self._resting = not self._resting
        if self._resting:
            self._left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        else:
            self._left = LOOKED_AT

    # What is known --------------------------------------------------------------------------------------------------

    def saw(self, oid: int | None, state: bytes, refs: bytes | None) -> None:
        """Remember what a state that was loaded refers to, for it may be missed next. refs: None if not known."""
        if self._resting:
            return
        if refs is None:
            refs = references(self._record(state))
        if not refs:
            return
        cls = self._class(state)
        kind = cls.kind
        if kind.contains and not kind.along and not kind.across:
            cls.passed += 1
            if cls.passed % PATIENCE:
                return      # enough are left to find out if they are read in order again
        self._remember(_Referrer(oid, refs, cls))

    def _record(self, state: bytes) -> bytes:
        """Return the pickle in a stored record. What begins as one is not looked into by a storage wrapper."""
        return state if state[:1] == PROTO else self._plain(state)

    def _class(self, state: bytes) -> _Class:
        # A record begins with two lines, the module and the name.
        if self._last_class is not None and state.startswith(self._last_start):
            return self._last_class
        state = self._record(state)
        end = state.find(b'\n', state.find(b'\n', 0, 200) + 1, 300)
        name = state[2:end] if end > 0 and state[:1] == PROTO else b''
        cls = self._classes.get(name)
        if cls is None:
            kinds = self._counts.kinds
            if len(kinds) >= CLASSES and name not in kinds:
                name = b''
            cls = self._classes[name] = _Class(kinds.get(name) or kinds.setdefault(name, Kind(name)))
        if name:
            self._last_class, self._last_start = cls, state[:end + 1]
        return cls

    def _remember(self, referrer: _Referrer) -> None:
        if len(self._parents) > REMEMBERED:
            self._older_states, self._older_parents = self._states, self._parents
            self._states, self._parents = {}, {}
        if referrer.oid is not None:
            self._states[referrer.oid] = referrer
        oids = unpack(referrer.refs)
        # A bucket of a tree is referred to by the one before it, which knows no other, and by their node.
        node = self._parents.get(oids[-1]) or self._older_parents.get(oids[-1])
        self._parents.update(dict.fromkeys(oids, referrer))
        if node is not None:
            self._parents[oids[-1]] = node

    def _parent(self, oid: int) -> _Referrer | None:
        """Return what refers to it, and keep that in mind."""
        referrer = self._parents.get(oid)
        if referrer is None:
            referrer = self._older_parents.get(oid)
            if referrer is not None:
                self._remember(referrer)
        return referrer

    def _in_hit(self, oid: int, hit: bytes) -> _Referrer | None:
        """Return the referrer that the hit state is, if it refers to the object."""
        if len(hit) > LARGEST_HIT:
            return None
        packed, state = _pack(oid), self._record(hit)
        if b'Q' not in state or packed not in state:        # Q pushes a reference
            return None
        if not self._class(state).kind.along:
            self._left_alone += 1
            if self._left_alone % PATIENCE:
                return None
        refs = references(state) or b''
        if _place(packed, refs) < 0:
            return None
        self.saw(None, state, refs)
        return self._parents.get(oid)

    def _siblings(self, referrer: _Referrer) -> Iterator[tuple[int, _Referrer | None]]:
        """Yield what follows it where it is referred to itself: those of its class, and, with None, those not seen."""
        parent = None if referrer.oid is None else self._parent(referrer.oid)
        if parent is not None:
            place = _place(_pack(referrer.oid), parent.refs)
            for oid in unpack(parent.refs[8 * place + 8:8 * (place + LARGEST)]):
                sibling = self._states.get(oid) or self._older_states.get(oid)
                if sibling is None or sibling.cls is referrer.cls:
                    yield oid, sibling

    # What to fetch --------------------------------------------------------------------------------------------------

    def beside(self, oid: int, at: int, hit: bytes | None) -> list[int]:
        """Return which objects to fetch with one that a view at `at` has missed.

        hit: the state that the view has found in the cache last, if that was since the last miss.
        """
        if not self._left:
            self._turn()
        self._left -= 1
        if self._resting:
            return []
        referrer = self._parents.get(oid) or self._older_parents.get(oid)
        if referrer is None:
            referrer = None if hit is None else self._in_hit(oid, hit)
            if referrer is None:
                return []
        cls, along = referrer.cls, referrer.along
        across = cls.across
        if across is None:
            across = cls.across = _Window(cls.kind, 'across')
        last, last_oid, cls.last, cls.last_oid = cls.last, cls.last_oid, referrer, oid
        if not (cls.kind.along or across.size or across.fetched or along and (along.size or along.fetched)):
            # Nothing has been worth it: let the miss pass quickly, but for a few that show if they are in order again;
            # the fewer, the longer it takes to find the place.
            cls.passed += 1
            if cls.passed % (PATIENCE + len(referrer.refs) // 1024):
                return []
        if along is None:
            along = referrer.along = _Window(cls.kind, 'along')
        self._judge(along, along.fetched)
        self._judge(across, across.fetched)
        place = _place(_pack(oid), referrer.refs)
        if last is not None and not (along.size and across.size):
            self._reopen(referrer, along, across, place, last, _pack(last_oid))
        if not (along.size or across.size):
            return []
        if oid not in self._parents:
            self._remember(referrer)    # keep it in mind
        found: Found = {}
        if along.size:
            along.fetched = self._along(referrer, along, place, oid, at, found)
        if across.size:
            across.fetched = self._take(across, oid, at, self._across(referrer, place), found)
        found.pop(oid, None)
        if found:
            self.wake()
        self._counts.fetched += len(found)
        return list(found)

    def _reopen(self, referrer: _Referrer, along: _Window, across: _Window, place: int, last: _Referrer,
                last_oid: bytes) -> None:
        """Open a closed window if this miss follows the last one of the class that way."""
        if last is referrer:
            if not along.size and referrer.refs[8 * place - 8:8 * place] == last_oid:
                along.size = REOPENED
        elif not across.size and last.refs[8 * place:8 * place + 8] == last_oid:
            _, following = next(self._siblings(last), (None, None))
            if following is referrer:
                across.size = REOPENED

    def _along(self, referrer: _Referrer, window: _Window, place: int, missed: int, at: int, found: Found,
               depth: int = 0) -> list[int]:
        """Add to `found` what comes after the missed object, which is at this place; return what the window let in."""
        refs = referrer.refs
        start = 0 if len(refs) <= 8 * SMALL else place + 1
        guesses = list(unpack(refs[8 * start:8 * (start + window.size + 1)]))
        unseen = None
        if len(guesses) < window.size:
            for oid, sibling in self._siblings(referrer):
                if sibling is None:
                    unseen = oid
                    break
                guesses += unpack(sibling.refs[:8 * window.size])
                if len(guesses) >= window.size:
                    break
        taken = self._take(window, missed, at, guesses, found)
        if unseen is not None and (depth or window.size == LARGEST) and depth < DEPTH and len(found) < LARGEST:
            found[unseen] = None        # even if it is cached: what it refers to is not known
            parent = None if referrer.oid is None else self._parent(referrer.oid)
            if parent is None:
                return taken
            if parent.along is None:
                parent.along = _Window(parent.cls.kind, 'along')
            parent.along.size = parent.along.size or REOPENED
            self._along(parent, parent.along, _place(_pack(unseen), parent.refs), unseen, at, found, depth + 1)
        return taken

    def _across(self, referrer: _Referrer, place: int) -> Iterator[int]:
        for _, sibling in self._siblings(referrer):
            if sibling is None:
                break
            yield from unpack(sibling.refs[8 * place:8 * place + 8])

    def _take(self, window: _Window, missed: int, at: int, guesses: Iterable[int], found: Found) -> list[int]:
        """Add to `found` the guesses that the window lets in, but for what is cached already; return those."""
        holds = self._cache.holds
        guesses = islice((oid for oid in guesses if oid != missed), min(window.size, LARGEST - len(found)))
        taken = [oid for oid in guesses if oid not in found and oid <= LARGEST_OID and not holds(oid, at)]
        if taken:
            found.update(dict.fromkeys(taken))
            self._unjudged.append((window, taken))
            if len(self._unjudged) > UNJUDGED:
                self._judge(*self._unjudged.popleft())
        return taken

    def _judge(self, window: _Window, fetched: list[int]) -> None:
        """See what became of what was fetched, once, and set the window by that."""
        if not fetched:
            return
        used = sum(map(self._cache.was_used, fetched))
        self._counts.used += used
        window.size = min(GROWTH * window.size, LARGEST) if 2 * used >= len(fetched) else window.size // 2
        setattr(window.kind, window.way, window.size)
        fetched.clear()


def _place(packed: bytes, refs: bytes) -> int:
    """Return which of the packed references is the object, or -1."""
    found = refs.find(packed)
    while found % 8 and found >= 0:
        found = refs.find(packed, found + 1)
    return found // 8 if found >= 0 else -1
