"""What processes share beside the database: revisions (Tier), and whether anything was committed (CommitCounter).

Everything here may fail at any time, and then it is as if there were nothing: whoever asks goes to the database.

Why the Tier cannot serve what is wrong.  All say "the revision of `oid` at a base tid F" (key oid@F) or "the
revision that the transaction `tid` gave `oid`" (key oid:tid), within one epoch.  Both are facts of the past, so a
value is right for ever, whoever wrote it, however late, and whatever F the others use by now.  Which fact a view
needs, its own process's log of changes says; where the log does not reach back to F, the view asks for nothing.  So

* two processes that move F at once each serve what is right; the one that finds the other's F at its next look
  takes it;
* a process with an old F is right too; it only shares less;
* memcached restarted empty, or short of memory, has less to offer, nothing wrong;
* a log that begins anew (a jump, a trim) ends the use of every F before its floor;
* another epoch has other keys, and a view of an earlier generation neither asks nor puts.
"""
import logging
import secrets
import struct
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any, TypeVar

from relstore.cache import Cache
from relstore.errors import ConfigurationError

log = logging.getLogger('relstore')

# Seconds that connecting may take, and an answer. What takes longer is a failure, even if it comes.
TIMEOUT = 0.25
# Seconds that a server is left alone after a failure, and after many.
PAUSE, LONGEST_PAUSE = 0.5, 30.0
# Bytes of the largest value: memcached takes 1 MiB with the key and its own header, unless told otherwise (-I).
LARGEST = 1_000_000
# What one call writes at most: the rest is left to those who load it.
LARGEST_BATCH, LARGEST_BATCH_BYTES = 500, 2_000_000

Result = TypeVar('Result')


class Unreachable(Exception):
    """The server did not do it, or did not say that it did: down, slow, talking nonsense, or left alone for a while."""


# Client libraries -------------------------------------------------------------------------------------------------


class Pymemcache:
    """Connections made by pymemcache."""

    def __init__(self):
        import pymemcache
        self._client = partial(pymemcache.Client, connect_timeout=TIMEOUT, timeout=TIMEOUT, no_delay=True,
                               default_noreply=False)
        self._refusal = pymemcache.MemcacheServerError

    def refused(self, error: Exception) -> bool:
        """Whether the server is well, and would not store a value: it is too large for its settings, say."""
        return type(error) is self._refusal     # a subclass of it tells of lost connections

    def connect(self, address: tuple[str, int] | str) -> Any:
        return self._client(address)


class Pylibmc:
    """Connections made by pylibmc, made to behave like those of pymemcache."""

    def __init__(self):
        import pylibmc

        class Client(pylibmc.Client):
            get_many, set_many, close = (
                pylibmc.Client.get_multi, pylibmc.Client.set_multi, pylibmc.Client.disconnect_all)

            def deserialize(self, value: bytes, flags: int) -> bytes:
                """Return the bytes as they are: whatever the flags say, nothing from there is unpickled."""
                return value

            def get(self, key: str) -> bytes | None:
                return self.get_multi([key]).get(key)       # its own get() cannot tell an empty value from none

            def incr(self, key: str, by: int) -> int | None:
                try:
                    return super().incr(key, by)
                except pylibmc.NotFound:
                    return None

        milliseconds = round(TIMEOUT * 1000)
        self._client = partial(Client, behaviors={
            'tcp_nodelay': True, 'connect_timeout': milliseconds, '_poll_timeout': milliseconds,
            'send_timeout': milliseconds * 1000, 'receive_timeout': milliseconds * 1000})
        self._refusal = pylibmc.TooBig

    def refused(self, error: Exception) -> bool:
        return isinstance(error, self._refusal)

    def connect(self, address: tuple[str, int] | str) -> Any:
        if isinstance(address, tuple):
            host, port = address
            address = f'[{host}]:{port}' if ':' in host else f'{host}:{port}'
        return self._client([address])


# The one to be preferred first: pylibmc reads faster, but a broken answer can break its C library, and with that the
# process (libmemcached 1.0.16, 'VALUE' and a key of 300 characters: "double free or corruption").
MODULES = {'pymemcache': Pymemcache, 'pylibmc': Pylibmc}
# RelStorage's names for cache-module-name.
FORMER_MODULES = {
    'relstorage.pylibmc_wrapper': 'pylibmc', 'relstorage.memcache_wrapper': 'pymemcache', 'memcache': 'pymemcache',
    'auto': None}


