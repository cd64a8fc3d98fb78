"""The work of each of two processes, see test_two_processes.py, and kills, see test_kills.py.

They are forks of one process, whose imports take longer; a second argument names other work.
"""

import atexit
import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

import bilens.cli
from bilens.circuits import Cases, case, circuit, cuts
from bilens.errors import BilensError
from bilens.files import write_json
from bilens.flows import Question, flow_table
from bilens.processes import this_process
from bilens.sections import plain
from bilens.train.language import train_language
from bilens.train.linearise import anneal
from bilens.train.settings import LanguageTraining
from bilens.train.tensorise import tensorise
from bilens.train.trainer import ResumableTrainer
from tests.circuits.test_circuit_reading import MANY
from tests.families import family_view, tiny
from tests.flows.flows import answered
from tests.models import TOKENS, small_config, small_corpus
from tests.train import kill_attack
from tests.train import test_anneal as annealing
from tests.train import test_tensorise as tensors
from tests.train.runs import press_ctrl_c

ASKED = [Question(f"t{i} t4 t5", "t6", "t7", f"t{i} t8 t5") for i in range(3, 10)]
CIRCUITS: dict[str, dict[str, Any]] = {
    "stages": {"controls": True},
    "parts": {"level": "parts", "keep": 0.6},
    "one": {"level": "parts"},
    "one stages": {},
}
"""Of some questions, or of a single one, which is fewer than processes: options."""
TRAINING = LanguageTraining(epochs=2, batch_size=8, learning_rate=1e-2)


def write_threads(path: Path) -> None:
    """Write the names of all threads, those of libraries included, where Linux lists them."""
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            names.append(file.read_text().strip())
    write_json(path, names)


def train_preset(folder: Path) -> None:
    """Train the largest preset through the command line, cut to a size for tests."""
    small = ["--n-layers", "2", "--d-model", "18", "--d-hidden", "20", "--n-ctx", "16"]
    brief = ["--batch-size", "8", "--accumulate", "2", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 100)
        command = ["train", "language", "--preset", "500m", "--output", str(folder)]
        bilens.cli.main([*command, *small, *brief])


def anneal_gated(folder: Path) -> None:
    anneal(annealing.fresh(), annealing.corpus(), annealing.TRAINING, folder, use_cpu=True)


def tensorise_gated(folder: Path) -> None:
    """Turn a small model into a tensor: all three stages, two steps each."""
    model = tiny("llama", dtype=torch.float32).requires_grad_()
    brief = {"layer_steps": 2, "pattern_steps": 2, "tokens": 2 * 2 * tensors.TIME, "save_every": 1}
    settings = replace(tensors.SMALL, **brief)
    tensorise(model, TOKENS, {"a": tensors.texts()}, settings, folder, use_cpu=True)


def interrupt_one(folder: Path) -> None:
    """Interrupt the second process alone, in the middle of a training, and resume in both."""
    train = partial(train_language, small_config(), small_corpus(), TRAINING, folder, use_cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        if this_process().process_index == 1:
            press_ctrl_c(patch, ResumableTrainer, "training_step", 3)
        with pytest.raises(KeyboardInterrupt):
            train()
    train(resume=True)


def work(folder: Path) -> None:
    # Functions that are registered later, such as that which leaves the group, run before it.
    atexit.register(write_threads, folder / f"threads-{this_process().process_index}.json")
    train_language(small_config(), small_corpus(), TRAINING, folder, use_cpu=True)
    interrupt_one(folder / "interrupted")
    train_preset(folder / "preset")
    anneal_gated(folder / "annealed")
    tensorise_gated(folder / "tensor")
    write_table(folder)
    write_circuits(folder)


def write_table(folder: Path) -> None:
    """Write the flows of some questions, and what this process returns of them."""
    found = flow_table(family_view("llama", dtype=torch.float32), ASKED, folder / "rows", shard=2)
    write_json(folder / f"table-{this_process().process_index}.json", found.record())


def circuits() -> dict[str, Any]:
    """Return circuits of texts of two lengths and two templates, and how many texts each ran."""
    view, found, texts = family_view("llama", dtype=torch.float32), {}, list[int]()
    view.model.register_forward_pre_hook(
        lambda _, args, given: texts.append(len(given.get("input_ids", *args))), with_kwargs=True
    )
    longer = [replace(q, text=f"t1 {q.text}", against=f"t1 {q.against}") for q in MANY]
    questions = answered(view, [*MANY, *(replace(q, template="longer") for q in longer)])
    for name, options in CIRCUITS.items():
        asked = questions[:1] if name.startswith("one") else questions
        record = plain(circuit(view, asked, **options).record())
        found[name] = {"record": record, "texts": sum(texts)}
        texts.clear()
    return found


def write_circuits(folder: Path) -> None:
    """Write what this process returns of circuits, and which errors of the second one it raises."""
    own: dict[str, Any] = {"circuits": circuits(), "errors": []}
    view, process = family_view("llama", dtype=torch.float32), this_process().process_index

    def fail(*_: Any) -> None:
        raise BilensError("the second process is out of luck")

    for owner, name in ((case, "both_passes"), (Cases, "rises"), (cuts, "_rises")):
        with pytest.MonkeyPatch.context() as patch:
            if process == 1:
                patch.setattr(owner, name, fail)
            try:
                circuit(view, answered(view, MANY))
            except BilensError as error:
                own["errors"].append(str(error))
    write_json(folder / f"circuits-{process}.json", own)


def sharded(folder: Path) -> None:
    """Share out the weights on the CPU, as torch can; accelerate is told of a GPU for each."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    enter, train = PartialState.__init__, ResumableTrainer.train

    def with_gpu(state, *args, **options):
        enter(state, *args, **options)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    def on_shares(trainer, **options):
        # After a validation the weights are whole again, until the next step.
        assert trainer.is_fsdp_enabled
        return train(trainer, **options)

    PartialState.__init__, ResumableTrainer.train = with_gpu, on_shares
    tensorise_gated(folder)


def killed(folder: Path) -> None:
    """Train until the second process is killed."""
    step = ResumableTrainer.training_step

    def last_step(trainer, *args, **options):
        if trainer.state.global_step == 3 and this_process().process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer, *args, **options)

    ResumableTrainer.training_step = last_step
    try:
        train_language(small_config(), small_corpus(), TRAINING, folder, use_cpu=True)
    except BilensError as error:
        sys.exit(f"Error: {error}")


def in_two_forks(folder: Path) -> int:
    """Do the work in two forks, which have what torchrun tells its processes; return a status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(group, MASTER_PORT=str(port))
    running = set()
    for rank in ("0", "1"):
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        child = os.fork()
        if child == 0:
            signal.alarm(900)  # ends a deadlock, in place of the suite's time
            work(folder)
            return 0
        running.add(child)
    status = 0
    while running:
        ended, outcome = os.wait()
        running.remove(ended)
        if outcome and not status:
            status = 1
            for other in running:  # which would wait for it
                os.kill(other, signal.SIGKILL)
    return status


def attack(folder: Path) -> None:
    kill_attack.write_outcomes(293, folder / "kills", "classifier", "language")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    gc.freeze()
    if sys.argv[2:]:
        sys.exit({"sharded": sharded, "killed": killed}[sys.argv[2]](place))
    sys.exit(kill_attack.in_a_fork(lambda: attack(place)) or in_two_forks(place))
