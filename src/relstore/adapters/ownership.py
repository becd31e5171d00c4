"""Whose is what has a name of ours in the schema? On PostgreSQL others may create objects there.

A function of theirs would run as the application, and so would what a view or a trigger of theirs calls. While we run
nobody can put one in the place of ours: each statement names the schema, gives our functions exactly the types that
they take, and means the functions of pg_catalog (postgresql_functions.sql).
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from relstore.errors import ConfigurationError

if TYPE_CHECKING:
    from relstore.adapters.postgresql import PostgreSQLAdapter
    from relstore.sessions.session import Session

_FUNCTION = re.compile(r'CREATE FUNCTION [^(]*\(([^)]*)\)')
_TOLD_AS = {'timestamp': 'timestamp without time zone'}


def refuse_strangers(adapter: PostgreSQLAdapter, session: Session, schema: str) -> None:
    """ConfigurationError: something that has a name of ours belongs to somebody who could not have changed our data.

    Who may act as the owner of object_state, of the schema, or as this user, could; so could a superuser. In one
    statement, before anything else of the schema is looked at.
    """
    signatures = functions(adapter.schema())
    rows = session.all(adapter.sql.strangers, (
        schema, _array(adapter.schema()), _array(signatures), _array(signatures.values())))
    for problem, what, owner in rows:
        raise ConfigurationError(f'Schema {schema} of the PostgreSQL database cannot be used: ' + {
            'owner': f'its {what} belongs to {owner}, who owns neither the schema nor object_state; have it dropped, '
                     'or given to the owner of object_state (ALTER ... OWNER TO).',
            'types': f"its function {what}, of {owner}, does not take what relstore's does; have it dropped.",
            'path': f'the search path begins with {what}, so that functions there hide those of the server; leave '
                    'pg_catalog out of search_path: then it is first.'}[problem])


def functions(schema: Mapping[str, str]) -> dict[str, str]:
    """Return the types that each function takes, as PostgreSQL writes them. schema: as Adapter.schema() returns it."""
    found = {name: _FUNCTION.search(text) for name, text in schema.items()}
    return {name: ', '.join(_types(match[1])) for name, match in found.items() if match}


def _types(arguments: str) -> list[str]:
    kinds = [words[1] for words in map(str.split, filter(None, arguments.split(','))) if words and words[0] != 'OUT']
    return [_TOLD_AS.get(kind, kind) for kind in kinds]


def _array(names: Iterable[str]) -> str:
    return '{' + ','.join(f'"{name}"' for name in names) + '}'
