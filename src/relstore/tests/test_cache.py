"""The cache against a database that is a dictionary: whatever it answers is what that view would load."""
import random
import sys
import threading
import tracemalloc
import unittest

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from relstore.caching.cache import SPARED_OBJECTS, Cache
from relstore.caching.revision import OBJECT_BYTES, OPEN, REVISION_BYTES
from relstore.tests.support.layers import Models
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.world import LIMIT, LOG_LIMIT, OIDS, VIEWS, World, get


def history(seed, make_cache=Cache, steps=200, **mistakes):
    """Run one random history; return its World."""
    rnd = random.Random(seed)
    # Half of the histories have room enough: what is evicted cannot be wrong.
    world = World(make_cache(rnd.choice((LIMIT, 100 * LIMIT)), 100, LOG_LIMIT), **mistakes)
    for _ in range(steps):
        dice, view = rnd.random(), rnd.choice(world.views)
        if dice < .2:
            mine = rnd.random() < .5 and view.own is None and view.generation == world.cache.generation
            stored = rnd.sample(range(OIDS), rnd.randrange(1, 4))
            world.commit(stored, rnd.randrange(1, 3), view if mine else None)
        elif dice < .4:
            world.poll(view)
        elif dice < .65:
            if world.pending:
                world.arrive(rnd.randrange(len(world.pending)))
        elif dice < .95:
            world.load(view, rnd.randrange(OIDS), late=rnd.random() < .3)
        elif dice < .97:
            world.resolve(rnd.randrange(OIDS), rnd.randrange(100))
        elif dice < .995:
            world.trim(rnd.randrange(world.cache.head + 1))
        else:
            world.crash(rnd.randrange(4))
        world.check()
    return world


class Histories(RuleBasedStateMachine):
    """The same world, driven by hypothesis, which shortens what it finds."""

    oids = st.integers(0, OIDS - 1)
    numbers = st.integers(0, VIEWS - 1)

    def __init__(self):
        super().__init__()
        self.world = World(Cache(LIMIT, 100, LOG_LIMIT))

    @rule(stored=st.sets(oids, min_size=1, max_size=4), step=st.integers(1, 2))
    def commit(self, stored, step):
        self.world.commit(sorted(stored), step)

    @rule(number=numbers, stored=st.sets(oids, min_size=1, max_size=4), step=st.integers(1, 2))
    def commit_here(self, number, stored, step):
        view = self.world.views[number]
        mine = view.own is None and view.generation == self.world.cache.generation
        self.world.commit(sorted(stored), step, view if mine else None)

    @rule(number=numbers)
    def poll(self, number):
        self.world.poll(self.world.views[number])

    @rule(number=numbers)
    def poll_at_once(self, number):
        self.world.poll(self.world.views[number])
        self.world.arrive(-1)

    @precondition(lambda self: self.world.pending)
    @rule(data=st.data())
    def arrive(self, data):
        self.world.arrive(data.draw(st.integers(0, len(self.world.pending) - 1)))

    @rule(number=numbers, oid=oids, late=st.booleans())
    def load(self, number, oid, late):
        self.world.load(self.world.views[number], oid, late)

    @rule(oid=oids, number=st.integers(0, 20))
    def resolve(self, oid, number):
        self.world.resolve(oid, number)

    @rule(behind=st.integers(0, 5))
    def trim(self, behind):
        self.world.trim(max(0, self.world.cache.head - behind))

    @rule(lost=st.integers(0, 3))
    def crash(self, lost):
        self.world.crash(lost)

    def teardown(self):
        self.world.check()


# Each rule of the cache left out, in a way that looks harmless.

class PutsWithoutChanged(Cache):
    def _valid_to(self, oid, at):
        return OPEN if at >= self.floor else at


class PutsWithoutFloor(Cache):
    def _valid_to(self, oid, at):
        return OPEN if self._changed.get(oid, 0) <= at else at


