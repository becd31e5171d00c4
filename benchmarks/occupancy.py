"""Occupancy campaign: does the cost of a request grow with the database?

A request is a transaction of its own, on an open connection:
    load      an object that no cache holds
    commit    an object changed; a conflict, which has to be tried again, does not succeed
Objects are chosen among the first thousand, at random among all, or among the last thousand.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path

from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.utils import p64, z64

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, percentile, rounds
from benchmarks.objects import Record

PART = 'occupancy'
TITLE = 'Occupancy campaign'
X = 'objects in the database'
PATTERNS = ('first', 'random', 'last')
REQUESTS = ('load', 'commit')
WINDOW = 1000  # what 'first' and 'last' mean

FULL = {
    'objects': (1_000, 10_000, 100_000, 1_000_000), 'threads': (1, 4, 16), 'seconds': 0.25, 'rounds': (0, 2, 2),
}  # fmt: skip
QUICK = {'objects': (1_000, 10_000), 'threads': (1, 4), 'seconds': 0.05, 'rounds': (0, 1, 1)}
SMOKE = {'objects': (100, 1_000), 'threads': (1, 2), 'seconds': 0.02, 'rounds': (0, 1, 1)}

# Megabytes: all caches are kept too small to matter. RelStorage's cannot be turned off.
CACHE_MB = 0
FIRST = 1001  # the oid of the first object; those below belong to ZODB and to the template
PER_TRANSACTION = 1000
WARM_UP = 5
BYTES_PER_OBJECT = 1200  # of disk, with log, for one storage and its growth

NAMES = [name for name in storages.MAIN if name != 'ZEO' and storages.KINDS[name].server not in ('mariadb', 'mysql')]


def measure(lab: storages.Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Grow a database of each storage, and measure all of them in turn at each size."""
    names = storages.available(results, PART, names)
    results.cannot(PART, 'ZEO', 'left out: it stores in a FileStorage, which is here')
    results.note(PART, 'Threads of one process. The objects, of about 200 bytes each, were written by SQL in bulk '
                       '(FileStorage: by its own API), a thousand in a transaction.')  # fmt: skip
    results.note(PART, 'Connections drop their objects before each request, and the caches of the storages are off: '
                       'each load reaches the database.')  # fmt: skip
    with ExitStack() as stack:
        sites = [stack.enter_context(lab.site(name)) for name in names]
        for site in sites:
            prepare(site)
        have = 0
        for objects in sizes['objects']:
            needed = (objects - have) * BYTES_PER_OBJECT * len(sites)
            free = shutil.disk_usage(lab.directory).free
            if needed > free:
                results.cannot(PART, f'{objects:,} objects', f'needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} '
                                                             'GB are free; TMPDIR names another place')  # fmt: skip
                return
            for site in sites:
                fill(site, have, objects)
            have = objects
            for _ in rounds(*sizes['rounds']):
                for site in sites:
                    done = clients.alone(campaign, site, objects, sizes['threads'], sizes['seconds'])
                    record(results, site.kind, objects, done)


def record(results: Results, name: str, objects: int, done: dict) -> None:
    most = max(threads for _, threads, _ in done)
    for panel, unit, better, value, charted in (
        ('mean', 'ms', 'less', lambda each, failed, taken: sum(each) / len(each) * 1e3, (1,)),
        ('requests per second', 'requests/s', 'more', lambda each, failed, taken: len(each) / taken, (most,)),
        ('p99', 'ms', 'less', lambda each, failed, taken: percentile(each, 99) * 1e3, (1, most)),
        ('max', 'ms', 'less', lambda each, failed, taken: max(each) * 1e3, ()),
        ('success', '% of requests', 'more', lambda each, failed, _: 100 * len(each) / (len(each) + failed), (most,)),
    ):
        for (request, threads, pattern), (latencies, failed, seconds) in done.items():
            if latencies:
                group = f'{request}, {threads} thread{"s" if threads > 1 else ""}'
                case = Case(PART, group, f'{panel}, {pattern}', unit, better, X, threads in charted)
                results.add(case, name, value(latencies, failed, seconds), objects)
            else:
                reason = f'no {request} succeeded within {seconds:.1f} s ({pattern}, {threads} threads)'
                results.cannot(PART, name, reason)


def campaign(site: storages.Site, objects: int, all_threads: tuple[int, ...], seconds: float) -> dict:
    """Return by (request, threads, pattern): seconds of each that succeeded, number of others, seconds of all."""
    done = {}
    with closing(site.open_db(CACHE_MB, pool_size=max(all_threads) + 1)) as db:
        for cell in itertools.product(REQUESTS, all_threads, PATTERNS):
            request, threads, pattern = cell
            parts = clients.threads(threads, work, db, request, oids(pattern, objects), seconds)
            latencies = [latency for some, _, _ in parts for latency in some]
            done[cell] = latencies, sum(failed for _, failed, _ in parts), max(taken for _, _, taken in parts)
    return done


