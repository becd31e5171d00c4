"""Blobs in an object storage: what is there when, and who meets whom."""
import hashlib
import os
import time
import urllib.request
from contextlib import ExitStack, closing, contextmanager
from unittest import mock

from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError, StorageError, Unsupported
from ZODB.utils import p64, u64

from relstore.adapters.objects import Objects
from relstore.blobs import store
from relstore.blobs.bucket import MARK
from relstore.blobs.store import ObjectStore
from relstore.errors import ConfigurationError, DamagedBlob, Unavailable
from relstore.tests.support.backends import SQLiteBackend, cases
from relstore.tests.support.blob_site import LARGE, BlobSite
from relstore.tests.support.servers.s3 import CREDENTIALS, RefusingProxy
from relstore.tests.support.stored_blobs import StoredBlobs


class Stopped(Exception):
    """A party was killed."""


class Suite(StoredBlobs, BlobSite):

    def place(self, name):
        return super().place(name) | {'pack_gc': False}     # there are objects to which nothing refers

    def ask(self, sql):
        return self.storage.database.pool.attempt(lambda session: session.all(sql))

    def rows(self):
        [[count]] = self.ask('SELECT count(*) FROM relstore_digest')
        return count

    def change(self, sql):
        self.storage.database.pool.attempt(lambda session: session.run(sql))

    @contextmanager
    def transaction(self, data, storage=None):
        """Yield an instance that is about to vote on a blob, with its transaction and the oid."""
        instance, path = (storage or self.storage).new_instance(), self.here / os.urandom(8).hex()
        path.write_bytes(data)
        instance.poll_invalidations()
        record, _ = instance.load(self.record)
        oid = instance.new_oid()
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        try:
            instance.storeBlob(oid, p64(0), record, str(path), '', txn)
            yield instance, txn, oid
        finally:
            instance.tpc_abort(txn)
            instance.release()

    def commit(self, data, storage=None):
        """Commit a blob; return (oid, tid)."""
        with self.transaction(data, storage) as (instance, txn, oid):
            instance.tpc_vote(txn)
            return oid, instance.tpc_finish(txn)

    def setUp(self):
        super().setUp()
        self.record, _ = self.put(b'the first')
        self.assertEqual(len(self.objects()), 1)

    def new(self):
        """Return the objects besides that of the first blob."""
        return len(self.objects()) - 1

    def assertBlob(self, oid, tid, data):
        """It is there for a process that has nothing of it."""
        with closing(self.opened(blob_dir=str(self.here / os.urandom(8).hex()))) as storage, \
                storage.openCommittedBlobFile(oid, tid) as file:
            self.assertTrue(file.read() == data)

    def pack(self, storage=None):
        return (storage or self.storage).pack(time.time() + 1)

    def collect(self, storage):
        """Do what a pack does at its end: before, it waits for whoever has voted."""
        with closing(storage.database.adapter.connect()) as session:
            storage.database.blobs.after_pack(session, set(), 0)

    # What is there

    def test_the_same_data(self):
        """It is stored once, for all that have it, and goes with the last of them."""
        names, collecting = ['a', 'b', 'c'], self.opened(pack_gc=True)
        with mock.patch.object(ObjectStore, 'put', autospec=True, side_effect=ObjectStore.put) as put:
            for name in names:
                self.put(LARGE, name)
            self.put(LARGE, 'd', self.new_db(self.opened()))
        self.assertEqual((put.call_count, self.new()), (1, 1))
        for name in [*names, 'd']:
            self.assertEqual(self.get('d'), LARGE)
            with self.db.transaction() as connection:
                del connection.root()[name]
            collecting.pack(time.time() + 1)
            collecting.pack(time.time() + 1)        # without history, what it has found before
            self.assertEqual(self.new(), int(name != 'd'))
        self.assertEqual(self.rows(), 1)

    def test_urls(self):
        oid, tid = self.commit(LARGE)
        url = self.storage.blob_url(oid, tid, 60, 'image.png', 'image/png')
        with urllib.request.urlopen(url) as found:
            self.assertTrue(found.read() == LARGE)
            self.assertEqual(found.headers['Content-Type'], 'image/png')
            self.assertIn('image.png', found.headers['Content-Disposition'])
        with self.assertRaises(POSKeyError):
            self.storage.blob_url(oid, p64(u64(tid) - 1))
        other = self.opened('other', blob_store=None, blob_dir=str(self.here / 'other'))
        with self.assertRaisesRegex(Unsupported, 'blob-store'):
            other.blob_url(oid, tid)

    def test_parts(self):
        """Nothing else is fetched."""
        oid, tid = self.commit(LARGE)
        names = self.names()
        self.assertEqual(self.storage.blob_part(oid, tid, 1000, 2000), LARGE[1000:2000])
        self.assertEqual(self.names(), names)

    def test_damaged(self):
        oid, tid = self.commit(LARGE)
        key = next(key for key in self.objects() if key not in self.objects_of(b'the first'))
        for data in LARGE[:-1], LARGE + b'x', LARGE[:-1] + b'x':
            self.s3.client().put_object(Bucket=self.bucket, Key=key, Body=data)
            if len(data) <= len(LARGE):
                with self.assertRaises(DamagedBlob):
                    self.storage.loadBlob(oid, tid)
            else:       # no more is asked for than there should be
                self.assertBlob(oid, tid, LARGE)
            self.assertIn('the data of 1 is missing' if len(data) <= len(LARGE) else 'the data of 0 is missing',
                          self.look(status=int(len(data) <= len(LARGE))))
        self.s3.client().delete_object(Bucket=self.bucket, Key=key)
        with self.assertRaises(POSKeyError):
            self.storage.loadBlob(oid, tid)
        self.commit(LARGE)      # brings it back
        self.assertBlob(oid, tid, LARGE)

    def objects_of(self, data):
        digest = hashlib.sha256(data).hexdigest()
        return [key for key in self.objects() if digest in key]

    # Which storage

    def test_another_storage(self):
        for name, said in ('elsewhere', 'in another object storage'), ('main', 'in another object storage'):
            if name == 'main':
                self.s3.client().delete_object(Bucket=self.bucket, Key=f'main/{MARK}')
            with self.assertRaisesRegex(ConfigurationError, said):
                self.opened(blob_store=self.url(name))

    def test_of_another_database(self):
        for mark in None, b'nonsense', b'{"store": 1}', b'[]':
            if mark is not None:
                self.s3.client().put_object(Bucket=self.bucket, Key=f'main/{MARK}', Body=mark)
            with self.assertRaisesRegex(ConfigurationError, 'blobs of another database'):
                self.opened('other', blob_store=self.url(), blob_dir=str(self.here / 'other'))

    def test_two_databases_that_were_opened_before(self):
        one, two = (self.new_db(self.opened(name, blob_store=self.url('both'), blob_dir=str(self.here / name)))
                    for name in ('one', 'two'))
        self.put(b'1', db=one)
        with self.assertRaisesRegex(ConfigurationError, 'another database'):
            self.put(b'2', db=two)
        self.assertEqual(len(self.objects('both')), 1)

    def test_options(self):
        for options, said in (({'blob_dir': None}, 'needs a directory'), ({'shared_blob_dir': True}, 'two places'),
                              ({'blob_store': 'ftp:'}, 'no URL'), ({'blob_store': None}, 'name it with blob-store'),
                              ({'blob_store': None, 'blob_dir': None}, 'name it with blob-store')):
            with self.subTest(options), self.assertRaisesRegex(ConfigurationError, said):
                self.opened(**options)

    # What goes wrong

    def test_failures(self):
        """The transaction is not committed, nothing is left of it, and another try succeeds."""
        revisions = self.ask('SELECT count(*) FROM relstore_blob')
        with RefusingProxy(self.s3) as proxy, mock.patch.object(store, 'ATTEMPTS', 1):
            through = self.opened(blob_store=self.url(port=proxy.port), blob_dir=str(self.here / 'through'))
            for status, code, kind, said in (
                    (503, 'SlowDown', Unavailable, 'overloaded'), (403, 'AccessDenied', ConfigurationError, 'lack'),
                    (403, 'RequestTimeTooSkewed', ConfigurationError, 'clock'),
                    (404, 'NoSuchBucket', ConfigurationError, 'no such bucket')):
                with self.subTest(code):
                    proxy.answer = lambda method, path: (status, code) if method == 'PUT' else None
                    with self.assertRaisesRegex(kind, said) as refused:
                        self.commit(code.encode(), through)
                    self.assertNotIn(CREDENTIALS['AWS_SECRET_ACCESS_KEY'], str(refused.exception))
                    self.assertEqual((self.new(), self.ask('SELECT count(*) FROM relstore_blob')), (0, revisions))
                    proxy.answer = lambda method, path: None
                    self.assertBlob(*self.commit(code.encode(), through), code.encode())
                    self.change('DELETE FROM relstore_blob WHERE size < 100 AND size <> 9')
                    self.pack()
                    self.assertEqual(self.new(), 0)

    def test_unavailable_in_a_pack(self):
        """The pack comes to its end, and another removes what it has left."""
        self.delete(self.commit(LARGE))
        with mock.patch.object(ObjectStore, 'remove', side_effect=Unavailable('not now')), \
                self.assertLogs('relstore', 'WARNING') as logs:
            self.pack()
        self.assertTrue(any('until the next pack' in line for line in logs.output))
        self.assertEqual((self.new(), self.rows()), (1, 2))
        self.pack()
        self.assertEqual((self.new(), self.rows()), (0, 1))

    def delete(self, revision):
        """As if a pack had removed it."""
        self.change(f'DELETE FROM relstore_blob WHERE zoid = {u64(revision[0])}')

    # Aborts

    def test_aborted(self):
        """What it has uploaded goes with it; but where it may have happened, a pack sees to that."""
        for point in 'store', 'vote', 'finish':
            with self.subTest(point), self.transaction(LARGE) as (instance, txn, _):
                if point != 'store':
                    instance.tpc_vote(txn)
                    self.assertEqual(self.new(), 1)
                if point == 'finish':
                    commit = instance.committing.commit
                    with mock.patch.object(commit, 'finish', side_effect=StorageError('no')), mock.patch.object(
                            commit, 'outcome', return_value=None), self.assertRaises(StorageError):
                        instance.tpc_finish(txn)
                instance.tpc_abort(txn)
                self.assertEqual((self.new(), self.rows()), (int(point == 'finish'), 1 + (point == 'finish')))
        self.pack()
        self.assertEqual((self.new(), self.rows()), (0, 1))

    def test_aborted_beside_another(self):
        """Neither takes what the other relies on, whichever came first and however far it is."""
        if isinstance(self, SQLiteBackend):
            self.skipTest('Between vote and finish nobody else writes.')
        for first in True, False:
            for steps in range(3):
                data = os.urandom(100)
                with self.subTest(first=first, steps=steps), self.transaction(data) as one, \
                        self.transaction(data, self.opened()) as two:
                    stays, goes = (two, one) if first else (one, two)
                    one[0].committing.blobs.prepare(self.storage.database.pool.attempt)
                    two[0].committing.blobs.prepare(self.storage.database.pool.attempt)
                    if steps > 0:
                        stays[0].tpc_vote(stays[1])
                    if steps > 1:
                        goes[0].tpc_vote(goes[1])
                    goes[0].tpc_abort(goes[1])
                    if not steps:
                        stays[0].tpc_vote(stays[1])
                    tid = stays[0].tpc_finish(stays[1])
                    self.assertBlob(stays[2], tid, data)
                    self.pack()
                    self.assertBlob(stays[2], tid, data)

    # Packs

    def test_grace(self):
        """What nothing refers to stays for so long after a pack has found that."""
        self.storage.database.blobs.grace = 1000
        revision = self.commit(LARGE)
        for age, left in ((0, 1), (2000, 1), (500, 1), (600, 0)):
            if age == 0:
                self.pack()
                self.delete(revision)
            self.change(f'UPDATE relstore_digest SET wanted = wanted - {age}')
            self.pack()
            self.assertEqual(self.new(), left)

    def test_found_idle_and_used_again(self):
        """The grace begins anew."""
        self.storage.database.blobs.grace = 1000
        old = 'UPDATE relstore_digest SET wanted = wanted - 2000'
        self.delete(self.commit(LARGE))
        self.change(old)
        self.pack()
        revision = self.commit(LARGE)
        self.change(old)
        self.pack()
        self.assertBlob(*revision, LARGE)
        self.delete(revision)
        self.pack()
        self.assertEqual(self.new(), 1)

    def test_a_process_that_is_killed(self):
        """Between its upload and its commit: a pack removes what it has left."""
        with self.transaction(LARGE) as (instance, *_):
            blobs = instance.committing.blobs
            blobs.prepare(self.storage.database.pool.attempt)
            blobs._attempt = None
        self.assertEqual(self.new(), 1)
        self.pack()
        self.assertEqual((self.new(), self.rows()), (0, 1))

    # The steps of a transaction and of a pack, which begin as calls of these.
    OF_TRANSACTION = (Objects, 'want'), (ObjectStore, 'size'), (ObjectStore, 'put'), (Objects, 'hold')
    OF_PACK = (Objects, 'all'), (Objects, 'claim'), (ObjectStore, 'remove'), (Objects, 'forget')

    @contextmanager
    def before(self, step, act):
        """Have something happen before a step, once."""
        kind, name = step
        real, done = getattr(kind, name), []

        def call(*args, **options):
            if not done:
                done.append(True)
                act()
            return real(*args, **options)
        with mock.patch.object(kind, name, call):
            yield done

    def garbage(self):
        """Return data of which there is an object that the next pack removes."""
        data = os.urandom(100)
        self.delete(self.commit(data))
        return data

    def test_a_pack_in_a_transaction(self):
        """The transaction succeeds with its data, or it fails, and succeeds when it is tried again."""
        other, failed = self.opened(), 0
        for step in self.OF_TRANSACTION:
            for new in False, True:
                if isinstance(self, SQLiteBackend) and step[1] in ('hold', 'want'):
                    continue        # within its lock
                data = os.urandom(100) if new else self.garbage()
                with self.subTest(step=step[1], new=new), self.before(step, lambda: self.collect(other)) as done:
                    try:
                        revision = self.commit(data)
                    except Unavailable:
                        failed += 1
                        revision = self.commit(data)
                    self.assertEqual(bool(done), new is {'size': False, 'put': True}.get(step[1], new))
                    for _ in range(2):
                        self.assertBlob(*revision, data)
                        self.pack()
        self.assertGreater(failed, 0)

    def test_a_pack_between_vote_and_finish(self):
        if isinstance(self, SQLiteBackend):
            self.skipTest('Nobody else writes there.')
        for data in self.garbage(), os.urandom(100):
            with self.transaction(data) as (instance, txn, oid):
                instance.tpc_vote(txn)
                self.collect(self.opened())
                self.assertBlob(oid, instance.tpc_finish(txn), data)

    def test_a_transaction_in_a_pack(self):
        """Whatever the pack had found, and whether it goes on or is killed there."""
        other = self.opened()
        for step in self.OF_PACK:
            for killed in False, True:
                with self.subTest(step=step[1], killed=killed), ExitStack() as stack:
                    data, revisions = self.garbage(), []

                    def act():
                        revisions.append(self.commit(data, other))
                        if killed:
                            raise Stopped

                    done = stack.enter_context(self.before(step, act))
                    if killed:
                        stack.enter_context(self.assertRaises(Stopped))
                    self.pack()
                    self.assertTrue(done)
                for _ in range(2):
                    self.assertBlob(*revisions[0], data)
                    self.pack()

    def test_a_commit_of_what_was_found_idle(self):
        """Uploaded before a pack has looked, and committed before it claims."""
        data, other, tids = os.urandom(100), self.opened(), []
        with self.transaction(data) as (instance, txn, oid):
            instance.committing.blobs.prepare(self.storage.database.pool.attempt)

            def act():
                instance.tpc_vote(txn)
                tids.append(instance.tpc_finish(txn))
            with self.before((Objects, 'claim'), act):
                self.collect(other)
        for _ in range(2):
            self.assertBlob(oid, *tids, data)
            self.pack()

    def test_a_pack_that_is_killed(self):
        """Another ends what it has begun."""
        for step in self.OF_PACK:
            self.garbage()

            def act():
                raise Stopped
            with self.subTest(step[1]), self.before(step, act):
                with self.assertRaises(Stopped):
                    self.pack()
                self.pack()
                self.assertEqual((self.new(), self.rows()), (0, 1))

    def test_a_removal_that_comes_late(self):
        """A pack that was stopped goes on when another has done its work, and the data is back."""
        data, revisions = self.garbage(), []
        other = self.opened()

        def act():
            self.collect(other)
            revisions.append(self.commit(data, other))
        with self.before((ObjectStore, 'remove'), act):
            self.pack()
        self.assertBlob(*revisions[0], data)

    def test_undo_in_a_pack(self):
        """The revision that it repeats, and its object, stay until it has ended."""
        if not self.keep_history or isinstance(self, SQLiteBackend):
            self.skipTest('needs history, and others that write meanwhile')
        oid, first = self.put(LARGE, 'undone')
        _, second = self.put(b'newer', 'undone')
        instance = self.storage.new_instance()
        self.addCleanup(instance.release)
        instance.poll_invalidations()
        txn = TransactionMetaData()
        instance.tpc_begin(txn)
        instance.undo(second, txn)
        instance.tpc_vote(txn)
        with closing(self.new_watch()) as watch:
            held = self.is_held(watch, f'SELECT 1 FROM relstore_blob WHERE zoid = {u64(oid)} AND tid = {u64(first)}')
            self.assertTrue(held)
        tid = instance.tpc_finish(txn)
        self.assertBlob(oid, tid, LARGE)

    def is_held(self, watch, sql):
        return watch.rows(sql) and not watch.rows(sql + ' FOR UPDATE SKIP LOCKED')


cases(globals(), Suite)
del Suite
