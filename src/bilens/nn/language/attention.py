"""Causal attention: softmax and the difference of two, and a product of scores with its state."""

from abc import abstractmethod
from math import exp
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from bilens.checks import EPS
from bilens.errors import BilensError
from bilens.kernels import bilinear_attention, resume_attention


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
    # In float32 whatever the model's dtype: bfloat16 skips integers above 256.
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
"""Cosines and sines of `rotation`."""
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

    scale: float
    score_constant: nn.Parameter | None  # (pairs, heads), which products of scores may have

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
        self.score_constant = None

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
        output = self.attend(qk, v, mask, cache)
        return self.out(rearrange(output, "b h t d -> b t (h d)"))

    def attention_pattern(
        self,
        x: Float[Tensor, "batch time d_model"],
        pos_embed: Float[Tensor, "batch time d_model"] | None = None,
        rope: Rope | None = None,
        v_first: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    ) -> Float[Tensor, "batch heads time time"]:
        """Return the pattern A: the weight of each position for every later one, by head."""
        scores = [q @ k.mT for q, k in self.queries_keys(x, pos_embed, rope)]
        # Only norms of outputs make a pattern depend on values.
        values = self.values(x, v_first).repeat_interleave(self.n_heads // self.n_kv_heads, 1)
        mask = torch.ones(scores[0].shape[-2:], dtype=torch.bool, device=x.device).tril()
        return self.pattern(scores, mask, values)

    def queries_keys(
        self,
        x: Float[Tensor, "batch time d_model"],
        pos_embed: Float[Tensor, "batch time d_model"] | None = None,
        rope: Rope | None = None,
        *,
        normed: bool = True,
    ) -> QueriesKeys:
        """Return the queries and keys of each pair; shared keys are repeated for each head.

        They have the constants of scores inside. Arguments are those of `forward`; `normed=False`
        skips QK-norm.
        """
        sharing = self.n_heads // self.n_kv_heads
        pairs = self._queries_keys(x, pos_embed, rope, normed=normed)
        pairs = [(q, k.repeat_interleave(sharing, 1)) for q, k in pairs]
        return self._with_constants(pairs)

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
        inputs = x if pos_embed is None else x + pos_embed

        def heads(linear: nn.Linear) -> Tensor:
            rows = self._heads(linear(inputs))
            if self.qk_norm and normed:
                rows = functional.rms_norm(rows, rows.shape[-1:])
            return rows if rope is None else rotate(rows, rope)

        first = heads(self.query), heads(self.key)
        return [first, (heads(self.query2), heads(self.key2))] if self.pairs == 2 else [first]

    def _with_constants(self, pairs: QueriesKeys) -> QueriesKeys:
        if self.score_constant is None:
            return pairs
        # One more coordinate after the rotation: c / scale in queries and 1 in keys.
        constants = (self.score_constant / self.scale)[:, :, None, None]
        return [
            (torch.cat([q, c.to(q).expand_as(q[..., :1])], -1), functional.pad(k, (0, 1), value=1))
            for (q, k), c in zip(pairs, constants, strict=True)
        ]

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
        q, k = qk[0]
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        return _mixed(q, k, v, mask, self.scale)

    def pattern(self, scores: list[Tensor], seen: Tensor, values: Tensor) -> Tensor:
        return _softmax(scores[0] * self.scale, seen)


class DifferentialAttention(Attention):
    """A = softmax(scale q1_t . k1_s) - lambda softmax(scale q2_t . k2_s), s <= t.

    lambda is a learned number of each layer. Two softmaxes share values of the width of one head,
    and the outputs of heads are not normalised.

    Args:
        scale: factor of the scores; 1 / sqrt(d_head) by default.
        sizes: sizes of `Attention`.

    Source: Ye et al. 2024, "Differential Transformer", equation 1; initial lambda: equation 3.
    """

    def __init__(self, *, scale: float | None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scale = self.d_head**-0.5 if scale is None else scale
        self.diff_lambda = nn.Parameter(torch.tensor([0.8 - 0.6 * exp(-0.3 * self.layer)]))

    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend by torch's fused kernels, one softmax after the other."""
        (q1, k1), (q2, k2) = qk
        if cache is not None:
            # A cache holds one array of keys for each layer, so both are kept side by side.
            keys, v = cache.update(torch.cat([k1, k2], -1), v, self.layer)
            k1, k2 = keys.chunk(2, -1)
        first, second = (_mixed(q, k, v, mask, self.scale) for q, k in ((q1, k1), (q2, k2)))
        return first - self.diff_lambda * second

    def pattern(self, scores: list[Tensor], seen: Tensor, values: Tensor) -> Tensor:
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
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all tokens with the new ones, and the offset of the first, 0."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length has no limit."""
        return -1

    def reset(self) -> None:
        self.keys, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let every beam continue from the beam that it came from."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.keys = self.keys.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
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
        self, *, scale: float | None, norm: str, constant: bool = False, **sizes: Any
    ) -> None:
        super().__init__(**sizes)
        self.scale = 1 / self.d_head if scale is None else scale
        self.norm = norm
        if constant:
            self.score_constant = nn.Parameter(torch.zeros(self.pairs, self.n_heads))

    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend by `bilens.kernels`; a mask has one row, which is False for padding."""
        constant = self.score_constant
        # Kernels of squared attention add the constant to the score.
        inside = constant is not None and self.pairs == 1
        (q1, k1), *others = qk if inside else self._with_constants(qk)
        second = [x for pair in others for x in pair]
        q1, k1, v, *second = _in_one_precision(q1, k1, v, *second)
        start = constant[0] / self.scale if constant is not None and inside else None
        options: dict[str, Any] = {
            "scale": self.scale**2,
            "constant": start,
            "normalised": self.norm == "sum",
            "seen": None if mask is None else mask[:, 0, 0],
        }
        if cache is None:
            y = bilinear_attention(q1, k1, v, *second, **options)
        else:
            memory = cache.layers[self.layer]
            if not isinstance(memory, StateLayer):
                raise BilensError(
                    f"past_key_values keeps a {type(memory).__name__} for layer {self.layer}, "
                    "expected a StateLayer; pass use_cache=True without past_key_values first, "
                    "and then the past_key_values of its result"
                )
            y, memory.keys = resume_attention(q1, k1, v, *second, state=memory.keys, **options)
            memory.seen += q1.shape[2]
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
