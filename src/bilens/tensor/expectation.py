"""Exact inner products of models as functions of Gaussian inputs, from their weights.

Models of one and two layers are multiplied out by Wick's theorem. Deeper ones are written out as
polynomials of few variables, and their Hermite coefficients are compared.

A polynomial is a table of coefficients for each degree, one column for each monomial y^alpha of k
variables, in lexicographic order. With suffix sums s_j = alpha_j + ... + alpha_(k-1), and
N(v, d) = C(v - 1 + d, d) monomials of degree d in v variables,

    number(alpha) = N(k, d) - 1 - sum_(j=1)^(k-1) N(k - j + 1, s_j - 1)

so that the number of a product is a sum over suffix sums, which add up.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb, factorial

import torch
from einops import einsum
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import check_chain, joined
from bilens.tensor.factors import affine, checked_positive, in_range, square_root, wrong_shape
from bilens.tensor.features import unit_rows

COST_LIMIT = 1e12
"""Default limit of the operations of `expected_inner`: about 30 s on one core."""

Polynomials = dict[int, Float64[Tensor, "_ _"]]
"""Coefficients of polynomials of the same variables, by degree."""


@checked
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
        max_operations: largest cost; a larger one raises BilensError.

    Source: Isserlis 1918; orthogonal parts: Janson 1997, "Gaussian Hilbert Spaces", chapter 3.
    """
    (a, scale_a), (b, scale_b), rounding = _prepared(a, b, mean, covariance)
    inner = _unit_inner(a, b, rounding, max_operations)
    return in_range(expected_inner=scale_a * scale_b * inner)


@checked
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
        # All outputs: expectations sum over them.
        full_a = joined(a, torch.eye(a[-1].n_out).to(a[-1].out))
        full_b = full_a if a is b else joined(b, torch.eye(b[-1].n_out).to(b[-1].out))
        span_a, span_b = (_joint_span(c[0], c[0], rounding) for c in (full_a, full_b))
        return deep_inner(full_a, full_b, (span_a, span_b), max_operations=max_operations)
    if len(a) == len(b) == 1:
        (a_0, a_1, a_2), (b_0, b_1, b_2) = _affine_parts(a[0]), _affine_parts(b[0])
        return a_0 @ b_0 + (a_1 * b_1).sum() + 2 * a_2.inner(b_2)
    # Both models read only this span of x, in which x is again N(0, I).
    span = _joint_span(a[0], b[0], rounding)
    _check_two_layers(a, b, span.shape[1], max_operations)
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
        # Units stand twice, once for each factor whose matrix is M. All 3! = 6 ways to join three
        # legs with three: 2 join M with M, 4 cross.
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
        # All 4! = 24 ways to join four legs with four are 4 + 4 + 16.
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
    # No leg is left: constants, one leg of each joined, or both, in two ways.
    degree_0 = a * b + (p * q).sum(-1) + 2 * (A * B).sum((-2, -1))
    # One leg is left where a leg of A joins that of q, in two ways, or the reverse.
    reached = einsum(A, q, "h i j, h j -> h i") + einsum(B, p, "h i j, h j -> h i")
    # Two are left free in p q', and in A B where one leg of each is joined, in four ways.
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


def _affine_parts(layer: BilinearTensor) -> tuple[Tensor, Tensor, BilinearTensor]:
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
    a, b = [layer.to(torch.float64) for layer in a], [layer.to(torch.float64) for layer in b]
    if mean is not None or covariance is not None:
        a, b = (_standardised(chain, mean, covariance) for chain in (a, b))
    return _without_scale(a), _without_scale(b), rounding


def _standardised(
    chain: Sequence[BilinearTensor], mean: Tensor | None, covariance: Tensor | None
) -> list[BilinearTensor]:
    """Return the chain of y -> f(mean + S y) with S S' = covariance: x ~ N(mean, covariance)."""
    first, n = chain[0], chain[0].n_in - chain[0].constant
    S = torch.eye(n).to(first.left)
    if covariance is not None:
        S = square_root(checked_positive("covariance", covariance, n).to(S))[0]
    if mean is None:
        return [first.change_basis(inputs=S), *chain[1:]]
    if mean.shape != (n,):
        raise wrong_shape("mean", mean, f"({n},), one number for each input but the constant")
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


def _check_two_layers(
    a: Sequence[BilinearTensor], b: Sequence[BilinearTensor], m: int, max_operations: float
) -> None:
    r_a, r_b = (chain[1].rank if len(chain) == 2 else 0 for chain in (a, b))
    cost = 4 * m**3 * (r_a * r_b + r_a + r_b)
    if cost > max_operations:
        raise BilensError(
            f"{cost:.1e} operations needed ({r_a} and {r_b} hidden units in the last layers, {m} "
            f"input dimensions), above max_operations={max_operations:.1e}; raise it, or sample x"
        )


