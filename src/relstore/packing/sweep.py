"""Sweep: removes what is on the list, except what was linked or changed since. pack.py says why that is safe.

The door: votes pass it, and the sweep closes it for a moment to begin or to end (lock_votes).
"""
from __future__ import annotations

import time
from collections.abc import Iterator

from relstore.adapters.base import MAX_TID
from relstore.database import Database
from relstore.errors import Deadlock, LockTimeout, Unavailable, changed_garbage
from relstore.marks import taken_marks
from relstore.packing.garbage import Doomed, GarbageList
from relstore.packing.packs import PREPARED, SWEEPING, Pack, Packs
from relstore.packing.packtime import tid_of
from relstore.packing.reading import Revisions
from relstore.packing.report import Progress, Report
from relstore.references import unpack
from relstore.sessions.session import Session

# Revisions looked at together.
ROWS = 2500
# How long a step should take, and while others commit.
STEP_SECONDS, SHORT_STEP_SECONDS = 0.1, 0.01
# How long after a commit by others another one is expected.
BUSY_SECONDS = 3.0
SMALLEST_STEP, FIRST_STEP, LARGEST_STEP = 100, 200, 20_000      # objects
# How long to wait for transactions between vote and finish, at first and at most: new votes wait behind us. After a
# wait in vain, votes get GIVE_WAY times as long, because a client may hang.
DOOR_SECONDS, LONGEST_DOOR_SECONDS, GIVE_WAY = 0.01, 1.0, 60
# The least time that votes get then; and how often a waiting session uses its connection, to keep it alive.
SHORTEST_GIVE_WAY_SECONDS, KEEPALIVE_SECONDS = 0.1, 10.0
DOOR_TRIES = 60
# Revisions looked at together while nobody can vote, and how long until votes may go on, except in the later tries.
AT_THE_DOOR, OPEN_AGAIN_SECONDS = 100, 0.05


