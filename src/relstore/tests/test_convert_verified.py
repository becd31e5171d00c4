"""zodbconvert --verify: differences that a copy may have, found by one process, and by several."""
import os
from contextlib import closing
from unittest import TestCase, mock

from persistent.mapping import PersistentMapping
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.utils import oid_repr, p64, u64

import relstore
from relstore.cli import convert, verifying
from relstore.cli.workers import in_processes
from relstore.converting import conversion
from relstore.converting.compare import Comparison
from relstore.converting.conversion import Conversion
from relstore.converting.filestorage import LiveFileStorage
from relstore.tests.support.backends import HISTORY_FREE, SQLiteHistoryPreserving, cases
from relstore.tests.support.converting import Convert
from relstore.tests.support.layers import Processes
from relstore.tests.support.sources import FIRST, Source, Transaction


class Verifying(Convert):
    """Differences that a copy may have."""
    layer = Processes
    options = '--jobs', '1'

    def setUp(self):
        super().setUp()
        self.fill()
        self.copy = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        self.works(self.path, self.copy)

    def told_differences(self):
        status, out, err = self.told('--verify-only', *self.options, self.path, self.copy)
        self.assertEqual((status, err), (1, ''))
        *lines, last = out.splitlines()
        self.assertTrue(last.startswith('The copy differs'))
        return lines

    def last(self):
        with closing(self.filestorage('copy')) as storage:
            return u64(storage.lastTransaction())

    def test_equal(self):
        self.assertIn('Compared: 12 transactions, 37 records and 2 blobs are equal',
                      self.works('--verify-only', *self.options, self.path, self.copy))

    def test_no_more_differences_than_are_told(self):
        data = (self.here / 'copy.fs').read_bytes()
        (self.here / 'copy.fs').write_bytes(data.replace(b'PersistentMapping', b'PersistentMappinG'))
        lines = self.told_differences()
        self.assertEqual(len(lines), verifying.DIFFERENCES)
        tids = [line.split()[1] for line in lines]
        self.assertEqual(tids, sorted(tids))

    def test_a_byte_of_a_record(self):
        data = bytearray((self.here / 'copy.fs').read_bytes())
        place = data.rindex(b'last')
        data[place] ^= 1
        (self.here / 'copy.fs').write_bytes(data)
        [line] = self.told_differences()
        self.assertRegex(line, r'^Transaction 0x\w+: object 0x00 has other bytes than in the source.$')

    def test_the_user(self):
        data = (self.here / 'copy.fs').read_bytes()
        (self.here / 'copy.fs').write_bytes(data.replace('me \xfc'.encode(), 'mo \xfc'.encode(), 1))
        [line] = self.told_differences()
        self.assertRegex(line, r"^Transaction 0x\w+: its user is b' mo .*', and was b' me .*'.$")

    def test_blobs(self):
        """One is shorter, one of the same length has other bytes, and one is gone."""
        self.change('more', b'third')
        self.works(self.path, self.copy)
        files = sorted((self.here / 'copy.blobs').rglob('*.blob'), key=lambda path: path.stat().st_size)
        for path in files:
            path.chmod(0o600)
        files[-1].write_bytes(files[-1].read_bytes()[:-1])
        files[0].write_bytes(b'smalL')
        files[1].unlink()
        lines = self.told_differences()
        told = [line.partition('blob ')[2].partition(' has ')[2] for line in sorted(lines)]
        self.assertEqual(sorted(told), ['no data in the copy.', 'other data in the copy.', 'other data in the copy.'])

    def test_the_status_and_what_extends_a_transaction(self):
        data = bytearray((self.here / 'copy.fs').read_bytes())
        data[4 + 16] = ord('p')
        data[data.rindex(b'extended')] ^= 1
        (self.here / 'copy.fs').write_bytes(data)
        first, second = self.told_differences()
        self.assertIn(": its status is 'p', and was ' '.", first)
        self.assertIn(': its extension_bytes is ', second)

    def test_a_transaction_is_missing(self):
        self.change('number', 'new')
        [line] = self.told_differences()
        self.assertIn(' was not copied', line)

    def test_a_transaction_too_many(self):
        os.rename(self.path, self.here / 'old.fs')
        with closing(FileStorage(str(self.path), blob_dir=str(self.blobs))) as site, \
                closing(LiveFileStorage(str(self.here / 'old.fs'), str(self.blobs))) as old:
            for number, each in enumerate(old.iterator()):
                if number == 3:
                    continue
                site.tpc_begin(each, each.tid, each.status)
                for record in each:
                    site.restore(record.oid, each.tid, record.data, '', None, each)
                site.tpc_vote(each)
                site.tpc_finish(each)
        line, *others = self.told_differences()
        self.assertRegex(line, r'^Transaction 0x\w+ is not in the source')
        for other in others:        # of ranges after it
            self.assertIn('has no data in the source', other)

    def test_what_is_newer_in_the_copy_is_no_difference(self):
        """It is in use already."""
        self.change('number', 'in use', self.filestorage('copy'))
        out = self.works('--verify-only', *self.options, self.path, self.copy)
        self.assertIn(' are equal', out)
        self.assertIn('The copy has 1 newer transaction, which was not compared', out)

    def test_the_description(self):
        data = (self.here / 'copy.fs').read_bytes()
        (self.here / 'copy.fs').write_bytes(data.replace(b'change folder', b'change FOLDER'))
        [line] = self.told_differences()
        self.assertIn(': its description is ', line)

    def test_blobs_of_the_source(self):
        """They are named, and there: else that is told, whatever the copy has."""
        for file in (*self.blobs.rglob('*.blob'), *(self.here / 'copy.blobs').rglob('*.blob')):
            file.unlink()
        lines = self.told_differences()
        self.assertEqual([line.partition(' has ')[2] for line in lines], 2 * ['no data in the source.'])
        os.rename(self.blobs, self.here / 'elsewhere')
        status, out, err = self.told('--verify-only', *self.options, self.path, self.copy)
        self.assertEqual((status, out), (2, ''))
        self.assertIn('name the directory that they are in', err)

    def test_as_of_a_time(self):
        """Each process compares what was there then."""
        tids = [each.tid for each in self.source().iterator()]
        with mock.patch.object(convert, 'tid_of_time', lambda text: tids[4]):
            copy = f'sqlite://{self.here}/then?blob-dir={self.here}/then.blobs'
            self.works(self.path, copy, '--at', 'then')
            self.assertIn('Compared: 5 transactions',
                          self.works('--verify-only', *self.options, self.path, copy, '--at', 'then'))


