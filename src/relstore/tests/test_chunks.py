"""The data of blobs in the database: how it gets there with a commit, and back.

Commits are driven on the adapter, as commit.Transaction does it.
"""
from contextlib import suppress
from unittest.mock import patch

from ZODB.POSException import POSKeyError, UndoError

from relstore.adapters import chunks
from relstore.tests.support.backends import PGBOUNCER, cases
from relstore.tests.support.blob_commits import blob, commit_blobs, pieces, voting
from relstore.tests.support.blob_suite import MB, BlobSuite
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.records import state
from relstore.tests.support.server_suite import POSTGRESQL


class Stored(BlobSuite):

    def sizes(self) -> set[int]:
        """What is special: edges of pieces, and of chunks where there are some."""
        chunk = getattr(self.storage.database.adapter, 'blob_chunk_bytes', 100_000)
        return {0, 1} | {times * edge + more for edge in (chunks.PIECE_BYTES, chunk)
                         for times in (1, 2) for more in (-1, 0, 1)}

    def test_sizes(self):
        with patch.object(chunks, 'PIECE_BYTES', 100_000):
            for size in sorted(self.sizes()):
                with self.subTest(size=size):
                    data = self.data(size)
                    self.assertBlob(*self.store(data), data)

    def test_pieces(self):
        """No more than PIECE_BYTES are in memory at a time."""
        with patch.object(chunks, 'PIECE_BYTES', 100_000):
            oid, tid = self.store(self.data(250_000))
            found = pieces(self.storage, oid, tid)
        self.assertEqual(sum(map(len, found)), 250_000)
        self.assertLessEqual(max(map(len, found)), 100_000)

    def test_a_large_one(self):
        data = self.data(20 * MB + 12345)
        self.assertBlob(*self.store(data), data)

    def test_several(self):
        """Small ones and large ones, in one transaction; beside other objects."""
        for sizes in (10, 0, 20_000), (10, 0, 3 * MB, 1, 300_000, chunks.PIECE_BYTES, 5, 2 * MB, 9 * MB, 0):
            blobs = {self.new_oid(): self.data(size) for size in sizes}
            other = self.new_oid()
            files = {oid: self.file(data) for oid, data in blobs.items()}
            self.random.shuffle(oids := list(files))
            tid = commit_blobs(self.storage, {oid: files[oid] for oid in oids}, states={other: state(1)})
            for oid, data in blobs.items():
                self.assertBlob(oid, tid, data)
            self.assertIsNone(blob(self.storage, other, tid))

    def test_with_states_that_are_sent_ahead(self):
        self.storage.database.adapter.message_size = 10_000
        for size in 10, 100_000:
            data, others = self.data(size), {self.new_oid(): state(n) + b' ' * 500 for n in range(100)}
            oid, tid = self.store(data, states=others)
            self.assertBlob(oid, tid, data)
            for other, record in others.items():
                with self.storage.database.pool.session() as session:
                    self.assertEqual(self.storage.database.adapter.load_now(session, other), (record, tid))

    def test_there_is_none(self):
        oid, tid = self.store(b'')
        for revision in (oid, tid - 1), (oid, tid + 1), (oid + 1, tid):
            self.assertEqual(pieces(self.storage, *revision), [])
            self.assertIsNone(self.size(*revision))
        self.assertBlob(oid, tid, b'')

    def test_whether_there_are_any(self):
        def there():
            return self.storage.database.pool.attempt(self.storage.database.adapter.chunks.there)
        self.assertFalse(there())
        self.store(b'')
        self.assertTrue(there())

    def test_changed(self):
        """With history both revisions are there; without, the one before is gone."""
        orphans = self.orphans()
        for sizes in (10, 20), (3 * MB, 20), (0, 5 * MB), (5 * MB, 3 * MB):
            with self.subTest(sizes=sizes):
                first, second = map(self.data, sizes)
                oid, before = self.store(first)
                _, tid = self.store(second, oid, before)
                self.assertBlob(oid, tid, second)
                if self.keep_history:
                    self.assertBlob(oid, before, first)
                else:
                    self.assertIsNone(blob(self.storage, oid, before))
                self.assertEqual(self.orphans(), orphans)

    def test_a_tid_that_is_given(self):
        oid, tid = self.store(b'1')
        for data in b'small', self.data(MB):
            tid += 1000
            self.assertEqual(self.store(data, oid, tid - 1000, tid=tid), (oid, tid))
            self.assertBlob(oid, tid, data)

    def test_rolled_back(self):
        """After the vote nothing is left; nor after the blobs were sent."""
        before = self.orphans()
        oid, tid = self.store(b'before')
        for data in b'small', self.data(6 * MB):
            with voting(self.storage, {oid: self.file(data)}, bases={oid: tid}):
                pass
            with suppress(AssertionError), voting(self.storage, {oid: self.file(data)}, bases={oid: tid - 1}):
                self.fail('is a conflict')
            adapter = self.storage.database.adapter
            with self.storage.database.pool.session() as session:
                adapter.commit_type(adapter, session, None, None).send_blobs({oid: self.file(data)}, {})
            self.assertBlob(oid, tid, b'before')
            self.assertEqual(self.orphans(), before)

    def test_nobody_sees_it_before_the_end(self):
        oid = self.new_oid()
        with voting(self.storage, {oid: self.file(self.data(MB))}) as commit:
            self.assertEqual(self.rows(oid), 0)
            tid, _ = commit.finish()
        self.assertEqual(self.size(oid, tid), MB)

    def test_replaced_or_packed_while_it_is_read(self):
        """Then it ends with an error, or goes on with what it was: it is no mixture."""
        first, second = self.data(3 * MB), self.data(3 * MB)
        oid, before = self.store(first)
        with patch.object(chunks, 'PIECE_BYTES', MB), self.storage.database.pool.session() as session:
            reading = self.storage.database.adapter.chunks.read(session, oid, before)
            found = next(reading)
            self.store(second, oid, before)
            if self.keep_history:
                self.storage.database.pool.attempt(
                    lambda other: other.run(f'DELETE FROM object_state WHERE zoid = {oid} AND tid = {before}'))
            with suppress(POSKeyError):
                for piece in reading:
                    found += piece
                self.assertEqual(len(found), 3 * MB)
        self.assertTrue(first.startswith(found))

    def test_a_chunk_is_missing(self):
        oid, tid = self.store(self.data(100_000))
        self.storage.database.pool.attempt(
            lambda session: session.run(f'UPDATE blob_chunk SET chunk_num = chunk_num + 1 WHERE zoid = {oid} '
                                        'AND chunk_num = (SELECT max(n.chunk_num) FROM '
                                        f'(SELECT chunk_num FROM blob_chunk WHERE zoid = {oid}) n)'))
        with self.assertRaises(POSKeyError):
            pieces(self.storage, oid, tid)


