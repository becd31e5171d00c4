"""View: what one connection sees, the database as of one tid, from one begin() to the next.

There is no view before the first begin(): everything is read as it is now. Nor is there one after a commit, because
others may have committed between the view and that commit: the first load takes a new view, and the next begin()
reports what changed since the old one. If the database cannot be asked when a view is to begin, nothing can be loaded
until the next begin().

With history a read at `at` has the same result whenever it is done, in any session. Elsewhere the view has a session of
its own, whose transaction stands at `at`: see Snapshot.
"""
from collections.abc import Callable, Iterable
from typing import Any

from ZODB.POSException import ReadConflictError
from ZODB.utils import p64

from relstore.adapters.base import MAX_TID
from relstore.caching.bases import ANYWHERE, Standing
from relstore.caching.epochs import Origin
from relstore.caching.polling import Answer
from relstore.caching.readahead import LARGEST_STATE_BYTES, ReadAhead
from relstore.database import Database
from relstore.errors import StorageError, Unavailable
from relstore.sessions.session import Result, Row, Session

# At most so many objects are prefetched by one statement.
PREFETCH = 1000
# At most so many rows wait to be sent to memcached.
SHARED = 100

# (oid, state, tid, references or None): what was loaded of an object.
Loaded = tuple[int, bytes | None, int, bytes | None]


class View:
    """One connection's view. One thread at a time uses it, except for load() before the first begin().

    at: the tid at which it stands; None: there is no view. generation: of the cache, when the view was taken.
    hit: the last state that was found in the cache, if no load has missed since; set by the caller that found it.
    """

    def __init__(self, database: Database):
        self._database, self._adapter = database, database.adapter
        self._pool, self._cache = database.pool, database.cache
        self.at: int | None = None
        self.generation = -1
        self.hit: bytes | None = None
        self._began = self._cache.generation    # when the connection began
        self._since: int | None = None          # where its first view stood; 0 if anything was loaded without a view
        self._told: tuple[int | None, int] = None, -1   # (at, generation) up to which invalidations were reported
        self._own: int | None = None            # tid of the connection's own commit since then
        self._failure: StorageError | None = None       # why the view could not begin
        self.snapshot = Snapshot(database)
        self._standing = Standing()             # where it may stand, for Bases
        self._cache.add_view(self._standing)
        self.ahead = ReadAhead(self._cache, database.ahead, database.plain)
        self.unshared: list[Loaded] = []        # to be sent to memcached: one message a transaction, not one a load

    # Beginning and ending -----------------------------------------------------------------------------------------

    def begin(self, may_fail: bool = True) -> list[int] | None:
        """Move to now. Return the oids that changed since the last view; None if any object may have changed.

        may_fail: whether to raise if the database cannot be asked; otherwise the first load raises.
        """
        if self.unshared:
            self.share()
        self.snapshot.end()
        if not self._adapter.loads_are_cheap:
            self.ahead.wake()
        last, generation = self._told
        self.at = self._failure = None
        try:
            self._take()
        except StorageError as e:
            self._failure = e       # a later view would not match what the connection still has in its cache
            if may_fail:
                raise
            return []
        changed = [] if last is None else self._cache.invalidations(last, self._own, generation)
        self._told, self._own = (self.at, self.generation), None
        return changed

    def _take(self) -> int:
        """Take a view, and return where it stands."""
        snapshot = self.snapshot
        ask = snapshot.poll if self._adapter.reads_in_snapshot else self._database.shared_poll
        self._standing.between = self._cache.head, ANYWHERE
        try:
            self.at, self.generation = self._database.polling.unless_known(ask, self._database.known)
        finally:
            self._standing.between = None if self.at is None else (self.at, self.at)
        snapshot.due = self._adapter.reads_in_snapshot and snapshot.session is None
        if self._since is None:
            self._since = self.at
        return self.at

    def end(self) -> None:
        """End the snapshot, if there is one: between transactions nothing is open in the database."""
        if self.unshared:
            self.share()
        self.snapshot.end()
        self._standing.between = None

    def begin_commit(self) -> Origin:
        """Give the session back, because the vote needs one. Return what the transaction is based on."""
        self.snapshot.end()
        last, generation = self._told
        at = last if self.at is None and generation >= self._database.epochs.first else self.at
        return Origin(self.generation, at, self._began, 0 if at is None else self._since or 0)

    def committed(self, tid: int) -> None:
        """The connection has committed. The view ends, because others may have committed since it began."""
        self.at, self._own = None, tid

    def lose(self) -> None:
        """End the view; the next begin() reports that everything may have changed."""
        self.at, self.generation, self._told = None, -1, (self._told[0], -1)

    # Reading ------------------------------------------------------------------------------------------------------

    def load(self, oid: int) -> Row | None:
        """Return (state, tid, ...) of an object that is not cached; without a view, as it is now.

        ReadConflictError: what the view sees is gone. Unavailable: the view could not begin.
        """
        at = self.at
        if at is None:
            return self._load_without_view(oid)
        hit, self.hit = self.hit, None
        ahead = self.ahead.beside(oid, at, hit)
        if ahead or self._database.tier is not None:
            row = self._load_with(ahead, oid, at)
        else:
            row = self._read(oid, self._adapter.load_at, oid, at)
        if row is None:
            # A snapshot sees nothing newer than the view, so what it does not see never was there.
            if self.snapshot.may_miss and self._read(oid, self._adapter.current_tid, oid) is not None:
                raise ReadConflictError('The revision that this transaction sees is gone', oid=p64(oid))
        elif row[0] is not None:
            self._cache.put(oid, row[1], row[0], at, self.generation)
            if row[2] != b'':
                self.ahead.saw(oid, row[0], row[2])
        return row

    def _load_without_view(self, oid: int) -> Row | None:
        if self._failure is not None:
            raise Unavailable('The database could not be asked when this transaction began: begin another one. '
                              f'{self._failure}')
        if self._told[0] is None:
            self._since = 0
            return self._pool.attempt(self._adapter.load_now, oid)
        at = self._take()
        hit = self._cache.find(oid, at) if self.generation == self._cache.generation else None
        return self.load(oid) if hit is None else (hit.state, hit.tid)

    def _load_with(self, others: list[int], oid: int, at: int) -> Row | None:
        """Load one object, and with it others that are likely to be wanted next: those go into the cache."""
        loaded = self._fetch([oid, *others], 1, at, min(LARGEST_STATE_BYTES, self._cache.object_max))
        self._keep((row for row in loaded if row[0] != oid), at)
        return next((row[1:] for row in loaded if row[0] == oid), None)

    def prefetch(self, oids: Iterable[int]) -> None:
        """Load objects into the cache, with one statement for many."""
        at = self.at
        if at is None or self.generation != self._cache.generation:
            return
        self.ahead.wake()      # what these refer to is likely to be wanted
        wanted = [oid for oid in oids if oid <= MAX_TID and not self._cache.holds(oid, at)]
        for start in range(0, len(wanted), PREFETCH):
            batch = wanted[start:start + PREFETCH]
            try:
                loaded = self._fetch(batch, len(batch), at, self._cache.object_max)
            except ReadConflictError:
                return              # load() will raise it
            self._keep(loaded, at)

    def _keep(self, loaded: Iterable[Loaded], at: int) -> None:
        for oid, state, tid, refs in loaded:
            if state is not None:
                self._cache.put(oid, tid, state, at, self.generation)
                if refs:
                    self.ahead.saw(oid, state, refs)

    def _fetch(self, oids: list[int], wanted: int, at: int, largest: int) -> list[Loaded]:
        """Return the objects that the view sees: the first one whatever its size, others of up to `largest` bytes.

        If memcached has the first `wanted` of them, the database is not asked for the rest.
        """
        tier = self._database.tier
        shared = tier.get(oids, at, self.generation) if tier is not None else {}
        rows: list[Loaded] = [(oid, *row) for oid, row in shared.items()]
        missing = [oid for oid in oids if oid not in shared]
        if shared and shared.keys() >= set(oids[:wanted]):
            return rows
        if len(missing) == 1:
            [oid] = missing
            row = self._read(oid, self._adapter.load_at, oid, at)
            loaded = [] if row is None else [(oid, *row)]
        else:
            loaded = self._read(missing[0], self._adapter.load_many, missing, at, largest)
        if tier is not None:
            self.unshared += loaded
            if len(self.unshared) >= SHARED:
                self.share()
        return rows + loaded

    def share(self) -> None:
        """Send what was loaded since the last time to memcached."""
        tier = self._database.tier
        if tier is not None and self.at is not None:
            tier.put(self.unshared, self.at, self.generation)
        self.unshared = []

    def read(self, oid: int, read: Callable[..., Result], *arguments: Any) -> Result:
        """Do the same as _read; without a view, read what is there now."""
        return self._pool.attempt(read, *arguments) if self.at is None else self._read(oid, read, *arguments)

    def _read(self, oid: int, read: Callable[..., Result], *arguments: Any) -> Result:
        """Return read(session, *arguments), which reads `oid` as of the view.

        ReadConflictError if the view's epoch is over.
        """
        snapshot = self.snapshot
        if snapshot.due:
            snapshot.take_late(self.at)  # type: ignore[arg-type]  # one is due where there is a view
        if snapshot.session is not None:
            result, generation = read(snapshot.session, *arguments), self.generation
        else:
            result, epoch = self._pool.attempt(_with_epoch, read, arguments)
            generation = self.generation if epoch == self._database.epochs.now else -1
        if generation < self._database.epochs.first:
            self._database.polling.forget()     # no commit may have been counted, but the database is another one
            raise ReadConflictError('The database was restarted after a crash, failed over, or restored since this '
                                    'transaction began', oid=p64(oid))
        return result


