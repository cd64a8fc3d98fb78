"""How many singular components of a layer a classifier needs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.read.truncation import TruncationCurve
from bilens.tensor import TensorSVD

__all__ = ["bottleneck_curve"]


def bottleneck_curve(
    svd: TensorSVD,
    readout: Float[Tensor, "classes n_out"],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
    at_once: int = 512,
) -> TruncationCurve:
    """Classify with the first 1, 2, ... components of a layer, in one pass over the samples.

    For each k this is the accuracy of readout(svd.truncate(k)(x)), which as a tensor is
    `layer.change_basis(outputs=readout @ svd.truncate(k).projector())`.

    Args:
        svd: of the layer, whole or cut already.
        readout: the linear map from the layer's outputs to the logits.
        x: inputs.
        labels: their classes.
        at_once: samples in memory together, with a number for each component and class.

    Raises:
        BilensError: the readout does not fit the layer, or there are no samples.

    Source:
        Pearce & Dooms 2024, "SVD on the bilinear tensor".
    """
    if readout.ndim != 2 or readout.shape[1] != svd.outputs.shape[1]:
        raise BilensError(
            f"readout has shape {tuple(readout.shape)}; expected (classes, "
            f"{svd.outputs.shape[1]}), the outputs of the layer"
        )
    if len(x) == 0 or len(x) != len(labels):
        raise BilensError(f"x has {len(x)} samples and labels {len(labels)}; expected equally many")
    right = torch.zeros(len(svd), dtype=torch.long, device=x.device)
    read = svd.values[:, None] * (svd.outputs @ readout.T)
    for some, wanted in zip(torch.split(x, at_once), torch.split(labels, at_once), strict=True):
        logits = (svd.components(some)[..., None] * read).cumsum(1)
        right += (logits.argmax(-1) == wanted[:, None]).sum(0)
    accuracy = (right.double() / len(x)).tolist()
    return TruncationCurve(tuple(accuracy), accuracy[-1])
