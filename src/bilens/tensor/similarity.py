"""Similarity of two models: best matching vectors, and exact inner products of functions."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_finite, full_precision
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import check_chain, joined
from bilens.tensor.factors import affine, checked_positive, hidden_product, square_root
from bilens.tensor.polynomial import deep_inner
from bilens.tensor.quadratic import QuadraticForm

COST_LIMIT = 1e12
"""Default limit of the operations of `expected_inner`: about 30 s on one core."""


@full_precision
def best_match(
    a: Float[Tensor, "*batch k_a n"], b: Float[Tensor, "*batch k_b n"]
) -> Float[Tensor, "*batch k_a"]:
    """Return the |cosine| of each row of `a` with the best matching row of `b`, (*batch, k_a).

    max_j |a_i . b_j| / (|a_i| |b_j|), and 0 for a row of zeros. Raises BilensError if shapes do not
    fit, `b` has no rows, or a value is not finite.

    Source: Pearce et al. 2024, figure 4.
    """
    if b.shape[-2] == 0:
        raise BilensError(f"b has shape {tuple(b.shape)}, expected at least one row to match with")
    check_finite(a=a, b=b)
    cosines = unit_rows(a) @ unit_rows(b).mT.to(a)
    return cosines.abs().amax(-1).clamp_max(1)


@full_precision
def form_cosines(a: QuadraticForm, b: QuadraticForm) -> Float64[Tensor, "k_a k_b"]:
    """Return the cosines <Q_i, Q'_j> / (|Q_i| |Q'_j|) of two batches of interaction matrices.

    Applied to `svd.components` they compare the components of two layers: take absolute values,
    since signs are arbitrary there. A zero form has cosine 0. Computed from the factors in float64,
    at O(rank_a rank_b n_in).

    Raises:
        BilensError: a or b is not a batch along one axis or not finite, or their inputs differ.

    Source: Pearce & Dooms 2024, appendix "MNIST training".
    """
    for name, form in (("a", a), ("b", b)):
        if len(form.batch_shape) != 1:
            raise BilensError(
                f"{name} has batch shape {tuple(form.batch_shape)}, expected one axis: the "
                "components of an SVD, or tensor.interaction(...) of several directions"
            )
    if (a.n_in, a.constant) != (b.n_in, b.constant):
        raise BilensError(
            f"a has n_in={a.n_in}, constant={a.constant}; b has n_in={b.n_in}, "
            f"constant={b.constant}; they should be the same"
        )
    a, b = a.without_scale()[0], b.without_scale()[0]
    K = hidden_product(a.left.double(), a.right.double(), b.left.double(), b.right.double())
    inner = a.weights.double() @ K @ b.weights.double().T
    norms = a.norm()[:, None] * b.norm()
    return torch.where(norms > 0, inner / norms, torch.zeros_like(inner))


def unit_rows(rows: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return each vector at unit length, however small or large it is; zero stays zero."""
    largest = rows.abs().amax(-1, keepdim=True)
    scaled = rows / torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / length.clamp_min(0.5)


@full_precision
def expected_inner(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    *,
    mean: Float[Tensor, " n_in"] | None = None,
    covariance: Float[Tensor, "n_in n_in"] | None = None,
    max_operations: float = COST_LIMIT,
) -> Float64[Tensor, ""]:
    """Return E[f_a(x) . f_b(x)] for Gaussian x, exactly, from the weights of models of any depth.

    A model is the chain of its layers' tensors, such as `ImageClassifier.tensors()`; biases and
    residuals are in it, and a constant coordinate stays 1. One layer is, for each output with
    Q = [[A, q], [q', c]] on [x, 1],

        f(x) = (tr A + c) + 2q.x + :x'Ax:,   :x'Ax: = x'Ax - tr A,

    three parts that are orthogonal under the Gaussian, so that, summed over outputs,

        E[f_a f_b] = (tr A_a + c_a)(tr A_b + c_b) + 4 q_a.q_b + 2 tr(A_a A_b).

    Two layers are a sum over the second's hidden units of products of two such functions,
    multiplied out by Wick's theorem. Deeper models are written out as polynomials of the k
    directions that each reads. Their Hermite coefficients are compared. `bonds(...).cut(...)`
    reduces a model to few directions.

    In float64. One layer costs O(rank^2 (n_in + n_out)). Two cost 4 r_a r_b m^3 operations and
    64 (r_a + r_b) m^2 bytes. Here r are the ranks of the second layers, and m is the dimension of
    the joint span of the first layers. Both are differentiable. More layers, of degree
    d = 2^layers, cost C(k + d/2, d/2)^2 n_out operations and 8 n_out C(k + d, d) bytes, and have no
    gradient.

    Args:
        a: the layers of one model, the first to read the input first.
        b: those of the other; it may differ in depth, ranks and in having biases.
        mean: of x, without the constant coordinate; by default 0.
        covariance: of x; by default the identity.
        max_operations: largest cost.

    Raises:
        BilensError: a chain, the models, mean or covariance do not fit together, a number is not
            finite, or the cost is above `max_operations`.

    Source: Isserlis 1918; orthogonal parts: Janson 1997, "Gaussian Hilbert Spaces", chapter 3.
    """
    (a, scale_a), (b, scale_b), rounding = _prepared(a, b, mean, covariance)
    return scale_a * scale_b * _unit_inner(a, b, rounding, max_operations)


