"""PackLock: the lock that packs take, and that keeps packs out. RelStorage's packs take the same lock.

It ends with its session, however that ends.
"""
from __future__ import annotations

import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING

from relstore.adapters.numbers import PACK_LOCK
from relstore.errors import ConfigurationError, DatabaseError, LockTimeout, Unavailable

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.adapters.filesession import FileSession
    from relstore.adapters.postgresql import PostgreSQLAdapter
    from relstore.adapters.sqlite import SQLiteAdapter
    from relstore.sessions.session import Session

log = logging.getLogger('relstore')

POSTGRESQL_PATIENCE_SECONDS = 1.0


class PackLock:
    """The lock of one database."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def take(self, session: Session) -> str | None:
        """Take the lock. Return None, or who has it."""
        raise NotImplementedError

    def keep_packs_out(self, session: Session, then: str) -> bool:
        """Keep the lock as long as the session lasts. Unavailable says who has it, and what to do `then`.

        Return whether it was taken: through a pooler it cannot be, which is logged. The session may be idle, if the
        server lets a session ask for that.
        """
        try:
            holder = self.take(session)
        except ConfigurationError as e:
            log.warning('Let nobody pack %s meanwhile. %s', self._adapter, e)
            return False
        if holder is not None:
            raise Unavailable(f'{self._adapter} is being packed by {holder}; {then}.')
        self._stay(session)
        return True

    def _stay(self, session: Session) -> None:
        """Let a session be idle for any time."""
        session.run(self._adapter.sql.stay)


class PackLockOnPostgreSQL(PackLock):
    """An advisory lock of the session. A pooler may change the session's server at any time, so none may be between."""
    _adapter: PostgreSQLAdapter

    def take(self, session: Session) -> str | None:
        adapter = self._adapter
        [[backend]] = session.all(adapter.sql.backend)
        if session.backend_pid != backend:
            raise ConfigurationError('A pooler stands between this process and the server, and a pack needs a '
                                     'connection of its own; pack with a dsn that leads to the server itself.')
        # A session that was closed just now may hold it for a moment.
        deadline = time.monotonic() + POSTGRESQL_PATIENCE_SECONDS
        while session.all(adapter.sql.lock_pack) != [(True,)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        else:
            return None
        [[key]] = session.all(adapter.sql.lock_key, (PACK_LOCK,))
        return adapter.lock_holders(session, key)


class PackLockOnMySQL(PackLock):

    def take(self, session: Session) -> str | None:
        [[locked]] = session.all(self._adapter.sql.lock_pack)
        if locked:
            return None
        rows = session.all(self._adapter.sql.pack_holder)
        return ', '.join(f'connection {number} ({who})' for number, who in rows) or 'another connection'


class PackLockOnOracle(PackLock):
    """RelStorage's: a lock of a table. It ends with its transaction, so it has a session of its own beside this one."""

    def take(self, session: Session) -> str | None:
        adapter = self._adapter
        own = adapter.bare_session()
        try:
            own.run(adapter.sql.begin)
            own.run(adapter.sql.lock_pack)
        except LockTimeout:
            own.close()
            return 'another session'
        except BaseException:
            own.close()
            raise
        session.keep(own)
        return None

    def _stay(self, session: Session) -> None:
        """A session may be idle for as long as the user's profile lets it."""


class PackLockOnSQLite(PackLock):
    """A lock on a file. The system releases it however the process ends."""
    _adapter: SQLiteAdapter

    def take(self, session: FileSession) -> str | None:     # type: ignore[override]
        session.run(self._adapter.sql.map_nothing)
        path = self._adapter.data_dir / 'pack.lock'
        try:
            file = open(path, 'a+')         # noqa: SIM115 (closed with the session)
        except OSError as e:
            raise DatabaseError(f'{path} cannot be written: {e.strerror}') from e
        session.keep(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            return file.read().strip() or 'another process'
        try:
            file.truncate(0)
            file.write(f'the process {os.getpid()}\n')
            file.flush()
        except OSError as e:
            raise DatabaseError(f'{file.name} cannot be written: {e.strerror}') from e
        return None

    def _stay(self, session: Session) -> None:
        """Nothing ends an idle session here."""
