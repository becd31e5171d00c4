"""Memory: what a cached object costs a process, and what a connection costs, in its process and on the server."""

from __future__ import annotations

import gc
import os
from contextlib import closing, contextmanager

from transaction import TransactionManager
from ZODB.utils import p64

from benchmarks import clients, occupancy, storages
from benchmarks.figures import Case, Results, rounds
from benchmarks.storages import Lab, Site

PART = 'memory'
TITLE = 'Memory'

FULL = {'objects': 100_000, 'connections': 100, 'rounds': (60, 1, 3)}
QUICK = {'objects': 20_000, 'connections': 50, 'rounds': (0, 1, 1)}
SMOKE = {'objects': 500, 'connections': 3, 'rounds': (0, 1, 1)}

WITH_CACHE = [name for name in storages.MAIN if name not in ('FileStorage', 'ZEO')]
# Not on the chart, where it would tell the same as `per cached object`.
OVERHEAD = Case(PART, 'client', 'per cached object, without its state', 'bytes', 'less', charted=False)
COUNT_SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=storages.MAIN) -> None:
    """Measure each storage in a new process, round after round."""
    names = storages.available(results, PART, names)
    results.note(PART, 'Per cached object: by how much the private memory of a new process grows when '
                       f'{sizes["objects"]:,} objects of about 200 bytes are loaded through the storage, less what it '
                       f'grows by when the cache is off. Per connection: its growth by {sizes["connections"]} ZODB '
                       'connections open at once, each in a transaction that has loaded one object.')  # fmt: skip
    results.note(PART, 'Not compared per cached object: FileStorage, which caches no states, and ZEO, whose cache is a '
                       'file.')  # fmt: skip
    for _ in rounds(*sizes['rounds']):
        for name in names:
            with lab.site(name) as site:
                occupancy.prepare(site)
                occupancy.fill(site, 0, sizes['objects'])
                if name in WITH_CACHE:
                    (with_cache, state), (without, _) = (
                        clients.alone(growth, site, sizes['objects'], cache_mb) for cache_mb in (storages.CACHE_MB, 0)
                    )
                    each = (with_cache - without) / sizes['objects']
                    results.add(Case(PART, 'client', 'per cached object', 'bytes', 'less'), name, each)
                    results.add(OVERHEAD, name, each - state)
                opened, sessions = clients.alone(per_connection, site, sizes['connections'])
            results.add(Case(PART, 'client', 'per connection', 'KB', 'less'), name, opened / 1000)
            if sessions is not None:
                results.add(held('history-preserving'), name, sessions)
                results.add(held('history-free'), name, history_free(lab, name, sizes['connections']))
    overheads = [(name, line[None]) for name in names if (line := results.line(OVERHEAD, name))]
    results.note(PART, 'Of what a cached object takes, so much is not its state: '
                       f'{", ".join(f"{name} {size:.0f} bytes" for name, size in overheads)}.')  # fmt: skip


def held(mode: str) -> Case:
    return Case(PART, 'sessions on the server, all connections in a transaction', mode, 'sessions', 'less')


def history_free(lab: Lab, name: str, connections: int) -> int:
    """Return how many sessions the connections hold in a history-free database."""
    with lab.site(name, keep_history=False) as site:
        occupancy.prepare(site)
        with closing(site.open_db()) as db:
            occupancy.fill_by_api(db.storage, occupancy.template(db), 0, connections + 1)
        _, sessions = clients.alone(per_connection, site, connections)
    return sessions


def resident() -> int:
    """Return the bytes of memory that this process holds, without those of files mapped into it."""
    gc.collect()
    with open('/proc/self/statm') as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf('SC_PAGE_SIZE')


def growth(site: Site, objects: int, cache_mb: int) -> tuple[int, int]:
    """Return by how many bytes this process grows when it loads all objects once, and the size of each state."""
    with closing(site.open(cache_mb)) as storage, closing_instance(storage) as instance:
        instance.poll_invalidations()
        state, _ = instance.load(p64(occupancy.FIRST))
        before = resident()
        for n in range(1, objects):
            instance.load(p64(occupancy.FIRST + n))
        return resident() - before, len(state)


@contextmanager
def closing_instance(storage):
    instance = storage.new_instance()
    try:
        yield instance
    finally:
        instance.release()


def per_connection(site: Site, connections: int) -> tuple[float, int | None]:
    with closing(site.open_db(pool_size=connections + 1)) as db:
        opened = [open_one(db, 0)]
        before = resident()
        opened += [open_one(db, n) for n in range(1, connections + 1)]
        grown = resident() - before
        sessions = sessions_of(site) if 'PostgreSQL' in site.kind else None
        for connection in opened:
            connection.transaction_manager.abort()
            connection.close()
    return grown / connections, sessions


def open_one(db, number: int):
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    manager.begin()
    connection.get(p64(occupancy.FIRST + number))._p_activate()
    return connection


def sessions_of(site: Site) -> int:
    import psycopg2

    server, _, database = site.where.rpartition('dbname=')
    with closing(psycopg2.connect(f'{server}dbname=postgres')) as connection, connection.cursor() as cursor:
        cursor.execute(COUNT_SESSIONS, (database,))
        return cursor.fetchone()[0]
