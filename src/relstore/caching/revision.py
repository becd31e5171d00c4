"""Revision: one cached state of one object, and how much memory it takes."""
import sys

# valid_to of a revision that is the newest known; above every tid.
OPEN = 1 << 63


class Revision:
    """One state of one object."""

    __slots__ = ('tid', 'valid_to', 'state', 'used')

    def __init__(self, tid: int, valid_to: int, state: bytes):
        self.tid = tid
        self.valid_to = valid_to
        self.state = state
        self.used = False           # hit since the clock's hand last passed? (newest revision only)


def memory_of(thing: object) -> int:
    """Return the bytes that Python allocates for an object: a multiple of 16."""
    return (sys.getsizeof(thing) + 15) & ~15


# Memory of a cached revision besides its state: itself and its tid.
REVISION_BYTES = memory_of(Revision(0, 0, b'')) + memory_of(1 << 62)
# And of an object: its oid, a slot in a dictionary that is one to two thirds full, an entry in the clock.
OBJECT_BYTES = memory_of(1 << 31) + 48 + 8

_EMPTY_STATE_BYTES = sys.getsizeof(b'')


def size_of(state: bytes) -> int:
    """Return the memory of a revision, without sys.getsizeof(): a large commit does this for each object."""
    return REVISION_BYTES + ((len(state) + _EMPTY_STATE_BYTES + 15) & ~15)
