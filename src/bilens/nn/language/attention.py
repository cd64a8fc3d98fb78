"""Causal attention with any pattern, its weights under the names of the field, and softmax."""

from abc import abstractmethod
from math import exp
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from bilens.errors import BilensError


def rotation(
    positions: Int[Tensor, "*batch time"], width: int, base: float, like: Tensor
) -> tuple[Float[Tensor, "*batch time half"], Float[Tensor, "*batch time half"]]:
    """Cosines and sines of position * base^(-2 i / width), from float32 to the dtype of `like`.

    The slowest of the `width` coordinates of a head, an even number, turn by about 1 / base a
    position. An odd width is a BilensError.

    Source: Su et al. 2021, section 3.2.
    """
    if width % 2:
        raise BilensError(f"width={width}: rotary positions need heads of even width")
    speeds = 1 / base ** (torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions[..., None].float() * speeds
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(
    x: Float[Tensor, "batch heads time width"],
    rope: tuple[Float[Tensor, "_ time half"], Float[Tensor, "_ time half"]],
) -> Float[Tensor, "batch heads time width"]:
    """Turn each pair of coordinates (i, i + width/2) by its angle, alike in all heads."""
    cos, sin = (part[..., None, :, :] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


Rope = tuple[Tensor, Tensor]
"""Cosines and sines of `bilens.nn.language.attention.rotation`."""
QueriesKeys = list[tuple[Tensor, Tensor]]
"""One or two pairs of queries (batch, heads, time, d_head) and keys (batch, kv_heads, ...)."""


class Attention(nn.Module):
    """y_t = sum_h O_h sum_s A^h_ts V_h x_s, with the pattern A of a subclass.

    Args:
        d_model: width of the input and of the output.
        n_heads: number of heads.
        n_kv_heads: number of heads of keys and values; consecutive groups of heads share one.
        bias: add biases to the maps.
        layer: number of the block, which names its keys and values in a cache.
        qk_norm: divide queries and keys by their root mean square.
        value_mix: mix the values of the first block into those of this one.
        pairs: number of pairs of queries and keys, one or two.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        bias: bool,
        layer: int,
        qk_norm: bool,
        value_mix: bool,
        pairs: int,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.layer = n_heads, n_kv_heads, layer
        self.d_head, self.qk_norm, self.pairs = d_model // n_heads, qk_norm, pairs

        def linear(heads: int) -> nn.Linear:
            return nn.Linear(d_model, heads * self.d_head, bias=bias)

        self.query, self.key, self.value = linear(n_heads), linear(n_kv_heads), linear(n_kv_heads)
        if pairs == 2:
            self.query2, self.key2 = linear(n_heads), linear(n_kv_heads)
        self.out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)
        self.value_mix_share = nn.Parameter(torch.tensor([0.5])) if value_mix else None

    def forward(
        self,
        x: Float[Tensor, "batch time d_model"],
        pos_embed: Float[Tensor, "batch time d_model"] | None = None,
        rope: Rope | None = None,
        mask: Bool[Tensor, "batch 1 rows seen"] | None = None,
        cache: Cache | None = None,
        v_first: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Return the output of attention to earlier tokens.

        Args:
            x: input, from which values are computed.
            pos_embed: shortformer positions, added to the input of queries and keys.
            rope: cosines and sines of rotary positions.
            mask: True for visible pairs of tokens; None for all earlier tokens.
            cache: keys and values, or the state, of earlier tokens; it grows by the new ones.
            v_first: values of the first block, for `value_mix`.
        """
        qk, v = self._queries_keys(x, pos_embed, rope), self.values(x, v_first)
        mixed = self.attend(qk, v, mask, cache)
        return self.out(rearrange(mixed, "b h t d -> b t (h d)"))

    def attention_pattern(
        self,
        x: Float[Tensor, "batch time d_model"],
        pos_embed: Float[Tensor, "batch time d_model"] | None = None,
        rope: Rope | None = None,
        v_first: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    ) -> Float[Tensor, "batch heads time time"]:
        """Return the pattern A: the weight of each position for every later one, by head."""
        scores = [q @ k.mT for q, k in self.queries_keys(x, pos_embed, rope)]
        values = self.values(x, v_first).repeat_interleave(self.n_heads // self.n_kv_heads, 1)
        seen = torch.ones(scores[0].shape[-2:], dtype=torch.bool, device=x.device).tril()
        return self.pattern(scores, seen, values)

    def queries_keys(
        self,
        x: Float[Tensor, "batch time d_model"],
        pos_embed: Float[Tensor, "batch time d_model"] | None = None,
        rope: Rope | None = None,
        *,
        normed: bool = True,
    ) -> QueriesKeys:
        """Return the queries and keys of each pair; shared keys are repeated for each head.

        Arguments are those of `forward`; `normed=False` skips QK-norm.
        """
        sharing = self.n_heads // self.n_kv_heads
        pairs = self._queries_keys(x, pos_embed, rope, normed=normed)
        return [(q, k.repeat_interleave(sharing, 1)) for q, k in pairs]

    def values(
        self,
        x: Float[Tensor, "batch time d_model"],
        v_first: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    ) -> Float[Tensor, "batch kv_heads time d_head"]:
        """Return the value of each token; arguments are those of `forward`."""
        v = self.own_values(x)
        if self.value_mix_share is None:
            return v
        if v_first is None:
            raise BilensError(
                "v_first=None, but with value_mix the values of the first block are mixed in; pass "
                "model.first_block_values(x0)"
            )
        return (1 - self.value_mix_share) * v + self.value_mix_share * v_first

    def own_values(
        self, x: Float[Tensor, "batch time d_model"]
    ) -> Float[Tensor, "batch kv_heads time d_head"]:
        """Return the values of this block, before those of the first are mixed in."""
        return self._heads(self.value(x))

    @abstractmethod
    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Float[Tensor, "batch heads time d_head"]:
        """Return the mixed values of each head, sum_s A_ts v_s."""

    @abstractmethod
    def pattern(
        self,
        scores: list[Float[Tensor, "*batch time seen"]],
        seen: Bool[Tensor, "time seen"],
        values: Float[Tensor, "*batch seen d_head"],
    ) -> Float[Tensor, "*batch time seen"]:
        """Return A from the scores q . k of each pair, the visible pairs `seen` and the values."""

    def _queries_keys(
        self, x: Tensor, pos_embed: Tensor | None, rope: Rope | None, *, normed: bool = True
    ) -> QueriesKeys:
        read = x if pos_embed is None else x + pos_embed

        def heads(linear: nn.Linear) -> Tensor:
            rows = self._heads(linear(read))
            if self.qk_norm and normed:
                rows = functional.rms_norm(rows, rows.shape[-1:])
            return rows if rope is None else rotate(rows, rope)

        first = heads(self.query), heads(self.key)
        return [first, (heads(self.query2), heads(self.key2))] if self.pairs == 2 else [first]

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h d) -> b h t d", d=self.d_head)

    @property
    def W_Q(self) -> Float[Tensor, "heads d_model d_head"]:
        """Query weights of each head: q = x W_Q."""
        return self._reading(self.query)

    @property
    def W_K(self) -> Float[Tensor, "heads d_model d_head"]:
        """Key weights of each head; heads that share keys have the same."""
        return self._reading(self.key)

    @property
    def W_Q2(self) -> Float[Tensor, "heads d_model d_head"]:
        """Weights of the second queries of each head, with two pairs."""
        return self._reading(self.query2)

    @property
    def W_K2(self) -> Float[Tensor, "heads d_model d_head"]:
        """Weights of the second keys of each head, with two pairs."""
        return self._reading(self.key2)

    @property
    def W_V(self) -> Float[Tensor, "heads d_model d_head"]:
        """Value weights of each head; heads that share values have the same."""
        return self._reading(self.value)

    @property
    def W_O(self) -> Float[Tensor, "heads d_head d_model"]:
        """Output weights of each head."""
        return rearrange(self.out.weight, "m (h d) -> h d m", d=self.d_head)

    def _reading(self, linear: nn.Linear) -> Tensor:
        heads = rearrange(linear.weight, "(h d) m -> h m d", d=self.d_head)
        return heads.repeat_interleave(self.n_heads // heads.shape[0], 0)


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
