"""Read-ahead: what is fetched beside a missed object is likely to be wanted, and always right."""
import random
import unittest
from collections import defaultdict
from itertools import count, groupby, islice
from unittest import mock

from BTrees.OOBTree import OOBTree, OOBucket
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.tests.MinPO import MinPO
from ZODB.utils import p64, u64

from relstore.caching import readahead
from relstore.caching.cache import Cache
from relstore.caching.readahead import (
    AFTER,
    FEW,
    IN_ORDER,
    LARGEST_HIT_BYTES,
    LARGEST_STATE_BYTES,
    LATER_BATCHES,
    LOOKING_MISSES,
    MANY,
    MOST_CLASSES,
    ONE_OF,
    RESTING_MISSES,
    SHUT,
    SOME,
    UNUSED,
    USED,
    Counts,
    Kind,
    ReadAhead,
    Window,
)
from relstore.caching.referrers import MOST_UNSEEN, REMEMBERED_REFS
from relstore.references import references
from relstore.tests.support.backends import cases
from relstore.tests.support.records import Reference, pickled
from relstore.tests.support.traces import WORKLOADS, all_traces, filled, recorded, replayed


def record(*oids, of=OOBucket, text=b''):
    """Return a record of this class that refers to these objects, and holds this text."""
    return pickled((of, None), [text, [Reference((p64(oid), None)) for oid in oids]])


