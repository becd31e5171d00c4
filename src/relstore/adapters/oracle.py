"""Oracle, through oracledb or cx_Oracle; from version 19c on.

What differs: a phase of a commit is a block of PL/SQL, which tells in one text what has become of it. What is written
travels before that, all rows in one message, into tables of which each session sees its own rows. There are no shared
locks of rows, and no locks but those of rows and tables, which end with the transaction. Statements that change tables
commit by themselves. The empty string is NULL: see oracle_drivers.py.
"""
from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from relstore.adapters.base import Adapter, PerhapsPolled, Swept
from relstore.adapters.chunks import ChunksOnOracle
from relstore.adapters.commits.oracle import OracleCommit, waiting
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.packlock import PackLockOnOracle
from relstore.adapters.rights import RightsOnOracle
from relstore.adapters.statements import Statements, TablesOnOracle, read
from relstore.errors import ConfigurationError, DatabaseError, LockTimeout, Unavailable
from relstore.sessions.oracle_drivers import NONE_REFERRED
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.addresses import Oracle as Address

OLDEST_VERSION = 19
EXISTS = 'ORA-00955'


class OracleAdapter(Adapter):
    """The tables of one user of a database."""
    name = 'oracle'
    commit_type = OracleCommit
    commits_ddl = True
    space = ('There is room for what is stored from now on. ALTER TABLE object_state MOVE ONLINE gives it back to the '
             'tablespace; it needs as much again meanwhile.')
    largest_state = 1_000_000_000       # what a driver sends and takes without a locator
    site_locks = {
        'refs': Lock('object_state', 'an exclusive lock of the table', 'everybody who writes', False),
        **dict.fromkeys(('blob_chunk', 'relstore_blob'), Lock(
            'object_state', 'a shared lock of the table, for the reference', 'everybody who writes', False))}

    def __init__(self, address: Address, keep_history: bool, read_only: bool, macros: Mapping[str, Any] | None = None):
        super().__init__(keep_history, read_only)
        self.rights, self.pack_lock, self.chunks = RightsOnOracle(self), PackLockOnOracle(self), ChunksOnOracle(self)
        self._address = address
        self.sql = Statements('common.sql', 'oracle.sql', keep_history=keep_history,
                              macros=TablesOnOracle(**macros or {}), placeholder=':')

    def __str__(self) -> str:
        return f'The Oracle database {self._address.dsn}'

    def schema(self) -> dict[str, str]:
        return self.sql.expanded(read('oracle_schema.sql', self.keep_history))

    # Connect ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        session = self.bare_session()
        try:
            versions = [version for version, in session.all(self.sql.server)]
        finally:
            session.close()
        if versions and int(versions[0].partition('.')[0]) < OLDEST_VERSION:
            raise ConfigurationError(f'{self} has version {versions[0]}; relstore needs {OLDEST_VERSION}c or newer.')

    def connect(self) -> Session:
        session = self._address.session()
        try:
            session.epoch = self.epoch(session)
        except BaseException:
            session.close()
            raise
        return session

    def bare_session(self) -> Session:
        return self._address.first_session()

    def prepare_schema(self, create: bool) -> None:
        with self.completion() as completion:
            session = completion.session
            completion.run(create)
            if not self.read_only:
                self._count_past(session)
                self._forget_commits(session)

    @contextmanager
    def completion(self) -> Iterator[Completion]:
        session = self.bare_session()
        try:
            with self.rights.explained(session):
                yield Completion(self, session)
        finally:
            session.close()

    @contextmanager
    def changing_schema(self, session: Session, patience: float) -> Iterator[None]:
        """Have another session lock a table of no rows: each change commits, and so would release the lock."""
        with suppress(DatabaseError):       # it is there
            session.run(self.sql.make_schema_lock)
        guard = self.bare_session()
        try:
            guard.run(self.sql.begin)
            guard.run(waiting(self.sql.lock_schema, patience))
            yield
        except LockTimeout as e:
            raise Unavailable(f'{self} is being changed by another process, which has not ended within '
                              f'{patience:g} s.') from e
        finally:
            guard.close()

    def define(self, session: Session, statement: str) -> None:
        """Leave alone what is there: it was made by who was interrupted before the rest."""
        try:
            session.run(statement)
        except DatabaseError as e:
            if EXISTS not in str(e):
                raise

    def table_holders(self, session: Session, table: str, readers: bool) -> str:
        """To see who it is takes rights that no site needs."""
        return 'another session'

    def renew_epoch(self, session: Session) -> None:
        session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    def lasting(self, epoch: str) -> str:
        return epoch.partition('.')[0]

    def _count_past(self, session: Session) -> None:
        """Count past the objects that are there: a counter that was restored separately hands out their oids."""
        [[used]], [[following]] = session.all(self.sql.max_oid), session.all(self.sql.last_number)
        if used >= 16 * following:
            self.reserve_oids(session, used)

    def _forget_commits(self, session: Session) -> None:
        with self._transaction(session):
            old = [key for key, in session.all(self.sql.old_commits)]
            if old:
                session.run(self.sql.forget_commits, (self.oid_list(old),))

    @contextmanager
    def _transaction(self, session: Session) -> Iterator[None]:
        """A transaction, unless there is one: then its end is somebody else's business."""
        if session.in_transaction:
            yield
            return
        session.run(self.sql.begin)
        try:
            yield
            session.run(self.sql.commit)
        finally:
            session.rollback()

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: Session, since: int, limit: int) -> PerhapsPolled:
        """Send one block; the changes come with a second message, if there are any."""
        [[(_, epoch, *numbers)], changes] = session.results(self.sql.poll, (since, limit))
        last, sweeps, stands = map(int, numbers)
        # With history the changes are asked for after the rest, and may be newer.
        return epoch or None, last, sweeps, stands, [(oid, tid) for oid, tid in changes if tid <= last]

    # Commit -------------------------------------------------------------------------------------------------------

    def new_oids(self, session: Session, count: int) -> list[int]:
        return [block for block, in session.all(self.sql.new_oids, (count,))]

    def reserve_oids(self, session: Session, oid: int) -> None:
        """Restart the sequence, even if it is ahead: each instance of a cluster may keep numbers for later.

        To do so commits. So it has a transaction of its own, and the lock another, in another session than this one:
        which may have voted, and would keep it until it has ended.
        """
        with closing(self.bare_session()) as own, self._transaction(own):
            own.all(self.sql.lock_oids)
            [[following]] = own.all(self.sql.last_number)
            own.run(self.sql.restart_oids, (max(-(-oid // 16) + 1, following),))

    # Pack ---------------------------------------------------------------------------------------------------------

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        with self._transaction(session):
            session.many(self.sql.forget_references, [
                (oid, tid) if self.keep_history else (oid,) for oid, tid, _ in rows])
            session.many(self.sql.save_references, [(oid, tid, refs or NONE_REFERRED) for oid, tid, refs in rows])

    def lock_votes(self, session: Session, timeout: float) -> None:
        session.run(waiting(self.sql.lock_votes, timeout))

    def sweep(self, session: Session, pack_id: int, after: int, upto: int) -> Swept:
        [[numbers]] = session.results(self.sql.sweep, (pack_id, after, upto))
        return Swept(*map(int, numbers))

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        [[[count]]] = session.results(self.sql.forget_transactions, (after, upto, named))
        return int(count)

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: Session) -> int:
        """Return what the statistics of the database say, which it gathers at night."""
        [[count]] = session.all(self.sql.estimated_count)
        return count

    def size(self, session: Session) -> int:
        [[size]] = session.all(self.sql.size)
        return size

    def zap_all(self, session: Session) -> None:
        """Do the counter of oids last: it is not part of the transaction."""
        try:
            session.run(self.sql.zap)
        finally:
            session.rollback()
        session.run(self.sql.restart_oids, (1,))
        self.renew_epoch(session)

    # Phrases ------------------------------------------------------------------------------------------------------

    def oid_list(self, oids: Iterable[int]) -> Any:
        return [*oids]

    def revision_list(self, revisions: Iterable[tuple[int, int]]) -> Any:
        """Each as one text of fixed width."""
        return [f'{oid:020}{tid:020}' for oid, tid in revisions]
