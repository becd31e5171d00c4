"""A pack loses nothing that can be reached, whatever happens between which of its steps.

The packer is stopped at each of its calls to the adapter, one after the other, while others commit, or it is killed
there. What is garbage is made of clusters, see Cluster. Whoever links one again has to keep all of it, or is told of a
conflict.
"""
import doctest
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import zlib
from binascii import hexlify
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from unittest import TestCase
from unittest.mock import Mock, patch

import transaction
import ZODB
from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import (
    ConflictError,
    POSKeyError,
    ReadOnlyError,
    StorageError,
    UndoError,
)
from ZODB.tests import PackableStorage
from ZODB.utils import p64, u64, z64

import relstore
from relstore import marks
from relstore.errors import ConfigurationError, Disconnected, LockTimeout, OutcomeUnknown, Unavailable
from relstore.packing import garbage, links, pack, sweep
from relstore.packing.checks import Survey
from relstore.references import references
from relstore.sessions.session import Session
from relstore.tests.support.backends import (
    THOROUGH,
    Psycopg2PooledHistoryPreserving,
    Psycopg3PooledHistoryFree,
    SQLiteBackend,
    cases,
)
from relstore.tests.support.children import in_child
from relstore.tests.support.commits import transaction_of
from relstore.tests.support.hexadecimal import MVCCHexStorage
from relstore.tests.support.objects import Client, linked, reachable
from relstore.tests.support.packing import BACKENDS, DURABLE, Cluster, Suite, before, calls, late
from relstore.tests.support.records import record
from relstore.tests.support.servers import MemcachedServer, memcached_program, require_memcached

README = Path(__file__).parents[3] / 'README.txt'
FORK = multiprocessing.get_context('fork')
# Messages of a pack that change something.
CHANGES = re.compile(r'(?m)^(INSERT|UPDATE|DELETE|COMMIT)\b|relstore_(sweep|forget)_\d+')


def raw(pid: object, python2: bool = False, class_name: bytes | None = None) -> bytes:
    """Return a record with one persistent id, as it was written at other times."""
    class_name = class_name or b'persistent.mapping\nPersistentMapping\n'
    where = b'U\x08' + pid if python2 else pickle.dumps(pid, 3)[2:-1]      # U: a str
    return b'\x80\x02c' + class_name + b'.' + b'\x80\x02}X\x04\x00\x00\x00data}X\x01\x00\x00\x00a' + where + b'Qss.'


def timestamp(tid: bytes) -> float:
    return TimeStamp(tid).timeTime()


# What a link to something that goes, or has gone, may raise.
REFUSED = ConflictError, StorageError, POSKeyError


class Interleaved(Suite):
    """Others commit at each step of a pack to the present."""

    def steps(self, **options) -> int:
        """Return how many calls a pack makes when nothing else happens."""
        self.clusters(1)
        made = []
        with calls(self.packing, lambda n, name: made.append(name)):
            self.pack(**options)
        return len(made)

    def test_links_at_each_step(self):
        """By a new view, by a view that is older than the pack, and by one in the packer's process."""
        kept = refused = 0
        for step in range(self.steps() + 3):
            fresh, old, own, changed, control = clusters = self.clusters(5)
            clients = [self.client(), self.client(self.storage), self.client()]
            views = [self.client(), *clients]
            for client, cluster in zip(clients, (old, own, changed), strict=True):
                for oid in cluster.one, cluster.two, cluster.holder:
                    client.load(oid)

            def act(n, name, step=step, fresh=fresh, old=old, own=own, changed=changed, clients=clients, views=views):
                nonlocal kept, refused
                if n != step:
                    return
                views[0].begin()
                work = [(views[0], fresh.holder, fresh.one), (clients[0], old.holder, old.one),
                        (clients[1], own.holder, own.one), (clients[2], changed.one, changed.two)]
                for client, holder, one in work:
                    with suppress(*REFUSED):
                        try:
                            client.link(holder, one)
                        except REFUSED:
                            refused += 1
                            raise
                        kept += 1

            with calls(self.packing, act), patch.object(sweep, 'DOOR', 0.01):
                self.pack()
            with self.subTest(step):
                found = self.ends()
                self.assertEqual(reachable(self.site), found)
                self.assertEqual(reachable(self.storage), found)
                self.assertFalse(self.exists(control.one) or self.exists(control.two))
                self.assertTrue({cluster.holder for cluster in clusters} <= found)
        self.assertGreater(kept, 0)
        self.assertGreater(refused, 0)


