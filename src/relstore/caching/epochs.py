"""Epochs: the times that a process tells apart in the life of one database. Here is no I/O: Database asks, and says.

epoch       A value that changes whenever the database may have lost commits that were visible: a crash, a failover, a
            restored backup. Each adapter's epoch() says what it is made of; a session knows that of what it reads.
generation  How many epochs and sweeps of packs this process has seen: the cache counts it. Nothing that was derived
            from a view of an earlier generation may be kept. A view of an earlier epoch is of no use any more; one of
            before a sweep may go on, but past the cache.
sweeps      How many sweeps of packs have ended, as the database counts them. What they removed no view of later finds.

Beside these there are: a pool's `era`, of sessions that are to be dropped when they come back; what memcached keeps of
an epoch, which is named after it (shared.py); and the number of a pack, which names its list (pack.py).
"""
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Origin(NamedTuple):
    """What a transaction was based on.

    generation: of the view that it has read, or -1. at: the tid this stands at, or stood at before its last commit;
    None: there is none. began: the generation in which the connection began; what it holds may be as old as that.
    """
    generation: int
    at: int | None
    began: int


class Epochs:
    """What one process knows of them.

    Whoever changes it holds the lock under which the cache's generation is changed. Others read without: each attribute
    is replaced as a whole. A generation is entered here before the cache has it, an epoch's name afterwards.
    remembered: of how many objects that sweeps have removed, of all sweeps together, the oids are kept.
    """

    def __init__(self, remembered: int):
        self._remembered = remembered
        self.now = ''                   # the epoch of the current generation
        self.early: Sequence[tuple[int, int]] = ()      # (oid, tid) of what was newest when it began
        self._first = 0                 # its first generation
        self._sweeps: dict[int, int] = {}       # by the generation from which on they are known, in its order
        # What they removed, of those that this process has learnt of one by one, and lately: by number, in order.
        self._swept: dict[int, Sequence[int]] = {}

    def begin(self, generation: int, sweeps: int, early: Sequence[tuple[int, int]]) -> None:
        """An epoch begins with this generation; `now` is to be set when the cache has it. sweeps: that have ended."""
        self.early, self._first = early, generation
        self._sweeps, self._swept = {generation: sweeps}, {}

    def see_sweep(self, number: int, generation: int, oids: Iterable[int] | None) -> None:
        """So many sweeps have ended, and this generation begins.

        oids: what the last of them has removed, in order; None if that is not known.
        """
        self._sweeps = self._sweeps | {generation: number}
        if oids is not None:
            swept = self._swept | {number: array('q', oids)}
            while sum(map(len, swept.values())) > self._remembered:
                del swept[next(iter(swept))]
            self._swept = swept

    def is_current(self, generation: int) -> bool:
        """Whether a generation is of the current epoch."""
        return generation >= self._first

    def of(self, generation: int) -> str:
        """Return the epoch of a generation, -1 meaning the current one; '' if it is past."""
        now = self.now      # read first: with the name of a new epoch goes its first generation
        return now if generation == -1 or self.is_current(generation) else ''

    def sweeps_of(self, generation: int) -> int:
        """Return how many sweeps were known in a generation; -1 if it was of another epoch."""
        for first, number in reversed(self._sweeps.items()):
            if first <= generation:
                return number
        return -1

    def swept(self, old: int, new: int) -> list[Sequence[int]] | None:
        """Return what the sweeps after `old`, up to `new`, have removed, each in order; None if that is not known."""
        lists = [self._swept[number] for number in range(old + 1, new + 1) if number in self._swept]
        return lists if len(lists) == new - old else None


def named(epoch: str, sweeps: int) -> str:
    """Return what to call an epoch where states of it are kept outside of a process."""
    return f'{epoch}/{sweeps}'
