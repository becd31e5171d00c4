"""PostgreSQL, through psycopg 3 or psycopg2.

What differs: each phase of a commit is one message, to one function on the server (postgresql_functions.sql).
Objects are locked by advisory locks, whose keys are oids. Every statement names its schema, so nothing depends on the
search path.
"""
from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relstore.adapters.arrays import starts
from relstore.adapters.base import Adapter, PerhapsPolled, Swept
from relstore.adapters.commits.postgresql import PostgreSQLCommit, holder, milliseconds
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.large_objects import ChunksOnPostgreSQL, explained
from relstore.adapters.numbers import EVERYBODY, SCHEMA_LOCK
from relstore.adapters.ownership import refuse_strangers
from relstore.adapters.packlock import PackLockOnPostgreSQL
from relstore.adapters.patience import TRY_SECONDS, in_tries
from relstore.adapters.rights import RightsOnPostgreSQL
from relstore.adapters.statements import Statements, Tables, read
from relstore.adapters.writers import WritersOnPostgreSQL
from relstore.errors import (
    ConfigurationError,
    Deadlock,
    LockTimeout,
    OutOfLocks,
    Unavailable,
)
from relstore.sessions.session import Row, Session
from relstore.sessions.statement import Statement

if TYPE_CHECKING:
    from relstore.adapters.addresses import PostgreSQL as Address

OLDEST_VERSION = 130000         # xid8 and pg_current_xact_id() came with 13
ZAP_PATIENCE_SECONDS = 30.0
SCHEMA_LOCK_PAUSE_SECONDS = 0.05


