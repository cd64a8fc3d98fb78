"""Memory and time of readings of a large Llama with `bilens.load(..., low_memory=True)`.

`python -m benchmarks.low_memory 8B --layers 4` writes random weights of that shape in bfloat16 to a
folder. A process of its own opens it and reads a layer's spectra, its heads and a flow. Private
memory cannot be dropped. All other pages are of files, dropped when memory is short.
"""

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import bilens
from benchmarks.clock import machine
from benchmarks.scaling import LLAMAS, Llama
from bilens.files import write_json
from bilens.residual import ResidualModel
from bilens.tensor import BilinearTensor, Spectrum

HEADS = {"1B": (32, 8), "8B": (32, 8), "70B": (64, 8)}
"""Heads of queries, and of keys and values."""


def write(model: Llama, folder: Path, layers: int) -> None:
    """Write random weights, a layer at a time."""
    heads, kv_heads = HEADS[model.name]
    config = LlamaConfig(
        hidden_size=model.d_model,
        intermediate_size=model.d_hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.name == "1B",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config).named_parameters()}
    config.save_pretrained(folder)
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        groups.setdefault(".".join(name.split(".")[:3]), {})[name] = shape
    index: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, group in enumerate(groups.values()):
        file = f"model-{number:05}.safetensors"
        weights = {name: _weight(shape, generator) for name, shape in group.items()}
        save_file(weights, folder / file, {"format": "pt"})
        index |= dict.fromkeys(group, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _weight(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    # Uniform numbers are drawn ten times as fast as normal ones.
    weight = torch.empty(shape).uniform_(-1, 1, generator=generator)
    return weight.mul_((3 / shape[-1]) ** 0.5).bfloat16()


class Peak:
    """The largest private and resident memory of this process so far, in GB, read by a thread."""

    def __init__(self) -> None:
        self.private = self.resident = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            status = dict(line.split(":", 1) for line in lines)
            self.private = max(self.private, int(status["RssAnon"].split()[0]) / 2**20)
            self.resident = max(self.resident, int(status["VmRSS"].split()[0]) / 2**20)
            time.sleep(0.02)


def spectra(model: ResidualModel, number: int, logits: int = 4) -> Spectrum:
    """Top eigenpairs of a layer for some logits, its gate taken as linear."""
    module = model.model.model.layers[number].mlp
    left, right, out = (
        x.weight.float() for x in (module.gate_proj, module.up_proj, module.down_proj)
    )
    directions = model.parts.embed.rows(torch.arange(logits))
    return BilinearTensor(left, right, out).interaction(directions).eigh(8)


def read(folder: Path, *, tokens: int) -> None:
    """Print a row for each reading: seconds of the processor, and both peaks."""
    peak = Peak()

    def row(name: str, call: Callable[[], object]) -> object:
        peak.private = peak.resident = 0
        start = time.process_time()
        result = call()
        took = time.process_time() - start
        print(f"| {name} | {took:.1f} | {peak.private:.2f} | {peak.resident:.2f} |", flush=True)
        return result

    import_module("bilens.read.flow")
    model: Any = row("load", lambda: bilens.load(folder, low_memory=True))
    layer = model.n_layers // 2
    row("top 8 eigenpairs of 4 logits", lambda: spectra(model, layer))
    row("OV and QK of a layer's heads", lambda: (model.ov(layer), model.qk(layer)))
    ids = torch.arange(tokens) + 100
    row(f"flow of {tokens} tokens", lambda: bilens.flow(model, ids, model.direction(5)))


def main() -> None:
    """Write a model and read it, or read one in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted(HEADS))
    parser.add_argument("--layers", type=int, help="all by default")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(), help="where there is room")
    parser.add_argument("--read", type=Path, help="a folder that is there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.read:
        read(given.read, tokens=given.tokens)
        return
    model = next(model for model in LLAMAS if model.name == given.model)
    print(machine())
    with TemporaryDirectory(dir=given.folder) as folder:
        write(model, Path(folder), given.layers or model.n_layers)
        print("| reading | s of the processor | private GB at most | GB at most |", flush=True)
        command = [sys.executable, "-m", "benchmarks.low_memory", given.model, "--read", folder]
        subprocess.run([*command, "--tokens", str(given.tokens)], check=True)


if __name__ == "__main__":
    main()
