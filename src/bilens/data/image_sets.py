"""Data sets of images: known ones, folders of one's own, and those of the hub.

Sources:

- digits: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998; the
  1797 images of its test part that come with scikit-learn.
- mnist: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits".
- fashion-mnist: H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for
  Benchmarking Machine Learning Algorithms", 2017, arXiv:1708.07747.
"""

import glob
import gzip
import math
import os
import struct
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from bilens.checks import checked
from bilens.data.images import ImageData
from bilens.data.pictures import UNREADABLE, grey_levels
from bilens.errors import BilensError, DataError
from bilens.files import check_downloaded, visible_paths
from bilens.hub import IN_FOLDER, hub_split, is_folder, named_folder
from bilens.lazy_imports import datasets, lazy_import
from bilens.memory import MemoryLimitError, check_memory
from bilens.settings import Seed

# scikit-learn takes as long to import as torch, and the other data sets do not need it.
bundled, model_selection = (
    lazy_import(f"sklearn.{part}", install=".[train]") for part in ("datasets", "model_selection")
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
REMEDY = "; unpack archives first, and save arrays of .npz or .npy as pictures in class folders"
TRAIN_SHARE = 0.8
BYTES = 8
IDX_TYPES = {BYTES: "bytes", 9: "signed bytes", 11: "int16", 12: "int32"}
IDX_TYPES |= {13: "float32", 14: "float64"}
"""Types of values by their codes in an IDX file."""
SPLITS = ("train", "test")
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "validation", "valid", "val")


@checked
def load_images(name: str, data_dir: str | Path | None = None, seed: Seed = 0) -> ImageData:
    """Load a data set of images by its name, from a folder, or from the hub.

    The names are:

    - "digits": 8x8, with scikit-learn.
    - "mnist" and "fashion-mnist": 28x28.
    - the path of a folder with the four IDX files of MNIST, for images of any size. Its classes
      are called "0" up to its largest label.
    - the path of a folder with a sub-folder of pictures for each class, as in torchvision's
      ImageFolder. It may have these folders in `train` and in `test` (or `valid` or `val`).
    - the path of a folder with parquet files of the hub, train-*.parquet and test-*.parquet.
    - "hub:owner/name": a data set of images and class labels on the Hugging Face hub.

    All images of a data set need one size; colours become grey. Pictures have 8 bits a channel, or
    one channel of 16 bits or of floats from 0 to 1. Transparent parts are white paper.

    A name of a data set goes before a folder: a folder called mnist is given as "./mnist".

    Args:
        name: name of the data set, or a folder.
        data_dir: For mnist and fashion-mnist: the folder with the IDX files, or with parquet files
            of the hub, or its parent if it has the data set's name (or MNIST/raw,
            FashionMNIST/raw). By default the environment variable BILENS_DATA; if that is unset
            or empty too, the Hugging Face hub.
        seed: Seed of the split, 80 % for training, for data sets without a fixed split: digits, and
            class folders without `train` and `test`.

    Returns:
        The data on the CPU. Bytes are divided by 255, the 17 grey levels of digits by 16, levels of
        16 bits by 65535.

    Raises:
        DataError: The name is unknown, files are missing, damaged or mismatched, or the hub is out
            of reach.

    Source: the module's docstring cites each data set.
    """
    folder = named_folder(data_dir) if name in KNOWN else None
    place = str(Path(name).resolve()) if _is_own(name) else name
    origin: dict[str, str | int | None] = {"data": place, "data_dir": None, "data_seed": int(seed)}
    if folder is not None:
        origin["data_dir"] = str(folder.resolve())
    return replace(_read(name, folder, seed), origin=origin)


def is_known_images(name: str) -> bool:
    """Return whether a name is that of a data set, which goes before a folder of this name."""
    return name in KNOWN or name == "digits" or name.startswith("hub:")


