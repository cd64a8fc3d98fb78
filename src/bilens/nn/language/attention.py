"""Causal softmax attention, with its weights under the names of the field."""

from typing import TYPE_CHECKING

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from bilens.nn.position import rotate

__all__ = ["Attention", "Turn"]

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of `bilens.nn.position.rotation`."""


class Attention(nn.Module):
    """y_t = sum_h O_h sum_s A^h_ts V_h x_s, with A^h = softmax(q_t . k_s / sqrt(d_head)), s <= t.

    Args:
        d_model: width of the input and of the output.
        n_heads: number of heads.
        n_kv_heads: number of heads of keys and values, each shared by as many heads.
        bias: whether the four maps have biases.
        layer: number of the block, which names its keys and values in a cache.
    """

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int, *, bias: bool, layer: int
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.layer = n_heads, n_kv_heads, layer
        self.d_head = d_model // n_heads
        self.query = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.key = nn.Linear(d_model, n_kv_heads * self.d_head, bias=bias)
        self.value = nn.Linear(d_model, n_kv_heads * self.d_head, bias=bias)
        self.out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

    if TYPE_CHECKING:
        __call__ = nn.Module.__call__

    def forward(
        self,
        x: Float[Tensor, "batch time d_model"],
        places: Float[Tensor, "batch time d_model"] | None = None,
        turn: Turn | None = None,
        mask: Bool[Tensor, "batch 1 time seen"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Attend to what came before.

        Args:
            x: what values are read from.
            places: what shortformer positions add where queries and keys are read.
            turn: what rotary positions turn queries and keys by.
            mask: where it is True a token may look; None for everything up to itself.
            cache: earlier keys and values, which grows by the new ones.
        """
        q, k = self._queries_keys(x, places, turn)
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            # A single token may look at everything that the cache holds.
            is_causal=mask is None and q.shape[2] > 1,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        y: Tensor = self.out(rearrange(mixed, "b h t d -> b t (h d)"))
        return y

    def pattern(
        self,
        x: Float[Tensor, "batch time d_model"],
        places: Float[Tensor, "batch time d_model"] | None = None,
        turn: Turn | None = None,
    ) -> Float[Tensor, "batch heads time time"]:
        """A: how much each head looks from every position at every earlier one."""
        q, k = self._queries_keys(x, places, turn)
        k = repeat(k, "b h t d -> b (h n) t d", n=self.n_heads // self.n_kv_heads)
        scores = q @ k.mT / self.d_head**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        looks: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return looks

    def _queries_keys(
        self, x: Tensor, places: Tensor | None, turn: Turn | None
    ) -> tuple[Tensor, Tensor]:
        read = x if places is None else x + places
        q, k = self._heads(self.query(read)), self._heads(self.key(read))
        return (q, k) if turn is None else (rotate(q, turn), rotate(k, turn))

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h d) -> b h t d", d=self.d_head)

    @property
    def W_Q(self) -> Float[Tensor, "heads d_model d_head"]:
        """What each head reads its queries with: q = x W_Q."""
        return self._reading(self.query)

    @property
    def W_K(self) -> Float[Tensor, "heads d_model d_head"]:
        """What each head reads its keys with; heads that share keys have the same."""
        return self._reading(self.key)

    @property
    def W_V(self) -> Float[Tensor, "heads d_model d_head"]:
        """What each head reads its values with; heads that share values have the same."""
        return self._reading(self.value)

    @property
    def W_O(self) -> Float[Tensor, "heads d_head d_model"]:
        """What each head writes with."""
        return rearrange(self.out.weight, "m (h d) -> h d m", d=self.d_head)

    def _reading(self, linear: nn.Linear) -> Tensor:
        heads = rearrange(linear.weight, "(h d) m -> h m d", d=self.d_head)
        return heads.repeat_interleave(self.n_heads // heads.shape[0], 0)
