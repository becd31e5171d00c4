"""Whole: a database from which nothing was ever removed as garbage. To no other a transaction is added with its tid.

For what is garbage in a copy, a transaction of the source that is still to come may link again. A copy may come through
a storage around this one (HexStorage, zlibstorage), from another process, or from whoever calls tpc_begin(tid=...) and
restore, with years in between. So each vote with a given tid looks, by itself. `whole` in relstore_meta is the number
of the last sweep as of which the database is whole. What could interleave:

* A pack ends between two transactions of a copy, or before the first: the vote tells that more sweeps have ended than
  this process knows of, and looks whether `whole` has kept pace. It has where they have removed no garbage.
* A pack sweeps when the transaction votes: what it links, or changes, may not be on the list; see links.py. The next
  one meets the first case, or this one again.
* A pack is about to begin, or to end: it does neither between a vote and its finish.
* Another instance, or another process, has copied a part: it is the database that is whole, not a copy.
* It was empty when a copy began: so it is known, also where `whole` does not say so, as long as this process goes on
  and no sweep ends. Emptied in the middle, it is a beginning; other processes cannot finish what they have begun then.

It does not see the packs of RelStorage, which leave no trace: where RelStorage may write, only an empty database is
taken for whole. Nor does it see what an outside collector deletes. Its transaction has a tid of now, and no older one
can follow; a copy that goes on with younger ones may link what was deleted.
"""
from relstore.adapters.base import Adapter
from relstore.errors import StorageError
from relstore.sessions.session import Session


class Wholeness:
    """What a process knows of it."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._known = '', -1        # the epoch, and the number of sweeps, with which it was whole, or empty

    def look(self, session: Session, epoch: str, sweeps: int) -> None:
        """Within a vote that has passed: refuse to add to what is not whole. sweeps: see Verdict."""
        if (epoch, sweeps) != self._known:
            if self._adapter.meta(session).get('whole') != str(sweeps) and self._adapter.last_tid(session):
                raise not_whole(self._adapter)
            self._known = epoch, sweeps


def not_whole(adapter: Adapter) -> StorageError:
    return StorageError(
        f'{adapter} was packed with garbage collection, or may have been, and what that has removed a later '
        'transaction of the source may refer to; copy into an empty database (zap_all empties this one).')
