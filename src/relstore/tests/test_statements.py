"""The SQL: every statement is one that its database understands, and none reads more when the database grows."""
import io
import itertools
import re
import sqlite3
import threading
import time
import unittest
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import psycopg2
from persistent.TimeStamp import TimeStamp
from ZODB.utils import u64

from relstore.adapters.base import MAX_TID
from relstore.adapters.statements import Statements, Tables, sections
from relstore.sessions.statement import PARAMETER, Statement, arranged
from relstore.tests.support.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.statements import explains, numbered, parts

# Those that grow with the site: of both history modes, and of one.
PRESERVING = ('transaction', 'object_state', 'current_object', 'relstore_refs', 'relstore_garbage')
FREE = ('object_state', 'relstore_refs', 'relstore_garbage')

#: Statements that may read whole tables: name -> why.
SCANS = {
    'zap': 'removes everything',
    'delete_transactions': 'removes everything',
    'count_up_to': 'ends at its LIMIT; any order will do',
    'forget_garbage': 'removes all lists but two, in pieces',
    'marks': 'all garbage that waits, once a sweep',
    'states_size': 'asked once by zodbconvert, which then reads all of it',
}

#: Statements that are not run here, only prepared: name -> why.
NOT_MEASURED = {
    'zap': 'removes everything',
    'delete_transactions': 'removes everything',
    'relations': 'the catalogue, which does not grow',
    'strangers': 'the catalogue, likewise',
    'unstage': 'a temporary table, which is not there',
    'replace_copied': 'likewise',
    'marks': 'all garbage that waits, once a sweep',
    'states_size': 'asked once by zodbconvert, which then reads all of it',
    'next_revisions': 'a cursor, which is not open: see test_all_revisions_are_read_once',
    'new_chunks': 'makes large objects, and finds room where those of other tests were',
    'begin_with_chunks': 'likewise',
    'continue_chunk': 'a large object, which is not there',
    'finish_with_blobs': 'as finish; what it adds needs what comes before it',
    'forget_replaced': 'asked where RelStorage made the tables, with an index on prev_tid',
}

#: Statements that MySQL and MariaDB are not asked to run here: name -> why.
NOT_RUN_ON_MYSQL = {
    'check_vote': 'goes only into a block, as test_galera runs it',
    'kill': 'ends a connection',
    'relations': 'the catalogue, which does not grow',
    'strangers': 'the catalogue, likewise',
    'columns': 'the catalogue, which does not grow',
    'engines': 'the catalogue, which does not grow',
    'table_holders': 'asks a plugin of MariaDB that may not be there',
    'lock_schema': 'waits',
    'made': 'the catalogue, which does not grow',
    'may_create_table': 'is to fail',
    'may_refer': 'is to fail',
    'may_fill': 'is to fail',
    'may_create_view': 'is to fail',
}

# A site: objects 1 to n came with an import, all in one transaction. Those with even oids were changed twice since,
# in the order of their oids, twenty in a transaction.
BASE = u64(TimeStamp(2020, 1, 1, 0, 0, 0.0).raw())
IMPORT = BASE + 1
CURRENT = f'CASE WHEN n % 2 = 1 THEN {IMPORT} ELSE {BASE} + 2 + (:objects / 2 + n / 2 - 1) / 20 END'
# The last pack has found that every fourth object may go, and older revisions of the object before; the one before it
# had found all. The references of the import were found out.
STATE = f"CAST('{'x' * 100}' AS bytea), CAST('' AS bytea)"

FILL_PACK = f"""
INSERT INTO relstore_refs (zoid, tid, refs) SELECT n, {IMPORT}, CAST('' AS bytea) FROM numbers(1, :objects);
INSERT INTO relstore_garbage (pack_id, zoid, tid, since, goes) SELECT 1, n, {IMPORT}, 1, 2 FROM numbers(1, :objects);
INSERT INTO relstore_garbage (pack_id, zoid, tid, since, goes)
    SELECT 2, n, {CURRENT}, 1, 1 + n % 2 FROM numbers(1, :objects) WHERE n % 4 > 1;
"""
FILL_PRESERVING = f"""
INSERT INTO "transaction" (tid, username, description)
    SELECT CASE WHEN n = 0 THEN 0 ELSE {BASE} + n END, CAST('' AS bytea), CAST('' AS bytea)
    FROM numbers(0, 2 + :objects / 20);
INSERT INTO object_state (zoid, tid, prev_tid, md5, state_size, state, refs)
    SELECT n, {IMPORT}, 0, '0123456789abcdef0123456789abcdef', 100, {STATE} FROM numbers(1, :objects);
INSERT INTO object_state (zoid, tid, prev_tid, md5, state_size, state, refs)
    SELECT 2 + 2 * n % :objects, {BASE} + 2 + n / 20,
           CASE WHEN n < :objects / 2 THEN {IMPORT} ELSE {BASE} + 2 + (n - :objects / 2) / 20 END,
           '0123456789abcdef0123456789abcdef', 100, {STATE}
    FROM numbers(0, :objects - 1);
INSERT INTO current_object (zoid, tid) SELECT n, {CURRENT} FROM numbers(1, :objects);
{FILL_PACK}"""
FILL_FREE = f"""
INSERT INTO object_state (zoid, tid, refs_tid, state_size, state, refs)
    SELECT n, {CURRENT}, {BASE}, 100, {STATE} FROM numbers(1, :objects);
{FILL_PACK}"""

