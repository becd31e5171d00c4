"""Storm: writers and readers on a server that is killed again and again, from empty databases to the verdict."""
import collections
import multiprocessing
import random
import shutil
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from ZODB.utils import u64

import relstore
from relstore.tests.crash.clients import (
    READER,
    STARTER,
    UPLOADER,
    WRITER,
    Board,
    Plan,
    Site,
    read,
    work,
    wrong_data,
)
from relstore.tests.crash.ledger import ACKNOWLEDGED, FAILED, UNKNOWN, Ledger, Revision
from relstore.tests.crash.window import Crashes
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state, value_of
from relstore.tests.support.servers import MemcachedServer, PgBouncerServer, PostgreSQLServer
from relstore.tests.support.watch import Watch

OBJECTS, BLOBS = 40, 6
WRITERS, READERS, STARTERS, UPLOADERS = 8, 3, 2, 3
LEAST_ROUND, LONGEST_ROUND = 0.3, 1.0       # seconds that all work, before the next crash
PATIENCE = 1.0                              # seconds to wait for the best moment of all
TOLD = 2                                    # faults of a kind; one makes many
SECONDS_TO_GO_ON = 60                       # after a crash, for each process
POLL_INTERVAL = 3600        # nobody polls for its own sake
FORK = multiprocessing.get_context('fork')
# The log is written 100 ms after a commit began to wait for that: so long all can see what a crash takes away.
SLOW_LOG = 'ALTER DATABASE {} SET commit_delay = 100000', 'ALTER DATABASE {} SET commit_siblings = 0'


