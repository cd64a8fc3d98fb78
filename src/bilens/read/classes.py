"""What readings of classifiers take: a classifier, and spectra of its logits."""

from bilens.errors import BilensError
from bilens.nn import ImageClassifier
from bilens.tensor import Spectrum
from bilens.tensor.exact import exact

__all__ = ["check_classes", "check_classifier"]


@exact
def check_classifier(model: ImageClassifier) -> None:
    """Raise BilensError unless a model is a classifier of bilens."""
    if not isinstance(model, ImageClassifier):
        raise BilensError(
            f"model is {type(model).__name__}, expected an ImageClassifier of bilens. Layers of a "
            "module of your own are read as tensors: BilinearTensor(left, right, out)."
        )


@exact
def check_classes(spectrum: Spectrum) -> None:
    """Raise BilensError unless a spectrum is batched over the classes."""
    if len(spectrum.batch_shape) != 1:
        raise BilensError(
            f"spectrum has batch shape {tuple(spectrum.batch_shape)}, expected one axis, the "
            "classes: class_spectra(model)"
        )
