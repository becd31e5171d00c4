"""Whole: a database from which no garbage was ever removed. Only there may transactions be added with a given tid.

What is garbage in a copy, a later transaction of the source may link again. A copy may come through a storage around
this one (HexStorage, zlibstorage), from another process, or from any caller of tpc_begin(tid=...) and restore, with
years in between. So each vote with a given tid checks by itself. `whole` in relstore_meta is the number of the last
sweep after which the database was still whole. What could interleave:

* A pack ends between two transactions of a copy, or before the first: the vote reports that more sweeps have ended than
  this process knows of, and checks whether `whole` has kept up. It has if they removed no garbage.
* A pack is sweeping when the transaction votes: what it links or changes may not be on the list; see links.py. The next
  transaction meets the first case, or this one again.
* A pack is about to begin or end its sweep: it does neither between a vote and its finish.
* Another instance or process has copied a part: the database is whole or not, whoever copied.
* The database was empty when a copy began: then it is known to be whole, even if `whole` does not say so, as long as
  this process goes on and no sweep ends. If it is emptied in the middle, the copy begins again; other processes cannot
  finish what they had begun.

The packs of RelStorage leave no trace: if RelStorage may write, only an empty database counts as whole. Nor are the
deletions of an external collector noticed. Its transaction has a current tid, and no older one can follow; a copy that
goes on with newer ones may link what was deleted.
"""
from relstore.adapters.base import Adapter
from relstore.errors import StorageError
from relstore.sessions.session import Session


class Wholeness:
    """What a process knows of whether its database is whole."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._known = '', -1        # the epoch and the number of sweeps when it was last known to be whole, or empty

    def look(self, session: Session, epoch: str, sweeps: int) -> None:
        """Refuse to add to a database that is not whole, within a vote that has succeeded. sweeps: see Verdict."""
        if (epoch, sweeps) != self._known:
            if self._adapter.meta(session).get('whole') != str(sweeps) and self._adapter.last_tid(session):
                raise not_whole(self._adapter)
            self._known = epoch, sweeps


def is_whole(adapter: Adapter, session: Session) -> bool:
    """Whether no garbage was ever removed, as far as known."""
    number, sweeping = adapter.sweeps.state(session)
    return not sweeping and adapter.meta(session).get('whole') == str(number)


def say_whole(adapter: Adapter, session: Session) -> None:
    """Record that an empty database is whole; not if RelStorage may write, whose packs would go unnoticed."""
    number, sweeping = adapter.sweeps.state(session)
    if not sweeping and adapter.writes_alone(session):
        session.run(adapter.sql.set_meta, ('whole', str(number)))


def not_whole(adapter: Adapter) -> StorageError:
    return StorageError(
        f'{adapter} was packed with garbage collection, or may have been, and what that has removed a later '
        'transaction of the source may refer to; copy into an empty database (zap_all empties this one).')
