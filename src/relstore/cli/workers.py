"""Workers: processes of which each does a part of a command's work, and that end when the command ends."""
from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from argparse import ArgumentParser, ArgumentTypeError
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, TypeVar

from ZODB.POSException import POSError

from relstore.cli.errors import sentence
from relstore.errors import Unavailable

MOST = 64       # processes
AHEAD = 2       # parts for each process that are given out before the first of them is done

Result = TypeVar('Result')


def add_jobs(parser: ArgumentParser) -> None:
    parser.add_argument('--jobs', type=_jobs, default=min(os.cpu_count() or 1, 4), metavar='N',
                        help='how many processes work at a time (default: %(default)s)')


def _jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ArgumentTypeError(f'{text!r} is not a number from 1 to {MOST}')
    return int(text)


def in_processes(jobs: int, begin: Callable[..., Any], arguments: tuple[Any, ...], work: Callable[..., Result],
                 parts: Iterator[tuple[Any, ...]]) -> Iterator[Result]:
    """Yield work(*part) for each part, in their order, done by so many processes.

    begin(*arguments) is called in each process first. All of these are functions of a module, and values that can be
    pickled. Unavailable: a process has died, or what a POSError said that was raised in one.
    """
    with ExitStack() as stack:
        # Not forked: threads of this process may hold locks, and nothing of this process is needed.
        pool = stack.enter_context(ProcessPoolExecutor(
            jobs, multiprocessing.get_context('spawn'), _begin, (begin, arguments)))
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[Future[tuple[Result | None, str]]] = deque()
        try:
            while True:
                with _nobody_interrupts():
                    for part in islice(parts, AHEAD * jobs - len(waiting)):
                        waiting.append(pool.submit(_work, work, part))
                if not waiting:
                    return
                result, error = waiting.popleft().result()
                if error:
                    raise Unavailable(error)
                yield result    # type: ignore[misc]
        except BrokenProcessPool as e:
            raise Unavailable('A worker process has died. Run the command again.') from e


@contextmanager
def _nobody_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C: it interrupts this one, which ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# What follows runs in a process of its own.

_failed = ''        # why this process could not begin


def _begin(begin: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _failed
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)       # who stops all processes means the first one
    try:
        begin(*arguments)
    except (POSError, OSError) as e:
        _failed = sentence(e)


def _end_with_the_first() -> None:
    """End with the first process: if that is killed, nothing else ends this one."""
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _work(work: Callable[..., Result], part: tuple[Any, ...]) -> tuple[Result | None, str]:
    """Return the result, or the text of an error: not every exception can be sent to another process."""
    if _failed:
        return None, _failed
    try:
        return work(*part), ''
    except (POSError, OSError) as e:
        return None, sentence(e)
