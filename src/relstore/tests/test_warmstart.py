"""The saved cache: what is read back is true, whatever became of the file, of the database, or of the one who saved."""
import errno
import gc
import logging
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
import unittest
import weakref
from pathlib import Path
from unittest import mock

from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64, z64

import relstore
from relstore.caching import warmstart
from relstore.caching.cache import OBJECT_BYTES, REVISION_BYTES, Cache, memory_of
from relstore.caching.proof import Known, is_proven
from relstore.caching.warmstart import WarmStart
from relstore.sessions.session import Session
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.children import in_child
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state
from relstore.tests.support.servers import PostgreSQLServer, kill_and_wait, open_process, require_postgresql
from relstore.tests.support.world import LIMIT, LOG_LIMIT, OIDS, View, World, get

MB = 1 << 20


class Directory(unittest.TestCase):
    """Caches without a database, and a directory for their files."""

    def setUp(self):
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-warm-'))
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = self.directory / 'relstore-name.cache'
        self.patch('PAUSE', 0)

    def patch(self, constant, value):
        patched = mock.patch.object(warmstart, constant, value)
        patched.start()
        self.addCleanup(patched.stop)

    def cache(self, head=10, rows=(), limit=MB):
        cache = Cache(limit, limit)
        cache.restart(head)
        for oid, tid, record in rows:
            cache.put(oid, tid, record, head)
        return cache

    def warm(self, cache, epoch='epoch', database='name', largest=MB, directory=None, proves=lambda known: True):
        return WarmStart(str(directory or self.directory), database, cache, lambda generation: epoch, proves, largest)

    def save(self, head=10, rows=(), **how):
        cache = self.cache(head, rows)
        self.warm(cache, **how).save()
        return cache

    def opened(self, last=100, limit=MB, **how) -> Cache:
        """Return the cache of a process that has just been started, filled."""
        cache = Cache(limit, limit)
        warm = self.warm(cache, **how)
        cache.restart(warm.head(how.get('epoch', 'epoch'), lambda: last, warm._proves))
        warm.start()
        warm.filled.wait(20)
        warm._stop.set()
        warm._thread.join()
        return cache

    def rows(self, **how) -> list:
        return self.opened(**how).current()[1]

    def warnings(self, work) -> list[str]:
        with self.assertLogs('relstore', logging.DEBUG) as logs:
            work()
        return [record.getMessage() for record in logs.records if record.levelno >= logging.WARNING]


ROWS = [(oid, 1 + oid % 10, b'state of %d ' % oid * (oid % 4)) for oid in range(1, 21)]


