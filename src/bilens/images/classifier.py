"""Eigenvectors of a single-layer classifier's logits, and the accuracy that few of them reach."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, check_finite, check_index, check_labels, checked, detached
from bilens.data import ImageData
from bilens.data.pictures import read_picture
from bilens.errors import BilensError
from bilens.images import chain
from bilens.images.chain import predict
from bilens.images.explanation import Explanation, SharedFeatures, explain, shared_by_classes
from bilens.images.fidelity import BLOCK, TruncationCurve, truncation_curve
from bilens.options import Basis, Order
from bilens.sections import Columns, Fact, Percent
from bilens.settings import Count, NotNegative
from bilens.tensor import Spectrum, TensorChain

FEW = 10
"""Eigenvectors of each class beside whose accuracy that of all stands."""
FLAT = 1 / 3
"""Effective rank, as a share of all eigenvectors, above which a spectrum is flat."""


@checked
def top_inputs(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], k: int = 3
) -> Int[Tensor, "*batch eigenvectors k"]:
    """Return the indices of the k inputs of largest |activation| for every eigenvector.

    The strongest comes first. Samples pass in blocks, so any number of them fits in memory.
    """
    check_count("k", k, len(x), "the number of samples in x")
    check_finite(x=x)
    best, numbers = [], []
    for start in range(0, len(x), BLOCK):
        # Within an eigenvector |overlap| sorts inputs as |activation| does.
        strength = spectrum.overlaps(x[start : start + BLOCK]).abs()
        # Only the best k of a block stay in memory, and the last step picks among these.
        top = strength.topk(min(k, len(strength)), dim=0)
        best.append(top.values)
        numbers.append(start + top.indices)
    order = torch.cat(best).topk(k, dim=0).indices
    return torch.cat(numbers).gather(0, order).movedim(0, -1)


@detached
def class_spectra(
    model: TensorChain,
    directions: Float[Tensor, "*batch n_classes"] | None = None,
    basis: Basis = "model",
) -> Spectrum:
    """Return all eigenvectors of every logit as pictures: a spectrum batched over the classes.

    With directions in the logits, such as logit 3 minus logit 8, it is batched over these instead.

    The basis is the space in which eigenvectors are orthonormal. "model" decomposes each logit
    after the embedding and pulls the eigenvectors back to pixels, as the papers do. "pixels"
    decomposes the whole map from pixels to logits. Either way the activations of all eigenvectors
    add up to the logits; truncated spectra differ.

    Raises:
        NotBilinearError: the model is not one tensor.

    Source: Pearce et al. 2024, sections 4.1 and 4.2 and figure 4.
    """
    # The embedding stays apart, since it decides in which space vectors are orthonormal.
    tensor, embedding = chain.open_layer(model)
    if directions is None:
        # Without directions each logit is its own.
        directions = torch.eye(tensor.n_out, device=tensor.out.device)
    directions = directions.to(tensor.out)
    if basis == "pixels":
        return tensor.change_basis(inputs=embedding).interaction(directions).eigh()
    spectrum = tensor.interaction(directions).eigh()
    # An affine embedding has a row and a column for the constant, whose bias is the offset.
    if tensor.constant:
        return spectrum.pullback(embedding[:-1, :-1], embedding[:-1, -1])
    return spectrum.pullback(embedding)


@dataclass(frozen=True, eq=False, repr=False)
class ClassifierReading(Reading):
    """Spectra of a classifier's logits, and their accuracy on a test set.

    Attributes:
        model: the classifier.
        data: its images, on the device of the spectrum.
        spectrum: all eigenvectors in pixel space, batched over the classes and oriented by the
            test images.
        accuracy: accuracy of the model on the test images.
        curve: accuracy against the number of eigenvectors.
        shared: features that the first eigenvectors of several classes have in common.
        order: order of the eigenvectors on a page.
    """

    model: TensorChain
    data: ImageData
    spectrum: Spectrum
    accuracy: float
    curve: TruncationCurve
    shared: SharedFeatures
    order: Order = "eigenvalue"

    axes: ClassVar[dict[str, str]] = Spectrum.axes
    title: ClassVar[str] = "How few eigenvectors does each class need?"

    def facts(self) -> list[Fact]:
        accuracies = self.curve.accuracy
        few = min(FEW, len(accuracies))
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            (f"with {few} eigenvectors a class", Percent(accuracies[few - 1])),
            *chain.size_facts(self.model),
            *self.spectrum.facts(),
        ]

    def columns(self) -> Columns:
        """Return a row for each eigenvector of each class; the class is its form."""
        columns = self.spectrum.columns()
        return {**columns, "form": [self.data.class_names[i] for i in columns["form"]]}

    def answer(self) -> str:
        """Return how many eigenvectors lose at most a point, and advice where they are many."""
        if self.data.is_chance(self.accuracy):
            return chain.chance_sentence(self.accuracy, self.data)
        accuracies, count = self.curve.accuracy, self.curve.needed(0.01)
        text = (
            f"{count} of the {len(accuracies)} eigenvectors of each class keep "
            f"{accuracies[count - 1]:.1%} of test images right; all of them {self.accuracy:.1%}"
        )
        if count > FEW:
            text += f", and {FEW} of them {accuracies[FEW - 1]:.1%}"
        rank = float(self.spectrum.effective_rank().mean())
        if rank > FLAT * len(accuracies):
            text += (
                f". The spectra are flat, as of {rank:.0f} equally strong eigenvectors. More "
                "images, or training with more --weight-decay and --input-noise, may leave fewer"
            )
        return text + "."


@detached
def read_classifier(
    model: TensorChain, data: ImageData, basis: Basis = "model", order: Order = "eigenvalue"
) -> ClassifierReading:
    """Decompose each logit of a single-layer classifier into its eigenvectors.

    The data is moved to the device of the model, or to the CPU if that device has no float64. The
    basis is that of `class_spectra`.

    Args:
        model: the classifier.
        data: its images.
        basis: space in which eigenvectors are orthonormal: after the embedding, or pixels.
        order: order of the eigenvectors on a page.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: the model differs from its tensor.
    """
    spectrum = class_spectra(model, basis=basis)
    data = data.to(spectrum.values.device)
    # Eigenvectors of a tensor that is not the model would look as plausible.
    chain.check_reproduces(model, chain.input_tensors(model), data)
    return ClassifierReading(
        model=model,
        data=data,
        spectrum=spectrum.oriented(data.test_images),
        accuracy=chain.accuracy(model, data.test_images, data.test_labels),
        curve=truncation_curve(spectrum, data.test_images, data.test_labels),
        shared=shared_by_classes(spectrum),
        order=order,
    )


@dataclass(frozen=True, repr=False)
class AttackRate(Reading):
    """Effect of a mask on the images of all other classes.

    Attributes:
        targeted: share of them that the model classifies as the class of the mask.
        fooled: share of them that the model classifies as any class but their own.
    """

    targeted: float
    fooled: float

    def facts(self) -> list[Fact]:
        return [
            ("taken for the class of the mask", Percent(self.targeted)),
            ("taken for another class than their own", Percent(self.fooled)),
        ]


@checked
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
    positive = spectrum.positive()
    start = positive.vectors.sum(-1)
    mask = ((positive.values**2 * start)[..., None] * positive.vectors).sum(-2)
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
) -> AttackRate:
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
    images = (x[others] + (norm * mask / mask.norm()).to(x)).clamp(0, 1)
    answers = predict(model, images).argmax(-1).to(labels.device)
    return AttackRate(
        targeted=float((answers == label).double().mean()),
        fooled=float((answers != labels[others]).double().mean()),
    )


@detached
def read_explanation(
    model: TensorChain,
    data: ImageData,
    image: int | str | Float[Tensor, " n_in"] = 0,
    n_classes: Count = 3,
    k: Count = 5,
) -> Explanation:
    """Split the highest logits of an image into the activations of eigenvectors.

    Args:
        model: a classifier of one layer.
        data: images that the model was trained on.
        image: number of a test image, the file of a picture (see
            `bilens.data.pictures.read_picture`), or the pixels of one.
        n_classes: number of logits, the highest first.
        k: number of eigenvectors of each.

    Raises:
        NotBilinearError: the model has several layers.
        BilensError: the model differs from its tensor.
    """
    if isinstance(image, int):
        image = data.test_images[check_index("image", image, len(data.test_images))]
    elif isinstance(image, str):
        image = read_picture(image, data)
    spectrum = class_spectra(model)
    chain.check_reproduces(model, chain.input_tensors(model), data)
    split = explain(spectrum, image.to(spectrum.vectors.device), n_classes, k)
    return replace(split, shape=data.shape, class_names=data.class_names)
