"""Caching: what a process keeps of the database, what processes share of it, and how long either may serve."""
