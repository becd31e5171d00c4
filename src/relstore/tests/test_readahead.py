"""Read-ahead: what is fetched beside a missed object is likely to be wanted, and always right."""
import random
import unittest
from collections import defaultdict
from itertools import groupby
from unittest import mock

from BTrees.OOBTree import OOBTree, OOBucket
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.tests.MinPO import MinPO
from ZODB.utils import p64, u64

from relstore.caching.cache import Cache
from relstore.caching.readahead import (
    CLASSES,
    LARGEST,
    LARGEST_HIT,
    LARGEST_STATE,
    LONGEST_REST,
    LOOKED_AT,
    PATIENCE,
    REMEMBERED,
    REST,
    TIRED,
    Counts,
    ReadAhead,
)
from relstore.references import references
from relstore.tests.support.backends import cases
from relstore.tests.support.records import Reference, pickled


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
        """Do what a storage does when a load misses; return what is fetched with it."""
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
        self.assertEqual(windows, [3, 12, 48, 64, 64, 64])
        self.miss(oid)
        self.assertEqual((self.counts.used, self.counts.fetched), (sum(windows), sum(windows) + LARGEST))

    def test_it_shrinks_to_nothing_when_they_are_not(self):
        self.saw(1, *range(10_000))
        windows = [len(self.miss(oid)) for oid in (1000, 3000, 2000, 4000, 6000)]
        self.assertEqual(windows, [3, 1, 0, 0, 0])
        self.assertEqual(self.counts.used, 0)

    def test_misses_in_order_open_it_again(self):
        self.test_it_shrinks_to_nothing_when_they_are_not()
        missed = iter(range(7000, 7000 + PATIENCE + 10_000 // 32))
        siblings = next(filter(None, map(self.miss, missed)))
        oid = next(missed)
        self.assertEqual(siblings, [oid, oid + 1])

    def test_misses_in_order_in_a_small_container_open_it_sooner(self):
        for start in range(1000, 3000, 100):
            self.saw(start, *range(start + 1, start + 50))
            self.miss(start + 10)
        before = self.counts.fetched
        for _ in range(PATIENCE):       # one of them is remembered
            self.saw(1, *range(10, 60))
        missed = self.read(range(10, 40))
        self.assertLess(missed, PATIENCE + 8)
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
        self.assertEqual((kind.along, kind.across), (0, 0))
        known = {*self.ahead._states, *self.ahead._older_states}
        self.assertIn(len(known.intersection(buckets[300:500])), range(1, 30))
        missed = 0
        for bucket in buckets[500:]:
            self.saw(bucket, *range(bucket + 1, bucket + 51))
            missed += self.read(range(bucket + 1, bucket + 51))
        self.assertLess(missed, 490 * 50 / 5)

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
        self.assertLess(self.counts.fetched, len(order) + LARGEST)

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
                    self.assertLessEqual(len(self.miss(oid)), LARGEST)

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
        self.assertEqual(self.miss(1002), [1012, 1022])
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
        for oid in range(TIRED):
            self.miss(oid)
        folders = range(1_000_000, 1_140_000, 100)
        for folder in folders:
            self.assertEqual(self.miss(folder + 50), [])
            self.saw(folder, folder + 1, folder + 2, of=MinPO)
        runs = [(looked_at, len(list(run)))
                for looked_at, run in groupby(folder in self.ahead._states for folder in folders)]
        self.assertEqual(runs[:5], [
            (False, REST), (True, LOOKED_AT), (False, 2 * REST), (True, LOOKED_AT), (False, LONGEST_REST)])
        self.assertEqual(runs[6], (False, LONGEST_REST))

    def test_a_guess_ends_the_rest(self):
        for oid in range(1250):
            self.miss(oid)
        missed = self.read_buckets(1_000_000)
        self.assertGreater(missed, 1)
        self.assertLess(missed, LONGEST_REST + LOOKED_AT)
        self.assertLess(self.read_buckets(2_000_000), 110)      # the first of each bucket, which nothing leads to

    def read_buckets(self, start):
        """Read 100 buckets of 20 objects, each bucket before its objects; return how many were missed."""
        missed = 0
        for bucket in range(start, start + 10_000, 100):
            self.saw(bucket, *range(bucket + 1, bucket + 21))
            missed += self.read(range(bucket + 1, bucket + 21))
        return missed

    def test_another_transaction_ends_the_rest(self):
        for oid in range(10 * REST):
            self.miss(oid)
            if self.ahead._resting:
                break
        self.saw(1, *range(1_000_000, 1_000_020))
        self.assertEqual(self.miss(1_000_000), [])
        self.ahead.wake()
        self.saw(1, *range(1_000_000, 1_000_020))
        self.assertEqual(len(self.miss(1_000_001)), 3)

    # what is remembered

    def test_siblings_of_what_a_hit_state_refers_to(self):
        self.assertEqual(self.miss(12, hit=record(*range(10, 20))), [13, 14, 15])

    def test_large_cached_states_are_not_searched(self):
        self.assertEqual(self.miss(5, hit=record(5, 6, text=b'x' * LARGEST_HIT)), [])

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
        for node in range(0, 100 * REMEMBERED, 100):
            self.saw(1 << 40 | node, *range(node, node + 50))
        known = {*self.ahead._parents, *self.ahead._older_parents}
        self.assertLess(len(known), 2 * REMEMBERED + 200)
        self.assertGreater(len(known), REMEMBERED)
        self.assertLess(len(self.ahead._states) + len(self.ahead._older_states), 2 * REMEMBERED / 50 + 10)

    def test_classes_are_bounded(self):
        for n in range(CLASSES + 100):
            self.ahead.saw(n, record(5, 6).replace(b'OOBucket', b'OO%d' % n), None)
        self.assertLessEqual(len(self.counts.kinds), CLASSES + 1)

    def test_a_referrer_in_use_is_not_forgotten(self):
        self.saw(1, *range(10, 100), of=OOBTree)
        for node in range(10, 40):
            self.miss(node)
            self.saw(node, *range(1000 * node, 1000 * node + REMEMBERED // 4))
        self.assertEqual(self.ahead._parent(50).oid, 1)


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
        self.storage._cache.clear()
        self.connection.cacheMinimize()
        adapter = self.storage._adapter
        return mock.patch.multiple(
            adapter, load_at=mock.Mock(wraps=adapter.load_at), load_many=mock.Mock(wraps=adapter.load_many))

    def loads(self):
        adapter = self.storage._adapter
        return adapter.load_at.call_count + adapter.load_many.call_count

    def test_a_tree_in_order(self):
        with self.manager, self.cold():
            values = [it.value for it in self.connection.root()['tree'].values()]
            statements = self.loads()
        self.assertEqual(values, list(range(2000)))
        self.assertLess(statements, 80)
        counts = self.storage._database.ahead
        self.assertGreater(counts.used, 0.9 * counts.fetched - 2 * LARGEST)

    def test_single_objects_in_no_order(self):
        """After a few wrong guesses nothing is fetched that was not asked for."""
        tree = self.connection.root()['tree']
        with self.manager:
            for n in random.Random(5).sample(range(2000), 100):
                tree[n]._p_activate()
        before = self.storage._database.ahead.fetched
        with self.manager, self.cold():
            for n in random.Random(6).sample(range(2000), 300):
                self.assertEqual(tree[n].value, n)
            self.assertGreater(self.storage._adapter.load_at.call_count, 250)
        self.assertLess(self.storage._database.ahead.fetched - before, 100)

    def test_the_same_attribute_of_one_folder_after_the_other(self):
        """A folder has several attributes; a page looks at one of them."""
        with self.manager, self.cold():
            for folder in self.connection.root()['folders'].values():
                self.assertEqual(folder.value['tree'].value, 'tree')
            self.assertLess(self.loads(), 12)       # of 61
        counts = self.storage._database.ahead
        self.assertLess(counts.fetched, 61)

    def test_prefetch_is_one_statement(self):
        """And what the objects refer to is known then."""
        with self.manager, self.cold():
            folders = list(self.connection.root()['folders'].values())
            self.connection._storage._view._ahead._resting = True
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
            ahead = self.connection._storage._view._ahead
            ahead._resting = True
        with self.manager:
            self.connection.root()['tree']
            self.assertEqual(ahead._resting, self.storage._adapter.loads_are_cheap)

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
            self.assertEqual(self.storage._adapter.load_many.call_count, 1)
            with self.assertRaises(POSKeyError):
                items[1]._p_activate()
            self.assertEqual(items[2].value, 2)

    def test_references_come_with_the_state(self):
        """Where the row was written by relstore: else they are read from the pickle."""
        oid = u64(self.items()._p_oid)
        with self.storage._pool.session() as session:
            for unknown in (False, True):
                if unknown:
                    column = 'refs' if self.keep_history else 'refs_tid'
                    session.run(f'UPDATE object_state SET {column} = NULL WHERE zoid = {oid}')
                state, tid, refs = self.storage._adapter.load_at(session, oid, self.storage._cache.head)
                self.assertEqual(refs, None if unknown else references(state))
                rows = self.storage._adapter.load_many(session, [oid], tid, 0)
                self.assertEqual(rows, [(oid, state, tid, refs)])

    def items(self):
        with self.manager:
            return self.connection.root()['items']

    def test_large_states_are_not_fetched_unasked(self):
        with self.manager:
            items = self.connection.root()['items']
            for n in 0, 2:
                items[n].value = 'x' * LARGEST_STATE
        with self.manager, self.cold():
            self.assertEqual(len(items[0].value), LARGEST_STATE)        # asked for
            self.assertEqual(self.storage._adapter.load_many.call_count, 1)
            oids = [u64(items[n]._p_oid) for n in range(4)]
            held = [self.storage._cache.holds(oid, self.storage._cache.head) for oid in oids]
            self.assertEqual(held, [True, True, False, True])
            self.assertEqual(len(items[2].value), LARGEST_STATE)


cases(globals(), Suite)
del Suite
