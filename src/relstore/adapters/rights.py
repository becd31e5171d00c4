"""Rights: what a user of a server needs, told once, as data.

What is looked at when a storage is opened, and when a pack begins, is made of it, and so is the text of the GRANTs.
Each purpose needs what the ones before it in PURPOSES need, too. CREATE stands apart: on PostgreSQL who makes the
tables owns them, and may do everything; on MySQL and MariaDB it is enough to make them, and for nothing else.
"""
from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relstore.errors import ConfigurationError, NotAllowed, StorageError

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter
    from relstore.sessions.session import Session

CREATE, READ, RUN, PACK = 'create', 'read', 'run', 'pack'
PURPOSES = READ, RUN, PACK
TOLD = 4            # rights that an error names
WIDTH = 100         # of the text of GRANTs
TELLS = {
    CREATE: 'To create the tables ("relstore adopt"), once and where a new version of relstore needs more',
    READ: 'To read (read-only true)',
    RUN: 'To run a site: those to read, and',
    PACK: 'To pack, and for "relstore refs" and "relstore writers": those to run, and'}

_HOW = '"relstore statements %s --grants" tells how'

# By the kind of object and its name: of a table, which need not be there in both history modes. Of what there is one,
# the name is ''. [hp], [hf]: with history alone, without it; [MySQL]: not on MariaDB.
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
        ('TABLE', 'object_state'): 'DELETE',
        ('TABLE', 'current_object'): 'DELETE',
        ('TABLE', 'relstore_refs'): 'INSERT, DELETE',
        ('TABLE', 'relstore_refs [hf]'): 'UPDATE',
        ('TABLE', 'relstore_pack'): 'INSERT, UPDATE',
        ('TABLE', 'relstore_garbage'): 'INSERT, UPDATE, DELETE',
        ('TABLE', 'relstore_meta'): 'DELETE'}}

# What a pack removes by foreign keys, and what a trigger does then, PostgreSQL does in the name of the tables' owner.
_POSTGRESQL: dict[str, Needs] = {
    CREATE: {('SCHEMA', ''): 'USAGE, CREATE'},
    READ: {
        ('SCHEMA', ''): 'USAGE',
        **{('TABLE', name): 'SELECT' for name in (
            'transaction', 'object_state', 'current_object', 'blob_chunk', 'relstore_epoch', 'relstore_sweep',
            'relstore_meta', 'relstore_pack', 'relstore_garbage', 'relstore_refs')}},
    RUN: {
        ('DATABASE', ''): 'TEMPORARY',                  # for transactions that are too large for one message
        **_WRITTEN[RUN],
        ('SEQUENCE', 'zoid_seq'): 'SELECT, UPDATE'},
    PACK: _WRITTEN[PACK]}

# Functions, without the number that says which version; the others of the schema are for those who run a site.
_FUNCTIONS = {READ: ('relstore_load', 'relstore_poll'), PACK: ('relstore_sweep', 'relstore_forget')}

_MYSQL: dict[str, Needs] = {
    CREATE: {
        ('DATABASE', ''): 'SELECT, INSERT, UPDATE, CREATE, ALTER',
        ('DATABASE', ' [hp]'): 'CREATE VIEW',
        ('DATABASE', ' [MySQL]'): 'REFERENCES'},
    READ: {('DATABASE', ''): 'SELECT'},
    RUN: {
        ('DATABASE', ''): 'CREATE TEMPORARY TABLES',    # as above
        **_WRITTEN[RUN],
        ('TABLE', 'commit_row_lock [MySQL]'): 'UPDATE',         # to lock the row
        ('TABLE', 'new_oid'): 'INSERT, DELETE',
        ('TABLE', 'relstore_lock'): 'INSERT, UPDATE, DELETE',
        ('TABLE', 'relstore_commit'): 'INSERT, UPDATE, DELETE'},
    PACK: _WRITTEN[PACK]}


@dataclass(frozen=True)
class Right:
    """kind: of the object, as GRANT calls it."""
    privilege: str
    kind: str
    name: str = ''

    def __str__(self) -> str:
        return f'{self.privilege} on {self.name or f"the {self.kind.lower()}"}'


def of_postgresql(purpose: str, schema: Mapping[str, str], keep_history: bool) -> list[Right]:
    """Return what a purpose needs besides what the ones before it do. schema: as Adapter.schema() returns it."""
    functions = [name for name, text in schema.items() if 'CREATE FUNCTION' in text and 'RETURNS trigger' not in text]
    return [*_rights(_POSTGRESQL[purpose], schema, _tags(keep_history)),
            *(Right('EXECUTE', 'FUNCTION', name) for name in functions if _purpose_of(name) == purpose)]


