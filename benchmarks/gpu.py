"""Bilinear attention on a GPU: Triton against softmax, the whole pattern, and the products' floor.

First every kernel is compared with the chunked one in float64, and repeated, also as a CUDA graph.
A race between programs shows as other bits in another run, and needs more programs than the card
runs at once. Then each d_head, length and direction of the pass has a line in bfloat16. A second
line has the same launches in a CUDA graph, without the host. Squared attention of other packages is
timed if they are installed: `parallel_rebased` of flash-linear-attention, and `power_retention` of
degree 2 of retention. The floor is the time of the kernels' matrix products only, at the rate of
one large product here.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import machine
from bilens.kernels import bilinear_attention

DEVICE = "cuda"
KERNEL: Any = "triton"
Attend = Callable[..., Tensor]
Outputs = TypeVar("Outputs")
HEADS, WIDTHS = 8, (32, 64, 128)
LENGTHS = tuple(2**power for power in range(10, 19))
PATTERN = 2**33
"""Most numbers of a whole pattern that are tried: 16 GiB of them in bfloat16."""
RATE = 8192
"""Width of the square matrices whose product defines the rate."""
REBASED = 128
"""Largest d_head that `parallel_rebased` takes."""
RUNS = 4
"""Number of repetitions that must have the same bits."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest distance from exact outputs and gradients, relative to these."""


def milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median time on the GPU of a call, after two that do not count."""
    call(), call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)))
    return statistics.median(times)


def recorded(call: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Return a function that replays a call's launches as a CUDA graph, and their outputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # What is set up in the first calls cannot be recorded.
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs


def graph_milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call's launches, recorded in a CUDA graph."""
    replay, _ = recorded(call)
    return milliseconds(replay)


def rebased() -> Attend | None:
    """Return squared attention of flash-linear-attention, not normalised; None without it."""
    if find_spec("fla") is None:
        return None
    attend = import_module("fla.ops.rebased.parallel").parallel_rebased
    # Versions differ in the layout that they take by default.
    if "head_first" in signature(attend).parameters:
        return partial(attend, use_normalize=False, head_first=True)
    return _with_time_first(partial(attend, use_normalize=False))


def retention() -> Attend | None:
    """Return squared attention of retention, its rows normalised; None without it."""
    if find_spec("retention") is None:
        return None
    return _with_time_first(partial(import_module("retention").power_retention, deg=2))


def _with_time_first(attend: Attend) -> Attend:
    def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return transposed


