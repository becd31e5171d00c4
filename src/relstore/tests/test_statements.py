"""The SQL: every statement is one that its database understands, and none reads more when the database grows."""
import itertools
import json
import re
import sqlite3
import threading
import time
import unittest
from contextlib import closing
from types import SimpleNamespace

import psycopg2
from persistent.TimeStamp import TimeStamp
from ZODB.utils import u64

import relstore
from relstore.adapters.base import MAX_TID
from relstore.tests.support.backends import (
    MYSQL,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.statements import explains, parts

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
}

#: Statements that are not run here, only prepared: name -> why.
NOT_MEASURED = {
    'zap': 'removes everything',
    'delete_transactions': 'removes everything',
    'relations': 'the catalogue, which does not grow',
    'strangers': 'the catalogue, likewise',
    'unstage': 'a temporary table, which is not there',
    'marks': 'all garbage that waits, once a sweep',
    'next_revisions': 'a cursor, which is not open: see test_all_revisions_are_read_once',
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
INSERT INTO relstore_garbage (generation, zoid, tid, since, goes) SELECT 1, n, {IMPORT}, 1, 2 FROM numbers(1, :objects);
INSERT INTO relstore_garbage (generation, zoid, tid, since, goes)
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

# How statements of every database are called: name -> parameters, from a site.
PARAMETERS = {
    'load_at': lambda s: (s.oid, s.last),
    'load_now': lambda s: (s.oid,),
    'load_serial': lambda s: (s.oid, s.tid),
    'load_serials': lambda s: (s.oids, s.tids),
    'load_before': lambda s: (s.oid, s.last, s.oid, s.last),
    'garbage_sizes': lambda s: (s.oids, s.tids) if s.oids[0] == '{' else (
        json.dumps(list(zip(json.loads(s.oids), json.loads(s.tids), strict=True))),),
    'objects_end': lambda s: (s.oid, 200),
    'unknown_references': lambda s: (s.oid, IMPORT, s.oid + 50, 100) if s.keep_history else (s.oid, s.oid + 50, 100),
    'known_references': lambda s: PARAMETERS['unknown_references'](s),
    'load_many': lambda s: (s.oids, s.last, 1000, s.oid),
    'load_at_by_function': lambda s: (s.oid, s.last),
    'load_at_pooled': lambda s: (s.oid, s.last),
    'load_many_pooled': lambda s: (s.oids, s.last, 1000, s.oid),
    'current_tid': lambda s: (s.oid,),
    'with_blobs': lambda s: (s.oids,),
    'poll': lambda s: (s.last - 3, 100_001),
    'history': lambda s: (s.oid, 20),
    'undo_log': lambda s: (MAX_TID, 200),
    'transaction_is_undoable': lambda s: (s.tid,),
    'author': lambda s: (s.tid,),
    'undo': lambda s: (s.tid,),
    'transactions': lambda s: (s.tid, MAX_TID, 100),
    'records': lambda s: (s.tid, s.oid - 20, 100),
    'current_records': lambda s: (s.oid, s.oid, 100),
    'count_up_to': lambda s: (5000,),
    'new_epoch': lambda s: ('x',),
    'renew_epoch': lambda s: ('x', 'y'),
    'stands': lambda s: (s.tid,),
    'current_tids': lambda s: (s.oids,),
    'newest': lambda s: (20,),
    'add_meta': lambda s: ('x', 'y'),
    'set_meta': lambda s: ('x', 'y'),
    'stay_whole': lambda s: ('2', '1'),
    'revisions': lambda s: (s.oid, IMPORT, 100) if s.keep_history else (s.oid, 100),
    'revisions_only': lambda s: PARAMETERS['revisions'](s),
    'changes': lambda s: (s.last - 3, s.oid, 100),
    'garbage_revisions': lambda s: (s.oids, 2),
    'save_references': lambda s: (s.oid, s.tid, b''),
    'has_tid': lambda s: (s.tid,),
    'new_pack': lambda s: (9, s.last, s.last, True, 'x'),
    'pack_prepared': lambda s: ('prepared', 1, 2),
    'pack_sweeping': lambda s: (2,),
    'pack_swept': lambda s: (2, 2),
    'add_garbage': lambda s: (9, s.oid, s.tid, s.tid, 2),
    'garbage': lambda s: (2, s.oid, 100),
    'garbage_end': lambda s: (2, s.oid, 100),
    'start_sweep': lambda s: (2, s.last, s.last),
    'end_sweep': lambda s: (2,),
    'spare': lambda s: (s.oids, 2),
    'forget_garbage': lambda s: (2, 1),
    'going': lambda s: (s.oids, 2, 2),
    'has_list': lambda s: (2, 'x'),
    'marks': lambda s: (2, 100),
    'marked': lambda s: (s.oids, 2),
    'take_marks': lambda s: (s.oids, 2),
    'current_revisions': lambda s: (s.oids,),
    'missing': lambda s: (s.oids,),
    'swept': lambda s: (1, -1, 100),
    'swept_count': lambda s: (1,),
    'transactions_end': lambda s: (s.tid, MAX_TID, 100),
    'sweep': lambda s: s.batch,
    'forget_transactions': lambda s: (s.tid, s.tid + 10, False),
    'lock_votes': lambda s: ('1000',),
    # PostgreSQL
    'vote': lambda s: (s.epoch, '1000', None, False, s.last, s.oids, s.oids, s.tids, f'{{{s.oid}}}', f'{{{s.tid}}}',
                       s.oids, s.tids),
    'vote_staged': lambda s: PARAMETERS['vote'](s),
    'stage': lambda s: s.arrays,
    'finish': lambda s: (VOTED, '1000', None, False, b'', b'', None, False, *s.arrays),
    'transaction_status': lambda s: ('3', 'x'),
    'terminate': lambda s: (0,),
    'tid_of': lambda s: (s.last - 3, '3'),
    'new_oids': lambda s: (1,),
    'reserve_oids': lambda s: (1,),
    'schema_exists': lambda s: ('public',),
    'missing_rights': lambda s: ('public', '{TABLE}', '{object_state}', '{SELECT}'),
    'columns': lambda s: ('public',),
    'lock_key': lambda s: (-2,),
    'blockers': lambda s: (0,),
    'lock_holders': lambda s: (-2, -2),
    'table_holders': lambda s: ('public', 'object_state', True, '1.5'),
    'be_impatient': lambda s: ('1500',),
    'end_after': lambda s: ('1500',),
    'size': lambda s: ('public',),
    # SQLite
    'insert_transaction': lambda s: (s.last + 10, False, b'', b'', b''),
    'sweep_chunks': lambda s: s.batch,
    'sweep_current': lambda s: (*s.batch, 2),
    'sweep_states': lambda s: (*s.batch, 2),
    'sweep_references': lambda s: s.batch,
    'mark_packed': lambda s: (s.tid, s.tid + 10),
    'insert_state': lambda s: (
        (s.last, s.oid + 5, '0' * 32, 3, b'abc', b'', None, s.oid + 5) if s.keep_history else
        (s.oid + 5, s.last, 3, b'abc', b'', s.last)),
    'point_current': lambda s: (s.oid, s.tid),
    'take_oids': lambda s: (16,),
    'raise_oid': lambda s: (16,),
    'raise_relstorage_oid': lambda s: (1,),
    'take_relstorage_oids': lambda s: (1, 1),
}

# Those of MySQL and MariaDB, for all statements of a text in turn; a list after IN is a tuple. The others are as above.
PARAMETERS_OF_MYSQL = {
    'load_many': lambda s: (json.dumps(s.oids), s.last, 1000, s.oid),
    'load_older': lambda s: (s.oid, s.last, 1000, s.oid),
    'garbage_sizes': lambda s: (json.dumps(list(zip(s.oids, s.tids, strict=True))),),
    'unknown_references': lambda s: (
        (s.oid, s.oid, IMPORT, s.oid + 50, 100) if s.keep_history else (s.oid, s.oid + 50, 100)),
    'known_references': lambda s: PARAMETERS_OF_MYSQL['unknown_references'](s),
    'forget_commits': lambda s: ('[1, 2]',),
    'garbage_revisions': lambda s: (json.dumps(s.oids), 2),
    'spare': lambda s: (json.dumps(s.oids), 2),
    'going': lambda s: (json.dumps(s.oids), 2, 2),
    'current_revisions': lambda s: (json.dumps(s.oids),),
    'marked': lambda s: (json.dumps(s.oids), 2),
    'take_marks': lambda s: (json.dumps(s.oids), 2),
    'missing': lambda s: (json.dumps(s.oids),),
    'with_blobs': lambda s: (json.dumps(s.oids),),
    'current_tids': lambda s: (json.dumps(s.oids),),
    'poll': lambda s: (s.last - 3, s.last - 3, 100_001),
    'voted': lambda s: (
        (s.last, s.last) if s.keep_history else (json.dumps(list(zip(s.oids, s.tids, strict=True))),)),
    'revisions': lambda s: (s.oid, s.oid, IMPORT, 100) if s.keep_history else (s.oid, 100),
    'revisions_only': lambda s: PARAMETERS_OF_MYSQL['revisions'](s),
    'changes': lambda s: (s.last - 3, s.last - 3, s.oid, 100),
    'lock_votes': lambda s: (10,),
    'sweep': lambda s: s.batch * (5 if s.keep_history else 3),
    'forget_transactions': lambda s: (s.tid, s.tid + 10, False, s.tid, s.tid + 10),
    'begin_vote': lambda s: (10, 10, 1, 2),
    'lock_created': lambda s: (s.oid, json.dumps(s.oids)),
    'lock_current': lambda s: (s.oids,),
    'lock_read': lambda s: (s.oids, s.oids),
    'look_at_reads': lambda s: (len(s.oids), s.oids, s.oids),
    'lock_free': lambda s: (s.oids, s.oids),
    'lock_holders': lambda s: (str(s.oid),),
    'blockers': lambda s: (1,),
    'waits_for': lambda s: (1,),
    'unfinished': lambda s: (1,),
    'current_states': lambda s: (s.oids,),
    'stage': lambda s: (s.oid, s.tid, '0' * 32, 3, b'abc', b'', None),
    'begin_finish': lambda s: (10, 10, s.last + 10, 3, 4),
    'insert_transaction': lambda s: (False, b'', b'', b''),
    'insert_states': lambda s: (
        (s.oid, s.tid, '0' * 32, 3, b'abc', b'', None) if s.keep_history else (s.oid, 3, b'abc', b'')),
    'point_current': lambda s: (s.oid,),
    'end_finish': lambda s: (3, 4),
    'outcome': lambda s: (10, 1, 2, 1),
    'new_oids': lambda s: (3,),
    'reserve_oids': lambda s: (10, 10),
    'reserve_oids_at_once': lambda s: (10,),
}


def site(objects, keep_history, as_list):
    """What is in a filled database, for parameters: an object in the middle that was changed, and others after it."""
    def current(oid):
        return IMPORT if oid % 2 else BASE + 2 + (objects // 2 + oid // 2 - 1) // 20

    oid = objects // 2
    oids = range(oid, oid + 960, 30) if oid > 1000 else range(2, 34)
    mixed = [other + n % 2 for n, other in enumerate(oids)]
    rows = '{' + ','.join(map(str, mixed[1:4])) + '}'
    return SimpleNamespace(
        keep_history=keep_history, epoch='', oid=oid, tid=current(oid), last=current(objects), oids=as_list(mixed),
        tids=as_list(map(current, mixed)), batch=(2, oid, oid + 200),
        arrays=(rows, '{0,3,6}', '{3,3,3}', '{a,b,c}', '{NULL,NULL,NULL}', '{0,0,0}', '{0,0,0}', b'aaabbbccc', b''))


class Suite(unittest.TestCase):
    parameters = PARAMETERS
    # Is a page of changes found by reading the index from the beginning of the transaction that it continues?
    skips_in_index = False

    @property
    def growing(self):
        """The tables that grow with the site."""
        return PRESERVING if self.keep_history else FREE

    def statements(self):
        """Yield (name, statement, the parameters that it is measured with, or None) of each statement there is."""
        for name, text in self.sql:
            for statement in parts(text):
                if name in NOT_MEASURED or not explains(statement):
                    yield name, statement, None
                elif '?' not in statement:
                    yield name, statement, ()
                else:
                    self.assertIn(name, self.parameters, 'how is it called?')
                    parameters = self.parameters[name](self.site)
                    self.assertEqual(len(parameters), statement.count('?'), statement)
                    yield name, statement, parameters

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
                    yield 'changes', (*self.after(IMPORT, start), 100)

        self.pages_are_bounded(pages)

    def test_pages_of_an_object_with_many_revisions(self):
        """Likewise, where the pack reads all revisions by oid."""
        def pages(objects):
            for name in 'revisions', 'revisions_only':
                for tid in IMPORT, IMPORT + 100_000 + objects - 200:
                    yield name, (*self.after(1, tid), 100)

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
        """pages: a function from a number of objects to (name, parameters) of statements."""
        def one(name, parameters):
            [statement] = [part for part in parts(texts[name]) if part.count('?') == len(parameters)]
            return statement

        texts, costs = dict(self.sql), []
        for objects in sizes:
            self.fill(objects)
            change(objects)
            costs.append([self.cost(one(name, parameters), parameters) for name, parameters in pages(objects)])
            self.analyze()
            costs.append([self.cost(one(name, parameters), parameters) for name, parameters in pages(objects)])
        for (name, parameters), *found in zip(pages(objects), *costs, strict=True):
            for small, large in zip(found[:2], found[2:], strict=True):
                with self.subTest(name=name, parameters=parameters):
                    self.assertLessEqual(large, 1.3 * small + self.slack)

    def test_every_statement_has_a_text_without_placeholders_of_the_code(self):
        for name, text in self.sql:
            with self.subTest(name):
                self.assertNotRegex(text.replace("'{", '').replace('{$', ''), r'\{[a-z_]+\}|%s')
                self.assertEqual(getattr(self.sql, name).count(self.placeholder), text.count('?'))

    def test_reasons_name_statements(self):
        """Lists of exceptions do not outlive what they except."""
        names = {name for name, _ in self.sql} | {
            'zap', 'delete_transactions', 'marks', 'unstage', 'next_revisions', 'strangers'}
        self.assertLessEqual(SCANS.keys() | NOT_MEASURED.keys(), names)


# Statements of PostgreSQL that need another before them: name -> it and its parameters, and those of the statement.
BEFORE = {
    'unstage': lambda test: ((test.sql.stage, test.site.arrays), (test.site.oids,)),
    'next_revisions': lambda test: ((test.sql.open_revisions,), None),
}


class OnPostgreSQL(Suite):
    parameters = PARAMETERS | {
        'save_references': lambda s: (b'', s.oids, s.tids, *[f'{{{",".join(32 * "0")}}}'] * 2),
        'add_garbage': lambda s: (f'{{{s.oid}}}',) * 5}
    placeholder = '%s'
    slack = 8       # pages

    def setUp(self):
        super().setUp()
        # One that no other test fills, so that it has no statistics yet.
        storage = self.open_storage(f'statements_{self._testMethodName[-12:]}')
        self.addCleanup(storage.close)
        self.sql, self.list, self.after = storage._adapter.sql, storage._adapter.oid_list, storage._adapter.after
        self.connection = psycopg2.connect(self.dsn(f'statements_{self._testMethodName[-12:]}'))
        self.addCleanup(self.connection.close)
        self.connection.autocommit = True
        for table in self.growing:      # else it comes when it wants to, with statistics, and fewer pages are read
            self.ask(f'ALTER TABLE {table} SET (autovacuum_enabled = off)')
        self.site = site(1000, self.keep_history, self.list)
        [[self.epoch]] = self.ask(self.sql.epoch)

    def ask(self, sql, parameters=None):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall() if cursor.description else []

    def prepare(self, name, statement):
        first, *rest = statement.split('?')
        self.ask(f'PREPARE {name} AS {first}' + ''.join(f'${n}{text}' for n, text in enumerate(rest, 1)))

    def test_every_statement_is_understood(self):
        for name, statement, _ in self.statements():
            with self.subTest(name):
                if name in BEFORE:
                    before, parameters = BEFORE[name](self)
                    self.ask('BEGIN')
                    self.ask(*before)
                    self.ask(getattr(self.sql, name), parameters)
                    self.ask('ROLLBACK')
                elif explains(statement):
                    self.prepare('a', statement)
                    self.ask('DEALLOCATE a')
                elif 'CONCURRENTLY' in statement:       # in no transaction
                    self.ask(statement)
                else:
                    self.ask('BEGIN')
                    self.ask(statement)
                    self.ask('ROLLBACK')
                    self.ask('DEALLOCATE ALL')

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
        calls = [(text, PARAMETERS[name](self.site)) for name, text in self.sql
                 if name in ('sweep', 'forget_transactions')]
        for statement, parameters in 10 * calls:    # from the sixth time on it is one plan for all parameters
            self.ask('BEGIN')
            self.ask(statement.replace('?', '%s'), parameters)
            self.ask('ROLLBACK')
        self.ask('SET session_replication_role = replica')
        self.ask('; '.join(f'DELETE FROM "{table}"' for table in reversed(self.growing)))
        self.insert(20_000)
        for name, text in self.sql:
            if name in ('sweep', 'forget_transactions'):
                with self.subTest(name):
                    old = self.cost(text, PARAMETERS[name](self.site))
                    self.ask('DISCARD PLANS')
                    self.assertLessEqual(old, 1.3 * self.cost(text, PARAMETERS[name](self.site)) + self.slack)

    def test_site_that_grew_since_its_statistics(self):
        """As after an import into a new database: the last statistics say that there is next to nothing."""
        self.fill(100)
        self.analyze()
        self.fill(20_000)
        self.measure()

    def test_prepared_before_an_import(self):
        """A session keeps the plans that it made when there was next to nothing."""
        self.fill(100)
        self.prepare('load_at', self.sql.load_at.replace('%s', '?'))
        self.prepare('load_many', self.sql.load_many.replace('%s', '?'))
        calls = [('EXECUTE load_at (%s, %s)', PARAMETERS['load_at']),
                 ('EXECUTE load_many (%s, %s, %s, %s)', PARAMETERS['load_many'])]
        for statement, parameters in 10 * calls:        # from the sixth time on it is one plan for all parameters
            self.ask(statement, parameters(self.site))
        self.ask('SET session_replication_role = replica')
        columns, values = (
            ('prev_tid, md5, ', f"0, '{'0' * 32}', ") if self.keep_history else ('refs_tid, ', f'{IMPORT}, '))
        self.ask(f'INSERT INTO object_state (zoid, tid, {columns} state_size, state, refs) '
                 f'SELECT n, {IMPORT}, {values} 100, {STATE} FROM numbers(1000, 20000)')
        for statement, parameters in calls:
            self.assertLess(self.cost(statement, parameters(self.site)), 200)

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
        self.site = site(objects, self.keep_history, self.list)
        self.site.epoch = self.epoch

    def test_all_revisions_are_read_once(self):
        """Once, however many pages they are fetched in, and whether references were found out or not."""
        self.fill(20_000)
        for _ in range(2):
            [[size]] = self.ask("SELECT sum(pg_relation_size(oid)) / current_setting('block_size')::integer "
                                "FROM pg_class WHERE relname IN ('object_state', 'relstore_refs')")
            for name in 'open_revisions', 'open_revisions_only':
                with self.subTest(name):
                    _, cursor = parts(getattr(self.sql, name))
                    _, _, query = cursor.partition(' FOR\n')
                    self.assertLess(self.cost(query, (), scan_allowed=True), size + self.slack)
            self.analyze()

    def measure(self):
        work = {}
        # Vote has said how the plans of finish are made.
        vote = parts(self.sql.vote)[1].replace('?', '%s'), PARAMETERS['vote'](self.site)
        for name, statement, parameters in self.statements():
            if parameters is not None and name not in ('revisions', 'revisions_only'):     # read through a cursor here
                with self.subTest(name):
                    work[name] = self.cost(statement, parameters, name in SCANS, [vote] if name == 'finish' else ())
        with self.subTest('staged'):
            finish = parts(self.sql.finish)[0], (VOTED, '1000', None, False, b'', b'', None, True, *[None] * 9)
            self.cost(*finish, before=[vote, (self.sql.stage, self.site.arrays)])
        return work

    def cost(self, *arguments, **more):
        """Run a statement and roll back; return how many pages it read, in functions too.

        The less of two times: what others do (an autovacuum of the catalogue again) may have made this session forget
        what it knew of the catalogue, and it reads that again.
        """
        return min(self._cost(*arguments, **more) for _ in range(2))

    def _cost(self, statement, parameters, scan_allowed=False, before=()):
        statement = statement.replace('?', '%s')
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
    parameters = PARAMETERS | {'vote': lambda s: (s.last, s.oids)}
    placeholder = '?'
    slack = 60      # instructions of SQLite's machine

    def setUp(self):
        super().setUp()
        adapter = self.adapter()
        storage = relstore.RelStore(adapter, keep_history=self.keep_history)
        self.addCleanup(storage.close)
        self.sql, self.list, self.after = adapter.sql, adapter.oid_list, adapter.after
        # SQLite 3.40 compares no row with an index that ends in the primary key: 50 ms for a million objects.
        self.skips_in_index = not self.keep_history
        self.connection = sqlite3.connect(adapter.path, isolation_level=None)
        self.addCleanup(self.connection.close)
        self.ask('CREATE TEMPORARY TABLE new_oid (zoid INTEGER PRIMARY KEY)')    # is in a file of RelStorage's
        self.site = site(1000, self.keep_history, self.list)

    def test_every_statement_is_understood(self):
        for name, statement, _ in self.statements():
            with self.subTest(name):
                self.connection.execute(f'EXPLAIN {statement}', [None] * statement.count('?'))

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
        plan = self.connection.execute(f'EXPLAIN QUERY PLAN {statement}', [None] * statement.count('?')).fetchall()
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
        self.site = site(objects, self.keep_history, self.list)

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
        self.sql, self.after = storage._adapter.sql, storage._adapter.after
        self.connection = self.layer.server.connect(self._database(name))
        self.addCleanup(self.connection.close)
        self.site = site(1000, self.keep_history, tuple)
        self.ask("SET sql_mode = 'STRICT_ALL_TABLES,ANSI_QUOTES', foreign_key_checks = 0")
        self.ask('INSERT IGNORE INTO relstore_commit (session, vote, tid, voted) VALUES (3, 4, 0, UTC_TIMESTAMP())')
        for statement in parts(self.sql.begin_stage):
            self.ask(statement)

    def ask(self, sql, parameters=None):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall()

    def analyze(self):
        self.ask('ANALYZE TABLE ' + ', '.join(f'"{table}"' for table in self.growing))

    def statements(self):
        for name, text in self.sql:
            parameters = ()
            if '?' in text and name not in NOT_RUN_ON_MYSQL:
                how = PARAMETERS_OF_MYSQL.get(name) or PARAMETERS.get(name)
                self.assertIsNotNone(how, f'how is {name} called?')
                parameters = how(self.site)
                self.assertEqual(len(parameters), text.count('?'), text)
            for statement in parts(text):
                count = statement.count('?')
                yield name, statement, parameters[:count]
                parameters = parameters[count:]

    def test_every_statement_is_understood(self):
        self.ask('SET @relstore_tid = %s, @relstore_first = 1', (self.site.last + 10,))
        for name, statements in itertools.groupby(self.statements(), key=lambda found: found[0]):
            if name not in NOT_RUN_ON_MYSQL:
                with self.subTest(name):
                    self.ask('SET autocommit = 0')      # some statements are for the middle of a transaction
                    for _, statement, parameters in statements:
                        self.ask(statement.replace('%', '%%').replace('?', '%s'), parameters)
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
        self.site = site(objects, self.keep_history, tuple)

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
            self.ask(statement.replace('%', '%%').replace('?', '%s'), parameters)
            return sum(int(value) for _, value in self.ask("SHOW SESSION STATUS LIKE 'Handler_read%'"))
        finally:
            self.ask('ROLLBACK')


cases(globals(), OnMySQL, backends=MYSQL[:2] + MYSQL[4:])
cases(globals(), OnPostgreSQL, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
cases(globals(), OnSQLite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Suite, OnPostgreSQL, OnSQLite, OnMySQL
