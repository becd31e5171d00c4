"""Sweep: removes what was written down, but for what was linked or changed since. pack.py says why that is safe."""
from __future__ import annotations

import time
from collections.abc import Iterator

from relstore.adapters.base import MAX_TID, PREPARED, SWEEPING, Pack
from relstore.database import Database
from relstore.errors import Deadlock, LockTimeout, Unavailable, changed_garbage
from relstore.packing.garbage import Doomed, forget_lists, pages
from relstore.packing.packtime import tid_of
from relstore.packing.reading import Revisions
from relstore.packing.report import Progress, Report
from relstore.references import unpack
from relstore.sessions.session import Session

# Revisions that are looked at together.
ROWS = 2500
# Seconds that a step is to take, and to take where others commit meanwhile.
STEP, SHORT_STEP = 0.1, 0.01
# Seconds after a commit of others for which there may be another one soon.
BUSY = 3.0
SMALLEST_STEP, FIRST_STEP, LARGEST_STEP = 100, 200, 20_000      # objects
# Seconds to wait for those between vote and finish, at first: new votes wait behind us. Where that was in vain they are
# given way to, for so many times as long as they have waited: a client may hang.
DOOR, LONGEST_DOOR, GIVE_WAY = 0.01, 1.0, 60
# At least so long, where nobody waits behind us; and seconds after which a session that waits says something.
SHORTEST_WAY, ALIVE = 0.1, 10.0
DOOR_TRIES = 60
# Revisions that are looked at together while nobody can vote, and seconds after which others may again, unless it goes
# on like that.
AT_THE_DOOR, OPEN_AGAIN = 100, 0.05


