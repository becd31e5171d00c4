"""zodbpack as its user runs it: what it removes, what it tells, and how it fails."""
import contextlib
import importlib.util
import io
import os
import pty
import re
import sqlite3
import subprocess
import sys
import time
import unittest
from contextlib import closing
from unittest import mock

from persistent.mapping import PersistentMapping
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.POSException import POSKeyError, StorageError
from ZODB.tests.hexstorage import HexStorage
from ZODB.utils import p64, u64

from relstore.cli import broken, databases, progress, zodbpack
from relstore.cli.main import main as relstore_main
from relstore.cli.zodbpack import main
from relstore.errors import ConfigurationError
from relstore.packing.report import Report
from relstore.tests.support.backends import SQLiteHistoryPreserving, cases
from relstore.tests.support.commands import BACKENDS, Commands, environment, oids
from relstore.tests.support.servers import cannot_run

TID = re.compile(r'tid 0x[0-9a-f]{15,16}')


class Zodbpack(Commands):
    tested = main,

    def refused(self, *argv):
        """Run it; return the one line in which it says why it could not be done."""
        status, _, err = self.told(*argv)
        self.assertEqual(status, 2)
        [line] = err.splitlines()
        self.assertTrue(line.startswith('zodbpack: '), line)
        return line[len('zodbpack: '):]

    def there(self, oids):
        """Return those of some objects that can be loaded."""
        with closing(self.open_storage()) as storage:
            return [oid for oid in oids if self._is_there(storage, oid)]

    def _is_there(self, storage, oid):
        try:
            storage.load(p64(oid))
        except POSKeyError:
            return False
        return True

    def rows(self):
        """Return what is in the tables that a pack writes or empties."""
        with closing(self.open_storage()) as storage, storage.database.pool.session() as session:
            tables = ['object_state', 'relstore_refs', 'relstore_garbage', 'relstore_pack', 'relstore_sweep']
            return {table: sorted(session.all(f'SELECT * FROM {table}'), key=repr) for table in tables}


