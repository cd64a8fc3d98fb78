"""Memory that a call adds to the process."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


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
