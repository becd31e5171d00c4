"""Connections of the tests' own, to see and to end what others do in a database."""
import re
import time
from collections.abc import Callable
from typing import Any

import psycopg2
import pymysql

from relstore.tests.support.patience import within


class AnyWatch:
    """What can be said for every server."""

    doing = ''          # SQL: what the connections to this database do
    others = ''         # SQL: the pids of those that are not ours
    pid = ''            # SQL: our own
    outcome_is_asked = ''       # SQL: whether somebody asks what became of a commit, or did so last
    a_moment = ''       # SQL: wait 2 ms

    def rows(self, sql: str, *parameters) -> list[tuple]:
        raise NotImplementedError

    def close(self) -> None:
        self._connection.close()

    def one(self, sql: str, *parameters):
        [[value]] = self.rows(sql, *parameters)
        return value

    def until(self, condition: str | Callable[[], object], *parameters, seconds: float = 20) -> None:
        """Return when the SQL expression is true; AssertionError, with what the backends do, if it never is."""
        deadline = time.monotonic() + seconds
        while not (condition() if callable(condition) else self.one(f'SELECT {condition}', *parameters)):
            if time.monotonic() > deadline:
                raise AssertionError(f'not after {seconds} s: {condition} {parameters}; {self.rows(self.doing)}')
            self.rows(self.a_moment)

    def somebody_waits(self) -> bool:
        """Return whether a transaction in this database waits for a lock."""
        raise NotImplementedError

    def until_somebody_waits(self) -> None:
        self.until(self.somebody_waits)

    def until_nothing_is_open(self) -> None:
        """Return when no transaction of anybody else is open in this database."""
        raise NotImplementedError

    def open_transactions(self) -> int:
        """Return how many others are open in this database."""
        raise NotImplementedError

    def connections(self) -> int:
        """Return how many others are connected to this database."""
        raise NotImplementedError

    def terminate(self, pid: int) -> None:
        """End somebody's connection, and return when it is gone."""
        raise NotImplementedError

    def terminate_all(self) -> None:
        """End the connections that all others have to this database, and return when they are gone."""
        for pid, in self.rows(self.others):
            self.terminate(pid)

    def take_commit_lock(self) -> None:
        """Keep everybody from finishing, until release_commit_lock()."""
        raise NotImplementedError

    def release_commit_lock(self) -> None:
        raise NotImplementedError

    def until_outcome_is_asked(self) -> None:
        """Return when somebody has asked what became of a commit."""
        self.until(self.asked_for_outcome)

    def asked_for_outcome(self) -> bool:
        return self.one(f'SELECT {self.outcome_is_asked}')

    def now(self) -> float:
        """Return what the server's clock says, in seconds since 1970."""
        raise NotImplementedError


class Watch(AnyWatch):
    """A connection to PostgreSQL."""

    doing = ('SELECT pid, state, wait_event, left(query, 60) FROM pg_stat_activity WHERE datname = current_database()')
    others = ("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
              "AND backend_type = 'client backend'")
    pid = 'SELECT pg_backend_pid()'
    outcome_is_asked = ("EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
                        "AND query LIKE '%pg_xact_status(%' AND pid <> pg_backend_pid())")
    a_moment = 'SELECT pg_sleep(0.002)'

    def __init__(self, dsn: str):
        self._connection = psycopg2.connect(dsn)
        self._connection.autocommit = True

    def rows(self, sql: str, *parameters) -> list[tuple]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            # Rows without columns, those of SELECT FROM, have a description too: an empty one.
            return [] if cursor.description is None else cursor.fetchall()

    def terminate(self, pid: int) -> None:
        self.rows('SELECT pg_terminate_backend(%s)', pid)
        self.until('NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)', pid)

    def somebody_waits(self) -> bool:
        return self.one("SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database d ON d.oid = database "
                        "WHERE NOT granted AND locktype = 'advisory' AND datname = current_database())")

    def until_nothing_is_open(self) -> None:
        self.until("NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() "
                   "AND pid <> pg_backend_pid() AND backend_type = 'client backend' "
                   "AND (state LIKE 'idle in%%' OR xact_start IS NOT NULL))", seconds=5)

    def open_transactions(self) -> int:
        return self.one("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND state = 'idle in transaction'")

    def connections(self) -> int:
        return self.one('SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() '
                        "AND pid <> pg_backend_pid() AND backend_type = 'client backend'")

    def take_commit_lock(self) -> None:
        self.rows('SELECT pg_advisory_lock(-1)')

    def release_commit_lock(self) -> None:
        self.rows('SELECT pg_advisory_unlock(-1)')

    def now(self) -> float:
        return self.one('SELECT extract(epoch FROM clock_timestamp())::double precision')


class MySQLWatch(AnyWatch):
    """A connection to MySQL or MariaDB, made with the arguments of an adapter."""

    doing = 'SELECT id, command, state, left(info, 200) FROM information_schema.processlist WHERE db = DATABASE()'
    others = 'SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()'
    pid = 'SELECT CONNECTION_ID()'
    outcome_is_asked = ("EXISTS (SELECT 1 FROM information_schema.processlist WHERE db = DATABASE() "
                        "AND info LIKE 'SELECT tid FROM relstore_commit%FOR UPDATE' AND id <> CONNECTION_ID())")
    a_moment = 'DO SLEEP(0.002)'

    def __init__(self, arguments: dict[str, Any]):
        named = {{'db': 'database', 'passwd': 'password'}.get(name, name): value for name, value in arguments.items()}
        # There are many of these, and PyMySQL would read the certificates of the machine before each connection.
        self._connection = pymysql.connect(**named, autocommit=True, ssl_disabled='unix_socket' in named)
        self._is_mariadb = 'MariaDB' in self.one('SELECT version()')

    def rows(self, sql: str, *parameters) -> list[tuple]:
        for _ in within(f'the server has text for the processlist: {sql}'):
            try:
                with self._connection.cursor() as cursor:
                    cursor.execute(sql, parameters or None)
                    return list(cursor.fetchall())
            except pymysql.OperationalError as e:
                # MySQL 9.7 makes text of what everybody is doing for the processlist, also of a state being stored.
                if e.args[0] != 3854:
                    raise

    def terminate(self, pid: int) -> None:
        if self.one('SELECT count(*) FROM information_schema.processlist WHERE id = %s', pid):
            self.rows('KILL %s', pid)
        self.until('NOT EXISTS (SELECT 1 FROM information_schema.processlist WHERE id = %s)', pid)

    def somebody_waits(self) -> bool:
        return any('\nLOCK WAIT ' in text for text in self._in_innodb().values())

    def until_nothing_is_open(self) -> None:
        self.until(lambda: not self.open_transactions(), seconds=5)

    def open_transactions(self) -> int:
        if self._is_mariadb:
            return len(self._in_innodb())
        # InnoDB's list of MySQL calls one that only reads "not started".
        return self.one('SELECT count(*) FROM performance_schema.events_transactions_current t '
                        'JOIN performance_schema.threads USING (thread_id) WHERE processlist_db = DATABASE() '
                        "AND processlist_id <> CONNECTION_ID() AND state = 'ACTIVE'")

    def connections(self) -> int:
        return self.one('SELECT count(*) FROM information_schema.processlist '
                        'WHERE db = DATABASE() AND id <> CONNECTION_ID()')

    def _in_innodb(self) -> dict[int, str]:
        """Return what InnoDB tells of the open transactions of others in this database, by connection.

        Its tables in information_schema are not asked: they stay as they were as long as somebody looks often.
        """
        [[_, _, text]] = self.rows('SHOW ENGINE INNODB STATUS')
        here = self.rows('SELECT id FROM information_schema.processlist WHERE db = DATABASE()')
        others = {pid for pid, in here} - {self._connection.thread_id()}
        found = {}
        for entry in text.partition('\nFILE I/O\n')[0].split('\n---TRANSACTION ')[1:]:
            thread = re.search(r'\bthread id (\d+)', entry)
            if thread and int(thread[1]) in others and ', ACTIVE' in entry.partition('\n')[0]:
                found[int(thread[1])] = entry
        return found

    def take_commit_lock(self) -> None:
        self.rows('BEGIN')
        self.rows('SELECT tid FROM commit_row_lock FOR UPDATE')

    def release_commit_lock(self) -> None:
        self.rows('ROLLBACK')

    def now(self) -> float:
        return float(self.one('SELECT UNIX_TIMESTAMP(NOW(6))'))
