"""Bilinear attention on the CPU: chunked against the whole pattern, softmax and longer texts."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import machine, seconds
from bilens.kernels import KernelName, bilinear_attention, resume_attention

LENGTH = 8192
FORWARD = {32: 25.0, 64: 8.0}
"""Least ratio of the whole pattern's time to that of chunks, by d_head."""


def inputs(length: int, width: int, heads: int = 1) -> list[Tensor]:
    """q1, k1, v, q2 and k2; of one head where the whole pattern has to fit into memory."""
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


def line(what: str, value: float, floor: str, *, reached: bool) -> None:
    """One figure beside what it has to reach."""
    print(f"{what:58} {value:8.2f}   {floor:14} {'reached' if reached else 'MISSED'}")


def forward() -> None:
    """The whole pattern's time as a multiple of that of chunks."""
    for width, floor in FORWARD.items():
        given = inputs(LENGTH, width)
        for name, chosen in (("two scores", given), ("squared", given[:3])):
            whole, parts = (
                seconds(partial(bilinear_attention, *chosen, kernel=kernel), 3)
                for kernel in ("reference", "chunked")
            )
            what = f"T={LENGTH}, d_head {width}, {name}: reference / chunked"
            line(what, whole / parts, f"at least {floor:g}", reached=whole / parts >= floor)


def softmax() -> None:
    """The time of torch's fused causal attention as a multiple of that of chunks."""
    for length in (2048, 4096, 8192, 16384):
        q1, k1, v, q2, k2 = inputs(length, 32, heads=4)
        fused = seconds(partial(scaled_dot_product_attention, q1, k1, v, is_causal=True))
        parts = seconds(partial(bilinear_attention, q1, k1, v, q2, k2, kernel="chunked"))
        what = f"T={length}, d_head 32, 4 heads: SDPA / chunked"
        floor = 1.0 if length >= 4096 else 0.0
        line(what, fused / parts, f"above {floor:g}", reached=fused / parts > floor)


def training() -> None:
    """Forward and backward, time and memory."""
    given = [x.requires_grad_() for x in inputs(LENGTH, 64)]
    times = [seconds(partial(both_ways, kernel, given), 3) for kernel in ("reference", "chunked")]
    ratio = times[0] / times[1]
    line(
        f"T={LENGTH}, d_head 64, both ways: reference / chunked",
        ratio,
        "at least 5",
        reached=ratio >= 5,
    )
    memory = [peak_bytes(partial(both_ways, kernel, given)) for kernel in ("reference", "chunked")]
    share = memory[1] / memory[0]
    line("the same, peak memory: chunked / reference", share, "at most 0.1", reached=share <= 0.1)


def flatness() -> None:
    """Cost per token, longest text over shortest and so on."""
    each = []
    for length in (4096, 16384, 65536):
        given = inputs(length, 32, heads=4)
        each.append(seconds(partial(bilinear_attention, *given, kernel="chunked"), 3) / length)
    spread = max(each) / min(each)
    line("per token, T = 4k to 64k: most / least", spread, "at most 1.2", reached=spread <= 1.2)


def decoding() -> None:
    """A step after 64k tokens over one after 1k, in turns so that both meet the same machine."""
    states, steps = [], inputs(1, 64)
    for length in (1024, 65536):
        q1, k1, v, q2, k2 = inputs(length, 64)
        states.append(resume_attention(q1, k1, v, q2, k2)[1])
    q1, k1, v, q2, k2 = steps
    times: list[list[float]] = [[], []]
    for _ in range(200):
        for state, found in zip(states, times, strict=True):
            start = time.perf_counter()
            resume_attention(q1, k1, v, q2, k2, state=state)
            found.append(time.perf_counter() - start)
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    line("a step at position 64k / at 1k", ratio, "at most 1.1", reached=ratio <= 1.1)


@torch.no_grad()
def inference() -> None:
    """All figures without gradients."""
    forward()
    softmax()
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
