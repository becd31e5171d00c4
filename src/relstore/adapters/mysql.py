"""MySQL and MariaDB, through mysqlclient or PyMySQL.

What differs: each phase of a commit is one message of several statements, and the client does the comparing. Objects
are locked by their rows. What does not fit into one message (max_allowed_packet) is sent before, in pieces, into a
temporary table. Statements that change tables commit by themselves. No pooler gives a client another session in the
middle of its work, so a session can be set up once, when it begins.
"""
from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from relstore.adapters import mysql_oids
from relstore.adapters.base import Adapter, PerhapsPolled, Swept
from relstore.adapters.commits.mysql import MySQLCommit, connection, holder
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.mysql_epoch import EpochTable, made
from relstore.adapters.mysql_messages import LIST, lists, send, with_rows
from relstore.adapters.mysql_server import Server, look_at
from relstore.adapters.mysql_settings import settings
from relstore.adapters.numbers import SOME_OBJECTS
from relstore.adapters.packlock import PackLockOnMySQL
from relstore.adapters.patience import in_tries
from relstore.adapters.rights import PURPOSES, RightsOnMySQL
from relstore.adapters.statements import Statements, Tables, read
from relstore.errors import ConfigurationError, DatabaseError, Unavailable
from relstore.sessions.session import Row, Session
from relstore.sessions.statement import arranged

if TYPE_CHECKING:
    from relstore.adapters.addresses import MySQL as Address

AT_ONCE = ', ALGORITHM=INSTANT'
ZAP_PATIENCE_SECONDS = 30.0

log = logging.getLogger('relstore')

_CHANGED = re.compile(r'\s*(ALTER TABLE|UPDATE|INSERT INTO|DELETE FROM) (\S+)')


