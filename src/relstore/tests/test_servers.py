"""The tests' own tools: servers that come, go and crash as asked, and a proxy that cuts where it is told."""

import os
import threading
import unittest
from contextlib import closing

import psycopg2

from relstore.tests.support.children import goes_with_its_run
from relstore.tests.support.layers import Processes
from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.servers import (
    PgBouncerServer,
    PostgreSQLLayer,
    PostgreSQLServer,
    children_of,
    open_process,
    require_pgbouncer,
    require_postgresql,
    wait_for_exit,
)


def connect(dsn):
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    return closing(connection)


def ask(connection, statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else None


def query(dsn, statement):
    with connect(dsn) as connection:
        return ask(connection, statement)


class SharedServer(unittest.TestCase):
    layer = PostgreSQLLayer

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server

    def test_a_new_database_is_empty_and_utf8(self):
        dsn = self.server.create_database('fresh')
        self.addCleanup(self.server.drop_database, 'fresh')
        [(tables,)] = query(dsn, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        [(encoding,)] = query(dsn, 'SHOW server_encoding')
        self.assertEqual((tables, encoding), (0, 'UTF8'))

    def test_databases_made_by_many_threads_at_once(self):
        names = [f'many_{n}' for n in range(6)]
        made = []
        threads = [
            threading.Thread(target=lambda name=name: made.append(self.server.create_database(name)))
            for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in names:
            self.addCleanup(self.server.drop_database, name)
        self.assertEqual(len(made), len(names))

    def test_a_database_is_dropped_under_its_clients(self):
        with connect(self.server.create_database('doomed')) as client:
            self.server.drop_database('doomed')
            with self.assertRaises(psycopg2.OperationalError):
                ask(client, 'SELECT 1')


class OwnServer(unittest.TestCase):
    layer = Processes
    def setUp(self):
        require_postgresql(self)

    def start(self, *args, **kwargs):
        server = PostgreSQLServer(*args, **kwargs)
        self.addCleanup(server.stop)
        server.start()
        return server

    def test_settings_and_durability(self):
        fast, durable = self.start({'work_mem': '123kB'}), self.start(durable=True)
        self.assertEqual(query(fast.dsn(), 'SHOW work_mem'), [('123kB',)])
        self.assertEqual(query(fast.dsn(), 'SHOW fsync'), [('off',)])
        self.assertEqual(query(durable.dsn(), 'SHOW fsync'), [('on',)])
        self.assertEqual(query(durable.tcp_dsn(), 'SHOW max_connections'), [('300',)])

    def test_a_setting_that_is_wrong_is_told_with_the_log(self):
        with self.assertRaisesRegex(RuntimeError, 'no_such_setting'):
            self.start({'no_such_setting': 1})

    def test_committed_rows_survive_kill_and_restart(self):
        server = self.start(durable=True)
        dsn = server.create_database('d')
        query(dsn, 'CREATE TABLE t AS SELECT 7 AS n')
        for stop in (server.kill, server.restart):
            with connect(dsn) as client:
                stop()
                with self.assertRaises(psycopg2.OperationalError):
                    ask(client, 'SELECT 1')
            if server.process is None:
                server.start()
            self.assertEqual(query(dsn, 'SELECT n FROM t'), [(7,)])
        self.assertIn('was not properly shut down', server.log_tail(1000))

    def test_kill_leaves_no_process(self):
        server = self.start()
        with connect(server.dsn()):
            pids = [server.process.pid, *children_of(server.process.pid)]
            handles = [open_process(pid) for pid in pids]
            server.kill()
            self.assertGreater(len(pids), 3)
            for handle in handles:
                wait_for_exit(handle, seconds=0)
                os.close(handle)

    def test_stop_leaves_no_directory(self):
        server = self.start()
        directory = server.directory
        server.stop()
        self.assertFalse(directory.exists())

    def test_the_server_of_a_test_run_that_dies_goes_with_it(self):
        goes_with_its_run(self, PostgreSQLServer)


class OwnPgBouncer(unittest.TestCase):
    layer = PostgreSQLLayer

    def setUp(self):
        self.layer.require(self)
        require_pgbouncer(self)
        self.direct = self.layer.server.create_database('pooled')
        self.addCleanup(self.layer.server.drop_database, 'pooled')
        self.bouncer = PgBouncerServer(self.layer.server, {'default_pool_size': 1})
        self.addCleanup(self.bouncer.stop)

    def test_it_leads_to_the_same_database(self):
        self.bouncer.start()
        query(self.bouncer.dsn(self.direct), 'CREATE TABLE t AS SELECT 7 AS n')
        self.assertEqual(query(self.direct, 'SELECT n FROM t'), [(7,)])

    def test_all_clients_share_its_servers(self):
        self.bouncer.start()
        dsn = self.bouncer.dsn(self.direct)
        with connect(dsn) as one, connect(dsn) as other:
            self.assertEqual(ask(one, 'SELECT pg_backend_pid()'), ask(other, 'SELECT pg_backend_pid()'))
            self.assertNotEqual(one.info.backend_pid, other.info.backend_pid)

    def test_it_goes_and_comes_back_on_its_port(self):
        self.bouncer.start()
        dsn = self.bouncer.dsn(self.direct)
        for stop in self.bouncer.kill, self.bouncer.restart:
            with connect(dsn) as client:
                stop()
                with self.assertRaises(psycopg2.OperationalError):
                    ask(client, 'SELECT 1')
            if self.bouncer.process is None:
                self.assertRaises(psycopg2.OperationalError, psycopg2.connect, dsn)
                self.bouncer.start()
            self.assertEqual(query(dsn, 'SELECT 1'), [(1,)])
        directory = self.bouncer.directory
        self.bouncer.stop()
        self.assertFalse(directory.exists())

    def test_a_setting_that_is_wrong_is_told_with_the_log(self):
        self.bouncer.settings['no_such_setting'] = 1
        with self.assertRaisesRegex(RuntimeError, 'no_such_setting'):
            self.bouncer.start()


class Proxy(unittest.TestCase):
    layer = PostgreSQLLayer

    def setUp(self):
        self.layer.require(self)
        server = self.layer.server
        self.dsn = server.create_database('proxied')
        self.addCleanup(server.drop_database, 'proxied')
        query(self.dsn, 'CREATE TABLE t (n integer)')
        self.proxy = CuttingProxy(server.address)
        self.proxy.start()
        self.addCleanup(self.proxy.stop)
        self.proxied_dsn = server.tcp_dsn('proxied', self.proxy.port)

    def client(self):
        client = psycopg2.connect(self.proxied_dsn)
        client.autocommit = True
        self.addCleanup(client.close)
        return client

    def rows(self):
        [(count,)] = query(self.dsn, 'SELECT count(*) FROM t')
        return count

    def test_one_round_trip_a_statement(self):
        client = self.client()
        self.proxy.reset()
        for n in range(1, 4):
            ask(client, 'SELECT 1')
            self.assertEqual(self.proxy.round_trips, n)

    def test_a_big_answer_is_one_round_trip(self):
        client = self.client()
        self.proxy.reset()
        [(answer,)] = ask(client, "SELECT repeat('x', 3000000)")
        self.assertEqual(len(answer), 3000000)
        self.assertEqual(self.proxy.round_trips, 1)
        self.assertGreater(self.proxy.received, 3000000)
        self.assertLess(self.proxy.sent, 100)

    def test_a_statement_cut_short_is_not_executed(self):
        client = self.client()
        self.proxy.cut_after(sent=20)
        with self.assertRaises(psycopg2.OperationalError):
            ask(client, 'INSERT INTO t VALUES (1)')
        self.assertEqual(self.proxy.cuts, 1)
        self.assertEqual(self.rows(), 0)

    def test_a_statement_whose_answer_is_lost_is_executed(self):
        client = self.client()
        self.proxy.cut_after(received=0)
        with self.assertRaises(psycopg2.OperationalError):
            ask(client, 'INSERT INTO t VALUES (1)')
        self.assertEqual(self.rows(), 1)

    def test_cut_after_the_last_byte_of_a_statement(self):
        client = self.client()
        self.proxy.reset()
        ask(client, 'INSERT INTO t VALUES (1)')
        self.proxy.cut_after(received=self.proxy.received)
        ask(client, 'INSERT INTO t VALUES (2)')
        self.assertEqual(self.rows(), 2)
        with self.assertRaises(psycopg2.OperationalError):
            ask(client, 'INSERT INTO t VALUES (3)')

    def test_a_fuse_burns_once(self):
        client = self.client()
        self.proxy.cut_after(sent=0)
        with self.assertRaises(psycopg2.OperationalError):
            ask(client, 'SELECT 1')
        self.assertEqual(ask(self.client(), 'SELECT 1'), [(1,)])
        self.assertEqual(self.proxy.cuts, 1)

    def test_cut_all_connections(self):
        clients = [self.client(), self.client()]
        self.proxy.cut()
        for client in clients:
            with self.assertRaises(psycopg2.OperationalError):
                ask(client, 'SELECT 1')
        self.assertEqual(ask(self.client(), 'SELECT 1'), [(1,)])

    def test_what_was_held_back_arrives_after_resume(self):
        client = self.client()
        for way in ({'sent': False}, {'received': False}):
            with self.subTest(held=way):
                self.proxy.reset()
                self.proxy.pause(**way)
                answers = []
                waiting = threading.Thread(target=lambda: answers.append(ask(client, 'SELECT 1')))
                waiting.start()
                held = 'received' if 'sent' in way else 'sent'
                self.proxy.wait_until(lambda: getattr(self.proxy, held) > 0)
                self.assertEqual(answers, [])
                self.proxy.resume()
                waiting.join()
                self.assertEqual(answers, [[(1,)]])

    def test_a_stopped_proxy_refuses_and_comes_back_on_its_port(self):
        client = self.client()
        self.proxy.stop()
        with self.assertRaises(psycopg2.OperationalError):
            ask(client, 'SELECT 1')
        with self.assertRaises(psycopg2.OperationalError):
            self.client()
        self.proxy.start()
        self.assertEqual(ask(self.client(), 'SELECT 1'), [(1,)])
