"""Blobs on PostgreSQL, between a client and its server: messages, memory, lost connections, packs beside an undo."""
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from ZODB.POSException import POSKeyError, StorageError, UndoError
from ZODB.utils import u64

import relstore
from relstore.adapters import chunks
from relstore.adapters.base import MAX_TID
from relstore.errors import NotAllowed
from relstore.tests.support import blob_commits
from relstore.tests.support.backends import PGBOUNCER, cases
from relstore.tests.support.blob_commits import blob, commit_blobs, pieces, voting
from relstore.tests.support.blob_suite import MB, BlobSuite
from relstore.tests.support.granted import GrantedPostgreSQLPacking
from relstore.tests.support.patience import SECONDS
from relstore.tests.support.proxy import join_all_but
from relstore.tests.support.records import state
from relstore.tests.support.refusals import Refusals
from relstore.tests.support.server_suite import POSTGRESQL
from relstore.tests.support.servers import PostgreSQLServer, SharedServer, require_postgresql
from relstore.tests.support.watch import Watch

FEW_LOCKS = {'max_connections': 20, 'max_locks_per_transaction': 10}
ROW_IS_WAITED_FOR = "EXISTS (SELECT FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'tuple'))"


class GrantedPostgreSQLHistoryFree(GrantedPostgreSQLPacking):
    keep_history = False


class Proxied(BlobSuite):

    def setUp(self):
        super().setUp()
        self.addCleanup(join_all_but, threading.enumerate())
        self.proxy = self.new_proxy()
        self.proxy.start()
        self.addCleanup(self.proxy.stop)
        self.mine = relstore.RelStore(self.address_through(self.proxy), keep_history=self.keep_history)
        self.addCleanup(self.mine.close)


class Messages(Proxied):

    def test_prepared(self):
        """To plan what reads a small blob, or commits one, took longer than to run it."""
        oid = self.new_oid()
        tid = commit_blobs(self.mine, {oid: self.file(b'small')})
        self.assertEqual(blob(self.mine, oid, tid), b'small')
        with self.mine.database.pool.session() as session:
            wanted = ['lo_get']
            if session.binds:
                wanted += ['lo_from_bytea', 'relstore_finish', 'INTO "public".blob_chunk']
            used = ';'.join(text for text, in session.all(
                'SELECT statement FROM pg_prepared_statements WHERE generic_plans + custom_plans > 0'))
            self.assertEqual([name for name in wanted if session.prepared and name not in used], [])

    def cost(self, *blobs: int, **more) -> int:
        """Return the round trips of a commit with blobs of these sizes."""
        files = {self.new_oid(): self.file(self.data(size)) for size in blobs}
        with self.mine.database.pool.session():     # there is one
            pass
        self.proxy.reset()
        commit_blobs(self.mine, files, **more)
        return self.proxy.round_trips

    def test_committed(self):
        plain = self.cost(states={self.new_oid(): state(1)})
        self.assertEqual(plain, 2)
        self.assertEqual(self.cost(0), plain)
        self.assertEqual(self.cost(64 * 1024), plain)
        self.assertEqual(self.cost(*10 * [6000]), plain)
        self.assertEqual(self.cost(*100 * [6000]), plain + 1)
        self.assertEqual(self.cost(MB), plain + 1)
        self.assertEqual(self.cost(2 * MB, MB, MB), plain + 1)

    def test_replaced(self):
        oid = self.new_oid()
        tid = commit_blobs(self.storage, {oid: self.file(b'before')})
        self.proxy.reset()
        tid = commit_blobs(self.mine, {oid: self.file(b'small')}, bases={oid: tid})
        self.assertEqual(self.proxy.round_trips, 2)
        self.proxy.reset()
        commit_blobs(self.mine, {oid: self.file(self.data(MB))}, bases={oid: tid})
        self.assertEqual(self.proxy.round_trips, 3)

    def test_read(self):
        for size, cost in (0, 1), (MB, 1), (chunks.PIECE_BYTES - 1, 1), (chunks.PIECE_BYTES + 1, 2):
            oid, tid = self.store(self.data(size))
            with self.mine.database.pool.session():
                self.proxy.reset()
            self.assertEqual(len(blob(self.mine, oid, tid)), size)
            self.assertEqual(self.proxy.round_trips, cost)


