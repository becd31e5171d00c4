"""Adapter: what databases do, each in its way; in standard SQL as far as they do the same.

An adapter has no state but its statements; each operation is given the session to use. A database's own module
overrides what differs there, and says why. What is one statement everywhere, and one module's business, is not here:
that module sends it.
"""
from __future__ import annotations

import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from relstore.adapters.chunks import Chunks
from relstore.adapters.commits.base import AnyCommit
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.migrations import VERSION
from relstore.adapters.packlock import PackLock
from relstore.adapters.rights import Rights
from relstore.adapters.statements import Statements
from relstore.adapters.sweeps import Sweeps
from relstore.adapters.writers import Writers
from relstore.errors import ConfigurationError, Missing, Unavailable
from relstore.sessions.session import Row, Session

log = logging.getLogger('relstore')

MAX_TID = 2 ** 63 - 1
# The largest oid that an object may bring along, and the largest tid of a transaction that is copied with it: 2^48 new
# objects, and as many later transactions, still have room. A tid may lie in the future: later ones count on from it.
LARGEST = 2 ** 63 - 2 ** 48

# Rows that are read at a time, where all of the database is.
PAGE = 1000

Revision = tuple[bytes | None, int]         # (state, tid); the state of a deleted object is None
# (epoch, newest tid, how many sweeps have ended, newest tid up to the one asked about of which anything is left,
# [(oid, tid)] that changed since)
Polled = tuple[str, int, int, int, list[tuple[int, int]]]
PerhapsPolled = tuple[str | None, int, int, int, list[tuple[int, int]]]       # None: the database has no epoch


