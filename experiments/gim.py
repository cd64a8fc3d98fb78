"""GIM: gradients of a Llama or a Gemma by the rules of gradient interaction modifications.

Gradients do not pass through the scale of a norm. Those of a softmax are taken at twice its
temperature, so that a pattern that is nearly one hot still has some. Each factor of a product gets
an equal share: half for gate and up, half for the value, and a quarter for query and key.

Source: Edin et al. 2025 (arXiv 2505.17630); factors as in github.com/corticph/gim.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from bilens.transformer import ResidualModel

TEMPERATURE = 2.0
FACTORS = {"q_proj": 0.25, "k_proj": 0.25, "v_proj": 0.5, "gate_proj": 0.5, "up_proj": 0.5}
"""Share of the gradient of each map's output."""


@contextmanager
def gim_rules(model: ResidualModel) -> Iterator[None]:
    """Let gradients of a Llama or a Gemma be those of GIM as long as this runs."""
    config: Any = model.model.config
    with ExitStack() as stack:
        for name, module in model.model.named_modules():
            factor = FACTORS.get(name.rpartition(".")[2])
            if factor is not None:
                stack.enter_context(module.register_forward_hook(_Scaled(factor)))
            elif type(module).__name__.endswith("RMSNorm"):
                stack.enter_context(module.register_forward_hook(_with_fixed_scale))
        # Only eager attention calls a softmax that can be replaced.
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = "eager"
        stack.enter_context(patch.object(functional, "softmax", flat_softmax))
        yield


class _Scaled:
    """A hook after which the output is the same, and its gradient is multiplied."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        return self.factor * y + (1 - self.factor) * y.detach()


def _with_fixed_scale(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    x = args[0]
    # Without the scale, a norm multiplies each number by a constant; 0 stays 0.
    return x * torch.where(x == 0, torch.zeros_like(y), y / x).detach()


class _FlatSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        pattern = (scores / TEMPERATURE).softmax(-1)
        mean = (slopes[0] * pattern).sum(-1, keepdim=True)
        return pattern * (slopes[0] - mean)


def flat_softmax(scores: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax over the last axis, with the gradient of a higher temperature."""
    assert dim == -1
    return _FlatSoftmax.apply(scores.to(dtype or scores.dtype))  # type: ignore[no-untyped-call]
