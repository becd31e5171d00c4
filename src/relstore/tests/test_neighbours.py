"""Who else uses an SQLite database: RelStorage must not, at the same time."""
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from unittest import TestCase, skipUnless
from unittest.mock import patch

from persistent.mapping import PersistentMapping
from ZODB.serialize import ObjectWriter
from ZODB.utils import u64, z64

from relstore import RelStore, SQLite
from relstore.adapters.commits import sqlite
from relstore.adapters.neighbours import Neighbours
from relstore.adapters.queue import PRESENT
from relstore.errors import ConfigurationError
from relstore.tests.support.backends import SQLiteHistoryFree, SQLiteHistoryPreserving, cases
from relstore.tests.support.commits import commit
from relstore.tests.support.patience import within
from relstore.tests.support.programs import PYTHON, Peer
from relstore.tests.support.records import state
from relstore.tests.support.servers import cannot_run

# Opens a database as other programs do: the file alone, or as RelStorage, that with its counter of oids.
PROGRAM = textwrap.dedent("""\
    import sqlite3, sys
    main = sqlite3.connect(sys.argv[1] + '/main.sqlite3', isolation_level=None)
    main.execute('SELECT count(*) FROM object_state').fetchall()
    for line in sys.stdin:
        zoid = 0
        if line == 'count\\n':
            oids = sqlite3.connect(sys.argv[1] + '/oids.sqlite3', isolation_level=None)
            oids.execute('CREATE TABLE IF NOT EXISTS new_oid (zoid INTEGER PRIMARY KEY NOT NULL)')
            oids.execute('INSERT INTO new_oid SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM new_oid)')
            oids.execute('UPDATE new_oid SET zoid = zoid + 1')
            [zoid] = oids.execute('SELECT zoid FROM new_oid').fetchone()
        print(zoid, flush=True)
    """)
# Holds a database open with relstore.
RELSTORE = textwrap.dedent("""\
    import sys, relstore
    storage = relstore.RelStore(relstore.SQLite(sys.argv[1]), keep_history=sys.argv[2] == 'True')
    for line in sys.stdin:
        print(storage.new_oid().hex(), flush=True)
    """)
READER = textwrap.dedent("""\
    import sys, relstore
    storage = relstore.RelStore(relstore.SQLite(sys.argv[1]), keep_history=sys.argv[2] == 'True', read_only=True)
    instance = storage.new_instance()
    for line in sys.stdin:
        instance.poll_invalidations()
        print(instance.lastTransaction().hex(), flush=True)
    """)
# Maps a file as the system maps RelStorage's modules, and goes on as another program.
LOADED = textwrap.dedent("""\
    import mmap, os, tempfile
    directory = tempfile.TemporaryDirectory(prefix='relstore-')
    os.mkdir(directory.name + '/relstorage')
    with open(directory.name + '/relstorage/_inthashmap.cpython.so', 'w+b') as module:
        module.truncate(4096)
        mapped = mmap.mmap(module.fileno(), 4096)
    """)


