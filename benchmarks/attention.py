"""Bilinear attention on the CPU: chunked against the whole pattern, softmax and longer texts.

Each ratio is the median of several turns, with the least and the most of them. In a turn both sides
are timed one after the other. `python -m benchmarks.attention` writes `results/attention.json`.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from experiments.results import Recording, Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import by_turns, seconds
from bilens.kernels import bilinear_attention, resume_attention

LENGTH, TURNS, WIDTH, HEADS = 8192, 7, 32, 4
SHORT = 16
"""Tokens for each dimension of a head from which on `kernel="auto"` takes chunks on a CPU."""
WIDTHS = (16, 32, 64, 128)
LENGTHS, FLAT, DECODED = (2048, 4096, 8192, 16384), (4096, 65536), (1024, 65536)
"""Tokens of texts beside softmax, of the shortest and the longest text, and before a token."""
FORWARD = {32: 25.0, 64: 8.0}
"""Least ratio of the whole pattern's time to that of chunks, by d_head."""


def inputs(length: int, width: int, heads: int = 1) -> list[Tensor]:
    """Return q1, k1, v, q2 and k2; of one head if the pattern has to fit into memory."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, width, generator=generator) for _ in range(5)]


def both_ways(kernel: Any, given: list[Tensor]) -> None:
    """Forward and backward."""
    for x in given:
        x.grad = None
    bilinear_attention(*given, kernel=kernel).sum().backward()


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that tensors of a call held at once, as torch's profiler counts it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def ratios(above: Callable[[], object], below: Callable[[], object]) -> list[float]:
    """Ratio of the times of two calls, in turns, after a first one of each that does not count."""
    above(), below()
    return [first / second for first, second in by_turns(above, below, turns=TURNS)]


def row(what: str, result: list[float], reached: Callable[[float], bool] | None = None) -> Row:
    """Return and print a ratio of each turn, and whether the median reached an aim."""
    held = None if reached is None else reached(statistics.median(result))
    print(stated := replace(Row.of_range(what, result), held=held), flush=True)
    return stated


def whole_over_chunks(
    length: int, width: int, heads: int, reached: Callable[[float], bool]
) -> list[Row]:
    """Return the whole pattern's time as a multiple of that of chunks."""
    given, rows = inputs(length, width, heads), []
    for name, selected in (("two scores", given), ("squared", given[:3])):
        full, parts = (
            partial(bilinear_attention, *selected, kernel=kernel)
            for kernel in ("reference", "chunked")
        )
        what = f"{length} tokens, d_head {width}, {heads} heads, {name}: whole pattern over chunks"
        rows.append(row(what, ratios(full, parts), reached))
    return rows


def forward() -> list[Row]:
    """Return that ratio for a long text."""
    found = (whole_over_chunks(LENGTH, width, 1, floor.__le__) for width, floor in FORWARD.items())
    return [*chain.from_iterable(found)]


def softmax() -> list[Row]:
    """Return the time of torch's fused causal attention as a multiple of that of chunks."""
    rows = []
    for length in LENGTHS:
        q1, k1, v, q2, k2 = inputs(length, WIDTH, HEADS)
        fused = partial(scaled_dot_product_attention, q1, k1, v, is_causal=True)
        parts = partial(bilinear_attention, q1, k1, v, q2, k2, kernel="chunked")
        rows.append(row(f"{length} tokens: softmax over chunks", ratios(fused, parts)))
    return rows


def crossing() -> list[Row]:
    """Return that ratio at the length at which `kernel="auto"` changes."""
    found = (
        whole_over_chunks(SHORT * width, width, HEADS, lambda ratio: 0.5 < ratio < 2)
        for width in WIDTHS
    )
    return [*chain.from_iterable(found)]


def training() -> list[Row]:
    """Return time and memory of forward and backward."""
    given, rows = [x.requires_grad_() for x in inputs(LENGTH, 64)], []
    for name, selected in (("two scores", given), ("squared", given[:3])):
        full, parts = (partial(both_ways, kernel, selected) for kernel in ("reference", "chunked"))
        what = f"both ways, {name}: whole pattern over chunks"
        rows.append(row(f"{what}, time", ratios(full, parts), (5.0).__le__))
        memory = [peak_bytes(full) / peak_bytes(parts)]
        rows.append(row(f"{what}, memory", memory, (10.0).__le__))
    return rows


def flatness() -> list[Row]:
    """Return the cost per token of the longest text over that of the shortest."""
    short, long = (
        partial(bilinear_attention, *inputs(length, WIDTH, HEADS), kernel="chunked")
        for length in FLAT
    )
    result = [ratio * FLAT[0] / FLAT[1] for ratio in ratios(long, short)]
    what = f"time per token, {FLAT[1]} over {FLAT[0]} tokens"
    return [row(what, result, (1.2).__ge__)]


def decoding() -> list[Row]:
    """Return a step after many tokens over one after few, in turns on the same machine."""
    q1, k1, v, q2, k2 = inputs(1, 64)
    near, far = (
        partial(resume_attention, q1, k1, v, q2, k2, state=resume_attention(*given)[1])
        for given in (inputs(DECODED[0], 64), inputs(DECODED[1], 64))
    )
    result = [seconds(far, 50, warm=False) / seconds(near, 50, warm=False) for _ in range(TURNS)]
    what = f"a token after {DECODED[1]} tokens over one after {DECODED[0]}"
    return [row(what, result, (1.1).__ge__)]


@torch.no_grad()
def inference() -> list[Row]:
    """Return all rows without gradients."""
    return [*forward(), *softmax(), *crossing(), *flatness(), *decoding()]


def main() -> None:
    """Measure, print and write every ratio."""
    recording = Recording()
    recording.write(
        "attention",
        title="Attention without softmax",
        command="python -m benchmarks.attention",
        rows=[*inference(), *training()],
        settings={
            **{"tokens": [LENGTH, *LENGTHS, *FLAT, *DECODED], "d_head": WIDTHS},
            **{"shortest text in chunks, tokens by d_head": SHORT, "heads": [1, HEADS]},
            **{"crossing": [SHORT * width for width in WIDTHS]},
            **{"turns": TURNS, "low and high": "least and most of the turns"},
        },
    )


if __name__ == "__main__":
    main()
