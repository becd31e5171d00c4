"""Copying: adds the transactions of another storage.

A transaction of the source that is still to come may link what is garbage in the destination now. So no pack may remove
garbage between the beginning and the end of a copy, even if that is interrupted and resumed a year later:

* During the copy a session holds the lock of packs, which keeps out RelStorage's packs, too. The session is used every
  few seconds and at the end: if it has died, a pack may have begun.
* Nothing is added to a database that is not whole: see whole.py. That is checked before the source is read, and by each
  vote. So it is also true behind a pooler, where there is no such lock.
"""
from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import IO, Any

from persistent.TimeStamp import TimeStamp
from ZODB.blob import is_blob_record
from ZODB.interfaces import IBlobStorage, IStorageRestoreable
from ZODB.POSException import POSKeyError
from ZODB.utils import maxtid, p64, u64

from relstore.adapters.base import Adapter
from relstore.errors import ConfigurationError, DamagedBlob, StorageError, Unavailable
from relstore.references import references
from relstore.sessions.session import Session
from relstore.unreadable import NAMED, Unreadable
from relstore.whole import is_whole, not_whole, say_whole

log = logging.getLogger('relstore')

# After so long without use, the session that keeps packs out is asked whether it still does.
PROVE_EVERY_SECONDS = 5.0

# For the newest transaction before another: none, an hour, a month, and all.
LOOKED_BACK_MINUTES = 0, 60, 31 * 24 * 60, 1 << 31

NO_BLOBS = 'The source has blobs: name the directory that they are in.'

Progress = Callable[[bytes, int, int], None]
# (tid, transaction, its records) -> (number of records, their bytes): copies one
Single = Callable[[bytes, Any, Iterable[Any]], tuple[int, int]]


class Guard:
    """Makes sure that nothing is removed from a database while it is copied into."""

    def __init__(self, adapter: Adapter, session: Session):
        self._adapter, self._session = adapter, session
        self._has_lock = adapter.pack_lock.keep_packs_out(session, 'copy into it afterwards')
        self._sweeps, self._used = adapter.sweeps.state(session), time.monotonic()

    def begin(self, is_empty: bool) -> None:
        """StorageError: the database may lack something, so nothing can be added to it."""
        if is_empty:
            say_whole(self._adapter, self._session)
        elif not is_whole(self._adapter, self._session):
            raise not_whole(self._adapter)

    def look(self) -> None:
        """Use the session if it has been idle for some time."""
        if self._has_lock and time.monotonic() > self._used + PROVE_EVERY_SECONDS:
            self.prove()

    def prove(self) -> None:
        """Unavailable or StorageError: packs may not have been kept out until now."""
        if not self._has_lock:
            return
        try:
            sweeps, self._used = self._adapter.sweeps.state(self._session), time.monotonic()
        except StorageError as e:
            raise Unavailable(f'The connection that kept packs out of {self._adapter} was lost, so what was copied may '
                              f'lack something; copy again, which goes on if nothing was removed. {e}') from e
        if sweeps != self._sweeps:
            raise StorageError(f'{self._adapter} was packed or emptied while it was copied into, so what was copied '
                               'may lack something; copy into an empty database (zap_all empties this one).')


class Unguarded:
    """Stands for a Guard where there is none: packs of the destination are not kept out."""

    def begin(self, is_empty: bool) -> None:
        """Anything may be added to."""

    def look(self) -> None:
        """No session is used."""

    def prove(self) -> None:
        """Nothing is known."""


@contextmanager
def guarded(adapter: Adapter) -> Iterator[Guard]:
    """Keep packs out of a database while this is entered."""
    session = adapter.connect()
    try:
        yield Guard(adapter, session)
    finally:
        with suppress(Unavailable):     # closing a dead connection
            session.close()


