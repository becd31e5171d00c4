"""Pages: queries for reading all of a database page by page."""
from __future__ import annotations

from relstore.adapters.base import Adapter
from relstore.sessions.session import Row, Session


class Pages:
    """The pages of one database, as the given session sees it."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def transactions(self, session: Session, start: int, stop: int, size: int) -> list[Row]:
        """Return a page of (tid, packed, user, description, extension) from `start` to `stop`."""
        return session.all(self._adapter.sql.transactions, (start, stop, size))

    def records(self, session: Session, tid: int, after: int, size: int) -> list[Row]:
        """Return a page of (oid, state, data_tid) of one transaction, for oids greater than `after`."""
        return session.all(self._adapter.sql.records, (tid, after, size))

    def current(self, session: Session, start: int, size: int) -> list[Row]:
        """Return a page of (oid, tid, state) of the existing objects, from oid `start` on."""
        return session.all(self._adapter.sql.current_records, (start, size))