class NeverEnds(Cache):
    def _expire(self, oid, tid):
        if tid == OPEN:
            super()._expire(oid, tid)


class EndsBeforeTheChange(Cache):
    def _expire(self, oid, tid):
        for revision in (self._entries.get(oid), self._older.get(oid)):
            if revision is not None and revision.tid < tid:
                revision.valid_to = min(revision.valid_to, self.head if tid == OPEN else tid - 1)


class EndsTheNewestOnly(Cache):
    def _expire(self, oid, tid):
        newest = self._entries.get(oid)
        if newest is not None and newest.tid < tid:
            newest.valid_to = min(newest.valid_to, self.head)


class JumpsWithoutEnding(Cache):
    def _expire(self, oid, tid):
        if tid != OPEN:
            super()._expire(oid, tid)


class JumpsWithoutFloor(Cache):
    def _jump(self, new):
        floor = self.floor
        super()._jump(new)
        self.floor = floor


class TrimsWithoutFloor(Cache):
    def _trim(self, floor):
        before = self.floor
        super()._trim(floor)
        self.floor = before


class AdvancesPastAnOwnCommit(Cache):
    def committed(self, tid, rows, generation=None):
        super().committed(tid, rows, generation)
        if not self._outdated(generation):
            self.head = max(self.head, tid)


class ForgetsTheGeneration(Cache):
    def _outdated(self, generation):
        return False


WITHOUT = (
    PutsWithoutChanged, PutsWithoutFloor, NeverEnds, EndsBeforeTheChange, EndsTheNewestOnly,
    JumpsWithoutEnding, JumpsWithoutFloor, TrimsWithoutFloor, AdvancesPastAnOwnCommit, ForgetsTheGeneration,
)


class TestHistories(unittest.TestCase):
    layer = Models

    def test_random_histories(self):
        hits = 0
        for seed in range(300):
            with self.subTest(seed=seed):
                hits += history(seed).hits
        self.assertGreater(hits, 3000)

    def test_hypothesis(self):
        run_state_machine_as_test(
            Histories,
            settings=settings(max_examples=300 if THOROUGH else 100, stateful_step_count=80, deadline=None,
                              derandomize=True, database=None),
        )

    def assert_caught(self, **how):
        for seed in range(2000):
            try:
                history(seed, **how)
            except AssertionError:
                return seed
        self.fail('2000 histories saw nothing wrong')

    def test_each_guard_is_needed(self):
        for make_cache in WITHOUT:
            with self.subTest(make_cache.__name__):
                self.assert_caught(make_cache=make_cache)

    def test_no_view_between_own_commit_and_poll(self):
        self.assert_caught(views_outlive_commits=True)

    def test_answers_from_before_the_own_commit_do_not_count(self):
        self.assert_caught(late_answers_will_do=True)


