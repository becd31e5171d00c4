"""Referrers: which recently loaded states of a view refer to an object, and what lies beside it there.

An object has a *place* in the state that refers to it, its *referrer*: the third reference, say. The referrer has a
referrer too, in which its *siblings* come after it: those of the same class. Here they are buckets of a tree:

    node      [ A  B  C  D ]             a node refers to buckets; D was not seen yet
                |  |  |
    buckets     |  |  [ c1 c2 c3 ]
                |  [ b1 b2 b3 ]
                [ a1 a2 a3 ]             a1 is missed

    along a1:    a2 a3   b1 b2 b3   c1 c2 c3, and then D
    across a1:   b1 c1

Nothing is loaded here. The least recently used referrers are forgotten.
"""
from collections.abc import Iterator
from struct import Struct
from typing import Any

from relstore.references import unpack

SMALL_REFS = 8                  # with no more references than this, those before an object are as likely as those after
MOST_SIBLINGS = 64              # looked at
MOST_UNSEEN = 4                 # unseen siblings returned at once
REMEMBERED_REFS = 1024          # and about as many that were used before them: up to 170 KB per connection

pack = Struct('>Q').pack


class Referrer:
    """A state through which others are found. oid: None if unknown. refs: 8 bytes each. habit: the caller's."""

    __slots__ = ('oid', 'refs', 'habit')

    def __init__(self, oid: int | None, refs: bytes, habit: Any):
        self.oid, self.refs, self.habit = oid, refs, habit


class Referrers:
    """What one view has seen; used by one thread at a time.

    parents, older_parents: referrers by what they refer to, those used last and those used before. The caller
    looks into them directly, because it does so for each miss.
    """

    def __init__(self) -> None:
        self._states: dict[int, Referrer] = {}      # by their own oid
        self.parents: dict[int, Referrer] = {}
        self._older_states, self.older_parents = self._states, self.parents

    def add(self, referrer: Referrer) -> None:
        """Remember a referrer, and forget the least recently used if there are too many."""
        if len(self.parents) > REMEMBERED_REFS:
            self._older_states, self.older_parents = self._states, self.parents
            self._states, self.parents = {}, {}
        if referrer.oid is not None:
            self._states[referrer.oid] = referrer
        oids = unpack(referrer.refs)
        # A bucket of a tree is referred to by the bucket before it, which refers to no other, and by their node.
        node = self.parents.get(oids[-1]) or self.older_parents.get(oids[-1])
        self.parents.update(dict.fromkeys(oids, referrer))
        if node is not None:
            self.parents[oids[-1]] = node

    def keep(self, oid: int, referrer: Referrer) -> None:
        """Note that the referrer of the object was used."""
        if oid not in self.parents:
            self.add(referrer)

    def along(self, referrer: Referrer, place: int, count: int) -> tuple[list[int], list[int]]:
        """Return about `count` objects after this place, and, if there are fewer, the unseen siblings.

        The objects are what the referrer refers to after the place, then what its siblings refer to, up to the
        first that was not seen. place: in bytes.
        """
        refs, size = referrer.refs, 8 * count
        following = refs[place + 8:place + 8 + size]
        if len(refs) <= 8 * SMALL_REFS:
            following = refs[:place] + following
        oids: list[int] = [*unpack(following)]
        unseen: list[int] = []
        if len(oids) < count:
            for oid, sibling in self._siblings(referrer):
                if sibling is not None and not unseen:
                    oids += unpack(sibling.refs[:size])
                    if len(oids) >= count:
                        break
                else:
                    unseen.append(oid)
                    if len(unseen) == MOST_UNSEEN:
                        break
        return oids, unseen

    def across(self, referrer: Referrer, place: int, count: int) -> list[int]:
        """Return up to `count` objects at this place in the siblings, up to the first unseen one. place: in bytes."""
        oids: list[int] = []
        for _, sibling in self._siblings(referrer):
            if sibling is None or len(oids) == count:
                break
            oids += unpack(sibling.refs[place:place + 8])
        return oids

    def follows(self, referrer: Referrer, other: Referrer) -> bool:
        """Whether the referrer is the first sibling after the other one."""
        _, sibling = next(self._siblings(other), (None, None))
        return sibling is referrer

    def _siblings(self, referrer: Referrer) -> Iterator[tuple[int, Referrer | None]]:
        """Yield (oid, referrer) of its siblings in order, with None for those that were not seen."""
        oid = referrer.oid
        if oid is None:
            return
        parent = self.parents.get(oid) or self.older_parents.get(oid)
        if parent is None:
            return
        self.keep(oid, parent)
        start = place_of(pack(oid), parent.refs) + 8
        for other in unpack(parent.refs[start:start + 8 * MOST_SIBLINGS]):
            sibling = self._states.get(other) or self._older_states.get(other)
            if sibling is None or sibling.habit is referrer.habit:
                yield other, sibling


def place_of(packed: bytes, refs: bytes) -> int:
    """Return the byte offset of an object in packed references, or -1."""
    place = refs.find(packed)
    while place % 8 and place >= 0:
        place = refs.find(packed, place + 1)
    return place
