"""`relstore blobs`: look whether the data of all blobs is there, and for files that belong to nothing."""
from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from ZODB.blob import is_blob_record
from ZODB.POSException import POSKeyError
from ZODB.utils import u64

from relstore.adapters.chunks import Record, measured
from relstore.blobs.address import parse
from relstore.blobs.directory import SharedDirectory
from relstore.blobs.move import Move, drop_old
from relstore.blobs.places import InDatabase, InDirectory, InStore, Place
from relstore.blobs.shared import BlobsInDirectory
from relstore.blobs.store import ObjectStore
from relstore.blobs.stored import BlobsInStore
from relstore.cli import databases, places
from relstore.cli.progress import counted, progress, size
from relstore.errors import ConfigurationError
from relstore.sessions.session import Session
from relstore.storage import RelStore

# Of what is missing, so many are named.
NAMED = 20
# Files that belong to nothing are removed when they are older: a commit may be about to need a younger one.
OLD_SECONDS = 24 * 3600.0

Revision = tuple[int, int]      # (oid, tid)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help=places.HELP)
    parser.add_argument('--check', action='store_true',
                        help='compare all data with the size and the digest that were recorded when it was stored')
    parser.add_argument('--fix', action='store_true',
                        help='remove files that belong to nothing and are older than a day; with --check, record what '
                             'the data is of which nothing was recorded; and nothing else. Never say it of a copy of a '
                             'database that was led to the directory of the original')
    parser.add_argument('--move', nargs='+', metavar=('PLACE', 'PATH'),
                        help='copy all blobs to another place, "database", "directory PATH" or the URL of an object '
                             'storage, while the site runs, and say in the database that they are there. Run again, '
                             'it goes on where it was')
    parser.add_argument('--drop-old', nargs='+', metavar=('PLACE', 'PATH'),
                        help='after a move, when all processes have been started again: remove the blobs from the old '
                             'place, as far as they are at the new one')
    parser.set_defaults(refuse=parser.error)
    parser.add_argument('--take-over', action='store_true',
                        help='say that nothing else uses the directory of blobs, which was there before relstore: '
                             'packs remove files from it then')


def run(args: Namespace) -> int:
    """Return 0, or 1 where the data of a blob is missing or damaged, or a file belongs to nothing and stays."""
    return max([_one(named, args) for named in places.find(args.config)])


def _one(named: databases.Named, args: Namespace) -> int:
    with named.open() as opened:
        storage = opened.relstore
        if storage is None:
            print(f"{opened.name}: no storage of relstore's, left out.")
            return 0
        print(f'{opened.name}: {storage.database.adapter}')
        if not storage.database.blobs.supported:
            print('  It has no blobs: no blob-dir is given, and none is needed.')
            return 0
        if args.take_over and isinstance(storage.database.blobs, BlobsInDirectory):
            storage.database.blobs.take_over()
            print('  Its directory of blobs is its own now.')
        if args.move:
            return _move(storage, args)
        if args.drop_old:
            return _drop_old(storage, args)
        wrong = _check(storage, args.fix) if args.check else _missing(storage)
        left = _orphans(storage, args.fix)
        return int(bool(wrong or left))


def _move(storage: RelStore, args: Namespace) -> int:
    adapter, source = storage.database.adapter, _place_of(storage)
    target = _named_place(storage, args, args.move)
    if target.name == source.name:
        args.refuse(f'--move: the blobs are in {source.told}, as the configuration says.')
    with progress() as tell:
        move = Move(adapter, source, target, tell)
        is_done = move.run()
    print(f'  {counted(move.copied, "revision")} of blobs copied to {target.told}, {size(move.bytes)}; {move.there:,} '
          'were there.')
    if not is_done:
        print(f'  They stay in {source.told}, for {counted(len(move.damaged), "blob is", "blobs are")} not what was '
              'committed: restore them from a backup, and go on.')
        for oid, tid in islice(move.damaged, NAMED):
            print(f'    object {oid:#x}, tid {tid:#x}')
        return 1
    print(f'  The blobs are in {target.told} now. Set {target.option}, and start all processes again: those that run '
          f'refuse blobs. What was in {source.told} is still there; then remove it with --drop-old.')
    return 0


def _drop_old(storage: RelStore, args: Namespace) -> int:
    now, old = _place_of(storage), _named_place(storage, args, args.drop_old)
    if isinstance(old, InStore):
        raise ConfigurationError(f'Remove {old.told} by its own means: nothing refers to it any more.')
    with progress() as tell:
        gone, stay = drop_old(storage.database.adapter, old, now, tell)
    print(f'  {counted(gone, "revision")} of blobs removed from {old.told}; {stay:,} stay, for {now.told} lacks them.')
    return int(stay > 0)


def _place_of(storage: RelStore) -> Place:
    """Return where the blobs are, by the configuration."""
    blobs, adapter = storage.database.blobs, storage.database.adapter
    if isinstance(blobs, BlobsInStore):
        return InStore(adapter, blobs.store)
    return InDirectory(adapter, blobs.directory) if isinstance(blobs, BlobsInDirectory) else InDatabase(adapter)


def _named_place(storage: RelStore, args: Namespace, words: list[str]) -> Place:
    adapter = storage.database.adapter
    if words == ['database']:
        return InDatabase(adapter)
    if words[0] == 'directory' and len(words) == 2:
        return InDirectory(adapter, SharedDirectory(words[1]))
    if len(words) == 1 and '://' in words[0]:
        return InStore(adapter, ObjectStore(parse(words[0])))
    raise args.refuse('A place is "database", "directory PATH" or the URL of an object storage.')


