"""Pack: a database with garbage and old revisions, in both history modes; its time, memory, and a writer beside it.

A fifth of the objects is unreachable and a tenth of the others was changed. A storage that cannot pack says so.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from contextlib import closing

from transaction import TransactionManager
from ZODB.POSException import ConflictError, Unsupported
from ZODB.serialize import referencesf

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, percentile
from benchmarks.objects import Node, Record
from benchmarks.storages import Lab, Site

PART = 'pack'
TITLE = 'Pack'
FANOUT = 20  # references of an inner object
PER_TRANSACTION = 1000

FULL = {'objects': 200_000}
QUICK = {'objects': 1_000}
SMOKE = {'objects': 200}

NAMES = ['relstore PostgreSQL', 'RelStorage PostgreSQL']


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Build and pack a database of each storage, one after the other."""
    objects = sizes['objects']
    if names is NAMES:
        results.cannot(PART, 'SQLite, FileStorage, ZEO', 'left out: compared is PostgreSQL with PostgreSQL')
    results.note(PART, f'{objects:,} objects, a fifth of them garbage, a tenth of the others changed once; packed with '
                       'garbage collection while one thread commits. Once each: it takes long.')  # fmt: skip
    results.note(PART, 'To know references or not is a matter of relstore alone, and comes with its pack.')
    for keep_history in (True, False):
        group = 'history-preserving' if keep_history else 'history-free'
        for name in storages.available(results, PART, names):
            with lab.site(name, keep_history) as site:
                if not clients.alone(can_pack, site):
                    results.cannot(PART, name, 'relstore cannot pack yet')
                    continue
                clients.alone(build, site, objects)
                seconds, kilobytes, idle, beside = clients.alone(pack, site)
            for panel, unit, value in (
                ('time', 's', seconds),
                ('peak memory of the packing process', 'MB', kilobytes / 1000),
                ('p99 of a commit without a pack', 'ms', percentile(idle, 99) * 1e3),
                ('p99 of a commit beside the pack', 'ms', percentile(beside, 99) * 1e3),
            ):
                results.add(Case(PART, group, panel, unit, 'less'), name, value)


def can_pack(site: Site) -> bool:
    with closing(site.open_db()) as db:
        try:
            db.storage.pack(time.time(), referencesf)
        except Unsupported:
            return False
    return True


def build(site: Site, objects: int) -> None:
    """Commit a tree of nodes and records, then cut off a fifth of it and change a tenth of the rest."""
    branches = objects // (FANOUT + 1)
    with closing(site.open_db()) as db:
        with db.transaction() as connection:
            connection.root()['top'] = top = Node()
            connection.root()['counter'] = Record()
            top.children = [Node() for _ in range(-(-branches // PER_TRANSACTION))]
        for middle in range(len(top.children)):
            with db.transaction() as connection:
                node = connection.root()['top'].children[middle]
                node.children = [Node() for _ in range(min(PER_TRANSACTION, branches - middle * PER_TRANSACTION))]
        for number in range(0, branches, PER_TRANSACTION // FANOUT):
            with db.transaction() as connection:
                for branch in branches_of(connection, number):
                    branch.children = [Record() for _ in range(FANOUT)]
                    branch._p_changed = True
        for number in range(0, branches, PER_TRANSACTION // FANOUT):
            with db.transaction() as connection:
                for place, branch in enumerate(branches_of(connection, number)):
                    if place % 5 == 0:
                        branch.children = []
                    for record in branch.children[::10]:
                        record.number += 1


def branches_of(connection, number: int) -> list[Node]:
    middle, first = divmod(number, PER_TRANSACTION)
    return connection.root()['top'].children[middle].children[first : first + PER_TRANSACTION // FANOUT]


def pack(site: Site) -> tuple[float, int, list[float], list[float]]:
    """Return seconds, peak memory in KB, and the seconds of each commit without and with the pack."""
    with closing(site.open_db()) as db:
        idle: list[float] = []
        commits(db, lambda: len(idle) >= 200, idle)
        packed = threading.Event()
        beside: list[float] = []
        writer = threading.Thread(target=commits, args=(db, packed.is_set, beside))
        writer.start()
        begin = time.perf_counter()
        try:
            db.storage.pack(time.time(), referencesf)
        finally:
            seconds = time.perf_counter() - begin
            packed.set()
            writer.join()
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, idle, beside


def commits(db, finished: Callable[[], bool], latencies: list[float]) -> None:
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    while not finished():
        begin = time.perf_counter()
        manager.begin()
        connection.root()['counter'].number += 1
        try:
            manager.commit()
        except ConflictError:
            manager.abort()
        latencies.append(time.perf_counter() - begin)
    connection.close()
