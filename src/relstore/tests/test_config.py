"""ZConfig sections: what they take, how a refusal reads, and that component.xml agrees with Options."""
import io
import logging
import os
import subprocess
import sys
import tempfile
import unittest
from dataclasses import fields
from pathlib import Path

import transaction
import ZConfig
import ZODB.config

from relstore.errors import ConfigurationError
from relstore.options import ALIASES, REFUSED, WITHOUT_EFFECT, Options
from relstore.tests.support.layers import Processes, SQLiteFiles
from relstore.tests.support.relstorage_options import HONOURED, RELSTORAGE_OPTIONS
from relstore.tests.support.servers import PostgreSQLLayer

SECTIONS = ('relstore', 'relstorage')
SQLITE = '<sqlite3>\n  data-dir /nowhere\n</sqlite3>'


def storage_text(*lines: str, section: str = 'relstore') -> str:
    return '\n'.join(['%import relstore', f'<{section}>', *lines, f'</{section}>', ''])


def parse(*lines: str, section: str = 'relstore'):
    """Return the factory of a storage, not opened."""
    text = io.StringIO(storage_text(*lines, section=section))
    config, _ = ZConfig.loadConfigFile(ZODB.config.getStorageSchema(), text)
    return config.storage


def parse_adapter(*lines: str):
    """Return the factory of an adapter, not opened."""
    [adapter] = parse(*lines).config.adapters
    return adapter


def schema_of(section: str):
    """Return ZConfig's description of a section type: (key, info) pairs."""
    return parse(SQLITE).config.getSectionDefinition().gettype(section)


class OptionTests(unittest.TestCase):

    def options(self, *lines, section='relstore'):
        return Options.from_section(parse(SQLITE, *lines, section=section).config)

    def test_defaults(self):
        for section in SECTIONS:
            with self.subTest(section), self.assertNoLogs('relstore'):
                self.assertEqual(self.options(section=section), Options())

    def test_every_option_of_relstorage_is_honoured_warned_about_or_refused(self):
        for section in SECTIONS:
            for key, value in RELSTORAGE_OPTIONS.items():
                name = key.replace('-', '_')
                with self.subTest(key, section=section):
                    if name in REFUSED:
                        with self.assertRaises(ZConfig.ConfigurationError):
                            self.options(f'{key} {value}', section=section)
                    elif name in HONOURED:
                        needed = ['cache-servers localhost:11211'] if key == 'poll-interval' else []
                        with self.assertNoLogs('relstore'):
                            options = self.options(f'{key} {value}', *needed, section=section)
                        field = ALIASES.get(name, name)
                        self.assertNotEqual(getattr(options, field), getattr(Options(), field))
                    else:
                        with self.assertLogs('relstore', logging.WARNING) as logs:
                            self.assertEqual(self.options(f'{key} {value}', section=section), Options())
                        self.assertEqual(len(logs.records), 1)
                        self.assertTrue(logs.records[0].getMessage().startswith(name.replace('_', '-')))

    def test_values(self):
        self.assertEqual(
            self.options('name site', 'read-only on', 'keep-history off', 'create-schema no', 'pack-gc false',
                         'pack-dry-run on', 'pack-prepack-only on', 'pack-skip-prepack on', 'pack-batch-timeout 0.25',
                         'pack-duty-cycle 0.75', 'pack-max-delay 5',
                         'cache-local-mb 100', 'cache-local-object-max 2MB', 'pool-size 8',
                         'pool-timeout 0.5', 'poll-limit 9', 'commit-lock-timeout 5', 'cache-local-dir var/cache',
                         'cache-local-dir-write-max-size 10MB',
                         'cache-servers 10.0.0.1:11211, unix:/run/mc', 'cache-module-name pymemcache',
                         'cache-prefix zodb', 'poll-interval 0.5', 'blob-dir var/blobs', 'shared-blob-dir on',
                         'blob-cache-size 10GB', 'blob-cache-fill-on-commit on', 'blob-chunk-size 64KB'),
            Options(blob_dir='var/blobs', shared_blob_dir=True, blob_cache_size=10 << 30,
                    blob_cache_fill_on_commit=True, blob_chunk_size=64 << 10,
                    cache_local_dir='var/cache', cache_local_dir_write_max_size=10 << 20,
                    name='site', read_only=True, keep_history=False, create_schema=False, cache_local_mb=100,
                    cache_local_object_max=2 << 20, pool_size=8, pool_timeout=0.5, poll_limit=9,
                    commit_lock_timeout=5, pack_gc=False, pack_dry_run=True, pack_prepack_only=True,
                    pack_skip_prepack=True, pack_batch_timeout=0.25, pack_duty_cycle=0.75, pack_max_delay=5,
                    cache_servers='10.0.0.1:11211, unix:/run/mc',
                    cache_module_name='pymemcache', cache_prefix='zodb', poll_interval=0.5))

    def test_underscores_and_capitals_in_keys(self):
        self.assertEqual(self.options('Keep_History off'), Options(keep_history=False))

    def test_reading_the_file_logs_nothing(self):
        with self.assertNoLogs('relstore'):
            parse(SQLITE, 'replica-timeout 600')


