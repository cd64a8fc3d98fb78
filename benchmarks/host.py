"""Time of the host for a call of the Triton kernels, with a launcher that does nothing.

No GPU is needed: tensors are small and on the CPU, so that all time is Python's and torch's own.
Short texts on a GPU wait for it. Launches are counted too. Times are the processor's, in which
other work on the machine plays a smaller part.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

# Before Triton is imported, as it looks then: the kernels take tensors of the CPU.
os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks.clock import machine
from bilens.kernels import bilinear_attention, triton_chunked

HEADS, WIDTH = 2, 16
CALLS, TURNS = 200, 15
KERNELS = ("read_kernel", "states_kernel", "attend_kernel", "queries_kernel", "keys_kernel")


class Nothing:
    """A launcher that counts its calls."""

    launches = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            Nothing.launches += 1

        return launch


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the least time of a call, over turns of many calls."""
    call()
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        times.append(1e3 * (time.process_time() - start) / CALLS)
    return statistics.median(times), min(times)


def show(name: str, call: Callable[[], object]) -> None:
    """Print the time and the launches of a call."""
    Nothing.launches = 0
    call()
    launches = Nothing.launches
    median, least = milliseconds(call)
    print(f"{name:42} {launches:8} {median:10.3f} {least:8.3f}", flush=True)


def main() -> None:
    """Print a line for each kind of attention, length and pass."""
    torch.set_num_threads(1)
    print(machine())
    print(f"{'milliseconds of the host':42} launches     median    least")
    for time_, name in ((WIDTH, "one chunk"), (WIDTH**2 + 44, "two chunks")):
        for scores in ("squared", "two scores"):
            count = 3 if scores == "squared" else 5
            # As a model has them: heads side by side.
            shape = (1, time_, HEADS, WIDTH)
            inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(count)]
            dy = torch.randn(1, HEADS, time_, WIDTH)

            def forward(inputs: list[torch.Tensor] = inputs) -> None:
                with torch.no_grad():
                    bilinear_attention(*inputs, kernel="triton")

            def both(inputs: list[torch.Tensor] = inputs, dy: torch.Tensor = dy) -> None:
                torch.autograd.grad(bilinear_attention(*inputs, kernel="triton"), inputs, dy)

            show(f"{scores}, {name}, forward", forward)
            show(f"{scores}, {name}, forward and backward", both)


if __name__ == "__main__":
    with patch.multiple(triton_chunked, **dict.fromkeys(KERNELS, Nothing())):
        main()
