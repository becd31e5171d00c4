"""What suites of blobs share, on any database."""
import os
import random
import tempfile
from pathlib import Path
from unittest import TestCase

from ZODB.utils import u64

from relstore.tests.support.backends import PostgreSQLBackend
from relstore.tests.support.blob_commits import blob, commit_blobs

MB = 1 << 20


class BlobSuite(TestCase):

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.storage = self.opened()
        self.random = random.Random(1)

    def opened(self):
        storage = self.open_storage()
        self.addCleanup(storage.close)
        return storage

    def new_oid(self) -> int:
        return u64(self.storage.new_oid())

    def file(self, data: bytes) -> str:
        """Return the path of a new file."""
        handle, path = tempfile.mkstemp(dir=self.directory)
        with os.fdopen(handle, 'wb') as file:
            file.write(data)
        return path

    def data(self, size: int) -> bytes:
        return self.random.randbytes(size)

    def store(self, data: bytes, oid: int | None = None, base: int = 0, **more) -> tuple[int, int]:
        """Commit one blob; return its oid and tid."""
        oid = oid or self.new_oid()
        return oid, commit_blobs(self.storage, {oid: self.file(data)}, bases={oid: base}, **more)

    def size(self, oid: int, tid: int) -> int | None:
        return self.storage.database.pool.attempt(self.storage.database.adapter.chunks.size, oid, tid)

    def rows(self, oid: int) -> int:
        return self.storage.database.pool.attempt(
            lambda session: session.all(f'SELECT count(*) FROM blob_chunk WHERE zoid = {oid}'))[0][0]

    def orphans(self) -> int:
        """Return how many large objects are nobody's, where blobs are in such."""
        if not isinstance(self, PostgreSQLBackend):
            return 0
        return self.storage.database.pool.attempt(lambda session: session.all(
            'SELECT count(*) FROM pg_largeobject_metadata WHERE oid NOT IN (SELECT chunk FROM blob_chunk)'))[0][0]

    def assertBlob(self, oid: int, tid: int, data: bytes) -> None:
        found = blob(self.storage, oid, tid)
        self.assertEqual((found and len(found)), data and len(data))
        self.assertTrue(found == data)
        self.assertEqual(self.size(oid, tid), len(data))