class InTheDatabase(Convert):
    """What was copied is in the database, and perhaps in files that are cached of it, which prove nothing."""

    def test_blobs_that_are_gone(self):
        self.fill()
        destination = self.config(f'blob-dir {self.here}/cache', 'blob-cache-fill-on-commit true')
        self.works(self.path, destination, '--verify')
        with closing(self.open_storage(blob_dir=str(self.here / 'cache'))) as storage:
            for change, told in (("UPDATE blob_chunk SET chunk = x'6f74686572'", 'other'),
                                 ('DELETE FROM blob_chunk', 'no')):
                storage.database.pool.attempt(lambda session, change=change: session.run(change))
                for options in (), ('--jobs', '2'):
                    status, out, _ = self.told('--verify-only', *options, self.path, destination)
                    self.assertEqual((status, out.count(f'has {told} data in the copy')), (1, 2), out)

    def test_what_a_process_cannot_open(self):
        """It is a sentence, as where one process compares."""
        self.fill()
        destination = self.config(f'blob-dir {self.here}/cache')
        self.works(self.path, destination)

        def parts(conversion, *others, real=verifying._parts):
            os.rename(self.path, self.here / 'moved.fs')
            return real(conversion, *others)

        with mock.patch.object(verifying, 'WORTH_BYTES', 0), mock.patch.object(verifying, '_parts', parts):
            status, _, err = self.told('--verify-only', '--jobs', '2', self.path, destination)
        self.assertEqual(status, 2)
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertIn('Data.fs', err)
        self.assertNotIn('died', err)


