"""Images with their classes, in two splits, checked when they are put together."""

from dataclasses import dataclass, replace
from html import escape
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import DataError
from bilens.lazy_imports import go, pd, px
from bilens.notebook import Shown

__all__ = ["ImageData"]


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Shown):
    """Grey images with their classes, split into training and test.

    Attributes:
        train_images: from 0 (black) to 1 (white), flattened row by row: pixel (r, c) stands at
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

    def facts(self) -> str:
        """Name, sizes of the splits, pixels and classes."""
        train, test = len(self.train_labels), len(self.test_labels)
        return (
            f"{self.name}, {train:,} images to train on, {test:,} to test, "
            f"{self.shape[0]}x{self.shape[1]} pixels, {self.n_classes} classes"
        )

    def frame(self) -> "pd.DataFrame":
        """How many images each class has."""
        splits = {"train": self.train_labels, "test": self.test_labels}
        counts = {n: s.bincount(minlength=self.n_classes).cpu() for n, s in splits.items()}
        return pd.DataFrame({"class": self.class_names, **counts})

    def plot(self, k: int = 10) -> "go.Figure":
        """The first k images of the test set, above each its class."""
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
        """Return the same data on `device`; where it is there already, itself."""
        if self.train_images.device == torch.device(device):
            return self
        names = [name for name, value in vars(self).items() if isinstance(value, Tensor)]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


ImageData.__init__ = checked(ImageData.__init__)  # type: ignore[method-assign]
