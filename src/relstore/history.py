"""History: what was changed, when and by whom: history(), undoLog(), undoInfo()."""
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from persistent.TimeStamp import TimeStamp
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.utils import p64

from relstore.adapters.base import MAX_TID
from relstore.database import Database
from relstore.sessions.session import Row, Session

PAGE = 200


def history(database: Database, oid: int, size: int) -> list[dict[str, Any]]:
    """Return dictionaries for the last `size` revisions of an object, newest first; see IStorage.history."""
    rows = database.pool.attempt(_all, database.adapter.sql.history, (oid, min(size, MAX_TID)))
    if not rows and size > 0:
        raise POSKeyError(p64(oid))
    return [_extension(extension) | {
        'time': TimeStamp(p64(tid)).timeTime(), 'tid': p64(tid), 'serial': p64(tid), 'size': state_size,
        'user_name': bytes(user or b''), 'description': bytes(description or b'')}
        for tid, state_size, user, description, extension in rows]


def undo_log(database: Database, first: int, last: int, accept: Callable[[dict[str, Any]], bool] | None
             ) -> list[dict[str, Any]]:
    """Return a slice of the transactions that can be undone, newest first; see IStorageUndoable.undoLog."""
    stop = last if last >= 0 else first - last
    entries = _undoable(database, min(max(stop, 1), PAGE))
    return list(islice(entries if accept is None else filter(accept, entries), first, max(stop, first)))


def _undoable(database: Database, page: int) -> Iterator[dict[str, Any]]:
    before = MAX_TID
    while True:
        rows = database.pool.attempt(_all, database.adapter.sql.undo_log, (before, page))
        for tid, user, description, extension in rows:
            yield _extension(extension) | {
                'id': p64(tid), 'time': TimeStamp(p64(tid)).timeTime(),
                'user_name': bytes(user or b''), 'description': bytes(description or b'')}
        if len(rows) < page:
            return
        before, page = rows[-1][0], PAGE


def _all(session: Session, sql: str, parameters: tuple[int, ...]) -> list[Row]:
    return session.all(sql, parameters)


def _extension(extension: bytes | None) -> dict[str, Any]:
    """Return a transaction's extended information, or {} if it cannot be read: its classes may be gone.

    One that cannot be read must not hide the other transactions.
    """
    try:
        return dict(TransactionMetaData(extension=bytes(extension or b'')).extension)
    except Exception:       # whatever is in the bytes, and whatever the classes in it raise
        return {}
