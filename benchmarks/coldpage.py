"""Cold page: what rendering a folder listing of a real Plone site loads, in a process that has just started.

Plone itself is not needed: its objects are loaded as "broken" ones. Walked are, as a listing does,
    the root, the application, the site and its folders' BTrees
    what the site itself contains: its tools and folders
    50 children, from the folders with the most of them: each child and its annotations
    the catalog and its indexes, and for each child its rid by path (`uids`) and its metadata record (`data`)
"""

from __future__ import annotations

import datetime
import lzma
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from transaction import TransactionManager
from ZODB.broken import find_global
from ZODB.Connection import TransactionMetaData
from ZODB.FileStorage import FileStorage
from ZODB.POSException import StateLoadError
from ZODB.utils import z64

from benchmarks import storages
from benchmarks.figures import Case, Results, rounds
from benchmarks.servers import DelayingProxy
from benchmarks.storages import KINDS, SERVERS, Lab, Site

PART = 'page'
TITLE = 'Cold page'
CHILDREN = 50
DELAY = 0.001  # seconds
PROJECT = Path(__file__).resolve().parents[1]

FULL = {'rounds': (40, 5, 15)}
QUICK = {'rounds': (3, 1, 2)}
NAMES = storages.ALL


def measure(lab: Lab, results: Results, sizes: dict = FULL, names=NAMES) -> None:
    """Copy the site into every storage, then measure all of them in turn."""
    packed = Path(os.environ.get('RELSTORE_TEST_DATA', PROJECT / '../shared/data/plone')) / 'Data.fs.xz'
    if not packed.exists():
        results.cannot(PART, '', f'there is no {packed.name} of a Plone site: RELSTORE_TEST_DATA names its directory')
        return
    names = storages.available(results, PART, names)
    results.note(PART, 'The current revision of each object was copied, without blobs. The clock starts when the '
                       'storage is open. The delay is added by a proxy, which itself takes some time too.')  # fmt: skip
    with ExitStack() as stack:
        path = str(lab.directory / 'Plone.fs')
        stack.callback(lambda: [file.unlink() for file in lab.directory.glob('Plone.fs*')])
        with lzma.open(packed) as source, open(path, 'wb') as file:
            shutil.copyfileobj(source, file)
        sites = [stack.enter_context(lab.site(name)) for name in names]
        with closing(FileStorage(path, read_only=True)) as source:
            for site in sites:
                copy_current(source, site)
        for site in sites:
            count(lab, results, site)
        for _ in rounds(*sizes['rounds']):
            for site in sites:
                clock(lab, results, site)


def copy_current(source, site: Site) -> None:
    """Copy the newest revision of every object, in one transaction."""
    with closing(site.open()) as storage:
        txn = TransactionMetaData()
        storage.tpc_begin(txn)
        following = None
        while True:
            oid, _, state, following = source.record_iternext(following)
            storage.store(oid, z64, state, '', txn)
            if following is None:
                break
        storage.tpc_vote(txn)
        storage.tpc_finish(txn)


def count(lab: Lab, results: Results, site: Site) -> None:
    """Count objects and statements, without a clock."""
    with counting(lab, site) as (reached, statements):
        spent, objects = walk(reached, statements)
    results.note(PART, f'{objects} objects are loaded.')  # by all alike: a second number here would be a mistake
    if site.kind != 'FileStorage':
        case = Case(PART, 'counted', 'statements (with a server: round trips)', 'statements', 'less')
        results.add(case, site.kind, spent)


def clock(lab: Lab, results: Results, site: Site) -> None:
    here, delayed = (Case(PART, 'time', panel, 'ms', 'less') for panel in ('localhost', 'network delay 1 ms'))
    seconds, _ = walk(through(lab, site), time.perf_counter)
    results.add(here, site.kind, seconds * 1e3)
    if not KINDS[site.kind].server:
        return
    with proxy_to(lab, site) as proxy:

        def start():
            proxy.delay = DELAY
            return time.perf_counter()

        seconds, _ = walk(through(lab, site, proxy), start)
    results.add(delayed, site.kind, seconds * 1e3)


