"""MySQL and MariaDB, through mysqlclient or PyMySQL.

What differs: each phase of a commit is one message of several statements, and the client compares. Objects are locked
by their rows. What does not fit into one message (max_allowed_packet) goes ahead, in pieces, into a temporary table.
Statements that define tables commit by themselves. Between client and server there is no pooler that would swap
sessions in the middle of a transaction, so a session may be told something when it begins.
"""
from __future__ import annotations

import logging
import math
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from relstore.adapters import rights
from relstore.adapters.base import (
    COMMIT_LOCK,
    SOME_OBJECTS,
    TOGETHER,
    Adapter,
    Ballot,
    Metadata,
    Pack,
    PerhapsPolled,
    Ticket,
    Verdict,
    lock_timeout,
)
from relstore.adapters.completion import Completion, Lock
from relstore.adapters.mysql_settings import settings
from relstore.adapters.patience import in_tries
from relstore.adapters.rights import Right
from relstore.adapters.statements import Statements, Tables, read
from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    Missing,
    NotAllowed,
    OutcomeUnknown,
    StorageError,
    Unavailable,
)
from relstore.sessions.drivers import TLS_MODES, find_driver
from relstore.sessions.session import Result, Row, Session

if TYPE_CHECKING:
    from relstore.spool import Batch

OLDEST_MYSQL, OLDEST_MARIADB = (8, 0), (10, 6)      # SKIP LOCKED; and JSON_TABLE came with them
SMALLEST_PACKET = 1 << 20
FINISH_TIMEOUT = 600            # failing after the vote would tear a transaction over several databases
ORPHAN_DEADLINE = 60.0          # seconds after which nobody knows
SEEN_PATIENCE, SEEN = 1.0, 5    # seconds in which what is committed is surely seen, and of how many objects
ORPHAN_PATIENCE = 5             # seconds a connection whose client is gone may still wait before it is ended
# MariaDB makes a subquery of a list of a thousand, and MySQL scans the table for one too long: rows would be locked in
# any order, or all of them.
LIST = 500
AT_ONCE = ', ALGORITHM=INSTANT'
ZAP_PATIENCE = 30.0             # seconds
COUNTING_TOGETHER = 100         # processes: each time they deadlock, one of them gets through
STATEMENTS = 40                 # of one message, where there are many: together they stay below the smallest packet
LOOK_EVERY = 1.0                # seconds between two looks at when a table was made
SHORTEST_WAIT = 1000            # microseconds to get a lock that are taken for waiting
TEXT = 65_535                   # bytes of user, description, extension: the columns are BLOBs
OVERHEAD = 20_000               # bytes of a message of finish besides its rows, roughly
ROW_OVERHEAD = 300              # bytes of a row besides its state and references: at most

Statement = tuple[str, Sequence[Any]]

# What stands for the locks that are no single object's, by what their rows are called.
NO_OBJECTS = {'created': SOME_OBJECTS, 'commit': COMMIT_LOCK}
log = logging.getLogger('relstore')


