"""Revisions: reads all revisions of a database, with their references."""
from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from relstore.database import Database
from relstore.packing.graph import Graph
from relstore.packing.report import Progress, Report
from relstore.references import is_wrapped, might_refer, references
from relstore.sessions.session import Row, Session

# References saved at a time.
ROWS = 2500
# How often a waiting session uses its connection, to keep it alive.
KEEPALIVE_SECONDS = 10.0
# Unreadable records named in a report.
NAMED = 20

Found = list[tuple[int, int, bytes]]    # (oid, tid, references)


class Revisions:
    """One pass over the revisions of a database. report: gets what could not be read."""

    def __init__(self, database: Database, report: Report, progress: Progress):
        self._database, self._adapter = database, database.adapter
        self._report, self._progress = report, progress
        self.guessed: set[int] = set()      # oids of records that could not be read

    def graph(self, with_references: bool, keeper: Session | None = None) -> tuple[Graph, int]:
        """Return the graph of one snapshot, and the snapshot's tid.

        keeper: the session that saves references computed from records. It has the lock of packs, so it is used now
        and then: neither the server nor the network may take it for idle.
        """
        graph, adapter = Graph(), self._adapter
        # Pooled sessions may have died with the server.
        with closing(adapter.connect()) as reader, ThreadPoolExecutor(1) as executor:
            tid = adapter.begin_snapshot(reader)
            about = adapter.estimated_count(reader)
            found: Found = []
            saving, asked = executor.submit(self._save, keeper, []), time.monotonic()
            for page in adapter.revisions(reader, with_references):
                if with_references:
                    page = self.complete(page, reader, found)
                else:
                    page = [(oid, revision_tid, b'', deleted) for oid, revision_tid, _, _, deleted in page]
                graph.add(page)
                self._progress('reading', len(graph), max(about, len(graph)))
                if len(found) >= ROWS:
                    saving.result()
                    saving = executor.submit(self._save, keeper, found)     # while the next page is read
                    found = []
                if keeper is not None and time.monotonic() > asked + KEEPALIVE_SECONDS:
                    executor.submit(adapter.sweeps.state, keeper)
                    asked = time.monotonic()
            saving.result()
            self._save(keeper, found)
        return graph, tid

    def complete(self, page: list[Row], session: Session, found: Found | None = None) -> list[Row]:
        """Return revisions with all their references; add to `found` those that had to be computed."""
        if all(row[2] is not None for row in page):
            return page
        rows, untransform = [], self._database.untransform
        for row in page:
            oid, tid, refs, state, deleted = row
            if refs is None and not deleted:
                if state is None:
                    [state] = self._adapter.load_serial(session, oid, tid) or [None]
                refs = _references(state, untransform)
                if refs is None:        # not saved: that would mislead those who can read the record, now or later
                    refs = self._guessed(oid, tid, state)
                elif found is not None:
                    found.append((oid, tid, refs))
            rows.append((oid, tid, refs or b'', deleted))
        return rows

    def _guessed(self, oid: int, tid: int, state: bytes) -> bytes:
        """Return all that an unreadable record may refer to, and report it."""
        record = self._database.plain(state)
        self._report.unreadable += 1
        self.guessed.add(oid)
        self._report.wrapped += is_wrapped(record)
        if len(self._report.examples) < NAMED:
            self._report.examples.append((oid, tid))
        return might_refer(record)

    def _save(self, keeper: Session | None, found: Found) -> None:
        self._report.unread += len(found)
        if found and keeper is not None:
            self._adapter.save_references(keeper, found)


def _references(state: bytes, untransform: Callable[[bytes], bytes]) -> bytes | None:
    """Return what a record refers to, or None if it cannot be read."""
    try:
        return references(untransform(state))
    except Exception:       # whatever a wrapper raises for a record that it did not wrap
        return references(state)
