"""Four processes move links between what can be reached and what cannot, while packs of all kinds run and are killed.

Nothing that can be reached may ever be missing. RELSTORE_PACK_SEED says what is chosen at random, and is printed; which
process is how far when, it does not say. RELSTORE_PACK_SECONDS says how long each storm takes: the two seconds of every
run show that it runs, and a night of them shows more.

    RELSTORE_PACK_SECONDS=600 make test TESTS='-m test_pack_storm'
"""
import collections
import multiprocessing
import os
import random
import shutil
import tempfile
import time
import traceback
from contextlib import closing, suppress
from unittest import TestCase
from unittest.mock import patch

from ZODB.POSException import ConflictError, POSKeyError, StorageError, UndoError
from ZODB.utils import u64, z64

import relstore
from relstore.errors import LockTimeout, Unavailable
from relstore.packing import pack, sweep
from relstore.tests.support.backends import THOROUGH, MySQLdbHistoryFree, MySQLdbHistoryPreserving, cases
from relstore.tests.support.commits import transaction_of
from relstore.tests.support.crowded import Crowded
from relstore.tests.support.objects import Client, linked, reachable
from relstore.tests.support.packing import BACKENDS
from relstore.tests.support.places import Place, place_of
from relstore.tests.support.records import record
from relstore.tests.support.servers import MemcachedServer, memcached_program

SECONDS = float(os.environ.get('RELSTORE_PACK_SECONDS', 2))
SEED = int(os.environ.get('RELSTORE_PACK_SEED') or random.randrange(1 << 32))
WRITERS, HOLDERS, STONES = 4, 12, 60
PATIENCE = 60
STEPS = {'SMALLEST_STEP': 5, 'FIRST_STEP': 5, 'LARGEST_STEP': 10}

# Forked from one that has imported everything.
FORKED = multiprocessing.get_context('forkserver')
FORKED.set_forkserver_preload([__name__])


class Writer:
    """One process. Each of its two connections changes a few objects at a time, in a view that may be old."""

    def __init__(self, place: Place, options: dict, number: int, holders: list[bytes], stones: list[bytes]):
        self._chance = random.Random(SEED + number)
        self._place, self._options, self._holders = place, options, holders
        self._known = list(stones)      # what it has seen, reachable or not
        self._undoable: list[bytes] = []
        self.done: collections.Counter[str] = collections.Counter()
        self._open()

    def _open(self) -> None:
        address = getattr(relstore, self._place.adapter)(**self._place.arguments)
        self._storage = relstore.RelStore(address, keep_history=self._place.keep_history, **self._options)
        self._clients = [Client(self._storage) for _ in range(2)]

    def close(self) -> None:
        for client in self._clients:
            client.view.release()
        self._storage.close()

    def step(self) -> None:
        chance, client = self._chance, self._chance.choice(self._clients)
        what = chance.choices(['link', 'undo', 'open again'], [200, 20 * self._place.keep_history, 1])[0]
        try:
            if chance.random() < 0.7:
                client.begin()
            if what == 'link':
                self._link(client)
            elif what == 'undo':
                self._undo(client)
            else:
                self.close()
                self._open()
                self._known = list(self._holders)       # a connection that begins now has not seen what is gone
            self.done[what] += 1
        except (ConflictError, POSKeyError, UndoError, LockTimeout, Unavailable) as e:
            self.done[type(e).__name__] += 1
            client.begin()
        except StorageError as e:
            if 'is not there' not in str(e):        # what it knows is gone, and no view will have it
                raise
            self.done['gone'] += 1
            client.begin()

    def _link(self, client: Client) -> None:
        """Have some objects refer to others: to new ones, to what they see, to what they know, or to nothing."""
        chance, changes, created = self._chance, {}, []
        for oid in chance.sample(self._holders, chance.randint(1, 3)):
            seen = linked(client.load(oid))
            for stone in seen[:2]:
                with suppress(POSKeyError):
                    seen += linked(client.load(stone))
            self._known += seen
            kept = chance.sample(seen, min(len(seen), chance.randint(0, 2)))
            new = [self._storage.new_oid() for _ in range(chance.randint(0, 2))]
            for stone in new:
                changes[stone] = record(*chance.sample(self._known, chance.randint(0, 2)))
            changes[oid] = record(*kept, *new, *chance.sample(self._known, chance.randint(0, 1)))
            created += new
        if chance.random() < 0.3:
            stone = chance.choice(self._known)
            client.load(stone)
            changes[stone] = record(*chance.sample(self._known, chance.randint(0, 2)))
        self._known = chance.sample(self._known, min(len(self._known), STONES))
        txn = client.vote(*changes.items())
        if chance.random() < 0.2:
            time.sleep(chance.random() / 20)        # a slow transaction, of several databases
        tid = client.finish(txn)
        self._known += created
        if not created:
            self._undoable.append(tid)

    def _undo(self, client: Client) -> None:
        """To undo that something was created would remove it, whoever refers to it by now."""
        if self._undoable:
            with transaction_of(client.view) as txn:
                client.view.undo(self._chance.choice(self._undoable[-20:]), txn)


def write(ready, results, *arguments) -> None:
    done: collections.Counter[str] = collections.Counter()
    try:
        writer = Writer(*arguments)
        done = writer.done
        with closing(writer):
            # Nothing is removed before: what a connection has not seen itself it does not link.
            ready.wait(PATIENCE)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                writer.step()
    except Exception:
        done[traceback.format_exc()] += 1
    results.put(done)


def pack_in_child(place: Place, options: dict) -> None:
    with patch.multiple(sweep, **STEPS), closing(place.open()) as storage, suppress(Unavailable):
        storage.pack(None, **options)


