"""A site goes from RelStorage to relstore and back, with the commands of README.txt as they stand there."""
import re
import subprocess
import textwrap
from pathlib import Path
from unittest import TestCase
from xml.etree import ElementTree

from persistent.mapping import PersistentMapping
from ZODB.DB import DB
from ZODB.utils import u64

from relstore import beside
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    SQLiteBackend,
    SQLiteHistoryFree,
    SQLiteHistoryPreserving,
    cases,
)
from relstore.tests.support.objects import reachable
from relstore.tests.support.programs import PYTHON, SOURCE, Peer
from relstore.tests.support.readme import Typed, block, blocks, section
from relstore.tests.support.servers import cannot_run

ADOPT = 'While RelStorage serves the site'
COMING = 'When RelStorage writes no more'
BACK = 'Going back to RelStorage'
COMMANDS = 'Two commands of one name'
# The section of README's site that says where its database is.
PLACE = re.compile(r' *<postgresql>.*?</postgresql>\n', re.DOTALL)


class Site(Typed):
    """README's zope.conf, with the address of this test's database."""

    def configure(self, package: str) -> None:
        """Write the zope.conf of a site on relstorage or on relstore."""
        text = block('In zope.conf', f'%import {package}\n<zodb_db main>')
        (self.here / 'etc' / 'zope.conf').write_text(self.placed(text))

    def placed(self, text: str) -> str:
        text, count = PLACE.subn(lambda _: textwrap.indent(self.place(), '    '), text)
        self.assertEqual(count, 1)
        return text.replace('keep-history false', f'keep-history {str(self.keep_history).lower()}')

    def place(self) -> str:
        if isinstance(self, SQLiteBackend):
            return f'<sqlite3>\n  data-dir {self.here}/var/site\n</sqlite3>\n'
        if self.is_postgresql:
            return f'<postgresql>\n  driver psycopg2\n  dsn {self.layer.server.dsn("zodb")}\n</postgresql>\n'
        keys = ''.join(f'  {key} {value}\n' for key, value in self.layer.server.arguments('zodb').items())
        return f'<mysql>\n  driver {self.driver}\n{keys}</mysql>\n'

    def cleanup(self) -> str:
        """Return the commands that remove what relstore has added, for this history mode."""
        word = 'sqlite3' if isinstance(self, SQLiteBackend) else 'psql' if self.is_postgresql else 'mariadb'
        commands = block(BACK, word, 'DROP TABLE')
        if not self.is_postgresql and not self.keep_history:
            self.assertIn('data_tid', commands)
            commands = commands.replace('data_tid', 'refs_tid')
        return commands

    def writes_with_relstore(self) -> set[str]:
        """Change, add and remove, and pack; return the oids that can be reached, in hexadecimal."""
        with self.opened() as storage:
            db = DB(storage)
            before = {u64(oid) for oid in reachable(storage)}
            with db.transaction() as connection:
                root = connection.root()
                names = [name for name in root if name.startswith('folder')]
                for name in names[:3]:
                    for document in root[name].values():
                        document['n'] += 1000
                root['here'] = PersistentMapping({str(n): PersistentMapping(n=n) for n in range(40)})
            new = {u64(thing._p_oid) for thing in (root['here'], *root['here'].values())}
            self.assertEqual(len(new), 41)
            self.assertFalse(new & before)
            with db.transaction() as connection:
                del connection.root()['here']['0']
            storage.pack(None)
            return {oid.hex() for oid in reachable(storage)}


