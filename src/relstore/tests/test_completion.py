"""What a database lacks is made while a site uses it: nobody waits for that for long, and nothing is taken for ours.

No request waits longer than 2 seconds for a lock, and the server counts them: it was told to fail what waits longer,
and so the test fails. A clock of the test's own would count whatever else the machine does. What is waited for is a try
of ours, which the same server ends after 1.5 seconds, and which began before what waits for it: so the order holds also
where all are late.
"""
import logging
import re
import sqlite3
import subprocess
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from unittest import mock

import psycopg2
from ZODB.Connection import TransactionMetaData
from ZODB.utils import p64, z64

import relstore
from relstore.adapters import completion, patience, postgresql
from relstore.cli.main import main
from relstore.errors import ConfigurationError, LockTimeout
from relstore.tests.support.adopted import Adopted, AdoptedMySQL, AdoptedPostgreSQL, AdoptedSQLite
from relstore.tests.support.backends import (
    MYSQL,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    PyMySQLHistoryFree,
    PyMySQLHistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commands import Commands, environment
from relstore.tests.support.commits import perform
from relstore.tests.support.layers import SQLiteFiles
from relstore.tests.support.servers import postgresql_programs
from relstore.tests.support.watch import MySQLWatch, Watch

PATIENCE = 60           # seconds for what takes one or two
LONGEST = 2             # seconds for which a request may wait for a lock; where there are no pauses it waits for hours


class Site:
    """Requests of somebody else to the tables, one after the other, as RelStorage makes them.

    impatient: SQL, has the server fail what waits for longer than LONGEST; and so the test.
    """

    def __init__(self, connect, impatient, keep_history):
        self._connect, self._impatient, self._keep_history = connect, impatient, keep_history
        self._ended = threading.Event()
        self._answered = []     # the numbers of requests

    def __enter__(self):
        self._threads = ThreadPoolExecutor(2)
        self._running = [self._threads.submit(self._run, self._read), self._threads.submit(self._run, self._write)]
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._threads.shutdown()
        for each in self._running:
            each.result()

    def until_more(self, count):
        """Return when so many more requests were answered."""
        wanted, deadline = len(self._answered) + count, time.monotonic() + PATIENCE
        while len(self._answered) < wanted:
            for each in self._running:
                if each.done():
                    each.result()
            if time.monotonic() > deadline:
                raise AssertionError('the site is not answered')
            time.sleep(0.01)

    def _run(self, request):
        with closing(self._connect()) as connection:
            with connection.cursor() as cursor:
                cursor.execute(self._impatient)
            connection.commit()
            number = 1
            while not self._ended.is_set():
                with connection.cursor() as cursor:
                    request(cursor, number)
                connection.commit()
                self._answered.append(number)
                number += 1
                time.sleep(0.01)

    def _read(self, cursor, number):
        cursor.execute('SELECT state FROM object_state WHERE zoid = 0')
        cursor.fetchall()

    def _write(self, cursor, number):
        oid = 100 + number % 800        # in use by nobody, and not to be given out any more
        column, value = (', prev_tid', ', 0') if self._keep_history else ('', '')
        cursor.execute('DELETE FROM object_state WHERE zoid = %s', (oid,))
        cursor.execute(f"INSERT INTO object_state (zoid, tid, state_size, state{column}) "
                       f"SELECT %s, max(tid), 1, 'x'{value} FROM object_state", (oid,))


class Warnings(logging.Handler):
    """The log of relstore, as long as this is entered."""

    def __enter__(self):
        self.told, self._changed = [], threading.Condition()
        logging.getLogger('relstore').addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger('relstore').removeHandler(self)

    def emit(self, record):
        with self._changed:
            self.told.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, text):
        """Return the first that contains a text, when it is there."""
        with self._changed:
            if not self._changed.wait_for(lambda: any(text in told for told in self.told), PATIENCE):
                raise AssertionError(f'nothing in the log about {text!r}: {self.told}')
            return next(told for told in self.told if text in told)


