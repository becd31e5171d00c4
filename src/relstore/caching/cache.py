"""Cache: the revisions that a process has seen, and a log of what changed; shared by all its views.

A cached revision knows which views it is right for: it is the newest one for every view in [tid, valid_to].
At most two are kept of an object, newest first.  The log says which objects changed in (floor, head].

Readers take no lock.  Whatever they see while a writer works is harmless, because

* a Revision's tid and state never change, and it is complete before the dictionary refers to it;
* valid_to is one reference, and every value it takes is true for the views that exist at that time:
  it is lowered before `head` moves, and no view stands at a tid before the poll that reported it was entered;
* a revision is added to the older ones before a newer one replaces it.

So a find() that races an advance() still answers for `at`, as asked.
"""
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from threading import Lock

from relstore.caching.bases import Base, Bases, Standing
from relstore.caching.changelog import ChangeLog
from relstore.caching.revision import OBJECT_BYTES, OPEN, Revision, size_of

# How many used objects the hand spares before it evicts one anyway, so that no writer holds the lock for long.
SPARED_OBJECTS = 100
# The share of the budget reserved for bases of changes (see Bases), because a cache in use is always full.
BASES_SHARE = 1 / 8


class Cache(ChangeLog):
    """States by oid and view, within a budget of `limit` bytes; all tids and oids are 64-bit ints.

    States longer than `object_max` bytes are not kept.  With limit 0 no state is, but the log still works.
    The log has at most `log_limit` objects (about 140 bytes each, not part of the budget).
    keep_bases: whether revision() also finds overwritten states that an open view may have read.

    A view moves in this order: read `generation`, then `head`; ask the database what changed since that head;
    advance() or jump(); take the new `at`, which is the current `head`, or `new` of the view's own answer if its
    SQL snapshot stands there; and only then invalidations(), which may report too much if others polled
    meanwhile, never too little.

    A caller that passes `generation` is safe from an epoch that changed meanwhile: what it brings is ignored, and
    it is told that everything may have changed.  A view of another generation has to poll again.
    """

    def __init__(self, limit: int, object_max: int, log_limit: int = 100_000, keep_bases: bool = False):
        super().__init__(log_limit)
        self.limit = limit
        # Which states are not kept? Not asked for states that this process commits.
        self.unwanted: Callable[[bytes], bool] | None = None
        # The longest state that is kept; never more than an empty cache could hold.
        self.object_max = min(object_max, limit - OBJECT_BYTES - size_of(b''))
        self._entries: dict[int, Revision] = {}     # the newest
        self._older: dict[int, Revision] = {}       # the one before, for few objects
        self._clock: deque[int] = deque()       # oids that the hand has not passed yet in this round
        self.bases = Bases(int(limit * BASES_SHARE)) if keep_bases else None
        self._overwritten: list[tuple[int, Base]] = []      # candidates for bases
        self._bytes = 0
        self._last_tid = 0          # of the last revision added: the next often has the same, and shares the int
        self._evictions = 0
        # Counted without a lock: a count may be lost between threads.
        self._hits = self._misses = 0

    # Reading

    def find(self, oid: int, at: int) -> Revision | None:
        """Return what a view at `at` sees of the object, or None if that is not cached."""
        try:
            revision = self._entries[oid]
            if not revision.tid <= at <= revision.valid_to:
                revision = self._older[oid]
                if not revision.tid <= at <= revision.valid_to:
                    raise KeyError
        except KeyError:
            self._misses += 1
            return None
        revision.used = True
        self._hits += 1
        return revision

    def revision(self, oid: int, tid: int) -> bytes | None:
        """Return the state that the transaction `tid` gave the object, or None if it is not cached."""
        with self._lock:        # otherwise it might be moving from one place to another
            if self._overwritten and self.bases is not None:
                self._keep_bases(self.bases)
            for revision in (self._entries.get(oid), self._older.get(oid)):
                if revision is not None and revision.tid == tid:
                    return revision.state
            return None if self.bases is None else self.bases.get(oid, tid)

    def holds(self, oid: int, at: int) -> bool:
        """Whether find() would find it. Neither counted nor marked as used."""
        revision = self._entries.get(oid)
        if revision is None:
            return False        # there is no older one either
        if not revision.tid <= at <= revision.valid_to:
            revision = self._older.get(oid)
        return revision is not None and revision.tid <= at <= revision.valid_to

    def knows(self, oid: int, tid: int) -> bool:
        """Whether the transaction `tid` is known to have changed the object. False if that is forgotten."""
        return self._changed.get(oid) == tid or self.revision(oid, tid) is not None

    def was_used(self, oid: int) -> bool:
        """Whether the object was hit lately. False if it is not cached."""
        revision = self._entries.get(oid)
        return revision is not None and revision.used

    def stats(self) -> dict[str, int]:
        """Return hits, misses, objects, bytes (of the budget), evictions and log (objects in it)."""
        return {
            'hits': self._hits,
            'misses': self._misses,
            'objects': len(self._entries),
            'bytes': self._bytes,
            'evictions': self._evictions,
            'log': len(self._changed),
        }

    # Bases

    def add_view(self, view: Standing) -> None:
        """Keep the bases of what this view may change, for as long as it lives."""
        if self.bases is not None:
            with self._lock:
                self.bases.add(view)

    def _overwrite(self, oid: int, revision: Revision, before: int) -> None:
        """Note that a revision is dropped because the newer `before` replaced it."""
        if self.bases is not None:
            self._overwritten.append((oid, Base(revision.tid, before, revision.state)))

    def _keep_bases(self, bases: Bases) -> None:
        self._bytes -= bases.bytes
        bases.keep(self._overwritten)
        self._bytes += bases.bytes
        self._overwritten = []

    # Filling

    def put(self, oid: int, tid: int, state: bytes, at: int, generation: int | None = None) -> None:
        """Keep what a view at `at` loaded."""
        if len(state) > self.object_max or (self.unwanted is not None and self.unwanted(state)):
            return
        with self._lock:
            if generation is not None and generation != self.generation:    # as _outdated, without a call
                return
            if tid == self._last_tid:
                tid = self._last_tid
            self._last_tid = tid
            self._add(oid, tid, state, self._valid_to(oid, at))
            if self._overwritten and self.bases is not None:
                self._keep_bases(self.bases)
            if self._bytes > self.limit:
                self._evict()

    def committed(self, tid: int, rows: Iterable[tuple[int, bytes]], generation: int | None = None) -> None:
        """Keep what this process committed: (oid, state).  `head` does not move: other commits may lie between."""
        with self._lock:
            if generation is not None and generation != self.generation:    # as _outdated, without a call
                return
            self._last_tid = tid
            largest, covered, changed = self.object_max, tid >= self.floor, self._changed.get
            for oid, state in rows:
                if len(state) <= largest:
                    # _valid_to inlined: there may be many.
                    self._add(oid, tid, state, OPEN if covered and changed(oid, 0) <= tid else tid)
                    if self._bytes > self.limit:
                        self._evict()
            if self._overwritten and self.bases is not None:
                self._keep_bases(self.bases)
                if self._bytes > self.limit:
                    self._evict()

    def fill(self, rows: Iterable[tuple[int, int, bytes]], at: int, generation: int | None = None) -> bool:
        """Keep what was saved: (oid, tid, state) current at `at`, the most useful first.

        Only objects that are not cached yet, and only while there is room: nothing is evicted for them. When room is
        needed later, the last of them are evicted first, before anything that was put. Return whether to send more.
        """
        with self._lock:
            if self._outdated(generation) or at < self.floor:
                return False
            for oid, tid, state in rows:
                # A current state has the tid of the newest change, if that is in the log.
                if oid in self._entries or len(state) > self.object_max or self._changed.get(oid, tid) != tid:
                    continue
                if self._bytes + OBJECT_BYTES + size_of(state) > self.limit:
                    return False
                if self.unwanted is not None and self.unwanted(state):
                    continue
                self._add(oid, tid, state, OPEN)
                self._clock.appendleft(oid)
            return True

    def _valid_to(self, oid: int, at: int) -> int:
        """Return the last tid at which the revision that is current at `at` is known to be right."""
        unchanged = self._changed.get(oid, 0) <= at
        covered = at >= self.floor
        return OPEN if unchanged and covered else at

    def _add(self, oid: int, tid: int, state: bytes, valid_to: int) -> None:
        newest = self._entries.get(oid)
        if newest is None:
            self._bytes += OBJECT_BYTES + size_of(state)
            self._entries[oid] = Revision(tid, valid_to, state)
        elif newest.tid == tid:
            newest.valid_to = max(newest.valid_to, valid_to)
        elif newest.tid < tid:
            if newest.valid_to >= tid:
                newest.valid_to = tid - 1
            self._set_older(oid, newest)
            self._bytes += size_of(state)
            self._entries[oid] = Revision(tid, valid_to, state)
        else:
            self._add_older(oid, tid, state, min(valid_to, newest.tid - 1))

    def _add_older(self, oid: int, tid: int, state: bytes, valid_to: int) -> None:
        older = self._older.get(oid)
        if older is not None and older.tid == tid:
            older.valid_to = max(older.valid_to, valid_to)
        elif older is None or older.tid < tid:
            self._set_older(oid, Revision(tid, valid_to, state))
            self._bytes += size_of(state)
        else:
            self._overwrite(oid, Revision(tid, valid_to, state), older.tid)

    def _set_older(self, oid: int, revision: Revision) -> None:
        older = self._older.get(oid)
        if older is not None:
            self._bytes -= size_of(older.state)
            if self.bases is not None:
                self._overwrite(oid, older, revision.tid)
        self._older[oid] = revision

    def _evict(self) -> None:
        patience = SPARED_OBJECTS
        while self._bytes > self.limit:
            if not self._clock:
                self._begin_round()
                continue
            oid = self._clock.popleft()
            newest = self._entries[oid]
            if oid in self._older:
                # The older one goes first: views that need it do not live long.
                older = self._older.pop(oid)
                self._bytes -= size_of(older.state)
                self._overwrite(oid, older, newest.tid)
            elif newest.used and patience:
                patience -= 1
                newest.used = False
            else:
                del self._entries[oid]
                self._bytes -= OBJECT_BYTES + size_of(newest.state)
                self._evictions += 1

    def _begin_round(self) -> None:
        self._clock.extend(self._entries)
        if self.bases is not None:
            self._bytes -= self.bases.bytes
            self.bases.prune()
            self._bytes += self.bases.bytes

    # Polling

    def advance(
        self, old: int, new: int, changes: Iterable[tuple[int, int]], generation: int | None = None
    ) -> None:
        """Enter a poll's complete answer: (oid, newest tid) of every object that changed in (old, new].

        Earlier tids of the same object do no harm.
        """
        with self._lock:
            if self._outdated(generation) or new <= self.head:
                return
            if old > self.head:     # a gap between the log and this answer
                self._jump(new)
                return
            # The log is complete up to head: only what lies above is new. That also keeps the log in tid order.
            for tid, oid in sorted((tid, oid) for oid, tid in changes if self.head < tid <= new):
                self._changed.pop(oid, None)
                self._changed[oid] = tid
                self._expire(oid, tid)
            self.head = new         # last: a view may stand there as soon as it reads it
            if len(self._changed) > self.log_limit:
                middle = next(islice(reversed(self._changed.values()), self.log_limit // 2, None))
                self._trim(middle)

    def jump(self, new: int, generation: int | None = None) -> None:
        """Enter a poll whose answer is too long to list: anything may have changed up to `new`."""
        with self._lock:
            if not self._outdated(generation) and new > self.head:
                self._jump(new)

    def _jump(self, new: int) -> None:
        for oid in self._entries:
            self._expire(oid, OPEN)
        self._changed = {}
        self.floor = new
        self.head = new

    def _expire(self, oid: int, tid: int) -> None:
        """Limit the validity of revisions older than the object's change at `tid`.

        They were right up to head, because the log is complete up to there, but not necessarily up to tid - 1:
        tid is only the newest change, and a view may stand between it and an earlier one, at its own answer.
        So the older revision is limited too, even if a commit of this process has already done that.
        """
        for revision in (self._entries.get(oid), self._older.get(oid)):
            if revision is not None and revision.tid < tid:
                if revision.valid_to > self.head:
                    revision.valid_to = self.head
                revision.used = False   # no new view needs it, so it may be evicted

    def current(self, generation: int | None = None) -> tuple[int, list[tuple[int, int, bytes]]]:
        """Return (head, [(oid, tid, state)] of the cached revisions that are right at head), those in use first."""
        with self._lock:
            head = self.head
            entries = {} if self._outdated(generation) else self._entries.copy()
        # Without the lock, for there may be many: every value of valid_to is true, and not below this head if the
        # revision is right there.
        used: list[tuple[int, int, bytes]] = []
        unused: list[tuple[int, int, bytes]] = []
        for oid, newest in entries.items():
            if newest.tid <= head <= newest.valid_to:
                (used if newest.used else unused).append((oid, newest.tid, newest.state))
        return head, used + unused

    def clear(self) -> None:
        """Forget every state, but not the log. ZODB's own tests call this on `storage._cache`."""
        with self._lock:
            self._forget()

    def restart(self, head: int) -> None:
        """Forget everything: the epoch changed, and the database now stands at `head`, which may be lower."""
        with self._lock:
            self._forget()
            self._changed = {}
            self.floor = head
            self.head = head
            # Last, so that a reader, who reads it before head, never sees the new generation with the old head.
            self.generation += 1

    def remove(self, oids: Iterable[int] | None) -> None:
        """Forget objects that were packed away (None: all), and every older revision; begin a new generation.

        No view of the previous generation can bring them back.
        """
        with self._lock:
            if oids is None:
                self._forget()
            for oid, revision in self._older.items():
                self._bytes -= size_of(revision.state)
                self._overwrite(oid, revision, self._entries[oid].tid)
            self._older = {}
            for oid in oids or ():
                gone = self._entries.pop(oid, None)
                if gone is not None:
                    self._bytes -= OBJECT_BYTES + size_of(gone.state)
            self._clock = deque(oid for oid in self._clock if oid in self._entries)
            self._changed = {}
            self.floor = self.head
            self.generation += 1

    def after_fork(self) -> None:
        """Begin anew in a child process: another thread may have been writing when it was forked."""
        self._lock = Lock()
        if self.bases is not None:
            self.bases.after_fork()
        self.restart(self.head)

    def _forget(self) -> None:
        self._entries = {}
        self._older = {}
        self._clock.clear()
        self._overwritten = []
        if self.bases is not None:
            self.bases.clear()
        self._bytes = 0
