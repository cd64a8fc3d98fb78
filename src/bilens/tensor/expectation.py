"""Exact inner products of models of one or two layers as functions of Gaussian inputs.

A model is a sum of parts that are orthogonal under the Gaussian, one for each degree, and products
of two parts are multiplied out by Wick's theorem (Isserlis 1918). Everything is computed from the
factors: with the rows F = [L; R] and H = [R; L] of a first layer, the form of a hidden unit of the
second is A = H' diag(w, w) F / 2, so that traces of products of forms need the inner products of
the rows of both models only.

Source: Janson 1997, "Gaussian Hilbert Spaces", chapter 3, for the orthogonal parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import check_chain
from bilens.tensor.factors import (
    affine,
    checked_positive,
    hidden_product,
    in_range,
    square_root,
    wrong_shape,
)


@checked
def expected_inner(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    *,
    mean: Float[Tensor, " n_in"] | None = None,
    covariance: Float[Tensor, "n_in n_in"] | None = None,
) -> Float64[Tensor, ""]:
    """Return E[f_a(x) . f_b(x)] for Gaussian x, exactly, from the weights of both models.

    A model is the chain of its one or two layers' tensors, such as `ImageClassifier.tensors()`;
    biases and residuals are in it, and a constant coordinate stays 1. One layer is, for each output
    with Q = [[A, q], [q', c]] on [x, 1],

        f(x) = (tr A + c) + 2q.x + :x'Ax:,   :x'Ax: = x'Ax - tr A,

    three parts that are orthogonal under the Gaussian, so that, summed over outputs,

        E[f_a f_b] = (tr A_a + c_a)(tr A_b + c_b) + 4 q_a.q_b + 2 tr(A_a A_b).

    Two layers are a sum over the second's hidden units of products of two such functions, in parts
    of degrees 0 to 4. The result is differentiable, and in float64. Two layers cost some
    16 n r_a^2 r_b^2 operations, where r are the ranks of the first layers, and n is the smaller of
    the outputs and the rank of a's second layer.

    Args:
        a: the layers of one model, the first to read the input first.
        b: those of the other; it may differ in depth, ranks and in having biases.
        mean: of x, without the constant coordinate; by default 0.
        covariance: of x; by default the identity.
    """
    (a, scale_a), (b, scale_b) = _prepared(a, b, mean, covariance)
    return in_range(expected_inner=scale_a * scale_b * _unit_inner(a, b))


@checked
def expected_cosine(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    *,
    mean: Float[Tensor, " n_in"] | None = None,
    covariance: Float[Tensor, "n_in n_in"] | None = None,
) -> Float64[Tensor, ""]:
    """Return E[f_a . f_b] / sqrt(E|f_a|^2 E|f_b|^2) for Gaussian x; 0 if either model is zero.

    Arguments and errors are those of `expected_inner`.
    """
    (a, _), (b, _) = _prepared(a, b, mean, covariance)
    norms = [_unit_inner(c, c).clamp_min(0) for c in (a, b)]
    scale = norms[0].sqrt() * norms[1].sqrt()
    return torch.where(scale > 0, _unit_inner(a, b) / scale, torch.zeros_like(scale))


def _unit_inner(a: Sequence[BilinearTensor], b: Sequence[BilinearTensor]) -> Float64[Tensor, ""]:
    """Return the expectation for chains from `_prepared`."""
    if len(a) == len(b) == 1:
        (a_0, a_1, a_2), (b_0, b_1, b_2) = _affine_parts(a[0]), _affine_parts(b[0])
        return a_0 @ b_0 + (a_1 * b_1).sum() + 2 * a_2.inner(b_2)
    return _orthogonal_parts(a).inner(_orthogonal_parts(b))


@dataclass(frozen=True, eq=False)
class _Parts:
    """The orthogonal parts of a model: f = degree_0 + degree_1.x + :x'(X'CX)x: + higher.

    The hidden unit h of the second layer multiplies the forms A_h and B_h of the first layer, with
    the linear parts p_h and q_h. The higher parts are

        sum_h out[:, h] (:x'A_h x (q_h.x): + :x'B_h x (p_h.x): + :(x'A_h x)(x'B_h x):)

    Attributes:
        rows: X.
        cores: C for each output.
        left: L of the first layer.
        right: R of the first layer.
        out: of the second layer; no columns for a model of one layer.
        weights: of the first layer's hidden units in the A, then in the B.
        others: the q, then the p.
    """

    degree_0: Float64[Tensor, " n_out"]
    degree_1: Float64[Tensor, "n_out n"]
    rows: Float64[Tensor, "rows n"]
    cores: Float64[Tensor, "n_out rows rows"]
    left: Float64[Tensor, "rank n"]
    right: Float64[Tensor, "rank n"]
    out: Float64[Tensor, "n_out units"]
    weights: Float64[Tensor, "two_units rank"]
    others: Float64[Tensor, "two_units n"]

    def inner(self, that: "_Parts") -> Float64[Tensor, ""]:
        """Return the sum over degrees of E[part . part]: legs joined in all ways between parts."""
        low = self.degree_0 @ that.degree_0 + (self.degree_1 * that.degree_1).sum()
        between = self.rows @ that.rows.T
        low = low + 2 * ((self.cores @ between) * (between @ that.cores)).sum()
        r, s = self.out.shape[1], that.out.shape[1]
        if not r or not s:
            return low
        ours, theirs = self.out, that.out
        if len(ours) > r:  # only pairs of hidden units remain of the outputs
            ours, theirs = torch.eye(r).to(ours), self.out.T @ that.out
        S = ours.T @ theirs
        traces = hidden_product(self.left, self.right, that.left, that.right)
        traces = self.weights @ traces @ that.weights.T
        # Degree 3, all 6 ways to join three legs with three: 2 join form with form, 4 cross.
        joined = 2 * (S.repeat(2, 2) * traces * (self.others @ that.others.T)).sum()
        # Degree 4, all 24 ways to join four legs with four: 4 + 4 + 16.
        pairs = traces[:r, :s] * traces[r:, s:] + traces[:r, s:] * traces[r:, :s]
        joined = joined + 4 * (S * pairs).sum()
        F, H = torch.cat([self.left, self.right]), torch.cat([self.right, self.left])
        F_that, H_that = torch.cat([that.left, that.right]), torch.cat([that.right, that.left])
        straight, flipped = F @ F_that.T, H @ H_that.T
        # 4 n'M'M n', summed over pairs of a form M and its other factor n.
        reached = _summed(ours.repeat(1, 2), self.weights, self.others @ H_that.T)
        reaching = _summed(theirs.repeat(1, 2), that.weights, that.others @ H.T)
        crossed = (reached.repeat(1, 2, 1) * reaching.repeat(1, 2, 1).mT).sum(0)
        joined = joined + (straight * crossed).sum()
        # 16 tr(A A' B B'), row by row of F, since all at once would need rank^2 times as much.
        U = _summed(ours, self.weights[:r], self.weights[r:])
        V = _summed(theirs, that.weights[:s], that.weights[s:])
        halves = straight.unflatten(1, (2, -1)), flipped.unflatten(1, (2, -1))
        for i, u in enumerate(U.repeat(1, 2, 2).unbind(1)):
            first = (halves[1][i] * halves[0]).sum(1)
            second = (halves[0][i] * halves[1]).sum(1)
            joined = joined + (u[..., None] * (first @ V) * second).sum()
        return low + joined


def _summed(
    out: Float64[Tensor, "n units"],
    first: Float64[Tensor, "units i"],
    second: Float64[Tensor, "units j"],
) -> Float64[Tensor, "n i j"]:
    """Return the sum over units u of out[:, u] first[u, i] second[u, j]."""
    return (out[:, None] * first.T) @ second


def _orthogonal_parts(chain: Sequence[BilinearTensor]) -> _Parts:
    """Return the parts of a model of one or two layers."""
    first = chain[0]
    c, linear, forms = _affine_parts(replace(first, out=torch.eye(first.rank).to(first.out)))
    L, R = forms.left, forms.right
    H = torch.cat([R, L])
    if len(chain) == 1:
        D = first.out
        return _Parts(D @ c, D @ linear, H, _crossed(D) / 2, L, R, D[:, :0], D[:0], linear[:0])
    second, d = chain[1], first.n_out
    out = second.out
    # A hidden unit is a product of two outputs of the first layer, along its two rows.
    w_a, w_b = second.left[:, :d] @ first.out, second.right[:, :d] @ first.out
    a, b, p, q = w_a @ c, w_b @ c, w_a @ linear, w_b @ linear
    if second.n_in > d:
        a, b = a + second.left[:, d], b + second.right[:, d]
    # Products of two Hermite expansions: every contraction of legs within the pair is one term.
    # No leg is left: constants, one leg of each joined, or both, in two ways.
    traces = ((w_a @ hidden_product(L, R, L, R)) * w_b).sum(-1)
    degree_0 = a * b + (p * q).sum(-1) + 2 * traces
    # One leg is left where a leg of A joins that of q, in two ways, or the reverse.
    reached = _applied(L, R, w_a, q) + _applied(L, R, w_b, p)
    degree_1 = a[:, None] * q + b[:, None] * p + 2 * reached
    # Two are left free in p q', and in A B where one leg of each is joined, in four ways.
    # The first is half of q p' + p q', and A B = H'(U * FF')H / 4.
    F = torch.cat([L, R])
    both = _summed(out, w_a, w_b).repeat(1, 2, 2) * (F @ F.T)
    on_forms = _crossed(out @ (a[:, None] * w_b + b[:, None] * w_a)) + both + both.mT
    on_vectors, nothing = _crossed(out), out.new_zeros(len(out), len(H), 2 * len(p))
    cores = [torch.cat([on_forms, nothing], 2), torch.cat([nothing.mT, on_vectors], 2)]
    return _Parts(
        degree_0=out @ degree_0,
        degree_1=out @ degree_1,
        rows=torch.cat([H, p, q]),
        cores=torch.cat(cores, 1) / 2,
        left=L,
        right=R,
        out=out,
        weights=torch.cat([w_a, w_b]),
        others=torch.cat([q, p]),
    )


def _crossed(weights: Float64[Tensor, "n_out k"]) -> Float64[Tensor, "n_out two_k two_k"]:
    """Return the matrices with each row of weights on both diagonals off the main one."""
    diagonal = torch.diag_embed(weights)
    nothing = torch.zeros_like(diagonal)
    halves = [torch.cat([nothing, diagonal], 2), torch.cat([diagonal, nothing], 2)]
    return torch.cat(halves, 1)


def _applied(L: Tensor, R: Tensor, weights: Tensor, vectors: Tensor) -> Tensor:
    """Return each form's product with a vector of its own: (L' diag(w) R + R' diag(w) L) v / 2."""
    return ((weights * (vectors @ R.T)) @ L + (weights * (vectors @ L.T)) @ R) / 2


def _affine_parts(layer: BilinearTensor) -> tuple[Tensor, Tensor, BilinearTensor]:
    """Return each output's tr A + c and 2q, and the layer of the A only, from the factors."""
    n = layer.n_in - layer.constant
    L, R, D = layer.left[:, :n], layer.right[:, :n], layer.out
    hidden_0, hidden_1 = (L * R).sum(-1), torch.zeros_like(L)
    if layer.constant:
        bias, gate = layer.left[:, n], layer.right[:, n]
        hidden_0, hidden_1 = hidden_0 + bias * gate, bias[:, None] * R + gate[:, None] * L
    return D @ hidden_0, D @ hidden_1, BilinearTensor(L, R, D)


Scaled = tuple[list[BilinearTensor], Float64[Tensor, ""]]


def _prepared(
    a: Sequence[BilinearTensor],
    b: Sequence[BilinearTensor],
    mean: Float[Tensor, " n_in"] | None,
    covariance: Float[Tensor, "n_in n_in"] | None,
) -> tuple[Scaled, Scaled]:
    """Return both chains for standard inputs without their scale, and the scales."""
    for name, chain in (("a", a), ("b", b)):
        check_chain(chain, name)
        if len(chain) > 2:
            raise BilensError(
                f"{name} has {len(chain)} layers, expected one or two; for deeper models take the "
                "mean of products of outputs over samples of x"
            )
    sizes = [(chain[0].n_in - chain[0].constant, chain[-1].n_out) for chain in (a, b)]
    if sizes[0] != sizes[1] or not sizes[0][0]:
        raise BilensError(
            f"a has {sizes[0]} inputs and outputs (the constant not counted), b has {sizes[1]}; "
            "they should be the same, with at least one input"
        )
    a, b = [layer.to(torch.float64) for layer in a], [layer.to(torch.float64) for layer in b]
    if mean is not None or covariance is not None:
        a, b = (_standardised(chain, mean, covariance) for chain in (a, b))
    return _without_scale(a), _without_scale(b)


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
