"""ReadAhead: what else to fetch when a load misses.

ZODB loads one object at a time, and a batch of 32 costs the database as much as two or three single loads. A reader
of one child of a folder or of a tree's node often reads the next. So when an object is missed, others are fetched with
it: its neighbours in a state seen before, its referrer. There are two ways to go (picture: referrers.py):

along       what follows in the same referrer, then in its siblings: the values of a tree, bucket after bucket
across      what is at the same place in the siblings: the tree of each folder, the annotations of each file

A wrong guess is worse than none. Each class of referrers has a Window for each way: how many objects to fetch at once,
as a batch. A batch counts as used once three quarters of its objects were used, and as unused if that has not happened
when two later batches of the window have come.

    window      objects     a batch     a batch       two misses followed each
                at once     was used    was unused    other in this order
    SHUT        0           -           -             FEW
    FEW         3           SOME        SHUT          -
    SOME        12          MANY        FEW           -
    MANY        64          MANY        SOME          -

Containers, the classes of BTrees and of persistent, begin with FEW along and SHUT across; all others with SHUT along
and FEW across. In a view that begins later, a class begins where it is now.

If MANY objects are fetched along, and a sibling that was not seen comes next, that and up to three more become part of
the batch: what they refer to follows. Both windows together let in 64 objects at most.

Having no guess must be cheap too. Of containers whose windows are both SHUT, one state in eight is remembered. And
misses are not always looked at:

    state       misses      then        on a guess, and        when a transaction
                                        before a prefetch      begins
    LOOKING     64          RESTING     LOOKING                LOOKING
    RESTING     256         LOOKING     LOOKING                LOOKING, unless loads are cheap: SQLite

Each change restarts the count of misses. While RESTING, nothing is remembered, and nothing is fetched unasked.
"""
from collections.abc import Callable

from relstore.caching.cache import Cache
from relstore.caching.referrers import Referrer, Referrers, pack, place_of
from relstore.references import references

# The states of a window: how many objects it lets in at once.
SHUT, FEW, SOME, MANY = 0, 3, 12, 64

USED, UNUSED, IN_ORDER = 'used', 'unused', 'in order'
AFTER = {
    USED: {FEW: SOME, SOME: MANY, MANY: MANY},
    UNUSED: {FEW: SHUT, SOME: FEW, MANY: SOME},
    IN_ORDER: {SHUT: FEW},
}

LATER_BATCHES = 2               # after which a batch counts as unused
LOOKING_MISSES, RESTING_MISSES = 64, 256
ONE_OF = 8                      # so many states of containers that are SHUT both ways, one is remembered

LARGEST_STATE_BYTES = 32768     # the largest object fetched without being asked for
MOST_CLASSES = 2000             # distinguished; the rest count as one
LARGEST_HIT_BYTES = 65536       # the largest cached state searched for references
LARGEST_OID = 2 ** 63 - 1
PROTO = b'\x80'                 # the first byte of a pickle


class Kind:
    """The windows that the referrers of a class begin with in a new view."""

    __slots__ = ('contains', 'along', 'across')

    def __init__(self, name: bytes):
        # Containers refer to many objects of one kind, others to a few objects for different purposes.
        self.contains = name.startswith((b'cBTrees.', b'cpersistent.'))
        self.along, self.across = (FEW, SHUT) if self.contains else (SHUT, FEW)


class Counts:
    """What the views of a database share; the counts are approximate, for threads take no lock.

    fetched, used   how many objects were fetched ahead, and how many of them are known to have been used
    kinds           by class name
    """

    def __init__(self) -> None:
        self.fetched = self.used = 0
        self.kinds: dict[bytes, Kind] = {}


class Window:
    """How many objects to fetch one way, and the batches not yet known to be used or unused."""

    __slots__ = ('size', 'waiting', '_kind', '_way')

    def __init__(self, kind: Kind, way: str):
        self._kind, self._way = kind, way
        self.size: int = getattr(kind, way)
        self.waiting: list[list[int]] = []

    def move(self, event: str) -> None:
        """Change to the size that AFTER gives, in which the class then begins in new views."""
        self.size = AFTER[event][self.size]
        setattr(self._kind, self._way, self.size)

    def judge(self, was_used: Callable[[int], bool]) -> int:
        """Judge the waiting batches, and move accordingly. Return how many objects of the judged ones were used."""
        known = 0
        for batch in self.waiting[:]:
            used = sum(map(was_used, batch))
            if 4 * used >= 3 * len(batch):
                self.move(USED)
            elif len(self.waiting) > LATER_BATCHES:
                self.move(UNUSED)
            else:
                continue
            known += used
            self.waiting.remove(batch)
            if not self.size:
                self.waiting.clear()
                break
        return known


class Habit:
    """How the referrers of a class are read in one view."""

    __slots__ = ('along', 'across', 'last', 'last_oid', '_contains', '_passed')

    def __init__(self, kind: Kind):
        self.along, self.across = Window(kind, 'along'), Window(kind, 'across')
        self.last: Referrer | None = None       # the referrer of the last missed object
        self.last_oid = b''                     # the oid of that object, packed
        self._contains = kind.contains
        self._passed = 0        # states seen while both windows were SHUT

    def passes(self) -> bool:
        """Count a state seen while both windows are SHUT. Return whether it is not to be remembered."""
        self._passed += 1
        return self._contains and self._passed % ONE_OF != 0


