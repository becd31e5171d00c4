"""`relstore convert`: copy a storage into another of any kind, and compare the two. `zodbconvert` is the same.

What was interrupted goes on where it stopped. The source is only read.
"""
from __future__ import annotations

import argparse
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

from persistent.TimeStamp import TimeStamp
from ZODB.POSException import POSKeyError
from ZODB.utils import maxtid, z64

from relstore.cli import databases, places
from relstore.cli.broken import tell_broken
from relstore.cli.errors import INTERRUPTED
from relstore.cli.errors import run as run_tool
from relstore.cli.following import Follower, Stopped
from relstore.cli.logs import told_on_stderr
from relstore.cli.progress import counted, duration, progress, size
from relstore.cli.signals import Signals, signals
from relstore.cli.verifying import Places, verify
from relstore.cli.workers import add_jobs
from relstore.cli.zopeconf import zope_lines
from relstore.converting.conversion import Conversion
from relstore.errors import ConfigurationError
from relstore.storage import RelStore

LEFT_OUT = 3            # exit status if the copy lacks what is damaged in the source

def main(argv: list[str] | None = None) -> int:
    """Run zodbconvert; return its exit status: 0 done, 1 the copy differs, 2 it could not be done, 3 see LEFT_OUT."""
    parser = argparse.ArgumentParser(prog='zodbconvert', description='Copy a ZODB storage into another of any kind.')
    add_arguments(parser)
    parser.add_argument('--traceback', action='store_true', help='show where an error came from')
    args = parser.parse_args(argv)
    return run_tool('zodbconvert', lambda: run(args), args.traceback)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('source', metavar='SOURCE', help='a Data.fs; a configuration file, FILE or FILE#NAME; or a '
                        'URL. Or a file with sections named `source` and `destination`: then nothing else is named')
    parser.add_argument('destination', metavar='DESTINATION', nargs='?', help='likewise, for example the URL '
                        'postgresql://user@host/name?blob-dir=/path or sqlite:///path')
    parser.add_argument('--dry-run', action='store_true', help='copy nothing; report what would be copied')
    parser.add_argument('--clear', action='store_true', help='empty the destination first')
    parser.add_argument('--yes', action='store_true', help='with --clear: do not ask')
    parser.add_argument('--incremental', action='store_true',
                        help='continue a copy that was begun; this is the default')
    parser.add_argument('--at', metavar='TIME', type=tid_of_time, default=b'',
                        help='copy the state at this time, such as "2026-11-23 12:00" (UTC)')
    parser.add_argument('--skip-damaged', action='store_true', help='leave out what cannot be read in the source, and '
                        'list it')
    parser.add_argument('--verify', action='store_true', help='compare source and destination afterwards')
    parser.add_argument('--verify-only', action='store_true', help='compare, and copy nothing')
    add_jobs(parser)
    parser.add_argument('--follow', action='store_true', help='keep copying what is committed, until stopped (SIGINT, '
                        'SIGTERM)')
    parser.add_argument('--until-idle', metavar='SECONDS', type=float, help='with --follow: stop when nothing has been '
                        'committed to the source for this long')
    parser.add_argument('--debug', action='store_true', help='log more, and show progress in lines instead of a bar')
    parser.set_defaults(refuse=parser.error)


def run(args: Namespace) -> int:
    if args.until_idle is not None and not args.follow:
        args.refuse('--until-idle needs --follow.')
    if args.follow and (args.dry_run or args.verify_only or args.at):
        args.refuse('--follow copies what is committed from now on: not with --dry-run, --verify-only or --at.')
    if args.clear and (args.dry_run or args.verify_only):
        args.refuse('--clear empties the destination: it goes with neither --dry-run nor --verify-only.')
    if args.skip_damaged and args.follow:
        args.refuse('--skip-damaged is for a source that nobody writes to, so it does not go with --follow.')
    with told_on_stderr(args.debug), signals() as stopped:
        source, destination = places.find_two(args.source, args.destination)
        if {os.path.realpath(path) for path in source.paths} & {os.path.realpath(path) for path in destination.paths}:
            raise ConfigurationError('The source and the destination are the same file.')
        for shared in sorted(source.blob_directories & destination.blob_directories):
            raise ConfigurationError(f'{shared} is the blob-dir of both storages: name another blob-dir for the '
                                     'destination.')
        command = _Command(args, source, destination, stopped)
        try:
            return command.run()
        except (Stopped, KeyboardInterrupt):
            print(command.how_to_go_on())
            return INTERRUPTED


