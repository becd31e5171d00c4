"""Which rows a commit writes, also in pieces, and what deleteObject and undo make of them."""
import hashlib
from unittest.mock import patch

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.POSException import ConflictError, POSKeyError
from ZODB.tests.ConflictResolution import PCounter
from ZODB.utils import u64, z64

from relstore import spool
from relstore.references import references
from relstore.tests.support.backends import (
    HISTORY_FREE,
    HISTORY_PRESERVING,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.objects import exists
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.records import counter, state, value_of
from relstore.tests.support.server_suite import Suite


class Pieces(Suite):
    """A transaction that is larger than a message."""

    def setUp(self):
        super().setUp()
        self.storage.database.adapter.message_size = 1000
        self.oids = self.objects(30)
        self.base = self.other.getTid(self.oids[0])
        self.sizes = [10 ** (n % 5) for n in range(30)]

    def _vote(self):
        return self.voted(self.view, *((oid, self.base, state('x' * size)) for oid, size in
                                       zip(self.oids, self.sizes, strict=True)), (self.view.new_oid(), z64, state(1)))

    def test_commit(self):
        txn, _ = self._vote()
        tid = self.view.tpc_finish(txn)
        self.assertEqual([self.other.load(oid) for oid in self.oids],
                         [(state('x' * size), tid) for size in self.sizes])
        self.assertEqual(list(self.other.iterator(tid))[-1].tid, tid)
        self.assertEqual(len(list(list(self.other.iterator(tid))[-1])), 31)

    def test_abort_after_vote(self):
        txn, _ = self._vote()
        self.view.tpc_abort(txn)
        self.assertEqual({self.other.load(oid) for oid in self.oids}, {(state(0), self.base)})
        self.assertEqual(self.storage.database.pool.lent, 0)
        self.test_commit()

    def test_one_after_the_other_on_one_session(self):
        for _ in range(3):
            txn, _ = self._vote()
            self.base = self.view.tpc_finish(txn)
        self.assertEqual({self.other.getTid(oid) for oid in self.oids}, {self.base})

    def test_restored(self):
        destination = self.open_storage('destination')
        self.addCleanup(destination.close)
        txn, _ = self._vote()
        self.view.tpc_finish(txn)
        destination.database.adapter.message_size = 1000
        destination.copyTransactionsFrom(self.other)
        self.assertEqual([destination.load(oid) for oid in self.oids], [self.other.load(oid) for oid in self.oids])


class Deletions(Suite):

    def _delete(self, storage, oid, tid):
        return commit(storage, work=lambda txn: storage.deleteObject(oid, tid, txn))

    def test_delete(self):
        doomed, kept = self.objects(2)
        tid = self.other.getTid(doomed)
        self.view.poll_invalidations()
        deleted = self._delete(self.other, doomed, tid)
        if self.keep_history:
            self.assertEqual(value_of(self.view.load(doomed)[0]), 0, 'the view is older')
            self.assertEqual(self.other.loadBefore(doomed, deleted), (state(0), tid, deleted))
        self.assertEqual(self.view.poll_invalidations(), [doomed])
        for storage in (self.view, self.other):
            for read in (storage.load, storage.getTid, lambda oid, s=storage: s.loadSerial(oid, deleted)):
                with self.assertRaises(POSKeyError):
                    read(doomed)
            self.assertEqual(value_of(storage.load(kept)[0]), 0)
        self.view.afterCompletion()

    def test_what_was_changed_since_is_not_deleted(self):
        [oid] = self.objects()
        old = self.other.getTid(oid)
        commit(self.other, (oid, old, state(1)))
        with self.assertRaises(ConflictError):
            self._delete(self.view, oid, old)
        self.assertEqual(value_of(self.other.load(oid)[0]), 1)

    def test_what_was_deleted_since_is_not_changed(self):
        [oid] = self.objects(record=counter(0))
        self.view.poll_invalidations()
        tid = self.view.load(oid)[1]
        self._delete(self.other, oid, tid)
        for change in (lambda: commit(self.view, (oid, tid, counter(1))),
                       lambda: self._delete(self.view, oid, tid)):
            with self.assertRaises(ConflictError):
                change()
        self.assertFalse(exists(self.other, oid))


class RowsSuite(Suite):
    """What a commit writes beside the states."""

    def setUp(self):
        super().setUp()
        self.db, self.other_db = DB(self.storage), DB(self.other)
        self.addCleanup(self.db.close)
        self.addCleanup(self.other_db.close)

    def _rows(self, storage, columns):
        with storage.database.pool.session() as session:
            return session.all(f'SELECT {columns} FROM object_state ORDER BY zoid, tid')

    def _check(self, storage):
        """Compare every row with its state; return its references by (oid, tid)."""
        more = 'md5, prev_tid' if self.keep_history else 'refs_tid, NULL'
        found, newest = {}, {}
        for oid, tid, record, size, refs, md5, earlier in self._rows(
                storage, f'zoid, tid, state, state_size, refs, {more}'):
            self.assertEqual(refs, references(record))
            self.assertEqual(size, len(record or b''))
            if self.keep_history:
                self.assertEqual(earlier, newest.get(oid, 0), 'it replaced another revision')
                newest[oid] = tid
                self.assertEqual(md5, hashlib.md5(record).hexdigest() if record is not None else None)
            else:
                self.assertEqual(md5, tid, 'references of another revision')
            found[oid, tid] = refs
        return found

    def _conflict(self):
        """Leave a counter, with a partner, that was changed twice from one state."""
        managers = [TransactionManager(), TransactionManager()]
        first, second = (db.open(manager) for db, manager in zip((self.db, self.other_db), managers, strict=True))
        try:
            first.root()['counter'] = it = PCounter()
            it.inc()
            it.partner = first.root()['partner'] = PersistentMapping()
            managers[0].commit()
            managers[1].begin()
            for connection, step in ((first, 1), (second, 10)):
                connection.root()['counter'].inc(step)
            managers[0].commit()
            managers[1].commit()
            return second.root()['counter']._p_oid
        finally:
            for manager, connection in zip(managers, (first, second), strict=True):
                manager.abort()
                connection.close()

    def _data_tid_is(self, storage, oid, tid, wanted):
        rows = {row[:2]: row[2] for row in self._rows(storage, 'zoid, tid, data_tid')}
        self.assertEqual(rows[u64(oid), u64(tid)], None if wanted is None else u64(wanted))
        [record] = [r for txn in storage.iterator(tid, tid) for r in txn if r.oid == oid]
        self.assertEqual(record.data_txn, wanted)


class Rows(RowsSuite):

    def test_store_and_conflict_resolution(self):
        oid = self._conflict()
        self.assertEqual(self.other.load(oid)[0].count(b'partner'), 1)
        found = self._check(self.storage)
        self.assertEqual(len(found[u64(oid), u64(self.other.getTid(oid))]), 8)
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, 12)

    def test_restore(self):
        self._conflict()
        destination = self.open_storage('destination')
        self.addCleanup(destination.close)
        destination.copyTransactionsFrom(self.storage)
        self.assertEqual(self._check(destination), self._check(self.storage))

    def test_deletion(self):
        oid = self._conflict()
        self.view.poll_invalidations()      # who refers to it was changed since
        tid = commit(self.view, work=lambda txn: self.view.deleteObject(oid, self.view.getTid(oid), txn))
        self.assertEqual(self._check(self.storage)[u64(oid), u64(tid)], b'')

    def test_in_pieces(self):
        self.other.database.adapter.message_size = 50
        oid = self._conflict()
        self.assertEqual(len(self._check(self.storage)[u64(oid), u64(self.other.getTid(oid))]), 8)

    def test_from_a_file(self):
        self.enter(patch.object(spool, 'IN_MEMORY_BYTES', 0))
        oid = self._conflict()
        self.assertEqual(len(self._check(self.storage)[u64(oid), u64(self.other.getTid(oid))]), 8)
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, 12)


