"""The Hugging Face hub, and the folders that replace it.

`datasets` and `huggingface_hub` load; what is here keeps them from asking a hub that is away.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from threading import RLock
from typing import Any

from huggingface_hub import constants, errors, get_session

from bilens.errors import BilensError, DataError
from bilens.lazy_imports import datasets

HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # of its http client

IN_FOLDER = "into a folder and name it: data_dir, or BILENS_DATA"
"""Where files stand in place of the hub."""

_LOCK = RLock()


def hub_options(source: str | Path) -> dict[str, Any]:
    """Return options of a download: for a repository only kept files, if the hub does not answer.

    Without them Hugging Face's libraries ask six times, over 23 seconds, and print every failure.
    """
    silent = not Path(source).exists() and not constants.HF_HUB_OFFLINE and not _answers()
    return {"local_files_only": True} if silent else {}


PLACE = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download")
"""Options of a loading that say where files are."""


def place_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options of a loading that say where each of its files is."""
    return {name: options[name] for name in PLACE if name in options}


def check_used(kind: str, options: Mapping[str, Any], *used: str) -> None:
    """Raise if a loading is asked for what models of a kind do not use."""
    for name, value in options.items():
        if name not in used and value is not None and value is not False:
            near = get_close_matches(name, used, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; leave it out"
            raise BilensError(f"{name}={value!r} is not used by {kind}{hint}")


@contextmanager
def _hub_asked_once() -> Iterator[None]:
    """Within, `datasets` uses only what it has kept if the hub does not answer now."""
    # It has no option for this, only settings of the whole process: one thread at a time.
    with _LOCK:
        offline = constants.HF_HUB_OFFLINE or not _answers()
        places: tuple[Any, ...] = (constants, datasets.config)
        before = [place.HF_HUB_OFFLINE for place in places]
        try:
            for place in places:
                place.HF_HUB_OFFLINE = place.HF_HUB_OFFLINE or offline
            yield
        finally:
            for place, setting in zip(places, before, strict=True):
                place.HF_HUB_OFFLINE = setting


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=3.0)
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
def hub_split(repository: str, split: str, instead: str, **options: Any) -> Iterator[Any]:
    """Open a split of a data set of the hub, or the copy of it in the cache of `datasets`.

    `instead` is what would do as well, for errors; `options` go to `datasets.load_dataset`.

    Raises:
        DataError: the hub is out of reach, also inside the block, or has other data.
    """
    problems = (OSError, HTTPError, datasets.exceptions.DatasetsError)
    try:
        try:
            with _hub_asked_once():
                rows = datasets.load_dataset(repository, split=split, **options)
        except (ValueError, KeyError) as error:  # a split or a file that it does not have
            raise datasets.exceptions.DatasetsError(str(error)) from error
        yield rows
    except problems as error:
        raise DataError(
            f"{repository}, split {split}, could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Connect to the hub, or {instead}."
        ) from error
