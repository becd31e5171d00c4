"""What an administrator reads when something does not fit: one sentence, and nothing is left half done."""
import importlib.util
import os
import pathlib
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
import unittest
from contextlib import closing
from unittest import mock

import psycopg2
import ZConfig
import ZODB.config
from psycopg2.extensions import make_dsn

import relstore
from relstore.adapters.migrations import VERSION
from relstore.tests.support.children import environment
from relstore.tests.support.layers import Processes, SQLiteFiles
from relstore.tests.support.own import OwnMariaDBLayer, OwnMySQLLayer, ServerLayer, administrator
from relstore.tests.support.refusals import Refusals
from relstore.tests.support.servers import (
    MariaDBServer,
    PostgreSQLServer,
    StandbyServer,
    directory_open_to_all,
    free_port,
    require_postgresql,
    unprivileged_user,
)
from relstore.tests.support.watch import MySQLWatch

DRIVERS = ('psycopg2', 'psycopg')


def from_conf(*adapter, **options):
    lines = [f'{name.replace("_", "-")} {str(value).lower()}' for name, value in options.items()]
    return ZODB.config.storageFromString('\n'.join(
        ['%import relstore', '<relstore>', *lines, *adapter, '</relstore>', '']))


def something_else(test):
    """Return the port of a server of another kind, which runs as long as the test."""
    listener = socket.create_server(('127.0.0.1', 0))

    def hang_up():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:     # the test is over
                return
            with client:
                client.sendall(b'SSH-2.0-OpenSSH_9\r\n')
    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    test.addCleanup(listener.close)
    test.addCleanup(thread.join)
    test.addCleanup(listener.shutdown, socket.SHUT_RDWR)    # wakes accept(), which close() does not
    return listener.getsockname()[1]


# PostgreSQL


class PostgreSQLRefusals(Refusals):
    layer = ServerLayer

    def setUp(self):
        require_postgresql(self)
        self.server = self.layer.server
        self.dsn = self.server.create_database('site')
        self.addCleanup(self.drop)

    def drop(self):
        """Fails, after some seconds, if a session was left open: it is not told to end other sessions."""
        with administrator(self.server.dsn()) as run:
            try:
                run('DROP DATABASE site')
            except psycopg2.Error as e:
                self.server.drop_database('site')
                self.fail(f'leaked: {e}')

    def run_sql(self, sql):
        with administrator(self.dsn) as run:
            return run(sql)

    def relations(self):
        return self.run_sql("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace UNION ALL "
                            "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace")

    def as_role(self, role):
        return make_dsn(self.dsn, user=role)

    def refused(self, *words, dsn=None, schema=None, **options):
        """Open it with each driver, from Python and from zope.conf: all refuse, and nothing has changed."""
        dsn, before = dsn or self.dsn, self.relations()
        adapter = [f'dsn {dsn}'] + ([f'schema {schema}'] if schema else [])
        for driver in DRIVERS:
            ways = {
                'Python': lambda driver=driver: relstore.RelStore(
                    relstore.PostgreSQL(dsn, driver=driver, schema=schema), **options),
                'zope.conf': lambda driver=driver: from_conf(
                    '<postgresql>', *adapter, f'driver {driver}', '</postgresql>', **options)}
            for way, open_storage in ways.items():
                with self.subTest(driver, way=way):
                    self.check(self.refusal(open_storage), *words)
                    self.assertEqual(self.relations(), before)

    def create(self, **options):
        relstore.RelStore(relstore.PostgreSQL(self.dsn), **options).close()


