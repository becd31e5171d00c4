"""Adapter: the operations that databases do differently, in standard SQL where they can be done alike.

An adapter has no state but its statements; each operation is given the session to use. The module of a database
overrides what differs there, and says why. A statement that is the same everywhere and that only one module needs is
not here: that module sends it.
"""
from __future__ import annotations

import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from relstore.adapters.chunks import Chunks
from relstore.adapters.commits.base import AnyCommit
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.migrations import VERSION
from relstore.adapters.objects import Objects
from relstore.adapters.packlock import PackLock
from relstore.adapters.rights import Rights
from relstore.adapters.statements import Statements
from relstore.adapters.sweeps import Sweeps
from relstore.adapters.writers import Writers
from relstore.errors import ConfigurationError, Missing, Unavailable
from relstore.sessions.session import Row, Session

log = logging.getLogger('relstore')

MAX_TID = 2 ** 63 - 1
# The largest oid that an object may bring along, and the largest tid of a transaction that is copied with its tid. That
# leaves room for 2^48 new objects and as many transactions: if a tid lies in the future, later ones count on from it.
LARGEST = 2 ** 63 - 2 ** 48

# Rows that are read at a time by whatever reads all of the database.
PAGE = 1000

Revision = tuple[bytes | None, int]         # (state, tid); the state of a deleted object is None
# (epoch, newest tid, number of sweeps that have ended, newest tid up to the one asked about that has left anything,
# [(oid, tid)] that changed since)
Polled = tuple[str, int, int, int, list[tuple[int, int]]]
PerhapsPolled = tuple[str | None, int, int, int, list[tuple[int, int]]]       # None: the database has no epoch


class Swept(NamedTuple):
    """What a step of a sweep has removed. blobs: revisions of them of which the size is recorded; blob_bytes: those."""
    states: int
    bytes: int
    blobs: int
    blob_bytes: int


