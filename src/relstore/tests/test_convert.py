"""zodbconvert as its user runs it: between storages of all kinds, there and back, interrupted, and compared."""
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from unittest import mock

from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError, ReadOnlyError
from ZODB.utils import p64, z64

import relstore
from relstore import copying
from relstore.cli import convert, places
from relstore.cli.signals import signals
from relstore.cli.zopeconf import zope_lines
from relstore.converting.conversion import Conversion
from relstore.converting.filestorage import LiveFileStorage
from relstore.errors import StorageError
from relstore.tests.support.backends import cases
from relstore.tests.support.commands import BACKENDS, environment
from relstore.tests.support.converting import Convert
from relstore.tests.support.layers import Processes

SECONDS = 60


class ThereAndBack(Convert):

    def setUp(self):
        super().setUp()
        self.fill()
        self.destination = self.config(f'blob-dir {self.here}/cache')

    def opened(self, name='main'):
        storage = self.open_storage(name, blob_dir=str(self.here / 'cache'))
        self.addCleanup(storage.close)
        return storage

    def test_there_and_back(self):
        out = self.works(self.path, self.destination, '--verify')
        self.assertRegex(out, r'Compared: \d+ transactions, \d+ records and [12] blobs? are equal')
        storage = self.opened()
        self.assertEqual(self.root(storage), self.root(self.filestorage()))
        if self.keep_history:
            self.assertEqual(self.differences(self.opened()), [])
            self.assertEqual(self.data_tids(self.opened()), self.data_tids(self.source()))
            self.assertTrue(self.data_tids(self.source()))
        out = self.works(self.destination, f'file://{self.here}/back.fs?blob-dir={self.here}/back.blobs', '--verify')
        self.assertIn(' are equal', out)
        self.assertEqual(self.root(self.filestorage('back')), self.root(self.filestorage()))
        if self.keep_history:
            self.assertEqual(self.differences(self.here / 'back.fs', self.here / 'back.blobs'), [])

    def data_tids(self, storage):
        """Return of each undone record which one it repeats."""
        with closing(storage.iterator()) as transactions:
            return [(record.oid, record.tid, record.data_txn) for each in transactions for record in each
                    if record.data_txn is not None]

    def test_what_was_not_kept_out_is_told(self):
        """A pack that may have run is told in the end, though all else went well."""
        with mock.patch.object(copying.Guard, 'prove', side_effect=StorageError('It was packed.')) as prove:
            self.assertIn('It was packed.', self.refused(self.path, self.destination))
        prove.assert_called_once_with()

    def test_how_much_there_is_to_copy(self):
        """From a database exactly what is copied, whatever else is in it."""
        self.works(self.path, self.destination)
        totals, copied = [], []

        def progress(self, what, done, total):
            totals.append(total)
            copied.append(done)

        with mock.patch('relstore.cli.progress.Lines.__call__', progress):
            self.works(self.destination, f'file://{self.here}/back.fs?blob-dir={self.here}/back.blobs')
        self.assertEqual(set(totals), {copied[-1]})
        self.change('number', 'more')
        self.works(self.path, self.destination)
        totals.clear()
        with mock.patch('relstore.cli.progress.Lines.__call__', progress):
            self.works(self.destination, f'file://{self.here}/back.fs?blob-dir={self.here}/back.blobs')
        self.assertEqual(set(totals), {copied[-1]})

    def test_a_source_is_only_read(self):
        for named, storage in (self.path, LiveFileStorage), (self.destination, relstore.RelStore):
            self.works(self.path, self.destination)
            with places.find_one(str(named)).open(reading=True) as opened:
                self.assertIsInstance(opened.storage, storage)
                with self.assertRaises(ReadOnlyError):
                    opened.storage.tpc_begin(TransactionMetaData())

    def test_without_history_what_is_current(self):
        if self.keep_history:
            self.skipTest('this is about databases without history')
        self.works(self.path, self.destination)
        with closing(self.opened().iterator()) as transactions:
            records = [(record.oid, record.tid) for each in transactions for record in each if record.data]
        source = self.source()
        current = []
        for oid in range(1000):
            try:
                current.append((p64(oid), source.load(p64(oid))[1]))
            except POSKeyError:
                continue
        self.assertEqual(sorted(records), current)

    def test_one_file_with_both(self):
        both = self.write('both.conf', '%import relstore', '<filestorage source>', f'path {self.path}',
                          f'blob-dir {self.blobs}', '</filestorage>',
                          self.section(f'blob-dir {self.here}/cache').replace('<relstore>', '<relstore destination>'))
        out = self.works('--dry-run', both)
        self.assertRegex(out, r'(?m)^\d+ transactions would be copied, \d+ records of [\d.]+ kB, from ')
        self.assertEqual(self.opened().lastTransaction(), z64)
        self.works(both)
        self.assertEqual(self.root(self.opened()), self.root(self.filestorage()))
        self.assertIn('There was nothing to copy', self.works('--incremental', both))

    def test_what_was_killed_goes_on(self):
        """By kill -9, after each of the first transactions, and in the middle of the next."""
        for number in range(1, 9):
            killed = subprocess.run([sys.executable, '-c', KILLED, str(number), self.path, self.destination],
                                    env=environment(), capture_output=True, text=True, timeout=SECONDS)
            self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        self.assertIn(' are equal', self.works(self.path, self.destination, '--verify'))
        self.assertEqual(self.root(self.opened()), self.root(self.filestorage()))

    def test_a_signal_stops_after_a_transaction(self):
        copied = []

        def progress(self, what, done, total):
            copied.append(done)
            if len(copied) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        with mock.patch('relstore.cli.progress.Lines.__call__', progress):
            status, out, err = self.told(self.path, self.destination)
        self.assertEqual((status, err), (130, ''))
        self.assertIn('goes on from here', out)
        self.assertEqual(len(copied), 3)
        self.works(self.path, self.destination, '--verify')

    def interrupted(self, times, *options):
        """Copy in a process of its own, press Ctrl-C when a batch has been committed; return status, out, err."""
        process = subprocess.Popen([sys.executable, '-u', '-c', SLOW, *options, str(self.path), str(self.destination)],
                                   env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            while process.stdout.readline() not in ('committed\n', ''):
                continue
            for _ in range(times):
                os.killpg(process.pid, signal.SIGINT)       # as a terminal does: to all of them
            out, err = process.communicate()
        finally:
            watchdog.cancel()
            process.kill()
        return process.returncode, out.replace('committed\n', ''), err

    def test_ctrl_c(self):
        """Behind a whole batch."""
        goes_on = 'Stopped. The same command goes on from here'
        self.assertEqual(self.interrupted(1), (130, f'{goes_on}.\n', ''))
        storage = self.opened()
        tids = [each.tid for each in self.source().iterator()]
        self.assertIn(storage.lastTransaction(), tids[:-1])
        status, out, err = self.interrupted(1, '--clear', '--yes')
        self.assertEqual((status, out.splitlines()[-1], err), (130, f'{goes_on}, without --clear.', ''))
        self.works(self.path, self.destination, '--verify')

    def test_ctrl_c_twice(self):
        """At once."""
        status, out, err = self.interrupted(2)
        self.assertEqual((status, err), (130, ''))
        self.assertIn('goes on from here', out)
        self.works(self.path, self.destination, '--verify')
        with signals() as stopped, stopped.waiting():
            os.kill(os.getpid(), signal.SIGINT)
            self.assertTrue(stopped)
            with self.assertRaises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)

    def test_ctrl_c_elsewhere(self):
        for where, said in ((Conversion, 'comparison'), 'All is copied; --verify-only compares it.'), (
                (convert.databases.Named, 'open'), 'Nothing was copied.'):
            with self.subTest(said), mock.patch.object(*where, side_effect=lambda *args, **more: os.kill(
                    os.getpid(), signal.SIGINT)):
                status, out, err = self.told(self.path, self.destination, '--verify')
                self.assertEqual((status, out.splitlines()[-1], err), (130, f'Stopped. {said}', ''))

    def test_of_another_site(self):
        self.works(self.path, self.destination)
        os.rename(self.path, self.here / 'one.fs')
        self.change('other', 1)
        self.assertIn('holds transactions that the source does not have', self.refused(self.path, self.destination))
        self.assertIn('Emptied: ', self.works(self.path, self.destination, '--clear', '--yes'))
        self.assertEqual(self.root(self.opened()), {'other': 1})

    def test_asked_before_it_is_emptied(self):
        self.works(self.path, self.destination)
        for answer, left in ('n', False), ('', False), ('y', True):
            with mock.patch('sys.stdin', mock.Mock(isatty=lambda: True)), \
                    mock.patch('builtins.input', lambda question, answer=answer: answer):
                status, out, err = self.told(self.path, self.destination, '--clear')
            self.assertEqual((status, 'Emptied' in out), (0, True) if left else (2, False), err)

    def test_nobody_packs_meanwhile(self):
        """Also where what is copied into is a wrapper."""
        refused = []

        def advance(tid, records, size):
            if not refused:
                with self.assertRaisesRegex(StorageError, 'packed by|copied into'), closing(self.opened()) as other:
                    other.pack(time.time(), None)
                refused.append(tid)

        config = self.write('hex.conf', '%import ZODB.tests', '%import relstore', '<hexstorage>',
                            self.section(f'blob-dir {self.here}/cache'), '</hexstorage>')
        copy = Conversion.copy
        with mock.patch.object(Conversion, 'copy', lambda self, progress: copy(self, advance)):
            self.works(self.path, config)
        self.assertTrue(refused)
        self.assertIn(' are equal', self.works(self.path, config, '--verify-only'))

    def test_nothing_is_emptied_for_nothing(self):
        self.works(self.path, self.destination)
        for source, options in (f'sqlite://{self.here}/empty', ()), (self.path, ('--at', '2001-01-01')):
            relstore.RelStore(relstore.SQLite(str(self.here / 'empty'))).close()
            self.assertIn('nothing was emptied', self.refused(source, self.destination, '--clear', '--yes', *options))
        config = self.write('map.conf', '<mappingstorage>', '</mappingstorage>')
        self.refused(config, self.destination, '--clear', '--yes')
        self.assertEqual(self.root(self.opened()), self.root(self.filestorage()))

    def test_it_is_the_same(self):
        self.works(self.path, self.destination)
        self.assertIn('are one database', self.refused(self.destination, self.destination, '--clear'))
        self.assertEqual(self.root(self.opened()), self.root(self.filestorage()))


