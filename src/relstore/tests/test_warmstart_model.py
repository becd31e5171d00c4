"""The saved cache in random histories: what is read back is true, whatever became of the file or the database."""
import logging
import random
from pathlib import Path

from relstore.caching import warmstart
from relstore.caching.cache import Cache
from relstore.caching.proof import is_proven
from relstore.caching.warmstart import WarmStart
from relstore.tests.support.layers import Models
from relstore.tests.support.saved import Directory
from relstore.tests.support.world import LIMIT, LOG_LIMIT, OIDS, View, World


class Later:
    """A cache into which what is read arrives later, as if a slow thread read it."""

    def __init__(self, process):
        self._process = process
        self._cache = process.cache

    def fill(self, rows, at, generation):
        cache = self._cache
        self._process.pending.append(lambda: cache.fill(rows, at, generation))
        return True

    def __getattr__(self, name):
        return getattr(self._cache, name)


class Shared:
    """What several processes have in common."""

    def __init__(self):
        self.epoch = self.last = self.commits = 0
        self.latest = 0         # tid that ever was: a restored database gives none of them again
        self.revisions = {oid: [(0, b'%d at first' % oid)] for oid in range(OIDS)}

    def stands(self, session, tid):
        """As where no history is kept."""
        return max((revisions[-1][0] for revisions in self.revisions.values() if revisions[-1][0] <= tid), default=0)

    def current_tids(self, session, oids):
        return {oid: self.revisions[oid][-1][0] for oid in oids}

    def proves(self, known):
        return is_proven(self, None, known)


class Process(World):
    """One of several over one database, with a file."""

    def __init__(self, shared, make_cache, make_warm, directory):
        self.shared, self._make_cache, self._make_warm, self._directory = shared, make_cache, make_warm, directory
        last, commits = shared.last, shared.commits
        super().__init__(make_cache())
        shared.last, shared.commits = last, commits
        self.revisions = shared.revisions
        self.start()

    last = property(lambda self: self.shared.last, lambda self, last: setattr(self.shared, 'last', last))
    commits = property(lambda self: self.shared.commits, lambda self, count: setattr(self.shared, 'commits', count))

    def epoch_of(self, generation):
        return str(self.shared.epoch) if generation in (-1, self.cache.generation) else ''

    def start(self):
        self.cache = self._make_cache()
        self.pending = []
        for view in self.views:
            View.__init__(view, view.snapshot)
            view.at, view.generation = None, -1
        self.warm = self._make_warm(self._directory, 'model', Later(self), self.epoch_of, self.shared.proves, 100_000)
        self.cache.restart(self.warm.head(str(self.shared.epoch), lambda: self.last, self.shared.proves))
        if self.warm._usable:
            self.warm.fill(self.cache.generation)

    def save(self):
        self.warm._saved = None
        self.warm.save()


def history(seed, directory, make_cache=Cache, make_warm=WarmStart, steps=250):
    """Run one random history of two processes; return how many hits there were."""
    rnd = random.Random(seed)
    shared = Shared()
    limit = rnd.choice((LIMIT, 100 * LIMIT))
    for entry in Path(directory).iterdir():
        entry.unlink()
    processes = [Process(shared, lambda: make_cache(limit, 100, LOG_LIMIT), make_warm, directory) for _ in range(2)]

    def commit_somewhere(count=1):
        for _ in range(count):
            processes[0].commit(rnd.sample(range(OIDS), rnd.randrange(1, 3)), rnd.randrange(1, 3))

    def go_back(lost):
        shared.last = max(0, shared.last - lost)
        for oid, revisions in shared.revisions.items():
            shared.revisions[oid] = [(tid, record) for tid, record in revisions if tid <= shared.last]

    for _ in range(steps):
        process = rnd.choice(processes)
        dice, view = rnd.random(), rnd.choice(process.views)
        if dice < .1:
            mine = rnd.random() < .5 and view.own is None and view.generation == process.cache.generation
            process.commit(rnd.sample(range(OIDS), rnd.randrange(1, 3)), rnd.randrange(1, 3), view if mine else None)
        elif dice < .25:
            process.poll(view)
        elif dice < .5:
            if process.pending:
                process.arrive(rnd.randrange(len(process.pending)))
        elif dice < .85:
            process.load(view, rnd.randrange(OIDS), late=rnd.random() < .3)
        elif dice < .92:
            process.save()
        elif dice < .97:
            process.start()
        elif dice < .98:        # a crash that those who live notice
            shared.epoch += rnd.randrange(2)
            go_back(rnd.randrange(4))
            for process in processes:
                process.warm.discard()
                process.cache.restart(shared.last)
        elif dice < .99:        # a crash, and commits, while none of these lived
            shared.epoch += 1
            go_back(rnd.randrange(1, 6))
            commit_somewhere(rnd.randrange(8))
            for process in processes:
                process.start()
        else:                   # an older state is put in place of the database: not even the epoch tells
            shared.latest = max(shared.latest, shared.last)
            go_back(rnd.randrange(1, 6))
            if rnd.random() < .5:
                shared.last = shared.latest
                commit_somewhere(rnd.randrange(1, 8))
            for process in processes:
                process.start()
        for process in processes:
            process.check()
    return sum(process.hits for process in processes)


