"""Two processes that share a memcached, each with a storage of its own on one database."""
import multiprocessing
import threading
import time
import unittest
from contextlib import closing, suppress
from unittest.mock import patch

import transaction
import ZODB
from persistent.mapping import PersistentMapping
from ZODB.POSException import POSError, ReadConflictError
from ZODB.utils import u64

import relstore
from relstore.caching import memcached
from relstore.caching.memcached import TIMEOUT_SECONDS
from relstore.tests.support.backends import (
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    PyMySQLHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.children import in_child
from relstore.tests.support.layers import Processes
from relstore.tests.support.patience import until
from relstore.tests.support.servers import (
    GarblingProxy,
    MemcachedServer,
    PostgreSQLServer,
    require_memcached,
    require_postgresql,
)

# What a poll that comes late may take on a busy machine.
MARGIN = 5.0
# Objects beside the two that are counted.
MANY = 200


class Site:
    """A storage with two objects, whose numbers always add up to 0."""

    def __init__(self, storage):
        self.storage = storage
        self.db = ZODB.DB(storage)
        # Explicit: a poll is sent when a transaction begins, and at no other time.
        self.manager = transaction.TransactionManager(explicit=True)
        self.connection = self.db.open(self.manager)

    def create(self):
        with self.manager:
            root = self.connection.root()
            root['x'], root['y'] = PersistentMapping(n=0), PersistentMapping(n=0)

    def create_many(self):
        with self.manager:
            self.connection.root()['many'] = [PersistentMapping(n=n) for n in range(MANY)]

    def change_some(self):
        with self.manager:
            for some in self.connection.root()['many'][::3]:
                some['n'] += MANY

    def load_many(self):
        """Return their numbers."""
        with self.manager:
            return [some['n'] for some in self.connection.root()['many']]

    def read(self):
        """Return x as a new transaction sees it."""
        with self.manager:
            root = self.connection.root()
            x, y = root['x']['n'], root['y']['n']
        assert x + y == 0, f'{x} and {y} are of different transactions'
        return x

    def add(self, number):
        """Return x after adding to it."""
        for attempt in self.manager.attempts(10):
            with attempt:
                root = self.connection.root()
                root['x']['n'] += number
                root['y']['n'] -= number
        return self.read()

    def forget(self):
        """Load everything anew, past the connection's own cache and the process's."""
        self.connection.cacheMinimize()
        self.storage.database.cache.clear()

    def stats(self):
        return self.storage.cache_stats()

    def close(self):
        self.connection.close()
        self.db.close()


def serve(pipe, open_storage):
    """Do in this process what comes through the pipe."""
    with closing(Site(open_storage())) as site:
        pipe.send((None, None))
        while (message := pipe.recv()) is not None:
            name, *args = message
            try:
                pipe.send((getattr(site, name)(*args), None))
            except Exception as error:
                pipe.send((None, repr(error)))


class Other:
    """A Site in another process, with the same methods."""

    def __init__(self, test, open_storage):
        context = multiprocessing.get_context('fork')
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, open_storage), daemon=True)
        self._process.start()
        theirs.close()
        test.addCleanup(self.close)
        self.receive()      # it is open: two that open an empty database at once would both make its root

    def send(self, *message):
        self._pipe.send(message)

    def receive(self):
        result, error = self._pipe.recv()
        if error is not None:
            raise AssertionError(error)
        return result

    def __getattr__(self, name):
        def call(*args):
            self.send(name, *args)
            return self.receive()
        return call

    def close(self):
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join()


