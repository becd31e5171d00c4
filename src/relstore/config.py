"""What ZConfig makes of the sections in beside/component.xml.

    %import relstore
    <zodb_db main>
      mount-point /
      <relstore>
        keep-history false
        <postgresql>
          dsn dbname=zodb
        </postgresql>
      </relstore>
    </zodb_db>

`<relstorage>` is the same section under RelStorage's name. Where RelStorage is imported, too, both define that, and
<postgresql> and the others: there `%import relstore.beside` has all of them under names of our own. What is wrong in a
file raises ZConfig.ConfigurationError while the file is read; what an option does not do here is logged as a warning
whenever the storage is opened.
"""
import logging
import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import ZConfig
import ZConfig.datatypes
from ZODB.config import BaseConfig

from relstore.errors import ConfigurationError
from relstore.options import ALIASES, FLAG, REFUSED, Options, dashed, known_names, nearest
from relstore.sessions.drivers import find_driver
from relstore.sessions.mysql_drivers import TLS_MODES

if TYPE_CHECKING:
    from relstore.adapters.addresses import MySQL, Oracle, PostgreSQL, SQLite
    from relstore.storage import RelStore

logger = logging.getLogger('relstore')

# What the option `driver` may name. Ours come first, the default before the others.
POSTGRESQL_DRIVERS = ('psycopg', 'psycopg2')
MYSQL_DRIVERS = ('mysqlclient', 'pymysql')
ORACLE_DRIVERS = ('oracledb', 'cx_Oracle')
SQLITE_DRIVERS = ('sqlite3',)
# RelStorage's; in their place the default is used.
FORMER_POSTGRESQL_DRIVERS = ('auto', 'gevent psycopg2', 'psycopg2cffi', 'pg8000', 'py-postgresql')
FORMER_MYSQL_DRIVERS = ('auto', 'gevent mysqldb', 'mysql connector/python', 'py mysql connector/python',
                        'c mysql connector/python')
FORMER_ORACLE_DRIVERS = ('auto',)
FORMER_SQLITE_DRIVERS = ('auto', 'gevent sqlite3')


class StorageSection(BaseConfig):
    """A section <relstore> or <relstorage>."""

    def __init__(self, config: Any):
        super().__init__(config)
        if len(config.adapters) != 1:
            raise ZConfig.ConfigurationError(
                f'A <{config.getSectionType()}> section needs exactly one section that names its database, '
                f'<postgresql>, <mysql>, <oracle> or <sqlite3>; here it has {len(config.adapters)}.')
        with _told_by_zconfig():
            Options.from_section(config, warn=False)

    def open(self) -> 'RelStore':
        """Return a new storage; ConfigurationError says what to change where that fails."""
        from relstore.storage import RelStore
        [section] = self.config.adapters
        return RelStore(section.open(), Options.from_section(self.config))


class PostgreSQLSection(BaseConfig):
    """A section <postgresql>."""

    def open(self) -> 'PostgreSQL':
        """Return the address."""
        from relstore.adapters.addresses import PostgreSQL
        driver = _available(self.config.driver, ('auto', *POSTGRESQL_DRIVERS))
        return PostgreSQL(self.config.dsn, driver=driver, schema=self.config.schema,
                          prepared_statements=self.config.prepared_statements,
                          group_commit=self.config.group_commit)


class MySQLSection(BaseConfig):
    """A section <mysql>, for MySQL and MariaDB."""

    def open(self) -> 'MySQL':
        """Return the address."""
        from relstore.adapters.addresses import MySQL
        config = self.config
        if config.named_pipe:
            logger.warning('named_pipe has no effect: relstore connects through TCP or unix_socket.')
        return MySQL(
            config.db, host=config.host, port=config.port, unix_socket=config.unix_socket, user=config.user,
            passwd=config.passwd, driver=_available(config.driver, MYSQL_DRIVERS), charset=config.charset,
            connect_timeout=config.connect_timeout, compress=config.compress,
            read_default_file=config.read_default_file, read_default_group=config.read_default_group,
            ssl_mode=config.ssl_mode, ssl_ca=config.ssl_ca, ssl_cert=config.ssl_cert, ssl_key=config.ssl_key)


