"""Image classification data: digits, MNIST, Fashion-MNIST, or a folder of IDX files.

Where they come from:

- digits: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998; the
  1797 images of its test part that come with scikit-learn.
- mnist: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits".
- fashion-mnist: H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for
  Benchmarking Machine Learning Algorithms", 2017, arXiv:1708.07747.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.data.folder import read_folder, read_known_folder
from bilens.data.hub import read_hub
from bilens.data.raw import RawSplit, check_labels, check_same_size, check_split
from bilens.errors import DataError

__all__ = ["ImageData", "load_images"]

_FIGURES = tuple(str(figure) for figure in range(10))
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_CLASS_NAMES = {"mnist": _FIGURES, "fashion-mnist": _CLOTHES}
_DIGITS_TEST_SHARE = 0.2
_DIGITS_WHITE = 16
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, eq=False)
class ImageData:
    """Grey images with their classes, split into training and test.

    Attributes:
        name: What the data set is called.
        train_images: float32 from 0 (black) to 1 (white), flattened row by row: pixel (r, c)
            stands at r * width + c.
        train_labels: int64 indices into `class_names`.
        test_images: As `train_images`.
        test_labels: As `train_labels`.
        shape: Height and width in pixels; pixels = height * width.
        class_names: One for each class.
    """

    name: str
    train_images: Float[Tensor, "train pixels"]
    train_labels: Int[Tensor, " train"]
    test_images: Float[Tensor, "test pixels"]
    test_labels: Int[Tensor, " test"]
    shape: tuple[int, int]
    class_names: tuple[str, ...]

    @property
    def n_inputs(self) -> int:
        """Number of pixels of one image."""
        return self.shape[0] * self.shape[1]

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def to(self, device: torch.device | str) -> "ImageData":
        """Return the same data on `device`; tensors that are there already are shared."""
        return replace(
            self,
            train_images=self.train_images.to(device),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
        )


def load_images(name: str, data_dir: str | Path | None = None, seed: int = 0) -> ImageData:
    """Load a data set of images by its name, or from a folder of IDX files.

    Args:
        name: "digits" (8x8, with scikit-learn), "mnist" or "fashion-mnist" (28x28), or the path of
            a folder with the four IDX files of MNIST's naming, for images of any size; its classes
            are then called "0" up to its largest label.
        data_dir: For mnist and fashion-mnist: the folder with the IDX files, or one above it named
            after the data set (or MNIST/raw, FashionMNIST/raw). By default the environment variable
            BILENS_DATA; if that is unset or empty too, the Hugging Face hub.
        seed: For digits, which come in one piece: draws the stratified split, 80 % for training.
            The other data sets have their own split.

    Returns:
        The data on the CPU. Bytes are divided by 255, the 17 grey levels of digits by 16.

    Raises:
        DataError: Unknown name, missing, damaged or mismatched files, hub out of reach.

    Source: the module's docstring cites each data set.
    """
    if name == "digits":
        return _digits(seed)
    if name in _CLASS_NAMES:
        return _assembled(name, *_read_known(name, data_dir), _CLASS_NAMES[name])
    if name and _is_folder(Path(name)):
        return _assembled(Path(name).resolve().name, *read_folder(Path(name)), None)
    raise DataError(
        f"name: expected digits, {', '.join(_CLASS_NAMES)} or the path of a folder of IDX files, "
        f"found {name!r}"
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name longer than the file system takes
        return False


def _read_known(name: str, data_dir: str | Path | None) -> tuple[RawSplit, RawSplit]:
    if data_dir is not None:
        return read_known_folder(name, Path(data_dir), "data_dir")
    if folder := os.environ.get("BILENS_DATA"):
        return read_known_folder(name, Path(folder), "BILENS_DATA")
    return read_hub(name)


def _assembled(
    name: str, train: RawSplit, test: RawSplit, class_names: tuple[str, ...] | None
) -> ImageData:
    """Check both splits against each other and turn bytes into tensors."""
    for split in (train, test):
        check_split(split)
    check_same_size(train, test)
    if class_names is None:
        largest = max(int(split.labels.max()) for split in (train, test))
        class_names = tuple(str(label) for label in range(largest + 1))
    for split in (train, test):
        check_labels(split, len(class_names))
    _, height, width = train.images.shape
    return ImageData(
        name=name,
        train_images=_pixels(train),
        train_labels=torch.from_numpy(train.labels.astype(np.int64)),
        test_images=_pixels(test),
        test_labels=torch.from_numpy(test.labels.astype(np.int64)),
        shape=(height, width),
        class_names=class_names,
    )


def _pixels(split: RawSplit) -> Float[Tensor, "count pixels"]:
    # In place, because the float copy of MNIST is large enough to make only once.
    return torch.from_numpy(split.images).flatten(start_dim=1).float().div_(255)


def _digits(seed: int) -> ImageData:
    if not 0 <= seed <= _MAX_SEED:
        raise DataError(f"seed: expected 0 to {_MAX_SEED}, found {seed}")
    # scikit-learn takes as long to import as torch, and the other data sets do without it.
    from sklearn.datasets import load_digits  # noqa: PLC0415
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images.astype(np.float32) / _DIGITS_WHITE,
        labels.astype(np.int64),
        test_size=_DIGITS_TEST_SHARE,
        random_state=seed,
        stratify=labels,
    )
    return ImageData(
        name="digits",
        train_images=torch.from_numpy(train_images),
        train_labels=torch.from_numpy(train_labels),
        test_images=torch.from_numpy(test_images),
        test_labels=torch.from_numpy(test_labels),
        shape=(8, 8),
        class_names=_FIGURES,
    )
