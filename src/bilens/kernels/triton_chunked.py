"""`bilens.kernels.chunked` by Triton kernels, for GPUs, in float32 or bfloat16.

Products of tiles are in the dtype of the inputs and add up in float32. One of float32 is three of
the tensor cores' and exact to about 1e-5, or one of them where torch's own products are
(`torch.backends.cuda.matmul.fp32_precision = "tf32"`). A text of up to d_head^2 tokens is one
chunk, whose pattern costs less than a state would. Inputs are read where they are: a call copies
nothing, as the host's time is all the time that short texts take.
"""

from collections.abc import Callable
from functools import cache, wraps
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from bilens.kernels.products import Inputs, Kernel, both_orders, one_order, weights
from bilens.kernels.triton_kernels import LENGTHS, OTHER, read_kernel, states_kernel, tile_sizes
from bilens.kernels.triton_quadratic import (
    attend_kernel,
    keys_kernel,
    quadratic_sizes,
    queries_kernel,
)

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton runs its kernels in Python, without products of bfloat16."""


def chunk_length(time: int, width: int) -> int:
    """Return the tokens of a chunk, a multiple of any tile: all if a state would cost more."""
    return time if time <= width**2 else LENGTHS[padded(width)]


@cache
def padded(width: int) -> int:
    """Return the next power of two, at least 16, as tiles have."""
    return max(16, 1 << (width - 1).bit_length())


def segment_count(programs: int, chunks: int, device: torch.device) -> int:
    """Return the number of segments of a text whose states are summed side by side.

    Each is summed twice, so fewer than three are not worth it, nor are segments of a few chunks.
    """
    # A text is summed in segments below four programs for each processor of the card.
    segments = min(4 * processors(device) // programs, chunks // 4)
    return segments if segments > 2 else 1


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a card."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def card_name(device: torch.device) -> str:
    """Return the name of a card in the tables of tiles."""
    if device.type != "cuda" or torch.version.hip:
        return OTHER
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _attend(inputs: Inputs, scale: float, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if state is None and is_one_chunk(inputs[0]):
        return _in_chunks(inputs, scale, None), None
    text = _Text(inputs)
    q1, k1, v, q2, k2 = text.parts
    states = text.states((k1, k2, v), state)
    y = _in_chunks(inputs, scale, text.read((q1, q2), states, (0, 1, 2)))
    _, last = states
    if last is None or state is None:
        return y, None
    return y, text.stored(last).view_as(state)


def _gradients(
    inputs: Inputs, state: Tensor | None, dy: Tensor, dlast: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the inputs and of the state, each a read by two axes of a state."""
    if state is None and is_one_chunk(inputs[0]):
        return [*_gradients_in_chunks(inputs, dy, None), None]
    text = _Text(inputs)
    if dlast is not None and text.squared:
        # As a state, in which one of each pair stands for both.
        dlast = dlast / weights(inputs[1].shape[-1], dlast)
    carried, first = text.carried_gradients(_readable(dy), state, dlast)
    dinputs = _gradients_in_chunks(inputs, dy, carried)
    if first is None or state is None:
        return [*dinputs, None]
    first = text.stored(first).view_as(state)
    if text.squared:
        first = first * weights(inputs[1].shape[-1], first)
    return [*dinputs, first]


def is_one_chunk(q: Tensor) -> bool:
    """Return True if a text needs no state."""
    time, width = q.shape[2:]
    return chunk_length(time, width) >= time


def _in_chunks(inputs: Inputs, scale: float, carried: Tensor | None) -> Tensor:
    """Return outputs in one launch.

    `carried` is what other chunks add to them before the scale, in float32, and is overwritten.
    """
    q1, k1, v, q2, k2 = _readable_inputs(inputs)
    # The kernel counts their numbers from the first on, whatever torch's layout.
    y = v.new_empty(*q1.shape[:3], v.shape[-1]) if carried is None else carried.contiguous()
    grid, numbers, constants = _quadratic_launch(q1, k1, v, q2, gradients=False)
    attend_kernel[grid,](
        *(q1, k1, v, q2, k2, y, scale, *numbers),
        *(stride for x in (q1, k1, v, q2, k2) for stride in _strides(x)),
        **constants,
        CARRIED=carried is not None,
    )
    return y.to(inputs[2].dtype)


