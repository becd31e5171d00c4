"""Rights: what a user of a server needs, as data.

The checks when a storage is opened and when a pack begins are derived from it, and so is the text of the GRANTs. Each
purpose also needs what the ones before it in PURPOSES need. CREATE is separate: on PostgreSQL, whoever creates the
tables owns them and may do everything; on MySQL and MariaDB it suffices to create them, and for nothing else.
"""
from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from relstore.errors import ConfigurationError, DatabaseError, Missing, NotAllowed, StorageError

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.adapters.mysql import MySQLAdapter
    from relstore.adapters.postgresql import PostgreSQLAdapter
    from relstore.sessions.session import Session

CREATE, READ, RUN, PACK = 'create', 'read', 'run', 'pack'
PURPOSES = READ, RUN, PACK
TOLD = 4            # rights that an error message names
WIDTH = 100         # of the text of GRANTs
TELLS = {
    CREATE: 'To create the tables ("relstore adopt"), once and where a new version of relstore needs more',
    READ: 'To read (read-only true)',
    RUN: 'To run a site: those to read, and',
    PACK: 'To pack, and for "relstore refs" and "relstore writers": those to run, and'}

_HOW = '"relstore statements %s --grants" tells how'

# By the kind of object and its name; '' if there is only one of its kind. A table need not exist in both history modes.
# [hp]: only with history; [hf]: only without; [MySQL]: not on MariaDB.
Needs = Mapping[tuple[str, str], str]

_WRITTEN: dict[str, Needs] = {
    RUN: {
        ('TABLE', 'transaction'): 'INSERT',
        ('TABLE', 'object_state'): 'INSERT',
        ('TABLE', 'object_state [hf]'): 'UPDATE',
        ('TABLE', 'current_object'): 'INSERT, UPDATE',
        ('TABLE', 'relstore_epoch'): 'INSERT',          # when the server has restarted after a crash
        ('TABLE', 'relstore_meta'): 'INSERT, UPDATE',   # when something is copied into an empty database
        ('TABLE', 'relstore_sweep'): 'UPDATE'},         # when an object is deleted
    PACK: {
        ('TABLE', 'transaction'): 'UPDATE, DELETE',
        ('TABLE', 'object_state [hp]'): 'UPDATE',       # of prev_tid, where RelStorage's foreign key is
        ('TABLE', 'object_state'): 'DELETE',
        ('TABLE', 'current_object'): 'DELETE',
        ('TABLE', 'relstore_refs'): 'INSERT, DELETE',
        ('TABLE', 'relstore_refs [hf]'): 'UPDATE',
        ('TABLE', 'relstore_pack'): 'INSERT, UPDATE',
        ('TABLE', 'relstore_garbage'): 'INSERT, UPDATE, DELETE',
        ('TABLE', 'relstore_meta'): 'DELETE'}}

# On PostgreSQL, foreign keys and triggers act with the rights of the tables' owner.
_POSTGRESQL: dict[str, Needs] = {
    CREATE: {('SCHEMA', ''): 'USAGE, CREATE'},
    READ: {
        ('SCHEMA', ''): 'USAGE',
        **{('TABLE', name): 'SELECT' for name in (
            'transaction', 'object_state', 'current_object', 'blob_chunk', 'relstore_blob', 'relstore_digest',
            'relstore_epoch', 'relstore_sweep', 'relstore_meta', 'relstore_pack', 'relstore_garbage',
            'relstore_refs')}},
    RUN: {
        ('DATABASE', ''): 'TEMPORARY',                  # for transactions that are too large for one message
        **_WRITTEN[RUN],
        ('TABLE', 'blob_chunk'): 'INSERT',
        ('TABLE', 'relstore_blob'): 'INSERT',
        ('TABLE', 'relstore_blob [hp]'): 'UPDATE',      # likewise, wherever that is
        ('TABLE', 'relstore_digest'): 'INSERT, UPDATE, DELETE',
        ('TABLE', 'blob_chunk [hp]'): 'UPDATE',         # to lock the row whose blob an undo repeats
        ('TABLE', 'blob_chunk [hf]'): 'DELETE',
        ('TABLE', 'relstore_blob [hf]'): 'DELETE',
        ('SEQUENCE', 'zoid_seq'): 'SELECT, UPDATE'},
    PACK: _WRITTEN[PACK]}

