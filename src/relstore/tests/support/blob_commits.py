"""Commits with blobs, as commit.Transaction drives them on an adapter; and a process that commits a large one.

Run with the class and the arguments of an adapter, the options of the storage, and megabytes, as JSON: the process
commits a blob of that size and reads it. It prints how many kilobytes more it needed for each than it had before.
"""
import hashlib
import json
import os
import pickle
import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager

from ZODB.blob import Blob

import relstore
from relstore.adapters.chunks import record_of
from relstore.adapters.commits.base import AnyCommit, Ballot, Metadata
from relstore.sessions.session import Session
from relstore.spool import Spool
from relstore.tests.support.large import peak

# A Blob's record: that of each is the same.
RECORD = pickle.dumps(Blob, 3) + pickle.dumps(None, 3)


def voted(storage: relstore.RelStore, session: Session, files: Mapping[int, str], *, bases: Mapping[int, int],
          copies: Mapping[int, int], states: Mapping[int, bytes], tid: int | None) -> AnyCommit:
    """Return a commit that needs no more than its finish; see commit_blobs."""
    database, adapter = storage.database, storage.database.adapter
    commit = adapter.commit_type(adapter, session, Metadata(b'', b'', b'', False), tid)
    spool = Spool(lambda state: state, digest=adapter.keep_history)
    for oid, state in {**dict.fromkeys([*files, *copies], RECORD), **states}.items():
        spool.put(oid, bases.get(oid, 0), state, data_tid=copies.get(oid))
    if files:
        commit.send_blobs(files, {oid: record_of(path) for oid, path in files.items()})
    size = adapter.message_size
    sent = spool.size >= size and commit.send_ahead(spool.batches(size))
    rows = spool.rows()
    verdict = commit.vote(Ballot(
        epoch=database.epochs.of(database.cache.generation), timeout=60, bases=[(row.oid, row.base) for row in rows],
        locks=[row.oid for row in rows], restored_tid=tid))
    if verdict.is_refusal or verdict.conflicts:
        raise AssertionError(verdict)
    if copies:
        commit.copy_blobs(copies)
    if sent:
        commit.send_again(spool.batches(size, []))
    else:
        commit.stage(spool.batches(size))
    return commit


@contextmanager
def voting(storage: relstore.RelStore, files: Mapping[int, str] = {}, *, bases: Mapping[int, int] = {},
           copies: Mapping[int, int] = {}, states: Mapping[int, bytes] = {}, tid: int | None = None):
    """Yield such a commit. It is rolled back, unless finish() is called."""
    with storage.database.pool.session() as session:
        yield voted(storage, session, files, bases=bases, copies=copies, states=states, tid=tid)


def commit_blobs(storage: relstore.RelStore, files: Mapping[int, str] = {}, **more) -> int:
    """Commit a blob for each of these oids, from files; return the tid.

    bases: by oid the tid that it had. copies: oid -> tid of the revision whose blob is repeated. states: other objects.
    """
    with voting(storage, files, **more) as commit:
        tid, _ = commit.finish()
    return tid


def pieces(storage: relstore.RelStore, oid: int, tid: int) -> list[bytes]:
    """Return the data of a blob as it is read."""
    with storage.database.pool.session() as session:
        return list(storage.database.adapter.chunks.read(session, oid, tid))


def blob(storage: relstore.RelStore, oid: int, tid: int) -> bytes | None:
    """Return the data of a blob, or None if there is none."""
    found = pieces(storage, oid, tid)
    return b''.join(found) if found else None


def main(kind: str, arguments: dict, options: dict, megabytes: int) -> None:
    storage = relstore.RelStore(getattr(relstore, kind)(**arguments), **options)
    digest, found, chance = hashlib.sha256(), hashlib.sha256(), random.Random(1)
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(megabytes):
            digest.update(data := chance.randbytes(1 << 20))
            file.write(data)
        file.flush()
        commit_blobs(storage, states={1000: b'.'})      # what is imported at the first commit
        before = peak()
        tid = commit_blobs(storage, {1001: file.name})
        written = peak() - before
    with storage.database.pool.session() as session:
        assert storage.database.adapter.chunks.size(session, 1001, tid) == megabytes << 20
        for piece in storage.database.adapter.chunks.read(session, 1001, tid):
            found.update(piece)
    assert found.digest() == digest.digest()
    print(json.dumps([written, peak() - before]))


if __name__ == '__main__':
    main(*json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
