"""The two Triton kernels of the states of texts of several chunks, and the sizes of their tiles.

One adds up states, S_ijk = sum_s a_si b_sj c_sk, over the tokens before each chunk. The other reads
from two axes of such a state,

    y_tk = sum_ij qa_ti qb_tj S_ijk.

Other chunks reach the output and all gradients by reads of this form (`bilens.kernels.products`),
from one state in the order of time and one from the end. `bilens.kernels.triton_quadratic` adds the
tokens of the chunk itself. Products of coordinates are made in registers, in the layout that the
tensor cores take, and never written to memory. A state is read with any of its axes as the
output's, by strides.

Tensors are (batch, heads, time, width), read where they are by three strides each, with the last
one 1. Widths that are no power of two are masked. Head h has the keys of head h // SHARING.
"""

from functools import cache
from typing import Literal

import triton
import triton.language as tl

Tiles = dict[str, int]
OTHER = "other"
"""Any card without measurements of its own."""


CardTiles = dict[str, dict[tuple[int, int, str], tuple[int, ...]]]
"""Sizes of `read_kernel` and of `states_kernel`, as `tile_sizes` names them, by bytes of a number,
largest width, and kind of launch: of symmetric states (half) or of any."""

TILES: dict[str, CardTiles] = {
    # Not timed; chosen to fit the registers and the 99 kB of shared memory of cards since 2020.
    OTHER: {
        "read": {
            (2, 32, "any"): (128, 4, 32, 128, 4, 3),
            (2, 64, "any"): (128, 2, 64, 128, 8, 3),
            (2, 128, "any"): (64, 1, 64, 128, 4, 2),
            (4, 32, "any"): (64, 1, 32, 128, 4, 2),
            (4, 64, "any"): (64, 1, 32, 128, 8, 1),
            (4, 128, "any"): (32, 1, 32, 64, 4, 1),
        },
        "states": {
            (2, 32, "any"): (64, 4, 32, 128, 4, 3),
            (2, 64, "any"): (64, 2, 64, 128, 4, 3),
            (2, 128, "any"): (64, 1, 128, 128, 8, 2),
            (4, 32, "any"): (32, 2, 32, 128, 4, 2),
            (4, 64, "any"): (32, 1, 64, 128, 4, 2),
            (4, 128, "any"): (32, 1, 64, 64, 4, 2),
        },
    },
    # The fastest timed on an H100 with Triton 3.9, 4,096 to 65,536 tokens, 8 heads; all gave the
    # same bits four times.
    "sm_90": {
        "read": {
            (2, 32, "any"): (128, 4, 32, 128, 4, 3),
            (2, 64, "any"): (128, 2, 64, 128, 4, 3),
            (2, 128, "any"): (128, 4, 32, 128, 8, 3),
        },
        "states": {
            (2, 32, "half"): (128, 4, 16, 128, 4, 3),
            (2, 32, "any"): (128, 2, 32, 128, 4, 3),
            (2, 64, "half"): (128, 8, 16, 128, 4, 2),
            (2, 64, "any"): (128, 8, 16, 128, 4, 3),
            (2, 128, "half"): (128, 8, 16, 128, 4, 2),
            (2, 128, "any"): (128, 8, 16, 128, 4, 3),
        },
    },
}
"""Tiles by card. tests/kernels/test_compiled.py compares them with the limits of two cards."""
LENGTHS = {16: 256, 32: 512, 64: 1024, 128: 4096}
"""Tokens of a chunk by width, the fastest of those timed on an H100; 16 was not timed."""
HALF = 16
"""Columns of a tile of a symmetric state; those above its diagonal are also those below it."""


