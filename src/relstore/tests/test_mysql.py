"""MySQL and MariaDB under many writers: who waits for whom, and what becomes of a commit whose connection is lost, is
a deadlock's victim, or waits too long.

test_faults ends a connection at every statement and every byte; here it is ended where the server is known to be in
the middle of something. What MySQL and PostgreSQL have in common, round trips among it, is in
test_roundtrips, test_locks and test_outcome.
"""
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest import TestCase, mock

from transaction.interfaces import TransientError
from ZODB.POSException import ConflictError, ReadConflictError, StorageError
from ZODB.utils import p64, u64, z64

import relstore
from relstore.adapters.commits.mysql import MySQLCommit
from relstore.errors import ConfigurationError, Deadlock, Disconnected, LockTimeout
from relstore.sessions.session import Session
from relstore.tests.support.backends import MYSQL, PYMYSQL_ON_MYSQL, cases
from relstore.tests.support.commits import commit, voted
from relstore.tests.support.objects import exists
from relstore.tests.support.proxy import join_all_but
from relstore.tests.support.records import counter, state, value_of

BOTH_DRIVERS = MYSQL + PYMYSQL_ON_MYSQL
ONE_DRIVER = tuple(backend for backend in MYSQL if backend.driver == 'mysqlclient')     # where it does not matter


class Suite(TestCase):

    def setUp(self):
        super().setUp()
        self._threads = ThreadPoolExecutor(4)
        self.addCleanup(self._threads.shutdown)
        self.other = self.opened()
        self.watch = self.watching()

    def opened(self, **options):
        storage = self.open_storage(**{'commit_lock_timeout': 20} | options)
        self.addCleanup(storage.close)
        return storage

    def watching(self):
        watch = self.new_watch()
        self.addCleanup(watch.close)
        return watch

    def behind_proxy(self, **options):
        """Return a storage and the proxy through which it talks to its server."""
        self.addCleanup(join_all_but, threading.enumerate())
        proxy = self.new_proxy()
        proxy.start()
        self.addCleanup(proxy.stop)
        storage = relstore.RelStore(self.address_through(proxy), keep_history=self.keep_history,
                                    **{'commit_lock_timeout': 20} | options)
        self.addCleanup(storage.close)
        return storage, proxy

    def started(self, work: Callable, *arguments) -> Future:
        return self._threads.submit(work, *arguments)

    def objects(self, count=1, record=None) -> list[bytes]:
        """Return the oids of new objects, in order."""
        oids = sorted(self.other.new_oid() for _ in range(count))
        commit(self.other, *((oid, z64, record or state(0)) for oid in oids))
        return oids

    def finished(self, storage, txn) -> bytes | Exception:
        """Return the tid, or what tpc_finish raised."""
        try:
            return storage.tpc_finish(txn)
        except Exception as e:
            storage.tpc_abort(txn)
            return e

    def value(self, oid) -> int:
        """Return what is committed now."""
        return value_of(self.other.load(oid)[0])


