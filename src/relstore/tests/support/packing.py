"""Packs for tests: what is garbage, and what happens between which of a pack's steps."""
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import TestCase
from unittest.mock import Mock, patch

from persistent.TimeStamp import TimeStamp
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, POSKeyError, StorageError, UndoError
from ZODB.utils import u64, z64

import relstore
from relstore.adapters.base import Adapter
from relstore.packing import pack
from relstore.packing.garbage import GarbageList
from relstore.packing.packs import Packs
from relstore.packing.report import Report
from relstore.tests.support.backends import (
    Backend,
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
)
from relstore.tests.support.objects import Client, reachable
from relstore.tests.support.records import record
from relstore.tests.support.servers import DurableLayer, DurableMariaDBLayer, require_mariadb, require_postgresql

BACKENDS = (SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving, Psycopg2HistoryFree,
            MySQLdbHistoryPreserving, MySQLdbHistoryFree)


# The steps of a pack: what its adapter does, and
OF_THE_ADAPTER = (
    'begin_snapshot', 'estimated_count', 'revisions', 'save_references', 'add_garbage', 'changes',
    'lock_votes', 'sweep', 'forget_transactions', 'poll', 'last_tid', 'writes_alone', 'meta')
# what is done with the tables of packs: by whom, an attribute of the adapter's or a class.
WITH_TABLES = {
    'last_pack': (Packs, 'last'), 'new_pack': (Packs, 'new'), 'end_marking': (Packs, 'end_marking'),
    'start_sweep': (Packs, 'start_sweep'), 'end_sweep': (Packs, 'end_sweep'), 'garbage': (GarbageList, '_page'),
    'garbage_revisions': (GarbageList, 'revisions'), 'spare': (GarbageList, 'spare'),
    'garbage_end': (GarbageList, 'end'), 'forget_garbage': (GarbageList, '_forget'),
    'lock_pack': ('pack_lock', 'take'), 'sweep_state': ('sweeps', 'state'), 'swept': ('sweeps', 'swept')}
STEPS = *OF_THE_ADAPTER, *WITH_TABLES


# What a link to something that goes, or has gone, may raise.
REFUSED = ConflictError, StorageError, POSKeyError


@dataclass(frozen=True)
class Cluster:
    """holder -> (one -> two): the holder can be reached, and what it once referred to cannot."""
    holder: bytes
    one: bytes
    two: bytes


class Suite(TestCase):
    """self.storage is the packer's process, self.site another."""

    def setUp(self):
        super().setUp()
        self.storage, self.site = self.opened(), self.opened(commit_lock_timeout=3)
        self.packing = self.storage.database.adapter

    def opened(self, name='main', **options) -> relstore.RelStore:
        storage = self.open_storage(name, **options)
        self.addCleanup(storage.close)
        return storage

    def client(self, storage: relstore.RelStore | None = None) -> Client:
        client = Client(storage or self.site)
        self.addCleanup(client.view.release)
        return client

    def clusters(self, count: int) -> list[Cluster]:
        """Make clusters, and garbage of what was there before."""
        new = [Cluster(*(self.site.new_oid() for _ in range(3))) for _ in range(count)]
        client = Client(self.site)
        holders = [cluster.holder for cluster in new]
        client.finish(client.vote((z64, record(*holders)), *((c.holder, record(c.one)) for c in new),
                                  *((c.one, record(c.two)) for c in new), *((c.two, record()) for c in new)))
        client.begin()
        client.finish(client.vote(*((holder, record()) for holder in holders)))
        client.view.release()
        return new

    def ends(self, fresh: relstore.RelStore | None = None) -> set[bytes]:
        """Assert that all that can be reached is there, for a process that begins now; return it."""
        with closing(self.open_storage()) as fresh:
            return reachable(fresh)

    def exists(self, oid: bytes) -> bool:
        database = self.site.database
        return database.pool.attempt(database.adapter.load_now, oid and u64(oid)) is not None

    def rows(self, sql: str) -> list[tuple]:
        return self.site.database.pool.attempt(lambda session: session.all(sql))

    def run_sql(self, sql: str) -> None:
        self.site.database.pool.attempt(lambda session: session.run(sql))

    def undo(self, *tids: bytes, keep: bool = True) -> bool:
        """Undo transactions in one; see that all is there, and undo that again. Return whether it could be done."""
        view = self.site.new_instance()
        try:
            txn = TransactionMetaData()
            view.tpc_begin(txn)
            try:
                for tid in tids:
                    view.undo(tid, txn)
            except UndoError:
                if keep:
                    raise
                return False        # a later one changed it
            view.tpc_vote(txn)
            undone = view.tpc_finish(txn)
            self.ends()
            txn = TransactionMetaData()
            view.tpc_begin(txn)
            view.undo(undone, txn)
            view.tpc_vote(txn)
            view.tpc_finish(txn)
            self.ends()
            return True
        finally:
            view.release()

    def pack(self, storage: relstore.RelStore | None = None, pack_time: float | None = None, **options) -> Report:
        return (storage or self.storage).pack(pack_time, **options)


