"""Figures: what a part measured, what could not be measured and why, and relstore's ratio to its peers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

# Who is compared with whom: (relstore's storage, the peer).
PAIRS = [
    ('relstore PostgreSQL', 'RelStorage PostgreSQL'),
    ('relstore PostgreSQL', 'ZEO'),
    ('relstore SQLite', 'RelStorage SQLite'),
    ('relstore SQLite', 'FileStorage'),
    ('relstore MySQL, history-free', 'RelStorage MySQL, history-free'),
]
# relstore beside itself, with something turned off or added: for the parts that measure it, and not in the summary.
WITHIN = [
    ('relstore PostgreSQL', 'relstore PostgreSQL, without read-ahead'),
    ('relstore SQLite', 'relstore SQLite, without read-ahead'),
    ('relstore PostgreSQL, memcached', 'relstore PostgreSQL'),
]
COMPARED = PAIRS + WITHIN
# A difference below this factor is called none: the noise of a shared machine.
EVEN = 1.1


@dataclass(frozen=True)
class Case:
    """What is measured: one panel of a chart.

    x: the name of the horizontal axis; '' where there is one value per storage.
    """

    part: str
    group: str  # panels of a group share a chart
    panel: str
    unit: str
    better: str  # 'more' or 'less'
    x: str = ''
    charted: bool = True


@dataclass
class Results:
    """Samples by case, storage and position on the horizontal axis, and reasons for what is not there."""

    samples: dict[tuple[Case, str, float | None], list[float]] = field(default_factory=dict)
    absent: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, case: Case, storage: str, value: float, x: float | None = None) -> None:
        self.samples.setdefault((case, storage, x), []).append(value)

    def cannot(self, part: str, storage: str, reason: str) -> None:
        """Record why a storage has no figures in a part, or not all of them; '' stands for the whole part."""
        self.absent.setdefault((part, storage), reason)

    def note(self, part: str, text: str) -> None:
        """Record once what a reader of the part's figures has to know."""
        notes = self.notes.setdefault(part, [])
        if text not in notes:
            notes.append(text)

    def cases(self, part: str) -> list[Case]:
        """Return the part's cases in the order they were measured."""
        return list(dict.fromkeys(case for case, _, _ in self.samples if case.part == part))

    def line(self, case: Case, storage: str) -> dict[float | None, float]:
        """Return the median of the samples by x."""
        wanted = case, storage
        found = {x: statistics.median(values) for (*key, x), values in self.samples.items() if (*key,) == wanted}
        return dict(sorted(found.items(), key=lambda item: item[0] or 0))

    def ratio(self, case: Case, ours: str, peer: str) -> float | None:
        """Return relstore / peer: the geometric mean over all x that both have; None if there is none."""
        mine, theirs = self.line(case, ours), self.line(case, peer)
        common = [x for x in mine if x in theirs]
        if not common or any(not mine[x] > 0 or not theirs[x] > 0 for x in common):
            return None
        return statistics.geometric_mean(mine[x] / theirs[x] for x in common)

    def as_json(self) -> dict:
        """Return the medians, as lists along the horizontal axis, None where there is no figure, and the reasons."""
        return {
            'figures': [
                asdict(case) | {'at': at, 'values': self._values(case, at)}
                for part in dict.fromkeys(case.part for case, _, _ in self.samples)
                for case in self.cases(part)
                for at in [sorted({x for found, _, x in self.samples if found == case}, key=lambda x: x or 0)]
            ],
            'absent': [
                {'part': part, 'storage': storage, 'reason': reason}
                for (part, storage), reason in self.absent.items()
            ],
            'notes': self.notes,
        }

    def _values(self, case: Case, at: list[float | None]) -> dict[str, list[float | None]]:
        storages = dict.fromkeys(storage for found, storage, _ in self.samples if found == case)
        lines = {storage: self.line(case, storage) for storage in storages}
        return {storage: [short(line[x]) if x in line else None for x in at] for storage, line in lines.items()}

    @classmethod
    def from_json(cls, data: dict) -> Results:
        results = cls(notes=data['notes'])
        names = Case.__dataclass_fields__
        for figure in data['figures']:
            case = Case(**{name: figure[name] for name in names})
            for storage, values in figure['values'].items():
                for x, value in zip(figure['at'], values, strict=True):
                    if value is not None:
                        results.add(case, storage, value, x)
        for absent in data['absent']:
            results.cannot(absent['part'], absent['storage'], absent['reason'])
        return results


def short(value: float) -> float:
    """Return a value without the digits that no clock can mean."""
    value = float(f'{value:.4g}')
    return int(value) if value.is_integer() else value


def advantage(case: Case, ratio: float) -> float:
    """Return how many times better relstore is; below 1 it is worse."""
    return ratio if case.better == 'more' else 1 / ratio


def in_words(advantage: float) -> str:
    """Return an advantage as a reader wants it."""
    if 1 / EVEN < advantage < EVEN:
        return 'even'
    return f'{advantage:.3g} times better' if advantage > 1 else f'{1 / advantage:.3g} times worse'


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def rounds(seconds: float, least: int, most: int = 100) -> Iterator[int]:
    """Count rounds until the time is up, at least `least` of them; each round measures every storage once."""
    deadline = time.monotonic() + seconds
    for number in range(most):
        if number >= least and time.monotonic() > deadline:
            return
        yield number
