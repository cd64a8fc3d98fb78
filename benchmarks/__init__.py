"""Timed comparisons. Each prints ratios from one run against a stated reference.

Run one with `python -m benchmarks.NAME`. On a quiet machine the ratios are reproducible.
"""