def timestamp(tid: bytes) -> float:
    return TimeStamp(tid).timeTime()


def patched(adapter: Adapter, step: str, instead: Callable):
    """Have a step of an adapter's packs done by instead(how it is done, *its arguments)."""
    owner, name = WITH_TABLES.get(step, (adapter, step))
    owner = getattr(adapter, owner) if isinstance(owner, str) else owner
    method = getattr(owner, name)
    if not isinstance(owner, type):
        return patch.object(owner, name, partial(instead, method))

    def call(this, *arguments):
        how = partial(method, this)
        return instead(how, *arguments) if this._adapter is adapter else how(*arguments)
    return patch.object(owner, name, call)


@contextmanager
def calls(adapter: Adapter, act: Callable[[int, str], None], names: Iterable[str] = STEPS) -> Iterator[None]:
    """Call act(n, name) before the nth time (from 0) that one of these steps is done, except while nobody can vote.

    What act itself calls is not counted.
    """
    count, acting, door = itertools.count(), False, None
    made = []

    def wrap(name: str) -> None:
        def call(method, *arguments):
            nonlocal acting, door
            nobody_votes = door is not None and not door.broken and door.in_transaction
            if not acting and not nobody_votes:
                acting = True
                try:
                    act(next(count), name)
                finally:
                    acting = False
                if name == 'lock_votes':
                    door = arguments[0]
            return method(*arguments)
        patcher = patched(adapter, name, call)
        patcher.start()
        made.append(patcher)

    for name in names:
        wrap(name)
    try:
        yield
    finally:
        for patcher in made:
            patcher.stop()


def before(adapter: Adapter, name: str, act: Callable[[], None], nth: int = 0):
    """Call act() before the nth time that a step is done."""
    return calls(adapter, lambda n, _: act() if n == nth else None, [name])


@contextmanager
def late(adapter: Adapter, name: str) -> Iterator[None]:
    """Let what was the present when a pack began be long past when it comes to a step."""
    passed = []
    with patch.object(pack, 'time', Mock(time=lambda: time.time() + 1000 * len(passed))), \
            before(adapter, name, lambda: passed.append(name)):
        yield


class DurableBackend(Backend):
    """On a server of our own, that may be killed, with its programs."""
    require: Callable[[TestCase], None]
    # What copies the database ORIGINAL into the empty one COPY, and the list of that into this; and what is in the
    # documentation's commands.
    copying = replacing = program = ''

    def setUp(self):
        type(self).require(self)
        self.server, self._databases = self.layer.server, {}
        super().setUp()

    def arguments(self, name: str) -> str | dict:
        """Return where a database is that is made when this test first names it."""
        database = f'{name}_{"hp" if self.keep_history else "hf"}'
        if name not in self._databases:
            self._databases[name] = self.server.create_database(database)
            self.addCleanup(self.server.drop_database, database)
        return self._databases[name]


class DurablePostgreSQLHistoryPreserving(DurableBackend):
    layer, require = DurableLayer, staticmethod(require_postgresql)
    copying, program = 'pg_dump --format=custom "$ORIGINAL" | pg_restore --dbname="$COPY"', 'pg_dump'
    replacing = ('(echo "TRUNCATE relstore_garbage, relstore_pack;"; pg_dump --data-only --table=relstore_garbage '
                 '--table=relstore_pack "$COPY") | psql --quiet --set=ON_ERROR_STOP=1 "$ORIGINAL"')

    def address(self, name='main'):
        return relstore.PostgreSQL(self.arguments(name))

    def named(self, name: str) -> str:
        return self.arguments(name)


class DurablePostgreSQLHistoryFree(DurablePostgreSQLHistoryPreserving):
    keep_history = False


class DurableMariaDBHistoryPreserving(DurableBackend):
    layer, require = DurableMariaDBLayer, staticmethod(require_mariadb)
    copying, program = 'mariadb-dump --single-transaction $ORIGINAL | mariadb $COPY', 'mariadb-dump'
    replacing = ('(echo "DELETE FROM relstore_pack; DELETE FROM relstore_garbage;"; mariadb-dump --no-create-info '
                 '$COPY relstore_garbage relstore_pack) | mariadb $ORIGINAL')

    def address(self, name='main'):
        return relstore.MySQL(**self.arguments(name), driver='pymysql')

    def named(self, name: str) -> str:
        arguments = self.arguments(name)
        return f'--user=root --socket={arguments["unix_socket"]} {arguments["db"]}'


class DurableMariaDBHistoryFree(DurableMariaDBHistoryPreserving):
    keep_history = False

DURABLE = (DurablePostgreSQLHistoryPreserving, DurablePostgreSQLHistoryFree,
           DurableMariaDBHistoryPreserving, DurableMariaDBHistoryFree)