class ThereAndBack(Site):

    def setUp(self):
        super().setUp()
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        self.create()
        self._cache = self.here / 'cache'
        self._cache.mkdir()

    def peer(self) -> Peer:
        """Return a process that has the database open with RelStorage, and the cache that the last one saved."""
        peer = Peer()
        self.addCleanup(peer.end)
        where = ({'data_dir': str(self.here / 'var' / 'site')} if isinstance(self, SQLiteBackend)
                 else {'dsn': self.layer.server.dsn('zodb')})
        peer.ask('open', where=where, keep_history=self.keep_history, cache_local_dir=str(self._cache))
        return peer

    def relstorage_goes_on(self, expected: set[str] | None = None) -> set[str]:
        """Compare, write and pack with RelStorage, and end it; return what can be reached at the end."""
        peer = self.peer()
        if expected is not None:
            self.assertEqual(set(peer.ask('walk')), expected)
            self.assertEqual(peer.ask('numbers'), self._numbers)
        peer.ask('write', seconds=0.3)
        peer.ask('pack', ago=0)
        found = set(peer.ask('walk'))
        peer.ask('close')
        self.assertTrue(list(self._cache.iterdir()))
        return found

    def relstore_goes_on(self, expected: set[str]) -> set[str]:
        with self.opened() as storage:
            self.assertEqual({oid.hex() for oid in reachable(storage)}, expected)
        found = self.writes_with_relstore()
        with self.opened() as storage, DB(storage).transaction() as connection:
            self._numbers = {name: sorted(document['n'] for document in folder.values())
                             for name, folder in connection.root().items() if name.startswith('folder')}
        return found

    def test_relstorage_made_it(self):
        maker = self.peer()
        maker.ask('create')
        maker.ask('close')
        maker.end()
        before = self.schema()
        self.configure('relstorage')
        self.types(blocks(ADOPT)[0])
        found = self.go_back(self.come(self.relstorage_goes_on()))
        self.assertNotEqual(self.schema(), before)
        self.types(self.cleanup())
        found = self.relstorage_goes_on()
        self.assertEqual(self.schema(), before)
        self.come(found)

    def come(self, found: set[str]) -> set[str]:
        """As README says."""
        self.types(blocks(ADOPT)[0])
        self.configure('relstore')
        self.assertIn(': relstore. ', self.types(blocks(COMING)[0]))
        return self.relstore_goes_on(found)

    def go_back(self, found: set[str]) -> set[str]:
        """As README says; also RelStorage's own command reads the file then."""
        self.assertIn(': any. ', self.types(block(BACK, 'relstore writers etc/zope.conf any')))
        self.configure('relstorage')
        self.pack_by_relstorages_command()
        return self.relstorage_goes_on(found)

    def pack_by_relstorages_command(self) -> None:
        [command] = re.findall('``(python -m relstorage.zodbpack)``', section(COMMANDS))
        text = (self.here / 'etc' / 'zope.conf').read_text()
        (self.here / 'etc' / 'pack.conf').write_text(re.sub(r'(?m)^</?zodb_db.*\n|^ *mount-point.*\n', '', text))
        status, out, err = self.shell(f'{command.replace("python", PYTHON, 1)} --days=1 etc/pack.conf')
        self.assertEqual(status, 0, out + err)

    def test_relstore_made_it(self):
        """It is emptied of what is relstore's and goes on, too."""
        with self.opened() as storage, DB(storage).transaction() as connection:
            for n in range(8):
                connection.root()[f'folder {n}'] = PersistentMapping({str(d): PersistentMapping(n=0) for d in range(9)})
        found = self.writes_with_relstore()
        self.configure('relstore')
        found = self.relstore_goes_on(found)
        found = self.go_back(found)
        self.types(self.cleanup())
        found = self.relstorage_goes_on()
        self.come(found)

    def schema(self) -> set[str]:
        """Return all that was made in the database."""
        if isinstance(self, SQLiteBackend):
            made = self.execute('SELECT name, sql FROM sqlite_master')
            return {' '.join((sql or name).split()) for name, sql in made}
        dump = self.types('pg_dump --schema-only zodb')
        return {text for text in dump.split('\n\n') if not re.match(r'\\(un)?restrict ', text)}     # a random word


