"""`relstore refs` as its user runs it: what it finds out, compares and tells."""
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import unittest
from contextlib import closing
from unittest import mock

from persistent.mapping import PersistentMapping
from ZODB.Connection import TransactionMetaData
from ZODB.DB import DB
from ZODB.utils import p64, z64

import relstore
from relstore.cli.main import main
from relstore.packing import checks
from relstore.packing.graph import Graph
from relstore.references import unpack
from relstore.tests.support.backends import SQLiteHistoryPreserving, cases
from relstore.tests.support.commands import BACKENDS, Commands, environment
from relstore.tests.support.layers import Processes
from relstore.tests.support.patience import within
from relstore.tests.support.records import Reference, pickled


class Refs(Commands):
    tested = main, 'refs'

    def execute(self, *statements):
        """Run statements on the database; return the rows of the last."""
        with closing(self.open_storage()) as storage, storage.database.pool.session() as session:
            *first, last = statements
            for sql, *parameters in first:
                session.run(sql, parameters)
            return session.all(*last) if last else None

    def forget(self):
        """Make the database one of which no references are known; return how many revisions it has."""
        [[count]] = self.execute(('UPDATE object_state SET refs = NULL',), ('DELETE FROM relstore_refs',),
                                 ('SELECT count(*) FROM object_state',))
        return count

    def kept(self):
        rows = self.execute(('SELECT zoid, tid, refs FROM relstore_refs',))
        return {(oid, tid): set(unpack(bytes(refs))) for oid, tid, refs in rows}

    def pack(self):
        with closing(self.open_storage()) as storage:
            return storage.pack(time.time(), dry_run=True)


class Fills(Refs):
    """On every database."""

    def test_what_a_pack_would_have_to_find_out(self):
        self.fill()
        before = self.pack()
        count = self.forget()
        self.assertEqual(self.pack().unread, count)
        out = self.works('--jobs', '1', self.config())
        self.assertIn(f'  References of {count} revisions were found out. 0 records cannot be read.', out)
        after = self.pack()
        self.assertEqual((after.unread, after.listed), (0, before.listed))
        self.assertIn('  References of 0 revisions were found out.', self.works('--jobs', '1', self.config()))
        out = self.works('--jobs', '1', '--check', self.config())
        self.assertIn(f'  {count} revisions compared: 0 differences', out)

    def test_on_several_processes(self):
        self.fill()
        count = self.forget()
        self.assertIn(f'  References of {count} revisions were found out.', self.works('--jobs', '2', self.config()))
        self.assertEqual(self.pack().unread, 0)
        out = self.works('--jobs', '2', '--check', self.config())
        self.assertIn(f'  {count} revisions compared: 0 differences', out)

    def test_goes_on_where_it_was_ended(self):
        self.fill()
        count = self.forget()
        with mock.patch.object(checks, 'RANGE', 3), mock.patch.object(checks, 'ROWS', 2):
            with closing(self.open_storage()) as storage:
                look = checks.Survey(storage.database)
                first = look.fill(*next(look.ranges()))
                self.assertTrue(0 < first.saved < count, first)
            out = self.works('--jobs', '1', self.config())
        self.assertIn(f'  References of {count - first.saved} revisions were found out.', out)
        self.assertEqual(self.pack().unread, 0)

    def test_differences(self):
        stay, go = self.fill()
        count = self.forget()
        self.works('--jobs', '1', self.config())
        on_postgresql = isinstance(self.address(), relstore.PostgreSQL)
        wrong = "'\\x0000000000000bad'::bytea" if on_postgresql else "x'0000000000000bad'"
        refs_tid = '' if self.keep_history else ', refs_tid = tid'
        self.execute((f'UPDATE object_state SET refs = {wrong}{refs_tid} WHERE zoid = {stay[2]}',),
                     (f'UPDATE relstore_refs SET refs = {wrong} WHERE zoid = {go[1]}',), ())
        status, out, err = self.told('--jobs', '1', '--check', self.config())
        self.assertEqual((status, err), (1, ''))
        self.assertRegex(out, rf'  {stay[2]:#x} \(tid 0x[0-9a-f]+\): refs has 0xbad, and the record refers to nothing')
        self.assertRegex(out, rf'  {go[1]:#x} \(tid 0x[0-9a-f]+\): relstore_refs has 0xbad, and the record')
        different = len(re.findall('0xbad', out))
        self.assertIn(f'  {count} revisions compared: {different} differences, 0 records cannot be read.', out)

    def test_who_refers_to_an_object(self):
        """With references known and unknown; what an older revision refers to does not count."""
        stay, go = self.fill()
        for forget in False, True:
            if forget:
                self.forget()
            out = self.works('--to', hex(stay[3]), self.config())
            self.assertRegex(out, rf'\n  {stay[1]:#x} persistent\.mapping\.PersistentMapping \(tid 0x[0-9a-f]+\)\n')
            self.assertIn(f'  1 object refers to {stay[3]:#x}.', out)
            self.assertIn(f'  0 objects refer to {go[0]:#x}.', self.works('--to', str(go[0]), self.config()))
            self.assertIn('  0 objects refer to 0x777777.', self.works('--to', '0x777777', self.config()))

    def test_changed_since_they_were_found_out(self):
        """History-free, what was found out does not count for another state."""
        stay, go = self.fill()
        self.forget()
        self.works('--jobs', '1', self.config())
        with closing(DB(self.open_storage())) as db, db.transaction() as connection:
            connection.root()['list'][4]['more'] = PersistentMapping()
        self.works('--jobs', '1', '--check', self.config())
        self.assertEqual(self.pack().unread, 0)
        self.execute(('UPDATE object_state SET refs = NULL',), ())
        self.assertEqual(self.pack().unread, 2)
        self.assertIn('  References of 2 revisions', self.works('--jobs', '1', self.config()))


