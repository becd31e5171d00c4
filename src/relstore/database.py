"""Database: what all instances of one storage share."""
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial
from typing import overload

from relstore.adapters.addresses import Address
from relstore.adapters.base import MAX_TID
from relstore.adapters.migrations import refuse_another_version
from relstore.blobs.base import Blobs
from relstore.blobs.home import blobs_of
from relstore.caching import proof
from relstore.caching.cache import Cache
from relstore.caching.commits import CommitCounter
from relstore.caching.epochs import Epochs
from relstore.caching.memcached import Memcached, split_servers
from relstore.caching.polling import Answer, Polling
from relstore.caching.proof import Finding
from relstore.caching.readahead import Counts
from relstore.caching.shared import Tier
from relstore.caching.warmstart import WarmStart
from relstore.conflicts import Conflicts
from relstore.errors import ConfigurationError, DatabaseError, OutcomeUnknown, StorageError
from relstore.finishing import Finishing
from relstore.generations import Generations
from relstore.marks import Marks
from relstore.oids import OidAllocator
from relstore.options import Options
from relstore.sessions.pool import SessionPool
from relstore.sessions.session import Session
from relstore.whole import Wholeness, say_whole

log = logging.getLogger('relstore')

# Without history, a vote checks by so many objects that what was read is still there.
PROBES = 5


