"""What is peculiar to Oracle, as far as H2 can show it.

The empty string is NULL, texts have little room, locks are those of rows and tables, tables are made one by one.
"""
import threading
from contextlib import closing

from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, ReadConflictError, StorageError
from ZODB.utils import p64, u64, z64

from relstore.adapters.commits.oracle import LOCKS, TEXT_BYTES, USER_BYTES
from relstore.errors import ConfigurationError, LockTimeout, Unavailable
from relstore.sessions.statement import split
from relstore.tests.support.backends import cases
from relstore.tests.support.blob_suite import BlobSuite
from relstore.tests.support.commits import commit, voted
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.records import record, state
from relstore.tests.support.storage_suite import Suite


class Nothing(Suite):
    """What is empty, and what is unknown."""

    def rows(self, sql, *values):
        return self.storage.database.pool.attempt(lambda session: session.all(sql, values))

    def test_no_references_are_not_unknown_ones(self):
        oid = self.storage.new_oid()
        self.store(oid, state(1))
        self.store(p64(u64(oid) + 1), record(oid))
        adapter = self.storage.database.adapter
        found = self.rows(adapter.sql.known_references, *((-1, -1) if self.keep_history else (-1,)), u64(oid) + 9, 10)
        self.assertEqual([row[2] for row in found], [b'', oid])
        [(_, _, loaded, refs)] = self.storage.database.pool.attempt(
            lambda session: [(0, *adapter.load_at(session, u64(oid), 2 ** 63 - 1))])
        self.assertEqual((loaded > 0, refs), (True, b''))
        [(stored,)] = self.rows('SELECT refs AS stored FROM object_state WHERE zoid = :p1', u64(oid))
        self.assertEqual(stored, b'\0')

    def test_no_references_that_were_found_later(self):
        oid = self.storage.new_oid()
        tid = self.store(oid, state(1))
        adapter, pool = self.storage.database.adapter, self.storage.database.pool
        for _ in range(2):      # it may be there
            pool.attempt(adapter.save_references, [(u64(oid), u64(tid), b'')])
        pool.attempt(lambda session: session.run('UPDATE object_state SET refs = NULL'))
        after = (-1, -1) if self.keep_history else (-1,)
        [(_, _, known, found, _)] = self.rows(adapter.sql.known_references, *after, u64(oid), 10)
        self.assertEqual((known, found), (None, b''))
        self.assertEqual(self.rows(adapter.sql.unknown_references, *after, u64(oid), 10), [])

    def test_no_user_and_no_description(self):
        self.store(z64, state(1), user='', description='')
        [txn] = self.storage.iterator()
        self.assertEqual((txn.user, txn.description, txn.extension), (b'', b'', {}))
        if self.keep_history:
            [entry] = self.storage.undoLog(0, 1)
            self.assertEqual((entry['user_name'], entry['description']), (b'', b''))

    def test_a_deletion_is_no_empty_state(self):
        tid = self.store(z64, state(1))
        self.commit(lambda txn: self.storage.deleteObject(z64, tid, txn))
        with self.assertRaises(KeyError):
            self.storage.load(z64)

    def test_a_record_of_no_bytes_is_refused(self):
        """It would be a deletion. ZODB has no such records."""
        with self.assertRaisesRegex(StorageError, 'The record of the object 0x0 has no bytes'):
            self.store(z64, b'')
        self.assertEqual(list(self.storage.iterator()), [])

    def test_tids_are_exact(self):
        """They are larger than what a float can tell apart."""
        tids = [self.store(p64(n), state(n)) for n in range(1, 5)]
        adapter = self.storage.database.adapter
        self.assertEqual(u64(tids[-1]), self.storage.database.pool.attempt(adapter.last_tid))
        self.assertEqual(sorted(set(tids)), tids)