class TheFile(Directory):

    def test_what_was_saved_is_read(self):
        self.save(10, ROWS)
        cache = self.opened()
        self.assertEqual(cache.current(), (10, ROWS))
        self.assertEqual(cache.floor, 10)

    def test_it_is_its_owners_alone(self):
        directory = self.directory / 'made' / 'for it'
        self.save(10, ROWS, directory=directory)
        self.assertEqual(stat.S_IMODE(directory.stat().st_mode), 0o700)
        [file] = directory.iterdir()
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o600)

    def test_only_what_is_current_is_saved(self):
        cache = self.cache(10, ROWS)
        cache.advance(10, 20, [(3, 15), (4, 20)])
        cache.put(4, 20, b'new', 20)
        cache.put(5, 25, b'not polled yet', 25)
        self.warm(cache).save()
        expected = {row[0]: row for row in ROWS if row[0] not in (3, 5)} | {4: (4, 20, b'new')}
        self.assertEqual({row[0]: row for row in self.rows()}, expected)

    def test_what_is_used_comes_first(self):
        cache = self.cache(10, ROWS)
        get(cache, 7, 10), get(cache, 15, 10)
        self.warm(cache).save()
        self.assertEqual([oid for oid, _, _ in self.rows()][:3], [7, 15, 1])

    def test_every_bit_of_damage(self):
        """Never an error, never a wrong state, one warning; and what comes before it is used."""
        self.patch('BLOCK_BYTES', 100)
        self.save(10, ROWS)
        whole, truth = self.path.read_bytes(), set(ROWS)
        rnd = random.Random(1)
        used = []
        for kind in 'flip', 'cut', 'zero':
            for k in range(len(whole)):
                if kind == 'flip':
                    damaged = whole[:k] + bytes([whole[k] ^ 1 << rnd.randrange(8)]) + whole[k + 1:]
                elif kind == 'cut':
                    damaged = whole[:k]
                else:
                    damaged = whole[:k] + bytes(min(9, len(whole) - k)) + whole[k + 9:]
                if damaged == whole:
                    continue
                self.path.write_bytes(damaged)
                with self.subTest(kind, k=k):
                    found = []
                    warnings = self.warnings(lambda: found.extend(self.rows()))
                    self.assertEqual(len(warnings), 1, warnings)
                    self.assertIn(str(self.path), warnings[0])
                    self.assertLessEqual(set(found), truth)
                used.append(len(found))
        self.assertIn(0, used)
        self.assertIn(20, used)
        self.assertGreater(len(set(used)), 5)

    def test_nonsense(self):
        self.save(10, ROWS)
        whole = self.path.read_bytes()
        rnd = random.Random(2)
        body = warmstart.RECORD.pack(1, 1, 1000) + b'short'
        header = warmstart._header('name', 'epoch', Known(10, 10, []))
        for nonsense in (b'', b'relstore', rnd.randbytes(10_000), bytes(10_000), whole[::-1],
                         header + warmstart._block(b'no record'),
                         header + warmstart._block(body) + warmstart._block(b''),
                         header + warmstart.BLOCK.pack(0xFFFFFFFF, 0) + whole):
            self.path.write_bytes(nonsense)
            with self.subTest(nonsense[:100]):
                found = []
                warnings = self.warnings(lambda: found.extend(self.rows()))
                self.assertEqual(len(warnings), 1, warnings)
                self.assertEqual(found, [])

    def test_a_damaged_length_asks_for_no_memory(self):
        header = warmstart._header('name', 'epoch', Known(10, 10, []))
        self.path.write_bytes(header + warmstart.BLOCK.pack(0xFFFFFFFF, 0))
        self.path.chmod(0o600)
        warm = self.warm(self.cache())

        def work():
            resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
            self.assertEqual(len(self.warnings(lambda: warm.fill(1))), 1)

        in_child(self, work)

    def test_what_is_no_file(self):
        self.path.mkdir()
        self.assertIn('directory', self.warnings(self.opened)[0])
        self.path.rmdir()
        os.mkfifo(self.path)
        in_child(self, lambda: self.assertIn('it is no file', self.warnings(self.opened)[0]))   # without waiting

    def test_a_directory_that_cannot_be_made_is_told_when_it_is_opened(self):
        self.path.touch()
        for directory in self.path, self.path / 'below':
            warm = self.warm(self.cache(), directory=directory)
            self.addCleanup(warm.close)
            [warning, *_] = self.warnings(warm.start)
            self.assertIn(f'cache-local-dir is {directory}, where nothing can be saved: ', warning)

    def test_no_file(self):
        with self.assertNoLogs('relstore', logging.INFO):
            self.assertEqual(self.rows(directory=self.directory / 'nothing there'), [])

    def test_of_another_database(self):
        self.save(10, ROWS, database='other')
        (self.directory / 'relstore-other.cache').rename(self.path)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows()))
        self.assertIn('another database', warning)
        self.assertEqual(found, [])

    def test_of_an_earlier_epoch(self):
        self.save(10, ROWS, epoch='before')
        with self.assertLogs('relstore', logging.INFO) as logs:
            self.assertEqual(self.rows(), [])
        self.assertEqual([record.levelname for record in logs.records], ['INFO'])

    def test_of_another_version(self):
        with mock.patch.object(warmstart, 'VERSION', 3):
            self.save(10, ROWS)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows()))
        self.assertIn('version 3', warning)
        self.assertEqual(found, [])

    def test_the_database_went_back(self):
        """The file is void, also when the database has passed it again."""
        self.save(10, ROWS)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows(last=9)))
        self.assertIn('went back', warning)
        self.assertEqual(found, [])
        self.assertEqual(self.rows(last=11), [])

    def test_the_database_went_back_and_nobody_may_remove_the_file(self):
        self.save(10, ROWS)
        with mock.patch.object(os, 'unlink', side_effect=OSError(errno.EACCES, 'by the test')):
            self.assertEqual(self.rows(last=9), [])

    def test_saved_by_another_while_it_is_opened(self):
        """A head that the database reached meanwhile is none that it went back from."""
        self.save(10, ROWS)
        with self.assertNoLogs('relstore', logging.WARNING):
            warm = self.warm(self.cache())
            asked = warm.head('epoch', lambda: self.save(20, ROWS) and 20, warm._proves)
        self.assertEqual(asked, 10)

    def test_others_may_write_it(self):
        self.save(10, ROWS)
        self.path.chmod(0o620)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows()))
        self.assertIn('620', warning)
        self.assertEqual(found, [])

    def test_of_another_user(self):
        self.save(10, ROWS)
        if os.geteuid() == 0:
            os.chown(self.path, 12345, -1)
        for user in 54321, 0:       # root, too
            found = []
            with self.subTest(user), mock.patch.object(os, 'geteuid', return_value=user):
                [warning] = self.warnings(lambda: found.extend(self.rows()))
                self.assertIn('another user', warning)
                self.assertEqual(found, [])


