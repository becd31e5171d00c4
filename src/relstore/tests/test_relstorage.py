"""RelStorage itself and relstore on one database: what one has packed, the other reads, writes and packs.

RelStorage runs in a process of its own, with the Python of RELSTORE_TEST_RELSTORAGE or else that of the benchmarks,
which `make .venv-bench/made` makes.
"""
import contextlib
import hashlib
import io
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest import TestCase
from unittest.mock import patch

import relstore
from relstore.cli import convert
from relstore.cli.main import main
from relstore.packing import pack
from relstore.tests.support.backends import Psycopg2HistoryFree, Psycopg2HistoryPreserving, cases
from relstore.tests.support.blob_commits import commit_blobs, pieces
from relstore.tests.support.objects import reachable
from relstore.tests.support.programs import PYTHON, Peer
from relstore.tests.support.servers import cannot_run

PATIENCE = 60       # seconds


class Together(TestCase):
    """A database that RelStorage made."""

    def setUp(self):
        super().setUp()
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        server, name = self.layer.server, f'relstorage_{"hp" if self.keep_history else "hf"}'
        self._where = server.create_database(name)
        self.addCleanup(server.drop_database, name)

    def peer(self, **options) -> Peer:
        peer = Peer()
        self.addCleanup(peer.end)
        self.assertRegex(peer.ask('version'), r'^4\.')
        peer.ask('open', where={'dsn': self._where}, keep_history=self.keep_history, **options)
        return peer


class Packed(Together):
    """It was written by RelStorage; it is packed by relstore, and by RelStorage again."""

    def test_packed_while_relstorage_writes(self):
        """A pack of its own was killed before, another one only prepared."""
        writer = self.peer()
        writer.ask('create')
        self.assertLess(self.peer().dies('die_while_packing', after=40), 0)
        self.peer().ask('pack', ago=0, prepack_only=True)
        with closing(relstore.RelStore(relstore.PostgreSQL(self._where), keep_history=self.keep_history)) as storage:
            self.assertEqual(storage.database.adapter.writers.who(), 'any')
            removed, until = 0, time.monotonic() + 4
            writer.tell('write', seconds=4)
            with patch.object(pack, 'PRESENT_SECONDS', 0):
                while time.monotonic() < until or removed <= 20 and time.monotonic() < until + PATIENCE:
                    removed += storage.pack(time.time() - 1).states
                    reachable(storage)
            self.assertGreater(writer.answer()['commits'], 10)
            self.assertGreater(removed, 20)
            self.assertSame(storage, writer, self.peer())
            for options in {'ago': 1000, 'skip_prepack': True}, {'ago': 0}:
                writer.ask('pack', **options)
                self.assertSame(storage, writer, self.peer())
            writer.ask('write', seconds=0.5)
            writer.ask('close')
            storage.database.adapter.writers.set('relstore')
            storage.pack(None)
            last = self.peer()
            self.assertSame(storage, last)
            storage.database.adapter.writers.set('any')
            last.ask('write', seconds=0.5)
            last.ask('pack', ago=0)
            self.assertSame(storage, last)

    def assertSame(self, storage, *peers: Peer) -> None:
        found = {oid.hex() for oid in reachable(storage)}
        for peer in peers:
            self.assertEqual(set(peer.ask('walk')), found)


