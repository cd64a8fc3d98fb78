"""Images with classes, from known data sets, folders, the hub or modular addition; and drawings.

Sources:

- digits: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998; the
  1797 images of its test part that come with scikit-learn.
- mnist: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits".
- fashion-mnist: H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for
  Benchmarking Machine Learning Algorithms", 2017, arXiv:1708.07747.
"""

import glob
import gzip
import re
import struct
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import one_hot

from bilens.analysis import Reading
from bilens.checks import check_finite, checked
from bilens.errors import BilensError, DataError
from bilens.hub import hub_split, is_folder, named_folder
from bilens.lazy_imports import datasets, go, lazy_import, pd, px
from bilens.sections import Fact, plotly_text
from bilens.settings import Between, Seed

# scikit-learn takes as long to import as torch, and the other data sets do not need it.
bundled, model_selection = (
    lazy_import(f"sklearn.{part}", install="bilens[train]")
    for part in ("datasets", "model_selection")
)

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
IDX_FILES += ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # type: ignore[assignment]
# By name: the classes, the repository on the hub, and the folders that usually hold it.
KNOWN = {
    "mnist": (tuple("0123456789"), "ylecun/mnist", ("mnist", "MNIST/raw")),
    "fashion-mnist": (
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        "zalando-datasets/fashion_mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
    ),
}
TRAIN_SHARE = 0.8


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

    def is_chance(self, accuracy: float) -> bool:
        """Return whether a test accuracy is no better than always naming the same class."""
        images = len(self.test_labels)
        chance = int(self.test_labels.bincount().max()) / images
        # Two standard errors of the share that is right by chance.
        return accuracy < chance + 2 * (chance * (1 - chance) / images) ** 0.5

    def plot(self, k: int = 10) -> "go.Figure":
        """Plot the first k images of the test set, each below its class."""
        images = self.test_images[:k].reshape(-1, *self.shape).cpu()
        figure = px.imshow(images, facet_col=0, facet_col_wrap=10, binary_string=True)
        for note, label in zip(figure.layout.annotations, self.test_labels.tolist(), strict=False):
            note.text = plotly_text(self.class_names[label])
        return figure.update_xaxes(visible=False).update_yaxes(visible=False)

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            if images.shape[1] != self.n_inputs or not images.numel():
                raise DataError(
                    f"{split}_images has shape {tuple(images.shape)}, expected (count, "
                    f"{self.n_inputs}), images of {self.shape[0]}x{self.shape[1]} pixels"
                )
            # Without memory there are shapes only.
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


@checked
def load_images(name: str, data_dir: str | Path | None = None, seed: Seed = 0) -> ImageData:
    """Load a data set of images by its name, from a folder, or from the hub.

    The names are:

    - "digits": 8x8, with scikit-learn.
    - "mnist" and "fashion-mnist": 28x28.
    - "modular-59": 2x59, or another number; see `modular_addition`.
    - the path of a folder with the four IDX files of MNIST, for images of any size. Its classes
      are called "0" up to its largest label.
    - the path of a folder with a sub-folder of pictures for each class (torchvision's ImageFolder,
      the imagefolder of `datasets`). It may have these folders in `train` and in `test` (or
      `valid` or `val`).
    - "hub:owner/name": a data set of images and class labels on the Hugging Face hub.

    All images of a data set need one size; colours become grey.

    Args:
        name: name of the data set, or a folder.
        data_dir: For mnist and fashion-mnist: the folder with the IDX files, or its parent if it
            has the data set's name (or MNIST/raw, FashionMNIST/raw). By default the environment
            variable BILENS_DATA; if that is unset or empty too, the Hugging Face hub.
        seed: Seed of the split, 80 % for training, for data sets without a fixed split: digits,
            modular addition, and class folders without `train` and `test`.

    Returns:
        The data on the CPU. Bytes are divided by 255, the 17 grey levels of digits by 16.

    Raises:
        DataError: The name is unknown, files are missing, damaged or mismatched, or the hub is out
            of reach.

    Source: the module's docstring cites each data set.
    """
    if name == "digits":
        return _digits(seed)
    if modulus := re.fullmatch(r"modular-(\d{1,9})", name):
        return modular_addition(int(modulus[1]), seed)
    if name in KNOWN:
        class_names, repository, usual = KNOWN[name]
        folder = named_folder(data_dir)
        if folder is None:
            return _read_hub(name, repository, class_names)
        return _read_folder(name, [*(folder / place for place in usual), folder], class_names)
    if name.startswith("hub:"):
        repository = name.removeprefix("hub:")
        return _read_hub(repository.rpartition("/")[2], repository, None)
    if name and is_folder(name):
        folder = Path(name).resolve()
        has_idx = any(_files(folder))
        return (
            _read_folder(folder.name, [folder], None)
            if has_idx
            else _read_class_folders(folder, seed)
        )
    raise DataError(
        f"name={name!r}, expected digits, {', '.join(KNOWN)}, modular-59, hub:owner/name or the "
        "path of a folder of IDX files or of class folders with images"
    )


