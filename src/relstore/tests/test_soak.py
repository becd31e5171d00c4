"""The soak test runs, notices what it is there to notice, and judges as it says."""
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import unittest
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from ZODB import DB
from ZODB.MappingStorage import MappingStorage

from relstore.errors import Disconnected, OutcomeUnknown
from relstore.tests.soak import clients, world
from relstore.tests.soak.clients import (
    HASTE,
    REST,
    RETRY_SECONDS,
    SEEN_AFTER,
    WORK,
    WRITERS,
    Board,
    Listener,
    Plan,
    Reader,
    Told,
    Writer,
)
from relstore.tests.soak.verdict import findings, table
from relstore.tests.support.layers import Processes
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.servers import postgresql_programs, require_memcached

SECONDS = 120       # far more than it takes


class Smoke(unittest.TestCase):
    layer = Processes

    @unittest.skipUnless(THOROUGH, 'takes half a minute, and the one below does as much')
    def test_ten_seconds(self):
        data = self.soak(seed=15)       # begins with a pack
        self.assertIn('pack', data['disturbed'])

    def test_ten_seconds_with_memcached(self):
        require_memcached(self)
        data = self.soak('--memcached', seed=9)     # begins with the memcached
        self.assertTrue(any('memcached' in way for way in data['disturbed']), data['disturbed'])
        self.assertIn('cache_servers', data['settings']['options'])
        self.assertGreater(data['counts']['polls_saved'], 20)
        self.assertGreater(data['counts']['pauses without memcached'], 0)      # it was killed

    def soak(self, *more, seed):
        """Run it, look at what it tells, and return that."""
        adapter = 'postgresql' if postgresql_programs() else 'sqlite'
        with tempfile.TemporaryDirectory() as directory:
            environment = {name: value for name, value in os.environ.items() if not name.startswith('RELSTORE_TEST_')}
            done = subprocess.run(
                [sys.executable, '-m', 'relstore.tests.soak', '--adapter', adapter, '--minutes', '0.17',
                 '--disturb', '2', '--seed', str(seed), '--out', directory, *more],
                env=environment | {'PYTHONPATH': os.pathsep.join(sys.path)}, timeout=SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(done.returncode, 0, done.stdout)
            data = json.loads((Path(directory) / f'{adapter}.json').read_text('utf-8'))
            self.assertIn(table(data['samples']), (Path(directory) / f'{adapter}.txt').read_text('utf-8'))
        self.assertGreater(data['counts']['commits'], 20)
        self.assertGreater(data['counts']['reads'], 20)
        self.assertTrue(data['disturbed'])
        self.assertEqual(data['settings']['seed'], seed)
        self.assertIn(f'seed {seed}', done.stdout)
        for sample in data['samples']:
            self.assertGreater(sample['sessions'], 0)
            self.assertGreater(sample['memory'][0], 1)
            self.assertGreater(sample['size_free'], 100_000)
            self.assertGreater(sample['size_preserving'], 100_000)
        return data


class Watching(unittest.TestCase):
    """Clients on a storage that is not relstore, and a board that says what is not so."""

    def setUp(self):
        self.db = DB(MappingStorage())
        self.addCleanup(self.db.close)
        self.board = Board(sites=1, processes=1)
        with self.db.transaction() as connection:
            world.create(connection.root(), 2, random.Random(1))

    def client(self, kind, again=False, explicit=True, options=None, **more):
        plan = Plan(0, [], options or {}, 1, 0, again)
        client = kind(self.db, plan, self.board, 0, explicit, False, random.Random(1), **more)
        self.addCleanup(client.close)
        return client

    def writer(self, **more):
        return self.client(Writer, number=0, **more)

    def set(self, change):
        with self.db.transaction() as connection:
            change(connection.root())

    def test_all_is_well(self):
        for explicit in (True, False):
            writer, reader = self.writer(explicit=explicit), self.client(Reader, explicit=explicit)
            before = self.board.acknowledged[0][0]
            for _ in range(10):
                writer.transaction()
                reader.transaction()
            self.assertEqual(self.board.acknowledged[0][0], before + 10)
            self.assertEqual((writer.counts['commits'], reader.counts['reads']), (10, 10))

    def test_commit_that_was_lost(self):
        self.board.acknowledged[0][0] = 1
        for client in (self.writer(), self.writer(again=True), self.client(Reader)):
            with self.assertRaises(world.Broken):
                client.transaction()

    def test_commit_that_nobody_was_told_of(self):
        def commit(root):
            root['counters'][0].value += 1
        self.set(commit)
        with self.assertRaises(world.Broken):
            self.writer().transaction()
        self.writer(again=True).transaction()       # it was killed before it could be told
        self.assertEqual(self.board.acknowledged[0][0], 2)

    def test_view_that_goes_back(self):
        reader = self.client(Reader)
        reader.transaction()
        reader.seen[0] = 1
        with self.assertRaises(world.Broken):
            reader.transaction()
        self.board.calm.value += 1                  # the server has crashed: now it may
        reader.transaction()
        self.assertEqual(reader.seen[0], 0)

    def test_view_during_a_crash(self):
        """It may show what is not on the disk yet."""
        reader, begin = self.client(Reader), self.board.calm.value
        check = mock.patch.object(world, 'check', lambda *_: setattr(self.board.calm, 'value', 7))
        for calm, meanwhile in (float('inf'), nullcontext()), (begin, check):
            self.board.calm.value = calm
            with meanwhile:
                reader.transaction()
            self.assertEqual(reader.seen, {})

    def test_money_that_is_lost(self):
        def lose(root):
            root['accounts'][7].balance -= 1
        self.set(lose)
        with self.assertRaises(world.Broken):
            self.client(Reader).transaction()

    def test_half_a_transaction(self):
        def change(root):
            for twin in root['twins'].values():
                twin.number += twin is root['twins'][0]
        self.set(change)
        with self.assertRaises(world.Broken), self.db.transaction() as connection:
            world.check(connection.root(), range(world.PAIRS))

    def test_writers_that_share_a_memcached_rest_at_the_same_time(self):
        together, alone = self.writer(options={'poll_interval': 2}), self.writer()
        begin = 100 * (WORK + REST)
        for client, since, waits in ((together, WORK - 1, 0), (together, WORK + 1, REST - 1), (alone, WORK + 1, 0)):
            now = begin + since
            with mock.patch.object(clients, 'time', mock.Mock(monotonic=lambda now=now: now)):
                self.assertEqual(client.until_next(), waits)

    def test_errors_that_are_allowed_after_a_disturbance(self):
        client = self.client(Reader)
        self.board.calm.value = 10
        for error in (Disconnected('gone'), OutcomeUnknown('who knows')):
            client.excuse(error, 9)
            with self.assertRaises(type(error)):
                client.excuse(error, 11)
        with self.assertRaises(KeyError):
            client.excuse(KeyError('no'), 9)


class WithMemcached(unittest.TestCase):
    """What a view must show at any time of a run, by a clock of the test's own."""

    def setUp(self):
        self.board = Board(sites=1, processes=2)
        self.commits = self.board.acknowledged[0]
        self.log = logging.Logger('relstore')
        self.log.addHandler(Listener(self.board, 0))
        self.told = Told(self.board, self.commits)
        patch = mock.patch.object(clients, 'time', mock.Mock(monotonic=lambda: self.now))
        patch.start()
        self.addCleanup(patch.stop)
        self.now = 1000.0

    def least(self, now):
        self.now = now
        return self.told.least()[0]

    def leave_alone(self, now):
        self.now = now
        self.log.warning('memcached %s does not answer as it should (%r).', '127.0.0.1:1', TimeoutError('slow'))

    def use_again(self, now):
        self.now = now
        self.log.info('memcached %s answers again.', '127.0.0.1:1')

    def test_at_once_while_nothing_happens(self):
        for now in range(1000, 1010):
            self.commits[0] += 1
            self.assertEqual(self.least(now), self.commits[0])

    def test_late_while_its_process_leaves_it_alone_and_only_then(self):
        self.commits[0] = 7
        self.assertEqual(self.least(1000), 7)
        self.leave_alone(1001)
        self.assertEqual(self.least(1001.1), 7)             # what was before is not in doubt
        self.commits[0] = 8
        self.assertEqual(self.least(1002), 7)
        self.assertEqual(self.least(1002 + SEEN_AFTER), 7)
        self.assertEqual(self.least(1002.1 + SEEN_AFTER), 8)
        self.commits[0] = 9
        self.use_again(1011)
        self.assertEqual(self.least(1011 + RETRY_SECONDS + HASTE), 8)
        self.assertEqual(self.least(1011.1 + RETRY_SECONDS + HASTE), 9)
        self.commits[0] = 10
        self.assertEqual(self.least(1011.2 + RETRY_SECONDS + HASTE), 10)

    def test_others_are_not_excused(self):
        other = WRITERS                                     # the first of the other process
        self.leave_alone(1000)
        self.commits[other] = 1
        self.now = 1001
        self.assertEqual(self.told.least()[other], 1)

    def test_pauses_that_follow_each_other(self):
        self.least(1000)
        for begin in range(1001, 1005):
            self.leave_alone(begin)
            self.commits[0] += begin == 1001
            self.assertEqual(self.least(begin + 0.1), begin + 0.1 > 1001.1 + SEEN_AFTER)
            self.use_again(begin + 0.2)

    def test_storages_of_a_process_that_leave_it_alone_by_turns(self):
        self.least(1000)
        self.leave_alone(1001)
        self.leave_alone(1002)
        self.use_again(1003)
        self.commits[0] = 1
        self.assertEqual(self.least(1003.2 + RETRY_SECONDS + HASTE), 0)
        self.use_again(1005)
        self.assertEqual(self.least(1005.1 + RETRY_SECONDS + HASTE), 1)

    def test_something_else_is_logged(self):
        self.log.warning('something else')
        self.log.warning('memcached %s is strange.', '127.0.0.1:1')
        self.commits[0] = 1
        self.assertEqual(self.least(1001), 1)

    def test_a_process_that_is_killed_and_did_not_tell(self):
        self.least(1000)
        self.leave_alone(1001)
        self.commits[0] = 1
        self.now = 1002
        self.board.starts(0)
        self.assertEqual(self.least(1002.1), 0)
        self.assertEqual(self.least(1002.1 + SEEN_AFTER), 1)
        self.commits[0] = 2
        self.assertEqual(self.least(1002.2 + SEEN_AFTER), 2)
        self.board.starts(0)                                # it had told all
        self.commits[0] = 3
        self.assertEqual(self.least(1002.3 + SEEN_AFTER), 3)


class Judging(unittest.TestCase):

    def setUp(self):
        self.samples = [
            {'minutes': n, 'commits': 100, 'reads': 200, 'memory': [50.0, 60.0], 'cache': 1.0, 'events': [],
             'sessions': 8, 'forgotten': 0, 'dead': 1000, 'size_free': 1e6, 'size_preserving': 1e6 * n,
             'rows_free': 500}
            for n in range(30)
        ]

    def outcomes(self):
        return {finding.what: finding.holds for finding in findings(self.samples, 10)}

    def assert_fails(self, what):
        outcomes = self.outcomes()
        self.assertEqual({name for name, holds in outcomes.items() if not holds}, {what}, outcomes)

    def change_last(self, **values):
        for sample in self.samples[20:]:
            sample.update(values)

    def test_flat(self):
        self.assertEqual(set(self.outcomes().values()), {True})

    def test_a_short_run_is_judged_by_what_must_never_be(self):
        self.samples = self.samples[:5]
        self.assertEqual({what: holds for what, holds in self.outcomes().items() if holds is not None},
                         {'sessions': True, 'transactions left open': True})

    def test_growth(self):
        for what, values in (
            ('memory of process 1', {'memory': [50.0, 64.0]}),
            ('commits', {'commits': 70}),
            ('reads', {'reads': 150}),
            ('dead', {'dead': 7000}),
            ('size of the history-free database', {'size_free': 1.3e6}),
        ):
            with self.subTest(what):
                self.setUp()
                self.change_last(**values)
                self.assert_fails(what)

    def test_one_sample_too_many(self):
        self.samples[3]['sessions'] = 11
        self.assert_fails('sessions')
        self.setUp()
        self.samples[3]['forgotten'] = 1
        self.assert_fails('transactions left open')

    def test_disturbed_samples_say_nothing_of_throughput(self):
        for sample in self.samples[20:24]:
            sample.update(events=['restart'], commits=0, reads=0)
        self.assertEqual(set(self.outcomes().values()), {True})

    def test_table_of_a_long_run_is_short(self):
        self.samples[7]['events'] = ['kill -9']
        text = table(self.samples * 10)
        self.assertLess(len(text.splitlines()), 30)
        self.assertIn('kill -9', text)
