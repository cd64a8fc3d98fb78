"""A disk that is full at any file of a training: one line, nothing left over, and it resumes."""

from pathlib import Path

import pytest

from bilens.errors import CheckpointError
from bilens.files import UNFINISHED
from bilens.train.run_directory import is_begun
from tests.train.kill_attack import KINDS
from tests.train.runs import check_same_weights, file_limit


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_a_full_disk_is_one_line_and_the_training_resumes(kind, tmp_path):
    train, whole = KINDS[kind], tmp_path / "whole"
    train(whole)
    sizes = sorted({p.stat().st_size for p in whole.rglob("*") if p.stat().st_size > 100})
    # A limit just below the size of each file, so that each is once the first that fails.
    for number, size in enumerate(sizes[:: max(1, len(sizes) // 6)]):
        run: Path = tmp_path / str(number)
        full = pytest.raises(CheckpointError, match="could not be written")
        with full as info, file_limit(size - 1):
            train(run)
        assert "\n" not in str(info.value)
        assert not list(run.rglob(f"{UNFINISHED}*"))
        train(run, resume=is_begun(run))
        check_same_weights(run, whole)
