"""How many functions of relstore's own are called for what a site does most, on SQLite, where they count most.

The bounds are what was reached. A call more has to be worth it.
"""
import sys
import unittest
from contextlib import closing
from pathlib import Path

import transaction
from persistent.mapping import PersistentMapping
from ZODB.DB import DB

import relstore
from relstore.tests.support.backends import SQLiteHistoryPreserving, cases

OURS = str(Path(relstore.__file__).parent)
TESTS = str(Path(__file__).parent)
HIT, MISS, COMMIT = 2, 12, 75


def calls(work):
    """Return the names of the functions that work() calls."""
    called = []

    def count(frame, event, _):
        path = frame.f_code.co_filename
        if event == 'call' and path.startswith(OURS) and not path.startswith(TESTS):
            called.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


class Calls(unittest.TestCase):

    def setUp(self):
        super().setUp()
        with closing(DB(self.open_storage())) as db, db.transaction() as connection:
            for number in range(100):
                connection.root()[number] = PersistentMapping(number=number)
            connection.savepoint()
            self.oids = [connection.root()[number]._p_oid for number in range(100)]

    def test_a_load(self):
        with closing(self.open_storage()) as storage:
            view = storage.new_instance()
            view.poll_invalidations()
            for number in 1, 50:        # no two beside each other, which might be read ahead
                view.load(self.oids[number])
            for most in MISS, HIT:
                called = calls(lambda: view.load(self.oids[90]))
                self.assertLessEqual(len(called), most, called)
                self.assertEqual(called[0], 'load')
            view.release()

    def test_a_commit(self):
        """Of one object, from tpc_begin to the end of tpc_finish."""
        with closing(DB(self.open_storage())) as db:
            manager = transaction.TransactionManager()
            root = db.open(manager).root()

            def commit():
                root[5]['number'] += 1
                manager.commit()

            for _ in range(5):
                commit()
            called = calls(commit)
            first = called.index('tpc_begin')
            after = called.index('afterCompletion', first)
            self.assertEqual(called[first:after].count('tpc_finish'), 1)
            self.assertLessEqual(after - first, COMMIT, called[first:after])


cases(globals(), Calls, backends=(SQLiteHistoryPreserving,))
del Calls
