"""Two processes do the work of one, and agree on the result; at night torchrun starts them."""

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import bilens
from bilens.convert import open_model
from bilens.convert.gates import find_swish
from bilens.errors import BilensError
from bilens.files import read_json
from bilens.flows import flow_table
from bilens.sections import plain
from bilens.train.language import train_language
from bilens.train.trainer import ResumableTrainer
from tests.command_line import OWN_PATHS, ROOT, run_python
from tests.families import family_view
from tests.models import small_config, small_corpus
from tests.two_processes import ASKED, TRAINING, anneal_gated, circuits, tensorise_gated

pytestmark = pytest.mark.long

SCRIPT = ROOT / "tests" / "two_processes.py"


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads from /proc")
def test_they_leave_no_thread_of_their_group(work_of_processes):
    """A thread of gloo that outlives Python now and then ends the process with an error."""
    for process in (0, 1):
        names = read_json(work_of_processes / f"threads-{process}.json")
        assert names
        assert not [name for name in names if "gloo" in name]


def check_weights(*folders: Path) -> None:
    single, both = (load_file(folder / "model.safetensors") for folder in folders)
    for name in single:
        torch.testing.assert_close(single[name], both[name], rtol=1e-3, atol=1e-4)


def test_they_train_the_same_model(work_of_processes, tmp_path):
    train_language(small_config(), small_corpus(), TRAINING, tmp_path, use_cpu=True)
    check_weights(tmp_path, work_of_processes)


def test_they_stop_in_the_same_step_and_resume(work_of_processes):
    check_weights(work_of_processes / "interrupted", work_of_processes)


def test_they_train_the_large_preset_made_small(work_of_processes):
    preset = work_of_processes / "preset"
    config, settings = bilens.load(preset).model.config, read_json(preset / "training.json")
    assert (config.n_heads, config.norm, config.qk_norm) == (9, "rms", True)
    assert (settings["optimizer"], settings["warmup"]) == ("muon", 0.02)
    assert any("eval_loss" in row for row in read_json(preset / "metrics.jsonl", lines=True))


def test_they_anneal_the_same_model(work_of_processes, tmp_path):
    anneal_gated(tmp_path)
    check_weights(tmp_path, work_of_processes / "annealed")
    assert find_swish(open_model(work_of_processes / "annealed").config) == 0


def test_they_share_the_questions_of_a_table(work_of_processes, tmp_path):
    view = family_view("llama", dtype=torch.float32)
    of_one = plain(flow_table(view, ASKED, tmp_path, shard=2).record())
    assert [read_json(work_of_processes / f"table-{rank}.json") for rank in (0, 1)] == [of_one] * 2


def test_they_divide_the_questions_of_circuits(work_of_processes):
    of_two = [read_json(work_of_processes / f"circuits-{rank}.json") for rank in (0, 1)]
    for name, of_one in circuits().items():
        both = [x["circuits"][name] for x in of_two]
        assert both[0]["record"] == both[1]["record"]
        assert_near(both[0]["record"], of_one["record"])
        parts = [x["texts"] / of_one["texts"] for x in both]
        assert max(parts) < 0.6 or "one" in name
        assert sum(parts) == pytest.approx(1, abs=0.05)
    # Neither waits for what the other will never send.
    assert [x["errors"] for x in of_two] == [["the second process is out of luck"] * 3] * 2


def assert_near(found: Any, expected: Any) -> None:
    """Compare records; their numbers within the rounding of float32."""
    if isinstance(expected, dict | list):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_near(found[key], expected[key])
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def tensor_of_one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    tensorise_gated(folder)
    return folder


def check_tensor(folder: Path, single: Path) -> None:
    check_weights(single, folder)
    of_one, of_two = (read_json(run / "tensorise.json") for run in (single, folder))
    for stage, texts in of_one.items():
        assert of_two[stage]["a"] == pytest.approx(texts["a"], rel=1e-4, abs=1e-6)


def test_they_make_the_same_tensor(work_of_processes, tensor_of_one):
    check_tensor(work_of_processes / "tensor", tensor_of_one)


@pytest.mark.slow
def test_they_make_the_same_tensor_from_shares_of_the_weights(tmp_path, tensor_of_one):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run_python(*torchrun, SCRIPT, tmp_path, "sharded")
    check_tensor(tmp_path, tensor_of_one)


def test_flattened_weights_are_refused(tmp_path, monkeypatch):
    make = ResumableTrainer.__init__

    def sharded(trainer, *args, **options):
        make(trainer, *args, **options)
        trainer.is_fsdp_enabled = True

    monkeypatch.setattr(ResumableTrainer, "__init__", sharded)
    monkeypatch.setattr(Accelerator, "is_fsdp2", False)
    with pytest.raises(BilensError, match="FSDP version 1, expected version 2"):
        train_language(small_config(), small_corpus(), TRAINING, tmp_path, use_cpu=True)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_with_a_line(tmp_path):
    # Not under torchrun, which may end the other process before it can say anything.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **OWN_PATHS, **group, "MASTER_PORT": str(port)}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "killed"]
    begin = partial(subprocess.Popen, command, stderr=subprocess.PIPE, text=True)
    processes = [begin(env=env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL]
    assert "Error: Another process of this training has ended" in said[0]
    assert f"again with --resume: the newest checkpoint in {tmp_path}" in said[0]
    assert "Traceback" not in said[0]
