"""Polling: whether the database has to be asked what changed, or an answer is there already."""
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol

# Questions that wait for an answer at once. With one alone, a lone thread more would wait for two answers in a row
# where the network is slow; above this, it is the statements that cost.
AT_ONCE = 4
PATIENCE = 1.0      # seconds to wait for somebody else's question, before one asks oneself

Answer = tuple[int, int]        # (the newest tid, the cache's generation it belongs to)


class Counter(Protocol):
    """What tells whether anything was committed, in any process: see counter.CommitCounter."""

    def value(self) -> int | None:
        """Return what changes with each commit; None if that is not known, or a commit is under way."""


class Polling:
    """What the threads of a process need to ask, and share.

    counter: or None. interval: how many seconds after an answer the counter is believed that nothing has changed.
    `sent` and `saved` count polls: about, for threads take no lock.
    """

    def __init__(self, counter: Counter | None, interval: float):
        self._counter, self._interval = counter, interval
        self._numbers = itertools.count(1)
        self._news = 0                  # another number when what was known is not all any more
        self.sent = self.saved = 0
        self.after_fork()

    def after_fork(self) -> None:
        # (what was the state before a question that was answered, until when)
        self._seen: tuple[tuple[int | None, int, int], float] | None = None
        self._changed = threading.Condition()   # guards what follows
        self._asking = 0                        # questions that wait for their answers
        self._asked = 0                         # how many questions were sent for all
        self._answered = 0                      # which of them was answered last,
        self._answer: Answer = 0, -1            # and how

    def committed(self) -> None:
        """This process has committed."""
        self.forget()

    def forget(self) -> None:
        """What is known is not all any more, nor what questions are told that were sent before."""
        self._news = next(self._numbers)

    def unless_known(self, ask: Callable[[], Answer], known: Callable[[], Answer]) -> Answer:
        """Return ask(), or known() if nothing can have changed since somebody asked.

        The state is read before the question is sent: a commit that the answer does not show has changed it since. The
        generation is part of it, for an answer of an earlier one says nothing.
        """
        if self._counter is None or not self._interval:
            return ask()
        count, now = self._counter.value(), time.monotonic()
        state = count, self._news, known()[1]
        seen = self._seen
        if count is not None and seen is not None and seen[0] == state and now < seen[1]:
            self.saved += 1
            return known()
        answer = ask()
        self._seen = state, now + self._interval
        return answer

    def by_turns(self, ask: Callable[[], Answer]) -> Answer:
        """Return ask(), or what somebody else's has returned that was sent after this was called.

        So there are few questions at a time, however many threads want to know.
        """
        with self._changed:
            before, deadline = self._asked, time.monotonic() + PATIENCE
            while self._asking >= AT_ONCE and self._answered <= before and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._answered > before:
                self.saved += 1
                return self._answer
            self._asking += 1
            self._asked = mine = self._asked + 1
        answer = None
        try:
            answer = ask()
        finally:
            with self._changed:
                self._asking -= 1
                if answer is not None:
                    self._answered, self._answer = mine, answer
                self._changed.notify_all()
        return answer
