"""Where a database is, for another process."""
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import relstore
from relstore.tests.support.backends import Backend, MySQLBackend, SQLiteBackend

PATIENCE = 60   # seconds, for what takes one


@dataclass(frozen=True)
class Place:
    """Where a database is, for another process to open it."""

    adapter: str            # the name of its class
    arguments: Mapping[str, Any]
    keep_history: bool

    def open(self) -> relstore.RelStore:
        address = getattr(relstore, self.adapter)(**self.arguments)
        return relstore.RelStore(address, keep_history=self.keep_history, commit_lock_timeout=PATIENCE)


def place_of(test: Backend) -> Place:
    """Return where a test has its database."""
    if isinstance(test, SQLiteBackend):
        adapter, arguments = 'SQLite', {'data_dir': str(test.address().data_dir)}
    elif isinstance(test, MySQLBackend):
        adapter, arguments = 'MySQL', test.arguments() | {'driver': test.driver}
    else:
        adapter, arguments = 'PostgreSQL', test.arguments()
    return Place(adapter, arguments, test.keep_history)
