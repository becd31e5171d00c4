"""Readers: processes that read transactions of a file ahead of the one that copies them, and scan their records.

Of what a copy costs this process, three quarters are to read records, to find the references in them and to compute
their MD5. That is done elsewhere where there are processors for it and enough to read. A transaction that can be read
in another process has a `place`; see Place. What could go wrong:

* A reader meets what it cannot read, what is no plain record, or another file in the place of this one: then it has no
  rows for the transaction, and whoever copies reads the records, and tells what there is to tell.
* A reader dies: likewise for all that follow.
* The process that copies dies, even by kill -9: its end of the pipe is closed, and with it ends the reader.
"""
from __future__ import annotations

import logging
import marshal
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, cycle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ZODB.utils import u64

from relstore.spool import described

log = logging.getLogger('relstore')

# There are processes if there is so much to read.
WORTHWHILE_BYTES = 64 << 20
# What is read by one process before it is the next one's turn; of a transaction with more nothing is read.
RANGE_BYTES = 4 << 20
# Ranges that a process is asked for before it has delivered the first. Each takes its bytes of memory.
ASKED = 2
MOST = 4
SECONDS_TO_END = 5.0

PROGRAM = """
import sys
path, descriptor, digest = sys.argv[1:]
sys.path[:] = eval(path)
from multiprocessing.connection import Connection
from relstore.readers import serve
serve(Connection(int(descriptor)), digest == 'True')
"""

# (oid, md5, references, earlier tid whose state it repeats, state)
Row = tuple[int, str | None, bytes | None, int | None, bytes]
NOTHING: tuple[bytes, list[Row] | None] = b'', None


class Place(NamedTuple):
    """Where a transaction is. read: returns the transactions from one position up to another, in any process.

    file: what `read` has to know of it. left: bytes from here to its end.
    """
    read: Callable[[Any, int, int], Iterable[Any]]
    file: Any
    begin: int
    end: int
    left: int


class Read:
    """A transaction, and its rows as a reader has found them. None: its records have to be read here."""

    def __init__(self, transaction: Any, rows: list[Row] | None):
        self._transaction, self.rows = transaction, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._transaction)


def ahead(transactions: Iterable[Any], digest: bool) -> Iterator[Any]:
    """Yield the transactions, with their rows if that is worthwhile and possible. digest: whether md5s are wanted."""
    transactions = iter(transactions)
    first = next(transactions, None)
    place = getattr(first, 'place', None)
    count = spare_processors()
    if first is None:
        return
    if place is None or place.left < WORTHWHILE_BYTES or count < 1:
        yield from chain([first], transactions)
        return
    readers = Readers(count, digest)
    try:
        yield from readers.ahead(chain([first], transactions))
    finally:
        readers.close()


def spare_processors() -> int:
    """Return how many readers there may be. One processor is for who copies, and one for the database."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(MOST, there - 2)


class Readers:
    """count: of processes."""

    def __init__(self, count: int, digest: bool):
        # Neither forked, for other threads may hold locks, nor spawned by multiprocessing, which would run the program
        # of the user again where that is no module.
        self._processes, self._pipes = [], []
        self._works = True      # until one dies
        # Ctrl-C is for who copies: they inherit that it is blocked, and so are not killed by it while they begin.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                ours, theirs = multiprocessing.Pipe()
                with theirs:
                    self._processes.append(subprocess.Popen(
                        [sys.executable, '-c', PROGRAM, repr(sys.path), str(theirs.fileno()), repr(digest)],
                        stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
                self._pipes.append(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ahead(self, transactions: Iterator[Any]) -> Iterator[Read]:
        """Yield transactions in order. Each range is asked for in turn, and answers are received in the same order.

        What the iterator raises is raised behind all that came before.
        """
        asked: deque[tuple[list[Any], Connection]] = deque()
        failure: list[Exception] = []
        for pipe in cycle(self._pipes):
            if not failure and (group := _group(transactions, failure)):
                self._ask(pipe, group[0].place, group[-1].place.end)
                asked.append((group, pipe))
            if len(asked) == ASKED * len(self._pipes) or failure or not group:
                if not asked:
                    break
                group, answering = asked.popleft()
                answers = iter(self._answer(answering))
                for transaction in group:
                    tid, rows = next(answers, NOTHING)
                    yield Read(transaction, rows if tid == transaction.tid else None)
        if failure:
            raise failure[0]

    def _ask(self, pipe: Connection, place: Place, end: int) -> None:
        if self._works:
            try:
                pipe.send((place.read, place.file, place.begin, end))
            except OSError:
                self._lose()

    def _answer(self, pipe: Connection) -> list[tuple[bytes, list[Row] | None]]:
        """Return (tid, rows) of the transactions of a range, as far as there is an answer."""
        if self._works:
            try:
                return marshal.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self._lose()
        return []

    def _lose(self) -> None:
        self._works = False
        log.warning('A process that reads ahead has died; the copy goes on without.')


def _group(transactions: Iterator[Any], failure: list[Exception]) -> list[Any]:
    """Return the next transactions, as many as make up a range; add to `failure` why there are no more."""
    group = []
    try:
        for transaction in transactions:
            group.append(transaction)
            if transaction.place.end - group[0].place.begin >= RANGE_BYTES:
                break
    except Exception as e:
        failure.append(e)
    return group


# In a reader ----------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, digest: bool) -> None:
    """Answer one question after the other, until nobody is left who asks."""
    with suppress(EOFError, OSError):
        while True:
            read, file, begin, end = pipe.recv()
            pipe.send_bytes(marshal.dumps(_answer(read, file, begin, end, digest)))


def _answer(read: Callable[[Any, int, int], Iterable[Any]], file: Any, begin: int, end: int, digest: bool
            ) -> list[tuple[bytes, list[Row] | None]]:
    answer: list[tuple[bytes, list[Row] | None]] = []
    with suppress(Exception):       # whatever it is, the one who asks will meet it, and tell
        for transaction in read(file, begin, end):
            answer.append((transaction.tid, None))
            if transaction.place.end - transaction.place.begin <= RANGE_BYTES:
                answer[-1] = transaction.tid, _rows(transaction, digest)
    return answer


def _rows(transaction: Any, digest: bool) -> list[Row] | None:
    rows = []
    for record in transaction:
        if record.data is None:
            return None
        md5, refs, is_of_blob = described(record.data, _same, digest)
        if is_of_blob:
            return None
        data_tid = record.data_txn
        rows.append((u64(record.oid), md5, refs, u64(data_tid) if data_tid else None, record.data))
    return rows


def _same(record: bytes) -> bytes:
    return record
