"""The benchmarks run, on files alone and with tiny sizes: what they measure is not for tests."""

import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

from relstore.tests.support.layers import Processes
from relstore.tests.support.servers import cannot_run

PROJECT = pathlib.Path(__file__).resolve().parents[3]
PARTS = ('speed', 'reading', 'commit', 'occupancy', 'blobs', 'convert', 'pack', 'memory')
SECONDS = 120  # far more than it takes


class BenchmarksLayer:
    """One run, for all tests that look at its results."""

    @classmethod
    def setUp(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.directory = pathlib.Path(cls.temporary.name)
        if (PROJECT / 'benchmarks').is_dir():
            cls.output = run('benchmarks.run', '--smoke', '--only', *PARTS, '--out', cls.temporary.name)

    @classmethod
    def tearDown(cls):
        cls.temporary.cleanup()


class Smoke(unittest.TestCase):
    layer = BenchmarksLayer

    def setUp(self):
        if not (PROJECT / 'benchmarks').is_dir():
            self.skipTest('the benchmarks are not installed with the package')
        self.data = json.loads((self.layer.directory / 'figures.json').read_text('utf-8'))

    def figures(self, part, storage):
        return [row for row in self.data['figures'] if row['part'] == part and storage in row['values']]

    def test_every_part_measures_or_says_why_not(self):
        self.assertEqual(list(self.data['seconds']), list(PARTS))
        for part in PARTS:
            for storage in ('relstore SQLite', 'FileStorage'):
                with self.subTest(part, storage=storage):
                    reasons = [row['reason'] for row in self.data['absent'] if row['part'] == part]
                    self.assertTrue(self.figures(part, storage) or reasons)
        for part in ('speed', 'reading', 'commit', 'occupancy', 'blobs', 'convert'):
            self.assertTrue(self.figures(part, 'relstore SQLite'), part)

    def test_every_figure_has_a_unit_and_says_what_is_better(self):
        for row in self.data['figures']:
            with self.subTest(row=row):
                self.assertTrue(row['unit'])
                self.assertIn(row['better'], ('more', 'less'))
                self.assertTrue(row['values'])
                for values in row['values'].values():
                    self.assertEqual(len(values), len(row['at']))

    def test_figures_have_four_digits(self):
        """More would be noise, and the file is committed."""
        values = [value for row in self.data['figures'] for line in row['values'].values() for value in line]
        self.assertEqual([value for value in values if value is not None and float(f'{value:.4g}') != value], [])

    def test_concurrent_clients_are_measured(self):
        at = {(row['x'], at) for row in self.figures('commit', 'relstore SQLite') for at in row['at']}
        self.assertEqual(at, {('objects', 1), ('objects', 10), ('processes', 1), ('processes', 2)})

    def test_read_ahead_is_measured_beside_its_absence(self):
        statements = {
            name: {row['panel']: row['values'][name][0] for row in self.figures('reading', name)
                   if 'statements' in row['unit']}
            for name in ('relstore SQLite', 'relstore SQLite, without read-ahead')
        }
        ours, without = statements.values()
        self.assertLess(ours['iterated'], without['iterated'] / 5)
        self.assertEqual(ours['oids at random'], without['oids at random'])

    def test_ratios_and_settings_are_there(self):
        compared = set(re.findall(r'(?m)^  .*: (\S.* / \S.*) = \S+ \(', self.layer.output))
        without = 'relstore SQLite, without read-ahead'
        self.assertEqual(compared, {'relstore SQLite / FileStorage', f'relstore SQLite / {without}'})
        self.assertIn('synchronous', self.data['settings']['durability'])
        self.assertTrue(self.data['machine']['processor'])

    def test_the_page_stands_alone(self):
        run('benchmarks.page', str(self.layer.directory))
        page = (self.layer.directory / 'index.html').read_text('utf-8')
        self.assertIn('</html>', page)
        self.assertGreater(page.count('<svg'), 3)
        for link in ('src="', 'href="http', '<link', '@import'):
            self.assertNotIn(link, page)
        drawn = re.findall('(?s)<svg.*?</svg>', page)
        for svg in drawn:
            ElementTree.fromstring(svg)         # well-formed
        self.assertNotIn('nan', ''.join(drawn))
        for row in self.data['figures']:
            if row['charted']:
                self.assertIn(f'>{html.escape(row["panel"])}', page)


class Committed(unittest.TestCase):
    """The page in the project: made of its figures, small, and what README.txt tells of it."""
    layer = Processes

    directory = PROJECT / 'docs' / 'benchmarks'

    def setUp(self):
        if not self.directory.is_dir() or not (PROJECT / 'benchmarks').is_dir():
            cannot_run(self, 'the benchmarks and their page are not installed with the package', excused=True)

    def test_it_is_small(self):
        sizes = [path.stat().st_size for path in self.directory.iterdir()]
        self.assertEqual(len(sizes), 2)
        self.assertLess(sum(sizes), 300_000)

    def test_it_is_made_of_its_figures(self):
        with tempfile.TemporaryDirectory() as copy:
            shutil.copy(self.directory / 'figures.json', copy)
            run('benchmarks.page', copy)
            page = (pathlib.Path(copy) / 'index.html').read_bytes()
        self.assertTrue(page == (self.directory / 'index.html').read_bytes(),
                        'another page is made of these figures: python -m benchmarks.page docs/benchmarks')

    def test_the_table_in_readme(self):
        table = run('benchmarks.summary', str(self.directory))
        self.assertIn(table.strip(), (PROJECT / 'README.txt').read_text('utf-8'))


def run(module: str, *arguments: str) -> str:
    """Run a module in the project's directory and return what it printed; fail with it if it fails."""
    environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}  # buildout's eggs too
    done = subprocess.run(
        [sys.executable, '-m', module, *arguments], cwd=PROJECT, env=environment, timeout=SECONDS,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f'{module} failed:\n{done.stdout}')
    return done.stdout
