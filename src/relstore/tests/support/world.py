"""A database that is a dictionary, and the views that share a cache of it."""
from relstore.caching.revision import OBJECT_BYTES, REVISION_BYTES, memory_of

OIDS = 8
VIEWS = 4
# A poll's answer is listed up to this many objects; above, it is a jump.
POLL_LIMIT = 5
# Room for about five objects, some with two revisions.
LIMIT = 1600
LOG_LIMIT = 6


def get(cache, oid, at):
    """Return (state, tid) of what the cache finds, or None."""
    found = cache.find(oid, at)
    return None if found is None else (found.state, found.tid)


class View:
    """One ZODB connection: what it sees, and the objects it keeps."""

    def __init__(self, snapshot: bool):
        self.snapshot = snapshot    # does it stand at its own answer (history-free), or at head?
        self.at = 0                 # None between its commit, or a lost epoch, and its next poll
        self.last = 0               # the newest `at` that it had
        self.own = None             # tid of its commit since then
        self.generation = 0
        self.objects = {}           # oid -> state


class World:
    """A database, the views that share a cache, and the messages that are under way."""

    def __init__(self, cache, views_outlive_commits=False, late_answers_will_do=False):
        self.cache = cache
        self.views_outlive_commits = views_outlive_commits
        self.late_answers_will_do = late_answers_will_do
        self.last = 0
        self.revisions = {oid: [(0, b'%d at first' % oid)] for oid in range(OIDS)}
        self.views = [View(snapshot=number % 2 == 1) for number in range(VIEWS)]
        self.pending = []           # functions: a message arrives
        self.commits = 0
        self.hits = 0

    def truth(self, oid, at):
        """Return (tid, state) of the object as of `at`."""
        return max(revision for revision in self.revisions[oid] if revision[0] <= at)

    # What can happen

    def commit(self, oids, step, view=None):
        """By that view, or by another process."""
        self.last += step
        self.commits += 1
        stored = {oid: b'%d by commit %d' % (oid, self.commits) for oid in oids}
        for oid, state in stored.items():
            self.revisions[oid].append((self.last, state))
        if view is not None:
            tid, generation = self.last, view.generation
            view.at = tid if self.views_outlive_commits else None
            view.own = tid
            view.objects.update(stored)

            def arrive():
                for oid, state in stored.items():
                    self.cache.committed(tid, [(oid, state)], generation)
            self.pending.append(arrive)

    def poll(self, view):
        """Send a poll, whose answer arrives later."""
        question = self.ask()
        self.pending.append(lambda: self.answer(view, *question))

    def load(self, view, oid, late):
        """Load, from the cache if it can; what the database answers may be entered later."""
        self.wake(view)
        tid, state = self.truth(oid, view.at)
        hit = get(self.cache, oid, view.at)
        if hit is not None:
            self.hits += 1
            assert hit == (state, tid), f'view {view.at} of {oid} got {hit}, not {(state, tid)}'
        else:
            at, generation = view.at, view.generation
            self.pending.append(lambda: self.cache.put(oid, tid, state, at, generation))
            if not late:
                self.arrive(-1)
        view.objects[oid] = state

    def resolve(self, oid, number):
        """Ask for a certain revision, whatever the views."""
        tid, state = self.revisions[oid][number % len(self.revisions[oid])]
        assert self.cache.revision(oid, tid) in (None, state)

    def arrive(self, number):
        self.pending.pop(number)()

    def trim(self, floor):
        self.cache.trim(floor)

    def crash(self, lost):
        """The newest commits are lost, and their tids may be given again."""
        self.last = max(0, self.last - lost)
        for oid, revisions in self.revisions.items():
            self.revisions[oid] = [(tid, state) for tid, state in revisions if tid <= self.last]
        self.cache.restart(self.last)

    # How a poll goes

    def wake(self, view):
        if view.at is None or view.generation != self.cache.generation:
            self.answer(view, *self.ask())

    def ask(self):
        generation, old = self.cache.generation, self.cache.head
        newest = {oid: revisions[-1][0] for oid, revisions in self.revisions.items()}
        return generation, old, self.last, [(oid, tid) for oid, tid in newest.items() if tid > old]

    def answer(self, view, generation, old, new, changes):
        if len(changes) > POLL_LIMIT:
            self.cache.jump(new, generation)
        else:
            self.cache.advance(old, new, changes, generation)
        at = new if view.snapshot else self.cache.head
        asked_too_early = at < max(view.last, view.own or 0)
        if self.late_answers_will_do:
            asked_too_early = False
        if generation != self.cache.generation:
            return self.answer(view, *self.ask())
        if view.generation == generation and asked_too_early:
            return self.answer(view, *self.ask())
        changed = self.cache.invalidations(view.last, view.own, view.generation)
        for oid in list(view.objects) if changed is None else changed:
            view.objects.pop(oid, None)
        view.at = view.last = at
        view.own = None
        view.generation = generation
        for oid, state in view.objects.items():
            assert state == self.truth(oid, at)[1], f'view {at} kept {state} of {oid}'

    # What always holds

    def check(self):
        cache, stats = self.cache, self.cache.stats()
        assert cache._older.keys() <= cache._entries.keys()
        used = sum(REVISION_BYTES + memory_of(revision.state)
                   for revision in (*cache._entries.values(), *cache._older.values()))
        assert stats['bytes'] == used + OBJECT_BYTES * stats['objects'] <= cache.limit
        assert len(set(cache._clock)) == len(cache._clock)
        assert cache._entries.keys() >= set(cache._clock)
        assert stats['log'] <= cache.log_limit
        assert list(cache._changed.values()) == sorted(cache._changed.values())
        assert all(cache.floor < tid <= cache.head for tid in cache._changed.values())