class NobodyWaits(Suite):
    """Two processes stand between vote and finish at once: if one had to wait for the other, in this single thread,
    it would get a LockTimeout.
    """
    TOP = 100_000

    def setUp(self):
        super().setUp()
        self.one, self.two = self.opened(commit_lock_timeout=1), self.opened(commit_lock_timeout=1)

    def _together(self, first: list, second: list) -> None:
        """Commit both lists of (oid, base): vote, vote, finish in the other order; look that all is there."""
        changes = [[(oid, base, state(n)) for oid, base in pairs] for n, pairs in ((1, first), (2, second))]
        votes = [voted(storage, *some) for storage, some in zip((self.one, self.two), changes, strict=True)]
        later = self.two.tpc_finish(votes[1])
        self.assertGreater(self.one.tpc_finish(votes[0]), later)
        for oid, _, record in changes[0] + changes[1]:
            self.assertEqual(self.other.load(oid)[0], record)

    def _fill(self) -> bytes:
        """Leave an object at every second oid of two thousand; return their tid."""
        return commit(self.other, *((p64(n), z64, state(0)) for n in range(self.TOP, self.TOP + 2000, 2)))

    def _on_empty_and_filled(self, work: Callable) -> None:
        for fill in (lambda: None, self._fill):
            fill()
            with self.subTest(fill):
                work()

    def test_new_objects(self):
        def work():
            self._together([(self.one.new_oid(), z64) for _ in range(20)],
                           [(self.two.new_oid(), z64) for _ in range(20)])

        self._on_empty_and_filled(work)

    def test_new_objects_at_neighbouring_oids_that_came_from_elsewhere(self):
        """Those have to be locked, though they are not there."""
        for place, fill in ((0, lambda: None), (self.TOP, self._fill), (self.TOP + 3000, lambda: None)):
            fill()
            with self.subTest(place):
                oids = [p64(place + n) for n in range(1, 40, 2)]
                self._together([(oid, z64) for oid in oids[::2]], [(oid, z64) for oid in oids[1::2]])

    def test_neighbours_that_are_changed(self):
        tid = self._fill()
        oids = [p64(self.TOP + n) for n in range(0, 2000, 2)]
        for step in (1, 20, 400):       # so few, and so many that their list is sent in several statements
            some = oids[400:400 + step] if step < 400 else oids
            with self.subTest(step):
                bases = {oid: self.other.getTid(oid) for oid in some}
                self._together([(oid, bases[oid]) for oid in some[::2]], [(oid, bases[oid]) for oid in some[1::2]])
        self.assertGreater(self.other.getTid(oids[0]), tid)

    def test_new_objects_beside_changed_ones(self):
        tid = self._fill()
        olds = [p64(self.TOP + n) for n in range(0, 40, 2)]
        self._together([(oid, tid) for oid in olds], [(p64(u64(oid) + 1), z64) for oid in olds])
        last = p64(self.TOP + 1998)
        self._together([(last, tid)], [(p64(self.TOP + 1999), z64), (p64(self.TOP + 2000), z64)])

    def test_oids_are_given_while_others_vote(self):
        """The counter's table is no queue, either: not for somebody who voted, nor for whoever reserves."""
        txn = voted(self.one, (p64(10 * self.TOP), z64, state(1)), (self.one.new_oid(), z64, state(1)))
        oids = {u64(self.two.new_oid()) for _ in range(100)}
        self.assertGreater(min(oids), 10 * self.TOP)
        self.one.tpc_finish(txn)


class Creators(Suite):
    """Two create one object."""

    def test_the_second_waits_and_is_told(self):
        for oid in map(p64, (500_000, 499_999, 500_002, 1_000_000)):    # on an empty table, before, after, far away
            with self.subTest(oid=oid):
                first = voted(self.other, (oid, z64, state(1)))
                mine = self.opened()
                second = self.started(voted, mine, (oid, z64, state(2)))
                self.watch.until_somebody_waits()
                self.assertFalse(second.done())
                tid = self.other.tpc_finish(first)
                with self.assertRaises(ConflictError) as raised:
                    second.result(30)
                self.assertEqual(raised.exception.oid, oid)
                self.assertEqual(self.other.load(oid), (state(1), tid))
                self.assertEqual(mine.database.pool.lent, 0)

    def test_the_second_goes_on_where_the_first_gives_up(self):
        oid = p64(500_000)
        first = voted(self.other, (oid, z64, state(1)))
        mine = self.opened()
        second = self.started(voted, mine, (oid, z64, state(2)))
        self.watch.until_somebody_waits()
        self.other.tpc_abort(first)
        tid = mine.tpc_finish(second.result(30))
        self.assertEqual(self.other.load(oid), (state(2), tid))
        self.assertEqual(self.watch.rows('SELECT * FROM relstore_lock'), [])


