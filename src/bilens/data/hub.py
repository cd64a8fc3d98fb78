"""Where data sets come from: a folder that was named, or the Hugging Face hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bilens.errors import BilensError, DataError
from bilens.hub import HTTPError, hub_asked_once
from bilens.lazy_imports import datasets


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder; a name that the file system does not take is none."""
    return os.path.isdir(path)  # noqa: PTH112  pathlib raises for names that are too long


def named_folder(data_dir: str | Path | None) -> Path | None:
    """The folder of data sets that `data_dir` names, or else BILENS_DATA; None if neither does.

    Raises:
        DataError: it is not there.
    """
    origin = "BILENS_DATA" if data_dir is None else "data_dir"
    folder = os.environ.get("BILENS_DATA", "") if data_dir is None else str(data_dir)
    if folder and not is_folder(folder):
        raise DataError(f"{origin}={folder!r} is not a folder; correct it, or leave it out")
    return Path(folder) if folder else None


@contextmanager
def hub_split(repository: str, split: str, instead: str, **how: Any) -> Iterator[Any]:
    """A split of a data set of the hub, or what `datasets` has kept of it.

    Args:
        repository: its name on the hub.
        split: name of the split.
        instead: files that do as well, for errors.
        how: passed to `datasets.load_dataset`.

    Raises:
        DataError: the hub is out of reach, within the block too, or has other data.
    """
    try:
        with hub_asked_once():
            yield datasets.load_dataset(repository, split=split, **how)
    except BilensError:
        raise
    except (OSError, ValueError, KeyError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{repository}, split {split}, could not be had from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Connect to the hub, or put {instead} into a "
            "folder and name it: --data-dir (data_dir), or BILENS_DATA."
        ) from error
