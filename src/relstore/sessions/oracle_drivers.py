"""oracledb, in its thin mode, which needs no client library, and cx_Oracle, its predecessor.

Three things are done here so that no statement has to know of them. Oracle has no BEGIN: a transaction begins with SET
TRANSACTION, and without one each statement is committed with itself. The empty string is NULL: references of an object
that has none are one byte (`NONE_REFERRED`). And large objects and numbers come as bytes and ints, with their row.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    Missing,
    NotAllowed,
    Unavailable,
)
from relstore.sessions.driver import Driver
from relstore.sessions.pipeline import Row
from relstore.sessions.statement import Statement

# What to do about the numbers of Oracle's errors (ORA-).
_ORA_CODES: dict[type[Exception], tuple[int, ...]] = {
    # 8177: changed since a serializable transaction began
    Deadlock: (60, 8177),
    # NOWAIT; a lock of a definition; WAIT
    LockTimeout: (54, 4021, 30006),
    # interrupted; over a limit of connections or processes; what a block looks for is gone; a snapshot that is too old
    Unavailable: (1013, 18, 20, 1403, 1555, 2391, 12516, 12518, 12519, 12520, 22924),
    # shut down, killed or lost; starting or stopping; no listener; a host that does not answer; or read-only, or a
    # standby: another server may serve by now
    Disconnected: (22, 28, 31, 45, 378, 600, 603, 609, 1012, 1033, 1034, 1041, 1089, 1090, 1092, 2396, 3113, 3114, 3135,
                   3136, 12153, 12170, 12528, 12537, 12541, 12543, 12547, 12560, 12570, 12571, 12583, 16000, 16456,
                   27101, 28511),
    NotAllowed: (1031, 1720, 41900),
    # 4043: a type or a function
    Missing: (942, 2289, 4043),
    # the name of a service, a user, a password, a lock on it; no right to connect; no quota, no room
    ConfigurationError: (1005, 1017, 1045, 12154, 12505, 12514, 12545, 28000, 28001, 28040,
                         1536, 1650, 1652, 1653, 1654, 1658, 1691, 1692, 1950, 30036),
}
_ORA_KINDS = {code: kind for kind, codes in _ORA_CODES.items() for code in codes}
# Of the drivers' own (DPY-, DPI-): no connection, a time limit, what was asked for does not lead to a server. DPY-6000,
# 6001 and 6003 say what a listener has refused.
_DRIVER_KINDS: dict[str, type[Exception]] = {
    **dict.fromkeys(('DPY-1001', 'DPY-4011', 'DPY-4017', 'DPY-5002', 'DPY-6002', 'DPY-6005', 'DPY-6010',
                     'DPI-1010', 'DPI-1080'), Disconnected),
    **dict.fromkeys(('DPY-4024', 'DPI-1067', 'DPY-6000'), Unavailable),
    **dict.fromkeys(('DPY-4000', 'DPY-4001', 'DPY-4026', 'DPY-4027', 'DPY-6001', 'DPY-6003', 'DPY-3010', 'DPY-3015',
                     'DPI-1047'), ConfigurationError)}
_CODE = re.compile(r'\b(ORA|DPY|DPI)-(\d+)')

# What a user can do, where Oracle says only what it could not.
_HINTS = {1536: 'raise its quota on the tablespace', 1950: 'give it a quota on the tablespace',
          **dict.fromkeys((1653, 1654, 1691), 'add a file to the tablespace')}

NONE_REFERRED = b'\0'
# Columns, as their values are named in SELECT, in which that may be.
_REFERENCES = {'REFS', 'FOUND'}
# Parameters that are large objects, by name; of these and others the first value may be NULL, which has no type.
_LARGE, _NUMBERS, _TEXTS = {'state', 'refs', 'chunk'}, {'data_tid'}, {'md5'}

# A collection of texts that anybody may use, of any number.
LIST_TYPE = 'SYS.DBMS_DEBUG_VC2COLL'
FETCHED = 1000          # rows at a time
KEPT_STATEMENTS = 200

_BEGINS = 'SET TRANSACTION'
_COMMITS = re.compile(r'\bCOMMIT[ A-Z]*;\s*END;\s*$')


def _classify(error: Exception) -> type[Exception]:
    codes = _CODE.findall(_message(error))
    # That it could not connect (DPY-6005) comes first, and why comes next.
    for prefix, number in sorted(codes, key=lambda code: code == ('DPY', '6005')):
        kind = _ORA_KINDS.get(int(number)) if prefix == 'ORA' else _DRIVER_KINDS.get(f'{prefix}-{number}')
        if kind is not None:
            return kind
    if not codes and type(error).__name__ == 'InterfaceError':
        return Disconnected         # cx_Oracle: not connected
    return DatabaseError


def _message(error: Exception) -> str:
    first = error.args[0] if error.args else error
    text = str(getattr(first, 'message', first))
    # Help on the web is on lines of its own.
    text = '\n'.join(line for line in text.splitlines() if not line.startswith('Help: '))
    hint = next((_HINTS[int(number)] for _, number in _CODE.findall(text) if int(number) in _HINTS), None)
    return f'{text}; {hint}' if hint else text


def whole(value: str) -> int:
    """Return a number that the server has sent. They are all whole, and many too large for a float."""
    return int(value)


def references(value: bytes | None) -> bytes | None:
    """Return the references that are stored in a value."""
    return b'' if value == NONE_REFERRED else value


class Connection:
    """As much of a DB-API connection as a Session needs, in autocommit. in_transaction: since SET TRANSACTION."""

    def __init__(self, module: ModuleType, real: Any):
        self.real, self._module = real, module
        self.in_transaction = False
        self._list: Any = None
        real.autocommit = True
        real.stmtcachesize = KEPT_STATEMENTS

    def cursor(self) -> Cursor:
        cursor = self.real.cursor()
        cursor.arraysize = cursor.prefetchrows = FETCHED
        return Cursor(self, cursor)

    def close(self) -> None:
        self.real.close()

    def begins(self, sql: str) -> None:
        """Note that a statement is about to be sent: it may begin a transaction."""
        if _BEGINS in sql:
            self.real.autocommit, self.in_transaction = False, True

    def ended(self) -> None:
        """Note that a transaction was ended."""
        self.real.autocommit, self.in_transaction = True, False

    def sent(self, sql: str) -> None:
        """Note that a statement was run: it may have committed."""
        if self.in_transaction and _COMMITS.search(sql):
            self.ended()

    def value(self, value: Any) -> Any:
        """Return a parameter as the driver takes it: a bool is a number, a list a collection of texts."""
        if value.__class__ is bool:
            return int(value)
        if value.__class__ is list:
            if self._list is None:
                self._list = self.real.gettype(LIST_TYPE)
            return self._list.newobject([str(item) for item in value])
        return value

    def sizes(self, sql: Statement) -> list[Any]:
        """Return the types of a statement's parameters, where the first value may not tell it."""
        module = self._module
        kinds = {**dict.fromkeys(_LARGE, module.DB_TYPE_LONG_RAW), **dict.fromkeys(_NUMBERS, module.DB_TYPE_NUMBER),
                 **dict.fromkeys(_TEXTS, module.DB_TYPE_VARCHAR)}
        return [kinds.get(name) for name in parameters_in_order(sql)]

    def script(self, sql: str, values: Sequence[Any]) -> list[list[Row]]:
        """Run a statement, or a block; return [[what it tells]] and the rows of its cursor, if it has one."""
        cursor = self.real.cursor()
        binds = {f'p{number}': self.value(value) for number, value in enumerate(values, 1)}
        told = rows = None
        if ':told' in sql:
            told = binds['told'] = cursor.var(self._module.DB_TYPE_VARCHAR, 4000)
        if ':rows' in sql:
            rows = binds['rows'] = cursor.var(self._module.DB_TYPE_CURSOR)
        self.begins(sql)
        cursor.execute(sql, binds)
        self.sent(sql)
        if told is None:
            return [[]]
        words = tuple((told.getvalue() or '').split(' '))
        results: list[list[Row]] = [[words]]
        if rows is not None:
            found = rows.getvalue()
            found.arraysize = FETCHED
            results.append(found.fetchall() if words[0] != '0' else [])
        return results


