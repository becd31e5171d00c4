"""The list of what goes: GarbageList in the database (relstore_garbage), Doomed in a sweep's memory."""
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from relstore.adapters.base import Adapter
from relstore.adapters.numbers import LATER as LATER
from relstore.adapters.numbers import OBJECT as OBJECT
from relstore.adapters.numbers import OLDER as OLDER
from relstore.adapters.numbers import SPARED as SPARED
from relstore.marks import last_marked
from relstore.sessions.session import Row, Session

# Rows of the list written or read at a time.
ROWS = 2500


Mark = tuple[tuple[int, int] | None, set[int], 'array[int]']         # see Doomed.mark


class Doomed:
    """The objects that will go as a whole, now or later."""

    def __init__(self) -> None:
        self._oids = array('q')
        self._spared: set[int] = set()
        self._left = array('q')     # spared objects, by an earlier run too, that `next` has not returned yet
        self.seen: tuple[int, int] | None = None    # (tid, oid) of the last change looked at

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Add rows of the list, in oid order.

        LATER rows that are garbage only since now are not added: they stay anyway.
        Rows that an interrupted run has SPARED are followed again: how far it got is unknown.
        """
        self._oids.extend(oid for oid, _, since, goes in rows if goes == OBJECT or goes == LATER and since)
        self._left.extend(oid for oid, _, _, goes in rows if goes == SPARED)

    @property
    def spared(self) -> int:
        return len(self._spared)

    def mark(self) -> Mark:
        """Return the state for `go_back`, in case what follows is rolled back."""
        return self.seen, self._spared.copy(), self._left[:]

    def go_back(self, mark: Mark) -> None:
        self.seen, self._spared, self._left = mark

    def spare(self, oids: Iterable[int]) -> bool:
        """Spare those of these objects that are on the list. Return whether `next` has any to return."""
        for oid in oids:
            place = bisect_left(self._oids, oid)
            if place < len(self._oids) and self._oids[place] == oid and oid not in self._spared:
                self._spared.add(oid)
                self._left.append(oid)
        return len(self._left) > 0

    def next(self, size: int) -> Sequence[int]:
        """Return some spared objects, each once."""
        some = self._left[-size:]
        del self._left[-size:]
        return some


class GarbageList:
    """The list of one pack in the database.

    session: has the lock of packs, if anything will be changed.
    """

    def __init__(self, adapter: Adapter, session: Session, pack_id: int):
        self._adapter, self._session, self._sql = adapter, session, adapter.sql
        self._pack_id = pack_id

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Add rows: (oid, tid, since, goes); see schema.sql."""
        self._adapter.add_garbage(self._session, [(self._pack_id, *row) for row in rows])

    def pages(self) -> Iterator[list[Row]]:
        """Yield pages of rows, in oid order."""
        after = -1
        while page := self._page(after):
            yield page
            after = page[-1][0]

    def _page(self, after: int) -> list[Row]:
        return self._session.all(self._sql.garbage, (self._pack_id, after, ROWS))

    def end(self, after: int, size: int) -> int | None:
        """Return the oid of the last of the next `size` objects that lose something; None if there are none."""
        [[oid]] = self._session.all(self._sql.garbage_end, (self._pack_id, after, size))
        return oid

    def revisions(self, oids: Iterable[int]) -> list[Row]:
        """Return those revisions of listed objects, as they were marked, that still exist."""
        return self._session.all(self._sql.garbage_revisions, (self._adapter.oid_list(oids), self._pack_id))

    def spare(self, oids: Iterable[int]) -> None:
        """Spare objects of the list."""
        with self._adapter.writing(self._session):
            self._session.run(self._sql.spare, (self._adapter.oid_list(oids), self._pack_id))

    def forget_others(self) -> None:
        """Drop all lists but this one, the last that says since when objects are garbage, and one that is being swept.

        Votes are refused by the latter: another node of a cluster may have begun its sweep.
        """
        keep = last_marked(self._adapter, self._session)
        while self._forget(keep):
            time.sleep(self._adapter.pause)

    def _forget(self, keep: int) -> int:
        """Drop some rows of other lists; return how many."""
        with self._adapter.writing(self._session):
            return self._session.run(self._sql.forget_garbage, (self._pack_id, keep))