class OracleSection(BaseConfig):
    """A section <oracle>."""

    def open(self) -> 'Oracle':
        """Return the address."""
        from relstore.adapters.addresses import Oracle
        config = self.config
        return Oracle(config.user, config.password, config.dsn, driver=_available(config.driver, ORACLE_DRIVERS))


class SQLiteSection(BaseConfig):
    """A section <sqlite3>."""

    def open(self) -> 'SQLite':
        """Return the address."""
        from relstore.adapters.addresses import SQLite
        _available(self.config.driver, SQLITE_DRIVERS)
        if self.config.gevent_yield_interval is not None:
            logger.warning('gevent_yield_interval has no effect: SQLite does not yield to gevent here.')
        pragmas = dict(self.config.pragmas or {})
        if pragmas.pop('busy_timeout', None) is not None:
            logger.warning('The pragma busy_timeout has no effect: commit-lock-timeout says it instead.')
        return SQLite(self.config.data_dir, pragmas=pragmas)


def pragmas(section: Any) -> dict[str, str]:
    """Return the values of a section <pragmas> by name."""
    known = [name for name in section.getSectionAttributes() if name != 'others']
    values = {name: str(value) for name in known if (value := getattr(section, name)) is not None}
    for name, given in section.others.items():
        if len(given) != 1:
            raise ZConfig.ConfigurationError(f'The pragma {name} is given {len(given)} times: give it once.')
        [values[name]] = given
    return values


# Types of keys and values. ZConfig adds file and line to the ValueError that they raise.

class _Values:
    """`value.pool_size`, as component.xml calls it, makes a value of a text, or says which key has a wrong one."""

    def __getattr__(self, name: str) -> Callable[[str], Any]:
        key = name.replace('-', '_')
        if key in REFUSED:
            return _refuse(key)
        option = {option.name: option for option in fields(Options)}.get(ALIASES.get(key, key))
        if option is not None:
            allowed = option.metadata['allowed']
            kind = 'byte-size' if key in _IN_BYTES else _KINDS[str(option.type)]
            words, test = allowed.words, allowed.test
        else:
            (kind, words), test = _OF_ADAPTERS[key], lambda value: True
        convert = ZConfig.datatypes.stock_datatypes[kind]

        def value(text: str) -> Any:
            try:
                found = convert(text)
            except (ValueError, OSError):
                found = None
            if found is None or not test(found):
                raise ValueError(f'{name} is {text!r}: allowed is {words}.')
            return found
        return value


def _refuse(key: str) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        raise ValueError(f'{dashed(key)} {REFUSED[key]}')
    return value


value = _Values()

# What ZConfig calls the types of options.
_KINDS = {'bool': 'boolean', 'float': 'float', 'int': 'integer', 'str': 'string', 'str | None': 'string'}
_IN_BYTES = ('cache_local_object_max', 'cache_local_dir_write_max_size', 'blob_cache_size', 'blob_chunk_size')
# And of the keys of adapters, with the words for them.
_BOOLEAN, _INTEGER = ('boolean', FLAG.words), ('integer', 'a whole number')
_BYTES, _FILE = ('byte-size', 'a whole number, with KB, MB or GB or without'), ('existing-file', 'a file that is there')
_OF_ADAPTERS = {
    'group_commit': _BOOLEAN,
    'port': ('port-number', 'a number from 0 to 65535'), 'connect_timeout': _INTEGER, 'compress': _BOOLEAN,
    'named_pipe': _BOOLEAN, 'read_default_file': _FILE, 'ssl_ca': _FILE, 'ssl_cert': _FILE, 'ssl_key': _FILE,
    'page_size': _BYTES, 'mmap_size': _BYTES, 'max_page_count': _INTEGER, 'threads': _INTEGER, 'cache_size': _BYTES,
    'wal_autocheckpoint': _INTEGER, 'soft_heap_limit': _BYTES, 'gevent_yield_interval': _INTEGER,
}


