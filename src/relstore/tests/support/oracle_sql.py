"""What is said to Oracle, and how it is read: by two parsers, and by a look for what they let pass."""
import importlib
import re
from collections.abc import Iterator

import sqlglot
from sqlglot import exp

import relstore
from relstore.sessions.statement import split
from relstore.tests.support import plsql

LONGEST_NAME = 30
MOST_IN_A_LIST = 1000
# Oracle's; as names of columns they have to be quoted.
_WORDS = """
    access add all alter and any as asc audit between by char check cluster column comment compress connect
    create current date decimal default delete desc distinct drop else exclusive exists file float for from
    grant group having identified immediate in increment index initial insert integer intersect into is level
    like lock long maxextents minus mlslabel mode modify noaudit nocompress not nowait null number of offline
    on online option or order pctfree prior public raw rename resource revoke row rowid rownum rows select
    session set share size smallint start successful synonym sysdate table then to trigger uid union unique
    update user validate values varchar varchar2 view whenever where with"""
RESERVED = frozenset(_WORDS.split())


def statements(keep_history: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of everything that is sent in a history mode, as it is sent; blocks whole."""
    adapter = relstore.Oracle('', '', '').unseen(keep_history)
    for name, section in adapter.schema().items():
        for statement in split(section):
            yield name, statement
    for name, _ in adapter.sql:
        yield name, str(getattr(adapter.sql, name))


def plain_statements(keep_history: bool) -> Iterator[tuple[str, str]]:
    """Yield the same, with blocks taken apart."""
    for name, text in statements(keep_history):
        for statement in plsql.plain(text) if plsql.is_block(text) else [text]:
            yield name, statement


# What these say is looked at by the other parser alone.
NOT_FOR_SQLGLOT = ('SET TRANSACTION', 'LOCK TABLE', 'COMMIT', 'ALTER SEQUENCE')


def parsed(sql: str) -> exp.Expression | None:
    """Return what sqlglot makes of a statement; None: it is none that it takes apart. ValueError: it cannot read it."""
    if sql.startswith(NOT_FOR_SQLGLOT):
        return None
    try:
        [tree] = sqlglot.parse(sql, dialect='oracle')
    except sqlglot.errors.ParseError as e:
        raise ValueError(f'{e}: {sql}') from e
    if isinstance(tree, exp.Command):
        raise ValueError(f'It is read as a command: {sql}')
    return tree


def druid(sql: str) -> None:
    """ValueError: Druid cannot read it."""
    jpype = importlib.import_module('jpype')
    utils = jpype.JClass('com.alibaba.druid.sql.SQLUtils')
    kind = jpype.JClass('com.alibaba.druid.DbType').oracle
    try:
        read = utils.parseStatements(sql, kind)
    except jpype.JClass('java.lang.Exception') as e:
        raise ValueError(f'{e.getMessage()}: {sql}') from e
    if read.size() != 1:
        raise ValueError(f'It is read as {read.size()} statements: {sql}')


def problems(sql: str) -> Iterator[str]:
    """Yield what Oracle would refuse in a plain statement, though a parser may read it."""
    text = re.sub(r"'[^']*'", "''", sql)
    for pattern, what in (
            (r'\bLIMIT\b', 'LIMIT'), (r'\bON CONFLICT\b', 'ON CONFLICT'), (r'\bRETURNING\b(?!.*\bINTO\b)', 'RETURNING'),
            (r'\bVALUES\s*\([^()]*\)\s*,\s*\(', 'several rows of VALUES'), (r'\bIF NOT EXISTS\b', 'IF NOT EXISTS'),
            (r'\b(BOOLEAN|TRUE|FALSE)\b', 'BOOLEAN'), (r'\bEXCEPT\b', 'EXCEPT'), (r'\b(TEXT|BIGINT|BYTEA)\b', 'a type'),
            (r'::', 'a cast with colons'), (r';\s*$', 'a semicolon at the end')):
        if re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            yield what
    for name in re.findall(r'\b[a-z_][a-z0-9_]*\b|"[A-Z]+"', text):
        if len(name) > LONGEST_NAME:
            yield f'the name {name} has {len(name)} characters'
        if name in RESERVED - {'user', 'rownum', 'level'}:
            yield f'{name} is reserved'
    if re.search(r'\bFOR UPDATE\b', text) and re.search(r'\b(FETCH FIRST|DISTINCT|GROUP BY)\b', text):
        yield 'FOR UPDATE with what it does not go with'
    for alias in _aliases(text):
        yield f'AS before the alias of a table, {alias}'
    tree = parsed(sql)
    if tree is not None:
        yield from _in_tree(tree)


def _in_tree(tree: exp.Expression) -> Iterator[str]:
    for select in tree.find_all(exp.Select):
        if select.args.get('from_') is None and select.args.get('from') is None:
            yield f'SELECT without FROM: {select.sql()}'
        yield from _in_select(select)
    for values in tree.find_all(exp.In):
        if len(values.expressions) > MOST_IN_A_LIST:
            yield f'{len(values.expressions)} values after IN'
    for row in tree.find_all(exp.Tuple):
        if isinstance(row.parent, (exp.GT, exp.LT, exp.GTE, exp.LTE)):
            yield 'a comparison of rows'


def _aliases(sql: str) -> Iterator[str]:
    """Yield the aliases of tables that have AS before them, in the text itself."""
    for found in re.finditer(r'(?:\bFROM|\bJOIN|\bINTO|\bUPDATE)\s+\w+\s+AS\s+(\w+)', sql):
        yield found[1]
    for found in re.finditer(r'\)\s+AS\s+(\w+)\s+(?:ON|WHERE|JOIN|LEFT|CROSS|ORDER|$)', sql):
        yield found[1]


def _in_select(select: exp.Select) -> Iterator[str]:
    for value in select.expressions:
        inner = value.this if isinstance(value, exp.Alias) else value
        if isinstance(inner, (exp.Is, exp.Exists, exp.Not, exp.EQ, exp.GT, exp.LT, exp.And, exp.Or, exp.In)):
            yield f'a truth value as a column: {value.sql()}'
    if select.args.get('limit') is not None:
        names = [value.alias_or_name or value.sql() for value in select.expressions]
        if len(set(names)) < len(names):
            yield f'FETCH FIRST of columns with one name: {names}'
