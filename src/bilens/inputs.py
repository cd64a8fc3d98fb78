"""Texts and images by name, for analyses of a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bilens.data import ImageData, load_images
from bilens.data.corpus import LANGUAGES
from bilens.data.images import KNOWN
from bilens.data.texts import HUB, text_files
from bilens.errors import BilensError
from bilens.models import FILES
from bilens.options import Loader
from bilens.read.language import corpus_for
from bilens.train.run_directory import TRAINING_NAME, read_training
from bilens.train.settings import OWN_TEXT


def loader(model: Any, source: str | Path) -> Loader:
    """Return a function that loads the data of a model that was opened from a source.

    By default that is the data of the training, if the analysis needs any.
    """

    def load(kind: type, settings: Mapping[str, Any], optional: bool) -> Any:
        name, folder = settings.get("data"), settings.get("data_dir")
        if not name and optional:
            if folder is not None:
                raise BilensError(f"data_dir={str(folder)!r} is the folder of data; give data too")
            return None
        name = name or data_of(source)
        check_folder(name, folder)
        if kind is ImageData:
            return load_images(name, folder).to(model.device)
        return corpus_for(model, name, folder)

    return load


def data_of(source: str | Path) -> str:
    """Return the name of the data that a run was trained on."""
    known = (Path(source) / TRAINING_NAME).is_file()
    data = str(read_training(source)["data"]) if known else OWN_TEXT
    if data == OWN_TEXT:
        raise BilensError(
            f"{source} does not say what it was trained on; name texts or images with --data, such "
            "as --data tinystories, --data FILE.txt or --data mnist"
        )
    return data


def check_folder(data: str, data_dir: str | Path | None) -> None:
    """Raise if a folder is named in which nothing is looked up."""
    looked_up = (*KNOWN, *HUB)
    if data_dir is not None and data not in looked_up:
        raise BilensError(
            f"data_dir={str(data_dir)!r} has no effect on data={data!r}: it is the folder of "
            f"{', '.join(looked_up)}; leave it out"
        )


def check_data(source: str | Path, data: str | None, data_dir: str | Path | None = None) -> None:
    """Raise, before a model on this machine is opened, if its data is not named or not there.

    Raises:
        BilensError: the model has no record of its training, or data_dir has no effect on its data.
        DataError: a language model in a file is to read texts that do not exist.
    """
    if data is not None:
        check_folder(data, data_dir)
    is_file = Path(source).suffix in FILES
    if is_file and data is not None and data not in LANGUAGES:
        text_files(data, data_dir)
    elif data is None and (is_file or Path(source).is_dir()):
        data_of(source)
