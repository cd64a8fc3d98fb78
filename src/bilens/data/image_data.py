"""Images with their classes, in two checked splits, and drawings scaled to look like them."""

from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError, DataError
from bilens.lazy_imports import go, pd, px
from bilens.reading import Fact, Reading


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Reading):
    """Grey images with their classes, split into training and test.

    Attributes:
        train_images: from 0 (black) to 1 (white), flattened row by row: pixel (r, c) is element
            r * width + c; `test_images` likewise.
        train_labels: indices into `class_names`; `test_labels` likewise.
        shape: height and width in pixels; pixels = height * width.

    Raises:
        DataError: images and labels do not fit the shape, the classes or one another.
    """

    name: str
    train_images: Float[Tensor, "train pixels"]
    train_labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test pixels"]
    test_labels: Int[Tensor, " test"]
    shape: tuple[int, int]
    class_names: tuple[str, ...]

    axes: ClassVar[dict[str, str]] = {"x": "class", "y": "train"}

    def facts(self) -> list[Fact]:
        """Return name, sizes of the splits, pixels and classes."""
        height, width = self.shape
        return [
            ("", self.name),
            ("images to train on", f"{len(self.train_labels):,}"),
            ("to test", f"{len(self.test_labels):,}"),
            ("pixels", f"{height}x{width}"),
            ("classes", self.n_classes),
        ]

    def frame(self) -> "pd.DataFrame":
        """Return the number of images of each class."""
        splits = {"train": self.train_labels, "test": self.test_labels}
        counts = {n: s.bincount(minlength=self.n_classes).cpu() for n, s in splits.items()}
        return pd.DataFrame({"class": self.class_names, **counts})

    def plot(self, k: int = 10) -> "go.Figure":
        """Plot the first k images of the test set, each below its class."""
        images = self.test_images[:k].reshape(-1, *self.shape).cpu()
        figure = px.imshow(images, facet_col=0, facet_col_wrap=10, binary_string=True)
        for note, label in zip(figure.layout.annotations, self.test_labels.tolist(), strict=False):
            note.text = escape(self.class_names[label])
        return figure.update_xaxes(visible=False).update_yaxes(visible=False)

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            if images.shape[1] != self.n_inputs or not images.numel():
                raise DataError(
                    f"{split}_images has shape {tuple(images.shape)}, expected (count, "
                    f"{self.n_inputs}), images of {self.shape[0]}x{self.shape[1]} pixels"
                )
            if labels.is_meta:
                continue
            check_finite(**{f"{split}_images": images})
            wrong = labels[(labels < 0) | (labels >= self.n_classes)]
            if len(wrong):
                raise DataError(
                    f"{split}_labels holds {wrong[0]}, expected 0 to {self.n_classes - 1}"
                )

    @property
    def n_inputs(self) -> int:
        """Number of pixels of one image."""
        return self.shape[0] * self.shape[1]

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def to(self, device: torch.device | str) -> "ImageData":
        """Return the same data on `device`; the object itself if it is there already."""
        if self.train_images.device == torch.device(device):
            return self
        names = [name for name, value in vars(self).items() if isinstance(value, Tensor)]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


ImageData.__init__ = checked(ImageData.__init__)  # type: ignore[method-assign]


INK = 0.25
"""Share of the darkest pixel above which a pixel belongs to the drawing."""

LARGEST = 1024
"""Largest number of pixels of a side."""

SEEN = 2000
"""Number of images in the measurement of a data set's framing."""


@checked
def ink_of(picture: Image.Image) -> Float[np.ndarray, "height width"]:
    """Return the ink on each pixel of a picture, from 0 to 1, (height, width).

    Pictures may be dark on light or light on dark: the border is taken as paper. Transparent pixels
    are paper. A picture with a side above 1024 pixels is reduced first.
    """
    if 0 in picture.size:
        raise BilensError(f"picture has size {picture.size}, expected at least one pixel")
    picture = picture.convert("RGBA")
    picture.thumbnail((LARGEST, LARGEST))
    solid = Image.new("RGBA", picture.size, "white")
    solid.alpha_composite(picture)
    ink = 1 - np.asarray(solid.convert("L"), dtype=np.float64) / 255
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

    Raises:
        BilensError: the drawing is empty.

    Source:
        LeCun et al. 1998, "The MNIST database of handwritten digits", on size and centre.
    """
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
    drawn = np.asarray(small, dtype=np.float64)
    # Clamped to the page: digits may fill it from top to bottom.
    top, left = (
        min(max(0, round(float(target - current))), max(0, size - length))
        for target, current, size, length in zip(
            centre, _centre(drawn), data.shape, drawn.shape, strict=True
        )
    )
    page = Image.new("L", (data.shape[1], data.shape[0]))
    page.paste(small, (left, top))
    pixels = np.asarray(page, dtype=np.float32)
    return torch.from_numpy(pixels / max(1.0, float(pixels.max()))).flatten()


def _box(ink: Float[np.ndarray, "height width"]) -> tuple[slice, slice]:
    rows, columns = (np.flatnonzero((ink > INK).any(axis)) for axis in (1, 0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _centre(ink: Float[np.ndarray, "height width"]) -> Float[np.ndarray, "2"]:
    places = np.indices(ink.shape).reshape(2, -1)
    return places @ ink.ravel() / ink.sum()


@lru_cache(maxsize=4)
def _framing(data: ImageData) -> tuple[int, Float[np.ndarray, "2"]]:
    """Return the median longer side of an image's bounding box, and the mean centre of mass."""
    images = data.train_images[:SEEN].double().cpu().numpy().reshape(-1, *data.shape)
    images = images[images.max((1, 2)) > 0]
    boxes = [_box(image / image.max()) for image in images]
    sides = [max(part.stop - part.start for part in box) for box in boxes]
    return round(float(np.median(sides))), np.mean([_centre(image) for image in images], 0)
