"""TLS to MySQL and MariaDB: the same with both drivers, and where it is demanded it is had, or nothing is sent."""
import datetime
import importlib.util
import ipaddress
import shutil
import tempfile
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pymysql
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import relstore
from relstore.errors import ConfigurationError
from relstore.tests.support.servers import (
    MariaDBServer,
    MySQLServer,
    Server,
    cannot_run,
    directory_open_to_all,
    mariadb_programs,
    mysql_unavailable,
    require_mariadb,
    require_mysql,
)

DRIVERS = 'mysqlclient', 'pymysql'
DAY = datetime.timedelta(days=1)
HERE = x509.DNSName('localhost'), x509.IPAddress(ipaddress.ip_address('127.0.0.1'))


class Authority:
    """A certificate authority, in files of a directory."""

    def __init__(self, directory: Path, name: str):
        self._directory, self._name, self._signed = directory, name, 0
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = directory / f'{name}.pem'
        subject = self._subject(name)
        certificate = self._builder(subject, subject, self._key, DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(self._key, hashes.SHA256())
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, *names: x509.GeneralName, common_name: str = 'server', expires: datetime.timedelta = DAY
             ) -> dict[str, Path]:
        """Return the files of a new certificate: cert, key, and ca, which is ours."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._subject(common_name), self._subject(self._name), key, expires)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        self._signed += 1
        files = {kind: self._directory / f'{self._name}-{self._signed}.{kind}' for kind in ('cert', 'key')}
        files['cert'].write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        files['key'].write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return files | {'ca': self.file}

    @staticmethod
    def _subject(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    @staticmethod
    def _builder(subject, issuer, key, expires) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return x509.CertificateBuilder(
            subject_name=subject, issuer_name=issuer, public_key=key.public_key(),
            serial_number=x509.random_serial_number(), not_valid_before=now - 10 * DAY, not_valid_after=now + expires)


class Place:
    """A server with TLS, whose certificate is exchanged, and one without."""

    def __init__(self, server: Callable, with_tls: dict, without_tls: dict, reload: str):
        self._stack, self._reload = ExitStack(), reload
        directory = Path(tempfile.mkdtemp(prefix='relstore-tls-', dir=directory_open_to_all()))
        self._stack.callback(shutil.rmtree, directory)
        directory.chmod(0o755)      # the server is another user
        self.authority, self.another = Authority(directory, 'authority'), Authority(directory, 'another')
        self._used = {kind: directory / f'used.{kind}' for kind in ('cert', 'key', 'ca')}
        self._present(self.authority.sign(*HERE))
        files = {f'ssl_{kind}': file for kind, file in self._used.items()}
        self.server, self.without = self._start(server(files | with_tls)), self._start(server(without_tls))

    def _start(self, server: Server) -> Server:
        self._stack.callback(server.stop)
        server.start()
        server.create_database('site')
        return server

    def have(self, files: dict[str, Path]) -> None:
        """Have the server present this certificate."""
        self._present(files)
        self.server.run(self._reload)

    def _present(self, files: dict[str, Path]) -> None:
        for kind, file in files.items():
            shutil.copy(file, self._used[kind])
            self._used[kind].chmod(0o644)

    def stop(self) -> None:
        self._stack.close()


class MariaDBTlsLayer:
    place = None

    @classmethod
    def setUp(cls):
        if mariadb_programs():
            cls.place = Place(MariaDBServer, {}, {'skip_ssl': None}, 'FLUSH SSL')

    @classmethod
    def tearDown(cls):
        if cls.place:
            cls.place.stop()


class MySQLTlsLayer:
    place = None

    @classmethod
    def setUp(cls):
        if not mysql_unavailable():
            cls.place = Place(MySQLServer, {'tls_version': 'TLSv1.2,TLSv1.3'}, {}, 'ALTER INSTANCE RELOAD TLS')

    @classmethod
    def tearDown(cls):
        if cls.place:
            cls.place.stop()


class Tls:

    def setUp(self):
        super().setUp()
        self.require(self)
        place = self.layer.place
        self.server, self.authority, self.another, self.having = (
            place.server, place.authority, place.another, place.have)

    def opened(self, driver: str, server=None, host: str = 'localhost', **options) -> str:
        """Return how a session is encrypted that an adapter has opened, '' if it is not."""
        if driver == 'mysqlclient' and importlib.util.find_spec('MySQLdb') is None:
            cannot_run(self, 'mysqlclient is not installed')
        arguments = (server or self.server).tcp_arguments('site') | {'host': host} | options
        storage = relstore.RelStore(relstore.MySQL(**arguments, driver=driver))
        storage.close()
        session = storage.database.adapter.connect()
        try:
            [[_, cipher]] = session.all("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
            return cipher
        finally:
            session.close()

    def assertRefused(self, *words: str, **options):
        for driver in DRIVERS:
            with self.subTest(driver, **options):
                self.assertRaisesRegex(ConfigurationError, '(?i)' + '|'.join(words), self.opened, driver, **options)

    def assertEncrypted(self, **options):
        for driver in DRIVERS:
            with self.subTest(driver, **options):
                self.assertTrue(self.opened(driver, **options))

    def test_right_certificate(self):
        self.having(self.authority.sign(*HERE))
        for host in 'localhost', '127.0.0.1':
            self.assertEncrypted(host=host, ssl_ca=str(self.authority.file))

    def test_demanded_without_a_ca(self):
        self.having(self.another.sign(x509.DNSName('elsewhere.example')))
        self.assertEncrypted(ssl_mode='required')

    def test_wrong_name(self):
        self.having(self.authority.sign(x509.DNSName('elsewhere.example')))
        for host in 'localhost', '127.0.0.1':
            self.assertRefused('tls|ssl', 'certificate', host=host, ssl_ca=str(self.authority.file))

    def test_expired(self):
        self.having(self.authority.sign(*HERE, expires=-DAY))
        self.assertRefused('tls|ssl', 'certificate', ssl_ca=str(self.authority.file))

    def test_another_authority(self):
        self.having(self.another.sign(*HERE))
        self.assertRefused('tls|ssl', 'certificate', ssl_ca=str(self.authority.file))

    def test_none(self):
        """A server without TLS is refused before it is sent a password, and taken where TLS is not demanded."""
        server = self.layer.place.without
        for options in {'ssl_ca': str(self.authority.file)}, {'ssl_mode': 'required'}, {'ssl_mode': 'verify_identity'}:
            self.assertRefused('tls|ssl', server=server, **options)
        for driver in DRIVERS:
            for mode in None, 'preferred', 'disabled':
                with self.subTest(driver, mode=mode):
                    self.assertEqual(self.opened(driver, server, ssl_mode=mode), '')

    def test_disabled(self):
        for driver in DRIVERS:
            with self.subTest(driver):
                self.assertEqual(self.opened(driver, ssl_mode='disabled'), '')

    def test_certificate_of_the_client(self):
        mine = self.authority.sign(common_name='client')
        self.having(self.authority.sign(*HERE))
        self.server.run("CREATE USER guest@'127.0.0.1' REQUIRE X509")
        self.addCleanup(self.server.run, "DROP USER guest@'127.0.0.1'")
        self.server.run("GRANT ALL ON *.* TO guest@'127.0.0.1'")
        files = {f'ssl_{kind}': str(file) for kind, file in mine.items()}
        self.assertEncrypted(user='guest', **files)
        del files['ssl_ca']
        self.assertEncrypted(user='guest', **files)
        self.assertRefused('guest', user='guest', ssl_mode='required')

    def test_what_does_not_go_together(self):
        for options, words in [({'ssl_mode': 'verify_ca'}, 'allowed is disabled, preferred, required, verify_identity'),
                               ({'ssl_mode': 'required', 'ssl_ca': '/x'}, 'ssl_ca has no effect')]:
            self.assertRaisesRegex(ConfigurationError, words, relstore.MySQL, 'site', **options)


class OnMariaDB(Tls, unittest.TestCase):
    layer, require = MariaDBTlsLayer, staticmethod(require_mariadb)


class OnMySQL(Tls, unittest.TestCase):
    layer, require = MySQLTlsLayer, staticmethod(require_mysql)

    def test_expired(self):
        """MySQL itself refuses to present such a one."""
        self.assertRaises(pymysql.OperationalError, self.having, self.authority.sign(*HERE, expires=-DAY))