# Functions, without the version in their names. The others are needed to run a site.
_FUNCTIONS = {READ: ('relstore_load', 'relstore_poll'), PACK: ('relstore_sweep', 'relstore_forget')}

_MYSQL: dict[str, Needs] = {
    CREATE: {
        ('DATABASE', ''): 'SELECT, INSERT, UPDATE, CREATE, ALTER, LOCK TABLES',
        ('DATABASE', ' [hp]'): 'CREATE VIEW',
        ('DATABASE', ' [MySQL]'): 'REFERENCES'},
    READ: {('DATABASE', ''): 'SELECT'},
    RUN: {
        ('DATABASE', ''): 'CREATE TEMPORARY TABLES',    # as above
        **_WRITTEN[RUN],
        ('TABLE', 'blob_chunk'): 'INSERT, UPDATE',
        ('TABLE', 'relstore_blob'): 'INSERT, UPDATE',
        ('TABLE', 'relstore_digest'): 'INSERT, UPDATE, DELETE',
        ('TABLE', 'blob_chunk [hf]'): 'DELETE',
        ('TABLE', 'relstore_blob [hf]'): 'DELETE',
        ('TABLE', 'commit_row_lock [MySQL]'): 'UPDATE',         # to lock the row
        ('TABLE', 'new_oid'): 'INSERT, DELETE',
        ('TABLE', 'relstore_lock'): 'INSERT, UPDATE, DELETE',
        ('TABLE', 'relstore_commit'): 'INSERT, UPDATE, DELETE'},
    PACK: _WRITTEN[PACK]}

_ORACLE = 'CREATE SESSION', 'CREATE TABLE', 'CREATE VIEW', 'CREATE SEQUENCE'

# MySQL and MariaDB: a statement that fails without the right, and changes nothing. These are no statements of their
# own in sql/, because they are made for each table, with its name and a column of it.
_TRIALS = {
    'SELECT': 'SELECT 1 FROM {table} WHERE FALSE',
    'INSERT': 'INSERT INTO {table} SELECT * FROM {table} WHERE FALSE',
    'UPDATE': 'UPDATE {table} SET {column} = {column} WHERE FALSE',
    'DELETE': 'DELETE FROM {table} WHERE FALSE',
    'CREATE TEMPORARY TABLES': (
        'CREATE TEMPORARY TABLE relstore_trial (one INTEGER NOT NULL PRIMARY KEY) ENGINE=InnoDB;\n'
        'DROP TEMPORARY TABLE relstore_trial')}
_TABLE = re.compile(r'CREATE TABLE IF NOT EXISTS \S+ \(\s*(\w+)')


@dataclass(frozen=True)
class Right:
    """kind: of the object, as GRANT calls it."""
    privilege: str
    kind: str
    name: str = ''

    def __str__(self) -> str:
        return f'{self.privilege} on {self.name or f"the {self.kind.lower()}"}'


