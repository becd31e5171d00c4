"""Objects: which objects of blobs are in an object storage, by the digest of their data.

relstore_digest has a row for each, from before it is uploaded until after it is removed. Data that goes, and comes
back, is another object with a name of its own (`version`), so a removal that comes late can only meet what nobody uses
any more. What could interleave is in blobs/stored.py.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from relstore.adapters.chunks import Record, recorded
from relstore.adapters.numbers import OBJECT_IDLE
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter

# Rows that are looked at at a time.
PAGE = 1000


class Object(NamedTuple):
    """An object, as relstore_digest has it.

    state: one of numbers.OBJECT_USED and so on. age: seconds since somebody wanted it, or a pack found it idle, by the
    database's clock. referred: whether a revision has this data.
    """
    digest: bytes
    version: str
    size: int
    state: int
    age: float
    referred: bool


class Stored(NamedTuple):
    """The data of a revision. version: of the object that has it; None: there is none."""
    record: Record
    version: str | None


class Objects:
    """Of one database. What changes is committed by each call, but for hold and hold_record."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def find(self, session: Session, oid: int, tid: int) -> Stored | None:
        """Return what a revision's data is and where; None where nothing is recorded."""
        size, digest, version = session.one(self._adapter.sql.stored_blob, (oid, tid)) or (None, None, None)
        record = recorded((size, digest))
        return None if record is None else Stored(record, version)

    def want(self, session: Session, record: Record, version: str, wisher: str) -> str:
        """Say that an object is going to be used, and return its version: the one that is there, or else this one.

        wisher: who says so.
        """
        sql = self._adapter.sql
        while True:
            with self._adapter.writing(session):
                session.run(sql.want_object, (record.digest, version, record.size, wisher))
                row = session.one(sql.wanted_version, (record.digest,))
            if row is not None:         # else it was claimed in between
                return str(row[0])

    def hold(self, session: Session, digest: bytes) -> str | None:
        """Within a vote: keep an object from being claimed until the transaction ends. Return its version.

        None: there is none any more.
        """
        row = session.one(self._adapter.sql.hold_object, (digest,))
        return None if row is None else str(row[0])

    def hold_record(self, session: Session, oid: int, tid: int) -> Record | None:
        """Within a vote: keep what is recorded of a revision from being removed until the transaction ends."""
        return recorded(session.one(self._adapter.sql.hold_record, (oid, tid)) or (None, None))

    def all(self, session: Session) -> Iterator[Object]:
        """Yield all."""
        after = b''
        while rows := session.all(self._adapter.sql.objects, (after, PAGE)):
            for digest, version, size, state, age, referred in rows:
                after = bytes(digest)
                yield Object(after, version, size, state, float(age), bool(referred))

    def mark(self, session: Session, found: Object, state: int, grace: float = 0) -> None:
        """Note that nothing refers to an object (OBJECT_IDLE), or that something does again (OBJECT_USED).

        Not where it was wanted within the last `grace` seconds, nor where a transaction that has voted holds it.
        """
        with self._locked(session, found.digest, found.version) as row:
            if row is not None and row[0] != state and row[2] >= grace:
                session.run(self._adapter.sql.mark_object, (found.digest, state))

    def claim(self, session: Session, digest: bytes, version: str, *, grace: float | None = None, wisher: str = ''
              ) -> bool:
        """Have an object be used by nobody any more, so that the caller may remove it. Return whether it is.

        It is not where a revision has this data; where a transaction that has voted holds it; nor where it was wanted,
        or found idle, within the last `grace` seconds. Or where another than `wisher` has wanted it, if that is given.
        """
        with self._locked(session, digest, version) as row:
            if row is None:
                return False
            state, last, age = row
            mine = last == wisher if grace is None else state == OBJECT_IDLE and age >= grace
            # Another statement, so that it sees what whoever held it has committed.
            if not mine or session.all(self._adapter.sql.refers, (digest,)):
                return False
            session.run(self._adapter.sql.claim_object, (digest,))
            return True

    def forget(self, session: Session, digest: bytes, version: str) -> None:
        """Remove the row of an object that was claimed, and is gone."""
        with self._adapter.writing(session):
            session.run(self._adapter.sql.forget_object, (digest, version))

    @contextmanager
    def _locked(self, session: Session, digest: bytes, version: str) -> Iterator[Row | None]:
        """Within a transaction, yield (state, wisher, age) of an object; None: it is not there, or held."""
        with self._transaction(session):
            yield session.one(self._adapter.sql.lock_object, (digest, version))

    @contextmanager
    def _transaction(self, session: Session) -> Iterator[None]:
        session.script(self._adapter.sql.begin)
        try:
            yield
            session.run(self._adapter.sql.commit)
        finally:
            session.rollback()


class ObjectsOnSQLite(Objects):

    @contextmanager
    def _transaction(self, session: Session) -> Iterator[None]:
        with self._adapter.writing(session):
            yield
