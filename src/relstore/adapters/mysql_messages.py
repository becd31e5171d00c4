"""Messages to MySQL and MariaDB: several statements in one, and long lists in parts."""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from relstore.sessions.session import Row, Session
from relstore.sessions.statement import arranged

Statement = tuple[str, Sequence[Any]]

# Longer lists would be a danger: MariaDB turns a list of a thousand into a subquery, and MySQL scans the table for one
# that is too long. Then rows are locked in any order, or all of them.
LIST = 500
STATEMENTS = 40                 # in one message: so many always fit into the smallest packet


def send(session: Session, statements: Sequence[Statement]) -> list[list[Row]]:
    """Run statements in as few messages as is safe; return the rows of each, in order."""
    results = []
    for some in lists(statements, STATEMENTS):
        results += session.results(';\n'.join(sql for sql, _ in some), [
            parameter for sql, parameters in some for parameter in arranged(sql, parameters)])
    return results


def lists(values: Iterable[Any], size: int = LIST) -> Iterator[tuple[Any, ...]]:
    """Yield the values in tuples of up to `size`."""
    values = iter(values)
    while some := tuple(islice(values, size)):
        yield some


def block(statements: Sequence[Statement]) -> Statement:
    """Return one compound statement of MariaDB's with all of them."""
    sql = 'BEGIN NOT ATOMIC\n' + ';\n'.join(sql for sql, _ in statements) + ';\nEND'
    return sql, [parameter for sql, parameters in statements for parameter in arranged(sql, parameters)]


def with_rows(sql: str, count: int) -> str:
    """Return a statement with the row after its VALUES repeated."""
    return re.sub(r'(?<=VALUES )\([^()]*\)', lambda row: ', '.join([row[0]] * count), sql, count=1)
