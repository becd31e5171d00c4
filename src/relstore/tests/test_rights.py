"""Rights: with just the GRANTs that are told a storage does all that it can, and each one that is missing is named."""
import contextlib
import io
import os
import re
import tempfile
import textwrap
import unittest
from contextlib import closing
from pathlib import Path
from unittest import mock

from BTrees.Length import Length
from persistent.mapping import PersistentMapping
from psycopg2.extensions import make_dsn
from transaction import TransactionManager
from ZODB import DB
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.POSException import ConflictError, ReadOnlyError
from ZODB.utils import z64

import relstore
from relstore.adapters import rights
from relstore.adapters.mysql_server import Server
from relstore.adapters.rights import PACK, READ, RUN
from relstore.cli import main
from relstore.errors import LockTimeout, NotAllowed
from relstore.tests.support.commits import commit
from relstore.tests.support.granted import statements
from relstore.tests.support.left import THOROUGH
from relstore.tests.support.own import OwnMariaDBLayer, OwnMySQLLayer, ServerLayer, administrator
from relstore.tests.support.readme import README
from relstore.tests.support.records import state
from relstore.tests.support.refusals import Refusals
from relstore.tests.support.servers import require_postgresql

OWNER, USER = 'zodb_owner', 'zope'
SITE = 'site'


