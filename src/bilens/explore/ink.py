"""Which image a screen looks at, as a short text: one of the test set, or a drawing."""

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
from bilens.errors import BilensError

__all__ = [
    "drawn_input",
    "pack_drawing",
    "read_data_address",
    "read_picture",
    "test_number",
    "unpack_input",
]

TEST, DRAWN = "test-", "drawn-"

LARGEST = 4096
"""Pixels of a side of a picture that is read."""


def pack_drawing(x: Float[Tensor, " pixels"]) -> str:
    """A drawing in 255 levels of grey, compressed."""
    levels = (255 * x.clamp(0, 1)).round().byte().cpu().numpy()
    return DRAWN + base64.urlsafe_b64encode(zlib.compress(levels.tobytes(), 9)).decode().rstrip("=")


def drawn_input(picture: Image.Image, data: ImageData) -> str:
    """A picture as an input: framed as the images of the data set are.

    Raises:
        BilensError: nothing is drawn on it.
    """
    return pack_drawing(fit_drawing(ink_of(picture), data))


def test_number(text: str) -> int | None:
    """The number of the test image that a text stands for, if it is one."""
    figures = text.removeprefix(TEST)
    is_one = text.startswith(TEST) and figures.isascii() and figures.isdigit() and len(figures) < 10
    return int(figures) if is_one else None


def unpack_input(text: str, data: ImageData) -> Float[Tensor, " pixels"]:
    """The image that a text stands for.

    Raises:
        BilensError: it stands for none of this data set.
    """
    number = test_number(text)
    if number is not None and number < len(data.test_images):
        return data.test_images[number]
    if text.startswith(DRAWN):
        packed = text.removeprefix(DRAWN)
        try:
            raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
            # Never more than an image, whatever the address claims to hold.
            levels = zlib.decompressobj().decompress(raw, data.n_inputs + 1)
        except (binascii.Error, ValueError, zlib.error):
            levels = b""
        if len(levels) == data.n_inputs:
            return torch.from_numpy(np.frombuffer(levels, np.uint8) / np.float32(255))
    raise BilensError(
        f"input={text[:40]!r}: expected {TEST}0 to {TEST}{len(data.test_images) - 1}, or a drawing "
        f"of {data.n_inputs} pixels"
    )


def read_data_address(text: str) -> Image.Image:
    """The picture in a data address, as a canvas gives it.

    Raises:
        BilensError: there is none in it.
    """
    _, _, packed = str(text).partition(",")
    try:
        return read_picture(base64.b64decode(packed))
    except binascii.Error as error:
        raise BilensError("The drawing is no picture that can be read; draw again") from error


def read_picture(content: bytes) -> Image.Image:
    """The picture in a file that somebody handed over.

    Raises:
        BilensError: it is none, or too large.
    """
    try:
        picture = Image.open(io.BytesIO(content))
        # The size stands in the file's head: what is too large is never unpacked.
        if max(picture.size) > LARGEST:
            raise BilensError(
                f"The picture has {picture.width} x {picture.height} pixels; expected up to "
                f"{LARGEST} on a side"
            )
        picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, BilensError):
            raise
        raise BilensError(
            "The file is no picture that can be read; expected PNG or JPEG"
        ) from error
    return picture
