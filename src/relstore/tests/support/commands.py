"""For tests of commands: run one, and a file that names the databases of a test."""
import contextlib
import io
import os
import sys
import tempfile
import unittest
from contextlib import closing
from pathlib import Path

from persistent.mapping import PersistentMapping
from ZODB.DB import DB

import relstore
from relstore.tests.support.backends import (
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    PyMySQLHistoryFree,
    PyMySQLHistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
)

# For what a command has to do with.
BACKENDS = (SQLiteHistoryPreserving, SQLiteHistoryFree, Psycopg2HistoryPreserving, Psycopg2HistoryFree,
            PyMySQLHistoryPreserving, PyMySQLHistoryFree)


class Commands(unittest.TestCase):
    """Mixed with a backend: `self.config()` is the path of a file that names its database `main`."""

    tested: tuple = ()      # the main function of a command, and what comes before its arguments

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.here = Path(directory.name)

    def command(self, main, *argv):
        """Run a command in this process; return its exit status and what it wrote to stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(argument) for argument in argv])
        return status, out.getvalue(), err.getvalue()

    def told(self, *argv):
        """Run the command that is tested; return its exit status and what it wrote to stdout and stderr."""
        return self.command(*self.tested, *argv)

    def works(self, *argv):
        """Run the command that is tested; return what it says."""
        status, out, err = self.told(*argv)
        self.assertEqual((status, err), (0, ''), out)
        self.assertTrue(out.isascii(), out)
        return out

    def config(self, *lines, name='main'):
        return self.write(f'{name}.conf', '%import relstore', self.section(*lines, name=name))

    def write(self, filename, *lines):
        path = self.here / filename
        path.write_text('\n'.join(lines) + '\n')
        return path

    def section(self, *lines, name='main', of='relstore'):
        """Return a section of this test's database, with more options."""
        address = self.address(name)
        if isinstance(address, relstore.SQLite):
            keys = 'sqlite3', {'data-dir': address.data_dir}
        elif isinstance(address, relstore.PostgreSQL):
            keys = 'postgresql', self.arguments(name)
        else:
            keys = 'mysql', self.arguments(name) | {'driver': self.driver}
        kind, values = keys
        return '\n'.join([f'<{of}>', f'keep-history {str(self.keep_history).lower()}', *lines, f'<{kind}>',
                          *(f'{key} {value}' for key, value in values.items()), f'</{kind}>', f'</{of}>'])

    def fill(self):
        """Store what a pack has to do with; return (oids that stay, oids that are unreachable)."""
        with closing(DB(self.open_storage())) as db:
            with db.transaction() as connection:
                root = connection.root()
                root['list'] = PersistentMapping({n: PersistentMapping(number=n) for n in range(10)})
                root['gone'] = PersistentMapping({n: PersistentMapping(text='x' * n) for n in range(5)})
                connection.add(root['list'])
                connection.add(root['gone'])
            with db.transaction() as connection:
                gone = connection.root().pop('gone')
                kept = connection.root()['list']
                stay = [0] + oids(kept)
                go = oids(gone)
            for number in range(3):
                with db.transaction() as connection:
                    connection.root()['list'][0]['number'] = 100 + number
        return stay, go


def oids(folder):
    """Return the oids of a mapping and of those in it."""
    return sorted(int.from_bytes(thing._p_oid, 'big') for thing in (folder, *folder.values()))


def environment():
    """For a child process that imports what we can import."""
    return os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