@cache
def tile_sizes(
    kernel: Literal["read", "states"],
    widths: tuple[int, int, int],
    itemsize: int,
    *,
    half: bool,
    card: str = OTHER,
) -> Tiles:
    """Return tiles of a kernel: BT tokens, BI by BK (or BJ, of states) products, BN columns.

    Args:
        kernel: `read_kernel` or `states_kernel`.
        widths: of both factors and of the values, powers of two from 16.
        itemsize: bytes of a number.
        half: whether both factors are the same.
        card: a key of `TILES`.
    """
    second = "BK" if kernel == "read" else "BJ"
    sizes = _find(kernel, card, itemsize, widths, "half" if half else "any")
    tiles = dict(zip(("BT", "BI", second, "BN", "num_warps", "num_stages"), sizes, strict=True))
    columns = HALF if half else min(tiles[second], widths[1])
    rows = min(tiles["BI"] * tiles[second] // columns, widths[0])
    return tiles | {"BI": rows, second: columns, "BN": min(tiles["BN"], widths[2])}


def _find(
    kernel: Literal["read", "states"],
    card: str,
    itemsize: int,
    widths: tuple[int, int, int],
    kind: str,
) -> tuple[int, ...]:
    """Return the sizes of a card for a kind of launch, for any kind, or of any card."""
    width = max(*widths, 32)
    for place in (card, OTHER):
        table = TILES.get(place, {}).get(kernel, {})
        for name in (kind, "any"):
            if (itemsize, width, name) in table:
                return table[itemsize, width, name]
    raise LookupError(f"no tiles of {itemsize} bytes and width {width}")


@triton.jit
def head_start(x, head, heads, in_batch, in_head):  # type: ignore[no-untyped-def]
    """Return a pointer to a head, counted over the heads of all texts."""
    return x + (head // heads) * in_batch + (head % heads) * in_head


@triton.jit  # type: ignore[untyped-decorator]
def _tile(x, rows, columns, end, stride, W: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return rows and columns of a matrix (end, W), zero after both."""
    # Offsets of long texts exceed 32 bits.
    at = rows.to(tl.int64)[:, None] * stride + columns[None]
    inside = (rows < end)[:, None]
    if W != D:
        inside = inside & (columns < W)[None]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def states_kernel(  # type: ignore[no-untyped-def]
    a, b, c, start, states, last, time, length, segments, heads,
    a_batch, a_head, a_time, b_batch, b_head, b_time, c_batch, c_head, c_time,
    DA: tl.constexpr, DB: tl.constexpr, DC: tl.constexpr,
    WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BN: tl.constexpr,
    SHARING: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, TOTALS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the states before each chunk of a text.

    Segments of the text are summed side by side: first their totals, then, from the sum of the
    totals before it, the states of each.

    Args:
        a: (batch, heads, time, WA), and so b and c, with their strides.
        start: the state before each segment (kv_heads, segments, DA, DB, DC) in float32, or None.
        states: to be written (kv_heads, chunks, DA, DB, DC); the first is left out without a start.
        last: to be written, the state after all tokens (kv_heads, DA, DB, DC); None if not needed.
            With TOTALS the sum of each segment (kv_heads, segments, DA, DB, DC).
        time: number of tokens.
        length: of a chunk.
        segments: of the text, each of as many chunks, but for the last.
        heads: of a text.
        DA: the next power of two from WA, and so DB and DC.
        REVERSE: from the end, with the tokens of all heads that share keys.
        HALF: a is b; the state below its diagonal is written from above it.
        TOTALS: only the sum of each segment.
    """
    # Programs of one head follow one another, and read the same tokens.
    program, per_row = tl.program_id(0), DB // BJ * (DC // BN)
    part = program // (DA // BI * per_row)
    head, segment = (part // segments).to(tl.int64), part % segments
    first, left = program // per_row % (DA // BI) * BI, program % per_row // (DC // BN) * BJ
    tile = tl.arange(0, BI * BJ)
    i, j = first + tile // BJ, left + tile % BJ
    e = program % (DC // BN) * BN + tl.arange(0, BN)
    at = (i * DB + j)[:, None] * DC + e[None]
    # The place of the mirror image, for a symmetric state.
    below = (j * DB + i)[:, None] * DC + e[None]
    size = DA * DB * DC
    chunks = tl.cdiv(time, length)
    steps = tl.cdiv(chunks, segments)
    sharing = SHARING if REVERSE else 1
    if (not HALF) or (left + BJ > first):
        # In float32 also for inputs of 16 bits: a state is a sum over the whole text.
        S = tl.zeros((BI * BJ, BN), tl.float32)
        if start is not None:
            S += tl.load(start + (head * segments + segment) * size + at)
        for step in range(segment * steps, min(segment * steps + steps, chunks)):
            chunk = chunks - 1 - step if REVERSE else step
            if (not TOTALS) and (start is not None or step > 0):
                out = states + (head * chunks + chunk) * size
                tl.store(out + at, S.to(states.dtype.element_ty))
                if HALF and left > first:
                    tl.store(out + below, S.to(states.dtype.element_ty))
            # Nobody reads the state after the last chunk, unless the text is resumed from there.
            if last is not None or step + 1 < chunks:
                for shared in range(head * sharing, head * sharing + sharing):
                    a_ = head_start(a, shared, heads, a_batch, a_head)
                    b_ = head_start(b, shared, heads, b_batch, b_head)
                    c_ = head_start(c, shared, heads, c_batch, c_head)
                    for begin in range(chunk * length, min(chunk * length + length, time), BT):
                        t = begin + tl.arange(0, BT)
                        factors_a = _tile(a_, t, first + tl.arange(0, BI), time, a_time, WA, DA)
                        factors_b = _tile(b_, t, left + tl.arange(0, BJ), time, b_time, WB, DB)
                        pairs = tl.reshape(
                            factors_a[:, :, None] * factors_b[:, None, :], (BT, BI * BJ)
                        )
                        values = _tile(c_, t, e, time, c_time, WC, DC)
                        S = tl.dot(tl.trans(pairs), values, S, input_precision=PRECISION)
        if (last is not None) and (TOTALS or segment == segments - 1):
            out = last + (head * segments + segment if TOTALS else head) * size
            tl.store(out + at, S)
            if HALF and left > first:
                tl.store(out + below, S)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(  # type: ignore[no-untyped-def]
    qa, qb, states, y, scale, time, length, heads,
    qa_batch, qa_head, qa_time, qb_batch, qb_head, qb_time,
    DA: tl.constexpr, DB: tl.constexpr, DC: tl.constexpr,
    WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    SA: tl.constexpr, SB: tl.constexpr, SC: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    SHARING: tl.constexpr, REVERSE: tl.constexpr, HALF: tl.constexpr, RESUMED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what queries read from the state of their chunk, zeros where there is none.

    Args:
        qa: (batch, heads, time, WA), and so qb, with their strides.
        states: as `states_kernel` writes them, with strides SA, SB and SC for the axes of a, b, c.
        y: to be written in float32, (batch, heads, time, WC) in a row.
        scale: of y.
        time: number of tokens.
        length: of a chunk, a multiple of BT.
        heads: of queries in a text.
        SHARING: heads of queries that read a state.
        REVERSE: the state of a chunk is of the tokens after it.
        HALF: qa is qb and the state symmetric: entries above its diagonal count twice.
        RESUMED: whether a state precedes all tokens.
    """
    program, rows = tl.program_id(0), tl.cdiv(time, BT)
    columns: tl.constexpr = DC // BN
    # Programs of one head follow one another, and read the same states.
    head, place = (program // (rows * columns)).to(tl.int64), program % (rows * columns)
    begin = place // columns * BT
    t, e = begin + tl.arange(0, BT), place % columns * BN + tl.arange(0, BN)
    chunks, chunk = tl.cdiv(time, length), begin // length
    beyond = chunk + 1 < chunks if REVERSE else chunk > 0
    total = tl.zeros((BT, BN), tl.float32)
    if RESUMED or beyond:
        qa = head_start(qa, head, heads, qa_batch, qa_head)
        qb = head_start(qb, head, heads, qb_batch, qb_head)
        S = states + (head // SHARING * chunks + chunk) * DA * DB * DC + e[None] * SC
        tile = tl.arange(0, BI * BK)
        for left in range(0, DB, BK):
            right = _tile(qb, t, left + tl.arange(0, BK), time, qb_time, WB, DB)
            for start in range(0, left + BK if HALF else DA, BI):
                column = start + tl.arange(0, BI)
                factors = _tile(qa, t, column, time, qa_time, WA, DA)
                if HALF:
                    factors = tl.where(column[None] < left, 2 * factors, factors)
                pairs = tl.reshape(factors[:, :, None] * right[:, None, :], (BT, BI * BK))
                at = (start + tile // BK) * SA + (left + tile % BK) * SB
                part = tl.load(S + at[:, None])
                total = tl.dot(pairs, part, total, input_precision=PRECISION)
    out = t.to(tl.int64)[:, None] * WC + e[None]
    inside = (t < time)[:, None]
    if WC != DC:
        inside = inside & (e < WC)[None]
    tl.store(y + head * time * WC + out, total * scale, mask=inside)