class Chosen(BlobSuite):
    """The tid is known before the end."""

    def test_it_is_the_one(self):
        for data in None, b'small', self.data(MB):
            oid = self.new_oid()
            files = {} if data is None else {oid: self.file(data)}
            with voting(self.storage, files, states={} if files else {oid: state(1)}) as commit:
                tid = commit.choose_tid()
                self.assertEqual(commit.choose_tid(), tid)
                self.assertEqual(commit.finish()[0], tid)
            self.assertEqual(blob(self.storage, oid, tid), data)
            self.assertEqual(self.storage.database.pool.attempt(self.storage.database.adapter.last_tid), tid)

    def test_one_that_is_given(self):
        oid, tid = self.store(b'')
        with voting(self.storage, {oid: self.file(b'x')}, bases={oid: tid}, tid=tid + 1000) as commit:
            self.assertEqual(commit.choose_tid(), tid + 1000)
            self.assertEqual(commit.finish()[0], tid + 1000)

    def test_given_up(self):
        oid, tid = self.store(b'')
        with voting(self.storage, {oid: self.file(b'x')}, bases={oid: tid}) as commit:
            self.assertGreater(commit.choose_tid(), tid)
        self.assertBlob(*self.store(b'y', oid, tid), b'y')


class Copied(BlobSuite):
    """An undo repeats the blob of an earlier revision."""

    def copied(self, data: bytes) -> tuple[int, list[int]]:
        """Return an oid, and the tids: a blob, another, and the first again."""
        oid, first = self.store(data)
        _, second = self.store(b'another', oid, first)
        return oid, [first, second, commit_blobs(self.storage, bases={oid: second}, copies={oid: first})]

    def remove(self, oid: int, tid: int) -> None:
        self.storage.database.pool.attempt(
            lambda session: session.run(f'DELETE FROM object_state WHERE zoid = {oid} AND tid = {tid}'))

    def test_copied(self):
        for data in b'', b'small', self.data(5 * MB):
            oid, tids = self.copied(data)
            for tid, expected in zip(tids, (data, b'another', data), strict=True):
                self.assertBlob(oid, tid, expected)

    def test_one_of_both_is_removed(self):
        before = self.orphans()
        for number in 0, 2:
            oid, tids = self.copied(b'shared')
            self.remove(oid, tids.pop(number))
            self.assertBlob(oid, tids[0 if number else 1], b'shared')
            self.remove(oid, tids[0])
            self.remove(oid, tids[1])
            self.assertEqual((self.orphans(), self.rows(oid)), (before, 0))

    def test_with_new_ones(self):
        """And one that has none."""
        oid, first = self.store(b'1')
        _, second = self.store(b'2', oid, first)
        new, none = self.new_oid(), self.new_oid()
        base = commit_blobs(self.storage, states={none: state(1)})
        tid = commit_blobs(self.storage, {new: self.file(b'3')}, bases={oid: second, none: base},
                           copies={oid: first, none: base})
        self.assertBlob(oid, tid, b'1')
        self.assertBlob(new, tid, b'3')
        self.assertEqual(self.rows(none), 0)

    def test_what_was_packed(self):
        oid, first = self.store(b'1')
        _, second = self.store(b'2', oid, first)
        self.remove(oid, first)
        with self.assertRaises(UndoError):
            commit_blobs(self.storage, bases={oid: second}, copies={oid: first})
        self.assertBlob(oid, second, b'2')


cases(globals(), Stored, Chosen, backends=POSTGRESQL, each_driver=True)
cases(globals(), Stored, Chosen, backends=PGBOUNCER)
cases(globals(), Stored, backends=ORACLE)
cases(globals(), Copied, backends=POSTGRESQL[::2] + PGBOUNCER[:1], each_driver=True)
del BlobSuite, Stored, Chosen, Copied
