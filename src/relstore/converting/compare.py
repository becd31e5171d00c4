"""Compare: whether a copy has all that its source has, and nothing else: metadata, records and the data of blobs."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ZODB.blob import is_blob_record
from ZODB.interfaces import IBlobStorage
from ZODB.POSException import POSKeyError
from ZODB.utils import oid_repr, tid_repr, u64

from relstore.adapters.chunks import damaged, measured
from relstore.copying import NO_BLOBS, no_data, rising
from relstore.errors import ConfigurationError, DamagedBlob
from relstore.sessions.session import Session
from relstore.storage import RelStore

PIECE_BYTES = 1 << 20
METADATA = 'status', 'user', 'description', 'extension_bytes'
NOTHING = bytes(8)

# (oid, tid) -> the SHA-256 of a blob's data; None: there is none. DamagedBlob: it is not what was committed.
Digest = Callable[[bytes, bytes], bytes | None]
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class _Record:
    """digest: b'' of the end of an object. size: in bytes. tid: under which its storage has its blob."""
    digest: bytes
    is_blob: bool
    size: int
    tid: bytes = field(compare=False)

    @classmethod
    def of(cls, record: Any) -> _Record:
        if record.data is None:
            return cls(b'', False, 0, record.tid)
        data = record.data
        return cls(hashlib.sha256(data).digest(), bool(is_blob_record(data)), len(data), record.tid)


class _Content(NamedTuple):
    """tid: as of which a transaction is copied."""
    tid: bytes
    transaction: Any
    records: dict[bytes, _Record]


class Comparison:
    """The source and its copy, as they are now.

    history: whether the copy keeps that: the metadata of transactions, and the ends of objects.
    left_out: is told each blob of which the source has no data, or damaged data: it may be missing in the copy. By
    default the first is a difference, the second an error.
    theirs, ours: the storages of relstore's inside of the two, if there are any.
    superseded: whether the copy has a newer revision of an object than any that is compared. Without history such an
    object is not there any more as it was copied, so that is no difference.
    """

    def __init__(self, source: Any, copy: Any, history: bool = True, left_out: Callable[[str], None] | None = None,
                 theirs: RelStore | None = None, ours: RelStore | None = None,
                 superseded: Callable[[bytes], bool] = lambda oid: False):
        self._superseded = superseded
        self._source, self._copy, self._history = source, copy, history
        self._digest_of_theirs, self._digest_of_ours = digests(source, theirs), digests(copy, ours)
        self._blobs, self._left_out = IBlobStorage.providedBy(source), left_out
        self.transactions = self.records = self.blobs = 0

    def differences(self, advance: Advance = lambda records, size: None, start: bytes | None = None,
                    stop: bytes | None = None) -> Iterator[str]:
        """Yield what differs, a sentence each, in the order of transactions.

        After a transaction that only one of them has the others cannot be told apart, so that is the last.
        advance: called after each transaction with its number of records and their bytes.
        start, stop: the first and the last tid that are compared.
        """
        with _iterated(self._source, start, stop) as theirs, _iterated(self._copy, start, stop) as ours:
            for original, copied in self._pairs(self._contents(theirs), self._contents(ours)):
                if original is None or copied is None or original.tid != copied.tid:
                    yield _only(original, copied)
                    return
                yield from self._compare(original, copied)
                self.transactions += 1
                self.records += len(copied.records)
                advance(len(copied.records), sum(record.size for record in copied.records.values()))

    def _pairs(self, originals: Iterator[_Content], copies: Iterator[_Content]
               ) -> Iterator[tuple[_Content | None, _Content | None]]:
        """Yield the transactions of both; not those of which nothing is left in the copy that could be compared."""
        for copied in chain(copies, [None]):
            original = next(originals, None)
            while original is not None and (copied is None or original.tid < copied.tid) and (
                    not self._history and all(map(self._superseded, original.records))):
                original = next(originals, None)
            if original is None and copied is None:
                return
            yield original, copied

    def _contents(self, transactions: Iterable[Any]) -> Iterator[_Content]:
        for stamp, transaction in rising(transactions, NOTHING):
            # Where a FileStorage has two records of one object in one transaction, the last counts.
            records = {record.oid: _Record.of(record) for record in transaction
                       if self._history or record.data is not None}
            if records or self._history:
                yield _Content(stamp.raw(), transaction, records)

    def _compare(self, original: _Content, copied: _Content) -> Iterator[str]:
        where = f'Transaction {tid_repr(copied.tid)}'
        for name in METADATA if self._history else ():
            was, is_ = getattr(original.transaction, name), getattr(copied.transaction, name)
            if was != is_:
                yield f'{where}: its {name} is {_short(is_)}, and was {_short(was)}.'
        for oid in sorted(original.records.keys() | copied.records.keys()):
            theirs, ours = original.records.get(oid), copied.records.get(oid)
            if ours is None and self._superseded(oid):
                continue
            if theirs is None or ours is None:
                yield f'{where}: object {oid_repr(oid)} {"was not copied" if ours is None else "is not in the source"}.'
            elif theirs != ours:
                yield f'{where}: object {oid_repr(oid)} has other bytes than in the source.'
            elif theirs.is_blob:
                if not self._blobs:
                    raise ConfigurationError(NO_BLOBS)
                yield from self._blob(where, oid, theirs.tid, ours.tid)

    def _blob(self, where: str, oid: bytes, original_tid: bytes, tid: bytes) -> Iterator[str]:
        try:
            theirs = self._digest_of_theirs(oid, original_tid)
        except DamagedBlob as error:
            if self._left_out is None:
                raise
            self._left_out(str(error))
            return
        if theirs is None:
            if self._left_out is None:
                yield f'{where}: the blob {oid_repr(oid)} has no data in the source.'
            else:
                self._left_out(no_data(oid, original_tid))      # as the copy has told it
            return
        try:
            ours = self._digest_of_ours(oid, tid)
        except DamagedBlob:
            ours = b''
        self.blobs += 1
        if theirs != ours:
            yield f'{where}: the blob {oid_repr(oid)} has {"no" if ours is None else "other"} data in the copy.'


def _iterated(storage: Any, start: bytes | None, stop: bytes | None) -> AbstractContextManager[Any]:
    transactions = storage.iterator(start, stop)
    return closing(transactions) if hasattr(transactions, 'close') else nullcontext(transactions)


def _only(original: _Content | None, copied: _Content | None) -> str:
    if original is not None and (copied is None or original.tid < copied.tid):
        return f'Transaction {tid_repr(original.tid)} was not copied; what comes after it was not compared.'
    assert copied is not None
    return f'Transaction {tid_repr(copied.tid)} is not in the source; what comes after it was not compared.'


def digests(storage: Any, relstore: RelStore | None) -> Digest:
    """Return what tells the digest of a blob's data. relstore: the storage of relstore's that is inside, if any.

    Of that the data is read where it is, and not from the files that are cached of it.
    """
    def by_file(oid: bytes, tid: bytes) -> bytes | None:
        try:
            file = storage.openCommittedBlobFile(oid, tid)
        except POSKeyError:
            return None
        with file:
            return measured(iter(lambda: file.read(PIECE_BYTES), b'')).digest

    def inside(session: Session, oid: int, tid: int) -> bytes | None:
        assert relstore is not None
        data = relstore.database.blobs.data(session, oid, tid)
        if data is None:
            return None
        found = measured(data.pieces)
        if data.record not in (None, found):
            raise damaged(oid, tid, data.record and data.record.size, found.size)
        return found.digest

    def by_database(oid: bytes, tid: bytes) -> bytes | None:
        assert relstore is not None
        try:
            return relstore.database.pool.attempt(inside, u64(oid), u64(tid))
        except POSKeyError:
            return None

    return by_file if relstore is None else by_database


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'
