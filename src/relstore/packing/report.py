"""Report: what a pack has done, or would do; and Progress, which is told meanwhile."""
from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from relstore.adapters.base import Swept
from relstore.packing.garbage import LATER, OBJECT, OLDER
from relstore.sessions.session import Row

# (what is being done, how much of it is done, of how much or None)
Progress = Callable[[str, int, int | None], None]


@dataclass
class Report:
    """What a pack has done, or would do."""
    pack_tid: int = 0
    marked_tid: int = 0
    gc: bool = True
    revisions: int = 0          # looked at
    objects: int = 0            # that go
    older: int = 0              # objects that stay, and of which older revisions go
    later: int = 0              # history-free: unreachable, but not for long enough
    spared: int = 0             # objects that were linked or changed since they were marked
    states: int = 0             # that were removed
    bytes: int = 0              # of these
    blobs: int = 0              # revisions of them, as far as their size is recorded, that were removed
    blob_bytes: int = 0         # of their data, which is in the database, or in files
    transactions: int = 0       # that were removed
    files: int = 0              # of blobs, in a shared directory, that were removed
    file_bytes: int = 0         # of these
    unread: int = 0             # records whose references were not known, and were found out
    unreadable: int = 0         # records that could not be read, and are taken to refer to all they may name
    wrapped: int = 0            # those of them that are no pickles and name nothing
    examples: list[tuple[int, int]] = field(default_factory=list)       # (oid, tid) of some of these
    steps: int = 0
    longest_step: float = 0.0   # seconds
    locked: float = 0.0         # seconds in which nobody could vote, in all
    longest_lock: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)             # by phase
    # Of a dry run: oids, tids, and what goes of them.
    listed: list[array[int]] = field(default_factory=list, repr=False)

    def count(self, rows: list[Row]) -> None:
        """Rows of the list: the last column says what goes."""
        goes = [row[-1] for row in rows]
        self.objects += goes.count(OBJECT)
        self.older += goes.count(OLDER)
        self.later += goes.count(LATER)

    def add(self, swept: Swept) -> None:
        """Count what a step has removed."""
        self.states += swept.states
        self.bytes += swept.bytes
        self.blobs += swept.blobs
        self.blob_bytes += swept.blob_bytes

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def held(self, began: float) -> None:
        """Until now, and since then, nobody could vote."""
        seconds = time.monotonic() - began
        self.locked += seconds
        self.longest_lock = max(self.longest_lock, seconds)
