"""Ways to one result, each in a process of its own, so that their peaks of memory are their own.

The process that starts the others stays small, since its peak would count in theirs.
"""

import ctypes
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.clock import machine, seconds
from bilens.lazy_imports import lazy_import

__all__ = ["compare", "measure", "peak_above", "random_model"]

nn, residual = lazy_import("bilens.nn.language"), lazy_import("bilens.residual")

Result = TypeVar("Result")

WAYS = ("nothing", "blocks", "whole")
"""Nothing but the model, then both ways to the result."""


def random_model(**settings: Any) -> Any:
    """Return a language model with random weights, by default of one block."""
    torch.manual_seed(0)
    model = nn.LanguageModel(nn.LanguageConfig(**settings))
    # What importing the readings takes is part of "nothing".
    import_module("bilens.read.language")
    return residual.ResidualModel(model.requires_grad_(False))


def measure(way: str, blocks: Callable[[], torch.Tensor], full: Callable[[], torch.Tensor]) -> None:
    """Print the seconds of one way and the largest memory of this process, in MB."""
    calls = {"nothing": lambda: None, "blocks": blocks, "whole": full}
    result = seconds(calls[way], 3)
    print(result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if way == "blocks":
        assert torch.allclose(blocks(), full(), rtol=1e-3)


def peak_above(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the most memory, in MB, that a call added to the process; on Linux only."""
    # Freed memory goes back first, and Linux counts the peak of a process anew from here.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _status("VmRSS")
    result = call()
    return (_status("VmHWM") - before) / 1024, result


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def compare(name: str) -> None:
    """Run `python -m benchmarks.NAME WAY` for all ways, and show their output."""
    print(machine())
    result = {}
    for way in WAYS:
        command = [sys.executable, "-m", f"benchmarks.{name}", way]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result[way] = [float(number) for number in shown.split()]
    nothing, blocks, full = WAYS
    base = result[nothing][1]
    for way in (blocks, full):
        time, most = result[way]
        print(f"{way:8} {time:6.2f} s, {most:6.0f} MB at most, {most - base:5.0f} above the model")
    print(f"ratio    {result[full][0] / result[blocks][0]:6.2f} x")