@full_precision
def expected_cosine(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    *,
    mean: Float[Tensor, " n_in"] | None = None,
    covariance: Float[Tensor, "n_in n_in"] | None = None,
    max_operations: float = COST_LIMIT,
) -> Float64[Tensor, ""]:
    """Return E[f_a . f_b] / sqrt(E|f_a|^2 E|f_b|^2) for Gaussian x; 0 if either model is zero.

    Costs and errors are those of `expected_inner`, which is called three times within the limit.
    """
    (a, _), (b, _), rounding = _prepared(a, b, mean, covariance)
    inner = _unit_inner(a, b, rounding, max_operations)
    norms = [_unit_inner(c, c, rounding, max_operations).clamp_min(0) for c in (a, b)]
    scale = norms[0].sqrt() * norms[1].sqrt()
    return torch.where(scale > 0, inner / scale, torch.zeros_like(scale))


def _unit_inner(
    a: Sequence[BilinearTensor], b: Sequence[BilinearTensor], rounding: float, max_operations: float
) -> Float64[Tensor, ""]:
    """Return the expectation for chains from `_prepared`."""
    if max(len(a), len(b)) > 2:
        full_a = joined(a, torch.eye(a[-1].n_out).to(a[-1].out))
        full_b = full_a if a is b else joined(b, torch.eye(b[-1].n_out).to(b[-1].out))
        spans = (
            _joint_span(full_a[0], full_a[0], rounding),
            _joint_span(full_b[0], full_b[0], rounding),
        )
        return deep_inner(full_a, full_b, spans, max_operations=max_operations)
    if len(a) == len(b) == 1:
        (a_0, a_1, a_2), (b_0, b_1, b_2) = _affine_parts(a[0]), _affine_parts(b[0])
        return a_0 @ b_0 + (a_1 * b_1).sum() + 2 * a_2.inner(b_2)
    # Both models read only this span of x, in which x is again N(0, I).
    span = _joint_span(a[0], b[0], rounding)
    _check_cost(a, b, span.shape[1], max_operations)
    return _orthogonal_parts(a, span).inner(_orthogonal_parts(b, span))


