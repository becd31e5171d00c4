"""Links to what a pack, or a collector outside, removes or has removed: they keep it, or are refused."""
import shutil
import tempfile
import time
from contextlib import closing, suppress
from unittest.mock import patch

from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, POSKeyError, StorageError
from ZODB.utils import z64

from relstore import marks
from relstore.packing import links, pack
from relstore.tests.support import sent
from relstore.tests.support.backends import THOROUGH, SQLiteBackend, cases
from relstore.tests.support.commits import transaction_of
from relstore.tests.support.objects import Client, linked
from relstore.tests.support.packing import BACKENDS, REFUSED, Cluster, Suite, before, calls
from relstore.tests.support.records import record
from relstore.tests.support.servers import MemcachedServer, memcached_program


class Relinked(Suite):
    """Without history: what was garbage, was linked and used, and is garbage again, is that since now."""

    def setUp(self):
        super().setUp()
        present = patch.object(pack, 'PRESENT_SECONDS', 0)
        present.start()
        self.addCleanup(present.stop)

    def marked(self, count: int) -> list[Cluster]:
        """Return garbage that an earlier pack has found."""
        clusters = self.clusters(count)
        self.pack(pack_time=time.time() - 1000)
        return clusters

    def later(self, client: Client) -> float:
        """Commit something else, and return a time at which all that was marked is garbage for long enough."""
        client.begin().link(z64, *linked(client.load(z64)), note='the newest')
        return time.time() - 1e-4

    def relink(self, client: Client, cluster: Cluster) -> None:
        client.begin().link(cluster.holder, cluster.one)
        client.begin().link(cluster.holder)

    def test_between_two_packs(self):
        """By a connection from before, by another process, by the one that packs, and by one that keeps no list."""
        old = self.client()
        *clusters, changed, control = self.marked(6)
        clients = [old, self.client(), self.client(self.storage), self.client(self.opened())]
        with patch.object(marks, 'KEPT', 0):
            self.clusters(0)
            clients[-1].view.database.marks.forget()
        for client, cluster in zip(clients, clusters, strict=True):
            self.relink(client, cluster)
        old.begin().link(changed.one, changed.two, note='changed')
        old.begin()
        pack_time = self.later(old)
        self.pack(pack_time=pack_time, dry_run=True)
        self.pack(pack_time=pack_time)
        for cluster in *clusters, changed:
            self.assertTrue(self.exists(cluster.one) and self.exists(cluster.two))
        self.assertFalse(self.exists(control.one) or self.exists(control.two))
        self.pack(pack_time=self.later(old))
        for cluster in *clusters, changed:
            self.assertFalse(self.exists(cluster.one) or self.exists(cluster.two))

    def test_by_one_who_has_not_polled_since(self):
        """The list that its process knows is that of an earlier pack."""
        old = self.client()
        cluster, control = self.clusters(2)
        old.begin()
        self.pack(pack_time=time.time() - 1000)
        old.link(cluster.holder, cluster.one)
        self.client(self.storage).link(cluster.holder)
        self.pack(pack_time=self.later(self.client()))
        self.assertTrue(self.exists(cluster.one))
        self.assertFalse(self.exists(control.one))

    def test_by_one_that_was_aborted_before(self):
        client = self.client()
        cluster, control = self.marked(2)
        client.view.tpc_abort(client.begin().vote((cluster.holder, record(cluster.one))))
        self.relink(client, cluster)
        self.pack(pack_time=self.later(client))
        self.assertTrue(self.exists(cluster.one))
        self.assertFalse(self.exists(control.one))

    def test_too_many_to_be_kept_in_mind(self):
        """Then each vote asks."""
        with patch.object(marks, 'KEPT', 3):
            cluster, control = self.marked(2)
            client = self.client()
            self.assertIsNone(self.site.database.marks.known.oids)
            with patch.object(marks, 'ASKED', 1):
                self.relink(client, cluster)
            self.pack(pack_time=self.later(client))
        self.assertTrue(self.exists(cluster.one) and self.exists(cluster.two))
        self.assertFalse(self.exists(control.one))

    def test_what_it_has_let_go(self):
        """Used again, it loses an object, which was garbage with it: that is garbage since now."""
        for moved in False, True:
            cluster, control = self.marked(2)
            first, second = self.client(), self.client(self.storage)
            first.link(cluster.holder, cluster.one)
            second.begin()
            if moved:
                second.finish(second.vote((cluster.one, record()), (cluster.holder, record(cluster.one, cluster.two))))
                second.begin()
            second.finish(second.vote((cluster.one, record()), (cluster.holder, record(cluster.one))))
            self.pack(pack_time=self.later(first))
            self.assertTrue(self.exists(cluster.two))
            self.assertFalse(self.exists(control.one) or self.exists(control.two))

    def test_at_each_step(self):
        """Of a pack that would remove it, and of one that has just found it."""
        self.marked(1)
        steps = []
        with calls(self.packing, lambda n, name: steps.append(name)):
            self.pack(pack_time=time.time() - 1e-4)
        kept = refused = 0
        for step in range(0, len(steps) + 2, 1 if THOROUGH or isinstance(self, SQLiteBackend) else 5):
            old, control = self.marked(2)
            [young] = self.clusters(1)
            client = self.client()
            pack_time, before_cut = self.later(client), []

            def act(n, name, step=step, old=old, young=young, client=client, before_cut=before_cut):
                if n == step:
                    client.begin().link(young.holder, young.one)
                    before_cut.append(time.time())
                    client.begin().link(young.holder)
                    with suppress(*REFUSED):
                        self.relink(client, old)
                        before_cut.append(0.0)

            with calls(self.packing, act):
                self.pack(pack_time=pack_time)
            with self.subTest(step):
                self.assertFalse(self.exists(control.one) or self.exists(control.two))
                if len(before_cut) == 2:
                    kept += 1
                    self.assertTrue(self.exists(old.one) and self.exists(old.two))
                elif before_cut:
                    refused += 1
                    self.assertFalse(self.exists(old.one) or self.exists(old.two))
                self.later(client)
                if before_cut:
                    self.pack(pack_time=before_cut[0])
                    self.assertTrue(self.exists(young.one) and self.exists(young.two))
            self.pack()
            client.view.release()
        self.assertGreater(kept, 1)
        self.assertGreater(refused, 0)

    def test_after_a_prepare(self):
        """Of what is only written down votes do not know, so it is no look; what they know counts until it is swept."""
        cluster, control = self.marked(2)
        [young] = self.clusters(1)
        client = self.client()
        self.pack(pack_time=self.later(client), prepack_only=True)
        self.relink(client, cluster)
        self.relink(client, young)
        pack_time = self.later(client)
        self.pack(skip_prepack=True)
        self.assertTrue(self.exists(cluster.one) and self.exists(cluster.two))
        self.assertFalse(self.exists(control.one))
        self.pack(pack_time=pack_time)
        self.assertTrue(self.exists(young.one))
        self.assertTrue(self.exists(cluster.one))
        self.pack(pack_time=self.later(client), prepack_only=True)
        self.pack(skip_prepack=True)
        self.assertFalse(self.exists(young.one) or self.exists(cluster.one))

    def test_commits_ask_nothing_more(self):
        """As long as they meet no mark; and one that was taken off is taken off once, where others change it again."""
        [cluster] = self.clusters(1)
        client, counts = self.client(), []

        def send(text, arguments):
            counts[-1] += 1

        def count(*changes):
            counts.append(0)
            client.begin()
            with sent.told(send):
                client.finish(client.vote(*changes))

        count((z64, record(cluster.holder)))
        self.pack(pack_time=time.time() - 1000)
        count((z64, record(cluster.holder)))
        for note in range(3):
            count((cluster.holder, record(cluster.one, note=note)))
        self.assertGreater(counts[2], counts[0])
        self.assertEqual([counts[1], *counts[3:]], 3 * [counts[0]])

    def test_epoch_changes(self):
        """What was taken off may be lost with it."""
        cluster, control = self.marked(2)
        client = self.client()
        self.relink(client, cluster)
        self.run_sql('DELETE FROM relstore_garbage WHERE pack_id < 0')
        self.run_sql('DELETE FROM relstore_epoch')
        client.begin()
        self.relink(client, cluster)
        self.pack(pack_time=self.later(client))
        self.assertTrue(self.exists(cluster.one))
        self.assertFalse(self.exists(control.one))