class RowsOfUndo(RowsSuite):

    def test_undo(self):
        oid = self._conflict()
        before, undone = [entry['tid'] for entry in reversed(self.other.history(oid, 3))][1:]
        tid = commit(self.view, work=lambda txn: self.view.undo(undone, txn))
        found = self._check(self.storage)
        self.assertEqual(found[u64(oid), u64(tid)], found[u64(oid), u64(before)])
        self._data_tid_is(self.storage, oid, tid, before)
        destination = self.open_storage('destination')
        self.addCleanup(destination.close)
        destination.copyTransactionsFrom(self.storage)
        self._data_tid_is(destination, oid, tid, before)
        self.assertEqual(self._check(destination), found)

    def test_undo_by_conflict_resolution(self):
        oid = self._conflict()
        first_inc = self.other.history(oid, 3)[1]['tid']
        tid = commit(self.view, work=lambda txn: self.view.undo(first_inc, txn))
        with self.db.transaction() as connection:
            self.assertEqual(connection.root()['counter']._value, 11)
        self.assertEqual(len(self._check(self.storage)[u64(oid), u64(tid)]), 8)
        self._data_tid_is(self.storage, oid, tid, None)


cases(globals(), Pieces, Deletions, Rows, backends=HISTORY_PRESERVING + HISTORY_FREE + ORACLE)
cases(globals(), RowsOfUndo, backends=HISTORY_PRESERVING + ORACLE[:1], each_driver=True)
del Suite, Pieces, Deletions, RowsSuite, Rows, RowsOfUndo
