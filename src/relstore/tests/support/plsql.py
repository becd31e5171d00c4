"""Blocks of PL/SQL as adapters/sql/oracle.sql writes them: what they contain, and an interpreter of that.

H2 knows no PL/SQL. So there the plain statements of a block are run, one by one, and what holds them together is done
here: IF, variables, what is told. A block has no loop but one that locks rows, and handles no errors.
"""
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_IF = re.compile(r'IF (.+) THEN', re.DOTALL)
_LOCK = re.compile(r'FOR r IN \((.+)\) LOOP NULL; END LOOP', re.DOTALL)
_INTO = re.compile(r'(SELECT\b.+)\s+INTO (:?\w+) (FROM\b.+)', re.DOTALL)
_OPEN = re.compile(r'OPEN (:\w+) FOR (.+)', re.DOTALL)
_ASSIGN = re.compile(r'(:?\w+) := (.+)', re.DOTALL)
_DECLARED = re.compile(r'(\w+) NUMBER\(20\)')
_BLOCK = re.compile(r'(?:DECLARE\n(?P<declared>.*?)\n)?BEGIN\n(?P<body>.*)\nEND;', re.DOTALL)

Rows = list[tuple[Any, ...]]


class NoDataFound(Exception):
    """SELECT .. INTO has found no row, or several."""


def is_block(sql: str) -> bool:
    return _BLOCK.fullmatch(sql.strip()) is not None


def lines(block: str) -> Iterator[str]:
    """Yield the statements of a block without their semicolons, and the lines IF .. THEN, ELSE, END IF."""
    line = ''
    for part in _BLOCK.fullmatch(block.strip())['body'].splitlines():
        line = f'{line}\n{part}' if line else part
        if part.rstrip().endswith(';') or line == 'ELSE' or _IF.fullmatch(line):
            yield line.rstrip().removesuffix(';')
            line = ''
    if line:
        raise ValueError(f'This does not end: {line}')


def plain(block: str) -> Iterator[str]:
    """Yield the SQL of a block: its statements, as they would be sent alone; its conditions and values as queries."""
    for line in lines(block):
        if line in ('ELSE', 'END IF', 'NULL'):
            continue
        if found := _IF.fullmatch(line):
            yield f'SELECT CASE WHEN {found[1]} THEN 1 ELSE 0 END FROM dual'
        elif found := _LOCK.fullmatch(line):
            yield found[1]
        elif found := _OPEN.fullmatch(line):
            yield found[2]
        elif found := _INTO.fullmatch(line):
            yield f'{found[1]} {found[3]}'
        elif found := _ASSIGN.fullmatch(line):
            yield f'SELECT {found[2]} FROM dual'
        elif not line.startswith('EXECUTE IMMEDIATE '):
            yield line


class Interpreter:
    """Runs blocks.

    execute: takes a statement with question marks, and values; returns its rows and how many it touched. autonomously:
    runs a statement in a transaction of its own. After run: told, what was told; rows, those of its cursor.
    """

    def __init__(self, execute: Callable[[str, Sequence[Any]], tuple[Rows, int]],
                 autonomously: Callable[[str], None]):
        self._execute, self._autonomously = execute, autonomously

    def run(self, block: str, values: Sequence[Any]) -> None:
        """values: of :p1, :p2 and so on."""
        found = _BLOCK.fullmatch(block.strip())
        self.told, self.rows = None, []
        self._values: dict[str, Any] = {f':p{number}': value for number, value in enumerate(values, 1)}
        self._values |= dict.fromkeys(_DECLARED.findall(found['declared'] or '')) | {'SQL%ROWCOUNT': 0}
        names = sorted(map(re.escape, self._values), key=len, reverse=True)
        self._names = re.compile(rf'(?<![\w:$])(?:{"|".join(names)})(?!\w)')
        running = [True]
        for line in lines(block):
            if condition := _IF.fullmatch(line):
                running.append(running[-1] and self._value(f'CASE WHEN {condition[1]} THEN 1 ELSE 0 END') == 1)
            elif line == 'ELSE':
                running[-1] = running[-2] and not running[-1]
            elif line == 'END IF':
                running.pop()
            elif running[-1]:
                self._run(line)

    def _run(self, line: str) -> None:
        if found := _LOCK.fullmatch(line):
            self._sql(found[1])
        elif found := _OPEN.fullmatch(line):
            self.rows = self._sql(found[2])
        elif found := _INTO.fullmatch(line):
            rows = self._sql(f'{found[1]} {found[3]}')
            if len(rows) != 1:
                raise NoDataFound
            self._assign(found[2], rows[0][0])
        elif found := _ASSIGN.fullmatch(line):
            self._assign(found[1], self._value(found[2]))
        elif line.startswith('EXECUTE IMMEDIATE '):
            self._autonomously(self._value(line.removeprefix('EXECUTE IMMEDIATE ')))
        elif line != 'NULL':
            self._sql(line)

    def _assign(self, name: str, value: Any) -> None:
        if name == ':told':
            self.told = None if value is None else str(value)
        else:
            self._values[name] = value

    def _value(self, expression: str) -> Any:
        [[value]] = self._sql(f'SELECT {expression} FROM dual')
        return value

    def _sql(self, sql: str) -> Rows:
        values: list[Any] = []

        def placed(name: re.Match) -> str:
            values.append(self._values[name[0]])
            return '?'
        rows, count = self._execute(self._names.sub(placed, sql), values)
        if not sql.startswith('SELECT'):
            self._values['SQL%ROWCOUNT'] = count
        return rows
