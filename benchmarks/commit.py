"""Commits: small ones by many processes at once, each changing one object of its own; and larger and larger ones."""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import closing

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.serialize import ObjectWriter
from ZODB.utils import z64

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, percentile, rounds
from benchmarks.objects import Record
from benchmarks.servers import Unavailable

PART = 'commit'
TITLE = 'Commits'
X = 'processes'

FULL = {'processes': (1, 2, 4, 8, 16), 'seconds': 1.0, 'rounds': (100, 2, 4),
        'objects': (1, 10, 100, 1000, 10_000), 'each': 0.3, 'repeated': (40, 2, 4)}  # fmt: skip
QUICK = {'processes': (1, 4), 'seconds': 0.2, 'rounds': (0, 1, 1),
         'objects': (1, 100, 1000), 'each': 0.1, 'repeated': (0, 1, 1)}  # fmt: skip
SMOKE = {'processes': (1, 2), 'seconds': 0.05, 'rounds': (0, 1, 1),
         'objects': (1, 10), 'each': 0.01, 'repeated': (0, 1, 1)}  # fmt: skip

NAMES = [*storages.MAIN, 'relstore PostgreSQL, psycopg2']


def measure(lab: storages.Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Measure all storages in turn, round after round, on the disk as it is and on a slow one."""
    names = storages.available(results, PART, names)
    for _ in rounds(*sizes['repeated']):
        for name in names:
            by_size(lab, results, name, sizes['objects'], sizes['each'])
    results.note(PART, 'By size: one client of the storage itself, from tpc_begin to the poll after tpc_finish, so '
                       'that what ZODB does is not in it; the median of what fits into a fraction of a second.')
    results.note(PART, 'The clients of FileStorage are threads of one process.')
    disks = [(False, 'the disk as it is')]
    try:
        lab.slow_disk  # noqa: B018 (compiles it)
        disks.append((True, 'fdatasync slowed by 3 ms'))
    except Unavailable as e:
        results.cannot(PART, 'a slow disk', str(e))
    for slow, disk in disks:
        for _ in rounds(*sizes['rounds']):
            for number, name in itertools.product(sizes['processes'], names):
                run(lab, results, name, number, sizes['seconds'], slow, disk)


def run(lab: storages.Lab, results: Results, name: str, number: int, seconds: float, slow: bool, disk: str) -> None:
    with lab.site(name, slow=slow) as site:
        with closing(site.open_db()) as db, db.transaction() as connection:
            connection.root()['clients'] = PersistentMapping((n, Record()) for n in range(number))
        done = clients.run(site, number, work, seconds, slow=storages.SLOW_MICROSECONDS if slow else 0)
    each = [latency for latencies, _ in done for latency in latencies]
    rate = sum(len(latencies) / taken for latencies, taken in done)
    results.add(Case(PART, disk, 'commits per second', 'commits/s', 'more', X), name, rate, number)
    for percent in (50, 99):
        case = Case(PART, disk, f'p{percent} of a commit', 'ms', 'less', X)
        results.add(case, name, percentile(each, percent) * 1e3, number)


def by_size(lab: storages.Lab, results: Results, name: str, sizes: tuple[int, ...], seconds: float) -> None:
    """Commit as many new objects as `sizes` says, and change them, each for some seconds, with one client."""
    with lab.site(name) as site, closing(site.open()) as storage:
        view = storage.new_instance() if hasattr(storage, 'new_instance') else storage
        for size in sizes:
            oids = [storage.new_oid() for _ in range(size)]
            taken = {'new objects': [committed(view, oids, z64)], 'changed objects': []}
            tid = view.lastTransaction()
            deadline = time.perf_counter() + seconds
            while not taken['changed objects'] or time.perf_counter() < deadline:
                taken['changed objects'].append(committed(view, oids, tid))
                tid = view.lastTransaction()
            deadline = time.perf_counter() + seconds
            while time.perf_counter() < deadline:
                oids = [storage.new_oid() for _ in range(size)]
                taken['new objects'].append(committed(view, oids, z64))
            for panel, each in taken.items():
                case = Case(PART, 'one transaction, by its size', panel, 'ms', 'less', 'objects')
                results.add(case, name, statistics.median(each) * 1e3, size)


def committed(view, oids: list[bytes], base: bytes) -> float:
    """Return the seconds that a commit of these objects takes, with the poll that follows it."""
    state = ObjectWriter().serialize(Record())
    txn = TransactionMetaData()
    begin = time.perf_counter()
    view.tpc_begin(txn)
    for oid in oids:
        view.store(oid, base, state, '', txn)
    view.tpc_vote(txn)
    view.tpc_finish(txn)
    if hasattr(view, 'poll_invalidations'):
        view.poll_invalidations()
        view.afterCompletion()
    return time.perf_counter() - begin


def work(db: DB, number: int, barrier, seconds: float) -> tuple[list[float], float]:
    """Return the seconds that each commit took, and those of all together."""
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    latencies: list[float] = []

    def change():
        manager.begin()
        connection.root()['clients'][number].number += 1
        manager.commit()

    change()  # loads what it needs
    barrier.wait()
    start = now = time.perf_counter()
    while now - start < seconds:
        change()
        before, now = now, time.perf_counter()
        latencies.append(now - before)
    connection.close()
    return latencies, now - start
