"""Timing of calls."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], repeats: int = 5, *, warm: bool = True) -> float:
    """Median wall time of a call, in seconds, a GPU waited for; `warm` calls it once before."""
    if warm:
        call()
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def spent(call: Callable[[], object]) -> float:
    """Seconds of the processor of one call, or on a GPU its wall time."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    call()
    wait()
    return clock() - start


def by_turns(*calls: Callable[[], object], turns: int = 5) -> list[tuple[float, ...]]:
    """Seconds of each call in each turn, one after the other, so that all meet the same machine."""
    return [tuple(seconds(call, 1, warm=False) for call in calls) for _ in range(turns)]


def wait() -> None:
    """Wait until a GPU has finished its work, if one is present."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    """Print the machine on which the numbers below are measured."""
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.get_default_dtype()}"
    )
