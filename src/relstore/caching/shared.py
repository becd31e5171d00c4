"""Tier: revisions that the processes of a site share through memcached.

Why the Tier cannot serve a wrong state.  A value is "the revision of `oid` at a base tid F" (key oid@F) or "the
revision that the transaction `tid` gave `oid`" (key oid:tid), within one epoch.  Both are facts of the past, so a
value stays right, whoever wrote it, however late, and whatever F the others use by now.  The log of changes in a
view's own process says which of them the view needs; if the log does not reach back to F, the view asks for nothing.
So

* two processes that move F at once both serve right states; the one that finds the other's F at its next look
  adopts it;
* a process with an old F is right too; it only shares less;
* a memcached that was restarted empty, or is short of memory, offers less, but nothing wrong;
* a log that restarts (a jump, a trim) ends the use of every F before its floor;
* another epoch has other keys, and a view of an earlier generation neither gets nor puts.
"""
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b

from relstore.caching.cache import Cache
from relstore.caching.memcached import LARGEST_VALUE_BYTES, Memcached, Unreachable, keys_of
from relstore.sessions.session import Row

# The most that one call writes, in values and bytes: the rest is left to whoever loads it.
LARGEST_BATCH, LARGEST_BATCH_BYTES = 500, 2_000_000
# How often to look at the base that the others use.
LOOK_EVERY_SECONDS = 3.0
# checksum, tid, length of the references that follow, or -1 for None; then the state.
HEADER = struct.Struct('>8sQi')
# checksum, newest base, the one before it or 0.
BASES = struct.Struct('>8sQQ')


class _Epoch:
    """The keys of one epoch, and the base tids in use there: the newest, and the one before it."""

    __slots__ = ('generation', 'namespace', 'bases')

    def __init__(self, generation: int, namespace: str, bases: tuple[int, ...]):
        self.generation = generation
        self.namespace = namespace
        self.bases = bases      # replaced as a whole

    def key(self, oid: int, change: int, base: int) -> str:
        """Return the key of an object that changed last at `change`, or with 0 not since `base`."""
        return f'{self.namespace}{oid:x}:{change:x}' if change else f'{self.namespace}{oid:x}@{base:x}'


