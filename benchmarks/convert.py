"""Convert: what zodbconvert copies in a second, out of a FileStorage, in a new process that does nothing else.

The clock starts before the configuration file is read. A site is the one that the tests read, several times over: its
records are repeated with other oids and later tids, its blobs too. Small objects have some 200 bytes and refer to one
other; there may be many in a transaction, or few. The disk's own speed is that of writing the bytes of the source to
one file, and a single fsync.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from persistent.mapping import PersistentMapping
from persistent.TimeStamp import TimeStamp
from ZODB.blob import is_blob_record
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.utils import p64, u64
from zodbpickle import binary
from zodbpickle.pickle import Pickler

from benchmarks import clients, storages
from benchmarks.figures import Case, Results, rounds
from benchmarks.storages import KINDS, Lab, Site
from relstore.references import references
from relstore.tests.support.plone import unpack

PART = 'convert'
TITLE = 'Convert'
X = 'times the site'
SHIFT = 1 << 24  # between the oids of one copy of the site and the next
PIECE = 1 << 20

# how many times the site; (small objects, of which in a transaction); (seconds, rounds at least, at most)
FULL = {'site': (1, 10), 'small': ((1_000_000, 1000), (100_000, 10)), 'rounds': (0, 1, 1)}
QUICK = {'site': (1,), 'small': ((100_000, 1000), (5_000, 10)), 'rounds': (0, 1, 1)}
SMOKE = {'site': (), 'small': ((500, 100),), 'rounds': (0, 1, 1)}

NAMES = [
    'relstore PostgreSQL', 'relstore PostgreSQL, psycopg2', 'RelStorage PostgreSQL', 'relstore SQLite',
    'RelStorage SQLite', 'relstore MariaDB',
]  # fmt: skip
MODES = {True: 'history-preserving', False: 'history-free'}


@dataclass(frozen=True)
class Source:
    """A FileStorage. times: the site; 0: small objects."""

    name: str
    path: Path
    records: int
    times: int = 0

    @property
    def megabytes(self) -> float:
        return self.path.stat().st_size / 1e6

    @property
    def blobs(self) -> Path | None:
        blobs = self.path.with_suffix('.blobs')
        return blobs if blobs.is_dir() else None


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Copy each source into each storage in turn, round after round."""
    results.cannot(PART, 'FileStorage', 'it is what is copied')
    results.cannot(PART, 'ZEO', 'its server has a FileStorage, and what is copied into that is written to its file')
    names = storages.available(results, PART, [name for name in names if name in NAMES])
    directory = lab.directory / 'sources'
    directory.mkdir()
    try:
        sources = list(made(directory, results, sizes))
        for _ in rounds(*sizes['rounds']):
            for source in sources:
                disk = source.megabytes / written(source, directory)
                results.note(PART, f'{source.name}: {source.megabytes:.0f} MB, {source.records:,} records.')
                for keep_history, name in itertools.product(MODES, names):
                    run(lab, results, source, name, keep_history, disk)
    finally:
        shutil.rmtree(directory)


def run(lab: Lab, results: Results, source: Source, name: str, keep_history: bool, disk: float) -> None:
    """disk: its own speed, in MB/s."""
    with lab.site(name, keep_history) as site:
        seconds, peak = clients.alone(copy, site, source, str(lab.directory))
    group, speed = f'{source.name}, {MODES[keep_history]}', source.megabytes / seconds
    results.add(Case(PART, group, 'speed', 'MB/s', 'more'), name, speed)
    results.add(Case(PART, group, 'records', 'records/s', 'more', charted=False), name, source.records / seconds)
    results.add(Case(PART, group, "of the disk's own speed", '%', 'more', charted=False), name, 100 * speed / disk)
    results.add(Case(PART, group, 'peak memory of the process', 'MB', 'less', charted=False), name, peak)
    if source.times:
        group = f'peak memory of the process, {MODES[keep_history]}'
        results.add(Case(PART, group, 'the site', 'MB', 'less', X, charted=False), name, peak, source.times)


def copy(site: Site, source: Source, directory: str) -> tuple[float, float]:
    """Return the seconds that zodbconvert takes, and the megabytes that this process has had at most."""
    ours = site.kind.startswith('relstore')
    if ours:
        from relstore.cli.convert import main as zodbconvert
    else:
        from relstorage.zodbconvert import main as zodbconvert
    blobs = Path(directory, 'blobs')
    path = Path(directory, 'convert.conf')
    path.write_text(configuration(site, source, blobs, 'relstore' if ours else 'relstorage'))
    forget_peak()
    told = io.StringIO()
    begin = time.perf_counter()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            status = zodbconvert([str(path)] if ours else ['zodbconvert', str(path)])
    finally:
        seconds = time.perf_counter() - begin
        shutil.rmtree(blobs, ignore_errors=True)
    if status:
        raise RuntimeError(told.getvalue()[-1000:])
    return seconds, peak()