class Dsn(PostgreSQLRefusals):

    def test_no_dsn(self):
        self.refused('this dsn', 'cannot be read', dsn='mysite')

    def test_unknown_key(self):
        self.refused('this dsn', 'cannot be read', 'each key that libpq knows', dsn='hots=localhost dbname=site')

    def test_no_part_of_a_password_is_told(self):
        here = f'127.0.0.1:{free_port()}'
        for dsn in ('password=sword fish', 'password=a fish=b', "password='fish", 'host=127.0.0.1 fish', '//u:fish@h/d',
                    f'postgresql://u:a@fish@{here}/db', f'postgresql://u:fish/b@{here}/db',
                    f'postgresql://u:%zzfish@{here}/db', f'postgresql://u:[fish@{here}/db',
                    f'postgresql://{here}/db?password=a&fish=1', f'postgresql://u:fish#@b@{here}/db'):
            for driver in DRIVERS:
                with self.subTest(dsn, driver=driver):
                    message = self.refusal(lambda: relstore.RelStore(relstore.PostgreSQL(dsn, driver=driver)))
                    self.check(message, 'this dsn')
                    self.assertNotIn('fish', ''.join(traceback.format_exception(self.kept)))

    def test_port_that_is_no_number(self):
        self.refused('"abc"', 'port', dsn='host=127.0.0.1 port=abc dbname=site')

    def test_unknown_host(self):
        self.refused('no-such-host.invalid', 'check', 'host', dsn='host=no-such-host.invalid dbname=site')

    def test_nobody_listens(self):
        port = free_port()
        self.refused('127.0.0.1', str(port), 'refused', 'check that the server runs',
                     dsn=f'host=127.0.0.1 port={port} dbname=site')

    def test_server_is_down(self):
        server = PostgreSQLServer()
        server.start()
        dsn = server.create_database('gone')
        directory = str(server.directory)
        server.stop()
        self.refused(directory, 'check that the server runs', dsn=dsn)

    def test_something_else_listens(self):
        port = something_else(self)
        self.refused('check that the server runs',
                     dsn=f'host=127.0.0.1 port={port} dbname=site sslmode=disable gssencmode=disable')

    def test_no_such_database(self):
        self.refused('"absent"', 'does not exist', 'dbname', dsn=self.server.dsn('absent'))

    def test_unknown_role(self):
        self.refused('"stranger"', 'does not exist', 'user', dsn=self.as_role('stranger'))

    def test_wrong_password(self):
        dsn = make_dsn(self.as_role('guarded'), password='swordfish')
        self.refused('"guarded"', 'password', dsn=dsn)
        self.assertNotIn('swordfish', str(self.kept))

    def test_no_password(self):
        self.refused('password', dsn=make_dsn(self.as_role('guarded'), passfile='/dev/null'))

    def test_right_password(self):
        self.run_sql('GRANT ALL ON SCHEMA public TO guarded')
        relstore.RelStore(relstore.PostgreSQL(make_dsn(self.as_role('guarded'), password='right'))).close()


class Rights(PostgreSQLRefusals):

    def test_may_not_create_tables(self):
        self.run_sql('REVOKE CREATE ON SCHEMA public FROM public')
        self.refused('permission denied', 'schema public', 'rights', 'visitor', dsn=self.as_role('visitor'))

    def test_may_read_alone(self):
        self.create()
        self.run_sql('GRANT SELECT ON ALL TABLES IN SCHEMA public TO visitor')
        self.refused('rights', 'read-only', dsn=self.as_role('visitor'))

    def test_may_read_tables_and_sequences_alone(self):
        """Found at open, not at the first commit, when a user has filled in a form."""
        self.create()
        self.run_sql('GRANT SELECT ON ALL TABLES IN SCHEMA public TO visitor; '
                     'GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO visitor')
        self.refused('rights', 'read-only', dsn=self.as_role('visitor'))

    def test_who_may_read_can_open_it_read_only(self):
        self.create()
        self.run_sql('GRANT SELECT ON ALL TABLES IN SCHEMA public TO visitor')
        storage = relstore.RelStore(relstore.PostgreSQL(self.as_role('visitor')), read_only=True)
        with closing(storage):
            self.assertEqual(len(storage), 0)

    def test_may_not_read(self):
        self.create()
        self.refused('SELECT on transaction', 'rights', 'visitor', dsn=self.as_role('visitor'))
        self.refused('SELECT on transaction', 'rights', 'visitor', dsn=self.as_role('visitor'), read_only=True)

    def test_standby(self):
        standby = StandbyServer(self.server)
        self.addCleanup(standby.stop)
        standby.start()
        self.refused('is a standby', 'primary', 'read-only true', dsn=standby.dsn('site'))

    def test_something_else_is_told_without_a_word_of_rights(self):
        """A trigger of somebody's, who wants no new tables."""
        self.run_sql('CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS '
                     "$$ BEGIN RAISE 'not before Monday'; END $$; "
                     'CREATE EVENT TRIGGER monday ON ddl_command_start EXECUTE FUNCTION refuse()')
        self.refused('not before Monday')
        self.assertNotIn('rights', str(self.kept))


