"""Which inputs an eigenvector reacts to most."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor import Spectrum

__all__ = ["top_inputs"]


def top_inputs(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], n: int = 3, at_once: int = 1024
) -> Int[Tensor, "*batch k n"]:
    """The `n` inputs of largest |activation| for every eigenvector, the strongest first.

    Samples pass in blocks of `at_once` and only the best so far are kept, so any number of them
    fits.

    Returns:
        Indices into `x`.

    Raises:
        BilensError: there are fewer than `n` samples.
    """
    if not 1 <= n <= len(x):
        raise BilensError(f"n={n}, expected 1 to {len(x)}, the number of samples in x")
    best = spectrum.values.new_empty(0, *spectrum.values.shape)
    where = torch.empty(best.shape, dtype=torch.long, device=best.device)
    for start in range(0, len(x), at_once):
        strength = spectrum.overlaps(x[start : start + at_once]).abs()
        numbers = torch.arange(start, start + len(strength), device=best.device)
        numbers = numbers.reshape(-1, *[1] * (strength.ndim - 1)).expand_as(strength)
        best, where = torch.cat([best, strength]), torch.cat([where, numbers])
        best, kept = best.topk(min(n, len(best)), dim=0)
        where = where.gather(0, kept)
    return where.movedim(0, -1)
