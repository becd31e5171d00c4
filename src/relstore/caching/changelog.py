"""ChangeLog: which objects changed in (floor, head], as polls have told."""
from itertools import islice, takewhile
from threading import Lock


class ChangeLog:
    """The newest tid of each object that changed lately; all tids and oids are 64-bit ints.

    It has at most `log_limit` objects (about 140 bytes each). Thread-safe: writers hold the lock.
    """

    def __init__(self, log_limit: int):
        self.log_limit = log_limit
        self.head = 0               # the newest polled tid
        self.floor = 0              # the log is complete in (floor, head]
        self.generation = 0         # how often it began anew
        self._lock = Lock()         # for writers
        self._changed: dict[int, int] = {}      # oid -> newest tid in (floor, head]; in the order of tids

    def invalidations(self, old: int, own: int | None, generation: int | None = None) -> list[int] | None:
        """Return the oids that changed for a view that stood at `old`; None if anything may have changed.

        own: the tid of the view's own commit since then; the view has its states.
        """
        with self._lock:
            if self._outdated(generation) or old < self.floor:
                return None
            oids = []
            for oid, tid in reversed(self._changed.items()):
                if tid <= old:
                    break
                if tid != own:
                    oids.append(oid)
            return oids

    def newest_change(self, oid: int, at: int, since: int, generation: int | None = None) -> int | None:
        """Return the tid that the object had in a view at `at`, if it changed after `since`; 0 if it did not.

        None if the log cannot tell: it does not reach back to `since`, or the object changed after `at` too.
        """
        with self._lock:
            if self._outdated(generation) or not self.floor <= since <= at <= self.head:
                return None
            tid = self._changed.get(oid, 0)
            if tid > at:
                return None
            return tid if tid > since else 0

    def newest_changes(self, size: int, after: int = 0) -> tuple[int, int, list[tuple[int, int]]]:
        """Return (head, floor, [(oid, tid)]): the last `size` objects that changed after a tid, newest first.

        They are all that have changed after that floor.
        """
        with self._lock:
            later = takewhile(lambda change: change[1] > after, reversed(self._changed.items()))
            newest = list(islice(later, size))
            floor = newest[-1][1] if len(newest) == size else max(self.floor, after)
            return self.head, floor, newest

    def trim(self, floor: int) -> None:
        """Forget what changed up to `floor`.  Done automatically when the log exceeds its limit."""
        with self._lock:
            self._trim(floor)

    def _trim(self, floor: int) -> None:
        self.floor = max(self.floor, min(floor, self.head))
        self._changed = {oid: tid for oid, tid in self._changed.items() if tid > self.floor}

    def _outdated(self, generation: int | None) -> bool:
        """Was this learned before restart()?  Tids alone cannot tell: a lost tid may be used again."""
        return generation is not None and generation != self.generation
