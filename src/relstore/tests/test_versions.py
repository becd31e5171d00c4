"""relstore of the version before and after a change of its functions on the server works on one database at once.

The version before is taken from the project's own history.
"""
import io
import itertools
import pickle
import shutil
import subprocess
import tarfile
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import TestCase

from ZODB.utils import u64, z64

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.support.backends import (
    MySQLBackend,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteBackend,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.places import Place
from relstore.tests.support.programs import SOURCE, Program
from relstore.tests.support.servers import cannot_run

BEFORE = 'e6dc6ac'      # the last with relstore_vote_1 and relstore_finish_1 on PostgreSQL
SHARED, MANY = 10, 2000
SECONDS = 0.5


class SideBySide(TestCase):

    def setUp(self):
        super().setUp()
        self.before, self.now = (Program(source) for source in (self._source_before(), SOURCE))
        for client, source in (self.before, self._before), (self.now, SOURCE):
            self.addCleanup(client.end)
            self.assertTrue(Path(client.ask('where')).is_relative_to(source))

    def _source_before(self) -> Path:
        project = SOURCE.parent
        if shutil.which('git') is None:
            cannot_run(self, 'There is no git, which has the version before', excused=True)
        archive = subprocess.run(['git', '-C', project, 'archive', BEFORE, 'src/relstore'], capture_output=True)
        if archive.returncode:
            cannot_run(self, f'The commit {BEFORE} is not there: {archive.stderr.decode().strip()}', excused=True)
        directory = Path(tempfile.mkdtemp(prefix='relstore-before-'))
        self.addCleanup(shutil.rmtree, directory)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(directory)
        self._before = directory / 'src'
        return self._before

    def _nowhere(self, name: str) -> Place:
        """Return a place where there are no tables yet."""
        if isinstance(self, SQLiteBackend):
            return Place('SQLite', {'data_dir': str(self._directory / name)}, self.keep_history)
        server = self.layer.server
        name = f'{name}_{"hp" if self.keep_history else "hf"}'
        where = server.create_database(name)
        self.addCleanup(server.drop_database, name)
        if isinstance(self, MySQLBackend):
            return Place('MySQL', where | {'driver': self.driver}, self.keep_history)
        return Place('PostgreSQL', {'dsn': where, 'driver': self.driver}, self.keep_history)

    def test_either_makes_the_tables(self):
        for creator, clients in {'before': (self.before, self.now), 'now': (self.now, self.before)}.items():
            with self.subTest(creator):
                self._used_by_both(self._nowhere(f'made_{creator}'), *clients)

    def test_older_tables_are_completed_for_packing(self):
        """By two processes at once, where that is allowed; and an older one that is still there is reckoned with."""
        place = self._nowhere('older')
        where = {'adapter': place.adapter, 'arguments': place.arguments, 'keep_history': place.keep_history}
        self.before.ask('open', **where)
        self.before.ask('create', shared=SHARED, many=MANY)
        with self.assertRaisesRegex(ConfigurationError, 'lacks .*relstore_sweep.*create-schema is false'):
            relstore.RelStore(_adapter(place), keep_history=place.keep_history, create_schema=False)
        other = Program(SOURCE)
        self.addCleanup(other.end)
        for client in self.now, other:
            client.tell('open', **where)
        for client in self.now, other:
            client.answer()
        self.before.ask('write', word='after')
        self.assertEqual([client.ask('read') for client in (self.now, other)], ['after'] * 2)
        with closing(place.open()) as storage:
            with self.assertRaisesRegex(ConfigurationError, 'older relstore.*"relstore writers"'):
                storage.pack(time.time())
            self.assertEqual(storage.pack(time.time() - 3600).objects, 0)
            for client in self.now, self.before, other:
                client.ask('close')
            storage.database.adapter.set_writers('relstore')
            storage.pack(time.time())
        other.ask('open', **where)
        self.assertEqual(other.ask('read'), 'after')
        other.ask('close')

    def _used_by_both(self, place: Place, *clients: Program):
        for client in clients:
            client.ask('open', adapter=place.adapter, arguments=place.arguments, keep_history=place.keep_history)
            if client is clients[0]:
                client.ask('create', shared=SHARED, many=MANY)
        for n, (writer, reader) in enumerate(itertools.permutations(clients)):
            writer.ask('write', word=f'word {n}')
            self.assertEqual(reader.ask('read'), f'word {n}')
        counted = Counter()
        for client in clients:
            client.tell('run', seconds=SECONDS, large=client is self.now)
        seen = self._seen_until(place, lambda: all(client.has_answered for client in clients))
        for client in clients:
            mine, conflicts = client.answer()
            self.assertTrue(mine, 'it has committed nothing')
            self.assertLessEqual(conflicts.keys(), {'ConflictError', 'ReadConflictError'})
            counted.update({int(n): count for n, count in mine.items()})
        for client in clients:
            self.assertEqual(client.ask('values'), [[counted[n] for n in range(SHARED)], [1] * MANY])
            client.ask('close')
        if place.keep_history:
            self._in_order(place, seen)

    def _seen_until(self, place: Place, done: Callable[[], bool]) -> list[tuple[int, int]]:
        """Return again and again the newest tid and the number of revisions."""
        seen = []
        with closing(place.open()) as storage, storage._pool.session() as session:
            while not done():
                seen += session.all('SELECT max(tid), count(*) FROM object_state')
        return seen

    def _in_order(self, place: Place, seen: list[tuple[int, int]]):
        """In the order of tids, each revision counts on from the one before it; no commit came after a greater tid."""
        values, tids = {}, []
        with closing(place.open()) as storage:
            for transaction in storage.iterator():
                for record in transaction:
                    tids.append(u64(transaction.tid))
                    if record.oid != z64:       # the root
                        value = _value(record.data)
                        self.assertEqual(value, values.get(record.oid, -1) + 1)
                        values[record.oid] = value
        self.assertEqual(len(values), SHARED + MANY)
        self.assertFalse([(last, count) for last, count in seen if bisect_right(tids, last) != count][:3])


def _adapter(place: Place):
    return getattr(relstore, place.adapter)(**place.arguments)


def _value(record: bytes) -> int:
    unpickler = pickle.Unpickler(io.BytesIO(record))
    unpickler.load()        # the class
    [value] = unpickler.load().values()
    return value


cases(globals(), SideBySide, backends=(
    Psycopg2HistoryPreserving, Psycopg2HistoryFree, MySQLdbHistoryPreserving, SQLiteHistoryPreserving))
del SideBySide
