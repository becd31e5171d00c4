"""Sweeps: what votes, polls and copies are told about the sweeps of packs: relstore_sweep, and lists of what goes."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.sessions.session import Session


class Sweeps:
    """The sweeps of one database. Packs write what is read here: see packing/packs.py."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def state(self, session: Session) -> tuple[int, int]:
        """Return (number of sweeps that have ended, pack_id of the one under way or 0)."""
        [row] = session.all(self._adapter.sql.sweep_state)
        return row

    def going(self, session: Session, pack_id: int, oids: Iterable[int]) -> list[int]:
        """Return some of the objects that the sweep of a pack removes, or has removed.

        LookupError: that is unknown, because the list in the database is not the one of that sweep.
        """
        parameters = self._adapter.oid_list(oids), pack_id
        going = [oid for oid, in session.all(self._adapter.sql.going, parameters)]
        if -1 in going:
            raise LookupError(pack_id)
        return going

    def swept(self, session: Session, number: int, limit: int) -> list[int] | None:
        """Return the oids that a sweep removed. None: that is forgotten, or there are more than `limit`."""
        row = session.one(self._adapter.sql.swept_count, (number,))
        if row is None or row[0] > limit:
            return None
        oids = [oid for oid, in session.all(self._adapter.sql.swept, (number, -1, limit))]
        return oids if len(oids) == row[0] else None
