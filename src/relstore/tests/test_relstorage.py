"""RelStorage itself and relstore on one database: what one has packed, the other reads, writes and packs.

RelStorage runs in a process of its own, with the Python of RELSTORE_TEST_RELSTORAGE or else that of the benchmarks,
which `make .venv-bench/made` makes.
"""
import time
from contextlib import closing
from pathlib import Path
from unittest import TestCase
from unittest.mock import patch

import relstore
from relstore.packing import pack
from relstore.tests.support.backends import Psycopg2HistoryFree, Psycopg2HistoryPreserving, cases
from relstore.tests.support.objects import reachable
from relstore.tests.support.programs import PYTHON, Peer
from relstore.tests.support.servers import cannot_run

PATIENCE = 60       # seconds


class Packed(TestCase):
    """A database that RelStorage made and wrote is packed by relstore, and by RelStorage again."""

    def setUp(self):
        super().setUp()
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        server, name = self.layer.server, f'relstorage_{"hp" if self.keep_history else "hf"}'
        self._where = server.create_database(name)
        self.addCleanup(server.drop_database, name)

    def peer(self) -> Peer:
        peer = Peer()
        self.addCleanup(peer.end)
        self.assertRegex(peer.ask('version'), r'^4\.')
        peer.ask('open', where={'dsn': self._where}, keep_history=self.keep_history)
        return peer

    def test_packed_while_relstorage_writes(self):
        """A pack of its own was killed before, another one only prepared."""
        writer = self.peer()
        writer.ask('create')
        self.assertLess(self.peer().dies('die_while_packing', after=40), 0)
        self.peer().ask('pack', ago=0, prepack_only=True)
        with closing(relstore.RelStore(relstore.PostgreSQL(self._where), keep_history=self.keep_history)) as storage:
            self.assertEqual(storage.database.adapter.writers(), 'any')
            removed, until = 0, time.monotonic() + 4
            writer.tell('write', seconds=4)
            with patch.object(pack, 'PRESENT', 0):
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
            storage.database.adapter.set_writers('relstore')
            storage.pack(None)
            last = self.peer()
            self.assertSame(storage, last)
            storage.database.adapter.set_writers('any')
            last.ask('write', seconds=0.5)
            last.ask('pack', ago=0)
            self.assertSame(storage, last)

    def assertSame(self, storage, *peers: Peer) -> None:
        found = {oid.hex() for oid in reachable(storage)}
        for peer in peers:
            self.assertEqual(set(peer.ask('walk')), found)


cases(globals(), Packed, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
del Packed
