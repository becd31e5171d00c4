"""The databases of the tests: each test finds its own as if nobody had used it."""
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from ZODB.utils import p64, z64

from relstore.tests.support.backends import (
    HISTORY_FREE,
    HISTORY_PRESERVING,
    PGBOUNCER,
    MySQLBackend,
    ServerBackend,
    cases,
)
from relstore.tests.support.commits import commit
from relstore.tests.support.records import record

# Which tables have nothing that a test can see the next time: an epoch is made by whoever opens it, and outcomes of
# commits are looked up by names that are never used again.
APART = {'relstore_epoch', 'relstore_commit'}


class Emptied(TestCase):

    def setUp(self):
        super().setUp()
        self.zapped = 0
        zap_all = self._emptying._zap_all

        def counted(*arguments):
            self.zapped += 1
            return zap_all(*arguments)

        self._emptying._zap_all = counted
        self.addCleanup(self._emptying.__dict__.pop, '_zap_all')
        self._use()
        self._begin_anew()
        self._use()

    def _begin_anew(self):
        """As the next test does."""
        self._emptied.clear()
        self.address()

    def _use(self):
        with closing(self.open_storage()) as storage:
            for _ in range(3):
                commit(storage, (storage.new_oid(), z64, record({'state': b'x' * 5000})))
            storage.database.adapter.writers.set('any')

    def _rows(self):
        """Return all rows of all tables but for APART."""
        with closing(self.new_watch()) as watch:
            schema, quoted = ('DATABASE()', '`{}`') if isinstance(self, MySQLBackend) else ("'public'", '"{}"')
            tables = {name for name, in watch.rows('SELECT table_name FROM information_schema.tables '
                                                   f"WHERE table_type = 'BASE TABLE' AND table_schema = {schema}")}
            return {name: sorted(map(_row, watch.rows(f'SELECT * FROM {quoted.format(name)}')))
                    for name in tables - APART}

    def test_as_zap_all_leaves_it(self):
        self.zapped = 0
        self._begin_anew()
        self.assertEqual(0, self.zapped)
        found, number = self._rows(), self._sweeps()
        with closing(self.open_storage()) as storage:
            self.assertEqual(p64(1), storage.new_oid())
            storage.zap_all()
            storage.database.adapter.writers.set('relstore')
        wanted = self._rows()
        for rows in found, wanted:
            rows['relstore_sweep'] = None
            rows['relstore_meta'] = [item for item in rows['relstore_meta'] if 'whole' not in item]
        self.assertEqual(wanted, found)
        self.assertLess(number, self._sweeps())
        self.assertEqual(str(self._sweeps()), self._meta('whole'))

    def test_whole(self):
        self._begin_anew()
        self.assertEqual(str(self._sweeps()), self._meta('whole'))

    def test_other_tables_are_noticed(self):
        for sql in ('CREATE TABLE others (n INT)', 'DROP TABLE others', 'ALTER TABLE pack_object ADD COLUMN n INT',
                    'CREATE INDEX ours ON pack_object (n)', 'ALTER TABLE pack_object DROP COLUMN n'):
            with self.subTest(sql), closing(self.new_watch()) as watch:
                watch.rows(sql)
                self.zapped = 0
                self._begin_anew()
                self.assertEqual(1, self.zapped)

    def test_what_is_missing_comes_back(self):
        with closing(self.new_watch()) as watch:
            watch.rows('DROP TABLE relstore_refs')
        self._begin_anew()
        with closing(self.new_watch()) as watch:
            self.assertEqual([], watch.rows('SELECT * FROM relstore_refs'))

    def test_replaced_twice(self):
        """Where one cannot be emptied each test gets a new one."""
        names = {self._database('main')}
        with patch.object(type(self), '_empty', return_value=False):
            for _ in range(2):
                self._begin_anew()
                names.add(self._database('main'))
        self.assertEqual(3, len(names))

    def _sweeps(self):
        with closing(self.new_watch()) as watch:
            return watch.one('SELECT number FROM relstore_sweep')

    def _meta(self, name):
        with closing(self.new_watch()) as watch:
            return watch.one('SELECT value FROM relstore_meta WHERE name = %s', name)


def _row(row):
    return repr([bytes(value) if isinstance(value, memoryview) else value for value in row])


cases(globals(), Emptied, backends=tuple(
    backend for backend in HISTORY_PRESERVING + HISTORY_FREE + PGBOUNCER[:1] if issubclass(backend, ServerBackend)))
del Emptied
