"""Directories for saved caches."""
import logging
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from relstore.caching import warmstart
from relstore.caching.cache import Cache
from relstore.caching.warmstart import WarmStart

MB = 1 << 20


class Directory(unittest.TestCase):
    """Caches without a database, and a directory for their files."""

    def setUp(self):
        self.directory = Path(tempfile.mkdtemp(prefix='relstore-warm-'))
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = self.directory / 'relstore-name.cache'
        self.patch('PAUSE_SECONDS', 0)

    def patch(self, constant, value):
        patched = mock.patch.object(warmstart, constant, value)
        patched.start()
        self.addCleanup(patched.stop)

    def cache(self, head=10, rows=(), limit=MB):
        cache = Cache(limit, limit)
        cache.restart(head)
        for oid, tid, record in rows:
            cache.put(oid, tid, record, head)
        return cache

    def warm(self, cache, epoch='epoch', database='name', largest=MB, directory=None, proves=lambda known: True):
        return WarmStart(str(directory or self.directory), database, cache, lambda generation: epoch, proves, largest)

    def save(self, head=10, rows=(), **how):
        cache = self.cache(head, rows)
        self.warm(cache, **how).save()
        return cache

    def opened(self, last=100, limit=MB, **how) -> Cache:
        """Return the cache of a process that has just been started, filled."""
        cache = Cache(limit, limit)
        warm = self.warm(cache, **how)
        cache.restart(warm.head(how.get('epoch', 'epoch'), lambda: last, warm._proves))
        warm.start()
        warm.filled.wait(20)
        warm._stop.set()
        warm._thread.join()
        return cache

    def rows(self, **how) -> list:
        return self.opened(**how).current()[1]

    def warnings(self, work) -> list[str]:
        with self.assertLogs('relstore', logging.DEBUG) as logs:
            work()
        return [record.getMessage() for record in logs.records if record.levelno >= logging.WARNING]


ROWS = [(oid, 1 + oid % 10, b'state of %d ' % oid * (oid % 4)) for oid in range(1, 21)]
