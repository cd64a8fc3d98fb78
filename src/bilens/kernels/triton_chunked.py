"""The chunked form as Triton kernels, for GPUs.

Written for a GPU and checked in Triton's interpreter on a CPU alone, outputs and gradients; it has
not been timed, and its tile sizes are guesses.

The features q1_i q2_j are never written to memory. For each coordinate i of the first factor, the
second factor is scaled by column i and multiplied with slice i of the state, a matrix (d_head,
d_value), so all work is products of tiles. One kernel adds up the states before each chunk; the
same one, from the end, adds up their gradients. One mixes; two pull gradients back to queries and
to keys and values. About 4 d_head^2 d_value operations a token and head forward. In squared
attention the outputs and the states take half of them, from slices on and above the diagonal;
gradients of queries and keys take all.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["triton_chunked"]

CHUNK = 1024
"""Tokens of a chunk, each of which keeps a state of d_head^2 d_value numbers."""
TILE = 64
"""Tokens of a tile."""
HALF_COLUMNS = 32
"""Columns of a tile of the symmetric half."""

_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def triton_chunked(
    q1: Float[Tensor, "batch heads time d_head"],
    k1: Float[Tensor, "batch kv_heads time d_head"],
    v: Float[Tensor, "batch kv_heads time d_value"],
    q2: Float[Tensor, "batch heads time d_head"] | None,
    k2: Float[Tensor, "batch kv_heads time d_head"] | None,
    scale: float,
) -> Float[Tensor, "batch heads time d_value"]:
    """`bilens.kernels.chunked.chunked` from an empty state, in float32 or bfloat16.

    Products of tiles are in the dtype of the inputs and add up in float32. Heads are padded to a
    power of two, and keys are copied to all heads that share them.
    """

    def flat(x: Tensor) -> Tensor:
        width = max(16, triton.next_power_of_2(x.shape[-1]))
        x = functional.pad(x, (0, width - x.shape[-1]))
        return x.repeat_interleave(q1.shape[1] // x.shape[1], 1).flatten(0, 1).contiguous()

    pair = (None, None) if q2 is None or k2 is None else (flat(q2), flat(k2))
    y = _Triton.apply(flat(q1), flat(k1), flat(v), *pair, scale)  # type: ignore[no-untyped-call]
    whole: Tensor = y.unflatten(0, q1.shape[:2])
    return whole[..., : v.shape[-1]]


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q1: Tensor,
        k1: Tensor,
        v: Tensor,
        q2: Tensor | None,
        k2: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q1, k1, v, q2, k2)
        ctx.scale = scale
        second = (q1, k1) if q2 is None or k2 is None else (q2, k2)
        states = _states(k1, second[1], v, symmetric=q2 is None, reverse=False)
        y = torch.empty_like(v)
        heads, time, _ = v.shape
        _mix_kernel[(heads, triton.cdiv(time, TILE))](
            q1,
            second[0],
            k1,
            second[1],
            v,
            states,
            y,
            scale,
            time,
            **_sizes(q1, v, symmetric=q2 is None),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q1, k1, v, q2, k2 = ctx.saved_tensors
        symmetric = q2 is None
        # A squared score has the same queries and keys in both places, which are pulled alike.
        q2, k2 = (q1, k1) if symmetric else (q2, k2)
        dy = (dy * ctx.scale).contiguous()
        heads, time, _ = v.shape
        sizes, grid = _sizes(q1, v, symmetric=symmetric), (heads, triton.cdiv(time, TILE))
        dq1, dq2, dk1, dk2, dv = (torch.empty_like(x) for x in (q1, q2, k1, k2, v))
        states = _states(k1, k2, v, symmetric=symmetric, reverse=False)
        _queries_kernel[grid](q1, q2, k1, k2, v, dy, states, dq1, dq2, time, **sizes)
        states = _states(q1, q2, dy, symmetric=symmetric, reverse=True)
        _memory_kernel[grid](q1, q2, k1, k2, v, dy, states, dk1, dk2, dv, time, **sizes)
        if symmetric:
            return 2 * dq2, 2 * dk2, dv, None, None, None
        return dq1, dk1, dv, dq2, dk2, None


def _sizes(q: Tensor, v: Tensor, *, symmetric: bool) -> dict[str, Any]:
    width = q.shape[-1]
    return {
        "D": width,
        "DV": v.shape[-1],
        "C": CHUNK,
        "BT": TILE,
        "BJ": min(HALF_COLUMNS, width) if symmetric else width,
        "HALF": symmetric,
        # The interpreter has no products of bfloat16.
        "KIND": tl.float32 if triton.knobs.runtime.interpret else _KINDS[v.dtype],
    }


def _states(a: Tensor, b: Tensor, v: Tensor, *, symmetric: bool, reverse: bool) -> Tensor:
    """Sums of a_i b_j v over the tokens before each chunk, or behind it."""
    heads, time, width = a.shape
    sizes = _sizes(a, v, symmetric=symmetric)
    shape = heads, triton.cdiv(time, CHUNK), width, width, v.shape[-1]
    states = v.new_empty(shape, dtype=torch.float32)
    _states_kernel[(heads, width, width // sizes["BJ"])](
        a, b, v, states, time, REVERSE=reverse, **sizes
    )
    return states


@triton.jit  # type: ignore[untyped-decorator]
def _tile(x, rows, columns, time, width, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some rows and columns of a matrix (time, width), zero behind its end."""
    at = rows.to(tl.int64)[:, None] * width + columns[None]
    return tl.load(x + at, mask=(rows < time)[:, None], other=0.0).to(KIND)