def proxy_to(lab: Lab, site: Site) -> DelayingProxy:
    server = KINDS[site.kind].server
    return DelayingProxy(lab.server(server).address if server in SERVERS else site.where)


@contextmanager
def counting(lab: Lab, site: Site) -> Iterator[tuple[Site, Callable[[], int]]]:
    """Give the site as it is to be opened in this process, and what tells the number of statements until now.

    With a server they are round trips. FileStorage has none.
    """
    if KINDS[site.kind].server:
        with proxy_to(lab, site) as proxy:
            yield through(lab, site, proxy), lambda: proxy.round_trips
    elif site.kind == 'FileStorage':
        yield site, lambda: 0
    else:
        with statements_of_sqlite() as executed:
            yield site, lambda: len(executed)


def through(lab: Lab, site: Site, proxy: DelayingProxy | None = None) -> Site:
    """Return the site as reached through TCP (ZEO: only where there is a proxy), and through the proxy."""
    if KINDS[site.kind].server in SERVERS:
        return lab.by_tcp(site, proxy and proxy.port)
    return site.at(('127.0.0.1', proxy.port)) if proxy else site


@contextmanager
def statements_of_sqlite():
    """Give a list that gets every statement executed on connections made from now on."""
    executed: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments, **more):
        connection = connect(*arguments, **more)
        connection.set_trace_callback(executed.append)
        return connection

    modules = [module for module in (sqlite3, sqlite3.dbapi2) if module.connect is connect]
    for module in modules:
        module.connect = traced
    try:
        yield executed
    finally:
        for module in modules:
            module.connect = connect


# the walk


class Zone(datetime.tzinfo):
    """Stands for the time zones of packages that are not here: a datetime does not take a broken object."""

    def __new__(cls, *arguments):
        return super().__new__(cls)

    def __init__(self, *arguments):
        super().__init__()

    def __setstate__(self, state):
        pass


def class_of(connection, module: str, name: str) -> type:
    """Return a class, or a stand-in; remembered, because to look for a package that is not there takes long."""
    if (module, name) not in classes:
        zone = module.partition('.')[0] in ('pytz', 'zoneinfo', 'dateutil')
        classes[module, name] = Zone if zone else find_global(module, name)
    return classes[module, name]


classes: dict[tuple[str, str], type] = {}


def state_of(found) -> dict:
    """Load an object; return its attributes, or {} if they cannot be read without its class."""
    try:
        found._p_activate()
    except StateLoadError:
        return {}
    return getattr(found, '__Broken_state__', None) or getattr(found, '__dict__', {})


def walk(site: Site, measure: Callable[[], float]) -> tuple[float, int]:
    """Render the listing cold; return by how much measure() rose meanwhile, and how many objects were loaded."""
    with closing(site.open_db(class_factory=class_of)) as db:
        storages.empty_storage_cache(db.storage)
        manager = TransactionManager(explicit=True)
        before = measure()
        connection = db.open(manager)
        connection.cacheMinimize()
        manager.begin()
        render(connection)
        manager.abort()
        spent = measure() - before
        objects, _ = connection.getTransferCounts()
        connection.close()
    return spent, objects


def render(connection) -> None:
    application = state_of(connection.root()['Application'])
    tree = state_of(application['Plone'])['_tree']
    contained = {name: state_of(child) for name, child in tree.items()}
    folders = {name: list(state['_tree'].items()) for name, state in contained.items() if name.startswith('folder')}
    largest = sorted(folders, key=lambda name: len(folders[name]), reverse=True)
    children = [(f'/Plone/{name}/{key}', child) for name in largest for key, child in folders[name]][:CHILDREN]
    catalog = state_of(contained['portal_catalog']['_catalog'])
    for index in catalog['indexes'].values():
        state_of(index)
    records, rids = catalog['data'], catalog['uids']
    for path, child in children:
        annotations = state_of(child).get('__annotations__')
        if annotations is not None:
            state_of(annotations)
        records[rids[path]]
