"""Two processes that share a memcached, against a database that is a dictionary: whatever the tier answers is what
that view would load."""
import random
import unittest
from unittest import mock

from relstore.caching import shared as tier_module
from relstore.caching.cache import Cache
from relstore.caching.memcached import Unreachable
from relstore.caching.shared import Tier
from relstore.tests.support.layers import Models
from relstore.tests.support.world import LIMIT, LOG_LIMIT, OIDS, World, get

# Objects that may have changed since the base.
TIER_LIMIT = 4


class Shelf:
    """A memcached, and the client of it, as far as Tier uses them. Writes may arrive late, and values be garbled."""

    def __init__(self, rnd):
        self.rnd = rnd
        self.values = {}
        self.late = []              # functions: a write arrives
        self.down = False
        self.first = self

    def get_many(self, keys):
        return {} if self.down else {key: self.values[key] for key in keys if key in self.values}

    def set_many(self, values):
        if not self.down:
            for key, value in values.items():
                self._write(lambda key=key, value=value: self.values.__setitem__(key, value))

    def get(self, key):
        self._reach()
        return self.values.get(key)

    def set(self, key, value):
        self._reach()
        self._write(lambda: self.values.__setitem__(key, value))

    def add(self, key, value):
        self._reach()
        if key in self.values:
            return False
        self._write(lambda: self.values.setdefault(key, value))
        return True

    def _reach(self):
        if self.down:
            raise Unreachable

    def _write(self, write):
        if self.rnd.random() < .1:
            self.late.append(write)
        else:
            write()

    def suffer(self):
        """What happens to a memcached."""
        dice = self.rnd.random()
        if dice < .5 and self.late:
            self.late.pop(self.rnd.randrange(len(self.late)))()
        elif dice < .6 or self.down:
            self.down = not self.down
        elif dice < .63:
            self.values.clear()
        elif self.values:
            key = self.rnd.choice(sorted(self.values))
            if dice < .8:
                del self.values[key]
            elif dice < .9:
                self.values[key] = self.values[key][:self.rnd.randrange(len(self.values[key]) + 1)]
            else:
                self.values[key] = self.values[self.rnd.choice(sorted(self.values))]


class Site:
    """The database, with its history in each epoch."""

    def __init__(self):
        self.epoch = 0
        self.histories = [{oid: [(0, b'%d at first' % oid)] for oid in range(OIDS)}]
        self.last = self.clock = self.commits = 0

    def crash(self, lost):
        """The newest commits are lost, and their tids may be given again."""
        self.last = self.clock = max(0, self.last - lost)
        self.histories.append(self._until_now())
        self.epoch += 1

    def restore(self, lost):
        """A backup takes the place of the database, and its epoch is the same. Time goes on."""
        self.last = max(0, self.last - lost)
        self.histories[self.epoch] = self._until_now()

    def _until_now(self):
        return {oid: [(tid, state) for tid, state in revisions if tid <= self.last]
                for oid, revisions in self.histories[self.epoch].items()}


