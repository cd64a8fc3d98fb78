"""Memory and time of readings of large Llamas that are opened with `low_memory=True`.

`python -m benchmarks.large --folder FOLDER --write` needs 16 GB there, takes ten minutes with one
thread, and writes `results/large.json`. Weights are random, in bfloat16, of the shapes of Llamas
with 1.24 and 8 billion parameters. A process of its own opens them. Private memory cannot be
dropped; the whole counts pages of the model's files too, which are dropped when memory is short.
Read is what is made float32, over all weights, in a second flow, when the model was compared with
its own pass.

`python -m benchmarks.large --circuit --folder FOLDER --write` searches the circuit of 8
questions in a model of 8 billion parameters, in half an hour of one thread, and writes
`results/large_circuit.json`. With `--diff` the answer of two such models, all of whose weights
differ, is split over their weights, in `results/large_diff.json`, with 32 GB of files. All layers
of a model have the same random weights, each in a file of its own.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from experiments.results import Recording, Row
from safetensors.torch import save_file
from tests.flows.test_precision import Widened
from transformers import LlamaConfig, LlamaForCausalLM

import bilens
from bilens.circuits import circuit
from bilens.flows import Question, flow
from bilens.tensor import BilinearTensor, Spectrum
from bilens.transformer import ResidualModel

SHAPES = {
    1.24: {"d_model": 2048, "d_hidden": 8192, "layers": 16, "tied": True},
    8: {"d_model": 4096, "d_hidden": 14336, "layers": 32, "tied": False},
}
"""Shapes of Llama 3.2 1B and Llama 3.1 8B, by billions of parameters."""
LOGITS, EIGENPAIRS, TOKENS, QUESTIONS = 4, 8, 8, 8
MODELS = ("base", "tuned")
"""Folders of two models, whose weights have these numbers as seeds."""


def write(shape: dict[str, int], folder: Path, *, repeated: bool = False, seed: int = 0) -> None:
    """Write random weights, a layer at a time; with `repeated` those of the first in all layers."""
    config = LlamaConfig(
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=bool(shape["tied"]),
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config).named_parameters()}
    config.save_pretrained(folder)
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, size in shapes.items():
        groups.setdefault(".".join(name.split(".")[:3]), {})[name] = size
    files: dict[str, str] = {}
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for number, group in enumerate(groups.values()):
        file = f"model-{number:05}.safetensors"
        if repeated and ".layers." in next(iter(group)) and len(weights) == len(group):
            weights = dict(zip(group, weights.values(), strict=True))
        else:
            weights = {name: _random(size, generator) for name, size in group.items()}
        save_file(weights, folder / file, {"format": "pt"})
        files |= dict.fromkeys(group, file)
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _random(size: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    # Uniform numbers are drawn ten times as fast as normal ones.
    weight = torch.empty(size).uniform_(-1, 1, generator=generator)
    return weight.mul_((3 / size[-1]) ** 0.5).bfloat16()


class Peak:
    """The largest private and whole memory of this process since `start`, read by a thread."""

    def __init__(self) -> None:
        self.start()
        threading.Thread(target=self._look, daemon=True).start()

    def start(self) -> None:
        """Begin again."""
        self.private = self.whole = 0.0

    def _look(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            status = dict(line.split(":", 1) for line in lines)
            self.private = max(self.private, int(status["RssAnon"].split()[0]) / 1024**2)
            self.whole = max(self.whole, int(status["VmRSS"].split()[0]) / 1024**2)
            time.sleep(0.02)


def spectra(model: Any, layer: int) -> Spectrum:
    """Return the top eigenpairs of a layer for some directions, its gate taken as linear."""
    mlp = model.model.model.layers[layer].mlp
    weights = (x.weight.float() for x in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    directions = torch.randn(LOGITS, model.d_model, generator=torch.Generator().manual_seed(0))
    return BilinearTensor(*weights).interaction(directions).eigh(EIGENPAIRS)


def measured(peak: Peak, name: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns, and print a line of JSON: name, seconds, private and whole GB."""
    peak.start()
    start = time.process_time()
    result = call()
    seconds = time.process_time() - start
    print(json.dumps([name, seconds, peak.private, peak.whole]), flush=True)
    return result