class Tier:
    """Revisions shared by all processes: what one has loaded, another need not ask the database for.

    The keys refer to a base tid F, which is in memcached too.  When more than `limit` objects have changed since F, or
    the log of a process does not reach back to it, that process moves F to its head.  Values of the previous F are
    not lost: views look under both, and store what they find under the newer one.

    `hits` and `misses` count objects, without a lock.
    """

    def __init__(self, client: Memcached, prefix: str, cache: Cache, limit: int = 10_000):
        self._client, self._prefix, self.cache, self._limit = client, prefix, cache, limit
        self.epoch: _Epoch | None = None
        self._next_look = 0.0
        self.hits = self.misses = 0

    def begin(self, database: str, epoch: str, generation: int, last: int,
              stands: Callable[[int], int] | None = None, afresh: bool = False) -> int | None:
        """Start under the keys of this epoch, for views of this generation of the cache.

        last: the newest tid in the database. stands: with history, returns the newest existing tid up to a given one.
        afresh: values shared for the current bases may come from transactions that were lost.
        Return the tid that the cache's log should reach back to in order to use all that the others share; None
        if they share nothing. Asks memcached, unless this process goes on as before, after a fork.
        """
        namespace = keys_of(self._prefix, database, epoch)
        known = self.epoch
        bases: tuple[int, ...] = ()
        if known is not None and known.namespace == namespace and last >= self.cache.head and not afresh:
            bases = known.bases
        else:
            with suppress(Unreachable):
                bases = self._shared_bases(namespace) or ()
                if afresh or bases and (bases[0] > last or stands is not None and stands(bases[0]) < bases[0]):
                    # A backup was restored, including its epoch. Values stored for that base contain states of lost
                    # commits.
                    bases = (last,)
                    self._client.first.set(f'{namespace}base', _encode_bases(f'{namespace}base', bases))
        self.epoch = _Epoch(generation, namespace, bases)
        self.look_soon()
        return bases[-1] if bases else None

    def get(self, oids: Iterable[int], at: int, generation: int) -> dict[int, tuple[bytes, int, bytes | None]]:
        """Return {oid: (state, tid, references or None if unknown)} as a view at `at` sees them; only those found."""
        epoch = self._of(generation)
        if epoch is None:
            return {}
        keys = {oid: [epoch.key(oid, *fact) for fact in self._facts(epoch, oid, at)] for oid in oids}
        values = self._client.get_many(dict.fromkeys(key for some in keys.values() for key in some))
        found, older = {}, {}
        for oid, some in keys.items():
            for key in some:
                row = _decode(key, values.get(key))
                if row is not None:
                    found[oid] = row
                    if key != some[0]:
                        older[some[0]] = row
                    break
        self.hits += len(found)
        self.misses += len(keys) - len(found)
        self._set((key, *row) for key, row in older.items())
        return found

    def put(self, rows: Iterable[tuple[int, bytes | None, int, bytes | None]], at: int, generation: int) -> None:
        """Share what a view at `at` loaded from the database: (oid, state, tid, references)."""
        epoch = self._of(generation)
        if epoch is not None:
            self._set(self._named(epoch, rows, at))

    def _named(self, epoch: _Epoch, rows: Iterable[Row], at: int) -> Iterable[Row]:
        for oid, state, tid, refs in rows:
            for change, base in self._facts(epoch, oid, at):
                if tid == change or not change and tid <= base:
                    yield epoch.key(oid, change, base), state, tid, refs
                break

    def committed(self, tid: int, rows: Iterable[tuple[int, bytes | None, bytes | None]], generation: int) -> None:
        """Share what this process committed: (oid, state, references). The others learn its tid when they poll."""
        epoch = self._of(generation)
        if epoch is not None:
            self._set((epoch.key(oid, tid, 0), state, tid, refs) for oid, state, refs in rows)

    def look(self) -> None:
        """Adopt the base that the others use, or move it. Called at every poll; asks memcached every few seconds."""
        now = time.monotonic()
        if now >= self._next_look and self.epoch is not None:
            self._next_look = now + LOOK_EVERY_SECONDS
            with suppress(Unreachable):
                self._look(self.epoch)

    def look_soon(self) -> None:
        self._next_look = 0.0

    def _look(self, epoch: _Epoch) -> None:
        shared = self._shared_bases(epoch.namespace)
        # If it is gone, offer our own: values stored for that may still be there.
        bases = shared or epoch.bases
        head = self.cache.head
        if self._changed_since(epoch, head) is None:
            return              # no longer the cache's generation, or it is just jumping
        if bases and bases[0] > head and shared:
            return              # the others have polled later than we have: next time
        changed = self._changed_since(epoch, bases[0]) if bases and bases[0] <= head else None
        if changed is None or changed > self._limit:
            bases = (head,) if changed is None else (head, bases[0])
        if bases != shared:
            key = f'{epoch.namespace}base'
            value = _encode_bases(key, bases)
            if shared is not None:
                self._client.first.set(key, value)
            elif not self._client.first.add(key, value):
                return          # another process was quicker: adopt its base at the next look
        epoch.bases = bases

    def _shared_bases(self, namespace: str) -> tuple[int, ...] | None:
        """Return the bases that the others use, newest first; () if the value is garbage, None if there is none."""
        key = f'{namespace}base'
        value = self._client.first.get(key)
        return None if value is None else _decode_bases(key, value)

    def _changed_since(self, epoch: _Epoch, tid: int) -> int | None:
        """Return how many objects have changed since a tid; None if the log cannot tell."""
        changed = self.cache.invalidations(tid, None, epoch.generation)
        return None if changed is None else len(changed)

    def _of(self, generation: int) -> _Epoch | None:
        epoch = self.epoch
        return epoch if epoch is not None and epoch.generation == generation else None

    def _facts(self, epoch: _Epoch, oid: int, at: int) -> Iterable[tuple[int, int]]:
        """Yield (newest change up to `at`, or 0 for none since the base; the base) for each base a view can use."""
        for base in epoch.bases:
            change = self.cache.newest_change(oid, at, base, epoch.generation)
            if change is not None:
                yield change, base

    def _set(self, rows: Iterable[tuple[str, bytes | None, int, bytes | None]]) -> None:
        values: dict[str, bytes] = {}
        room = LARGEST_BATCH_BYTES
        for key, state, tid, refs in rows:
            if state is None or len(state) > LARGEST_VALUE_BYTES:
                continue
            value = _encode(key, state, tid, refs)
            room -= len(value)
            if room < 0 or len(values) == LARGEST_BATCH:
                break
            values[key] = value
        if values:
            self._client.set_many(values)


# Values

def _checksum(key: str, content: bytes) -> bytes:
    """Return the checksum that tells a key's value from garbage, a truncated value, and another key's.

    blake2b, not crc32: one in 2**32 mixed-up values is too many, and 64 bits cost 2 us for a state of 1 KB,
    compared to 20 us or more for the round trip.
    """
    return blake2b(content, digest_size=8, key=key.encode()[-64:]).digest()


def _encode(key: str, state: bytes, tid: int, refs: bytes | None) -> bytes:
    head = HEADER.pack(b'', tid, -1 if refs is None else len(refs))[8:]
    content = b''.join((head, refs or b'', state))
    return _checksum(key, content) + content


def _decode(key: str, value: object) -> tuple[bytes, int, bytes | None] | None:
    """Return (state, tid, references), or None if the value is not what _encode() made for this key."""
    if not isinstance(value, bytes) or len(value) < HEADER.size or value[:8] != _checksum(key, value[8:]):
        return None
    _, tid, length = HEADER.unpack_from(value)
    end = HEADER.size + max(length, 0)
    return value[end:], tid, None if length < 0 else value[HEADER.size:end]


def _encode_bases(key: str, bases: tuple[int, ...]) -> bytes:
    newest, older = (*bases, 0)[:2]
    content = BASES.pack(b'', newest, older)[8:]
    return _checksum(key, content) + content


def _decode_bases(key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) != BASES.size or value[:8] != _checksum(key, value[8:]):
        return ()
    _, newest, older = BASES.unpack(value)
    return (newest, older) if older else (newest,)