cases(globals(), Fills, backends=BACKENDS)
del Fills


class Records(SQLiteHistoryPreserving, Refs):

    def test_that_cannot_be_read(self):
        stay, go = self.fill()
        # It names the objects 7 and 8, as far as anyone can tell.
        state = f'8003{7:016x}ff{8:016x}'
        self.execute((f"UPDATE object_state SET state = x'{state}', refs = NULL WHERE zoid = {stay[4]}",), ())
        status, out, _ = self.told('--jobs', '1', '--check', self.config())
        self.assertEqual(status, 1)
        self.assertRegex(out, rf'  {stay[4]:#x} \(tid 0x[0-9a-f]+\): cannot be read\.\n')
        self.assertIn(' 0 differences, 1 record cannot be read.', out)
        out = self.works('--jobs', '1', self.config())
        self.assertIn('  References of 0 revisions were found out. 1 record cannot be read; a pack takes what may', out)
        self.assertEqual(self.kept(), {})       # what may be one is not kept: later it may be known
        self.assertEqual(self.told('--jobs', '1', '--check', self.config())[0], 1)

    def test_large(self):
        with closing(DB(self.open_storage())) as db, db.transaction() as connection:
            connection.root()['large'] = PersistentMapping(text='x' * 100_000, child=PersistentMapping())
        count = self.forget()
        self.assertIn(f'  References of {count} revisions', self.works('--jobs', '1', self.config()))
        self.assertIn(' 0 differences', self.works('--jobs', '1', '--check', self.config()))
        self.assertRegex(self.works('--to', '2', self.config()), r'  0x1 persistent\.mapping\.PersistentMapping \(tid')

    def test_many_differences_are_counted(self):
        self.fill()
        self.execute(("UPDATE object_state SET refs = x'0000000000000bad'",), ())
        with mock.patch('relstore.cli.refs.TOLD', 3):
            status, out, _ = self.told('--jobs', '1', '--check', self.config())
        self.assertEqual((status, out.count('0xbad')), (1, 3))
        [count] = re.findall(r'(\d+) differences', out)
        self.assertIn(f'  ... and {int(count) - 3} more.', out)


class Usage(SQLiteHistoryPreserving, Refs):

    def test_wrong(self):
        config = self.config()
        for argv in [('--to', 'x', config), ('--to', '-1', config), ('--to', str(2 ** 63), config),
                     ('--jobs', '0', config), ('--jobs', 'x', config), ('--check', '--to', '1', config), ()]:
            with self.subTest(argv), self.assertRaises(SystemExit) as caught, \
                    contextlib.redirect_stderr(mock.Mock()):
                main(['refs', *map(str, argv)])
            self.assertEqual(caught.exception.code, 2)

    def test_refused(self):
        self.assertEqual(self.told(self.config())[::2], (2, f'relstore: {self.address()} does not exist.\n'))

    def test_storages_of_another_kind_are_left_out(self):
        self.fill()
        out = self.works('--jobs', '1', self.write(
            'all.conf', '<mappingstorage>', 'name memory', '</mappingstorage>', self.section()))
        self.assertIn("memory: no storage of relstore's, left out.\n", out)
        self.assertIn('References of 0 revisions were found out', out)


