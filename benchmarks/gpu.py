"""Bilinear attention on a GPU: Triton against softmax, the whole pattern, and the products' floor.

bfloat16, one line for each d_head, length and direction of the pass. The floor is the time that the
matrix products of the chunked form would take alone, at the rate of one large product here.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import machine, seconds
from bilens.kernels import KernelName, bilinear_attention

HEADS = 8
WIDTHS = (32, 64, 128)
LENGTHS = tuple(2**power for power in range(10, 19))
PATTERN = 2**33
"""Most numbers of a whole pattern that are tried: 16 GiB of them in bfloat16."""
CHUNK = 1024
"""Tokens of a chunk, as in `bilens.kernels.triton_chunked`; each sees half of them on average."""
RATE = 8192
"""Width of the square matrices whose product gives the rate."""


def floor(length: int, width: int, rate: float, *, squared: bool, backward: bool) -> float:
    """Seconds of the products alone.

    A token and head costs 2 d^3 multiplications with the state forward, reading and adding, and 5
    d^3 backward; half of them with squared scores. The chunk costs 3 and 8 CHUNK d / 2.
    """
    state = (7 if backward else 2) * width**3 / (2 if squared else 1)
    chunk = (11 if backward else 3) * min(CHUNK, length) * width / 2
    return 2 * HEADS * length * (state + chunk) / rate


def both_ways(attend: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Forward and backward."""
    torch.autograd.grad(attend(*given).sum(), given)


def rate(device: str) -> float:
    """Floating-point operations a second of a large product."""
    square = torch.randn(RATE, RATE, device=device, dtype=torch.bfloat16)
    return 2 * RATE**3 / seconds(lambda: square @ square)


def row(length: int, width: int, speed: float, device: str, kernel: KernelName) -> None:
    """Print one length of one width, forward and both ways."""
    shape = (1, HEADS, length, width)
    q1, k1, v, q2, k2 = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(5)
    )
    attend = partial(bilinear_attention, kernel=kernel)
    whole = partial(bilinear_attention, kernel="reference")
    softmax = partial(scaled_dot_product_attention, is_causal=True)
    for backward in (False, True):

        def took(call: Callable[..., Tensor], *given: Tensor, back: bool = backward) -> float:
            if back:
                return seconds(lambda: both_ways(call, list(given)))
            with torch.no_grad():
                return seconds(lambda: call(*given))

        soft = took(softmax, q1, k1, v)
        found = {"squared": took(attend, q1, k1, v), "bilinear": took(attend, q1, k1, v, q2, k2)}
        fits = HEADS * length**2 <= PATTERN
        patterned = f"{1e3 * took(whole, q1, k1, v, q2, k2):9.2f}" if fits else "        -"
        cells = [f"{width:4} {length:7} {'both' if backward else 'forward':8} {1e3 * soft:9.2f}"]
        cells.append(patterned)
        for name, each in found.items():
            least = floor(length, width, speed, squared=name == "squared", backward=backward)
            cells.append(f"{1e3 * each:9.2f} {soft / each:6.2f}x {least / each:6.1%}")
        print(" ".join(cells), flush=True)


def main() -> None:
    """Print every line, or that there is no GPU."""
    print(machine())
    if not torch.cuda.is_available():
        print(
            "No GPU is here, and this benchmark is for one; `benchmarks.attention` is for the CPU."
        )
        return
    print(torch.cuda.get_device_name())
    speed = rate("cuda")
    print(f"a product of {RATE} x {RATE} matrices: {speed / 1e12:.0f} TFLOP/s")
    print("milliseconds; by Triton also the gain over softmax and the floor's share of the time")
    print("   d  tokens pass       softmax     whole           squared            bilinear")
    for width in WIDTHS:
        for length in LENGTHS:
            row(length, width, speed, "cuda", "triton")


if __name__ == "__main__":
    main()
