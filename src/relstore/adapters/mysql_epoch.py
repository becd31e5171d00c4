"""The epoch of a database of MySQL or MariaDB, as polls and votes of one process know it.

It is the value in the table relstore_epoch, and when that table was made: whoever restores a dump makes it anew, with
the value of then.
"""
import time
from collections.abc import Sequence

from relstore.sessions.session import Row

# Between two looks at when the table was made: too slow for every poll.
LOOK_EVERY_SECONDS = 1.0


class EpochTable:
    """What is in the table, and when it was made."""

    def __init__(self) -> None:
        self.value, self.made, self._next_look = '', '', 0.0

    def is_time_to_look(self) -> bool:
        """Whether the caller is to ask when the table was made, with sql.made, and to hand the answer to `see`."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_SECONDS
        return True

    def look_soon(self) -> None:
        self._next_look = 0.0

    def see(self, rows: Sequence[Row]) -> None:
        """Take over the answer to sql.made."""
        self.made = made(rows)


def made(rows: Sequence[Row]) -> str:
    """Return when a table was made, or what stands for that while there is none."""
    return rows[0][0] if rows else 'never'
