"""What a pack removes is gone from the caches of those who read, and nothing else is."""
import tempfile
from collections.abc import Callable
from unittest.mock import patch

from ZODB.POSException import POSKeyError
from ZODB.utils import u64, z64

from relstore.tests.support.backends import cases
from relstore.tests.support.children import in_child
from relstore.tests.support.objects import Client
from relstore.tests.support.packing import BACKENDS, Cluster, Suite
from relstore.tests.support.records import record
from relstore.tests.support.servers import MemcachedServer, require_memcached


class Readers(Suite):
    """A process that commits nothing learns of a sweep from its polls."""

    def setUp(self):
        super().setUp()
        self.database = self.site.database
        self.cache = self.database.cache

    def test_cached_garbage_is_gone(self):
        [cluster] = self.clusters(1)
        reader = self.client()
        for oid in z64, cluster.holder, cluster.one:
            reader.load(oid)
        self.pack()
        self.assertEqual(reader.load(cluster.one), record(cluster.two), 'it sees what it saw')
        reader.begin()
        self.assertFalse(self.cache.holds(u64(cluster.one), self.cache.head))
        self.assertTrue(self.cache.holds(u64(cluster.holder), self.cache.head), 'the rest is kept')
        with self.assertRaises(POSKeyError):
            reader.load(cluster.one)

    def test_too_much_to_be_told(self):
        """Then nothing is kept, not even what a view of before brings in the last moment."""
        clusters = self.clusters(4)
        site = self.opened(poll_limit=5)
        reader, cache = self.client(site), site.database.cache
        remove, swept = cache.remove, u64(clusters[0].one)

        def put_first(oids):
            cache.put(swept, 1, record(), cache.head, cache.generation)
            remove(oids)

        self.pack()
        with patch.object(cache, 'remove', put_first):
            reader.begin()
        self.assertFalse(cache.holds(swept, cache.head))
        self.missing(reader, clusters)

    def missing(self, client: Client, clusters: list[Cluster]) -> None:
        for cluster in clusters:
            with self.assertRaises(POSKeyError):
                client.load(cluster.one)

    def test_they_go_on_sharing(self):
        """What is kept in memcached and in files has one name for all, also where nobody commits, or asks often."""
        require_memcached(self)
        server = MemcachedServer()
        self.addCleanup(server.stop)
        server.start()
        with tempfile.TemporaryDirectory() as directory:
            options = {'cache_servers': server.where, 'poll_interval': 3600, 'cache_local_dir': directory}
            [cluster] = self.clusters(1)
            packing, site = [self.opened(**options) for _ in range(2)]
            reader = self.client(site)
            reader.load(cluster.one)
            for _ in range(3):
                reader.begin()
            sent = site.cache_stats()['polls_sent']
            reader.begin()
            self.assertEqual(site.cache_stats()['polls_sent'], sent)
            self.pack(packing)
            reader.begin()
            storages = packing, site, self.opened(**options)
            for name in (lambda d: d.tier.epoch.namespace,
                         lambda d: d.warm._epoch_of(d.cache.generation)):
                self.assertEqual(len({name(storage.database) for storage in storages}), 1)
            reader.load(cluster.holder)
            reader.begin()
            late = self.client(storages[-1])
            late.load(cluster.holder)
            self.assertEqual(storages[-1].cache_stats()['shared_hits'], 1)
            reader.view.release()
            late.view.release()
            for storage in storages:
                storage.close()

    def late(self, before: Callable[[], None], after: Callable[[], None]) -> tuple[int, int]:
        """Poll while something happens before the database answers, and something before the answer comes."""
        poll = self.database.adapter.poll

        def late(*arguments):
            with patch.object(self.database.adapter, 'poll', poll):
                before()
                answer = poll(*arguments)
                after()
            return answer

        with patch.object(self.database.adapter, 'poll', late), self.site.database.pool.session() as session:
            answer = self.database.poll(session)
            session.rollback()
        return answer

    def poll(self) -> tuple[int, int]:
        with self.site.database.pool.session() as session:
            answer = self.database.poll(session)
            session.rollback()
        return answer

    def test_told_twice(self):
        """The second answer is as good as the first, and knows of a later change."""
        [cluster] = self.clusters(1)
        reader = self.client()
        reader.load(cluster.holder)
        self.pack()
        told = []

        def before():
            told.append(self.poll())
            self.client(self.storage).link(cluster.holder, note='newer')

        last, generation = self.late(before, lambda: None)
        [(first, begun)] = told
        self.assertEqual(generation, begun)
        self.assertEqual(generation, self.cache.generation)
        self.assertGreater(last, first)
        self.assertEqual(self.cache.head, last)
        self.assertFalse(self.cache.holds(u64(cluster.holder), last))

    def test_told_of_fewer(self):
        """An answer that comes when there was another sweep: it is of a time when that had removed nothing."""
        clusters = self.clusters(1)
        self.pack()
        before = self.cache.generation

        def after():
            clusters.extend(self.clusters(1))
            self.pack()
            self.poll()

        _, generation = self.late(lambda: None, after)
        self.assertEqual(generation, before)
        self.assertNotEqual(generation, self.cache.generation)
        self.assertGreaterEqual(generation, self.database.epochs.first, 'it is no reason for a view to fail')

    def test_told_of_an_epoch_that_is_over(self):
        self.clusters(1)
        self.pack()
        swept = self.database.adapter.sweeps.swept

        def crash(*arguments):
            answer = swept(*arguments)
            self.run_sql('DELETE FROM relstore_epoch')
            with patch.object(self.database.adapter.sweeps, 'swept', swept):
                self.poll()
            return answer

        with patch.object(self.database.adapter.sweeps, 'swept', crash):
            _, generation = self.poll()
        self.assertLess(generation, self.database.epochs.first)

    def test_a_child_that_was_forked_before(self):
        [cluster] = self.clusters(1)
        reader = self.client()
        reader.load(cluster.one)
        reader.view.release()
        self.pack()
        number, _ = self.storage.database.pool.attempt(self.packing.sweeps.state)

        def work():
            child = Client(self.site)
            self.assertEqual(self.database.epochs.sweeps_of(self.cache.generation), number)
            with self.assertRaises(POSKeyError):
                child.load(cluster.one)

        in_child(self, work)


cases(globals(), Readers, backends=BACKENDS)
del Readers
