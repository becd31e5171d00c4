"""FileSession: a connection to an SQLite file, with its place in the queue of writers."""
from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from relstore.adapters.file import File
from relstore.adapters.queue import Queue
from relstore.adapters.statements import Statements
from relstore.errors import LockTimeout, StorageError
from relstore.sessions.driver import Driver
from relstore.sessions.session import ROLLBACK, Row, Session

# Between two tries to get the lock for writers: half of it makes all slower, twice as much some.
LONGEST_PAUSE_SECONDS = 0.004


class FileSession(Session):
    """A session whose turn to write ends with its transaction.

    patience: seconds to wait for anything but the lock for writers: a checkpoint, a recovery; sql.be_patient says so,
    too. place: the database's File, if the session is one of the adapter's. `file` is the identity of that file when
    the session was opened.
    """

    def __init__(self, driver: Driver, uri: str, patience: float, sql: Statements, queue: Queue,
                 place: File | None = None):
        self._sql, self._queue, self._place = sql, queue, place
        self.file = place.about_to_open() if place else ''      # if it is replaced at this moment, a poll notices
        super().__init__(driver, uri, patience)

    def begin_write(self, begin: str, timeout: float) -> None:
        """Begin a transaction with the lock for writers. begin: the statement. LockTimeout after `timeout` seconds."""
        if self.try_to_write(begin) is None:
            self.wait_to_write(begin, timeout)

    def try_to_write(self, begin: str, then: Sequence[tuple[str, Sequence[Any]]] = ()) -> list[Row] | None:
        """Begin a transaction and run more statements; return the rows of the last. None: the lock is not free."""
        try:
            if self._queue.take(self, 0):
                return self.series([(self._sql.be_impatient, ()), (begin, ()), (self._sql.be_patient, ()), *then])
        except LockTimeout:
            if self.in_transaction:     # something else was busy
                self.rollback()
            self.run(self._sql.be_patient)
        except StorageError:
            self.retire()               # it may be impatient still
            raise
        return None

    def wait_to_write(self, begin: str, timeout: float) -> float:
        """Begin it when the lock can be had; return the seconds that it took. LockTimeout after `timeout` seconds.

        The lock may be taken although it is our turn, by a writer that is not in the queue: then try again and again.
        SQLite's own waiting is not used, because it sleeps longer and longer, up to 100 ms, while others come and go.
        """
        began = time.monotonic()
        self.run(self._sql.be_impatient)
        try:
            self._queue.take(self, timeout, lambda: self._is_free(begin))
            while True:
                try:
                    self.run(begin)
                    self._queue.seize(self)
                    return time.monotonic() - began
                except LockTimeout:
                    if time.monotonic() > began + timeout:
                        raise
                time.sleep(random.uniform(0, LONGEST_PAUSE_SECONDS))
        finally:
            self.run(self._sql.be_patient)

    def _is_free(self, begin: str) -> bool:
        """Return whether the lock is free."""
        try:
            super().run(begin)
        except LockTimeout:
            return False
        super().rollback()      # the turn has not come yet
        return True

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        count = super().run(sql, parameters)
        if sql == self._sql.commit:
            self._queue.end(self)
        return count

    def rollback(self) -> None:
        super().rollback()
        if not self.broken and self._queue.holder is self:      # if it is broken the lock ends with the connection
            self._queue.end(self)

    def close(self) -> None:
        try:
            if self._place is not None and self._place.is_replaced(self):
                self._abandon()
            else:
                super().close()
        finally:
            self._queue.end(self)

    def _abandon(self) -> None:
        """Never close the connection, not even when the process ends: see file.py."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        with suppress(StorageError):
            if self.in_transaction:
                super().run(ROLLBACK)
        self.broken = True
