"""Sample: a small site with a history, if no FileStorage is at hand.

All its classes are of the packages persistent and BTrees, so that any program with ZODB can open it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from BTrees.Length import Length
from BTrees.OOBTree import OOBTree, OOTreeSet
from persistent.list import PersistentList
from persistent.mapping import PersistentMapping
from transaction import TransactionManager
from ZODB.DB import DB
from ZODB.FileStorage import FileStorage

EDITORS = ['anna', 'boris', 'chloé', 'dmitri', 'emre']
SENTENCE = 'the storage keeps every revision of an object until a pack removes what nobody can reach'


def write_sample(path: str, transactions: int = 400) -> None:
    """Write a new FileStorage at path: documents added, edited and deleted, and one change that was undone.

    The same site every time, but for the times of its transactions.
    """
    site = Sample(DB(FileStorage(path, create=True)))
    try:
        for number in range(transactions):
            site.commit(site.some_change())
            if number == transactions // 2:
                site.commit(site.retitle)
                site.commit(site.undo)
    finally:
        site.close()


class Sample:
    """The site and its editors, who do one thing after another."""

    def __init__(self, db: DB) -> None:
        self.db = db
        self.chance = random.Random(1)
        self.transactions = TransactionManager()
        self.root = db.open(self.transactions).root()
        self.commit(self.create)

    def close(self) -> None:
        self.transactions.abort()
        self.db.close()

    def commit(self, change: Callable[[], None]) -> None:
        """Commit a change in the name of some editor, described by the first line of its docstring."""
        txn = self.transactions.get()
        editor = self.chance.choice(EDITORS)
        txn.setUser(editor, '/site/users')
        txn.note(change.__doc__)
        txn.setExtendedInfo('request_path', f'/site/{change.__name__}')
        change()
        self.transactions.commit()

    def some_change(self) -> Callable[[], None]:
        [change] = self.chance.choices([self.add, self.edit, self.delete], [6, 3, 1])
        return change

    def create(self) -> None:
        """Create the site"""
        self.root['site'] = PersistentMapping(
            title='A site', documents=OOBTree(), words=OOBTree(), size=Length()
        )

    def add(self) -> None:
        """Add documents"""
        site = self.root['site']
        for _ in range(10):
            name = f'document-{self.chance.getrandbits(48):012x}'
            site['documents'][name] = PersistentMapping(
                title=self.text(4), text=self.text(100), editions=PersistentList()
            )
            site['size'].change(1)
            self.index(name)

    def edit(self) -> None:
        """Edit a document"""
        name = self.some_name()
        if name is not None:
            document = self.root['site']['documents'][name]
            document['editions'].append(document['title'])
            document.update(title=self.text(4), text=self.text(100))
            self.index(name)

    def delete(self) -> None:
        """Delete a document"""
        name = self.some_name()
        if name is not None:
            site = self.root['site']
            del site['documents'][name]
            site['size'].change(-1)
            for names in site['words'].values():
                names.discard(name)

    def retitle(self) -> None:
        """Retitle the site"""
        self.root['site']['title'] = 'A site with a mistake in its title'

    def undo(self) -> None:
        """Undo the change before"""
        self.db.undo(self.db.undoInfo()[0]['id'], self.transactions.get())

    def index(self, name: str) -> None:
        site = self.root['site']
        for word in site['documents'][name]['title'].split():
            if word not in site['words']:
                site['words'][word] = OOTreeSet()
            site['words'][word].add(name)

    def some_name(self) -> str | None:
        """Return the name of some document, or None if there is no document yet."""
        return self.chance.choice([*self.root['site']['documents'], None])

    def text(self, words: int) -> str:
        return ' '.join(self.chance.choices(SENTENCE.split(), k=words))