# Each rule left out.

class FillsWhatChanged(Cache):
    def fill(self, rows, at, generation=None):
        changed, self._changed = self._changed, {}
        try:
            return super().fill(rows, at, generation)
        finally:
            self._changed = changed


class FillsBelowTheFloor(Cache):
    def fill(self, rows, at, generation=None):
        return super().fill(rows, max(at, self.floor), generation)


class FillsAnotherGeneration(Cache):
    def fill(self, rows, at, generation=None):
        return super().fill(rows, at)


class SavesWhatIsOver(Cache):
    def current(self, generation=None):
        return self.head, [(oid, newest.tid, newest.state) for oid, newest in self._entries.items()]


class BelievesEveryEpoch(WarmStart):
    def __init__(self, directory, database, cache, epoch_of, *rest):
        super().__init__(directory, database, cache, lambda generation: epoch_of(generation) and 'epoch', *rest)

    def head(self, epoch, last_tid, proves):
        return super().head('epoch', last_tid, proves)


class BelievesWithoutProof(WarmStart):
    def _prove(self, file, proves):
        """Not asked."""


class BelievesWhatIsAhead(WarmStart):
    def _prove(self, file, proves):
        """Not asked."""

    def head(self, epoch, last_tid, proves):
        if not self._ahead(epoch):
            return last_tid()
        return super().head(epoch, lambda: max(last_tid(), 1 << 62), proves)

    def _ahead(self, epoch):
        try:
            with self._open(epoch):
                return True
        except warmstart.Unusable:
            return False


class LeavesWhatIsAhead(WarmStart):
    def discard(self):
        """Not even this."""


class _Merging(WarmStart):
    """Merges by another rule."""

    def _rows(self, own, head, epoch, generation):
        held = {row[0] for row in own}
        yield from own
        try:
            with self._open(epoch) as file:
                changed = self.changed(file, generation)
                if changed is not None:
                    held.update(changed)
                    for rows in file.blocks():
                        yield from (row for row in rows if row[0] not in held and self.keeps(row, head))
        except warmstart.Unusable:
            return

    def changed(self, file, generation):
        return self._cache.invalidations(file.head, None, generation)

    def keeps(self, row, head):
        return row[1] <= head


class MergesEverything(_Merging):
    def changed(self, file, generation):
        return []


class MergesBelowTheFloor(_Merging):
    def changed(self, file, generation):
        return self._cache.invalidations(max(file.head, self._cache.floor), None, generation)


CACHES = FillsWhatChanged, FillsBelowTheFloor, FillsAnotherGeneration, SavesWhatIsOver
FILES = (BelievesEveryEpoch, BelievesWithoutProof, BelievesWhatIsAhead, LeavesWhatIsAhead, MergesEverything,
         MergesBelowTheFloor)


class TestHistories(Directory):
    layer = Models

    def setUp(self):
        super().setUp()
        self.patch('BLOCK_BYTES', 60)

    def test_random_histories(self):
        hits = 0
        for seed in range(250):
            with self.subTest(seed=seed):
                hits += history(seed, self.directory)
        self.assertGreater(hits, 4000)

    def assert_caught(self, **how):
        logging.disable()
        self.addCleanup(logging.disable, logging.NOTSET)
        for seed in range(1500):
            try:
                history(seed, self.directory, **how)
            except AssertionError:
                return
        self.fail('1500 histories saw nothing wrong')

    def test_each_guard_is_needed(self):
        for make_cache in CACHES:
            with self.subTest(make_cache.__name__):
                self.assert_caught(make_cache=make_cache)
        for make_warm in FILES:
            with self.subTest(make_warm.__name__):
                self.assert_caught(make_warm=make_warm)
