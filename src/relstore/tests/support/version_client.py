"""A program that uses one database as it is told on its input, in lines of JSON, and answers each: see test_versions.

It has to run with relstore of another version, so it imports nothing else of these tests.
"""
import collections
import json
import random
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from transaction import TransactionManager
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError
from ZODB.serialize import referencesf
from ZODB.tests.ConflictResolution import PCounter
from ZODB.tests.MinPO import MinPO
from ZODB.utils import p64

import relstore

WRITERS = 4


class Client:

    def where(self) -> str:
        return relstore.__file__

    def open(self, adapter: str, arguments: dict, keep_history: bool) -> None:
        storage = relstore.RelStore(getattr(relstore, adapter)(**arguments), keep_history=keep_history,
                                    commit_lock_timeout=60)
        self.db = DB(storage)

    def create(self, shared: int, many: int) -> None:
        with self.db.transaction() as connection:
            root = connection.root()
            root['shared'] = [PCounter() if n % 2 else MinPO(0) for n in range(shared)]
            for n in range(1, shared, 2):
                root['shared'][n].inc(0)    # conflicts of states that have a value are resolved
            root['many'] = [MinPO(0) for _ in range(many)]

    def write(self, word: str) -> None:
        with self.db.transaction() as connection:
            connection.root()['word'] = word

    def read(self) -> str:
        with self.db.transaction() as connection:
            return connection.root()['word']

    def run(self, seconds: float, large: bool) -> tuple[dict, dict]:
        """Let writers count for a while, and one beside them change all of `many`.

        Return how often each shared object was counted, and which conflicts there were.
        """
        counted, conflicts = collections.Counter(), collections.Counter()
        with ThreadPoolExecutor(WRITERS + large) as threads:
            first = [threads.submit(self._change_many)] if large else []
            until = time.monotonic() + seconds
            jobs = [threads.submit(self._count, until, first, conflicts) for _ in range(WRITERS)]
            for job in jobs:
                counted.update(job.result())
            for job in first:
                job.result()
        return counted, conflicts

    def _count(self, until, first, conflicts):
        counted = collections.Counter()
        manager = TransactionManager(explicit=True)
        with closing(self.db.open(manager)) as connection:
            while time.monotonic() < until or not all(job.done() for job in first):
                manager.begin()
                try:
                    shared = connection.root()['shared']
                    chosen = random.sample(range(len(shared)), 3)
                    for n in chosen:
                        if n % 2:
                            shared[n].inc()
                        else:
                            shared[n].value += 1
                    manager.commit()
                    counted.update(chosen)
                except ConflictError as e:
                    conflicts[type(e).__name__] += 1
                    manager.abort()
        return counted

    def _change_many(self):
        with self.db.transaction() as connection:
            for it in connection.root()['many']:
                it.value += 1

    def values(self) -> tuple[list, list]:
        with self.db.transaction() as connection:
            root = connection.root()
            return ([it._value if isinstance(it, PCounter) else it.value for it in root['shared']],
                    [it.value for it in root['many']])

    def begin(self, word: str) -> None:
        """Change the root in a transaction that is not committed yet."""
        self.manager = TransactionManager(explicit=True)
        connection = self.db.open(self.manager)
        self.manager.begin()
        connection.root()['word'] = word

    def commit(self) -> None:
        self.manager.commit()

    def delete(self, oid: int) -> None:
        """As a collector outside does."""
        storage, txn = self.db.storage.new_instance(), TransactionMetaData()
        storage.poll_invalidations()
        storage.tpc_begin(txn)
        storage.deleteObject(p64(oid), storage.load(p64(oid))[1], txn)
        storage.tpc_vote(txn)
        storage.tpc_finish(txn)
        storage.release()

    def make_garbage(self) -> None:
        with self.db.transaction() as connection:
            connection.root()['many'] = connection.root()['many'][:-1]

    def prepack(self) -> None:
        """Look for garbage, and write down what is to go."""
        self.db.storage.pack(time.time(), referencesf, prepack_only=True)

    def close(self) -> None:
        self.db.close()


def main() -> None:
    client = Client()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {'answer': getattr(client, what)(**arguments)}
        except Exception:
            answer = {'error': traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    main()