class Packs(Zodbpack):
    """On every database."""

    def test_to_now(self):
        stay, go = self.fill()
        before = len(self.rows()['object_state'])
        out = self.works('--days', '0', self.config())
        self.assertEqual(self.there(stay + go), stay)
        removed = before - len(self.rows()['object_state'])
        self.assertEqual(removed, 6 + 5 * self.keep_history)
        self.assertIn(f'Removed: {removed} states, ', out)
        self.assertIn(f'They were of 6 objects that go as a whole, and {2 * self.keep_history} objects that lose', out)
        self.assertRegex(out, r'Nobody could vote for [\d.]+ m?s in all, [\d.]+ m?s at most\. (1 step|\d+ steps), ')
        self.assertRegex(out, r'On disk: [\d.,]+ [kMG]B before, [\d.,]+ [kMG]B now\. .*(VACUUM|OPTIMIZE TABLE)')
        self.assertRegex(out, r'Time: reading .*, removing ')

    def test_what_was_there_a_day_ago_stays(self):
        stay, go = self.fill()
        before = self.rows()['object_state']
        out = self.works(self.config())
        self.assertEqual(self.rows()['object_state'], before)
        self.assertIn('Removed: 0 states', out)
        told = ('6 objects are unreachable, but nobody knows for how long: with --days 1 they can be removed 1 day '
                'from now, with --days 0 at once.')
        self.assertEqual(told in out, not self.keep_history, out)

    def test_a_day_later(self):
        """Or an hour less: what runs every night does not run every 24 hours to the second."""
        stay, go = self.fill()
        self.works(self.config())
        now = time.time()
        for hours in 12, 22.9:
            with mock.patch.object(time, 'time', lambda hours=hours: now + 3600 * hours):
                self.works(self.config())
            self.assertEqual(self.there(stay + go), stay + go)
        with mock.patch.object(time, 'time', lambda: now + 3600 * (24 if self.keep_history else 23.1)):
            self.works(self.config())
        self.assertEqual(self.there(stay + go), stay)

    def test_dry_run_changes_nothing_and_tells_what_a_pack_does(self):
        stay, go = self.fill()
        config, listed = self.config(), self.here / 'list'
        before = self.rows()
        out = self.works('--days', '0', '--dry-run', '--list', listed, config)
        self.assertEqual(self.rows(), before)
        would = re.search(r'Would go: (\d+ states, [\d.]+ k?B(?:ytes)?|\d+ states, \d+ bytes)\.', out)[1]
        [line] = [line for line in out.splitlines() if 'PersistentMapping' in line]
        total, states, objects, name, *examples = line.split()
        self.assertEqual((objects, name), ('6', 'persistent.mapping.PersistentMapping'))
        self.assertLessEqual({int(oid, 16) for oid in examples}, {0, *stay, *go})
        self.assertEqual(len(examples), 5)
        first, *lines = listed.read_text().splitlines()
        self.assertRegex(first, '^# relstore (sqlite|postgresql|mysql)$')
        self.assertEqual([line for line in lines if line.endswith(' object')], [f'{oid:#x} object' for oid in go])
        older = [line for line in lines if re.fullmatch(r'0x[0-9a-f]+ revisions before 0x[0-9a-f]+', line)]
        self.assertEqual(len(older), 2 * self.keep_history)
        self.assertEqual(len(lines), len(go) + len(older))

        out = self.works('--days', '0', config)
        self.assertIn(f'Removed: {would}', out)
        left = sum(size for size, in self.sizes(before)) - sum(size for size, in self.sizes(self.rows()))
        self.assertEqual(int(total.replace(',', '')), left)
        self.assertEqual(int(states), len(before['object_state']) - len(self.rows()['object_state']))

    def sizes(self, rows):
        # The column state_size has another place in each mode.
        return [(row[4 if self.keep_history else 2],) for row in rows['object_state']]

    def test_prepared_and_then_removed(self):
        stay, go = self.fill()
        config = self.config()
        self.assertRegex(self.refused('--use-prepack-state', config),
                         r'^Nothing is prepared in .*; run a pre-pack first\.$')
        out = self.works('--days', '0', '--prepack', config)
        self.assertIn('Written down: 6 objects that go as a whole', out)
        self.assertEqual(self.there(stay + go), stay + go)
        out = self.works('--use-prepack-state', config)
        self.assertIn('They were of 6 objects', out)
        self.assertEqual(self.there(stay + go), stay)

    def test_who_is_packing(self):
        self.fill()
        with closing(self.open_storage()) as storage, closing(storage.database.adapter.connect()) as session:
            self.assertIsNone(storage.database.adapter.pack_lock.take(session))
            self.assertRegex(self.refused(self.config()), r'is being packed by .+\.$')

    def test_beside_relstorage(self):
        """Where it may write, a pack to now is refused, until somebody says that it does not any more."""
        stay, go = self.fill()
        config = self.config()

        def writers(*who):
            status, out, err = self.command(relstore_main, 'writers', config, *who)
            self.assertEqual((status, err), (0, ''))
            return out

        self.assertIn(': relstore. ', writers())
        writers('any')
        if 'sqlite' not in config.read_text():      # nobody else is ever there
            self.assertIn(': any. ', writers())
            self.assertIn('relstore writers', self.refused('--days', '0', config))
            self.works('--days', '0', '--dry-run', config)
            self.assertEqual(self.there(stay + go), stay + go)
        self.assertIn(': relstore. ', writers('relstore'))
        self.works('--days', '0', config)
        self.assertEqual(self.there(stay + go), stay)

    def test_nothing_leads_nowhere(self):
        self.fill()
        revisions = len(self.rows()['object_state'])
        self.assertIn(f'  0 references lead nowhere. {revisions} revisions were looked at.',
                      self.works('--check-refs-only', self.config()))

    def test_references_that_lead_nowhere(self):
        """One object was deleted, one is missing, and one never was there."""
        self.fill()
        with closing(DB(self.open_storage())) as db:
            with db.transaction() as connection:
                folder = connection.root()['list']
                folder[3]._p_activate()
                parent, deleted, missing = (u64(thing._p_oid) for thing in (folder, folder[3], folder[4]))
                serial = folder[3]._p_serial
            txn = TransactionMetaData()
            storage = db.storage
            storage.tpc_begin(txn)
            storage.deleteObject(p64(deleted), serial, txn)
            storage.tpc_vote(txn)
            storage.tpc_finish(txn)
            with storage.database.pool.session() as session:
                for table in ['current_object', 'object_state'] if self.keep_history else ['object_state']:
                    session.run(f'DELETE FROM {table} WHERE zoid = {missing}')
        # Connections of before may not link what is not there.
        with closing(DB(self.open_storage())) as db, db.transaction() as connection:
            far = PersistentMapping()
            far._p_jar, far._p_oid = connection, p64(1 << 40)
            referrer = u64(connection.root()['list'][5]._p_oid)
            connection.root()['list'][5]['far'] = far
        for more in (), ('pack-gc false',):
            status, out, err = self.told('--check-refs-only', self.config(*more))
            self.assertEqual((status, err), (1, ''))
            name = 'persistent.mapping.PersistentMapping'
            path = f'      0x0 {name}\n      {parent:#x} {name}\n'
            self.assertIn(f'  {parent:#x} {name} refers to {deleted:#x}, which is deleted. From the root:\n{path}', out)
            self.assertIn(f'  {parent:#x} {name} refers to {missing:#x}, which is missing. From the root:\n{path}', out)
            self.assertIn(f'  {referrer:#x} {name} refers to 0x10000000000, which is missing. From the root:\n'
                          f'{path}      {referrer:#x} {name}\n', out)
            self.assertIn('  3 references lead nowhere.', out)


