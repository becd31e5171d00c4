"""ObjectStore on a real S3 server, and what it says when that fails."""
import logging
import os
import tempfile
import unittest
import urllib.request
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from unittest import mock

from relstore.blobs import store
from relstore.blobs.address import StoreAddress, parse
from relstore.blobs.store import ObjectStore
from relstore.errors import ConfigurationError, StorageError, Unavailable
from relstore.tests.support.proxy import CuttingProxy
from relstore.tests.support.servers import free_port
from relstore.tests.support.servers.s3 import CREDENTIALS, RefusingProxy, S3Layer

SECRETS = CREDENTIALS['AWS_ACCESS_KEY_ID'], CREDENTIALS['AWS_SECRET_ACCESS_KEY']


class Addresses(unittest.TestCase):

    def test_parts(self):
        self.assertEqual(parse('s3://bucket/a/b/?endpoint=http://[::1]:9&region=r&profile=p&sse=aws:kms&sse_key=k'),
                         StoreAddress('s3', 'bucket/a/b', 'http://[::1]:9', 'r', 'p', 'aws:kms', 'k'))
        self.assertEqual(parse('file:///srv/blobs'), StoreAddress('file', '/srv/blobs'))

    def test_refused(self):
        for url in ('bucket/prefix', 's3:', 's3:///', 's3://key:secret@bucket/prefix', 's3://bucket?secret=secret',
                    's3://bucket?secret', 's3://bucket?region=&profile=secret', 's3://bucket?region=a&region=secret',
                    's3://bucket?endpoint=http://key:secret@host', 's3://bucket?endpoint=secret',
                    's3://bucket?sse_key=secret', 'memory://secret?region=a', 's3://[secret/a'):
            with self.subTest(url), self.assertRaises(ConfigurationError) as refused:
                parse(url)
            self.assertNotIn('secret', str(refused.exception))


class Case(unittest.TestCase):
    """One object store, at `self.url`."""
    query = ''

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.here = Path(directory.name)

    def file(self, data):
        path = self.here / 'file'
        path.write_bytes(data)
        return str(path)

    def put(self, name, data):
        self.store.put(name, self.file(data))

    def contents(self):
        return sorted((found.name, found.size) for found in self.store.list())

    def test_objects(self):
        for size in 0, 1, 5000, store.PIECE_BYTES + 1:
            data, name = os.urandom(size), f'0a/{size}'
            self.assertIsNone(self.store.size(name))
            self.put(name, data)
            self.assertEqual(self.store.size(name), size)
            self.assertEqual(b''.join(self.store.read(name, size)), data)
            self.assertEqual(self.store.read_range(name, 2, 5), data[2:5])
            self.assertEqual(self.store.read_range(name, size, size), b'')
            self.assertIn((name, size), self.contents())
            self.store.remove(name)
            self.store.remove(name)
            self.assertIsNone(self.store.size(name))
            with self.assertRaises(FileNotFoundError):
                list(self.store.read(name, max(size, 1)))
        self.assertEqual(self.contents(), [])

    def test_small(self):
        self.assertIsNone(self.store.read_small('.mark'))
        for data in b'', b'one', b'two':
            self.store.write('.mark', data)
            self.assertEqual(self.store.read_small('.mark'), data)
        self.assertEqual(self.contents(), [])

    def test_nothing_is_remembered(self):
        """What another process does is seen at once."""
        other = ObjectStore(self.store.address)
        self.put('ff/one', b'1')
        self.assertEqual((self.contents(), other.size('ff/one')), ([('ff/one', 1)], 1))
        other.remove('ff/one')
        self.assertEqual((self.contents(), self.store.size('ff/one')), ([], None))

    def test_times(self):
        before = int(datetime.now().timestamp()) - 1
        self.put('00/one', b'1')
        [found] = self.store.list()
        self.assertLessEqual(before, found.modified)
        self.assertLessEqual(found.modified, datetime.now().timestamp() + 1)

    def test_pages(self):
        names = [f'{number:02x}/one' for number in range(5)]
        for name in names:
            self.put(name, b'1')
        with mock.patch.object(store, 'PAGE', 2):
            self.assertEqual(self.contents(), [(name, 1) for name in names])

    def test_a_file_that_is_not_there(self):
        with self.assertRaises(FileNotFoundError):
            self.store.put('00/one', str(self.here / 'none'))


