"""Administration: sizes, statistics, packing and emptying of a whole storage."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from ZODB.POSException import ReadOnlyError

from relstore.conflicts import ObjectConflicts
from relstore.database import Database
from relstore.packing.pack import Packer
from relstore.packing.report import Progress, Report
from relstore.sessions.session import Session
from relstore.view import View

if TYPE_CHECKING:
    from relstore.blobs.base import Blobs

# Up to so many objects are counted one by one.
COUNTED = 5000


class Administration:
    """A part of RelStore, whose attributes it uses."""
    _database: Database
    view: View
    _blobs: Blobs

    if TYPE_CHECKING:
        def release(self) -> None: ...

    def __len__(self) -> int:
        """Return how many objects there are: exactly up to a few thousand, else an estimate."""
        return self._database.pool.attempt(self._count)

    def _count(self, session: Session) -> int:
        [[count]] = session.all(self._database.adapter.sql.count_up_to, (COUNTED,))
        return count if count < COUNTED else max(count, self._database.adapter.estimated_count(session))

    def getSize(self) -> int:
        return self._database.pool.attempt(self._database.adapter.size)

    def cache_stats(self) -> dict[str, int]:
        """Return counts of this process since it opened the storage. Threads do not lock for them: a few may be lost.

        hits, misses: loads that the cache did or did not answer. objects, bytes: in the cache now. evictions. log:
        objects that are known to have changed lately. ahead_fetched, ahead_used: objects that were fetched before they
        were asked for, and those of them that were asked for later. shared_hits, shared_misses: objects looked for in
        memcached. polls_sent: how often the database was asked what changed; polls_saved: how often the answer was
        known already.
        """
        return self._database.cache_stats()

    def commit_stats(self) -> dict[str, int | float]:
        """Return counts of this process since it opened the storage, and how long it waited for locks, in seconds.

        commits. conflicts_resolved, conflicts_failed: one for each object. deadlocks: transactions that the database
        ended. lock_timeouts: transactions that failed because a lock was not free within `commit-lock-timeout`;
        waited_in_vain: how long they waited. waited_objects: for objects; waited_commit: for the commit lock;
        waited_everybody: for a large transaction or a pack, which keeps all others out. longest_wait.
        """
        return self._database.conflicts.stats()

    def conflicts(self) -> list[ObjectConflicts]:
        """Return the objects over which transactions conflicted or waited for each other, most conflicts first.

        At most a thousand, as seen by this process since it opened the storage. See ObjectConflicts.
        """
        return self._database.conflicts.objects()

    @overload
    def pack(self, pack_time: float | None, referencesf: Callable[..., Any], gc: bool | None = None) -> None: ...

    @overload
    def pack(self, pack_time: float | None, referencesf: None = None, gc: bool | None = None, *,
             dry_run: bool | None = None, prepack_only: bool | None = None, skip_prepack: bool | None = None,
             progress: Progress = ...) -> Report: ...

    def pack(
        self, pack_time: float | None, referencesf: Callable[..., Any] | None = None, gc: bool | None = None, *,
        dry_run: bool | None = None, prepack_only: bool | None = None, skip_prepack: bool | None = None,
        progress: Progress = lambda what, done, total: None
    ) -> Report | None:
        """Remove what was outdated or unreachable at `pack_time`, in seconds since 1970 (None: now); see pack.py.

        Return what was removed; None if a referencesf is given, as ZODB does, which expects None.

        pack_time: as with RelStorage it may also be an int that is a tid, which its size tells: the state after that
        transaction counts. A number that is neither is a ConfigurationError.
        gc: False means that no garbage is collected. True does not override pack-gc false, because some wrappers pass
        it whatever they are told. dry_run: remove nothing, report what would go. prepack_only: only find it and write
        it down. skip_prepack: only remove what was written down. The options are the defaults of these three. progress:
        is called with what is being done, how much of it is done, and the total or None.

        Unavailable: somebody else is packing. referencesf is not used, so no class is loaded.
        """
        options = self._database.options
        if not dry_run:
            self._check_writable()
        report = Packer(self._database, progress, gc is not False).run(
            pack_time, dry_run=options.pack_dry_run if dry_run is None else dry_run,
            prepack_only=options.pack_prepack_only if prepack_only is None else prepack_only,
            skip_prepack=options.pack_skip_prepack if skip_prepack is None else skip_prepack)
        self._blobs.end_view()      # an instance without a view does this nowhere else
        return report if referencesf is None else None

    def zap_all(self) -> None:
        """Remove everything: all objects, their history, and the counter of oids.

        Other processes that have the database open cannot commit anything that is based on what they read before. But
        what they read while something else is copied into the database may be a mixture: stop them first. Unavailable:
        somebody is packing.
        """
        self._check_writable()
        self.release()
        self._database.zap_all()
        self.view.lose()

    def _check_writable(self) -> None:
        if self._database.options.read_only:
            raise ReadOnlyError()