class Sweep:
    """One sweep, from its beginning to its end.

    session: has the lock of packs. before: the epoch and the state of sweeps when that lock was taken. doomed: the
    list, if this pack has just written it; None if it was written earlier.
    """

    def __init__(self, database: Database, session: Session, pack: Pack, before: tuple[str, tuple[int, int]],
                 doomed: Doomed | None,
                 report: Report, progress: Progress):
        self._database, self._adapter, self._options = database, database.adapter, database.options
        self._session, self._pack, self._before = session, pack, before
        self._report, self._progress = report, progress
        self._packs = Packs(self._adapter, session)
        self._list = GarbageList(self._adapter, session, pack.pack_id)
        self._revisions = Revisions(database, report, progress)
        self._doomed = doomed or self._read_list()
        # Objects that were linked may not go in this sweep, even if nothing refers to them any more.
        self._marks_count = pack.gc and pack.progress == PREPARED and not self._adapter.keep_history

    def _read_list(self) -> Doomed:
        doomed = Doomed()
        for page in self._list.pages():
            self._report.count(page)
            doomed.add(page)
        return doomed

    def run(self) -> None:
        report, session = self._report, self._session
        report.pack_tid, report.marked_tid = self._pack.pack_tid, self._pack.marked_tid
        with report.timed('catching up'):
            self._close_the_door()
        with report.timed('removing'):
            self._remove()
            report.spared = self._doomed.spared
            if self._adapter.keep_history:
                self._forget_transactions()
            with self._database.announced():    # for processes that poll only after a commit
                self._end()
            self._database.poll(session)
            session.rollback()
            self._list.forget_others()

    def _close_the_door(self) -> None:
        """Spare what was linked since; from then on each vote checks the list itself."""
        session, doomed, patience, waited = self._session, self._doomed, DOOR_SECONDS, 0.0
        for tries in range(DOOR_TRIES):
            self._give_way(waited)
            waited = 0.0
            while self._catch_up(ROWS):
                time.sleep(self._adapter.pause)
            began, mark = time.monotonic(), doomed.mark()
            try:
                self._adapter.lock_votes(session, patience)
                until = time.monotonic() + OPEN_AGAIN_SECONDS
                while many := self._catch_up(AT_THE_DOOR):
                    if time.monotonic() > until and tries < DOOR_TRIES // 2:
                        break
                if many:
                    session.run(self._adapter.sql.commit)       # what was spared is not looked at again
                    continue
                self._refuse_another_database()
                self._refuse_what_was_changed()
                self._packs.start_sweep(self._pack, tid_of(time.time()))
                session.run(self._adapter.sql.commit)
                self._marks_count = False
                return
            except (LockTimeout, Deadlock):     # Deadlock: in a cluster, where others were faster
                doomed.go_back(mark)        # what was spared is on the list again
                patience = min(patience * 1.2, LONGEST_DOOR_SECONDS)
                waited = time.monotonic() - began
            finally:
                session.rollback()
                self._report.held(began)
        raise Unavailable('Transactions are always between their vote and their end, so the sweep could not begin; '
                          'nothing was removed. Try again with pack-skip-prepack.')

    def _give_way(self, waited: float) -> None:
        """Let others vote, after we have held them up in vain."""
        seconds = max(GIVE_WAY * waited, SHORTEST_GIVE_WAY_SECONDS) if waited else 0.0
        while seconds > 0:
            time.sleep(min(seconds, KEEPALIVE_SECONDS))
            seconds -= KEEPALIVE_SECONDS
            self._adapter.last_tid(self._session)

    def _refuse_another_database(self) -> None:
        """Refuse if anything was done that the lock of packs prevents only on one server, and only while that runs."""
        epoch, sweeps = self._before
        if self._adapter.epoch(self._session) != epoch:
            raise Unavailable(f'{self._adapter} was restarted after a crash, restored or emptied meanwhile; nothing '
                              'was removed.')
        if self._adapter.sweeps.state(self._session) != sweeps:
            raise Unavailable(f'{self._adapter} was packed by somebody else meanwhile, on another node of a cluster '
                              'perhaps; nothing was removed.')

    def _refuse_what_was_changed(self) -> None:
        """After an earlier sweep has lost its list, garbage that was changed may not stay: see `Preparation`.

        Nobody can have linked it: see Links.
        """
        _, (_, lost) = self._before
        if lost and self._pack.progress != SWEEPING and self._doomed.spared:
            raise changed_garbage(self._adapter)

    def _catch_up(self, size: int) -> bool:
        """Spare some more of what was changed or linked since. Return whether there may be more.

        Look at `size` revisions at most: committed ones, or those that they lead to.
        """
        adapter, session, pack, doomed = self._adapter, self._session, self._pack, self._doomed
        some = doomed.next(size)
        if some:
            rows = self._list.revisions(some) if pack.gc else []
            self._list.spare(some)
            doomed.spare(oid for row in self._revisions.complete(rows, session) for oid in unpack(row[2]))
            return True
        if doomed.seen is None:
            doomed.seen = pack.marked_tid, MAX_TID
        page = adapter.changes(session, *doomed.seen, size)
        if not page:
            return self._marks_count and doomed.spare(taken_marks(adapter, session))
        doomed.seen = page[-1][1], page[-1][0]
        changed = [row[0] for row in page]
        if pack.gc:
            for _, _, refs, *_ in self._revisions.complete(page, session):
                changed.extend(unpack(refs))
        return doomed.spare(changed) or len(page) == size or self._marks_count

    def _remove(self) -> None:
        adapter, session, pack_id, after = self._adapter, self._session, self._pack.pack_id, -1
        report = self._report
        done, total = 0, report.objects + report.older or None
        for size in self._steps():
            while not adapter.writes_alone(session) and self._catch_up(ROWS):
                pass
            upto = self._list.end(after, size)
            if upto is None:
                return
            report.add(adapter.sweep(session, pack_id, after, upto))
            after = upto
            done += size
            self._progress('removing', min(done, total or done), total)

    def _forget_transactions(self) -> None:
        adapter, session, report, after = self._adapter, self._session, self._report, 0
        # Does object_state name the transaction that a state replaced, as RelStorage's does?
        [[named]] = session.all(adapter.sql.has_foreign_key)
        for size in self._steps():
            [[upto]] = session.all(adapter.sql.transactions_end, (after, self._pack.pack_tid, size))
            if upto is None:
                return
            report.transactions += adapter.forget_transactions(session, after, upto, named > 0)
            after = upto
            self._progress('forgetting transactions', report.transactions, None)

    def _steps(self) -> Iterator[int]:
        """Yield how many objects the next step should remove: as many as fit its time.

        While others commit, steps are short, and the pauses between them follow pack-duty-cycle.
        """
        size, duty, longest = FIRST_STEP, self._options.pack_duty_cycle or 1, self._options.pack_batch_timeout
        last, busy_until = self._adapter.last_tid(self._session), 0.0
        while True:
            began = time.monotonic()
            yield size
            seconds = time.monotonic() - began
            self._report.steps += 1
            self._report.longest_step = max(self._report.longest_step, seconds)
            newest = self._adapter.last_tid(self._session)
            if newest != last:
                last, busy_until = newest, began + BUSY_SECONDS
            busy = began < busy_until
            wanted = min(SHORT_STEP_SECONDS if busy else STEP_SECONDS, longest)
            # Do not overreact to one slow step: something else may have delayed it.
            size = int(size * min(max(wanted / max(seconds, 1e-6), 0.5), 2.0))
            size = max(SMALLEST_STEP, min(size, LARGEST_STEP))
            if busy and duty < 1:
                time.sleep(min(seconds * (1 / duty - 1), self._options.pack_max_delay))

    def _end(self) -> None:
        patience, waited, deadline = DOOR_SECONDS, 0.0, time.monotonic() + 2 * self._options.commit_lock_timeout
        while True:
            self._give_way(waited)
            began = time.monotonic()
            try:
                self._adapter.lock_votes(self._session, patience)
                self._packs.end_sweep(self._pack)
                self._session.run(self._adapter.sql.commit)
                return
            except (LockTimeout, Deadlock):
                if time.monotonic() > deadline:
                    raise
                patience = min(patience * 1.2, LONGEST_DOOR_SECONDS)
                waited = time.monotonic() - began
            finally:
                self._session.rollback()
                self._report.held(began)
