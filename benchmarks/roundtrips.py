"""Round trips between client and server, counted by a proxy: no clock, exact numbers.

A round trip is one change of direction: the client speaks after the server has spoken. Counted on an open
connection with an explicit transaction manager; commits include the poll at their beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.POSException import ConflictError

from benchmarks import storages
from benchmarks.figures import Case, Results
from benchmarks.objects import Record, Stubborn
from benchmarks.storages import KINDS, Lab, Site
from relstore.tests.support.proxy import CuttingProxy

PART = 'roundtrips'
TITLE = 'Round trips'
TIMES = 5  # each thing is counted so often; the figure is the median, and the JSON has them all

FULL = QUICK = {}
NAMES = [name for name in storages.ALL if KINDS[name].server in storages.SERVERS]


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Count for both history modes and each driver."""
    results.cannot(PART, 'SQLite, FileStorage', 'files, to which there is no way that could be counted')
    results.cannot(PART, 'ZEO', 'its client and server send each other messages unasked: there are no round trips')
    results.note(PART, 'psycopg 3 and RelStorage do not go together, so RelStorage is here with psycopg2 alone.')
    for keep_history in (True, False):
        group = 'history-preserving' if keep_history else 'history-free'
        for name in storages.available(results, PART, names):
            if keep_history and KINDS[name].history_free:
                continue
            with lab.site(name, keep_history) as site:
                for operation, counts in Count(lab, site).all().items():
                    if len(set(counts)) > 1:
                        results.note(PART, f'{name}, {group}, {operation}: it varies, {", ".join(map(str, counts))}.')
                    case = Case(PART, group, operation, 'round trips', 'less')
                    for number in counts:
                        results.add(case, name, number)


class Count:
    """One connection through the proxy, and one beside it that makes conflicts."""

    def __init__(self, lab: Lab, site: Site):
        self.lab, self.site = lab, site

    def all(self) -> dict[str, list[int]]:
        """Return the counts by operation."""
        server = self.lab.server(KINDS[self.site.kind].server)
        with (
            CuttingProxy(server.address) as self.proxy,
            closing(self.site.open_db()) as self.others,
            closing(self.lab.by_tcp(self.site, self.proxy.port).open_db()) as self.db,
        ):
            self.manager = TransactionManager(explicit=True)
            self.connection = self.db.open(self.manager)
            self.root = self.connection.root()
            with self.manager:
                self.root['records'] = PersistentMapping((n, Record()) for n in range(100))
                self.root['stubborn'] = Stubborn()
                self.root['other'] = Record()
            operations = {
                'read-only transaction, all cached': self.read_only,
                'load of an object that is not cached': self.miss,
                'commit of 1 object': lambda: self.commit(1),
                'commit of 10 objects': lambda: self.commit(10),
                'commit of 100 objects': lambda: self.commit(100),
                'new oids, when there are none left': self.new_oids,
                'commit with a conflict, resolved': lambda: self.conflict(self.root['records'][0]),
                'commit with a conflict, not resolved': lambda: self.conflict(self.root['stubborn']),
            }
            if self.site.keep_history:
                operations['undo of 1 object'] = self.undo
            counts = {name: self.repeated(operation) for name, operation in operations.items()}
            self.connection.close()
        return counts

    def repeated(self, operation: Callable[[], int]) -> list[int]:
        operation()  # what is prepared once is not counted
        return [operation() for _ in range(TIMES)]

    def counted(self, act: Callable) -> int:
        before = self.proxy.round_trips
        act()
        return self.proxy.round_trips - before

    def read_only(self) -> int:
        with self.manager:
            self.root['records'][1]._p_activate()

        def transaction():
            self.manager.begin()
            self.root['records'][1]._p_activate()
            self.manager.abort()

        return self.counted(transaction)

    def miss(self) -> int:
        with self.manager:
            record = self.root['records'][2]
            record._p_deactivate()
            storages.empty_storage_cache(self.db.storage)
            return self.counted(record._p_activate)

    def commit(self, objects: int) -> int:
        def transaction():
            self.manager.begin()
            for n in range(objects):
                self.root['records'][n].number += 1
            self.manager.commit()

        with self.manager:
            for n in range(objects):
                self.root['records'][n]._p_activate()
        return self.counted(transaction)

    def new_oids(self) -> int:
        cost = 0
        while not cost:
            cost = self.counted(self.connection.new_oid)
        return cost

    def conflict(self, mine) -> int:
        with self.manager:
            mine._p_activate()

        def transaction():
            self.manager.begin()
            mine.number += 1
            self.change_elsewhere(mine._p_oid)
            try:
                self.manager.commit()
            except ConflictError:
                self.manager.abort()

        return self.counted(transaction)

    def change_elsewhere(self, oid: bytes) -> None:
        """Commit a change past the proxy."""
        with self.others.transaction() as connection:
            connection.get(oid).number += 1

    def undo(self) -> int:
        with self.manager:
            self.root['other'].number += 1
        newest = self.db.undoInfo(0, 1)[0]['id']

        def transaction():
            self.db.undo(newest, self.manager.begin())
            self.manager.commit()

        return self.counted(transaction)
