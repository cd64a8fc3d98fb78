"""Eigenvectors of a single-layer classifier's logits, and the accuracy that few of them reach."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_count, check_finite, check_labels, full_precision
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.lazy_imports import go, lazy_import, pd
from bilens.progress import progress_bar
from bilens.read.chain import (
    ACCURACY_FORMATS,
    accuracy,
    accuracy_frame,
    check_reproduces,
    input_tensors,
    open_layer,
    size_facts,
)
from bilens.read.shared import SharedFeatures, check_classes, shared_by_classes
from bilens.reading import Fact, Percent, Reading, Section
from bilens.registry import reading
from bilens.tensor import Spectrum, TensorChain, TensorSVD

if TYPE_CHECKING:
    from bilens.read.figures import classifier as pages
else:  # plotly takes a second to import, and only pages use it.
    pages = lazy_import("bilens.read.figures.classifier")

Basis = Literal["model", "pixels"]
"""Space in which eigenvectors are orthonormal: see `spectra`."""

Order = Literal["eigenvalue", "activation"]
"""Order of eigenvectors on a page: by eigenvalue, or by mean activation over the test images."""

STEPS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Numbers of eigenvectors in tables."""

BLOCK = 512
"""Samples in memory together, each with a number for every class and rank."""


@dataclass(frozen=True)
class TruncationCurve:
    """Accuracy with the first k eigenvectors of each class, or components of a layer, for every k.

    Attributes:
        accuracy: from 0 to 1, for k = 1, 2, ...
        full: accuracy with all of them, which is the model's.
    """

    accuracy: tuple[float, ...]
    full: float

    def frame(self) -> "pd.DataFrame":
        """Return a row for some k up to all of them; see `accuracy_frame`."""
        total = len(self.accuracy)
        steps = [k for k in STEPS if k < total] + [total]
        rows = [(k, self.accuracy[k - 1]) for k in steps]
        return accuracy_frame("eigenvectors per class", rows, self.full)

    def drop(self, k: int) -> float:
        """Return the accuracy lost by truncating to the first k."""
        check_count("k", k, len(self.accuracy))
        return self.full - self.accuracy[k - 1]

    def needed(self, drop: float) -> int:
        """Return the smallest k from which on the loss is at most `drop`."""
        insufficient = [k for k in range(1, len(self.accuracy) + 1) if self.drop(k) > drop]
        return insufficient[-1] + 1 if insufficient else 1


@full_precision
def truncation_curve(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], labels: Int[Tensor, " samples"]
) -> TruncationCurve:
    """Compute the accuracy with the first 1, 2, ... eigenvectors of each class.

    Eigenvectors count in the order of the spectrum.

    Raises:
        BilensError: the spectrum is not a batch over classes, the samples are empty, or a label is
            not a class.

    Source:
        Pearce et al. 2024, figure 3.
    """
    check_classes(spectrum)
    return _curve(lambda rows: spectrum.activations(rows).cumsum(-1).mT, x, labels)


