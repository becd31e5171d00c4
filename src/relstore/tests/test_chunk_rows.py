"""Blobs whose chunks are rows: on MySQL, MariaDB and SQLite."""
import os
import tempfile
import time
import unittest
from collections import Counter
from contextlib import closing
from pathlib import Path

from ZODB.POSException import POSKeyError

from relstore.adapters.chunks import PIECE_BYTES, Record, record_of
from relstore.adapters.commits.base import Ballot, Metadata
from relstore.adapters.commits.mysql_blobs import SMALL
from relstore.errors import Disconnected, StorageError
from relstore.spool import Spool
from relstore.tests.support.backends import (
    MYSQL,
    MySQLdbHistoryPreserving,
    PyMySQLHistoryFree,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.servers import MariaDBServer, SharedServer, mariadb_programs, require_mariadb

MB = 1 << 20
CHUNK = MB


class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.open()

    def open(self):
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)
        self.adapter, self.pool = self.storage.database.adapter, self.storage.database.pool

    def file(self, data):
        path = self.directory / f'{time.monotonic_ns()}.blob'
        path.write_bytes(data)
        return str(path)

    def begin(self, files=None, bases=(), copies=None, oids=(), adapter=None, session=None):
        """Do a commit but for its finish; return it. The objects that have no base are new."""
        adapter = adapter or self.adapter
        if session is None:
            session = adapter.connect()
            self.addCleanup(self.close, session)
        bases, oids = dict(bases), sorted({*(files or ()), *(copies or ()), *oids})
        commit = adapter.commit_type(adapter, session, Metadata(b'', b'', b'', False), None)
        if files:
            commit.send_blobs(files, {oid: record_of(path) for oid, path in files.items()})
        ballot = Ballot(epoch=session.epoch, timeout=10, bases=[(oid, bases.get(oid, 0)) for oid in oids],
                        locks=[oid for oid in oids if bases.get(oid)])
        verdict = commit.vote(ballot)
        self.assertFalse(verdict.is_refusal or verdict.conflicts, verdict)
        if copies:
            commit.copy_blobs(copies)
        spool = Spool(lambda state: state, digest=adapter.keep_history)
        self.addCleanup(spool.close)
        for oid in oids:
            spool.put(oid, bases.get(oid, 0), b'state of a blob')
        commit.stage(spool.batches(adapter.message_size))
        return commit

    def close(self, session):
        if not session.broken:
            session.rollback()
            session.close()

    def commit(self, files=None, **more):
        tid, _ = self.begin(files, **more).finish()
        return tid

    def read(self, oid, tid):
        with self.session() as session:
            return b''.join(self.adapter.chunks.read(session, oid, tid))

    def size(self, oid, tid):
        with self.session() as session:
            return self.adapter.chunks.size(session, oid, tid)

    def session(self):
        return closing(self.adapter.connect())

    def rows(self):
        """All rows there are, as somebody else sees them: (oid, tid, number, bytes)."""
        with self.session() as session:
            return session.all('SELECT zoid, tid, chunk_num, length(chunk) FROM blob_chunk '
                               'ORDER BY zoid, tid, chunk_num')

    def test_sizes(self):
        sizes = [0, 1, SMALL - 1, SMALL, SMALL + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, PIECE_BYTES,
                 PIECE_BYTES + 1, 20 * MB]
        for oid, size in enumerate(sizes, 1):
            data = os.urandom(size)
            with self.subTest(size):
                tid = self.commit({oid: self.file(data)})
                self.assertEqual(self.size(oid, tid), size)
                self.assertEqual(self.read(oid, tid), data)
                rows = [row for row in self.rows() if row[0] == oid]
                self.assertEqual(rows, [(oid, tid, n, min(CHUNK, size - n * CHUNK))
                                        for n in range(max(-(-size // CHUNK), 1))])

    def test_there_is_none(self):
        tid = self.commit(oids=[1])
        self.assertEqual((self.size(1, tid), self.read(1, tid)), (None, b''))
        self.assertEqual((self.size(2, tid), self.read(2, tid)), (None, b''))
        tid = self.commit({3: self.file(b'')})
        self.assertEqual((self.size(3, tid), self.read(3, tid), len(self.rows())), (0, b'', 1))

    def test_several_in_a_transaction(self):
        for number, sizes in enumerate([(0, 10, 1000), (0, 10, SMALL, 3 * MB, 7), (5 * MB, 0, 5 * MB)]):
            data = {100 * number + n: os.urandom(size) for n, size in enumerate(sizes, 1)}
            tid = self.commit({oid: self.file(some) for oid, some in data.items()})
            self.assertEqual({oid: self.read(oid, tid) for oid in data}, data)

    def test_many_of_medium_size(self):
        data = {oid: os.urandom(3000) for oid in range(1, 400)}
        tid = self.commit({oid: self.file(some) for oid, some in data.items()})
        self.assertEqual({oid: self.read(oid, tid) for oid in data}, data)

    def test_replaced(self):
        """A shorter one takes the place of a longer one, and the other way round."""
        first = {1: os.urandom(3 * MB), 2: b'short', 3: b'another'}
        old = self.commit({oid: self.file(data) for oid, data in first.items()})
        second = {1: b'short', 2: os.urandom(3 * MB)}
        new = self.commit({oid: self.file(data) for oid, data in second.items()}, bases={1: old, 2: old})
        self.assertEqual({oid: self.read(oid, new) for oid in second}, second)
        self.assertEqual(self.read(3, old), b'another')
        if self.keep_history:
            self.assertEqual({oid: self.read(oid, old) for oid in first}, first)
        else:
            self.assertEqual({(oid, tid) for oid, tid, *_ in self.rows()}, {(1, new), (2, new), (3, old)})
        for data in b'x', b'':
            with self.subTest(data):        # small by small
                old, new = new, self.commit({1: self.file(data)}, bases={1: new})
                self.assertEqual(self.read(1, new), data)

    def test_rolled_back(self):
        """After send_blobs, after the vote, after a tid was chosen: nothing is left, and the session can be used."""
        for data in b'small', os.urandom(3 * MB):
            session = self.adapter.connect()
            self.addCleanup(session.close)
            commit = self.adapter.commit_type(self.adapter, session, Metadata(b'', b'', b'', False), None)
            commit.send_blobs({1: self.file(data)}, {1: Record(len(data), bytes(32))})
            self.assertEqual(self.rows(), [])
            session.rollback()
            self.begin({1: self.file(data)}, session=session)
            self.assertEqual(self.rows(), [])
            session.rollback()
            self.begin({1: self.file(data)}, session=session).choose_tid()
            self.assertEqual(self.rows(), [])
            session.rollback()
            self.assertEqual(self.rows(), [])
            tid = self.commit({1: self.file(data)}, session=session)
            self.assertEqual(self.read(1, tid), data)
            self.delete_all()

    def delete_all(self):
        with self.session() as session:
            for table in 'blob_chunk', 'object_state', *(['current_object'] if self.keep_history else []):
                session.run(f'DELETE FROM {table}')

    def test_chosen_tid(self):
        for oid, data in (1, b'small'), (2, os.urandom(2 * MB)):
            commit = self.begin({oid: self.file(data)})
            chosen = commit.choose_tid()
            self.assertEqual(commit.finish()[0], chosen)
            self.assertEqual(self.read(oid, chosen), data)
        self.assertGreater(self.commit({3: self.file(b'')}), chosen)

    def test_copied(self):
        """As an undo does: of several, a small one, a large one, and one that was none."""
        if not self.keep_history:
            return
        data = {1: os.urandom(3 * MB), 2: b'small', 3: b''}
        first = self.commit({oid: self.file(some) for oid, some in data.items()}, oids=[4])
        second = self.commit({oid: self.file(b'another') for oid in data}, bases=dict.fromkeys(data, first), oids=[5])
        third = self.commit(copies=dict.fromkeys([*data, 4], first), bases={**dict.fromkeys(data, second), 4: first})
        self.assertEqual({oid: self.read(oid, third) for oid in data}, data)
        self.assertEqual({oid: self.read(oid, second) for oid in data}, dict.fromkeys(data, b'another'))
        self.assertIsNone(self.size(4, third))
        fourth = self.commit({6: self.file(bytes(2 * MB))}, copies={2: first}, bases={2: third})     # both
        self.assertEqual((self.read(2, fourth), self.size(6, fourth)), (b'small', 2 * MB))

    def test_a_chunk_is_missing(self):
        for number, many in (0, 7), (1, 7), (4, 7), (5, 7), (6, 7), (3, 4):
            oid = 10 * number + many
            tid = self.commit({oid: self.file(bytes(many * MB))})
            with self.session() as session:
                session.run(f'DELETE FROM blob_chunk WHERE zoid = {oid} AND chunk_num = {number}')
            if number == many - 1:
                self.assertEqual(self.size(oid, tid), number * MB)      # only the record of the size could tell
            else:
                with self.subTest((number, many)), self.assertRaisesRegex(POSKeyError, f'piece {number} of the blob'):
                    self.read(oid, tid)

    def test_replaced_while_it_is_read(self):
        """Without history and outside of a view: never a mixture, and never a part for the whole."""
        if self.keep_history:
            return
        for many in 4, 5, 8, 9:
            tid = self.commit({many: self.file(bytes(many * MB))})
            with self.session() as session:
                pieces = self.adapter.chunks.read(session, many, tid)
                next(pieces)
                new = self.commit({many: self.file(b'x' * 9 * MB)}, bases={many: tid})
                if many == 4:       # it was here already
                    self.assertEqual(sum(map(len, pieces)), 3 * MB)
                else:
                    with self.assertRaisesRegex(POSKeyError, 'piece 4 of the blob'):
                        list(pieces)
                self.assertEqual(list(self.adapter.chunks.read(session, many, tid)), [])
            self.assertEqual(self.read(many, new), b'x' * 9 * MB)

    def test_chunks_of_another_size(self):
        """As RelStorage's blob-chunk-size has them."""
        longest = getattr(self.adapter, 'packet', 100 * MB) // 2 - 1000
        for oid, size in enumerate((1, 1000, 100_000, 3 * MB, 10 * MB), 1):
            size = min(size, longest)
            data = os.urandom(min(1000 * size, 21 * MB))
            tid = self.commit({oid: self.file(b'')})
            with self.session() as session:
                session.run(f'DELETE FROM blob_chunk WHERE zoid = {oid}')
                sign = '?' if self.adapter.name == 'sqlite' else '%s'
                for n, start in enumerate(range(0, len(data), size)):
                    session.run('INSERT INTO blob_chunk (zoid, tid, chunk_num, chunk) '
                                f'VALUES ({oid}, {tid}, {n}, {sign})', (data[start:start + size],))
                pieces = list(self.adapter.chunks.read(session, oid, tid))
            with self.subTest(size):
                self.assertEqual(b''.join(pieces), data)
                self.assertLessEqual(max(map(len, pieces)), PIECE_BYTES)


class OnServer(Suite):
    """What can be cut off, and what messages there are."""

    def counted(self, session):
        """Count the messages of a session."""
        counts = Counter()
        run, results, every = session.run, session.results, session.all

        def count(act):
            def counting(*arguments):
                counts['messages'] += 1
                return act(*arguments)
            return counting
        session.run, session.results, session.all = count(run), count(results), count(every)
        return counts

    def messages(self, files):
        session = self.adapter.connect()
        self.addCleanup(self.close, session)
        counts = self.counted(session)
        self.commit(files, session=session, oids=[self.next_oid()])
        return counts['messages']

    def next_oid(self):
        self.oid = getattr(self, 'oid', 1000) + 1
        return self.oid

    def test_messages(self):
        """A small blob travels with what is sent anyway; others take what the pieces need."""
        self.adapter.epoch_table.is_time_to_look = lambda: False
        plain = self.messages({})
        self.assertEqual(self.messages({self.next_oid(): self.file(bytes(SMALL))}), plain)
        self.assertEqual(self.messages({self.next_oid(): self.file(b'x' * 1000) for _ in range(50)}), plain)
        self.assertEqual(self.messages({self.next_oid(): self.file(b'x' * MB)}), plain + 1)
        more = self.messages({self.next_oid(): self.file(b'x' * 20 * MB)}) - plain
        self.assertLessEqual(more, 20 * 2)      # the smaller the packet, and the more a byte takes in it

    def test_messages_of_a_read(self):
        for size, most in (0, 1), (1000, 1), (MB, 1), (4 * MB, 1), (20 * MB, 20):
            tid = self.commit({(oid := self.next_oid()): self.file(bytes(size))})
            with self.session() as session:
                counts = self.counted(session)
                self.assertEqual(sum(map(len, self.adapter.chunks.read(session, oid, tid))), size)
            self.assertLessEqual(counts['messages'], most, size)

    def test_cut_off_at_each_message(self):
        """Killed before each message and in it: nothing is left, or all of it is there, and outcome tells which."""
        for data in b'small', os.urandom(3 * MB):
            for at in range(20):
                oid, finishing = self.next_oid(), False
                session = self.adapter.connect()
                self.kill_at(session, at)
                commit = None
                try:
                    commit = self.begin({oid: self.file(data)}, session=session)
                    finishing = True
                    tid, _ = commit.finish()
                except StorageError as e:
                    self.assertIsInstance(e, Disconnected)
                    if finishing:
                        with self.session() as other:
                            self.assertIsNone(commit.outcome(other, [oid]))
                    self.assertEqual(self.until_gone(oid), [])
                else:
                    self.assertEqual(self.read(oid, tid), data)
                    break
                finally:
                    session.close()
            self.assertGreater(at, 1)

    def kill_at(self, session, at):
        """End a session's connection before its message number `at`."""
        [[connection]] = session.all('SELECT CONNECTION_ID()')
        left = at
        send = session._do

        def do(act, *arguments):
            nonlocal left
            if left == 0:
                with closing(self.new_watch()) as watch:
                    watch.rows(f'KILL {connection}')
                    watch.until(lambda: not watch.rows(
                        f'SELECT 1 FROM information_schema.processlist WHERE id = {connection}'))
            left -= 1
            return send(act, *arguments)
        session._do = do

    def until_gone(self, oid):
        return [row for row in self.rows() if row[0] == oid or row[0] < 0]

    def test_answer_of_finish_is_lost(self):
        """It was committed, and the chunks with it."""
        for data in b'small', os.urandom(3 * MB):
            commit = self.begin({(oid := self.next_oid()): self.file(data)})
            tid, _ = commit.finish()
            with self.session() as other:
                self.assertEqual(commit.outcome(other, [oid]), tid)
            self.assertEqual(self.read(oid, tid), data)

    def test_nobody_sees_or_meets_what_waits(self):
        """Two send blobs of one object at once, and others commit, read and delete beside them."""
        tid = self.commit({1: self.file(b'x' * MB), 2: self.file(b'y')})
        one = self.adapter.connect()
        self.addCleanup(one.close)
        commit = self.adapter.commit_type(self.adapter, one, Metadata(b'', b'', b'', False), None)
        commit.send_blobs({1: self.file(bytes(2 * MB)), 3: self.file(bytes(MB))}, {})
        with self.session() as other:
            other.run('SET SESSION innodb_lock_wait_timeout = 1')
            other.run('SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED')
            other.run('DELETE FROM object_state WHERE zoid = 2')
            # The constraint holds, and what waits is not seen.
            self.assertEqual({row[0] for row in self.rows()}, {1})
        new = self.commit({1: self.file(b'z' * 3 * MB)}, bases={1: tid})
        self.assertEqual(self.read(1, new), b'z' * 3 * MB)
        one.rollback()
        self.assertEqual(len(self.rows()), 3 + self.keep_history)

    def test_constraint_holds_afterwards(self):
        session = self.adapter.connect()
        self.addCleanup(session.close)
        self.commit({1: self.file(bytes(2 * MB))}, session=session)
        self.assertEqual(session.all('SELECT @@foreign_key_checks'), [(1,)])
        session.run('DELETE FROM object_state')
        self.assertEqual(self.rows(), [])

    def test_small_messages(self):
        """The server takes no more in a message than relstore can do with, and what is sent is twice as long in SQL."""
        if self.layer is not WholeRowsLayer:
            return      # the server is not this test's alone
        with closing(self.new_watch()) as watch:
            [[before]] = watch.rows('SELECT @@GLOBAL.max_allowed_packet')
            watch.rows(f'SET GLOBAL max_allowed_packet = {MB}')
            try:
                self.open()
                self.assertEqual(self.adapter.packet, MB)
                for data in bytes(5 * MB + 1), os.urandom(SMALL), os.urandom(5 * MB):
                    tid = self.commit({(oid := self.next_oid()): self.file(data)})
                    self.assertEqual(self.read(oid, tid), data)
            finally:
                watch.rows(f'SET GLOBAL max_allowed_packet = {before}')

    def test_finish_does_not_wait_for_the_bytes(self):
        """A blob of 100 MB takes finish far less time than it takes to write it."""
        if self.adapter.logs_whole_rows:
            return      # what is logged at the commit grows with it
        began = time.monotonic()
        commit = self.begin({1: self.file(bytes(100 * MB))})
        voted = time.monotonic()
        commit.finish()
        self.assertLess(4 * (time.monotonic() - voted), voted - began)


# A server that logs whole rows, where chunks wait in a temporary table.
WholeRowsLayer = SharedServer(
    'WholeRowsLayer', __name__, lambda: MariaDBServer(
        {'log_bin': 'log', 'server_id': 7, 'binlog_format': 'ROW'}) if mariadb_programs() else None, require_mariadb)


class WholeRowsHistoryPreserving(MySQLdbHistoryPreserving):
    layer = WholeRowsLayer


class WholeRowsHistoryFree(PyMySQLHistoryFree):
    layer = WholeRowsLayer


WHOLE_ROWS = WholeRowsHistoryPreserving, WholeRowsHistoryFree

cases(globals(), Suite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
cases(globals(), OnServer, backends=(*MYSQL, *WHOLE_ROWS))
del Suite, OnServer
