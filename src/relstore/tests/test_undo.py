"""What ZODB's suites do not ask of undo and of historical views."""
from unittest import mock

import transaction
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import (
    ConflictError,
    POSKeyError,
    ReadOnlyHistoryError,
    UndoError,
)
from ZODB.utils import maxtid, oid_repr, p64, u64, z64

from relstore.tests.support.backends import (
    HISTORY_PRESERVING,
    cases,
)
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.records import counter, state
from relstore.tests.support.storage_suite import Suite, closing_view, outcome


class Undo(Suite):

    def undo(self, *indexes):
        """Undo the transactions at these places of the log, in one transaction; return the oids."""
        storage, oids = self.storage, []
        ids = [storage.undoLog(index, index + 1)[0]['id'] for index in indexes]
        self.commit(*[lambda txn, id=id: oids.extend(storage.undo(id, txn)[1]) for id in ids])
        return oids

    def state(self, oid):
        return outcome(lambda: self.storage.load(oid)[0])

    def test_several_undos_of_one_object_in_one_transaction(self):
        one, other = p64(1), p64(2)
        tid = self.store(one, state(1))
        tid = self.store(one, state(2), tid)
        self.store(other, state(7))
        self.store(one, state(3), tid)
        self.assertEqual(self.undo(0, 2), [one, one])
        self.assertEqual((self.state(one), self.state(other)), (state(1), state(7)))
        self.undo(0)
        self.assertEqual(self.state(one), state(3))

    def test_undos_in_the_wrong_order(self):
        """The older one alone cannot be undone, whatever comes after it."""
        tid = self.store(p64(1), state(1))
        tid = self.store(p64(1), state(2), tid)
        self.store(p64(1), state(3), tid)
        with self.assertRaises(UndoError):
            self.undo(1, 0)
        self.assertEqual(self.state(p64(1)), state(3))

    def test_undo_and_store_in_one_transaction(self):
        tid = self.store(p64(1), state(1))
        self.store(p64(1), state(2), tid)
        id = self.storage.undoLog(0, 1)[0]['id']
        self.commit(lambda txn: self.storage.undo(id, txn),
                    lambda txn: self.storage.store(p64(2), z64, state(9), '', txn))
        self.assertEqual((self.state(p64(1)), self.state(p64(2))), (state(1), state(9)))

    def test_creation(self):
        self.store(p64(1), state(1))
        self.assertEqual(self.undo(0), [p64(1)])
        self.assertIs(self.state(p64(1)), POSKeyError)
        self.assertEqual(len(self.storage.history(p64(1), 9)), 2)
        self.undo(0)
        self.assertEqual(self.state(p64(1)), state(1))
        self.undo(0)
        self.assertIs(self.state(p64(1)), POSKeyError)

    def test_creation_that_was_changed_since(self):
        tid = self.store(p64(1), state(1))
        self.store(p64(1), state(2), tid)
        with self.assertRaises(UndoError):
            self.undo(1)
        self.undo(0, 1)
        self.assertIs(self.state(p64(1)), POSKeyError)

    def test_deletion(self):
        tid = self.store(p64(1), state(1))
        self.commit(lambda txn: self.storage.deleteObject(p64(1), tid, txn))
        self.assertIs(self.state(p64(1)), POSKeyError)
        self.undo(0)
        self.assertEqual(self.state(p64(1)), state(1))

    def test_change_before_a_deletion(self):
        tid = self.store(p64(1), state(1))
        tid = self.store(p64(1), state(2), tid)
        self.commit(lambda txn: self.storage.deleteObject(p64(1), tid, txn))
        with self.assertRaises(UndoError):
            self.undo(1)
        self.undo(0, 1)
        self.assertEqual(self.state(p64(1)), state(1))

    def test_deletion_after_which_it_was_created_again(self):
        tid = self.store(p64(1), state(1))
        tid = self.commit(lambda txn: self.storage.deleteObject(p64(1), tid, txn))
        self.store(p64(1), state(2), tid)
        with self.assertRaises(UndoError):
            self.undo(1)
        self.assertEqual(self.state(p64(1)), state(2))

    def test_by_conflict_resolution(self):
        """Undoing +2 keeps the +4 that came after it, and can itself be undone."""
        oid = p64(1)
        tid = self.store(oid, counter(1))
        tid = self.store(oid, counter(3), tid)
        self.store(oid, counter(7), tid)
        self.undo(1)
        self.assertEqual(self.state(oid), counter(5))
        self.undo(0)
        self.assertEqual(self.state(oid), counter(7))
        self.undo(2, 1)         # the +4, and the first undo: -4 + 2
        self.assertEqual(self.state(oid), counter(5))

    def test_error_names_the_object(self):
        tid = self.store(p64(0x123), state(1))
        tid = self.store(p64(0x123), state(2), tid)
        self.store(p64(0x123), state(3), tid)
        with self.assertRaisesRegex(UndoError, oid_repr(p64(0x123))):
            self.undo(1)

    def test_nothing_of_a_transaction_that_cannot_be_undone_as_a_whole(self):
        one, other = p64(1), p64(2)
        self.commit(*[lambda txn, oid=oid: self.storage.store(oid, z64, state(1), '', txn) for oid in (one, other)])
        tid = self.storage.lastTransaction()
        self.commit(*[lambda txn, oid=oid: self.storage.store(oid, tid, state(2), '', txn) for oid in (one, other)])
        self.store(other, state(3), self.storage.lastTransaction())
        with self.assertRaises(UndoError):
            self.undo(1)
        self.assertEqual((self.state(one), self.state(other)), (state(2), state(3)))

    def test_transaction_that_is_none(self):
        self.store(p64(1), state(1))
        for id in z64, p64(u64(self.storage.lastTransaction()) - 1), maxtid:
            with self.assertRaises(UndoError):
                self.commit(lambda txn, id=id: self.storage.undo(id, txn))

    def test_changed_while_the_undo_is_under_way(self):
        tid = self.store(p64(1), state(1))
        tid = self.store(p64(1), state(2), tid)
        id = self.storage.undoLog(0, 1)[0]['id']
        with closing_view(self.storage) as other, self.assertRaises(ConflictError):
            self.commit(lambda txn: self.storage.undo(id, txn),
                        lambda txn: self.store(p64(1), state(3), tid, storage=other))
        self.assertEqual(self.state(p64(1)), state(3))

    def test_more_transactions_than_a_page(self):
        with mock.patch('relstore.history.PAGE', 7):
            tid = z64
            for n in range(30):
                tid = self.store(p64(1), state(n), tid, user='bo' if n % 10 == 3 else 'anna')
            entries = self.storage.undoInfo(0, -20, {'user_name': b'bo'})
            self.assertEqual([entry['user_name'] for entry in entries], [b'bo'] * 3)
            self.assertEqual(self.storage.undoInfo(1, 2, {'user_name': b'bo'}), entries[1:2])

    def test_extension_that_cannot_be_read(self):
        """Its class may be gone; the transaction is listed all the same, and its bytes are kept."""
        damaged = b'\x80\x03cno.such.module\nThing\n.'
        txn = TransactionMetaData('anna', 'damaged', damaged)
        self.storage.tpc_begin(txn)
        self.storage.store(p64(1), z64, state(1), '', txn)
        self.storage.tpc_vote(txn)
        self.storage.tpc_finish(txn)
        [entry] = self.storage.undoLog()
        self.assertEqual(entry['description'], b'damaged')
        [record] = self.storage.history(p64(1))
        self.assertEqual(record['description'], b'damaged')
        [txn] = self.storage.iterator()
        self.assertEqual(txn.extension_bytes, damaged)


