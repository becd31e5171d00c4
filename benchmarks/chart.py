"""Charts as SVG, small enough to be committed: text is text, all points of a line are one path, numbers are whole.

A page that holds them needs the text of style().
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 460  # of a panel, in units of which a page shows two a pixel
LEFT, RIGHT, TOP, BOTTOM = 92, 622, 74, 380  # of its axes
LEAST_RANGE = 8  # of a logarithmic axis: a smaller one would make noise look like a trend
BAR, ROW_GAP = 22, 22  # the height of a bar, and what is between two rows of bars
LETTER, LONGEST = 12, 1000  # about the width of a letter, and the length of the longest bar

# The shapes around a line's points. What is not here is a dot: the round cap of a stroke without length.
SHAPES = {'s': 'm-6-6h12v12h-12z', '^': 'm-8 6h16l-8-14z', 'v': 'm-8-6h16l-8 14z', 'D': 'm-8 0l8-8l8 8l-8 8z'}
DASHES = {'-': 'none', '--': '14 8', ':': '3 8', '-.': '14 7 3 7'}

STYLE = """
.panels { display: flex; flex-wrap: wrap; gap: 12px } .panels svg { width: 390px } .panels svg.w { width: 800px }
.legend span { display: inline-block; margin-right: 1.6em }
.legend svg { width: 30px; height: 12px; margin-right: .4em }
svg text { font: 22px sans-serif; fill: #222 } svg .h { font-size: 23px; font-weight: bold } svg .u { fill: #666 }
.e { text-anchor: end } .m { text-anchor: middle } .g { stroke: #ddd; stroke-width: 1.5 }
.a { stroke: #222; stroke-width: 2 } .g, .a, .l, .p { fill: none } .l { stroke-width: 4; stroke-linejoin: round }
.p { stroke-width: 13 } .l, .p { stroke: var(--c) } .f, .b { fill: var(--c) }
.l { stroke-dasharray: var(--d) } .p { stroke-linecap: round }
"""


@dataclass(frozen=True)
class Look:
    """How one storage is drawn: its class in the style, its colour, and the shape of a point with how a line goes."""

    name: str
    kind: str
    colour: str
    mark: str

    def points(self, places: Iterable[tuple[int, int]]) -> str:
        shape = SHAPES.get(self.mark[0])
        path = ''.join(f'M{x} {y}{shape or "h0"}' for x, y in places)
        return f'<path class="{"f" if shape else "p"} {self.kind}" d="{path}"/>'

    def line(self, places: Sequence[tuple[int, int]]) -> str:
        path = 'L'.join(f'{x} {y}' for x, y in places)
        return f'<path class="l {self.kind}" d="M{path}"/>' if len(places) > 1 else ''


def style(looks: Iterable[Look]) -> str:
    rules = (f'.{look.kind} {{ --c: {look.colour}; --d: {DASHES[look.mark[1:]]} }}' for look in looks)
    return STYLE + '\n'.join(rules)


def legend(looks: Iterable[Look], bars: bool = False) -> str:
    """Return what the colours mean: to stand on top, for a reader wants it first."""
    items = []
    for look in looks:
        drawn = f'<path class="b {look.kind}" d="M0 4h60v16h-60z"/>' if bars else (
            look.line([(0, 12), (60, 12)]) + look.points([(30, 12)]))
        items.append(f'<span><svg viewBox="0 0 60 24">{drawn}</svg>{html.escape(look.name)}</span>')
    return f'<p class="legend">{" ".join(items)}</p>'


# lines


class Scale:
    """From values to places on an axis, with the values that get a number."""

    def __init__(self, low: float, high: float, start: int, end: int, ticks: Iterable[float], logarithmic: bool):
        self._of = math.log if logarithmic else float
        self._low, self._start = self._of(low), start
        self._unit = (end - start) / (self._of(high) - self._low)
        self.ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]

    def __call__(self, value: float) -> int:
        return round(self._start + (self._of(value) - self._low) * self._unit)


def horizontal(ticks: Sequence[float]) -> Scale:
    """Return a logarithmic axis with these numbers."""
    margin = (ticks[-1] / ticks[0]) ** 0.04 if len(ticks) > 1 else 2
    return Scale(ticks[0] / margin, ticks[-1] * margin, LEFT, RIGHT, ticks, True)


def vertical(values: Sequence[float], from_zero: bool) -> Scale:
    """Return an axis that holds these values: logarithmic, with numbers that a reader can read."""
    low, high = min(values), max(values)
    if low <= 0 or from_zero:
        high = high * 1.05 or 1
        step = next(step for step in steps(high / 10, high) if high / step <= 6)
        return Scale(0, high, BOTTOM, TOP, (n * step for n in range(7)), False)
    stretch = max(1.15, math.sqrt(LEAST_RANGE * low / high))
    low, high = low / stretch, high * stretch
    ticks = [tick for tick in steps(low, high) if high / low < 200 or f'{tick:e}'.startswith('1.')]
    return Scale(low, high, BOTTOM, TOP, ticks, True)


def steps(low: float, high: float) -> Iterable[float]:
    """Yield 1, 2, 5, 10, 20, ... as far as they are needed."""
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (float(f'{digit}e{exponent}') for digit in (1, 2, 5))


def panel(title: str, unit: str, x_name: str, ticks: Sequence[float], y: Scale,
          drawn: Mapping[Look, Mapping[float, float]]) -> str:
    """Return one panel with a line for each storage, from x to y."""
    x = horizontal(ticks)
    grid = ''.join(f'M{x(tick)} {TOP}V{BOTTOM}' for tick in x.ticks) + ''.join(
        f'M{LEFT} {y(tick)}H{RIGHT}' for tick in y.ticks)
    parts = [f'<text class="h" x="8" y="26">{html.escape(title)}</text>',
             f'<text class="u" x="8" y="56">{html.escape(unit)}</text>',
             f'<path class="g" d="{grid}"/><path class="a" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    parts += [f'<text class="m" x="{x(tick)}" y="{BOTTOM + 30}">{thousands(tick)}</text>' for tick in x.ticks]
    parts += [f'<text class="e" x="{LEFT - 10}" y="{y(tick) + 8}">{thousands(tick)}</text>' for tick in y.ticks]
    parts.append(f'<text class="m" x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 64}">{html.escape(x_name)}</text>')
    for look, line in drawn.items():
        places = [(x(at), y(value)) for at, value in line.items()]
        parts += [look.line(places), look.points(places)]
    return svg(WIDTH, HEIGHT, parts)


# bars


def bars(unit: str, rows: Mapping[str, Mapping[Look, float]]) -> str:
    """Return a bar with its value for each row and storage."""
    longest = max((value for row in rows.values() for value in row.values()), default=0) or 1
    ends: dict[Look, list[str]] = {}
    start = LETTER * (max(map(len, rows)) + 2)
    parts, top = [f'<text class="u" x="{start}" y="24">{html.escape(unit)}</text>'], 44
    for label, row in rows.items():
        middle = top + BAR * len(row) // 2 + 8
        parts.append(f'<text class="e" x="{start - 12}" y="{middle}">{html.escape(label)}</text>')
        for look, value in row.items():
            length = round(max(value, 0) / longest * LONGEST)
            ends.setdefault(look, []).append(f'M{start} {top + 1}h{length}v{BAR - 2}h-{length}z')
            parts.append(f'<text x="{start + length + 8}" y="{top + BAR - 4}">{number(value)}</text>')
            top += BAR
        top += ROW_GAP
    parts += [f'<path class="b {look.kind}" d="{"".join(paths)}"/>' for look, paths in ends.items()]
    return svg(start + LONGEST + 130, top, parts, ' class="w"')


def svg(width: int, height: int, parts: Iterable[str], more: str = '') -> str:
    return f'<svg viewBox="0 0 {width} {height}"{more}>{"".join(parts)}</svg>'


def number(value: float) -> str:
    """Return a number with three digits that count."""
    return f'{float(f"{value:.3g}"):,.0f}' if value >= 100 else f'{value:.3g}'


def thousands(value: float) -> str:
    """Return the number of a tick, for which there is little room."""
    return f'{value / 1000:,.0f}k' if value >= 10_000 else number(value)
