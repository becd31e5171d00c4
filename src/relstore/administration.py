"""Administration: what is done to a storage as a whole, and what can be asked about it."""
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
    _view: View
    _blobs: Blobs

    if TYPE_CHECKING:
        def release(self) -> None: ...

    def __len__(self) -> int:
        """Return how many objects there are: exact for a few thousand, else about."""
        return self._database.pool.attempt(self._count)

    def _count(self, session: Session) -> int:
        [[count]] = session.all(self._database.adapter.sql.count_up_to, (COUNTED,))
        return count if count < COUNTED else max(count, self._database.adapter.estimated_count(session))

    def getSize(self) -> int:
        return self._database.pool.attempt(self._database.adapter.size)

    def cache_stats(self) -> dict[str, int]:
        """Return counts since the storage was opened, by this process; about, where threads count at once.

        hits, misses: of loads in the cache. objects, bytes: in it now. evictions. log: objects of which is known that
        they changed. ahead_fetched, ahead_used: objects fetched before anybody asked, and of those the ones that
        were then asked for. shared_hits, shared_misses: objects looked for in memcached. polls_sent: questions to
        the database what changed; polls_saved: those that an answer was there for.
        """
        return self._database.cache_stats()

    def commit_stats(self) -> dict[str, int | float]:
        """Return counts since the storage was opened, by this process, and what was waited for, in seconds.

        commits. conflicts_resolved, conflicts_failed: of objects. deadlocks: transactions that the database ended.
        lock_timeouts: transactions that were given up, because a lock was not free within `commit-lock-timeout`;
        waited_in_vain: what they waited. waited_objects: for locks of objects; waited_commit: for the one lock of all
        that commit; waited_everybody: for who keeps all others out, a large transaction or a pack. longest_wait: the
        longest of all.
        """
        return self._database.conflicts.stats()

    def conflicts(self) -> list[ObjectConflicts]:
        """Return the objects over which transactions conflicted, or waited for each other, most conflicts first.

        A thousand at most, as this process saw it since the storage was opened. See ObjectConflicts.
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

        Return what was removed; None where ZODB calls, with a referencesf, and expects that.

        As with RelStorage pack_time may also be an int that is a tid, which its size tells: then what was so after that
        transaction. A number that is neither is refused, with a ConfigurationError.
        gc: False forbids to collect garbage. True does not allow what pack-gc forbids, for storages around this one say
        so whatever they are told. dry_run: remove nothing, and report what would go. prepack_only: look for it, and
        write it down. skip_prepack: remove what was written down. Where they are not given, the options say. progress:
        is told what is being done, how much of it is done, and of how much or None.

        Unavailable if somebody else is packing. referencesf is not used: no class is loaded.
        """
        options = self._database.options
        if not dry_run:
            self._check_writable()
        report = Packer(self._database, progress, gc is not False).run(
            pack_time, dry_run=options.pack_dry_run if dry_run is None else dry_run,
            prepack_only=options.pack_prepack_only if prepack_only is None else prepack_only,
            skip_prepack=options.pack_skip_prepack if skip_prepack is None else skip_prepack)
        self._blobs.end_view()      # an instance without a view has none that ends
        return report if referencesf is None else None

    def zap_all(self) -> None:
        """Remove everything: all objects, their history, and the record of oids.

        Other processes that have the database open cannot commit what they read before; but what they read while
        something else is copied into it may be a mixture of both. Stop them first. Unavailable if somebody packs it.
        """
        self._check_writable()
        self.release()
        self._database.zap_all()
        self._view.lose()

    def _check_writable(self) -> None:
        if self._database.options.read_only:
            raise ReadOnlyError()
