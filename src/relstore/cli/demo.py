"""`relstore demo`: copy a FileStorage into SQLite, prove the copy equal, commit a change and undo it.

The FileStorage is only read, and nothing is written beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ZODB.DB import DB
from ZODB.FileStorage import FileStorage
from ZODB.POSException import POSKeyError
from ZODB.TimeStamp import TimeStamp
from ZODB.utils import oid_repr, z64

from relstore import RelStore, SQLite
from relstore.cli.progress import counted
from relstore.cli.sample import write_sample
from relstore.converting.compare import Comparison
from relstore.converting.filestorage import LiveFileStorage, readable
from relstore.errors import ConfigurationError

if TYPE_CHECKING:
    from relstore.cli.report import Report

ROOT = z64
KEY = 'relstore_demo'

ZOPE_CONF = """\
%import relstore

<zodb_db main>
  mount-point /
  <relstore>
    <sqlite3>
      data-dir {directory}
    </sqlite3>
    blob-dir {directory}/blobs
  </relstore>
</zodb_db>"""


class Difference(Exception):
    """The copy differs from the original; the message names the transaction and the object."""


@dataclass
class Content:
    """The contents of a FileStorage. size: bytes of all records."""

    transactions: int = 0
    records: int = 0
    size: int = 0
    oids: set[bytes] = field(default_factory=set)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('--data', metavar='Data.fs', help='what to copy (default: a sample site)')
    parser.add_argument('--blobs', metavar='DIR', help='its blobs (default: blobstorage next to it, if it exists)')
    parser.add_argument('--into', metavar='DIR', help='a new or empty directory (default: a temporary one)')


def run(args: Namespace) -> int:
    """Run the demo; return 0, or 1 if the copy differs. ConfigurationError, OSError: it cannot be done."""
    try:
        from relstore.cli.report import Report
    except ImportError as error:
        raise ConfigurationError(
            f"The demo needs the package {error.name}: pip install 'relstore[demo]'."
        ) from error
    report = Report()
    try:
        _demo(report, args.data, args.blobs, args.into)
    except Difference as difference:
        print(f'relstore: the copy differs: {difference}', file=sys.stderr)
        return 1
    return 0


def _demo(report: Report, data: str | None, blobs: str | None, into: str | None) -> None:
    with ExitStack() as stack:
        if data is None:
            data = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), 'Data.fs')
            with report.step('Write a sample site') as step:
                write_sample(data)
                step.result = f'{os.path.getsize(data) / 1e6:.1f} MB'
        source = stack.enter_context(closing(LiveFileStorage(data, _blob_directory(data, blobs))))
        directory = empty_directory(into)
        report.say(f'From {os.path.abspath(data)} into {directory}')
        with report.step('Read the FileStorage') as step, readable(data):
            content = survey(source, step.advance)
            step.result = f'{content.transactions:,} transactions, {len(content.oids):,} objects'
        with closing(open_site(directory)) as storage:
            with report.step('Copy to SQLite', content.records) as step:
                storage.copyTransactionsFrom(
                    source, progress=lambda tid, records, size: step.advance(records)
                )
            rate = content.records / max(step.seconds, 0.001)
            step.result = f'{content.records:,} records ({content.size / 1e6:.1f} MB, {rate:,.0f}/s)'
        with closing(open_site(directory)) as storage:
            with report.step('Compare every transaction', content.records) as step:
                compared = compare_history(source, storage, step.advance)
                blobs = f' and {counted(compared.blobs, "blob")}' if compared.blobs else ''
                step.result = f'{content.transactions:,} transactions{blobs} equal, byte for byte'
            with report.step('Compare every object', len(content.oids)) as step:
                compare_objects(source, storage, content.oids, step.advance)
                step.result = f'{len(content.oids):,} objects load equal'

        with report.step('Commit a change') as step:
            before, history = commit_change(directory)
            step.result = f'added {KEY} to the root'
        with report.step('Undo it, reopen') as step:
            undo_change(directory, before)
            step.result = 'the root is as before'

    report.say()
    report.summary()
    report.say()
    report.table(
        'History of the root object, after the change',
        ['When (UTC)', 'User', 'Description', 'Bytes '],
        history,
    )
    size = sum(path.stat().st_size for path in Path(directory).rglob('*') if path.is_file())
    report.say(f'The database ({size / 1e6:.1f} MB) is in {directory}')
    report.say('A Zope uses it with these lines in its zope.conf:')
    report.say()
    report.say(ZOPE_CONF.format(directory=directory))


def empty_directory(path: str | None) -> str:
    """Return an empty directory, created if need be: nothing is ever overwritten."""
    if path is None:
        return tempfile.mkdtemp(prefix='relstore-demo-')
    directory = os.path.abspath(path)
    os.makedirs(directory, exist_ok=True)
    if os.listdir(directory):
        raise ConfigurationError(f'{directory} is not empty; name a new or empty directory.')
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigurationError(f'{directory} is not writable.')
    return directory


def _blob_directory(data: str, given: str | None) -> str:
    """Return the directory of the blobs, or '' if there is none. ConfigurationError: what is given is no directory."""
    directory = given or os.path.join(os.path.dirname(data), 'blobstorage')
    if os.path.isdir(directory):
        return directory
    if given:
        raise ConfigurationError(f'{given} is not a directory.')
    return ''


def survey(source: LiveFileStorage, advance: Callable[[], None]) -> Content:
    """Count what is in the FileStorage."""
    content = Content()
    for txn in source.iterator():
        content.transactions += 1
        for record in txn:
            content.records += 1
            content.size += len(record.data or b'')
            content.oids.add(record.oid)
        advance()
    return content


def compare_history(source: LiveFileStorage, storage: Any, advance: Callable[[int], None]) -> Comparison:
    """Compare all transactions, with all their records and blobs. Difference at the first that is not equal."""
    comparison = Comparison(source, storage)
    for difference in comparison.differences(lambda records, size: advance(records)):
        raise Difference(difference)
    return comparison


def compare_objects(
    source: FileStorage, storage: RelStore, oids: set[bytes], advance: Callable[[], None]
) -> None:
    """Compare what load() returns for every object. Difference at the first that is not equal."""
    for oid in sorted(oids):
        theirs, ours = _load(source, oid), _load(storage, oid)
        _same(theirs, ours, f'object {oid_repr(oid)}')
        advance()


def commit_change(directory: str) -> tuple[bytes, list[tuple[str, ...]]]:
    """Add a key to the root. Return the root's state before, and the rows of its history after."""
    storage = open_site(directory)
    before, _ = storage.load(ROOT)
    with closing(DB(storage)) as db:
        with db.transaction(f'Add {KEY} to the root') as connection:
            connection.transaction_manager.get().setUser('demo', '')
            connection.root()[KEY] = 'This key was added by relstore demo.'
        history: list[tuple[str, ...]] = [
            (
                f"{TimeStamp(entry['tid'])}"[:19],
                _text(entry['user_name']).strip(),
                _text(entry['description']),
                str(entry['size']),
            )
            for entry in db.history(ROOT, size=5)
        ]
    return before, history


