"""Factors of tensors: their dtype, size and scale, the constant coordinate, and Gram matrices.

Gram matrices are formed in float64 whatever the dtype of the factors, because they square the
condition number. In float32 every singular value below 1/3000 of the largest would be noise.
"""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import FLOATS, check_finite, checked
from bilens.errors import BilensError

DENSE_LIMIT = 2 * 1024**3
"""Default limit of the memory of `dense()`, in bytes."""

NOTHING = -(2**20)
"""The exponent of zero."""


def wide_device(device: torch.device) -> torch.device:
    """Return the device if it has float64, which Gram matrices need, or else the CPU."""
    # Apple's GPUs have none.
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def wrong_shape(name: str, tensor: Tensor, expected: str) -> BilensError:
    """Return the error of a tensor of another shape than expected."""
    return BilensError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}")


def check_last_axis(name: str, tensor: Tensor, length: int, unit: str) -> None:
    """Raise unless the last axis of a tensor has a length, one number for each of some unit."""
    if tensor.shape[-1] != length:
        raise BilensError(
            f"{name} has shape {tuple(tensor.shape)}; its last axis should have length {length}, "
            f"one number for each {unit}"
        )


def check_factors(**factors: Tensor) -> None:
    """Raise unless all factors are plain, of the same dtype and on the same device."""
    for name, factor in factors.items():
        if factor.dtype not in FLOATS or factor.layout != torch.strided:
            raise BilensError(
                f"{name} is a tensor of {factor.dtype} and {factor.layout}; expected a dense one "
                "of float16, bfloat16, float32 or float64"
            )
    if len({(factor.dtype, factor.device) for factor in factors.values()}) > 1:
        kinds = ", ".join(f"{name} {f.dtype} on {f.device}" for name, f in factors.items())
        raise BilensError(
            f"The factors are of different kinds: {kinds}. Move them to one dtype and device first."
        )


def check_dense_size(shape: tuple[int, ...], like: Tensor, max_bytes: int) -> None:
    """Refuse to build an array of `shape` that needs more than `max_bytes`."""
    n_bytes = math.prod(shape) * like.element_size()
    if n_bytes > max_bytes:
        raise BilensError(
            f"dense() would build an array of shape {shape} and {n_bytes:,} bytes; the limit is "
            f"max_bytes={max_bytes:,}. Work with the factors, or raise max_bytes."
        )


def in_range(**result: Tensor) -> Tensor:
    """Return the one result, or raise if it left the range of its dtype."""
    ((name, tensor),) = result.items()
    if not torch.isfinite(tensor).all():
        raise BilensError(
            f"{name} holds numbers beyond the range of {tensor.dtype}; expected smaller factors: "
            "move them to torch.float64, or divide them by a number first"
        )
    return tensor