def _is_own(name: str) -> bool:
    """Return whether a name is the path of a folder, and of no data set that is known."""
    return bool(name) and not is_known_images(name) and is_folder(name)


def _read(name: str, folder: Path | None, seed: int) -> ImageData:
    if name == "digits":
        return _digits(seed)
    if name in KNOWN:
        class_names, repository, usual = KNOWN[name]
        if folder is None:
            return _read_hub(name, repository, class_names)
        return _read_folder(name, [*(folder / place for place in usual), folder], class_names)
    if name.startswith("hub:"):
        repository = name.removeprefix("hub:")
        return _read_hub(repository.rpartition("/")[2], repository, None)
    if _is_own(name):
        return _read_own(Path(name).resolve(), seed)
    if os.path.isfile(name):  # noqa: PTH113  pathlib raises for names that are too long
        raise DataError(
            f"{name} is a file, expected a folder of IDX files or of class folders{REMEDY}"
        )
    raise DataError(
        f"name={name!r}, expected digits, {', '.join(KNOWN)}, hub:owner/name or the path of a "
        "folder of IDX files or of class folders with images"
    )


def _read_own(folder: Path, seed: int) -> ImageData:
    """Return the images of a folder of IDX files, of parquet files or of class folders."""
    if any(_files(folder)) or _parquet_files(folder):
        return _read_folder(folder.name, [folder], None)
    splits = _splits(folder)
    names = sorted({_class_name(inner.name) for split in splits for inner in _folders(split)})
    arrays: list[np.ndarray] = []
    for split in splits:
        # Listed first: what is wrong with a folder is no damage of the picture before it.
        arrays += _grey_rows(list(_pictures(split, names)), str(split))
    if len(splits) == 1:
        images, labels = arrays
        order = np.random.default_rng(seed).permutation(len(labels))
        train, test = np.split(order, [round(TRAIN_SHARE * len(order))])
        if not len(test):
            raise DataError(
                f"{folder} holds {len(order)} pictures, expected at least 3, to train and to test"
            )
        arrays = [images[train], labels[train], images[test], labels[test]]
    return _assembled(folder.name, arrays, tuple(names), white=1)


def _splits(folder: Path) -> list[Path]:
    """Return the folders that hold class folders: the folder itself, or its train and test."""
    children = _folders(folder)
    parents = [child for child in children if _folders(child)]
    if not children:
        raise DataError(
            f"{folder} has neither the IDX files {', '.join(IDX_FILES)} nor class folders with "
            f"images{REMEDY}"
        )
    # A folder called train that holds pictures is a class, and one that holds folders is a split.
    if not parents:
        return [folder]
    by_name = {child.name.lower(): child for child in parents}
    names = [name for name in (*TRAIN_NAMES, *TEST_NAMES) if name in by_name]
    n_train = len(by_name.keys() & {*TRAIN_NAMES})
    if n_train != 1 or parents != children or len(names) != len(parents):
        raise DataError(
            f"{folder} holds the folders {', '.join(child.name for child in children)}, of which "
            f"{', '.join(child.name for child in parents)} hold further folders; expected class "
            "folders with pictures, or class folders in one folder train and in one folder test"
        )
    return [by_name[name] for name in names[:2]]