class Door(Suite):
    """The moment in which a sweep begins, and nobody is between vote and finish."""

    def test_much_is_committed_just_before(self):
        """More than is to be read while nobody can vote: the door is opened again, and what was found stays found.

        After many tries it is read nevertheless.
        """
        for tries in sweep.DOOR_TRIES, 1:
            *linked, control = self.clusters(6)
            client = self.client()

            def commit(linked=linked, client=client):
                client.begin()
                client.finish(client.vote(*((cluster.holder, record(cluster.one)) for cluster in linked)))

            with patch.multiple(sweep, AT_THE_DOOR=2, OPEN_AGAIN=0, ROWS=2, DOOR_TRIES=tries), \
                    before(self.packing, 'lock_votes', commit):
                self.pack()
            self.assertLessEqual({oid for cluster in linked for oid in (cluster.one, cluster.two)}, self.ends())
            self.assertFalse(self.exists(control.one))

    def test_what_was_linked_just_before_leads_to_much(self):
        """It is followed while others can vote. After many tries it is followed nevertheless."""
        for tries in sweep.DOOR_TRIES, 1:
            linked, other, control = self.clusters(3)
            many = [self.site.new_oid() for _ in range(30)]
            client = self.client()
            client.finish(client.vote((linked.one, record(*many[::2])), *(
                (oid, record(leaf)) for oid, leaf in zip(many[::2], many[1::2], strict=True)),
                *((leaf, record(linked.two)) for leaf in many[1::2])))
            client.begin().link(other.holder, note='the newest')
            linking = [(linked.holder, linked.one), (other.holder, other.one)]
            at_the_door, outside = [], []       # how many objects were followed
            lock_votes, garbage_revisions = self.packing.lock_votes, self.packing.garbage_revisions

            def link(linking=linking, client=client):
                client.begin().link(*linking.pop(0))

            def lock(session, timeout, at_the_door=at_the_door, linking=linking, link=link, lock_votes=lock_votes):
                if len(linking) == 2:
                    link()
                lock_votes(session, timeout)
                at_the_door.append(0)

            def follow(session, generation, oids, at_the_door=at_the_door, outside=outside, linking=linking, link=link,
                       garbage_revisions=garbage_revisions):
                if session.in_transaction:
                    at_the_door[-1] += len(oids)
                else:
                    outside.append(len(oids))
                    if linking:
                        link()
                return garbage_revisions(session, generation, oids)

            with patch.multiple(sweep, AT_THE_DOOR=2, OPEN_AGAIN=0, DOOR_TRIES=tries), \
                    patch.object(self.packing, 'lock_votes', lock), \
                    patch.object(self.packing, 'garbage_revisions', follow):
                report = self.pack()
            if tries == 1:
                self.assertEqual((at_the_door[0], outside), (32, []))
            else:
                self.assertLessEqual(max(at_the_door), 2)
                self.assertEqual(sum(at_the_door) + sum(outside), 34)
                self.assertEqual(report.spared, 34)
                self.assertLessEqual({other.one, other.two}, self.ends())
            self.assertLessEqual({linked.one, linked.two, *many}, self.ends())
            self.assertFalse(self.exists(control.one))

    def test_much_that_links_nothing_is_committed_before(self):
        """All of it is read, before the door and in it."""
        *others, linked, at_the_door, control = self.clusters(6)
        client, left = self.client(), [at_the_door, linked]

        def commit():
            for holder, *one in *((other.holder,) for other in others), (left[-1].holder, left.pop().one):
                client.begin().link(holder, *one, note='newer')

        with patch.multiple(sweep, AT_THE_DOOR=2, ROWS=2), before(self.packing, 'new_pack', commit), \
                before(self.packing, 'lock_votes', commit):
            self.pack()
        self.assertLessEqual({oid for cluster in (linked, at_the_door) for oid in (cluster.one, cluster.two)},
                             self.ends())
        self.assertFalse(self.exists(control.one))

    def test_opened_again_while_it_is_followed(self):
        """What was followed by then is not followed once more, so it has to be off the list of the database, too."""
        linked, control = self.clusters(2)
        client, now = self.client(), 0.0
        spare = self.packing.spare

        def take_long(*arguments):
            nonlocal now
            spare(*arguments)
            now += 1

        with before(self.packing, 'lock_votes', lambda: client.link(linked.holder, linked.one)), \
                patch.object(self.packing, 'spare', take_long), \
                patch.object(sweep, 'time', Mock(wraps=time, monotonic=lambda: now)):
            report = self.pack()
        self.assertEqual(report.spared, 2)
        self.assertLessEqual({linked.one, linked.two}, self.ends())
        self.assertFalse(self.exists(control.one))

    def test_the_door_is_lost_again(self):
        """What was taken off the list in a transaction that is rolled back has to be taken off once more."""
        [cluster] = self.clusters(1)
        client, tries = self.client(), []
        lock_votes, start_sweep = self.packing.lock_votes, self.packing.start_sweep

        def link_and_lock(session, timeout):
            if not tries:
                client.begin().link(cluster.holder, cluster.one)
            lock_votes(session, timeout)

        def fail_once(session, prepared, now):
            tries.append(prepared)
            if len(tries) == 1:
                raise LockTimeout('for once')
            start_sweep(session, prepared, now)

        with patch.object(self.packing, 'lock_votes', link_and_lock), \
                patch.object(self.packing, 'start_sweep', fail_once):
            self.pack()
        self.assertEqual(len(tries), 2)
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())

    def test_voted_before_and_finished_after(self):
        cluster, control = self.clusters(2)
        client = self.client()
        voted = []

        def act(n, name):
            if n == 0:
                voted.append(client.vote((cluster.holder, record(cluster.one))))
            elif n == 1:
                client.finish(voted.pop())

        with calls(self.packing, act, ['lock_votes']):
            self.pack()
        self.assertEqual(voted, [])
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        self.assertFalse(self.exists(control.one))

    def test_voted_during_the_sweep(self):
        """It does not end before that has finished: who looks at the list relies on it being there."""
        if isinstance(self, SQLiteBackend):
            self.skipTest('nothing can be removed while somebody has voted')
        [cluster] = self.clusters(1)
        client = self.client()
        voted = []
        with closing(self.open_storage(commit_lock_timeout=1)) as impatient:
            with before(impatient._adapter, 'garbage_end',
                        lambda: voted.append(client.vote((cluster.holder, record(note='slow'))))), \
                    self.assertRaises(LockTimeout):
                impatient.pack(None)
            _, generation = self.site._pool.attempt(self.site._adapter.sweep_state)
            self.assertNotEqual(generation, 0)
            client.finish(*voted)
            with self.assertRaises(ConflictError):
                client.begin().link(cluster.holder, cluster.one)
            impatient.pack(None)
        self.ends()

    def test_somebody_never_finishes(self):
        """Nothing is removed, it is said why, and later it can be done."""
        [cluster] = self.clusters(1)
        self.pack(prepack_only=True)
        client = self.client()
        voted = client.vote((cluster.holder, record(note='slow')))
        with patch.object(sweep, 'DOOR_TRIES', 2), self.assertRaisesRegex(Unavailable, 'between their vote'):
            self.pack(skip_prepack=True)
        self.assertTrue(self.exists(cluster.one))
        client.finish(voted)
        self.pack(skip_prepack=True)
        self.assertFalse(self.exists(cluster.one))
        self.ends()

    def test_a_client_hangs(self):
        """Others hardly notice that a pack waits for it, when a sweep begins or ends; and that soon goes on."""
        lock_votes = self.packing.lock_votes
        for door in range(2):
            self.clusters(1)
            now, calls, waits, told = 1000.0, [], [], [0.0, 0.0]

            def lock(session, timeout, door=door, calls=calls, waits=waits, told=told):
                nonlocal now
                if door == (len(calls) > 0):        # it hangs from then on
                    told[0] = told[0] or now
                    if now < told[0] + 25:
                        now += timeout
                        waits.append(timeout)
                        raise LockTimeout('somebody hangs')
                    told[1] = now
                calls.append(now)
                lock_votes(session, timeout)

            def sleep(seconds):
                nonlocal now
                now += seconds

            with patch.object(self.packing, 'lock_votes', lock), \
                    patch.object(sweep, 'time', Mock(wraps=time, monotonic=lambda: now, sleep=sleep)), \
                    patch('relstore.packing.report.time', Mock(wraps=time, monotonic=lambda: now)):
                report = self.pack()
            with self.subTest(door):
                self.assertGreater(len(waits), 3)
                self.assertLess(sum(waits), 0.02 * 25)
                self.assertLessEqual(max(waits), sweep.LONGEST_DOOR)
                self.assertLess(told[1] - told[0], 35)
                self.assertAlmostEqual(report.locked, sum(waits), delta=0.01)
                self.assertAlmostEqual(report.longest_lock, max(waits), delta=0.01)

    def test_interrupted_before_the_door(self):
        """Some of what was linked is off the list then, and the next pack finds what else it leads to."""
        step, done = 0, False
        while not done:
            linked, control = self.clusters(2)
            self.pack(prepack_only=True)
            self.client().link(linked.holder, linked.one)

            def interrupt(n, name, step=step):
                if n == step:
                    raise KeyboardInterrupt

            with calls(self.packing, interrupt, ['changes', 'garbage_revisions', 'spare', 'lock_votes']):
                try:
                    self.pack(skip_prepack=True)
                    done = True
                except KeyboardInterrupt:
                    step += 1
            if not done:
                self.pack(skip_prepack=True)
            with self.subTest(step):
                self.assertLessEqual({linked.one, linked.two}, self.ends())
                self.assertFalse(self.exists(control.one))
        self.assertGreater(step, 5)


