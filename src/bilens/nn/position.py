"""Rotary positions: queries and keys turned by angles that grow with the position."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError

PositionName = Literal["rotary", "learned", "shortformer", "none"]
"""Kinds of positions by name.

- rotary turns queries and keys.
- learned adds a vector to the embedding.
- shortformer adds a vector only to the inputs of queries and keys, so that values and MLPs do not
  depend on positions (Press et al. 2021)."""


def rotation(
    positions: Int[Tensor, "*batch time"], width: int, base: float, like: Tensor
) -> tuple[Float[Tensor, "*batch time half"], Float[Tensor, "*batch time half"]]:
    """Cosines and sines of position * base^(-2 i / width), from float32 to the dtype of `like`.

    The slowest of the `width` coordinates of a head, an even number, turn by about 1 / base a
    position. An odd width is a BilensError.

    Source: Su et al. 2021, section 3.2.
    """
    if width % 2:
        raise BilensError(f"width={width}: rotary positions need heads of even width")
    speeds = 1 / base ** (torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions[..., None].float() * speeds
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(
    x: Float[Tensor, "batch heads time width"],
    rope: tuple[Float[Tensor, "_ time half"], Float[Tensor, "_ time half"]],
) -> Float[Tensor, "batch heads time width"]:
    """Turn each pair of coordinates (i, i + width/2) by its angle, alike in all heads."""
    cos, sin = (part[..., None, :, :] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
