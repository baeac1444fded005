"""Benchmarks: scripts that measure both sides of a comparison in one run.

`python -m benchmarks.NAME [--quick] [--json]`. Results and how to repeat them are in benchmarks/results/.
"""
