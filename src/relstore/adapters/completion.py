"""Bringing a database up to what `Adapter.schema()` says, while a site may be using it.

What changes a table that is there needs a lock that keeps the site out, however short the change is; so each such
change is a step of its own, and comes first: see `patience`. The rest is new, and made in one transaction, where the
database has that. Interrupted after any step, the next run goes on: what is missing is looked up anew before each.
"""
from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relstore.adapters.patience import PATIENCE, in_tries
from relstore.errors import ConfigurationError, Deadlock, LockTimeout
from relstore.sessions.session import Session

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter

log = logging.getLogger('relstore')

SCHEMA_VERSION = 1
# Seconds between two warnings that somebody is in the way.
WARN_EVERY = 30.0

# What there may be without: RelStorage's tables lack some of these.
OPTIONAL = {'is_empty', 'refs', 'data_tid', 'refs_tid'}
# What both modes have, and what is there with history alone.
OBJECT_STATE, WITH_HISTORY = {'zoid', 'tid', 'state_size', 'state'}, 'prev_tid'

_TABLE = re.compile(r'\bCREATE (?:\w+ )?TABLE (?:IF NOT EXISTS )?\S+ \(')
_NO_COLUMN = {'CONSTRAINT', 'PRIMARY', 'FOREIGN', 'INDEX'}


@dataclass(frozen=True)
class Lock:
    """What is held while a table that a site uses is changed."""
    table: str
    mode: str
    stops: str              # whom
    all_stop: bool          # readers too?


@dataclass(frozen=True)
class Step:
    """Some of what is missing."""
    names: tuple[str, ...]          # as in schema()
    statements: tuple[str, ...]
    lock: Lock | None               # None: all of it is new


@dataclass(frozen=True)
class Done:
    """A step that was made. longest: seconds of the longest try; nobody can have waited longer for it."""
    step: Step
    tries: int
    seconds: float
    longest: float


