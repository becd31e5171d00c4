"""Blobs: what goes in and comes out in a second, one blob a transaction, by one client and by eight.

In: the data is written to a file of ZODB's, and committed. Cold: the first read of a blob by a machine, whose
directory of files is empty. Cached: the second. Each loads the object, whose record the storage's cache has, for it
is then that ZODB asks for the file.
FileStorage has its blobs in a directory, and stands in both groups; nothing of it is ever cold.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from BTrees.IOBTree import IOBTree
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.blob import Blob
from ZODB.DB import DB

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, rounds
from benchmarks.storages import KINDS, Lab, Site
from relstore.tests.support.proxy import CuttingProxy

PART = 'blobs'
TITLE = 'Blobs'
X = 'concurrent clients'
PIECE = 1 << 16  # bytes read at a time
TIMES = 5  # each round trip is counted so often

# (bytes of a blob, blobs), numbers of clients, (seconds, rounds at least, at most)
FULL = {'blobs': ((10_000, 1000), (1_000_000, 100), (50_000_000, 10)), 'clients': (1, 8), 'rounds': (300, 2, 3)}
QUICK = {'blobs': ((10_000, 100), (1_000_000, 16)), 'clients': (1, 4), 'rounds': (0, 1, 1)}
SMOKE = {'blobs': ((10_000, 4),), 'clients': (1, 2), 'rounds': (0, 1, 1)}

NAMES = [name for name in storages.ALL if name != 'ZEO']
GROUPS = {False: 'in the database', True: 'in a directory that all share'}


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Measure all storages in turn, round after round."""
    names = storages.available(results, PART, names)
    results.cannot(PART, 'ZEO', 'its server keeps blobs in a directory, as FileStorage does')
    results.note(PART, 'The clients of FileStorage are threads of one process.')
    for shared, name in itertools.product(GROUPS, names):
        if KINDS[name].server:
            count_round_trips(lab, results, name, shared)
    for _ in rounds(*sizes['rounds']):
        for shared, (size, count), number in itertools.product(GROUPS, sizes['blobs'], sizes['clients']):
            for name in names:
                run(lab, results, name, shared, size, count, number)


@contextmanager
def with_blobs(lab: Lab, name: str, shared: bool) -> Iterator[tuple[Site, Site]]:
    """Make an empty database; yield its site twice, as two machines have it, and remove it with all files."""
    with lab.site(name) as site, tempfile.TemporaryDirectory(dir=lab.directory) as files:
        first = replace(site, options={'blob_dir': os.path.join(files, 'one'), 'shared_blob_dir': shared})
        second = first
        if not shared and KINDS[name].processes:
            second = replace(site, options={'blob_dir': os.path.join(files, 'other'), 'shared_blob_dir': False})
        yield first, second


def run(lab: Lab, results: Results, name: str, shared: bool, size: int, count: int, number: int) -> None:
    each = count // number
    with with_blobs(lab, name, shared) as (site, other):
        with closing(site.open_db()) as db, db.transaction() as connection:
            connection.root()['clients'] = IOBTree({n: IOBTree() for n in range(number)})  # as folders of sites are
        panels = {'in': max(clients.run(site, number, write, size, each))}
        if other is not site:
            other.open().close()  # RelStorage's processes may not make its directory at the same moment
        panels['cold'], panels['cached'] = map(max, zip(*clients.run(other, number, read, size), strict=True))
    for panel, seconds in panels.items():
        case = Case(PART, f'{size:,} bytes, {GROUPS[shared]}', panel, 'MB/s', 'more', X)
        results.add(case, name, each * number * size / 1e6 / seconds, number)


def write(db: DB, number: int, barrier, size: int, count: int) -> float:
    """Return the seconds of this client for all its blobs, from when everybody begins."""
    manager = TransactionManager(explicit=True)
    data = os.urandom(size)
    with closing(db.open(manager)) as connection:
        manager.begin()
        blobs = connection.root()['clients'][number]
        len(blobs)  # loads it
        manager.abort()
        barrier.wait()
        begin = time.perf_counter()
        for n in range(count):
            manager.begin()
            blobs[n] = Blob()
            with blobs[n].open('w') as file:
                file.write(n.to_bytes(8, 'big'))  # so that no two are the same
                file.write(data[8:])
            manager.commit()
        return time.perf_counter() - begin


def read(db: DB, number: int, barrier, size: int) -> tuple[float, float]:
    """Return the seconds of this client for all its blobs, read the first and the second time."""
    manager = TransactionManager(explicit=True)
    with closing(db.open(manager)) as connection:
        manager.begin()
        blobs = [*connection.root()['clients'][number].values()]
        connection.prefetch(blobs)
        seconds = []
        for _ in range(2):
            connection.cacheMinimize()  # ZODB asks for the file when it loads the object
            barrier.wait()
            begin = time.perf_counter()
            for blob in blobs:
                found = 0
                with blob.open() as file:
                    while piece := file.read(PIECE):
                        found += len(piece)
                if found != size:
                    raise RuntimeError(f'a blob has {found} bytes')
            seconds.append(time.perf_counter() - begin)
        manager.abort()
    return seconds[0], seconds[1]


def count_round_trips(lab: Lab, results: Results, name: str, shared: bool) -> None:
    """Count those of a transaction that adds a blob of 10 kB, and of the same without a blob."""
    server = lab.server(KINDS[name].server)
    manager = TransactionManager(explicit=True)
    with (
        with_blobs(lab, name, shared) as (site, _),
        CuttingProxy(server.address) as proxy,
        closing(lab.by_tcp(site, proxy.port).open_db()) as db,
        closing(db.open(manager)) as connection,
    ):
        for panel, new in (('add a blob', Blob), ('add an object', PersistentMapping)):
            case = Case(PART, f'round trips, {GROUPS[shared]}', panel, 'round trips', 'less')
            for n in range(TIMES + 1):
                manager.begin()
                connection.root()[panel, n] = thing = new()
                if isinstance(thing, Blob):
                    with thing.open('w') as file:
                        file.write(os.urandom(10_000))
                before = proxy.round_trips
                manager.commit()
                if n:  # what is prepared once is not counted
                    results.add(case, name, proxy.round_trips - before)