class Since(Suite):
    """An older pack time: what goes was garbage then."""

    def setUp(self):
        super().setUp()
        present = patch.object(pack, 'PRESENT', 0)      # else a second ago is the present
        present.start()
        self.addCleanup(present.stop)

    def test_a_database_that_nobody_writes_to(self):
        """It was garbage at the pack time, whatever the newest transaction is."""
        [cluster] = self.clusters(1)
        self.pack(pack_time=time.time() - 1000)
        self.assertTrue(self.exists(cluster.one))
        self.opened(pack_gc=False).pack(None)       # which looks for no garbage, and forgets none
        self.pack(pack_time=time.time() - 1e-3)
        self.assertFalse(self.exists(cluster.one))
        self.ends()


    def test_now_is_when_it_begins(self):
        """To end what was interrupted, and to read a large database, takes longer than the present lasts."""
        [cluster] = self.clusters(1)
        with patch.object(pack, 'PRESENT', 10), late(self.packing, 'lock_pack'):
            self.pack(pack_time=time.time())
        self.assertFalse(self.exists(cluster.one))

    def test_linked_and_unlinked_again(self):
        """A pack that has let it stay does not know since when it is garbage."""
        cluster, control = self.clusters(2)
        self.pack(prepack_only=True)
        client = self.client()
        client.link(cluster.holder, cluster.one)
        self.pack(skip_prepack=True)
        self.assertFalse(self.exists(control.one))
        pack_time = time.time()
        client.begin().link(cluster.holder)
        client.begin().link(cluster.holder, note='the newest')
        self.pack(pack_time=pack_time)
        self.assertTrue(self.exists(cluster.one) and self.exists(cluster.two))
        self.pack()
        self.assertFalse(self.exists(cluster.one) or self.exists(cluster.two))
        self.ends()

    def test_changed_after_the_pack_time(self):
        """Garbage that somebody still works with stays, with what it refers to."""
        changed, control = self.clusters(2)
        self.pack(pack_time=time.time() - 1000)
        pack_time = time.time()
        client = self.client()
        client.link(changed.one, changed.two, note='still in use')
        client.begin().link(changed.holder, note='the newest')
        self.pack(pack_time=pack_time)
        self.assertTrue(self.exists(changed.one) and self.exists(changed.two))
        self.assertFalse(self.exists(control.one) or self.exists(control.two))
        client.begin().link(changed.holder, changed.one)
        self.ends()


class Relinked(Suite):
    """Without history: what was garbage, was linked and used, and is garbage again, is that since now."""

    def setUp(self):
        super().setUp()
        present = patch.object(pack, 'PRESENT', 0)
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
        client, counts, do = self.client(), [], Session._do

        def send(session, act, *arguments):
            counts[-1] += 1
            return do(session, act, *arguments)

        def count(*changes):
            counts.append(0)
            client.begin()
            with patch.object(Session, '_do', send):
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
        self.run_sql('DELETE FROM relstore_garbage WHERE generation < 0')
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
            if storage._database.warm is not None:
                storage._database.warm.filled.wait()
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
        number, _ = self.site._pool.attempt(self.site._adapter.sweep_state)
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
        number, _ = self.site._pool.attempt(self.site._adapter.sweep_state)
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
        number, _ = self.site._pool.attempt(self.site._adapter.sweep_state)
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
            self.site._pool.attempt(lambda session, sql=statement: session.run(sql))
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
        client.view.deleteObject(cluster.one, client._tid(cluster.one), txn)
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
        self.site._adapter.set_writers('any')
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
            sent, do = [], Session._do

            def send(session, act, *arguments, sent=sent, do=do):
                sent.append(arguments)
                return do(session, act, *arguments)

            client.begin()
            with patch.object(Session, '_do', send):
                began = time.monotonic()
                client.finish(client.vote(*changes))
                seconds = time.monotonic() - began
            counts.append(len(sent))
        self.assertLessEqual(counts[1] - counts[0], 3)
        self.assertLess(seconds, 5)


class Deleted(Suite):
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
                view.deleteObject(oid, self.collector._tid(oid), txn)
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

    def test_linked_by_one_who_holds_it_since_before(self):
        """His view is younger; what he holds is not."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.load(cluster.one)
        self.collector.begin().finish(self.delete(cluster.one, cluster.two))
        client.begin()
        with self.assertRaisesRegex(StorageError, 'or it was deleted'):
            client.link(cluster.holder, cluster.one)
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

    def test_deleted_during_a_sweep(self):
        """That knows nothing of it. By a view that is older, in a process that has learnt of the sweep."""
        [cluster] = self.clusters(1)
        client, other = self.client(), self.client()
        client.link(cluster.holder, cluster.one)
        client.begin().link(cluster.holder, note='it is the collector who says what is garbage')
        for begins, looks in ('garbage_end', True), ('garbage_end', False):
            [cluster] = self.clusters(1)
            old = self.client()
            with patch.object(type(self.site._adapter), 'writes_alone', lambda adapter, session: True):
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

    def test_younger_connections_ask_nothing_more(self):
        [cluster] = self.clusters(1)
        counts, do = [], Session._do

        def send(session, act, *arguments):
            counts[-1] += 1
            return do(session, act, *arguments)

        for _ in range(2):
            counts.append(0)
            client = self.client().begin()
            client.load(z64)
            with patch.object(Session, '_do', send):
                client.finish(client.vote((z64, record(cluster.holder))))
            if len(counts) == 1:
                self.collector.begin().finish(self.delete(cluster.one))
        self.assertEqual(counts[0], counts[1])


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
            for name in (lambda d: d.tier._epoch.namespace,
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

        with patch.object(self.database.adapter, 'poll', late), self.site._pool.session() as session:
            answer = self.database.poll(session)
            session.rollback()
        return answer

    def poll(self) -> tuple[int, int]:
        with self.site._pool.session() as session:
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
        self.assertTrue(self.database.epochs.is_current(generation), 'it is no reason for a view to fail')

    def test_told_of_an_epoch_that_is_over(self):
        self.clusters(1)
        self.pack()
        swept = self.database.adapter.swept

        def crash(*arguments):
            answer = swept(*arguments)
            self.run_sql('DELETE FROM relstore_epoch')
            with patch.object(self.database.adapter, 'swept', swept):
                self.poll()
            return answer

        with patch.object(self.database.adapter, 'swept', crash):
            _, generation = self.poll()
        self.assertFalse(self.database.epochs.is_current(generation))

    def test_a_child_that_was_forked_before(self):
        [cluster] = self.clusters(1)
        reader = self.client()
        reader.load(cluster.one)
        reader.view.release()
        self.pack()
        number, _ = self.storage._pool.attempt(self.packing.sweep_state)

        def work():
            child = Client(self.site)
            self.assertEqual(self.database.epochs.sweeps_of(self.cache.generation), number)
            with self.assertRaises(POSKeyError):
                child.load(cluster.one)

        in_child(self, work)


class Field(Suite):
    """What others' packs have lost or left: see the cases one by one."""

    def test_linked_between_the_phases(self):
        """Only its referrer changes, not the object itself; and by a chain that begins with an object of the list."""
        first, second, third, control = self.clusters(4)
        self.pack(prepack_only=True)
        client = self.client()
        client.link(first.holder, first.one)
        client.begin().link(second.one, second.two, third.one)      # garbage is changed; nothing else refers to it
        new = self.site.new_oid()
        client.begin()
        client.finish(client.vote((control.holder, record(new)), (new, record())))
        with patch.object(garbage, 'ROWS', 2):       # the list is read in pages
            report = self.pack(skip_prepack=True)
        self.assertEqual(report.spared, 6)
        found = self.ends()
        self.assertLessEqual({first.one, first.two, new}, found)
        for oid in second.one, second.two, third.one, third.two:
            self.assertTrue(self.exists(oid))
        self.assertFalse(self.exists(control.one) or self.exists(control.two))
        client.begin().link(third.holder, second.one)
        self.ends()

    def test_moved_between_the_phases(self):
        """From one object of the list to another, that is then linked."""
        first, second = self.clusters(2)
        self.pack(prepack_only=True)
        client = self.client()
        client.finish(client.vote((first.one, record()), (second.one, record(first.two))))
        client.begin().link(second.holder, second.one)
        client.begin().link(first.holder, second.two)
        self.pack(skip_prepack=True)
        self.assertLessEqual({second.one, second.two, first.two}, self.ends())

    def test_without_garbage_collection_after_a_prepare(self):
        """Nothing is removed but old revisions, whatever list is there; nor does one kind of sweep use the other's."""
        [cluster] = self.clusters(1)
        self.pack(prepack_only=True)
        client = self.client()
        client.link(cluster.holder, cluster.one)
        old = self.opened(pack_gc=False)
        with self.assertRaisesRegex(ConfigurationError, 'pack-gc true'):
            old.pack(None, skip_prepack=True)
        report = old.pack(None)
        self.assertEqual(report.objects, 0)
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        with self.assertRaisesRegex(ConfigurationError, 'prepare again|run a pre-pack'):
            self.pack(skip_prepack=True)

    def test_lists_do_not_pile_up(self):
        """Neither with garbage collection nor without."""
        careful = self.opened(pack_gc=False)
        sizes = []
        for storage in (self.storage, careful, careful, careful, self.storage):
            client = self.client()
            for _ in range(3):
                client.begin().link(z64, note=len(sizes))
            storage.pack(None)
            [[size]] = self.site._pool.attempt(lambda session: session.all('SELECT count(*) FROM relstore_garbage'))
            sizes.append(size)
        self.assertLessEqual(max(sizes), 2, sizes)

    def test_undo_after_the_pack(self):
        """Of each transaction that was not packed; of packed ones it is refused, and they are not offered."""
        if not self.keep_history:
            self.skipTest('needs history')
        first, second = self.clusters(2)
        client = self.client()
        tids = []
        for holder, *others in (
                (first.holder, first.one), (first.holder,), (second.holder, second.one), (second.one, first.one),
                (second.holder,), (second.one,), (first.holder, second.two), (first.holder,), (second.two, first.two)):
            tids.append(client.begin().link(holder, *others))
        for boundary in range(1, len(tids) - 1):
            pack_time = (timestamp(tids[boundary]) + timestamp(tids[boundary + 1])) / 2
            self.pack(pack_time=pack_time)
            offered = [entry['id'] for entry in self.site.undoLog(0, -10_000) if entry['id'] in tids]
            self.assertEqual(offered, tids[:boundary:-1])
            for tid in tids[:boundary + 1]:
                with self.assertRaises(UndoError):
                    self.undo(tid)
            undone = 0
            for length in range(1, len(offered) + 1):       # and the last few of them at once
                undone += self.undo(*offered[:length], keep=False)
            for tid in offered:
                undone += self.undo(tid, keep=False)
            self.assertGreaterEqual(undone, len(offered))

    def test_blob_chunks(self):
        """They go with their states, where there is a foreign key that sees to it, and where there is none."""
        garbage, live = self.clusters(2)
        client = self.client()
        client.link(live.holder, live.one)
        chunk = "lo_from_bytea(0, 'x')" if 'Psycopg' in type(self).__name__ else "'x'"
        for oid in garbage.one, live.one:
            tid = u64(self.site.getTid(oid))
            self.run_sql(f'INSERT INTO blob_chunk (zoid, tid, chunk_num, chunk) VALUES ({u64(oid)}, {tid}, 0, {chunk})')
        self.pack()
        self.pack()
        rows = self.site._pool.attempt(lambda session: session.all('SELECT zoid FROM blob_chunk'))
        self.assertEqual(rows, [(u64(live.one),)])
        self.assertFalse(self.exists(garbage.one))
        self.ends()

    def test_stays_with_what_refers_to_it(self):
        """What is garbage for long enough stays where what is not refers to it: that might be linked again."""
        if self.keep_history:
            self.skipTest('of a database without history')
        with patch.object(pack, 'PRESENT', 0):
            old, new = self.clusters(2)
            client = self.client()
            client.link(new.holder, new.one)
            client.begin().link(new.one, old.one)
            self.pack(pack_time=time.time() - 100)
            client.begin().link(new.holder)         # unlinked now; old has been found before, and not again
            first = self.pack(pack_time=time.time() - 1e-4)
            self.assertEqual(first.objects, 1)      # new.two, which was garbage since it was unlinked by new.one
            self.assertTrue(self.exists(old.one) and self.exists(old.two))
            client.begin().link(new.holder, new.one)
            self.assertLessEqual({new.one, old.one, old.two}, self.ends())
            client.begin().link(new.holder)
            self.assertEqual(self.pack(pack_time=time.time() - 1e-4).objects, 0)        # unlinked now
            self.pack(pack_time=time.time() - 1e-4)
            self.assertFalse(self.exists(new.one) or self.exists(old.one) or self.exists(old.two))
            self.ends()