class Adapter:
    """One database in one history mode, to be written or not. It has looked at its server, and does not change.

    A new database needs

    * an Address (addresses.py), and a section in config.py and component.xml;
    * its tables and statements: sql/NAME_schema.sql, for what sql/schema.sql does not say right, and sql/NAME.sql, for
      what sql/common.sql lacks or does not say right;
    * a PackLock (packlock.py); Rights (rights.py) if it has users; Writers (writers.py) if RelStorage needs more than
      an index there;
    * a Commit (commits/base.py), its `commit_type`; Chunks (chunks.py) if blobs are not rows there;
    * a driver, listed in sessions/drivers.py;
    * a subclass of this, alone in its module, with what follows.

    It writes: connect, bare_session, prepare_schema, completion, schema, changing_schema, table_holders, _poll,
        renew_epoch, new_oids, reserve_oids, lock_votes, sweep, forget_transactions, estimated_count, size, zap_all

    It may override: look, migration_locks, new_meta, writes_alone, relations, columns, rehearse, run_ddl, define,
        load_at, load_serials, load_many, epoch, end_epoch, lasting, is_learnt_late, begin_snapshot, revisions,
        changes, save_references, writing, add_garbage, vote_holders, conflict_with_commits, oid_list, revision_list

    It inherits: meta, load_now, load_serial, load_before, current_tid, poll, last_tid, stands, current_tids

    It says: name, largest_state, space

    It may say: message_size, loads_are_cheap, blob_chunk_bytes, pause, most_locks, site_locks, migration_lock,
        commits_ddl
    """
    name = ''
    commit_type: type[AnyCommit]
    # How many bytes may a message to the server have? Larger transactions are sent in pieces.
    message_size = 4 * 1024 * 1024
    # How many bytes may the state of one object have?
    largest_state = 0
    # Does a load cost so little that reading ahead hardly pays?
    loads_are_cheap = False
    # If blobs are rows: how many bytes of a blob go into one row?
    blob_chunk_bytes = 1 << 20
    # If there is one lock for all writers: how many seconds are left to others between two large writes?
    pause = 0.0
    # How many objects may one transaction lock before it keeps all others out instead?
    most_locks = MAX_TID
    # Which sections of the schema change a table that a site may be using, and what do they lock?
    site_locks: Mapping[str, Lock] = {}
    # What does a migration lock, if others would wait for it?
    migration_lock: Lock | None = None
    # Does each statement that changes tables commit by itself?
    commits_ddl = False
    # What becomes of the space of removed rows, and how does the disk get it back?
    space = ''

    sql: Statements

    def __init__(self, keep_history: bool, read_only: bool):
        self.keep_history, self.read_only = keep_history, read_only
        # Does a view hold a transaction open while it lasts? Without history there is no other way.
        self.reads_in_snapshot = not keep_history
        # May a session not see a commit yet that another server of the cluster has acknowledged?
        self.may_lag = False
        self.rights, self.writers = Rights(self), Writers(self)
        self.pack_lock, self.sweeps = PackLock(self), Sweeps(self)
        self.chunks, self.objects = Chunks(self), Objects(self)

    # Connect ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Learn what the server is and how it is set up; see Address.bind. ConfigurationError: it cannot be used."""

    def connect(self) -> Session:
        """Return a new session that knows the database's epoch."""
        raise NotImplementedError

    def bare_session(self) -> Session:
        """Return a session that needs no tables."""
        raise NotImplementedError

    def prepare_schema(self, create: bool) -> None:
        """Verify the tables, and create or complete them if allowed. ConfigurationError says what does not fit."""
        raise NotImplementedError

    def completion(self) -> AbstractContextManager[Completion]:
        """A Completion, with a session for as long as it is entered. Others may use the database meanwhile."""
        raise NotImplementedError

    def schema(self) -> dict[str, str]:
        """Return the DDL of all there should be, by the name of the relation that it creates."""
        raise NotImplementedError

    def migration_locks(self, statements: Sequence[str], relations: set[str]) -> list[str]:
        """Return what a migration begins with: it waits for transactions that have voted, and lets no others vote.

        statements: those of the migration. relations: what is there. See migrations.py.
        """
        return []

    def meta(self, session: Session) -> dict[str, str]:
        """Return what relstore has recorded about the database: among others its version and its random name."""
        return dict(session.all(self.sql.meta))

    def new_meta(self, relations: set[str]) -> dict[str, str]:
        """Return the first `meta` of a database that has `relations` so far.

        If relstore creates the database, only relstore writes. One that it adopts RelStorage may still write to.
        """
        meta = {'schema': str(VERSION), 'database': secrets.token_hex(8)}
        return meta if 'object_state' in relations else meta | {'writers': 'relstore', 'whole': '0'}

    def writes_alone(self, session: Session) -> bool:
        """Whether only relstore writes. Who changes that waits for the transactions that rely on it."""
        return self.meta(session).get('writers') == 'relstore'

    def relations(self, session: Session) -> set[str]:
        """Return the names of the tables, views, functions and triggers that are there."""
        relations = {name for name, in session.all(self.sql.relations)}
        if self.commits_ddl:    # then these count only if they are filled: their rows are the last to be written
            if 'relstore_sweep' in relations and session.one(self.sql.has_sweep) is None:
                relations.remove('relstore_sweep')
            if 'relstore_meta' in relations and not self.new_meta(relations).keys() <= self.meta(session).keys():
                relations.remove('relstore_meta')
        return relations

    def columns(self, session: Session) -> dict[str, dict[str, str]]:
        """Return the columns of the tables that are there: by table, the type of each by name."""
        columns: dict[str, dict[str, str]] = defaultdict(dict)
        for table, name, kind in session.all(self.sql.columns):
            columns[table][name] = str(kind).lower()
        return dict(columns)

    def changing_schema(self, session: Session, patience: float) -> AbstractContextManager[None]:
        """Let no other process change the schema while this is entered. Unavailable: another one still does."""
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
        """Return who has been using a table for longer than a try. readers: whether those who only read count."""
        raise NotImplementedError

    # Read ---------------------------------------------------------------------------------------------------------

    def load_at(self, session: Session, oid: int, at: int) -> tuple[bytes | None, int, bytes | None] | None:
        """Return (state, tid, references) as a view at tid `at` sees the object. References may be None: unknown."""
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
        """Return (oid, state, tid, references) of the objects that a view at `at` sees.

        The first one whatever its size; the others if their states have at most `largest` bytes.
        """
        return session.all(self.sql.load_many, (self.oid_list(oids), at, largest, oids[0]))

    def current_tid(self, session: Session, oid: int) -> int | None:
        row = session.one(self.sql.current_tid, (oid,))
        return None if row is None else row[0]

    def poll(self, session: Session, since: int, limit: int) -> Polled:
        """Return what changed after `since`, with the rest of Polled: `limit` objects, or one more if there are more.

        With history an object may be listed once for each of its changes; the newest counts. If reads_in_snapshot, the
        session holds a snapshot of exactly that state afterwards.
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
        """Do the same as poll; the epoch may be None."""
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
        """Give the database another epoch if it still has this one. Ends the session's transaction."""
        session.rollback()
        session.run(self.sql.renew_epoch, (secrets.token_hex(8), epoch.partition('.')[0]))

    def lasting(self, epoch: str) -> str:
        """Return the part of an epoch that survives when everything is shut down and started again."""
        return epoch

    def is_learnt_late(self, old: str, new: str) -> bool:
        """Whether some processes that know the old epoch may learn of the new one later than others."""
        return False

    def stands(self, session: Session, tid: int) -> int:
        """Return the newest tid up to this one of which anything is left; 0 if there is none."""
        [[stands]] = session.all(self.sql.stands, (tid,))
        return stands

    def current_tids(self, session: Session, oids: Iterable[int]) -> dict[int, int | None]:
        """Return the current tid of each object; None if it is deleted."""
        return dict(session.all(self.sql.current_tids, (self.oid_list(oids),)))

    # Commit -------------------------------------------------------------------------------------------------------

    def new_oids(self, session: Session, count: int) -> list[int]:
        """Return `count` block numbers; see OidAllocator."""
        raise NotImplementedError

    def reserve_oids(self, session: Session, oid: int) -> None:
        """Never hand out `oid` or a smaller one as new from now on. The counter never goes back."""
        raise NotImplementedError

    # Pack: see pack.py --------------------------------------------------------------------------------------------

    # A revision here is (oid, tid, references or None, state or None, whether it is a deletion). If the references are
    # not known, the state is there, unless it is large.

    def begin_snapshot(self, session: Session) -> int:
        """Begin a transaction that sees one state of the database; return its newest tid.

        The session is used for nothing else. It may be idle for any time, if the server lets a session ask for that.
        """
        session.results(self.sql.begin_snapshot)
        return self.last_tid(session)

    def revisions(self, session: Session, references: bool) -> Iterator[list[Row]]:
        """Yield pages of all revisions. references: if False, the references and states are None."""
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
        """Make one transaction of several statements if each alone would have to wait; unless the session is in one."""
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
        """Within lock_votes: let no commit on another server succeed that has not seen this transaction."""

    def sweep(self, session: Session, pack_id: int, after: int, upto: int) -> Swept:
        """Remove what is to go of the objects after one and up to another."""
        raise NotImplementedError

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        """Remove transactions that have no state left, and mark the others as packed; return how many were removed.

        named: a foreign key names transactions, so one stays as long as a state names it as the one it replaced. If
        what it replaced is gone, it names none any more.
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

    def oid_list(self, oids: Iterable[int]) -> Any:
        """Return the value of the parameter in the macro {oids}."""
        return str([*oids])

    def revision_list(self, revisions: Sequence[tuple[int, int]]) -> Any:
        """Return the value of the parameter in the macro {revisions}."""
        return json.dumps(revisions)