class Historical(Suite):

    def test_connections(self):
        db = self.database()
        manager = transaction.TransactionManager()
        tids = []
        for n in range(4):
            connection = db.open(manager)
            connection.root()['n'] = n
            manager.commit()
            tids.append(self.storage.lastTransaction())
            connection.close()
        for n, tid in enumerate(tids):
            self.assertEqual(self.read(db, at=tid), n)
            self.assertEqual(self.read(db, before=p64(u64(tid) + 1)), n)
            if n:
                self.assertEqual(self.read(db, before=tid), n - 1)

    def test_connections_do_not_move(self):
        db = self.database()
        manager = transaction.TransactionManager()
        connection = db.open(manager)
        connection.root()['n'] = 0
        manager.commit()
        old = db.open(transaction.TransactionManager(), at=self.storage.lastTransaction())
        connection.root()['n'] = 1
        manager.commit()
        old.sync()
        self.assertEqual(old.root()['n'], 0)
        old.root()['n'] = 5
        with self.assertRaises(ReadOnlyHistoryError):
            old.transaction_manager.commit()
        old.transaction_manager.abort()
        old.close()

    def read(self, db, **when):
        connection = db.open(transaction.TransactionManager(), **when)
        try:
            return connection.root()['n']
        finally:
            connection.close()


cases(globals(), Undo, Historical, backends=HISTORY_PRESERVING + ORACLE[:1])
del Suite, Undo, Historical
