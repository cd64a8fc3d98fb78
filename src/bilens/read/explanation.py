"""Why one input gets the logits it gets."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_count, check_finite
from bilens.read.classes import check_classes
from bilens.tensor import Spectrum
from bilens.tensor.exact import exact

__all__ = ["Explanation", "LogitExplanation", "explain"]


@dataclass(frozen=True, eq=False)
class LogitExplanation:
    """The eigenvectors that make one logit of one input; activations and rest add up to it.

    Attributes:
        class_: the number of the logit.
        logit: its value.
        activations: of the strongest eigenvectors for this input, by magnitude.
        vectors: those eigenvectors, turned to overlap positively with the input.
        rest: what all other eigenvectors add.
    """

    class_: int
    logit: float
    activations: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n_in"]
    rest: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """One input and its highest logits, each taken apart.

    Attributes:
        x: the input.
        logits: all of them.
        parts: the highest logits, the highest first.
    """

    x: Float[Tensor, " n_in"]
    logits: Float[Tensor, " classes"]
    parts: tuple[LogitExplanation, ...]


@exact
@torch.no_grad()
def explain(
    spectrum: Spectrum, x: Float[Tensor, " n_in"], n_classes: int = 3, k: int = 5
) -> Explanation:
    """Split the highest logits of one input into eigenvector activations.

    Args:
        spectrum: all eigenvectors, batched over the classes.
        x: the input.
        n_classes: how many logits, the highest first; all of them where there are fewer.
        k: how many eigenvectors of each; all of them where there are fewer.

    Raises:
        BilensError: the spectrum is not a batch over classes, x is not finite, or n_classes or k
            is not positive.
    """
    check_classes(spectrum)
    check_count("n_classes", n_classes)
    check_count("k", k)
    check_finite(x=x)
    activations = spectrum.activations(x)
    signs = torch.where(spectrum.overlaps(x) < 0, -1, 1).to(spectrum.vectors)
    logits = activations.sum(-1)
    parts = []
    for class_ in logits.argsort(descending=True)[:n_classes].tolist():
        strongest = activations[class_].abs().topk(min(k, spectrum.k)).indices
        chosen = activations[class_, strongest]
        parts.append(
            LogitExplanation(
                class_=class_,
                logit=float(logits[class_]),
                activations=chosen,
                vectors=signs[class_, strongest, None] * spectrum.vectors[class_, strongest],
                rest=float(logits[class_] - chosen.sum()),
            )
        )
    return Explanation(x, logits, tuple(parts))
