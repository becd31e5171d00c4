"""Packer: removes old revisions and garbage, in two phases that may be far apart.

Prepare looks at one snapshot of the database, and writes down what may go. It changes nothing else. Sweep then removes
that, in short steps. What could interleave, and why nothing that is reachable is lost:

* A commit between the snapshot and the sweep links an object of the list again, or changes it. Before the sweep begins
  it reads what was committed since, and takes off the list what can be reached from there.
* A transaction that has voted finishes after that. The sweep begins in a moment when nobody is between vote and
  finish (adapter.lock_votes), and what was committed up to then is read in that moment.
* A transaction votes later. It sees that a sweep is under way and looks whether it links, or changes, what is on the
  list; if so it is a conflict. Whatever is on the list stays there until the sweep has ended, removed or not: what is
  still there may refer to what is not.
* A transaction began before the sweep ended, and votes afterwards; or its connection did, whose application may hold
  what nothing refers to. A number counts the sweeps; where it was smaller when the connection began, vote looks whether
  what is linked is there (commit.py), and what was cached is dropped (database.py).

So the steps need no lock: nobody else reads or writes the rows that they remove. RelStorage looks at none of this. What
it does during a sweep is read before each step, and where it may write nothing goes that was garbage for a moment only.

Killed at any step, the next run reads what was committed since once more, follows what was let stay, and goes on.
"""
from __future__ import annotations

import heapq
import logging
import secrets
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice

from persistent.TimeStamp import TimeStamp
from ZODB.utils import u64

from relstore.adapters.base import MAX_TID, PREPARED, PREPARED_NOW, Pack
from relstore.database import Database
from relstore.errors import ConfigurationError, Deadlock, LockTimeout, Unavailable
from relstore.graph import Graph
from relstore.references import might_refer, references, unpack
from relstore.session import Session

log = logging.getLogger('relstore.pack')

# A pack time younger than this is the present: without history what is garbage then goes at once.
PRESENT = 10.0
# Seconds after which a session that waits says something.
ALIVE = 10.0
# Rows of the list that are written or read at a time.
ROWS = 2500
# Seconds that a step is to take, and to take where others commit meanwhile.
STEP, SHORT_STEP = 0.1, 0.01
# Seconds after a commit of others for which there may be another one soon.
BUSY = 3.0
SMALLEST_STEP, FIRST_STEP, LARGEST_STEP = 100, 200, 20_000      # objects
# Seconds to wait for those between vote and finish, at first: new votes wait behind us.
DOOR, LONGEST_DOOR = 0.01, 1.0
DOOR_TRIES = 200
# Revisions that are read at a time while nobody can vote, and seconds after which others may again, unless it goes on
# like that.
AT_THE_DOOR, OPEN_AGAIN = 100, 0.05
# Unreadable records that a report names.
NAMED = 20

OBJECT, OLDER, LATER, SPARED = 2, 1, 0, -1     # what goes: see relstore_garbage in schema.sql

# (what is being done, how much of it is done, of how much or None)
Progress = Callable[[str, int, int | None], None]


@dataclass
class Report:
    """What a pack has done, or would do."""
    pack_tid: int = 0
    marked_tid: int = 0
    gc: bool = True
    revisions: int = 0          # looked at
    objects: int = 0            # that go
    older: int = 0              # objects that stay, and of which older revisions go
    later: int = 0              # history-free: unreachable, but not for long enough
    spared: int = 0             # objects that were linked or changed since they were marked
    states: int = 0             # that were removed
    bytes: int = 0              # of these
    transactions: int = 0       # that were removed
    unread: int = 0             # records whose references were not known
    unreadable: int = 0         # those of them that could not be read, and are taken to refer to all they may name
    examples: list[tuple[int, int]] = field(default_factory=list)       # (oid, tid) of some of these
    steps: int = 0
    longest_step: float = 0.0   # seconds
    locked: float = 0.0         # seconds in which nobody could vote, in all
    longest_lock: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)             # by phase
    listed: list[array] = field(default_factory=list, repr=False)   # of a dry run: oids, tids, and what goes of them


