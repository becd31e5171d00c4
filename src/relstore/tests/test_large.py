"""Large transactions: what they take of the client's memory and of the server's locks, and whom they keep waiting."""
import io
import json
import os
import subprocess
import sys
from contextlib import closing, redirect_stdout
from unittest import TestCase
from unittest.mock import patch

import psycopg2
from persistent import Persistent
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError
from ZODB.tests.StorageTestBase import zodb_pickle, zodb_unpickle
from ZODB.utils import z64

import relstore
from relstore.adapters.commits.postgresql import PostgreSQLCommit
from relstore.adapters.postgresql import PostgreSQLAdapter
from relstore.cli.main import main
from relstore.errors import ConfigurationError, LockTimeout, OutOfLocks, Unavailable
from relstore.sessions.session import Session
from relstore.tests.support import large
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.layers import Processes
from relstore.tests.support.records import counter, state, value_of
from relstore.tests.support.servers import PostgreSQLServer, require_postgresql
from relstore.tests.support.servers.server import SharedServer
from relstore.tests.support.watch import Watch

OBJECT_LOCKS = ("SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database "
                "WHERE locktype = 'advisory' AND datname = current_database() AND classid = 0")
FEW_LOCKS = {'max_connections': 20, 'max_locks_per_transaction': 10}


def measured(test: TestCase, kind: str, arguments: dict, keep_history: bool, count: int, size: int) -> int:
    """Commit `count` new objects and change them, in another process; return the megabytes that it needed."""
    options = {'keep_history': keep_history}
    done = subprocess.run([sys.executable, '-m', large.__name__, json.dumps([kind, arguments, options, count, size])],
                          capture_output=True, text=True,
                          env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)})       # buildout's eggs too
    test.assertEqual(done.returncode, 0, done.stderr)
    return int(done.stdout)


class Memory(TestCase):
    """50 MB of states in a process that has 30 MB before."""

    def test_states_are_on_disk(self):
        kind = type(self.address()).__name__
        arguments = {'data_dir': str(self._directory / 'main')} if kind == 'SQLite' else self.arguments()
        if kind == 'MySQL':
            arguments['driver'] = self.driver
        self.assertLess(measured(self, kind, arguments, self.keep_history, 5_000, 10_000), 125)