class Database:
    """An open database: adapter, session pool, cache and oids. Made once, thread-safe.

    `epochs` tells which of what was read here is still good.
    """

    def __init__(self, address: Address, options: Options):
        self.options = options
        self.cache = Cache(options.cache_local_mb << 20, options.cache_local_object_max,
                           keep_bases=not options.keep_history)
        self.ahead = Counts()
        self.conflicts = Conflicts()
        self.memcached: Memcached | None = None
        self.tier: Tier | None = None           # what processes that share a memcached have loaded
        self.counter: CommitCounter | None = None       # of the commits of these processes
        # How a wrapper around this storage changes (compresses, say) a record: see IStorageWrapper.
        # Between records and pickles; bytes() returns what it is given.
        self.transform: Callable[[bytes], bytes] = bytes
        self.untransform: Callable[[bytes], bytes] = bytes
        self.epochs = Epochs(remembered=options.poll_limit)
        self._forked = False        # in a child process that has not used it yet
        with ExitStack() as begun:  # closed if anything fails
            if options.cache_servers:
                self.memcached = Memcached(split_servers(options.cache_servers), options.cache_module_name)
                begun.callback(self.memcached.close)
                # There is no use in a log that goes back further than a poll.
                limit = min(10_000, options.poll_limit // 4)
                self.tier = Tier(self.memcached, options.cache_prefix, self.cache, limit)
            self.adapter = adapter = address.open(options)
            self.pool = SessionPool(adapter.connect, options.pool_size, options.pool_timeout)
            begun.callback(self.pool.close)
            self.oids = OidAllocator(partial(self.pool.attempt, adapter.new_oids), options.pool_timeout)
            self.marks = None if adapter.keep_history or options.read_only else Marks(adapter)
            self.finishing = Finishing(adapter)
            self.whole = Wholeness(adapter)
            self.blobs: Blobs = blobs_of(options, adapter, self.cache, self.plain)
            begun.callback(self.blobs.close)
            with self.pool.session() as session:
                self._learn(session)
            begun.pop_all()
        if self.warm is not None:
            self.warm.start()
        _databases.add(self)

    def _learn(self, session: Session) -> None:
        """Learn what the database is, and start with what was saved of its cache."""
        adapter = self.adapter
        meta = adapter.meta(session)
        refuse_another_version(adapter, meta)       # later changes of it show: the session knows the current epoch
        self.name = meta['database']        # the same in every process
        self.blobs.begin(session, meta)
        if self.memcached is not None:
            self.counter = CommitCounter(self.memcached, self.options.cache_prefix, self.name)
        self.polling = Polling(self.counter, self._poll_interval())
        self._generations = Generations(
            self.name, adapter, self.cache, self.epochs, self.polling, self.tier,
            [self.oids, self.blobs, *([] if self.marks is None else [self.marks])], self.blobs.look_again)
        self.warm = self._saved_cache()
        sweeps, _ = adapter.sweeps.state(session)
        last = cache(partial(adapter.last_tid, session))        # asked after the file is read: others may renew it
        since = last()
        if self.warm:
            lasting = self._generations.lasting(session.epoch, sweeps)
            since = self.warm.head(lasting, last, partial(proof.is_proven, adapter, session))
        self._generations.begin(session, session.epoch, sweeps, since=since, last=last())
        if self.cache.head < last():
            self.poll(session)
        if self.marks is not None:
            self.marks.learn(session, sweeps)

    def _poll_interval(self) -> float:
        if self.options.poll_interval and self.adapter.may_lag:
            log.warning('poll-interval has no effect in a cluster: what was committed on one node another may show '
                        'later, so every transaction asks.')
            return 0
        return self.options.poll_interval

    def _saved_cache(self) -> WarmStart | None:
        options = self.options
        if not options.cache_local_dir or not options.cache_local_mb:
            return None
        largest = options.cache_local_dir_write_max_size
        this = weakref.ref(self)        # the thread must not keep alive a database that was dropped without close()

        def epoch_of(generation: int) -> str:
            database = this()
            return '' if database is None else database._generations.lasting_of(generation)

        def proves(known: proof.Known) -> bool:
            database = this()
            return database is not None and database.pool.attempt(
                lambda session: proof.is_proven(database.adapter, session, known))

        warm = WarmStart(options.cache_local_dir, self.name, self.cache, epoch_of, proves,
                         options.cache_local_mb << 20 if largest is None else largest)
        weakref.finalize(self, warm.stop)
        return warm

    def known(self) -> Answer:
        """Return where a view may stand without asking the database."""
        generation = self.cache.generation      # read before head: see Cache
        return self.cache.head, generation

    def shared_poll(self) -> Answer:
        """Bring the cache up to date, together with other threads that want the same at this moment."""
        at, generation = self.polling.by_turns(partial(self.pool.attempt, self.poll))
        if generation == self.cache.generation:
            at = max(at, self.cache.head)       # others may have polled later; their answer serves us as well
        return at, generation

    def poll(self, session: Session, lost: bool = False) -> Answer:
        """Bring the cache up to date; return (the newest tid, the generation it belongs to).

        lost: it is known already that the database went back. If the adapter reads_in_snapshot, the session holds a
        snapshot of exactly that state afterwards.
        """
        if self._forked:
            self._begin_in_child(session)
        generation = self.cache.generation      # read before head: see Cache
        since = self.cache.head
        own = self.epochs.own_since(since)
        self.polling.sent += 1
        try:
            epoch, last, sweeps, stands, changes = self.adapter.poll(session, since, self.options.poll_limit)
        except (ConfigurationError, DatabaseError):
            self.refuse_another_version(session)
            raise
        own = _missing(own, changes) if own else own
        if epoch == self.epochs.now and (stands < since or own or lost):
            found = (Finding.LOST if lost else
                     self._finding(session, generation, sweeps, since, last, stands, changes, own))
            lost = found is not Finding.HOLDS
            tell = found is Finding.LOST
        else:
            tell = epoch != self.epochs.now and self.adapter.is_learnt_late(self.epochs.now, epoch)
        if tell and self._end_epoch(session, generation, epoch):
            epoch, last, sweeps, stands, changes = self.adapter.poll(session, since, self.options.poll_limit)
        if epoch != self.epochs.now or lost:
            refuse_another_version(self.adapter, self.adapter.meta(session))
            with self._generations.lock:
                if generation != self.cache.generation:
                    return last, generation     # a late answer, from an epoch that has ended meanwhile
                log.warning('The database is not what it was: restarted, failed over, restored or emptied, or another '
                            'has its name now. It stands at tid %#x, and everything cached is dropped.', last)
                self._begin_anew(session, epoch, sweeps, last)
                return last, self.cache.generation
        if self.marks is not None and sweeps > self.marks.known.number:
            self.marks.learn(session, sweeps)
        if sweeps > self.epochs.sweeps_of(generation):
            generation = self._generations.drop_swept(session, generation, sweeps, self.options.poll_limit)
        if len(changes) > self.options.poll_limit:
            self.cache.jump(last, generation)
        else:
            self.cache.advance(since, last, changes, generation)
        with self._generations.lock:
            self.epochs.told(last)
        if self.tier is not None:
            self.tier.look()
        return last, generation

    def _finding(self, session: Session, generation: int, sweeps: int, since: int, last: int, stands: int,
                 changes: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> Finding:
        """Examine an answer that lacks something this process knew. session: the one that got the answer.

        own: what is missing of this process's own commits.
        """
        if last < max([since, *(tid for _, tid in own)]):
            # If this node may lag, or a sweep may have removed the last transaction, others are not disturbed.
            certain = not self.adapter.may_lag and sweeps == self.epochs.sweeps_of(generation)
            return Finding.LOST if certain else Finding.PERHAPS_LOST
        if self.adapter.may_lag or len(changes) > self.options.poll_limit:
            return Finding.HOLDS        # with so many changes the cache drops everything anyway
        if own:
            return proof.finding_of(self.adapter, session, dict(own))
        *_, newest = self.cache.newest_changes(self.cache.log_limit, stands)
        known = proof.Known(since, 0, [*self.epochs.early, *newest])
        return proof.finding(self.adapter, session, known, stands, {oid for oid, _ in changes})

    def _end_epoch(self, session: Session, generation: int, epoch: str) -> bool:
        """Make all other processes learn that the database went back: some could not see it any more later."""
        if self.options.read_only or self.adapter.may_lag or generation != self.cache.generation:
            return False
        try:
            self.adapter.end_epoch(session, epoch)
        except StorageError as e:
            log.warning('The other processes could not be told that the database went back: %s', e)
            if session.broken:
                raise
        return True

    def refuse_another_version(self, session: Session) -> None:
        """ConfigurationError: a newer relstore has changed the tables. Called after errors too, to find the cause."""
        if not session.broken:
            session.rollback()
            with suppress(DatabaseError):       # if this cannot be read either, the first error says more
                refuse_another_version(self.adapter, self.adapter.meta(session))

    def changed_last(self, size: int = PROBES) -> Sequence[tuple[int, int]]:
        """Return (oid, tid) of the objects that changed last. None of them can be older than that in the database."""
        return self.cache.newest_changes(size)[2] or self.epochs.early[:size]

    def committed(self, tid: int, oids: Iterable[int]) -> None:
        """Remember some objects of a commit of this process: the next poll must report them."""
        with self._generations.lock:
            self.epochs.committed(tid, oids)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Tell the other processes of a commit, before and after it happens.

        If nobody knows whether it happened, or when it will, they are not told that it is over.
        """
        token = False if self.counter is None else self.counter.begun()
        over = True
        try:
            yield
        except BaseException as e:
            over = isinstance(e, Exception) and not isinstance(e, OutcomeUnknown)
            raise
        finally:
            self.polling.forget()
            if self.counter is not None and over:
                self.counter.done(token)

    def _begin_anew(self, session: Session, epoch: str, sweeps: int, last: int) -> None:
        self.pool.retire()      # each session knows the epoch in which it began
        if self.warm is not None:
            self.warm.discard()
        self._generations.begin(session, epoch, sweeps, last)
        if self.counter is not None:
            self.counter.done(False)    # counts as a commit that was not announced, so that the others poll

    def zap_all(self) -> None:
        with closing(self.adapter.connect()) as alone, self.pool.session() as session, self.announced():
            self.adapter.pack_lock.keep_packs_out(alone, 'empty it afterwards')
            self.refuse_another_version(session)
            self.adapter.zap_all(session)
            say_whole(self.adapter, session)
            epoch = self.adapter.epoch(session)
            sweeps, _ = self.adapter.sweeps.state(session)
            self.blobs.emptied(session)
            with self._generations.lock:
                self._begin_anew(session, epoch, sweeps, 0)

    @overload
    def plain(self, state: bytes) -> bytes: ...

    @overload
    def plain(self, state: None) -> None: ...

    def plain(self, state: bytes | None) -> bytes | None:
        """Return a record as it was before a wrapper changed it; as it is if none did."""
        try:
            return self.untransform(state) if state else state
        except Exception:       # whatever a wrapper raises for a record that it did not wrap
            return state

    @property
    def is_wrapped(self) -> bool:
        """Whether a wrapper around this storage may change records."""
        return self.untransform is not bytes

    def cache_stats(self) -> dict[str, int]:
        return self.cache.stats() | {
            'ahead_fetched': self.ahead.fetched,
            'ahead_used': self.ahead.used,
            'shared_hits': self.tier.hits if self.tier else 0,
            'shared_misses': self.tier.misses if self.tier else 0,
            'polls_sent': self.polling.sent,
            'polls_saved': self.polling.saved,
        }

    def close(self) -> None:
        if self.warm is not None:
            self.warm.close()       # first, because it asks the database about what others have saved
        self.pool.close()
        self.blobs.close()
        self.conflicts.close()
        self.finishing.close()
        if self.counter is not None:
            self.counter.close()
        if self.memcached is not None:
            self.memcached.close()

    def _after_fork(self) -> None:
        for part in (self._generations, self.pool, self.finishing, self.oids, self.cache, self.conflicts, self.polling,
                     self.memcached, self.counter, self.warm):
            if part is not None:
                part.after_fork()
        self._forked = True

    def _begin_in_child(self, session: Session) -> None:
        """Begin as a new process does. At the first poll, so that a child that never uses the storage does nothing."""
        with self._generations.lock:
            if self._forked:
                head, sweeps = self.cache.head, self.epochs.sweeps_of(self.cache.generation)
                if self.warm is None or not self.warm.is_open:
                    self._generations.begin(session, self.epochs.now, sweeps, head, head)
                else:
                    # If the file is newer, another process has saved it, and it serves as well.
                    proves = partial(proof.is_proven, self.adapter, session)
                    saved = self.warm.head(self._generations.lasting(self.epochs.now, sweeps), lambda: MAX_TID, proves)
                    self._generations.begin(session, self.epochs.now, sweeps, head, min(head, saved))
                    self.warm.start()
                self._forked = False


def _missing(own: Iterable[tuple[int, int]], changes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of `own` (oid, tid) that are missing from a complete list of changes."""
    found = dict(changes)
    return [(oid, tid) for oid, tid in own if found.get(oid, -1) < tid]


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
# For servers that open the storage and then fork.


def _now_in_child() -> None:
    for database in list(_databases):
        database._after_fork()


os.register_at_fork(after_in_child=_now_in_child)
