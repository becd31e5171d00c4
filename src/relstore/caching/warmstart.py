"""WarmStart: saves the cache in a file, so that the next process does not start with an empty one.

One file serves all processes of a machine that open the same database.  It holds states that were current at one tid,
its head.  It is used only if the log of the cache reaches back to that head, and then by the rules of the cache:
a state that has changed since is never served to a view that sees the change.  The file is void once its epoch is
over, as far as an epoch outlasts a restart of everything.  And since a restored backup may contain the same epoch, the
file records which objects had changed last, and is used only if the database proves to be the one it was saved from.

The file, all numbers big-endian:

    header      'relstore', version (2 bytes), head (8), floor (8), length of database (2) and of epoch (2), number of
                changed objects (2), database, epoch; oid (8) and tid (8) of each object that changed after the floor;
                CRC-32 of all that (4)
    block       length (4), checksum (4), and that many bytes of records; the most useful first
    record      oid (8), tid (8), length (4), state
    end         a block of length 0

The states are the database's.  Whoever can read the file can read them, and whoever can write it decides what the site
loads: so only its owner gets access, and a file that others may have written is not used.
"""
import errno
import logging
import os
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from relstore.caching.cache import Cache
from relstore.caching.proof import ENOUGH, Known
from relstore.errors import StorageError

log = logging.getLogger('relstore')

SAVE_EVERY_SECONDS = 300
# A temporary file untouched for this long belongs to a process that was killed.
ABANDONED_AFTER_SECONDS = 3600
BLOCK_BYTES = 1 << 16
# The pause between two blocks, so that a load meanwhile waits for no more than one.
PAUSE_SECONDS = .001

MAGIC, VERSION = b'relstore', 2
HEADER = struct.Struct('>8sHQQHHH')
CHANGE = struct.Struct('>QQ')
CHECKSUM = struct.Struct('>I')
BLOCK = struct.Struct('>II')
RECORD = struct.Struct('>QQI')

Row = tuple[int, int, bytes]            # (oid, tid, state)


class Unusable(Exception):
    """Why the file is not used, or not used any further."""

    def __init__(self, reason: str, level: int = logging.WARNING):
        super().__init__(reason)
        self.level = level


