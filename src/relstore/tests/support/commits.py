"""Transactions, as ZODB runs them on a storage."""
from collections.abc import Iterator
from contextlib import contextmanager

from ZODB.Connection import TransactionMetaData

import relstore


def commit(storage, *changes, tid=None, work=lambda txn: None) -> bytes:
    """Store (oid, base, state), ..., as ZODB does it; work(txn) adds to it. Return the tid."""
    txn = TransactionMetaData()
    storage.tpc_begin(txn, *([tid] if tid else []))
    try:
        for oid, base, record in changes:
            storage.store(oid, base, record, '', txn)
        work(txn)
        storage.tpc_vote(txn)
        return storage.tpc_finish(txn)
    except BaseException:
        storage.tpc_abort(txn)
        raise
    finally:
        storage.afterCompletion()


def perform(storage, *changes, user='anna', description='', extension=None, tid=None):
    """Run changes(transaction), ... in one transaction; return its tid."""
    txn = TransactionMetaData(user, description, extension)
    storage.tpc_begin(txn, tid)
    try:
        for change in changes:
            change(txn)
        storage.tpc_vote(txn)
        return storage.tpc_finish(txn)
    except BaseException:
        storage.tpc_abort(txn)
        raise


def voted(storage, *changes, read=(), user='', description='') -> TransactionMetaData:
    """Store (oid, base, state), ..., and vote. read: (oid, tid) of what has to stay as it is."""
    txn = TransactionMetaData(user, description)
    storage.tpc_begin(txn)
    try:
        for oid, base, record in changes:
            storage.store(oid, base, record, '', txn)
        for oid, tid in read:
            storage.checkCurrentSerialInTransaction(oid, tid, txn)
        storage.tpc_vote(txn)
    except BaseException:
        storage.tpc_abort(txn)
        raise
    return txn


@contextmanager
def transaction_of(view: relstore.RelStore, tid: bytes | None = None) -> Iterator[TransactionMetaData]:
    """Commit what is done within; abort it where that raises."""
    txn = TransactionMetaData()
    view.tpc_begin(txn, tid)
    try:
        yield txn
        view.tpc_vote(txn)
        view.tpc_finish(txn)
    except BaseException:
        view.tpc_abort(txn)
        raise
    finally:
        view.afterCompletion()