class OldVotes(Suite):
    """The rows in which sessions say how their commits ended."""

    def test_they_are_removed_without_waiting(self):
        """By whoever opens the storage, while others are about to commit."""
        for _ in range(20):
            with closing(self.opened()) as storage:
                commit(storage, (storage.new_oid(), z64, state(1)))
        self.watch.rows('UPDATE relstore_commit SET voted = voted - INTERVAL 2 DAY')
        self.watch.rows('ANALYZE TABLE relstore_commit')        # knowing how many go, it could read them all
        self.assertGreaterEqual(self.watch.one('SELECT count(*) FROM relstore_commit'), 20)
        mine = self.opened(commit_lock_timeout=1)
        txn = voted(mine, (mine.new_oid(), z64, state(1)))
        self.started(self.opened).result(10)
        mine.tpc_finish(txn)
        self.assertEqual(self.watch.one('SELECT count(*) FROM relstore_commit WHERE session <> 0'), 1)


    def test_who_votes_meanwhile_keeps_its_row(self):
        """A session that was idle for days votes just when its old row is about to be removed."""
        [oid] = self.objects()
        adapter = self.other.database.adapter
        mine = self.opened()
        tid = commit(mine, (oid, self.other.getTid(oid), state(1)))
        self.watch.rows('UPDATE relstore_commit SET voted = voted - INTERVAL 2 DAY')
        with self.other.database.pool.session() as session:
            old = [key for key, in session.script(adapter.sql.old_commits)]
            self.assertIn(mine.database.pool.idle[-1].key, old)
            vote = self.started(voted, mine, (oid, tid, state(2)))
            self.watch.until_somebody_waits()
            session.results(adapter.sql.forget_commits, (adapter.oid_list(old),))
        txn = vote.result(20)
        with unanswered(mine):
            later = self.finished(mine, txn)
        self.assertEqual(self.other.load(oid), (state(2), later))


@contextmanager
def unanswered(storage, sent=True):
    """Lose the connection when finish has committed; or before it was sent."""
    def finish(commit):
        if sent:
            real(commit)
        raise Disconnected('lost by this test')

    real = MySQLCommit.finish
    with mock.patch.object(MySQLCommit, 'finish', finish):
        yield


class Asking(Suite):
    """What became of a commit is asked for on another connection."""

    def setUp(self):
        super().setUp()
        [self.oid] = self.objects()
        self.mine = self.opened()
        self.base = self.other.getTid(self.oid)

    def test_a_deadlock_is_no_answer(self):
        """A node of a cluster may end what asks, in favour of what it asks about."""
        def results(session, sql, parameters=()):
            if sql == self.mine.database.adapter.sql.outcome and len(ended) < 3:
                ended.append(sql)
                raise Deadlock(message='of this test')
            return real(session, sql, parameters)

        ended, real = [], Session.results
        txn = voted(self.mine, (self.oid, self.base, state(1)))
        with unanswered(self.mine), mock.patch.object(Session, 'results', results):
            tid = self.finished(self.mine, txn)
        self.assertEqual(len(ended), 3)
        self.assertEqual(self.other.load(self.oid), (state(1), tid))

    def test_what_was_not_sent_was_not_stored(self):
        """Also by a session that had committed before."""
        for value in (1, 2):
            txn = voted(self.mine, (self.oid, self.base, state(-1)))
            with unanswered(self.mine, sent=False):
                self.assertIsInstance(self.finished(self.mine, txn), Disconnected)
            self.base = commit(self.mine, (self.oid, self.base, state(value)))
            self.assertEqual(self.value(self.oid), value)

    def test_a_transaction_that_is_gone_writes_nothing(self):
        """Its locks are gone too, and what it was compared with may have changed."""
        txn = voted(self.mine, (self.oid, self.base, state(-1)))
        self.mine.committing.session.rollback()
        self.assertIsInstance(self.finished(self.mine, txn), StorageError)
        self.assertEqual(self.other.load(self.oid), (state(0), self.base))
        self.watch.until_nothing_is_open()
        commit(self.mine, (self.oid, self.base, state(1)))


class Reconnecting(Suite):

    def test_the_client_library_makes_a_new_connection(self):
        """As an option file may tell it to: the new one has not been told anything, so it is not used."""
        with tempfile.NamedTemporaryFile('w', suffix='.cnf') as options:
            options.write('[client]\nreconnect = 1\n')
            options.flush()
            address = relstore.MySQL(**self.arguments(), driver=self.driver, read_default_file=options.name)
            storage = relstore.RelStore(address, keep_history=self.keep_history)
            self.addCleanup(storage.close)
            [oid] = self.objects()
            with self.assertRaises(Disconnected), closing(storage.database.adapter.connect()) as session:
                self.watch.terminate(session._connection.thread_id())
                session.all('SELECT 1')
            self.watch.terminate(storage.database.pool.idle[-1]._connection.thread_id())
            self.assertEqual(value_of(storage.load(oid)[0]), 0)