class Files(Case):
    """In a directory of this machine, through fsspec as S3 is."""

    def setUp(self):
        super().setUp()
        self.store = ObjectStore(parse(f'file://{self.here}/store'))

    def test_urls(self):
        with self.assertRaisesRegex(ConfigurationError, 'gives no URLs'):
            self.store.url('00/one', 60, None, None)

    def test_a_protocol_that_nobody_knows(self):
        for url in 'nothing://bucket/prefix', 'sftp://host/prefix':
            with self.subTest(url), mock.patch.dict('sys.modules', {'paramiko': None}), \
                    self.assertRaisesRegex(ConfigurationError, 'needs what is not installed'):
                ObjectStore(parse(url)).size('00/one')

    def test_without_the_library(self):
        for url, missing, said in (('s3://bucket', 's3fs', r"pip install 'relstore\[s3\]'"),
                                   ('file:///srv', 'fsspec', "pip install 'fsspec'")):
            with self.subTest(url), mock.patch.dict('sys.modules', {missing: None}), \
                    self.assertRaisesRegex(ConfigurationError, said):
                ObjectStore(parse(url)).size('00/one')

    def test_without_rights(self):
        (self.here / 'blocked').write_bytes(b'')
        with self.assertRaisesRegex(StorageError, 'does not let us store an object'):
            ObjectStore(parse(f'file://{self.here}/blocked')).put('00/one', self.file(b'1'))