def _read_class_folders(folder: Path, seed: int) -> ImageData:
    """Return the images of a folder of class folders."""
    try:
        splits = datasets.load_dataset(
            "imagefolder", data_dir=glob.escape(str(folder)), drop_labels=False, streaming=True
        )
    except (OSError, ValueError) as error:  # it has no images
        raise DataError(
            f"{folder} has neither the IDX files {', '.join(IDX_FILES)} nor class folders with "
            f"images ({error})"
        ) from error
    tests = [name for name in ("test", "validation") if name in splits]
    if "train" not in splits:
        raise DataError(
            f"{folder} has images in {' and '.join(splits)}, expected class folders, or class "
            "folders in train and in test"
        )
    arrays: list[np.ndarray] = []
    for split in ["train", *tests[:1]]:
        arrays += _grey_rows(splits[split], "image", "label", f"{folder}, {split}")
    if not tests:
        images, labels = arrays
        order = np.random.default_rng(seed).permutation(len(labels))
        train, test = np.split(order, [round(TRAIN_SHARE * len(order))])
        arrays = [images[train], labels[train], images[test], labels[test]]
    return _assembled(folder.name, arrays, tuple(splits["train"].features["label"].names))


def _grey_rows(rows: Any, image: str, label: str, place: str) -> list[np.ndarray]:
    """Return the pictures of a data set in grey, (count, height, width), and their labels."""
    images, labels = [], []
    try:
        for row in rows:
            images.append(np.asarray(row[image].convert("L")))
            labels.append(row[label])
            if images[-1].shape != images[0].shape:
                expected, actual = ("x".join(map(str, i.shape)) for i in (images[0], images[-1]))
                raise DataError(
                    f"{place}: image {len(images) - 1} has {actual} pixels, expected {expected} as "
                    "in the first; scale all images to one size"
                )
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{place}: image {len(images)} cannot be read: {error}. Remove it."
        ) from error
    if not images:
        raise DataError(f"{place} holds no images, expected pictures in class folders")
    return [np.stack(images), np.array(labels)]


def _read_hub(name: str, repository: str, class_names: tuple[str, ...] | None) -> ImageData:
    """Load the splits train and test of a data set with labelled images."""
    arrays: list[np.ndarray] = []
    names: tuple[str, ...] = ()
    instead = f"the IDX files {', '.join(IDX_FILES)}" if class_names else "images in class folders"
    for split in ("train", "test"):
        with hub_split(repository, split, instead) as rows:
            columns = {type(kind).__name__: name for name, kind in rows.features.items()}
            if not {"Image", "ClassLabel"} <= columns.keys():
                raise DataError(
                    f"{repository} has the columns {rows.features}, expected an image and a class "
                    "label; save its images in class folders and use their path"
                )
            image, label = columns["Image"], columns["ClassLabel"]
            arrays += _grey_rows(rows, image, label, f"{repository}, {split}")
            names = tuple(rows.features[label].names)
    return _assembled(name, arrays, class_names or names)


def _read_folder(
    name: str, candidates: list[Path], class_names: tuple[str, ...] | None
) -> ImageData:
    """Read the four files from the first folder that has all of them."""
    # The one that lacks fewest: an error should name the files of the likely folder.
    folder = min(candidates, key=lambda candidate: _files(candidate).count(None))
    files = _files(folder)
    missing = [name for name, path in zip(IDX_FILES, files, strict=True) if path is None]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}; expected {', '.join(IDX_FILES)} (each also with "
            ".gz, or with a dot in place of the dash before idx) in "
            f"{' or '.join(map(str, candidates))}"
        )
    # All known sets have the same sizes and labels: only the name of the folder distinguishes them.
    for other, (_, _, usual) in KNOWN.items():
        if name in KNOWN.keys() - {other} and any(folder.resolve().match(end) for end in usual):
            raise DataError(
                f"{folder} is a folder of {other} by its name, expected {name}. Use its parent, or "
                "rename it."
            )
    try:
        return _assembled(name, [read_idx(path) for path in files if path], class_names)
    except BilensError as error:
        raise DataError(f"{folder}: {error}") from error


