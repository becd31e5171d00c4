"""PostgreSQL, through psycopg 3 or psycopg2.

What differs: each phase of a commit is one message, to one function on the server (postgresql_functions.sql).
Objects are locked by advisory locks keyed by oid. Every statement names its schema, so nothing depends on the
session's search path.
"""
from __future__ import annotations

import re
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from relstore.adapters import rights
from relstore.adapters.base import EVERYBODY, Adapter, Ballot, Metadata, PerhapsPolled, Ticket, Verdict, lock_timeout
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.ownership import refuse_strangers
from relstore.adapters.patience import TRY, in_tries
from relstore.adapters.rights import Right
from relstore.adapters.statements import Statements, Tables, read
from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    OutcomeUnknown,
    OutOfLocks,
    StorageError,
    Unavailable,
)
from relstore.sessions.drivers import LOCKS, find_driver
from relstore.sessions.session import Row, Session

if TYPE_CHECKING:
    from relstore.spool import Batch

OLDEST = 130000                 # xid8 and pg_current_xact_id() came with 13
FINISH_TIMEOUT = 600.0          # failing after the vote would tear a transaction over several databases
ORPHAN_DEADLINE = 60.0          # seconds after which nobody knows
ORPHAN_PATIENCE = 5.0           # seconds a backend whose client is gone may still wait before it is ended
ZAP_PATIENCE = 30.0             # seconds
PACK_LOCK_PATIENCE = 1.0        # seconds
SCHEMA_LOCK_PAUSE = 0.05        # seconds
PREPARED_STATEMENTS = ('auto', 'true', 'false')

# Keys of advisory locks, besides those of base. The latter as it is: nobody knows yet how others are keyed.
PACK_LOCK, SCHEMA_LOCK = -2, -4
# Whether what a transaction stands on is gone, with history and without: see proof.py.
LOST = {
    True: '(p_at > (SELECT s.packed_to FROM {relstore_sweep} s)\n'
          '        AND NOT EXISTS (SELECT FROM {transaction} t WHERE t.tid = p_at))',
    False: 'EXISTS (SELECT FROM unnest(p_known_oids, p_known_tids) k (zoid, tid)\n'
           '                   JOIN {object_state} c ON c.zoid = k.zoid WHERE c.tid < k.tid)'}

# Of binary arrays: the type's oid, the form of an element, which is its length and itself, and that length; a text is
# an md5. NULL is a length alone.
ELEMENTS = {'bigint': (20, 'iq', 8), 'integer': (23, 'ii', 4), 'text': (25, 'i32s', 32)}
NULL = struct.pack('>i', -1)
KEPT = 1000             # elements: the longest whose format may be kept


