"""Sparsity and fidelity of a feature dictionary's reconstruction of a layer's outputs."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.checks import check_finite, check_labels, full_precision
from bilens.errors import BilensError


@dataclass(frozen=True)
class SparsityReport:
    """Sparsity and relative error of a dictionary's activations.

    Attributes:
        l0: active features of an input, on average.
        relative_error: mean |y - y'|^2 over mean |y|^2, the case study's MSE/L2^2.
        active: number of features that are active for at least one input.
        dead: number of all other features.
    """

    l0: float
    relative_error: float
    active: int
    dead: int


@full_precision
@torch.no_grad()
def sparsity(
    activations: Float[Tensor, "samples n_features"],
    y: Float[Tensor, "samples d"],
    rebuilt: Float[Tensor, "samples d"],
) -> SparsityReport:
    """Measure sparsity and relative error over one set of samples.

    Raises:
        BilensError: the samples are empty, all of y is zero, or an array is not finite.

    Source:
        Pearce & Dooms 2024, appendix "SAE training".
    """
    check_finite(activations=activations, y=y, rebuilt=rebuilt)
    if not y.any():
        raise BilensError("y has no sample, or is all zero, so no error is relative to it")
    on = activations != 0
    active = int(on.any(0).sum())
    error = (y - rebuilt).pow(2).sum() / y.pow(2).sum()
    return SparsityReport(
        l0=float(on.double().sum(-1).mean()),
        relative_error=float(error),
        active=active,
        dead=activations.shape[-1] - active,
    )


@full_precision
@torch.no_grad()
def loss_recovered(
    logits: Float[Tensor, "samples classes"],
    rebuilt_logits: Float[Tensor, "samples classes"],
    labels: Int[Tensor, " samples"],
) -> float:
    """Share of the model's advantage over random guessing that is left after a replacement.

    (L_guess - L_rebuilt) / (L_guess - L_model), with L_guess = log(classes).

    Raises:
        BilensError: the model itself is no better than guessing, an array is not finite, or a
            label is not a class.

    Source:
        Pearce & Dooms 2024, "SAE features using the pseudoinverse trick".
    """
    check_finite(logits=logits, rebuilt_logits=rebuilt_logits)
    check_labels(labels, logits.shape[-1])
    guess = math.log(logits.shape[-1])
    model, rebuilt = (
        float(functional.cross_entropy(x, labels.long())) for x in (logits, rebuilt_logits)
    )
    if model >= guess:
        raise BilensError(
            f"The model's loss {model:.3f} is no better than guessing ({guess:.3f}), so there is "
            "nothing to recover"
        )
    return (guess - rebuilt) / (guess - model)
