"""Who wins where: the table of a figures.json, for the page and, as reStructuredText, for a README.

    python -m benchmarks.summary DIRECTORY
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import blobs, coldpage, commit, convert, memory, occupancy, pack, reading, roundtrips, shootout, speed
from benchmarks.figures import EVEN, PAIRS, Results, advantage, geometric_mean, in_words

MODULES = speed, roundtrips, reading, commit, occupancy, coldpage, blobs, convert, pack, memory, shootout
PARTS = {module.PART: module for module in MODULES}


@dataclass(frozen=True)
class Standing:
    """How one storage of relstore stands beside a peer in one part: over the measures that are charted."""

    mean: float  # how many times better, geometric mean
    won: int
    lost: int
    measures: int
    worst: float
    worst_name: str

    @property
    def counts(self) -> str:
        return f'{self.won} won, {self.lost} lost of {self.measures}'


def outcome(times: float) -> str:
    """Return 'wins', 'loses' or 'even' for how many times better relstore is."""
    return 'wins' if times >= EVEN else 'loses' if times <= 1 / EVEN else 'even'


def standing(results: Results, part: str, ours: str, peer: str) -> Standing | str:
    """Return the standing, or why there is none."""
    found = {
        f'{case.group}: {case.panel}': advantage(case, ratio)
        for case in results.cases(part)
        if case.charted and (ratio := results.ratio(case, ours, peer)) is not None
    }
    if not found:
        reasons = (results.absent.get((part, storage)) for storage in (ours, peer, ''))
        return next(filter(None, reasons), 'not compared')
    outcomes = [outcome(times) for times in found.values()]
    worst = min(found, key=found.get)
    return Standing(
        geometric_mean(found.values()), outcomes.count('wins'), outcomes.count('loses'), len(found), found[worst], worst
    )


def restructured_text(data: dict) -> str:
    """Return the table as a directive, with the worst loss of each cell."""
    results = Results.from_json(data)
    lines = ['.. list-table::', '   :header-rows: 1', '', '   * -']
    lines += [f'     - {ours} beside {peer}' for ours, peer in PAIRS]
    for part in data['seconds']:
        lines.append(f'   * - {PARTS[part].TITLE}')
        lines += [f'     - {cell_text(standing(results, part, ours, peer))}' for ours, peer in PAIRS]
    return '\n'.join(lines)


def cell_text(cell: Standing | str) -> str:
    if isinstance(cell, str):
        return cell
    text = in_words(cell.mean)
    if outcome(cell.mean) == 'loses':
        text = f'**{text}**'
    return f'{text}; {cell.counts}' + (f', worst {in_words(cell.worst)} ({cell.worst_name})' if cell.lost else '')


if __name__ == '__main__':
    print(restructured_text(json.loads((Path(sys.argv[1]) / 'figures.json').read_text('utf-8'))))
