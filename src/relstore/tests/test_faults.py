"""The database fails at statement n, for every n of an operation: nothing is half done, nothing stays behind, and
the same storage goes on working.

The faults are real: the server refuses a statement, a backend is ended, a TCP connection is cut after byte k.
"""
import gc
import itertools
import os
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest import TestCase
from unittest.mock import patch

from persistent.TimeStamp import TimeStamp
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import StorageError
from ZODB.utils import p64, u64, z64

import relstore
from relstore import spool
from relstore.errors import OutcomeUnknown, Unavailable
from relstore.sessions.drivers import DRIVERS
from relstore.tests.support.backends import (
    HISTORY_PRESERVING,
    MySQLBackend,
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    MySQLdbOnMySQLHistoryFree,
    PostgreSQLBackend,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    PyMySQLHistoryFree,
    SQLiteBackend,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.faults import Faults, MySQLTrouble, PostgreSQLTrouble, SQLiteTrouble
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.objects import exists
from relstore.tests.support.proxy import join_all_but
from relstore.tests.support.records import counter, state, value_of
from relstore.tests.support.unmade import unmade

POSTGRESQL = Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree

#: What may go up to an application that is to try again, or to give up.
TOLD = StorageError, TransientError


class Suite(TestCase):

    def enter(self, context):
        """TestCase.enterContext, which came with Python 3.11."""
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered


class EveryStatement(Suite):
    """Runs operations with each fault at each of their statements."""

    def setUp(self):
        super().setUp()
        # Where the server stays down, who asks for the outcome is not to wait for long.
        self.enter(patch('relstore.outcome.OUTCOME_PATIENCE_SECONDS', 0.2))
        self.trouble = (SQLiteTrouble() if isinstance(self, SQLiteBackend) else
                        MySQLTrouble(self.new_watch()) if isinstance(self, MySQLBackend) else
                        PostgreSQLTrouble(self.dsn()))
        self.addCleanup(self.trouble.close)
        self.faults = Faults(self.trouble)
        drivers = {name: self.faults.driver(driver) for name, driver in DRIVERS.items()}
        self.enter(patch.dict(DRIVERS, drivers))
        self.enter(patch.object(spool, 'IN_MEMORY_BYTES', 100))    # temporary files for all
        gc.collect()
        self._before = threads(), files()
        self._warnings = self.enter(warnings.catch_warnings(record=True))
        warnings.simplefilter('always', ResourceWarning)
        self.storage = self.open_storage(commit_lock_timeout=10, pool_timeout=5)
        self.addCleanup(self.storage.close)
        self.view = self.storage.new_instance()
        self.other = self.open_storage(commit_lock_timeout=10)   # as another process would
        self.addCleanup(self.other.close)
        self.storages = [self.storage, self.other]
        self.view.poll_invalidations()
        self.view.afterCompletion()
        self.ordinary = self.view.new_oid()
        self.ordinary_tid, self.ordinary_value = z64, 0

    def every_statement(self, operate, prepare=lambda: None, check=lambda prepared, outcome: None,
                        kinds=Faults.KINDS, step=1):
        """For each fault: prepare, operate(prepared) under it, check(prepared, its result or exception).

        step: with 1 at each statement; otherwise at each step-th, at others with each kind.
        """
        for first, kind in enumerate(kinds):
            happened, n = True, 1 + first * step // len(kinds) - step
            while happened:
                n += step
                try:
                    happened = self._run(kind, n, operate, prepare, check)
                except Exception as e:
                    raise AssertionError(f'{kind}, statement {n}: {type(e).__name__}: {e}') from e
            self.assertGreater(n, 1, 'the operation sends nothing')
        self._nothing_remains_when_closed()

    def _run(self, kind, n, operate, prepare, check) -> bool:
        prepared = prepare()
        self.faults.arm(kind, n)
        try:
            outcome = operate(prepared)
        except TOLD as e:
            outcome = e
        finally:
            happened = self.faults.disarm()
        if not happened and isinstance(outcome, Exception):
            raise outcome
        self.kind = kind
        check(prepared, outcome)
        self._nothing_is_held()
        self._an_ordinary_transaction_works()
        return happened

    def _nothing_is_held(self):
        pools = [storage.database.pool for storage in self.storages]
        self.assertFalse([pool for pool in pools if pool.lent])
        self.assertEqual(len(self.faults.open), sum(len(pool.idle) for pool in pools), 'connections left open')
        self.trouble.settled()

    def _an_ordinary_transaction_works(self):
        self.view.poll_invalidations()
        if self.ordinary_value:
            self.assertEqual(value_of(self.view.load(self.ordinary)[0]), self.ordinary_value)
        self.ordinary_value += 1
        self.ordinary_tid = commit(self.view, (self.ordinary, self.ordinary_tid, state(self.ordinary_value)))
        self.assertEqual(value_of(self.other.load(self.ordinary)[0]), self.ordinary_value)

    def _nothing_remains_when_closed(self):
        fresh = self.open_storage()
        self.assertEqual(value_of(fresh.load(self.ordinary)[0]), self.ordinary_value)
        for storage in (fresh, self.view, *self.storages):
            storage.close()
        self.assertEqual(self.faults.open, set())
        gc.collect()
        self.assertEqual((threads(), files()), self._before)
        self.assertEqual([str(warning.message) for warning in self._warnings], [], 'left to the garbage collector')


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def files() -> list[str]:
    """Return what the open file descriptors of this process lead to; SQLite's and sockets by kind only."""
    found = []
    for name in os.listdir('/proc/self/fd'):
        try:
            found.append(os.readlink(f'/proc/self/fd/{name}').partition(':[')[0])
        except FileNotFoundError:   # that of the listing itself
            continue
    return sorted(path for path in found if not path.startswith('/proc/'))


class Statements(EveryStatement):

    def test_reads(self):
        cold = self.open_storage(cache_local_mb=0)
        self.addCleanup(cold.close)
        self.storages.append(cold)
        view = cold.new_instance()
        oids = [view.new_oid() for _ in range(3)]
        tid = commit(view, *((oid, z64, state(n)) for n, oid in enumerate(oids)))
        view.poll_invalidations()
        view.afterCompletion()

        def read(_):
            try:
                view.poll_invalidations()
                self.assertEqual([value_of(view.load(oid)[0]) for oid in oids], [0, 1, 2])
                view.prefetch(oids)
            finally:
                view.afterCompletion()
            self.assertEqual([value_of(view.loadSerial(oid, tid)) for oid in oids], [0, 1, 2])
            self.assertEqual(view.loadBefore(oids[0], p64(u64(tid) + 1))[1:], (tid, None))
            self.assertEqual(view.getTid(oids[0]), tid)
            self.assertGreater(len(view), 2)
            self.assertGreater(view.getSize(), 0)
            self.assertGreaterEqual(cold.lastTransaction(), tid)
            self.assertEqual(view.history(oids[0])[0]['tid'], tid)
            self.assertIn(tid, [record.tid for txn in view.iterator(tid, tid) for record in txn])
            if self.keep_history:
                self.assertIn(tid, [entry['id'] for entry in view.undoLog(0, 100_000)])
            return 'read'

        def check(_, outcome):
            view.release()      # without history an iterator has a session
            if not self.storage.database.adapter.reads_in_snapshot and self.kind in ('killed', 'lost'):
                self.assertEqual(outcome, 'read', 'no transaction was open: a new connection serves')
            elif isinstance(outcome, Exception) and self.kind in ('killed', 'lost'):
                self.assertIsInstance(outcome, TransientError)

        self.every_statement(read, check=check)

    def test_a_walk(self):
        """It reads one snapshot to its end, or says that this is lost."""
        oids = {self.view.new_oid() for _ in range(3)}
        commit(self.other, *((oid, z64, state(0)) for oid in oids))

        def read(_):
            following, found = None, set()
            while not found or following is not None:
                oid, *_, following = self.view.record_iternext(following)
                found.add(oid)
            return found

        def check(_, outcome):
            self.view.release()         # what is left of it
            if isinstance(outcome, Exception) and self.kind in ('killed', 'lost'):
                self.assertIsInstance(outcome, TransientError)
            elif not isinstance(outcome, Exception):
                self.assertLessEqual(oids, outcome)

        self.every_statement(read, check=check)

    def test_poll(self):
        oid, base = self.view.new_oid(), z64
        commit(self.other, (oid, z64, state(0)))
        self.view.poll_invalidations()

        def change():
            nonlocal base
            base = commit(self.other, (oid, self.other.getTid(oid), state(1)))
            return base

        def poll(_):
            try:
                return self.view.poll_invalidations()
            finally:
                self.view.afterCompletion()

        def check(tid, outcome):
            if isinstance(outcome, Exception):
                outcome = self.view.poll_invalidations()
            self.assertTrue(outcome is None or oid in outcome, outcome)
            self.assertEqual(self.view.load(oid), (state(1), tid))
            self.view.afterCompletion()

        self.every_statement(poll, change, check)

    def test_new_oid(self):
        seen = set()

        def exhaust():
            self.storage.database.oids.forget()

        def check(_, outcome):
            oids = [self.other.new_oid() for _ in range(20)] + [self.view.new_oid() for _ in range(20)]
            if not isinstance(outcome, Exception):
                oids.append(outcome)
            self.assertEqual(len(oids), len(set(oids)))
            self.assertFalse(seen.intersection(oids))
            seen.update(oids)

        self.every_statement(lambda _: self.view.new_oid(), exhaust, check)

    def test_commit(self):
        self._commit_with_everything(pieces=False)

    def test_commit_in_pieces(self):
        self._commit_with_everything(pieces=True)

    def _commit_with_everything(self, pieces):
        """Change, create, resolve a conflict, delete, and depend on a read; all of it happens or nothing."""
        if pieces:
            self.storage.database.adapter.message_size = 300
        changed, resolved, read = (self.view.new_oid() for _ in range(3))
        commit(self.other, (changed, z64, state(0)), (resolved, z64, counter(0)), (read, z64, state(0)))
        values = {'changed': 0, 'resolved': 0}

        def prepare():
            doomed = self.other.new_oid()
            commit(self.other, (doomed, z64, state(0)))
            self.view.poll_invalidations()
            bases = {oid: self.view.load(oid)[1] for oid in (changed, resolved, read, doomed)}
            created = self.view.new_oid()
            commit(self.other, (resolved, bases[resolved], counter(values['resolved'] + 10)))
            values['resolved'] += 10
            return bases, created, doomed

        def operate(prepared):
            bases, created, doomed = prepared

            def more(txn):
                self.view.checkCurrentSerialInTransaction(read, bases[read], txn)
                self.view.deleteObject(doomed, bases[doomed], txn)

            return commit(self.view, (changed, bases[changed], state(values['changed'] + 1)),
                          (created, z64, state(7)), (resolved, bases[resolved], counter(values['resolved'] - 9)),
                          work=more)

        def check(prepared, outcome):
            bases, created, doomed = prepared
            self.trouble.settled()
            facts = {value_of(self.other.load(changed)[0]) == values['changed'] + 1, exists(self.other, created),
                     value_of(self.other.load(resolved)[0]) == values['resolved'] + 1,
                     not exists(self.other, doomed)}
            self.assertEqual(len(facts), 1, 'half of it was stored')
            [happened] = facts
            if isinstance(outcome, OutcomeUnknown):
                self.assertEqual(self.kind, 'down')
            elif happened:
                self.assertEqual(outcome, self.other.getTid(changed), 'it was committed, and this was told')
            else:
                self.assertIsInstance(outcome, Exception, 'success was told, and nothing was stored')
            values['changed'] += happened
            values['resolved'] += happened

        self.every_statement(operate, prepare, check)

    def test_restore(self):
        def prepare():
            return self.view.new_oid(), self.view.new_oid(), p64(u64(self.other.lastTransaction()) + 1)

        def operate(prepared):
            first, second, tid = prepared

            def restore(txn):
                for oid in (first, second):
                    self.view.restore(oid, tid, state(1), '', None, txn)

            return commit(self.view, tid=tid, work=restore)

        def check(prepared, outcome):
            first, second, tid = prepared
            self.trouble.settled()
            self.assertEqual(exists(self.other, first), exists(self.other, second))
            if isinstance(outcome, OutcomeUnknown):
                self.assertEqual(self.kind, 'down')
            elif exists(self.other, first):
                self.assertEqual((outcome, self.other.getTid(first)), (tid, tid))
            else:
                self.assertIsInstance(outcome, Exception)

        self.every_statement(operate, prepare, check)

    def test_release_and_close_under_a_fault(self):
        """An instance that ends in the middle of a transaction leaves nothing either."""
        oid = self.view.new_oid()
        commit(self.view, (oid, z64, state(0)))

        def operate(_):
            view = self.storage.new_instance()
            txn = TransactionMetaData()
            try:
                view.poll_invalidations()
                view.tpc_begin(txn)
                view.store(oid, self.base, state(1), '', txn)
                view.tpc_vote(txn)
            finally:
                view.release()
            return 'released'

        def prepare():
            self.base = self.other.getTid(oid)

        self.every_statement(operate, prepare)

    def test_open(self):
        """Opening fails with what is to be done about it, and leaves nothing open."""
        def operate(_):
            self.open_storage().close()

        self.every_statement(operate, kinds=('refused', 'killed', 'lost', 'down'))


class Undoing(EveryStatement):

    def test_undo(self):
        changed, resolved = self.view.new_oid(), self.view.new_oid()
        commit(self.other, (changed, z64, state(0)), (resolved, z64, counter(0)))
        values = {'changed': 0, 'resolved': 0}

        def prepare():
            bases = {oid: self.other.getTid(oid) for oid in (changed, resolved)}
            undone = commit(self.other, (changed, bases[changed], state(values['changed'] + 1)),
                            (resolved, bases[resolved], counter(values['resolved'] + 1)))
            values['changed'] += 1
            values['resolved'] += 11
            commit(self.other, (resolved, undone, counter(values['resolved'])))
            return undone

        def operate(undone):
            return commit(self.view, work=lambda txn: self.view.undo(undone, txn))

        def check(undone, outcome):
            self.trouble.settled()
            facts = {value_of(self.other.load(changed)[0]) == values['changed'] - 1,
                     value_of(self.other.load(resolved)[0]) == values['resolved'] - 1}
            self.assertEqual(len(facts), 1, 'half of it was undone')
            [happened] = facts
            if isinstance(outcome, OutcomeUnknown):
                self.assertEqual(self.kind, 'down')
            else:
                self.assertEqual(isinstance(outcome, Exception), not happened, outcome)
            values['changed'] -= happened
            values['resolved'] -= happened

        self.every_statement(operate, prepare, check)


class Creating(EveryStatement):

    def test_making_the_tables(self):
        """What failed half-way does not hinder the next."""
        names = (f'made_{n}' for n in itertools.count())

        def operate(address):
            relstore.RelStore(address, keep_history=self.keep_history).close()

        def check(address, outcome):
            with closing(relstore.RelStore(address, keep_history=self.keep_history)) as storage:
                commit(storage, (storage.new_oid(), z64, state(1)))

        kinds = ('killed',) if isinstance(self, PostgreSQLBackend) else ('refused', 'killed')
        self.every_statement(operate, lambda: unmade(self, next(names)), check, kinds, step=1 if THOROUGH else 5)


class SQLiteOutcome(EveryStatement):

    def test_a_commit_of_another_process_is_not_taken_for_ours(self):
        """A tid alone proves nothing: where the last one lies in the future, the next is the same for all."""
        oid = self.other.new_oid()
        future = TimeStamp(2100, 1, 1, 0, 0, 0).raw()
        commit(self.other, tid=future, work=lambda txn: self.other.restore(oid, future, state(0), '', None, txn))
        mine, theirs = self.view.new_oid(), self.other.new_oid()
        txn = TransactionMetaData()
        self.view.tpc_begin(txn)
        self.view.store(mine, z64, state(1), '', txn)
        self.view.tpc_vote(txn)
        session = self.view.committing.session
        close = session._connection.close

        def close_and_let_others_commit():
            close()
            commit(self.other, (theirs, z64, state(2)))

        session._connection.close = close_and_let_others_commit
        self.faults.arm('refused', 1)       # COMMIT is all that is left
        try:
            with self.assertRaises(TOLD):
                self.view.tpc_finish(txn)
        finally:
            self.faults.disarm()
        self.assertTrue(exists(self.other, theirs))
        self.assertFalse(exists(self.other, mine))


class EveryByte(Suite):
    """The connection is cut after byte k of a vote or finish, in either direction.

    The four classes on PostgreSQL take every eighth k each, and together every second; where THOROUGH, each takes all.
    """

    SAMPLE = 6      # places where the commit lock is waited for, each way

    def setUp(self):
        super().setUp()
        self.step = 1 if THOROUGH else 97 if self.driver == 'pymysql' else 8     # which takes 40 ms to connect
        self.varies = 50 if isinstance(self, MySQLBackend) else 0
        self.addCleanup(join_all_but, threading.enumerate())
        self.proxy = self.enter(self.new_proxy())
        self.storage = relstore.RelStore(self.address_through(self.proxy), keep_history=self.keep_history,
                                         commit_lock_timeout=10)
        self.addCleanup(self.storage.close)
        self.other = self.open_storage()
        self.addCleanup(self.other.close)
        self.watch = self.enter(closing(self.new_watch()))
        self.first, self.second = self.storage.new_oid(), self.storage.new_oid()
        self.value = 0
        commit(self.storage, (self.first, z64, state(0)), (self.second, z64, state(0)))

    def _commit(self, in_vote=lambda: None, in_finish=lambda: None):
        """Commit the next value; return the tid or the exception."""
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        try:
            for oid in (self.first, self.second):
                self.storage.store(oid, self.other.getTid(oid), state(self.value + 1), '', txn)
            in_vote()
            self.storage.tpc_vote(txn)
            in_finish()
            return self.storage.tpc_finish(txn)
        except TOLD as e:
            self.storage.tpc_abort(txn)
            return e

    def _measure(self, phase):
        """Return the bytes that a phase sends, and receives."""
        sizes = []

        def note():
            sizes.append((self.proxy.sent, self.proxy.received))

        self._commit(note, note)
        note()
        self.value += 1
        before, after = sizes[phase:phase + 2]
        return [b - a for a, b in zip(before, after, strict=True)]

    def _each_cut(self, phase):
        begin = 4 * self.keep_history + 2 * (self.driver == 'psycopg2')
        for way, size in zip(('sent', 'received'), self._measure(phase), strict=True):
            for k in sorted({0, 1, size - 1, size, *range(begin, size, self.step)}):
                cut = [lambda: None, lambda: None]
                cut[phase] = lambda way=way, k=k: self.proxy.cut_after(**{way: k})
                with self.subTest(way=way, k=k), self._surely_cut(k < size - self.varies):
                    self._check(self._commit(*cut))

    @contextmanager
    def _surely_cut(self, surely):
        """The numbers in a message make it a little longer or shorter each time; its end may not be reached."""
        cuts = self.proxy.cuts
        yield
        self.proxy.cut_after()
        self.assertTrue(not surely or self.proxy.cuts > cuts, 'nothing was cut')

    def _check(self, outcome):
        self.watch.until_nothing_is_open()
        [[record, tid], [same, same_tid]] = [self.other.load(oid) for oid in (self.first, self.second)]
        self.assertEqual((record, tid), (same, same_tid))
        happened = value_of(record) == self.value + 1
        self.value += happened
        if happened:
            self.assertEqual(outcome, tid)
        else:
            self.assertIsInstance(outcome, Unavailable)
        self.assertEqual(self.storage.database.pool.lent, 0)

    def test_vote(self):
        self._each_cut(0)

    def test_finish(self):
        self._each_cut(1)

    def test_finish_that_waits_for_the_commit_lock(self):
        """Cut on the way there, the server is left waiting, or is not; who holds the lock lets go when it is asked.

        On the way back there is something to cut only when it was let go.
        """
        chosen = random.Random(20240229)
        for way, size in zip(('sent', 'received'), self._measure(1), strict=True):
            for k in sorted({0, size - 1, size, *chosen.sample(range(size), self.SAMPLE)}):
                with self.subTest(way=way, k=k), self._surely_cut(k < size - self.varies):
                    self._check(self._commit_behind_another(way, k))

    def _commit_behind_another(self, way, k):
        cuts = self.proxy.cuts

        def it_is_time():
            return (finish.done() or self.watch.asked_for_outcome()
                    or self.proxy.cuts == cuts and self.watch.somebody_waits())

        with ThreadPoolExecutor(1) as threads:
            self.watch.take_commit_lock()
            try:
                finish = threads.submit(self._commit, in_finish=lambda: self.proxy.cut_after(**{way: k}))
                self.watch.until(it_is_time)
            finally:
                self.watch.release_commit_lock()
            return finish.result(30)


cases(globals(), Statements)
cases(globals(), Undoing, backends=HISTORY_PRESERVING)
cases(globals(), SQLiteOutcome, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
cases(globals(), Creating, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving,
                                     MySQLdbHistoryPreserving, MySQLdbOnMySQLHistoryFree))
cases(globals(), EveryByte, backends=(*POSTGRESQL, MySQLdbHistoryPreserving, MySQLdbHistoryFree, PyMySQLHistoryFree),
      each_driver=True)
del Suite, EveryStatement, Statements, Undoing, Creating, SQLiteOutcome, EveryByte
