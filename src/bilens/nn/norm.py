"""Normalisation, or none."""

from typing import Literal

from torch import nn

from bilens.errors import BilensError

__all__ = ["NormName", "make_norm"]

NormName = Literal["none", "rms"]


def make_norm(name: NormName, width: int) -> nn.Module:
    """A norm by its name: none, or rms for RMSNorm with a gain.

    Raises:
        BilensError: the name is another.
    """
    if name == "none":
        return nn.Identity()
    if name == "rms":
        return nn.RMSNorm(width)
    raise BilensError(f"norm={name!r}, expected none or rms")
