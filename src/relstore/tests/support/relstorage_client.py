"""A program that uses one database with RelStorage, as it is told on its input, in lines of JSON: see test_relstorage.

It runs where RelStorage is installed, and relstore need not be.
"""
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import closing
from importlib.metadata import version

from persistent.mapping import PersistentMapping
from relstorage.adapters.interfaces import UnableToAcquirePackUndoLockError
from relstorage.adapters.postgresql import PostgreSQLAdapter
from relstorage.adapters.sqlite.adapter import Sqlite3Adapter
from relstorage.options import Options
from relstorage.storage import RelStorage
from transaction import TransactionManager
from ZODB import DB
from ZODB.blob import Blob
from ZODB.POSException import UndoError
from ZODB.serialize import referencesf
from ZODB.utils import z64

FOLDERS, DOCUMENTS = 8, 12


class Client:

    def version(self) -> str:
        return version('RelStorage')

    def open(self, where: dict, keep_history: bool, **more) -> None:
        options = Options(keep_history=keep_history, **more)
        adapter = (PostgreSQLAdapter(where['dsn'], options=options) if 'dsn' in where
                   else Sqlite3Adapter(where['data_dir'], pragmas={}, options=options))
        self.db = DB(RelStorage(adapter, options=options))

    def create(self) -> None:
        """Make folders with documents, and garbage: old revisions, and folders that were removed, in circles."""
        with self.db.transaction() as connection:
            root = connection.root()
            for n in range(FOLDERS):
                root[f'folder {n}'] = PersistentMapping({str(d): PersistentMapping(n=0) for d in range(DOCUMENTS)})
                root[f'gone {n}'] = PersistentMapping(one=PersistentMapping(n=n))
                root[f'gone {n}']['one']['back'] = root[f'gone {n}']
        for n in range(FOLDERS):
            with self.db.transaction() as connection:
                del connection.root()[f'gone {n}']
                connection.root()[f'folder {n}']['0']['n'] = n

    def write(self, seconds: float) -> dict[str, int]:
        """Change, move, add, remove, and undo, for a while. Return how often."""
        chance, done, added = random.Random(1), {'commits': 0, 'undone': 0}, 0
        until = time.monotonic() + seconds
        manager = TransactionManager()
        with closing(self.db.open(manager)) as connection:
            while time.monotonic() < until or done['commits'] < 10:
                one, two = (connection.root()[f'folder {n}'] for n in chance.sample(range(FOLDERS), 2))
                what = chance.choice(['change', 'move', 'add', 'remove', 'undo'])
                if what == 'undo' and self.db.supportsUndo():
                    try:
                        self.db.undo(self.db.undoInfo(0, 3)[0]['id'], manager.get())
                        manager.commit()
                        done['undone'] += 1
                    except (UndoError, UnableToAcquirePackUndoLockError):     # a pack has it
                        manager.abort()
                    continue
                name = chance.choice(list(one))
                if what == 'add':
                    added += 1
                    two[f'new {added}'] = PersistentMapping(n=added, inner=PersistentMapping())
                elif what == 'move' and len(one) > 3:
                    two[f'{name} moved'] = one.pop(name)
                elif what == 'remove' and len(one) > 3:
                    del one[name]
                else:
                    one[name]['n'] += 1
                manager.commit()
                done['commits'] += 1
        return done

    def walk(self) -> dict[str, str]:
        """Load whatever can be reached: {oid: tid}. POSKeyError where a reference leads nowhere."""
        view = self.db.storage.new_instance()
        try:
            view.poll_invalidations()
            seen, waiting = {}, [z64]
            while waiting:
                oid = waiting.pop()
                if oid.hex() not in seen:
                    state, tid = view.load(oid)
                    seen[oid.hex()] = tid.hex()
                    waiting += referencesf(state)
            return seen
        finally:
            view.release()

    def numbers(self) -> dict[str, list[int]]:
        """Return what is in the documents of each folder."""
        with self.db.transaction() as connection:
            return {name: sorted(document['n'] for document in folder.values())
                    for name, folder in connection.root().items() if name.startswith('folder')}

    def store_blob(self, name: str, size: int) -> list[str]:
        """Make a blob, or change it; return its oid, its tid, and the digest of its data."""
        data = random.Random(size).randbytes(size)
        with self.db.transaction() as connection:
            blob = connection.root().get(name) or Blob()
            connection.root()[name] = blob
            with blob.open('w') as file:
                file.write(data)
        return [*self.blob(name)]

    def blob(self, name: str) -> list[str]:
        """Return its oid, its tid, and the digest of its data, as one sees it who has it not in his cache."""
        with self.db.transaction() as connection:
            blob = connection.root()[name]
            with blob.open('r') as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            return [blob._p_oid.hex(), blob._p_serial.hex(), digest]

    def undo_last(self) -> None:
        with self.db.transaction() as connection:
            self.db.undo(self.db.undoLog(0, 1)[0]['id'], connection.transaction_manager.get())

    def pack(self, ago: float, prepack_only: bool = False, skip_prepack: bool = False) -> None:
        self.db.storage.pack(time.time() - ago, referencesf, prepack_only=prepack_only, skip_prepack=skip_prepack)

    def die_while_packing(self, after: int) -> None:
        """SIGKILL while it looks for references, after so many states."""
        looked = 0

        def look(state, oids=None):
            nonlocal looked
            looked += 1
            if looked > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return referencesf(state, oids)

        self.db.storage.pack(time.time(), look)

    def close(self) -> None:
        self.db.close()


def main() -> None:
    client = Client()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {'answer': getattr(client, what)(**arguments)}
        except Exception:
            answer = {'error': traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    main()
