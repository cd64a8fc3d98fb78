"""Pictures in grey, and drawings scaled and centred as the images of a data set are."""

import struct
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from bilens.checks import checked
from bilens.data.images import ImageData
from bilens.errors import BilensError, DataError
from bilens.files import check_downloaded

BYTE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Modes of Pillow with 8 bits a channel that are read."""
DEEP_MODES = ("I;16", "I;16L", "I;16B", "F")
"""Modes with one channel of more bits that are read."""
BITS, PHOTOMETRIC = 258, 262
"""Tags of TIFF: bits of a channel, and whether 0 is white (0) or black (1)."""
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
UNREADABLE += (Image.DecompressionBombError,)  # type: ignore[assignment]
"""Errors for damaged pictures, besides those of bilens."""


def grey_levels(picture: Image.Image) -> Float[np.ndarray, "height width"]:
    """Return a picture in grey, from 0 (black) to 1 (white), in float32.

    Colours become grey as in ITU-R 601-2. Transparent parts are white paper. Levels of 8 bits are
    divided by 255, those of 12 bits by 4095 and those of 16 bits by 65535; floats are from 0 to 1.

    Raises:
        DataError: the picture is of another mode, has several frames, or shows nothing.
    """
    # The second picture of an MPO, the JPEG of many cameras, is a preview of the first.
    if getattr(picture, "n_frames", 1) > 1 and picture.format != "MPO":
        raise DataError("it has several frames, expected one")
    tags = getattr(picture, "tag_v2", {})  # of a TIFF
    # Cameras store pictures unturned, with a note.
    picture = ImageOps.exif_transpose(picture)
    mode, clear = picture.mode, picture.has_transparency_data
    if mode not in BYTE_MODES and (mode not in DEEP_MODES or clear):
        raise DataError(
            f"its mode is {mode}{' with transparency' if clear else ''}, expected one of "
            f"{', '.join([*BYTE_MODES, *DEEP_MODES])}, such as PNG in grey or colours"
        )
    if mode in DEEP_MODES:
        white = 1 if mode == "F" else 2 ** tags.get(BITS, (16,))[0] - 1
        levels = np.asarray(picture).astype(np.float32) / white
        if not 0 <= levels.min() <= levels.max() <= 1:
            raise DataError(
                f"its values are from {levels.min():g} to {levels.max():g}, expected 0 to 1"
            )
        # Pillow turns 0 into black for 8 bits and fewer only.
        return levels if tags.get(PHOTOMETRIC, 1) else 1 - levels
    if not clear:
        return np.asarray(picture.convert("L"), np.float32) / 255
    ink = picture.convert("RGBA")
    paper = Image.new("RGBA", ink.size, "white")
    paper.alpha_composite(ink)
    levels = np.asarray(paper.convert("L"), np.float32) / 255
    opacity = np.asarray(ink.getchannel("A"))
    if opacity.min() < opacity.max() and levels.min() == levels.max():
        raise DataError("it is white on a transparent ground, which is taken as white paper")
    return levels


def read_picture(path: str | Path, data: ImageData) -> Float[Tensor, " pixels"]:
    """Return a picture of a file as an input of a model that was trained on a data set, (pixels).

    A picture of the size of the data's is taken as it is, in grey. Any other is taken as a drawing,
    scaled and centred as the data's images are (`fit_drawing`).

    Raises:
        DataError: the file is missing, or holds no picture that can be read.
    """
    if not Path(path).is_file():
        raise DataError(f"image={str(path)!r} does not exist; expected the file of a picture")
    try:
        with Image.open(path) as picture:
            levels = grey_levels(picture)
            if levels.shape == data.shape:
                return torch.from_numpy(levels).flatten()
            return fit_drawing(ink_of(picture), data)
    except UNREADABLE as error:
        check_downloaded(Path(path), "a picture", DataError)
        raise DataError(f"image={str(path)!r} cannot be read as a picture: {error}") from error


@checked
def ink_of(picture: Image.Image) -> Float[np.ndarray, "height width"]:
    """Return the ink on each pixel of a picture, from 0 to 1, (height, width).

    Pictures may be dark on light or light on dark: the border is taken as paper. Transparent pixels
    are paper. A picture with a side above 1024 pixels is reduced first.
    """
    if 0 in picture.size:
        raise BilensError(f"picture has size {picture.size}, expected at least one pixel")
    levels = Image.fromarray(grey_levels(picture))
    levels.thumbnail((1024, 1024))
    # Reduction by a cubic goes a little beyond the levels of sharp edges.
    ink = 1 - np.asarray(levels, dtype=np.float64).clip(0, 1)
    # Drawings leave the border free, whichever of the two is dark.
    border = np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])
    return 1 - ink if np.median(border) > 0.5 else ink


@checked
def fit_drawing(
    ink: Float[np.ndarray, "height width"], data: ImageData
) -> Float[Tensor, " pixels"]:
    """Scale and centre a drawing like the images of a data set, (pixels).

    The longer side of the drawing's bounding box takes its median length in the data. Its centre of
    mass moves to the mean position in the data. In MNIST these are 20 of 28 pixels, and the middle.
    The darkest pixel becomes 1.

    Args:
        ink: ink of the drawing, from 0 to 1.
        data: the data set that determines size and position.

    Source: LeCun et al. 1998, "The MNIST database of handwritten digits", on size and centre.
    """
    if not np.isfinite(ink).all():
        raise BilensError("ink holds NaN or infinite values, expected 0 to 1")
    if not ink.max(initial=0) > 0.05:
        raise BilensError("ink is empty: expected a drawing with some dark pixels")
    rows, columns = _box(ink / ink.max())
    side, centre = _framing(data)
    cut = Image.fromarray((255 * ink[rows, columns] / ink.max()).astype(np.uint8))
    scale = side / max(cut.size)
    # Bilinear reduction in PIL averages over all source pixels of a target pixel.
    small = cut.resize(
        (max(1, round(cut.width * scale)), max(1, round(cut.height * scale))),
        Image.Resampling.BILINEAR,
    )
    image = np.asarray(small, dtype=np.float64)
    # Clamped to the page: digits may fill it from top to bottom.
    top, left = (
        min(max(0, round(float(target - current))), max(0, size - length))
        for target, current, size, length in zip(
            centre, _centre(image), data.shape, image.shape, strict=True
        )
    )
    page = Image.new("L", (data.shape[1], data.shape[0]))
    page.paste(small, (left, top))
    pixels = np.asarray(page, dtype=np.float32)
    return torch.from_numpy(pixels / max(1.0, float(pixels.max()))).flatten()


def _box(ink: Float[np.ndarray, "height width"]) -> tuple[slice, slice]:
    # Pixels above this share of the darkest one belong to the drawing.
    rows, columns = (np.flatnonzero((ink > 0.25).any(axis)) for axis in (1, 0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _centre(ink: Float[np.ndarray, "height width"]) -> Float[np.ndarray, "2"]:
    places = np.indices(ink.shape).reshape(2, -1)
    return places @ ink.ravel() / ink.sum()


# A drawing is scaled at every stroke, by the same data.
@lru_cache(maxsize=4)
def _framing(data: ImageData) -> tuple[int, Float[np.ndarray, "2"]]:
    """Return the median longer side of an image's bounding box, and the mean centre of mass."""
    # Enough for the median.
    images = data.train_images[:2000].double().cpu().numpy().reshape(-1, *data.shape)
    # Empty images have no box.
    images = images[images.max((1, 2)) > 0]
    boxes = [_box(image / image.max()) for image in images]
    sides = [max(rows.stop - rows.start, columns.stop - columns.start) for rows, columns in boxes]
    return round(float(np.median(sides))), np.mean([_centre(image) for image in images], 0)
