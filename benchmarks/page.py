"""The page: one HTML file with the charts of a figures.json, the ratios, and who wins where.

    python -m benchmarks.page DIRECTORY

Nothing on it comes from elsewhere: the charts are SVG inside.
"""

from __future__ import annotations

import html
import io
import json
import math
import sys
from pathlib import Path
from string import Template

import matplotlib

matplotlib.use('svg')
from matplotlib import pyplot
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.figures import COMPARED, EVEN, PAIRS, Case, Results, advantage, in_words
from benchmarks.storages import KINDS
from benchmarks.summary import PARTS, Standing, outcome, standing

LEAST_RANGE = 8  # of a logarithmic axis: a smaller one would make noise look like a trend

matplotlib.rcParams.update({
    'svg.fonttype': 'none', 'font.family': 'sans-serif', 'font.size': 12, 'axes.titlesize': 13, 'axes.labelsize': 12,
    'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True, 'axes.axisbelow': True,
    'grid.color': '#dddddd', 'lines.linewidth': 2, 'lines.markersize': 6, 'svg.hashsalt': 'relstore',
})  # fmt: skip

PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>relstore: benchmarks</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.45 sans-serif; color: #222; max-width: 1240px; margin: 1.5em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.2em; border-top: 3px solid #1f4fd8; padding-top: .4em }
table { border-collapse: collapse; margin: 1em 0 }
table.all { width: 100%; table-layout: fixed }
table.all th { vertical-align: top } figure { margin: 1em 0 2em }
th, td { padding: .3em .8em; border: 1px solid #ccc; text-align: left }
th { background: #f3f4f8 } td.figure { text-align: right }
.wins { background: #d4f0d8 } .loses { background: #ffd7d0; font-weight: bold } .even { background: #f4f4f4 }
.none { color: #888 } svg { max-width: 100%; height: auto } summary { cursor: pointer; margin: .6em 0 }
.missing { background: #fff3cd; padding: .5em 1em } .facts td:first-child { white-space: nowrap; vertical-align: top }
pre { white-space: pre-wrap; font: 14px/1.5 ui-monospace, monospace; margin: .5em 0 }
</style></head><body>
<h1>relstore beside its peers</h1>
$warning
<p>How many times better (green) or worse (red) relstore is, as the geometric mean over what a part measures.
In small print: how many of its measures are won, and how many lost. A difference below $even % counts as none.</p>
$summary
$losses
$parts
<h2>How it was measured</h2>
<p>Storages take turns, round after round. A point is the median of its rounds; a ratio is relstore / peer, over all
points of a line the geometric mean.</p>
$facts
</body></html>
""")


def write(directory: Path) -> Path:
    """Write index.html beside figures.json, and return its path."""
    data = json.loads((directory / 'figures.json').read_text('utf-8'))
    results = Results.from_json(data)
    target = directory / 'index.html'
    target.write_text(render(data, results), 'utf-8')
    return target


def render(data: dict, results: Results) -> str:
    parts = [part for part in PARTS if part in data['seconds']]
    return PAGE.substitute(
        warning='' if data['mode'] == 'full' else '<p class="missing">A quick run with small sizes: these figures are '
                                                  'to look at, not to cite.</p>',
        even=round((EVEN - 1) * 100),
        summary=summary(results, parts),
        losses=losses(results, parts),
        parts='\n'.join(section(results, part) for part in parts),
        facts=facts(data),
    )  # fmt: skip


# who wins where


def summary(results: Results, parts: list[str]) -> str:
    rows = []
    for part in parts:
        cells = [f'<td><a href="#{part}">{PARTS[part].TITLE}</a></td>']
        for ours, peer in PAIRS:
            cell = standing(results, part, ours, peer)
            if isinstance(cell, Standing):
                counts = f'<small>{cell.counts}</small>'
                cells.append(f'<td class="{outcome(cell.mean)}">{in_words(cell.mean)}<br>{counts}</td>')
            else:
                cells.append(f'<td class="none">{html.escape(cell)}</td>')
        rows.append(f'<tr>{"".join(cells)}</tr>')
    heads = ''.join(f'<th>{ours}<br>beside {peer}</th>' for ours, peer in PAIRS)
    return f'<table class="all"><tr><th></th>{heads}</tr>{"".join(rows)}</table>'


def losses(results: Results, parts: list[str]) -> str:
    items = []
    for part in parts:
        for ours, peer in PAIRS:
            cell = standing(results, part, ours, peer)
            if isinstance(cell, Standing) and cell.lost:
                items.append(
                    f'<li><b>{PARTS[part].TITLE}</b>: {ours} loses to {peer} in {cell.lost} of {cell.measures}, worst '
                    f'<b>{in_words(cell.worst)}</b> ({html.escape(cell.worst_name)})</li>'
                )
    if not items:
        return '<p><b>relstore loses nowhere in this run.</b></p>'
    return f'<p><b>Where relstore loses</b></p><ul>{"".join(items)}</ul>'


# a part


def section(results: Results, part: str) -> str:
    module = PARTS[part]
    title, _, text = module.__doc__.partition('\n')
    pieces = [f'<h2 id="{part}">{module.TITLE}</h2><p>{html.escape(title)}</p><pre>{html.escape(text.strip())}</pre>']
    pieces += [f'<p>{html.escape(note)}</p>' for note in results.notes.get(part, [])]
    missing = ''.join(
        f'<li>{html.escape(storage or "This part")}: {html.escape(reason)}</li>'
        for (absent, storage), reason in results.absent.items()
        if absent == part
    )
    groups: dict[str, list[Case]] = {}
    for case in results.cases(part):
        if case.charted:
            groups.setdefault(case.group, []).append(case)
    pieces += [chart(results, f'{module.TITLE}: {group}', cases) for group, cases in groups.items()]
    pieces.append(f'<div class="missing">Not here:<ul>{missing}</ul></div>' if missing else '')
    pieces.append(ratios(results, part))
    return '\n'.join(pieces)


def ratios(results: Results, part: str) -> str:
    """Return the table of ratios, relstore / peer, and whether more is better."""
    cases = results.cases(part)
    pairs = [pair for pair in COMPARED if any(results.ratio(case, *pair) is not None for case in cases)]
    rows = []
    for case in cases:
        cells = []
        for ours, peer in pairs:
            ratio = results.ratio(case, ours, peer)
            if ratio is None:
                cells.append('<td></td>')
                continue
            times = advantage(case, ratio)
            text = f'{ratio:.3g}<br><small>{in_words(times)}</small>'
            cells.append(f'<td class="figure {outcome(times)}">{text}</td>')
        if any(cell != '<td></td>' for cell in cells):
            unit = f'{case.unit}, {case.better} is better' if case.unit else f'{case.better} is better'
            label = f'{html.escape(case.group)}: {html.escape(case.panel)} <small>({unit})</small>'
            rows.append(f'<tr><td>{label}</td>{"".join(cells)}</tr>')
    if not rows:
        return ''
    heads = ''.join(f'<th>{ours} /<br>{peer}</th>' for ours, peer in pairs)
    opened = ' open' if len(rows) <= 20 else ''
    table = f'<table class="all"><tr><th style="width: 32%"></th>{heads}</tr>{"".join(rows)}</table>'
    return f'<details{opened}><summary>Ratios, relstore / peer ({len(rows)} measures)</summary>{table}</details>'


# charts


def chart(results: Results, title: str, cases: list[Case]) -> str:
    storages = [name for name in KINDS if any(results.line(case, name) for case in cases)]
    draw = lines if cases[0].x else bars
    figure = draw(results, cases, storages)
    text = io.StringIO()
    figure.savefig(text, format='svg', bbox_inches='tight', metadata={'Date': None})
    pyplot.close(figure)
    svg = text.getvalue()
    return f'<h3>{html.escape(title)}</h3><figure>{svg[svg.index("<svg") :]}</figure>'


def lines(results: Results, cases: list[Case], storages: list[str]):
    """Draw a panel per case: one line per storage."""
    columns = min(3, len(cases))
    rows = math.ceil(len(cases) / columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.5 * rows + 0.6), squeeze=False)
    for axes, case in zip(grid.flat, cases, strict=False):
        for name in storages:
            line = results.line(case, name)
            if line:
                axes.plot(list(line), list(line.values()), KINDS[name].mark, color=KINDS[name].colour, label=name)
        ticks = sorted({x for name in storages for x in results.line(case, name)})
        axes.set_title(f'{case.panel} ({case.better} is better)')
        axes.set_xscale('log', base=10 if ticks[-1] > 100 else 2)
        axes.set_xticks(ticks, [f'{x:,.0f}' if x < 10_000 else f'{x / 1000:,.0f}k' for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(case.x)
        axes.set_ylabel(case.unit)
        alike = [other for other in cases if measure_of(other) == measure_of(case)]
        vertical(axes, [y for other in alike for name in storages for y in results.line(other, name).values()])
    for axes in grid.flat[len(cases) :]:
        axes.set_visible(False)
    handles = {handle.get_label(): handle for axes in grid.flat for handle in axes.get_lines()}
    figure.tight_layout(h_pad=2)
    legend(figure, handles.values(), handles)
    return figure


def legend(figure, handles, labels) -> None:
    """Put it on top: a reader wants it first."""
    figure.legend(handles, labels, loc='lower left', bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=13)


def measure_of(case: Case) -> str:
    """Return what panels have in common that are to be compared by eye, "mean" of "mean, first"."""
    return case.panel.partition(', ')[0]


def vertical(axes, values: list[float]) -> None:
    """Make the vertical axis hold these values: logarithmic, with numbers that a reader can read."""
    low, high = min(values), max(values)
    if low <= 0 or axes.get_ylabel().startswith('%'):
        axes.set_ylim(0, high * 1.05)
        return
    stretch = max(1.15, math.sqrt(LEAST_RANGE * low / high))
    axes.set_yscale('log')
    axes.set_ylim(low / stretch, high * stretch)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def bars(results: Results, cases: list[Case], storages: list[str]):
    """Draw one bar for each case and storage, with its value; a panel for each unit."""
    units = list(dict.fromkeys(case.unit for case in cases))
    heights = [sum(case.unit == unit for case in cases) for unit in units]
    figure, grid = pyplot.subplots(
        len(units), 1, figsize=(12, sum(heights) * (0.3 + 0.24 * len(storages)) + 1.1 * len(units)),
        height_ratios=heights, squeeze=False,
    )  # fmt: skip
    for axes, unit in zip(grid.flat, units, strict=True):
        shown = [case for case in cases if case.unit == unit]
        thick = 0.84 / len(storages)
        for place, name in enumerate(storages):
            found = [(row, line[None]) for row, case in enumerate(shown) if (line := results.line(case, name))]
            there = [row - 0.42 + thick * (place + 0.5) for row, _ in found]
            drawn = axes.barh(there, [value for _, value in found], thick * 0.92, color=KINDS[name].colour)
            axes.bar_label(drawn, [number(value) for _, value in found], padding=4, fontsize=11)
        axes.set_yticks(range(len(shown)), [f'{case.panel}' for case in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel(f'{unit or "number"} ({shown[0].better} is better)')
        axes.grid(axis='y', visible=False)
        axes.margins(x=0.09)
    figure.tight_layout()
    legend(figure, [Patch(color=KINDS[name].colour) for name in storages], storages)
    return figure


def number(value: float) -> str:
    """Return a number with three digits that count."""
    if value >= 100:
        return f'{float(f"{value:.3g}"):,.0f}'
    return f'{value:.3g}'


# how it was measured


def facts(data: dict) -> str:
    rows = {'date': data['date'], 'mode': data['mode'], 'command': data['command']}
    rows |= data['machine'] | data['settings']
    rows['versions'] = ', '.join(f'{name} {version}' for name, version in data['versions'].items())
    rows['duration'] = ', '.join(f'{part} {seconds:.0f} s' for part, seconds in data['seconds'].items())
    return '<table class="facts">{}</table>'.format(
        ''.join(f'<tr><td>{html.escape(name)}</td><td>{html.escape(as_text(value))}</td></tr>'
                for name, value in rows.items())
    )  # fmt: skip


def as_text(value) -> str:
    return ', '.join(f'{name}={of}' for name, of in value.items()) if isinstance(value, dict) else str(value)


if __name__ == '__main__':
    print(write(Path(sys.argv[1])))
