"""Processes that read a Data.fs ahead of whoever copies it: the same rows, also where one of them fails."""
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

from persistent.mapping import PersistentMapping
from ZODB.blob import Blob
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.POSException import StorageError
from ZODB.tests.hexstorage import HexStorage

from relstore import bulk, readers
from relstore.converting.compare import Comparison
from relstore.converting.filestorage import LiveFileStorage
from relstore.tests.support.backends import HISTORY_PRESERVING, SQLiteHistoryPreserving, cases
from relstore.tests.support.commands import Commands, environment
from relstore.tests.support.layers import Processes
from relstore.tests.support.patience import until

TRANSACTIONS = 60


class Suite(Commands):

    def setUp(self):
        super().setUp()
        self.path, self.blobs = str(self.here / 'Data.fs'), str(self.here / 'blobstorage')
        with closing(DB(FileStorage(self.path, blob_dir=self.blobs))) as db:
            for number in range(TRANSACTIONS):
                with db.transaction() as connection:
                    root = connection.root()
                    root[number] = PersistentMapping(number=number, text='x' * 100 * number, other=root.get(number - 1))
                    if number % 20 == 10:
                        root['blob'] = Blob(b'blob %d' % number)
                    connection.transaction_manager.get().note(f'number {number}')
        for name, value in {'WORTHWHILE_BYTES': 0, 'RANGE_BYTES': 10_000, 'spare_processors': lambda: 2}.items():
            self.patch(readers, name, value)
        self.patch(bulk, 'BATCH_BYTES', 20_000)
        self.source = self.opened_source()
        self.storage = self.open_storage(blob_dir=str(self.here / 'cache'))
        self.addCleanup(self.storage.close)

    def patch(self, *arguments):
        patched = patch.object(*arguments)
        patched.start()
        self.addCleanup(patched.stop)

    def opened_source(self):
        source = LiveFileStorage(self.path, self.blobs)
        self.addCleanup(source.close)
        return source

    def copy(self, storage=None, act=lambda number: None):
        """Copy, with act(number) after each range; return how many transactions came with rows, and how many not."""
        counts, made = [0, 0], []

        class Counting(readers.Readers):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                made.append(self)

            def ahead(self, transactions):
                for number, transaction in enumerate(super().ahead(transactions)):
                    counts[transaction.rows is None] += 1
                    act(number)
                    yield transaction

        with patch.object(readers, 'Readers', Counting):
            (storage or self.storage).copyTransactionsFrom(self.source)
        self.processes = [process for each in made for process in each._processes]
        self.assertEqual({process.returncode for process in self.processes} - {0, -signal.SIGKILL}, set())
        return counts

    def check(self):
        self.assertEqual(list(Comparison(self.source, self.storage).differences()), [])


class Rows(Suite):

    def test_the_same(self):
        self.assertEqual(self.copy(), [TRANSACTIONS + 1 - 3, 3])      # the root is a transaction; blobs are read here
        self.check()
        with self.storage.database.pool.session() as session:
            sql = self.storage.database.adapter.sql
            text = sql.expanded({'': 'SELECT * FROM {object_state} ORDER BY tid, zoid'})['']
            found = session.all(text)
            self.storage.zap_all()
            self.patch(readers, 'spare_processors', lambda: 0)
            self.storage.copyTransactionsFrom(self.source)
            self.assertEqual(session.all(text), found)

    def test_what_is_left(self):
        def stop(number):
            if number == 40:
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            self.copy(act=stop)
        self.assertGreater(self.storage.lastTransaction(), bytes(8))
        self.assertLess(sum(self.copy()), TRANSACTIONS)
        self.check()


cases(globals(), Rows, backends=HISTORY_PRESERVING)
del Rows


class Trouble(Suite):
    layer = Processes

    def test_one_is_killed(self):
        killed = []

        def kill(number):
            if number == 5:
                for each in children():
                    os.kill(each, signal.SIGKILL)
                    killed.append(each)

        with self.assertLogs('relstore', 'WARNING') as logs:
            found, not_found = self.copy(act=kill)
        self.assertIn('has died; the copy goes on without', ''.join(logs.output))
        self.assertEqual(len(killed), 2)
        self.assertGreater(found, 3)
        self.assertGreater(not_found, 30)
        self.check()

    def test_they_end_with_the_one_who_copies(self):
        """Even where that is killed: they are told of nothing then, but the pipe is closed."""
        program = """
import os, sys
from relstore import readers
made = readers.Readers(2, True)
print(*[process.pid for process in made._processes], flush=True)
sys.stdin.read()
"""
        parent = subprocess.Popen([sys.executable, '-c', program], env=environment(), stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        self.assertEqual(len(pids), 2)
        until(lambda: all(is_reader(pid) for pid in pids))      # exec is seen to begin before it shows its arguments
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
        until(lambda: not any(is_reader(pid) for pid in pids))

    def test_another_file_in_its_place(self):
        """As after a pack: it is still the old one that is copied."""
        shutil.copy(self.path, self.here / 'other.fs')
        os.replace(self.here / 'other.fs', self.path)
        self.assertEqual(self.copy(), [0, TRANSACTIONS + 1])
        self.check()

    def test_a_damaged_record(self):
        """Told as it is where nobody reads ahead."""
        transactions = list(self.source.iterator())
        place = transactions[30].place
        good = Path(self.path).read_bytes()
        for at, before in (place.begin + 60, 30), (place.begin + 8, 30), (transactions[31].place.begin, 31):
            with self.subTest(at - place.begin):
                with open(self.path, 'r+b') as file:
                    file.seek(at)
                    file.write(b'\xff' * 20)
                with self.assertRaisesRegex(StorageError, 'is damaged at byte '):
                    self.copy()
                self.assertEqual(self.storage.lastTransaction(), transactions[before - 1].tid)
                with open(self.path, 'r+b') as file:
                    file.write(good)
                self.storage.zap_all()

    def test_through_a_wrapper(self):
        """How it wraps records is known here alone."""
        HexStorage(self.storage)
        self.storage.database.transform = self.storage.database.untransform = lambda record: record
        self.assertEqual(self.copy(), [0, 0])

    def test_no_more_than_the_others_leave(self):
        self.patch(readers, 'WORTHWHILE_BYTES', 1 << 40)
        self.assertEqual(self.copy(), [0, 0])
        self.check()


cases(globals(), Trouble, backends=[SQLiteHistoryPreserving])
del Trouble


def children():
    """Return the pids of the readers of this process."""
    return [int(path.name) for path in Path('/proc').iterdir() if path.name.isdigit()
            and is_reader(int(path.name)) and parent_of(int(path.name)) == os.getpid()]


def is_reader(pid):
    try:
        return b'relstore.readers' in Path(f'/proc/{pid}/cmdline').read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid):
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
