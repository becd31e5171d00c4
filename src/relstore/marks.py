"""Marks: since when objects are garbage, in a database without history; and which of them were linked since.

A sweep leaves a list of what was unreachable but has to wait (LATER, in relstore_garbage). A later pack removes what
has been on it for long enough. In between a transaction may link such an object, and another unlink it, and no pack
could see that. So a transaction that links or changes one also writes a row beside the list, with the negated pack_id.
Then the object's mark no longer counts.

What the object refers to needs no row as long as it does: it stays too (prepare.py). When the object is changed, what
it referred to until then gets a row.

Each process keeps the marked oids in memory, so that a commit that uses none of them makes no query. During a sweep
the sweep's own list counts, and is queried.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from relstore.adapters.base import Adapter
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.packing.links import Links

# Marked objects kept in memory: 60 bytes each. If there are more, each vote queries the database.
KEPT = 100_000
# Objects in one query.
ASKED = 10_000


@dataclass(frozen=True)
class Marked:
    """What a process knows of one pack's list.

    number: how many sweeps had ended. oids: None if there are too many. taken: marks that this process has taken off.
    """
    number: int
    pack_id: int
    oids: frozenset[int] | None
    taken: set[int] = field(default_factory=set)


UNKNOWN = Marked(-1, 0, None)


class Marks:
    """The marks of one database, as this process knows them."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self.known = UNKNOWN

    def learn(self, session: Session, number: int) -> None:
        """Read the marks. number: how many sweeps have ended, as the session sees it."""
        pack_id = last_marked(self._adapter, session)
        rows = session.all(self._adapter.sql.marks, (pack_id, KEPT + 1)) if pack_id else []
        oids = frozenset(oid for oid, in rows) if len(rows) <= KEPT else None
        self.known = Marked(number, pack_id, oids)

    def forget(self) -> None:
        self.known = UNKNOWN

    def take_off(self, session: Session, number: int, sweeping: int, links: Links) -> Callable[[], None]:
        """Take off the marks of what a transaction links or changes. Return what to call once it is committed.

        number, sweeping: see Verdict.
        """
        known = self.known
        if known.number == number and not sweeping and known.oids is not None:
            if not known.oids:
                return _nothing
            pack_id = known.pack_id
            met: Callable[[Iterable[int]], Set[int]] = known.oids.intersection
        else:
            pack_id, known = sweeping or last_marked(self._adapter, session), UNKNOWN
            if not pack_id:
                return _nothing
            met = partial(self._ask, session, pack_id)
        used = met(links.changed)
        found = {*used, *met(links.linked)}
        if used:
            found.update(met({target for _, refs in links.current(sorted(used)) for target in refs}))
        found -= known.taken
        if found:
            session.run(self._adapter.sql.take_marks, (self._adapter.oid_list(sorted(found)), pack_id))
        return lambda: known.taken.update(found) if known is not UNKNOWN else None

    def _ask(self, session: Session, pack_id: int, oids: Iterable[int]) -> set[int]:
        left = iter(oids)
        found: set[int] = set()
        while some := list(islice(left, ASKED)):
            rows = session.all(self._adapter.sql.marked, (self._adapter.oid_list(some), pack_id))
            found.update(oid for oid, in rows)
        return found


# As a pack reads them.

def last_marked(adapter: Adapter, session: Session) -> int:
    """Return the pack_id of the last list that says since when objects are garbage; 0: there is none.

    That pack has been swept: votes do not know a list that is only written.
    """
    row = session.one(adapter.sql.last_marked)
    return row[0] if row else 0


def taken_marks(adapter: Adapter, session: Session) -> list[int]:
    """Return the objects whose marks were taken off, for all lists."""
    return [oid for oid, in session.all(adapter.sql.taken_marks)]


def looked(adapter: Adapter, session: Session) -> int:
    """Return the tid since which votes have taken off the marks of the last list that was swept."""
    return int(adapter.meta(session).get('looked', 0))


def _nothing() -> None:
    pass