class Process(World):
    """One process: its cache and views, and its face of the tier. It may not know yet that an epoch is over."""

    def __init__(self, site, tier, reaches_back):
        self.site = site
        super().__init__(tier.cache)
        self.tier, self.reaches_back = tier, reaches_back
        self.shared_hits = 0
        self.begin()

    last = property(lambda self: self.site.last, lambda self, last: self.move(last))
    commits = property(lambda self: self.site.commits, lambda self, commits: self.count(commits))
    revisions = property(lambda self: self.site.histories[self.epoch], lambda self, revisions: None)

    def move(self, last):
        """The next tid comes from a clock."""
        if last:        # not when World is made
            self.site.clock = self.site.last = self.site.clock + last - self.site.last

    def count(self, commits):
        self.site.commits = max(commits, self.site.commits)

    def begin(self):
        self.epoch = self.site.epoch
        base = self.tier.begin('site', str(self.epoch), self.cache.generation + 1, self.last)
        self.cache.restart(self.last if base is None or not self.reaches_back else base)

    def ask(self):
        if self.epoch != self.site.epoch:
            self.begin()
        return super().ask()

    def look(self):
        self.tier.look_soon()
        self.tier.look()

    def commit(self, oids, step, view=None):
        if self.epoch != self.site.epoch:
            if view is None:
                return
            self.answer(view, *self.ask())      # refused: it has to poll
        super().commit(oids, step, view)
        if view is not None:
            tid, generation = self.last, view.generation
            rows = [(oid, self.truth(oid, tid)[1], None) for oid in oids]
            self.pending.append(lambda: self.tier.committed(tid, rows, generation))

    def load(self, view, oid, late):
        self.wake(view)
        tid, state = self.truth(oid, view.at)
        at, generation = view.at, view.generation
        hit = get(self.cache, oid, at)
        if hit is not None:
            self.hits += 1
            assert hit == (state, tid), f'view {at} of {oid} got {hit}, not {(state, tid)}'
            return
        row = self.tier.get([oid], at, generation).get(oid)
        if row is not None:
            self.shared_hits += 1
            assert row == (state, tid, None), f'view {at} of {oid} was told {row}, not {(state, tid)}'
        elif self.epoch != self.site.epoch:
            return self.answer(view, *self.ask())       # a session of the new epoch: ReadConflictError
        else:
            self.pending.append(lambda: self.tier.put([(oid, state, tid, None)], at, generation))
        self.pending.append(lambda: self.cache.put(oid, tid, state, at, generation))
        if not late:
            self.arrive(-1)
        view.objects[oid] = state


def history(seed, make_tier=Tier, steps=300):
    """Run one random history of two processes; return them."""
    rnd = random.Random(seed)
    shelf, site = Shelf(rnd), Site()

    def start():
        # Small caches: what is in the process already is not asked for.
        cache = Cache(rnd.choice((0, LIMIT)), 100, rnd.choice((LOG_LIMIT, 100)))
        return Process(site, make_tier(shelf, 'p', cache, TIER_LIMIT), rnd.random() < .7)

    processes = [start(), start()]
    for _ in range(steps):
        dice, number = rnd.random(), rnd.randrange(2)
        process = processes[number]
        view = rnd.choice(process.views)
        if dice < .08:
            mine = rnd.random() < .5 and view.own is None and view.generation == process.cache.generation
            process.commit(rnd.sample(range(OIDS), rnd.randrange(1, 3)), rnd.randrange(1, 3), view if mine else None)
        elif dice < .2:
            process.poll(view)
        elif dice < .4:
            if process.pending:
                process.arrive(rnd.randrange(len(process.pending)))
        elif dice < .85:
            process.load(view, rnd.randrange(OIDS), late=rnd.random() < .2)
        elif dice < .93:
            process.look()
        elif dice < .97:
            shelf.suffer()
        elif dice < .98:
            process.trim(rnd.randrange(process.cache.head + 1))
        elif dice < .99:
            processes[number] = start()
            processes[number].shared_hits = process.shared_hits
        elif dice < .995:
            site.crash(rnd.randrange(3))
        else:
            # The site was stopped for this; the memcached is there when it starts.
            shelf.down, shelf.late = False, []
            site.restore(rnd.randrange(3))
            hits = [process.shared_hits for process in processes]
            processes = [start(), start()]
            for process, count in zip(processes, hits, strict=True):
                process.shared_hits = count
        for process in processes:
            process.check()
    return processes


# Each rule of the tier left out.

class TakesNoAnswerForUnchanged(Tier):
    def _facts(self, epoch, oid, at):
        for base in epoch.bases:
            yield self.cache.newest_change(oid, at, base, epoch.generation) or 0, base


class AsksForTheBaseOnly(Tier):
    def _facts(self, epoch, oid, at):
        for change, base in super()._facts(epoch, oid, at):
            yield change and 0, base


class IgnoresThatTheLogEnds(Tier):
    def _facts(self, epoch, oid, at):
        for base in epoch.bases:
            change = self.cache._changed.get(oid, 0)
            yield change if base < change <= at else 0, base


