"""What sessions send: each message is told before it goes."""
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from relstore.sessions.session import Session

# All ways to a driver.
WAYS = 'run', 'all', 'one', 'series', 'fill', '_do'


@contextmanager
def told(tell: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call tell(SQL, arguments) ahead of each message of any session; the name of the way, where that takes no SQL."""
    with ExitStack() as stack:
        for name in WAYS:
            stack.enter_context(patch.object(Session, name, _telling(name, getattr(Session, name), tell)))
        yield


def texts(arguments: tuple[Any, ...]) -> list[str]:
    """Return the SQL in the arguments of a message: of a list, all of them."""
    first, *rest = arguments or [None]
    if callable(first):         # a function of the driver: (connection, SQL, ...), or to connect (module, address)
        first = None if not rest[1:] or isinstance(rest[0], ModuleType) else rest[1]
    if isinstance(first, str):
        return [first]
    return [each if isinstance(each, str) else each[0] for each in first or []]


def _telling(name: str, way: Callable[..., Any], tell: Callable[[str, tuple[Any, ...]], None]) -> Callable[..., Any]:
    def send(session, *arguments):
        tell(next((argument for argument in arguments if isinstance(argument, str)), name), arguments)
        return way(session, *arguments)

    return send