class WarmStart:
    """Keeps the states of a cache in a file: a thread reads it once, and saves it regularly.

    directory: created when needed.  database: its name, the same for everybody who opens it.  epoch_of: returns the
    epoch of a generation of the cache, '' if it is over.  proves: asks the database whether it still has what is known.
    largest: approximate limit for the file, in bytes.

    Nothing here fails the application: problems with the file are logged.
    """

    def __init__(self, directory: str, database: str, cache: Cache, epoch_of: Callable[[int], str],
                 proves: Callable[[Known], bool], largest: int):
        self._directory = os.path.abspath(os.path.expanduser(directory))
        self._name = f'relstore-{database}.cache'
        self.path = os.path.join(self._directory, self._name)
        self._database, self._cache, self._epoch_of, self._proves = database, cache, epoch_of, proves
        self._largest = largest
        self._thread: threading.Thread | None = None
        self._begin()

    def _begin(self) -> None:
        self.filled = threading.Event()     # has the file been read, as far as it is useful?
        self._stop = threading.Event()
        self._usable = False
        self._proven: tuple[Any, ...] | None = None   # the file that head() has accepted
        self._saved: tuple[Any, ...] | None = None    # what the cache was like when it agreed with the file

    # For the Database ---------------------------------------------------------------------------------------------

    def head(self, epoch: str, last_tid: Callable[[], int], proves: Callable[[Known], bool]) -> int:
        """Return the tid since which all changes must be known for the file to be useful; if it is not, the last tid.

        Reads only the header, and only then calls last_tid, which asks the database: another process may save
        meanwhile.  proves: as in the constructor, in a session at hand.
        """
        try:
            with self._open(epoch) as file:
                last = last_tid()
                if file.head > last:
                    self.discard()          # before the database grows past the file's head again
                    raise Unusable(f'the database went back, to tid {last:#x}, since it was saved')
                if file.head < last:
                    self._prove(file, proves)
                self._usable, self._proven = True, file.identity
                return file.head
        except Unusable as why:
            log.log(why.level, '%s is not used: %s.', self.path, why)
            return last_tid()

    def start(self) -> None:
        """Read, and then save every few minutes, in the background. Logs a warning if saving is impossible."""
        try:
            self._make_directory()
        except OSError as error:
            log.warning('cache-local-dir is %s, where nothing can be saved: %s.', self._directory, error.strerror)
        self._thread = threading.Thread(
            target=self._run, args=(self._cache.generation,), name='relstore warm start', daemon=True)
        self._thread.start()

    def discard(self) -> None:
        """Remove the file: the database is not what it was."""
        self._proven = None
        with suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        """End the thread, and save."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()
            self.save()

    def stop(self) -> None:
        """End the thread soon, without saving again."""
        self._stop.set()

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    def after_fork(self) -> None:
        """Start afresh in a child process, as in a new process. Call start() next."""
        self._begin()

    def _run(self, generation: int) -> None:
        if self._usable:
            self.fill(generation)
        self.filled.set()
        while not self._stop.wait(SAVE_EVERY_SECONDS):
            self.save()

    # Reading ------------------------------------------------------------------------------------------------------

    def fill(self, generation: int) -> None:
        """Put the current states of the file into the cache, as far as there is room."""
        count, begun = 0, time.monotonic()
        try:
            # The file may have been replaced since head() looked: the new head is not smaller, and serves as well.
            with self._open(self._epoch_of(generation)) as file:
                self._prove(file, self._proves)         # in case it was replaced
                for rows in file.blocks():
                    if not self._cache.fill(rows, file.head, generation):
                        break
                    count += len(rows)
                    if self._stop.wait(PAUSE_SECONDS):
                        break
                if self._cache.stats()['objects'] == count and self._cache.head == file.head:
                    self._saved = self._mark(generation)
        except Unusable as why:
            log.log(why.level, '%s is not used any further: %s.', self.path, why)
        log.info('%d states in %.2f s from %s.', count, time.monotonic() - begun, self.path)

    @contextmanager
    def _open(self, epoch: str) -> Iterator['_Saved']:
        """Open the file, or whatever has its name, if it is usable."""
        try:
            with open(self.path, 'rb', opener=_open_at_once) as file:
                yield _Saved(file, self._database, epoch)
        except FileNotFoundError:
            raise Unusable('it is not there', logging.DEBUG) from None
        except OSError as error:
            raise Unusable(str(error)) from error

    def _prove(self, file: '_Saved', proves: Callable[[Known], bool]) -> None:
        if file.identity == self._proven:
            return              # if the database was restored after that, the cache restarts anyway
        try:
            proven = proves(file.known)
        except StorageError as error:
            raise Unusable(f'the database could not be asked whether it is the one that it was saved from: {error}',
                           logging.INFO) from error
        if not proven:
            raise Unusable('the database may have been restored, refilled or packed since it was saved')

    # Saving -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file, if anything is new. On failure log a warning, and keep the old file."""
        generation = self._cache.generation
        epoch, mark = self._epoch_of(generation), self._mark(generation)
        known = Known(*self._cache.newest_changes(ENOUGH))
        head, rows = self._cache.current(generation)    # no rows if the generation has just ended
        if known.head != head:
            known = Known(head, head, [])       # another thread has just polled: the newest transaction will do
        if not rows or mark == self._saved:
            return
        try:
            self._make_directory()
            self._remove_abandoned()
            with self._replaced() as file:
                self._write(file, epoch, known, self._rows(rows, head, epoch, generation))
        except OSError as error:
            log.warning('The cache could not be saved in %s: %s.', self.path, error)
        else:
            self._saved = mark

    def _make_directory(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self._directory)

    def _mark(self, generation: int) -> tuple[Any, ...]:
        """Return a value that changes when states come or go."""
        stats = self._cache.stats()
        return generation, self._cache.head, stats['objects'], stats['bytes'], stats['evictions']

    def _rows(self, own: list[Row], head: int, epoch: str, generation: int) -> Iterator[Row]:
        """Yield the rows for the file: what is cached here, then what others saved and we know to be current.

        So a process that has seen little does not discard what one that has seen much has saved.
        """
        held = set()
        for row in own:
            held.add(row[0])
            yield row
        try:
            with self._open(epoch) as file:
                self._prove(file, self._proves)
                # After current(), so that it covers at least (file.head, head]. None: the log does not reach back.
                changed = self._cache.invalidations(file.head, None, generation)
                if changed is None:
                    return
                held.update(changed)
                for rows in file.blocks():
                    # The process that saved it may have polled later: leave out what is newer than our head.
                    yield from (row for row in rows if row[0] not in held and row[1] <= head)
        except Unusable as why:
            log.debug('%s is not copied from: %s.', self.path, why)

    def _write(self, file: BinaryIO, epoch: str, known: Known, rows: Iterable[Row]) -> None:
        file.write(_header(self._database, epoch, known))
        room = self._largest
        for block in _blocks(rows):
            room -= len(block)
            if room < 0:
                break
            file.write(block)
            self._stop.wait(PAUSE_SECONDS)
        file.write(_block(b''))

    @contextmanager
    def _replaced(self) -> Iterator[BinaryIO]:
        """Open a new file that replaces the old one at the end, if nothing failed."""
        handle, path = tempfile.mkstemp('.new', f'{self._name}.', self._directory)     # only for its owner
        try:
            with open(handle, 'wb') as file:
                yield file
            os.replace(path, self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise

    def _remove_abandoned(self) -> None:
        for entry in os.scandir(self._directory):
            if entry.name.startswith(f'{self._name}.') and entry.name.endswith('.new'):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > ABANDONED_AFTER_SECONDS:
                        os.unlink(entry.path)


def _open_at_once(path: str, flags: int) -> int:
    """Open without blocking, even if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


# The file ---------------------------------------------------------------------------------------------------------

def _header(database: str, epoch: str, known: Known) -> bytes:
    names = database.encode(), epoch.encode()
    header = HEADER.pack(MAGIC, VERSION, known.head, known.floor, *map(len, names), len(known.changed))
    header += b''.join((*names, *(CHANGE.pack(*change) for change in known.changed)))
    return header + CHECKSUM.pack(zlib.crc32(header))


def _block(records: bytes) -> bytes:
    return BLOCK.pack(len(records), _checksum(records)) + records


def _checksum(records: bytes) -> int:
    """Return the CRC-32, seeded with the length plus one, so that zeros on the disk are not a valid block."""
    return zlib.crc32(records, len(records) + 1)


def _blocks(rows: Iterable[Row]) -> Iterator[bytes]:
    records: list[bytes] = []
    size = 0
    for oid, tid, state in rows:
        records += RECORD.pack(oid, tid, len(state)), state
        size += RECORD.size + len(state)
        if size >= BLOCK_BYTES:
            yield _block(b''.join(records))
            records, size = [], 0
    if records:
        yield _block(b''.join(records))


class _Saved:
    """A file open for reading: its header has been read and matches, or Unusable says why not."""

    def __init__(self, file: BinaryIO, database: str, epoch: str):
        self._file = file
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Unusable('it is not a file')
        if status.st_uid not in (0, os.geteuid()):      # root trusts nobody else either
            raise Unusable(f'it belongs to another user, {status.st_uid}')
        if status.st_mode & 0o022:
            raise Unusable(f'others may write it, its mode is {status.st_mode & 0o777:o}')
        self._size = status.st_size
        self.identity = status.st_ino, status.st_mtime_ns
        header = self._read(HEADER.size)
        magic, version, self.head, floor, *lengths, count = HEADER.unpack(header)
        if magic != MAGIC:
            raise Unusable('it is not a saved cache')
        if version != VERSION:
            raise Unusable(f'its format has version {version}, and this relstore knows version {VERSION}')
        names = [self._read(length) for length in lengths]
        changed = self._read(count * CHANGE.size)
        if CHECKSUM.pack(zlib.crc32(header + b''.join(names) + changed)) != self._read(CHECKSUM.size):
            raise Unusable('its header is damaged')
        if names[0] != database.encode():
            raise Unusable('it was saved from another database')
        if names[1] != epoch.encode():
            raise Unusable('the database has crashed, failed over or been emptied since it was saved', logging.INFO)
        self.known = Known(self.head, floor, list(CHANGE.iter_unpack(changed)))

    def blocks(self) -> Iterator[list[Row]]:
        """Yield lists of (oid, tid, state), as they were written."""
        while True:
            at = self._file.tell()
            length, checksum = BLOCK.unpack(self._read(BLOCK.size))
            records = self._read(length)
            if _checksum(records) != checksum:
                raise Unusable(f'it is damaged at byte {at}')
            if not records:
                return
            try:
                yield list(_records(records))
            except struct.error:
                raise Unusable(f'it is damaged at byte {at}') from None

    def _read(self, length: int) -> bytes:
        # A damaged length must not ask for gigabytes of memory.
        found = self._file.read(min(length, self._size))
        if len(found) != length:
            raise Unusable(f'it ends too early, at byte {self._file.tell()}')
        return found


def _records(block: bytes) -> Iterator[Row]:
    at = 0
    while at < len(block):
        oid, tid, length = RECORD.unpack_from(block, at)
        at += RECORD.size
        yield oid, tid, block[at:at + length]
        at += length
    if at != len(block):
        raise struct.error('the last record is longer than its block')