cases(globals(), Packs, backends=BACKENDS)
del Packs


class Reports(SQLiteHistoryPreserving, Zodbpack):

    def execute(self, sql, *parameters):
        with closing(sqlite3.connect(self.address().path)) as connection, connection:
            return connection.execute(sql, parameters).fetchall()

    def test_records_that_cannot_be_read(self):
        stay, go = self.fill()
        self.execute("UPDATE object_state SET state = x'80036e6f', refs = NULL WHERE zoid = ?", stay[-1])
        out = self.works('--days', '0', self.config())
        self.assertRegex(out, rf'  1 record cannot be read; .*: {stay[-1]:#x} \(tid 0x[0-9a-f]+\)')
        self.execute('DELETE FROM relstore_refs')
        status, out, _ = self.told('--check-refs-only', self.config())
        self.assertEqual(status, 1)
        self.assertIn('0 references lead nowhere', out)
        self.assertRegex(out, rf'  1 record cannot be read: {stay[-1]:#x} ')
        # What such a record may refer to is a guess: nothing is missing because of that.
        self.execute("UPDATE object_state SET state = x'80036e6f0000000000ffffff' WHERE zoid = ?", stay[-1])
        status, out, _ = self.told('--check-refs-only', self.config())
        self.assertEqual(status, 1)
        self.assertIn('0 references lead nowhere', out)

    def test_the_table_and_the_paths_are_bounded(self):
        """Many classes, many references that lead nowhere, and a long way to them."""
        with closing(DB(self.open_storage())) as db, db.transaction() as connection:
            step = connection.root()
            for _ in range(30):
                step['next'] = step = PersistentMapping()
            for number in range(broken.BROKEN + 7):
                lost = PersistentMapping()
                lost._p_jar, lost._p_oid = connection, p64((1 << 50) + number)
                step[number] = lost
        status, out, _ = self.told('--check-refs-only', self.config())
        self.assertEqual(status, 1)
        self.assertIn('  ... and 7 more.', out)
        self.assertIn(f'  {broken.BROKEN + 7} references lead nowhere', out)
        self.assertEqual(out.count('which is missing'), broken.BROKEN)
        self.assertEqual(out.count('... 19 more objects ...'), broken.BROKEN)
        sizes = {f'products.Class{number:02}': zodbpack.ClassSize(1, 2, 100 - number, [number]) for number in range(30)}
        report = zodbpack.Report(objects=30)
        with contextlib.redirect_stdout(None) as _, mock.patch('builtins.print') as told:
            zodbpack._tell_what_would_go(report, sizes)
        lines = [call.args[0] for call in told.call_args_list]
        self.assertEqual([line.split()[3] for line in lines if 'products.' in line],
                         [f'products.Class{number:02}' for number in range(zodbpack.CLASSES)])
        self.assertEqual(lines[-1], '  ... and 10 more classes: 755 bytes, 20 states, 10 objects.')

    def test_large_states_are_weighed_too(self):
        with closing(DB(self.open_storage())) as db:
            with db.transaction() as connection:
                connection.root()['x'] = PersistentMapping(text='x' * 50_000)
            with db.transaction() as connection:
                connection.root()['x']['text'] = ''
            with db.transaction() as connection:
                del connection.root()['x']
        out = self.works('--days', '0', '--dry-run', self.config())
        self.assertRegex(out, r'Would go: \d states, 5\d\.\d kB')
        self.assertNotIn(' ? ', out)

    def test_the_option_decides_where_nothing_is_said(self):
        stay, go = self.fill()
        before = self.rows()
        self.assertIn('Would go: ', self.works('--days', '0', self.config('pack-dry-run true')))
        self.assertEqual(self.rows(), before)
        self.assertIn('Written down: ', self.works('--days', '0', '--prepack', self.config('pack-dry-run true')))
        self.assertIn('Removed: ', self.works(self.config('pack-skip-prepack true')))
        self.assertEqual(self.there(stay + go), stay)

    def test_without_garbage_collection(self):
        stay, go = self.fill()
        out = self.works('--days', '0', self.config('pack-gc false'))
        self.assertIn('Removed: 5 states', out)
        self.assertEqual(self.there(stay + go), stay + go)

    def test_nothing_is_saved_of_the_cache(self):
        self.fill()
        cache = self.here / 'cache'
        self.works(self.config(f'cache-local-dir {cache}'))
        self.assertFalse(cache.exists())


