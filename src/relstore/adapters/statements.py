"""Loads the SQL: a common file, and one overlay per database with what differs.

A file is a list of statements, each headed by a line `-- name: load_before`, or `-- name: load_before [hp]`
where it holds in one history mode only (hp: history-preserving, hf: history-free). In the text `?` is a
parameter, and a word in braces a table of relstore's (or a macro of the adapter's): `{object_state}` becomes
`object_state`, or `zodb.object_state` where a schema is configured.
"""
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING

_HEAD = re.compile(r'^-- name: (\S+?)(?: \[(hp|hf)\])?$', re.MULTILINE)
_COMMENT = re.compile(r'^--.*\n?', re.MULTILINE)


@cache
def read(filename: str, keep_history: bool) -> Mapping[str, str]:
    """Return the statements of one file that hold in this history mode: name -> text, in the file's order."""
    _, *parts = _HEAD.split(_text(filename))
    mode = 'hp' if keep_history else 'hf'
    return MappingProxyType({
        name: _COMMENT.sub('', body).strip()
        for name, tag, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True) if tag in (None, mode)})


@cache
def _text(filename: str) -> str:
    """Read once: a process may give up the right to read its own code, and open another database afterwards."""
    return files('relstore.adapters').joinpath('sql').joinpath(filename).read_text(encoding='utf-8')


class Statements:
    """`sql.load_before` is the final text for this database, history mode and driver."""

    def __init__(self, *filenames: str, keep_history: bool, macros: Mapping[str, str], placeholder: str):
        self._texts: dict[str, str] = {}
        for filename in filenames:
            for name, body in read(filename, keep_history).items():
                self._texts[name] = body.format_map(macros)
        # A percent sign would be taken for a parameter by the drivers that use it as their placeholder.
        for name, body in self._texts.items():
            text = body if placeholder == '?' else body.replace('%', '%%').replace('?', placeholder)
            setattr(self, name, text)

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> str: ...

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text with ? for each parameter) of every statement that will ever be sent."""
        return iter(self._texts.items())


class Tables(dict[str, str]):
    """Macros; a word without one is a table, qualified by `prefix` and quoted if it is a reserved word."""

    def __init__(self, prefix: str = '', reserved: frozenset[str] = frozenset(), **macros: str):
        self._prefix, self._reserved = prefix, reserved
        super().__init__()
        for name, text in macros.items():
            self[name] = text.format_map(self)

    def __missing__(self, name: str) -> str:
        return self._prefix + (f'"{name}"' if name in self._reserved else name)
