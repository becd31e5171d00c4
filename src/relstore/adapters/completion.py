"""Completion: creates what `Adapter.schema()` lists and the database lacks, while a site may be using it.

A change of an existing table needs a lock that keeps the site out, however short the change is. So each such change is
a step of its own, and these come first: see `patience`. Everything else is new, and is made in one transaction, if the
database can do that for tables. What is missing is looked up before each step, so an interrupted run can be repeated.
"""
from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relstore.adapters import migrations
from relstore.adapters.patience import PATIENCE_SECONDS, in_tries
from relstore.errors import ConfigurationError, Deadlock, LockTimeout
from relstore.sessions.session import Session
from relstore.sessions.statement import split

if TYPE_CHECKING:
    from relstore.adapters.base import Adapter

log = logging.getLogger('relstore')

# Between two warnings that somebody is in the way.
WARN_EVERY_SECONDS = 30.0

# A table is relstore's without these, too: RelStorage's tables lack some of them.
OPTIONAL = {'is_empty', 'refs', 'data_tid', 'refs_tid'}
# Columns that both history modes have, and one that only history-preserving databases have.
OBJECT_STATE, WITH_HISTORY = {'zoid', 'tid', 'state_size', 'state'}, 'prev_tid'

_TABLE = re.compile(r'\bCREATE (?:\w+ ){0,2}TABLE (?:IF NOT EXISTS )?\S+ \(')
_NO_COLUMN = {'CONSTRAINT', 'PRIMARY', 'FOREIGN', 'INDEX'}


@dataclass(frozen=True)
class Lock:
    """The lock that is held while a table that a site uses is changed."""
    table: str
    mode: str
    stops: str              # whom
    all_stop: bool          # readers too?


@dataclass(frozen=True)
class Step:
    """A part of what is missing."""
    names: tuple[str, ...]          # as in schema()
    statements: tuple[str, ...]
    lock: Lock | None               # None: it locks nothing that a site uses
    version: int | None = None      # of a migration: the version that the tables have afterwards


@dataclass(frozen=True)
class Done:
    """A step that was done. longest: how long the longest try took, in seconds; nobody waited longer for it."""
    step: Step
    tries: int
    seconds: float
    longest: float


