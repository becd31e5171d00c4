"""Report: what a command prints while it works, on a terminal or in a log. Needs the package rich."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LOG_EVERY_SECONDS = 10.0
LOG_WIDTH = 110  # of a table in a log


class Step:
    """One step of a command. It calls advance() as it goes, and sets `result` at the end."""

    def __init__(self, title: str, progress: Progress, total: int | None) -> None:
        self.title = title
        self.result = 'done'
        self.seconds = 0.0
        self._progress = progress
        self._task = progress.add_task(title, total=total)
        self._started = self._logged = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count what is done, in the unit of the step's total."""
        self._progress.advance(self._task, count)
        now = time.monotonic()
        if self._progress.disable and now - self._logged >= LOG_EVERY_SECONDS:
            self._logged = now
            [task] = self._progress.tasks
            total = '' if task.total is None else f' of {task.total:,.0f}'
            self._progress.console.print(f'{self.title}: {task.completed:,.0f}{total}', highlight=False)

    def stop(self) -> None:
        self.seconds = time.monotonic() - self._started


class Report:
    """A bar for each step on a terminal; in a log a line when it begins and one now and then.

    In a log there is nothing but ASCII around the words.
    """

    def __init__(self) -> None:
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=LOG_WIDTH)
        self.steps: list[Step] = []

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Step]:
        """Time one step; total is what its advance() will have counted at the end, None if unknown."""
        columns = (
            TextColumn('{task.description}'),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        in_log = not self.console.is_terminal
        if in_log:
            self.say(f'{title} ...')
        with Progress(*columns, console=self.console, transient=True, disable=in_log) as progress:
            step = Step(title, progress, total)
            yield step
            step.stop()
        self.steps.append(step)

    def say(self, text: str = '') -> None:
        """Print lines as they are: no markup, no wrapping."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, columns: list[str], rows: list[tuple[str, ...]]) -> None:
        """Print a table; a column whose name ends in a space is aligned to the right."""
        look = box.SIMPLE_HEAD if self.console.is_terminal else box.ASCII_DOUBLE_HEAD
        table = Table(title=title, title_justify='left', box=look)
        for column in columns:
            table.add_column(column.strip(), justify='right' if column.endswith(' ') else 'left')
        for row in rows:
            table.add_row(*row)
        self.console.print(table, markup=False, highlight=False)

    def summary(self) -> None:
        """Print the table of the steps so far."""
        self.table(
            'What was done',
            ['Step', 'Result', 'Seconds '],
            [(step.title, step.result, f'{step.seconds:.1f}') for step in self.steps],
        )
