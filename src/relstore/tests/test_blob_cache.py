"""The files of a blob cache: the bound holds at every moment, whatever happens to whom."""
import collections
import errno
import fcntl
import itertools
import os
import random
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from ZEO.ClientStorage import BlobCacheLayout
from ZODB.blob import Blob, BlobFile
from ZODB.utils import p64

from relstore.blobs import clock, temporary
from relstore.blobs.cache import BlobCache
from relstore.errors import ConfigurationError, StorageError
from relstore.tests.support.blobfiles import Directory, Worker, content, let_old, use
from relstore.tests.support.children import in_child
from relstore.tests.support.layers import Processes
from relstore.tests.support.patience import within

INDEX = clock.NAME
# What changes a directory or the index.
CALLS = {'open', 'write', 'pwrite', 'close', 'mkdir', 'replace', 'unlink', 'utime', 'chmod', 'flock'}


class OneProcess(Directory):

    def test_what_was_added_is_found(self):
        cache = self.cache()
        self.assertIsNone(cache.find(1, 2))
        self.assertIsNone(cache.open(1, 2))
        path = cache.add(1, 2, 5, iter([b'he', b'', b'llo']))
        self.assertEqual(cache.find(1, 2), path)
        self.assertEqual(Path(path).read_bytes(), b'hello')
        with cache.open(1, 2) as file:
            self.assertEqual(file.read(), b'hello')
        self.assertIsNone(cache.find(1, 3))
        self.assertEqual(cache.size(), 5)
        self.assertEqual(self.temporary(), [])

    def test_an_empty_blob(self):
        cache = self.cache()
        path = cache.add(1, 2, 0, [])
        self.assertEqual(cache.find(1, 2), path)
        self.assertEqual(Path(path).read_bytes(), b'')

    def test_without_a_bound(self):
        cache = self.cache(None)
        for oid in range(50):
            self.add(cache, oid, 10_000)
        self.assertEqual(cache.size(), 500_000)

    def test_without_a_bound_nobody_waits(self):
        """Whoever has the lock, nothing is counted; who comes with a bound counts what is there."""
        cache = self.cache(None)
        cache.size()
        with closing(_Locked(self.directory)), self.assertNoLogs('relstore', 'INFO'):
            paths = [self.add(cache, oid) for oid in (1, 2, 998, 1)]
        self.assertEqual(sorted(self.files()), sorted(set(paths)))
        self.assertEqual((cache.size(), self.temporary()), (3000, []))
        self.assertEqual(self.cache(2000).size(), self.bytes())
        self.assertEqual(self.bytes(), 2000)

    def test_without_a_bound_a_power_cut_leaves_what_is_old(self):
        cache, index = self.cache(None), self.directory / clock.NAME
        let_old(index, 5 * clock.UNWRITTEN)
        path = Path(self.add(cache, 1))
        let_old(path, 2 * clock.UNWRITTEN)
        new = self.add(cache, 2)
        with mock.patch.object(clock, '_boot', return_value=12345):
            self.cache(None)
        self.assertEqual((path.exists(), os.path.exists(new)), (True, False))

    def test_the_lock_is_held_for_the_count_alone(self):
        """To make a directory takes longer than all that is done under the lock, and others wait."""
        cache, made = self.cache(), []

        def mkdir(path, *arguments):
            with closing(_Locked(self.directory, wait=False)):
                made.append(path)
            real(path, *arguments)

        real = os.mkdir
        with mock.patch.object(os, 'mkdir', mkdir):
            path = self.add(cache, 1)
        self.assertIn(os.path.dirname(path), made)
        self.assert_right(10_000)

    def test_it_is_where_zeo_looks(self):
        layout, cache = BlobCacheLayout(), self.cache()
        rnd = random.Random(1)
        for oid in (0, 996, 997, 2 ** 63 - 1, *(rnd.randrange(1 << 63) for _ in range(20))):
            tid = rnd.randrange(1 << 63)
            expected = self.directory / layout.getBlobFilePath(p64(oid), p64(tid))
            self.assertEqual(self.add(cache, oid, 10, tid), str(expected))
        self.assertEqual((self.directory / '.layout').read_text(), 'zeocache')

    def test_what_others_have_put_there_is_served_and_counted(self):
        self.cache()
        path = self.directory / '5' / f'1.{7:016x}.blob'
        path.parent.mkdir()
        path.write_bytes(b'theirs')
        cache = self.cache()
        self.assertEqual(cache.find(997 + 5, 7), str(path))
        self.assertEqual(cache.size(), 6)
        path.unlink()
        self.assertIsNone(cache.find(997 + 5, 7))
        self.assertEqual(self.cache().size(), 0)

    def test_too_much_is_removed_when_it_is_opened(self):
        cache = self.cache(None)
        for oid in range(50):
            self.add(cache, oid)
        self.assertEqual(self.cache(20_000).size(), 20_000)
        self.assert_right(20_000)

    def test_what_others_put_there_meanwhile_is_noticed_when_the_hand_comes(self):
        cache = self.cache(10_000)
        for oid in range(5):
            self.add(cache, oid)
        path = self.directory / '900' / f'0.{7:016x}.blob'
        path.parent.mkdir()
        path.write_bytes(bytes(7000))
        for oid in range(100, 110):
            self.add(cache, oid)
        self.assert_right(10_000)

    def test_what_is_used_stays(self):
        """For the most part; and what is used once does not drive it out."""
        cache, rnd = self.cache(100_000), random.Random(1)
        missed = 0
        for _ in range(1000):
            self.add(cache, rnd.randrange(1000, 1 << 40))
            oid = rnd.randrange(30)
            if cache.find(oid, 1) is None:
                missed += 1
                self.add(cache, oid)
        self.assertLess(missed, 180)        # 137; and 224 if it did not matter

    def test_it_is_the_access_that_tells_and_the_modification_stays(self):
        cache = self.cache()
        path = self.add(cache, 1)
        os.utime(path, (0, 1000))
        cache.find(1, 1)
        self.assertGreater(os.stat(path).st_atime, 1000)
        os.utime(path, (0, 1000))
        cache.open(1, 1).close()
        self.assertGreater(os.stat(path).st_atime, 1000)
        self.assertEqual(os.stat(path).st_mtime, 1000)

    def test_wrong_sizes(self):
        cache = self.cache()
        for pieces, words in ([b'abc'], 'only 3'), ([b'abc', b'def'], 'more'), ([], 'only 0'):
            with self.subTest(words), self.assertRaisesRegex(StorageError, f'was to have 5 bytes, and has {words}'):
                cache.add(1, 2, 5, pieces)
        self.assertIsNone(cache.find(1, 2))
        self.assertEqual((self.temporary(), self.files()), ([], {}))

    def test_more_than_announced_is_not_read_to_its_end(self):
        def endless():
            while True:
                yield bytes(1000)
        with self.assertRaisesRegex(StorageError, 'more'):
            self.cache().add(1, 2, 5000, endless())

    def test_the_source_fails(self):
        """What it raises is not taken for the failure of a file."""
        def broken():
            yield b'abc'
            raise ConnectionResetError('by the test')
        with self.assertRaises(ConnectionResetError):
            self.cache().add(1, 2, 5, broken())
        self.assertEqual((self.temporary(), self.files()), ([], {}))

    def test_the_disk_is_full(self):
        cache, write, calls = self.cache(), os.write, []

        def full(descriptor, data):
            calls.append(len(data))
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)
        with mock.patch.object(os, 'write', full), self.assertRaisesRegex(StorageError, 'No space left on device'):
            cache.add(1, 2, 6, [b'abc', b'def'])
        self.assertEqual((self.temporary(), self.files()), ([], {}))
        cache.add(1, 2, 6, [b'abc', b'def'])

    def test_a_write_that_was_cut_short(self):
        write = os.write
        with mock.patch.object(os, 'write', lambda descriptor, data: write(descriptor, data[:3])):
            path = self.cache().add(1, 2, 10, [b'0123456789'])
        self.assertEqual(Path(path).read_bytes(), b'0123456789')

    def test_a_file_that_lost_data_is_replaced(self):
        cache = self.cache(10_000)
        path = self.add(cache, 1)
        os.truncate(path, 10)
        self.assertEqual(self.add(cache, 1), path)
        self.assertEqual(Path(path).read_bytes(), content(1, 1000))
        self.assert_right(10_000)

    def test_adopted(self):
        cache = self.cache()
        source = self.file(b'committed')
        path = cache.adopt(1, 2, source)
        self.assertEqual(cache.find(1, 2), path)
        self.assertEqual(Path(path).read_bytes(), b'committed')
        self.assertFalse(os.path.exists(source))
        self.assertEqual(cache.size(), 9)

    def test_adopted_from_another_file_system(self):
        replace = os.replace

        def elsewhere(source, target):
            if os.path.dirname(source) == str(self.parent):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            replace(source, target)
        source = self.file(b'committed')
        with mock.patch.object(os, 'replace', elsewhere):
            path = self.cache().adopt(1, 2, source)
        self.assertEqual(Path(path).read_bytes(), b'committed')
        self.assertFalse(os.path.exists(source))

    def test_nothing_to_adopt(self):
        with self.assertRaisesRegex(StorageError, 'No such file'):
            self.cache().adopt(1, 2, str(self.parent / 'nowhere'))

    def test_nobody_writes_it(self):
        """Who may read the directory may read it."""
        for mode in 0o755, 0o750, 0o700:
            self.cache()
            self.directory.chmod(mode)
            path = self.add(self.cache(), mode)
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), mode & 0o444)

    def test_a_file_that_is_open_stays(self):
        cache = self.cache(10_000)
        paths = {oid: self.add(cache, oid) for oid in range(10)}
        with cache.open(3, 1) as file:
            for oid in range(100, 130):
                self.add(cache, oid)
            self.assertTrue(os.path.exists(paths[3]))
            self.assertEqual(file.read(), content(3, 1000))
        self.assertEqual(sum(map(os.path.exists, paths.values())), 1)
        self.assert_right(10_000)

    def test_as_a_blob_is_opened(self):
        cache, blob = self.cache(1000), Blob()
        path = self.add(cache, 1)
        with cache.open(1, 1, lambda path: BlobFile(path, 'r', blob)) as file:
            self.assertIsInstance(file, BlobFile)
            self.add(cache, 2)
            self.assertEqual(file.read(), content(1, 1000))
            self.assertTrue(os.path.exists(path))
        self.add(cache, 3)
        self.assertFalse(os.path.exists(path))

    def test_removed_while_it_is_opened(self):
        cache = self.cache()
        path = self.add(cache, 1)

        def removed(name):
            file = open(name, 'rb')     # noqa: SIM115 (closed by what is tested)
            os.unlink(path)
            return file
        self.assertIsNone(cache.open(1, 1, removed))

    def test_the_index_is_gone_or_damaged(self):
        cache = self.cache(10_000)
        for oid in range(9):
            self.add(cache, oid)
        index = self.directory / INDEX
        good = index.read_bytes()
        rnd = random.Random(1)
        flips = [good[:k] + bytes([good[k] ^ 1 << rnd.randrange(8)]) + good[k + 1:]
                 for k in (*range(48), *rnd.sample(range(48, len(good)), 50))]
        for damaged in None, b'', good[:-1], good + b'x', bytes(len(good)), rnd.randbytes(len(good)), *flips:
            if damaged is None:
                index.unlink()
            else:
                index.write_bytes(damaged)
            self.assertEqual(cache.size(), self.bytes())
        for oid in range(20, 40):
            index.write_bytes(rnd.randbytes(len(good)))
            self.add(cache, oid)
            self.assertLessEqual(self.bytes(), 10_000)
        self.assert_right(10_000)

    def test_what_was_not_written_to_the_disk_before_a_power_cut(self):
        """A file that was there and lacked its data would be served as the blob."""
        cache = self.cache()
        old, new = self.add(cache, 1), self.add(cache, 2)
        let_old(Path(old), 2 * clock.UNWRITTEN)
        self.cache()
        self.assertEqual(len(self.files()), 2)
        with mock.patch.object(clock, '_boot', return_value=12345):
            cache = self.cache()
            self.assertEqual(list(self.files()), [old])
            self.assertFalse(os.path.exists(new))
            self.assertEqual(cache.size(), 1000)
            new = self.add(cache, 2)
            self.cache()
            self.assertTrue(os.path.exists(new))

    def test_of_a_warm_cache_nothing_is_doubted(self):
        path = self.directory / '5' / f'1.{7:016x}.blob'
        path.parent.mkdir(parents=True)
        path.write_bytes(b'theirs')
        self.assertEqual(self.cache().find(997 + 5, 7), str(path))

    def test_too_large(self):
        cache = self.cache(10_000)
        self.add(cache, 1)
        path = self.add(cache, 2, 10_001)
        self.assertEqual(Path(path).read_bytes(), content(2, 10_001))
        self.assertEqual(cache.find(2, 1), path)
        self.assertEqual(self.add(cache, 2, 10_001), path)
        self.assertEqual(len(self.temporary()), 1)
        self.assertIsNotNone(cache.find(1, 1))
        self.assertEqual(self.bytes(), 1000)
        with cache.open(2, 1) as file:
            cache.forget_large()
            self.assertEqual(file.read(), content(2, 10_001))
            self.assertEqual(cache.find(2, 1), path)
        cache.forget_large()
        self.assertIsNone(cache.find(2, 1))
        self.assertEqual(self.temporary(), [])

    def test_a_large_one_is_one_connections(self):
        cache = self.cache(100)
        mine, other = cache.new_instance(), cache.new_instance()
        path, theirs = self.add(mine, 1), self.add(other, 1)
        self.assertNotEqual(path, theirs)
        mine.forget_large()
        self.assertEqual((mine.find(1, 1), other.find(1, 1)), (None, theirs))
        other.forget_large()

    def test_all_others_are_open(self):
        cache = self.cache(3000)
        for oid in range(3):
            self.add(cache, oid)
        held = [cache.open(oid, 1) for oid in range(3)]
        path = self.add(cache, 4)
        self.assertIn('/.relstore/', path)
        self.assertEqual(cache.find(4, 1), path)
        self.assertEqual(len(self.files()), 3)
        for file in held:
            file.close()
        cache.forget_large()
        self.assertNotIn('/.relstore/', self.add(cache, 4))
        self.assert_right(3000)

    def test_somebody_keeps_the_lock(self):
        """He was stopped. Nobody waits for ever, and the bound holds."""
        cache = self.cache()
        with mock.patch.object(clock, 'PATIENCE', .05), closing(_Locked(self.directory)), \
                self.assertLogs('relstore', 'WARNING') as logs:
            path = self.add(cache, 1)
            self.cache()
        self.assertIn('/.relstore/', path)
        self.assertIn('kept the blob cache', logs.output[0])
        self.assertEqual(self.files(), {})

    def test_other_layouts_are_refused(self):
        for name, text in ('.layout', 'bushy'), ('.layout', 'lawn'), ('0x01', ''):
            self.directory.mkdir()
            (self.directory / name).write_text(text)
            with self.subTest(name, text=text):
                with self.assertRaisesRegex(ConfigurationError, f'layout {text or "lawn"}.*shared-blob-dir'):
                    self.cache()
                self.assertEqual(os.listdir(self.directory), [name])
            (self.directory / name).unlink()
            self.directory.rmdir()

    def test_no_directory(self):
        self.directory.write_text('a file')
        with self.assertRaisesRegex(StorageError, 'cannot be used'):
            self.cache()

    def test_a_file_system_without_locks(self):
        with mock.patch.object(fcntl, 'flock', side_effect=OSError(errno.EBADF, os.strerror(errno.EBADF))), \
                self.assertRaisesRegex(ConfigurationError, 'without the locks'):
            self.cache()

    def test_too_many_files_are_open(self):
        cache = self.cache()
        self.add(cache, 1)
        with self.assertRaisesRegex(StorageError, 'The blob 0x1 cannot be opened in .*: Too many open files'):
            cache.open(1, 1, mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))

    def test_the_directory_is_removed_meanwhile(self):
        cache = self.cache()
        self.add(cache, 1)
        os.rename(self.directory, self.parent / 'moved')
        self.assertIsNone(cache.find(1, 1))
        with self.assertRaises(StorageError):
            cache.size()

    def test_memory(self):
        cache, piece = self.cache(1 << 30), bytes(1 << 20)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        cache.add(1, 1, 64 << 20, (piece for _ in range(64)))
        _, peak = tracemalloc.get_traced_memory()
        self.assertLess(peak, 1 << 20)

    def test_memory_of_many(self):
        cache = self.cache(50_000)
        for oid in range(100):
            self.add(cache, oid, 1)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        begun, _ = tracemalloc.get_traced_memory()
        for oid in range(1000, 1300):
            self.add(cache, oid, 1)
            cache.open(oid, 1).close()
        used, _ = tracemalloc.get_traced_memory()
        self.assertLess(used - begun, 20_000)

    def test_threads_add_one_blob(self):
        for oid in range(20):
            cache, barrier, found = self.cache(), threading.Barrier(4), []

            def pieces(oid=oid, barrier=barrier):
                yield content(oid, 1000)[:500]
                barrier.wait(60)
                yield content(oid, 1000)[500:]
            threads = [threading.Thread(target=lambda: found.append(cache.new_instance().add(oid, 1, 1000, pieces())))
                       for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(found, [cache.find(oid, 1)] * 4)
        self.assertEqual(self.temporary(), [])
        self.assert_right(10_000)


class _Locked:
    """The lock of a cache, held until it is closed. BlockingIOError: somebody has it, and this does not wait."""

    def __init__(self, directory: Path, wait: bool = True):
        self._descriptor = os.open(directory, os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def close(self):
        os.close(self._descriptor)


class SeveralProcesses(Directory):
    layer = Processes
    limit = 20_000
    objects = 60

    def workers(self, number: int, seed: int = 0) -> list[Worker]:
        return [Worker(self, use(self.directory, self.limit, self.objects), seed + n) for n in range(number)]

    def observe(self, meanwhile=lambda rnd: None) -> None:
        """Stop all in a moment in which they may be anywhere, and look."""
        workers, rnd = self.workers(4), random.Random(1)
        looks = fullest = 0
        try:
            for _ in within('the cache is nearly full'):
                for worker in workers:
                    worker.stop()
                there = self.bytes()
                self.assertLessEqual(there, self.limit)
                meanwhile(rnd)
                for worker in workers:
                    worker.go_on()
                looks, fullest = looks + 1, max(fullest, there)
                if looks > 250 and fullest > self.limit * .9:
                    break
                time.sleep(rnd.random() * .01)
        finally:
            for worker in workers:
                worker.kill()
        self.assert_right(self.limit)

    def test_the_bound_holds_at_every_moment(self):
        self.observe()

    def test_the_index_is_removed_or_damaged_meanwhile(self):
        index = self.directory / INDEX

        def damage(rnd):
            if rnd.random() < .5:
                index.unlink(missing_ok=True)
            elif index.exists():
                index.write_bytes(rnd.randbytes(rnd.choice((0, 100, index.stat().st_size))))
        self.observe(damage)

    def test_killed_at_any_moment(self):
        rnd, cache = random.Random(2), self.cache(self.limit)
        for k in range(25):
            workers = self.workers(3, 10 * k)
            time.sleep(.02 + rnd.random() * .1)
            for worker in workers:
                worker.kill()
            there = self.bytes()
            self.assertLessEqual(there, self.limit)
            self.assertEqual(cache.size(), there)
        left = list((self.directory / '.relstore').iterdir())
        self.assertNotEqual(left, [])
        self.cache()
        self.assertTrue(all(path.exists() for path in left))
        with mock.patch.object(temporary, 'time', SimpleNamespace(time=lambda: time.time() + 48 * 3600)):
            self.cache()
        self.assertEqual([path for path in left if path.exists()], [])

    def test_killed_at_each_call(self):
        """Of those that an addition makes, for which two others go: before it, and after it."""
        def child(oid, k):
            calls = 0

            def count(frame, event, what):
                nonlocal calls
                calls += event in ('c_call', 'c_return') and what.__name__ in CALLS
                if calls > k:
                    os.kill(os.getpid(), signal.SIGKILL)
            sys.setprofile(count)
            self.add(cache, oid, 2000)
            os._exit(0)

        cache, others = self.cache(10_000), itertools.count(10_000)
        outcomes = collections.Counter()
        for k in range(100):
            while cache.size() < 10_000:
                self.add(cache, next(others))
            pid = os.fork()
            if pid == 0:
                child(k, k)
            _, status = os.waitpid(pid, 0)
            there = self.bytes()
            self.assertLessEqual(there, 10_000)
            self.assertEqual(cache.size(), there, k)
            outcomes[status, there, cache.find(k, 1) is not None] += 1
        self.assertEqual(set(outcomes), {
            (signal.SIGKILL, 10_000, False), (signal.SIGKILL, 9000, False), (signal.SIGKILL, 8000, False),
            (signal.SIGKILL, 10_000, True), (0, 10_000, True)})

    def test_an_open_file_in_another_process(self):
        cache = self.cache(3000)
        path = self.add(cache, 1)
        theirs, ours = os.pipe()

        def hold(rnd):
            file = BlobCache(str(self.directory), 3000).open(1, 1)
            os.write(ours, file.read(3))
            signal.pause()
        worker = Worker(self, hold, 0)
        os.read(theirs, 3)
        for oid in range(10, 20):
            self.add(cache, oid)
        self.assertTrue(os.path.exists(path))
        worker.kill()
        for _ in within('the file is closed with its process'):
            for oid in range(20, 30):
                self.add(cache, oid)
            if not os.path.exists(path):
                break
        os.close(theirs), os.close(ours)

    def test_another_user_who_may_not_write(self):
        cache = self.cache()
        path = self.add(cache, 1)
        source = self.file(b'committed')

        def work():
            os.chmod(self.directory, 0o555)
            os.chmod(self.directory / '.relstore', 0o555)
            os.chmod(self.directory / INDEX, 0o444)
            if os.geteuid() == 0:
                os.setuid(65534)
            for fails in (self.cache, lambda: self.add(cache.new_instance(), 5)):
                with self.assertRaisesRegex(ConfigurationError, 'Permission denied'):
                    fails()
            with self.assertRaisesRegex(ConfigurationError, 'Permission denied'):
                cache.adopt(5, 1, source)
            self.assertEqual(cache.find(1, 1), path)
            with cache.open(1, 1) as file:
                self.assertEqual(file.read(), content(1, 1000))

        def unseen():
            os.chmod(self.directory, 0o700)
            if os.geteuid() == 0:
                os.setuid(65534)
            else:
                os.chmod(self.directory, 0)
            for fails in (lambda: cache.find(1, 1), lambda: cache.open(1, 1)):
                with self.assertRaisesRegex(ConfigurationError, 'The blob 0x1 cannot be .*: Permission denied'):
                    fails()

        in_child(self, unseen)
        in_child(self, work)
        os.chmod(self.directory, 0o755)
        os.chmod(self.directory / INDEX, 0o644)
        self.assertTrue(os.path.exists(source))
        self.assert_right(10_000)

    def test_the_disk_is_full(self):
        cache = self.cache(None)

        def work():
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            with self.assertRaisesRegex(StorageError, 'File too large'):
                cache.add(1, 1, 60_000, [bytes(20_000)] * 3)
        in_child(self, work)
        self.assertEqual((self.temporary(), self.files()), ([], {}))

    def test_the_disk_is_full_for_the_index(self):
        """All is counted each time, then."""
        def work():
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
            cache = self.cache()
            for oid in range(30):
                self.add(cache, oid)
                self.assertEqual(cache.size(), min(oid + 1, 10) * 1000)
            self.assertLess((self.directory / INDEX).stat().st_size, 5001)
        in_child(self, work)
        self.assertEqual(len(self.files()), 10)

    def test_a_child_leaves_alone_what_is_large(self):
        cache = self.cache(100)
        path = self.add(cache, 1)

        def work():
            self.assertIsNone(cache.find(1, 1))
            theirs = self.add(cache, 1)
            self.assertNotEqual(theirs, path)
            cache.forget_large()
            self.assertFalse(os.path.exists(theirs))
        in_child(self, work)
        self.assertEqual(cache.find(1, 1), path)
        os.unlink(path)         # somebody cleans up
        self.assertIsNone(cache.find(1, 1))
        self.assertEqual(Path(self.add(cache, 1)).read_bytes(), content(1, 1000))

    def test_forked_while_another_thread_makes_the_directory(self):
        cache, made, forked = self.cache(), threading.Event(), threading.Event()
        mkdtemp = tempfile.mkdtemp

        def slow(*args):
            made.set()
            forked.wait(60)
            return mkdtemp(*args)
        with mock.patch.object(tempfile, 'mkdtemp', slow):
            thread = threading.Thread(target=cache.new_path, args=(1,))
            thread.start()
            made.wait(60)
        in_child(self, lambda: self.add(cache, 1))
        forked.set()
        thread.join()
        self.assertIsNotNone(cache.find(1, 1))

    def test_a_child_has_a_directory_of_its_own(self):
        cache = self.cache()
        ours = os.path.dirname(cache.new_path(1))

        def work():
            self.assertNotEqual(os.path.dirname(cache.new_path(1)), ours)
            self.assertEqual(os.path.dirname(cache.new_path(1)), os.path.dirname(cache.new_path(2)))
            self.add(cache, 1)
            cache.close()
        in_child(self, work)
        self.assertEqual(os.path.dirname(cache.new_path(1)), ours)
        self.assertEqual(os.listdir(self.directory / '.relstore'), [os.path.basename(ours)])
        self.assertIsNotNone(cache.find(1, 1))
