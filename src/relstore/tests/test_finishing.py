"""A commit that waits for the commit lock is told of, with who has it."""
import logging
import threading
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from ZODB import DB

from relstore import finishing
from relstore.tests.backends import (
    Psycopg2HistoryFree,
    Psycopg2PooledHistoryPreserving,
    Psycopg3HistoryPreserving,
    cases,
)

PATIENCE = 60       # seconds


class Told(logging.Handler):
    """What is logged, and events that somebody waits for."""

    def __init__(self):
        super().__init__()
        self.records, self.more = [], threading.Condition()

    def emit(self, record):
        with self.more:
            self.records.append(record)
            self.more.notify_all()

    def wait_for(self, level, text, count=1):
        """Return the messages with a text, when there are so many."""
        def found():
            return [r.getMessage() for r in self.records if r.levelno == level and text in r.getMessage()]
        with self.more:
            assert self.more.wait_for(lambda: len(found()) >= count, PATIENCE), self.records
            return found()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == 'relstore finishing']


class Finishing(TestCase):

    def setUp(self):
        super().setUp()
        for name, value in ('EVERY', 0.05), ('REPEAT', 0.1):
            patched = patch.object(finishing, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        self.told = Told()
        log = logging.getLogger('relstore')
        log.addHandler(self.told)
        self.addCleanup(log.removeHandler, self.told)
        self.addCleanup(log.setLevel, log.level)
        log.setLevel(logging.INFO)

    def test_waits(self):
        with closing(self.new_watch()) as watch, closing(DB(self.open_storage())) as db:
            with db.transaction() as connection:
                connection.root()['a'] = 1
            watch.take_commit_lock()

            def commit():
                with db.transaction() as connection:
                    connection.root()['a'] = 2

            thread = threading.Thread(target=commit)
            thread.start()
            try:
                pid = watch.one('SELECT pg_backend_pid()')
                *_, last = self.told.wait_for(logging.WARNING, f'the server process {pid}', 2)
                self.assertIn('has waited for', last)
                self.assertFalse([r for r in self.told.records if 'no longer' in r.getMessage()])
            finally:
                watch.release_commit_lock()
                thread.join(PATIENCE)
            self.told.wait_for(logging.INFO, 'no longer')
            [watcher] = threads()
        watcher.join(PATIENCE)
        self.assertFalse(watcher.is_alive())

    def test_ends_when_idle_and_begins_again(self):
        with patch.object(finishing, 'IDLE', 0.0), closing(DB(self.open_storage())) as db:
            for n in range(3):
                with db.transaction() as connection:
                    connection.root()['a'] = n
                for watcher in threads():
                    watcher.join(PATIENCE)
                    self.assertFalse(watcher.is_alive())
        self.assertFalse([r for r in self.told.records if r.levelno == logging.WARNING])


cases(globals(), Finishing, backends=(Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg2PooledHistoryPreserving))
del Finishing
