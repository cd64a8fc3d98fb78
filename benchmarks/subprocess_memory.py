"""Memory that a call adds to the process, and random models for it."""

import ctypes
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from bilens.lazy_imports import lazy_import

__all__ = ["peak_above", "random_model"]

nn, residual = lazy_import("bilens.nn.language"), lazy_import("bilens.residual")

Result = TypeVar("Result")


def random_model(**settings: Any) -> Any:
    """Return a language model with random weights, by default of one block."""
    torch.manual_seed(0)
    model = nn.LanguageModel(nn.LanguageConfig(**settings))
    # What importing the readings takes is no part of a call.
    import_module("bilens.read.language")
    return residual.ResidualModel(model.requires_grad_(False))


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
