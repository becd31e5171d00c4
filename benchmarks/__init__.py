"""Benchmarks of relstore beside its peers. See run.py."""
