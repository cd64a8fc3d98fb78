"""Timing: the median of several calls after one that does not count, or a single long one."""

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["machine", "seconds"]


def seconds(call: Callable[[], object], repeats: int = 5, *, warm: bool = True) -> float:
    """Median wall time of a call, in seconds; `warm` calls it once before."""
    if warm:
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine() -> str:
    """What the numbers below it were measured on."""
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.get_default_dtype()}"
    )
