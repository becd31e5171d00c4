"""Access traces: what a connection loads, recorded over objects in memory, and replayed through a ReadAhead.

Which objects a ZODB connection asks its storage for does not depend on the storage. So a trace is recorded once, and
replayed as often as there are strategies to compare. Replaying does what view.View does, with a dictionary instead of
a database, and counts.
"""
import random
from collections.abc import Callable, Iterator
from itertools import count, islice, zip_longest
from typing import NamedTuple

from BTrees.IOBTree import IOBTree
from BTrees.OOBTree import OOBTree
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.MappingStorage import MappingStorage
from ZODB.tests.MinPO import MinPO
from ZODB.utils import u64

from relstore.caching import readahead
from relstore.caching.cache import Cache
from relstore.references import references

BEGIN = -1      # stands between the oids of a trace where a transaction begins
COLD = 1 << 28  # bytes: a cache that evicts nothing
OBJECTS = 5000
FOLDERS, ITEMS = 40, 60


class Trace(NamedTuple):
    """records: oid -> (state, references). loads: oids in the order in which they were asked for, and BEGIN."""
    records: dict[int, tuple[bytes, bytes]]
    loads: list[int]


class Figures(NamedTuple):
    """What a replay has cost.

    loads: that were asked for. statements: messages to the database. fetched: objects that came unasked. unused: those
    of them that nobody asked for afterwards.
    """
    loads: int
    statements: int
    fetched: int
    unused: int


class Recorder(MappingStorage):
    """Notes what is loaded."""

    def __init__(self):
        super().__init__()
        self.loads: list[int] = []
        self.records: dict[int, tuple[bytes, bytes]] = {}       # as of a Trace

    def loadBefore(self, oid: bytes, tid: bytes):
        self.loads.append(u64(oid))
        return super().loadBefore(oid, tid)


def filled(fill: Callable) -> DB:
    """Return a database of what fill() puts into the root."""
    db = DB(Recorder())
    with db.transaction() as connection:
        fill(connection.root())
    for oid, revisions in db.storage._data.items():
        [*_, state] = revisions.values()
        db.storage.records[u64(oid)] = state, references(state) or b''
    return db


def recorded(db: DB, read: Callable) -> Trace:
    """Return the trace of read(), an iterator over the root, which yields between transactions.

    The first transaction finds the connection empty; the others find in it what a connection keeps.
    """
    storage = db.storage
    manager = TransactionManager(explicit=True)
    connection = db.open(manager)
    connection.cacheMinimize()
    storage.loads[:] = [BEGIN]
    manager.begin()
    for _ in read(connection.root()):
        manager.abort()
        storage.loads.append(BEGIN)
        connection.cacheGC()
        manager.begin()
    manager.abort()
    connection.close()
    return Trace(storage.records, [*storage.loads])


def replayed(traces: list[Trace], strategy=readahead, cheap: bool = False) -> Figures:
    """Return what these traces cost, of one view after the other of one database.

    strategy: a module as readahead is. cheap: whether loads are, see Adapter.loads_are_cheap.
    """
    cache, counts = Cache(COLD, COLD), strategy.Counts()
    loads = statements = 0
    unasked: set[int] = set()
    fetched = unused = 0
    for trace in traces:
        cache.clear()
        ahead = strategy.ReadAhead(cache, counts, lambda record: record)
        hit = None
        for oid in trace.loads:
            if oid == BEGIN:
                if not cheap:
                    ahead.wake()
                continue
            loads += 1
            unasked.discard(oid)
            revision = cache.find(oid, 1)
            if revision is not None:
                hit = revision.state
                continue
            statements += 1
            others = ahead.beside(oid, 1, hit)
            hit = None
            for other in (oid, *others):
                state, refs = trace.records[other]
                if other == oid or len(state) <= readahead.LARGEST_STATE_BYTES:
                    if other != oid and not cache.holds(other, 1):
                        fetched += 1
                        unasked.add(other)
                    cache.put(other, 1, state, 1)
                    if refs:
                        ahead.saw(other, state, refs)
        unused += len(unasked)
        unasked.clear()
    return Figures(loads, statements, fetched, unused)


# What is read ------------------------------------------------------------------------------------------------------

