"""Clients: a process of the soak, with the threads in it that read and write."""
import collections
import faulthandler
import gc
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

from transaction import TransactionManager
from transaction.interfaces import NoTransaction, TransientError
from ZODB import DB
from ZODB.POSException import ConflictError

from relstore.caching.commits import RETRY_SECONDS
from relstore.errors import OutcomeUnknown
from relstore.tests.soak import world
from relstore.tests.soak.places import POLL_INTERVAL, Site

WRITERS = READERS = 2           # threads of a process for each site: one with explicit transactions, one without
THREADS = WRITERS + READERS
CONNECTION_OBJECTS = 300        # that a ZODB connection keeps: few, so that the storage's cache is asked
SECONDS_TO_STOP = 90
# With a memcached all writers work and rest at the same time: whatever the others were not told of, they would find
# with the next commit, if there always were one. A rest is long enough for what is seen late to be seen too late.
WORK, REST = 8, 4               # seconds
POLLS = 'polls_sent', 'polls_saved'     # of a storage's figures, those that are told
HASTE = 0.5                     # seconds that something short may take on a busy machine
SEEN_AFTER = POLL_INTERVAL + HASTE      # an acknowledgement whose process could not tell it to the others


class Board:
    """What the processes share: numbers in memory, which a killed process cannot leave locked."""

    def __init__(self, sites: int, processes: int):
        self.acknowledged = [RawArray('q', processes * WRITERS) for _ in range(sites)]     # by site and writer
        self.stop = RawValue('b', 0)
        # time.monotonic() from which on no transaction may fail. Another value after each crash of the server: what was
        # seen before, and not acknowledged, may be gone.
        self.calm = RawValue('d', 0.0)
        # By process: between which times its commits may have been unknown to the others.
        self.apart, self.together = RawArray('d', processes), RawArray('d', processes)

    def leaves_alone(self, process: int) -> None:
        """It cannot reach the memcached: so it cannot tell the others of what it commits from now on."""
        now = time.monotonic()
        if now > self.together[process]:
            self.apart[process] = now
        self.together[process] = float('inf')

    def returns(self, process: int) -> None:
        """It reaches the memcached, and tells the others as soon as it tries: then they know all."""
        self.together[process] = time.monotonic() + RETRY_SECONDS + HASTE

    def starts(self, process: int) -> None:
        """It is new. What the one before it could not tell, nobody will."""
        if self.together[process] == float('inf'):
            self.together[process] = time.monotonic() + SEEN_AFTER


@dataclass(frozen=True)
class Plan:
    """What a process does. `number`: which of them it is; the same again after it was killed."""
    number: int
    sites: list[Site]
    options: Mapping[str, Any]      # of RelStore
    seed: int
    pause: float                    # seconds between two transactions of a thread, in the mean
    again: bool = False