class Records(Suite):
    """What records may be like."""

    def stored(self, oid: bytes, state: bytes) -> None:
        """Replace a record behind relstore's back, as RelStorage does, or damage."""
        self.site._pool.attempt(lambda session: session.run(
            f'UPDATE object_state SET state = {self.mark}, state_size = {len(state)}, refs = NULL '
            f'WHERE zoid = {u64(oid)}', (state,)))
        for storage in self.site, self.storage:
            storage._cache.clear()

    @property
    def mark(self) -> str:
        return '?' if isinstance(self, SQLiteBackend) else '%s'

    def test_unreadable(self):
        """It is kept with all that it may refer to, and reported."""
        clusters = self.clusters(4)
        short, noise, compressed, control = clusters
        client = self.client()
        broken = {short: record(short.one)[:-6], noise: b'\xff\x00' * 20 + short.two + noise.one + b'\xfe' * 9,
                  compressed: b'.z' + zlib.compress(record(compressed.one)[:-3])}
        for cluster, state in broken.items():
            client.begin().link(cluster.holder, note='newest')
            self.stored(cluster.holder, state)
        for dry_run in True, False:
            report = self.storage.pack(None, dry_run=dry_run)
            self.assertEqual(report.unreadable, len(broken) if not self.keep_history else report.unreadable)
            self.assertGreaterEqual(report.unreadable, len(broken))
            self.assertLessEqual({u64(cluster.holder) for cluster in broken}, {oid for oid, _ in report.examples})
        for cluster in broken:
            self.assertTrue(self.exists(cluster.holder) and self.exists(cluster.one) and self.exists(cluster.two))
        self.assertFalse(self.exists(control.one))

    def test_kinds_of_references(self):
        """Classes that are gone and byte strings of Python 2 are understood; weak references, and those into another
        database, keep nothing."""
        clusters = self.clusters(5)
        gone, old, plain, weak, other = clusters
        kinds = {gone: (gone.one, None), old: old.one, plain: plain.one, weak: ['w', (weak.one,)],
                 other: ['m', ('elsewhere', other.one, PersistentMapping)]}
        client = self.client()
        for cluster, pid in kinds.items():
            client.begin().link(cluster.holder, note='newest')
            self.stored(cluster.holder, raw(pid, python2=cluster is old,
                                            class_name=b'nowhere\nNothing\n' if cluster is gone else None))
        report = self.pack()
        self.assertEqual(report.unreadable, 0)
        self.assertGreaterEqual(report.unread, len(kinds))
        kept = [self.exists(cluster.one) and self.exists(cluster.two) for cluster in clusters]
        self.assertEqual(kept, [True, True, True, False, False])

    def test_references_unknown_at_any_time(self):
        """Also of rows that were committed since the snapshot, and of those that are on the list."""
        for steps in ('begin_snapshot', 'new_pack', 'end_marking', 'lock_votes'), ('lock_votes', 'changes', 'sweep'):
            first, second, control = self.clusters(3)
            client = self.client()
            forget = 'UPDATE object_state SET refs = NULL'

            def act(n, name, first=first, second=second, client=client):
                if n == 0:
                    client.link(first.holder, first.one)
                    client.begin()
                self.run_sql(forget)

            with calls(self.packing, act, steps):
                self.pack(prepack_only=True)
                client.begin().link(second.holder, second.one)
                self.run_sql(forget)
                self.pack(skip_prepack=True)
            self.assertLessEqual({first.one, first.two, second.one, second.two}, self.ends())
            self.assertFalse(self.exists(control.one))

    def test_wrappers_say_whether_to_collect_garbage(self):
        """zc.zlibstorage and ZODB's HexStorage pass it on, as FileStorage takes it."""
        [cluster] = self.clusters(1)
        self.storage.pack(None, references, False)
        self.assertTrue(self.exists(cluster.one))
        self.storage.pack(None, references, None)
        self.assertFalse(self.exists(cluster.one))

    def test_wrapped(self):
        """Through a storage that compresses, or makes records hexadecimal, where references were not known."""
        storage = MVCCHexStorage(self.opened('wrapped'))
        db = ZODB.DB(storage)
        self.addCleanup(db.close)
        with db.transaction() as connection:
            connection.root()['kept'] = PersistentMapping(inner=PersistentMapping())
            connection.root()['gone'] = PersistentMapping()
        with db.transaction() as connection:
            gone = connection.root().pop('gone')._p_oid
        base = storage.base
        base._pool.attempt(lambda session: session.run('UPDATE object_state SET refs = NULL'))
        report = base.pack(None)
        self.assertGreater(report.unread, 0)
        self.assertEqual(report.unreadable, 0)
        with db.transaction() as connection:
            self.assertEqual(connection.root()['kept']['inner'].data, {})
        with self.assertRaises(POSKeyError):
            base.getTid(gone)

    def test_wrapped_by_what_nobody_told_of(self):
        """Such a record names nothing, so nobody knows what it refers to: not now, and not what was found out then."""
        wrapped = MVCCHexStorage(self.opened('wrapped'))
        db = ZODB.DB(wrapped)
        self.addCleanup(db.close)
        with db.transaction() as connection:
            connection.root()['kept'] = PersistentMapping(inner=PersistentMapping())
            connection.root()['gone'] = PersistentMapping()
        with db.transaction() as connection:
            gone = connection.root().pop('gone')._p_oid
        wrapped.base._pool.attempt(lambda session: session.run('UPDATE object_state SET refs = NULL'))
        bare = self.opened('wrapped')
        for options in {'dry_run': True}, {'prepack_only': True}, {}:
            with self.subTest(options), self.assertRaisesRegex(ConfigurationError, 'no pickles'):
                bare.pack(None, **options)
        self.assertGreater(bare.pack(None, gc=False).revisions, 0)
        survey = Survey(bare.database)
        for some in survey.ranges():
            self.assertEqual(survey.fill(*some).saved, 0)
        wrapped.base.pack(None)
        with closing(db.open()) as connection:
            connection.cacheMinimize()
            self.assertEqual(connection.root()['kept']['inner'].data, {})
        with self.assertRaises(POSKeyError):
            wrapped.base.getTid(gone)

    def test_unreadable_within_a_wrapper(self):
        """It may refer to what is within, not to what the wrapping looks like; and not all need be wrapped."""
        wrapped, plain, control = self.clusters(3)
        MVCCHexStorage(self.storage)
        client = self.client()
        for cluster in wrapped, plain:
            client.begin().link(cluster.holder, note='newest')
            state = record(cluster.one)[:-6]
            self.stored(cluster.holder, b'.h' + hexlify(state) if cluster is wrapped else state)
        report = self.pack()
        self.assertGreaterEqual(report.unreadable, 2)
        self.assertTrue(all(self.exists(oid) for c in (wrapped, plain) for oid in (c.one, c.two)))
        self.assertFalse(self.exists(control.one))


