"""Adversarial masks: one picture from the weights that turns other images into a given class."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, check_index, check_labels, full_precision
from bilens.errors import BilensError
from bilens.nn import ImageClassifier
from bilens.settings import NotNegative
from bilens.tensor import Spectrum

__all__ = ["Attack", "attack", "class_mask"]

BLOCK = 8192
"""Images in memory together."""


@dataclass(frozen=True)
class Attack:
    """What a mask does to the images of all other classes.

    Attributes:
        targeted: share of them that the model now takes for the class of the mask.
        fooled: share of them that the model now takes for any class but their own.
    """

    targeted: float
    fooled: float


@full_precision
def class_mask(spectrum: Spectrum) -> Float[Tensor, "*batch n_pixels"]:
    """A mask for a class, built from its eigenvectors alone: a unit vector of pixels.

    m ~ Q_+^2 1 = sum_{lambda_i > 0} lambda_i^2 (v_i . 1) v_i

    Q_+ is the part of the interaction matrix that can only raise the logit. The gradient of x'Q_+x
    is 2 Q_+ x, so these are two steps uphill from an even grey image, which stands for images of
    any kind. They mix the strongest positive eigenvectors, each turned to add more ink than it
    takes away.

    The spectrum is that of a class in pixels, or a batch over classes:
    `model.tensor().interaction(output=3).eigh()`. A constant coordinate counts, and is left out of
    the mask.

    Raises:
        BilensError: no positive eigenvector has anything in common with an even image.
    """
    raising = spectrum.positive()
    start = raising.vectors.sum(-1)
    mask = ((raising.values**2 * start)[..., None] * raising.vectors).sum(-2)
    mask = mask[..., :-1] if spectrum.constant else mask
    check_finite(spectrum=mask)
    length: Tensor = torch.linalg.vector_norm(mask, dim=-1, keepdim=True)
    if not (length > 0).all():
        raise BilensError(
            "spectrum holds a class without a positive eigenvalue whose eigenvector overlaps with "
            "an even image, so there is no mask for it"
        )
    return mask / length


@full_precision
@torch.no_grad()
def attack(
    model: ImageClassifier,
    x: Float[Tensor, "samples n_pixels"],
    labels: Int[Tensor, " samples"],
    mask: Float[Tensor, " n_pixels"],
    *,
    label: int,
    norm: NotNegative,
) -> Attack:
    """Add a mask to every image that is not of its class, and see what the model makes of them.

    x' = clip(x + norm m / |m|, 0, 1)

    Images have pixels from 0 to 1. What to compare with is a random mask of the same `norm`, which
    is the length of what is added before it is clipped.

    Raises:
        BilensError: the mask does not fit, is zero or not finite, the norm is negative or not
            finite, a class is not one of the model's, or there are no images of other classes.
    """
    config = model.config
    check_finite(mask=mask)
    if mask.shape != (config.n_inputs,) or not mask.any():
        raise BilensError(
            f"mask has shape {tuple(mask.shape)}; expected ({config.n_inputs},), not all zero"
        )
    check_labels(labels, config.n_classes)
    check_index("label", label, config.n_classes, "the number of a class")
    others = labels != label
    if not others.any():
        raise BilensError(f"x holds no image of another class than label={label} to attack")
    added = (norm * mask / mask.norm()).to(model.embed.weight)
    blocks = x[others].split(BLOCK)
    predicted = torch.cat(
        [model((some.to(added) + added).clamp(0, 1)).argmax(-1) for some in blocks]
    ).to(labels.device)
    return Attack(
        targeted=float((predicted == label).double().mean()),
        fooled=float((predicted != labels[others]).double().mean()),
    )
