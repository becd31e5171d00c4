"""A Data.fs that is damaged, or written meanwhile: all of it is read, or a sentence tells where that ends."""
import os
import re
import tempfile
import unittest
from bisect import bisect_right
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import transaction
from persistent.mapping import PersistentMapping
from zc.zlibstorage import ZlibStorage
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.FileStorage.FileStorage import FileIterator
from ZODB.FileStorage.format import DATA_HDR_LEN
from ZODB.POSException import POSKeyError
from ZODB.utils import p64, u64, z64

from relstore.converting.current import Current, Until
from relstore.converting.filestorage import LiveFileStorage
from relstore.converting.salvage import SalvagedFileStorage
from relstore.errors import ConfigurationError, StorageError
from relstore.tests.support.layers import Processes


def told(transactions):
    """Return all that an iterator tells."""
    return [(each.tid, each.status, each.user, each.description, each.extension_bytes,
             [(record.oid, record.tid, record.data, record.data_txn) for record in each]) for each in transactions]


class Suite(unittest.TestCase):
    """A site in `self.path`, of which `self.good` is the file, `self.there` what is in it."""
    layer = Processes

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = str(Path(directory.name) / 'Data.fs')
        self.blobs = str(Path(directory.name) / 'blobs')
        for number in range(6):
            self.change(number)
        with closing(DB(self.filestorage())) as db:
            for _ in range(2):
                manager = transaction.TransactionManager()
                db.undo(db.undoInfo(0, 1)[0]['id'], manager.begin())
                manager.commit()
        self.change('last')
        self.good = Path(self.path).read_bytes()
        with closing(FileIterator(self.path)) as transactions:
            self.there = told(transactions)
        self.begins = self.positions()

    def filestorage(self, blobs=None):
        return FileStorage(self.path, blob_dir=blobs)

    def change(self, value):
        with closing(DB(self.filestorage())) as db, db.transaction() as connection:
            connection.root()['value'] = value

    def write(self, data):
        Path(self.path).write_bytes(data)

    def positions(self):
        """Return where each transaction begins, and the end."""
        begins = [4]
        while begins[-1] < len(self.good):
            begins.append(begins[-1] + u64(self.good[begins[-1] + 8:begins[-1] + 16]) + 8)
        return begins

    def records(self, number):
        """Return where the first record of a transaction begins."""
        begin = self.begins[number]
        return begin + 23 + sum(int.from_bytes(self.good[begin + 17 + at:begin + 19 + at], 'big') for at in (0, 2, 4))


