"""`bilens.kernels.chunked` by Triton kernels, for GPUs, in float32 or bfloat16.

Products of tiles are in the dtype of the inputs and add up in float32. One of float32 is three of
the tensor cores' and exact to about 1e-5, or one of them where torch's own products are
(`torch.backends.cuda.matmul.fp32_precision = "tf32"`). A text of up to d_head^2 tokens is one
chunk, whose pattern costs less than a state would. Widths are padded to powers of two.
"""

from math import prod
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from bilens.kernels.features import both_orders, one_order, weights
from bilens.kernels.gradients import Inputs, Kernel
from bilens.kernels.triton_kernels import read_kernel, read_sizes, states_kernel, states_sizes

__all__ = ["triton_chunked"]


def chunk_length(time: int, width: int) -> int:
    """Tokens of a chunk, a multiple of any tile: all of them where a state would cost more."""
    return time if time <= width**2 else 8 * width


def _attend(inputs: Inputs, scale: float, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    q1, _, v, _, _ = inputs
    text = _Text(inputs)
    one, key_one, values, two, key_two = text.parts
    keys = key_one, key_two, values
    states = text.states(keys, state)
    y = text.read((one, two), keys, states, (0, 1, 2), scale)
    y = y.unflatten(0, q1.shape[:2])[..., : v.shape[-1]].to(v.dtype)
    if state is None or states.last is None:
        return y, None
    return y, text.kept(states.last).view_as(state)


def _gradients(
    inputs: Inputs, state: Tensor | None, dy: Tensor, dstate: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the inputs and of the state, each read by two axes of a state."""
    text = _Text(inputs)
    q1, k1, v, q2, k2 = text.parts
    above = text.flat(dy)
    if dstate is not None and text.squared:
        # As a state is, in which one of each pair stands for both.
        dstate = dstate / weights(inputs[1].shape[-1], dstate)
    before = text.states((k1, k2, v), state)
    after = text.states((q1, q2, above), dstate, reverse=True)
    twice = 2.0 if text.squared else 1.0
    found = [
        text.read((q2, above), (k2, v, k1), before, (1, 2, 0), twice),
        text.read((k2, v), (q2, above, q1), after, (1, 2, 0), twice, reverse=True),
        text.read((k1, k2), (q1, q2, above), after, (0, 1, 2), reverse=True),
    ]
    if not text.squared:
        found += [
            text.read((q1, above), (k1, v, k2), before, (0, 2, 1)),
            text.read((k1, v), (q1, above, q2), after, (0, 2, 1), reverse=True),
        ]
    given = [x for x in inputs if x is not None]
    gradients: list[Tensor | None] = [
        x.unflatten(0, like.shape[:2])[..., : like.shape[-1]].to(like.dtype)
        for x, like in zip(found, given, strict=True)
    ]
    gradients += [None] * (5 - len(found))
    if state is None or after.last is None:
        return [*gradients, None]
    first = text.kept(after.last).view_as(state)
    if text.squared:
        first = first * weights(inputs[1].shape[-1], first)
    return [*gradients, first]


class _States(NamedTuple):
    """States (kv_heads, chunks, ...) before each chunk, and the one behind all of them.

    There is no last one unless there was one to begin with, and none at all for one chunk then.
    """

    before: Tensor | None
    last: Tensor | None


class _Text:
    """Queries, keys and values as the kernels take them, and the launches of these.

    Attributes:
        parts: q1, k1, v, q2 and k2 (heads, time, width), the heads of all texts in a row.
        squared: whether one score is.
    """

    def __init__(self, inputs: Inputs) -> None:
        q1, k1, v, q2, k2 = inputs
        self.squared, self._sharing = q2 is None, q1.shape[1] // k1.shape[1]
        self._widths = k1.shape[-1], (k1 if k2 is None else k2).shape[-1], v.shape[-1]
        # The interpreter has no products of bfloat16.
        self._dtype = torch.float32 if triton.knobs.runtime.interpret else v.dtype
        self._itemsize = v.element_size()
        found = [self.flat(x) for x in inputs if x is not None]
        self.parts = [*found, *found[:2]][:5]
        self._time, width = found[0].shape[1:]
        self._length = chunk_length(self._time, width)

    def flat(self, x: Tensor) -> Tensor:
        """From (batch, heads, time, width) to (batch * heads, time, a power of two)."""
        more = _padded(x.shape[-1]) - x.shape[-1]
        return functional.pad(x.to(self._dtype), (0, more)).flatten(0, 1).contiguous()

    def whole(self, state: Tensor) -> Tensor:
        """A state as the kernels have it, of all products (kv_heads, width, width, d_value)."""
        rows, columns, _ = self._widths
        found = state.flatten(0, 1)
        if self.squared:
            found = both_orders(found, rows)
        found = found.unflatten(1, (rows, columns))
        if self.squared:
            # The gradient of a state may differ where one pair stands in two rows.
            found = (found + found.transpose(1, 2)) / 2
        more = [_padded(width) - width for width in self._widths]
        return functional.pad(found, (0, more[2], 0, more[1], 0, more[0])).contiguous()

    def kept(self, state: Tensor) -> Tensor:
        """Back from `whole`, (kv_heads, features, d_value)."""
        rows, columns, values = self._widths
        found = state[:, :rows, :columns, :values].flatten(1, 2)
        return one_order(found, rows) if self.squared else found

    def states(
        self, keys: tuple[Tensor, Tensor, Tensor], start: Tensor | None, *, reverse: bool = False
    ) -> _States:
        """The states of keys, going on from one, or from the end."""
        a, b, c = keys
        widths = a.shape[-1], b.shape[-1], c.shape[-1]
        chunks = triton.cdiv(self._time, self._length)
        if start is None and chunks == 1:
            return _States(None, None)
        start = None if start is None else self.whole(start)
        heads = a.shape[0] // self._sharing if reverse else a.shape[0]
        states = a.new_empty(heads, chunks, *widths)
        last = None if start is None else torch.empty_like(start)
        sizes = states_sizes(widths, self._itemsize, half=a is b)
        tiles = (
            width // sizes[name] for width, name in zip(widths, ("BI", "BJ", "BN"), strict=True)
        )
        with torch.cuda.device_of(a):
            states_kernel[heads * prod(tiles),](
                *(a, b, c, start, states, last, self._time, self._length),
                **dict(zip(("DA", "DB", "DC"), widths, strict=True)),
                **sizes,
                SHARING=self._sharing,
                REVERSE=reverse,
                HALF=a is b,
                PRECISION=_precision(),
            )
        return _States(states, last)

    def read(
        self,
        queries: tuple[Tensor, Tensor],
        keys: tuple[Tensor, Tensor, Tensor],
        states: _States,
        axes: tuple[int, int, int],
        scale: float = 1.0,
        *,
        reverse: bool = False,
    ) -> Tensor:
        """What queries read (heads, time, width) from chunks and from states.

        Args:
            queries: of two scores.
            keys: of two scores, and what is read.
            states: of the same keys, perhaps in another order.
            axes: which axes of the states are those of the keys.
            scale: of what is read.
            reverse: whether queries are keys, that look at queries behind them.
        """
        a, b, c = keys
        widths = a.shape[-1], b.shape[-1], c.shape[-1]
        # The sizes of a state's axes, of which a stride is the product of those behind it.
        sides = [width for _, width in sorted(zip(axes, widths, strict=True))]
        strides = [prod(sides[axis + 1 :]) for axis in axes]
        half = queries[0] is queries[1]
        sizes = read_sizes(widths, self._itemsize, half=half)
        heads = queries[0].shape[0]
        tiles = triton.cdiv(self._time, sizes["BT"]) * (widths[2] // sizes["BN"])
        y = a.new_empty(heads, self._time, widths[2])
        with torch.cuda.device_of(a):
            read_kernel[heads * tiles,](
                *(*queries, *keys, states.before, y, scale, self._time, self._length),
                **dict(zip(("DA", "DB", "DC"), widths, strict=True)),
                **dict(zip(("SA", "SB", "SC"), strides, strict=True)),
                **sizes,
                SHARING=self._sharing,
                REVERSE=reverse,
                HALF=half,
                RESUMED=states.last is not None,
                PRECISION=_precision(),
            )
        return y


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _precision() -> str:
    """Of products in float32."""
    if torch.version.hip or triton.knobs.runtime.interpret:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


triton_chunked = Kernel(_attend, _gradients)