class RefusalTests(unittest.TestCase):

    def refusal(self, *lines, section='relstore'):
        with self.assertRaises(ZConfig.ConfigurationError) as caught:
            parse(*lines, section=section)
        return str(caught.exception)

    def test_unknown_option(self):
        # Lines 1 and 2 are %import and <relstore>.
        self.assertEqual(
            self.refusal('keep-histroy off', SQLITE),
            "There is no option 'keep-histroy'; the nearest known name is 'keep-history'. (line 3)")

    def test_unknown_option_names_the_file(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, 'zodb.conf')
            with open(path, 'w') as file:
                file.write(storage_text(SQLITE, 'no-such-option 1'))
            with self.assertRaises(ZConfig.ConfigurationError) as caught:
                ZODB.config.storageFromURL(path)
        self.assertRegex(str(caught.exception), r"'no-such-option'.*\(line 6, in file:.*zodb\.conf\)")

    def test_option_given_twice(self):
        self.assertIn('does not support multiple values', self.refusal(
            SQLITE, 'revert_when_stale off', 'revert-when-stale off'))

    def test_bad_values(self):
        for line, expected in [
                ('pool-size 1', "'1': allowed is a whole number, 2 or more"),
                ('pool-size many', "'many': allowed is a whole number, 2 or more"),
                ('cache-local-mb -5', "'-5': allowed is a whole number, 0 or more"),
                ('cache-local-object-max 3XB', "'3XB': allowed is a whole number, 0 or more"),
                ('cache-delta-size-limit 0', "'0': allowed is a whole number, 1 or more"),
                ('commit-lock-timeout 0', "'0': allowed is seconds, more than 0 and at most 86400"),
                ('keep-history perhaps', "'perhaps': allowed is true or false")]:
            with self.subTest(line):
                self.assertEqual(self.refusal(SQLITE, line), f'{line.split()[0]} is {expected}. (line 6)')

    def test_bad_values_of_an_adapter(self):
        for section, line, allowed in [
                ('mysql', 'port abc', 'a number from 0 to 65535'), ('mysql', 'connect_timeout soon', 'a whole number'),
                ('mysql', 'read_default_file /nowhere/my.cnf', 'a file that is there'),
                ('mysql', 'ssl_ca /nowhere', 'a file that is there'), ('mysql', 'compress x', 'true or false'),
                ('postgresql', 'group-commit x', 'true or false'),
                ('sqlite3', 'gevent_yield_interval x', 'a whole number')]:
            key, value = line.split()
            with self.subTest(line):
                needed = {'mysql': ['db x'], 'sqlite3': ['data-dir x']}.get(section, [])
                self.assertEqual(self.refusal(f'<{section}>', line, *needed, f'</{section}>'),
                                 f'{key} is {value!r}: allowed is {allowed}. (line 4)')

        self.assertEqual(
            self.refusal('<sqlite3>', 'data-dir x', '<pragmas>', 'cache_size x', '</pragmas>', '</sqlite3>'),
            "cache_size is 'x': allowed is a whole number, with KB, MB or GB or without. (line 6)")

    def test_what_a_site_relies_on_is_refused(self):
        for key in 'replica-conf', 'ro-replica-conf':
            self.assertRegex(self.refusal(SQLITE, f'{key} etc/replicas'),
                             rf'^{key} is not available yet .*: leave it out\. \(line 6\)$')

    def test_bad_value_in_a_database_names_the_line(self):
        text = f'%import relstore\n<zodb main>\n<relstore>\n{SQLITE}\npool-size 1\n</relstore>\n</zodb>\n'
        with self.assertRaises(ZConfig.ConfigurationError) as caught:
            ZODB.config.databaseFromString(text)
        self.assertEqual(str(caught.exception),
                         "pool-size is '1': allowed is a whole number, 2 or more. (line 7)")

    def test_not_exactly_one_adapter(self):
        postgresql = '<postgresql>\n</postgresql>'
        for section in SECTIONS:
            for adapters, count in [([], 0), ([SQLITE, postgresql], 2), ([SQLITE, SQLITE], 2)]:
                with self.subTest(section, count=count):
                    self.assertEqual(
                        self.refusal(*adapters, section=section),
                        f'A <{section}> section needs exactly one section that names its database, '
                        f'<postgresql>, <mysql>, <oracle> or <sqlite3>; here it has {count}.')

    def test_unknown_drivers_name_the_choices(self):
        self.assertRegex(self.refusal('<postgresql>', 'driver oracledb', '</postgresql>'),
                         r"'oracledb'.*psycopg, psycopg2\W.*\(line 4\)")
        self.assertRegex(self.refusal('<sqlite3>', 'data-dir x', 'driver apsw', '</sqlite3>'),
                         r"'apsw'.*sqlite3\W.*\(line 5\)")

    def test_data_dir_is_required(self):
        self.assertIn("'data-dir'", self.refusal('<sqlite3>', '</sqlite3>'))
        self.assertIn('data-dir is empty', self.refusal('<sqlite3>', 'data-dir', '</sqlite3>'))

    def test_empty_schema(self):
        self.assertIn('schema is empty', self.refusal('<postgresql>', 'schema', '</postgresql>'))

    def test_pragmas(self):
        for line, expected in [('f.oo 1', "'f.oo' cannot be the name of a pragma."),
                               ('synchronous 1\nsynchronous 2', 'The pragma synchronous is given 2 times')]:
            with self.subTest(line):
                self.assertIn(expected, self.refusal(
                    '<sqlite3>', 'data-dir x', '<pragmas>', line, '</pragmas>', '</sqlite3>'))


