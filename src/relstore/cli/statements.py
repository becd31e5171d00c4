"""`relstore statements`: print every statement that relstore may send to a database."""
from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping

from relstore.adapters.addresses import MySQL, Oracle, PostgreSQL, SQLite
from relstore.adapters.base import Adapter
from relstore.adapters.migrations import VERSION, sections
from relstore.adapters.mysql_server import Server
from relstore.adapters.mysql_settings import SETTINGS
from relstore.sessions.mysql_drivers import CIPHER
from relstore.sessions.session import ROLLBACK
from relstore.sessions.statement import split

Statements = Iterable[tuple[str, str]]      # (name, text)


def _postgresql(schema: str | None, keeps: bool) -> dict[str, Adapter]:
    return {'': PostgreSQL('', schema=schema).unseen(keeps),
            'with group-commit false': PostgreSQL('', schema=schema, group_commit=False).unseen(keeps)}


def _sqlite(schema: str | None, keeps: bool) -> dict[str, Adapter]:
    return {'': SQLite('.').unseen(keeps)}


def _oracle(schema: str | None, keeps: bool) -> dict[str, Adapter]:
    return {'': Oracle('', '', '').unseen(keeps)}


def _mysql(schema: str | None, keeps: bool, product: str = 'MySQL') -> dict[str, Adapter]:
    """The server is assumed to have all variables that matter."""
    usual = Server(product, variables=SETTINGS)
    other = Server(product, variables=SETTINGS, has_memory=False, in_cluster=True, logs_whole_rows=True)
    return {'': MySQL('').unseen(keeps, server=usual),
            'in a cluster, where the server logs whole rows, or has no tables in memory':
                MySQL('').unseen(keeps, server=other),
            'with read-only true': MySQL('').unseen(keeps, read_only=True, server=usual)}


# (schema, whether history is kept) -> adapters, by where they send something else than the first.
DATABASES: dict[str, Callable[[str | None, bool], dict[str, Adapter]]] = {
    'postgresql': _postgresql, 'oracle': _oracle, 'sqlite': _sqlite, 'mysql': _mysql,
    'mariadb': lambda schema, keeps: _mysql(schema, keeps, 'MariaDB')}
# What is sent on behalf of no adapter. (psycopg2 also prepares statements by PREPARE, and sends these by EXECUTE.)
OF_SESSIONS = [('rollback', ROLLBACK)]
OF_DRIVERS = {database: [('is_encrypted (mysqlclient)', CIPHER)] for database in ('mysql', 'mariadb')}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('database', choices=sorted(DATABASES))
    parser.add_argument('--history-free', action='store_true', help='for a history-free database')
    parser.add_argument('--schema', help='the schema that holds the tables (PostgreSQL; default: public)')
    parser.add_argument('--grants', action='store_true',
                        help='print the GRANTs that users need instead: zope, and the owner zodb_owner, in the '
                             'database zodb')


def run(args: Namespace) -> int:
    adapters = DATABASES[args.database](args.schema, not args.history_free)
    adapter = adapters.pop('')
    if args.grants:
        print(adapter.rights.grants('zodb', 'zope', 'zodb_owner'), end='')
        return 0
    schema, at_work = adapter.schema(), dict(adapter.sql)
    _section('At open, where it is missing', schema.items())
    for number in range(2, VERSION + 1):
        _section(f'At open, where the tables are of version {number - 1} (a name says what has to be missing)',
                 _migration(adapter, number))
    _section('At work ($name is a parameter)', at_work.items())
    _section('By sessions and drivers', OF_SESSIONS + OF_DRIVERS.get(args.database, []))
    for where, other in adapters.items():
        _section(f'Instead, {where}', [*_others(other.schema(), schema), *_others(dict(other.sql), at_work)])
    return 0


def _migration(adapter: Adapter, number: int) -> Statements:
    """Return what is run where all of it is missing: the locks first."""
    texts = sections(adapter, number)
    statements = [statement for text in texts.values() for statement in split(text)]
    locks = adapter.migration_locks(statements, {'relstore_sweep'})
    return [*([('(relstore_sweep) locks', ';\n'.join(locks))] if locks else []), *texts.items()]


def _others(texts: Mapping[str, str], usual: Mapping[str, str]) -> Statements:
    return ((name, text) for name, text in texts.items() if text != usual.get(name))


def _section(title: str, statements: Statements) -> None:
    print(f'-- {title} '.ljust(100, '='), end='\n\n')
    for name, text in statements:
        print(f'-- {name}\n{text.rstrip(";")};\n')
