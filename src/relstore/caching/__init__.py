"""Caching: what a process keeps of the database, what processes share, and how long either may be used."""
