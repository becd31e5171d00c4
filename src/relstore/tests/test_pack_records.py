"""What a pack finds: records of all kinds, and what packs of others have lost or left."""
import pickle
import time
import zlib
from binascii import hexlify
from contextlib import closing
from unittest.mock import patch

import ZODB
from persistent.mapping import PersistentMapping
from ZODB.POSException import POSKeyError, UndoError
from ZODB.utils import u64, z64

from relstore.errors import ConfigurationError
from relstore.packing import garbage, pack
from relstore.packing.checks import Survey
from relstore.references import references
from relstore.tests.support.backends import SQLiteBackend, cases
from relstore.tests.support.hexadecimal import MVCCHexStorage
from relstore.tests.support.oracle_backends import ORACLE
from relstore.tests.support.packing import BACKENDS, Suite, calls, timestamp
from relstore.tests.support.records import record


def raw(pid: object, python2: bool = False, class_name: bytes | None = None) -> bytes:
    """Return a record with one persistent id, as it was written at other times."""
    class_name = class_name or b'persistent.mapping\nPersistentMapping\n'
    where = b'U\x08' + pid if python2 else pickle.dumps(pid, 3)[2:-1]      # U: a str
    return b'\x80\x02c' + class_name + b'.' + b'\x80\x02}X\x04\x00\x00\x00data}X\x01\x00\x00\x00a' + where + b'Qss.'


class Field(Suite):
    """What others' packs have lost or left: see the cases one by one."""

    def test_linked_between_the_phases(self):
        """Only its referrer changes, not the object itself; and by a chain that begins with an object of the list."""
        first, second, third, control = self.clusters(4)
        self.pack(prepack_only=True)
        client = self.client()
        client.link(first.holder, first.one)
        client.begin().link(second.one, second.two, third.one)      # garbage is changed; nothing else refers to it
        new = self.site.new_oid()
        client.begin()
        client.finish(client.vote((control.holder, record(new)), (new, record())))
        with patch.object(garbage, 'ROWS', 2):       # the list is read in pages
            report = self.pack(skip_prepack=True)
        self.assertEqual(report.spared, 6)
        found = self.ends()
        self.assertLessEqual({first.one, first.two, new}, found)
        for oid in second.one, second.two, third.one, third.two:
            self.assertTrue(self.exists(oid))
        self.assertFalse(self.exists(control.one) or self.exists(control.two))
        client.begin().link(third.holder, second.one)
        self.ends()

    def test_moved_between_the_phases(self):
        """From one object of the list to another, that is then linked."""
        first, second = self.clusters(2)
        self.pack(prepack_only=True)
        client = self.client()
        client.finish(client.vote((first.one, record()), (second.one, record(first.two))))
        client.begin().link(second.holder, second.one)
        client.begin().link(first.holder, second.two)
        self.pack(skip_prepack=True)
        self.assertLessEqual({second.one, second.two, first.two}, self.ends())

    def test_without_garbage_collection_after_a_prepare(self):
        """Nothing is removed but old revisions, whatever list is there; nor does one kind of sweep use the other's."""
        [cluster] = self.clusters(1)
        self.pack(prepack_only=True)
        client = self.client()
        client.link(cluster.holder, cluster.one)
        old = self.opened(pack_gc=False)
        with self.assertRaisesRegex(ConfigurationError, 'pack-gc true'):
            old.pack(None, skip_prepack=True)
        report = old.pack(None)
        self.assertEqual(report.objects, 0)
        self.assertLessEqual({cluster.one, cluster.two}, self.ends())
        with self.assertRaisesRegex(ConfigurationError, 'prepare again|run a pre-pack'):
            self.pack(skip_prepack=True)

    def test_lists_do_not_pile_up(self):
        """Neither with garbage collection nor without."""
        careful = self.opened(pack_gc=False)
        sizes = []
        for storage in (self.storage, careful, careful, careful, self.storage):
            client = self.client()
            for _ in range(3):
                client.begin().link(z64, note=len(sizes))
            storage.pack(None)
            [[size]] = self.rows('SELECT count(*) FROM relstore_garbage')
            sizes.append(size)
        self.assertLessEqual(max(sizes), 2, sizes)

    def test_undo_after_the_pack(self):
        """Of each transaction that was not packed; of packed ones it is refused, and they are not offered."""
        if not self.keep_history:
            self.skipTest('needs history')
        first, second = self.clusters(2)
        client = self.client()
        tids = []
        for holder, *others in (
                (first.holder, first.one), (first.holder,), (second.holder, second.one), (second.one, first.one),
                (second.holder,), (second.one,), (first.holder, second.two), (first.holder,), (second.two, first.two)):
            tids.append(client.begin().link(holder, *others))
        for boundary in range(1, len(tids) - 1):
            pack_time = (timestamp(tids[boundary]) + timestamp(tids[boundary + 1])) / 2
            self.pack(pack_time=pack_time)
            offered = [entry['id'] for entry in self.site.undoLog(0, -10_000) if entry['id'] in tids]
            self.assertEqual(offered, tids[:boundary:-1])
            for tid in tids[:boundary + 1]:
                with self.assertRaises(UndoError):
                    self.undo(tid)
            undone = 0
            for length in range(1, len(offered) + 1):       # and the last few of them at once
                undone += self.undo(*offered[:length], keep=False)
            for tid in offered:
                undone += self.undo(tid, keep=False)
            self.assertGreaterEqual(undone, len(offered))

    def test_blob_chunks(self):
        """They go with their states, where there is a foreign key that sees to it, and where there is none."""
        garbage, live = self.clusters(2)
        client = self.client()
        client.link(live.holder, live.one)
        chunk = "lo_from_bytea(0, 'x')" if 'Psycopg' in type(self).__name__ else "'x'"
        for oid in garbage.one, live.one:
            tid = u64(self.site.getTid(oid))
            self.run_sql(f'INSERT INTO blob_chunk (zoid, tid, chunk_num, chunk) VALUES ({u64(oid)}, {tid}, 0, {chunk})')
        self.pack()
        self.pack()
        rows = self.site.database.pool.attempt(lambda session: session.all('SELECT zoid FROM blob_chunk'))
        self.assertEqual(rows, [(u64(live.one),)])
        self.assertFalse(self.exists(garbage.one))
        self.run_sql('DELETE FROM blob_chunk')      # of what is no blob
        self.ends()

    def test_stays_with_what_refers_to_it(self):
        """What is garbage for long enough stays where what is not refers to it: that might be linked again."""
        if self.keep_history:
            self.skipTest('of a database without history')
        with patch.object(pack, 'PRESENT_SECONDS', 0):
            old, new = self.clusters(2)
            client = self.client()
            client.link(new.holder, new.one)
            client.begin().link(new.one, old.one)
            self.pack(pack_time=time.time() - 100)
            client.begin().link(new.holder)         # unlinked now; old has been found before, and not again
            first = self.pack(pack_time=time.time() - 1e-4)
            self.assertEqual(first.objects, 1)      # new.two, which was garbage since it was unlinked by new.one
            self.assertTrue(self.exists(old.one) and self.exists(old.two))
            client.begin().link(new.holder, new.one)
            self.assertLessEqual({new.one, old.one, old.two}, self.ends())
            client.begin().link(new.holder)
            self.assertEqual(self.pack(pack_time=time.time() - 1e-4).objects, 0)        # unlinked now
            self.pack(pack_time=time.time() - 1e-4)
            self.assertFalse(self.exists(new.one) or self.exists(old.one) or self.exists(old.two))
            self.ends()


