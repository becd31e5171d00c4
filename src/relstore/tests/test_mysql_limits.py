"""What a MySQL or MariaDB server allows: its packets, its patience, its settings. It is found out at open, kept to, and
told in one sentence where it does not do.
"""
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from unittest import TestCase
from unittest.mock import patch

from persistent.mapping import PersistentMapping
from transaction.interfaces import TransientError
from ZODB.Connection import TransactionMetaData
from ZODB.POSException import ConflictError, ReadConflictError, StorageError
from ZODB.utils import p64, u64, z64

import relstore
from relstore.errors import ConfigurationError
from relstore.packing.packs import Packs
from relstore.tests.support.backends import (
    MYSQL,
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    PyMySQLHistoryFree,
    PyMySQLHistoryPreserving,
    cases,
)
from relstore.tests.support.children import environment
from relstore.tests.support.commits import commit
from relstore.tests.support.layers import Processes
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.records import Reference, pickled, state, value_of
from relstore.tests.support.servers import (
    MariaDBLayer,
    MariaDBServer,
    MySQLLayer,
    MySQLServer,
    SharedServer,
    mariadb_programs,
    mysql_unavailable,
    require_mariadb,
    require_mysql,
)
from relstore.tests.support.watch import MySQLWatch
from relstore.whole import say_whole

PACKET = 1 << 20
SETTINGS = {'max_allowed_packet': PACKET, 'log_bin': 'log', 'server_id': 7, 'binlog_format': 'ROW'}

# Servers of our own, whose settings may be changed.
SmallMariaDB = SharedServer('SmallMariaDB', __name__, lambda: MariaDBServer(SETTINGS) if mariadb_programs() else None,
                            require_mariadb)
SmallMySQL = SharedServer('SmallMySQL', __name__, lambda: None if mysql_unavailable() else MySQLServer(SETTINGS),
                          require_mysql)
BACKENDS = MySQLdbHistoryPreserving, MySQLdbHistoryFree, PyMySQLHistoryPreserving, PyMySQLHistoryFree
SMALL = [type(f'{backend.__name__}On{layer.__name__}', (backend,), {'layer': layer})
         for layer in (SmallMariaDB, SmallMySQL) for backend in BACKENDS]


