"""Blobs in an object storage: what suites need to have them there."""
import itertools
import os
from unittest import mock

from ZODB.utils import u64

from relstore.tests.support.servers.s3 import CREDENTIALS, shared_s3

_numbers = itertools.count()


class ObjectStorage:
    """A bucket that no other test uses, with a prefix for each database. `grace`: in seconds."""
    grace = 0

    def setUp(self):
        environment = mock.patch.dict(os.environ, CREDENTIALS)
        environment.start()
        self.addCleanup(environment.stop)
        self.s3 = shared_s3(self)
        self.new_bucket()
        super().setUp()

    def new_bucket(self):
        self.bucket = f'blobs-{os.getpid()}-{next(_numbers)}'
        self.s3.create_bucket(self.bucket)

    def url(self, name='main', port=None):
        return f's3://{self.bucket}/{name}?endpoint=http://127.0.0.1:{port or self.s3.port}'

    def place(self, name):
        return {'blob_store': self.url(name), 'blob_store_grace': self.grace}

    def objects(self, name='main'):
        """Return the keys of the objects of a database."""
        found = self.s3.client().list_objects_v2(Bucket=self.bucket, Prefix=f'{name}/').get('Contents', [])
        return sorted(key for entry in found if '/.' not in (key := entry['Key']))


class StoredBlobs(ObjectStorage):
    """For a BlobSite."""
    elsewhere = {'blob_store': None}
    nowhere = {'blob_dir': None, 'blob_store': None}
    mend = 'name it with blob-store'
    files_at_the_end = 1

    def lose(self, oid, tid):
        """The object goes, and its row, as by a mistake."""
        def forget(session):
            [digest] = session.one(f'SELECT digest FROM relstore_blob WHERE zoid = {u64(oid)} AND tid = {u64(tid)}')
            sign = '?' if self.storage.database.adapter.name == 'sqlite' else '%s'
            session.run(f'DELETE FROM relstore_digest WHERE digest = {sign}', (digest,))
        self.storage.database.pool.attempt(forget)
