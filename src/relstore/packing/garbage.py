"""Doomed: the list of what goes, as a sweep holds it in memory; the database has it in relstore_garbage."""
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from relstore.adapters.base import Adapter
from relstore.sessions.session import Row, Session

OBJECT, OLDER, LATER, SPARED = 2, 1, 0, -1      # what goes: see relstore_garbage in schema.sql
# Rows of the list that are written or read at a time.
ROWS = 2500


Mark = tuple[tuple[int, int] | None, set[int], 'array[int]']         # see Doomed.mark


class Doomed:
    """The objects that are to go as a whole, now or later."""

    def __init__(self) -> None:
        self._oids = array('q')
        self._spared: set[int] = set()
        self._left = array('q')     # those that `next` has not returned: of these, and of what an earlier run spared
        self.seen: tuple[int, int] | None = None    # (tid, oid) up to which changes were looked at

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Add rows of the list, in the order of their oids.

        What goes later, and is garbage since now, need not be let stay for that.
        Of what was spared by a run that was interrupted it is not known how far it was followed.
        """
        self._oids.extend(oid for oid, _, since, goes in rows if goes == OBJECT or goes == LATER and since)
        self._left.extend(oid for oid, _, _, goes in rows if goes == SPARED)

    @property
    def spared(self) -> int:
        return len(self._spared)

    def mark(self) -> Mark:
        """Return what `go_back` takes, should what follows be rolled back."""
        return self.seen, self._spared.copy(), self._left[:]

    def go_back(self, mark: Mark) -> None:
        self.seen, self._spared, self._left = mark

    def spare(self, oids: Iterable[int]) -> bool:
        """Let those stay that are on the list. Return whether there are any, for `next` to return."""
        for oid in oids:
            place = bisect_left(self._oids, oid)
            if place < len(self._oids) and self._oids[place] == oid and oid not in self._spared:
                self._spared.add(oid)
                self._left.append(oid)
        return len(self._left) > 0

    def next(self, size: int) -> Sequence[int]:
        """Return some of those that stay, each once."""
        some = self._left[-size:]
        del self._left[-size:]
        return some


def pages(adapter: Adapter, session: Session, generation: int) -> Iterator[list[Row]]:
    """Yield pages of a list that was written down."""
    page = adapter.garbage(session, generation, -1, ROWS)
    while page:
        yield page
        page = adapter.garbage(session, generation, page[-1][0], ROWS)


def forget_lists(adapter: Adapter, session: Session, generation: int) -> None:
    """Forget all lists but this one, and the last that says since when objects are garbage."""
    keep = adapter.last_marked(session)
    while adapter.forget_garbage(session, generation, keep):
        time.sleep(adapter.pause)
