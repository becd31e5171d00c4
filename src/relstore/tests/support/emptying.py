"""Emptying a database between two tests, which is most of what a small test takes.

`zap_all()` is for a database that others use and that may lack something: it is opened, completed and locked first. A
test's database is emptied so once. Then what it consists of is noted, and as long as that stays the same its rows are
deleted through one connection.
"""
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import psycopg2
import pymysql

import relstore
from relstore.adapters.addresses import Address
from relstore.blobs.base import KEY
from relstore.tests.support.watch import AnyWatch

# Bytes of states from which on new files take less time than the rows, which PostgreSQL would keep until a vacuum.
MANY = 1 << 20


@dataclass(frozen=True)
class Noted:
    """A database that zap_all() has emptied."""
    shape: list[tuple]          # tables, functions and what belongs to them
    meta: dict[str, str]        # relstore_meta
    statements: tuple[str, ...]         # that delete the rows


class Emptying:
    """The databases of one server that tests use again."""

    def __init__(self) -> None:
        self._noted: dict[tuple, Noted] = {}

    def empty(self, key: tuple, watch: AnyWatch, address: Callable[[], Address], keep_history: bool) -> None:
        """Empty a database that nobody else is connected to.

        key         the server, and what the database is called there
        address     makes its address
        """
        noted = self._noted.pop(key, None)
        if noted is None or noted.shape != self.shape(watch):
            statements = self._zap_all(address(), keep_history, watch)
            noted = Noted(self.shape(watch), _meta(watch), statements)
        else:
            for statement in self.chosen(watch, noted.statements):
                watch.rows(statement)
            _reset_meta(watch, noted.meta)
        # Of objects in an object storage zap_all leaves the rows: a pack removes both.
        watch.rows('DELETE FROM relstore_digest')
        self._noted[key] = noted

    def _zap_all(self, address: Address, keep_history: bool, watch: AnyWatch) -> tuple[str, ...]:
        # A database with blobs is opened by those alone who say where they are.
        with suppress(psycopg2.errors.UndefinedTable, pymysql.err.ProgrammingError):    # a test has dropped it
            watch.rows('DELETE FROM relstore_meta WHERE name = %s', KEY)
        with TemporaryDirectory() as blobs, closing(relstore.RelStore(
                address, keep_history=keep_history, blob_dir=blobs)) as storage:
            storage.zap_all()
            storage.database.adapter.writers.set('relstore')        # a test may have said otherwise
            return self.statements(storage.database.adapter.sql)

    def shape(self, watch: AnyWatch) -> list[tuple]:
        """Return all that a test may have changed but for rows."""
        raise NotImplementedError

    def statements(self, sql: Any) -> tuple[str, ...]:
        """Return the statements that empty it, from those of an adapter. The next who opens it makes an epoch."""
        raise NotImplementedError

    def chosen(self, watch: AnyWatch, statements: tuple[str, ...]) -> Iterator[str]:
        """Yield those to run now."""
        yield from statements


