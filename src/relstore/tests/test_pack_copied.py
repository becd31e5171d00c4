"""What was prepared on a copy of the database is used on the original, if it fits."""
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from unittest.mock import patch

from ZODB.POSException import ConflictError
from ZODB.utils import z64

import relstore
from relstore.errors import ConfigurationError, Unavailable
from relstore.packing import sweep
from relstore.tests.support.backends import THOROUGH, SQLiteBackend, cases
from relstore.tests.support.packing import BACKENDS, DURABLE, REFUSED, Suite, before, calls
from relstore.tests.support.readme import README
from relstore.tests.support.records import record


class Copied(Suite):
    """What was prepared on a copy of the database is used on the original, if it fits."""

    def copy(self) -> relstore.RelStore:
        if isinstance(self, SQLiteBackend):
            shutil.copytree(self._directory / 'main', self._directory / 'copy')
        else:
            self.address('copy')
            self.in_shell(self.copying)
        return self.opened('copy')

    def bring_back(self) -> None:
        """As the documentation says."""
        if isinstance(self, SQLiteBackend):
            self.replace()
        else:
            blocks = re.findall('(?m)(?:^ {4}.*\n)+', README)
            [commands] = [block for block in blocks if 'relstore_garbage' in block and self.program in block]
            self.in_shell(commands)

    def replace(self) -> None:
        """Bring it back by other means than the documentation's, which look at nothing."""
        if not isinstance(self, SQLiteBackend):
            self.in_shell(self.replacing)
            return
        with closing(sqlite3.connect(self._directory / 'main' / 'main.sqlite3')) as connection:
            connection.execute('ATTACH ? AS copy', (str(self._directory / 'copy' / 'main.sqlite3'),))
            with connection:
                for table in 'relstore_pack', 'relstore_garbage':
                    connection.execute(f'DELETE FROM {table}')
                    connection.execute(f'INSERT INTO {table} SELECT * FROM copy.{table}')

    def in_shell(self, commands: str) -> None:
        """Run what an operator would. ORIGINAL and COPY lead to the databases."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(('PG', 'MYSQL'))} | {
            'ORIGINAL': self.named('main'), 'COPY': self.named('copy'), 'HOME': tempfile.gettempdir()}
        subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', commands], check=True, env=environment, stdout=subprocess.DEVNULL)

    def test_original_went_on(self):
        linked, changed, control = self.clusters(3)
        self.copy().pack(None, prepack_only=True)
        client = self.client()
        client.link(linked.holder, linked.one)
        client.begin().link(changed.one, changed.two)
        self.bring_back()
        self.pack(skip_prepack=True)
        self.assertLessEqual({linked.one, linked.two}, self.ends())
        self.assertTrue(self.exists(changed.one) and self.exists(changed.two))
        self.assertFalse(self.exists(control.one))

    def test_copy_went_on(self):
        """Alone, or both: in the original nothing may go that was garbage in the copy."""
        [cluster] = self.clusters(1)
        client = self.client()
        client.link(cluster.holder, cluster.one)
        copy = self.copy()
        self.client(copy).link(cluster.holder)
        copy.pack(None, prepack_only=True)
        self.bring_back()
        for both in False, True:
            if both:
                client.begin().link(z64, cluster.holder, note='went on')
            with self.assertRaisesRegex(ConfigurationError, 'another state of it'):
                self.pack(skip_prepack=True)
            self.assertLessEqual({cluster.one, cluster.two}, self.ends())

    def test_copy_was_packed_before(self):
        """Its sweeps have numbers of their own."""
        [first] = self.clusters(1)
        copy = self.copy()
        copy.pack(None)
        copy.pack(None, prepack_only=True)
        client = self.client()
        self.bring_back()
        self.pack(skip_prepack=True)
        for _ in range(2):
            client.begin().link(first.holder)       # learns of the sweep, and then drops what it removed
        self.pack()
        client.begin().link(first.holder)
        client.begin()
        self.ends()

    def test_original_was_packed_meanwhile(self):
        """To another time, and more became garbage, or is it no longer."""
        linked, garbage, control = self.clusters(3)
        copy = self.copy()
        copy.pack(None, prepack_only=True)
        client = self.client()
        client.link(linked.holder, linked.one)
        client.begin().link(z64, linked.holder, garbage.holder)
        self.pack()
        self.bring_back()
        tables = self.tables()
        self.pack(skip_prepack=True)
        self.assertEqual(self.tables(), tables)
        self.assertLessEqual({linked.one, linked.two}, self.ends())
        self.assertFalse(self.exists(control.one) or self.exists(garbage.one))
        client.begin().link(linked.holder)
        self.pack()
        self.assertFalse(self.exists(linked.one))
        self.ends()

    def tables(self) -> list[list[tuple]]:
        """Return all that a pack may remove."""
        names = ['object_state', 'current_object'] if self.keep_history else ['object_state']
        return [self.rows(f'SELECT * FROM {name} ORDER BY 1, 2') for name in names]

    def test_used_once(self):
        self.clusters(1)
        self.pack(prepack_only=True)
        self.pack(skip_prepack=True)
        with self.assertRaisesRegex(ConfigurationError, 'run a pre-pack'):
            self.pack(skip_prepack=True)

    def test_used_twice(self):
        """Brought back once more, there is nothing in it that could still go."""
        linked, control, _ = self.clusters(3)
        self.copy().pack(None, prepack_only=True)
        client = self.client()
        client.link(linked.holder, linked.one)
        self.bring_back()
        report = self.pack(skip_prepack=True)
        self.assertEqual(report.spared, 2)
        self.assertFalse(self.exists(control.one) or self.exists(control.two))
        client.begin().link(control.holder, linked.one)
        client.begin().link(linked.holder)
        self.bring_back()
        self.assertEqual(self.pack(skip_prepack=True).states, 0)
        self.assertLessEqual({linked.one, linked.two}, self.ends())

    def test_original_was_interrupted(self):
        """While it removed what another list names: that of the copy does not take its place."""
        cluster, _ = self.clusters(2)
        copy = self.copy()
        client = self.client()
        client.link(cluster.holder, cluster.one)
        self.client(copy).link(cluster.holder, note='went on')
        with before(self.packing, 'sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        copy.pack(None, prepack_only=True)
        self.replace()
        for options in {'skip_prepack': True}, {'prepack_only': True}:
            with self.subTest(options), self.assertRaisesRegex(ConfigurationError, 'another list'):
                self.pack(**options)
        with self.assertRaisesRegex(ConfigurationError, 'another list'):
            self.opened(pack_gc=False).pack(None)
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        self.pack()
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        self.assertEqual(self.pack(dry_run=True).objects, 0)

    def test_links_while_nobody_knows_what_is_going(self):
        """The list of a sweep that was interrupted is gone, and told votes which objects may not be linked."""
        first, second = self.clusters(2)
        copy, client, other = self.copy(), self.client(), self.client()
        client.link(first.holder, note='newer')
        with patch.multiple(sweep, SMALLEST_STEP=1, FIRST_STEP=1, LARGEST_STEP=1), \
                calls(self.packing, lambda *_: self.exists(first.one) or self.interrupt(), ['sweep']), \
                self.assertRaises(KeyboardInterrupt):
            self.pack()
        copy.pack(None, prepack_only=True)
        self.replace()
        new = self.site.new_oid()
        for target in first.two, second.one, second.holder:
            for _ in range(2):      # no retry mends it
                with self.assertRaisesRegex(ConfigurationError, 'run a pack to the present with pack-gc true'):
                    client.begin().link(first.holder, target)
        client.begin().link(z64, first.holder, second.holder, note='links that are there already')
        client.begin().finish(client.vote((first.holder, record(new)), (new, record(new))))
        with self.assertRaises(ConfigurationError):     # moved: what has it may be garbage
            client.begin().vote((first.holder, record()), (z64, record(first.holder, second.holder, new)))
        with self.assertRaisesRegex(ConfigurationError, r'to the present \(--days 0\)'):
            self.pack(pack_time=time.time() - 1000)
        other.begin().link(second.one, second.two, note='garbage is changed')
        if not self.keep_history:       # where the newest transaction stays, whatever it has changed
            with self.assertRaisesRegex(Unavailable, 'were changed lately'):
                self.pack()
        other.begin().link(second.holder, note='the newest')

        def change():
            other.begin().link(second.one, second.two, note='after it was marked')
            other.begin().link(second.holder, note='the newest')

        with before(self.packing, 'lock_votes', change), self.assertRaisesRegex(Unavailable, 'were changed lately'):
            self.pack()
        self.pack()
        self.assertFalse(any(map(self.exists, (first.one, first.two, second.one, second.two))))
        client.begin().link(first.holder, new, second.holder)
        self.ends()

    def test_documentation_refuses_to_replace_the_list_of_an_interrupted_sweep(self):
        """Its commands change nothing then, nor where the copy cannot be read."""
        if isinstance(self, SQLiteBackend):
            self.skipTest('there are no commands for it')
        [cluster] = self.clusters(1)
        copy = self.copy()
        copy.pack(None, prepack_only=True)
        with before(self.packing, 'sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        rows = self.lists()
        self.assertTrue(all(rows))
        with self.assertRaises(subprocess.CalledProcessError):
            self.bring_back()
        self.assertEqual(self.lists(), rows)
        with self.assertRaises(ConflictError):
            self.client().link(cluster.holder, cluster.one)
        self.pack()
        rows = self.lists()
        copy.database.pool.attempt(lambda session: session.run('ALTER TABLE relstore_pack RENAME TO elsewhere'))
        with suppress(subprocess.CalledProcessError):
            self.bring_back()
        self.assertEqual(self.lists(), rows)

    def lists(self) -> list[list[tuple]]:
        return [self.rows(f'SELECT * FROM {name} ORDER BY 1, 2') for name in ('relstore_garbage', 'relstore_pack')]

    def test_list_is_replaced_just_before_the_sweep(self):
        """A sweep whose list is not there would remove something else."""
        [cluster] = self.clusters(1)
        copy = self.copy()
        copy.pack(None, prepack_only=True)
        with before(self.packing, 'lock_votes', self.replace), \
                self.assertRaisesRegex(Unavailable, 'Another list has taken the place'):
            self.pack()
        self.assertTrue(self.exists(cluster.one))
        self.pack()
        self.assertFalse(self.exists(cluster.one))

    def test_original_was_interrupted_and_its_list_is_gone(self):
        """Nobody knows what it has removed. Who may hold that has all looked up that it links."""
        [cluster] = self.clusters(1)
        copy, client = self.copy(), self.client()
        with before(self.packing, 'end_sweep', self.interrupt), self.assertRaises(KeyboardInterrupt):
            self.pack()
        self.assertFalse(self.exists(cluster.one))
        copy.pack(None, prepack_only=True)
        self.replace()
        self.pack()
        client.begin()
        with self.assertRaises(REFUSED):
            client.begin().link(cluster.holder, cluster.one)

    def interrupt(self) -> None:
        raise KeyboardInterrupt


cases(globals(), Copied, backends=BACKENDS[:2] + (DURABLE if THOROUGH else (DURABLE[0], DURABLE[3])))
del Copied