def n_monomials(k: int, degree: int) -> int:
    """Return N(k, d), the number of monomials of a degree in k variables."""
    return comb(k - 1 + degree, degree) if degree >= 0 else 0


@lru_cache(maxsize=64)
def monomials(k: int, degree: int) -> Int[Tensor, "monomials k"]:
    """Return the exponents of each monomial, in order."""
    small = torch.int8 if degree < 128 else torch.int16
    if k == 1:
        return torch.tensor([[degree]], dtype=small)
    blocks = []
    for first in range(degree + 1):
        others = monomials(k - 1, degree - first)
        firsts = torch.full((len(others), 1), first, dtype=small)
        blocks.append(torch.cat([firsts, others], 1))
    return torch.cat(blocks)


@torch.no_grad()
def deep_inner(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    spans: tuple[Float64[Tensor, "n k_a"], Float64[Tensor, "n k_b"]],
    *,
    max_operations: float,
) -> Float64[Tensor, ""]:
    """Return E[f_a(x) . f_b(x)], x ~ N(0, I), of models of any depth that read few directions.

    Let y = A'x and z = B'x be orthonormal coordinates of the two spans, with A'B diagonal. Its
    entries are the cosines c of the angles between the spans. Then

        f_a = sum_alpha a_alpha He_alpha(y),  f_b = sum_alpha b_alpha He_alpha(z),
        E[f_a . f_b] = sum_alpha alpha! c^alpha a_alpha . b_alpha

    The layers are in float64, and each has all outputs that the next reads. The orthonormal columns
    of `spans` span the part of x that each model reads.
    """
    _check_cost(a, b, spans, max_operations)
    # Principal angles: in these bases each variable of one model meets one of the other.
    turn_a, cosines, turn_b = torch.linalg.svd(spans[0].T @ spans[1])
    of_a = _expanded(a, spans[0] @ turn_a)
    of_b = of_a if a is b else _expanded(b, spans[1] @ turn_b.T)
    total: Tensor = cosines.new_zeros(())
    k = len(cosines)
    for degree in of_a.keys() & of_b.keys():
        exponents = monomials(k, degree).to(cosines.device)
        # Monomials of matched variables are orthogonal, so a sum over products replaces a matrix.
        weights = torch.ones(len(exponents)).to(cosines)
        for i, cosine in enumerate(cosines):
            powers = [float(factorial(power)) * cosine**power for power in range(degree + 1)]
            weights *= torch.stack(powers)[exponents[:, i].long()]
        shared = [_first_variables(parts[degree], degree, k) for parts in (of_a, of_b)]
        total += (shared[0] * shared[1] * weights).sum()
    return total


def _expanded(chain: Sequence[BilinearTensor], span: Tensor) -> dict[int, Tensor]:
    """Return the Hermite coefficients in coordinates of the span."""
    constant, k = chain[0].constant, span.shape[1]
    inside = [chain[0].change_basis(inputs=span), *chain[1:]]
    return hermite(written_out(inside, k, constant=constant), k)


def _first_variables(part: Tensor, degree: int, k: int) -> Tensor:
    """Return the columns of the monomials of the first k variables; the others are orthogonal."""
    n = next(n for n in range(k, part.shape[1] + k) if n_monomials(n, degree) == part.shape[1])
    if n == k:
        return part
    return part[:, (monomials(n, degree)[:, k:] == 0).all(1).to(part.device)]


def _check_cost(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    spans: tuple[Tensor, Tensor],
    max_operations: float,
) -> None:
    if min(len(a), len(b)) > 7:
        raise BilensError(
            f"a and b have {len(a)} and {len(b)} layers; moments of polynomials of the degree of 8 "
            "or more leave float64. Compare models of fewer layers, or sample x"
        )
    costs, terms = zip(*map(_cost, (a, b), spans), strict=True)
    if sum(costs) > max_operations:
        read = " and ".join(str(span.shape[1]) for span in spans)
        raise BilensError(
            f"{sum(costs):.1e} operations and {8e-9 * a[-1].n_out * max(terms):.1f} GB needed "
            f"(models of {len(a)} and {len(b)} layers that read {read} directions are polynomials "
            f"of up to {max(terms):.1e} terms), above max_operations={max_operations:.1e}. Cut the "
            "models to some 20 directions with bonds(...).cut(20), raise it, or sample x"
        )


def _cost(chain: Sequence[BilinearTensor], span: Tensor) -> tuple[float, int]:
    """Return the number of operations for a model, and the number of its terms."""
    variables = span.shape[1] + chain[0].constant
    cost, largest = 0.0, 10**100
    # Degrees double with each layer: those of deep models leave the range of floats.
    for i, tensor in enumerate(chain):
        terms = min(largest, n_monomials(variables, 2 ** min(i, 100)))
        # An addition to a table takes as long as 600 multiplications in a matrix product.
        cost += terms**2 / 2 * tensor.n_out * (2 * tensor.n_in + 600)
    return cost, min(largest, n_monomials(variables, 2 ** min(len(chain), 100)))


