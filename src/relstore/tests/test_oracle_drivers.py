"""The drivers for Oracle: what they raise, what is made of it, and what they are given and give back.

Errors are raised by oracledb itself, which talks to a listener of ours. Values are converted for a connection that is
none: no server can be had.
"""
import os
import socket
import unittest
from types import SimpleNamespace

import oracledb

import relstore
from relstore.errors import (
    ConfigurationError,
    DatabaseError,
    Deadlock,
    Disconnected,
    LockTimeout,
    Missing,
    NotAllowed,
    Unavailable,
)
from relstore.sessions import oracle_drivers
from relstore.sessions.drivers import find_driver
from relstore.sessions.session import Session
from relstore.sessions.statement import Statement
from relstore.tests.support.layers import Processes
from relstore.tests.support.tns import Listener, acceptance, error, refusal

# What servers say: number -> (text, what is to be done).
SAID = {
    60: ('deadlock detected while waiting for resource', Deadlock),
    8177: ("can't serialize access for this transaction", Deadlock),
    54: ('resource busy and acquire with NOWAIT specified or timeout expired', LockTimeout),
    30006: ('resource busy; acquire with WAIT timeout expired', LockTimeout),
    1013: ('user requested cancel of current operation', Unavailable),
    1403: ('no data found', Unavailable),
    1555: ('snapshot too old: rollback segment number 3 with name "_SYSSMU3$" too small', Unavailable),
    18: ('maximum number of sessions exceeded', Unavailable),
    20: ('maximum number of processes (150) exceeded', Unavailable),
    3113: ('end-of-file on communication channel', Disconnected),
    28: ('your session has been killed', Disconnected),
    1033: ('ORACLE initialization or shutdown in progress', Disconnected),
    16000: ('database or pluggable database open for read-only access', Disconnected),
    1031: ('insufficient privileges', NotAllowed),
    942: ('table or view does not exist', Missing),
    1017: ('invalid username/password; logon denied', ConfigurationError),
    28000: ('The account is locked.', ConfigurationError),
    1045: ('user ZODB lacks CREATE SESSION privilege; logon denied', ConfigurationError),
    1653: ('unable to extend table ZODB.OBJECT_STATE by 128 in tablespace USERS', ConfigurationError),
    1691: ('unable to extend lob segment ZODB.SYS_LOB0000072925C00006$$ in tablespace USERS', ConfigurationError),
    1536: ("space quota exceeded for tablespace 'USERS'", ConfigurationError),
    1950: ("no privileges on tablespace 'USERS'", ConfigurationError),
    1: ('unique constraint (ZODB.OBJECT_STATE_PK) violated', DatabaseError),
    1400: ('cannot insert NULL into ("ZODB"."OBJECT_STATE"."TID")', DatabaseError),
}


class Errors(unittest.TestCase):
    layer = Processes

    def raised(self, *answers: bytes) -> Exception:
        """Return what a session raises when it is made, and a listener answers so."""
        with Listener(*answers) as listener:
            address = relstore.Oracle('zodb', 'secret', listener.dsn)
            try:
                address.session()
            except Exception as e:
                return e
        self.fail('nothing was raised')

    def test_what_servers_say(self):
        for number, (text, kind) in SAID.items():
            with self.subTest(number):
                found = self.raised(acceptance(), error(number, text))
                self.assertIs(type(found), kind)
                self.assertIsInstance(found.__cause__, oracledb.DatabaseError)
                self.assertIn(text.split(':')[0], str(found))
                self.assertNotIn('Help', str(found))

    def test_what_listeners_say(self):
        for number, kind, text in ((12514, ConfigurationError, 'Service "pdb" is not registered'),
                                   (12505, ConfigurationError, 'is not registered'),
                                   (12516, Unavailable, 'ORA-12516'), (12520, Unavailable, 'ORA-12520')):
            with self.subTest(number):
                found = self.raised(refusal(number))
                self.assertIs(type(found), kind)
                self.assertIn(text, str(found))

    def test_who_says_nothing_more(self):
        """Before the first answer, within it, after it, and within the second."""
        for answers in (b'',), (acceptance()[:5],), (acceptance(),), (acceptance(), error(60, 'deadlock')[:20]):
            with self.subTest(answers):
                self.assertIs(type(self.raised(*answers)), Disconnected)

    def test_where_nobody_listens(self):
        with socket.create_server(('127.0.0.1', 0)) as server:
            port = server.getsockname()[1]
        with self.assertRaises(Disconnected):
            relstore.Oracle('zodb', 'secret', f'127.0.0.1:{port}/pdb').session()

    def test_one_sentence_says_what_to_look_at(self):
        for answers, words in (
                ((refusal(12514),), 'Service "pdb" is not registered with the listener'),
                ((acceptance(), error(1017, SAID[1017][0])), 'invalid username/password'),
                ((acceptance(),), 'closed the connection')):
            with self.subTest(words), Listener(*answers) as listener:
                address = relstore.Oracle('zodb', 'secret', listener.dsn)
                with self.assertRaisesRegex(ConfigurationError, f'^Oracle cannot be reached at .*{words}.*; check that'
                                            ) as raised:
                    address.bind(keep_history=True)
                self.assertNotIn('secret', str(raised.exception))
                self.assertNotIn('\n', str(raised.exception))

    def test_what_a_dba_can_do_is_said(self):
        for number, words in ((1653, 'add a file to the tablespace'), (1691, 'add a file to the tablespace'),
                              (1536, 'raise its quota'), (1950, 'give it a quota')):
            self.assertIn(words, str(self.raised(acceptance(), error(number, SAID[number][0]))))

    def test_what_has_no_number(self):
        classify = oracle_drivers.DRIVERS[0].classify
        self.assertIs(classify(type('InterfaceError', (Exception,), {})('not connected')), Disconnected)
        self.assertIs(classify(type('DatabaseError', (Exception,), {})('whatever')), DatabaseError)
        self.assertIs(classify(oracledb.DatabaseError()), DatabaseError)


