"""No step of a pack keeps a commit waiting: each step is held open while each kind of commit goes through beside it.

All in one thread: whoever had to wait would wait in vain, and get a LockTimeout. SQLite is not here: it has one lock
for all who write, which a step takes like a commit.
"""
import time
from contextlib import closing, contextmanager
from itertools import count
from unittest import TestCase, mock

from ZODB.POSException import StorageError
from ZODB.utils import p64, u64, z64

import relstore.adapters.mysql
import relstore.adapters.postgresql
from relstore.adapters.base import MAX_TID
from relstore.errors import LockTimeout
from relstore.marks import last_marked
from relstore.packing.garbage import LATER, OBJECT, OLDER, GarbageList
from relstore.packing.packs import Packs
from relstore.tests.support.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state

FIRST, COUNT = 100_000, 240

# RelStorage's tables have them, ours have not.
FOREIGN_KEYS = """
ALTER TABLE object_state ADD FOREIGN KEY (tid) REFERENCES "transaction";
ALTER TABLE object_state ADD FOREIGN KEY (prev_tid) REFERENCES "transaction";
ALTER TABLE current_object ADD FOREIGN KEY (zoid, tid) REFERENCES object_state (zoid, tid);
CREATE INDEX prev_tid ON object_state (prev_tid)
"""


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self.storage = self.opened()
        self.does = self.storage.database.adapter
        self.beside = self.opened(commit_lock_timeout=1)
        for module in relstore.adapters.commits.mysql, relstore.adapters.commits.postgresql:
            patch = mock.patch.object(module, 'FINISH_TIMEOUT_SECONDS', 1)
            patch.start()
            self.addCleanup(patch.stop)
        self.session = self.does.connect()
        self.addCleanup(self.session.close)
        self.odd = count(1, 2)      # oids between those that there are
        self._prepare()

    def opened(self, **options):
        storage = self.open_storage(**options)
        self.addCleanup(storage.close)
        return storage

    def _prepare(self):
        """Have every second object changed twice; every third of all is to go, and of the others what is older."""
        oids = [p64(FIRST + 2 * n) for n in range(COUNT)]
        tid = commit(self.storage, *((oid, z64, state(0)) for oid in oids))
        self.tids = dict.fromkeys(oids, tid)
        for _ in range(2):
            for start in range(0, COUNT, 40):
                some = oids[start:start + 40:2]
                tid = commit(self.storage, *((oid, self.tids[oid], state(1)) for oid in some))
                self.tids.update(dict.fromkeys(some, tid))
        self.pack_tid = u64(tid)
        # What came later is neither removed nor looked at.
        self.late = [p64(FIRST + 2 * COUNT + n) for n in range(40)]
        tid = commit(self.storage, *((oid, z64, state(0)) for oid in self.late))
        self.undoable = commit(self.storage, *((oid, tid, state(1)) for oid in self.late))
        self.tids.update(dict.fromkeys(self.late, self.undoable))
        adapter, session = self.does, self.session
        self.packs = Packs(adapter, session)
        pack_id = self.packs.new(self.pack_tid, u64(self.undoable), True, 'x')
        self.list = GarbageList(adapter, session, pack_id)
        kept = OLDER if self.keep_history else LATER
        self.doomed = oids[::3]
        self.kept = [oid for oid in oids if oid not in self.doomed]
        self.list.add([
            (u64(oid), u64(self.tids[oid]), 1, kept if n % 3 else OBJECT) for n, oid in enumerate(oids)])
        self.packs.end_marking(pack_id, 'x', len(self.doomed))
        self.pack = self.packs.last()
        self.rows = [(u64(oid), u64(tid), b'') for oid, tid in self.tids.items()]

    def _sweep(self):
        self.does.lock_votes(self.session, 1)
        self.packs.start_sweep(self.pack)
        self.session.run('COMMIT')

    @contextmanager
    def _held(self, act, *arguments):
        """Do something, and leave its transaction open."""
        name, text = act.__name__, getattr(self.does.sql, act.__name__, '')
        if text.endswith(';\nCOMMIT'):
            patch = mock.patch.object(self.does.sql, name, text.changed(';\nCOMMIT', ''))
        else:
            self.session.run('BEGIN')
            patch = mock.patch.object(self.does, '_', create=True)       # nothing
        try:
            with patch:
                yield act(*arguments)
        finally:
            self.session.rollback()

    def _changed(self, oids, value=2):
        """Change objects, beside the step."""
        tid = commit(self.beside, *((oid, self.tids[oid], state(value)) for oid in oids))
        self.tids.update(dict.fromkeys(oids, tid))

    def _commit_all_kinds(self):
        beside, last, odd = self.beside, FIRST + 2 * COUNT, next(self.odd)
        with self.subTest('changes'):
            self._changed(self.kept[:3])
            self._changed(self.kept[::2])
            self._changed(self.late)
        with self.subTest('changes what is read'):
            reads = self.kept[1:20:2]
            commit(beside, (self.kept[0], self.tids[self.kept[0]], state(3)), work=lambda txn: [
                beside.checkCurrentSerialInTransaction(oid, self.tids[oid], txn) for oid in reads])
            self.tids[self.kept[0]] = beside.getTid(self.kept[0])
        with self.subTest('creates'):
            commit(beside, *((beside.new_oid(), z64, state(0)) for _ in range(20)))
        with self.subTest('creates between others'):
            commit(beside, *((p64(FIRST + n), z64, state(0)) for n in range(odd, 2 * COUNT, 20)))
            commit(beside, (p64(FIRST - odd), z64, state(0)), (p64(last + 40 + odd), z64, state(0)))
        with self.subTest('restores'):
            tid = p64(u64(beside.lastTransaction()) + 1000)
            oids = [self.kept[5], p64(2 * FIRST + odd)]
            commit(beside, tid=tid, work=lambda txn: [
                beside.restore(oid, tid, state(4), '', None, txn) for oid in oids])
            self.tids[oids[0]] = tid
        with self.subTest('is large'), mock.patch.object(beside.database.adapter, 'message_size', 500):
            self._changed(self.kept)
        with self.subTest('is alone'), mock.patch.object(beside.database.adapter, 'most_locks', 0):
            self._changed(self.kept)
        with self.subTest('deletes'):
            oid = self.late.pop()
            commit(beside, work=lambda txn: beside.deleteObject(oid, self.tids[oid], txn))
        if self.keep_history:
            with self.subTest('undoes'):
                tid = beside.lastTransaction()
                commit(beside, work=lambda txn: beside.undo(tid, txn))
        with self.subTest('opens'):
            self.open_storage(commit_lock_timeout=1).close()

    def test_this_test_notices_who_waits(self):
        def lock(session):
            table = 'current_object' if self.keep_history else 'object_state'
            session.run(f'UPDATE {table} SET tid = tid WHERE zoid = {u64(self.kept[0])}')

        with self._held(lock, self.session), self.assertRaises((LockTimeout, StorageError)):
            self._changed(self.kept[:3])

    def test_while_a_list_is_written(self):
        pack_id = self.pack.pack_id
        rows = [(oid, tid, 1, 2) for oid, tid, _ in self.rows]
        for act, *arguments in (
                (GarbageList(self.does, self.session, pack_id + 1).add, rows),
                (self.does.save_references, self.session, self.rows),
                (self.packs.end_marking, pack_id, 'y', 1), (last_marked, self.does, self.session)):
            with self.subTest(act.__name__), self._held(act, *arguments):
                self._commit_all_kinds()

    def test_while_all_revisions_are_read(self):
        with closing(self.does.connect()) as session:
            self.does.begin_snapshot(session)
            pages = self.does.revisions(session, True)
            next(pages)
            self._commit_all_kinds()
            session.rollback()

    def test_while_a_batch_is_removed(self):
        self._sweep()
        batch = self.pack.pack_id, 0, FIRST + 2 * COUNT
        with self._held(self.does.sweep, self.session, *batch) as (states, *_):
            self.assertGreaterEqual(states, len(self.doomed))
            self._commit_all_kinds()

    def test_while_objects_are_taken_off_the_list(self):
        self._sweep()
        for act, more in (self.list.spare, list(map(u64, self.doomed))), (self.list._forget, self.pack.pack_id):
            with self.subTest(act.__name__), self._held(act, more):
                self._commit_all_kinds()

    def test_while_transactions_are_forgotten(self):
        if not self.keep_history:
            self.skipTest('needs history')
        self._sweep()
        batch = self.pack.pack_id, 0, FIRST + 2 * COUNT
        self.does.sweep(self.session, *batch)
        [[count]] = self.session.all(self.does.sql.has_foreign_key)
        for named in {count > 0, True}:
            for upto in self.pack_tid, MAX_TID:
                with (self.subTest(named=named, upto=upto),
                      self._held(self.does.forget_transactions, self.session, 0, upto, named)):
                    self._commit_all_kinds()


