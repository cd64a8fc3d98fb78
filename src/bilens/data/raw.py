"""Images and labels as they came, and the checks that they belong together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bilens.errors import DataError

__all__ = ["RawSplit", "check_labels", "check_same_size", "check_split"]


@dataclass(frozen=True, eq=False)
class RawSplit:
    """One split before any check, with the places it came from for the error messages."""

    images: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    images_from: str
    labels_from: str


def check_split(split: RawSplit) -> None:
    """Check that the images are images, the labels labels, and that there are as many of both.

    Raises:
        DataError: A wrong number of axes, an empty set, or different counts.
    """
    if split.images.ndim != 3:
        raise DataError(
            f"{split.images_from}: expected images, shape (count, height, width), "
            f"found shape {split.images.shape}"
        )
    if split.labels.ndim != 1:
        raise DataError(
            f"{split.labels_from}: expected labels, shape (count,), "
            f"found shape {split.labels.shape}"
        )
    if split.images.size == 0:
        raise DataError(
            f"{split.images_from}: expected at least one pixel, found shape {split.images.shape}"
        )
    if len(split.images) != len(split.labels):
        raise DataError(
            f"{split.labels_from}: expected a label for each of the {len(split.images)} images "
            f"of {split.images_from}, found {len(split.labels)}"
        )


def check_same_size(train: RawSplit, test: RawSplit) -> None:
    """Check that the test images have the height and width of the training images.

    Raises:
        DataError: They have not.
    """
    expected, found = train.images.shape[1:], test.images.shape[1:]
    if expected != found:
        raise DataError(
            f"{test.images_from}: expected images of {expected[0]}x{expected[1]} as in "
            f"{train.images_from}, found {found[0]}x{found[1]}"
        )


def check_labels(split: RawSplit, n_classes: int) -> None:
    """Check that every label is the index of a class.

    Raises:
        DataError: One is not; the message gives the first.
    """
    wrong = np.flatnonzero((split.labels < 0) | (split.labels >= n_classes))
    if len(wrong):
        raise DataError(
            f"{split.labels_from}: expected labels from 0 to {n_classes - 1}, "
            f"found {split.labels[wrong[0]]} at index {wrong[0]}"
        )
