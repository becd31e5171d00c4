"""WarmStart: the cache in a file, so that the next process does not begin with an empty one.

One file serves all processes of a machine that open the same database.  It holds states that were current at one tid,
its head.  It is used only where the log of the cache reaches back to that head, and then by the rules of the cache:
what changed since is never served to a view that sees the change.  An epoch that is over makes it void, as far as it
outlasts a restart of everything.  And a backup may have taken the place of the database, with its epoch: so the file
tells which objects had changed last, and is used only where the database proves to be the one that it was saved from.

The file, all numbers big-endian:

    header      'relstore', version (2 bytes), head (8), floor (8), length of database (2) and of epoch (2), how many
                objects (2) follow, database, epoch; oid (8) and tid (8) of the objects that changed after the floor;
                CRC-32 of all that (4)
    block       length (4), checksum (4), and that many bytes of records; what is most useful comes first
    record      oid (8), tid (8), length (4), state
    end         a block of length 0

The states are those of the database.  Who reads the file reads them, and who writes it has the site load what they
wrote: so it is made for its owner alone, and one that others may have written is not used.
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

SAVE_EVERY = 300            # seconds
# A temporary file that was not touched for so many seconds belongs to a process that was killed.
ABANDONED = 3600
BLOCK_BYTES = 1 << 16
# Seconds between two blocks: who loads meanwhile shall not wait for more than one.
PAUSE = .001

MAGIC, VERSION = b'relstore', 2
HEADER = struct.Struct('>8sHQQHHH')
CHANGE = struct.Struct('>QQ')
CHECKSUM = struct.Struct('>I')
BLOCK = struct.Struct('>II')
RECORD = struct.Struct('>QQI')

Row = tuple[int, int, bytes]            # (oid, tid, state)


class Unusable(Exception):
    """Why the file is not used, or no further."""

    def __init__(self, reason: str, level: int = logging.WARNING):
        super().__init__(reason)
        self.level = level


class WarmStart:
    """Keeps the states of a cache in a file: its thread reads them once, and saves them now and then.

    directory: made when it is needed.  database: its name, the same for whoever opens it.  epoch_of: from a generation
    of the cache to its epoch, '' if it is past.  proves: asks the database whether something is known of it.  largest:
    bytes that the file may have, about.

    Nothing here fails the application: what goes wrong with the file is told in the log.
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
        self.filled = threading.Event()     # has the file been read, as far as it is of use?
        self._stop = threading.Event()
        self._usable = False
        self._proven: tuple[Any, ...] | None = None   # the file that head() has looked at
        self._saved: tuple[Any, ...] | None = None    # what the cache was like when it agreed with the file

    # For the Database ---------------------------------------------------------------------------------------------

    def head(self, epoch: str, last_tid: Callable[[], int], proves: Callable[[Known], bool]) -> int:
        """Return from which tid on changes must be known for the file to be of use; if it is of none, the last tid.

        Reads the header only.  last_tid asks the database, after that: another process may save meanwhile.  proves: as
        for all others, in a session that is at hand.
        """
        try:
            with self._open(epoch) as file:
                last = last_tid()
                if file.head > last:
                    self.discard()          # before the database has passed what is wrong in it
                    raise Unusable(f'the database went back, to tid {last:#x}, since it was saved')
                if file.head < last:
                    self._prove(file, proves)
                self._usable, self._proven = True, file.identity
                return file.head
        except Unusable as why:
            log.log(why.level, '%s is not used: %s.', self.path, why)
            return last_tid()

    def start(self) -> None:
        """Start to read, and to save every few minutes, in the background. A warning tells where that cannot be."""
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
        """Save, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()
            self.save()

    def stop(self) -> None:
        """End the thread soon, and save nothing more."""
        self._stop.set()

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    def after_fork(self) -> None:
        """Begin anew in a child process, as in one that was started. start() is to follow."""
        self._begin()

    def _run(self, generation: int) -> None:
        if self._usable:
            self.fill(generation)
        self.filled.set()
        while not self._stop.wait(SAVE_EVERY):
            self.save()

    # Reading ------------------------------------------------------------------------------------------------------

    def fill(self, generation: int) -> None:
        """Enter into the cache what is in the file and current, as far as there is room."""
        count, begun = 0, time.monotonic()
        try:
            # It may have been written anew since head() looked: that head is not smaller, and serves as well.
            with self._open(self._epoch_of(generation)) as file:
                self._prove(file, self._proves)         # another one, perhaps
                for rows in file.blocks():
                    if not self._cache.fill(rows, file.head, generation):
                        break
                    count += len(rows)
                    if self._stop.wait(PAUSE):
                        break
                if self._cache.stats()['objects'] == count and self._cache.head == file.head:
                    self._saved = self._mark(generation)
        except Unusable as why:
            log.log(why.level, '%s is not used any further: %s.', self.path, why)
        log.info('%d states in %.2f s from %s.', count, time.monotonic() - begun, self.path)

    @contextmanager
    def _open(self, epoch: str) -> Iterator['_Saved']:
        """Open the file, or whatever bears its name, if it fits."""
        try:
            with open(self.path, 'rb', opener=_open_at_once) as file:
                yield _Saved(file, self._database, epoch)
        except FileNotFoundError:
            raise Unusable('it is not there', logging.DEBUG) from None
        except OSError as error:
            raise Unusable(str(error)) from error

    def _prove(self, file: '_Saved', proves: Callable[[Known], bool]) -> None:
        if file.identity == self._proven:
            return              # should the database have been restored after that, the cache begins anew
        try:
            proven = proves(file.known)
        except StorageError as error:
            raise Unusable(f'the database could not be asked whether it is the one that it was saved from: {error}',
                           logging.INFO) from error
        if not proven:
            raise Unusable('the database may have been restored, refilled or packed since it was saved')

    # Saving -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file, if there is anything new to say. A warning tells that it failed; the old one stays then."""
        generation = self._cache.generation
        epoch, mark = self._epoch_of(generation), self._mark(generation)
        known = Known(*self._cache.newest_changes(ENOUGH))
        head, rows = self._cache.current(generation)    # none, if the generation is past meanwhile
        if known.head != head:
            known = Known(head, head, [])       # somebody has polled in this moment: its newest transaction will do
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
        """Return what is not the same any more when states have come or gone."""
        stats = self._cache.stats()
        return generation, self._cache.head, stats['objects'], stats['bytes'], stats['evictions']

    def _rows(self, own: list[Row], head: int, epoch: str, generation: int) -> Iterator[Row]:
        """Yield what the file shall hold: what is cached here, then what others have saved and we know to be current.

        So a process that has seen little does not undo what one that has seen much has saved.
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
                    # It may have been saved by one that has polled later: what is newer than our head waits.
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
            self._stop.wait(PAUSE)
        file.write(_block(b''))

    @contextmanager
    def _replaced(self) -> Iterator[BinaryIO]:
        """Open a new file, which takes the place of the old one at the end, if nothing failed."""
        handle, path = tempfile.mkstemp('.new', f'{self._name}.', self._directory)     # for its owner alone
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
                    if time.time() - entry.stat().st_mtime > ABANDONED:
                        os.unlink(entry.path)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting, should it be a pipe."""
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
    """CRC-32, begun with the length and one more: where the disk has nothing but zeros, there is no block."""
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
    """A file that was opened for reading: the header is read and fits, or Unusable says why not."""

    def __init__(self, file: BinaryIO, database: str, epoch: str):
        self._file = file
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Unusable('it is no file')
        if status.st_uid not in (0, os.geteuid()):      # root believes nobody else either
            raise Unusable(f'it belongs to another user, {status.st_uid}')
        if status.st_mode & 0o022:
            raise Unusable(f'others may write it, its mode is {status.st_mode & 0o777:o}')
        self._size = status.st_size
        self.identity = status.st_ino, status.st_mtime_ns
        header = self._read(HEADER.size)
        magic, version, self.head, floor, *lengths, count = HEADER.unpack(header)
        if magic != MAGIC:
            raise Unusable('it is no saved cache')
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
