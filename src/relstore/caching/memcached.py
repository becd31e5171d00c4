"""Memcached: the client for the servers that the processes of a site share.

Everything here may fail at any time. A failure counts as a miss: the caller goes to the database.
"""
import logging
import socket
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeVar

from relstore.errors import ConfigurationError

log = logging.getLogger('relstore')

# Limit for connecting, and for an answer. Anything slower is a failure, even if it arrives.
TIMEOUT_SECONDS = 0.25
# Sending and receiving may take longer by this rate, so that a large value does not fail for its size.
SLOWEST_BYTES_PER_SECOND = 5_000_000
# Limit for the average answer: the database itself answers within a few milliseconds.
SLOW_SECONDS = 0.02
# The weight of the newest answer in that average, and the longest time it counts as: one hiccup is not a failure.
WEIGHT, HICCUP_SECONDS = 0.1, 0.1
# How long a server is left alone after a failure, and after many.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
# Keys in one request.
MOST_KEYS = 100
# Idle connections kept for later requests.
MOST_IDLE = 16
# The largest value: memcached accepts 1 MiB including the key and its own header, unless told otherwise (-I).
LARGEST_VALUE_BYTES = 1_000_000
# Part of every key: another format has other keys.
FORMAT = '1'

Result = TypeVar('Result')


class Unreachable(Exception):
    """The server did not do it, or did not confirm it: down, slow, sending garbage, or left alone for a while."""


# Client libraries -------------------------------------------------------------------------------------------------


class Socket(socket.socket):
    """A socket whose timeout covers the whole exchange, from sending the request, not each part of the answer."""

    def sendall(self, data: bytes) -> None:     # type: ignore[override]  # as the client libraries call it
        patience = TIMEOUT_SECONDS + len(data) / SLOWEST_BYTES_PER_SECOND
        self._deadline = time.monotonic() + patience
        self.settimeout(patience)
        super().sendall(data)

    def recv(self, size: int) -> bytes:         # type: ignore[override]  # likewise
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError('the answer drips')
        self.settimeout(left)
        data = super().recv(size)
        self._deadline += len(data) / SLOWEST_BYTES_PER_SECOND
        return data


class Pymemcache:
    """Connections made by pymemcache."""
    # Does the process survive an answer that is not memcached's?
    survives_garbage = True

    def __init__(self) -> None:
        import pymemcache
        sockets = SimpleNamespace(**vars(socket) | {'socket': Socket})
        self._client = partial(pymemcache.Client, connect_timeout=TIMEOUT_SECONDS, timeout=TIMEOUT_SECONDS,
                               no_delay=True, default_noreply=False, socket_module=sockets)
        self._refusal = pymemcache.MemcacheServerError

    def refused(self, error: Exception) -> bool:
        """Whether the server works, but refused to store a value: one too large for its settings, say."""
        return type(error) is self._refusal     # its subclass means a lost connection

    def connect(self, address: tuple[str, int] | str) -> Any:
        return self._client(address)


class Pylibmc:
    """Connections made by pylibmc, adapted to behave like pymemcache's."""
    # libmemcached 1.0.16: "double free or corruption" from a VALUE whose key has 300 characters, and from a hundred
    # VALUEs for a few keys. 1.1 also copies the key without checking its length, and no setting prevents it:
    # verify_keys is for keys that are sent. Nearly any random answer crashes the binary protocol.
    survives_garbage = False

    def __init__(self) -> None:
        import pylibmc

        class Client(pylibmc.Client):
            get_many, set_many, close = (
                pylibmc.Client.get_multi, pylibmc.Client.set_multi, pylibmc.Client.disconnect_all)

            def deserialize(self, value: bytes, flags: int) -> bytes:
                """Return the bytes unchanged: whatever the flags say, nothing is unpickled."""
                return value

            def get(self, key: str) -> bytes | None:
                return self.get_multi([key]).get(key)       # its own get() cannot tell an empty value from none

            def incr(self, key: str, by: int) -> int | None:
                try:
                    return super().incr(key, by)
                except pylibmc.NotFound:
                    return None

        milliseconds = round(TIMEOUT_SECONDS * 1000)
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


# The preferred one first: pylibmc reads faster, but does not survive everything.
MODULES: dict[str, Callable[[], Pylibmc | Pymemcache]] = {'pymemcache': Pymemcache, 'pylibmc': Pylibmc}
# RelStorage's names for cache-module-name. Its pylibmc is not taken over: nobody chose that for the risk it has here.
FORMER_MODULES: dict[str, str | None] = {
    'relstorage.pylibmc_wrapper': None, 'relstorage.memcache_wrapper': 'pymemcache', 'memcache': 'pymemcache',
    'auto': None}


