"""What a change is based on is found when it conflicts, though the database has it no longer."""
import random
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from BTrees.Length import Length
from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.POSException import ConflictError
from ZODB.utils import u64, z64

from relstore.caching.bases import ANYWHERE, Standing
from relstore.caching.cache import Cache
from relstore.caching.revision import OBJECT_BYTES, REVISION_BYTES
from relstore.tests.support.backends import (
    MySQLdbOnMySQLHistoryFree,
    Psycopg2HistoryFree,
    Psycopg3HistoryFree,
    PyMySQLHistoryFree,
    SQLiteHistoryFree,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.layers import Models
from relstore.tests.support.records import counter, value_of

TIMES = 50
PATIENCE = 60       # seconds, for what takes one


class Threads(TestCase):
    """Threads of one process that change the same object."""

    def test_every_increment_is_committed(self):
        for threads in 4, 16:
            with self.subTest(threads=threads):
                storage = self.open_storage(f'of{threads}', commit_lock_timeout=PATIENCE, pool_timeout=PATIENCE)
                with closing(DB(storage, pool_size=threads)) as db:
                    with db.transaction() as connection:
                        connection.root()['n'] = Length()
                    failures = self._increments(db, threads)
                    with db.transaction() as connection:
                        count = connection.root()['n']()
                    self.assertEqual((count, failures), (threads * TIMES, Counter()))

    def _increments(self, db: DB, threads: int) -> Counter:
        """Each a transaction of its own, that is not tried again. Return what failed."""
        start, failures = threading.Barrier(threads), Counter()

        def work():
            manager = TransactionManager()
            with closing(db.open(manager)) as connection:
                start.wait(PATIENCE)
                for _ in range(TIMES):
                    try:
                        manager.begin()
                        connection.root()['n'].change(1)
                        manager.commit()
                    except TransientError as e:
                        manager.abort()
                        failures[type(e).__name__] += 1

        with ThreadPoolExecutor(threads) as pool:
            for job in [pool.submit(work) for _ in range(threads)]:
                job.result()
        return failures


class Views(TestCase):
    """Instances of one storage, in one thread."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)
        self.oid = self.storage.new_oid()
        commit(self.storage, (self.oid, z64, counter(0)))

    def view(self):
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        return view

    def change(self, view, base=None, by=1) -> bytes:
        state, tid = view.load(self.oid)
        return commit(view, (self.oid, base or tid, counter(value_of(state) + by)))

    def others_commit(self, times: int) -> None:
        for _ in range(times):
            view = self.storage.new_instance()
            view.poll_invalidations()
            self.change(view)
            view.release()

    def kept(self) -> list[int]:
        """Return the tids of the bases that are kept of the object."""
        return [base.tid for base in self.storage.database.cache.bases._kept.get(u64(self.oid), ())]

    def value(self) -> int:
        return value_of(self.storage.load(self.oid)[0])

    def test_two_views_of_different_times(self):
        first, second = self.view(), None
        first.load(self.oid)
        self.others_commit(5)
        second = self.view()
        second.load(self.oid)
        self.others_commit(5)
        self.assertEqual(len(self.kept()), 2)
        self.change(first, by=100)
        self.others_commit(5)
        self.change(second, by=100)
        self.assertEqual(self.value(), 215)

    def test_an_object_that_an_earlier_transaction_has_loaded(self):
        """And of which the storage hears nothing in the one that changes it."""
        view = self.view()
        state, tid = view.load(self.oid)
        view.afterCompletion()
        view.poll_invalidations()
        self.others_commit(5)
        commit(view, (self.oid, tid, counter(value_of(state) + 100)))
        self.assertEqual(self.value(), 105)

    def test_a_view_based_on_its_own_commit(self):
        view = self.view()
        tid = self.change(view)
        view.poll_invalidations()
        self.others_commit(5)
        commit(view, (self.oid, tid, counter(101)))
        self.assertEqual(self.value(), 106)

    def poll_while_others_commit(self, view) -> None:
        """Begin the next view; others commit between the answer of the database and the view."""
        polling = self.storage.database.polling
        unless_known = polling.unless_known

        def then_others(ask, known):
            answer = unless_known(ask, known)
            if polling.unless_known is then_others:
                polling.unless_known = unless_known
                self.others_commit(5)
            return answer

        view.afterCompletion()
        polling.unless_known = then_others
        view.poll_invalidations()

    def test_others_commit_between_the_answer_and_the_view(self):
        view = self.view()
        self.poll_while_others_commit(view)
        self.change(view, by=100)
        self.assertEqual(self.value(), 105)

    def test_others_commit_before_it_is_known_that_an_object_did_not_change(self):
        """It was loaded by an earlier transaction, or written by one: then it is younger than what was known."""
        view = self.view()
        state, tid = view.load(self.oid)
        self.poll_while_others_commit(view)
        tid = commit(view, (self.oid, tid, counter(value_of(state) + 100)))
        self.assertEqual(self.value(), 105)
        view.poll_invalidations()
        tid = self.change(view)
        self.assertLess(self.storage.database.cache.head, u64(tid))
        self.poll_while_others_commit(view)
        commit(view, (self.oid, tid, counter(107)))
        self.assertEqual(self.value(), 112)

    def test_a_load_that_arrives_late(self):
        """What the database answered is put into the cache after others have overwritten it twice."""
        self.storage.database.cache.clear()
        view, cache = self.view(), self.storage.database.cache
        put = cache.put

        def later(*arguments):
            cache.put = put
            self.others_commit(3)
            put(*arguments)

        cache.put = later
        self.change(view, by=100)
        self.assertEqual(self.value(), 103)

    def test_after_a_sweep(self):
        """A pack has ended: the process drops what was removed, and what is not current."""
        view = self.view()
        view.load(self.oid)
        self.others_commit(1)
        self.storage.database.cache.remove([u64(self.oid) + 1])
        self.others_commit(3)
        self.change(view, by=100)
        self.assertEqual(self.value(), 104)

    def test_nothing_is_kept_for_who_has_no_view(self):
        self.view().afterCompletion()
        self.view().release()
        self.storage.new_instance()     # has not polled
        self.others_commit(10)
        self.assertEqual(self.kept(), [])

    def test_a_view_whose_poll_failed_keeps_nothing(self):
        view = self.view()
        with patch.object(self.storage.database.polling, 'unless_known', side_effect=ConflictError), \
                self.assertRaises(ConflictError):
            view.poll_invalidations()
        self.others_commit(10)
        self.assertEqual(self.kept(), [])

    def test_an_idle_view_keeps_one(self):
        self.view().load(self.oid)
        idle = self.view()
        idle.load(self.oid)
        self.others_commit(100)
        self.assertEqual(len(self.kept()), 1)


class World:
    """A database without history, and views that share a cache in which nothing is evicted."""

    def __init__(self, seed: int, count: int = 5, oids: int = 6):
        self.random = random.Random(seed)
        self.cache = Cache(1 << 20, 1000, keep_bases=True)
        self.views = [Standing() for _ in range(count)]
        self.objects = [{} for _ in self.views]         # of each: oid -> tid, as ZODB keeps them
        for view in self.views:
            self.cache.add_view(view)
        self.last, self.current = 1, dict.fromkeys(range(oids), 1)

    def poll(self, n: int) -> None:
        """Others do something after the database was asked, and before it is known where the view stands."""
        self.views[n].between = self.cache.head, ANYWHERE
        if self.random.random() < .3:
            self.commit(None)
        old, new, current = self.cache.head, self.last, dict(self.current)
        for _ in range(self.random.choice((0, 0, 3))):
            self.commit(None if self.random.random() < .5 else self.random.randrange(len(self.views)), but=n)
        self.cache.advance(old, new, [(oid, tid) for oid, tid in current.items() if tid > old])
        self.views[n].between = new, new
        self.objects[n] = {oid: tid for oid, tid in self.objects[n].items() if current[oid] == tid}
        for oid in self.random.sample(list(current), 3):
            if current[oid] == self.current[oid] or self.cache.revision(oid, current[oid]) is not None:
                self.load(n, oid, current[oid])

    def load(self, n: int, oid: int, tid: int) -> None:
        if self.cache.revision(oid, tid) is None:
            for _ in range(self.random.choice((0, 0, 3))):
                self.commit(None, but=n)
            self.cache.put(oid, tid, b'%d' % tid, self.views[n].between[0])
        self.objects[n][oid] = tid

    def commit(self, n: int | None, but: int | None = None) -> None:
        """By a view, whose next poll follows at once, or by another process (or another view of this one)."""
        self.last += self.random.randrange(1, 3)
        oids = self.random.sample(list(self.current), 2)
        self.current.update(dict.fromkeys(oids, self.last))
        if n != but or self.random.random() < .7:
            self.cache.committed(self.last, [(oid, b'%d' % self.last) for oid in oids])
        if n is not None and n != but and self.views[n].between and self.views[n].between[1] != ANYWHERE:
            self.views[n].between = None
            self.objects[n] = {}

    def step(self) -> None:
        n = self.random.randrange(len(self.views))
        if self.random.random() < .5:
            self.commit(None)
        elif self.random.random() < .8:
            self.poll(n)
        else:
            self.views[n].between = None

    def check(self, test: TestCase) -> None:
        for view, objects in zip(self.views, self.objects, strict=True):
            if view.between is not None:
                for oid, tid in objects.items():
                    test.assertEqual(self.cache.revision(oid, tid), b'%d' % tid, (oid, tid, view.between))
        stands = {view.between for view in self.views if view.between}
        for bases in self.cache.bases._kept.values():
            tids = [base.tid for base in bases]
            test.assertEqual(tids, sorted(set(tids)))
        self.cache.bases.prune()
        for bases in self.cache.bases._kept.values():
            test.assertLessEqual(len(bases), len(stands))


class TestRandomHistories(TestCase):
    layer = Models

    def test_what_views_have_read_is_there(self):
        most = 0
        for seed in range(150):
            with self.subTest(seed=seed):
                world = World(seed)
                for _ in range(150):
                    world.step()
                    world.check(self)
                    most = max(most, max(map(len, world.cache.bases._kept.values()), default=0))
        self.assertGreaterEqual(most, 3)


class TestBudget(TestCase):
    layer = Models
    LIMIT = 200_000

    def cache(self, *stands: int) -> Cache:
        cache = Cache(self.LIMIT, 10_000, keep_bases=True)
        self.views = [Standing() for _ in stands]
        for view, at in zip(self.views, stands, strict=True):
            view.between = at, at
            cache.add_view(view)
        return cache

    def overwrite(self, cache: Cache, oids, tids, size=100) -> None:
        for tid in tids:
            cache.committed(tid, [(oid, b'%*d' % (size, tid)) for oid in oids])

    def test_a_full_cache_keeps_bases_too(self):
        cache = self.cache(1)
        self.overwrite(cache, [1], [1, 2, 3])
        for oid in range(10, 10_000):
            cache.put(oid, 3, bytes(100), 3)
            self.assertLessEqual(cache.stats()['bytes'], self.LIMIT)
        self.assertGreater(cache.stats()['evictions'], 1000)
        self.assertEqual(int(cache.revision(1, 1)), 1)

    def test_what_is_evicted_before_it_was_overwritten_twice(self):
        cache = self.cache(1)
        self.overwrite(cache, [1], [1, 2])
        for oid in range(10, 10_000):
            cache.put(oid, 3, bytes(100), 3)
        self.assertEqual(int(cache.revision(1, 1)), 1)

    def test_they_have_a_part_of_it(self):
        cache = self.cache(1)
        for size in 100, 5000:
            self.overwrite(cache, range(300), [1, 2, 3], size)
            bases = cache.bases
            self.assertLessEqual(bases.bytes, bases.limit)
            self.assertLessEqual(cache.stats()['bytes'], self.LIMIT)
        self.assertGreater(bases.bytes, bases.limit / 2)

    def test_those_not_overwritten_for_the_longest_time_go_first(self):
        cache = self.cache(1, 3)
        for oid in range(1, 400):
            self.overwrite(cache, [0, oid], [1, 2, 3, 4, 5])
            self.assertEqual([cache.revision(0, tid) is not None for tid in (1, 3)], [True, True], oid)
        self.assertIsNone(cache.revision(1, 1))

    def test_what_nobody_needs_goes(self):
        cache = self.cache(1)
        self.overwrite(cache, range(100), [1, 2, 3])
        self.assertGreater(cache.bases.bytes, 0)
        self.views[0].between = None
        self.overwrite(cache, [200], [1, 2, 3])
        self.assertEqual(cache.bases.bytes, 0)

    def test_what_nobody_needs_goes_when_the_cache_is_full(self):
        cache = self.cache(1)
        self.overwrite(cache, range(100), [1, 2, 3])
        self.views[0].between = None
        for oid in range(200, 5000):
            cache.put(oid, 3, bytes(100), 3)
        self.assertEqual(cache.bases.bytes, 0)

    def test_a_view_that_is_dropped_needs_nothing(self):
        cache = self.cache(1)
        self.views.clear()
        self.overwrite(cache, [1], [1, 2, 3, 4])
        self.assertEqual(cache.bases.bytes, 0)

    def test_another_epoch_knows_none(self):
        """A tid that was lost may be given again."""
        cache = self.cache(1)
        self.overwrite(cache, [1], [1, 2, 3])
        cache.restart(2)
        self.assertIsNone(cache.revision(1, 1))
        self.assertEqual(cache.stats()['bytes'], 0)

    def test_with_history_none_is_kept(self):
        cache = Cache(self.LIMIT, 10_000)
        cache.add_view(Standing())
        self.overwrite(cache, [1], [1, 2, 3])
        self.assertEqual(cache.stats()['bytes'], OBJECT_BYTES + 2 * (REVISION_BYTES + 144))

    def test_bytes_are_what_python_uses(self):
        count, cache = 20_000, Cache(1 << 30, 1000, keep_bases=True)
        view = Standing()
        view.between = 1 << 58, 1 << 58
        cache.add_view(view)
        for oid in range(1000, 1000 + count):
            for tid in (1, 2):
                cache.put(oid, (tid << 57) + oid, b'%100d' % oid, 1 << 60)
        counted = cache.stats()['bytes']
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        before = tracemalloc.get_traced_memory()[0]
        for oid in range(1000, 1000 + count):
            cache.put(oid, (3 << 57) + oid, b'%100d' % oid, 1 << 60)
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        self.assertEqual(len(cache.bases._kept), count)
        counted = cache.stats()['bytes'] - counted
        self.assertLess(used, 1.15 * counted)
        self.assertGreater(used, .75 * counted)


cases(globals(), Threads, Views, backends=(
    SQLiteHistoryFree, Psycopg2HistoryFree, Psycopg3HistoryFree, PyMySQLHistoryFree, MySQLdbOnMySQLHistoryFree))
del Threads, Views
