"""Clients: processes, or threads of one process, that work on one database at the same time."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from benchmarks.servers import slow_down
from benchmarks.storages import KINDS, Site

SECONDS_TO_WAIT = 600
PRELOADED = [
    f'benchmarks.{part}'
    for part in ('speed', 'reading', 'commit', 'occupancy', 'memory', 'pack', 'blobs', 'convert')
]

_processes = multiprocessing.get_context('forkserver')
_processes.set_forkserver_preload(PRELOADED)


def start(library: Path | None) -> None:
    """Start the process that the clients are forked from, with a library preloaded.

    It is forked from before any proxy has threads, and it has imported what they need.
    """
    from multiprocessing.forkserver import ensure_running

    if library is not None:
        os.environ['LD_PRELOAD'] = str(library)
    try:
        ensure_running()
    finally:
        os.environ.pop('LD_PRELOAD', None)


def run(site: Site, count: int, work: Callable, *arguments, slow: int = 0) -> list:
    """Return what work(db, number, barrier, *arguments) returned in each of `count` clients.

    Each client is a process with a DB of its own; where only one process may open the storage, they are threads
    of one new process, with one DB. slow: microseconds that every fdatasync of the clients takes longer. An
    exception in a client is raised here.
    """
    if not KINDS[site.kind].processes:
        [results] = _run(1, _in_threads, site, slow, count, work, arguments)
        return results
    return _run(count, _in_process, site, slow, work, arguments)


def threads(count: int, work: Callable, *arguments) -> list:
    """Return what work(number, barrier, *arguments) returned in each of `count` threads."""
    barrier = threading.Barrier(count, timeout=SECONDS_TO_WAIT)

    def guarded(number):
        try:
            return work(number, barrier, *arguments)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(guarded, range(count)))


def alone(work: Callable, *arguments):
    """Return work(*arguments), done in a new process."""
    [result] = _run(1, _call, work, arguments)
    return result


def _run(count: int, target: Callable, *arguments) -> list:
    barrier = _processes.Barrier(count, timeout=SECONDS_TO_WAIT)
    clients = []
    for number in range(count):
        ours, theirs = _processes.Pipe(duplex=False)
        process = _processes.Process(target=_report, args=(theirs, barrier, target, number, barrier, *arguments))
        process.start()
        theirs.close()
        clients.append((process, ours))
    results, failures = [], []
    for process, pipe in clients:
        try:
            result, failure = pipe.recv()
        except EOFError:
            result, failure = None, 'it died'
        results.append(result)
        failures += [failure] if failure else []
        process.join()
    if failures:
        # The others only miss the one that failed first.
        cause = min(failures, key=lambda failure: 'BrokenBarrierError' in failure)
        raise RuntimeError(f'{len(failures)} of {count} clients failed; the first said:\n{cause}')
    return results


def _report(pipe, barrier, target: Callable, *arguments) -> None:
    try:
        outcome = target(*arguments), None
    except BaseException:
        barrier.abort()
        outcome = None, traceback.format_exc()
    pipe.send(outcome)


def _in_process(number, barrier, site, slow, work, arguments):
    with closing(site.open_db()) as db:
        if slow:
            slow_down(slow)
        return work(db, number, barrier, *arguments)


def _in_threads(number, barrier, site, slow, count, work, arguments):
    with closing(site.open_db(pool_size=count + 1)) as db:
        if slow:
            slow_down(slow)
        return threads(count, lambda number, barrier: work(db, number, barrier, *arguments))


def _call(number, barrier, work, arguments):
    return work(*arguments)