class Tables(PostgreSQLRefusals):

    def test_history_free_where_history_is_kept(self):
        self.create(keep_history=True)
        self.refused('site', 'history-preserving', 'keep-history true', keep_history=False)

    def test_history_preserving_where_none_is_kept(self):
        self.create(keep_history=False)
        self.refused('site', 'history-free', 'keep-history false', keep_history=True)

    def test_newer_than_the_code(self):
        self.create()
        self.run_sql("UPDATE relstore_meta SET value = '99' WHERE name = 'schema'")
        self.refused('site', 'version 99', f'version {VERSION}', 'newer relstore')

    def test_nothing_there_and_nothing_may_be_created(self):
        self.refused('site', 'create-schema', create_schema=False)
        self.refused('site', 'read-only', 'create-schema', read_only=True)

    def test_a_table_is_missing(self):
        self.create()
        self.run_sql('DROP TABLE pack_object')
        self.refused('site', 'pack_object', 'create-schema', create_schema=False)

    def test_no_such_schema(self):
        self.refused('"absent"', 'schema', 'create', schema='absent')

    def test_no_schema_in_the_search_path(self):
        self.refused('search path', 'schema', dsn=make_dsn(self.dsn, options='-csearch_path=absent'))

    def test_somebody_elses_table(self):
        """What is there is not ours, so it is neither used nor completed."""
        self.run_sql('CREATE TABLE transaction (amount integer)')
        self.refused('public')

    def test_failure_in_the_middle_leaves_nothing(self):
        """The relation that is made last is refused: those made before are gone with it."""
        self.run_sql('REVOKE CREATE ON SCHEMA public FROM public; GRANT CREATE ON SCHEMA public TO visitor; '
                     'ALTER DEFAULT PRIVILEGES REVOKE USAGE ON SCHEMAS FROM public; '
                     'REVOKE USAGE ON LANGUAGE plpgsql FROM public')
        self.refused('permission denied', 'plpgsql', dsn=self.as_role('visitor'))

    def test_server_is_too_old(self):
        with mock.patch('relstore.adapters.postgresql.OLDEST_VERSION', 990000):
            self.refused('PostgreSQL', 'needs', 'or newer')