class Afterwards(TestCase):
    """On SQLite a large transaction reads without the file mapped into memory; nobody else does."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)

    def mapped(self) -> int:
        with self.storage.database.pool.session() as session:
            [[size]] = session.all('PRAGMA mmap_size')
        return size

    def test_others_read_as_fast_as_ever(self):
        before = self.mapped()
        large = relstore.adapters.commits.sqlite.LARGE_OBJECTS
        changes = [(self.storage.new_oid(), z64, state(1)) for _ in range(large + 1)]
        tid = commit(self.storage, *changes)
        self.assertEqual(self.mapped(), before)
        with self.assertRaises(ConflictError):
            commit(self.storage, *changes)
        self.assertEqual(self.mapped(), before)
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        for oid, _, record in changes:
            self.storage.store(oid, tid, record, '', txn)
        self.storage.tpc_vote(txn)
        self.assertEqual(self.storage.committing.session.all('PRAGMA mmap_size'), [(0,)])
        self.storage.tpc_abort(txn)
        self.assertEqual(self.mapped(), before)
        self.assertGreater(before, 0)


class ManyConflicts(TestCase):
    """Not all states that others have committed are in memory at once."""

    def test_all_are_resolved(self):
        storage, other = self.open_storage(), self.open_storage()
        self.addCleanup(storage.close)
        self.addCleanup(other.close)
        oids = [storage.new_oid() for _ in range(250)]
        base = commit(storage, *((oid, z64, counter(0)) for oid in oids))
        commit(other, *((oid, base, counter(n)) for n, oid in enumerate(oids)))
        adapter, seen = storage.database.adapter, []

        class Noted(adapter.commit_type):
            def vote(self, ballot):
                seen.append(super().vote(ballot))
                return seen[-1]

        with patch.object(adapter, 'commit_type', Noted):
            tid = commit(storage, *((oid, base, counter(1000)) for oid in oids))
        [verdict] = seen
        self.assertEqual([held is not None for *_, held in verdict.conflicts], [True] * 100 + [False] * 150)
        self.assertEqual([value_of(other.loadSerial(oid, tid)) for oid in oids], [1000 + n for n in range(250)])


class DefaultServer(TestCase):
    """PostgreSQL with the settings that it comes with."""
    layer = Processes

    def setUp(self):
        require_postgresql(self)
        self.server = PostgreSQLServer({'max_connections': 100})
        self.server.start()
        self.addCleanup(self.server.stop)

    def test_more_objects_than_locks(self):
        """RELSTORE_TEST_LARGE=100000 takes half a minute, and 160 MB."""
        dsn = self.server.create_database('large')
        count = int(os.environ.get('RELSTORE_TEST_LARGE', '20000'))
        self.assertLess(measured(self, 'PostgreSQL', {'dsn': dsn}, True, count, 500), 110 if count <= 20_000 else 200)


class Ahead(TestCase):
    """What is large is sent before others have to wait."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage(commit_lock_timeout=1)
        self.addCleanup(self.storage.close)
        self.storage.database.adapter.message_size = 10_000
        self.other = self.open_storage(commit_lock_timeout=1)
        self.addCleanup(self.other.close)
        self.oids = [self.storage.new_oid() for _ in range(100)]

    def meanwhile(self, act):
        """Have act() called when the first piece was sent."""
        sent, kind = [], PostgreSQLCommit
        send_ahead = kind.send_ahead

        def send(self, batches):
            def interrupted():
                for batch in batches:
                    yield batch
                    if not sent:
                        act()
                    sent.append(len(batch))
            return send_ahead(self, interrupted())

        with patch.object(kind, 'send_ahead', send):
            yield
        self.assertGreater(len(sent), 1)

    def test_others_commit_meanwhile(self):
        """And what they have changed is resolved, and sent again."""
        first = commit(self.storage, *((oid, z64, counter(1)) for oid in self.oids))
        self.storage.sync()
        changed = []

        def change():
            changed.append(commit(self.other, (self.oids[7], first, counter(11))))

        txn = TransactionMetaData()
        for _ in self.meanwhile(change):
            self.storage.tpc_begin(txn)
            for oid in self.oids:
                self.storage.store(oid, first, counter(101) + b' ' * 500, '', txn)
            resolved = self.storage.tpc_vote(txn)
        tid = self.storage.tpc_finish(txn)
        self.assertEqual(resolved, [self.oids[7]])
        self.assertLess(first, changed[0])
        self.assertLess(changed[0], tid)
        found = {oid: self.other.loadSerial(oid, tid) for oid in self.oids}
        self.assertEqual({oid: value_of(record) for oid, record in found.items()},
                         {oid: 111 if oid == self.oids[7] else 101 for oid in self.oids})

    def test_what_cannot_be_resolved(self):
        """is a conflict, and nothing is left of it for the next."""
        first = commit(self.storage, *((oid, z64, state(1)) for oid in self.oids))
        large = state(2) + b' ' * 500
        for _ in self.meanwhile(lambda: commit(self.other, (self.oids[7], first, state(3)))):
            with self.assertRaises(ConflictError):
                commit(self.storage, *((oid, first, large) for oid in self.oids))
        new = [self.storage.new_oid() for _ in range(100)]
        tid = commit(self.storage, *((oid, z64, large) for oid in new))
        self.assertEqual({self.other.load(oid)[1] for oid in new}, {tid})
        self.assertEqual(value_of(self.other.load(self.oids[7])[0]), 3)
        self.assertEqual(value_of(self.other.load(self.oids[8])[0]), 1)


    def test_what_resolving_makes_large(self):
        """goes ahead as well, though it did not look like that before."""
        first = commit(self.storage, *((oid, z64, zodb_pickle(Growing())) for oid in self.oids[:4]))
        self.storage.sync()
        for oid in self.oids[:4]:
            self.storage.load(oid)
        commit(self.other, *((oid, first, zodb_pickle(Growing())) for oid in self.oids[:4]))
        tid = commit(self.storage, *((oid, first, zodb_pickle(Growing())) for oid in self.oids[:4]))
        for oid in self.oids[:4]:
            self.assertEqual(len(zodb_unpickle(self.other.loadSerial(oid, tid)).text), 6000)


