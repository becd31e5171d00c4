"""Adapter: every operation on the database once, in standard SQL.

An adapter has no state but its statements; each operation is given the session to use. A database's own module
overrides what differs there, and says why.
"""
from __future__ import annotations

import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relstore.adapters.completion import SCHEMA_VERSION, WITH_HISTORY, Completion, Lock
from relstore.adapters.patience import in_tries
from relstore.adapters.rights import READ, RUN, Right
from relstore.adapters.statements import Statements
from relstore.errors import ConfigurationError, Deadlock, LockTimeout, Missing, Unavailable
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.spool import Batch

log = logging.getLogger('relstore')

MAX_TID = 2 ** 63 - 1
# The largest oid that an object may bring along, and the largest tid of a transaction that is copied with it: 2^48 new
# objects, and as many later transactions, still have room. A tid may lie in the future: later ones count on from it.
LARGEST = 2 ** 63 - 2 ** 48

# How far a pack came that has looked for garbage: of a time before, or of the present.
PREPARED, PREPARED_NOW = 'prepared', 'prepared now'
# One that has begun to remove it, and has not come to its end.
SWEEPING = 'sweeping'

# Who may write to a database: relstore alone, or RelStorage too.
WRITERS = 'relstore', 'any'

# What stands for an oid where a lock is told of that is no single object's. SOME_OBJECTS: it is not known whose.
COMMIT_LOCK, SOME_OBJECTS, EVERYBODY = -1, -2, -3

# Conflicts that are resolved at once: vote returns the states of the first so many, the others are asked for in turn.
TOGETHER = 100

# Seconds for which all votes may wait behind one who waits for all who have voted.
VOTES_TRY = 1.0

# Rows that are read at a time, where all of the database is.
PAGE = 1000

Ticket = list[Any]                          # what an adapter has to know of a vote to tell its outcome
Revision = tuple[bytes | None, int]         # (state, tid); the state of a deleted object is None
# (epoch, newest tid, how many sweeps have ended, newest tid up to the one asked about of which anything is left,
# [(oid, tid)] that changed since)
Polled = tuple[str, int, int, int, list[tuple[int, int]]]
PerhapsPolled = tuple[str | None, int, int, int, list[tuple[int, int]]]       # None: the database has no epoch


@dataclass(frozen=True)
class Ballot:
    """What a transaction asks of vote."""
    epoch: str
    timeout: float                          # seconds to wait for locks
    bases: Sequence[tuple[int, int]]        # (oid, tid it was based on), in oid order; tid 0: the object is new
    locks: Sequence[int]                    # those of these oids that somebody else may be writing
    restored: Sequence[int] = ()            # oids that are written whatever is there
    reads: Sequence[tuple[int, int]] = ()   # (oid, tid that must still be current at the commit)
    restored_tid: int | None = None         # given when a transaction is copied with its tid
    alone: bool = False                     # keep all other commits out, instead of locking each object
    at: int | None = None                   # where the view stood; and what is known to have been there then:
    known: Sequence[tuple[int, int]] = ()   # (oid, tid), see proof.py


@dataclass
class Verdict:
    """What vote answers. Anything in the first four refuses the commit.

    epoch_changed: or what the transaction stands on is gone.

    conflicts: the states of the first TOGETHER are there, for the others None.
    waits: (oid, seconds), for each lock that was not free; or one of the constants above in place of the oid.
    """
    epoch_changed: bool = False
    outdated: list[tuple[int, int]] = field(default_factory=list)   # reads: (oid, tid that is current)
    locked: int | None = None                                       # a read object that somebody is writing
    last_tid: int | None = None                                     # restored_tid is not after this one
    conflicts: list[tuple[int, int, bytes | None]] = field(default_factory=list)    # (oid, current tid, its state)
    ticket: Ticket = field(default_factory=list)                      # what `outcome` will need to know
    waits: list[tuple[int, float]] = field(default_factory=list)
    sweeps: int = 0         # how many sweeps of a pack have ended
    sweeping: int = 0       # the generation of one that is under way; 0: none is
    deleted: int = 0        # views of before this tid may hold objects that were deleted; 0: nobody knows of any

    def __post_init__(self) -> None:
        self.see(self.sweeping)

    def see(self, generation: int) -> None:
        """Take over what relstore_sweep says; see schema.sql."""
        self.sweeping, self.deleted = max(generation, 0), max(-generation, 0)


