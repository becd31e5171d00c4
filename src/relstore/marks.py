"""Marks: since when objects are garbage, in a database without history; and which of these were linked since.

A sweep leaves a list of what was unreachable and has to wait (LATER, in relstore_garbage). A later pack removes what
has been on it for long enough. In between somebody may link such an object, use it, and cut it again, and no pack could
see that. So whoever links one, or changes it, writes that down in his own transaction, beside the list: a row with the
negative generation of that. Then its mark counts no more.

What it refers to needs no row, as long as it does so: it stays with it (prepare.py). Where it is changed, what it
referred to until then gets one.

Each process keeps the marked oids in memory, so that a commit that meets none costs no question. While a sweep is under
way its own list counts, and is asked.
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

# Objects that a process keeps in mind: 60 bytes each. Where more are marked, each vote asks.
KEPT = 100_000
# Objects that are asked about at a time.
ASKED = 10_000


@dataclass(frozen=True)
class Marked:
    """What a process knows of the list of one generation.

    number: of sweeps that had ended. oids: None if they are too many. taken: marks that it has taken off.
    """
    number: int
    generation: int
    oids: frozenset[int] | None
    taken: set[int] = field(default_factory=set)


UNKNOWN = Marked(-1, 0, None)


class Marks:
    """The marks of one database, as this process knows them."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self.known = UNKNOWN

    def learn(self, session: Session, number: int) -> None:
        """Read them. number: of the sweeps that have ended, as the session sees them."""
        generation = self._adapter.last_marked(session)
        oids = self._adapter.marks(session, generation, KEPT + 1) if generation else []
        self.known = Marked(number, generation, frozenset(oids) if len(oids) <= KEPT else None)

    def forget(self) -> None:
        self.known = UNKNOWN

    def take_off(self, session: Session, number: int, sweeping: int, links: Links) -> Callable[[], None]:
        """Take off the marks of what a transaction links or changes. Return what to call when it is committed.

        number, sweeping: see Verdict.
        """
        known = self.known
        if known.number == number and not sweeping and known.oids is not None:
            if not known.oids:
                return _nothing
            generation = known.generation
            met: Callable[[Iterable[int]], Set[int]] = known.oids.intersection
        else:
            generation, known = sweeping or self._adapter.last_marked(session), UNKNOWN
            if not generation:
                return _nothing
            met = partial(self._ask, session, generation)
        used = met(links.changed)
        found = {*used, *met(links.linked)}
        if used:
            found.update(met({target for _, refs in links.current(sorted(used)) for target in refs}))
        found -= known.taken
        if found:
            self._adapter.take_marks(session, generation, sorted(found))
        return lambda: known.taken.update(found) if known is not UNKNOWN else None

    def _ask(self, session: Session, generation: int, oids: Iterable[int]) -> set[int]:
        found, left = set(), iter(oids)
        while some := list(islice(left, ASKED)):
            found.update(self._adapter.marked(session, generation, some))
        return found


def _nothing() -> None:
    pass
