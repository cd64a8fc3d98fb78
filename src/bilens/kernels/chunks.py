"""A text cut into chunks of tokens, of which a few heads at a time are worked on."""

from typing import NamedTuple

import torch
from torch import Tensor

from bilens.kernels.features import FeatureMap
from bilens.kernels.gradients import Inputs

__all__ = ["Place", "Text"]

CHUNK, FEATURES = 192, 2**19
"""On a CPU: most tokens of a chunk, and numbers of a block of features for each thread, which stay
near its core. A token costs 3 CHUNK multiplications in the pattern of its chunk and 2 d_head^2 with
the state, for each coordinate of the values."""
GPU_CHUNK, GPU_FEATURES = 1024, 2**26
"""On any other device, where few and large products count. Reckoned, not measured."""


class Place(NamedTuple):
    """Some heads of keys and some tokens."""

    heads: slice
    span: slice


class Text:
    """Queries, keys and values of a text.

    Args:
        inputs: q1, k1, v, q2 and k2.

    Attributes:
        symmetric: whether one score is squared.
        dtype: of the arithmetic, at least float32.
        places: all chunks of the first heads in the order of time, then those of the next heads.
        features: the products of coordinates that the state is made of.
    """

    def __init__(self, inputs: Inputs) -> None:
        _, k1, v, q2, k2 = inputs
        self.kv_heads, self.symmetric = k1.shape[1], q2 is None
        self.dtype = torch.promote_types(v.dtype, torch.float32)
        self._parts = [self.by_keys(x) for x in inputs if x is not None]
        heads, sharing, self.time, rows = self._parts[0].shape
        width = rows if k2 is None else k2.shape[-1]
        on_cpu = v.device.type == "cpu"
        length = min(CHUNK if on_cpu else GPU_CHUNK, self.time)
        budget, workers = (FEATURES, torch.get_num_threads()) if on_cpu else (GPU_FEATURES, 1)
        row = sharing * length * width
        at_once = min(heads, workers * max(1, budget // (rows * row)))
        # Where there are fewer heads than threads, each thread has some of the features' rows.
        most = min(rows, -(-workers // at_once))
        parts = max(part for part in range(1, most + 1) if rows % part == 0)
        blocks = -(-rows // parts * row // budget)
        step = -(-rows // parts // blocks)
        self.features = FeatureMap(
            rows=rows,
            width=width,
            symmetric=self.symmetric,
            parts=parts,
            step=step,
            memory=v.new_empty(at_once * parts * step * row, dtype=self.dtype),
        )
        self.places = [
            Place(slice(head, head + at_once), slice(start, min(start + length, self.time)))
            for head in range(0, heads, at_once)
            for start in range(0, self.time, length)
        ]

    def by_keys(self, x: Tensor) -> Tensor:
        """From (batch, heads, time, width) to (batch * kv_heads, sharing, time, width)."""
        split: Tensor = x.unflatten(1, (self.kv_heads, -1))
        return split.flatten(0, 1)

    def tokens(self, x: Tensor, place: Place) -> Tensor:
        """Those of a chunk (heads, sharing * tokens, width), the heads that share keys in a row."""
        return x[place.heads, :, place.span].flatten(1, 2).to(self.dtype)

    def __getitem__(self, place: Place) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q1, k1, v, q2 and k2 of a chunk."""
        found = [self.tokens(x, place) for x in self._parts]
        q1, k1, v, q2, k2 = [*found, *found[:2]][:5]
        return q1, k1, v, q2, k2

    def state(self, given: Tensor | None) -> Tensor:
        """A copy of a state (batch * kv_heads, features, d_value), or zeros, to be added to."""
        v = self._parts[2]
        if given is not None:
            return given.flatten(0, 1).clone()
        return v.new_zeros(v.shape[0], self.features.size, v.shape[-1], dtype=self.dtype)

    def zeros(self) -> list[Tensor]:
        """For the sums of gradients of all inputs, as `by_keys` has them."""
        return [torch.zeros_like(x, dtype=self.dtype) for x in self._parts]
