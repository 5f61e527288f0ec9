"""Benchmark of the store beside its peers and beside what the machine itself can do (see docs in cli.py)."""