def _folders(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, also those that are links; refuse broken links."""
    visible = visible_paths(folder)
    for path in visible:
        if not path.exists():
            raise DataError(
                f"{path} is a link to {path.readlink()}, which is not there; mend or remove it"
            )
    return [path for path in visible if path.is_dir()]


def _pictures(folder: Path, names: list[str]) -> Iterator[tuple[str, Path, int]]:
    """Yield the pictures of class folders: name, file and label."""
    Image.init()
    endings = {end for end, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for inner in _folders(folder):
        if _folders(inner):
            raise DataError(f"{inner} holds folders, expected pictures only; it is a class")
        files = [file for file in visible_paths(inner) if file.suffix.lower() in endings]
        if not files:
            raise DataError(f"{inner} holds no pictures; fill it, or remove it")
        for file in files:
            yield f"{inner.name}/{file.name}", file, names.index(_class_name(inner.name))


def _class_name(name: str) -> str:
    """Return a name in the form of letters with their accents: systems store it in two forms."""
    return unicodedata.normalize("NFC", name)


def _grey_rows(
    pictures: Iterable[tuple[str, Image.Image | Path, int]], place: str
) -> list[np.ndarray]:
    """Return named pictures in grey from 0 to 1, (count, height, width), and their labels."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    current, picture = "image 0", None
    try:
        for name, picture, label in pictures:
            current = name
            missing = "picture" if picture is None else "class" if label is None else ""
            if missing:
                raise DataError(f"it has no {missing}")
            with Image.open(picture) if isinstance(picture, Path) else picture as image:
                images.append(grey_levels(image))
            labels.append(label)
            if images[-1].shape != images[0].shape:
                expected, actual = ("x".join(map(str, i.shape)) for i in (images[0], images[-1]))
                raise DataError(
                    f"it has {actual} pixels, expected {expected} as in the first; scale all "
                    "images to one size"
                )
    except UNREADABLE as error:
        if isinstance(picture, Path):
            check_downloaded(picture, "a picture", DataError)
        raise DataError(
            f"{place}: {current} cannot be read: {error}. Save it in another form, or remove it."
        ) from error
    if not images:
        raise DataError(f"{place} holds no images, expected pictures with classes")
    return [np.stack(images), np.array(labels)]


def _read_hub(name: str, repository: str, class_names: tuple[str, ...] | None) -> ImageData:
    """Load the splits train and test of a data set with labelled images."""
    arrays: list[np.ndarray] = []
    names: list[tuple[str, ...]] = []
    files = f"the IDX files {', '.join(IDX_FILES)}" if class_names else "images in class folders"
    for split in SPLITS:
        with hub_split(repository, split, f"put {files} {IN_FOLDER}") as rows:
            split_arrays, split_names = _labelled(rows, repository, f"{repository}, {split}")
            arrays += split_arrays
            names.append(split_names)
    same = _same_names(names, repository)
    return _assembled(name, arrays, class_names or same, white=1)


def _labelled(rows: Any, source: str, place: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return the images and labels of rows of `datasets`, and the names of the classes."""
    kinds = {name: type(kind).__name__ for name, kind in (rows.features or {}).items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    if len(images) != 1 or len(labels) != 1:
        text = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise DataError(
            f"{source} has the columns {text}, expected one Image and one ClassLabel; remove the "
            "others, or save its images in class folders and use their path"
        )
    triples = ((f"image {n}", row[images[0]], row[labels[0]]) for n, row in enumerate(rows))
    return _grey_rows(triples, place), tuple(map(_class_name, rows.features[labels[0]].names))


def _same_names(names: list[tuple[str, ...]], source: str | Path) -> tuple[str, ...]:
    """Return the names of the classes, which numbers of both splits stand for."""
    if len({*names}) > 1:
        train, test = names
        raise DataError(
            f"{source} has the classes {', '.join(train)} to train and {', '.join(test)} to test, "
            "expected the same in the same order"
        )
    return names[0]


def _read_folder(
    name: str, candidates: list[Path], class_names: tuple[str, ...] | None
) -> ImageData:
    """Read the four files from the first folder that has all of them."""
    # The one that lacks fewest: an error should name the files of the likely folder.
    folder = min(candidates, key=lambda candidate: _files(candidate).count(None))
    files = _files(folder)
    missing = [name for name, path in zip(IDX_FILES, files, strict=True) if path is None]
    if missing:
        folder = next(filter(_parquet_files, candidates), folder)
    if missing and not _parquet_files(folder):
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
    if missing:
        return _read_parquet(name, folder, class_names)
    try:
        return _assembled(name, [read_idx(path) for path in files if path], class_names)
    except MemoryLimitError:
        raise
    except BilensError as error:
        raise DataError(f"{folder}: {error}") from error


def _parquet_files(folder: Path) -> dict[str, list[str]]:
    """Return the parquet files of train and of test, named as on the hub; none if one lacks."""
    files: dict[str, list[str]] = {}
    for split in SPLITS:
        paths = [*folder.glob(f"{split}-*.parquet"), *folder.glob(f"data/{split}-*.parquet")]
        files[split] = sorted(map(str, paths))
    return files if all(files.values()) else {}


def _read_parquet(name: str, folder: Path, class_names: tuple[str, ...] | None) -> ImageData:
    """Read the parquet files of a data set of the hub."""
    arrays: list[np.ndarray] = []
    names: list[tuple[str, ...]] = []
    for split, files in _parquet_files(folder).items():
        try:
            # By default as many rows as the first group has, which may be none.
            rows = datasets.load_dataset(
                "parquet",
                data_files=list(map(glob.escape, files)),
                split="train",
                streaming=True,
                batch_size=1000,
            )
            split_arrays, split_names = _labelled(rows, str(folder), f"{folder}, {split}")
        except DataError:
            raise
        except (*UNREADABLE, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"{folder}, {split}: {error}. Fetch it again.") from error
        arrays += split_arrays
        names.append(split_names)
    same = _same_names(names, folder)
    return _assembled(name, arrays, class_names or same, white=1)


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
    """Return images and labels of both splits as `ImageData`, after a check of their shapes.

    Bytes are divided by `white`; levels of which white is 1 are floats already.
    """
    train_images, train_labels, test_images, test_labels = map(torch.from_numpy, arrays)
    shapes = {images.shape[1:] for images in (train_images, test_images)}
    kinds = {images.dtype for images in (train_images, test_images)}
    levels = torch.float32 if white == 1 else torch.uint8
    if len(shapes) > 1 or train_images.ndim != 3 or kinds != {levels}:
        raise DataError(
            f"the images are {tuple(train_images.shape)} and {tuple(test_images.shape)}, "
            f"{' and '.join(map(str, kinds))}; expected bytes (count, height, width) of one size"
        )
    if class_names is None:
        labels = torch.cat([train_labels.flatten(), test_labels.flatten()])
        largest = int(labels.max()) if len(labels) else 0
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
    options = {"test_size": 0.2, "random_state": seed, "stratify": labels}
    parts = model_selection.train_test_split(images, labels, **options)
    return _assembled("digits", [parts[i] for i in (0, 2, 1, 3)], tuple("0123456789"), white=16)


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file of bytes, (count, height, width) or (count,); packed if it ends in .gz.

    The file begins with two zero bytes, the type (8 for bytes), the number of axes, and the size of
    each axis in 4 bytes. The values follow, with the last axis fastest.

    Raises:
        DataError: the file cannot be read, or is not one.

    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", file formats.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            zeros, code, axes = struct.unpack(">2sBB", file.read(4))
            # Named, since a file of another type is not damaged.
            if zeros != b"\0\0" or code not in IDX_TYPES:
                raise ValueError("it does not begin as one")
            if code != BYTES:
                raise DataError(f"{path} holds {IDX_TYPES[code]}, expected bytes; save it as bytes")
            shape = struct.unpack(f">{axes}I", file.read(4 * axes))
            # A small packed file may be any size: no more is read than it says that it holds.
            check_memory(math.prod(shape), f"The {math.prod(shape):,} bytes of {path}")
            content = file.read(math.prod(shape) + 1)
        return np.frombuffer(content, np.uint8).reshape(shape).copy()
    except BilensError:
        raise
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        if path.is_file():
            check_downloaded(path, "an IDX file", DataError)
        raise DataError(
            f"{path} cannot be read as an IDX file of bytes: {error}. Fetch it again."
        ) from error
