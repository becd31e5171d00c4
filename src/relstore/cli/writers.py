"""`relstore writers`: tell or set who may write to a database, relstore alone or RelStorage too."""
from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

from relstore.adapters.addresses import PostgreSQL
from relstore.adapters.base import Adapter
from relstore.adapters.writers import WRITERS
from relstore.cli import databases

MEANS = {
    'relstore': 'relstore alone writes. On PostgreSQL a large transaction keeps all others out for a while, instead of '
                'locking each object.',
    'any': 'RelStorage processes may write too. On PostgreSQL a large transaction locks each object, and needs a large '
           'max_locks_per_transaction. A pack to the present is refused.'}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help='a file with <relstore> or <zodb_db> sections, such as '
                        'zope.conf; or a dsn, as in the section <postgresql>')
    parser.add_argument('who', nargs='?', choices=WRITERS, help='relstore: no RelStorage process will write any more; '
                        'any: one may (set this before it starts). If omitted, print the setting')
    parser.add_argument('--schema', help='the schema that holds the tables (default: the first of the search path)')


def run(args: Namespace) -> int:
    if not os.path.isfile(args.config):
        address = PostgreSQL(args.config, schema=args.schema)
        _tell(address.bind(keep_history=True), args.who)        # the statements are the same in both modes
        return 0
    for named in databases.read(args.config):
        with named.open() as opened:
            if opened.relstore is not None:
                _tell(opened.relstore.database.adapter, args.who)
    return 0


def _tell(adapter: Adapter, who: str | None) -> None:
    """Set who may write, if that is given, and print it."""
    if who is not None:
        adapter.writers.set(who)
        if who == 'any':
            adapter.writers.make_index()
    who = adapter.writers.who()
    print(f'{adapter}: {who}. {MEANS[who]}')