def questions(model: Any) -> list[Question]:
    """Return questions that the model answers: texts of random tokens that differ in the third."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(100, 1000, (QUESTIONS, TOKENS), generator=generator)
    others = texts.clone()
    others[:, 2] += 50
    first, second = (model.logits(ids)[:, -1] for ids in (texts, others))
    tokens, minus = first.argmax(-1).tolist(), (second - first).argmax(-1).tolist()
    return [Question(*x, template="random") for x in zip(texts, tokens, minus, others, strict=True)]


def read_circuit(folder: Path) -> None:
    """Print the lines of a search of the circuit of some questions, as `read` does."""
    model = bilens.load(folder, low_memory=True)
    asked = questions(model)
    with Widened() as widened:
        name = f"circuit of {QUESTIONS} questions of {TOKENS} tokens"
        measured(Peak(), name, lambda: circuit(model, asked))
    print_read(f"{name}: read over all weights", model, widened)


def read_diff(folder: Path) -> None:
    """Print the lines of what tuning changed, as `read` does."""
    base, tuned = (bilens.load(folder / name, low_memory=True) for name in MODELS)
    assert isinstance(base, ResidualModel)
    assert isinstance(tuned, ResidualModel)
    ids = torch.arange(TOKENS) + 100
    with Widened() as widened:
        name = f"what tuning changed, one question of {TOKENS} tokens"
        measured(Peak(), name, lambda: bilens.diff(base, tuned, ids, "[5]", "[7]"))
    print_read(f"{name}: read over all weights of one model", base, widened)


def print_read(name: str, model: Any, widened: Widened) -> None:
    """Print a line of what was made float32 over all weights."""
    weights = sum(parameter.numel() for parameter in model.model.parameters())
    print(json.dumps([name, widened.count / weights, None, None]), flush=True)


def read(folder: Path) -> None:
    """Print a line for each reading."""
    peak = Peak()
    model = measured(
        peak, "load, every weight checked", lambda: bilens.load(folder, low_memory=True)
    )
    layer, ids = model.n_layers // 2, torch.arange(TOKENS) + 100
    pairs = f"top {EIGENPAIRS} eigenpairs of {LOGITS} logits, one layer"
    measured(peak, pairs, lambda: spectra(model, layer))
    measured(peak, "OV and QK of all heads of a layer", lambda: (model.ov(layer), model.qk(layer)))
    other = ids.clone()
    other[2] += 50
    between = partial(flow, model, ids, model.direction(5), against=other, labels=0)
    measured(peak, f"flow between two texts of {TOKENS} tokens, the first", between)
    with Widened() as widened:
        measured(peak, f"flow between two texts of {TOKENS} tokens", between)
    print_read("read over all weights", model, widened)


ONLY = {"circuit": read_circuit, "diff": read_diff}
"""What is read at 8 billion weights alone, by the name of its option."""
TITLES = {
    "circuit": "A circuit in a model of 8 billion weights in files",
    "diff": "What tuning changed, in two models of 8 billion weights in files",
}


def main() -> None:
    """Write each model and read it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="where there is room")
    parser.add_argument("--billions", type=float, nargs="*", default=list(SHAPES))
    parser.add_argument("--read", type=Path, help="a folder to read in this process")
    for name in ONLY:
        parser.add_argument(
            f"--{name}", dest="only", action="store_const", const=name, help="at 8 billion, alone"
        )
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.read:
        (ONLY[given.only] if given.only else read)(given.read)
        return
    recording, rows = Recording() if given.write else None, []
    flags = [f"--{given.only}"] if given.only else []
    for billions in [8] if given.only else given.billions:
        with TemporaryDirectory(dir=given.folder) as folder:
            for seed, name in enumerate(MODELS if given.only == "diff" else [""]):
                inside = Path(folder) / name
                write(SHAPES[billions], inside, repeated=bool(given.only), seed=seed)
            command = [sys.executable, "-m", "benchmarks.large", *flags, "--read", folder]
            lines = subprocess.check_output(command, text=True).splitlines()
        for name, seconds, private, whole in map(json.loads, lines):
            memory = {"private GB": private, "whole GB": whole} if private else {}
            claim = f"{billions:g} billion parameters: {name}"
            rows.append(Row(claim, seconds, unit="s" * bool(memory), baselines=memory))
            print(rows[-1], flush=True)
    if recording is not None:
        of_all = {"tokens": TOKENS, "seconds": "of the processor"}
        if given.only:
            recording.write(
                f"large_{given.only}",
                title=TITLES[given.only],
                command=f"python -m benchmarks.large --{given.only} --write",
                rows=rows,
                settings={"layers": "all of a model with the same weights", **of_all},
            )
            return
        recording.write(
            "large",
            title="Memory and time of large models",
            command="python -m benchmarks.large --write",
            rows=rows,
            settings={
                "parameters, billions": given.billions,
                "eigenpairs": EIGENPAIRS,
                "logits": LOGITS,
                **of_all,
            },
        )


if __name__ == "__main__":
    main()
