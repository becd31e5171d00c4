"""Reading: hits in the cache of a storage, and what it costs to read what is in no cache.

a hit            storage.load() of an object that the storage has cached, by one thread and by many at once, each with
                 its own instance: time per load, as the process as a whole gets them done
a transaction    begin, 10 objects that the storage has cached and the connection has not, abort; for relstore also
                 with memcached and poll-interval, where no process has committed anything meanwhile
iterated         a BTree of persistent objects, from the first to the last
keys at random   the same BTree, another key each time
oids at random   the objects alone, each by its oid

"Cold" is a process that has just opened the storage. "Without read-ahead" is relstore made to fetch nothing but what it
is asked for; there is no option for that, the benchmark takes the part out.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import chain, islice

from BTrees.OOBTree import OOBTree
from transaction import TransactionManager
from ZODB.DB import DB

from benchmarks import clients, coldpage, storages
from benchmarks.figures import Case, Results, rounds
from benchmarks.objects import Record
from benchmarks.storages import KINDS, Lab, Site

PART = 'reading'
TITLE = 'Reading'

FULL = {
    'hits': 4000, 'threads': 16, 'seconds': 0.2, 'objects': 10_000, 'delayed': 2000, 'random': 2000, 'times': 9,
    'rounds': (60, 3, 5),
}  # fmt: skip
QUICK = FULL | {
    'hits': 500, 'seconds': 0.02, 'objects': 500, 'delayed': 100, 'random': 100, 'times': 1, 'rounds': (0, 1, 1),
}  # fmt: skip
SMOKE = FULL | {
    'hits': 50, 'threads': 2, 'seconds': 0.01, 'objects': 300, 'random': 30, 'times': 1, 'rounds': (0, 1, 1),
}  # fmt: skip

PER_TRANSACTION = 10
TRANSACTION = f'a read-only transaction, {PER_TRANSACTION} hits'
STATEMENTS = 'statements (with a server: round trips)'


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=storages.MAIN) -> None:
    """Fill every storage, measure all of them in turn, and count what their reads send."""
    names = storages.available(results, PART, names)
    results.note(PART, 'Objects of about 200 bytes. In each round a storage has new processes; relstore with and '
                       'without read-ahead share them, and take turns. Each cold read begins with opening the storage; '
                       f'reading at random is the median of {sizes["times"]}, and of the rounds. FileStorage has '
                       'no cache: its hits are reads of a file that the system has in memory. ZEO has its cache in a '
                       'file. The memcached is on this machine, behind a unix socket; poll-interval is '
                       f'{storages.POLL_INTERVAL} s.')  # fmt: skip
    with ExitStack() as stack:
        sites = [stack.enter_context(lab.site(name)) for name in names]
        oids = {site.kind: fill(site, sizes['objects']) for site in sites}
        cold = Cold(lab, results, sizes, oids)
        variants_of = {site.kind: variants(lab, results, site) for site in sites}
        shared = [each for some in variants_of.values() for each in some if KINDS[each.kind].memcached]
        alone = [[site, *(each for each in variants_of[site.kind] if each not in shared)] for site in sites]
        for _ in rounds(*sizes['rounds']):
            for site in sites:
                hot(results, site, oids[site.kind][: sizes['hits']], sizes)
            for site in (*sites, *shared):
                read_only(results, site, oids_of(site, oids), sizes)
            for side_by_side in alone:
                cold.clock(side_by_side)
        for side_by_side in alone:
            cold.compare(side_by_side)
        for site in (*sites, *shared):
            count_read_only(lab, results, site, oids_of(site, oids), sizes)
        for site in chain.from_iterable(alone):
            cold.delayed(site)
            cold.count(site)
    growth(results, names, sizes['threads'])


def variants(lab: Lab, results: Results, site: Site) -> list[Site]:
    """Return the same database as relstore opens it with something turned off or added, where that can be had."""
    names = [kind.name for kind in KINDS.values() if kind.variant == site.kind]
    return [lab.variant(site, name) for name in storages.available(results, PART, names)]


def oids_of(site: Site, oids: dict[str, list[bytes]]) -> list[bytes]:
    """Return what is in the site, of that by kind: a variant has the database of another."""
    return oids[KINDS[site.kind].variant or site.kind]


def key(number: int) -> str:
    return f'object-{number:06}'


def fill(site: Site, objects: int) -> list[bytes]:
    """Make a BTree of so many objects; return their oids, in its order."""
    with closing(site.open_db()) as db, db.transaction() as connection:
        connection.root()['tree'] = tree = OOBTree({key(n): Record() for n in range(objects)})
        connection.transaction_manager.savepoint()  # gives them oids
        return [record._p_oid for record in tree.values()]


# hits


def hot(results: Results, site: Site, oids: list[bytes], sizes: dict) -> None:
    """Measure loads of what the storage has cached."""
    done = clients.alone(hits, site, oids, (1, sizes['threads']), sizes['seconds'])
    for number, (wall, cpu) in done.items():
        results.add(case_of(group_of(sizes), number), site.kind, wall * 1e9)
        results.add(case_of(group_of(sizes), number, ', CPU', charted=number > 1), site.kind, cpu * 1e9)


def read_only(results: Results, site: Site, oids: list[bytes], sizes: dict) -> None:
    """Measure transactions that read what the storage has cached."""
    seconds = clients.alone(transactions, site, oids[:PER_TRANSACTION], sizes['seconds'])
    results.add(Case(PART, group_of(sizes), TRANSACTION, 'us', 'less'), site.kind, seconds * 1e6)


def count_read_only(lab: Lab, results: Results, site: Site, oids: list[bytes], sizes: dict) -> None:
    """Count what such a transaction sends to the database, without a clock."""
    if site.kind == 'FileStorage':
        return
    with coldpage.counting(lab, site) as (reached, statements), closing(reached.open_db()) as db:
        manager = TransactionManager(explicit=True)
        connection = db.open(manager)
        before = 0
        for _ in range(3):  # the first loads the objects, and the last counts
            connection.cacheMinimize()
            before = statements()
            transaction(manager, connection, oids[:PER_TRANSACTION])
        results.add(Case(PART, group_of(sizes), f'{TRANSACTION}: sent', STATEMENTS, 'less'), site.kind,
                    statements() - before)  # fmt: skip
        connection.close()


def group_of(sizes: dict) -> str:
    return f'hits, {sizes["hits"]:,} objects cached'


def case_of(group: str, threads: int, suffix: str = '', charted: bool = True) -> Case:
    panel = f'a load, {threads} thread{"s" if threads > 1 else ""}{suffix}'
    return Case(PART, group, panel, 'ns', 'less', charted=charted)


def hits(site: Site, oids: list[bytes], numbers: tuple[int, ...], seconds: float) -> dict[int, tuple[float, float]]:
    """Return seconds per load, by the clock and of CPU, of so many threads together; by their number."""
    measured = {}
    with closing(site.open_db(pool_size=max(numbers) + 1)) as db:
        for number in numbers:
            done = clients.threads(number, load_again_and_again, db, oids, seconds)
            loads, starts, ends, cpu = zip(*done, strict=True)
            measured[number] = (max(ends) - min(starts)) / sum(loads), sum(cpu) / sum(loads)
    return measured


def load_again_and_again(number: int, barrier, db: DB, oids: list[bytes], seconds: float) -> tuple:
    """Return how many loads there were, when they began and ended, and how long this thread worked."""
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    manager.begin()
    load = connection._storage.load
    order = random.Random(number).sample(oids, len(oids))
    for oid in order:
        load(oid)
    gc.collect()
    barrier.wait()
    loads, worked, start = 0, time.thread_time(), time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        for oid in order:
            load(oid)
        loads += len(order)
    worked = time.thread_time() - worked
    manager.abort()
    connection.close()
    return loads, start, now, worked


def transactions(site: Site, oids: list[bytes], seconds: float) -> float:
    """Return the seconds of a transaction that finds all its objects in the storage's cache: the median."""
    with closing(site.open_db()) as db:
        manager = TransactionManager(explicit=True)
        connection = db.open(manager)
        taken = []
        deadline = time.perf_counter() + seconds
        while len(taken) < 3 or time.perf_counter() < deadline:
            connection.cacheMinimize()
            begin = time.perf_counter()
            transaction(manager, connection, oids)
            taken.append(time.perf_counter() - begin)
        connection.close()
    return statistics.median(taken)