class TestThreads(unittest.TestCase):
    """Sixteen views read while one thread polls.

    The database is arithmetic: an object changes at every tid that PERIOD divides when its oid is added.
    """
    layer = Models

    PERIOD = 7
    OIDS = 40
    POLLS = 1500

    def truth(self, oid, at):
        tid = max(0, at - (at + oid) % self.PERIOD)
        return b'%d at %d' % (oid, tid), tid

    def changes(self, old, new):
        newest = ((oid, self.truth(oid, new)[1]) for oid in range(self.OIDS))
        return [(oid, tid) for oid, tid in newest if tid > old]

    def setUp(self):
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        self.cache = Cache(30 * (REVISION_BYTES + OBJECT_BYTES + 50), 1000, log_limit=100)
        self.done = threading.Event()
        self.wrong = []

    def poll(self):
        rnd = random.Random(1)
        for _ in range(self.POLLS):
            old = self.cache.head
            new = old + rnd.randrange(1, 4)
            if rnd.random() < .02:
                self.cache.jump(new)
            else:
                self.cache.advance(old, new, self.changes(old, new))
            if rnd.random() < .02:
                self.cache.trim(new - 10)
            oid = rnd.randrange(self.OIDS)
            state, tid = self.truth(oid, new)
            self.cache.committed(tid, [(oid, state)])

    def read(self, number):
        rnd = random.Random(number)
        last, objects = 0, {}
        while not self.done.is_set():
            at = self.cache.head
            changed = self.cache.invalidations(last, None)
            for oid in list(objects) if changed is None else changed:
                objects.pop(oid, None)
            last = at
            for oid, state in objects.items():
                if state != self.truth(oid, at)[0]:
                    self.wrong.append(f'view {at} kept {state}')
            for _ in range(20):
                oid = rnd.randrange(self.OIDS)
                hit, truth = get(self.cache, oid, at), self.truth(oid, at)
                if hit is None:
                    self.cache.put(oid, truth[1], truth[0], at)
                elif hit != truth:
                    self.wrong.append(f'view {at} got {hit}, not {truth}')
                objects[oid] = truth[0]

    def guarded(self, function, *args):
        try:
            function(*args)
        except Exception as error:
            self.wrong.append(repr(error))

    def test_readers_beside_a_poller(self):
        readers = [threading.Thread(target=self.guarded, args=(self.read, number)) for number in range(16)]
        for thread in readers:
            thread.start()
        self.guarded(self.poll)
        self.done.set()
        for thread in readers:
            thread.join()
        self.assertEqual(self.wrong[:5], [])
        stats = self.cache.stats()
        self.assertGreater(stats['hits'], 1000)
        self.assertLessEqual(stats['bytes'], self.cache.limit)
        self.assertLessEqual(stats['log'], 100)
        self.assertGreaterEqual(self.cache.head, self.POLLS)


