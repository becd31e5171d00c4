"""OidFile: the file in which RelStorage counts oids beside an SQLite database. If it is there, relstore uses it."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.sqlite import SQLiteAdapter


class OidFile:

    def __init__(self, adapter: SQLiteAdapter):
        self._adapter, self._path = adapter, adapter.data_dir / 'oids.sqlite3'

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement in the file and return the number that it yields; 0 if there is no such file."""
        if not self._path.exists():
            return 0
        with closing(self._session()) as session:
            if session.one(self._adapter.sql.has_relstorage_oid) is None:
                return 0
            [[value]] = session.all(sql, parameters)
            return value

    def make(self, last: int) -> None:
        """Create the file if it is missing, and let it count on from an oid."""
        with closing(self._session()) as session:
            session.run(self._adapter.sql.begin_write)
            for statement in self._adapter.sql.make_relstorage_oid.parts:
                session.run(statement)
            session.all(self._adapter.sql.raise_relstorage_oid, (last // 16,))
            session.run(self._adapter.sql.commit)

    def _session(self) -> Session:
        return self._adapter.connected(Session, self._path)
