"""Ways to one result, each in a process of its own, so that their peaks of memory are their own."""

import resource
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.clock import machine

__all__ = ["compare", "peak"]


def peak() -> float:
    """The largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(name: str, ways: Sequence[str]) -> None:
    """Run `python -m benchmarks.NAME WAY`, which prints seconds and `peak()`, and show all.

    Args:
        name: of the benchmark.
        ways: nothing but the model first, then blocks, then the whole.
    """
    print(machine())
    found = {}
    for way in ways:
        command = [sys.executable, "-m", f"benchmarks.{name}", way]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[way] = [float(number) for number in shown.split()]
    nothing, blocks, whole = ways
    base = found[nothing][1]
    for way in (blocks, whole):
        time, most = found[way]
        print(f"{way:8} {time:6.2f} s, {most:6.0f} MB at most, {most - base:5.0f} above the model")
    print(f"ratio    {found[whole][0] / found[blocks][0]:6.2f} x")
