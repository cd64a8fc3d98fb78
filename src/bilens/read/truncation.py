"""How many eigenvectors, or singular components of a layer, a classifier needs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_count, check_finite, check_labels, full_precision
from bilens.errors import BilensError
from bilens.progress import progress_bar
from bilens.read.classes import check_classes
from bilens.tensor import Spectrum, TensorSVD

__all__ = ["TruncationCurve", "bottleneck_curve", "truncation_curve"]

BLOCK = 512
"""Samples in memory together, with a number for each class and each that is kept."""


@dataclass(frozen=True)
class TruncationCurve:
    """Accuracy with the first k eigenvectors of each class, or components of a layer, for every k.

    From 0 to 1, for k = 1, 2, ...; with all of them it is `full`, the model's.
    """

    accuracy: tuple[float, ...]
    full: float

    def drop(self, k: int) -> float:
        """Accuracy lost by keeping the first k."""
        check_count("k", k, len(self.accuracy))
        return self.full - self.accuracy[k - 1]

    def needed(self, drop: float) -> int:
        """The smallest k from which on the loss stays at most `drop`."""
        bad = [k for k in range(1, len(self.accuracy) + 1) if self.drop(k) > drop]
        return bad[-1] + 1 if bad else 1


@full_precision
def truncation_curve(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], labels: Int[Tensor, " samples"]
) -> TruncationCurve:
    """Classify with the first 1, 2, ... eigenvectors of each class, in the spectrum's order.

    Raises:
        BilensError: the spectrum is not a batch over classes, there are no samples, or a label is
            not a class.

    Source:
        Pearce et al. 2024, figure 3.
    """
    check_classes(spectrum)
    return _count_right(lambda some: spectrum.activations(some).cumsum(-1).mT, x, labels)


@full_precision
def bottleneck_curve(
    svd: TensorSVD,
    readout: Float[Tensor, "classes n_out"],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """Classify with the first 1, 2, ... components of a layer, in one pass over the samples.

    For each k this is the accuracy of readout(svd.truncate(k)(x)), which as a tensor is
    `layer.change_basis(outputs=readout @ svd.truncate(k).projector())`.

    The readout is the linear map from the layer's outputs to the logits.

    Raises:
        BilensError: the readout does not fit the layer, there are no samples, or a label is not a
            class.

    Source:
        Pearce & Dooms 2024, "SVD on the bilinear tensor".
    """
    if readout.shape[1] != svd.outputs.shape[1]:
        raise BilensError(
            f"readout has shape {tuple(readout.shape)}; expected (classes, "
            f"{svd.outputs.shape[1]}), the outputs of the layer"
        )
    read = svd.values[:, None] * (svd.outputs @ readout.to(svd.outputs).T)
    return _count_right(lambda some: (svd.components(some)[..., None] * read).cumsum(1), x, labels)


def _count_right(
    logits: Callable[[Tensor], Tensor],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """The curve of logits with an axis for how many are kept before that of the classes."""
    counts = []
    with progress_bar() as bar:
        task = bar.add_task("accuracy by number kept", total=len(x), note="")
        for some, wanted in zip(x.split(BLOCK), labels.split(BLOCK), strict=True):
            found = logits(some)
            check_finite(logits=found)
            check_labels(wanted, found.shape[-1])
            counts.append((found.argmax(-1) == wanted.to(found.device)[:, None]).sum(0))
            bar.advance(task, len(some))
    accuracy = (torch.stack(counts).sum(0).double() / len(x)).tolist()
    return TruncationCurve(tuple(accuracy), accuracy[-1])
