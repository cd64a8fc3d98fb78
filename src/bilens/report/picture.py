"""Vectors as pictures: red to blue around zero for eigenvectors, grey for inputs."""

import base64
import io
from functools import cache

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from bilens.errors import BilensError
from bilens.report.style import DIVERGING

__all__ = ["as_image", "colour_bar", "colour_bar_html", "diverging", "grey"]

ENLARGED = 112
"""Pixels of a picture's shorter side, at least: browsers blur what they enlarge themselves."""


def _palette() -> Float[np.ndarray, "255 3"]:
    """255 colours, so that zero is exactly the middle one."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in DIVERGING])
    at = np.linspace(-1, 1, len(stops))
    return np.stack([np.interp(np.linspace(-1, 1, 255), at, channel) for channel in stops.T], 1)


PALETTE = _palette()


def as_image(vector: Float[Tensor, " n"], shape: tuple[int, int]) -> Float[np.ndarray, "h w"]:
    """Fold a vector into an image; a constant coordinate at its end is left out.

    Raises:
        BilensError: the vector does not have as many elements as the image has pixels.
    """
    height, width = shape
    values = vector.detach().cpu().double().numpy()
    if len(values) == height * width + 1:
        values = values[:-1]
    if len(values) != height * width:
        raise BilensError(f"A vector of {len(values)} elements is not an image of shape {shape}")
    return values.reshape(shape)


def diverging(image: Float[np.ndarray, "h w"], limit: float | None = None) -> str:
    """A red-blue picture as a data address; `limit`, by default the largest, is full colour."""
    limit = float(np.abs(image).max()) if limit is None else limit
    scaled = np.clip(image / limit, -1, 1) if limit > 0 else np.zeros_like(image)
    return _png(PALETTE[np.rint(127 * scaled).astype(int) + 127].astype(np.uint8))


@cache
def colour_bar() -> str:
    """The colours of `diverging` from negative to positive, as a data address."""
    return _png(PALETTE.round().astype(np.uint8)[None].repeat(ENLARGED, 0))


def colour_bar_html() -> str:
    """A line of HTML that says what the colours of `diverging` mean."""
    return f'<p class="scale">negative <img src="{colour_bar()}" alt=""> positive</p>'


def grey(image: Float[np.ndarray, "h w"]) -> str:
    """An input as a picture, ink on paper, as a data address."""
    return _png(np.rint(255 * (1 - np.clip(image, 0, 1))).astype(np.uint8))


def _png(pixels: np.ndarray) -> str:
    times = max(1, -(-ENLARGED // min(pixels.shape[:2])))
    small = Image.fromarray(pixels).quantize(255)
    buffer = io.BytesIO()
    ImageOps.scale(small, times, Image.Resampling.NEAREST).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
