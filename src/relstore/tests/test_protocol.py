"""What is seen when, and which tid a commit gets."""
from unittest.mock import patch

from persistent.TimeStamp import TimeStamp
from transaction.interfaces import TransientError
from ZODB.POSException import ConflictError, POSKeyError, ReadConflictError, StorageError
from ZODB.utils import p64, u64, z64

from relstore.tests.support.backends import (
    MYSQL,
    MySQLBackend,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state, value_of
from relstore.tests.support.server_suite import POSTGRESQL, ServerSuite, Suite


class Views(ServerSuite):

    def setUp(self):
        super().setUp()
        self.oids = self.objects(2)
        self.cold = self.opened(cache_local_mb=0).new_instance()
        self.addCleanup(self.cold.release)
        self.cold.poll_invalidations()

    def _change(self):
        for value in (1, 2):
            commit(self.other, *((oid, self.other.getTid(oid), state(value)) for oid in self.oids))

    def _values(self):
        return [value_of(self.cold.load(oid)[0]) for oid in self.oids]

    def test_a_view_does_not_see_later_commits(self):
        self._change()
        self.assertEqual(self._values(), [0, 0])
        self.cold.prefetch(self.oids)
        self.assertEqual(set(self.cold.poll_invalidations()), set(self.oids))
        self.assertEqual(self._values(), [2, 2])

    def test_a_view_begins_with_its_poll(self):
        """Not with its first load: what is committed between the two is not seen."""
        self.cold.afterCompletion()
        self.cold.poll_invalidations()
        self._change()
        self.assertEqual(self._values(), [0, 0])

    def test_prefetch_fills_the_cache_with_what_the_view_sees(self):
        self.view.poll_invalidations()
        self._change()
        self.view.prefetch(self.oids)
        self.view.afterCompletion()     # a load that is no hit fails now, where history is not kept
        self.assertEqual([value_of(self.view.load(oid)[0]) for oid in self.oids], [0, 0])
        self.assertEqual(self.view.database.cache.stats()['objects'], 2)

    def _nothing_is_open_after(self, end):
        self.cold.load(self.oids[0])
        self.assertEqual(self.watch.open_transactions(), 0 if self.keep_history else 1)
        end()
        self.watch.until_nothing_is_open()
        self.assertEqual(self.cold.database.pool.lent, 0)

    def test_nothing_is_open_after_the_transaction(self):
        self._nothing_is_open_after(self.cold.afterCompletion)

    def test_nothing_is_open_after_release(self):
        self._nothing_is_open_after(self.cold.release)

    def test_nothing_is_open_after_close(self):
        self._nothing_is_open_after(self.cold.close)

    def test_nothing_is_open_after_a_commit_or_an_abort(self):
        for end in (self.cold.tpc_finish, self.cold.tpc_abort):
            self.cold.poll_invalidations()
            txn, _ = self.voted(self.cold, (self.oids[0], self.other.getTid(self.oids[0]), state(1)))
            end(txn)
            self.watch.until_nothing_is_open()
            self.assertEqual(self.cold.database.pool.lent, 0)

    def test_nothing_is_open_after_a_conflict(self):
        self._change()
        with self.assertRaises(ConflictError):
            self.voted(self.cold, (self.oids[0], p64(1), state(1)))
        self.watch.until_nothing_is_open()
        self.assertEqual(self.cold.database.pool.lent, 0)

    def test_a_load_after_the_transaction(self):
        """What was overwritten since is gone where no history is kept, and the application is to try again."""
        self.cold.afterCompletion()
        self._change()
        if self.keep_history:
            self.assertEqual(self._values(), [0, 0])
        else:
            with self.assertRaises(ReadConflictError):
                self.cold.load(self.oids[0])
        with self.assertRaises(POSKeyError):
            self.cold.load(p64(1_000_000))

    def test_one_session_is_enough_for_an_instance(self):
        small = self.opened(pool_size=2, pool_timeout=0.1)
        views = [small.new_instance() for _ in range(2)]
        for view in views:
            view.poll_invalidations()
            view.load(self.oids[0])
        for view, oid in zip(views, self.oids, strict=True):
            txn, _ = self.voted(view, (oid, self.other.getTid(oid), state(1)))
            view.tpc_finish(txn)
        self.assertEqual(small.database.pool.lent, 0)


class Zap(Suite):

    def test_a_zapped_database_is_another_one(self):
        [oid] = self.objects()
        view = self.view
        view.poll_invalidations()
        view.load(oid)
        view.afterCompletion()
        epoch = self.storage.database.epochs.now
        self.other.zap_all()
        again = self.other.new_oid()
        commit(self.other, (again, z64, state(5)))
        with self.assertRaises(TransientError):
            self.voted(view, (view.new_oid(), z64, state(1)))
        self.assertIsNone(view.poll_invalidations())
        self.assertNotEqual(self.storage.database.epochs.now, epoch)
        self.assertEqual(value_of(view.load(again)[0]), 5)
        self.assertNotEqual(view.load(again)[0], state(0))
        view.afterCompletion()
        txn, _ = self.voted(view, (again, view.load(again)[1], state(6)))
        view.tpc_finish(txn)


class Tids(ServerSuite):

    def _is_now(self, tid):
        self.assertAlmostEqual(TimeStamp(tid).timeTime(), self.watch.now(), delta=5)

    def test_the_clock_of_a_client_does_not_matter(self):
        for wrong in (1_000_000_000.0, 4_000_000_000.0):
            with patch('time.time', lambda wrong=wrong: wrong):
                oid = self.view.new_oid()
                self._is_now(commit(self.view, (oid, z64, state(1))))

    def test_it_is_the_timestamp_that_zodb_would_make(self):
        """Month ends and the fraction of a minute included."""
        for text in ('2024-02-29 23:59:59.999', '2025-01-01 00:00:00', '2031-12-31 12:34:56.789'):
            date, hour = text.split()
            hours, minutes, seconds = hour.split(':')
            wanted = TimeStamp(*map(int, date.split('-')), int(hours), int(minutes), float(seconds)).raw()
            self.assertAlmostEqual(self._made_at(text), u64(wanted), delta=8)     # in 14 ns

    def _made_at(self, text) -> int:
        """Return the tid of a commit when the server's clock says so."""
        if not isinstance(self, MySQLBackend):
            return self.watch.one('SELECT relstore_tid_1(%s::timestamp)', text)
        sql, clock = self.storage.database.adapter.sql, 'UTC_TIMESTAMP(6)'
        before = sql.begin_finish
        self.assertIn(clock, before)
        sql.begin_finish = before.changed(clock, f"CAST('{text}' AS DATETIME(6))")
        try:
            return u64(commit(self.view, (self.view.new_oid(), z64, state(1))))
        finally:
            sql.begin_finish = before

    def test_they_rise_when_the_last_one_lies_in_the_future(self):
        ahead = TimeStamp(2099, 1, 1, 0, 0, 0).raw()
        oid = self.view.new_oid()

        def restore(txn):
            self.view.restore(oid, ahead, state(0), '', None, txn)

        self.assertEqual(commit(self.view, tid=ahead, work=restore), ahead)
        tids = [ahead]
        for n in range(5):
            storage = (self.view, self.other)[n % 2]
            tids.append(commit(storage, (oid, tids[-1], state(n))))
        self.assertEqual(tids, [p64(u64(ahead) + n) for n in range(6)])
        with self.assertRaises(StorageError):
            commit(self.view, tid=ahead, work=restore)


cases(globals(), Views, Tids, backends=POSTGRESQL + MYSQL)
cases(globals(), Zap)
del Suite, ServerSuite, Views, Zap, Tids
