"""Broken: prints the references in a database that lead nowhere, each with its way from the root."""
from __future__ import annotations

from itertools import islice

from relstore.cli.progress import counted, progress
from relstore.packing.checks import Dangling, Survey
from relstore.storage import RelStore

BROKEN = 50         # references that are shown with their paths
STEPS = 12          # shown of a path


def tell_broken(storage: RelStore, in_lines: bool) -> bool:
    """Look at all that can be reached, and print what leads nowhere. Return whether something does, or is unreadable.

    in_lines: whether it is told in lines how far that is, not in a bar. ConfigurationError: there is no root.
    """
    with progress(in_lines) as tell:
        survey = Survey(storage.database, tell)
        found = survey.dangling()
        shown = [(broken, broken.path()) for broken in islice(found, BROKEN)]
        more = sum(1 for _ in found)
    names = survey.classes(sorted({oid for _, path in shown for oid in _some(path)}))
    for broken, path in shown:
        _tell(broken, path, names)
    report = survey.report
    if more:
        print(f'  ... and {more:,} more.')
    if report.unreadable:
        examples = ', '.join(f'{oid:#x} (tid {tid:#x})' for oid, tid in report.examples)
        print(f'  {counted(report.unreadable, "record")} cannot be read: {examples}')
    nowhere = counted(len(shown) + more, 'reference leads', 'references lead')
    print(f'  {nowhere} nowhere. {counted(report.revisions, "revision was", "revisions were")} looked at.')
    return bool(shown or report.unreadable)


def _tell(broken: Dangling, path: list[int], names: dict[int, str]) -> None:
    what = 'is deleted' if broken.deleted else 'is missing'
    print(f'  {broken.oid:#x} {names.get(broken.oid) or "?"} refers to {broken.target:#x}, which {what}. '
          'From the root:')
    some = _some(path)
    for number, oid in enumerate(some):
        if number == STEPS // 2 and len(some) < len(path):
            print(f'      ... {counted(len(path) - len(some), "more object")} ...')
        print(f'      {oid:#x} {names.get(oid) or "?"}')


def _some(path: list[int]) -> list[int]:
    """Return the path, or both of its ends if it is long."""
    return path if len(path) <= STEPS else path[:STEPS // 2] + path[-STEPS // 2:]
