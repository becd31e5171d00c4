"""Window: the time in which a commit can be seen and is not yet on disk. Held open, and ended by a crash."""
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from unittest.mock import patch

import psycopg2

from relstore import RelStore
from relstore.tests.support.servers import PostgreSQLServer, kill_and_wait, open_process
from relstore.tests.support.watch import Watch

SECONDS_TO_RECOVER = 60
GATE = 4711         # the key of an advisory lock
DURABLE = ", pg_catalog.pg_logical_emit_message(true, 'relstore', '')::text"


class Crashes:
    """The ways in which a server of our own loses what is not in its log on disk.

    Each way returns when the server accepts connections again. dsn: of a database that relstore has made its tables in.
    """

    def __init__(self, server: PostgreSQLServer, dsn: str):
        self._server, self._dsn = server, dsn
        self._writer: int | None = None     # open_process() of the stopped one

    def hold_back_log(self) -> None:
        """Until the next crash nothing is written to the log on disk but by a commit that waits for it."""
        with closing(Watch(self._dsn)) as watch:
            self._writer = open_process(watch.one("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"))
        signal.pidfd_send_signal(self._writer, signal.SIGSTOP)

    def close(self) -> None:
        """Let the log be written again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(writer, signal.SIGCONT)
            os.close(writer)

    def kill_server(self, moment: Callable[[], None] = lambda: None) -> None:
        """SIGKILL to all its processes at once, when moment() returns."""
        moment()
        self._server.kill()
        self._server.start()
        self.close()

    def kill_backend(self, moment: Callable[[], None] = lambda: None, pid: int = 0,
                     unnoticed: Callable[[], None] | None = None) -> None:
        """SIGKILL to a backend, likewise; then the server ends all others.

        Before it notices, it serves the others as ever: whoever commits in this moment has the log written, and what
        was seen before is not lost. unnoticed: called in the moment, which lasts as long; nobody can connect in it.
        pid: of the backend; else it is one that works, if any does.
        """
        with closing(Watch(self._dsn)) as watch:
            epoch = watch.one('SELECT value FROM relstore_epoch')
            moment()
            pids = [pid for pid, in watch.rows(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND state = 'active' "
                'ORDER BY pid <> %s, pid = pg_backend_pid()', pid)]
            victim = next(filter(None, map(open_process, pids)))
            if unnoticed is None:
                kill_and_wait(victim)
            else:
                self._kill_unnoticed(victim, unnoticed)
        writer, self._writer = self._writer, None
        if writer is not None:
            kill_and_wait(writer)       # it cannot obey the order to end
        self._until_another_epoch_than(epoch)

    def _kill_unnoticed(self, victim: int, work: Callable[[], None]) -> None:
        self._server.process.send_signal(signal.SIGSTOP)
        try:
            kill_and_wait(victim)
            work()
        finally:
            self._server.process.send_signal(signal.SIGCONT)

    def _until_another_epoch_than(self, epoch: str) -> None:
        deadline = time.monotonic() + SECONDS_TO_RECOVER
        while True:
            # For a moment those who do not know yet are served as ever.
            with suppress(psycopg2.Error), closing(Watch(self._dsn)) as watch:
                if watch.rows('SELECT value FROM relstore_epoch') != [(epoch,)]:
                    return
            if time.monotonic() > deadline:
                raise AssertionError(f'no recovery after {SECONDS_TO_RECOVER} s:\n{self._server.log_tail()}')


@contextmanager
def between_its_commits(storage: RelStore) -> Iterator[None]:
    """Have finish wait for the advisory lock GATE when its commit can be seen, and before it sees to the disk."""
    sql = storage.database.adapter.sql
    text = replaced(sql.finish, 'COMMIT;', f'COMMIT;\nSELECT pg_advisory_xact_lock({GATE});')
    with patch.object(sql, 'finish', text):
        yield


@contextmanager
def without_the_second(storage: RelStore) -> Iterator[None]:
    """Have finish acknowledge without seeing to the disk: what would be if relstore had that fault."""
    sql = storage.database.adapter.sql
    with patch.object(sql, 'finish', replaced(sql.finish, DURABLE, '')):
        yield


def replaced(sql: str, old: str, new: str) -> str:
    assert sql.count(old) == 1, sql
    return sql.replace(old, new)
