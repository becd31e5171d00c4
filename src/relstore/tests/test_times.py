"""The list of the slowest tests."""
import unittest

from relstore.tests.support import times

LINES = ['SQLite test_a.B.test_one 1.500', 'SQLite test_a.B.test_two 0.250',
         'UnitTests /a path/with blanks.txt 2.000', 'Processes test_a.B.test_one 0.250']


class Times(unittest.TestCase):

    def test_read(self):
        took = times.read(LINES)
        self.assertEqual(took['UnitTests', '/a path/with blanks.txt'], 2)
        self.assertEqual(took['SQLite', 'test_a.B.test_one'], 1.5)
        self.assertEqual(sum(took.values()), 4)

    def test_told(self):
        lines = times.summary(times.read(LINES)).splitlines()
        self.assertEqual(lines[0], 'The slowest of 4 tests, which took 4 s:')
        self.assertEqual(lines[1].split(), ['2.0', '/a', 'path/with', 'blanks.txt'])
        layers = [line.split() for line in lines[-3:]]
        self.assertEqual(layers, [['2', 'UnitTests'], ['2', 'SQLite'], ['0', 'Processes']])

    def test_table(self):
        table = times.table(times.read(LINES))
        self.assertIn('Of 4 tests these take 100% of the time.', table)
        self.assertIn('| 1.5 | <code>test_a.B.test_one</code> |\n| 0.2 |', table)
