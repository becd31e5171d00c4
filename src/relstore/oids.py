"""Oids: as numbers, and new ones, taken from the database in blocks."""
import threading
import time
from collections import deque
from collections.abc import Callable

from ZODB.POSException import POSKeyError

from relstore.adapters.base import MAX_TID
from relstore.errors import Unavailable

BLOCK = 16              # oids for each value of RelStorage's sequence
LARGEST = 1024          # blocks requested at once, at most
REMEMBERED = 100_000    # blocks that this process remembers as its own


def number_of(oid: bytes) -> int:
    """Return an oid as an int. POSKeyError: there cannot be such an object."""
    number = int.from_bytes(oid, 'big')
    if len(oid) != 8 or number > MAX_TID:
        raise POSKeyError(oid)
    return number


class OidAllocator:
    """Hands out oids that no other process gets.

    take: takes how many blocks are wanted, and returns the block numbers that the database gave; block n holds oids
    16n-15 .. 16n. If the oids last less than a second, the next request is twice as large. One thread asks for all;
    the others wait `timeout` seconds, as long as it may wait for a session, then get Unavailable.
    """

    def __init__(self, take: Callable[[int], list[int]], timeout: float):
        self._take, self._timeout = take, timeout
        self._lock = threading.Lock()
        self._free: deque[int] = deque()
        self._wanted = 1
        self._refilled = 0.0
        self._own: set[int] = set()
        # The database's next oids are larger than this.
        self.highest = 0

    def new(self) -> int:
        if not self._lock.acquire(timeout=self._timeout):
            raise Unavailable(f'No new oids came within {self._timeout:g} s: another thread waits for the database.')
        try:
            if not self._free:
                self._refill()
            return self._free.popleft()
        finally:
            self._lock.release()

    def issued(self, oid: int) -> bool:
        """Whether the database gave this process the oid: then nobody else can be creating the object."""
        return (oid + BLOCK - 1) // BLOCK in self._own

    def forget(self) -> None:
        """Drop the remaining oids: the database has started counting afresh."""
        with self._lock:
            self._free.clear()
            self._own.clear()
            self.highest = 0

    def after_fork(self) -> None:
        """Start afresh in a child process: the remaining oids belong to the parent."""
        self._lock = threading.Lock()
        self.forget()

    def _refill(self) -> None:
        now = time.monotonic()
        self._wanted = min(self._wanted * 2, LARGEST) if now - self._refilled < 1 else max(self._wanted // 2, 1)
        blocks = self._take(self._wanted)
        if len(self._own) > REMEMBERED:
            self._own.clear()       # only costs another lock for objects created with these oids
        self._own.update(blocks)
        self.highest = max(self.highest, BLOCK * max(blocks))
        for block in sorted(blocks):
            self._free.extend(range(BLOCK * (block - 1) + 1, BLOCK * block + 1))
        self._refilled = now
