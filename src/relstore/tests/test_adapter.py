"""What a new database has to write is listed in the docstring of Adapter: the lists are true, and leave nothing out."""
import ast
import inspect
import textwrap
import unittest
from contextlib import closing

from ZODB.utils import z64

import relstore
from relstore.adapters.base import Adapter
from relstore.adapters.mysql import MySQLAdapter
from relstore.adapters.oracle import OracleAdapter
from relstore.adapters.packlock import PackLock
from relstore.adapters.postgresql import PostgreSQLAdapter
from relstore.adapters.sqlite import SQLiteAdapter
from relstore.errors import ConfigurationError
from relstore.tests.support.backends import cases
from relstore.tests.support.commits import commit
from relstore.tests.support.records import state

DATABASES = PostgreSQLAdapter, MySQLAdapter, OracleAdapter, SQLiteAdapter
# Called only where another one is overridden.
WITH_ANOTHER = {'send_again'}


def listed(what: str) -> list[str]:
    """Return the names after a heading in the docstring of Adapter, up to the next empty line."""
    text = inspect.getdoc(Adapter).partition(f'\n{what}:')[2].partition('\n\n')[0]
    return [name for name in text.replace(',', ' ').split() if name]


def methods() -> dict[str, ast.FunctionDef]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(Adapter))).body
    return {item.name: item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name != '__init__'}


def facts() -> set[str]:
    return {name for name, value in vars(Adapter).items() if not name.startswith('_') and not callable(value)}


def is_abstract(method: ast.FunctionDef) -> bool:
    return 'raise NotImplementedError' in map(ast.unparse, method.body)


class Lists(unittest.TestCase):

    def test_to_be_written(self):
        """By each database; there is nothing in Adapter."""
        abstract = {name for name, method in methods().items() if is_abstract(method)}
        self.assertEqual(set(listed('It writes')), abstract)
        for database in DATABASES:
            self.assertEqual(abstract - vars(database).keys() - WITH_ANOTHER, set(), database)

    def test_to_be_overridden_where_it_differs(self):
        overridden = {name for name, method in methods().items()
                      if not is_abstract(method) and any(name in vars(database) for database in DATABASES)}
        self.assertEqual(set(listed('It may override')), overridden)

    def test_inherited(self):
        self.assertEqual(set(listed('It inherits')),
                         methods().keys() - set(listed('It writes')) - set(listed('It may override')))

    def test_facts(self):
        """Those that each database says, and those that it says where they are not what is usual."""
        said = {name for name in facts() if all(name in vars(database) for database in DATABASES)}
        self.assertEqual(set(listed('It says')), said)
        self.assertEqual(set(listed('It may say')), facts() - said)

    def test_nothing_is_listed_twice(self):
        for what in 'It writes', 'It may override', 'It inherits', 'It says', 'It may say':
            names = listed(what)
            self.assertTrue(names)
            self.assertEqual(sorted(set(names)), sorted(names), what)

    def test_each_has_a_lock_of_packs(self):
        for address in relstore.PostgreSQL(''), relstore.MySQL(''), relstore.Oracle('', '', ''), relstore.SQLite('.'):
            lock = address.unseen(keep_history=True).pack_lock
            self.assertIsNot(type(lock).take, PackLock.take, lock)


class OneAddress(unittest.TestCase):
    """It serves several storages, each with options of its own."""

    def test_beside_one_that_only_reads(self):
        address = self.address()
        with closing(relstore.RelStore(address, keep_history=self.keep_history)) as writer, \
                closing(relstore.RelStore(address, keep_history=self.keep_history, read_only=True)) as reader:
            writer.database.pool.retire()       # the next session is a new one
            oid = writer.new_oid()
            tid = commit(writer, (oid, z64, state(1)))
            self.assertEqual(reader.load(oid), (state(1), tid))
            self.assertTrue(reader.isReadOnly() and reader.database.adapter.read_only)
            self.assertFalse(writer.database.adapter.read_only)

    def test_in_the_other_history_mode(self):
        """It is refused; the one that is open goes on."""
        address = self.address()
        with closing(relstore.RelStore(address, keep_history=self.keep_history)) as storage:
            with self.assertRaisesRegex(ConfigurationError, 'set keep-history'):
                relstore.RelStore(address, keep_history=not self.keep_history)
            tid = commit(storage, (z64, z64, state(1)))
            self.assertEqual(storage.load(z64), (state(1), tid))


cases(globals(), OneAddress)
del OneAddress
