"""Clients: the processes of a storm. Each writes a journal, a line for whatever it was told, or was served."""
import faulthandler
import json
import logging
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64

import relstore
from relstore.caching import memcached
from relstore.errors import ConfigurationError, OutcomeUnknown
from relstore.tests.crash.ledger import ACKNOWLEDGED, FAILED, UNKNOWN, Attempt, Ledger, Revision, Served
from relstore.tests.support.records import state, value_of

READS, LOADS, STORES = 10, 6, 2     # objects of a transaction: of a reader; of a writer, and how many it changes
TRANSACTIONS = 20       # that a storage with a saved cache lives
THINKS, THOUGHT = 0.2, 0.8      # how many writers take up to so many seconds between what they load and what they store
PAUSE = 0.005           # seconds between two transactions of a reader, and after a failure of any
PATIENCE = 5.0          # with memcached. One that is slow on a busy machine would be left alone: then nothing is saved
WRITER, READER, STARTER, UPLOADER = 'writer', 'reader', 'starter', 'uploader'
SIZES = 1, 100, 10_000, 100_000, 3_000_000      # bytes of blobs: of one message, and of many


class Board:
    """What the processes share, in memory that nobody can leave locked."""

    def __init__(self, processes: int, sites: Iterable[str]):
        self.stop = RawValue('b', 0)
        self.done = RawArray('q', processes)        # transactions that went well, by process
        # The newest tid by site and process: of what it was served, and of what it was told to be committed.
        self.served, self.told = ({site: RawArray('q', processes) for site in sites} for _ in range(2))

    def shows_what_is_not_durable(self) -> bool:
        """Whether anybody was served a commit that nobody has been told of yet, nor of a later one."""
        return any(max(self.served[site]) > max(self.told[site]) > 0 for site in self.told)


@dataclass(frozen=True)
class Site:
    """A database, as a process reaches it."""
    name: str
    dsn: str
    driver: str
    keep_history: bool
    oids: list[int]
    blobs: list[int]                # oids of objects that have data besides
    options: Mapping[str, Any]      # of RelStore

    def open(self) -> relstore.RelStore:
        address = relstore.PostgreSQL(self.dsn, driver=self.driver)
        return relstore.RelStore(address, keep_history=self.keep_history, commit_lock_timeout=10, **self.options)


@dataclass(frozen=True)
class Plan:
    """What a process does: role, on each of the sites in turn."""
    number: int
    role: str
    sites: list[Site]
    journal: Path
    seed: int


def work(plan: Plan, board: Board) -> None:
    """Be a process, until the board says stop."""
    faulthandler.enable()
    logging.disable(logging.WARNING)
    role = {WRITER: Writer, READER: Reader, STARTER: Starter, UPLOADER: Uploader}[plan.role]
    with plan.journal.open('w', buffering=1) as journal, \
            patch.multiple(memcached, SLOW_SECONDS=PATIENCE, TIMEOUT_SECONDS=PATIENCE):
        def write(**entry) -> None:
            print(json.dumps(entry), file=journal)
        try:
            clients = [role(plan, site, board, write) for site in plan.sites]
            while not board.stop.value:
                for client in clients:
                    client.turn()
            for client in clients:
                client.close()
        except BaseException:
            write(broken=f'{plan.role} {plan.number}: {traceback.format_exc()}')
            raise


class Client:
    """Of one storage. turn() is one transaction; what a crash may do to it is not told."""

    def __init__(self, plan: Plan, site: Site, board: Board, write: Callable[..., None]):
        self.plan, self.site, self.board, self.write = plan, site, board, write
        self.served, self.told = board.served[site.name], board.told[site.name]
        self.chance = random.Random(f'{plan.seed} {plan.number} {site.name}')
        self.oids = site.oids
        self.storage: relstore.RelStore | None = None
        self.open()

    def open(self) -> None:
        self.storage = self.site.open()
        self.view = self.storage.new_instance()
        self.loaded: set[int] = set()       # from the database or memcached; what else is cached was in the file

    def close(self) -> None:
        storage, self.storage = self.storage, None
        if storage is not None:
            with suppress(TransientError):
                self.view.release()
            storage.close()

    def turn(self) -> None:
        begun = time.monotonic()
        try:
            self.view.poll_invalidations()
            self.transaction(begun)
            self.board.done[self.plan.number] += 1
        except (TransientError, OutcomeUnknown):
            time.sleep(PAUSE)
        finally:
            self.view.afterCompletion()

    def transaction(self, begun: float) -> None:
        raise NotImplementedError

    def load(self, begun: float, count: int) -> list[Revision]:
        """Load some objects, and note who served them."""
        found = []
        for oid in self.chance.sample(self.oids, count):
            before = self.storage.cache_stats()
            record, tid = self.view.load(p64(oid))
            after = self.storage.cache_stats()
            if after['shared_hits'] > before['shared_hits']:
                by = 'memcached'
            elif after['hits'] == before['hits']:
                by = 'database'
            else:
                by = 'process' if oid in self.loaded else 'file'
            if by != 'file':
                self.loaded.add(oid)
            found.append(Revision(oid, u64(tid), value_of(record)))
            self.served[self.plan.number] = max(u64(tid), self.served[self.plan.number])
            self.write(site=self.site.name, served=Served(begun, time.monotonic(), by, found[-1]))
        return found


