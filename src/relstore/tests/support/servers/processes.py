"""Processes, users, directories and ports: what every server of the tests needs from the machine."""

import os
import pwd
import random
import select
import signal
import socket
from pathlib import Path

from relstore.tests.support import directories

SECONDS_TO_STOP = 60


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


def unprivileged_user(preferred: str = 'postgres') -> pwd.struct_passwd:
    """Return the user who runs the servers that refuse root."""
    names = {user.pw_name: user for user in pwd.getpwall()}
    return names.get(preferred) or names['nobody']


def directory_open_to_all() -> str:
    """Return where another user can reach a directory of ours, by a path short enough for a unix socket."""
    wanted = Path(directories.disk()).resolve()
    reachable = all(path.stat().st_mode & 0o001 for path in (wanted, *wanted.parents))
    return str(wanted) if reachable and len(str(wanted)) < 50 else '/tmp'


def free_port() -> int:
    """Return a port nobody listens on, below those that the kernel gives to clients (from 32768)."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(('127.0.0.1', port)) != 0:
                return port
