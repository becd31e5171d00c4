"""Loads the SQL: a common file, and one overlay per database with what differs.

A file is a list of statements. Each begins with a line `-- name: load_before (oid, tid)`, whose signature says in which
order the parameters are given; in the text `$oid` is one of them. With `[hp]` or `[hf]` at the end of that line, it is
for one history mode only (hp: history-preserving, hf: history-free). A statement that replaces one of another file has
the same signature, so a caller's values mean the same on each database; it need not use all of them.

A word in braces is a table or a macro: `{object_state}` becomes `object_state`, or `zodb.object_state` if a schema is
configured. A macro begins with a line `-- macro: limit`; an overlay may replace it, too. Macros that depend on the
server or on an option come from the adapter, numbers from numbers.py.
"""
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING

from relstore.adapters.numbers import MACROS
from relstore.sessions.statement import PARAMETER, Statement

# A signature may take several lines.
_HEAD = re.compile(r'^-- (name|macro): (\S+?)(?: \(([^()]*)\))?(?: \[(hp|hf)\])?$', re.MULTILINE)
_COMMENT = re.compile(r'^--.*\n?', re.MULTILINE)


@dataclass(frozen=True)
class Section:
    parameters: tuple[str, ...]
    text: str


def read(filename: str, keep_history: bool) -> dict[str, str]:
    """Return the texts of one file that hold in this history mode by name, in the file's order."""
    return {name: section.text for name, section in sections(filename, keep_history).items()}


@cache
def sections(filename: str, keep_history: bool, kind: str = 'name') -> Mapping[str, Section]:
    """Return the sections of one file that hold in this history mode by name, in the file's order.

    kind: 'name' for statements, or 'macro'.
    """
    _, *parts = _HEAD.split(_text(filename))
    mode = 'hp' if keep_history else 'hf'
    return MappingProxyType({
        name: Section(tuple(re.findall(r'\w+', signature or '')), _COMMENT.sub('', body).strip())
        for found, name, signature, tag, body in zip(*(parts[n::5] for n in range(5)), strict=True)
        if found == kind and tag in (None, mode)})


@cache
def _text(filename: str) -> str:
    """Read a file once: a process may give up the right to read its own code before it opens another database."""
    return files('relstore.adapters').joinpath('sql').joinpath(filename).read_text(encoding='utf-8')


class Statements:
    """`sql.load_before` is the Statement for this database, history mode and driver."""

    def __init__(self, *filenames: str, keep_history: bool, macros: 'Tables', placeholder: str):
        self._macros = macros
        macros.learn({name: macro.text for filename in filenames
                      for name, macro in sections(filename, keep_history, 'macro').items()})
        self._found: dict[str, Section] = {}
        for filename in filenames:
            for name, section in sections(filename, keep_history).items():
                earlier = self._found.get(name)
                self._found[name] = Section(section.parameters, macros.filled(section.text).strip())
                _check(name, self._found[name], earlier)
        for name, section in self._found.items():
            setattr(self, name, _statement(section.text, section.parameters, placeholder))

    def expanded(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return other texts (DDL) with the tables and macros of this database."""
        return {name: self._macros.filled(text) for name, text in texts.items()}

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Statement: ...

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text with $name for each parameter) of every statement that will ever be sent."""
        return ((name, section.text) for name, section in self._found.items())


# Made once for all storages: a hundred of them take a millisecond each time a database is opened.
_statement = lru_cache(1000)(Statement)


def _check(name: str, section: Section, replaced: Section | None) -> None:
    """ValueError: a signature does not match the parameters in the text, or the statement that it replaces."""
    used, given = set(PARAMETER.findall(section.text)), set(section.parameters)
    if used - given or (replaced is None and given - used):
        raise ValueError(f'The statement {name} has {sorted(used)}, and its signature says {sorted(given)}.')
    if replaced is not None and replaced.parameters != section.parameters:
        raise ValueError(f'The statement {name} takes {section.parameters} in one file and {replaced.parameters} in '
                         'another.')


class Tables(dict[str, str]):
    """Macros. A word that is none is a table: it is qualified by `prefix`, and quoted if it is a reserved word."""

    def __init__(self, prefix: str = '', reserved: frozenset[str] = frozenset(), **macros: str):
        self._prefix, self._reserved, self._texts = prefix, reserved, MACROS | macros
        super().__init__()

    def filled(self, text: str) -> str:
        """Return the SQL of a text."""
        return text.format_map(self)

    def learn(self, macros: Mapping[str, str]) -> None:
        """Add the macros of the SQL files. Those of the adapter take precedence."""
        self._texts = {**macros, **self._texts}

    def __missing__(self, name: str) -> str:
        if name in self._texts:
            self[name] = self._texts[name].format_map(self)
            return self[name]
        return self._prefix + (f'"{name}"' if name in self._reserved else name)


class TablesOnOracle(Tables):
    """Two columns have names that Oracle reserves: they are quoted, as what it makes of a name that is not.

    A keyword or a type is written in capitals, so it is no column.
    """
    _COLUMN = re.compile(r'(?<![$\w])(size|number)(?!\w)')

    def filled(self, text: str) -> str:
        return self._COLUMN.sub(lambda name: f'"{name[0].upper()}"', super().filled(text))