class Storm:
    """go() makes it; then there are `crashes` by way, `ledgers` and `blobs` by site, and what was wrong in `faults`.

    server: durable, with a slow writer of its log.
    """

    def __init__(self, server: PostgreSQLServer, seconds: float, seed: int):
        self.server, self.seconds = server, seconds
        self.seed, self.chance = seed, random.Random(seed)
        self.crashes: collections.Counter[str] = collections.Counter()
        self.ledgers: dict[str, Ledger] = {}
        self.blobs: dict[str, int] = {}     # revisions whose data was compared in the end, by site
        self.faults: list[str] = []

    def go(self) -> None:
        with ExitStack() as stack:
            self._directory = Path(tempfile.mkdtemp(prefix='relstore-storm-'))
            stack.callback(shutil.rmtree, self._directory)
            self._memcached, self._bouncer = MemcachedServer(), PgBouncerServer(self.server, {
                'default_pool_size': 20, 'server_login_retry': 0.1, 'query_wait_timeout': 5})
            for started in self._memcached, self._bouncer:
                stack.callback(started.stop)
                started.start()
            self._dsns: dict[str, str] = {}
            self._oids: dict[str, list[int]] = {}
            self._blobs: dict[str, list[int]] = {}
            self._options: dict[str, dict[str, Any]] = {}
            for name, keep_history in ('preserving', True), ('free', False):
                self._create(stack, name, keep_history)
            self._run()
            self._look()
        for name, ledger in self.ledgers.items():
            kinds = collections.Counter()
            for fault in ledger.faults():
                kinds[kind := fault.partition(':')[0]] += 1
                if kinds[kind] <= TOLD:
                    self.faults.append(f'{name}: {fault}')
            self.faults += [f'{name}: {count - TOLD} more {kind}' for kind, count in kinds.items() if count > TOLD]

    def _create(self, stack: ExitStack, name: str, keep_history: bool) -> None:
        database = f'storm_{name}_{self.seed}'
        self._dsns[name] = dsn = self.server.create_database(database)
        stack.callback(self.server.drop_database, database)
        # The one has its blobs in the database, the other in a directory.
        self._options[name] = {'blob_dir': str(self._directory / f'blobs {name}'),
                               'shared_blob_dir': keep_history == bool(self.seed % 2)}
        with self._open(name, keep_history) as storage:
            oids = [storage.new_oid() for _ in range(OBJECTS + BLOBS)]
            commit(storage, *((oid, bytes(8), state(-1)) for oid in oids))
        with closing(Watch(dsn)) as watch:
            for setting in SLOW_LOG:
                watch.rows(setting.format(database))
        self._oids[name], self._blobs[name] = [*map(u64, oids[:OBJECTS])], [*map(u64, oids[OBJECTS:])]
        self.ledgers[name] = Ledger(keeps_history=keep_history)

    def _open(self, name: str, keep_history: bool, **more) -> closing:
        options = self._options[name] | more
        return closing(relstore.RelStore(relstore.PostgreSQL(self._dsns[name]), keep_history=keep_history, **options))

    def _plan(self, number: int, role: str) -> Plan:
        # All who commit count their commits, and every other one comes through the pooler.
        options: dict[str, Any] = {'cache_local_mb': 1}
        if role == WRITER or number % 3:
            options |= {'cache_servers': self._memcached.where, 'poll_interval': POLL_INTERVAL}
        if role == STARTER:
            options['cache_local_dir'] = str(self._directory / f'saved {number}')
        sites = [Site(name, self._bouncer.dsn(dsn) if number % 2 else dsn,
                      'psycopg' if number % 4 > 1 else 'psycopg2', self.ledgers[name].keeps_history,
                      self._oids[name], self._blobs[name], options | self._options[name])
                 for name, dsn in self._dsns.items()]
        return Plan(number, role, sites, self._directory / f'journal {number}', self.seed)

    def _run(self) -> None:
        roles = [WRITER] * WRITERS + [READER] * READERS + [STARTER] * STARTERS + [UPLOADER] * UPLOADERS
        plans = [self._plan(number, role) for number, role in enumerate(roles)]
        self._board = Board(len(plans), self.ledgers)
        self._processes = [FORK.Process(target=work, args=(plan, self._board), daemon=True)
                           for plan in plans]
        for process in self._processes:
            process.start()
        try:
            with closing(Crashes(self.server, self._dsns['preserving'])) as crashes:
                begun = time.monotonic()
                while self._all_go_on() and not self._is_enough(time.monotonic() - begun):
                    time.sleep(self.chance.uniform(LEAST_ROUND, LONGEST_ROUND))
                    self._crash(crashes)
        finally:
            self._board.stop.value = 1
            deadline = time.monotonic() + SECONDS_TO_GO_ON
            for process in self._processes:
                process.join(max(0, deadline - time.monotonic()))
                if process.is_alive():
                    self.faults.append(f'process {process.pid} did not stop')
                    process.kill()
                    process.join()
        self.faults += self._read()

    def _is_enough(self, seconds: float) -> bool:
        """Whether the time is up; a storm that nobody has seen a phantom in goes on, but not for ever."""
        if seconds < self.seconds or not self.crashes:
            return False
        self._read()
        return seconds > 4 * self.seconds or any(ledger.phantoms() for ledger in self.ledgers.values())

    def _read(self) -> list[str]:
        """Enter what the processes have written down; return what has ended any of them."""
        for ledger in self.ledgers.values():
            ledger.attempts, ledger.served = {}, []
        return [broken for journal in self._directory.glob('journal *') for broken in read(journal, self.ledgers)]

    def _crash(self, crashes: Crashes) -> None:
        way = self.chance.choice(['kill_server', 'kill_backend'])
        begun = time.monotonic()
        getattr(crashes, way)(self._await_phantom)
        for ledger in self.ledgers.values():
            ledger.crashes.append((begun, time.monotonic()))
        self.crashes[way] += 1

    def _await_phantom(self) -> None:
        """Return when somebody was served what is not on disk, likely; or never mind."""
        deadline = time.monotonic() + PATIENCE
        while not self._board.shows_what_is_not_durable() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _all_go_on(self) -> bool:
        """Return when each process has done something; False if one has not for long, or has ended."""
        before, deadline = list(self._board.done), time.monotonic() + SECONDS_TO_GO_ON
        while any(now == then for now, then in zip(self._board.done, before, strict=True)):
            dead = [process.pid for process in self._processes if not process.is_alive()]
            if dead or time.monotonic() > deadline:
                self.faults.append(f'processes {dead} have ended' if dead else
                                   f'some do not go on: {before} transactions, later {list(self._board.done)}')
                return False
            time.sleep(0.01)
        return True

    def _look(self) -> None:
        """Enter what is there in the end."""
        for name, ledger in self.ledgers.items():
            with closing(Watch(self._dsns[name])) as watch:
                oids = self._oids[name] + self._blobs[name]
                ledger.rows = {(oid, tid): value_of(bytes(record)) for oid, tid, record in watch.rows(
                    'SELECT zoid, tid, state FROM object_state WHERE zoid = ANY(%s)', oids)}
            # As a machine reads them that has none of them in a cache.
            more = {} if self._options[name]['shared_blob_dir'] else {'blob_dir': str(self._directory / f'new {name}')}
            with self._open(name, ledger.keeps_history, **more) as storage:
                data = [wrong_data(storage, Revision(oid, tid, value)) for (oid, tid), value in ledger.rows.items()
                        if oid in self._blobs[name]]
            self.blobs[name] = len(data)
            self.faults += [f'{name}: {fault}' for fault in data if fault]

    def report(self) -> str:
        """Return what happened, in a few lines."""
        lines = [f'Seed {self.seed}; crashes: {dict(self.crashes)}']
        for name, ledger in self.ledgers.items():
            outcomes = collections.Counter(attempt.outcome for attempt in ledger.attempts.values())
            commits = ', '.join(f'{outcomes[each]:,} {each}' for each in (ACKNOWLEDGED, FAILED, UNKNOWN))
            lines.append(f'{name}: commits: {commits}; phantoms served: {dict(ledger.phantoms()) or "none"}; '
                         f'blobs compared: {self.blobs.get(name, 0):,}; '
                         f'served in all: {dict(collections.Counter(served.by for served in ledger.served))}')
        return '\n'.join([*lines, *(f'FAULT: {fault}' for fault in self.faults)])