class Filling(Directory):

    def setUp(self):
        super().setUp()
        self.patch('BLOCK_BYTES', 100)

    def test_what_has_changed(self):
        """Whether that was known before the file is read, or comes to be known after that."""
        self.save(10, ROWS)
        for before in True, False:
            cache = self.cache(10)
            warm = self.warm(cache)
            if before:
                cache.advance(10, 20, [(3, 15), (21, 20)])
            warm.fill(cache.generation)
            if not before:
                cache.advance(10, 20, [(3, 15), (21, 20)])
            self.assertIsNone(get(cache, 3, 20))
            self.assertEqual(get(cache, 2, 20), (ROWS[1][2], ROWS[1][1]))
            self.assertEqual(get(cache, 2, 10), (ROWS[1][2], ROWS[1][1]))

    def test_too_much_has_changed(self):
        self.save(10, ROWS)
        for before in True, False:
            cache = self.cache(10)
            warm = self.warm(cache)
            if before:
                cache.jump(20)
            warm.fill(cache.generation)
            self.assertEqual(cache.stats()['objects'], 0 if before else 20)
            if not before:
                cache.jump(20)
            self.assertEqual([get(cache, oid, 20) for oid in range(30)], [None] * 30)

    def test_the_head_is_older_than_the_log(self):
        self.save(10, ROWS)
        cache = self.cache(11)
        self.warm(cache).fill(cache.generation)
        self.assertEqual(cache.stats()['objects'], 0)

    def test_saved_by_one_that_polled_later(self):
        rows = [(1, 5, b'one'), (2, 18, b'two')]
        self.save(20, rows)
        cache = self.cache(10)
        self.warm(cache).fill(cache.generation)
        self.assertEqual(get(cache, 1, 10), (b'one', 5))
        self.assertIsNone(get(cache, 2, 10))
        cache.advance(10, 20, [(2, 18)])
        self.assertEqual(get(cache, 2, 20), (b'two', 18))

    def test_another_generation(self):
        self.save(10, ROWS)
        cache = self.cache(10)
        generation = cache.generation
        cache.restart(10)
        self.warm(cache).fill(generation)
        self.assertEqual(cache.stats()['objects'], 0)

    def test_what_the_application_loaded_stays(self):
        self.save(10, [(oid, 1, bytes(100)) for oid in range(100)])
        size = OBJECT_BYTES + REVISION_BYTES + memory_of(bytes(100))
        loaded = [(oid, 1, bytes(100)) for oid in range(200, 220)]
        cache = self.cache(10, loaded, limit=50 * size)
        self.warm(cache).fill(cache.generation)
        self.assertEqual(cache.stats()['evictions'], 0)
        self.assertEqual(cache.stats()['objects'], 50)
        for oid in [*range(30), *range(200, 220)]:
            self.assertTrue(cache.holds(oid, 10), oid)

    def test_what_is_least_useful_goes_first(self):
        self.save(10, [(oid, 1, bytes(100)) for oid in range(30)])
        size = OBJECT_BYTES + REVISION_BYTES + memory_of(bytes(100))
        cache = self.cache(10, limit=30 * size)
        self.warm(cache).fill(cache.generation)
        for oid in range(100, 120):
            cache.put(oid, 1, bytes(100), 10)
        self.assertEqual(sorted(oid for oid in range(200) if cache.holds(oid, 10)), [*range(10), *range(100, 120)])

    def test_what_is_known_is_not_touched(self):
        self.save(10, ROWS)
        cache = self.cache(10)
        cache.advance(10, 20, [(2, 20)])
        cache.put(2, 20, b'newer', 20)
        self.warm(cache).fill(cache.generation)
        self.assertEqual(get(cache, 2, 20), (b'newer', 20))
        self.assertIsNone(get(cache, 2, 10))
        cache = self.cache(10, ROWS)
        before = cache.stats()
        self.warm(cache).fill(cache.generation)
        self.assertEqual(cache.stats(), before)

    def test_too_long_for_this_cache(self):
        self.save(10, [(1, 1, bytes(500)), (2, 1, b'short')])
        cache = Cache(MB, 499)
        cache.restart(10)
        self.warm(cache).fill(cache.generation)
        self.assertEqual(cache.current()[1], [(2, 1, b'short')])

    def test_closed_meanwhile(self):
        """Nothing is lost of what was not read yet, and nothing written, for there is nothing new."""
        self.save(10, ROWS)
        before = self.path.stat()
        reached, go_on = threading.Event(), threading.Event()

        class Slow(Cache):
            def fill(self, *arguments):
                reached.set()
                go_on.wait(20)
                return super().fill(*arguments)

        cache = Slow(MB, MB)
        warm = self.warm(cache)
        cache.restart(warm.head('epoch', lambda: 10, warm._proves))
        warm.start()
        reached.wait(20)
        closing = threading.Thread(target=warm.close)
        closing.start()
        warm._stop.wait(20)
        go_on.set()
        closing.join(20)
        self.assertFalse(closing.is_alive())
        self.assertLess(0, cache.stats()['objects'])
        self.assertLess(cache.stats()['objects'], 20)
        self.assertEqual(self.path.stat().st_ino, before.st_ino)
        self.assertEqual(self.rows(), ROWS)


