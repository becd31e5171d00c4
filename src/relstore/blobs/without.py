"""WithoutBlobs: keeps the data of blobs in one piece where no blob-dir is given, and nobody can load or store it.

The data is in the table blob_chunk, by oid and tid. A revision that was added to a Blob without it would have no rows
there: nobody could load it, and a pack would remove the data of the revisions before. So a database that has rows there
is not opened; and where another process adds the first row later, no Blob is loaded, changed, restored, deleted, or put
back by an undo: each transaction that touches a Blob, or deletes something, asks again, with its locks.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING

from ZODB.blob import is_blob_record
from ZODB.POSException import Unsupported

from relstore.adapters.base import Adapter
from relstore.blobs.base import KEY, SHARED, STORED, Blobs
from relstore.errors import ConfigurationError
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.caching.cache import Cache

# Objects that are looked up at a time.
LOOKED_UP = 10_000

log = logging.getLogger('relstore')


class WithoutBlobs(Blobs):
    """What a process without a directory for blobs knows of those in a database.

    plain: from a stored record to the pickle in it, where a storage wrapper has changed it.
    """

    def __init__(self, adapter: Adapter, cache: Cache, plain: Callable[[bytes | None], bytes | None]):
        self._adapter, self._cache, self._plain = adapter, cache, plain
        self.there = False      # as far as is known

    def begin(self, session: Session, meta: Mapping[str, str]) -> None:
        if meta.get(KEY) == STORED:
            raise ConfigurationError(f'{self._adapter} has its blobs in an object storage: name it with blob-store, '
                                     'and a directory to cache them with blob-dir.')
        if meta.get(KEY) == SHARED:
            raise ConfigurationError(f'{self._adapter} has its blobs in a directory: name it with blob-dir, and set '
                                     'shared-blob-dir true.')
        if self._adapter.chunks.there(session):
            raise ConfigurationError(f'{self._adapter} has blobs: name a directory to cache them with blob-dir.')

    def emptied(self, session: Session) -> None:
        session.run(self._adapter.sql.forget_place)
        self.look(session)

    def look(self, session: Session) -> None:
        """Ask whether there are any. Then none is cached any more, and a warning tells of the first."""
        before = self.there
        self.there = self._adapter.chunks.there(session) or KEY in self._adapter.meta(session)
        self._cache.unwanted = self._is_one if self.there else None
        if self.there and not before:
            log.warning('Another process has stored a blob in %s, which this one cannot do without blob-dir: it can '
                        'neither load nor change nor delete any, nor undo a transaction that did so.', self._adapter)

    def _is_one(self, state: bytes) -> bool:
        return is_blob_record(self._plain(state))

    def refuse_load(self, oid: int, state: bytes) -> None:
        """Raise Unsupported if this record is a Blob's."""
        if self.there and self._is_one(state):
            raise Unsupported(f'Object {oid:#x} is a blob, which cannot be loaded without blob-dir.')

    def refuse_change(self, session: Session, changed: Collection[int], deleted: Collection[int]) -> None:
        """Raise Unsupported if a transaction would cut a blob off from its data.

        changed: the oids to which it gives the record of a Blob. deleted: those to which it gives none.
        """
        if not (changed or deleted):
            return
        if not self.there:
            self.look(session)
        for oid in chain(changed, self._those_with_data(session, deleted)) if self.there else ():
            raise Unsupported(f'Object {oid:#x} is a blob, which can neither be changed nor deleted nor undone without '
                              'blob-dir: its data would be lost.')

    def _those_with_data(self, session: Session, oids: Iterable[int]) -> Iterator[int]:
        oids = iter(oids)
        while some := list(islice(oids, LOOKED_UP)):
            rows = session.all(self._adapter.sql.with_blobs, (self._adapter.oid_list(some),))
            yield from (oid for oid, in rows)
