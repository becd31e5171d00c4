"""The machine and the versions that figures were obtained with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.storages import KINDS, Lab

PACKAGES = (
    'relstore', 'RelStorage', 'ZEO', 'zodbshootout', 'pyperf', 'ZODB', 'BTrees', 'persistent', 'transaction',
    'psycopg2-binary', 'psycopg2', 'psycopg', 'mysqlclient', 'pymemcache',
)  # fmt: skip


def machine(directory: Path) -> dict[str, str]:
    """Return what is known of the machine, and of the disk that holds `directory`."""
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    load = ', '.join(f'{value:.2f}' for value in os.getloadavg())
    return {
        'processor': f'{os.cpu_count()} x {processor()}',
        'memory': f'{memory / 1e9:.1f} GB',
        'system': f'{platform.system()} {platform.release()}',
        'disk': f'{file_system(directory)}, {shutil.disk_usage(directory).free / 1e9:.0f} GB free, '
                f'one fdatasync takes {flush_microseconds(directory):.0f} us (median)',
        'load before (1, 5, 15 minutes)': load,
    }  # fmt: skip


def processor() -> str:
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.machine()


def file_system(directory: Path) -> str:
    """Return the type of the file system that the directory is on."""
    best = ('', 'unknown')
    for line in Path('/proc/mounts').read_text().splitlines():
        _, mounted, kind, *_ = line.split()
        if directory.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = mounted, kind
    return best[1]


def flush_microseconds(directory: Path, times: int = 50) -> float:
    seconds = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(times):
            file.write(b'x' * 4096)
            file.flush()
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6


def versions(lab: Lab, project: Path) -> dict[str, str]:
    """Return the versions of everything that takes part."""
    found = {'Python': platform.python_version(), 'SQLite': sqlite3.sqlite_version}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, kind in (('PostgreSQL', 'relstore PostgreSQL'), ('MariaDB', 'relstore MariaDB'),
                       ('MySQL', 'relstore MySQL, history-free')):  # fmt: skip
        if not KINDS[kind].unavailable():
            found[name] = lab.server(name.lower()).version()
    if revision := _git('rev-parse', '--short', 'HEAD', project=project):
        changed = _git('status', '--porcelain', '--', 'src/relstore', ':!src/relstore/tests', project=project)
        found['relstore'] = f'{found.get("relstore", "")} ({revision}{", changed" if changed else ""})'
    return found


def _git(*arguments: str, project: Path) -> str:
    if shutil.which('git') is None:
        return ''
    return subprocess.run(['git', '-C', project, *arguments], capture_output=True, text=True).stdout.strip()
