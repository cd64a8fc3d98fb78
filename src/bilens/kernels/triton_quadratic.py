"""Triton kernels of attention without softmax inside chunks, or over a whole text as one chunk.

    y_t = scale sum_{s<=t} P_ts v_s,    P_ts = (q1_t . k1_s)(q2_t . k2_s),

and with one score its square, (q1_t . k1_s)^2. With g_ts = dy_t . v_s, the gradients of two scores
s1 and s2 are

    dq1_t = sum_{s<=t} s2 g k1_s,   dk1_s = sum_{t>=s} s2 g q1_t,   dv_s = sum_{t>=s} s1 s2 dy_t,

and likewise with 1 and 2 exchanged; those of queries are one launch and those of keys and values
another, so that every score is made twice in a backward pass, and not once for each gradient.

The sums go over the chunk of a token. What a long text adds to them from its other chunks stands in
the outputs before (CARRIED), which are then in float32.

Tensors are (batch, heads, time, width), read where they are by three strides each, with the last
one 1. Pointers to a block are scalars with 64 bits, and offsets inside it have 32. Blocks below the
diagonal have no mask, and their pointers go on by a block in each turn, without a multiplication.
Head h has the keys of head h // SHARING.
"""

from functools import cache

import triton
import triton.language as tl

from bilens.kernels.triton_kernels import head_start

TILES = {
    (2, 32): ((64, 128, 4, 3), (64, 64, 4, 3)),
    (2, 64): ((64, 64, 4, 3), (64, 32, 8, 3)),
    (2, 128): ((64, 32, 8, 2), (32, 32, 4, 2)),
    (4, 32): ((64, 32, 4, 2), (32, 32, 4, 2)),
    (4, 64): ((64, 32, 8, 1), (32, 32, 8, 1)),
    (4, 128): ((32, 32, 8, 1), (32, 16, 8, 1)),
}
"""Rows of a program, rows of a block, warps and stages, by bytes of a number and width: of outputs,
and of gradients. Compiled for cards by tests/kernels/test_compiled.py; not timed yet."""


@cache
def quadratic_sizes(width: int, itemsize: int, *, gradients: bool) -> dict[str, int]:
    """Return the tiles of a kernel for heads and values of up to `width` coordinates."""
    sizes = TILES[itemsize, max(width, 32)][gradients]
    return dict(zip(("BT", "BS", "num_warps", "num_stages"), sizes, strict=True))


@triton.jit
def _row(x, row, stride):  # type: ignore[no-untyped-def]
    """Return a pointer to a row of a matrix."""
    return x + tl.cast(row, tl.int64) * stride


