"""Random queries, keys and values, and a kernel's outputs with all gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from bilens.kernels.attention import reference, triton_problem
from tests.nightly import nightly


def need_triton() -> None:
    """Skip a test where Triton is missing, or another than was tested: builds for CUDA bring it."""
    if (problem := triton_problem()) is not None:
        pytest.skip(problem)


def cases(names: str, every: Iterable[Any], daily: list[Any]) -> pytest.MarkDecorator:
    """Run a test on every case at night, and on some by day."""
    return pytest.mark.parametrize(names.split(), nightly(every, daily))


shapes = {"batch": st.integers(1, 2), "kv_heads": st.integers(1, 2), "sharing": st.integers(1, 3)}
shapes |= {"time": st.integers(1, 40), "width": st.integers(1, 20), "d_value": st.integers(1, 9)}
shapes["squared"] = st.booleans()


def random_inputs(
    batch=1, kv_heads=2, sharing=1, time=9, width=8, d_value=8, squared=False, dtype=torch.float64
) -> list[Tensor | None]:
    """q1, k1, v, q2 and k2, the last two None for squared attention."""
    generator = torch.Generator().manual_seed(time)

    def random(heads: int, size: int) -> Tensor:
        return torch.randn(batch, heads, time, size, generator=generator).to(dtype).requires_grad_()

    heads = kv_heads * sharing
    q1, k1, v = random(heads, width), random(kv_heads, width), random(kv_heads, d_value)
    if squared:
        return [q1, k1, v, None, None]
    return [q1, k1, v, random(heads, width), random(kv_heads, width)]


def each(inputs: list[Tensor | None], change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    return [None if x is None else change(x) for x in inputs]


def results(y: Tensor, inputs: list[Tensor | None]) -> list[Tensor]:
    """Return the output, and the gradient of each input for one random gradient."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    # The same numbers in every precision.
    dy = dy.bfloat16().to(y)
    return [y.detach(), *torch.autograd.grad(y, [x for x in inputs if x is not None], dy)]


def error(result: list[Tensor], inputs: list[Tensor | None], scale: float) -> float:
    """Largest distance from the reference in float64, relative to the reference."""
    exact = each(inputs, lambda x: x.detach().double().requires_grad_())
    expected = results(reference(tuple(exact), scale), exact)
    return max(
        float((a.double() - b).norm() / b.norm()) for a, b in zip(result, expected, strict=True)
    )
