"""Databases that refer to each other: zc.zodbdgc collects the garbage of all, and packs remove what it has deleted."""
import contextlib
import importlib.util
import sqlite3
from contextlib import closing

import ZODB.config
from persistent.mapping import PersistentMapping
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64

from relstore.cli.zodbpack import main
from relstore.tests.support.backends import SQLiteHistoryFree, SQLiteHistoryPreserving, cases
from relstore.tests.support.commands import Commands
from relstore.tests.support.servers import cannot_run


class Collection(Commands):

    def setUp(self):
        if importlib.util.find_spec('zc.zodbdgc') is None:
            cannot_run(self, 'zc.zodbdgc is not installed')
        super().setUp()
        self.conf = self.write('both.conf', '%import relstore', *(
            f'<zodb {name}>\n{self.section("pack-gc false", name=name)}\n</zodb>' for name in ('one', 'two')))
        for name in 'one', 'two':
            self.open_storage(name).close()
        with self.databases() as one, one.transaction() as connection:
            root, other = connection.root(), connection.get_connection('two')
            shared, unreachable = PersistentMapping(), PersistentMapping()
            other.add(shared)
            other.root()['unreachable'] = unreachable
            other.root()['back'] = back = PersistentMapping()
            connection.add(back)
            back['in one'] = inside = PersistentMapping()
            root['shared'] = shared
            root['gone'] = gone = PersistentMapping()
            connection.add(gone)
            other.add(unreachable)
        with self.databases() as one, one.transaction() as connection:
            del connection.root()['gone']
            del connection.get_connection('two').root()['unreachable']
        self.stay = [('two', shared), ('one', back), ('one', inside)]
        self.go = [('one', gone), ('two', unreachable)]
        self.stay, self.go = [[(name, u64(thing._p_oid)) for name, thing in things] for things in (self.stay, self.go)]

    @contextlib.contextmanager
    def databases(self):
        with open(self.conf) as file:
            one = ZODB.config.databaseFromFile(file)
        try:
            yield one
        finally:
            for db in one.databases.values():
                db.close()

    def there(self):
        """Return the objects that can be loaded."""
        found = []
        for name, oid in self.stay + self.go:
            with closing(self.open_storage(name)) as storage, contextlib.suppress(POSKeyError):
                storage.load(p64(oid))
                found.append((name, oid))
        return found

    def rows(self, name, oid):
        with closing(sqlite3.connect(self.address(name).path)) as connection:
            return connection.execute('SELECT count(*) FROM object_state WHERE zoid = ?', (oid,)).fetchone()[0]

    def collect(self):
        from zc.zodbdgc import gc
        # The time would be that of the last full second.
        return gc(str(self.conf), days=0, ptid=p64(2 ** 63 - 1), return_bad=True)

    def test_garbage_of_all(self):
        self.assertEqual(self.command(main, '--days', '0', self.conf)[0], 0)
        self.assertEqual(self.there(), self.stay + self.go)
        self.assertEqual(self.collect(), self.go)
        self.assertEqual(self.there(), self.stay)
        self.assertGreater(sum(self.rows(*gone) for gone in self.go), 0)
        with self.databases() as one, one.transaction() as connection:      # the newest transaction always stays
            connection.root()['more'] = connection.get_connection('two').root()['more'] = 1
        status, out, err = self.command(main, '--days', '0', self.conf)
        self.assertEqual((status, err), (0, ''))
        self.assertEqual(self.there(), self.stay)
        self.assertEqual([self.rows(*gone) for gone in self.go], [0, 0], out)
        self.assertEqual(self.collect(), [])


cases(globals(), Collection, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Collection
