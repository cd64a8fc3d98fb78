"""A disk that is full at any file of a training: one line, nothing left over, and it resumes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bilens.errors import CheckpointError
from bilens.files import UNFINISHED
from bilens.train.run_directory import is_begun
from tests.train.kill_attack import KINDS

resource = pytest.importorskip("resource")


def limited(call, n_bytes: int) -> None:
    """Call with a limit on the size of any file, beyond which writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_a_full_disk_is_one_line_and_the_training_resumes(kind, tmp_path):
    train, whole = KINDS[kind], tmp_path / "whole"
    train(whole, resume=False)
    sizes = sorted({p.stat().st_size for p in whole.rglob("*") if p.stat().st_size > 100})
    expected = load_file(whole / "model.safetensors")
    # A limit just below the size of each file, so that each is once the first that fails.
    for number, size in enumerate(sizes[:: max(1, len(sizes) // 6)]):
        run: Path = tmp_path / str(number)
        with pytest.raises(CheckpointError, match="could not be written") as info:
            limited(lambda run=run: train(run, resume=False), size - 1)
        assert "\n" not in str(info.value)
        assert not list(run.rglob(f"{UNFINISHED}*"))
        train(run, resume=is_begun(run))
        weights = load_file(run / "model.safetensors")
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
