"""A data set in a folder: four IDX files, under the names in which they are handed around."""

from collections.abc import Sequence
from pathlib import Path

from bilens.data.idx import read_idx
from bilens.data.raw import RawSplit
from bilens.errors import DataError

__all__ = ["IDX_FILES", "read_folder", "read_known_folder"]

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# Where a data set lies below the folder that holds several: by our name, and as torchvision
# unpacks it.
_SUBFOLDERS = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
}


def read_known_folder(name: str, folder: Path, origin: str) -> tuple[RawSplit, RawSplit]:
    """Read the training and test split of `name` from `folder` or from its own sub-folder.

    A sub-folder named after the data set goes before files in the folder itself. `origin` says in
    the errors who asked for the folder.

    Raises:
        DataError: No folder, no complete set of files, a folder that by its name holds another
            known data set, or a damaged file.
    """
    if not folder.is_dir():
        raise DataError(f"{origin}: expected a folder of IDX files, found no folder {folder}")
    candidates = [*(folder / sub for sub in _SUBFOLDERS[name]), folder]
    paths = _complete(candidates, f"{origin}: {name}")
    if paths[0].parent == folder:
        _refuse_other_set(name, folder, origin)
    return _read(paths)


def read_folder(folder: Path) -> tuple[RawSplit, RawSplit]:
    """Read the training and test split from the four IDX files directly in `folder`.

    Raises:
        DataError: No complete set of files, or a damaged file.
    """
    return _read(_complete([folder], "data set"))


def _refuse_other_set(name: str, folder: Path, origin: str) -> None:
    # All known sets have the same sizes and labels, so only the name of the folder can tell them
    # apart.
    parts = folder.resolve().parts
    for other, subfolders in _SUBFOLDERS.items():
        for sub in subfolders:
            ending = Path(sub).parts
            if other != name and parts[-len(ending) :] == ending:
                raise DataError(
                    f"{origin}: expected {name}, found a folder of {other} by its name: {folder}. "
                    "Give the folder above it, or rename it"
                )


def _complete(candidates: Sequence[Path], wanted: str) -> list[Path]:
    """Return the four files of the first candidate that has them all."""
    found = [[_existing(folder, name) for name in IDX_FILES] for folder in candidates]
    for paths in found:
        whole = [path for path in paths if path]
        if len(whole) == len(IDX_FILES):
            return whole
    nearest = min(range(len(candidates)), key=lambda index: found[index].count(None))
    missing = [name for name, path in zip(IDX_FILES, found[nearest], strict=True) if path is None]
    raise DataError(
        f"{wanted}: expected the IDX files {', '.join(IDX_FILES)} (each also with .gz, or with a "
        f"dot in place of the dash before idx) in {' or '.join(map(str, candidates))}; "
        f"{candidates[nearest]} lacks {', '.join(missing)}"
    )


def _existing(folder: Path, name: str) -> Path | None:
    dotted = name.replace("-idx", ".idx")
    # Unpacked files first: they are quicker to read, and torchvision leaves both.
    for spelling in (name, dotted, f"{name}.gz", f"{dotted}.gz"):
        path = folder / spelling
        if path.is_file():
            return path
    return None


def _read(paths: Sequence[Path]) -> tuple[RawSplit, RawSplit]:
    train_images, train_labels, test_images, test_labels = paths
    return _split(train_images, train_labels), _split(test_images, test_labels)


def _split(images: Path, labels: Path) -> RawSplit:
    return RawSplit(read_idx(images), read_idx(labels), str(images), str(labels))
