"""`relstore statements`: print every statement that relstore may send to a database."""
from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable

from relstore.adapters.addresses import MySQL, PostgreSQL, SQLite
from relstore.adapters.base import Adapter
from relstore.adapters.migrations import VERSION, sections
from relstore.adapters.mysql_server import Server
from relstore.adapters.mysql_settings import SETTINGS

# (schema, whether history is kept) -> adapter. The server is assumed to have all variables that matter.
DATABASES: dict[str, Callable[[str | None, bool], Adapter]] = {
    'postgresql': lambda schema, keeps: PostgreSQL('', schema=schema).unseen(keeps),
    'sqlite': lambda schema, keeps: SQLite('.').unseen(keeps),
    'mysql': lambda schema, keeps: MySQL('').unseen(keeps, server=Server('MySQL', variables=SETTINGS)),
    'mariadb': lambda schema, keeps: MySQL('').unseen(keeps, server=Server('MariaDB', variables=SETTINGS))}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('database', choices=sorted(DATABASES))
    parser.add_argument('--history-free', action='store_true', help='as of a database without history')
    parser.add_argument('--schema', help='the schema that holds the tables (PostgreSQL; default: public)')
    parser.add_argument('--grants', action='store_true',
                        help='the GRANTs that users need instead, in the database zodb: zope, and the owner zodb_owner')


def run(args: Namespace) -> int:
    adapter = DATABASES[args.database](args.schema, not args.history_free)
    if args.grants:
        print(adapter.rights.grants('zodb', 'zope', 'zodb_owner'), end='')
        return 0
    _section('At open, where it is missing', adapter.schema().items())
    for number in range(2, VERSION + 1):
        _section(f'At open, where the tables are of version {number - 1} (a name says what has to be missing)',
                 sections(adapter, number).items())
    _section('At work: these, BEGIN, COMMIT and ROLLBACK ($name is a parameter)', adapter.sql)
    return 0


def _section(title: str, statements: Iterable[tuple[str, str]]) -> None:
    print(f'-- {title} '.ljust(100, '='), end='\n\n')
    for name, text in statements:
        print(f'-- {name}\n{text.rstrip(";")};\n')
