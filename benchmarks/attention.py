"""Bilinear attention on the CPU: chunked against the whole pattern, softmax and longer texts.

Each ratio is the median of several turns, with the least and the most of them after it. In a turn
both sides are timed one after the other.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import by_turns, machine, seconds
from bilens.kernels import bilinear_attention, resume_attention
from bilens.kernels.attention import SHORT, KernelName

LENGTH, TURNS = 8192, 7
FORWARD = {32: 25.0, 64: 8.0}
"""Least ratio of the whole pattern's time to that of chunks, by d_head."""


def inputs(length: int, width: int, heads: int = 1) -> list[Tensor]:
    """Return q1, k1, v, q2 and k2; of one head if the pattern has to fit into memory."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, width, generator=generator) for _ in range(5)]


def both_ways(kernel: KernelName, given: list[Tensor]) -> None:
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


def line(what: str, result: list[float], floor: str, reached: Callable[[float], bool]) -> None:
    """Print a figure beside its aim."""
    middle = statistics.median(result)
    spread = f"{min(result):.2f} to {max(result):.2f}"
    verdict = "reached" if reached(middle) else "MISSED"
    print(f"{what:58} {middle:8.2f}  {spread:16} {floor:14} {verdict}", flush=True)


def whole_over_chunks(
    length: int, width: int, heads: int, floor: str, reached: Callable[[float], bool]
) -> None:
    """Print the whole pattern's time as a multiple of that of chunks."""
    given = inputs(length, width, heads)
    for name, selected in (("two scores", given), ("squared", given[:3])):
        full, parts = (
            partial(bilinear_attention, *selected, kernel=kernel)
            for kernel in ("reference", "chunked")
        )
        what = f"T={length}, d_head {width}, {heads} heads, {name}: reference / chunked"
        line(what, ratios(full, parts), floor, reached)


def forward() -> None:
    """Print that ratio for a long text."""
    for width, floor in FORWARD.items():
        whole_over_chunks(LENGTH, width, 1, f"at least {floor:g}", floor.__le__)


def softmax() -> None:
    """Return the time of torch's fused causal attention as a multiple of that of chunks."""
    for length in (2048, 4096, 8192, 16384):
        q1, k1, v, q2, k2 = inputs(length, 32, heads=4)
        fused = partial(scaled_dot_product_attention, q1, k1, v, is_causal=True)
        parts = partial(bilinear_attention, q1, k1, v, q2, k2, kernel="chunked")
        what = f"T={length}, d_head 32, 4 heads: SDPA / chunked"
        floor = 1.0 if length >= 4096 else 0.0
        line(what, ratios(fused, parts), f"above {floor:g}", floor.__lt__)


def crossing() -> None:
    """Print that ratio at the length at which `kernel="auto"` changes."""
    for width in (16, 32, 64, 128):
        whole_over_chunks(SHORT * width, width, 4, "about 1", lambda ratio: 0.5 < ratio < 2)


def training() -> None:
    """Forward and backward, time and memory."""
    given = [x.requires_grad_() for x in inputs(LENGTH, 64)]
    for name, selected in (("two scores", given), ("squared", given[:3])):
        full, parts = (partial(both_ways, kernel, selected) for kernel in ("reference", "chunked"))
        what = f"T={LENGTH}, d_head 64, both ways, {name}: reference / chunked"
        line(what, ratios(full, parts), "at least 5", (5.0).__le__)
        share = peak_bytes(parts) / peak_bytes(full)
        line("the same, peak memory: chunked / reference", [share], "at most 0.1", (0.1).__ge__)


def flatness() -> None:
    """Cost per token of the longest text over that of the shortest."""
    short, long = (
        partial(bilinear_attention, *inputs(length, 32, heads=4), kernel="chunked")
        for length in (4096, 65536)
    )
    result = [ratio / 16 for ratio in ratios(long, short)]
    line("per token, T = 64k / 4k", result, "at most 1.2", (1.2).__ge__)


def decoding() -> None:
    """Return a step after 64k tokens over one after 1k, in turns on the same machine."""
    q1, k1, v, q2, k2 = inputs(1, 64)
    near, far = (
        partial(resume_attention, q1, k1, v, q2, k2, state=resume_attention(*given)[1])
        for given in (inputs(1024, 64), inputs(65536, 64))
    )
    result = [seconds(far, 50, warm=False) / seconds(near, 50, warm=False) for _ in range(TURNS)]
    line("a step at position 64k / at 1k", result, "at most 1.1", (1.1).__ge__)


@torch.no_grad()
def inference() -> None:
    """All figures without gradients."""
    forward()
    softmax()
    crossing()
    flatness()
    decoding()


def main() -> None:
    """Print every figure."""
    torch.set_num_threads(2)
    print(machine())
    inference()
    training()


if __name__ == "__main__":
    main()
