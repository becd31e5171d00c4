"""zodbconvert --skip-damaged: what can be read is copied, and what cannot is named; and tids that do not rise."""
import logging
import os
import pickle
import re
import shutil
import zlib
from contextlib import ExitStack, closing, nullcontext
from unittest import mock

from persistent.mapping import PersistentMapping
from zc.zlibstorage import ZlibStorage
from ZODB.blob import Blob
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.DemoStorage import DemoStorage
from ZODB.FileStorage import FileStorage
from ZODB.FileStorage.FileStorage import FileIterator
from ZODB.POSException import POSKeyError
from ZODB.tests.hexstorage import HexStorage
from ZODB.tests.StorageTestBase import zodb_pickle
from ZODB.utils import maxtid, oid_repr, p64, tid_repr, u64, z64

import relstore
from relstore import bulk, copying, readers, spool
from relstore.cli import convert, verifying
from relstore.cli.workers import in_processes
from relstore.converting.conversion import Conversion
from relstore.converting.salvage import SalvagedFileStorage
from relstore.errors import StorageError
from relstore.references import references
from relstore.spool import described
from relstore.tests.support.backends import SQLiteHistoryFree, SQLiteHistoryPreserving, cases
from relstore.tests.support.commands import BACKENDS
from relstore.tests.support.converting import Convert
from relstore.tests.support.layers import Processes
from relstore.tests.support.sources import FIRST, Source, Transaction
from relstore.unreadable import NAMED


