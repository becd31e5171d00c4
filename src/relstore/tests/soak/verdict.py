"""Verdict: whether anything grew or faded, judged by the last third of a run beside the second; and the report.

The first third is left out: caches fill, and Python's memory settles. Throughput is that of samples without a
disturbance.
"""
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEAST = 4               # undisturbed samples of a third; with fewer nothing can be said
MEMORY = 1.05           # of the second third, and
MEMORY_SLACK = 2        # megabytes
THROUGHPUT = 0.8
DEAD = 1.5
DEAD_SLACK = 5000
SIZE = 1.2
ROWS = 24               # of the table, at most


@dataclass(frozen=True)
class Finding:
    """One thing that was judged. `holds` is None where the run was too short."""
    what: str
    text: str
    holds: bool | None

    def __str__(self) -> str:
        outcome = {True: 'holds', False: 'FAILS', None: 'not judged'}[self.holds]
        return f'{outcome:<10}  {self.what}: {self.text}'


def findings(samples: list[dict[str, Any]], sessions: int) -> list[Finding]:
    """Judge the samples of a run. sessions: how many there may be at any time."""
    third = len(samples) // 3
    second, last = samples[third:2 * third], samples[2 * third:]
    calm_second, calm_last = ([sample for sample in some if not sample['events']] for some in (second, last))
    enough = min(len(calm_second), len(calm_last)) >= LEAST

    def compared(what: str, value: Callable, average: Callable, unit: str, bound: str, holds: Callable,
                 calm: bool = False) -> Finding:
        if not enough:
            return Finding(what, f'the run is too short: {LEAST} undisturbed samples are needed in each third', None)
        before, after = (average([value(sample) for sample in some])
                         for some in ((calm_second, calm_last) if calm else (second, last)))
        change = f', {after / before - 1:+.1%}' if before else ''
        return Finding(what, f'{before:,.4g}, then {after:,.4g} {unit}{change} (bound: {bound})', holds(before, after))

    found = [
        compared(f'memory of process {n}', lambda sample, n=n: sample['memory'][n], statistics.median, 'MB',
                 f'+{MEMORY - 1:.0%} or {MEMORY_SLACK} MB',
                 lambda before, after: after <= max(before * MEMORY, before + MEMORY_SLACK))
        for n in range(min((len(sample['memory']) for sample in samples), default=0))
    ] + [
        compared(name, lambda sample, name=name: sample[name], statistics.median, 'per second',
                 f'{THROUGHPUT - 1:.0%}', lambda before, after: after >= before * THROUGHPUT, calm=True)
        for name in ('commits', 'reads')
    ] + [
        compared('dead', lambda sample: sample['dead'], max, 'at most', f'x {DEAD} + {DEAD_SLACK:,}',
                 lambda before, after: after <= before * DEAD + DEAD_SLACK),
        compared('size of the history-free database', lambda sample: sample['size_free'] / sample['rows_free'],
                 statistics.median, 'bytes per row', f'x {SIZE}', lambda before, after: after <= before * SIZE),
    ]
    for what, name, bound in (('sessions', 'sessions', sessions), ('transactions left open', 'forgotten', 0)):
        most = max((sample[name] for sample in samples), default=None)
        found.append(Finding(what, f'at most {most} (bound: {bound})', None if most is None else most <= bound))
    return found


# the report


COLUMNS = {
    'minutes': lambda sample: f'{sample["minutes"]:.1f}',
    'commits/s': lambda sample: f'{sample["commits"]:.0f}',
    'reads/s': lambda sample: f'{sample["reads"]:.0f}',
    'memory, MB': lambda sample: ' '.join(f'{memory:.1f}' for memory in sample['memory']),
    'cache, MB': lambda sample: f'{sample["cache"]:.2f}',
    'sessions': lambda sample: f'{sample["sessions"]:.0f}',
    'left open': lambda sample: f'{sample["forgotten"]:.0f}',
    'dead': lambda sample: f'{sample["dead"]:,.0f}',
    'free, MB': lambda sample: f'{sample["size_free"] / 1e6:.1f}',
    'bytes/row': lambda sample: f'{sample["size_free"] / sample["rows_free"]:,.0f}',
    'preserving, MB': lambda sample: f'{sample["size_preserving"] / 1e6:.1f}',
    'disturbed by': lambda sample: ', '.join(sample['events']),
}


def table(samples: list[dict[str, Any]]) -> str:
    """Return the samples, several to a row where there are many: their medians."""
    each = -(-len(samples) // ROWS) or 1
    rows = [list(COLUMNS)]
    for start in range(0, len(samples), each):
        sample = together(samples[start:start + each])
        rows.append([show(sample) for show in COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ['-' * width for width in widths])
    lines = ['  '.join(cell.ljust(width) if n == len(widths) - 1 else cell.rjust(width)
                       for n, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    return '\n'.join(line.rstrip() for line in lines)


def together(some: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one sample for several: the medians, the time of the last, and every event."""
    alive = min(len(sample['memory']) for sample in some)
    lists = {
        'memory': [statistics.median(sample['memory'][n] for sample in some) for n in range(alive)],
        'events': [f'{count} x {event}' if count > 1 else event for event, count in counted(some).items()],
    }
    numbers = {name: statistics.median(sample[name] for sample in some) for name in some[0] if name not in lists}
    return numbers | lists | {'minutes': some[-1]['minutes']}


def counted(samples: list[dict[str, Any]]) -> dict[str, int]:
    events = [event for sample in samples for event in sample['events']]
    return {event: events.count(event) for event in dict.fromkeys(events)}
