"""`relstore refs`: find out references ahead of a pack, compare those that are known, or tell who refers to one."""
from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from relstore.adapters.rights import PACK
from relstore.cli import databases, places
from relstore.cli.progress import counted, progress
from relstore.cli.workers import add_jobs, in_processes
from relstore.packing.checks import RANGE, TOLD, Found, Survey
from relstore.storage import RelStore


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help=places.HELP)
    add_jobs(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--check', action='store_true', help='compare the known references with the records')
    mode.add_argument('--to', type=_oid, metavar='OID', help='list the objects that refer to this one, such as 0x1a2b')


def _oid(text: str) -> int:
    try:
        oid = int(text, 0)
    except ValueError:
        oid = -1
    if not 0 <= oid < 2 ** 63:
        raise ArgumentTypeError(f'{text!r} is not an oid such as 0x1a2b')
    return oid


def run(args: Namespace) -> int:
    """Return 0, or 1 where the comparison finds that references are wrong or records cannot be read."""
    return max([_one(args, number, named) for number, named in enumerate(places.find(args.config))])


def _one(args: Namespace, number: int, named: databases.Named) -> int:
    with named.open() as opened:
        if opened.relstore is None:
            print(f"{opened.name}: no storage of relstore's, left out.")
            return 0
        print(f'{opened.name}: {opened.relstore.database.adapter}')
        if args.to is not None:
            return _tell_referrers(opened.relstore, args.to)
        if not args.check:
            database = opened.relstore.database
            with database.pool.session() as session:
                database.adapter.rights.refuse(session, PACK)
        found = Found()
        told: list[str] = []
        with progress() as tell:
            done, about = 0, len(opened.relstore)
            for part in _parts(args, number, opened.relstore):
                found.add(part)
                told += part.told[:TOLD - len(told)]
                done += RANGE
                tell('comparing' if args.check else 'finding out', done, max(about, done))
    for line in told:
        print(f'  {line}')
    if found.differences + found.unreadable > len(told):
        print(f'  ... and {found.differences + found.unreadable - len(told):,} more.')
    if args.check:
        print(f'  {counted(found.revisions, "revision")} compared: {counted(found.differences, "difference")}, '
              f'{counted(found.unreadable, "record")} cannot be read.')
        return 1 if found.differences or found.unreadable else 0
    guessed = '; a pack takes what may be a reference there for one' if found.unreadable else ''
    print(f'  References of {counted(found.saved, "revision")} were found out. '
          f'{counted(found.unreadable, "record")} cannot be read{guessed}.')
    return 0


def _tell_referrers(storage: RelStore, oid: int) -> int:
    count = 0
    with progress() as tell:
        for referrer in Survey(storage.database, tell).referrers(oid):
            print(f'  {referrer.oid:#x} {referrer.class_name or "?"} (tid {referrer.tid:#x})')
            count += 1
    print(f'  {counted(count, "object refers", "objects refer")} to {oid:#x}.')
    return 0


def _parts(args: Namespace, number: int, storage: RelStore) -> Iterator[Found]:
    """Yield the result of one range of objects after the other."""
    survey = Survey(storage.database)
    if args.jobs == 1:
        look = survey.compare if args.check else survey.fill
        for after, upto in survey.ranges():
            yield look(after, upto)
        return
    yield from in_processes(args.jobs, _begin, (args.config, number, args.check), _work, survey.ranges())


# What follows runs in a process of its own.

_opened = ExitStack()
_look: Callable[[int, int], Found]


def _begin(config: str, number: int, check: bool) -> None:
    global _look
    opened = _opened.enter_context(places.find(config)[number].open())
    assert opened.relstore is not None
    survey = Survey(opened.relstore.database)
    _look = survey.compare if check else survey.fill


def _work(after: int, upto: int) -> Found:
    return _look(after, upto)
