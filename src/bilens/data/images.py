"""Grey images with their classes, split into training and test."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_finite, check_numbers, checked
from bilens.errors import DataError
from bilens.sections import Columns, Fact


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Reading):
    """Grey images with their classes, split into training and test.

    Attributes:
        train_images: from 0 (black) to 1 (white), flattened row by row: pixel (r, c) is element
            r * width + c; `test_images` likewise.
        train_labels: indices into `class_names`; `test_labels` likewise.
        shape: height and width in pixels; pixels = height * width.
        origin: arguments of `load_images` that read the same data from any working directory, as
            training.json names them: data, data_dir and data_seed. Empty for data of your own.

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
    origin: Mapping[str, str | int | None] = field(default_factory=dict)

    axes: ClassVar[dict[str, str]] = {"x": "class", "y": "train"}

    def facts(self) -> list[Fact]:
        height, width = self.shape
        return [
            ("", self.name),
            ("images to train on", f"{len(self.train_labels):,}"),
            ("to test", f"{len(self.test_labels):,}"),
            ("pixels", f"{height}x{width}"),
            ("classes", self.n_classes),
        ]

    def columns(self) -> Columns:
        """Return the number of images of each class."""
        splits = {"train": self.train_labels, "test": self.test_labels}
        counts = {n: s.bincount(minlength=self.n_classes).tolist() for n, s in splits.items()}
        return {"class": self.class_names, **counts}

    @property
    def commonest(self) -> tuple[str, float]:
        """The most frequent class of the test images, and its share, the accuracy of naming it."""
        counts = self.test_labels.bincount()
        return self.class_names[int(counts.argmax())], int(counts.max()) / len(self.test_labels)

    def is_chance(self, accuracy: float) -> bool:
        """Return whether a test accuracy cannot be told from that of always naming one class."""
        _, chance = self.commonest
        # Two standard errors of the share that is right by chance.
        return accuracy < chance + 2 * (chance * (1 - chance) / len(self.test_labels)) ** 0.5

    def __post_init__(self) -> None:
        if duplicates := [name for name, n in Counter(self.class_names).items() if n > 1]:
            raise DataError(f"class_names has {duplicates[0]!r} twice, expected distinct names")
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            if images.shape[1] != self.n_inputs or not images.numel():
                raise DataError(
                    f"{split}_images has shape {tuple(images.shape)}, expected (count, "
                    f"{self.n_inputs}), one image or more of {self.shape[0]}x{self.shape[1]} pixels"
                )
            # Without memory there are shapes only.
            if labels.is_meta:
                continue
            check_finite(**{f"{split}_images": images})
            check_numbers(f"{split}_labels", labels, self.n_classes, "numbers of classes")
        if self.n_classes < 2:
            raise DataError(
                f"data={self.name!r} has images of the classes {self.class_names}, expected two "
                "classes or more to tell apart; add images of others"
            )

    @property
    def n_inputs(self) -> int:
        """Number of pixels of one image."""
        return self.shape[0] * self.shape[1]

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @cached_property
    def provenance(self) -> dict[str, str | int | None]:
        """Entries of training.json: the name, `origin`, and a digest of images and classes."""
        digest = sha256(repr((self.shape, self.class_names)).encode())
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                digest.update(name.encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return {"data": self.name, **self.origin, "data_digest": digest.hexdigest()}

    def to(self, device: torch.device | str) -> "ImageData":
        """Return the same data on `device`; the object itself if it is there already."""
        if self.train_images.device == torch.device(device):
            return self
        names = [name for name, value in vars(self).items() if isinstance(value, Tensor)]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


ImageData.__init__ = checked(ImageData.__init__)  # type: ignore[method-assign]