@full_precision
def bottleneck_curve(
    svd: TensorSVD,
    readout: Float[Tensor, "classes n_out"],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """Compute the accuracy with the first 1, 2, ... components of a layer, in one pass.

    For each k this is the accuracy of readout(svd.truncate(k)(x)), which as a tensor is
    `layer.change_basis(outputs=readout @ svd.truncate(k).projector())`. The readout is the linear
    map from the layer's outputs to the logits.

    Raises:
        BilensError: the readout does not fit the layer, the samples are empty, or a label is not a
            class.

    Source:
        Pearce & Dooms 2024, "SVD on the bilinear tensor".
    """
    if readout.shape[1] != svd.outputs.shape[1]:
        raise BilensError(
            f"readout has shape {tuple(readout.shape)}; expected (classes, "
            f"{svd.outputs.shape[1]}), the outputs of the layer"
        )
    component_logits = svd.values[:, None] * (svd.outputs @ readout.to(svd.outputs).T)

    def logits(rows: Tensor) -> Tensor:
        return (svd.components(rows)[..., None] * component_logits).cumsum(1)

    return _curve(logits, x, labels)


def _curve(
    logits_by_rank: Callable[[Tensor], Float[Tensor, "block ranks classes"]],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """Compute the accuracy at each rank, block by block."""
    counts = []
    with progress_bar() as bar:
        task = bar.add_task("accuracy by rank", total=len(x), note="")
        for rows, row_labels in zip(x.split(BLOCK), labels.split(BLOCK), strict=True):
            logits = logits_by_rank(rows)
            check_finite(logits=logits)
            check_labels(row_labels, logits.shape[-1])
            counts.append((logits.argmax(-1) == row_labels.to(logits.device)[:, None]).sum(0))
            bar.advance(task, len(rows))
    shares = (torch.stack(counts).sum(0).double() / len(x)).tolist()
    return TruncationCurve(tuple(shares), shares[-1])


@full_precision
def top_inputs(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], k: int = 3
) -> Int[Tensor, "*batch eigenvectors k"]:
    """Return the indices of the k inputs of largest |activation| for every eigenvector.

    The strongest comes first. Samples pass in blocks, so any number of them fits in memory.

    Raises:
        BilensError: the samples are fewer than k, or one is not finite.
    """
    check_count("k", k, len(x), "the number of samples in x")
    check_finite(x=x)
    best = spectrum.values.new_empty(0, *spectrum.values.shape)
    indices = torch.empty(best.shape, dtype=torch.long, device=best.device)
    for start in range(0, len(x), BLOCK):
        strength = spectrum.overlaps(x[start : start + BLOCK]).abs()
        numbers = torch.arange(start, start + len(strength), device=best.device)
        numbers = numbers.reshape(-1, *[1] * (strength.ndim - 1)).expand_as(strength)
        # Only the best k so far are carried from block to block.
        best, indices = torch.cat([best, strength]), torch.cat([indices, numbers])
        best, order = best.topk(min(k, len(best)), dim=0)
        indices = indices.gather(0, order)
    return indices.movedim(0, -1)


@full_precision
@torch.no_grad()
def spectra(
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
        BilensError: the directions do not fit the logits, or the basis is unknown.

    Source:
        Pearce et al. 2024, sections 4.1 and 4.2 and figure 4.
    """
    tensor, embedding = open_layer(model)
    if directions is None:
        directions = torch.eye(tensor.n_out, device=tensor.out.device)
    directions = directions.to(tensor.out)
    if basis == "pixels":
        return tensor.change_basis(inputs=embedding).interaction(directions).eigh()
    spectrum = tensor.interaction(directions).eigh()
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
    formats: ClassVar[dict[str, str]] = ACCURACY_FORMATS

    def facts(self) -> list[Fact]:
        """Return the data, the accuracy, sizes and the eigenvectors."""
        accuracies = self.curve.accuracy
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            (
                "with 10 eigenvectors a class",
                Percent(accuracies[min(10, len(accuracies)) - 1]),
            ),
            *size_facts(self.model),
            *self.spectrum.facts(),
        ]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each eigenvector of each class; the class is its form."""
        frame = self.spectrum.frame()
        return frame.assign(form=[self.data.class_names[i] for i in frame["form"]])

    def tables(self) -> "dict[str, pd.DataFrame]":
        """Return the accuracy with few eigenvectors."""
        return {"few eigenvectors": self.curve.frame()}

    def figures(self) -> "dict[str, go.Figure]":
        """Draw every figure of its sections."""
        return pages.classifier_figures(self)

    def sections(self) -> list[Section]:
        """Return the sections of a report."""
        return pages.classifier_sections(self)

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        rank = self.spectrum.effective_rank()
        return {
            "data": self.data.name,
            "accuracy": self.accuracy,
            "accuracy_by_eigenvectors": list(self.curve.accuracy),
            "effective_rank_by_class": dict(zip(self.data.class_names, rank.tolist(), strict=True)),
            "effective_rank": float(rank.mean()),
            "shared_features": len(self.shared.features),
            "shared_weight": self.shared.weight,
        }


@reading("eigenvectors")
@full_precision
@torch.no_grad()
def read_classifier(
    model: TensorChain, data: ImageData, basis: Basis = "model", order: Order = "eigenvalue"
) -> ClassifierReading:
    """Decompose each logit of a single-layer classifier into its eigenvectors.

    The data is moved to the device of the model, or to the CPU if that device has no float64. The
    basis is that of `spectra`.

    Args:
        model: the classifier.
        data: its images.
        basis: space in which eigenvectors are orthonormal: after the embedding, or pixels.
        order: order of the eigenvectors on a page.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: the data does not fit the model, or the model differs from its tensor.
    """
    spectrum = spectra(model, basis=basis)
    data = data.to(spectrum.values.device)
    check_reproduces(model, input_tensors(model), data.test_images)
    return ClassifierReading(
        model=model,
        data=data,
        spectrum=spectrum.oriented(data.test_images),
        accuracy=accuracy(model, data.test_images, data.test_labels),
        curve=truncation_curve(spectrum, data.test_images, data.test_labels),
        shared=shared_by_classes(spectrum),
        order=order,
    )
