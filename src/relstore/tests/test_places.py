"""URLs of storages: what becomes of characters that mean something in them, and of passwords."""
from relstore.cli import convert, places
from relstore.tests.support.commands import Commands
from relstore.tests.support.layers import Processes


class Places(Commands):
    tested = convert.main,
    layer = Processes

    def test_characters(self):
        for url, lines in (
                ('postgresql://me:p%40s%24@one:1,two:2/db?blob-dir=/a+b%20c/x@y&options=-c%20search_path%3Dx%2By&schema=z',
                 ('dsn postgresql://me:p%40s%24@one:1,two:2/db?options=-c%20search_path%3Dx%2By',
                  'blob-dir /a+b c/x@y', 'schema z')),
                ('postgresql:///db?host=/run/sockets&user=me@there',
                 ('dsn postgresql:///db?host=%2Frun%2Fsockets&user=me%40there',)),
                ('mysql://me:p%2F%24@host:3307/db?driver=pymysql',
                 ('db db', 'host host', 'port 3307', 'user me', 'passwd p/$$', 'driver pymysql')),
                ('zeo://[::1]:8100/main', ('server [::1]:8100', 'storage main')),
                ('file:///srv/a@b+c%23/Data.fs?blob-dir=/d', ('path /srv/a@b+c#/Data.fs', 'blob-dir /d'))):
            told = [line.strip() for line in places.section(url).splitlines() if '<' not in line]
            self.assertEqual(sorted(told), sorted(lines))

    def test_a_password_is_not_told(self):
        """Also where it was not written as it has to be."""
        for url in ('mysql://me:se/cret@host/db', 'mysql://me:se?cret@host/db', 'mysql://me:se#cret@host/db',
                    'postgresql://me:se#cret@host/db', 'postgresql://me:se?cret@host/db',
                    'postgresql://me:se/cret@host/db', 'postgresql://me:se@cret@host/db', 'zeo://host:secret',
                    'mysql://me@host:secret/db', 'postgresql://me:secret@[::1/db'):
            status, out, err = self.told(url, 'sqlite:///none')
            self.assertEqual((status, out), (2, ''))
            self.assertIn(' are written as ', err)
            self.assertNotRegex(err, r'cret|\bse\b')
        for url in 'postgresql://me:secret@host/db', 'mysql://me:secret@host/db':
            section = places.section(url, secret=True)
            self.assertNotIn('secret', section)
            self.assertEqual(section.replace('PASSWORD', 'secret'), places.section(url))