class WithForeignKeys(Suite):

    def setUp(self):
        super().setUp()
        for statement in FOREIGN_KEYS.split(';'):
            self.session.run(statement)
        self.addCleanup(self._drop)

    def _drop(self):
        with closing(self.does.connect()) as session:
            for table, name in session.all("SELECT conrelid::regclass::text, conname FROM pg_constraint "
                                           "WHERE contype = 'f' AND conrelid::regclass::text "
                                           "NOT IN ('blob_chunk', 'relstore_blob')"):
                session.run(f'ALTER TABLE {table} DROP CONSTRAINT {name}')
            session.run('DROP INDEX prev_tid')


class Numbers(TestCase):
    """Sums and counts are integers: of some a driver would make a Decimal."""

    def test_they_are_integers(self):
        storage = self.open_storage()
        self.addCleanup(storage.close)
        tid = commit(storage, (z64, z64, state(0)))
        tid = commit(storage, (z64, tid, state(1)), (storage.new_oid(), z64, state(0)))
        tid = commit(storage, (z64, tid, state(2)))
        adapter = storage.database.adapter
        with storage.database.pool.session() as session:
            [sizes] = session.all(adapter.sql.garbage_sizes, (adapter.revision_list([(0, u64(tid))]),))
            found = [*sizes[:4], *adapter.sweeps.state(session), adapter.last_tid(session),
                     adapter.estimated_count(session), last_marked(adapter, session)]
        report = storage.pack(time.time())
        self.assertGreater(report.states, 0)
        found += [report.states, report.bytes, report.transactions, report.pack_tid, report.marked_tid]
        self.assertEqual({type(number) for number in found}, {int}, found)


cases(globals(), Suite, backends=(*MYSQL[:2], *MYSQL[4:], Psycopg2HistoryPreserving, Psycopg2HistoryFree,
                                  Psycopg3HistoryPreserving))
cases(globals(), WithForeignKeys, backends=(Psycopg2HistoryPreserving,))
cases(globals(), Numbers)
del Suite, WithForeignKeys, Numbers