def library_of(module: str | None) -> Pylibmc | Pymemcache:
    """Return the client library of that name; for None the first of MODULES that can be imported."""
    name = module if module is None else FORMER_MODULES.get(module, module)
    if name is not None and name not in MODULES:
        raise ConfigurationError(f'cache-module-name is {module!r}: allowed is {" or ".join(MODULES)}.')
    for candidate in MODULES if name is None else [name]:
        with suppress(ImportError):
            return MODULES[candidate]()
    raise ConfigurationError(
        'cache-servers needs a client of memcached: install relstore[memcached], which brings pymemcache, or pylibmc.'
        if name is None else f'cache-module-name is {module!r}: install {name}, or leave cache-module-name out.')


def split_servers(text: str) -> list[str]:
    """Return the servers that the option cache-servers names, separated by blanks or commas."""
    return text.replace(',', ' ').split()


def address_of(server: str) -> tuple[str, int] | str:
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
    """One memcached. Thread-safe; any failure raises Unreachable, and then the server is left alone for a while.

    So a server that is dead or hangs costs this process one timeout per pause. The first failure may catch several
    threads; when the pause is over, one thread tries the server while the others still leave it alone.

    A server that answers, but slowly on average, is left alone too: a page asks it a hundred times. But see delete().
    """

    def __init__(self, name: str, library: Pylibmc | Pymemcache):
        self._name, self._library = name, library
        self._connect = partial(library.connect, address_of(name))
        self.idle: deque[Any] = deque()
        self._abandoned: list[deque[Any]] = []
        self._lock = Lock()
        self._closed = False
        self._mean = 0.0            # seconds, the average of recent answers; approximate, for threads take no lock
        self.pause = 0.0           # seconds; 0 while it works
        self._failed = 0.0          # when it was last found failing, on the monotonic clock
        self._resume = 0.0          # when a thread may try again
        self._is_slow = False       # is it left alone only because it is slow?

    def get_many(self, keys: list[str]) -> dict[str, bytes]:
        return self.do(lambda connection: connection.get_many(keys),
                        volume=lambda found: sum(map(len, found.values())))

    def set_many(self, values: dict[str, bytes]) -> None:
        self.do(lambda connection: connection.set_many(values),
                 volume=lambda _: sum(map(len, values.values())))

    def get(self, key: str) -> bytes | None:
        return self.do(lambda connection: connection.get(key))

    def set(self, key: str, value: bytes) -> None:
        self.do(lambda connection: connection.set(key, value))

    def add(self, key: str, value: bytes) -> bool:
        """Store the value unless the key exists; return whether it was stored."""
        return self.do(lambda connection: connection.add(key, value))

    def incr(self, key: str, by: int, again: bool = True) -> int | None:
        """Add `by` to the number there; return the sum, or None if the key does not exist.

        again: may it be sent twice when it is unknown whether the first attempt succeeded?
        """
        return self.do(lambda connection: connection.incr(key, by), again)

    def delete(self, key: str, though_failing: bool = False) -> None:
        """Delete the key, even on a server that is left alone for being slow; with though_failing, for any reason.

        Takes two timeouts at most: one to connect, one for the answer.
        """
        self.do(lambda connection: connection.delete(key), cannot_wait=self._is_slow or though_failing)

    def close(self) -> None:
        """Close the connections; those in use when they are returned."""
        self._closed = True
        self._drop_idle()

    def after_fork(self) -> None:
        """Start afresh in a child process. The parent's connections are kept, so that nothing is sent on them."""
        self._abandoned.append(self.idle)
        self.idle, self._lock = deque(), Lock()

    def do(self, act: Callable[[Any], Result], again: bool = True,
            volume: Callable[[Result], int] = lambda result: 0, cannot_wait: bool = False) -> Result:
        """Return act(connection). volume: from the result, the bytes transferred. cannot_wait: ignore a pause."""
        started = time.monotonic()
        if self.pause and not cannot_wait:
            self._stay_away(started)
        try:
            try:
                pooled = self.idle.pop()
            except IndexError:
                pooled = None
            if pooled is not None:
                try:
                    return self._try(act, pooled, started, volume)
                except Exception as error:
                    if self._library.refused(error) or time.monotonic() - started >= TIMEOUT_SECONDS:
                        raise
                    # This connection died unnoticed, and probably the others too: try a new one.
                    self._drop_idle()
                    if not again:
                        raise Unreachable(f'memcached {self._name}: the connection was lost') from error
            return self._try(act, self._connect(), started, volume)
        except Unreachable:
            raise
        except Exception as error:
            # Not only the errors that the library documents: parsing garbage may raise anything.
            if not self._library.refused(error):
                self._note_failure(started, error)
            raise Unreachable(f'memcached {self._name} failed: {error!r}') from error

    def _try(self, act: Callable[[Any], Result], connection: Any, started: float,
             volume: Callable[[Result], int]) -> Result:
        computed = time.process_time()
        try:
            result = act(connection)
            seconds = time.monotonic() - started - volume(result) / SLOWEST_BYTES_PER_SECOND
        except BaseException:
            connection.close()      # the rest of this answer must not be taken for the next one
            raise
        if seconds >= TIMEOUT_SECONDS:
            # pylibmc reports a timeout as a miss.
            connection.close()
            self._note_failure(started, TimeoutError('slow'))
        else:
            self._put_back(connection)
            # Do not charge the server for this process's own computing: other threads may have held the interpreter,
            # and with three of them a server that answers in 30 us seems to take 10 to 20 ms.
            self._note_answer(started, seconds - (time.process_time() - computed))
        return result

    def _put_back(self, connection: Any) -> None:
        with self._lock:
            if not self._closed and len(self.idle) < MOST_IDLE:
                self.idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        while self.idle:
            with suppress(IndexError):
                self.idle.pop().close()

    def _note_answer(self, started: float, seconds: float) -> None:
        if self.pause:
            # The first answer after a failure alone decides whether the server works.
            mean = seconds
        else:
            self._mean = mean = self._mean + WEIGHT * (min(max(seconds, 0.0), HICCUP_SECONDS) - self._mean)
        if mean > SLOW_SECONDS:
            self._note_failure(started, TimeoutError(f'slow: {mean * 1000:.0f} ms on average'), is_slow=True)
        elif self.pause:
            self._note_success(started)

    def _stay_away(self, now: float) -> None:
        """Raise Unreachable while the server is left alone; otherwise the caller is the one to try it."""
        with self._lock:
            if self.pause:
                if now < self._resume:
                    raise Unreachable(f'memcached {self._name} is left alone for a while')
                self._resume = now + self.pause

    def _note_failure(self, started: float, error: Exception, is_slow: bool = False) -> None:
        if not is_slow:
            self._drop_idle()
        with self._lock:
            if started < self._failed:
                return          # it began before the failure that is already known
            if not self.pause:
                log.warning('memcached %s does not answer as it should (%r). What is there is taken from the database '
                            'until it does.', self._name, error)
            self._mean, self._is_slow = 0.0, is_slow
            self.pause = min(max(PAUSE_SECONDS, 2 * self.pause), LONGEST_PAUSE_SECONDS)
            self._failed = time.monotonic()
            self._resume = self._failed + self.pause

    def _note_success(self, started: float) -> None:
        with self._lock:
            if self.pause and started >= self._failed:
                self.pause = 0.0
                log.info('memcached %s answers again.', self._name)


