"""Clock: how large the files of a cache are together, and which of them go when there is no room for another.

The truth is in the directory itself. Beside it a file says how many bytes each of its 997 directories holds, for
nobody can look at all of them whenever one file is added. Whoever adds or removes files has the cache's lock, and
before he touches a directory he writes down that its number is unknown: if he is killed, the next one who has the lock
looks at that one again. If the file is missing or damaged, all are unknown. The lock is one on the cache's directory
(flock), which the system gives back however a process ends, and which is there even if somebody removes every file.

Other programs may have put files there, or removed some: ZEO and RelStorage lay their caches out in the same way. So a
directory is looked at when a process begins and it is not as it was (its time of modification), and whenever the hand
comes to it.

The hand goes round over the directories. A file whose time of access is zero was not used since the hand was there:
it goes. Of any other the hand sets that time to zero. Who uses a file sets it again, and most systems do that by
themselves when a file is read. ZEO and RelStorage remove those with the smallest time of access, which are the same.
A file that is open stays. In the second round what was used goes, too.

Without a bound nothing has to be counted: a file is renamed to where it belongs, without the lock. That many processes
wait for each other at a busy machine takes longer than all the rest of a read. Who opens the directory with a bound
later counts what is new.

Nothing is written through to the disk. After a power cut a file that had been added shortly before may be there and
lack its data; so those of the last minutes before the machine was booted are removed.
"""
import fcntl
import logging
import math
import os
import stat
import sys
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from relstore.blobs.files import forget_use, remove_if_closed, size_of
from relstore.errors import ConfigurationError, Unavailable

log = logging.getLogger('relstore')

DIRECTORIES = 997
SUFFIX = '.blob'
NAME = '.relstore-count'
# Seconds after which whoever waits for the lock does without: somebody was stopped while he had it.
PATIENCE = 10.0
# Seconds between two tries to get the lock: it is mostly had for a fifth of a millisecond.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.002
# Seconds for which a system may keep data in memory before it writes it to the disk, by far.
UNWRITTEN = 600
# Seconds after which a process that adds files without the lock says again that it does.
TOUCH_SECONDS = 60.0

# The file: a mark with the version in it, the checksum of what follows, which boot it was, where the hand is, the bytes
# of all directories, unknown if those of any are; then those of each, and the time of modification (ns) as of which
# they were counted.
MARK, CHECKSUM, BOOT, HAND, TOTAL, BYTES = range(6)
TIMES = BYTES + DIRECTORIES
LENGTH = TIMES + DIRECTORIES
MAGIC = int.from_bytes(b'relcnt\0\1', sys.byteorder)
UNKNOWN = -1


class Clock:
    """The files of a cache: at most `limit` bytes, at every moment; None: without a bound."""

    def __init__(self, directory: str, limit: int | None):
        self._directory, self._is_bounded = directory, limit is not None
        self._limit = sys.maxsize if limit is None else limit
        self._path = os.path.join(directory, NAME)
        self._touched = -math.inf       # when the file was, by this process

    def path(self, oid: int, tid: int) -> str:
        rest, number = divmod(oid, DIRECTORIES)
        return f'{self._directory}/{number}/{rest}.{tid:016x}{SUFFIX}'

    def begin(self) -> None:
        """Look at what is new to the count, and make room if there is too much."""
        with self._locked() as count:
            before = count.booted
            count.booted = _boot()
            self._look_at_changed(count)
            if before and before != count.booted:
                self._distrust(count, count.written - UNWRITTEN)
            self._make_room(count, 0)

    def size(self) -> int:
        """Return how many bytes all files have, as far as is known."""
        with self._locked() as count:
            if not self._is_bounded:
                self._look_at_changed(count)
            return count.total

    def put(self, source: str, oid: int, tid: int, size: int) -> str | None:
        """Rename a file of `size` bytes to where it belongs, and return the path; None if there is no room.

        If it is there already the source is removed.
        """
        if size > self._limit:
            return None
        # Before the lock, for it takes longer than all that is done under it. Nothing is counted of an empty one.
        path = self.path(oid, tid)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not self._is_bounded:
            if size_of(path) == size:
                os.unlink(source)
            else:
                _rename(source, path)
            self._touch()
            return path
        try:
            with self._locked() as count:
                return self._put(count, source, oid, tid, size)
        except Unavailable as e:
            log.warning('%s', e)
            return None

    def _touch(self) -> None:
        """Have the time of the count tell when files were added: after a power cut those of its last minutes go."""
        now = time.monotonic()
        if now > self._touched + TOUCH_SECONDS:
            self._touched = now
            with suppress(OSError):     # it is another user's, or gone: then more is doubted, or nothing is counted yet
                os.utime(self._path)

    def _put(self, count: '_Count', source: str, oid: int, tid: int, size: int) -> str | None:
        path, number = self.path(oid, tid), oid % DIRECTORIES
        there = size_of(path)
        if there == size:
            os.unlink(source)
            return path
        if there is not None:       # it was damaged
            count.save_without(number)
            os.unlink(path)
            self._look(count, number)
        if not self._make_room(count, size):
            return None
        count.save_without(number)
        _rename(source, path)
        count.set(number, count.bytes(number) + size, self._time(number))
        return path

    def _make_room(self, count: '_Count', size: int) -> bool:
        """Remove files until there is room for one; return whether there is."""
        for used_too in False, True:
            for _ in range(DIRECTORIES):
                if count.total + size <= self._limit:
                    return True
                count.hand = (count.hand + 1) % DIRECTORIES
                self._pass(count, count.hand, size, used_too)
        return count.total + size <= self._limit

    def _pass(self, count: '_Count', number: int, size: int, used_too: bool) -> None:
        """Be the hand that comes to a directory: of what may go the oldest goes first."""
        saved = False
        for file in sorted(self._look(count, number), key=lambda file: file.modified):
            if file.used and not used_too:
                forget_use(file.path, file.status)
            elif count.total + size > self._limit and file.size:
                if not saved:
                    count.save_without(number)
                    saved = True
                if remove_if_closed(file.path):
                    count.set(number, count.bytes(number) - file.size, 0)
        if saved:
            count.set(number, count.bytes(number), self._time(number))

    def _distrust(self, count: '_Count', since: float) -> None:
        """Remove what was written after a moment."""
        for number in range(DIRECTORIES):
            doubtful = [file for file in self._files(number) if file.modified > since]
            if doubtful:
                count.save_without(number)
                for file in doubtful:
                    remove_if_closed(file.path)
                self._look(count, number)

    def _look_at_changed(self, count: '_Count') -> None:
        for number in range(DIRECTORIES):
            if count.time(number) != self._time(number):
                self._look(count, number)

    def _look(self, count: '_Count', number: int) -> list['_File']:
        """Count the files of a directory anew."""
        seen = self._time(number)       # before, so that what others do meanwhile is noticed
        files = list(self._files(number))
        count.set(number, sum(file.size for file in files), seen)
        return files

    def _files(self, number: int) -> Iterator['_File']:
        try:
            entries = os.scandir(f'{self._directory}/{number}')
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield _File(entry.path, status)

    def _time(self, number: int) -> int:
        try:
            return os.stat(f'{self._directory}/{number}').st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextmanager
    def _locked(self) -> Iterator['_Count']:
        """Yield the numbers, none of them unknown; they are saved at the end, unless something failed."""
        lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _take(lock, self._directory)
            try:
                count = _Count(self._path)
                for number in count.unknown():
                    self._look(count, number)
                yield count
                count.save()
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)    # a process that was forked meanwhile has it open, too
        finally:
            os.close(lock)