class Packer:
    """One pack of one database.

    progress: is told now and then how far it is. gc: False forbids to collect garbage.
    """

    def __init__(self, database: Database, progress: Progress = lambda what, done, total: None, gc: bool = True):
        self._database, self._adapter = database, database.adapter
        self._options = database.options if gc else replace(database.options, pack_gc=False)
        self._progress = progress
        self.report = Report(gc=self._options.pack_gc)
        self._doomed: _Doomed | None = None     # as it was written down
        self._epoch = ''

    def run(self, pack_time: float | None, *, dry_run: bool, prepack_only: bool, skip_prepack: bool) -> Report:
        """Prepare and sweep, or one of the two. pack_time: seconds since 1970; None, or the future: now."""
        if skip_prepack and (dry_run or prepack_only):
            raise ConfigurationError('pack-skip-prepack does not go with pack-dry-run or pack-prepack-only; '
                                     'choose one of them.')
        present = _is_present(pack_time)        # now: to read a large database takes longer than that lasts
        if dry_run:
            self._prepare(None, pack_time, present)
            return self.report
        with closing(self._adapter.connect()) as session:
            holder = self._adapter.lock_pack(session)
            if holder is not None:
                raise Unavailable(f'{self._adapter} is being packed by {holder}.')
            self._epoch = self._adapter.epoch(session)
            unfinished = self._unfinished(
                session, afresh=self._options.pack_gc and not (prepack_only or skip_prepack))
            if unfinished is not None:
                self._end_interrupted(session, unfinished, prepack_only)
            if skip_prepack:
                if unfinished is None:
                    pack = self._prepared(session)
                    self._refuse_what_relstorage_may_harm(session, pack.progress == PREPARED_NOW)
                    self._sweep(session, pack)
                return self.report
            self._refuse_what_relstorage_may_harm(session, present)
            pack = self._prepare(session, pack_time, present)
            if not prepack_only:
                self._sweep(session, pack)
        return self.report

    def _end_interrupted(self, session: Session, pack: Pack, prepack_only: bool) -> None:
        """Go on with a sweep that was interrupted, unless nothing of the kind is to be removed now.

        It cannot be given up: what is left may refer to what is gone, and has to be kept from being linked.
        """
        if prepack_only:
            raise ConfigurationError(f'A pack of {self._adapter} was interrupted while it removed what it had found; '
                                     'let one without pack-prepack-only come to its end first.')
        if pack.gc and not self._options.pack_gc:
            raise ConfigurationError(
                f'A pack of {self._adapter} with garbage collection was interrupted while it removed what it had '
                'found, and pack-gc is false: what is left stays, and cannot be linked. Let one with pack-gc true come '
                'to its end first.')
        log.warning('A pack was interrupted; going on with it.')
        self._sweep(session, pack)
        log.warning('States that it has removed now: %d. Now for this one.', self.report.states)
        self.report, self._doomed = Report(gc=self._options.pack_gc), None

    def _unfinished(self, session: Session, afresh: bool) -> Pack | None:
        """Return the pack whose sweep was interrupted, or None.

        Where a list of a copy of the database has taken the place of its own, only a pack that looks for all garbage
        afresh can find what it has left.
        """
        _, generation = self._adapter.sweep_state(session)
        if not generation:
            return None
        pack = self._adapter.last_pack(session)
        if (pack is not None and pack.generation == generation
                and pack.token == self._adapter.meta(session).get('sweeping')):
            return pack
        if not afresh:
            raise ConfigurationError(
                f'A pack of {self._adapter} was interrupted while it removed what it had found, and another list has '
                'taken the place of its own. Let one with pack-gc true, and without pack-prepack-only and '
                'pack-skip-prepack, come to its end first.')
        log.warning('A pack was interrupted, and its list is gone; looking for garbage afresh.')
        return None

    def _prepared(self, session: Session) -> Pack:
        """Return what was prepared earlier, or refuse it."""
        pack = self._adapter.last_pack(session)
        if pack is None or pack.progress not in (PREPARED, PREPARED_NOW):
            raise ConfigurationError(f'Nothing is prepared in {self._adapter}; run a pre-pack first.')
        if pack.gc != self._options.pack_gc:
            raise ConfigurationError(f'What is prepared in {self._adapter} was prepared with pack-gc '
                                     f'{str(bool(pack.gc)).lower()}; set it so, or prepare again.')
        if (self._adapter.meta(session).get('prepared') != pack.token
                and not self._adapter.has_tid(session, pack.marked_tid)):
            raise ConfigurationError(
                f'What is prepared in {self._adapter} was prepared on another state of it: its newest transaction '
                f'{pack.marked_tid:#x} is not to be found here. Prepare again.')
        return pack

    def _refuse_what_relstorage_may_harm(self, session: Session, present: bool) -> None:
        if self._options.pack_gc and present and not self._adapter.writes_alone(session):
            raise ConfigurationError(
                f'RelStorage processes, or those of an older relstore, may write to {self._adapter}, and a pack to the '
                'present could remove what they are about to link: pack to a time before now (a day, say), or, if none '
                'of them writes any more, say so with "relstore writers".')

    # Prepare ------------------------------------------------------------------------------------------------------

    def _prepare(self, session: Session | None, pack_time: float | None, present: bool) -> Pack | None:
        """Find out what may go, and write it down; without a session only report it."""
        began, report = time.monotonic(), self.report
        marked_at = _tid_of(time.time())
        graph, report.marked_tid = self._read(session)
        report.pack_tid = report.marked_tid
        if pack_time is not None and (self._adapter.keep_history or not present):
            report.pack_tid = min(report.pack_tid, _tid_of(pack_time))
        self._timed('reading', began)

        began = time.monotonic()
        self._progress('marking', 0, None)
        graph.finish(report.pack_tid)
        report.revisions = len(graph)
        rows = self._garbage(graph, present, marked_at, _tid_of(pack_time or 0))
        self._timed('marking', began)

        began = time.monotonic()
        if session is None:
            self._list(rows)
            pack = None
        else:
            pack = self._write_down(session, rows, present)
        self._timed('listing', began)
        return pack

    def _read(self, session: Session | None) -> tuple[Graph, int]:
        """Return the graph of one snapshot, and the tid of that. Keep references that had to be found out."""
        graph, adapter = Graph(), self._adapter
        # What is in the pool may have died with the server.
        with closing(adapter.connect()) as reader, ThreadPoolExecutor(1) as executor:
            tid = adapter.begin_snapshot(reader)
            about = adapter.estimated_count(reader)
            found: list[tuple[int, int, bytes]] = []
            saving, asked = executor.submit(self._save, session, []), time.monotonic()
            for page in adapter.revisions(reader, self._options.pack_gc):
                if self._options.pack_gc:
                    page = self._with_references(page, reader, found)
                else:
                    page = [(oid, revision_tid, b'', deleted) for oid, revision_tid, _, _, deleted in page]
                graph.add(page)
                self._progress('reading', len(graph), max(about, len(graph)))
                if len(found) >= ROWS:
                    saving.result()
                    saving = executor.submit(self._save, session, found)    # while the next ones are read
                    found = []
                if session is not None and time.monotonic() > asked + ALIVE:
                    # It has the lock of packs: neither the server nor the network is to take it for idle.
                    executor.submit(adapter.sweep_state, session)
                    asked = time.monotonic()
            saving.result()
            self._save(session, found)
        return graph, tid

    def _save(self, session: Session | None, found: list[tuple[int, int, bytes]]) -> None:
        self.report.unread += len(found)
        if found and session is not None:
            self._adapter.save_references(session, found)

    def _with_references(
        self, page: list[tuple], session: Session, found: list[tuple[int, int, bytes]]
    ) -> list[tuple]:
        """Return revisions with the references of all; add those that were not known to `found`."""
        if all(row[2] is not None for row in page):
            return page
        rows, untransform = [], self._database.untransform
        for row in page:
            oid, tid, refs, state, deleted = row
            if refs is None and not deleted:
                if state is None:
                    [state] = self._adapter.load_serial(session, oid, tid) or [None]
                try:
                    refs = references(untransform(state))
                except Exception:       # whatever a wrapper raises where it did not wrap
                    refs = references(state)
                if refs is None:
                    refs = self._guess(oid, tid, state)
                found.append((oid, tid, refs))
            rows.append((oid, tid, refs or b'', deleted))
        return rows

    def _guess(self, oid: int, tid: int, state: bytes) -> bytes:
        """Return all that a record which cannot be read may refer to."""
        self.report.unreadable += 1
        if len(self.report.examples) < NAMED:
            self.report.examples.append((oid, tid))
        return might_refer(self._database.plain(state))

    def _garbage(self, graph: Graph, present: bool, marked_at: int, upto: int) -> Iterator[tuple[int, int, int, int]]:
        """Return rows for the list, by oid: (oid, tid, since, what goes).

        upto: the tid of the pack time, which may be later than any transaction.
        """
        pack_tid = self.report.pack_tid
        if self._options.pack_gc:
            self._mark(graph, pack_tid)
        # The row with the highest tid always stays where there are no others: it says what the newest transaction is.
        last = pack_tid if self._adapter.keep_history else min(pack_tid, self.report.marked_tid - 1)
        gone = (place for place in graph.deleted() if graph.current[place] <= last)
        if not self._options.pack_gc:
            unreached: Iterable[int] = ()
        elif self._adapter.keep_history or present:
            unreached = graph.unreached()
        else:
            return self._garbage_without_history(graph, gone, marked_at, upto)
        return _in_order(graph, gone, unreached, marked_at)

    def _mark(self, graph: Graph, pack_tid: int) -> None:
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
            graph.reach(graph.changed_after(self.report.marked_tid - 1))

    def _garbage_without_history(self, graph: Graph, gone: Iterable[int], marked_at: int, upto: int
                                 ) -> Iterator[tuple[int, int, int, int]]:
        """Nobody knows when an object was unlinked, so it goes when an earlier pack has seen it so.

        What stays keeps what it refers to, for it might be linked again.
        """
        places = array('q', graph.unreached())
        known = self._known_garbage()
        since = array('q', (known(graph.oid_of(place), marked_at) for place in places))
        graph.reach(place for place, first in zip(places, since, strict=True)
                    if first > upto or graph.current[place] > upto)
        last = -1
        for place, goes, first in heapq.merge(
                ((place, -OBJECT, marked_at) for place in gone),
                ((place, -LATER if graph.marks[place] else -OBJECT, first)
                 for place, first in zip(places, since, strict=True))):
            if place != last:       # that it goes comes first
                yield graph.oid_of(place), graph.current[place], first, -goes
            last = place

    def _known_garbage(self) -> Callable[[int, int], int]:
        """Return a function from an oid to when it was first found unreachable, or to a default."""
        oids, since = array('q'), array('q')
        with closing(self._adapter.connect()) as session:
            for page in self._pages(session, self._adapter.last_marked(session)):
                rows = [row for row in page if row[3] != SPARED]
                oids.extend(row[0] for row in rows)
                since.extend(row[2] for row in rows)

        def known(oid: int, default: int) -> int:
            place = bisect_left(oids, oid)
            return since[place] if place < len(oids) and oids[place] == oid else default
        return known

    def _pages(self, session: Session, generation: int) -> Iterator[list[tuple]]:
        page = self._adapter.garbage(session, generation, -1, ROWS)
        while page:
            yield page
            page = self._adapter.garbage(session, generation, page[-1][0], ROWS)

    def _count(self, rows: list[tuple]) -> None:
        goes = [row[-1] for row in rows]
        self.report.objects += goes.count(OBJECT)
        self.report.older += goes.count(OLDER)
        self.report.later += goes.count(LATER)

    def _list(self, rows: Iterator[tuple]) -> None:
        oids, tids, goes = self.report.listed = [array('q'), array('q'), array('b')]
        while some := list(islice(rows, ROWS)):
            self._count(some)
            oids.extend(row[0] for row in some)
            tids.extend(row[1] for row in some)
            goes.extend(row[3] for row in some)

    def _write_down(self, session: Session, rows: Iterator[tuple], present: bool) -> Pack:
        adapter, report, token = self._adapter, self.report, secrets.token_hex(8)
        generation = adapter.new_pack(session, report.pack_tid, report.marked_tid, report.gc, token)
        self._doomed, written = _Doomed(), 0
        while some := list(islice(rows, ROWS)):
            self._count(some)
            self._doomed.add(some)
            adapter.add_garbage(session, [(generation, *row) for row in some])
            time.sleep(adapter.pause)
            written += len(some)
            self._progress('listing', written, None)
        progress = PREPARED_NOW if present else PREPARED
        adapter.end_marking(session, generation, token, report.objects, progress)
        # That of the last one that has collected garbage says since when it is.
        keep = generation if report.gc else adapter.last_marked(session)
        while adapter.forget_garbage(session, generation, keep):
            time.sleep(adapter.pause)
        log.info('Objects that may go: %d; that lose older revisions: %d; that may go later: %d.', report.objects,
                 report.older, report.later)
        return Pack(generation, report.pack_tid, report.marked_tid, report.gc, progress, token, report.objects)

    # Sweep --------------------------------------------------------------------------------------------------------

    def _sweep(self, session: Session, pack: Pack) -> None:
        report = self.report
        report.pack_tid, report.marked_tid = pack.pack_tid, pack.marked_tid
        began = time.monotonic()
        doomed = self._doomed or _Doomed()
        if self._doomed is None:        # it was prepared earlier
            for page in self._pages(session, pack.generation):
                self._count(page)
                doomed.add(page)
        self._close_the_door(session, pack, doomed)
        self._timed('catching up', began)

        began = time.monotonic()
        self._remove(session, pack, doomed)
        report.spared = doomed.spared
        if self._adapter.keep_history:
            self._forget_transactions(session, pack)
        self._end(session, pack)
        self._database.saw_sweeps(self._adapter.sweep_state(session)[0])
        self._database.drop_swept(session)
        self._timed('removing', began)

    def _close_the_door(self, session: Session, pack: Pack, doomed: _Doomed) -> None:
        """Take off the list what was linked since, and have each vote from then on look at it."""
        patience = DOOR
        for tries in range(DOOR_TRIES):
            while self._catch_up(session, pack, doomed, ROWS):
                time.sleep(self._adapter.pause)
            began, before = time.monotonic(), doomed.mark()
            try:
                self._adapter.lock_votes(session, patience)
                until = time.monotonic() + OPEN_AGAIN
                while many := self._catch_up(session, pack, doomed, AT_THE_DOOR):
                    if time.monotonic() > until and tries < DOOR_TRIES // 2:
                        break
                if many:
                    session.run('COMMIT')       # what was taken off the list is not looked at again
                    continue
                if self._adapter.epoch(session) != self._epoch:
                    raise Unavailable(f'{self._adapter} was restarted after a crash, restored or emptied meanwhile; '
                                      'nothing was removed.')
                self._adapter.start_sweep(session, pack)
                session.run('COMMIT')
                return
            except (LockTimeout, Deadlock):     # the latter from a cluster, where others were faster
                doomed.go_back(before)      # what was taken off the list is on it again
                patience = min(patience * 1.2, LONGEST_DOOR)
                time.sleep(min(10 * patience, 1))
            finally:
                session.rollback()
                self._held(began)
        raise Unavailable('Transactions are always between their vote and their end, so the sweep could not begin; '
                          'nothing was removed. Try again with pack-skip-prepack.')

    def _catch_up(self, session: Session, pack: Pack, doomed: _Doomed, size: int) -> bool:
        """Go a step further in taking off the list what was changed or linked since. Return whether there may be more.

        Look at `size` revisions at most: of those that were committed, or of what they lead to.
        """
        some = doomed.next(size)
        if some:
            rows = self._adapter.garbage_revisions(session, pack.generation, some) if pack.gc else []
            self._adapter.spare(session, pack.generation, some)
            doomed.spare(oid for row in self._with_references(rows, session, []) for oid in unpack(row[2]))
            return True
        if doomed.seen is None:
            doomed.seen = pack.marked_tid, MAX_TID
        page = self._adapter.changes(session, *doomed.seen, size)
        if not page:
            return False
        doomed.seen = page[-1][1], page[-1][0]
        changed = [row[0] for row in page]
        if pack.gc:
            for _, _, refs, *_ in self._with_references(page, session, []):
                changed.extend(unpack(refs))
        return doomed.spare(changed) or len(page) == size

    def _held(self, began: float) -> None:
        seconds = time.monotonic() - began
        self.report.locked += seconds
        self.report.longest_lock = max(self.report.longest_lock, seconds)

    def _remove(self, session: Session, pack: Pack, doomed: _Doomed) -> None:
        adapter, generation, after = self._adapter, pack.generation, -1
        done, total = 0, self.report.objects + self.report.older or None
        for size in self._steps(session):
            while not adapter.writes_alone(session) and self._catch_up(session, pack, doomed, ROWS):
                pass
            upto = adapter.garbage_end(session, generation, after, size)
            if upto is None:
                return
            states, removed = adapter.sweep(session, generation, after, upto)
            self.report.states += states
            self.report.bytes += removed
            after = upto
            done += size
            self._progress('removing', min(done, total or done), total)

    def _forget_transactions(self, session: Session, pack: Pack) -> None:
        adapter, after = self._adapter, 0
        named = adapter.has_foreign_key(session)
        for size in self._steps(session):
            upto = adapter.transactions_end(session, after, pack.pack_tid, size)
            if upto is None:
                return
            self.report.transactions += adapter.forget_transactions(session, after, upto, named)
            after = upto
            self._progress('forgetting transactions', self.report.transactions, None)

    def _steps(self, session: Session) -> Iterator[int]:
        """Yield how many objects the next step is to remove: as many as it has time for.

        Where others commit, steps are short, and pauses between them make up pack-duty-cycle.
        """
        size, duty, longest = FIRST_STEP, self._options.pack_duty_cycle or 1, self._options.pack_batch_timeout
        last, busy_until = self._adapter.last_tid(session), 0.0
        while True:
            began = time.monotonic()
            yield size
            seconds = time.monotonic() - began
            self.report.steps += 1
            self.report.longest_step = max(self.report.longest_step, seconds)
            newest = self._adapter.last_tid(session)
            if newest != last:
                last, busy_until = newest, began + BUSY
            busy = began < busy_until
            wanted = min(SHORT_STEP if busy else STEP, longest)
            # Not too much because of one that took long: something else may have been the reason.
            size = int(size * min(max(wanted / max(seconds, 1e-6), 0.5), 2.0))
            size = max(SMALLEST_STEP, min(size, LARGEST_STEP))
            if busy and duty < 1:
                time.sleep(min(seconds * (1 / duty - 1), self._options.pack_max_delay))

    def _end(self, session: Session, pack: Pack) -> None:
        patience, deadline = DOOR, time.monotonic() + 2 * self._options.commit_lock_timeout
        while True:
            began = time.monotonic()
            try:
                self._adapter.lock_votes(session, patience)
                self._adapter.end_sweep(session, pack)
                session.run('COMMIT')
                return
            except (LockTimeout, Deadlock):
                if time.monotonic() > deadline:
                    raise
                patience = min(patience * 1.2, LONGEST_DOOR)
                time.sleep(min(10 * patience, 1))
            finally:
                session.rollback()
                self._held(began)

    def _timed(self, phase: str, began: float) -> None:
        self.report.seconds[phase] = self.report.seconds.get(phase, 0.0) + time.monotonic() - began


