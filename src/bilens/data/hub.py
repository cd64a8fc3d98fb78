"""MNIST and its kin from the Hugging Face hub, for when no local folder is given."""

from typing import Any

import numpy as np

from bilens.data.folder import IDX_FILES
from bilens.data.raw import RawSplit
from bilens.errors import DataError

__all__ = ["HUB_REPOSITORIES", "read_hub"]

HUB_REPOSITORIES = {
    "mnist": "ylecun/mnist",
    "fashion-mnist": "zalando-datasets/fashion_mnist",
}


def read_hub(name: str) -> tuple[RawSplit, RawSplit]:
    """Read the training and test split of `name` from the hub, or from its local cache.

    Raises:
        DataError: The hub gave no such data (the cause is chained and the message says how to do
            without it), or images that are not grey, 8 bits, and of one size.
    """
    repository = HUB_REPOSITORIES[name]
    try:
        return _read_split(repository, "train"), _read_split(repository, "test")
    except DataError:
        raise
    except Exception as cause:
        # The hub fails in the families of at least four libraries (datasets, huggingface_hub, its
        # http client, OSError), and for all of them the way out is the same.
        raise DataError(
            f"{name}: expected the data set {repository} from the Hugging Face hub, found "
            f"{type(cause).__name__}: {cause}. Either pass data_dir (--data-dir) or set "
            f"BILENS_DATA to a folder with the IDX files {', '.join(IDX_FILES)}, or connect to "
            "the hub and try again"
        ) from cause


def _read_split(repository: str, split: str) -> RawSplit:
    # datasets takes seconds to import, and local files do without it.
    import datasets  # noqa: PLC0415

    rows = datasets.load_dataset(repository, split=split)
    source = f"{repository}, split {split}"
    images = rows["image"][:]  # iterating takes nearly twice as long
    _check_images(images, f"{source}, column image")
    return RawSplit(
        images=np.stack([np.asarray(image) for image in images]) if images else np.empty((0, 0, 0)),
        labels=np.asarray(rows["label"][:], dtype=np.int64),
        images_from=f"{source}, column image",
        labels_from=f"{source}, column label",
    )


def _check_images(images: list[Any], source: str) -> None:
    kinds = sorted({f"{image.mode} {image.height}x{image.width}" for image in images})
    if len(kinds) > 1 or any(not kind.startswith("L ") for kind in kinds):
        raise DataError(
            f"{source}: expected grey 8-bit images of one size (mode L), found {', '.join(kinds)}"
        )
