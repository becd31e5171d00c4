"""The saved cache of sites: restored, packed, emptied, crashed."""
import gc
import logging
import shutil
import tempfile
import threading
import unittest
import weakref
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64, z64

import relstore
from relstore.caching.warmstart import WarmStart
from relstore.tests.support import sent
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.children import in_child
from relstore.tests.support.commits import commit
from relstore.tests.support.layers import Processes
from relstore.tests.support.records import state
from relstore.tests.support.servers import PostgreSQLServer, require_postgresql


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-warm-'))
        self.addCleanup(shutil.rmtree, self.directory)
        self.other = self.open_storage()        # a process without a file
        self.addCleanup(self.other.close)
        self.oids = [self.other.new_oid() for _ in range(100)]
        commit(self.other, *((oid, z64, state(u64(oid))) for oid in self.oids))
        self.sent = 0

        def count(text, arguments):
            self.sent += any(isinstance(argument, str) for argument in arguments)

        counting = ExitStack()
        self.addCleanup(counting.close)
        counting.enter_context(sent.told(count))

    def site(self, wait=True, **options):
        storage = self.open_storage(cache_local_dir=str(self.directory), **options)
        self.addCleanup(storage.close)
        if wait:
            self.assertTrue(storage.database.warm.filled.wait(20))
        return storage

    def view(self, storage):
        view = storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        return view

    def read(self, view, oids=None) -> int:
        """Load all objects, each as the database has it; return how many statements that took."""
        oids = self.oids if oids is None else oids
        truth = {oid: self.loaded(self.other, oid) for oid in oids}
        before = self.sent
        for oid in oids:
            self.assertEqual(self.loaded(view, oid), truth[oid])
        sent = self.sent - before
        view.afterCompletion()
        return sent

    def loaded(self, storage, oid):
        try:
            return storage.load(oid)
        except POSKeyError:
            return None

    def run_site(self):
        """Read everything, and end; so the file is there."""
        storage = self.site()
        view = self.view(storage)
        self.assertGreater(self.read(view), 0)
        view.release()
        storage.close()
        self.assertEqual(len(list(self.directory.iterdir())), 1)


class Sites(Suite):

    def test_the_next_process_loads_nothing(self):
        self.run_site()
        storage = self.site()
        self.assertEqual(self.read(self.view(storage)), 0)
        self.assertEqual(storage.database.cache.stats()['hits'], 100)

    def test_changes_while_no_process_ran(self):
        self.run_site()
        changed, deleted, new = self.oids[7], self.oids[8], self.other.new_oid()
        commit(self.other, (changed, self.other.getTid(changed), state(7777)), (new, z64, state(8888)))
        tid = self.other.getTid(deleted)
        commit(self.other, work=lambda txn: self.other.deleteObject(deleted, tid, txn))
        view = self.view(self.site())
        rest = [oid for oid in self.oids if oid not in (changed, deleted)]
        self.assertEqual(self.read(view, rest), 0)
        view.poll_invalidations()
        self.assertGreaterEqual(self.read(view, [changed, new]), 2)
        view.poll_invalidations()
        self.assertIsNone(self.loaded(view, deleted))

    def test_changes_while_it_is_read(self):
        """A view stands before them, the file is read, others follow: each sees what it has to."""
        self.run_site()
        first, second = self.oids[:2]
        with mock.patch.object(WarmStart, '_run', lambda warm, generation: warm.filled.set()):
            storage = self.site()
        early = self.view(storage)
        seen = self.loaded(self.other, first)
        commit(self.other, (first, self.other.getTid(first), state(7777)))
        between = self.view(storage)
        storage.database.warm.fill(storage.database.cache.generation)
        commit(self.other, (second, self.other.getTid(second), state(8888)))
        late = self.view(storage)
        if self.keep_history:
            self.assertEqual(self.loaded(early, first), seen)
        self.assertEqual(self.loaded(between, first), self.loaded(self.other, first))
        self.assertNotEqual(self.loaded(between, second), self.loaded(self.other, second))
        self.assertEqual(self.read(late, self.oids[2:]), 0)
        late.poll_invalidations()
        self.assertEqual(self.read(late, [first, second]), 1)   # `between` has loaded the first

    def test_too_many_changes(self):
        self.run_site()
        for oid in self.oids[:5]:
            commit(self.other, (oid, self.other.getTid(oid), state(7777)))
        with mock.patch.object(WarmStart, '_run', lambda warm, generation: warm.filled.set()):
            storage = self.site(poll_limit=3)
        view = self.view(storage)
        storage.database.warm.fill(storage.database.cache.generation)
        self.assertEqual(storage.database.cache.stats()['objects'], 0)
        self.assertGreater(self.read(view), 0)
        self.assertGreater(self.read(self.view(self.site(poll_limit=3))), 0)

    def test_opening_costs_no_statement_more(self):
        def cost(**options):
            before = self.sent
            storage = self.open_storage(**options)
            sent = self.sent - before
            storage.close()
            return sent

        self.run_site()
        self.assertEqual(cost(cache_local_dir=str(self.directory)), cost())

    def test_emptied_while_it_runs(self):
        storage = self.site()
        self.read(self.view(storage))
        storage.database.warm.save()
        [path] = self.directory.iterdir()
        self.other.zap_all()
        commit(self.other, (self.oids[0], z64, state(1)))
        view = self.view(storage)
        self.assertFalse(path.exists())
        self.read(view, self.oids[:3])

    def test_a_storage_that_is_dropped_goes(self):
        """Nobody has closed it, and its thread does not keep it."""
        storage = self.open_storage(cache_local_dir=str(self.directory))
        database, thread = weakref.ref(storage.database), storage.database.warm._thread
        storage.database.pool.close()
        del storage
        gc.collect()
        self.assertIsNone(database())
        thread.join(20)
        self.assertFalse(thread.is_alive())

    def test_a_child_begins_with_the_file(self):
        self.run_site()
        storage = self.site()
        before = self.view(storage)
        commit(self.other, (self.other.new_oid(), z64, state(1)))
        before.poll_invalidations()
        [path] = self.directory.iterdir()

        def work():
            warm = storage.database.warm
            self.assertEqual([thread.name for thread in threading.enumerate()], ['MainThread'], 'not used yet')
            view = self.view(storage)
            self.assertTrue(warm.filled.wait(20))
            self.assertEqual(self.read(view), 0)
            before.poll_invalidations()
            self.assertEqual(self.read(before), 0)
            new = storage.new_oid()
            commit(storage, (new, z64, state(1)))
            path.unlink()
            storage.close()
            self.assertFalse(warm._stop is parents or parents.is_set())
            self.assertTrue(path.exists())

        parents = storage.database.warm._stop
        in_child(self, work)
        before.poll_invalidations()
        self.assertEqual(self.read(before), 0)