class Refusals(SQLiteHistoryPreserving, Zodbpack):

    def usage(self, *argv):
        with self.assertRaises(SystemExit) as caught, contextlib.redirect_stderr(mock.Mock()):
            main([str(argument) for argument in argv])
        self.assertEqual(caught.exception.code, 2)

    def test_usage(self):
        config = self.config()
        for argv in [(), ('--days', 'x', config), ('--days', '36526', config), ('--days', 'nan', config),
                     ('--list', 'f', config), ('--dry-run', '--prepack', config),
                     ('--prepack', '--use-prepack-state', config), ('--check-refs-only', '--dry-run', config)]:
            with self.subTest(argv):
                self.usage(*argv)

    def test_files(self):
        self.assertEqual(self.refused('/nowhere/x.conf'), '/nowhere/x.conf: No such file or directory')
        self.assertEqual(self.refused(self.here), f'{self.here}: Is a directory')
        empty = self.write('empty.conf', '')
        self.assertEqual(self.refused(empty),
                         f'{empty} names no storage; it needs a section <relstore>, or <zodb_db> with one.')
        wrong = self.write('wrong.conf', '%import relstore', '<relstore>', 'keep-histroy off', '</relstore>')
        self.assertRegex(self.refused(wrong), r"wrong\.conf cannot be read: There is no option 'keep-histroy'.*line 3")
        binary = self.here / 'binary.conf'
        binary.write_bytes(b'\xff\xfe')
        self.assertRegex(self.refused(binary), r'binary\.conf cannot be read')

    def test_a_database_that_is_not_there_is_not_made(self):
        config = self.config()
        self.assertEqual(self.refused(config), f'{self.address()} does not exist.')
        self.assertFalse(self.address().data_dir.exists())

    def test_no_server(self):
        config = self.write('c.conf', '%import relstore', '<relstore>', '<postgresql>',
                            'dsn host=127.0.0.1 port=1 dbname=x', '</postgresql>', '</relstore>')
        self.assertIn('127.0.0.1', self.refused(config))

    def test_read_only(self):
        self.fill()
        self.assertEqual(self.refused(self.config('read-only true')), 'The storage is read-only.')
        self.works('--dry-run', self.config('read-only true'))
        self.works('--check-refs-only', self.config('read-only true'))

    def test_other_history_mode(self):
        self.fill()
        config = self.config()
        config.write_text(config.read_text().replace('keep-history true', 'keep-history false'))
        self.assertRegex(self.refused(config), 'is history-preserving; set keep-history true')

    def test_a_list_that_cannot_be_written(self):
        self.fill()
        self.assertEqual(self.refused('--dry-run', '--list', '/nowhere/list', self.config()),
                         '/nowhere/list: No such file or directory')

    def test_traceback(self):
        with self.assertRaises(ConfigurationError):
            main(['--traceback', str(self.config())])

    def test_a_lock_file_that_cannot_be_written(self):
        """As on a full disk: here a device stands for it."""
        self.fill()
        path = self.address().data_dir / 'pack.lock'
        path.symlink_to('/dev/full')
        self.assertRegex(self.refused(self.config()), rf'^{path} cannot be written: ')
        with closing(self.open_storage()) as storage, self.assertRaisesRegex(StorageError, 'cannot be written'):
            storage.pack(None)

    def test_empty_database(self):
        self.open_storage().close()
        self.works('--days', '0', self.config())
        self.assertRegex(self.refused('--check-refs-only', self.config()), r'has no root object \(oid 0\)')