def _files(folder: Path) -> list[Path | None]:
    """Return the four files, each in the first of its spellings that exists, else None."""
    # Unpacked files first: they are quicker to read, and torchvision leaves both.
    endings = [(dash, gz) for gz in ("", ".gz") for dash in ("-idx", ".idx")]
    files = []
    for name in IDX_FILES:
        paths = (folder / (name.replace("-idx", dash) + gz) for dash, gz in endings)
        files.append(next(filter(Path.is_file, paths), None))
    return files


def _assembled(
    name: str, arrays: list[np.ndarray], class_names: tuple[str, ...] | None, white: int = 255
) -> ImageData:
    """Return images and labels of both splits as `ImageData`, after a check of their shapes."""
    train_images, train_labels, test_images, test_labels = map(torch.from_numpy, arrays)
    shapes = {images.shape[1:] for images in (train_images, test_images)}
    kinds = {images.dtype for images in (train_images, test_images)}
    if len(shapes) > 1 or train_images.ndim != 3 or kinds != {torch.uint8}:
        raise DataError(
            f"the images are {tuple(train_images.shape)} and {tuple(test_images.shape)}, "
            f"{' and '.join(map(str, kinds))}; expected bytes (count, height, width) of one size"
        )
    if class_names is None:
        largest = max(int(labels.max()) for labels in (train_labels, test_labels) if len(labels))
        class_names = tuple(map(str, range(largest + 1)))
    return ImageData(
        name=name,
        # In place: the float copy of MNIST is large enough to make it only once.
        train_images=train_images.flatten(1).float().div_(white),
        train_labels=train_labels.long(),
        test_images=test_images.flatten(1).float().div_(white),
        test_labels=test_labels.long(),
        shape=(train_images.shape[1], train_images.shape[2]),
        class_names=class_names,
    )


def _digits(seed: int) -> ImageData:
    digits = bundled.load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target
    # Stratified, since 1,797 images in ten classes leave few of each for the test.
    how = {"test_size": 0.2, "random_state": seed, "stratify": labels}
    parts = model_selection.train_test_split(images, labels, **how)
    return _assembled("digits", [parts[i] for i in (0, 2, 1, 3)], tuple("0123456789"), white=16)


@checked
def modular_addition(p: Annotated[int, Between(1, 256)], seed: Seed = 0) -> ImageData:
    """All pairs (a, b) with a + b mod p as the class; 80 % of them for training.

    An image has two rows of p pixels. Pixel a is white in the first row, pixel b in the second. The
    functions that separate the classes are known: sums over frequencies w of
    cos(2 pi w (a + b - c) / p).

    Args:
        p: the modulus, up to 256.
        seed: seed of the split.

    Source: Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability",
    arXiv:2301.05217.
    """
    a, b = torch.arange(p).repeat_interleave(p), torch.arange(p).repeat(p)
    images, sums = torch.cat([one_hot(a, p), one_hot(b, p)], dim=1).float(), (a + b) % p
    order = torch.randperm(p * p, generator=torch.Generator().manual_seed(int(seed)))
    train, test = order.tensor_split([round(TRAIN_SHARE * p * p)])
    return ImageData(
        name=f"modular-{p}",
        train_images=images[train],
        train_labels=sums[train],
        test_images=images[test],
        test_labels=sums[test],
        shape=(2, p),
        class_names=tuple(map(str, range(p))),
    )


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file of bytes, (count, height, width) or (count,); packed if it ends in .gz.

    The file begins with two zero bytes, the type (8 for bytes), the number of axes, and the size of
    each axis in 4 bytes. The values follow, with the last axis fastest.

    Raises:
        DataError: the file cannot be read, or is not one.

    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", file formats.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            content = file.read()
        kind, axes = struct.unpack_from(">3sB", content)
        shape = struct.unpack_from(f">{axes}I", content, 4)
        if kind != b"\0\0\x08":
            raise ValueError("it does not begin as one")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as an IDX file of bytes: {error}. Fetch it again."
        ) from error


@checked
def ink_of(picture: Image.Image) -> Float[np.ndarray, "height width"]:
    """Return the ink on each pixel of a picture, from 0 to 1, (height, width).

    Pictures may be dark on light or light on dark: the border is taken as paper. Transparent pixels
    are paper. A picture with a side above 1024 pixels is reduced first.
    """
    if 0 in picture.size:
        raise BilensError(f"picture has size {picture.size}, expected at least one pixel")
    picture = picture.convert("RGBA")
    picture.thumbnail((1024, 1024))
    solid = Image.new("RGBA", picture.size, "white")
    solid.alpha_composite(picture)
    ink = 1 - np.asarray(solid.convert("L"), dtype=np.float64) / 255
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
