"""`relstore <verb>`: the commands under one name, and how they fail."""

from __future__ import annotations

import argparse
import sys

from relstore.cli import demo, statements, writers
from relstore.errors import StorageError

# A verb is a module with add_arguments(parser) and run(args) -> exit status; its docstring is the help.
VERBS = {'demo': demo, 'statements': statements, 'writers': writers}


def main(argv: list[str] | None = None) -> int:
    """Run one verb; return its exit status: 0 done, 1 it found something wrong, 2 it could not be done.

    What the user can put right is one sentence on stderr, without a traceback unless --traceback asks for it.
    """
    args = _parser().parse_args(argv)
    try:
        return VERBS[args.verb].run(args)
    except KeyboardInterrupt:
        print('relstore: interrupted', file=sys.stderr)
        return 130
    except (StorageError, OSError) as error:
        if args.traceback:
            raise
        print(f'relstore: {_sentence(error)}', file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='relstore', description='A ZODB storage in a relational database.')
    verbs = parser.add_subparsers(dest='verb', metavar='verb', required=True)
    for name, module in VERBS.items():
        summary = module.__doc__.splitlines()[0].partition(': ')[2]
        verb = verbs.add_parser(name, help=summary, description=summary)
        module.add_arguments(verb)
        verb.add_argument('--traceback', action='store_true', help='show where an error came from')
    return parser


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f'{error.filename}: {error.strerror}'
    return str(error)


if __name__ == '__main__':
    sys.exit(main())
