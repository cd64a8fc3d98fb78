"""How many eigenvectors a classifier needs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.progress import progress_bar
from bilens.tensor import Spectrum

__all__ = ["TruncationCurve", "truncation_curve"]


@dataclass(frozen=True)
class TruncationCurve:
    """Accuracy with the first k eigenvectors of each class, or components of a layer, for every k.

    Attributes:
        accuracy: one number from 0 to 1 for k = 1, 2, ...
        full: accuracy with all of them, which is the model's.
    """

    accuracy: tuple[float, ...]
    full: float

    def drop(self, k: int) -> float:
        """Accuracy lost by keeping the first k."""
        if not 1 <= k <= len(self.accuracy):
            raise BilensError(f"k={k}, expected 1 to {len(self.accuracy)}")
        return self.full - self.accuracy[k - 1]

    def needed(self, drop: float) -> int:
        """The smallest k from which on the loss stays at most `drop`."""
        bad = [k for k in range(1, len(self.accuracy) + 1) if self.drop(k) > drop]
        return bad[-1] + 1 if bad else 1


def truncation_curve(
    spectrum: Spectrum,
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
    at_once: int = 512,
) -> TruncationCurve:
    """Classify with the first 1, 2, ... eigenvectors of each class, in the spectrum's order.

    Args:
        spectrum: all eigenvectors, batched over the classes.
        x: inputs.
        labels: their classes.
        at_once: samples in memory together, with an activation for each class and eigenvector.

    Raises:
        BilensError: the spectrum is not a batch over classes, or there are no samples.

    Source:
        Pearce et al. 2024, figure 3.
    """
    if len(spectrum.batch_shape) != 1:
        raise BilensError(
            f"spectrum has batch shape {tuple(spectrum.batch_shape)}, expected one axis, the "
            "classes: model.tensor().interaction(output=range(n_classes)).eigh()"
        )
    if len(x) == 0 or len(x) != len(labels):
        raise BilensError(f"x has {len(x)} samples and labels {len(labels)}; expected equally many")
    right = torch.zeros(spectrum.k, dtype=torch.long, device=x.device)
    blocks = zip(torch.split(x, at_once), torch.split(labels, at_once), strict=True)
    with progress_bar() as bar:
        task = bar.add_task("accuracy by eigenvectors", total=len(x), note="")
        for some, wanted in blocks:
            logits = spectrum.activations(some).cumsum(-1)
            right += (logits.argmax(1) == wanted[:, None]).sum(0)
            bar.advance(task, len(some))
    accuracy = (right.double() / len(x)).tolist()
    return TruncationCurve(tuple(accuracy), accuracy[-1])