class Records(Suite):
    """What records may be like."""

    def stored(self, oid: bytes, state: bytes) -> None:
        """Replace a record behind relstore's back, as RelStorage does, or damage."""
        self.site.database.pool.attempt(lambda session: session.run(
            f'UPDATE object_state SET state = {self.mark}, state_size = {len(state)}, refs = NULL '
            f'WHERE zoid = {u64(oid)}', (state,)))
        for storage in self.site, self.storage:
            storage.database.cache.clear()

    @property
    def mark(self) -> str:
        return '?' if isinstance(self, SQLiteBackend) else '%s'

    def test_unreadable(self):
        """It is kept with all that it may refer to, and reported."""
        clusters = self.clusters(4)
        short, noise, compressed, control = clusters
        client = self.client()
        broken = {short: record(short.one)[:-6], noise: b'\xff\x00' * 20 + short.two + noise.one + b'\xfe' * 9,
                  compressed: b'.z' + zlib.compress(record(compressed.one)[:-3])}
        for cluster, state in broken.items():
            client.begin().link(cluster.holder, note='newest')
            self.stored(cluster.holder, state)
        for dry_run in True, False:
            report = self.storage.pack(None, dry_run=dry_run)
            self.assertEqual(report.unreadable, len(broken) if not self.keep_history else report.unreadable)
            self.assertGreaterEqual(report.unreadable, len(broken))
            self.assertLessEqual({u64(cluster.holder) for cluster in broken}, {oid for oid, _ in report.examples})
        for cluster in broken:
            self.assertTrue(self.exists(cluster.holder) and self.exists(cluster.one) and self.exists(cluster.two))
        self.assertFalse(self.exists(control.one))

    def test_kinds_of_references(self):
        """Classes that are gone and byte strings of Python 2 are understood; weak references, and those into another
        database, keep nothing."""
        clusters = self.clusters(5)
        gone, old, plain, weak, other = clusters
        kinds = {gone: (gone.one, None), old: old.one, plain: plain.one, weak: ['w', (weak.one,)],
                 other: ['m', ('elsewhere', other.one, PersistentMapping)]}
        client = self.client()
        for cluster, pid in kinds.items():
            client.begin().link(cluster.holder, note='newest')
            self.stored(cluster.holder, raw(pid, python2=cluster is old,
                                            class_name=b'nowhere\nNothing\n' if cluster is gone else None))
        report = self.pack()
        self.assertEqual(report.unreadable, 0)
        self.assertGreaterEqual(report.unread, len(kinds))
        kept = [self.exists(cluster.one) and self.exists(cluster.two) for cluster in clusters]
        self.assertEqual(kept, [True, True, True, False, False])

    def test_references_unknown_at_any_time(self):
        """Also of rows that were committed since the snapshot, and of those that are on the list."""
        for steps in ('begin_snapshot', 'new_pack', 'end_marking', 'lock_votes'), ('lock_votes', 'changes', 'sweep'):
            first, second, control = self.clusters(3)
            client = self.client()
            forget = 'UPDATE object_state SET refs = NULL'

            def act(n, name, first=first, second=second, client=client):
                if n == 0:
                    client.link(first.holder, first.one)
                    client.begin()
                self.run_sql(forget)

            with calls(self.packing, act, steps):
                self.pack(prepack_only=True)
                client.begin().link(second.holder, second.one)
                self.run_sql(forget)
                self.pack(skip_prepack=True)
            self.assertLessEqual({first.one, first.two, second.one, second.two}, self.ends())
            self.assertFalse(self.exists(control.one))

    def test_wrappers_say_whether_to_collect_garbage(self):
        """zc.zlibstorage and ZODB's HexStorage pass it on, as FileStorage takes it."""
        [cluster] = self.clusters(1)
        self.storage.pack(None, references, False)
        self.assertTrue(self.exists(cluster.one))
        self.storage.pack(None, references, None)
        self.assertFalse(self.exists(cluster.one))

    def test_wrapped(self):
        """Through a storage that compresses, or makes records hexadecimal, where references were not known."""
        storage = MVCCHexStorage(self.opened('wrapped'))
        db = ZODB.DB(storage)
        self.addCleanup(db.close)
        with db.transaction() as connection:
            connection.root()['kept'] = PersistentMapping(inner=PersistentMapping())
            connection.root()['gone'] = PersistentMapping()
        with db.transaction() as connection:
            gone = connection.root().pop('gone')._p_oid
        base = storage.base
        base.database.pool.attempt(lambda session: session.run('UPDATE object_state SET refs = NULL'))
        report = base.pack(None)
        self.assertGreater(report.unread, 0)
        self.assertEqual(report.unreadable, 0)
        with db.transaction() as connection:
            self.assertEqual(connection.root()['kept']['inner'].data, {})
        with self.assertRaises(POSKeyError):
            base.getTid(gone)

    def test_wrapped_by_what_nobody_told_of(self):
        """Such a record names nothing, so nobody knows what it refers to: not now, and not what was found out then."""
        wrapped = MVCCHexStorage(self.opened('wrapped'))
        db = ZODB.DB(wrapped)
        self.addCleanup(db.close)
        with db.transaction() as connection:
            connection.root()['kept'] = PersistentMapping(inner=PersistentMapping())
            connection.root()['gone'] = PersistentMapping()
        with db.transaction() as connection:
            gone = connection.root().pop('gone')._p_oid
        wrapped.base.database.pool.attempt(lambda session: session.run('UPDATE object_state SET refs = NULL'))
        bare = self.opened('wrapped')
        for options in {'dry_run': True}, {'prepack_only': True}, {}:
            with self.subTest(options), self.assertRaisesRegex(ConfigurationError, 'no pickles'):
                bare.pack(None, **options)
        self.assertGreater(bare.pack(None, gc=False).revisions, 0)
        survey = Survey(bare.database)
        for some in survey.ranges():
            self.assertEqual(survey.fill(*some).saved, 0)
        wrapped.base.pack(None)
        with closing(db.open()) as connection:
            connection.cacheMinimize()
            self.assertEqual(connection.root()['kept']['inner'].data, {})
        with self.assertRaises(POSKeyError):
            wrapped.base.getTid(gone)

    def test_unreadable_within_a_wrapper(self):
        """It may refer to what is within, not to what the wrapping looks like; and not all need be wrapped."""
        wrapped, plain, control = self.clusters(3)
        MVCCHexStorage(self.storage)
        client = self.client()
        for cluster in wrapped, plain:
            client.begin().link(cluster.holder, note='newest')
            state = record(cluster.one)[:-6]
            self.stored(cluster.holder, b'.h' + hexlify(state) if cluster is wrapped else state)
        report = self.pack()
        self.assertGreaterEqual(report.unreadable, 2)
        self.assertTrue(all(self.exists(oid) for c in (wrapped, plain) for oid in (c.one, c.two)))
        self.assertFalse(self.exists(control.one))


cases(globals(), Field, backends=BACKENDS + ORACLE)
cases(globals(), Records, backends=BACKENDS)
del Field, Records
