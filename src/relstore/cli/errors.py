"""The end of a command: an exit status, and one sentence if it could not be done."""
from __future__ import annotations

import sys
from collections.abc import Callable

from ZODB.POSException import POSError, ReadOnlyError

INTERRUPTED = 130       # exit status after Ctrl-C


def run(command: str, work: Callable[[], int], traceback: bool) -> int:
    """Return the exit status of a command: that of work(), 2 if it could not be done, 130 if it was interrupted.

    An error that the user can put right is one sentence on stderr, with a traceback only if that is asked for.
    """
    try:
        return work()
    except KeyboardInterrupt:
        print(f'{command}: interrupted', file=sys.stderr)
        return INTERRUPTED
    except (POSError, OSError) as error:
        if traceback:
            raise
        print(f'{command}: {sentence(error)}', file=sys.stderr)
        return 2


def sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f'{error.filename}: {error.strerror}'
    if isinstance(error, ReadOnlyError):
        return 'The storage is read-only.'
    return str(error) or type(error).__name__
