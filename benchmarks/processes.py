"""Readings of a layer of the shape of Llama 3 8B in one process and in two: memory, and equality.

Random weights in bfloat16 are written to a folder and read from there, mapped and not copied. Each
process takes its share of the directions whose eigenpairs are sought, and of the texts in which
they are looked up. `--write` makes `results/processes.json`. On Linux.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import bilens
from bilens.convert import read_spectra, write_spectra
from bilens.files import write_json
from bilens.processes import this_process
from bilens.read.language import top_contexts

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_768,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "hidden_act": "linear",
}
LAYER, K, TEXTS, LENGTH = 1, 4, 8, 16
DIRECTIONS = [222, 17_777]


def write_model(folder: Path) -> int:
    """Write a model of random weights; return its bytes."""
    config = LlamaConfig(**SHAPE)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, like in model.named_parameters():
        weight = torch.empty(like.shape, dtype=torch.bfloat16)
        if like.ndim == 1:
            # Gains that decay give spectra that do, as those of trained layers, and fewer steps.
            weights[name] = weight.copy_((1 + torch.arange(len(like)) / 16).rsqrt())
        else:
            weights[name] = weight.normal_(std=like.shape[-1] ** -0.5, generator=generator)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    return path.stat().st_size


def memory(name: str) -> float:
    """Return a line of this process's status, in GB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def work(folder: Path, output: Path) -> None:
    """Do the share of this process, and write what it holds and has found."""
    state = this_process(cpu=True)
    model: Any = bilens.load(folder, low_memory=True)
    write_spectra(
        model.mlp(LAYER),
        model.parts.logit_weights(torch.tensor(DIRECTIONS))[0].T,
        output,
        names=DIRECTIONS,
        k=K,
        batch_size=1,
    )
    peak = memory("VmHWM")
    state.wait_for_everyone()
    _, spectrum = read_spectra(output)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(SHAPE["vocab_size"], (TEXTS, LENGTH), generator=generator)
    contexts = top_contexts(model, spectrum[0], texts, layer=LAYER, k=2, batch_size=2)
    write_json(
        output / f"process-{state.process_index}.json",
        {
            "peak of spectra": peak,
            "peak": memory("VmHWM"),
            "own": memory("RssAnon"),
            "files": sorted(path.name for path in output.glob("spectra-*")),
            "contexts": [
                [[c.position, c.activation, c.ids.tolist()] for c in several]
                for several in contexts
            ],
        },
    )


def run(folder: Path, output: Path, processes: int) -> list[dict[str, Any]]:
    """Run as many processes of `torchrun`; return what each wrote."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = ["--nproc_per_node", str(processes), "-m", "benchmarks.processes"]
    subprocess.run([*start, *worker, "--work", str(folder), str(output)], check=True)
    paths = sorted(output.glob("process-*.json"))
    return [json.loads(path.read_text("utf-8")) for path in paths]


def main() -> None:
    """Print the memory of each process, and the largest differences between one and two."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, nargs=2)
    parser.add_argument("--write", action="store_true", help="write results/processes.json")
    given = parser.parse_args()
    if given.work:
        work(*given.work)
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        size = write_model(place / "model") / 2**30
        outputs = [place / "one", place / "two"]
        (alone,), both = (run(place / "model", x, n + 1) for n, x in enumerate(outputs))
        names = sorted(path.name for path in outputs[0].glob("spectra-*.safetensors"))
        equal = all(
            torch.equal(one, load_file(outputs[1] / name)[key])
            for name in names
            for key, one in load_file(outputs[0] / name).items()
        )
    off, same = 0.0, True
    for first, second in zip(alone["contexts"], both[0]["contexts"], strict=True):
        for one, two in zip(first, second, strict=True):
            same &= one[0] == two[0] and one[2] == two[2]
            off = max(off, abs(one[1] - two[1]) / abs(one[1]))
    peaks = "; ".join(f"{process['peak']:.2f} GB" for process in both)
    own = "; ".join(f"{process['own']:.2f} GB" for process in both)
    numbers = {
        "weights in their file": (f"{size:.2f} GB", ""),
        "largest memory of each of two processes": (peaks, f"one process: {alone['peak']:.2f} GB"),
        "of it not mapped from files, at the end": (own, f"one process: {alone['own']:.2f} GB"),
        "eigenpairs of 2 directions, bit for bit": ("equal" if equal else "DIFFERENT", ""),
        "contexts of 4 eigenvectors: texts and positions": ("equal" if same else "DIFFERENT", ""),
        "their activations, largest relative difference": (f"{off:.1e}", ""),
    }
    rows = [
        {"claim": claim, "number": number, "spread": "", "baseline": baseline}
        for claim, (number, baseline) in numbers.items()
    ]
    for row in rows:
        print(*row.values(), sep=" | ")
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    result = {
        "title": "Readings in two processes",
        "command": "python -m benchmarks.processes --write",
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"2 cores, no GPU, torch {torch.__version__.partition('+')[0]}",
        "seeds": "0",
        "note": "Two layers of the shape of Llama 3 8B (d 4,096, hidden 14,336, 32 heads of 128, 8 "
        "of keys), bfloat16. Each process maps the weights, and pages are shared.",
        "rows": rows,
    }
    if given.write:
        write_json(Path("results/processes.json"), result)


if __name__ == "__main__":
    main()