class InUse(Adopted):
    """A site goes on while relstore comes, and while somebody is in the way for hours."""

    def setUp(self):
        super().setUp()
        for name in 'FIRST_PAUSE_SECONDS', 'LONGEST_PAUSE_SECONDS':
            patched = mock.patch.object(patience, name, 0.5)
            patched.start()
            self.addCleanup(patched.stop)

    def somebody(self):
        """Return a connection of somebody else, which begins a transaction with its first statement."""
        raise NotImplementedError

    def watched(self):
        raise NotImplementedError

    # SQL: the pids of those that wait to change object_state.
    waiting = ''
    # SQL: have the server fail what waits for a lock longer than LONGEST, in this session.
    impatient = ''

    @contextmanager
    def _asked(self, *statements):
        """While this is entered each statement's transaction is open."""
        with ExitStack() as stack:
            for sql in statements:
                cursor = stack.enter_context(stack.enter_context(closing(self.somebody())).cursor())
                cursor.execute(sql)
            yield

    def _adopted_beside(self, holder, who):
        with Site(self.somebody, self.impatient, self.keep_history) as site, Warnings() as log, \
                ThreadPoolExecutor(2) as threads, closing(self.watched()) as watch:
            with holder:
                site.until_more(20)
                openings = [threads.submit(self.opened) for _ in range(2)]
                self.assertRegex(log.wait_for('in use by'), who)
                site.until_more(20)
                watch.until(f'EXISTS ({self.waiting})')     # for the second time
                site.until_more(20)
                self.assertFalse(any(each.done() for each in openings))
            storage, _ = [each.result(PATIENCE) for each in openings]
        self.assertEqual(storage.database.adapter.writers.who(), 'any')
        oid = storage.new_oid()
        perform(storage, lambda txn: storage.store(oid, z64, b'mine', '', txn))
        self.assertEqual(storage.load(oid)[0], b'mine')
        for number, (state, tid) in self.current.items():
            if state is not None:
                self.assertEqual(storage.load(p64(number)), (state, p64(tid)))

    def test_beside_a_reader_and_a_writer(self):
        self._adopted_beside(self._asked(
            'SELECT count(*) FROM object_state', 'DELETE FROM object_state WHERE zoid = -1'), self.named)

    def test_killed_while_it_waits(self):
        """Nobody is left at the server who keeps the site waiting."""
        kind, arguments = type(self.address('adopted')).__name__, self.arguments('adopted') | {'driver': self.driver}
        script = f'import relstore as r; r.RelStore(r.{kind}(**{arguments}), keep_history={self.keep_history})'
        with self._asked('SELECT count(*) FROM object_state'), closing(self.watched()) as watch:
            process = subprocess.Popen([sys.executable, '-c', script], env=environment())
            watch.until(f'EXISTS ({self.waiting})', seconds=PATIENCE)
            [[pid]] = watch.rows(self.waiting)
            process.kill()
            process.wait(PATIENCE)
            watch.until(lambda: (pid,) not in watch.rows(watch.others), seconds=20)

    def test_refused_in_the_end(self):
        """Who is in the way is told there, too; and nothing was changed."""
        before = self.schema()
        with self._asked('SELECT count(*) FROM object_state'), mock.patch.object(completion, 'PATIENCE_SECONDS', 0.1), \
                self.assertRaisesRegex(LockTimeout, f'refs: object_state is in use by .*{self.named}.*; .* 1 times'):
            self.opened()
        self.assertEqual(self.schema(), before)

    def test_interrupted_after_a_step(self):
        """The columns are there, and no table of ours: it is RelStorage's still."""
        adapter = self.address('adopted').bind(self.keep_history)
        with adapter.completion() as steps:
            self.assertEqual(steps.run_next().step.names, ('refs',))
        with self.assertRaisesRegex(ConfigurationError, 'relstore_meta'):
            self.opened(create_schema=False)
        with adapter.completion() as steps:
            self.assertNotIn('refs', steps.missing())
        storage = self.opened()
        self.assertEqual(storage.database.adapter.writers.who(), 'any')
        self.assertEqual(storage.load(p64(0)), (self.current[0][0], p64(self.current[0][1])))


