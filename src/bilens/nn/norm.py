"""Normalisation, or none."""

from typing import Literal, get_args

from torch import nn

from bilens.errors import BilensError

__all__ = ["NORMS", "NormName", "make_norm"]

NormName = Literal["none", "rms", "layer"]
"""Norms by their names; only a model without is a polynomial of its input."""
NORMS: tuple[str, ...] = get_args(NormName)


def make_norm(name: NormName, width: int, eps: float | None = None) -> nn.Module:
    """A norm by its name: none, rms (RMSNorm with a gain), layer (LayerNorm with gain and bias).

    Args:
        name: of the norm.
        width: of its input.
        eps: what it adds to the mean square; None for what torch adds.

    Raises:
        BilensError: the name is another.
    """
    match name:
        case "none":
            return nn.Identity()
        case "rms":
            return nn.RMSNorm(width, eps)
        case "layer":
            return nn.LayerNorm(width) if eps is None else nn.LayerNorm(width, eps)
    raise BilensError(f"norm={name!r}, expected one of {', '.join(NORMS)}")