class Killed(Suite):
    """SIGKILL before each message to the database: it is consistent, the lock is free, and the next pack completes."""

    def test_client_is_killed_at_each_step(self):
        unfinished, step, done = 0, 0, False
        while not done:
            step += 1
            linked, control = self.clusters(2)
            client = Client(self.site)      # its application holds what it is about to link
            client.view.release()
            done = self.pack_until(step)
            with self.subTest(step):
                reachable(self.site)
                _, generation = self.site._pool.attempt(self.site._adapter.sweep_state)
                unfinished += generation != 0
                with suppress(*REFUSED):
                    client.begin().link(linked.holder, linked.one)
                client.view.release()
                self.until_free(self.pack)
                self.assertFalse(self.exists(control.one) or self.exists(control.two))
                self.ends()
        self.assertGreater(unfinished, 2)

    def test_linked_after_it_was_interrupted(self):
        """What is still there may refer to what is not: until that sweep has ended nobody may link it."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.finish(client.vote((cluster.one, record()), (cluster.two, record(cluster.one))))
        client.begin().link(cluster.holder, note='newer')

        def interrupt(n, name):
            if not self.exists(cluster.one):
                raise KeyboardInterrupt

        with patch.multiple(sweep, SMALLEST_STEP=1, FIRST_STEP=1, LARGEST_STEP=1), \
                calls(self.packing, interrupt, ['sweep']), self.assertRaises(KeyboardInterrupt):
            self.pack()
        self.assertTrue(self.exists(cluster.two))

        def link(n, name):
            with suppress(ConflictError, StorageError, POSKeyError):
                client.begin().link(cluster.holder, cluster.two)

        with calls(self.packing, link):
            self.pack()
        self.ends()

    def interrupted(self) -> list[bytes]:
        """Begin a sweep of three clusters, and end in the middle of it. Return what is left of them."""
        clusters = self.clusters(3)
        removed = itertools.count()

        def interrupt(n, name):
            if next(removed) == 2:
                raise KeyboardInterrupt

        with patch.multiple(sweep, SMALLEST_STEP=1, FIRST_STEP=1, LARGEST_STEP=1), \
                calls(self.packing, interrupt, ['sweep']), self.assertRaises(KeyboardInterrupt):
            self.pack()
        left = [oid for cluster in clusters for oid in (cluster.one, cluster.two) if self.exists(oid)]
        self.assertGreater(len(left), 1)
        return left

    def test_garbage_is_not_to_be_removed_any_more(self):
        """Somebody stops a pack because pack-gc should have been false."""
        left = self.interrupted()
        careful = self.opened(pack_gc=False)
        with self.assertRaisesRegex(ConfigurationError, 'was interrupted.*Let one with pack-gc true'):
            careful.pack(None)
        self.assertTrue(all(map(self.exists, left)))
        with self.assertRaises(ConflictError):      # what it refers to may have gone
            self.client().link(z64, *left)
        self.pack()
        careful.pack(None)
        self.assertFalse(any(map(self.exists, left)))

    def test_prepare_after_an_interrupted_sweep(self):
        left = self.interrupted()
        with self.assertRaisesRegex(ConfigurationError, 'was interrupted'):
            self.pack(prepack_only=True)
        self.assertTrue(all(map(self.exists, left)))
        report = self.pack()
        self.assertFalse(any(map(self.exists, left)))
        self.assertEqual((report.objects, report.states), (0, 0))       # of this one

    def test_opened_to_relstorage_after_an_interrupted_sweep(self):
        """It does not see what may not be linked."""
        self.interrupted()
        adapter = self.site._adapter
        with self.assertRaisesRegex(ConfigurationError, 'was interrupted .* let one come to its end first'):
            adapter.set_writers('any')
        self.assertEqual(adapter.writers(), 'relstore')
        self.pack()
        adapter.set_writers('any')
        self.assertEqual(adapter.writers(), 'any')
        adapter.set_writers('relstore')

    def pack_until(self, step: int) -> bool:
        """Pack in a process that is killed before its nth message. Return whether it was done before."""
        process = FORK.Process(target=self._pack_until, args=(step,))
        process.start()
        process.join(60)
        self.assertIn(process.exitcode, (0, -signal.SIGKILL))
        return process.exitcode == 0

    def _pack_until(self, step: int) -> None:
        storage = self.open_storage()
        messages, do = itertools.count(1), Session._do

        def send(session, act, *arguments):
            if next(messages) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(session, act, *arguments)

        with patch.object(Session, '_do', send):
            storage.pack(None)
        os._exit(0)

    def until_free(self, work: Callable[[], object]) -> None:
        """A server needs a moment to see that a client is gone."""
        deadline = time.monotonic() + 10
        while True:
            try:
                work()
                return
            except Unavailable as e:
                if 'being packed by' not in str(e) or time.monotonic() > deadline:
                    raise


class Together(Suite):
    """Two packs, and a pack beside what takes long."""

    def test_two_packs(self):
        [cluster] = self.clusters(1)
        told = []

        def pack_too():
            with self.assertRaisesRegex(Unavailable, r'packed by (the process|the server process|connection) \d+'):
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

        nobody = patch.object(type(self.site._adapter), 'lock_pack', lambda adapter, session: None)
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
            with before(other._adapter, 'new_pack', wait), \
                    self.assertRaisesRegex(Unavailable, 'packed by somebody else'):
                other.pack(None)
            done.append(True)

        def link():
            go_on.set()
            thread.join()
            with self.assertRaises(ConflictError):
                client.begin().link(cluster.holder, cluster.one)

        done, thread = [], threading.Thread(target=pack_there)
        with patch.object(type(self.site._adapter), 'lock_pack', lambda adapter, session: None), \
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
        earlier = self.packing.last_pack(session)
        self.pack(skip_prepack=True)
        [cluster] = self.clusters(1)
        client.begin()

        def end():
            self.packing.lock_votes(session, 3)
            with self.assertRaisesRegex(Unavailable, 'ended by somebody else'):
                self.packing.end_sweep(session, earlier)
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

        with patch.object(type(self.site._adapter), 'message_size', 50_000):
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
        adapter = self.site._adapter

        def act():
            with self.assertRaisesRegex(Unavailable, r'is being packed by .* \d+.*; empty it afterwards\.'):
                self.site.zap_all()
            with self.assertRaisesRegex(Unavailable, r'is being packed by .* \d+.*; say so afterwards\.'):
                adapter.set_writers('any')
            adapter.set_writers('relstore')

        for step in 'add_garbage', 'sweep':
            [cluster] = self.clusters(1)
            with before(self.packing, step, act):
                self.pack()
            self.assertFalse(self.exists(cluster.one))
        adapter.set_writers('any')
        self.assertEqual(adapter.writers(), 'any')
        adapter.set_writers('relstore')
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
        """ZODB's own doctest, but for its blobs, which are not there yet, and for older revisions without history."""
        path = Path(PackableStorage.__file__).parent / 'IExternalGC.test'
        text = path.read_text().replace("ZODB.blob.Blob(b'some data')", 'conn.root().__class__()')
        text = re.sub(r'    >>> with open\(storage.loadBlob.*\n.*\n', '', text)
        text = re.sub(r'    >>> storage.loadBlob(.*\n)+?\n', '', text)
        self.assertNotIn('Blob', text.partition('create_storage()')[2])
        if not self.keep_history:
            text = re.sub(r'    >>> storage.loadBefore(.*\n)+?\n', '', text)
        globs = {'create_storage': lambda: self.opened('external', pack_gc=False), 'ZODB': ZODB}
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
        return self.site._pool.attempt(lambda session: session.one(f'SELECT count(*) FROM {table}'))[0]

    def test_beside_relstorage(self):
        """Where it may write, a pack to the present is refused, however it comes about; one to yesterday works."""
        if isinstance(self, SQLiteBackend):
            self.skipTest('RelStorage and relstore never use one directory at once')
        self.clusters(1)
        self.pack(prepack_only=True)
        self.say_who_writes('any')
        try:
            for options in {}, {'prepack_only': True}, {'skip_prepack': True}:
                with self.subTest(options), patch.object(pack, 'PRESENT', 0), \
                        self.assertRaisesRegex(ConfigurationError, 'RelStorage .* may write'):
                    self.pack(**options)        # what was prepared as of the present is that of long ago by now
            with late(self.packing, 'lock_pack'), \
                    self.assertRaisesRegex(ConfigurationError, 'RelStorage .* may write'):
                self.pack(pack_time=time.time())
            self.pack(pack_time=time.time() - 86400)
            self.opened(pack_gc=False).pack(None)
            cluster, other = self.clusters(2)
            client = self.client()
            with patch.object(pack, 'PRESENT', 0), patch.object(sweep, 'ROWS', 1):
                self.pack(pack_time=time.time() - 1e-4, prepack_only=True)

                def link():     # as RelStorage does, who looks at nothing
                    with patch.object(type(self.site._adapter), 'going', lambda *arguments: []):
                        client.begin().link(other.holder, note='more than is read at a time')
                        client.begin().link(cluster.holder, cluster.one)

                with before(self.packing, 'last_tid', link):        # before the first step
                    self.pack(skip_prepack=True)
            self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        finally:
            self.say_who_writes('relstore')

    def say_who_writes(self, who: str) -> None:
        self.site._pool.attempt(lambda session: session.run(self.site._adapter.sql.set_meta, ('writers', who)))

    def test_transactions_that_are_named(self):
        """Where RelStorage's foreign key is, a transaction stays as long as a kept revision replaced one of it."""
        if not self.keep_history or 'Psycopg' not in type(self).__name__:
            self.skipTest('RelStorage has that key on PostgreSQL, where history is kept')
        self.run_sql('ALTER TABLE object_state ADD CONSTRAINT by_relstorage '
                     'FOREIGN KEY (prev_tid) REFERENCES transaction')
        try:
            [cluster] = self.clusters(1)
            client = self.client()
            tids = [client.begin().link(cluster.holder, note=note) for note in range(4)]
            self.pack()
            rows = self.site._pool.attempt(lambda session: session.all('SELECT tid FROM transaction'))
            stays = {tid for tid, in rows}
            self.assertIn(u64(tids[2]), stays)
            self.assertNotIn(u64(tids[1]), stays)
            client.begin().link(cluster.holder)
            self.pack()
            self.ends()
        finally:
            self.run_sql('ALTER TABLE object_state DROP CONSTRAINT by_relstorage')