class Damaged(Convert):
    """A site with a folder of which one object is damaged in the file."""

    def setUp(self):
        super().setUp()
        self.fill()
        self.change('text', PersistentMapping(a=PersistentMapping(text='a' * 500), b=PersistentMapping(text='b' * 500)))
        with closing(FileIterator(str(self.path))) as transactions:
            for last in transactions:
                oids = [record.oid for record in last if b'b' * 500 in (record.data or b'')]
        [self.oid] = oids
        for number in 'later', 'last':
            self.change('number', number)
        data = self.path.read_bytes()
        self.length_at = data.rindex(self.oid + last.tid) + 34
        self.path.write_bytes(data[:self.length_at] + b'\xff' * 8 + data[self.length_at + 8:])
        os.unlink(f'{self.path}.index')
        self.destination = self.config(f'blob-dir {self.here}/cache')

    def copied(self):
        storage = self.open_storage(blob_dir=str(self.here / 'cache'))
        self.addCleanup(storage.close)
        return storage

    def left_out(self, *argv):
        """Return the lines that say what was left out, and all else that is printed."""
        status, out, err = self.told(*argv)
        self.assertEqual(status, convert.LEFT_OUT, err)
        lines = err.splitlines()
        for line in lines:
            self.assertTrue(line.startswith('Left out: '), line)
        self.assertEqual(len(lines), len(set(lines)))
        return lines, out

    def test_a_record(self):
        status, _, err = self.told(self.path, self.destination)
        self.assertEqual(status, 2)
        self.assertRegex(err, r'is damaged at byte|cannot be read as a FileStorage')
        [line], out = self.left_out(self.path, self.destination, '--skip-damaged', '--verify')
        self.assertRegex(line, rf'Data\.fs: \d+ bytes from byte {self.length_at - 34} on\. No record can be read')
        self.assertIn(' are equal', out)
        self.assertIn('1 piece of the source cannot be read and is not in the copy', out)
        storage = self.copied()
        with closing(DB(storage)) as db, db.transaction() as connection:
            root = connection.root()
            self.assertEqual(root['text']['a']['text'], 'a' * 500)
            self.assertEqual((root['number'], root['blob'].open().read()[:0]), ('last', b''))
            self.assertEqual(root['text']['b']._p_oid, self.oid)
            folder = root['text']._p_oid
            with self.assertRaises(POSKeyError):
                root['text']['b']._p_activate()
        dangling = (f'  {u64(folder):#x} persistent.mapping.PersistentMapping refers to {u64(self.oid):#x}, '
                    'which is missing.')
        for options in ('--skip-damaged',), ('--verify-only', '--skip-damaged'):
            _, out = self.left_out(self.path, self.destination, *options)
            self.assertIn(dangling, out)
            self.assertIn('  1 reference leads nowhere.', out)

    def test_it_goes_on(self):
        """A second run finds nothing new, and names the same."""
        next(self.blobs.rglob('*.blob')).unlink()
        first, _ = self.left_out(self.path, self.destination, '--skip-damaged')
        self.assertEqual(len(first), 2)
        for options in (), ('--verify',):
            again, out = self.left_out(self.path, self.destination, '--skip-damaged', *options)
            self.assertEqual(first, again)
            self.assertIn('There was nothing to copy', out)
            self.assertIn('2 pieces of the source', out)

    @mock.patch.object(bulk, 'BATCH_BYTES', 0)
    def test_stopped_behind_the_damage(self):
        """What goes on tells of the copy as a whole, not of its own part."""
        next(self.blobs.rglob('*.blob')).unlink()
        copy, behind = Conversion.copy, []

        def stopped(conversion, progress):
            tids = [transaction.tid for transaction in conversion.source.iterator()]

            def advance(tid, *told):
                if tid == tids[-2]:
                    behind.append(tid)
                    raise StorageError('The server has gone.')
                progress(tid, *told)
            copy(conversion, advance)

        with mock.patch.object(Conversion, 'copy', stopped):
            status, _, err = self.told(self.path, self.destination, '--skip-damaged')
        self.assertEqual((status, len(behind)), (2, 1), err)
        *first, last = err.splitlines()
        self.assertIn('has gone', last)
        self.assertEqual(len(first), 2, err)
        again, out = self.left_out(self.path, self.destination, '--skip-damaged')
        self.assertIn('Copied: 1 transaction,', out)
        self.assertEqual(sorted(again), sorted(first))

    def test_nothing_was_left_out_before(self):
        os.unlink(self.path)
        self.change('number', 1)
        for _ in range(2):
            self.works(self.path, self.destination, '--skip-damaged')

    def test_with_a_blob_that_is_gone(self):
        shutil.rmtree(self.blobs)
        os.mkdir(self.blobs)
        lines, _ = self.left_out(self.path, self.destination, '--skip-damaged')
        self.assertEqual(len([line for line in lines if 'has no data of the blob' in line]),
                         2)
        with closing(DB(self.copied())) as db, db.transaction() as connection:
            blob = connection.root()['blob']
            self.assertIsInstance(blob, Blob)
            with self.assertRaises(POSKeyError):
                blob.open()

    def test_the_root_is_gone(self):
        """Of a file with one transaction, say."""
        with closing(FileIterator(str(self.path))) as transactions:
            first = next(iter(transactions))
        data = bytearray(self.path.read_bytes())
        at = data.index(p64(0) + first.tid)
        end = 4 + u64(bytes(data[12:20])) + 8
        data[at + 34:at + 42] = b'\xff' * 8
        self.path.write_bytes(data[:end])
        [line], out = self.left_out(self.path, self.destination, '--skip-damaged')
        self.assertIn('No record can be read', line)
        self.assertIn('Nor does the copy have the root object', out)

    def test_what_other_processes_find(self):
        """Each of them reads some transactions, and this one no record."""
        first, _ = self.left_out(self.path, self.destination, '--skip-damaged')
        with mock.patch.object(verifying, 'WORTH_BYTES', 0), mock.patch.object(
                verifying, 'in_processes', side_effect=in_processes) as begun:
            again, out = self.left_out(self.path, self.destination, '--skip-damaged', '--verify-only', '--jobs', '2')
        self.assertTrue(begun.called)
        self.assertEqual(first, again)
        self.assertIn('are equal', out)

    def test_not_while_it_is_followed(self):
        with mock.patch('sys.stderr'), self.assertRaises(SystemExit) as raised:
            self.told(self.path, self.destination, '--skip-damaged', '--follow')
        self.assertEqual(raised.exception.code, 2)