class MySQLAdapter(Adapter):
    """A database of a server of MySQL or MariaDB."""
    name = 'mysql'
    commit_type = MySQLCommit
    commits_ddl = True
    space = ('There is room for what is stored from now on. OPTIMIZE TABLE object_state gives it back to the disk; it '
             'needs as much again meanwhile.')
    largest_state = 2 ** 32 - 1     # the packet is smaller: see `stage`
    site_locks = {
        'refs': Lock('object_state', 'an exclusive metadata lock', 'everybody', True),
        'blob_chunk': Lock('object_state', 'an exclusive metadata lock, for the reference', 'everybody', True),
        'relstore_blob': Lock('object_state', 'an exclusive metadata lock, for the reference', 'everybody', True)}
    migration_lock = Lock('relstore_sweep', 'an exclusive metadata lock', 'everybody', True)

    rights: RightsOnMySQL

    def __init__(self, address: Address, keep_history: bool, read_only: bool, server: Server):
        super().__init__(keep_history, read_only)
        self.rights, self.pack_lock = RightsOnMySQL(self), PackLockOnMySQL(self)
        self._address, self._driver = address, address.driver
        self.epoch_table = EpochTable()
        self._spare: Session | None = None      # the session that has looked at the server, for the next connect()
        self._use_server(server)

    def __str__(self) -> str:
        return f'The {self.product} database {self._address.db}'

    def _use_server(self, server: Server) -> None:
        """Make the final text of the statements."""
        self.product, self.packet = server.product, server.packet
        self.logs_whole_rows = server.logs_whole_rows
        self.chunks.longest_row = self.packet // 2
        self.may_lag = server.in_cluster        # a node may not have applied what another one has committed
        keeps, maria = self.keep_history, server.product == 'MariaDB'
        self._tables = Tables(
            memory='MEMORY' if server.has_memory else 'InnoDB',
            epoch_value='{epoch_written_or_none}' if self.read_only else '{epoch_written}',
            in_order='{write_in_order};' if server.in_cluster else '',
            chunks_ahead='relstore_chunk' if server.logs_whole_rows else 'blob_chunk',
            make_chunks='{make_chunks_copied}' if server.logs_whole_rows else '{make_chunks_moved}',
            take_chunks='{take_chunks_copied}' if server.logs_whole_rows else '{take_chunks_moved}',
            settings=settings(server.variables), reserved=frozenset(),
            **{f'may_{p}': ';\n'.join(sql for _, sql in self.rights.trials(p)) for p in PURPOSES})
        overlays = ('mysql.sql', 'mariadb.sql') if maria else ('mysql.sql',)
        self.sql = Statements('common.sql', *overlays, keep_history=keeps, macros=self._tables, placeholder='%s')

    def schema(self) -> dict[str, str]:
        return self.sql.expanded(self.raw_schema())

    def migration_locks(self, statements: Sequence[str], relations: set[str]) -> list[str]:
        """Do first what can fail: a change cannot be undone here, and others see it at once.

        These locks wait for transactions that have voted, and for views. They last until changing_schema ends.
        """
        changed = [match.groups() for match in map(_CHANGED.match, statements) if match]
        tables = {'relstore_sweep'} & relations | {name for _, name in changed}
        altered = dict.fromkeys(name for how, name in changed if how == 'ALTER TABLE')
        # In no SQL file, because they have the names of tables. The others change nothing.
        return ['LOCK TABLES ' + ', '.join(f'{name} WRITE' for name in sorted(tables)),
                *(f"ALTER TABLE {name} COMMENT ''" for name in altered)]

    def raw_schema(self) -> Mapping[str, str]:
        return read('mysql_schema.sql', self.keep_history)

    # Connect ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        session = self._begun()
        try:
            server = look_at(session, self.sql, self.read_only)
            self._use_server(server)
            session.results(self.sql.begin_session)     # again, with the settings of this server
        except BaseException:
            session.close()
            raise
        self._spare = session
        if not (server.has_memory or self.read_only):
            log.warning('%s has no tables in memory; where a crash of the server loses commits, because '
                        'innodb_flush_log_at_trx_commit is not 1, processes that go on running will not know.', self)

    def _begun(self) -> Session:
        session = self._address.first_session()
        try:
            session.results(self.sql.begin_session)
        except BaseException:
            session.close()
            raise
        return session

    def connect(self) -> Session:
        session, self._spare = self._spare or self._address.session(), None
        try:
            *_, [[epoch]], rows = send(session, [
                (self.sql.begin_session, ()), (self.sql.epoch, ()), (self.sql.made, ())])
            table = self.epoch_table
            table.value, table.made = epoch, made(rows)
            session.epoch = f'{epoch}.{table.made}' if epoch else self.epoch(session)
        except BaseException:
            session.close()
            raise
        return session

    def prepare_schema(self, create: bool) -> None:
        with self.completion() as completion:
            session = completion.session
            completion.run(create)
            self._check_engines(session)
            self.rights.refuse(session, self.rights.purpose)
            if not self.read_only:
                mysql_oids.catch_up(session, self.sql)
                self._forget_commits(session)

    def bare_session(self) -> Session:
        return self._begun()

    @contextmanager
    def completion(self) -> Iterator[Completion]:
        session, self._spare = self._spare or self._begun(), None
        try:
            with self.rights.explained(session):
                yield Completion(self, session)
        finally:
            session.close()

    def rehearse(self, session: Session, statements: Iterable[str]) -> None:
        """Try the rights first, because what has begun cannot be undone here."""
        text = '\n'.join(statements)
        for words, sql in (('CREATE TABLE', self.sql.may_create_table), ('REFERENCES', self.sql.may_refer),
                           ('CREATE TABLE', self.sql.may_fill), ('CREATE VIEW', self.sql.may_create_view)):
            with suppress(DatabaseError):       # it fails on purpose; NotAllowed is none of these
                if words in text:
                    session.run(sql)

    def _check_engines(self, session: Session) -> None:
        ours = self.schema().keys() - {'new_oid', 'relstore_epoch'}     # no transaction changes these
        for table, engine in session.all(self.sql.engines):
            if table in ours:
                raise ConfigurationError(f'{self} keeps the table {table} in {engine}; convert it (ALTER TABLE {table} '
                                         'ENGINE=InnoDB).')

    @contextmanager
    def changing_schema(self, session: Session, patience: float) -> Iterator[None]:
        """Nothing can be undone here. So everything can be repeated: see mysql_schema.sql."""
        [[alone]] = session.all(self.sql.lock_schema, (math.ceil(patience),))
        if not alone:
            raise Unavailable(f'{self} is being changed by another process, which has not ended within {patience:g} s.')
        session.run(self.sql.be_impatient)
        try:
            yield
        finally:
            if not session.broken:
                session.results(self.sql.unlock_schema)

    def define(self, session: Session, statement: str) -> None:
        """Change a table in place, if the server can; else let it copy the table."""
        try:
            session.run(statement)
        except DatabaseError as e:
            if AT_ONCE not in statement:
                raise
            size = f'{self.size(session):,}'
            log.warning('%s, with %s bytes, copies a table for this: %s (%s)', self, size, statement, e)
            session.run(statement.replace(AT_ONCE, ''))

    def table_holders(self, session: Session, table: str, readers: bool) -> str:
        """Return who may be in the way, if this user may not see who is, or MariaDB lacks its METADATA_LOCK_INFO."""
        for sql, parameters in (self.sql.table_holders, (table,)), (self.sql.open_transactions, ()):
            with suppress(ConfigurationError, DatabaseError):
                rows = session.all(sql, parameters)
                if rows:
                    return ' or '.join(map(connection, rows))
        return 'another connection'

    def vote_holders(self, session: Session) -> str:
        return holder(self, session, SOME_OBJECTS)

    def epoch(self, session: Session) -> str:
        """Return the epoch; an empty table yields one row, without a value."""
        [[epoch]] = session.all(self.sql.epoch)
        if epoch is None:
            self.renew_epoch(session)
            [[epoch]] = session.all(self.sql.epoch)
        return f'{epoch}.{made(session.all(self.sql.made))}'

    def lasting(self, epoch: str) -> str:
        """Nothing of it lasts: the value is gone when the server is stopped, and a server may get another name."""
        return ''

    def is_learnt_late(self, old: str, new: str) -> bool:
        """If the table was created anew with the old value, each process notices at its next look."""
        return old.rpartition('.')[0] == new.rpartition('.')[0]

    def renew_epoch(self, session: Session) -> None:
        session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    def end_epoch(self, session: Session, epoch: str) -> None:
        """Let the next poll look when the table was created: else the vote after it might be the first, and refuse."""
        self.epoch_table.look_soon()
        super().end_epoch(session, epoch)

    def _forget_commits(self, session: Session) -> None:
        try:
            old = [key for key, in session.script(self.sql.old_commits)]
            if old:
                session.results(self.sql.forget_commits, (self.oid_list(old),))
        finally:
            session.rollback()

    # Read ---------------------------------------------------------------------------------------------------------

    def _poll(self, session: Session, since: int, limit: int) -> PerhapsPolled:
        """Send one message, which begins the snapshot, too."""
        table = self.epoch_table
        look = table.is_time_to_look()
        sql = f'{self.sql.made};\n{self.sql.poll}' if look else self.sql.poll
        results = self._whole(session, sql, arranged(self.sql.poll, (since, limit)), 1)
        rows = results[-1]
        if look:
            table.see(results[0])
        if not rows:
            return None, 0, 0, 0, []
        epoch, last, sweeps, stands = rows[0][:4]
        if epoch != table.value:        # whoever gave it that value has looked when it was made, and so does everybody
            table.value = epoch
            if not look:
                table.see(session.all(self.sql.made))
        return (epoch and f'{epoch}.{table.made}', last, sweeps, stands,
                [(oid, tid) for *_, oid, tid in rows if oid is not None])

    def begin_snapshot(self, session: Session) -> int:
        *_, [[tid]] = self._whole(session, f'{self.sql.begin_snapshot};\n{self.sql.last_tid}', (), 0)
        return tid

    def _whole(self, session: Session, sql: str, parameters: Sequence[Any], column: int) -> list[list[Row]]:
        """Run statements, the last of which reads from a new view that lacks nothing; return the rows of each.

        MariaDB creates a view by looking through the open transactions one by one. Some commit meanwhile, so a view may
        show a transaction without the one before it. But it shows all that an earlier view showed, and all before that.
        So nothing is missing if the newest tid, in this column, was seen just before; else this is repeated.
        """
        if self.product == 'MySQL':
            return session.results(sql, parameters)
        while True:
            [[seen]], *results = session.results(f'{self.sql.last_tid};\n{sql}', parameters)
            if not results[-1] or results[-1][0][column] == seen:
                return results
            session.rollback()

    def load_many(
        self, session: Session, oids: Sequence[int], at: int, largest: int
    ) -> list[tuple[int, bytes | None, int, bytes | None]]:
        """Load current revisions first, which nearly always suffice; then older ones, one by one, in one message.

        A single statement would be a subquery for each object, or would read all revisions.
        """
        rows = session.all(self.sql.load_many, (self.oid_list(oids), at, largest, oids[0]))
        changed = [oid for oid, _, tid, _ in rows if tid is None]
        if changed:
            rows = [row for row in rows if row[2] is not None]
            rows += chain.from_iterable(send(session, [
                (self.sql.load_older, (oid, at, largest, oids[0])) for oid in changed]))
        return rows

    def load_serials(self, session: Session, revisions: Sequence[tuple[int, int]]) -> dict[int, bytes | None]:
        """Send few messages for all."""
        results = send(session, [(self.sql.load_serial, revision) for revision in revisions])
        return {oid: rows[0][0] for (oid, _), rows in zip(revisions, results, strict=True) if rows}

    # Commit -------------------------------------------------------------------------------------------------------

    def new_oids(self, session: Session, count: int) -> list[int]:
        return mysql_oids.new_oids(session, self.sql, count)

    def reserve_oids(self, session: Session, oid: int) -> None:
        mysql_oids.reserve_oids(session, self.sql, oid)

    # Pack ---------------------------------------------------------------------------------------------------------

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        for some in lists(rows, LIST):
            session.run(with_rows(self.sql.save_references, len(some)), list(chain.from_iterable(some)))

    def add_garbage(self, session: Session, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        for some in lists(rows, LIST):
            session.run(with_rows(self.sql.add_garbage, len(some)), list(chain.from_iterable(some)))

    def changes(self, session: Session, tid: int, oid: int, size: int) -> list[Row]:
        """Leave out what is newer than an earlier view has shown: some of it may be missing, see `_whole`."""
        newest = self.last_tid(session)
        return [row for row in super().changes(session, tid, oid, size) if row[1] <= newest]

    def lock_votes(self, session: Session, timeout: float) -> None:
        """Do not wait at all if it is for less than a second, which the server cannot do: others would wait behind."""
        if timeout < 1:
            session.results(self.sql.lock_votes_at_once)
        else:
            session.results(self.sql.lock_votes, (math.ceil(timeout),))

    def conflict_with_commits(self, session: Session) -> None:
        """In a cluster, transactions may have voted on another server, and their locks are not seen here.

        All commits of a cluster write one row. So if neither has seen the other, one of the two fails.
        """
        if self.may_lag:
            session.run(self.sql.write_in_order)

    def sweep(self, session: Session, pack_id: int, after: int, upto: int) -> Swept:
        results = session.results(self.sql.sweep, (pack_id, after, upto))
        [row] = [rows[0] for rows in results if rows]
        return Swept(*row)

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        results = session.results(self.sql.forget_transactions, (after, upto, named))
        [[count]] = [rows[0] for rows in results if rows]
        return count

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: Session) -> int:
        [[count]] = session.script(self.sql.estimated_count)
        return count

    def size(self, session: Session) -> int:
        """Return what the server's statistics say: within a tenth, some seconds old."""
        [[size]] = session.script(self.sql.size)
        return size

    def zap_all(self, session: Session) -> None:
        """Do the epoch and the counter of oids last: they are not part of the transaction."""
        try:
            session.results(self.sql.zap)
        finally:
            session.rollback()
        session.run(self.sql.be_impatient)
        in_tries(lambda: session.run(self.sql.restart_oids), ZAP_PATIENCE_SECONDS, lambda e: None)
        session.run(self.sql.forget_epoch)
        self.renew_epoch(session)
