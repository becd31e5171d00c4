"""What README.txt tells an operator to type: its commands are taken from there, and run on real servers.

A dump is restored as it says, and a site goes from RelStorage to relstore and back. For RelStorage see test_relstorage.
"""
import os
import re
import threading
from contextlib import closing

from persistent.mapping import PersistentMapping
from ZODB.DB import DB

import relstore
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.objects import reachable
from relstore.tests.support.readme import Typed, block, blocks, section
from relstore.tests.support.servers import PostgreSQLServer, StandbyServer, require_postgresql


def contents(storage: relstore.RelStore) -> list[tuple]:
    """Return all that a copy into another storage would see."""
    return [(txn.tid, txn.user, txn.description, [(record.oid, record.tid, record.data) for record in txn])
            for txn in storage.iterator()]


class Restored(Typed):
    """A dump that was taken while others committed is restored: it is one state, and a site goes on from there."""

    def setUp(self):
        super().setUp()
        self.create()

    def test_whole_database(self):
        self.fill()
        self.check(self.dumped_and_restored(self.title))

    def fill(self, **where) -> None:
        """Make a site: pairs to be changed together, states of all bytes, and garbage."""
        with self.opened(**where) as storage, closing(DB(storage)) as db:
            with db.transaction() as connection:
                root = connection.root()
                for name in 'one', 'two', 'gone':
                    root[name] = PersistentMapping(n=0)
                root['bytes'] = PersistentMapping(small=bytes(range(256)) * 4, large=os.urandom(3_000_000), empty=b'',
                                                  nothing=b'\0' * 100_000, text='\N{SNOWMAN}\\\'"\x1a\n')
            with db.transaction() as connection:
                connection.transaction_manager.get().note('\N{SNOWMAN} \x01')
                del connection.root()['gone']

    def dumped_and_restored(self, title: str, **where) -> list[tuple]:
        """Run the commands of a section, which dump first, then restore; return what the original had at the end."""
        dump, *restore = blocks(title)[:2]
        with self.opened(**where) as storage:
            self.dump_beside_a_writer(storage, dump)
            last = contents(storage)
            taken = storage.new_oid()
        self.assertLess(max(oid for *_, records in last for oid, *_ in records), taken)
        for commands in restore:
            self.types(commands)
        return last

    def dump_beside_a_writer(self, storage: relstore.RelStore, commands: str) -> None:
        db, started, ended, wrote = DB(storage), threading.Event(), threading.Event(), []

        def write() -> None:
            while not (ended.is_set() and len(wrote) > 5):
                with db.transaction() as connection:
                    root = connection.root()
                    root['one']['n'] = root['two']['n'] = len(wrote)
                    root[f'new {len(wrote)}'] = PersistentMapping()
                wrote.append(True)
                started.set()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            self.assertTrue(started.wait(60))
            self.types(commands)
        finally:
            ended.set()
            writer.join()

    def check(self, last: list[tuple], *where, **options) -> None:
        """Compare a restored database with what the original was at the end, and go on in it. Nothing is lacking."""
        self.new_storage(*where, create_schema=False, **options).close()
        with self.opened(*where, **options) as storage:
            found = contents(storage)
            self.assertGreater(len(found), 1)
            if self.keep_history:
                self.assertEqual(found, last[:len(found)])
            records, ends = ({oid: (tid, data) for *_, records in all_ for oid, tid, data in records}
                             for all_ in (found, last))
            self.assertLessEqual(records.keys(), ends.keys())
            db = DB(storage)
            with db.transaction() as connection:
                root = connection.root()
                self.assertEqual(root['one']['n'], root['two']['n'])
                self.assertEqual({name for name in root if name.startswith('new')},
                                 {f'new {n}' for n in range(root['one']['n'] + 1)})
                changing = {thing._p_oid for thing in (root, root['one'], root['two'])}
                self.assertEqual({oid: record for oid, record in records.items() if oid not in changing},
                                 {oid: ends[oid] for oid in records if oid not in changing})
                root['one']['n'] += 1
                root['after'] = [PersistentMapping(n=n) for n in range(40)]
            new = {thing._p_oid for thing in root['after']}
            self.assertEqual(len(new), 40)
            self.assertFalse(new & records.keys())
            self.assertEqual(storage.pack(None).objects, 1)
            self.assertEqual(len(reachable(storage)), len(records) - 1 + 40)
            with db.transaction() as connection:
                self.assertEqual(connection.root()['bytes']['large'], root['bytes']['large'])