class Cut(Proxied):
    """The connection is lost in whatever message."""

    def attempt(self, data: bytes, oid: int, base: int) -> int | None:
        """Commit; return the tid, or None if it has not happened."""
        commit = None
        pool = self.mine.database.pool
        session = pool.borrow()
        try:
            commit = blob_commits.voted(self.mine, session, {oid: self.file(data)}, bases={oid: base}, copies={},
                                        states={}, tid=None)
            if self.choose:
                commit.choose_tid()
            chosen, is_sent = commit._tid, True
            try:
                tid, _ = commit.finish()
            except StorageError:
                tid = self.storage.database.pool.attempt(commit.outcome, [oid])
            self.assertIn(chosen, (None, tid) if tid else (None, chosen))
            return tid if is_sent else None
        except StorageError:
            return None
        finally:
            session.broken = True
            pool.give_back(session)
            pool.retire()

    choose = False

    def test_it_is_there_or_it_is_not(self):
        for size in 1000, 300_000:
            self.cut_everywhere(size)

    def test_with_a_chosen_tid(self):
        self.choose = True
        self.cut_everywhere(1000)

    def cut_everywhere(self, size: int) -> None:
        before = b'before'
        oid, tid = self.store(before)
        orphans = self.orphans()
        with patch.object(chunks, 'PIECE_BYTES', 100_000):
            with self.mine.database.pool.session():
                self.proxy.reset()
            data = self.data(size)
            tid, before = self.attempt(data, oid, tid), data
            self.assertTrue(tid)
            sent, received = self.proxy.sent, self.proxy.received
            done = set()
            cuts = [{'sent': max(sent * n // 12, 1)} for n in range(1, 13)]
            cuts += [{'received': max(received * n // 8, 1)} for n in range(1, 9)]
            for where in cuts:
                with self.subTest(size=size, **where):
                    data = self.data(size)
                    with self.mine.database.pool.session():
                        self.proxy.cut_after(**where)
                    new = self.attempt(data, oid, tid)
                    self.proxy.cut_after()
                    done.add(bool(new))
                    with closing(self.new_watch()) as watch:
                        watch.until_nothing_is_open()
                    tid, before = (new, data) if new else (tid, before)
                    self.assertBlob(oid, tid, before)
                    self.assertEqual(self.current(oid), tid)
                    self.assertEqual(self.orphans(), orphans)
        self.assertEqual(done, {True, False})

    def current(self, oid: int) -> int:
        return self.storage.database.pool.attempt(self.storage.database.adapter.current_tid, oid)

    def test_while_it_is_read(self):
        data = self.data(300_000)
        oid, tid = self.store(data)
        with patch.object(chunks, 'PIECE_BYTES', 100_000):
            for where in 1, 50_000, 150_000, 250_000, 299_000:
                found = b''
                with self.mine.database.pool.session():
                    self.proxy.cut_after(received=where)
                with self.assertRaises(StorageError), self.mine.database.pool.session() as session:
                    for piece in self.mine.database.adapter.chunks.read(session, oid, tid):
                        found += piece
                self.assertTrue(data.startswith(found))
                self.assertLess(len(found), len(data))


class Memory(BlobSuite):

    def test_a_large_one(self):
        """200 MB go in and out with less than 64 MB."""
        arguments, options = self.arguments(), {'keep_history': self.keep_history}
        done = subprocess.run(
            [sys.executable, '-m', blob_commits.__name__, json.dumps(['PostgreSQL', arguments, options, 200])],
            capture_output=True, text=True, env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)})
        self.assertEqual(done.returncode, 0, done.stderr)
        for kilobytes in json.loads(done.stdout):
            self.assertLess(kilobytes, 64 * 1024)


class Beside(BlobSuite):
    """What others do at the same time."""

    def test_a_row_whose_large_object_is_gone(self):
        """It is missing, and the transaction in which that was found goes on."""
        for size in 10, MB:
            oid, tid = self.store(self.data(size))
            with patch.object(chunks, 'PIECE_BYTES', MB // 4), self.storage.database.pool.session() as session:
                session.run('BEGIN')
                session.all(f'SELECT lo_unlink(chunk) FROM blob_chunk WHERE zoid = {oid}')
                with self.assertRaises(POSKeyError):
                    list(self.storage.database.adapter.chunks.read(session, oid, tid))
                self.assertEqual(session.all('SELECT 1'), [(1,)])
                session.run('ROLLBACK')
                session.run('BEGIN')
                reading = self.storage.database.adapter.chunks.read(session, oid, tid)
                found = next(reading)
                session.all(f'SELECT lo_unlink(chunk) FROM blob_chunk WHERE zoid = {oid}')
                if len(found) < size:
                    with self.assertRaises(POSKeyError):
                        next(reading)
                session.run('ROLLBACK')

    def test_emptied_where_a_large_object_is_gone(self):
        oid, _ = self.store(b'x')
        other, tid = self.store(b'y')
        orphans = self.orphans()
        self.storage.database.pool.attempt(
            lambda session: session.all(f'SELECT lo_unlink(chunk) FROM blob_chunk WHERE zoid = {oid}'))
        self.storage.zap_all()
        self.assertEqual((pieces(self.storage, other, tid), self.orphans()), ([], orphans))

    def test_several_chunks(self):
        """As an older RelStorage has made them."""
        oid, tid = self.store(b'')
        data = self.data(350_000)
        parts = [data[:100_000], b'', data[100_000:330_000], data[330_000:]]
        with self.storage.database.pool.session() as session:
            session.run(f'DELETE FROM blob_chunk WHERE zoid = {oid}')
            for number, part in enumerate(parts):
                session.run(f'INSERT INTO blob_chunk (zoid, tid, chunk_num, chunk) '
                            f"VALUES ({oid}, {tid}, {number}, lo_from_bytea(0, '\\x{part.hex()}'))")
        self.assertBlob(oid, tid, data)
        with patch.object(chunks, 'PIECE_BYTES', 100_000):
            self.assertBlob(oid, tid, data)

    def test_a_view_goes_on_reading(self):
        """Without history it stands in a snapshot, in which what is replaced is there."""
        first = self.data(300_000)
        oid, tid = self.store(first)
        adapter = self.storage.database.adapter
        with patch.object(chunks, 'PIECE_BYTES', 100_000), self.storage.database.pool.session() as session:
            adapter.poll(session, MAX_TID - 1, 1)
            reading = adapter.chunks.read(session, oid, tid)
            found = next(reading)
            self.store(b'second', oid, tid)
            self.assertTrue(found + b''.join(reading) == first)
            self.assertEqual(adapter.chunks.size(session, oid, tid), len(first))

    def test_commits_wait_for_a_chosen_tid(self):
        """It is the newest when it is committed."""
        oid = self.new_oid()
        with ThreadPoolExecutor(1) as threads, closing(self.new_watch()) as watch:
            with voting(self.storage, {oid: self.file(b'x')}) as commit:
                tid = commit.choose_tid()
                other = threads.submit(self.store, b'y')
                watch.until_somebody_waits()
                self.assertEqual(commit.finish(), (tid, 0))
            self.assertGreater(other.result(SECONDS)[1], tid)

    def test_the_outcome_of_a_chosen_tid(self):
        """It is that one, also where others have overwritten everything since, so that no row tells."""
        oid, base = self.store(b'')
        with voting(self.storage, {oid: self.file(b'x')}, bases={oid: base}) as commit:
            tid = commit.choose_tid()
            commit.finish()
        self.assertEqual(self.storage.database.pool.attempt(commit.outcome, [oid]), tid)
        self.store(b'y', oid, tid, tid=tid + 1000)
        self.assertEqual(self.storage.database.pool.attempt(commit.outcome, [oid]), tid)

    def test_a_tid_is_chosen_after_the_commits_before(self):
        """And how long that took is told."""
        oid = self.new_oid()
        with ThreadPoolExecutor(1) as threads, closing(self.new_watch()) as watch:
            first = commit_blobs(self.storage, states={oid: state(1)}, tid=u64(b'\x70' + 7 * b'\0'))
            with voting(self.storage, {self.new_oid(): self.file(b'x')}) as commit:
                watch.take_commit_lock()
                choosing = threads.submit(commit.choose_tid)
                with closing(self.new_watch()) as second:
                    second.until_somebody_waits()
                    watch.rows(f'UPDATE object_state SET tid = {first + 5} WHERE zoid = {oid}')
                    if self.keep_history:
                        watch.rows('INSERT INTO transaction (tid, username, description) '
                                   f"VALUES ({first + 5}, '', '')")
                watch.release_commit_lock()
                self.assertEqual(choosing.result(SECONDS), first + 6)
                tid, waited = commit.finish()
            self.assertEqual(tid, first + 6)
            self.assertGreater(waited, 0)


class Undone(BlobSuite):
    """Beside a pack that removes the revision whose blob is repeated."""

    def test_a_pack_beside_an_undo(self):
        """The pack waits, and leaves the large object."""
        oid, first = self.store(b'shared')
        _, second = self.store(b'another', oid, first)
        with ThreadPoolExecutor(1) as threads, closing(self.new_watch()) as watch:
            with voting(self.storage, bases={oid: second}, copies={oid: first}) as commit:
                removing = threads.submit(self.remove, oid, first)
                watch.until(ROW_IS_WAITED_FOR)
                tid, _ = commit.finish()
            removing.result(SECONDS)
        self.assertEqual(pieces(self.storage, oid, first), [])
        self.assertBlob(oid, tid, b'shared')

    def test_a_pack_before_an_undo(self):
        """It has not ended when the undo votes."""
        oid, first = self.store(b'shared')
        _, second = self.store(b'another', oid, first)
        orphans = self.orphans()
        with ThreadPoolExecutor(1) as threads, closing(self.new_watch()) as watch:
            with self.storage.database.pool.session() as packing:
                packing.run('BEGIN')
                packing.run(f'DELETE FROM object_state WHERE zoid = {oid} AND tid = {first}')
                undoing = threads.submit(commit_blobs, self.storage, bases={oid: second}, copies={oid: first})
                watch.until(ROW_IS_WAITED_FOR)
                packing.run('COMMIT')
            with self.assertRaises(UndoError):
                undoing.result(SECONDS)
        self.assertBlob(oid, second, b'another')
        self.assertEqual(self.orphans(), orphans)

    def remove(self, oid: int, tid: int) -> None:
        self.storage.database.pool.attempt(
            lambda session: session.run(f'DELETE FROM object_state WHERE zoid = {oid} AND tid = {tid}'))


class Owned(Refusals, BlobSuite):
    """A large object belongs to the role that has stored it. Here by a user of a site, who packs, too."""

    def setUp(self):
        super().setUp()
        self.watch = self.new_watch()
        self.addCleanup(self.watch.close)

    def refused(self, work, *arguments) -> None:
        with self.assertRaises(NotAllowed) as caught:
            work(*arguments)
        self.check(str(caught.exception), 'large object', 'GRANT', 'lo_compat_privileges')

    def test_all_that_a_site_does(self):
        orphans = self.orphans()
        for data in b'small', self.data(6 * MB):
            oid, first = self.store(data)
            _, second = self.store(b'another', oid, first)
            self.assertBlob(oid, second, b'another')
            if self.keep_history:
                third = commit_blobs(self.storage, bases={oid: second}, copies={oid: first})
                self.assertBlob(oid, third, data)
            self.pack(oid)
            self.assertEqual((self.rows(oid), self.orphans()), (0, orphans))

    def pack(self, oid: int) -> None:
        """A foreign key removes the rows, in the name of the owner of blob_chunk; so does the trigger what they had."""
        self.storage.database.pool.attempt(
            lambda session: session.run(f'DELETE FROM object_state WHERE zoid = {oid}'))

    def test_those_of_another_role(self):
        oid, tid = self.store(b'x')
        [[chunk]] = self.watch.rows(f'SELECT chunk FROM blob_chunk WHERE zoid = {oid}')
        self.watch.rows(f'ALTER LARGE OBJECT {chunk} OWNER TO {self.watch.one("SELECT current_user")}')
        self.refused(pieces, self.storage, oid, tid)
        self.refused(self.size, oid, tid)
        self.watch.rows('INSERT INTO relstore_garbage (pack_id, zoid, tid, since, goes) '
                        f'VALUES (1, {oid}, {tid + 1}, 0, 1), (2, {oid}, {tid}, 0, 2)')
        database = self.storage.database
        self.refused(database.pool.attempt, database.adapter.sweep, 1 if self.keep_history else 2, -1, oid)
        if not self.keep_history:
            self.refused(self.store, b'y', oid, tid)
        self.watch.rows(f'ALTER LARGE OBJECT {chunk} OWNER TO {self.user}')
        self.assertBlob(oid, tid, b'x')
        _, tid = self.store(b'y', oid, tid)
        self.assertBlob(oid, tid, b'y')


class TestFewLocks(TestCase):
    """A server with room for about 1,500 locks; each large object that is removed takes one."""
    layer = SharedServer('FewLocksForBlobsLayer', __name__, lambda: PostgreSQLServer(FEW_LOCKS), require_postgresql)
    COUNT = 5000

    def test_a_step_of_a_pack(self):
        self.layer.require(self)
        dsn = self.layer.server.create_database('few_locks')
        self.addCleanup(self.layer.server.drop_database, 'few_locks')
        for keep_history, schema in (True, 'public'), (False, 'free'):
            with closing(Watch(dsn)) as watch:
                watch.rows(f'CREATE SCHEMA IF NOT EXISTS {schema}')
                storage = relstore.RelStore(relstore.PostgreSQL(dsn, schema=schema), keep_history=keep_history)
                self.addCleanup(storage.close)
                watch.rows(f'SET search_path = {schema}')
                numbers = f'generate_series(1, {self.COUNT}) n'
                watch.rows('INSERT INTO object_state (zoid, tid, state_size, state' +
                           (f", prev_tid) SELECT n, 5, 1, 'x', 0 FROM {numbers}" if keep_history else
                            f") SELECT n, 5, 1, 'x' FROM {numbers}"))
                watch.rows('INSERT INTO relstore_garbage (pack_id, zoid, tid, since, goes) '
                           f'SELECT 1, n, 5, 0, 2 FROM {numbers}')
                watch.rows('INSERT INTO blob_chunk (zoid, tid, chunk_num, chunk) '
                           f"SELECT n, 5, 0, lo_from_bytea(0, 'x') FROM {numbers}")
                done = storage.database.pool.attempt(storage.database.adapter.sweep, 1, -1, self.COUNT)
                self.assertEqual(done, (self.COUNT, self.COUNT, 0, 0))
                for table in 'object_state', 'blob_chunk', 'pg_largeobject_metadata':
                    self.assertEqual(watch.one(f'SELECT count(*) FROM {table}'), 0)


cases(globals(), Messages, Cut, backends=POSTGRESQL, each_driver=True)
cases(globals(), Messages, Cut, backends=PGBOUNCER)
cases(globals(), Memory, Beside, backends=POSTGRESQL)
cases(globals(), Undone, backends=POSTGRESQL[::2], each_driver=True)
cases(globals(), Owned, backends=(GrantedPostgreSQLPacking, GrantedPostgreSQLHistoryFree))
del BlobSuite, Proxied, Messages, Cut, Memory, Beside, Undone, Owned
