"""Blobs that move from one place to the other, while the site runs, and what could interleave."""
import io
import os
import tempfile
import time
from contextlib import closing, redirect_stderr
from hashlib import sha256
from pathlib import Path
from unittest import mock

import transaction
from transaction import TransactionManager
from ZODB.blob import Blob
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64

from relstore.adapters import sqlite
from relstore.adapters.writers import Writers
from relstore.blobs import move
from relstore.blobs.directory import SharedDirectory
from relstore.blobs.places import InDatabase, InDirectory
from relstore.errors import ConfigurationError, LockTimeout
from relstore.tests.support.backends import EITHER_MODE, OTHER_MODE, cases
from relstore.tests.support.blob_site import LARGE, BlobSite


class Suite(BlobSite):

    def setUp(self):
        super().setUp()
        self.storage.database.adapter.writers.set('relstore')
        self.new = str(self.here / 'new')

    @property
    def there(self):
        """The place to move to, as the command has it."""
        return ['database'] if self.shared else ['directory', self.new]

    @property
    def old(self):
        return ['directory', str(self.here / 'blobs')] if self.shared else ['database']

    def moved(self, *options, status=0):
        return self.look('--move', *self.there, *options, status=status)

    def target(self):
        adapter = self.storage.database.adapter
        return InDatabase(adapter) if self.shared else InDirectory(adapter, SharedDirectory(self.new))

    def source(self):
        adapter = self.storage.database.adapter
        return InDirectory(adapter, self.storage.database.blobs.directory) if self.shared else InDatabase(adapter)

    def opened_there(self):
        """Open the storage as it is to be opened after the move."""
        directory = tempfile.mkdtemp(dir=self.here) if self.shared else self.new        # an empty cache
        return self.opened(shared_blob_dir=not self.shared, blob_dir=directory)

    def contents(self, storage, revisions):
        found = {}
        for revision in revisions:
            with storage.openCommittedBlobFile(*revision) as file:
                found[revision] = file.read()
        return found

    def sql(self, sql):
        self.storage.database.pool.attempt(lambda session: session.run(sql))

    def site(self):
        """Commit some blobs: large, small, empty, replaced, and without a record. Return the data by revision."""
        data = {self.put(LARGE, 'large'): LARGE, self.put(b'', 'empty'): b''}
        first = self.put(b'first', 'twice')
        data |= {first: b'first'} if self.keep_history else {}
        data |= {self.put(LARGE[:100_000], 'twice'): LARGE[:100_000], self.put(b'small', 'small'): b'small'}
        unrecorded = self.put(b'of RelStorage', 'unrecorded')
        self.sql(f'DELETE FROM relstore_blob WHERE zoid = {u64(unrecorded[0])}')
        return data | {unrecorded: b'of RelStorage'}

    def test_moved(self):
        data = self.site()
        out = self.moved()
        self.assertIn(f'{len(data)} revisions of blobs copied', out)
        self.assertIn(f'Set shared-blob-dir {str(not self.shared).lower()}', out)
        with self.assertRaisesRegex(ConfigurationError, f'set shared-blob-dir {str(not self.shared).lower()}'):
            self.opened()
        storage = self.opened_there()
        self.assertEqual(self.contents(storage, data), data)
        db = self.new_db(storage)
        self.assertEqual(self.get('large', db), LARGE)
        revision = self.put(b'new', 'new', db)
        with closing(self.opened_there()) as another:
            self.assertEqual(self.contents(another, [revision]), {revision: b'new'})
        if self.keep_history:
            db.undo(db.undoInfo(0, 1)[0]['id'])
            transaction.commit()
        with db.transaction() as connection:
            del connection.root()['large']
        storage.pack(time.time() + 1)
        [large] = [revision for revision in data if data[revision] == LARGE]
        with closing(self.opened_there()) as another, self.assertRaises(POSKeyError):
            another.loadBlob(*large)

    def test_checked_afterwards(self):
        """Also what had no record has one: that of what was copied."""
        data = self.site()
        self.moved()
        self.storage = self.opened_there()
        out = self.look('--check')
        self.assertIn(f'{len(data)} revisions of blobs', out)
        self.assertIn(' 0 missing, 0 of another size, 0 altered.', out)
        self.assertNotIn('ecorded', out)

    def test_processes_that_run(self):
        """They neither store nor load blobs, once they know; until then they read what they see from before."""
        first = self.put(LARGE)
        running = self.opened()
        db = self.new_db(running)
        self.assertEqual(self.get(db=db), LARGE)
        manager = TransactionManager()
        with closing(db.open(manager)) as connection:
            blob = connection.root()['blob']
            self.moved()
            instance = running.new_instance()
            self.addCleanup(instance.release)
            self.assertEqual(self.contents(instance, [first]), {first: LARGE})
            with blob.open('w') as file:
                file.write(b'lost')
            with self.assertRaisesRegex(ConfigurationError, f'set shared-blob-dir {str(not self.shared).lower()}'):
                manager.commit()
            manager.abort()
        for call in (lambda: self.get(db=db), lambda: self.put(b'lost', 'lost', db), lambda: running.loadBlob(*first)):
            with self.assertRaisesRegex(ConfigurationError, f'set shared-blob-dir {str(not self.shared).lower()}'):
                call()
        self.assertEqual(self.contents(self.opened_there(), [first]), {first: LARGE})

    def test_pack_in_a_process_that_runs(self):
        """It would leave files behind, or remove those of the old place."""
        self.put(LARGE)
        running = self.opened()
        self.moved()
        with self.assertRaisesRegex(ConfigurationError, f'set shared-blob-dir {str(not self.shared).lower()}'):
            running.pack(time.time() + 1)

    def test_old_place_that_is_in_use(self):
        """Nothing goes from where blobs are, nor from the directory of another site."""
        revision = self.put(LARGE)
        self.assertIn('has its blobs in', self.look_wrong('--drop-old', *self.old))
        self.moved()
        self.storage = self.opened_there()
        self.assertIn('has its blobs in', self.look_wrong('--drop-old', *self.there))
        if self.shared:
            (self.here / 'blobs' / '.relstore-database').write_text('another')
            self.assertIn('of another site', self.look_wrong('--drop-old', *self.old))
        self.assertEqual(self.contents(self.storage, [revision]), {revision: LARGE})

    def look_wrong(self, *options):
        """Return the error of a command."""
        with redirect_stderr(io.StringIO()) as err:
            self.look(*options, status=2)
        return err.getvalue()

    def test_what_was_committed_later_is_not_looked_for_in_vain(self):
        """A process that has not polled yet says that blobs were moved, not that the blob is not there."""
        self.put(LARGE)
        running = self.opened()
        self.moved()
        revision = self.put(b'new', 'new', self.new_db(self.opened_there()))
        with self.assertRaisesRegex(ConfigurationError, f'set shared-blob-dir {str(not self.shared).lower()}'):
            running.loadBlob(*revision)

    def before_switch(self, act):
        """Have something done just before votes are locked."""
        real = Writers.lock_votes

        def lock_votes(writers, session, timeout):
            act()
            real(writers, session, timeout)
        return mock.patch.object(Writers, 'lock_votes', lock_votes)

    def test_commits_meanwhile(self):
        """After the list was made, between the rounds, and just before the switch: new blobs, and replaced ones."""
        data = self.site()
        place = type(self.source())
        real, rounds = place.pages, []

        def pages(source, session):
            for page in real(source, session):
                if not rounds:
                    rounds.append('first')
                    data[self.put(b'second', 'large')] = b'second'
                    data[self.put(b'during', 'during')] = b'during'
                yield page
        with mock.patch.object(place, 'pages', pages), mock.patch.object(move, 'FEW', 0), \
                self.before_switch(lambda: data.update({self.put(b'last', 'last'): b'last',
                                                        self.put(LARGE[:9], 'small'): LARGE[:9]})):
            self.moved()
        self.assertEqual(rounds, ['first'])
        storage = self.opened_there()
        if not self.keep_history:       # what was replaced is nobody's any more
            current = {revision[0]: max(other for other in data if other[0] == revision[0]) for revision in data}
            data = {revision: data[revision] for revision in current.values()}
        self.assertEqual(self.contents(storage, data), data)
        db = self.new_db(storage)
        self.assertEqual([self.get(name, db) for name in ('large', 'during', 'last', 'small')],
                         [b'second', b'during', b'last', LARGE[:9]])

    def test_one_that_has_voted(self):
        """It is waited for, and what it commits is copied; one that votes meanwhile is refused."""
        self.put(b'before')
        manager = TransactionManager()
        connection = self.db.open(manager)
        self.addCleanup(connection.close)
        connection.root()['voted'] = blob = Blob(b'voted')
        voted = manager.get()
        connection.tpc_begin(voted)
        connection.commit(voted)
        connection.tpc_vote(voted)
        with mock.patch.object(move, 'PATIENCE_SECONDS', 0.2), \
                mock.patch.object(sqlite, 'BUSY_TIMEOUT_SECONDS', 0.2), self.assertRaises(LockTimeout):
            self.move()
        self.opened().close()       # nothing was switched
        connection.tpc_finish(voted)
        manager.abort()
        blob._p_activate()
        self.assertTrue(self.move().copied)
        self.assertEqual(self.contents(self.opened_there(), [(blob._p_oid, blob._p_serial)]),
                         {(blob._p_oid, blob._p_serial): b'voted'})

    def move(self):
        moving = move.Move(self.storage.database.adapter, self.source(), self.target(), lambda *_: None)
        self.assertTrue(moving.run())
        return moving

    def test_killed(self):
        """At each blob: the next run goes on, and copies each once."""
        data = self.site()
        place = type(self.target())
        real, copied = place.put, []

        def put(target, session, oid, tid, pieces):
            if len(copied) in stops:
                stops.remove(len(copied))
                if stop_in_the_middle:
                    real(target, session, oid, tid, interrupted(pieces))
                raise KeyboardInterrupt
            done = real(target, session, oid, tid, pieces)
            copied.append((oid, tid))
            return done

        def interrupted(pieces):
            yield next(iter(pieces))
            raise KeyboardInterrupt

        stops, stop_in_the_middle = {0, 1, 3, len(data) - 1}, False
        with mock.patch.object(place, 'put', put):
            while stops:
                stop_in_the_middle = not stop_in_the_middle
                with self.assertRaises(KeyboardInterrupt):
                    self.move()
                self.assertEqual(self.get('large', self.new_db(self.opened())), LARGE)      # the site goes on
            self.move()
        self.assertEqual(len(copied), len(set(copied)))
        self.assertEqual({(p64(oid), p64(tid)) for oid, tid in copied}, set(data))
        self.assertEqual(self.contents(self.opened_there(), data), data)

    def test_damaged(self):
        """What is not what was committed is not copied, and then nothing is switched."""
        self.site()
        revision = self.put(b'damaged', 'damaged')
        if self.shared:
            path = Path(self.storage.loadBlob(*revision))
            path.chmod(0o600)
            path.write_bytes(b'DAMAGED')
        elif self.storage.database.adapter.name == 'postgresql':
            self.sql(f"SELECT lo_put(chunk, 0, 'D') FROM blob_chunk WHERE zoid = {u64(revision[0])}")
        else:
            self.sql(f"UPDATE blob_chunk SET chunk = x'44' WHERE zoid = {u64(revision[0])}")
        out = self.moved(status=1)
        self.assertIn(f'object {u64(revision[0]):#x}, tid {u64(revision[1]):#x}', out)
        self.assertIn('1 blob is not what was committed', out)
        self.opened().close()
        session = self.storage.database.adapter.connect()
        self.addCleanup(session.close)
        self.assertIsNone(self.target().size(session, *map(u64, revision)))

    def test_old_place(self):
        """It stays until it is dropped; and what the new place lacks stays even then."""
        data = self.site()
        self.moved()
        self.storage = there = self.opened_there()
        lost = next(iter(data))
        if self.shared:
            self.sql(f'DELETE FROM blob_chunk WHERE zoid = {u64(lost[0])}')
        else:
            os.unlink(there.loadBlob(*lost))
        out = self.look('--drop-old', *self.old, status=1)
        self.assertIn(f'{len(data) - 1} revisions of blobs removed', out)
        self.assertIn('1 stay', out)
        self.assertIn('0 revisions of blobs removed', self.look('--drop-old', *self.old, status=1))
        del data[lost]
        self.assertEqual(self.contents(self.opened_there(), data), data)

    def test_refusals(self):
        revision = self.put(LARGE)
        adapter = self.storage.database.adapter
        adapter.writers.set('any')
        with self.assertRaisesRegex(ConfigurationError, 'relstore writers'):
            self.move()
        adapter.writers.set('relstore')
        with closing(adapter.connect()) as session:
            adapter.pack_lock.take(session)
            with self.assertRaisesRegex(Exception, 'is being packed'):
                self.move()
        if not self.shared:
            other = SharedDirectory(self.new)
            other.owner = 'another'
            with self.assertRaisesRegex(ConfigurationError, 'of another site'):
                self.move()
        self.assertEqual(self.contents(self.storage, [revision]), {revision: LARGE})

    def test_to_and_fro(self):
        data = self.site()
        self.moved()
        self.storage = self.opened_there()
        out = self.look('--move', *self.old)
        self.assertIn('0 revisions of blobs copied', out)
        self.assertEqual(self.contents(self.opened(), data), data)

    def test_whole(self):
        """A move is no pack: transactions may be added as before."""
        self.put(LARGE)
        before = self.storage.database.adapter.sweeps
        self.moved()
        storage = self.opened_there()
        number, _ = storage.database.pool.attempt(before.state)
        meta = storage.database.pool.attempt(storage.database.adapter.meta)
        self.assertEqual(meta['whole'], str(number))


