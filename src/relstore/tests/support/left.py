"""What a plain run leaves to one with RELSTORE_TEST_THOROUGH=1 is counted, and told at its end."""
import atexit
import multiprocessing
import os
import sys

THOROUGH = bool(os.environ.get('RELSTORE_TEST_THOROUGH'))

_left: list[type] = []


def leave(case: type) -> None:
    """Count the tests of a case that is not run."""
    if not _left and '--resume-layer' not in sys.argv:          # which zope.testrunner gives to the runs of layers
        atexit.register(_tell, os.getpid())
    _left.append(case)


def tests_of(case: type) -> list[str]:
    """Return the names of its tests; ZODB 5 calls some check..."""
    return [name for name in dir(case) if name.startswith(('test', 'check')) and callable(getattr(case, name))]


def _tell(process: int) -> None:
    if os.getpid() == process and multiprocessing.parent_process() is None:         # not a child, forked or spawned
        print(f'{sum(len(tests_of(case)) for case in _left)} tests of {len(_left)} cases of these modules are left to '
              'RELSTORE_TEST_THOROUGH=1')
