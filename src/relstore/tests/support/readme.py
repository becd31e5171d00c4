"""What README.txt tells an operator to type, and a shell to type it in."""
import io
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import TestCase

import psycopg2

import relstore
from relstore.adapters.addresses import Address
from relstore.cli.main import main
from relstore.tests.support.backends import SQLiteBackend
from relstore.tests.support.servers import StagingMySQL, StagingPostgreSQL, cannot_run, postgresql_programs

README = (Path(__file__).resolve().parents[4] / 'README.txt').read_text()
DATABASES = 'zodb', 'restored', 'damaged', 'shared'     # that README names


def section(title: str) -> str:
    """Return the text of a section, up to the next title of any kind."""
    found = re.search(rf'(?ms)^{re.escape(title)}\n[=-]+\n(.*?)(?=^[^\n]+\n[=-]{{4,}}\n|\Z)', README)
    return found[1]


def blocks(title: str) -> list[str]:
    """Return what stands in a section to be typed, or to be written into a file."""
    return [textwrap.dedent(block) for block in re.findall(r'(?m)(?:^ {4,}\S.*\n(?:\n(?= {4}))?)+', section(title))]


def block(title: str, *words: str) -> str:
    """Return the one block of a section that has all the words."""
    [found] = [text for text in blocks(title) if all(word in text for word in words)]
    return found


class Typed(TestCase):
    """Mixed with a backend: a shell in a directory of its own, where the database `zodb` is README's."""

    def setUp(self):
        super().setUp()
        self.here = Path(tempfile.mkdtemp(prefix='relstore-readme-'))
        self.addCleanup(shutil.rmtree, self.here)
        (self.here / 'etc').mkdir()
        (self.here / 'var').mkdir()
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(('PG', 'MYSQL', 'PYTHON'))} | {'HOME': str(self.here)}
        path = [os.environ.get('PATH', os.defpath)]
        if not isinstance(self, SQLiteBackend):
            self.require_server_of_ours()
            server = self.layer.server
            for name in DATABASES:
                self.addCleanup(server.drop_database, name)
        if self.is_postgresql:
            path.insert(0, str(postgresql_programs()))
            self.environment |= {'PGHOST': str(server.directory), 'PGPORT': str(server.port), 'PGUSER': 'postgres'}
        elif not isinstance(self, SQLiteBackend):
            where = server.arguments()
            (self.here / '.my.cnf').write_text(f'[client]\nuser={where["user"]}\nsocket={where["unix_socket"]}\n')
        elif shutil.which('sqlite3') is None:
            cannot_run(self, 'There is no program sqlite3 (apt-get install sqlite3)')
        self.environment['PATH'] = os.pathsep.join(path)

    def require_server_of_ours(self) -> None:
        """README's names are taken as they are."""
        if isinstance(self.layer.server, StagingPostgreSQL | StagingMySQL):
            self.skipTest('a staging server may have databases of the names that README uses')

    @property
    def is_postgresql(self) -> bool:
        return getattr(self, 'driver', '') == 'psycopg2'

    def types(self, commands: str, **more: str) -> str:
        """Run commands as they stand in README; return what they print. None of them may fail or complain."""
        ours = all(line.startswith('relstore ') for line in commands.splitlines())
        status, out, err = self.here_and_now(commands) if ours else self.shell(commands, **more)
        complaints = [line for line in err.splitlines() if not line.startswith('NOTICE:')]
        self.assertEqual((status, complaints), (0, []), f'{commands}\n{out}')
        return out

    def here_and_now(self, commands: str) -> tuple[int, str, str]:
        """As shell, for relstore's own: a new process would take seconds to start."""
        out, err, status = io.StringIO(), io.StringIO(), 0
        with redirect_stdout(out), redirect_stderr(err):
            for line in commands.splitlines():
                words = shlex.split(line, comments=True)[1:]
                status = status or main([str(self.here / word) if '/' in word else word for word in words])
        return status, out.getvalue(), err.getvalue()

    def shell(self, commands: str, **more: str) -> tuple[int, str, str]:
        """Run commands; return the exit status, and what they print to stdout and stderr."""
        done = subprocess.run(['bash', '-euo', 'pipefail', '-c', commands], cwd=self.here, capture_output=True,
                              text=True, env=self.environment | more)
        return done.returncode, done.stdout, done.stderr

    def create(self, name: str = 'zodb') -> None:
        if isinstance(self, SQLiteBackend):
            return
        self.layer.server.create_database(name)

    def leads_to(self, name: str = 'zodb', **options) -> Address:
        if isinstance(self, SQLiteBackend):
            return relstore.SQLite(str(self.here / 'var' / 'site'))
        if self.is_postgresql:
            return relstore.PostgreSQL(self.layer.server.dsn(name), driver='psycopg2', **options)
        return relstore.MySQL(**self.layer.server.arguments(name), driver=self.driver)

    @contextmanager
    def opened(self, *where, **options) -> Iterator[relstore.RelStore]:
        with closing(self.new_storage(*where, **options)) as storage:
            yield storage

    def new_storage(self, *where, create_schema=True, **options) -> relstore.RelStore:
        return relstore.RelStore(self.leads_to(*where, **options), keep_history=self.keep_history,
                                 create_schema=create_schema, blob_dir=str(self.here / 'blobs'))

    def execute(self, sql: str, database: str = 'zodb') -> list[tuple]:
        """Without relstore."""
        if isinstance(self, SQLiteBackend):
            with closing(sqlite3.connect(self.here / 'var' / 'site' / 'main.sqlite3')) as connection:
                return connection.execute(sql).fetchall()
        with closing(psycopg2.connect(self.layer.server.dsn(database))) as connection, connection, \
                connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []
