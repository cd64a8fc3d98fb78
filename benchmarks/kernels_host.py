"""Time of the host for a call of the Triton kernels, with Triton's own binder and no launch.

No GPU is needed: tensors are small and on the CPU, Triton's driver is replaced, and a kernel is
looked up by its arguments as always, and not run. Short texts on a GPU wait for this time. It is
the processor's, in which other work on the machine plays a smaller part.
"""

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from bilens.kernels import bilinear_attention
from bilens.kernels.triton_kernels import read_kernel, states_kernel
from bilens.kernels.triton_quadratic import attend_kernel, keys_kernel, queries_kernel


class Compiled(dict[Any, Any]):
    """Kernels that were compiled for any arguments, and do nothing."""

    def get(self, *key: Any) -> Any:
        """Return a kernel with what a launch asks it for."""
        return SimpleNamespace(
            launch_metadata=lambda *_: None,
            run=lambda *_: None,
            function=None,
            packed_metadata=None,
        )


def microseconds(call: Callable[[], object], calls: int = 50, turns: int = 60) -> float:
    """Return the least time of a call over turns, which other work on the machine slows down."""
    call()
    times = []
    for _ in range(turns):
        start = time.process_time()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.process_time() - start) / calls)
    return min(times)


def host_times() -> dict[str, tuple[float, float]]:
    """Return microseconds of a forward call, and of both passes, by the kind of attention.

    Triton has no driver that runs a kernel afterwards.
    """
    kernels = (attend_kernel, queries_kernel, keys_kernel, states_kernel, read_kernel)
    target = GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    driver.set_active(fake)
    for kernel in kernels:
        _, keys, *others = kernel.create_binder()
        kernel.device_caches[0] = (Compiled(), keys, *others)
    torch.set_num_threads(1)
    heads, width = 2, 64
    results: dict[str, tuple[float, float]] = {}
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "squared": (3, {}),
        "squared, constant and sums": (3, {"constant": torch.ones(heads), "normalised": True}),
        "two scores": (5, {}),
    }
    # As a model has them: heads side by side.
    shape = (1, width, heads, width)
    # Tensors of the CPU go to the kernels only where this is set, though nothing is interpreted.
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        for kind, (count, options) in kinds.items():
            inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(count)]
            dy = torch.randn(1, heads, width, width)

            def attend(inputs: Any = inputs, options: Any = options) -> torch.Tensor:
                return bilinear_attention(*inputs, kernel="triton", **options)

            def both(attend: Any = attend, inputs: Any = inputs, dy: Any = dy) -> None:
                torch.autograd.grad(attend(), inputs, dy)

            with torch.no_grad():
                forward = microseconds(attend)
            results[kind] = forward, microseconds(both)
    return results


if __name__ == "__main__":
    for kind, (forward, both) in host_times().items():
        print(f"{kind}: {forward:.0f} us forward, {both:.0f} us both passes")
