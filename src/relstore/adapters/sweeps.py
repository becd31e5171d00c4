"""Sweeps of packs, as whoever votes, polls or copies is told of them: relstore_sweep, and the lists of what goes."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.sessions.session import Session


class Sweeps:
    """The sweeps of one database. A pack writes what is told here: see packing/packs.py."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def state(self, session: Session) -> tuple[int, int]:
        """Return (how many have ended, the pack_id of the one that is under way or 0)."""
        [row] = session.all(self._adapter.sql.sweep_state)
        return row

    def going(self, session: Session, pack_id: int, oids: Iterable[int]) -> list[int]:
        """Return some of the objects that the sweep of a pack removes, or has removed.

        LookupError if nobody knows, because the list that is there is not the one of that sweep.
        """
        parameters = self._adapter.oid_list(oids), pack_id
        going = [oid for oid, in session.all(self._adapter.sql.going, parameters)]
        if -1 in going:
            raise LookupError(pack_id)
        return going

    def swept(self, session: Session, number: int, limit: int) -> list[int] | None:
        """Return what a sweep has removed. None if that is not known any more, or more than `limit`."""
        row = session.one(self._adapter.sql.swept_count, (number,))
        if row is None or row[0] > limit:
            return None
        oids = [oid for oid, in session.all(self._adapter.sql.swept, (number, -1, limit))]
        return oids if len(oids) == row[0] else None
