"""Time and memory of each main operation against size.

For each operation the table has the seconds of the processor, one thread, at growing sizes. It has
the slope of their logarithms over the three largest beside the exponent by mathematics, and the
most memory above that of before. On Linux. It writes `results/scaling.json`.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from experiments.results import Recording, Row

from benchmarks.subprocess_memory import peak_above
from bilens.flows import flow
from bilens.language import top_contexts
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.tensor import BilinearTensor, bonds
from bilens.transformer import ResidualModel

VOCAB, LENGTH, HIDDEN, TURNS = 1024, 64, 3, 3


class Operation(NamedTuple):
    """An operation at growing sizes of one kind, with the exponent by mathematics.

    `prepare` makes the call that is timed from a size.
    """

    name: str
    by: str
    sizes: tuple[int, ...]
    expected: float
    prepare: Callable[[int], Callable[[], object]]


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


def bonds_of(width: int) -> Callable[[], object]:
    """Bonds of three layers with ten outputs."""
    chain = [layer(width)] * 3
    return partial(bonds, chain, torch.randn(10, width))


def language(depth: int) -> ResidualModel:
    """Return a language model of width 128 with random weights."""
    torch.manual_seed(0)
    config = LanguageConfig(
        vocab_size=VOCAB,
        d_model=128,
        n_layers=depth,
        n_heads=4,
        d_hidden=HIDDEN * 128,
        n_ctx=LENGTH,
    )
    return ResidualModel(LanguageModel(config).requires_grad_(False))


def flow_of(tokens: int) -> Callable[[], object]:
    """Return the flow of a logit."""
    model = language(4)
    return partial(flow, model, torch.arange(tokens), model.direction(3), ablate=0)


def contexts(texts: int) -> Callable[[], object]:
    """Where in a corpus eigenvectors of the second of two layers are most active."""
    model = language(2)
    spectrum = model.mlp(1).interaction(model.direction(3)).eigh(4)
    ids = torch.randint(VOCAB, (texts, LENGTH), generator=torch.Generator().manual_seed(1))
    return partial(top_contexts, model, spectrum, ids, layer=1)


OPERATIONS = (
    Operation(
        "top 8 eigenpairs, 16 directions, hidden 3 d", "d_model", (128, 256, 512, 1024), 2,
        partial(spectra, directions=16),
    ),
    Operation(
        "top 8 eigenpairs, d_model 256", "directions", (32, 64, 128, 256), 1, partial(spectra, 256)
    ),
    Operation("bonds of three layers", "width", (64, 128, 256, 512), 3, bonds_of),
    Operation("flow, 4 layers, d_model 128", "tokens", (4, 8, 16, 32), 1, flow_of),
    Operation(
        "contexts, 2 layers, d_model 128, texts of 64 tokens", "texts", (64, 128, 256, 512), 1,
        contexts,
    ),
)  # fmt: skip


def processor_seconds(call: Callable[[], object]) -> float:
    """Median of several calls; other work on the machine hardly plays a part."""
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure(operation: Operation) -> Row:
    """Return the seconds at the largest size, and how they and the memory grow."""
    times, memory = [], []
    for size in operation.sizes:
        call = operation.prepare(size)
        above, taken = peak_above(partial(processor_seconds, call))
        times.append(taken)
        memory.append(above)
    sizes = [math.log(size) for size in operation.sizes[-3:]]
    slope, _ = statistics.linear_regression(sizes, [math.log(taken) for taken in times[-3:]])
    row = Row(
        f"{operation.name}, {operation.sizes[-1]} {operation.by}",
        times[-1],
        n=TURNS,
        unit="s",
        baselines={
            **{"slope of the logarithm": slope, "by mathematics": operation.expected},
            **{"MB, least size": memory[0], "MB": memory[-1]},
        },
    )
    print(row, flush=True)
    return row


def main() -> None:
    """Measure all operations, print and write them."""
    torch.set_num_threads(1)
    recording = Recording()
    recording.write(
        "scaling",
        title="Growth of time and memory",
        command="python -m benchmarks.scaling",
        rows=[measure(operation) for operation in OPERATIONS],
        settings={
            "sizes": {operation.name: operation.sizes for operation in OPERATIONS},
            "weights": "random, float32",
        },
    )


if __name__ == "__main__":
    main()