class Cursor:
    """As much of a DB-API cursor as a Session needs."""

    def __init__(self, connection: Connection, real: Any):
        self._connection, self._real = connection, real

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        connection = self._connection
        if sql in ('COMMIT', 'ROLLBACK'):
            getattr(connection.real, sql.lower())()
            connection.ended()
            return
        connection.begins(sql)
        self._real.execute(sql, [connection.value(value) for value in parameters])
        connection.sent(sql)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Send all rows in one message."""
        connection = self._connection
        values = [[connection.value(value) for value in row] for row in rows]
        if values:
            if isinstance(sql, Statement):
                self._real.setinputsizes(*connection.sizes(sql))
            self._real.executemany(sql, values)

    @property
    def rowcount(self) -> int:
        return self._real.rowcount

    def fetchall(self) -> list[Row]:
        return self._real.fetchall()

    def close(self) -> None:
        self._real.close()


@lru_cache(200)
def parameters_in_order(sql: Statement) -> tuple[str, ...]:
    """Return the names of a statement's parameters, one for each place in its text."""
    order = range(len(sql.parameters)) if sql.order is None else sql.order
    return tuple(sql.parameters[place] for place in order)


def _fetched(module: ModuleType, cursor: Any, name: str, kind: Any) -> Any:
    """Return the variable in which the values of a column come, or None: as the driver would have it."""
    if kind is module.DB_TYPE_BLOB:
        # Not its locator, which would be read with a message of its own, and dies with the connection.
        convert: Mapping[str, Any] = {'outconverter': references} if name.upper() in _REFERENCES else {}
        return cursor.var(module.DB_TYPE_LONG_RAW, arraysize=cursor.arraysize, **convert)
    if kind is module.DB_TYPE_NUMBER:
        return cursor.var(module.DB_TYPE_VARCHAR, 50, arraysize=cursor.arraysize, outconverter=whole)
    return None