class Completion:
    """What is missing in one database, and how it gets there."""

    def __init__(self, adapter: Adapter, session: Session, patience: float | None = None):
        self.session = session
        self.patience = PATIENCE if patience is None else patience
        self._adapter = adapter
        self._warned = 0.0

    def run(self, create: bool) -> None:
        """Make all that is missing, or refuse: ConfigurationError says why, LockTimeout who was in the way."""
        if self.refuse_unless_allowed(create):
            while done := self.run_next():
                log.info('%s has %s now.', self._adapter, ', '.join(done.step.names))

    def refuse_unless_allowed(self, create: bool) -> bool:
        """Return whether anything is missing; ConfigurationError if it is, and may not be made."""
        missing = self.missing()
        if missing and not (create and not self._adapter.read_only):
            why = 'the storage is read-only' if self._adapter.read_only else 'create-schema is false'
            what = ', '.join(missing) if 'object_state' in self._relations else 'all tables'
            raise ConfigurationError(f'{self._adapter} lacks {what}, and {why}; '
                                     'open it once with create-schema true and the right to create tables.')
        return bool(missing)

    def missing(self) -> list[str]:
        """Return the names of what is missing, as in schema(). ConfigurationError: what is there is not relstore's."""
        adapter = self._adapter
        self._relations, columns = adapter.relations(self.session), adapter.columns(self.session)
        schema = adapter.schema()
        self._check_mode(columns)
        for name in schema.keys() & self._relations:
            self._check_shape(name, columns.get(name, {}), columns_of(schema[name]) - OPTIONAL)
        if 'relstore_meta' in self._relations:
            self._check_version()
        missing = [name for name in schema if name not in self._relations and name != 'refs']
        if 'object_state' in self._relations:
            references = {'refs', 'data_tid' if adapter.keep_history else 'refs_tid'}
            missing += ['refs'] if references - columns['object_state'].keys() else []
        return missing

    def steps(self) -> list[Step]:
        """Return how what is missing will be made."""
        schema, missing = self._adapter.schema(), self.missing()
        steps, rest = [], list(missing)
        for name, lock in self._adapter.site_locks.items():
            if name in missing and lock.table in self._relations:
                steps.append(Step((name,), tuple(split(schema[name])), lock))
                rest.remove(name)
        if rest:
            statements = [statement for name in rest for statement in split(schema[name])]
            steps.append(Step(tuple(rest), tuple(statements), None))
        return steps

    def run_next(self) -> Done | None:
        """Make the next step; None: nothing is missing. LockTimeout says who was in the way."""
        adapter = self._adapter
        with adapter.changing_schema(self.session, self.patience):
            steps = self.steps()            # another process may have been quicker
            if not steps:
                return None
            step, began = steps[0], time.monotonic()
            tries: list[float] = []
            adapter.rehearse(self.session, step.statements)
            try:
                in_tries(lambda: self._attempt(step, tries), self.patience, lambda e: self._warn(step))
            except (LockTimeout, Deadlock) as e:
                raise LockTimeout(f'{self._in_the_way(step)}; this was tried {len(tries)} times.') from e
            return Done(step, len(tries), time.monotonic() - began, max(tries))

    def _attempt(self, step: Step, tries: list[float]) -> None:
        began = time.monotonic()
        try:
            self._adapter.run_ddl(self.session, lambda: self._make(step))
        finally:
            tries.append(time.monotonic() - began)

    def _make(self, step: Step) -> None:
        adapter, session, relations = self._adapter, self.session, self._relations
        if 'relstore_sweep' in step.names and 'relstore_meta' in relations:
            # An older relstore made this, and may be running: it looks at no sweep, like RelStorage.
            session.run(adapter.sql.set_meta, ('writers', 'any'))
        for statement in step.statements:
            adapter.define(session, statement)
        if step.lock is None:
            for item in adapter.new_meta(relations).items():
                session.run(adapter.sql.add_meta, item)

    def _in_the_way(self, step: Step) -> str:
        table = step.lock.table if step.lock else 'object_state'
        holders = self._adapter.table_holders(self.session, table, step.lock is None or step.lock.all_stop)
        return f'{self._adapter} cannot be given {", ".join(step.names)}: {table} is in use by {holders}'

    def _warn(self, step: Step) -> None:
        if time.monotonic() > self._warned + WARN_EVERY or not self._warned:
            self._warned = time.monotonic()
            log.warning('%s; it is tried again, with pauses, for %d s.', self._in_the_way(step), self.patience)

    def _check_version(self) -> None:
        version = self._adapter.meta(self.session).get('schema', '')
        if version != str(SCHEMA_VERSION):
            raise ConfigurationError(f'{self._adapter} has version {version or "?"} of the tables and this relstore '
                                     f'knows version {SCHEMA_VERSION}; install a newer relstore, the one that made it.')

    def _check_mode(self, columns: Mapping[str, Mapping[str, str]]) -> None:
        """By what is ours: others may have a table called transaction."""
        if 'object_state' not in columns:
            return
        self._check_shape('object_state', columns['object_state'], OBJECT_STATE)
        if (WITH_HISTORY in columns['object_state']) == self._adapter.keep_history:
            return
        found, right = ('history-free', 'false') if self._adapter.keep_history else ('history-preserving', 'true')
        raise ConfigurationError(f'{self._adapter} is {found}; set keep-history {right}, or copy the data into a new '
                                 'database.')

    def _check_shape(self, table: str, there: Mapping[str, str], wanted: set[str]) -> None:
        lacks = sorted(wanted - there.keys())
        wrong = sorted(name for name in ('zoid', 'tid') if name in wanted and 'int' not in there.get(name, 'int'))
        if lacks or wrong:
            why = f'it lacks {", ".join(lacks)}' if lacks else f'its {", ".join(wrong)} is no integer'
            raise ConfigurationError(f"{self._adapter} has a table {table} that is not relstore's: {why}; "
                                     'rename that table, or name another database or schema.')


def columns_of(ddl: str) -> set[str]:
    """Return the columns of the table that a section of a schema file makes; of a sequence what tells it."""
    if 'CREATE SEQUENCE' in ddl:
        return {'is_called'}
    found = _TABLE.search(ddl)
    if found is None:
        return set()
    text, count = ddl[found.end():], 1
    while count:
        text, count = re.subn(r'\([^()]*\)', '', text)      # from within: what is left ends with the table's own
    return {item.split()[0] for item in text.partition(')')[0].split(',')} - _NO_COLUMN


def split(ddl: str) -> list[str]:
    """Split a section of a schema file into statements; a function's body stays whole."""
    statements, inside = [''], False
    for line in ddl.splitlines():
        statements[-1] += line + '\n'
        inside ^= line.count('$$') % 2 == 1
        if line.rstrip().endswith(';') and not inside:
            statements.append('')
    return [statement for statement in statements if statement.strip()]