class RelStorageBeside(Suite):
    """Another program locks the same rows, and is heavier: InnoDB ends the transaction that has changed less."""

    def setUp(self):
        super().setUp()
        self.mine = self.opened()
        self.low, self.high = self.objects(2)
        self.base = self.other.getTid(self.low)
        self.third = self.watching()
        self.third.rows('START TRANSACTION')
        self.third.rows('INSERT INTO object_ref (zoid, tid, to_zoid) VALUES ' +
                        ', '.join(f'({n}, 1, {n})' for n in range(1000)))

    def _lock(self, oid) -> None:
        table = 'current_object' if self.keep_history else 'object_state'
        self.third.rows(f'SELECT tid FROM {table} WHERE zoid = %s FOR UPDATE', u64(oid))

    def _changes(self):
        return (self.low, self.base, state(1)), (self.high, self.base, state(1))

    def test_a_deadlock_in_vote_ends_with_the_other(self):
        """It locks objects in the other order. The vote is asked again, and waits."""
        self._lock(self.high)
        vote = self.started(voted, self.mine, *self._changes())
        self.watch.until_somebody_waits()
        self._lock(self.low)
        self.watch.until_somebody_waits()
        self.assertFalse(vote.done())
        self.third.rows('ROLLBACK')
        self.finished(self.mine, vote.result(30))
        self.assertEqual(self.mine.commit_stats()['deadlocks'], 1)
        self.assertEqual([self.value(oid) for oid in (self.low, self.high)], [1, 1])

    def test_a_deadlock_in_finish_is_a_conflict(self):
        """It takes the commit lock, and wants an object after that."""
        txn = voted(self.mine, *self._changes())
        self.third.rows('SELECT tid FROM commit_row_lock FOR UPDATE')
        finish = self.started(self.finished, self.mine, txn)
        self.watch.until_somebody_waits()
        self._lock(self.low)
        error = finish.result(30)
        self.third.rows('ROLLBACK')
        self.assertIsInstance(error, Deadlock)
        self.assertIsInstance(error, ConflictError)
        self.assertIn('eadlock', str(error))
        self.assertEqual([self.value(oid) for oid in (self.low, self.high)], [0, 0])
        self.assertEqual(self.mine.database.pool.lent, 0)
        commit(self.mine, *self._changes())
        self.assertEqual([self.value(oid) for oid in (self.low, self.high)], [1, 1])

    def test_a_lock_timeout_is_transient(self):
        """The second that the option says: no more, and less cannot be said here."""
        impatient = self.opened(commit_lock_timeout=1)
        self._lock(self.high)
        began = self.watch.now()
        with self.assertRaises(LockTimeout) as raised:
            voted(impatient, *self._changes())
        self.assertGreater(self.watch.now() - began, 0.9)
        self.assertLess(self.watch.now() - began, 5)
        self.assertIsInstance(raised.exception, TransientError)
        self.assertNotIsInstance(raised.exception, ConflictError)
        self.assertEqual(impatient.database.pool.lent, 0)
        self.assertEqual(self.watch.open_transactions(), 1, 'that of the other program')
        self.third.rows('ROLLBACK')
        commit(impatient, *self._changes())
        self.assertEqual(self.value(self.high), 1)

    def test_a_lock_timeout_where_an_oid_is_created(self):
        impatient = self.opened(commit_lock_timeout=1)
        oid = p64(500_000)
        txn = voted(self.mine, (oid, z64, state(1)))
        with self.assertRaises(LockTimeout):
            voted(impatient, (oid, z64, state(2)))
        self.mine.tpc_finish(txn)
        self.assertEqual(self.value(oid), 1)