class _Doomed:
    """The objects that are to go as a whole."""

    def __init__(self):
        self._oids = array('q')
        self._spared: set[int] = set()
        self._left = array('q')     # those that `next` has not returned: of these, and of what an earlier run spared
        self.seen: tuple[int, int] | None = None    # (tid, oid) up to which changes were looked at

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Add rows of the list, in the order of their oids.

        Of what was spared by a run that was interrupted it is not known how far it was followed.
        """
        self._oids.extend(oid for oid, _, _, goes in rows if goes == OBJECT)
        self._left.extend(oid for oid, _, _, goes in rows if goes == SPARED)

    @property
    def spared(self) -> int:
        return len(self._spared)

    def mark(self) -> tuple:
        """Return what `go_back` takes, should what follows be rolled back."""
        return self.seen, self._spared.copy(), self._left[:]

    def go_back(self, mark: tuple) -> None:
        self.seen, self._spared, self._left = mark

    def spare(self, oids: Iterable[int]) -> bool:
        """Let those stay that are on the list. Return whether there are any, for `next` to return."""
        for oid in oids:
            place = bisect_left(self._oids, oid)
            if place < len(self._oids) and self._oids[place] == oid and oid not in self._spared:
                self._spared.add(oid)
                self._left.append(oid)
        return len(self._left) > 0

    def next(self, size: int) -> Sequence[int]:
        """Return some of those that stay, each once."""
        some = self._left[-size:]
        del self._left[-size:]
        return some


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


def _is_present(pack_time: float | None) -> bool:
    return pack_time is None or pack_time > time.time() - PRESENT


def _tid_of(seconds: float) -> int:
    return u64(TimeStamp(*time.gmtime(seconds)[:5], seconds % 60).raw())
