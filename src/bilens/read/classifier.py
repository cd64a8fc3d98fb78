"""Everything that a single-layer image classifier's weights say about its classes."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import full_precision
from bilens.data import ImageData
from bilens.lazy_imports import pd
from bilens.nn import ImageClassifier
from bilens.read.shared import SharedFeatures, shared_by_classes
from bilens.read.truncation import TruncationCurve, truncation_curve
from bilens.reading import Fact, Percent, Reading
from bilens.tensor import Spectrum

__all__ = ["Basis", "ClassifierReading", "class_spectra", "logit_spectra", "read_classifier"]

Basis = Literal["model", "pixels"]
"""Where eigenvectors are orthonormal; see `class_spectra`."""


@dataclass(frozen=True, eq=False, repr=False)
class ClassifierReading(Reading):
    """The spectra of a classifier's logits, and what they do on a test set.

    Attributes:
        spectrum: all eigenvectors in pixel space, batched over the classes, oriented by the test
            images.
        accuracy: of the model on the test images.
        curve: accuracy against the number of eigenvectors.
        shared: features that the first eigenvectors of more than one class have in common.
    """

    model: ImageClassifier
    data: ImageData
    spectrum: Spectrum
    accuracy: float
    curve: TruncationCurve
    shared: SharedFeatures

    axes: ClassVar[dict[str, str]] = Spectrum.axes

    def facts(self) -> list[Fact]:
        """Return data, accuracy, sizes and the eigenvectors."""
        accuracies = self.curve.accuracy
        return [
            ("data", self.data.name),
            ("test accuracy", Percent(self.accuracy)),
            (
                "with 10 eigenvectors a class",
                Percent(accuracies[min(10, len(accuracies)) - 1]),
            ),
            ("width", self.model.config.d_model),
            ("parameters", sum(p.numel() for p in self.model.parameters())),
            *self.spectrum.facts(),
        ]

    def frame(self) -> "pd.DataFrame":
        """A row for each eigenvector of each class, which is its form."""
        frame = self.spectrum.frame()
        return frame.assign(form=[self.data.class_names[i] for i in frame["form"]])

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
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


@full_precision
@torch.no_grad()
def class_spectra(model: ImageClassifier, basis: Basis = "model") -> Spectrum:
    """All eigenvectors of every logit, as pictures: a spectrum in pixels, batched over the classes.

    The basis is where the eigenvectors are orthonormal. "model" decomposes behind the embedding and
    then reads the eigenvectors through it, as the papers do; "pixels" decomposes the whole map from
    pixels to logits, as `model.tensor()` gives it. Either is exact, with activations that add up to
    the logits; cut short they differ.

    Raises:
        NotBilinearError: the model is not one tensor.

    Source:
        Pearce et al. 2024, section 4.2 and figure 4.
    """
    each = torch.eye(model.config.n_classes, device=model.embed.weight.device)
    return logit_spectra(model, each, basis)


@full_precision
@torch.no_grad()
def logit_spectra(
    model: ImageClassifier, directions: Float[Tensor, "*batch n_classes"], basis: Basis = "model"
) -> Spectrum:
    """All eigenvectors along directions in the logits, such as the logit of 3 minus that of 8.

    The basis is that of `class_spectra`.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: the directions do not fit the logits, there is no such basis, or the model is
            not a classifier of bilens.

    Source:
        Pearce et al. 2024, section 4.1.
    """
    model.require_single_layer()
    model = model.readable()
    directions = directions.to(model.embed.weight)
    if basis == "pixels":
        return model.tensor().interaction(directions).eigh()
    spectrum = model.layer_tensors()[0].interaction(directions).eigh()
    return spectrum.pullback(model.embed.weight, model.embed.bias)


@full_precision
@torch.no_grad()
def read_classifier(
    model: ImageClassifier, data: ImageData, basis: Basis = "model"
) -> ClassifierReading:
    """Decompose each logit of a single-layer classifier into its eigenvectors.

    On the device of the model, which the data is moved to, or on the CPU if that has no float64.
    The basis is that of `class_spectra`.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: the data does not fit the model, or there is no such basis.
    """
    model = model.readable()
    data, spectrum = data.to(model.device), class_spectra(model, basis)
    return ClassifierReading(
        model=model,
        data=data,
        spectrum=spectrum.oriented(data.test_images),
        accuracy=model.accuracy(data.test_images, data.test_labels),
        curve=truncation_curve(spectrum, data.test_images, data.test_labels),
        shared=shared_by_classes(spectrum),
    )
