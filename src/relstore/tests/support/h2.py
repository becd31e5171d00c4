"""H2 in Oracle mode, in this process: it runs the SQL that is written for Oracle, as far as H2 can.

What it does not know is done here: blocks of PL/SQL are taken apart (plsql.py), LOCK TABLE is a lock of this process,
and views and functions of Oracle's catalogue are views and functions of H2's. Temporary tables are LOCAL. And where H2
would keep the empty string and no bytes apart from NULL, they are NULL here.

This module is its own driver: it has `Error`, as a DB-API module has.
"""
import importlib
import itertools
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import relstore
from relstore.adapters.oracle import OracleAdapter
from relstore.adapters.statements import read
from relstore.sessions import oracle_drivers
from relstore.sessions.oracle_drivers import references
from relstore.tests.support import plsql
from relstore.tests.support.jars import jar
from relstore.tests.support.servers.server import cannot_run

JARS = 'h2', 'druid', 'commons-lang3'
URL = 'jdbc:h2:mem:{};MODE=Oracle;DB_CLOSE_DELAY=-1;NON_KEYWORDS=VALUE,KEY;LOCK_TIMEOUT=10000'

# Of Oracle, in a schema of its own.
CATALOGUE = """
CREATE SCHEMA IF NOT EXISTS ora;
CREATE VIEW IF NOT EXISTS ora.user_tab_columns AS
    SELECT table_name, column_name, CASE data_type WHEN 'NUMERIC' THEN 'NUMBER' ELSE data_type END AS data_type
    FROM information_schema.columns WHERE table_schema = 'PUBLIC';
CREATE VIEW IF NOT EXISTS ora.user_objects AS
    SELECT table_name AS object_name, CASE table_type WHEN 'VIEW' THEN 'VIEW' ELSE 'TABLE' END AS object_type
    FROM information_schema.tables WHERE table_schema = 'PUBLIC' AND table_type <> 'LOCAL TEMPORARY'
    UNION ALL SELECT sequence_name, 'SEQUENCE' FROM information_schema.sequences WHERE sequence_schema = 'PUBLIC'
    UNION ALL SELECT index_name, 'INDEX' FROM information_schema.indexes WHERE index_schema = 'PUBLIC';
CREATE VIEW IF NOT EXISTS ora.user_sequences AS
    SELECT sequence_name, base_value AS last_number FROM information_schema.sequences WHERE sequence_schema = 'PUBLIC';
CREATE VIEW IF NOT EXISTS ora.user_constraints AS
    SELECT table_name, CASE constraint_type WHEN 'FOREIGN KEY' THEN 'R' ELSE 'C' END AS constraint_type
    FROM information_schema.table_constraints WHERE table_schema = 'PUBLIC';
CREATE VIEW IF NOT EXISTS ora.user_tables AS
    SELECT table_name, row_count_estimate AS num_rows FROM information_schema.tables WHERE table_schema = 'PUBLIC';
CREATE VIEW IF NOT EXISTS ora.user_segments AS SELECT memory_used() * 1024 AS bytes;
CREATE VIEW IF NOT EXISTS ora.product_component_version AS
    SELECT 'Oracle Database, as H2 has it' AS product, '19.0.0.0.0' AS version;
CREATE ALIAS IF NOT EXISTS ora.sys_context FOR "java.lang.System.getProperty(java.lang.String, java.lang.String)"
"""

MACROS = {
    'temporary': 'LOCAL TEMPORARY',
    'list_of': 'TABLE(column_value VARCHAR =', 'listed': ')',
    'upto_count': '(SELECT x AS n FROM SYSTEM_RANGE(1, $count))',
    'upto_locks': '(SELECT x AS n FROM SYSTEM_RANGE(1, 65))',
    'length_of_chunk': 'coalesce(octet_length(b.chunk), 0)',
    'second_of_now': '(EXTRACT(SECOND FROM n.now) + EXTRACT(MICROSECOND FROM n.now) / 1000000.0)',
    'utc': "SYSTIMESTAMP AT TIME ZONE 'UTC'", 'now_seconds': 'EXTRACT(EPOCH FROM {utc})',
}

