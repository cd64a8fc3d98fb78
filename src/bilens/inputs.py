"""Texts and images by name, or those that a model was trained on, for analyses of a model.

`datasets` and `bilens.data` load by name; only the record of a training knows the rest.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilens.analysis import Load
from bilens.data import ImageData, load_images
from bilens.data.corpus import LANGUAGES
from bilens.data.image_sets import KNOWN, is_known_images
from bilens.data.texts import HUB, text_files
from bilens.errors import BilensError, DataError
from bilens.hub import is_folder
from bilens.lazy_imports import lazy_import
from bilens.models import FILES
from bilens.progress import logger
from bilens.train.run_directory import TRAINING_NAME, is_other_data, read_training
from bilens.train.settings import OWN_TEXT

if TYPE_CHECKING:
    from bilens import language
else:  # transformers takes seconds to import, and images do without it.
    language = lazy_import("bilens.language")


def loader(model: Any, source: str | Path) -> Load:
    """Return a function that loads the data of a model that was opened from a source.

    By default that is the data of the training, if the analysis needs any.
    """

    def load(settings: Mapping[str, Any], images: bool, optional: bool) -> Any:
        name, folder = settings.get("data"), settings.get("data_dir")
        if not name and optional:
            if folder is not None:
                raise BilensError(f"data_dir={str(folder)!r} is the folder of data; give data too")
            return None
        data = data_for(model, source, name, folder, images=images)
        return data.to(model.device) if isinstance(data, ImageData) else data

    return load


def data_for(
    model: Any,
    source: str | Path,
    name: str | None = None,
    folder: str | Path | None = None,
    *,
    images: bool,
) -> Any:
    """Return images or texts for a model by their name; by default those of its training.

    Args:
        model: the model, whose tokenizer reads texts.
        source: place of the model, with the record of its training.
        name: name of other data than that of the training.
        folder: folder of the data. For data of the training, if it is not where it was.
        images: whether to load images.

    Raises:
        BilensError: there is no name and no record of a training, or the folder has no effect.
        DataError: the data is missing or damaged. Or it is not that of the training, by the digest
            in training.json, and no name was given.
    """
    record: Mapping[str, Any] = {}
    if not name:
        if not (images or names_data(source)):
            raise BilensError(
                f"{source} does not say what it was trained on; name texts or images with --data, "
                "such as --data tinystories, --data FILE.txt or --data mnist"
            )
        record = read_training(source)
        name, folder = _place(source, record, folder)
    else:
        check_folder(folder, name)
    if images:
        data: Any = load_images(name, folder, record.get("data_seed", 0))
    else:
        data = language.corpus_for(model, name, folder)
    if record and "data_digest" not in record and Path(name).exists():
        logger.warning(
            "%s was trained by an earlier version, which kept no digest of its data; %s may be "
            "other data",
            source,
            name,
        )
    elif record and is_other_data(record, data.provenance):
        raise DataError(
            f"{source} was trained on other data than {name} holds now, by the digest in its "
            f"{TRAINING_NAME}. Restore the data, or name its place by data_dir; "
            "commands with --data read other data on purpose."
        )
    return data


def _place(
    source: str | Path, record: Mapping[str, Any], folder: str | Path | None
) -> tuple[str, str | Path | None]:
    """Return the name and the folder by which the data of a training is loaded again."""
    name, before = str(record["data"]), record.get("data_dir")
    if not Path(name).is_absolute():
        if folder is not None:
            check_folder(folder, name)
        return name, before if folder is None and before and is_folder(before) else folder
    path = Path(name)
    if folder is not None:
        inside = Path(folder) / path.name
        path = inside if inside.exists() else Path(folder)
    if not path.exists():
        raise DataError(
            f"{source} was trained on {name}, and {path} does not exist; name the place of that "
            "data by data_dir"
        )
    return str(path), None


def is_known(data: str) -> bool:
    """Return True for the name of a data set, which goes before a file or folder of this name."""
    return is_known_images(data) or data in LANGUAGES or data in HUB


def names_data(source: str | Path) -> bool:
    """Return True if a run says which data it was trained on."""
    has_record = (Path(source) / TRAINING_NAME).is_file()
    return has_record and read_training(source)["data"] != OWN_TEXT


def check_folder(data_dir: str | Path | None, *data: str) -> None:
    """Raise if a folder is named in which nothing is looked up, of one set of data or several."""
    looked_up = {*KNOWN, *HUB}
    if data_dir is not None and not data:
        raise BilensError(f"data_dir={str(data_dir)!r} is the folder of data; give data too")
    if data_dir is not None and not looked_up.intersection(data):
        raise BilensError(
            f"data_dir={str(data_dir)!r} has no effect on data={', '.join(data)!r}: it is the "
            f"folder of {', '.join(sorted(looked_up))}; leave it out"
        )


def check_data(source: str | Path, data: str | None, data_dir: str | Path | None = None) -> None:
    """Raise, before a model on this machine is opened, if its data is not named or not there.

    Raises:
        BilensError: data_dir has no effect on the data.
        DataError: a language model in a file is to read texts that do not exist, or the data of
            the training is gone.
    """
    if data is not None:
        check_folder(data_dir, data)
    is_file = Path(source).suffix in FILES
    if is_file and data is not None and data not in LANGUAGES:
        text_files(data, data_dir)
    elif data is None and names_data(source):
        _place(source, read_training(source), data_dir)