def tree(root, objects=OBJECTS) -> None:
    root['tree'] = OOBTree({f'{n:06}': MinPO(n) for n in range(objects)})


def in_order(root) -> Iterator[None]:
    for value in root['tree'].values():
        value._p_activate()
    yield


def one_of_three(root) -> Iterator[None]:
    for value in islice(root['tree'].values(), 0, None, 3):
        value._p_activate()
    yield


def ranges(root) -> Iterator[None]:
    """100 pages of a listing: 20 to 80 values from anywhere, each in a transaction."""
    rnd = random.Random(1)
    for _ in range(100):
        start = rnd.randrange(OBJECTS - 80)
        for value in root['tree'].values(f'{start:06}', f'{start + rnd.randrange(20, 80):06}'):
            value._p_activate()
        yield


def keys_at_random(root) -> Iterator[None]:
    for n in random.Random(1).sample(range(OBJECTS), 2000):
        root['tree'][f'{n:06}']._p_activate()
    yield


def keys_at_random_briefly(root) -> Iterator[None]:
    """Ten keys in each transaction."""
    for place, n in enumerate(random.Random(1).sample(range(OBJECTS), 2000)):
        root['tree'][f'{n:06}']._p_activate()
        if place % 10 == 9:
            yield


def oids_at_random(root) -> Iterator[None]:
    oids = [value._p_oid for value in root['tree'].values()]
    root._p_jar.cacheMinimize()
    root._p_jar.db().storage.loads[:] = [BEGIN]
    for oid in random.Random(1).sample(oids, 2000):
        root._p_jar.get(oid)._p_activate()
    yield


def phases(root) -> Iterator[None]:
    """A thousand at random, then as many in order, again and again."""
    rnd = random.Random(1)
    for start in range(0, OBJECTS, 1000):
        for n in rnd.sample(range(OBJECTS), 1000):
            root['tree'][f'{n:06}']._p_activate()
        yield
        for value in root['tree'].values(f'{start:06}', f'{start + 999:06}'):
            value._p_activate()
        yield


def mixed(root) -> Iterator[None]:
    """A value in order and a value at random, in turn."""
    rnd = random.Random(1)
    for value in islice(root['tree'].values(), 2000):
        value._p_activate()
        root['tree'][f'{rnd.randrange(OBJECTS):06}']._p_activate()
    yield


def two_trees(root) -> None:
    tree(root)
    root['other'] = OOBTree({f'{n:06}': MinPO(n) for n in range(OBJECTS)})


def side_by_side(root) -> Iterator[None]:
    for one, other in zip_longest(root['tree'].values(), root['other'].values()):
        one._p_activate()
        other._p_activate()
    yield


def graph(root) -> None:
    rnd = random.Random(1)
    nodes = [PersistentMapping() for _ in range(2000)]
    for node in nodes:
        node['next'] = rnd.sample(nodes, 6)
    root['node'] = nodes[0]
    root['nodes'] = nodes


def walk_at_random(root) -> Iterator[None]:
    rnd = random.Random(2)
    node = root['node']
    for _ in range(3000):
        node = rnd.choice(node['next'])
        node._p_activate()
    yield


def site(root) -> None:
    """Folders of items in BTrees, each with annotations; and a catalog of all items, by number, path and state."""
    root['site'] = folders = OOBTree()
    root['paths'], root['records'], root['items'] = OOBTree(), IOBTree(), IOBTree()
    numbers = count(1)
    for folder_name in range(FOLDERS):
        folder = PersistentMapping({
            'annotations': PersistentMapping(), 'children': OOBTree(), 'order': PersistentMapping()})
        folders[f'folder-{folder_name:03}'] = folder
        for item_name in range(ITEMS):
            item = PersistentMapping({
                'annotations': OOBTree({'key': PersistentMapping()}), 'body': MinPO('x' * 500),
                'comments': PersistentMapping({n: MinPO(n) for n in range(item_name % 4)})})
            folder['children'][f'item-{item_name:03}'] = item
            number = next(numbers)
            root['paths'][f'/folder-{folder_name:03}/item-{item_name:03}'] = number
            root['records'][number] = ('title', 'x' * 50, number)
            root['items'][number] = item


