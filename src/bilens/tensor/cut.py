"""A deep model on few directions between its layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor

__all__ = ["Cut", "check_ranks"]


@dataclass(frozen=True, eq=False)
class Cut:
    """A model cut to some directions of each bond.

    z_0 = read x,  z_l = core_l(z_(l-1)),  and the last core gives the outputs.

    Each output of a core is an interaction matrix of r x r numbers, and neighbours share the
    coordinates z.

    Attributes:
        read: one row for each direction of the input.
        cores: the layers on the coordinates, without a constant: it is one of their directions.
        certificate: |T - T_cut| / |T| is at most this; see `Bonds.certificate`.
        constant: the last input coordinate is the constant 1.
    """

    read: Float64[Tensor, "k n_in"]
    cores: tuple[BilinearTensor, ...]
    certificate: float
    constant: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """Directions kept of each bond, the input's first."""
        return tuple(core.n_in for core in self.cores)

    def tensors(self) -> list[BilinearTensor]:
        """The cut model as an ordinary chain, from its input on."""
        first = replace(self.cores[0].change_basis(inputs=self.read), constant=self.constant)
        return [first, *self.cores[1:]]


def check_ranks(ranks: int | Sequence[int], available: Sequence[int]) -> tuple[int, ...]:
    """One number of directions for each bond.

    Raises:
        BilensError: one is below 1 or above what its bond has, or there are too few or too many.
    """
    if isinstance(ranks, int):
        if ranks < 1:
            raise BilensError(f"ranks={ranks}, expected at least 1 direction for each bond")
        return tuple(min(ranks, most) for most in available)
    if len(ranks) != len(available):
        raise BilensError(
            f"ranks has {len(ranks)} numbers; expected {len(available)}, one for each bond"
        )
    for i, (k, most) in enumerate(zip(ranks, available, strict=True)):
        if not 1 <= k <= most:
            raise BilensError(f"ranks[{i}]={k}, expected 1 to {most}, the directions of that bond")
    return tuple(ranks)
