"""What is written for Oracle: on H2, or on a server that RELSTORE_TEST_ORACLE names.

    RELSTORE_TEST_ORACLE=oracle://system:password@db.example.com:1521/service make test

The user there must be allowed to create users and to grant what they need. Each database of a test is a user of its
own, which is made for that test and dropped after it; nothing else is touched.
"""
import itertools
import os
import re
import secrets
from urllib.parse import unquote, urlsplit

import relstore
from relstore.tests.support import h2
from relstore.tests.support.backends import Backend

SERVER = os.environ.get('RELSTORE_TEST_ORACLE')


class H2Backend(Backend):
    layer = h2.H2Layer
    _numbers = itertools.count()

    def setUp(self):
        self.layer.require(self)
        self._databases = {}
        super().setUp()

    def address(self, name='main'):
        if name not in self._databases:
            database = self._databases[name] = f'{name}_{next(self._numbers)}'
            self.addCleanup(h2.drop, database)
        return h2.H2(self._databases[name])


class OracleLayer:
    """A server that runs somewhere."""

    @classmethod
    def require(cls, test):
        """There is one, or these tests would run on H2."""


class ServerBackend(Backend):
    layer = OracleLayer

    def setUp(self):
        self.layer.require(self)
        self._users = {}
        super().setUp()

    def address(self, name='main'):
        if name not in self._users:
            self._users[name] = self._make(f'relstore_test_{secrets.token_hex(6)}')
        return relstore.Oracle(*self._users[name])

    def _make(self, user: str) -> tuple[str, str, str]:
        password = f'x{secrets.token_hex(12)}'
        self._administrate(f'CREATE USER {user} IDENTIFIED BY {password}')
        self.addCleanup(self._administrate, f'DROP USER {user} CASCADE')
        _, _, dsn = administrator()
        for line in statements_of(relstore.Oracle('', '', dsn).unseen(True).rights.grants('', user, user)):
            self._administrate(line)
        return user, password, dsn

    def _administrate(self, statement: str) -> None:
        session = relstore.Oracle(*administrator()).session()
        try:
            session.run(statement)
        finally:
            session.close()


def administrator() -> tuple[str, str, str]:
    """Return (user, password, dsn) of the server."""
    url = urlsplit(SERVER or '')
    return unquote(url.username or ''), unquote(url.password or ''), f'{url.hostname}:{url.port or 1521}{url.path}'


def statements_of(grants: str) -> list[str]:
    """Return the statements of the text that `relstore statements oracle --grants` prints."""
    return re.findall(r'(?m)^([^-].*);$', grants)


_Oracle = ServerBackend if SERVER else H2Backend


class OracleHistoryPreserving(_Oracle):
    keep_history, takes_empty_records = True, False


class OracleHistoryFree(_Oracle):
    keep_history, takes_empty_records = False, False


ORACLE = OracleHistoryPreserving, OracleHistoryFree
