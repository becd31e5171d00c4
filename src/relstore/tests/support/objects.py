"""Objects of a site: one connection that loads and links them, and what can be reached."""
from collections.abc import Iterable

from ZODB.Connection import TransactionMetaData
from ZODB.POSException import POSKeyError
from ZODB.utils import u64, z64

import relstore
from relstore.references import references
from relstore.tests.support.records import record


def exists(storage, oid: bytes) -> bool:
    """Return whether the object is there now."""
    row = storage.database.pool.attempt(storage.database.adapter.load_now, u64(oid))
    return row is not None and row[0] is not None


def linked(state: bytes) -> list[bytes]:
    refs = references(state)
    return [refs[n:n + 8] for n in range(0, len(refs), 8)]


class Client:
    """One connection of a process: it loads and stores records as of its view."""

    def __init__(self, storage: relstore.RelStore):
        self.view = storage.new_instance()
        self.begin()

    def begin(self) -> 'Client':
        self.view.afterCompletion()
        self.view.poll_invalidations()
        return self

    def load(self, oid: bytes) -> bytes:
        return self.view.load(oid)[0]

    def link(self, oid: bytes, *others: bytes, note: object = None) -> bytes:
        """Commit a change of an object; return the tid."""
        return self.finish(self.vote((oid, record(*others, note=note))))

    def vote(self, *changes: tuple[bytes, bytes]) -> TransactionMetaData:
        txn = TransactionMetaData()
        bases = [self.tid_of(oid) for oid, _ in changes]
        self.view.tpc_begin(txn)
        try:
            for (oid, state), base in zip(changes, bases, strict=True):
                self.view.store(oid, base, state, '', txn)
            self.view.tpc_vote(txn)
        except BaseException:
            self.view.tpc_abort(txn)
            raise
        return txn

    def finish(self, txn: TransactionMetaData) -> bytes:
        tid = self.view.tpc_finish(txn)
        self.view.afterCompletion()
        return tid

    def tid_of(self, oid: bytes) -> bytes:
        try:
            return self.view.load(oid)[1]
        except POSKeyError:
            return z64


def reachable(storage: relstore.RelStore, start: Iterable[bytes] = (z64,)) -> set[bytes]:
    """Load whatever can be reached; return the oids. POSKeyError where a reference leads nowhere."""
    client = Client(storage)
    try:
        seen, waiting = set(start), list(start)
        while waiting:
            new = set(linked(client.load(waiting.pop()))) - seen
            seen |= new
            waiting += new
        return seen
    finally:
        client.view.release()