@contextlib.contextmanager
def source():
    """A storage to copy."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, 'Data.fs')
        with closing(DB(path)) as db, db.transaction() as connection:
            root = connection.root()
            root['counter'], root['many'] = Length(), PersistentMapping({n: PersistentMapping() for n in range(20)})
        with closing(FileStorage(path, read_only=True)) as storage:
            yield storage


class Told(unittest.TestCase):
    """What is printed is what README tells."""

    def test_readme(self):
        for arguments in ['postgresql', '--schema', 'zodb'], ['mysql']:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                self.assertEqual(main.main(['statements', *arguments, '--grants']), 0)
            self.assertIn(textwrap.indent(out.getvalue(), '    '), README)

    def test_names_that_have_to_be_quoted(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(main.main(['statements', 'postgresql', '--schema', 'My "site"', '--grants']), 0)
        self.assertIn('GRANT USAGE ON SCHEMA "My ""site""" TO zope;', out.getvalue())

    def test_sqlite_has_none(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(main.main(['statements', 'sqlite', '--grants']), 0)
        self.assertNotIn('GRANT', out.getvalue())

    def test_version(self):
        with contextlib.redirect_stdout(io.StringIO()) as out, self.assertRaises(SystemExit) as caught:
            main.main(['--version'])
        self.assertEqual(caught.exception.code, 0)
        self.assertRegex(out.getvalue(), r'\Arelstore \S.*\n\Z')


class Exercise:
    """What a site does, and what is done for it."""

    def __init__(self, test):
        self.test, self.run_sql = test, test.run_sql

    def run(self):
        """All that needs the rights to run it. The database is empty."""
        with closing(self.test.opened()) as site, closing(self.test.opened_unprepared()) as other:
            with source() as copied:
                site.copyTransactionsFrom(copied)
            with closing(DB(site)) as db, closing(DB(other)) as beside:
                self.change(db)
                self.conflict(db, beside)
                self.write_large_ones(db)
                self.read_history(db)
                self.survive(site)
                self.write_rows(site)
                self.wait(site, db)
                if site.supportsUndo():
                    db.undo(db.undoLog(0, 1)[0]['id'])
        self.test.grow_old()
        self.test.opened().close()
        with closing(self.test.opened(read_only=True)) as storage:
            self.test.assertRaises(ReadOnlyError, storage.tpc_begin, TransactionMetaData())
            self.test.assertGreater(len(storage), 20)

    def change(self, db):
        for value in range(2):
            with db.transaction() as connection:
                for each in connection.root()['many'].values():
                    each['value'] = value
        with db.transaction() as connection:
            connection.readCurrent(connection.root()['counter'])
            connection.root()['read'] = True

    def conflict(self, db, beside):
        first, second = TransactionManager(), TransactionManager()
        for name in 'counter', 'many':
            one, two = db.open(first).root()[name], beside.open(second).root()[name]
            for manager, each in (first, one), (second, two):
                manager.begin()
                each.change(1) if name == 'counter' else each.__setitem__('x', PersistentMapping())
            first.commit()
            if name == 'counter':
                second.commit()
            else:
                self.test.assertRaises(ConflictError, second.commit)
                second.abort()
            for each in one, two:
                each._p_jar.close()

    def write_large_ones(self, db):
        with db.transaction() as connection:        # more than one message
            connection.root()['large'] = [os.urandom(100) for _ in range(10)]
            for n in range(5):
                connection.root()[f'large{n}'] = PersistentMapping(value=os.urandom(2_000_000))
        with db.transaction() as connection:        # more objects than are locked one by one
            for n in range(2100):
                connection.root()[n] = PersistentMapping()
        with db.transaction() as connection:
            for n in range(2100):
                connection.root()[n]['value'] = n

    def read_history(self, db):
        storage = db.storage
        with db.transaction() as connection:
            oid = connection.root()['many']._p_oid
        self.test.assertTrue(any(record.oid == oid for txn in storage.iterator() for record in txn))
        storage.history(oid, 10)
        storage.loadBefore(oid, storage.lastTransaction())
        storage.record_iternext()
        self.test.assertGreater(len(storage), 2000)
        self.test.assertGreater(storage.getSize(), 0)
        storage.new_instance().prefetch([oid])

    def survive(self, site):
        """A crash empties a table."""
        self.run_sql(f'DELETE FROM {self.test.qualified("relstore_epoch")}')
        reader = site.new_instance()
        reader.poll_invalidations()
        reader.release()

    def wait(self, site, db):
        """For a lock that does not become free."""
        with db.transaction() as connection:
            oid = connection.root()['counter']._p_oid
        data, tid = site.load(oid)
        with closing(self.test.opened(commit_lock_timeout=1)) as impatient:
            first, second = TransactionMetaData(), TransactionMetaData()
            for storage, txn in (site, first), (impatient, second):
                storage.tpc_begin(txn)
                storage.store(oid, tid, data, '', txn)
            site.tpc_vote(first)
            self.test.assertRaises(LockTimeout, impatient.tpc_vote, second)
            impatient.tpc_abort(second)
            site.tpc_abort(first)

    def write_rows(self, site):
        """Oids that others have given, and a deletion."""
        oid = (2 ** 40).to_bytes(8, 'big')
        tid = commit(site, (oid, z64, state(0)))
        txn = TransactionMetaData()
        site.tpc_begin(txn)
        site.deleteObject(oid, tid, txn)
        site.tpc_vote(txn)
        site.tpc_finish(txn)
        self.test.assertGreater(site.new_oid(), oid)

    def pack(self):
        """All that needs the rights to pack it besides."""
        self.run_sql(f'UPDATE {self.test.qualified("object_state")} SET refs = NULL')
        with self.test.configuration() as conf:
            self.command('refs', '--jobs', '1', conf)
            self.command('refs', '--jobs', '1', '--check', conf)
            self.command('writers', conf, 'relstore')
            self.command('pack', '--dry-run', conf)
            with closing(DB(self.test.opened())) as db:
                with db.transaction() as connection:
                    del connection.root()['many']
                    for n in range(2000):
                        del connection.root()[n]
                db.pack()
                with db.transaction() as connection:
                    connection.root()['kept'] = connection.root()[2000]
                    for n in range(2000, 2010):
                        del connection.root()[n]
                with db.transaction() as connection:
                    kept = connection.root()['kept']
                    del connection.root()['kept']
                    connection.add(again := PersistentMapping())
                    connection.root()['again'] = again
                self.command('pack', '--prepack', '--days', '0', conf)
                with db.transaction() as connection:        # what was found is linked again
                    connection.root()['again']['kept'] = connection.get(kept._p_oid)
                self.command('pack', '--use-prepack-state', '--days', '0', conf)
                with db.transaction() as connection:
                    self.test.assertEqual(connection.root()['again']['kept']['value'], 2000)
            self.open_to_relstorage(conf)
            self.command('adopt', conf)
        with closing(self.test.opened()) as storage:
            self.test.assertLess(len(storage), 200)

    def open_to_relstorage(self, conf):
        if not self.test.owner_alone_makes_indexes:
            self.command('writers', conf, 'any')
            return
        with contextlib.redirect_stderr(io.StringIO()) as err:
            self.test.assertEqual(main.main(['writers', conf, 'any']), 2)
        self.test.assertIn('owner of table current_object', err.getvalue())

    def command(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            status = main.main([*arguments])
        self.test.assertEqual(status, 0, (arguments, out.getvalue()))


class Suite:
    """As an owner who makes the tables, and a user of a site, each with the GRANTs that are told."""
    keep_history = True
    owner_alone_makes_indexes = False

    def open_as(self, user, **options):
        return relstore.RelStore(self.address(user), keep_history=self.keep_history, **options)

    def opened(self, **options):
        return self.open_as(USER, **options)

    def opened_unprepared(self):
        return self.opened()

    def adopt(self):
        with self.configuration(OWNER) as conf:
            Exercise(self).command('adopt', conf)

    def statements(self, *purposes):
        """Return the GRANTs for these."""
        return statements(self.unseen().rights.grants(SITE, self.user_as_sql, self.owner_as_sql), *purposes)

    def grant(self, *purposes):
        for statement in self.statements(*purposes):
            self.run_sql(statement)

    def grow_old(self):
        """Let days go by."""

    def unseen(self):
        return self.address(USER).unseen(self.keep_history)

    @contextlib.contextmanager
    def configuration(self, user=USER):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / 'zope.conf'
            path.write_text('\n'.join([
                '%import relstore', '<relstore>', f'keep-history {str(self.keep_history).lower()}',
                *self.section(user), '</relstore>', '']))
            yield str(path)

    def needed(self, *purposes):
        return [right for purpose in purposes for right in self.unseen().rights.needed(purpose)]

    @contextlib.contextmanager
    def without(self, right):
        verb = '{} {} ON {} {} {}'
        where = self.where(right)
        self.run_sql(verb.format('REVOKE', right.privilege, where, 'FROM', self.user_as_sql))
        try:
            yield
        finally:
            self.run_sql(verb.format('GRANT', right.privilege, where, 'TO', self.user_as_sql))

    def test_all_that_a_site_does(self):
        self.adopt()
        self.grant(READ, RUN)
        Exercise(self).run()
        self.grant(PACK)
        Exercise(self).pack()

    @unittest.skipUnless(THOROUGH, 'takes minutes')
    def test_none_is_more_than_enough(self):
        """Without any one of them something fails, where nobody has looked at rights before."""
        self.adopt()
        self.grant(READ, RUN, PACK)
        for right in self.needed(READ, RUN, PACK):
            with closing(self.open_as(self.administrator)) as storage:
                storage.zap_all()
                storage.database.adapter.writers.set('relstore')
            with self.subTest(str(right)), self.without(right), mock.patch.object(rights.Rights, 'refuse'), \
                    self.assertRaises((NotAllowed, AssertionError)):
                Exercise(self).run()
                Exercise(self).pack()

    def test_who_only_reads(self):
        self.adopt()
        self.grant(READ, RUN)
        with closing(self.opened()) as storage:
            oid = storage.new_oid()
            commit(storage, (oid, z64, state(0)))
        for statement in self.statements(READ, RUN):
            self.run_sql(re.sub(r'\sTO\s', ' FROM ', statement.replace('GRANT', 'REVOKE')))
        self.grant(READ)
        with closing(self.opened(read_only=True)) as storage:
            self.assertEqual(storage.load(oid)[0], state(0))
        self.assertRaises(NotAllowed, self.opened)

    def test_each_right_that_is_missing_is_named_at_open(self):
        self.adopt()
        self.grant(READ, RUN)
        for right in self.needed(READ, RUN):
            with self.subTest(str(right)), self.without(right):
                self.check(self.refusal(self.opened, NotAllowed), str(right), 'grant', USER)
        self.opened().close()

    def test_each_right_that_is_missing_is_named_before_a_pack(self):
        self.adopt()
        self.grant(READ, RUN, PACK)
        with closing(DB(self.opened())) as db:
            db.pack()
            for right in self.needed(PACK):
                with self.subTest(str(right)), self.without(right):
                    self.opened().close()
                    with self.assertRaises(NotAllowed) as caught:
                        db.pack()
                    self.check(str(caught.exception), str(right), 'packed', 'grant', USER)
                    with self.configuration() as conf, contextlib.redirect_stderr(io.StringIO()) as err, \
                            contextlib.redirect_stdout(io.StringIO()):
                        self.assertEqual(main.main(['refs', '--jobs', '1', conf]), 2)
                    self.assertIn(str(right), err.getvalue())
            db.pack()


class PostgreSQLRights(Suite, Refusals):
    layer = ServerLayer
    driver = 'psycopg'
    user_as_sql, owner_as_sql = USER, OWNER
    schema, administrator = 'zodb', 'postgres'

    def setUp(self):
        require_postgresql(self)
        self.dsn = self.layer.server.create_database(SITE)
        self.addCleanup(self.drop)
        self.run_sql(f'CREATE ROLE {OWNER} LOGIN; CREATE ROLE {USER} LOGIN; CREATE SCHEMA {self.schema}; '
                     f'REVOKE ALL ON DATABASE {SITE} FROM public; GRANT CONNECT ON DATABASE {SITE} TO {OWNER}, {USER}; '
                     'REVOKE ALL ON SCHEMA public FROM public')
        self.grant(rights.CREATE)

    def drop(self):
        self.layer.server.drop_database(SITE)
        with administrator(self.layer.server.dsn()) as run:
            run(f'DROP ROLE {OWNER}, {USER}')

    def run_sql(self, sql):
        with administrator(self.dsn) as run:
            return run(sql)

    def adopt(self):
        super().adopt()
        self.run_sql(f'REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {self.schema} FROM public')

    def address(self, user, **options):
        return relstore.PostgreSQL(make_dsn(self.dsn, user=user), driver=self.driver, schema=self.schema, **options)

    def opened_unprepared(self):
        return relstore.RelStore(self.address(USER, prepared_statements='false'), keep_history=self.keep_history)

    def section(self, user):
        return ['<postgresql>', f'dsn {make_dsn(self.dsn, user=user)}', f'driver {self.driver}',
                f'schema {self.schema}', '</postgresql>']

    def qualified(self, table):
        return f'{self.schema}.{table}'

    def where(self, right):
        return {'DATABASE': f'DATABASE {SITE}', 'SCHEMA': f'SCHEMA {self.schema}'}.get(
            right.kind, f'{right.kind} {self.schema}.{right.name}')


class MySQLRights(Suite, Refusals):
    driver, administrator = 'mysqlclient', 'root'
    user_as_sql, owner_as_sql = f"{USER}@'%'", f"{OWNER}@'%'"

    def setUp(self):
        self.layer.require(self)
        self.server = self.layer.server
        self.server.create_database(SITE)
        self.addCleanup(self.server.drop_database, SITE)
        for user in self.user_as_sql, self.owner_as_sql:
            self.run_sql(f'CREATE USER {user}')
            self.addCleanup(self.run_sql, f'DROP USER {user}')
        self.grant(rights.CREATE)

    def run_sql(self, sql):
        with closing(self.server.connect(SITE)) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def unseen(self):
        server = Server('MariaDB' if self.server.is_mariadb else 'MySQL')
        return self.address(USER).unseen(self.keep_history, server=server)

    def grow_old(self):
        self.run_sql('UPDATE relstore_commit SET voted = voted - INTERVAL 2 DAY')

    def address(self, user):
        return relstore.MySQL(**self.where_of(user), driver=self.driver)

    def where_of(self, user):
        return self.server.arguments(SITE) | {'user': user}

    def section(self, user):
        lines = [f'{name} {value}' for name, value in self.where_of(user).items()]
        return ['<mysql>', *lines, f'driver {self.driver}', '</mysql>']

    def qualified(self, table):
        return table

    def test_a_creation_that_lacks_a_right_makes_nothing(self):
        """Tables cannot be taken back here, so all rights are tried before the first."""
        later = {'UPDATE', 'ALTER', 'LOCK TABLES'}
        for privilege in {right.privilege for right in self.needed(rights.CREATE)} - later:
            with self.subTest(privilege):
                self.run_sql(f'REVOKE {privilege} ON {SITE}.* FROM {self.owner_as_sql}')
                self.check(self.refusal(lambda: self.open_as(OWNER), NotAllowed), 'denied', OWNER, 'rights')
                self.assertEqual(self.run_sql(f'SHOW TABLES FROM {SITE}'), ())
                self.run_sql(f'GRANT {privilege} ON {SITE}.* TO {self.owner_as_sql}')
        self.adopt()
        self.assertTrue(self.run_sql(f'SHOW TABLES FROM {SITE}'))

    def test_a_migration(self):
        """With just these rights; without one of them the site goes on with what it has."""
        self.adopt()
        for table, new in ('pack', 'pack_id'), ('garbage', 'pack_id'), ('sweep', 'sweeping'):
            self.run_sql(f'ALTER TABLE {SITE}.relstore_{table} RENAME COLUMN {new} TO generation')
        self.run_sql(f'ALTER TABLE {SITE}.relstore_sweep DROP COLUMN deleted')
        version = f"{SITE}.relstore_meta WHERE name = 'schema'"
        self.run_sql(f"UPDATE {SITE}.relstore_meta SET value = '1' WHERE name = 'schema'")
        for privilege in 'ALTER', 'LOCK TABLES', 'UPDATE':
            with self.subTest(privilege):
                self.run_sql(f'REVOKE {privilege} ON {SITE}.* FROM {self.owner_as_sql}')
                self.refusal(lambda: self.open_as(OWNER), NotAllowed)
                self.assertEqual(self.run_sql(f'SELECT value FROM {version}'), (('1',),))
                self.run_sql(f'GRANT {privilege} ON {SITE}.* TO {self.owner_as_sql}')
        self.adopt()
        self.assertEqual(self.run_sql(f'SELECT value FROM {version}'), (('2',),))

    def where(self, right):
        return f'{SITE}.{right.name or "*"}'


def suites(base, **suites):
    """Add test cases: their names, and the attributes of each."""
    for name, attributes in suites.items():
        globals()[name] = type(name, (base, unittest.TestCase), attributes | {'__module__': __name__})


suites(PostgreSQLRights,
       RightsOnPsycopg3={'owner_alone_makes_indexes': True},
       RightsOnPsycopg2HistoryFree={'driver': 'psycopg2', 'keep_history': False})
suites(MySQLRights,
       RightsOnMariaDB={'layer': OwnMariaDBLayer}, RightsOnMySQL={'layer': OwnMySQLLayer, 'driver': 'pymysql'},
       RightsOnMariaDBHistoryFree={'layer': OwnMariaDBLayer, 'driver': 'pymysql', 'keep_history': False})
del Suite, PostgreSQLRights, MySQLRights
