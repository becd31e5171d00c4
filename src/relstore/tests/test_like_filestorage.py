"""With history a storage does as a FileStorage does."""
import os
import random
import tempfile
from contextlib import closing
from unittest import mock

from ZODB.FileStorage import FileStorage
from ZODB.POSException import (
    POSKeyError,
)
from ZODB.utils import maxtid, p64, u64, z64

from relstore.tests.support.backends import (
    HISTORY_PRESERVING,
    cases,
)
from relstore.tests.support.commits import perform
from relstore.tests.support.records import counter, state
from relstore.tests.support.storage_suite import FIRST_TID, Suite, closing_view, outcome


class Script:
    """A random history, the same for every storage that it is run on."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.oids = [p64(n) for n in range(8)]
        self.steps = [self.step(number) for number in range(40)]

    def step(self, number):
        """One transaction: (user, description, extension, what it does, what that is done with)."""
        chance = self.random
        what = chance.choice(['store'] * 4 + ['undo'] * 2 + ['undo many', 'delete', 'nothing'])
        if what == 'store':
            # Half of the objects are counters, which resolve conflicts.
            oids = chance.sample(self.oids, chance.randint(1, 4))
            how = [(oid, (counter if u64(oid) % 2 else state)(chance.randrange(4))) for oid in oids]
        elif what == 'undo':
            how = [chance.choice([0, 0, 0, 1, 2, 5])]
        elif what == 'undo many':
            how = sorted(chance.sample(range(5), chance.randint(2, 3)), reverse=chance.random() < 0.1)
        else:
            how = chance.choice(self.oids)
        return chance.choice(['anna', 'bo']), f'{number}: {what}', chance.choice([None, {'n': number % 3}]), what, how

    def run(self, storage):
        """Run it; return what each step led to: a tid, or the class of the exception that ended it."""
        return [outcome(self.run_step, storage, p64(FIRST_TID + 1000 * number), *step)
                for number, step in enumerate(self.steps)]

    def run_step(self, storage, tid, user, description, extension, what, how):
        def change(txn):
            if what == 'store':
                for oid, state in how:
                    storage.store(oid, self.current(storage, oid), state, '', txn)
            elif what == 'delete':
                storage.deleteObject(how, storage.load(how)[1], txn)
            elif what != 'nothing':
                log = storage.undoLog(0, 10)
                for index in how:
                    if index < len(log):
                        storage.undo(log[index]['id'], txn)
        return perform(storage, change, user=user, description=description, extension=extension, tid=tid)

    @staticmethod
    def current(storage, oid):
        """The tid of an object's newest revision, that of a deletion too."""
        try:
            return storage.history(oid, 1)[0]['tid']
        except KeyError:
            return z64


class SameAsFileStorage(Suite):
    SEEDS = range(4)

    def histories(self):
        """Yield (oracle, storage, script), for each of some random histories."""
        # Pages of a few rows: the seams between them are where such code breaks.
        for name, rows in [('history.PAGE', 3), ('iterate.TRANSACTIONS', 4), ('iterate.RECORDS', 2)]:
            patch = mock.patch(f'relstore.{name}', rows)
            patch.start()
            self.addCleanup(patch.stop)
        for seed in self.SEEDS:
            script = Script(seed)
            self.storage.zap_all()
            with tempfile.TemporaryDirectory() as directory, \
                    closing(FileStorage(os.path.join(directory, 'Data.fs'))) as oracle:
                self.assertEqual(script.run(self.storage), script.run(oracle), f'seed {seed}')
                yield oracle, self.storage, script

    def same(self, oracle, storage, method, *arguments, view=lambda answer: answer):
        """Both answer the same, or raise the same."""
        expected = outcome(getattr(oracle, method), *arguments)
        found = outcome(getattr(storage, method), *arguments)
        if not isinstance(expected, type):
            expected = view(expected)
        if not isinstance(found, type):
            found = view(found)
        self.assertEqual(found, expected, f'{method}{arguments}')

    def test_revisions(self):
        for oracle, storage, script in self.histories():
            tids = {txn.tid for txn in oracle.iterator()}
            edges = {p64(max(u64(tid) + step, 0)) for tid in tids for step in (-1, 0, 1)} | {z64, maxtid, p64(1)}
            for oid in [*script.oids, p64(99)]:
                self.same(oracle, storage, 'load', oid)
                for tid in edges:
                    self.same(oracle, storage, 'loadBefore', oid, tid)
                    self.same(oracle, storage, 'loadSerial', oid, tid)
            self.same(oracle, storage, 'lastTransaction')

    def test_revisions_through_a_view(self):
        """What a connection reads is the same, loaded from the database and from the cache."""
        for oracle, storage, script in self.histories():
            with closing_view(storage) as view:
                view.poll_invalidations()
                for _ in range(2):
                    for oid in [*script.oids, p64(99)]:
                        self.same(oracle, view, 'load', oid)

    def test_history(self):
        keys = ('tid', 'time', 'user_name', 'description', 'n')

        def view(entries):
            return [{key: entry.get(key) for key in keys} for entry in entries]

        for oracle, storage, script in self.histories():
            for oid in [*script.oids, p64(99)]:
                for size in 1, 2, 3, 7, 10_000, 2 ** 70:
                    self.same(oracle, storage, 'history', oid, size, view=view)

    def test_undo_log(self):
        keys = ('time', 'user_name', 'description', 'n')

        def view(entries):
            return [{key: entry.get(key) for key in keys} for entry in entries]

        slices = [(0, -20), (0, 1), (0, 3), (0, 4), (2, 5), (2, -5), (5, 2), (0, 0), (0, 10_000), (7, -10_000),
                  (38, 60), (10_000, -20), (0, -1)]
        filters = [None, lambda entry: entry['user_name'] == b'bo', lambda entry: entry.get('n') == 1,
                   lambda entry: False]
        for oracle, storage, _ in self.histories():
            for first, last in slices:
                for accept in filters:
                    self.same(oracle, storage, 'undoLog', first, last, accept, view=view)
                for specification in None, {}, {'user_name': b'anna'}, {'user_name': b'bo', 'n': 2}, {'n': 7}:
                    self.same(oracle, storage, 'undoInfo', first, last, specification, view=view)

    def test_iterator(self):
        def content(storage, start, stop):
            return [(txn.tid, txn.user, txn.description, txn.extension_bytes,
                     {record.oid: (record.data, record.data_txn) for record in txn})
                    for txn in storage.iterator(start, stop)]

        for oracle, storage, _ in self.histories():
            tids = [txn.tid for txn in oracle.iterator()]
            edges = [None, z64, maxtid, *tids[::6], *[p64(u64(tid) + 1) for tid in tids[::6]]]
            for start in edges:
                for stop in edges:
                    self.assertEqual(content(storage, start, stop), content(oracle, start, stop), (start, stop))

    def test_record_iternext(self):
        def walk(storage):
            oid, found = None, []
            while True:
                *record, oid = storage.record_iternext(oid)
                found.append(tuple(record))
                if oid is None:
                    return found

        for oracle, storage, _ in self.histories():
            self.assertEqual(walk(storage), list(walk_file_storage(oracle)))


def walk_file_storage(storage):
    """Its record_iternext() stops with POSKeyError at the first object whose creation was undone."""
    for n in range(8):
        try:
            state, tid = storage.load(p64(n))
        except POSKeyError:
            continue
        yield p64(n), tid, state


cases(globals(), SameAsFileStorage, backends=HISTORY_PRESERVING)
del Suite, SameAsFileStorage
