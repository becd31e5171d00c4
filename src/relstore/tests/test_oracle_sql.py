"""What is written for Oracle is what Oracle reads, as far as two parsers and a list of what it refuses can tell."""
import unittest

from relstore.tests.support import h2, plsql
from relstore.tests.support.oracle_sql import (
    druid,
    parsed,
    plain_statements,
    problems,
    statements,
)
from relstore.tests.support.servers import cannot_run

BOTH = True, False

# What Druid 1.2 cannot read, and Oracle's manual says: name -> why.
NOT_FOR_DRUID = {
    'begin': 'SET TRANSACTION ISOLATION LEVEL, which it reads in a block, but not alone',
    'restart_oids': 'EXECUTE IMMEDIATE of an expression',
}


class Statements(unittest.TestCase):

    def each(self, found, check):
        """Call check(name, sql) for each statement; return how many there were."""
        count = 0
        for keep_history in BOTH:
            for name, sql in found(keep_history):
                with self.subTest(name, keep_history=keep_history):
                    check(name, sql)
                count += 1
        return count

    def test_one_parser_reads_all(self):
        self.assertGreater(self.each(plain_statements, lambda name, sql: parsed(sql)), 300)

    def test_nothing_that_oracle_refuses(self):
        self.each(plain_statements, lambda name, sql: self.assertEqual(list(problems(sql)), [], sql))

    def test_another_parser_reads_all(self):
        """Blocks whole."""
        reason = h2.unavailable('druid')
        if reason:
            cannot_run(self, reason)
        h2.start()
        self.each(statements, lambda name, sql: name in NOT_FOR_DRUID or druid(sql))

    def test_blocks_are_all_understood(self):
        """Each ends, and has as many IFs as ENDs."""
        def check(name, sql):
            if sql.startswith(('BEGIN', 'DECLARE')):
                self.assertTrue(plsql.is_block(sql), sql)
                found = list(plsql.lines(sql))
                self.assertEqual(sum(line.startswith('IF ') for line in found), found.count('END IF'))
        self.each(statements, check)


class WhatIsWrongIsNoticed(unittest.TestCase):

    def test_by_the_list(self):
        many = ', '.join(map(str, range(1001)))
        for sql in (
                'SELECT zoid FROM object_state LIMIT 1', 'SELECT 1', "SELECT 'a' AS b",
                'INSERT INTO t (a) VALUES (1), (2)', 'INSERT INTO t (a) VALUES (1) ON CONFLICT DO NOTHING',
                'SELECT o.zoid FROM object_state AS o',
                'SELECT o.zoid FROM (SELECT 1 AS zoid FROM dual) AS o WHERE 1 = 1',
                f'SELECT zoid FROM object_state WHERE zoid IN ({many})', 'SELECT state IS NULL FROM object_state',
                'CREATE TABLE t (a BOOLEAN)', 'CREATE TABLE a_name_of_more_than_thirty_letters (a NUMBER(1))',
                'SELECT zoid FROM t WHERE (zoid, tid) > (1, 2)', 'SELECT size FROM relstore_blob',
                'SELECT NULL, NULL FROM t FETCH FIRST 1 ROWS ONLY',
                'SELECT a FROM t FETCH FIRST 1 ROWS ONLY FOR UPDATE',
                'SELECT 1 FROM dual;', 'CREATE TABLE IF NOT EXISTS t (a NUMBER(1))'):
            with self.subTest(sql[:80]):
                self.assertNotEqual(list(problems(sql)), [])

    def test_by_a_parser(self):
        for sql in 'SELECT FROM WHERE', 'SELECT (1 FROM dual', 'MERGE INTO t USING':
            with self.subTest(sql), self.assertRaises(ValueError):
                parsed(sql)

    def test_by_the_other(self):
        reason = h2.unavailable('druid')
        if reason:
            cannot_run(self, reason)
        h2.start()
        for sql in 'SELECT a FROM', 'BEGIN\nUPDATE t SET;\nEND;', 'LOCK TABLE t IN MODE':
            with self.subTest(sql), self.assertRaises(ValueError):
                druid(sql)


class Blocks(unittest.TestCase):
    """The interpreter of the tests."""

    def run_block(self, block, *values):
        ran = []

        def execute(sql, parameters):
            ran.append((sql, list(parameters)))
            return [(1,)], 7
        interpreter = plsql.Interpreter(execute, ran.append)
        interpreter.run(block, values)
        return interpreter, ran

    def test_conditions(self):
        block = 'BEGIN\nIF :p1 = 1 THEN\nDELETE FROM a;\nELSE\nDELETE FROM b;\nEND IF;\nEND;'
        _, ran = self.run_block(block, 1)
        self.assertEqual(ran, [('SELECT CASE WHEN ? = 1 THEN 1 ELSE 0 END FROM dual', [1]), ('DELETE FROM a', [])])

    def test_variables(self):
        block = ('DECLARE\nnew_tid NUMBER(20);\nBEGIN\nSELECT a\nINTO new_tid FROM t WHERE b = :p10;\n'
                 'UPDATE t SET a = new_tid,\n    b = :p1;\n:told := SQL%ROWCOUNT;\nEND;')
        interpreter, ran = self.run_block(block, *range(10))
        self.assertEqual(ran, [('SELECT a FROM t WHERE b = ?', [9]), ('UPDATE t SET a = ?,\n    b = ?', [1, 0]),
                               ('SELECT ? FROM dual', [7])])
        self.assertEqual(interpreter.told, '1')

    def test_one_that_does_not_end(self):
        with self.assertRaises(ValueError):
            list(plsql.lines('BEGIN\nDELETE FROM a\nEND;'))