class Saving(Directory):

    def test_nothing_new(self):
        cache = self.cache(10, ROWS)
        warm = self.warm(cache)
        warm.save()
        inode = self.path.stat().st_ino
        warm.save()
        self.assertEqual(self.path.stat().st_ino, inode)
        for change in (lambda: cache.advance(10, 20, [(5, 20)]), lambda: cache.put(5, 20, b'new', 20)):
            change()
            warm.save()
            self.assertNotEqual(self.path.stat().st_ino, inode)
            inode = self.path.stat().st_ino

    def test_nothing_at_all(self):
        self.save(10, ROWS)
        self.save(20)
        self.assertEqual(self.rows(), ROWS)

    def test_nothing_new_after_it_was_read(self):
        self.save(10, ROWS)
        inode = self.path.stat().st_ino
        cache = Cache(MB, MB)
        warm = self.warm(cache)
        cache.restart(warm.head('epoch', lambda: 10, warm._proves))
        warm.start()
        warm.close()
        self.assertEqual(self.path.stat().st_ino, inode)

    def test_now_and_then(self):
        self.patch('SAVE_EVERY', .01)
        cache = self.cache(10, ROWS)
        warm = self.warm(cache)
        warm.start()
        self.addCleanup(warm.close)
        for expected in 20, 21:
            deadline = time.monotonic() + 20
            while len(self.rows() if self.path.exists() else ()) < expected:
                self.assertLess(time.monotonic(), deadline, f'no {expected} objects are saved')
            cache.put(50, 1, b'one more', 10)
        self.assertTrue(warm._thread.daemon)

    def test_closed_twice(self):
        warm = self.warm(self.cache(10, ROWS))
        warm.start()
        thread = warm._thread
        warm.close()
        self.assertFalse(thread.is_alive())
        self.path.unlink()
        warm.close()
        self.assertFalse(self.path.exists())

    def test_it_does_not_grow_beyond_its_bound(self):
        self.patch('BLOCK_BYTES', 1000)
        rows = [(oid, 1, bytes(100)) for oid in range(1000)]
        self.save(10, rows, largest=30_000)
        self.assertLess(self.path.stat().st_size, 30_100)
        found = [oid for oid, _, _ in self.rows()]
        self.assertGreater(len(found), 200)
        self.assertEqual(found, list(range(len(found))))
        self.save(10, [(5000, 1, b'new')], largest=20_000)
        self.assertLess(self.path.stat().st_size, 20_100)
        self.assertEqual([oid for oid, _, _ in self.rows()][:3], [5000, 0, 1])

    def test_the_generation_ends_meanwhile(self):
        cache = self.cache(10, ROWS)

        def current(generation):
            cache.restart(10)
            return Cache.current(cache, generation)

        with mock.patch.object(cache, 'current', current):
            self.warm(cache).save()
        self.assertFalse(self.path.exists())

    def merged(self, cache, **how):
        self.warm(cache, **how).save()
        return {oid: (tid, record) for oid, tid, record in self.rows(**how)}

    def test_what_others_saved_is_kept(self):
        self.save(10, ROWS)
        found = self.merged(self.cache(10, [(100, 2, b'mine'), (3, ROWS[2][1], ROWS[2][2])]))
        self.assertEqual(found, {oid: (tid, record) for oid, tid, record in [*ROWS, (100, 2, b'mine')]})

    def test_what_changed_since_others_saved_it_is_not(self):
        self.save(10, ROWS)
        cache = self.cache(10)
        cache.advance(10, 20, [(3, 15), (4, 20)])
        cache.put(4, 20, b'mine', 20)
        found = self.merged(cache)
        self.assertNotIn(3, found)
        self.assertEqual(found[4], (20, b'mine'))
        self.assertEqual(len(found), 19)

    def test_what_may_have_changed_is_not(self):
        self.save(10, ROWS)
        for cache in self.cache(11, [(100, 2, b'mine')]), self.cache(10, [(100, 2, b'mine')]):
            cache.jump(20)
            cache.put(100, 2, b'mine', 20)
            self.assertEqual(self.merged(cache), {100: (2, b'mine')})
            self.save(10, ROWS)

    def test_others_have_polled_later(self):
        """What they saved stays, but for what is newer than this one's head."""
        self.save(20, [*ROWS, (30, 20, b'new')])
        self.assertEqual(self.merged(self.cache(15, [(100, 2, b'mine')])),
                         {oid: (tid, record) for oid, tid, record in [*ROWS, (100, 2, b'mine')]})
        self.assertEqual(self.opened().head, 15)
        with self.warm(Cache(MB, MB))._open('epoch') as file:
            self.assertLessEqual({row[1] for rows in file.blocks() for row in rows}, set(range(16)))

    def test_of_another_epoch_or_damaged_is_not_kept(self):
        self.save(10, ROWS, epoch='before')
        mine = self.cache(10, [(100, 2, b'mine')])
        with self.assertNoLogs('relstore', logging.INFO):
            self.warm(mine).save()
        self.assertEqual(self.rows(), [(100, 2, b'mine')])
        self.path.write_bytes(b'nonsense')
        with self.assertNoLogs('relstore', logging.INFO):
            self.warm(mine).save()
        self.assertEqual(self.rows(), [(100, 2, b'mine')])

    def test_no_right_to_write(self):
        self.save(10, ROWS)
        cache = self.cache(10, [(100, 1, b'mine')])

        def work():
            os.chmod(self.directory, 0o555)
            if os.geteuid() == 0:
                os.setuid(65534)
            [warning] = self.warnings(self.warm(cache).save)
            self.assertIn('Permission denied', warning)

        in_child(self, work)
        os.chmod(self.directory, 0o700)
        self.assertEqual(self.rows(), ROWS)
        self.assertEqual(len(list(self.directory.iterdir())), 1)

    def test_no_directory_can_be_made(self):
        (self.directory / 'file').touch()
        [warning] = self.warnings(lambda: self.save(10, ROWS, directory=self.directory / 'file' / 'x'))
        self.assertIn('Not a directory', warning)

    def test_the_disk_is_full(self):
        self.save(10, ROWS)
        cache = self.cache(10, [(oid, 1, bytes(1000)) for oid in range(100)])

        def work():
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            [warning] = self.warnings(self.warm(cache).save)
            self.assertIn('File too large', warning)

        in_child(self, work)
        self.assertEqual(self.rows(), ROWS)
        self.assertEqual(len(list(self.directory.iterdir())), 1)

    def test_leftovers_are_removed(self):
        leftover, other = self.directory / f'{self.path.name}.abc.new', self.directory / 'else.new'
        for path in leftover, other:
            path.touch()
        cache = self.cache(10, ROWS)
        warm = self.warm(cache)
        warm.save()
        self.assertTrue(leftover.exists())
        for path in leftover, other:
            os.utime(path, (time.time() - 7200,) * 2)
        cache.put(50, 1, b'new', 10)
        warm.save()
        self.assertFalse(leftover.exists())
        self.assertTrue(other.exists())


