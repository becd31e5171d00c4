"""Driver: what a Session has to know about a DB-API module. One record each; they are listed in drivers.py."""
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from types import ModuleType
from typing import Any

from relstore.errors import ConfigurationError
from relstore.sessions.pipeline import Row
from relstore.sessions.statement import Statement


def _no_pid(connection: Any) -> int:
    raise NotImplementedError('This driver is told of no process')


def _no_plans(connection: Any, scripts: Iterable[Statement]) -> dict[str, str]:
    raise NotImplementedError('This driver prepares no statements')


def _no_copy(connection: Any, sql: str, chunks: Iterable[bytes]) -> None:
    raise NotImplementedError('This driver knows no COPY')


def _no_part(connection: Any, sql: str, parameters: Sequence[Any], start: int, size: int) -> bytes | None:
    raise NotImplementedError('This driver knows no locators of large objects')


@dataclass(frozen=True)
class Driver:
    name: str                               # as in the option `driver`
    module: str                             # what to import
    package: str                            # what to install, for the message when it is missing
    placeholder: str                        # how its SQL marks a parameter
    connect: Callable[..., Any]             # (module, *arguments) -> connection, in autocommit
    # (error) -> the class of `relstore.errors` that says what to do about it
    classify: Callable[[Exception], type[Exception]]
    message: Callable[[Exception], str]     # the error's text, without the statement
    in_transaction: Callable[[Any], bool]   # (connection), without asking the server
    # (connection, several statements, their parameters) -> the rows of each, or only of the last if it keeps no others
    script: Callable[[Any, str, Sequence[Any]], list[list[Row]]]
    fetch: Callable[[Any], list[Row]] = methodcaller('fetchall')     # (cursor) -> all rows
    # (connection) -> the process id reported at connect: the server's, or one made up by a pooler in between
    backend_pid: Callable[[Any], int] = _no_pid
    # Are parameters sent beside the statement, with bytes unchanged? Otherwise they are part of its text.
    binds: bool = False
    # (connection, scripts): have the server keep their statements -> what to send instead of each, where different
    prepare: Callable[[Any, Iterable[Statement]], dict[str, str]] = _no_plans
    # (connection, COPY .. FROM STDIN, its data)
    copy_in: Callable[[Any, str, Iterable[bytes]], None] = _no_copy
    # (connection, a statement that selects a large object, its parameters, start from 1, size) -> that part, or None
    read_part: Callable[[Any, str, Sequence[Any], int, int], bytes | None] = _no_part
    # (module): would one choose it, as it is installed?
    fit: Callable[[ModuleType], bool] = lambda module: True
    # (bytes) -> their length in the text of a statement, if they are sent in that
    literal_size: Callable[[bytes], int] = len

    def is_fit(self) -> bool:
        """Is it installed, and would one choose it?"""
        try:
            return self.fit(importlib.import_module(self.module))
        except ImportError:
            return False

    def load(self) -> ModuleType:
        """Import the driver. ConfigurationError says what to install."""
        try:
            return importlib.import_module(self.module)
        except ImportError as e:
            raise ConfigurationError(
                f'The database driver {self.name} cannot be imported ({e}); install {self.package}.') from e
