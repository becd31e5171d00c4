"""What suites on servers share: a watch, a proxy in front, and the place where all commits wait."""
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from unittest import TestCase

from ZODB.Connection import TransactionMetaData
from ZODB.utils import z64

import relstore
from relstore.tests.support.backends import (
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.proxy import join_all_but
from relstore.tests.support.records import state
from relstore.tests.support.watch import AnyWatch

POSTGRESQL = Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree
NOUGHT = state(0)


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self._threads = ThreadPoolExecutor(8)
        self.addCleanup(self._threads.shutdown)
        self.storage, self.other = self.opened(), self.opened()     # as two processes have it
        self.view = self.storage.new_instance()
        self.view.poll_invalidations()
        self.view.afterCompletion()

    def opened(self, **options):
        storage = self.open_storage(**{'commit_lock_timeout': 20} | options)
        self.addCleanup(storage.close)
        return storage

    def started(self, work: Callable, *arguments) -> Future:
        return self._threads.submit(work, *arguments)

    def enter(self, context):
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def objects(self, count=1, record=NOUGHT) -> list[bytes]:
        """Return the oids of new objects that both storages see."""
        oids = [self.other.new_oid() for _ in range(count)]
        commit(self.other, *((oid, z64, record) for oid in oids))
        return oids

    def voted(self, storage, *changes, read=(), tid=None):
        """Bring a transaction up to its vote; return it, with what vote returned."""
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        try:
            for oid, base, record in changes:
                storage.store(oid, base, record, '', txn)
            for oid, serial in read:
                storage.checkCurrentSerialInTransaction(oid, serial, txn)
            return txn, storage.tpc_vote(txn)
        except BaseException:
            storage.tpc_abort(txn)
            raise


class ServerSuite(Suite):

    def setUp(self):
        super().setUp()
        self.watch = self.watching()

    def watching(self) -> AnyWatch:
        """Return a new watch, which is closed after the test."""
        return self.enter(closing(self.new_watch()))

    def behind_proxy(self, **options):
        """Return a storage and the proxy through which it talks to its server."""
        self.addCleanup(join_all_but, threading.enumerate())
        proxy = self.enter(self.new_proxy())
        storage = relstore.RelStore(self.address_through(proxy), keep_history=self.keep_history,
                                    commit_lock_timeout=20, **options)
        self.addCleanup(storage.close)
        return storage, proxy
