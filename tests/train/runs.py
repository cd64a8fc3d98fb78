"""Runs of trainings: ctrl-C at a call, and comparisons of two runs."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def run_of(train: Callable[[Path], tuple[Any, Any]]) -> Any:
    """Return the fixture of a read-only run of a training: its folder, model and history."""

    @pytest.fixture(scope="module")
    def run_once(tmp_path_factory):
        run = tmp_path_factory.mktemp("run")
        return run, *train(run)

    return run_once


@contextmanager
def ctrl_c(owner: object, name: str, call: int) -> Iterator[None]:
    """Press ctrl-C in a call of a function in the block, which ends by it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        press_ctrl_c(patch, owner, name, call)
        yield


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def column(history: list[dict[str, Any]], name: str, beside: str | None = None) -> list[Any]:
    """Return one number of the records that hold it, or of those that hold another beside it."""
    return [record[name] for record in history if (beside or name) in record]


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in history]


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


@contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    """Limit the size of any file in the block, beyond which writes fail."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
