"""Texts a second through a model, one by one and in batches: passes, and contexts of eigenvectors.

`python -m benchmarks.texts FILE` takes random tokens, in contexts of 8 to 32 and in passes of 32.
Times are the processor's on a CPU, beside which other work may run. On a GPU they are wall time.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch

import bilens
from benchmarks.clock import machine, spent
from bilens.language import top_contexts
from bilens.tensor import BilinearTensor
from bilens.transformer import Pass, ResidualModel

TEXTS, LEAST, MOST, TURNS = 32, 8, 32, 3
SIZES = (1, 4, 16, 32)


def texts_of(model: ResidualModel) -> list[torch.Tensor]:
    """Return texts of random tokens and lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LEAST, MOST + 1, (TEXTS,), generator=generator).tolist()
    return [torch.randint(model.vocab_size, (n,), generator=generator) for n in lengths]


def main() -> None:
    """Print texts a second by the size of a batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = bilens.load(given.model)
    assert isinstance(model, ResidualModel)
    if torch.cuda.is_available():
        model.to("cuda")
    texts, layer = texts_of(model), model.n_layers - 1
    width = model.d_model
    form = BilinearTensor(torch.eye(width), torch.eye(width), torch.randn(width, width))
    spectrum = form.interaction(model.direction(5).cpu()).eigh(4)

    of_one_length = torch.randint(model.vocab_size, (TEXTS, MOST))

    def passes(size: int) -> None:
        for batch in of_one_length.split(size):
            Pass.of(model, batch, patterns=True)

    def contexts(size: int) -> None:
        top_contexts(model, spectrum, texts, layer=layer, batch_size=size)

    print(machine())
    print(f"{given.model.name}, {TEXTS} texts of {LEAST} to {MOST} tokens, medians of {TURNS}")
    for name, call in (("passes", passes), ("contexts", contexts)):
        call(SIZES[-1])
        turns = [[spent(partial(call, size)) for size in SIZES] for _ in range(TURNS)]
        for size, column in zip(SIZES, zip(*turns, strict=True), strict=True):
            ratios = [turn[0] / taken for turn, taken in zip(turns, column, strict=True)]
            print(
                f"{name:9} in batches of {size:3} {TEXTS / statistics.median(column):8.1f} texts/s"
                f" {statistics.median(ratios):6.2f} times ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
