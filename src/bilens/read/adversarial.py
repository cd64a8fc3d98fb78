"""Adversarial masks: pictures built from the weights that turn other images into a class."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, check_index, check_labels, detached, full_precision
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.lazy_imports import pd
from bilens.read.chain import predict
from bilens.read.classifier import spectra
from bilens.reading import Fact, Percent, Reading
from bilens.registry import reading
from bilens.settings import NotNegative, Seed
from bilens.tensor import Spectrum, TensorChain


@dataclass(frozen=True, repr=False)
class Attack(Reading):
    """Effect of a mask on the images of all other classes.

    Attributes:
        targeted: share of them that the model classifies as the class of the mask.
        fooled: share of them that the model classifies as any class but their own.
    """

    targeted: float
    fooled: float

    def facts(self) -> list[Fact]:
        """Return both shares."""
        return [
            ("taken for the class of the mask", Percent(self.targeted)),
            ("taken for another class than their own", Percent(self.fooled)),
        ]


@full_precision
def class_mask(spectrum: Spectrum) -> Float[Tensor, "*batch n_pixels"]:
    """Return the mask of a class, a unit vector of pixels built from its eigenvectors only.

    m ~ Q_+^2 1 = sum_{lambda_i > 0} lambda_i^2 (v_i . 1) v_i

    Q_+ is the part of the interaction matrix that can only raise the logit. The gradient of x'Q_+x
    is 2 Q_+ x, so these are two steps uphill from an even grey image, which represents images of
    any kind. They mix the strongest positive eigenvectors, each with the sign that adds more ink
    than it removes.

    The spectrum is that of a class in pixels, or a batch over classes:
    `model.tensor().interaction(output=3).eigh()`. A constant coordinate counts, and is left out of
    the mask.

    Raises:
        BilensError: no positive eigenvector overlaps with an even image.
    """
    # Negative eigenvalues can only lower the logit.
    raising = spectrum.positive()
    start = raising.vectors.sum(-1)
    mask = ((raising.values**2 * start)[..., None] * raising.vectors).sum(-2)
    # The constant is no pixel that an attack could change.
    mask = mask[..., :-1] if spectrum.constant else mask
    check_finite(spectrum=mask)
    length: Tensor = torch.linalg.vector_norm(mask, dim=-1, keepdim=True)
    if not (length > 0).all():
        raise BilensError(
            "spectrum holds a class without a positive eigenvalue whose eigenvector overlaps with "
            "an even image, so it has no mask"
        )
    return mask / length


@detached
def attack(
    model: TensorChain,
    x: Float[Tensor, "samples n_pixels"],
    labels: Int[Tensor, " samples"],
    mask: Float[Tensor, " n_pixels"],
    *,
    label: int,
    norm: NotNegative,
) -> Attack:
    """Add a mask to every image of another class, and measure the model's predictions.

    x' = clip(x + norm m / |m|, 0, 1)

    Images have pixels from 0 to 1. Compare with a random mask of the same `norm`, which is the
    length of the added mask before clipping.
    """
    check_finite(mask=mask)
    if mask.shape != x.shape[1:] or not mask.any():
        raise BilensError(
            f"mask has shape {tuple(mask.shape)}; expected ({x.shape[1]},), not all zero"
        )
    n_classes = model.layer_tensors()[-1].n_out
    check_labels(labels, n_classes)
    check_index("label", label, n_classes, "the number of a class")
    # Images of the class itself need no mask.
    others = labels != label
    if not others.any():
        raise BilensError(f"x holds no image of another class than label={label} to attack")
    # No pixel is below 0 or above 1, so a part of a long mask is lost here.
    masked = (x[others] + (norm * mask / mask.norm()).to(x)).clamp(0, 1)
    predicted = predict(model, masked).argmax(-1).to(labels.device)
    return Attack(
        targeted=float((predicted == label).double().mean()),
        fooled=float((predicted != labels[others]).double().mean()),
    )


@dataclass(frozen=True, eq=False, repr=False)
class MaskReading(Reading):
    """Attacks with the mask of each class, beside Gaussian noise of the same length.

    Attributes:
        class_names: names of the classes.
        norm: length of the masks.
        masks: attack of each class with its mask.
        noise: attack of each class with noise.
    """

    class_names: tuple[str, ...]
    norm: float
    masks: tuple[Attack, ...]
    noise: tuple[Attack, ...]

    title: ClassVar[str] = "Masks that turn images into another class"
    axes: ClassVar[dict[str, str]] = {"x": "class", "y": "targeted"}
    formats: ClassVar[dict[str, str]] = dict.fromkeys(
        ("targeted", "fooled", "targeted by noise", "fooled by noise"), ".1%"
    )
    explanation: ClassVar[str] = (
        "The mask of a class is built from its eigenvectors only, and added to the test images of "
        "all other classes. Targeted is the share that the model then takes for the class of the "
        "mask, fooled the share that it takes for any class but their own."
    )

    def facts(self) -> list[Fact]:
        """Return the length of the masks and the mean shares."""
        means = self.frame().mean(numeric_only=True)
        return [("length", self.norm), *((name, Percent(share)) for name, share in means.items())]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each class: the shares of its mask and of noise."""
        columns: dict[str, list[Any]] = {"class": list(self.class_names)}
        for suffix, attacks in (("", self.masks), (" by noise", self.noise)):
            columns[f"targeted{suffix}"] = [attack.targeted for attack in attacks]
            columns[f"fooled{suffix}"] = [attack.fooled for attack in attacks]
        return pd.DataFrame(columns)


@reading("masks")
@detached
def read_masks(
    model: TensorChain, data: ImageData, norm: NotNegative = 5.0, seed: Seed = 0
) -> MaskReading:
    """Attack a classifier of one layer with the mask of each class, and with noise.

    Args:
        model: the classifier.
        data: its images, with pixels from 0 to 1.
        norm: length of the masks before clipping.
        seed: seed of the noise.

    Raises:
        NotBilinearError: the model is not one tensor.
    """
    masks = class_mask(spectra(model, basis="pixels"))
    # A generator of the CPU draws the same noise on every device.
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn(masks.shape, generator=generator, device="cpu").to(masks)
    x, labels = data.test_images, data.test_labels
    ours, random = (
        tuple(
            attack(model, x, labels, mask, label=label, norm=norm)
            for label, mask in enumerate(drawn)
        )
        for drawn in (masks, noise)
    )
    return MaskReading(data.class_names, norm, ours, random)
