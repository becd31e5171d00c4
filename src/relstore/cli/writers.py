"""`relstore writers`: tell or set who may write to a PostgreSQL database, relstore alone or RelStorage too."""
from __future__ import annotations

from argparse import ArgumentParser, Namespace

from relstore.adapters.postgresql import WRITERS, PostgreSQL

MEANS = {
    'relstore': 'relstore alone writes. A large transaction keeps all others out for a while, instead of locking each '
                'object.',
    'any': 'RelStorage processes may write too. A large transaction locks each object, and needs a large '
           'max_locks_per_transaction.'}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('dsn', help='as in the section <postgresql>')
    parser.add_argument('who', nargs='?', choices=WRITERS, help='relstore: no RelStorage process will write any more; '
                        'any: one may (say so before it starts). Left out: tell what was said last')
    parser.add_argument('--schema', help='the schema that holds the tables (default: the first of the search path)')


def run(args: Namespace) -> int:
    adapter = PostgreSQL(args.dsn, schema=args.schema)
    adapter.configure(keep_history=True, read_only=False)      # what it asks is the same in both modes
    if args.who is not None:
        adapter.set_writers(args.who)
    who = adapter.writers()
    print(f'{adapter}: {who}. {MEANS[who]}')
    return 0