class SeveralProcesses(Directory):
    """They save as fast as they can, and are killed at any moment."""

    def setUp(self):
        super().setUp()
        self.patch('BLOCK_BYTES', 1000)
        self.truth = {oid: (1 + oid % 10, b'%d' % oid * (oid % 60)) for oid in range(500)}
        self.save(10, [(oid, *self.truth[oid]) for oid in range(250)])

    def saver(self, oids) -> int:
        """Start a process that saves these objects again and again; return its pid."""
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(60)
                warm = self.warm(self.cache(10, [(oid, *self.truth[oid]) for oid in oids]))
                while True:
                    warm._saved = None
                    warm.save()
            finally:
                os._exit(99)
        self.addCleanup(os.waitpid, pid, 0)
        return pid

    def kill(self, pid):
        kill_and_wait(open_process(pid))

    def assert_whole(self, least):
        with self.assertNoLogs('relstore', logging.WARNING):
            found = self.rows()
        self.assertGreaterEqual(len(found), least)
        for oid, tid, record in found:
            self.assertEqual((tid, record), self.truth[oid])

    def test_killed_at_any_moment(self):
        rnd = random.Random(3)
        pause = threading.Event()
        for _ in range(25):
            inode = self.path.stat().st_ino
            pid = self.saver(range(200, 400))
            deadline = time.monotonic() + 20
            while self.path.stat().st_ino == inode:
                self.assertLess(time.monotonic(), deadline, 'nothing is saved')
            pause.wait(rnd.random() * .01)
            self.kill(pid)
            self.assert_whole(400)
        self.assertGreater(len(list(self.directory.iterdir())), 1, 'none was killed while it wrote')
        self.patch('ABANDONED', -1)
        self.save(10, [(1, *self.truth[1])])
        self.assertEqual(list(self.directory.iterdir()), [self.path])
        self.assert_whole(400)

    def test_at_once(self):
        """Each adds its share to what another has just saved. The file is always whole."""
        savers = [self.saver(range(start, start + 100)) for start in range(100, 500, 100)]
        seen = set()
        deadline = time.monotonic() + 20
        while len(seen) < 500:
            self.assertLess(time.monotonic(), deadline, f'{len(seen)} objects')
            self.assert_whole(250)
            seen.update(oid for oid, _, _ in self.rows())
        for pid in savers:
            self.kill(pid)
        self.assert_whole(250)


# The model ---------------------------------------------------------------------------------------------------------

class Later:
    """A cache into which what is read arrives later, as if a slow thread read it."""

    def __init__(self, process):
        self._process = process
        self._cache = process.cache

    def fill(self, rows, at, generation):
        cache = self._cache
        self._process.pending.append(lambda: cache.fill(rows, at, generation))
        return True

    def __getattr__(self, name):
        return getattr(self._cache, name)


class Shared:
    """What several processes have in common."""

    def __init__(self):
        self.epoch = self.last = self.commits = 0
        self.latest = 0         # tid that ever was: a restored database gives none of them again
        self.revisions = {oid: [(0, b'%d at first' % oid)] for oid in range(OIDS)}

    def stands(self, session, tid):
        """As where no history is kept."""
        return max((revisions[-1][0] for revisions in self.revisions.values() if revisions[-1][0] <= tid), default=0)

    def current_tids(self, session, oids):
        return {oid: self.revisions[oid][-1][0] for oid in oids}

    def proves(self, known):
        return is_proven(self, None, known)


class Process(World):
    """One of several over one database, with a file."""

    def __init__(self, shared, make_cache, make_warm, directory):
        self.shared, self._make_cache, self._make_warm, self._directory = shared, make_cache, make_warm, directory
        last, commits = shared.last, shared.commits
        super().__init__(make_cache())
        shared.last, shared.commits = last, commits
        self.revisions = shared.revisions
        self.start()

    last = property(lambda self: self.shared.last, lambda self, last: setattr(self.shared, 'last', last))
    commits = property(lambda self: self.shared.commits, lambda self, count: setattr(self.shared, 'commits', count))

    def epoch_of(self, generation):
        return str(self.shared.epoch) if generation in (-1, self.cache.generation) else ''

    def start(self):
        self.cache = self._make_cache()
        self.pending = []
        for view in self.views:
            View.__init__(view, view.snapshot)
            view.at, view.generation = None, -1
        self.warm = self._make_warm(self._directory, 'model', Later(self), self.epoch_of, self.shared.proves, 100_000)
        self.cache.restart(self.warm.head(str(self.shared.epoch), lambda: self.last, self.shared.proves))
        if self.warm._usable:
            self.warm.fill(self.cache.generation)

    def save(self):
        self.warm._saved = None
        self.warm.save()