class Around(Convert):
    """A damaged Data.fs within what wraps its records, or has changes over it."""
    layer = Processes

    def setUp(self):
        super().setUp()
        self.copy = f'sqlite://{self.here}/copy?blob-dir={self.here}/copied'

    def wrapped(self, name, *inner):
        return self.write(f'{name}.conf', '%import zc.zlibstorage', '%import ZODB.tests', f'<{name}>', *inner,
                          f'</{name}>')

    def file(self, path=None):
        return '<filestorage>', f'path {path or self.path}', f'blob-dir {self.blobs}', '</filestorage>'

    def damage(self, storage, behind):
        """Store objects, and damage one of them so many bytes behind the beginning of its data."""
        with closing(DB(storage)) as db, db.transaction() as connection:
            root = connection.root()
            for number in range(4):
                root[number] = PersistentMapping(text=f'{number}' * 1000)
                connection.add(root[number])
            oid = root[2]._p_oid
        with closing(FileIterator(str(self.path))) as transactions:
            *_, last = transactions
        data = self.path.read_bytes()
        at = data.rindex(oid + last.tid) + 42 + behind
        self.path.write_bytes(data[:at] + bytes([data[at] ^ 0xff]) + data[at + 1:])
        os.unlink(f'{self.path}.index')
        return oid

    def copied(self, source, oid, *options):
        status, out, err = self.told(source, self.copy, '--skip-damaged', '--verify', *options)
        self.assertEqual(status, convert.LEFT_OUT, err)
        [line] = err.splitlines()
        self.assertRegex(line, rf'(The record of object {oid_repr(oid)} cannot|No record can) be read there: ')
        self.assertIn('are equal', out)
        self.assertIn(f'refers to {u64(oid):#x}, which is missing', out)
        storage = relstore.RelStore(relstore.SQLite(str(self.here / 'copy')), blob_dir=str(self.here / 'copied'))
        with closing(DB(storage)) as db, db.transaction() as connection:
            root = connection.root()
            for number in 0, 1, 3:
                self.assertEqual(root[number]['text'], f'{number}' * 1000)
            return {key: value.open().read() if isinstance(value, Blob) else value for key, value in root.items()
                    if not isinstance(key, int)}

    def test_zlibstorage(self):
        for behind in 5, 20, -8:        # of the compressed data, and of what is before it the length
            with self.subTest(behind):
                for path in self.here.glob('Data.fs*'):
                    path.unlink()
                self.change('blob', b'data', ZlibStorage(self.filestorage()))
                oid = self.damage(ZlibStorage(self.filestorage()), behind)
                found = self.copied(self.wrapped('zlibstorage', *self.file()), oid, '--clear', '--yes')
                self.assertEqual(found, {'blob': b'data'})

    def test_hexstorage(self):
        self.change('blob', b'data', HexStorage(self.filestorage()))
        oid = self.damage(HexStorage(self.filestorage()), 7)
        self.assertEqual(self.copied(self.wrapped('hexstorage', *self.file()), oid), {'blob': b'data'})

    def test_demostorage(self):
        """Damaged is the base, or what has changed since."""
        self.change('blob', b'data')
        oid = self.damage(self.filestorage(), -8)
        self.assertEqual(self.copied(self.wrapped('demostorage', *self.file()), oid), {'blob': b'data'})

    def test_changes_of_a_demostorage(self):
        base = self.here / 'base.fs'
        with closing(FileStorage(str(base), blob_dir=str(self.here / 'base.blobs'))) as storage:
            self.change('before', 1, storage)
        based = '<filestorage base>', f'path {base}', f'blob-dir {self.here}/base.blobs', '</filestorage>'
        self.change('blob', b'data', DemoStorage(base=FileStorage(str(base), read_only=True),
                                                 changes=self.filestorage()))
        oid = self.damage(DemoStorage(base=FileStorage(str(base), read_only=True), changes=self.filestorage()), -8)
        changes = [line.replace('<filestorage>', '<filestorage changes>') for line in self.file()]
        self.assertEqual(self.copied(self.wrapped('demostorage', *based, *changes), oid),
                         {'before': 1, 'blob': b'data'})


class Falling(Convert):
    """A Data.fs in which a transaction has a tid of the far future: the others come after it nevertheless."""
    layer = Processes

    def setUp(self):
        super().setUp()
        self.fill()
        with closing(FileIterator(str(self.path))) as transactions:
            self.tids = [each.tid for each in transactions]
        data = self.path.read_bytes()
        self.path.write_bytes(data.replace(self.tids[3], p64(u64(self.tids[-1]) + (1 << 36))))
        os.unlink(f'{self.path}.index')
        self.copy = f'sqlite://{self.here}/copy?blob-dir={self.here}/copied'

    def copying(self, *options):
        status, out, err = self.told(self.path, self.copy, *options)
        self.assertEqual(status, 0, err)
        return out

    def test_it_is_equal(self):
        out = self.copying('--verify')
        self.assertRegex(out, r'and 2 blobs are equal')

    @mock.patch('relstore.bulk.BATCH_BYTES', 1)
    def test_an_interrupted_copy_goes_on(self):
        copy = Conversion.copy
        for number in range(1, 5):
            def stopped(conversion, progress, number=number):
                def advance(*told):
                    if conversion.copied.transactions == number:
                        raise StorageError('The server has gone.')
                copy(conversion, advance)

            with mock.patch.object(Conversion, 'copy', stopped):
                status, _, err = self.told(self.path, self.copy)
                self.assertEqual((status, 'has gone' in err), (2, True), err)
        out = self.copying('--verify')
        self.assertRegex(out, rf'Copied: {len(self.tids) - 10} transactions')
        self.assertRegex(out, rf'Compared: {len(self.tids)} transactions, .* and 2 blobs are equal')
        storage = relstore.RelStore(relstore.SQLite(str(self.here / 'copy')), blob_dir=str(self.here / 'copied'))
        self.assertEqual(self.root(storage), self.root(self.filestorage()))


