"""zodbshootout, unmodified: a check from outside. Its own figures, read from its own file."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Case, Results
from benchmarks.storages import Lab, available

PART = 'shootout'
TITLE = 'zodbshootout'
CONF = Path(__file__).parent / 'zodbshootout.conf'
VARIABLES = ('SHOOTOUT_PACKAGE', 'SHOOTOUT_DSN', 'SHOOTOUT_DIRECTORY')

FULL = {'objects': 100, 'rounds': 2, 'arguments': ['-p', '1', '-n', '3', '-w', '1', '--min-time', '0.02']}
QUICK = {}
BENCHMARKS = ('add', 'update', 'cold', 'warm', 'hot', 'steamin', 'conflicts', 'ex_commit', 'new_oid')

PACKAGES = {'relstore': 'relstore', 'relstorage': 'RelStorage'}
DATABASES = {'postgresql': 'PostgreSQL', 'sqlite': 'SQLite'}


def measure(lab: Lab, results: Results, sizes: dict = FULL) -> None:
    """Run it on relstore and RelStorage in turn."""
    if not sizes:
        results.cannot(PART, '', 'takes five minutes: not part of a quick run')
        return
    if importlib.util.find_spec('zodbshootout') is None:
        results.cannot(PART, '', 'not installed: zodbshootout')
        return
    names = [f'{package} {database}' for package in PACKAGES.values() for database in DATABASES.values()]
    if len(available(results, PART, names)) < len(names):
        results.cannot(PART, '', 'its configuration needs all of: ' + ', '.join(names))
        return
    results.note(PART, f'{sizes["objects"]} objects per transaction, one process, {sizes["rounds"]} rounds. Its names '
                       'of the reads differ from those of our own test.')  # fmt: skip
    for _ in range(sizes['rounds']):
        for package in PACKAGES:
            with ExitStack() as stack:
                postgresql = stack.enter_context(lab.site(f'{PACKAGES[package]} PostgreSQL'))
                sqlite = stack.enter_context(lab.site(f'{PACKAGES[package]} SQLite'))
                run(lab, results, package, sizes, postgresql.where, sqlite.where)


def run(lab: Lab, results: Results, package: str, sizes: dict, dsn: str, directory: str) -> None:
    import pyperf

    output = lab.directory / 'zodbshootout.json'
    output.unlink(missing_ok=True)
    command = [
        sys.executable, '-m', 'zodbshootout', '--quiet', *sizes['arguments'], '--object-counts', str(sizes['objects']),
        '-c', '1', '--include-mapping', 'no', '--zap', 'force', '-o', str(output),
        '--inherit-environ', ','.join((*VARIABLES, 'PYTHONPATH')), str(CONF), *BENCHMARKS,
    ]  # fmt: skip
    values = dict(zip(VARIABLES, (package, dsn, directory), strict=True))
    done = subprocess.run(command, env=os.environ | values, capture_output=True, text=True)
    if done.returncode or not output.exists():
        results.cannot(PART, PACKAGES[package], f'zodbshootout failed: {done.stderr.strip()[-300:]}')
        return
    for benchmark in pyperf.BenchmarkSuite.load(str(output)):
        # "{c=1 processes, o=100} postgresql: add 100 objects"
        database, _, panel = benchmark.get_name().rpartition('} ')[2].partition(': ')
        case = Case(PART, f'{sizes["objects"]} objects', panel, 'ms', 'less')
        results.add(case, f'{PACKAGES[package]} {DATABASES[database]}', benchmark.median() * 1e3)