class Reading(Suite):

    def opened(self):
        storage = LiveFileStorage(self.path)
        self.addCleanup(storage.close)
        return storage

    def refused(self, pattern=r'Data\.fs is damaged at byte \d+: '):
        with self.assertRaisesRegex(StorageError, pattern):
            told(self.opened().iterator())

    def test_as_zodb_reads_it(self):
        self.assertEqual(told(self.opened().iterator()), self.there)
        tids = [each[0] for each in self.there]
        for position, tid in enumerate(tids):
            for start, first in (tid, position), (p64(u64(tid) + 1), position + 1), (p64(u64(tid) - 1), position):
                self.assertEqual(told(self.opened().iterator(start)), self.there[first:])
            self.assertEqual(told(self.opened().iterator(None, tid)), self.there[:position + 1])
            self.assertEqual(told(self.opened().iterator(tid, tid)), [self.there[position]])

    def test_cut_short(self):
        """Anywhere in its last transaction: that was complete."""
        begin = self.begins[-2]
        for end in range(begin + 1, len(self.good)):
            self.write(self.good[:end])
            with self.subTest(end - begin):
                self.refused(f'damaged at byte {begin}: a transaction cannot be read there')
        self.write(self.good[:begin])
        self.assertEqual(told(self.opened().iterator()), self.there[:-1])

    def test_zeros_at_the_end(self):
        """As a file system leaves them after a crash."""
        for count in 1, 8, 23, 300:
            self.write(self.good + bytes(count))
            self.refused(f'damaged at byte {len(self.good)}: a transaction cannot be read there')

    def test_garbage_in_the_middle(self):
        """Of any transaction, with an index and without, which has ZODB look at all of it."""
        index = Path(self.path + '.index').read_bytes()
        for number, begin in enumerate(self.begins[:-1]):
            for at in begin, begin + 16, self.records(number) + 24, self.begins[number + 1] - 8:
                self.write(self.good[:at] + b'\x80garbage' + self.good[at + 8:])
                for indexed in True, False:
                    with self.subTest(number=number, at=at - begin, indexed=indexed):
                        if indexed:
                            Path(self.path + '.index').write_bytes(index)
                        else:
                            os.unlink(self.path + '.index')
                        self.refused('its tid makes no sense' if at == begin else
                                     'damaged at byte|cannot be read as a FileStorage')

    def test_another_tid(self):
        """One that might be right cannot be told from one that is: nothing is left out."""
        for begin in self.begins[:-1]:
            self.write(self.good[:begin] + b'\x01garbage' + self.good[begin + 8:])
            self.assertEqual(len(told(self.opened().iterator())), len(self.there))

    def test_a_record_refers_to_nothing(self):
        number = len(self.begins) - 3       # that was undone
        pointer = self.records(number) + DATA_HDR_LEN
        back = u64(self.good[pointer:pointer + 8])
        self.assertIn(back, [self.records(other) for other in range(number)])
        own = self.records(number)
        for to in 1, 5, back + 1, own, own - 1, self.records(number + 1), len(self.good) + 1, (1 << 63) - 1:
            self.write(self.good[:pointer] + p64(to) + self.good[pointer + 8:])
            with self.subTest(to):
                self.refused(f'damaged at byte {own}: no record can be read there')

    def test_a_record_of_another_object_is_referred_to(self):
        number = len(self.begins) - 3
        pointer = self.records(number) + DATA_HDR_LEN
        back = u64(self.good[pointer:pointer + 8])
        self.write(self.good[:back] + p64(77) + self.good[back + 8:])
        self.refused()

    def test_tids_that_do_not_rise(self):
        """A greater one than the last is not the end. From anywhere it goes on as if it had begun at the beginning."""
        far = p64(u64(self.there[-1][0]) + (1 << 40))
        at = self.begins[3]
        self.write(self.good[:at] + far + self.good[at + 8:])
        storage = self.opened()
        tids = [each[0] if number != 3 else far for number, each in enumerate(self.there)]
        with self.assertLogs('relstore', 'WARNING') as logged:
            rising = [each[0] for each in told(storage.iterator())]
        self.assertIn(f'not after that of the one before: {len(tids) - 4}. Each was moved', logged.output[0])
        self.assertEqual(rising, sorted(set(rising)))
        self.assertEqual(rising[:4], tids[:4])
        self.assertEqual(storage.lastTransaction(), rising[-1])
        for number, tid in enumerate(rising):
            for start, first in (tid, number), (p64(u64(tid) + 1), number + 1):
                found = told(storage.iterator(start))
                self.assertEqual([each[0] for each in found], rising[first:])
                self.assertEqual([each[1:] for each in found], [each[1:] for each in self.there[first:]])
            self.assertEqual([each[0] for each in told(storage.iterator(None, tid))], rising[:number + 1])

    def test_a_file_that_grows_after_tids_that_do_not_rise(self):
        """What was found before is not forgotten, and what comes adds to it."""
        at = self.begins[3]
        self.write(self.good[:at] + p64(u64(self.there[-1][0]) + (1 << 20)) + self.good[at + 8:])
        with self.assertLogs('relstore', 'WARNING'):
            self.assertFalse(self.opened().rises)
        count = LiveFileStorage._scan(self.opened()).risen_ones
        self.assertEqual(count, len(self.there) - 4)
        self.change('more')
        self.assertFalse(self.opened().rises)
        count = max(count, LiveFileStorage._scan(self.opened()).risen_ones)
        grown = Path(self.path).read_bytes()
        end = len(grown)
        self.change('again')
        data = Path(self.path).read_bytes()
        self.write(data[:end] + self.there[0][0] + data[end + 8:])
        with self.assertLogs('relstore', 'WARNING') as logged:
            self.assertEqual(LiveFileStorage._scan(self.opened()).risen_ones, count + 1)
        self.assertIn('not after that of the one before: 1.', logged.output[0])

    def test_a_file_that_grows_is_looked_at_once(self):
        """And again if it is another one of the same inode."""
        tid = self.there[-1][0]
        self.opened().iterator(tid)
        self.change('more')
        [old, new] = told(self.opened().iterator(tid))
        self.assertEqual(old[0], tid)
        grown, at = Path(self.path).read_bytes(), self.begins[3]
        falling = self.good[:at] + p64(u64(tid) + 1) + self.good[at + 8:]
        last = p64(u64(new[0]) + 1)
        for other in falling, falling + last + grown[len(self.good) + 8:]:
            self.write(grown)
            self.opened().iterator(tid)
            self.write(other)
            self.assertEqual(next(self.opened().iterator(tid)).tid, p64(u64(tid) + 1))

    def test_while_its_site_commits(self):
        """What is voted is not there yet, what is finished is not there for who has opened it before."""
        site = self.filestorage()
        self.addCleanup(site.close)
        before = self.opened()
        for ends in site.tpc_abort, site.tpc_finish:
            meta = TransactionMetaData()
            site.tpc_begin(meta)
            site.store(z64, site.load(z64)[1], b'x' * 100_000, '', meta)
            site.tpc_vote(meta)
            self.assertGreater(os.path.getsize(self.path), len(self.good))
            during = self.opened()
            self.assertEqual(told(during.iterator(self.there[-1][0])), self.there[-1:])
            ends(meta)
            for storage in before, during:
                self.assertEqual(told(storage.iterator()), self.there)
        self.assertEqual(len(told(self.opened().iterator())), len(self.there) + 1)

    def test_while_it_is_packed(self):
        """What was opened is read to its end."""
        storage = self.opened()
        transactions = storage.iterator()
        first = next(transactions)
        with closing(DB(self.filestorage())) as db:
            db.pack()
        self.assertLess(os.path.getsize(self.path), len(self.good))
        self.assertEqual(told([first, *transactions]), self.there)
        self.assertEqual(told(storage.iterator(self.there[1][0])), self.there[1:])
        self.assertEqual(storage.loadBefore(z64, self.there[1][0])[0], self.there[0][-1][0][2])

    def test_a_source_that_just_ends(self):
        """As ZODB's own iterator does, say behind a ZEO server."""
        at = self.begins[4]
        self.write(self.good[:at - 8] + b'\x80garbage' + self.good[at:])
        storage = FileStorage(self.path, read_only=True)
        self.addCleanup(storage.close)
        last = self.there[-1][0]
        self.assertEqual(len(told(storage.iterator())), 3)
        for view in Until, Current:
            with self.assertRaisesRegex(StorageError, 'The source ends in the middle: '):
                told(view(storage, last).iterator())
            self.assertEqual(told(view(storage, last).iterator(p64(u64(last) + 1))), [])
        self.assertEqual(len(told(Until(storage, last).iterator(None, self.there[1][0]))), 2)
        self.assertEqual(len(told(Until(storage, p64(u64(last) + 1)).iterator())), 3)     # nothing is known of it

    def test_what_is_current(self):
        """By the place of its record, or by what the storage loads: the same, also where objects are gone."""
        with closing(DB(self.filestorage())) as db:
            for n in range(3):
                with db.transaction() as connection:
                    connection.root()[n] = PersistentMapping(n=n)
            manager = transaction.TransactionManager()
            db.undo(db.undoInfo(0, 1)[0]['id'], manager.begin())        # of a creation
            manager.commit()
            storage, metadata = db.storage, TransactionMetaData()
            oid = p64(2)
            tid = storage.load(oid)[1]
            storage.tpc_begin(metadata)
            storage.deleteObject(oid, tid, metadata)
            storage.tpc_vote(metadata)
            storage.tpc_finish(metadata)
        with closing(LiveFileStorage(self.path)) as quick, closing(FileStorage(self.path, read_only=True)) as other:
            last = quick.lastTransaction()
            slow = Current(other, last)
            tids = [transaction.tid for transaction in quick.iterator()]
            found = told(Current(quick, last).iterator())
            self.assertEqual(found, told(slow.iterator()))
            self.assertEqual(sum(len(records) for *_, records in found), 4)
            for tid in tids:
                self.assertEqual(told(Current(quick, last).iterator(tid)), told(slow.iterator(tid)))
            self.assertLess(len(found), len(tids))
            before = Current(quick, tids[3])
            self.assertEqual(told(before.iterator())[-1][0], tids[3])