def undo_change(directory: str, before: bytes) -> None:
    """Undo the last transaction, reopen the database, and compare the root's state with what it was."""
    with closing(DB(open_site(directory))) as db, db.transaction(f'Undo: add {KEY} to the root') as connection:
        txn = connection.transaction_manager.get()
        txn.setUser('demo', '')
        [last] = db.undoInfo(0, 1)
        db.undo(last['id'], txn)
    with closing(open_site(directory)) as storage:
        after, _ = storage.load(ROOT)
        _same(before, after, 'the root after the undo')


def open_site(directory: str) -> RelStore:
    return RelStore(SQLite(directory), keep_history=True, blob_dir=os.path.join(directory, 'blobs'))


def _load(storage: Any, oid: bytes) -> tuple[bytes, bytes] | None:
    """Return (state, tid), or None if the object's creation was undone."""
    try:
        return storage.load(oid)
    except POSKeyError:
        return None


def _same(theirs: object, ours: object, what: str) -> None:
    if theirs != ours:
        raise Difference(f'{what}: {_short(ours)} instead of {_short(theirs)}{_first(theirs, ours)}.')


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'


def _first(theirs: object, ours: object) -> str:
    """Return where two strings of bytes begin to differ; '' for anything else."""
    if isinstance(theirs, bytes) and isinstance(ours, bytes):
        return f' (from byte {len(os.path.commonprefix([theirs, ours]))} on)'
    return ''


def _text(value: bytes | str) -> str:
    return value.decode('utf-8', 'replace') if isinstance(value, bytes) else value