def _with_epoch(session: Session, read: Callable[..., Result], arguments: tuple[Any, ...]) -> tuple[Result, str | None]:
    return read(session, *arguments), session.epoch


class Snapshot:
    """A session whose transaction stands at the view, if the adapter reads in snapshots.

    session: None if there is none. due: the view began without asking the database, and nothing was read since.
    """

    def __init__(self, database: Database):
        self._database, self._pool = database, database.pool
        self.session: Session | None = None
        self.due = False
        self._late = False          # others had committed when it was taken

    @property
    def may_miss(self) -> bool:
        """May an object be invisible here that was there when the view began?"""
        return self.session is None or self._late

    def poll(self) -> Answer:
        """Take a snapshot, and bring the cache up to date with what it sees; see Database.poll."""
        try:
            return self._poll()
        except Exception:
            dead = self.session is not None and self.session.broken
            self.end()
            if not dead:
                raise
            self._pool.retire()
            try:
                return self._poll()
            except BaseException:
                self.end()
                raise

    def _poll(self) -> Answer:
        self.session = self._pool.borrow()
        return self._database.poll(self.session)

    def take_late(self, at: int) -> None:
        """Take a snapshot for a view that stands at `at` already."""
        last, _ = self.poll()
        self.due, self._late = False, last != at

    def end(self) -> None:
        session, self.session = self.session, None
        self.due = self._late = False
        if session is not None:
            self._pool.give_back(session)
