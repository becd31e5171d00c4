"""Zopeconf: the lines of a zope.conf with which a site uses a storage that a command was told, without passwords."""
from __future__ import annotations

import os
import re
from textwrap import dedent, indent
from typing import NamedTuple

from relstore.cli import databases, places
from relstore.converting.filestorage import is_filestorage

LINES = """\
A site uses it with these lines in its zope.conf, in place of its section <zodb_db main>:

{directives}<zodb_db main>
  mount-point /
{section}</zodb_db>"""
IMPORT = '%import relstore'

_BEGIN, _END = re.compile(r'\s*<([^\s/>]+)\s*([^\s>]*)\s*>\s*$'), re.compile(r'\s*</')
_DIRECTIVE, _DEFINE = re.compile(r'%(import|define)\b', re.IGNORECASE), re.compile(r'%define\s+(\S+)', re.IGNORECASE)
# A key of its own, and the password in a dsn, of either form.
_SECRETS = (re.compile(r'(?im)^(\s*(?:passwd|password)\s+)\S.*$'),
            re.compile(r"(?i)(password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s'&]+)"),
            re.compile(r'(://[^:/@\s]*:)\S+(?=@)'))


class _Section(NamedTuple):
    kind: str
    name: str
    lines: list[str]        # as they are in the file, with the first and the last


def zope_lines(where: str, named: databases.Named) -> str:
    """Return what to do to have a site use a storage. where: how the command was told of it, see places.py."""
    if '://' in where:
        ours = places.section(where, secret=True)
        return _lines([IMPORT] if ours.startswith('<relstore>') else [], ours)
    if is_filestorage(where):
        return _lines([], places.section(places.url_of(os.path.abspath(where))))
    path = where if os.path.exists(where) else where.partition('#')[0]
    with open(path, encoding='utf-8') as file:
        lines = databases.with_relstore(file.read()).splitlines()
    found = [each for each in _sections(lines) if each.name.lower() == named.name]
    if len(found) != 1 or found[0].kind == 'zodb_db':       # or another file, which is included, has it
        return f'A site uses it with the section {f"{named.name} " if named.name else ""}of {path}, as it is.'
    [section] = found
    text = '\n'.join(section.lines[1:-1] if section.kind == 'zodb' else section.lines)
    for secret in _SECRETS:
        text = secret.sub(rf'\1{places.HIDDEN}', text)
    return _lines(_directives(lines, text), dedent(text))


def _lines(directives: list[str], section: str) -> str:
    return LINES.format(directives=''.join(f'{line}\n' for line in directives),
                        section=indent(section.rstrip('\n') + '\n', '  '))


def _directives(lines: list[str], text: str) -> list[str]:
    """Return the imports of a file, and what it defines that is used in a text."""
    found: list[str] = []
    for line in reversed([line.strip() for line in lines if _DIRECTIVE.match(line.strip())]):
        defined = _DEFINE.match(line)
        if defined is None or re.search(rf'(?i)\$\{{?{re.escape(defined[1])}(?!\w)', '\n'.join([text, *found])):
            found.insert(0, line)
    return found


def _sections(lines: list[str]) -> list[_Section]:
    """Return the outermost ones. What another file is included for is not among them."""
    found, depth = [], 0
    for line in lines:
        begin = _BEGIN.match(line)
        if begin is not None and not depth:
            found.append(_Section(begin[1].lower(), begin[2], []))
        depth += begin is not None
        if depth:
            found[-1].lines.append(line)
        depth -= _END.match(line) is not None
    return found
