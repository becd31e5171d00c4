"""BlobsInStore: the data is in an object storage, one object for each digest, and files of it are in a cache.

relstore_blob says what the data of a revision is, and relstore_digest which object has it: <digest>-<version>, where
the version is random. A transaction

1. says in a transaction of its own that it wants the object (Objects.want), and learns its version;
2. uploads it, unless it is there: it looks where the row was there before, for a row may be there without its object;
3. votes, and takes a shared lock on the row, until it ends: if it is there, with this version, and not claimed
   (Objects.hold). Otherwise the vote fails, and another try uploads anew;
4. is committed with its row in relstore_blob.

A pack, and an abort of what it has uploaded itself,

1. claims the object, with a lock on the row that excludes the shared one, once it sees with that lock that no
   committed revision refers to the data (Objects.claim): from then on nobody holds it;
2. removes it from the storage;
3. removes its row.

Who wants data whose object is claimed gives the row another version, and uploads another object. What could interleave:

* A pack claims before a transaction has its lock: the transaction does not find the version, and fails.
* A transaction has its lock before a pack claims: the pack does not wait, and leaves the object alone. When the lock is
  free, the pack sees the row in relstore_blob, for it looks after it has its own.
* A pack was stopped between its claim and the removal, and somebody has wanted the data since: the removal meets an
  object of an earlier version, and no row of it is left to remove. If the pack was killed, that object is left behind.
* Two transactions upload the same object: both write the same. One of them aborts: it removes only what it has added
  the row of, and what nobody else has wanted since.
* The outcome of a commit is in doubt, or it waits for its finish: it holds its lock for as long as it may still happen.
* An undo repeats the data of an earlier revision, which a pack removes: the row in relstore_blob is locked as well, so
  that the pack waits; and the object, as above.

So the grace period is not needed for any of that. It is there for who reads what has just been replaced, and for
backups: what a pack finds idle is removed by a later one, when it has been idle for so long.
"""
from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping

from ZODB.POSException import POSKeyError, UndoError
from ZODB.utils import p64

from relstore.adapters.base import Adapter
from relstore.adapters.chunks import verified
from relstore.adapters.commits.base import AnyCommit
from relstore.adapters.numbers import OBJECT_GOES, OBJECT_IDLE, OBJECT_USED
from relstore.adapters.objects import Object, Stored
from relstore.blobs.base import KEY, STORED, Attempt, Pending, Read
from relstore.blobs.bucket import NAME, NAMED, Bucket, object_name
from relstore.blobs.cache import BlobCache
from relstore.blobs.inside import BlobsInDatabase, PendingInDatabase
from relstore.blobs.store import Object as StoredObject
from relstore.blobs.store import ObjectStore
from relstore.errors import ConfigurationError, DamagedBlob, StorageError, Unavailable
from relstore.sessions.session import Session

log = logging.getLogger('relstore')

