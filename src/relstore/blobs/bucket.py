"""Bucket: what one database has in an object storage, and that it is this database's alone."""
from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.adapters.base import Adapter
from relstore.adapters.chunks import Data, Record
from relstore.adapters.objects import Stored
from relstore.blobs.base import Attempt
from relstore.blobs.store import ObjectStore
from relstore.errors import ConfigurationError
from relstore.sessions.session import Session

# What the object storage is called, in relstore_meta; and the object that says so there.
NAME, MARK = 'blob_store', '.relstore-database'
# What object_name() returns.
NAMED = re.compile('[0-9a-f]{2}/[0-9a-f]{64}-[0-9a-f]+')


def object_name(digest: bytes, version: str) -> str:
    return f'{digest.hex()[:2]}/{digest.hex()}-{version}'


class Bucket:
    """Of one process."""

    def __init__(self, adapter: Adapter, store: ObjectStore):
        self._adapter, self.store, self._objects = adapter, store, adapter.objects
        self._is_settled = False

    def forget(self) -> None:
        """The database may have been emptied, or restored."""
        self._is_settled = False

    def settle(self, attempt: Attempt) -> None:
        """Before the first object is stored: agree with all processes on what the storage is called, and say so there.

        ConfigurationError: it is another database's.
        """
        if self._is_settled:
            return
        name = attempt(self._call_it)
        if self.marked() is None:
            self.store.write(MARK, json.dumps({'store': name}).encode())
        if self.marked() != name:
            raise ConfigurationError(f'{self.store.address} has just become that of another database than '
                                     f'{self._adapter}: name another with blob-store.')
        self._is_settled = True

    def _call_it(self, session: Session) -> str:
        with self._adapter.writing(session):
            session.run(self._adapter.sql.add_meta, (NAME, secrets.token_hex(16)))
        return self._adapter.meta(session)[NAME]

    def marked(self) -> str | None:
        """Return what the storage is called there; '': that is not to be understood; None: nobody has said."""
        data = self.store.read_small(MARK)
        if data is None:
            return None
        try:
            return str(json.loads(data)['store'])
        except (ValueError, KeyError, TypeError):
            return ''

    def data(self, stored: Stored, oid: int, tid: int) -> Data:
        """Return the data of a revision, not compared with its record."""
        record, version = stored

        def pieces() -> Iterator[Any]:
            try:
                yield from self.store.read(object_name(record.digest, version or ''), record.size)
            except FileNotFoundError:
                raise POSKeyError('The data of the blob is not in the object storage', p64(oid), p64(tid)) from None
        return Data(record, pieces())

    def keep(self, attempt: Attempt, record: Record, path: str, wisher: str) -> tuple[str, bool]:
        """Have the data in a file be in the object storage. Return the version, and whether this has added its row."""
        new = secrets.token_hex(8)
        version: str = attempt(self._objects.want, record, new, wisher)
        name = object_name(record.digest, version)
        if version == new or self.store.size(name) != record.size:
            self.store.put(name, path)
        return version, version == new
