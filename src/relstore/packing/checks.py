"""Survey: answers an operator's questions about a database. No stored object is changed.

Which references lead nowhere, which objects refer to one, what a pack would remove by class. It also computes unknown
references ahead of a pack, and compares all known ones with the records.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from ZODB.utils import p64

from relstore.adapters.base import MAX_TID
from relstore.adapters.numbers import SMALL_STATE_BYTES
from relstore.database import Database
from relstore.errors import ConfigurationError
from relstore.packing.garbage import OBJECT, OLDER
from relstore.packing.graph import Graph
from relstore.packing.reading import Revisions
from relstore.packing.report import Progress, Report
from relstore.references import class_name, references, unpack
from relstore.sessions.session import Row, Session

# Records read at a time: most have at most 20,000 bytes, the others are read one by one.
ROWS = 500
# Objects in a range, which one process looks at.
RANGE = 5000
# Examples named of anything.
EXAMPLES = 5
# Differences and unreadable records reported per range.
TOLD = 100


@dataclass(frozen=True)
class Dangling:
    """A reference that leads nowhere."""
    oid: int                # the referring object
    target: int
    deleted: bool           # the target existed once; otherwise there is no trace of it
    path: Callable[[], list[int]]       # the oids from the root to `oid`


@dataclass(frozen=True)
class Referrer:
    oid: int
    tid: int
    class_name: str         # '' if unknown


@dataclass
class ClassSize:
    """What a pack would remove of one class."""
    objects: int = 0        # removed as a whole
    states: int = 0
    bytes: int = 0
    examples: list[int] = field(default_factory=list)


@dataclass
class Found:
    """What was found in some revisions."""
    revisions: int = 0
    saved: int = 0                      # revisions whose references were computed and saved
    unreadable: int = 0
    differences: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.revisions += other.revisions
        self.saved += other.saved
        self.unreadable += other.unreadable
        self.differences += other.differences


class Survey:
    """One look at one database."""

    def __init__(self, database: Database, progress: Progress = lambda what, done, total: None):
        self._database, self._adapter, self._progress = database, database.adapter, progress
        self.report = Report()
        self._revisions = Revisions(database, self.report, progress)

    def dangling(self) -> Iterator[Dangling]:
        """Yield the dangling references of reachable objects, nearest to the root first.

        Not those of records that cannot be read, which are guessed.
        """
        graph, _ = self._revisions.graph(with_references=True)
        self.report.revisions = len(graph)
        self._progress('looking', 0, None)
        graph.finish(MAX_TID, keep_nowhere=True)
        root = graph.place_of(0)
        if root is None or not graph.current[root]:
            raise ConfigurationError(f'{self._adapter} has no root object (oid 0), so nothing in it can be reached.')
        guessed = self._revisions.guessed
        for place, target in graph.dangling(root):
            if graph.oid_of(place) in guessed:
                continue        # it may have been the guess
            there = graph.place_of(target)
            yield Dangling(graph.oid_of(place), target, there is not None and graph.current[there] > 0,
                           partial(_path, graph, place))

    def referrers(self, oid: int) -> Iterator[Referrer]:
        """Yield the objects whose current state refers to one."""
        wanted, done = p64(oid), 0
        with closing(self._adapter.connect()) as session:       # not pooled: the caller may take hours
            at = self._adapter.begin_snapshot(session)
            about = self._adapter.estimated_count(session)
            for page in self._adapter.revisions(session, True):
                rows = [row[:2] for row in self._revisions.complete(page, session)
                        if wanted in row[2] and oid in unpack(row[2])]
                for some in _lists(rows, ROWS):
                    names = self._classes(session, [row[0] for row in some], at)
                    for referrer, tid in some:
                        if names.get(referrer, ('', 0))[1] == tid:
                            yield Referrer(referrer, tid, names[referrer][0])
                done += len(page)
                self._progress('reading', done, max(about, done))

    def classes(self, oids: Sequence[int]) -> dict[int, str]:
        """Return the class names of objects, by oid."""
        with self._database.pool.session() as session:
            found: dict[int, str] = {}
            for some in _lists(oids, ROWS):
                found |= {oid: name for oid, (name, _) in self._classes(session, some, MAX_TID).items()}
            return found

    def _classes(self, session: Session, oids: Sequence[int], at: int) -> dict[int, tuple[str, int]]:
        """Return (class name, tid) of objects, by oid, as a view at a tid sees them."""
        found = self._adapter.load_many(session, oids, at, SMALL_STATE_BYTES)
        rows = {oid: (state, tid) for oid, state, tid, _ in found}
        for oid in oids:
            if oid not in rows:
                large = self._adapter.load_at(session, oid, at)
                if large is not None:
                    rows[oid] = large[:2]
        return {oid: (class_name(self._database.plain(state)), tid) for oid, (state, tid) in rows.items()}

    def sizes(self, report: Report) -> dict[str, ClassSize]:
        """Return what a pack would remove, by class, from the report of a dry run; and let that tell of blobs."""
        sizes: dict[str, ClassSize] = {}
        listed = ((oid, tid - (goes == OLDER), goes) for oid, tid, goes in zip(*report.listed, strict=True)
                  if goes in (OBJECT, OLDER))
        done, total = 0, report.objects + report.older
        with self._database.pool.session() as session:
            for some in _lists(listed, ROWS):
                revisions = self._adapter.revision_list([(oid, tid) for oid, tid, _ in some])
                [[blobs, size_of_blobs]] = session.all(self._adapter.sql.garbage_blobs, (revisions,))
                report.blobs += blobs
                report.blob_bytes += size_of_blobs
                whole = {oid for oid, _, goes in some if goes == OBJECT}
                # tid and state are those of the newest that would go; the state is None if it is large.
                for oid, states, size, tid, state in session.all(
                        self._adapter.sql.garbage_sizes, (revisions,)):
                    if state is None:
                        [state] = self._adapter.load_serial(session, oid, tid) or [None]
                    of_class = sizes.setdefault(class_name(self._database.plain(state)), ClassSize())
                    of_class.objects += oid in whole
                    of_class.states += states
                    of_class.bytes += size or 0
                    if len(of_class.examples) < EXAMPLES:
                        of_class.examples.append(oid)
                done += len(some)
                self._progress('weighing', done, total)
        return sizes

    # The references of all revisions, range by range ----------------------------------------------------------------

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of oids, (after, up to), that together contain all objects."""
        after = -1
        while True:
            with self._database.pool.session() as session:
                [[upto]] = session.all(self._adapter.sql.objects_end, (after, RANGE))
            if upto is None:
                return
            yield after, upto
            after = upto

    def fill(self, after: int, upto: int) -> Found:
        """Compute and save the unknown references of the objects in a range."""
        found = Found()
        for session, page in self._all(found, self._adapter.sql.unknown_references, after, upto):
            rows = [(oid, tid, refs) for oid, tid, state in page
                    if (refs := self._references_of(session, found, oid, tid, state)) is not None]
            if rows:
                self._adapter.save_references(session, rows)
            found.saved += len(rows)
        return found

    def compare(self, after: int, upto: int) -> Found:
        """Compare the known references of the objects in a range with their records."""
        found = Found()
        for session, page in self._all(found, self._adapter.sql.known_references, after, upto):
            for oid, tid, stored, kept, state in page:
                refs = self._references_of(session, found, oid, tid, state)
                if refs is not None:
                    self._compare(found, oid, tid, {'refs': stored, 'relstore_refs': kept}, refs)
        return found

    def _compare(self, found: Found, oid: int, tid: int, known: dict[str, bytes | None], refs: bytes) -> None:
        for where, said in known.items():
            if said is not None and (len(said) % 8 or set(unpack(said)) != set(unpack(refs))):
                self._tell(found, oid, tid, f'{where} has {_oids(said)}, and the record refers to {_oids(refs)}')
                found.differences += 1

    def _all(self, found: Found, sql: str, after: int, upto: int) -> Iterator[tuple[Session, list[Row]]]:
        """Yield all pages of a range, each with the session that reads them; count their revisions."""
        page = [(after, MAX_TID)]
        with self._database.pool.session() as session:
            while page := session.all(sql, (*self._after(*page[-1][:2]), upto, ROWS)):
                found.revisions += len(page)
                yield session, page

    def _after(self, oid: int, tid: int) -> tuple[int, ...]:
        return (oid, tid) if self._adapter.keep_history else (oid,)

    def _references_of(self, session: Session, found: Found, oid: int, tid: int, state: bytes | None) -> bytes | None:
        """Return what a record refers to. None: it cannot be read, or was just changed or packed.

        A guess at its references is not saved: that would mislead those who can read the record.
        """
        if state is None:
            [state] = self._adapter.load_serial(session, oid, tid) or [None]
        record = self._database.plain(state)
        if record is None:
            return None
        refs = references(record)
        if refs is None:
            self._tell(found, oid, tid, 'cannot be read')
            found.unreadable += 1
        return refs

    def _tell(self, found: Found, oid: int, tid: int, what: str) -> None:
        if len(found.told) < TOLD:
            found.told.append(f'{oid:#x} (tid {tid:#x}): {what}.')


def _path(graph: Graph, place: int) -> list[int]:
    return [graph.oid_of(step) for step in graph.path_to(place)]


def _lists(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    values = iter(values)
    while some := list(islice(values, size)):
        yield some


def _oids(refs: bytes) -> str:
    if len(refs) % 8:
        return f'{len(refs)} bytes'
    oids = sorted(unpack(refs))
    return (', '.join(f'{oid:#x}' for oid in oids[:EXAMPLES]) + (f' and {len(oids) - EXAMPLES} more'
            if len(oids) > EXAMPLES else '')) or 'nothing'