def oids(pattern: str, objects: int) -> range:
    window = min(objects, WINDOW)
    start = {'first': 0, 'random': 0, 'last': objects - window}[pattern]
    return range(FIRST + start, FIRST + (objects if pattern == 'random' else start + window))


def work(number: int, barrier, db: DB, request: str, choice: range, seconds: float) -> tuple[list[float], int, float]:
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    chance = random.Random(number)
    latencies, failed = [], 0
    for oid in choice[:WARM_UP]:  # opens what the storage opens when it is first needed
        with manager:
            connection.get(p64(oid))._p_activate()
    connection.cacheMinimize()
    barrier.wait()
    start = now = time.perf_counter()
    while now - start < seconds:
        before = time.perf_counter()
        manager.begin()
        try:
            wanted = connection.get(p64(chance.choice(choice)))
            wanted._p_activate()
            if request == 'commit':
                wanted.number += 1
                manager.commit()
            else:
                manager.abort()
            latencies.append(time.perf_counter() - before)
        except (TransientError, sqlite3.OperationalError):
            failed += 1
            manager.abort()
        wanted._p_deactivate()
        now = time.perf_counter()
    connection.close()
    return latencies, failed, now - start


# filling


def prepare(site: storages.Site) -> None:
    """Make the tables, the root object and one record whose state all others get."""
    with closing(site.open_db(CACHE_MB)) as db, db.transaction() as connection:
        connection.root()['template'] = Record()


def template(db: DB) -> bytes:
    with db.transaction() as connection:
        return connection._storage.load(connection.root()['template']._p_oid)[0]


def fill(site: storages.Site, have: int, want: int) -> None:
    """Add objects until there are `want` of them."""
    with closing(site.open_db(CACHE_MB)) as db:
        state = template(db)
        if not ('PostgreSQL' in site.kind or 'SQLite' in site.kind):
            fill_by_api(db.storage, state, have, want)
            return
    fill_by_sql = fill_postgresql if 'PostgreSQL' in site.kind else fill_sqlite
    fill_by_sql(site.where, state, have, want)


def fill_by_api(storage, state: bytes, have: int, want: int) -> None:
    for start in range(have, want, PER_TRANSACTION):
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        for n in range(start, min(start + PER_TRANSACTION, want)):
            storage.store(p64(FIRST + n), z64, state, '', txn)
        storage.tpc_vote(txn)
        storage.tpc_finish(txn)


# relstore and RelStorage have the same tables.
POSTGRESQL = """
CREATE TEMPORARY TABLE base AS SELECT max(tid) AS tid FROM transaction;
INSERT INTO transaction (tid, packed, is_empty, username, description)
    SELECT base.tid + 1 + n, false, false, '', ''
    FROM base, generate_series(0, (%(want)s - %(have)s - 1) / %(many)s) AS n;
INSERT INTO object_state (zoid, tid, prev_tid, md5, state_size, state)
    SELECT %(first)s + n, base.tid + 1 + (n - %(have)s) / %(many)s, 0, NULL, %(size)s, %(state)s
    FROM base, generate_series(%(have)s, %(want)s - 1) AS n;
INSERT INTO current_object (zoid, tid)
    SELECT %(first)s + n, base.tid + 1 + (n - %(have)s) / %(many)s
    FROM base, generate_series(%(have)s, %(want)s - 1) AS n;
SELECT setval('zoid_seq', (%(first)s + %(want)s) / 16 + 1);
"""
SQLITE = """
CREATE TEMPORARY TABLE base AS SELECT max(tid) AS tid FROM "transaction";
CREATE TEMPORARY TABLE numbers AS
    WITH RECURSIVE numbers(n) AS (VALUES({have}) UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {want})
    SELECT n FROM numbers;
INSERT INTO "transaction" (tid, packed, is_empty, username, description)
    SELECT DISTINCT base.tid + 1 + (n - {have}) / {many}, 0, 0, X'', X'' FROM base, numbers;
INSERT INTO object_state (zoid, tid, prev_tid, md5, state_size, state)
    SELECT {first} + n, base.tid + 1 + (n - {have}) / {many}, 0, NULL, {size}, X'{state}' FROM base, numbers;
INSERT INTO current_object (zoid, tid)
    SELECT {first} + n, base.tid + 1 + (n - {have}) / {many} FROM base, numbers;
"""


def fill_postgresql(dsn: str, state: bytes, have: int, want: int) -> None:
    import psycopg2

    values = {'first': FIRST, 'have': have, 'want': want, 'many': PER_TRANSACTION, 'size': len(state), 'state': state}
    with closing(psycopg2.connect(dsn)) as connection:
        with connection, connection.cursor() as cursor:
            cursor.execute(POSTGRESQL, values)
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute('VACUUM ANALYZE')


def fill_sqlite(directory: str, state: bytes, have: int, want: int) -> None:
    script = SQLITE.format(first=FIRST, have=have, want=want, many=PER_TRANSACTION, size=len(state), state=state.hex())
    with closing(sqlite3.connect(Path(directory) / 'main.sqlite3')) as connection:
        connection.executescript(f'BEGIN; {script} COMMIT; ANALYZE;')
