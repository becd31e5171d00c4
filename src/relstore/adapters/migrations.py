"""Migrations: how relstore's own tables of one version become those of the next.

`schema` in relstore_meta says which version they are. A migration is sql/migrations/NNNN.sql, where NNNN is the version
that it makes, with an overlay NNNN_DATABASE.sql for what one database says otherwise. As in the schema a section is run
when what it names is missing, a relation or `table.column`; one that is named `(relation)` is run each time, where that
is there. So a migration that was interrupted goes on where it was, on a server that commits each change by itself. It
changes tables; new ones are made by completion, after it.

An older relstore may be running meanwhile. What could interleave:

* A transaction that has voted: it is waited for, by a lock on relstore_sweep, which every vote has read.
* A pack, or a copy: they have the lock of packs, so this is refused until they have ended. Who takes that lock
  afterwards looks at the version.
* A poll or a vote: the epoch contains the version, or `to NNNN` as long as a migration is under way where others see
  it. So nobody votes who has not polled since, and who learns of another epoch looks at the version. That is a row in
  the database, so it goes to replicas and to other nodes of a cluster, and is there where somebody has run the
  statements by hand.
* Who opens the database looks at the version once more after it has learnt the epoch.
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
_SCHEMA = re.compile(r'(to )?(\d+)')       # of the row `schema`: to, as long as it is not reached

Columns = Mapping[str, Mapping[str, str]]       # by table: the type of each, by name


def texts(database: str, number: int, keep_history: bool) -> dict[str, str]:
    """Return the sections of a migration by name; the last says which version the tables are now.

    database: as in the name of an overlay, and of an adapter.
    """
    overlay = f'migrations/{number:04}_{database}.sql'
    sections = dict(read(f'migrations/{number:04}.sql', keep_history))
    if files('relstore.adapters').joinpath('sql').joinpath(overlay).is_file():
        sections |= read(overlay, keep_history)
    return begins(number) | sections | ends(number)


def begins(number: int) -> dict[str, str]:
    return {'(relstore_meta) begins': f"UPDATE {{relstore_meta}} SET value = 'to {number}' WHERE name = 'schema';"}


def ends(number: int) -> dict[str, str]:
    return {'(relstore_meta) ends': f"UPDATE {{relstore_meta}} SET value = '{number}' WHERE name = 'schema';"}


def sections(adapter: Adapter, number: int) -> dict[str, str]:
    """Return the SQL that makes tables of one version less those of this version."""
    return adapter.sql.expanded(texts(adapter.name, number, adapter.keep_history))


def missing(adapter: Adapter, number: int, relations: set[str], columns: Columns) -> dict[str, str]:
    """Return those sections of a migration that are to run."""
    return {name: text for name, text in sections(adapter, number).items() if _is_to_run(name, relations, columns)}


def _is_to_run(name: str, relations: set[str], columns: Columns) -> bool:
    table, _, column = name.partition('.')
    if column:
        return table in relations and column not in columns.get(table, {})
    if 'relstore_meta' not in relations:        # they were never finished: what rows there are say nothing
        return False
    if name.startswith('('):
        return name[1:].partition(')')[0] in relations
    return table not in relations


def pending(adapter: Adapter, meta: Mapping[str, str]) -> range:
    """Return the versions that the tables have yet to become, in order. ConfigurationError: they are of a later one."""
    found = _SCHEMA.fullmatch(meta.get('schema', ''))
    if found is None or int(found[2]) > VERSION:
        raise ConfigurationError(f'{adapter} has version {found[2] if found else "?"} of the tables and this relstore '
                                 f'knows version {VERSION}; install a newer relstore, the one that made it.')
    return range(int(found[2]) + (found[1] is None), VERSION + 1)


def refuse_another_version(adapter: Adapter, meta: Mapping[str, str]) -> None:
    """ConfigurationError if the tables have become those of another version since they were opened."""
    if 'schema' not in meta:
        raise Unavailable(f'{adapter} does not say which version its tables have; is it being restored?')
    if meta['schema'] != str(VERSION):
        raise ConfigurationError(f'{adapter} is used by a newer relstore, which has changed its tables from version '
                                 f'{VERSION} on; restart this process with that relstore.')