def history(seed, directory, make_cache=Cache, make_warm=WarmStart, steps=250):
    """Run one random history of two processes; return how many hits there were."""
    rnd = random.Random(seed)
    shared = Shared()
    limit = rnd.choice((LIMIT, 100 * LIMIT))
    for entry in Path(directory).iterdir():
        entry.unlink()
    processes = [Process(shared, lambda: make_cache(limit, 100, LOG_LIMIT), make_warm, directory) for _ in range(2)]

    def commit_somewhere(count=1):
        for _ in range(count):
            processes[0].commit(rnd.sample(range(OIDS), rnd.randrange(1, 3)), rnd.randrange(1, 3))

    def go_back(lost):
        shared.last = max(0, shared.last - lost)
        for oid, revisions in shared.revisions.items():
            shared.revisions[oid] = [(tid, record) for tid, record in revisions if tid <= shared.last]

    for _ in range(steps):
        process = rnd.choice(processes)
        dice, view = rnd.random(), rnd.choice(process.views)
        if dice < .1:
            mine = rnd.random() < .5 and view.own is None and view.generation == process.cache.generation
            process.commit(rnd.sample(range(OIDS), rnd.randrange(1, 3)), rnd.randrange(1, 3), view if mine else None)
        elif dice < .25:
            process.poll(view)
        elif dice < .5:
            if process.pending:
                process.arrive(rnd.randrange(len(process.pending)))
        elif dice < .85:
            process.load(view, rnd.randrange(OIDS), late=rnd.random() < .3)
        elif dice < .92:
            process.save()
        elif dice < .97:
            process.start()
        elif dice < .98:        # a crash that those who live notice
            shared.epoch += rnd.randrange(2)
            go_back(rnd.randrange(4))
            for process in processes:
                process.warm.discard()
                process.cache.restart(shared.last)
        elif dice < .99:        # a crash, and commits, while none of these lived
            shared.epoch += 1
            go_back(rnd.randrange(1, 6))
            commit_somewhere(rnd.randrange(8))
            for process in processes:
                process.start()
        else:                   # an older state is put in place of the database: not even the epoch tells
            shared.latest = max(shared.latest, shared.last)
            go_back(rnd.randrange(1, 6))
            if rnd.random() < .5:
                shared.last = shared.latest
                commit_somewhere(rnd.randrange(1, 8))
            for process in processes:
                process.start()
        for process in processes:
            process.check()
    return sum(process.hits for process in processes)


# Each rule left out.

class FillsWhatChanged(Cache):
    def fill(self, rows, at, generation=None):
        changed, self._changed = self._changed, {}
        try:
            return super().fill(rows, at, generation)
        finally:
            self._changed = changed


class FillsBelowTheFloor(Cache):
    def fill(self, rows, at, generation=None):
        return super().fill(rows, max(at, self.floor), generation)


class FillsAnotherGeneration(Cache):
    def fill(self, rows, at, generation=None):
        return super().fill(rows, at)


class SavesWhatIsOver(Cache):
    def current(self, generation=None):
        return self.head, [(oid, newest.tid, newest.state) for oid, newest in self._entries.items()]


class BelievesEveryEpoch(WarmStart):
    def __init__(self, directory, database, cache, epoch_of, *rest):
        super().__init__(directory, database, cache, lambda generation: epoch_of(generation) and 'epoch', *rest)

    def head(self, epoch, last_tid, proves):
        return super().head('epoch', last_tid, proves)


class BelievesWithoutProof(WarmStart):
    def _prove(self, file, proves):
        """Not asked."""


class BelievesWhatIsAhead(WarmStart):
    def _prove(self, file, proves):
        """Not asked."""

    def head(self, epoch, last_tid, proves):
        if not self._ahead(epoch):
            return last_tid()
        return super().head(epoch, lambda: max(last_tid(), 1 << 62), proves)

    def _ahead(self, epoch):
        try:
            with self._open(epoch):
                return True
        except warmstart.Unusable:
            return False


class LeavesWhatIsAhead(WarmStart):
    def discard(self):
        """Not even this."""


class _Merging(WarmStart):
    """Merges by another rule."""

    def _rows(self, own, head, epoch, generation):
        held = {row[0] for row in own}
        yield from own
        try:
            with self._open(epoch) as file:
                changed = self.changed(file, generation)
                if changed is not None:
                    held.update(changed)
                    for rows in file.blocks():
                        yield from (row for row in rows if row[0] not in held and self.keeps(row, head))
        except warmstart.Unusable:
            return

    def changed(self, file, generation):
        return self._cache.invalidations(file.head, None, generation)

    def keeps(self, row, head):
        return row[1] <= head


class MergesEverything(_Merging):
    def changed(self, file, generation):
        return []


class MergesBelowTheFloor(_Merging):
    def changed(self, file, generation):
        return self._cache.invalidations(max(file.head, self._cache.floor), None, generation)


