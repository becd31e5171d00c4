"""Polling: whether to ask the database what changed, or to use an answer that is already known."""
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol

# Questions that may wait for an answer at once. With one, a second thread would wait for two answers in a row, which
# is slow over a slow network; with more than this, the statements themselves cost too much.
AT_ONCE = 4
PATIENCE_SECONDS = 1.0      # how long a thread waits for another's answer before it asks itself

Answer = tuple[int, int]        # (the newest tid, the cache's generation it belongs to)


class Counter(Protocol):
    """Tells whether any process has committed: see commits.CommitCounter."""

    def value(self) -> int | None:
        """Return a number that changes with every commit; None if it is unknown, or a commit is under way."""


class Polling:
    """The polls of one process, shared by its threads.

    counter: or None. interval: for how many seconds after an answer to trust the counter that nothing has changed.
    `sent` and `saved` count polls, approximately: threads take no lock.
    """

    def __init__(self, counter: Counter | None, interval: float):
        self._counter, self._interval = counter, interval
        self._numbers = itertools.count(1)
        self._news = 0                  # a new number whenever what was known becomes incomplete
        self.sent = self.saved = 0
        self.after_fork()

    def after_fork(self) -> None:
        # (the state before a question that was answered, until when to trust it)
        self._seen: tuple[tuple[int | None, int, int], float] | None = None
        self._changed = threading.Condition()   # guards what follows
        self._asking = 0                        # questions waiting for their answers
        self._asked = 0                         # how many questions were sent
        self._answered = 0                      # the number of the one answered last,
        self._answer: Answer = 0, -1            # and its answer

    def forget(self) -> None:
        """Trust neither what is known nor the answers to questions already sent: they may be incomplete."""
        self._news = next(self._numbers)

    def unless_known(self, ask: Callable[[], Answer], known: Callable[[], Answer]) -> Answer:
        """Return ask(), or known() if nothing can have changed since somebody asked.

        The state is read before the question is sent: a commit missing from the answer changes it afterwards. It
        includes the generation, because an answer for an earlier one means nothing.
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
        """Return ask(), or the answer to another thread's question that was sent after this call began.

        So few questions are under way at a time, however many threads want to know.
        """
        with self._changed:
            before, deadline = self._asked, time.monotonic() + PATIENCE_SECONDS
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