KILLED = """
import os, signal, sys
import relstore
from relstore import bulk
from relstore.cli import convert
from relstore.converting.conversion import Conversion
from relstore.copying import Unguarded, Guard

left = int(sys.argv[1])
def look(self):         # called for each record, and before each commit
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
Guard.look = look
bulk.BATCH_BYTES = 0    # each transaction is one of the database
sys.exit(convert.main(sys.argv[2:]))
"""


SLOW = """
import sys, time
from relstore import bulk
from relstore.cli import convert
from relstore.database import Database

bulk.BATCH_BYTES = 0
committed = Database.committed
def slow(*arguments):
    committed(*arguments)
    print('committed', flush=True)
    time.sleep(0.3)
Database.committed = slow
sys.exit(convert.main(sys.argv[1:]))
"""


class Refusing(Convert):
    layer = Processes

    def setUp(self):
        super().setUp()
        self.fill()
        self.copy = f'sqlite://{self.here}/db?blob-dir={self.here}/cache'

    def test_no_directory_of_blobs(self):
        self.assertIn('name a directory for them', self.refused(self.path, f'sqlite://{self.here}/db'))
        self.assertIn('is not a readable directory of blobs',
                      self.refused(f'{self.data}?blob-dir={self.here}/none', self.copy))
        self.assertFalse((self.here / 'none').exists())
        os.rename(self.blobs, self.here / 'elsewhere')
        self.assertIn('name the directory that they are in', self.refused(self.path, self.copy))
        self.works(f'{self.data}?blob-dir={self.here}/elsewhere', self.copy, '--verify')

    def test_blobs_of_the_source_stay(self):
        """A FileStorage that is made removes all that is in its directory of blobs."""
        def blobs():
            return {path: path.read_bytes() for path in self.blobs.rglob('*.blob')}

        before = blobs()
        self.assertGreater(len(before), 1)
        for copy in f'file://{self.here}/back.fs', f'sqlite://{self.here}/db?shared-blob-dir=true&blob-dir={self.blobs}':
            self.assertIn('name another blob-dir for the destination', self.refused(self.path, copy))
        self.works(self.path, self.copy)
        self.assertIn('blobs in it would be removed', self.refused(self.copy, f'file://{self.here}/back.fs'))
        self.assertEqual(blobs(), before)
        self.assertFalse((self.here / 'back.fs').exists())

    def test_the_lines_for_zope(self):
        with mock.patch.object(places, 'section', side_effect=places.section) as section:
            out = self.works(self.path, self.copy)
        self.assertIn(mock.call(self.copy, secret=True), section.mock_calls)
        config = self.write('zope.conf', '%import relstore', out.partition('%import relstore')[2])
        self.assertIn('are equal', self.works('--verify-only', self.path, config))

    def zope_conf(self, destination):
        """Return the lines that are told when it is copied there, which work."""
        out = self.works(self.path, destination)
        _, _, lines = out.partition('in place of its section <zodb_db main>:\n\n')
        self.assertIn('<zodb_db main>\n  mount-point /\n  ', lines)
        config = self.write('zope.conf', 'instancehome $INSTANCE', lines)
        self.assertIn('are equal', self.works('--verify-only', self.path, config))
        return lines

    def test_the_lines_for_zope_of_a_configuration_file(self):
        """With what its section needs of the file, and nothing else of it."""
        section = ('<RelStorage Destination>', '  keep-history false', '  # a comment',
                   f'  blob-dir {self.here}/$cache', '  <sqlite3>', '    data-dir ${where}', '  </sqlite3>',
                   '</RelStorage>')
        both = self.write('both.conf', '%import relstorage', f'%define root {self.here}', '%define where $root/other',
                          '%define cache cache', '%define cached no', '<filestorage source>', f'path {self.path}',
                          f'blob-dir {self.blobs}', '</filestorage>', *section)
        lines = self.zope_conf(f'{both}#destination')
        self.assertEqual(lines.splitlines(), [
            '%import relstore', f'%define root {self.here}', '%define where $root/other', '%define cache cache',
            '<zodb_db main>', '  mount-point /', *(f'  {line}' for line in section), '</zodb_db>'])
        self.assertEqual(self.works(both).partition('\n\n')[2], lines)
        self.assertNotIn('instancehome', lines)

    def test_the_lines_for_zope_of_a_wrapper(self):
        config = self.write('wrapped.conf', '%import ZODB.tests', '%import relstore', '<zodb main>', '  cache-size 5',
                            '  <hexstorage>', '    <relstore>', f'      blob-dir {self.here}/cache', '      <sqlite3>',
                            f'        data-dir {self.here}/hex', '      </sqlite3>', '    </relstore>',
                            '  </hexstorage>', '</zodb>')
        lines = self.zope_conf(config)
        self.assertIn('  mount-point /\n  cache-size 5\n  <hexstorage>\n    <relstore>\n', lines)

    def test_the_lines_for_zope_of_a_data_fs(self):
        new = self.here / 'new'
        new.mkdir()
        self.zope_conf(f'file://{new}/one.fs?blob-dir={new}/blobs')
        self.assertIn(f'path {new}/one.fs\n', self.zope_conf(new / 'one.fs'))

    def test_a_zope_conf_has_the_lines(self):
        lines = self.zope_conf(self.copy)
        config = self.write('zope.conf', lines, '<zodb_db temporary>', '<mappingstorage>', '</mappingstorage>',
                            '</zodb_db>')
        self.assertIn(f'A site uses it with the section main of {config}, as it is.',
                      self.works(self.path, f'{config}#main'))

    def test_passwords_are_not_told(self):
        told = self.write('db.conf', '%import relstore', '%define secret1 hunter0', '<relstore>', '<postgresql>',
                          '  dsn dbname=x password=hunter1 host=h', '</postgresql>', '<mysql>', '  passwd hunter2',
                          '  PassWD $secret1', '</mysql>', "  dsn password = 'hunter3 \\' hunter4' user=u",
                          '  dsn postgresql://zope:hunter5@@h/x?password=hunter6&sslmode=require', '</relstore>')
        named = mock.Mock()
        named.name = ''
        lines = zope_lines(str(told), named)
        self.assertEqual(re.findall(r'hunter\d|secret', lines), [])
        for left in 'dbname=x password=PASSWORD host=h', 'PASSWORD user=u', '://zope:PASSWORD@h/x', '&sslmode=require':
            self.assertIn(left, lines)

    def test_the_source_is_the_destination(self):
        link = self.here / 'link.fs'
        link.symlink_to(self.path)
        self.assertIn('are the same file', self.refused(self.path, f'file://{link}?blob-dir={self.here}/other'))

    def test_a_blob_is_missing(self):
        next(self.blobs.rglob('*.blob')).unlink()
        self.assertRegex(self.refused(self.path, self.copy), 'has no data of the blob 0x')

    def test_names(self):
        self.assertIn('No such file', self.refused(self.here / 'nothing', self.copy))
        self.assertIn('s3:// is not known', self.refused('s3://bucket', self.copy))
        self.assertIn('none has the name x', self.refused(f'{self.path}#x', self.copy))
        config = self.write('two.conf', '<zodb one>', '<mappingstorage>', '</mappingstorage>', '</zodb>',
                            '<zodb two>', '<mappingstorage>', '</mappingstorage>', '</zodb>')
        self.assertIn(f'as in {config}#one, {config}#two', self.refused(config, self.copy))
        self.assertIn('has no storage three', self.refused(f'{config}#three', self.copy))
        self.assertIn('no two storages `source` and `destination`', self.refused(config))
        self.assertIn('takes no transactions of the past', self.refused(self.path, f'{config}#one'))

    def test_a_source_that_is_not_there_is_not_made(self):
        for source in f'sqlite://{self.here}/none', f'file://{self.here}/none.fs':
            self.refused(source, self.copy)
        self.assertEqual([path.name for path in self.here.iterdir() if 'none' in path.name], [])

    def test_arguments(self):
        for arguments in ('--until-idle', '1'), ('--follow', '--dry-run'), ('--clear', '--dry-run'), ('--at', 'noon'):
            with self.subTest(arguments), self.assertRaises(SystemExit) as raised, mock.patch('sys.stderr'):
                convert.main([*arguments, str(self.path), self.copy])
            self.assertEqual(raised.exception.code, 2)

    def test_a_file_cannot_be_emptied(self):
        back = f'file://{self.here}/back.fs?blob-dir={self.here}/back.blobs'
        self.works(self.path, back)
        self.assertIn('cannot be emptied', self.refused(self.path, back, '--clear', '--yes'))

    def test_nothing_is_written_beside_the_source(self):
        def files():
            return {path: path.stat().st_mtime_ns for path in self.here.rglob('*')
                    if not path.is_relative_to(self.here / 'db') and not path.is_relative_to(self.here / 'cache')}

        before = files()
        self.works(self.path, self.copy)
        self.assertEqual({path: time for path, time in files().items() if path != self.here},
                         {path: time for path, time in before.items() if path != self.here})


cases(globals(), ThereAndBack, backends=BACKENDS)
del Convert, ThereAndBack
