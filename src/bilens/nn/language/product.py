"""Attention without softmax, with a squared score or a product of two, and its state."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from bilens.errors import BilensError
from bilens.kernels import bilinear_attention, resume_attention
from bilens.nn.language.attention import Attention, QueriesKeys
from bilens.nn.layers import AttentionNorm

EPS = 1e-20
"""Lower bound of divisors: tiny, since products of small scores are very small."""


class StateLayer(CacheLayerMixin):
    """The state of one block, which never grows, and the number of tokens in it.

    transformers requires the name `keys` for it: (batch, kv_heads, d_value, features), or None.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Tensor | None = None
        self.seen = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raise BilensError: keys and values are not kept."""
        raise BilensError(
            "past_key_values holds the states of attention without softmax, which keeps no keys; "
            "pass a DynamicCache"
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first state has the shape of all."""

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all tokens with the new ones, and the offset of the first, 0."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length has no limit."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every beam continue from the beam that it came from."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        if self.keys is not None:
            self.keys = self.keys.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select batch rows."""
        if self.keys is not None:
            self.keys = self.keys[indices.to(self.keys.device)]


class ProductAttention(Attention):
    """A = (scale q1_t . k1_s)(scale q2_t . k2_s), s <= t; squared attention has q2 = q1, k2 = k1.

    The pattern is a polynomial of the input, so attention is a tensor. Its rows have any sum. Time
    grows linearly with the length, and decoding keeps a state of constant size.

    Args:
        scale: factor of each score; 1 / d_head by default.
        constant: add a learned number of each head to its scores: (scale q . k + c).
        norm: none, sum or rms. With sum, rows of the pattern are divided by their sum. With rms,
            the output of each head is divided by its size. With either, attention is no tensor.
        sizes: sizes of `Attention`; squared attention has one pair, bilinear attention two.

    Source: The post on tensor-transformer variants: `pattern = (q1 k1' / d)(q2 k2' / d)`.
    """

    def __init__(
        self, *, scale: float | None, norm: AttentionNorm, constant: bool = False, **sizes: Any
    ) -> None:
        super().__init__(**sizes)
        self.scale = 1 / self.d_head if scale is None else scale
        self.norm = norm
        shape = self.pairs, self.n_heads
        self.score_constant = nn.Parameter(torch.zeros(shape)) if constant else None

    def _queries_keys(self, *args: Any, **kwargs: Any) -> QueriesKeys:
        pairs = super()._queries_keys(*args, **kwargs)
        if self.score_constant is None:
            return pairs
        # One more coordinate after the rotation: c / scale in queries and 1 in keys.
        constants = (self.score_constant / self.scale)[:, :, None, None]
        return [
            (torch.cat([q, c.to(q).expand_as(q[..., :1])], -1), functional.pad(k, (0, 1), value=1))
            for (q, k), c in zip(pairs, constants, strict=True)
        ]

    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend by `bilens.kernels`; a mask has one row, which is False for padding."""
        (q1, k1), second = qk[0], [x for pair in qk[1:] for x in pair]
        if mask is not None:
            # A token with a key of zero has weight 0 in every pattern and in the state.
            k1 = k1 * mask.mT
        q1, k1, v, *second = _in_one_precision(q1, k1, v, *second)
        scale, by_sum = self.scale**2, self.norm == "sum"
        if cache is None:
            y = bilinear_attention(q1, k1, v, *second, scale=scale, normalised=by_sum)
        else:
            if by_sum:
                # The sums of rows are the outputs of a value that is always 1.
                v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
            memory = cache.layers[self.layer]
            if not isinstance(memory, StateLayer):
                raise BilensError(
                    f"past_key_values keeps a {type(memory).__name__} for layer {self.layer}, "
                    "expected a StateLayer; pass use_cache=True without past_key_values first, "
                    "and then the past_key_values of its result"
                )
            y, memory.keys = resume_attention(q1, k1, v, *second, state=memory.keys, scale=scale)
            memory.seen += q1.shape[2]
            if by_sum:
                y = y[..., :-1] / y[..., -1:].clamp_min(EPS)
        return functional.rms_norm(y, y.shape[-1:], eps=EPS) if self.norm == "rms" else y

    def pattern(self, scores: list[Tensor], seen: Tensor, values: Tensor) -> Tensor:
        """Return the product of the scores, normalised as in `attend`."""
        pattern = (scores[0] * scores[-1] * self.scale**2).masked_fill(~seen, 0)
        if self.norm == "sum":
            return pattern / pattern.sum(-1, keepdim=True).clamp_min(EPS)
        if self.norm == "rms":
            power = (pattern @ values).square().mean(-1, keepdim=True)
            return pattern * (power + EPS).rsqrt()
        return pattern


def _in_one_precision(*inputs: Tensor) -> list[Tensor]:
    """Cast inputs under autocast, as for torch's attention: norms and positions promote them."""
    device = inputs[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return list(inputs)
    return [x.to(torch.get_autocast_dtype(device)) for x in inputs]
