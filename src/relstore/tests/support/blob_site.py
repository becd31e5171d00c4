"""A site with blobs, through a storage of whatever database a test is for."""
import io
import os
import shutil
import tempfile
import unittest
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import transaction
import ZODB
from transaction import TransactionManager
from ZODB.blob import Blob
from ZODB.utils import u64

from relstore.blobs import remover
from relstore.cli import databases
from relstore.cli.main import main
from relstore.errors import Deadlock

LARGE = os.urandom(1 << 16) * 50        # several pieces and chunks


class BlobSite(unittest.TestCase):
    """shared: whether the data is in a directory that processes share."""
    shared = False
    # Options for another place; for none; and what is said where they do not fit.
    elsewhere = {'shared_blob_dir': True}
    nowhere = {'blob_dir': None}
    mend = 'set shared-blob-dir false'

    def setUp(self):
        super().setUp()
        self.here = Path(tempfile.mkdtemp(prefix='relstore-blobs-'))
        self.addCleanup(shutil.rmtree, self.here)
        # At once, not in a thread: tests look for files as soon as a commit has ended.
        at_once = mock.patch.object(remover, 'WAITING', 0)
        at_once.start()
        self.addCleanup(at_once.stop)
        transaction.abort()
        self.addCleanup(transaction.abort)
        self.storage = self.opened()
        self.db = self.new_db(self.storage)

    def opened(self, name='main', **options):
        options = {'blob_dir': str(self.here / 'blobs'), 'shared_blob_dir': self.shared} | self.place(name) | options
        storage = self.open_storage(name, **options)
        self.addCleanup(storage.close)
        return storage

    def place(self, name):
        """Return more options for a database of this name."""
        return {}

    def lose(self, oid, tid):
        """Remove the data of a revision."""
        if self.shared:
            os.unlink(self.storage.loadBlob(oid, tid))
        else:
            self.storage.database.pool.attempt(lambda session: session.run(
                f'DELETE FROM blob_chunk WHERE zoid = {u64(oid)} AND tid = {u64(tid)}'))

    def new_db(self, storage):
        db = ZODB.DB(storage)
        self.addCleanup(db.close)
        return db

    def put(self, data, name='blob', db=None):
        """Commit a blob; return its (oid, tid)."""
        manager = TransactionManager()
        with closing((db or self.db).open(manager)) as connection:
            blob = connection.root().setdefault(name, Blob())
            with blob.open('w') as file:
                file.write(data)
            manager.commit()
            blob._p_activate()
            return blob._p_oid, blob._p_serial

    def get(self, name='blob', db=None):
        with (db or self.db).transaction() as connection, connection.root()[name].open() as file:
            return file.read()

    @contextmanager
    def deadlock(self):
        """Have the database end the first vote, and forget what was sent for it. Yield a list of the commits ended."""
        def vote(commit, ballot):
            if not ended:
                ended.append(commit)
                commit.session.rollback()
                raise Deadlock(message='of this test')
            return real(commit, ballot)

        ended: list[object] = []
        commit_type = self.storage.database.adapter.commit_type
        real = commit_type.vote
        with mock.patch.object(commit_type, 'vote', vote):
            yield ended

    def names(self):
        """Return the names of the files of blobs, wherever below blob-dir they are."""
        return sorted(path.name for path in (self.here / 'blobs').rglob('*')
                      if path.is_file() and not path.name.startswith('.'))

    def forget_files(self):
        """Have the next load ask the database."""
        if not self.shared:
            for path in (self.here / 'blobs').rglob('*.blob'):
                path.unlink()

    def blob_oid(self):
        with self.db.transaction() as connection:
            return connection.root()['blob']._p_oid

    def look(self, *options, status=0):
        """Run `relstore blobs` on this storage; return what it prints."""
        return self.command('blobs', *options, status=status)

    def command(self, name, *options, status=0):
        opened = SimpleNamespace(name='site', relstore=self.storage)
        named = SimpleNamespace(name='site', open=lambda: nullcontext(opened))
        out = io.StringIO()
        with mock.patch.object(databases, 'read', return_value=[named]), redirect_stdout(out):
            self.assertEqual(main([name, 'zope.conf', *options]), status, out.getvalue())
        return out.getvalue()