class Guesses(unittest.TestCase):
    """ReadAhead by itself, over a database of records that a test makes up."""

    def setUp(self):
        self.cache, self.counts = Cache(1 << 24, 1 << 20), Counts()
        self.ahead = self.new_view()
        self.records = defaultdict(lambda: record(of=MinPO))

    def new_view(self):
        return ReadAhead(self.cache, self.counts, lambda record: record)

    def saw(self, oid, *oids, of=OOBucket):
        self.records[oid] = record(*oids, of=of)
        self.ahead.saw(oid, self.records[oid], None)

    def miss(self, oid, hit=None):
        """Do what a view does when a load misses; return what is fetched with it."""
        siblings = self.ahead.beside(oid, 1, hit)
        for fetched in (oid, *siblings):
            self.cache.put(fetched, 1, self.records[fetched], 1)
            self.ahead.saw(fetched, self.records[fetched], None)
        return siblings

    def use(self, oids):
        for oid in oids:
            self.assertIsNotNone(self.cache.find(oid, 1))

    def read(self, oids):
        """Load these one after the other; return how many were missed."""
        missed = 0
        for oid in oids:
            if self.cache.find(oid, 1) is None:
                self.miss(oid)
                missed += 1
        return missed

    # along

    def test_an_object_that_nothing_seen_refers_to(self):
        self.saw(1, 5, 6)
        self.assertEqual(self.miss(7), [])

    def test_what_comes_after_it_in_a_container(self):
        self.saw(1, *range(10, 20))
        self.assertEqual(self.miss(12), [13, 14, 15])

    def test_other_objects_refer_to_things_of_various_use(self):
        self.saw(1, *range(10, 20), of=MinPO)
        self.assertEqual(self.miss(12), [])

    def test_of_few_references_also_those_before_it(self):
        self.saw(1, *range(10, 14))
        self.assertEqual(self.miss(13), [10, 11, 12])

    def test_references_that_came_with_the_state(self):
        self.ahead.saw(1, record(), b''.join(map(p64, range(10, 20))))
        self.assertEqual(self.miss(12), [13, 14, 15])

    def test_what_is_cached_is_not_fetched(self):
        self.saw(1, *range(10, 20))
        self.cache.put(13, 1, b'.', 1)
        self.assertEqual(self.miss(12), [14, 15])

    def test_there_are_none_after_the_last(self):
        self.saw(1, *range(10, 20))
        self.assertEqual(self.miss(19), [])

    def test_an_oid_in_the_text_of_a_state_is_no_reference(self):
        self.ahead.saw(1, record(5, 6, text=p64(7)), None)
        self.assertEqual(self.miss(7), [])
        self.assertEqual(self.miss(5), [6])

    def test_an_oid_across_two_references_is_none(self):
        """The bytes of two packed oids hold others, which start in the middle."""
        oids = 0x0100000000000000, 0x0200000000000003, 0x0000000001000000
        middle = u64((p64(oids[1]) + p64(oids[2]))[4:12])
        self.assertEqual(self.miss(middle, hit=record(*oids)), [])
        self.saw(1, *oids, middle, *range(10, 20))
        self.assertEqual(self.miss(middle), [10, 11, 12])

    def test_what_no_database_can_hold_is_not_asked_for(self):
        self.saw(1, 5, 2 ** 63, 6)
        self.assertEqual(self.miss(5), [6])

    def test_a_record_that_cannot_be_read(self):
        self.ahead.saw(1, record(5, 6)[:-3] + b'Q', None)
        self.assertEqual(self.miss(5), [])

    def test_the_window_grows_while_the_guesses_are_used(self):
        self.saw(1, *range(10, 1000))
        oid, windows = 10, []
        for _ in range(6):
            siblings = self.miss(oid)
            self.use(siblings)
            windows.append(len(siblings))
            oid += len(siblings) + 1
        self.assertEqual(windows, [FEW, SOME, MANY, MANY, MANY, MANY])
        self.miss(oid)
        self.assertEqual((self.counts.used, self.counts.fetched), (sum(windows), sum(windows) + MANY))

    def test_it_shrinks_to_nothing_when_they_are_not(self):
        self.saw(1, *range(10_000))
        windows = [len(self.miss(oid)) for oid in (1000, 3000, 2000, 4000, 6000)]
        self.assertEqual(windows, [FEW, FEW, FEW, SHUT, SHUT])
        self.assertEqual(self.counts.used, 0)

    def test_two_misses_in_order_open_it_again(self):
        self.test_it_shrinks_to_nothing_when_they_are_not()
        self.assertEqual([self.miss(oid) for oid in (7000, 7002, 7001)], [[], [], []])
        self.assertEqual(self.miss(7002 + 1), [])
        self.assertEqual(self.miss(7003 + 1), [7005, 7006, 7007])

    def test_containers_read_in_order_again_open_it_sooner(self):
        for start in range(1000, 3000, 100):
            self.saw(start, *range(start + 1, start + 50))
            self.miss(start + 10)
        before = self.counts.fetched
        for _ in range(ONE_OF):         # one of them is remembered
            self.saw(1, *range(10, 60))
        self.assertLess(self.read(range(10, 40)), 8)
        self.assertGreater(self.counts.fetched, before)

    def test_what_is_never_missed_again_is_judged_too(self):
        for start in range(1000, 3000, 100):
            self.saw(start, *range(start + 1, start + 100))
            last = self.miss(start + 10)
        self.assertEqual(last, [])
        self.assertLess(self.counts.fetched, 40)

    def test_new_referrers_of_a_class_start_with_what_served_the_others(self):
        for node in range(10_000, 14_000, 100):
            self.saw(node, *range(node + 1, node + 21))
            misses = self.read(range(node + 1, node + 21))
        self.assertEqual(misses, 1)
        self.ahead = self.new_view()        # views learn from each other
        self.saw(20_000, *range(20_001, 20_021))
        self.assertEqual(self.read(range(20_001, 20_021)), 1)

    def test_containers_read_in_no_order_are_hardly_remembered_until_some_are_read_in_order(self):
        buckets = range(1000, 100_000, 100)
        for bucket in buckets[:500]:
            self.saw(bucket, *range(bucket + 1, bucket + 51))
            self.miss(bucket + 30)
        kind = self.counts.kinds[b'cBTrees.OOBTree\nOOBucket']
        self.assertEqual((kind.along, kind.across), (SHUT, SHUT))
        self.assertIn(len(self.remembered().intersection(buckets[300:500])), range(1, 30))
        missed = 0
        for bucket in buckets[500:]:
            self.saw(bucket, *range(bucket + 1, bucket + 51))
            missed += self.read(range(bucket + 1, bucket + 51))
        self.assertLess(missed, 490 * 50 / 5)

    def remembered(self):
        """Return the oids of the referrers that are."""
        return {*self.ahead._seen._states, *self.ahead._seen._older_states}

    # as a stream

    def test_values_of_one_bucket_after_the_other(self):
        buckets = range(1000, 3000, 100)
        self.saw(1, *buckets, of=OOBTree)
        for bucket in buckets:
            self.saw(bucket, *range(bucket + 1, bucket + 21))
        values = [oid for bucket in buckets for oid in range(bucket + 1, bucket + 21)]
        self.assertLess(self.read(values), 12)      # of 400
        self.assertLessEqual(self.counts.fetched, len(values))

    def test_buckets_that_were_not_seen_come_with_the_values(self):
        buckets = range(1000, 20_000, 100)
        for bucket in buckets:      # each refers to the next one, as in a tree
            self.records[bucket] = record(*range(bucket + 1, bucket + 21), bucket + 100)
        self.saw(1, *buckets, of=OOBTree)
        order = [oid for bucket in buckets for oid in range(bucket, bucket + 21)]
        self.assertLess(self.read(order), len(order) / 30)
        self.assertLess(self.counts.fetched, len(order) + MANY)

    def test_a_referrer_that_knows_no_siblings_is_the_second_choice(self):
        """Buckets of a tree are chained, and their node refers to them all."""
        self.saw(1, *range(10, 30))
        self.saw(2, 800, 801, 15)
        self.assertEqual(self.miss(15), [16, 17, 18])

    def test_never_more_than_the_largest_number(self):
        folders = range(1000, 10_000, 100)
        self.saw(1, *folders)
        for folder in folders:
            self.saw(folder, *range(folder + 1, folder + 90))
        for folder in folders:
            for oid in range(folder + 1, folder + 90):
                if self.cache.find(oid, 1) is None:
                    self.assertLessEqual(len(self.miss(oid)), MANY)

    # across

    def folders(self, count, start=1000):
        """See some objects of one class, and a container that refers to them; return them."""
        folders = range(start, start + 10 * count, 10)
        for folder in folders:
            self.saw(folder, *range(folder + 1, folder + 5), of=MinPO)
        self.saw(start - 1, *folders)
        return folders

    def test_the_same_place_in_the_siblings(self):
        folders = self.folders(40)
        self.assertEqual(self.miss(1002), [1012, 1022, 1032])
        self.assertLess(self.read(folder + 2 for folder in folders), 5)
        self.assertLess(self.counts.fetched, 40)

    def test_only_in_siblings_of_its_class(self):
        self.folders(3)
        self.saw(1010, *range(1011, 1015), of=OOBTree)
        self.assertEqual(self.miss(1002), [1022])

    def test_siblings_are_left_alone_when_that_was_wrong(self):
        for start in range(1000, 200_000, 1000):
            folders = self.folders(20, start)
            last = self.miss(folders[7] + 2)
        self.assertEqual(last, [])
        self.assertLess(self.counts.fetched, 30)
        self.ahead.wake()
        self.folders(20, 300_000)
        self.assertLess(self.read(range(300_002, 300_202, 10)), 8)      # in order, it is right again

    # at rest

    def test_after_many_misses_without_a_guess_few_are_looked_at(self):
        folders = range(1_000_000, 1_140_000, 100)
        for folder in folders:
            self.assertEqual(self.miss(folder + 50), [])
            self.saw(folder, folder + 1, folder + 2, of=MinPO)
        runs = [(looked_at, len(list(run)))
                for looked_at, run in groupby(folder in self.remembered() for folder in folders)]
        self.assertEqual(runs[:4], 2 * [(True, LOOKING_MISSES), (False, RESTING_MISSES)])

    def test_a_guess_ends_the_rest(self):
        for oid in range(1250):
            self.miss(oid)
        missed = self.read_buckets(1_000_000)
        self.assertGreater(missed, 1)
        self.assertLess(missed, RESTING_MISSES + LOOKING_MISSES)
        self.assertLess(self.read_buckets(2_000_000), 110)      # the first of each bucket, which nothing leads to

    def read_buckets(self, start):
        """Read 100 buckets of 20 objects, each bucket before its objects; return how many were missed."""
        missed = 0
        for bucket in range(start, start + 10_000, 100):
            self.saw(bucket, *range(bucket + 1, bucket + 21))
            missed += self.read(range(bucket + 1, bucket + 21))
        return missed

    def test_another_transaction_ends_the_rest(self):
        for oid in range(LOOKING_MISSES + 1):
            self.miss(oid)
        self.saw(1, *range(1_000_000, 1_000_020))
        self.assertEqual(self.miss(1_000_000), [])
        self.ahead.wake()
        self.saw(1, *range(1_000_000, 1_000_020))
        self.assertEqual(len(self.miss(1_000_001)), 3)

    # what is remembered

    def test_siblings_of_what_a_hit_state_refers_to(self):
        self.assertEqual(self.miss(12, hit=record(*range(10, 20))), [13, 14, 15])

    def test_large_cached_states_are_not_searched(self):
        self.assertEqual(self.miss(5, hit=record(5, 6, text=b'x' * LARGEST_HIT_BYTES)), [])

    def test_records_that_a_storage_around_this_one_has_changed(self):
        ahead = ReadAhead(self.cache, self.counts, lambda wrapped: bytes.fromhex(wrapped[2:].decode()))
        wrapped = b'.h' + record(5, 6).hex().encode()
        self.assertNotIn(b'Q', wrapped)
        ahead.saw(1, wrapped, None)
        self.assertEqual(ahead.beside(5, 1, None), [6])
        self.assertEqual(ahead.beside(7, 1, b'.h' + record(7, 8).hex().encode()), [8])
        [name] = self.counts.kinds
        self.assertIn(b'OOBucket', name)

    def test_memory_is_bounded(self):
        for node in range(0, 100 * REMEMBERED_REFS, 100):
            self.saw(1 << 40 | node, *range(node, node + 50))
        known = {*self.ahead._seen.parents, *self.ahead._seen.older_parents}
        self.assertLess(len(known), 2 * REMEMBERED_REFS + 200)
        self.assertGreater(len(known), REMEMBERED_REFS)
        self.assertLess(len(self.remembered()), 2 * REMEMBERED_REFS / 50 + 10)

    def test_classes_are_bounded(self):
        for n in range(MOST_CLASSES + 100):
            self.ahead.saw(n, record(5, 6).replace(b'OOBucket', b'OO%d' % n), None)
        self.assertLessEqual(len(self.counts.kinds), MOST_CLASSES + 1)

    def test_a_referrer_in_use_is_not_forgotten(self):
        self.saw(1, *range(10, 100), of=OOBTree)
        for node in range(10, 40):
            self.miss(node)
            self.saw(node, *range(1000 * node, 1000 * node + REMEMBERED_REFS // 4))
        self.assertIn(1, self.remembered())
        for node in range(50, 70):      # not used any more
            self.saw(node, *range(1000 * node, 1000 * node + REMEMBERED_REFS // 4))
        self.assertNotIn(1, self.remembered())


class Windows(RuleBasedStateMachine):
    """A Window against its table, and what is written beside it."""

    NAMES = {SHUT: 'SHUT', FEW: 'FEW', SOME: 'SOME', MANY: 'MANY'}
    # window: after a batch that was used, one that was not, two misses in order
    TABLE = {'SHUT': (None, None, 'FEW'), 'FEW': ('SOME', 'SHUT', None), 'SOME': ('MANY', 'FEW', None),
             'MANY': ('MANY', 'SOME', None)}

    @initialize(name=st.sampled_from([b'cBTrees.OOBTree\nOOBucket', b'cplone\nPage']),
                way=st.sampled_from(['along', 'across']))
    def begin(self, name, way):
        self.kind, self.way = Kind(name), way
        self.window = Window(self.kind, way)
        self.state = 'FEW' if (way == 'along') == name.startswith(b'cBTrees') else 'SHUT'
        self.waiting, self.used, self.oids = [], set(), count()

    @precondition(lambda self: self.window.size)
    @rule(data=st.data())
    def fetch(self, data):
        """As ReadAhead does: judge, then fetch."""
        self.judge()
        if self.window.size:
            batch = list(islice(self.oids, data.draw(st.integers(1, self.window.size))))
            self.waiting.append(batch)
            self.window.waiting.append(batch)

    @rule(data=st.data())
    def use(self, data):
        fetched = [oid for batch in self.waiting for oid in batch]
        if fetched:
            self.used.update(data.draw(st.permutations(fetched))[:data.draw(st.integers(1, len(fetched)))])

    def judge(self):
        for batch in [*self.waiting]:
            used = len(self.used.intersection(batch)) / len(batch)
            if used >= 3 / 4:
                self.state = self.TABLE[self.state][0]
            elif len(self.waiting) > 2:
                self.state = self.TABLE[self.state][1]
            else:
                continue
            self.waiting.remove(batch)
            if self.state == 'SHUT':
                self.waiting = []
                break
        self.window.judge(self.used.__contains__)

    @precondition(lambda self: not self.window.size)
    @rule()
    def misses_in_order(self):
        self.window.move(IN_ORDER)
        self.state = self.TABLE[self.state][2]

    @invariant()
    def is_where_the_table_says(self):
        if hasattr(self, 'window'):
            assert self.NAMES[self.window.size] == self.state
            assert self.window.waiting == self.waiting
            assert len(self.waiting) <= LATER_BATCHES + 1
            again = Window(self.kind, self.way)
            assert self.state in (self.NAMES[again.size], 'SHUT', 'FEW')
            assert again.size == self.window.size
            assert not again.waiting


class Readers(RuleBasedStateMachine):
    """ReadAhead over a database of any shape: what it asks for is justified, and it rests when it says."""

    OIDS = 60
    CLASSES = OOBucket, OOBTree, MinPO
    oids = st.integers(1, OIDS)

    @initialize(graph=st.lists(st.tuples(st.sampled_from(CLASSES), st.lists(oids, max_size=20, unique=True)),
                               min_size=OIDS, max_size=OIDS), cheap=st.booleans())
    def begin(self, graph, cheap):
        self.records = {oid: record(*refs, of=of) for oid, (of, refs) in enumerate(graph, 1)}
        self.refs = {oid: refs for oid, (_, refs) in enumerate(graph, 1)}
        self.cache, self.counts, self.cheap = Cache(1 << 24, 1 << 20), Counts(), cheap
        self.open_view()

    @rule()
    def open_view(self):
        self.ahead = ReadAhead(self.cache, self.counts, lambda record: record)
        self.resting, self.misses, self.hit, self.shown = False, 0, None, set()

    @rule(oids=st.lists(oids, min_size=1, max_size=40))
    def load(self, oids):
        for oid in oids:
            revision = self.cache.find(oid, 1)
            if revision is None:
                self.miss(oid)
            else:
                self.hit = revision.state
                self.shown.update(self.refs[oid])

    @rule(first=oids, number=st.integers(1, OIDS), step=st.sampled_from([1, 2, -1]))
    def load_in_order(self, first, number, step):
        self.load([1 + (first + step * n) % self.OIDS for n in range(number)])

    @rule()
    def miss_what_nothing_refers_to(self):
        for oid in range(1000, 1000 + LOOKING_MISSES):
            self.miss(oid)

    def miss(self, oid):
        if self.misses == (RESTING_MISSES if self.resting else LOOKING_MISSES):
            self.resting, self.misses = not self.resting, 0
        self.misses += 1
        cached = {other for other in self.records if self.cache.holds(other, 1)}
        others = self.ahead.beside(oid, 1, self.hit)
        self.hit = None
        assert len(set(others)) == len(others) <= MANY
        assert oid not in others
        assert self.shown.issuperset(others), 'nothing that was seen refers to it'
        assert len(cached.intersection(others)) <= MOST_UNSEEN
        assert not (self.resting and others)
        if others:
            self.resting, self.misses = False, 0
        for loaded in (oid, *others):
            state = self.records.get(loaded, b'')
            self.cache.put(loaded, 1, state, 1) if state else None
            self.ahead.saw(loaded, state, b''.join(map(p64, self.refs.get(loaded, []))))
            self.shown.update(self.refs.get(loaded, []))

    @rule(oids=st.sets(oids, min_size=1))
    def forget(self, oids):
        """The cache is full, say."""
        self.cache.remove(oids)

    @rule()
    def begin_transaction(self):
        if not self.cheap:
            self.ahead.wake()
            self.resting, self.misses = False, 0

    @invariant()
    def rests_when_it_says(self):
        if hasattr(self, 'ahead'):
            assert self.ahead._resting == self.resting

    @invariant()
    def windows_are_as_the_table_has_them(self):
        if hasattr(self, 'ahead'):
            for habit in self.ahead._habits.values():
                for window in habit.along, habit.across:
                    assert window.size in (SHUT, FEW, SOME, MANY)
                    assert len(window.waiting) <= LATER_BATCHES + 1
                    assert window.size or not window.waiting
            assert 0 <= self.counts.used <= self.counts.fetched


class Machines(unittest.TestCase):

    def test_windows(self):
        run_state_machine_as_test(Windows)

    def test_readers(self):
        run_state_machine_as_test(Readers, settings=settings(max_examples=30, deadline=None))

    def test_the_docstring_has_the_table(self):
        rows = {cells[0]: cells[1:] for cells in map(str.split, readahead.__doc__.splitlines()) if cells}
        names = {getattr(readahead, name): name for name in Windows.NAMES.values() if name in rows}
        self.assertEqual(names, Windows.NAMES)
        for size, name in names.items():
            cells = [names.get(AFTER[event].get(size), '-') for event in (USED, UNUSED, IN_ORDER)]
            self.assertEqual(rows[name], [str(size), *cells])
        for name, misses in ('LOOKING', LOOKING_MISSES), ('RESTING', RESTING_MISSES):
            self.assertEqual(rows[name][0], str(misses))


# What each workload may cost: statements, and objects fetched that nobody asked for. The figures are the same each
# time with the same BTrees; with others a little may be different.
LIMITS = {
    'a tree in order': (95, 2),
    'a tree, one of three': (1760, 10),
    'ranges of a tree': (440, 450),
    'keys at random': (2335, 15),
    'keys at random, ten a transaction': (2335, 15),
    'oids at random': (2000, 0),
    'at random, then in order, again and again': (3600, 10),
    'one in order, one at random': (3150, 130),
    'two trees side by side': (190, 5),
    'random walk': (1480, 5),
    'a site from the top down': (4750, 8),
    'listings of folders': (250, 30),
    'an attribute of each folder': (12, 11),
    'searches': (1800, 340),
    'pages': (890, 230),
    'large mappings in order': (74, 0),
    'large mappings at random': (1273, 10),
    'the same few, and a new one': (510, 45),
}


class Traces(unittest.TestCase):
    """What read-ahead costs and saves where objects are read as applications read them."""

    def test_what_they_cost(self):
        for name, trace in all_traces().items():
            with self.subTest(name):
                figures = replayed([trace])
                statements, unused = LIMITS[name]
                self.assertLessEqual(figures.statements, statements, figures)
                self.assertLessEqual(figures.unused, unused, figures)
                self.assertEqual(figures.loads, sum(oid >= 0 for oid in trace.loads))

    def test_what_they_would_cost_without(self):
        fill, read = WORKLOADS['large mappings in order']
        db = filled(fill)
        self.addCleanup(db.close)
        trace = recorded(db, read)
        figures = replayed([trace], NothingAhead)
        self.assertEqual((figures.fetched, figures.unused), (0, 0))
        self.assertEqual(figures.statements, len({oid for oid in trace.loads if oid >= 0}))


class NothingAhead:
    """A strategy."""
    Counts = Counts

    class ReadAhead:
        def __init__(self, *_):
            pass

        def saw(self, *_):
            pass

        def beside(self, *_):
            return []

        def wake(self):
            pass


class Suite(unittest.TestCase):
    """With a storage on a real database."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage()
        self.db = DB(self.storage)
        self.addCleanup(self.db.close)
        self.manager = TransactionManager(explicit=True)
        with self.db.transaction() as connection:
            self.fill(connection.root())
        self.connection = self.db.open(self.manager)
        self.addCleanup(self.connection.close)

    def fill(self, root):
        root['tree'] = tree = OOBTree()
        for n in range(2000):
            tree[n] = MinPO(n)
        root['items'] = PersistentMapping({n: MinPO(n) for n in range(40)})
        root['folders'] = PersistentMapping({
            n: MinPO({name: MinPO(name) for name in ('annotations', 'tree', 'order')}) for n in range(30)})

    def cold(self):
        """Forget what was read; return a context that counts the statements that load."""
        self.storage.database.cache.clear()
        self.connection.cacheMinimize()
        adapter = self.storage.database.adapter
        return mock.patch.multiple(
            adapter, load_at=mock.Mock(wraps=adapter.load_at), load_many=mock.Mock(wraps=adapter.load_many))

    def loads(self):
        adapter = self.storage.database.adapter
        return adapter.load_at.call_count + adapter.load_many.call_count

    def test_a_tree_in_order(self):
        with self.manager, self.cold():
            values = [it.value for it in self.connection.root()['tree'].values()]
            statements = self.loads()
        self.assertEqual(values, list(range(2000)))
        self.assertLess(statements, 80)
        counts = self.storage.database.ahead
        self.assertGreater(counts.used, 0.9 * counts.fetched - 2 * MANY)

    def test_single_objects_in_no_order(self):
        """After a few wrong guesses nothing is fetched that was not asked for."""
        tree = self.connection.root()['tree']
        with self.manager:
            for n in random.Random(5).sample(range(2000), 100):
                tree[n]._p_activate()
        before = self.storage.database.ahead.fetched
        with self.manager, self.cold():
            for n in random.Random(6).sample(range(2000), 300):
                self.assertEqual(tree[n].value, n)
            self.assertGreater(self.storage.database.adapter.load_at.call_count, 250)
        self.assertLess(self.storage.database.ahead.fetched - before, 100)

    def test_the_same_attribute_of_one_folder_after_the_other(self):
        """A folder has several attributes; a page looks at one of them."""
        with self.manager, self.cold():
            for folder in self.connection.root()['folders'].values():
                self.assertEqual(folder.value['tree'].value, 'tree')
            self.assertLess(self.loads(), 12)       # of 61
        counts = self.storage.database.ahead
        self.assertLess(counts.fetched, 61)

    def test_prefetch_is_one_statement(self):
        """And what the objects refer to is known then."""
        with self.manager, self.cold():
            folders = list(self.connection.root()['folders'].values())
            self.connection._storage.view.ahead._resting = True
            before = self.loads()
            self.connection.prefetch(folders)
            self.assertEqual(self.loads(), before + 1)
            for folder in folders:
                self.assertEqual(len(folder.value), 3)
            self.assertEqual(self.loads(), before + 1)
            folders[0].value['tree']._p_activate()
            folders[1].value['tree']._p_activate()      # came with the other
            self.assertEqual(self.loads(), before + 2)

    def test_each_transaction_is_looked_at_anew(self):
        """Unless a load takes hardly longer than to look at it."""
        with self.manager:
            self.connection.root()['tree']
            ahead = self.connection._storage.view.ahead
            ahead._resting = True
        with self.manager:
            self.connection.root()['tree']
            self.assertEqual(ahead._resting, self.storage.database.adapter.loads_are_cheap)

    def test_what_is_fetched_is_what_the_view_sees(self):
        with self.manager:
            items = self.connection.root()['items']
            oids = [items[n]._p_oid for n in range(40)]
        with self.manager, self.cold():
            items._p_activate()     # the view is there, the objects are not
            other = TransactionManager()
            changing = self.db.open(other)
            for n in range(0, 40, 3):
                changing.get(oids[n]).value = 'newer'
            other.commit()
            changing.close()
            self.assertEqual([items[n].value for n in range(40)], list(range(40)))
            self.assertLess(self.loads(), 20)
        with self.manager:
            self.assertEqual([items[n].value for n in range(40)], ['newer' if n % 3 == 0 else n for n in range(40)])

    def test_siblings_that_do_not_exist(self):
        with self.manager:
            items = self.connection.root()['items']
            oid = items[1]._p_oid
        other = self.storage.new_instance()
        self.addCleanup(other.release)
        transaction = TransactionMetaData()
        other.tpc_begin(transaction)
        other.deleteObject(oid, self.storage.getTid(oid), transaction)
        other.tpc_vote(transaction)
        other.tpc_finish(transaction)
        with self.manager, self.cold():
            self.assertEqual(items[0].value, 0)
            self.assertEqual(self.storage.database.adapter.load_many.call_count, 1)
            with self.assertRaises(POSKeyError):
                items[1]._p_activate()
            self.assertEqual(items[2].value, 2)

    def test_references_come_with_the_state(self):
        """Where the row was written by relstore: else they are read from the pickle."""
        oid = u64(self.items()._p_oid)
        with self.storage.database.pool.session() as session:
            for unknown in (False, True):
                if unknown:
                    column = 'refs' if self.keep_history else 'refs_tid'
                    session.run(f'UPDATE object_state SET {column} = NULL WHERE zoid = {oid}')
                state, tid, refs = self.storage.database.adapter.load_at(session, oid, self.storage.database.cache.head)
                self.assertEqual(refs, None if unknown else references(state))
                rows = self.storage.database.adapter.load_many(session, [oid], tid, 0)
                self.assertEqual(rows, [(oid, state, tid, refs)])

    def items(self):
        with self.manager:
            return self.connection.root()['items']

    def test_large_states_are_not_fetched_unasked(self):
        with self.manager:
            items = self.connection.root()['items']
            for n in 0, 2:
                items[n].value = 'x' * LARGEST_STATE_BYTES
        with self.manager, self.cold():
            self.assertEqual(len(items[0].value), LARGEST_STATE_BYTES)        # asked for
            self.assertEqual(self.storage.database.adapter.load_many.call_count, 1)
            oids = [u64(items[n]._p_oid) for n in range(4)]
            held = [self.storage.database.cache.holds(oid, self.storage.database.cache.head) for oid in oids]
            self.assertEqual(held, [True, True, False, True])
            self.assertEqual(len(items[2].value), LARGEST_STATE_BYTES)


cases(globals(), Suite)
del Suite