def _library(module: str | None) -> Pylibmc | Pymemcache:
    """Return the client library of that name; with None the first that can be imported."""
    name = FORMER_MODULES.get(module, module)
    if name is not None and name not in MODULES:
        raise ConfigurationError(f'cache-module-name is {module!r}: allowed is {" or ".join(MODULES)}.')
    for candidate in MODULES if name is None else [name]:
        with suppress(ImportError):
            return MODULES[candidate]()
    raise ConfigurationError(
        'cache-servers needs a client of memcached: install relstore[memcached], which brings pymemcache, or pylibmc.'
        if name is None else f'cache-module-name is {module!r}: install {name}, or leave cache-module-name out.')


def split_servers(text: str) -> list[str]:
    """Return the servers that the option cache-servers names, between blanks or commas."""
    return text.replace(',', ' ').split()


def _address(server: str) -> tuple[str, int] | str:
    """Return (host, port), or the path of a unix socket."""
    if server.startswith(('unix:', '/')):
        return server.removeprefix('unix:')
    host, colon, port = server.rpartition(':')
    host = host.removeprefix('[').removesuffix(']')
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigurationError(f'cache-servers names {server!r}: a server is host:port or unix:/path.')
    return host, int(port)


# Servers ----------------------------------------------------------------------------------------------------------


class Server:
    """One memcached. Thread-safe; whatever fails raises Unreachable, and then the server is left alone for a while.

    So a server that is dead or hangs costs this process one timeout per pause. The first failure finds several
    threads there, perhaps; when the pause is over one goes and sees, and the others still stay away.
    """

    def __init__(self, name: str, library: Pylibmc | Pymemcache):
        self._name, self._library = name, library
        self._connect = partial(library.connect, _address(name))
        self._idle: deque[Any] = deque()
        self._abandoned: list[deque[Any]] = []
        self._lock = Lock()
        self._pause = 0.0           # seconds; 0 while it works
        self._failed = 0.0          # when, on the monotonic clock, it was last found failing
        self._resume = 0.0          # when somebody may try again

    def get_many(self, keys: list[str]) -> dict[str, bytes]:
        return self._do(lambda connection: connection.get_many(keys))

    def set_many(self, values: dict[str, bytes]) -> None:
        self._do(lambda connection: connection.set_many(values))

    def get(self, key: str) -> bytes | None:
        return self._do(lambda connection: connection.get(key))

    def set(self, key: str, value: bytes) -> None:
        self._do(lambda connection: connection.set(key, value))

    def add(self, key: str, value: bytes) -> bool:
        """Store it unless there is something; return whether it was stored."""
        return self._do(lambda connection: connection.add(key, value))

    def incr(self, key: str, by: int, again: bool = True) -> int | None:
        """Add `by` to the number there; return the sum, or None if there is nothing.

        `again`: may it happen twice, where it cannot be told whether the first time did?
        """
        return self._do(lambda connection: connection.incr(key, by), again)

    def delete(self, key: str) -> None:
        self._do(lambda connection: connection.delete(key))

    def close(self) -> None:
        """Close the connections that are not in use. Using it opens new ones."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def after_fork(self) -> None:
        """Begin anew in a child process. The parent's connections are kept, so that nothing says goodbye on them."""
        self._abandoned.append(self._idle)
        self._idle, self._lock = deque(), Lock()

    def _do(self, act: Callable[[Any], Result], again: bool = True) -> Result:
        started = time.monotonic()
        if self._pause:
            self._stay_away(started)
        try:
            try:
                pooled = self._idle.pop()
            except IndexError:
                pooled = None
            if pooled is not None:
                try:
                    return self._try(act, pooled, started)
                except Exception as error:
                    if self._library.refused(error) or time.monotonic() - started >= TIMEOUT:
                        raise
                    # A connection that died unnoticed, and with it likely the others: a new one shows how things are.
                    self.close()
                    if not again:
                        raise Unreachable(f'memcached {self._name}: the connection was lost') from error
            return self._try(act, self._connect(), started)
        except Unreachable:
            raise
        except Exception as error:
            # Not only the errors that the library documents: parsing garbage raises what it likes.
            if not self._library.refused(error):
                self._note_failure(started, error)
            raise Unreachable(f'memcached {self._name} failed: {error!r}') from error

    def _try(self, act: Callable[[Any], Result], connection: Any, started: float) -> Result:
        try:
            result = act(connection)
        except BaseException:
            connection.close()      # what is left of the answer must not be taken for the next one's
            raise
        if time.monotonic() - started >= TIMEOUT:
            # pylibmc answers a timeout as if nothing were there.
            connection.close()
            self._note_failure(started, TimeoutError('slow'))
        else:
            self._idle.append(connection)
            if self._pause:
                self._note_success(started)
        return result

    def _stay_away(self, now: float) -> None:
        """Raise Unreachable while the server is left alone; otherwise the caller is the one who goes and sees."""
        with self._lock:
            if self._pause:
                if now < self._resume:
                    raise Unreachable(f'memcached {self._name} is left alone for a while')
                self._resume = now + self._pause

    def _note_failure(self, started: float, error: Exception) -> None:
        self.close()
        with self._lock:
            if started < self._failed:
                return          # it began before the failure that is known already
            if not self._pause:
                log.warning('memcached %s does not answer as it should (%r). What is there is taken from the database '
                            'until it does.', self._name, error)
            self._pause = min(max(PAUSE, 2 * self._pause), LONGEST_PAUSE)
            self._failed = time.monotonic()
            self._resume = self._failed + self._pause

    def _note_success(self, started: float) -> None:
        with self._lock:
            if self._pause and started >= self._failed:
                self._pause = 0.0
                log.info('memcached %s answers again.', self._name)