class InUse(Convert):
    """A copy without history, to which its site has committed: what has changed is not there any more as it was."""

    def setUp(self):
        super().setUp()
        self.fill()
        self.change('ends', PersistentMapping(n=1))
        self.destination = self.config(f'blob-dir {self.here}/cache')
        self.works(self.path, self.destination)

    def opened(self):
        return self.open_storage(blob_dir=str(self.here / 'cache'))

    def test_newer_transactions(self):
        self.assertNotIn('newer', self.works('--verify-only', self.path, self.destination))
        last = self.source().lastTransaction()
        self.change('number', 'newer', self.opened())
        self.change('blob', b'newer', self.opened())
        with closing(DB(self.opened())) as db:
            with db.transaction() as connection:
                for thing in connection.root()['folder'].values():      # all of a transaction but the folder
                    thing['n'] = 'newer'
                oid = connection.root()['ends']._p_oid
                connection.root()['ends']._p_activate()
                serial = connection.root()['ends']._p_serial
            meta = TransactionMetaData()
            db.storage.tpc_begin(meta)
            db.storage.deleteObject(oid, serial, meta)
            db.storage.tpc_vote(meta)
            db.storage.tpc_finish(meta)
            newer = sum(1 for _ in db.storage.iterator(p64(u64(last) + 1)))
        self.assertGreater(newer, 1)
        for options in ('--jobs', '1'), ('--jobs', '2'):
            with mock.patch.multiple(verifying, WORTH_BYTES=0), mock.patch.object(conversion, 'RANGE_TRANSACTIONS', 1):
                out = self.works('--verify-only', *options, self.path, self.destination)
            self.assertIn(f'The copy has {newer} newer transactions, which were not compared', out)
            self.assertRegex(out, r'Compared: [1-9]\d* transactions, .* are equal')

    def test_what_is_missing_is_so(self):
        """Though the copy is in use."""
        self.change('number', 'newer', self.opened())
        folder = next(u64(record.oid) for each in self.source().iterator() for record in each
                      if record.data and b'text' not in record.data and u64(record.oid) > 2)
        for table in ('current_object', 'object_state') if self.keep_history else ('object_state',):
            with closing(self.opened()) as storage:
                storage.database.pool.attempt(
                    lambda session, table=table: session.run(f'DELETE FROM {table} WHERE zoid = {folder}'))
        status, out, _ = self.told('--verify-only', self.path, self.destination)
        self.assertEqual(status, 1, out)
        self.assertIn(f'object {oid_repr(p64(folder))} was not copied', out)

    def test_its_source_goes_on_too(self):
        """What was copied is compared, not what is there by then."""
        site = f'sqlite://{self.here}/site?blob-dir={self.here}/site.blobs'
        self.works(self.path, site)
        verify, changed = convert._Command._verify, []

        def later(command, conversion):
            self.change('number', 'later', relstore.RelStore(relstore.SQLite(str(self.here / 'site')),
                                                             blob_dir=str(self.here / 'site.blobs')))
            changed.append(1)
            return verify(command, conversion)

        with mock.patch.object(convert._Command, '_verify', later):
            self.assertIn('are equal', self.works(site, self.destination, '--verify', '--clear', '--yes'))
        self.assertTrue(changed)