class Driver(Refusals):

    def test_unknown_driver(self):
        self.check(self.refusal(lambda: relstore.PostgreSQL('dbname=site', driver='pg9000')),
                   "'pg9000'", 'choose', 'psycopg2', 'psycopg')
        with self.assertRaisesRegex(ZConfig.ConfigurationError, "'pg9000'.*choose.*psycopg2.*line 5"):
            from_conf('<postgresql>', 'dsn dbname=site', 'driver pg9000', '</postgresql>')

    def test_driver_that_is_chosen(self):
        """psycopg 3, if it is worth it; and if there is none, that is what to install."""
        import psycopg

        def chosen():
            return relstore.PostgreSQL('dbname=site').driver.name

        self.assertEqual(chosen(), 'psycopg')
        with mock.patch.object(psycopg.pq, '__impl__', 'python'):
            self.assertEqual(chosen(), 'psycopg2')
        with mock.patch.object(psycopg.pq, 'version', lambda: 130011):
            self.assertEqual(chosen(), 'psycopg2')
        with mock.patch.dict(sys.modules, {'psycopg': None}):
            self.assertEqual(chosen(), 'psycopg2')
        with mock.patch.dict(sys.modules, {'psycopg': None, 'psycopg2': None}):
            self.check(self.refusal(lambda: relstore.RelStore(relstore.PostgreSQL('dbname=site'))),
                       'install', 'relstore[psycopg]')

    def test_libpq_is_too_old(self):
        import psycopg
        with mock.patch.object(psycopg.pq, 'version', lambda: 130011):
            self.check(self.refusal(lambda: relstore.RelStore(relstore.PostgreSQL('dbname=site', driver='psycopg'))),
                       'libpq 14', 'version 13', 'install')

    def test_driver_is_not_installed(self):
        extras = {'psycopg2': 'relstore[postgresql]', 'psycopg': 'relstore[psycopg]'}
        for driver, extra in extras.items():
            ways = {
                'Python': lambda driver=driver: relstore.RelStore(relstore.PostgreSQL('dbname=x', driver=driver)),
                'zope.conf': lambda driver=driver: from_conf(
                    '<postgresql>', 'dsn dbname=x', f'driver {driver}', '</postgresql>')}
            for way, open_storage in ways.items():
                # None in sys.modules makes Python refuse to import a module.
                with self.subTest(driver, way=way), mock.patch.dict(sys.modules, {driver: None}):
                    message = self.refusal(open_storage)
                    self.check(message, driver, 'install', extra)
                    self.assertNotIn('server', message)


# MySQL and MariaDB


class MySQLRefusals(Refusals):
    drivers = ('pymysql', 'mysqlclient') if importlib.util.find_spec('MySQLdb') else ('pymysql',)

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server
        self.where = self.server.create_database('site')
        self.watch = MySQLWatch(self.server.arguments())
        self.addCleanup(self.watch.close)
        self.addCleanup(self.drop)
        self.run_sql("CREATE USER guarded@'%' IDENTIFIED BY 'right'", "CREATE USER visitor@'%'")
        self.addCleanup(self.run_sql, "DROP USER guarded@'%', visitor@'%'")

    def drop(self):
        """Fails, after some seconds, if a session was left open."""
        try:
            self.watch.until("NOT EXISTS (SELECT 1 FROM information_schema.processlist WHERE db = 'site')", seconds=5)
        finally:
            self.server.drop_database('site')

    def run_sql(self, *statements):
        with closing(self.server.connect('site')) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall()

    def set_globally(self, name, value):
        """Change a setting of the server, until the test ends."""
        [[before]] = self.run_sql(f'SELECT @@GLOBAL.{name}')
        before = repr(before) if isinstance(before, str) else before
        self.addCleanup(self.run_sql, f'SET GLOBAL {name} = {before}')
        self.run_sql(f'SET GLOBAL {name} = {value}')

    def relations(self):
        return self.run_sql("SELECT table_name, engine FROM information_schema.tables WHERE table_schema = 'site' "
                            'ORDER BY 1')

    def refused(self, *words, where=None, options=None, **changed):
        """Open it with each driver, from Python and from zope.conf: all refuse, and nothing has changed."""
        arguments, before = (where or self.where) | changed, self.relations()
        options = options or {}
        lines = [f'{name} {value}' for name, value in arguments.items()]
        for driver in self.drivers:
            ways = {
                'Python': lambda driver=driver: relstore.RelStore(
                    relstore.MySQL(**arguments, driver=driver), **options),
                'zope.conf': lambda driver=driver: from_conf(
                    '<mysql>', *lines, f'driver {driver}', '</mysql>', **options)}
            for way, open_storage in ways.items():
                with self.subTest(driver, way=way):
                    self.check(self.refusal(open_storage), *words)
                    self.assertEqual(self.relations(), before)

    def create(self, **options):
        for driver in self.drivers:
            relstore.RelStore(relstore.MySQL(**self.where, driver=driver), **options).close()


