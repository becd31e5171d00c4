"""Others may create objects in a schema of the search path, as everybody may in public before PostgreSQL 15.

mallory has made functions and operators that are found before those of the server wherever their types fit better. Each
tells that it was called, and by whom.
"""
import re
import unittest
from contextlib import closing
from importlib.resources import files
from pathlib import Path

import transaction
from persistent.mapping import PersistentMapping
from ZODB import DB
from ZODB.serialize import referencesf
from ZODB.utils import p64

import relstore
from relstore.adapters.ownership import functions
from relstore.errors import ConfigurationError
from relstore.tests.support.backends import (
    PGBOUNCER,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    Psycopg3HistoryFree,
    Psycopg3HistoryPreserving,
    cases,
)
from relstore.tests.support.exercise import exercise
from relstore.tests.support.programs import PYTHON, Peer
from relstore.tests.support.servers import cannot_run
from relstore.tests.support.statements import explains, numbered, parts
from relstore.tests.support.watch import Watch

DIRECT = Psycopg2HistoryPreserving, Psycopg2HistoryFree, Psycopg3HistoryPreserving, Psycopg3HistoryFree

FILES = 'common.sql', 'schema.sql', 'postgresql.sql', 'postgresql_functions.sql', 'postgresql_schema.sql'
# Those that fit better where the server has one for other types, or for any.
TYPES = ('bigint', 'integer', 'smallint', 'text', 'name', 'oid', 'xid', 'numeric', 'double precision', 'boolean',
         'bytea', '"char"', 'bigint[]', 'integer[]', 'text[]', 'name[]', 'regclass', 'varchar')
OPERATORS = '=', '<>', '<', '<=', '>', '>=', '||', '+', '-', '*', '/', '~~', '<<', '>>', '&'
POLYMORPHIC = {'anyarray': ('bigint[]', 'integer[]', 'text[]'),
               'anynonarray': ('bigint', 'integer', 'text', 'oid', 'xid', 'bytea'),
               'anyelement': ('bigint', 'integer', 'text'), '"any"': ('bigint', 'integer', 'text', 'name')}
BETTER = {'bigint': ('integer',), 'integer': ('bigint',), 'text': ('varchar', 'name'), 'regclass': ('text', 'varchar')}
POLYMORPHIC |= {f'anycompatible{kind}': POLYMORPHIC[f'any{kind or "element"}'] for kind in ('', 'array', 'nonarray')}

# Not called by a name that the search path leads to: unnest of several arrays is syntax.
SYNTAX = re.compile(
    'cast|coalesce|nullif|greatest|exists|in|any|values|extract|array|row|with|and|or|not|on|as|select|from|conflict'
    '|filter|over|key|check|table|then|when|else|[a-z]', re.IGNORECASE)
# Their types are exactly those of the server's: bigint, or none.
EXACT = {'max', 'min', 'sum', 'count', 'substr'}
# These are called from functions that have a search path of their own, which holds for them.
INHERIT = {'relstore_tid_1', 'relstore_rows_1', 'relstore_wait_2', 'relstore_write_2'}


def texts():
    return {name: files('relstore.adapters').joinpath('sql', name).read_text(encoding='utf-8') for name in FILES}


def called(sql):
    """Return the functions that a text calls by a name without a schema."""
    sql = re.sub(r"(?m)^\s*--.*$|'[^']*'", '', sql)
    sql = re.sub(r'unnest\([^()]*(?:\([^()]*\))?[^()]*,', 'multiple(', sql)
    found = {match[1].lower() for match in re.finditer(r'(?<![\w.{}])([A-Za-z_]\w*)\(', sql)}
    return {name for name in found if not SYNTAX.fullmatch(name)} - EXACT - {'multiple'}


class Texts(unittest.TestCase):

    def test_calls_in_statements_are_qualified(self):
        """Those of the adapter's macros too."""
        for keep_history in (True, False):
            adapter = relstore.PostgreSQL('', schema='some').unseen(keep_history)
            for name, text in adapter.sql:
                with self.subTest(name):
                    self.assertEqual(called(re.sub(r'"some"\.\w+\(', '(', text)), set())

    def test_functions_have_a_search_path(self):
        adapter = relstore.PostgreSQL('', schema='some').unseen(keep_history=True)
        for name, text in adapter.schema().items():
            if 'CREATE FUNCTION' not in text or name in INHERIT:
                continue
            with self.subTest(name):
                head, body, *_ = text.split('$$')
                if 'SET search_path = pg_catalog, pg_temp' not in head:
                    self.assertIn(name, ('relstore_key_2', 'relstore_load_1'))
                    self.assertEqual(called(body), set())

    def test_signatures(self):
        adapter = relstore.PostgreSQL('').unseen(keep_history=True)
        signatures = functions(adapter.schema())
        self.assertEqual(signatures['relstore_poll_4'], 'bigint, bigint')
        self.assertEqual(signatures['relstore_tid_1'], 'timestamp without time zone')
        self.assertEqual(signatures['relstore_unlink_chunk_3'], '')

    def test_the_search_finds(self):
        self.assertEqual(called("SELECT cardinality('f(1)'), pg_catalog.unnest(a), max(tid), unnest(a, b), {x}(1)"),
                         {'cardinality'})


