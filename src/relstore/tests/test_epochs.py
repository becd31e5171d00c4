"""Epochs against a list of all that has happened: whatever they tell of a generation was so."""
import unittest

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from relstore.caching.epochs import Epochs, named
from relstore.tests.support.layers import Models

REMEMBERED = 6


class Histories(RuleBasedStateMachine):
    """Epochs that begin, and sweeps that end in them, as one process learns of them."""

    def __init__(self):
        super().__init__()
        self.epochs = Epochs(REMEMBERED)
        self.generations = []       # (epoch, how many sweeps were known), the first being generation 1
        self.removed = {}           # of the current epoch: what a sweep has removed, by number; None if not known

    @rule(sweeps=st.integers(0, 5))
    def begin(self, sweeps):
        epoch = f'epoch {len(self.generations)}'
        self.epochs.begin(len(self.generations) + 1, sweeps, [])
        self.assert_nothing_is_of_the_new_one_yet()
        self.epochs.now = epoch
        self.generations.append((epoch, sweeps))
        self.removed = {}

    def assert_nothing_is_of_the_new_one_yet(self):
        """Whoever reads in this moment was told the old generation, or none."""
        for number in range(len(self.generations)):
            assert number + 1 < self.epochs.first
            assert not self.epochs.of(number + 1)

    @rule(more=st.integers(1, 2), removed=st.none() | st.sets(st.integers(0, 9), max_size=REMEMBERED + 1))
    def see_sweep(self, more, removed):
        if self.generations:
            epoch, sweeps = self.generations[-1]
            oids = None if removed is None or more > 1 else sorted(removed)
            self.epochs.see_sweep(sweeps + more, len(self.generations) + 1, oids)
            self.generations.append((epoch, sweeps + more))
            self.removed[sweeps + more] = oids

    @invariant()
    def generations_are_told(self):
        now = self.generations[-1][0] if self.generations else ''
        for number, (epoch, sweeps) in enumerate(self.generations, 1):
            assert (number >= self.epochs.first) == (epoch == now)
            assert self.epochs.of(number) == (epoch if epoch == now else '')
            assert self.epochs.sweeps_of(number) == (sweeps if epoch == now else -1)
        assert self.epochs.of(-1) == now
        if self.generations:        # as one that is told before it is entered, and none
            assert self.epochs.sweeps_of(len(self.generations) + 1) == self.generations[-1][1]
            assert self.epochs.sweeps_of(-1) == -1

    @invariant()
    def sweeps_are_told(self):
        if not self.generations:
            return
        last = self.generations[-1][1]
        kept = 0
        for number in range(last, -1, -1):
            oids = self.removed.get(number)
            found = self.epochs.swept(number - 1, number)
            if found is not None:
                assert [list(some) for some in found] == [oids]
                kept += len(oids)
        assert kept <= REMEMBERED
        if self.removed.get(last) is not None and len(self.removed[last]) <= REMEMBERED:
            assert self.epochs.swept(last - 1, last) is not None, 'the last is kept before any other'
        for first in range(last + 1):
            each = [self.epochs.swept(number - 1, number) for number in range(first + 1, last + 1)]
            assert self.epochs.swept(first, last) == (None if None in each else [some for [some] in each])
        assert self.epochs.swept(last, last) == []
        assert self.epochs.swept(last, last - 1) is None


class TestEpochs(unittest.TestCase):
    layer = Models

    def test_histories(self):
        run_state_machine_as_test(Histories)

    def test_names(self):
        """A sweep makes another name of the same epoch."""
        self.assertNotEqual(named('x', 1), named('x', 2))
        self.assertNotEqual(named('x', 1), named('y', 1))
