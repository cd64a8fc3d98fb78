"""Timed comparisons. Each prints ratios from one run against a stated reference.

Run one with `python -m benchmarks.NAME`; a quiet machine gives the same ratios twice.
"""