STANDS_FOR_RELSTORAGE = """
from ZODB.config import BaseConfig
from ZODB.MappingStorage import MappingStorage

class Section(BaseConfig):
    def open(self):
        return MappingStorage()
"""


class Files(SQLiteHistoryPreserving, Zodbpack):
    """What may stand in the file."""

    def test_zope_conf(self):
        stay, go = self.fill()
        zope = self.write(
            'zope.conf', f'%define INSTANCE {self.here}', 'instancehome $INSTANCE', '%import relstore', '<environment>',
            '  CHAMELEON_CACHE $INSTANCE', '</environment>', '<eventlog>', '  level info', '  <logfile>',
            '    path $INSTANCE/log', '  </logfile>', '</eventlog>', '<zodb_db main>', '  mount-point /',
            '  cache-size 30000', '  class-factory ZODB.broken.find_global', self.section(), '</zodb_db>',
            '<ZODB_DB second>', '  mount-point /second', '  container-class OFS.Folder.Folder', '<filestorage>',
            '  path $INSTANCE/Data.fs', '</filestorage>', '</ZODB_DB>', '<http-server>', '  address 8080',
            '</http-server>')
        out = self.works('--days', '0', zope)
        self.assertIn(f'main: {self.address()}\n', out)
        self.assertRegex(out, r'second: FileStorage\n  Packed. On disk: ')
        self.assertEqual(self.there(stay + go), stay)
        self.write('zope.conf', '<zodb_db main>', '  mount-point /', '  no-such-key 1', self.section(), '</zodb_db>')
        self.assertRegex(self.refused(zope), 'no-such-key')
        self.write('zope.conf', 'instancehome x', '', '<zodb_db main>', self.section('keep-histroy 1'))
        self.assertRegex(self.refused(zope), r'keep-histroy.*\(line 6')
        self.write('zope.conf', '<zodb_db main>', '  class-factory no.such', self.section(), '</zodb_db>')
        self.assertRegex(self.refused(zope), r"named by 'no.such' could not be imported.*\(line 2")

    def test_relstorages(self):
        stay, go = self.fill()
        for number, lines in enumerate([
                ['%import relstorage', self.section(of='relstorage')], [self.section(of='relstorage')],
                ['%import  RelStorage', '<zodb_db x>', 'mount-point /', self.section(of='relstorage'), '</zodb_db>'],
                ['%import relstore', '<zodb x>', self.section(), '</zodb>']]):
            with self.subTest(number):
                out = self.works('--days', '0', self.write('site.conf', *lines))
                self.assertEqual(self.there(stay + go), stay)
                self.assertIn('Removed: 11 states' if number == 0 else 'Removed: 0 states', out)

    def test_both_in_one_file(self):
        """There a section of RelStorage's is its own. A package stands for it here, whose storage can be packed."""
        stay, go = self.fill()
        (self.here / 'relstorage').mkdir()
        (self.here / 'relstorage' / '__init__.py').write_text(STANDS_FOR_RELSTORAGE)
        (self.here / 'relstorage' / 'component.xml').write_text(
            '<component prefix="relstorage"><import package="ZODB"/>'
            '<sectiontype name="relstorage" implements="ZODB.storage" datatype=".Section"/></component>')
        self.addCleanup(lambda: [sys.modules.pop(name) for name in list(sys.modules) if name == 'relstorage'])
        ours = self.section().replace('sqlite3', 'relstore-sqlite3')
        config = self.write('zope.conf', '%import relstorage', '%import relstore.beside',
                            '<zodb_db first>', ours, '</zodb_db>',
                            '<zodb_db second>', '<relstorage>', '</relstorage>', '</zodb_db>')
        with mock.patch.object(sys, 'path', [str(self.here), *sys.path]):
            out = self.works('-d', '-1', config)
        self.assertRegex(out, r'(?s)first: The database .*Removed: 11 states.*second: MappingStorage\n  Packed.')
        self.assertEqual(self.there(stay + go), stay)

    def test_under_its_other_name(self):
        stay, go = self.fill()
        status, out, err = self.command(relstore_main, 'pack', '--days', '0', self.config())
        self.assertEqual((status, err), (0, ''), out)
        self.assertEqual(self.there(stay + go), stay)
        with self.assertRaises(SystemExit):
            self.command(relstore_main, 'pack', '--list', 'f', self.config())

    def test_included(self):
        self.fill()
        self.config()
        self.works('--dry-run', self.write('all.conf', f'%include {self.here}/main.conf'))

    def test_storages_of_another_kind(self):
        path = self.here / 'Data.fs'
        with closing(DB(FileStorage(str(path)))) as db:
            for number in range(20):
                with db.transaction() as connection:
                    connection.root()['x'] = str(number) * 1000
        before = path.stat().st_size
        config = self.write('fs.conf', '<filestorage>', f'path {path}', '</filestorage>')
        for mode in '--dry-run', '--prepack', '--check-refs-only':
            self.assertIn('is not a relstore storage', self.refused(mode, config))
        self.works('--days', '0', config)
        self.assertLess(path.stat().st_size, before / 5)

    def test_one_that_fails_does_not_keep_the_others(self):
        stay, go = self.fill()
        with closing(FileStorage(str(self.here / 'Data.fs'))):
            config = self.write('all.conf', '<filestorage>', f'path {self.here}/Data.fs', '</filestorage>',
                                self.section())
            self.assertRegex(self.refused('--days', '0', config), 'LockError')
        self.assertEqual(self.there(stay + go), stay)

    def test_whatever_another_storage_raises(self):
        class Storage:
            def getName(self):
                return 'odd'

            def getSize(self):
                return 0

            def pack(self, *arguments):
                raise NotImplementedError('no pack')

            def close(self):
                pass

        named = databases.Named('odd', mock.Mock(open=Storage))
        with mock.patch.object(databases, 'read', lambda path: [named]), \
                mock.patch.object(databases, '_sections', lambda factory, kind: []):
            self.assertEqual(self.refused('x.conf'), 'odd: NotImplementedError: no pack')