@dataclass(frozen=True, eq=False)
class _Parts:
    """The orthogonal parts of a model: f = degree_0 + degree_1.x + :x'(degree_2)x: + higher.

    The higher parts, with the A before the B in the matrices M, and n_u the linear part of the
    other factor, are

        sum_u out[:, u] :x'M_u x: (n_u.x)  and  sum_h out[:, h] :(x'A_h x)(x'B_h x):
    """

    degree_0: Float64[Tensor, " n_out"]
    degree_1: Float64[Tensor, "n_out m"]
    degree_2: Float64[Tensor, "n_out m m"]
    out: Float64[Tensor, "n_out rank"]
    matrices: Float64[Tensor, "two_rank m m"]
    others: Float64[Tensor, "two_rank m"]

    def inner(self, that: "_Parts") -> Float64[Tensor, ""]:
        """Return the sum over degrees of E[part . part]: legs joined in all ways between parts."""
        low = self.degree_0 @ that.degree_0 + (self.degree_1 * that.degree_1).sum()
        low = low + 2 * (self.degree_2 * that.degree_2).sum()
        # Outputs are summed over once, so that only pairs of hidden units remain.
        S = self.out.T @ that.out
        traces = einsum(self.matrices, that.matrices, "u i j, v i j -> u v")
        return low + self._degree_3(that, S, traces) + self._degree_4(that, S, traces)

    def _degree_3(self, that: "_Parts", S: Tensor, traces: Tensor) -> Tensor:
        """Return 2 tr(M M') n.n' + 4 n'M'M n', summed over pairs of units."""
        S = S.repeat(2, 2)
        total = 2 * (S * traces * (self.others @ that.others.T)).sum()
        for M, n, s in zip(self.matrices, self.others, S, strict=True):
            total = total + 4 * einsum(s, that.others @ M, that.matrices @ n, "v, v i, v i ->")
        return total

    def _degree_4(self, that: "_Parts", S: Tensor, traces: Tensor) -> Tensor:
        """Return the sum over pairs of units of degree 4.

        4 tr(AA') tr(BB') + 4 tr(AB') tr(BA') + 16 tr(AA'BB')
        """
        r, s = S.shape
        pairs = traces[:r, :s] * traces[r:, s:] + traces[:r, s:] * traces[r:, :s]
        total = 4 * (S * pairs).sum()
        # Unit by unit, since all pairs of products at once would need r s m^2 numbers.
        for h in range(r):
            first = self.matrices[h] @ that.matrices[:s]
            second = self.matrices[r + h] @ that.matrices[s:]
            total = total + 16 * einsum(S[h], first, second, "g, g i j, g j i ->")
        return total


def _orthogonal_parts(chain: Sequence[BilinearTensor], span: Float64[Tensor, "n m"]) -> _Parts:
    """Return the parts of a model of one or two layers, in coordinates of the span."""
    first = chain[0].change_basis(inputs=span)
    if len(chain) == 1:
        c, q, free = _affine_parts(first)
        A = free.dense(sys.maxsize)
        return _Parts(c, q, A, q.new_zeros(len(c), 0), A[:0], q[:0])
    second, d = chain[1], first.n_out
    # A hidden unit is a product of two outputs of the first layer, along its two rows.
    a, p, factor_a = _affine_parts(first.change_basis(outputs=second.left[:, :d]))
    b, q, factor_b = _affine_parts(first.change_basis(outputs=second.right[:, :d]))
    A, B = factor_a.dense(sys.maxsize), factor_b.dense(sys.maxsize)
    if second.n_in > d:
        a, b = a + second.left[:, d], b + second.right[:, d]
    # Products of two Hermite expansions: every contraction of legs within the pair is one term.
    degree_0 = a * b + (p * q).sum(-1) + 2 * (A * B).sum((-2, -1))
    reached = einsum(A, q, "h i j, h j -> h i") + einsum(B, p, "h i j, h j -> h i")
    half = p[:, :, None] * q[:, None] / 2 + 2 * A @ B
    degree_2 = a[:, None, None] * B + b[:, None, None] * A + half + half.mT
    return _Parts(
        degree_0=second.out @ degree_0,
        degree_1=second.out @ (a[:, None] * q + b[:, None] * p + 2 * reached),
        degree_2=einsum(second.out, degree_2, "o h, h i j -> o i j"),
        out=second.out,
        matrices=torch.cat([A, B]),
        others=torch.cat([q, p]),
    )


def _affine_parts(
    layer: BilinearTensor,
) -> tuple[Float64[Tensor, " n_out"], Float64[Tensor, "n_out n"], BilinearTensor]:
    """Return each output's tr A + c and 2q, and the layer of the A only, from the factors."""
    n = layer.n_in - layer.constant
    L, R, D = layer.left[:, :n], layer.right[:, :n], layer.out
    hidden_0, hidden_1 = (L * R).sum(-1), torch.zeros_like(L)
    if layer.constant:
        bias, gate = layer.left[:, n], layer.right[:, n]
        hidden_0, hidden_1 = hidden_0 + bias * gate, bias[:, None] * R + gate[:, None] * L
    return D @ hidden_0, D @ hidden_1, BilinearTensor(L, R, D)


