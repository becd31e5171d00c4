"""The file of a saved cache: what is damaged is not read."""
import errno
import logging
import os
import random
import resource
import stat
from unittest import mock

from relstore.caching import warmstart
from relstore.caching.proof import Known
from relstore.tests.support.children import in_child
from relstore.tests.support.layers import Models
from relstore.tests.support.saved import ROWS, Directory
from relstore.tests.support.world import get


class TheFile(Directory):
    layer = Models

    def test_what_was_saved_is_read(self):
        self.save(10, ROWS)
        cache = self.opened()
        self.assertEqual(cache.current(), (10, ROWS))
        self.assertEqual(cache.floor, 10)

    def test_it_is_its_owners_alone(self):
        directory = self.directory / 'made' / 'for it'
        self.save(10, ROWS, directory=directory)
        self.assertEqual(stat.S_IMODE(directory.stat().st_mode), 0o700)
        [file] = directory.iterdir()
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o600)

    def test_only_what_is_current_is_saved(self):
        cache = self.cache(10, ROWS)
        cache.advance(10, 20, [(3, 15), (4, 20)])
        cache.put(4, 20, b'new', 20)
        cache.put(5, 25, b'not polled yet', 25)
        self.warm(cache).save()
        expected = {row[0]: row for row in ROWS if row[0] not in (3, 5)} | {4: (4, 20, b'new')}
        self.assertEqual({row[0]: row for row in self.rows()}, expected)

    def test_what_is_used_comes_first(self):
        cache = self.cache(10, ROWS)
        get(cache, 7, 10), get(cache, 15, 10)
        self.warm(cache).save()
        self.assertEqual([oid for oid, _, _ in self.rows()][:3], [7, 15, 1])

    def test_every_bit_of_damage(self):
        """Never an error, never a wrong state, one warning; and what comes before it is used."""
        self.patch('BLOCK_BYTES', 100)
        self.save(10, ROWS)
        whole, truth = self.path.read_bytes(), set(ROWS)
        rnd = random.Random(1)
        used = []
        for kind in 'flip', 'cut', 'zero':
            for k in range(len(whole)):
                if kind == 'flip':
                    damaged = whole[:k] + bytes([whole[k] ^ 1 << rnd.randrange(8)]) + whole[k + 1:]
                elif kind == 'cut':
                    damaged = whole[:k]
                else:
                    damaged = whole[:k] + bytes(min(9, len(whole) - k)) + whole[k + 9:]
                if damaged == whole:
                    continue
                self.path.write_bytes(damaged)
                with self.subTest(kind, k=k):
                    found = []
                    warnings = self.warnings(lambda: found.extend(self.rows()))
                    self.assertEqual(len(warnings), 1, warnings)
                    self.assertIn(str(self.path), warnings[0])
                    self.assertLessEqual(set(found), truth)
                used.append(len(found))
        self.assertIn(0, used)
        self.assertIn(20, used)
        self.assertGreater(len(set(used)), 5)

    def test_nonsense(self):
        self.save(10, ROWS)
        whole = self.path.read_bytes()
        rnd = random.Random(2)
        body = warmstart.RECORD.pack(1, 1, 1000) + b'short'
        header = warmstart._header('name', 'epoch', Known(10, 10, []))
        for nonsense in (b'', b'relstore', rnd.randbytes(10_000), bytes(10_000), whole[::-1],
                         header + warmstart._block(b'no record'),
                         header + warmstart._block(body) + warmstart._block(b''),
                         header + warmstart.BLOCK.pack(0xFFFFFFFF, 0) + whole):
            self.path.write_bytes(nonsense)
            with self.subTest(nonsense[:100]):
                found = []
                warnings = self.warnings(lambda: found.extend(self.rows()))
                self.assertEqual(len(warnings), 1, warnings)
                self.assertEqual(found, [])

    def test_a_damaged_length_asks_for_no_memory(self):
        header = warmstart._header('name', 'epoch', Known(10, 10, []))
        self.path.write_bytes(header + warmstart.BLOCK.pack(0xFFFFFFFF, 0))
        self.path.chmod(0o600)
        warm = self.warm(self.cache())

        def work():
            resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
            self.assertEqual(len(self.warnings(lambda: warm.fill(1))), 1)

        in_child(self, work)

    def test_what_is_no_file(self):
        self.path.mkdir()
        self.assertIn('directory', self.warnings(self.opened)[0])
        self.path.rmdir()
        os.mkfifo(self.path)
        in_child(self, lambda: self.assertIn('it is not a file', self.warnings(self.opened)[0]))   # without waiting

    def test_a_directory_that_cannot_be_made_is_told_when_it_is_opened(self):
        self.path.touch()
        for directory in self.path, self.path / 'below':
            warm = self.warm(self.cache(), directory=directory)
            self.addCleanup(warm.close)
            [warning, *_] = self.warnings(warm.start)
            self.assertIn(f'cache-local-dir is {directory}, where nothing can be saved: ', warning)

    def test_no_file(self):
        with self.assertNoLogs('relstore', logging.INFO):
            self.assertEqual(self.rows(directory=self.directory / 'nothing there'), [])

    def test_of_another_database(self):
        self.save(10, ROWS, database='other')
        (self.directory / 'relstore-other.cache').rename(self.path)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows()))
        self.assertIn('another database', warning)
        self.assertEqual(found, [])

    def test_of_an_earlier_epoch(self):
        self.save(10, ROWS, epoch='before')
        with self.assertLogs('relstore', logging.INFO) as logs:
            self.assertEqual(self.rows(), [])
        self.assertEqual([record.levelname for record in logs.records], ['INFO'])

    def test_of_another_version(self):
        with mock.patch.object(warmstart, 'VERSION', 3):
            self.save(10, ROWS)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows()))
        self.assertIn('version 3', warning)
        self.assertEqual(found, [])

    def test_the_database_went_back(self):
        """The file is void, also when the database has passed it again."""
        self.save(10, ROWS)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows(last=9)))
        self.assertIn('went back', warning)
        self.assertEqual(found, [])
        self.assertEqual(self.rows(last=11), [])

    def test_the_database_went_back_and_nobody_may_remove_the_file(self):
        self.save(10, ROWS)
        with mock.patch.object(os, 'unlink', side_effect=OSError(errno.EACCES, 'by the test')):
            self.assertEqual(self.rows(last=9), [])

    def test_saved_by_another_while_it_is_opened(self):
        """A head that the database reached meanwhile is none that it went back from."""
        self.save(10, ROWS)
        with self.assertNoLogs('relstore', logging.WARNING):
            warm = self.warm(self.cache())
            asked = warm.head('epoch', lambda: self.save(20, ROWS) and 20, warm._proves)
        self.assertEqual(asked, 10)

    def test_others_may_write_it(self):
        self.save(10, ROWS)
        self.path.chmod(0o620)
        found = []
        [warning] = self.warnings(lambda: found.extend(self.rows()))
        self.assertIn('620', warning)
        self.assertEqual(found, [])

    def test_of_another_user(self):
        self.save(10, ROWS)
        if os.geteuid() == 0:
            os.chown(self.path, 12345, -1)
        for user in 54321, 0:       # root, too
            found = []
            with self.subTest(user), mock.patch.object(os, 'geteuid', return_value=user):
                [warning] = self.warnings(lambda: found.extend(self.rows()))
                self.assertIn('another user', warning)
                self.assertEqual(found, [])
