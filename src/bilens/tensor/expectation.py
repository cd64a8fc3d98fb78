"""The cosine of two layers as functions of Gaussian inputs."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.factors import affine, checked_positive, square_root, wrong_shape


@checked
def expected_cosine(
    a: BilinearTensor,
    b: BilinearTensor,
    *,
    mean: Float[Tensor, " n_in"] | None = None,
    covariance: Float[Tensor, "n_in n_in"] | None = None,
) -> Float64[Tensor, ""]:
    """Return E[f_a . f_b] / sqrt(E|f_a|^2 E|f_b|^2) for Gaussian x, exactly; 0 if either is zero.

    Biases and residuals count, and a constant coordinate stays 1. For each output of a layer, with
    Q = [[A, q], [q', c]] on [x, 1],

        f(x) = (tr A + c) + 2q.x + :x'Ax:,   :x'Ax: = x'Ax - tr A,

    three parts that are orthogonal under the Gaussian, so that, summed over outputs,

        E[f_a f_b] = (tr A_a + c_a)(tr A_b + c_b) + 4 q_a.q_b + 2 tr(A_a A_b).

    The result is differentiable, and in float64.

    Args:
        a: a layer.
        b: another, which may differ in rank and in having biases.
        mean: of x, without the constant coordinate; by default 0.
        covariance: of x; by default the identity.

    Raises:
        BilensError: inputs or outputs differ in number, or the layers have no input but the
            constant.

    Source: Janson 1997, "Gaussian Hilbert Spaces", chapter 3, for the orthogonal parts.
    """
    sizes = [(layer.n_in - layer.constant, layer.n_out) for layer in (a, b)]
    if sizes[0] != sizes[1] or not sizes[0][0]:
        raise BilensError(
            f"a has {sizes[0]} inputs and outputs (the constant not counted), b has {sizes[1]}; "
            "they should be the same, with at least one input"
        )
    ours, theirs = (_parts(_standardised(x.without_scale()[0], mean, covariance)) for x in (a, b))
    scale = _inner(ours, ours).clamp_min(0).sqrt() * _inner(theirs, theirs).clamp_min(0).sqrt()
    return torch.where(scale > 0, _inner(ours, theirs) / scale, torch.zeros_like(scale))


Parts = tuple[Tensor, Tensor, BilinearTensor]
"""Each output's tr A + c and 2q, and the layer of the A only."""


def _inner(ours: Parts, theirs: Parts) -> Float64[Tensor, ""]:
    constants, linear = ours[0] @ theirs[0], (ours[1] * theirs[1]).sum()
    return constants + linear + 2 * ours[2].inner(theirs[2])


def _parts(layer: BilinearTensor) -> Parts:
    n = layer.n_in - layer.constant
    L, R, D = layer.left[:, :n], layer.right[:, :n], layer.out
    hidden_0, hidden_1 = (L * R).sum(-1), torch.zeros_like(L)
    if layer.constant:
        bias, gate = layer.left[:, n], layer.right[:, n]
        hidden_0, hidden_1 = hidden_0 + bias * gate, bias[:, None] * R + gate[:, None] * L
    return D @ hidden_0, D @ hidden_1, BilinearTensor(L, R, D)


def _standardised(
    layer: BilinearTensor, mean: Tensor | None, covariance: Tensor | None
) -> BilinearTensor:
    """Return the layer y -> f(mean + S y) with S S' = covariance: x ~ N(mean, covariance)."""
    n = layer.n_in - layer.constant
    S = torch.eye(n).to(layer.left)
    if covariance is not None:
        S = square_root(checked_positive("covariance", covariance, n).to(S))[0]
    if mean is None:
        return layer.change_basis(inputs=S)
    if mean.shape != (n,):
        raise wrong_shape("mean", mean, f"({n},), one number for each input but the constant")
    check_finite(mean=mean)
    return layer.with_bias().change_basis(inputs=affine(S, mean.to(S)))