class PostgreSQLTests(unittest.TestCase):

    def test_values(self):
        dsn = "dbname='zodb' host='/run'"
        config = parse_adapter(
            '<postgresql>', f'dsn {dsn}', 'driver psycopg', 'schema zope', '</postgresql>').config
        self.assertEqual((config.dsn, config.driver, config.schema), (dsn, 'psycopg', 'zope'))

    def test_defaults(self):
        config = parse_adapter('<postgresql>', '</postgresql>').config
        self.assertEqual((config.dsn, config.driver, config.schema, config.prepared_statements, config.group_commit),
                         ('', 'auto', None, 'auto', True))

    def test_group_commit(self):
        for text, durable in ('true', True), ('false', False):
            with self.subTest(text):
                address = parse_adapter('<postgresql>', f'group-commit {text}', '</postgresql>').open()
                adapter = address.unseen(keep_history=True)
                self.assertEqual('pg_logical_emit_message' in adapter.sql.finish, durable)

    def test_prepared_statements(self):
        for text, expected in ('auto', 'auto'), ('Auto', 'auto'), ('true', 'true'), ('on', 'true'), ('no', 'false'):
            with self.subTest(text):
                factory = parse_adapter('<postgresql>', f'prepared-statements {text}', '</postgresql>')
                self.assertEqual(factory.open().prepared_statements, expected)
        with self.assertRaisesRegex(ZConfig.ConfigurationError, 'allowed is auto, true or false'):
            parse_adapter('<postgresql>', 'prepared-statements perhaps', '</postgresql>')

    def test_adapter(self):
        from relstore.adapters.addresses import PostgreSQL
        for driver in ('psycopg2', 'psycopg'):
            with self.subTest(driver), self.assertNoLogs('relstore'):
                factory = parse_adapter('<postgresql>', f'driver {driver}', '</postgresql>')
                self.assertIsInstance(factory.open(), PostgreSQL)

    def test_drivers_of_relstorage(self):
        for driver in ('gevent psycopg2', 'psycopg2cffi', 'PG8000', 'py-postgresql'):
            with self.subTest(driver):
                factory = parse_adapter('<postgresql>', f'driver {driver}', '</postgresql>')
                with self.assertLogs('relstore', logging.WARNING) as logs:
                    factory.open()
                self.assertEqual(logs.records[0].getMessage(),
                                 f'The driver {driver.lower()} is not available here; auto is used.')

    def test_driver_auto_is_the_default(self):
        factory = parse_adapter('<postgresql>', 'driver auto', '</postgresql>')
        with self.assertNoLogs('relstore'):
            factory.open()