def take_out_scale(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "*batch rank"],
) -> tuple[
    Float[Tensor, "rank n_in"],
    Float[Tensor, "rank n_in"],
    Float[Tensor, "*batch rank"],
    Float64[Tensor, "*batch 1"],
]:
    """Return factors of the same forms divided by `scale`, so that no product over- or underflows.

    The largest entry of each row of left, right and weights is from 1/2 to 1, or all are zero. All
    divisors are powers of two, so nothing is rounded. Forms below 2^-1000 keep the rest as it is.

    Raises:
        BilensError: a form is so large that float64 has no number for its scale.
    """
    row_left, row_right = (_exponents(f.detach().abs().amax(-1)) for f in (left, right))
    rows = torch.where((row_left > NOTHING) & (row_right > NOTHING), row_left + row_right, 0)
    top = (_exponents(weights) + rows).amax(-1, keepdim=True)
    # A form that is zero has scale 1, not 2^NOTHING.
    top = torch.where(top > NOTHING // 2, top.clamp_min(-1000), 0)
    if (top > 1000).any():
        raise BilensError(
            f"Products of the factors are of the size 2^{int(top.max())}, beyond float64; divide "
            "the factors by a number first"
        )
    scale = torch.exp2(top.double())
    left, right = (
        _shifted(factor, torch.where(row > NOTHING, -row, 0)[:, None])
        for factor, row in ((left, row_left), (right, row_right))
    )
    return left, right, _shifted(weights, rows - top), scale


def _exponents(factor: Tensor) -> Tensor:
    """Return the integers e with 2^(e-1) <= |x| < 2^e, elementwise."""
    exponents = torch.frexp(factor.detach()).exponent
    return torch.where(factor == 0, NOTHING, exponents)


def _shifted(factor: Tensor, by: Tensor) -> Tensor:
    """Multiply by 2^by in two steps, because 2^by itself may be outside of the dtype's range."""
    half = by // 2
    return factor * torch.exp2(half.to(factor)) * torch.exp2((by - half).to(factor))


@checked
def with_constant(x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_in_and_1"]:
    """Append the constant 1 to each input: x' = [x, 1].

    Source: Pearce et al. 2024, section 3.4.
    """
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


@checked
def affine(
    weight: Float[Tensor, "n_out n_in"], bias: Float[Tensor, " n_out"] | None
) -> Float[Tensor, "n_out_and_1 n_in_and_1"]:
    """Return the map x -> W x + b as one matrix from [x, 1] to [W x + b, 1]: [[W, b], [0, 1]].

    `bias=None` means a bias of zero.
    """
    n_out, n_in = weight.shape
    matrix = weight.new_zeros(n_out + 1, n_in + 1)
    matrix[:n_out, :n_in] = weight
    if bias is not None:
        matrix[:n_out, n_in] = bias
    matrix[n_out, n_in] = 1
    return matrix


@checked
def fit_input(
    x: Float[Tensor, "*batch n"],
    rows: Float[Tensor, "*more n_in"],
    constant: bool,
    argument: str = "x",
) -> Float[Tensor, "*batch n_in"]:
    """Return `x` with the number of inputs, dtype and device of the `rows` that read it.

    If the last input is the constant 1, it is appended to inputs without it.
    """
    n_in = rows.shape[-1]
    if x.ndim and x.shape[-1] == n_in:
        return x.to(rows)
    if constant and x.ndim and x.shape[-1] == n_in - 1:
        return with_constant(x.to(rows))
    expected = f"{n_in - 1} (or {n_in}, with the constant 1 appended)" if constant else f"{n_in}"
    raise BilensError(
        f"{argument} has shape {tuple(x.shape)}; its last axis should have length {expected}, "
        "one number for each input of the tensor. Flatten images, one row each."
    )


def hidden_product(
    left_a: Float64[Tensor, "rank_a n_in"],
    right_a: Float64[Tensor, "rank_a n_in"],
    left_b: Float64[Tensor, "rank_b n_in"],
    right_b: Float64[Tensor, "rank_b n_in"],
) -> Float64[Tensor, "rank_a rank_b"]:
    """Return the Frobenius inner products of sym(l_g r_g') and sym(l_h r_h'), (rank_a, rank_b).

    K = 1/2 [(L_A L_B') * (R_A R_B') + (L_A R_B') * (R_A L_B')], with * elementwise.
    """
    straight = (left_a @ left_b.T) * (right_a @ right_b.T)
    cross = (left_a @ right_b.T) * (right_a @ left_b.T)
    return (straight + cross) / 2


def input_gram(
    left: Float64[Tensor, "rank n_in"],
    right: Float64[Tensor, "rank n_in"],
    out: Float64[Tensor, "n_out rank"],
) -> Float64[Tensor, "n_in n_in"]:
    """Return the inputs' Gram matrix M[i, j], the sum over o, k of B[o, i, k] B[o, j, k].

    M = 1/4 [L'(S*RR')L + L'(S*RL')R + R'(S*LR')L + R'(S*LL')R] with S = D'D.
    """
    # Every term contracts a copy of the tensor with itself over outputs and one input. The
    # hidden units meet in S (*) a Gram matrix of the factor that carries this input.
    S = out.T @ out
    cross = left.T @ (S * (right @ left.T)) @ right
    S_R, S_L = S * (right @ right.T), S * (left @ left.T)
    return (left.T @ S_R @ left + cross + cross.T + right.T @ S_L @ right) / 4


def checked_positive(name: str, matrix: Float[Tensor, "n n"], n: int) -> Float64[Tensor, "n n"]:
    """Return a second moment or covariance of n inputs in float64, exactly symmetric, or raise."""
    if matrix.shape != (n, n):
        raise wrong_shape(name, matrix, f"({n}, {n}), a row and a column for each input")
    check_finite(**{name: matrix})
    M = matrix.double()
    largest = float(M.abs().max())
    # x.T @ x is symmetric and positive up to n roundings of its largest entry.
    rounding = 8 * n * torch.finfo(matrix.dtype).eps * largest
    if largest == 0 or float((M - M.T).abs().max()) > rounding:
        kind = "zero" if largest == 0 else "not symmetric"
        raise BilensError(f"{name} is {kind}; expected a matrix such as x.T @ x / len(x)")
    M = (M + M.T) / 2
    least = float(torch.linalg.eigvalsh(M)[0])
    if least < -rounding:
        raise BilensError(
            f"{name} has the eigenvalue {least:.3g}; expected none below 0, as x.T @ x / len(x) has"
        )
    return M


def square_root(
    P: Float64[Tensor, "n n"],
) -> tuple[Float64[Tensor, "n rank"], Float64[Tensor, "rank n"]]:
    """Return K with P = K K', with a column for each direction of P, and its pseudoinverse."""
    values, vectors = torch.linalg.eigh(P)
    # Directions below the rounding of P would be divided by it in the pseudoinverse.
    large = values > len(P) * torch.finfo(P.dtype).eps * values[-1]
    roots, vectors = values[large].sqrt(), vectors[:, large]
    return vectors * roots, (vectors / roots).T