class Memcached:
    """The servers of `cache-servers`. Thread-safe; never raises once it is made: what fails is not there.

    A key always belongs to the same server, so what that one has lost is not looked for on others.  `first` is the
    one for keys that change; processes that share it have to name it first.

    module: 'pylibmc', 'pymemcache', one of RelStorage's names for them, or None for the first that is installed.
    ConfigurationError says what to install, or which server cannot be one.
    """

    def __init__(self, servers: Sequence[str], module: str | None = None):
        library = _library(module)
        if not servers:
            raise ConfigurationError('cache-servers names no server: a server is host:port or unix:/path.')
        self._servers = [Server(name, library) for name in servers]
        self.first = self._servers[0]

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return what there is: one round trip to each server."""
        found: dict[str, bytes] = {}
        for server, some in self._by_server(keys).items():
            with suppress(Unreachable):
                found |= server.get_many(some)
        return found

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Store as much as goes. Values that are too large are left out."""
        fitting = [key for key, value in values.items() if len(value) <= LARGEST]
        for server, some in self._by_server(fitting).items():
            with suppress(Unreachable):
                server.set_many({key: values[key] for key in some})

    def _by_server(self, keys: Iterable[str]) -> dict[Server, list[str]]:
        keys = list(keys)
        if not keys:
            return {}
        if len(self._servers) == 1:
            return {self.first: keys}
        shares = defaultdict(list)
        for key in keys:
            shares[self._servers[zlib.crc32(key.encode()) % len(self._servers)]].append(key)
        return shares

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def after_fork(self) -> None:
        for server in self._servers:
            server.after_fork()


# Keys and values --------------------------------------------------------------------------------------------------

# Part of every key: another format has other keys.
FORMAT = '1'
# checksum, tid, length of the references that follow, or -1 for None; then the state.
HEADER = struct.Struct('>8sQi')
# checksum, newest base, the one before it or 0.
BASES = struct.Struct('>8sQQ')


def _namespace(prefix: str, *names: str) -> str:
    """Return what the keys begin with."""
    return f'{prefix}{blake2b(repr((FORMAT, *names)).encode(), digest_size=9).hexdigest()}:'


