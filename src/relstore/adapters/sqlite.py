"""SQLite: one file in a directory, and no server.

What differs: a commit is a series of plain statements, because they cost no round trip; BEGIN IMMEDIATE takes the
one lock there is for writers, so nothing else needs locking (queue.py has the order in which they get it); the clock is
ours. Readers are never blocked (write-ahead log), and an acknowledged commit is on disk (synchronous=FULL).
"""
from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ZODB.utils import newTid, p64, u64

from relstore.adapters.base import (
    COMMIT_LOCK,
    PREPARED,
    TOGETHER,
    Adapter,
    Ballot,
    Metadata,
    PerhapsPolled,
    Ticket,
    Verdict,
    lock_timeout,
)
from relstore.adapters.completion import Completion
from relstore.adapters.file import File
from relstore.adapters.filesession import LONGEST_PAUSE, FileSession
from relstore.adapters.neighbours import Neighbours
from relstore.adapters.queue import queue_of
from relstore.adapters.statements import Statements, Tables, read
from relstore.errors import ConfigurationError, DatabaseError, LockTimeout
from relstore.sessions.drivers import find_driver
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.spool import Batch

log = logging.getLogger('relstore')

PRAGMAS = {'synchronous': 'FULL', 'cache_size': '-16384', 'mmap_size': '268435456', 'temp_store': 'MEMORY'}

SYNCHRONOUS = 'off', 'normal', 'full', 'extra', '0', '1', '2', '3'

LARGE = 1000        # objects of a transaction that would read much of the file
BUSY_TIMEOUT = 30   # seconds to wait for what is not the lock for writers: a checkpoint, a recovery
# Seconds after which a vote looks whether RelStorage has come.
LOOK_AGAIN = 3.0

SomeSession = TypeVar('SomeSession', bound=Session)


