"""SQLite: one file in a directory, and no server.

What differs: a commit is a series of plain statements, because they cost no round trip. BEGIN IMMEDIATE takes the one
lock for writers, so nothing else needs a lock; queue.py decides who gets it next. Tids come from the clock of the
process. Readers are never blocked (write-ahead log), and an acknowledged commit is on disk (synchronous=FULL).
"""
from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relstore.adapters.base import Adapter, PerhapsPolled, Swept
from relstore.adapters.commits.sqlite import SQLiteCommit, wait_to_write
from relstore.adapters.completion import Completion
from relstore.adapters.file import File
from relstore.adapters.filesession import LONGEST_PAUSE_SECONDS, FileSession
from relstore.adapters.neighbours import Neighbours
from relstore.adapters.objects import ObjectsOnSQLite
from relstore.adapters.oidfile import OidFile
from relstore.adapters.packlock import PackLockOnSQLite
from relstore.adapters.queue import queue_of
from relstore.adapters.statements import Statements, Tables, read
from relstore.adapters.writers import WritersOnSQLite
from relstore.errors import ConfigurationError, DatabaseError
from relstore.sessions.drivers import find_driver
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.addresses import SQLite as Address

log = logging.getLogger('relstore')

BUSY_TIMEOUT_SECONDS = 30.0     # for what is not the lock for writers: a checkpoint, a recovery

SomeSession = TypeVar('SomeSession', bound=Session)