class PutsUnderTheBaseWhatever(Tier):
    def _named(self, epoch, rows, at):
        for oid, state, tid, refs in rows:
            for base in epoch.bases[:1]:
                yield epoch.key(oid, 0, base), state, tid, refs


class KeepsItsKeysInANewEpoch(Tier):
    def begin(self, database, epoch, generation, last):
        return super().begin(database, 'any', generation, last)


class ForgetsTheGeneration(Tier):
    def _of(self, generation):
        return self.epoch


class ForgetsThatTheDatabaseWentBack(Tier):
    def begin(self, database, epoch, generation, last):
        return super().begin(database, epoch, generation, 1 << 62)


WITHOUT = (TakesNoAnswerForUnchanged, AsksForTheBaseOnly, IgnoresThatTheLogEnds, PutsUnderTheBaseWhatever,
           KeepsItsKeysInANewEpoch, ForgetsTheGeneration, ForgetsThatTheDatabaseWentBack)


class TestHistories(unittest.TestCase):
    layer = Models

    def test_random_histories(self):
        hits = 0
        for seed in range(300):
            with self.subTest(seed=seed):
                hits += sum(process.shared_hits for process in history(seed))
        self.assertGreater(hits, 1000)

    def assert_caught(self, make_tier=Tier):
        for seed in range(3000):
            try:
                history(seed, make_tier)
            except AssertionError:
                return seed
        self.fail('3000 histories saw nothing wrong')

    def test_each_rule_is_needed(self):
        for make_tier in WITHOUT:
            with self.subTest(make_tier.__name__):
                self.assert_caught(make_tier)

    def test_the_checksum_is_needed(self):
        original = tier_module._checksum
        self.addCleanup(setattr, tier_module, '_checksum', original)
        for name, checksum in [('none', lambda key, content: bytes(8)),
                               ('without the key', lambda key, content: original('', content))]:
            with self.subTest(name):
                tier_module._checksum = checksum
                self.assert_caught()


class TestBases(unittest.TestCase):

    def setUp(self):
        self.shelf = Shelf(mock.Mock(random=lambda: 1.0))       # nothing is late
        self.cache = Cache(0, 0)
        self.tier = Tier(self.shelf, 'p', self.cache)

    def begin(self, last, tier=None):
        return (tier or self.tier).begin('site', 'epoch', self.cache.generation + 1, last)

    def look(self):
        self.tier.look_soon()
        self.tier.look()

    def test_garbage_in_place_of_the_base_is_replaced(self):
        self.begin(100)
        self.cache.restart(100)
        key = f'{self.tier.epoch.namespace}base'
        for garbage in (b'', b'x', bytes(24)):
            with self.subTest(garbage):
                self.shelf.values[key] = garbage
                self.tier.epoch.bases = ()
                self.look()
                self.assertEqual(self.tier.epoch.bases, (100,))
                self.assertEqual(self.begin(100, Tier(self.shelf, 'p', Cache(0, 0))), 100)

    def test_a_fork_asks_nothing(self):
        """Not even when there is no base yet; and a base that others have moved on is no sign of a restored backup."""
        for shared, bases in [(False, ()), (True, (100,))]:
            with self.subTest(shared=shared):
                self.begin(100)
                self.cache.restart(100)
                if shared:
                    self.look()
                key = f'{self.tier.epoch.namespace}base'
                others = self.shelf.values[key] = tier_module._encode_bases(key, (120, 100))
                with mock.patch.object(self.shelf, '_reach', side_effect=AssertionError('asked')):
                    self.assertEqual(self.begin(100), 100 if shared else None)
                self.assertEqual(self.tier.epoch.bases, bases)
                self.assertEqual(self.shelf.values.pop(key), others)

    def test_a_database_that_went_back_under_a_running_process(self):
        self.begin(100)
        self.cache.restart(100)
        self.look()
        self.cache.advance(100, 130, [])
        key = f'{self.tier.epoch.namespace}base'
        self.shelf.values[key] = tier_module._encode_bases(key, (120, 100))
        self.assertEqual(self.begin(110), 110)
        self.assertEqual(self.begin(130, Tier(self.shelf, 'p', Cache(0, 0))), 110, 'the others know')