class BlobsInStore(BlobsInDatabase):
    """grace: seconds for which a pack leaves alone what a pack has found idle."""
    place = STORED

    def __init__(self, adapter: Adapter, cache: BlobCache, fill_on_commit: bool, store: ObjectStore, grace: float):
        super().__init__(adapter, cache, fill_on_commit)
        self.store, self.grace = store, grace
        self.objects = adapter.objects
        self.bucket = Bucket(adapter, store)

    def new_instance(self) -> BlobsInStore:
        other = BlobsInStore(self._adapter, self.cache.new_instance(), self.fill_on_commit, self.store, self.grace)
        other.bucket, other._known = self.bucket, self._known
        return other

    def new_pending(self) -> Pending:
        return PendingInStore(self)

    # Which object storage -----------------------------------------------------------------------------------------

    def begin(self, session: Session, meta: Mapping[str, str]) -> None:
        super().begin(session, meta)
        found = self.bucket.marked()
        if found is None:
            if KEY in meta:
                raise ConfigurationError(f'{self._adapter} has its blobs in another object storage than '
                                         f'{self.store.address}: name the right one with blob-store.')
        elif found != meta.get(NAME):
            raise ConfigurationError(f'{self.store.address} holds the blobs of another database than {self._adapter}: '
                                     'name the right one with blob-store, or another prefix.')

    def forget(self) -> None:
        super().forget()
        self.bucket.forget()

    # Reading ------------------------------------------------------------------------------------------------------

    def _get(self, read: Read, oid: int, tid: int) -> str:
        stored = self._find(read, oid, tid)
        return self.cache.add(oid, tid, stored.record.size, verified(self.bucket.data(stored, oid, tid), oid, tid))

    def _find(self, read: Read, oid: int, tid: int) -> Stored:
        stored: Stored | None = read(oid, self.objects.find, oid, tid)
        if stored is None or stored.version is None:
            raise POSKeyError(p64(oid), p64(tid))
        return stored

    def part(self, read: Read, oid: int, tid: int, start: int, end: int) -> bytes:
        if self.cache.find(oid, tid) is not None:
            return super().part(read, oid, tid, start, end)
        record, version = self._find(read, oid, tid)
        try:
            return self.store.read_range(object_name(record.digest, version or ''), start, min(end, record.size))
        except FileNotFoundError:
            raise POSKeyError('The data of the blob is not in the object storage', p64(oid), p64(tid)) from None

    def url(self, read: Read, oid: int, tid: int, expires: int, filename: str | None, content_type: str | None) -> str:
        record, version = self._find(read, oid, tid)
        return self.store.url(object_name(record.digest, version or ''), expires, filename, content_type)

    def has(self, session: Session, oid: int, tid: int) -> bool:
        stored = self.objects.find(session, oid, tid)
        return stored is not None and stored.version is not None

    def verify(self, session: Session, oid: int, tid: int) -> bool:
        stored = self.objects.find(session, oid, tid)
        if stored is None or stored.version is None:
            return False
        try:
            for _ in verified(self.bucket.data(stored, oid, tid), oid, tid):
                pass
            return True
        except (POSKeyError, DamagedBlob):
            return False

    # Storing and removing -----------------------------------------------------------------------------------------

    def take_back(self, attempt: Attempt, digest: bytes, version: str, wisher: str) -> None:
        """Remove an object that `wisher` has added, unless somebody else uses it."""
        if attempt(lambda session: self.objects.claim(session, digest, version, wisher=wisher)):
            self.store.remove(object_name(digest, version))
            attempt(self.objects.forget, digest, version)

    def after_pack(self, session: Session, before: set[tuple[int, int]], pack_tid: int) -> tuple[int, int]:
        removed = []
        try:
            for found in self.objects.all(session):
                if self._goes(session, found):
                    self.store.remove(object_name(found.digest, found.version))
                    self.objects.forget(session, found.digest, found.version)
                    removed.append(found.size)
        except Unavailable as e:
            log.warning('What blobs have left in %s stays until the next pack: %s', self.store.address, e)
        return len(removed), sum(removed)

    def orphans(self, session: Session) -> Iterator[StoredObject]:
        """Yield the objects of which no row tells, among those that are named as ours are.

        They are listed before the rows are read: a row is there before its object, and until that is removed.
        """
        there = [found for found in self.store.list() if NAMED.fullmatch(found.name)]
        known = {object_name(found.digest, found.version) for found in self.objects.all(session)}
        yield from (found for found in there if found.name not in known)

    def _goes(self, session: Session, found: Object) -> bool:
        """Whether an object is to be removed now, by this pack alone."""
        if found.state == OBJECT_GOES:
            return True         # somebody was stopped who had claimed it
        if found.referred:
            if found.state == OBJECT_IDLE:
                self.objects.mark(session, found, OBJECT_USED)
            return False
        if found.state != OBJECT_IDLE:
            self.objects.mark(session, found, OBJECT_IDLE, self.grace)
            if self.grace:
                return False
        return self.objects.claim(session, found.digest, found.version, grace=self.grace)


class PendingInStore(PendingInDatabase):
    """The files of one transaction, which go into an object storage."""
    _blobs: BlobsInStore

    def __init__(self, blobs: BlobsInStore):
        super().__init__(blobs)
        self._wisher = secrets.token_hex(8)
        self._versions: dict[bytes, str] = {}       # by digest, of all that the transaction relies on
        self._added: dict[bytes, str] = {}          # of these, what it has added itself
        self._attempt: Attempt | None = None        # where it may be removed

    def prepare(self, attempt: Attempt) -> None:
        self.record()
        self._blobs.bucket.settle(attempt)
        self._attempt = attempt
        try:
            for oid, record in sorted(self.records.items(), key=lambda item: item[1].digest):
                if record.digest not in self._versions:
                    version, added = self._blobs.bucket.keep(attempt, record, self.paths[oid], self._wisher)
                    self._versions[record.digest] = version
                    if added:
                        self._added[record.digest] = version
        except Unavailable:
            self._attempt = None        # nor can it be removed now: a pack will
            raise

    def send(self, commit: AnyCommit) -> None:
        commit.send_blobs({}, self.records)

    def copy(self, commit: AnyCommit, copies: Mapping[int, int]) -> None:
        objects, session = self._blobs.objects, commit.session
        for oid, tid in sorted(copies.items()):
            record = objects.hold_record(session, oid, tid)
            version = record and objects.hold(session, record.digest)
            if record is None or version is None:
                raise UndoError('The data of the blob to go back to is not there.', p64(oid))
        commit.repeat_records(copies)

    def hold(self, session: Session) -> None:
        for digest, version in sorted(self._versions.items()):
            if self._blobs.objects.hold(session, digest) != version:
                raise Unavailable('The data of a blob has just been removed from the object storage, where it was '
                                  'found at first; nothing was stored.')

    def place(self, commit: AnyCommit) -> None:
        self._attempt = None        # from here on nobody knows whether it is needed

    def close(self) -> None:
        super().close()
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        for digest, version in self._added.items():
            try:
                self._blobs.take_back(attempt, digest, version, self._wisher)
            except StorageError as e:
                log.info('What an aborted transaction has left in %s stays until a pack: %s',
                         self._blobs.store.address, e)
                return