CACHES = FillsWhatChanged, FillsBelowTheFloor, FillsAnotherGeneration, SavesWhatIsOver
FILES = (BelievesEveryEpoch, BelievesWithoutProof, BelievesWhatIsAhead, LeavesWhatIsAhead, MergesEverything,
         MergesBelowTheFloor)


class TestHistories(Directory):

    def setUp(self):
        super().setUp()
        self.patch('BLOCK_BYTES', 60)

    def test_random_histories(self):
        hits = 0
        for seed in range(250):
            with self.subTest(seed=seed):
                hits += history(seed, self.directory)
        self.assertGreater(hits, 4000)

    def assert_caught(self, **how):
        logging.disable()
        self.addCleanup(logging.disable, logging.NOTSET)
        for seed in range(1500):
            try:
                history(seed, self.directory, **how)
            except AssertionError:
                return
        self.fail('1500 histories saw nothing wrong')

    def test_each_guard_is_needed(self):
        for make_cache in CACHES:
            with self.subTest(make_cache.__name__):
                self.assert_caught(make_cache=make_cache)
        for make_warm in FILES:
            with self.subTest(make_warm.__name__):
                self.assert_caught(make_warm=make_warm)


# Real databases ----------------------------------------------------------------------------------------------------

class Suite(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-warm-'))
        self.addCleanup(shutil.rmtree, self.directory)
        self.other = self.open_storage()        # a process without a file
        self.addCleanup(self.other.close)
        self.oids = [self.other.new_oid() for _ in range(100)]
        commit(self.other, *((oid, z64, state(u64(oid))) for oid in self.oids))
        self.sent = 0

        def act(session, work, *arguments):
            self.sent += any(isinstance(argument, str) for argument in arguments)
            return real(session, work, *arguments)

        real = Session._do
        counting = mock.patch.object(Session, '_do', act)
        counting.start()
        self.addCleanup(counting.stop)

    def site(self, wait=True, **options):
        storage = self.open_storage(cache_local_dir=str(self.directory), **options)
        self.addCleanup(storage.close)
        if wait:
            self.assertTrue(storage._database.warm.filled.wait(20))
        return storage

    def view(self, storage):
        view = storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        return view

    def read(self, view, oids=None) -> int:
        """Load all objects, each as the database has it; return how many statements that took."""
        oids = self.oids if oids is None else oids
        truth = {oid: self.loaded(self.other, oid) for oid in oids}
        before = self.sent
        for oid in oids:
            self.assertEqual(self.loaded(view, oid), truth[oid])
        sent = self.sent - before
        view.afterCompletion()
        return sent

    def loaded(self, storage, oid):
        try:
            return storage.load(oid)
        except POSKeyError:
            return None

    def run_site(self):
        """Read everything, and end; so the file is there."""
        storage = self.site()
        view = self.view(storage)
        self.assertGreater(self.read(view), 0)
        view.release()
        storage.close()
        self.assertEqual(len(list(self.directory.iterdir())), 1)


class Sites(Suite):

    def test_the_next_process_loads_nothing(self):
        self.run_site()
        storage = self.site()
        self.assertEqual(self.read(self.view(storage)), 0)
        self.assertEqual(storage._database.cache.stats()['hits'], 100)

    def test_changes_while_no_process_ran(self):
        self.run_site()
        changed, deleted, new = self.oids[7], self.oids[8], self.other.new_oid()
        commit(self.other, (changed, self.other.getTid(changed), state(7777)), (new, z64, state(8888)))
        tid = self.other.getTid(deleted)
        commit(self.other, work=lambda txn: self.other.deleteObject(deleted, tid, txn))
        view = self.view(self.site())
        rest = [oid for oid in self.oids if oid not in (changed, deleted)]
        self.assertEqual(self.read(view, rest), 0)
        view.poll_invalidations()
        self.assertGreaterEqual(self.read(view, [changed, new]), 2)
        view.poll_invalidations()
        self.assertIsNone(self.loaded(view, deleted))

    def test_changes_while_it_is_read(self):
        """A view stands before them, the file is read, others follow: each sees what it has to."""
        self.run_site()
        first, second = self.oids[:2]
        with mock.patch.object(WarmStart, '_run', lambda warm, generation: warm.filled.set()):
            storage = self.site()
        early = self.view(storage)
        seen = self.loaded(self.other, first)
        commit(self.other, (first, self.other.getTid(first), state(7777)))
        between = self.view(storage)
        storage._database.warm.fill(storage._cache.generation)
        commit(self.other, (second, self.other.getTid(second), state(8888)))
        late = self.view(storage)
        if self.keep_history:
            self.assertEqual(self.loaded(early, first), seen)
        self.assertEqual(self.loaded(between, first), self.loaded(self.other, first))
        self.assertNotEqual(self.loaded(between, second), self.loaded(self.other, second))
        self.assertEqual(self.read(late, self.oids[2:]), 0)
        late.poll_invalidations()
        self.assertEqual(self.read(late, [first, second]), 1)   # `between` has loaded the first

    def test_too_many_changes(self):
        self.run_site()
        for oid in self.oids[:5]:
            commit(self.other, (oid, self.other.getTid(oid), state(7777)))
        with mock.patch.object(WarmStart, '_run', lambda warm, generation: warm.filled.set()):
            storage = self.site(poll_limit=3)
        view = self.view(storage)
        storage._database.warm.fill(storage._cache.generation)
        self.assertEqual(storage._cache.stats()['objects'], 0)
        self.assertGreater(self.read(view), 0)
        self.assertGreater(self.read(self.view(self.site(poll_limit=3))), 0)

    def test_opening_costs_no_statement_more(self):
        def cost(**options):
            before = self.sent
            storage = self.open_storage(**options)
            sent = self.sent - before
            storage.close()
            return sent

        self.run_site()
        self.assertEqual(cost(cache_local_dir=str(self.directory)), cost())

    def test_emptied_while_it_runs(self):
        storage = self.site()
        self.read(self.view(storage))
        storage._database.warm.save()
        [path] = self.directory.iterdir()
        self.other.zap_all()
        commit(self.other, (self.oids[0], z64, state(1)))
        view = self.view(storage)
        self.assertFalse(path.exists())
        self.read(view, self.oids[:3])

    def test_a_storage_that_is_dropped_goes(self):
        """Nobody has closed it, and its thread does not keep it."""
        storage = self.open_storage(cache_local_dir=str(self.directory))
        database, thread = weakref.ref(storage._database), storage._database.warm._thread
        storage._database.pool.close()
        del storage
        gc.collect()
        self.assertIsNone(database())
        thread.join(20)
        self.assertFalse(thread.is_alive())

    def test_a_child_begins_with_the_file(self):
        self.run_site()
        storage = self.site()
        before = self.view(storage)
        commit(self.other, (self.other.new_oid(), z64, state(1)))
        before.poll_invalidations()
        [path] = self.directory.iterdir()

        def work():
            warm = storage._database.warm
            self.assertEqual([thread.name for thread in threading.enumerate()], ['MainThread'], 'not used yet')
            view = self.view(storage)
            self.assertTrue(warm.filled.wait(20))
            self.assertEqual(self.read(view), 0)
            before.poll_invalidations()
            self.assertEqual(self.read(before), 0)
            new = storage.new_oid()
            commit(storage, (new, z64, state(1)))
            path.unlink()
            storage.close()
            self.assertFalse(warm._stop is parents or parents.is_set())
            self.assertTrue(path.exists())

        parents = storage._database.warm._stop
        in_child(self, work)
        before.poll_invalidations()
        self.assertEqual(self.read(before), 0)


class Rest(Suite):
    """What is the same on every database."""

    def test_emptied(self):
        self.run_site()
        self.other.zap_all()
        commit(self.other, (self.oids[0], z64, state(1)))
        self.read(self.view(self.site()), self.oids[:3])

    def test_no_cache_no_file(self):
        storage = self.open_storage(cache_local_dir=str(self.directory), cache_local_mb=0)
        self.view(storage).load(self.oids[0])
        storage.close()
        self.assertIsNone(storage._database.warm)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_one_file_for_each_database(self):
        self.run_site()
        second = self.open_storage('second', cache_local_dir=str(self.directory))
        self.addCleanup(second.close)
        oid = second.new_oid()
        commit(second, (oid, z64, state(1)))
        self.view(second).load(oid)
        second.close()
        self.assertEqual(len(list(self.directory.iterdir())), 2)
        self.assertEqual(self.read(self.view(self.site())), 0)

    def test_a_child_of_a_closed_one(self):
        self.run_site()
        storage = self.site()
        storage.close()
        in_child(self, lambda: self.assertIsNone(storage._database.warm._thread))

    def test_size_bound(self):
        storage = self.site(cache_local_dir_write_max_size=0)
        self.read(self.view(storage))
        storage.close()
        [path] = self.directory.iterdir()
        self.assertLess(path.stat().st_size, 200)


class Crash(unittest.TestCase):
    """Commits that were visible are lost; their tids, and more, are given anew."""

    def test_postgresql(self):
        require_postgresql(self)
        directory = Path(tempfile.mkdtemp(prefix='relstore-warm-'))
        self.addCleanup(shutil.rmtree, directory)
        server = PostgreSQLServer(durable=True)
        self.addCleanup(server.stop)
        server.start()
        dsn = server.create_database('crash')

        def opened():
            storage = relstore.RelStore(relstore.PostgreSQL(dsn), cache_local_dir=str(directory))
            self.addCleanup(storage.close)
            self.assertTrue(storage._database.warm.filled.wait(20))
            view = storage.new_instance()
            self.addCleanup(view.release)
            view.poll_invalidations()
            return storage, view

        storage, view = opened()
        oid = p64(1000)
        commit(storage, (oid, z64, state(1)))
        view.poll_invalidations()
        view.load(oid)
        storage.close()
        self.assertEqual(opened()[0]._cache.stats()['objects'], 1)
        server.kill()
        server.start()
        with self.assertLogs('relstore', logging.INFO) as logs:
            storage, view = opened()
        self.assertIn('crashed', logs.output[0])
        self.assertEqual(storage._cache.stats()['objects'], 0)
        self.assertEqual(view.load(oid)[0], state(1))


cases(globals(), Rest, backends=(SQLiteHistoryPreserving,))
cases(globals(), Sites, backends=(
    SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving, Psycopg2HistoryFree,
    MySQLdbHistoryPreserving, MySQLdbHistoryFree))
del Suite, Sites, Rest
