"""Servers for the benchmarks: databases as the tests start them, on a slow disk too, ZEO, and a slow network."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.servers import MariaDBServer, MySQLServer, PostgreSQLServer

SOURCE = Path(__file__).parent / 'slow_fdatasync.c'
SECONDS_TO_START = 30

# For every PostgreSQL here, whoever uses it. All else is PostgreSQL's default: fsync on, synchronous_commit on.
POSTGRESQL = {'shared_buffers': '256MB', 'max_wal_size': '512MB', 'max_locks_per_transaction': 512}
# MySQL and MariaDB likewise: innodb_flush_log_at_trx_commit is 1, and MySQL writes a binary log with sync_binlog=1.
MYSQL = {'innodb_buffer_pool_size': '256M', 'innodb_redo_log_capacity': '512M'}
MARIADB = {'innodb_buffer_pool_size': '256M', 'innodb_log_file_size': '512M'}


class Unavailable(Exception):
    """Something cannot run here; the message says why."""


class SlowDisk:
    """The compiled slow_fdatasync.c, in a directory of its own that everybody may read."""

    def __init__(self):
        compiler = shutil.which('cc') or shutil.which('gcc')
        if compiler is None:
            raise Unavailable('a slow disk is simulated by a small C library, and there is no compiler (cc)')
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-slow-', dir='/tmp'))
        self.directory.chmod(0o755)
        self.library = self.directory / 'slow_fdatasync.so'
        done = subprocess.run(
            [compiler, '-O2', '-shared', '-fPIC', '-o', self.library, SOURCE, '-ldl'], capture_output=True, text=True
        )
        if done.returncode:
            self.remove()
            raise Unavailable(f'slow_fdatasync.c cannot be compiled: {done.stderr.strip()[-300:]}')
        self.library.chmod(0o755)

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    def environment(self, microseconds: int) -> dict[str, str]:
        """Return what makes a program that is started with it wait so long at each fdatasync."""
        return {'LD_PRELOAD': str(self.library), 'SLOW_FDATASYNC': str(microseconds)}


def slow_down(microseconds: int) -> None:
    """Make each fdatasync of this process slower; the library was preloaded into it."""
    ctypes.CDLL(None).slow_fdatasync(ctypes.c_long(microseconds))


class DurablePostgreSQL(PostgreSQLServer):
    """PostgreSQL that flushes every commit to disk, where `preloaded` may make that slower."""

    def __init__(self, preloaded: dict[str, str] | None = None):
        super().__init__(POSTGRESQL, durable=True)
        self.preloaded = preloaded or {}

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self.preloaded

    def copy_database(self, name: str, copy: str) -> str:
        """Copy a database that nobody has open, statistics and all; return the DSN of the copy."""
        with closing(self._connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f'CREATE DATABASE {copy} TEMPLATE {name}')
            cursor.execute('CHECKPOINT')
        return self.dsn(copy)

    def version(self) -> str:
        with closing(self._connect()) as connection:
            return connection.get_parameter_status('server_version')


class DurableMariaDB(MariaDBServer):
    """MariaDB, likewise."""

    def __init__(self, preloaded: dict[str, str] | None = None):
        super().__init__(MARIADB, durable=True)
        self.preloaded = preloaded or {}

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self.preloaded

    def version(self) -> str:
        [[version]] = self.run('SELECT version()')
        return version


class DurableMySQL(MySQLServer):
    """MySQL, likewise."""

    def __init__(self, preloaded: dict[str, str] | None = None):
        super().__init__(MYSQL, durable=True)
        self.preloaded = preloaded or {}

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self.preloaded

    version = DurableMariaDB.version


class ZEOServer:
    """A ZEO server on a unix socket, with a FileStorage in the given directory."""

    def __init__(self, directory: Path, preloaded: dict[str, str] | None = None):
        self.socket = str(directory / 'zeo.sock')
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'ZEO.runzeo', '-a', self.socket, '-f', str(directory / 'Data.fs')],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory,
            env=os.environ | (preloaded or {}),
        )  # fmt: skip
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._accepts():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise Unavailable('the ZEO server did not start')
            time.sleep(0.02)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.socket) == 0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class DelayingProxy(CuttingProxy):
    """A network that takes `delay` seconds from the client to the server, and none back."""

    delay = 0.0

    def _arrived(self, link, way, size: int) -> None:
        super()._arrived(link, way, size)
        if self.delay and way is self._to_server:
            time.sleep(self.delay)