def walk_site(root) -> Iterator[None]:
    """All of it, from the top down, as an export or a reindexing does."""
    def visit(thing):
        if isinstance(thing, PersistentMapping | OOBTree):
            for value in thing.values():
                visit(value)
        elif isinstance(thing, MinPO):
            thing._p_activate()
    visit(root['site'])
    yield


def listings(root) -> Iterator[None]:
    """Listings of folders: each child and its annotations."""
    folders = [*root['site'].keys()]
    random.Random(1).shuffle(folders)
    for name in folders:
        folder = root['site'][name]
        for item in folder['children'].values():
            len(item['annotations'])
        yield


def order_of_folders(root) -> Iterator[None]:
    """The same attribute of one folder after the other."""
    for folder in root['site'].values():
        len(folder['order'])
    yield


def searches(root) -> Iterator[None]:
    """As a catalog: numbers from an index, their records, and of some the items, by their path."""
    rnd = random.Random(1)
    for _ in range(100):
        start = rnd.randrange(1, FOLDERS * ITEMS - 100)
        found = rnd.sample(range(start, start + 100), 20) if rnd.random() < .5 else range(start, start + 20)
        for number in found:
            root['records'][number]
        for number in found[:10]:
            folder, item = divmod(number - 1, ITEMS)
            root['paths'][f'/folder-{folder:03}/item-{item:03}']
            child = root['site'][f'folder-{folder:03}']['children'][f'item-{item:03}']
            len(child['annotations'])
        yield


def pages(root) -> Iterator[None]:
    """Views of single items, some of them often; each with annotations, body and comments."""
    rnd = random.Random(1)
    for _ in range(300):
        folder = root['site'][f'folder-{int(rnd.random() ** 3 * FOLDERS):03}']
        item = folder['children'][f'item-{int(rnd.random() ** 3 * ITEMS):03}']
        len(folder['annotations'])
        for annotation in item['annotations'].values():
            annotation._p_activate()
        item['body']._p_activate()
        for comment in item['comments'].values():
            comment._p_activate()
        yield


def mappings(root) -> None:
    """Some large objects that refer to many."""
    for name in 'abcd':
        root[name] = PersistentMapping({n: MinPO(n) for n in range(1000)})


def mappings_in_order(root) -> Iterator[None]:
    for name in 'abcd':
        for value in root[name].values():
            value._p_activate()
        yield


def mappings_at_random(root) -> Iterator[None]:
    rnd = random.Random(1)
    for _ in range(1500):
        root[rnd.choice('abcd')][rnd.randrange(1000)]._p_activate()
    yield


def hits(root) -> Iterator[None]:
    """Small transactions that read the same few objects, and one that was not read yet."""
    rnd = random.Random(1)
    for n in rnd.sample(range(OBJECTS), 300):
        root._p_jar.cacheMinimize()
        for hot in range(5):
            root['tree'][f'{hot:06}']._p_activate()
        root['tree'][f'{n:06}']._p_activate()
        yield


WORKLOADS = {
    'a tree in order': (tree, in_order),
    'a tree, one of three': (tree, one_of_three),
    'ranges of a tree': (tree, ranges),
    'keys at random': (tree, keys_at_random),
    'keys at random, ten a transaction': (tree, keys_at_random_briefly),
    'oids at random': (tree, oids_at_random),
    'at random, then in order, again and again': (tree, phases),
    'one in order, one at random': (tree, mixed),
    'two trees side by side': (two_trees, side_by_side),
    'random walk': (graph, walk_at_random),
    'a site from the top down': (site, walk_site),
    'listings of folders': (site, listings),
    'an attribute of each folder': (site, order_of_folders),
    'searches': (site, searches),
    'pages': (site, pages),
    'large mappings in order': (mappings, mappings_in_order),
    'large mappings at random': (mappings, mappings_at_random),
    'the same few, and a new one': (tree, hits),
}


def all_traces() -> dict[str, Trace]:
    """Return the trace of each workload, by its name."""
    databases = {fill: filled(fill) for fill, _ in WORKLOADS.values()}
    traces = {name: recorded(databases[fill], read) for name, (fill, read) in WORKLOADS.items()}
    for db in databases.values():
        db.close()
    return traces