def _gradients_in_chunks(
    inputs: Inputs, dy: Tensor, carried: list[Tensor | None] | None
) -> list[Tensor | None]:
    """Return the gradients of the five inputs, in two launches.

    `dy` is the gradient of the outputs times the scale; `carried` is what other chunks add to the
    results, in float32, and is overwritten.
    """
    q1, k1, v, q2, k2 = _readable_inputs(inputs)
    dy = _readable(dy)
    if carried is None:
        results = [None if x is None else x.new_empty(x.shape) for x in (q1, k1, v, q2, k2)]
    else:
        results = [None if x is None else x.contiguous() for x in carried]
    dq1, dk1, dv, dq2, dk2 = results
    grid, numbers, constants = _quadratic_launch(q1, k1, v, q2, gradients=True)
    constants["CARRIED"] = carried is not None
    tensors = q1, k1, v, q2, k2, dy
    strides = [stride for x in tensors for stride in _strides(x)]
    queries_kernel[grid,](*tensors, dq1, dq2, *numbers, *strides, **constants)
    grid = grid // q1.shape[1] * k1.shape[1]
    keys_kernel[grid,](*tensors, dk1, dk2, dv, *numbers, *strides, **constants)
    return [None if x is None else x.to(inputs[2].dtype) for x in results]


