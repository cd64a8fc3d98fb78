"""Which inputs an eigenvector reacts to most."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_count, check_finite
from bilens.tensor import Spectrum
from bilens.tensor.exact import exact

__all__ = ["top_inputs"]


@exact
def top_inputs(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], k: int = 3, batch_size: int = 1024
) -> Int[Tensor, "*batch eigenvectors k"]:
    """The k inputs of largest |activation| for every eigenvector, the strongest first.

    Samples pass in blocks of `batch_size` and only the best so far are kept, so any number of them
    fits.

    Returns:
        Indices into `x`.

    Raises:
        BilensError: there are fewer than k samples, or one is not finite.
    """
    check_count("k", k, len(x), "the number of samples in x")
    check_count("batch_size", batch_size)
    check_finite(x=x)
    best = spectrum.values.new_empty(0, *spectrum.values.shape)
    where = torch.empty(best.shape, dtype=torch.long, device=best.device)
    for start in range(0, len(x), batch_size):
        strength = spectrum.overlaps(x[start : start + batch_size]).abs()
        numbers = torch.arange(start, start + len(strength), device=best.device)
        numbers = numbers.reshape(-1, *[1] * (strength.ndim - 1)).expand_as(strength)
        best, where = torch.cat([best, strength]), torch.cat([where, numbers])
        best, kept = best.topk(min(k, len(best)), dim=0)
        where = where.gather(0, kept)
    return where.movedim(0, -1)