class Real:
    """Stands for a connection of the driver, and for its cursors."""

    def __init__(self):
        self.autocommit, self.calls, self.type_name = None, [], ''
        self.told, self.rows = '', []

    def cursor(self):
        return self

    def var(self, kind, *sizes, **options):
        return SimpleNamespace(kind=kind, getvalue=lambda: self.told if kind is oracledb.DB_TYPE_VARCHAR else self)

    def gettype(self, name):
        self.type_name = name
        return SimpleNamespace(newobject=lambda items: ('collection', items))

    def execute(self, sql, parameters=()):
        self.calls.append((sql, parameters, self.autocommit))

    def executemany(self, sql, rows):
        self.calls.append((sql, rows, self.autocommit))

    def setinputsizes(self, *kinds):
        self.calls.append(kinds)

    def fetchall(self):
        return self.rows

    def commit(self):
        self.calls.append('commit')

    def rollback(self):
        self.calls.append('rollback')

    def close(self):
        pass


class Conversions(unittest.TestCase):

    def setUp(self):
        self.real = Real()
        self.connection = oracle_drivers.Connection(oracledb, self.real)

    def run_all(self, *statements):
        for sql in statements:
            self.connection.cursor().execute(sql)

    def test_statements_are_committed_unless_a_transaction_has_begun(self):
        self.run_all('UPDATE a', 'SET TRANSACTION ISOLATION LEVEL READ COMMITTED', 'UPDATE b', 'COMMIT', 'UPDATE c',
                     'SET TRANSACTION READ ONLY', 'SELECT d', 'ROLLBACK', 'UPDATE e')
        calls = [call if call.__class__ is str else (call[0].split()[-1], call[2]) for call in self.real.calls]
        self.assertEqual(calls, [
            ('a', True), ('COMMITTED', False), ('b', False), 'commit', ('c', True), ('ONLY', False), ('d', False),
            'rollback', ('e', True)])

    def test_blocks_that_begin_and_those_that_end(self):
        begins = 'BEGIN\nSET TRANSACTION READ ONLY;\nEND;'
        ends = 'BEGIN\nUPDATE a;\nCOMMIT WRITE IMMEDIATE WAIT;\nEND;'
        self.connection.script(begins, ())
        self.assertTrue(self.connection.in_transaction)
        self.connection.script(ends, ())
        self.assertFalse(self.connection.in_transaction)
        self.assertTrue(self.real.autocommit)

    def test_each_block_of_ours_that_begins_or_ends_is_noticed(self):
        for keep_history in True, False:
            sql = relstore.Oracle('', '', '').unseen(keep_history).sql
            for name, begins, ends in (('vote', True, False), ('finish', False, True), ('finish_copies', False, True),
                                       ('sweep', True, True), ('zap', True, True), ('lock_votes', True, False),
                                       ('make_durable', False, True), ('choose_tid', False, False),
                                       ('poll', not keep_history, False), ('set_meta', False, False)):
                with self.subTest(name, keep_history=keep_history):
                    self.connection.ended()
                    self.connection.begins(getattr(sql, name))
                    self.assertEqual(self.connection.in_transaction, begins)
                    self.connection.begins('SET TRANSACTION')
                    self.connection.sent(getattr(sql, name))
                    self.assertEqual(self.connection.in_transaction, not ends)

    def test_what_a_block_tells(self):
        self.real.told, self.real.rows = '1 epoch.2  7', [(1, 2)]
        block = 'BEGIN\n:told := :p1;\nOPEN :rows FOR SELECT 1 FROM dual;\nEND;'
        self.assertEqual(self.connection.script(block, (5,)), [[('1', 'epoch.2', '', '7')], [(1, 2)]])
        [(_, binds, _)] = self.real.calls
        self.assertEqual((binds['p1'], sorted(binds)), (5, ['p1', 'rows', 'told']))

    def test_rows_are_not_fetched_if_there_are_none(self):
        """That would be another message."""
        self.real.told, self.real.rows = '0 epoch', [(1, 2)]
        block = 'BEGIN\n:told := 1;\nOPEN :rows FOR SELECT 1 FROM dual;\nEND;'
        self.assertEqual(self.connection.script(block, ()), [[('0', 'epoch')], []])

    def test_lists_and_truth_values(self):
        self.connection.cursor().execute('SELECT :p1', [[1, 2 ** 62], True, False, None, b'x'])
        [(_, parameters, _)] = self.real.calls
        self.assertEqual(parameters, [('collection', ['1', str(2 ** 62)]), 1, 0, None, b'x'])
        self.assertIs(type(parameters[1]), int)
        self.assertEqual(self.real.type_name, oracle_drivers.LIST_TYPE)

    def test_many_rows_are_one_message_with_their_types(self):
        """The first value may be NULL, which has none; and a large object is sent as bytes, not by a locator."""
        sql = Statement('INSERT $oid, $md5, $data_tid, $state, $oid', ('oid', 'state', 'md5', 'data_tid'), ':')
        session = Session.__new__(Session)
        session._cursor, session.pid = self.connection.cursor, os.getpid()
        session._errors = oracledb.Error
        session.many(sql, [(1, None, None, None), (2, b'state', 'md5', 3)])
        kinds, (_, rows, _) = self.real.calls
        self.assertEqual(kinds, (None, oracledb.DB_TYPE_VARCHAR, oracledb.DB_TYPE_NUMBER, oracledb.DB_TYPE_LONG_RAW,
                                 None))
        self.assertEqual(rows, [[1, None, None, None, 1], [2, 'md5', 3, b'state', 2]])

    def test_no_rows_are_no_message(self):
        self.connection.cursor().executemany('INSERT', [])
        self.assertEqual(self.real.calls, [])

    def test_what_columns_come_as(self):
        made = []

        def var(kind, size=0, arraysize=0, outconverter=None):
            made.append((kind, outconverter))
        cursor = SimpleNamespace(var=var, arraysize=10)
        for name, kind in (('STATE', oracledb.DB_TYPE_BLOB), ('REFS', oracledb.DB_TYPE_BLOB),
                           ('TID', oracledb.DB_TYPE_NUMBER), ('MD5', oracledb.DB_TYPE_CHAR)):
            oracle_drivers._fetched(oracledb, cursor, name, kind)
        self.assertEqual([kind for kind, _ in made],
                         [oracledb.DB_TYPE_LONG_RAW, oracledb.DB_TYPE_LONG_RAW, oracledb.DB_TYPE_VARCHAR])
        (_, plain), (_, refs), (_, number) = made
        self.assertIsNone(plain)
        self.assertEqual([refs(b'\0'), refs(b'12345678'), refs(None)], [b'', b'12345678', None])
        self.assertEqual(number(str(2 ** 63 - 1)), 2 ** 63 - 1)
        with self.assertRaises(ValueError):
            number('1.5')

    def test_drivers(self):
        self.assertEqual(find_driver('oracledb', 'oracledb', 'cx_Oracle').package, 'relstore[oracle]')
        with self.assertRaisesRegex(ConfigurationError, 'oracledb, cx_Oracle'):
            relstore.Oracle('u', 'p', 'd', driver='oracle')
