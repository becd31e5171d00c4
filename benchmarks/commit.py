"""Concurrent commits: each process changes one object of its own, again and again."""

from __future__ import annotations

import itertools
import time
from contextlib import closing

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.DB import DB

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, percentile, rounds
from benchmarks.objects import Record
from benchmarks.servers import Unavailable

PART = 'commit'
TITLE = 'Concurrent commits'
X = 'processes'

FULL = {'processes': (1, 2, 4, 8, 16), 'seconds': 1.0, 'rounds': (100, 2, 4)}
QUICK = {'processes': (1, 4), 'seconds': 0.2, 'rounds': (0, 1, 1)}
SMOKE = {'processes': (1, 2), 'seconds': 0.05, 'rounds': (0, 1, 1)}

NAMES = [*storages.MAIN, 'relstore PostgreSQL, psycopg 3']


def measure(lab: storages.Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Measure all storages in turn, round after round, on the disk as it is and on a slow one."""
    names = storages.available(results, PART, names)
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