@skipUnless(Path('/proc/locks').exists(), 'Linux alone lists its locks')
class Beside(TestCase):

    def setUp(self):
        super().setUp()
        self.open_storage().close()
        self.directory = self.address().data_dir

    def program(self, text: str) -> subprocess.Popen:
        environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
        process = subprocess.Popen([sys.executable, '-c', text, self.directory, str(self.keep_history)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.addCleanup(process.wait)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stdin.close)
        self.addCleanup(process.kill)
        return process

    def ask(self, process: subprocess.Popen, what: str) -> str:
        process.stdin.write(f'{what}\n')
        process.stdin.flush()
        return process.stdout.readline().strip()

    def test_who_counts_oids_is_relstorage(self):
        """It is refused at once; what it leaves behind, killed, is not."""
        process = self.program(PROGRAM)
        self.ask(process, 'count')
        for _ in range(2):
            with self.assertRaisesRegex(ConfigurationError, f'used by RelStorage, in the process {process.pid} '):
                self.open_storage()
        self.open_storage(read_only=True).close()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with self.assertNoLogs('relstore', 'WARNING'):
            storage = self.open_storage()
        self.addCleanup(storage.close)
        commit(storage, (storage.new_oid(), z64, state(1)))

    def test_anybody_else_is_named(self):
        process = self.program(PROGRAM)
        self.assertEqual(self.ask(process, 'wait'), '0')
        with self.assertLogs('relstore', 'WARNING') as logged:
            storage = self.open_storage()
        self.addCleanup(storage.close)
        self.assertEqual(len(logged.records), 1)
        self.assertRegex(logged.output[0], rf'is open in the process {process.pid} \(python')
        commit(storage, (storage.new_oid(), z64, state(1)))

    def test_relstore_is_no_stranger(self):
        process = self.program(RELSTORE)
        self.ask(process, 'oid')
        with self.assertNoLogs('relstore', 'WARNING'), closing(self.open_storage()):
            self.assertEqual(Neighbours(self.address().path).strangers(), [])
        # Nor is this process to others, whatever was closed in it.
        storage = self.open_storage()
        self.addCleanup(storage.close)
        self.open_storage().close()
        storage.new_oid()
        self.assertIn(os.getpid(), Neighbours(self.address().path)._holders('', PRESENT, 'READ', 'writers.lock'))

    def test_who_keeps_the_tables_from_being_changed(self):
        adapter = self.address().bind(self.keep_history)
        with closing(adapter.connect()) as session, closing(sqlite3.connect(adapter.path)) as other:
            other.execute('BEGIN IMMEDIATE')
            self.assertEqual(adapter.table_holders(session, 'object_state', readers=False),
                             'another thread of this process')

    def test_a_reader_that_has_relstorage_loaded(self):
        """It hinders nobody, also where the file of the locks is not there, which it does not make."""
        locks = self.directory / 'writers.lock'
        for there in True, False:
            with self.subTest(there=there), closing(self.open_storage()) as storage:
                if not there:
                    storage.close()
                    locks.unlink()
                process = self.program(LOADED + READER)
                last = self.ask(process, 'poll')
                self.assertEqual(locks.exists(), there)
                others = Neighbours(self.address().path)
                self.assertEqual(len(others.strangers()), 0 if there else 1)
                self.assertIsNone(others.relstorage())
                with closing(self.open_storage()) as storage, patch.object(sqlite, 'LOOK_AGAIN_SECONDS', 0):
                    commit(storage, (storage.new_oid(), z64, state(1)))
                    self.assertGreater(self.ask(process, 'poll'), last)
                process.kill()
                process.wait()

    def test_relstorage_before_its_first_oid(self):
        process = self.program(LOADED + PROGRAM)
        self.ask(process, 'wait')
        with self.assertRaisesRegex(ConfigurationError, f'used by RelStorage, in the process {process.pid} '):
            self.open_storage()

    def test_relstore_that_cannot_lock(self):
        """It writes to the database, and has RelStorage loaded."""
        process = self.program(
            'import fcntl, logging\n'
            'logging.disable()\n'
            'def lockf(*_): raise OSError(37, "No locks available")\n'
            'fcntl.lockf = lockf\n' + LOADED + RELSTORE)
        self.ask(process, 'oid')
        others = Neighbours(self.address().path)
        self.assertEqual(len(others.strangers()), 1)
        self.assertIsNone(others.relstorage())

    def test_two_paths_to_one_directory(self):
        """What is closed by one takes no lock from the other."""
        other = self.directory.with_name(f'{self.directory.name}-link')
        other.symlink_to(self.directory)
        self.addCleanup(other.unlink)
        with closing(self.open_storage()) as storage:
            RelStore(SQLite(str(other)), keep_history=self.keep_history).close()
            self.assertIn(os.getpid(), Neighbours(other / 'main.sqlite3')._holders('', PRESENT, 'READ', 'writers.lock'))
            process = self.program(RELSTORE)
            self.ask(process, 'oid')
            commit(storage, (storage.new_oid(), z64, state(1)))

    def test_a_file_system_whose_locks_are_not_listed(self):
        """It is said once. Such a file system has another device in /proc/locks than in stat()."""
        with patch.object(os, 'minor', lambda device: 255), self.assertLogs('relstore', 'WARNING') as logged:
            for _ in range(2):
                self.open_storage().close()
        self.assertEqual(len(logged.records), 1)
        self.assertIn('main.sqlite3-shm cannot be found in /proc/locks', logged.output[0])

    def test_it_comes_later(self):
        """While relstore has the database open: no oid is given twice, and no vote passes."""
        self.address().bind(self.keep_history).writers.set('any')
        storage = self.open_storage()
        self.addCleanup(storage.close)
        mine = {u64(storage.new_oid()) for _ in range(40)}
        process = self.program(PROGRAM)
        block = int(self.ask(process, 'count'))
        theirs = set(range(16 * block - 15, 16 * block + 1))
        oid = storage.new_oid()     # one of those that it has
        for _ in within('no oid is given where RelStorage is'):
            mine.add(u64(oid))
            try:
                oid = storage.new_oid()
            except ConfigurationError as e:
                self.assertIn(f'used by RelStorage, in the process {process.pid} ', str(e))
                break
        self.assertFalse(mine & theirs)
        with patch.object(sqlite, 'LOOK_AGAIN_SECONDS', 0), \
                self.assertRaisesRegex(ConfigurationError, 'Stop one of them'):
            commit(storage, (oid, z64, state(1)))
        process.kill()
        process.wait()
        commit(storage, (oid, z64, state(1)))
        while len(mine) < 2000:
            mine.add(u64(storage.new_oid()))
        self.assertFalse(mine & theirs)

    def test_oids_of_both_are_counted_together(self):
        """Also where RelStorage cannot be told, or is not there: what each has counted the other does not give."""
        self.address().bind(self.keep_history).writers.set('any')
        with patch.object(Neighbours, 'relstorage', lambda self: None), closing(self.open_storage()) as storage:
            process, mine, theirs = self.program(PROGRAM), set(), set()
            for _ in range(20):
                mine |= {u64(storage.new_oid()) for _ in range(10)}
                block = int(self.ask(process, 'count'))
                theirs |= set(range(16 * block - 15, 16 * block + 1))
        self.assertEqual((len(mine), len(theirs)), (200, 320))
        self.assertFalse(mine & theirs)

    def test_for_relstorage_its_counter_is_made(self):
        """By `relstore writers CONFIG any`, once; it counts on."""
        with closing(self.open_storage()) as storage:
            highest = max(u64(storage.new_oid()) for _ in range(100))
        oids = self.directory / 'oids.sqlite3'
        self.assertFalse(oids.exists())
        for _ in range(2):
            self.address().bind(self.keep_history).writers.set('any')
            with closing(sqlite3.connect(oids)) as connection:
                [[block]] = connection.execute('SELECT zoid FROM new_oid').fetchall()
                self.assertGreaterEqual(16 * block, highest)
                [[text]] = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'new_oid'").fetchall()
                self.assertEqual(text, 'CREATE TABLE new_oid (zoid INTEGER PRIMARY KEY NOT NULL)')
        with closing(self.open_storage()) as storage:
            self.assertGreater(u64(storage.new_oid()), highest)


@skipUnless(Path('/proc/locks').exists(), 'Linux alone lists its locks')
class BesideRelStorage(TestCase):
    """The real one, in a process of its own."""

    def setUp(self):
        super().setUp()
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        self.directory = self.address().data_dir

    def peer(self) -> Peer:
        peer = Peer()
        self.addCleanup(peer.end)
        self.assertRegex(peer.ask('version'), r'^4\.')
        return peer

    def test_there_and_back(self):
        """relstore makes a database, RelStorage goes on, and relstore again; never both at once."""
        storage = self.open_storage()
        commit(storage, (z64, z64, root()), *((storage.new_oid(), z64, state(n)) for n in range(20)))
        storage.database.adapter.writers.set('any')
        storage.close()
        where = {'data_dir': str(self.directory)}
        peer = self.peer()
        peer.ask('open', where=where, keep_history=self.keep_history)
        with self.assertRaisesRegex(ConfigurationError, 'used by RelStorage'):
            self.open_storage()
        peer.ask('create')
        with self.assertRaisesRegex(ConfigurationError, 'used by RelStorage'):
            self.open_storage()
        found = peer.ask('walk')
        peer.end()
        storage = self.open_storage()
        self.addCleanup(storage.close)
        oid = storage.new_oid()
        self.assertGreater(u64(oid), max(int(oid, 16) for oid in found))
        commit(storage, (oid, z64, state(1)))
        second = self.peer()
        second.ask('open', where=where, keep_history=self.keep_history)
        with patch.object(sqlite, 'LOOK_AGAIN_SECONDS', 0), \
                self.assertRaisesRegex(ConfigurationError, 'used by RelStorage'):
            commit(storage, (storage.new_oid(), z64, state(1)))
        second.end()
        commit(storage, (storage.new_oid(), z64, state(1)))


def root() -> bytes:
    """Return the record of an empty root."""
    return ObjectWriter().serialize(PersistentMapping())


cases(globals(), Beside, BesideRelStorage, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Beside, BesideRelStorage