class Late(HexStorage):
    """A wrapper of whose records the storage below learns only when it learns of its own database."""

    def __init__(self, base):
        with mock.patch.object(base, 'registerDB'):
            super().__init__(base)

    def registerDB(self, db):
        super().registerDB(db)
        self.base.registerDB(self)


class Wrapped(SQLiteHistoryPreserving, Zodbpack):
    """Records that a storage around this one has changed. Their references are not known, as after an adoption."""

    def fill_wrapped(self, wrap):
        with closing(DB(FileStorage(str(self.here / 'Data.fs')))) as db:
            with db.transaction() as connection:
                connection.root()['kept'] = PersistentMapping({n: PersistentMapping(a='x' * 99) for n in range(5)})
                connection.root()['gone'] = PersistentMapping({n: PersistentMapping(a='x' * 99) for n in range(5)})
            with db.transaction() as connection:
                stay, go = oids(connection.root()['kept']), oids(connection.root().pop('gone'))
            with closing(wrap(self.open_storage())) as storage:
                storage.copyTransactionsFrom(db.storage)
        with closing(sqlite3.connect(self.address().path)) as connection, connection:
            [[count]] = connection.execute("SELECT count(*) FROM object_state WHERE substr(state, 1, 1) = x'2e'")
            self.assertGreater(count, 10)
            connection.execute('UPDATE object_state SET refs = NULL')
        return [0, *stay], go

    def assertPacks(self, config, stay, go):
        out = self.works('--days', '0', '--dry-run', config)
        self.assertIn('persistent.mapping.PersistentMapping', out)
        self.assertNotIn('cannot be read', out)
        self.works('--check-refs-only', config)
        out = self.works('--days', '0', config)
        self.assertIn('6 objects that go as a whole', out)
        self.assertNotIn('cannot be read', out)
        self.assertEqual(self.there(stay + go), stay)

    def test_twice(self):
        stay, go = self.fill_wrapped(lambda storage: HexStorage(HexStorage(storage)))
        self.assertPacks(self.write('hex.conf', '%import ZODB.tests', '<hexstorage>', '<hexstorage>', self.section(),
                                    '</hexstorage>', '</hexstorage>'), stay, go)

    def test_compressed(self):
        if importlib.util.find_spec('zc.zlibstorage') is None:
            cannot_run(self, 'zc.zlibstorage is not installed')
        from zc.zlibstorage import ZlibStorage
        stay, go = self.fill_wrapped(ZlibStorage)
        self.assertPacks(self.write('zlib.conf', '%import zc.zlibstorage', '<zlibstorage>', self.section(),
                                    '</zlibstorage>'), stay, go)

    def test_registered_as_a_database_does(self):
        stay, go = self.fill_wrapped(HexStorage)
        read = databases.read

        def late(path):
            [named] = read(path)
            factory = mock.Mock(open=lambda: Late(named.factory.open()))
            return [databases.Named('late', factory)]

        with mock.patch.object(databases, 'read', late), \
                mock.patch.object(databases, '_sections', lambda factory, kind: []):
            self.assertPacks(self.config(), stay, go)

    def test_pack_of_the_wrapper_itself(self):
        """It hands down a third argument, gc, which is always true."""
        stay, go = self.fill_wrapped(HexStorage)
        with closing(HexStorage(self.open_storage(pack_gc=False))) as storage:
            storage.pack(time.time(), None)
        self.assertEqual(self.there(stay + go), stay + go)
        with closing(HexStorage(self.open_storage())) as storage:
            storage.pack(time.time(), None, False)
            self.assertEqual(self.there(stay + go), stay + go)
            storage.pack(time.time(), None)
        self.assertEqual(self.there(stay + go), stay)


