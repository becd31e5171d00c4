"""Databases of older versions, and processes of an older relstore that are running when a newer one comes.

The versions before are taken from the project's own history.
"""
import io
import itertools
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import TestCase, mock

from ZODB.Connection import TransactionMetaData
from ZODB.serialize import referencesf
from ZODB.utils import u64, z64

import relstore
from relstore.adapters import completion, migrations, patience
from relstore.database import Database
from relstore.errors import ConfigurationError, StorageError, Unavailable
from relstore.options import Options
from relstore.tests.support.backends import (
    MySQLBackend,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteBackend,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import perform
from relstore.tests.support.places import Place
from relstore.tests.support.programs import SOURCE, Program
from relstore.tests.support.servers import cannot_run

WITHOUT_PACKS = 'e6dc6ac'       # the last that looks at no sweep
VERSION_1 = 'a208685'           # the last whose tables have version 1
SHARED, MANY = 10, 50
# What newer versions might change, in words that each database understands.
RENAMES = {'relstore_sweep.swept': 'ALTER TABLE {relstore_sweep} RENAME COLUMN number TO swept;',
           'relstore_pack.tested': 'ALTER TABLE {relstore_pack} ADD COLUMN tested {id} DEFAULT 7 NOT NULL;'}
ADDS = {'relstore_pack.tested': RENAMES['relstore_pack.tested']}
WRITES = {'(relstore_pack)': 'UPDATE {relstore_pack} SET number = number;'}
REFUSED = 'used by a newer relstore.*restart this process'


class Versions(TestCase):

    def setUp(self):
        super().setUp()
        self.place = self._nowhere('versions')
        self.where = {'adapter': self.place.adapter, 'arguments': self.place.arguments,
                      'keep_history': self.place.keep_history}

    def older(self, commit: str) -> Program:
        """Return a process with relstore as it was at a commit."""
        project = SOURCE.parent
        if shutil.which('git') is None:
            cannot_run(self, 'There is no git, which has the version before', excused=True)
        archive = subprocess.run(['git', '-C', project, 'archive', commit, 'src/relstore'], capture_output=True)
        if archive.returncode:
            cannot_run(self, f'The commit {commit} is not there: {archive.stderr.decode().strip()}', excused=True)
        directory = Path(tempfile.mkdtemp(prefix='relstore-before-'))
        self.addCleanup(shutil.rmtree, directory)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(directory)
        return self.program(directory / 'src')

    def program(self, source: Path = SOURCE) -> Program:
        program = Program(source)
        self.addCleanup(program.end)
        self.assertTrue(Path(program.ask('where')).is_relative_to(source))
        return program

    def open(self, **options) -> relstore.RelStore:
        address = getattr(relstore, self.place.adapter)(**self.place.arguments)
        storage = relstore.RelStore(address, keep_history=self.keep_history, **options)
        self.addCleanup(storage.close)
        return storage

    def _nowhere(self, name: str) -> Place:
        """Return a place where there are no tables yet."""
        if isinstance(self, SQLiteBackend):
            return Place('SQLite', {'data_dir': str(self._directory / name)}, self.keep_history)
        server = self.layer.server
        name = f'{name}_{"hp" if self.keep_history else "hf"}'
        where = server.create_database(name)
        self.addCleanup(server.drop_database, name)
        if isinstance(self, MySQLBackend):
            return Place('MySQL', where | {'driver': self.driver}, self.keep_history)
        return Place('PostgreSQL', {'dsn': where, 'driver': self.driver}, self.keep_history)

    def columns(self) -> dict:
        storage = self.open()
        return storage.database.pool.attempt(storage.database.adapter.columns)


class FromOlder(Versions):
    """What an older relstore has made, and goes on to use."""

    def test_version_1(self):
        """Two processes come at once. The older one can do nothing any more; and its pack is finished by us."""
        older, now, other = self.older(VERSION_1), self.program(), self.program()
        older.ask('open', **self.where)
        older.ask('create', shared=SHARED, many=MANY)
        older.ask('make_garbage')
        older.ask('prepack')
        with self.assertRaisesRegex(ConfigurationError, 'lacks version 2 of the tables.*"relstore adopt"'):
            self.open(create_schema=False)
        older.ask('write', word='the last')
        for program in now, other:
            program.tell('open', **self.where)
        for program in now, other:
            program.answer()
        with self.assertRaises(AssertionError):
            older.ask('write', word='never')
        self.assertEqual([program.ask('read') for program in (now, other)], ['the last'] * 2)
        now.ask('write', word='on')
        self.assertEqual(other.ask('read'), 'on')
        with self.assertRaisesRegex(AssertionError, 'ConfigurationError'):
            older.ask('open', **self.where)
        self.assertEqual(self.open().pack(time.time(), skip_prepack=True).objects, 1)
        self.assertEqual(other.ask('values'), [[0] * SHARED, [0] * (MANY - 1)])
        for program in now, other:
            program.ask('close')

    def test_tables_are_those_of_a_new_database(self):
        older = self.older(VERSION_1)
        older.ask('open', **self.where)
        older.ask('close')
        migrated = self.columns()
        self.place = self._nowhere('new')
        self.assertEqual(migrated, self.columns())

    def test_deletion_by_a_collector(self):
        """What views of before may hold was written down elsewhere."""
        older = self.older(VERSION_1)
        older.ask('open', **self.where)
        older.ask('create', shared=SHARED, many=MANY)
        older.ask('delete', oid=SHARED)
        older.ask('close')
        storage = self.open()
        [[sweeping, deleted]] = storage.database.pool.attempt(
            lambda session: session.all('SELECT sweeping, deleted FROM relstore_sweep'))
        self.assertEqual(sweeping, 0)
        self.assertLess(u64(storage.undoLog(0, 2)[1]['id']) if self.keep_history else 0, deleted)
        self.assertLessEqual(deleted, u64(storage.lastTransaction()))

    def test_without_packs(self):
        """By two processes at once; and an older one that is still there is reckoned with."""
        older, now, other = self.older(WITHOUT_PACKS), self.program(), self.program()
        older.ask('open', **self.where)
        older.ask('create', shared=SHARED, many=MANY)
        with self.assertRaisesRegex(ConfigurationError, 'lacks .*relstore_sweep.*create-schema is false'):
            self.open(create_schema=False)
        for program in now, other:
            program.tell('open', **self.where)
        for program in now, other:
            program.answer()
        older.ask('write', word='after')
        self.assertEqual([program.ask('read') for program in (now, other)], ['after'] * 2)
        storage = self.open()
        with self.assertRaisesRegex(ConfigurationError, 'older relstore.*"relstore writers"'):
            storage.pack(time.time())
        self.assertEqual(storage.pack(time.time() - 3600).objects, 0)
        for program in now, older, other:
            program.ask('close')
        storage.database.adapter.writers.set('relstore')
        storage.pack(time.time())
        other.ask('open', **self.where)
        self.assertEqual(other.ask('read'), 'after')
        other.ask('close')


class ToNewer(Versions):
    """Another process migrates a database that we have open. It is a relstore that does not exist yet."""

    def setUp(self):
        super().setUp()
        self.storage = self.open()

    @contextmanager
    def newer(self, sections: dict = ADDS) -> Iterator[None]:
        """While this is entered, what is opened is opened by that, whose tables have version 3."""
        texts = migrations.texts

        def of_all(database: str, number: int, keep_history: bool) -> dict:
            if number == 3:
                return migrations.begins(3) | sections | migrations.ends(3)
            return texts(database, number, keep_history)

        kind = type(self.storage.database.adapter)

        def schema(adapter, schema=kind.schema) -> dict:
            texts = schema(adapter)
            return texts | {'relstore_sweep': texts['relstore_sweep'].replace('number', 'swept')}

        with mock.patch.multiple(migrations, VERSION=3, texts=of_all), \
                mock.patch.object(kind, 'schema', schema if sections is RENAMES else kind.schema):
            yield

    def migrate(self, sections: dict = ADDS) -> None:
        """As that does when it opens the database, and nothing more: its statements are ours."""
        with self.newer(sections):
            self.adapter()

    def adapter(self, create: bool = True):
        """Return one that has looked at the tables, and made them those of its version."""
        address = getattr(relstore, self.place.adapter)(**self.place.arguments)
        return address.open(Options.make(keep_history=self.keep_history, create_schema=create))

    def test_older_process(self):
        """Whether it reads or writes; and what it had begun before."""
        for number, sections in enumerate((ADDS, WRITES, RENAMES)):
            with self.subTest(sections):
                self.place = self._nowhere(f'older_{number}')
                self.where |= {'arguments': self.place.arguments}
                older = self.program()
                older.ask('open', **self.where)
                older.ask('create', shared=SHARED, many=MANY)
                begun = self.keep_history       # without, PostgreSQL and MySQL wait for views
                if begun:
                    older.ask('begin', word='never')
                self.migrate(sections)
                if begun:
                    self.assertRaisesRegex(AssertionError, f'ReadConflictError|{REFUSED}', older.ask, 'commit')
                for what, arguments in {'read': {}, 'write': {'word': 'never'}}.items():
                    with self.assertRaisesRegex(AssertionError, REFUSED):
                        older.ask(what, **arguments)
                older.ask('close')

    def test_store_without_a_view(self):
        """It votes with what it knows of the epoch, and is not asked to poll before."""
        for number, sections in enumerate((ADDS, WRITES, RENAMES)):
            with self.subTest(sections):
                self.place = self._nowhere(f'without_{number}')
                older = self.open()
                self.migrate(sections)
                with self.assertRaises(StorageError):
                    perform(older, lambda txn, storage=older: storage.store(storage.new_oid(), z64, b'never', '', txn))
                self.assertRaisesRegex(ConfigurationError, REFUSED, older.new_instance().poll_invalidations)

    def test_pack_and_zap(self):
        """By a process that has not polled since."""
        self.migrate()
        self.assertRaisesRegex(ConfigurationError, REFUSED, self.storage.pack, time.time(), referencesf)
        self.assertRaisesRegex(ConfigurationError, REFUSED, self.storage.zap_all)

    def test_pack_under_way(self):
        """It has the lock of packs; so has a copy."""
        adapter = self.storage.database.adapter
        with closing(adapter.connect()) as session:
            adapter.pack_lock.keep_packs_out(session, 'fail')
            self.assertRaisesRegex(Unavailable, 'is being packed by .*; open it afterwards', self.migrate)
        self.migrate()

    def test_opened_meanwhile(self):
        """After it has looked at the tables, and before it learns the epoch."""
        migrated = []

        def learn(database, session, learn=Database._learn):
            if not migrated:
                migrated.append(True)
                session.rollback()
                self.migrate()
            with closing(database.adapter.connect()) as session:
                learn(database, session)

        with mock.patch.object(Database, '_learn', learn):
            self.assertRaisesRegex(ConfigurationError, REFUSED, self.open)

    def test_statements_run_by_hand(self):
        """As `relstore adopt --dry-run` prints them."""
        adapter = self.storage.database.adapter
        with self.newer(), adapter.completion() as completion:
            [step] = completion.steps()
            for statement in step.statements:
                completion.session.run(statement)
        self.assertRaisesRegex(ConfigurationError, REFUSED, self.storage.new_instance().poll_invalidations)
        with self.newer():
            self.adapter(create=False)

    def test_who_has_voted_is_waited_for(self):
        for number, sections in enumerate((ADDS, WRITES, RENAMES)):
            with self.subTest(sections):
                self.place = self._nowhere(f'voted_{number}')
                older = self.open()
                oid, txn = older.new_oid(), TransactionMetaData()
                older.tpc_begin(txn)
                older.store(oid, z64, b'voted', '', txn)
                older.tpc_vote(txn)
                with mock.patch.object(patience, 'FIRST_PAUSE_SECONDS', 0.1), ThreadPoolExecutor(1) as threads:
                    newer = threads.submit(self.migrate, sections)
                    self.assertFalse(wait([newer], timeout=2).done)
                    older.tpc_finish(txn)
                    newer.result(60)

    def test_who_is_in_the_way_goes_on(self):
        """As long as nothing was changed, an older process may be restarted, too."""
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        self.storage.store(self.storage.new_oid(), z64, b'voted', '', txn)
        self.storage.tpc_vote(txn)
        with mock.patch.object(completion, 'PATIENCE_SECONDS', 0.1):
            self.assertRaises(StorageError, self.migrate)
        self.storage.tpc_finish(txn)
        self.storage.new_instance().poll_invalidations()
        self.open().new_instance().poll_invalidations()

    def test_interrupted(self):
        """Before each statement in turn. Where those before it stay, the older relstore stays out."""
        for n in range(len(RENAMES) + 2):
            with self.subTest(n):
                self.place = self._nowhere(f'interrupted_{n}')
                older = self.open()
                with self._fails(type(older.database.adapter), n):
                    self.assertRaises(ZeroDivisionError, self.migrate, RENAMES)
                if n and isinstance(self, MySQLBackend):
                    self.assertRaisesRegex(ConfigurationError, REFUSED, older.new_instance().poll_invalidations)
                    self.assertRaisesRegex(ConfigurationError, 'version 3.*newer relstore', self.open)
                else:
                    older.new_instance().poll_invalidations()
                    self.open()
                with self.newer(RENAMES):
                    with self.assertRaisesRegex(ConfigurationError, 'lacks version 3 of the tables'):
                        self.adapter(create=False)
                    self.adapter()
                    with closing(self.adapter(create=False).bare_session()) as session:
                        columns = older.database.adapter.columns(session)
                self.assertIn('tested', columns['relstore_pack'])
                self.assertIn('swept', columns['relstore_sweep'])

    @contextmanager
    def _fails(self, adapter: type, n: int) -> Iterator[None]:
        define, count = adapter.define, itertools.count()

        def fails(self, session, statement):
            if next(count) == n:
                raise ZeroDivisionError
            define(self, session, statement)

        with mock.patch.object(adapter, 'define', fails):
            yield


cases(globals(), FromOlder, ToNewer, backends=(
    Psycopg2HistoryPreserving, Psycopg2HistoryFree, MySQLdbHistoryPreserving, SQLiteHistoryPreserving))
del Versions, FromOlder, ToNewer