class Growing(Persistent):

    def __init__(self):
        self.text = ''

    def _p_resolveConflict(self, old, saved, mine):
        return {'text': 'x' * 6000}


class FewLocks(TestCase):
    """A PostgreSQL that has room for about 1,500 locks, and a relstore that locks up to 1,000 objects one by one."""

    layer = SharedServer('FewLocksLayer', __name__, lambda: PostgreSQLServer(FEW_LOCKS), require_postgresql)

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server
        patched = patch.object(PostgreSQLAdapter, 'most_locks', 1000)
        patched.start()
        self.addCleanup(patched.stop)
        self.dsn = self.server.create_database(self.id().rpartition('.')[2][:60])
        self.storage = self.opened()
        self.watch = Watch(self.dsn)
        self.addCleanup(self.watch.close)

    def opened(self):
        storage = relstore.RelStore(relstore.PostgreSQL(self.dsn), commit_lock_timeout=0.2)
        self.addCleanup(storage.close)
        return storage

    def filled(self, count: int):
        oids = [self.storage.new_oid() for _ in range(count)]
        return oids, commit(self.storage, *((oid, z64, state(0)) for oid in oids))

    def voted(self, storage, oids, base):
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        for oid in oids:
            storage.store(oid, base, state(1), '', txn)
        try:
            storage.tpc_vote(txn)
        except BaseException:
            storage.tpc_abort(txn)
            raise
        return txn

    def as_relstorages(self):
        """Make the database one that relstore has found."""
        self.watch.rows("DELETE FROM relstore_meta WHERE name = 'writers' RETURNING 1")

    def say(self, *words):
        with redirect_stdout(io.StringIO()) as out:
            self.assertEqual(main(['writers', self.dsn, *words]), 0)
        return out.getvalue()

    def fill_lock_table(self):
        """Leave room for about 50 locks."""
        holder = psycopg2.connect(self.dsn)
        self.addCleanup(holder.close)
        holder.autocommit = True
        with closing(holder.cursor()) as cursor:
            for n in range(100_000):
                try:
                    cursor.execute('SELECT pg_advisory_lock(1, %s)', (n,))
                except psycopg2.errors.OutOfMemory:
                    break
            for n in range(50):
                cursor.execute('SELECT pg_advisory_unlock(1, %s)', (n,))

    def test_one_lock_for_many_objects(self):
        """Others wait for it as long as they wait for any."""
        oids, base = self.filled(4000)
        txn = self.voted(self.storage, oids, base)
        self.assertLess(self.watch.one(OBJECT_LOCKS), 5)
        other = self.opened()
        with self.assertRaisesRegex(LockTimeout, 'large transaction.* by the server process'):
            commit(other, (other.new_oid(), z64, state(1)))
        tid = self.storage.tpc_finish(txn)
        self.assertEqual({other.load(oid)[1] for oid in oids[::100]}, {tid})
        commit(other, (oids[0], tid, state(2)))

    def test_few_objects_are_locked_each(self):
        """So they keep nobody out."""
        oids, base = self.filled(500)
        txn = self.voted(self.storage, oids, base)
        self.assertEqual(self.watch.one(OBJECT_LOCKS), 500)
        other = self.opened()
        commit(other, (other.new_oid(), z64, state(1)))
        self.storage.tpc_finish(txn)

    def test_new_objects_need_no_lock(self):
        txn = self.voted(self.storage, [self.storage.new_oid() for _ in range(1500)], z64)
        other = self.opened()
        commit(other, (other.new_oid(), z64, state(1)))
        self.storage.tpc_finish(txn)

    def test_where_relstorage_may_write(self):
        """It would not see the lock, so each object is locked, until somebody says that it writes no more."""
        self.as_relstorages()
        oids, base = self.filled(4000)
        self.assertIn(': any.', self.say())
        with self.assertRaisesRegex(ConfigurationError, '4,000 objects .* max_locks_per_transaction of the server, '
                                                        '10, or, .* "relstore writers"'):
            self.voted(self.storage, oids, base)
        few = self.voted(self.storage, oids[:500], base)
        self.assertEqual(self.watch.one(OBJECT_LOCKS), 500)
        self.storage.tpc_abort(few)
        self.assertIn(': relstore.', self.say('relstore'))
        txn = self.voted(self.storage, oids, base)      # by a process that had opened it before
        self.assertLess(self.watch.one(OBJECT_LOCKS), 5)
        self.storage.tpc_abort(txn)
        self.assertIn(': any.', self.say('any'))
        self.assertEqual(self.watch.one("SELECT count(*) FROM pg_indexes WHERE indexname = 'current_object_tid'"), 1)
        with self.assertRaisesRegex(ConfigurationError, 'relstore writers'):
            self.voted(self.storage, oids, base)

    def test_opened_to_relstorage_while_a_large_one_votes(self):
        """Who has voted is waited for, who votes just then learns of it."""
        oids, base = self.filled(1500)
        adapter = relstore.PostgreSQL(self.dsn).bind(keep_history=True)
        txn = self.voted(self.storage, oids, base)
        with self.assertRaises(LockTimeout):
            adapter.writers.set('any', timeout=0.1)
        self.assertEqual(adapter.writers.who(), 'relstore')
        self.storage.tpc_abort(txn)
        script = Session.script

        def interrupted(session, sql, parameters=()):
            if 'relstore_vote' in sql:
                adapter.writers.set('any')
            return script(session, sql, parameters)

        with patch.object(Session, 'script', interrupted), \
                self.assertRaisesRegex(Unavailable, 'opened to RelStorage'):
            self.voted(self.storage, oids, base)

    def test_an_older_relstore_made_it(self):
        """It did not say who writes, and completing its tables does not say it either."""
        self.as_relstorages()
        self.watch.rows('DROP FUNCTION relstore_tid_1; SELECT 1')
        self.opened()
        self.assertIn(': any.', self.say())

    def test_others_hold_nearly_all_locks(self):
        """A small transaction takes the one instead, where it may; else it is told, and may try again."""
        oids, base = self.filled(300)
        self.fill_lock_table()
        tid = self.storage.tpc_finish(self.voted(self.storage, oids, base))
        self.as_relstorages()
        with self.assertRaisesRegex(OutOfLocks, '300 objects .*max_locks_per_transaction.*relstore writers'):
            self.voted(self.storage, oids, tid)
        commit(self.storage, (oids[0], tid, state(2)))

    def test_a_database_without_relstore(self):
        self.server.create_database('empty')
        adapter = relstore.PostgreSQL(self.server.dsn('empty')).bind(keep_history=True)
        with self.assertRaisesRegex(ConfigurationError, 'never opened by relstore'):
            adapter.writers.who()


cases(globals(), Memory, backends=(
    SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryFree, Psycopg3HistoryPreserving, MySQLdbHistoryFree))
cases(globals(), Ahead, backends=(
    Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree))
cases(globals(), ManyConflicts)
cases(globals(), Afterwards, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Memory, Ahead, ManyConflicts, Afterwards