class Processes(SQLiteHistoryPreserving, Zodbpack):

    CODE = 'import sys; from relstore.cli.zodbpack import main; sys.exit(main())'

    def process(self, *argv, code=CODE, **kw):
        return subprocess.Popen([sys.executable, '-c', code, *map(str, argv)], env=environment(),
                                stdin=subprocess.DEVNULL, text=True, **kw)

    def test_in_a_process(self):
        stay, go = self.fill()
        with self.process('--days', '0', self.config(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (0, ''))
        self.assertIn('Removed: 11 states', out)
        self.assertNotIn('\x1b', out)
        self.assertEqual(self.there(stay + go), stay)

    def test_exit_status(self):
        with self.process('/nowhere', stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out, err), (2, '', 'zodbpack: /nowhere: No such file or directory\n'))

    def on_terminal(self, code):
        self.fill()
        ours, theirs = pty.openpty()
        with open(ours, 'rb', buffering=0) as terminal:
            with self.process('--days', '0', self.config(), code=code, stdout=theirs, stderr=theirs) as process:
                os.close(theirs)
                out = b''
                with contextlib.suppress(OSError):      # that is how a terminal says that nobody writes any more
                    while more := terminal.read(4096):
                        out += more
            self.assertEqual(process.returncode, 0, out)
        return out.decode()

    def test_bar_on_a_terminal(self):
        if importlib.util.find_spec('rich') is None:
            self.skipTest('rich is not installed')
        out = self.on_terminal(self.CODE)
        self.assertIn('\x1b[', out)
        self.assertIn('Removed: 11 states', out)

    def test_terminal_without_rich(self):
        out = self.on_terminal("import sys; sys.modules['rich'] = sys.modules['rich.progress'] = None\n" + self.CODE)
        self.assertNotIn('\x1b', out)
        self.assertIn('Removed: 11 states', out)