class MySQLAddress(MySQLRefusals):

    def test_nobody_listens(self):
        port = free_port()
        self.refused('check that the server runs', 'port', where={'db': 'site', 'host': '127.0.0.1', 'port': port})

    def test_unknown_host(self):
        self.refused('no-such-host.invalid', 'check', where={'db': 'site', 'host': 'no-such-host.invalid'})

    def test_no_socket(self):
        self.refused('/nowhere/socket', 'check that the server runs', unix_socket='/nowhere/socket')

    def test_something_else_listens(self):
        self.refused('check that the server runs',
                     where={'db': 'site', 'host': '127.0.0.1', 'port': something_else(self)})

    def test_no_such_database(self):
        self.refused('absent', db='absent')

    def test_unknown_user(self):
        self.refused('stranger', 'user', user='stranger')

    def test_wrong_password(self):
        self.run_sql("GRANT ALL ON site.* TO guarded@'%'")
        self.refused('guarded', 'passwd', user='guarded', passwd='swordfish')
        self.assertNotIn('swordfish', str(self.kept))

    def test_no_password(self):
        self.run_sql("GRANT ALL ON site.* TO guarded@'%'")
        self.refused('guarded', 'passwd', user='guarded')

    def test_right_password(self):
        self.run_sql("GRANT ALL ON site.* TO guarded@'%'")
        for driver in self.drivers:
            for where in self.where, self.server.tcp_arguments('site'):
                address = relstore.MySQL(**where | {'user': 'guarded', 'passwd': 'right'}, driver=driver)
                relstore.RelStore(address).close()


class MySQLRights(MySQLRefusals):

    def test_may_not_enter(self):
        self.refused('visitor', user='visitor')

    def test_may_not_create_tables(self):
        self.run_sql("GRANT SELECT, INSERT, UPDATE, DELETE ON site.* TO visitor@'%'")
        self.refused('rights', 'site', user='visitor')

    def test_may_read_alone(self):
        """Found at open, not at the first commit, when a user has filled in a form."""
        self.create()
        self.run_sql("GRANT SELECT ON site.* TO visitor@'%'")
        self.refused('rights', 'read-only', user='visitor')

    def test_who_may_read_can_open_it_read_only(self):
        self.create()
        self.run_sql("GRANT SELECT ON site.* TO visitor@'%'")
        for driver in self.drivers:
            address = relstore.MySQL(**self.where | {'user': 'visitor'}, driver=driver)
            with closing(relstore.RelStore(address, read_only=True)) as storage:
                self.assertEqual(len(storage), 0)


class MySQLTables(MySQLRefusals):

    def test_history_free_where_history_is_kept(self):
        self.create(keep_history=True)
        self.refused('site', 'history-preserving', 'keep-history true', options={'keep_history': False})

    def test_history_preserving_where_none_is_kept(self):
        self.create(keep_history=False)
        self.refused('site', 'history-free', 'keep-history false', options={'keep_history': True})

    def test_newer_than_the_code(self):
        self.create()
        self.run_sql("UPDATE relstore_meta SET value = '99' WHERE name = 'schema'")
        self.refused('site', 'version 99', f'version {VERSION}', 'newer relstore')

    def test_nothing_there_and_nothing_may_be_created(self):
        self.refused('site', 'create-schema', options={'create_schema': False})
        self.refused('site', 'read-only', 'create-schema', options={'read_only': True})

    def test_a_table_is_missing(self):
        self.create()
        self.run_sql('DROP TABLE pack_object')
        self.refused('site', 'pack_object', 'create-schema', options={'create_schema': False})

    def test_somebody_elses_table(self):
        """What is there is not ours, so it is neither used nor completed."""
        self.run_sql('CREATE TABLE object_state (amount INTEGER)')
        self.refused('site')

    def test_a_table_without_transactions(self):
        self.create()
        self.run_sql('ALTER TABLE object_ref ENGINE = MyISAM')
        self.refused('object_ref', 'MyISAM', 'InnoDB')

    def test_default_engine_without_transactions(self):
        self.set_globally('default_storage_engine', 'MyISAM')
        self.create()
        self.assertEqual({engine for _, engine in self.relations()} - {None, 'MEMORY'}, {'InnoDB'})