class Ended(Suite):
    """A connection is ended: by KILL, or on the way, where the server does not see it at once.

    Nothing is half done, success is told exactly if it was stored, nothing stays behind, and the next transaction
    works.
    """

    def setUp(self):
        super().setUp()
        self.mine, self.proxy = self.behind_proxy()
        self.view = self.mine.new_instance()
        self.third = self.watching()
        self.oids = self.objects(2)
        self.count = 0
        self._proceed()

    def _each_way(self, work: Callable) -> None:
        """work(end) has to call end(the server's number of the connection)."""
        for end in (self.watch.terminate, self._cut):
            with self.subTest(end=end.__name__):
                self.view = self.mine.new_instance()
                try:
                    work(end)
                finally:
                    self.proxy.resume()
                    self.third.release_commit_lock()
                    self.view.release()
                self._nothing_stays_behind()

    def _cut(self, pid: int) -> None:
        self.proxy.cut()

    def _pid(self, session) -> int:
        """Return the server's number of a connection that nobody is using."""
        return session._connection.thread_id()

    def _busy(self) -> int:
        """Return the number of the only connection that is not idle."""
        return self.watch.one('SELECT id FROM information_schema.processlist WHERE db = DATABASE() '
                              "AND command <> 'Sleep' AND id <> CONNECTION_ID()")

    def _nothing_stays_behind(self):
        self.watch.until_nothing_is_open()
        self.assertEqual(self.mine.database.pool.lent, 0)
        ours = 2 + sum(len(storage.database.pool.idle) for storage in (self.mine, self.other))
        self.watch.until(f'(SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()) <= {ours}')
        self._proceed()

    def _proceed(self):
        """Commit the next values by an ordinary transaction."""
        self.count += 1
        self.view.poll_invalidations()
        commit(self.view, *self._changes(self.count))
        self.assertEqual([self.value(oid) for oid in self.oids], [self.count] * 2)
        self.base = self.other.getTid(self.oids[0])

    def _changes(self, value):
        return [(oid, self.other.getTid(oid), state(value)) for oid in self.oids]

    def _told(self, outcome, stored: bool):
        """Was it stored, as expected, and told as it was?"""
        tids = {self.other.getTid(oid) for oid in self.oids}
        self.assertEqual(len(tids), 1, 'half of it was stored')
        self.assertEqual([self.value(oid) for oid in self.oids], [-1 if stored else self.count] * 2)
        if stored:
            self.assertEqual(tids, {outcome})
        else:
            self.assertIsInstance(outcome, TransientError)

    def test_between_transactions(self):
        """Nobody notices."""
        def work(end):
            [session] = self.mine.database.pool.idle
            end(self._pid(session))
            self.view.poll_invalidations()
            self.assertEqual(value_of(self.view.load(self.oids[0])[0]), self.count)
            self.view.afterCompletion()
            [session] = self.mine.database.pool.idle
            end(self._pid(session))
            self._told(commit(self.view, *self._changes(-1)), stored=True)

        self._each_way(work)

    def test_while_reading(self):
        """Where history is kept a new connection sees the same; else the snapshot is gone with the old one."""
        self.mine.close()
        self.mine, self.proxy = self.behind_proxy(cache_local_mb=0)

        def work(end):
            self.view.poll_invalidations()
            self.view.load(self.oids[0])
            end(self._pid(self.view.view.snapshot.session or self.mine.database.pool.idle[0]))
            if self.keep_history:
                self.assertEqual(value_of(self.view.load(self.oids[1])[0]), self.count)
            else:
                with self.assertRaises((TransientError, ReadConflictError)):
                    self.view.load(self.oids[1])
            self.view.afterCompletion()

        self._each_way(work)

    def test_in_vote(self):
        """Nothing was done with it yet: another connection votes once more, and if that is lost too, it is told."""
        for times, stored in ((1, True), (2, False)):
            def work(end):
                first = voted(self.other, *self._changes(self.count))
                try:
                    vote = self.started(voted, self.view, *self._changes(-1))
                    for _ in range(times):
                        self.watch.until_somebody_waits()
                        session, pid = self.view.committing.session, self._busy()
                        end(pid)
                        self.watch.terminate(pid)   # who was cut off would go on waiting, with half of the locks
                        self.watch.until(lambda session=session: vote.done()
                                         or self.view.committing.session not in (None, session))
                    if stored:
                        self.watch.until_somebody_waits()
                finally:
                    self.other.tpc_abort(first)
                self._told(self.finished(self.view, vote.result(30)) if stored else vote.exception(30), stored)

            self._each_way(work)

    def test_between_vote_and_finish(self):
        def work(end):
            txn = voted(self.view, *self._changes(-1))
            end(self._pid(self.view.committing.session))
            self._told(self.finished(self.view, txn), stored=False)

        self._each_way(work)

    def test_in_finish(self):
        """The server waits for the commit lock: one that is killed gives up, and one that is alone goes on."""
        def work(end):
            txn = voted(self.view, *self._changes(-1))
            pid = self._pid(self.view.committing.session)
            self.third.take_commit_lock()
            finish = self.started(self.finished, self.view, txn)
            self.watch.until_somebody_waits()
            end(pid)
            lost = end == self._cut
            if lost:
                self.watch.until_outcome_is_asked()
                self.assertFalse(finish.done())
            self.third.release_commit_lock()
            self._told(finish.result(30), stored=lost)

        self._each_way(work)

    def test_after_commit(self):
        """The answer is held back; the connection is ended when the commit can be seen."""
        def work(end):
            txn = voted(self.view, *self._changes(-1))
            pid = self._pid(self.view.committing.session)
            self.proxy.pause(sent=False)
            finish = self.started(self.finished, self.view, txn)
            self.watch.until('(SELECT max(tid) FROM object_state) > %s', u64(self.base))
            self.assertFalse(finish.done())
            end(pid)
            self.proxy.resume()
            self._told(finish.result(30), stored=True)

        self._each_way(work)

    def test_in_the_middle_of_a_large_transaction(self):
        """Its pieces lie in a temporary table, which ends with the connection."""
        self.mine.database.adapter.message_size = 300

        def work(end):
            new = [self.view.new_oid() for _ in range(20)]
            txn = voted(self.view, *self._changes(-1), *((oid, z64, state(-1)) for oid in new))
            end(self._pid(self.view.committing.session))
            self._told(self.finished(self.view, txn), stored=False)
            self.assertFalse([oid for oid in new if exists(self.other, oid)])

        self._each_way(work)