class Completion:
    """Finds out what one database lacks, and creates it."""

    def __init__(self, adapter: Adapter, session: Session, patience: float | None = None):
        self.session = session
        self.patience = PATIENCE_SECONDS if patience is None else patience
        self._adapter = adapter
        self._warned = 0.0

    def run(self, create: bool) -> None:
        """Create what is missing. ConfigurationError: that is not allowed. LockTimeout says who was in the way."""
        if self.refuse_unless_allowed(create):
            while done := self.run_next():
                log.info('%s has %s now.', self._adapter, ', '.join(done.step.names))

    def refuse_unless_allowed(self, create: bool) -> bool:
        """Return whether anything is missing. ConfigurationError: it is, and may not be created."""
        missing = self.missing()
        if missing and not (create and not self._adapter.read_only):
            why = 'the storage is read-only' if self._adapter.read_only else 'create-schema is false'
            what = ', '.join(missing) if 'object_state' in self._relations else 'all tables'
            raise ConfigurationError(f'{self._adapter} lacks {what}, and {why}; open it once with create-schema true '
                                     'and the right to create tables, or run "relstore adopt", which prints the '
                                     'statements with --dry-run.')
        return bool(missing)

    def missing(self) -> list[str]:
        """Return the names of what is missing, as in schema(). ConfigurationError: what is there is not relstore's."""
        return [*map(_version_name, self._look()), *self._absent]

    def _inventory(self) -> str:
        """Find out what is there; return the version that it says it has, or ''."""
        self._relations = self._adapter.relations(self.session)
        version = self._adapter.meta(self.session).get('schema', '') if 'relstore_meta' in self._relations else ''
        self._columns = self._adapter.columns(self.session)
        return version

    def _look(self) -> list[int]:
        """Find out what is there and what is missing; return the versions whose migrations are still to be run."""
        adapter = self._adapter
        schema, meta = adapter.schema(), self._inventory()
        is_whole = meta == str(migrations.VERSION) and schema.keys() - self._relations <= {'refs'}
        # Otherwise a part may have been read before a change, and a part after it.
        while not is_whole and (before := meta) != (meta := self._inventory()):
            log.info('%s: its tables are being changed from version %s to %s.', adapter, before, meta)
        columns = self._columns
        self._check_mode(columns)
        if 'relstore_meta' in self._relations:
            versions = list(migrations.pending(adapter, {'schema': meta}))
        else:
            versions = [number for number in range(2, migrations.VERSION + 1)
                        if migrations.missing(adapter, number, self._relations, columns)]
        later = {name for number in versions for name in migrations.sections(adapter, number)}
        for name in schema.keys() & self._relations:
            wanted = {column for column in columns_of(schema[name]) if f'{name}.{column}' not in later}
            self._check_shape(name, columns.get(name, {}), wanted - OPTIONAL)
        self._absent = [name for name in schema if name not in self._relations and name != 'refs']
        if 'object_state' in self._relations:
            references = {'refs', 'data_tid' if adapter.keep_history else 'refs_tid'}
            self._absent += ['refs'] if references - columns['object_state'].keys() else []
        return versions

    def steps(self) -> list[Step]:
        """Return the steps that create what is missing."""
        schema = self._adapter.schema()
        steps = [self._migration(number) for number in self._look()]
        missing, rest = self._absent, list(self._absent)
        for name, lock in self._adapter.site_locks.items():
            if name in missing and lock.table in self._relations:
                steps.append(Step((name,), tuple(split(schema[name])), lock))
                rest.remove(name)
        if rest:
            statements = [statement for name in rest for statement in split(schema[name])]
            steps.append(Step(tuple(rest), tuple(statements), None))
        return steps

    def _migration(self, number: int) -> Step:
        sections = migrations.missing(self._adapter, number, self._relations, self._columns)
        statements = [statement for section in sections.values() for statement in split(section)]
        return Step((_version_name(number),), tuple(statements), self._adapter.migration_lock, number)

    def run_next(self) -> Done | None:
        """Do the next step; None: nothing is missing. LockTimeout says who was in the way."""
        adapter = self._adapter
        with adapter.changing_schema(self.session, self.patience):
            steps = self.steps()            # another process may have been quicker
            if not steps:
                return None
            step, began = steps[0], time.monotonic()
            tries: list[float] = []
            adapter.rehearse(self.session, step.statements)
            try:
                with self._without_packs(step):
                    in_tries(lambda: self._attempt(step, tries), self.patience, lambda e: self._warn(step))
            except (LockTimeout, Deadlock) as e:
                raise LockTimeout(f'{self._in_the_way(step)}; this was tried {len(tries)} times.') from e
            return Done(step, len(tries), time.monotonic() - began, max(tries))

    @contextmanager
    def _without_packs(self, step: Step) -> Iterator[None]:
        """If the step is a migration, keep packs out while this is entered. Unavailable: somebody is packing."""
        if not step.version:
            yield
            return
        with closing(self._adapter.bare_session()) as session:
            self._adapter.pack_lock.keep_packs_out(session, 'open it afterwards')
            yield

    def _attempt(self, step: Step, tries: list[float]) -> None:
        began = time.monotonic()
        try:
            self._adapter.run_ddl(self.session, lambda: self._make(step))
        finally:
            tries.append(time.monotonic() - began)

    def _make(self, step: Step) -> None:
        adapter, session = self._adapter, self.session
        if step.version:
            for statement in adapter.migration_locks(step.statements, self._relations):
                session.run(statement)
        for statement in step.statements:
            adapter.define(session, statement)
        if not step.version and step.lock is None:
            for item in adapter.new_meta(self._relations).items():
                session.run(adapter.sql.add_meta, item)

    def _in_the_way(self, step: Step) -> str:
        table = step.lock.table if step.lock else 'object_state'
        holders = self._adapter.table_holders(self.session, table, step.lock is None or step.lock.all_stop)
        return f'{self._adapter} cannot be given {", ".join(step.names)}: {table} is in use by {holders}'

    def _warn(self, step: Step) -> None:
        if time.monotonic() > self._warned + WARN_EVERY_SECONDS or not self._warned:
            self._warned = time.monotonic()
            log.warning('%s; it is tried again, with pauses, for %d s.', self._in_the_way(step), self.patience)

    def _check_mode(self, columns: Mapping[str, Mapping[str, str]]) -> None:
        """Look at object_state only: other programs may have a table called transaction."""
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
            why = f'it lacks {", ".join(lacks)}' if lacks else f'its {", ".join(wrong)} is not an integer'
            raise ConfigurationError(f"{self._adapter} has a table {table} that is not relstore's: {why}; "
                                     'rename that table, or name another database or schema.')


def _version_name(number: int) -> str:
    return f'version {number} of the tables'


def columns_of(ddl: str) -> set[str]:
    """Return the columns of the table that a section of a schema file creates; of a sequence, a column that it has."""
    if 'CREATE SEQUENCE' in ddl:
        return {'is_called'}
    found = _TABLE.search(ddl)
    if found is None:
        return set()
    text, count = ddl[found.end():], 1
    while count:
        text, count = re.subn(r'\([^()]*\)', '', text)      # innermost first, until only the table's own are left
    names = {item.split()[0] for item in text.partition(')')[0].split(',')} - _NO_COLUMN
    return {name.strip('"').lower() for name in names}