class MySQLSettings(MySQLRefusals):

    def test_server_is_too_old(self):
        with (mock.patch('relstore.adapters.mysql_server.OLDEST_MYSQL', (99, 0)),
              mock.patch('relstore.adapters.mysql_server.OLDEST_MARIADB', (99, 0))):
            self.refused('99', 'or newer')

    def test_packets_are_too_small(self):
        self.set_globally('max_allowed_packet', 512 * 1024)
        self.refused('max_allowed_packet', '524,288')

    def test_server_is_read_only(self):
        self.create()
        self.set_globally('read_only', 1)
        self.refused('read-only true')
        storage = relstore.RelStore(relstore.MySQL(**self.where, driver=self.drivers[0]), read_only=True)
        storage.close()

    def test_binary_log_of_statements(self):
        if not self.server.is_mariadb:
            self.skipTest('MySQL does without it, sooner or later')
        server = MariaDBServer({'log_bin': 'binary', 'server_id': 1, 'binlog_format': 'STATEMENT'})
        self.addCleanup(server.stop)
        server.start()
        self.refused('binlog_format', 'STATEMENT', 'ROW', where=server.create_database('site'))


class MySQLDriver(Refusals):

    def test_unknown_driver(self):
        self.check(self.refusal(lambda: relstore.MySQL('site', driver='mysqldb9000')),
                   "'mysqldb9000'", 'choose', 'mysqlclient', 'pymysql')

    def test_driver_is_not_installed(self):
        for driver, module in ('mysqlclient', 'MySQLdb'), ('pymysql', 'pymysql'):
            extra = 'relstore[mysql]' if driver == 'mysqlclient' else 'relstore[pymysql]'
            ways = {
                'Python': lambda driver=driver: relstore.RelStore(relstore.MySQL('x', driver=driver)),
                'zope.conf': lambda driver=driver: from_conf('<mysql>', 'db x', f'driver {driver}', '</mysql>')}
            for way, open_storage in ways.items():
                with self.subTest(driver, way=way), mock.patch.dict(sys.modules, {module: None}):
                    message = self.refusal(open_storage)
                    self.check(message, driver, 'install', extra)
                    self.assertNotIn('server', message)


for suite in MySQLAddress, MySQLRights, MySQLTables, MySQLSettings:
    for layer in OwnMariaDBLayer, OwnMySQLLayer:
        name = f'{suite.__name__}On{layer.__name__[3:-5]}'
        globals()[name] = type(name, (suite,), {'layer': layer, '__module__': __name__})
del suite, layer, MySQLAddress, MySQLRights, MySQLTables, MySQLSettings


# SQLite


class SQLiteRefusals(Refusals):

    def setUp(self):
        self.parent = pathlib.Path(tempfile.mkdtemp(prefix='relstore-bad-', dir=directory_open_to_all()))
        self.addCleanup(shutil.rmtree, self.parent)
        self.addCleanup(self.no_open_file)
        self.directory = self.parent / 'site'
        self.database = self.directory / 'main.sqlite3'

    def no_open_file(self):
        links = [entry.path for entry in os.scandir('/proc/self/fd')]
        targets = [os.readlink(link) for link in links if os.path.islink(link)]
        self.assertEqual([target for target in targets if target.startswith(str(self.parent))], [], 'leaked')

    def content(self):
        """What there is: path -> bytes, None for what is no file. Not the file of locks: it holds nothing."""
        return {path: path.read_bytes() if path.is_file() else None for path in self.parent.rglob('*')
                if path.name != 'writers.lock'}

    def refused(self, *words, directory=None, **options):
        directory, before = directory or self.directory, self.content()
        ways = {
            'Python': lambda: relstore.RelStore(relstore.SQLite(str(directory)), **options),
            'zope.conf': lambda: from_conf('<sqlite3>', f'data-dir {directory}', '</sqlite3>', **options)}
        for way, open_storage in ways.items():
            with self.subTest(way):
                self.check(self.refusal(open_storage), *words)
                self.assertEqual(self.content(), before)

    def create(self, **options):
        relstore.RelStore(relstore.SQLite(str(self.directory)), **options).close()

    def run_sql(self, sql):
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute(sql)


