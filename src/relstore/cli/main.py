"""`relstore <verb>`: all commands under one name."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version

from relstore.cli import adopt, blobs, convert, demo, refs, statements, writers, zodbpack
from relstore.cli.errors import run

# A verb is a module with add_arguments(parser) and run(args) -> exit status; its docstring is the help.
VERBS = {'adopt': adopt, 'blobs': blobs, 'convert': convert, 'demo': demo, 'pack': zodbpack, 'refs': refs,
         'statements': statements, 'writers': writers}


def main(argv: list[str] | None = None) -> int:
    """Run one verb; return its exit status: 0 done, 1 it found something wrong, 2 it could not be done.

    An error that the user can put right is one sentence on stderr, with a traceback only if --traceback is given.
    """
    args = _parser().parse_args(argv)
    return run('relstore', lambda: VERBS[args.verb].run(args), args.traceback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='relstore', description='A ZODB storage in a relational database.')
    parser.add_argument('--version', action='version', version=f'%(prog)s {_version()}')
    verbs = parser.add_subparsers(dest='verb', metavar='verb', required=True)
    for name, module in VERBS.items():
        summary = str(module.__doc__).splitlines()[0].partition(': ')[2]
        verb = verbs.add_parser(name, help=summary, description=summary)
        module.add_arguments(verb)
        verb.add_argument('--traceback', action='store_true', help='show where an error came from')
    return parser


def _version() -> str:
    try:
        return version('relstore')
    except PackageNotFoundError:
        return 'that is not installed: run from its sources'


if __name__ == '__main__':
    sys.exit(main())
