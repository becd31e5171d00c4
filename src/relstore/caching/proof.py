"""Proof: whether a database still contains what is known of it.

A restored backup may contain everything that could tell it from the database it replaces, the epoch included, and
others may commit before this process asks again: then even the newest tid is larger than before. The evidence is what
was written: no other commit gives an object the same tid, because a tid is the time of a commit. So

* the newest known transaction has left something. If everything it wrote was overwritten, nothing of it is left; then
  `stands` is the newest one before it that has left something. Whatever is known to have changed after that has either
  changed again since, or was never written in this database. Or a pack has removed it.
* If an object's current tid is smaller than one it once had, the database certainly went back.

With history a transaction has a row, which only a pack removes: relstore's packs record up to where (`packed_to`).
"""
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from relstore.adapters.base import Adapter
from relstore.sessions.session import Session

# How many objects to ask about, or to remember, when there are too many.
ENOUGH = 100


class Finding(Enum):
    HOLDS = 'holds'
    PERHAPS_LOST = 'perhaps lost'       # or a pack, RelStorage's say, has removed what would prove it
    LOST = 'lost'


@dataclass(frozen=True)
class Known:
    """What was known of a database at one time: its newest tid, and (oid, tid) of every object that changed after
    `floor`, newest first.
    """
    head: int
    floor: int
    changed: Sequence[tuple[int, int]]

    def after(self, tid: int) -> dict[int, int]:
        return {oid: changed for oid, changed in self.changed if tid < changed <= self.head}


def finding(adapter: Adapter, session: Session, known: Known, stands: int, since: Collection[int]) -> Finding:
    """Return whether the database still has what is known. since: the oids that changed after its head."""
    if stands == known.head:
        return Finding.HOLDS
    missing = {oid: tid for oid, tid in known.after(stands).items() if oid not in since}
    if missing:
        return finding_of(adapter, session, dict(list(missing.items())[:ENOUGH]))
    if adapter.keep_history:
        [[packed_to]] = session.all(adapter.sql.packed_to)      # a pack may have removed transactions up to this tid
        if known.head > packed_to:
            return Finding.PERHAPS_LOST
    return Finding.HOLDS


def finding_of(adapter: Adapter, session: Session, missing: Mapping[int, int]) -> Finding:
    """Return whether known changes, tids by oid, that the database does not report are lost."""
    tids = adapter.current_tids(session, missing)
    went_back = any(tid is not None and tid < missing[oid] for oid, tid in tids.items())
    return Finding.LOST if went_back else Finding.PERHAPS_LOST


def is_proven(adapter: Adapter, session: Session, known: Known) -> bool:
    """Whether everything saved with this knowledge is from this database. False if that cannot be told."""
    stands = adapter.stands(session, known.head)
    if stands == known.head:
        return True
    later = known.after(stands)
    if known.floor > stands or not later:
        return False
    tids = adapter.current_tids(session, later)
    return all(tid is not None and tid > known.head for tid in tids.values())
