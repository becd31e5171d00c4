"""Real servers for the tests, started in a temporary directory and stopped by their own process id.

A test of a class with `layer = PostgreSQLLayer` calls `self.layer.require(self)` in its setUp, then
`self.layer.server.create_database(name)`. A test that kills or configures its server starts its own
`PostgreSQLServer` instead, after `require_postgresql(self)`.

RELSTORE_TEST_POSTGRESQL, a DSN or URL, names a staging server to run the suite on. Its role must be allowed
to create databases; those are dropped at the end, and nothing else there is touched.
"""

import atexit
import collections
import os
import pwd
import queue
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import unittest
import uuid
from contextlib import closing
from pathlib import Path

import psycopg2
from psycopg2.extensions import make_dsn, parse_dsn, quote_ident

SECONDS_TO_START = 60
SECONDS_TO_STOP = 60

DEFAULTS = {'max_connections': 300, 'listen_addresses': '127.0.0.1'}
NOT_DURABLE = {'fsync': 'off', 'full_page_writes': 'off', 'synchronous_commit': 'off'}

# One CREATE DATABASE at a time: PostgreSQL refuses the second to copy the same template, after five seconds.
CREATE_DATABASE_LOCK = 0x72656C73746F7265


def postgresql_programs() -> Path | None:
    """Return the directory of the newest initdb and postgres here, or None."""
    packaged = Path('/usr/lib/postgresql').glob('*/bin/initdb')
    newest = max(packaged, key=lambda path: float(path.parts[-3]), default=None) or shutil.which('initdb')
    return newest and Path(newest).parent


def require_postgresql(test: unittest.TestCase) -> None:
    """Skip the test if it cannot start a PostgreSQL of its own; fail it where CI=true."""
    if postgresql_programs() is None:
        reason = 'PostgreSQL is not installed (apt-get install postgresql)'
        if os.environ.get('CI') == 'true':
            test.fail(reason)
        if not skipped:
            atexit.register(tell_skipped)
        skipped[reason, unittest.util.strclass(type(test))] += 1
        test.skipTest(reason)


# (reason, test class) -> how many of its tests
skipped: collections.Counter[tuple[str, str]] = collections.Counter()


def tell_skipped() -> None:
    """Print at the end of the run what the test runner only counts."""
    for (reason, name), count in sorted(skipped.items()):
        print(f'Skipped {count} of {name}: {reason}')


