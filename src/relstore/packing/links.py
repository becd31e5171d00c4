"""Links: checks that no pack removes, or has removed, what a transaction newly refers to; pack.py says why.

The check runs between vote and finish. A reference that any of the changed objects already has is not new, even if it
moves from one to another, as when a bucket splits: if it leads nowhere, it did so before.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice

from ZODB.POSException import ConflictError
from ZODB.utils import p64

from relstore.adapters.base import MAX_TID
from relstore.adapters.commits.base import Verdict
from relstore.caching.epochs import Origin
from relstore.database import Database
from relstore.errors import ConfigurationError, StorageError
from relstore.packing.reading import Revisions
from relstore.packing.report import Report
from relstore.references import might_refer, unpack
from relstore.sessions.session import Session
from relstore.spool import Pending, Spool

# Links looked up at a time: any database's smallest message has room for three times as many.
LOOKED_UP = 10_000
# Objects whose references are read at a time.
READ = 1000
# Missing objects that an instance remembers having refused a link to.
REMEMBERED = 1000


class Links:
    """The links of one transaction.

    session: has voted. spool: or a list of rows with their states, of several transactions.
    origin: what the transaction was based on. refused: missing objects that this instance of the storage has refused a
    link to before.
    """

    def __init__(self, database: Database, session: Session, spool: Spool | list[Pending], origin: Origin,
                 refused: set[int]):
        self._database, self._adapter, self._session = database, database.adapter, session
        self._spool, self._origin, self._refused = spool, origin, refused

    @cached_property
    def _revisions(self) -> Revisions:
        return Revisions(self._database, Report(), lambda what, done, total: None)

    def look(self, verdict: Verdict, copied: bool) -> None:
        """Refuse new links to what a pack removes, or has removed or others have deleted since the connection began.

        Nor may what is being removed be changed. copied: with its tid; then it may refer to what comes later.
        """
        epochs, origin, sweeping = self._database.epochs, self._origin, verdict.sweeping
        swept: Sequence[Sequence[int]] | None = []      # sorted lists; None: unknown
        if not copied:
            if verdict.sweeps != (known := epochs.sweeps_of(origin.began)):
                swept = epochs.swept(known, verdict.sweeps)
            if sweeping or origin.since < verdict.deleted or (
                    self._refused and not self._refused.isdisjoint(self.linked)):
                swept = None
        if sweeping:
            self._refuse_what_goes(sweeping)
        if sweeping or swept != []:
            self._refuse_what_is_gone(verdict, swept)

    def _refuse_what_is_gone(self, verdict: Verdict, swept: Sequence[Sequence[int]] | None) -> None:
        missing = self.linked - self.changed
        error = partial(self._not_there, verdict)
        if swept is None:
            self._look_up(missing, self._those_missing, error)
        else:
            self._look_up(missing, lambda oids: [oid for oid in oids if _is_in_any(swept, oid)], error)

    def _refuse_what_goes(self, sweeping: int) -> None:
        try:
            self._look_up(self.linked | self.changed, partial(self._adapter.sweeps.going, self._session, sweeping),
                          self._goes)
        except LookupError:
            self._refuse_all_that_is_new()

    def _refuse_all_that_is_new(self) -> None:
        """Refuse links to anything but new objects, because what goes is unknown: an old one may refer to it.

        Nor may a link move: its old place may be garbage. Garbage may be changed: the pack that ends this removes it.
        """
        new = {row.oid for row in self._spool if not row.base and not row.restored}
        before = {oid: set(refs) for oid, refs in self._references_now()}
        for oid, refs in self._references():
            for target in refs:
                if target not in new and target != oid and target not in before.get(oid, ()):
                    raise ConfigurationError(
                        f'A pack of {self._adapter} was interrupted while it removed what it had found, and another '
                        f'list has taken the place of its own, so nobody knows whether the object {target:#x} may be '
                        'linked: run a pack to the present with pack-gc true.')

    def look_since(self, at: int, oids: set[int]) -> None:
        """Refuse to delete objects that were linked after a tid."""
        position = at, MAX_TID
        while rows := self._adapter.changes(self._session, *position, READ):
            position = rows[-1][1], rows[-1][0]
            for linking, _, refs, *_ in self._revisions.complete(rows, self._session):
                for oid in oids.intersection(unpack(refs or b'')):
                    if linking not in oids:
                        self._database.conflicts.conflict(oid, '', resolved=False)
                        raise ConflictError(f'The object {oid:#x}, which this transaction deletes, was linked '
                                            f'meanwhile, by the object {linking:#x}', oid=p64(oid))

    def _look_up(self, oids: set[int], gone: Callable[[set[int]], list[int]],
                 error: Callable[[int], Exception]) -> None:
        """Raise an error if one of these objects is gone. gone: returns some of those that are."""
        left = iter(oids)
        while some := set(islice(left, LOOKED_UP)):
            if found := gone(some):
                found = [oid for oid in found if oid not in self._kept] or gone(some - self._kept)
            if found:
                raise error(found[0])

    def _those_missing(self, oids: Iterable[int]) -> list[int]:
        """Return some of the objects that do not exist, or are deleted."""
        parameters = (self._adapter.oid_list(oids),)
        return [oid for oid, in self._session.all(self._adapter.sql.missing, parameters)]

    def _goes(self, oid: int) -> Exception:
        self._database.conflicts.conflict(oid, '', resolved=False)
        return ConflictError(f'The object {oid:#x}, which this transaction changes or refers to, was not referred to '
                             'by anything, and is removed by a pack', oid=p64(oid))

    def _not_there(self, verdict: Verdict, oid: int) -> Exception:
        """Return a ConflictError if a newer view may differ: it usually does not find what was removed since.

        A StorageError if even this view did not find the object, or if this instance has refused the link before: a
        retry with a newer view would fail again, but _may_have_seen may not show that.
        """
        message = (f'The object {oid:#x}, to which this transaction adds a reference, is not there: a pack has removed '
                   'it, or it was deleted, or it was missing before')
        refused_before = oid in self._refused
        if len(self._refused) >= REMEMBERED:
            self._refused.clear()
        self._refused.add(oid)
        if refused_before or not self._may_have_seen(oid, verdict):
            return StorageError(f'{message}.')
        self._database.conflicts.conflict(oid, '', resolved=False)
        return ConflictError(message, oid=p64(oid))

    def _may_have_seen(self, oid: int, verdict: Verdict) -> bool:
        """Whether the view may have shown an object that is not there now, so that a newer view helps.

        RelStorage leaves no trace of what it removes; during a sweep a deletion does not either.
        """
        at, epochs = self._origin.at, self._database.epochs
        if at is None or at < verdict.deleted or verdict.sweeping or self._adapter.may_lag:
            return True
        swept = epochs.swept(epochs.sweeps_of(self._origin.generation), verdict.sweeps)
        if swept is None or _is_in_any(swept, oid) or not self._adapter.writes_alone(self._session):
            return True
        if not self._adapter.keep_history:
            return False
        before = self._adapter.load_before(self._session, oid, at + 1)
        return before is not None and before[0] is not None     # its creation was undone since

    @cached_property
    def changed(self) -> set[int]:
        return {row.oid for row in self._spool}

    @cached_property
    def linked(self) -> set[int]:
        return set().union(*(refs for _, refs in self._references()))

    @cached_property
    def _kept(self) -> set[int]:
        """What the changed objects already refer to, without these objects themselves."""
        return set().union(*(refs for _, refs in self._references_now())) - self.changed

    def _references(self) -> Iterator[tuple[int, Collection[int]]]:
        """Yield (oid, what it will refer to) of each changed object."""
        for row in self._spool:
            whole = row if row.start < 0 else self._spool[row.oid]
            yield row.oid, self._references_of(whole)

    def _references_of(self, row: Pending) -> Collection[int]:
        return unpack(might_refer(self._database.plain(row.held)) if row.refs is None else row.refs)

    def _references_now(self) -> Iterator[tuple[int, Collection[int]]]:
        """Yield (oid, what it refers to now) of each changed object that exists."""
        return self.current(row.oid for row in self._spool if row.base or row.restored)

    def current(self, oids: Iterable[int]) -> Iterator[tuple[int, Collection[int]]]:
        """Yield (oid, what it refers to) of each of these objects that exists."""
        left = iter(oids)
        while some := list(islice(left, READ)):
            rows = self._session.all(self._adapter.sql.current_revisions, (self._adapter.oid_list(some),))
            for oid, _, refs, *_ in self._revisions.complete(rows, self._session):
                yield oid, unpack(refs or b'')


def _is_in_any(lists: Iterable[Sequence[int]], oid: int) -> bool:
    """Whether an object is in one of these sorted lists of oids."""
    return any(_is_in(oids, oid) for oids in lists)


def _is_in(oids: Sequence[int], oid: int) -> bool:
    place = bisect_left(oids, oid)
    return place < len(oids) and oids[place] == oid
