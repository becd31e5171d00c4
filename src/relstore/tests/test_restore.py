"""A backup is put in the place of a database while processes have it open, in each way that operators have.

Another process commits before they ask again. Whoever asks then sees nothing but the restored state and what was
committed since, is told that everything may have changed, and cannot commit what it has derived from what is gone.
"""
import gc
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest import TestCase, skipUnless
from unittest.mock import patch

from transaction import TransactionManager
from transaction.interfaces import TransientError
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError
from ZODB.tests.MinPO import MinPO
from ZODB.utils import p64, u64, z64

import relstore
from relstore.adapters import mysql_epoch
from relstore.errors import ConfigurationError, Unavailable
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    MySQLdbOnMySQLHistoryFree,
    MySQLdbOnMySQLHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg3HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.layers import Processes
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.records import state
from relstore.tests.support.servers import PostgreSQLServer, postgresql_programs, require_postgresql

NAMES = 'abcdefgh'
# What RelStorage fills, and empties before: (table, columns).
FILLED = {
    True: {'transaction': 'tid, packed, username, description, extension',
           'object_state': 'zoid, tid, prev_tid, md5, state_size, state', 'current_object': 'zoid, tid'},
    False: {'object_state': 'zoid, tid, state_size, state'},
}


class Application:
    """A process: its own Database, cache and connections."""

    def __init__(self, storage: relstore.RelStore):
        self.storage, self.db = storage, DB(storage)
        self.manager = TransactionManager(explicit=True)
        self.connection = self.db.open(self.manager)

    def create(self) -> None:
        with self.manager:
            for name in NAMES:
                self.connection.root()[name] = MinPO(0)

    def read(self) -> dict[str, int]:
        """Return what is not 0."""
        with self.manager:
            values = {name: self.connection.root()[name].value for name in NAMES}
        return {name: value for name, value in values.items() if value}

    def write(self, **values: int) -> None:
        with self.manager:
            self.set(**values)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self.connection.root()[name].value = value

    def close(self) -> None:
        self.manager.abort() if self.manager._txn is not None else None
        self.connection.close()
        self.db.close()


