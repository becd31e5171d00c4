"""Proof: every rule by itself. The adapter is asked for what a database would answer; test_restore has real ones."""
import unittest
from types import SimpleNamespace

from relstore.caching.proof import Finding, Known, finding, is_proven


def database(stands: int, current: dict[int, int | None], keep_history: bool = False, packed_to: int = 0):
    """Return what stands for an adapter and its session: current are the tids of objects, None of one that is gone."""
    adapter = SimpleNamespace(
        keep_history=keep_history, stands=lambda session, tid: stands, sql=SimpleNamespace(packed_to='packed_to'),
        current_tids=lambda session, oids: {oid: current.get(oid) for oid in oids})
    return adapter, SimpleNamespace(all={'packed_to': [[packed_to]]}.get)


class Proven(unittest.TestCase):
    """What was saved is used only where it is certain."""

    def test_rules(self):
        for known, stands, current, expected in [
                (Known(10, 5, [(1, 10)]), 10, {}, True),        # its newest transaction is there
                (Known(10, 10, []), 8, {}, False),              # nothing is known that could have changed again
                (Known(10, 9, [(1, 10)]), 8, {1: 12}, False),   # something else may have changed up to 9
                (Known(10, 5, [(1, 10)]), 8, {1: None}, False),
                (Known(10, 5, [(1, 10)]), 8, {1: 12}, True),    # it was changed again since
                (Known(10, 5, [(1, 10)]), 8, {1: 10}, False),
                (Known(10, 5, [(1, 10)]), 8, {1: 7}, False),
                (Known(10, 5, [(1, 10), (2, 9)]), 8, {1: 12, 2: 7}, False)]:
            with self.subTest(known=known, stands=stands, current=current):
                self.assertIs(is_proven(*database(stands, current), known), expected)


class Findings(unittest.TestCase):
    """What a process that goes on makes of it, when objects have changed `since` its newest transaction, 10."""

    def test_rules(self):
        known = Known(10, 0, [(1, 10)])
        for stands, since, facts, expected in [
                (10, (), {'current': {}}, Finding.HOLDS),
                (8, (), {'current': {1: 7}}, Finding.LOST),
                (8, (), {'current': {1: None}}, Finding.PERHAPS_LOST),
                (8, (), {'current': {1: 10}}, Finding.PERHAPS_LOST),
                (8, (1,), {'current': {}}, Finding.HOLDS),
                # With history the row of its transaction is gone.
                (8, (1,), {'current': {}, 'keep_history': True}, Finding.PERHAPS_LOST),
                (8, (1,), {'current': {}, 'keep_history': True, 'packed_to': 9}, Finding.PERHAPS_LOST),
                (8, (1,), {'current': {}, 'keep_history': True, 'packed_to': 10}, Finding.HOLDS)]:
            with self.subTest(stands=stands, since=since, facts=facts):
                self.assertIs(finding(*database(stands, **facts), known, stands, since), expected)