# What Oracle would say, by H2's number of an error.
CODES = {50200: 30006, 40001: 60, 42102: 942, 42104: 942, 90036: 2289, 23505: 1, 23502: 1400, 42101: 955, 57014: 1013,
         90007: 3114, 90121: 3113, 90098: 3113}
# H2 2.4: with such a table a session that has read before has no snapshot. So its rows are deleted here.
AT_COMMIT = ' ON COMMIT DELETE ROWS'
SNAPSHOT, READ_COMMITTED = 6, 2         # of java.sql.Connection, and H2's own
NUMBERS = {'BIGINT', 'INTEGER', 'SMALLINT', 'TINYINT', 'NUMERIC', 'DECIMAL', 'DECFLOAT', 'DOUBLE PRECISION', 'REAL'}
LARGE = {'BINARY LARGE OBJECT', 'BINARY VARYING', 'BINARY', 'VARBINARY'}

_LOCK_TABLE = re.compile(r'LOCK TABLE (\w+) IN (EXCLUSIVE|ROW SHARE) MODE(?: (NOWAIT)| WAIT (\d+))')
_HINT = re.compile(r'/\*\+.*?\*/', re.DOTALL)


class Error(Exception):
    """An error, with a message like Oracle's."""


def unavailable(name: str = 'h2') -> str | None:
    """Return why a jar, and Java, cannot be used here; None: they can."""
    try:
        importlib.import_module('jpype')
    except ImportError as e:
        return f'{e} (pip install JPype1)'
    return None if jar(name) else f'the jar of {name} is not there: make jars'


def start() -> None:
    """Start Java, unless it runs."""
    jpype = importlib.import_module('jpype')
    if not jpype.isJVMStarted():
        jpype.startJVM(classpath=[str(path) for path in map(jar, JARS) if path], convertStrings=True)