class Rest(Suite):
    """What is the same on every database."""

    def test_emptied(self):
        self.run_site()
        self.other.zap_all()
        commit(self.other, (self.oids[0], z64, state(1)))
        self.read(self.view(self.site()), self.oids[:3])

    def test_no_cache_no_file(self):
        storage = self.open_storage(cache_local_dir=str(self.directory), cache_local_mb=0)
        self.view(storage).load(self.oids[0])
        storage.close()
        self.assertIsNone(storage.database.warm)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_one_file_for_each_database(self):
        self.run_site()
        second = self.open_storage('second', cache_local_dir=str(self.directory))
        self.addCleanup(second.close)
        oid = second.new_oid()
        commit(second, (oid, z64, state(1)))
        self.view(second).load(oid)
        second.close()
        self.assertEqual(len(list(self.directory.iterdir())), 2)
        self.assertEqual(self.read(self.view(self.site())), 0)

    def test_a_child_of_a_closed_one(self):
        self.run_site()
        storage = self.site()
        storage.close()
        in_child(self, lambda: self.assertIsNone(storage.database.warm._thread))

    def test_size_bound(self):
        storage = self.site(cache_local_dir_write_max_size=0)
        self.read(self.view(storage))
        storage.close()
        [path] = self.directory.iterdir()
        self.assertLess(path.stat().st_size, 200)


class Crash(unittest.TestCase):
    """Commits that were visible are lost; their tids, and more, are given anew."""
    layer = Processes

    def test_postgresql(self):
        require_postgresql(self)
        directory = Path(tempfile.mkdtemp(prefix='relstore-warm-'))
        self.addCleanup(shutil.rmtree, directory)
        server = PostgreSQLServer(durable=True)
        self.addCleanup(server.stop)
        server.start()
        dsn = server.create_database('crash')

        def opened():
            storage = relstore.RelStore(relstore.PostgreSQL(dsn), cache_local_dir=str(directory))
            self.addCleanup(storage.close)
            self.assertTrue(storage.database.warm.filled.wait(20))
            view = storage.new_instance()
            self.addCleanup(view.release)
            view.poll_invalidations()
            return storage, view

        storage, view = opened()
        oid = p64(1000)
        commit(storage, (oid, z64, state(1)))
        view.poll_invalidations()
        view.load(oid)
        storage.close()
        self.assertEqual(opened()[0].database.cache.stats()['objects'], 1)
        server.kill()
        server.start()
        with self.assertLogs('relstore', logging.INFO) as logs:
            storage, view = opened()
        self.assertIn('crashed', logs.output[0])
        self.assertEqual(storage.database.cache.stats()['objects'], 0)
        self.assertEqual(view.load(oid)[0], state(1))


cases(globals(), Rest, backends=(SQLiteHistoryPreserving,))
cases(globals(), Sites, backends=(
    SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving, Psycopg2HistoryFree,
    MySQLdbHistoryPreserving, MySQLdbHistoryFree))
del Suite, Sites, Rest
