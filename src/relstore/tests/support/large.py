"""A process that commits one large transaction, then changes all of it in another; see test_large.

Run with the class and the arguments of an adapter, the options of the storage, how many objects, and the bytes of
each state, as JSON. Prints the megabytes of memory that it had at most.
"""
import io
import json
import os
import pickle
import sys

from ZODB.Connection import TransactionMetaData
from ZODB.utils import p64, u64, z64

import relstore
from relstore.references import unpack


class Pickler(pickle.Pickler):
    def persistent_id(self, thing):
        return (p64(thing), None) if isinstance(thing, int) else None


def record(oid: int, text: str) -> bytes:
    """Return a state of a bit more than the text that refers to three objects."""
    file = io.BytesIO()
    pickler = Pickler(file, 3)
    pickler.dump(None)
    pickler.dump([oid, oid + 1, oid + 2, text])
    return file.getvalue()


def peak() -> int:
    """Return the kilobytes that this process had at most. What getrusage tells begins with those of its parent."""
    with open('/proc/self/status') as status:
        return next(int(line.split()[1]) for line in status if line.startswith('VmHWM'))


def main(kind: str, arguments: dict, options: dict, count: int, size: int) -> None:
    storage = relstore.RelStore(getattr(relstore, kind)(**arguments), **options)
    oids = [u64(storage.new_oid()) for _ in range(count)]
    tid = z64
    for letter in 'ab':
        transaction = TransactionMetaData()
        storage.tpc_begin(transaction)
        for oid in oids:
            storage.store(p64(oid), tid, record(oid, letter * size), '', transaction)
        storage.tpc_vote(transaction)
        tid = storage.tpc_finish(transaction)
    for oid in (oids[0], oids[count // 2], oids[-1]):
        found = storage.database.pool.attempt(storage.database.adapter.load_at, oid, u64(tid))
        assert found[:2] == (record(oid, 'b' * size), u64(tid)), found
        assert unpack(found[2]) == (oid, oid + 1, oid + 2), found
    print(peak() // 1024)
    sys.stdout.flush()
    os._exit(0)     # to free it one by one would take a second


if __name__ == '__main__':
    main(*json.loads(sys.argv[1]))
