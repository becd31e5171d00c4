"""The objects that the benchmarks store."""

import random

from persistent import Persistent

DATA_BYTES = 128
CHANCE = random.Random(1)


class Record(Persistent):
    """An object of some 200 bytes; of two conflicting changes the later one wins."""

    def __init__(self, data: bytes | None = None):
        self.data = CHANCE.randbytes(DATA_BYTES) if data is None else data
        self.number = 0

    def _p_resolveConflict(self, old: dict, saved: dict, new: dict) -> dict:
        return new


class Stubborn(Persistent):
    """An object whose conflicts are not resolved."""

    number = 0


class Node(Persistent):
    """An object that refers to others."""

    def __init__(self):
        self.data = CHANCE.randbytes(DATA_BYTES)
        self.children: list[Persistent] = []
