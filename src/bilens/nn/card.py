"""The card of a model, its README.md: what it is, its settings, numbers and use."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from bilens.errors import CheckpointError
from bilens.files import read_json_object, write_text

CARD_NAME = "README.md"
USE = '## Use\n\n```python\nimport bilens\n\nmodel = bilens.load("{0}")\n```\n'


def model_card(
    settings: Mapping[str, Any], source: str | Path | None = None, repo_id: str = ""
) -> ModelCard:
    """Return the card of a model, by the settings of its config.json.

    `source` is the directory of its training, if any, and `repo_id` its place on the hub.
    """
    kind = str(settings.get("model_type"))
    library, task = "transformers", "text-generation"
    about = "A causal language model whose weights bilens reads."
    if kind == "image-classifier":
        library, task = "bilens", "image-classification"
        about = "An image classifier whose weights are tensors, which bilens decomposes exactly."
    data = ModelCardData(library_name=library, pipeline_tag=task, tags=["bilens", kind])
    title = repo_id.rpartition("/")[2] or Path(source or "").name or "A model"
    tables = {"Settings": settings} | (_training(Path(source)) if source else {})
    parts = [f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n{about}"]
    parts += [f"## {head}\n\n{_table(values)}" for head, values in tables.items() if values]
    return ModelCard("\n\n".join([*parts, USE.format(repo_id or "OWNER/NAME")]))


def write_card(
    directory: Path, settings: Mapping[str, Any], source: str | Path | None = None
) -> None:
    """Write the card of a model that is in `directory`, unless it has one."""
    path = directory / CARD_NAME
    if not path.exists():
        write_text(path, str(model_card(settings, source)))


def _training(run: Path) -> dict[str, dict[str, Any]]:
    """Return settings and last numbers of a training, each empty without its file."""
    record: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    with suppress(CheckpointError):
        record = read_json_object(run / "training.json")
    with suppress(OSError, ValueError, TypeError):  # lines before a damaged one count
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            numbers.update(json.loads(line))
    if "data" in record:
        # Without its folder on this machine.
        record = {**record, "data": Path(str(record["data"])).name, "data_dir": None}
    return {"Training": record, "Last numbers": numbers}


def _table(values: Mapping[str, Any]) -> str:
    """Return a table of the numbers and words; nested values are left out."""
    rows = [
        f"| {name} | {f'{value:.5g}' if isinstance(value, float) else value} |".replace("\n", " ")
        for name, value in values.items()
        if isinstance(value, int | float | str) and not name.startswith("_")
    ]
    return "\n".join(["| name | value |", "|---|---|", *rows])
