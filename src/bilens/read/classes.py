"""What readings of a classifier's logits take."""

from bilens.errors import BilensError
from bilens.tensor import Spectrum

__all__ = ["check_classes"]


def check_classes(spectrum: Spectrum) -> None:
    """Raise BilensError unless a spectrum is batched over the classes."""
    if len(spectrum.batch_shape) != 1:
        raise BilensError(
            f"spectrum has batch shape {tuple(spectrum.batch_shape)}, expected one axis, the "
            "classes: class_spectra(model)"
        )
