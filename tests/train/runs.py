"""Runs of trainings: ctrl-C at a call, and comparisons of two runs."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


def press_ctrl_c(patch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """Press ctrl-C in a call of a function; the first has the number 1."""
    calls, function = [], getattr(owner, name)

    def press(*args):
        calls.append(0)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return function(*args)

    patch.setattr(owner, name, press)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def check_same_weights(run: Path, other: Path) -> None:
    """Compare all weights of two runs to the bit."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def times(run: Path) -> dict[Path, int]:
    """Return the times at which the files of a run were written."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
