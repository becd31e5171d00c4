"""Layers that have nothing to set up: what is in one runs in a process of its own, beside the others."""


class Processes:
    """Tests that start processes or servers of their own, and wait for them most of the time."""