class Salvaging(Suite):
    """What can be read is read, and what cannot is named, wherever the damage is."""

    def setUp(self):
        super().setUp()
        self.left_out = []

    def salvaged(self, data):
        self.write(data)
        storage = SalvagedFileStorage(self.path, '', self.left_out.append)
        self.addCleanup(storage.close)
        return storage

    def pieces(self):
        """Return the places of the file that are told to be left out."""
        found = (re.search(r'Data\.fs: ([\d,]+) bytes from byte (\d+) on', what) for what in self.left_out)
        return {(int(match[2]), int(match[2]) + int(match[1].replace(',', ''))) for match in found}

    def test_nothing_is_damaged(self):
        storage = self.salvaged(self.good)
        self.assertEqual(told(storage.iterator()), self.there)
        self.assertEqual(told(storage.iterator(self.there[2][0], self.there[5][0])), self.there[2:6])
        self.assertEqual(storage.lastTransaction(), self.there[-1][0])
        self.assertEqual(self.left_out, [])

    def test_garbage_anywhere(self):
        """All other transactions are there; and of this one its other records, unless it is its header."""
        for at in range(self.begins[1], len(self.good) - 20, 7):
            number = bisect_right(self.begins, at) - 1
            if at + 20 > self.begins[number + 1]:
                continue        # two transactions
            self.left_out.clear()
            damaged = self.good[:at] + b'\xff\xfe garbage \xff' + self.good[at + 12:]
            with self.subTest(number=number, at=at - self.begins[number]):
                found = {each[0]: each for each in told(self.salvaged(damaged).iterator())}
                expected = {each[0]: each for each in self.there}
                tid = self.there[number][0]
                missing = expected.keys() - found.keys()
                self.assertLessEqual(missing, {tid})
                others = [other for other in expected.keys() - {tid} if found[other] != expected[other]]
                # An undone one refers to the data of an earlier one.
                self.assertLessEqual(set(others), {each[0] for each in self.there[7:9]})
                if missing:
                    self.assertIn((self.begins[number], self.begins[number + 1]), self.pieces())
                elif len(found[tid][-1]) < len(expected[tid][-1]):
                    self.assertTrue(self.pieces())

    def test_of_many_records_one(self):
        with closing(DB(self.filestorage())) as db, db.transaction() as connection:
            for number in range(9):
                connection.root()[number] = PersistentMapping(text=f'{number}' * 100)
        self.good = Path(self.path).read_bytes()
        begin = self.positions()[-2]
        at = self.good.index(b'4' * 100)
        record = self.good.rindex(p64(begin), 0, at) - 24
        after = self.good.index(p64(begin), at) - 24
        for place, plen in (record + 24, None), (record + 34, b'\xff' * 8), (record + 34, p64(3)):
            with self.subTest(place - record):
                self.left_out.clear()
                storage = self.salvaged(self.good[:place] + (plen or b'\xff' * 8) + self.good[place + 8:])
                records = {read.oid: read for read in list(storage.iterator())[-1]}
                self.assertEqual(len(records), 9)
                self.assertIn(b'5' * 100, b''.join(read.data for read in records.values()))
                self.assertEqual(self.pieces(), {(record, after)})

    def test_its_second_length(self):
        """Where only that is wrong nothing is left out."""
        for end in self.begins[1:]:
            storage = self.salvaged(self.good[:end - 8] + b'\xffgarbage' + self.good[end:])
            self.assertEqual(told(storage.iterator()), self.there)
        self.assertEqual(self.left_out, [])

    def test_cut_short(self):
        begin = self.begins[-2]
        for end in range(begin + 1, len(self.good)):
            self.left_out.clear()
            found = told(self.salvaged(self.good[:end]).iterator())
            self.assertEqual(found, self.there[:-1])
            self.assertEqual(self.pieces(), {(begin, end)})

    def test_a_data_fs_within(self):
        """What somebody has stored is no part of the file."""
        self.change(self.good)
        data = Path(self.path).read_bytes()
        begin = self.positions()[-1]        # of the last one, as the old file ended there
        found = told(self.salvaged(data[:begin + 16] + b'\xff' + data[begin + 17:]).iterator())
        self.assertEqual(found, self.there)
        self.assertEqual(self.pieces(), {(begin, len(data))})

    def test_a_status_that_is_none_yet(self):
        """Where something follows, it is no transaction that a site is writing: strictly that is an error."""
        for number, begin in enumerate(self.begins[:-2]):
            damaged = self.good[:begin + 16] + b'c' + self.good[begin + 17:]
            with self.subTest(number):
                self.left_out.clear()
                self.assertEqual(told(self.salvaged(damaged).iterator()),
                                 [each for other, each in enumerate(self.there) if other != number])
                self.assertEqual(self.pieces(), {(begin, self.begins[number + 1])})
                with self.assertRaisesRegex(StorageError, 'damaged at'), closing(LiveFileStorage(self.path)) as strict:
                    told(strict.iterator())
        for tail in b'c' * 3000, b'c' * 30:
            self.left_out.clear()
            self.assertEqual(told(self.salvaged(self.good + tail).iterator()), self.there)
            self.assertEqual(self.pieces(), {(len(self.good), len(self.good) + len(tail))})
            with self.assertRaisesRegex(StorageError, 'damaged at'):
                LiveFileStorage(self.path).close()

    def test_a_transaction_behind_what_looks_like_one(self):
        """The two overlap: the last bytes of what is damaged, and the tid that follows, might be a header."""
        begin, end, behind = self.begins[3:6]
        data = bytearray(self.good)
        data[begin:begin + 8] = b'\xff' * 8
        data[end - 2:end], data[end + 6] = bytes(2), ord(' ')
        transactions = list(self.salvaged(bytes(data)).iterator())
        self.assertEqual([transaction.position for transaction in transactions],
                         [each for each in self.begins[:-1] if each != begin])
        self.assertEqual(self.pieces(), {(begin, end)})

    def test_a_record_behind_what_looks_like_one(self):
        """Its oid is the position of its transaction, as if that belonged to what is before it."""
        begin = len(self.good)
        with closing(self.filestorage()) as site:
            meta = TransactionMetaData()
            site.tpc_begin(meta)
            for oid in p64(77), p64(begin):
                site.store(oid, z64, b'no pickle' * 20, '', meta)
            site.tpc_vote(meta)
            site.tpc_finish(meta)
        data = Path(self.path).read_bytes()
        first, second = (data.index(oid + data[begin:begin + 8]) for oid in (p64(77), p64(begin)))
        *_, last = self.salvaged(data[:first + 34] + b'\xff' * 8 + data[first + 42:]).iterator()
        self.assertEqual([record.oid for record in last], [p64(begin)])
        self.assertEqual(self.pieces(), {(first, second)})

    def test_one_that_was_undone_behind_the_damage(self):
        """It was not to be seen, so it is not told to be left out either."""
        begin, undone, behind = self.begins[1:4]
        data = bytearray(self.good)
        data[begin:begin + 8], data[undone + 16] = b'\xff' * 8, ord('u')
        found = told(self.salvaged(bytes(data)).iterator())
        self.assertEqual(found[1:], self.there[3:])
        self.assertEqual(self.pieces(), {(begin, undone)})

    def test_tids_of_no_time(self):
        for begin, end in pairwise(self.begins):
            self.left_out.clear()
            found = told(self.salvaged(self.good[:begin] + b'\xff' * 8 + self.good[begin + 8:]).iterator())
            self.assertEqual(len(found), len(self.there) - 1)
            self.assertEqual(self.pieces(), {(begin, end)})

    def test_a_length_that_takes_others_in(self):
        """Also where it ends where another record does."""
        with closing(DB(self.filestorage())) as db, db.transaction() as connection:
            for number in range(6):
                connection.root()[number] = PersistentMapping(text=f'{number}' * 100)
        self.good = Path(self.path).read_bytes()
        begin, end = self.positions()[-2:]
        records = [at for at in range(begin, end) if self.good[at + 24:at + 32] == p64(begin)]
        self.assertEqual(len(records), 7)
        for number, record in enumerate(records[:-1]):
            plen = u64(self.good[record + 34:record + 42])
            for more in 1, 50, *(after - records[number + 1] for after in records[number + 2:]):
                self.left_out.clear()
                storage = self.salvaged(self.good[:record + 34] + p64(plen + more) + self.good[record + 42:])
                found = [read.oid for read in list(storage.iterator())[-1]]
                self.assertEqual((len(found), self.pieces()), (6, {(record, records[number + 1])}), more)

    def test_a_hole_over_two_transactions(self):
        """Of the first all records before it are there, of the second all behind it, if its header is."""
        with closing(DB(self.filestorage())) as db:
            for _ in range(2):
                with db.transaction() as connection:
                    for number in range(9):
                        connection.root()[number] = PersistentMapping(text=f'{number}' * 100)
        self.good = Path(self.path).read_bytes()
        middle = self.positions()[-2]
        storage = self.salvaged(self.good[:middle - 200] + bytes(200) + self.good[middle:])
        *_, first, second = told(storage.iterator())
        self.assertEqual(len(second[-1]), 10)
        self.assertGreater(len(first[-1]), 6)
        self.left_out.clear()
        storage = self.salvaged(self.good[:middle - 200] + bytes(400) + self.good[middle + 200:])
        [*_, first] = told(storage.iterator())
        self.assertGreater(len(first[-1]), 6)
        self.assertEqual(sum(end - begin for begin, end in self.pieces()) > 1000, True)

    def test_what_zlibstorage_has_written(self):
        """A record before a damaged one is right if it ends where its compressed data does."""
        with closing(DB(ZlibStorage(self.filestorage()))) as db, db.transaction() as connection:
            for number in range(6):
                connection.root()[number] = PersistentMapping(text=f'{number}' * 1000)
        data = Path(self.path).read_bytes()
        self.good = data
        begin, end = self.positions()[-2:]
        records = [at for at in range(begin, end) if data[at + 24:at + 32] == p64(begin)]
        damaged = records[3]
        storage = self.salvaged(data[:damaged + 24] + b'\xff' * 8 + data[damaged + 32:])
        self.assertEqual(len(list(list(storage.iterator())[-1])), len(records) - 1)
        self.assertEqual(self.pieces(), {(damaged, records[4])})

    def test_its_site_is_writing(self):
        site = self.filestorage()
        self.addCleanup(site.close)
        meta = TransactionMetaData()
        site.tpc_begin(meta)
        site.store(z64, site.load(z64)[1], b'x' * 100_000, '', meta)
        site.tpc_vote(meta)
        storage = SalvagedFileStorage(self.path, '', self.left_out.append)
        self.addCleanup(storage.close)
        self.assertEqual(told(storage.iterator()), self.there)
        self.assertEqual(self.left_out, [])
        site.tpc_abort(meta)

    def test_what_is_current(self):
        """Of an object of which the last record cannot be read that is the one before."""
        data, begin = self.good, self.records(len(self.there) - 1)
        storage = self.salvaged(data[:begin + 24] + b'\xff' * 8 + data[begin + 32:])
        last = storage.lastTransaction()
        root = next(record for record in self.there[-2][-1] if record[0] == z64)
        self.assertEqual(storage.loadBefore(z64, p64(u64(last) + 1))[:2], (root[2], root[1]))
        first = self.there[0][-1][0]
        self.assertEqual(storage.loadBefore(z64, self.there[1][0])[:2], (first[2], first[1]))
        with self.assertRaises(POSKeyError):
            storage.loadBefore(p64(99), p64(u64(last) + 1))
        with self.assertRaises(POSKeyError):
            storage.loadBefore(z64, self.there[0][0])
        [*_, current] = told(Current(storage, last).iterator())
        self.assertEqual(current[-1], self.there[-2][-1])

    def test_it_is_none(self):
        for data in b'', b'FS2', b'FS21', b'FS21' + bytes(300), b'\x7fELF' + self.good[4:]:
            with self.assertRaisesRegex(ConfigurationError, 'does not begin as|has no transaction'):
                self.salvaged(data)