class Packets(TestCase):
    """max_allowed_packet is 1 MB."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)

    def vote(self, *records, storage=None, **metadata):
        """Store new objects and vote; return how to end it."""
        if storage is None:
            storage = self.storage
        txn = TransactionMetaData(**metadata)
        storage.tpc_begin(txn)
        try:
            oids = [storage.new_oid() for _ in records]
            for oid, record in zip(oids, records, strict=True):
                storage.store(oid, z64, record, '', txn)
            storage.tpc_vote(txn)
        except BaseException:
            storage.tpc_abort(txn)
            raise
        return oids, txn

    def test_a_large_object_is_refused_at_vote(self):
        [small], txn = self.vote(state(1))
        tid = self.storage.tpc_finish(txn)
        large = self.storage.new_oid()
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        self.storage.store(small, tid, state(2), '', txn)
        self.storage.store(large, z64, state('x' * 5_000_000), '', txn)
        with self.assertRaises(StorageError) as raised:
            self.storage.tpc_vote(txn)
        self.assertNotIsInstance(raised.exception, (ConflictError, TransientError))
        for word in (hex(u64(large)), '5,000,', 'max_allowed_packet', f'{PACKET:,}'):
            self.assertIn(word, str(raised.exception))
        self.storage.tpc_abort(txn)
        self.assertEqual(self.storage.database.pool.lent, 0)
        self.assertEqual(self.storage.load(small), (state(1), tid))
        self.assertEqual(len(self.storage), 1)
        self.assertGreater(commit(self.storage, (small, tid, state(3))), tid)

    def test_many_objects_with_large_oids_from_elsewhere(self):
        """Their oids alone, which are locked one by one, are more than a packet."""
        txn = TransactionMetaData()
        self.storage.tpc_begin(txn)
        for n in range(26_000):
            self.storage.store(p64(2 ** 62 + n), z64, b'.', '', txn)
        self.storage.tpc_vote(txn)
        self.storage.tpc_finish(txn)
        self.assertEqual(self.storage.load(p64(2 ** 62 + 25_999))[0], b'.')

    def _fits(self, make, size, **metadata) -> bool:
        try:
            _, txn = self.vote(make(size), **metadata)
        except StorageError:
            return False
        self.storage.tpc_abort(txn)
        return True

    def _largest(self, make, **metadata) -> int:
        """Return the largest size that is not refused at vote."""
        fits, refused = 1, PACKET
        while refused - fits > 1:
            middle = (fits + refused) // 2
            if self._fits(make, middle, **metadata):
                fits = middle
            else:
                refused = middle
        return fits

    def test_many_links_during_a_sweep_and_after_it(self):
        """What they lead to is looked up in lists that fit."""
        links = [Reference((p64(2 ** 63 - 1 - n), None)) for n in range(60_000)]
        records = [pickled(PersistentMapping, links[start:start + 5000]) for start in range(0, len(links), 5000)]

        def swept(values):
            self.storage.database.pool.attempt(lambda session: session.run(f'UPDATE relstore_sweep SET {values}'))

        adapter, attempt = self.storage.database.adapter, self.storage.database.pool.attempt
        generation = attempt(lambda session: Packs(adapter, session).new(1, 1, True, 'token'))
        attempt(lambda session: session.run(adapter.sql.set_meta, ('sweeping', 'token')))
        swept(f'sweeping = {generation}')
        with self.assertRaisesRegex(ConflictError, 'is not there'):     # but it does not go
            self.vote(*records)
        swept('sweeping = 0, number = number + 1')
        with self.assertRaisesRegex(StorageError, 'is not there'):      # the second time it is told that no retry helps
            self.vote(*records)

    def test_what_just_fits_is_stored(self):
        """Whatever passes the vote is not refused later: alone, and beside others as large; and it is not much less
        than the packet, where nothing in it has to be escaped.
        """
        kinds = {'plain': (lambda size: state(b'x' * size), {}),
                 'escaped': (lambda size: state(b'\0\'"\\\n\r\x1a' * (size // 7)), {}),
                 'described': (lambda size: state(b'x' * size), {'user': "'" * 60_000, 'description': '\\' * 60_000})}
        for kind, (make, metadata) in kinds.items():
            with self.subTest(kind):
                size = self._largest(make, **metadata)
                self.assertFalse(self._fits(make, size + 7, **metadata))
                if kind == 'plain':
                    self.assertGreater(size, (0.95 if self.driver == 'mysqlclient' else 0.47) * PACKET)
                for records in ([make(size)], [make(size), state(1), make(size)]):
                    oids, txn = self.vote(*records, **metadata)
                    tid = self.storage.tpc_finish(txn)
                    self.assertEqual([self.storage.load(oid) for oid in oids], [(record, tid) for record in records])

    def test_many_of_any_size_fit(self):
        """Pieces end where the next object would not fit."""
        for size in (0, 1, 100, 3_000, 60_000):
            count = min(3 * PACKET // (size + 200), 6000)
            with self.subTest(size):
                records = [state(b"'" * size + b'%d' % n) for n in range(count)]
                oids, txn = self.vote(*records)
                tid = self.storage.tpc_finish(txn)
                self.assertEqual(self.storage.load(oids[-1]), (records[-1], tid))
                self.assertEqual([self.storage.load(oid)[0] for oid in oids[::97]], records[::97])

    def test_texts_that_are_too_long(self):
        """Where nothing keeps them, nothing is too long."""
        for name in ('user', 'description'):
            with self.subTest(name):
                if self.keep_history:
                    with self.assertRaisesRegex(StorageError, f'{name}.* 70,000 bytes.* 65,535'):
                        self.vote(state(1), **{name: 'x' * 70_000})
                else:
                    _, txn = self.vote(state(1), **{name: 'x' * 70_000})
                    self.storage.tpc_finish(txn)
        self.assertEqual(self.storage.database.pool.lent, 0)
        _, txn = self.vote(state(1), user='ü' * 32_767, description='x' * 65_535)
        self.storage.tpc_finish(txn)

    def test_the_limit_is_read_at_open(self):
        server = self.layer.server
        server.run(f'SET GLOBAL max_allowed_packet = {16 * PACKET}')
        self.addCleanup(server.run, f'SET GLOBAL max_allowed_packet = {PACKET}')
        record = state('x' * 5_000_000)
        with self.assertRaises(StorageError):
            self.vote(record)
        with closing(self.open_storage()) as storage:
            [oid], txn = self.vote(record, storage=storage)
            tid = storage.tpc_finish(txn)
            self.assertEqual(storage.load(oid), (record, tid))


MANY = """
import json, re, sys
import relstore
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state
from ZODB.utils import p64, z64

