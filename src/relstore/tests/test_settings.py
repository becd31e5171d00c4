"""What the owner of a server or of a database may set for all sessions: nothing of it bends an answer."""
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from unittest import TestCase

from ZODB.Connection import TransactionMetaData
from ZODB.utils import z64

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.support.commits import commit
from relstore.tests.support.exercise import exercise
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.records import state
from relstore.tests.support.servers import (
    MariaDBServer,
    MySQLServer,
    PgBouncerLayer,
    PostgreSQLLayer,
    SharedServer,
    mariadb_programs,
    mysql_unavailable,
    require_mariadb,
    require_mysql,
)
from relstore.tests.support.watch import MySQLWatch, Watch

# Servers of our own, whose settings may be changed. What cannot be set later is set from the beginning.
SETTINGS = {'log_bin': 'log', 'server_id': 7, 'binlog_format': 'ROW', 'innodb_rollback_on_timeout': 1}
OF_MARIADB = {'query_cache_type': 1, 'query_cache_size': 1 << 20}
ChangedMariaDB = SharedServer(
    'ChangedMariaDB', __name__, lambda: MariaDBServer(SETTINGS | OF_MARIADB) if mariadb_programs() else None,
    require_mariadb)
ChangedMySQL = SharedServer(
    'ChangedMySQL', __name__, lambda: None if mysql_unavailable() else MySQLServer(SETTINGS), require_mysql)


# Variables that go together. A server is set those that it has. At first those that sessions of ours set anew,
BENDING = (
    {'sql_select_limit': 3},
    {'sql_big_selects': 0, 'max_join_size': 1},
    {'sql_safe_updates': 1},
    {'sql_auto_is_null': 1},
    {'sql_buffer_result': 1},
    {'foreign_key_checks': 0, 'unique_checks': 0, 'check_constraint_checks': 0},
    {'autocommit': 0, 'completion_type': "'CHAIN'"},
    {'completion_type': "'RELEASE'"},
    {'transaction_isolation': "'SERIALIZABLE'", 'tx_isolation': "'SERIALIZABLE'"},
    {'transaction_isolation': "'READ-UNCOMMITTED'", 'tx_isolation': "'READ-UNCOMMITTED'",
     'transaction_read_only': 1, 'tx_read_only': 1},
    {'in_predicate_conversion_threshold': 2, 'range_optimizer_max_mem_size': 1000},
    {'optimizer_max_sel_arg_weight': 10, 'optimizer_max_sel_args': 10},
    {'innodb_snapshot_isolation': 1},
    {'sql_mode': "'ANSI,NO_BACKSLASH_ESCAPES,NO_AUTO_VALUE_ON_ZERO,HIGH_NOT_PRECEDENCE,NO_UNSIGNED_SUBTRACTION'"},
    {'sql_mode': "'TRADITIONAL,ANSI_QUOTES,PAD_CHAR_TO_FULL_LENGTH'"},
    {'init_connect': "'SET autocommit = 0, sql_select_limit = 2, sql_safe_updates = 1'"},
)
# and then those that no statement relies on.
HARMLESS = (
    {'auto_increment_increment': 3, 'auto_increment_offset': 2,
     'time_zone': "'+13:00'", 'lc_time_names': "'de_DE'", 'default_week_format': 3, 'div_precision_increment': 0,
     'character_set_server': 'latin1', 'character_set_client': 'latin1', 'character_set_results': 'latin1',
     'character_set_connection': 'latin1', 'default_collation_for_utf8mb4': 'utf8mb4_general_ci',
     'innodb_lock_wait_timeout': 1, 'lock_wait_timeout': 1},
    {'auto_increment_increment': 2, 'auto_increment_offset': 5,
     'collation_server': 'utf8mb4_bin', 'collation_connection': 'utf8mb4_bin', 'lc_messages': "'de_DE'",
     'max_sort_length': 8, 'sort_buffer_size': 32768, 'join_buffer_size': 128, 'max_length_for_sort_data': 4,
     'read_rnd_buffer_size': 8192, 'group_concat_max_len': 4, 'max_heap_table_size': 16384, 'tmp_table_size': 1024,
     'tmp_memory_table_size': 0, 'big_tables': 1, 'internal_tmp_mem_storage_engine': "'MEMORY'",
     'parser_max_mem_size': 10_000_000},
    {'optimizer_use_condition_selectivity': 1, 'join_cache_level': 8, 'use_stat_tables': "'NEVER'",
     'optimizer_search_depth': 0, 'optimizer_prune_level': 0, 'expensive_subquery_limit': 0,
     'optimizer_switch': "'mrr=on,mrr_cost_based=off'", 'max_seeks_for_key': 1, 'eq_range_index_dive_limit': 1,
     'low_priority_updates': 1, 'innodb_strict_mode': 0, 'innodb_table_locks': 0,
     'system_versioning_alter_history': "'KEEP'",
     'old_mode': "'NO_PROGRESS_INFO,ZERO_DATE_TIME_CAST,IGNORE_INDEX_ONLY_FOR_JOIN'"},
    {'optimizer_switch': "'derived_merge=off,semijoin=off,materialization=off,index_condition_pushdown=off'",
     'session_track_state_change': 1, 'session_track_transaction_info': "'CHARACTERISTICS'",
     'session_track_system_variables': "'*'", 'session_track_gtids': "'ALL_GTIDS'", 'sql_quote_show_create': 0,
     'sql_notes': 0, 'max_error_count': 0,
     'binlog_row_image': "'MINIMAL'", 'binlog_rows_query_log_events': 1, 'binlog_format': "'MIXED'"},
)
# When the tables are made.
AT_CREATION = {
    'sql_require_primary_key': 1, 'sql_generate_invisible_primary_key': 1, 'innodb_force_primary_key': 1,
    'default_storage_engine': 'MyISAM', 'default_tmp_storage_engine': 'MyISAM', 'max_heap_table_size': 16384,
    'explicit_defaults_for_timestamp': 0, 'innodb_default_row_format': 'COMPACT', 'innodb_file_per_table': 0}