class Refused(Suite):
    """The server answers COMMIT with an error, as the nodes of a cluster do where another one was faster.

    The errors are real, though it is SIGNAL that raises them: no cluster is here. test_galera has one of MariaDB.
    """

    def _refused(self, code: int) -> Exception:
        """Return what a commit ends with for such an error."""
        mine = self.opened()
        sql = mine.database.adapter.sql
        sql.end_finish, count = re.subn(
            r'^COMMIT\b', f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = 'by the test'",
            sql.end_finish, flags=re.MULTILINE)
        self.assertEqual(count, 1)
        [oid] = self.objects()
        tid = self.other.getTid(oid)
        error = self.finished(mine, voted(mine, (oid, tid, state(1))))
        self.assertEqual(self.other.load(oid), (state(0), tid))
        self.assertEqual(mine.database.pool.lent, 0)
        self.watch.until_nothing_is_open()
        commit(self.other, (oid, tid, state(2)))
        return error

    def test_by_certification(self):
        """Galera: 1213. Group Replication: 3101, and 1180 in older servers. It is a conflict, to be tried again."""
        for code in (1213, 1180, 3101):
            with self.subTest(code):
                error = self._refused(code)
                self.assertIsInstance(error, ConflictError)
                self.assertIn('by the test', str(error))

    def test_for_now(self):
        """No quorum, or nobody to write to: another time, or another server."""
        for code in (1047, 1205, 1290, 1836):
            with self.subTest(code):
                error = self._refused(code)
                self.assertIsInstance(error, TransientError)
                self.assertNotIsInstance(error, ConflictError)

    def test_for_good(self):
        """The disk is full, say: who tries again meets the same."""
        for code in (1021, 1114):
            with self.subTest(code):
                error = self._refused(code)
                self.assertIsInstance(error, StorageError)
                self.assertNotIsInstance(error, TransientError)


