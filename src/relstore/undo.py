"""Undo: puts earlier states into the spool, as if they were stored again."""
from ZODB.POSException import MultipleUndoErrors, UndoError
from ZODB.utils import p64

from relstore.adapters.base import MAX_TID
from relstore.database import Database
from relstore.resolving import resolve
from relstore.sessions.session import Row, Session
from relstore.spool import Spool


class Undo:
    """The undoing of one transaction as part of another, whose spool is given."""

    def __init__(self, database: Database, spool: Spool, tid: int):
        self._database, self._adapter, self._spool, self._tid = database, database.adapter, spool, tid

    def run(self) -> list[int]:
        """Put back what the transaction changed; return the oids. UndoError names the objects that cannot be.

        All or nothing: after an UndoError the spool is as before, and the caller may go on.
        """
        rows = self._database.pool.attempt(self._changes)
        undone, failures = [], []
        for oid, *row in rows:
            try:
                undone.append((oid, *self._undone(oid, *row)))
            except UndoError as e:
                failures.append(e)
        if len(failures) > 1:
            raise MultipleUndoErrors([(failure._oid, failure._reason) for failure in failures])
        if failures:
            raise failures[0]
        for oid, base, state, data_tid in undone:
            self._spool.put(oid, base, state, data_tid=data_tid)
        return [oid for oid, *_ in rows]

    def _changes(self, session: Session) -> list[Row]:
        if self._tid > MAX_TID or session.one(self._adapter.sql.transaction_is_undoable, (self._tid,)) is None:
            raise UndoError('The transaction does not exist, or has been packed.')
        return session.all(self._adapter.sql.undo, (self._tid,))

    def _undone(self, oid: int, written: str | None, current_tid: int, current: str | None, replaced: int,
                before: int | None) -> tuple[int, bytes | None, int | None]:
        """Return (base, state, data_tid) to put an object back. written, current: md5s; None where there is none."""
        if replaced and before is None:
            raise UndoError('The revision to go back to has been packed.', p64(oid))
        pending = self._spool.get(oid)
        if pending is not None:
            current = pending.md5
        if current == written:
            return current_tid, self._state(oid, before) if before else None, before
        return current_tid, self._resolved(oid, current_tid, before), None

    def _resolved(self, oid: int, current_tid: int, before: int | None) -> bytes:
        """Return what the object's class makes of going back, while keeping what came later."""
        pending = self._spool.get(oid)
        now = pending.held if pending is not None else self._state(oid, current_tid)
        undone, wanted = self._state(oid, self._tid), self._state(oid, before) if before else None
        if now is None or undone is None or wanted is None:
            raise UndoError('A later transaction changed it, or removed it.', p64(oid))
        resolved = resolve(self._database, oid, self._tid, undone, current_tid, now, wanted)
        if resolved is None:
            raise UndoError('A later transaction changed it, and its class cannot resolve that.', p64(oid))
        return resolved

    def _state(self, oid: int, tid: int) -> bytes | None:
        row = self._database.pool.attempt(self._adapter.load_serial, oid, tid)
        if row is None:
            raise UndoError('The revision to go back to has been packed.', p64(oid))
        return row[0]