class Reader(Client):

    def transaction(self, begun):
        self.load(begun, READS)
        time.sleep(PAUSE)


class Starter(Reader):
    """Its storage lives for a while, is saved, and begins with what was saved."""

    def turn(self):
        if self.storage is None or self.board.done[self.plan.number] % TRANSACTIONS == 0:
            self.close()
            try:
                self.open()
            except (TransientError, ConfigurationError):    # the server is down: check the dsn
                time.sleep(PAUSE)
                return
            self.storage.database.warm.filled.wait(PATIENCE)
        super().turn()


class Writer(Client):
    commits = 0
    loads, stores = LOADS, STORES

    def transaction(self, begun):
        found = self.load(begun, self.loads)
        if self.chance.random() < THINKS:
            time.sleep(self.chance.uniform(0, THOUGHT))
        self.commits += 1
        attempt = Attempt(self.plan.number << 32 | self.commits, time.monotonic(), found[:self.stores],
                          found[self.stores:])
        txn = TransactionMetaData()
        try:
            self.view.tpc_begin(txn)
            for oid, tid, _ in attempt.bases:
                self.store(p64(oid), p64(tid), attempt.value, txn)
            self.view.tpc_vote(txn)
            attempt.tid = u64(self.view.tpc_finish(txn))
            attempt.outcome = ACKNOWLEDGED
            self.told[self.plan.number] = attempt.tid
        except TransientError as e:
            attempt.outcome, attempt.why = FAILED, repr(e)[:200]
            raise
        except OutcomeUnknown as e:
            attempt.outcome, attempt.why = UNKNOWN, repr(e)[:200]
            raise
        finally:
            self.view.tpc_abort(txn)
            attempt.told = time.monotonic()
            self.write(site=self.site.name, attempt=asdict(attempt))

    def store(self, oid: bytes, tid: bytes, value: int, txn: TransactionMetaData) -> None:
        self.view.store(oid, tid, state(value), '', txn)


class Uploader(Writer):
    """Its objects are blobs, whose data follows from the value."""
    loads, stores = 2, 1

    def __init__(self, *args):
        super().__init__(*args)
        self.oids = self.site.blobs

    def load(self, begun, count):
        found = super().load(begun, count)
        for revision in found:
            if fault := wrong_data(self.view, revision):
                self.write(broken=f'{self.site.name}: {fault}')
        return found

    def store(self, oid, tid, value, txn):
        with tempfile.NamedTemporaryFile(dir=self.view.temporaryDirectory(), delete=False) as file:
            file.write(data_of(value))
        self.view.storeBlob(oid, tid, state(value), file.name, '', txn)


def data_of(value: int) -> bytes:
    """Return the data of a blob that has this value, and of no other."""
    chance = random.Random(value)
    return chance.randbytes(chance.choice(SIZES)) + p64(value)


def wrong_data(storage: relstore.RelStore, revision: Revision) -> str:
    """Return what is wrong with the data of a blob, in words; '' if nothing is. Of the first revision there is none."""
    oid, tid, value = revision
    if value < 0:
        return ''
    try:
        found = Path(storage.loadBlob(p64(oid), p64(tid))).read_bytes()
    except POSKeyError as e:
        return f'no data: {revision}: {e!r}'
    wanted = data_of(value)
    return '' if found == wanted else f'other data: {revision}: {len(found)} bytes, wanted {len(wanted)}'


def read(journal: Path, ledgers: Mapping[str, Ledger]) -> list[str]:
    """Enter a journal into the ledgers, by site; return what ended its process."""
    broken = []
    for line in journal.read_text().splitlines(keepends=True):
        if not line.endswith('\n'):
            break       # it is being written
        entry = json.loads(line)
        if 'broken' in entry:
            broken.append(entry['broken'])
        elif 'attempt' in entry:
            attempt = Attempt(**entry['attempt'])
            attempt.bases, attempt.others = ([Revision(*each) for each in some]
                                             for some in (attempt.bases, attempt.others))
            ledgers[entry['site']].attempts[attempt.value] = attempt
        else:
            begun, at, by, revision = entry['served']
            ledgers[entry['site']].served.append(Served(begun, at, by, Revision(*revision)))
    return broken