class Cleaned(Site):
    """What relstore adds is removed, and made again."""

    def test_cleaned(self):
        self.create()
        self.configure('relstore')
        with self.opened() as storage, DB(storage).transaction() as connection:
            connection.root()['folder'] = PersistentMapping({'1': PersistentMapping(n=0)})
        found = self.writes_with_relstore()
        self.types(self.cleanup())
        left = self.types(f'mariadb zodb --execute="{self.LEFT}"')
        self.assertNotIn('relstore', left)
        self.assertRegex(self.types(blocks(ADOPT)[0]), r'Make [\w, ]*\brelstore_lock\b')
        with self.opened() as storage:
            self.assertEqual({oid.hex() for oid in reachable(storage)}, found)
            self.assertNotIn(u64(storage.new_oid()), {int(oid, 16) for oid in found})

    LEFT = 'SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = DATABASE()'


class Keys(TestCase):
    """README names the options that RelStorage does not know."""

    def test_those_that_have_to_go(self):
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        theirs = subprocess.run(
            [PYTHON, '-c', 'import relstorage; print(open(relstorage.__path__[0] + "/component.xml").read())'],
            check=True, capture_output=True, text=True).stdout
        theirs = keys(theirs)
        ours = keys((Path(beside.__file__).with_name('component.xml')).read_text())
        told = ' '.join(section(BACK).split())
        for name in 'relstorage', 'postgresql', 'mysql', 'sqlite3':
            with self.subTest(name):
                more = ours['relstore' if name == 'relstorage' else f'relstore-{name}'] - theirs[name]
                found = re.search(rf'in ``<{name}>`` ([^<.]*)', told)
                named = set(re.findall('``([a-z_-]+)``', found[1])) if found else set()
                self.assertEqual(named - theirs[name], more)


def keys(component: str) -> dict[str, set[str]]:
    """Return the keys of each section type."""
    return {kind.get('name'): {key.get('name') for key in kind.iter('key')}
            for kind in ElementTree.fromstring(component).iter('sectiontype')}


class OneOfTwo(Site):
    """README's file with both packages: one transaction changes both databases."""

    # Runs where RelStorage is installed. The file is that of README; a database `archive` is RelStorage's.
    PROGRAM = textwrap.dedent("""\
        import transaction
        from ZODB import DB
        from relstore.cli.databases import read
        together = {}
        for named in read('etc/zope.conf'):
            DB(named.factory.open(), databases=together, database_name=named.name)
        main = together['main'].open()
        archive = main.get_connection('archive')
        kinds = [type(c.db().storage).__module__.split('.')[0] for c in (main, archive)]
        assert kinds == ['relstore', 'relstorage'], kinds
        numbers = {c.root().get('n', 0) for c in (main, archive)}
        assert len(numbers) == 1, numbers
        [number] = numbers
        for c in main, archive:
            c.root()['n'] = number + 1
        transaction.commit()
        main.root()['n'] = -1
        archive.root()['n'] = -1
        transaction.abort()
        print(number + 1)
        """)

    def test_one_moves(self):
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        for name in 'zodb', 'damaged':
            self.create(name)
        [text] = [text for text in blocks('Moving one of two databases') if 'relstore.beside' in text]
        for name, place in ('zodb', 'zodb'), ('archive', 'damaged'):
            text, count = re.subn(f"dsn dbname='{name}' .*", f'dsn {self.layer.server.dsn(place)}', text)
            self.assertEqual(count, 1)
        (self.here / 'etc' / 'zope.conf').write_text(text)
        (self.here / 'both.py').write_text(self.PROGRAM)
        for n in 1, 2:
            status, out, err = self.shell(f'PYTHONPATH={SOURCE} {PYTHON} both.py')
            self.assertEqual((status, out), (0, f'{n}\n'), err)


cases(globals(), Cleaned, backends=(MySQLdbHistoryPreserving, MySQLdbHistoryFree))
cases(globals(), OneOfTwo, backends=(Psycopg2HistoryPreserving,))
cases(globals(), ThereAndBack, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree,
                                         SQLiteHistoryPreserving, SQLiteHistoryFree))
del Cleaned, OneOfTwo, ThereAndBack
