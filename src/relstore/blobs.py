"""Blobs: keeps the data of ZODB's blobs in one piece, as long as relstore can neither load nor store it.

RelStorage keeps that data in the table blob_chunk, by oid and tid. A revision that relstore added to a Blob would have
no rows there: RelStorage could not load it, and a pack would remove the data of the revisions before. So in a database
that has rows there, no Blob is loaded, changed, restored, deleted, or put back by an undo. RelStorage may add the first
row at any time, so each transaction that touches a Blob, or deletes something, asks again, with its locks.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from ZODB.blob import is_blob_record
from ZODB.POSException import Unsupported

from relstore.adapters.base import Adapter
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.caching.cache import Cache

# Objects that are looked up at a time.
LOOKED_UP = 10_000

log = logging.getLogger('relstore')


class Blobs:
    """What is known of the blobs in a database.

    plain: from a stored record to the pickle in it, where a storage wrapper has changed it.
    """

    def __init__(self, adapter: Adapter, cache: Cache, plain: Callable[[bytes | None], bytes | None]):
        self._adapter, self._cache, self._plain = adapter, cache, plain
        self.there = False      # as far as is known

    def look(self, session: Session) -> None:
        """Ask whether there are any. Then none is cached any more, and a warning tells of the first."""
        before, self.there = self.there, self._adapter.has_blobs(session)
        self._cache.unwanted = self._is_one if self.there else None
        if self.there and not before:
            log.warning('%s has blobs, which this version of relstore does not support: they can be neither loaded '
                        'nor changed nor deleted, and the transactions that did so not be undone.', self._adapter)

    def _is_one(self, state: bytes) -> bool:
        return is_blob_record(self._plain(state))

    def refuse_load(self, oid: int, state: bytes) -> None:
        """Raise Unsupported if this record is a Blob's."""
        if self.there and self._is_one(state):
            raise Unsupported(f'Object {oid:#x} is a blob, and this version of relstore cannot load blobs.')

    def refuse_change(self, session: Session, changed: Collection[int], deleted: Collection[int]) -> None:
        """Raise Unsupported if a transaction would cut a blob off from its data.

        changed: the oids to which it gives the record of a Blob. deleted: those to which it gives none.
        """
        if not (changed or deleted):
            return
        if not self.there:
            self.look(session)
        for oid in chain(changed, self._those_with_data(session, deleted)) if self.there else ():
            raise Unsupported(f'Object {oid:#x} is a blob, and this version of relstore can neither change, delete nor '
                              'undo blobs: their data would be lost.')

    def _those_with_data(self, session: Session, oids: Iterable[int]) -> Iterator[int]:
        oids = iter(oids)
        while some := list(islice(oids, LOOKED_UP)):
            yield from self._adapter.with_blobs(session, some)