def copy_transactions(source: Any, destination: IStorageRestoreable, guard: Guard | Unguarded,
                      progress: Progress | None = None, files: BlobFiles | None = None, known: bytes = b'',
                      unreadable: Unreadable | None = None, inner: Any = None) -> None:
    """Copy what `source` has and `destination` has not, with the same tids, users, descriptions and records.

    An interrupted copy is resumed. StorageError: the destination has something else, or garbage may have been removed
    from it.
    progress: called after each transaction with its tid, its number of records and their size in bytes. Some of those
    that follow may be there already, so that they are not told if it raises an exception.
    files: of the source's blobs; by default what cannot be copied is left out, and told in the end.
    known: the newest transaction of which is known that it was copied from this source, if any is.
    unreadable: told each record whose references cannot be found out; by default the log is told how many there are.
    inner: the storage of relstore's in the destination; None: there is none. By default that is the destination.
    """
    last = destination.lastTransaction()
    if u64(last) and last != known:
        _check_common(source, destination, last)
    guard.begin(not u64(last))
    if files is None:
        files, inner = BlobFiles(source, destination, destination.database.untransform), destination
    told = Unreadable() if unreadable is None else unreadable
    single = partial(_copy_one, destination, inner, guard, files, told)
    with (iterated(source, p64(u64(last) + 1) if u64(last) else None) as transactions,
          _copies(destination, single, guard.look, progress or (lambda tid, records, size: None), told) as copies):
        for stamp, transaction in rising(copies.ahead(transactions), last):
            copies.add(stamp.raw(), transaction)
    guard.prove()
    files.warn()
    if unreadable is None and told.unnamed:
        log.warning('%d more records cannot be read, and are copied as they are.', told.unnamed)


def _copies(destination: Any, single: Single, look: Callable[[], None], progress: Progress, unreadable: Unreadable
            ) -> Any:
    """Return what takes transactions: in bulk where the destination can do that, see bulk.py; else one by one."""
    # Of its class: a wrapper would pass on the question, and its records would stay as they are.
    in_bulk = getattr(type(destination), 'bulk', None)
    bulk = None if in_bulk is None else in_bulk(destination, single, look, progress, unreadable)
    return _OneByOne(single, progress) if bulk is None else bulk


class _OneByOne(AbstractContextManager[Any]):

    def __init__(self, single: Single, progress: Progress):
        self._single, self._progress = single, progress

    def __exit__(self, *error: object) -> None:
        """All is committed already."""

    def ahead(self, transactions: Iterable[Any]) -> Iterable[Any]:
        return transactions

    def add(self, tid: bytes, transaction: Any) -> None:
        self._progress(tid, *self._single(tid, transaction, transaction))


def _copy_one(destination: Any, inner: Any, guard: Guard | Unguarded, files: BlobFiles, unreadable: Unreadable,
              tid: bytes, transaction: Any, records: Iterable[Any]) -> tuple[int, int]:
    """Copy a transaction with the tid that is given. Return how many records it has, and their bytes."""
    destination.tpc_begin(transaction, tid, transaction.status)
    try:
        count = size = unread = 0
        first: list[tuple[int, bytes]] = []
        for record in records:
            guard.look()
            path = files.copy_of(record)
            if path is None:
                destination.restore(record.oid, tid, record.data, '', record.data_txn, transaction)
            else:
                destination.restoreBlob(record.oid, tid, record.data, path, record.data_txn, transaction)
            count += 1
            size += len(record.data or b'')
            if inner is None and references(record.data) is None:
                unread += 1
                if len(first) < NAMED:
                    first.append((u64(record.oid), record.data))
        destination.tpc_vote(transaction)
        if inner is not None:       # which has looked for the references, so that it is done once
            unread, first = inner.unreadable(transaction, NAMED)
        guard.look()
        destination.tpc_finish(transaction)
    except BaseException:
        destination.tpc_abort(transaction)
        raise
    unreadable.add(tid, unread, first)
    return count, size


def rising(transactions: Iterable[Any], last: bytes) -> Iterator[tuple[TimeStamp, Any]]:
    """Yield (stamp, transaction), each stamp later than the one before, and than the tid `last`."""
    previous = TimeStamp(last)
    for transaction in transactions:
        stamp = TimeStamp(transaction.tid)
        if u64(transaction.tid) <= u64(previous.raw()):
            later = stamp.laterThan(previous)
            log.warning('The source has a transaction at %s after one at %s; it is copied as of %s.',
                        stamp, previous, later)
            stamp = later
        previous = stamp
        yield stamp, transaction


def no_data(oid: bytes, tid: bytes) -> str:
    """Return what is told of a blob that the source has no data of."""
    return f'The source has no data of the blob {u64(oid):#x} of {TimeStamp(tid)}.'


