"""The pages in docs/internals name what there is: files, modules, classes, their members, statements, tables, pages.

A name is looked up where it stands in backticks. Of the project only its text is read; nothing is imported.
"""
import ast
import re
import unittest
from functools import cache
from pathlib import Path

from relstore.tests.support.servers import cannot_run

PROJECT = Path(__file__).resolve().parents[3]
PACKAGE = PROJECT / 'src' / 'relstore'
PAGES = PROJECT / 'docs' / 'internals'

FENCE = re.compile(r'(?ms)^```.*?^```$')
CODE = re.compile(r'`([^`\n]+)`')
LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')
HEADING = re.compile(r'(?m)^#+ (.+)$')
FILE = re.compile(r'[\w./-]+\.(py|sql|xml|md|txt|toml)')
DOTTED = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)+')
STATEMENT = re.compile(r'(?m)^-- name: (\S+)')

# Not ours, or made where relstore runs.
OTHERS = {'DB.storage', 'os.register_at_fork', 'main.sqlite3', 'oids.sqlite3', 'writers.lock', 'pack.lock'}


class Pages(unittest.TestCase):

    def setUp(self):
        if not PAGES.is_dir():
            cannot_run(self, 'docs/internals is not installed with the package', excused=True)

    def test_what_they_name_is_there(self):
        pages = sorted(PAGES.glob('*.md'))
        self.assertGreater(len(pages), 5)
        for page in pages:
            with self.subTest(page=page.name):
                self.assertEqual(list(problems(page.read_text('utf-8'))), [])

    def test_every_module_is_in_the_index(self):
        named = set(CODE.findall((PAGES / 'README.md').read_text('utf-8')))
        modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob('*.py')
                   if path.name != '__init__.py' and 'tests' not in path.relative_to(PACKAGE).parts}
        self.assertIn('adapters/base.py', modules)
        self.assertEqual(modules - named, set())

    def test_every_test_module_has_a_subject(self):
        named = set(CODE.findall((PAGES / 'testing.md').read_text('utf-8')))
        self.assertEqual({path.name for path in (PACKAGE / 'tests').glob('test_*.py')} - named, set())

    def test_what_is_wrong_is_noticed(self):
        for wrong in (
                '`cash.py`', '`adapters/views.py`', '`test_nothing.sql`', '`tests/nowhere/`', '`cache.Cash`',
                '`Cache.lookup`', '`cache.Cache.lookup`', '`nowhere.Cache`', '`sql.load_after`', '`relstore_votes`',
                '`Cash`', '`NO_SUCH_CONSTANT`', 'a ` b', '[x](nowhere.md)', '[x](views.md#nowhere)', '[x](#nowhere)'):
            with self.subTest(wrong):
                self.assertEqual(len(list(problems(f'# Title\n\nText {wrong}, text.\n'))), 1)

    def test_what_is_right_is_not(self):
        text = """# One title, of mine

`cache.py` `adapters/base.py` `tests/soak/` `cache.Cache` `revision.OPEN` `Cache.find` `Cache.head` `View._told`
`PostgreSQLAdapter.load_now` `Ballot.alone` `sql.load_at` `relstore_vote` `relstore_meta` `Finding`
`FINISH_TIMEOUT_SECONDS`
`make test` [x](views.md) [x](views.md#a-view) [x](#one-title-of-mine)

```
`nowhere.py`
```
"""
        self.assertEqual(list(problems(text)), [])


def problems(text: str):
    """Yield what a page names that is not there."""
    plain = FENCE.sub('', text)
    yield from (line for line in plain.splitlines() if line.count('`') % 2)       # what follows would be misread
    for code in dict.fromkeys(CODE.findall(plain)):
        if not is_there(code):
            yield code
    for target in dict.fromkeys(LINK.findall(plain)):
        if not leads_somewhere(target, text):
            yield target


def is_there(code: str) -> bool:
    """Whether something that stands in backticks is there; also if it is nothing that could be looked up."""
    if code in OTHERS:
        return True
    if FILE.fullmatch(code) or re.fullmatch(r'[\w/]+/', code):
        return any(is_file(root / code) for root in (PACKAGE, PROJECT)) or '/' not in code and code in file_names()
    if code.startswith('sql.'):
        return code.removeprefix('sql.') in statements()
    if DOTTED.fullmatch(code):
        return is_known(*code.removeprefix('relstore.').split('.'))
    if re.fullmatch(r'relstore_\w+', code):
        return re.search(rf'\b{code}(_\d+)?\b', sql()) is not None
    if re.fullmatch(r'[A-Z]\w+', code):
        return any(code in names for named in modules().values() for names in named) or code in members()
    return True


def is_file(path: Path) -> bool:
    return path.is_dir() if str(path).endswith('/') else path.exists()


def leads_somewhere(target: str, text: str) -> bool:
    name, _, anchor = target.partition('#')
    if name and not (PAGES / name).is_file():
        return False
    if not anchor:
        return True
    text = (PAGES / name).read_text('utf-8') if name else text
    return anchor in map(anchor_of, HEADING.findall(FENCE.sub('', text)))


def anchor_of(heading: str) -> str:
    """Return what a heading is called in a link."""
    return re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-')


def is_known(first: str, *rest: str) -> bool:
    """Whether there is such a name in a module, or such a member of a class."""
    if first in modules():
        return not rest or any(rest[0] in names and (len(rest) == 1 or is_known(*rest)) for names in modules()[first])
    return len(rest) == 1 and rest[0] in members().get(first, ())


@cache
def file_names() -> set[str]:
    found = {path.name for suffix in ('py', 'sql', 'xml') for path in PACKAGE.rglob(f'*.{suffix}')}
    return found | {path.name for path in PAGES.glob('*.md')}


@cache
def sql() -> str:
    return '\n'.join(path.read_text('utf-8') for path in sorted(PACKAGE.rglob('*.sql')))


@cache
def statements() -> set[str]:
    return set(STATEMENT.findall(sql()))


@cache
def trees() -> dict[Path, ast.Module]:
    paths = [path for path in PACKAGE.rglob('*.py') if not path.name.startswith('test_')]
    return {path: ast.parse(path.read_text('utf-8')) for path in paths}


@cache
def modules() -> dict[str, list[set[str]]]:
    """Return the names that modules define, by the module's own name, which several may have."""
    found: dict[str, list[set[str]]] = {}
    for path, tree in trees().items():
        names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        found.setdefault(path.stem, []).append(names | set(assigned(tree.body)))
    return found


@cache
def members() -> dict[str, set[str]]:
    """Return the members of classes, with those of their bases: by name, where several have one, of all these."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(members_of(node))
                bases.setdefault(node.name, set()).update(
                    base.attr if isinstance(base, ast.Attribute) else base.id for base in node.bases
                    if isinstance(base, (ast.Attribute, ast.Name)))

    def inherited(name: str, below: tuple[str, ...] = ()) -> set[str]:
        above = [inherited(base, (*below, name)) for base in bases.get(name, ()) if base not in below]
        return own.get(name, set()).union(*above)
    return {name: inherited(name) for name in own}


def members_of(node: ast.ClassDef) -> set[str]:
    found = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.ClassDef))}
    found.update(assigned(node.body))
    stored = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return found | {part.attr for part in stored if isinstance(part.value, ast.Name) and part.value.id == 'self'}


def assigned(body: list[ast.stmt]):
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
