"""Pack times: revisions that were garbage or outdated by then may go."""
import time

from persistent.TimeStamp import TimeStamp
from ZODB.utils import u64

from relstore.adapters.base import MAX_TID
from relstore.errors import ConfigurationError

# Pack times from FIRST_TID on (the tid of 1970) are tids; those below LAST_SECOND (the year 4147) are seconds.
FIRST_TID, LAST_SECOND = u64(TimeStamp(1970, 1, 1, 0, 0, 0.0).raw()), 2 ** 36


def tid_of(pack_time: float) -> int:
    """Return the tid that a pack time stands for: seconds since 1970, or an int that is a tid itself.

    ConfigurationError if it is neither: milliseconds, for example, would be far in the future.
    """
    if isinstance(pack_time, int) and FIRST_TID <= pack_time <= MAX_TID:
        return pack_time
    if not pack_time < LAST_SECOND:
        raise ConfigurationError(f'The pack time {pack_time!r} is neither a number of seconds since 1970 nor a tid.')
    return u64(TimeStamp(*time.gmtime(pack_time)[:5], pack_time % 60).raw())