class _Command:

    def __init__(self, args: Namespace, source: databases.Named, destination: databases.Named, stopped: Signals):
        self._args, self._source, self._destination, self._stopped = args, source, destination, stopped
        self._left_out: LeftOut | None = LeftOut() if args.skip_damaged else None
        self._has_begun = self._is_copied = False

    def how_to_go_on(self) -> str:
        """Return what is told when this is stopped."""
        if self._is_copied:
            return 'Stopped. All is copied; --verify-only compares it.'
        if not self._has_begun:
            return 'Stopped. Nothing was copied.'
        return 'Stopped. The same command goes on from here' + (', without --clear.' if self._args.clear else '.')

    def run(self) -> int:
        args = self._args
        with ExitStack() as stack:
            self._reading = stack.enter_context(ExitStack())
            source = self._open_source()
            if args.dry_run and not self._destination.is_made:
                print('The destination has no tables yet: they would be made.')
                return self._tell_what_would_be_copied(source.storage.iterator())
            writing = not (args.dry_run or args.verify_only)
            opened = stack.enter_context(self._destination.open(reading=not writing, making=writing))
            _see_that_they_differ(source, opened)
            conversion = self._converted(source, opened)
            if args.clear:
                if not conversion.has_something:
                    raise ConfigurationError('There is nothing to copy, so nothing was emptied.')
                self._clear(opened)
            self._began, before = time.monotonic(), opened.storage.lastTransaction()
            if args.dry_run:
                return self._tell_what_would_be_copied(conversion.to_copy())
            if not args.verify_only:
                with self._stopped.waiting():
                    try:
                        self._copy(conversion, source.relstore)
                    except BaseException:
                        _tell_unreadable(conversion)
                        raise
                    if args.follow:
                        followed = self._follow(conversion, opened)
                        if followed is None:
                            return 0
                        conversion = followed
                self._is_copied = True
                self._summary(conversion)
                if args.skip_damaged and not args.verify and before != z64:
                    self._look_again(conversion, before)
            status = 0
            if args.verify or args.verify_only:
                status = self._verify(conversion)
            if args.verify or args.verify_only or args.skip_damaged:
                self._tell_what_dangles(opened)
            if writing and not status:
                print(zope_lines(args.destination or args.source, self._destination))
            if self._left_out is not None and self._left_out.count:
                self._left_out.summary()
                if not _has_root(opened):
                    print('Nor does the copy have the root object, so no site can use it.')
                return status or LEFT_OUT
            return status

    def _follow(self, conversion: Conversion, opened: databases.Opened) -> Conversion | None:
        """Copy what comes, until the source is idle. Return what has done that; None: it was stopped."""
        follower = Follower(self._source, lambda: self._converted(self._open_source(), opened), conversion,
                            self._stopped)
        try:
            return follower.follow(self._args.until_idle)
        except Stopped:
            _tell_unreadable(conversion)
            print('Stopped. The same command goes on from here.')
            return None

    def _converted(self, source: databases.Opened, opened: databases.Opened) -> Conversion:
        return Conversion(source.storage, opened.storage, opened.relstore, self._args.at, self._left_out,
                          source.relstore)

    def _open_source(self) -> databases.Opened:
        self._reading.close()
        return self._reading.enter_context(self._source.open(reading=True, left_out=self._left_out))

    def _clear(self, opened: databases.Opened) -> None:
        storage = opened.relstore or opened.storage
        if not hasattr(storage, 'zap_all'):
            raise ConfigurationError(f'{opened.name} cannot be emptied: name a new file, or remove this one.')
        if not self._args.yes and sys.stdin.isatty() and input(f'Remove everything in {_told(opened)}? [y/N] ') != 'y':
            raise ConfigurationError('Nothing was done.')
        storage.zap_all()
        print(f'Emptied: {_told(opened)}')

    def _copy(self, conversion: Conversion, source: RelStore | None) -> None:
        """Copy what is there; Stopped after the batch of transactions in which a signal came."""
        self._has_begun = True
        total = conversion.size_left(source)
        done = 0
        with progress(self._args.debug, in_bytes=True) as tell:
            def advance(tid: bytes, records: int, size: int) -> None:
                nonlocal done
                done += size
                tell('copying', done, total and max(total, done))
                if self._stopped:
                    raise Stopped

            conversion.copy(advance)

    def _look_again(self, conversion: Conversion, last: bytes) -> None:
        """Tell what the runs before this one have left out, of which only the source knows."""
        done = 0
        with progress(self._args.debug, in_bytes=True) as tell:
            def advance(size: int) -> None:
                nonlocal done
                done += size
                tell('looking at what was copied before', done, None)
                if self._stopped:
                    raise KeyboardInterrupt

            conversion.look_again(last, advance)

    def _tell_what_would_be_copied(self, transactions: Iterable[Any]) -> int:
        count = records = bytes_ = 0
        first = last = b''
        with progress(self._args.debug, in_bytes=True) as tell:
            for transaction in transactions:
                count += 1
                first, last = first or transaction.tid, transaction.tid
                for record in transaction:
                    records += 1
                    bytes_ += len(record.data or b'')
                tell('reading', bytes_, None)
                if self._stopped:
                    raise KeyboardInterrupt
        print(f'{counted(count, "transaction")} would be copied, {counted(records, "record")} of {size(bytes_)}'
              + (f', from {_time(first)} to {_time(last)}.' if count else '.'))
        return 0

    def _verify(self, conversion: Conversion) -> int:
        args = self._args
        jobs = args.jobs if self._source.is_shared and self._destination.is_shared else 1
        with progress(args.debug, in_bytes=True) as tell:
            def advance(done: int) -> None:
                tell('comparing', done, conversion.copied.size or None)
                if self._stopped:
                    raise KeyboardInterrupt

            return verify(conversion, Places(args.source, args.destination, args.at, args.skip_damaged), jobs, advance)

    def _tell_what_dangles(self, opened: databases.Opened) -> None:
        """Of a copy of relstore's, which knows the references; where it has no root, that is told instead."""
        if opened.relstore is not None and _has_root(opened):
            tell_broken(opened.relstore, self._args.debug)

    def _summary(self, conversion: Conversion) -> None:
        copied, seconds = conversion.copied, time.monotonic() - self._began
        _tell_unreadable(conversion)
        if not copied.transactions:
            print('There was nothing to copy.')
            return
        print(f'Copied: {counted(copied.transactions, "transaction")}, {counted(copied.records, "record")}, '
              f'{size(copied.size)} in {duration(seconds)}, {size(copied.size / max(seconds, 1e-3))}/s.')


