"""Read-ahead: what is fetched beside a missed object is likely to be wanted, and always right."""
import io
import random
import unittest
from unittest import mock

from BTrees.OOBTree import OOBTree
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.tests.MinPO import MinPO
from ZODB.utils import p64, u64
from zodbpickle.pickle import Pickler

from relstore.cache import Cache
from relstore.readahead import FIRST, LARGEST, LARGEST_HIT, LARGEST_STATE, Counts, ReadAhead
from relstore.references import references
from relstore.tests.backends import cases


class Reference:

    def __init__(self, oid):
        self.pid = p64(oid), None


def record(*oids, text=b''):
    """Return a record that refers to these objects, and holds this text."""
    file = io.BytesIO()
    pickler = Pickler(file, 3)
    pickler.persistent_id = lambda it: it.pid if isinstance(it, Reference) else None
    pickler.dump((MinPO, None))
    pickler.dump([text, [Reference(oid) for oid in oids]])
    return file.getvalue()


class Guesses(unittest.TestCase):
    """ReadAhead by itself. `miss` does what a storage does when a load misses."""

    def setUp(self):
        self.cache, self.counts = Cache(1 << 20, 1 << 20), Counts()
        self.ahead = ReadAhead(self.cache, self.counts, lambda record: record)

    def miss(self, oid, hit=None):
        siblings = self.ahead.siblings(oid, 1, hit)
        for fetched in (oid, *siblings):
            self.cache.put(fetched, 1, b'.', 1)
        return siblings

    def use(self, oids):
        for oid in oids:
            self.assertIsNotNone(self.cache.find(oid, 1))

    def test_an_object_that_nothing_seen_refers_to(self):
        self.ahead.saw(None, record(5, 6))
        self.assertEqual(self.miss(7), [])

    def test_siblings_of_what_a_loaded_state_refers_to(self):
        self.ahead.saw(None, record(*range(10, 20)))
        self.assertEqual(self.miss(12), [13, 14, 15, 16][:FIRST])

    def test_siblings_of_what_a_hit_state_refers_to(self):
        self.assertEqual(self.miss(12, hit=record(*range(10, 20))), [13, 14, 15, 16][:FIRST])

    def test_references_that_came_with_the_state(self):
        self.ahead.saw(b''.join(map(p64, range(10, 20))), b'not looked at')
        self.assertEqual(self.miss(12), [13, 14, 15, 16])

    def test_large_cached_states_are_not_searched(self):
        self.assertEqual(self.miss(5, hit=record(5, 6, text=b'x' * LARGEST_HIT)), [])

    def test_records_that_a_storage_around_this_one_has_changed(self):
        ahead = ReadAhead(self.cache, self.counts, lambda record: record[::-1])
        ahead.saw(None, record(5, 6)[::-1])
        self.assertEqual(ahead.siblings(5, 1, None), [6])
        self.assertEqual(ahead.siblings(7, 1, record(7, 8)[::-1]), [8])

    def test_there_are_none_after_the_last(self):
        self.ahead.saw(None, record(5, 6))
        self.assertEqual(self.miss(6), [])

    def test_what_is_cached_is_not_fetched(self):
        self.ahead.saw(None, record(*range(10, 20)))
        self.cache.put(13, 1, b'.', 1)
        self.assertEqual(self.miss(12), [14, 15, 16])

    def test_an_oid_in_the_text_of_a_state_is_no_reference(self):
        self.ahead.saw(None, record(5, 6, text=p64(7)))
        self.assertEqual(self.miss(7), [])
        self.assertEqual(self.miss(5), [6])

    def test_an_oid_across_two_references_is_none(self):
        """The bytes of two packed oids hold others, which start in the middle."""
        self.ahead.saw(None, record(0x0100000000000000, 0x0200000000000003, 0x0000000001000000, 9))
        middle = u64((p64(0x0200000000000003) + p64(0x0000000001000000))[4:12])
        self.assertEqual(self.miss(middle), [])

    def test_the_window_doubles_while_the_guesses_are_used(self):
        self.ahead.saw(None, record(*range(10, 1000)))
        oid, windows = 10, []
        for _ in range(8):
            siblings = self.miss(oid)
            self.use(siblings)
            windows.append(len(siblings))
            oid += len(siblings) + 1
        self.assertEqual(windows, [4, 8, 16, 32, 32, 32, 32, 32])
        self.assertEqual(LARGEST, 32)
        self.miss(oid)
        self.assertEqual((self.counts.used, self.counts.fetched), (sum(windows), sum(windows) + 32))

    def test_it_shrinks_to_nothing_when_they_are_not(self):
        self.ahead.saw(None, record(*range(10000)))
        windows = [len(self.miss(oid)) for oid in (1000, 3000, 2000, 4000, 6000, 5000)]
        self.assertEqual(windows, [4, 2, 1, 0, 0, 0])
        self.assertEqual(self.counts.used, 0)

    def test_misses_in_a_row_open_it_again(self):
        self.test_it_shrinks_to_nothing_when_they_are_not()
        self.assertEqual(self.miss(7000), [])
        self.assertEqual(self.miss(7001), [7002, 7003])

    def test_new_referrers_start_with_what_served_the_others(self):
        for node in range(100, 1200, 100):
            self.ahead.saw(None, record(*range(node, node + 20)))
            last = self.miss(node)
        self.assertEqual(last, [])
        for node in range(10000, 14000, 100):       # each is read to its end
            self.ahead.saw(None, record(*range(node, node + 20)))
            misses = 0
            for oid in range(node, node + 20):
                if not self.cache.find(oid, 1):
                    self.miss(oid)
                    misses += 1
        self.assertEqual(misses, 1)

    def test_a_referrer_that_knows_no_siblings_is_the_second_choice(self):
        """Buckets of a tree are chained, and their node refers to them all."""
        self.ahead.saw(None, record(*range(10, 30)))
        self.use(self.miss(10))
        self.ahead.saw(None, record(800, 801, 15))
        self.miss(800)
        self.assertEqual(self.miss(15), [16, 17, 18, 19, 20, 21, 22, 23])

    def test_a_referrer_in_use_is_not_forgotten(self):
        root = record(*range(10, 100))
        self.ahead.saw(None, root)
        for node in range(10, 40):
            self.miss(node)
            self.ahead.saw(None, record(*range(1000 * node, 1000 * node + 9)))
            self.miss(1000 * node)
        self.cache.clear()
        self.assertIsNotNone(self.ahead._known(p64(50)))

    def test_a_record_that_cannot_be_read(self):
        self.ahead.saw(None, record(5, 6)[:-3] + b'Q')
        self.assertEqual(self.miss(5), [])


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
        self.assertLess(statements, 200)
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
        self.assertLess(self.storage._database.ahead.fetched - before, 100)

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
