"""zodbconvert of what changes: begun again, following, and as of a time."""
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentTypeError
from contextlib import closing, contextmanager
from unittest import mock

import transaction
import ZEO
from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from ZODB.DB import DB
from ZODB.POSException import POSKeyError
from ZODB.tests.hexstorage import HexStorage
from ZODB.utils import p64

import relstore
from relstore.cli import convert, following
from relstore.cli.following import Follower
from relstore.converting.conversion import Conversion
from relstore.converting.filestorage import LiveFileStorage
from relstore.errors import OutcomeUnknown, Unavailable
from relstore.tests.support.backends import SQLiteHistoryFree, SQLiteHistoryPreserving, cases
from relstore.tests.support.commands import environment
from relstore.tests.support.converting import Convert
from relstore.tests.support.layers import Processes

SECONDS = 60


def tid(year, month, day):
    return TimeStamp(year, month, day, 0, 0, 0).raw()


class Times(Convert):
    """--at: what was there then."""

    def test_at(self):
        for number in range(3):
            self.change('number', number)
        tids = [each.tid for each in self.source().iterator()]
        for position, number in (1, 0), (2, 1), (3, 2):
            destination = self.config(name=f'at{number}')
            with mock.patch.object(convert, 'tid_of_time', lambda text, tid=tids[position]: tid):
                self.works(self.path, destination, '--at', 'now', '--verify')
            with closing(self.open_storage(f'at{number}')) as storage:
                self.assertEqual(self.root(storage), {'number': number})

    def test_what_is_gone(self):
        """Without history, or before a pack, a part of what was there at a time is all that could be copied."""
        for number in range(3):
            self.change('number', number)
        times = [each.tid for each in self.source().iterator()]
        self.works(self.path, self.config(name='free'))
        with closing(DB(self.filestorage())) as db:
            db.pack()
        self.change('number', 3)
        sources = [self.path] if self.keep_history else [self.path, self.here / 'free.conf']
        for source in sources:
            for tid in times[:-1]:
                with mock.patch.object(convert, 'tid_of_time', lambda text, tid=tid: tid):
                    self.assertIn('does not have what was there at this time',
                                  self.refused(source, self.config(name='at'), '--at', 'then'))
            with mock.patch.object(convert, 'tid_of_time', lambda text: times[-1]):
                self.works(source, self.config(name='at'), '--at', 'then', '--verify', '--clear', '--yes')
            with closing(self.open_storage('at')) as storage:
                self.assertEqual(self.root(storage), {'number': 2})

    def test_times(self):
        self.assertEqual(convert.tid_of_time('2026-11-23T12:00'), convert.tid_of_time('2026-11-23 14:00:00+02:00'))
        self.assertLess(convert.tid_of_time('2026-11-22'), convert.tid_of_time('2026-11-23'))

    def test_times_of_no_transaction(self):
        for text in '9999-12-31', '1899-12-31', '5900-01-01':
            with self.assertRaisesRegex(ArgumentTypeError, 'not a time that a transaction can have'):
                convert.tid_of_time(text)

    def test_times_are_in_utc(self):
        self.addCleanup(time.tzset)
        with mock.patch.dict(os.environ, TZ='America/New_York'):
            time.tzset()
            self.assertEqual(convert.tid_of_time('2026-11-23 12:00'), TimeStamp(2026, 11, 23, 12, 0, 0).raw())


