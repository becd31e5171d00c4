"""Blobs through a storage: what a site does with them, and what goes wrong on the way."""
import os
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import transaction
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.blob import Blob
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.interfaces import IBlobStorage, IBlobStorageRestoreable
from ZODB.POSException import ConflictError, POSKeyError, StorageError, UndoError, Unsupported
from ZODB.tests.hexstorage import HexStorage
from ZODB.utils import p64, u64

from relstore.blobs import remover
from relstore.blobs.files import remove
from relstore.errors import ConfigurationError, OutcomeUnknown
from relstore.tests.support.backends import EITHER_MODE, OTHER_MODE, cases
from relstore.tests.support.blob_site import LARGE, BlobSite
from relstore.tests.support.patience import until
from relstore.tests.support.stored_blobs import StoredBlobs


class Suite(BlobSite):
    # That a pack removes which finds a blob gone: beside what is in the database.
    files_at_the_end = 0

    # What a site does

    def test_sizes(self):
        for size in 0, 1, 1000, 1 << 16, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, len(LARGE):
            self.put(LARGE[:size])
            self.forget_files()
            self.assertEqual(self.get(), LARGE[:size])

    def test_interfaces(self):
        for instance in self.storage, self.storage.new_instance():
            self.assertTrue(IBlobStorageRestoreable.providedBy(instance))
        with closing(self.opened('other', **self.nowhere)) as without:
            self.assertFalse(IBlobStorage.providedBy(without))
            for call in without.temporaryDirectory, lambda: without.loadBlob(p64(1), p64(1)):
                with self.assertRaisesRegex(Unsupported, 'blob-dir'):
                    call()
            with self.assertRaises(AttributeError):
                without.fshelper    # noqa: B018

    def test_revisions(self):
        revisions = [(*self.put(data), data) for data in (b'one', LARGE, b'')]
        self.forget_files()
        for oid, tid, data in revisions if self.keep_history else revisions[-1:]:
            with self.storage.openCommittedBlobFile(oid, tid) as file:
                self.assertEqual(file.read(), data)
        for number in 0, u64(tid) + 1:
            with self.assertRaises(POSKeyError):
                self.storage.loadBlob(oid, p64(number))

    def test_parts(self):
        revision = self.put(LARGE)
        for start, end in (0, 1), (100, 70_000), (len(LARGE) - 1, len(LARGE) + 10), (len(LARGE) + 1, 1 << 40), (5, 2):
            self.forget_files()
            for _ in range(2):
                self.assertEqual(self.storage.blob_part(*revision, start, end), LARGE[start:end])
                self.get()
        with self.assertRaises(ValueError):
            self.storage.blob_part(*revision, -1, 1)
        with self.assertRaises(POSKeyError):
            self.storage.blob_part(revision[0], p64(1), 0, 1)

    def test_an_older_view(self):
        """It reads what it sees, also where that is replaced meanwhile, and not cached."""
        if self.shared and not self.keep_history:
            self.skipTest('Its file is there until a pack.')
        self.put(LARGE)
        manager = TransactionManager()
        with closing(self.db.open(manager)) as connection:
            blob = connection.root()['blob']
            self.put(b'newer')
            self.forget_files()
            with blob.open() as file:
                self.assertEqual(file.read(), LARGE)
            manager.abort()

    def test_undo(self):
        if not self.keep_history:
            self.skipTest('needs history')
        self.put(LARGE)
        self.put(b'two')
        for expected in LARGE, b'two', LARGE:
            self.db.undo(self.db.undoInfo(0, 1)[0]['id'])
            transaction.commit()
            self.forget_files()
            self.assertEqual(self.get(), expected)
        self.storage.pack(None)
        self.forget_files()
        self.assertEqual(self.get(), LARGE)

    def test_pack(self):
        self.storage.database.adapter.writers.set('relstore')
        oid, first = self.put(LARGE)
        _, second = self.put(b'two')
        self.storage.pack(time.time() + 1)
        self.forget_files()
        self.assertEqual(self.get(), b'two')
        with self.db.transaction() as connection:
            del connection.root()['blob']
        report = self.storage.pack(time.time() + 1)
        self.forget_files()
        for tid in first, second:
            with self.assertRaises(POSKeyError):
                self.storage.loadBlob(oid, tid)
        self.assertEqual(self.names(), [])
        self.assertEqual(report.files, self.files_at_the_end)

    def test_wrapped(self):
        db = self.new_db(HexStorage(self.opened('wrapped', blob_dir=str(self.here / 'wrapped'))))
        self.put(LARGE, db=db)
        shutil.rmtree(self.here / 'wrapped' / 'tmp', ignore_errors=True)
        self.assertEqual(self.get(db=db), LARGE)

    def test_copied(self):
        """A missing file is told, and does not end the copy."""
        source = FileStorage(str(self.here / 'Data.fs'), blob_dir=str(self.here / 'source'))
        db = self.new_db(source)
        kept = self.put(LARGE, 'kept', db)
        lost = self.put(b'lost', 'lost', db)
        os.unlink(source.loadBlob(*lost))
        copy = self.opened('copy', blob_dir=str(self.here / 'copy'))
        with self.assertLogs('relstore', 'WARNING') as logs:
            copy.copyTransactionsFrom(source)
        self.assertIn('lacks the files of 1 blobs', logs.output[0])
        with copy.openCommittedBlobFile(*kept) as file:
            self.assertEqual(file.read(), LARGE)
        with self.assertRaises(POSKeyError):
            copy.loadBlob(*lost)
        self.assertEqual(os.listdir(copy.temporaryDirectory()), [])

    def test_many_threads_fetch_one(self):
        revision = self.put(LARGE)
        self.forget_files()
        found, barrier = [], threading.Barrier(8)

        def fetch():
            barrier.wait(60)
            with self.storage.new_instance().openCommittedBlobFile(*revision) as file:
                found.append(file.read() == LARGE)
        threads = [threading.Thread(target=fetch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, 8 * [True])

    # What goes wrong

    def test_the_wrong_place(self):
        self.opened(**self.elsewhere, blob_dir=str(self.here / 'elsewhere')).close()     # no blob yet
        self.put(b'x')
        with self.assertRaisesRegex(ConfigurationError, self.mend):
            self.opened(**self.elsewhere, blob_dir=str(self.here / 'elsewhere'))
        with self.assertRaisesRegex(ConfigurationError, 'blob-dir'):
            self.opened(**self.nowhere)
        self.opened().close()

    def test_emptied(self):
        """Then the blobs are gone, and their place is anybody's choice."""
        revision = self.put(LARGE)
        self.storage.zap_all()
        self.forget_files()
        if not self.shared:         # there it is a file of nothing
            with self.assertRaises(POSKeyError):
                self.storage.loadBlob(*revision)
        other = self.new_db(self.opened(**self.elsewhere, blob_dir=str(self.here / 'other')))
        self.put(b'again', db=other)
        self.assertEqual(self.get(db=other), b'again')

    def test_emptied_by_another_process(self):
        """The next blob says again where they are."""
        self.put(LARGE)
        self.opened().zap_all()
        self.storage.new_instance().poll_invalidations()
        db = self.new_db(self.storage)
        self.put(b'again', db=db)
        meta = self.storage.database.pool.attempt(self.storage.database.adapter.meta)
        self.assertEqual(meta['blobs'], self.storage.database.blobs.place)

    def test_aborted(self):
        """At each point nothing of it is left, and what was there is served."""
        self.put(b'before')
        names = self.names()
        for point in 'store', 'vote', 'finish':
            with self.subTest(point):
                instance, path = self.storage.new_instance(), self.here / 'upload'
                self.addCleanup(instance.release)
                path.write_bytes(LARGE)
                instance.poll_invalidations()
                root, tid = instance.load(p64(0))
                oid = instance.new_oid()
                record = instance.load(self.blob_oid())[0]
                txn = TransactionMetaData()
                instance.tpc_begin(txn)
                instance.storeBlob(oid, p64(0), record, str(path), '', txn)
                self.assertFalse(path.exists())
                if point != 'store':
                    instance.tpc_vote(txn)
                if point == 'finish':
                    commit = instance.committing.commit
                    with mock.patch.object(commit, 'finish', side_effect=StorageError('no')), mock.patch.object(
                            commit, 'outcome', return_value=None), self.assertRaises(StorageError):
                        instance.tpc_finish(txn)
                instance.tpc_abort(txn)
                left = set(self.names()) - set(names)       # of a finish that has failed: see test_the_same_tid_again
                self.assertEqual(len(left), int(self.shared and point == 'finish'))
                self.assertEqual(self.get(), b'before')

    def test_conflict(self):
        """Blobs cannot be resolved; the retry has the data."""
        self.put(b'before')
        manager = TransactionManager()
        with closing(self.db.open(manager)) as connection:
            for attempt in range(2):
                with connection.root()['blob'].open('w') as file:
                    file.write(LARGE)
                if not attempt:
                    self.put(b'meanwhile')
                    with self.assertRaises(ConflictError):
                        manager.commit()
                    manager.abort()
            manager.commit()
        self.forget_files()
        self.assertEqual(self.get(), LARGE)

    def test_a_vote_that_a_deadlock_ended(self):
        """It is asked again, and the server has forgotten what was sent for it."""
        with self.deadlock() as ended:
            self.put(LARGE)
        self.assertEqual(len(ended), 1)
        self.assertEqual(self.get(db=self.new_db(self.opened())), LARGE)

    def test_savepoint_and_more_in_one_transaction(self):
        with self.db.transaction() as connection:
            root = connection.root()
            root['blobs'] = PersistentMapping()
            for n in range(20):
                root['blobs'][n] = Blob(LARGE[:n * 10_000])
                if n % 7 == 0:
                    connection.transaction_manager.savepoint()
            with root['blobs'][3].open('w') as file:
                file.write(b'twice')
        self.forget_files()
        with self.db.transaction() as connection:
            for n, blob in connection.root()['blobs'].items():
                with blob.open() as file:
                    self.assertEqual(file.read(), b'twice' if n == 3 else LARGE[:n * 10_000])


    def test_undo_of_what_is_gone(self):
        """A record is never put back without its data."""
        if not self.keep_history:
            self.skipTest('needs history')
        oid, first = self.put(LARGE)
        self.put(b'two')
        undone = self.db.undoInfo(0, 1)[0]['id']
        self.forget_files()
        self.lose(oid, first)
        self.db.undo(undone)
        with self.assertRaises(UndoError):
            transaction.commit()
        transaction.abort()
        self.assertEqual(self.get(), b'two')

    def test_stored_without_data(self):
        oid, tid = self.put(LARGE)
        instance = self.storage.new_instance()
        self.addCleanup(instance.release)
        instance.poll_invalidations()
        record, _ = instance.load(oid)
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        instance.store(oid, tid, record, '', txn)
        with self.assertRaisesRegex(StorageError, 'storeBlob'):
            instance.tpc_vote(txn)
        instance.tpc_abort(txn)
        self.assertEqual(self.get(), LARGE)

    def test_restored_without_data(self):
        """A copy may lack what its source lacks, also what an undo has repeated."""
        oid, tid = self.put(LARGE)
        record, _ = self.storage.load(oid)
        copy = self.opened('copy', blob_dir=str(self.here / 'copy'))
        for number, data_tid in (1, None), (2, p64(1)):
            txn = TransactionMetaData()
            copy.tpc_begin(txn, p64(number))
            copy.restore(oid, p64(number), record, '', data_tid, txn)
            copy.tpc_vote(txn)
            copy.tpc_finish(txn)
            with self.assertRaises(POSKeyError):
                copy.loadBlob(oid, p64(number))

    def test_two_processes_at_two_places(self):
        """Both were opened before there was a blob: the second to store one is told."""
        other = self.opened(**self.elsewhere, blob_dir=str(self.here / 'elsewhere'))
        other = self.new_db(other)
        without = self.opened(**self.nowhere)
        self.put(b'first')
        with self.assertRaisesRegex(ConfigurationError, self.mend):
            self.put(b'second', 'second', other)
        txn = TransactionMetaData()
        without.tpc_begin(txn)
        oid = self.blob_oid()
        record, tid = self.storage.load(oid)
        without.store(oid, tid, record, '', txn)
        with self.assertRaisesRegex(Unsupported, 'blob-dir'):
            without.tpc_vote(txn)
        without.tpc_abort(txn)
        self.assertEqual(self.get(), b'first')

    def test_an_old_file_that_is_consumed(self):
        """It keeps its time of modification; it was not left behind by a process that was killed."""
        source = self.here / 'old'
        source.write_bytes(LARGE)
        os.utime(source, (time.time() - 10 * 86400,) * 2)
        blob = Blob()
        with self.db.transaction() as connection:
            connection.root()['blob'] = blob
            connection.add(blob)
            blob.consumeFile(str(source))
            self.opened().pack(time.time() - 86400)
        self.assertEqual(self.get(), LARGE)

    def test_command(self):
        """relstore blobs"""
        oid, tid = self.put(LARGE)
        self.put(b'other', 'other')
        self.forget_files()
        self.assertIn('2 revisions of blobs; the data of 0 is missing.', self.look())
        self.lose(oid, tid)
        out = self.look(status=1)
        self.assertIn('the data of 1 is missing:', out)
        self.assertIn(f'object {u64(oid):#x}, tid {u64(tid):#x}', out)


class InDatabase(Suite):
    """In blob_chunk."""

    def test_cache(self):
        """It holds no more than it may, is not filled by a commit unless that is wanted, and asks nothing twice."""
        storage = self.opened(blob_dir=str(self.here / 'small'), blob_cache_size=100_000)
        db = self.new_db(storage)
        revisions = [self.put(LARGE[:30_000], f'{n}', db) for n in range(9)]
        cached = {path.name for path in (self.here / 'small').rglob('*.blob')}
        for revision in 2 * revisions:
            with storage.openCommittedBlobFile(*revision) as file:
                self.assertEqual(len(file.read()), 30_000)
            sizes = [path.stat().st_size for path in (self.here / 'small').rglob('*.blob')]
            self.assertLessEqual(sum(sizes), 100_000)
        self.assertLessEqual(len(cached), 3)
        with mock.patch.object(storage.database.pool, 'borrow', side_effect=AssertionError):
            storage.loadBlob(*revisions[-1])
        filling = self.opened(blob_dir=str(self.here / 'filled'), blob_cache_fill_on_commit=True)
        oid, tid = self.put(LARGE, 'filled', self.new_db(filling))
        with mock.patch.object(filling.database.pool, 'borrow', side_effect=AssertionError):
            filling.loadBlob(oid, tid)

    def test_a_commit_waits_for_no_file(self):
        """To remove one may take the disk longer than all the rest of a commit."""
        may, gone = threading.Event(), []

        def slow(path):
            if not may.wait(60):
                raise AssertionError('the commit waits for this')
            remove(path)
            gone.append(path)

        with mock.patch.object(remover, 'WAITING', 100), mock.patch.object(remover, 'remove', slow):
            revisions = [self.put(b'small', 'small'), self.put(LARGE, 'large')]
            self.assertEqual(gone, [])
            may.set()
            self.storage.close()
        self.assertEqual([os.path.exists(path) for path in gone], [False, False])
        self.assertEqual(list((self.here / 'blobs' / '.relstore').rglob('*')), [])
        self.assertEqual(len(set(revisions)), 2)

    def test_a_file_for_which_no_thread_can_be_started(self):
        """As at the end of a program: it is removed at once."""
        with mock.patch.object(remover, 'WAITING', 100), \
                mock.patch.object(threading.Thread, 'start', side_effect=RuntimeError("can't start new thread")):
            self.put(b'small')
        left = [path.name for path in (self.here / 'blobs' / '.relstore').rglob('*') if path.is_file()]
        self.assertEqual(left, ['.lock'])

    def test_a_thread_that_ends_meanwhile(self):
        """A file is never left to a thread that has just found nothing to do."""
        removing = remover.Remover()
        with mock.patch.object(remover, 'WAITING', 100), mock.patch.object(remover, 'IDLE_SECONDS', 0.0):
            for number in range(200):
                path = self.here / str(number)
                path.touch()
                removing.remove([str(path)])
                if number % 3:
                    until(lambda path=path: not path.exists())
            until(lambda: not [path for path in self.here.iterdir() if path.name.isdigit()])
        removing.close()

    def test_many_files_at_once(self):
        """They do not pile up: who commits removes some himself."""
        with mock.patch.object(remover, 'WAITING', 3), self.db.transaction() as connection:
            for n in range(10):
                connection.root()[n] = Blob(b'%d' % n)
        self.storage.close()
        self.assertEqual(list((self.here / 'blobs' / '.relstore').rglob('*')), [])

    def test_larger_than_the_cache(self):
        storage = self.opened(blob_dir=str(self.here / 'small'), blob_cache_size=1000)
        db = self.new_db(storage)
        self.put(LARGE, db=db)
        self.assertEqual(self.get(db=db), LARGE)
        self.assertEqual([path.stat().st_size for path in (self.here / 'small').rglob('*.blob')], [])

    def test_a_chunk_is_missing(self):
        oid, tid = self.put(LARGE)
        self.forget_files()
        self.storage.database.pool.attempt(lambda session: session.run('DELETE FROM blob_chunk'))
        with self.assertRaises(POSKeyError):
            self.storage.loadBlob(oid, tid)


class InDirectory(Suite):
    """In a directory that processes share."""
    shared = True
    elsewhere = {'shared_blob_dir': False}
    files_at_the_end = 1
    mend = 'set shared-blob-dir true'

    def test_orphans(self):
        """Only those go that are older than a day, and were not replaced: that is a pack's business."""
        oid, tid = self.put(LARGE)
        path = Path(self.storage.loadBlob(oid, tid))
        self.put(b'newer')
        for number, age in (1, 2 * 86400), (2, 3600):
            orphan = Path(self.storage.fshelper.getBlobFilename(p64(1000 + number), p64(u64(tid) - number)))
            orphan.parent.mkdir(parents=True, exist_ok=True)
            orphan.write_bytes(b'orphan')
            os.utime(orphan, (time.time() - age,) * 2)
        os.utime(path, (time.time() - 3 * 86400,) * 2)
        names, of_others = self.names(), 2 + (not self.keep_history)
        self.assertIn(f'{of_others} files of nothing', self.look(status=1))
        self.assertEqual(self.names(), names)
        self.assertIn('Removed: 1.', self.look('--fix', status=1))
        self.assertEqual(len(self.names()), len(names) - 1)
        self.assertTrue(path.exists() and orphan.exists())

    def test_files_of_others(self):
        """What the directory of another site holds is never removed, nor that of a FileStorage that was not copied."""
        self.put(LARGE)
        names = self.names()
        with self.assertRaisesRegex(ConfigurationError, 'of another database'):
            self.opened('other')
        os.unlink(self.here / 'blobs' / '.relstore-database')
        empty = self.opened('empty')
        with self.assertLogs('relstore', 'WARNING') as logs:
            self.assertEqual(empty.pack(time.time() + 1).files, 0)
        self.assertIn('had blobs before relstore came', logs.output[0])
        empty.zap_all()
        self.assertEqual(self.names(), names)
        self.assertIn('is its own now', self.look('--take-over'))
        with self.assertRaisesRegex(ConfigurationError, 'of another database'):
            self.opened('other')

    def test_what_the_original_has_committed(self):
        """A copy of the database that was led to the same directory knows nothing of it, and packs."""
        self.put(b'before')
        copy = self.opened('copy', blob_dir=str(self.here / 'elsewhere'))
        copy.copyTransactionsFrom(self.storage)
        copy.database.blobs.directory = self.storage.database.blobs.directory
        revision = self.put(b'after')
        db = self.new_db(copy)
        with db.transaction() as connection:
            connection.root()['n'] = 1
        copy.pack(time.time() + 1)
        with self.storage.openCommittedBlobFile(*revision) as file:
            self.assertEqual(file.read(), b'after')

    def test_the_same_tid_again(self):
        """The files of a failed commit may be those of another one by then."""
        oid, _ = self.put(b'before')
        instance = self.vote(oid, b'failed')
        commit = instance.committing.commit
        placed = mock.Mock(wraps=self.storage.database.blobs.directory.place)
        with mock.patch.object(self.storage.database.blobs.directory, 'place', placed), \
                mock.patch.object(commit, 'finish', side_effect=StorageError('no')), \
                mock.patch.object(commit, 'outcome', return_value=None), self.assertRaises(StorageError):
            instance.tpc_finish(instance.committing.metadata)
        path = Path(self.storage.fshelper.getBlobFilename(oid, p64(placed.call_args[0][1])))
        path.chmod(0o600)
        path.write_bytes(b'of another commit that was given that tid')
        instance.release()
        self.assertTrue(path.exists())

    def test_nobody_knows(self):
        """The files of a commit that may have happened stay."""
        oid, _ = self.put(b'before')
        instance = self.vote(oid, LARGE)
        commit = instance.committing.commit
        with mock.patch.object(commit, 'finish', side_effect=StorageError('lost')), mock.patch.object(
                commit, 'outcome', side_effect=OutcomeUnknown('who knows')), self.assertRaises(OutcomeUnknown):
            instance.tpc_finish(instance.committing.metadata)
        self.assertEqual(len(self.names()), 2)
        self.put(b'after', 'other')
        self.storage.pack(time.time() + 1, gc=False)
        self.assertEqual(len(self.names()), 3)
        self.assertEqual((self.get(), self.get('other')), (b'before', b'after'))

    def vote(self, oid, data):
        instance, path = self.storage.new_instance(), self.here / 'upload'
        self.addCleanup(instance.release)
        path.write_bytes(data)
        instance.poll_invalidations()
        record, tid = instance.load(oid)
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        instance.storeBlob(oid, tid, record, str(path), '', txn)
        instance.tpc_vote(txn)
        return instance

    def test_full_disk(self):
        with mock.patch('os.replace', side_effect=OSError(28, 'No space left on device')), \
                self.assertRaisesRegex(StorageError, 'No space left'):
            self.put(LARGE)
        self.assertEqual(self.names(), [])
        self.put(LARGE)
        self.assertEqual(self.get(), LARGE)


class InStore(StoredBlobs, Suite):
    """In an object storage."""


cases(globals(), InDatabase)
cases(globals(), InDirectory, InStore, backends=EITHER_MODE, thorough=OTHER_MODE)
del Suite, InDatabase, InDirectory, InStore
