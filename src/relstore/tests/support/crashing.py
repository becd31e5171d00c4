"""Suites whose server crashes, and recovers."""
import time
from contextlib import ExitStack, closing
from unittest import TestCase

import psycopg2
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import StorageError
from ZODB.utils import z64

import relstore
from relstore.tests.support.commits import commit
from relstore.tests.support.objects import exists
from relstore.tests.support.patience import within
from relstore.tests.support.records import state
from relstore.tests.support.servers import DurableLayer, kill_and_wait, open_process, require_postgresql
from relstore.tests.support.watch import Watch


class Crashing(TestCase):
    """On a server that is killed."""

    layer = DurableLayer

    def setUp(self):
        require_postgresql(self)
        self.server = self.layer.server

    def _on_each(self, work, drivers=('psycopg2', 'psycopg')):
        """Call work(storage, another, DSN, history mode) for each driver and mode; wait for the server first."""
        for driver in drivers:
            for keep_history in (True, False):
                mode = 'hp' if keep_history else 'hf'
                dsn = self.server.create_database(f'{self._testMethodName[-50:]}_{driver}_{mode}')
                with self.subTest(driver=driver, keep_history=keep_history), ExitStack() as stack:
                    storages = [stack.enter_context(closing(self._open(dsn, driver, mode))) for _ in range(2)]
                    work(*storages, dsn, keep_history)

    def _open(self, dsn, driver, mode):
        return relstore.RelStore(relstore.PostgreSQL(dsn, driver=driver), keep_history=mode == 'hp',
                                 commit_lock_timeout=10)

    def _crash(self, dsn):
        """Kill a backend; return when the server has recovered."""
        with closing(psycopg2.connect(dsn)) as victim:
            kill_and_wait(open_process(victim.info.backend_pid))
            with self.assertRaises(psycopg2.Error):
                victim.cursor().execute('SELECT 1')
        deadline = time.monotonic() + 30
        while True:
            try:
                # The postmaster first ends all others: a connection of the old epoch would not answer for long.
                with closing(Watch(dsn)) as watch:
                    watch.one('SELECT 1')
                    return
            except psycopg2.OperationalError:
                self.assertLess(time.monotonic(), deadline, self.server.log_tail())

    def _number_is_given_again(self, others: int):
        """Lose the numbers of so many others and of a voted transaction, use them up, and finish it."""
        def work(storage, other, dsn, keep_history):
            mine = storage.new_oid()
            txn = TransactionMetaData()
            storage.tpc_begin(txn)
            storage.store(mine, z64, state(1), '', txn)
            with ExitStack() as stack:
                for _ in range(others):
                    stack.enter_context(closing(Watch(dsn))).rows('BEGIN; SELECT pg_current_xact_id()')
                storage.tpc_vote(txn)
                number = storage.committing.commit.number
                self._crash(dsn)
            with closing(Watch(dsn)) as watch:
                next_number = 'SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint'
                self.assertLessEqual(watch.one(next_number), number, 'the number is not given again')
                view = other.new_instance()
                view.poll_invalidations()
                view.afterCompletion()
                for _ in within('the number is given again'):
                    commit(view, (view.new_oid(), z64, state(2)))
                    if watch.one(next_number) > number:
                        break
            try:
                told = storage.tpc_finish(txn)
            except StorageError as e:
                told = e
            storage.tpc_abort(txn)
            self.assertFalse(exists(other, mine))
            self.assertIsInstance(told, StorageError, 'success was told for what is not there')

        self._on_each(work, drivers=('psycopg2',))