class TestBudget(unittest.TestCase):
    layer = Models

    def test_bytes_stay_within_the_limit(self):
        rnd = random.Random(2)
        cache = Cache(100_000, 20_000)
        for tid in range(1, 3000):
            oid = rnd.randrange(500)
            cache.put(oid, tid, bytes(rnd.randrange(3000)), tid)
            self.assertLessEqual(cache.stats()['bytes'], 100_000)
        self.assertGreater(cache.stats()['bytes'], 90_000)
        self.assertGreater(cache.stats()['evictions'], 1000)

    def test_bytes_are_what_python_uses(self):
        count = 20_000
        for tids in ((1,), (1, 2)):
            with self.subTest(revisions=len(tids)):
                tracemalloc.start()
                self.addCleanup(tracemalloc.stop)
                cache = Cache(1 << 30, 1000)
                before = tracemalloc.get_traced_memory()[0]
                for oid in range(1000, 1000 + count):
                    for tid in tids:
                        cache.put(oid, (tid << 58) + oid, b'%100d' % oid, (tid << 58) + oid)
                used = tracemalloc.get_traced_memory()[0] - before
                tracemalloc.stop()
                counted = cache.stats()['bytes']
                self.assertEqual(cache.stats()['objects'], count)
                self.assertLess(used, 1.05 * counted)
                self.assertGreater(used, .75 * counted)

    def test_overhead_of_an_object(self):
        self.assertLessEqual(REVISION_BYTES + OBJECT_BYTES, 250)

    def test_what_was_hit_stays(self):
        cache = Cache(10 * (REVISION_BYTES + OBJECT_BYTES + 50), 100)
        cache.put(0, 1, b'hit', 1)
        for oid in range(1, 100):
            cache.put(oid, 1, b'never hit', 1)
            self.assertEqual(get(cache, 0, 1), (b'hit', 1))
        self.assertIsNone(get(cache, 1, 1))

    def test_what_changed_goes_first(self):
        cache = Cache(10 * (REVISION_BYTES + OBJECT_BYTES + 50), 100)
        for oid in range(10):
            cache.put(oid, 1, b'state', 1)
            get(cache, oid, 1)
        cache.advance(0, 2, [(7, 2)])
        oid = 9
        while not cache.stats()['evictions']:
            oid += 1
            cache.put(oid, 1, b'state', 2)
        self.assertEqual([oid for oid in range(10) if get(cache, oid, 1) is None], [7])

    def test_older_revisions_go_before_objects(self):
        cache = Cache(2 * (REVISION_BYTES + OBJECT_BYTES + 50), 100)
        cache.put(1, 1, b'one', 1)
        cache.put(1, 2, b'two', 2)
        cache.put(2, 1, b'other', 2)
        self.assertIsNone(cache.revision(1, 1))
        self.assertEqual(get(cache, 1, 2), (b'two', 2))
        self.assertEqual(get(cache, 2, 2), (b'other', 1))
        self.assertEqual(cache.stats()['evictions'], 0)

    def test_too_long_states_are_not_kept(self):
        cache = Cache(100_000, 100)
        cache.put(1, 1, bytes(100), 1)
        cache.put(2, 1, bytes(101), 1)
        cache.committed(1, [(3, bytes(101))])
        self.assertEqual(cache.stats()['objects'], 1)
        small = Cache(1000, 5000)
        small.put(1, 1, b'short', 1)
        small.put(2, 1, bytes(2000), 1)
        self.assertEqual(get(small, 1, 1), (b'short', 1))

    def test_limit_0_keeps_the_log_only(self):
        cache = Cache(0, 1000)
        cache.put(1, 1, b'', 1)
        cache.committed(1, [(2, b'')])
        cache.advance(0, 5, [(1, 3), (2, 5)])
        self.assertEqual(cache.stats()['objects'], 0)
        self.assertEqual(cache.invalidations(2, None), [2, 1])

    def test_the_log_is_bounded(self):
        cache = Cache(0, 0, log_limit=1000)
        for tid in range(10, 5000, 10):
            cache.advance(tid - 10, tid, [(tid * 100 + number, tid - number // 5) for number in range(50)])
            self.assertLessEqual(cache.stats()['log'], 1000)
        self.assertIsNone(cache.invalidations(10, None))
        self.assertEqual(len(cache.invalidations(4980, None)), 50)
        cache.advance(4990, 6000, [(oid, 6000) for oid in range(1001)])
        self.assertEqual(cache.stats()['log'], 0)
        self.assertIsNone(cache.invalidations(4990, None))
        self.assertEqual(cache.invalidations(6000, None), [])


class TestRules(unittest.TestCase):

    def setUp(self):
        self.cache = Cache(100_000, 1000)

    def test_revision_whatever_the_view(self):
        self.cache.put(1, 3, b'three', 3)
        self.cache.committed(5, [(1, b'five')])
        self.assertEqual(self.cache.revision(1, 3), b'three')
        self.assertEqual(self.cache.revision(1, 5), b'five')
        self.assertIsNone(self.cache.revision(1, 4))
        self.assertIsNone(self.cache.revision(2, 3))

    def test_own_commits_are_left_out_unless_somebody_changed_the_object_again(self):
        self.cache.advance(0, 9, [(1, 5), (2, 5), (3, 7)])
        self.assertEqual(self.cache.invalidations(4, 5), [3])
        self.cache.advance(9, 10, [(2, 10)])
        self.assertEqual(self.cache.invalidations(4, 5), [2, 3])

    def test_the_log_is_in_the_order_of_tids(self):
        self.cache.advance(0, 5, [(1, 4), (2, 2)])
        self.cache.advance(0, 9, [(2, 2), (3, 8), (1, 4), (4, 6), (5, 12)])
        self.assertEqual(self.cache.invalidations(1, None), [3, 4, 1, 2])
        self.cache.advance(9, 12, [(5, 12), (2, 11)])
        self.assertEqual(self.cache.invalidations(6, None), [5, 2, 3])

    def test_an_answer_after_a_gap_is_a_jump(self):
        self.cache.put(1, 3, b'three', 3)
        self.cache.advance(5, 9, [])
        self.assertIsNone(get(self.cache, 1, 9))
        self.assertEqual((self.cache.floor, self.cache.head), (9, 9))

    def test_a_view_at_its_own_answer(self):
        self.cache.advance(0, 5, [])
        self.cache.put(1, 3, b'three', 5)
        # Two ask at 5; the one who was told 10 comes first, so the other stands at 8, which never was head.
        self.cache.advance(5, 10, [(1, 9)])
        self.cache.advance(5, 8, [(1, 7)])
        self.assertEqual(self.cache.head, 10)
        self.assertIsNone(get(self.cache, 1, 8))
        self.assertEqual(self.cache.invalidations(5, None), [1])
        self.cache.put(1, 7, b'seven', 8)
        self.assertEqual(get(self.cache, 1, 8), (b'seven', 7))
        self.assertIsNone(get(self.cache, 1, 10))
        self.assertEqual(self.cache.invalidations(8, None), [1])

    def test_clear_forgets_states_and_keeps_the_log(self):
        self.cache.advance(0, 5, [(1, 4)])
        self.cache.put(1, 4, b'four', 5)
        self.cache.clear()
        self.assertIsNone(get(self.cache, 1, 5))
        self.assertEqual([self.cache.stats()[name] for name in ('objects', 'bytes', 'log')], [0, 0, 1])
        self.assertEqual((self.cache.generation, self.cache.head), (0, 5))
        self.cache.put(1, 4, b'four', 5)
        self.assertEqual(get(self.cache, 1, 5), (b'four', 4))

    def test_restart(self):
        self.cache.jump(10)
        self.cache.put(1, 9, b'lost', 10)
        self.cache.restart(6)
        self.assertEqual((self.cache.floor, self.cache.head), (6, 6))
        self.assertIsNone(get(self.cache, 1, 10))
        self.cache.put(1, 9, b'lost', 10, generation=0)
        self.cache.committed(9, [(1, b'lost')], generation=0)
        self.cache.advance(6, 9, [], generation=0)
        self.cache.jump(9, generation=0)
        self.assertEqual((self.cache.head, self.cache.stats()['objects']), (6, 0))
        self.assertIsNone(self.cache.invalidations(10, None, generation=0))
        self.assertEqual(self.cache.invalidations(6, None, generation=1), [])

    def test_what_was_removed_is_not_brought_back(self):
        """Objects are gone, and not by a change: nobody but the generation keeps what old views know out."""
        cache = Cache(1 << 20, 1 << 20)
        cache.advance(0, 20, [(1, 10), (2, 10), (3, 20)])
        for oid, tid in ((1, 10), (2, 10), (3, 20)):
            cache.put(oid, tid, b'x' * 100, 20)
        cache.put(3, 5, b'older', 15)
        before, generation = cache.stats(), cache.generation
        cache.remove([1, 7])
        self.assertIsNone(cache.find(1, 20))
        self.assertIsNone(cache.revision(3, 5))
        self.assertEqual([cache.find(oid, 20).state for oid in (2, 3)], [b'x' * 100] * 2)
        self.assertEqual((cache.head, cache.stats()['objects']), (20, before['objects'] - 1))
        cache.put(1, 10, b'x', 20, generation)
        cache.committed(21, [(1, b'x')], generation)
        self.assertIsNone(cache.find(1, 21))
        self.assertIsNone(cache.invalidations(20, None, generation))
        self.assertEqual(cache.invalidations(20, None, cache.generation), [])
        cache.advance(20, 30, [(2, 30)])
        self.assertEqual(cache.invalidations(20, None, cache.generation), [2])
        cache.remove([2, 3])
        self.assertEqual((cache.stats()['bytes'], cache.stats()['objects']), (0, 0))

    def test_what_was_removed_is_not_evicted(self):
        cache = Cache(20_000, 10_000)
        for oid in range(100):
            cache.put(oid, 1, b'x' * 100, 1)
        cache.remove(range(0, 100, 2))
        for oid in range(100, 400):
            cache.put(oid, 1, b'x' * 100, 1)
        self.assertLessEqual(cache.stats()['bytes'], 20_000)
        self.assertGreater(cache.stats()['evictions'], 0)

    def test_hits_and_misses_are_counted(self):
        self.cache.put(1, 3, b'three', 3)
        for at in (2, 3, 4):
            get(self.cache, 1, at)
        get(self.cache, 2, 3)
        self.assertEqual([self.cache.stats()[name] for name in ('hits', 'misses')], [2, 2])

    def test_holds_is_what_find_finds(self):
        for tid in (3, 5):
            self.cache.put(1, tid, b'%d' % tid, tid)
        for at in range(8):
            self.assertEqual(self.cache.holds(1, at), get(self.cache, 1, at) is not None, at)

    def test_a_late_view_does_not_shorten_what_is_known(self):
        self.cache.put(1, 3, b'three', 3)
        self.cache.advance(0, 9, [])
        self.cache.trim(9)
        self.cache.put(1, 3, b'three', 4)
        self.assertEqual(get(self.cache, 1, 9), (b'three', 3))

    def test_the_two_newest_revisions_stay(self):
        self.cache.advance(0, 9, [(1, 8)])
        for tid in (8, 6, 3):
            self.cache.put(1, tid, b'%d' % tid, tid)
        self.assertEqual([get(self.cache, 1, at) for at in (8, 6, 3)], [(b'8', 8), (b'6', 6), None])

    def test_neighbours_share_the_memory_of_their_tid(self):
        for oid in (1, 2):
            self.cache.put(oid, int('1000000000000'), b'', 1 << 60)
        self.assertIs(self.cache.find(1, 1 << 60).tid, self.cache.find(2, 1 << 60).tid)

    def test_what_is_filled_twice_is_evicted_once(self):
        """As from files of two processes."""
        for _ in range(2):
            self.cache.fill([(1, 3, b'three')], 0)
        for oid in range(2, 2000):
            self.cache.put(oid, 3, b'', 3)
        self.assertFalse(self.cache.holds(1, 3))
        self.assertLessEqual(self.cache.stats()['bytes'], self.cache.limit)

    def test_so_many_used_objects_are_spared_and_no_more(self):
        """The hand that passes an object takes its mark of use."""
        oid = 0
        while not self.cache.stats()['evictions']:
            oid += 1
            self.cache.put(oid, 3, b'', 3)
        while self.cache._clock:        # the hand is to begin anew
            oid += 1
            self.cache.put(oid, 3, b'', 3)
        used = [n for n in range(oid + 1) if self.cache.find(n, 3)]
        self.assertGreater(len(used), 2 * SPARED_OBJECTS)
        self.cache.put(oid + 1, 3, b'', 3)
        self.assertEqual(sum(map(self.cache.was_used, used)), len(used) - SPARED_OBJECTS - 1)

    def test_what_the_log_can_tell_of_a_view(self):
        self.cache.restart(2)
        self.cache.advance(2, 9, [(1, 5), (2, 8)])
        for oid, at, since, expected in (
            (1, 9, 4, 5), (1, 9, 5, 0), (3, 9, 2, 0), (1, 5, 4, 5),
            (2, 7, 4, None),            # it changed again
            (3, 9, 1, None), (3, 10, 4, None), (3, 4, 5, None),     # before the log, after it, and nonsense
        ):
            self.assertEqual(self.cache.newest_change(oid, at, since, 1), expected, (oid, at, since))
        self.assertIsNone(self.cache.newest_change(1, 9, 4, 0), 'of an earlier generation')