class SQLite(Adapter):
    """A database in `data_dir`, which is created if it is missing (not its parents).

    pragmas: settings of SQLite, on top of relstore's own.
    """
    name = 'sqlite'
    space = ('There is room for what is stored from now on. VACUUM (sqlite3 main.sqlite3 VACUUM, while nobody writes) '
             'gives it back to the disk; it needs as much again meanwhile.')
    largest_state = 900_000_000     # SQLite's limit is 10^9 bytes a row
    pause = LONGEST_PAUSE / 2
    loads_are_cheap = True

    def __init__(self, data_dir: str, pragmas: Mapping[str, str] | None = None):
        if not data_dir:
            raise ConfigurationError('data-dir is empty; name the directory of the database.')
        self.data_dir = Path(data_dir).expanduser().absolute()
        self.path = self.data_dir / 'main.sqlite3'
        self._oid_file = self.data_dir / 'oids.sqlite3'
        self._neighbours, self._looked = Neighbours(self.path), 0.0
        self._file = File(self.path)
        self._pragmas = PRAGMAS | {name: str(value) for name, value in (pragmas or {}).items()}
        for name, value in self._pragmas.items():
            if not re.fullmatch(r'\w+', name) or not re.fullmatch(r'[\w.-]+', value):
                raise ConfigurationError(f'The pragma {name} = {value!r} is not a word or a number.')
            if name.lower() == 'synchronous' and value.lower() not in SYNCHRONOUS:      # it would be taken for another
                raise ConfigurationError(f'The pragma synchronous is {value}: allowed is FULL, EXTRA, NORMAL or OFF.')
            if name.lower() == 'journal_mode' and value.lower() != 'wal':
                raise ConfigurationError(f'The pragma journal_mode is {value}; leave it out, for relstore needs WAL.')

    def __str__(self) -> str:
        return f'The database {self.path}'

    def configure(self, keep_history: bool, read_only: bool) -> None:
        super().configure(keep_history, read_only)
        self._tables = Tables(
            reserved=frozenset({'transaction'}), id='INTEGER', integer='INTEGER', bytes='BLOB', chunk='BLOB',
            bool='INTEGER', no='0', md5='TEXT', text='TEXT', unlogged='',
            # The backup API, by which a backup takes the place of what is there (.restore too), counts the schema on.
            epoch="SELECT value || '.' || (SELECT schema_version FROM pragma_schema_version) FROM {relstore_epoch}",
            oids='(SELECT value AS zoid FROM json_each(?))',
            revisions="(SELECT json_extract(value, '$[0]') AS zoid, json_extract(value, '$[1]') AS tid "
                      'FROM json_each(?))')
        self.sql = Statements('common.sql', 'sqlite.sql', keep_history=keep_history, macros=self._tables,
                              placeholder='?')

    def schema(self) -> dict[str, str]:
        texts = {**read('schema.sql', self.keep_history), **read('sqlite_schema.sql', self.keep_history)}
        return {name: text.format_map(self._tables) for name, text in texts.items()}

    @property
    def reads_in_snapshot(self) -> bool:
        """Always: each statement of its own would take and give back the file's locks, a tenth of a cold load."""
        return True

    def writes_alone(self, session: FileSession) -> bool:
        """RelStorage and relstore never use one directory at once, but an older relstore may."""
        return self.meta(session).get('writers') != 'any'

    # Connect ------------------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        return self.path.exists()

    def connect(self) -> FileSession:
        session = self._open(self.path)
        try:
            session.epoch = self.epoch(session)
            self._file.opened(session)
        except BaseException:
            session.close()
            raise
        return session

    def epoch(self, session: FileSession) -> str:
        return f'{super().epoch(session)}{session.file}'

    def end_epoch(self, session: FileSession, epoch: str) -> None:
        session.rollback()
        with self._writing(session):
            session.run(self.sql.renew_epoch, (secrets.token_hex(8), epoch.partition('.')[0]))

    def lasting(self, epoch: str) -> str:
        """The value in the table. A file gets another number where it is copied and nothing else happens to it."""
        return epoch.partition('.')[0]

    def _open(self, path: Path) -> FileSession:
        queue = queue_of(path)
        queue.join(writes=not self.read_only)       # first: see neighbours.py
        session = self._connected(FileSession, path, queue, self._file if path == self.path else None)
        try:
            for name, value in self._pragmas.items():
                session.run(f'PRAGMA {name} = {value}')
        except BaseException:
            session.close()
            raise
        return session

    def _connected(self, kind: type[SomeSession], path: Path, *others: Any) -> SomeSession:
        mode = 'ro' if self.read_only else 'rwc'
        return kind(find_driver('sqlite3', 'sqlite3'), f'{path.as_uri()}?mode={mode}', float(BUSY_TIMEOUT), *others)

    def prepare_schema(self, create: bool) -> None:
        with self._explained():
            if not self.path.exists():
                self._make(create)
            elif not self.read_only:
                self._look_around()
                for process in self._neighbours.strangers():
                    log.warning('%s is open in %s, too, which is not relstore, or an older one. Nothing but relstore '
                                'may write to it now.', self, process)
            self._complete(self.path, create)

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
        """Make a database elsewhere, and give it its name when it is whole: there never is half of one.

        A link, because a rename would replace the one that another process made meanwhile.
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
                session.all('PRAGMA journal_mode = WAL')
            Completion(self, session).run(create)
            if not self.read_only:
                self._adopt_oids(session)
                if path == self.path:
                    self._neighbours.look_for_myself()
        finally:
            session.close()

    def _refuse_unknown_pragmas(self, session: FileSession) -> None:
        """SQLite does nothing, and says nothing."""
        known = {name for name, in session.all(self.sql.pragmas)}
        for name in self._pragmas:
            if name.lower() not in known:
                raise ConfigurationError(f'The pragma {name} is none that SQLite knows here; leave it out.')

    def _look_around(self) -> None:
        """Refuse to write where RelStorage is. Whoever else has the file open may know what he does."""
        self._looked = time.monotonic()
        process = self._neighbours.relstorage()
        if process is not None:
            raise ConfigurationError(f'{self} is used by RelStorage, in {process}, and both would give the same oid to '
                                     'different objects. Stop one of them first.')

    @contextmanager
    def changing_schema(self, session: FileSession, patience: float) -> Iterator[None]:
        """In a transaction, behind which only those wait who write: for as long as it takes to make a few tables."""
        session.begin_write(self.sql.begin_write, BUSY_TIMEOUT)
        try:
            yield
        finally:
            session.rollback()

    def run_ddl(self, session: FileSession, make: Callable[[], None]) -> None:
        make()
        session.run(self.sql.commit)

    def table_holders(self, session: FileSession, table: str, readers: bool) -> str:
        return self._neighbours.writer()

    def _adopt_oids(self, session: FileSession) -> None:
        """Count on from whatever is in use: a backup may be older than its oids, and RelStorage counts elsewhere."""
        [[last]] = session.all(self.sql.last_oid)
        [[used]] = session.all(self.sql.max_oid)
        theirs = 16 * self._in_oid_file(self.sql.relstorage_oid)
        used = max(used, theirs)
        if used > last:
            with self._writing(session):
                self.reserve_oids(session, used)
        elif theirs < last:
            self._in_oid_file(self.sql.raise_relstorage_oid, (last // 16,))

    def renew_epoch(self, session: FileSession) -> None:
        with self._writing(session):
            session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    def _in_oid_file(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement where RelStorage counts oids, if that is there; else return 0."""
        if not self._oid_file.exists():
            return 0
        with closing(self._connected(Session, self._oid_file)) as session:
            if session.one(self.sql.has_relstorage_oid) is None:
                return 0
            [[value]] = session.all(sql, parameters)
            return value

    def set_writers(self, who: str, timeout: float = 60.0) -> None:
        """As of any adapter. For RelStorage make the file in which it counts oids: without, it would begin at 1."""
        super().set_writers(who, timeout)
        if who == 'any':
            with (closing(self.connect()) as session, self._writing(session),   # nobody counts meanwhile
                  closing(self._connected(Session, self._oid_file)) as oids):
                [[last]] = session.all(self.sql.last_oid)
                oids.run(self.sql.begin_write)
                for statement in self.sql.make_relstorage_oid.split(';\n'):
                    oids.run(statement)
                oids.all(self.sql.raise_relstorage_oid, (last // 16,))
                oids.run(self.sql.commit)

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: FileSession, since: int, limit: int) -> PerhapsPolled:
        """What stands is asked only where there is something newer: it costs no message."""
        self._file.compare(session)
        [(epoch, last), (sweeps, _), *changes] = session.series([
            (self.sql.begin_read, ()), (self.sql.poll, (since, limit))])
        stands = self.stands(session, since) if last > since else last
        return epoch and epoch + session.file, last, sweeps, stands, changes

    # Commit -------------------------------------------------------------------------------------------------------

    def vote(self, session: FileSession, ballot: Ballot) -> Verdict:
        wanted = [oid for oid, _ in (*ballot.bases, *ballot.reads, *ballot.known)] + list(ballot.restored)
        vote = self.sql.vote, (ballot.at, self.oid_list(wanted))
        if time.monotonic() > self._looked + LOOK_AGAIN:
            self._look_around()
        if len(wanted) > LARGE:
            session.run('PRAGMA mmap_size = 0')     # else all that is read counts as memory of this process
            session.retire()                        # others are to read as fast as ever, however this ends
        rows, waits = session.try_to_write(self.sql.begin_write, [vote]), []
        if rows is None:
            rows = session.series([vote]) if ballot.reads else []
            outdated = _outdated(ballot, rows) if rows and not _is_lost(session, ballot, rows) else []
            if outdated:            # it need not wait to fail
                return Verdict(outdated=outdated)
            waits = [(COMMIT_LOCK, self._wait_to_write(session, ballot.timeout))]
            rows = session.series([vote])
        self._file.compare(session)
        if _is_lost(session, ballot, rows):
            return Verdict(epoch_changed=True, waits=waits)
        (_, last), (sweeps, sweeping), _, *found = rows
        current: dict[int, int] = dict(found)
        verdict = Verdict(ticket=[last, current, None], waits=waits, sweeps=sweeps, sweeping=sweeping)
        verdict.outdated = _outdated(ballot, rows)
        if ballot.restored_tid is not None and ballot.restored_tid <= last:
            verdict.last_tid = last
        for oid, base in ballot.bases:
            tid = current.get(oid, 0)
            if tid != base:
                few = len(verdict.conflicts) < TOGETHER
                [state] = few and self.load_serial(session, oid, tid) or [None]
                verdict.conflicts.append((oid, tid, state))
        return verdict

    def _wait_to_write(self, session: FileSession, timeout: float) -> float:
        """As FileSession.wait_to_write; LockTimeout says who has the lock."""
        try:
            return session.wait_to_write(self.sql.begin_write, timeout)
        except LockTimeout as e:
            raise lock_timeout(COMMIT_LOCK, timeout, self._neighbours.writer()) from e

    def stage(self, session: FileSession, ticket: Ticket, tid: int | None, metadata: Metadata,
              batches: Iterator[Batch]) -> Iterable[Batch]:
        """Write everything: the lock for writers is held since vote, and the disk may be full."""
        last, replaced, *_ = ticket
        if tid is None:
            tid = u64(newTid(p64(last) if last else None))
        if self.keep_history:
            session.run(self.sql.insert_transaction, (
                tid, metadata.packed, metadata.user, metadata.description, metadata.extension))
        for batch in batches:
            if self.keep_history:
                session.many(self.sql.insert_state, [
                    (row.oid, tid, replaced.get(row.oid, 0), row.md5, row.size or 0, state, row.refs, row.data_tid)
                    for row, state in batch])
                session.many(self.sql.point_current, [(row.oid, tid) for row, _ in batch])
            else:
                session.many(self.sql.insert_state, [
                    (row.oid, tid, row.size or 0, state, row.refs, tid) for row, state in batch])
        ticket[2] = tid
        return []

    def finish(self, session: FileSession, ticket: Ticket, tid: int | None, metadata: Metadata,
               batches: Iterable[Batch]) -> tuple[int, float]:
        self._file.compare(session)
        try:
            session.run(self.sql.commit)
        except Exception:
            if not session.broken and session.in_transaction:
                ticket[2] = None        # certainly not; and after the rollback another process may use the tid
            raise
        return ticket[2], 0.0       # the lock is held since vote

    def outcome(self, session: FileSession, ticket: Ticket, oids: Sequence[int]) -> int | None:
        """The process that commits is the database: what is not there now never will be."""
        tid = ticket[2]
        return tid if tid is not None and self.transactions(session, tid, tid, 1) else None

    def new_oids(self, session: FileSession, count: int) -> list[int]:
        self._file.compare(session)
        with self._writing(session):
            [[last]] = session.all(self.sql.take_oids, (16 * count,))
            # Where RelStorage's file is, it alone counts, so that no block is given by both.
            block = self._in_oid_file(self.sql.take_relstorage_oids, (last // 16 - count, count)) or last // 16
            if 16 * block > last:
                session.run(self.sql.raise_oid, (16 * block,))
        self._look_around()         # after RelStorage can count no block of these
        return list(range(block - count + 1, block + 1))

    def reserve_oids(self, session: FileSession, oid: int) -> None:
        block = -(-oid // 16)       # rounded up
        session.run(self.sql.raise_oid, (16 * block,))
        self._in_oid_file(self.sql.raise_relstorage_oid, (block,))

    # Pack ---------------------------------------------------------------------------------------------------------

    def lock_pack(self, session: FileSession) -> str | None:
        """The lock of a file, which the system releases however the process ends."""
        session.run('PRAGMA mmap_size = 0')     # else all that this session removes counts as memory of the process
        path = self.data_dir / 'pack.lock'
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

    def stay(self, session: FileSession) -> None:
        """Nobody ends it."""

    def save_references(self, session: FileSession, rows: Sequence[tuple[int, int, bytes]]) -> None:
        with self._writing(session):
            super().save_references(session, rows)

    def add_garbage(self, session: FileSession, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        with self._writing(session):
            super().add_garbage(session, rows)

    def new_pack(self, session: FileSession, pack_tid: int, marked_tid: int, gc: bool, token: str) -> int:
        with self._writing(session):
            return super().new_pack(session, pack_tid, marked_tid, gc, token)

    def end_marking(self, session: FileSession, generation: int, token: str, objects: int,
                    progress: str = PREPARED) -> None:
        with self._writing(session):
            super().end_marking(session, generation, token, objects, progress)

    def spare(self, session: FileSession, generation: int, oids: Sequence[int]) -> None:
        with self._writing(session):
            super().spare(session, generation, oids)

    def forget_garbage(self, session: FileSession, generation: int, keep: int) -> int:
        with self._writing(session):
            return super().forget_garbage(session, generation, keep)

    def begin_snapshot(self, session: FileSession) -> int:
        session.run('PRAGMA mmap_size = 0')     # else all that is read counts as memory of this process
        session.retire()
        session.run(self.sql.begin_read)
        return self.last_tid(session)

    def lock_votes(self, session: FileSession, timeout: float) -> None:
        """Who has voted has the lock for writers."""
        if session.try_to_write(self.sql.begin_write) is None:
            self._wait_to_write(session, timeout)

    def sweep(self, session: FileSession, generation: int, after: int, upto: int) -> tuple[int, int]:
        batch = generation, after, upto
        with self._writing(session):
            if self.keep_history:
                session.run(self.sql.sweep_current, (*batch, generation))
            sizes = session.all(self.sql.sweep_states, (*batch, generation))
            session.run(self.sql.sweep_references, batch)
            session.run(self.sql.sweep_chunks, batch)
        return len(sizes), sum(size for size, in sizes)

    def forget_transactions(self, session: FileSession, after: int, upto: int, named: bool) -> int:
        with self._writing(session):
            count = session.run(self.sql.forget_transactions, (after, upto, named))
            session.run(self.sql.mark_packed, (after, upto))
        return count

    @contextmanager
    def _writing(self, session: FileSession) -> Iterator[None]:
        """In one transaction, unless it is within one: alone each row would be one, and each would wait in no order."""
        if session.in_transaction:
            yield
            return
        session.begin_write(self.sql.begin_write, BUSY_TIMEOUT)
        try:
            yield
            session.run(self.sql.commit)
        finally:
            session.rollback()

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: FileSession) -> int:
        """SQLite keeps no count; the largest oid is near it where few objects were packed away."""
        [[oid]] = session.all(self.sql.max_oid)
        return oid

    def size(self, session: FileSession) -> int:
        [[size]] = session.all(self.sql.size)
        return size

    def zap_all(self, session: FileSession) -> None:
        with self._writing(session):
            for statement in self.sql.zap.split(';\n'):
                session.run(statement)
            self.renew_epoch(session)


def _is_lost(session: FileSession, ballot: Ballot, rows: Sequence[Row]) -> bool:
    """Whether the epoch is another, or what the transaction stands on is gone: see proof.py. rows: of a vote."""
    (epoch, _), _, (is_gone, packed_to), *found = rows
    current: dict[int, int] = dict(found)
    return (epoch is None or epoch + session.file != ballot.epoch
            or is_gone and ballot.at is not None and ballot.at > packed_to
            or any(current.get(oid, tid) < tid for oid, tid in ballot.known))


def _outdated(ballot: Ballot, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return (oid, tid that is current) of what was read and has changed since. rows: of a vote."""
    current: dict[int, int] = dict(rows[3:])
    return [(oid, current.get(oid, 0)) for oid, tid in ballot.reads if current.get(oid, 0) != tid]