class PostgreSQLAdapter(Adapter):
    """A database of a server."""
    name = 'postgresql'
    commit_type = PostgreSQLCommit
    space = ('VACUUM, which the server runs by itself, makes room for what is stored from now on. VACUUM FULL '
             'object_state gives it back to the disk, and nobody can read meanwhile; so does pg_repack, and everybody '
             'can.')
    # A parameter is sent as text, twice as long, and the server takes 10^9 bytes.
    largest_state = 250_000_000
    # One message takes a tenth less time than pieces that go through a temporary table.
    message_size = 8 * 1024 * 1024
    # A default server has room for some 12,000 locks, of all transactions together.
    most_locks = 2000
    site_locks = {
        'refs': Lock('object_state', 'ACCESS EXCLUSIVE', 'everybody', True),
        'blob_chunk': Lock('object_state', 'SHARE ROW EXCLUSIVE', 'those who write', False),
        'relstore_blob': Lock('object_state', 'SHARE ROW EXCLUSIVE', 'those who write', False),
        'relstore_unlink_chunk_3': Lock('blob_chunk', 'ACCESS EXCLUSIVE, where an older relstore made the trigger',
                                        'those who use blobs', False),
        'blob_chunk_delete': Lock('blob_chunk', 'SHARE ROW EXCLUSIVE', 'those who write blobs', False)}
    migration_lock = Lock('relstore_sweep', 'ACCESS EXCLUSIVE', 'everybody', True)

    def __init__(self, address: Address, keep_history: bool, read_only: bool):
        super().__init__(keep_history, read_only)
        self.rights, self.writers = RightsOnPostgreSQL(self), WritersOnPostgreSQL(self)
        self.pack_lock, self.chunks = PackLockOnPostgreSQL(self), ChunksOnPostgreSQL(self)
        self._address = address
        self._database = ''             # its name, when it is known
        self._spare: Session | None = None      # for the first connect(), because a new session takes the server long
        self.namespace = self._locks = ''
        self._use_schema(address.schema or 'public')

    def __str__(self) -> str:
        return f'Schema {self.namespace} of the PostgreSQL database {self._database}'

    def _use_schema(self, name: str, locks: str = '') -> None:
        """Make the final text of the statements.

        locks: how advisory locks are keyed: 'plain', by oid, as RelStorage does it, or 'hashed' with the schema. They
        belong to the database: storages in several schemas would wait for each other if their keys were plain.
        """
        locks = locks or ('plain' if name == 'public' else 'hashed')
        if (name, locks) == (self.namespace, self._locks):
            return
        self.namespace, self._locks = name, locks
        keeps, group = self.keep_history, self._address.group_commit
        self._tables = Tables(
            prefix='"' + name.replace('"', '""') + '".', seed=str(zlib.crc32(name.encode())),
            key='' if self._locks == 'plain' else '{relstore_key_2}',
            group='TRUE' if group else 'FALSE', durable='{wait_for_the_disk}' if group else '')
        self.sql = Statements('common.sql', 'postgresql.sql', keep_history=keeps, macros=self._tables,
                              placeholder='%s')

    def schema(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for filename in ('schema.sql', 'postgresql_schema.sql', 'postgresql_functions.sql'):
            texts |= read(filename, self.keep_history)
        if not self._tables['key']:
            del texts['relstore_key_2']
        return self.sql.expanded(texts)

    def migration_locks(self, statements: Sequence[str], relations: set[str]) -> list[str]:
        """Lock relstore_sweep, on which every transaction that has voted holds a lock."""
        return [self.sql.keep_votes_out] if 'relstore_sweep' in relations else []

    # Connect ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        session = self._address.first_session()
        try:
            self._use_schema(self._verified_schema(session))
            with self.rights.explained(session):
                self._use_schema(self.namespace, self._locks_there(session))
        except BaseException:
            session.close()
            raise
        self._spare = session

    def connect(self) -> Session:
        session, self._spare = self._spare or self._address.session(), None
        try:
            session.epoch = self.epoch(session)
            [[backend]] = session.all(self.sql.backend)
            direct = session.backend_pid == backend
            asked = self._address.prepared_statements
            wanted = direct if asked == 'auto' else asked == 'true'
            if wanted:
                session.prepare(self._often(session))
            session.pooled = not (direct or session.prepared)
        except BaseException:
            session.close()
            raise
        return session

    def _often(self, session: Session) -> list[Statement]:
        """Return the statements worth preparing. A commit gains nothing if parameters are part of EXECUTE's text."""
        sql = self.sql
        return [sql.load_at, sql.load_many, sql.chunks,
                *([sql.poll, sql.vote, sql.finish, sql.finish_with_blobs] if session.binds else [])]

    def prepare_schema(self, create: bool) -> None:
        with self.completion() as completion:
            completion.run(create)
            self.rights.refuse(completion.session, self.rights.purpose)
            if not self.read_only:
                self._advance_oids(completion.session)
            self._spare = completion.session

    def bare_session(self) -> Session:
        return self._address.first_session()

    @contextmanager
    def completion(self) -> Iterator[Completion]:
        session, self._spare = self._spare or self._address.first_session(), None
        try:
            if not self.read_only:
                self._check_settings(session)
            with self.rights.explained(session):
                yield Completion(self, session)
        finally:
            if session is not self._spare:
                session.close()

    def _locks_there(self, session: Session) -> str:
        """Return how locks are keyed: as relstore recorded it, or as RelStorage does it if that was there first."""
        relations = self.relations(session)
        if 'relstore_meta' in relations:
            return self.meta(session).get('locks', '')
        return 'plain' if 'object_state' in relations else ''

    def new_meta(self, relations: set[str]) -> dict[str, str]:
        return super().new_meta(relations) | {'locks': self._locks}

    def _check_settings(self, session: Session) -> None:
        """Refuse settings of a role or database that are wrong: a session cannot override them behind a pooler."""
        for name, value, needed in session.all(self.sql.wrong_settings):
            raise ConfigurationError(f'{name} is {value} for this role or database; set it to {needed} (ALTER ROLE, '
                                     'ALTER DATABASE), or set read-only true.')

    def _verified_schema(self, session: Session) -> str:
        [[version, self._database, first, text, is_standby]] = session.all(self.sql.server)
        if version < OLDEST_VERSION:
            raise ConfigurationError(f'The server is PostgreSQL {text}; relstore needs 13 or newer.')
        if not self.read_only and is_standby:
            raise ConfigurationError(f'The PostgreSQL server of the database {self._database} is a standby, and cannot '
                                     'be written; connect to the primary, or set read-only true.')
        schema = self._address.schema or first
        if schema is None:
            raise ConfigurationError('No schema of the search path exists; create one, or set the option schema.')
        if session.one(self.sql.schema_exists, (schema,)) is None:
            raise ConfigurationError(f'There is no schema "{schema}" in the PostgreSQL database {self._database}; '
                                     'create it (CREATE SCHEMA), or change the option schema.')
        refuse_strangers(self, session, schema)
        return schema

    def relations(self, session: Session) -> set[str]:
        return {name for name, in session.all(self.sql.relations, (self.namespace,))}

    def columns(self, session: Session) -> dict[str, dict[str, str]]:
        columns: dict[str, dict[str, str]] = {}
        for table, name, kind in session.all(self.sql.columns, (self.namespace,)):
            columns.setdefault(table, {})[name] = kind
        return columns

    @contextmanager
    def changing_schema(self, session: Session, patience: float) -> Iterator[None]:
        """Hold the lock in a transaction that does nothing else, also in pauses: one process at a time changes tables.

        It ends with its client; if it is waiting for a lock then, when that wait ends.
        """
        deadline = time.monotonic() + patience
        try:
            session.run(self.sql.begin)
            while session.all(self.sql.lock_schema) != [(True,)]:
                session.rollback()
                if time.monotonic() > deadline:
                    raise Unavailable(f'{self} is being changed by {self.lock_holders(session, SCHEMA_LOCK)}, which '
                                      f'has not ended within {patience:g} s.')
                time.sleep(SCHEMA_LOCK_PAUSE_SECONDS)
                session.run(self.sql.begin)
            session.all(self.sql.stay_in_transaction)
            yield
        finally:
            session.rollback()

    def run_ddl(self, session: Session, make: Callable[[], None]) -> None:
        session.run(self.sql.begin_try)
        try:
            session.all(self.sql.be_impatient, (milliseconds(TRY_SECONDS),))
            make()
            session.run(self.sql.commit)
        except (LockTimeout, Deadlock):
            session.run(self.sql.undo_try)
            raise

    def table_holders(self, session: Session, table: str, readers: bool) -> str:
        rows = session.all(self.sql.table_holders, (self.namespace, table, readers, str(TRY_SECONDS)))
        return '; '.join(holder(*row) if row[0] else 'a prepared transaction' for row in rows) or holder(0, '')

    def vote_holders(self, session: Session) -> str:
        [[key]] = session.all(self.sql.lock_key, (EVERYBODY,))
        return self.lock_holders(session, key)

    def lock_holders(self, session: Session, key: int) -> str:
        return ', '.join(holder(*row) for row in session.all(self.sql.lock_holders, (key,))) or holder(0, '')

    def renew_epoch(self, session: Session) -> None:
        session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    def lasting(self, epoch: str) -> str:
        """Leave out when the server was started."""
        return epoch.rpartition('.')[0]

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: Session, since: int, limit: int) -> PerhapsPolled:
        """Send one message, which begins the snapshot, too."""
        [[epoch, last, sweeps, stands, oids, tids]] = session.script(self.sql.poll, (since, limit))
        return epoch, last, sweeps, stands, list(zip(oids, tids, strict=True)) if oids else []

    def load_at(self, session: Session, oid: int, at: int) -> tuple[bytes | None, int, bytes | None] | None:
        if session.pooled:
            [[session.epoch, *row]] = session.all(self.sql.load_at_pooled, (oid, at))
            return tuple(row) if row[1] is not None else None
        return session.one(self.sql.load_at if session.prepared else self.sql.load_at_by_function, (oid, at))

    def load_many(
        self, session: Session, oids: Sequence[int], at: int, largest: int
    ) -> list[tuple[int, bytes | None, int, bytes | None]]:
        """Behind a pooler, read the epoch as well: the server may have crashed since the session began."""
        if not session.pooled:
            return session.all(self.sql.load_many, (self.oid_list(oids), at, largest, oids[0]))
        rows = session.all(self.sql.load_many_pooled, (self.oid_list(oids), at, largest, oids[0]))
        session.epoch = rows[0][0]
        return [row[1:] for row in rows if row[1] is not None]

    def load_serials(self, session: Session, revisions: Sequence[tuple[int, int]]) -> dict[int, bytes | None]:
        """Send one message for all."""
        return dict(session.all(self.sql.load_serials, (
            self.oid_list(oid for oid, _ in revisions), self.oid_list(tid for _, tid in revisions))))

    def oid_list(self, oids: Iterable[int]) -> str:
        return '{' + ','.join(map(str, oids)) + '}'

    def revision_list(self, revisions: Sequence[tuple[int, int]]) -> str:
        return '{' + ','.join(f'{{{oid},{tid}}}' for oid, tid in revisions) + '}'

    # Commit -------------------------------------------------------------------------------------------------------

    def new_oids(self, session: Session, count: int) -> list[int]:
        return [block for block, in session.all(self.sql.new_oids, (count,))]

    def reserve_oids(self, session: Session, oid: int) -> None:
        session.all(self.sql.reserve_oids, (-(-oid // 16),))     # rounded up

    def _advance_oids(self, session: Session) -> None:
        """Count past the objects that are there: a sequence behind them (restored separately, say) repeats oids."""
        row = session.one(self.sql.oid_ahead)
        if row is not None:
            self.reserve_oids(session, *row)

    # Pack ---------------------------------------------------------------------------------------------------------

    def revisions(self, session: Session, references: bool) -> Iterator[list[Row]]:
        """Read the table in its own order, by a cursor: in the order of oids, each of its pages is read many times."""
        session.script(self.sql.open_revisions if references else self.sql.open_revisions_only)
        while page := session.all(self.sql.next_revisions):
            yield page

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        oids, tids, refs = zip(*rows, strict=True)
        session.run(self.sql.save_references, (
            b''.join(refs), self.oid_list(oids), self.oid_list(tids), self.oid_list(starts(refs)),
            self.oid_list(map(len, refs))))

    def add_garbage(self, session: Session, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        session.run(self.sql.add_garbage, [self.oid_list(column) for column in zip(*rows, strict=True)])

    def lock_votes(self, session: Session, timeout: float) -> None:
        session.script(self.sql.lock_votes, (milliseconds(timeout),))

    def sweep(self, session: Session, pack_id: int, after: int, upto: int) -> Swept:
        """In two halves where the server has no room for the locks: each blob that goes takes one."""
        try:
            with explained(self):
                [row] = session.all(self.sql.sweep, (pack_id, after, upto))
            return Swept(*row)
        except OutOfLocks:
            if upto - after < 2:
                raise
        middle = (after + upto) // 2
        parts = [self.sweep(session, pack_id, *part) for part in ((after, middle), (middle, upto))]
        return Swept(*map(sum, zip(*parts, strict=True)))

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        [[count]] = session.all(self.sql.forget_transactions, (after, upto, named))
        return count

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: Session) -> int:
        [[count]] = session.all(self.sql.estimated_count)
        return count

    def size(self, session: Session) -> int:
        [[size]] = session.all(self.sql.size, (self.namespace,))
        return size

    def zap_all(self, session: Session) -> None:
        lock, *rest = self.sql.zap.parts

        def attempt() -> None:
            session.run(self.sql.begin)
            try:
                # Not lock_timeout, which would apply to each table anew.
                session.all(self.sql.end_after, (milliseconds(TRY_SECONDS),))
                try:
                    session.run(lock)
                except Unavailable as e:        # cancelled
                    raise e if session.broken else LockTimeout(str(e)) from e
                session.all(self.sql.end_after, ('0',))
                for statement in rest:
                    session.run(statement)
                self.renew_epoch(session)
                session.run(self.sql.commit)
            finally:
                session.rollback()

        try:
            in_tries(attempt, ZAP_PATIENCE_SECONDS, lambda e: None)
        except LockTimeout as e:
            raise LockTimeout(f'{self} cannot be emptied: object_state is in use by '
                              f'{self.table_holders(session, "object_state", True)}.') from e
