"""bin/test -vvv | python slowest.py PAGE: the tests that take longest, as a table in a page of the documentation."""
import re
import sys
from collections.abc import Iterable
from pathlib import Path

COUNT = 30
BEGIN, END = '<!-- slowest: by make slowest -->\n', '<!-- /slowest -->\n'
_TEST = re.compile(r' \w+ \(relstore\.tests\.([\w.]+)\).* \((?:(\d+) minutes? )?([\d.]+) (?:s|seconds)\)$')


def seconds(lines: Iterable[str]) -> dict[str, float]:
    """Return what each test took."""
    found = filter(None, map(_TEST.match, lines))
    return {test[1]: 60 * int(test[2] or 0) + float(test[3]) for test in found}


def table(took: dict[str, float]) -> str:
    slowest = sorted(took.items(), key=lambda item: -item[1])[:COUNT]
    rows = ''.join(f'| {took:.1f} | <code>{name}</code> |\n' for name, took in slowest)
    share = sum(took for _, took in slowest) / max(sum(took.values()), 1e-9)
    return f'Of {len(took)} tests these take {share:.0%} of the time.\n\n| seconds | test |\n|---:|---|\n{rows}'


def main(page: Path, lines: Iterable[str]) -> None:
    took = seconds(lines)
    if not took:
        sys.exit('No test has told how long it took: bin/test -vvv does.')
    text = page.read_text('utf-8')
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + BEGIN + table(took) + END + after, 'utf-8')


if __name__ == '__main__':
    main(Path(sys.argv[1]), map(str.rstrip, sys.stdin))