def megabytes(what):
    with open('/proc/self/status') as status:
        return int(re.search(what + r':\\s+(\\d+) kB', status.read())[1]) / 1024

arguments, keep_history, count, size = json.loads(sys.argv[1])
storage = relstore.RelStore(relstore.MySQL(**arguments), keep_history=keep_history)
template = state('#' * 6 + 'x' * size)

def store(first, count):
    oids = [storage.new_oid() for _ in range(count)]
    commit(storage, work=lambda txn: [
        storage.store(oid, z64, template.replace(b'######', b'%06d' % n), '', txn)
        for n, oid in enumerate(oids, first)])

store(0, 1000)
with open('/proc/self/clear_refs', 'w') as peak:
    peak.write('5')
before = megabytes('VmRSS')
store(1000, count)
print(megabytes('VmHWM') - before)
storage.close()
"""


class Many(TestCase):
    """A hundred thousand objects, 100 MB, in one transaction.

    Of its memory the list of them takes 70 MB here, and messages the rest: 50 MB where they are as large as they get.
    """

    COUNT, SIZE = 100_000, 1_000

    def test_memory_is_bounded(self):
        arguments = self.arguments() | {'driver': self.driver}
        with closing(self.open_storage()):
            parameters = json.dumps([arguments, self.keep_history, self.COUNT, self.SIZE])
        child = subprocess.run([sys.executable, '-c', MANY, parameters], capture_output=True, text=True,
                               env=environment())
        self.assertEqual(child.returncode, 0, child.stderr)
        with closing(self.new_watch()) as watch:
            self.assertEqual(watch.rows('SELECT count(*), min(length(state)), max(state_size), count(DISTINCT tid), '
                                        'count(DISTINCT state) FROM object_state'),
                             [(self.COUNT + 1000, *[len(state('#' * 6 + 'x' * self.SIZE))] * 2, 2, self.COUNT + 1000)])
        self.assertLess(float(child.stdout), 150 if self.layer in (MariaDBLayer, MySQLLayer) else 110)


class Idle(TestCase):
    """wait_timeout is 1 s. All that can be idle is so at the same time, until the server has ended it."""

    layer = SmallMariaDB

    def setUp(self):
        self.layer.require(self)
        server = self.layer.server
        server.run('SET GLOBAL wait_timeout = 1')
        self.addCleanup(server.run, 'SET GLOBAL wait_timeout = 28800')
        self.watches = []

    def _storages(self):
        for driver in ('mysqlclient', 'pymysql'):
            for keep_history in (True, False):
                name = f'idle_{driver}_{keep_history}'
                arguments = self.layer.server.create_database(name)
                self.addCleanup(self.layer.server.drop_database, name)
                storage = relstore.RelStore(relstore.MySQL(**arguments, driver=driver), keep_history=keep_history,
                                            cache_local_mb=0)
                self.addCleanup(storage.close)
                watch = MySQLWatch(arguments)
                watch.rows('SET wait_timeout = 1000')
                self.addCleanup(watch.close)
                self.watches.append(watch)
                yield storage

    def _until_all_are_ended(self):
        for watch in self.watches:
            watch.until('(SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()) = 1')

    def test_idle(self):
        cases = []
        for storage in self._storages():
            oid = storage.new_oid()
            tid = commit(storage, (oid, z64, state(0)))
            reader, writer, idle = (storage.new_instance() for _ in range(3))
            reader.poll_invalidations()
            reader.load(oid)
            txn = TransactionMetaData()
            writer.tpc_begin(txn)
            writer.store(oid, tid, state(1), '', txn)
            writer.tpc_vote(txn)
            cases.append((storage, oid, tid, reader, writer, txn, idle))
        self._until_all_are_ended()
        for storage, oid, tid, reader, writer, txn, _ in cases:
            adapter = storage.database.adapter
            with self.subTest(adapter._driver.name, keep_history=adapter.keep_history):
                if adapter.keep_history:
                    self.assertEqual(reader.load(oid), (state(0), tid))
                else:
                    with self.assertRaises((TransientError, ReadConflictError)):    # the snapshot is gone
                        reader.load(oid)
                reader.release()
                with self.assertRaises(TransientError):     # with its locks
                    writer.tpc_finish(txn)
                writer.tpc_abort(txn)
                self.assertEqual(storage.database.pool.lent, 0)
        self._until_all_are_ended()
        for storage, oid, tid, *_, idle in cases:
            adapter = storage.database.adapter
            with self.subTest(adapter._driver.name, keep_history=adapter.keep_history):
                idle.poll_invalidations()       # between transactions nobody notices
                self.assertEqual(idle.load(oid), (state(0), tid))
                idle.afterCompletion()
        self._until_all_are_ended()
        for storage, oid, tid, *_, idle in cases:
            adapter = storage.database.adapter
            with self.subTest(adapter._driver.name, keep_history=adapter.keep_history):
                self.assertGreater(commit(idle, (oid, tid, state(2))), tid)
                self.assertEqual(value_of(storage.load(oid)[0]), 2)


class Settings(TestCase):
    """What a server's owner may set for all sessions. test_bad_input has what is refused."""

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server
        self.arguments = self.server.create_database('site')
        self.addCleanup(self.server.drop_database, 'site')

    def set_globally(self, name, value, usual):
        self.server.run(f'SET GLOBAL {name} = {value}')
        self.addCleanup(self.server.run, f'SET GLOBAL {name} = {usual}')

    def _works(self):
        for driver in ('mysqlclient', 'pymysql'):
            with self.subTest(driver), closing(relstore.RelStore(
                    relstore.MySQL(**self.arguments, driver=driver))) as storage:
                oids = [storage.new_oid() for _ in range(40)]
                record = state('ü\\\'"\0\n' * 10)
                tid = commit(storage, *((oid, z64, record) for oid in oids))
                self.assertEqual(storage.load(oids[39]), (record, tid))
                self.assertEqual(len(set(oids)), 40)

    def test_those_that_do_not_matter(self):
        """For our sessions they are set anew, or stated in every statement."""
        for name, value, usual in (
                ('sql_mode', "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,NO_AUTO_VALUE_ON_ZERO,PIPES_AS_CONCAT'", 'DEFAULT'),
                ('autocommit', 'OFF', 'ON'), ('completion_type', 'CHAIN', 'NO_CHAIN'),
                ('time_zone', "'+05:00'", "'SYSTEM'"), ('auto_increment_increment', 3, 1),
                ('innodb_lock_wait_timeout', 1, 50), ('character_set_server', 'latin1', 'utf8mb4'),
                ('default_storage_engine', 'MyISAM', 'InnoDB')):
            self.set_globally(name, value, usual)
        self.server.run('SET GLOBAL TRANSACTION ISOLATION LEVEL SERIALIZABLE')
        self.addCleanup(self.server.run, 'SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ')
        self._works()

    def test_binary_log(self):
        """It takes rows, of all transactions or of those that want it; not statements."""
        self.set_globally('binlog_format', 'STATEMENT', 'ROW')
        for driver in ('mysqlclient', 'pymysql'):
            with self.assertRaisesRegex(ConfigurationError, 'binlog_format .* is STATEMENT.* ROW or MIXED'):
                relstore.RelStore(relstore.MySQL(**self.arguments, driver=driver))
        self.assertEqual(self.server.run("SELECT 1 FROM information_schema.tables WHERE table_schema = 'site'"), ())
        for form in ('MIXED', 'ROW'):
            self.server.run(f'SET GLOBAL binlog_format = {form}')
            self._works()


