"""Generations: of views and of cached states. One ends with its epoch, or when a pack has removed something."""
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from relstore.adapters.base import Adapter
from relstore.caching.cache import Cache
from relstore.caching.epochs import Epochs, named
from relstore.caching.polling import Polling
from relstore.caching.shared import Tier
from relstore.sessions.session import Session

# Objects that are remembered from the beginning of an epoch: see Database.changed_last.
EARLY = 20


class Forgetful(Protocol):
    """Knows something of the database that ends with its epoch."""

    def forget(self) -> None: ...


class Generations:
    """Moves the cache, the epochs and what processes share from one generation to the next, together.

    name: of the database. parts: what else forgets at the beginning of an epoch: oids, for one, may be counted anew.
    look_again: called with a session at the beginning of an epoch, and after a sweep: blobs may have been moved.
    lock: held by whoever changes the epoch or what is known of it.
    """

    def __init__(self, name: str, adapter: Adapter, cache: Cache, epochs: Epochs, polling: Polling, tier: Tier | None,
                 parts: Iterable[Forgetful], look_again: Callable[[Session], None]):
        self._name, self._adapter, self._cache, self._epochs = name, adapter, cache, epochs
        self._polling, self._tier, self._parts = polling, tier, list(parts)
        self._look_again = look_again
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        self.lock = threading.Lock()

    def begin(self, session: Session, epoch: str, sweeps: int, last: int, since: int | None = None) -> None:
        """Start a generation with an epoch, while nobody else can.

        sweeps: how many have ended. last: the newest tid. since: in a new process, where the log is to begin because
        what was saved is of that time; it begins earlier still if what the processes share does.
        """
        generation, base = self._cache.generation + 1, None
        if self._tier is not None:
            # The same epoch, though it begins anew: what the processes share may be of what was lost.
            afresh = epoch == self._epochs.now and since is None
            stands = partial(self._adapter.stands, session) if self._adapter.keep_history else None
            base = self._tier.begin(self._name, named(epoch, sweeps), generation, last, stands, afresh)
        if since is None:
            since = last
        elif base is not None:
            since = min(since, base)
        for part in self._parts:
            part.forget()
        self._look_again(session)
        self._epochs.begin(generation, sweeps, session.all(self._adapter.sql.newest, (EARLY,)))
        self._cache.restart(since)
        self._polling.forget()
        self._epochs.now = epoch

    def drop_swept(self, session: Session, generation: int, number: int, limit: int) -> int:
        """Start a generation without what the first `number` sweeps removed; return it, for views that know of them.

        generation: the one in which the question was asked. limit: of objects that are dropped one by one. The session
        tells of these sweeps and of no later one, or of what is now. What could interleave:

        * Others load meanwhile what they still see, in views of earlier generations: they may not put it anywhere.
        * Others were told the same: whoever is first begins the generation, and the others' answers are as good in it.
        * Others were told of one sweep more, and were quicker: what our view sees may be gone by now. Or the epoch is
          over. Then it stays in the generation in which it asked.
        """
        self._look_again(session)
        cache, epochs = self._cache, self._epochs
        is_next = epochs.sweeps_of(generation) == number - 1
        oids = self._adapter.sweeps.swept(session, number, limit) if is_next else None
        with self.lock:
            now = cache.generation
            known = epochs.sweeps_of(now)
            if known > number or generation < epochs.first:
                return generation
            if known < number:
                epochs.see_sweep(number, now + 1, oids)
                if self._tier is not None:
                    self._tier.begin(self._name, named(epochs.now, number), now + 1, cache.head)
                cache.remove(oids)
                self._polling.forget()
            return cache.generation

    def lasting(self, epoch: str, sweeps: int) -> str:
        """Return what to call an epoch in what is to serve after a restart of everything."""
        return named(self._adapter.lasting(epoch), sweeps)

    def lasting_of(self, generation: int) -> str:
        """Return that of the epoch now; '' if the generation is over."""
        with self.lock:
            if generation != self._cache.generation:
                return ''
            return self.lasting(self._epochs.now, self._epochs.sweeps_of(generation))
