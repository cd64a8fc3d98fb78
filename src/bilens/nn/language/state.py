"""What attention without softmax keeps of earlier tokens: a state that never grows."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from bilens.errors import BilensError

__all__ = ["StateLayer"]


class StateLayer(CacheLayerMixin):
    """The state of one block, and how many tokens it stands for.

    Attributes:
        keys: the state (batch, kv_heads, d_value, features), under the name that transformers gives
            to what a layer keeps; None before the first token.
        seen: number of tokens.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Tensor | None = None
        self.seen = 0

    def put(self, state: Tensor, tokens: int) -> None:
        """Keep the state behind some more tokens."""
        self.keys, self.seen = state, self.seen + tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values are not kept.

        Raises:
            BilensError: always.
        """
        raise BilensError(
            "past_key_values holds the states of attention without softmax, which keeps no keys; "
            "pass a DynamicCache"
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The first state has the shape of all."""

    def get_seq_length(self) -> int:
        """Number of tokens so far."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens so far and the new ones, from the first."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1, for no end."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys, self.seen = None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let every beam go on from the one it came from."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every text so many times."""
        if self.keys is not None:
            self.keys = self.keys.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some of the texts."""
        if self.keys is not None:
            self.keys = self.keys[indices.to(self.keys.device)]
