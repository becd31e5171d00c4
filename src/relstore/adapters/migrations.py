"""Migrations: change relstore's own tables from one version to the next.

The row `schema` of relstore_meta has their version. The migration to version NNNN is sql/migrations/NNNN.sql; an
overlay NNNN_DATABASE.sql replaces what differs on one database. As in a schema file, a section is run if what it names
is missing: a relation, or `table.column`. One that is named `(relation)` is always run if that relation is there. So a
migration can be resumed on servers that commit each change by itself. It changes tables; new ones are created
afterwards, by completion.

An older relstore may be running meanwhile. What could interleave:

* A transaction has voted: the migration waits for it, by a lock on relstore_sweep, which every vote has read.
* A pack or a copy is under way: it has the lock of packs, so the migration is refused until it has ended. Whoever takes
  that lock later looks at the version.
* A poll or a vote: the epoch contains the version, or `to NNNN` as long as others can see an unfinished migration. So
  nobody can vote without a new poll, and whoever learns of a new epoch looks at the version. It is a row of the
  database, so it reaches replicas and other nodes of a cluster, and it is there if the statements were run by hand.
* A process opens the database: it looks at the version once more after it has learnt the epoch.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from relstore.adapters.statements import read
from relstore.errors import ConfigurationError, Unavailable

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter

VERSION = 2
_SCHEMA = re.compile(r'(to )?(\d+)')       # the value of `schema`; `to`: the migration has not ended

Columns = Mapping[str, Mapping[str, str]]       # by table: the type of each, by name


def texts(database: str, number: int, keep_history: bool) -> dict[str, str]:
    """Return the sections of a migration by name; the last one records the new version.

    database: the name of the adapter, which is part of an overlay's name.
    """
    overlay = f'migrations/{number:04}_{database}.sql'
    sections = dict(read(f'migrations/{number:04}.sql', keep_history))
    if files('relstore.adapters').joinpath('sql').joinpath(overlay).is_file():
        sections |= read(overlay, keep_history)
    return begins(number) | sections | ends(number)


def begins(number: int) -> dict[str, str]:
    """Return what each migration begins with; in no SQL file, because it has the number."""
    return {'(relstore_meta) begins': f"UPDATE {{relstore_meta}} SET value = 'to {number}' WHERE name = 'schema';"}


def ends(number: int) -> dict[str, str]:
    """Return what each migration ends with."""
    return {'(relstore_meta) ends': f"UPDATE {{relstore_meta}} SET value = '{number}' WHERE name = 'schema';"}


def sections(adapter: Adapter, number: int) -> dict[str, str]:
    """Return the SQL of the migration to a version."""
    return adapter.sql.expanded(texts(adapter.name, number, adapter.keep_history))


def missing(adapter: Adapter, number: int, relations: set[str], columns: Columns) -> dict[str, str]:
    """Return the sections of a migration that have to be run."""
    return {name: text for name, text in sections(adapter, number).items() if _is_to_run(name, relations, columns)}


def _is_to_run(name: str, relations: set[str], columns: Columns) -> bool:
    table, _, column = name.partition('.')
    if column:
        return table in relations and column not in columns.get(table, {})
    if 'relstore_meta' not in relations:        # it is filled last: without it the tables were never finished
        return False
    if name.startswith('('):
        return name[1:].partition(')')[0] in relations
    return table not in relations


def pending(adapter: Adapter, meta: Mapping[str, str]) -> range:
    """Return the versions to migrate to, in order. ConfigurationError: the tables have a later version."""
    found = _SCHEMA.fullmatch(meta.get('schema', ''))
    if found is None or int(found[2]) > VERSION:
        raise ConfigurationError(f'{adapter} has version {found[2] if found else "?"} of the tables and this relstore '
                                 f'knows version {VERSION}; install a newer relstore, the one that made it.')
    return range(int(found[2]) + (found[1] is None), VERSION + 1)


def refuse_another_version(adapter: Adapter, meta: Mapping[str, str]) -> None:
    """ConfigurationError: the tables were changed to another version since they were opened."""
    if 'schema' not in meta:
        raise Unavailable(f'{adapter} does not say which version its tables have; is it being restored?')
    if meta['schema'] != str(VERSION):
        raise ConfigurationError(f'{adapter} is used by a newer relstore, which has changed its tables from version '
                                 f'{VERSION} on; restart this process with that relstore.')
