"""`relstore blobs`: look whether the data of all blobs is there, and for files that belong to nothing."""
from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from contextlib import closing
from itertools import islice

from ZODB.blob import is_blob_record
from ZODB.utils import u64

from relstore.blobs.shared import BlobsInDirectory
from relstore.cli import databases, places
from relstore.cli.progress import counted, size
from relstore.storage import RelStore

# Of what is missing, so many are named.
NAMED = 20
# Files that belong to nothing are removed when they are older: a commit may be about to need a younger one.
OLD_SECONDS = 24 * 3600.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help=places.HELP)
    parser.add_argument('--fix', action='store_true',
                        help='remove files that belong to nothing and are older than a day, and nothing else. '
                             'Never say it of a copy of a database that was led to the directory of the original')
    parser.add_argument('--take-over', action='store_true',
                        help='say that nothing else uses the directory of blobs, which was there before relstore: '
                             'packs remove files from it then')


def run(args: Namespace) -> int:
    """Return 0, or 1 where the data of a blob is missing, or a file belongs to nothing and stays."""
    return max([_one(named, args.fix, args.take_over) for named in places.find(args.config)])


def _one(named: databases.Named, fix: bool, take_over: bool) -> int:
    with named.open() as opened:
        storage = opened.relstore
        if storage is None:
            print(f"{opened.name}: no storage of relstore's, left out.")
            return 0
        print(f'{opened.name}: {storage.database.adapter}')
        if not storage.database.blobs.supported:
            print('  It has no blobs: no blob-dir is given, and none is needed.')
            return 0
        if take_over and isinstance(storage.database.blobs, BlobsInDirectory):
            storage.database.blobs.take_over()
            print('  Its directory of blobs is its own now.')
        missing, left = _missing(storage), _orphans(storage, fix)
        return int(bool(missing or left))


def _missing(storage: RelStore) -> int:
    """Read the data of every revision of every blob; tell which is not there, and return how many."""
    database, count, missing = storage.database, 0, []
    with closing(storage.iterator()) as transactions:
        for transaction in transactions:
            for record in transaction:
                if record.data and is_blob_record(database.untransform(record.data)):
                    count += 1
                    found = database.pool.attempt(database.blobs.verify, u64(record.oid), u64(record.tid))
                    if not found:
                        missing.append((u64(record.oid), u64(record.tid)))
    print(f'  {counted(count, "revision")} of blobs; the data of {len(missing):,} is missing'
          f'{":" if missing else "."}')
    for oid, tid in islice(missing, NAMED):
        print(f'    object {oid:#x}, tid {tid:#x}')
    return len(missing)


def _orphans(storage: RelStore, fix: bool) -> int:
    """Tell of files that belong to no revision, and remove old ones; return how many stay."""
    blobs = storage.database.blobs
    if not isinstance(blobs, BlobsInDirectory):
        return 0
    attempt = storage.database.pool.attempt
    orphans = attempt(lambda session: list(blobs.orphans(session)))
    # What was replaced without history a pack removes, in its time: a view may read it still.
    old = [orphan for orphan in orphans if orphan.modified < time.time() - OLD_SECONDS and orphan.end == orphan.tid]
    print(f'  {counted(len(orphans), "file")} of nothing, {size(sum(orphan.size for orphan in orphans))}, '
          f'{len(old):,} of them older than a day.')
    if not (fix and old and blobs.is_ours):
        return len(orphans)
    for orphan in old:
        blobs.directory.remove(orphan.oid, orphan.tid)
    print(f'  Removed: {len(old):,}.')
    return len(orphans) - len(old)