def written_out(chain: Sequence[BilinearTensor], k: int, *, constant: bool) -> Polynomials:
    """Return the outputs of a chain in float64 as polynomials of k inputs and the constant."""
    like = chain[0].left
    eye = torch.eye(k + constant, dtype=like.dtype, device=like.device)
    # Variable number i is monomial number k - 1 - i of degree 1.
    parts: Polynomials = {1: eye[:, :k].flip(1)}
    if constant:
        parts[0] = eye[:, k:]
    for tensor in chain:
        parts = _layer(tensor, parts, k)
    return parts


def hermite(parts: Polynomials, k: int) -> Polynomials:
    """Return the coefficients c of sum_alpha c_alpha He_alpha(y): those of exp(Laplacian / 2) p.

    E[He_alpha(y) He_beta(y)] = alpha! for alpha = beta and otherwise 0, for y ~ N(0, I).
    """
    coefficients = dict(parts)
    for degree, part in parts.items():
        reached = part
        # A Laplacian lowers the degree by two; 1 / (2 step) makes the series the exponential.
        for step in range(1, degree // 2 + 1):
            lower = degree - 2 * step
            reached = _laplacian(reached, k, lower) / (2 * step)
            coefficients[lower] = coefficients.get(lower, 0) + reached
    return coefficients


def _layer(tensor: BilinearTensor, parts: Polynomials, k: int) -> Polynomials:
    """Return sum_ij B_oij p_i p_j for each output o, one monomial of the first factor at a time."""
    n, m = tensor.n_in, tensor.n_out
    half = torch.einsum("oh,hi,hj->ijo", tensor.out, tensor.left, tensor.right)
    core = (half + half.transpose(0, 1)).reshape(n, n * m) / 2
    made: dict[int, Tensor] = {}
    for low in sorted(parts):
        # One factor is contracted with the layer first, so that products are sums of rows.
        rows = parts[low].T @ core
        for high in (degree for degree in sorted(parts) if degree >= low):
            others = parts[high].T.contiguous()
            degree = low + high
            if degree not in made:
                made[degree] = core.new_zeros(n_monomials(k, degree), m)
            # Scattering by number needs no table of all pairs of monomials, which would not fit.
            numbers = _numbers_of_products(k, low, high, core.device)
            for i in torch.nonzero((parts[low] != 0).any(0)).flatten().tolist():
                # Within one degree i * j and j * i are one product, counted twice.
                start = i if low == high else 0
                terms = 2 * (others[start:] @ rows[i].view(n, m))
                if low == high:
                    terms[0] /= 2
                made[degree].index_add_(0, numbers(i)[start:], terms)
    return {degree: part.T.contiguous() for degree, part in made.items()}


def _numbers_of_products(
    k: int, low: int, high: int, device: torch.device
) -> Callable[[int], Int[Tensor, " monomials"]]:
    """Return a function from a monomial of degree `low` to its products with all of `high`."""
    sums, others = (_suffix_sums(k, degree).to(device) for degree in (low, high))
    last, columns = n_monomials(k, low + high) - 1, torch.arange(k - 1, device=device)
    # For each variable and suffix sum of the first factor: its summand of the number.
    table, shifts = _table(k, low + high).to(device), torch.arange(low + 1, device=device)
    summands = table[columns[:, None, None], others.T[:, None] + shifts[:, None]]
    return lambda i: last - summands[columns, sums[i]].sum(0)


def _laplacian(part: Tensor, k: int, lower: int) -> Tensor:
    """Return sum_i (beta_i + 2)(beta_i + 1) c_(beta + 2 e_i) for each beta of degree `lower`."""
    exponents = monomials(k, lower).to(part.device)
    sums = _suffix_sums(k, lower).to(part.device)
    table = _table(k, lower + 2).to(part.device)
    columns = torch.arange(k - 1, device=part.device)
    plain, raised = table[columns, sums], table[columns, sums + 2]
    # Raising variable i raises the suffix sums 1 to i.
    number = n_monomials(k, lower + 2) - 1 - plain.sum(1)
    total = torch.zeros(len(part), len(exponents), dtype=part.dtype, device=part.device)
    for i in range(k):
        if i > 0:
            number = number + plain[:, i - 1] - raised[:, i - 1]
        power = exponents[:, i].to(part)
        total += (power + 2) * (power + 1) * part[:, number]
    return total


def _suffix_sums(k: int, degree: int) -> Int[Tensor, "monomials k_less_1"]:
    return monomials(k, degree).flip(1).long().cumsum(1).flip(1)[:, 1:]


def _table(k: int, degree: int) -> Int[Tensor, "k_less_1 sums"]:
    """Return N(k - j + 1, s - 1) for j = 1 ... k - 1 and s = 0 ... degree."""
    entries = [n_monomials(k - j + 1, s - 1) for j in range(1, k) for s in range(degree + 1)]
    return torch.tensor(entries, dtype=torch.long).reshape(k - 1, degree + 1)