class OracleTests(unittest.TestCase):

    def address(self, *lines):
        return parse_adapter('<oracle>', *lines, '</oracle>').open()

    def test_relstorages_keys(self):
        address = self.address('user zope', 'password se cret', 'dsn db.example.com:1521/pdb')
        self.assertEqual(address.settings, {'user': 'zope', 'password': 'se cret', 'dsn': 'db.example.com:1521/pdb'})
        self.assertEqual(address.driver.name, 'oracledb')

    def test_drivers(self):
        needed = 'user zope', 'password x', 'dsn x'
        for line, name in ('driver cx_Oracle', 'cx_Oracle'), ('driver CX_ORACLE', 'cx_Oracle'), (
                'driver auto', 'oracledb'), ('driver OracleDB', 'oracledb'):
            with self.subTest(line):
                self.assertEqual(self.address(*needed, line).driver.name, name)
        with self.assertRaisesRegex(ZConfig.ConfigurationError, "'oci'.*oracledb, cx_Oracle"):
            self.address(*needed, 'driver oci')

    def test_what_is_needed(self):
        for key in 'user', 'password', 'dsn':
            lines = [f'{name} x' for name in ('user', 'password', 'dsn') if name != key]
            with self.subTest(key), self.assertRaisesRegex(ZConfig.ConfigurationError, key):
                self.address(*lines)


class MySQLTests(unittest.TestCase):

    def mysql(self, *lines):
        return parse_adapter('<mysql>', *lines, '</mysql>')

    def test_every_key_reaches_the_driver(self):
        keys = {
            'db': 'zodb', 'host': 'db.example.com', 'port': 3307, 'unix_socket': '/run/s', 'user': 'zope',
            'passwd': 'x', 'charset': 'latin1', 'connect_timeout': 3, 'read_default_file': __file__,
            'read_default_group': 'zope', 'ssl_mode': 'verify_identity',
            'ssl_ca': __file__, 'ssl_cert': __file__, 'ssl_key': __file__}
        address = self.mysql(*(f'{name} {value}' for name, value in keys.items()), 'compress on').open()
        keys |= {'database': keys.pop('db'), 'password': keys.pop('passwd'), 'compress': True}
        self.assertEqual(address.settings, keys)

    def test_defaults_leave_the_rest_to_the_driver(self):
        with self.assertNoLogs('relstore'):
            address = self.mysql('db zodb').open()
        self.assertEqual(address.settings, {'database': 'zodb', 'charset': 'utf8mb4', 'connect_timeout': 10})

    def test_drivers_of_relstorage(self):
        for name, ours in [('MySQLdb', 'mysqlclient'), ('PyMySQL', 'pymysql'), ('auto', 'mysqlclient')]:
            with self.subTest(name), self.assertNoLogs('relstore'):
                self.assertEqual(self.mysql('db zodb', f'driver {name}').open().driver.name, ours)
        for name in 'gevent MySQLdb', 'C MySQL Connector/Python', 'Py MySQL Connector/Python':
            with self.subTest(name), self.assertLogs('relstore', logging.WARNING) as logs:
                self.mysql('db zodb', f'driver {name}').open()
            self.assertEqual(logs.records[0].getMessage(),
                             f'The driver {name.lower()} is not available here; mysqlclient is used.')

    def test_what_cannot_be_honoured(self):
        with self.assertLogs('relstore', logging.WARNING) as logs:
            self.mysql('db zodb', 'named_pipe on').open()
        self.assertIn('named_pipe has no effect', logs.records[0].getMessage())
        with self.assertRaisesRegex(ConfigurationError, 'cannot compress'):
            self.mysql('db zodb', 'driver pymysql', 'compress on').open()