def planted(rows):
    """Yield the statements that make what mallory has. rows: the server's functions, (name, types, what it returns)."""
    yield 'CREATE SEQUENCE public.tells'
    yield 'GRANT USAGE ON SEQUENCE public.tells TO PUBLIC'
    made = set()
    for name, types, result in rows:
        for variant in variants(types):
            if (name, variant) not in made:
                made.add((name, variant))
                yield function(name, variant, result if not result.startswith(('any', 'SETOF any')) else
                               result.replace(result.split()[-1], 'bigint'))
    for left in TYPES:
        for right in TYPES:
            yield function('tell', (left, right), 'boolean')
            for operator in OPERATORS:
                yield (f'CREATE OPERATOR public.{operator} '
                       f'(FUNCTION = public.tell, LEFTARG = {left}, RIGHTARG = {right})')


def variants(types):
    """Yield those types, and others in the place of each; of any, one and the same everywhere too."""
    for element in range(6):
        yield tuple(POLYMORPHIC[kind][element % len(POLYMORPHIC[kind])] if kind in POLYMORPHIC else kind
                    for kind in types)
    for at, kind in enumerate(types):
        for other in BETTER.get(kind, ()) + POLYMORPHIC.get(kind, ()):
            changed = (*types[:at], other, *types[at + 1:])
            if not any(kind in POLYMORPHIC for kind in changed):
                yield changed


def function(name, types, result):
    told = f'{name}({", ".join(types)})'
    return (f'CREATE FUNCTION public."{name}"({", ".join(types)}) RETURNS {result} LANGUAGE plpgsql AS $f$ BEGIN '
            f"PERFORM pg_catalog.nextval('public.tells'); "
            f"RAISE 'mallory was called by %: {told}', current_user; END $f$")


class Hostile(unittest.TestCase):
    # Has mallory made something in the database at first?
    planted = False
    # Servers that have a database to copy where mallory has: it is some thousand statements.
    _prepared: set = set()

    def setUp(self):
        super().setUp()
        server, name = self.layer.server, f'hostile_{"hp" if self.keep_history else "hf"}'
        if self.planted and server not in self._prepared:
            with closing(self._made('hostile_planted')) as watch:
                self._plant(watch)
            self._prepared.add(server)
        self.watch = self._made(name, 'hostile_planted' if self.planted else None)
        self._direct = server.dsn(name)
        self.addCleanup(server.drop_database, name)
        self.addCleanup(self.watch.close)

    def _made(self, name, template=None):
        """Return a connection to a new database, where mallory may create objects."""
        watch = Watch(self.layer.server.create_database(name, template=template))
        if not watch.rows("SELECT 1 FROM pg_roles WHERE rolname = 'mallory'"):
            watch.rows('CREATE ROLE mallory')
        watch.rows('GRANT CREATE ON SCHEMA public TO mallory')
        return watch

    @staticmethod
    def _plant(watch):
        names = set().union(*(re.findall(r'\b([a-z_]\w*)\(', text) for text in texts().values())) | {'cardinality'}
        watch.rows('SET ROLE mallory')
        rows = watch.rows(
            "SELECT proname, CASE WHEN pronargs = 0 THEN '{}' ELSE "
            "(SELECT array_agg(format_type(t, NULL) ORDER BY n) FROM unnest(proargtypes) WITH ORDINALITY a (t, n)) "
            "END, pg_get_function_result(oid) FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace "
            "AND proname = ANY (%s::text[]) AND prorettype <> 'internal'::regtype AND pronargs <= 6 "
            "AND 'internal'::regtype <> ALL (proargtypes::oid[])", sorted(names))
        statements = list(planted([(name, tuple(types), result) for name, types, result in rows if result]))
        watch.rows(';\n'.join(statements))
        watch.rows('RESET ROLE')

    def told(self):
        return self.watch.one('SELECT is_called FROM public.tells')

    def opened(self):
        bouncer = getattr(self.layer, 'bouncer', None)
        dsn = bouncer.dsn(self._direct) if bouncer else self._direct
        return relstore.RelStore(relstore.PostgreSQL(dsn, driver=self.driver), keep_history=self.keep_history)

    def use(self, storage):
        db = DB(storage.new_instance())
        with db.transaction() as connection:
            connection.root()['a'] = PersistentMapping(b='c' * 20_000)
            for n in range(20):
                connection.root()[n] = PersistentMapping(n=n)
        for n in range(3):
            with db.transaction() as connection:
                connection.root()[n]['n'] = 'm'
                connection.root()['a']['b'] = str(n) * 20_000
                connection.readCurrent(connection.root()['a'])
                connection.root()[f'more {n}'] = PersistentMapping()
        with db.transaction() as connection:
            connection.prefetch(list(connection.root().values()))
            self.assertEqual(connection.root()['a']['b'], '2' * 20_000)
            del connection.root()[5]
        if self.keep_history:
            [newest, *_] = db.undoLog(0, 2)
            db.undo(newest['id'])
            transaction.commit()
            self.assertTrue(db.history(p64(0), 3))
        self.assertGreater(sum(len(list(records)) for records in storage.iterator()), 20)
        self.assertTrue(len(storage) and storage.getSize() and storage.load(p64(0)))
        for _ in range(40):
            storage.new_oid()


