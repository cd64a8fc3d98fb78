"""Causal attention, whatever its pattern, with its weights under the names of the field."""

from abc import abstractmethod

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from bilens.errors import BilensError
from bilens.nn.position import rotate

__all__ = ["Attention", "QueriesKeys", "Rope"]

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of `bilens.nn.position.rotation`."""
QueriesKeys = list[tuple[Tensor, Tensor]]
"""One or two pairs of queries (batch, heads, time, d_head) and keys (batch, kv_heads, ...)."""


class Attention(nn.Module):
    """y_t = sum_h O_h sum_s A^h_ts V_h x_s; what the pattern A is, a subclass says.

    Args:
        d_model: width of the input and of the output.
        n_heads: number of heads.
        n_kv_heads: number of heads of keys and values, each shared by as many heads.
        bias: whether the maps have biases.
        layer: number of the block, which names its keys and values in a cache.
        qk_norm: whether queries and keys are divided by their root mean square.
        value_mix: whether the values of the first block are mixed into those of this one.
        pairs: of queries and keys, one or two.
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
        """Attend to what came before.

        Args:
            x: what values are read from.
            pos_embed: what shortformer positions add where queries and keys are read.
            rope: what rotary positions turn queries and keys by.
            mask: where it is True a token may be looked at; None for everything up to itself.
            cache: what is kept of earlier tokens, which grows by the new ones.
            v_first: the values of the first block, where they are mixed in.
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
        """A: how much each head looks from every position at every earlier one."""
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
        """The queries and keys of each pair; keys that heads share stand there for each of them.

        Arguments are those of `forward`; `normed` says whether QK-norm acts, where the model has
        it.
        """
        sharing = self.n_heads // self.n_kv_heads
        found = self._queries_keys(x, pos_embed, rope, normed=normed)
        return [(q, k.repeat_interleave(sharing, 1)) for q, k in found]

    def values(
        self,
        x: Float[Tensor, "batch time d_model"],
        v_first: Float[Tensor, "batch kv_heads time d_head"] | None = None,
    ) -> Float[Tensor, "batch kv_heads time d_head"]:
        """What each token hands to those that look at it; arguments are those of `forward`."""
        own = self.own_values(x)
        if self.value_mix_share is None:
            return own
        if v_first is None:
            raise BilensError(
                "v_first=None, but with value_mix the values of the first block are mixed in; pass "
                "model.first_block_values(x0)"
            )
        return (1 - self.value_mix_share) * own + self.value_mix_share * v_first

    def own_values(
        self, x: Float[Tensor, "batch time d_model"]
    ) -> Float[Tensor, "batch kv_heads time d_head"]:
        """What this block reads as values, before those of the first are mixed in."""
        return self._heads(self.value(x))

    @abstractmethod
    def attend(
        self, qk: QueriesKeys, v: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Float[Tensor, "batch heads time d_head"]:
        """The values that each head takes in, sum_s A_ts v_s."""

    @abstractmethod
    def pattern(
        self,
        scores: list[Float[Tensor, "*batch time seen"]],
        seen: Bool[Tensor, "time seen"],
        values: Float[Tensor, "*batch seen d_head"],
    ) -> Float[Tensor, "*batch time seen"]:
        """A from the scores q . k of each pair; `seen` may be looked at, `values` are mixed."""

    def _queries_keys(
        self, x: Tensor, pos_embed: Tensor | None, rope: Rope | None, *, normed: bool = True
    ) -> QueriesKeys:
        read = x if pos_embed is None else x + pos_embed

        def heads(linear: nn.Linear) -> Tensor:
            found = self._heads(linear(read))
            if self.qk_norm and normed:
                found = functional.rms_norm(found, found.shape[-1:])
            return found if rope is None else rotate(found, rope)

        first = heads(self.query), heads(self.key)
        return [first, (heads(self.query2), heads(self.key2))] if self.pairs == 2 else [first]

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
    def W_Q2(self) -> Float[Tensor, "heads d_model d_head"]:
        """What each head reads its second queries with, where it has them."""
        return self._reading(self.query2)

    @property
    def W_K2(self) -> Float[Tensor, "heads d_model d_head"]:
        """What each head reads its second keys with, where it has them."""
        return self._reading(self.key2)

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
