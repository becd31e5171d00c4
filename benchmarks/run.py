"""Benchmarks of relstore beside its peers: python -m benchmarks.run, or make bench.

Writes figures.json and index.html to a directory. Storages take turns (A B A B), so that a noisy machine hurts
all alike. A part or a storage that cannot run says why, here and on the page.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

from benchmarks import clients, machine, page
from benchmarks.figures import COMPARED, Results, advantage, in_words
from benchmarks.servers import Unavailable
from benchmarks.storages import Lab

PROJECT = Path(__file__).resolve().parents[1]
MODULES = {
    'speed': 'speed', 'roundtrips': 'roundtrips', 'reading': 'reading', 'commit': 'commit', 'occupancy': 'occupancy',
    'page': 'coldpage', 'blobs': 'blobs', 'convert': 'convert', 'pack': 'pack', 'memory': 'memory',
    'shootout': 'shootout',
}  # fmt: skip
FILES_ONLY = ['relstore SQLite', 'FileStorage']


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    logging.getLogger().addHandler(logging.NullHandler())
    parts = given.only or list(MODULES)
    results, seconds = Results(), {}
    with Lab() as lab:
        clients.start(library(lab))
        about = {
            'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
            'mode': 'smoke' if given.smoke else 'quick' if given.quick else 'full',
            'command': ' '.join(['python -m benchmarks.run', *(arguments if arguments is not None else sys.argv[1:])]),
            'machine': machine.machine(lab.directory),
            'versions': machine.versions(lab, PROJECT) if not given.smoke else {},
            'settings': lab.settings,
        }
        print('\n'.join(f'{name}: {value}' for name, value in (about['machine'] | lab.settings).items()), flush=True)
        for part in parts:
            print(f'\n{part} ...', flush=True)
            begin = time.monotonic()
            measure(importlib.import_module(f'benchmarks.{MODULES[part]}'), lab, results, given)
            seconds[part] = round(time.monotonic() - begin, 1)
            tell(results, part, seconds[part])
    given.out.mkdir(parents=True, exist_ok=True)
    data = about | {'seconds': seconds} | results.as_json()
    (given.out / 'figures.json').write_text(as_text(data), 'utf-8')
    print(f'\n{given.out / "figures.json"}')
    if not given.smoke:
        print(page.write(given.out))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.run', description=__doc__.splitlines()[0])
    parser.add_argument('--only', nargs='+', choices=MODULES, metavar='PART', help=f'parts: {", ".join(MODULES)}')
    parser.add_argument('--quick', action='store_true', help='small sizes, under two minutes: figures not to cite')
    parser.add_argument('--smoke', action='store_true', help='tiny sizes, files only, no page: does the harness work?')
    parser.add_argument('--out', type=Path, default=PROJECT / 'var' / 'benchmarks', help='directory for the results')
    return parser


def library(lab: Lab) -> Path | None:
    try:
        return lab.slow_disk.library
    except Unavailable:
        return None  # the part that needs it will say why


def measure(module: ModuleType, lab: Lab, results: Results, given: argparse.Namespace) -> None:
    """Run a part. What stops it is recorded, and the next part runs."""
    sizes = module.SMOKE if given.smoke else module.QUICK if given.quick else module.FULL
    try:
        if given.smoke:
            module.measure(lab, results, sizes, FILES_ONLY)
        else:
            module.measure(lab, results, sizes)
    except Unavailable as e:
        results.cannot(module.PART, '', str(e))
    except Exception as e:
        if given.smoke:
            raise
        traceback.print_exc()
        [*_, last] = f'{type(e).__name__}: {e}'.strip().splitlines()
        results.cannot(module.PART, '', f'stopped by {last[:300]}')


def tell(results: Results, part: str, seconds: float) -> None:
    """Print the ratios of a part, and what is missing."""
    for case in results.cases(part):
        for ours, peer in COMPARED if case.charted else ():
            ratio = results.ratio(case, ours, peer)
            if ratio is not None:
                words = in_words(advantage(case, ratio))
                print(f'  {case.group}, {case.panel}: {ours} / {peer} = {ratio:.3g} ({words})')
    for (absent, storage), reason in results.absent.items():
        if absent == part:
            print(f'  {storage or "this part"}: {reason}')
    print(f'  {seconds:.0f} s', flush=True)


def as_text(data: dict) -> str:
    """Return JSON with a line for each measure, so that two runs can be compared line by line."""
    lines = []
    for name, value in data.items():
        text = '[\n' + ',\n'.join(map(json.dumps, value)) + '\n]' if isinstance(value, list) else json.dumps(value)
        lines.append(f'{json.dumps(name)}: {text}')
    return '{\n' + ',\n'.join(lines) + '\n}\n'


if __name__ == '__main__':
    sys.exit(main())