@triton.jit  # type: ignore[untyped-decorator]
def _block(  # type: ignore[no-untyped-def]
    x, first, end, stride, B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Return B rows of a matrix (end, W) from `first` on, with D columns, zero beyond both.

    With WHOLE all rows are inside, and x may point to any row that `first` counts from.
    """
    row, column = tl.arange(0, B), tl.arange(0, D)
    # One multiplication of 64 bits for a block, and none for its numbers.
    at = _row(x, first, stride)
    offsets = row[:, None] * stride + column[None]
    if WHOLE and W == D:
        return tl.load(at + offsets)
    inside = (column < W)[None]
    if not WHOLE:
        inside = inside & (first + row < end)[:, None]
    return tl.load(at + offsets, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _longest_first(time, BT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the head of this program, and the first of its rows."""
    rows_of_text = tl.cdiv(time, BT)
    # The rows that read most begin first, of all heads: the short ones fill what is left.
    every = tl.num_programs(0) // rows_of_text
    head = (tl.program_id(0) % every).to(tl.int64)
    return head, (rows_of_text - 1 - tl.program_id(0) // every) * BT


@triton.jit  # type: ignore[untyped-decorator]
def _carried(  # type: ignore[no-untyped-def]
    y, first, end, B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, CARRIED: tl.constexpr
):  # fmt: skip
    """Return what B rows of an output (end, W) hold, or zeros."""
    if CARRIED:
        return _block(y, first, end, W, B, W, D, False)
    return tl.zeros((B, D), tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _write(y, x, first, end, B: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write B rows of a matrix (end, W) from `first` on."""
    row, column = tl.arange(0, B), tl.arange(0, D)
    inside = (first + row < end)[:, None] & (column < W)[None]
    at = _row(y, first, W)
    tl.store(at + row[:, None] * W + column[None], x.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_block(  # type: ignore[no-untyped-def]
    total, query1, query2, k1, k2, v, past, begin, time, k1_time, k2_time, v_time,
    BT: tl.constexpr, BS: tl.constexpr, WK: tl.constexpr, DK: tl.constexpr,
    W2: tl.constexpr, D2: tl.constexpr,
    WV: tl.constexpr, DV: tl.constexpr, SQUARED: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return outputs with those of a block of keys added."""
    keys = _block(k1, past, time, k1_time, BS, WK, DK, not DIAGONAL)
    pattern = tl.dot(query1, tl.trans(keys), input_precision=PRECISION)
    if SQUARED:
        pattern *= pattern
    else:
        keys = _block(k2, past, time, k2_time, BS, W2, D2, not DIAGONAL)
        pattern *= tl.dot(query2, tl.trans(keys), input_precision=PRECISION)
    if DIAGONAL:
        t, s = begin + tl.arange(0, BT), past + tl.arange(0, BS)
        pattern = tl.where(t[:, None] >= s[None], pattern, 0.0)
    values = _block(v, past, time, v_time, BS, WV, DV, not DIAGONAL)
    return tl.dot(pattern.to(v.dtype.element_ty), values, total, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def]
    q1, k1, v, q2, k2, y, scale, time, length, heads, key_heads,
    q1_batch, q1_head, q1_time, k1_batch, k1_head, k1_time, v_batch, v_head, v_time,
    q2_batch, q2_head, q2_time, k2_batch, k2_head, k2_time,
    WK: tl.constexpr, DK: tl.constexpr, W2: tl.constexpr, D2: tl.constexpr,
    WV: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, SHARING: tl.constexpr, SQUARED: tl.constexpr,
    CARRIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write outputs.

    Args:
        q1: (batch, heads, time, WK), and so k1, v, q2, k2, with their strides.
        y: to be written, (batch, heads, time, WV) in a row.
        scale: of y.
        time: number of tokens.
        length: of a chunk, a multiple of BT and BS, or no less than the time.
        heads: of queries in a text, and so key_heads.
        DK: the next power of two from WK, and so D2 of the second scores, and DV.
        SQUARED: the second score is the first.
        CARRIED: y holds what earlier chunks add to it before the scale.
    """
    head, begin = _longest_first(time, BT)
    q1 = head_start(q1, head, heads, q1_batch, q1_head)
    k1 = head_start(k1, head // SHARING, key_heads, k1_batch, k1_head)
    v = head_start(v, head // SHARING, key_heads, v_batch, v_head)
    query1 = _block(q1, begin, time, q1_time, BT, WK, DK, False)
    query2 = query1
    if not SQUARED:
        q2 = head_start(q2, head, heads, q2_batch, q2_head)
        k2 = head_start(k2, head // SHARING, key_heads, k2_batch, k2_head)
        query2 = _block(q2, begin, time, q2_time, BT, W2, D2, False)
    y += head * time * WV
    total = _carried(y, begin, time, BT, WV, DV, CARRIED)
    low, edge = begin // length * length, begin // BS * BS
    k1_, v_, k2_ = _row(k1, low, k1_time), _row(v, low, v_time), k2
    if not SQUARED:
        k2_ = _row(k2, low, k2_time)
    # fmt: off
    for _ in range(low, edge, BS):
        total = _attend_block(
            total, query1, query2, k1_, k2_, v_, 0, begin, time, k1_time, k2_time, v_time,
            BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, False, PRECISION,
        )
        k1_, v_ = _row(k1_, BS, k1_time), _row(v_, BS, v_time)
        if not SQUARED:
            k2_ = _row(k2_, BS, k2_time)
    for past in range(edge, min(begin + BT, time), BS):
        total = _attend_block(
            total, query1, query2, k1, k2, v, past, begin, time, k1_time, k2_time, v_time,
            BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, True, PRECISION,
        )
    # fmt: on
    _write(y, total * scale, begin, time, BT, WV, DV)


@triton.jit  # type: ignore[untyped-decorator]
def _query_block(  # type: ignore[no-untyped-def]
    total1, total2, query1, query2, above, k1, k2, v, past, begin, time,
    k1_time, k2_time, v_time,
    BT: tl.constexpr, BS: tl.constexpr, WK: tl.constexpr, DK: tl.constexpr,
    W2: tl.constexpr, D2: tl.constexpr,
    WV: tl.constexpr, DV: tl.constexpr, SQUARED: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return gradients of queries with those of a block of keys added."""
    keys1 = _block(k1, past, time, k1_time, BS, WK, DK, not DIAGONAL)
    values = _block(v, past, time, v_time, BS, WV, DV, not DIAGONAL)
    score1 = tl.dot(query1, tl.trans(keys1), input_precision=PRECISION)
    g = tl.dot(above, tl.trans(values), input_precision=PRECISION)
    if DIAGONAL:
        t, s = begin + tl.arange(0, BT), past + tl.arange(0, BS)
        g = tl.where(t[:, None] >= s[None], g, 0.0)
    if SQUARED:
        pattern = (2 * score1 * g).to(k1.dtype.element_ty)
        total1 = tl.dot(pattern, keys1, total1, input_precision=PRECISION)
    else:
        keys2 = _block(k2, past, time, k2_time, BS, W2, D2, not DIAGONAL)
        score2 = tl.dot(query2, tl.trans(keys2), input_precision=PRECISION)
        first, second = (score2 * g).to(k1.dtype.element_ty), (score1 * g).to(k1.dtype.element_ty)
        total1 = tl.dot(first, keys1, total1, input_precision=PRECISION)
        total2 = tl.dot(second, keys2, total2, input_precision=PRECISION)
    return total1, total2


@triton.jit  # type: ignore[untyped-decorator]
def queries_kernel(  # type: ignore[no-untyped-def]
    q1, k1, v, q2, k2, dy, dq1, dq2, time, length, heads, key_heads,
    q1_batch, q1_head, q1_time, k1_batch, k1_head, k1_time, v_batch, v_head, v_time,
    q2_batch, q2_head, q2_time, k2_batch, k2_head, k2_time, dy_batch, dy_head, dy_time,
    WK: tl.constexpr, DK: tl.constexpr, W2: tl.constexpr, D2: tl.constexpr,
    WV: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, SHARING: tl.constexpr, SQUARED: tl.constexpr,
    CARRIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries.

    Args:
        dy: gradient of y times the scale; see `attend_kernel` for the others.
        dq1: to be written, in a row, and so dq2, which is None for one score.
        CARRIED: the gradients hold what other chunks add to them.
    """
    head, begin = _longest_first(time, BT)
    q1 = head_start(q1, head, heads, q1_batch, q1_head)
    k1 = head_start(k1, head // SHARING, key_heads, k1_batch, k1_head)
    v = head_start(v, head // SHARING, key_heads, v_batch, v_head)
    dy = head_start(dy, head, heads, dy_batch, dy_head)
    query1 = _block(q1, begin, time, q1_time, BT, WK, DK, False)
    above = _block(dy, begin, time, dy_time, BT, WV, DV, False)
    query2 = query1
    if not SQUARED:
        q2 = head_start(q2, head, heads, q2_batch, q2_head)
        k2 = head_start(k2, head // SHARING, key_heads, k2_batch, k2_head)
        query2 = _block(q2, begin, time, q2_time, BT, W2, D2, False)
    dq1 += head * time * WK
    total1, total2 = _carried(dq1, begin, time, BT, WK, DK, CARRIED), tl.zeros((BT, D2), tl.float32)
    if not SQUARED:
        dq2 += head * time * W2
        total2 = _carried(dq2, begin, time, BT, W2, D2, CARRIED)
    low, edge = begin // length * length, begin // BS * BS
    k1_, v_, k2_ = _row(k1, low, k1_time), _row(v, low, v_time), k2
    if not SQUARED:
        k2_ = _row(k2, low, k2_time)
    # fmt: off
    for _ in range(low, edge, BS):
        total1, total2 = _query_block(
            total1, total2, query1, query2, above, k1_, k2_, v_, 0, begin, time,
            k1_time, k2_time, v_time,
            BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, False, PRECISION,
        )
        k1_, v_ = _row(k1_, BS, k1_time), _row(v_, BS, v_time)
        if not SQUARED:
            k2_ = _row(k2_, BS, k2_time)
    for past in range(edge, min(begin + BT, time), BS):
        total1, total2 = _query_block(
            total1, total2, query1, query2, above, k1, k2, v, past, begin, time,
            k1_time, k2_time, v_time,
            BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, True, PRECISION,
        )
    # fmt: on
    _write(dq1, total1, begin, time, BT, WK, DK)
    if not SQUARED:
        _write(dq2, total2, begin, time, BT, W2, D2)


@triton.jit  # type: ignore[untyped-decorator]
def _key_block(  # type: ignore[no-untyped-def]
    total1, total2, totalv, keys1, keys2, values, q1, q2, dy, later, begin, time,
    q1_time, q2_time, dy_time,
    BT: tl.constexpr, BS: tl.constexpr, WK: tl.constexpr, DK: tl.constexpr,
    W2: tl.constexpr, D2: tl.constexpr,
    WV: tl.constexpr, DV: tl.constexpr, SQUARED: tl.constexpr,
    DIAGONAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return gradients of keys and values with those of a block of queries added."""
    query1 = _block(q1, later, time, q1_time, BS, WK, DK, WHOLE)
    above = _block(dy, later, time, dy_time, BS, WV, DV, WHOLE)
    t = later + tl.arange(0, BS)
    score1 = tl.dot(keys1, tl.trans(query1), input_precision=PRECISION)
    g = tl.dot(values, tl.trans(above), input_precision=PRECISION)
    if DIAGONAL:
        s = begin + tl.arange(0, BT)
        score1 = tl.where(t[None] >= s[:, None], score1, 0.0)
    dtype = q1.dtype.element_ty
    if SQUARED:
        pattern = (2 * score1 * g).to(dtype)
        total1 = tl.dot(pattern, query1, total1, input_precision=PRECISION)
        pattern = (score1 * score1).to(dtype)
    else:
        query2 = _block(q2, later, time, q2_time, BS, W2, D2, WHOLE)
        score2 = tl.dot(keys2, tl.trans(query2), input_precision=PRECISION)
        if DIAGONAL:
            g = tl.where(t[None] >= s[:, None], g, 0.0)
        total1 = tl.dot((score2 * g).to(dtype), query1, total1, input_precision=PRECISION)
        total2 = tl.dot((score1 * g).to(dtype), query2, total2, input_precision=PRECISION)
        pattern = (score1 * score2).to(dtype)
    return total1, total2, tl.dot(pattern, above, totalv, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def keys_kernel(  # type: ignore[no-untyped-def]
    q1, k1, v, q2, k2, dy, dk1, dk2, dv, time, length, heads, key_heads,
    q1_batch, q1_head, q1_time, k1_batch, k1_head, k1_time, v_batch, v_head, v_time,
    q2_batch, q2_head, q2_time, k2_batch, k2_head, k2_time, dy_batch, dy_head, dy_time,
    WK: tl.constexpr, DK: tl.constexpr, W2: tl.constexpr, D2: tl.constexpr,
    WV: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, SHARING: tl.constexpr, SQUARED: tl.constexpr,
    CARRIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values, summed over the heads that share them.

    Arguments are those of `queries_kernel`. The keys play the queries, of the queries after them.
    """
    every = tl.num_programs(0) // tl.cdiv(time, BT)
    head = (tl.program_id(0) % every).to(tl.int64)
    begin = tl.program_id(0) // every * BT
    k1 = head_start(k1, head, key_heads, k1_batch, k1_head)
    v = head_start(v, head, key_heads, v_batch, v_head)
    keys1 = _block(k1, begin, time, k1_time, BT, WK, DK, False)
    values = _block(v, begin, time, v_time, BT, WV, DV, False)
    keys2 = keys1
    if not SQUARED:
        k2 = head_start(k2, head, key_heads, k2_batch, k2_head)
        keys2 = _block(k2, begin, time, k2_time, BT, W2, D2, False)
    dk1 += head * time * WK
    dv += head * time * WV
    total1, total2 = _carried(dk1, begin, time, BT, WK, DK, CARRIED), tl.zeros((BT, D2), tl.float32)
    totalv = _carried(dv, begin, time, BT, WV, DV, CARRIED)
    if not SQUARED:
        dk2 += head * time * W2
        total2 = _carried(dk2, begin, time, BT, W2, D2, CARRIED)
    high = min(begin // length * length + length, time)
    # Blocks up to the edge hold queries before some of the keys; the last one may end the text.
    edge = begin + (BT + BS - 1) // BS * BS
    whole = begin + (high - begin) // BS * BS
    for shared in range(head * SHARING, head * SHARING + SHARING):
        q1_ = head_start(q1, shared, heads, q1_batch, q1_head)
        dy_ = head_start(dy, shared, heads, dy_batch, dy_head)
        q2_ = q1_
        if not SQUARED:
            q2_ = head_start(q2, shared, heads, q2_batch, q2_head)
        # fmt: off
        for later in range(begin, min(edge, high), BS):
            total1, total2, totalv = _key_block(
                total1, total2, totalv, keys1, keys2, values, q1_, q2_, dy_, later, begin, time,
                q1_time, q2_time, dy_time,
                BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, True, False, PRECISION,
            )
        whole_q1, whole_dy = _row(q1_, edge, q1_time), _row(dy_, edge, dy_time)
        whole_q2 = q2_
        if not SQUARED:
            whole_q2 = _row(q2_, edge, q2_time)
        for _ in range(edge, whole, BS):
            total1, total2, totalv = _key_block(
                total1, total2, totalv, keys1, keys2, values, whole_q1, whole_q2, whole_dy,
                0, begin, time, q1_time, q2_time, dy_time,
                BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, False, True, PRECISION,
            )
            whole_q1, whole_dy = _row(whole_q1, BS, q1_time), _row(whole_dy, BS, dy_time)
            if not SQUARED:
                whole_q2 = _row(whole_q2, BS, q2_time)
        for later in range(max(edge, whole), high, BS):
            total1, total2, totalv = _key_block(
                total1, total2, totalv, keys1, keys2, values, q1_, q2_, dy_, later, begin, time,
                q1_time, q2_time, dy_time,
                BT, BS, WK, DK, W2, D2, WV, DV, SQUARED, False, False, PRECISION,
            )
        # fmt: on
    _write(dk1, total1, begin, time, BT, WK, DK)
    _write(dv, totalv, begin, time, BT, WV, DV)
    if not SQUARED:
        _write(dk2, total2, begin, time, BT, W2, D2)
