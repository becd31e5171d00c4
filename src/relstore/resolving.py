"""Resolving: a change whose base is not current any more is resolved by the object's class, or is a ConflictError."""
from collections.abc import Callable
from contextlib import suppress

from ZODB.ConflictResolution import ConflictResolvingStorage
from ZODB.POSException import ConflictError
from ZODB.utils import p64, u64

from relstore.adapters.numbers import TOGETHER
from relstore.database import Database
from relstore.errors import StorageError
from relstore.references import class_name, plain
from relstore.sessions.session import Row, Session
from relstore.spool import Spool

# How much of another transaction's user and description a ConflictError quotes; it is to stay below 2 kB in all.
LONGEST_USER_BYTES, LONGEST_DESCRIPTION_BYTES = 200, 800


def resolve_conflicts(database: Database, session: Session, spool: Spool,
                      conflicts: list[tuple[int, int, bytes | None]]) -> list[int]:
    """Put resolved states into the spool; return their oids. ConflictError if a class cannot resolve its conflict.

    session: has voted. conflicts: (oid, current tid, current state); see Verdict for how many bring their state.
    """
    resolved = []
    for start in range(0, len(conflicts), TOGETHER):
        some = conflicts[start:start + TOGETHER]
        if start:
            states = database.adapter.load_serials(session, [(oid, tid) for oid, tid, _ in some])
            some = [(oid, tid, states.get(oid)) for oid, tid, _ in some]
        old = _old_states(database, session, spool, [oid for oid, _, current in some if current is not None])
        for oid, tid, current in some:
            _resolve_conflict(database, session, spool, oid, tid, current, old.get(oid))
            resolved.append(oid)
    return resolved


def _old_states(database: Database, session: Session, spool: Spool, oids: list[int]) -> dict[int, bytes | None]:
    """Return the states that changes were based on, by oid, as far as they are still to be had.

    A history-free database has overwritten them, but the cache may have kept them.
    """
    bases = {row.oid: row.base for row in map(spool.__getitem__, oids) if row.base and row.size is not None}
    found = {oid: database.cache.revision(oid, base) for oid, base in bases.items()}
    missing = [(oid, base) for oid, base in bases.items() if found[oid] is None]
    if missing and database.adapter.keep_history:
        found |= database.adapter.load_serials(session, missing)
    return found


def _resolve_conflict(database: Database, session: Session, spool: Spool, oid: int, current_tid: int,
                      current: bytes | None, old: bytes | None) -> None:
    pending = spool[oid]
    mine, base = pending.held, pending.base
    resolved = None
    if old is not None and current is not None and mine is not None:
        resolved = resolve(database, oid, base, old, current_tid, current, mine)
    if resolved is None:
        error = ConflictError(oid=p64(oid), serials=(p64(current_tid), p64(base)))
        raise explained(database, session, error, mine or current)
    database.conflicts.conflict(oid, class_of(database, mine), resolved=True)
    spool.put(oid, base, resolved)


def resolve(database: Database, oid: int, old_tid: int, old: bytes, current_tid: int, current: bytes, mine: bytes
            ) -> bytes | None:
    """Return the state that the object's class makes of both changes, or None if it cannot."""
    resolver = _Resolver(database, old)
    try:
        return resolver.tryToResolveConflict(p64(oid), p64(current_tid), p64(old_tid), mine, current)
    except (ConflictError, IndexError, TypeError, ValueError):
        return None     # ZODB raises the last three when it looks for the class in bytes that are no record


class _Resolver(ConflictResolvingStorage):
    """What ZODB's conflict resolution wants of a storage, for one object."""

    def __init__(self, database: Database, old: bytes):
        self._old = old
        self._crs_transform_record_data: Callable[[bytes], bytes] = database.transform
        self._crs_untransform_record_data: Callable[[bytes], bytes] = database.untransform

    def loadSerial(self, oid: bytes, serial: bytes) -> bytes:
        return self._old


def explained(database: Database, session: Session, error: ConflictError, record: bytes | None = None
              ) -> ConflictError:
    """Add to an error what is known of the object and of the other transaction; count it, and return it.

    The session is rolled back, because others may wait for its locks. error: with oid and serials. record: a state of
    the object, if one is at hand.
    """
    oid, (theirs, mine) = u64(error.oid), map(u64, error.serials)
    record, author = record or database.cache.revision(oid, mine), None
    with suppress(StorageError):        # the conflict is certain; only the details would be missing
        session.rollback()
        if record is None:
            record, _ = database.adapter.load_now(session, oid) or (None, 0)
        if theirs not in (mine, 0):         # 0: no revision is current
            author = _author(database, session, theirs)
    name = class_of(database, record)
    database.conflicts.conflict(oid, name, resolved=False)
    error.class_name = name or None
    if author is not None:
        user, description = author
        texts = [('user', plain(user or b'', LONGEST_USER_BYTES)),
                 ('description', plain(description or b'', LONGEST_DESCRIPTION_BYTES))]
        said = ', '.join(f'{what} "{text}"' for what, text in texts if text)
        error.message += f'; the other transaction: {said}' if said else ''
    return error


def _author(database: Database, session: Session, tid: int) -> Row | None:
    """Return the beginnings of a transaction's user and description, or None if there is no such record."""
    return session.one(database.adapter.sql.author, (tid,)) if database.adapter.keep_history else None


def class_of(database: Database, record: bytes | None) -> str:
    """Return the name of a record's class; '' if there is no record."""
    return class_name(database.plain(record)) if record else ''
