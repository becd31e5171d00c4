"""Times: how long each test takes. A run tells the slowest at its end, and how many seconds each layer has.

zope.testrunner tells that in a run with one process alone, and runs each layer in a process of its own otherwise. So
they all add to one file.
"""
import atexit
import functools
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

COUNT = 30
# The file, for the processes of layers; and a page of the documentation that gets the table.
FILE, PAGE = 'RELSTORE_TEST_TIMES', 'RELSTORE_TEST_SLOWEST'
BEGIN, END = '<!-- slowest: by make slowest -->\n', '<!-- /slowest -->\n'
PREFIX = 'relstore.tests.'

Took = dict[tuple[str, str], float]     # (layer, test): seconds


def begin() -> None:
    """Write down the times of a run of zope.testrunner's; called once in each of its processes."""
    if 'zope.testrunner' not in sys.modules:
        return
    if '--resume-layer' not in sys.argv:        # which it gives to the processes of layers
        handle, os.environ[FILE] = tempfile.mkstemp('.times', 'relstore-')
        os.close(handle)
        atexit.register(_end, os.getpid(), os.environ[FILE])
    run = unittest.TestCase.run

    @functools.wraps(run)
    def timed(self, result=None):
        began = time.monotonic()
        try:
            return run(self, result)
        finally:
            layer = getattr(self, 'layer', None)
            with open(os.environ[FILE], 'a', encoding='utf-8') as file:
                file.write(f'{layer.__name__ if layer else "UnitTests"} {self.id().removeprefix(PREFIX)} '
                           f'{time.monotonic() - began:.3f}\n')

    unittest.TestCase.run = timed       # type: ignore[method-assign]


def _end(process: int, path: str) -> None:
    if os.getpid() != process:      # a child that was forked
        return
    took = read(Path(path).read_text('utf-8').splitlines())
    os.unlink(path)
    if not took:
        return
    print(summary(took))
    if page := os.environ.get(PAGE):
        text = Path(page).read_text('utf-8')
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        Path(page).write_text(before + BEGIN + table(took) + END + after, 'utf-8')


def read(lines: Iterable[str]) -> Took:
    """Return what each test took."""
    took = {}
    for line in lines:
        layer, _, rest = line.partition(' ')
        test, _, seconds = rest.rpartition(' ')
        took[layer, test] = float(seconds)
    return took


def slowest(took: Took) -> list[tuple[str, float]]:
    """Return the tests that took longest, and their seconds."""
    return [(test, seconds) for (_, test), seconds in sorted(took.items(), key=lambda item: -item[1])[:COUNT]]


def summary(took: Took) -> str:
    layers: Counter[str] = Counter()
    for (layer, _), seconds in took.items():
        layers[layer] += seconds        # type: ignore[assignment]
    lines = [f'The slowest of {len(took):,} tests, which took {sum(took.values()):,.0f} s:']
    lines += [f'  {seconds:6.1f} {test}' for test, seconds in slowest(took)]
    lines += ['By layer:', *(f'  {seconds:6.0f} {layer}' for layer, seconds in layers.most_common())]
    return '\n'.join(lines)


def table(took: Took) -> str:
    found = slowest(took)
    rows = ''.join(f'| {seconds:.1f} | <code>{test}</code> |\n' for test, seconds in found)
    share = sum(seconds for _, seconds in found) / max(sum(took.values()), 1e-9)
    return f'Of {len(took)} tests these take {share:.0%} of the time.\n\n| seconds | test |\n|---:|---|\n{rows}'