class Client:
    """One thread: it repeats one kind of transaction, and knows what it may find."""

    def __init__(self, db: DB, plan: Plan, board: Board, site: int, explicit: bool, keep: bool, chance: random.Random):
        self.db, self.board, self.site, self.chance, self.pause = db, board, site, chance, plan.pause
        self.manager = TransactionManager(explicit=explicit)
        self.acknowledged = board.acknowledged[site]
        self.unknown = plan.again       # whether its last commit may have happened though nobody was told
        self.connection = None
        self.rests = 'poll_interval' in plan.options
        self.keep = keep            # one connection for life, or one for each transaction as Zope does
        self.counts: collections.Counter[str] = collections.Counter()
        self.failure = ''

    def run(self) -> None:
        """Work until the end, or until something is wrong."""
        try:
            while not self.board.stop.value:
                began = time.monotonic()
                try:
                    self.transaction()
                except Exception as e:
                    self.excuse(e, began)
                time.sleep(self.until_next())
        except BaseException:   # told by the report; the other threads go on
            self.failure = f'{type(self).__name__}: {traceback.format_exc()}'
        finally:
            self.close()

    def until_next(self) -> float:
        """Return the seconds to wait before the next transaction."""
        return self.chance.expovariate(1 / self.pause) if self.pause else 0

    def excuse(self, error: Exception, began: float) -> None:
        """Count an error that a transaction may meet; raise it if it may not."""
        if isinstance(error, ConflictError):
            self.counts['conflicts'] += 1
        elif isinstance(error, (TransientError, OutcomeUnknown)) and began < self.board.calm.value:
            self.counts[type(error).__name__] += 1
        else:
            raise error

    def transaction(self) -> None:
        if self.connection is None:
            self.connection = self.db.open(self.manager)
        try:
            self.manager.begin()
            self.work(self.connection.root())
        except BaseException:
            self.abort()
            raise
        finally:
            if not self.keep:
                self.close()

    def work(self, root) -> None:
        """Do what is to be done in a transaction that has begun, and end it."""
        raise NotImplementedError

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            try:
                self.abort()
            finally:
                connection.close()

    def abort(self) -> None:
        with suppress(NoTransaction):   # explicit, and it has ended
            self.manager.abort()


class Writer(Client):

    def __init__(self, *arguments, number: int):
        super().__init__(*arguments)
        self.number = number

    def until_next(self):
        waited, now = super().until_next(), time.monotonic() % (WORK + REST)
        return max(waited, WORK + REST - now) if self.rests and now > WORK else waited

    def work(self, root):
        told, found = self.acknowledged[self.number], root['counters'][self.number].value
        if found != told and not (self.unknown and found == told + 1):
            raise world.Broken(f'Writer {self.number} was told of {told} commits and finds {found}'
                               f'{", and of one more it does not know" if self.unknown else ""}')
        self.acknowledged[self.number], self.unknown = found, False
        world.change(root, self.number, self.chance)
        try:
            self.manager.commit()
        except OutcomeUnknown:
            self.unknown = True
            raise
        self.acknowledged[self.number] = found + 1
        self.counts['commits'] += 1


class Listener(logging.Handler):
    """Takes what is logged, for ZODB and relstore tell of every lost connection, and notes what readers have to know:
    when the process leaves a memcached alone, whatever the reason, and when it uses it again.
    """

    def __init__(self, board: Board, process: int):
        super().__init__()
        self.board, self.process = board, process
        self.pauses = 0         # that have begun
        self.alone = 0          # storages that leave it alone now

    def emit(self, record):
        if record.name != 'relstore':
            return
        if record.msg.startswith('memcached %s does not answer'):
            self.pauses += 1
            self.alone += 1
            self.board.leaves_alone(self.process)
        elif record.msg.startswith('memcached %s answers again'):
            self.alone -= 1
            if not self.alone:
                self.board.returns(self.process)


