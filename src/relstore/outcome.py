"""Outcome: whether a commit happened whose answer was lost."""
from __future__ import annotations

import time
from collections.abc import Sequence

from ZODB.POSException import ConflictError

from relstore.adapters.commits.base import AnyCommit
from relstore.database import Database
from relstore.errors import Deadlock, OutcomeUnknown, StorageError, Unavailable

# How long to go on asking for the outcome of a commit while no server can be reached.
OUTCOME_PATIENCE_SECONDS = 60.0


def outcome(database: Database, commit: AnyCommit, oids: Sequence[int], error: Exception) -> int:
    """Return the tid if the database has committed in spite of the error; else raise it.

    commit: its session is broken, and given back. oids: what it has changed. OutcomeUnknown: nobody can tell.
    """
    deadline = time.monotonic() + OUTCOME_PATIENCE_SECONDS
    while True:
        try:
            tid = database.pool.attempt(commit.outcome, oids)
            break
        except (StorageError, ConflictError) as e:
            # A server that recovers from a crash refuses connections for a while; then all come back at once.
            if not isinstance(e, Unavailable) or time.monotonic() > deadline:
                raise OutcomeUnknown(f'The commit was sent, then the connection failed ({error}); whether it '
                                     f'happened cannot be told: {e}') from error
            time.sleep(0.1)
    if tid is None:
        if isinstance(error, Deadlock):
            database.conflicts.deadlock()
        raise error
    return tid