class Lost(Convert):
    """A follower whose server is gone for a time."""
    layer = Processes

    def test_it_goes_on(self):
        """It is not idle meanwhile, also where nothing more is committed later."""
        self.change('number', 0)
        copy, calls = Conversion.copy, []

        def failing(conversion, progress):
            calls.append(time.monotonic())
            if len(calls) == 2:
                raise OutcomeUnknown('The server ended.')
            if 2 < len(calls) < 5:
                raise Unavailable('The server is down.')
            copy(conversion, progress)
            if len(calls) == 1:
                self.change('number', 1)

        copied = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        with mock.patch.object(Conversion, 'copy', failing), mock.patch.object(following, 'PAUSE_SECONDS', 0.2):
            status, out, err = self.told(self.path, copied, '--follow', '--until-idle', '0.1')
        self.assertEqual(status, 0, out)
        self.assertEqual(err, 'The server ended. Trying again.\nThe server is down. Trying again.\n')
        self.assertEqual(len(calls), 5)
        self.assertEqual(self.differences(self.here / 'copy.fs', self.here / 'copy.blobs'), [])


    def test_a_file_that_is_not_there(self):
        """For some looks in a row: somebody may be putting another in its place."""
        self.change('number', 0)
        opened = []
        follower = Follower(mock.Mock(paths=[str(self.path)]), lambda: opened.append(1) or mock.Mock(), mock.Mock(), [])
        elsewhere = self.here / 'elsewhere'
        for number in range(2):
            self.assertTrue(follower._look_again())
            self.assertEqual(len(opened), number + 1)
            os.rename(self.path, elsewhere)
            self.assertEqual([follower._look_again() for _ in range(5)], [False] * 5)
            os.rename(elsewhere, self.path)
            os.utime(self.path, (number, number))
        self.assertTrue(follower._look_again())
        os.unlink(self.path)
        self.assertEqual([follower._look_again() for _ in range(6)], [False] * 5 + [True])
        self.assertEqual(len(opened), 4)        # which would raise an error

    def test_it_is_idle_when_nothing_comes(self):
        """Not when so much time has passed."""
        self.change('number', 0)
        calls = []

        def copying(conversion, progress):
            calls.append(time.monotonic())
            conversion.copied.transactions += len(calls) < 8

        copied = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        with mock.patch.object(Conversion, 'copy', copying), mock.patch.object(following, 'PAUSE_SECONDS', 0.1), \
                mock.patch.object(following.Follower, '_look_again', lambda self: True):
            self.works(self.path, copied, '--follow', '--until-idle', '0.4')
        self.assertGreater(len(calls), 8)
        self.assertGreater(calls[-1] - calls[6], 0.2)
        self.assertLess(len(calls), 8 + 6)

    def test_how_far_behind_it_is(self):
        """While it copies, and when it has all."""
        self.change('number', 0)
        copy = Conversion.copy

        def late(conversion, progress):
            if conversion.copied.transactions == 2:
                for number in range(1, 3):
                    self.change('number', number)
            copy(conversion, progress)

        copied = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        with mock.patch.object(Conversion, 'copy', late), \
                mock.patch.multiple(following, PAUSE_SECONDS=0.1, TOLD_SECONDS=-1):
            out = self.works(self.path, copied, '--follow', '--until-idle', '0.5')
        time = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d'
        self.assertRegex(out, rf'(?m)^3 transactions copied, up to {time}: .* behind the source\.$')
        self.assertRegex(out, r'(?m)^4 transactions copied, up to .*: level with the source\.$')
        self.assertEqual(following.behind(tid(2026, 1, 1), tid(2026, 1, 2)), '24 h 0 min behind the source')


class Resuming(Convert):
    """What tells that a copy was begun from this source."""
    layer = Processes

    def setUp(self):
        super().setUp()
        self.site = f'sqlite://{self.here}/site?keep-history=false&blob-dir={self.here}/blobs'
        self.copy = f'sqlite://{self.here}/copy?blob-dir={self.here}/copied'

    def opened(self):
        return relstore.RelStore(relstore.SQLite(str(self.here / 'site')), keep_history=False,
                                 blob_dir=str(self.here / 'blobs'))

    def test_a_source_without_history(self):
        """Its newest transaction is gone when its objects have changed again."""
        for name in 'first', 'second', 'second':
            self.change(name, PersistentMapping(), self.opened())
        self.works(self.site, self.copy)
        for number in range(3):
            with closing(DB(self.opened())) as db, db.transaction() as connection:
                connection.root()['second']['number'] = number
            self.change('number', number, self.opened())
        self.assertIn('Copied: ', self.works(self.site, self.copy))
        copy = relstore.RelStore(relstore.SQLite(str(self.here / 'copy')), blob_dir=str(self.here / 'copied'))
        self.assertEqual(self.root(copy)['second'], self.root(self.opened())['second'])

    def test_a_source_without_history_that_changes(self):
        """Just before it is read: what has changed is there anew, and what was there is gone."""
        for name in 'first', 'second':
            self.change(name, PersistentMapping(), self.opened())
        lastTransaction, left = relstore.RelStore.lastTransaction, [1]

        def changed_after(storage):
            last = lastTransaction(storage)
            if storage.isReadOnly() and left:
                left.pop()
                with closing(DB(self.opened())) as db, db.transaction() as connection:
                    connection.root()['second']['number'] = 1
            return last

        for copy in self.copy, f'sqlite://{self.here}/free?blob-dir={self.here}/freed&keep-history=false':
            left[:] = [1]
            with mock.patch.object(relstore.RelStore, 'lastTransaction', changed_after):
                self.works(self.site, copy)
            self.assertEqual(left, [])
            self.assertIn('are equal', self.works('--verify-only', self.site, copy))

    def test_nothing_is_left_of_what_was_copied(self):
        self.change('number', 1, self.opened())
        self.works(self.site, self.copy)
        self.change('number', 2, self.opened())
        self.assertIn('transactions that the source does not have', self.refused(self.site, self.copy))

    def test_a_file_that_was_packed(self):
        self.change('number', 0)
        self.change('kept', PersistentMapping())
        self.change('gone', PersistentMapping())
        self.works(self.path, self.copy)
        self.change('gone', None)
        with closing(DB(self.filestorage())) as db:
            db.pack()
        self.change('number', 2)
        self.assertIn('Copied: ', self.works(self.path, self.copy))

    def in_use(self, name):
        """Commit to the copy, as a site would that uses it already."""
        self.change(name, 'in use', relstore.RelStore(relstore.SQLite(str(self.here / 'copy')),
                                                      blob_dir=str(self.here / 'copied')))

    def test_a_copy_that_is_in_use(self):
        """What is committed to it is not of the source, whatever becomes of the source afterwards."""
        self.change('number', 1)
        self.works(self.path, self.copy)
        self.in_use('other')
        for name in 'number', 'other':
            self.assertIn('transactions that the source does not have', self.refused(self.path, self.copy))
            self.change(name, 2)

    def test_a_copy_without_history(self):
        """What was current when it was made is so no more, and so not among what is copied now."""
        copy = f'{self.copy}&keep-history=false'
        self.change('first', PersistentMapping())
        for number in range(2):
            self.change('number', number)
        self.works(self.path, copy)
        for number in range(2):
            self.change('number', number)
        self.assertIn('Copied: ', self.works(self.path, copy, '--verify'))

    def test_what_has_ended_since_ends_in_a_copy_without_history(self):
        copy = f'{self.copy}&keep-history=false'
        self.change('kept', PersistentMapping())
        self.change('ends', PersistentMapping())
        self.works(self.path, copy)
        with closing(DB(self.filestorage())) as db:
            manager = transaction.TransactionManager()
            db.undo(db.undoInfo(0, 1)[0]['id'], manager.begin())
            manager.commit()
        self.works(self.path, copy)
        storage = relstore.RelStore(relstore.SQLite(str(self.here / 'copy')), keep_history=False,
                                    blob_dir=str(self.here / 'copied'))
        with closing(storage), self.assertRaises(POSKeyError):
            storage.load(p64(2))

    def test_a_copy_of_a_packed_source_that_is_in_use(self):
        self.change('gone', PersistentMapping())
        self.change('gone', None)
        with closing(DB(self.filestorage())) as db:
            db.pack()
        self.works(self.path, self.copy)
        self.in_use('other')
        self.assertIn('transactions that the source does not have', self.refused(self.path, self.copy))


