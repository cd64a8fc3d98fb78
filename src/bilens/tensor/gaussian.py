"""Models of a Gaussian input as models of a standard one."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_finite
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.constant import affine
from bilens.tensor.positive import checked_positive, square_root

__all__ = ["standardised"]


def standardised(
    chain: Sequence[BilinearTensor],
    mean: Float[Tensor, " n"] | None,
    covariance: Float[Tensor, "n n"] | None,
) -> list[BilinearTensor]:
    """The chain of y -> f(mean + S y) with S S' = covariance, so that x ~ N(mean, covariance).

    Args:
        chain: its layers in float64.
        mean: without the constant coordinate; None for 0.
        covariance: None for the identity.

    Raises:
        BilensError: one does not fit the chain's inputs, is not finite, or is not a covariance.
    """
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
