"""Sources of copies that are made up: transactions with what any storage may have."""
import random

from persistent.TimeStamp import TimeStamp
from ZODB.BaseStorage import DataRecord, TransactionRecord
from ZODB.utils import p64, u64

from relstore.tests.support.records import state

FIRST = u64(TimeStamp(2024, 2, 3, 4, 5, 6).raw())


class Transaction(TransactionRecord):

    def __init__(self, tid, records, status=' ', user=b'', description=b'', extension=b''):
        super().__init__(p64(tid), status, user, description, extension)
        self.records = [DataRecord(p64(oid), p64(tid), data, None if data_tid is None else p64(data_tid))
                        for oid, data, data_tid in records]

    def __iter__(self):
        return iter(self.records)


class Source:
    """Transactions, as a storage that keeps history tells them."""

    def __init__(self, transactions):
        self.transactions = transactions

    def iterator(self, start=None, stop=None):
        return iter([each for each in self.transactions
                     if (start is None or each.tid >= start) and (stop is None or each.tid <= stop)])

    def lastTransaction(self):
        return self.transactions[-1].tid

    def supportsUndo(self):
        return True

    def getName(self):
        return 'source'


def of_all_kinds(count=60, seed=1):
    """Return a source with what sources have."""
    chance = random.Random(seed)
    transactions, tid, there = [], FIRST, {}
    for n in range(count):
        tid += chance.randrange(1, 1 << 33)
        records = []
        for _ in range(chance.choice((0, 1, 2, 7, 40)) if n else 3):
            oid = chance.choice([*there, len(there) * chance.choice((1, 1, 100))])
            data = chance.choice((
                state('x' * chance.choice((0, 1, 100, 3000))), state(n), b'no pickle', b'\0\xff%s\\' * 9, b'',
                state([]) + b'Q' * 50, chance.randbytes(20)))
            records.append((oid, data, chance.choice((None, there.get(oid)))))
            there[oid] = tid
        transactions.append(Transaction(
            tid, records, status=' p'[n < count // 3], user=chance.choice((b'', b'me', 'Zoë'.encode(), b'\xff')),
            description=chance.choice((b'', b'/news/1\tedit\\.', b'x' * 3000)),
            extension=chance.choice((b'', b'}q\x01U\x01aK\x01s.'))))
    again = transactions[1]         # two records of one object: the last one counts
    again.records += [DataRecord(p64(7), again.tid, state('first'), None),
                      DataRecord(p64(7), again.tid, state('second'), None)]
    gone = transactions[-10]        # a deletion
    gone.records.append(DataRecord(p64(0), gone.tid, None, None))
    far = transactions[-4]          # an object for which the counter of oids has to take a long way
    far.records.append(DataRecord(p64(40_000_000), far.tid, state('far'), None))
    return Source(transactions)


def current(source):
    found = {}
    for transaction in source.iterator():
        for record in transaction:
            found[u64(record.oid)] = u64(transaction.tid), record.data
    return {oid: row for oid, row in found.items() if row[1] is not None}
