"""Unreadable: names records whose references cannot be found out. They are copied as they are.

A pack takes for a reference in such a record whatever may be one, so the copy loses nothing by them.
"""
from __future__ import annotations

import logging
from collections.abc import Sequence

from ZODB.utils import oid_repr, p64, tid_repr

from relstore.references import why_unreadable

log = logging.getLogger('relstore')

NAMED = 20


class Unreadable:
    """Names the first records it is told of in the log, at once, for a copy may be killed; and counts all."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, tid: bytes, count: int, first: Sequence[tuple[int, bytes]]) -> None:
        """Take so many records of a transaction. first: (oid, record) of them, or of no fewer than NAMED.

        The records are without what a wrapper does to them, as far as that is known.
        """
        for oid, record in first[:max(NAMED - self.count, 0)]:
            log.warning('Object %s of transaction %s cannot be read, and is copied as it is: %s.', oid_repr(p64(oid)),
                        tid_repr(tid), why_unreadable(record))
        self.count += count

    @property
    def unnamed(self) -> int:
        """How many were not named."""
        return max(self.count - NAMED, 0)
