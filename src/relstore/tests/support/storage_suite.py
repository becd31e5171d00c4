"""What suites of a storage share."""
import unittest
from contextlib import contextmanager

import ZODB
from persistent.TimeStamp import TimeStamp
from ZODB.POSException import (
    POSError,
    UndoError,
)
from ZODB.utils import u64, z64

from relstore.tests.support.commits import perform

FIRST_TID = u64(TimeStamp(2020, 2, 29, 23, 59, 59.5).raw())


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.opened()

    def opened(self, name='main', **options):
        """Open a storage that is closed after the test."""
        storage = self.open_storage(name, **options)
        self.addCleanup(storage.close)
        return storage

    def commit(self, *changes, storage=None, user='anna', description='', extension=None, tid=None):
        """Run changes(transaction) in one transaction; return its tid."""
        return perform(self.storage if storage is None else storage, *changes, user=user, description=description,
                       extension=extension, tid=tid)

    def store(self, oid, state, base=z64, **options):
        """Commit one state; return its tid."""
        storage = options.get('storage', self.storage)
        return self.commit(lambda txn: storage.store(oid, base, state, '', txn), **options)

    def database(self, storage=None, **options):
        db = ZODB.DB(self.storage if storage is None else storage, **options)
        self.addCleanup(db.close)
        return db


def outcome(work, *arguments):
    """Return what work(*arguments) returns, or the class of the exception that it raises."""
    try:
        return work(*arguments)
    except UndoError:       # FileStorage has a class of its own for several
        return UndoError
    except (POSError, ValueError) as e:
        return type(e)


@contextmanager
def closing_view(storage):
    view = storage.new_instance()
    try:
        yield view
    finally:
        view.release()
