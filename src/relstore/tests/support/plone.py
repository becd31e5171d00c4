"""The real site that tests read: Data.fs.xz and blobstorage.tar.xz in the directory $RELSTORE_TEST_DATA."""

import lzma
import os
import pathlib
import shutil
import tarfile
import tempfile
import unittest

PROJECT = pathlib.Path(__file__).resolve().parents[4]


def unpacked_site(test: unittest.TestCase) -> str:
    """Return the path of the site's Data.fs, with its blobstorage beside it; they are removed after the test.

    Skips the test where the site is absent: it is not part of the project.
    """
    target = tempfile.TemporaryDirectory()
    test.addCleanup(target.cleanup)
    try:
        return unpack(target.name)
    except FileNotFoundError as e:
        test.skipTest(str(e))


def unpack(target: str) -> str:
    """Unpack the site into a directory; return the path of its Data.fs. FileNotFoundError: it is not there."""
    directory = pathlib.Path(os.environ.get('RELSTORE_TEST_DATA', PROJECT / '../shared/data/plone'))
    packed = directory / 'Data.fs.xz'
    if not packed.exists():
        raise FileNotFoundError(f'{packed} is missing: set RELSTORE_TEST_DATA to its directory')
    path = os.path.join(target, 'Data.fs')
    with lzma.open(packed) as source, open(path, 'wb') as file:
        shutil.copyfileobj(source, file)
    with tarfile.open(directory / 'blobstorage.tar.xz') as blobs:
        blobs.extractall(target, filter='data')
    return path
