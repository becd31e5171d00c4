"""A Galera cluster of two nodes, both written to: conflicts between the nodes are told at COMMIT, and nothing is lost.

Locks are those of one node; what another node has committed ends whoever is in its way. It takes 8 s to start, so this
is a layer of its own. Where galera-4 or rsync is missing all of it is skipped, also where CI=true: clusters are nothing
that a developer has to have. Group Replication is not shown here: its errors at COMMIT, 1180 and 3101, are given by a
real server in test_mysql.Refused, but not by a group of servers.
"""
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import TestCase, mock

from transaction.interfaces import TransientError
from ZODB.POSException import ConflictError
from ZODB.utils import u64, z64

import relstore
from relstore.errors import Deadlock, Disconnected, OutcomeUnknown, Unavailable
from relstore.packing.packs import Packs
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    PyMySQLHistoryFree,
    PyMySQLHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit, voted
from relstore.tests.support.objects import reachable
from relstore.tests.support.packing import before
from relstore.tests.support.patience import within
from relstore.tests.support.records import counter, record, state, value_of
from relstore.tests.support.servers import MariaDBServer, SharedServer, cannot_run, free_port, mariadb_programs
from relstore.tests.support.watch import MySQLWatch

PROVIDERS = '/usr/lib/galera/libgalera_smm.so', '/usr/lib64/galera-4/libgalera_smm.so'


class Node(MariaDBServer):

    ready = 'Synchronized with group, ready for connections'

    def __init__(self, provider: str, first: 'Node | None'):
        self.group_port, transfer, increments = free_port(), free_port(), free_port()
        super().__init__({
            'binlog_format': 'ROW', 'innodb_autoinc_lock_mode': 2, 'wsrep_on': 'ON', 'wsrep_provider': provider,
            'wsrep_cluster_address': f'gcomm://127.0.0.1:{first.group_port}' if first else 'gcomm://',
            'wsrep_node_address': f'127.0.0.1:{self.group_port}', 'wsrep_sst_method': 'rsync',
            'wsrep_sst_receive_address': f'127.0.0.1:{transfer}',
            'wsrep_provider_options': f'gmcast.listen_addr=tcp://127.0.0.1:{self.group_port};'
                                      f'ist.recv_addr=127.0.0.1:{increments};socket.ssl=NO;gcache.size=8M'})


class Cluster:
    """Its first node stands for the server that a backend knows."""

    def __init__(self, provider: str):
        first = Node(provider, None)
        self.nodes = first, Node(provider, first)

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()

    def __getattr__(self, name: str):
        return getattr(self.nodes[0], name)


def find_cluster() -> Cluster | None:
    provider = next((path for path in PROVIDERS if Path(path).exists()), None)
    return Cluster(provider) if provider and shutil.which('rsync') and mariadb_programs() else None


def require_cluster(test: TestCase) -> None:
    cannot_run(test, 'Galera is not installed (apt-get install mariadb-server galera-4 rsync)', excused=True)


GaleraLayer = SharedServer('GaleraLayer', __name__, find_cluster, require_cluster)