class Directory(SQLiteRefusals):
    layer = SQLiteFiles

    def test_parent_is_missing(self):
        self.refused(str(self.directory / 'below'), 'No such file or directory', 'parent',
                     directory=self.directory / 'below')

    def test_file_in_the_way(self):
        self.directory.write_text('')
        self.refused(str(self.directory), 'director')

    def test_parent_is_a_file(self):
        self.directory.write_text('')
        self.refused(str(self.directory / 'below'), 'Not a directory', directory=self.directory / 'below')

    def test_directory_where_the_file_should_be(self):
        self.database.mkdir(parents=True)
        self.refused(str(self.database), 'main.sqlite3')

    def test_empty_name(self):
        """The current directory is not what somebody meant who left the name out."""
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.parent)
        self.check(self.refusal(lambda: relstore.RelStore(relstore.SQLite(''))), 'data-dir', 'name')
        self.assertEqual(self.content(), {})

    def test_dangling_link(self):
        self.directory.symlink_to(self.parent / 'unmounted')
        self.refused(str(self.directory), 'data-dir')

    def test_nothing_there_and_nothing_may_be_created(self):
        self.refused(str(self.database), 'read-only', read_only=True)
        self.refused(str(self.database), 'create-schema', create_schema=False)

    def test_disk_is_full(self):
        """The tables need more pages than there may be: what was made of them is removed, the directory too."""
        message = self.refusal(lambda: relstore.RelStore(
            relstore.SQLite(str(self.directory), pragmas={'max_page_count': 3})))
        self.check(message, str(self.database), 'full')
        self.assertEqual(self.content(), {})


CHILD = """
import os, sys, tempfile
import relstore

def open_storage(directory, **options):
    relstore.RelStore(relstore.SQLite(directory), **options).close()

with tempfile.TemporaryDirectory() as directory:
    open_storage(directory)     # imports everything, which may be more than another user can read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
try:
    open_storage(sys.argv[1], read_only=sys.argv[3] == 'True')
except relstore.errors.ConfigurationError as e:
    sys.exit(str(e))
"""


class Unwritable(SQLiteRefusals):
    """What a user without rights meets; where root runs the tests, in a child process that gives them up."""
    layer = Processes

    def open(self, read_only=False):
        """Return what the child said on stderr, after a warning that it cannot lock the file of locks."""
        child = subprocess.run(
            [sys.executable, '-c', CHILD, self.directory, str(unprivileged_user().pw_uid), str(read_only)],
            stderr=subprocess.PIPE, text=True, env=environment())
        *_, said = child.stderr.splitlines()
        return said

    def unwritable(self, *words, **options):
        before = self.content()
        for path in sorted([self.parent, *before], reverse=True):
            path.chmod(0o555 if path.is_dir() else 0o444)
        self.addCleanup(self.parent.chmod, 0o755)
        try:
            self.check(self.open(**options), *words)
            self.assertEqual(self.content(), before)
        finally:
            for path in self.parent, *before:
                path.chmod(0o755)

    def test_directory_cannot_be_made(self):
        self.unwritable(str(self.directory), 'data-dir', 'Permission denied')

    def test_directory_cannot_be_written(self):
        self.directory.mkdir()
        self.unwritable(str(self.directory), 'data-dir', 'may write')

    def test_database_cannot_be_written(self):
        self.create()
        self.unwritable(str(self.database), 'data-dir', 'may write')

    def test_read_only_needs_to_write_too(self):
        """SQLite's readers of a write-ahead log share memory through a file beside it."""
        self.create()
        self.unwritable(str(self.database), 'data-dir', 'may write', read_only=True)