class SQLiteTests(unittest.TestCase):

    def sqlite(self, *lines):
        return parse_adapter('<sqlite3>', *lines, '</sqlite3>')

    def test_data_dir_is_absolute_and_may_begin_at_home(self):
        self.assertEqual(self.sqlite('data-dir ~/zodb').config.data_dir, os.path.expanduser('~/zodb'))
        self.assertEqual(self.sqlite('data-dir var/zodb').config.data_dir, os.path.abspath('var/zodb'))

    def test_pragmas(self):
        factory = self.sqlite(
            'data-dir x', '<pragmas>', 'page_size 8KB', 'mmap_size 64MB', 'max_page_count 1000', 'threads 2',
            'cache_size -4000', 'wal_autocheckpoint 500', 'soft_heap_limit 1MB', 'Journal-Size-Limit 9',
            '</pragmas>')
        self.assertEqual(factory.config.pragmas, {
            'page_size': '8192', 'mmap_size': '67108864', 'max_page_count': '1000', 'threads': '2',
            'cache_size': '-4000', 'wal_autocheckpoint': '500', 'soft_heap_limit': '1048576',
            'journal_size_limit': '9'})

    def test_warnings(self):
        with tempfile.TemporaryDirectory() as directory:
            factory = self.sqlite(
                f'data-dir {directory}', 'driver gevent sqlite3', 'gevent_yield_interval 10',
                '<pragmas>', 'busy_timeout 5', '</pragmas>')
            with self.assertLogs('relstore', logging.WARNING) as logs:
                factory.open()
        self.assertEqual([record.getMessage() for record in logs.records], [
            'The driver gevent sqlite3 is not available here; sqlite3 is used.',
            'gevent_yield_interval has no effect: SQLite does not yield to gevent here.',
            'The pragma busy_timeout has no effect: commit-lock-timeout says it instead.'])


