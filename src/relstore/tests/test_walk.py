"""Whoever reads all of a database reads one state of it: page by page, while others commit, for as long as it takes."""
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from unittest import mock

import ZODB.config
from persistent.mapping import PersistentMapping
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.POSException import POSKeyError, StorageError
from ZODB.tests.hexstorage import HexStorage
from ZODB.utils import p64, u64, z64

import relstore
from relstore import halves, iterate, walk
from relstore.errors import Unavailable
from relstore.pages import Pages
from relstore.tests.support.backends import (
    MYSQL,
    MySQLdbHistoryFree,
    Psycopg2HistoryFree,
    Psycopg2PooledHistoryFree,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    PyMySQLHistoryFree,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commands import Commands, environment
from relstore.tests.support.commits import commit
from relstore.tests.support.ended import end
from relstore.tests.support.patience import until, within
from relstore.tests.support.records import state
from relstore.tests.support.servers import cannot_run

OBJECTS = 8
FREE = SQLiteHistoryFree, Psycopg2HistoryFree, Psycopg3HistoryFree, MySQLdbHistoryFree, PyMySQLHistoryFree


class Suite(Commands):
    """Objects 0 to 7, each of a transaction of its own, which holds another one, 100 + its oid, too."""

    def setUp(self):
        super().setUp()
        for name in 'TRANSACTIONS', 'RECORDS':
            self.enter(mock.patch.object(iterate, name, 1))
        self.storage, self.other = self.opened(), self.opened()     # as two processes have it
        self.oids = [p64(n) for n in range(OBJECTS)]
        for oid in self.oids:
            commit(self.other, (oid, z64, state(0)), (p64(100 + u64(oid)), z64, state(0)))

    def opened(self, **options):
        storage = self.open_storage(**options)
        self.addCleanup(storage.close)
        return storage

    def enter(self, context):
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def change(self, *oids, storage=None, record=None):
        storage = storage or self.other
        return commit(storage, *((oid, storage.getTid(oid), record or state(1)) for oid in oids))

    def opening(self, storage=None):
        """Return a list that gets the sessions which a storage opens from now on."""
        adapter, sessions = (storage or self.storage).database.adapter, []
        connect = adapter.connect

        def connect_and_tell():
            sessions.append(connect())
            return sessions[-1]

        self.enter(mock.patch.object(adapter, 'connect', connect_and_tell))
        return sessions

    def assertEnded(self, sessions):
        gc.collect()        # the frames of a test may be in a cycle with what it caught
        self.assertTrue(sessions)
        self.assertTrue(all(session.broken for session in sessions))


class Iteration(Suite):

    def records(self, transactions):
        return [(record.oid, record.tid, record.data) for txn in transactions for record in txn]

    def test_what_is_changed_meanwhile_is_not_missed(self):
        before = self.records(self.storage.iterator())
        transactions = self.storage.iterator()
        read = self.records([next(transactions)])
        self.change(*self.oids[2:])
        self.change(self.oids[-1])
        self.assertEqual(read + self.records(transactions), before)

    def test_a_link_that_moves_is_seen(self):
        """From an object that was not read yet to one that was: as of before, or as of afterwards."""
        self.change(self.oids[5], record=state('moves'))
        transactions = self.storage.iterator()
        read = self.records([next(transactions), next(transactions)])
        self.change(self.oids[0], self.oids[5])
        commit(self.other, (self.oids[0], self.other.getTid(self.oids[0]), state('moves')),
               (self.oids[5], self.other.getTid(self.oids[5]), state(2)))
        read += self.records(transactions)
        self.assertIn(state('moves'), [data for _, _, data in read])

    def test_records_are_of_the_same_snapshot_whenever_they_are_read(self):
        sessions = self.opening()
        before = self.records(self.storage.iterator())
        transactions = list(self.storage.iterator())
        self.change(*self.oids)
        self.assertEqual(self.records(transactions), before)
        self.assertEqual(self.records(reversed(transactions))[-2:], before[:2])
        if not self.keep_history:
            self.assertFalse(sessions[-1].broken)
            del transactions
            self.assertEnded(sessions)

    def test_it_ends_with_the_last_transaction(self):
        """Though the iterator itself is still there."""
        sessions = self.opening()
        transactions = self.storage.iterator()
        self.assertEqual(len(self.records(transactions)), 2 * OBJECTS)
        if not self.keep_history:
            self.assertEnded(sessions)
        self.assertEqual(list(transactions), [])

    def test_one_sees_what_one_has_committed(self):
        view = self.storage.new_instance()
        self.addCleanup(view.release)
        view.poll_invalidations()
        earlier = view.iterator()
        next(earlier)
        tid = self.change(self.oids[3], storage=view)
        self.assertIn((self.oids[3], tid, state(1)), self.records(view.iterator()))
        self.assertIn((self.oids[3], tid, state(1)), self.records(view.iterator(tid)))
        self.assertIn((self.oids[3], tid, state(1)), self.records(view.iterator(tid, tid)))
        self.assertNotIn(tid, [record[1] for record in self.records(earlier)])

    def test_one_that_is_read_only(self):
        storage = self.opened(read_only=True)
        transactions = storage.iterator()
        read = self.records([next(transactions)])
        self.change(*self.oids[2:])
        self.assertEqual(len(read + self.records(transactions)), 2 * OBJECTS)

    def test_it_is_closed(self):
        """Then nothing can be read, and nothing is open."""
        sessions = self.opening()
        with closing(self.storage.iterator()) as transactions:
            txn = next(transactions)
        with self.assertRaises(StorageError):
            next(transactions)
        if not self.keep_history:
            with self.assertRaises(StorageError):
                list(txn)
            self.assertEnded(sessions)
            exhausted = self.storage.iterator()
            *_, txn = exhausted
            exhausted.close()
            exhausted.close()
            with self.assertRaises(StorageError):
                list(txn)
            self.assertEnded(sessions)

    def test_a_storage_that_is_closed_ends_all(self):
        sessions = self.opening()
        transactions, halves = self.storage.iterator(), self.storage.iterator(p64(1))
        next(transactions), next(halves)
        *_, following = self.storage.record_iternext()
        self.storage.close()
        self.assertEnded(sessions)
        for read in lambda: next(transactions), lambda: next(halves), lambda: self.storage.record_iternext(following):
            with self.assertRaises(StorageError):
                read()

    def test_threads(self):
        """Its transactions are read by several."""
        expected = self.records(self.storage.iterator())
        transactions, found = list(self.storage.iterator()), []
        self.change(*self.oids)
        threads = [threading.Thread(target=lambda: found.append(self.records(transactions))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, [expected] * 6)

    def test_copied_while_others_commit(self):
        """By FileStorage, as zodbconvert and others do it."""
        source, change = self.storage, self.change

        class Source:
            def iterator(self):
                for number, txn in enumerate(source.iterator()):
                    yield txn
                    if not number:
                        change(p64(2), p64(105))

        with closing(FileStorage(str(self.here / 'Data.fs'))) as destination:
            destination.copyTransactionsFrom(Source())
            self.assertEqual(len(destination), 2 * OBJECTS)


class Records(Suite):
    """record_iternext()."""

    def read(self, storage, following=None):
        found = []
        while True:
            *record, following = storage.record_iternext(following)
            found.append(tuple(record))
            if following is None:
                return found

    def test_one_snapshot(self):
        self.change(self.oids[5], record=state('moves'))
        before = self.read(self.storage)
        *first, following = self.storage.record_iternext()
        tid = self.change(self.oids[0], self.oids[5])
        self.other.getTid(self.oids[5])
        read = [tuple(first), *self.read(self.storage, following)]
        self.assertEqual(read, before)
        self.assertEqual({record[1] for record in self.read(self.storage)} & {tid}, {tid})

    def test_two_walks_do_not_mix(self):
        one = self.storage.record_iternext()[-1]
        self.change(self.oids[1])
        other = self.storage.record_iternext()[-1]
        self.assertEqual(one[:8], other[:8])
        self.assertEqual(type(one), bytes, 'ZEO sends it as a pickle, and takes no classes')
        self.assertLess(self.storage.record_iternext(one)[1], self.storage.record_iternext(other)[1])
        self.assertEqual(len(self.read(self.storage, other)), len(self.read(self.storage, one)))

    def test_it_ends(self):
        sessions = self.opening()
        *_, following = self.storage.record_iternext()
        self.assertFalse(sessions[-1].broken)
        self.read(self.storage, following)
        self.assertEnded(sessions)
        with self.assertRaisesRegex(Unavailable, 'Begin again'):
            self.storage.record_iternext(following)
        with self.assertRaises(ValueError):
            self.storage.record_iternext(p64(1000))
        self.storage.record_iternext(p64(100 + OBJECTS - 1))
        self.assertEnded(sessions)
        view = self.storage.new_instance()
        *_, following = view.record_iternext()
        view.release()
        self.assertEnded(sessions)
        with self.assertRaisesRegex(Unavailable, 'Begin again'):
            view.record_iternext(following)

    def test_nobody_goes_on(self):
        sessions = self.opening()
        with mock.patch.object(walk, 'IDLE_SECONDS', 0.2):
            *_, following = self.storage.record_iternext()
            self.until(lambda: sessions[-1].broken)
        with self.assertRaisesRegex(Unavailable, 'Begin again'):
            self.storage.record_iternext(following)
        with mock.patch.object(walk, 'KEPT', 2):
            cookies = [self.storage.record_iternext()[-1] for _ in range(3)]
            self.assertEqual(sum(not session.broken for session in sessions), 2)
            with self.assertRaisesRegex(Unavailable, 'Begin again'):
                self.storage.record_iternext(cookies[0])
            self.storage.record_iternext(cookies[1])

    def test_whoever_goes_on_is_not_idle(self):
        """However long he takes in all; also who began by an oid, once he has gone on."""
        now = [1000.0]

        def passes(seconds):
            now[0] += seconds
            self.storage.walks.drop_idle()

        with mock.patch.object(walk, 'time', mock.Mock(monotonic=lambda: now[0])):
            for begin, idle in (None, walk.IDLE_SECONDS), (p64(1), walk.SEEK_IDLE_SECONDS):
                *_, following = self.storage.record_iternext(begin)
                passes(.9 * idle)
                for _ in range(3):
                    *_, following = self.storage.record_iternext(following)
                    passes(.9 * walk.IDLE_SECONDS)
                passes(.2 * walk.IDLE_SECONDS)
                with self.assertRaisesRegex(Unavailable, 'Begin again'):
                    self.storage.record_iternext(following)

    def test_somebody_looks_in_time(self):
        """For each that is kept, where another is kept for longer, too, or he looked too early; then nobody does."""
        sessions, walks = self.opening(), self.storage.walks
        *_, following = self.storage.record_iternext()
        with mock.patch.object(walk, 'SEEK_IDLE_SECONDS', 0.2):
            for too_early in False, True:
                self.storage.record_iternext(p64(1))
                if too_early:
                    walks.drop_idle()
                self.until(lambda: sessions[-1].broken)
        self.assertFalse(sessions[0].broken)
        self.assertIsNotNone(walks._timer)
        self.read(self.storage, following)
        self.assertIsNone(walks._timer)

    def test_an_oid_is_looked_for(self):
        """That is kept for a short time, and ends no walk of others."""
        sessions = self.opening()
        with mock.patch.object(walk, 'SEEK_IDLE_SECONDS', 0.2):
            *_, gone = self.storage.record_iternext(p64(1))
            self.until(lambda: sessions[-1].broken)
            with self.assertRaisesRegex(Unavailable, 'Begin again'):
                self.storage.record_iternext(gone)
        *_, going = self.storage.record_iternext(p64(1))
        *_, going = self.storage.record_iternext(going)
        with mock.patch.object(walk, 'KEPT', 2):
            cookies = [self.storage.record_iternext(p64(2))[-1] for _ in range(3)]
            self.assertEqual(sum(not session.broken for session in sessions), 2)
            *_, going = self.storage.record_iternext(going)
            self.assertEqual(self.storage.record_iternext(going)[0], p64(4))
            with self.assertRaisesRegex(Unavailable, '2 others were kept instead'):
                self.storage.record_iternext(cookies[0])

    def test_neither_an_oid_nor_what_was_returned(self):
        for following in b'1', p64(1)[:7], p64(1) + b'1', p64(1) * 3:
            with self.assertRaisesRegex(ValueError, 'neither an oid nor what the last call returned'):
                self.storage.record_iternext(following)
        self.assertEqual(u64(self.storage.record_iternext()[-1][:8]), 1)

    def test_a_long_page_holds_up_no_other_walk(self):
        reading, go_on = threading.Event(), threading.Event()
        current = Pages.current

        def read_long(*arguments):
            reading.set()
            go_on.wait(120)
            return current(*arguments)

        *_, long = self.storage.record_iternext()
        thread = threading.Thread(target=self.storage.record_iternext, args=(long,))
        idle = threading.Thread(target=self.storage.walks.drop_idle)
        with mock.patch.object(Pages, 'current', read_long):
            thread.start()
            self.assertTrue(reading.wait(60))
        self.addCleanup(thread.join)
        self.addCleanup(go_on.set)
        self.storage.walks._kept[long[8:]][0].used -= 2 * walk.IDLE_SECONDS
        idle.start()
        self.addCleanup(idle.join)
        self.addCleanup(go_on.set)
        self.until(lambda: long[8:] not in self.storage.walks._kept)
        done = threading.Thread(target=self.storage.record_iternext, daemon=True)
        done.start()
        done.join(60)
        self.assertFalse(done.is_alive())
        self.assertTrue(thread.is_alive())

    def until(self, condition):
        until(condition)

    def test_a_storage_that_is_dropped_leaves_nothing(self):
        storage = self.open_storage()
        sessions = self.opening(storage)
        transactions = storage.iterator(p64(1))
        next(transactions)
        storage.record_iternext()
        storage.database.close()
        del storage, transactions
        self.assertEnded(sessions)


cases(globals(), Iteration, Records)
del Iteration, Records


class Halves(Suite):
    """What is younger than a time, and then what is older, is all there is. Without history."""

    def tids(self, *arguments, storage=None):
        return {record.oid for txn in (storage or self.storage).iterator(*arguments) for record in txn}

    def setUp(self):
        super().setUp()
        self.all = self.tids()
        self.middle = self.storage.getTid(self.oids[4])

    def nobody_comes(self):
        """For as long as halves are kept."""
        with mock.patch.object(halves, 'HALF_IDLE_SECONDS', 0):
            self.storage.walks.drop_idle()

    def assertGone(self, *tids):
        for tid in tids:
            for _ in range(2):
                with self.assertRaisesRegex(Unavailable, 'begin again with what is younger'):
                    self.storage.iterator(None, tid)

    def test_they_are_of_one_snapshot(self):
        younger = self.tids(self.middle)
        self.change(*self.oids[:3])
        self.assertEqual(younger | self.tids(None, self.middle), self.all)
        self.change(self.oids[3], storage=self.storage)
        self.assertEqual(self.tids(self.middle), younger | set(self.oids[:4]))

    def test_as_long_as_the_iterator_is_there(self):
        iterator = self.storage.iterator(self.middle)
        younger = {record.oid for txn in iterator for record in txn}
        self.nobody_comes()
        self.change(*self.oids[:3])
        older = self.storage.iterator(None, self.middle)
        iterator.close()
        self.assertEqual(younger | {record.oid for txn in older for record in txn}, self.all)

    def test_too_late(self):
        """Nobody can tell whether it was wanted; but nothing is said that is not true."""
        sessions = self.opening()
        self.tids(self.middle)
        self.nobody_comes()
        self.assertEnded(sessions)
        with self.assertRaisesRegex(Unavailable, 'begin again with what is younger'):
            self.storage.iterator(None, self.middle)
        self.tids(None, self.storage.getTid(self.oids[5]))
        self.tids(self.middle)
        self.assertEqual(len(self.tids(None, self.middle)), 10)

    def test_others_begin_meanwhile(self):
        """Halves and walks by oid, as many as they like."""
        younger = self.tids(self.middle)
        others = [self.storage.getTid(oid) for oid in self.oids if oid != self.oids[4]]
        for tid in others:
            self.tids(tid)
        for _ in range(2 * walk.KEPT):
            self.storage.record_iternext()
        self.change(*self.oids[:3])
        self.assertEqual(younger | self.tids(None, self.middle), self.all)

    def test_no_more_are_kept(self):
        """Then one of another time does, if it has all that is older; otherwise it is told."""
        self.enter(mock.patch.object(halves, 'KEPT', 1))
        sessions = self.opening()
        self.tids(self.middle)
        self.change(self.oids[7])
        earlier, later = self.storage.getTid(self.oids[2]), self.change(self.oids[6])
        younger = self.tids(earlier)
        self.assertEqual(self.tids(later), {self.oids[6]})
        self.assertEqual([session.broken for session in sessions], [False, True, True])
        self.change(*self.oids[:2])
        self.assertEqual(younger | self.tids(None, earlier), self.all)
        self.assertEqual(len(self.tids(None, self.middle)), 10)
        self.assertGone(later)
        self.nobody_comes()
        self.assertGone(later, earlier, self.middle)

    def test_two_begin_at_one_tid(self):
        first = self.tids(self.middle)
        self.change(*self.oids[:2])
        second = self.tids(self.middle)
        self.assertEqual(second - first, set(self.oids[:2]))
        self.change(self.oids[2])
        older = self.tids(None, self.middle)
        self.assertEqual((first | older, second | older), (self.all, self.all))
        self.nobody_comes()
        self.assertGone(self.middle)

    def test_a_tid_that_another_commit_reaches(self):
        """Of two snapshots the later one has more that is older: neither does for both."""
        with mock.patch.object(walk, '_tid_now', return_value=walk.MAX_TID):
            tid = p64(u64(self.storage.lastTransaction()) + (1 << 40))
            self.tids(tid)
            self.assertEqual(self.tids(tid), set())
            self.change(self.oids[0])
            self.assertEqual(self.tids(None, tid), self.all)
            self.tids(tid)
            self.assertGone(tid)

    def test_whoever_began_nothing(self):
        self.tids(self.middle)
        self.nobody_comes()
        self.change(self.oids[1])
        self.assertIn(self.oids[1], self.tids(None, self.storage.lastTransaction()))
        self.assertGone(self.middle)

    def test_it_is_gone_for_whatever_reason(self):
        sessions = self.opening()
        self.tids(self.middle)
        end(self, sessions[0])
        with self.assertRaisesRegex(StorageError, 'begin again'):
            self.tids(None, self.middle)
        self.assertGone(self.middle)
        self.tids(self.middle)
        self.assertEqual(len(self.tids(None, self.middle)), 10)
        view = self.storage.new_instance()
        self.tids(self.middle, storage=view)
        view.release()
        with self.assertRaises(Unavailable):
            view.iterator(None, self.middle)

    def test_the_process_forks(self):
        """The child has no half of it, is told so, and can begin again."""
        self.tids(self.middle)
        pid = os.fork()
        if not pid:
            status = 1
            with suppress(BaseException):
                self.assertGone(self.middle)
                status += len(self.tids(None, self.storage.getTid(self.oids[5])))
                self.tids(self.middle)
                status += len(self.tids(None, self.middle))
            os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 1 + 12 + 10)
        self.assertEqual(len(self.tids(None, self.middle)), 10)

    def test_few_are_remembered(self):
        with mock.patch.object(halves, 'REMEMBERED', 3), mock.patch.object(halves, 'KEPT', 2):
            for oid in self.oids[1:]:
                self.tids(self.storage.getTid(oid))
            self.assertEqual(len(self.storage.walks._halves._at), 3)
            self.assertEqual(len(self.tids(None, self.storage.getTid(self.oids[1]))), 4)

    def test_through_a_wrapper(self):
        """One whose iterator is a generator, which closes ours at its end."""
        storage = HexStorage(self.open_storage('wrapped'))
        db = DB(storage)
        self.addCleanup(db.close)
        for oid in self.oids[1:]:
            commit(storage, (oid, z64, state(0)))
        middle, every = storage.getTid(self.oids[4]), self.tids(storage=storage)
        younger = self.tids(middle, storage=storage)
        self.change(*self.oids[1:4], storage=storage)
        self.assertEqual(younger | self.tids(None, middle, storage=storage), every)


class Lost(Suite):
    """The session of a walk ends in its middle."""

    def test_it_is_told(self):
        for what in self.transactions, self.records, self.objects:
            with self.subTest(what.__name__):
                sessions = self.opening()
                going = what()
                next(going)
                end(self, sessions[-1])
                for _ in range(2):
                    with self.assertRaisesRegex((Unavailable, StorageError), 'lost before its end.*begin again'):
                        going.__next__()
                    if what == self.records:
                        going = iter(self.txn)

    def transactions(self):
        return self.storage.iterator()

    def records(self):
        [self.txn, *_] = self.storage.iterator()
        return iter(self.txn)

    def objects(self):
        following = [None]

        class Going:
            def __next__(this):
                *_, following[0] = self.storage.record_iternext(following[0])
        return Going()

    def test_other_storages_go_on(self):
        sessions = self.opening()
        going = self.storage.iterator()
        next(going)
        end(self, sessions[-1])
        with suppress(StorageError):
            list(going)
        self.assertEqual(len(list(self.storage.iterator())), OBJECTS)

    def test_the_process_forks(self):
        """The child cannot read on, and its end is not that of the parent's."""
        going = self.storage.iterator()
        next(going)
        *_, following = self.storage.record_iternext()
        pid = os.fork()
        if not pid:
            status = 1
            with suppress(BaseException):
                for read in lambda: next(going), lambda: self.storage.record_iternext(following):
                    try:
                        read()
                    except Unavailable:
                        status += 1
                del going, read
                gc.collect()
                status += len(list(self.storage.iterator()))
            os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 3 + OBJECTS)
        self.assertEqual(len(list(going)), OBJECTS - 1)
        self.storage.record_iternext(following)