class PostgreSQLDatabases:
    """The databases of one PostgreSQL server. Subclasses say where it is: dsn() and tcp_dsn()."""

    prefix = ''  # of the names there

    def create_database(self, name: str) -> str:
        """Create an empty database and return its DSN. A name that is taken is an error."""
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute('SELECT pg_advisory_lock(%s)', (CREATE_DATABASE_LOCK,))
            name_there = quote_ident(self.prefix + name, cursor)
            cursor.execute(f"CREATE DATABASE {name_there} ENCODING 'UTF8' TEMPLATE template0")
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database that create_database() made, whoever is connected to it."""
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f'DROP DATABASE IF EXISTS {quote_ident(self.prefix + name, cursor)} WITH (FORCE)')

    def _connect(self):
        connection = psycopg2.connect(self.dsn())
        connection.autocommit = True
        return connection


class PostgreSQLServer(PostgreSQLDatabases):
    """A PostgreSQL of our own, on a unix socket and a port of the loopback address.

    `settings` are those of postgresql.conf. Without `durable` nothing is flushed to disk: fast, and
    meaningless after kill().
    """

    def __init__(self, settings: dict | None = None, durable: bool = False):
        self.settings = DEFAULTS | ({} if durable else NOT_DURABLE) | (settings or {})
        self.directory: Path | None = None
        self.port: int | None = None
        self.process: subprocess.Popen | None = None
        self.log: collections.deque[str] = collections.deque(maxlen=2000)

    # running it

    def start(self) -> None:
        """Start and return when connections are accepted. After kill() the data is recovered first."""
        if self.directory is None:
            self._create()
        states: queue.SimpleQueue[str] = queue.SimpleQueue()
        options = [f'--{name}={value}' for name, value in self.settings.items()]
        self.process = subprocess.Popen(
            [
                *self._as_user('--pdeathsig=QUIT'),  # the server goes with us, however we go
                postgresql_programs() / 'postgres',
                '-D', self.directory / 'data', '-k', self.directory, '-p', str(self.port), *options,
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors='replace', cwd=self.directory, env=self._environment(),
            start_new_session=True,  # control-C is for the test runner, which then stops the server
        )  # fmt: skip
        threading.Thread(target=self._follow, args=(self.process.stdout, states), daemon=True).start()
        try:
            state = states.get(timeout=SECONDS_TO_START)
        except queue.Empty:
            state = f'not ready after {SECONDS_TO_START} s'
        if state != 'ready':
            self.kill()
            raise RuntimeError(f'PostgreSQL in {self.directory}: {state}\n{self.log_tail()}')

    def stop(self) -> None:
        """Shut down and remove the directory. Does nothing when there is none."""
        if self.directory is None:
            return
        self._shut_down()
        shutil.rmtree(self.directory)
        self.directory = None
        atexit.unregister(self._abandon)

    def restart(self) -> None:
        """Shut down as an operator would (clients are disconnected) and start again on the same data."""
        self._shut_down()
        self.start()

    def kill(self) -> None:
        """SIGKILL to the postmaster and its children; return when they are gone. The data stays."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # no more children
            children = [open_process(pid) for pid in children_of(self.process.pid)]
            self.process.kill()
            self.process.wait()
            for child in filter(None, children):
                kill_and_wait(child)
        self.process = None

    def _shut_down(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)  # "fast": does not wait for clients
        try:
            self.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self.process = None

    def _abandon(self, owner: int) -> None:
        if os.getpid() == owner:  # a forked child inherits the exit handler, and must not use it
            self.kill()
            self.stop()

    def _create(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-postgresql-', dir=directory_open_to_all()))
        atexit.register(self._abandon, os.getpid())
        self.port = free_port()
        if os.geteuid() == 0:
            user = unprivileged_user()
            os.chown(self.directory, user.pw_uid, user.pw_gid)
        done = subprocess.run(
            [
                *self._as_user(), postgresql_programs() / 'initdb', '--pgdata=data', '--auth=trust',
                '--username=postgres', '--locale=C', '--encoding=UTF8', '--no-sync',
            ],
            cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.log.extend(done.stdout.splitlines(keepends=True))
        if done.returncode:
            self.stop()
            raise RuntimeError(f'initdb failed:\n{self.log_tail()}')

    def _follow(self, output, states: queue.SimpleQueue) -> None:
        with output:
            for line in output:
                self.log.append(line)
                if 'database system is ready to accept' in line:
                    states.put('ready')
        states.put('it exited')

    @staticmethod
    def _as_user(*options: str) -> list[str]:
        """The command that gives up root, which PostgreSQL refuses."""
        if os.geteuid() == 0:
            user = unprivileged_user()
            options += (f'--reuid={user.pw_uid}', f'--regid={user.pw_gid}', '--clear-groups')
        return ['setpriv', *options, '--']

    @staticmethod
    def _environment() -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith('PG')}
        return ours | {'LC_ALL': 'C'}

    # talking to it

    def dsn(self, database: str = 'postgres') -> str:
        """Return the libpq DSN of a database, through the unix socket."""
        return make_dsn(host=str(self.directory), port=self.port, user='postgres', dbname=database)

    def tcp_dsn(self, database: str = 'postgres', port: int | None = None) -> str:
        """Return the libpq DSN of a database, through TCP; `port` is that of a proxy."""
        return make_dsn(
            host='127.0.0.1', port=port or self.port, user='postgres', dbname=database,
            sslmode='disable', gssencmode='disable',  # no exchange before the first message
        )  # fmt: skip

    @property
    def address(self) -> tuple[str, int]:
        """Where a proxy connects to."""
        return '127.0.0.1', self.port

    def log_tail(self, lines: int = 50) -> str:
        """Return the last lines of what the server wrote."""
        return ''.join(list(self.log)[-lines:])


class StagingPostgreSQL(PostgreSQLDatabases):
    """A server that somebody else runs: used, never stopped, left as it was found.

    The tests' databases have a prefix there, which the tests neither see nor give.
    """

    def __init__(self, dsn: str):
        self.base = dsn
        self.prefix = f'relstore_test_{uuid.uuid4().hex[:8]}_'
        self.created: set[str] = set()

    def start(self) -> None:
        """Connect once, so that a wrong DSN is told once."""
        self._connect().close()

    def stop(self) -> None:
        """Drop the databases that the tests left."""
        for name in list(self.created):
            self.drop_database(name)

    def create_database(self, name: str) -> str:
        dsn = super().create_database(name)
        self.created.add(name)
        return dsn

    def drop_database(self, name: str) -> None:
        super().drop_database(name)
        self.created.discard(name)

    def dsn(self, database: str | None = None) -> str:
        return make_dsn(self.base, **({'dbname': self.prefix + database} if database else {}))

    def tcp_dsn(self, database: str | None, port: int) -> str:
        """Return the DSN of a database, through the proxy at this port of the loopback address."""
        return make_dsn(self.dsn(database), host='127.0.0.1', port=port)

    @property
    def address(self) -> tuple[str, int] | str:
        parsed = parse_dsn(self.base)
        host, port = parsed.get('host', 'localhost'), int(parsed.get('port', 5432))
        return f'{host}/.s.PGSQL.{port}' if host.startswith('/') else (host, port)


class PostgreSQLLayer:
    """One server for all tests of a run that need no server of their own."""

    server: PostgreSQLServer | StagingPostgreSQL | None = None

    @classmethod
    def setUp(cls) -> None:
        staging = os.environ.get('RELSTORE_TEST_POSTGRESQL')
        if staging or postgresql_programs():
            cls.server = StagingPostgreSQL(staging) if staging else PostgreSQLServer()
            cls.server.start()

    @classmethod
    def tearDown(cls) -> None:
        if cls.server is not None:
            cls.server.stop()
            cls.server = None

    @classmethod
    def require(cls, test: unittest.TestCase) -> None:
        """Skip the test if there is no server; fail it where CI=true."""
        if cls.server is None:
            require_postgresql(test)


# processes, users, directories


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            # pid (any name) state parent ...
            parent = int(stat.read_text(errors='replace').rpartition(')')[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def open_process(pid: int) -> int | None:
    """Return a handle that stays with this process when the kernel gives the pid to another; None if gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def kill_and_wait(handle: int) -> None:
    """SIGKILL to the process of an open_process() handle; return when it is gone. Closes the handle."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        wait_for_exit(handle)
    except ProcessLookupError:
        return  # it was faster
    finally:
        os.close(handle)


def wait_for_exit(handle: int, seconds: float = SECONDS_TO_STOP) -> None:
    """Return when the process of an open_process() handle has ended, or raise TimeoutError."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(seconds * 1000):
        raise TimeoutError(f'a process still runs after {seconds} s')


def unprivileged_user() -> pwd.struct_passwd:
    """Return the user who runs the servers that refuse root."""
    names = {user.pw_name: user for user in pwd.getpwall()}
    return names.get('postgres') or names['nobody']


def directory_open_to_all() -> str:
    """Return where another user can reach a directory of ours, by a path short enough for a unix socket."""
    wanted = Path(tempfile.gettempdir()).resolve()
    reachable = all(path.stat().st_mode & 0o001 for path in (wanted, *wanted.parents))
    return str(wanted) if reachable and len(str(wanted)) < 50 else '/tmp'


def free_port() -> int:
    """Return a port nobody listens on, below those that the kernel gives to clients (from 32768)."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(('127.0.0.1', port)) != 0:
                return port