class Opening(Suite):

    def test_many_processes_at_once(self):
        """Each sees to it that the count of oids is ahead of what is used, and that is one row."""
        with closing(self.open_storage()) as storage:
            commit(storage, *((storage.new_oid(), z64, state(n)) for n in range(200)))
        together = threading.Barrier(8)

        def open_and_close():
            for _ in range(10):
                together.wait(60)
                self.open_storage().close()

        with ThreadPoolExecutor(8) as threads:
            for future in [threads.submit(open_and_close) for _ in range(8)]:
                future.result(120)


    def test_interrupted_before_the_row_of_a_table_was_there(self):
        for storage in self.other, self.opened():
            storage.close()
        self.watch.rows('DELETE FROM relstore_sweep')
        with self.assertRaisesRegex(ConfigurationError, 'lacks relstore_sweep, and create-schema is false; '):
            self.opened(create_schema=False)
        with closing(self.opened()) as storage:
            commit(storage, (storage.new_oid(), z64, state(1)))


class Sockets(Suite):

    def test_no_certificates_are_read_for_a_unix_socket(self):
        arguments = self.arguments() | {'driver': 'pymysql'}
        if 'unix_socket' not in arguments:
            self.skipTest('this staging server is reached through TCP')

        def open_and_close(**options):
            relstore.RelStore(relstore.MySQL(**arguments, **options), keep_history=self.keep_history).close()

        with (mock.patch('ssl.create_default_context', side_effect=ZeroDivisionError),
              tempfile.NamedTemporaryFile() as file):
            open_and_close()
            with self.assertRaises(ZeroDivisionError):
                open_and_close(read_default_file=file.name)     # which could ask for TLS


class Oids(Suite):

    def test_any_number_of_them_is_one_round_trip(self):
        mine, proxy = self.behind_proxy()
        found = []
        with mine.database.pool.session() as session:
            for count in (1, 2, 100, 1024):
                proxy.reset()
                blocks = mine.database.adapter.new_oids(session, count)
                self.assertEqual((len(blocks), proxy.round_trips), (count, 1))
                found += blocks
        self.assertEqual(len(set(found)), len(found))
        self.assertEqual(found, sorted(found))

    def test_nobody_gets_what_another_has(self):
        """From many threads and two processes, with the server's own step between numbers."""
        with closing(self.opened()) as mine:
            def take(storage):
                return [storage.new_oid() for _ in range(500)]

            work = [self.started(take, storage) for storage in (mine, self.other) * 2]
            oids = [oid for future in work for oid in future.result(60)]
        self.assertEqual(len(set(oids)), 2000)


class Counters(Suite):

    def test_nothing_is_lost_among_writers(self):
        """Conflicts, deadlocks and timeouts are all told; what was told to be stored is."""
        oids = self.objects(3, counter(0))
        storages = [self.opened() for _ in range(4)]

        def work(storage):
            done = 0
            view = storage.new_instance()
            for n in range(25):
                try:
                    view.poll_invalidations()
                    some = oids if n % 2 else oids[::-1]
                    records = {oid: view.load(oid) for oid in some}
                    commit(view, *((oid, tid, counter(value_of(record) + 1)) for oid, (record, tid)
                                   in records.items()))
                    done += 1
                except TransientError:
                    continue
            view.release()
            return done

        done = sum(future.result(120) for future in [self.started(work, storage) for storage in storages])
        self.assertGreater(done, 0)
        self.assertEqual([self.value(oid) for oid in oids], [done] * 3)


cases(globals(), NobodyWaits, Creators, OldVotes, Opening, Oids, Counters, Reconnecting, backends=ONE_DRIVER)
cases(globals(), Sockets, backends=ONE_DRIVER[:1] + ONE_DRIVER[2:3])
cases(globals(), RelStorageBeside, Ended, Refused, Asking, backends=BOTH_DRIVERS)
del Suite, NobodyWaits, Creators, OldVotes, Opening, Asking, Reconnecting, RelStorageBeside, Ended, Refused, Oids
del Counters, Sockets
