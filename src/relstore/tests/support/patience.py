"""Patience: how long a test waits for something, and what it says when it does not come."""
import time
from collections.abc import Callable, Iterator
from inspect import getsource
from typing import Any

SECONDS = 60.0


def within(what: str, seconds: float = SECONDS) -> Iterator[None]:
    """Yield for each try, at least once; AssertionError when the time is over. what: is waited for."""
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        yield
    raise AssertionError(f'not within {seconds:g} s: {what}')


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Return what condition() returns, as soon as that is true; AssertionError, with its text, if it never is."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f'not within {seconds:g} s: {_text(condition)}')
        time.sleep(0.001)
    return result


def _text(condition: Callable) -> str:
    try:
        return getsource(condition).strip()
    except (OSError, TypeError):        # it is not written in Python
        return repr(condition)