class Sweep:
    """One sweep, from the moment in which it begins to its end.

    session: has the lock of packs. before: the epoch and the state of sweeps as they were when that was had. doomed:
    what was written down just now; None if it was earlier.
    """

    def __init__(self, database: Database, session: Session, pack: Pack, before: tuple[str, tuple[int, int]],
                 doomed: Doomed | None,
                 report: Report, progress: Progress):
        self._database, self._adapter, self._options = database, database.adapter, database.options
        self._session, self._pack, self._before = session, pack, before
        self._report, self._progress = report, progress
        self._revisions = Revisions(database, report, progress)
        self._doomed = doomed or self._read_list()
        # What was linked may not go now, though nothing refers to it any more.
        self._marks_count = pack.gc and pack.progress == PREPARED and not self._adapter.keep_history

    def _read_list(self) -> Doomed:
        doomed = Doomed()
        for page in pages(self._adapter, self._session, self._pack.generation):
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
            with self._database.announced():    # who asks nothing as long as nothing is committed is to learn of it
                self._end()
            self._database.poll(session)
            session.rollback()
            forget_lists(self._adapter, session, self._pack.generation)

    def _close_the_door(self) -> None:
        """Take off the list what was linked since, and have each vote from then on look at it."""
        session, doomed, patience, waited = self._session, self._doomed, DOOR, 0.0
        for tries in range(DOOR_TRIES):
            self._give_way(waited)
            waited = 0.0
            while self._catch_up(ROWS):
                time.sleep(self._adapter.pause)
            began, mark = time.monotonic(), doomed.mark()
            try:
                self._adapter.lock_votes(session, patience)
                until = time.monotonic() + OPEN_AGAIN
                while many := self._catch_up(AT_THE_DOOR):
                    if time.monotonic() > until and tries < DOOR_TRIES // 2:
                        break
                if many:
                    session.run('COMMIT')       # what was taken off the list is not looked at again
                    continue
                self._refuse_another_database()
                self._refuse_what_was_changed()
                self._adapter.start_sweep(session, self._pack, tid_of(time.time()))
                session.run('COMMIT')
                self._marks_count = False
                return
            except (LockTimeout, Deadlock):     # the latter from a cluster, where others were faster
                doomed.go_back(mark)        # what was taken off the list is on it again
                patience = min(patience * 1.2, LONGEST_DOOR)
                waited = time.monotonic() - began
            finally:
                session.rollback()
                self._report.held(began)
        raise Unavailable('Transactions are always between their vote and their end, so the sweep could not begin; '
                          'nothing was removed. Try again with pack-skip-prepack.')

    def _give_way(self, waited: float) -> None:
        """Let others vote, after they have waited behind us in vain."""
        seconds = max(GIVE_WAY * waited, SHORTEST_WAY) if waited else 0.0
        while seconds > 0:
            time.sleep(min(seconds, ALIVE))
            seconds -= ALIVE
            self._adapter.last_tid(self._session)

    def _refuse_another_database(self) -> None:
        """Nobody has done to it what the lock of packs keeps from it on one server, and on one that lives on."""
        epoch, sweeps = self._before
        if self._adapter.epoch(self._session) != epoch:
            raise Unavailable(f'{self._adapter} was restarted after a crash, restored or emptied meanwhile; nothing '
                              'was removed.')
        if self._adapter.sweep_state(self._session) != sweeps:
            raise Unavailable(f'{self._adapter} was packed by somebody else meanwhile, on another node of a cluster '
                              'perhaps; nothing was removed.')

    def _refuse_what_was_changed(self) -> None:
        """Where an earlier sweep has lost its list, garbage that was changed may not stay: see `Preparation`.

        Nobody can have linked it: see Links.
        """
        _, (_, lost) = self._before
        if lost and self._pack.progress != SWEEPING and self._doomed.spared:
            raise changed_garbage(self._adapter)

    def _catch_up(self, size: int) -> bool:
        """Go a step further in taking off the list what was changed or linked since. Return whether there may be more.

        Look at `size` revisions at most: of those that were committed, or of what they lead to.
        """
        adapter, session, pack, doomed = self._adapter, self._session, self._pack, self._doomed
        some = doomed.next(size)
        if some:
            rows = adapter.garbage_revisions(session, pack.generation, some) if pack.gc else []
            adapter.spare(session, pack.generation, some)
            doomed.spare(oid for row in self._revisions.complete(rows, session) for oid in unpack(row[2]))
            return True
        if doomed.seen is None:
            doomed.seen = pack.marked_tid, MAX_TID
        page = adapter.changes(session, *doomed.seen, size)
        if not page:
            return self._marks_count and doomed.spare(adapter.taken_marks(session))
        doomed.seen = page[-1][1], page[-1][0]
        changed = [row[0] for row in page]
        if pack.gc:
            for _, _, refs, *_ in self._revisions.complete(page, session):
                changed.extend(unpack(refs))
        return doomed.spare(changed) or len(page) == size or self._marks_count

    def _remove(self) -> None:
        adapter, session, generation, after = self._adapter, self._session, self._pack.generation, -1
        report = self._report
        done, total = 0, report.objects + report.older or None
        for size in self._steps():
            while not adapter.writes_alone(session) and self._catch_up(ROWS):
                pass
            upto = adapter.garbage_end(session, generation, after, size)
            if upto is None:
                return
            states, removed = adapter.sweep(session, generation, after, upto)
            report.states += states
            report.bytes += removed
            after = upto
            done += size
            self._progress('removing', min(done, total or done), total)

    def _forget_transactions(self) -> None:
        adapter, session, report, after = self._adapter, self._session, self._report, 0
        named = adapter.has_foreign_key(session)
        for size in self._steps():
            upto = adapter.transactions_end(session, after, self._pack.pack_tid, size)
            if upto is None:
                return
            report.transactions += adapter.forget_transactions(session, after, upto, named)
            after = upto
            self._progress('forgetting transactions', report.transactions, None)

    def _steps(self) -> Iterator[int]:
        """Yield how many objects the next step is to remove: as many as it has time for.

        Where others commit, steps are short, and pauses between them make up pack-duty-cycle.
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
                last, busy_until = newest, began + BUSY
            busy = began < busy_until
            wanted = min(SHORT_STEP if busy else STEP, longest)
            # Not too much because of one that took long: something else may have been the reason.
            size = int(size * min(max(wanted / max(seconds, 1e-6), 0.5), 2.0))
            size = max(SMALLEST_STEP, min(size, LARGEST_STEP))
            if busy and duty < 1:
                time.sleep(min(seconds * (1 / duty - 1), self._options.pack_max_delay))

    def _end(self) -> None:
        patience, waited, deadline = DOOR, 0.0, time.monotonic() + 2 * self._options.commit_lock_timeout
        while True:
            self._give_way(waited)
            began = time.monotonic()
            try:
                self._adapter.lock_votes(self._session, patience)
                self._adapter.end_sweep(self._session, self._pack)
                self._session.run('COMMIT')
                return
            except (LockTimeout, Deadlock):
                if time.monotonic() > deadline:
                    raise
                patience = min(patience * 1.2, LONGEST_DOOR)
                waited = time.monotonic() - began
            finally:
                self._session.rollback()
                self._report.held(began)