def option_name(text: str) -> str:
    """Return the key of a <relstore> section, written with dashes; RelStorage has one with underscores."""
    name = dashed(text.lower())
    known = [dashed(known) for known in known_names()]
    if name not in known:
        raise ValueError(f'There is no option {text!r}; the nearest known name is {nearest(name, known)!r}.')
    return name


def pragma_name(text: str) -> str:
    """Return the name of a pragma in lower case."""
    name = text.lower().replace('-', '_')
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f'{text!r} cannot be the name of a pragma.')
    return name


def directory(text: str) -> str:
    """Return an absolute path, so that it stays the same when the process changes its directory."""
    if not text:
        raise ValueError('data-dir is empty: name the directory of the database.')
    return os.path.abspath(os.path.expanduser(text))


def schema_name(text: str) -> str:
    """Return the name of a schema; an empty one would be taken for none."""
    if not text:
        raise ValueError('schema is empty: name the schema of the tables, or leave schema out.')
    return text


def prepared_statements(text: str) -> str:
    """Return 'auto', 'true' or 'false'; on, yes, off and no say the latter too, as in any boolean key."""
    name = text.lower()
    if name == 'auto':
        return name
    try:
        return 'true' if ZConfig.datatypes.asBoolean(name) else 'false'
    except ValueError as e:
        raise ValueError(f'prepared-statements is {text!r}: allowed is auto, true or false.') from e


def postgresql_driver(text: str) -> str:
    """Return the name of a driver for PostgreSQL, ours or RelStorage's."""
    return _driver(text, POSTGRESQL_DRIVERS, FORMER_POSTGRESQL_DRIVERS)


def mysql_driver(text: str) -> str:
    """Return the name of a driver for MySQL, ours or RelStorage's."""
    # RelStorage calls mysqlclient by the name of the module in it.
    return _driver('mysqlclient' if text.lower() == 'mysqldb' else text, MYSQL_DRIVERS, FORMER_MYSQL_DRIVERS)


def ssl_mode(text: str) -> str:
    """Return how connections to MySQL are encrypted; MySQL writes it in capitals."""
    mode = text.lower()
    if mode not in TLS_MODES:
        raise ValueError(f'ssl_mode is {text!r}: allowed is {", ".join(TLS_MODES)}.')
    return mode


def oracle_driver(text: str) -> str:
    """Return the name of a driver for Oracle, however it is capitalized."""
    return _driver('cx_Oracle' if text.lower() == 'cx_oracle' else text, ORACLE_DRIVERS, FORMER_ORACLE_DRIVERS)


def sqlite_driver(text: str) -> str:
    """Return the name of a driver for SQLite, ours or RelStorage's."""
    return _driver(text, SQLITE_DRIVERS, FORMER_SQLITE_DRIVERS)


def _driver(text: str, ours: tuple[str, ...], former: tuple[str, ...]) -> str:
    name = text if text in ours else ' '.join(text.lower().split())
    if name in former:
        return name
    try:
        return find_driver(name, *ours).name
    except ConfigurationError as e:
        raise ValueError(str(e)) from e


def _available(name: str, ours: tuple[str, ...]) -> str:
    """Return the driver to use for a name that `_driver` let pass."""
    if name in ours:
        return name
    if name != 'auto':
        logger.warning('The driver %s is not available here; %s is used.', name, ours[0])
    return ours[0]


@contextmanager
def _told_by_zconfig() -> Iterator[None]:
    """Raise our complaints as ZConfig's, which programs that read configuration files know how to report."""
    try:
        yield
    except ConfigurationError as e:
        raise ZConfig.ConfigurationError(str(e)) from e
