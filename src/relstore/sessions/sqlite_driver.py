"""sqlite3, of Python's standard library. Its errors are told apart by their text: Python 3.10 gives no code."""
from collections.abc import Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any

from relstore.errors import ConfigurationError, DatabaseError, Disconnected, LockTimeout
from relstore.sessions.driver import Driver
from relstore.sessions.pipeline import Row


def _classify(error: Exception) -> type[Exception]:
    message = str(error)
    if 'locked' in message or 'busy' in message:
        return LockTimeout
    if 'closed database' in message:
        return Disconnected
    if any(hint in message for hint in ('not a database', 'malformed', 'unable to open', 'readonly', 'read-only')):
        return ConfigurationError
    return DatabaseError


def _connect(sqlite3: ModuleType, path: str, timeout: float) -> Any:
    # A session is used by one thread at a time, but not always by the same one.
    return sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False, uri=True)


def _script(connection: Any, sql: str, parameters: Sequence[Any]) -> list[list[Row]]:
    raise NotImplementedError('SQLite is in this process: there is no message to save')


DRIVERS = (
    Driver('sqlite3', 'sqlite3', 'a Python with the module sqlite3', '?',
           connect=_connect, classify=_classify, message=str,
           in_transaction=attrgetter('in_transaction'),
           script=_script),
)
