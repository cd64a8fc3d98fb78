"""What a feature dictionary keeps of a layer's outputs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.errors import BilensError

__all__ = ["SparsityReport", "loss_recovered", "sparsity"]


@dataclass(frozen=True)
class SparsityReport:
    """How sparse and how faithful a dictionary's activations are.

    Attributes:
        l0: active features of an input, on average.
        relative_error: mean |y - y'|^2 over mean |y|^2, the case study's MSE/L2^2.
        active: features that are active for at least one input.
        dead: features that never are.
    """

    l0: float
    relative_error: float
    active: int
    dead: int


@torch.no_grad()
def sparsity(
    activations: Float[Tensor, "samples n_features"],
    y: Float[Tensor, "samples d"],
    rebuilt: Float[Tensor, "samples d"],
) -> SparsityReport:
    """Count and measure, over one set of samples.

    Source:
        Pearce & Dooms 2024, appendix "SAE training".
    """
    on = activations != 0
    active = int(on.any(0).sum())
    error = (y - rebuilt).pow(2).sum() / y.pow(2).sum()
    return SparsityReport(
        l0=float(on.double().sum(-1).mean()),
        relative_error=float(error),
        active=active,
        dead=activations.shape[-1] - active,
    )


@torch.no_grad()
def loss_recovered(
    logits: Float[Tensor, "samples classes"],
    rebuilt_logits: Float[Tensor, "samples classes"],
    labels: Int[Tensor, " samples"],
) -> float:
    """Share of the model's advantage over random guessing that is left after a replacement.

    (L_guess - L_rebuilt) / (L_guess - L_model), with L_guess = log(classes).

    Raises:
        BilensError: the model itself is no better than guessing.

    Source:
        Pearce & Dooms 2024, "SAE features using the pseudoinverse trick".
    """
    guess = torch.tensor(float(logits.shape[-1])).log()
    model = functional.cross_entropy(logits, labels)
    rebuilt = functional.cross_entropy(rebuilt_logits, labels)
    if model >= guess:
        raise BilensError(
            f"The model's loss {float(model):.3f} is no better than guessing ({float(guess):.3f}), "
            "so there is nothing to recover"
        )
    return float((guess - rebuilt) / (guess - model))