def _checksum(key: str, content: bytes) -> bytes:
    """Tell this value of this key from garbage, a truncated one, and another key's.

    blake2b, not crc32: one in 2**32 mixed-up values is too many, and 64 bits cost 2 us for a state of 1 KB,
    beside 20 us and more for the round trip.
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


def _decode_bases(key: str, value: object) -> tuple[int, ...] | None:
    if not isinstance(value, bytes) or len(value) != BASES.size or value[:8] != _checksum(key, value[8:]):
        return None
    _, newest, older = BASES.unpack(value)
    return (newest, older) if older else (newest,)


# Tier -------------------------------------------------------------------------------------------------------------

# Seconds between two looks at the base that the others use.
LOOK_EVERY = 3.0


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
    """Revisions shared by all processes: what one has loaded another need not ask the database for.

    The keys refer to a base tid F, which is in memcached too.  When more than `limit` objects have changed since, or
    the log of a process does not reach back, that process moves F to its head.  What was stored for the F before is
    not lost: views look under both, and store what they find under the newer one.

    Counted, without a lock: hits and misses, in objects.
    """

    def __init__(self, client: Memcached, prefix: str, cache: Cache, limit: int = 10_000):
        self._client, self._prefix, self._cache, self._limit = client, prefix, cache, limit
        self._epoch: _Epoch | None = None
        self._next_look = 0.0
        self.hits = self.misses = 0

    def begin(self, database: str, epoch: str, generation: int, last: int) -> int | None:
        """Start under the keys of this epoch, for the views of that generation of the cache.

        last: the newest tid in the database.
        Return the tid that the cache's log should reach back to, so that it can use all that the others share; None
        if they share nothing. Asks memcached unless the epoch is the same as before.
        """
        namespace = _namespace(self._prefix, database, epoch)
        known = self._epoch
        bases = known.bases if known is not None and known.namespace == namespace else ()
        with suppress(Unreachable):
            bases = bases or self._shared_bases(namespace) or ()
            if bases and bases[0] > last:
                # A backup was restored, with the epoch in it. What is stored for that base has states of lost commits.
                bases = (last,)
                self._client.first.set(f'{namespace}base', _encode_bases(f'{namespace}base', bases))
        self._epoch = _Epoch(generation, namespace, bases)
        self._next_look = 0.0
        return bases[-1] if bases else None

    def get(self, oids: Iterable[int], at: int, generation: int) -> dict[int, tuple[bytes, int, bytes | None]]:
        """Return {oid: (state, tid, references or None if unknown)} as a view at `at` sees them, as far as they are
        there."""
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

    def _named(self, epoch: _Epoch, rows: Iterable[tuple], at: int) -> Iterable[tuple]:
        for oid, state, tid, refs in rows:
            for change, base in self._facts(epoch, oid, at):
                if tid == change or not change and tid <= base:
                    yield epoch.key(oid, change, base), state, tid, refs
                break

    def committed(self, tid: int, rows: Iterable[tuple[int, bytes | None, bytes | None]], generation: int) -> None:
        """Share what this process committed: (oid, state, references). The others know its tid when they poll."""
        epoch = self._of(generation)
        if epoch is not None:
            self._set((epoch.key(oid, tid, 0), state, tid, refs) for oid, state, refs in rows)

    def look(self) -> None:
        """Take the base that the others use, or move it. Called at every poll; asks memcached every few seconds."""
        now = time.monotonic()
        if now >= self._next_look and self._epoch is not None:
            self._next_look = now + LOOK_EVERY
            with suppress(Unreachable):
                self._look(self._epoch)

    def _look(self, epoch: _Epoch) -> None:
        shared = self._shared_bases(epoch.namespace)
        # If there is none any more, offer our own: what is stored for it may still be there.
        bases = shared or epoch.bases
        head = self._cache.head
        if self._changed_since(epoch, head) is None:
            return              # not the cache's generation any more, or it jumps in this moment
        if bases and bases[0] > head and shared:
            return              # we have not polled what the others have: later
        changed = self._changed_since(epoch, bases[0]) if bases and bases[0] <= head else None
        if changed is None or changed > self._limit:
            bases = (head,) if changed is None else (head, bases[0])
        if bases != shared:
            key = f'{epoch.namespace}base'
            value = _encode_bases(key, bases)
            if shared:
                self._client.first.set(key, value)
            elif not self._client.first.add(key, value):
                return          # another was quicker: its base is seen at the next look
        epoch.bases = bases

    def _shared_bases(self, namespace: str) -> tuple[int, ...] | None:
        """Return the bases that the others use, newest first."""
        key = f'{namespace}base'
        return _decode_bases(key, self._client.first.get(key))

    def _changed_since(self, epoch: _Epoch, tid: int) -> int | None:
        """Return how many objects changed since then; None if the log cannot tell."""
        changed = self._cache.invalidations(tid, None, epoch.generation)
        return None if changed is None else len(changed)

    def _of(self, generation: int) -> _Epoch | None:
        epoch = self._epoch
        return epoch if epoch is not None and epoch.generation == generation else None

    def _facts(self, epoch: _Epoch, oid: int, at: int) -> Iterable[tuple[int, int]]:
        """Yield (newest change up to `at`, or 0 for none since the base; that base) for each base of use to a view."""
        for base in epoch.bases:
            change = self._cache.newest_change(oid, at, base, epoch.generation)
            if change is not None:
                yield change, base

    def _set(self, rows: Iterable[tuple[str, bytes | None, int, bytes | None]]) -> None:
        values, room = {}, LARGEST_BATCH_BYTES
        for key, state, tid, refs in rows:
            if state is None or len(state) > LARGEST:
                continue
            value = _encode(key, state, tid, refs)
            room -= len(value)
            if room < 0 or len(values) == LARGEST_BATCH:
                break
            values[key] = value
        if values:
            self._client.set_many(values)


# Commit counter ---------------------------------------------------------------------------------------------------

# The key holds begun * BEGUN + done.  pylibmc adds less than 2**31 at a time.
BEGUN, DONE = 1 << 30, 1
# Seconds after which an unbalanced value that does not change is given up.
STUCK = 60.0


class CommitCounter:
    """Whether anything was committed, by any process, since somebody asked: so that nobody need ask the database.

    One key of one server holds how many commits have begun and how many are done.  Both only grow, so a value that
    is what it was means that nothing began and nothing was done meanwhile; and where both are equal nothing was
    under way.  Who remembers a value must have read it before the poll that it stands for.

    Both start at one random number, so that a key which was evicted, deleted, or lost with its server never returns
    to what somebody remembers.  That is why it may be deleted at any time, by anybody, for any reason: everybody
    asks the database then.  It is deleted

    * by a committer that could not say "begun" or "done", as soon as it can reach the server again;
    * by whoever sees more commits done than begun: the key was lost, and began anew, while they were under way;
    * by whoever sees the very same unbalanced value for long: somebody died between begun and done, or begun was
      counted twice.  Those who are only slow do no harm: what they add later changes the value once more.

    What a lost key costs: a commit that was under way then is not announced as begun, so it is seen when it is done,
    as every acknowledged one.
    """

    def __init__(self, client: Memcached, prefix: str, database: str):
        self._server = client.first
        # Not of the epoch: the others have to be told by whoever has seen a new one, too.
        self._key = f'{_namespace(prefix, database)}commits'
        # Commits that the others could not be told of.
        self._debts: set[object] = set()
        # (an unbalanced value, since when it is seen)
        self._unbalanced = (0, 0.0)

    def begun(self) -> bool:
        """Say that a commit is about to happen; return the token that done() wants."""
        try:
            self._pay()
            # Counted twice, it is unbalanced for a while: everybody asks the database. Not at all would be worse.
            if self._server.incr(self._key, BEGUN) is None and not self._create(BEGUN):
                return self._server.incr(self._key, BEGUN) is not None
            return True
        except Unreachable:
            return False

    def done(self, token: bool) -> None:
        """Say that it has happened, or failed; with the token of begun(). The commit must be visible by now."""
        try:
            # Never counted twice: it would balance the commit of somebody else, who is still under way.
            total = self._server.incr(self._key, DONE, again=False) if token else None
            told = token and (total is None or total % BEGUN <= total // BEGUN)
        except Unreachable:
            told = False
        if not told:
            self._debts.add(object())
        with suppress(Unreachable):
            self._pay()

    def value(self) -> int | None:
        """Return what changes with every commit; None if that is unknown, or a commit is under way."""
        try:
            self._pay()
            found = self._server.get(self._key)
            if found is None:
                return self._create(0)
            total = _number(found)
            if total // BEGUN == total % BEGUN:
                return total
            if self._never_balances(total):
                self._server.delete(self._key)
            return None
        except Unreachable:
            return None

    def _create(self, more: int) -> int | None:
        """Create the key and return its value; None if it is there."""
        start = 1 + secrets.randbits(29)
        value = start * BEGUN + start + more
        return value if self._server.add(self._key, b'%d' % value) else None

    def _never_balances(self, total: int) -> bool:
        begun, done = divmod(total, BEGUN)
        if done > begun:
            return True
        value, since = self._unbalanced
        now = time.monotonic()
        if total != value:
            self._unbalanced = (total, now)
            return False
        return now - since > STUCK

    def _pay(self) -> None:
        """Delete the key if the others could not be told of a commit: whatever they remember is of no use then."""
        debts = self._debts.copy()      # commits that fail from here on may be later than the deletion
        if debts:
            self._server.delete(self._key)
            self._debts.difference_update(debts)


def _number(value: object) -> int:
    """Return the number; what is none is more done than begun, and so deleted."""
    digits = value.strip() if isinstance(value, bytes) else b''
    return int(digits) if len(digits) <= 20 and digits.isdigit() else DONE