class Storm(TestCase):

    def setUp(self):
        super().setUp()
        self.chance = random.Random(SEED)
        self.place = place_of(self)
        directory = tempfile.mkdtemp(prefix='relstore-storm-')
        self.addCleanup(shutil.rmtree, directory)
        self.options = {'cache_local_dir': directory, 'commit_lock_timeout': 5}
        if memcached_program():
            server = MemcachedServer()
            self.addCleanup(server.stop)
            server.start()
            self.options |= {'cache_servers': server.where, 'poll_interval': 0.05}
        self.swept: collections.Counter[str] = collections.Counter()

    def test_links_move_while_packs_run(self):
        with closing(self.place.open()) as storage:
            holders = [storage.new_oid() for _ in range(HOLDERS)]
            stones = [storage.new_oid() for _ in range(STONES)]
            client = Client(storage)
            client.finish(client.vote(
                (z64, record(*holders)), *((oid, record(stones[n])) for n, oid in enumerate(holders)),
                *((oid, record(*stones[n + 1:n + 3])) for n, oid in enumerate(stones))))
            client.view.release()
        results, ready = FORKED.Queue(), FORKED.Barrier(WRITERS + 1)
        writers = [FORKED.Process(target=write, args=(ready, results, self.place, self.options, n, holders, stones))
                   for n in range(1, WRITERS + 1)]
        for writer in writers:
            writer.start()
        try:
            ready.wait(PATIENCE)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                self.pack_somehow()
                self.all_is_there(set(holders))
        finally:
            done = [results.get(timeout=PATIENCE) for _ in writers]
            for writer in writers:
                writer.join(PATIENCE)
        told = sum(done, collections.Counter())
        self.assertEqual([what for what in told if 'Traceback' in what], [])
        self.assertGreater(told['link'], 0)
        self.pack(None)
        self.all_is_there(set(holders))
        self.pack(None)
        with closing(self.place.open()) as storage:
            left = {oid for oid, in storage.database.pool.attempt(lambda session: session.all(
                f'SELECT zoid FROM {"current_object" if self.keep_history else "object_state"}'))}
            found = {int.from_bytes(oid, 'big') for oid in reachable(storage)}
            self.assertLessEqual(found, left)
            if self.keep_history:
                self.assertEqual(left, found, 'garbage was left')
        self.assertGreater(self.swept['objects'], 0)
        print(f'\n  {type(self).__name__}, seed {SEED}: {dict(self.swept)}, {dict(told)}')

    def all_is_there(self, holders: set[bytes]) -> None:
        """As a process sees it that begins now, with the saved cache and memcached, and without."""
        for options in {}, self.options:
            address = getattr(relstore, self.place.adapter)(**self.place.arguments)
            with closing(relstore.RelStore(address, keep_history=self.keep_history, **options)) as storage:
                try:
                    found = reachable(storage)
                except POSKeyError as e:
                    self.fail(f'{e} is missing where {options}; seed {SEED}, {dict(self.swept)}; '
                              f'{self.about(storage, e.args[0])}')
                self.assertLessEqual(holders, found, f'seed {SEED}')

    def about(self, storage: relstore.RelStore, oid: bytes) -> dict[str, list[tuple]]:
        """Return what the database knows of packs, of an object, and of those that refer to it."""
        adapter = storage.database.adapter
        with storage.database.pool.session() as session:
            referring = [(holder, tid) for page in adapter.revisions(session, True)
                         for holder, tid, refs, state, _ in page
                         if oid in linked(state or adapter.load_serial(session, holder, tid)[0] or b'')]
            return {'referring': referring} | {
                what: session.all(statement) for what, statement in {
                    'sweep': 'SELECT * FROM relstore_sweep',
                    'packs': 'SELECT * FROM relstore_pack ORDER BY pack_id',
                    'listed': f'SELECT * FROM relstore_garbage WHERE zoid = {u64(oid)} ORDER BY pack_id',
                    'states': f'SELECT zoid, tid FROM object_state WHERE zoid = {u64(oid)}'}.items()}

    def pack_somehow(self) -> None:
        how = self.chance.choice(['now', 'now', 'two phases', 'past', 'no gc', 'killed', 'killed'])
        self.swept[how] += 1
        try:
            if how == 'now':
                self.pack(None)
            elif how == 'two phases':
                self.pack(None, prepack_only=True)
                time.sleep(self.chance.random() / 5)
                self.pack(None, skip_prepack=True)
            elif how == 'past':
                self.pack(time.time() - self.chance.random() / 2)
            elif how == 'no gc':
                self.pack(None, gc=False)
            else:
                child = FORKED.Process(target=pack_in_child, args=(self.place, {}))
                child.start()
                child.join(self.chance.random() / 3)
                child.kill()
                child.join()
        except Unavailable as e:
            self.swept[str(e)[-40:]] += 1
        except relstore.errors.ConfigurationError as e:
            # Nothing is prepared, as an interrupted one was ended instead; or it is not to be ended so.
            self.assertRegex(str(e), 'interrupted|repare')

    def pack(self, pack_time: float | None, **options) -> None:
        with patch.object(pack, 'PRESENT_SECONDS', 0), patch.multiple(sweep, AT_THE_DOOR=20, **STEPS), \
                closing(self.place.open()) as storage:
            report = storage.pack(pack_time, **options)
            self.swept['objects'] += report.states
            self.swept['spared'] += report.spared


class CrowdedStorm(Crowded, Storm):
    """Where MariaDB takes milliseconds to make a view."""


cases(globals(), Storm, backends=BACKENDS)
cases(globals(), CrowdedStorm, backends=(MySQLdbHistoryPreserving, MySQLdbHistoryFree) if THOROUGH else ())
del Storm, CrowdedStorm