class MySQL(Adapter):
    """The database `db` of a MySQL or MariaDB server.

    driver: mysqlclient or pymysql. ssl_mode: one of drivers.TLS_MODES, or None: verify_identity with ssl_ca, required
    with ssl_cert, else preferred. host and the others: as the driver takes them; where they are None, what the file
    read_default_file says, or else the driver's defaults.
    """
    name = 'mysql'
    space = ('There is room for what is stored from now on. OPTIMIZE TABLE object_state gives it back to the disk; it '
             'needs as much again meanwhile.')
    largest_state = 2 ** 32 - 1     # the packet is smaller: see `stage`
    finish_waits = True
    site_locks = {
        'refs': Lock('object_state', 'an exclusive metadata lock', 'everybody', True),
        'blob_chunk': Lock('object_state', 'an exclusive metadata lock, for the reference', 'everybody', True)}

    def __init__(self, db: str, *, host: str | None = None, port: int | None = None, unix_socket: str | None = None,
                 user: str | None = None, passwd: str | None = None, driver: str = 'mysqlclient',
                 charset: str = 'utf8mb4', connect_timeout: int = 10, compress: bool = False,
                 read_default_file: str | None = None, read_default_group: str | None = None,
                 ssl_mode: str | None = None, ssl_ca: str | None = None, ssl_cert: str | None = None,
                 ssl_key: str | None = None):
        self._db = db
        self._driver = find_driver(driver, 'mysqlclient', 'pymysql')
        if charset == 'binary':
            raise ConfigurationError('charset binary is none for the drivers; leave charset out.')
        if compress and driver == 'pymysql':
            raise ConfigurationError('PyMySQL cannot compress; leave compress out, or set driver mysqlclient.')
        if read_default_file is not None and not os.access(read_default_file, os.R_OK):
            raise ConfigurationError(f'read_default_file is {read_default_file}, which cannot be read.')
        if ssl_mode is not None and ssl_mode not in TLS_MODES:
            raise ConfigurationError(f'ssl_mode is {ssl_mode!r}: allowed is {", ".join(TLS_MODES)}.')
        if ssl_ca and ssl_mode not in (None, 'verify_identity'):
            raise ConfigurationError(f'ssl_ca has no effect with ssl_mode {ssl_mode}; leave one of them out.')
        settings = {
            'database': db, 'host': host, 'port': port, 'unix_socket': unix_socket, 'user': user, 'password': passwd,
            'charset': charset, 'connect_timeout': connect_timeout, 'compress': compress or None,
            'read_default_file': read_default_file, 'read_default_group': read_default_group,
            'ssl_mode': ssl_mode, 'ssl_ca': ssl_ca, 'ssl_cert': ssl_cert, 'ssl_key': ssl_key}
        self._settings = {name: value for name, value in settings.items() if value is not None}

    def __str__(self) -> str:
        return f'The {self._product} database {self._db}'

    def configure(self, keep_history: bool, read_only: bool) -> None:
        super().configure(keep_history, read_only)
        # The table of the epoch, as polls know it: when it was made, and what is in it. And when to look at it again.
        self._made, self._value, self._next_look = '', '', 0.0
        self.use_server('MySQL')

    def use_server(self, product: str, has_memory: bool = True, in_cluster: bool = False,
                   variables: Collection[str] = ()) -> None:
        """Make the final text of the statements, for 'MySQL' or 'MariaDB'.

        has_memory: whether it allows tables that a restart empties.
        in_cluster: whether other servers may write to the same database.
        variables: the names of those it has, once they are known.
        """
        self._product, self._in_cluster = product, in_cluster
        keeps, maria = self.keep_history, product == 'MariaDB'
        server = "CONCAT_WS('.', @@hostname, @@port, @@server_id)" if maria else '@@server_uuid'
        value = '(SELECT value FROM {relstore_epoch})'
        if self.read_only:      # a replica that was restarted, and which nobody may write, has none
            value = f"coalesce({value}, '')"
        self._tables = Tables(
            id='BIGINT', integer='SIGNED', bytes='LONGBLOB', chunk='LONGBLOB', bool='BOOLEAN', no='FALSE',
            md5='CHAR(32) CHARACTER SET ascii', text='VARCHAR(100) CHARACTER SET ascii',
            memory='MEMORY' if has_memory else 'InnoDB',
            epoch=f"SELECT CONCAT({value}, '.', {server})",
            oids="JSON_TABLE(?, '$[*]' COLUMNS (zoid BIGINT PATH '$'))",
            revisions="JSON_TABLE(?, '$[*]' COLUMNS (zoid BIGINT PATH '$[0]', tid BIGINT PATH '$[1]'))",
            current='{current_object}' if keeps else '{object_state}',
            last='{transaction}' if keeps else '{object_state}',
            # MySQL shows statistics of yesterday, unless it is told not to.
            in_order=(
                'INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES (0, 0, 0, UTC_TIMESTAMP(6))\n'
                'ON DUPLICATE KEY UPDATE vote = vote + 1, voted = VALUES(voted);' if in_cluster else ''),
            settings=settings(variables), reserved=frozenset(),
            **{f'may_{purpose}': ';\n'.join(sql for _, sql in self._trials(purpose)) for purpose in rights.PURPOSES},
            fresh='' if maria else 'SET SESSION information_schema_stats_expiry = 0;')
        overlays = ('mysql.sql', 'mariadb.sql') if maria else ('mysql.sql',)
        self.sql = Statements('common.sql', *overlays, keep_history=keeps, macros=self._tables, placeholder='%s')

    @property
    def may_lag(self) -> bool:
        """A node of a cluster may not have applied yet what another has committed."""
        return self._in_cluster

    def schema(self) -> dict[str, str]:
        return {name: text.format_map(self._tables) for name, text in self._raw_schema().items()}

    def _raw_schema(self) -> Mapping[str, str]:
        return read('mysql_schema.sql', self.keep_history)

    # Connect ------------------------------------------------------------------------------------------------------

    def connect(self) -> Session:
        session = Session(self._driver, self._settings)
        try:
            *_, [[epoch]], made = self._send(session, [
                (self.sql.begin_session, ()), (self.sql.epoch, ()), (self.sql.made, ())])
            self._value, self._made = epoch, _made(made)
            session.epoch = f'{epoch}.{self._made}' if epoch else self.epoch(session)
        except BaseException:
            session.close()
            raise
        return session

    def prepare_schema(self, create: bool) -> None:
        with self.completion() as completion:
            session = completion.session
            completion.run(create)
            self._check_engines(session)
            rights.refuse(self, session, self.purpose)
            if not self.read_only:
                self._advance_oids(session)
                self._forget_commits(session)

    @contextmanager
    def completion(self) -> Iterator[Completion]:
        session = self._first_session()
        try:
            self._look_at_server(session)
            try:
                yield Completion(self, session)
            except (ConfigurationError, DatabaseError) as e:
                if e.__cause__ is None:
                    raise
                raise rights.not_usable(self, session, e) from e
        finally:
            session.close()

    def _first_session(self) -> Session:
        self._driver.load()
        try:
            return Session(self._driver, self._settings)
        except (ConfigurationError, DatabaseError, Disconnected) as e:
            if e.__cause__ is None:
                raise
            where = self._settings.get('unix_socket') or self._settings.get('host', 'localhost')
            raise ConfigurationError(f'The database {self._db} cannot be reached at {where}: {e}; check that the '
                                     'server runs, and db, host, port, unix_socket, user and passwd.') from e

    def _look_at_server(self, session: Session) -> None:
        """Learn what the server is and how it is set up, or refuse it."""
        session.results(self.sql.begin_session)
        server: dict[str, Any] = dict(session.all(self.sql.server))
        version = server['version']
        product, oldest = ('MariaDB', OLDEST_MARIADB) if 'MariaDB' in version else ('MySQL', OLDEST_MYSQL)
        if tuple(map(int, version.split('.')[:2])) < oldest:
            raise ConfigurationError(f'The server is {product} {version}; relstore needs {oldest[0]}.{oldest[1]} or '
                                     'newer.')
        disabled = server.get('disabled_storage_engines', '').upper()
        in_group = bool(server.get('group_replication_group_name'))
        enforced = server.get('enforce_storage_engine') or 'InnoDB'
        if enforced.upper() != 'INNODB' and not self.read_only:
            raise ConfigurationError(f'enforce_storage_engine of the {product} server is {enforced}; set it to InnoDB, '
                                     'or unset it.')
        has_memory = 'MEMORY' not in disabled and not in_group and not server.get('enforce_storage_engine')
        self.use_server(product, has_memory, variables=server, in_cluster=server.get('wsrep_on') == 'ON' or (
            in_group and server['group_replication_single_primary_mode'] == 'OFF'))
        session.results(self.sql.begin_session)     # now with what only some servers have
        if session.one(self.sql.has_innodb) is None:
            raise ConfigurationError(f'The {product} server has no InnoDB; start it with InnoDB enabled.')
        self._packet = int(server['max_allowed_packet'])
        if self._packet < SMALLEST_PACKET:
            raise ConfigurationError(f'max_allowed_packet of the {product} server is {self._packet:,}; set it to '
                                     f'{SMALLEST_PACKET:,} at least, and to more than the largest object.')
        if self.read_only:
            return
        if {server['read_only'], server['innodb_read_only']} != {'OFF'}:       # MariaDB 12 knows several ways
            raise ConfigurationError(f'The {product} server is read-only; connect to one that may be written, or set '
                                     'read-only true.')
        if server['log_bin'] == 'ON' and server['binlog_format'] == 'STATEMENT':
            raise ConfigurationError(f'binlog_format of the {product} server is STATEMENT, which cannot log what '
                                     'relstore does; set it to ROW or MIXED.')
        if not has_memory:
            log.warning('%s has no tables in memory; where a crash of the server loses commits, because '
                        'innodb_flush_log_at_trx_commit is not 1, processes that go on running will not know.', self)

    def rights(self, purpose: str) -> list[Right]:
        return rights.of_mysql(purpose, self._raw_schema(), self.keep_history, self._product)

    def grants(self, database: str, user: str, owner: str) -> str:
        needed = {purpose: self.rights(purpose) for purpose in (rights.CREATE, *rights.PURPOSES)}
        return rights.grants_on_mysql(needed, database, user, owner)

    def missing_rights(self, session: Session, purpose: str) -> list[Right]:
        """In one message where none is; else one by one. What is not there is left out."""
        purposes, missing = rights.up_to(purpose), []
        with suppress(NotAllowed, Missing):
            session.results(';\n'.join(getattr(self.sql, f'may_{each}') for each in purposes))
            return []
        for right, sql in chain.from_iterable(map(self._trials, purposes)):
            try:
                session.results(sql)
            except NotAllowed:
                missing.append(right)
            except Missing:
                pass
        return list(dict.fromkeys(missing))

    def _trials(self, purpose: str) -> list[tuple[Right, str]]:
        return rights.trials(self.rights(purpose), self._raw_schema())

    def rehearse(self, session: Session, statements: Iterable[str]) -> None:
        """Nothing can be undone here, so what lacks a right is not to begin."""
        text = '\n'.join(statements)
        for words, sql in (('CREATE TABLE', self.sql.may_create_table), ('REFERENCES', self.sql.may_refer),
                           ('CREATE TABLE', self.sql.may_fill), ('CREATE VIEW', self.sql.may_create_view)):
            with suppress(DatabaseError):       # as it is to
                if words in text:
                    session.run(sql)

    def _check_engines(self, session: Session) -> None:
        ours = self.schema().keys() - {'new_oid', 'relstore_epoch'}     # no transaction changes these
        for table, engine in session.all(self.sql.engines):
            if table in ours:
                raise ConfigurationError(f'{self} keeps the table {table} in {engine}; convert it (ALTER TABLE {table} '
                                         'ENGINE=InnoDB).')

    def relations(self, session: Session) -> set[str]:
        """relstore_meta counts when it is filled: its rows are the last that are written. So does relstore_sweep."""
        relations = super().relations(session)
        if 'relstore_sweep' in relations and not session.all(self.sql.sweep_state):
            relations.remove('relstore_sweep')
        if 'relstore_meta' in relations and not self.new_meta(relations).keys() <= self.meta(session).keys():
            relations.remove('relstore_meta')
        return relations

    @contextmanager
    def changing_schema(self, session: Session, patience: float) -> Iterator[None]:
        """Nothing can be undone here, so all of it can be repeated: see mysql_schema.sql."""
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
        """At once, if the server can; else it copies the table."""
        try:
            session.run(statement)
        except DatabaseError as e:
            if AT_ONCE not in statement:
                raise
            size = f'{self.size(session):,}'
            log.warning('%s, with %s bytes, copies a table for this: %s (%s)', self, size, statement, e)
            session.run(statement.replace(AT_ONCE, ''))

    def table_holders(self, session: Session, table: str, readers: bool) -> str:
        """Or who may be in the way: not everybody may see it, and MariaDB tells it by its plugin METADATA_LOCK_INFO."""
        for sql, parameters in (self.sql.table_holders, (table,)), (self.sql.open_transactions, ()):
            with suppress(ConfigurationError, DatabaseError):
                rows = session.all(sql, parameters)
                if rows:
                    return ' or '.join(map(_connection, rows))
        return 'another connection'

    def vote_holders(self, session: Session) -> str:
        return self._holder(session, SOME_OBJECTS)

    def finish_holders(self, session: Session, ticket: Ticket) -> str:
        """Or what it waits for: who holds a lock not everybody may see, but each user what his own connections do."""
        _, _, connection, epoch, _ = ticket
        if _server(session.epoch) != _server(epoch):
            return ''       # there the number is somebody else's
        who = 'another transaction'
        try:
            holders = session.all(self.sql.blockers, (connection,))
        except NotAllowed:
            holders, who = [], 'a transaction that this user may not see'
        if holders:
            return ', '.join(_connection(row) if row[0] else 'a prepared transaction' for row in holders)
        with suppress(DatabaseError):       # MySQL 9.7 cannot show what a connection does that is sending bytes
            for state, in session.all(self.sql.waits_for, (connection,)):
                return f'what the server calls "{state}"' if state else who
        return ''

    def epoch(self, session: Session) -> str:
        """There is always a row: without a value, where the table is empty."""
        [[epoch]] = session.all(self.sql.epoch)
        if epoch is None:
            self.renew_epoch(session)
            [[epoch]] = session.all(self.sql.epoch)
        return f'{epoch}.{_made(session.all(self.sql.made))}'

    def lasting(self, epoch: str) -> str:
        """Nothing of it does: the value is gone when the server is stopped, and a server may get another name."""
        return ''

    def is_learnt_late(self, old: str, new: str) -> bool:
        """A table that was made anew, with the old value in it, is seen by each process at its next look."""
        return old.rpartition('.')[0] == new.rpartition('.')[0]

    def renew_epoch(self, session: Session) -> None:
        session.run(self.sql.new_epoch, (secrets.token_hex(8),))

    def end_epoch(self, session: Session, epoch: str) -> None:
        """The next poll looks at when the table was made: else the vote after it might be the first to, and refuse."""
        self._next_look = 0.0
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
        """One message, also where a snapshot begins with it."""
        look = self._is_time_to_look()
        sql = f'{self.sql.made};\n{self.sql.poll}' if look else self.sql.poll
        results = self._whole(session, sql, (since, since, limit), 1)
        rows = results[-1]
        if look:
            self._made = _made(results[0])
        if not rows:
            return None, 0, 0, 0, []
        epoch, last, sweeps, stands = rows[0][:4]
        if epoch != self._value:        # who has given it that has looked when it was made, and others look with him
            self._value, self._made = epoch, self._made if look else _made(session.all(self.sql.made))
        return (epoch and f'{epoch}.{self._made}', last, sweeps, stands,
                [(oid, tid) for *_, oid, tid in rows if oid is not None])


    def _is_time_to_look(self) -> bool:
        """Whether to ask when the table of the epoch was made: too slow for every poll."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY
        return True

    def begin_snapshot(self, session: Session) -> int:
        *_, [[tid]] = self._whole(session, f'{self.sql.begin_snapshot};\n{self.sql.last_tid}', (), 0)
        return tid

    def _whole(self, session: Session, sql: str, parameters: Sequence[Any], column: int) -> list[list[Row]]:
        """Run statements of which the last reads from a new view that lacks nothing; return the rows of each.

        MariaDB looks through the open transactions one by one to make a view, and meanwhile some are committed: it may
        show a transaction, and not the one before. But it shows what an earlier view did, with all before that. So if
        the newest tid, in this column, is the one that was seen just before, nothing is missing; else: once more.
        """
        if self._product == 'MySQL':
            return session.results(sql, parameters)
        while True:
            [[seen]], *results = session.results(f'{self.sql.last_tid};\n{sql}', parameters)
            if not results[-1] or results[-1][0][column] == seen:
                return results
            session.rollback()

    def load_many(
        self, session: Session, oids: Sequence[int], at: int, largest: int
    ) -> list[tuple[int, bytes | None, int, bytes | None]]:
        """Nearly always it is the current revision that is seen; the others are asked for one by one, in one message.

        As one statement it would be a subquery for each object, or read all their revisions.
        """
        rows = session.all(self.sql.load_many, (self.oid_list(oids), at, largest, oids[0]))
        changed = [oid for oid, _, tid, _ in rows if tid is None]
        if changed:
            rows = [row for row in rows if row[2] is not None]
            rows += chain.from_iterable(self._send(session, [
                (self.sql.load_older, (oid, at, largest, oids[0])) for oid in changed]))
        return rows

    def load_serials(self, session: Session, revisions: Sequence[tuple[int, int]]) -> dict[int, bytes | None]:
        """In few messages."""
        results = self._send(session, [(self.sql.load_serial, revision) for revision in revisions])
        return {oid: rows[0][0] for (oid, _), rows in zip(revisions, results, strict=True) if rows}

    # Commit -------------------------------------------------------------------------------------------------------

    def vote(self, session: Session, ballot: Ballot) -> Verdict:
        seconds = max(math.ceil(ballot.timeout), 1)
        vote = secrets.randbits(62)
        bases, reads = dict(ballot.bases), dict(ballot.reads)
        look = self._is_time_to_look()
        statements: list[Statement] = [(self.sql.made, ())] if look else []
        statements.append((self.sql.begin_vote, (seconds, seconds, session.key, vote)))
        if 0 < len(reads) <= LIST and 0 not in reads.values():
            statements.append((self.sql.look_at_reads, (len(reads), tuple(reads), tuple(set(reads.values())))))
        statements += [(_rows(self.sql.lock_created, len(some)), (*some, self.oid_list(some)))
                       for some in _lists(oid for oid in ballot.locks if not bases[oid])]
        statements += [(self.sql.lock_current, (some,)) for some in _lists(sorted({*bases, *ballot.restored}))]
        statements += [(self.sql.lock_read, (some, some)) for some in _lists(reads)]
        # Before what those wait for who have it.
        statements.append((self.sql.lock_sweep_alone if ballot.alone else self.sql.lock_sweep, ()))
        if ballot.restored_tid is not None:
            statements.append((self.sql.lock_commit, ()))
        statements.append((self.sql.voted, (
            (ballot.at,) * 2 if self.keep_history else self.revision_list(ballot.known))))
        try:
            *results, [(epoch, last, connection, is_gone)] = self._send(session, statements)
        except LockTimeout as e:
            raise self._lock_timeout(session, ballot, seconds) from e
        if look:
            made, *results = results
            self._made = _made(made)
        waits = list(_waits(results))
        epoch = f'{epoch}.{self._made}'
        if epoch != ballot.epoch or is_gone:
            return Verdict(epoch_changed=True, waits=waits)
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for kind, oid, tid, _ in chain.from_iterable(results):
            found[kind][oid] = tid
        current, shared, read = found['current'], found['shared'], found['read']
        verdict = Verdict(ticket=[vote, session.key, connection, epoch, current], waits=waits)
        [(verdict.sweeps, generation)] = found['sweep'].items()
        verdict.see(generation)
        verdict.outdated = [(oid, read.get(oid, 0)) for oid, tid in reads.items() if read.get(oid, 0) != tid]
        verdict.locked = next((oid for oid in read if oid not in shared), None)
        if ballot.restored_tid is not None and ballot.restored_tid <= last:
            verdict.last_tid = last
        changed = [oid for oid, base in ballot.bases if current.get(oid, 0) != base]
        if changed and not verdict.outdated:
            rows = self._send(session, [(self.sql.current_states, (some,)) for some in _lists(changed[:TOGETHER])])
            states = {oid: (tid, state) for oid, tid, state in chain.from_iterable(rows)}
            verdict.conflicts = [(oid, *states.get(oid, (current.get(oid, 0), None))) for oid in changed]
        return verdict

    def _lock_timeout(self, session: Session, ballot: Ballot, seconds: float) -> LockTimeout:
        """Return the error that says what was locked and by whom, as far as that can be found out."""
        lock, holder = SOME_OBJECTS if ballot.restored_tid is None else COMMIT_LOCK, 'another transaction'
        with suppress(StorageError):
            session.rollback()
            wanted = sorted({oid for oid, _ in ballot.bases} | {*ballot.restored})
            found: dict[str, set[int]] = defaultdict(set)
            for kind, oid in chain.from_iterable(self._send(session, [
                    (self.sql.lock_free, (some, some)) for some in _lists(wanted)])):
                found[kind].add(oid)
            lock = min(found['there'] - found['free'], default=lock)
            holder = self._holder(session, lock)
        return lock_timeout(lock, seconds, holder)

    def _holder(self, session: Session, lock: int) -> str:
        """Return who has a lock, or who may have it, as far as this user may see others."""
        with suppress(ConfigurationError, DatabaseError):
            rows = session.all(self.sql.lock_holders, (str(lock),) if self._product == 'MySQL' else ())
            if rows:
                return ' or '.join(map(_connection, rows))
        [[count, age]] = session.script(self.sql.unfinished, (session.key,))
        if count:
            return f'one of {count} transactions that have voted and not finished, the oldest {age} s ago'
        return 'another transaction'

    def stage(self, session: Session, ticket: Ticket, tid: int | None, metadata: Metadata,
              batches: Iterator[Batch]) -> Iterable[Batch]:
        """What fits goes into the message of finish; else all goes ahead into a temporary table.

        StorageError if something does not fit at all.
        """
        *_, current = ticket
        texts = {}          # without history there is no table for them
        if self.keep_history:
            texts = {'user': metadata.user, 'description': metadata.description, 'extension': metadata.extension or b''}
        for name, text in texts.items():
            if len(text) > TEXT:
                raise StorageError(f'The {name} of the transaction has {len(text):,} bytes; {self} takes {TEXT:,} at '
                                   'most.')
        room = self._packet - OVERHEAD - sum(map(self._driver.literal_size, texts.values()))
        pieces = self._pieces(batches, room)
        first, second = next(pieces, []), next(pieces, None)
        if second is None and sum(row.size or 0 for row, _ in first) < self.message_size:
            return [first]
        session.results(self.sql.begin_stage)
        for piece in chain(filter(None, (first, second)), pieces):
            session.run(_rows(self.sql.stage, len(piece)), [value for row, state in piece for value in (
                row.oid, current.get(row.oid, 0), row.md5, row.size or 0, state, row.refs, row.data_tid)])
        return []

    def _pieces(self, batches: Iterable[Batch], room: int) -> Iterator[Batch]:
        """Yield the rows of all batches in lists, each of which is shorter than `room` in SQL."""
        piece: Batch = []
        size, wanted = 0, min(room, self.message_size)
        for row, state in chain.from_iterable(batches):
            length = (self._driver.literal_size(state or b'') + self._driver.literal_size(row.refs or b'')
                      + ROW_OVERHEAD)
            if size + length > wanted and piece:
                yield piece
                piece, size = [], 0
            if length > room:
                raise StorageError(
                    f'Object {row.oid:#x} has {row.size:,} bytes, {length:,} in SQL, and {self} takes {room:,} at '
                    f'most: raise max_allowed_packet of the server, now {self._packet:,}, and open the storage again.')
            piece.append((row, state))
            size += length
        if piece:
            yield piece

    def finish(self, session: Session, ticket: Ticket, tid: int | None, metadata: Metadata,
               batches: Iterable[Batch]) -> tuple[int, float]:
        batch = next(iter(batches), None)
        vote, key, _, _, current = ticket
        statements: list[Statement] = [(self.sql.begin_finish, (
            FINISH_TIMEOUT, FINISH_TIMEOUT, tid, key, vote))]
        if self.keep_history:
            statements.append((self.sql.insert_transaction, (
                metadata.packed, metadata.user, metadata.description, metadata.extension)))
        if batch is None:
            statements.append((self.sql.insert_staged, ()))
        elif batch and self.keep_history:
            statements.append((_rows(self.sql.insert_states, len(batch)), [value for row, state in batch for value in (
                row.oid, current.get(row.oid, 0), row.md5, row.size or 0, state, row.refs, row.data_tid)]))
            statements.append((_rows(self.sql.point_current, len(batch)), [row.oid for row, _ in batch]))
        elif batch:
            statements.append((_rows(self.sql.insert_states, len(batch)), [value for row, state in batch for value in (
                row.oid, row.size or 0, state, row.refs)]))
        statements.append((self.sql.end_finish, (key, vote)))
        if self._in_cluster and self._product == 'MariaDB':
            statements = [_block([(self.sql.check_vote, (key, vote)), *statements])]
        *_, [[tid, waited]], _ = self._send(session, statements)
        if tid is None:
            raise Unavailable('the transaction that has voted is gone')
        return tid, waited / 1e6 if waited >= SHORTEST_WAIT else 0.0

    def outcome(self, session: Session, ticket: Ticket, oids: Sequence[int]) -> int | None:
        """A lost connection proves nothing: the server may be waiting for the commit lock still, and commit later.

        So wait for the lock on the row that the vote wrote, ending the orphan if it takes long.
        """
        vote, key, connection, epoch, _ = ticket
        deadline = time.monotonic() + ORPHAN_DEADLINE
        while True:
            try:
                *_, rows, _, _ = session.results(self.sql.outcome, (ORPHAN_PATIENCE, key, vote, key))
            except (LockTimeout, Deadlock) as e:
                session.rollback()
                if time.monotonic() > deadline:
                    raise OutcomeUnknown(f'the connection {connection} of the server is still busy with it') from e
                if isinstance(e, LockTimeout) and self.epoch(session) == epoch:
                    self._kill(session, connection)     # on another server the number is somebody else's
            else:
                break
        if rows:
            self._until_seen(session, rows[0][0], oids)
            return rows[0][0]
        if _server(self.epoch(session)) != _server(epoch):
            raise OutcomeUnknown('another server answers, which may not have it yet')
        return None

    def _until_seen(self, session: Session, tid: int, oids: Sequence[int]) -> None:
        """Wait until a new view shows a transaction.

        MariaDB lets its locks go in the moment of the commit, and leaves it out of views until a moment later.
        Of one that has only deleted objects nothing tells, so give up after a time that is long enough for any.
        """
        deadline = time.monotonic() + SEEN_PATIENCE
        while (not any((self.current_tid(session, oid) or 0) >= tid for oid in oids[:SEEN])
               and time.monotonic() < deadline):
            time.sleep(0.001)

    def _kill(self, session: Session, connection: int) -> None:
        try:
            session.run(self.sql.kill, (connection,))
        except DatabaseError as e:
            log.info('The connection %d was not ended: %s', connection, e)     # it has just ended by itself

    def new_oids(self, session: Session, count: int) -> list[int]:
        results = _undisturbed(lambda: session.results(_rows(self.sql.new_oids, count), (count,)))
        [[first, step]] = results[3]
        return list(range(first, first + step * count, step))

    def reserve_oids(self, session: Session, oid: int) -> None:
        block = -(-oid // 16)       # rounded up
        if session.in_transaction:
            session.results(self.sql.reserve_oids_at_once, (block,))
        else:
            _undisturbed(lambda: session.results(self.sql.reserve_oids, (block, block)))

    def _advance_oids(self, session: Session) -> None:
        """A counter behind its objects (restored separately, say) would hand out oids that are taken."""
        [[used]] = session.all(self.sql.max_oid)
        if used:
            self.reserve_oids(session, used)

    # Pack ---------------------------------------------------------------------------------------------------------

    def lock_pack(self, session: Session) -> str | None:
        [[locked]] = session.all(self.sql.lock_pack)
        if locked:
            return None
        rows = session.all(self.sql.pack_holder)
        return ', '.join(f'connection {number} ({who})' for number, who in rows) or 'another connection'

    def save_references(self, session: Session, rows: Sequence[tuple[int, int, bytes]]) -> None:
        for some in _lists(rows, LIST):
            session.run(_rows(self.sql.save_references, len(some)), list(chain.from_iterable(some)))

    def add_garbage(self, session: Session, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        for some in _lists(rows, LIST):
            session.run(_rows(self.sql.add_garbage, len(some)), list(chain.from_iterable(some)))

    def changes(self, session: Session, tid: int, oid: int, size: int) -> list[Row]:
        """Not those after the newest that an earlier view has shown: some may be missing among them, see `_whole`."""
        newest = self.last_tid(session)
        return [row for row in super().changes(session, tid, oid, size) if row[1] <= newest]

    def lock_votes(self, session: Session, timeout: float) -> None:
        """Less than a second nobody can wait here, and others wait behind: then not at all."""
        if timeout < 1:
            session.results(self.sql.lock_votes_at_once)
        else:
            session.results(self.sql.lock_votes, (math.ceil(timeout),))

    def start_sweep(self, session: Session, pack: Pack, now: int = 0) -> None:
        """In a cluster others may be between vote and finish on another server, and their locks are not seen here.

        All commits write one row there, so those that the sweep has not seen, and that have not seen it, fail: or it.
        """
        super().start_sweep(session, pack, now)
        if self._in_cluster:
            session.run(self._tables['in_order'].rstrip(';'))

    def sweep(self, session: Session, generation: int, after: int, upto: int) -> tuple[int, int]:
        batch = (generation, after, upto)
        results = session.results(self.sql.sweep, batch * self.sql.sweep.count('g.generation'))
        [row] = [rows[0] for rows in results if rows]
        return row

    def forget_transactions(self, session: Session, after: int, upto: int, named: bool) -> int:
        results = session.results(self.sql.forget_transactions, (after, upto, named, after, upto))
        [[count]] = [rows[0] for rows in results if rows]
        return count

    # Administration -----------------------------------------------------------------------------------------------

    def estimated_count(self, session: Session) -> int:
        [[count]] = session.script(self.sql.estimated_count)
        return count

    def size(self, session: Session) -> int:
        """As the server's statistics have it: within a tenth, some seconds later."""
        [[size]] = session.script(self.sql.size)
        return size

    def zap_all(self, session: Session) -> None:
        """The epoch and the counter of oids are no part of a transaction, so they come last."""
        try:
            session.results(self.sql.zap)
        finally:
            session.rollback()
        session.run(self.sql.be_impatient)
        in_tries(lambda: session.run(self.sql.restart_oids), ZAP_PATIENCE, lambda e: None)
        session.run(self.sql.forget_epoch)
        self.renew_epoch(session)

    # Phrases ------------------------------------------------------------------------------------------------------

    def after(self, first: int, second: int) -> tuple[int, ...]:
        """No index serves a comparison of rows."""
        return first, first, second

    def _send(self, session: Session, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements in as few messages as is safe; return the rows of each, in order."""
        results = []
        for some in _lists(statements, STATEMENTS):
            results += session.results(';\n'.join(sql for sql, _ in some), [
                parameter for _, parameters in some for parameter in parameters])
        return results


def _connection(row: Row) -> str:
    number, user, host, seconds = row
    return f'connection {number} ({user}@{host}' + (
        ')' if seconds is None else f', in a transaction for {seconds} s)')      # it is not always measured


def _made(rows: Sequence[Row]) -> str:
    """Return when a table was made, or what stands for that where it is gone in this moment."""
    return rows[0][0] if rows else 'never'


def _server(epoch: str) -> str:
    """Return the part of an epoch that says which server it is of."""
    return epoch.partition('.')[2].rpartition('.')[0]


def _undisturbed(act: Callable[[], Result]) -> Result:
    """Return act(), which inserts and deletes rows of new_oid, and is all of a transaction.

    Several who do that at once can deadlock (a unique key that is being removed is waited for), and all but one are
    ended. That is no conflict of what they store, so nobody else is to learn of it.
    """
    for _ in range(COUNTING_TOGETHER):
        with suppress(Deadlock):
            return act()
    return act()


def _waits(results: Iterable[Sequence[Row]]) -> Iterator[tuple[int, float]]:
    """Yield (oid or what stands for it, seconds) of the locks that were waited for.

    results: of each statement rows (what, oid, tid, microseconds since it began), in the order of the locks.
    """
    for rows in results:
        before = 0
        for kind, oid, _, after in rows if rows and rows[-1][3] >= SHORTEST_WAIT else ():
            if after - before >= SHORTEST_WAIT:
                if kind in NO_OBJECTS:
                    oid = NO_OBJECTS[kind]
                yield oid, (after - before) / 1e6
            before = after


def _lists(values: Iterable[Any], size: int = LIST) -> Iterator[tuple[Any, ...]]:
    """Yield the values in tuples of up to `size`."""
    values = iter(values)
    while some := tuple(islice(values, size)):
        yield some


def _block(statements: Sequence[Statement]) -> Statement:
    """Return one statement of MariaDB's that is all of them."""
    sql = 'BEGIN NOT ATOMIC\n' + ';\n'.join(sql for sql, _ in statements) + ';\nEND'
    return sql, [parameter for _, parameters in statements for parameter in parameters]


def _rows(sql: str, count: int) -> str:
    """Return a statement with the row after its VALUES repeated."""
    return re.sub(r'(?<=VALUES )\([^()]*\)', lambda row: ', '.join([row[0]] * count), sql, count=1)
