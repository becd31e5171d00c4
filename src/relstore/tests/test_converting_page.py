"""docs/converting.md: each of its commands does what the page says."""
import re
import shlex
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import ZEO
from psycopg2.extensions import parse_dsn
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage

from relstore.cli import convert
from relstore.cli.main import main
from relstore.tests.support.backends import Psycopg3HistoryPreserving, cases
from relstore.tests.support.commands import Commands

PAGE = Path(__file__).parents[3] / 'docs' / 'converting.md'


class ThePage(Commands):

    def setUp(self):
        super().setUp()
        if not PAGE.exists():
            self.skipTest('docs/ is not installed with the package')
        text = PAGE.read_text('utf-8').replace('/var/site', str(self.here))
        self.page = re.sub(r'postgresql://zope@db\.example\.com/(\w+)', lambda found: self.url(found[1]), text)
        with closing(DB(FileStorage(str(self.here / 'Data.fs'), blob_dir=str(self.here / 'blobstorage')))) as db:
            for number in range(3):
                with db.transaction() as connection:
                    connection.root()['number'] = number

    def url(self, name):
        keys = parse_dsn(self.dsn(name))
        host = quote(keys['host'], safe='')
        return f'postgresql://{keys["user"]}@{host}:{keys["port"]}/{keys["dbname"]}'

    def test_each_command(self):
        server, stop = ZEO.server(str(self.here / 'Data.fs'), blob_dir=str(self.here / 'blobstorage'))
        self.addCleanup(stop)
        [configuration] = re.findall(r'(?s)```\n(%import relstorage.*?)```', self.page)
        config = self.write('convert.conf', configuration)
        blocks = re.findall(r'(?s)```sh\n(.*?)```', self.page)
        commands = [line for block in blocks for line in block.splitlines()]
        self.assertEqual(len(commands), self.page.count('\nrelstore convert ') + self.page.count('\nzodbconvert '))
        self.assertGreater(len(commands), 6)
        for command in commands:
            with self.subTest(command):
                command = command.replace('zeo.example.com:8100', f'127.0.0.1:{server[1]}')
                program, *arguments = shlex.split(command.replace('convert.conf', str(config)))
                self.assertIn(program, ('relstore', 'zodbconvert'))
                status, out, err = self.command(main if program == 'relstore' else convert.main, *arguments)
                self.assertEqual((status, err), (0, ''), out)
                self.assertEqual('are equal' in out, '--verify' in command, out)


cases(globals(), ThePage, backends=(Psycopg3HistoryPreserving,))
del ThePage