class TableLocks:
    """LOCK TABLE, of one database. owner: a connection."""

    def __init__(self):
        self._changed = threading.Condition()
        self._held: dict[str, dict[Any, str]] = {}

    def take(self, owner: Any, table: str, mode: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            held = self._held.setdefault(table, {})
            while any(other is not owner and 'EXCLUSIVE' in (mode, its) for other, its in held.items()):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise Error('ORA-00054: resource busy and acquire with NOWAIT specified or timeout expired')
            if held.get(owner) != 'EXCLUSIVE':
                held[owner] = mode

    def release(self, owner: Any) -> None:
        with self._changed:
            for held in self._held.values():
                held.pop(owner, None)
            self._changed.notify_all()


class Connection:
    """As oracle_drivers.Connection."""
    _locks: dict[str, TableLocks] = {}
    _makers: list[Any] = []
    _makes = False
    _staging: Sequence[str] = ()
    _lock = threading.Lock()

    def __init__(self, name: str, statements: Sequence[str]):
        self.name, self.in_transaction = name, False
        self._java = importlib.import_module('jpype')
        with self._lock:
            self._tables = self._locks.setdefault(name, TableLocks())
            self._jdbc = self._java.JClass('java.sql.DriverManager').getConnection(URL.format(name))
            for statement in CATALOGUE.strip().split(';\n'):
                self.execute(statement, ())
        self.execute('SET SCHEMA_SEARCH_PATH public, ora', ())
        for statement in statements:
            self.execute(statement, ())
        self._staging = [statement.split()[4] for statement in statements]
        self._blocks = plsql.Interpreter(self.execute, self._autonomously)

    def cursor(self) -> 'Cursor':
        return Cursor(self)

    def close(self) -> None:
        if self.in_transaction:
            self._end('rollback')
        self._tables.release(self)
        # A CHECK with a list of values (H2 2.4) fails once the connection is closed that has made the table.
        self._makers.append(self._jdbc) if self._makes else self._jdbc.close()

    def script(self, sql: str, values: Sequence[Any]) -> list:
        if not plsql.is_block(sql):
            return [self.run(sql, values)[0]]
        self._run_block(sql, values)
        if ':told' not in sql:
            return [[]]
        words = tuple((self._blocks.told or '').split(' '))
        if ':rows' not in sql:
            return [[words]]
        return [[words], self._blocks.rows if words[0] != '0' else []]

    def run(self, sql: str, values: Sequence[Any]) -> tuple[list, int]:
        if plsql.is_block(sql):
            self._run_block(sql, values)
            return [], -1
        return self.execute(re.sub(r':p\d+\b', '?', sql), values)

    def _run_block(self, sql: str, values: Sequence[Any]) -> None:
        alone = not self.in_transaction
        self._jdbc_begins()
        try:
            self._blocks.run(sql, values)
        except plsql.NoDataFound:
            raise Error('ORA-01403: no data found') from None
        except BaseException:
            if alone and 'SET TRANSACTION' not in sql:
                self._end('rollback')
            raise
        if alone and not self.in_transaction:
            self._end('commit')

    def _autonomously(self, sql: str) -> None:
        other = Connection(self.name, ())
        try:
            other.execute(sql, ())
        finally:
            other.close()

    def _jdbc_begins(self) -> None:
        if not self.in_transaction:
            self._jdbc.setAutoCommit(False)

    def _end(self, how: str) -> None:
        if how == 'commit' and self._jdbc.getTransactionIsolation() != SNAPSHOT:
            for table in self._staging:
                self._execute(f'DELETE FROM {table}', ())
        getattr(self._jdbc, how)()
        self._jdbc.setAutoCommit(True)
        self._jdbc.setTransactionIsolation(READ_COMMITTED)
        self.in_transaction = False
        self._tables.release(self)

    def execute(self, sql: str, values: Sequence[Any]) -> tuple[list, int]:
        """Run one plain statement with question marks; return its rows, and how many it has touched."""
        if sql == 'ROLLBACK' or sql.startswith('COMMIT'):
            self._end(sql.split()[0].lower())
        elif sql.startswith('SET TRANSACTION'):
            if self.in_transaction:
                raise Error('ORA-01453: SET TRANSACTION must be first statement of transaction')
            self._jdbc.setTransactionIsolation(SNAPSHOT if 'READ ONLY' in sql else READ_COMMITTED)
            self._jdbc.setAutoCommit(False)
            self.in_transaction = True
        elif found := _LOCK_TABLE.fullmatch(sql):
            self._tables.take(self, found[1], found[2], 0 if found[3] else int(found[4]))
            self.in_transaction or self._tables.release(self)
        else:
            return self._translated(self._execute, sql, values)
        return [], -1

    def _translated(self, act, *arguments):
        try:
            return act(*arguments)
        except self._java.JClass('java.sql.SQLException') as e:
            number = CODES.get(int(e.getErrorCode()), 900)
            raise Error(f'ORA-{number:05}: {e.getMessage()}') from e

    def _execute(self, sql: str, values: Sequence[Any]) -> tuple[list, int]:
        self._makes |= sql.startswith('CREATE TABLE')
        statement = self._jdbc.prepareStatement(_HINT.sub('', sql))
        try:
            self._set(statement, values)
            if not statement.execute():
                return [], int(statement.getUpdateCount())
            return self._rows(statement.getResultSet()), -1
        finally:
            statement.close()

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        if plsql.is_block(sql):
            for row in rows:
                self.run(sql, row)
            return

        def execute():
            statement = self._jdbc.prepareStatement(_HINT.sub('', re.sub(r':p\d+\b', '?', sql)))
            try:
                for row in rows:
                    self._set(statement, row)
                    statement.addBatch()
                statement.executeBatch()
            finally:
                statement.close()
        self._translated(execute)

    def _set(self, statement: Any, values: Sequence[Any]) -> None:
        java = self._java
        for place, value in enumerate(values, 1):
            if value is None or value == '' or value == b'':
                statement.setNull(place, 0)
            elif isinstance(value, int):
                statement.setLong(place, int(value))
            elif isinstance(value, bytes):
                statement.setBytes(place, java.JArray(java.JByte)(value))
            elif isinstance(value, list):
                statement.setObject(place, java.JArray(java.JObject)([java.JString(str(item)) for item in value]))
            else:
                statement.setString(place, value)

    def _rows(self, results: Any) -> list:
        described = results.getMetaData()
        columns = []
        for place in range(1, described.getColumnCount() + 1):
            kind = str(described.getColumnTypeName(place))
            if kind in NUMBERS:
                columns.append((place, results.getLong, int))
            elif kind in LARGE:
                refs = str(described.getColumnLabel(place)) in ('REFS', 'FOUND')
                columns.append((place, results.getBytes, _references if refs else bytes))
            else:
                columns.append((place, results.getString, str))
        rows = []
        while results.next():
            row = []
            for place, get, convert in columns:
                value = get(place)
                row.append(None if results.wasNull() else convert(value))
            rows.append(tuple(row))
        return rows


def _references(value: Any) -> bytes:
    return references(bytes(value))


class Cursor:
    """As oracle_drivers.Cursor."""
    rowcount = -1

    def __init__(self, connection: Connection):
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._rows, self.rowcount = self._connection.run(sql, parameters)

    def executemany(self, sql: str, rows) -> None:
        rows = list(rows)
        if rows:
            self._connection.many(sql, rows)

    def fetchall(self) -> list:
        return self._rows

    def close(self) -> None:
        pass


def _connect(module: Any, settings: dict) -> Connection:
    return Connection(settings['dsn'], settings['statements'])


def _read_part(connection: Connection, sql: str, parameters: Sequence[Any], start: int, size: int) -> bytes | None:
    rows, _ = connection.run(sql, parameters)
    return rows[0][0][start - 1:start - 1 + size] if rows else None


DRIVER = replace(oracle_drivers.driver('h2', __name__, 'JPype1', _connect), read_part=_read_part,
                 in_transaction=attrgetter('in_transaction'))


class H2Adapter(OracleAdapter):

    def schema(self) -> dict[str, str]:
        return {name: text for name, text in super().schema().items() if name not in self.staging()}

    def staging(self) -> dict[str, str]:
        """Return the temporary tables, which each session makes for itself."""
        schema = self.sql.expanded(read('oracle_schema.sql', self.keep_history))
        return {name: text.rstrip(';').replace(AT_COMMIT, '') for name, text in schema.items()
                if name.startswith('relstore_stage')}


class H2(relstore.Oracle):
    """A database in memory."""
    _numbers = itertools.count()

    def __init__(self, name: str):
        super().__init__('sa', '', name)
        self.driver = DRIVER
        self.settings = {'dsn': name, 'statements': [*self.unseen(True).staging().values()]}

    def unseen(self, keep_history: bool, read_only: bool = False) -> H2Adapter:
        return H2Adapter(self, keep_history, read_only, MACROS)


def drop(name: str) -> None:
    """Have a database be gone, if it is there."""
    connection = Connection(name, ())
    with suppress(Error):       # it is closed, and says so
        connection.execute('SHUTDOWN IMMEDIATELY', ())
    Connection._locks.pop(name, None)
    Connection._makers.clear()



class H2Layer:
    """Tests of what is written for Oracle, on H2, which runs in their process."""

    @classmethod
    def require(cls, test):
        reason = unavailable()
        if reason:
            cannot_run(test, reason)
        start()