cases(globals(), Halves, Lost, backends=FREE)
del Halves, Lost


class Slow(Suite):
    """The one who is told takes longer than the server's settings let a session be idle."""

    def test_it_goes_on(self):
        storage = relstore.RelStore(self.impatient_address(), keep_history=self.keep_history)
        self.addCleanup(storage.close)
        transactions = storage.iterator()
        first = next(transactions)
        *_, following = storage.record_iternext()
        with closing(storage.database.adapter.connect()) as other:
            other.run('BEGIN')
            other.all('SELECT 1')
            with self.assertRaises(StorageError):
                for _ in within('the server ends an idle session'):
                    time.sleep(1.5)
                    other.all('SELECT 1')
        self.assertEqual(len(list(first)), 2)
        self.assertEqual(len(list(transactions)), OBJECTS - 1)
        self.assertEqual(storage.record_iternext(following)[0], self.oids[1])


class SlowPostgreSQL(Slow):

    def impatient_address(self):
        options = '-c idle_in_transaction_session_timeout=1000'
        return relstore.PostgreSQL(f"{self.dsn()} options='{options}'", driver=self.driver)


class SlowMySQL(Slow):

    def impatient_address(self):
        watch = self.enter(closing(self.new_watch()))
        names = ['wait_timeout']
        if 'MariaDB' in watch.one('SELECT version()'):
            names += ['idle_transaction_timeout', 'idle_readonly_transaction_timeout']
        for name in names:
            before = watch.one(f'SELECT @@global.{name}')
            self.addCleanup(watch.rows, f'SET GLOBAL {name} = {before}')
            watch.rows(f'SET GLOBAL {name} = 1')
        return self.address()


