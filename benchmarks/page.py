"""The page: one HTML file with the charts of a figures.json, the ratios, and who wins where.

    python -m benchmarks.page DIRECTORY

Nothing on it comes from elsewhere: the charts are SVG inside. It is committed, so it is small.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from string import Template

from benchmarks.chart import Look, bars, legend, panel, style, vertical
from benchmarks.figures import COMPARED, EVEN, PAIRS, Case, Results, advantage, in_words
from benchmarks.storages import KINDS
from benchmarks.summary import PARTS, Standing, outcome, standing

# How each storage is drawn.
LOOKS = {name: Look(name, f'k{n}', kind.colour, kind.mark) for n, (name, kind) in enumerate(KINDS.items())}

PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>relstore: benchmarks</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.45 sans-serif; color: #222; max-width: 1240px; margin: 1.5em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.2em; border-top: 3px solid #1f4fd8; padding-top: .4em }
table { border-collapse: collapse; margin: 1em 0 }
table.all { width: 100%; table-layout: fixed }
table.all th { vertical-align: top }
th, td { padding: .3em .8em; border: 1px solid #ccc; text-align: left }
th { background: #f3f4f8 }
.wins { background: #d4f0d8 } .loses { background: #ffd7d0; font-weight: bold } .even { background: #f4f4f4 }
.none { color: #888 } svg { max-width: 100%; height: auto } summary { cursor: pointer; margin: .6em 0 }
.missing { background: #fff3cd; padding: .5em 1em } .facts td:first-child { white-space: nowrap; vertical-align: top }
pre { white-space: pre-wrap; font: 14px/1.5 ui-monospace, monospace; margin: .5em 0 }
$style
</style></head><body>
<h1>relstore beside its peers</h1>
$warning
<p>How many times better (green) or worse (red) relstore is, as the geometric mean over what a part measures.
In small print: how many of its measures are won, and how many lost. A difference below $even % counts as none.</p>
$summary
$losses
$parts
<h2>How it was measured</h2>
<p>Storages take turns, round after round. A point is the median of its rounds; a ratio is the geometric mean over all
points of a line.</p>
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
        style=style(LOOKS.values()),
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
    """Return the table of ratios: how many times better relstore is, and below 1, worse."""
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
            cells.append(f'<td class={outcome(times)}>{times:.3g}</td>')
        if any(cell != '<td></td>' for cell in cells):
            unit = f'{case.unit}, {case.better} is better' if case.unit else f'{case.better} is better'
            label = f'{html.escape(case.group)}: {html.escape(case.panel)} <small>({unit})</small>'
            rows.append(f'<tr><td>{label}</td>{"".join(cells)}</tr>')
    if not rows:
        return ''
    heads = ''.join(f'<th>{ours}<br>beside {peer}</th>' for ours, peer in pairs)
    opened = ' open' if len(rows) <= 20 else ''
    table = f'<table class="all"><tr><th style="width: 32%"></th>{heads}</tr>{"".join(rows)}</table>'
    told = f'How many times better relstore is; below 1 it is worse ({len(rows)} measures)'
    return f'<details{opened}><summary>{told}</summary>{table}</details>'


# charts


def chart(results: Results, title: str, cases: list[Case]) -> str:
    looks = [LOOKS[name] for name in KINDS if any(results.line(case, name) for case in cases)]
    drawn = lines(results, cases, looks) if cases[0].x else in_bars(results, cases, looks)
    return f'<h3>{html.escape(title)}</h3>{legend(looks, bars=not cases[0].x)}<div class="panels">{drawn}</div>'


def lines(results: Results, cases: list[Case], looks: list[Look]) -> str:
    """Return a panel for each case, with one line for each storage."""
    panels = []
    for case in cases:
        drawn = {look: line for look in looks if (line := results.line(case, look.name))}
        alike = [other for other in cases if measure_of(other) == measure_of(case)]
        values = [y for other in alike for look in looks for y in results.line(other, look.name).values()]
        ticks = sorted({x for line in drawn.values() for x in line})
        y = vertical(values, from_zero=case.unit.startswith('%'))
        panels.append(panel(f'{case.panel} ({case.better} is better)', case.unit, case.x, ticks, y, drawn))
    return ''.join(panels)


def measure_of(case: Case) -> str:
    """Return what panels have in common that are to be compared by eye, "mean" of "mean, first"."""
    return case.panel.partition(', ')[0]


def in_bars(results: Results, cases: list[Case], looks: list[Look]) -> str:
    """Return a bar for each case and storage, with its value; together those of a unit."""
    pieces = []
    for unit in dict.fromkeys(case.unit for case in cases):
        shown = [case for case in cases if case.unit == unit]
        rows = {case.panel: {look: line for look in looks if (line := results.line(case, look.name))} for case in shown}
        values = {panel: {look: line[None] for look, line in row.items()} for panel, row in rows.items()}
        pieces.append(bars(f'{unit or "number"} ({shown[0].better} is better)', values))
    return ''.join(pieces)


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
