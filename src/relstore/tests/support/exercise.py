"""All that a storage does, once, on a database whose owner has set something for all sessions."""
import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack, closing

from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB import DB
from ZODB.POSException import ConflictError, POSKeyError
from ZODB.utils import z64

import relstore
from relstore.tests.support.commits import voted

COUNT = 100         # objects
KEPT = 30           # of these, by the pack
BYTES = bytes(range(256)) + b'\\\'"%s;\n\\0\\x'
TEXT = '\\\'"%s; \u00fc\u20ac'
NAMED = {'user': TEXT, 'description': TEXT}


def exercise(open_storage: Callable[[], relstore.RelStore], packs: bool = True, count: int = COUNT,
             votes: int = 2) -> None:
    """Raise an AssertionError, or what a storage raises, where something does not work.

    open_storage: opens another storage of one database, which is emptied. packs: not through a pooler.
    count: of objects. votes: how many may be undecided at the same time.
    """
    with ExitStack() as stack:
        site, other = (stack.enter_context(closing(open_storage())) for _ in range(2))
        site.zap_all()
        Exercise(stack.enter_context(closing(DB(site))), site, other, count).run(packs, votes)


def value_of(record: bytes) -> tuple:
    unpickler = pickle.Unpickler(io.BytesIO(record))
    unpickler.load()        # the class
    return unpickler.load()['data']['value']


class Exercise:

    def __init__(self, db: DB, site: relstore.RelStore, other: relstore.RelStore, count: int):
        self.db, self.site, self.other, self.count = db, site, other, count
        self.reader = other.new_instance()
        self.changed: set[bytes] = set()        # that the reader was told of

    def run(self, packs: bool, votes: int) -> None:
        self.poll()
        self.fill()
        self.change(1)
        before = self.change(2)
        self.refuse_conflicts(before)
        if votes > 1:
            self.commit_beside_a_vote()
        if self.site.supportsUndo():
            self.undo()
        self.list()
        if packs:
            self.pack()
        self.reader.release()

    def poll(self) -> None:
        self.reader.afterCompletion()
        told = self.reader.poll_invalidations()
        self.changed = None if told is None else set(told)

    def fill(self) -> None:
        with self.transaction() as connection:
            root = connection.root()
            root['site'] = PersistentMapping({n: PersistentMapping(value=(0, BYTES)) for n in range(self.count)})
        with self.transaction() as connection:
            objects = connection.root()['site']
            self.oids = [objects[n]._p_oid for n in range(self.count)]
        assert len({*self.oids, self.site.new_oid(), self.other.new_oid()}) == self.count + 2
        self.look(0)

    def change(self, value: int) -> bytes:
        """Change all, and have a process that knows them look at them again. Return the tid before."""
        before = self.site.lastTransaction()
        with self.transaction() as connection:
            for each in connection.root()['site'].values():
                each['value'] = value, BYTES
        self.look(value)
        return before

    def transaction(self):
        return self.db.transaction(note=TEXT)

    def look(self, value: int, unchanged: tuple = ()) -> None:
        self.poll()
        assert self.changed is None or self.changed >= set(self.oids) - {*unchanged}, 'changes were not told'
        self.reader.prefetch(self.oids)
        for oid in self.oids:
            record, _ = self.reader.load(oid)
            assert value_of(record) == (value, BYTES), 'an object is old, or not what was stored'

    def refuse_conflicts(self, before: bytes) -> None:
        record, tid = self.other.load(self.oids[0])
        for stores, reads in (([(self.oids[0], before, record)], []),
                              ([(self.oids[0], tid, record)], [(self.oids[1], before)])):
            try:
                voted(self.other, *stores, read=reads, **NAMED)
            except ConflictError:
                continue
            raise AssertionError('a conflict was not seen')

    def commit_beside_a_vote(self) -> None:
        """Of another object: nobody waits, however many there are. What was read is kept, too."""
        first, read, *others = self.oids
        now = {oid: self.site.load(oid) for oid in self.oids}
        held = voted(self.other, (first, now[first][1], now[first][0]), **NAMED)
        txn = voted(self.site, *((oid, now[oid][1], now[oid][0]) for oid in others),
                    read=[(read, now[read][1])], **NAMED)
        self.site.tpc_finish(txn)
        self.other.tpc_finish(held)
        self.look(2, unchanged=(read,))

    def undo(self) -> None:
        self.change(3)
        [last] = self.db.undoLog(0, 1)
        assert last['description'] == TEXT, last
        manager = TransactionManager()
        self.db.undo(last['id'], manager.get())
        manager.commit()
        self.look(2)

    def list(self) -> None:
        records = [record for txn in self.site.iterator() for record in txn]
        assert {record.oid for record in records} >= {*self.oids, z64}, 'a record is missing'
        found, following = [], None
        while True:
            oid, _, _, following = self.site.record_iternext(following)
            found.append(oid)
            if following is None:
                break
        assert len(found) == len(set(found)) == self.count + 2, len(found)
        assert len(self.site) == self.count + 2
        assert self.site.history(self.oids[0])[0]['size'] > len(BYTES)

    def pack(self) -> None:
        with self.transaction() as connection:
            for n in range(KEPT, self.count):
                del connection.root()['site'][n]
        self.db.pack()
        self.poll()
        for n, oid in enumerate(self.oids):
            try:
                self.reader.load(oid)
                assert n < KEPT, 'garbage is there'
            except POSKeyError:
                assert n >= KEPT, 'an object is gone'
        assert len(self.site) == KEPT + 2
