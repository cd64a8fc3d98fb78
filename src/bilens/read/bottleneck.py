"""How many singular components of a layer a classifier needs."""

from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.read.truncation import TruncationCurve, count_right
from bilens.tensor import TensorSVD
from bilens.tensor.exact import exact

__all__ = ["bottleneck_curve"]


@exact
def bottleneck_curve(
    svd: TensorSVD,
    readout: Float[Tensor, "classes n_out"],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
    batch_size: int = 512,
) -> TruncationCurve:
    """Classify with the first 1, 2, ... components of a layer, in one pass over the samples.

    For each k this is the accuracy of readout(svd.truncate(k)(x)), which as a tensor is
    `layer.change_basis(outputs=readout @ svd.truncate(k).projector())`.

    Args:
        svd: of the layer, whole or cut already.
        readout: the linear map from the layer's outputs to the logits.
        x: inputs.
        labels: their classes.
        batch_size: samples in memory together, with a number for each component and class.

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
    return count_right(
        lambda some: (svd.components(some)[..., None] * read).cumsum(1), x, labels, batch_size
    )