class SQLiteAdapter(Adapter):
    """A database in a file."""
    name = 'sqlite'
    commit_type = SQLiteCommit
    space = ('There is room for what is stored from now on. VACUUM (sqlite3 main.sqlite3 VACUUM, while nobody writes) '
             'gives it back to the disk; it needs as much again meanwhile.')
    largest_state = 900_000_000     # SQLite's limit is 10^9 bytes a row
    pause = LONGEST_PAUSE_SECONDS / 2
    loads_are_cheap = True

    def __init__(self, address: Address, keep_history: bool, read_only: bool):
        super().__init__(keep_history, read_only)
        # In both modes: a statement outside a transaction takes and releases the file's locks, a tenth of a cold load.
        self.reads_in_snapshot = True
        self.data_dir, self.path, self._pragmas = address.data_dir, address.path, address.pragmas
        self.writers, self.pack_lock = WritersOnSQLite(self), PackLockOnSQLite(self)
        self.objects, self.oid_file = ObjectsOnSQLite(self), OidFile(self)
        self.neighbours, self.looked_around = Neighbours(self.path), 0.0
        self.file = File(self.path)
        self._tables = Tables(
            reserved=frozenset({'transaction'}), busy_timeout_ms=str(int(BUSY_TIMEOUT_SECONDS * 1000)),
            pragmas=';\n'.join(f'PRAGMA {name} = {value}' for name, value in self._pragmas.items()))
        self.sql = Statements('common.sql', 'sqlite.sql', keep_history=keep_history, macros=self._tables,
                              placeholder='?')

    def __str__(self) -> str:
        return f'The database {self.path}'

    def schema(self) -> dict[str, str]:
        return self.sql.expanded({
            **read('schema.sql', self.keep_history), **read('sqlite_schema.sql', self.keep_history)})

    def writes_alone(self, session: FileSession) -> bool:
        """RelStorage and relstore never use a directory at the same time, but an older relstore may."""
        return self.meta(session).get('writers') != 'any'

    # Connect ------------------------------------------------------------------------------------------------------

    def connect(self) -> FileSession:
        session = self._open(self.path)
        try:
            session.epoch = self.epoch(session)
            self.file.opened(session)
        except BaseException:
            session.close()
            raise
        return session

    def epoch(self, session: FileSession) -> str:
        return f'{super().epoch(session)}{session.file}'

    def end_epoch(self, session: FileSession, epoch: str) -> None:
        session.rollback()
        with self.writing(session):
            session.run(self.sql.renew_epoch, (secrets.token_hex(8), epoch.partition('.')[0]))

    def lasting(self, epoch: str) -> str:
        """Return the value in the table, without the file's number: a copy of the file has another one."""
        return epoch.partition('.')[0]

    def _open(self, path: Path) -> FileSession:
        queue = queue_of(path)
        queue.join(writes=not self.read_only)       # first: see neighbours.py
        session = self.connected(FileSession, path, self.sql, queue, self.file if path == self.path else None)
        try:
            for statement in self.sql.begin_session.parts:
                session.run(statement)
        except BaseException:
            session.close()
            raise
        return session

    def connected(self, kind: type[SomeSession], path: Path, *others: Any) -> SomeSession:
        mode = 'ro' if self.read_only else 'rwc'
        return kind(find_driver('sqlite3', 'sqlite3'), f'{path.as_uri()}?mode={mode}', BUSY_TIMEOUT_SECONDS, *others)

    def prepare_schema(self, create: bool) -> None:
        with self._explained():
            if not self.path.exists():
                self._make(create)
            elif not self.read_only:
                self.look_around()
                for process in self.neighbours.strangers():
                    log.warning('%s is open in %s, too, which is not relstore, or an older one. Nothing but relstore '
                                'may write to it now.', self, process)
            self._complete(self.path, create)

    def bare_session(self) -> FileSession:
        return self._open(self.path)

    @contextmanager
    def completion(self) -> Iterator[Completion]:
        with self._explained(), closing(self._open(self.path)) as session:
            yield Completion(self, session)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ConfigurationError(f'The data-dir {self.data_dir} cannot be created: {e.strerror}; it and '
                                     'its parent have to be directories that this user may write.') from e
        except (ConfigurationError, DatabaseError) as e:
            if e.__cause__ is None:
                raise
            raise ConfigurationError(
                f'{self} cannot be used: {e}; data-dir has to be a directory that this user may write, and '
                'main.sqlite3 in it, if any, an undamaged database (else restore it from a backup).') from e

    def _make(self, create: bool) -> None:
        """Create a database elsewhere, and give it its name when it is complete.

        By a link: a rename would replace a database that another process has created meanwhile.
        """
        if self.read_only or not create:
            raise ConfigurationError(f'There is no database {self.path}; create it by opening it once with '
                                     'create-schema true and read-only false.')
        existed = self.data_dir.exists()
        self.data_dir.mkdir(exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix='.new-', dir=self.data_dir) as directory:
                new = Path(directory) / self.path.name
                self._complete(new, create)
                with suppress(FileExistsError):
                    os.link(new, self.path)
        except BaseException:
            if not existed:
                with suppress(OSError):         # another process has put something there
                    self.data_dir.rmdir()
            raise

    def _complete(self, path: Path, create: bool) -> None:
        session = self._open(path)
        try:
            self._refuse_unknown_pragmas(session)
            if not self.read_only:
                session.all(self.sql.use_wal)
            Completion(self, session).run(create)
            if not self.read_only:
                self._adopt_oids(session)
                if path == self.path:
                    self.neighbours.look_for_myself()
        finally:
            session.close()

    def _refuse_unknown_pragmas(self, session: FileSession) -> None:
        """ConfigurationError: SQLite does not know a pragma, and would ignore it without a word."""
        known = {name for name, in session.all(self.sql.pragmas)}
        for name in self._pragmas:
            if name.lower() not in known:
                raise ConfigurationError(f'The pragma {name} is none that SQLite knows here; leave it out.')

    def look_around(self) -> None:
        """ConfigurationError: RelStorage uses the database. Other programs may have it open."""
        self.looked_around = time.monotonic()
        process = self.neighbours.relstorage()
        if process is not None:
            raise ConfigurationError(f'{self} is used by RelStorage, in {process}, and both would give the same oid to '
                                     'different objects. Stop one of them first.')

    @contextmanager
    def changing_schema(self, session: FileSession, patience: float) -> Iterator[None]:
        """Use one transaction: only writers wait for it, and only while a few tables are created."""
        session.begin_write(self.sql.begin_write, BUSY_TIMEOUT_SECONDS)
        try:
            yield
        finally:
            session.rollback()

    def run_ddl(self, session: FileSession, make: Callable[[], None]) -> None:
        make()
        session.run(self.sql.commit)

    def table_holders(self, session: FileSession, table: str, readers: bool) -> str:
        return self.neighbours.writer()

    def _adopt_oids(self, session: FileSession) -> None:
        """Count past all oids in use: a backup may be older than its oids, and RelStorage counts in another file."""
        [[last]] = session.all(self.sql.last_oid)
        [[used]] = session.all(self.sql.max_oid)
        theirs = 16 * self.oid_file.run(self.sql.relstorage_oid)
        used = max(used, theirs)
        if used > last:
            with self.writing(session):
                self.reserve_oids(session, used)
        elif theirs < last:
            self.oid_file.run(self.sql.raise_relstorage_oid, (last // 16,))

    def renew_epoch(self, session: FileSession) -> None:
        with self.writing(session):
            session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: FileSession, since: int, limit: int) -> PerhapsPolled:
        self.file.compare(session)
        [(epoch, last), (sweeps, stands), *changes] = session.series([
            (self.sql.begin_read, ()), (self.sql.poll, (since, limit))])
        return epoch and epoch + session.file, last, sweeps, stands, changes

    # Commit -------------------------------------------------------------------------------------------------------

    def new_oids(self, session: FileSession, count: int) -> list[int]:
        self.file.compare(session)
        with self.writing(session):
            [[last]] = session.all(self.sql.take_oids, (16 * count,))
            # If RelStorage's file is there, it alone counts, so that no block is handed out twice.
            block = self.oid_file.run(self.sql.take_relstorage_oids, (last // 16 - count, count)) or last // 16
            if 16 * block > last:
                session.run(self.sql.raise_oid, (16 * block,))
        self.look_around()         # last: from here on RelStorage cannot hand out these blocks
        return list(range(block - count + 1, block + 1))

    def reserve_oids(self, session: FileSession, oid: int) -> None:
        block = -(-oid // 16)       # rounded up
        session.run(self.sql.raise_oid, (16 * block,))
        self.oid_file.run(self.sql.raise_relstorage_oid, (block,))

    # Pack ---------------------------------------------------------------------------------------------------------

    def save_references(self, session: FileSession, rows: Sequence[tuple[int, int, bytes]]) -> None:
        with self.writing(session):
            super().save_references(session, rows)

    def add_garbage(self, session: FileSession, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        with self.writing(session):
            super().add_garbage(session, rows)

    def begin_snapshot(self, session: FileSession) -> int:
        session.run(self.sql.map_nothing)
        session.retire()
        session.run(self.sql.begin_read)
        return self.last_tid(session)

    def lock_votes(self, session: FileSession, timeout: float) -> None:
        """Take the lock for writers, which every transaction that has voted holds."""
        if session.try_to_write(self.sql.begin_write) is None:
            wait_to_write(self, session, timeout)

    def sweep(self, session: FileSession, pack_id: int, after: int, upto: int) -> Swept:
        batch = pack_id, after, upto
        with self.writing(session):
            if self.keep_history:
                session.run(self.sql.sweep_current, batch)
            sizes = session.all(self.sql.sweep_states, batch)
            session.run(self.sql.sweep_references, batch)
            session.run(self.sql.sweep_chunks, batch)
            blobs = session.all(self.sql.sweep_records, batch)
        return Swept(len(sizes), sum(size for size, in sizes), len(blobs), sum(size for size, in blobs))

    def forget_transactions(self, session: FileSession, after: int, upto: int, named: bool) -> int:
        with self.writing(session):
            if named:
                session.run(self.sql.forget_replaced, (after, upto))
            count = session.run(self.sql.forget_transactions, (after, upto, named))
            session.run(self.sql.mark_packed, (after, upto))
        return count

    @contextmanager
    def writing(self, session: FileSession) -> Iterator[None]:
        """Begin a transaction, unless there is one: else each statement would be one, and wait outside the queue."""
        if session.in_transaction:
            yield
            return
        session.begin_write(self.sql.begin_write, BUSY_TIMEOUT_SECONDS)
        try:
            yield
            session.run(self.sql.commit)
        finally:
            session.rollback()

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: FileSession) -> int:
        """SQLite keeps no count. The largest oid is close to it unless many objects were packed away."""
        [[oid]] = session.all(self.sql.max_oid)
        return oid

    def size(self, session: FileSession) -> int:
        [[size]] = session.all(self.sql.size)
        return size

    def zap_all(self, session: FileSession) -> None:
        with self.writing(session):
            for statement in self.sql.zap.parts:
                session.run(statement)
            self.renew_epoch(session)