def of_mysql(purpose: str, schema: Mapping[str, str], keep_history: bool, product: str) -> list[Right]:
    """Likewise, for MySQL or MariaDB."""
    return list(_rights(_MYSQL[purpose], schema, _tags(keep_history, product)))


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
    """Return the purposes whose rights one needs, all of them."""
    return PURPOSES[:PURPOSES.index(purpose) + 1]


def refuse(adapter: Adapter, session: Session, purpose: str) -> None:
    """NotAllowed: the user lacks rights for a purpose; it says which, in one sentence."""
    missing = adapter.missing_rights(session, purpose)
    if missing:
        raise NotAllowed(_sentence(adapter, session, purpose, missing))


def not_usable(adapter: Adapter, session: Session, error: StorageError) -> ConfigurationError:
    """Return the error that says why a database cannot be used: of a right that is missing, or of something else."""
    if not isinstance(error, NotAllowed):
        return ConfigurationError(f'{adapter} cannot be used: {error}.')
    session.rollback()
    missing = 'object_state' in adapter.columns(session) and adapter.missing_rights(session, adapter.purpose)
    if missing:
        return NotAllowed(_sentence(adapter, session, adapter.purpose, missing))
    return NotAllowed(f'{adapter} lacks what relstore needs, and the user {adapter.user(session)} may not make it: '
                      f'{error}; connect once as one who has the rights ({_HOW % adapter.name}).')


def _sentence(adapter: Adapter, session: Session, purpose: str, missing: list[Right]) -> str:
    what = {READ: 'read', RUN: 'written', PACK: 'packed'}[purpose]
    told = ', '.join(map(str, missing[:TOLD])) + (f' and {len(missing) - TOLD} more' if len(missing) > TOLD else '')
    otherwise = ', or set read-only true' if purpose == RUN else ''
    return (f'{adapter} cannot be {what} by the user {adapter.user(session)}, who lacks these rights: {told}; grant '
            f'them ({_HOW % adapter.name}){otherwise}.')


# Trying, on MySQL and MariaDB: nothing tells a user all that it may do, where rights come with roles --------------

_TRIALS = {
    'SELECT': 'SELECT 1 FROM {table} WHERE FALSE',
    'INSERT': 'INSERT INTO {table} SELECT * FROM {table} WHERE FALSE',
    'UPDATE': 'UPDATE {table} SET {column} = {column} WHERE FALSE',
    'DELETE': 'DELETE FROM {table} WHERE FALSE',
    'CREATE TEMPORARY TABLES': (
        'CREATE TEMPORARY TABLE relstore_trial (one INTEGER NOT NULL PRIMARY KEY) ENGINE=InnoDB;\n'
        'DROP TEMPORARY TABLE relstore_trial')}
_TABLE = re.compile(r'CREATE TABLE IF NOT EXISTS \S+ \(\s*(\w+)')


def trials(needed: Iterable[Right], schema: Mapping[str, str]) -> list[tuple[Right, str]]:
    """Return statements that need these rights, and change nothing, each with its right."""
    columns = {name: found[1] for name, text in schema.items() if (found := _TABLE.search(text))}
    return [(right, _TRIALS[right.privilege].format(table=table, column=columns.get(table)))
            for right in needed
            for table in ([right.name] if right.name else columns if right.privilege == 'SELECT' else [''])]


# The text of GRANTs ----------------------------------------------------------------------------------------------

def grants_on_postgresql(rights: Mapping[str, Iterable[Right]], database: str, schema: str, user: str,
                         owner: str) -> str:
    """Return GRANT statements. rights: by purpose, what it needs besides; owner: who makes the tables.

    Of functions, all: they are relstore's, and a new version has others.
    """
    def statements(purpose: str) -> Iterator[str]:
        who = owner if purpose == CREATE else user
        for kind, privileges, names in _grouped(rights[purpose]):
            whole = {'DATABASE': f'DATABASE {database}', 'SCHEMA': f'SCHEMA {schema}',
                     'FUNCTION': f'ALL FUNCTIONS IN SCHEMA {schema}'}.get(kind)
            if kind != 'FUNCTION' or purpose == READ:
                kind_told = 'SEQUENCE ' if kind == 'SEQUENCE' else ''
                yield (f'GRANT {privileges} ON {whole}' if whole else
                       f'GRANT {privileges} ON {kind_told}{", ".join(f"{schema}.{name}" for name in names)}'
                       ) + f' TO {who};'
    return _text(statements)


def grants_on_mysql(rights: Mapping[str, Iterable[Right]], database: str, user: str, owner: str) -> str:
    """Likewise. The tables have to be there."""
    def statements(purpose: str) -> Iterator[str]:
        who = owner if purpose == CREATE else user
        for _, privileges, names in _grouped(rights[purpose]):
            yield from (f'GRANT {privileges} ON {database}.{name or "*"} TO {who};' for name in names)
    return _text(statements)


def _grouped(rights: Iterable[Right]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, privileges, names of the objects that are to have just these)."""
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
