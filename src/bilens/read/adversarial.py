"""Adversarial masks: one picture from the weights that turns other images into a given class."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.nn import ImageClassifier
from bilens.tensor import Spectrum

__all__ = ["Attack", "attack", "class_mask"]


@dataclass(frozen=True)
class Attack:
    """What a mask does to the images of all other classes.

    Attributes:
        targeted: share of them that the model now takes for the class of the mask.
        fooled: share of them that the model now takes for any class but their own.
    """

    targeted: float
    fooled: float


def class_mask(spectrum: Spectrum) -> Float[Tensor, "*batch n_pixels"]:
    """A mask for a class, built from its eigenvectors alone: a unit vector of pixels.

    m ~ Q_+^2 1 = sum_{lambda_i > 0} lambda_i^2 (v_i . 1) v_i

    Q_+ is the part of the interaction matrix that can only raise the logit. The gradient of x'Q_+x
    is 2 Q_+ x, so these are two steps uphill from an even grey image, which stands for images of
    any kind. They mix the strongest positive eigenvectors, each turned to add more ink than it
    takes away.

    Args:
        spectrum: all eigenvectors of the class in pixels, or a batch over classes:
            `model.tensor().interaction(output=3).eigh()`. A constant coordinate counts, and is left
            out of the mask.

    Raises:
        BilensError: no positive eigenvector has anything in common with an even image.
    """
    raising = spectrum.values.clamp_min(0)
    start = spectrum.vectors.sum(-1)
    mask = ((raising**2 * start)[..., None] * spectrum.vectors).sum(-2)
    mask = mask[..., :-1] if spectrum.constant else mask
    length: Tensor = torch.linalg.vector_norm(mask, dim=-1, keepdim=True)
    if not (length > 0).all():
        raise BilensError(
            "spectrum holds a class without a positive eigenvalue whose eigenvector overlaps with "
            "an even image, so there is no mask for it"
        )
    return mask / length


@torch.no_grad()
def attack(
    model: ImageClassifier,
    x: Float[Tensor, "samples n_pixels"],
    labels: Int[Tensor, " samples"],
    mask: Float[Tensor, " n_pixels"],
    *,
    class_: int,
    norm: float,
    at_once: int = 8192,
) -> Attack:
    """Add a mask to every image that is not of its class, and see what the model makes of them.

    x' = clip(x + norm m / |m|, 0, 1)

    Args:
        model: what is attacked, of any number of layers.
        x: images, from 0 to 1.
        labels: their classes.
        mask: m, of any length but zero; a random one of the same `norm` is what to compare with.
        class_: the class that the images should be taken for.
        norm: length of what is added, before it is clipped.
        at_once: images in memory together.

    Raises:
        BilensError: the mask does not fit, is zero or not finite, the norm is negative, or there
            are no images of other classes.
    """
    n_pixels = model.config.n_inputs
    if mask.shape != (n_pixels,) or not torch.isfinite(mask).all() or not mask.any():
        raise BilensError(
            f"mask has shape {tuple(mask.shape)}; expected ({n_pixels},), finite and not all zero"
        )
    if not norm >= 0:
        raise BilensError(f"norm={norm}, expected 0 or more")
    others = labels != class_
    if not others.any():
        raise BilensError(f"x holds no image of another class than class_={class_} to attack")
    added = norm * mask / mask.norm()
    predicted = torch.cat(
        [model((some + added).clamp(0, 1)).argmax(-1) for some in torch.split(x[others], at_once)]
    )
    return Attack(
        targeted=float((predicted == class_).double().mean()),
        fooled=float((predicted != labels[others]).double().mean()),
    )