class Lines(unittest.TestCase):
    """What is told in a log, by a clock of the test's own."""

    def tell(self, *steps):
        told, now = [], [1000.0]
        with mock.patch.object(progress.time, 'monotonic', lambda: now[0]), \
                mock.patch('builtins.print', lambda line, flush: told.append(line)):
            lines = progress.Lines()
            for seconds, *step in steps:
                now[0] = 1000.0 + seconds
                lines(*step)
        return told

    def test_every_few_seconds(self):
        self.assertEqual(
            self.tell((0, 'reading', 0, 1000), *((n, 'reading', 10 * n, 1000) for n in range(1, 13))),
            ['reading: 50 of 1,000 (5 %), 10/s, 95.0 s left', 'reading: 100 of 1,000 (10 %), 10/s, 90.0 s left'])

    def test_without_a_total(self):
        self.assertEqual(self.tell((0, 'marking', 0, None), (7, 'marking', 0, None), (14, 'marking', 28, None)),
                         ['marking', 'marking: 28, 2/s'])

    def test_a_new_step_has_a_rate_of_its_own(self):
        self.assertEqual(self.tell((0, 'reading', 0, 10), (4, 'listing', 0, 100), (6, 'listing', 50, 100)),
                         ['listing: 50 of 100 (50 %), 25/s, 2.0 s left'])

    def test_units(self):
        self.assertEqual([progress.duration(seconds) for seconds in (0.0012, 5, 99, 600, 9000)],
                         ['1.2 ms', '5.0 s', '99.0 s', '10 min', '2 h 30 min'])
        self.assertEqual([progress.size(count) for count in (0, 1, 999, 1500, 2_500_000, 5e9, 5e10)],
                         ['0 bytes', '1 byte', '999 bytes', '1.5 kB', '2.5 MB', '5,000.0 MB', '50.0 GB'])
        self.assertEqual([progress.counted(number, 'class', 'classes') for number in (0, 1, 2000)],
                         ['0 classes', '1 class', '2,000 classes'])

    def test_one_of_each(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            zodbpack._tell_what_went(Report(objects=2, older=1, spared=1, states=1, bytes=1, transactions=1, steps=1))
        self.assertEqual(out.getvalue().splitlines(), [
            '  Removed: 1 state, 1 byte, 1 transaction.',
            '  They were of 1 object that goes as a whole, and 1 object that loses older revisions.',
            '  1 object stays, because it was linked or changed since.',
            '  Nobody could vote for 0.0 ms in all, 0.0 ms at most. 1 step, the longest 0.0 ms.'])