class Told:
    """What a view must show: what was acknowledged before it was taken, and had to be known to all."""

    def __init__(self, board: Board, acknowledged: Sequence[int]):
        self.board, self.acknowledged = board, acknowledged
        self._before: collections.deque[tuple[float, list[int]]] = collections.deque()    # (when, what)

    def least(self) -> list[int]:
        """Return how many commits of each writer a view shows that is taken now."""
        told = list(self.acknowledged)      # first: what is told here was noted before, if it could not be told to all
        now = time.monotonic()
        while len(self._before) > 1 and self._before[1][0] < now - SEEN_AFTER:
            self._before.popleft()
        self._before.append((now, told))
        return [count if now > self.board.together[number // WRITERS] else self._known(number, now)
                for number, count in enumerate(told)]

    def _known(self, writer: int, now: float) -> int:
        """Return how many of the writer's commits all know, though its process may have left the memcached alone."""
        known = max(self.board.apart[writer // WRITERS], now - SEEN_AFTER)
        return next((what[writer] for when, what in reversed(self._before) if when < known), 0)


class Reader(Client):
    """What it has seen itself, it is to see again; but what was not acknowledged may be gone after a crash."""
    calm: float | None = None       # what the board said when that began which it has seen

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: dict[int, int] = {}
        self.least = Told(self.board, self.acknowledged).least

    def transaction(self):
        if self.calm != self.board.calm.value:
            self.calm, self.seen = self.board.calm.value, {}
        self.told = self.least()        # before the view is taken
        super().transaction()

    def work(self, root):
        for number, counter in root['counters'].items():
            told, seen = self.told[number], self.seen.get(number, 0)
            if counter.value < max(told, seen):
                raise world.Broken(f'Writer {number} was told of {told} commits, and this reader has seen {seen}; a '
                                   f'view shows {counter.value}')
            self.seen[number] = counter.value
        world.check(root, world.some_pairs(self.chance))
        self.manager.abort()
        # Until a disturbance is over what is seen may be of before the crash, and be gone.
        if self.board.calm.value != self.calm or self.calm == float('inf'):
            self.seen = {}
        self.counts['reads'] += 1


def work(plan: Plan, board: Board, pipe: Connection) -> None:
    """Be a process: report each second, until the board says stop or nobody listens any more."""
    faulthandler.enable()
    logging.getLogger().addHandler(listener := Listener(board, plan.number))
    logging.getLogger('relstore').setLevel(logging.INFO)
    board.starts(plan.number)
    with ExitStack() as stack:
        stores = [_patiently(lambda site=site: site.open(plan.options), board) for site in plan.sites]
        dbs = [stack.enter_context(closing(DB(store, cache_size=CONNECTION_OBJECTS))) for store in stores]
        clients = [client for site, db in enumerate(dbs) for client in _clients(plan, board, site, db)]
        threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        wait = threading.Event().wait
        while not board.stop.value:
            wait(1)
            try:
                pipe.send(_report(clients, stores, listener))
            except BrokenPipeError:
                return
        deadline = time.monotonic() + SECONDS_TO_STOP
        for thread in threads:
            thread.join(max(0, deadline - time.monotonic()))
        report = _report(clients, stores, listener)
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(sys.stderr)
            report['failures'].append(f'A thread still works {SECONDS_TO_STOP} s after it was told to stop')
        report['unknown'] = [(client.site, client.number) for client in clients
                             if isinstance(client, Writer) and client.unknown]
        report['kept'] = sum(store.database.pool.lent for store in stores)
        pipe.send(report)
        gc.collect()    # DB.close() stumbles over connections that could not be opened, if they are still there


def _patiently(open_it: Callable, board: Board):
    """Return what open_it() returns, tried again while the server may be away."""
    while True:
        try:
            return open_it()
        except TransientError:
            if time.monotonic() > board.calm.value:
                raise
            time.sleep(0.2)


def _clients(plan: Plan, board: Board, site: int, db: DB) -> list[Client]:
    clients: list[Client] = []
    for n in range(WRITERS):
        chance = random.Random(f'{plan.seed} {plan.number} {plan.again} {site} writer {n}')
        clients.append(Writer(db, plan, board, site, bool(n % 2), not n % 2, chance,
                              number=plan.number * WRITERS + n))
    for n in range(READERS):
        chance = random.Random(f'{plan.seed} {plan.number} {plan.again} {site} reader {n}')
        clients.append(Reader(db, plan, board, site, bool(n % 2), bool(n % 2), chance))
    return clients


def _report(clients: list[Client], stores: list, listener: Listener) -> dict[str, Any]:
    counts = collections.Counter({'pauses without memcached': listener.pauses} if listener.pauses else {})
    for client in clients:
        counts.update(client.counts.copy())
    for store in stores:
        counts.update({name: store.cache_stats()[name] for name in POLLS})
    return {
        'counts': dict(counts),
        'cache': sum(store.database.cache.stats()['bytes'] for store in stores),
        'failures': [client.failure for client in clients if client.failure],
    }
