"""memcached.py on a real memcached, with either client: what it keeps, and how little it costs when it fails."""
import importlib.util
import os
import pickle
import random
import re
import socket
import sys
import threading
import time
import unittest
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest import mock

from relstore.caching import commits, memcached
from relstore.caching.cache import Cache
from relstore.caching.commits import BEGUN, CommitCounter
from relstore.caching.memcached import LARGEST_VALUE_BYTES, TIMEOUT_SECONDS, Memcached, Unreachable, split_servers
from relstore.caching.shared import LARGEST_BATCH, LOOK_EVERY_SECONDS, Tier
from relstore.errors import ConfigurationError
from relstore.tests.support.layers import Processes
from relstore.tests.support.patience import until, within
from relstore.tests.support.servers import GarblingProxy, MemcachedLayer, MemcachedServer, cannot_run, require_memcached

# An answer may come late on a busy machine; it must not be taken for a hang.
MARGIN = 1.0


class Trap:
    """Tells when it is unpickled."""

    sprung = []

    def __reduce__(self):
        return self.sprung.append, (True,)


class Case(unittest.TestCase):
    module = 'pymemcache'

    def setUp(self):
        if importlib.util.find_spec(self.module) is None:
            cannot_run(self, f'{self.module} is not installed', excused=self.module == 'pylibmc')

    def patch(self, name, value):
        patch = mock.patch.object(memcached, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def patient(self):
        """However busy the machine, a server that answers is none that is given up."""
        self.patch('TIMEOUT_SECONDS', 20)
        self.patch('SLOW_SECONDS', 20)

    def client(self, *servers):
        client = Memcached(servers, self.module)
        self.addCleanup(client.close)
        return client

    def own_server(self, *args, **kwargs):
        require_memcached(self)
        server = MemcachedServer(*args, **kwargs)
        self.addCleanup(server.stop)
        server.start()
        return server

    def proxy(self, server):
        proxy = GarblingProxy(server.address)
        proxy.start()
        self.addCleanup(proxy.stop)
        return proxy

    @contextmanager
    def warned(self):
        """Whatever is wrong with a server is logged once."""
        with self.assertLogs('relstore', 'WARNING') as logs:
            yield
        self.assertEqual(len(logs.records), 1, logs.output)

    @contextmanager
    def within(self, seconds):
        started = time.monotonic()
        yield
        self.assertLess(time.monotonic() - started, seconds)

    def until(self, condition, seconds=20):
        """Return what condition() returns, as soon as that is true."""
        return until(condition, seconds)


class ClientSuite:
    layer = MemcachedLayer

    def setUp(self):
        self.layer.require(self)
        super().setUp()
        self.patient()
        self.server = self.layer.server
        self.shared = self.client(self.server.where)
        self.prefix = f'{self.id()}:'

    def keys(self, *names):
        return [self.prefix + name for name in names]

    def raw(self, command):
        """Send a command past any client; return the answer."""
        with socket.create_connection(self.server.address) as connection:
            connection.sendall(command)
            return connection.recv(1000)

    def test_values_come_back_byte_for_byte(self):
        rnd = random.Random(1)
        values = {f'{self.prefix}{n}': rnd.randbytes(n * n) for n in range(40)}
        values |= {f'{self.prefix}x{n}': value for n, value in enumerate(
            (b'', b'\r\nEND\r\n', b'VALUE x 0 3\r\n', b'\0' * 300, b'STORED', b'7'))}
        self.shared.set_many(values)
        self.assertEqual(self.shared.get_many(list(values)), values)

    def test_what_is_not_there_is_left_out(self):
        here, gone = self.keys('here', 'gone')
        self.shared.set_many({here: b'1'})
        self.assertEqual(self.shared.get_many([gone, here]), {here: b'1'})
        self.assertEqual(self.shared.get_many([]), {})
        self.shared.set_many({})

    def test_what_is_too_large_is_left_out(self):
        largest, larger, small = self.keys('largest', 'larger', 'small')
        values = {larger: bytes(LARGEST_VALUE_BYTES + 1), largest: b'x' * LARGEST_VALUE_BYTES, small: b'x'}
        self.shared.set_many(values)
        del values[larger]
        self.assertEqual(self.shared.get_many([largest, larger, small]), values)

    def test_nothing_is_unpickled(self):
        [key] = self.keys('pickle')
        value = pickle.dumps(Trap())
        for flags in (1, 2, 4, 16, 8, 255):
            with self.subTest(flags=flags):
                self.raw(b'set %s %d 0 %d\r\n%s\r\n' % (key.encode(), flags, len(value), value))
                found = self.client(self.server.where).get_many([key])
                if self.module != 'pylibmc' or not flags & 8:     # which says that it is compressed
                    self.assertEqual(found, {key: value})
        self.assertEqual(Trap.sprung, [])

    def test_numbers(self):
        first, [key] = self.shared.first, self.keys('number')
        self.assertIsNone(first.incr(key, 1))
        self.assertTrue(first.add(key, b'%d' % (1 << 61)))
        self.assertFalse(first.add(key, b'1'))
        self.assertEqual(first.incr(key, BEGUN), (1 << 61) + BEGUN)
        self.assertEqual(first.incr(key, 1, again=False), (1 << 61) + BEGUN + 1)
        self.assertEqual(first.get(key), b'%d' % ((1 << 61) + BEGUN + 1))
        first.delete(key)
        self.assertIsNone(first.get(key))
        first.delete(key)

    def test_sixteen_threads(self):
        wrong = []

        def work(number):
            for n in range(100):
                keys = self.keys(*(f'{number}-{n}-{m}' for m in range(5)))
                values = {key: key.encode() * 20 for key in keys}
                self.shared.set_many(values)
                if self.shared.get_many(keys) != values:
                    wrong.append(number)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_fork(self):
        """Parent and child go on at the same time, each on connections of its own."""
        values = {key: key.encode() * 50 for key in self.keys(*map(str, range(50)))}
        self.shared.set_many(values)

        def all_well():
            return all(self.shared.get_many([key]) == {key: value} for _ in range(20) for key, value in values.items())
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                self.shared.after_fork()
                os.write(write, b'well' if all_well() else b'ill')
            finally:
                os._exit(0)
        try:
            self.assertTrue(all_well())
        finally:
            os.waitpid(child, 0)
            os.close(write)
            answer = os.read(read, 10)
            os.close(read)
        self.assertEqual(answer, b'well')
        self.assertTrue(all_well())

    def test_several_servers(self):
        """All processes find a key on the same server, whichever client they have; what one server had is lost with
        it, and with it alone."""
        more = [self.own_server(), self.own_server()]
        servers = [self.server.where, *(server.where for server in more)]
        values = {key: key.encode() for key in self.keys(*map(str, range(60)))}
        self.client(*servers).set_many(values)
        other = Memcached(servers, 'pymemcache')
        self.addCleanup(other.close)
        self.assertEqual(other.get_many(values), values)
        client = self.client(*servers)
        self.assertEqual(client.get_many(values), values)
        more[1].kill()
        with self.warned():
            for _ in range(3):
                rest = client.get_many(values)
        self.assertEqual(values | rest, values)
        self.assertLess(len(rest), 55)
        self.assertGreater(len(rest), 5)
        client.set_many(values)
        self.assertEqual(client.get_many(values), rest)


class FailureSuite:
    layer = Processes

    def setUp(self):
        super().setUp()
        self.server = self.own_server()

    def quick(self):
        """Pauses are short from here on."""
        self.patch('PAUSE_SECONDS', 0.01)
        self.patch('LONGEST_PAUSE_SECONDS', 0.02)

    def test_unix_socket(self):
        self.patient()
        client = self.client(self.own_server(unix=True).where)
        client.set_many({'a': b'1'})
        self.assertEqual(client.get_many(['a']), {'a': b'1'})

    def test_a_server_with_a_lower_limit_is_not_given_up(self):
        self.patient()
        client = self.client(self.own_server({'max-item-size': '512k'}).where)
        with self.assertNoLogs('relstore'):
            client.set_many({'large': bytes(700_000)})
            client.set_many({'small': b'1'})
            self.assertEqual(client.get_many(['large', 'small']), {'small': b'1'})

    def test_a_dead_server_costs_nothing(self):
        client = self.client(self.server.where)
        client.set_many({'a': b'1'})
        self.server.kill()
        with self.within(MARGIN), self.warned():
            for _ in range(1000):
                self.assertEqual(client.get_many(['a']), {})
                client.set_many({'a': b'1'})

    def test_it_is_used_again_when_it_is_back(self):
        self.quick()
        client = self.client(self.server.where)
        self.server.kill()
        with self.warned():
            client.set_many({'a': b'1'})
        self.server.start()

        def stored():
            client.set_many({'a': b'1'})
            return client.get_many(['a'])
        with self.assertLogs('relstore', 'INFO') as logs:
            self.assertEqual(self.until(stored), {'a': b'1'})
        self.assertIn('answers again', logs.output[0])

    def test_a_restart_between_two_requests_is_not_noticed(self):
        self.patient()
        client = self.client(self.server.where)
        self.use_many_connections(client)
        self.server.restart()
        with self.assertNoLogs('relstore'):
            client.set_many({'a': b'1'})
            self.assertEqual(client.first.get('a'), b'1')
            self.assertIsNone(client.first.incr('b', 1))

    def use_many_connections(self, client, count=4):
        barrier = threading.Barrier(count)

        def use(connection):
            connection.get('a')
            barrier.wait()
        threads = [threading.Thread(target=client.first.do, args=(use,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(client.first.idle), min(count, memcached.MOST_IDLE))

    def test_an_interrupted_request_leaves_no_answer_behind(self):
        self.patient()
        client = self.client(self.server.where)
        client.set_many({'a': b'1', 'b': b'2'})

        def interrupted(connection):
            if self.module == 'pymemcache':
                connection.sock.sendall(b'get a\r\n')
            raise KeyboardInterrupt
        with self.assertRaises(KeyboardInterrupt):
            client.first.do(interrupted)
        self.assertEqual(len(client.first.idle), 0)
        self.assertEqual(client.first.get('b'), b'2')

    def test_a_connection_lost_in_done_is_no_failure_of_the_server(self):
        """What must not happen twice is not tried again, and what follows goes to a new connection."""
        self.patient()
        client = self.client(self.server.where)
        client.first.add('n', b'1')
        self.use_many_connections(client)
        self.server.restart()
        with self.assertNoLogs('relstore'):
            with self.assertRaises(Unreachable):
                client.first.incr('n', 1, again=False)
            self.assertEqual(len(client.first.idle), 0, 'the others are dead as well')
            client.first.delete('n')
            self.assertTrue(client.first.add('n', b'5'))

    def test_connections_do_not_stay(self):
        """16 are kept at most; and after close() none, though some were in use then."""
        self.patient()
        self.own_connections = 0
        self.own_connections = self.connections()
        client = self.client(self.server.where)
        self.use_many_connections(client, memcached.MOST_IDLE + 4)
        self.until(lambda: self.connections() == memcached.MOST_IDLE)
        barrier = threading.Barrier(5, timeout=60)

        def use(connection):
            connection.get('a')
            barrier.wait()
            barrier.wait()
        threads = [threading.Thread(target=client.first.do, args=(use,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        barrier.wait()
        client.close()
        self.until(lambda: self.connections() == 4)
        barrier.wait()
        for thread in threads:
            thread.join()
        client.set_many({'a': b'1'})
        self.assertEqual(client.get_many(['a']), {'a': b'1'})
        self.until(lambda: not self.connections())

    def connections(self):
        """Return how many the server has, but for the one that asks and those that it listens on."""
        with socket.create_connection(self.server.address) as connection:
            connection.sendall(b'stats\r\n')
            answer = b''
            for _ in within('memcached has told all'):
                answer += connection.recv(10_000)
                if answer.endswith(b'END\r\n'):
                    break
        [count] = re.findall(rb'curr_connections (\d+)', answer)
        return int(count) - self.own_connections

    def delayed(self, seconds):
        """Return a client, and the proxy that is to delay what the server answers, by seconds(answer)."""
        proxy = self.proxy(self.server)
        client = self.client(f'127.0.0.1:{proxy.port}')
        client.set_many({'a': b'1'})

        def garble(data):
            time.sleep(seconds(data))
            return data
        proxy.garble = garble
        return client, proxy

    def test_a_slow_server_costs_little(self):
        client, proxy = self.delayed(lambda data: 0.1)
        with self.within(2), self.warned():
            for _ in range(50):
                client.get_many(['a'])

    def test_a_slow_server_is_left_alone_until_it_is_quick(self):
        """A slow answer to the one who goes and sees does not end the pause."""
        self.patch('PAUSE_SECONDS', 0.1)
        answers = []
        client, proxy = self.delayed(lambda data: answers.append(data) or 0.1)
        deadline = time.monotonic() + 1.5
        with self.warned():
            while time.monotonic() < deadline:
                client.get_many(['a'])
                time.sleep(0.01)
        self.assertLess(len(answers), 9)
        proxy.garble = None
        with self.assertLogs('relstore', 'INFO') as logs:
            # One that goes and sees on a busy machine may have waited too long itself.
            self.until(lambda: client.get_many(['a']) and not client.first.pause)
        self.assertIn('answers again', logs.output[0])

    def test_a_hiccup_is_no_failure(self):
        hiccups = [0.15]
        client, _ = self.delayed(lambda data: hiccups.pop() if hiccups else 0)
        with self.assertNoLogs('relstore'):
            for _ in range(20):
                self.assertEqual(client.get_many(['a']), {'a': b'1'})
        self.assertEqual(hiccups, [])

    def test_a_busy_process_is_no_slow_server(self):
        """Where the process itself computes while it waits, nobody can tell."""
        now, computed = 100.0, 0.0
        clock = SimpleNamespace(monotonic=lambda: now, process_time=lambda: computed)

        def wait(connection):
            nonlocal now
            now += 0.05

        def compute(connection):
            nonlocal computed
            wait(connection)
            computed += 0.05
        client = self.client(self.server.where)
        with mock.patch.object(memcached, 'time', clock):
            with self.assertNoLogs('relstore'):
                for _ in range(50):
                    client.first.do(compute)
            with self.warned(), self.assertRaises(Unreachable):
                for _ in range(50):
                    client.first.do(wait)

    def test_much_at_once_is_no_failure(self):
        """4 MB at 10 MB/s take longer than an answer may."""
        values = {f'{n}': bytes(100_000) for n in range(40)}
        client, proxy = self.delayed(lambda data: len(data) / 10_000_000)
        with self.assertNoLogs('relstore'):
            client.set_many(values)
            for _ in range(3):
                started = time.monotonic()
                self.assertEqual(client.get_many(values), values)
                self.assertGreater(time.monotonic() - started, TIMEOUT_SECONDS)

    def test_many_keys_are_asked_for_in_parts(self):
        self.patient()
        client = self.client(self.server.where)
        values = {f'{n}': b'%d' % n for n in range(250)}
        client.set_many(values)
        get_many, sizes = client.first.get_many, []

        def counted(keys):
            sizes.append(len(keys))
            if len(sizes) == 5:
                raise Unreachable
            return get_many(keys)
        with mock.patch.object(client.first, 'get_many', counted):
            self.assertEqual(client.get_many(values), values)
            self.assertEqual(len(client.get_many(values)), 100, 'it is not asked again, and what it said is kept')
        self.assertEqual(sizes, [100, 100, 50, 100, 100])

    def test_a_dripping_server_costs_one_timeout(self):
        if self.module == 'pylibmc':
            self.skipTest('Its timeouts are for each part of an answer.')
        listener = socket.create_server(('127.0.0.1', 0))
        self.addCleanup(listener.close)

        def drip():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1000)
                for _ in range(40):
                    connection.sendall(b'V')
                    time.sleep(0.1)
        thread = threading.Thread(target=drip)
        thread.start()
        client = self.client(f'127.0.0.1:{listener.getsockname()[1]}')
        with self.within(TIMEOUT_SECONDS + MARGIN), self.warned():
            self.assertEqual(client.get_many(['a']), {})
        thread.join()

    def test_a_hanging_server_costs_one_timeout(self):
        proxy = self.proxy(self.server)
        client = self.client(f'127.0.0.1:{proxy.port}')
        client.set_many({'a': b'1'})
        proxy.pause()
        with self.within(TIMEOUT_SECONDS + MARGIN), self.warned():
            for _ in range(20):
                self.assertEqual(client.get_many(['a']), {})
        proxy.resume()
        self.assertEqual(self.until(lambda: client.get_many(['a'])), {'a': b'1'})

    def test_a_hanging_server_costs_sixteen_threads_one_timeout(self):
        proxy = self.proxy(self.server)
        client = self.client(f'127.0.0.1:{proxy.port}')
        proxy.pause()

        def work():
            for n in range(50):
                client.get_many([f'{n}'])
        threads = [threading.Thread(target=work) for _ in range(16)]
        with self.within(TIMEOUT_SECONDS + MARGIN), self.warned():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        # Sixteen that fail at once are one failure.
        self.assertLessEqual(client.first.pause, 2 * memcached.PAUSE_SECONDS)

    def test_pauses_grow(self):
        self.server.kill()
        client, now = self.client(self.server.where), [100.0]
        tried = []
        with mock.patch.object(memcached.time, 'monotonic', lambda: now[0]), self.warned():
            while now[0] < 300:
                failed = client.first._failed
                client.get_many(['a'])
                if client.first._failed != failed:
                    tried.append(now[0])
                now[0] += .25
        pauses = [after - before for before, after in zip(tried, tried[1:], strict=False)]
        self.assertEqual(pauses[:7], [.5, 1, 2, 4, 8, 16, 30])
        self.assertEqual(set(pauses[7:]), {30})

    def test_late_answers_are_not_taken_for_the_next_one(self):
        self.quick()
        proxy = self.proxy(self.server)
        client = self.client(f'127.0.0.1:{proxy.port}')
        client.first.add('n', b'1')
        client.set_many({'a': b'1', 'b': b'2'})
        proxy.pause(sent=False)
        with self.warned(), self.assertRaises(Unreachable):
            client.first.incr('n', 41)
        proxy.resume()

        def incremented():
            try:
                return client.first.incr('n', 1)
            except Unreachable:
                return None
        self.assertEqual(self.until(incremented), 43)
        self.assertEqual(client.get_many(['b']), {'b': b'2'})

    def test_garbage(self):
        if not memcached.MODULES[self.module].survives_garbage:
            self.skipTest('Its C library, libmemcached, is broken by some garbage; see memcached.Pylibmc.')
        self.quick()
        proxy = self.proxy(self.server)
        self.patch('TIMEOUT_SECONDS', 0.05)
        rnd = random.Random(3)
        answers = {
            'nothing': lambda data: b'', 'noise': lambda data: rnd.randbytes(len(data)),
            'zeros': lambda data: bytes(100), 'lines': lambda data: b'\r\n' * 50,
            'http': lambda data: b'HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n',
            'half': lambda data: data[:len(data) // 2], 'twice': lambda data: data + data,
            'errors': lambda data: b'ERROR\r\n', 'server error': lambda data: b'SERVER_ERROR busy\r\n',
            'client error': lambda data: b'CLIENT_ERROR what\r\n', 'endless': lambda data: b'VALUE a 0 999999999\r\nx',
            'other key': lambda data: b'VALUE other 0 1\r\nx\r\nEND\r\n', 'no size': lambda data: b'VALUE a\r\n',
            'minus': lambda data: b'VALUE a 0 -5\r\nx\r\nEND\r\n', 'number': lambda data: b'12345\r\n',
            'not a number': lambda data: b'1x\r\n', 'utf8': lambda data: 'ä'.encode() * 30 + b'\r\n',
        }
        for name, garble in answers.items():
            with self.subTest(name):
                proxy.garble = None
                client = self.client(f'127.0.0.1:{proxy.port}')
                client.set_many({'a': b'1'})
                tier = Tier(client, '', Cache(0, 0))
                counter = CommitCounter(client, '', 'site')
                proxy.garble = garble
                # Once for each of them, as the garbage may be what a healthy server could say.
                with self.within(12 * memcached.TIMEOUT_SECONDS + MARGIN):
                    found = client.get_many(['a'])
                    self.assertLessEqual(set(found), {'a', 'other'})
                    client.set_many({'a': b'1'})
                    self.assertIsNone(tier.begin('site', 'epoch', 1, 9))
                    self.assertEqual(tier.get([1, 2], 9, 1), {})
                    tier.look()
                    counter.value()
                    counter.done(counter.begun())
                proxy.garble = None
                counter.close()
                client.close()


class WholeSuite:
    """Tier and CommitCounter on a real memcached."""
    layer = MemcachedLayer

    def setUp(self):
        self.layer.require(self)
        super().setUp()
        self.patient()
        self.server = self.layer.server
        self.mc = self.client(self.server.where)
        self.prefix = f'{self.id()}:'

    def tier(self, head, *changes, **options):
        """Return the tier of a new process, in which the log begins at 100 at the latest, and those oids changed."""
        cache = Cache(0, 0)
        tier = Tier(self.mc, self.prefix, cache, **options)
        base = tier.begin('site', 'epoch', 1, head)
        cache.restart(100 if base is None else base)
        tier.look()     # where there was no base it is 100 now
        cache.advance(cache.head, head, changes)
        return tier

    def test_two_processes(self):
        one = self.tier(110, (5, 105))
        rows = [(1, b'one', 90, None), (5, b'five', 105, b'refs'), (6, b'', 100, b''), (7, None, 90, None)]
        one.put(rows, 110, 1)
        two = self.tier(120, (5, 105), (6, 115))
        expected = {oid: row for oid, *row in map(list, rows) if oid in (1, 5)}
        self.assertEqual({oid: list(row) for oid, row in two.get([1, 5, 6, 7, 8], 120, 1).items()}, expected)
        self.assertEqual((two.hits, two.misses), (2, 3))
        self.assertEqual(two.get([6], 114, 1), {}, 'it has changed since: the log cannot tell')
        one.committed(115, [(6, b'six', None), (9, None, None)], 1)
        self.assertEqual(two.get([6], 120, 1), {6: (b'six', 115, None)})

    def test_other_epochs_generations_databases_and_prefixes(self):
        one = self.tier(110)
        one.put([(1, b'one', 90, None)], 110, 1)
        one.put([(2, b'two', 90, None)], 110, 0)
        self.assertEqual(set(one.get([1, 2], 110, 1)), {1})
        self.assertEqual(one.get([1], 110, 0), {})
        for prefix, database, epoch in [('', 'site', 'epoch'), (self.prefix, 'other', 'epoch'),
                                        (self.prefix, 'site', 'next')]:
            other = Tier(self.mc, prefix, one.cache)
            self.assertIsNone(other.begin(database, epoch, 1, 110))
            other.look()
            self.assertEqual(other.get([1], 110, 1), {})
            self.mc.first.delete(f'{other.epoch.namespace}base')

    def test_the_base_moves_and_takes_what_is_there_along(self):
        one = self.tier(110, (1, 101), limit=3)
        self.assertEqual(one.epoch.bases, (100,))
        one.cache.advance(110, 120, [(1, 111), (2, 112)])
        one.put([(n, b'%d' % n, 90 + n % 5, None) for n in range(3, 9)], 120, 1)
        self.force_look(one)
        self.assertEqual(one.epoch.bases, (100,))
        one.cache.advance(120, 130, [(3, 121), (4, 122)])
        two = self.tier(130)
        self.force_look(one)
        self.assertEqual(one.epoch.bases, (130, 100))
        self.force_look(two)
        self.assertEqual(two.epoch.bases, (130, 100))
        self.assertEqual(set(one.get(range(3, 9), 130, 1)), {5, 6, 7, 8})
        one.epoch.bases = (130,)
        self.assertEqual(set(one.get(range(3, 9), 130, 1)), {5, 6, 7, 8}, 'stored under the newer base')
        self.assertEqual(Tier(self.mc, self.prefix, Cache(0, 0)).begin('site', 'epoch', 1, 130), 100)

    def force_look(self, tier):
        tier.look_soon()
        tier.look()

    def test_a_look_now_and_then(self):
        tier = self.tier(110)
        self.mc.first.delete(f'{tier.epoch.namespace}base')
        tier.look()
        self.assertIsNone(tier._shared_bases(tier.epoch.namespace))
        later = time.monotonic() + LOOK_EVERY_SECONDS
        with mock.patch.object(memcached.time, 'monotonic', lambda: later):
            tier.look()
        self.assertEqual(tier._shared_bases(tier.epoch.namespace), (100,))

    def test_a_log_that_does_not_reach_back_moves_the_base(self):
        one = self.tier(110)
        two = self.tier(120)
        two.cache.jump(130)
        self.force_look(two)
        self.assertEqual(two.epoch.bases, (130,))
        self.force_look(one)
        self.assertEqual(one.epoch.bases, (100,), 'it has not polled as far')
        one.cache.advance(110, 130, [])
        self.force_look(one)
        self.assertEqual(one.epoch.bases, (130,))

    def test_a_backup_was_restored(self):
        one = self.tier(110, (1, 110))
        one.cache.jump(110)
        one.cache.advance(110, 120, [])
        one.epoch.bases = ()
        self.mc.first.delete(f'{one.epoch.namespace}base')
        self.force_look(one)
        self.assertEqual(one.epoch.bases, (120,))
        two = Tier(self.mc, self.prefix, Cache(0, 0))
        self.assertEqual(two.begin('site', 'epoch', 1, 105), 105)
        self.assertEqual(Tier(self.mc, self.prefix, Cache(0, 0)).begin('site', 'epoch', 1, 120), 105)

    def test_garbage_under_our_keys(self):
        tier = self.tier(110, (2, 105))
        tier.put([(1, b'one', 90, b'refs'), (2, b'two', 105, None)], 110, 1)
        epoch = tier.epoch
        keys = [epoch.key(1, 0, 100), epoch.key(2, 105, 100)]
        one, two = (self.mc.get_many(keys)[key] for key in keys)
        rnd = random.Random(4)
        others = [b'', b'x', bytes(100), rnd.randbytes(len(one)), one[:-1], one + b'x', one[:20], two, one[1:],
                  one[:-1] + bytes([one[-1] ^ 1]), one[:12] + bytes([one[12] ^ 1]) + one[13:], pickle.dumps(one)]
        for other in others:
            with self.subTest(other):
                self.mc.set_many({keys[0]: other})
                self.assertEqual(tier.get([1, 2], 110, 1), {2: (b'two', 105, None)})
        base = f'{epoch.namespace}base'
        good = self.mc.first.get(base)
        for other in (b'', b'110', good[:-1], good[:-1] + b'x', bytes(len(good)), one):
            with self.subTest(base=other):
                self.mc.first.set(base, other)
                self.assertIsNone(Tier(self.mc, self.prefix, Cache(0, 0)).begin('site', 'epoch', 1, 120))

    def test_a_batch_is_bounded(self):
        tier = self.tier(110)
        tier.put([(oid, b'x', 90, None) for oid in range(2 * LARGEST_BATCH)], 110, 1)
        self.assertEqual(len(tier.get(range(2 * LARGEST_BATCH), 110, 1)), LARGEST_BATCH)
        rows = [(5000 + oid, bytes(400_000), 90, None) for oid in range(10)]
        tier.put([(4999, bytes(LARGEST_VALUE_BYTES + 1), 90, None), *rows], 110, 1)
        self.assertEqual(set(tier.get(range(4999, 5010), 110, 1)), {5000, 5001, 5002, 5003})

    # The counter

    def counter(self, client=None):
        counter = CommitCounter(client or self.mc, self.prefix, 'site')
        self.addCleanup(counter.close)
        return counter

    def test_commits_are_counted(self):
        one, two = self.counter(), self.counter()
        before = one.value()
        self.assertIsNotNone(before)
        self.assertEqual([two.value(), one.value()], [before, before])
        token = one.begun()
        self.assertEqual([one.value(), two.value()], [None, None])
        one.done(token)
        after = two.value()
        self.assertNotIn(after, (None, before))
        self.assertEqual(one.value(), after)

    def test_a_key_that_is_lost_never_comes_back(self):
        counter, values = self.counter(), set()
        for _ in range(50):
            values.add(counter.value())
            self.mc.first.delete(counter._key)
        self.assertEqual(len(values), 50)

    def test_a_key_that_is_lost_during_a_commit(self):
        one, two = self.counter(), self.counter()
        before = two.value()
        token = one.begun()
        self.mc.first.delete(one._key)
        between = two.value()
        self.assertNotIn(between, (None, before))
        one.done(token)
        self.assertNotIn(two.value(), (before, between))
        token = one.begun()
        self.assertIsNone(two.value())
        one.done(token)
        self.assertIsNotNone(self.until(two.value))

    def test_who_dies_is_given_up(self):
        one, two = self.counter(), self.counter()
        before = two.value()
        one.begun()
        now = time.monotonic()
        with mock.patch.object(memcached.time, 'monotonic', lambda: now):
            self.assertEqual([two.value() for _ in range(5)], [None] * 5)
            now += commits.STUCK_SECONDS - 1
            self.assertEqual([two.value() for _ in range(5)], [None] * 5)
            now += 2
            self.assertIsNone(two.value())
            self.assertNotIn(two.value(), (None, before))

    def test_what_is_no_number_is_removed(self):
        counter = self.counter()
        for other in (b'', b'x', b'-5', b'1_0', b'9' * 30, b'\xb2'):
            with self.subTest(other):
                self.mc.first.set(counter._key, other)
                self.assertIsNone(counter.value())
                self.assertIsNotNone(counter.value())

    # On a busy machine the server must not be left alone as slow.
    @mock.patch.multiple(memcached, SLOW_SECONDS=5.0, TIMEOUT_SECONDS=5.0)
    def test_a_committer_that_is_cut_off_tells_when_it_can(self):
        proxy = self.proxy(self.server)
        one, two = self.counter(self.client(f'127.0.0.1:{proxy.port}')), self.counter()
        for when in ('begun', 'done'):
            with self.subTest(when):
                self.until(one.value)
                before = self.until(two.value)
                token = False
                if when == 'done':
                    token = one.begun()
                with self.warned():
                    proxy.stop()        # whoever pays an earlier debt may notice it first
                    if when == 'begun':
                        self.assertFalse(one.begun())
                        self.assertEqual(two.value(), before, 'nobody can know')
                    one.done(token)
                proxy.start()
                self.until(one.value)
                self.assertNotIn(self.until(two.value), (None, before))

    def test_an_idle_committer_tells_when_it_can(self):
        """It was cut off for a moment when it committed, and does nothing more."""
        proxy = self.proxy(self.server)
        one, two = self.counter(self.client(f'127.0.0.1:{proxy.port}')), self.counter()
        before = self.until(two.value)
        proxy.stop()
        with self.warned():
            one.done(one.begun())
        self.assertEqual(two.value(), before)
        proxy.start()
        self.until(lambda: two.value() not in (None, before), 5)
        self.until(lambda: one._payer is None)


def _cases(namespace):
    for module in ('pylibmc', 'pymemcache'):
        for suite in (ClientSuite, FailureSuite, WholeSuite):
            name = f'{suite.__name__.removesuffix("Suite")}{module.capitalize()}'
            namespace[name] = type(name, (suite, Case), {'module': module, '__module__': __name__})


_cases(globals())


class TestConfiguration(unittest.TestCase):

    def test_lists_of_servers(self):
        for text in ('a:1 b:2', 'a:1,b:2', ' a:1 ,\n b:2 '):
            self.assertEqual(split_servers(text), ['a:1', 'b:2'])

    def test_addresses(self):
        for name, address in [('localhost:11211', ('localhost', 11211)), ('[::1]:5', ('::1', 5)),
                              ('unix:/run/mc', '/run/mc'), ('/run/mc', '/run/mc')]:
            self.assertEqual(memcached.address_of(name), address)
        for name in ('localhost', 'localhost:', ':11211', 'a:b', 'a:0', 'a:65536', 'a:-1', 'a:²', ''):
            with self.subTest(name), self.assertRaises(ConfigurationError) as caught:
                Memcached([name], 'pymemcache')
            self.assertEqual(str(caught.exception),
                             f'cache-servers names {name!r}: a server is host:port or unix:/path.')

    def test_modules(self):
        for name, expected in [('pymemcache', 'Pymemcache'), ('memcache', 'Pymemcache'),
                               ('relstorage.memcache_wrapper', 'Pymemcache'), ('pylibmc', 'Pylibmc'),
                               ('relstorage.pylibmc_wrapper', 'Pymemcache'), (None, 'Pymemcache'),
                               ('auto', 'Pymemcache')]:
            with self.subTest(name), mock.patch.dict(sys.modules, {'pylibmc': mock.MagicMock()}):
                self.assertEqual(type(memcached.library_of(name)).__name__, expected)
        with mock.patch.dict(sys.modules, {'pylibmc': mock.MagicMock(), 'pymemcache': None}):
            for name in (None, 'auto', 'relstorage.pylibmc_wrapper'):
                self.assertIsInstance(memcached.library_of(name), memcached.Pylibmc)

    def test_a_warning_where_garbage_is_not_survived(self):
        with mock.patch.dict(sys.modules, {'pylibmc': mock.MagicMock()}):
            with self.assertLogs('relstore', 'WARNING') as logs:
                Memcached(['localhost:11211', 'localhost:11212'], 'pylibmc')
            [record] = logs.records
            self.assertIn('may crash its C library', record.getMessage())
            with self.assertNoLogs('relstore', 'WARNING'):
                Memcached(['localhost:11211'], 'auto')

    def test_modules_that_are_missing(self):
        with mock.patch.dict(sys.modules, {'pylibmc': None, 'pymemcache': None}):
            for name, message in [
                    (None, 'cache-servers needs a client of memcached: install relstore[memcached], which brings '
                           'pymemcache, or pylibmc.'),
                    ('pylibmc', "cache-module-name is 'pylibmc': install pylibmc, or leave cache-module-name out."),
                    ('umemcache', "cache-module-name is 'umemcache': allowed is pymemcache or pylibmc.")]:
                with self.subTest(name), self.assertRaises(ConfigurationError) as caught:
                    Memcached(['localhost:11211'], name)
                self.assertEqual(str(caught.exception), message)

    def test_no_server(self):
        with self.assertRaises(ConfigurationError):
            Memcached([], 'pymemcache')
