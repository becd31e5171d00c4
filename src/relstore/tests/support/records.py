"""Records, as tests store them."""
import io
import pickle

from persistent.mapping import PersistentMapping
from ZODB.tests.ConflictResolution import PCounter
from ZODB.tests.MinPO import MinPO
from ZODB.tests.StorageTestBase import zodb_pickle, zodb_unpickle


def state(value: int) -> bytes:
    return zodb_pickle(MinPO(value))


def counter(value: int) -> bytes:
    it = PCounter()
    it.inc(value)
    return zodb_pickle(it)


def value_of(record: bytes) -> int:
    it = zodb_unpickle(record)
    return it._value if isinstance(it, PCounter) else it.value


class Reference:
    """Stands in a test's state for a persistent id of the test's choice."""

    def __init__(self, persistent_id):
        self.persistent_id = persistent_id


def pickled(*parts, protocol: int = 3) -> bytes:
    """Return a record of these parts, the class and the state, in which each Reference is its persistent id."""
    file = io.BytesIO()
    for part in parts:
        pickler = pickle.Pickler(file, protocol)
        pickler.persistent_id = lambda it: it.persistent_id if isinstance(it, Reference) else None
        pickler.dump(part)
    return file.getvalue()


def record(*oids: bytes, note: object = None) -> bytes:
    """Return the record of a PersistentMapping that refers to other objects."""
    links = [Reference((oid, PersistentMapping)) for oid in oids]
    return pickled(PersistentMapping, {'data': {'links': links, 'note': note}})
