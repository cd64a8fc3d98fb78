"""Which image a screen explains, as a short text: one of the test set, or a drawing."""

import base64
import binascii
import io
import zlib

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from bilens.data import ImageData, fit_drawing, ink_of
from bilens.explore.state_checks import StateError

__all__ = ["is_test_image", "pack_drawing", "read_sketch", "unpack_input"]

TEST, DRAWN, SKETCH = "test-", "drawn-", "data:image/png;base64,"

LARGEST = 1024
"""Pixels of a side of a drawing that is read."""


def pack_drawing(x: Float[Tensor, " pixels"]) -> str:
    """A drawing in 255 levels of grey, compressed."""
    levels = (255 * x.clamp(0, 1)).round().byte().cpu().numpy()
    return DRAWN + base64.urlsafe_b64encode(zlib.compress(levels.tobytes(), 9)).decode().rstrip("=")


def read_sketch(text: str, data: ImageData) -> str:
    """An input from what the sketchpad hands over: a drawing as a picture, or a text as here.

    A drawing is framed as the images of the data set are; an empty sheet is an empty image.

    Raises:
        StateError: the picture cannot be read.
    """
    if not text.startswith(SKETCH):
        return text
    ink = ink_of(_read_picture(text.removeprefix(SKETCH)))
    return pack_drawing(fit_drawing(ink, data) if ink.max() > 0.05 else torch.zeros(data.n_inputs))


def is_test_image(text: str) -> bool:
    """Whether a text that stands for an image stands for one of the test set."""
    return text.startswith(TEST)


def unpack_input(text: str, data: ImageData) -> Float[Tensor, " pixels"]:
    """The image that a text stands for.

    Raises:
        StateError: it does not stand for any of this data set.
    """
    if text.startswith(TEST):
        digits = text.removeprefix(TEST)
        if digits.isascii() and digits.isdigit() and len(digits) < 10:
            number = int(digits)
            if number < len(data.test_images):
                return data.test_images[number]
    elif text.startswith(DRAWN):
        packed = text.removeprefix(DRAWN)
        try:
            raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
            # Never more than an image, whatever the address claims to hold.
            levels = zlib.decompressobj().decompress(raw, data.n_inputs + 1)
        except (binascii.Error, ValueError, zlib.error):
            levels = b""
        if len(levels) == data.n_inputs:
            return torch.from_numpy(np.frombuffer(levels, np.uint8) / np.float32(255))
    raise StateError(
        "input",
        f"{text[:40]!r} is neither a test image from 0 to {len(data.test_images) - 1} nor a "
        f"drawing of {data.n_inputs} pixels",
    )


def _read_picture(packed: str) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(packed)), formats=["PNG"])
        # The size stands in the file's head: what is too large is never unpacked.
        if max(picture.size) > LARGEST:
            raise ValueError("too large")
        picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise StateError(
            "input", f"the drawing is not a picture of up to {LARGEST} pixels on a side; draw again"
        ) from error
    return picture