class Restored(TestCase):
    """Each way says how to dump() the database, and how to restore(what that has returned)."""

    def setUp(self):
        super().setUp()
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-restore-'))
        self.addCleanup(shutil.rmtree, self.directory)
        self.cached = {'cache_local_dir': str(self.directory / 'cache')}
        self.first = self.application(**self.cached)
        self.first.create()
        self.first.write(a=1, b=1)

    def application(self, **options) -> Application:
        app = Application(self.open_storage(**options))
        self.addCleanup(self.close, app)
        return app

    def close(self, app):
        with patch.object(app, 'manager', app.manager):
            app.close()

    def dump(self):
        raise NotImplementedError

    def restore(self, dump, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Put the dump in the place of what is there; call meanwhile() where others see part of it, if they can."""
        raise NotImplementedError

    @contextmanager
    def deriving(self, app):
        """In a transaction that has read what is about to go; it is committed at the end, in vain."""
        app.manager.begin()
        app.set(c=app.connection.root()['a'].value + 10)
        app.connection._storage.view.snapshot.end()     # the server would wait for it before it lets anybody restore
        yield
        with self.assertRaises(TransientError):
            app.manager.commit()
        app.manager.abort()

    def test_another_process_commits_first(self):
        """One that was started afterwards, and so knows nothing of what was."""
        one, two = self.application(), self.application()
        dump = self.dump()
        self.first.write(a=2)
        self.first.write(b=2, d=2)
        for app in one, two, self.first:
            self.assertEqual(app.read(), {'a': 2, 'b': 2, 'd': 2})
        self.first.close()
        view = one.storage.new_instance()
        view.poll_invalidations()
        view.afterCompletion()
        with self.deriving(two):
            self.restore(dump)
            other = self.application()
            other.write(e=3, b=3)
        for app in two, one:
            self.assertEqual(app.read(), {'a': 1, 'b': 3, 'e': 3})
        self.assertIsNone(view.poll_invalidations())
        view.release()
        with self.assertNoLogs('relstore', 'ERROR'):
            new = self.application(**self.cached)
            self.assertTrue(new.storage.database.warm.filled.wait(60))
        self.assertFalse(new.storage.database.warm._usable)
        self.assertEqual(new.read(), {'a': 1, 'b': 3, 'e': 3})
        two.write(a=4)
        one.write(f=4)
        for app in one, two, other, new:
            self.assertEqual(app.read(), {'a': 4, 'b': 3, 'e': 3, 'f': 4})

    def test_one_that_asks_tells_the_others(self):
        """It sees that the newest transaction is gone; after it has committed others could not."""
        one, two = self.application(), self.application()
        dump = self.dump()
        self.first.write(a=2, d=2)
        for app in one, two:
            self.assertEqual(app.read(), {'a': 2, 'b': 1, 'd': 2})
        with self.deriving(two):
            self.restore(dump)
            one.write(a=3, d=3)
            self.assertEqual(one.read(), {'a': 3, 'b': 1, 'd': 3})
        self.assertEqual(two.read(), {'a': 3, 'b': 1, 'd': 3})
        self.assertEqual(one.storage.database.epochs.now, two.storage.database.epochs.now)

    def test_asked_in_the_middle(self):
        one, two = self.application(), self.application()
        dump = self.dump()
        self.first.write(a=2)
        self.first.write(b=2)
        for app in one, two:
            self.assertEqual(app.read(), {'a': 2, 'b': 2})
        view, missed = one.storage.new_instance(), []

        def ask():
            try:
                view.poll_invalidations()
            except (Unavailable, ConfigurationError):
                missed.append(view)     # a table is not there
            view.afterCompletion()

        ask()
        self.assertEqual(missed, [])
        with self.deriving(two):
            self.restore(dump, ask)
            self.application().write(e=3)
        for app in one, two:
            self.assertEqual(app.read(), {'a': 1, 'b': 1, 'e': 3})
        view.release()


class TellsByEpoch(Restored):
    """A way after which the epoch is another, whatever was committed since."""

    def test_nothing_else_tells(self):
        one = self.application()
        dump = self.dump()
        self.first.write(a=2)
        self.assertEqual(one.read(), {'a': 2, 'b': 1})
        self.aged()
        self.restore(dump)
        self.application().write(a=3)
        one.storage.database.cache.trim(one.storage.database.cache.head)
        one.storage.database.epochs.early = []
        before = one.storage.database.epochs.now
        adapter = one.storage.database.adapter
        with patch.object(mysql_epoch, 'LOOK_EVERY_SECONDS', 0), patch.object(
                getattr(adapter, 'epoch_table', adapter), '_next_look', 0, create=True):
            self.assertEqual(one.read(), {'a': 3, 'b': 1})
        self.assertNotEqual(one.storage.database.epochs.now, before)

    def aged(self):
        """Return when what is made now is younger than what is there."""


# By whatever fills the tables of RelStorage -------------------------------------------------------------------------

class Refilled(Restored):
    """As zodbconvert --clear does it: it touches none of our tables."""

    def dump(self):
        adapter = self.first.storage.database.adapter
        with closing(adapter.connect()) as session:
            return {table: [tuple(map(_plain, row)) for row in session.all(
                        f'SELECT {columns} FROM {adapter._tables[table]}')]
                    for table, columns in FILLED[self.keep_history].items()}

    def restore(self, dump, meanwhile=lambda: None):
        adapter = self.first.storage.database.adapter
        placeholder = '?' if adapter.name == 'sqlite' else '%s'
        with closing(adapter.connect()) as session:
            for table in reversed(dump):
                session.run(f'DELETE FROM {adapter._tables[table]}')
            meanwhile()
            for table, rows in dump.items():
                columns = FILLED[self.keep_history][table]
                values = ', '.join([placeholder] * len(columns.split(',')))
                session.many(f'INSERT INTO {adapter._tables[table]} ({columns}) VALUES ({values})', rows)
                meanwhile()

    def test_opened_after_what_is_lost_was_committed(self):
        """Of that process nothing has changed since: what was newest when it was opened tells."""
        dump = self.dump()
        self.first.write(a=2)
        app = self.application()
        self.assertEqual(app.read(), {'a': 2, 'b': 1})
        self.restore(dump)
        self.application().write(e=3)
        self.assertEqual(app.read(), {'a': 1, 'b': 1, 'e': 3})

    def test_it_has_committed_what_is_lost_itself(self):
        """And has asked nothing since."""
        app, dump = self.application(), self.dump()
        app.write(a=2)
        self.restore(dump)
        self.application().write(e=3)
        self.assertEqual(app.read(), {'a': 1, 'b': 1, 'e': 3})

    def test_it_has_committed_the_last_that_is_lost(self):
        """And nobody has committed since."""
        app, dump = self.application(), self.dump()
        app.write(a=2)
        self.restore(dump)
        self.assertEqual(app.read(), {'a': 1, 'b': 1})

    def test_it_has_committed_what_others_have_changed(self):
        """Nothing is lost, and nothing that is cached."""
        app = self.application()
        app.write(a=2)
        self.first.write(a=3)
        generation = app.storage.database.cache.generation
        self.assertEqual(app.read(), {'a': 3, 'b': 1})
        app.write(e=4)
        self.assertEqual(app.read(), {'a': 3, 'b': 1, 'e': 4})
        self.assertEqual(app.storage.database.cache.generation, generation)

    def test_opened_after_what_is_lost_was_committed_and_commits(self):
        dump = self.dump()
        self.first.write(a=2)
        app = self.application()
        with self.deriving(app):
            self.restore(dump)
            self.application().write(e=3)
        self.assertEqual(app.read(), {'a': 1, 'b': 1, 'e': 3})

    def test_what_was_prepared_is_refused(self):
        """The list is that of a state in which other objects were garbage."""
        dump = self.dump()
        with self.first.manager:
            del self.first.connection.root()['h']
        storage = self.first.storage
        storage.pack(None, prepack_only=True)
        self.restore(dump)
        with self.assertRaisesRegex(ConfigurationError, 'prepared on another state'):
            storage.pack(None, skip_prepack=True)


def _plain(value):
    return bytes(value) if isinstance(value, memoryview) else value


# PostgreSQL ---------------------------------------------------------------------------------------------------------

class PgDump:

    options = ()

    def dump(self):
        return self._run('pg_dump', *self.options)

    def _run(self, program, *options, **how):
        dsn = self.first.storage.database.adapter._address.dsn
        done = subprocess.run([postgresql_programs() / program, *options, f'--dbname={dsn}'], text=True,
                              capture_output=True, **how)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def sql(self, text):
        self._run('psql', '--no-psqlrc', '--quiet', '--set=ON_ERROR_STOP=1', input=text)


class Dropped(PgDump, TellsByEpoch):

    def restore(self, dump, meanwhile=lambda: None):
        self.sql('DROP SCHEMA public CASCADE; CREATE SCHEMA public')
        meanwhile()
        self.sql(dump)


class Truncated(PgDump, TellsByEpoch):
    options = '--data-only',

    def restore(self, dump, meanwhile=lambda: None):
        names = self.first.storage.database.adapter.schema().keys()
        with closing(self.new_watch()) as watch:
            tables = [name for name, in watch.rows(
                "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'")]
            self.assertLessEqual(set(tables), set(names))
            watch.rows('TRUNCATE ' + ', '.join(f'"{table}"' for table in tables))
            meanwhile()
            watch.rows('TRUNCATE relstore_epoch')       # who has asked has given it another
        self.sql(dump)


class OwnServer:
    """Nobody else uses the server, so it may be shut down."""
    layer = Processes
    keep_history = True

    def setUp(self):
        require_postgresql(self)
        self.server = PostgreSQLServer()
        self.addCleanup(self.server.stop)
        self.server.start()
        self._dsn = self.server.create_database('main')
        super().setUp()

    def open_storage(self, **options):
        return relstore.RelStore(relstore.PostgreSQL(self._dsn), keep_history=self.keep_history, **options)

    def test_asked_in_the_middle(self):
        """There is no server then."""


class Replaced(OwnServer, TellsByEpoch):
    """The server's files, by a copy that was made while it was shut down."""

    def dump(self):
        self.server.shut_down()
        data, copy = self.server.directory / 'data', self.server.directory / 'copy'
        shutil.copytree(data, copy, copy_function=_copy)
        _own(data, copy)
        self.server.start()
        return copy

    def restore(self, dump, meanwhile=lambda: None):
        self.server.shut_down()
        shutil.rmtree(self.server.directory / 'data')
        dump.rename(self.server.directory / 'data')
        self.server.start()


class Made(OwnServer, PgDump, TellsByEpoch):
    """The server, by a new one at the same place, which is given the dump of the old one's database.

    It has been made in the same way, so even the oids of tables and the numbers of transactions are the same.
    """

    def setUp(self):
        super().setUp()
        self.close(self.first)
        self._make_anew(self._run('pg_dump'))
        self.first = self.application(**self.cached)

    def _make_anew(self, dump):
        self.server.shut_down()
        shutil.rmtree(self.server.directory / 'data')
        self.server._make_data()
        self.server.start()
        self.server.create_database('main')
        self.sql(dump)

    def restore(self, dump, meanwhile=lambda: None):
        self._make_anew(dump)


def _copy(source, target):
    shutil.copy2(source, target)
    _own(source, target)


def _own(source, *targets):
    """Give copies to whom the original belongs."""
    status = os.stat(source)
    for target in targets:
        for path in [Path(target), *Path(target).rglob('*')] if Path(target).is_dir() else [target]:
            os.chown(path, status.st_uid, status.st_gid)


# MySQL and MariaDB --------------------------------------------------------------------------------------------------

class MySQLDump:

    options = ()

    def _run(self, program, *options, **how):
        arguments = self.arguments()
        program = shutil.which(program)
        return subprocess.run(
            [program, '--no-defaults', f'--user={arguments["user"]}', f'--socket={arguments["unix_socket"]}',
             *options, arguments['db']], check=True, capture_output=True, **how).stdout

    def dump(self):
        return self._run('mariadb-dump', *self.options)

    def sql(self, text):
        self._run('mariadb', input=text)


class Recreated(MySQLDump, TellsByEpoch):
    """Table by table, as they are dropped, created and filled."""
    options = '--add-drop-table',

    def restore(self, dump, meanwhile=lambda: None):
        head, *tables = dump.split(b'DROP TABLE IF EXISTS')
        for table in tables:
            self.sql(head + b'DROP TABLE IF EXISTS' + table)
            meanwhile()

    def aged(self):
        """Times of tables are whole seconds."""
        with closing(self.new_watch()) as watch:
            watch.until(lambda: watch.one(
                'SELECT UNIX_TIMESTAMP() > UNIX_TIMESTAMP(create_time) FROM information_schema.tables '
                "WHERE table_schema = DATABASE() AND table_name = 'relstore_epoch'"))


class Emptied(MySQLDump, Restored):
    """The rows of all tables."""
    options = '--no-create-info',

    def restore(self, dump, meanwhile=lambda: None):
        with closing(self.new_watch()) as watch:
            tables = [name for name, in watch.rows(
                'SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() '
                "AND table_type = 'BASE TABLE'")]
            self.sql(b'SET foreign_key_checks = 0;' + b''.join(b'DELETE FROM `%s`;' % t.encode() for t in tables))
            meanwhile()
            self.sql(b'DELETE FROM relstore_epoch;')    # who has asked has given it another
        self.sql(dump)


# SQLite -------------------------------------------------------------------------------------------------------------

class SQLiteBackup:

    @property
    def path(self):
        return self.first.storage.database.adapter.path

    def dump(self):
        backup = self.directory / f'backup{time.monotonic_ns()}'
        with closing(sqlite3.connect(self.path)) as here, closing(sqlite3.connect(backup)) as there:
            here.backup(there)
        return backup


class BackedUp(SQLiteBackup, TellsByEpoch):
    """By the backup API, which is .restore of the shell too."""

    def restore(self, dump, meanwhile=lambda: None):
        with closing(sqlite3.connect(dump)) as there, closing(sqlite3.connect(self.path)) as here:
            there.backup(here, pages=1, progress=lambda *how: meanwhile())


class Shell(SQLiteBackup, TellsByEpoch):

    def restore(self, dump, meanwhile=lambda: None):
        if shutil.which('sqlite3') is None:
            self.skipTest('sqlite3, the shell, is not installed')
        subprocess.run(['sqlite3', self.path, f'.restore {dump}'], check=True)


class Renamed(SQLiteBackup, TellsByEpoch):
    """The file, with what lay beside it removed."""

    def restore(self, dump, meanwhile=lambda: None):
        os.replace(dump, self.path)
        for suffix in '-wal', '-shm':
            Path(f'{self.path}{suffix}').unlink(missing_ok=True)

    def test_with_the_log_of_the_old_one_beside_it(self):
        """Nobody who has known it takes it for that of the new one; and nobody removes that of the new one."""
        one = self.application()
        dump = self.dump()
        self.first.write(a=2)
        self.assertEqual(one.read(), {'a': 2, 'b': 1})
        wal = Path(f'{self.path}-wal')
        self.assertGreater(wal.stat().st_size, 0)
        os.replace(dump, self.path)
        for app in one, self.first:
            with self.assertRaisesRegex(Unavailable, 'was replaced while it was in use'):
                app.read()
            app.manager.abort()
        for suffix in '-wal', '-shm':
            Path(f'{self.path}{suffix}').unlink()
        new = self.application()
        new.write(c=5)
        inode = wal.stat().st_ino
        self.first.close()
        self.assertEqual(wal.stat().st_ino, inode)
        self.assertEqual(one.read(), {'a': 1, 'b': 1, 'c': 5})
        one.write(d=6)
        self.assertEqual(new.read(), {'a': 1, 'b': 1, 'c': 5, 'd': 6})
        with closing(sqlite3.connect(self.path)) as connection:
            self.assertEqual(connection.execute('PRAGMA integrity_check').fetchall(), [('ok',)])

    @skipUnless(Path('/proc/self/fd').exists(), 'Linux alone lists what a process has open')
    def test_a_connection_to_the_old_one_is_never_closed(self):
        """Some versions of SQLite would remove the log of the new one. It keeps nothing locked."""
        adapter = self.first.storage.database.adapter
        session, other = adapter.connect(), adapter.connect()
        opened = self.opened()
        adapter.connect().close()
        self.assertEqual(self.opened(), opened)
        session.begin_write(adapter.sql.begin_write, 0)
        os.replace(self.dump(), self.path)
        opened = self.opened()
        session.close()
        self.assertTrue(session.broken)
        other.begin_write(adapter.sql.begin_write, 0)
        other.close()
        del session, other
        gc.collect()
        self.assertEqual(self.opened(), opened)

    def opened(self) -> int:
        """Return how often this process has a log open: each connection has its own, and closes it at once."""
        found = 0
        for name in os.listdir('/proc/self/fd'):
            with suppress(FileNotFoundError):       # of the list itself
                found += os.readlink(f'/proc/self/fd/{name}').startswith(f'{self.path}-wal')
        return found

    def test_with_a_log_that_was_made_anew(self):
        """As it is when the last connection was closed: for a large transaction, or with others after a fault."""
        wal = Path(f'{self.path}-wal')
        before, dump = wal.stat().st_ino, self.dump()
        database = self.first.storage.database
        os.link(wal, self.directory / 'old log')        # else its number may be given again at once
        database.pool.retire()
        self.first.write(a=2)
        self.assertNotEqual(wal.stat().st_ino, before)
        os.replace(dump, self.path)
        with self.assertRaisesRegex(Unavailable, 'was replaced while it was in use'):
            self.first.read()
        self.first.manager.abort()
        for suffix in '-wal', '-shm':
            Path(f'{self.path}{suffix}').unlink()
        self.assertEqual(self.first.read(), {'a': 1, 'b': 1})
        with closing(sqlite3.connect(self.path)) as connection:
            self.assertEqual(connection.execute('PRAGMA integrity_check').fetchall(), [('ok',)])

    def test_nothing_is_written_into_a_deleted_file(self):
        one = self.application()
        dump = self.dump()
        view = one.storage.new_instance()
        view.poll_invalidations()
        view.afterCompletion()
        oid = view.new_oid()
        txn = TransactionMetaData()
        view.tpc_begin(txn)
        view.store(oid, b'\0' * 8, state(1), '', txn)
        view.tpc_vote(txn)
        self.restore(dump)
        with self.assertRaises(TransientError):
            view.tpc_finish(txn)
        view.tpc_abort(txn)
        view.release()
        self.assertEqual(one.read(), {'a': 1, 'b': 1})


class OneObject(TestCase):
    """A vote meets an object that is older than it was, and nothing else tells that the database went back."""

    def setUp(self):
        super().setUp()
        self.storage, self.other = self.open_storage(), self.open_storage()
        for storage in self.storage, self.other:
            self.addCleanup(storage.close)
        self.first, self.oid, *others = oids = [self.other.new_oid() for _ in range(10)]
        self.before = commit(self.other, *((oid, z64, state(0)) for oid in oids))
        self.tid = commit(self.other, (self.oid, self.before, state(1)))
        for oid in others:      # what changed last each vote looks at
            commit(self.other, (oid, self.before, state(1)))
        self.view = self.storage.new_instance()
        self.addCleanup(self.view.release)
        self.view.poll_invalidations()
        self.epoch = self.storage.database.epochs.now

    def go_back(self):
        """Let the object be what it was before."""
        revision = f'zoid = {u64(self.oid)} AND tid = {u64(self.tid)}'
        statements = [f'UPDATE object_state SET tid = {u64(self.before)} WHERE {revision}']
        if self.keep_history:
            statements = [f'UPDATE current_object SET tid = {u64(self.before)} WHERE {revision}',
                          f'DELETE FROM object_state WHERE {revision}']
        self.view.view.snapshot.end()
        with self.other.database.pool.session() as session:
            for statement in statements:
                session.run(statement)

    def change(self, base):
        self.vote(lambda txn: self.view.store(self.oid, base, state(2), '', txn))

    def read(self, base):
        """Change another object, and have read this one."""
        def act(txn):
            self.view.checkCurrentSerialInTransaction(self.oid, base, txn)
            self.view.store(self.first, self.before, state(2), '', txn)
        self.vote(act)

    def vote(self, act):
        txn = TransactionMetaData()
        self.view.tpc_begin(txn)
        try:
            act(txn)
            self.view.tpc_vote(txn)
        finally:
            self.view.tpc_abort(txn)

    def assertWentBack(self, act, base):
        with self.assertRaisesRegex(Unavailable, 'restored since this transaction read from it'):
            act(base)
        self.assertNotEqual(self.storage.database.epochs.now, self.epoch)

    def assertConflict(self, act, base):
        with self.assertRaises(ConflictError) as caught:
            act(base)
        self.assertNotIsInstance(caught.exception, Unavailable)
        self.assertEqual(self.storage.database.epochs.now, self.epoch)

    def test_changed(self):
        self.go_back()
        self.assertWentBack(self.change, self.tid)

    def test_read(self):
        self.go_back()
        self.assertWentBack(self.read, self.tid)

    def test_that_is_newer(self):
        commit(self.other, (self.oid, self.tid, state(3)))
        self.assertConflict(self.change, self.tid)
        self.assertConflict(self.read, self.tid)

    def test_that_is_gone(self):
        """It was deleted."""
        txn = TransactionMetaData()
        self.other.tpc_begin(txn)
        self.other.deleteObject(self.oid, self.tid, txn)
        self.other.tpc_vote(txn)
        self.other.tpc_finish(txn)
        self.assertConflict(self.change, self.tid)
        self.assertConflict(self.read, self.tid)

    def test_that_is_removed(self):
        """By a pack, say: no revision is left."""
        self.view.view.snapshot.end()
        with self.other.database.pool.session() as session:
            for table in ('current_object', 'object_state') if self.keep_history else ('object_state',):
                session.run(f'DELETE FROM {table} WHERE zoid = {u64(self.oid)}')
        self.assertConflict(self.change, self.tid)
        self.assertConflict(self.read, self.tid)

    def test_based_on_what_never_was(self):
        """Whatever a caller says: a tid before the newest, or after it."""
        for base in p64(u64(self.tid) + 1), p64(u64(self.storage.lastTransaction()) + 1):
            self.assertConflict(self.change, base)
            self.view.poll_invalidations()
            self.assertConflict(self.read, base)
            self.view.poll_invalidations()


SQLITE = SQLiteHistoryPreserving, SQLiteHistoryFree
POSTGRESQL = Psycopg3HistoryPreserving, Psycopg2HistoryFree
MYSQL = MySQLdbHistoryPreserving, MySQLdbHistoryFree, MySQLdbOnMySQLHistoryPreserving, MySQLdbOnMySQLHistoryFree

cases(globals(), BackedUp, OneObject, Shell, Renamed, backends=SQLITE)
cases(globals(), Dropped, Truncated, backends=POSTGRESQL)
cases(globals(), Recreated, Emptied, backends=MYSQL[:2])
cases(globals(), Refilled, backends=SQLITE + POSTGRESQL + MYSQL)


# Each makes a server or two for each of its tests.
for way in (Replaced, Made) if THOROUGH else ():
    globals()[f'{way.__name__}HistoryFree'] = type(f'{way.__name__}HistoryFree', (way,), {
        '__module__': __name__, 'keep_history': False})


del Restored, TellsByEpoch, BackedUp, OneObject, Shell, Renamed, Dropped, Truncated, Recreated, Emptied, Refilled