class Adapter:
    """One database, as whoever uses it sees it: told once what it is to be, it has looked at its server.

    A new database needs

    * an Address (addresses.py), and a section in config.py and component.xml;
    * its tables and its statements: sql/NAME_schema.sql, as far as sql/schema.sql is not right there, and sql/NAME.sql
      with all that sql/common.sql has not, or not as it is said there;
    * a PackLock (packlock.py), Rights (rights.py) if it has users, and Writers (writers.py) if RelStorage needs more
      there than an index;
    * a Commit (commits/base.py), its `commit_type`; and Chunks (chunks.py), if blobs are not rows there;
    * a driver, listed in sessions/drivers.py;
    * a subclass of this, alone in its module, with what follows.

    It writes: connect, bare_session, prepare_schema, completion, schema, changing_schema, table_holders, _poll,
        renew_epoch, new_oids, reserve_oids, lock_votes, sweep, forget_transactions, estimated_count, size, zap_all

    It may override: look, begin_migration, new_meta, writes_alone, relations, columns, rehearse, run_ddl, define,
        load_at, load_serials, load_many, epoch, end_epoch, lasting, is_learnt_late, begin_snapshot, revisions,
        changes, save_references, writing, add_garbage, vote_holders, conflict_with_commits, oid_list, revision_list

    It inherits: meta, load_now, load_serial, load_before, current_tid, poll, last_tid, stands, current_tids

    It says: name, largest_state, space

    It may say: message_size, loads_are_cheap, blob_chunk_bytes, pause, most_locks, site_locks, migration_lock
    """
    name = ''
    commit_type: type[AnyCommit]
    # What a message to the server may hold; larger transactions are sent in pieces.
    message_size = 4 * 1024 * 1024
    # How long may the state of one object be?
    largest_state = 0
    # Does a load cost so little that to look for what could be fetched with it hardly pays?
    loads_are_cheap = False
    # How much of a blob goes into a row of its own, where they are rows?
    blob_chunk_bytes = 1 << 20
    # Seconds to leave to others between two large writes, where there is one lock for all who write.
    pause = 0.0
    # How many objects may one transaction lock, before it had better keep all others out?
    most_locks = MAX_TID
    # Sections of the schema that change a table which a site may be using.
    site_locks: Mapping[str, Lock] = {}
    # What a migration needs, where somebody would wait for it.
    migration_lock: Lock | None = None
    # What becomes of the space of rows that were removed, and how does the disk get it back?
    space = ''

    sql: Statements

    def __init__(self, keep_history: bool, read_only: bool):
        self.keep_history, self.read_only = keep_history, read_only
        # Does a view hold a transaction open while it lasts? Where no history is kept, there is no other way.
        self.reads_in_snapshot = not keep_history
        # May a session see a commit later than it was acknowledged? Where another server did it.
        self.may_lag = False
        self.rights, self.writers = Rights(self), Writers(self)
        self.pack_lock, self.sweeps, self.chunks = PackLock(self), Sweeps(self), Chunks(self)

    # Connect ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Learn what the server is, and how it is set up. ConfigurationError: it will not do. See Address.bind."""

    def connect(self) -> Session:
        """Return a new session that knows the database's epoch."""
        raise NotImplementedError

    def bare_session(self) -> Session:
        """Return a session that asks nothing of the tables."""
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

    def begin_migration(self, session: Session, statements: Sequence[str], relations: set[str]) -> None:
        """Within run_ddl: wait for those who have voted, and keep others from that; see migrations.py.

        statements: that will be run. relations: that are there. LockTimeout or Deadlock: it may be called again.
        """

    def meta(self, session: Session) -> dict[str, str]:
        """Return what relstore knows about the database: the version of its schema, and its random name."""
        return dict(session.all(self.sql.meta))

    def new_meta(self, relations: set[str]) -> dict[str, str]:
        """Return what `meta` is to be for a new database, or for one that is adopted, which has `relations`.

        Who writes is known where relstore makes the database. One that it finds RelStorage may still write to.
        """
        meta = {'schema': str(VERSION), 'database': secrets.token_hex(8)}
        return meta if 'object_state' in relations else meta | {'writers': 'relstore', 'whole': '0'}

    def writes_alone(self, session: Session) -> bool:
        """Whether only relstore writes. Whoever is to change that waits for those who rely on it."""
        return self.meta(session).get('writers') == 'relstore'

    def relations(self, session: Session) -> set[str]:
        """Return the names of the tables, views, functions and triggers that there are."""
        return {name for name, in session.all(self.sql.relations)}

    def columns(self, session: Session) -> dict[str, dict[str, str]]:
        """Return the columns of the tables that there are: by table, the type of each by name."""
        columns: dict[str, dict[str, str]] = defaultdict(dict)
        for table, name, kind in session.all(self.sql.columns):
            columns[table][name] = str(kind).lower()
        return dict(columns)

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
        return session.one(self.sql.load_before, (oid, tid))

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

    # Commit -------------------------------------------------------------------------------------------------------

    def new_oids(self, session: Session, count: int) -> list[int]:
        """Return `count` block numbers; see OidAllocator."""
        raise NotImplementedError

    def reserve_oids(self, session: Session, oid: int) -> None:
        """See to it that `oid` and smaller ones are never handed out as new. Never lets the count go back."""
        raise NotImplementedError

    # Pack: see pack.py --------------------------------------------------------------------------------------------

    # A revision here is (oid, tid, references or None, state or None, whether it is a deletion). The state is there
    # where the references are not known, unless it is large.

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
            after = (oid, tid) if self.keep_history else (oid,)
            page = session.all(sql, (*after, PAGE))
            yield page

    def changes(self, session: Session, tid: int, oid: int, size: int) -> list[Row]:
        """Return a page of the revisions after (tid, oid), in this order."""
        return session.all(self.sql.changes, (tid, oid, size))

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        """Keep what was found out: (oid, tid, references)."""
        session.many(self.sql.save_references, rows)

    def writing(self, session: Session) -> AbstractContextManager[None]:
        """One transaction of several statements, unless the session is in one, where each alone would wait in turn."""
        return nullcontext()

    def add_garbage(self, session: Session, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Add rows to the list: (pack_id, oid, tid, since, goes); see schema.sql."""
        session.many(self.sql.add_garbage, rows)

    def lock_votes(self, session: Session, timeout: float) -> None:
        """Begin a transaction in which nobody is between vote and finish. LockTimeout after `timeout` seconds."""
        raise NotImplementedError

    def vote_holders(self, session: Session) -> str:
        """Return who keeps lock_votes waiting, as far as that can be found out."""
        return 'another transaction'

    def conflict_with_commits(self, session: Session) -> None:
        """Within a transaction of lock_votes: let no commit of another server succeed that has not seen this one."""

    def sweep(self, session: Session, pack_id: int, after: int, upto: int) -> tuple[int, int]:
        """Remove what is to go of the objects after one and up to another; return (states, their bytes)."""
        raise NotImplementedError

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        """Remove the transactions that have no state left, and mark the others as packed; return how many went.

        named: there is a foreign key, so those stay that a state which is left has replaced.
        """
        raise NotImplementedError

    # Administration -----------------------------------------------------------------------------------------------

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
        return str([*oids])

    def revision_list(self, revisions: Sequence[tuple[int, int]]) -> str:
        """Return the parameter that stands for the macro {revisions}."""
        return json.dumps(revisions)