class VerifyingApart(Verifying):
    """The same, each transaction by itself, by two processes."""
    options = '--jobs', '2'

    def setUp(self):
        super().setUp()
        for where, name, value in (verifying, 'WORTH_BYTES', 0), (conversion, 'RANGE_TRANSACTIONS', 1):
            patched = mock.patch.object(where, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        self.begun = mock.patch.object(verifying, 'in_processes', side_effect=in_processes)
        self.in_processes = self.begun.start()
        self.addCleanup(self.begun.stop)

    def tearDown(self):
        self.assertTrue(self.in_processes.called)
        super().tearDown()


class Ends(TestCase):
    """Records without data: objects end there."""

    def differences(self, theirs, ours, **more):
        sources = [Source([Transaction(FIRST, [(9, data, None), (10, b'data', None)])]) for data in (theirs, ours)]
        return list(Comparison(*sources, **more).differences())

    def test_they_are_compared(self):
        for theirs, ours, count in (
                (None, None, 0), (None, b'data', 1), (b'data', None, 1), (None, b'', 1), (b'', None, 1)):
            differences = self.differences(theirs, ours)
            self.assertEqual(len(differences), count, (theirs, ours))
            self.assertTrue(all('object 0x09 has other bytes' in each for each in differences), differences)

    def test_without_history_nothing_has_an_end(self):
        self.assertEqual(self.differences(None, None, history=False), [])
        [one] = self.differences(b'data', None, history=False)
        self.assertIn('object 0x09 was not copied', one)
        [one] = self.differences(None, b'data', history=False)
        self.assertIn('object 0x09 is not in the source', one)


class Ranges(Convert):
    layer = Processes

    def test_they_hold_all_of_it_once(self):
        self.fill()
        source = self.source()
        tids = [each.tid for each in source.iterator()]
        copy = self.filestorage('copy')
        self.addCleanup(copy.close)
        for size in range(1, len(tids) + 2):
            with mock.patch.multiple(conversion, RANGE_TRANSACTIONS=size, RANGES_OF_A_SIZE=2, RANGE_DOUBLINGS=1):
                ranges = list(Conversion(source, copy).ranges())
            found = [[each.tid for each in source.iterator(*some)] for some in ranges]
            self.assertEqual(sum(found, []), tids)
            counts = [len(each) for each in found]
            self.assertEqual(counts[:-1], ([size] * 2 + [2 * size] * len(tids))[:len(counts) - 1])
            self.assertEqual((ranges[0][0], ranges[-1][1]), (None, tids[-1]))
            self.assertEqual([u64(start) for start, _ in ranges[1:]], [u64(stop) + 1 for _, stop in ranges[:-1]])

    def test_what_is_worth_other_processes(self):
        self.change('number', 1)
        copy = f'sqlite://{self.here}/copy?blob-dir={self.here}/copied'
        self.works(self.path, copy)
        for size, apart in (None, False), ((32 << 20) - 1, False), (32 << 20, True):
            getSize = LiveFileStorage.getSize if size is None else lambda storage, size=size: size
            with mock.patch.object(LiveFileStorage, 'getSize', getSize), mock.patch.object(
                    verifying, 'in_processes', side_effect=in_processes) as begun:
                self.assertIn('are equal', self.works('--verify-only', '--jobs', '2', self.path, copy))
            self.assertEqual(begun.called, apart, size)

    def test_what_is_compared_by_one_process(self):
        """What is in memory no other process sees; and of what keeps no history each range may be another state."""
        self.change('number', 1)
        memory = self.write('map.conf', '<demostorage>', '<filestorage>', f'path {self.path}', f'blob-dir {self.blobs}',
                            '</filestorage>', '</demostorage>')
        free = f'sqlite://{self.here}/free?keep-history=false&blob-dir={self.here}/cache'
        copy = f'sqlite://{self.here}/copy?blob-dir={self.here}/copied'
        self.works(self.path, free)
        with mock.patch.object(verifying, 'WORTH_BYTES', 0), mock.patch.object(verifying, 'in_processes') as apart:
            for source in memory, free:
                self.assertIn('are equal', self.works(source, copy, '--verify', '--clear', '--yes', '--jobs', '2'))
            self.assertFalse(apart.called)


cases(globals(), InTheDatabase, backends=(SQLiteHistoryPreserving,))
cases(globals(), InUse, backends=(SQLiteHistoryPreserving, *HISTORY_FREE))
del Convert, InTheDatabase, InUse
