"""A copy in batches is interrupted, wherever that may be: the next one goes on, and in the end nothing is missing."""
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from transaction.interfaces import TransientError
from ZODB.POSException import StorageError
from ZODB.utils import p64, u64

import relstore
from relstore import bulk
from relstore.converting.compare import Comparison
from relstore.sessions.drivers import DRIVERS
from relstore.tests.support.backends import (
    EITHER_MODE,
    HISTORY_FREE,
    HISTORY_PRESERVING,
    OTHER_MODE,
    MySQLBackend,
    SQLiteBackend,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commands import Commands, environment
from relstore.tests.support.commits import commit
from relstore.tests.support.crashing import Crashing
from relstore.tests.support.faults import Faults, MySQLTrouble, PostgreSQLTrouble, SQLiteTrouble
from relstore.tests.support.layers import Processes
from relstore.tests.support.records import state
from relstore.tests.support.server_suite import ServerSuite
from relstore.tests.support.sources import FIRST, Source, Transaction, current, of_all_kinds

SECONDS = 60
# What may go up to whoever copies.
TOLD = StorageError, TransientError


def check(test, source, storage):
    """Everything that the source has is there, and nothing else."""
    if storage.supportsUndo():
        test.assertEqual(list(Comparison(source, storage).differences()), [])
        return
    wanted = current(source)
    for oid, (tid, data) in wanted.items():
        test.assertEqual(storage.load(p64(oid)), (data, p64(tid)))
    test.assertEqual({u64(record.oid) for transaction in storage.iterator() for record in transaction
                      if record.data is not None}, wanted.keys())


def check_beginning(test, source, storage):
    """What is there is the source up to the newest transaction."""
    last = storage.lastTransaction()
    check(test, Source([each for each in source.transactions if each.tid <= last]), storage)


class EveryStatement(TestCase):
    """Each statement of a copy fails, in one way or another."""

    def setUp(self):
        super().setUp()
        # Where the server stays down, who asks for the outcome is not to wait for long.
        self.enter(patch('relstore.outcome.OUTCOME_PATIENCE_SECONDS', 0.2))
        self.enter(patch.object(bulk, 'BATCH_BYTES', 10_000))
        self.trouble = (SQLiteTrouble() if isinstance(self, SQLiteBackend) else
                        MySQLTrouble(self.new_watch()) if isinstance(self, MySQLBackend) else
                        PostgreSQLTrouble(self.dsn()))
        self.addCleanup(self.trouble.close)
        self.faults = Faults(self.trouble)
        self.enter(patch.dict(DRIVERS, {name: self.faults.driver(driver) for name, driver in DRIVERS.items()}))
        self.source = of_all_kinds(16, seed=3)
        self.storage = self.open_storage(commit_lock_timeout=10, pool_timeout=5)
        self.addCleanup(self.storage.close)

    def enter(self, context):
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def test_it(self):
        happened, at, failed = True, 0, 0
        while happened:
            at += 1
            kind = Faults.KINDS[at % len(Faults.KINDS)]
            with self.subTest(kind=kind, at=at):
                happened, told = self.interrupt(kind, at)
                failed += told
        self.assertGreater(at, 20)
        self.assertGreater(failed, 4)

    def interrupt(self, kind, at):
        """Return whether the fault has happened, and whether that was told."""
        self.storage.zap_all()
        self.faults.arm(kind, at)
        told = False
        try:
            self.storage.copyTransactionsFrom(self.source)
        except TOLD:
            told = True
        finally:
            happened = self.faults.disarm()
        self.trouble.settled()
        self.assertEqual(self.storage.database.pool.lent, 0)
        with closing(self.open_storage()) as other:
            check_beginning(self, self.source, other)
            if not told:
                self.assertEqual(other.lastTransaction(), self.source.lastTransaction())
            other.copyTransactionsFrom(self.source)
            check(self, self.source, other)
        return happened, told


cases(globals(), EveryStatement, backends=HISTORY_PRESERVING + HISTORY_FREE)
del EveryStatement


KILLED = """
import os, signal, sys
import ZODB.config
from relstore import bulk
from relstore.adapters.commits.mysql import MySQLCommit
from relstore.adapters.commits.postgresql import PostgreSQLCommit
from relstore.adapters.commits.sqlite import SQLiteCommit
from relstore.tests.support.sources import of_all_kinds

config, when, name, left = *sys.argv[1:4], int(sys.argv[4])
bulk.BATCH_BYTES = 1000

def die(now):
    global left
    left -= when == now
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def killing(act):
    def killed(*arguments):
        die('before')
        found = act(*arguments)
        die('after')
        return found
    return killed

for kind in PostgreSQLCommit, MySQLCommit, SQLiteCommit:
    setattr(kind, name, killing(getattr(kind, name)))
with open(config) as file:
    ZODB.config.storageFromFile(file).copyTransactionsFrom(of_all_kinds(20, seed=5))
"""


class Killed(Commands):
    """kill -9 of whoever copies, at each step of a batch."""
    layer = Processes

    def test_it(self):
        source, storage = of_all_kinds(20, seed=5), self.open_storage()
        self.addCleanup(storage.close)
        config, seen = self.config(), set()
        for number, name in enumerate(['vote', 'stage_copies', 'finish_copies']):
            for when in 'before', 'after':
                killed = subprocess.run([sys.executable, '-c', KILLED, config, when, name, str(number)],
                                        env=environment(), capture_output=True, text=True, timeout=SECONDS)
                self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
                check_beginning(self, source, storage)
                seen.add(storage.lastTransaction())
        self.assertGreater(len(seen), 3)
        storage.copyTransactionsFrom(source)
        check(self, source, storage)


cases(globals(), Killed, backends=EITHER_MODE, thorough=OTHER_MODE)
del Killed


class ServerKilled(Crashing):
    """PostgreSQL crashes in the middle of a batch, and after it."""

    def test_it(self):
        source = of_all_kinds(40, seed=7)

        def work(storage, other, dsn, keep_history):
            for name in 'stage_copies', 'finish_copies':
                kind, left = storage.database.adapter.commit_type, [2]
                act = getattr(kind, name)

                def crashing(*arguments, act=act, left=left):
                    found = act(*arguments)
                    left[0] -= 1
                    if not left[0]:
                        self._crash(dsn)
                    return found

                with patch.object(kind, name, crashing), patch.object(bulk, 'BATCH_BYTES', 10_000), \
                        self.assertRaises(TOLD):
                    storage.copyTransactionsFrom(source)
                with closing(self._open(dsn, 'psycopg', 'hp' if keep_history else 'hf')) as fresh:
                    check_beginning(self, source, fresh)
                    self.assertGreater(u64(fresh.lastTransaction()), 0)
                    fresh.copyTransactionsFrom(source)
                    check(self, source, fresh)
                storage.zap_all()

        self._on_each(work)


class DiskFull(TestCase):

    def test_sqlite(self):
        """What was copied stays; with more room the next copy goes on."""
        source = Source([Transaction(FIRST + n, [(n, state('x' * 3000), None)]) for n in range(50)])
        with closing(self.opened({})) as storage, storage.database.pool.session() as session:
            [[pages]] = session.all('PRAGMA page_count')
        with closing(self.opened({'max_page_count': pages + 20})) as storage, patch.object(bulk, 'BATCH_BYTES', 10_000):
            with self.assertRaisesRegex(StorageError, 'full'):
                storage.copyTransactionsFrom(source)
            check_beginning(self, source, storage)
            self.assertGreater(len(list(storage.iterator())), 3)
        with closing(self.opened({})) as storage:
            storage.copyTransactionsFrom(source)
            check(self, source, storage)

    def opened(self, pragmas):
        directory = self.address().data_dir
        return relstore.RelStore(relstore.SQLite(directory, pragmas=pragmas), keep_history=self.keep_history)


cases(globals(), DiskFull, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del DiskFull


class Others(ServerSuite):
    """What others do while a batch is written, that is after its vote."""

    def setUp(self):
        super().setUp()
        self.source = of_all_kinds(30, seed=9)
        self.pool = ThreadPoolExecutor(2)
        self.addCleanup(self.pool.shutdown)
        self.enter(patch.object(bulk, 'BATCH_BYTES', 10_000))

    def during(self, act, batch=1, until=lambda doing: True):
        """Copy, and begin act() while a batch is written, which goes on when `until` is true of its future."""
        adapter, doing, count = self.storage.database.adapter, [], []
        stage = adapter.commit_type.stage_copies

        def staging(commit, copies):
            stage(commit, copies)
            count.append(1)
            if len(count) == batch:
                doing.append(self.pool.submit(act))
                self.watch.until(lambda: until(doing[0]))

        with patch.object(adapter.commit_type, 'stage_copies', staging):
            try:
                self.storage.copyTransactionsFrom(self.source)
            except TOLD as e:
                return doing[0], e
        return doing[0], None

    def test_a_commit(self):
        """It waits for the batch, is later than all of the source, and the copy cannot go on."""
        oid = p64(50_000_000)
        commits, error = self.during(lambda: commit(self.other, (oid, bytes(8), state('mine'))),
                                     until=lambda doing: self.watch.somebody_waits())
        tid = commits.result(SECONDS)
        self.assertRegex(str(error), 'cannot be added: the newest in the database')
        self.assertEqual(self.storage.load(oid), (state('mine'), tid))
        self.assertEqual(self.storage.lastTransaction(), tid)
        there = [each for each in self.source.transactions if each.tid in {
            transaction.tid for transaction in self.storage.iterator()}]
        self.assertGreater(len(there), 1)
        if self.keep_history:
            self.assertEqual([each.tid for each in there],
                             [each.tid for each in self.source.transactions[:len(there)]])

    def test_another_copy(self):
        """One of the two is late, and goes on with what is left; nothing is there twice."""
        other, error = self.during(lambda: self.other.copyTransactionsFrom(self.source),
                                   until=lambda doing: self.watch.somebody_waits() or doing.done())
        for told in (error, other.exception(SECONDS)):
            self.assertIsInstance(told, (*TOLD, type(None)))
        self.storage.copyTransactionsFrom(self.source)
        check(self, self.source, self.storage)

    def test_a_reader(self):
        """It sees all of a batch or nothing."""
        seen = []

        def look():
            view = self.other.new_instance()
            view.poll_invalidations()
            seen.append(view.lastTransaction())
            view.release()

        self.during(look, batch=2, until=lambda doing: doing.done())
        self.assertIn(seen[0], [each.tid for each in self.source.transactions])
        self.assertLess(seen[0], self.source.lastTransaction())
        check(self, self.source, self.storage)

    def test_emptied(self):
        """It is emptied as soon as the batch is there: the copy ends, and the next begins anew."""
        emptied, _ = self.during(self.other.zap_all,
                                 until=lambda doing: self.watch.somebody_waits() or doing.done())
        emptied.exception(SECONDS)
        for _ in range(2):
            try:
                self.storage.copyTransactionsFrom(self.source)
            except TOLD:
                continue
        check(self, self.source, self.storage)


cases(globals(), Others, backends=(*(backend for backend in HISTORY_PRESERVING + HISTORY_FREE
                                     if not issubclass(backend, SQLiteBackend)),))
del Others