class File(SQLiteRefusals):
    layer = SQLiteFiles

    def test_no_database(self):
        self.directory.mkdir()
        self.database.write_bytes(b'Dear diary, ' * 1000)
        self.refused(str(self.database), 'not a database', 'data-dir')

    def test_truncated(self):
        self.create()
        os.truncate(self.database, self.database.stat().st_size // 2)
        self.refused(str(self.database), 'malformed', 'backup')

    def test_damaged(self):
        self.create()
        data = bytearray(self.database.read_bytes())
        data[100:4000] = b'\xff' * 3900
        self.database.write_bytes(data)
        self.refused(str(self.database), 'malformed', 'backup')

    def test_history_free_where_history_is_kept(self):
        self.create(keep_history=True)
        self.refused(str(self.database), 'history-preserving', 'keep-history true', keep_history=False)

    def test_history_preserving_where_none_is_kept(self):
        self.create(keep_history=False)
        self.refused(str(self.database), 'history-free', 'keep-history false', keep_history=True)

    def test_newer_than_the_code(self):
        self.create()
        self.run_sql("UPDATE relstore_meta SET value = '99' WHERE name = 'schema'")
        self.refused(str(self.database), 'version 99', f'version {VERSION}', 'newer relstore')

    def test_a_table_is_missing(self):
        self.create()
        self.run_sql('DROP TABLE pack_object')
        self.refused(str(self.database), 'pack_object', 'create-schema', create_schema=False)

    def test_pragma_that_would_lose_data(self):
        """Without a journal SQLite cannot roll back, and a conflict would be half a commit."""
        for value in 'OFF', 'memory', 'DELETE':
            with self.subTest(value):
                self.check(self.refusal_of_pragma('journal_mode', value), 'journal_mode', value)

    def test_pragma_that_sqlite_would_ignore(self):
        for name, value in [('synchronus', 'full'), ('cachesize', '-4000'), ('synchronous', 'fully')]:
            with self.subTest(name):
                self.check(self.refusal_of_pragma(name, value), 'The pragma', name)
                self.assertFalse(self.directory.exists() and list(self.directory.iterdir()))
        with closing(relstore.RelStore(relstore.SQLite(str(self.directory), pragmas={'Synchronous': 'Extra'}))):
            pass

    def test_pragma_that_is_none(self):
        for name, value in [('synchronous', 'FULL; DROP TABLE object_state'), ('cache size', '1'), ('', '1')]:
            with self.subTest(name):
                self.check(self.refusal_of_pragma(name, value), 'pragma', value)

    def refusal_of_pragma(self, name, value):
        return self.refusal(lambda: relstore.RelStore(relstore.SQLite(str(self.directory), pragmas={name: value})))


class Keywords(SQLiteRefusals):

    def refusal_of(self, **options):
        message = self.refusal(lambda: relstore.RelStore(relstore.SQLite(str(self.directory)), **options))
        self.assertEqual(self.content(), {})
        return message

    def test_unknown_option(self):
        self.check(self.refusal_of(keep_histry=False), "'keep_histry'", "'keep_history'")

    def test_value_that_is_not_allowed(self):
        self.check(self.refusal_of(pool_size=0), 'pool-size', '0', '2 or more')


class CommandLine(unittest.TestCase):
    layer = Processes

    def test_no_traceback(self):
        for arguments in [], ['frobnicate'], ['demo', '--frobnicate'], ['demo', '--data', '/no/such/Data.fs']:
            with self.subTest(arguments):
                done = subprocess.run([sys.executable, '-m', 'relstore.cli.main', *arguments],
                                      capture_output=True, text=True, env=environment())
                self.assertEqual(done.returncode, 2)
                self.assertNotIn('Traceback', done.stderr)
                self.assertIn('relstore', done.stderr)


del PostgreSQLRefusals, MySQLRefusals, SQLiteRefusals
