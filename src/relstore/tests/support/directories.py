"""Directories: the temporary files of an ordinary run are in memory, where there is room for them.

Most tests on SQLite wait for nothing but the disk, and take half the time without. Servers of the tests do not wait for
it, and keep their data there. A thorough run has all on the disk: while one waits for it, others interleave. The
environment's TMPDIR names another place.
"""
import atexit
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from relstore.tests.support.left import THOROUGH

MEMORY = Path('/dev/shm')
ROOM_BYTES = 4 << 30        # in it, and twice that in the machine
PREFIX = 'relstore-tests-'


def begin() -> None:
    """Choose for a run of zope.testrunner's; called once in each of its processes, which hand it on to their own."""
    if 'zope.testrunner' not in sys.modules or '--resume-layer' in sys.argv:
        return
    if 'TMPDIR' in os.environ or THOROUGH or not _has_room():
        return
    _remove_abandoned()
    directory = tempfile.mkdtemp(prefix=f'{PREFIX}{os.getpid()}-', dir=MEMORY)
    os.chmod(directory, 0o1777)     # as that of a system: some tests run programs as other users
    os.environ['TMPDIR'] = tempfile.tempdir = directory
    atexit.register(_end, os.getpid(), directory)


def disk() -> str:
    """Return where what is large goes."""
    return '/tmp' if Path(tempfile.gettempdir()).name.startswith(PREFIX) else tempfile.gettempdir()


def _has_room() -> bool:
    try:
        free = shutil.disk_usage(MEMORY).free
        available = re.search(r'^MemAvailable: *(\d+) kB$', Path('/proc/meminfo').read_text('ascii'), re.MULTILINE)
    except OSError:
        return False
    return (os.access(MEMORY, os.W_OK | os.X_OK) and free >= ROOM_BYTES
            and available is not None and int(available[1]) << 10 >= 2 * ROOM_BYTES)


def _remove_abandoned() -> None:
    """Remove what runs have left that were killed."""
    for directory in MEMORY.glob(f'{PREFIX}*'):
        process = directory.name.removeprefix(PREFIX).partition('-')[0]
        if not Path('/proc', process).exists():
            shutil.rmtree(directory, ignore_errors=True)        # it may be another user's


def _end(process: int, directory: str) -> None:
    if os.getpid() == process:      # no child that was forked
        shutil.rmtree(directory, ignore_errors=True)
