"""An image as an input of a reading: drawn, a picture of the visitor's, or one of the test set."""

import base64
import binascii
import io
import zlib

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from bilens.data import ImageData, fit_drawing
from bilens.data.pictures import ink_of
from bilens.errors import BilensError
from bilens.figures.canvas import as_image, data_address, grey

TEST, DRAWN = "test-", "drawn-"
SIDE = 1024
"""Pixels of the longest side of a drawing that is taken."""


def pack_drawing(x: Float[Tensor, " pixels"]) -> str:
    """Return a drawing in 255 levels of grey, compressed."""
    levels = (255 * x.clamp(0, 1)).round().byte().cpu().numpy()
    return DRAWN + base64.urlsafe_b64encode(zlib.compress(levels.tobytes(), 9)).decode().rstrip("=")


def read_sheet(text: str, data: ImageData) -> str:
    """Return the drawing on a sheet, a PNG picture as a data address, as a text for an address.

    A drawing is framed as the images of the data set are; an empty sheet is an empty image.

    Raises:
        BilensError: it is no such picture.
    """
    _, is_picture, encoding = text.partition("data:image/png;base64,")
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(encoding)), formats=["PNG"])
        # The size is in the file's head: a file that is too large is never unpacked.
        if not is_picture or max(picture.size) > SIDE:
            raise ValueError("too large")
        picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BilensError(
            f"image is not a picture of up to {SIDE} pixels on a side; draw again"
        ) from error
    ink = ink_of(picture)
    return pack_drawing(fit_drawing(ink, data) if ink.max() > 0.05 else torch.zeros(data.n_inputs))


def unpack_input(text: str, data: ImageData) -> Float[Tensor, " pixels"]:
    """Return the image of a text.

    Raises:
        BilensError: it is neither a test image nor a drawing of as many pixels.
    """
    if text.startswith(TEST):
        digits = text.removeprefix(TEST)
        if digits.isascii() and digits.isdigit() and len(digits) < 10:
            i = int(digits)
            if i < len(data.test_images):
                return data.test_images[i]
    elif text.startswith(DRAWN):
        code = text.removeprefix(DRAWN)
        try:
            raw = base64.b64decode(code + "=" * (-len(code) % 4), altchars=b"-_", validate=True)
            # Never more than an image, whatever the address claims to hold.
            levels = zlib.decompressobj().decompress(raw, data.n_inputs + 1)
        except (binascii.Error, ValueError, zlib.error):
            levels = b""
        if len(levels) == data.n_inputs:
            return torch.from_numpy(np.frombuffer(levels, np.uint8) / np.float32(255))
    raise BilensError(
        f"image={text[:40]!r} is neither a test image from 0 to {len(data.test_images) - 1} nor a "
        f"drawing of {data.n_inputs} pixels"
    )


def picture_of(text: str, data: ImageData) -> str:
    """Return the image of a text as a picture, a data address."""
    return data_address(grey(as_image(unpack_input(text, data), data.shape)))