class Old(TestCase):
    """A server that says it is older than it is."""
    layer = Processes

    def test_too_old(self):
        require_mariadb(self)
        for version, words in {'10.5.27-MariaDB': ('MariaDB 10.5.27-MariaDB', '10.6'),
                               '5.7.44-log': ('MySQL 5.7.44', '8.0')}.items():
            server = MariaDBServer({'version': version})
            server.start()
            try:
                arguments = server.create_database('site')
                for driver in ('mysqlclient', 'pymysql'):
                    with self.subTest(version, driver=driver):
                        with self.assertRaises(ConfigurationError) as raised:
                            relstore.RelStore(relstore.MySQL(**arguments, driver=driver))
                        for word in (*words, 'or newer.'):
                            self.assertIn(word, str(raised.exception))
                self.assertEqual(server.run("SELECT 1 FROM information_schema.tables WHERE table_schema = 'site'"), ())
            finally:
                server.stop()


class Creating(TestCase):
    """A client is killed when it has sent a statement that makes the tables; whoever comes next completes them."""

    def setUp(self):
        super().setUp()
        self.server = self.layer.server

    def test_killed_at_every_statement(self):
        complete = self._tables(self._made('complete'))
        self.assertIn('relstore_meta', complete)
        # The statements of the two history modes hardly differ; test_faults ends the connection at each of them.
        n, step = 0, (1 if THOROUGH else 2) if self.keep_history else 3
        while True:
            n += step
            name = f'killed_{n}_x_{"hp" if self.keep_history else "hf"}'
            arguments = self.server.create_database(name)
            killed = self._kill_at(n, arguments)
            try:
                with self.subTest(n), closing(self._open(arguments)) as storage:
                    oid = storage.new_oid()
                    tid = commit(storage, (oid, z64, state(n)))
                    # Who has made the tables nobody can tell, so RelStorage may have, and may have packed them.
                    storage.database.adapter.writers.set('relstore')
                    storage.database.pool.attempt(partial(say_whole, storage.database.adapter))
                    self.assertEqual(self._tables(arguments), complete)
                    with closing(self._open(arguments)) as again:
                        self.assertEqual(again.load(oid), (state(n), tid))
                        self.assertEqual(again.sortKey(), storage.sortKey())
            finally:
                self.server.drop_database(name)
            if not killed:
                break
        self.assertGreater(n, 20, 'too few statements')

    def _made(self, name):
        name = f'{name}_x_{"hp" if self.keep_history else "hf"}'
        arguments = self.server.create_database(name)
        self.addCleanup(self.server.drop_database, name)
        self._open(arguments).close()
        return arguments

    def _open(self, arguments):
        return relstore.RelStore(relstore.MySQL(**arguments, driver=self.driver), keep_history=self.keep_history)

    def _tables(self, arguments) -> dict[str, str]:
        """Return how each table and view is defined, and how many rows are in it that no one has stored."""
        with closing(MySQLWatch(arguments)) as watch:
            names = [name for name, in watch.rows('SHOW TABLES')]
            found = {name: watch.rows(f'SHOW CREATE TABLE `{name}`')[0][1] for name in names}
            found = {name: re.sub(r' AUTO_INCREMENT=\d+|`\w+_x_h[pf]`\.', '', text) for name, text in found.items()}
            for name in ('commit_row_lock', 'relstore_meta', 'relstore_epoch'):
                found[name] += f' {watch.one(f"SELECT count(*) FROM {name}")} rows'
            return found

    def _kill_at(self, n: int, arguments) -> bool:
        """Open it in a child process that ends when its statement n is on its way. Return whether it had so many."""
        pid = os.fork()
        if pid == 0:
            try:
                self._end_at(n)
                self._open(arguments)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        return os.WIFSIGNALED(status)

    def _end_at(self, n: int) -> None:
        connections = importlib.import_module('MySQLdb.connections')
        sent = 0

        def query(connection, statement):
            nonlocal sent
            sent += 1
            if sent == n:
                connection.send_query(statement)
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send_query(statement)
            connection.read_query_result()

        patch.object(connections.Connection, 'query', query).start()


cases(globals(), Packets, backends=SMALL, each_driver=True)
# With the usual packet and with the small one: the other history mode, and the other driver.
cases(globals(), Many, backends=(MySQLdbHistoryPreserving, *MYSQL[4:], SMALL[3]),
      thorough=(PyMySQLHistoryFree, *SMALL[1:3]))
cases(globals(), Creating, backends=tuple(backend for backend in MYSQL if backend.driver == 'mysqlclient'))
for small in (SmallMariaDB, SmallMySQL):
    name = f'Settings{small.__name__}'
    globals()[name] = type(name, (Settings,), {'layer': small, '__module__': __name__})
del Packets, Many, Creating, Settings
