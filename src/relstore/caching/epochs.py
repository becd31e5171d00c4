"""Epochs: the periods that a process distinguishes in the life of one database. No I/O here: Database does that.

epoch       A value that changes whenever the database may have lost visible commits: in a crash, a failover, a
            restore. Each adapter's epoch() says what it is made of; a session knows the epoch of what it reads.
generation  How many epochs and sweeps of packs this process has seen; the cache counts it. Nothing derived from a
            view of an earlier generation may be kept. A view of an earlier epoch is useless; one from before a sweep
            may go on, but bypasses the cache.
sweeps      How many sweeps of packs have ended, as the database counts them. Later views do not find what they removed.

Related: a pool's `era`, which marks sessions to drop when they are given back; what memcached keeps for an epoch, named
after it (shared.py); and the number of a pack, which names its list (pack.py).
"""
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import NamedTuple

# Objects remembered of this process's commits: in all, and of each commit.
OWN, OWN_AT_ONCE = 100, 5


class Origin(NamedTuple):
    """What a transaction was based on.

    generation: of the view that it read, or -1. at: the tid that view stands at, or stood at before its last commit;
    None: there is no view. began: the generation in which the connection began. since: where its first view stood; the
    connection may hold states as old as that. 0 without a view: nobody knows what the caller has seen.
    """
    generation: int
    at: int | None
    began: int
    since: int


class Epochs:
    """What one process knows of epochs and sweeps.

    Changed only under the lock under which the cache's generation changes, read without it: each attribute is
    replaced as a whole. A generation is entered here before the cache has it, an epoch's name afterwards.
    remembered: how many oids of removed objects to keep, for all sweeps together.
    """

    def __init__(self, remembered: int):
        self._remembered = remembered
        self.now = ''                   # the epoch of the current generation
        self.early: Sequence[tuple[int, int]] = ()      # (oid, tid) of the newest objects when it began
        self.first = 0                  # its first generation: those before belong to epochs that are over
        self._sweeps: dict[int, int] = {}       # by the first generation that knew of them, in order
        # What each recent sweep removed, by number, in order; only sweeps that this process saw one at a time.
        self._swept: dict[int, Sequence[int]] = {}
        self._own: deque[tuple[int, int]] = deque(maxlen=OWN)   # (oid, tid) of commits that no poll has reported yet

    def begin(self, generation: int, sweeps: int, early: Sequence[tuple[int, int]]) -> None:
        """Begin an epoch with this generation; set `now` once the cache has it. sweeps: how many have ended."""
        self.early, self.first = early, generation
        self._sweeps, self._swept = {generation: sweeps}, {}
        self._own.clear()

    def committed(self, tid: int, oids: Iterable[int]) -> None:
        """Remember some objects of a commit of this process: the next poll has to report them."""
        self._own.extend(zip(islice(oids, OWN_AT_ONCE), repeat(tid)))

    def own_since(self, tid: int) -> list[tuple[int, int]]:
        """Return (oid, tid) of this process's commits after a tid that are remembered and no poll has reported."""
        return [row for row in self._own.copy() if row[1] > tid] if self._own else []

    def told(self, last: int) -> None:
        """Note that a poll has reported everything up to this tid."""
        while self._own and self._own[0][1] <= last:
            self._own.popleft()

    def see_sweep(self, number: int, generation: int, oids: Iterable[int] | None) -> None:
        """Note that `number` sweeps have ended, and that this generation begins.

        oids: what the last sweep removed, in order; None if unknown.
        """
        self._sweeps = self._sweeps | {generation: number}
        if oids is not None:
            swept = self._swept | {number: array('q', oids)}
            while sum(map(len, swept.values())) > self._remembered:
                del swept[next(iter(swept))]
            self._swept = swept

    def of(self, generation: int) -> str:
        """Return the epoch of a generation, -1 meaning the current one; '' if that epoch is over."""
        now = self.now      # read first: `first` is set before a new epoch's name
        return now if generation == -1 or generation >= self.first else ''

    def sweeps_of(self, generation: int) -> int:
        """Return how many sweeps were known in a generation; -1 if it belongs to another epoch."""
        for first, number in reversed(self._sweeps.items()):
            if first <= generation:
                return number
        return -1

    def swept(self, old: int, new: int) -> list[Sequence[int]] | None:
        """Return what the sweeps after `old`, up to `new`, removed, each in order; None if unknown."""
        lists = [self._swept[number] for number in range(old + 1, new + 1) if number in self._swept]
        return lists if len(lists) == new - old else None


def named(epoch: str, sweeps: int) -> str:
    """Return the name of an epoch for states kept outside the process."""
    return f'{epoch}/{sweeps}'