class Suite(unittest.TestCase):

    def setUp(self):
        require_memcached(self)
        super().setUp()
        # On a busy machine memcached may be slow, and would be left alone.
        patience = patch.object(memcached, 'SLOW_SECONDS', 1.0)
        patience.start()
        self.addCleanup(patience.stop)
        self.server = MemcachedServer()
        self.addCleanup(self.server.stop)
        self.server.start()
        self.memcached = GarblingProxy(self.server.address)
        self.memcached.start()
        self.addCleanup(self.memcached.stop)
        self.where = f'127.0.0.1:{self.memcached.port}'
        self.address()      # the database is empty from here on

    def options(self, **more):
        return {'keep_history': self.keep_history, 'cache_servers': self.where, 'poll_interval': 3600} | more

    def site(self, address=None, **more):
        site = Site(relstore.RelStore(address or self.address(), **self.options(**more)))
        self.addCleanup(site.close)
        return site

    def other(self, **more):
        address, options = self.address(), self.options(**more)
        return Other(self, lambda: relstore.RelStore(address, **options))

    def pair(self):
        """Return this process and another, which see the same objects."""
        other = self.other()
        site = self.site()
        site.create()
        self.assertEqual((site.read(), other.read()), (0, 0))
        return site, other

    def until(self, condition, seconds=MARGIN):
        until(condition, seconds)


