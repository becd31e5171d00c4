"""Copy transactions from another storage."""
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from persistent.TimeStamp import TimeStamp
from ZODB.blob import is_blob_record
from ZODB.interfaces import IBlobStorage, IStorageRestoreable
from ZODB.utils import p64, u64

from relstore.errors import StorageError

log = logging.getLogger('relstore')

Progress = Callable[[bytes, int, int], None]


def copy_transactions(source, destination: IStorageRestoreable, progress: Progress | None = None) -> None:
    """Copy what `source` has and `destination` has not, with the same tids, users, descriptions and records.

    A copy that was interrupted goes on where it stopped. A destination that holds something else is refused.
    progress: called after each transaction with its tid, its number of records and their size in bytes.
    """
    last = destination.lastTransaction()
    if u64(last):
        _check_common(source, last)
    blobs = 0
    previous = TimeStamp(last)
    with _transactions(source, p64(u64(last) + 1) if u64(last) else None) as transactions:
        for transaction in transactions:
            stamp = TimeStamp(transaction.tid)
            if u64(transaction.tid) <= u64(previous.raw()):
                later = stamp.laterThan(previous)
                log.warning('The source has a transaction at %s after one at %s; it is copied as of %s.',
                            stamp, previous, later)
                stamp = later
            previous = stamp
            destination.tpc_begin(transaction, stamp.raw(), transaction.status)
            try:
                records = size = 0
                for record in transaction:
                    destination.restore(record.oid, stamp.raw(), record.data, '', record.data_txn, transaction)
                    records += 1
                    size += len(record.data or b'')
                    blobs += is_blob_record(record.data)
                destination.tpc_vote(transaction)
                destination.tpc_finish(transaction)
            except BaseException:
                destination.tpc_abort(transaction)
                raise
            if progress is not None:
                progress(stamp.raw(), records, size)
    if blobs and IBlobStorage.providedBy(source):
        log.warning('%d records have a blob; their files were not copied, because blobs are not supported yet.', blobs)


def _check_common(source, last: bytes) -> None:
    """A destination is the beginning of the source if its newest transaction is one of the source's."""
    with _transactions(source, last, last) as transactions:
        if any(transaction.tid == last for transaction in transactions):
            return
    raise StorageError(f'The destination holds transactions that the source does not have (its newest is '
                       f'{TimeStamp(last)}); copy into an empty database.')


@contextmanager
def _transactions(source, start: bytes | None, stop: bytes | None = None) -> Iterator[Iterable]:
    """Iterate over a source's transactions. Some storages' iterators hold a file, and can be closed."""
    transactions = source.iterator(start, stop)
    try:
        yield transactions
    finally:
        if hasattr(transactions, 'close'):
            transactions.close()
