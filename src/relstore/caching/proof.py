"""Proof: whether a database still stands on what is known of it.

A backup may be put in the place of a database with everything in it that could tell the two apart, the epoch too, and
others may commit before this process asks again: then even the newest tid is larger than before. What tells is what was
there: nobody else gives an object the same tid, for it is the time of a commit. So

* the newest transaction that is known has left something. Where all that it wrote was written again, nothing of it is
  left; then `stands` is the newest before it that has. Whatever is known to have changed after that has changed again
  since, or it was never written in this database. A pack may have removed it, too.
* An object whose current tid is smaller than one that it had: the database went back, for certain.

With history a transaction has a row, which only a pack removes: relstore's says up to where (`packed_to`).
"""
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from relstore.adapters.base import Adapter
from relstore.sessions.session import Session

# Objects that are asked about, or remembered, where all are too many.
ENOUGH = 100


class Finding(Enum):
    HOLDS = 'holds'
    PERHAPS_LOST = 'perhaps lost'       # or a pack, RelStorage's say, has removed what would prove it
    LOST = 'lost'


@dataclass(frozen=True)
class Known:
    """What was known of a database at one time: its newest tid, and (oid, tid) of what changed last, newest first.

    Of every object that has changed after `floor`.
    """
    head: int
    floor: int
    changed: Sequence[tuple[int, int]]

    def after(self, tid: int) -> dict[int, int]:
        return {oid: changed for oid, changed in self.changed if tid < changed <= self.head}


def finding(adapter: Adapter, session: Session, known: Known, stands: int, since: Collection[int]) -> Finding:
    """Return what becomes of a process that knows this. `since` are the oids that have changed after its head."""
    if stands == known.head:
        return Finding.HOLDS
    missing = {oid: tid for oid, tid in known.after(stands).items() if oid not in since}
    if missing:
        return finding_of(adapter, session, dict(list(missing.items())[:ENOUGH]))
    if adapter.keep_history and known.head > adapter.packed_to(session):
        return Finding.PERHAPS_LOST
    return Finding.HOLDS


def finding_of(adapter: Adapter, session: Session, missing: Mapping[int, int]) -> Finding:
    """Return what becomes of a process that knows of changes, tids by oid, of which the database does not tell."""
    tids = adapter.current_tids(session, missing)
    went_back = any(tid is not None and tid < missing[oid] for oid, tid in tids.items())
    return Finding.LOST if went_back else Finding.PERHAPS_LOST


def is_proven(adapter: Adapter, session: Session, known: Known) -> bool:
    """Whether all that was saved with this knowledge is of this database. False also where that cannot be told."""
    stands = adapter.stands(session, known.head)
    if stands == known.head:
        return True
    later = known.after(stands)
    if known.floor > stands or not later:
        return False
    tids = adapter.current_tids(session, later)
    return all(tid is not None and tid > known.head for tid in tids.values())
