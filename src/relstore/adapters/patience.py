"""Patience: waiting for a lock that others queue behind.

A process that waits for a lock on a whole table, or for all transactions that have voted, blocks everybody who comes
later: one transaction that is left open would stop a site for as long as the wait lasts. So nobody waits longer than
TRY_SECONDS at a time, and the others go on in the pauses.
"""
import time
from collections.abc import Callable
from typing import TypeVar

from relstore.errors import Deadlock, LockTimeout

Result = TypeVar('Result')

# Longer than PostgreSQL takes to end an autovacuum that is in the way (deadlock_timeout, one second).
TRY_SECONDS = 1.5
# Each pause is twice as long as the one before: what a request asks in a first pause is answered before the next try.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 15.0
PATIENCE_SECONDS = 300.0


def in_tries(attempt: Callable[[], Result], patience: float, blocked: Callable[[Exception], None]) -> Result:
    """Return attempt(), which waits for locks no longer than TRY_SECONDS; until it succeeds, for `patience` seconds.

    blocked: called before each pause. LockTimeout or Deadlock: of the last try.
    """
    deadline, pause = time.monotonic() + patience, FIRST_PAUSE_SECONDS
    while True:
        try:
            return attempt()
        except (LockTimeout, Deadlock) as e:
            if time.monotonic() + pause > deadline:
                raise
            blocked(e)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
