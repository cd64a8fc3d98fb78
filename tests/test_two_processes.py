"""Two processes do the work of one, and agree on the result; at night torchrun starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import bilens
from bilens.convert import open_model
from bilens.convert.gates import find_swish
from bilens.errors import BilensError
from bilens.train.language import train_language
from bilens.train.trainer import ResumableTrainer
from tests.command_line import ROOT, run_python
from tests.models import small_config, small_corpus
from tests.two_processes import TRAINING, anneal_gated, contexts, tensorise_gated

TESTS = ROOT / "tests"


@pytest.fixture
def two(work_of_processes) -> Path:
    return work_of_processes


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads from /proc")
def test_they_leave_no_thread_of_their_group(two):
    """A thread of gloo that outlives Python now and then ends the process with an error."""
    for process in (0, 1):
        names = json.loads((two / f"threads-{process}.json").read_text())
        assert names
        assert not [name for name in names if "gloo" in name]


def check_weights(*folders: Path) -> None:
    single, both = (load_file(folder / "model.safetensors") for folder in folders)
    for name in single:
        torch.testing.assert_close(single[name], both[name], rtol=1e-3, atol=1e-4)


def test_they_train_the_same_model(two, tmp_path):
    train_language(small_config(), small_corpus(), TRAINING, tmp_path, use_cpu=True)
    check_weights(tmp_path, two)


def test_they_stop_in_the_same_step_and_resume(two):
    check_weights(two / "interrupted", two)


def test_they_train_the_large_preset_made_small(two):
    config = bilens.load(two / "preset").model.config
    assert (config.n_heads, config.norm, config.qk_norm) == (9, "rms", True)
    settings = json.loads((two / "preset" / "training.json").read_text())
    assert (settings["optimizer"], settings["warmup"]) == ("muon", 0.02)
    lines = (two / "preset" / "metrics.jsonl").read_text().splitlines()
    assert any("eval_loss" in json.loads(line) for line in lines)


def test_they_anneal_the_same_model(two, tmp_path):
    anneal_gated(tmp_path)
    check_weights(tmp_path, two / "annealed")
    assert find_swish(open_model(two / "annealed").config) == 0


@pytest.fixture(scope="module")
def tensor_of_one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    tensorise_gated(folder)
    return folder


def check_tensor(folder: Path, single: Path) -> None:
    check_weights(single, folder)
    records = [json.loads((run / "tensorise.json").read_text()) for run in (single, folder)]
    for stage, texts in records[0].items():
        assert records[1][stage]["a"] == pytest.approx(texts["a"], rel=1e-4, abs=1e-6)


def test_they_make_the_same_tensor(two, tensor_of_one):
    check_tensor(two / "tensor", tensor_of_one)


@pytest.mark.slow
def test_they_make_the_same_tensor_from_shares_of_the_weights(tmp_path, tensor_of_one):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run_python(*torchrun, TESTS / "sharded.py", tmp_path)
    check_tensor(tmp_path, tensor_of_one)


def test_flattened_weights_are_refused(tmp_path, monkeypatch):
    make = ResumableTrainer.__init__

    def sharded(trainer, *args, **options):
        """Make a trainer as under accelerate's configuration of version 1."""
        make(trainer, *args, **options)
        trainer.is_fsdp_enabled = True

    monkeypatch.setattr(ResumableTrainer, "__init__", sharded)
    monkeypatch.setattr(Accelerator, "is_fsdp2", False)
    with pytest.raises(BilensError, match="FSDP version 1, expected version 2"):
        train_language(small_config(), small_corpus(), TRAINING, tmp_path, use_cpu=True)


def test_they_find_the_same_contexts(two):
    for process in (0, 1):
        record = json.loads((two / f"result-{process}.json").read_text())["contexts"]
        for custom, theirs in zip(contexts(), record, strict=True):
            for a, b in zip(custom, theirs, strict=True):
                assert a == pytest.approx(b)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_with_a_line(tmp_path):
    # Not under torchrun, which may end the other process before it can say anything.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    group["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "killed.py"), str(tmp_path)],
            env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL]
    assert "Error: Another process of this training has ended" in said[0]
    assert f"again with --resume: the newest checkpoint in {tmp_path}" in said[0]
    assert "Traceback" not in said[0]