@triton.jit
def _column(x, rows, i, time, width):  # type: ignore[no-untyped-def]
    """One column of a matrix (time, width), zero behind its end, in float32."""
    return tl.load(x + rows.to(tl.int64) * width + i, mask=rows < time, other=0.0).to(tl.float32)


@triton.jit
def _put(x, rows, columns, time, width, values):  # type: ignore[no-untyped-def]
    at = rows.to(tl.int64)[:, None] * width + columns[None]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(rows < time)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _states_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    v,
    states,
    time,
    D: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    REVERSE: tl.constexpr,
):
    head, i, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BJ
    j, e = first + tl.arange(0, BJ), tl.arange(0, DV)
    a, b, v = a + head * time * D, b + head * time * D, v + head * time * DV
    chunks = tl.cdiv(time, C)
    # Below the diagonal the state is that above it, written there too.
    if (not HALF) or (first + BJ > i):
        S = tl.zeros((BJ, DV), tl.float32)
        for step in range(chunks):
            chunk = chunks - 1 - step if REVERSE else step
            out = states + (head * chunks + chunk) * D * D * DV
            tl.store(out + (i * D + j[:, None]) * DV + e[None], S)
            if HALF and first > i:
                tl.store(out + (j[:, None] * D + i) * DV + e[None], S)
            for start in range(chunk * C, min(chunk * C + C, time), BT):
                rows = start + tl.arange(0, BT)
                scaled = _column(a, rows, i, time, D)[:, None] * _tile(b, rows, j, time, D, KIND)
                values = _tile(v, rows, e, time, DV, KIND)
                S += tl.dot(tl.trans(scaled.to(KIND)), values, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _mix_kernel(  # type: ignore[no-untyped-def]
    q1,
    q2,
    k1,
    k2,
    v,
    states,
    y,
    scale,
    time,
    D: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
):
    head, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BT
    d, e, rows = tl.arange(0, D), tl.arange(0, DV), start + tl.arange(0, BT)
    q1, q2 = q1 + head * time * D, q2 + head * time * D
    k1, k2 = k1 + head * time * D, k2 + head * time * D
    v, y = v + head * time * DV, y + head * time * DV
    chunk = start // C
    one, two = _tile(q1, rows, d, time, D, KIND), _tile(q2, rows, d, time, D, KIND)
    mixed = tl.zeros((BT, DV), tl.float32)
    for past in range(chunk * C, start + BT, BT):
        seen = past + tl.arange(0, BT)
        first = tl.dot(one, tl.trans(_tile(k1, seen, d, time, D, KIND)), input_precision="ieee")
        second = tl.dot(two, tl.trans(_tile(k2, seen, d, time, D, KIND)), input_precision="ieee")
        pattern = tl.where(rows[:, None] >= seen[None], first * second, 0.0)
        mixed += tl.dot(pattern.to(KIND), _tile(v, seen, e, time, DV, KIND), input_precision="ieee")
    if chunk > 0:
        S = states + (head * tl.cdiv(time, C) + chunk) * D * D * DV
        for i in range(D):
            column = _column(q1, rows, i, time, D)[:, None]
            for left in range((i // BJ) * BJ if HALF else 0, D, BJ):
                j = left + tl.arange(0, BJ)
                # What stands above the diagonal stands for what is below it too.
                weight = 2.0 if HALF and left > i else 1.0
                scaled = column * weight * _tile(q2, rows, j, time, D, KIND)
                part = tl.load(S + (i * D + j[:, None]) * DV + e[None])
                mixed += tl.dot(scaled.to(KIND), part.to(KIND), input_precision="ieee")
    _put(y, rows, e, time, DV, mixed * scale)


@triton.jit  # type: ignore[untyped-decorator]
def _queries_kernel(  # type: ignore[no-untyped-def]
    q1,
    q2,
    k1,
    k2,
    v,
    dy,
    states,
    dq1,
    dq2,
    time,
    D: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
):
    head, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BT
    d, e, rows = tl.arange(0, D), tl.arange(0, DV), start + tl.arange(0, BT)
    q1, q2 = q1 + head * time * D, q2 + head * time * D
    k1, k2 = k1 + head * time * D, k2 + head * time * D
    dq1, dq2 = dq1 + head * time * D, dq2 + head * time * D
    v, dy = v + head * time * DV, dy + head * time * DV
    chunk = start // C
    one, two = _tile(q1, rows, d, time, D, KIND), _tile(q2, rows, d, time, D, KIND)
    above = _tile(dy, rows, e, time, DV, KIND)
    to_one, to_two = tl.zeros((BT, D), tl.float32), tl.zeros((BT, D), tl.float32)
    for past in range(chunk * C, start + BT, BT):
        seen = past + tl.arange(0, BT)
        keys1, keys2 = _tile(k1, seen, d, time, D, KIND), _tile(k2, seen, d, time, D, KIND)
        first = tl.dot(one, tl.trans(keys1), input_precision="ieee")
        second = tl.dot(two, tl.trans(keys2), input_precision="ieee")
        pulled = tl.dot(above, tl.trans(_tile(v, seen, e, time, DV, KIND)), input_precision="ieee")
        pulled = tl.where(rows[:, None] >= seen[None], pulled, 0.0)
        if not HALF:
            to_one += tl.dot((pulled * second).to(KIND), keys1, input_precision="ieee")
        to_two += tl.dot((pulled * first).to(KIND), keys2, input_precision="ieee")
    if chunk > 0:
        S = states + (head * tl.cdiv(time, C) + chunk) * D * D * DV
        for i in range(D):
            part = tl.load(S + (i * D + d[:, None]) * DV + e[None])
            pulled = tl.dot(above, tl.trans(part.to(KIND)), input_precision="ieee")
            to_two += pulled * _column(q1, rows, i, time, D)[:, None]
            if not HALF:
                to_i = tl.sum(pulled * two.to(tl.float32), 1)
                to_one += tl.where(d[None] == i, to_i[:, None], 0.0)
    if not HALF:
        _put(dq1, rows, d, time, D, to_one)
    _put(dq2, rows, d, time, D, to_two)


@triton.jit  # type: ignore[untyped-decorator]
def _memory_kernel(  # type: ignore[no-untyped-def]
    q1,
    q2,
    k1,
    k2,
    v,
    dy,
    states,
    dk1,
    dk2,
    dv,
    time,
    D: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
):
    head, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BT
    d, e, rows = tl.arange(0, D), tl.arange(0, DV), start + tl.arange(0, BT)
    q1, q2 = q1 + head * time * D, q2 + head * time * D
    k1, k2 = k1 + head * time * D, k2 + head * time * D
    dk1, dk2, dv = dk1 + head * time * D, dk2 + head * time * D, dv + head * time * DV
    v, dy = v + head * time * DV, dy + head * time * DV
    chunk = start // C
    one, two = _tile(k1, rows, d, time, D, KIND), _tile(k2, rows, d, time, D, KIND)
    values = _tile(v, rows, e, time, DV, KIND)
    to_one, to_two = tl.zeros((BT, D), tl.float32), tl.zeros((BT, D), tl.float32)
    to_values = tl.zeros((BT, DV), tl.float32)
    for later in range(start, min(chunk * C + C, time), BT):
        looking = later + tl.arange(0, BT)
        queries1, queries2 = (
            _tile(q1, looking, d, time, D, KIND),
            _tile(q2, looking, d, time, D, KIND),
        )
        above = _tile(dy, looking, e, time, DV, KIND)
        first = tl.dot(one, tl.trans(queries1), input_precision="ieee")
        second = tl.dot(two, tl.trans(queries2), input_precision="ieee")
        seen = looking[None] >= rows[:, None]
        pattern = tl.where(seen, first * second, 0.0)
        to_values += tl.dot(pattern.to(KIND), above, input_precision="ieee")
        pulled = tl.dot(values, tl.trans(above), input_precision="ieee")
        pulled = tl.where(seen, pulled, 0.0)
        if not HALF:
            to_one += tl.dot((pulled * second).to(KIND), queries1, input_precision="ieee")
        to_two += tl.dot((pulled * first).to(KIND), queries2, input_precision="ieee")
    if chunk + 1 < tl.cdiv(time, C):
        S = states + (head * tl.cdiv(time, C) + chunk) * D * D * DV
        for i in range(D):
            column = _column(k1, rows, i, time, D)[:, None]
            part = tl.load(S + (i * D + d[:, None]) * DV + e[None]).to(KIND)
            pulled = tl.dot(values, tl.trans(part), input_precision="ieee")
            to_two += pulled * column
            if not HALF:
                to_i = tl.sum(pulled * two.to(tl.float32), 1)
                to_one += tl.where(d[None] == i, to_i[:, None], 0.0)
            for left in range((i // BJ) * BJ if HALF else 0, D, BJ):
                j = left + tl.arange(0, BJ)
                weight = 2.0 if HALF and left > i else 1.0
                scaled = column * weight * _tile(k2, rows, j, time, D, KIND)
                half = tl.load(S + (i * D + j[:, None]) * DV + e[None])
                to_values += tl.dot(scaled.to(KIND), half.to(KIND), input_precision="ieee")
    if not HALF:
        _put(dk1, rows, d, time, D, to_one)
    _put(dk2, rows, d, time, D, to_two)
    _put(dv, rows, e, time, DV, to_values)