class LeftOut:
    """Tells what cannot be read in the source: each piece once, however often it is met."""

    def __init__(self) -> None:
        self._met: set[str] = set()

    def __call__(self, what: str) -> None:
        if what not in self._met:
            self._met.add(what)
            print(f'Left out: {what}', file=sys.stderr, flush=True)

    @property
    def count(self) -> int:
        return len(self._met)

    def summary(self) -> None:
        print(f'{counted(self.count, "piece")} of the source cannot be read and {"is" if self.count == 1 else "are"} '
              'not in the copy; each is named above.')


def _tell_unreadable(conversion: Conversion) -> None:
    unreadable = conversion.copied.unreadable
    if unreadable.count:
        named = f'all but {unreadable.unnamed:,} are named above' if unreadable.unnamed else 'named above'
        print(f'{counted(unreadable.count, "record")} cannot be read for what they refer to ({named}). They are in the '
              'copy as they were.')


def _see_that_they_differ(source: databases.Opened, destination: databases.Opened) -> None:
    if source.relstore is not None and destination.relstore is not None:
        names = {relstore.database.pool.attempt(relstore.database.adapter.meta).get('database')
                 for relstore in (source.relstore, destination.relstore)}
        if len(names) == 1 and None not in names:
            raise ConfigurationError(f'{_told(source)} and {_told(destination)} are one database, or one is a copy of '
                                     'the other that the database made.')


def _has_root(opened: databases.Opened) -> bool:
    try:
        return opened.storage.loadBefore(z64, maxtid) is not None
    except POSKeyError:
        return False


def _told(opened: databases.Opened) -> str:
    return str(opened.relstore.database.adapter if opened.relstore is not None else opened.name)


def _time(tid: bytes) -> str:
    return f'{TimeStamp(tid)}'[:19]


def tid_of_time(text: str) -> bytes:
    """Return the tid of a time. argparse.ArgumentTypeError: it is none."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f'{text} is not a time such as 2026-11-23 or "2026-11-23 12:00:00"') from e
    when = when.replace(tzinfo=timezone.utc) if when.tzinfo is None else when.astimezone(timezone.utc)
    if not 1900 <= when.year < 5900:
        raise argparse.ArgumentTypeError(f'{text} is not a time that a transaction can have')
    seconds = when.second + when.microsecond / 1e6
    return TimeStamp(when.year, when.month, when.day, when.hour, when.minute, seconds).raw()
