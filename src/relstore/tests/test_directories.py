"""Where the temporary files of a run are."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from relstore.tests.support import directories


class Directories(unittest.TestCase):

    def setUp(self):
        here = tempfile.TemporaryDirectory()
        self.addCleanup(here.cleanup)
        self.memory = Path(here.name)
        for patched in (mock.patch.object(directories, 'MEMORY', self.memory), mock.patch.dict(os.environ),
                        mock.patch.object(directories, 'ROOM_BYTES', 0), mock.patch.object(tempfile, 'tempdir', None),
                        mock.patch.object(sys, 'argv', ['test']), mock.patch.object(directories, 'THOROUGH', False)):
            patched.start()
            self.addCleanup(patched.stop)
        os.environ.pop('TMPDIR', None)

    def test_in_memory(self):
        with mock.patch('atexit.register') as register:
            directories.begin()
        [directory] = self.memory.iterdir()
        self.assertEqual(tempfile.gettempdir(), str(directory))
        self.assertEqual(os.environ['TMPDIR'], str(directory))
        self.assertNotEqual(directories.disk(), str(directory))
        [(end, process, path), _] = register.call_args
        end(process + 1, path)
        self.assertTrue(directory.exists())
        end(process, path)
        self.assertFalse(directory.exists())

    def test_on_the_disk(self):
        """Where it is asked for, where there is no room, and in the process of a layer, which is told the place."""
        for name, patched in {
                'asked': mock.patch.dict(os.environ, TMPDIR='/var/tmp'),
                'thorough': mock.patch.object(directories, 'THOROUGH', True),
                'layer': mock.patch.object(sys, 'argv', ['test', '--resume-layer', 'x']),
                'room': mock.patch.object(directories, 'ROOM_BYTES', 1 << 60),
                'none': mock.patch.object(directories, 'MEMORY', self.memory / 'none')}.items():
            with self.subTest(name), patched:
                directories.begin()
                self.assertEqual(list(self.memory.iterdir()), [])

    def test_what_a_killed_run_has_left(self):
        ended = subprocess.Popen([sys.executable, '-c', ''])
        ended.wait()
        for process in ended.pid, os.getpid():
            (self.memory / f'{directories.PREFIX}{process}-x').mkdir()
        (self.memory / 'others').mkdir()
        with mock.patch('atexit.register'):
            directories.begin()
        self.assertEqual(len(list(self.memory.glob(f'{directories.PREFIX}{os.getpid()}-*'))), 2)
        self.assertFalse(list(self.memory.glob(f'{directories.PREFIX}{ended.pid}-*')))
        self.assertTrue((self.memory / 'others').exists())
