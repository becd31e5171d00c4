"""The counter of oids of a database of MySQL or MariaDB: the AUTO_INCREMENT of the table new_oid."""
from collections.abc import Callable
from contextlib import suppress

from relstore.adapters.mysql_messages import with_rows
from relstore.adapters.statements import Statements
from relstore.errors import Deadlock
from relstore.sessions.session import Result, Session

# So many processes may count at once: each time they deadlock, one of them gets through.
COUNTING_PROCESSES = 100


def new_oids(session: Session, sql: Statements, count: int) -> list[int]:
    """Return `count` block numbers."""
    results = _undisturbed(lambda: session.results(with_rows(sql.new_oids, count), (count,)))
    [[first, step]] = results[3]
    return list(range(first, first + step * count, step))


def reserve_oids(session: Session, sql: Statements, oid: int) -> None:
    block = -(-oid // 16)       # rounded up
    if session.in_transaction:
        session.results(sql.reserve_oids_at_once, (block,))
    else:
        _undisturbed(lambda: session.results(sql.reserve_oids, (block,)))


def catch_up(session: Session, sql: Statements) -> None:
    """Count past the objects that are there: a counter behind them (restored separately, say) hands out their oids."""
    [[used]] = session.all(sql.max_oid)
    if used:
        reserve_oids(session, sql, used)


def _undisturbed(act: Callable[[], Result]) -> Result:
    """Return act(), which inserts and deletes rows of new_oid, and is all of a transaction.

    Several who do that at once can deadlock, because a unique key that is being removed is waited for, and all but one
    are ended. That is no conflict of what they store, so the caller does not learn of it.
    """
    for _ in range(COUNTING_PROCESSES):
        with suppress(Deadlock):
            return act()
    return act()
