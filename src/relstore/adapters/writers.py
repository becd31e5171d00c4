"""Writers: who may write to a database, relstore alone or RelStorage too; and what RelStorage needs there."""
from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from relstore.adapters.completion import WITH_HISTORY
from relstore.adapters.patience import in_tries
from relstore.errors import ConfigurationError, DatabaseError, Deadlock, LockTimeout, Missing

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.adapters.sqlite import SQLiteAdapter
    from relstore.sessions.session import Session

WRITERS = 'relstore', 'any'
# How long votes may queue behind a process that waits for all transactions that have voted.
VOTES_TRY_SECONDS = 1.0


class Writers:
    """The writers of one database with relstore's tables, in either history mode."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def who(self) -> str:
        """Return who may write, one of WRITERS."""
        with closing(self._session()) as session:
            return 'relstore' if self._adapter.writes_alone(session) else 'any'

    def set(self, who: str, timeout: float = 60.0) -> None:
        """Record who may write, one of WRITERS; wait up to `timeout` seconds for commits that are under way.

        'relstore' is a promise that no RelStorage process will: it would see neither a pack nor a large transaction.
        'any' is refused as long as there is something that it must not see.
        """
        with closing(self._session()) as session:
            if who == 'any':
                self._refuse_during_a_sweep(session)
            self.lock_votes(session, timeout)
            session.run(self._adapter.sql.set_meta, ('writers', who))
            if who == 'any':
                session.run(self._adapter.sql.forget_whole)
            session.run(self._adapter.sql.commit)

    def make_index(self) -> None:
        """Create the index by which RelStorage polls, if there is none. PostgreSQL waits for open transactions."""
        with closing(self._session()) as session:
            if WITH_HISTORY in self._adapter.columns(session)['object_state']:
                self._make_index(session)

    def _make_index(self, session: Session) -> None:
        session.run(self._adapter.sql.index_for_relstorage)

    def _session(self) -> Session:
        try:
            return self._adapter.connect()
        except Missing as e:
            raise ConfigurationError(f'{self._adapter} was never opened by relstore: start the site with relstore '
                                     'once.') from e

    def lock_votes(self, session: Session, timeout: float) -> None:
        """Begin a transaction that keeps all others from voting; wait up to `timeout` seconds for who has voted."""
        def attempt() -> None:
            try:
                self._adapter.lock_votes(session, min(VOTES_TRY_SECONDS, timeout))
            except (LockTimeout, Deadlock):
                session.rollback()
                raise

        try:
            in_tries(attempt, timeout, lambda e: None)
        except (LockTimeout, Deadlock) as e:
            raise LockTimeout(f'{self._adapter} had commits under way for {timeout:g} s: the votes are locked by '
                              f'{self._adapter.vote_holders(session)}.') from e

    def _refuse_during_a_sweep(self, session: Session) -> None:
        adapter = self._adapter
        adapter.pack_lock.keep_packs_out(session, 'say so afterwards')
        if 'relstore_sweep' in adapter.relations(session) and adapter.sweeps.state(session)[1]:
            raise ConfigurationError(f'A pack of {adapter} was interrupted while it removed what it had found, and '
                                     'RelStorage could link what is left; let one come to its end first.')


class WritersOnPostgreSQL(Writers):

    def _make_index(self, session: Session) -> None:
        """Nobody waits for this, but it waits for all transactions: so it must end when its client is gone.

        If it was interrupted before (by statement_timeout, for instance), it has left an index that is useless.
        """
        sql = self._adapter.sql
        if session.all(sql.backend) == [(session.backend_pid,)]:        # a pooler would keep the settings
            try:
                session.all(sql.end_with_client)
            except DatabaseError:       # before PostgreSQL 14, and on systems that do not tell
                session.all(sql.end_soon)
        if session.all(sql.broken_index):
            session.run(sql.drop_broken_index)
        super()._make_index(session)


class WritersOnSQLite(Writers):
    _adapter: SQLiteAdapter

    def set(self, who: str, timeout: float = 60.0) -> None:
        """Create the file in which RelStorage counts oids: without it, RelStorage would begin at 1."""
        super().set(who, timeout)
        if who == 'any':
            with closing(self._adapter.connect()) as session, self._adapter.writing(session):  # nobody counts meanwhile
                [[last]] = session.all(self._adapter.sql.last_oid)
                self._adapter.oid_file.make(last)