def transaction(manager: TransactionManager, connection, oids: list[bytes]) -> None:
    manager.begin()
    for oid in oids:
        connection.get(oid)._p_activate()
    manager.abort()


def growth(results: Results, names: list[str], threads: int) -> None:
    """Note how much dearer a hit is where many threads read."""
    cases = {case.panel: case for case in results.cases(PART)}
    for what, suffix in (('Time', ''), ('CPU', ', CPU')):
        one, many = (cases[case_of('', number, suffix).panel] for number in (1, threads))
        grown = [f'{name} {results.line(many, name)[None] / results.line(one, name)[None]:.2f}' for name in names]
        results.note(PART, f'{what} per load with {threads} threads, in multiples of that with one thread: '
                           f'{", ".join(grown)}.')  # fmt: skip


# cold reads


def iterated(connection, oids: list[bytes], count: int) -> None:
    for record in islice(connection.root()['tree'].values(), count):
        record.number  # noqa: B018 (loads the object)


def keys_at_random(connection, oids: list[bytes], count: int) -> None:
    tree = connection.root()['tree']
    for n in random.Random(1).sample(range(len(oids)), count):
        tree[key(n)].number  # noqa: B018


def oids_at_random(connection, oids: list[bytes], count: int) -> None:
    for oid in random.Random(1).sample(oids, count):
        connection.get(oid)._p_activate()