class Control(Hostile):
    """In the same database, among the same objects of mallory, RelStorage calls one with its own rights."""

    def test_relstorage(self):
        if not Path(PYTHON).exists():
            cannot_run(self, f'There is no RelStorage: no {PYTHON} (make .venv-bench/made)', excused=True)
        peer = Peer()
        self.addCleanup(peer.end)
        self.assertRegex(peer.ask('version'), r'^4\.')
        peer.ask('open', where={'dsn': self._direct}, keep_history=self.keep_history)
        self._plant(self.watch)
        with self.assertRaisesRegex(AssertionError, f'mallory was called by {self.watch.one("SELECT current_user")}:'):
            peer.ask('create')
        peer.ask('close')       # and with it what its transactions lock
        self.assertTrue(self.told())
        self.watch.rows("SELECT pg_catalog.setval('public.tells', 1, false)")
        with closing(self.opened()) as storage:
            self.use(storage)
        self.assertFalse(self.told())


class Called(Hostile):
    planted = True

    def test_nothing_of_others_is_called(self):
        pooled = getattr(self.layer, 'bouncer', None) is not None
        storage = self.opened()
        self.use(storage)
        if not pooled:
            storage.pack(1e10, referencesf)
        storage.zap_all()
        storage.close()
        with closing(self.opened()) as storage:
            storage.database.adapter.message_size = 1000        # what is larger is sent ahead
            self.use(storage)
            if not pooled:
                adapter, session = storage.database.adapter, storage.database.adapter.connect()
                with closing(session):
                    adapter.vote_holders(session)
                    adapter.table_holders(session, 'object_state', True)
                    adapter.size(session)
                    adapter.estimated_count(session)
        self.assertFalse(self.told())

    def test_nothing_of_others_is_called_by_all_that_a_storage_does(self):
        exercise(self.opened, packs=not hasattr(self.layer, 'bouncer'))
        self.assertFalse(self.told())


class Meant(Hostile):
    """What depends on the text of statements alone."""
    planted = True

    def test_no_statement_means_what_others_have_made(self):
        """Whether or not a statement comes to call it: who may not call a function cannot begin a plan that does."""
        self.watch.rows('REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC')
        with closing(self.opened()) as storage:
            texts = [text for _, text in storage.database.adapter.sql]
        if not self.watch.rows("SELECT 1 FROM pg_roles WHERE rolname = 'site'"):
            self.watch.rows('CREATE ROLE site')
        self.watch.rows('GRANT ALL ON ALL TABLES IN SCHEMA public TO site; '
                        'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO site')
        self.watch.rows('SET ROLE site; SET plan_cache_mode = force_generic_plan')
        self.watch.rows("SET relstore.tid = '1 0'; SET relstore.chunks = '{}'")     # asked for when a plan is made
        with self.assertRaisesRegex(Exception, 'permission denied for function'):
            self.watch.rows("EXPLAIN SELECT * FROM (SELECT zoid FROM public.object_state WHERE false) o "
                            "WHERE ARRAY[zoid] <> '{}'")
        count = 0
        for text in texts:
            for statement in parts(text):
                if explains(statement) and 'pg_temp' not in statement:
                    prepared, names = numbered(statement)
                    with self.subTest(statement):
                        self.watch.rows(f'PREPARE a AS {prepared}')
                        nulls = ', '.join(['NULL'] * len(names))
                        self.watch.rows(f'EXPLAIN EXECUTE a ({nulls})' if nulls else 'EXPLAIN EXECUTE a')
                        self.watch.rows('DEALLOCATE a')
                        count += 1
        self.assertGreater(count, 80)

    def test_control(self):
        """What relstore and RelStorage once asked in each commit calls mallory's functions."""
        for sql in ("SELECT cardinality('{1}'::bigint[])", "SELECT '{1}'::bigint[] <> '{}'",
                    "SELECT unnest('{1}'::bigint[])", "SELECT 'a'::text || 1::oid", 'SELECT array_agg(1::bigint)'):
            with self.subTest(sql), self.assertRaisesRegex(Exception, 'mallory was called'):
                self.watch.rows(sql)
        self.assertTrue(self.watch.one('SELECT is_called FROM public.tells'))