cases(globals(), SlowPostgreSQL, backends=(Psycopg2HistoryFree, Psycopg3HistoryPreserving))
cases(globals(), SlowMySQL, backends=(*MYSQL[:4], *MYSQL[4:]))
del Slow, SlowPostgreSQL, SlowMySQL


COMMIT = """
import sys
import ZODB.config
db = ZODB.config.databaseFromURL(sys.argv[1])
with db.transaction() as connection:
    connection.root()[sys.argv[2]]['changed'] = 1
db.close()
"""


class Collection(Commands):
    """multi-zodb-gc of zc.zodbdgc, while another process commits: root -> x -> y."""

    def setUp(self):
        if importlib.util.find_spec('zc.zodbdgc') is None:
            cannot_run(self, 'zc.zodbdgc is not installed')
        super().setUp()
        self.conf = self.write('site.conf', '%import relstore', '<zodb>', self.section('pack-gc false'), '</zodb>')
        self.open_storage().close()
        with closing(ZODB.config.databaseFromURL(str(self.conf))) as db:
            for build in self.build, self.unlink:
                with db.transaction() as connection:
                    build(connection.root())
                with db.transaction() as connection:
                    self.newest = connection.root()._p_serial
            with db.transaction() as connection:
                self.y = connection.root()['x']['y']._p_oid
        self.committed = []

    def build(self, root):
        root['x'] = PersistentMapping(y=PersistentMapping())
        root['gone'] = PersistentMapping()
        for n in range(9):
            root[f'other{n}'] = PersistentMapping()

    def unlink(self, root):
        self.gone = root['gone']._p_oid
        del root['gone']

    def commit_elsewhere(self):
        subprocess.run([sys.executable, '-c', COMMIT, str(self.conf), 'x'], env=environment(), check=True)
        self.committed.append(True)

    def collect(self, when):
        """Collect garbage, and commit in another process when the oid-th record's references are asked for."""
        import zc.zodbdgc
        getrefs, asked = zc.zodbdgc.getrefs, []

        def getrefs_and_commit(*arguments):
            asked.append(arguments)
            if len(asked) == when:
                self.commit_elsewhere()
            return getrefs(*arguments)

        before = os.getcwd()
        os.chdir(self.here)     # it makes a file there
        try:
            with mock.patch.object(zc.zodbdgc, 'getrefs', getrefs_and_commit):
                # To the newest of all transactions but one: that is what is young.
                return zc.zodbdgc.gc(str(self.conf), ptid=p64(u64(self.newest) - 1), return_bad=True)
        finally:
            os.chdir(before)

    def test_what_is_reachable_stays(self):
        for name in 'TRANSACTIONS', 'RECORDS':
            patch = mock.patch.object(iterate, name, 1)
            patch.start()
            self.addCleanup(patch.stop)
        for when in 1, 2, 3, 4:     # the root; the root as a young object; after that the old ones
            with self.subTest(when):
                found = self.collect(when)
                self.assertTrue(self.committed.pop())
                if when == 1 and not self.keep_history:
                    self.assertEqual(found, [('', u64(self.gone))])
                with closing(self.open_storage()) as storage:
                    storage.load(self.y)
                    if not self.keep_history:       # where it is, an old state of the root refers to it
                        with self.assertRaises(POSKeyError):
                            storage.load(self.gone)


cases(globals(), Collection, backends=(
    SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryFree, Psycopg2PooledHistoryFree, PyMySQLHistoryFree))
del Suite, Collection