class PostgreSQL(Adapter):
    """A database reached by `dsn`, in the schema `schema` (default: the first of the search path).

    driver: psycopg (version 3), psycopg2, or 'auto', which is: psycopg where it is installed.
    prepared_statements: 'true', 'false', or 'auto', which is: not where a pooler may stand between.
    group_commit: let one write of the server's log to the disk serve several commits. Others may then see a commit some
    milliseconds before it is acknowledged, and durable.
    """
    name = 'postgresql'
    space = ('VACUUM, which the server runs by itself, makes room for what is stored from now on. VACUUM FULL '
             'object_state gives it back to the disk, and nobody can read meanwhile; so does pg_repack, and everybody '
             'can.')
    # A parameter is sent as text, twice as long, and the server takes 10^9 bytes.
    largest_state = 250_000_000
    # One message takes a tenth less time than pieces that go through a temporary table.
    message_size = 8 * 1024 * 1024
    # A default server has room for some 12,000 locks, of all transactions together.
    most_locks = 2000
    finish_waits = True
    site_locks = {
        'refs': Lock('object_state', 'ACCESS EXCLUSIVE', 'everybody', True),
        'blob_chunk': Lock('object_state', 'SHARE ROW EXCLUSIVE', 'those who write', False),
        'relstore_unlink_chunk_3': Lock('blob_chunk', 'ACCESS EXCLUSIVE, where an older relstore made the trigger',
                                        'those who use blobs', False),
        'blob_chunk_delete': Lock('blob_chunk', 'SHARE ROW EXCLUSIVE', 'those who write blobs', False)}

    def __init__(self, dsn: str, driver: str = 'auto', schema: str | None = None,
                 prepared_statements: str = 'auto', group_commit: bool = True):
        self._dsn, self._asked_schema = dsn, schema
        self._driver = find_driver(driver, 'psycopg', 'psycopg2')
        if prepared_statements not in PREPARED_STATEMENTS:
            raise ConfigurationError(f'prepared-statements is {prepared_statements!r}: allowed is '
                                     f'{", ".join(PREPARED_STATEMENTS)}.')
        self._prepared_statements = prepared_statements
        self._group_commit = group_commit
        self._database = ''             # its name, once it is known
        self._spare: Session | None = None      # what prepare_schema has used, for the first to connect

    def __str__(self) -> str:
        return f'Schema {self._schema} of the PostgreSQL database {self._database}'

    def configure(self, keep_history: bool, read_only: bool) -> None:
        super().configure(keep_history, read_only)
        self._schema = self._locks = ''
        self._use_schema(self._asked_schema or 'public')

    def _use_schema(self, name: str, locks: str = '') -> None:
        """Make the final text of the statements.

        locks: how advisory locks are keyed, 'plain' (by oid, as RelStorage does it) or 'hashed' with the schema. They
        are per database, so storages in several schemas would wait for each other, had they plain ones.
        """
        locks = locks or ('plain' if name == 'public' else 'hashed')
        if (name, locks) == (self._schema, self._locks):
            return
        self._schema, self._locks = name, locks
        keeps = self.keep_history
        self._tables = Tables(
            prefix='"' + name.replace('"', '""') + '".', id='BIGINT', integer='BIGINT', bytes='BYTEA', chunk='OID',
            bool='BOOLEAN', no='FALSE', md5='CHAR(32)', text='TEXT', unlogged='UNLOGGED',
            seed=str(zlib.crc32(name.encode())),
            key='' if self._locks == 'plain' else '{relstore_key_2}',
            # The row's value is as random as it can be, but a dump carries it. It does not carry the table's own oid
            # and which transaction wrote the row. A copy of all files does, but to put one in the place of another the
            # server has to be started.
            epoch="SELECT e.value || '.' || e.tableoid::text || '.' || e.xmin::text || '.'\n"
                  '    || (extract(epoch FROM pg_catalog.pg_postmaster_start_time())::double precision\n'
                  '        * 1000000::double precision)::bigint::text FROM {relstore_epoch} e',
            oids='(SELECT pg_catalog.unnest(?::bigint[]) AS zoid)',
            revisions='(SELECT * FROM unnest(?::bigint[], ?::bigint[]) AS r (zoid, tid))',
            current='{current_object}' if keeps else '{object_state}',
            last='{transaction}' if keeps else '{object_state}',
            lost=LOST[keeps], group='TRUE' if self._group_commit else 'FALSE',
            durable=", pg_catalog.pg_logical_emit_message(true, 'relstore', '')::text" if self._group_commit else '',
            insert_transaction=(
                'INSERT INTO {transaction} (tid, packed, username, description, extension)\n'
                '        VALUES (v_tid, p_packed, p_user, p_description, p_extension);' if keeps else ''))
        self.sql = Statements('common.sql', 'postgresql.sql', keep_history=keeps, macros=self._tables,
                              placeholder='%s')

    def schema(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for filename in ('schema.sql', 'postgresql_schema.sql', 'postgresql_functions.sql'):
            texts |= read(filename, self.keep_history)
        if not self._tables['key']:
            del texts['relstore_key_2']
        return {name: text.format_map(self._tables) for name, text in texts.items()}

    # Connect ------------------------------------------------------------------------------------------------------

    def connect(self) -> Session:
        session, self._spare = self._spare or Session(self._driver, self._dsn), None
        try:
            session.epoch = self.epoch(session)
            [[backend]] = session.all(self.sql.backend)
            direct = session.backend_pid == backend
            wanted = direct if self._prepared_statements == 'auto' else self._prepared_statements == 'true'
            if wanted:
                session.prepare(self._often(session))
            session.pooled = not (direct or session.prepared)
        except BaseException:
            session.close()
            raise
        return session

    def _often(self, session: Session) -> list[str]:
        """Return what is worth preparing. A commit gains nothing by it where the parameters are in EXECUTE's text."""
        return [self.sql.load_at, self.sql.load_many,
                *([self.sql.poll, self.sql.vote, self.sql.finish] if session.binds else [])]

    def prepare_schema(self, create: bool) -> None:
        """The session is kept for the first to connect: for the server to begin one takes longer than all this."""
        with self.completion() as completion:
            completion.run(create)
            rights.refuse(self, completion.session, self.purpose)
            if not self.read_only:
                self._advance_oids(completion.session)
            self._spare = completion.session

    @contextmanager
    def completion(self) -> Iterator[Completion]:
        session = self._first_session()
        try:
            self._use_schema(self._verified_schema(session))
            if not self.read_only:
                self._check_settings(session)
            try:
                self._use_schema(self._schema, self._locks_there(session))
                yield Completion(self, session)
            except (ConfigurationError, DatabaseError) as e:
                if e.__cause__ is None:
                    raise
                raise rights.not_usable(self, session, e) from e
        finally:
            if session is not self._spare:
                session.close()

    def _locks_there(self, session: Session) -> str:
        """How locks are keyed was decided when relstore came; where RelStorage was before, by RelStorage."""
        relations = self.relations(session)
        if 'relstore_meta' in relations:
            return self.meta(session).get('locks', '')
        return 'plain' if 'object_state' in relations else ''

    def new_meta(self, relations: set[str]) -> dict[str, str]:
        return super().new_meta(relations) | {'locks': self._locks}

    def _check_settings(self, session: Session) -> None:
        """What is set for a role or a database cannot be set anew for a session that a pooler may swap."""
        for name, value, needed in session.all(self.sql.wrong_settings):
            raise ConfigurationError(f'{name} is {value} for this role or database; set it to {needed} (ALTER ROLE, '
                                     'ALTER DATABASE), or set read-only true.')

    def rights(self, purpose: str) -> list[Right]:
        return rights.of_postgresql(purpose, self.schema(), self.keep_history)

    def grants(self, database: str, user: str, owner: str) -> str:
        needed = {purpose: self.rights(purpose) for purpose in (rights.CREATE, *rights.PURPOSES)}
        return rights.grants_on_postgresql(needed, database, quoted(self._schema), user, owner)

    def missing_rights(self, session: Session, purpose: str) -> list[Right]:
        """In one statement, from the catalogue, which everybody may read."""
        wanted = [right for each in rights.up_to(purpose) for right in self.rights(each)]
        columns = [[right.kind for right in wanted], [right.name for right in wanted],
                   [right.privilege for right in wanted]]
        return [wanted[number - 1] for number, in session.all(self.sql.missing_rights, (
            self._schema, *('{' + ','.join(f'"{value}"' for value in column) + '}' for column in columns)))]

    def _first_session(self) -> Session:
        self._driver.load()
        try:
            return Session(self._driver, self._dsn)
        except (ConfigurationError, DatabaseError, Disconnected) as e:
            if e.__cause__ is None:
                raise
            raise ConfigurationError(f'PostgreSQL cannot be reached with this dsn: {e}; check that the server runs, '
                                     'and the host, port, dbname, user and password in the dsn.') from e

    def _verified_schema(self, session: Session) -> str:
        [[version, self._database, first, text, is_standby]] = session.all(self.sql.server)
        if version < OLDEST:
            raise ConfigurationError(f'The server is PostgreSQL {text}; relstore needs 13 or newer.')
        if not self.read_only and is_standby:
            raise ConfigurationError(f'The PostgreSQL server of the database {self._database} is a standby, and cannot '
                                     'be written; connect to the primary, or set read-only true.')
        schema = self._asked_schema or first
        if schema is None:
            raise ConfigurationError('No schema of the search path exists; create one, or set the option schema.')
        if session.one(self.sql.schema_exists, (schema,)) is None:
            raise ConfigurationError(f'There is no schema "{schema}" in the PostgreSQL database {self._database}; '
                                     'create it (CREATE SCHEMA), or change the option schema.')
        refuse_strangers(self, session, schema)
        return schema

    def relations(self, session: Session) -> set[str]:
        return {name for name, in session.all(self.sql.relations, (self._schema,) * 3)}

    def columns(self, session: Session) -> dict[str, dict[str, str]]:
        columns: dict[str, dict[str, str]] = {}
        for table, name, kind in session.all(self.sql.columns, (self._schema,)):
            columns.setdefault(table, {})[name] = kind
        return columns

    @contextmanager
    def changing_schema(self, session: Session, patience: float) -> Iterator[None]:
        """In a transaction that has the lock and nothing else, also in pauses: one process at a time makes others wait.

        It ends with its client: where it waits for a lock, when it is tired of that.
        """
        deadline = time.monotonic() + patience
        try:
            session.run('BEGIN')
            while session.all(self.sql.lock_schema) != [(True,)]:
                session.run('ROLLBACK')
                if time.monotonic() > deadline:
                    raise Unavailable(f'{self} is being changed by {self._lock_holders(session, SCHEMA_LOCK)}, which '
                                      f'has not ended within {patience:g} s.')
                time.sleep(SCHEMA_LOCK_PAUSE)
                session.run('BEGIN')
            session.all(self.sql.stay_in_transaction)
            yield
        finally:
            session.rollback()

    def run_ddl(self, session: Session, make: Callable[[], None]) -> None:
        session.run('SAVEPOINT relstore_try')
        try:
            session.all(self.sql.be_impatient, (_milliseconds(TRY),))
            make()
            session.run('COMMIT')
        except (LockTimeout, Deadlock):
            session.run('ROLLBACK TO SAVEPOINT relstore_try')
            raise

    def table_holders(self, session: Session, table: str, readers: bool) -> str:
        rows = session.all(self.sql.table_holders, (self._schema, table, readers, str(TRY)))
        return '; '.join(_holder(*row) if row[0] else 'a prepared transaction' for row in rows) or _holder(0, '')

    def vote_holders(self, session: Session) -> str:
        [[key]] = session.all(self.sql.lock_key, (EVERYBODY,))
        return self._lock_holders(session, key)

    def finish_holders(self, session: Session, ticket: Ticket) -> str:
        backend, *_ = ticket
        return ', '.join(_holder(*row) if row[0] else 'a prepared transaction'
                         for row in session.all(self.sql.blockers, (backend,)))

    def _lock_holders(self, session: Session, key: int) -> str:
        return ', '.join(_holder(*row) for row in session.all(self.sql.lock_holders, (key, key))) or _holder(0, '')

    def renew_epoch(self, session: Session) -> None:
        session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    def lasting(self, epoch: str) -> str:
        """Without the time when the server was started."""
        return epoch.rpartition('.')[0]

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: Session, since: int, limit: int) -> PerhapsPolled:
        """One message, also where a snapshot begins with it."""
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
        """Through a pooler with the epoch: its server may have crashed since the session began."""
        if not session.pooled:
            return session.all(self.sql.load_many, (self.oid_list(oids), at, largest, oids[0]))
        rows = session.all(self.sql.load_many_pooled, (self.oid_list(oids), at, largest, oids[0]))
        session.epoch = rows[0][0]
        return [row[1:] for row in rows if row[1] is not None]

    def load_serials(self, session: Session, revisions: Sequence[tuple[int, int]]) -> dict[int, bytes | None]:
        """In one message."""
        return dict(session.all(self.sql.load_serials, (
            self.oid_list(oid for oid, _ in revisions), self.oid_list(tid for _, tid in revisions))))

    def oid_list(self, oids: Iterable[int]) -> str:
        return '{' + ','.join(map(str, oids)) + '}'

    def revision_list(self, revisions: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        return self.oid_list(oid for oid, _ in revisions), self.oid_list(tid for _, tid in revisions)

    # Commit -------------------------------------------------------------------------------------------------------

    def send_ahead(self, session: Session, batches: Iterable[Batch]) -> bool:
        session.run(self.sql.begin_vote)
        for batch in batches:
            session.all(self.sql.stage, _arrays(batch, session.binds))
        return True

    def send_again(self, session: Session, batches: Iterable[Batch]) -> None:
        for batch in batches:
            session.run(self.sql.unstage, (self.oid_list(row.oid for row, _ in batch),))
            session.all(self.sql.stage, _arrays(batch, session.binds))

    def vote(self, session: Session, ballot: Ballot) -> Verdict:
        """Alone only where RelStorage does not write: it knows nothing of the lock that keeps all others out."""
        alone = ballot.alone and self.writes_alone(session)
        array = _binary_array if session.binds else _array
        lists = ballot.locks, *_columns(ballot.bases), *_columns(ballot.reads), *_columns(ballot.known)
        try:
            rows = session.script(self.sql.vote_staged if session.in_transaction else self.sql.vote, (
                ballot.epoch, _milliseconds(ballot.timeout), ballot.restored_tid, alone, ballot.at,
                *(array('bigint', values) for values in lists)))
        except OutOfLocks as e:
            raise self._out_of_locks(session, len(ballot.locks) + len(ballot.reads), alone) from e
        if alone and not self.writes_alone(session):
            raise Unavailable(f'{self} has just been opened to RelStorage as a writer.')
        verdict = Verdict()
        for kind, oid, tid, state in rows:
            if kind == 'epoch':
                verdict.epoch_changed = True
            elif kind == 'read':
                verdict.outdated.append((oid, tid))
            elif kind == 'locked':
                verdict.locked = oid
            elif kind == 'busy':
                raise lock_timeout(oid, ballot.timeout, _holder(tid, bytes(state or b'').decode()))
            elif kind == 'waited':
                verdict.waits.append((oid, tid / 1e6))
            elif kind == 'late':
                verdict.last_tid = tid
            elif kind == 'conflict':
                verdict.conflicts.append((oid, tid, state))
            elif kind == 'since':
                since, verdict.sweeps = tid, oid
            elif kind == 'sweeping':
                verdict.see(oid)
            else:
                backend, transaction = oid, tid
                verdict.ticket = [backend, transaction, since, ballot.epoch]
        return verdict

    def _out_of_locks(self, session: Session, count: int, alone: bool) -> StorageError:
        session.rollback()
        [[most]] = session.all(self.sql.max_locks)
        message = (f'A transaction that locks {count:,} objects met a full lock table: raise {LOCKS} of the server, '
                   f'{most}')
        if alone or self.writes_alone(session):
            return OutOfLocks(f'{message}.')
        message += (', or, if no RelStorage process writes to this database any more, say so with "relstore writers", '
                    'and large transactions will need no such room.')
        # Trying again helps, if at all, where others have locked most of what is locked.
        return (ConfigurationError if count > self.most_locks else OutOfLocks)(message)

    def stage(self, session: Session, ticket: Ticket, tid: int | None, metadata: Metadata,
              batches: Iterator[Batch]) -> Iterable[Batch]:
        """What is small goes into the message of finish. What has become too large by resolving conflicts is sent."""
        first, second = next(batches, []), next(batches, None)
        if second is None:
            return [first]
        for batch in chain((first, second), batches):
            session.all(self.sql.stage, _arrays(batch, session.binds))
        return []

    def finish(self, session: Session, ticket: Ticket, tid: int | None, metadata: Metadata,
               batches: Iterable[Batch]) -> tuple[int, float]:
        batch = next(iter(batches), None)
        _, transaction, *_ = ticket
        [[answer, *_]] = session.script(self.sql.finish, (
            transaction, _milliseconds(FINISH_TIMEOUT), tid, metadata.packed, metadata.user, metadata.description,
            metadata.extension, batch is None, *_arrays(batch or [], session.binds)))
        tid, waited = answer.split()
        return int(tid), int(waited) / 1e6

    def outcome(self, session: Session, ticket: Ticket, oids: Sequence[int]) -> int | None:
        """A lost connection proves nothing: the backend may be waiting for the commit lock still, and commit later.

        So wait until the server knows, ending the orphan if it takes long. Then a commit of our own makes what we
        answer durable before we answer it. A crash on the way makes all that was learned void.
        """
        backend, transaction, since, epoch = ticket
        # Asked now, and again: a pooler's connection outlives its server.
        now = self.epoch(session)
        crashed = self.lasting(now) != self.lasting(epoch)
        if now != epoch and self._was_lost(session, transaction, since, oids, crashed):
            return None
        deadline = time.monotonic() + ORPHAN_DEADLINE
        patience = time.monotonic() + ORPHAN_PATIENCE
        while True:
            [[still, status]] = session.all(self.sql.transaction_status, (str(transaction), now))
            if not still:
                return self.outcome(session, ticket, oids)
            if status != 'in progress':
                break
            if time.monotonic() > deadline:
                raise OutcomeUnknown(f'the server process {backend} is still busy with it')
            if time.monotonic() > patience:
                session.all(self.sql.terminate, (backend,))
                patience = time.monotonic() + ORPHAN_PATIENCE
            time.sleep(0.01)
        session.all(self.sql.make_durable)
        if self.epoch(session) != now:
            return self.outcome(session, ticket, oids)
        if status != 'committed':
            return None
        [[tid]] = session.all(self.sql.tid_of, (since, str(transaction)))
        if crashed and (tid is None or not all(self.load_serial(session, oid, tid) for oid in oids)):
            raise OutcomeUnknown('the server has crashed since, and the objects were changed again')
        if tid is None:
            # History-free: others have overwritten all of it already. Any tid between serves; the next poll corrects.
            tid = min([current for oid in oids if (current := self.current_tid(session, oid))], default=since + 1) - 1
        return tid

    def _was_lost(self, session: Session, transaction: int, since: int, oids: Sequence[int], crashed: bool) -> bool:
        """Whether a crash or a restored copy has certainly undone it: numbers that left no trace are given again."""
        [[first]] = session.all(self.sql.epoch_transaction)     # given after the crash: what was durable has less
        return (crashed and (transaction - first) % 2 ** 32 < 2 ** 31
                or any((self.current_tid(session, oid) or 0) <= since for oid in oids))

    def new_oids(self, session: Session, count: int) -> list[int]:
        return [block for block, in session.all(self.sql.new_oids, (count,))]

    def reserve_oids(self, session: Session, oid: int) -> None:
        session.all(self.sql.reserve_oids, (-(-oid // 16),))     # rounded up

    def _advance_oids(self, session: Session) -> None:
        """A sequence behind its objects (restored separately, say) would hand out oids that are taken."""
        row = session.one(self.sql.oid_ahead)
        if row is not None:
            self.reserve_oids(session, *row)

    # Pack ---------------------------------------------------------------------------------------------------------

    def lock_pack(self, session: Session) -> str | None:
        """A lock of the session: one that a pooler may give another server at any time cannot hold it."""
        [[backend]] = session.all(self.sql.backend)
        if session.backend_pid != backend:
            raise ConfigurationError('A pooler stands between this process and the server, and a pack needs a '
                                     'connection of its own; pack with a dsn that leads to the server itself.')
        # A session that was closed just now may have it for a moment more.
        deadline = time.monotonic() + PACK_LOCK_PATIENCE
        while session.all(self.sql.lock_pack) != [(True,)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        else:
            return None
        [[key]] = session.all(self.sql.lock_key, (PACK_LOCK,))
        return self._lock_holders(session, key)

    def revisions(self, session: Session, references: bool) -> Iterator[list[Row]]:
        """In the order of the table, through a cursor: by oid every page of the table would be read many times."""
        session.script(self.sql.open_revisions if references else self.sql.open_revisions_only)
        while page := session.all(self.sql.next_revisions):
            yield page

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        oids, tids, refs = zip(*rows, strict=True)
        session.run(self.sql.save_references, (
            b''.join(refs), self.oid_list(oids), self.oid_list(tids), self.oid_list(_starts(refs)),
            self.oid_list(map(len, refs))))

    def add_garbage(self, session: Session, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        session.run(self.sql.add_garbage, [self.oid_list(column) for column in zip(*rows, strict=True)])

    def lock_votes(self, session: Session, timeout: float) -> None:
        session.script(self.sql.lock_votes, (_milliseconds(timeout),))

    def sweep(self, session: Session, generation: int, after: int, upto: int) -> tuple[int, int]:
        [row] = session.all(self.sql.sweep, (generation, after, upto))
        return row

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        [[count]] = session.all(self.sql.forget_transactions, (after, upto, named))
        return count

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: Session) -> int:
        [[count]] = session.all(self.sql.estimated_count)
        return count

    def size(self, session: Session) -> int:
        [[size]] = session.all(self.sql.size, (self._schema,))
        return size

    def writers(self) -> str:
        """Return who may write to the database, one of WRITERS."""
        with closing(self._admin_session()) as session:
            return self.meta(session).get('writers', 'any')

    def _make_index_for_relstorage(self, session: Session) -> None:
        """Nobody waits for it, but it for all transactions: it is to end when nobody wants it any more.

        One that was interrupted (a statement_timeout is enough) is there, and of use to nobody.
        """
        if session.all(self.sql.backend) == [(session.backend_pid,)]:       # no pooler, which would keep the settings
            try:
                session.all(self.sql.end_with_client)
            except DatabaseError:       # before PostgreSQL 14, and on systems that do not tell
                session.all(self.sql.end_soon)
        if session.all(self.sql.broken_index):
            session.run(self.sql.drop_broken_index)
        super()._make_index_for_relstorage(session)

    def _admin_session(self) -> Session:
        """A user of the command gives no more than a dsn, so nothing is known yet."""
        session = self._first_session()
        try:
            self._use_schema(self._verified_schema(session))
            if 'relstore_meta' not in self.relations(session):
                raise ConfigurationError(f'{self} was never opened by relstore: start the site with relstore once.')
            self._use_schema(self._schema, self._locks_there(session))
        except BaseException:
            session.close()
            raise
        return session

    def zap_all(self, session: Session) -> None:
        lock, *rest = self.sql.zap.split(';\n')

        def attempt() -> None:
            session.run('BEGIN')
            try:
                session.all(self.sql.end_after, (_milliseconds(TRY),))      # lock_timeout is for each of the tables
                try:
                    session.run(lock)
                except Unavailable as e:        # cancelled
                    raise e if session.broken else LockTimeout(str(e)) from e
                session.all(self.sql.end_after, ('0',))
                for statement in rest:
                    session.run(statement)
                self.renew_epoch(session)
                session.run('COMMIT')
            finally:
                session.rollback()

        try:
            in_tries(attempt, ZAP_PATIENCE, lambda e: None)
        except LockTimeout as e:
            raise LockTimeout(f'{self} cannot be emptied: object_state is in use by '
                              f'{self.table_holders(session, "object_state", True)}.') from e


def quoted(name: str) -> str:
    """Return a name as SQL has it."""
    return name if re.fullmatch('[a-z_][a-z_0-9]*', name) else '"' + name.replace('"', '""') + '"'


def _holder(backend: int, who: str) -> str:
    return f'the server process {backend} ({who})' if backend else 'a transaction that has just ended'


def _milliseconds(seconds: float) -> str:
    return str(max(int(seconds * 1000), 1))     # 0 would mean: wait for ever


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[int], Sequence[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _arrays(batch: Batch, binary: bool) -> tuple[Any, ...]:
    """Return a batch as the parameters of relstore_rows_1."""
    rows = [row for row, _ in batch]
    states = [state or b'' for _, state in batch]
    refs = [row.refs or b'' for row in rows]
    array: Callable[[str, Sequence[Any]], str | bytes] = _binary_array if binary else _array
    refs_sizes = [None if row.refs is None else len(row.refs) for row in rows]
    return (
        array('bigint', [row.oid for row in rows]),
        array('integer', _starts(states)), array('integer', [row.size for row in rows]),
        array('text', _known([row.md5 for row in rows])), array('bigint', _known([row.data_tid for row in rows])),
        array('integer', _starts(refs)), array('integer', refs_sizes),
        b''.join(states), b''.join(refs))


def _known(values: list[Any]) -> list[Any]:
    """Return the column, or nothing where it is NULL throughout: so is what an array lacks beside a longer one."""
    return values if values.count(None) < len(values) else []


def _starts(values: Sequence[bytes]) -> list[int]:
    """Return where each begins when they are joined."""
    return list(accumulate(map(len, values[:-1]), initial=0)) if values else []


def _array(kind: str, values: Sequence[Any]) -> str:
    """Return numbers, md5s and None as an array; all at once, for a commit of many objects makes many."""
    return '{' + ','.join(map(str, values)).replace('None', 'NULL') + '}'


def _binary_array(kind: str, values: Sequence[Any]) -> bytes:
    """Return the same in the form that the server need not parse: a header, then the length of each, and itself."""
    number, form, size = ELEMENTS[kind]
    # Dimensions; is there a NULL; the type; how many, and what the first is called.
    if not values:
        return struct.pack('>iii', 0, 0, number)
    header = 1, None in values, number, len(values), 1
    if kind == 'text':
        values = [value and value.encode() for value in values]
    if header[1]:
        element = struct.Struct(f'>{form}')
        return struct.pack('>iiiii', *header) + b''.join(
            [NULL if value is None else element.pack(size, value) for value in values])
    # All in one call, because a commit of many objects makes many: half as long as an element at a time.
    elements = [size] * (2 * len(values))
    elements[1::2] = values
    form = f'>iiiii{form * len(values)}'
    if len(values) > KEPT:      # struct.pack keeps what it makes of a hundred formats, some 60 bytes an element
        return struct.Struct(form).pack(*header, *elements)
    return struct.pack(form, *header, *elements)