@dataclass(frozen=True)
class Pack:
    """What the database knows about the last pack."""
    generation: int
    pack_tid: int           # what was current after it stays
    marked_tid: int         # the newest transaction when garbage was looked for
    gc: bool
    progress: str           # marking, PREPARED or PREPARED_NOW, SWEEPING, swept
    token: str              # in relstore_meta too, of what was last prepared, or swept, in this very database
    objects: int            # how many are to go


@dataclass(frozen=True)
class Metadata:
    """What a transaction record holds besides its tid."""
    user: bytes
    description: bytes
    extension: bytes
    packed: bool


class Adapter:
    name = ''
    # What a message to the server may hold; larger transactions are sent in pieces.
    message_size = 4 * 1024 * 1024
    # How long may the state of one object be?
    largest_state = 0
    # Does a load cost so little that to look for what could be fetched with it hardly pays?
    loads_are_cheap = False
    # Seconds to leave to others between two large writes, where there is one lock for all who write.
    pause = 0.0
    # How many objects may one transaction lock, before it had better keep all others out?
    most_locks = MAX_TID
    # Sections of the schema that change a table which a site may be using.
    site_locks: Mapping[str, Lock] = {}
    # What becomes of the space of rows that were removed, and how does the disk get it back?
    space = ''

    keep_history: bool
    sql: Statements

    # Connect ------------------------------------------------------------------------------------------------------

    @property
    def reads_in_snapshot(self) -> bool:
        """Does a view hold a transaction open while it lasts? Where no history is kept, there is no other way."""
        return not self.keep_history

    @property
    def may_lag(self) -> bool:
        """May a session see a commit later than it was acknowledged? Where another server did it."""
        return False

    def configure(self, keep_history: bool, read_only: bool) -> None:
        """Say once, before anything else, which history mode the database has to have."""
        self.keep_history, self.read_only = keep_history, read_only

    def is_there(self) -> bool:
        """Whether there is a database, as far as that is told without a connection: a server says so itself."""
        return True

    def connect(self) -> Session:
        """Return a new session that knows the database's epoch."""
        raise NotImplementedError

    def prepare_schema(self, create: bool) -> None:
        """Verify the tables, and create or complete them if allowed. ConfigurationError says what does not fit."""
        raise NotImplementedError

    def completion(self) -> AbstractContextManager[Completion]:
        """Look at the database, which may be used meanwhile, for what it lacks; with a session for as long."""
        raise NotImplementedError

    def schema(self) -> dict[str, str]:
        """Return the DDL of everything there should be, by the name of the relation whose absence it mends."""
        raise NotImplementedError

    def meta(self, session: Session) -> dict[str, str]:
        """Return what relstore knows about the database: the version of its schema, and its random name."""
        return dict(session.all(self.sql.meta))

    def new_meta(self, relations: set[str]) -> dict[str, str]:
        """Return what `meta` is to be for a new database, or for one that is adopted, which has `relations`.

        Who writes is known where relstore makes the database. One that it finds RelStorage may still write to.
        """
        meta = {'schema': str(SCHEMA_VERSION), 'database': secrets.token_hex(8)}
        return meta if 'object_state' in relations else meta | {'writers': 'relstore', 'whole': '0'}

    def writes_alone(self, session: Session) -> bool:
        """Whether only relstore writes. Whoever is to change that waits for those who rely on it."""
        return self.meta(session).get('writers') == 'relstore'

    def writers(self) -> str:
        """Return who may write to the database, one of WRITERS."""
        with closing(self.connect()) as session:
            return 'relstore' if self.writes_alone(session) else 'any'

    def set_writers(self, who: str, timeout: float = 60.0) -> None:
        """Say who may write, one of WRITERS; wait up to `timeout` seconds for the commits under way.

        'relstore' is a promise that no RelStorage process will: it would see neither a pack nor a large transaction.
        'any' is refused as long as there is something that it must not see.
        """
        with closing(self._admin_session()) as session:
            if who == 'any':
                self._refuse_during_a_sweep(session)
            self._lock_votes_in_tries(session, timeout)
            session.run(self.sql.set_meta, ('writers', who))
            if who == 'any':
                session.run(self.sql.forget_whole)
            session.run('COMMIT')

    def _lock_votes_in_tries(self, session: Session, timeout: float) -> None:
        def attempt() -> None:
            try:
                self.lock_votes(session, min(VOTES_TRY, timeout))
            except (LockTimeout, Deadlock):
                session.rollback()
                raise

        try:
            in_tries(attempt, timeout, lambda e: None)
        except (LockTimeout, Deadlock) as e:
            raise LockTimeout(f'{self} had commits under way for {timeout:g} s: the votes are locked by '
                              f'{self.vote_holders(session)}.') from e

    def make_index_for_relstorage(self) -> None:
        """Make the index by which it polls, if there is none. PostgreSQL waits for the transactions under way."""
        with closing(self._admin_session()) as session:
            if WITH_HISTORY in self.columns(session)['object_state']:
                self._make_index_for_relstorage(session)

    def _make_index_for_relstorage(self, session: Session) -> None:
        session.run(self.sql.index_for_relstorage)

    def _admin_session(self) -> Session:
        """Return a session to a database that relstore has been at, whichever its history mode."""
        return self.connect()

    def _refuse_during_a_sweep(self, session: Session) -> None:
        self.keep_packs_out(session, 'say so afterwards')
        if 'relstore_sweep' in self.relations(session) and self.sweep_state(session)[1]:
            raise ConfigurationError(f'A pack of {self} was interrupted while it removed what it had found, and '
                                     'RelStorage could link what is left; let one come to its end first.')

    def relations(self, session: Session) -> set[str]:
        """Return the names of the tables, views, functions and triggers that there are."""
        return {name for name, in session.all(self.sql.relations)}

    def columns(self, session: Session) -> dict[str, dict[str, str]]:
        """Return the columns of the tables that there are: by table, the type of each by name."""
        columns: dict[str, dict[str, str]] = defaultdict(dict)
        for table, name, kind in session.all(self.sql.columns):
            columns[table][name] = str(kind).lower()
        return dict(columns)

    @property
    def purpose(self) -> str:
        """For what the storage is opened, one of rights.PURPOSES."""
        return READ if self.read_only else RUN

    def user(self, session: Session) -> str:
        """Return who the server takes this user for."""
        [[user]] = session.all(self.sql.current_user)
        return user

    def rights(self, purpose: str) -> list[Right]:
        """Return what a user needs for one of rights.PURPOSES, besides what the ones before it need, or for CREATE."""
        return []

    def grants(self, database: str, user: str, owner: str) -> str:
        """Return GRANT statements for a user, and for the one who makes the tables. Names are as SQL has them."""
        return f'-- {self.name} has no users.\n'

    def missing_rights(self, session: Session, purpose: str) -> list[Right]:
        """Return what the user lacks for a purpose, the ones before it included, of what is there."""
        return []

    def changing_schema(self, session: Session, patience: float) -> AbstractContextManager[None]:
        """A time in which no other process changes the schema. Unavailable: another has not ended with that yet."""
        raise NotImplementedError

    def rehearse(self, session: Session, statements: Iterable[str]) -> None:
        """Within changing_schema: NotAllowed if this user may not do what cannot be undone."""

    def run_ddl(self, session: Session, make: Callable[[], None]) -> None:
        """Within changing_schema: call make() and commit. LockTimeout or Deadlock: it may be called again."""
        make()

    def define(self, session: Session, statement: str) -> None:
        """Run a statement of schema()."""
        session.run(statement)

    def table_holders(self, session: Session, table: str, readers: bool) -> str:
        """Return who uses a table, and has for longer than a try: readers too, or those alone who write."""
        raise NotImplementedError

    # Read ---------------------------------------------------------------------------------------------------------

    def load_at(self, session: Session, oid: int, at: int) -> tuple[bytes | None, int, bytes | None] | None:
        """Return (state, tid, references or None if they are not known) as a view at tid `at` sees the object."""
        return session.one(self.sql.load_at, (oid, at))

    def load_now(self, session: Session, oid: int) -> Revision | None:
        return session.one(self.sql.load_now, (oid,))

    def load_serial(self, session: Session, oid: int, tid: int) -> tuple[bytes | None] | None:
        return session.one(self.sql.load_serial, (oid, tid))

    def load_serials(self, session: Session, revisions: Sequence[tuple[int, int]]) -> dict[int, bytes | None]:
        """Return the states of those revisions (oid, tid) that exist, by oid."""
        rows = {oid: self.load_serial(session, oid, tid) for oid, tid in revisions}
        return {oid: row[0] for oid, row in rows.items() if row is not None}

    def load_before(self, session: Session, oid: int, tid: int) -> tuple[bytes | None, int, int | None] | None:
        """Return (state, tid, tid of the next revision or None) of the last revision before `tid`."""
        return session.one(self.sql.load_before, (oid, tid, oid, tid))

    def load_many(
        self, session: Session, oids: Sequence[int], at: int, largest: int
    ) -> list[tuple[int, bytes | None, int, bytes | None]]:
        """Return (oid, state, tid, references) of those that a view at `at` sees.

        Of the first, whatever its size; of the others, if their states are not longer than `largest`.
        """
        return session.all(self.sql.load_many, (self.oid_list(oids), at, largest, oids[0]))

    def current_tid(self, session: Session, oid: int) -> int | None:
        row = session.one(self.sql.current_tid, (oid,))
        return None if row is None else row[0]

    def poll(self, session: Session, since: int, limit: int) -> Polled:
        """Return what there is, and what changed after `since`: `limit` objects, or one more if they were too many.

        With history an object may be listed for each of its changes; the newest counts.
        Where reads_in_snapshot, the session then holds a snapshot of just that state.
        """
        try:
            polled = self._poll(session, since, limit + 1)
        except Missing as e:
            raise ConfigurationError(f'{self} is not what it was: it, or a part of it, was renamed or dropped ({e}); '
                                     'give it back the name that it had.') from e
        if polled[0] is None:
            # Emptied by the crash recovery of the server, or never filled.
            session.rollback()
            self.renew_epoch(session)
            polled = self._poll(session, since, limit + 1)
            if polled[0] is None:
                raise Unavailable(f'{self} lacks the row of relstore_sweep; is it being restored?')
        return polled   # type: ignore[return-value]  # the epoch is there: mypy narrows no tuple

    def _poll(self, session: Session, since: int, limit: int) -> PerhapsPolled:
        """As poll; the epoch may be None."""
        raise NotImplementedError

    def last_tid(self, session: Session) -> int:
        [[tid]] = session.all(self.sql.last_tid)
        return tid

    def epoch(self, session: Session) -> str:
        rows = session.all(self.sql.epoch)
        if not rows:
            self.renew_epoch(session)
            rows = session.all(self.sql.epoch)
        [[epoch]] = rows
        return epoch

    def renew_epoch(self, session: Session) -> None:
        """Give the database an epoch if it has none; another process may be quicker."""
        raise NotImplementedError

    def end_epoch(self, session: Session, epoch: str) -> None:
        """Give the database another epoch, if this is the one that it has still. Ends a transaction of the session."""
        session.rollback()
        session.run(self.sql.renew_epoch, (secrets.token_hex(8), epoch.partition('.')[0]))

    def lasting(self, epoch: str) -> str:
        """Return the part of an epoch that survives when everything is shut down and started again."""
        return epoch

    def is_learnt_late(self, old: str, new: str) -> bool:
        """Whether processes that know the old epoch may learn of the new one some time after others have."""
        return False

    def stands(self, session: Session, tid: int) -> int:
        """Return the newest transaction up to this one that has left anything; 0 if there is none."""
        [[stands]] = session.all(self.sql.stands, (tid,))
        return stands

    def current_tids(self, session: Session, oids: Iterable[int]) -> dict[int, int | None]:
        """Return what is current of each object; None of those that are gone."""
        return dict(session.all(self.sql.current_tids, (self.oid_list(oids),)))

    def newest(self, session: Session, size: int) -> list[tuple[int, int]]:
        """Return the (oid, tid) that were written last."""
        return session.all(self.sql.newest, (size,))

    def packed_to(self, session: Session) -> int:
        """Return up to which tid a pack of relstore's may have removed transactions."""
        [[tid]] = session.all(self.sql.packed_to)
        return tid

    # Commit -------------------------------------------------------------------------------------------------------

    def vote(self, session: Session, ballot: Ballot) -> Verdict:
        """Begin a transaction, lock what it changes, and compare with what is committed.

        After a refusal the caller rolls back. LockTimeout says who had a lock for too long.
        """
        raise NotImplementedError

    def send_ahead(self, session: Session, batches: Iterable[Batch]) -> bool:
        """Send what is too large for one message before vote, so that nobody has to wait for that.

        Return whether it was done. Then `send_again` takes the place of `stage`, and nothing is left for `finish`.
        """
        return False

    def send_again(self, session: Session, batches: Iterable[Batch]) -> None:
        """End the vote: replace rows that were sent ahead, because conflicts were resolved."""
        raise NotImplementedError

    def stage(self, session: Session, ticket: Ticket, tid: int | None, metadata: Metadata,
              batches: Iterator[Batch]) -> Iterable[Batch]:
        """End the vote: do ahead of `finish` what may fail or is large; return the batches that are left for it.

        Batches are lists of (Pending, state), as Spool.batches yields them. tid: given or to be chosen.
        """
        raise NotImplementedError

    def finish(self, session: Session, ticket: Ticket, tid: int | None, metadata: Metadata,
               batches: Iterable[Batch]) -> tuple[int, float]:
        """Choose the tid (or take the one given), write what is left, COMMIT.

        Return the tid, and the seconds that the commit lock had to be waited for.
        """
        raise NotImplementedError

    def outcome(self, session: Session, ticket: Ticket, oids: Sequence[int]) -> int | None:
        """After a failed finish: return the tid if it was committed, else None. Waits until that is decided.

        OutcomeUnknown if asking again would not help, Unavailable if it may.
        """
        raise NotImplementedError

    def new_oids(self, session: Session, count: int) -> list[int]:
        """Return `count` block numbers; see OidAllocator."""
        raise NotImplementedError

    def reserve_oids(self, session: Session, oid: int) -> None:
        """See to it that `oid` and smaller ones are never handed out as new. Never lets the count go back."""
        raise NotImplementedError

    # History ------------------------------------------------------------------------------------------------------

    def history(self, session: Session, oid: int, size: int) -> list[Row]:
        """Return (tid, size, user, description, extension) of the newest `size` revisions, newest first."""
        return session.all(self.sql.history, (oid, size))

    def author(self, session: Session, tid: int) -> tuple[bytes | None, bytes | None] | None:
        """Return the beginnings of a transaction's user and description, or None if there is no such record."""
        return session.one(self.sql.author, (tid,)) if self.keep_history else None

    def undo_log(self, session: Session, before: int, size: int) -> list[Row]:
        """Return a page of (tid, user, description, extension) older than `before`, newest first."""
        return session.all(self.sql.undo_log, (before, size))

    def is_undoable(self, session: Session, tid: int) -> bool:
        return session.one(self.sql.transaction_is_undoable, (tid,)) is not None

    def changes_to_undo(self, session: Session, tid: int) -> list[Row]:
        """Return (oid, md5 written, current tid, current md5, tid it replaced or 0, tid of the revision before)."""
        return session.all(self.sql.undo, (tid,))

    # Blobs: see blobs.py ------------------------------------------------------------------------------------------

    def has_blobs(self, session: Session) -> bool:
        """Whether the data of any blob is in the database."""
        return bool(session.all(self.sql.has_blobs))

    def with_blobs(self, session: Session, oids: Iterable[int]) -> list[int]:
        """Return some of the objects that have data of blobs."""
        return [oid for oid, in session.all(self.sql.with_blobs, (self.oid_list(oids),))]

    # Iterate ------------------------------------------------------------------------------------------------------

    def transactions(self, session: Session, start: int, stop: int, size: int) -> list[Row]:
        """Return a page of (tid, packed, user, description, extension) from `start` to `stop`."""
        return session.all(self.sql.transactions, (start, stop, size))

    def records(self, session: Session, tid: int, after: int, size: int) -> list[Row]:
        """Return a page of (oid, state, data_tid) of one transaction, oids greater than `after`."""
        return session.all(self.sql.records, (tid, after, size))

    def current_records(self, session: Session, start: int, size: int) -> list[Row]:
        """Return a page of (oid, tid, state) of the objects that exist, from oid `start`."""
        return session.all(self.sql.current_records, (start, start, size))

    # Pack: see pack.py --------------------------------------------------------------------------------------------

    # A revision here is (oid, tid, references or None, state or None, whether it is a deletion). The state is there
    # where the references are not known, unless it is large.

    def lock_pack(self, session: Session) -> str | None:
        """Take the lock of packs, which ends with the session. Return None, or who has it."""
        raise NotImplementedError

    def keep_packs_out(self, session: Session, then: str) -> bool:
        """Take the lock of packs for as long as the session lasts. Unavailable says who has it, and what to do `then`.

        Through a pooler it cannot be had: that is no reason to do nothing. Return whether it was. The session may be
        idle, as far as the server lets it say so.
        """
        try:
            holder = self.lock_pack(session)
        except ConfigurationError as e:
            log.warning('Let nobody pack %s meanwhile. %s', self, e)
            return False
        if holder is not None:
            raise Unavailable(f'{self} is being packed by {holder}; {then}.')
        self.stay(session)
        return True

    def stay(self, session: Session) -> None:
        """Let a session be idle as long as it likes."""
        session.run(self.sql.stay)

    def is_whole(self, session: Session) -> bool:
        """Whether nothing was ever removed as garbage, as far as that is known; see copying.py."""
        number, generation = self.sweep_state(session)
        return not generation and self.meta(session).get('whole') == str(number)

    def say_whole(self, session: Session) -> None:
        """Say so of a database that is empty. Where RelStorage may write nobody would learn that it is no longer."""
        number, generation = self.sweep_state(session)
        if not generation and self.writes_alone(session):
            session.run(self.sql.set_meta, ('whole', str(number)))

    def begin_snapshot(self, session: Session) -> int:
        """Begin a transaction that sees one state of the database; return its newest tid.

        It may be idle as long as it lasts, as far as the server lets a session say so. The session is for nothing else.
        """
        session.results(self.sql.begin_snapshot)
        return self.last_tid(session)

    def revisions(self, session: Session, references: bool) -> Iterator[list[Row]]:
        """Yield pages of all revisions. Without references the third is None, and no state comes either."""
        sql = self.sql.revisions if references else self.sql.revisions_only
        page = [(-1, -1)]
        while page:
            oid, tid, *_ = page[-1]
            after = self.after(oid, tid) if self.keep_history else (oid,)
            page = session.all(sql, (*after, PAGE))
            yield page

    def changes(self, session: Session, tid: int, oid: int, size: int) -> list[Row]:
        """Return a page of the revisions after (tid, oid), in this order."""
        return session.all(self.sql.changes, (*self.after(tid, oid), size))

    def garbage_revisions(self, session: Session, generation: int, oids: Sequence[int]) -> list[Row]:
        """Return the revisions of objects of the list as they were marked, as far as they are still there."""
        return session.all(self.sql.garbage_revisions, (self.oid_list(oids), generation))

    def current_revisions(self, session: Session, oids: Sequence[int]) -> list[Row]:
        """Return the current revisions of those of these objects that exist."""
        return session.all(self.sql.current_revisions, (self.oid_list(oids),))

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        """Keep what was found out: (oid, tid, references)."""
        session.many(self.sql.save_references, rows)

    def last_pack(self, session: Session) -> Pack | None:
        """Return the last that has come to an end with looking for garbage."""
        row = session.one(self.sql.last_pack)
        return None if row is None else Pack(*row)

    def last_marked(self, session: Session) -> int:
        """Return the last generation whose list tells since when objects are garbage; 0: none does.

        It has been swept: of one that is only written down no vote knows.
        """
        row = session.one(self.sql.last_marked)
        return row[0] if row else 0

    def new_pack(self, session: Session, pack_tid: int, marked_tid: int, gc: bool, token: str) -> int:
        """Begin a generation, and return its number."""
        [[generation]] = session.all(self.sql.next_generation)
        session.run(self.sql.new_pack, (generation, pack_tid, marked_tid, gc, token))
        return generation

    def end_marking(self, session: Session, generation: int, token: str, objects: int,
                    progress: str = PREPARED) -> None:
        """The list of a generation is complete. token, progress: see Pack."""
        session.run(self.sql.set_meta, ('prepared', token))
        session.run(self.sql.pack_prepared, (progress, objects, generation))

    def start_sweep(self, session: Session, pack: Pack, now: int = 0) -> None:
        """Within the transaction of lock_votes: let every vote from now on see that this is being swept.

        now: as a tid. From then on votes tell which of the objects of the list are linked: see marks.py.
        Unavailable if its list is there no more, because one of a copy of the database has taken its place.
        """
        if pack.progress != SWEEPING:
            session.run(self.sql.forget_sweep)
        session.run(self.sql.start_sweep, (pack.generation, pack.pack_tid, pack.pack_tid))
        if session.one(self.sql.has_list, (pack.generation, pack.token)) is None:
            raise Unavailable(f'Another list has taken the place of the one that this pack of {self} has written down; '
                              'nothing was removed.')
        session.run(self.sql.pack_sweeping, (pack.generation,))
        if pack.gc and pack.progress != SWEEPING and not self.keep_history:
            session.run(self.sql.set_meta, ('looked', str(now)))
        session.run(self.sql.set_meta, ('sweeping', pack.token))

    def end_sweep(self, session: Session, pack: Pack) -> None:
        """Within the transaction of lock_votes. Unavailable if it has ended: another node may sweep the next."""
        if not session.run(self.sql.end_sweep, (pack.generation,)):
            raise Unavailable(f'The sweep of this pack of {self} was ended by somebody else, on another node of a '
                              'cluster perhaps.')
        session.run(self.sql.forget_numbers)
        session.run(self.sql.pack_swept, (pack.generation, pack.generation))
        number, _ = self.sweep_state(session)
        [[removed]] = session.all(self.sql.swept_count, (number,))
        if not (pack.gc and removed):
            session.run(self.sql.stay_whole, (str(number), str(number - 1)))

    def add_garbage(self, session: Session, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Add rows to the list: (generation, oid, tid, since, goes); see schema.sql."""
        session.many(self.sql.add_garbage, rows)

    def garbage(self, session: Session, generation: int, after: int, size: int) -> list[tuple[int, int, int, int]]:
        """Return a page of the list, by oid: (oid, tid, since, goes)."""
        return session.all(self.sql.garbage, (generation, after, size))

    def garbage_end(self, session: Session, generation: int, after: int, size: int) -> int | None:
        """Return the oid of the last of the next `size` objects of which something goes; None if there are none."""
        [[oid]] = session.all(self.sql.garbage_end, (generation, after, size))
        return oid

    def spare(self, session: Session, generation: int, oids: Sequence[int]) -> None:
        """Let objects of the list stay."""
        session.run(self.sql.spare, (self.oid_list(oids), generation))

    def forget_garbage(self, session: Session, generation: int, keep: int) -> int:
        """Drop some of the lists of all generations but these two; return how many rows that were.

        Nor that of a sweep under way, by which votes are refused: another node of a cluster may have begun one.
        """
        return session.run(self.sql.forget_garbage, (generation, keep))

    def lock_votes(self, session: Session, timeout: float) -> None:
        """Begin a transaction in which nobody is between vote and finish. LockTimeout after `timeout` seconds."""
        raise NotImplementedError

    def vote_holders(self, session: Session) -> str:
        """Return who keeps lock_votes waiting, as far as that can be found out."""
        return 'another transaction'

    # May finish() wait long for others, and can they be told?
    finish_waits = False

    def finish_holders(self, session: Session, ticket: Ticket) -> str:
        """Return who keeps the finish() of another session waiting; '' if nobody does."""
        return ''

    def sweep_state(self, session: Session) -> tuple[int, int]:
        """Return (how many sweeps have ended, the generation of one that is under way or 0)."""
        [row] = session.all(self.sql.sweep_state)
        return row

    def sweep(self, session: Session, generation: int, after: int, upto: int) -> tuple[int, int]:
        """Remove what is to go of the objects after one and up to another; return (states, their bytes)."""
        raise NotImplementedError

    def transactions_end(self, session: Session, after: int, upto: int, size: int) -> int | None:
        """Return the tid of the last of the next `size` transactions; None if there are none up to `upto`."""
        [[tid]] = session.all(self.sql.transactions_end, (after, upto, size))
        return tid

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        """Remove the transactions that have no state left, and mark the others as packed; return how many went.

        named: there is a foreign key, so those stay that a state which is left has replaced.
        """
        raise NotImplementedError

    def has_tid(self, session: Session, tid: int) -> bool:
        """Whether something that this transaction has left is there."""
        return session.one(self.sql.has_tid, (tid,)) is not None

    def has_foreign_key(self, session: Session) -> bool:
        """Whether object_state names the transaction that a state has replaced, as RelStorage's does."""
        [[count]] = session.all(self.sql.has_foreign_key)
        return count > 0

    def going(self, session: Session, generation: int, oids: Iterable[int]) -> list[int]:
        """Return some of the objects that the sweep of a generation removes, or has removed.

        LookupError if nobody knows, because the list that is there is not the one of that sweep.
        """
        going = [oid for oid, in session.all(self.sql.going, (self.oid_list(oids), generation, generation))]
        if -1 in going:
            raise LookupError(generation)
        return going

    def tell_deletion(self, session: Session) -> None:
        """Within a vote that was alone: let those that follow know that something is deleted."""
        session.run(self.sql.tell_deletion)

    def marks(self, session: Session, generation: int, limit: int) -> list[int]:
        """Return the objects of a list that go later; see marks.py. Without history."""
        return [oid for oid, in session.all(self.sql.marks, (generation, limit))]

    def marked(self, session: Session, generation: int, oids: Iterable[int]) -> list[int]:
        """Return which of these objects are among them."""
        return [oid for oid, in session.all(self.sql.marked, (self.oid_list(oids), generation))]

    def take_marks(self, session: Session, generation: int, oids: Iterable[int]) -> None:
        """Write down that these objects of a list were linked or changed."""
        session.run(self.sql.take_marks, (self.oid_list(oids), generation))

    def taken_marks(self, session: Session) -> list[int]:
        """Return all of which that was written down."""
        return [oid for oid, in session.all(self.sql.taken_marks)]

    def looked(self, session: Session) -> int:
        """Return since when, as a tid, votes take off the marks of the last list that was swept."""
        return int(self.meta(session).get('looked', 0))

    def missing(self, session: Session, oids: Iterable[int]) -> list[int]:
        """Return some of the objects that are not there, or are deleted."""
        return [oid for oid, in session.all(self.sql.missing, (self.oid_list(oids),))]

    def swept(self, session: Session, number: int, limit: int) -> list[int] | None:
        """Return what a sweep has removed. None if that is not known any more, or more than `limit`."""
        row = session.one(self.sql.swept_count, (number,))
        if row is None or row[0] > limit:
            return None
        oids = [oid for oid, in session.all(self.sql.swept, (number, -1, limit))]
        return oids if len(oids) == row[0] else None

    # References: see checks.py -------------------------------------------------------------------------------------

    def garbage_sizes(self, session: Session, revisions: Sequence[tuple[int, int]]
                      ) -> list[tuple[int, int, int, int, bytes | None]]:
        """Return what would go of some objects, given as (oid, tid up to which).

        (oid, states, their bytes, tid, state): tid and state are those of the newest that would go; the state is None
        where it is large. Objects of which there is nothing are left out.
        """
        return session.all(self.sql.garbage_sizes, self.revision_list(revisions))

    def objects_end(self, session: Session, after: int, size: int) -> int | None:
        """Return the oid of the last of the next `size` objects; None if there are none."""
        [[oid]] = session.all(self.sql.objects_end, (after, size))
        return oid

    def unknown_references(self, session: Session, after: tuple[int, int], upto: int, size: int) -> list[Row]:
        """Return a page of the revisions (oid, tid, state) after one whose references are not known.

        upto: an oid. The state is None where it is large.
        """
        return session.all(self.sql.unknown_references, (*self._after(after), upto, size))

    def known_references(self, session: Session, after: tuple[int, int], upto: int, size: int) -> list[Row]:
        """Return a page of the revisions after one: (oid, tid, references stored, references found out, state).

        Either may be None. upto, state: as of unknown_references.
        """
        return session.all(self.sql.known_references, (*self._after(after), upto, size))

    def _after(self, revision: tuple[int, int]) -> tuple[int, ...]:
        return self.after(*revision) if self.keep_history else revision[:1]

    # Administration -----------------------------------------------------------------------------------------------

    def count(self, session: Session) -> int:
        """Return how many objects there are: exact for a few thousand, else about."""
        [[count]] = session.all(self.sql.count_up_to, (5000,))
        return count if count < 5000 else max(count, self.estimated_count(session))

    def estimated_count(self, session: Session) -> int:
        raise NotImplementedError

    def size(self, session: Session) -> int:
        """Return the bytes the tables occupy."""
        raise NotImplementedError

    def zap_all(self, session: Session) -> None:
        """Remove all data, and begin a new epoch."""
        raise NotImplementedError

    # Phrases ------------------------------------------------------------------------------------------------------

    def oid_list(self, oids: Iterable[int]) -> str:
        """Return the parameter that stands for the macro {oids}."""
        return json.dumps(list(oids))

    def after(self, first: int, second: int) -> tuple[int, ...]:
        """Return the parameters that stand for a row where a page is to begin after it."""
        return first, second

    def revision_list(self, revisions: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Return the parameters that stand for the macro {revisions}."""
        return (json.dumps(revisions),)


def lock_timeout(lock: int, seconds: float, holder: str) -> LockTimeout:
    """Return the error that says for whom a vote has waited. lock: an oid, or what stands for one."""
    what = {COMMIT_LOCK: 'The commit lock', SOME_OBJECTS: 'An object',
            EVERYBODY: 'The lock that a large transaction or a pack takes alone'}.get(lock, f'The object {lock:#x}')
    error = LockTimeout(f'{what} was held for {seconds:g} s (commit-lock-timeout) by {holder}.')
    error.lock = lock
    return error
