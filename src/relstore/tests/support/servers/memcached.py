"""memcached: a server of our own, and a proxy that answers nonsense in its name."""

import os
import shutil
import signal
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relstore.tests.support.proxy import CuttingProxy, Way
from relstore.tests.support.servers.server import Server, SharedServer, cannot_run


def memcached_program() -> str | None:
    """Return the path of memcached here, or None."""
    return shutil.which('memcached', path=os.pathsep.join([os.environ.get('PATH', os.defpath), '/usr/bin']))


def require_memcached(test: unittest.TestCase) -> None:
    """Skip the test if it cannot start a memcached of its own; fail it where CI=true."""
    if memcached_program() is None:
        cannot_run(test, 'memcached is not installed (apt-get install memcached)')


class MemcachedServer(Server):
    """`settings` are memcached's long options. With `unix` it listens on a unix socket alone.

    kill() and start(), or restart(), empty it.
    """

    name = 'memcached'
    user = 'memcache'
    ready = 'server listening'
    shutdown = signal.SIGKILL  # it would take a second to end in order, and has nothing to save

    def __init__(self, settings: dict[str, Any] | None = None, unix: bool = False):
        super().__init__(settings or {})
        self.unix = unix

    @property
    def address(self) -> tuple[str, int] | str:
        return str(self.directory / 'socket') if self.unix else super().address

    @property
    def where(self) -> str:
        """The server as the option cache-servers names it."""
        return f'unix:{self.address}' if self.unix else f'127.0.0.1:{self.port}'

    def _initialize(self) -> list[str | Path]:
        return ['true']  # it has no data

    def _command(self) -> list[str | Path]:
        where = [f'--unix-socket={self.address}'] if self.unix else ['--listen=127.0.0.1', f'--port={self.port}']
        # Verbose, or it does not tell when it listens.
        return [memcached_program(), '-vv', *where, *(f'--{name}={value}' for name, value in self.settings.items())]


class GarblingProxy(CuttingProxy):
    """`garble` makes of each part of an answer what the client is told; None leaves it as it is."""

    garble: Callable[[bytes], bytes] | None = None

    def _burn(self, way: Way, data: bytes) -> tuple[bytes, bool]:
        data, burnt = super()._burn(way, data)
        if way is self._to_client and self.garble is not None:
            data = self.garble(data)
        return data, burnt


def _find() -> MemcachedServer | None:
    return MemcachedServer() if memcached_program() else None


MemcachedLayer = SharedServer('MemcachedLayer', __name__, _find, require_memcached)
