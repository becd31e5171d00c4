"""`relstore adopt`: give a database that RelStorage has made what relstore needs besides, while its site runs."""
from __future__ import annotations

from argparse import ArgumentParser, Namespace

from relstore.adapters.base import Adapter
from relstore.adapters.completion import Completion, Done, Step
from relstore.adapters.patience import PATIENCE_SECONDS, TRY_SECONDS
from relstore.cli import databases

# For steps that change a table.
RELSTORAGE_SEES = {
    'refs': 'RelStorage names the columns that it uses: it does not see these, and leaves them empty.',
    'blob_chunk': 'It is the table that RelStorage has.',
    'relstore_blob': 'It is a new table, which RelStorage does not see.',
    'relstore_unlink_chunk_3': 'RelStorage has a trigger of its own, which stays.',
    'blob_chunk_delete': 'RelStorage has one that does the same: large objects go with their chunks.'}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help='a file with <relstore> or <zodb_db> sections, such as '
                        'zope.conf')
    parser.add_argument('--dry-run', action='store_true', help='print the statements and what they lock')
    parser.add_argument('--wait', type=float, default=PATIENCE_SECONDS, metavar='SECONDS',
                        help='how long to try if a table is in use (default: %(default)g)')


def run(args: Namespace) -> int:
    for named in databases.read(args.config):
        for adapter in named.adapters():
            print(f'{named.name}: {adapter}' if named.name else adapter)
            with adapter.completion() as completion:
                completion.patience = args.wait
                if args.dry_run:
                    _tell(completion)
                else:
                    _adopt(adapter, completion)
    return 0


def _tell(completion: Completion) -> None:
    steps = completion.steps()
    for number, step in enumerate(steps, 1):
        print(f'  {number}. {_summary(step)}')
        for statement in step.statements:
            print('\n'.join(f'       {line}' for line in f'{statement};'.splitlines()))
        print('\n'.join(f'     {line}' for line in _effects(step)))
    print('  Nothing was changed.' if steps else '  It has all that relstore needs.')


def _adopt(adapter: Adapter, completion: Completion) -> None:
    completion.refuse_unless_allowed(create=True)
    number = 0
    while done := completion.run_next():
        number += 1
        print(f'  {number}. {_summary(done.step)}\n     {_duration(done)}', flush=True)
    print('  Done; the site can be started with relstore.' if number else '  It has all that relstore needs.')


def _summary(step: Step) -> str:
    what = ', '.join(step.names)
    if step.version:
        return f'Change what relstore has made to {what}.'
    return f'Change {step.lock.table} ({what}).' if step.lock else f'Make {what}.'


def _effects(step: Step) -> list[str]:
    """Return what a step locks, and what RelStorage sees of it."""
    if step.version:
        seen = ['RelStorage uses none of it. An older relstore that is running can do nothing any more: restart it.']
    elif step.lock is None:
        return ['It locks nothing that is there. RelStorage uses none of it but what bears a name of its own.']
    else:
        seen = [RELSTORAGE_SEES[name] for name in step.names]
    if step.lock is None:
        return seen
    return [f'It needs {step.lock.mode} on {step.lock.table}, and {step.lock.stops} of its site wait meanwhile:',
            f'milliseconds, or, while others have the table in use, up to {TRY_SECONDS:g} s at a time, with pauses.',
            *seen]


def _duration(done: Done) -> str:
    if done.step.lock is None:
        return f'{done.seconds:.2f} s; nothing that was there was locked.'
    tries = 'at the first try' if done.tries == 1 else f'at the {done.tries}th try, with pauses'
    return f'{done.seconds:.2f} s, {tries}; the longest took {done.longest:.2f} s, and nobody waited longer for it.'
