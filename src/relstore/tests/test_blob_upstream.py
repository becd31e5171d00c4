"""ZODB's own tests of blobs, unmodified, wherever the blobs are."""
import doctest
import os
import shutil
import stat
import unittest
from pathlib import Path

from ZODB.tests.testblob import storage_reusable_suite

from relstore.tests.support.backends import EITHER_MODE, OTHER_MODE, SQLiteBackend, cases
from relstore.tests.support.stored_blobs import ObjectStorage


def polite_open(path, mode='r', **options):
    """As open(). Root may write to any file; this asks the file's mode, as it would be for others."""
    if 'w' in mode and os.path.exists(path) and not os.stat(path).st_mode & stat.S_IWUSR:
        raise PermissionError(path)
    return open(path, mode, **options)


class Suite(unittest.TestCase):
    shared = False

    def test_reusable_suite(self):
        for test in self.each(storage_reusable_suite(
                'Relstore', self.opened, test_blob_storage_recovery=True, test_packing=self.shared,
                test_undo=self.keep_history)):
            with self.subTest(test.id()):
                self.forget()
                result = unittest.TestResult()
                if isinstance(test, doctest.DocTestCase):
                    test._dt_test.globs['open'] = polite_open
                test.run(result)
                self.assertEqual(result.skipped, [])
                for _, failure in result.errors + result.failures:
                    self.fail(failure)

    def each(self, suite):
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                yield from self.each(test)
            else:
                yield test

    def opened(self, name, blob_dir, **options):
        name = name.replace('.', '_')
        return self.open_storage(name, blob_dir=blob_dir, shared_blob_dir=self.shared, **self.place(name), **options)

    def place(self, name):
        return {}

    def forget(self):
        """Each of these tests has databases of its own."""
        if isinstance(self, SQLiteBackend):
            for directory in Path(self._directory).iterdir():
                shutil.rmtree(directory)
        else:
            self._emptied.clear()


class InDatabase(Suite):
    """In blob_chunk. ZODB's test of packs looks for the files that are gone, and a cache may keep them.

    One of these tests loads a blob that it has just stored, after it has closed the storage.
    """

    def opened(self, name, blob_dir):
        return super().opened(name, blob_dir, blob_cache_fill_on_commit=True)


class InDirectory(Suite):
    """In a directory that processes share."""
    shared = True


class InStore(ObjectStorage, InDatabase):
    """In an object storage, with a cache as well."""

    def forget(self):
        super().forget()
        self.new_bucket()


cases(globals(), InDatabase)
cases(globals(), InDirectory, InStore, backends=EITHER_MODE, thorough=OTHER_MODE)
del Suite, InDatabase, InDirectory, InStore
