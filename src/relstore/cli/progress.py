"""Progress: how far a command is. A bar on a terminal, if the package rich is there; else a line now and then."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from relstore.packing.report import Progress

LINE_EVERY_SECONDS = 5.0

Number = Callable[[float], str]


@contextmanager
def progress(in_lines: bool = False, in_bytes: bool = False) -> Iterator[Progress]:
    """Yield what is to be told how far it is: (what is being done, how much of it is done, of how much or None)."""
    number = size if in_bytes else '{:,.0f}'.format
    if in_lines or not sys.stdout.isatty():
        yield Lines(number)
        return
    try:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield Lines(number)
        return
    columns = (TextColumn('{task.description}'), BarColumn(), TextColumn('{task.fields[done]}'), TimeRemainingColumn())
    with Bars(*columns, transient=True) as bars:
        yield _Bar(bars, number)


class _Bar:
    """A bar for what is being done; it replaces the bar before."""

    def __init__(self, bars: Any, number: Number) -> None:
        self._bars, self._number, self._what, self._task = bars, number, '', None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what != self._what:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._what, self._began = what, time.monotonic()
            self._task = self._bars.add_task(what, total=total, done='')
        told = _of(done, total, self._number)
        if rate := _rate(done, time.monotonic() - self._began, self._number):
            told += f', {rate}'
        self._bars.update(self._task, completed=done, total=total, done=told)


class Lines:
    """A line every few seconds, for a log."""

    def __init__(self, number: Number = '{:,.0f}'.format) -> None:
        self._number, self._what, self._told = number, '', time.monotonic()
        self._began = self._told

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began = what, now
        if now - self._told < LINE_EVERY_SECONDS:
            return
        self._told = now
        line = f'{what}: {_of(done, total, self._number)}' if done else what
        rate = done / (now - self._began) if now > self._began else 0
        if done and total:
            line += f' ({min(100 * done // total, 100)} %)'
        if rate:
            line += f', {_rate(done, now - self._began, self._number)}'
            if total:
                line += f', {duration(max(total - done, 0) / rate)} left'
        print(line, flush=True)


def _of(done: int, total: int | None, number: Number) -> str:
    return f'{number(done)} of {number(total)}' if total else number(done)


def _rate(done: int, seconds: float, number: Number) -> str:
    return f'{number(done / seconds)}/s' if done and seconds > 0 else ''


def duration(seconds: float) -> str:
    """Return a time in a suitable unit."""
    if seconds < 1:
        return f'{1000 * seconds:.1f} ms'
    if seconds < 100:
        return f'{seconds:.1f} s'
    minutes = round(seconds / 60)
    return f'{minutes} min' if minutes < 120 else f'{minutes // 60} h {minutes % 60} min'


def counted(number: int, one: str, more: str = '') -> str:
    """Return a number with its noun: `one`, or `more`, by default `one` with an s."""
    return f'{number:,} {one if number == 1 else more or one + "s"}'


def size(count: float) -> str:
    """Return a number of bytes in a suitable unit."""
    if count == 1:
        return '1 byte'
    for unit, digits in ('bytes', 0), ('kB', 1), ('MB', 1):
        if count < 1000 or unit == 'MB' and count < 10_000:
            return f'{count:,.{digits}f} {unit}'
        count = count / 1000
    return f'{count:,.1f} GB'
