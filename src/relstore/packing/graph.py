"""Graph: which objects refer to which, as of one snapshot of the database, in compact arrays.

A revision takes 28 bytes plus 8 for each reference; an object 13 more, or 21 if oids are scattered.
"""
from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from relstore.sessions.session import Row

# An object's place is its oid if that needs fewer places than this per revision; otherwise it is its rank.
SCATTERED = 4

# What became of an object: the values of `marks`.
UNREACHED, REACHED = 0, 1


class Graph:
    """Filled page by page with `add`, then completed by `finish`; `reach` follows references.

    A place is a small number that stands for an object; `place_of` and `oid_of` translate.
    """

    def __init__(self) -> None:
        self._oids = array('q')         # of each revision
        self._tids = array('q')
        self._ends = array('q', [0])    # for revision n: where its references end, and those of n + 1 begin
        self._refs = array('Q')
        self._deletions = bytearray()   # is the revision a deletion?

    def __len__(self) -> int:
        """The number of revisions."""
        return len(self._oids)

    def add(self, rows: Sequence[Row]) -> None:
        """Add revisions: (oid, tid, packed references, ..., whether it is a deletion)."""
        self._oids.extend(map(itemgetter(0), rows))
        self._tids.extend(map(itemgetter(1), rows))
        refs = b''.join(map(itemgetter(2), rows))
        numbers = array('Q', refs)
        if sys.byteorder == 'little':
            numbers.byteswap()
        self._refs += numbers
        ends = accumulate((len(row[2]) // 8 for row in rows), initial=self._ends[-1])
        next(ends)
        self._ends.extend(ends)
        self._deletions.extend(map(bool, map(itemgetter(-1), rows)))

    def finish(self, pack_tid: int, keep_nowhere: bool = False) -> None:
        """Link the revisions that count: of each object the newest one up to `pack_tid`, and all later ones.

        keep_nowhere: prepare for `dangling`.
        """
        self._find_places()
        # The oids of references to objects without a place, by position in _refs.
        self._nowhere = {number: oid for number, oid in enumerate(self._refs) if self.place_of(oid) is None
                         } if keep_nowhere else {}
        places, oids, tids = self._places, self._oids, self._tids
        # Every oid of a revision has a place.
        revision_places = oids if places is None else array(
            'q', map(self.place_of, oids))      # type: ignore[arg-type, type-var]  # see above
        self.newest = array('q', bytes(8 * self.size))      # by place: the tid of the object at `pack_tid`; 0: none
        self.current = array('q', bytes(8 * self.size))     # by place: its current tid; 0: no such object
        self.older = array('q')                             # places of objects with revisions before `newest`
        self._deleted = bytearray(self.size)                # by place: is the current revision a deletion?
        newest, current, deleted = self.newest, self.current, self._deleted
        with_older = bytearray(self.size)
        for place, tid, deletion in zip(revision_places, tids, self._deletions, strict=True):
            if tid > current[place]:
                current[place] = tid
                deleted[place] = deletion
            if tid <= pack_tid:
                if newest[place]:
                    with_older[place] = 1
                if tid > newest[place]:
                    newest[place] = tid
        self.older.extend(place for place, flag in enumerate(with_older) if flag)
        self._first = array('i', [-1]) * self.size          # by place: its last linked revision
        self._next = array('i', bytes(4 * len(oids)))       # by revision: the one linked before it; -1: none
        first, following = self._first, self._next
        for number, (place, tid) in enumerate(zip(revision_places, tids, strict=True)):
            if tid >= newest[place]:
                following[number] = first[place]
                first[place] = number
        self.marks = bytearray(self.size)
        self._refs_to_places()

    def _find_places(self) -> None:
        largest = max(self._oids, default=-1)
        if largest < SCATTERED * len(self._oids):
            self._places, self.size = None, largest + 1
        else:
            self._places = array('q', (oid for oid, _ in groupby(sorted(self._oids))))
            self.size = len(self._places)

    def _refs_to_places(self) -> None:
        """Replace oids by places. A dangling reference gets the place after the last, which is always marked."""
        refs, nowhere = self._refs, self.size
        if self._places is None:
            if max(refs, default=0) >= nowhere:
                for number, oid in enumerate(refs):
                    if oid >= nowhere:
                        refs[number] = nowhere
        else:
            for number, oid in enumerate(refs):
                place = self.place_of(oid)
                refs[number] = nowhere if place is None else place
        self.marks.append(REACHED)

    def place_of(self, oid: int) -> int | None:
        """Return the place of an object, or None if it has none."""
        if self._places is None:
            return oid if oid < self.size else None
        place = bisect_left(self._places, oid)
        return place if place < self.size and self._places[place] == oid else None

    def oid_of(self, place: int) -> int:
        return place if self._places is None else self._places[place]

    def reach(self, roots: Iterable[int]) -> None:
        """Mark the places `roots`, and everything reachable from them."""
        marks, first, following, ends, refs = self.marks, self._first, self._next, self._ends, self._refs
        waiting = []
        for place in roots:
            if not marks[place]:
                marks[place] = REACHED
                waiting.append(place)
        while waiting:
            number = first[waiting.pop()]
            while number >= 0:
                for place in refs[ends[number]:ends[number + 1]]:
                    if not marks[place]:
                        marks[place] = REACHED
                        waiting.append(place)
                number = following[number]

    def dangling(self, root: int) -> Iterator[tuple[int, int]]:
        """Go breadth first from `root`; yield (place, oid that it refers to) for references to missing objects.

        `path_to` then tells how each place was reached. Takes 16 more bytes of memory per object.
        """
        first, following, ends, refs, current = self._first, self._next, self._ends, self._refs, self.current
        self._parents = array('q', [-1]) * self.size
        self.marks[root] = REACHED
        waiting = array('q', [root])
        for place in waiting:       # grows meanwhile
            number = first[place]
            while number >= 0:
                for position in range(ends[number], ends[number + 1]):
                    target = refs[position]
                    if target == self.size:
                        yield place, self._nowhere[position]
                    elif not current[target] or self.is_deleted(target):
                        yield place, self.oid_of(target)
                    elif not self.marks[target]:
                        self.marks[target] = REACHED
                        self._parents[target] = place
                        waiting.append(target)
                number = following[number]

    def path_to(self, place: int) -> list[int]:
        """Return the places from the root of `dangling` to this one."""
        path = [place]
        while self._parents[path[-1]] >= 0:
            path.append(self._parents[path[-1]])
        return path[::-1]

    def unreached(self) -> Iterator[int]:
        """Yield the places of the unreached objects, in oid order."""
        current, marks = self.current, self.marks
        place = marks.find(UNREACHED)
        while place >= 0:
            if current[place]:
                yield place
            place = marks.find(UNREACHED, place + 1)

    def is_deleted(self, place: int) -> bool:
        """Whether the object's current revision is a deletion."""
        return bool(self._deleted[place])

    def changed_after(self, tid: int) -> Iterator[int]:
        return (place for place, current in enumerate(self.current) if current > tid)

    def deleted(self) -> Iterator[int]:
        """Yield the places of the deleted objects, in oid order."""
        place = self._deleted.find(1)
        while place >= 0:
            yield place
            place = self._deleted.find(1, place + 1)