class Texts(Suite):

    def test_long_ones_are_cut_off_between_characters(self):
        with self.assertLogs('relstore', 'WARNING') as logs:
            self.store(z64, state(1), user='x' * (USER_BYTES - 1) + '\N{SNOWMAN}', description='\N{SNOWMAN}' * 1000)
        self.assertEqual(len(logs.records), 2)
        [entry] = self.storage.undoLog(0, 1)
        self.assertEqual(entry['user_name'], b'x' * (USER_BYTES - 1))
        self.assertEqual(entry['description'].decode(), '\N{SNOWMAN}' * (TEXT_BYTES // 3))

    def test_an_extension_is_not_cut_off(self):
        """The vote fails, and nothing is stored."""
        with self.assertRaisesRegex(StorageError, r'The extension of the transaction has 5,\d+ bytes'):
            self.store(z64, state(1), extension={'x': 'y' * 5000})
        self.assertEqual(len(self.storage), 0)

    def test_packed_is_a_letter(self):
        tid = self.store(z64, state(1))
        self.store(z64, state(2), tid)
        self.assertEqual([txn.status for txn in self.storage.iterator()], [' ', ' '])
        self.storage.pack(None)
        self.assertEqual([txn.status for txn in self.storage.iterator()], ['p'])


class Locks(Suite):

    def other(self, **options):
        return self.opened(**options)

    def test_one_object(self):
        """The second vote waits for the first, and learns what that has committed."""
        base = self.store(z64, state(1))
        other = self.other()
        txn = voted(self.storage, (z64, base, state(2)))
        done = []

        def second():
            try:
                commit(other, (z64, base, state(3)))
            except ConflictError as e:
                done.append(e)
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        self.assertEqual(done, [])
        tid = self.storage.tpc_finish(txn)
        thread.join(20)
        [conflict] = done
        self.assertEqual(conflict.serials, (tid, base))

    def test_for_no_longer_than_the_option_says(self):
        base = self.store(z64, state(1))
        other = self.other(commit_lock_timeout=1)
        txn = voted(self.storage, (z64, base, state(2)))
        with self.assertRaisesRegex(LockTimeout, 'The object 0x0 was held for 1 s') as raised:
            commit(other, (z64, base, state(3)))
        self.assertEqual(raised.exception.lock, 0)
        self.storage.tpc_finish(txn)

    def test_other_objects(self):
        base = self.store(z64, state(1))
        other = self.other(commit_lock_timeout=1)
        txn = voted(self.storage, (z64, base, state(2)))
        commit(other, (other.new_oid(), z64, state(3)))
        self.storage.tpc_finish(txn)

    def test_new_objects_whose_oid_came_from_elsewhere(self):
        other = self.other(commit_lock_timeout=1)
        txn = voted(self.storage, (p64(7), z64, state(2)))
        for oid in p64(7), p64(7 + LOCKS):      # the second for no reason but that there are so few
            with self.assertRaises(LockTimeout):
                commit(other, (oid, z64, state(3)))
        commit(other, (p64(8), z64, state(3)))
        self.storage.tpc_finish(txn)
        with self.assertRaises(ConflictError):
            commit(other, (p64(7), z64, state(3)))

    def test_what_was_only_read(self):
        """It may not change until the commit, and who has read it, too, waits for that."""
        base = self.store(z64, state(1))
        other = self.other(commit_lock_timeout=1)
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        self.storage.checkCurrentSerialInTransaction(z64, base, txn)
        self.storage.store(p64(1), z64, state(1), '', txn)
        self.storage.tpc_vote(txn)
        with self.assertRaises(LockTimeout):
            commit(other, (z64, base, state(3)))
        self.storage.tpc_finish(txn)
        tid = commit(other, (z64, base, state(3)))
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        self.storage.checkCurrentSerialInTransaction(z64, base, txn)
        self.storage.store(p64(2), z64, state(1), '', txn)
        with self.assertRaises(ReadConflictError) as raised:
            self.storage.tpc_vote(txn)
        self.assertEqual(raised.exception.serials, (tid, base))
        self.storage.tpc_abort(txn)

    def test_whoever_packs_waits_for_those_who_have_voted(self):
        adapter, base = self.storage.database.adapter, self.store(z64, state(1))
        txn = voted(self.storage, (z64, base, state(2)))
        with closing(adapter.connect()) as session:
            for seconds in 0.5, 1:
                with self.assertRaises(LockTimeout):
                    adapter.lock_votes(session, seconds)
                session.rollback()
            self.storage.tpc_finish(txn)
            adapter.lock_votes(session, 1)
            other = self.other(commit_lock_timeout=1)
            with self.assertRaises(LockTimeout):
                commit(other, (p64(1), z64, state(2)))
            session.rollback()
            commit(other, (p64(1), z64, state(2)))

    def test_one_pack_at_a_time(self):
        adapter = self.storage.database.adapter
        with closing(adapter.connect()) as session:
            self.assertIsNone(adapter.pack_lock.take(session))
            with self.assertRaisesRegex(Unavailable, 'is being packed by another session'):
                self.storage.pack(None)
            session.all(adapter.sql.meta)       # commits, and keeps the lock
            with self.assertRaises(Unavailable):
                self.storage.pack(None)
        self.storage.pack(None)

    def test_nothing_is_left_of_what_was_staged(self):
        """The next transaction of the session would write it, too."""
        storage = self.opened('other')
        txn = voted(storage, (p64(1), z64, state(1)))
        storage.tpc_abort(txn)
        commit(storage, (p64(2), z64, state(2)))
        commit(storage, (p64(3), z64, state(3)))
        self.assertEqual([u64(record.oid) for txn in storage.iterator() for record in txn], [2, 3])


class Oids(Suite):

    def test_no_new_one_is_as_large_as_one_that_was_brought_along(self):
        oids = [self.storage.new_oid()]
        for brought in 5000, 100_000, 70_000, 2 ** 40:
            self.store(p64(brought), state(1))
            self.storage.database.oids.forget()
            oids.append(self.storage.new_oid())
            self.assertGreater(u64(oids[-1]), max(brought, 5000))
        self.assertEqual(sorted(set(oids)), oids)

    def test_a_transaction_that_brings_one_along_is_whole(self):
        """To change the counter commits, but not what was voted for."""
        txn = voted(self.storage, (p64(10 ** 6), z64, state(1)))
        self.assertEqual(len(list(self.opened().iterator())), 0)
        self.storage.tpc_abort(txn)
        self.assertEqual(len(list(self.storage.iterator())), 0)

    def test_a_counter_that_was_restored_alone(self):
        oid = self.storage.new_oid()
        self.store(p64(5000), state(1))
        self.storage.database.pool.attempt(
            lambda session: session.run(self.storage.database.adapter.sql.restart_oids, (1,)))
        self.storage.close()
        self.assertGreater(u64(self.opened().new_oid()), max(5000, u64(oid)))


class Tables(Suite):
    """Each statement commits by itself, so a database may be left with some of its tables."""

    def statements(self):
        adapter = self.address('other').unseen(self.keep_history)
        return [(name, statement) for name, text in adapter.schema().items() if name != 'refs'
                for statement in split(text)]

    def test_whatever_is_missing_is_made(self):
        count = len(self.statements())
        for upto in 0, 1, 5, 12, count - 4, count - 3, count - 2, count - 1:
            with self.subTest(upto):
                name = f'broken{upto}'
                with closing(self.address(name).first_session()) as session:
                    for _, statement in self.statements()[:upto]:
                        session.run(statement)
                storage = self.opened(name)
                tid = commit(storage, (z64, z64, state(1)))
                self.assertEqual(storage.load(z64), (state(1), tid))
                self.assertEqual(storage.database.adapter.writes_alone(storage.database.pool.borrow()),
                                 upto <= self.names().index('object_state'))

    def names(self):
        return [name for name, _ in self.statements()]

    def test_of_relstorage(self):
        """It has no tables of ours, no columns of ours; and its rows say who has written them."""
        ours = {name for name in self.names() if name.startswith('relstore_')}
        with closing(self.address('theirs').first_session()) as session:
            for name, statement in self.statements():
                if name not in ours:
                    session.run(statement)
            for column in 'refs', 'data_tid' if self.keep_history else 'refs_tid':
                session.run(f'ALTER TABLE object_state DROP COLUMN {column}')
        with self.assertRaisesRegex(ConfigurationError, 'lacks .*refs.*create-schema is false'):
            self.open_storage('theirs', create_schema=False)
        storage = self.opened('theirs')
        tid = commit(storage, (z64, z64, state(1)))
        self.assertEqual(storage.load(z64), (state(1), tid))
        self.assertFalse(storage.database.adapter.writes_alone(storage.database.pool.borrow()))

    def test_one_at_a_time(self):
        adapter = self.storage.database.adapter
        with closing(adapter.bare_session()) as session, closing(adapter.bare_session()) as other:
            with adapter.changing_schema(session, 1), \
                    self.assertRaisesRegex(Unavailable, 'is being changed by another process'), \
                    adapter.changing_schema(other, 1):
                self.fail()
            with adapter.changing_schema(other, 1):
                pass

    def test_the_version_of_the_server(self):
        adapter = self.address().unseen(self.keep_history)
        adapter.sql.server = "SELECT '12.2.0.1.0' AS version FROM dual"
        with self.assertRaisesRegex(ConfigurationError, r'has version 12\.2\.0\.1\.0; relstore needs 19c'):
            adapter.look()


class LongChunks(BlobSuite):
    """As RelStorage keeps them: a blob is one chunk."""

    def test_are_read_in_parts(self):
        oid, tid = self.store(b'')
        data = self.data(10_000)
        self.storage.database.pool.attempt(lambda session: session.run(
            'UPDATE blob_chunk SET chunk = :p1 WHERE zoid = :p2', (data, oid)))
        chunks = self.storage.database.adapter.chunks
        chunks.longest_row = 4000        # a quarter of it is asked for at first
        pieces = self.storage.database.pool.attempt(lambda session: list(chunks.read(session, oid, tid)))
        self.assertEqual(b''.join(pieces), data)
        self.assertGreater(len(pieces), 2)
        self.assertLessEqual(max(map(len, pieces)), 4000)

    def test_one_of_nothing(self):
        oid, tid = self.store(b'')
        self.assertBlob(oid, tid, b'')
        self.assertEqual(self.rows(oid), 1)


class Outcomes(Suite):

    def commit_object(self, txn):
        """Return the database's side of a transaction that has voted, as commit.Transaction has it."""
        return self.storage.committing.commit

    def test_of_a_vote_that_is_undone_and_one_that_is_committed(self):
        database = self.storage.database
        txn = voted(self.storage, (z64, z64, state(1)))
        commit_object = self.commit_object(txn)
        self.storage.tpc_abort(txn)
        self.assertIsNone(database.pool.attempt(commit_object.outcome, [0]))
        txn = voted(self.storage, (z64, z64, state(1)))
        commit_object = self.commit_object(txn)
        tid = self.storage.tpc_finish(txn)
        self.assertEqual(database.pool.attempt(commit_object.outcome, [0]), u64(tid))

    def test_a_vote_that_is_gone_writes_nothing(self):
        txn = voted(self.storage, (z64, z64, state(1)))
        self.commit_object(txn).session.run('DELETE FROM relstore_commit')
        with self.assertRaises(Unavailable):
            self.storage.tpc_finish(txn)
        self.storage.tpc_abort(txn)
        self.assertEqual(len(list(self.storage.iterator())), 0)


cases(globals(), Nothing, Locks, Oids, LongChunks, Outcomes, backends=ORACLE)
cases(globals(), Texts, backends=ORACLE[:1])
cases(globals(), Tables, backends=ORACLE)
del Nothing, Locks, Oids, LongChunks, Outcomes, Texts, Tables, Suite, BlobSuite
