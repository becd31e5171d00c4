"""Server: a database server as a process of our own. SharedServer: the layer of the tests that share one."""

import atexit
import collections
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relstore.tests.support.servers.processes import (
    SECONDS_TO_STOP,
    children_of,
    directory_open_to_all,
    free_port,
    kill_and_wait,
    open_process,
    unprivileged_user,
)

SECONDS_TO_START = 60

# (reason, test class) -> how many of its tests
skipped: collections.Counter[tuple[str, str]] = collections.Counter()


def cannot_run(test: unittest.TestCase, reason: str, excused: bool = False) -> None:
    """Skip the test, and tell the reason at the end of the run; fail it where CI=true, unless that is excused."""
    if os.environ.get('CI') == 'true' and not excused:
        test.fail(reason)
    if not skipped:
        # The test runner closes its output before the exit of a process that it runs beside others.
        atexit.register(_tell_skipped, os.dup(1))
    skipped[reason, unittest.util.strclass(type(test))] += 1
    test.skipTest(reason)


def _tell_skipped(output: int) -> None:
    """Print at the end of the run, to this file descriptor, what the test runner only counts."""
    with open(output, 'w') as file:
        for (reason, name), count in sorted(skipped.items()):
            print(f'Skipped {count} of {name}: {reason}', file=file)


class Server:
    """A database server in a temporary directory, on a unix socket and a port of the loopback address.

    Subclasses say how its data are made and how it is run. It goes when we go, however that is.
    """

    name = ''  # in messages, and in that of the directory
    user = ''  # who runs it, if there is such a user, where root runs the tests
    ready = ''  # what it writes when it accepts connections
    shutdown = signal.SIGTERM  # ends it in order, without waiting for clients
    abandoned = 'KILL'  # what it gets when the test run has died

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.directory: Path | None = None
        self.port: int | None = None
        self.process: subprocess.Popen | None = None
        # What the process writes is read by one thread, also when it was started again: a test that restarts the
        # server of its layer leaves none behind.
        self._follower: threading.Thread | None = None
        self._outputs: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._read_to_end = threading.Event()
        self.log: collections.deque[str] = collections.deque(maxlen=2000)

    def start(self) -> None:
        """Start and return when connections are accepted. After kill() the data is recovered first."""
        if self.directory is None:
            self._create()
        states: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [*self._as_user(f'--pdeathsig={self.abandoned}'), *self._command()],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors='replace', cwd=self.directory, env=self._environment(),
            start_new_session=True,  # control-C is for the test runner, which then stops the server
        )  # fmt: skip
        self._read_to_end = threading.Event()
        self._outputs.put((self.process.stdout, states, self._read_to_end))
        if self._follower is None:
            self._follower = threading.Thread(target=self._follow, daemon=True)
            self._follower.start()
        try:
            state = states.get(timeout=SECONDS_TO_START)
        except queue.Empty:
            state = f'not ready after {SECONDS_TO_START} s'
        if state != 'ready':
            self.kill()
            raise RuntimeError(f'{self.name} in {self.directory}: {state}\n{self.log_tail()}')

    def stop(self) -> None:
        """Shut down and remove the directory. Does nothing when there is none."""
        if self.directory is None:
            return
        self.shut_down()
        if self._follower is not None:
            self._outputs.put(None)
            self._follower.join(SECONDS_TO_STOP)
            self._follower = None
        shutil.rmtree(self.directory)
        self.directory = None
        atexit.unregister(self._abandon)

    def restart(self) -> None:
        """Shut down as an operator would (clients are disconnected) and start again on the same data."""
        self.shut_down()
        self.start()

    def kill(self) -> None:
        """SIGKILL to the server and its children; return when they are gone. The data stays."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # no more children
            children = list(filter(None, map(open_process, children_of(self.process.pid))))
            # All at once: none has time for what it would do if another were gone, nor serves the clients of another.
            for number in signal.SIGSTOP, signal.SIGKILL:
                for child in children:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(child, number)
            self.process.kill()
            self.process.wait()
            for child in children:
                kill_and_wait(child)
        self._ended()

    @property
    def address(self) -> tuple[str, int]:
        """Where a proxy connects to."""
        return '127.0.0.1', self.port

    def log_tail(self, lines: int = 50) -> str:
        """Return the last lines of what the server wrote."""
        return ''.join(list(self.log)[-lines:])

    # what a server of one kind says

    def _initialize(self) -> list[str | Path]:
        """Return the command that makes the data in the new directory."""
        raise NotImplementedError

    def _command(self) -> list[str | Path]:
        """Return the command that runs the server in the foreground."""
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return os.environ | {'LC_ALL': 'C'}

    # inside

    def _create(self) -> None:
        prefix = f'relstore-{self.name.lower()}-'
        self.directory = Path(tempfile.mkdtemp(prefix=prefix, dir=directory_open_to_all()))
        atexit.register(self._abandon, os.getpid())
        self.port = free_port()
        if os.geteuid() == 0:
            user = unprivileged_user(self.user)
            os.chown(self.directory, user.pw_uid, user.pw_gid)
        self._make_data()

    def _make_data(self) -> None:
        done = subprocess.run(
            [*self._as_user(), *self._initialize()],
            cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace',
        )  # fmt: skip
        self.log.extend(done.stdout.splitlines(keepends=True))
        if done.returncode:
            self.stop()
            raise RuntimeError(f'The data of {self.name} cannot be made:\n{self.log_tail()}')

    def shut_down(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(self.shutdown)
        try:
            self.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._ended()

    def _ended(self) -> None:
        self.process = None
        self._read_to_end.wait(SECONDS_TO_STOP)

    def _abandon(self, owner: int) -> None:
        if os.getpid() == owner:  # a forked child inherits the exit handler, and must not use it
            self.kill()
            self.stop()

    def _follow(self) -> None:
        for output, states, read_to_end in iter(self._outputs.get, None):
            with output:
                for line in output:
                    self.log.append(line)
                    if self.ready in line:
                        states.put('ready')
            states.put('it exited')
            read_to_end.set()

    def _as_user(self, *options: str) -> list[str]:
        """The command that gives up root, which the servers refuse."""
        if os.geteuid() == 0:
            user = unprivileged_user(self.user)
            options += (f'--reuid={user.pw_uid}', f'--regid={user.pw_gid}', '--clear-groups')
        return ['setpriv', *options, '--']


class SharedServer:
    """A layer of zope.testrunner: one server for all tests of a run that need no server of their own.

    name       under which the module that makes it has it
    find       makes the server, or returns None where it cannot run here
    require    is called with a test where it cannot: it skips or fails the test with the reason
    bases      layers that it stands on
    """

    def __init__(
        self,
        name: str,
        module: str,
        find: Callable[[], Any],
        require: Callable[[unittest.TestCase], None],
        bases: tuple = (),
    ):
        self.__name__, self.__module__, self.__bases__ = name, module, bases
        self._find, self._require = find, require
        self.server = None

    def setUp(self) -> None:
        server = self._find()
        if server is not None:
            server.start()
            self.server = server

    def tearDown(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def require(self, test: unittest.TestCase) -> None:
        """Skip the test if there is no server; fail it where CI=true."""
        if self.server is None:
            self._require(test)
