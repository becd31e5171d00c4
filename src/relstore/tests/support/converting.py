"""For tests of zodbconvert: a site in a Data.fs, with its blobs, and what differs between it and a copy."""
import os
from contextlib import closing

import transaction
from persistent.mapping import PersistentMapping
from ZODB.blob import Blob
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage

from relstore.cli import convert
from relstore.converting.compare import Comparison
from relstore.converting.filestorage import LiveFileStorage
from relstore.tests.support.commands import Commands


class Convert(Commands):
    """A site in a Data.fs, with its blobs: `self.data`, as a URL."""
    tested = convert.main,

    def setUp(self):
        super().setUp()
        transaction.abort()
        self.addCleanup(transaction.abort)
        self.path, self.blobs = self.here / 'Data.fs', self.here / 'blobstorage'
        self.data = f'file://{self.path}'

    def change(self, name, value, storage=None, user=''):
        """Commit a change of the root; a Blob for bytes."""
        storage = self.filestorage() if storage is None else storage
        with closing(DB(storage)) as db, db.transaction(f'change {name} \xe4') as connection:
            connection.transaction_manager.get().setUser(user or 'me \xfc', '')
            connection.transaction_manager.get().setExtendedInfo('extended', name)
            root = connection.root()
            if isinstance(value, bytes):
                value, data = Blob(), value
                with value.open('w') as file:
                    file.write(data)
            root[name] = value

    def fill(self):
        """Have it all: objects that are changed, undone, gone and garbage, and blobs."""
        for number in range(5):
            self.change('number', number)
        self.change('blob', b'small')
        self.change('blob', os.urandom(300_000))
        self.change('folder', PersistentMapping({n: PersistentMapping(n=n) for n in range(20)}))
        self.change('gone', PersistentMapping(text='x'))
        with closing(DB(self.filestorage())) as db:
            manager = transaction.TransactionManager()
            db.undo(db.undoInfo(0, 1)[0]['id'], manager.begin())        # its object ends
            manager.commit()
        self.change('number', 'last')

    def source(self):
        storage = LiveFileStorage(str(self.path), str(self.blobs))
        self.addCleanup(storage.close)
        return storage

    def differences(self, copy, blobs=None):
        """Return what differs between the site and a FileStorage or another storage."""
        if not hasattr(copy, 'load'):
            copy = LiveFileStorage(str(copy), str(blobs or ''))
            self.addCleanup(copy.close)
        return list(Comparison(self.source(), copy).differences())

    def refused(self, *argv):
        status, _, err = self.told(*argv)
        self.assertEqual(status, 2, err)
        [line] = err.splitlines()
        return line

    def root(self, storage):
        """Return what the root has, with the data of blobs."""
        with closing(DB(storage)) as db, db.transaction() as connection:
            return {name: value.open().read() if isinstance(value, Blob) else
                    str({key: getattr(item, 'data', item) for key, item in value.items()})
                    if isinstance(value, PersistentMapping) else value
                    for name, value in connection.root().items()}

    def filestorage(self, name='Data'):
        return FileStorage(str(self.here / f'{name}.fs'), blob_dir=str(
            self.blobs if name == 'Data' else self.here / f'{name}.blobs'))
