"""`relstore statements` prints all that is ever sent."""
import contextlib
import io
import re
import time
from contextlib import closing

import ZODB
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.FileStorage import FileStorage

import relstore
from relstore.adapters.mysql_settings import SETTINGS
from relstore.cli.main import main
from relstore.sessions.statement import PARAMETER, Statement, split
from relstore.tests.support import sent
from relstore.tests.support.backends import EITHER_MODE, OTHER_MODE, PostgreSQLBackend, SQLiteBackend, cases
from relstore.tests.support.blob_site import LARGE, BlobSite
from relstore.tests.support.exercise import exercise
from relstore.tests.support.unmade import unmade

# The same row of values, several times.
ROWS = re.compile(r'(?<=VALUES )(\([^()]*\))(?:, \1)+')
# A server is set what it has.
SETTING = re.compile(f', ({"|".join(SETTINGS)}) = [^,;\n]*')


def printed(database, *options):
    """Return each statement that `relstore statements` prints, with ? for each parameter."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if main(['statements', database, *options]):
            raise AssertionError(out.getvalue())
    text = re.sub('^-- .*\n', '', out.getvalue(), flags=re.MULTILINE)
    return {SETTING.sub('', part) for part in split(PARAMETER.sub('?', text))}


def statements(message):
    """Yield each statement in the text of a message in the same way."""
    if isinstance(message, Statement):
        text = PARAMETER.sub('?', message.named)
    else:
        text = message.replace('%s', '?').replace('%%', '%')
    for part in split(text):
        yield ROWS.sub(r'\1', SETTING.sub('', part))


class Sent(BlobSite):

    def setUp(self):
        self.sent = set()
        recording = sent.told(lambda _, arguments: self.sent.update(
            statement for text in sent.texts(arguments) for statement in statements(text)))
        recording.__enter__()
        self.addCleanup(recording.__exit__, None, None, None)
        super().setUp()

    def check(self, *options):
        """Compare what was sent with what is printed."""
        adapter = self.storage.database.adapter
        database = getattr(adapter, 'product', adapter.name).lower()
        found = printed(database, *options, *([] if self.keep_history else ['--history-free']))
        self.assertEqual(self.sent - found, set())
        self.assertGreater(len(self.sent), 20)

    def test_all_that_a_storage_does(self):
        exercise(lambda: self.open_storage('other'), votes=1 if isinstance(self, SQLiteBackend) else 2)
        self.check()

    def test_what_is_not_printed(self):
        """The comparison notices it."""
        self.storage.database.pool.attempt(lambda session: session.all('SELECT 1 + 1'))
        with self.assertRaisesRegex(AssertionError, r'SELECT 1 \+ 1'):
            self.check()

    def test_making_the_tables(self):
        address = unmade(self, 'sent')
        self.sent.clear()
        relstore.RelStore(address, keep_history=self.keep_history).close()
        self.assertTrue(any('CREATE TABLE' in each for each in self.sent))
        self.check(*(['--schema', 'sent'] if isinstance(self, PostgreSQLBackend) else []))

    def test_blobs(self):
        self.storage.database.adapter.writers.set('relstore')
        self.put(b'small')
        for data in b'also small', LARGE:
            self.put(data)
        if self.keep_history:
            manager = TransactionManager()
            self.db.undo(self.db.undoLog(0, 1)[0]['id'], manager.get())
            manager.commit()
        self.storage.pack(time.time(), None)
        self.look()
        self.look('--move', 'directory', str(self.here / 'new'))
        self.check()

    def test_many_objects(self):
        """More than one message takes."""
        with self.db.transaction() as connection:
            root = connection.root()
            for number in range(40):
                root[number] = PersistentMapping(text=str(number) * 100_000)
        with self.db.transaction() as connection:
            root = connection.root()
            for number in range(40):
                root[number]['more'] = number
        self.storage.zap_all()
        self.check()

    def test_a_copy(self):
        with closing(FileStorage(str(self.here / 'Data.fs'))) as source:
            db = ZODB.DB(source)
            for number in range(30):
                with db.transaction() as connection:
                    connection.root()[number] = PersistentMapping(number=number)
            destination = self.opened('copied')
            destination.copyTransactionsFrom(source)
        self.check()

    def test_who_writes(self):
        writers = self.storage.database.adapter.writers
        for who in 'relstore', 'any':
            writers.set(who)
        writers.make_index()
        self.put(b'data')
        self.check()


cases(globals(), Sent, backends=EITHER_MODE + OTHER_MODE)
del Sent