class Odd(Convert):
    """Records that a ZODB of long ago wrote, or nobody can read, are copied as they are."""

    def records(self):
        """Yield (name, record): references of all forms, classes that are not there, and no pickles at all."""
        oid, older = p64(1), b'U\x08' + p64(1)     # a str of Python 2
        thing = b'\x80\x02cgone.module\nThing\nq\x01.'
        for name, pid in (('pair', (oid, None)), ('oid', oid), ('weak', ['w', (oid,)]), ('weaker', [oid]),
                          ('other', ['m', ('db', oid, None)]), ('others', ['n', ('db', oid)]),
                          ('class', (oid, 'gone.module'))):
            yield name, thing + pickle.dumps(pid, 2)[:-1] + b'Q.'
        yield 'older', thing + b'\x80\x02' + older + b'Q.'
        yield 'pair of a class', b'\x80\x02(cgone\nThing\nNt.' + b'\x80\x02}.'
        yield 'instance', b'(cgone\nThing\n(tt.}.'
        yield 'text', b'no pickle'
        yield 'cut', (thing + b'\x80\x02}.')[:-9]
        yield 'zeros', bytes(5000)
        yield 'compressed', b'.z' + zlib.compress(thing * 100)

    def store(self, odd):
        self.change('number', 1)
        with closing(self.filestorage()) as storage:
            meta = TransactionMetaData()
            storage.tpc_begin(meta)
            for oid, record in odd.items():
                storage.store(oid, z64, record, '', meta)
            storage.tpc_vote(meta)
            storage.tpc_finish(meta)
            self.tid = storage.lastTransaction()

    def named(self, oids, *argv):
        """Copy. These records, and no others, are named once, and counted."""
        status, out, err = self.told(*argv)
        self.assertEqual(status, 0, err)
        found = re.findall(
            r'(?m)^Object (0x\w+) of transaction (0x\w+) cannot be read, and is copied as it is: .+\.$', err)
        self.assertEqual(found, [(oid_repr(oid), tid_repr(self.tid)) for oid in sorted(oids)[:NAMED]])
        self.assertEqual(len(err.splitlines()), len(found), err)
        self.assertIn(f'{len(oids)} records cannot be read for what they refer to', out)
        return out

    def test_they_are_as_they_were(self):
        odd = {p64(100 + number): record for number, (_, record) in enumerate(self.records())}
        self.store(odd)
        destination = self.config(f'blob-dir {self.here}/cache')
        unreadable = {oid for oid, record in odd.items() if references(record) is None}
        self.assertEqual(len(unreadable), 7)
        self.named(unreadable, self.path, destination, '--verify')
        with closing(self.open_storage(blob_dir=str(self.here / 'cache'))) as storage:
            found = {oid: storage.loadBefore(oid, maxtid)[0] for oid in odd}
        self.assertEqual(found, odd)
        back = f'file://{self.here}/back.fs?blob-dir={self.here}/back.blobs'
        self.named(unreadable, destination, back, '--verify')

    def test_however_they_are_copied(self):
        """In batches, one by one, and as other processes have read them."""
        odd = {p64(100 + number): b'\x80\x02damaged %d' % number for number in range(NAMED + 5)}
        self.store(odd)
        destination = self.config(f'blob-dir {self.here}/cache')
        ways = {'in batches': (), 'one by one': [mock.patch.object(relstore.RelStore, 'bulk', None)],
                'large': [mock.patch.object(bulk, 'LARGE_BYTES', 1)],
                'refused': [mock.patch.object(bulk.Bulk, '_vote', side_effect=StorageError('no'))],
                'in processes': [mock.patch.object(readers, 'WORTHWHILE_BYTES', 0),
                                 mock.patch.object(readers, 'spare_processors', return_value=1)]}
        for way, patches in ways.items():
            with self.subTest(way), ExitStack() as stack, mock.patch.object(
                    bulk, 'described', side_effect=described) as in_bulk, mock.patch.object(
                    spool, 'described', side_effect=described) as in_spool:
                for each in patches:
                    stack.enter_context(each)
                out = self.named(odd, self.path, destination, '--clear', '--yes')
                self.assertIn('all but 5 are named above', out)
                counts = in_bulk.call_count, in_spool.call_count
                total = len(odd) + (2 if self.keep_history else 1)
                # Of what is current other processes read nothing: see FileTransactions.place.
                self.assertEqual(counts, {
                    'in batches': (total, 0), 'one by one': (0, total), 'large': (0, total), 'refused': (total, total),
                    'in processes': (0 if self.keep_history else total, 0)}[way])
        wrapped = self.write('hex.conf', '%import ZODB.tests', '%import relstore', '<hexstorage>',
                             self.section(f'blob-dir {self.here}/cache'), '</hexstorage>')
        with mock.patch.object(copying, 'references', side_effect=AssertionError):
            self.named(odd, self.path, wrapped, '--clear', '--yes')

    def test_what_replaces_one_in_its_transaction(self):
        """A FileStorage may have two records of an object in one transaction: the last counts."""
        readable = zodb_pickle(PersistentMapping())
        for first, second, count in (b'\x80damaged', readable, 0), (readable, b'\x80damaged', 1):
            for one_by_one in False, True:
                with closing(self.open_storage()) as storage:
                    storage.zap_all()
                    source = Source([Transaction(FIRST, [(9, first, None), (9, second, None)])])
                    patched = mock.patch.object(relstore.RelStore, 'bulk', None) if one_by_one else nullcontext()
                    with patched, self.assertLogs('relstore', 'WARNING') as logged:
                        logging.getLogger('relstore').warning('first')
                        storage.copyTransactionsFrom(source)
                self.assertEqual(len(logged.output), 1 + count)