# A driver has to do with these: how it quotes, decodes, and is told of a session. The others run with one of them.
OF_DRIVERS = {'sql_mode', 'init_connect', 'autocommit', 'completion_type', 'character_set_client',
              'collation_connection', 'session_track_state_change'}
DRIVERS = 'mysqlclient', 'pymysql'
# 0.2 s.
SHORT = {'max_statement_time': 0.2, 'max_execution_time': 200}


class Settings:

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server
        self.there = dict(self.server.run('SHOW GLOBAL VARIABLES'))
        self.server.run("CREATE USER ordinary@'%'")
        self.addCleanup(self.server.run, "DROP USER ordinary@'%'")

    @contextmanager
    def set_globally(self, settings: dict):
        """Set those that the server has; return whether there are any."""
        names = [name for name in settings if name in self.there]
        try:
            for name in names:
                self.server.run(f'SET GLOBAL {name} = {settings[name]}')
            yield bool(names)
        finally:
            for name in names:
                self.server.run(f'SET GLOBAL {name} = DEFAULT')

    def site(self, name: str) -> dict:
        """Return the arguments of a new database, for a user without any other rights."""
        arguments = self.server.create_database(name)
        self.addCleanup(self.server.drop_database, name)
        self.server.run(f"GRANT ALL ON {name}.* TO ordinary@'%'")
        return arguments | {'user': 'ordinary'}

    def works(self, arguments: dict, keep_history: bool, count: int = 100, drivers: tuple = DRIVERS) -> None:
        for driver in drivers:
            with self.subTest(driver, keep_history=keep_history):
                exercise(lambda driver=driver: relstore.RelStore(
                    relstore.MySQL(**arguments, driver=driver), keep_history=keep_history, commit_lock_timeout=5),
                    count=count)

    def test_each(self):
        sites = {keep_history: self.site(f'site_{keep_history}') for keep_history in (True, False)}
        for n, settings in enumerate(BENDING + HARMLESS + self.more):
            with self.subTest(settings), self.set_globally(settings) as there:
                if there:
                    drivers = DRIVERS if THOROUGH or settings.keys() & OF_DRIVERS else (DRIVERS[n // 2 % 2],)
                    # Of a hundred objects MariaDB makes a list without buffering.
                    self.works(sites[n % 2 == 0], n % 2 == 0, 300 if 'sql_buffer_result' in settings else 100, drivers)

    def test_while_sites_are_up(self):
        """A session that is new is told as much as the first."""
        arguments = self.site('site')
        for driver in DRIVERS:
            with self.subTest(driver), ExitStack() as stack:
                storage, other = (stack.enter_context(closing(relstore.RelStore(
                    relstore.MySQL(**arguments, driver=driver)))) for _ in range(2))
                storage.zap_all()
                oids = [storage.new_oid() for _ in range(10)]
                tid = commit(storage, *((oid, z64, state(0)) for oid in oids))
                reader = other.new_instance()
                stack.callback(reader.release)
                reader.poll_invalidations()
                self.assertEqual([reader.load(oid) for oid in oids], [(state(0), tid)] * 10)
                reader.afterCompletion()
                stack.enter_context(self.set_globally({'sql_select_limit': 3}))
                other.database.pool.retire()
                tid = commit(storage, *((oid, tid, state(1)) for oid in oids))
                reader.poll_invalidations()
                self.assertEqual([reader.load(oid) for oid in oids], [(state(1), tid)] * 10)

    def test_when_the_tables_are_made(self):
        with self.set_globally(AT_CREATION):
            for keep_history in (True, False):
                self.works(self.site(f'new_{keep_history}'), keep_history)

    def test_statements_may_not_take_long(self):
        """Not even one that waits is ended: what has voted is to be stored."""
        arguments = self.site('site')
        with self.set_globally(SHORT), closing(relstore.RelStore(relstore.MySQL(**arguments))) as storage, \
                closing(MySQLWatch(arguments)) as watch, closing(MySQLWatch(arguments)) as third, \
                ThreadPoolExecutor(1) as threads:
            oid, txn = storage.new_oid(), TransactionMetaData()
            storage.tpc_begin(txn)
            storage.store(oid, z64, state(1), '', txn)
            storage.tpc_vote(txn)
            third.take_commit_lock()
            began = time.monotonic()
            finish = threads.submit(storage.tpc_finish, txn)
            watch.until(lambda: finish.done() or time.monotonic() > began + 0.5)
            third.release_commit_lock()
            tid = finish.result(30)
            self.assertEqual(storage.load(oid), (state(1), tid))


class MySQLSettings(Settings, TestCase):
    layer, more = ChangedMySQL, ()


class MariaDBSettings(Settings, TestCase):
    layer, more = ChangedMariaDB, ({'sql_mode': "'ORACLE'"},)

    def test_one_engine_for_all_tables(self):
        with self.set_globally({'enforce_storage_engine': 'InnoDB'}):
            self.works(self.site('site'), True)
        with self.set_globally({'enforce_storage_engine': 'Aria'}), \
                self.assertRaisesRegex(ConfigurationError, 'enforce_storage_engine .* is Aria; set it to InnoDB'):
            relstore.RelStore(relstore.MySQL(**self.site('other')))


# The same of a database of PostgreSQL, or of a role.
OF_POSTGRESQL = (
    {'default_transaction_isolation': 'serializable', 'default_transaction_deferrable': 'on'},
    {'statement_timeout': '20s', 'lock_timeout': '20s', 'idle_in_transaction_session_timeout': '60s',
     'bytea_output': 'escape', 'standard_conforming_strings': 'off', 'escape_string_warning': 'on',
     'backslash_quote': 'off', 'quote_all_identifiers': 'on', 'transform_null_equals': 'on', 'DateStyle': 'German',
     'IntervalStyle': 'sql_standard', 'TimeZone': 'Asia/Kathmandu', 'extra_float_digits': '-15',
     'client_min_messages': 'log', 'xmloption': 'document', 'check_function_bodies': 'off',
     'lo_compat_privileges': 'on', 'row_security': 'off', 'synchronous_commit': 'off',
     'plpgsql.variable_conflict': 'use_variable', 'plpgsql.extra_errors': 'all'},
    {'enable_seqscan': 'off', 'enable_bitmapscan': 'off', 'enable_hashjoin': 'off',
     'enable_mergejoin': 'off', 'plan_cache_mode': 'force_custom_plan',
     # What is off makes plans so dear that each is compiled; to optimize the code too takes seconds.
     'jit': 'on', 'jit_inline_above_cost': '-1', 'jit_optimize_above_cost': '-1',
     'from_collapse_limit': '1', 'join_collapse_limit': '1', 'work_mem': '64kB', 'cursor_tuple_fraction': '0.001'},
    {'enable_nestloop': 'off', 'enable_indexonlyscan': 'off', 'enable_sort': 'off', 'enable_hashagg': 'off',
     'jit': 'off', 'plan_cache_mode': 'force_generic_plan', 'default_statistics_target': '1', 'geqo_threshold': '2',
     'session_replication_role': 'replica'},
)
REFUSED = {'array_nulls': 'off', 'default_transaction_read_only': 'on'}


class PostgreSQLSettings(TestCase):
    layer, packs = PostgreSQLLayer, True

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server

    def site(self, name: str, settings: dict) -> str:
        self.server.create_database(name)
        self.addCleanup(self.server.drop_database, name)
        with closing(Watch(self.server.dsn(name))) as watch:
            for setting, value in settings.items():
                watch.rows(f"ALTER DATABASE {name} SET {setting} = '{value}'")
        return self.dsn(name)

    def dsn(self, name: str) -> str:
        return self.server.dsn(name)

    def test_each(self):
        for n, settings in enumerate(OF_POSTGRESQL):
            dsn = self.site(f'set_{n}', settings)
            for driver in ('psycopg2', 'psycopg') if n < 2 else ('psycopg2',):      # the others are of plans alone
                def open_storage(dsn=dsn, driver=driver, keep_history=n % 2 == 1):
                    return relstore.RelStore(relstore.PostgreSQL(dsn, driver=driver), keep_history=keep_history,
                                             commit_lock_timeout=5)

                with self.subTest(settings, driver=driver):
                    exercise(open_storage, self.packs)

    def test_refused(self):
        for setting, value in REFUSED.items():
            dsn = self.site(f'refused_{setting}', {setting: value})
            with self.subTest(setting), self.assertRaisesRegex(ConfigurationError, setting):
                relstore.RelStore(relstore.PostgreSQL(dsn))


class PooledSettings(PostgreSQLSettings):
    """No statement relies on what was said before: pgbouncer may have it run by another process of the server."""
    layer, packs = PgBouncerLayer, False

    def dsn(self, name):
        return self.layer.bouncer.dsn(self.server.dsn(name))


del Settings
