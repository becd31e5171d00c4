"""Addresses: where a database is and how to reach it, as a section of a configuration or a caller says it.

An address has not asked anything yet. For each storage it is bound to a history mode, and to whether the database is
written. That makes an adapter, which knows its server and never changes.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from relstore.adapters.base import Adapter
from relstore.adapters.mysql import MySQLAdapter
from relstore.adapters.mysql_server import Server
from relstore.adapters.oracle import OracleAdapter
from relstore.adapters.postgresql import PostgreSQLAdapter
from relstore.adapters.sqlite import SQLiteAdapter
from relstore.errors import ConfigurationError, DatabaseError, Disconnected
from relstore.sessions.drivers import find_driver
from relstore.sessions.mysql_drivers import TLS_MODES
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.options import Options

PREPARED_STATEMENTS = 'auto', 'true', 'false'
PRAGMAS = {'synchronous': 'FULL', 'cache_size': '-16384', 'mmap_size': '268435456', 'temp_store': 'MEMORY'}
SYNCHRONOUS = 'off', 'normal', 'full', 'extra', '0', '1', '2', '3'


class Address:

    def is_there(self) -> bool:
        """Whether the database exists, if that can be told without a connection; else True."""
        return True

    def unseen(self, keep_history: bool, read_only: bool = False) -> Adapter:
        """Return an adapter that assumes a usual server and asks nothing: for printing what it would send."""
        raise NotImplementedError

    def bind(self, keep_history: bool, read_only: bool = False) -> Adapter:
        """Return an adapter that knows its server, and has not looked at the tables.

        ConfigurationError: relstore cannot use the server, or its settings.
        """
        adapter = self.unseen(keep_history, read_only)
        adapter.look()
        return adapter

    def open(self, options: Options) -> Adapter:
        """Return an adapter to a database whose tables are complete; they are created if the options allow it.

        ConfigurationError says what is wrong.
        """
        adapter = self.bind(options.keep_history, options.read_only)
        adapter.prepare_schema(options.create_schema)
        return adapter


class PostgreSQL(Address):
    """A database reached by `dsn`, in the schema `schema` (default: the first of the search path).

    driver: psycopg (version 3), psycopg2, or 'auto': psycopg if it is installed.
    prepared_statements: 'true', 'false', or 'auto': unless a pooler may be in between.
    group_commit: let several commits share one write of the server's log to the disk. Others may then see a commit some
    milliseconds before it is durable and acknowledged.
    """

    def __init__(self, dsn: str, driver: str = 'auto', schema: str | None = None,
                 prepared_statements: str = 'auto', group_commit: bool = True):
        self.dsn, self.schema, self.group_commit = dsn, schema, group_commit
        self.driver = find_driver(driver, 'psycopg', 'psycopg2')
        if prepared_statements not in PREPARED_STATEMENTS:
            raise ConfigurationError(f'prepared-statements is {prepared_statements!r}: allowed is '
                                     f'{", ".join(PREPARED_STATEMENTS)}.')
        self.prepared_statements = prepared_statements

    def unseen(self, keep_history: bool, read_only: bool = False) -> PostgreSQLAdapter:
        return PostgreSQLAdapter(self, keep_history, read_only)

    def session(self) -> Session:
        return Session(self.driver, self.dsn)

    def first_session(self) -> Session:
        """Return a session. ConfigurationError: the dsn does not lead to a database."""
        self.driver.load()
        try:
            return self.session()
        except (ConfigurationError, DatabaseError, Disconnected) as e:
            if e.__cause__ is None:
                raise
            raise ConfigurationError(f'PostgreSQL cannot be reached with this dsn: {e}; check that the server runs, '
                                     'and the host, port, dbname, user and password in the dsn.') from e


class MySQL(Address):
    """The database `db` of a MySQL or MariaDB server.

    driver: mysqlclient or pymysql. ssl_mode: one of TLS_MODES, or None: verify_identity with ssl_ca, required with
    ssl_cert, else preferred. host and the others: as the driver takes them; None: as the file read_default_file says,
    or else the driver's default.
    """

    def __init__(self, db: str, *, host: str | None = None, port: int | None = None, unix_socket: str | None = None,
                 user: str | None = None, passwd: str | None = None, driver: str = 'mysqlclient',
                 charset: str = 'utf8mb4', connect_timeout: int = 10, compress: bool = False,
                 read_default_file: str | None = None, read_default_group: str | None = None,
                 ssl_mode: str | None = None, ssl_ca: str | None = None, ssl_cert: str | None = None,
                 ssl_key: str | None = None):
        self.db = db
        self.driver = find_driver(driver, 'mysqlclient', 'pymysql')
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
        self.settings = {name: value for name, value in settings.items() if value is not None}

    def unseen(self, keep_history: bool, read_only: bool = False, server: Server | None = None) -> MySQLAdapter:
        return MySQLAdapter(self, keep_history, read_only, server or Server())

    def session(self) -> Session:
        return Session(self.driver, self.settings)

    def first_session(self) -> Session:
        """Return a session. ConfigurationError: the settings do not lead to a database."""
        self.driver.load()
        try:
            return self.session()
        except (ConfigurationError, DatabaseError, Disconnected) as e:
            if e.__cause__ is None:
                raise
            where = self.settings.get('unix_socket') or self.settings.get('host', 'localhost')
            raise ConfigurationError(f'The database {self.db} cannot be reached at {where}: {e}; check that the '
                                     'server runs, and db, host, port, unix_socket, user and passwd.') from e


class Oracle(Address):
    """The tables of the user `user` in a database of Oracle.

    dsn: host:port/service, a name in tnsnames.ora, or a descriptor. driver: oracledb or cx_Oracle.
    """

    def __init__(self, user: str, password: str, dsn: str, driver: str = 'oracledb'):
        self.dsn = dsn
        self.driver = find_driver(driver, 'oracledb', 'cx_Oracle')
        self.settings = {'user': user, 'password': password, 'dsn': dsn}

    def unseen(self, keep_history: bool, read_only: bool = False) -> OracleAdapter:
        return OracleAdapter(self, keep_history, read_only)

    def session(self) -> Session:
        return Session(self.driver, self.settings)

    def first_session(self) -> Session:
        """Return a session. ConfigurationError: the settings do not lead to a database."""
        self.driver.load()
        try:
            return self.session()
        except (ConfigurationError, DatabaseError, Disconnected) as e:
            if e.__cause__ is None:
                raise
            raise ConfigurationError(f'Oracle cannot be reached at {self.dsn}: {e}; check that the listener and the '
                                     'database run, and user, password and dsn.') from e


class SQLite(Address):
    """A database in the directory `data_dir`, which is created if it is missing (its parents are not).

    pragmas: settings of SQLite, in addition to relstore's own.
    """

    def __init__(self, data_dir: str, pragmas: Mapping[str, str] | None = None):
        if not data_dir:
            raise ConfigurationError('data-dir is empty; name the directory of the database.')
        self.data_dir = Path(data_dir).expanduser().absolute()
        self.path = self.data_dir / 'main.sqlite3'
        self.pragmas = PRAGMAS | {name: str(value) for name, value in (pragmas or {}).items()}
        for name, value in self.pragmas.items():
            if not re.fullmatch(r'\w+', name) or not re.fullmatch(r'[\w.-]+', value):
                raise ConfigurationError(f'The pragma {name} = {value!r} is not a word or a number.')
            if name.lower() == 'synchronous' and value.lower() not in SYNCHRONOUS:      # SQLite takes it for another
                raise ConfigurationError(f'The pragma synchronous is {value}: allowed is FULL, EXTRA, NORMAL or OFF.')
            if name.lower() == 'journal_mode' and value.lower() != 'wal':
                raise ConfigurationError(f'The pragma journal_mode is {value}; leave it out, for relstore needs WAL.')

    def __str__(self) -> str:
        return f'The database {self.path}'

    def is_there(self) -> bool:
        return self.path.exists()

    def unseen(self, keep_history: bool, read_only: bool = False) -> SQLiteAdapter:
        return SQLiteAdapter(self, keep_history, read_only)