class Dangling(Convert):
    """A source that was packed by a tool that took what is in use for garbage."""

    def test_it_is_told(self):
        self.change('folder', PersistentMapping({n: PersistentMapping(n=n) for n in range(3)}))
        path = self.here / 'packed.fs'
        gone = p64(3)
        with closing(self.filestorage()) as storage, closing(FileStorage(str(path))) as packed:
            packed.copyTransactionsFrom(Without(storage, gone))
        destination = self.config()
        out = self.works(path, destination, '--verify')
        self.assertRegex(out, r'0x[12] persistent\.mapping\.PersistentMapping refers to 0x3, which is missing\. ')
        self.assertIn('  1 reference leads nowhere.', out)
        self.assertIn('  1 reference leads nowhere.', self.works(path, destination, '--verify-only'))
        self.assertNotIn('nowhere', self.works(path, destination))
        self.assertIn('  0 references lead nowhere.',
                      self.works(self.path, destination, '--verify', '--clear', '--yes'))


class Without:
    """A storage without an object."""

    def __init__(self, storage, oid):
        self.storage, self.oid = storage, oid

    def iterator(self):
        for transaction in self.storage.iterator():
            yield Transaction(u64(transaction.tid), [(u64(record.oid), record.data, None) for record in transaction
                                                     if record.oid != self.oid])


class Nothing(Convert):
    layer = Processes

    def test_nothing_can_be_read(self):
        self.change('number', 1)
        for wrong in b'FS21', b'FS21' + bytes(100):
            self.path.write_bytes(wrong)
            copy = f'file://{self.here}/copy.fs?blob-dir={self.here}/copied'
            status, _, err = self.told(self.path, copy, '--skip-damaged')
            self.assertEqual(status, 2)
            self.assertIn('has no transaction that can be read', err.splitlines()[-1])
        with self.assertRaises(FileNotFoundError):
            SalvagedFileStorage(str(self.here / 'nothing.fs'), '', print)


cases(globals(), Odd, Dangling, backends=BACKENDS)
cases(globals(), Damaged, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Convert, Damaged, Dangling, Odd