def _connect_oracledb(oracledb: ModuleType, settings: Mapping[str, Any]) -> Connection:
    real = oracledb.connect(tcp_connect_timeout=10, **settings)
    real.outputtypehandler = lambda cursor, column: _fetched(oracledb, cursor, column.name, column.type_code)
    return Connection(oracledb, real)


def _connect_cx_oracle(cx_oracle: ModuleType, settings: Mapping[str, Any]) -> Connection:
    real = cx_oracle.connect(encoding='UTF-8', **settings)
    real.outputtypehandler = lambda cursor, name, kind, size, precision, scale: _fetched(cx_oracle, cursor, name, kind)
    return Connection(cx_oracle, real)


def _read_part(connection: Any, sql: str, parameters: Sequence[Any], start: int, size: int) -> bytes | None:
    """Return a part of the large object that a statement selects, by its locator; None: there is no row."""
    cursor = connection.real.cursor()
    cursor.outputtypehandler = _as_locator
    cursor.execute(sql, list(parameters))
    row = cursor.fetchone()
    if row is None:
        return None
    # An application may have told the driver to return none (defaults.fetch_lobs).
    return row[0].read(start, size) if hasattr(row[0], 'read') else row[0][start - 1:start - 1 + size]


def _as_locator(cursor: Any, *column: Any) -> None:
    return None


def driver(name: str, module: str, package: str, connect: Callable[..., Any]) -> Driver:
    """Return the record of a driver for Oracle."""
    return Driver(name, module, package, ':', connect=connect, classify=_classify, message=_message,
                  in_transaction=attrgetter('in_transaction'),
                  script=lambda connection, sql, parameters: connection.script(sql, parameters),
                  read_part=_read_part, binds=True)


DRIVERS = (
    driver('oracledb', 'oracledb', 'relstore[oracle]', _connect_oracledb),
    driver('cx_Oracle', 'cx_Oracle', 'cx_Oracle', _connect_cx_oracle),
)