class OpenTests(unittest.TestCase):
    """Real storages and databases, on SQLite."""
    layer = SQLiteFiles

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.data_dir = os.path.join(directory.name, 'made by the adapter')
        self.sqlite = f'<sqlite3>\n  data-dir {self.data_dir}\n</sqlite3>'

    def test_storage(self):
        for section in SECTIONS:
            for history in (True, False):
                with self.subTest(section, history=history):
                    data_dir = f'{self.data_dir} for {section} {history}'
                    storage = ZODB.config.storageFromString(storage_text(
                        f'name {section}', f'keep-history {history}',
                        '<sqlite3>', f'data-dir {data_dir}', '</sqlite3>', section=section))
                    self.addCleanup(storage.close)
                    self.assertEqual(storage.supportsUndo(), history)
                    self.assertFalse(storage.isReadOnly())
                    self.assertEqual(storage.getName(), section)
                    self.assertTrue(os.path.isdir(data_dir))

    def test_site_that_changes_only_its_import(self):
        """The text is a RelStorage site's, but for the name behind %import."""
        text = f"""
            %import relstore
            <zodb main>
              cache-size 1000
              <relstorage>
                keep-history false
                cache-local-mb 10
                cache-local-dir {self.data_dir}
                commit-lock-timeout 10
                <sqlite3>
                  driver auto
                  data-dir {self.data_dir}
                  <pragmas>
                    synchronous normal
                    cache_size -4000
                  </pragmas>
                </sqlite3>
              </relstorage>
            </zodb>
            """
        for expected in (None, 1):      # the second time it is there already
            with self.assertNoLogs('relstore', logging.WARNING):
                db = ZODB.config.databaseFromString(text)
            try:
                with db.transaction() as connection:
                    self.assertEqual(connection.root().get('count'), expected)
                    connection.root()['count'] = 1
            finally:
                db.close()

    def test_read_only(self):
        ZODB.config.databaseFromString(self.database('')).close()
        db = ZODB.config.databaseFromString(self.database('read-only true'))
        self.addCleanup(db.close)
        self.assertTrue(db.storage.isReadOnly())
        connection = db.open(transaction.TransactionManager())
        self.addCleanup(connection.close)
        self.assertNotIn('count', connection.root())

    def database(self, line):
        return f'%import relstore\n<zodb>\n<relstore>\n{line}\n{self.sqlite}\n</relstore>\n</zodb>\n'

    def test_warns_once_for_each_open(self):
        factory = parse(self.sqlite, 'replica-timeout 600', 'commit-lock-id 3')
        for _ in range(2):
            with self.assertLogs('relstore', logging.WARNING) as logs:
                factory.open().close()
            self.assertEqual([record.args[0] for record in logs.records if record.levelno == logging.WARNING],
                             ['replica-timeout', 'commit-lock-id'])


# The names that RelStorage's component.xml defines.
RELSTORAGE_COMPONENT = """
<component>
  <import package="ZODB"/>
  <abstracttype name="relstorage.adapter"/>
  <sectiontype name="relstorage" implements="ZODB.storage"/>
  <sectiontype name="postgresql" implements="relstorage.adapter"/>
  <sectiontype name="oracle" implements="relstorage.adapter"/>
  <sectiontype name="mysql" implements="relstorage.adapter"/>
  <sectiontype name="pragmas"/>
  <sectiontype name="sqlite3" implements="relstorage.adapter"/>
</component>
"""
OPEN = """
import sys
import ZODB.config
with ZODB.config.databaseFromString(sys.stdin.read()).transaction() as connection:
    print(type(connection.db().storage).__module__)
"""


class BesideRelStorageTests(unittest.TestCase):
    """In processes of their own: a module that stands for RelStorage is there for all that follows."""
    layer = Processes

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.here = Path(directory.name)

    def install_relstorage(self):
        (self.here / 'relstorage').mkdir()
        (self.here / 'relstorage' / '__init__.py').touch()
        (self.here / 'relstorage' / 'component.xml').write_text(RELSTORAGE_COMPONENT)

    def open(self, text: str, before: str = '') -> subprocess.CompletedProcess:
        """Open a database in a new process; its output is the module of the storage."""
        paths = os.pathsep.join([str(self.here), *filter(None, sys.path)])
        return subprocess.run([sys.executable, '-c', before + OPEN], input=text, capture_output=True, text=True,
                              env=os.environ | {'PYTHONPATH': paths}, timeout=120)

    def database(self, package: str, section: str, adapter: str, pragmas: str) -> str:
        return (f'%import {package}\n<zodb>\n<{section}>\n<{adapter}>\ndata-dir {self.here}/data\n'
                f'<{pragmas}>\nsynchronous normal\n</{pragmas}>\n</{adapter}>\n</{section}>\n</zodb>\n')

    def assertOpens(self, opened: subprocess.CompletedProcess):
        self.assertEqual((opened.stdout, opened.stderr, opened.returncode), ('relstore.storage\n', '', 0))

    def test_names_of_its_own(self):
        self.install_relstorage()
        text = self.database('relstore.beside', 'relstore', 'relstore-sqlite3', 'relstore-pragmas')
        for imports in '', '%import relstorage\n':
            with self.subTest(imports):
                self.assertOpens(self.open(imports + text))
        self.assertOpens(self.open(text + '%import relstorage\n'))

    def test_both_imports_of_relstore(self):
        text = self.database('relstore', 'relstorage', 'sqlite3', 'relstore-pragmas')
        self.assertOpens(self.open('%import relstore.beside\n' + text))
        self.assertOpens(self.open(text + '%import relstore.beside\n'))

    def test_import_of_relstorage_that_means_relstore(self):
        text = self.database('relstorage', 'relstorage', 'sqlite3', 'pragmas')
        self.assertOpens(self.open(text, 'import relstore.as_relstorage\n'))
        opened = self.open(text, 'import relstore.as_relstorage, relstorage.config\n')
        self.assertIn('ModuleNotFoundError', opened.stderr)

    def test_it_does_not_stand_for_what_is_there(self):
        self.install_relstorage()
        refused = self.open(self.database('relstorage', 'relstorage', 'sqlite3', 'pragmas'),
                            'import relstore.as_relstorage\n')
        self.assertRegex(refused.stderr, 'ImportError: RelStorage is installed, .*uninstall it')


