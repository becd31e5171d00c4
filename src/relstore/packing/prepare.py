"""Prepare: finds what may be removed, from one snapshot of the database, and writes the list."""
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

from relstore.database import Database
from relstore.errors import ConfigurationError, changed_garbage
from relstore.marks import last_marked, looked, taken_marks
from relstore.packing.garbage import LATER, OBJECT, OLDER, ROWS, SPARED, Doomed, GarbageList
from relstore.packing.graph import Graph
from relstore.packing.packs import PREPARED, PREPARED_NOW, Pack, Packs
from relstore.packing.packtime import tid_of
from relstore.packing.reading import Revisions
from relstore.packing.report import Progress, Report
from relstore.sessions.session import Row, Session

log = logging.getLogger('relstore.pack')

# Unreadable records named in an error.
EXAMPLES = 5


class Preparation:
    """One search for what may be removed.

    report: gets what is found; its `gc` says whether to look for garbage.
    lost: it is unknown what an interrupted sweep has removed. Garbage that was changed since may refer to that, so it
    may not stay: it could be linked.
    """

    def __init__(self, database: Database, report: Report, progress: Progress, lost: bool = False):
        self._adapter, self._report, self._progress = database.adapter, report, progress
        self._revisions = Revisions(database, report, progress)
        self._lost = lost
        self.doomed: Doomed | None = None       # the list as written

    def list(self, pack_time: float | None, present: bool) -> None:
        """List in the report what may go, without writing. pack_time, present: as for `write_down`."""
        rows = self._look(None, pack_time, present)
        with self._report.timed('listing'):
            self._list(rows)

    def write_down(self, session: Session, pack_time: float | None, present: bool) -> Pack:
        """Write the list of what may go.

        session: has the lock of packs. pack_time: see tid_of. present: whether pack_time is now, or None.
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
        # Without history the row with the highest tid always stays: it says what the newest transaction is.
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
        """Refuse to take as garbage what only unreadable records refer to: nearly everything if they are encrypted."""
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
        """Return rows for the list. The time an object was unlinked is unknown: it goes if an earlier pack found it so.

        Garbage that stays keeps what it refers to, because it might be linked again.
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
            if place != last:       # going comes first
                yield graph.oid_of(place), graph.current[place], first, -goes
            last = place

    def _known_garbage(self) -> Callable[[int], int]:
        """Return a function from an oid to the tid when it was first found unreachable; 0: only now."""
        oids, since = array('q'), array('q')
        with closing(self._adapter.connect()) as session:
            adapter = self._adapter
            taken, first = set(taken_marks(adapter, session)), looked(adapter, session)
            for page in GarbageList(adapter, session, last_marked(adapter, session)).pages():
                rows = [row for row in page if row[3] != SPARED and row[0] not in taken]
                oids.extend(row[0] for row in rows)
                since.extend(row[2] or first for row in rows)

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
        packs, report, token = Packs(self._adapter, session), self._report, secrets.token_hex(8)
        pack_id = packs.new(report.pack_tid, report.marked_tid, report.gc, token)
        listed = GarbageList(self._adapter, session, pack_id)
        self.doomed, written = Doomed(), 0
        while some := list(islice(rows, ROWS)):
            self._report.count(some)
            self.doomed.add(some)
            listed.add(some)
            time.sleep(self._adapter.pause)
            written += len(some)
            self._progress('listing', written, None)
        progress = PREPARED_NOW if present else PREPARED
        packs.end_marking(pack_id, token, report.objects, progress)
        listed.forget_others()
        log.info('Objects that may go: %d; that lose older revisions: %d; that may go later: %d.', report.objects,
                 report.older, report.later)
        return Pack(pack_id, report.pack_tid, report.marked_tid, report.gc, progress, token, report.objects)


def _in_order(graph: Graph, gone: Iterable[int], unreached: Iterable[int], marked_at: int
              ) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows for the list: objects that go, and objects that stay but lose older revisions."""
    last = -1
    for place, goes in heapq.merge(((place, -OBJECT) for place in unreached), ((place, -OBJECT) for place in gone),
                                   ((place, -OLDER) for place in graph.older)):
        if place != last:       # going comes first
            tid = graph.current[place] if goes == -OBJECT else graph.newest[place]
            yield graph.oid_of(place), tid, marked_at, -goes
        last = place