class ReadAhead:
    """The guesses for one view, used by one thread at a time; `counts` is shared.

    plain: returns the pickle in a stored record, which a storage wrapper may have changed.
    """

    def __init__(self, cache: Cache, counts: Counts, plain: Callable[[bytes], bytes]):
        self._cache, self._counts, self._unwrap = cache, counts, plain
        self._seen = Referrers()
        self._habits: dict[bytes, Habit] = {}
        self._last_habit: Habit | None = None
        self._last_start = b'\n'        # how records of that class begin; none begins like this
        self._resting, self._left = False, LOOKING_MISSES       # left: misses until the state changes

    def wake(self) -> None:
        """Look at misses again: the next objects may be read in order."""
        self._resting, self._left = False, LOOKING_MISSES

    def _turn(self) -> None:
        self._resting = not self._resting
        self._left = RESTING_MISSES if self._resting else LOOKING_MISSES

    def saw(self, oid: int | None, state: bytes, refs: bytes | None) -> None:
        """Remember what a loaded state refers to, because that may be missed next. refs: None if unknown."""
        if self._resting:
            return
        if refs is None:
            refs = references(self._plain(state))
        if refs:
            habit = self._last_habit
            if habit is None or not state.startswith(self._last_start):
                habit = self._habit(state)
            if habit.along.size or habit.across.size or not habit.passes():
                self._seen.add(Referrer(oid, refs, habit))

    def beside(self, oid: int, at: int, hit: bytes | None) -> list[int]:
        """Return the objects to fetch with one that a view at `at` has missed.

        hit: the last state that the view found in the cache, if that was after the previous miss.
        """
        if not self._left:
            self._turn()
        self._left -= 1
        if self._resting:
            return []
        seen = self._seen
        referrer = seen.parents.get(oid) or seen.older_parents.get(oid)
        if referrer is None:
            referrer = None if hit is None else self._in_hit(oid, hit)
            if referrer is None:
                return []
        packed, refs, habit = pack(oid), referrer.refs, referrer.habit
        place = refs.find(packed)
        if place % 8:
            place = place_of(packed, refs)
        along, across, last = habit.along, habit.across, habit.last
        if along.waiting:
            self._counts.used += along.judge(self._cache.was_used)
        if across.waiting:
            self._counts.used += across.judge(self._cache.was_used)
        if last is referrer:
            if not along.size and refs[place - 8:place] == habit.last_oid:
                along.move(IN_ORDER)
        elif (last is not None and not across.size and last.refs[place:place + 8] == habit.last_oid
              and seen.follows(referrer, last)):
            across.move(IN_ORDER)
        habit.last, habit.last_oid = referrer, packed
        return self._fetched(oid, at, referrer, place) if along.size or across.size else []

    def _fetched(self, oid: int, at: int, referrer: Referrer, place: int) -> list[int]:
        """Return what to fetch with a missed object, and note it in the windows."""
        self._seen.keep(oid, referrer)
        found = {oid: None}
        along, across = referrer.habit.along, referrer.habit.across
        if along.size:
            guesses, unseen = self._seen.along(referrer, place, along.size)
            self._let_in(along, guesses, unseen if along.size == MANY else [], at, found)
        if across.size:
            self._let_in(across, self._seen.across(referrer, place, across.size), [], at, found)
        del found[oid]
        if found:
            self._counts.fetched += len(found)
            self.wake()
        return list(found)

    def _let_in(self, window: Window, guesses: list[int], unseen: list[int], at: int, found: dict[int, None]) -> None:
        """Add a batch to `found`: the guesses that are not cached, and the unseen siblings, cached or not."""
        holds, room = self._cache.holds, MANY + 1 - len(found)
        batch = [oid for oid in guesses[:window.size] if oid not in found and oid <= LARGEST_OID and not holds(oid, at)]
        batch = (batch + [oid for oid in unseen if oid not in found and oid <= LARGEST_OID])[:room]
        if batch:
            found.update(dict.fromkeys(batch))
            window.waiting.append(batch)

    def _in_hit(self, oid: int, hit: bytes) -> Referrer | None:
        """Return the hit state as a referrer, if it refers to the object."""
        if len(hit) > LARGEST_HIT_BYTES:
            return None
        packed, state = pack(oid), hit if hit[:1] == PROTO else self._plain(hit)
        if b'Q' not in state or packed not in state:        # Q pushes a reference
            return None
        habit = self._habit(state)
        if not (habit.along.size or habit.across.size) and habit.passes():
            return None
        refs = references(state) or b''
        if place_of(packed, refs) < 0:
            return None
        referrer = Referrer(None, refs, habit)
        self._seen.add(referrer)
        return referrer

    def _plain(self, state: bytes) -> bytes:
        """Return the pickle in a stored record. A record that begins like one is taken as it is."""
        return state if state[:1] == PROTO else self._unwrap(state)

    def _habit(self, state: bytes) -> Habit:
        # A record begins with two lines, the module and the name.
        state = self._plain(state)
        end = state.find(b'\n', state.find(b'\n', 0, 200) + 1, 300)
        name = state[2:end] if end > 0 and state[:1] == PROTO else b''
        habit = self._habits.get(name)
        if habit is None:
            kinds = self._counts.kinds
            if len(kinds) >= MOST_CLASSES and name not in kinds:
                name = b''
            habit = self._habits[name] = Habit(kinds.get(name) or kinds.setdefault(name, Kind(name)))
        if name:
            self._last_habit, self._last_start = habit, state[:end + 1]
        return habit
