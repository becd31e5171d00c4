"""Logs: what relstore warns of is told on stderr while a command runs."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_on_stderr(verbose: bool) -> Iterator[None]:
    """Have warnings told, or all that is of interest to who wants to know more."""
    logger, handler = logging.getLogger('relstore'), logging.StreamHandler()
    handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s' if verbose else '%(message)s'))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