def _revisions(storage: RelStore) -> Iterator[Revision]:
    """Yield each revision of each blob."""
    database = storage.database
    with closing(storage.iterator()) as transactions:
        for transaction in transactions:
            for record in transaction:
                if record.data and is_blob_record(database.untransform(record.data)):
                    yield u64(record.oid), u64(record.tid)


def _missing(storage: RelStore) -> int:
    """Read the data of every revision of every blob; tell which is not there, and return how many."""
    database, count, missing = storage.database, 0, []
    for oid, tid in _revisions(storage):
        count += 1
        if not database.pool.attempt(database.blobs.verify, oid, tid):
            missing.append((oid, tid))
    print(f'  {counted(count, "revision")} of blobs; the data of {len(missing):,} is missing'
          f'{":" if missing else "."}')
    for oid, tid in islice(missing, NAMED):
        print(f'    object {oid:#x}, tid {tid:#x}')
    return len(missing)


@dataclass
class Checked:
    """What a check has found. resized: with the bytes there are, and those there should be."""
    revisions: int = 0
    bytes: int = 0
    missing: list[Revision] = field(default_factory=list)
    resized: list[tuple[Revision, int, int]] = field(default_factory=list)
    altered: list[Revision] = field(default_factory=list)
    unrecorded: int = 0
    recorded: int = 0       # of those, now

    @property
    def wrong(self) -> int:
        return len(self.missing) + len(self.resized) + len(self.altered)


def _check(storage: RelStore, fix: bool) -> int:
    """Compare all data with what is recorded; tell what is wrong, and return how many blobs. fix: record the rest."""
    database, checked = storage.database, Checked()
    attempt = database.pool.attempt
    [[known]] = attempt(lambda session: session.all(database.adapter.sql.count_records))
    with progress() as tell:
        for oid, tid in _revisions(storage):
            recorded, found = attempt(_compared, storage, oid, tid)
            if found is None and attempt(database.adapter.load_serial, oid, tid) is None:
                continue        # packed, or replaced, just now
            checked.revisions += 1
            tell('Blobs', checked.revisions, max(known, checked.revisions))
            if found is None:
                checked.missing.append((oid, tid))
                continue
            checked.bytes += found.size
            if recorded is None:
                checked.unrecorded += 1
                if fix:
                    attempt(database.adapter.chunks.add_record, oid, tid, found)
                    checked.recorded += 1
            elif found.size != recorded.size:
                checked.resized.append(((oid, tid), found.size, recorded.size))
            elif found != recorded:
                checked.altered.append((oid, tid))
    _tell(checked)
    return checked.wrong


def _compared(session: Session, storage: RelStore, oid: int, tid: int) -> tuple[Record | None, Record | None]:
    """Return what is recorded of a revision's blob, and what is found of it."""
    data = storage.database.blobs.data(session, oid, tid)
    if data is None:
        return None, None
    try:
        return data.record, measured(data.pieces)
    except POSKeyError:
        return data.record, None


def _tell(checked: Checked) -> None:
    print(f'  {counted(checked.revisions, "revision")} of blobs, {size(checked.bytes)}: {len(checked.missing):,} '
          f'missing, {len(checked.resized):,} of another size, {len(checked.altered):,} altered.')
    for (oid, tid), what in islice([
            *((revision, 'missing') for revision in checked.missing),
            *((revision, f'{found:,} bytes instead of {wanted:,}') for revision, found, wanted in checked.resized),
            *((revision, 'altered') for revision in checked.altered)], NAMED):
        print(f'    object {oid:#x}, tid {tid:#x}: {what}')
    if checked.wrong > NAMED:
        print(f'    ... and {checked.wrong - NAMED:,} more.')
    if checked.recorded:
        print(f'  Recorded what {counted(checked.recorded, "other")} had when they were read now.')
    elif checked.unrecorded:
        print(f'  Nothing is recorded of {counted(checked.unrecorded, "other")}, so they were read and compared with '
              'nothing: --fix records what they are now.')


def _orphans(storage: RelStore, fix: bool) -> int:
    """Tell of files and objects that belong to no revision, and remove old ones; return how many stay."""
    blobs, attempt = storage.database.blobs, storage.database.pool.attempt
    before = time.time() - OLD_SECONDS
    if isinstance(blobs, BlobsInStore):
        objects = attempt(lambda session: list(blobs.orphans(session)))
        return _tell_orphans('object', [found.size for found in objects],
                             [partial(blobs.store.remove, found.name) for found in objects if found.modified < before],
                             fix)
    if isinstance(blobs, BlobsInDirectory):
        files = attempt(lambda session: list(blobs.orphans(session)))
        # What was replaced without history a pack removes, in its time: a view may read it still.
        old = [partial(blobs.directory.remove, file.oid, file.tid) for file in files
               if file.modified < before and file.end == file.tid]
        return _tell_orphans('file', [file.size for file in files], old, fix and blobs.is_ours)
    return 0


def _tell_orphans(what: str, sizes: list[int], removals: Sequence[Callable[[], None]], fix: bool) -> int:
    print(f'  {counted(len(sizes), what)} of nothing, {size(sum(sizes))}, {len(removals):,} of them older than a day.')
    if not (fix and removals):
        return len(sizes)
    for remove in removals:
        remove()
    print(f'  Removed: {len(removals):,}.')
    return len(sizes) - len(removals)