class InUseOnPostgreSQL(AdoptedPostgreSQL, InUse):
    waiting = ("SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'object_state'::regclass "
               "AND mode = 'AccessExclusiveLock'")
    impatient = f"SET lock_timeout = '{LONGEST}s'"
    named = 'the server process [1-9][0-9]* .*in a transaction since .* UTC, at '

    def somebody(self):
        return psycopg2.connect(self.dsn('adopted'))

    def watched(self):
        return Watch(self.dsn('adopted'))

    def test_beside_pg_dump(self):
        column, value = (', prev_tid', ', 0') if self.keep_history else ('', '')
        self.execute(f"INSERT INTO object_state (zoid, tid, state_size, state{column}) SELECT 1000000 + n, "
                     f"(SELECT max(tid) FROM object_state), 10000, decode(repeat('ab', 10000), 'hex'){value} "
                     'FROM generate_series(1, 300) n')
        self._adopted_beside(self._dump(), 'pg_dump')

    @contextmanager
    def _dump(self):
        """One that has nowhere to write to: it stands as long as nobody reads it."""
        process = subprocess.Popen([postgresql_programs() / 'pg_dump', self.dsn('adopted')], stdout=subprocess.PIPE)
        try:
            with closing(self.watched()) as watch:
                watch.until("EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE application_name = "
                            "'pg_dump' AND relation = 'object_state'::regclass)")
            yield
        finally:
            process.kill()
            process.communicate()

    def test_locks_stay_relstorages_after_an_interruption(self):
        adapter = self.address('adopted').bind(self.keep_history)
        with adapter.completion() as steps:
            steps.run_next()
        self.opened()
        self.assertEqual(self.execute("SELECT value FROM relstore_meta WHERE name = 'locks'"), [('plain',)])


class InUseOnMariaDB(AdoptedMySQL, InUse):
    waiting = ("SELECT id FROM information_schema.processlist WHERE db = DATABASE() "
               "AND state LIKE 'Waiting for table metadata lock' AND info LIKE 'ALTER%'")
    impatient = f'SET SESSION lock_wait_timeout = {LONGEST}, innodb_lock_wait_timeout = {LONGEST}'
    named = r'connection \d+ \(.*, in a transaction for \d+ s\)'

    def somebody(self):
        connection = self.layer.server.connect(self._database('adopted'))
        connection.autocommit(False)
        return connection

    def watched(self):
        return MySQLWatch(self.layer.server.arguments(self._database('adopted')))


class Writers(unittest.TestCase):
    """`relstore writers`, and zap_all: likewise."""

    def setUp(self):
        super().setUp()
        self.storage, self.other = self.open_storage(), self.open_storage(commit_lock_timeout=LONGEST)
        module = sys.modules[self.other.database.adapter.commit_type.__module__]
        patched = mock.patch.object(module, 'FINISH_TIMEOUT_SECONDS', LONGEST)
        patched.start()
        self.addCleanup(patched.stop)
        self.addCleanup(self.storage.close)
        self.addCleanup(self.other.close)
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)

    def commit(self, count=1):
        """Neither vote nor finish waits longer than LONGEST for a lock: the server counts that."""
        for _ in range(count):
            oid = self.other.new_oid()
            perform(self.other, lambda txn, oid=oid: self.other.store(oid, z64, b'x', '', txn))

    def test_beside_one_that_has_voted(self):
        self.commit()
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        self.storage.store(self.storage.new_oid(), z64, b'x', '', txn)
        self.storage.tpc_vote(txn)
        with ThreadPoolExecutor(1) as threads:
            try:
                telling = threads.submit(self.storage.database.adapter.writers.set, 'any', 10 * PATIENCE)
                self.watch.until_somebody_waits()
                self.commit(10)
                self.assertFalse(telling.done())
                with self.assertRaisesRegex(LockTimeout, self.holder):
                    self.other.database.adapter.writers.set('relstore', 0.1)
            finally:
                self.storage.tpc_abort(txn)
            telling.result(PATIENCE)
        self.assertEqual(self.storage.database.adapter.writers.who(), 'any')


