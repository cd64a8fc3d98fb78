"""Several processes of one thread under `torchrun`, against one process of one thread.

Contexts over a corpus, spectra of all layers, and flows of many prompts, of a model with random
weights. The time of a run is from the moment when all processes are ready. Runs of one and of
several processes take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.clock import machine
from benchmarks.subprocess_memory import random_model
from bilens.convert import write_spectra
from bilens.read.flow import flows
from bilens.read.language import TokenDirection, top_contexts
from bilens.residual import ResidualModel

TURNS, VOCAB, LAYERS, WIDTH = 5, 4096, 4, 256
TEXTS, LENGTH, DIRECTIONS, PROMPTS = 128, 256, 256, 24


def named_model() -> ResidualModel:
    """Return a bilinear model with random weights, and a tokenizer of its tokens' numbers."""
    sizes = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": 4, "d_hidden": 4 * WIDTH}
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCAB)}, "0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")
    model = random_model(vocab_size=VOCAB, n_ctx=LENGTH, **sizes).model
    return ResidualModel(model, tokenizer)


def jobs(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the calls of each process, which share the work."""
    model = named_model()
    texts = torch.randint(VOCAB, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(1))
    spectrum = model.mlp(LAYERS - 1).interaction(model.direction(3)).eigh(2)

    def spectra() -> None:
        for layer in range(LAYERS):
            directions, at = model.W_U.T[:DIRECTIONS], folder / str(layer)
            write_spectra(model.mlp(layer), directions, at, batch_size=64)

    prompts = list(texts[:PROMPTS, :8])
    return {
        f"contexts, {TEXTS} texts of {LENGTH} tokens": lambda: top_contexts(
            model, spectrum, texts, layer=LAYERS - 1, batch_size=8
        ),
        f"spectra, {LAYERS} layers, {DIRECTIONS} directions": spectra,
        f"flows, {PROMPTS} prompts of 8 tokens": lambda: flows(model, prompts, TokenDirection("3")),
    }


def work(folder: Path) -> None:
    """Run the jobs of a process; the first process prints the seconds of each as JSON."""
    state = PartialState(cpu=True)
    torch.set_num_threads(1)
    result = {}
    for name, job in jobs(folder).items():
        state.wait_for_everyone()
        start = time.perf_counter()
        job()
        state.wait_for_everyone()
        result[name] = time.perf_counter() - start
    if state.is_main_process:
        print(json.dumps(result))


def run(processes: int) -> dict[str, float]:
    """Return seconds of each job with n processes."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command += ["-m", "benchmarks.processes", "--work", folder]
        shown = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    result: dict[str, float] = json.loads(shown.splitlines()[-1])
    return result


def main() -> None:
    """Print the seconds of one process and of several, and how much faster these are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    print(machine())
    turns = [(run(1), run(given.processes)) for _ in range(TURNS)]
    print(f"| what | one process | {given.processes} processes | ratio |")
    print("|---|---|---|---|")
    for name in turns[0][0]:
        times = [(single[name], several[name]) for single, several in turns]
        single, several = (statistics.median(side) for side in zip(*times, strict=True))
        ratios = sorted(first / second for first, second in times)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        ratio = statistics.median(ratios)
        print(f"| {name} | {single:.1f} s | {several:.1f} s | {ratio:.2f} ({spread}) |")


if __name__ == "__main__":
    main()