class Nodes(TestCase):

    def setUp(self):
        super().setUp()
        self._threads = ThreadPoolExecutor(4)
        self.addCleanup(self._threads.shutdown)
        self.arguments()        # the database is there
        self.storages, self.watches = [], []
        for node in self.layer.server.nodes:
            arguments = node.arguments(self._database('main'))
            watch = MySQLWatch(arguments)
            self.addCleanup(watch.close)
            watch.rows('SET wsrep_sync_wait = 15')      # it sees what the other node had committed
            watch.one('SELECT 1')
            storage = relstore.RelStore(relstore.MySQL(**arguments, driver=self.driver),
                                        keep_history=self.keep_history, commit_lock_timeout=20)
            self.addCleanup(storage.close)
            self.watches.append(watch)
            self.storages.append(storage)
        self.here, self.there = self.storages

    def objects(self, count=1, record=None):
        """Return the oids of new objects that both nodes see, in order, and their tid."""
        oids = sorted(self.here.new_oid() for _ in range(count))
        tid = commit(self.here, *((oid, z64, record or state(0)) for oid in oids))
        self.everywhere(tid)
        return oids, tid

    def everywhere(self, tid):
        """Return when both nodes have what was committed by then."""
        for watch in self.watches:
            watch.until('(SELECT max(tid) FROM object_state) >= %s', u64(tid))

    def test_two_nodes_change_one_object(self):
        """Both have voted; who finishes first wins, and the other has a conflict."""
        [oid], tid = self.objects()
        for round_ in range(3):
            txn = voted(self.here, (oid, tid, state(-1)))
            tid = commit(self.there, (oid, tid, state(round_)))
            with self.assertRaises(ConflictError) as raised:
                self.here.tpc_finish(txn)
            self.assertIsInstance(raised.exception, TransientError)
            self.here.tpc_abort(txn)
            self.everywhere(tid)
            for storage, watch in zip(self.storages, self.watches, strict=True):
                self.assertEqual(storage.load(oid), (state(round_), tid))
                self.assertEqual(storage.database.pool.lent, 0)
                watch.until_nothing_is_open()
            tid = commit(self.here, (oid, tid, state(9)))
            self.everywhere(tid)

    def test_sweep_that_begins_after_a_vote_on_the_other_node(self):
        """It has not waited for that transaction, which does not know of it, so only one of the two may go on."""
        [oid], tid = self.objects()
        txn = voted(self.there, (oid, tid, state(1)))
        adapter = self.here.database.adapter
        with self.here.database.pool.session() as session:
            packs = Packs(adapter, session)
            generation = packs.new(u64(tid), u64(tid), True, 'x')
            packs.end_marking(generation, 'x', 0)
            adapter.lock_votes(session, 5)
            packs.start_sweep(packs.last())
            session.run('COMMIT')
            with self.assertRaises(ConflictError):
                self.there.tpc_finish(txn)
            self.there.tpc_abort(txn)
            adapter.lock_votes(session, 5)
            packs.end_sweep(packs.last())
            session.run('COMMIT')
        self.everywhere(commit(self.here, (oid, tid, state(2))))

    def test_pack_while_the_other_node_commits(self):
        tid, done = commit(self.here, (z64, z64, state(0))), threading.Event()
        self.everywhere(tid)

        def stored(storage, *changes):
            for _ in within('it is committed'):
                with suppress(ConflictError):
                    return commit(storage, *changes)

        def work():
            tids = [tid]
            while not done.is_set():
                tids.append(stored(self.there, (z64, tids[-1], state(len(tids)))))
            return tids

        writer, removed = self._threads.submit(work), 0
        try:
            for _ in range(5):
                stored(self.here, *((self.here.new_oid(), z64, state(0)) for _ in range(20)))     # garbage
                removed += self.here.pack(time.time()).objects
        finally:
            done.set()
        self.assertGreaterEqual(removed, 80)    # what the newest transaction has made stays
        tids = writer.result(60)
        self.everywhere(tids[-1])
        self.assertEqual(self.here.load(z64), (state(len(tids) - 1), tids[-1]))
    def test_pack(self):
        """Who votes on the other node, at any time of the pack, keeps what it links, or has a conflict."""
        commit(self.here, (z64, z64, record()))
        for step in 'lock_votes', 'start_sweep', 'garbage_end', 'end_sweep':
            holder, one, two = sorted(self.here.new_oid() for _ in range(3))
            tid = commit(self.here, (z64, self.here.getTid(z64), record(holder)), (holder, z64, record()),
                         (one, z64, record(two)), (two, z64, record()))
            self.everywhere(tid)
            votes = []

            def vote(tid=tid, votes=votes, holder=holder, one=one):
                with suppress(ConflictError):
                    votes.append(voted(self.there, (holder, tid, record(one))))

            with before(self.here.database.adapter, step, vote):
                self.here.pack(None)
            for txn in votes:
                try:
                    tid = self.there.tpc_finish(txn)
                except (ConflictError, Unavailable):
                    self.there.tpc_abort(txn)
            self.everywhere(tid)
            self.assertEqual(reachable(self.here), reachable(self.there))

    def test_no_count_is_lost(self):
        """All that was told to be stored is, and no more; on both nodes."""
        [resolved, plain], _ = self.objects(2, counter(0))
        start = threading.Barrier(4)

        def work(storage, oid):
            view, done = storage.new_instance(), 0
            start.wait(30)
            for _ in range(15):
                try:
                    view.poll_invalidations()
                    record, tid = view.load(oid)
                    commit(view, (oid, tid, counter(value_of(record) + 1)))
                    done += 1
                except TransientError:      # includes ConflictError
                    view.afterCompletion()
            view.release()
            return done

        futures = {oid: [self._threads.submit(work, storage, oid) for storage in self.storages]
                   for oid in (resolved, plain)}
        done = {oid: sum(future.result(60) for future in some) for oid, some in futures.items()}
        self.assertTrue(all(done.values()), done)
        for storage, watch in zip(self.storages, self.watches, strict=True):
            watch.one('SELECT 1')
            self.assertEqual({oid: value_of(storage.load(oid)[0]) for oid in done}, done)
            self.assertEqual(storage.database.pool.lent, 0)

    def test_another_node_is_asked_for_the_outcome(self):
        """It cannot know whether the first will still commit: so it says that, and keeps it from doing so."""
        [oid], tid = self.objects()
        txn = voted(self.here, (oid, tid, state(-1)))
        pool, session = self.here.database.pool, self.here.committing.session
        orphan = self.here.committing.commit
        pool.retire()
        with mock.patch.object(orphan, 'finish', side_effect=Disconnected('lost by this test')), \
                mock.patch.object(session, 'close'), \
                mock.patch.object(pool, '_connect', self.there.database.adapter.connect), \
                self.assertRaises(OutcomeUnknown):
            self.here.tpc_finish(txn)
        pool.retire()
        orphan.session = session
        with self.assertRaises(Deadlock):
            orphan.finish()
        session.close()
        self.assertEqual(self.there.load(oid), (state(0), tid))

    def test_a_counter_is_not_believed(self):
        """A node may not show yet what another has committed and counted."""
        arguments = self.layer.server.nodes[0].arguments(self._database('main'))
        with self.assertLogs('relstore', 'WARNING') as logs:
            storage = relstore.RelStore(relstore.MySQL(**arguments, driver=self.driver), keep_history=self.keep_history,
                                        cache_servers='127.0.0.1:1', poll_interval=60)
        self.addCleanup(storage.close)
        self.assertIn('poll-interval has no effect in a cluster', '\n'.join(logs.output))
        self.assertEqual(storage.database.polling._interval, 0)

    def test_oids_differ(self):
        oids = [u64(storage.new_oid()) for storage in self.storages * 50]
        self.assertEqual(len(set(oids)), len(oids))

    def test_no_reader_misses_a_commit(self):
        """Two nodes commit different objects at once: the order of tids is that of the commits nevertheless, because
        a reader asks for what came after the newest tid it knows.
        """
        oids, tid = self.objects(3)
        low, high, new = *oids[:2], self.here.new_oid()
        reader = self.there.new_instance()
        self.addCleanup(reader.release)
        reader.poll_invalidations()
        self.assertEqual(reader.load(high), (state(0), tid))
        reader.afterCompletion()
        txn = voted(self.here, (high, tid, state(1)), (new, z64, state(1)))
        # Whoever locks a gap keeps the first from going on when it has chosen its tid.
        blocker = MySQLWatch(self.layer.server.nodes[0].arguments(self._database('main')))
        self.addCleanup(blocker.close)
        blocker.rows('SET TRANSACTION ISOLATION LEVEL REPEATABLE READ')
        blocker.rows('START TRANSACTION')
        blocker.rows('SELECT zoid FROM object_state WHERE zoid > %s FOR UPDATE', u64(oids[2]))
        finish = self._threads.submit(self.here.tpc_finish, txn)
        self.watches[0].until_somebody_waits()
        later = commit(self.there, (low, tid, state(2)))
        reader.poll_invalidations()
        self.assertEqual(reader.load(low), (state(2), later))
        reader.afterCompletion()
        blocker.rows('ROLLBACK')
        try:
            self.everywhere(finish.result(30))
        except ConflictError:
            self.here.tpc_abort(txn)
            commit(self.here, (high, tid, state(1)), (new, z64, state(1)))
        self.everywhere(self.here.getTid(high))
        reader.poll_invalidations()
        self.assertEqual(value_of(reader.load(high)[0]), 1)
        self.assertEqual(value_of(reader.load(new)[0]), 1)


BACKENDS = [type(f'{backend.__name__}OnGalera', (backend,), {'layer': GaleraLayer}) for backend in (
    MySQLdbHistoryPreserving, MySQLdbHistoryFree, PyMySQLHistoryPreserving, PyMySQLHistoryFree)]

cases(globals(), Nodes, backends=BACKENDS)
del Nodes, BACKENDS
