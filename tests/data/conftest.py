"""A small writer of IDX files, apart from the reader, folders of them, and pictures."""

import gzip
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image, ImageOps

WriteIdx = Callable[..., Path]

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
NAMES += ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
RAMP = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (4, 1))
LEVELS = RAMP / 255
GREY = Image.fromarray(RAMP)


def clear(mode, ink):
    """Return a picture whose ink shows only by its opacity."""
    picture = Image.new(mode, GREY.size, ink)
    picture.putalpha(ImageOps.invert(GREY))
    return picture


@pytest.fixture
def serve(monkeypatch):
    """Make the hub serve columns of a split, and return the list of its requests."""

    def start(features, columns):
        asked = []

        def load_dataset(repository, *, split):
            asked.append((repository, split))
            return datasets.Dataset.from_dict(columns(split), datasets.Features(features))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return start


@pytest.fixture
def write_idx() -> WriteIdx:
    """Write an array as an IDX file, in gzip if the name ends so."""

    def write(path: Path, array: np.ndarray) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        content = bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


@pytest.fixture
def tiny_set() -> list[np.ndarray]:
    """Images and labels of 12 training and 5 test examples, 4 by 3 pixels, 10 classes."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, 256, (12, 4, 3), dtype=np.uint8),
        np.arange(12, dtype=np.uint8) % 10,
        random.integers(0, 256, (5, 4, 3), dtype=np.uint8),
        np.arange(5, dtype=np.uint8),
    ]


@pytest.fixture
def write_set(write_idx: WriteIdx, tiny_set: list[np.ndarray]) -> WriteIdx:
    """Write the tiny set into a folder; `replaced` puts other arrays at positions of NAMES."""

    def write(folder, *, ending="", dotted=False, replaced=()):
        arrays = dict(enumerate(tiny_set)) | dict(replaced)
        for position, name in enumerate(NAMES):
            spelled = name.replace("-idx", ".idx") if dotted else name
            write_idx(folder / f"{spelled}{ending}", arrays[position])
        return folder

    return write
