"""docs/converting.md: each of its commands does what the page says."""
import re
import shlex
from argparse import ArgumentParser
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import ZEO
from psycopg2.extensions import parse_dsn
from ZODB.blob import Blob
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.utils import z64

from relstore.cli import convert, places
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
                    connection.root()['blob'] = blob = Blob()
                    with blob.open('w') as file:
                        file.write(b'%d' % number * 1000)
            self.tids = [each.tid for each in db.storage.iterator()]

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
        self.assertEqual(len(commands), self.page.count('\nrelstore ') + self.page.count('\nzodbconvert '))
        self.assertGreater(len(commands), 6)
        for command in commands:
            with self.subTest(command):
                command = command.replace('zeo.example.com:8100', f'127.0.0.1:{server[1]}')
                program, *arguments = shlex.split(command.replace('convert.conf', str(config)))
                self.assertIn(program, ('relstore', 'zodbconvert'))
                status, out, err = self.command(main if program == 'relstore' else convert.main, *arguments)
                self.assertEqual((status, err), (0, ''), out)
                self.assertEqual('are equal' in out, '--verify' in command, out)
                if 'adopt' not in arguments:
                    self.see_the_copy(arguments)

    def see_the_copy(self, arguments):
        """Not with the means of the command, but as a site would."""
        args = ArgumentParser()
        convert.add_arguments(args)
        named = args.parse_args([argument for argument in arguments if argument != 'convert'])
        _, destination = places.find_two(named.source, named.destination)
        with destination.open() as opened:
            if named.dry_run:
                self.assertEqual(opened.storage.lastTransaction(), z64)
                return
            tids = [each.tid for each in opened.storage.iterator()]
            keeps_history = 'keep-history=false' not in arguments[-1]
            self.assertEqual(tids, self.tids if keeps_history else self.tids[-3:])
            with closing(DB(opened.storage)) as db, db.transaction() as connection:
                root = connection.root()
                self.assertEqual((root['number'], root['blob'].open().read()), (2, b'2' * 1000))


cases(globals(), ThePage, backends=(Psycopg3HistoryPreserving,))
del ThePage