class Memcached:
    """The servers of `cache-servers`. Thread-safe; once constructed it never raises: a failure is a miss.

    A key always belongs to the same server; when that loses it, no other is asked.  `first` is the server for keys
    that change; all processes that share it have to list it first.

    module: 'pylibmc', 'pymemcache', one of RelStorage's names for them, or None to prefer pymemcache if installed.
    ConfigurationError says what to install, or which server name is invalid.
    """

    def __init__(self, servers: Sequence[str], module: str | None = None):
        library = library_of(module)
        if not servers:
            raise ConfigurationError('cache-servers names no server: a server is host:port or unix:/path.')
        if not library.survives_garbage:
            log.warning("cache-servers is reached through pylibmc: an answer that is not memcached's, of a broken "
                        'server or of another service at that address, may crash its C library, and this process with '
                        'it. pymemcache survives that: install relstore[memcached] and leave cache-module-name out.')
        self._servers = [Server(name, library) for name in servers]
        self.first = self._servers[0]

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the values found, in one round trip to each server per hundred keys."""
        found: dict[str, bytes] = {}
        for server, some in self._by_server(keys).items():
            with suppress(Unreachable):
                for start in range(0, len(some), MOST_KEYS):
                    found |= server.get_many(some[start:start + MOST_KEYS])
        return found

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Store as many as possible. Values that are too large are left out."""
        fitting = [key for key, value in values.items() if len(value) <= LARGEST_VALUE_BYTES]
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
        """Close all connections. Later requests still work, each over a new connection."""
        for server in self._servers:
            server.close()

    def after_fork(self) -> None:
        for server in self._servers:
            server.after_fork()


def keys_of(prefix: str, *names: str) -> str:
    """Return the prefix of the keys."""
    return f'{prefix}{blake2b(repr((FORMAT, *names)).encode(), digest_size=9).hexdigest()}:'
