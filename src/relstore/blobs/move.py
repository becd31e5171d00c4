"""Move: the data of all blobs from one place to another, while the site goes on.

What is there is copied, then in rounds what was committed meanwhile, and in the end the rest, while nobody can vote: in
that moment the database says that its blobs are elsewhere. What could interleave:

* A transaction has stored a blob at the old place and voted. It is waited for, and copied before the switch.
* One votes afterwards, in a process that still has the old place. A switch counts as a sweep that has removed nothing,
  and each vote tells how many there were: where that is another number than before, the process looks where blobs are
  (BlobsAtAPlace.say_where). So do polls.
* A reader has a view of before. What it sees is still at the old place: nothing is removed there until somebody says
  so. What is committed later is not there, and then it looks, too.
* A pack removes revisions. It is kept out, and RelStorage with it: it writes where it was told at its start.
* Without history a revision is replaced while it is copied. Then it is gone, or the next round replaces the copy.
* This process is killed. What was copied is whole; the next run goes on with the rest.

The source is compared with what is recorded of it, and the copy with that. What is damaged is not copied, and then
nothing is switched: to lose sight of it would be worse than to stay.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

from ZODB.POSException import POSKeyError

from relstore.adapters.base import PAGE, Adapter
from relstore.adapters.chunks import Record, measured
from relstore.blobs.base import KEY, MOVED
from relstore.blobs.places import Place, Revision
from relstore.errors import ConfigurationError, StorageError
from relstore.sessions.session import Session

# Rounds in which what was committed meanwhile is copied, and how many blobs the last of them may have found.
ROUNDS, FEW = 10, 10
# Seconds to wait for the commits under way.
PATIENCE_SECONDS = 60.0


class Move:
    """One move. tell: is told how far it is, see Progress.

    copied, bytes: now. there: revisions that an earlier run has copied. damaged: what is not what was committed.
    """

    def __init__(self, adapter: Adapter, source: Place, target: Place, tell: Callable[[str, int, int | None], None]):
        self._adapter, self._source, self._target, self._tell = adapter, source, target, tell
        self.copied = self.bytes = self.there = 0
        self.damaged: list[Revision] = []

    def run(self) -> bool:
        """Return whether the blobs are at the new place now; not where some are damaged."""
        adapter = self._adapter
        if adapter.may_lag:
            raise ConfigurationError(f'{adapter} takes writes on several servers: its blobs cannot be moved while it '
                                     'does.')
        with closing(adapter.connect()) as alone, closing(adapter.connect()) as session:
            adapter.pack_lock.keep_packs_out(alone, 'move its blobs afterwards')
            self._refuse(session)
            self._target.begin(session)
            with _transaction(adapter, session):
                session.run(adapter.sql.set_meta, (KEY, self._source.name))
                session.run(adapter.sql.set_meta, (MOVED, 'true'))
            since = adapter.last_tid(session)
            for page in self._source.pages(session):
                self._copy_all(session, page)
            for _ in range(ROUNDS):
                newest = adapter.last_tid(session)
                found = self._copy_since(session, since)
                since = newest
                if found <= FEW:
                    break
            return not self.damaged and self._switch(session, since)

    def _refuse(self, session: Session) -> None:
        adapter = self._adapter
        if not adapter.writes_alone(session):
            raise ConfigurationError(f'RelStorage may write to {adapter}, and would keep storing blobs at the old '
                                     'place: if none of its processes does any more, say so with "relstore writers".')
        if adapter.sweeps.state(session)[1]:
            raise ConfigurationError(f'A pack of {adapter} was interrupted while it removed what it had found; let one '
                                     'come to its end first.')

    def _switch(self, session: Session, since: int) -> bool:
        adapter = self._adapter
        adapter.writers.lock_votes(session, PATIENCE_SECONDS)
        try:
            self._copy_since(session, since)
            if self.damaged:
                return False
            number, _ = adapter.sweeps.state(session)
            session.run(adapter.sql.set_meta, (KEY, self._target.name))
            session.run(adapter.sql.stay_whole, (str(number + 1), str(number)))
            session.run(adapter.sql.count_sweep)
            session.run(adapter.sql.commit)
            return True
        finally:
            session.rollback()

    def _copy_since(self, session: Session, tid: int) -> int:
        """Copy what was committed after a transaction; return how many blobs there were."""
        oid, count = 2 ** 63 - 1, 0
        while page := self._adapter.changes(session, tid, oid, PAGE):
            revisions = self._source.those(session, [(row[0], row[1]) for row in page])
            self._copy_all(session, revisions)
            count += len(revisions)
            oid, tid = page[-1][:2]
        return count

    def _copy_all(self, session: Session, revisions: list[Revision]) -> None:
        for oid, tid in revisions:
            try:
                self._copy(session, oid, tid)
            except _Damaged:
                self.damaged.append((oid, tid))
            self._tell('moving blobs', self.copied + self.there, None)

    def _copy(self, session: Session, oid: int, tid: int) -> None:
        source, target = self._source, self._target
        data = source.data(session, oid, tid)
        if data is None:
            return          # without history it was replaced just now
        size = source.size(session, oid, tid) if data.record is None else data.record.size
        if target.size(session, oid, tid) == size:
            self.there += 1
            return
        try:
            with _transaction(self._adapter, session) if target.is_transactional else nullcontext():
                passing = _Passing(data.pieces)
                if not target.put(session, oid, tid, passing):
                    return
                if data.record is not None and data.record != passing.record:
                    target.drop(session, oid, tid)
                    raise _Damaged
                copy = target.data(session, oid, tid)
                if copy is None or measured(copy.pieces) != passing.record:
                    target.drop(session, oid, tid)
                    raise StorageError(f'The blob {oid:#x} of the transaction {tid:#x} was copied to {target.told}, '
                                       'and is another one there.')
                if data.record is None:
                    self._adapter.chunks.add_record(session, oid, tid, passing.record)
        except POSKeyError:
            if source.data(session, oid, tid) is not None:
                raise _Damaged from None        # a piece of it is missing
            return
        self.copied += 1
        self.bytes += passing.record.size


def drop_old(adapter: Adapter, old: Place, now: Place, tell: Callable[[str, int, int | None], None]) -> tuple[int, int]:
    """Remove from the place where blobs were what is where they are now. Return (how many went, how many stay)."""
    gone = stay = 0
    with closing(adapter.connect()) as session:
        if adapter.meta(session).get(KEY, now.name) != now.name or old.name == now.name:
            raise ConfigurationError(f'{adapter} has its blobs in {old.told}.')
        old.begin(session)
        for page in old.pages(session):
            for oid, tid in page:
                size = now.size(session, oid, tid)
                if size is not None and size == old.size(session, oid, tid):
                    old.drop(session, oid, tid)
                    gone += 1
                else:
                    stay += 1
                tell('removing blobs', gone, None)
    return gone, stay


class _Damaged(Exception):
    """What is copied is not what was committed."""


class _Passing:
    """The pieces of data, and what they are together, once they have passed."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._digest, self._size = pieces, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._digest.update(piece)
            self._size += len(piece)
            yield piece

    @property
    def record(self) -> Record:
        return Record(self._size, self._digest.digest())


@contextmanager
def _transaction(adapter: Adapter, session: Session) -> Iterator[None]:
    """A transaction, unless there is one: then its end is somebody else's business."""
    if session.in_transaction:
        yield
        return
    with adapter.writing(session):
        if session.in_transaction:      # SQLite's has begun and ended
            yield
            return
        session.script(adapter.sql.begin)
        try:
            yield
            session.run(adapter.sql.commit)
        finally:
            session.rollback()