class WritersOnPostgreSQL(Writers):
    holder = 'locked by the server process [1-9]'

    def test_index_beside_an_open_writer(self):
        """It waits for it, and nobody for the index."""
        if not self.keep_history:
            self.skipTest('there is no such index')
        self.commit()
        self.addCleanup(self.watch.rows, 'DROP INDEX IF EXISTS current_object_tid')
        with closing(psycopg2.connect(self.dsn())) as writer, writer.cursor() as cursor, \
                ThreadPoolExecutor(1) as threads:
            cursor.execute('UPDATE current_object SET tid = tid WHERE zoid = -1')
            making = threads.submit(self.storage.database.adapter.writers.make_index)
            try:
                self.watch.until("EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONC%%' "
                                 "AND wait_event_type = 'Lock')")
                self.commit(10)
                self.assertFalse(making.done())
            finally:
                writer.rollback()
            making.result(PATIENCE)
        self.assertEqual(self.watch.rows("SELECT indisvalid FROM pg_index WHERE indexrelid = "
                                         "'current_object_tid'::regclass"), [(True,)])

    def test_index_that_nobody_waits_for_any_more(self):
        if not self.keep_history:
            self.skipTest('there is no such index')
        self.addCleanup(self.watch.rows, 'DROP INDEX IF EXISTS current_object_tid')
        script = f'import relstore; relstore.PostgreSQL(**{self.arguments()}).bind(True).writers.make_index()'
        with closing(psycopg2.connect(self.dsn())) as writer, writer.cursor() as cursor:
            cursor.execute('UPDATE current_object SET tid = tid WHERE zoid = -1')
            process = subprocess.Popen([sys.executable, '-c', script], env=environment())
            making = ("SELECT pid FROM pg_stat_activity WHERE starts_with(query, 'CREATE INDEX CONC') "
                      "AND wait_event_type = 'Lock'")
            self.watch.until(f'EXISTS ({making})', seconds=PATIENCE)
            [[pid]] = self.watch.rows(making)
            process.kill()
            process.wait(PATIENCE)
            self.watch.until(lambda: (pid,) not in self.watch.rows(self.watch.others), seconds=PATIENCE)

    def test_zap_all_beside_a_reader(self):
        self.commit()
        with closing(psycopg2.connect(self.dsn())) as reader, reader.cursor() as cursor, \
                mock.patch.object(postgresql, 'ZAP_PATIENCE_SECONDS', 10 * PATIENCE), ThreadPoolExecutor(1) as threads:
            cursor.execute('SELECT count(*) FROM object_state')
            removing = threads.submit(self.storage.zap_all)
            try:
                self.watch.until("EXISTS (SELECT FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock')")
                self.commit(10)
                self.assertFalse(removing.done())
            finally:
                reader.rollback()
            removing.result(PATIENCE)
        self.assertEqual(len(self.storage), 0)


class WritersOnMariaDB(Writers):
    holder = 'locked by connection [1-9]'


class Command(Adopted, Commands):
    """`relstore adopt`."""
    tested = (main, 'adopt')

    def conf(self, *lines):
        return self.config(*lines, name='adopted')

    def test_dry_run_says_what_is_done(self):
        before = self.schema()
        told = self.works('--dry-run', self.conf())
        self.assertEqual(self.schema(), before)
        self.assertIn('CREATE TABLE', told)
        self.assertIn('ALTER TABLE', told)
        self.assertTrue(told.endswith('  Nothing was changed.\n'), told)
        if self.locks:
            self.assertRegex(told, r'1\. Change object_state \(refs\)')
            self.assertRegex(told, f'needs {self.locks} on object_state, and everybody of its site wait')
        done = self.works(self.conf())
        self.assertEqual(re.findall(r'\d\. .*', done), re.findall(r'\d\. .*', told))
        if self.locks:
            self.assertRegex(done, r'at the first try; the longest took \d\.\d\d s, and nobody waited longer')
        for arguments in [], ['--dry-run']:
            self.assertIn('has all that relstore needs', self.works(*arguments, self.conf()))
        self.opened(create_schema=False)

    def test_refusals(self):
        for line, why in ('read-only true', 'the storage is read-only'), (
                f'keep-history {str(not self.keep_history).lower()}', 'set keep-history'):
            before = self.schema()
            path = self.conf('read-only true') if line == 'read-only true' else self.write(
                'other.conf', self.conf().read_text().replace(f'keep-history {str(self.keep_history).lower()}', line))
            status, _, err = self.told(path)
            self.assertEqual(status, 2)
            self.assertIn(why, err)
            self.assertEqual(self.schema(), before)