class Blobs(Together):
    """What one has stored, the other reads."""
    SIZES = 0, 1, 100_000, 9_000_000

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def blob_peer(self) -> Peer:
        """With a cache of its own, which is empty."""
        return self.peer(blob_dir=tempfile.mkdtemp(dir=self.directory), shared_blob_dir=False)

    def file(self, data: bytes) -> str:
        path = self.directory / f'{len(data)}'
        path.write_bytes(data)
        return str(path)

    def orphans(self) -> int:
        return self.storage.database.pool.attempt(lambda session: session.all(
            'SELECT count(*) FROM pg_largeobject_metadata WHERE oid NOT IN (SELECT chunk FROM blob_chunk)'))[0][0]

    def assertRead(self, oid: str, tid: str, digest: str) -> None:
        found = pieces(self.storage, int(oid, 16), int(tid, 16))
        self.assertTrue(found)
        self.assertEqual(hashlib.sha256(b''.join(found)).hexdigest(), digest)

    def test_there_and_back(self):
        peer = self.blob_peer()
        stored = {size: peer.ask('store_blob', name=f'blob {size}', size=size) for size in self.SIZES}
        self.storage = relstore.RelStore(relstore.PostgreSQL(self._where), keep_history=self.keep_history,
                                         blob_dir=str(self.directory / 'cache'))
        self.addCleanup(self.storage.close)
        for size, (oid, tid, digest) in stored.items():
            self.assertRead(oid, tid, digest)
            data = os.urandom(size)
            number = int(oid, 16)
            new = commit_blobs(self.storage, {number: self.file(data)}, bases={number: int(tid, 16)})
            reader = self.blob_peer()
            self.assertEqual(reader.ask('blob', name=f'blob {size}'),
                             [oid, f'{new:016x}', hashlib.sha256(data).hexdigest()])
            reader.ask('close')
            again = peer.ask('store_blob', name=f'blob {size}', size=size + 5)
            self.assertRead(*again)
            if self.keep_history:
                peer.ask('undo_last')
                reader = self.blob_peer()
                self.assertRead(*reader.ask('blob', name=f'blob {size}'))
                number, last = int(oid, 16), int(reader.ask('blob', name=f'blob {size}')[1], 16)
                undone = commit_blobs(self.storage, bases={number: last}, copies={number: int(tid, 16)})
                reader.ask('close')
                reader = self.blob_peer()
                self.assertEqual(reader.ask('blob', name=f'blob {size}'), [oid, f'{undone:016x}', digest])
                self.assertRead(oid, tid, digest)
                reader.ask('close')
        self.assertEqual(self.orphans(), 0)
        peer.ask('pack', ago=0)
        found = {name: peer.ask('blob', name=f'blob {name}') for name in self.SIZES}
        for each in found.values():
            self.assertRead(*each)
        self.assertEqual(self.orphans(), 0)


class Converted(Together):
    """RelStorage's database is copied while RelStorage writes to it; and a copy for RelStorage is made."""

    def convert(self, *arguments: object) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(convert.main([str(argument) for argument in arguments]), 0, out.getvalue())
        return out.getvalue()

    def section(self, name: str, dsn: str) -> str:
        return (f'<relstorage {name}>\n  keep-history {str(self.keep_history).lower()}\n  blob-dir {self.here}/{name}\n'
                f'  <postgresql>\n    dsn {dsn}\n  </postgresql>\n</relstorage>\n')

    def test_there_and_back(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.here = Path(directory.name)
        writer = self.peer(blob_dir=str(self.here / 'cache'), shared_blob_dir=False)
        writer.ask('create')
        writer.ask('store_blob', name='blob', size=100_000)
        server, name = self.layer.server, f'back_{"hp" if self.keep_history else "hf"}'
        back = server.create_database(name)
        self.addCleanup(server.drop_database, name)
        there = f'file://{self.here}/Data.fs?blob-dir={self.here}/blobs'
        source, both = self.here / 'source.conf', self.here / 'both.conf'
        source.write_text('%import relstorage\n' + self.section('', self._where))
        both.write_text(f'%import relstorage\n<filestorage source>\n  path {self.here}/Data.fs\n'
                        f'  blob-dir {self.here}/blobs\n</filestorage>\n{self.section("destination", back)}')
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(main(['adopt', str(source)]), 0)
        writer.tell('write', seconds=3)
        out = self.convert('--follow', '--until-idle', 3, source, there)
        self.assertGreater(writer.answer()['commits'], 10)
        self.assertIn('Copied: ', out)
        if self.keep_history:
            self.assertIn('are equal', self.convert('--verify-only', source, there))
        self.assertIn('and 1 blob are equal', self.convert('--verify', both))
        source.write_text('%import relstorage\n' + self.section('destination', back))
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(main(['writers', str(source), 'any']), 0)
        reader = Peer()
        self.addCleanup(reader.end)
        reader.ask('open', where={'dsn': back}, keep_history=self.keep_history, blob_dir=str(self.here / 'other'),
                   shared_blob_dir=False)
        self.assertEqual(reader.ask('numbers'), writer.ask('numbers'))
        self.assertEqual(reader.ask('blob', name='blob'), writer.ask('blob', name='blob'))
        if self.keep_history:
            self.assertEqual(reader.ask('walk'), writer.ask('walk'))
        self.assertGreater(reader.ask('write', seconds=0.5)['commits'], 5)


cases(globals(), Packed, Blobs, Converted, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
del Together, Packed, Blobs, Converted
