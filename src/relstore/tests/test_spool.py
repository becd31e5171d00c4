"""What a transaction is going to store, in memory and in a file."""
import hashlib
from unittest import TestCase
from unittest.mock import patch

from relstore import spool
from relstore.references import references
from relstore.spool import Spool
from relstore.tests.support.records import state


class TestSpool(TestCase):

    def setUp(self):
        self.spool = self.opened()
        self.records = {oid: state('x' * oid) for oid in (7, 300, 2, 41)}

    def opened(self, digest=True) -> Spool:
        opened = Spool(lambda record: record, digest)
        self.addCleanup(opened.close)
        return opened

    def check(self, digest=True) -> None:
        """Compare all that is in it with the records: in lists, and one by one."""
        for limit, size in (1, 1), (1 << 20, 4):
            batches = list(self.spool.batches(limit))
            self.assertEqual({len(batch) for batch in batches}, {size})
            found = [(row.oid, row.held) for batch in batches for row in batch]
            self.assertEqual(found, sorted(self.records.items()))
        self.assertEqual([row.oid for row in self.spool.rows()], sorted(self.records))
        for oid, record in self.records.items():
            row = self.spool.get(oid)
            self.assertEqual((row.held, row.size, row.refs), (record, len(record), references(record)))
            self.assertEqual(row.md5, hashlib.md5(record).hexdigest() if digest else None)
        self.assertEqual(self.spool.size, sum(spool.ROW_BYTES + len(record) for record in self.records.values()))

    def test_wherever_it_is(self):
        for in_memory in (1 << 20, len(self.records[7]), 0):
            for digest in (True, False):
                with self.subTest(in_memory=in_memory, digest=digest), \
                        patch.object(spool, 'IN_MEMORY_BYTES', in_memory):
                    self.spool = self.opened(digest)
                    for oid, record in self.records.items():
                        self.spool.put(oid, 5, record)
                    in_file = [row.oid for row in self.spool if row.held is None]
                    self.assertEqual(len(in_file), {1 << 20: 0, 0: 4}.get(in_memory, 3))
                    self.check(digest)

    def test_the_newest_state_and_the_first_base(self):
        """Also where one is in the file and the other is not. What was replaced leaves its room in memory."""
        for oid, record in self.records.items():
            self.spool.put(oid, 5, record)
        room = sum(map(len, self.records.values()))
        for in_memory, letter in (0, 'a'), (room, 'b'), (room, 'c'), (0, 'd'), (room, 'e'):
            with patch.object(spool, 'IN_MEMORY_BYTES', in_memory):
                for oid in self.records:
                    self.records[oid] = state(letter * oid)
                    self.spool.put(oid, 6, self.records[oid])
            self.assertEqual({row.held is None for row in self.spool}, {in_memory == 0})
            self.assertEqual({row.base for row in self.spool}, {5})
            self.check()

    def test_a_deletion(self):
        self.spool.put(7, 5, self.records[7])
        self.spool.put(7, 5, None)
        [[row]] = self.spool.batches(100)
        self.assertEqual((row.oid, row.base, row.size, row.md5, row.refs, row.held), (7, 5, None, None, b'', None))
        self.assertEqual(self.spool.size, spool.ROW_BYTES)
