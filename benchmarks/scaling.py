"""Time and memory of each main operation against size, and estimates for large models.

For each operation the table has the seconds of the processor, one thread, at growing sizes. It has
the slope of their logarithms over the three largest beside the exponent by mathematics, and the
most memory above that of before. Then follow estimates for Llamas of 1, 8 and 70 billion
parameters at this machine's rate, from the largest size by those exponents. On Linux.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.clock import machine
from benchmarks.subprocess_memory import peak_above, random_model
from bilens.convert import process
from bilens.read.flow import flow
from bilens.read.language import top_contexts
from bilens.tensor import BilinearTensor, bonds

VOCAB, LENGTH, HIDDEN = 1024, 64, 3


@dataclass(frozen=True)
class Operation:
    """An operation at growing sizes.

    Attributes:
        name: in the table.
        by: the size that grows.
        sizes: its values.
        expected: the exponent of time.
        prepare: from a size to the call that is timed.
    """

    name: str
    by: str
    sizes: tuple[int, ...]
    expected: float
    prepare: Callable[[int], Callable[[], object]]


class Llama(NamedTuple):
    """A model to reckon for."""

    name: str
    parameters: float
    n_layers: int
    d_model: int
    d_hidden: int
    vocab_size: int


LLAMAS = (
    Llama("1B", 1.24e9, 16, 2048, 8192, 128_256),
    Llama("8B", 8.03e9, 32, 4096, 14_336, 128_256),
    Llama("70B", 70.6e9, 80, 8192, 28_672, 128_256),
)


def layer(width: int) -> BilinearTensor:
    """Random weights, three times as many hidden units as inputs; a chain of them stays near 1."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(HIDDEN * width, width, generator=generator) for _ in "LR")
    out = torch.randn(width, HIDDEN * width, generator=generator) * (2 / HIDDEN / width) ** 0.5
    return BilinearTensor(left / width**0.5, right / width**0.5, out)


def spectra(width: int, directions: int) -> Callable[[], object]:
    """Top eigenpairs of a layer along random directions."""
    selected = torch.randn(directions, width, generator=torch.Generator().manual_seed(1))
    return partial(layer(width).interaction(selected).eigh, 8)


def bonds_of(width: int, depth: int) -> Callable[[], object]:
    """Bonds of a deep model with ten outputs."""
    chain = [layer(width)] * depth
    return partial(bonds, chain, torch.randn(10, width))


def language(width: int, depth: int) -> dict[str, int]:
    """Sizes of a language model."""
    sizes = {"d_model": width, "n_layers": depth, "d_hidden": HIDDEN * width, "n_heads": 4}
    return {**sizes, "vocab_size": VOCAB, "n_ctx": LENGTH}


def flow_of(tokens: int, depth: int, width: int = 128) -> Callable[[], object]:
    """Return the flow of a logit, every layer split at every position."""
    model = random_model(**language(width, depth))
    return partial(flow, model, torch.arange(tokens), model.direction(3), threshold=0)


def contexts(texts: int, width: int = 128) -> Callable[[], object]:
    """Where in a corpus eigenvectors of the second of two layers are most active."""
    model = random_model(**language(width, 2))
    spectrum = model.mlp(1).interaction(model.direction(3)).eigh(4)
    ids = torch.randint(VOCAB, (texts, LENGTH), generator=torch.Generator().manual_seed(1))
    return partial(top_contexts, model, spectrum, ids, layer=1)


def processing(depth: int) -> Callable[[], object]:
    """Weight processing of a Llama of some 3.4 million parameters a layer, in place."""
    width: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=depth, **width))
    return partial(process, model.eval().requires_grad_(False), in_place=True)


OPERATIONS = {
    "spectra": Operation(
        "top 8 eigenpairs, 16 directions, hidden 3 d", "d_model", (128, 256, 512, 1024), 2,
        partial(spectra, directions=16),
    ),
    "directions": Operation(
        "top 8 eigenpairs, d_model 256", "directions", (32, 64, 128, 256), 1,
        partial(spectra, 256),
    ),
    "width": Operation(
        "bonds of three layers", "width", (64, 128, 256, 512), 3, partial(bonds_of, depth=3)
    ),
    "depth": Operation(
        "bonds, width 128", "layers", (2, 4, 6, 8), 1, partial(bonds_of, 128)
    ),
    "tokens": Operation(
        "flow, 4 layers, d_model 128", "tokens", (4, 8, 16, 32), 1, partial(flow_of, depth=4)
    ),
    "layers": Operation(
        "flow of 8 tokens, d_model 128", "layers", (2, 4, 8, 16), 1, partial(flow_of, 8)
    ),
    "corpus": Operation(
        "contexts, 2 layers, d_model 128, texts of 64 tokens", "texts", (64, 128, 256, 512), 1,
        contexts,
    ),
    "process": Operation(
        "process, Llama of width 512", "layers", (2, 4, 8, 16), 1, processing
    ),
}  # fmt: skip


def processor_seconds(call: Callable[[], object]) -> float:
    """Median of three calls; other work on the machine hardly plays a part."""
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure(operation: Operation) -> tuple[float, float]:
    """Print a row; the seconds and the MB of the largest size."""
    times, memory = [], []
    for size in operation.sizes:
        call = operation.prepare(size)
        above, taken = peak_above(partial(processor_seconds, call))
        times.append(taken)
        memory.append(above)
    sizes = [math.log(size) for size in operation.sizes[-3:]]
    slope, _ = statistics.linear_regression(sizes, [math.log(taken) for taken in times[-3:]])
    shown = ", ".join(f"{size}: {t:.3g}" for size, t in zip(operation.sizes, times, strict=True))
    print(
        f"| {operation.name} | {operation.by} | {shown} | {slope:.2f} | {operation.expected:g} | "
        f"{memory[0]:.0f} to {memory[-1]:.0f} MB |",
        flush=True,
    )
    return times[-1], memory[-1]


def hours(seconds: float) -> str:
    """Return a duration in its unit."""
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def reckon(model: Llama, taken: dict[str, float]) -> str:
    """Return a row: the measured seconds times the ratio of the operations."""
    small, rank = 1024, HIDDEN * 1024
    products = model.d_hidden * model.d_model / (rank * small)
    spectra_seconds = taken["spectra"] / 16 * products * model.vocab_size
    blocks = 2 * (4 * 128**2 + 3 * HIDDEN * 128**2)
    corpus_seconds = taken["corpus"] / (512 * LENGTH) * 1e6 * model.parameters / blocks
    # 512 x 512 for four maps of attention, 512 x 1536 for three of the MLP.
    processed = 16 * (4 * 512**2 + 3 * 512 * 1536)
    process_seconds = taken["process"] * model.parameters / processed
    factors = 4 * 3 * model.d_hidden * model.d_model / 2**30
    full = 4 * model.parameters / 2**30
    return (
        f"| {model.name} | {hours(spectra_seconds)}, {factors:.1f} GB | {hours(corpus_seconds)}, "
        f"{full:.0f} GB | {hours(process_seconds)}, {1.12 * full:.0f} GB |"
    )


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print(machine())
    print("| operation | by | seconds | slope | expected | memory above |")
    print("|---|---|---|---|---|---|")
    taken = {name: measure(operation)[0] for name, operation in OPERATIONS.items()}
    print("\nreckoned, float32; memory of the weights that are read, 1.12 times for processing")
    print("| model | spectra of one layer, all logits | contexts, 1M tokens | process |")
    print("|---|---|---|---|")
    for model in LLAMAS:
        print(reckon(model, taken))


if __name__ == "__main__":
    main()
