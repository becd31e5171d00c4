"""A pack is killed, or its server: nothing that can be reached is lost, and the next pack completes it."""
import itertools
import multiprocessing
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from unittest.mock import patch

from ZODB.POSException import ConflictError, POSKeyError, StorageError
from ZODB.utils import u64, z64

from relstore.errors import ConfigurationError, Disconnected, OutcomeUnknown, Unavailable
from relstore.packing import sweep
from relstore.tests.support import sent
from relstore.tests.support.backends import THOROUGH, cases
from relstore.tests.support.objects import Client, reachable
from relstore.tests.support.packing import BACKENDS, DURABLE, REFUSED, Cluster, Suite, before, calls, timestamp
from relstore.tests.support.records import record

FORK = multiprocessing.get_context('fork')
# Messages of a pack that change something.
CHANGES = re.compile(r'(?m)^(INSERT|UPDATE|DELETE|COMMIT)\b|relstore_(sweep|forget)_\d+')


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
                _, generation = self.site.database.pool.attempt(self.site.database.adapter.sweeps.state)
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
        adapter = self.site.database.adapter
        with self.assertRaisesRegex(ConfigurationError, 'was interrupted .* let one come to its end first'):
            adapter.writers.set('any')
        self.assertEqual(adapter.writers.who(), 'relstore')
        self.pack()
        adapter.writers.set('any')
        self.assertEqual(adapter.writers.who(), 'any')
        adapter.writers.set('relstore')

    def pack_until(self, step: int) -> bool:
        """Pack in a process that is killed before its nth message. Return whether it was done before."""
        process = FORK.Process(target=self._pack_until, args=(step,))
        process.start()
        process.join(60)
        self.assertIn(process.exitcode, (0, -signal.SIGKILL))
        return process.exitcode == 0

    def _pack_until(self, step: int) -> None:
        storage = self.open_storage()
        messages = itertools.count(1)

        def send(text, arguments):
            if next(messages) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        with sent.told(send):
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
                _, generation = self.site.database.pool.attempt(self.site.database.adapter.sweeps.state)
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
        def send(text, arguments):
            tell(text)

        with sent.told(send):
            self.pack(pack_time=pack_time, prepack_only=True)
        self.client().link(linked.holder, linked.one)
        with sent.told(send):
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
        rows = self.site.database.pool.attempt(lambda session: session.all('SELECT zoid FROM object_state'))
        return {oid for oid, in rows}


# One mode of each database in an ordinary run: the steps are the same.
cases(globals(), Killed, backends=(BACKENDS[0], *BACKENDS[3:5]), thorough=(*BACKENDS[1:3], BACKENDS[5]))
cases(globals(), ServerKilled, backends=DURABLE)
del Killed, ServerKilled
