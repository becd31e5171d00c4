"""Ownership: who owns the objects of a PostgreSQL schema that have relstore's names? Others may create objects there.

Another user's function would run with the rights of the application, and so would what a view or a trigger calls.
While relstore runs, nobody can put a function in the place of one of its own: each statement names the schema, passes
exactly the types that the function takes, and means the functions of pg_catalog (postgresql_functions.sql).
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
    """ConfigurationError: an object with a name of relstore's belongs to a user who could not change the data anyway.

    Users who could are: superusers, and those who may act as the owner of object_state or of the schema, or as this
    user. One statement finds out, before anything else in the schema is used.
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