class Refused(Hostile):
    """What others have made that has the name of ours. And what a function sets."""

    def test_settings_of_vote_reach_finish(self):
        """A function with a search path of its own may set something else until the end of the transaction."""
        with closing(self.opened()) as storage:
            sql = storage.database.adapter.sql
            _, vote = sql.vote.parts
            nothing = ['x', '1000', None, False, True, 0] + 7 * ['{}']
            self.watch.rows('BEGIN')
            self.watch.rows("SET statement_timeout = '1h'; SET search_path = public")
            self.watch.rows(vote, *nothing)
            self.assertEqual(
                [self.watch.one(f'SHOW {name}') for name in ('statement_timeout', 'lock_timeout', 'plan_cache_mode',
                                                             'enable_seqscan', 'search_path')],
                ['0', '1s', 'force_generic_plan', 'off', 'public'])
            self.watch.rows('ROLLBACK')

    def refused(self, *words):
        for _ in range(2):
            with self.assertRaises(ConfigurationError) as caught:
                self.opened().close()
            for word in words:
                self.assertIn(word, str(caught.exception))

    def as_mallory(self, *statements):
        self.watch.rows('SET ROLE mallory')
        self.watch.rows('; '.join(statements))
        self.watch.rows('RESET ROLE')

    FUNCTION = "CREATE FUNCTION public.{} LANGUAGE plpgsql AS $$ BEGIN RAISE 'mallory was called'; END $$"

    def test_functions_that_are_called_as_ours(self):
        self.as_mallory(self.FUNCTION.format('relstore_tid_1(p_time timestamp) RETURNS bigint'))
        self.refused('function relstore_tid_1(timestamp without time zone) belongs to mallory')

    def test_overload_of_a_function_of_ours(self):
        self.opened().close()
        self.as_mallory(self.FUNCTION.format('relstore_poll_4(integer, integer) RETURNS bigint'))
        self.refused('relstore_poll_4(integer, integer) belongs to mallory')

    def test_overload_while_we_run(self):
        """The types of what is sent are those of our functions."""
        with closing(self.opened()) as storage:
            adapter = storage.database.adapter
            for name, types in functions(adapter.schema()).items():
                if types and 'unlink' not in name:
                    for other in {types.replace('bigint', 'integer'), types.replace('text', 'varchar')} - {types}:
                        self.as_mallory(self.FUNCTION.format(f'{name}({other}) RETURNS bigint'))
            self.use(storage)

    def test_table_of_somebody_else(self):
        self.as_mallory('CREATE TABLE public.relstore_meta (name text NOT NULL PRIMARY KEY, value text NOT NULL)')
        self.refused('table relstore_meta belongs to mallory')

    def test_function_that_takes_something_else(self):
        self.watch.rows(self.FUNCTION.format('relstore_poll_4(text) RETURNS bigint'))
        self.refused('relstore_poll_4(text)', 'does not take')

    def test_trigger_of_somebody_else(self):
        self.opened().close()
        self.as_mallory(self.FUNCTION.format('mine() RETURNS trigger'))
        if self.keep_history:
            self.watch.rows('DROP TRIGGER blob_chunk_delete ON blob_chunk; CREATE TRIGGER blob_chunk_delete '
                            'BEFORE DELETE ON blob_chunk FOR EACH ROW EXECUTE FUNCTION mine()')
            self.refused('trigger blob_chunk_delete with the function mine belongs to mallory')

    def test_owner_whom_object_state_has(self):
        """Also where the application is somebody else, who may only use the tables."""
        self.opened().close()
        self.watch.rows("DO $$ BEGIN EXECUTE (SELECT string_agg(format("
                        "'ALTER TABLE public.%I OWNER TO mallory', relname), '; ') FROM pg_class "
                        "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace); END $$")
        self.opened().close()

    def test_search_path_with_the_server_behind(self):
        self.watch.rows(f'ALTER DATABASE "{self.watch.one("SELECT current_database()")}" '
                        'SET search_path = public, pg_catalog')
        self.refused('search path', 'begins with public')


cases(globals(), Called, backends=DIRECT + PGBOUNCER)
cases(globals(), Meant, backends=DIRECT[:2])
# Drivers and poolers differ in how they begin a session, and each needs one test of that in each mode at most.
cases(globals(), Refused, backends=(DIRECT[0], DIRECT[3], PGBOUNCER[1]),
      thorough=(*DIRECT[1:3], PGBOUNCER[0], *PGBOUNCER[2:]))
cases(globals(), Control, backends=DIRECT[:2])
del Hostile, Control, Called, Meant, Refused
