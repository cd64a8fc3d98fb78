"""Softmax attention, and the difference of two softmaxes."""

from math import exp
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from bilens.nn.language.attention import Attention, QueriesKeys


class SoftmaxAttention(Attention):
    """A = softmax(scale q_t . k_s), s <= t.

    Args:
        scale: factor of the scores; 1 / sqrt(d_head) by default.
        sizes: sizes of `Attention`.
    """

    def __init__(self, *, scale: float | None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scale = self.d_head**-0.5 if scale is None else scale

    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend by torch's fused kernels."""
        q, k = qk[0]
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        return _mixed(q, k, v, mask, self.scale)

    def pattern(self, scores: list[Tensor], seen: Tensor, values: Tensor) -> Tensor:
        """Return the softmax over the visible tokens."""
        return _softmax(scores[0] * self.scale, seen)


class DifferentialAttention(SoftmaxAttention):
    """A = softmax(scale q1_t . k1_s) - lambda softmax(scale q2_t . k2_s), s <= t.

    lambda is a learned number of each layer. Two softmaxes share values of the width of one head,
    and the outputs of heads are not normalised.

    Args:
        scale: factor of the scores; 1 / sqrt(d_head) by default.
        sizes: sizes of `Attention`.

    Source: Ye et al. 2024, "Differential Transformer", equation 1; initial lambda: equation 3.
    """

    def __init__(self, *, scale: float | None, **sizes: Any) -> None:
        super().__init__(scale=scale, **sizes)
        self.diff_lambda = nn.Parameter(torch.tensor([0.8 - 0.6 * exp(-0.3 * self.layer)]))

    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend by torch's fused kernels, one softmax after the other."""
        (q1, k1), (q2, k2) = qk
        if cache is not None:
            both, v = cache.update(torch.cat([k1, k2], -1), v, self.layer)
            k1, k2 = both.chunk(2, -1)
        first, second = (_mixed(q, k, v, mask, self.scale) for q, k in ((q1, k1), (q2, k2)))
        return first - self.diff_lambda * second

    def pattern(self, scores: list[Tensor], seen: Tensor, values: Tensor) -> Tensor:
        """Return the difference of the softmaxes over the visible tokens."""
        first, second = (_softmax(score * self.scale, seen) for score in scores)
        return first - self.diff_lambda * second


def _mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        # A single token sees everything in the cache.
        is_causal=mask is None and q.shape[2] > 1,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)
