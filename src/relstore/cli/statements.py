"""`relstore statements`: print every statement that relstore may send to a database."""
from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable

from relstore.adapters.base import Adapter
from relstore.adapters.mysql import MySQL
from relstore.adapters.mysql_settings import SETTINGS
from relstore.adapters.postgresql import PostgreSQL
from relstore.adapters.sqlite import SQLite

DATABASES: dict[str, Callable[[str | None], Adapter]] = {
    'postgresql': lambda schema: PostgreSQL('', schema=schema), 'sqlite': lambda schema: SQLite('.'),
    'mysql': lambda schema: MySQL(''), 'mariadb': lambda schema: MySQL('')}
PRODUCTS = {'mysql': 'MySQL', 'mariadb': 'MariaDB'}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('database', choices=sorted(DATABASES))
    parser.add_argument('--history-free', action='store_true', help='as of a database without history')
    parser.add_argument('--schema', help='the schema that holds the tables (PostgreSQL; default: public)')
    parser.add_argument('--grants', action='store_true',
                        help='the GRANTs that users need instead, in the database zodb: zope, and the owner zodb_owner')


def run(args: Namespace) -> int:
    adapter = DATABASES[args.database](args.schema)
    adapter.configure(keep_history=not args.history_free, read_only=False)
    if isinstance(adapter, MySQL):
        adapter.use_server(PRODUCTS[args.database], variables=SETTINGS)     # those that the server has
    if args.grants:
        print(adapter.grants('zodb', 'zope', 'zodb_owner'), end='')
        return 0
    _section('At open, where it is missing', adapter.schema().items())
    _section('At work: these, BEGIN, COMMIT and ROLLBACK (? is a parameter)', adapter.sql)
    return 0


def _section(title: str, statements: Iterable[tuple[str, str]]) -> None:
    print(f'-- {title} '.ljust(100, '='), end='\n\n')
    for name, text in statements:
        print(f'-- {name}\n{text.rstrip(";")};\n')
