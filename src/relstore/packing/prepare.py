"""Prepare: finds out, from one snapshot of the database, what may go, and writes it down."""
from __future__ import annotations

import heapq
import logging
import secrets
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice

from relstore.adapters.base import PREPARED, PREPARED_NOW, Pack
from relstore.database import Database
from relstore.errors import ConfigurationError, changed_garbage
from relstore.packing.garbage import LATER, OBJECT, OLDER, ROWS, SPARED, Doomed, forget_lists, pages
from relstore.packing.graph import Graph
from relstore.packing.packtime import tid_of
from relstore.packing.reading import Revisions
from relstore.packing.report import Progress, Report
from relstore.sessions.session import Row, Session

log = logging.getLogger('relstore.pack')

# Unreadable records that an error names.
EXAMPLES = 5


class Preparation:
    """One look for what may go.

    report: of what is found; its `gc` says whether to look for garbage.
    lost: nobody knows what an interrupted sweep has removed. Then garbage that was changed since may refer to that, so
    it may not stay: it could be linked.
    """

    def __init__(self, database: Database, report: Report, progress: Progress, lost: bool = False):
        self._adapter, self._report, self._progress = database.adapter, report, progress
        self._revisions = Revisions(database, report, progress)
        self._lost = lost
        self.doomed: Doomed | None = None       # as it was written down

    def list(self, pack_time: float | None, present: bool) -> None:
        """Have the report list what may go. Nothing is written. pack_time, present: as for `write_down`."""
        rows = self._look(None, pack_time, present)
        with self._report.timed('listing'):
            self._list(rows)

    def write_down(self, session: Session, pack_time: float | None, present: bool) -> Pack:
        """Write down what may go.

        session: has the lock of packs. pack_time: see tid_of. present: whether that is now, or is None.
        """
        rows = self._look(session, pack_time, present)
        with self._report.timed('listing'):
            return self._write_down(session, rows, present)

    def _look(self, session: Session | None, pack_time: float | None, present: bool
              ) -> Iterator[tuple[int, int, int, int]]:
        """Return rows for the list, see `_garbage`."""
        report = self._report
        with report.timed('reading'):
            marked_at = tid_of(time.time())
            graph, report.marked_tid = self._revisions.graph(report.gc, session)
            report.pack_tid = report.marked_tid
            if pack_time is not None and (self._adapter.keep_history or not present):
                report.pack_tid = min(report.pack_tid, tid_of(pack_time))
        with report.timed('marking'):
            self._progress('marking', 0, None)
            graph.finish(report.pack_tid)
            report.revisions = len(graph)
            return self._garbage(graph, present, marked_at, tid_of(pack_time or 0))

    def _garbage(self, graph: Graph, present: bool, marked_at: int, upto: int) -> Iterator[tuple[int, int, int, int]]:
        """Return rows for the list, by oid: (oid, tid, since, what goes).

        upto: the tid of the pack time, which may be later than any transaction.
        """
        pack_tid = self._report.pack_tid
        if self._report.gc:
            self._mark(graph, pack_tid)
        # The row with the highest tid always stays where there are no others: it says what the newest transaction is.
        last = pack_tid if self._adapter.keep_history else min(pack_tid, self._report.marked_tid - 1)
        gone = (place for place in graph.deleted() if graph.current[place] <= last)
        if not self._report.gc:
            unreached: Iterable[int] = ()
        elif self._adapter.keep_history or present:
            unreached = graph.unreached()
        else:
            return self._garbage_without_history(graph, gone, marked_at, upto)
        return _in_order(graph, gone, unreached, marked_at)

    def _mark(self, graph: Graph, pack_tid: int) -> None:
        self._refuse_wrapped()
        root = graph.place_of(0)
        if root is None or not graph.current[root]:
            if not len(graph):
                return
            raise ConfigurationError(f'{self._adapter} has no root object (oid 0), so all would be garbage; pack it '
                                     'with pack-gc false.')
        graph.reach([root])
        if self._adapter.keep_history:
            graph.reach(graph.changed_after(pack_tid))
        else:
            newest = array('q', graph.changed_after(self._report.marked_tid - 1))
            if self._lost and not all(graph.marks[place] for place in newest):
                raise changed_garbage(self._adapter)
            graph.reach(newest)

    def _refuse_wrapped(self) -> None:
        """What only unknown records refer to would be garbage: where they are encrypted, that is nearly everything."""
        report = self._report
        if report.wrapped:
            examples = ', '.join(f'{oid:#x}' for oid, _ in report.examples[:EXAMPLES])
            raise ConfigurationError(
                f'{report.wrapped:,} records of {self._adapter} cannot be read, are no pickles and name nothing (of '
                f'those that cannot be read the first: {examples}), so what they refer to is not known. If a storage '
                'around this one has wrapped them (encrypted, say), pack with a configuration that has it; else with '
                'pack-gc false.')

    def _garbage_without_history(self, graph: Graph, gone: Iterable[int], marked_at: int, upto: int
                                 ) -> Iterator[tuple[int, int, int, int]]:
        """Nobody knows when an object was unlinked, so it goes when an earlier pack has seen it so.

        What stays keeps what it refers to, for it might be linked again.
        """
        places = array('q', graph.unreached())
        known = self._known_garbage()
        since = array('q', (known(graph.oid_of(place)) for place in places))
        graph.reach(place for place, first in zip(places, since, strict=True)
                    if not first or first > upto or graph.current[place] > upto)
        last = -1
        for place, goes, first in heapq.merge(
                ((place, -OBJECT, marked_at) for place in gone),
                ((place, -LATER if graph.marks[place] else -OBJECT, first)
                 for place, first in zip(places, since, strict=True))):
            if place != last:       # that it goes comes first
                yield graph.oid_of(place), graph.current[place], first, -goes
            last = place

    def _known_garbage(self) -> Callable[[int], int]:
        """Return a function from an oid to when it was first found unreachable; 0: now."""
        oids, since = array('q'), array('q')
        with closing(self._adapter.connect()) as session:
            taken, looked = set(self._adapter.taken_marks(session)), self._adapter.looked(session)
            for page in pages(self._adapter, session, self._adapter.last_marked(session)):
                rows = [row for row in page if row[3] != SPARED and row[0] not in taken]
                oids.extend(row[0] for row in rows)
                since.extend(row[2] or looked for row in rows)

        def known(oid: int) -> int:
            place = bisect_left(oids, oid)
            return since[place] if place < len(oids) and oids[place] == oid else 0
        return known

    def _list(self, rows: Iterator[Row]) -> None:
        oids, tids, goes = self._report.listed = [array('q'), array('q'), array('b')]
        while some := list(islice(rows, ROWS)):
            self._report.count(some)
            oids.extend(row[0] for row in some)
            tids.extend(row[1] for row in some)
            goes.extend(row[3] for row in some)

    def _write_down(self, session: Session, rows: Iterator[Row], present: bool) -> Pack:
        adapter, report, token = self._adapter, self._report, secrets.token_hex(8)
        generation = adapter.new_pack(session, report.pack_tid, report.marked_tid, report.gc, token)
        self.doomed, written = Doomed(), 0
        while some := list(islice(rows, ROWS)):
            self._report.count(some)
            self.doomed.add(some)
            adapter.add_garbage(session, [(generation, *row) for row in some])
            time.sleep(adapter.pause)
            written += len(some)
            self._progress('listing', written, None)
        progress = PREPARED_NOW if present else PREPARED
        adapter.end_marking(session, generation, token, report.objects, progress)
        forget_lists(adapter, session, generation)
        log.info('Objects that may go: %d; that lose older revisions: %d; that may go later: %d.', report.objects,
                 report.older, report.later)
        return Pack(generation, report.pack_tid, report.marked_tid, report.gc, progress, token, report.objects)


def _in_order(graph: Graph, gone: Iterable[int], unreached: Iterable[int], marked_at: int
              ) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows for the list: objects that go, and of those that stay what is older."""
    last = -1
    for place, goes in heapq.merge(((place, -OBJECT) for place in unreached), ((place, -OBJECT) for place in gone),
                                   ((place, -OLDER) for place in graph.older)):
        if place != last:       # that an object goes comes first
            tid = graph.current[place] if goes == -OBJECT else graph.newest[place]
            yield graph.oid_of(place), tid, marked_at, -goes
        last = place