# Stands for the number of the transaction that runs the statement.
VOTED = object()

def site(objects):
    """What is in a filled database, for parameters: an object in the middle that was changed, and others after it."""
    def current(oid):
        return IMPORT if oid % 2 else BASE + 2 + (objects // 2 + oid // 2 - 1) // 20

    oid = objects // 2
    oids = range(oid, oid + 960, 30) if oid > 1000 else range(2, 34)
    mixed = [other + n % 2 for n, other in enumerate(oids)]
    return SimpleNamespace(oid=oid, tid=current(oid), last=current(objects), oids=mixed, tids=[*map(current, mixed)])


def samples(site):
    """What a statement may be given, by the name of the parameter, in a site; beside what a database has otherwise."""
    return {
        'oid': site.oid, 'first': site.oid, 'upto_oid': site.oid + 200, 'block': site.oid // 16,
        'tid': site.tid, 'prev_tid': site.tid, 'upto_tid': site.tid + 10, 'since': site.last - 3, 'at': site.last,
        'pack_tid': site.last, 'marked_tid': site.last, 'new_tid': site.last + 10, 'restored_tid': None,
        'data_tid': None, 'before': MAX_TID, 'stop': MAX_TID,
        'chunk': b'x', 'earlier': 1, 'digest': bytes(32), 'version': 'x', 'wisher': 'x', 'mark': 1,
        'limit': 100, 'most': 100_001, 'largest': 1000, 'count': 16, 'size': 3, 'objects': 1,
        'start': 1, 'chunk_num': 0, 'place': -1,
        'waiting': str([[oid, -n] for n, oid in enumerate(site.oids, 1)]),
        'copies': str([[oid, site.tid, -n] for n, oid in enumerate(site.oids, 1)]),
        'state': b'abc', 'states': b'abc' * len(site.oids), 'refs': b'', 'md5': '0' * 32,
        'pack_id': 2, 'keep': 1, 'number': 1, 'goes': 2, 'gc': True, 'progress': 'prepared', 'token': 'x',
        'name': 'x', 'value': 'x', 'old': 'y', 'table': 'object_state', 'key': -2, 'pid': 0, 'connection': 1,
        'username': b'', 'description': b'', 'extension': b'', 'packed': False, 'named': False, 'alone': False,
        'each': True, 'staged': False, 'session': 3, 'vote': 4, 'timeout': 10, 'readers': True, 'seconds': '1.5'}


class Texts(unittest.TestCase):
    """How a statement comes to its text, and its values to their places."""

    def test_in_the_order_of_the_signature(self):
        for placeholder, text in ('?', 'a = ? AND b = ?'), ('%s', 'a = %s AND b = %s'):
            statement = Statement('a = $oid AND b = $tid', ('oid', 'tid'), placeholder)
            self.assertEqual((statement, statement.order), (text, None))
            values = [1, 2]
            self.assertIs(arranged(statement, values), values)

    def test_in_another_order(self):
        named, names = 'b = $tid OR a = $oid AND b > $tid', ('oid', 'tid')
        statement = Statement(named, names, '%s')
        self.assertEqual(statement, 'b = %s OR a = %s AND b > %s')
        self.assertEqual(arranged(statement, (1, 2)), [2, 1, 2])
        statement = Statement(named, names, '?')
        self.assertEqual((statement, statement.order), ('b = ?2 OR a = ?1 AND b > ?2', None))
        [row] = sqlite3.connect(':memory:').execute(Statement('SELECT $tid, $oid, $tid', names), (1, 2))
        self.assertEqual(row, (2, 1, 2))

    def test_with_names(self):
        named, names = 'b = $tid OR a = $oid AND b > $tid', ('oid', 'tid')
        statement = Statement(named, names, ':')
        self.assertEqual((statement, statement.order), ('b = :p1 OR a = :p2 AND b > :p3', (1, 0, 1)))
        block = Statement(f'BEGIN\n{named};\nEND;', names, ':')
        self.assertEqual((block, block.order), ('BEGIN\nb = :p1 OR a = :p2 AND b > :p1;\nEND;', (1, 0)))

    def test_values_that_are_not_used(self):
        for named, values in ('b = $tid', [2]), ('1 = 1', []), ('a = $oid', [1]):
            for placeholder in '?', '%s':
                with self.subTest(named, placeholder=placeholder):
                    statement = Statement(named, ('oid', 'tid'), placeholder)
                    self.assertEqual(statement.count(placeholder), len(values))
                    if '?2' not in statement:       # which takes as many as it says
                        self.assertEqual(arranged(statement, (1, 2)), values)

    def test_percent_signs(self):
        self.assertEqual(Statement("a LIKE '%'", (), '%s'), "a LIKE '%%'")
        self.assertEqual(Statement("a LIKE '%'", (), '?'), "a LIKE '%'")

    def test_parts(self):
        script = 'BEGIN;\nUPDATE t SET a = $oid;\nSELECT $tid, $oid; -- not the end\n;\nDO $$\nBEGIN;\nEND $$;\n'
        parts = Statement(script, ('oid', 'tid'), '%s').parts
        self.assertEqual(parts, ('BEGIN', 'UPDATE t SET a = %s', 'SELECT %s, %s; -- not the end',
                                 'DO $$\nBEGIN;\nEND $$'))
        self.assertEqual([arranged(part, (1, 2)) for part in parts], [[], [1], [2, 1], []])

    def load(self, *contents):
        with TemporaryDirectory() as directory:
            for number, content in enumerate(contents):
                Path(directory, f'{number}.sql').write_text(content)
            with patch('relstore.adapters.statements._text', lambda name: Path(directory, name).read_text()):
                sections.cache_clear()
                self.addCleanup(sections.cache_clear)
                return Statements(*(f'{number}.sql' for number in range(len(contents))), keep_history=True,
                                  macros=Tables(oids='list($oids)'), placeholder='%s')

    def test_a_signature_of_several_lines(self):
        sql = self.load('-- Why.\n-- name: a (oid,\n--     oids) [hp]\nSELECT $oid, {oids}\n-- name: b\nSELECT 1\n')
        self.assertEqual((sql.a, sql.a.parameters), ('SELECT %s, list(%s)', ('oid', 'oids')))
        self.assertEqual(list(sql), [('a', 'SELECT $oid, list($oids)'), ('b', 'SELECT 1')])

    def test_a_signature_that_is_not_what_the_text_has(self):
        for text in ('-- name: a\nSELECT $oid', '-- name: a (oid)\nSELECT 1', '-- name: a (oid)\nSELECT $oid, {oids}'):
            with self.subTest(text), self.assertRaisesRegex(ValueError, 'a has .* signature'):
                self.load(text)

    def test_an_overlay_takes_the_same_values(self):
        common = '-- name: a (oid, tid)\nSELECT $oid, $tid'
        self.assertEqual(self.load(common, '-- name: a (oid, tid)\nSELECT $tid').a.order, (1,))
        for head in 'a (tid, oid)', 'a (oid)', 'a (oid, at)', 'a':
            with self.subTest(head), self.assertRaisesRegex(ValueError, 'a '):
                self.load(common, f'-- name: {head}\nSELECT 1')


def nulls(statement):
    """As many as a statement of SQLite's has parameters."""
    return [None] * (len(statement.parameters) if isinstance(statement, Statement) else statement.count('?'))


class Suite(unittest.TestCase):
    # Is a page of changes found by reading the index from the beginning of the transaction that it continues?
    skips_in_index = False

    @property
    def growing(self):
        """The tables that grow with the site."""
        return PRESERVING if self.keep_history else FREE

    def statements(self):
        """Yield (name, statement, the values that it is measured with, or None) of each statement there is."""
        for name, _ in self.sql:
            for statement in getattr(self.sql, name).parts:
                measured = name not in NOT_MEASURED and explains(statement)
                yield name, statement, self.given(statement) if measured else None

    def given(self, statement, **others):
        """Values for a statement, in the order of its placeholders."""
        samples = self.samples() | others
        return tuple(arranged(statement, [samples[name] for name in statement.parameters]))

    def samples(self):
        return samples(self.site)

    def fill(self, objects):
        raise NotImplementedError

    def analyze(self):
        self.ask('ANALYZE')

    def measure(self):
        """Return how much each statement reads: name -> a number. Fails where one reads a whole table."""
        raise NotImplementedError

    def bounded(self, small, large):
        """Compare two measurements: a tree may be one page deeper, and a page split elsewhere."""
        self.assertEqual(small.keys(), large.keys())
        self.assertGreater(len(small), 20)
        for name in small.keys() - SCANS.keys():
            with self.subTest(name):
                self.assertLessEqual(large[name], 1.3 * small[name] + self.slack)

    def test_pages_of_a_large_transaction(self):
        """A transaction may be as large as the site, and each of its records is read once, not once for each page."""
        def pages(objects):
            for start in 0, objects - 200:
                yield 'records', (IMPORT, start, 100)
                if start == 0 or not self.skips_in_index:
                    yield 'changes', (IMPORT, start, 100)

        self.pages_are_bounded(pages)

    def test_pages_of_an_object_with_many_revisions(self):
        """Likewise, where the pack reads all revisions by oid."""
        def pages(objects):
            for name in 'revisions', 'revisions_only':
                for tid in IMPORT, IMPORT + 100_000 + objects - 200:
                    yield name, (1, tid, 100)

        def change_often(objects):
            self.ask('UPDATE object_state SET tid = tid + 100000 + zoid, zoid = 1 WHERE zoid % 2 = 1')

        if self.keep_history:
            self.pages_are_bounded(pages, change_often)

    def test_transactions_that_have_no_state_left(self):
        """Looked for among those that others have replaced, too, where RelStorage's foreign key is, and its index."""
        def empty(objects):
            self.ask(f'DELETE FROM object_state WHERE tid > {self.site.tid} AND tid <= {self.site.tid + 5}')

        for named in (False, True) if self.keep_history else ():
            if named:
                self.ask('CREATE INDEX prev_tid ON object_state (prev_tid)')
            self.pages_are_bounded(
                lambda objects, named=named: [('forget_transactions', (self.site.tid, self.site.tid + 10, named))],
                empty, sizes=(40_000, 80_000))

    def pages_are_bounded(self, pages, change=lambda objects: None, sizes=(10_000, 40_000)):
        """pages: a function from a number of objects to (name, values) of statements."""
        def cost(name, values):
            return sum(self.cost(part, tuple(arranged(part, values))) for part in getattr(self.sql, name).parts
                       if set(PARAMETER.findall(part.named)) == set(part.parameters))

        costs = []
        for objects in sizes:
            self.fill(objects)
            change(objects)
            costs.append([cost(name, values) for name, values in pages(objects)])
            self.analyze()
            costs.append([cost(name, values) for name, values in pages(objects)])
        for (name, values), *found in zip(pages(objects), *costs, strict=True):
            for small, large in zip(found[:2], found[2:], strict=True):
                with self.subTest(name=name, values=values):
                    self.assertLessEqual(large, 1.3 * small + self.slack)

    def test_every_statement_has_a_text_without_placeholders_of_the_code(self):
        for name, text in self.sql:
            with self.subTest(name):
                self.assertNotRegex(text.replace("'{", '').replace('{$', ''), r'\{[a-z_]+\}|%s|\?')
                statement = getattr(self.sql, name)
                self.assertEqual(statement.count(self.placeholder), len(PARAMETER.findall(text)))
                self.assertNotRegex(statement, PARAMETER)

    def test_reasons_name_statements(self):
        """Lists of exceptions do not outlive what they except."""
        names = {name for name, _ in self.sql} | {
            'zap', 'delete_transactions', 'marks', 'unstage', 'replace_copied', 'next_revisions', 'strangers',
            'new_chunks', 'begin_with_chunks', 'continue_chunk', 'finish_with_blobs', 'forget_replaced'}
        self.assertLessEqual(SCANS.keys() | NOT_MEASURED.keys(), names)


# Statements of PostgreSQL that need another before them.
BEFORE = {'unstage': 'stage', 'next_revisions': 'open_revisions', 'copy_replacing': 'begin_replacing',
          'replace_copied': 'begin_replacing', 'undo_try': 'begin_try'}


# Of a COPY in its binary form.
NO_ROWS = b'PGCOPY\n\xff\r\n\0' + bytes(8) + b'\xff\xff'


class OnPostgreSQL(Suite):
    placeholder = '%s'
    slack = 8       # pages

    def setUp(self):
        super().setUp()
        # One that no other test fills, so that it has no statistics yet.
        storage = self.open_storage(f'statements_{self._testMethodName[-12:]}')
        self.addCleanup(storage.close)
        self.adapter_used, self.sql = storage.database.adapter, storage.database.adapter.sql
        self.connection = psycopg2.connect(self.dsn(f'statements_{self._testMethodName[-12:]}'))
        self.addCleanup(self.connection.close)
        self.connection.autocommit = True
        for table in self.growing:      # else it comes when it wants to, with statistics, and fewer pages are read
            self.ask(f'ALTER TABLE {table} SET (autovacuum_enabled = off)')
        self.site = site(1000)
        [[self.epoch]] = self.ask(self.sql.epoch)

    def ask(self, sql, parameters=None):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall() if cursor.description else []

    def samples(self):
        site, array = self.site, self.adapter_used.oid_list
        oids, tids, count = array(site.oids), array(site.tids), len(site.oids)
        return samples(site) | {
            **dict.fromkeys(('oids', 'locks', 'read_oids', 'known_oids', 'blob_oids', 'copied_oids', 'recorded_oids',
                             'repeated_oids', 'removed_oids'), oids),
            **dict.fromkeys(('tids', 'read_tids', 'known_tids', 'sinces', 'copied_tids', 'repeated_tids'), tids),
            'revisions': self.adapter_used.revision_list(list(zip(site.oids, site.tids, strict=True))),
            **{name: array(count * [0]) for name in ('refs_starts', 'refs_sizes')},
            **{name: array(range(0, 3 * count, 3)) for name in ('starts', 'blob_starts')},
            **{name: array(count * [3]) for name in ('sizes', 'blob_sizes', 'recorded_sizes')},
            'data': b'abc' * count, 'digests': bytes(32) * count,
            'chunk': 1, 'chunks': '{}', 'start': 0, 'md5s': array(count * ['a']),
            'data_tids': array(count * ['NULL']), 'pack_ids': array(count * [9]), 'goes': array(count * [2]),
            'epoch': self.epoch, 'timeout': '1000', 'transaction': VOTED, 'schema': 'public',
            'kinds': '{TABLE}', 'names': '{object_state}', 'privileges': '{SELECT}'}

    def prepare(self, name, statement):
        text, _ = numbered(statement.named)
        self.ask(f'PREPARE {name} AS {text}')

    def test_every_statement_is_understood(self):
        for name, statement, _ in self.statements():
            with self.subTest(name):
                if name in BEFORE:
                    before = getattr(self.sql, BEFORE[name])
                    self.ask('BEGIN')
                    self.ask(before, self.given(before))
                    self.ask_or_copy(statement)
                    self.ask('ROLLBACK')
                elif explains(statement):
                    self.prepare('a', statement)
                    self.ask('DEALLOCATE a')
                elif 'CONCURRENTLY' in statement:       # in no transaction
                    self.ask(statement)
                else:
                    self.ask('BEGIN')
                    self.ask_or_copy(statement)
                    self.ask('ROLLBACK')
                    self.ask('DEALLOCATE ALL')

    def ask_or_copy(self, statement):
        if 'FROM STDIN' in statement:
            with self.connection.cursor() as cursor:
                cursor.copy_expert(statement, io.BytesIO(NO_ROWS))
        else:
            self.ask(statement, self.given(statement))

    def test_work_does_not_grow_with_the_site(self):
        self.fill(20_000)
        with self.subTest('without statistics'):
            self.measure()
        self.analyze()
        small = self.measure()
        self.fill(40_000)
        with self.subTest('with statistics that are old'):
            self.measure()
        self.analyze()
        self.bounded(small, self.measure())

    def test_filled_while_somebody_looks(self):
        """As an autovacuum of the catalogue does when it wants to: what is measured does not depend on that."""
        name = f'statements_{self._testMethodName[-12:]}'
        self.fill(20_000)
        self.analyze()
        alone = self.measure()
        with closing(psycopg2.connect(self.dsn(name))) as other, other.cursor() as cursor:
            cursor.execute('SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1')
            timer = threading.Timer(3, other.rollback)
            timer.start()
            self.fill(20_000)
            timer.join()
        self.analyze()
        self.bounded(alone, self.measure())

    def test_functions_planned_before_an_import(self):
        """A session keeps the plans that functions have made when there was next to nothing."""
        self.fill(100)
        calls = [getattr(self.sql, name) for name in ('sweep', *(['forget_transactions'] if self.keep_history else []))]
        for statement in 10 * calls:    # from the sixth time on it is one plan for all parameters
            self.ask('BEGIN')
            self.ask(statement, self.given(statement))
            self.ask('ROLLBACK')
        self.ask('SET session_replication_role = replica')
        self.ask('; '.join(f'DELETE FROM "{table}"' for table in reversed(self.growing)))
        self.insert(20_000)
        for statement in calls:
            with self.subTest(statement):
                old = self.cost(statement, self.given(statement))
                self.ask('DISCARD PLANS')
                self.assertLessEqual(old, 1.3 * self.cost(statement, self.given(statement)) + self.slack)

    def test_site_that_grew_since_its_statistics(self):
        """As after an import into a new database: the last statistics say that there is next to nothing."""
        self.fill(100)
        self.analyze()
        self.fill(20_000)
        self.measure()

    def test_prepared_before_an_import(self):
        """A session keeps the plans that it made when there was next to nothing."""
        self.fill(100)
        self.prepare('load_at', self.sql.load_at)
        self.prepare('load_many', self.sql.load_many)
        calls = [('EXECUTE load_at (%s, %s)', self.sql.load_at),
                 ('EXECUTE load_many (%s, %s, %s, %s)', self.sql.load_many)]
        for statement, prepared in 10 * calls:        # from the sixth time on it is one plan for all parameters
            self.ask(statement, self.given(prepared))
        self.ask('SET session_replication_role = replica')
        columns, values = (
            ('prev_tid, md5, ', f"0, '{'0' * 32}', ") if self.keep_history else ('refs_tid, ', f'{IMPORT}, '))
        self.ask(f'INSERT INTO object_state (zoid, tid, {columns} state_size, state, refs) '
                 f'SELECT n, {IMPORT}, {values} 100, {STATE} FROM numbers(1000, 20000)')
        for statement, prepared in calls:
            self.assertLess(self.cost(statement, self.given(prepared)), 200)

    def test_measurement_notices_a_scan(self):
        self.fill(2000)
        self.ask("CREATE FUNCTION scan() RETURNS bigint LANGUAGE plpgsql AS "
                 "'BEGIN RETURN (SELECT sum(state_size) FROM object_state); END'")
        self.addCleanup(self.ask, 'DROP FUNCTION scan()')
        for statement in 'SELECT sum(state_size) FROM object_state', 'SELECT scan()':
            with self.assertRaisesRegex(AssertionError, 'object_state'):
                self.cost(statement, ())

    def fill(self, objects):
        for table in self.growing:      # no statistics but ours
            self.ask(f'ALTER TABLE "{table}" SET (autovacuum_enabled = off)')
        self.ask('CREATE OR REPLACE FUNCTION numbers(bigint, bigint) RETURNS TABLE (n bigint) LANGUAGE sql AS '
                 "'SELECT generate_series($1, $2)'")
        self.ask('SET session_replication_role = replica')      # foreign keys: trusted, and slow
        self.ask(f'TRUNCATE {", ".join(self.growing)} CASCADE')
        self.insert(objects)
        self.ask('RESET session_replication_role')
        self.ask(f"SELECT setval('zoid_seq', {objects} / 16 + 1)")
        self.vacuum()

    def vacuum(self):
        """Set what makes reading an index alone possible: on all pages, or the numbers of two fillings differ by that.

        VACUUM leaves it where somebody's snapshot may not see the rows: that of an autovacuum of the catalogue, say.
        """
        tables = ', '.join(f'"{table}"' for table in self.growing)
        deadline = time.monotonic() + 60
        hidden = True
        while hidden:
            self.assertLess(time.monotonic(), deadline, f'somebody has a snapshot for long: {hidden}')
            self.ask(f'VACUUM {tables}')
            hidden = self.ask("SELECT relname, relpages, relallvisible FROM pg_class WHERE relallvisible < relpages "
                              "AND relnamespace = 'public'::regnamespace AND relname = ANY(%s)", (list(self.growing),))

    def insert(self, objects):
        text = FILL_PRESERVING if self.keep_history else FILL_FREE
        self.ask(text.replace(':objects', str(objects)))
        self.site = site(objects)

    def test_all_revisions_are_read_once(self):
        """Once, however many pages they are fetched in, and whether references were found out or not."""
        self.fill(20_000)
        for _ in range(2):
            [[size]] = self.ask("SELECT sum(pg_relation_size(oid)) / current_setting('block_size')::integer "
                                "FROM pg_class WHERE relname IN ('object_state', 'relstore_refs')")
            for name in 'open_revisions', 'open_revisions_only':
                with self.subTest(name):
                    _, cursor = getattr(self.sql, name).parts
                    _, _, query = cursor.partition(' FOR\n')
                    self.assertLess(self.cost(query, (), scan_allowed=True), size + self.slack)
            self.analyze()

    def measure(self):
        work = {}
        # Vote has said how the plans of finish are made.
        vote = self.sql.vote.parts[1]
        vote = vote, self.given(vote)
        for name, statement, values in self.statements():
            if values is not None and name not in ('revisions', 'revisions_only'):     # read through a cursor here
                with self.subTest(name):
                    work[name] = self.cost(statement, values, name in SCANS, [vote] if name == 'finish' else ())
        with self.subTest('staged'):
            finish = self.sql.finish.parts[0]
            self.cost(finish, self.given(finish, staged=True),
                      before=[vote, (self.sql.stage, self.given(self.sql.stage))])
        return work

    def cost(self, *arguments, **more):
        """Run a statement and roll back; return how many pages it read, in functions too.

        The less of two times: what others do (an autovacuum of the catalogue again) may have made this session forget
        what it knew of the catalogue, and it reads that again.
        """
        return min(self._cost(*arguments, **more) for _ in range(2))

    def _cost(self, statement, parameters, scan_allowed=False, before=()):
        self.ask('BEGIN')
        try:
            [[voted]] = self.ask('SELECT pg_current_xact_id()::text::bigint')
            parameters = tuple(voted if parameter is VOTED else parameter for parameter in parameters)
            for earlier in before:
                self.ask(*earlier)
            scans = self.scans()
            [[[explained]]] = self.ask(f'EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}', parameters)
            if not scan_allowed:
                self.assertEqual(self.scans(), scans, f'tables read whole by {statement}')
            plan = explained['Plan']
            return plan['Shared Hit Blocks'] + plan['Shared Read Blocks']
        finally:
            self.ask('ROLLBACK')

    def scans(self):
        """Whole tables that this transaction has read: name -> (scans, rows)."""
        return {name: (scans, rows) for name, scans, rows in self.ask(
            'SELECT relname, seq_scan, seq_tup_read FROM pg_stat_xact_user_tables '
            'WHERE schemaname = %s AND relname = ANY(%s)', ('public', list(self.growing)))}


class OnSQLite(Suite):
    placeholder = '?'
    slack = 60      # instructions of SQLite's machine

    def setUp(self):
        super().setUp()
        storage = self.open_storage()
        self.addCleanup(storage.close)
        adapter = storage.database.adapter
        self.adapter_used, self.sql = adapter, adapter.sql
        # SQLite 3.40 compares no row with an index that ends in the primary key: 50 ms for a million objects.
        self.skips_in_index = not self.keep_history
        self.connection = sqlite3.connect(adapter.path, isolation_level=None)
        self.addCleanup(self.connection.close)
        self.ask('CREATE TEMPORARY TABLE new_oid (zoid INTEGER PRIMARY KEY)')    # is in a file of RelStorage's
        self.site = site(1000)

    def test_every_statement_is_understood(self):
        for name, statement, _ in self.statements():
            if statement.startswith('PRAGMA'):      # some act when they are explained
                continue
            with self.subTest(name):
                self.connection.execute(f'EXPLAIN {statement}', nulls(statement))

    def samples(self):
        return samples(self.site) | {
            'oids': self.adapter_used.oid_list(self.site.oids),
            'revisions': self.adapter_used.revision_list(list(zip(self.site.oids, self.site.tids, strict=True)))}

    def ask(self, sql):
        return self.connection.execute(sql).fetchall()

    def test_every_statement_finds_its_rows_by_an_index(self):
        if self.keep_history:
            self.ask('CREATE INDEX prev_tid ON object_state (prev_tid)')    # asked for only where RelStorage made it
        for name, statement, _ in self.statements():
            if explains(statement) and name not in SCANS:
                with self.subTest(name):
                    self.check_plan(statement)

    def check_plan(self, statement):
        plan = self.connection.execute(f'EXPLAIN QUERY PLAN {statement}', nulls(statement)).fetchall()
        for *_, step in plan:
            # An index that is walked in order costs what a LIMIT makes of it.
            scan = re.match(r'SCAN (?:"?\w+"? AS )?"?(\w+)"?(.*)', step)
            if scan:
                table = self.tables(statement).get(scan[1], scan[1])
                if table in self.growing:
                    self.assertIn('LIMIT', statement, step)
                    self.assertIn(' USING ', scan[2], step)

    def tables(self, statement):
        """Aliases in a statement -> tables."""
        return {alias: table for table, alias in re.findall(r'(?:FROM|JOIN) "?(\w+)"? (\w)\b', statement)}

    def test_check_notices_a_scan(self):
        for statement in ('SELECT 1 FROM object_state WHERE state_size = 5',
                          'SELECT 1 FROM object_state s WHERE s.state_size = 5 LIMIT 1',
                          'SELECT sum(tid) FROM object_state'):
            with self.assertRaises(AssertionError):
                self.check_plan(statement)
        self.fill(1000)
        small = self.cost('SELECT 1 FROM object_state WHERE state_size = 5', ())
        self.fill(2000)
        self.assertGreater(self.cost('SELECT 1 FROM object_state WHERE state_size = 5', ()), 1.9 * small)

    def test_work_does_not_grow_with_the_site(self):
        self.fill(20_000)
        small = self.measure()
        self.fill(40_000)
        large = self.measure()
        self.bounded(small, large)
        self.analyze()
        self.bounded(small, self.measure())

    def fill(self, objects):
        for table in reversed(self.growing):
            self.connection.execute(f'DELETE FROM "{table}"')
        text = FILL_PRESERVING if self.keep_history else FILL_FREE
        numbers = (r'(WITH RECURSIVE r (n) AS (SELECT \1 UNION ALL SELECT n + 1 FROM r WHERE n < \2) SELECT n FROM r)')
        text = re.sub(r'numbers\((.*), (.*?)\)', numbers, text.replace(':objects', str(objects)))
        self.connection.executescript(f'BEGIN; {text.replace("AS bytea", "AS BLOB")} COMMIT')
        self.site = site(objects)

    def measure(self):
        work = {}
        for name, statement, parameters in self.statements():
            if parameters is not None:
                with self.subTest(name):
                    work[name] = self.cost(statement, parameters)
        return work

    def cost(self, statement, parameters):
        """Run a statement and roll back; return how many instructions it took."""
        instructions = 0

        def count():
            nonlocal instructions
            instructions += 1

        self.connection.execute('BEGIN')
        self.connection.set_progress_handler(count, 1)
        try:
            self.connection.execute(statement, parameters).fetchall()
        finally:
            self.connection.set_progress_handler(None, 1)
            self.connection.execute('ROLLBACK')
        return instructions


class OnMySQL(Suite):
    placeholder = '%s'
    slack = 40      # rows and index entries

    def setUp(self):
        super().setUp()
        name = f'statements_{self._testMethodName[-12:]}'
        storage = self.open_storage(name)
        self.addCleanup(storage.close)
        self.adapter_used, self.sql = storage.database.adapter, storage.database.adapter.sql
        self.connection = self.layer.server.connect(self._database(name))
        self.addCleanup(self.connection.close)
        self.site = site(1000)
        self.ask("SET sql_mode = 'STRICT_ALL_TABLES,ANSI_QUOTES', foreign_key_checks = 0")
        self.ask('INSERT IGNORE INTO relstore_commit (session, vote, tid, voted) VALUES (3, 4, 0, UTC_TIMESTAMP())')
        for statement in self.sql.begin_stage.parts:
            self.ask(statement)

    def ask(self, sql, parameters=None):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall()

    def analyze(self):
        self.ask('ANALYZE TABLE ' + ', '.join(f'"{table}"' for table in self.growing))

    def samples(self):
        oids, tids = self.site.oids, self.site.tids
        return samples(self.site) | {
            'oids': self.adapter_used.oid_list(oids), 'in_oids': tuple(oids), 'in_tids': tuple(tids),
            'revisions': self.adapter_used.revision_list(list(zip(oids, tids, strict=True)))}

    def statements(self):
        for name, _ in self.sql:
            for statement in getattr(self.sql, name).parts:
                yield name, statement, None if name in NOT_RUN_ON_MYSQL else self.given(statement)

    def test_every_statement_is_understood(self):
        self.ask('SET @relstore_tid = %s, @relstore_first = 1', (self.site.last + 10,))
        for name, statements in itertools.groupby(self.statements(), key=lambda found: found[0]):
            if name not in NOT_RUN_ON_MYSQL:
                with self.subTest(name):
                    # Some are for the middle of a transaction; and MariaDB takes the checks back after SET STATEMENT.
                    self.ask('SET autocommit = 0, foreign_key_checks = 0')
                    for _, statement, values in statements:
                        self.ask(statement, values)
            self.ask('ROLLBACK')

    def test_work_does_not_grow_with_the_site(self):
        self.fill(20_000)
        with self.subTest('without statistics'):
            first = self.measure()
        self.analyze()
        small = self.measure()
        self.bounded(first, small)
        self.fill(40_000)
        self.analyze()
        self.bounded(small, self.measure())

    def test_measurement_notices_a_scan(self):
        costs = []
        for objects in (1000, 2000):
            self.fill(objects)
            costs.append(self.cost('SELECT sum(state_size) FROM object_state', ()))
        self.assertGreater(costs[1], 1.9 * costs[0])

    def fill(self, objects):
        self.ask('CREATE TABLE IF NOT EXISTS numbers_there (n BIGINT PRIMARY KEY)')
        self.ask('INSERT IGNORE INTO numbers_there VALUES (0)')
        [[have]] = self.ask('SELECT count(*) FROM numbers_there')
        while have <= objects:
            self.ask('INSERT INTO numbers_there SELECT n + %s FROM numbers_there', (have,))
            have *= 2
        for table in reversed(self.growing):
            self.ask(f'TRUNCATE "{table}"')
        text = FILL_PRESERVING if self.keep_history else FILL_FREE
        text = text.replace(':objects', str(objects)).replace(' / ', ' DIV ').replace('AS bytea', 'AS BINARY')
        for statement in parts(text.replace(';\n', ';\n\n')):
            numbers = r'(SELECT n FROM numbers_there WHERE n BETWEEN \1 AND \2) r'
            self.ask(re.sub(r'numbers\((.*), (.*?)\)', numbers, statement.rstrip().rstrip(';')))
        self.site = site(objects)

    def measure(self):
        work = {}
        for n, (name, statement, parameters) in enumerate(self.statements()):
            if explains(statement) and name not in SCANS.keys() | NOT_MEASURED.keys() | NOT_RUN_ON_MYSQL.keys():
                with self.subTest(name):
                    work[name, n] = self.cost(statement, parameters)
        return work

    def cost(self, statement, parameters):
        """Run a statement and roll back; return how many rows and index entries it read."""
        self.ask('SET @relstore_tid = %s, @relstore_first = 1, @relstore_last = %s',
                 (self.site.last + 10, self.site.last))
        self.ask('FLUSH STATUS')    # of this session
        self.ask('START TRANSACTION')
        try:
            self.ask(statement, parameters)
            return sum(int(value) for _, value in self.ask("SHOW SESSION STATUS LIKE 'Handler_read%'"))
        finally:
            self.ask('ROLLBACK')


cases(globals(), OnMySQL, backends=MYSQL[:2] + MYSQL[4:])
cases(globals(), OnPostgreSQL, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
cases(globals(), OnSQLite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Suite, OnPostgreSQL, OnSQLite, OnMySQL