class RestoredPostgreSQL(Restored):
    title = 'PostgreSQL'

    def test_blobs_come_along(self):
        """As RelStorage stores them, in large objects; beside other tables, in a schema, and on a standby too."""
        self.fill()
        loid = self.store_blob()
        last = self.dumped_and_restored(self.title)
        self.assertEqual(self.blob('zodb'), (loid, bytes(range(256)) * 9))
        self.check(last)

    def test_one_schema(self):
        self.create('shared')
        self.execute('CREATE SCHEMA site; CREATE TABLE others (n int)', 'shared')
        where = {'name': 'shared', 'schema': 'site'}
        self.fill(**where)
        loid = self.store_blob('shared', 'site.')
        with self.opened(**where) as storage:
            dump = block(self.title, '--schema=site')
            self.dump_beside_a_writer(storage, dump)
            last = contents(storage)
        restore = blocks(self.title)[1].replace('zodb.dump', 'site.dump')
        self.types(restore)
        self.assertEqual(self.execute("SELECT to_regclass('others')"), [(None,)])
        self.assertEqual(self.blob('zodb', 'site.'), (loid, bytes(range(256)) * 9))
        self.check(last, schema='site')
        # What README warns of.
        self.types(dump.replace('--blobs ', ''))
        self.create('restored')
        self.types('pg_restore --exit-on-error --dbname=restored site.dump')
        self.assertEqual(self.execute('SELECT count(*) FROM site.blob_chunk', 'restored'), [(1,)])
        self.assertEqual(self.execute('SELECT count(*) FROM pg_largeobject', 'restored'), [(0,)])

    def store_blob(self, database: str = 'zodb', schema: str = '') -> int:
        data = (bytes(range(256)) * 9).hex()
        oid, tid = self.execute(f'SELECT zoid, tid FROM {schema}object_state ORDER BY zoid DESC LIMIT 1', database)[0]
        [[loid]] = self.execute(
            f'INSERT INTO {schema}blob_chunk (zoid, tid, chunk_num, chunk) '
            f"VALUES ({oid}, {tid}, 0, lo_from_bytea(0, '\\x{data}')) RETURNING chunk", database)
        return loid

    def blob(self, database: str, schema: str = '') -> tuple[int, bytes]:
        [[loid, data]] = self.execute(f'SELECT chunk, lo_get(chunk) FROM {schema}blob_chunk', database)
        return loid, bytes(data)

    def test_on_a_standby(self):
        """It has no rows of unlogged tables."""
        require_postgresql(self)
        primary = PostgreSQLServer()
        primary.start()
        self.addCleanup(primary.stop)
        primary.create_database('zodb')
        with closing(relstore.RelStore(relstore.PostgreSQL(primary.dsn('zodb')), keep_history=self.keep_history)) as s:
            with DB(s).transaction() as connection:
                connection.root()['n'] = 1
            last = contents(s)
            standby = StandbyServer(primary)
            standby.start()
            self.addCleanup(standby.stop)
            standby.catch_up()
        dump = blocks(self.title)[0]
        self.types(dump, PGHOST=str(standby.directory), PGPORT=str(standby.port))
        self.types(blocks(self.title)[1])
        with self.opened() as storage:
            self.assertEqual(contents(storage), last)


class RestoredMySQL(Restored):
    title = 'MySQL and MariaDB'

    def check(self, last):
        super().check(last, 'restored')


class RestoredSQLite(Restored):
    title = 'SQLite'

    def test_dot_backup(self):
        """The other way, while nobody commits."""
        self.fill()
        with self.opened() as storage:
            last = contents(storage)
        self.types("sqlite3 -bail var/site/main.sqlite3 '.backup site.backup'")
        self.types(blocks(self.title)[1])
        with self.opened() as storage:
            self.assertEqual(contents(storage), last)

    def test_under_a_running_process(self):
        self.fill()
        dump = blocks(self.title)[0]
        [command] = re.findall('``(sqlite3 main.sqlite3 ".restore backup")``',
                               ' '.join(section('Under running processes').split()))
        with self.opened() as storage:
            last = contents(storage)
            self.types(dump)
            db = DB(storage)
            with db.transaction() as connection:
                connection.root()['one']['n'] = 1
            self.types(command.replace('main.sqlite3', 'var/site/main.sqlite3').replace(' backup', ' site.backup'))
            with db.transaction() as connection:
                self.assertEqual(connection.root()['one']['n'], 0)
            self.assertEqual(contents(storage), last)

    def test_mistyped(self):
        """It is an error, and makes no empty database to be saved."""
        status, _, err = self.shell(blocks(self.title)[0])
        self.assertNotEqual(status, 0)
        self.assertIn('unable to open database', err)
        self.assertFalse((self.here / 'site.backup').exists())


cases(globals(), RestoredPostgreSQL, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
cases(globals(), RestoredMySQL, backends=(MySQLdbHistoryPreserving, MySQLdbHistoryFree))
cases(globals(), RestoredSQLite, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Restored, RestoredPostgreSQL, RestoredMySQL, RestoredSQLite
