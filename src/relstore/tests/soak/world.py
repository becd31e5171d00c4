"""World: what the databases hold, and what is true of it in every view.

accounts    money moves between them, and its sum never changes. Conflicts on every other account are resolved.
twins       come in pairs with the same number, which is changed for both at once. There are more of them than the
            caches hold, so views are put together from cache and database.
counters    one for each writer, which adds 1 to it in each of its commits: it is never less than what was
            acknowledged to the writer before the view was taken.
"""
import random

from BTrees.IOBTree import IOBTree
from persistent import Persistent
from persistent.mapping import PersistentMapping

ACCOUNTS = 60
BALANCE = 1000
PAIRS = 1000
TWIN_BYTES = 1000
LOOKED_AT = 20          # pairs, by one reader
NEW_OBJECTS = 0.02      # of all commits make one, and throw one away


class Broken(AssertionError):
    """A view is wrong: relstore, or this test, has a fault."""


class Account(Persistent):

    def __init__(self):
        self.balance = BALANCE


class ResolvingAccount(Account):

    def _p_resolveConflict(self, old: dict, saved: dict, new: dict) -> dict:
        return new | {'balance': saved['balance'] + new['balance'] - old['balance']}


class Twin(Persistent):

    def __init__(self, data: bytes):
        self.data, self.number = data, 0


class Counter(Persistent):
    value = 0
    other: Twin | None = None   # a new one now and then


def create(root, writers: int, chance: random.Random) -> None:
    """Fill the root of an empty database."""
    root['accounts'] = IOBTree({n: (ResolvingAccount if n % 2 else Account)() for n in range(ACCOUNTS)})
    root['twins'] = IOBTree({n: Twin(chance.randbytes(TWIN_BYTES)) for n in range(2 * PAIRS)})
    root['counters'] = PersistentMapping((n, Counter()) for n in range(writers))


def change(root, writer: int, chance: random.Random) -> None:
    """Make a change that leaves all true."""
    accounts, twins, counter = root['accounts'], root['twins'], root['counters'][writer]
    giver, taker = (accounts[n] for n in chance.sample(range(ACCOUNTS), 2))
    amount = chance.randrange(1, 10)
    giver.balance -= amount
    taker.balance += amount
    pair = chance.randrange(PAIRS)
    for twin in (twins[2 * pair], twins[2 * pair + 1]):
        twin.number += 1
    if chance.random() < NEW_OBJECTS:
        counter.other = Twin(chance.randbytes(TWIN_BYTES))
    counter.value += 1


def check(root, pairs: range) -> None:
    """Raise Broken if the view is not whole, as far as these pairs of twins tell."""
    balances = [account.balance for account in root['accounts'].values()]
    if sum(balances) != ACCOUNTS * BALANCE:
        raise Broken(f'The accounts hold {sum(balances)}, which should be {ACCOUNTS * BALANCE}: {balances}')
    twins = root['twins']
    for pair in pairs:
        one, other = twins[2 * pair], twins[2 * pair + 1]
        if one.number != other.number:
            raise Broken(f'The twins of pair {pair} are at {one.number} and {other.number}; their serials are '
                         f'{one._p_serial.hex()} and {other._p_serial.hex()}')
    for counter in root['counters'].values():
        if counter.other is not None and len(counter.other.data) != TWIN_BYTES:
            raise Broken(f'An object of {TWIN_BYTES} bytes has {len(counter.other.data)}')


def some_pairs(chance: random.Random) -> range:
    """Return what a reader looks at: pairs in a row, or with gaps."""
    step = chance.choice((1, 1, 7))
    start = chance.randrange(PAIRS - LOOKED_AT * step)
    return range(start, start + LOOKED_AT * step, step)