class EmptyingPostgreSQL(Emptying):

    def shape(self, watch):
        # Schemas of a test's own would be in a dump.
        for name, in watch.rows("SELECT quote_ident(nspname) FROM pg_namespace WHERE nspname <> 'public' "
                                "AND nspname <> 'information_schema' AND nspname !~ '^pg_'"):
            watch.rows(f'DROP SCHEMA {name} CASCADE')
        return watch.rows("""
            SELECT concat_ws(' ', relname, relkind, relpersistence, relowner, relacl, reloptions, relrowsecurity,
                             attname, atttypid, attnotnull, attstorage, attacl) AS item
            FROM pg_class c LEFT JOIN pg_attribute ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped
            WHERE relnamespace = 'public'::regnamespace
            UNION ALL SELECT concat_ws(' ', proname, proowner, proacl, proconfig, md5(prosrc))
            FROM pg_proc WHERE pronamespace = 'public'::regnamespace
            UNION ALL SELECT concat_ws(' ', typname, typtype) FROM pg_type
            WHERE typnamespace = 'public'::regnamespace AND typtype <> 'c' AND typelem = 0
            UNION ALL SELECT concat_ws(' ', oprname, oprleft, oprright) FROM pg_operator
            WHERE oprnamespace = 'public'::regnamespace
            UNION ALL SELECT concat_ws(' ', conname, contype, conkey, convalidated) FROM pg_constraint
            WHERE connamespace = 'public'::regnamespace
            UNION ALL SELECT concat_ws(' ', indexrelid::regclass, indkey, indisvalid, indisunique) FROM pg_index
            WHERE indexrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)
            UNION ALL SELECT concat_ws(' ', tgname, tgenabled) FROM pg_trigger WHERE NOT tgisinternal
            UNION ALL SELECT concat_ws(' ', evtname, evtenabled) FROM pg_event_trigger
            UNION ALL SELECT concat_ws(' ', rulename, ev_class) FROM pg_rewrite WHERE ev_class >= 16384
            UNION ALL SELECT concat_ws(' ', pubname) FROM pg_publication
            UNION ALL SELECT concat_ws(' ', extname) FROM pg_extension
            UNION ALL SELECT concat_ws(' ', nspname, nspowner, nspacl) FROM pg_namespace WHERE nspname !~ '^pg_'
            UNION ALL SELECT concat_ws(' ', datallowconn, datconnlimit, datacl, setrole, setconfig)
            FROM pg_database d LEFT JOIN pg_db_role_setting ON setdatabase = d.oid WHERE datname = current_database()
            ORDER BY item""")

    def statements(self, sql):
        return tuple(statement for statement in sql.zap.split(';\n') if not statement.startswith('LOCK'))

    def chosen(self, watch, statements):
        # The trigger of blob_chunk, ours or RelStorage's, would remove the large objects that the statement before has
        # removed.
        as_they_are = watch.one("SELECT pg_total_relation_size('object_state') > %s "
                                'OR EXISTS (SELECT FROM blob_chunk)', MANY)
        for statement in statements:
            tables = re.fullmatch(r'TRUNCATE (.*)', statement, re.DOTALL)
            if tables and not as_they_are:
                # In the order in which they refer to each other, that of relstore's statement.
                yield ';'.join(f'DELETE FROM {table}' for table in tables[1].split(','))
            else:
                yield statement


class EmptyingMySQL(Emptying):

    def shape(self, watch):
        tables = watch.rows('SHOW TABLES')
        made = [watch.rows(f'SHOW CREATE TABLE `{name}`')[0][:2] for name, in tables]
        return [(name, re.sub(r' AUTO_INCREMENT=\d+', '', text)) for name, text in made] + watch.rows(
            'SELECT trigger_name, action_statement FROM information_schema.triggers WHERE trigger_schema = DATABASE() '
            'UNION ALL SELECT routine_name, routine_definition FROM information_schema.routines '
            'WHERE routine_schema = DATABASE() '
            'UNION ALL SELECT default_character_set_name, default_collation_name FROM information_schema.schemata '
            'WHERE schema_name = DATABASE()')

    def statements(self, sql):
        return *sql.zap.split(';\n'), sql.restart_oids, sql.forget_epoch


def _meta(watch: AnyWatch) -> dict[str, str]:
    return dict(watch.rows('SELECT name, value FROM relstore_meta'))


def _reset_meta(watch: AnyWatch, meta: dict[str, str]) -> None:
    """As zap_all() leaves it: what was noted, and the database is whole as of the sweep that emptied it."""
    wanted = meta | {'whole': str(watch.one('SELECT number FROM relstore_sweep'))}
    wanted.pop('blobs', None)       # as zap_all does
    if _meta(watch) != wanted:
        watch.rows('DELETE FROM relstore_meta')
        for item in wanted.items():
            watch.rows('INSERT INTO relstore_meta (name, value) VALUES (%s, %s)', *item)