class PostgreSQLOpenTests(unittest.TestCase):
    """The same on a PostgreSQL server."""

    layer = PostgreSQLLayer

    def test_site_is_opened_again_with_the_other_driver(self):
        self.layer.require(self)
        dsn = self.layer.server.create_database('config')
        for driver, expected in [('psycopg2', None), ('psycopg', 1)]:
            db = ZODB.config.databaseFromString(
                '%import relstore\n<zodb main>\n<relstorage>\n<postgresql>\n'
                f'dsn {dsn}\ndriver {driver}\n</postgresql>\n</relstorage>\n</zodb>\n')
            try:
                with db.transaction() as connection:
                    self.assertEqual(connection.root().get('count'), expected)
                    connection.root()['count'] = 1
            finally:
                db.close()


class ComponentTests(unittest.TestCase):
    """component.xml repeats what options.py says."""

    def test_both_sections_take_the_same_keys(self):
        keys = [[(key, info.attribute) for key, info in schema_of(section)] for section in SECTIONS]
        self.assertEqual(*keys)

    def test_each_option_has_a_key_and_each_key_an_option(self):
        keys = [key for key, info in schema_of('relstore') if not info.issection()]
        names = [option.name for option in fields(Options)] + [*ALIASES, *WITHOUT_EFFECT, *REFUSED]
        self.assertEqual(sorted(keys), sorted(name.replace('_', '-') for name in names))

    def test_defaults(self):
        infos = {info.attribute: info for _, info in schema_of('relstore')}
        for option in fields(Options):
            with self.subTest(option.name):
                info = infos[option.name]
                stated = info.getdefault()
                if stated is not None:
                    self.assertEqual(stated.convert(info.datatype), option.default)
                elif info.metadefault is not None:
                    self.assertEqual(info.datatype(info.metadefault), option.default)
                else:
                    self.assertIsNone(option.default)

    def test_options_without_effect_have_no_default(self):
        """A default would count as given, and warn."""
        for _, info in schema_of('relstore'):
            if info.attribute in WITHOUT_EFFECT:
                with self.subTest(info.name):
                    self.assertIsNone(info.getdefault())

    def test_help(self):
        expected = {option.name: option.metadata['help'] for option in fields(Options)}
        expected |= {name: f'{name.replace("_", "-")} {text}' for name, text in (WITHOUT_EFFECT | REFUSED).items()}
        for _, info in schema_of('relstore'):
            with self.subTest(info.attribute):
                if info.attribute in expected:
                    self.assertEqual(' '.join(info.description.split()), expected[info.attribute])

    def test_every_key_is_described(self):
        for section in ('relstore', 'postgresql', 'sqlite3', 'pragmas'):
            for key, info in schema_of(section):
                with self.subTest(section, key=key):
                    self.assertTrue(info.issection() or info.description)