def read(site: Site, way: Callable, oids: list[bytes], count: int, measure: Callable[[], float]) -> float:
    """Read `count` objects with cold caches; return by how much measure() rose meanwhile."""
    with closing(site.open_db()) as db:
        storages.empty_storage_cache(db.storage)
        manager = TransactionManager(explicit=True)
        connection = db.open(manager)
        manager.begin()
        connection.root()['tree']._p_activate()
        before = measure()
        way(connection, oids, count)
        spent = measure() - before
        manager.abort()
        connection.close()
    return spent


def seconds_of(sites: list[Site], ways: list[tuple], oids: list[bytes]) -> list[list[float]]:
    """Return how long each way takes in each site: the median of so many times, for others use the machine too.

    The sites take turns, since what they differ by may be less than one minute differs from the next.
    ways: (how, how many objects, how often).
    """
    medians = []
    for way, count, times in ways:
        taken: list[list[float]] = [[] for _ in sites]
        for n in range(times):
            for site, spent in list(zip(sites, taken, strict=True))[:: -1 if n % 2 else 1]:
                gc.collect()
                spent.append(read(site, way, oids, count, time.perf_counter))
        medians.append([statistics.median(spent) for spent in taken])
    return medians


class Cold:
    """The cold reads of one run, all over the same objects. `oids`: by kind, in the order of the tree."""

    def __init__(self, lab: Lab, results: Results, sizes: dict, oids: dict[str, list[bytes]]):
        self.lab, self.results, self.sizes, self.oids = lab, results, sizes, oids
        alone = f'{sizes["random"]:,} of {sizes["objects"]:,} objects, one by one, cold'
        self.ways = [  # how, how many objects, how often, and what it is called
            (iterated, sizes['objects'], 1, f'a BTree of {sizes["objects"]:,} objects, cold', 'iterated'),
            (keys_at_random, sizes['random'], sizes['times'], alone, 'keys at random'),
            (oids_at_random, sizes['random'], sizes['times'], alone, 'oids at random'),
        ]

    def count(self, site: Site) -> None:
        """Count statements, without a clock."""
        if site.kind == 'FileStorage':
            return
        for way, count, _, group, name in self.ways:
            with coldpage.counting(self.lab, site) as (reached, statements):
                spent = read(reached, way, oids_of(site, self.oids), count, statements)
            self.results.add(Case(PART, group, name, STATEMENTS, 'less'), site.kind, spent)

    def clock(self, sites: list[Site]) -> None:
        """Measure sites over the same database, in one process."""
        taken = clients.alone(seconds_of, sites, [way[:3] for way in self.ways], oids_of(sites[0], self.oids))
        for way, spent in zip(self.ways, taken, strict=True):
            for site, seconds in zip(sites, spent, strict=True):
                self.results.add(self.time_of(way), site.kind, seconds * 1e3)

    def time_of(self, way: tuple) -> Case:
        *_, group, name = way
        return Case(PART, group, f'{name}: time', 'ms', 'less')

    def compare(self, sites: list[Site]) -> None:
        """Note how the first differs from the others, with which it took turns: in each round, and in the median."""
        first, *others = sites
        for other in others:
            found = []
            for way in self.ways:
                pairs = zip(*(self.results.samples[self.time_of(way), site.kind, None] for site in (first, other)),
                            strict=True)  # fmt: skip
                ratios = sorted(ours / theirs for ours, theirs in pairs)
                found.append(f'{way[-1]} {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})')
            self.results.note(PART, f'{first.kind}, time in multiples of that of {other.kind}: {", ".join(found)}.')

    def delayed(self, site: Site) -> None:
        """Iterate the tree over a slow network, once: it is the number of round trips that decides."""
        if not KINDS[site.kind].server:
            return
        way, _, _, group, name = self.ways[0]
        count = min(self.sizes['delayed'], self.sizes['objects'])
        with coldpage.proxy_to(self.lab, site) as proxy:
            proxy.delay = coldpage.DELAY
            reached = coldpage.through(self.lab, site, proxy)
            [[seconds]] = clients.alone(seconds_of, [reached], [(way, count, 1)], oids_of(site, self.oids))
        panel = f'{name}: time, network delay 1 ms' + (f', {count:,} objects' if count < self.sizes['objects'] else '')
        self.results.add(Case(PART, group, panel, 'ms', 'less'), site.kind, seconds * 1e3)
