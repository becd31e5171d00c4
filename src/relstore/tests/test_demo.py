"""`relstore demo` as its user runs it, and what each of its comparisons finds."""

import contextlib
import io
import os
import shutil
import sqlite3
import sys
import tempfile
import types
import unittest
from unittest import mock

import ZODB.config
from persistent import Persistent
from ZODB.blob import Blob
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.utils import p64

from relstore import RelStore
from relstore.cli import demo
from relstore.cli.main import main
from relstore.cli.sample import write_sample
from relstore.converting.filestorage import LiveFileStorage
from relstore.errors import ConfigurationError
from relstore.tests.support.layers import Processes
from relstore.tests.support.plone import unpacked_site


class DemoTestCase(unittest.TestCase):
    """`self.site` is a directory for the FileStorage `self.path`; `self.into` does not exist yet."""
    layer = Processes

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.site = os.path.join(directory.name, 'site')
        os.mkdir(self.site)
        self.path = os.path.join(self.site, 'Data.fs')
        self.into = os.path.join(directory.name, 'into')

    def relstore(self, *argv):
        """Run a command; return its exit status and what it wrote to stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
        return status, out.getvalue(), err.getvalue()

    def demo(self, *argv):
        return self.relstore('demo', '--data', self.path, '--into', self.into, *argv)

    def assertWorks(self, *argv):
        status, out, err = self.demo(*argv)
        self.assertEqual((status, err), (0, ''))
        return out

    def contents(self, directory):
        """Return every file below a directory with its bytes."""
        files = {}
        for parent, _, names in os.walk(directory):
            for name in names:
                path = os.path.join(parent, name)
                with open(path, 'rb') as file:
                    files[path] = file.read()
        return files


class DemoTests(DemoTestCase):
    def test_copies_compares_commits_and_undoes(self):
        write_sample(self.path, transactions=20)
        out = self.assertWorks()
        self.assertIn('23 transactions equal, byte for byte', out)
        self.assertIn('Add relstore_demo to the root', out)
        self.assertIn('the root is as before', out)
        self.assertIn('%import relstore', out)
        self.assertIn(f'data-dir {self.into}\n', out)
        self.assertTrue(out.isascii(), out)
        self.assertNotIn('\x1b', out)
        self.assertNotIn('blob', out.partition('A Zope uses it')[0])

        with contextlib.closing(demo.open_site(self.into)) as storage:
            descriptions = [txn.description for txn in storage.iterator()][-2:]
        self.assertEqual(
            descriptions, [b'Add relstore_demo to the root', b'Undo: add relstore_demo to the root']
        )

    def test_configuration_it_prints_opens_the_database(self):
        write_sample(self.path, transactions=3)
        lines = self.assertWorks().partition('%import')
        section = ''.join(lines[1:]).replace('zodb_db main', 'zodb main').replace('zodb_db', 'zodb')
        db = ZODB.config.databaseFromString(section.replace('  mount-point /\n', ''))
        with contextlib.closing(db), db.transaction() as connection:
            self.assertEqual(list(connection.root()), ['site'])

    def test_writes_its_own_sample(self):
        status, out, err = self.relstore('demo', '--into', self.into)
        self.assertEqual((status, err), (0, ''))
        self.assertIn('403 transactions equal, byte for byte', out)

    def test_makes_its_own_directory(self):
        write_sample(self.path, transactions=1)
        with mock.patch.object(tempfile, 'tempdir', os.path.dirname(self.site)):
            status, out, _ = self.relstore('demo', '--data', self.path)
        self.assertEqual(status, 0)
        self.assertIn(os.path.join(os.path.dirname(self.site), 'relstore-demo-'), out)

    def test_source_and_its_directory_stay_as_they_are(self):
        write_sample(self.path, transactions=3)
        for with_index in True, False:
            with self.subTest(with_index=with_index):
                if not with_index:
                    for suffix in '.index', '.lock', '.tmp':
                        os.remove(self.path + suffix)
                before = self.contents(self.site)
                self.assertWorks()
                self.assertEqual(self.contents(self.site), before)
                shutil.rmtree(self.into)

    def test_blobs(self):
        for name in 'blobstorage', 'elsewhere':
            with self.subTest(name):
                self.copies_blobs(os.path.join(self.site, name), *(() if name == 'blobstorage' else ('--blobs',)))
                shutil.rmtree(self.into)
                shutil.rmtree(self.site)
                os.mkdir(self.site)

    def copies_blobs(self, blobs, *option):
        with contextlib.closing(DB(FileStorage(self.path, blob_dir=blobs))) as db:
            for data in b'first', b'second':
                with db.transaction() as connection:
                    connection.root()[data] = Blob(data)
        before = self.contents(self.site)
        self.assertIn(' and 2 blobs equal', self.assertWorks(*option, *([blobs] if option else [])))
        self.assertEqual(self.contents(self.site), before)
        with contextlib.closing(DB(demo.open_site(self.into))) as db, db.transaction() as connection:
            self.assertEqual(connection.root()[b'second'].open().read(), b'second')

    def test_a_blob_that_differs(self):
        blobs = os.path.join(self.site, 'blobstorage')
        with contextlib.closing(DB(FileStorage(self.path, blob_dir=blobs))) as db, db.transaction() as connection:
            connection.root()['blob'] = Blob(b'data')
        copied = RelStore.copyTransactionsFrom

        def damaged(storage, other, progress=None):
            copied(storage, other, progress)
            for change in "UPDATE blob_chunk SET chunk = x'00'", 'DELETE FROM relstore_blob':
                storage.database.pool.attempt(lambda session, change=change: session.run(change))
        with mock.patch.object(RelStore, 'copyTransactionsFrom', damaged):
            status, _, err = self.demo()
        self.assertEqual(status, 1)
        self.assertIn('has other data in the copy', err)

    def test_classes_need_not_be_there(self):
        module = types.ModuleType('relstore_demo_test_classes')
        module.Folder = type('Folder', (Persistent,), {'__module__': module.__name__})
        with (
            mock.patch.dict(sys.modules, {module.__name__: module}),
            contextlib.closing(DB(FileStorage(self.path))) as db,
            db.transaction() as connection,
        ):
            connection.root()['Application'] = folder = module.Folder()
            folder.child = module.Folder()
        self.assertWorks()

    def test_key_may_be_there_already(self):
        with contextlib.closing(DB(FileStorage(self.path))) as db, db.transaction() as connection:
            connection.root()[demo.KEY] = 'mine'
        self.assertIn('the root is as before', self.assertWorks())

    def test_real_site(self):
        self.path = unpacked_site(self)
        out = self.assertWorks()
        self.assertIn('336 transactions and 17 blobs equal, byte for byte', out)


class RefusalTests(DemoTestCase):
    """What the user can put right is one sentence, and nothing of his is touched."""

    def assertRefuses(self, *words):
        status, _, err = self.demo()
        self.assertEqual(status, 2, err)
        [sentence] = [line for line in err.splitlines() if line.startswith('relstore: ')]
        self.assertNotIn('Traceback', err)
        for word in words:
            self.assertIn(word, sentence)

    def test_no_such_file(self):
        self.assertRefuses(self.path, 'No such file')
        self.assertEqual(os.listdir(self.site), [])
        self.assertFalse(os.path.exists(self.into))

    def test_directory(self):
        os.mkdir(self.path)
        self.assertRefuses(self.path, 'directory')

    def test_no_filestorage(self):
        with open(self.path, 'wb') as file:
            file.write(b'PK\x03\x04 is no FileStorage')
        self.assertRefuses(self.path, 'cannot be read as a FileStorage')
        self.assertEqual(os.listdir(self.site), ['Data.fs'])

    def test_empty_filestorage(self):
        FileStorage(self.path).close()
        self.assertRefuses(self.path, 'is empty: nothing was ever stored in it')

    def test_damaged_filestorage(self):
        write_sample(self.path, transactions=20)
        os.remove(self.path + '.index')
        with open(self.path, 'r+b') as file:
            file.seek(os.path.getsize(self.path) // 2)
            file.write(b'\xff' * 1000)
        self.assertRefuses(self.path, 'cannot be read as a FileStorage')

    def test_target_with_a_database(self):
        write_sample(self.path, transactions=1)
        self.assertWorks()
        before = self.contents(self.into)
        self.assertRefuses(self.into, 'not empty')
        self.assertEqual(self.contents(self.into), before)

    def test_target_that_cannot_be_made(self):
        write_sample(self.path, transactions=1)
        self.into = os.path.join(self.path, 'into')
        self.assertRefuses(self.path, 'Not a directory')

    def test_without_rich(self):
        write_sample(self.path, transactions=1)
        with mock.patch.dict(sys.modules, {'rich': None}):
            sys.modules.pop('relstore.cli.report', None)
            self.assertRefuses('rich', "pip install 'relstore[demo]'")

    def test_traceback(self):
        self.assertRaises(FileNotFoundError, self.demo, '--traceback')
        FileStorage(self.path).close()
        self.assertRaises(ConfigurationError, self.demo, '--traceback')


class DifferenceTests(DemoTestCase):
    """Each kind of difference between two storages is found and named."""

    def setUp(self):
        super().setUp()
        write_sample(self.path, transactions=5)
        self.source = LiveFileStorage(self.path)
        self.addCleanup(self.source.close)

    def altered(self, old, new):
        """Return a copy of the source with one string of bytes replaced where it stands last."""
        path = os.path.join(self.site, 'altered.fs')
        with open(self.path, 'rb') as file:
            before, found, after = file.read().rpartition(old)
        self.assertEqual((found, len(old)), (old, len(new)))
        with open(path, 'wb') as file:
            file.write(before + new + after)
        copy = FileStorage(path, read_only=True)
        self.addCleanup(copy.close)
        return copy

    def longer(self):
        """Return the source with one more transaction, written since the source was opened."""
        with contextlib.closing(DB(FileStorage(self.path))) as db, db.transaction() as connection:
            connection.root()['more'] = 1
        storage = LiveFileStorage(self.path)
        self.addCleanup(storage.close)
        return storage

    def assertDiffers(self, words, source, storage):
        with self.assertRaisesRegex(demo.Difference, words):
            demo.compare_history(source, storage, lambda count: None)

    def test_equal(self):
        counts = []
        demo.compare_history(self.source, self.source, counts.append)
        self.assertEqual(len(counts), 9)

    def test_description(self):
        copy = self.altered(b'Undo the change before', b'Undo the change behind')
        self.assertDiffers('its description is .*behind.*, and was .*before', self.source, copy)

    def test_user(self):
        self.assertDiffers('its user is ', self.source, self.altered(b'/site/users ', b'/site/losers '[:12]))

    def test_extension(self):
        self.assertDiffers('its extension_bytes is ', self.source, self.altered(b'/site/undo', b'/site/redo'))

    def test_state(self):
        copy = self.altered(b'A site with a mistake', b'A site without a mist')
        self.assertDiffers('^Transaction 0x[0-9a-f]+: object 0x01 has other bytes', self.source, copy)
        oids = {record.oid for txn in self.source.iterator() for record in txn}
        with self.assertRaisesRegex(demo.Difference, '^object 0x'):
            demo.compare_objects(self.source, self.altered(b'editions', b'Editions'), oids, lambda: None)

    def test_transaction(self):
        longer = self.longer()
        self.assertDiffers('was not copied', longer, self.source)
        self.assertDiffers('is not in the source', self.source, longer)

    def test_site_may_go_on_writing(self):
        before = demo.survey(self.source, lambda: None)
        self.longer()
        self.assertEqual(demo.survey(self.source, lambda: None), before)

    def test_in_the_database(self):
        """One byte more in one row of the copy."""
        self.demo()
        with (
            contextlib.closing(sqlite3.connect(os.path.join(self.into, 'main.sqlite3'))) as connection,
            connection,
        ):
            connection.execute("UPDATE object_state SET state = CAST(state || x'00' AS BLOB) WHERE zoid = 1")
        with contextlib.closing(demo.open_site(self.into)) as storage:
            with self.assertRaisesRegex(demo.Difference, '^Transaction .*: object 0x01 has other bytes'):
                demo.compare_history(self.source, storage, lambda count: None)
            with self.assertRaisesRegex(demo.Difference, '^object 0x01: '):
                demo.compare_objects(self.source, storage, {p64(1)}, lambda: None)

    def test_exit_status(self):
        with mock.patch.object(demo, 'compare_objects', side_effect=demo.Difference('object 0x07: lost.')):
            status, _, err = self.demo()
        self.assertEqual((status, err), (1, 'relstore: the copy differs: object 0x07: lost.\n'))


class SampleTests(DemoTestCase):
    def test_same_every_time(self):
        sites = []
        for name in 'first', 'second':
            path = os.path.join(self.site, name)
            write_sample(path, transactions=10)
            with contextlib.closing(LiveFileStorage(path)) as source:
                sites.append([(txn.user, txn.description, len(list(txn))) for txn in source.iterator()])
        self.assertEqual(*sites)
        self.assertIn(b'Undo the change before', [description for _, description, _ in sites[0]])

    def test_classes_are_everywhere(self):
        write_sample(self.path, transactions=3)
        with contextlib.closing(DB(FileStorage(self.path))) as db, db.transaction() as connection:
            site = connection.root()['site']
            self.assertEqual(site['title'], 'A site')
            self.assertEqual(site['size'](), len(site['documents']))
