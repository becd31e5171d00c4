"""Statement: SQL in a driver's syntax, with named parameters.

`$oid` in a text is a parameter. The caller passes a tuple of values in the order of the signature, in whatever order
and however often the text uses them: Session rearranges them for the driver.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# How a block of PL/SQL begins.
BLOCK = 'BEGIN', 'DECLARE'
PARAMETER = re.compile(r'\$([a-z][a-z0-9_]*)')


class Statement(str):
    """named: the text with `$name` for each parameter. parameters: all names, in the order of the values.

    placeholder: the driver's; a colon stands for `:p1`, `:p2` and so on, for each place another one, but in a block of
    PL/SQL for each parameter. order: for each placeholder in turn the index of its value in the signature; None if
    nothing needs rearranging.
    """
    named: str
    parameters: tuple[str, ...]
    placeholder: str
    order: tuple[int, ...] | None

    def __new__(cls, named: str, parameters: Sequence[str] = (), placeholder: str = '?') -> Statement:
        places = [parameters.index(name) for name in PARAMETER.findall(named)] if parameters else []
        order = None if places == list(range(len(parameters))) else tuple(places)
        form = placeholder
        if placeholder == '?':
            if order and max(order) == len(parameters) - 1:     # SQLite can number its placeholders
                order, form = None, '?{}'
            text = named
        elif placeholder == ':':
            text, form, numbers = named, ':p{}', list(range(len(places)))
            if named.startswith(BLOCK):
                once = tuple(dict.fromkeys(places))
                order, numbers = once, [once.index(place) for place in places]
            places = numbers
        else:       # a percent sign would be taken for a parameter
            text = named.replace('%', '%%')
        if parameters:
            rest = iter(places)
            text = PARAMETER.sub(lambda name: form.format(next(rest) + 1), text)
        self = super().__new__(cls, text)
        self.named, self.parameters, self.placeholder, self.order = named, tuple(parameters), placeholder, order
        return self

    @property
    def parts(self) -> tuple[Statement, ...]:
        """The statements of a script, each of which takes all values of the script."""
        return tuple(Statement(part, self.parameters, self.placeholder) for part in split(self.named))

    def changed(self, old: str, new: str) -> Statement:
        """Return the same statement with `old` in its text replaced by `new`."""
        return Statement(self.named.replace(old, new), self.parameters, self.placeholder)


def arranged(sql: str, values: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a statement in the order of the placeholders in its text."""
    if sql.__class__ is not Statement or sql.order is None:
        return values
    return [values[place] for place in sql.order]


def split(script: str) -> list[str]:
    """Return the statements of a script. Each ends with a semicolon at the end of a line, outside function bodies."""
    statements, inside = [''], False
    for line in script.strip().splitlines():
        inside ^= line.count('$$') % 2 == 1
        if line.rstrip().endswith(';') and not inside:
            statements[-1] += line.rstrip()[:-1]
            statements.append('')
        else:
            statements[-1] += line + '\n'
    return [statement.strip() for statement in statements if statement.strip()]