class _File:

    def __init__(self, path: str, status: os.stat_result):
        self.path, self.status, self.size, self.modified = path, status, status.st_size, status.st_mtime
        self.used = status.st_atime_ns != 0     # since the hand was there


class _Count:
    """What the file says. It is read and written by who has the lock."""

    def __init__(self, path: str):
        self._path, self._numbers, self.written = path, array('q'), 0.0
        with suppress(FileNotFoundError), open(path, 'rb') as file:
            self.written = os.fstat(file.fileno()).st_mtime
            data = file.read(LENGTH * 8 + 1)
            if len(data) == LENGTH * 8:
                self._numbers.frombytes(data)
        if not self._numbers or self._numbers[MARK] != MAGIC or self._numbers[CHECKSUM] != self._checksum():
            self._numbers = array('q', [MAGIC, 0, int(self.written > 0), 0, UNKNOWN])
            self._numbers.extend([UNKNOWN] * DIRECTORIES + [0] * DIRECTORIES)
        self.total = self._numbers[TOTAL] if self._numbers[TOTAL] >= 0 else sum(self._numbers[BYTES:TIMES])

    @property
    def booted(self) -> int:
        """Which boot it was when it was saved; 0 if it was never."""
        return self._numbers[BOOT]

    @booted.setter
    def booted(self, boot: int) -> None:
        self._numbers[BOOT] = boot

    @property
    def hand(self) -> int:
        return self._numbers[HAND] % DIRECTORIES

    @hand.setter
    def hand(self, number: int) -> None:
        self._numbers[HAND] = number

    def unknown(self) -> list[int]:
        if self._numbers[TOTAL] >= 0:
            return []
        return [number for number, size in enumerate(self._numbers[BYTES:TIMES]) if size < 0]

    def bytes(self, number: int) -> int:
        return self._numbers[BYTES + number]

    def time(self, number: int) -> int:
        return self._numbers[TIMES + number]

    def set(self, number: int, size: int, time: int) -> None:
        """size: bytes of the files of a directory, as of a time of modification."""
        self.total += size - self._numbers[BYTES + number]
        self._numbers[BYTES + number], self._numbers[TIMES + number] = size, time

    def save(self) -> None:
        self._save(self.total)

    def save_without(self, number: int) -> None:
        """Save that a directory's number is unknown. It still is what is said here."""
        size, self._numbers[BYTES + number] = self._numbers[BYTES + number], UNKNOWN
        self._save(UNKNOWN)
        self._numbers[BYTES + number] = size

    def _save(self, total: int) -> None:
        self._numbers[TOTAL] = total
        self._numbers[CHECKSUM] = self._checksum()
        # In place: there is room for it on a disk that is full.
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(file, self._numbers, 0)
        finally:
            os.close(file)

    def _checksum(self) -> int:
        return zlib.crc32(memoryview(self._numbers)[BOOT:])


def _rename(source: str, path: str) -> None:
    try:
        os.replace(source, path)
    except FileNotFoundError:       # somebody has removed the directory just now
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(source, path)


def _take(lock: int, directory: str) -> None:
    deadline, pause = time.monotonic() + PATIENCE, SHORTEST_PAUSE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Unavailable(f'Another process has kept the blob cache {directory} locked for {PATIENCE:g} s; '
                                  'it may have been stopped.') from None
        except OSError as e:        # NFS knows them for files alone, and for what is opened to write
            raise ConfigurationError(f'The blob cache {directory} is on a file system without the locks that it needs '
                                     f'({e.strerror}): it has to be a local one.') from e
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@cache
def _boot() -> int:
    """Return what tells this boot of the machine from others; 1 where the system does not say."""
    try:
        with open('/proc/sys/kernel/random/boot_id', 'rb') as file:
            return 2 + zlib.crc32(file.read())
    except OSError:
        return 1
