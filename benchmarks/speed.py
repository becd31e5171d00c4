"""The speed test of the field's first charts: objects written and read per second, by concurrent clients.

add       new objects, one transaction
update    all of them changed, one transaction
warm      read in the next transaction: the storage has just written them, the connection has dropped them
cold      read with the storage's cache emptied, and the connection's
hot       read with the connection's cache emptied: they come from the storage's cache
steamin   read again: they come from the connection's cache

Each client has its objects to itself.
"""

from __future__ import annotations

import gc
import itertools
import time
from contextlib import closing, suppress

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from transaction.interfaces import NoTransaction
from ZODB.DB import DB

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, rounds
from benchmarks.objects import Record

PART = 'speed'
TITLE = 'Speed test'
PHASES = ('add', 'update', 'warm', 'cold', 'hot', 'steamin')

# objects per transaction: (numbers of clients, seconds of a phase, (seconds, rounds at least, at most))
FULL = {100: ((1, 2, 4, 8, 15), 0.15, (150, 3, 5)), 10_000: ((1, 4, 15), 0, (120, 1, 3))}
QUICK = {100: ((1, 4), 0.1, (0, 1, 1)), 1_000: ((1, 2), 0.1, (0, 1, 1))}
SMOKE = {20: ((1, 2), 0, (0, 1, 1))}


def measure(lab: storages.Lab, results: Results, sizes: dict = FULL, names=storages.MAIN) -> None:
    """Measure all storages in turn, round after round."""
    names = storages.available(results, PART, names)
    results.note(PART, 'Clients are processes, each with its own DB; those of FileStorage are threads of one process.')
    results.note(PART, 'FileStorage has no cache of its own, so cold, warm and hot differ little.')
    for objects, (numbers, seconds, limits) in sizes.items():
        done = 0
        for _ in rounds(*limits):
            for number, name in itertools.product(numbers, names):
                run(lab, results, name, objects, number, seconds)
            done += 1
        results.note(PART, f'{objects:,} objects: {done} round{"s" if done > 1 else ""}; a phase is repeated for '
                           f'{seconds} s, and done once at least.')  # fmt: skip


def run(lab: storages.Lab, results: Results, name: str, objects: int, number: int, seconds: float) -> None:
    with lab.site(name) as site:
        with closing(site.open_db()) as db, db.transaction() as connection:
            connection.root()['clients'] = PersistentMapping((n, PersistentMapping()) for n in range(number))
        rates = clients.run(site, number, work, objects, seconds)
    for phase in PHASES:
        case = Case(PART, f'{objects:,} objects per transaction', phase, 'objects/s', 'more', 'concurrent clients')
        results.add(case, name, sum(rate[phase] for rate in rates), number)


def work(db: DB, number: int, barrier, objects: int, seconds: float) -> dict[str, float]:
    """Return objects per second of this client, by phase.

    A phase begins at the same time in all clients and lasts `seconds`, so that they are at work together;
    what is done between its transactions is not counted.
    """
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    data = [Record().data for _ in range(objects)]

    def add():
        manager.begin()
        connection.root()['clients'][number].update((n, Record(data[n])) for n in range(objects))
        manager.commit()

    def update():
        manager.begin()
        for record in connection.root()['clients'][number].values():
            record.number += 1
        manager.commit()

    def begin_and_read():
        manager.begin()
        read()

    def read():
        for record in connection.root()['clients'][number].values():
            record.number  # noqa: B018 (loads the object)

    def forget():
        with suppress(NoTransaction):
            manager.abort()
        connection.cacheMinimize()

    def forget_just_written():
        if times:
            forget()
            update()  # the first time the phase before has done it
        connection.cacheMinimize()

    def forget_all():
        forget()
        storages.empty_storage_cache(db.storage)

    phases = {
        'add': (forget, add),
        'update': (lambda: None, update),
        'warm': (forget_just_written, begin_and_read),
        'cold': (forget_all, begin_and_read),
        'hot': (forget, begin_and_read),
        'steamin': (lambda: None, read),
    }
    rates = {}
    for phase, (prepare, step) in phases.items():
        times, spent = 0, 0.0
        gc.collect()
        barrier.wait()
        deadline = time.perf_counter() + seconds
        while not times or time.perf_counter() < deadline:
            prepare()
            begin = time.perf_counter()
            step()
            spent += time.perf_counter() - begin
            times += 1
        rates[phase] = times * objects / spent
    manager.abort()
    connection.close()
    return rates
