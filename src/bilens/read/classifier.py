"""Everything that a single-layer image classifier's weights say about its classes."""

from dataclasses import dataclass
from typing import Any

import torch

from bilens.data import ImageData
from bilens.nn import ImageClassifier
from bilens.read.truncation import TruncationCurve, truncation_curve
from bilens.tensor import Spectrum

__all__ = ["ClassifierReading", "read_classifier"]


@dataclass(frozen=True, eq=False)
class ClassifierReading:
    """The spectra of a classifier's logits, and what they do on a test set.

    Attributes:
        model: the classifier.
        data: the data it is measured on.
        spectrum: all eigenvectors in pixel space, batched over the classes, oriented by the test
            images.
        accuracy: of the model on the test images.
        curve: accuracy against the number of eigenvectors.
    """

    model: ImageClassifier
    data: ImageData
    spectrum: Spectrum
    accuracy: float
    curve: TruncationCurve

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        rank = self.spectrum.effective_rank()
        return {
            "data": self.data.name,
            "accuracy": self.accuracy,
            "accuracy_by_eigenvectors": list(self.curve.accuracy),
            "effective_rank_by_class": dict(zip(self.data.class_names, rank.tolist(), strict=True)),
            "effective_rank": float(rank.mean()),
        }


@torch.no_grad()
def read_classifier(model: ImageClassifier, data: ImageData) -> ClassifierReading:
    """Decompose each logit of a single-layer classifier into its eigenvectors.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: the data does not fit the model.
    """
    spectrum = model.tensor().along(class_=range(model.config.n_classes)).eig()
    return ClassifierReading(
        model=model,
        data=data,
        spectrum=spectrum.oriented(data.test_images),
        accuracy=model.accuracy(data.test_images, data.test_labels),
        curve=truncation_curve(spectrum, data.test_images, data.test_labels),
    )
