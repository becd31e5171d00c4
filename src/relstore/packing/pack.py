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
* In the place of the list of a sweep that was interrupted somebody puts another one, of a copy of the database. Then
  nothing tells what has gone, so vote lets nobody link what is there, until a pack to the present has looked afresh.
* A transaction began before the sweep ended, and votes afterwards; or its connection did, whose application may hold
  what nothing refers to. A number counts the sweeps; where it was smaller when the connection began, vote looks whether
  what is linked is there (commit.py). Every poll tells it, too, and then what was cached is dropped (database.py).

An outside collector (IExternalGC) deletes in a transaction, which keeps all others out from its vote to its end, and
leaves word: views that are older look whether what they link is deleted (commit.py).

So the steps need no lock: nobody else reads or writes the rows that they remove. RelStorage looks at none of this. What
it does during a sweep is read before each step, and where it may write nothing goes that was garbage for a moment only.

Killed at any step, the next run reads what was committed since once more, follows what was let stay, and goes on.
"""
from __future__ import annotations

import logging
import time
from contextlib import closing

from relstore.adapters.base import MAX_TID
from relstore.adapters.rights import PACK
from relstore.database import Database
from relstore.errors import ConfigurationError, Unavailable
from relstore.packing.garbage import Doomed
from relstore.packing.packs import PREPARED, PREPARED_NOW, Pack, Packs
from relstore.packing.packtime import tid_of
from relstore.packing.prepare import Preparation
from relstore.packing.report import Progress, Report
from relstore.packing.sweep import Sweep
from relstore.sessions.session import Session

log = logging.getLogger('relstore.pack')

# A pack time younger than this is the present: without history what is garbage then goes at once.
PRESENT_SECONDS = 10.0


class Packer:
    """One pack of one database.

    progress: is told now and then how far it is. gc: False forbids to collect garbage.
    """

    def __init__(self, database: Database, progress: Progress = lambda what, done, total: None, gc: bool = True):
        self._database, self._adapter = database, database.adapter
        self._gc, self._progress = gc and database.options.pack_gc, progress
        self._before: tuple[str, tuple[int, int]] = '', (0, 0)      # the epoch, and the state of sweeps
        self.report = Report(gc=self._gc)

    def run(self, pack_time: float | None, *, dry_run: bool, prepack_only: bool, skip_prepack: bool) -> Report:
        """Prepare and sweep, or one of the two. pack_time: see tid_of; None, or the future: now."""
        if skip_prepack and (dry_run or prepack_only):
            raise ConfigurationError('pack-skip-prepack does not go with pack-dry-run or pack-prepack-only; '
                                     'choose one of them.')
        present = _is_present(pack_time)        # now: to read a large database takes longer than that lasts
        if dry_run:
            self._preparation().list(pack_time, present)
            return self.report
        with closing(self._adapter.connect()) as session:
            self._adapter.rights.refuse(session, PACK)
            holder = self._adapter.pack_lock.take(session)
            if holder is not None:
                raise Unavailable(f'{self._adapter} is being packed by {holder}.')
            self._database.refuse_another_version(session)      # a migration has the lock, too
            self._remember(session)
            files = self._database.blobs.before_pack(session)
            unfinished = self._unfinished(session, afresh=self._gc and present and not (prepack_only or skip_prepack))
            if unfinished is not None:
                self._end_interrupted(session, unfinished, prepack_only)
            if skip_prepack:
                if unfinished is None:
                    pack = self._prepared(session)
                    self._refuse_what_relstorage_may_harm(session, pack.progress == PREPARED_NOW)
                    self._sweep(session, pack)
                    self._remove_files(session, files, pack_time)
                return self.report
            self._refuse_what_relstorage_may_harm(session, present)
            preparation = self._preparation(lost=self._before[1][1] != 0)
            pack = preparation.write_down(session, pack_time, present)
            if not prepack_only:
                self._sweep(session, pack, preparation.doomed)
                self._remove_files(session, files, pack_time)
        return self.report

    def _preparation(self, lost: bool = False) -> Preparation:
        return Preparation(self._database, self.report, self._progress, lost)

    def _sweep(self, session: Session, pack: Pack, doomed: Doomed | None = None) -> None:
        Sweep(self._database, session, pack, self._before, doomed, self.report, self._progress).run()

    def _remove_files(self, session: Session, before: set[tuple[int, int]], pack_time: float | None) -> None:
        """Those of blobs, where they are in a directory. before: the revisions that had one when the pack began."""
        pack_tid = MAX_TID if pack_time is None else tid_of(pack_time)
        self.report.files, self.report.file_bytes = self._database.blobs.after_pack(session, before, pack_tid)

    def _remember(self, session: Session) -> None:
        """Remember what nobody is to change until a sweep begins."""
        self._before = self._adapter.epoch(session), self._adapter.sweeps.state(session)

    def _end_interrupted(self, session: Session, pack: Pack, prepack_only: bool) -> None:
        """Go on with a sweep that was interrupted, unless nothing of the kind is to be removed now.

        It cannot be given up: what is left may refer to what is gone, and has to be kept from being linked.
        """
        if prepack_only:
            raise ConfigurationError(f'A pack of {self._adapter} was interrupted while it removed what it had found; '
                                     'let one without pack-prepack-only come to its end first.')
        if pack.gc and not self._gc:
            raise ConfigurationError(
                f'A pack of {self._adapter} with garbage collection was interrupted while it removed what it had '
                'found, and pack-gc is false: what is left stays, and cannot be linked. Let one with pack-gc true come '
                'to its end first.')
        log.warning('A pack was interrupted; going on with it.')
        self._sweep(session, pack)
        log.warning('States that it has removed now: %d. Now for this one.', self.report.states)
        self._remember(session)
        self.report = Report(gc=self._gc)

    def _unfinished(self, session: Session, afresh: bool) -> Pack | None:
        """Return the pack whose sweep was interrupted, or None.

        Where a list of a copy of the database has taken the place of its own, only a pack that looks for all garbage
        afresh, and lets none of it stay, can find what it has left.
        """
        _, sweeping = self._adapter.sweeps.state(session)
        if not sweeping:
            return None
        pack = Packs(self._adapter, session).last()
        if (pack is not None and pack.pack_id == sweeping
                and pack.token == self._adapter.meta(session).get('sweeping')):
            return pack
        if not afresh:
            raise ConfigurationError(
                f'A pack of {self._adapter} was interrupted while it removed what it had found, and another list has '
                'taken the place of its own. Let one to the present (--days 0) with pack-gc true, and without '
                'pack-prepack-only and pack-skip-prepack, come to its end first.')
        log.warning('A pack was interrupted, and its list is gone; looking for garbage afresh.')
        return None

    def _prepared(self, session: Session) -> Pack:
        """Return what was prepared earlier, or refuse it."""
        pack = Packs(self._adapter, session).last()
        if pack is None or pack.progress not in (PREPARED, PREPARED_NOW):
            raise ConfigurationError(f'Nothing is prepared in {self._adapter}; run a pre-pack first.')
        if pack.gc != self._gc:
            raise ConfigurationError(f'What is prepared in {self._adapter} was prepared with pack-gc '
                                     f'{str(bool(pack.gc)).lower()}; set it so, or prepare again.')
        # Where there is a history its row stays. Without, what was prepared here may have been written again.
        here = not self._adapter.keep_history and self._adapter.meta(session).get('prepared') == pack.token
        if (self._adapter.last_tid(session) < pack.marked_tid
                or not here and session.one(self._adapter.sql.has_tid, (pack.marked_tid,)) is None):
            raise ConfigurationError(
                f'What is prepared in {self._adapter} was prepared on another state of it: its newest transaction '
                f'{pack.marked_tid:#x} is not to be found here. Prepare again.')
        return pack

    def _refuse_what_relstorage_may_harm(self, session: Session, present: bool) -> None:
        if self._gc and present and not self._adapter.writes_alone(session):
            raise ConfigurationError(
                f'RelStorage processes, or those of an older relstore, may write to {self._adapter}, and a pack to the '
                'present could remove what they are about to link: pack to a time before now (a day, say), or, if none '
                'of them writes any more, say so with "relstore writers".')


def _is_present(pack_time: float | None) -> bool:
    return pack_time is None or tid_of(pack_time) > tid_of(time.time() - PRESENT_SECONDS)
