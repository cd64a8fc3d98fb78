"""The Hugging Face hub, asked once whether it answers, and the folders that replace it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub import constants, errors, get_session

from bilens.errors import BilensError, DataError
from bilens.lazy_imports import datasets

HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # of its http client

PATIENCE = 3.0
"""Seconds until a hub that does not answer counts as out of reach."""


@contextmanager
def hub_asked_once() -> Iterator[None]:
    """Within, Hugging Face's libraries use only what they have kept if the hub does not answer now.

    Without this each of them asks six times, over 23 seconds, and prints every failure.
    """
    offline = not constants.HF_HUB_OFFLINE and not _answers()
    # datasets keeps a copy of the setting of its own.
    places = [constants, *(m for m in [sys.modules.get("datasets.config")] if m)]
    before = {place: place.HF_HUB_OFFLINE for place in places}
    try:
        if offline:
            _set(dict.fromkeys(places, True))
        yield
    finally:
        _set(before)


def _set(settings: dict[ModuleType, bool]) -> None:
    for place, offline in settings.items():
        place.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except HTTPError:
        return False
    return True


def is_folder(path: str | Path) -> bool:
    """Return True if a path is a folder; False for names that the file system rejects."""
    return os.path.isdir(path)  # noqa: PTH112  pathlib raises for names that are too long


def named_folder(data_dir: str | Path | None) -> Path | None:
    """Return the folder of data sets in `data_dir`, else in BILENS_DATA, else None.

    Raises:
        DataError: the folder does not exist.
    """
    origin = "BILENS_DATA" if data_dir is None else "data_dir"
    folder = os.environ.get("BILENS_DATA", "") if data_dir is None else str(data_dir)
    if folder and not is_folder(folder):
        raise DataError(f"{origin}={folder!r} is not a folder; correct it, or leave it out")
    return Path(folder) if folder else None


@contextmanager
def hub_split(repository: str, split: str, instead: str, **how: Any) -> Iterator[Any]:
    """Open a split of a data set of the hub, or the copy of it in the cache of `datasets`.

    Args:
        repository: name of the data set on the hub.
        split: name of the split.
        instead: files that would do as well, for error messages.
        how: passed to `datasets.load_dataset`.

    Raises:
        DataError: the hub is out of reach, also inside the block, or has other data.
    """
    try:
        with hub_asked_once():
            yield datasets.load_dataset(repository, split=split, **how)
    except BilensError:
        raise
    except (OSError, ValueError, KeyError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{repository}, split {split}, could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Connect to the hub, or put {instead} into a "
            "folder and name it: --data-dir (data_dir), or BILENS_DATA."
        ) from error