class Killed(SQLiteHistoryPreserving, Refs):
    layer = Processes

    # Whoever runs the tests in the background of a shell has them ignore interrupts, and what they start.
    CODE = ('import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); '
            'from relstore.cli.main import main; sys.exit(main())')

    def store(self, count):
        """Store objects in a row whose references are not known."""
        with closing(self.open_storage()) as storage:
            txn = TransactionMetaData()
            storage.tpc_begin(txn)
            for oid in range(count):
                storage.store(p64(oid), z64, pickled(PersistentMapping, [Reference((p64(oid + 1), None))]), '', txn)
            storage.tpc_vote(txn)
            storage.tpc_finish(txn)
        self.forget()

    @contextlib.contextmanager
    def process(self, **kw):
        """Run it on two processes; wait until they have begun to work."""
        with subprocess.Popen([sys.executable, '-c', self.CODE, 'refs', '--jobs', '2', str(self.config())],
                              stdout=subprocess.PIPE, env=environment(), start_new_session=True, **kw) as process:
            for _ in within('references are written down'):
                self.assertIsNone(process.poll())
                if self.execute(('SELECT zoid FROM relstore_refs LIMIT 1',)):
                    break
            yield process

    def test_goes_on(self):
        """Killed, it has kept a part, all of its processes are gone, and the next run finds out the rest."""
        count = 20_000
        self.store(count)
        with self.process(stderr=subprocess.DEVNULL) as process:
            process.kill()
            process.communicate(timeout=60)     # as long as one of them could write
        kept = len(self.kept())
        self.assertTrue(0 < kept < count, kept)
        out = self.works('--jobs', '2', self.config())
        self.assertIn(f'  References of {count - kept:,} revisions were found out.', out)
        self.assertEqual(self.pack().unread, 0)

    def test_interrupted(self):
        """By the one at the keyboard, which all of its processes hear of."""
        self.store(20_000)
        with self.process(stderr=subprocess.PIPE) as process:
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (130, b'relstore: interrupted\n'))

    def test_a_process_that_dies_is_told(self):
        self.fill()
        self.forget()
        with mock.patch('relstore.cli.refs._work', dies):
            status, _, err = self.told('--jobs', '2', self.config())
        self.assertEqual((status, err), (2, 'relstore: A worker process has died. Run the command again.\n'))


def dies(after, upto):
    """In the place of refs._work."""
    os.kill(os.getpid(), signal.SIGKILL)


class Ways(unittest.TestCase):
    """Graph.dangling, on graphs with oids close together and far apart."""

    def graph(self, edges, stretch):
        graph = Graph()
        graph.add([(oid * stretch, 5, b''.join(p64(other * stretch) for other in others), False)
                   for oid, others in edges.items()])
        graph.finish(2 ** 63 - 1, keep_nowhere=True)
        return graph

    def test_shortest(self):
        edges = {0: [1, 2], 1: [3], 2: [1, 4], 3: [5], 4: [5], 5: [0, 9], 6: [8]}
        for stretch in 1, 10 ** 6:
            with self.subTest(stretch):
                graph = self.graph(edges, stretch)
                found = [(graph.oid_of(place) // stretch, target // stretch,
                          [graph.oid_of(step) // stretch for step in graph.path_to(place)])
                         for place, target in graph.dangling(graph.place_of(0))]
                self.assertEqual(found, [(5, 9, [0, 1, 3, 5])])

    def test_only_the_current_revision_counts(self):
        graph = Graph()
        graph.add([(0, 1, p64(7), False), (0, 2, p64(1), False), (1, 1, b'', False), (1, 2, b'', True)])
        graph.finish(2 ** 63 - 1, keep_nowhere=True)
        self.assertEqual(list(graph.dangling(0)), [(0, 1)])