def configuration(site: Site, source: Source, blobs: Path, package: str) -> str:
    """Return a file for zodbconvert. blobs: a directory for the cache of the destination."""
    if isinstance(site.where, dict):
        kind, values = 'mysql', dict(site.where, driver='mysqlclient')
    elif KINDS[site.kind].server:
        driver = 'psycopg2' if site.kind.endswith('psycopg2') or package == 'relstorage' else 'psycopg'
        kind, values = 'postgresql', {'driver': driver, 'dsn': site.where}
    else:
        kind, values = 'sqlite3', {'data-dir': site.where}
    lines = ['<filestorage source>', f'path {source.path}']
    lines += [f'blob-dir {source.blobs}'] if source.blobs else []
    lines += ['</filestorage>', f'%import {package}', f'<{package} destination>']
    lines += [f'keep-history {str(site.keep_history).lower()}']
    lines += [f'blob-dir {blobs}', 'shared-blob-dir false'] if source.blobs else []
    lines += [f'<{kind}>', *(f'{key} {value}' for key, value in values.items())]
    lines += ['<pragmas>', 'synchronous FULL', '</pragmas>'] if kind == 'sqlite3' else []
    return '\n'.join([*lines, f'</{kind}>', f'</{package}>', ''])


def forget_peak() -> None:
    """Count the most memory that this process has from now on."""
    Path('/proc/self/clear_refs').write_text('5')


def peak() -> float:
    """Return that, in megabytes."""
    [line] = [line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM:')]
    return int(line.split()[1]) / 1000


def written(source: Source, directory: Path) -> float:
    """Return the seconds that it takes to write the bytes of a source to the disk."""
    path = directory / 'copy'
    data = source.path.read_bytes()
    begin = time.perf_counter()
    with open(path, 'wb', buffering=0) as file:
        for start in range(0, len(data), PIECE):
            file.write(data[start : start + PIECE])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


# The sources ----------------------------------------------------------------------------------------------------------


def made(directory: Path, results: Results, sizes: dict) -> Iterator[Source]:
    if sizes['site']:
        try:
            site = unpack(str(directory))
        except FileNotFoundError as e:
            results.note(PART, f'Without the site: {e}.')
        else:
            for times in sizes['site']:
                name = f'the site {times} times' if times > 1 else 'the site'
                yield repeated(site, str(directory / 'blobstorage'), name, directory / f'site{times}.fs', times)
    for objects, each in sizes['small']:
        yield small(directory / f'small{each}.fs', objects, each)


def repeated(site: str, blobs: str, name: str, path: Path, times: int) -> Source:
    """Make a source of a site several times."""
    count = 0
    with (
        closing(FileStorage(site, blob_dir=blobs, read_only=True)) as source,
        closing(FileStorage(str(path), blob_dir=str(path.with_suffix('.blobs')))) as target,
    ):
        first = u64(next(iter(source.iterator())).tid)
        length = u64(source.lastTransaction()) - first + 1
        for n in range(times):
            for transaction in source.iterator():
                tid = p64(u64(transaction.tid) + n * length)
                target.tpc_begin(transaction, tid, transaction.status)
                for record in transaction:
                    oid, data = p64(u64(record.oid) + n * SHIFT), shifted(record.data, n * SHIFT)
                    if data is not None and is_blob_record(data):
                        file = os.path.join(target.temporaryDirectory(), 'copied')
                        shutil.copyfile(source.loadBlob(record.oid, record.tid), file)
                        target.restoreBlob(oid, tid, data, file, None, transaction)
                    else:
                        target.restore(oid, tid, data, '', None, transaction)
                    count += 1
                target.tpc_vote(transaction)
                target.tpc_finish(transaction)
    return Source(name, path, count, times)


def shifted(data: bytes | None, shift: int) -> bytes | None:
    """Return a record that refers to other objects; their oids have a length before them."""
    refs = references(data) or b''
    for oid in {refs[start : start + 8] for start in range(0, len(refs), 8)} if shift else ():
        data = data.replace(b'\x08' + oid, b'\x08' + p64(u64(oid) + shift))
    return data


def small(path: Path, objects: int, each: int) -> Source:
    """Make a source of small objects, so many in each transaction."""
    chance = random.Random(1)
    stamp = TimeStamp(2026, 1, 1, 0, 0, 0.0)
    with closing(FileStorage(str(path))) as target:
        for start in range(0, objects, each):
            stamp = stamp.laterThan(stamp)
            transaction = TransactionMetaData('/plone/admin', '/plone/folder/edit')
            target.tpc_begin(transaction, stamp.raw())
            for oid in range(start, min(start + each, objects)):
                target.restore(p64(oid), stamp.raw(), small_record(oid, chance), '', None, transaction)
            target.tpc_vote(transaction)
            target.tpc_finish(transaction)
    return Source(f'{objects:,} small objects, {each:,} in a transaction', path, objects)


class Reference:
    def __init__(self, oid: bytes):
        self.oid = oid


def small_record(oid: int, chance: random.Random) -> bytes:
    file = io.BytesIO()
    pickler = Pickler(file, 3)
    pickler.persistent_id = lambda thing: binary(thing.oid) if isinstance(thing, Reference) else None
    pickler.dump(PersistentMapping)
    pickler.dump({'data': {'number': oid, 'text': chance.randbytes(128), 'next': Reference(p64(oid // 2))}})
    return file.getvalue()