class Rights:
    """The rights that users need on one database. This one is for databases without users."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter

    def needed(self, purpose: str) -> list[Right]:
        """Return what a purpose needs besides the rights of those before it. purpose: one of PURPOSES, or CREATE."""
        return []

    def grants(self, database: str, user: str, owner: str) -> str:
        """Return GRANT statements for a user and for the owner of the tables. Names are quoted for SQL if need be."""
        return f'-- {self._adapter.name} has no users.\n'

    def missing(self, session: Session, purpose: str) -> list[Right]:
        """Return the rights on what is there that the user lacks for a purpose and those before it."""
        return []

    @property
    def purpose(self) -> str:
        """The purpose for which the storage is opened."""
        return READ if self._adapter.read_only else RUN

    def refuse(self, session: Session, purpose: str) -> None:
        """NotAllowed: the user lacks rights for a purpose. It names them."""
        missing = self.missing(session, purpose)
        if missing:
            raise NotAllowed(self._sentence(session, purpose, missing))

    @contextmanager
    def explained(self, session: Session) -> Iterator[None]:
        """Turn an error of the server into one that says why the database cannot be used."""
        try:
            yield
        except (ConfigurationError, DatabaseError) as e:
            if e.__cause__ is None:
                raise
            raise self._not_usable(session, e) from e

    def _not_usable(self, session: Session, error: StorageError) -> ConfigurationError:
        """Return the error that says so: a right is missing, or something else is wrong."""
        adapter, purpose = self._adapter, self.purpose
        if not isinstance(error, NotAllowed):
            return ConfigurationError(f'{adapter} cannot be used: {error}.')
        session.rollback()
        missing = 'object_state' in adapter.columns(session) and self.missing(session, purpose)
        if missing:
            return NotAllowed(self._sentence(session, purpose, missing))
        return NotAllowed(f'{adapter} lacks what relstore needs, and the user {self._user(session)} may not make it: '
                          f'{error}; connect once as one who has the rights ({_HOW % adapter.name}).')

    def _sentence(self, session: Session, purpose: str, missing: list[Right]) -> str:
        adapter, what = self._adapter, {READ: 'read', RUN: 'written', PACK: 'packed'}[purpose]
        told = ', '.join(map(str, missing[:TOLD])) + (
            f' and {len(missing) - TOLD} more' if len(missing) > TOLD else '')
        otherwise = ', or set read-only true' if purpose == RUN else ''
        return (f'{adapter} cannot be {what} by the user {self._user(session)}, who lacks these rights: {told}; grant '
                f'them ({_HOW % adapter.name}){otherwise}.')

    def _user(self, session: Session) -> str:
        [[user]] = session.all(self._adapter.sql.current_user)
        return user


class RightsOnPostgreSQL(Rights):
    _adapter: PostgreSQLAdapter

    def needed(self, purpose: str) -> list[Right]:
        schema = self._adapter.schema()
        functions = [
            name for name, text in schema.items() if 'CREATE FUNCTION' in text and 'RETURNS trigger' not in text]
        return [*_rights(_POSTGRESQL[purpose], schema, _tags(self._adapter.keep_history)),
                *(Right('EXECUTE', 'FUNCTION', name) for name in functions if _purpose_of(name) == purpose)]

    def grants(self, database: str, user: str, owner: str) -> str:
        """All functions are granted: they are relstore's, and the next version has others.

        Large objects belong to the user who stores them, and a pack removes them with the rights of the tables' owner.
        """
        schema = quoted(self._adapter.namespace)

        def statements(purpose: str) -> Iterator[str]:
            who = owner if purpose == CREATE else user
            if purpose == RUN and user != owner:
                yield f'GRANT {user} TO {owner};'
            for kind, privileges, names in _grouped(self.needed(purpose)):
                whole = {'DATABASE': f'DATABASE {database}', 'SCHEMA': f'SCHEMA {schema}',
                         'FUNCTION': f'ALL FUNCTIONS IN SCHEMA {schema}'}.get(kind)
                if kind != 'FUNCTION' or purpose == READ:
                    kind_told = 'SEQUENCE ' if kind == 'SEQUENCE' else ''
                    yield (f'GRANT {privileges} ON {whole}' if whole else
                           f'GRANT {privileges} ON {kind_told}{", ".join(f"{schema}.{name}" for name in names)}'
                           ) + f' TO {who};'
        return _text(statements)

    def missing(self, session: Session, purpose: str) -> list[Right]:
        """One statement asks the catalogue, which everybody may read."""
        wanted = [right for each in up_to(purpose) for right in self.needed(each)]
        columns = [[right.kind for right in wanted], [right.name for right in wanted],
                   [right.privilege for right in wanted]]
        return [wanted[number - 1] for number, in session.all(self._adapter.sql.missing_rights, (
            self._adapter.namespace, *('{' + ','.join(f'"{value}"' for value in column) + '}' for column in columns)))]


class RightsOnMySQL(Rights):
    """Or on MariaDB."""
    _adapter: MySQLAdapter

    def needed(self, purpose: str) -> list[Right]:
        adapter = self._adapter
        return list(_rights(_MYSQL[purpose], adapter.raw_schema(), _tags(adapter.keep_history, adapter.product)))

    def grants(self, database: str, user: str, owner: str) -> str:
        """The tables must exist before these statements are run."""
        def statements(purpose: str) -> Iterator[str]:
            who = owner if purpose == CREATE else user
            for _, privileges, names in _grouped(self.needed(purpose)):
                yield from (f'GRANT {privileges} ON {database}.{name or "*"} TO {who};' for name in names)
        return _text(statements)

    def missing(self, session: Session, purpose: str) -> list[Right]:
        """One message tries all of them. If that fails, each is tried alone, without those on what is not there."""
        purposes, missing = up_to(purpose), []
        with suppress(NotAllowed, Missing):
            session.results(';\n'.join(getattr(self._adapter.sql, f'may_{each}') for each in purposes))
            return []
        for right, sql in chain.from_iterable(map(self.trials, purposes)):
            try:
                session.results(sql)
            except NotAllowed:
                missing.append(right)
            except Missing:
                pass
        return list(dict.fromkeys(missing))

    def trials(self, purpose: str) -> list[tuple[Right, str]]:
        """Return (right, statement) for a purpose. The statement needs the right, and changes nothing.

        They are tried because a user cannot find out all its rights if some come with roles.
        """
        columns = {name: found[1] for name, text in self._adapter.raw_schema().items()
                   if (found := _TABLE.search(text))}
        return [(right, _TRIALS[right.privilege].format(table=table, column=columns.get(table)))
                for right in self.needed(purpose)
                for table in ([right.name] if right.name else columns if right.privilege == 'SELECT' else [''])]


class RightsOnOracle(Rights):
    """The tables belong to the user that a site connects as; what a user owns needs no grants."""

    def grants(self, database: str, user: str, owner: str) -> str:
        return '\n'.join([
            *_wrapped(f'-- {TELLS[CREATE]}, as a DBA. All else is done with tables of its own:', '-- '),
            f'GRANT {", ".join(_ORACLE)} TO {user};',
            '-- Room for them, in the tablespace of the user:',
            f'ALTER USER {user} QUOTA UNLIMITED ON users;']) + '\n'


def _tags(keep_history: bool, product: str = '') -> tuple[str, ...]:
    return '', '[hp]' if keep_history else '[hf]', f'[{product}]'


def _rights(needs: Needs, schema: Mapping[str, str], tags: tuple[str, ...]) -> Iterator[Right]:
    for (kind, name), privileges in needs.items():
        table, _, tag = name.partition(' ')
        if (not table or table in schema) and tag in tags:
            yield from (Right(privilege, kind, table) for privilege in privileges.split(', '))


def _purpose_of(function: str) -> str:
    name = function.rpartition('_')[0]
    return next((purpose for purpose, names in _FUNCTIONS.items() if name in names), RUN)


def up_to(purpose: str) -> tuple[str, ...]:
    """Return this purpose and those before it."""
    return PURPOSES[:PURPOSES.index(purpose) + 1]


def _grouped(rights: Iterable[Right]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, privileges, names of the objects on which exactly these are granted)."""
    objects: dict[tuple[str, str], list[str]] = {}
    for right in rights:
        objects.setdefault((right.kind, right.name), []).append(right.privilege)
    alike: dict[tuple[str, str], list[str]] = {}
    for (kind, name), wanted in objects.items():
        alike.setdefault((kind, ', '.join(wanted)), []).append(name)
    for (kind, privileges), names in alike.items():
        yield kind, privileges, names


def _text(statements: Callable[[str], Iterable[str]]) -> str:
    return '\n\n'.join('\n'.join([*_wrapped(f'-- {TELLS[purpose]}:', '-- '), *(
        line for statement in statements(purpose) for line in _wrapped(statement, '    '))])
        for purpose in (CREATE, *PURPOSES)) + '\n'


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def quoted(name: str) -> str:
    """Return a name as an identifier of PostgreSQL, quoted if need be."""
    return name if re.fullmatch('[a-z_][a-z_0-9]*', name) else '"' + name.replace('"', '""') + '"'
