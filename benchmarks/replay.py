"""Read-ahead without a database and without a clock: what recorded accesses cost, by one strategy and by others.

    python -m benchmarks.replay [readahead.py of another version ...]

For each workload of relstore.tests.support.traces: how many loads there are, and for each strategy the statements that
they take, the objects that come unasked, and those of them that nobody asks for afterwards. The numbers are exact, and
the same each time. Another version is a file, as from `git show VERSION:src/relstore/caching/readahead.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from relstore.caching import readahead
from relstore.tests.support import traces


def main(paths: list[str]) -> None:
    strategies = {'this one': readahead} | {path: loaded(path, f'strategy_{n}') for n, path in enumerate(paths)}
    for cheap in (False, True):
        print(f'\nWhere loads are {"" if cheap else "not "}cheap: statements, fetched ahead, and of these unused\n')
        print(f'{"":45}{"loads":>7}', *(f'{name[-24:]:>24}' for name in strategies))
        for name, trace in traces.all_traces().items():
            figures = [traces.replayed([trace], strategy, cheap) for strategy in strategies.values()]
            cells = (f'{each.statements:8}{each.fetched:8}{each.unused:8}' for each in figures)
            print(f'{name:45}{figures[0].loads:7}', *cells)


def loaded(path: str, name: str) -> ModuleType:
    """Return a file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == '__main__':
    main(sys.argv[1:])