class Others(Adopted):
    """Tables of others that bear a name of ours."""
    has_site = False

    def test_history_is_told_by_what_is_ours(self):
        """There may be a table called transaction beside a database without history, and one called current_object."""
        for name in 'transaction', 'current_object', 'pack_state':
            self.execute(f'CREATE TABLE "{name}" (amount INTEGER)')
            self.execute(f'INSERT INTO "{name}" VALUES (7)')
        for _ in range(3):
            with closing(self.opened()) as storage:
                oid = storage.new_oid()
                perform(storage, lambda txn: storage.store(oid, z64, b'mine', '', txn))
                storage.database.adapter.writers.make_index()
        with closing(self.opened()) as storage:
            storage.zap_all()
        for name in 'transaction', 'current_object', 'pack_state':
            self.assertEqual([tuple(row) for row in self.execute(f'SELECT * FROM "{name}"')], [(7,)])
        with self.assertRaisesRegex(ConfigurationError, 'is history-free; set keep-history false'):
            relstore.RelStore(self.address('adopted'), keep_history=True)


class Taken(Adopted):
    """Likewise, where they are in our way: refused, before anything is made."""
    has_site = False
    counter = ''        # what counts oids

    def test_nothing_is_made_beside_them(self):
        names = ['object_state', 'commit_row_lock', 'pack_object', 'object_ref', self.counter]
        if self.keep_history:
            names += ['transaction', 'current_object']
        for name in names:
            with self.subTest(name):
                self.execute(f'CREATE TABLE "{name}" (amount INTEGER)')
                before = self.schema()
                with self.assertRaisesRegex(ConfigurationError, f"{name} that is not relstore's: it lacks .*; rename"):
                    self.opened()
                self.assertEqual(self.schema(), before)
                self.execute(f'DROP TABLE "{name}"')
        self.opened()

    def test_of_other_types(self):
        self.execute('CREATE TABLE object_state (zoid CHAR(36), tid CHAR(36), state_size INTEGER, state CHAR(200), '
                     'prev_tid INTEGER, md5 CHAR(32))')
        with self.assertRaisesRegex(ConfigurationError, 'its tid, zoid is not an integer'):
            self.opened()


class OnSQLite(AdoptedSQLite):
    locks = ''
    counter = 'relstore_oid'


class OnPostgreSQL(AdoptedPostgreSQL):
    locks = 'ACCESS EXCLUSIVE'
    counter = 'zoid_seq'


class OnMySQL(AdoptedMySQL):
    locks = 'an exclusive metadata lock'
    counter = 'new_oid'


class Columns(unittest.TestCase):
    layer = SQLiteFiles

    def test_of_every_table(self):
        """What a section of a schema file makes is what the database has afterwards."""
        for keep_history in True, False:
            adapter = relstore.SQLite('/nowhere').unseen(keep_history)
            for name, ddl in adapter.schema().items():
                if 'CREATE TABLE' in ddl:
                    with self.subTest(name, history=keep_history), closing(sqlite3.connect(':memory:')) as database:
                        database.executescript(ddl)
                        names = {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')}
                        self.assertEqual(completion.columns_of(ddl), names)


def on(database, suite):
    return type(f'{suite.__name__}{database.__name__}', (database, suite), {})


cases(globals(), InUseOnPostgreSQL, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryFree))
cases(globals(), InUseOnMariaDB, backends=(MySQLdbHistoryPreserving, PyMySQLHistoryFree))
cases(globals(), WritersOnPostgreSQL, backends=(Psycopg2HistoryPreserving, Psycopg3HistoryFree))
cases(globals(), WritersOnMariaDB, backends=(MySQLdbHistoryPreserving,))
cases(globals(), on(OnSQLite, Command), backends=(SQLiteHistoryPreserving,))
cases(globals(), on(OnPostgreSQL, Command), backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
cases(globals(), on(OnMySQL, Command), backends=(PyMySQLHistoryPreserving,))
cases(globals(), on(OnSQLite, Others), backends=(SQLiteHistoryFree,))
cases(globals(), on(OnSQLite, Taken), backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
cases(globals(), on(OnPostgreSQL, Others), backends=(Psycopg2HistoryFree, Psycopg3HistoryFree))
cases(globals(), on(OnPostgreSQL, Taken), backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
cases(globals(), on(OnMySQL, Others), backends=MYSQL[1::2])
cases(globals(), on(OnMySQL, Taken), backends=MYSQL[::2])
del InUse, InUseOnPostgreSQL, InUseOnMariaDB, Writers, WritersOnPostgreSQL, WritersOnMariaDB, Command, Others, Taken
