"""What a round trip costs, and how many there are."""
from contextlib import closing

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.tests.ConflictResolution import PCounter
from ZODB.utils import z64

from relstore.tests.support.backends import (
    MYSQL,
    PGBOUNCER,
    PYMYSQL_ON_MYSQL,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.records import counter, value_of
from relstore.tests.support.server_suite import POSTGRESQL, ServerSuite


class RoundTrips(ServerSuite):
    """Counted between transaction managers in explicit mode and the server."""

    def setUp(self):
        super().setUp()
        self._open()
        with self.manager:
            root = self.connection.root()
            for n in range(100):
                root[n] = PersistentMapping(value=0)
            root['counter'] = PCounter()
        self.other_db = DB(self.other)
        self.addCleanup(self.other_db.close)
        self._cost(lambda: None)     # sessions are open from here on

    def _open(self):
        """Begin anew, with nothing cached but the root."""
        self.mine, self.proxy = self.behind_proxy()
        db = DB(self.mine)
        self.addCleanup(db.close)
        self.manager = TransactionManager(explicit=True)
        self.connection = db.open(self.manager)
        self.addCleanup(self.connection.close)
        with self.manager:
            self.connection.root()._p_activate()

    def _cost(self, work) -> int:
        """Return the round trips of one transaction."""
        self.proxy.reset()
        with self.manager:
            work()
        return self.proxy.round_trips

    def _touch(self, count):
        for n in range(count):
            self.connection.root()[n]['value'] += 1

    def test_a_transaction_that_reads_what_is_cached(self):
        self._cost(lambda: [self.connection.root()[n]['value'] for n in range(100)])
        self.connection.cacheMinimize()
        cost = self._cost(lambda: [self.connection.root()[n]['value'] for n in range(100)])
        self.assertEqual(cost, 1 if self.keep_history else 2)

    def test_a_miss(self):
        """One round trip each, where nothing tells which object will be next."""
        self._open()
        view = self.mine.new_instance()
        self.addCleanup(view.release)
        oids = [self.connection.root()[n]._p_oid for n in range(10)]
        view.poll_invalidations()
        self.proxy.reset()
        for oid in oids:
            view.load(oid)
        self.assertEqual(self.proxy.round_trips, 10)

    def test_misses_of_siblings(self):
        """Four are fetched with the first, eight with the next."""
        self._open()
        empty = self._cost(lambda: None)
        cost = self._cost(lambda: [self.connection.root()[n]['value'] for n in range(14)])
        self.assertEqual(cost - empty, 2)

    def test_prefetch(self):
        self._open()
        empty = self._cost(lambda: None)
        objects = list(self.connection.root().values())
        cost = self._cost(lambda: (self.connection.prefetch(objects), [it._p_activate() for it in objects]))
        self.assertEqual(cost - empty, 1)

    def test_a_commit(self):
        """Poll, vote, finish; where no history is kept also the end of the snapshot."""
        limit = 4 if self.keep_history else 5
        for count in (1, 100):
            self._cost(lambda: self._touch(100))
            self.assertLessEqual(self._cost(lambda count=count: self._touch(count)), limit, f'{count} objects')

    def test_a_conflict(self):
        with self.manager:
            self.connection.root()['counter'].inc()
        plain = self._cost(lambda: self.connection.root()['counter'].inc())

        def conflict():
            self.connection.root()['counter'].inc()
            manager = TransactionManager()
            with closing(self.other_db.open(manager)) as connection:
                connection.root()['counter'].inc(10)
                manager.commit()

        self._cost(lambda: self.connection.root()['counter']._value)
        self.assertLessEqual(self._cost(conflict) - plain, 2)
        self.manager.begin()
        self.assertEqual(self.connection.root()['counter']._value, 13)
        self.manager.abort()

    def test_many_conflicts(self):
        """With nothing in the cache, where history is kept: else they could not be resolved."""
        oids = [self.other.new_oid() for _ in range(30)]
        base = commit(self.other, *((oid, z64, counter(0)) for oid in oids))
        view = self.mine.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        if not self.keep_history:
            view.prefetch(oids)
        tid = commit(self.other, *((oid, base, counter(1)) for oid in oids))
        new = view.new_oid()
        self.proxy.reset()
        plain = commit(view, (new, z64, counter(0)))
        costs = self.proxy.round_trips
        self.proxy.reset()
        resolved = commit(view, *((oid, base, counter(10)) for oid in oids))
        self.assertLessEqual(self.proxy.round_trips - costs, 2)
        self.assertEqual({value_of(self.other.loadSerial(oid, resolved)) for oid in oids}, {11})
        self.assertTrue(tid < plain < resolved)

    def test_new_oids(self):
        self.proxy.reset()
        self.mine.database.oids.forget()
        oids = {self.mine.new_oid() for _ in range(16)}
        self.assertEqual((len(oids), self.proxy.round_trips), (16, 1))
        for _ in range(5000):
            self.mine.new_oid()
        self.assertLess(self.proxy.round_trips, 15, 'who needs many gets many at once')


cases(globals(), RoundTrips, backends=POSTGRESQL + MYSQL + PYMYSQL_ON_MYSQL + PGBOUNCER[:2], each_driver=True)
del ServerSuite, RoundTrips
