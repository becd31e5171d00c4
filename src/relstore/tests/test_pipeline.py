"""What a Session of psycopg 3 says to the server, and what it makes of the answers."""
import struct
import threading
import tracemalloc
import unittest
from contextlib import closing

from relstore.adapters.arrays import KEPT, array, binary_array
from relstore.errors import DatabaseError, Disconnected, LockTimeout
from relstore.sessions.drivers import find_driver
from relstore.sessions.session import Session
from relstore.tests.support.backends import PostgreSQLLayer
from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.watch import Watch

SHUT = 'SELECT pg_terminate_backend(pg_backend_pid())'


class Pipeline(unittest.TestCase):

    layer = PostgreSQLLayer

    def setUp(self):
        self.layer.require(self)
        name = f'pipeline_{self._testMethodName[-40:]}'
        self.dsn = self.layer.server.create_database(name)
        self.through = lambda proxy: self.layer.server.tcp_dsn(name, port=proxy.port)
        self.session = self.connect()
        self.session.run('CREATE TABLE t (n bigint, b bytea)')

    def connect(self):
        session = Session(find_driver('psycopg', 'psycopg'), self.dsn)
        self.addCleanup(session.close)
        return session

    def test_values(self):
        """Each comes back as what it was sent as, the server says of which type it is."""
        binary = bytes(range(256))
        row = self.session.one("SELECT %s::bigint, %s::bytea, %s::text, %s::boolean, %s::bigint, '%%' LIMIT %s",
                               (-2 ** 63, binary, 'Grüße', True, None, 1))
        self.assertEqual(row, (-2 ** 63, binary, 'Grüße', True, None, '%'))

    def test_what_cannot_be_sent(self):
        with self.assertRaisesRegex(DatabaseError, 'NUL'):
            self.session.one('SELECT %s::text', ('a\0b',))
        with self.assertRaisesRegex(DatabaseError, 'NUL'):
            self.session.script('BEGIN;\nSELECT %s::text', ('a\0b',))
        self.assertEqual(self.session.one('SELECT 1'), (1,))
        with self.assertRaisesRegex(TypeError, 'memoryview'):
            self.session.one('SELECT %s::bytea', (memoryview(b'a'),))

    def test_rows_touched(self):
        self.assertEqual(self.session.run('INSERT INTO t SELECT generate_series(1, %s)', (5,)), 5)
        self.session.many('UPDATE t SET n = n + %s WHERE n = %s', [(10, 1), (10, 2)])
        self.assertEqual(self.session.one('SELECT count(*) FROM t WHERE n > 10'), (2,))

    def test_the_rows_of_each_statement(self):
        self.assertEqual(self.session.results('SELECT %s::text;\nBEGIN;\nSELECT %s::text, %s::bytea', ('1', '2', b'3')),
                         [[('1',)], [], [('2', b'3')]])
        self.assertTrue(self.session.in_transaction)

    def test_nothing_is_run_after_an_error(self):
        for script in ('SELECT 1 / %s::bigint;\nINSERT INTO t VALUES (%s);\nINSERT INTO t VALUES (%s)',
                       'BEGIN;\nINSERT INTO t VALUES (1 / %s::bigint);\nINSERT INTO t VALUES (%s);\n'
                       'INSERT INTO t VALUES (%s)'):
            with self.subTest(script), self.assertRaisesRegex(DatabaseError, '^division by zero$'):
                self.session.script(script, (0, 1, 2))
            self.session.rollback()
            self.assertFalse(self.session.in_transaction)
            self.assertEqual(self.session.all('SELECT n FROM t'), [])

    def test_what_was_committed_before_an_error_stays(self):
        with self.assertRaises(DatabaseError):
            self.session.script('BEGIN;\nINSERT INTO t VALUES (%s);\nCOMMIT;\nSELECT 1 / %s::bigint', (1, 0))
        self.assertFalse(self.session.in_transaction)
        self.assertEqual(self.session.all('SELECT n FROM t'), [(1,)])

    def test_an_error_at_commit(self):
        """Without a BEGIN the commit comes after the rows, and fails still where something is deferred until then."""
        self.session.run('CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS '
                         "$$ BEGIN RAISE 'too late'; END $$")
        self.session.run('CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED '
                         'FOR EACH ROW EXECUTE FUNCTION refuse()')
        insert = 'INSERT INTO t VALUES (%s) RETURNING n'
        for prepared in False, True:
            if prepared:
                self.session.prepare([insert])
            for name, send in {
                'run': lambda: self.session.run('INSERT INTO t VALUES (%s)', (1,)),
                'rows': lambda: self.session.one(insert, (1,)),
                'last': lambda: self.session.script(f'SELECT %s::text;\n{insert}', ('1', 1)),
                'first': lambda: self.session.script(f'{insert};\nSELECT %s::text', (1, '1')),
                'COMMIT': lambda: self.session.script('BEGIN;\nINSERT INTO t VALUES (%s);\nCOMMIT;\nSELECT 1', (1,)),
            }.items():
                with self.subTest(name, prepared=prepared), self.assertRaisesRegex(DatabaseError, '^too late$'):
                    send()
                self.assertFalse(self.session.broken)
                self.assertFalse(self.session.in_transaction)
                self.assertEqual(self.session.all('SELECT n FROM t'), [])

    def test_a_server_that_says_why_it_goes(self):
        for script in 'SELECT 1', f'SELECT 1;\n{SHUT};\nSELECT 1':
            with self.subTest(script):
                session = self.connect()
                with closing(Watch(self.dsn)) as watch:
                    if SHUT not in script:
                        watch.terminate(session.backend_pid)
                with self.assertRaisesRegex(Disconnected, 'terminating connection due to administrator command'):
                    session.script(script)
                self.assertTrue(session.broken)
                with self.assertRaises(Disconnected):
                    session.script(script)

    def test_answer_cut_at_every_byte(self):
        """Without its last byte it is none: the server commits what it has answered before, or does not."""
        statements = {
            'one': lambda session: session.all('INSERT INTO t VALUES (1) RETURNING n'),
            'several': lambda session: session.script('BEGIN;\nINSERT INTO t VALUES (1) RETURNING n;\nCOMMIT'),
            'an error': lambda session: self.assertRaises(DatabaseError, session.all, 'SELECT 1 / 0'),
        }
        with CuttingProxy(self.layer.server.address) as proxy:
            self.dsn = self.through(proxy)
            for name, send in statements.items():
                session = self.connect()
                proxy.reset()
                send(session)
                for size in range(proxy.received):
                    with self.subTest(name, size=size):
                        session = self.connect()
                        proxy.cut_after(received=size)
                        if name == 'an error':      # which is told, once it is there; then the connection is not
                            self.assertRaises((DatabaseError, Disconnected), session.all, 'SELECT 1 / 0')
                            self.assertRaises(Disconnected, session.all, 'SELECT 1')
                        else:
                            self.assertRaises(Disconnected, send, session)
                        self.assertTrue(session.broken)
                        proxy.cut_after()

    def test_lock_timeout(self):
        with closing(Watch(self.dsn)) as watch:
            watch.rows('SELECT pg_advisory_lock(1)')
            with self.assertRaises(LockTimeout):
                self.session.script("BEGIN;\nSET LOCAL lock_timeout = '1ms';\nSELECT pg_advisory_xact_lock(%s)", (1,))
        self.session.rollback()
        self.assertEqual(self.session.one('SELECT 1'), (1,))

    def test_large_both_ways_at_once(self):
        """The server answers the first while the others are being sent: nobody waits for the other."""
        large = bytes(1 << 20) * 8
        rows = self.session.results(';\n'.join(['SELECT %s::bytea'] * 4), (large,) * 4)
        self.assertEqual(rows, [[(large,)]] * 4)

    def test_other_threads_run_while_it_waits(self):
        """One of them ends the wait."""
        with closing(Watch(self.dsn)) as watch:
            watch.rows('SELECT pg_advisory_lock(1)')
            waiting = threading.Thread(
                target=self.session.script, args=('BEGIN;\nSELECT pg_advisory_xact_lock(%s)', (1,)), daemon=True)
            waiting.start()
            watch.until("EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)")
            watch.rows('SELECT pg_advisory_unlock(1)')
            waiting.join(30)
        self.assertFalse(waiting.is_alive())

    def test_prepared(self):
        scripts = 'SELECT %s::bigint + 1', 'BEGIN;\nINSERT INTO t VALUES (%s);\nCOMMIT', 'SELECT b FROM t WHERE n = %s'
        self.session.prepare(scripts)
        self.assertTrue(self.session.prepared)
        self.assertEqual(self.session.one(scripts[0], (1,)), (2,))
        self.session.script(scripts[1], (7,))
        self.assertEqual(self.session.all(scripts[2], (7,)), [(None,)])
        self.assertEqual(
            self.session.all(
                'SELECT statement, generic_plans + custom_plans FROM pg_prepared_statements ORDER BY name'),
            [('SELECT $1::bigint + 1', 1), ('BEGIN', 1), ('INSERT INTO t VALUES ($1)', 1), ('COMMIT', 1),
             ('SELECT b FROM t WHERE n = $1', 1)])

    def test_arrays(self):
        """The binary form is what the server makes of the other."""
        md5 = 'd41d8cd98f00b204e9800998ecf8427e'
        for kind, values in (('bigint', []), ('bigint', [1, None, -2 ** 63]), ('bigint', [1, -2 ** 63]),
                             ('integer', [2 ** 31 - 1, 0]), ('text', [md5, None]), ('text', [None]),
                             ('text', [md5, md5]), ('bigint', list(range(KEPT + 1)))):
            with self.subTest(kind, values=values[:3]):
                text, binary = array(kind, values), binary_array(kind, values)
                self.assertEqual(self.session.all(f'SELECT %s::{kind}[], %s::{kind}[]', (text, binary)),
                                 [(values, values)])
                self.assertEqual(self.session.all(f'SELECT array_send(%s::{kind}[])', (text,)), [(binary,)])

    def test_arrays_of_many_lengths_leave_nothing(self):
        """What struct.pack makes of a format is several times as large as the array, and kept."""
        values = list(range(10 * KEPT))
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for n in range(10):
            binary_array('bigint', values[n:])
        left, _ = tracemalloc.get_traced_memory()
        self.assertLess(left, 100_000)

    def test_array_of_numbers_that_are_too_large(self):
        with self.assertRaises(struct.error):
            binary_array('integer', [2 ** 31])
