"""The saved cache: when it is filled, when it is written, and by several processes."""
import logging
import os
import random
import resource
import signal
import threading
import time
from unittest import mock

from relstore.caching.cache import Cache
from relstore.caching.revision import OBJECT_BYTES, REVISION_BYTES, memory_of
from relstore.tests.support.children import in_child
from relstore.tests.support.layers import Processes, SQLiteFiles
from relstore.tests.support.saved import MB, ROWS, Directory
from relstore.tests.support.servers import kill_and_wait, open_process
from relstore.tests.support.world import get


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
    layer = SQLiteFiles

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
        self.patch('SAVE_EVERY_SECONDS', .01)
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
    layer = Processes

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
        self.patch('ABANDONED_AFTER_SECONDS', -1)
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