class FromDatabase(Suite):
    """To a directory."""


class FromDirectory(Suite):
    """To the database."""
    shared = True

    def test_chunks_of_somebody_else(self):
        """Where nothing was moved they tell that RelStorage has its blobs in the database."""
        oid, tid = map(u64, self.put(b'x'))
        with closing(self.storage.database.adapter.connect()) as session, \
                move._transaction(self.storage.database.adapter, session):
            self.assertTrue(self.target().put(session, oid, tid, [b'x']))
        with self.assertRaisesRegex(ConfigurationError, 'has its blobs in itself'):
            self.opened()


class ToStore(BlobSite):
    """From the database to an object storage, which is a directory here, and on to a directory."""

    def setUp(self):
        super().setUp()
        self.storage.database.adapter.writers.set('relstore')
        self.url = f'file://{self.here}/store'

    def opened_there(self):
        return self.opened(blob_store=self.url, blob_dir=tempfile.mkdtemp(dir=self.here))

    def objects(self):
        return sorted(path.name.partition('-')[0] for path in (self.here / 'store').rglob('*')
                      if path.is_file() and not path.name.startswith('.'))

    def contents(self, storage, revisions):
        found = {}
        for revision in revisions:
            with storage.openCommittedBlobFile(*revision) as file:
                found[revision] = file.read()
        return found

    def site(self):
        """Commit some blobs, two of them with the same data, and one without a record."""
        data = {self.put(content, name): content for name, content in (
            ('large', LARGE), ('empty', b''), ('one', b'same'), ('other', b'same'), ('unrecorded', b'of RelStorage'))}
        [(oid, _)] = [revision for revision in data if data[revision] == b'of RelStorage']
        self.storage.database.pool.attempt(lambda session: session.run(
            f'DELETE FROM relstore_blob WHERE zoid = {u64(oid)}'))
        return data

    def test_there_and_on(self):
        data = self.site()
        running = self.opened()
        out = self.look('--move', self.url)
        self.assertIn('4 revisions of blobs copied', out)
        self.assertIn('1 were there', out)      # the data of another revision
        self.assertIn('blob-store', out)
        self.assertEqual(self.objects(), sorted({sha256(content).hexdigest() for content in data.values()}))
        for call in (self.opened, lambda: running.pack(time.time() + 1)):
            with self.assertRaisesRegex(ConfigurationError, 'name it with blob-store'):
                call()
        self.storage = there = self.opened_there()
        self.assertEqual(self.contents(there, data), data)
        self.assertIn(' 0 missing, 0 of another size, 0 altered.', self.look('--check'))
        self.assertIn('5 revisions of blobs removed', self.look('--drop-old', 'database'))
        [[left]] = there.database.pool.attempt(lambda session: session.all('SELECT count(*) FROM blob_chunk'))
        self.assertEqual(left, 0)
        new = self.put(b'new', 'new', self.new_db(self.opened_there()))
        data[new] = b'new'
        there.pack(time.time() + 1)
        self.assertEqual(self.contents(self.opened_there(), data), data)
        self.assertIn('6 revisions of blobs copied', self.look('--move', 'directory', str(self.here / 'files')))
        files = self.opened(shared_blob_dir=True, blob_dir=str(self.here / 'files'))
        self.assertEqual(self.contents(files, data), data)
        with self.assertRaisesRegex(ConfigurationError, 'set shared-blob-dir true'):
            self.opened_there()
        self.storage = files
        with redirect_stderr(io.StringIO()) as err:
            self.look('--drop-old', self.url, status=2)
        self.assertIn('by its own means', err.getvalue())

    def test_damaged(self):
        """It is not copied, nothing of it is uploaded, and nothing is switched."""
        data = self.site()
        [(oid, _)] = [revision for revision in data if data[revision] == LARGE]
        self.storage.database.pool.attempt(lambda session: session.run(
            f'UPDATE relstore_blob SET size = 1 WHERE zoid = {u64(oid)}'))
        self.assertIn('1 blob is not what was committed', self.look('--move', self.url, status=1))
        self.assertNotIn(sha256(LARGE).hexdigest(), self.objects())
        self.opened().close()

    def test_objects_of_nothing(self):
        """Old ones go with --fix, new ones and what is not named as ours stay."""
        data = self.site()
        self.look('--move', self.url)
        self.storage = self.opened_there()
        directory = self.here / 'store' / 'aa'
        directory.mkdir(exist_ok=True)
        digest = 'a' * 64
        old, new, other = (directory / name for name in (f'{digest}-{"0" * 16}', f'{digest}-{"1" * 16}', 'notes.txt'))
        for path in old, new, other:
            path.write_bytes(b'left')
        for path in old, other:
            os.utime(path, (1, 1))
        self.assertIn('2 objects of nothing, 8 bytes, 1 of them older than a day.', self.look(status=1))
        self.assertIn('Removed: 1.', self.look('--fix', status=1))
        self.assertEqual([path.exists() for path in (old, new, other)], [False, True, True])
        self.assertEqual(self.contents(self.opened_there(), data), data)

    def test_of_another_database(self):
        self.site()
        other = self.open_storage('other', blob_dir=str(self.here / 'others'), blob_store=self.url)
        self.addCleanup(other.close)
        self.put(b'x', db=self.new_db(other))
        with redirect_stderr(io.StringIO()) as err:
            self.look('--move', self.url, status=2)
        self.assertIn('that of another database', err.getvalue())
        self.opened().close()


cases(globals(), FromDatabase)
cases(globals(), FromDirectory, ToStore, backends=EITHER_MODE, thorough=OTHER_MODE)
del Suite, FromDatabase, FromDirectory, ToStore