class BlobFiles:
    """Copies of the files of a source's blobs, for a destination that takes them over.

    plain: makes a pickle of a record, which a wrapper may keep in another form.
    strict: whether a blob that cannot be copied is an error. Else it is told in the end.
    left_out: is told each blob that the source does not have, or that is damaged there; that is no error then.
    """

    def __init__(self, source: Any, destination: Any, plain: Callable[[bytes], bytes], strict: bool = False,
                 left_out: Callable[[str], None] | None = None):
        self._source, self._destination = source, destination
        self._there, self._wanted = IBlobStorage.providedBy(source), IBlobStorage.providedBy(destination)
        self._left, self._missing = 0, 0
        self._plain, self._strict, self._left_out = plain, strict, left_out

    def copy_of(self, record: Any) -> str | None:
        """Return the path of a copy of a record's blob, or None if it has none."""
        if not self._is_of_blob(record.data):
            return None
        if not self._there:
            if self._strict:
                raise ConfigurationError(NO_BLOBS)
            self._left += 1
            return None
        if not self._wanted:
            raise ConfigurationError('The source has blobs: name a directory for them with blob-dir.')
        file = self._opened(record)
        if file is None:
            return None
        with file:
            handle, path = tempfile.mkstemp('.copy', dir=self._destination.temporaryDirectory())
            try:
                with open(handle, 'wb') as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            except BaseException:
                os.unlink(path)
                raise
        return path

    def look(self, record: Any) -> None:
        """Tell what copy_of() would have told of a record."""
        if self._there and self._is_of_blob(record.data):
            file = self._opened(record)
            if file is not None:
                file.close()

    def _opened(self, record: Any) -> IO[bytes] | None:
        """Return the file of a record's blob. None: it is left out."""
        try:
            file: IO[bytes] = self._source.openCommittedBlobFile(record.oid, record.tid)
        except POSKeyError:
            lacking = no_data(record.oid, record.tid)
            if self._left_out is not None:
                self._left_out(lacking)
            elif self._strict:
                raise StorageError(lacking) from None
            else:
                self._missing += 1
            return None
        except DamagedBlob as error:
            if self._left_out is None:
                raise
            self._left_out(str(error))
            return None
        return file

    def _is_of_blob(self, data: bytes | None) -> bool:
        """The source yields plain records, or records as the destination's wrapper would have them."""
        if data is None or is_blob_record(data):
            return data is not None
        try:
            return is_blob_record(self._plain(data))
        except Exception:       # whatever a wrapper raises for a record that it did not wrap
            return False

    def warn(self) -> None:
        if self._left:
            log.warning('%d records have a blob; their data was not copied, for the source was opened without its '
                        'directory of blobs.', self._left)
        if self._missing:
            log.warning('The source lacks the files of %d blobs, and so does the copy.', self._missing)


def _check_common(source: Any, destination: Any, last: bytes) -> None:
    """A destination is the beginning of the source if the newest transaction of the source up to its own is there.

    That is its own, unless the source was packed since, or keeps no history. Then what the destination has after that
    may have gone from the source; or it was never there, but committed to the destination. It has gone if each object
    in it has changed again, or is gone.
    """
    newest = _newest(source, last)
    if newest == last:
        return
    if newest is None or _newest(destination, newest) != newest or not _loses_history(source) or not _superseded(
            source, destination, newest):
        raise StorageError(f'The destination holds transactions that the source does not have (its newest is '
                           f'{TimeStamp(last)}); copy into an empty database.')


def _loses_history(source: Any) -> bool:
    """Whether transactions of a source may have gone: by commits, or by a pack, which marks those that it leaves."""
    if not getattr(source, 'supportsUndo', lambda: False)():
        return True
    with iterated(source, None) as transactions:
        return any(transaction.status == 'p' for transaction in islice(transactions, 1))


def _superseded(source: Any, destination: Any, newest: bytes) -> bool:
    """Whether of each object the source has a newer revision, or none, than the destination after a transaction."""
    with iterated(destination, p64(u64(newest) + 1)) as transactions:
        for transaction in transactions:
            for record in transaction:
                try:
                    found = source.loadBefore(record.oid, maxtid)
                except POSKeyError:
                    continue
                if found is not None and found[1] <= transaction.tid:
                    return False
    return True


def _newest(storage: Any, last: bytes) -> bytes | None:
    """Return the newest tid up to `last`, if there is one. It is likely to be this one, or not long before."""
    for minutes in LOOKED_BACK_MINUTES:
        start = p64(max(u64(last) - (minutes << 32), 0))        # the high half of a tid counts minutes
        with iterated(storage, start, last) as transactions:
            found = None
            for transaction in transactions:
                found = transaction.tid
        if found is not None:
            return found
    return None


@contextmanager
def iterated(source: Any, start: bytes | None = None, stop: bytes | None = None) -> Iterator[Iterable[Any]]:
    """Iterate over a source's transactions. Some storages' iterators hold a file, and can be closed."""
    transactions = source.iterator(start, stop)
    try:
        yield transactions
    finally:
        if hasattr(transactions, 'close'):
            transactions.close()