class Copied(Suite):
    """What was prepared on a copy of the database is used on the original, if it fits."""

    def copy(self) -> relstore.RelStore:
        if isinstance(self, SQLiteBackend):
            shutil.copytree(self._directory / 'main', self._directory / 'copy')
        else:
            self.adapter('copy')
            self.in_shell(self.copying)
        return self.opened('copy')

    def bring_back(self) -> None:
        """As the documentation says."""
        if isinstance(self, SQLiteBackend):
            self.replace()
        else:
            blocks = re.findall('(?m)(?:^ {4}.*\n)+', README.read_text())
            [commands] = [block for block in blocks if 'relstore_garbage' in block and self.program in block]
            self.in_shell(commands)

    def replace(self) -> None:
        """Bring it back by other means than the documentation's, which look at nothing."""
        if not isinstance(self, SQLiteBackend):
            self.in_shell(self.replacing)
            return
        with closing(sqlite3.connect(self._directory / 'main' / 'main.sqlite3')) as connection:
            connection.execute('ATTACH ? AS copy', (str(self._directory / 'copy' / 'main.sqlite3'),))
            with connection:
                for table in 'relstore_pack', 'relstore_garbage':
                    connection.execute(f'DELETE FROM {table}')
                    connection.execute(f'INSERT INTO {table} SELECT * FROM copy.{table}')

    def in_shell(self, commands: str) -> None:
        """Run what an operator would. ORIGINAL and COPY lead to the databases."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(('PG', 'MYSQL'))} | {
            'ORIGINAL': self.address('main'), 'COPY': self.address('copy'), 'HOME': tempfile.gettempdir()}
        subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', commands], check=True, env=environment, stdout=subprocess.DEVNULL)

    def test_original_went_on(self):
        linked, changed, control = self.clusters(3)
        self.copy().pack(None, prepack_only=True)
        client = self.client()
        client.link(linked.holder, linked.one)
        client.begin().link(changed.one, changed.two)
        self.bring_back()
        self.pack(skip_prepack=True)
        self.assertLessEqual({linked.one, linked.two}, self.ends())
        self.assertTrue(self.exists(changed.one) and self.exists(changed.two))
        self.assertFalse(self.exists(control.one))

    def test_copy_went_on(self):
        """Alone, or both: in the original nothing may go that was garbage in the copy."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.link(cluster.holder, cluster.one)
        copy = self.copy()
        self.client(copy).link(cluster.holder)
        copy.pack(None, prepack_only=True)
        self.bring_back()
        for both in False, True:
            if both:
                client.begin().link(z64, cluster.holder, note='went on')
            with self.assertRaisesRegex(ConfigurationError, 'another state of it'):
                self.pack(skip_prepack=True)
            self.assertLessEqual({cluster.one, cluster.two}, self.ends())

    def test_copy_was_packed_before(self):
        """Its sweeps have numbers of their own."""
        [first] = self.clusters(1)
        copy = self.copy()
        copy.pack(None)
        copy.pack(None, prepack_only=True)
        client = self.client()
        self.bring_back()
        self.pack(skip_prepack=True)
        for _ in range(2):
            client.begin().link(first.holder)       # learns of the sweep, and then drops what it removed
        self.pack()
        client.begin().link(first.holder)
        client.begin()
        self.ends()

    def test_original_was_packed_meanwhile(self):
        """To another time, and more became garbage, or is it no longer."""
        linked, garbage, control = self.clusters(3)
        copy = self.copy()
        copy.pack(None, prepack_only=True)
        client = self.client()
        client.link(linked.holder, linked.one)
        client.begin().link(z64, linked.holder, garbage.holder)
        self.pack()
        self.bring_back()
        tables = self.tables()
        self.pack(skip_prepack=True)
        self.assertEqual(self.tables(), tables)
        self.assertLessEqual({linked.one, linked.two}, self.ends())
        self.assertFalse(self.exists(control.one) or self.exists(garbage.one))
        client.begin().link(linked.holder)
        self.pack()
        self.assertFalse(self.exists(linked.one))
        self.ends()

    def tables(self) -> list[list[tuple]]:
        """Return all that a pack may remove."""
        names = ['object_state', 'current_object'] if self.keep_history else ['object_state']
        return [self.site._pool.attempt(lambda session, name=name: session.all(f'SELECT * FROM {name} ORDER BY 1, 2'))
                for name in names]

    def test_used_once(self):
        self.clusters(1)
        self.pack(prepack_only=True)
        self.pack(skip_prepack=True)
        with self.assertRaisesRegex(ConfigurationError, 'run a pre-pack'):
            self.pack(skip_prepack=True)

    def test_used_twice(self):
        """Brought back once more, there is nothing in it that could still go."""
        linked, control, _ = self.clusters(3)
        self.copy().pack(None, prepack_only=True)
        client = self.client()
        client.link(linked.holder, linked.one)
        self.bring_back()
        report = self.pack(skip_prepack=True)
        self.assertEqual(report.spared, 2)
        self.assertFalse(self.exists(control.one) or self.exists(control.two))
        client.begin().link(control.holder, linked.one)
        client.begin().link(linked.holder)
        self.bring_back()
        self.assertEqual(self.pack(skip_prepack=True).states, 0)
        self.assertLessEqual({linked.one, linked.two}, self.ends())

    def test_original_was_interrupted(self):
        """While it removed what another list names: that of the copy does not take its place."""
        cluster, _ = self.clusters(2)
        copy = self.copy()
        client = self.client()
        client.link(cluster.holder, cluster.one)
        self.client(copy).link(cluster.holder, note='went on')
        with before(self.packing, 'sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        copy.pack(None, prepack_only=True)
        self.replace()
        for options in {'skip_prepack': True}, {'prepack_only': True}:
            with self.subTest(options), self.assertRaisesRegex(ConfigurationError, 'another list'):
                self.pack(**options)
        with self.assertRaisesRegex(ConfigurationError, 'another list'):
            self.opened(pack_gc=False).pack(None)
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        self.pack()
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        self.assertEqual(self.pack(dry_run=True).objects, 0)

    def test_links_while_nobody_knows_what_is_going(self):
        """The list of a sweep that was interrupted is gone, and told votes which objects may not be linked."""
        first, second = self.clusters(2)
        copy, client, other = self.copy(), self.client(), self.client()
        client.link(first.holder, note='newer')
        with patch.multiple(sweep, SMALLEST_STEP=1, FIRST_STEP=1, LARGEST_STEP=1), \
                calls(self.packing, lambda *_: self.exists(first.one) or self.interrupt(), ['sweep']), \
                self.assertRaises(KeyboardInterrupt):
            self.pack()
        copy.pack(None, prepack_only=True)
        self.replace()
        new = self.site.new_oid()
        for target in first.two, second.one, second.holder:
            for _ in range(2):      # no retry mends it
                with self.assertRaisesRegex(ConfigurationError, 'run a pack to the present with pack-gc true'):
                    client.begin().link(first.holder, target)
        client.begin().link(z64, first.holder, second.holder, note='links that are there already')
        client.begin().finish(client.vote((first.holder, record(new)), (new, record(new))))
        with self.assertRaises(ConfigurationError):     # moved: what has it may be garbage
            client.begin().vote((first.holder, record()), (z64, record(first.holder, second.holder, new)))
        with self.assertRaisesRegex(ConfigurationError, r'to the present \(--days 0\)'):
            self.pack(pack_time=time.time() - 1000)
        other.begin().link(second.one, second.two, note='garbage is changed')
        if not self.keep_history:       # where the newest transaction stays, whatever it has changed
            with self.assertRaisesRegex(Unavailable, 'were changed lately'):
                self.pack()
        other.begin().link(second.holder, note='the newest')

        def change():
            other.begin().link(second.one, second.two, note='after it was marked')
            other.begin().link(second.holder, note='the newest')

        with before(self.packing, 'lock_votes', change), self.assertRaisesRegex(Unavailable, 'were changed lately'):
            self.pack()
        self.pack()
        self.assertFalse(any(map(self.exists, (first.one, first.two, second.one, second.two))))
        client.begin().link(first.holder, new, second.holder)
        self.ends()

    def test_documentation_refuses_to_replace_the_list_of_an_interrupted_sweep(self):
        """Its commands change nothing then, nor where the copy cannot be read."""
        if isinstance(self, SQLiteBackend):
            self.skipTest('there are no commands for it')
        [cluster] = self.clusters(1)
        copy = self.copy()
        copy.pack(None, prepack_only=True)
        with before(self.packing, 'sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        rows = self.lists()
        self.assertTrue(all(rows))
        with self.assertRaises(subprocess.CalledProcessError):
            self.bring_back()
        self.assertEqual(self.lists(), rows)
        with self.assertRaises(ConflictError):
            self.client().link(cluster.holder, cluster.one)
        self.pack()
        rows = self.lists()
        copy._pool.attempt(lambda session: session.run('ALTER TABLE relstore_pack RENAME TO elsewhere'))
        with suppress(subprocess.CalledProcessError):
            self.bring_back()
        self.assertEqual(self.lists(), rows)

    def lists(self) -> list[list[tuple]]:
        return [self.site._pool.attempt(lambda session, name=name: session.all(f'SELECT * FROM {name} ORDER BY 1, 2'))
                for name in ('relstore_garbage', 'relstore_pack')]

    def test_list_is_replaced_just_before_the_sweep(self):
        """A sweep whose list is not there would remove something else."""
        [cluster] = self.clusters(1)
        copy = self.copy()
        copy.pack(None, prepack_only=True)
        with before(self.packing, 'lock_votes', self.replace), \
                self.assertRaisesRegex(Unavailable, 'Another list has taken the place'):
            self.pack()
        self.assertTrue(self.exists(cluster.one))
        self.pack()
        self.assertFalse(self.exists(cluster.one))

    def test_original_was_interrupted_and_its_list_is_gone(self):
        """Nobody knows what it has removed. Who may hold that has all looked up that it links."""
        [cluster] = self.clusters(1)
        copy, client = self.copy(), self.client()
        with before(self.packing, 'end_sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        self.assertFalse(self.exists(cluster.one))
        copy.pack(None, prepack_only=True)
        self.replace()
        self.pack()
        client.begin()
        with self.assertRaises(REFUSED):
            client.begin().link(cluster.holder, cluster.one)

    def interrupt(self) -> None:
        raise KeyboardInterrupt


class ServerKilled(Suite):
    """SIGKILL of all its processes, before a message of a pack to it."""

    def test_server_is_killed_at_each_step(self):
        """It is consistent, what was committed before is there, and the next pack completes.

        Where THOROUGH before each message, else before each that changes something, and the one after them.
        """
        messages: list[str] = []
        self.prepare_and_sweep(*self.new_site(), messages.append)
        changes = [n for n, message in enumerate(messages) if CHANGES.search(message)]
        self.assertGreater(len(changes), 10, messages)
        unfinished = 0
        for step in range(len(messages)) if THOROUGH else [*changes, changes[-1] + 1]:
            linked, control, kept, pack_time = self.new_site()
            told = itertools.count()

            def tell(message, step=step, told=told):
                if next(told) == step:
                    self.server.kill()
                    self.server.start()

            with self.subTest(step=step, message=messages[step]):
                with suppress(Unavailable, Disconnected):
                    self.prepare_and_sweep(linked, control, kept, pack_time, tell)
                if step <= changes[-1]:     # after that there may be a message more or less
                    self.assertGreater(next(told), step)
                client = self.client()
                self.assertLessEqual({linked.holder, control.holder}, reachable(self.site))
                self.assertEqual(client.view.load(control.holder), (record(note='kept'), kept))
                _, generation = self.site._pool.attempt(self.site._adapter.sweep_state)
                unfinished += generation != 0
                with suppress(ConflictError, POSKeyError):
                    client.link(linked.holder, linked.one, note='again')
                if self.keep_history:
                    self.undo(kept)
                self.pack()
                self.assertEqual(self.objects(), set(map(u64, self.ends())))
                self.assertFalse(self.exists(control.one) or self.exists(control.two))
                left = self.pack(dry_run=True)
                self.assertEqual((left.objects, left.older, left.later), (0, 0, 0))
        self.assertGreater(unfinished, 2)

    def new_site(self) -> tuple[Cluster, Cluster, bytes, float | None]:
        """Return two clusters, the tid of a commit after the pack time, and that; references of one are not known."""
        linked, control = self.clusters(2)
        unlinked = self.storage.lastTransaction()
        self.run_sql(f'UPDATE object_state SET refs = NULL WHERE zoid = {u64(control.one)}')
        kept = self.client().link(control.holder, note='kept')
        return linked, control, kept, (timestamp(unlinked) + timestamp(kept)) / 2 if self.keep_history else None

    def prepare_and_sweep(
        self, linked: Cluster, control: Cluster, kept: bytes, pack_time: float | None, tell: Callable[[str], None]
    ) -> None:
        """Pack in two phases, and link a cluster between them. Tell each message of the packs before it is sent."""
        do = Session._do

        def send(session, act, *arguments):
            tell(next((argument for argument in arguments if isinstance(argument, str)), act.__name__))
            return do(session, act, *arguments)

        with patch.object(Session, '_do', send):
            self.pack(pack_time=pack_time, prepack_only=True)
        self.client().link(linked.holder, linked.one)
        with patch.object(Session, '_do', send):
            self.assertEqual(self.pack(skip_prepack=True).spared, 2)

    def test_server_is_killed_while_others_commit(self):
        """What they were told is committed is there, and whatever it refers to."""
        for step, nth in ('end_marking', 0), ('lock_votes', 0), ('garbage_end', 1):
            [control] = self.clusters(1)
            committed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            known, restarted = [], threading.Event()

            def crash(committed=committed, known=known, restarted=restarted):
                known += [committed.get(timeout=60) for _ in range(3)]
                self.server.kill()
                self.server.start()
                restarted.set()

            writer = threading.Thread(target=self.commit_until, args=(restarted, control.holder, committed))
            with self.subTest(step):
                writer.start()
                try:
                    with before(self.packing, step, crash, nth), suppress(Unavailable, Disconnected):
                        self.pack()
                finally:
                    restarted.set()
                    writer.join()
                while not committed.empty():
                    known.append(committed.get())
                self.assertGreater(len(known), 2)
                self.assertLessEqual(set(known), self.ends())
                self.pack()
                self.assertLessEqual(set(known), self.ends())
                self.assertEqual(self.objects(), set(map(u64, self.ends())))
                self.assertFalse(self.exists(control.one) or self.exists(control.two))

    def commit_until(self, over: threading.Event, holder: bytes, committed: queue.SimpleQueue) -> None:
        """Add one object after the other to a chain, until a commit fails; put in a queue what was acknowledged."""
        with closing(self.open_storage()) as storage, suppress(Unavailable, OutcomeUnknown):
            client, last = Client(storage), ()
            while not over.is_set():
                new = storage.new_oid()
                client.finish(client.vote((holder, record(new)), (new, record(*last))))
                committed.put(new)
                last = (new,)
                client.begin()

    def objects(self) -> set[int]:
        rows = self.site._pool.attempt(lambda session: session.all('SELECT zoid FROM object_state'))
        return {oid for oid, in rows}


class Pooled(TestCase):

    def test_refused(self):
        """The lock of packs belongs to a session, and that to the pooler."""
        storage = self.open_storage()
        self.addCleanup(storage.close)
        with self.assertRaisesRegex(ConfigurationError, 'a dsn that leads to the server itself'):
            storage.pack(None)
        storage.pack(None, dry_run=True)


cases(globals(), Relinked, backends=[backend for backend in BACKENDS if not backend.keep_history])
cases(globals(), Interleaved, Door, Since, Memory, Deleted, Readers, backends=BACKENDS)
cases(globals(), Field, Records, Killed, Together, Limits, backends=BACKENDS)
cases(globals(), ServerKilled, backends=DURABLE)
cases(globals(), Copied, backends=BACKENDS[:2] + (DURABLE if THOROUGH else (DURABLE[0], DURABLE[3])))
cases(globals(), Pooled, backends=(Psycopg2PooledHistoryPreserving, Psycopg3PooledHistoryFree))
del Suite, Relinked, Interleaved, Door, Since, Memory, Deleted, Readers, Field, Records, Killed, Together, Limits
del Copied, ServerKilled, Pooled
