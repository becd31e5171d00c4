"""Deletions by a collector outside, and those who link meanwhile what it deletes."""
from unittest.mock import patch

from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, StorageError
from ZODB.utils import z64

from relstore.errors import LockTimeout
from relstore.tests.support import sent
from relstore.tests.support.backends import PostgreSQLBackend, ServerBackend, cases
from relstore.tests.support.packing import BACKENDS, Suite, before
from relstore.tests.support.records import record


class Deletions(Suite):
    """What a collector outside deletes, and others link."""

    def setUp(self):
        super().setUp()
        self.collector = self.client(self.opened(commit_lock_timeout=1))

    def delete(self, *oids: bytes) -> TransactionMetaData:
        """Vote."""
        txn, view = TransactionMetaData(), self.collector.view
        view.tpc_begin(txn)
        try:
            for oid in oids:
                view.deleteObject(oid, self.collector.tid_of(oid), txn)
            view.tpc_vote(txn)
        except BaseException:
            view.tpc_abort(txn)
            raise
        return txn

    def test_linked_after_it_was_deleted(self):
        [cluster] = self.clusters(1)
        client = self.client()
        client.load(cluster.one)
        self.collector.begin().finish(self.delete(cluster.one, cluster.two))
        with self.assertRaisesRegex(ConflictError, 'or it was deleted'):
            client.link(cluster.holder, cluster.one)
        with self.assertRaisesRegex(StorageError, 'or it was deleted'):     # whatever it sees by now
            client.begin().link(cluster.holder, cluster.one)
        client.begin().link(cluster.holder, note='as ever')
        self.ends()

    def test_linked_before_it_is_deleted(self):
        """The collector's view is older, whether that was committed or has only voted."""
        first, second = self.clusters(2)
        client = self.client(self.opened(commit_lock_timeout=1))
        self.collector.begin()
        client.link(first.holder, first.one)
        with self.assertRaisesRegex(ConflictError, 'was linked meanwhile'):
            self.delete(first.one)
        client.begin()
        self.collector.begin()
        voted = client.vote((second.holder, record(second.one)))
        with self.assertRaises(LockTimeout):
            self.delete(second.one)
        client.finish(voted)
        with self.assertRaisesRegex(ConflictError, 'was linked meanwhile'):
            self.delete(second.one)
        self.collector.begin().finish(self.delete(second.two))      # the collector's error; it was linked before
        self.assertTrue(self.exists(second.one))

    def test_linked_while_it_is_deleted(self):
        """Who votes later waits, and sees it."""
        [cluster] = self.clusters(1)
        client = self.client(self.opened(commit_lock_timeout=1))
        client.load(cluster.holder)
        self.collector.begin()
        voted = self.delete(cluster.one, cluster.two)
        with self.assertRaises(LockTimeout):
            client.link(cluster.holder, cluster.one)
        self.collector.finish(voted)
        with self.assertRaises(ConflictError):
            client.link(cluster.holder, cluster.one)
        self.ends()

    def test_given_up(self):
        """Then it is there, and can be linked."""
        [cluster] = self.clusters(1)
        client = self.client()
        self.collector.begin()
        voted = self.delete(cluster.one, cluster.two)
        self.collector.view.tpc_abort(voted)
        client.link(cluster.holder, cluster.one)
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())


class RelstoreAlone(Deletions):
    """Where relstore alone writes: what it sees there is all there is."""

    def test_held_since_before_it_was_deleted(self):
        """The view is younger, but an application may hold what it has loaded in an earlier one."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.load(cluster.one)
        self.collector.begin().finish(self.delete(cluster.one, cluster.two))
        with self.assertRaisesRegex(StorageError, 'or it was deleted'):
            client.begin().link(cluster.holder, cluster.one)
        client.begin().link(cluster.holder, note='as ever')
        self.ends()

    def test_who_is_asked_to_look(self):
        """Connections that began before something was deleted; not those that began before a pack."""
        first, second = self.clusters(2)
        old = self.client()

        def looks(client):
            client.begin()
            messages = []
            with sent.told(lambda text, arguments: messages.append(text)):
                client.finish(client.vote((z64, record(first.holder))))
            return len(messages) - usual

        usual = 0
        usual = looks(old)

        self.pack()
        self.assertEqual(looks(old), 0)
        self.collector.begin().finish(self.delete(first.one, first.two))
        self.assertEqual(looks(old), 1)
        self.assertEqual(looks(self.client()), 0)
        self.collector.begin().finish(self.delete(second.one))
        self.pack()
        self.assertEqual(looks(old), 1)
        self.assertEqual(looks(self.client()), 0)

    def test_deleted_during_a_sweep(self):
        """That knows nothing of it. By a view that is older, in a process that has learnt of the sweep."""
        [cluster] = self.clusters(1)
        client, other = self.client(), self.client()
        client.link(cluster.holder, cluster.one)
        client.begin().link(cluster.holder, note='it is the collector who says what is garbage')
        for begins, looks in ('garbage_end', True), ('garbage_end', False):
            [cluster] = self.clusters(1)
            old = self.client()
            with patch.object(type(self.site.database.adapter), 'writes_alone', lambda adapter, session: True):
                self.client().link(cluster.holder, cluster.one)
                old.begin()

                def act(cluster=cluster, looks=looks, old=old):
                    self.collector.begin().finish(self.delete(cluster.one, cluster.two))
                    if looks:
                        with self.assertRaises(ConflictError):
                            old.link(z64, cluster.holder, cluster.one)

                with before(self.packing, begins, act):
                    self.pack()
            other.begin()
            if not looks:
                with self.assertRaises(ConflictError):
                    old.link(z64, cluster.holder, cluster.one)
            client.begin().link(cluster.holder)


class BesideRelStorage(Deletions):
    """Where RelStorage may write, which knows no lock but those of objects and of the commit."""

    def setUp(self):
        super().setUp()
        self.site.database.adapter.writers.set('any')

    def test_held_since_before_it_was_deleted(self):
        """It may be RelStorage that has removed it just now, so a retry is tried."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.load(cluster.one)
        self.collector.begin().finish(self.delete(cluster.one, cluster.two))
        for error in ConflictError, StorageError:
            with self.assertRaisesRegex(error, 'or it was deleted'):
                client.begin().link(cluster.holder, cluster.one)
        self.ends()

    def test_relstorage_cannot_commit_meanwhile(self):
        """So none of its tids comes between the one that is told and that of the deletion."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.load(cluster.one)
        self.assertTrue(self.can_lock_commits())
        self.collector.begin()
        voted = self.delete(cluster.one, cluster.two)
        self.assertFalse(self.can_lock_commits())
        between = self.client()
        between.load(cluster.one)
        self.collector.finish(voted)
        self.assertTrue(self.can_lock_commits())
        for late in between, client:
            with self.assertRaisesRegex(ConflictError, 'or it was deleted'):
                late.link(cluster.holder, cluster.one)
        self.ends()

    def can_lock_commits(self) -> bool:
        """As RelStorage would before it chooses a tid."""
        with self.site.database.pool.session() as session:
            try:
                if isinstance(self, PostgreSQLBackend):
                    return session.all('SELECT pg_try_advisory_xact_lock(-1)') == [(True,)]
                session.all('SELECT tid FROM commit_row_lock FOR UPDATE NOWAIT')
                return True
            except LockTimeout:
                return False
            finally:
                session.rollback()


cases(globals(), RelstoreAlone, backends=BACKENDS)
cases(globals(), BesideRelStorage, backends=[each for each in BACKENDS if issubclass(each, ServerBackend)])
del Deletions, RelstoreAlone, BesideRelStorage