def random_inputs(heads: int, length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q1, k1, v, q2 and k2."""
    shape = (1, heads, length, width)
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(5)]


def check(width: int, dtype: torch.dtype) -> None:
    """Print how far outputs and gradients are from exact ones, of one chunk and of several.

    Raises:
        RuntimeError: they are too far for the times below to mean anything, or differ between runs.
    """
    for length in (width**2 // 2, width**2 + 100):
        given = random_inputs(HEADS, length, width, dtype)
        for name, selected in (("bilinear", given), ("squared", given[:3])):
            exact = [x.detach().double().requires_grad_() for x in selected]
            dy = torch.randn_like(given[2])
            once = partial(results, selected, dy, KERNEL)
            runs = [once() for _ in range(RUNS)]
            replay, outputs = recorded(once)
            for _ in range(RUNS):
                replay()
                runs.append([x.clone() for x in outputs])
            expected = results(exact, dy.double(), "chunked")
            error = max(
                float((a.double() - b).norm() / b.norm())
                for run in runs
                for a, b in zip(run, expected, strict=True)
            )
            print(f"{width:4} {length:7} {str(dtype)[6:]:8} {name:8} error {error:.1e}", flush=True)
            if not error < BOUNDS[dtype]:
                raise RuntimeError(f"error {error:.1e}, expected less than {BOUNDS[dtype]:.0e}")
            check_bits(runs)


def results(inputs: list[Tensor], dy: Tensor, kernel: Any) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    y = bilinear_attention(*inputs, kernel=kernel)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def check_bits(runs: list[list[Tensor]]) -> None:
    """See that every run gave the same bits, eagerly and as a graph.

    Raises:
        RuntimeError: names the tensors that differ.
    """
    names = ("y", "dq1", "dk1", "dv", "dq2", "dk2")
    for number, run in enumerate(runs[1:], 1):
        differ = [n for n, a, b in zip(names, runs[0], run, strict=False) if not torch.equal(a, b)]
        if differ:
            raise RuntimeError(f"run {number} gave other bits than run 0: {', '.join(differ)}")


def floor(length: int, width: int, rate: float, *, squared: bool, backward: bool) -> float:
    """Return milliseconds of the products only."""
    # Triton need not be there where there is no GPU.
    from tests.kernels.static import launches  # noqa: PLC0415

    every = launches(width, torch.bfloat16, squared=squared, length=length)
    # The sums of segments are only there to fill the card.
    every = [launch for launch in every if not launch.name.endswith("sums")]
    forward = [launch for launch in every if launch.name in ("states", "y")]
    return 1e3 * sum(x.operations() for x in (every if backward else forward)) / rate


def both_ways(attend: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Forward and backward."""
    torch.autograd.grad(attend(*given).sum(), given)


def row(length: int, width: int, rate: float) -> None:
    """Print one length of one width, forward and both ways."""
    q1, k1, v, q2, k2 = random_inputs(HEADS, length, width, torch.bfloat16)
    attend = partial(bilinear_attention, kernel=KERNEL)
    full = partial(bilinear_attention, kernel="reference")
    softmax = partial(scaled_dot_product_attention, is_causal=True)
    others = rebased() if width <= REBASED else None, retention()
    fits = HEADS * length**2 <= PATTERN
    for backward, clock in product((False, True), (milliseconds, graph_milliseconds)):

        def took(
            call: Callable[..., Tensor] | None,
            *given: Tensor,
            back: bool = backward,
            clock: Callable[[Callable[[], object]], float] = clock,
        ) -> float:
            if call is None:
                return math.nan
            if back:
                return clock(lambda: both_ways(call, list(given)))
            with torch.no_grad():
                return clock(lambda: call(*given))

        soft = took(softmax, q1, k1, v)
        result = {"squared": took(attend, q1, k1, v), "bilinear": took(attend, q1, k1, v, q2, k2)}
        way = "eager" if clock is milliseconds else "graph"
        cells = [f"{width:4} {length:7} {'both' if backward else 'forward':8} {way:5} {soft:9.3f}"]
        cells.append(f"{took(full if fits else None, q1, k1, v, q2, k2):9.3f}")
        cells += [f"{took(theirs, q1, k1, v):9.3f}" for theirs in others]
        for name, item in result.items():
            least = floor(length, width, rate, squared=name == "squared", backward=backward)
            cells.append(f"{item:9.3f} {soft / item:6.2f}x {least / item:6.1%}")
        print(" ".join(cells), flush=True)


def main() -> None:
    """Print every line, or that a GPU is missing."""
    print(machine())
    if not torch.cuda.is_available():
        print(
            "No GPU is here, and this benchmark is for one; `benchmarks.attention` is for the CPU."
        )
        return
    print(torch.cuda.get_device_name())
    print("distance from exact outputs and gradients")
    for width in WIDTHS:
        for dtype in BOUNDS:
            check(width, dtype)
    square = torch.randn(RATE, RATE, device="cuda", dtype=torch.bfloat16)
    rate = 2e3 * RATE**3 / milliseconds(lambda: square @ square)
    print(f"a product of {RATE} x {RATE} matrices: {rate / 1e12:.0f} TFLOP/s")
    print("milliseconds; by Triton also the gain over softmax and the floor's share of the time")
    print(
        "   d  tokens pass     way     softmax   pattern   rebased retention           squared"
        "            bilinear"
    )
    for width in WIDTHS:
        for length in LENGTHS:
            row(length, width, rate)


if __name__ == "__main__":
    main()
