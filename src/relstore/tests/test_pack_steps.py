"""A pack loses nothing that can be reached, whatever others commit between which of its steps.

The packer is stopped at each of its calls to the adapter, one after the other, while others commit. What is garbage is
made of clusters, see Cluster. Whoever links one again has to keep all of it, or is told of a conflict.
"""
import time
from contextlib import closing, suppress
from unittest.mock import Mock, patch

from ZODB.POSException import ConflictError

from relstore.errors import LockTimeout, Unavailable
from relstore.packing import pack, sweep
from relstore.tests.support.backends import SQLiteBackend, cases
from relstore.tests.support.objects import reachable
from relstore.tests.support.packing import BACKENDS, REFUSED, Suite, before, calls, late, patched
from relstore.tests.support.records import record


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

            with calls(self.packing, act), patch.object(sweep, 'DOOR_SECONDS', 0.01):
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

            with patch.multiple(sweep, AT_THE_DOOR=2, OPEN_AGAIN_SECONDS=0, ROWS=2, DOOR_TRIES=tries), \
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
            lock_votes = self.packing.lock_votes

            def link(linking=linking, client=client):
                client.begin().link(*linking.pop(0))

            def lock(session, timeout, at_the_door=at_the_door, linking=linking, link=link, lock_votes=lock_votes):
                if len(linking) == 2:
                    link()
                lock_votes(session, timeout)
                at_the_door.append(0)

            def follow(revisions, oids, at_the_door=at_the_door, outside=outside, linking=linking, link=link):
                if revisions.args[0]._session.in_transaction:
                    at_the_door[-1] += len(oids)
                else:
                    outside.append(len(oids))
                    if linking:
                        link()
                return revisions(oids)

            with patch.multiple(sweep, AT_THE_DOOR=2, OPEN_AGAIN_SECONDS=0, DOOR_TRIES=tries), \
                    patch.object(self.packing, 'lock_votes', lock), \
                    patched(self.packing, 'garbage_revisions', follow):
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

        def take_long(spare, oids):
            nonlocal now
            spare(oids)
            now += 1

        with before(self.packing, 'lock_votes', lambda: client.link(linked.holder, linked.one)), \
                patched(self.packing, 'spare', take_long), \
                patch.object(sweep, 'time', Mock(wraps=time, monotonic=lambda: now)):
            report = self.pack()
        self.assertEqual(report.spared, 2)
        self.assertLessEqual({linked.one, linked.two}, self.ends())
        self.assertFalse(self.exists(control.one))

    def test_the_door_is_lost_again(self):
        """What was taken off the list in a transaction that is rolled back has to be taken off once more."""
        [cluster] = self.clusters(1)
        client, tries = self.client(), []

        def link_and_lock(lock_votes, session, timeout):
            if not tries:
                client.begin().link(cluster.holder, cluster.one)
            lock_votes(session, timeout)

        def fail_once(start_sweep, prepared, now):
            tries.append(prepared)
            if len(tries) == 1:
                raise LockTimeout('for once')
            start_sweep(prepared, now)

        with patched(self.packing, 'lock_votes', link_and_lock), \
                patched(self.packing, 'start_sweep', fail_once):
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
            with before(impatient.database.adapter, 'garbage_end',
                        lambda: voted.append(client.vote((cluster.holder, record(note='slow'))))), \
                    self.assertRaises(LockTimeout):
                impatient.pack(None)
            _, generation = self.site.database.pool.attempt(self.site.database.adapter.sweeps.state)
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
                self.assertLessEqual(max(waits), sweep.LONGEST_DOOR_SECONDS)
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
        present = patch.object(pack, 'PRESENT_SECONDS', 0)      # else a second ago is the present
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
        with patch.object(pack, 'PRESENT_SECONDS', 10), late(self.packing, 'lock_pack'):
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


cases(globals(), Interleaved, Door, Since, backends=BACKENDS)
del Interleaved, Door, Since
