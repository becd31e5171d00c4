"""Directories of blobs, and processes that use one at random until they are killed."""
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path

from relstore.blobs.cache import BlobCache


def content(oid: int, size: int) -> bytes:
    """Return the data of a blob: a part of it, or another one's, is not the same."""
    return (oid.to_bytes(8, 'big') * (size // 8 + 1))[:size]


def size_of(oid: int) -> int:
    """Return how large that of a blob is, in tests with many."""
    return oid * 7919 % 3000


class Directory(unittest.TestCase):
    """A directory below one that goes with the test; another user may come that far."""

    def setUp(self):
        self.parent = Path(tempfile.mkdtemp(prefix='relstore-blobs-')).resolve()
        self.parent.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.parent)
        self.directory = self.parent / 'blobs'

    def cache(self, limit: int | None = 10_000) -> BlobCache:
        cache = BlobCache(str(self.directory), limit)
        self.addCleanup(cache.close)
        return cache

    def add(self, cache: BlobCache, oid: int, size: int = 1000, tid: int = 1) -> str:
        return cache.add(oid, tid, size, [content(oid, size)])

    def file(self, data: bytes) -> str:
        """Return a file with some data, outside of the directory."""
        handle, path = tempfile.mkstemp(dir=self.parent)
        with open(handle, 'wb') as file:
            file.write(data)
        return path

    def temporary(self) -> list[Path]:
        """Return the temporary files of all processes, without what tells that they live."""
        return [path for name in ('tmp', '.relstore') for path in (self.directory / name).rglob('*')
                if path.is_file() and path.name != '.lock']

    def files(self) -> dict[str, int]:
        """Return the sizes of all blob files in a cache, by path."""
        found = {}
        for path in self.directory.glob('[0-9]*/*.blob'):
            try:
                found[str(path)] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found

    def bytes(self) -> int:
        return sum(self.files().values())

    def assert_right(self, limit: int) -> None:
        """What is counted is what is there, and no more than there may be; when nobody else is at work."""
        self.assertLessEqual(self.bytes(), limit)
        self.assertEqual(self.cache(limit).size(), self.bytes())


class Worker:
    """A child process that does something again and again. It is killed; if it ends by itself that is a failure."""

    def __init__(self, test: unittest.TestCase, work: Callable[[random.Random], None], seed: int):
        self._test = test
        theirs, ours = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(theirs)
                signal.alarm(120)
                work(random.Random(seed))
            except BaseException:
                os.write(ours, traceback.format_exc().encode())
            finally:
                os._exit(1)
        os.close(ours)
        self._said, self._ended = theirs, False
        test.addCleanup(self._kill)

    def stop(self) -> None:
        """Return when it stands still, wherever it was."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._failed()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        status = self._kill()
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            self._failed()
        os.close(self._said)

    def _kill(self) -> int:
        """Return the status with which it ended, if that is not known already."""
        if self._ended:
            return signal.SIGKILL
        self._ended = True
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]

    def _failed(self) -> None:
        self._ended = True
        with open(self._said, 'rb') as said:
            self._test.fail(said.read().decode() or 'the child ended')


def use(directory: Path, limit: int, objects: int) -> Callable[[random.Random], None]:
    """Return what a Worker does with a cache: whatever a site does, and compare what it is given."""

    def work(rnd: random.Random) -> None:
        cache = BlobCache(str(directory), limit)
        held: list = []
        while True:
            oid = rnd.randrange(objects)
            size = size_of(oid)
            expected = content(oid, size)
            choice = rnd.random()
            if choice < .3:
                step = rnd.randrange(1, 1500)
                path = cache.add(oid, 1, size, (expected[k:k + step] for k in range(0, size, step)))
            elif choice < .4:
                source = cache.new_path(oid)
                Path(source).write_bytes(expected)
                path = cache.adopt(oid, 1, source)
            else:
                path = cache.find(oid, 1)
            assert path is None or os.path.basename(path).endswith(f'.{1:016x}.blob') or '/.relstore/' in path, path
            file = cache.open(oid, 1)
            if file is not None:
                held.append(file)
                assert file.read() == expected, oid
                assert os.fstat(file.fileno()).st_nlink == 1, 'an open file was removed'
            while len(held) > 3:
                file = held.pop(rnd.randrange(len(held)))
                assert os.fstat(file.fileno()).st_nlink == 1, 'an open file was removed'
                file.close()
            cache.forget_large()
    return work


def let_old(path: Path, seconds: float) -> None:
    """Have a file or directory look older."""
    status = path.stat()
    os.utime(path, (status.st_atime - seconds, time.time() - seconds))
