"""What is recorded of blobs, in their transaction: size and digest. Data that is otherwise is refused."""
import hashlib
import io
import os
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import transaction
from transaction import TransactionManager
from ZODB.blob import Blob
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64

from relstore.adapters.chunks import Record
from relstore.adapters.mysql_messages import LIST
from relstore.blobs import shared
from relstore.errors import ConfigurationError, DamagedBlob
from relstore.tests.support.backends import EITHER_MODE, OTHER_MODE, cases
from relstore.tests.support.blob_site import LARGE, BlobSite


def record(data):
    return len(data), hashlib.sha256(data).digest()


class Suite(BlobSite):

    def ask(self, sql, storage=None):
        return (storage or self.storage).database.pool.attempt(lambda session: session.all(sql))

    def change(self, sql, *values):
        sign = '?' if self.storage.database.adapter.name == 'sqlite' else '%s'
        self.storage.database.pool.attempt(lambda session: session.run(sql.replace('?', sign), values))

    def records(self, storage=None):
        """Return what is recorded: (oid, tid) -> (size, digest)."""
        rows = self.ask('SELECT zoid, tid, size, digest FROM relstore_blob', storage)
        return {(p64(oid), p64(tid)): (size, bytes(digest)) for oid, tid, size, digest in rows}

    def damage(self, oid, data):
        """Put other data where a blob's is."""
        raise NotImplementedError

    def lose(self, revision):
        """Remove it."""
        raise NotImplementedError

    # Recorded

    def test_stored(self):
        """In the transaction of the blob; without history that of the last revision."""
        wanted = {}
        for size in 0, 1, 1000, len(LARGE):
            revision = self.put(LARGE[:size])
            wanted = (wanted if self.keep_history else {}) | {revision: record(LARGE[:size])}
            self.assertEqual(self.records(), wanted)

    def test_many_in_one_transaction(self):
        """More than travel in one message of MySQL's, and replaced by others."""
        for text in b'a', b'b':
            with self.db.transaction() as connection:
                root = connection.root()
                for n in range(LIST + 20):
                    with root.setdefault(f'{n}', Blob()).open('w') as file:
                        file.write(text * n)
            with self.db.transaction() as connection:
                blobs = [connection.root()[f'{n}'] for n in range(LIST + 20)]
                for blob in blobs:
                    blob._p_activate()
                wanted = {(blob._p_oid, blob._p_serial): record(n * text) for n, blob in enumerate(blobs)}
            found = self.records()
            self.assertEqual({revision: found[revision] for revision in wanted}, wanted)
        self.assertEqual(len(found), len(wanted) * (1 + self.keep_history))

    def test_aborted(self):
        revision = self.put(b'before')
        instance, path = self.storage.new_instance(), self.here / 'upload'
        self.addCleanup(instance.release)
        path.write_bytes(LARGE)
        instance.poll_invalidations()
        state, tid = instance.load(revision[0])
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        instance.storeBlob(revision[0], tid, state, str(path), '', txn)
        instance.tpc_vote(txn)
        instance.tpc_abort(txn)
        self.assertEqual(self.records(), {revision: record(b'before')})

    def test_a_vote_that_is_asked_again(self):
        with self.deadlock():
            revision = self.put(LARGE)
        self.assertEqual(self.records(), {revision: record(LARGE)})

    def test_undone(self):
        """What an undo repeats has the same record; or none, where that has none."""
        if not self.keep_history:
            self.skipTest('needs history')
        first, second = self.put(LARGE), self.put(b'two')
        self.db.undo(self.db.undoInfo(0, 1)[0]['id'])
        transaction.commit()
        with self.db.transaction() as connection:
            blob = connection.root()['blob']
            blob._p_activate()
            third = blob._p_oid, blob._p_serial
        wanted = {first: record(LARGE), second: record(b'two'), third: record(LARGE)}
        self.assertEqual(self.records(), wanted)
        self.change(f'DELETE FROM relstore_blob WHERE tid = {u64(second[1])}')
        self.db.undo(self.db.undoInfo(0, 1)[0]['id'])
        transaction.commit()
        del wanted[second]
        self.assertEqual(self.records(), wanted)
        self.forget_files()
        self.assertEqual(self.get(), b'two')

    def test_imported(self):
        self.put(LARGE)
        with self.db.transaction() as connection:
            root = connection.root()
            exported = io.BytesIO()
            connection.exportFile(root['blob']._p_oid, exported)
            exported.seek(0)
            root['copy'] = connection.importFile(exported)
        with self.db.transaction() as connection:
            blob = connection.root()['copy']
            blob._p_activate()
            revision = blob._p_oid, blob._p_serial
        self.assertEqual(self.records()[revision], record(LARGE))

    def test_copied(self):
        """As each revision of the source is, also one that an undo has made."""
        source = FileStorage(str(self.here / 'Data.fs'), blob_dir=str(self.here / 'source'))
        db = self.new_db(source)
        revisions = [self.put(data, db=db) for data in (LARGE, b'two')]
        db.undo(db.undoInfo(0, 1)[0]['id'])
        transaction.commit()
        with db.transaction() as connection:
            blob = connection.root()['blob']
            blob._p_activate()
            revisions.append((blob._p_oid, blob._p_serial))
        copy = self.opened('copy', blob_dir=str(self.here / 'copy'))
        copy.copyTransactionsFrom(source)
        wanted = dict(zip(revisions, map(record, (LARGE, b'two', LARGE)), strict=True))
        last = {revisions[-1]: wanted[revisions[-1]]}
        self.assertEqual(self.records(copy), wanted if self.keep_history else last)
        again = self.opened('again', blob_dir=str(self.here / 'again'))
        again.copyTransactionsFrom(copy)
        self.assertEqual(self.records(again), self.records(copy))

    # Removed

    def test_packed(self):
        self.put(LARGE)
        last, kept = self.put(b'two'), self.put(b'kept', 'kept')
        report = self.storage.pack(self.later())
        self.assertEqual((report.blobs, report.blob_bytes), (1, len(LARGE)) if self.keep_history else (0, 0))
        self.assertEqual(self.records(), {last: record(b'two'), kept: record(b'kept')})
        with self.db.transaction() as connection:
            del connection.root()['blob']
        self.assertIn('  1 revision of blobs, with 3 bytes of data, would go with them.\n',
                      self.command('pack', '--days', '0', '--dry-run'))
        self.assertEqual(len(self.records()), 2)
        report = self.storage.pack(self.later())
        self.assertEqual((report.blobs, report.blob_bytes), (1, 3))
        self.assertEqual((report.files, report.file_bytes), (1, 3) if self.shared else (0, 0))
        self.assertEqual(self.records(), {kept: record(b'kept')})

    def test_pack_tells(self):
        """How many bytes of blobs go: as far as they are recorded, and of files as they are."""
        lost = self.put(b'unrecorded', 'unrecorded')
        self.put(LARGE)
        self.put(LARGE, 'kept')
        self.change(f'DELETE FROM relstore_blob WHERE zoid = {u64(lost[0])}')
        with self.db.transaction() as connection:
            root = connection.root()
            del root['blob'], root['unrecorded']
        self.later()
        told = '  1 revision of blobs, with 3.3 MB of data, {} with them.\n'
        self.assertIn(told.format('would go'), self.command('pack', '--days', '0', '--dry-run'))
        out = self.command('pack', '--days', '0')
        self.assertIn(told.format('went'), out)
        self.assertEqual('  2 files of blobs, 3.3 MB, belonged to nothing' in out, self.shared)
        self.assertEqual(self.get('kept'), LARGE)

    def later(self):
        self.storage.database.adapter.writers.set('relstore')
        return time.time() + 1

    def test_deleted(self):
        """By a collector outside: with history the revisions before are there still."""
        kept, gone = self.put(b'kept', 'kept'), self.put(LARGE)
        with self.db.transaction() as connection:
            del connection.root()['blob']
        instance = self.storage.new_instance()
        self.addCleanup(instance.release)
        instance.poll_invalidations()
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        instance.deleteObject(*gone, txn)
        instance.tpc_vote(txn)
        instance.tpc_finish(txn)
        there = [kept, gone] if self.keep_history else [kept]
        self.assertEqual(set(self.records()), set(there))
        chunks = {(p64(oid), p64(tid)) for oid, tid in self.ask('SELECT DISTINCT zoid, tid FROM blob_chunk')}
        self.assertEqual(chunks, set() if self.shared else set(there))
        self.assertEqual(self.get('kept'), b'kept')

    def test_emptied(self):
        self.put(LARGE)
        self.storage.zap_all()
        self.assertEqual(self.records(), {})

    def test_a_database_without_the_table(self):
        """As an older relstore has left it: it is made, and what is there already has no record."""
        self.put(LARGE)
        self.change('DROP TABLE relstore_blob')
        for options in {'create_schema': False}, {'read_only': True}:
            with self.assertRaisesRegex(ConfigurationError, 'lacks relstore_blob'):
                self.opened(**options)
        storage = self.opened()
        self.assertEqual(self.records(), {})
        self.forget_files()
        db = self.new_db(storage)
        self.assertEqual(self.get(db=db), LARGE)
        revision = self.put(b'new', 'new', db)
        self.assertEqual(self.records(), {revision: record(b'new')})

    # Used

    def test_nothing_is_recorded(self):
        """As of RelStorage's blobs. Without history there may be a record of another revision, which says nothing."""
        for sql in ('DELETE FROM relstore_blob', 'UPDATE relstore_blob SET tid = tid - 1, size = 1'):
            if self.keep_history and sql.startswith('UPDATE'):
                continue
            for data in b'', b'small', LARGE:
                with self.subTest(sql, size=len(data)):
                    self.put(data)
                    self.change(sql)
                    self.forget_files()
                    self.assertEqual(self.get(db=self.new_db(self.opened())), data)

    def refused(self, revision, *words):
        """Nothing is served of a revision, and nothing is kept of it; the error says these words."""
        storage = self.opened()
        for call in storage.loadBlob, storage.openCommittedBlobFile:
            with self.assertRaises(DamagedBlob) as caught:
                call(*revision)
            for word in f'{u64(revision[0]):#x}', f'{u64(revision[1]):#x}', 'damaged', *words:
                self.assertIn(word, str(caught.exception))
            self.assertNotIsInstance(caught.exception, POSKeyError)
        if not self.shared:
            self.assertEqual([name for name in self.names() if name.endswith('.blob')], [])
            left = [path for path in Path(self.here / 'blobs' / '.relstore').rglob('*') if path.name != '.lock']
            self.assertEqual([path for path in left if path.is_file()], [])

    def test_another_size(self):
        for data in b'small', LARGE:
            revision = self.put(data)
            for other in data[:-1], data[:len(data) // 2], b'', data + b'x', data + LARGE:
                with self.subTest(size=len(data), other=len(other)):
                    self.forget_files()
                    self.damage(revision[0], other)
                    self.refused(revision, f'{len(data):,} bytes were committed', f'{len(other):,} are there')
            self.damage(revision[0], data)
            self.assertEqual(self.get(db=self.new_db(self.opened())), data)
            with self.db.transaction() as connection:
                del connection.root()['blob']


    # Checked

    def test_check(self):
        """What is wrong is told, and nothing else is touched."""
        names = 'whole', 'empty', 'cut', 'longer', 'gone', 'altered'
        revisions = {name: self.put(b'' if name == 'empty' else LARGE, name) for name in names}
        self.forget_files()
        self.assertIn('6 revisions of blobs, 16.4 MB: 0 missing, 0 of another size, 0 altered.', self.look('--check'))
        self.damage(revisions['cut'][0], LARGE[:100])
        self.damage(revisions['longer'][0], LARGE + b'x')
        self.damage(revisions['altered'][0], LARGE[:-1] + bytes([LARGE[-1] ^ 1]))
        self.lose(revisions['gone'])
        recorded = self.records()
        for options in (), ('--fix',):
            out = self.look('--check', *options, status=1)
            self.assertIn('1 missing, 2 of another size, 1 altered.', out)
            for name, what in (
                    ('gone', 'missing'), ('cut', '100 bytes instead of 3,276,800'),
                    ('longer', '3,276,801 bytes instead of 3,276,800'), ('altered', 'altered')):
                oid, tid = map(u64, revisions[name])
                self.assertIn(f'object {oid:#x}, tid {tid:#x}: {what}\n', out)
            self.assertEqual(out.count('object '), 4)
            self.assertEqual(self.records(), recorded)
        self.assertEqual(self.get('whole'), LARGE)

    def test_what_has_no_record(self):
        """It is told; --fix reads and records it; without history also where there is one of a revision before."""
        first, second = self.put(LARGE), self.put(b'second', 'second')
        wanted = {first: record(LARGE), second: record(b'second')}
        self.change(f'DELETE FROM relstore_blob WHERE zoid = {u64(first[0])}')
        if not self.keep_history:
            self.change('UPDATE relstore_blob SET tid = tid - 1')
        before = self.records()
        count = 2 - self.keep_history
        self.assertIn(f'Nothing is recorded of {count} other', self.look('--check'))
        self.assertIn('0 is missing.', self.look('--fix'))
        self.assertEqual(self.records(), before)
        self.assertIn(f'Recorded what {count} other', self.look('--check', '--fix'))
        self.assertEqual(self.records(), wanted)
        self.assertNotIn('ecorded', self.look('--check'))

    def test_record_of_what_was_replaced(self):
        """By another process, while it was read: the record that is there by then stays."""
        oid, tid = map(u64, self.put(LARGE))
        chunks, attempt = self.storage.database.adapter.chunks, self.storage.database.pool.attempt
        newer = self.put(b'newer')
        before = self.records()
        attempt(chunks.add_record, oid, tid, Record(1, bytes(32)))
        attempt(chunks.add_record, *map(u64, newer), Record(1, bytes(32)))
        attempt(chunks.add_record, oid + 1000, tid, Record(1, bytes(32)))
        self.assertEqual(self.records(), before)

    def test_packed_while_it_is_checked(self):
        """It is not missing."""
        self.put(LARGE)
        self.put(b'newer')
        database = self.storage.database
        real, packed = database.blobs.data, []

        def data(session, oid, tid):
            if not packed:
                packed.append(True)
                with self.db.transaction() as connection:
                    del connection.root()['blob']
                other = self.opened()
                other.database.adapter.writers.set('relstore')
                other.pack(time.time() + 1)
            return real(session, oid, tid)
        with mock.patch.object(database.blobs, 'data', data):
            self.assertIn('0 revisions of blobs', self.look('--check'))


class InDatabase(Suite):

    def damage(self, oid, data):
        if self.storage.database.adapter.name != 'postgresql':
            self.change(f'DELETE FROM blob_chunk WHERE zoid = {u64(oid)} AND chunk_num > 0')
            self.change(f'UPDATE blob_chunk SET chunk = ? WHERE zoid = {u64(oid)}', data)
            return
        self.change(f'SELECT lo_truncate(lo_open(chunk, 393216), 0) FROM blob_chunk WHERE zoid = {u64(oid)}')
        self.change(f'SELECT lo_put(chunk, 0, ?) FROM blob_chunk WHERE zoid = {u64(oid)}', data)

    def lose(self, revision):
        self.change(f'DELETE FROM blob_chunk WHERE zoid = {u64(revision[0])}')

    def test_other_bytes(self):
        for data in b'small', LARGE:
            revision = self.put(data)
            self.forget_files()
            for position in 0, len(data) - 1:
                other = bytearray(data)
                other[position] ^= 1
                self.damage(revision[0], bytes(other))
                self.refused(revision, f'{len(data):,} bytes, as many as were committed, but others')
            self.damage(revision[0], data)
            self.assertEqual(self.get(db=self.new_db(self.opened())), data)
            with self.db.transaction() as connection:
                del connection.root()['blob']

    def test_questions(self):
        """A small blob is fetched with one; a large one needs none to know its size."""
        for data, most in (b'small', 1), (LARGE, 5):
            revision = self.put(data)
            self.forget_files()
            storage = self.opened()
            with storage.database.pool.session() as session:
                kind, asked, all_ = type(session), [], type(session).all

            def counted(session, sql, *parameters, all_=all_, asked=asked):
                asked.append(sql)
                return all_(session, sql, *parameters)
            with mock.patch.object(kind, 'all', counted):
                storage.loadBlob(*revision)
            self.assertIn(len(asked), range(1, most + 1))
            self.assertNotIn(storage.database.adapter.sql.blob_size, asked)


class InDirectory(Suite):
    shared = True

    def damage(self, oid, data):
        [(_, tid)] = [revision for revision in self.records() if revision[0] == oid]
        self.damage_file((oid, tid), data)

    def lose(self, revision):
        os.unlink(self.storage.fshelper.getBlobFilename(*revision))

    def test_asked_once(self):
        """A process asks how large a blob is at its first load, and not at all where it has committed it itself."""
        revision = self.put(LARGE)
        storage = self.opened()
        storage.loadBlob(*revision)
        for known in self.storage, storage:
            with mock.patch.object(known.database.pool, 'borrow', side_effect=AssertionError):
                self.assertEqual(os.stat(known.loadBlob(*revision)).st_size, len(LARGE))
            self.damage(revision[0], LARGE[:-1])
            with mock.patch.object(known.database.pool, 'borrow', side_effect=AssertionError), \
                    self.assertRaises(DamagedBlob):
                known.loadBlob(*revision)
            self.damage(revision[0], LARGE)

    def test_asked_together(self):
        """And with it how large those are that come after it."""
        sizes = {self.put(LARGE[:number], f'blob {number}'): number for number in range(20)}
        with mock.patch.object(shared, 'ASKED_TOGETHER', 8):
            storage = self.opened()
            chunks = storage.database.adapter.chunks
            with mock.patch.object(chunks, 'sizes', side_effect=chunks.sizes) as sizes_, \
                    mock.patch.object(chunks, 'record', side_effect=AssertionError):
                for revision in sorted(sizes):
                    self.assertEqual(os.stat(storage.loadBlob(*revision)).st_size, sizes[revision])
            self.assertEqual(sizes_.call_count, 3)

    def test_a_blob_with_many_revisions(self):
        """And one of which nothing is recorded: it is served as it is."""
        revisions = [self.put(LARGE[:number]) for number in range(7)]
        other = self.put(b'other', 'other')
        self.change('DELETE FROM relstore_blob WHERE zoid = ?', u64(other[0]))
        self.damage_file(other, b'longer than that')
        for together in 1, 3, 7, 8, 100:
            with mock.patch.object(shared, 'ASKED_TOGETHER', together):
                storage = self.opened()
                for number, revision in enumerate(revisions):
                    self.assertEqual(os.stat(storage.loadBlob(*revision)).st_size, number)
                self.assertEqual(os.stat(storage.loadBlob(*other)).st_size, 16)
                self.damage_file(revisions[6], b'short')
                with self.assertRaises(DamagedBlob):
                    self.opened().loadBlob(*revisions[6])
                self.damage_file(revisions[6], LARGE[:6])

    def damage_file(self, revision, data):
        path = self.storage.fshelper.getBlobFilename(*revision)
        os.chmod(path, 0o600)
        Path(path).write_bytes(data)

    def test_an_older_view(self):
        """Without history its revision is not the recorded one any more; its file is there until a pack."""
        self.put(LARGE)
        with closing(self.db.open(TransactionManager())) as connection:
            blob = connection.root()['blob']
            self.put(b'newer', db=self.new_db(self.opened()))
            with blob.open() as file:
                self.assertEqual(file.read(), LARGE)


cases(globals(), InDatabase)
cases(globals(), InDirectory, backends=EITHER_MODE, thorough=OTHER_MODE)
del Suite, InDatabase, InDirectory