class Sharing(Suite):

    def test_an_unchanged_site_asks_nothing(self):
        site, other = self.pair()
        for process in (site, other):
            process.read()
            before = process.stats()
            for _ in range(50):
                self.assertEqual(process.read(), 0)
            after = process.stats()
            self.assertEqual(after['polls_sent'], before['polls_sent'])
            self.assertEqual(after['polls_saved'], before['polls_saved'] + 50)

    def test_a_change_is_seen_at_the_next_transaction(self):
        site, other = self.pair()
        for number in range(1, 16):
            self.assertEqual(other.add(1), 2 * number - 1)
            self.assertEqual(site.read(), 2 * number - 1)
            self.assertEqual(site.add(1), 2 * number)
            self.assertEqual(other.read(), 2 * number)

    def test_what_one_has_loaded_another_finds(self):
        other = self.other()
        site = self.site()
        site.create_many()
        self.assertEqual(other.load_many(), list(range(MANY)))
        self.assertGreaterEqual(other.stats()['shared_hits'], MANY)
        # After this it has only what site loads from the database, and then what other commits.
        self.server.restart()
        site.storage.database.tier.look_soon()
        site.storage.database.polling.forget()
        site.forget()
        self.assertEqual(site.load_many(), list(range(MANY)))
        other.change_some()
        expected = [n + MANY * (n % 3 == 0) for n in range(MANY)]
        late = self.site()
        self.assertEqual(late.load_many(), expected)
        self.assertGreaterEqual(late.stats()['shared_hits'], MANY)
        self.assertEqual(site.load_many(), expected)

    def test_one_message_for_all_that_a_transaction_has_loaded(self):
        self.site().create_many()
        self.server.restart()       # nothing of it is there
        late = self.site()
        with patch.object(late.storage.database.tier, 'put', wraps=late.storage.database.tier.put) as put:
            late.load_many()
        self.assertLessEqual(put.call_count, 2 + MANY // 100)
        self.assertGreaterEqual(sum(len(call.args[0]) for call in put.call_args_list), MANY)

    def test_a_transaction_that_commits_shares_what_it_has_loaded(self):
        self.site().create()
        self.server.restart()
        late = self.site()
        with patch.object(late.storage.database.tier, 'put', wraps=late.storage.database.tier.put) as put:
            late.add(1)
        with late.manager:
            root = late.connection.root()
            loaded = {u64(each._p_oid) for each in (root['x'], root['y'])}
        self.assertLessEqual(loaded, {oid for call in put.call_args_list for oid, *_ in call.args[0]})

    def test_who_sees_a_new_epoch_tells_the_others(self):
        """One that has no memcached has emptied the database."""
        site, other = self.pair()
        self.assertEqual(other.add(1), 1)
        other.read()
        with closing(self.open_storage()) as storage:
            storage.zap_all()
        other.read()                # it knows of nothing
        site.storage.database.polling.forget()
        with suppress(POSError):
            site.read()
        with self.assertRaises(AssertionError):     # POSKeyError, and what comes of it
            other.read()

    def test_a_forked_child_shares_too(self):
        site, other = self.pair()
        other.create_many()
        other.load_many()
        site.read()
        bases = site.storage.database.tier.epoch.bases

        def work():
            child = Site(site.storage)
            assert child.load_many() == list(range(MANY))
            assert child.stats()['shared_hits'] >= MANY, child.stats()
            assert site.storage.database.tier.epoch.bases == bases

        in_child(self, work)

    def test_a_memcached_that_fails_in_any_way(self):
        """Both processes go on, views are consistent, and each change is seen at the next transaction: the database is
        asked."""
        # One that a busy machine makes slow has not failed: what could not be told is seen when the debt is paid.
        patience = patch.object(memcached, 'TIMEOUT_SECONDS', 2.0)
        patience.start()
        self.addCleanup(patience.stop)
        site, other = self.pair()
        noise = 0

        def garble(data):
            nonlocal noise
            noise += 1
            return [b'VALUE x 0 5\r\n', bytes(len(data)), b'12345\r\n', b'ERROR\r\n', data[:5]][noise % 5]
        faults = {
            'killed': (self.server.kill, self.server.start),
            'restarted': (self.server.restart, lambda: None),
            'cut': (self.memcached.cut, lambda: None),
            'garbage': (lambda: setattr(self.memcached, 'garble', garble),
                        lambda: setattr(self.memcached, 'garble', None)),
            'slow': (self.memcached.pause, self.memcached.resume),
        }
        x = 0
        for name, (begin, end) in faults.items():
            with self.subTest(name):
                begin()
                for _ in range(10):
                    x += 1
                    self.assertEqual(other.add(1), x)
                    self.assertEqual(site.read(), x)
                    site.forget()
                    self.assertEqual(site.read(), x)
                end()
                for _ in range(5):
                    x += 1
                    self.assertEqual(site.add(1), x)
                    # While the one who committed could not tell the other may not know, until the debt is paid.
                    self.until(lambda: site.read() == x == other.read(), 2 * memcached.LONGEST_PAUSE_SECONDS)

    def test_faults_while_both_are_busy(self):
        site, other = self.pair()
        stop, reads, wrong = threading.Event(), [], []

        def read():
            while not stop.is_set():
                try:
                    reads.append(site.read())
                except ReadConflictError:
                    continue
                except Exception as error:
                    wrong.append(repr(error))
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(1, 31):
                other.send('add', 1)
                [site.storage.database.cache.clear, self.memcached.cut, self.server.restart][number % 3]()
                other.receive()
        finally:
            stop.set()
            reader.join()
        self.assertEqual(wrong, [])
        self.assertEqual(reads, sorted(reads))
        self.until(lambda: site.read() == 30, 2 * memcached.LONGEST_PAUSE_SECONDS)

    def test_a_committer_that_cannot_reach_it_is_seen_in_time(self):
        nowhere = GarblingProxy(self.server.address)
        nowhere.start()
        nowhere.stop()
        other = self.other(cache_servers=f'127.0.0.1:{nowhere.port}')
        site = self.site(poll_interval=0.5)
        site.create()
        for number in range(1, 3):
            site.read()
            committed = other.add(1)
            started = time.monotonic()
            self.until(lambda: site.read() == committed == number)
            self.assertLess(time.monotonic() - started, 0.5 + MARGIN / 2)

    def far_off(self):
        """Return a proxy that a committer reaches memcached through, the committer, and another process."""
        proxy = GarblingProxy(self.server.address)
        proxy.start()
        self.addCleanup(proxy.stop)
        other = self.other(poll_interval=1000)
        site = self.site(cache_servers=f'127.0.0.1:{proxy.port}')
        site.create()
        self.assertEqual(other.read(), 0)
        for name, value in ('PAUSE_SECONDS', 1000.0), ('LONGEST_PAUSE_SECONDS', 1000.0), ('SLOW_SECONDS', 0.02):
            patched = patch.object(memcached, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        return proxy, site, other

    def test_a_committer_that_finds_it_slow_is_seen_at_once(self):
        """Though it leaves it alone for all else."""
        proxy, site, other = self.far_off()
        proxy.garble = lambda data: time.sleep(0.03) or data
        server = site.storage.database.memcached.first
        alone = 0
        for number in range(1, 31):
            started = time.monotonic()
            self.assertEqual(site.add(1), number)
            self.assertLess(time.monotonic() - started, 2 * TIMEOUT_SECONDS + MARGIN / 2)
            self.assertEqual(other.read(), number)
            alone += bool(server.pause)
        self.assertGreater(alone, 10)
        with self.assertRaises(memcached.Unreachable):
            server.get('anything')

    def test_a_committer_tells_as_soon_as_it_can(self):
        """However long all else leaves alone a memcached that has failed."""
        proxy, site, other = self.far_off()
        proxy.stop()
        self.assertEqual(site.add(1), 1)
        self.assertEqual(site.add(1), 2)
        self.assertTrue(site.storage.database.memcached.first.pause)
        proxy.start()
        self.until(lambda: other.read() == 2)

    def test_a_slow_memcached_costs_little(self):
        site, _ = self.pair()
        self.memcached.pause()
        started = time.monotonic()
        for _ in range(20):
            site.read()
        self.assertLess(time.monotonic() - started, TIMEOUT_SECONDS + MARGIN / 2)


class Statements(Suite):
    """What goes over the wire to a database server."""

    def test_an_unchanged_site_serves_a_cached_page_without_a_statement(self):
        with self.new_proxy() as proxy:
            site = self.site(self.address_through(proxy))
            site.create()
            site.read()
            site.read()
            proxy.reset()
            for _ in range(50):
                site.read()
            self.assertEqual((proxy.sent, proxy.round_trips), (0, 0))

    def test_what_memcached_has_is_not_asked_of_the_database(self):
        self.site().create_many()
        with self.new_proxy() as proxy:
            late = self.site(self.address_through(proxy))
            proxy.reset()
            self.assertEqual(late.load_many(), list(range(MANY)))
            # One to poll, and one for the snapshot of a history-free view.
            self.assertLessEqual(proxy.round_trips, 4)


BACKENDS = SQLiteHistoryPreserving, Psycopg2HistoryPreserving, Psycopg2HistoryFree, PyMySQLHistoryFree
cases(globals(), Sharing, backends=BACKENDS)
cases(globals(), Statements, backends=BACKENDS[1:])
del Suite, Sharing, Statements


class TestCrash(unittest.TestCase):
    """The database crashes, and memcached counts no commit: who does not ask learns it from the first load."""
    layer = Processes

    def setUp(self):
        require_postgresql(self)
        require_memcached(self)

    def test_the_next_transactions_go_on(self):
        memcached, server = MemcachedServer(), PostgreSQLServer(durable=True)
        for started in (memcached, server):
            self.addCleanup(started.stop)
            started.start()
        for keep_history in (True, False):
            with self.subTest(keep_history=keep_history):
                dsn = server.create_database(f'crash_{keep_history}'.lower())
                storage = relstore.RelStore(relstore.PostgreSQL(dsn), keep_history=keep_history,
                                            cache_servers=memcached.where, poll_interval=3600)
                with closing(Site(storage)) as site:
                    site.create()
                    self.assertEqual(site.add(5), 5)
                    site.read()
                    server.kill()
                    server.start()
                    site.forget()
                    refused = 0
                    while refused < 5:
                        try:
                            self.assertEqual(site.read(), 5)
                            break
                        except ReadConflictError:
                            refused += 1
                    self.assertLess(refused, 5)
