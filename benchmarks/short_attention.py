"""Bilinear attention of short texts on the CPU beside four plain lines of torch.

    python -m benchmarks.short_attention --write

Of so few tokens the arithmetic takes so little that checks of arguments and copies would be seen. A
ratio is the median of turns, in each of which both sides run one after the other, in seconds of one
core.
"""

import argparse
from collections.abc import Callable

import torch
from experiments.results import Recording, Row
from torch import Tensor

from benchmarks.clock import spent
from bilens.kernels import bilinear_attention

SIZES = ((128, 16), (256, 16), (512, 32), (1024, 64))
"""Tokens and coordinates of a head."""
TURNS, TURN = 15, 0.1
"""Turns, and seconds that each side of one takes."""
Attention = Callable[..., Tensor]


def plain(q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    """Return bilinear attention in four lines: no checks, and no other kernel for long texts."""
    first = q1 @ k1.mT
    second = q2 @ k2.mT
    pattern = (first * second).tril()
    return pattern @ v * q1.shape[-1] ** -2


def forward(attention: Attention, given: list[Tensor]) -> None:
    """Run attention without gradients."""
    with torch.no_grad():
        attention(*given)


def both_ways(attention: Attention, given: list[Tensor]) -> None:
    """Run attention and its backward pass."""
    torch.autograd.grad(attention(*given).sum(), given)


def ratios(run: Callable[..., None], given: list[Tensor]) -> tuple[list[float], float]:
    """Return the ratio of each turn, and milliseconds of the plain lines."""
    run(bilinear_attention, given)
    run(plain, given)
    repeats = max(1, round(TURN / spent(lambda: run(plain, given))))

    def many(attention: Attention) -> None:
        for _ in range(repeats):
            run(attention, given)

    turns = [(spent(lambda: many(bilinear_attention)), spent(lambda: many(plain)))
             for _ in range(TURNS)]  # fmt: skip
    least = min(below for _, below in turns)
    return [above / below for above, below in turns], 1e3 * least / repeats


def main() -> None:
    """Print the ratios, and write them where asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="to results/short_attention.json")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recording = Recording() if wanted.write else None
    rows = []
    for time, width in SIZES:
        given = [torch.randn(1, 1, time, width, requires_grad=True) for _ in range(5)]
        for name, run in (("forward", forward), ("both ways", both_ways)):
            found, least = ratios(run, given)
            claim = f"{time} tokens, d_head {width}, {name}: time over that of plain lines"
            rows.append(Row.of_range(claim, found, baselines={"plain lines, milliseconds": least}))
            print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "short_attention",
            title="Attention of short texts",
            command="python -m benchmarks.short_attention --write",
            rows=rows,
            settings={
                **{"tokens and d_head": SIZES, "heads": 1, "dtype": "float32", "turns": TURNS},
                "low and high": "least and most of the turns",
            },
        )


if __name__ == "__main__":
    main()