def _quadratic_launch(
    q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor | None, *, gradients: bool
) -> tuple[int, tuple[int, int, int, int], dict[str, Any]]:
    """Return the grid over heads of queries, run-time sizes and compile-time constants."""
    constants: dict[str, Any] = {}
    for name, x in (("K", q1), ("2", q1 if q2 is None else q2), ("V", v)):
        width = x.shape[-1]
        constants |= {f"W{name}": width, f"D{name}": padded(width)}
    widest = max(constants["DK"], constants["D2"], constants["DV"])
    constants |= quadratic_sizes(widest, v.element_size(), gradients=gradients)
    constants |= {
        "SHARING": q1.shape[1] // k1.shape[1],
        "SQUARED": q2 is None,
        "PRECISION": _precision() if v.dtype == torch.float32 else "ieee",
    }
    batch, heads, time, width = q1.shape
    grid = batch * heads * -(-time // constants["BT"])
    return grid, (time, chunk_length(time, width), heads, k1.shape[1]), constants


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _readable(x: Tensor) -> Tensor:
    """Return x with coordinates side by side, which it nearly always has."""
    if INTERPRETED:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _readable_inputs(inputs: Inputs) -> Inputs:
    q1, k1, v, q2, k2 = inputs
    q2, k2 = (None if x is None else _readable(x) for x in (q2, k2))
    return _readable(q1), _readable(k1), _readable(v), q2, k2


States = tuple[Tensor, Tensor | None]
"""States (kv_heads, chunks, ...) before each chunk, and the state after all of them.

The last is None without a first state.
"""


class _Text:
    """Queries, keys and values as the kernels take them, and the launches of these.

    Attributes:
        parts: q1, k1, v, q2 and k2 (batch, heads, time, width).
        squared: whether one score is.
        length: tokens of a chunk.
    """

    def __init__(self, inputs: Inputs) -> None:
        q1, k1, v, q2, k2 = inputs
        self.squared, self._sharing = q2 is None, q1.shape[1] // k1.shape[1]
        self._itemsize = v.element_size()
        self._card = card_name(v.device)
        # Of float32 alone: products of bfloat16 have one precision.
        self._precision = _precision() if v.dtype == torch.float32 else "ieee"
        first = [_readable(x) for x in (q1, k1, v)]
        second = first[:2] if q2 is None or k2 is None else [_readable(x) for x in (q2, k2)]
        self.parts = (*first, *second)
        self._time, width = q1.shape[2:]
        self.length = chunk_length(self._time, width)

    def full(self, state: Tensor) -> Tensor:
        """Return a state of all products, (kv_heads, rows, columns, d_value), for the kernels."""
        _, k1, v, _, k2 = self.parts
        rows, columns = k1.shape[-1], k2.shape[-1]
        products = state.flatten(0, 1)
        if self.squared:
            products = both_orders(products, rows)
        products = products.unflatten(1, (rows, columns))
        if self.squared:
            # The gradient of a state may differ where one pair has two rows.
            products = (products + products.transpose(1, 2)) / 2
        # Tiles are powers of two; zeros beyond the widths have no effect on sums.
        more = [padded(width) - width for width in (rows, columns, v.shape[-1])]
        return functional.pad(products, (0, more[2], 0, more[1], 0, more[0])).contiguous()

    def stored(self, state: Tensor) -> Tensor:
        """Return a state of `full` as (kv_heads, features, d_value)."""
        _, k1, v, _, k2 = self.parts
        rows, columns = k1.shape[-1], k2.shape[-1]
        products = state[:, :rows, :columns, : v.shape[-1]].flatten(1, 2)
        return one_order(products, rows) if self.squared else products

    def states(
        self, keys: tuple[Tensor, Tensor, Tensor], start: Tensor | None, *, reverse: bool = False
    ) -> States:
        """Return the states of keys after a first one, in the order of time or from the end."""
        a, b, c = keys
        chunks = -(-self._time // self.length)
        widths = a.shape[-1], b.shape[-1], c.shape[-1]
        sides = padded(widths[0]), padded(widths[1]), padded(widths[2])
        heads = a.shape[0] * a.shape[1] // (self._sharing if reverse else 1)
        sizes = tile_sizes("states", sides, self._itemsize, half=self.squared, card=self._card)
        programs = heads * prod(
            side // sizes[name] for side, name in zip(sides, ("BI", "BJ", "BN"), strict=True)
        )
        # In the dtype of the inputs; the sums over a text are in float32, in registers.
        states = a.new_empty(heads, chunks, *sides)
        last = None
        if start is not None:
            start = self.full(start)
            last = torch.empty_like(start)
        # Sides of tiles are powers of two. Columns beyond the widths are read as zeros.
        constants = dict(zip(("DA", "DB", "DC", "WA", "WB", "WC"), (*sides, *widths), strict=True))
        constants |= sizes

        def launch(start: Tensor | None, last: Tensor | None, segments: int, totals: bool) -> None:
            states_kernel[programs * segments,](
                *(a, b, c, start, states, last, self._time, self.length, segments, a.shape[1]),
                *(*a.stride()[:3], *b.stride()[:3], *c.stride()[:3]),
                **constants,
                SHARING=self._sharing,
                REVERSE=reverse,
                HALF=self.squared,
                TOTALS=totals,
                PRECISION=self._precision,
            )

        # Of a symmetric state, tiles below the diagonal have nothing to do.
        tiles = [
            (first, left)
            for first in range(0, sides[0], sizes["BI"])
            for left in range(0, sides[1], sizes["BJ"])
        ]
        n_blocks = sum(left + sizes["BJ"] > first for first, left in tiles) if self.squared else 1
        share = n_blocks / len(tiles) if self.squared else 1
        segments = segment_count(round(programs * share), chunks, a.device)
        if segments > 1:
            sums = a.new_empty(heads, segments, *sides, dtype=torch.float32)
            launch(None, sums, segments, totals=True)
            # Before each segment is the first state and the sum of all segments before it.
            first = torch.zeros_like(sums[:, :1]) if start is None else start[:, None]
            start = torch.cat([first, sums[:, :-1]], 1).cumsum(1)
        launch(start, last, segments, totals=False)
        return states, last

    def carried_gradients(
        self, dy: Tensor, state: Tensor | None, dlast: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Return what other chunks add to the gradients, and the gradient of a state given.

        The first are those of q1, k1, v, q2 and k2, in float32.
        """
        q1, k1, v, q2, k2 = self.parts
        before = self.states((k1, k2, v), state)
        after = self.states((q1, q2, dy), dlast, reverse=True)
        _, last = after
        twice = 2.0 if self.squared else 1.0
        # Of a squared score both factors have the same gradient: one read instead of two, twice.
        results: list[Tensor | None] = [
            self.read((q2, dy), before, (1, 2, 0), twice),
            self.read((k2, v), after, (1, 2, 0), twice, reverse=True),
            self.read((k1, k2), after, (0, 1, 2), reverse=True),
        ]
        if self.squared:
            return [*results, None, None], last
        results += [
            self.read((q1, dy), before, (0, 2, 1)),
            self.read((k1, v), after, (0, 2, 1), reverse=True),
        ]
        return results, last

    def read(
        self,
        queries: tuple[Tensor, Tensor],
        states: States,
        axes: tuple[int, int, int],
        scale: float = 1.0,
        *,
        reverse: bool = False,
    ) -> Tensor:
        """Return what queries read from states, (batch, heads, time, width), in float32.

        Args:
            queries: for two axes of a state.
            states: of each chunk.
            axes: axes of the states that belong to the queries and to the outputs.
            scale: of the outputs.
            reverse: whether queries are keys, and states those of the queries after them.
        """
        (qa, qb), (before, last) = queries, states
        _, k1, v, _, k2 = self.parts
        of_state = k1.shape[-1], k2.shape[-1], v.shape[-1]
        widths = of_state[axes[0]], of_state[axes[1]], of_state[axes[2]]
        # Of squared attention these are reads of a symmetric state by both of its axes.
        half = self.squared and axes == (0, 1, 2)
        constants = _read_constants(widths, axes, self._itemsize, half, self._card)
        columns = constants["DC"] // constants["BN"]
        heads = qa.shape[0] * qa.shape[1]
        y = qa.new_empty(*qa.shape[:3], widths[2], dtype=torch.float32)
        read_kernel[heads * -(-self._time // constants["BT"]) * columns,](
            *(qa, qb, before, y, scale, self._time, self.length, qa.shape[1]),
            *(*qa.stride()[:3], *qb.stride()[:3]),
            **constants,
            SHARING=1 if reverse else self._sharing,
            REVERSE=reverse,
            HALF=half,
            RESUMED=last is not None,
            PRECISION=self._precision,
        )
        return y


@cache
def _read_constants(
    widths: tuple[int, int, int], axes: tuple[int, int, int], itemsize: int, half: bool, card: str
) -> dict[str, int]:
    """Return the sizes that `read_kernel` is compiled for, of tensors and of tiles."""
    sides = padded(widths[0]), padded(widths[1]), padded(widths[2])
    # The stride of a state's axis is the product of the sizes after it.
    shape = [side for _, side in sorted(zip(axes, sides, strict=True))]
    strides = [prod(shape[axis + 1 :]) for axis in axes]
    names = ("DA", "DB", "DC", "WA", "WB", "WC", "SA", "SB", "SC")
    sizes = tile_sizes("read", sides, itemsize, half=half, card=card)
    return dict(zip(names, (*sides, *widths, *strides), strict=True)) | sizes


def _precision() -> str:
    """Return the precision of products in float32."""
    if torch.version.hip or INTERPRETED:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose launches go to the device of its inputs."""

    @wraps(function)
    def launching(inputs: Inputs, *others: Any) -> Any:
        with torch.cuda.device_of(inputs[2]):
            return function(inputs, *others)

    return launching


triton_chunked = Kernel(_on_its_device(_attend), _on_its_device(_gradients))