class Memory(Suite):
    """What a process remembers from before a sweep."""

    def test_object_that_the_application_held(self):
        """Unlinked, swept, and linked again by a connection that has held it: an error, not a link to nothing.

        Its process has learnt of the sweep meanwhile, and its view is a new one: no other will do.
        """
        for storage in self.storage, self.site:
            [cluster] = self.clusters(1)
            client = self.client(storage)
            client.load(cluster.one)
            self.pack()
            for number in range(2):         # the first commit may be what tells this process
                client.begin().link(cluster.holder, note=number)
            self.no_retry_helps(client.begin(), cluster.holder, cluster.one)
            self.ends()

    def test_no_cache_brings_it_back(self):
        """Neither that of a process, nor the file, nor memcached, whoever writes these before he knows of the sweep."""
        kinds = [{}, {'cache_local_dir': self.directory()}]
        if memcached_program():
            server = MemcachedServer()
            self.addCleanup(server.stop)
            server.start()
            kinds.append({'cache_servers': server.where})
        for options in kinds:
            for size in 1, 4:       # of the second what was removed is not told: it is too much
                clusters = self.clusters(size)
                storages = [self.open_storage(poll_limit=5, **options) for _ in range(3)]
                own, knows, late = clients = [Client(storage) for storage in storages]
                for client in clients:
                    for cluster in clusters:
                        client.load(cluster.one)
                storages[0].pack(None)
                knows.link(z64, *(cluster.holder for cluster in clusters), note='learns of it')
                for client, storage in zip(clients[:2], storages, strict=False):
                    self.missing(client.begin(), clusters)
                    client.view.release()
                    storage.close()
                self.missing_anew(clusters, options)
                late.begin()
                late.view.release()
                storages[2].close()     # it saves what it has: it knows of nothing
                self.missing_anew(clusters, options)

    def test_two_sweeps_that_nobody_has_noticed(self):
        """What both have removed is dropped from the cache."""
        clusters = self.clusters(1)
        client = self.client()
        client.load(clusters[0].one)
        for _ in range(2):
            self.client(self.storage).link(z64, clusters[0].holder, note='old revisions are made')
            self.pack()
        client.begin().link(clusters[0].holder, note='learns of both')
        self.missing(client.begin(), clusters)
        self.missing(self.client(), clusters)

    def directory(self) -> str:
        directory = tempfile.mkdtemp(prefix='relstore-pack-')
        self.addCleanup(shutil.rmtree, directory)
        return directory

    def missing_anew(self, clusters: list[Cluster], options: dict) -> None:
        with closing(self.open_storage(**options)) as storage:
            if storage.database.warm is not None:
                storage.database.warm.filled.wait()
            client = Client(storage)
            self.missing(client, clusters)
            client.view.release()

    def missing(self, client: Client, clusters: list[Cluster]) -> None:
        for cluster in clusters:
            client.load(cluster.holder)
            with self.assertRaises(POSKeyError):
                client.load(cluster.one)

    def test_what_was_spared_is_no_reason_to_forget_all(self):
        """Processes drop what a sweep has removed, and nothing else, also where some of it was taken off the list."""
        first, second = self.clusters(2)
        warm = self.client()
        warm.load(z64)
        client = self.client()
        with before(self.packing, 'lock_votes', lambda: client.link(first.holder, first.one)):
            self.pack()
        self.assertFalse(self.exists(second.one))
        client.begin().link(second.holder, note='here it learns of it')
        client.begin()
        number, _ = self.site.database.pool.attempt(self.site.database.adapter.sweeps.state)
        self.assertEqual([len(oids) for oids in self.site.database.epochs.swept(number - 1, number)], [2])

    def test_new_link_among_many_that_led_nowhere(self):
        """More than are told of at a time, and more than are asked for."""
        many = [self.site.new_oid() for _ in range(101)]
        [cluster] = self.clusters(1)        # of larger oids
        client, old = self.client(), self.client()
        client.finish(client.vote((cluster.holder, record(*many)), *((oid, record()) for oid in many)))
        with transaction_of(self.site) as txn:
            for oid in many:
                self.site.deleteObject(oid, self.site.getTid(oid), txn)
        client.begin().link(z64, cluster.holder, note='the newest')

        def link(n, name):
            refused(client)

        def refused(client):
            for together in links.LOOKED_UP, 30:
                client.view._refused.clear()
                with patch.object(links, 'LOOKED_UP', together), self.assertRaises((ConflictError, StorageError)):
                    client.begin().link(cluster.holder, *many, cluster.two)

        with calls(self.packing, link, ['sweep']):
            self.pack()
        with patch.object(links, 'LOOKED_UP', 30):
            old.begin().link(cluster.holder, *many, note='as ever')
        refused(old)

    def test_links_to_what_it_makes_itself(self):
        """Also to what a pack has removed, and that is made again; whether it is known what packs have removed or not.
        """
        [cluster] = self.clusters(1)
        client = self.client()
        self.pack()
        client.begin().finish(client.vote((cluster.holder, record(cluster.one)), (cluster.one, record(cluster.one))))
        number, _ = self.site.database.pool.attempt(self.site.database.adapter.sweeps.state)
        self.assertEqual([len(oids) for oids in self.site.database.epochs.swept(number - 1, number)], [2])
        self.sweeps_that_nobody_is_told_of()
        one, two = self.site.new_oid(), self.site.new_oid()
        client.begin().finish(client.vote(
            (cluster.holder, record(cluster.one, one)), (one, record(two)), (two, record(one, two))))
        self.assertLessEqual({cluster.one, one, two}, self.ends())

    def test_links_to_what_any_of_several_packs_has_removed(self):
        """By a connection that is older than all of them, whose process has learnt of each."""
        clusters = self.clusters(3)
        holders = [cluster.holder for cluster in clusters]
        client, news = self.client(), self.client()
        client.finish(client.vote(*((cluster.holder, record(cluster.one)) for cluster in clusters)))
        for cluster in clusters:
            news.begin().link(cluster.holder)
            news.begin().link(z64, *holders, note='the newest')
            self.pack()
            self.assertFalse(self.exists(cluster.one))
            news.begin()
        client.begin()
        number, _ = self.site.database.pool.attempt(self.site.database.adapter.sweeps.state)
        self.assertEqual([len(oids) for oids in self.site.database.epochs.swept(number - 3, number)], [2, 2, 2])
        for cluster in clusters:
            client.view._refused.clear()        # else all that is linked would be looked up
            with self.assertRaisesRegex(StorageError, 'is not there'):
                client.begin().link(cluster.holder, cluster.one)
        self.ends()

    def test_backup_that_was_restored(self):
        """Sweeps are counted anew from there."""
        for _ in range(2):
            self.clusters(1)
            self.pack()
        client = self.client()
        client.link(z64, note='learns of the sweeps')
        client.begin()
        for statement in ('UPDATE relstore_sweep SET number = 0', 'UPDATE relstore_pack SET number = 0',
                          'DELETE FROM relstore_epoch'):
            self.site.database.pool.attempt(lambda session, sql=statement: session.run(sql))
        client.begin()
        clusters = self.clusters(2)
        old = self.client()
        for cluster in clusters:
            old.load(cluster.one)
        for _ in range(2):
            with closing(self.open_storage()) as another:
                another.pack(None)
        with self.assertRaises(ConflictError):
            old.link(clusters[0].holder, clusters[0].one)
        self.ends()

    def test_reference_that_led_nowhere_before(self):
        """To a deleted object, say. Who refers to it can be changed as ever, during a sweep and after it."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.link(cluster.holder, cluster.one)
        txn = TransactionMetaData()
        client.begin().view.tpc_begin(txn)
        client.view.deleteObject(cluster.one, client.tid_of(cluster.one), txn)
        client.view.tpc_vote(txn)
        client.finish(txn)
        client.begin().link(z64, cluster.holder, note='the newest stays where there is no history')
        client.begin()
        old = self.client()
        changes = iter(range(99))

        def change(n, name):
            client.link(cluster.holder, cluster.one, note=next(changes))
            client.begin()

        with calls(self.packing, change, ['sweep']):
            self.pack()
        self.assertGreater(next(changes), 0)
        self.assertFalse(self.exists(cluster.one))
        client.begin().link(cluster.holder, cluster.one, note='then')
        old.begin().link(cluster.holder, cluster.one, note='and then')
        with self.assertRaises(StorageError):
            old.begin().link(z64, cluster.holder, cluster.one)

    def sweeps_that_nobody_is_told_of(self) -> None:
        """Two, so that processes do not know what they have removed."""
        with closing(self.open_storage()) as another:
            for _ in range(2):
                another.pack(None)

    def test_reference_that_leads_nowhere_moves(self):
        """From one object to another, as where a bucket splits: it did so before, and no retry could mend it."""
        [cluster] = self.clusters(1)
        client, new, missing = self.client(), self.site.new_oid(), self.site.new_oid()
        client.link(cluster.holder, missing)
        client.begin()
        self.sweeps_that_nobody_is_told_of()
        client.begin().finish(client.vote((cluster.holder, record(new)), (new, record(missing))))
        self.assertEqual(linked(client.begin().load(new)), [missing])
        with self.assertRaises(StorageError):       # it is looked at
            client.link(cluster.holder, missing)

    def no_retry_helps(self, client: Client, *changes: bytes) -> None:
        for _ in range(2):
            with self.assertRaisesRegex(StorageError, 'is not there: a pack has removed it, or it was') as caught:
                client.link(*changes)
            self.assertNotIsInstance(caught.exception, TransientError)
            client.begin()

    def a_retry_may_help(self, client: Client, *changes: bytes) -> None:
        """A younger view usually does not find it. Where one does, to try again is of no use, and it is said."""
        with self.assertRaisesRegex(ConflictError, 'is not there: a pack has removed it, or it was deleted'):
            client.link(*changes)
        self.no_retry_helps(client.begin(), *changes)

    def test_new_link_to_what_is_missing(self):
        """It was when the view was taken, whatever has happened since."""
        [cluster] = self.clusters(1)
        client, missing, other = self.client(), self.site.new_oid(), self.site.new_oid()
        self.sweeps_that_nobody_is_told_of()
        self.no_retry_helps(client.begin(), cluster.holder, missing)
        self.pack()
        self.client()       # of a sweep that has removed something else the process is told
        self.no_retry_helps(client, cluster.holder, other)
        with patch.object(links, 'REMEMBERED', 1):
            self.no_retry_helps(client, cluster.holder, self.site.new_oid())
        self.assertEqual(len(client.view._refused), 1)

    def test_new_link_to_what_was_removed(self):
        """Since the view; or before it, though not before the connection began."""
        first, second = self.clusters(2)
        client, old, oldest = self.client(), self.client(), self.client()
        self.pack()
        self.a_retry_may_help(client, first.holder, first.one)
        self.no_retry_helps(old.begin(), first.holder, first.one)
        self.sweeps_that_nobody_is_told_of()
        self.a_retry_may_help(oldest, second.holder, second.one)

    def test_new_link_to_what_was_removed_by_sweeps_that_are_known(self):
        cluster, *_ = self.clusters(1)
        client, old, newer = self.client(), self.client(), self.client()
        self.pack()
        newer.begin()
        self.a_retry_may_help(client, cluster.holder, cluster.one)
        old.begin()
        self.pack()
        newer.begin()
        self.no_retry_helps(old, cluster.holder, cluster.one)

    def test_new_link_to_what_was_taken_back(self):
        """Deleted by a collector, or its creation undone: since the view, or before it."""
        [cluster], oids = self.clusters(1), [self.site.new_oid() for _ in range(2)]
        client, old = self.client(), self.client()
        self.sweeps_that_nobody_is_told_of()
        for oid in oids:
            creator = self.client()
            tid = creator.finish(creator.vote((oid, record())))
            self.assertTrue(self.exists(oid))
            client.begin()
            if self.keep_history:
                with transaction_of(self.site) as txn:
                    self.site.undo(tid, txn)
            else:
                self.delete(oid)
            self.a_retry_may_help(client, cluster.holder, oid)
        self.client().link(z64, cluster.holder, note='the newest stays where there is no history')
        self.no_retry_helps(old.begin(), cluster.holder, oid)

    def test_new_link_to_what_relstorage_may_have_removed(self):
        """It leaves no trace of that."""
        [cluster] = self.clusters(1)
        client, missing = self.client(), self.site.new_oid()
        self.sweeps_that_nobody_is_told_of()
        self.site.database.adapter.writers.set('any')
        self.a_retry_may_help(client.begin(), cluster.holder, missing)

    def delete(self, oid: bytes) -> None:
        with transaction_of(self.site) as txn:
            self.site.deleteObject(oid, self.site.getTid(oid), txn)

    def test_many_references_that_lead_nowhere(self):
        """They are looked up together, and each record is read once, however many there are."""
        cluster, other = self.clusters(2)
        client, new, another = self.client(), self.site.new_oid(), self.site.new_oid()
        many = [self.site.new_oid() for _ in range(3000)]
        client.link(cluster.holder, *many)
        client.begin()
        self.sweeps_that_nobody_is_told_of()
        counts = []
        for changes in ([(other.holder, record(another)), (another, record())],
                        [(cluster.holder, record(new, *many[::2])), (new, record(*many[1::2]))]):
            messages = []
            client.begin()
            with sent.told(lambda text, arguments, messages=messages: messages.append(text)):
                began = time.monotonic()
                client.finish(client.vote(*changes))
                seconds = time.monotonic() - began
            counts.append(len(messages))
        self.assertLessEqual(counts[1] - counts[0], 3)
        self.assertLess(seconds, 5)


cases(globals(), Relinked, backends=[backend for backend in BACKENDS if not backend.keep_history])
cases(globals(), Memory, backends=BACKENDS)
del Relinked, Memory