class S3(Case):
    layer = S3Layer
    bucket = 0

    def setUp(self):
        self.layer.require(self)
        super().setUp()
        environment = mock.patch.dict(os.environ, CREDENTIALS)
        environment.start()
        self.addCleanup(environment.stop)
        self.server = self.layer.server
        S3.bucket += 1
        self.bucket = f'objects-{S3.bucket}'
        self.server.create_bucket(self.bucket)
        self.store = self.open()

    def open(self, port=None, bucket=None, query=''):
        endpoint = f'http://127.0.0.1:{port or self.server.port}'
        return ObjectStore(parse(f's3://{bucket or self.bucket}/a/b?endpoint={endpoint}{query}'))

    @contextmanager
    def refused(self, kind, said):
        """One sentence, in which there are no credentials; nor are they in the log."""
        with self.assertLogs(level=logging.INFO) as logged, self.assertRaises(kind) as refused:
            logging.info('so that there is a line')
            yield
        error = refused.exception
        self.assertIs(type(error), kind)
        self.assertRegex(str(error), said)
        self.assertEqual((error.__cause__, error.__context__), (None, None))
        for secret in SECRETS:
            self.assertNotIn(secret, f'{error!r} {error} {logged.output}')

    def requests(self):
        """Everything that is done to an object of a store."""
        return (lambda at: at.put('00/one', self.file(b'1')), lambda at: at.write('.mark', b'1'),
                lambda at: at.size('00/one'), lambda at: list(at.read('00/one', 1)),
                lambda at: at.read_small('.mark'), lambda at: at.remove('00/one'), lambda at: list(at.list()))

    def test_large_objects(self):
        """In parts, of which a few are in memory; nothing is left of an upload whose end is missing."""
        data = os.urandom(store.PART_BYTES * 3 + 1)
        self.put('00/one', data)
        self.assertEqual(b''.join(self.store.read('00/one', len(data))), data)
        self.assertTrue(self.server.client().head_object(Bucket=self.bucket, Key='a/b/00/one')['ETag'].endswith('-4"'))
        with self.proxied() as (proxy, at):
            proxy.answer = lambda method, path: (400, 'EntityTooLarge') if 'partNumber=3' in path else None
            with self.refused(StorageError, 'answers EntityTooLarge'):
                at.put('00/two', self.file(data))
        self.assertEqual(self.contents(), [('00/one', len(data))])
        self.assertNotIn('Uploads', self.server.client().list_multipart_uploads(Bucket=self.bucket))

    def test_urls(self):
        self.put('00/one', b'data')
        url = self.store.url('00/one', 60, 'Straße "1"\r\nX: y.txt', 'text/x-one')
        self.assertNotIn(SECRETS[1], url)
        with urllib.request.urlopen(url) as found:
            self.assertEqual(found.read(), b'data')
            self.assertEqual(found.headers['Content-Type'], 'text/x-one')
            self.assertEqual(
                found.headers['Content-Disposition'],
                'attachment; filename="Stra_e _1___X: y.txt"; '
                "filename*=UTF-8''Stra%C3%9Fe%20%221%22%0D%0AX%3A%20y.txt")
            self.assertNotIn('X', found.headers)
        self.assertNotIn('isposition', self.store.url('00/one', 60, None, None))

    def test_encryption(self):
        at = self.open(query='&sse=aws:kms&sse_key=some-key')
        for name, size in ('00/one', 1), ('00/two', store.PART_BYTES * 3):
            at.put(name, self.file(bytes(size)))
            found = self.server.client().head_object(Bucket=self.bucket, Key=f'a/b/{name}')
            self.assertEqual((found['ServerSideEncryption'], found['SSEKMSKeyId']), ('aws:kms', 'some-key'))

    def test_a_missing_bucket(self):
        for request in self.requests():
            with self.refused(ConfigurationError, 'there is no such bucket'):
                request(self.open(bucket='not-there'))

    def test_credentials(self):
        with self.server.asking_for_credentials():
            for request in self.requests():
                with self.refused(ConfigurationError, 'does not know the access key'):
                    request(self.store)
        nobody = {name: value for name, value in CREDENTIALS.items() if 'KEY' not in name}
        with mock.patch.dict(os.environ, {**nobody, 'HOME': str(self.here)}, clear=True), \
                self.refused(ConfigurationError, 'there are no credentials'):
            self.open().size('00/one')
        with self.refused(ConfigurationError, 'there is no such profile'):
            self.open(query='&profile=nobody').size('00/one')

    def test_profile(self):
        (self.here / 'credentials').write_text(
            f'[site]\naws_access_key_id = {SECRETS[0]}\naws_secret_access_key = {SECRETS[1]}\n')
        with mock.patch.dict(os.environ, {'AWS_SHARED_CREDENTIALS_FILE': str(self.here / 'credentials'),
                                          'AWS_EC2_METADATA_DISABLED': 'true'}, clear=True):
            at = self.open(query='&profile=site&region=us-east-1')
            at.put('00/one', self.file(b'1'))
        self.assertEqual(self.store.size('00/one'), 1)

    @contextmanager
    def proxied(self):
        with RefusingProxy(self.server) as proxy:
            yield proxy, self.open(proxy.port)

    def test_what_the_server_answers(self):
        for status, code, kind, said in (
                (403, 'RequestTimeTooSkewed', ConfigurationError, 'the clock of this machine'),
                (403, 'SignatureDoesNotMatch', ConfigurationError, 'the secret key'),
                (403, 'AccessDenied', ConfigurationError, 'lack the right'),
                (400, 'ExpiredToken', ConfigurationError, 'have expired'),
                (400, 'SomethingNew', StorageError, 'the server answers SomethingNew')):
            with self.proxied() as (proxy, at):
                proxy.answer = lambda method, path: (status, code)
                for request in self.requests():
                    with self.subTest(code), self.refused(kind, said):
                        request(at)

    def test_overload(self):
        """It is tried a few times, and then it is told."""
        with self.proxied() as (proxy, at), mock.patch.object(store, 'ATTEMPTS', 2):
            proxy.answer = lambda method, path: (503, 'SlowDown')
            for request in self.requests():
                with self.refused(Unavailable, r'overloaded, or has failed \((SlowDown|503)\); try again'):
                    request(at)
            left = [1]
            proxy.answer = lambda method, path: (503, 'SlowDown') if left and left.pop() else None
            at.put('00/one', self.file(b'data'))
        self.assertEqual(self.contents(), [('00/one', 4)])

    def test_cuts(self):
        """Once: it is tried again. Always: it is told, and there is no part of an object."""
        data = os.urandom(store.PIECE_BYTES)
        self.put('00/one', data)
        with CuttingProxy(self.server.address) as proxy, mock.patch.object(store, 'ATTEMPTS', 2):
            at = self.open(proxy.port)
            for cut in {'received': 0}, {'received': 100_000}, {'sent': 0}, {'sent': 100}:
                proxy.cut_after(**cut)
                self.assertEqual(b''.join(at.read('00/one', len(data))), data)
            proxy.cut_after(sent=100_000)
            at.put('00/two', self.file(data))
            self.assertEqual(self.store.size('00/two'), len(data))
            proxy.target = '127.0.0.1', free_port()     # nobody listens there: what it accepts it closes
            proxy.cut()
            for request in self.requests():
                with self.refused(Unavailable, 'cannot be reached, or the connection was cut'):
                    request(at)
        with self.refused(Unavailable, 'cannot be reached, or the connection was cut'), \
                mock.patch.object(store, 'ATTEMPTS', 2):
            self.open(proxy.port).size('00/one')        # nobody is there any more

    def test_after_a_fork(self):
        self.put('00/one', b'data')
        pid = os.fork()
        if not pid:
            os._exit(0 if self.store.size('00/one') == 4 and list(self.store.read('00/one', 4)) == [b'data'] else 1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)

    def test_names(self):
        self.assertNotIn(SECRETS[1], f'{self.store!r} {vars(self.store)}')


del Case
