"""PostgreSQL, through psycopg2 or psycopg 3.

What differs: each phase of a commit is one message, to one function on the server (postgresql_functions.sql).
Objects are locked by advisory locks keyed by oid. Every statement names its schema, so nothing depends on the
session's search path.
"""
import secrets
import time
import zlib
from collections.abc import Iterable, Sequence

from relstore.adapters.base import Adapter, Ballot, Metadata, Revision, Verdict
from relstore.adapters.drivers import find_driver
from relstore.adapters.statements import Statements, Tables, read
from relstore.errors import ConfigurationError, DatabaseError, Disconnected, Unavailable
from relstore.session import Session

OLDEST = 130000                 # xid8 and pg_current_xact_id() came with 13
FINISH_TIMEOUT = 600.0          # failing after the vote would tear a transaction over several databases
LONG_WAY = 100_000              # blocks of 16 oids: a tenth of a second of nextval
ORPHAN_PATIENCE = 5.0           # seconds a backend whose client is gone may still wait before it is ended


class PostgreSQL(Adapter):
    """A database reached by `dsn`, in the schema `schema` (default: the first of the search path).

    driver: psycopg2 or psycopg.
    """
    name = 'postgresql'

    def __init__(self, dsn: str, driver: str = 'psycopg2', schema: str | None = None):
        self._dsn, self._asked_schema = dsn, schema
        self._driver = find_driver(driver, 'psycopg2', 'psycopg')
        self._database = ''             # its name, once it is known

    def __str__(self) -> str:
        return f'Schema {self._schema} of the PostgreSQL database {self._database}'

    def configure(self, keep_history: bool, read_only: bool) -> None:
        super().configure(keep_history, read_only)
        self._use_schema(self._asked_schema or 'public')

    def _use_schema(self, name: str) -> None:
        """Make the final text of the statements."""
        self._schema = name
        keeps = self.keep_history
        self._tables = Tables(
            prefix='"' + name.replace('"', '""') + '".', id='BIGINT', bytes='BYTEA', chunk='OID', bool='BOOLEAN',
            no='FALSE', md5='CHAR(32)', text='TEXT', unlogged='UNLOGGED', seed=str(zlib.crc32(name.encode())),
            # Advisory locks are per database. The plain oid is RelStorage's key, so it belongs to RelStorage's schema.
            key='' if name == 'public' else '{relstore_key_1}',
            # The row's value is as random as it can be; the table's own oid differs after a restore from a dump.
            epoch="SELECT e.value || '.' || e.tableoid FROM {relstore_epoch} e",
            oids='(SELECT unnest(?::bigint[]) AS zoid)',
            current='{current_object}' if keeps else '{object_state}',
            last='{transaction}' if keeps else '{object_state}',
            insert_transaction=(
                'INSERT INTO {transaction} (tid, username, description, extension)\n'
                '        VALUES (v_tid, p_user, p_description, p_extension);' if keeps else ''))
        self.sql = Statements('common.sql', 'postgresql.sql', keep_history=keeps, macros=self._tables,
                              placeholder='%s')

    def schema(self) -> dict[str, str]:
        texts = {}
        for filename in ('schema.sql', 'postgresql_schema.sql', 'postgresql_functions.sql'):
            texts |= read(filename, self.keep_history)
        if not self._tables['key']:
            del texts['relstore_key_1']
        return {name: text.format_map(self._tables) for name, text in texts.items()}

    # Connect ------------------------------------------------------------------------------------------------------

    def connect(self) -> Session:
        session = Session(self._driver, self._dsn)
        try:
            session.epoch = self.epoch(session)
            [[backend]] = session.all(self.sql.backend)
            if session.can_prepare(backend):
                session.run(self.sql.prepare)
                session.prepared = True
        except BaseException:
            session.close()
            raise
        return session

    def prepare_schema(self, create: bool) -> None:
        session = self._first_session()
        try:
            self._use_schema(self._verified_schema(session))
            try:
                self.complete_schema(session, create)
                if not self.read_only:
                    self._check_rights(session)
                    self._advance_oids(session)
            except (ConfigurationError, DatabaseError) as e:
                if e.__cause__ is None:
                    raise
                raise ConfigurationError(f'{self} cannot be used: {e}; connect as a user with rights to create and '
                                         'write its tables, or set read-only true to read them alone.') from e
        finally:
            session.close()

    def _check_rights(self, session: Session) -> None:
        [[may_write]] = session.all(self.sql.may_write)
        if not may_write:
            raise ConfigurationError(f'{self} cannot be written by this user; connect as one who has the rights, or '
                                     'set read-only true.')

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
        [[version, self._database, first, text]] = session.all(self.sql.server)
        if version < OLDEST:
            raise ConfigurationError(f'The server is PostgreSQL {text}; relstore needs 13 or newer.')
        schema = self._asked_schema or first
        if schema is None:
            raise ConfigurationError('No schema of the search path exists; create one, or set the option schema.')
        if session.one(self.sql.schema_exists, (schema,)) is None:
            raise ConfigurationError(f'There is no schema "{schema}" in the PostgreSQL database {self._database}; '
                                     'create it (CREATE SCHEMA), or change the option schema.')
        return schema

    def relations(self, session: Session) -> set[str]:
        return {name for name, in session.all(self.sql.relations, (self._schema,) * 3)}

    def begin_ddl(self, session: Session) -> None:
        session.run('BEGIN')
        session.run(self.sql.lock_schema)

    def renew_epoch(self, session: Session) -> None:
        session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: Session, since: int, limit: int) -> tuple[str | None, int, list[tuple[int, int]]]:
        """One message, also where a snapshot begins with it."""
        [[epoch, last, oids, tids]] = session.script(self.sql.poll, (since, limit))
        return epoch, last, list(zip(oids, tids, strict=True)) if oids else []

    def load_at(self, session: Session, oid: int, at: int) -> Revision | None:
        """Prepared where that is safe: a quarter less time again than through the function."""
        return session.one(self.sql.execute_load_at if session.prepared else self.sql.load_at, (oid, at))

    def oid_list(self, oids: Iterable[int]) -> str:
        return '{' + ','.join(map(str, oids)) + '}'

    # Commit -------------------------------------------------------------------------------------------------------

    def vote(self, session: Session, ballot: Ballot) -> Verdict:
        rows = session.script(self.sql.vote, (
            ballot.epoch, _milliseconds(ballot.timeout), ballot.restored_tid, self.oid_list(ballot.locks),
            self.oid_list(oid for oid, _ in ballot.bases), self.oid_list(tid for _, tid in ballot.bases),
            self.oid_list(oid for oid, _ in ballot.reads), self.oid_list(tid for _, tid in ballot.reads)))
        verdict = Verdict()
        for kind, oid, tid, state in rows:
            if kind == 'epoch':
                verdict.epoch_changed = True
            elif kind == 'read':
                verdict.outdated.append((oid, tid))
            elif kind == 'locked':
                verdict.locked = oid
            elif kind == 'late':
                verdict.last_tid = tid
            elif kind == 'conflict':
                verdict.conflicts.append((oid, tid, state))
            elif kind == 'since':
                since = tid
            else:
                backend, transaction = oid, tid
                verdict.ticket = [backend, transaction, since, ballot.epoch]
        return verdict

    def stage(self, session: Session, batches: Iterable) -> Iterable:
        """A commit of one batch goes into the message of finish; of more, all go ahead into a temporary table."""
        batches = iter(batches)
        first, second = next(batches, []), next(batches, None)
        if second is None:
            return [first]
        for batch in (first, second, *batches):
            session.all(self.sql.stage, _arrays(batch))
        return []

    def finish(self, session: Session, ticket: list, tid: int | None, metadata: Metadata, batches: Iterable) -> int:
        batch = next(iter(batches), None)
        [[tid]] = session.script(self.sql.finish, (
            _milliseconds(FINISH_TIMEOUT), tid, metadata.user, metadata.description, metadata.extension,
            batch is None, *_arrays(batch or [])))
        return int(tid)

    def outcome(self, session: Session, ticket: list, oids: Sequence[int]) -> int | None:
        """A lost connection proves nothing: the backend may be waiting for the commit lock still, and commit later.

        So wait until the server knows, ending the orphan if it takes long. Then a commit of our own makes what we
        answer durable before we answer it.
        """
        backend, transaction, since, epoch = ticket
        crashed = session.epoch != epoch
        if crashed:
            # Recovery gives numbers again that left no trace in the log. Commits of the new epoch have later ones
            # than the epoch itself.
            [[first]] = session.all(self.sql.epoch_transaction)
            if (transaction - first) % 2 ** 32 < 2 ** 31:
                return None
        patience = time.monotonic() + ORPHAN_PATIENCE
        while True:
            [[status]] = session.all(self.sql.transaction_status, (str(transaction),))
            if status != 'in progress':
                break
            if time.monotonic() > patience:
                session.all(self.sql.terminate, (backend,))
                patience = time.monotonic() + ORPHAN_PATIENCE
            time.sleep(0.01)
        session.all(self.sql.make_durable)
        if status != 'committed':
            return None
        [[tid]] = session.all(self.sql.tid_of, (since, str(transaction)))
        if tid is None and self.keep_history:
            return None     # the number is that of something else after a crash
        if tid is None and crashed:
            raise Unavailable('the server has crashed since, and the objects were changed again or not at all')
        if tid is None:
            # History-free: others have overwritten all of it already. Any tid between serves; the next poll corrects.
            tid = min([current for oid in oids if (current := self.current_tid(session, oid))], default=since + 1) - 1
        return tid

    def new_oids(self, session: Session, count: int) -> list[int]:
        return [block for block, in session.all(self.sql.new_oids, (count,))]

    def reserve_oids(self, session: Session, oid: int) -> None:
        """Move the sequence forward, never back under another process that takes oids at the same time.

        So a short way is gone by nextval, and setval is for a way so long that nobody overtakes it meanwhile.
        """
        block = -(-oid // 16)       # rounded up
        session.all(self.sql.jump_to_block, (block, block - LONG_WAY))
        [[last]] = session.all(self.sql.last_block)
        if last < block:
            session.all(self.sql.skip_blocks, (block - last,))

    def _advance_oids(self, session: Session) -> None:
        """A sequence behind its objects (restored separately, say) would hand out oids that are taken."""
        [[used]] = session.all(self.sql.max_oid)
        self.reserve_oids(session, used)

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: Session) -> int:
        [[count]] = session.all(self.sql.estimated_count)
        return count

    def size(self, session: Session) -> int:
        [[size]] = session.all(self.sql.size, (self._schema,))
        return size

    def zap_all(self, session: Session) -> None:
        session.run('BEGIN')
        try:
            for statement in self.sql.zap.split(';\n'):
                session.run(statement)
            self.renew_epoch(session)
            session.run('COMMIT')
        finally:
            session.rollback()


def _milliseconds(seconds: float) -> str:
    return str(max(int(seconds * 1000), 1))     # 0 would mean: wait for ever


def _arrays(batch: Sequence) -> tuple:
    """Return a batch as the arrays that relstore_rows_1 takes: PostgreSQL's own notation is parsed fastest."""
    starts, refs_starts, states, refs = [], [], [], []
    at = refs_at = 0
    for row, state in batch:
        starts.append(at)
        refs_starts.append(refs_at)
        states.append(state or b'')
        refs.append(row.refs or b'')
        at += len(states[-1])
        refs_at += len(refs[-1])
    rows = [row for row, _ in batch]
    return (_array(row.oid for row in rows), _array(starts), _array(row.size for row in rows),
            _array(row.md5 for row in rows), _array(row.data_tid for row in rows), _array(refs_starts),
            _array(None if row.refs is None else len(row.refs) for row in rows), b''.join(states), b''.join(refs))


def _array(values: Iterable) -> str:
    return '{' + ','.join('NULL' if value is None else str(value) for value in values) + '}'


