"""Pack: databases with garbage and old revisions, in both history modes; time, memory, and a writer beside it.

A fifth of the objects is unreachable and a tenth of the others was changed. What RelStorage has stored has no
references beside it: that is measured too, with the same objects.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from transaction import TransactionManager
from ZODB.POSException import ConflictError, StorageError
from ZODB.serialize import referencesf

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, percentile
from benchmarks.objects import Node, Record
from benchmarks.storages import Lab, Site

PART = 'pack'
TITLE = 'Pack'
FANOUT = 20  # references of an inner object
PER_TRANSACTION = 1000
IDLE_COMMITS = 500

FULL = {'objects': 200_000, 'many': 1_000_000, 'times': 5}
QUICK = {'objects': 5_000, 'many': 20_000, 'times': 1}
SMOKE = {'objects': 200, 'many': 400, 'times': 1}

OURS = 'relstore PostgreSQL'
NAMES = [OURS, 'RelStorage PostgreSQL', 'relstore SQLite', 'RelStorage SQLite', 'FileStorage', 'relstore MariaDB']
COMPARED = NAMES[:2]  # also beside a writer, and where references are not known


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Build databases and pack copies of them."""
    objects = sizes['objects']
    if names is NAMES:
        results.cannot(PART, 'ZEO', 'left out: its server packs a FileStorage, which is measured')
        results.cannot(PART, 'MySQL', 'left out: MariaDB stands for both')
    results.note(PART, f'{objects:,} objects, a fifth of them garbage, a tenth of the others changed once; packed to '
                       'the present with garbage collection. Once each: it takes long. How it grows is the median of '
                       f'{sizes["times"]} copies.')  # fmt: skip
    results.note(PART, 'Unknown references: as RelStorage leaves a database. Beside its time stands that of '
                       'RelStorage, which reads every state each time.')  # fmt: skip
    results.note(PART, 'Memory is what the process grows by: of a small database most of it is no matter of objects.')
    for keep_history in (True, False):
        for name in storages.available(results, PART, names):
            if name == 'FileStorage' and not keep_history:
                continue
            with lab.site(name, keep_history) as site:
                clients.alone(build, site, objects)
                if name in COMPARED:
                    pack_copies(lab, results, site, objects)
                else:
                    pack_alone(results, site, objects)
    grow(lab, results, sizes, OURS if names is NAMES else names[0])


def group(site: Site) -> str:
    return 'history-preserving' if site.keep_history else 'history-free'


def pack_alone(results: Results, site: Site, objects: int, panels: tuple[str, ...] = ('time',)) -> None:
    seconds, grown = clients.alone(pack, site)
    for panel in panels:
        results.add(Case(PART, group(site), panel, 's', 'less'), site.kind, seconds)
    memory = Case(PART, group(site), 'memory for each object', 'B', 'less', charted=False)
    results.add(memory, site.kind, grown / objects)


def pack_copies(lab: Lab, results: Results, site: Site, objects: int) -> None:
    """Pack it alone, with unknown references, and beside a writer."""
    is_ours = site.kind == OURS
    with lab.copy(site) as copy:
        pack_alone(results, copy, objects, ('time',) if is_ours else ('time', 'time, unknown references'))
    if is_ours:
        with lab.copy(site) as copy:
            clients.alone(forget_references, copy)
            seconds, _ = clients.alone(pack, copy)
            results.add(Case(PART, group(site), 'time, unknown references', 's', 'less'), site.kind, seconds)
    with lab.copy(site) as copy:
        over = lab.directory / f'{copy.where.rpartition("=")[2]}-is-packed'
        seconds, (idle, beside) = clients.run(copy, 2, pack_or_commit, over)
    for panel, unit, value in (
        ('time beside a writer', 's', seconds),
        ('p99 of its commits without a pack', 'ms', percentile(idle, 99) * 1e3),
        ('p99 of its commits beside the pack', 'ms', percentile(beside, 99) * 1e3),
        ('longest of its commits beside the pack', 'ms', max(beside) * 1e3),
    ):
        charted = panel != 'p99 of its commits without a pack'
        results.add(Case(PART, group(site), panel, unit, 'less', charted=charted), site.kind, value)


def grow(lab: Lab, results: Results, sizes: dict, name: str) -> None:
    """Show how time and memory grow with the number of objects.

    Of copies, in turn: what was built just now is packed faster than what the server has checkpointed meanwhile, for
    that it writes each page to its log once more, whole.
    """
    if name not in storages.available(results, PART, [name]):
        return
    with ExitStack() as stack:
        sites = {objects: stack.enter_context(lab.site(name)) for objects in (sizes['objects'], sizes['many'])}
        for objects, site in sites.items():
            clients.alone(build, site, objects)
        for _ in range(sizes['times']):
            for objects, site in sites.items():
                with lab.copy(site) as copy:
                    seconds, grown = clients.alone(pack, copy)
                for panel, unit, value in (
                    ('microseconds for each object', 'us', seconds * 1e6),
                    ('memory for each object', 'B', grown),
                ):
                    case = Case(PART, 'by size', panel, unit, 'less', x='objects', charted=False)
                    results.add(case, name, value / objects, objects)


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
            connection.cacheMinimize()
        for number in range(0, branches, PER_TRANSACTION // FANOUT):
            with db.transaction() as connection:
                for place, branch in enumerate(branches_of(connection, number)):
                    if place % 5 == 0:
                        branch.children = []
                    for record in branch.children[::10]:
                        record.number += 1
            connection.cacheMinimize()


def branches_of(connection, number: int) -> list[Node]:
    middle, first = divmod(number, PER_TRANSACTION)
    return connection.root()['top'].children[middle].children[first : first + PER_TRANSACTION // FANOUT]


def forget_references(site: Site) -> None:
    """Make it a database as RelStorage leaves it."""
    import psycopg2

    with closing(psycopg2.connect(site.where)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute('UPDATE object_state SET refs = NULL')
        cursor.execute('VACUUM FULL object_state')


def pack(site: Site) -> tuple[float, int]:
    """Return the seconds, and by how many bytes the process has grown."""
    with closing(site.open_db()) as db:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        db.storage.pack(time.time(), referencesf)
        seconds = time.perf_counter() - begin
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def pack_or_commit(db, number: int, barrier, over: Path) -> float | tuple[list[float], list[float]]:
    """Pack, as the first client, and return the seconds; as the second return those of each commit, before and then."""
    if number == 0:
        barrier.wait()
        begin = time.perf_counter()
        try:
            db.storage.pack(time.time(), referencesf)
        finally:
            over.touch()
        return time.perf_counter() - begin
    idle: list[float] = []
    beside: list[float] = []
    commits(db, lambda: len(idle) >= IDLE_COMMITS, idle)
    barrier.wait()
    commits(db, over.exists, beside)
    return idle, beside


def commits(db, finished: Callable[[], bool], latencies: list[float]) -> None:
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    while not finished():
        begin = time.perf_counter()
        manager.begin()
        connection.root()['counter'].number += 1
        try:
            manager.commit()
        except (ConflictError, StorageError):
            manager.abort()
        latencies.append(time.perf_counter() - begin)
    connection.close()
