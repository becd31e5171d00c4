"""Packs beside others and beside what takes long, and what a pack refuses or leaves."""
import doctest
import io
import re
import shutil
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest import TestCase
from unittest.mock import patch

import transaction
import ZODB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, ReadOnlyError, StorageError, UndoError
from ZODB.tests import PackableStorage
from ZODB.utils import p64, u64, z64

from relstore.adapters.sweeps import Sweeps
from relstore.errors import ConfigurationError, Unavailable
from relstore.packing import pack, sweep
from relstore.packing.packs import Packs
from relstore.tests.support.backends import (
    Psycopg2PooledHistoryPreserving,
    Psycopg3PooledHistoryFree,
    SQLiteBackend,
    cases,
)
from relstore.tests.support.commits import transaction_of
from relstore.tests.support.objects import Client
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.packing import BACKENDS, REFUSED, Suite, before, late, timestamp
from relstore.tests.support.records import record


class Together(Suite):
    """Two packs, and a pack beside what takes long."""

    def test_two_packs(self):
        [cluster] = self.clusters(1)
        told = []

        def pack_too():
            with self.assertRaisesRegex(
                    Unavailable, r'packed by ((the process|the server process|connection) \d+|another session)'):
                self.site.pack(None)
            told.append(self.site.pack(None, dry_run=True))

        for step in 'new_pack', 'sweep':
            self.clusters(1)
            with before(self.packing, step, pack_too):
                self.pack()
        self.assertEqual(len(told), 2)
        self.assertFalse(self.exists(cluster.one))
        self.site.pack(None)

    def test_another_node_packs_meanwhile(self):
        """The lock is one server's, of a cluster of them: whoever comes second removes nothing."""
        cluster, control = self.clusters(2)
        other = self.opened()

        def pack_there():
            other.pack(None)
            client = self.client(other)
            client.link(cluster.holder, note='is not asked for its opinion')

        nobody = patch.object(type(self.site.database.adapter.pack_lock), 'take', lambda lock, session: None)
        with nobody, before(self.packing, 'lock_votes', pack_there), \
                self.assertRaisesRegex(Unavailable, 'packed by somebody else'):
            self.pack()
        self.assertFalse(self.exists(control.one))
        self.pack()
        self.assertEqual(self.pack(dry_run=True).objects, 0)

    def test_another_node_writes_its_list_meanwhile(self):
        """It lets the list alone by which votes are refused, though it is of no pack that it knows."""
        [cluster] = self.clusters(1)
        other, client = self.opened(), self.client()
        looked, go_on = threading.Event(), threading.Event()

        def wait():
            looked.set()
            go_on.wait(60)

        def pack_there():
            with before(other.database.adapter, 'new_pack', wait), \
                    self.assertRaisesRegex(Unavailable, 'packed by somebody else'):
                other.pack(None)
            done.append(True)

        def link():
            go_on.set()
            thread.join()
            with self.assertRaises(ConflictError):
                client.begin().link(cluster.holder, cluster.one)

        done, thread = [], threading.Thread(target=pack_there)
        with patch.object(type(self.site.database.adapter.pack_lock), 'take', lambda lock, session: None), \
                before(self.packing, 'garbage_end', link, nth=1):
            thread.start()
            looked.wait(60)
            self.pack()
        self.assertTrue(done)
        self.ends()

    def test_another_node_ends_an_earlier_sweep(self):
        """It took that for an interrupted one, and went on with it. What was begun since is not over."""
        self.clusters(1)
        client = self.client()
        with before(self.packing, 'end_sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        session = self.packing.connect()
        self.addCleanup(session.close)
        packs = Packs(self.packing, session)
        earlier = packs.last()
        self.pack(skip_prepack=True)
        [cluster] = self.clusters(1)
        client.begin()

        def end():
            self.packing.lock_votes(session, 3)
            with self.assertRaisesRegex(Unavailable, 'ended by somebody else'):
                packs.end_sweep(earlier)
            session.rollback()
            with self.assertRaises(ConflictError):
                client.begin().link(cluster.holder, cluster.one)

        with before(self.packing, 'garbage_end', end, nth=1):
            self.pack()
        self.assertFalse(self.exists(cluster.one))
        self.ends()

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def test_not_the_same_database_any_more(self):
        """What was prepared is of one that may have lost commits since, or gained others."""
        [cluster] = self.clusters(1)

        def restore():
            self.run_sql('DELETE FROM relstore_epoch')
            self.client()

        with before(self.packing, 'lock_votes', restore), \
                self.assertRaisesRegex(Unavailable, 'restored or emptied meanwhile; nothing was removed'):
            self.pack()
        self.assertTrue(self.exists(cluster.one))
        self.pack()
        self.assertFalse(self.exists(cluster.one))
        self.ends()

    def test_undo_during_a_sweep(self):
        """What is not packed can be undone at any time, what is packed at none."""
        if not self.keep_history:
            self.skipTest('needs history')
        cluster, packed, control = self.clusters(3)
        client = self.client()
        for it in cluster, packed:
            client.begin().link(it.holder, it.one)
        tids = [client.begin().link(packed.holder), client.begin().link(cluster.holder)]
        pack_time = (timestamp(tids[0]) + timestamp(tids[1])) / 2
        early = self.site.new_instance()
        txn = TransactionMetaData()
        early.tpc_begin(txn)
        early.undo(tids[0], txn)        # not packed yet
        undone = []

        def undo():
            view = self.site.new_instance()
            for tid in tids:
                with transaction_of(view) as other:
                    try:
                        view.undo(tid, other)
                    except UndoError:
                        self.assertEqual(tid, tids[0])
                    else:
                        undone.append(tid)
            view.release()

        with before(self.packing, 'sweep', undo):
            self.pack(pack_time=pack_time)
        self.assertEqual(undone, tids[1:])
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        with self.assertRaises(ConflictError):
            early.tpc_vote(txn)
        early.release()
        self.ends()
        self.assertFalse(self.exists(control.one))

    def test_garbage_is_changed_during_a_sweep(self):
        """It would stay, and could be linked, when what it refers to is gone."""
        [cluster] = self.clusters(1)

        def change():
            with self.assertRaises(ConflictError):
                self.client().link(cluster.one, cluster.two, note='changed')

        with before(self.packing, 'sweep', change):
            self.pack()
        self.assertFalse(self.exists(cluster.one) or self.exists(cluster.two))
        self.ends()

    def test_garbage_that_refers_to_itself_is_changed_during_a_sweep(self):
        """A reference that it has already is no reason to let it be changed."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.finish(client.vote((cluster.one, record(cluster.one, cluster.two)), (cluster.two, record(cluster.one))))
        client.begin().link(cluster.holder, note='the newest')

        def change():
            for changes in ([(cluster.one, record(cluster.one))],
                            [(cluster.one, record(cluster.two)), (cluster.two, record(cluster.one))]):
                with self.assertRaisesRegex(ConflictError, 'is removed by a pack'):
                    self.client().vote(*changes)

        with before(self.packing, 'sweep', change):
            self.pack()
        self.assertFalse(self.exists(cluster.one) or self.exists(cluster.two))
        self.ends()

    def test_large_transactions(self):
        """That are sent ahead of their vote, from before the sweep, and during it."""
        clusters = self.clusters(4)
        before_all, during, after, control = clusters
        client, early = self.client(), self.client()
        kept = []

        def commit(cluster, by):
            def act():
                large = [(self.site.new_oid(), record(note='x' * 5000)) for _ in range(40)]
                try:
                    by.finish(by.vote((cluster.holder, record(cluster.one, *(oid for oid, _ in large))), *large))
                except ConflictError:
                    return
                kept.append(cluster)
            return act

        def fresh():
            client.begin()
            commit(during, client)()

        with patch.object(type(self.site.database.adapter), 'message_size', 50_000):
            with before(self.packing, 'lock_votes', commit(before_all, self.client())), \
                    before(self.packing, 'sweep', fresh), before(self.packing, 'end_sweep', lambda: None):
                self.pack()
            commit(after, early)()
        self.assertEqual(kept, [before_all])
        self.assertLessEqual({before_all.one, before_all.two}, self.ends())
        self.assertFalse(self.exists(control.one))

    def test_nobody_packs_while_something_is_copied(self):
        """What is garbage then a later transaction of the source may link."""
        self.clusters(1)
        source = self.opened('source')
        source.copyTransactionsFrom(self.site)
        client = Client(source)
        client.link(z64, note='later')
        client.view.release()
        refused = []

        def meanwhile(tid, records, size):
            with self.assertRaisesRegex(Unavailable, 'is being packed by'):
                self.pack()
            refused.append(tid)

        if not self.keep_history:       # what was changed since is no beginning of the source
            self.site.zap_all()
        self.site.copyTransactionsFrom(source, meanwhile)
        self.assertTrue(refused)

        def while_packing():
            with self.assertRaisesRegex(Unavailable, 'copy into it afterwards'):
                self.site.copyTransactionsFrom(source)

        with before(self.packing, 'lock_votes', while_packing):
            self.pack()

    def test_emptied_or_opened_to_relstorage_while_it_is_packed(self):
        """Neither, in any phase."""
        adapter = self.site.database.adapter

        def act():
            with self.assertRaisesRegex(Unavailable, r'is being packed by .*(\d|session).*; empty it afterwards\.'):
                self.site.zap_all()
            with self.assertRaisesRegex(Unavailable, r'is being packed by .*(\d|session).*; say so afterwards\.'):
                adapter.writers.set('any')
            adapter.writers.set('relstore')

        for step in 'add_garbage', 'sweep':
            [cluster] = self.clusters(1)
            with before(self.packing, step, act):
                self.pack()
            self.assertFalse(self.exists(cluster.one))
        adapter.writers.set('any')
        self.assertEqual(adapter.writers.who(), 'any')
        adapter.writers.set('relstore')
        self.site.zap_all()
        self.assertFalse(self.exists(z64))

    def test_copied_into_while_it_is_packed(self):
        """restore(): with its own tid, above all there are; it keeps what it links, or is refused."""
        first, second, control = self.clusters(3)
        view = self.site.new_instance()
        told = []

        def restore(cluster):
            def act():
                tid = p64(u64(self.site.lastTransaction()) + 1)
                with suppress(ConflictError), transaction_of(view, tid) as txn:
                    view.restore(cluster.holder, tid, record(cluster.one), '', None, txn)
                    told.append(cluster)
            return act

        with before(self.packing, 'lock_votes', restore(first)), before(self.packing, 'sweep', restore(second)):
            self.pack()
        view.release()
        self.assertIn(first, told)
        self.assertLessEqual({first.one, first.two}, self.ends())
        self.assertFalse(self.exists(control.one))

    def test_views_across_sweeps(self):
        """Opened at different times, used after several sweeps; in this process and in another."""
        rounds, clients = [], []
        for _ in range(3):
            clusters = self.clusters(8)
            rounds.append(clusters)
            for storage in self.storage, self.site:
                client = self.client(storage)
                for cluster in clusters:
                    client.load(cluster.one)
                clients.append((client, clusters))
            self.pack()
        for number, (client, clusters) in enumerate(clients):
            for begin in False, True:
                if begin:
                    client.begin()
                cluster = clusters[2 * (number % 2) + begin]
                with self.assertRaises(StorageError if begin else ConflictError):
                    client.link(z64, *(c.holder for c in rounds[-1]), cluster.one)
        self.ends()

    def test_epoch_changes_meanwhile(self):
        """As after a crash of the server, or a failover: views of before store nothing; those of afterwards know."""
        [cluster] = self.clusters(1)
        old = self.client()
        old.load(cluster.one)

        def crash():
            self.run_sql('DELETE FROM relstore_epoch')

        with before(self.packing, 'sweep', crash):
            self.pack()
        for begin in False, True:
            with self.assertRaises(REFUSED):
                if begin:
                    old.begin()
                old.link(cluster.holder, cluster.one)
        self.ends()


class Limits(Suite):
    """What is refused, and what always stays."""

    def test_empty_database(self):
        for options in {'dry_run': True}, {'prepack_only': True}, {'skip_prepack': True}, {}:
            self.assertEqual(self.pack(**options).objects, 0)
        self.clusters(1)
        self.ends()

    def test_no_root(self):
        """All would be garbage. Old revisions can go."""
        for oid in p64(2), p64(50):     # oids are dense, and then they are not
            with transaction_of(self.site) as txn:
                self.site.store(oid, z64, record(), '', txn)
            with self.assertRaisesRegex(ConfigurationError, 'no root object'):
                self.pack()
            self.opened(pack_gc=False).pack(None)
            self.assertTrue(self.exists(oid))

    def test_newest_transaction_stays(self):
        """And without history the row with the highest tid: the next tid is to be larger than any before."""
        cluster, other = self.clusters(2)
        client = self.client()
        last = client.link(cluster.one, cluster.two, note='garbage, and the newest')
        for _ in range(2):
            self.pack()
            self.assertEqual(self.site.lastTransaction(), last)
            with closing(self.open_storage()) as fresh:
                self.assertEqual(fresh.lastTransaction(), last)
        if not self.keep_history:
            self.assertTrue(self.exists(cluster.one) and self.exists(cluster.two))
        self.assertGreater(client.begin().link(cluster.holder), last)
        with transaction_of(self.site) as txn:
            self.site.deleteObject(other.holder, self.site.getTid(other.holder), txn)
        last = self.site.lastTransaction()
        for collects in True, False:
            self.opened(pack_gc=collects).pack(None)
            self.assertEqual(self.site.lastTransaction(), last)
        client.begin().link(cluster.holder, note='newer')
        self.pack()
        self.assertFalse(self.exists(cluster.one) or self.exists(cluster.two))

    def test_deletions_without_garbage_collection(self):
        """What an external collector has deleted goes, and nothing else."""
        deleted, garbage = self.clusters(2)
        old = self.opened(pack_gc=False)
        old.pack(None)
        self.assertTrue(self.exists(deleted.one) and self.exists(garbage.one))
        with transaction_of(self.site) as txn:
            self.site.deleteObject(deleted.one, self.site.getTid(deleted.one), txn)
        self.client().link(deleted.holder, note='newer')
        self.assertTrue(self.exists(deleted.one))
        old.pack(None)
        self.assertFalse(self.exists(deleted.one))
        for oid in deleted.two, garbage.one, garbage.two:
            self.assertTrue(self.exists(oid))
        self.ends()

    def test_external_collector(self):
        """ZODB's own doctest; without history, but for the examples of older revisions, which are not there.

        It looks whether a blob can be loaded that is gone, and a cache may have it: so the blobs are in a directory.
        """
        directory = tempfile.mkdtemp(prefix='relstore-blobs-')
        self.addCleanup(shutil.rmtree, directory)
        options = {'pack_gc': False, 'blob_dir': directory, 'shared_blob_dir': True}
        path = Path(PackableStorage.__file__).parent / 'IExternalGC.test'
        text = path.read_text()
        if not self.keep_history:
            text = re.sub(r'    >>> storage.loadBefore(.*\n)+?\n', '', text)
        globs = {'create_storage': lambda: self.opened('external', **options), 'ZODB': ZODB}
        test = doctest.DocTestParser().get_doctest(text, globs, 'IExternalGC', str(path), 0)
        found = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
        self.assertEqual(runner.run(test, out=found.write).failed, 0, found.getvalue())
        transaction.abort()

    def test_read_only(self):
        [cluster] = self.clusters(1)
        reader = self.opened(read_only=True)
        report = reader.pack(None, dry_run=True)
        self.assertGreaterEqual(report.objects, 2)
        self.assertIn(u64(cluster.one), report.listed[0])
        for options in {}, {'prepack_only': True}, {'skip_prepack': True}:
            with self.assertRaises(ReadOnlyError):
                reader.pack(None, **options)
        self.assertTrue(self.exists(cluster.one))

    def test_dry_run_leaves_nothing(self):
        self.clusters(1)
        self.run_sql('UPDATE object_state SET refs = NULL')
        tables = 'relstore_pack', 'relstore_garbage', 'relstore_refs', 'relstore_sweep', 'relstore_meta', 'object_state'
        counts = [self.count(table) for table in tables]
        report = self.pack(dry_run=True)
        self.assertEqual([self.count(table) for table in tables], counts)
        self.assertEqual(report.objects, self.pack().objects)

    def count(self, table: str) -> int:
        return self.site.database.pool.attempt(lambda session: session.one(f'SELECT count(*) FROM {table}'))[0]

    def test_beside_relstorage(self):
        """Where it may write, a pack to the present is refused, however it comes about; one to yesterday works."""
        if isinstance(self, SQLiteBackend):
            self.skipTest('RelStorage and relstore never use one directory at once')
        self.clusters(1)
        self.pack(prepack_only=True)
        self.say_who_writes('any')
        try:
            for options in {}, {'prepack_only': True}, {'skip_prepack': True}:
                with self.subTest(options), patch.object(pack, 'PRESENT_SECONDS', 0), \
                        self.assertRaisesRegex(ConfigurationError, 'RelStorage .* may write'):
                    self.pack(**options)        # what was prepared as of the present is that of long ago by now
            with late(self.packing, 'lock_pack'), \
                    self.assertRaisesRegex(ConfigurationError, 'RelStorage .* may write'):
                self.pack(pack_time=time.time())
            self.pack(pack_time=time.time() - 86400)
            self.opened(pack_gc=False).pack(None)
            cluster, other = self.clusters(2)
            client = self.client()
            with patch.object(pack, 'PRESENT_SECONDS', 0), patch.object(sweep, 'ROWS', 1):
                self.pack(pack_time=time.time() - 1e-4, prepack_only=True)

                def link():     # as RelStorage does, who looks at nothing
                    with patch.object(Sweeps, 'going', lambda *arguments: []):
                        client.begin().link(other.holder, note='more than is read at a time')
                        client.begin().link(cluster.holder, cluster.one)

                with before(self.packing, 'last_tid', link):        # before the first step
                    self.pack(skip_prepack=True)
            self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        finally:
            self.say_who_writes('relstore')

    def say_who_writes(self, who: str) -> None:
        set_meta = self.site.database.adapter.sql.set_meta
        self.site.database.pool.attempt(lambda session: session.run(set_meta, ('writers', who)))

    def test_transactions_that_are_named(self):
        """Where RelStorage's foreign key is, no kept revision names one that was removed: its own pack would fail."""
        if not self.keep_history:
            self.skipTest('RelStorage has that key where history is kept')
        with self._key():
            [cluster] = self.clusters(1)
            client = self.client()
            tids = [client.begin().link(cluster.holder, note=note) for note in range(4)]
            client.begin()
            both = client.finish(client.vote((cluster.holder, record()), (cluster.one, record(cluster.two))))
            client.begin().link(cluster.holder, cluster.one)
            self.pack()
            stays = {tid for tid, in self._rows('SELECT tid FROM transaction')}
            self.assertEqual(stays & set(map(u64, tids)), set())
            self.assertIn(u64(both), stays)     # which the other object has its state of
            self.assertEqual(self._rows(
                'SELECT s.zoid FROM object_state s LEFT JOIN object_state r ON r.zoid = s.zoid AND r.tid = s.prev_tid '
                'WHERE s.prev_tid <> 0 AND r.zoid IS NULL'), [])
            last = client.begin().link(cluster.holder)
            self.assertEqual([(tid > 0) for tid, in self._rows(
                f'SELECT prev_tid FROM object_state WHERE tid = {u64(last)}')], [True])
            self.pack()
            self.ends()

    @contextmanager
    def _key(self):
        if 'Psycopg' not in type(self).__name__:
            with patch.object(self.packing.sql, 'has_foreign_key', 'SELECT 1'):
                yield
            return
        self.run_sql('ALTER TABLE object_state ADD CONSTRAINT by_relstorage '
                     'FOREIGN KEY (prev_tid) REFERENCES transaction')
        try:
            yield
        finally:
            self.run_sql('ALTER TABLE object_state DROP CONSTRAINT by_relstorage')

    def _rows(self, sql):
        if self.packing.name == 'sqlite':
            sql = sql.replace('FROM transaction', 'FROM "transaction"')
        return self.site.database.pool.attempt(lambda session: session.all(sql))


class Pooled(TestCase):

    def test_refused(self):
        """The lock of packs belongs to a session, and that to the pooler."""
        storage = self.open_storage()
        self.addCleanup(storage.close)
        with self.assertRaisesRegex(ConfigurationError, 'a dsn that leads to the server itself'):
            storage.pack(None)
        storage.pack(None, dry_run=True)


cases(globals(), Together, Limits, backends=BACKENDS + ORACLE)
cases(globals(), Pooled, backends=(Psycopg2PooledHistoryPreserving, Psycopg3PooledHistoryFree))
del Together, Limits, Pooled
