"""Packs: what a pack records about itself, for later packs and for votes during its sweep."""
from __future__ import annotations

from dataclasses import dataclass

from relstore.adapters.base import Adapter
from relstore.errors import Unavailable
from relstore.sessions.session import Session

# Progress of a pack that has written its list: for a time in the past, or for the present.
PREPARED, PREPARED_NOW = 'prepared', 'prepared now'
# Of one whose sweep has begun and not ended.
SWEEPING = 'sweeping'


@dataclass(frozen=True)
class Pack:
    """What the database knows about the last pack."""
    pack_id: int
    pack_tid: int           # what was current after it stays
    marked_tid: int         # the newest transaction at the time of the search for garbage
    gc: bool
    progress: str           # marking, PREPARED or PREPARED_NOW, SWEEPING, swept
    token: str              # relstore_meta has that of the pack last prepared, or swept, in this very database
    objects: int            # how many will go


class Packs:
    """The packs recorded in a database, by number, and the sweep of the last: relstore_pack, relstore_sweep.

    session: has the lock of packs.
    """

    def __init__(self, adapter: Adapter, session: Session):
        self._adapter, self._session, self._sql = adapter, session, adapter.sql

    def last(self) -> Pack | None:
        """Return the last pack that has completed its list."""
        row = self._session.one(self._sql.last_pack)
        return None if row is None else Pack(*row)

    def new(self, pack_tid: int, marked_tid: int, gc: bool, token: str) -> int:
        """Begin a pack, and return its pack_id."""
        with self._adapter.writing(self._session):
            [[pack_id]] = self._session.all(self._sql.next_pack)
            self._session.run(self._sql.new_pack, (pack_id, pack_tid, marked_tid, gc, token))
        return pack_id

    def end_marking(self, pack_id: int, token: str, objects: int, progress: str = PREPARED) -> None:
        """Record that the list of a pack is complete. token, progress: see Pack."""
        with self._adapter.writing(self._session):
            self._session.run(self._sql.set_meta, ('prepared', token))
            self._session.run(self._sql.pack_prepared, (progress, objects, pack_id))

    def start_sweep(self, pack: Pack, now: int = 0) -> None:
        """Let every vote from now on see that this pack is being swept. Runs in the transaction of lock_votes.

        now: as a tid. From then on votes record which objects of the list they link: see marks.py.
        Unavailable if the list is gone, because that of a copy of the database has replaced it.
        """
        run = self._session.run
        if pack.progress != SWEEPING:
            run(self._sql.forget_sweep)
        run(self._sql.start_sweep, (pack.pack_id, pack.pack_tid))
        if self._session.one(self._sql.has_list, (pack.pack_id, pack.token)) is None:
            raise Unavailable(f'Another list has taken the place of the one that this pack of {self._adapter} has '
                              'written down; nothing was removed.')
        run(self._sql.pack_sweeping, (pack.pack_id,))
        if pack.gc and pack.progress != SWEEPING and not self._adapter.keep_history:
            run(self._sql.set_meta, ('looked', str(now)))
        run(self._sql.set_meta, ('sweeping', pack.token))
        self._adapter.conflict_with_commits(self._session)

    def end_sweep(self, pack: Pack) -> None:
        """Record the end, in the transaction of lock_votes. Unavailable if it has ended: by another node, perhaps."""
        run = self._session.run
        if not run(self._sql.end_sweep, (pack.pack_id,)):
            raise Unavailable(f'The sweep of this pack of {self._adapter} was ended by somebody else, on another node '
                              'of a cluster perhaps.')
        run(self._sql.forget_numbers)
        run(self._sql.pack_swept, (pack.pack_id,))
        number, _ = self._adapter.sweeps.state(self._session)
        [[removed]] = self._session.all(self._sql.swept_count, (number,))
        if not (pack.gc and removed):
            run(self._sql.stay_whole, (str(number), str(number - 1)))
