"""Layers that have nothing to set up: what is in one runs in a process of its own, beside the others.

Tests without a layer start no server and no process, and open no database: they take seconds, see `make unit`.
"""


class Long:
    """What stands on this takes longest, and begins first: layers are sorted by the names of what they stand on."""


class Processes:
    """Tests that start processes or servers of their own, and wait for them most of the time."""


class SQLiteFiles(Long):
    """Tests on SQLite."""


class Models:
    """Tests of code without I/O that compare it with a model in many random histories, or at each step."""