class Following(Convert):
    """Another process copies what is committed, from a database, and from a file that grows."""

    def setUp(self):
        super().setUp()
        self.site = self.open_storage(blob_dir=str(self.here / 'cache'))
        self.addCleanup(self.site.close)
        self.db = DB(self.site)
        self.addCleanup(self.db.close)

    @contextmanager
    def follower(self, source, destination, *options):
        command = [sys.executable, '-u', '-m', 'relstore.cli.main', 'convert', str(source), destination, '--follow']
        process = subprocess.Popen([*command, *options], env=environment(), stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            for line in process.stdout:
                if 'Following' in line:
                    break
            yield process
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()

    def copied(self):
        copy = LiveFileStorage(str(self.here / 'copy.fs'), str(self.here / 'copy.blobs'))
        with closing(DB(copy)) as db, db.transaction() as connection:
            return connection.root().get('number', -1)

    def until_copied(self, number):
        deadline = time.monotonic() + SECONDS
        while self.copied() != number:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)

    def test_a_database(self):
        copy = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        with self.follower(self.config(f'blob-dir {self.here}/cache'), copy) as process:
            for number in range(3):
                with self.db.transaction() as connection:
                    connection.root()['number'] = number
                self.until_copied(number)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(SECONDS), 0)

    def test_a_file_in_a_wrapper(self):
        """It is opened anew, too; and a pack puts another file in its place."""
        self.change('number', 0)
        config = self.write('hex.conf', '%import ZODB.tests', '<hexstorage>', '<filestorage>',
                            f'path {self.here}/Hex.fs', f'blob-dir {self.here}/Hex.blobs', '</filestorage>',
                            '</hexstorage>')
        self.works(self.path, config)
        copy = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        with closing(DB(HexStorage(self.filestorage('Hex')))) as db, self.follower(config, copy):
            for number in range(1, 4):
                with db.transaction() as connection:
                    connection.root()['number'] = number
                self.until_copied(number)
                db.pack()

    def test_behind_zeo(self):
        self.change('number', 0)
        server, stop = ZEO.server(str(self.path), blob_dir=str(self.blobs))
        self.addCleanup(stop)
        where = f'zeo://127.0.0.1:{server[1]}/1?blob-dir={self.blobs}&shared-blob-dir=true'
        copy = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        site = ZEO.client(server, blob_dir=str(self.blobs), shared_blob_dir=True)
        with closing(DB(site)) as db, self.follower(where, copy, '--until-idle', '4') as process:
            for number in range(1, 3):
                with db.transaction() as connection:
                    connection.root()['number'] = number
                self.until_copied(number)
            self.assertEqual(process.wait(SECONDS), 0)

    def test_a_file(self):
        self.change('number', 0)
        copy = f'file://{self.here}/copy.fs?blob-dir={self.here}/copy.blobs'
        with closing(DB(self.filestorage())) as db, self.follower(self.path, copy, '--until-idle', '4') as process:
            for number in range(1, 3):
                with db.transaction() as connection:
                    connection.root()['number'] = number
                self.until_copied(number)
            self.assertEqual(process.wait(SECONDS), 0)
            self.assertIn('Copied: ', process.stdout.read())


cases(globals(), Times, Following, backends=(SQLiteHistoryPreserving, SQLiteHistoryFree))
del Convert, Times, Following
