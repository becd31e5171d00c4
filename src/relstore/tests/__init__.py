"""Tests, and what they share: see docs/internals/testing.md."""
from relstore.tests.support import directories, times

directories.begin()
times.begin()
