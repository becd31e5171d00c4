"""Many transactions that are copied as one of the database leave the rows that each would leave alone."""
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from ZODB.utils import p64, u64

import relstore
from relstore import bulk
from relstore.converting.compare import Comparison
from relstore.tests.support.backends import HISTORY_FREE, HISTORY_PRESERVING, cases
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state
from relstore.tests.support.sources import FIRST, Source, Transaction, current, of_all_kinds

TABLES = {
    True: {'transaction': 'tid', 'object_state': 'tid, zoid', 'current_object': 'zoid', 'relstore_blob': 'tid, zoid'},
    False: {'object_state': 'zoid', 'relstore_blob': 'zoid'},
}
class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)

    def enter(self, context):
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def rows(self):
        """Return all rows that a copy writes, by table."""
        adapter = self.storage.database.adapter
        found = {}
        with self.storage.database.pool.session() as session:
            for table, order in TABLES[self.keep_history].items():
                text = adapter.sql.expanded({'': f'SELECT * FROM {{{table}}} ORDER BY {order}'})['']
                found[table] = session.all(text)
        return found

    def copy(self, source, storage=None, one_by_one=False):
        """Copy; return how many batches were committed, and how many transactions one by one."""
        counts = [0, 0]
        finish, restore = bulk.Bulk._finish, relstore.RelStore.tpc_finish

        def finish_batch(*arguments):
            counts[0] += 1
            return finish(*arguments)

        def finish_one(*arguments, **more):
            counts[1] += 1
            return restore(*arguments, **more)

        with patch.object(bulk.Bulk, '_finish', finish_batch), \
                patch.object(relstore.RelStore, 'tpc_finish', finish_one):
            if one_by_one:
                with patch.object(relstore.RelStore, 'bulk', None):
                    (storage or self.storage).copyTransactionsFrom(source)
            else:
                (storage or self.storage).copyTransactionsFrom(source)
        return counts

    def assertEqualTo(self, source, storage=None):
        differences = list(Comparison(source, storage or self.storage, self.keep_history).differences())
        if self.keep_history:
            self.assertEqual(differences, [])
        else:
            self.assertEqual(self.current(storage or self.storage), current(source))

    def current(self, storage):
        found, following = {}, None
        while True:
            oid, tid, data, following = storage.record_iternext(following)
            found[u64(oid)] = u64(tid), data
            if following is None:
                return found


class Rows(Suite):
    """The same rows, whether transactions are copied in bulk or one by one."""

    def in_both_ways(self, source):
        self.assertEqual(self.copy(source, one_by_one=True)[0], 0)
        expected = self.rows()
        self.storage.zap_all()
        counts = self.copy(source)
        found = self.rows()
        for table in expected:
            self.assertEqual(found[table], expected[table], table)
        self.assertEqualTo(source)
        return counts

    def test_in_one_batch(self):
        source = of_all_kinds()
        batches, singles = self.in_both_ways(source)
        self.assertEqual(singles, 1)            # the deletion
        self.assertEqual(batches, 2)
        self.assertGreater(u64(self.storage.new_oid()), 40_000_000)
        with closing(self.open_storage()) as other:
            self.assertGreater(u64(other.new_oid()), 40_000_000)

    def test_in_many_batches(self):
        self.enter(patch.object(bulk, 'BATCH_BYTES', 5000))
        batches, singles = self.in_both_ways(of_all_kinds(200))
        self.assertGreater(batches, 20)
        self.assertEqual(singles, 1)

    def test_what_is_large(self):
        """A transaction that is too large to be held."""
        self.enter(patch.object(bulk, 'BATCH_BYTES', 5000))
        self.enter(patch.object(bulk, 'LARGE_BYTES', 6000))
        batches, singles = self.in_both_ways(of_all_kinds(100))
        self.assertGreater(batches, 10)
        self.assertGreater(singles, 10)

    def test_a_state_of_many_megabytes(self):
        self.enter(patch.object(self.storage.database.adapter, 'message_size', 100_000))
        self.in_both_ways(Source([Transaction(FIRST + n, [(0, state('x' * 300_000 * n), None), (n, state(n), None)])
                                  for n in range(1, 9)]))

    def test_resumed(self):
        """Objects are there already, which change again."""
        source = of_all_kinds()
        half = Source(source.transactions[:30])
        self.copy(source, one_by_one=True)
        expected = self.rows()
        self.storage.zap_all()
        self.copy(half)
        with closing(self.open_storage()) as other:
            self.assertEqual(self.copy(source, other), [2, 1])
        self.assertEqual(self.rows(), expected)
        self.assertEqual(self.copy(source), [0, 0])

    def test_tids_that_do_not_rise(self):
        source = of_all_kinds(20)
        ten, eleven = source.transactions[10:12]
        ten.tid, eleven.tid = eleven.tid, ten.tid
        with self.assertLogs('relstore', 'WARNING'):
            batches, _ = self.in_both_ways(source)
        self.assertEqual(batches, 2)

    def test_views_learn_of_it(self):
        source = of_all_kinds()
        self.copy(Source(source.transactions[:30]))
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        changed = {u64(record.oid) for transaction in source.transactions[30:] for record in transaction}
        for oid in current(Source(source.transactions[:30])):
            view.load(p64(oid))
        view.afterCompletion()
        self.copy(source)
        told = view.poll_invalidations()
        self.assertTrue(told is None or {u64(oid) for oid in told} >= changed - {40_000_000})
        for oid, (tid, data) in current(source).items():
            self.assertEqual(view.load(p64(oid)), (data, p64(tid)))

    def test_a_batch_ends_after_a_time(self):
        self.enter(patch.object(bulk, 'BATCH_SECONDS', -1))
        self.assertGreater(self.copy(of_all_kinds(20))[0], 15)

    def test_what_is_copied_can_be_changed(self):
        self.copy(of_all_kinds())
        _, tid = self.storage.load(p64(7))
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        commit(view, (p64(7), tid, state('mine')))
        self.assertEqual(self.storage.load(p64(7))[0], state('mine'))


cases(globals(), Rows, backends=HISTORY_PRESERVING + HISTORY_FREE, each_driver=True)
del Rows
