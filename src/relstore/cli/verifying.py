"""Verifying: `relstore convert --verify`, which compares a copy with its source, by several processes."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from relstore.cli import places
from relstore.cli.progress import counted, duration
from relstore.cli.workers import in_processes
from relstore.converting.conversion import Conversion

DIFFERENCES = 20        # that are told
WORTH_BYTES = 32 << 20  # of a source: a smaller one is compared before other processes have begun


class Places(NamedTuple):
    """What a command was told, so that another process opens the same. at: b'' if that is the present."""
    source: str
    destination: str | None
    at: bytes
    skip_damaged: bool


@dataclass
class Compared:
    """What was compared. differences: of a range of transactions, one more than are told, at most."""
    differences: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    transactions: int = 0
    records: int = 0
    blobs: int = 0
    size: int = 0

    def add(self, other: Compared) -> None:
        self.differences += other.differences
        self.transactions += other.transactions
        self.records += other.records
        self.blobs += other.blobs
        self.size += other.size


def verify(conversion: Conversion, of: Places, jobs: int, advance: Callable[[int], None]) -> int:
    """Compare, and print what differs. Return 1 if something does, else 0.

    advance: called now and then with the number of bytes that are compared.
    """
    began = time.monotonic()
    if conversion.source.getSize() < WORTH_BYTES or not conversion.is_divisible:
        jobs = 1
    total = Compared()
    for part in _parts(conversion, of, jobs, advance):
        total.add(part)
        for what in part.left_out:
            conversion.leave_out(what)
        advance(total.size)
        if len(total.differences) > DIFFERENCES:
            break
    for difference in total.differences[:DIFFERENCES]:
        print(difference)
    if total.differences:
        print('The copy differs' + (f'; more than these {DIFFERENCES} differences are not told.'
                                    if len(total.differences) > DIFFERENCES else '.'))
        return 1
    if newer := conversion.newer_ones:
        print(f'The copy has {counted(newer, "newer transaction")}, which {"was" if newer == 1 else "were"} not '
              'compared: it is in use, or the source has lost what it had.')
    print(f'Compared: {counted(total.transactions, "transaction")}, {counted(total.records, "record")} '
          f'and {counted(total.blobs, "blob")} are equal, in {duration(time.monotonic() - began)}.')
    return 0


def _parts(conversion: Conversion, of: Places, jobs: int, advance: Callable[[int], None]) -> Iterator[Compared]:
    if jobs == 1:
        yield _compared(conversion, None, None, advance)
    else:
        yield from in_processes(jobs, _begin, (of,), _work, conversion.ranges())


def _compared(conversion: Conversion, start: bytes | None, stop: bytes | None,
              advance: Callable[[int], None] = lambda done: None) -> Compared:
    done = 0

    def added(records: int, size: int) -> None:
        nonlocal done
        done += size
        advance(done)

    comparison = conversion.comparison()
    differences = list(islice(comparison.differences(added, start, stop), DIFFERENCES + 1))
    return Compared(differences, [], comparison.transactions, comparison.records, comparison.blobs, done)


# What follows runs in a process of its own.

_opened = ExitStack()
_conversion: Conversion
_left_out: list[str] = []


def _begin(of: Places) -> None:
    global _conversion
    source, destination = places.find_two(of.source, of.destination)
    left_out = _left_out.append if of.skip_damaged else None
    theirs = _opened.enter_context(source.open(reading=True, left_out=left_out))
    ours = _opened.enter_context(destination.open(reading=True))
    _conversion = Conversion(theirs.storage, ours.storage, ours.relstore, of.at, left_out, theirs.relstore)


def _work(start: bytes | None, stop: bytes) -> Compared:
    compared = _compared(_conversion, start, stop)
    compared.left_out, _left_out[:] = _left_out[:], []
    return compared
