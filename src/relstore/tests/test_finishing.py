"""A commit that waits for the commit lock is told of, with who has it."""
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest import TestCase
from unittest.mock import patch

from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.utils import z64

import relstore
from relstore import finishing
from relstore.tests.support.backends import (
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2PooledHistoryPreserving,
    Psycopg3HistoryPreserving,
    PyMySQLOnMySQLHistoryFree,
    cases,
)

PATIENCE = 60       # seconds


class Told(logging.Handler):
    """What is logged, and events that somebody waits for."""

    def __init__(self):
        super().__init__()
        self.records, self.more = [], threading.Condition()

    def emit(self, record):
        with self.more:
            self.records.append(record)
            self.more.notify_all()

    def wait_for(self, level, text, count=1):
        """Return the messages with a text, when there are so many."""
        def found():
            return [r.getMessage() for r in self.records if r.levelno == level and text in r.getMessage()]
        with self.more:
            assert self.more.wait_for(lambda: len(found()) >= count, PATIENCE), self.records
            return found()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == 'relstore finishing']


class Finishing(TestCase):

    def setUp(self):
        super().setUp()
        for name, value in ('LOOK_EVERY_SECONDS', 0.05), ('REPEAT_SECONDS', 0.1):
            patched = patch.object(finishing, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        self.told = Told()
        log = logging.getLogger('relstore')
        log.addHandler(self.told)
        self.addCleanup(log.removeHandler, self.told)
        self.addCleanup(log.setLevel, log.level)
        log.setLevel(logging.INFO)

    holder = ''         # how it names who has the commit lock
    slow = fast = ()    # SQL: make each commit take longer than a second, and no longer

    @contextmanager
    def committing(self, storage):
        """While this is entered another thread commits; afterwards it has committed."""
        with closing(DB(storage)) as db:
            with db.transaction() as connection:
                connection.root()['a'] = 1
            with ThreadPoolExecutor(1) as threads:
                yield lambda: threads.submit(self.commit, db)

    @staticmethod
    def commit(db):
        with db.transaction() as connection:
            connection.root()['a'] = 2

    def test_waits(self):
        with closing(self.new_watch()) as watch, self.committing(self.open_storage()) as commit:
            watch.take_commit_lock()
            try:
                commit()
                *_, last = self.told.wait_for(logging.WARNING, self.holder % watch.one(watch.pid), 2)
                self.assertIn('has waited for', last)
                self.assertFalse([r for r in self.told.records if 'no longer' in r.getMessage()])
            finally:
                watch.release_commit_lock()
            self.told.wait_for(logging.INFO, 'no longer')
            [watcher] = threads()
        watcher.join(PATIENCE)
        self.assertFalse(watcher.is_alive())

    def test_slow(self):
        """Nobody is in its way then: not even who has voted for something else, and locks rows."""
        with closing(self.new_watch()) as watch, closing(self.open_storage()) as other, \
                self.committing(self.open_storage()) as commit:
            for sql in self.slow:
                watch.rows(sql)
            txn = TransactionMetaData()
            other.tpc_begin(txn)
            other.store(other.new_oid(), z64, b'x', '', txn)
            other.tpc_vote(txn)
            try:
                began = time.monotonic()
                commit().result(PATIENCE)
                self.assertGreater(time.monotonic() - began, 1)
            finally:
                other.tpc_abort(txn)
                for sql in self.fast:
                    watch.rows(sql)
        self.assertFalse([r.getMessage() for r in self.told.records if 'to be finished' in r.getMessage()])

    def test_ends_when_idle_and_begins_again(self):
        with patch.object(finishing, 'IDLE_SECONDS', 0.0), closing(DB(self.open_storage())) as db:
            for n in range(3):
                with db.transaction() as connection:
                    connection.root()['a'] = n
                for watcher in threads():
                    watcher.join(PATIENCE)
                    self.assertFalse(watcher.is_alive())
        self.assertFalse([r for r in self.told.records if r.levelno == logging.WARNING])


class FinishingOnPostgreSQL(Finishing):
    holder = 'the server process %d ('
    slow = ("CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1.5); RETURN NEW; END'",
            'CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON object_state FOR EACH ROW EXECUTE FUNCTION slow()')
    fast = ('DROP TRIGGER slow ON object_state', 'DROP FUNCTION slow()')


class FinishingOnMySQL(Finishing):
    holder = 'connection %d ('
    slow = ('CREATE TRIGGER slow BEFORE INSERT ON object_state FOR EACH ROW DO SLEEP(1.5)',)
    fast = ('DROP TRIGGER slow',)

    def test_prepared_transaction(self):
        """It has the lock, and no connection any more."""
        with closing(self.new_watch()) as watch, self.committing(self.open_storage()) as commit:
            with closing(self.new_watch()) as holder:
                for sql in ("XA START 'held'", 'UPDATE commit_row_lock SET tid = tid + 1', "XA END 'held'",
                            "XA PREPARE 'held'"):
                    holder.rows(sql)
                number = holder.one(holder.pid)
            watch.until(lambda: (number,) not in watch.rows(watch.others))
            try:
                commit()
                self.told.wait_for(logging.WARNING, 'a prepared transaction is in its way')
            finally:
                watch.rows("XA ROLLBACK 'held'")

    def test_who_may_not_see(self):
        """learns that something is in the way, and what the server calls it."""
        with closing(self.new_watch()) as watch:
            self.addCleanup(self.layer.server.run, "DROP USER guest@'%'")
            watch.rows("CREATE USER guest@'%'")
            watch.rows("GRANT SELECT, INSERT, UPDATE, DELETE, CREATE TEMPORARY TABLES ON "
                       f"{watch.one('SELECT DATABASE()')}.* TO guest@'%'")
            address = relstore.MySQL(**self.arguments() | {'user': 'guest'}, driver=self.driver)
            storage = relstore.RelStore(address, keep_history=self.keep_history)
            with self.committing(storage) as commit:
                for begin, end, told in (
                        (watch.take_commit_lock, watch.release_commit_lock, 'a transaction that this user may not see'),
                        (lambda: watch.rows('LOCK TABLES commit_row_lock READ'), lambda: watch.rows('UNLOCK TABLES'),
                         'what the server calls "Waiting for table metadata lock"')):
                    begin()
                    try:
                        committed = commit()
                        self.told.wait_for(logging.WARNING, told)
                    finally:
                        end()
                    committed.result(PATIENCE)


cases(globals(), FinishingOnPostgreSQL, backends=(
    Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg2PooledHistoryPreserving))
cases(globals(), FinishingOnMySQL, backends=(MySQLdbHistoryPreserving, PyMySQLOnMySQLHistoryFree))
del Finishing, FinishingOnPostgreSQL, FinishingOnMySQL
