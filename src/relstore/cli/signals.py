"""Signals: Ctrl-C, or SIGTERM, ends a command where it does no harm."""
from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Signals:
    """False until one has come that is to be obeyed where it does no harm.

    patient: whether the first one waits for that. Else it interrupts at once, as a second one does.
    """

    def __init__(self) -> None:
        self.patient = self._came = False

    def __bool__(self) -> bool:
        return self._came

    def __call__(self, number: int, frame: object) -> None:
        if self._came or not self.patient:
            raise KeyboardInterrupt
        self._came = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Have the first one wait while this is entered."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False


@contextmanager
def signals() -> Iterator[Signals]:
    """Yield what learns of SIGINT and SIGTERM while this is entered."""
    found = Signals()
    before = {number: signal.signal(number, found) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
