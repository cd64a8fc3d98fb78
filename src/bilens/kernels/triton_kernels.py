"""The two Triton kernels of bilinear attention, and the sizes of their tiles.

One adds up states, S_ijk = sum_s a_si b_sj c_sk over the tokens before each chunk; the other reads
from two of the axes of such a state,

    y_tk = sum_{s<=t in the chunk} (qa_t . a_s)(qb_t . b_s) c_sk + sum_ij qa_ti qb_tj S_ijk.

The output and all gradients are reads of this form, from one state in the order of time and one
from the end (`bilens.kernels.gradients`), so there is nothing else to compile. Products of
coordinates are made in registers, in the layout that the tensor cores take, and never written to
memory. A state is read with any of its axes as the output's, by strides.

Heads that share keys read them where they are: head h has those of head h // SHARING.
"""

import triton
import triton.language as tl

__all__ = ["read_kernel", "read_sizes", "states_kernel", "states_sizes"]

_READ = {
    (2, 32): {"BT": 128, "BS": 32, "BI": 4, "BK": 32, "BN": 32, "num_warps": 4, "num_stages": 3},
    (2, 64): {"BT": 128, "BS": 32, "BI": 2, "BK": 64, "BN": 64, "num_warps": 8, "num_stages": 3},
    (2, 128): {"BT": 64, "BS": 32, "BI": 1, "BK": 64, "BN": 128, "num_warps": 4, "num_stages": 2},
    (4, 32): {"BT": 64, "BS": 32, "BI": 1, "BK": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
    (4, 64): {"BT": 64, "BS": 32, "BI": 1, "BK": 32, "BN": 64, "num_warps": 8, "num_stages": 1},
    (4, 128): {"BT": 32, "BS": 16, "BI": 1, "BK": 32, "BN": 64, "num_warps": 4, "num_stages": 1},
}
"""By bytes of a number and the largest width. What each compiles to is the table of
`python -m benchmarks.kernels_static`: all fit into 99 kB of shared memory, the least of a card
since 2020, and into registers. Which of those that fit is fastest has not been measured."""
_STATES = {
    (2, 32): {"BT": 64, "BI": 4, "BJ": 32, "BN": 32, "num_warps": 4, "num_stages": 3},
    (2, 64): {"BT": 64, "BI": 2, "BJ": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    (2, 128): {"BT": 64, "BI": 1, "BJ": 128, "BN": 128, "num_warps": 8, "num_stages": 2},
    (4, 32): {"BT": 32, "BI": 2, "BJ": 32, "BN": 32, "num_warps": 4, "num_stages": 2},
    (4, 64): {"BT": 32, "BI": 1, "BJ": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    (4, 128): {"BT": 32, "BI": 1, "BJ": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
}
HALF = 16
"""Columns of a tile of a symmetric state, of which those above the diagonal stand for the rest."""


def read_sizes(widths: tuple[int, int, int], itemsize: int, *, half: bool) -> dict[str, int]:
    """Tiles of `read_kernel`: BT queries and BS keys, BI by BK products of coordinates, BN columns.

    Args:
        widths: of both factors and of what is read, powers of two from 16.
        itemsize: bytes of a number.
        half: whether both factors are the same.
    """
    found = _READ[itemsize, max(*widths, 32)]
    columns = HALF if half else min(found["BK"], widths[1])
    rows = min(found["BI"] * found["BK"] // columns, widths[0])
    return found | {"BI": rows, "BK": columns, "BN": min(found["BN"], widths[2])}


def states_sizes(widths: tuple[int, int, int], itemsize: int, *, half: bool) -> dict[str, int]:
    """Tiles of `states_kernel`: BT tokens, BI by BJ products of coordinates, BN columns."""
    found = _STATES[itemsize, max(*widths, 32)]
    columns = HALF if half else min(found["BJ"], widths[1])
    rows = min(found["BI"] * found["BJ"] // columns, widths[0])
    return found | {"BI": rows, "BJ": columns, "BN": min(found["BN"], widths[2])}


@triton.jit
def _tile(x, rows, columns, time, width):  # type: ignore[no-untyped-def]
    """Some rows and columns of a matrix (time, width), zero behind its end."""
    at = rows.to(tl.int64)[:, None] * width + columns[None]
    return tl.load(x + at, mask=(rows < time)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def states_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    start,
    states,
    last,
    time,
    length,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DC: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BN: tl.constexpr,
    SHARING: tl.constexpr,
    REVERSE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """States before each chunk of some tokens.

    Args:
        a: (heads, time, DA), and so b and c.
        start: the state before all tokens (kv_heads, DA, DB, DC) in float32, or None for none.
        states: to be written (kv_heads, chunks, DA, DB, DC); the first is left out without a start.
        last: to be written, the state behind all tokens; None without a start.
        time: number of tokens.
        length: of a chunk.
        REVERSE: from the end, with the tokens of all heads that share keys.
        HALF: a is b; what is below the diagonal is written from above it.
    """
    # Programs of one head follow one another, and read the same tokens.
    program, per_row = tl.program_id(0), DB // BJ * (DC // BN)
    head = (program // (DA // BI * per_row)).to(tl.int64)
    first, left = program // per_row % (DA // BI) * BI, program % per_row // (DC // BN) * BJ
    tile = tl.arange(0, BI * BJ)
    i, j = first + tile // BJ, left + tile % BJ
    e = program % (DC // BN) * BN + tl.arange(0, BN)
    at = (i * DB + j)[:, None] * DC + e[None]
    below = (j * DB + i)[:, None] * DC + e[None]
    size = DA * DB * DC
    chunks = tl.cdiv(time, length)
    heads = SHARING if REVERSE else 1
    if (not HALF) or (left + BJ > first):
        S = tl.zeros((BI * BJ, BN), tl.float32)
        if start is not None:
            S += tl.load(start + head * size + at)
        for step in range(chunks):
            chunk = chunks - 1 - step if REVERSE else step
            if start is not None or step > 0:
                out = states + (head * chunks + chunk) * size
                tl.store(out + at, S.to(states.dtype.element_ty))
                if HALF and left > first:
                    tl.store(out + below, S.to(states.dtype.element_ty))
            # Nobody reads the state behind the last chunk, but who goes on from there.
            if last is not None or step + 1 < chunks:
                for each in range(head * heads, head * heads + heads):
                    for begin in range(chunk * length, min(chunk * length + length, time), BT):
                        t = begin + tl.arange(0, BT)
                        one = _tile(a + each * time * DA, t, first + tl.arange(0, BI), time, DA)
                        two = _tile(b + each * time * DB, t, left + tl.arange(0, BJ), time, DB)
                        both = tl.reshape(one[:, :, None] * two[:, None, :], (BT, BI * BJ))
                        values = _tile(c + each * time * DC, t, e, time, DC)
                        S = tl.dot(tl.trans(both), values, S, input_precision=PRECISION)
        if last is not None:
            tl.store(last + head * size + at, S)
            if HALF and left > first:
                tl.store(last + head * size + below, S)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(  # type: ignore[no-untyped-def]
    qa,
    qb,
    a,
    b,
    c,
    states,
    y,
    scale,
    time,
    length,
    DA: tl.constexpr,
    DB: tl.constexpr,
    DC: tl.constexpr,
    SA: tl.constexpr,
    SB: tl.constexpr,
    SC: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    SHARING: tl.constexpr,
    REVERSE: tl.constexpr,
    HALF: tl.constexpr,
    RESUMED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What queries read from their chunk and from its state.

    Args:
        qa: (heads, time, DA), and so qb, a, b and c; y (heads, time, DC) is written.
        states: as `states_kernel` writes them, with strides SA, SB and SC for the axes of a, b, c;
            None for one chunk.
        scale: of y.
        time: number of tokens.
        length: of a chunk, a multiple of BT.
        REVERSE: queries are keys, which look at the queries behind them, of all heads that share
            them.
        HALF: qa is qb, a is b, and the state symmetric: what is above its diagonal counts twice.
        RESUMED: whether there is a state before all tokens.
    """
    # Programs of one head follow one another, and read the same states.
    program, per_head = tl.program_id(0), tl.cdiv(time, BT) * (DC // BN)
    head = (program // per_head).to(tl.int64)
    begin = program % per_head // (DC // BN) * BT
    t, e = begin + tl.arange(0, BT), program % (DC // BN) * BN + tl.arange(0, BN)
    i, j = tl.arange(0, DA), tl.arange(0, DB)
    qa, qb = qa + head * time * DA, qb + head * time * DB
    chunks, chunk = tl.cdiv(time, length), begin // length
    if REVERSE:
        first, heads, low, high = head * SHARING, SHARING, begin, min((chunk + 1) * length, time)
        keys, beyond = head, chunk + 1 < chunks
    else:
        first, heads, low, high = head // SHARING, 1, chunk * length, begin + BT
        keys, beyond = head // SHARING, chunk > 0
    found = tl.zeros((BT, BN), tl.float32)
    one, two = _tile(qa, t, i, time, DA), _tile(qb, t, j, time, DB)
    for each in range(first, first + heads):
        for past in range(low, high, BS):
            s = past + tl.arange(0, BS)
            keys_a = _tile(a + each * time * DA, s, i, time, DA)
            pattern = tl.dot(one, tl.trans(keys_a), input_precision=PRECISION)
            keys_b = _tile(b + each * time * DB, s, j, time, DB)
            pattern *= tl.dot(two, tl.trans(keys_b), input_precision=PRECISION)
            seen = t[:, None] <= s[None] if REVERSE else t[:, None] >= s[None]
            pattern = tl.where(seen, pattern, 0.0).to(c.dtype.element_ty)
            values = _tile(c + each * time * DC, s, e, time, DC)
            found = tl.dot(pattern, values, found, input_precision=PRECISION)
    if (states is not None) and (RESUMED or beyond):
        S = states + (keys * chunks + chunk) * DA * DB * DC + e[None] * SC
        tile = tl.arange(0, BI * BK)
        for left in range(0, DB, BK):
            right = _tile(qb, t, left + tl.arange(0, BK), time, DB)
            for start in range(0, left + BK if HALF else DA, BI):
                columns = start + tl.arange(0, BI)
                factors = _tile(qa, t, columns, time, DA)
                if HALF:
                    factors = tl.where(columns[None] < left, 2 * factors, factors)
                both = tl.reshape(factors[:, :, None] * right[:, None, :], (BT, BI * BK))
                rows = (start + tile // BK) * SA + (left + tile % BK) * SB
                part = tl.load(S + rows[:, None])
                found = tl.dot(both, part, found, input_precision=PRECISION)
    at = t.to(tl.int64)[:, None] * DC + e[None]
    tl.store(
        y + head * time * DC + at, (found * scale).to(y.dtype.element_ty), mask=(t < time)[:, None]
    )
