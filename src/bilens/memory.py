"""Memory is checked before it is taken, or its lack is said in a line."""

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    import torch
else:  # Commands refuse what they can without it.
    torch = lazy_import("torch")
if sys.platform != "win32":
    import resource

MEMINFO = Path("/proc/meminfo")
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and use of a container, in version 2 of the kernel's control groups and in version 1."""


class MemoryLimitError(BilensError):
    """Memory that a computation needs and that is not available."""


def available_memory(device: "torch.device | str" = "cpu") -> int | None:
    """Return the bytes that this process may still allocate; None if the system does not say.

    On a CPU they are the least of three numbers. These are the machine's free memory, and the rest
    of the limits on the container and on the address space (`ulimit -v`).
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_limits(), default=None) if device.type == "cpu" else None


def check_memory(n_bytes: int, purpose: str, device: "torch.device | str" = "cpu") -> None:
    """Raise before an allocation that cannot succeed.

    `purpose` is the subject of the error's sentence, as in "The eigenvectors of 30,000 inputs".

    Raises:
        MemoryLimitError: less memory is available.
    """
    available = available_memory(device)
    if available is not None and n_bytes > available:
        raise MemoryLimitError(
            f"{purpose} need {_gigabytes(n_bytes)} of memory on {device}, and "
            f"{_gigabytes(available)} are available"
        )


def return_freed() -> None:
    """Give freed memory back to the system, on Linux.

    Its C library keeps freed arrays of less than 32 MB, between which larger ones do not fit: half
    of what a flow of a long text would hold, and all that a pass widens of a model.
    """
    if sys.platform == "linux":
        # Other C libraries than glibc keep less, and have no such function.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory is short, and nothing else is wrong."""
    # torch has a class for it on a GPU only, and the system for none of its libraries.
    texts = "DefaultCPUAllocator|allocate memory|failed to map segment|can't start new"
    on_gpu = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    return isinstance(error, MemoryError | on_gpu) or re.search(texts, str(error)) is not None


@contextmanager
def memory_errors() -> Iterator[None]:
    """Say in a line that memory is used up, in place of what Python, numpy or torch raise.

    Raises:
        MemoryLimitError: an allocation has failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise MemoryLimitError(
            f"There is not enough memory ({reason}). Give the process more, or take a smaller "
            "model, fewer texts or shorter ones."
        ) from error


def _limits() -> Iterator[int]:
    # psutil would save three of these lines and not know the limit of a container.
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        yield 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # a system other than Linux
        pass
    for limit, usage in CGROUPS:
        try:
            # The kernel gives back cached files before it refuses memory.
            entries = (usage.parent / "memory.stat").read_text().splitlines()
            stat = dict(entry.split() for entry in entries)
            cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            yield max(0, int(limit.read_text()) - int(usage.read_text()) + cache)
        except (OSError, ValueError):  # another version, or "max": no limit
            pass
    if sys.platform != "win32":
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        if soft != resource.RLIM_INFINITY:
            statm = Path("/proc/self/statm")
            pages = int(statm.read_text().split()[0]) if statm.exists() else 0
            yield max(0, soft - pages * resource.getpagesize())


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB"
