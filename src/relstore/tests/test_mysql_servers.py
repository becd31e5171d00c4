"""The tests' own MariaDB and MySQL: they come, go and crash as asked, and a proxy sees what is said to them."""

import collections
import os
import tempfile
import threading
import unittest
from contextlib import closing
from unittest import mock
from urllib.parse import quote

import pymysql

from relstore.tests.support.children import goes_with_its_run
from relstore.tests.support.layers import Processes
from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.servers import (
    MariaDBLayer,
    MariaDBServer,
    MySQLLayer,
    MySQLServer,
    StagingMySQL,
    open_process,
    require_mariadb,
    require_mysql,
    wait_for_exit,
)


def ask(connection, statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


class Shared:
    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server

    def test_a_new_database_is_empty_and_utf8(self):
        self.server.create_database('fresh')
        self.addCleanup(self.server.drop_database, 'fresh')
        with closing(self.server.connect('fresh')) as client:
            self.assertEqual(ask(client, 'SHOW TABLES'), [])
            self.assertEqual(ask(client, 'SELECT @@character_set_database'), [('utf8mb4',)])

    def test_a_name_that_is_taken_is_an_error(self):
        self.server.create_database('taken')
        self.addCleanup(self.server.drop_database, 'taken')
        with self.assertRaises(pymysql.Error):
            self.server.create_database('taken')

    def test_a_database_is_dropped_under_its_clients(self):
        self.server.create_database('doomed')
        with closing(self.server.connect('doomed')) as client:
            ask(client, 'CREATE TABLE t (n INT) ENGINE=InnoDB')
            ask(client, 'BEGIN')
            ask(client, 'INSERT INTO t VALUES (1)')
            self.server.drop_database('doomed')
            with self.assertRaises(pymysql.OperationalError):
                ask(client, 'SELECT 1')

    def test_it_is_what_it_is_said_to_be(self):
        [[version]] = self.server.run('SELECT version()')
        self.assertEqual(self.server.is_mariadb, 'MariaDB' in version)

    def test_staging(self):
        """A URL leads there as well, and what the tests leave behind is removed."""
        arguments = self.server.arguments()
        staging = StagingMySQL('mysql://root:@localhost/?' + '&'.join(
            f'{name}={quote(arguments[name], safe="")}' for name in ('unix_socket',)))  # fmt: skip
        staging.start()
        there = staging.create_database('main')
        self.assertEqual(there['unix_socket'], arguments['unix_socket'])
        self.assertTrue(there['db'].startswith('relstore_test_'))
        self.assertIn((there['db'],), self.server.run('SHOW DATABASES'))
        with CuttingProxy(staging.address) as proxy:
            through = staging.tcp_arguments('main', proxy.port)
            self.assertEqual((through['db'], through['port']), (there['db'], proxy.port))
            with closing(staging.connect('main')) as client:
                self.assertEqual(ask(client, 'SELECT DATABASE()'), [(there['db'],)])
        staging.stop()
        self.assertNotIn((there['db'],), self.server.run('SHOW DATABASES'))


class SharedMariaDB(Shared, unittest.TestCase):
    layer = MariaDBLayer


class SharedMySQL(Shared, unittest.TestCase):
    layer = MySQLLayer


class Own:
    kind = MariaDBServer

    def start(self, *args, **kwargs):
        server = self.kind(*args, **kwargs)
        self.addCleanup(server.stop)
        server.start()
        return server

    def test_settings_and_durability(self):
        asked = 'SELECT @@max_allowed_packet, @@innodb_flush_log_at_trx_commit, @@innodb_doublewrite, @@max_connections'
        for durable in (False, True):
            server = self.start({'max_allowed_packet': '2M'}, durable=durable)
            [[packet, flush, doublewrite, connections]] = server.run(asked)
            self.assertEqual((packet, flush, connections), (2 << 20, int(durable), 300))
            self.assertEqual(doublewrite in (1, 'ON'), durable)

    def test_it_is_reached_by_two_ways_and_goes_without_trace(self):
        server = self.start()
        arguments = server.tcp_arguments()
        self.assertEqual((arguments['host'], arguments['port']), server.address)
        with closing(pymysql.connect(**arguments)) as client:
            self.assertEqual(ask(client, 'SELECT CURRENT_USER()'), [('root@127.0.0.1',)])
        self.assertEqual(server.run('SELECT CURRENT_USER()'), (('root@localhost',),))
        if os.geteuid() == 0:
            self.assertNotEqual(os.stat(f'/proc/{server.process.pid}').st_uid, 0)
        directory, handle = server.directory, open_process(server.process.pid)
        self.addCleanup(os.close, handle)
        server.stop()
        wait_for_exit(handle, seconds=0)
        self.assertFalse(directory.exists())

    def test_a_setting_that_is_wrong_is_told_with_the_log(self):
        with self.assertRaisesRegex(RuntimeError, 'no[_-]such[_-]setting'):
            self.start({'no_such_setting': 1})

    def test_committed_rows_survive_kill_and_restart(self):
        server = self.start(durable=True)
        server.create_database('d')
        with closing(server.connect('d')) as client:
            ask(client, 'CREATE TABLE t (n INT) ENGINE=InnoDB')
            ask(client, 'INSERT INTO t VALUES (7)')
        for stop in (server.kill, server.restart):
            with closing(server.connect('d')) as client:
                stop()
                with self.assertRaises(pymysql.OperationalError):
                    ask(client, 'SELECT 1')
            if server.process is None:
                server.start()
            with closing(server.connect('d')) as client:
                self.assertEqual(ask(client, 'SELECT n FROM t'), [(7,)])

    def test_the_server_of_a_test_run_that_dies_goes_with_it(self):
        goes_with_its_run(self, self.kind)


class OwnMariaDB(Own, unittest.TestCase):
    layer = Processes
    def setUp(self):
        require_mariadb(self)


class OwnMySQL(Own, unittest.TestCase):
    layer = Processes
    kind = MySQLServer

    def setUp(self):
        require_mysql(self)


class Missing(unittest.TestCase):
    """What is not there is skipped or failed, as the rules say."""

    def outcome(self, require, **environment):
        """Return how a test ends that requires what is not there."""
        test = unittest.FunctionTestCase(lambda: require(test))
        result = unittest.TestResult()
        counted = mock.patch('relstore.tests.support.servers.server.skipped', collections.Counter({('', ''): 1}))
        with mock.patch.dict(os.environ, environment), counted:
            test.run(result)
        return len(result.skipped), len(result.failures), str(result.skipped or result.failures)

    def test_mysql_is_skipped_everywhere(self):
        with tempfile.TemporaryDirectory() as empty:
            for ci in ('true', ''):
                skipped, failed, reason = self.outcome(require_mysql, CI=ci, RELSTORE_MYSQL_HOME=empty)
                self.assertEqual((skipped, failed), (1, 0))
                self.assertIn('buildbot/fetch-mysql', reason)
                self.assertIn(empty, reason)

    def test_mariadb_is_needed_in_ci(self):
        with mock.patch('relstore.tests.support.servers.mysql.mariadb_programs', return_value=None):
            for ci, expected in (('true', (0, 1)), ('', (1, 0))):
                *counts, reason = self.outcome(require_mariadb, CI=ci)
                self.assertEqual(tuple(counts), expected)
                self.assertIn('apt-get install', reason)


class Proxy:
    def setUp(self):
        self.layer.require(self)
        server = self.layer.server
        server.create_database('proxied')
        self.addCleanup(server.drop_database, 'proxied')
        self.direct = server.connect('proxied')
        self.addCleanup(self.direct.close)
        ask(self.direct, 'CREATE TABLE t (n INT) ENGINE=InnoDB')
        self.proxy = CuttingProxy(server.address)
        self.proxy.start()
        self.addCleanup(self.proxy.stop)
        arguments = server.tcp_arguments('proxied', self.proxy.port)
        self.client = pymysql.connect(
            database=arguments.pop('db'), password=arguments.pop('passwd', ''), **arguments, autocommit=True,
            client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS,
        )  # fmt: skip
        self.addCleanup(self.client.close)
        self.proxy.reset()

    def rows(self):
        [(count,)] = ask(self.direct, 'SELECT count(*) FROM t')
        return count

    def test_one_round_trip_a_message(self):
        for n in range(1, 4):
            ask(self.client, 'SELECT 1')
            self.assertEqual(self.proxy.round_trips, n)

    def test_several_statements_are_one_message(self):
        with self.client.cursor() as cursor:
            cursor.execute('SELECT 1; INSERT INTO t VALUES (1); SELECT 2')
            results = [cursor.fetchall()]
            while cursor.nextset():
                results.append(cursor.fetchall())
        self.assertEqual(results, [((1,),), [], ((2,),)])
        self.assertEqual(self.proxy.round_trips, 1)

    def test_a_big_answer_is_one_round_trip(self):
        [(answer,)] = ask(self.client, "SELECT repeat('x', 3000000)")
        self.assertEqual(len(answer), 3000000)
        self.assertEqual(self.proxy.round_trips, 1)

    def test_a_statement_cut_short_is_not_executed(self):
        self.proxy.cut_after(sent=10)
        with self.assertRaises(pymysql.OperationalError):
            ask(self.client, 'INSERT INTO t VALUES (1)')
        self.assertEqual((self.proxy.cuts, self.rows()), (1, 0))

    def test_a_statement_whose_answer_is_lost_is_executed(self):
        self.proxy.cut_after(received=0)
        with self.assertRaises(pymysql.OperationalError):
            ask(self.client, 'INSERT INTO t VALUES (1)')
        self.assertEqual(self.rows(), 1)

    def test_what_was_held_back_arrives_after_resume(self):
        self.proxy.pause(sent=False)
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(ask(self.client, 'SELECT 1')))
        waiting.start()
        self.proxy.wait_until(lambda: self.proxy.received > 0)
        self.assertEqual(answers, [])
        self.proxy.resume()
        waiting.join()
        self.assertEqual(answers, [[(1,)]])


class MariaDBProxy(Proxy, unittest.TestCase):
    layer = MariaDBLayer


class MySQLProxy(Proxy, unittest.TestCase):
    layer = MySQLLayer
