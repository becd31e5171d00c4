"""`zodbpack`: pack the storages that a configuration file names, see what would go, or look for broken references.

`relstore pack` is the same under a name that no other distribution has a command of.
"""
from __future__ import annotations

import argparse
import sys
import time

from persistent.TimeStamp import TimeStamp
from ZODB.serialize import referencesf
from ZODB.utils import p64

from relstore.cli import databases, places
from relstore.cli.broken import tell_broken
from relstore.cli.errors import INTERRUPTED
from relstore.cli.errors import run as run_tool
from relstore.cli.logs import told_on_stderr
from relstore.cli.progress import counted, duration, progress, size
from relstore.errors import ConfigurationError
from relstore.packing.checks import ClassSize, Survey
from relstore.packing.garbage import LATER, OBJECT
from relstore.packing.report import Report
from relstore.storage import RelStore

CLASSES = 20        # shown by a dry run
DAY_SECONDS = 86400
SLACK_SECONDS = 3600    # by which a day may be shorter from one night's pack to the next: cron and packs are not exact


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0 done, 1 it found something wrong, 2 it could not be done."""
    parser = argparse.ArgumentParser(
        prog='zodbpack', description='Remove old revisions, and objects that nothing refers to. The site may keep '
        'running.')
    add_arguments(parser)
    parser.add_argument('--traceback', action='store_true', help='show where an error came from')
    args = parser.parse_args(argv)
    return run_tool('zodbpack', lambda: run(args), args.traceback)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help=places.HELP)
    parser.add_argument('-d', '--days', type=float, default=1, metavar='N',
                        help='keep what was current or reachable in the last N days (default: 1; 0 or less: pack to '
                             'now)')
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--dry-run', action='store_true', help='remove nothing; report what would be removed, by class')
    mode.add_argument('--prepack', action='store_true', help='only find what can be removed, and record it')
    mode.add_argument('--use-prepack-state', action='store_true', help='only remove what --prepack has recorded')
    mode.add_argument('--check-refs-only', action='store_true',
                      help='remove nothing; look for references to missing objects')
    parser.add_argument('--list', metavar='FILE', help='with --dry-run: write the oids of the objects that would be '
                        'removed')
    parser.add_argument('--verbose', action='store_true', help='log more, and show progress in lines instead of a bar')
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.list and not args.dry_run:
        args.refuse('--list needs --dry-run.')
    if not args.days <= 36525:
        args.refuse('--days needs a number up to 36525.')
    args.days = max(args.days, 0)
    with told_on_stderr(args.verbose):
        return _all(args)


def _all(args: argparse.Namespace) -> int:
    """Return the worst status; one storage that cannot be packed does not keep the others from it."""
    named = places.find(args.config)
    if args.list:
        open(args.list, 'w').close()
    worst = 0
    for storage in named:
        status = run_tool('zodbpack', lambda: _one(args, storage), args.traceback)
        if status == INTERRUPTED:
            return status
        worst = max(worst, status)
    return worst


def _one(args: argparse.Namespace, named: databases.Named) -> int:
    with named.open() as opened:
        relstore = opened.relstore
        if relstore is None:
            return _plain_pack(args, opened)
        print(f'{opened.name}: {relstore.database.adapter}')
        if args.check_refs_only:
            return _check(args, relstore)
        return _pack(args, opened.name, relstore)


def _plain_pack(args: argparse.Namespace, opened: databases.Opened) -> int:
    """Pack a storage of another kind, whose pack() has no options but the time."""
    if args.dry_run or args.prepack or args.use_prepack_state or args.check_refs_only:
        raise ConfigurationError(f'{opened.name} is not a relstore storage; it can only be packed, with --days.')
    print(f'{opened.name}: {type(opened.storage).__name__}')
    before = opened.storage.getSize()
    with databases.foreign(opened.name):
        opened.storage.pack(time.time() - args.days * DAY_SECONDS, referencesf)
    print(f'  Packed. On disk: {size(before)} before, {size(opened.storage.getSize())} now.')
    return 0


def _pack(args: argparse.Namespace, name: str, storage: RelStore) -> int:
    # None: as the options of the storage say.
    said = args.dry_run or args.prepack or args.use_prepack_state
    modes = {'dry_run': args.dry_run, 'prepack_only': args.prepack, 'skip_prepack': args.use_prepack_state}
    before = storage.getSize()
    with progress(args.verbose) as tell:
        report = storage.pack(_pack_time(args.days, storage), progress=tell, **(modes if said else {}))
        sizes = Survey(storage.database, tell).sizes(report) if report.listed else {}
    print(f'  Pack time {_time(report.pack_tid)}; the newest transaction then was of {_time(report.marked_tid)}.')
    if report.listed:
        _tell_what_would_go(report, sizes)
        if args.list:
            _write_list(args.list, name, report)
    elif args.prepack:
        print(f'  Written down: {_going(report)}. Remove them with --use-prepack-state.')
    else:
        _tell_what_went(report)
        print(f'  On disk: {size(before)} before, {size(storage.getSize())} now. {storage.database.adapter.space}')
    _tell_more(args, report)
    return 0


def _pack_time(days: float, storage: RelStore) -> float:
    """Return the pack time. Without history it is compared with the time of an earlier pack, maybe the night before."""
    back = days * DAY_SECONDS
    return time.time() - (back if storage.supportsUndo() else back - min(back / 20, SLACK_SECONDS))


def _tell_what_went(report: Report) -> None:
    transactions = f', {counted(report.transactions, "transaction")}' if report.transactions else ''
    print(f'  Removed: {counted(report.states, "state")}, {size(report.bytes)}{transactions}.')
    if report.objects or report.older:
        print(f'  They were of {_going(report)}.')
    if report.blobs:
        print(f'  {_blobs(report)} went with them.')
    if report.files:
        print(f'  {counted(report.files, "file")} of blobs, {size(report.file_bytes)}, belonged to nothing any more.')
    if report.spared:
        stay = counted(report.spared, 'object stays, because it was', 'objects stay, because they were')
        print(f'  {stay} linked or changed since.')
    print(f'  Nobody could vote for {duration(report.locked)} in all, {duration(report.longest_lock)} at most. '
          f'{counted(report.steps, "step")}, the longest {duration(report.longest_step)}.')


def _blobs(report: Report) -> str:
    """Return what is told of the data of blobs; where it is in files, a pack tells of these besides."""
    return f'{counted(report.blobs, "revision")} of blobs, with {size(report.blob_bytes)} of data,'


def _going(report: Report) -> str:
    whole = counted(report.objects - report.spared, 'object that goes', 'objects that go')
    older = counted(report.older, 'object that loses', 'objects that lose')
    return f'{whole} as a whole, and {older} older revisions'


def _tell_more(args: argparse.Namespace, report: Report) -> None:
    if report.later:
        when = 'after the next pack that is not a dry run' if report.listed else 'from now'
        days = f'{args.days:g} days' if args.days != 1 else '1 day'
        print(f'  {counted(report.later, "object is", "objects are")} unreachable, but nobody knows for how long: '
              f'with --days {args.days:g} {"it" if report.later == 1 else "they"} can be removed {days} {when}, '
              'with --days 0 at once.')
    if report.unreadable:
        examples = ', '.join(f'{oid:#x} (tid {tid:#x})' for oid, tid in report.examples)
        print(f'  {counted(report.unreadable, "record")} cannot be read; what may be a reference there is taken for '
              f'one: {examples}')
    print('  Time: ' + ', '.join(f'{phase} {duration(seconds)}' for phase, seconds in report.seconds.items()))


def _tell_what_would_go(report: Report, sizes: dict[str, ClassSize]) -> None:
    states, weight = sum(of.states for of in sizes.values()), sum(of.bytes for of in sizes.values())
    print(f'  Would go: {counted(states, "state")}, {size(weight)}.')
    print(f'  They are of {_going(report)}.')
    if report.blobs:
        print(f'  {_blobs(report)} would go with them.')
    if not sizes:
        return
    rows = sorted(sizes.items(), key=lambda item: (-item[1].bytes, item[0]))
    _table([('Bytes', 'States', 'Objects', 'Class', 'For example'), *(
        (f'{of.bytes:,}', f'{of.states:,}', f'{of.objects:,}', name or '?', ' '.join(map(hex, of.examples)))
        for name, of in rows[:CLASSES])])
    if len(rows) > CLASSES:
        rest = [of for _, of in rows[CLASSES:]]
        print(f'  ... and {counted(len(rest), "more class", "more classes")}: '
              f'{counted(sum(of.bytes for of in rest), "byte")}, {counted(sum(of.states for of in rest), "state")}, '
              f'{counted(sum(of.objects for of in rest), "object")}.')


def _table(rows: list[tuple[str, ...]]) -> None:
    """Print columns; the first three are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) if n < 3 else cell.ljust(width)
                 for n, (cell, width) in enumerate(zip(row, widths, strict=True))]
        print('  ' + '  '.join(cells).rstrip())


def _write_list(path: str, name: str, report: Report) -> None:
    with open(path, 'a', encoding='utf-8') as file:
        file.write(f'# {name}\n')
        for oid, tid, goes in zip(*report.listed, strict=True):
            if goes != LATER:
                file.write(f'{oid:#x} object\n' if goes == OBJECT else f'{oid:#x} revisions before {tid:#x}\n')


def _check(args: argparse.Namespace, storage: RelStore) -> int:
    return 1 if tell_broken(storage, args.verbose) else 0


def _time(tid: int) -> str:
    return f'{TimeStamp(p64(tid))}'[:19] + ' UTC' if tid else 'the beginning'


if __name__ == '__main__':
    sys.exit(main())