def _joint_span(a: BilinearTensor, b: BilinearTensor, eps: float) -> Float64[Tensor, "n m"]:
    """Return orthonormal columns that span the inputs of both layers; x in them is N(0, I) too.

    An error of eps in the span costs eps^2, and the basis needs no gradient.
    """
    n = a.n_in - a.constant
    rows = torch.cat([factor[:, :n] for factor in (a.left, a.right, b.left, b.right)]).detach()
    _, sizes, directions = torch.linalg.svd(unit_rows(rows), full_matrices=False)
    return torch.t(directions[: max(1, int((sizes > 64 * eps * sizes[0]).sum()))])


Scaled = tuple[list[BilinearTensor], Float64[Tensor, ""]]


def _prepared(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    mean: Float[Tensor, " n_in"] | None,
    covariance: Float[Tensor, "n_in n_in"] | None,
) -> tuple[Scaled, Scaled, float]:
    """Return both chains for standard inputs without their scale, the scales, and the rounding."""
    for name, chain in (("a", a), ("b", b)):
        check_chain(chain, name)
    sizes = [(chain[0].n_in - chain[0].constant, chain[-1].n_out) for chain in (a, b)]
    if sizes[0] != sizes[1] or not sizes[0][0]:
        raise BilensError(
            f"a has {sizes[0]} inputs and outputs (the constant not counted), b has {sizes[1]}; "
            "they should be the same, with at least one input"
        )
    # Of the stored weights: after the cast to float64 it could no longer be seen.
    rounding = max(torch.finfo(chain[0].left.dtype).eps for chain in (a, b))
    a, b = ([layer.to(torch.float64) for layer in chain] for chain in (a, b))
    if mean is not None or covariance is not None:
        a, b = (_standardised(chain, mean, covariance) for chain in (a, b))
    return _without_scale(a), _without_scale(b), rounding


def _standardised(
    chain: Sequence[BilinearTensor],
    mean: Float[Tensor, " n"] | None,
    covariance: Float[Tensor, "n n"] | None,
) -> list[BilinearTensor]:
    """Return the chain of y -> f(mean + S y) with S S' = covariance: x ~ N(mean, covariance)."""
    first, n = chain[0], chain[0].n_in - chain[0].constant
    S = torch.eye(n).to(first.left)
    if covariance is not None:
        S = square_root(checked_positive("covariance", covariance, n).to(S))[0]
    if mean is None:
        return [first.change_basis(inputs=S), *chain[1:]]
    if mean.shape != (n,):
        raise BilensError(
            f"mean has shape {tuple(mean.shape)}; expected ({n},), one number for each input, the "
            "constant left out"
        )
    check_finite(mean=mean)
    moved = affine(S, mean.to(S))
    return [first.with_bias().change_basis(inputs=moved), *chain[1:]]


def _without_scale(chain: Sequence[BilinearTensor]) -> Scaled:
    """Return the layers, each at a scale near 1, and the factor of the last outputs."""
    scaled: list[BilinearTensor] = []
    scale = torch.ones((), dtype=torch.float64, device=chain[0].left.device)
    for below, layer in zip([None, *chain], chain, strict=False):
        if below is not None and layer.constant:  # the constant itself has no scale
            grown = torch.ones(layer.n_in, dtype=torch.float64, device=scale.device)
            grown[: below.n_out] = scale
            layer = replace(layer, left=layer.left * grown, right=layer.right * grown)  # noqa: PLW2901
            layer, scale = layer.without_scale()  # noqa: PLW2901
        else:
            layer, factor = layer.without_scale()  # noqa: PLW2901
            # The next layer squares its input, and with it the scale of this one.
            scale = factor * scale**2
        scaled.append(layer)
    return scaled, scale


def _check_cost(
    a: Sequence[BilinearTensor], b: Sequence[BilinearTensor], m: int, max_operations: float
) -> None:
    r_a, r_b = (chain[1].rank if len(chain) == 2 else 0 for chain in (a, b))
    cost = 4 * m**3 * (r_a * r_b + r_a + r_b)
    if cost > max_operations:
        raise BilensError(
            f"{cost:.1e} operations needed ({r_a} and {r_b} hidden units in the last layers, {m} "
            f"input dimensions), above max_operations={max_operations:.1e}; raise it, or sample x"
        )
