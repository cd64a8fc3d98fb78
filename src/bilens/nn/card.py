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
AGREEMENT_NAME = "tensorise.json"
"""File in a run of `bilens tensorise` with its agreement with the original after each stage."""

ABOUT = {
    "bilens": (
        "An image classifier whose layers multiply two linear maps, so that its weights are "
        "tensors that can be decomposed exactly",
        'model = bilens.load("{0}")\nmodel.tensors()[0].svd()  # from pixels, in few directions',
        "image-classification",
    ),
    "transformers": (
        "A causal language model whose weights bilens reads: n-grams, heads, eigenvectors, flows",
        'model = bilens.load("{0}")\nmodel.ov(0)  # what heads of layer 0 write, from the weights',
        "text-generation",
    ),
}
WHY_NOT = {
    "image-classifier": "Plain transformers does not know this architecture; bilens opens it.",
    "bilens-language": "Plain transformers does not know this architecture. After "
    "`import bilens.nn.language` its `AutoModelForCausalLM` opens, trains and runs it.",
    "bilens_swish": "Plain transformers does not open it: the activation is half-way to a line. "
    "`bilens export` makes an ordinary checkpoint once it is one.",
    "bilens_linear_gates": "Plain transformers does not open it: the gates of some layers are "
    "linear and those of others are not. bilens opens it.",
    "bilens_eight_bits": "Plain transformers does not open it: its weights are stored in eight "
    "bits. bilens opens it, and saves it as an ordinary checkpoint.",
    "added_biases": "Plain transformers does not open it: processing has given maps biases that "
    "it has no room for. bilens opens it.",
}
PLAIN = """It runs in plain transformers, without bilens:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{0}")
```"""


def model_card(
    settings: Mapping[str, Any], source: str | Path | None = None, repo_id: str = ""
) -> ModelCard:
    """Return the card of a model, by the settings of its config.json.

    `source` is the directory of its training, if any, and `repo_id` its place on the hub.
    """
    title, repo_id = repo_id.rpartition("/")[2] or Path(source or "").name, repo_id or "OWNER/NAME"
    kind = str(settings.get("model_type"))
    library = "bilens" if kind == "image-classifier" else "transformers"
    description, code, task = ABOUT[library]
    processing = settings.get("bilens_processing") or {}
    biases = ["added_biases"] if processing.get("added_biases") else []
    reasons = {kind, *settings, *biases} & WHY_NOT.keys()
    plain = WHY_NOT[reasons.pop()] if reasons else PLAIN.format(repo_id)
    data = ModelCardData(library_name=library, pipeline_tag=task, tags=["bilens", kind])
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {title or 'A model'}\n\n{description}.",
        _table("setting", settings),
    ]
    trained, metrics = _training(Path(source)) if source else ({}, {})
    if trained:
        parts += ["## Training", _table("setting", trained)]
    if metrics:
        parts += ["## Numbers", "The last of each, from `metrics.jsonl`.", _table("what", metrics)]
    if source and (agreement := _agreement(Path(source))):
        parts += ["## Agreement with the original", agreement]
    parts += ["## Use", f"```python\nimport bilens\n{code.format(repo_id)}\n```", plain]
    return ModelCard("\n\n".join(parts) + "\n")


def write_card(
    directory: Path, settings: Mapping[str, Any], source: str | Path | None = None
) -> None:
    """Write the card of a model that is in `directory`, unless it has one."""
    path = directory / CARD_NAME
    if not path.exists():
        write_text(path, str(model_card(settings, source)))


def _training(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings and last numbers of a training, each empty without its file."""
    trained: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    with suppress(CheckpointError):
        trained = read_json_object(run / "training.json")
    with suppress(OSError, ValueError, TypeError):  # lines before a damaged one count
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            metrics.update(json.loads(line))
    if "data" in trained:
        trained["data"] = Path(str(trained["data"])).name  # without its folder on this machine
        trained.pop("data_dir", None)
    return trained, metrics


def _agreement(run: Path) -> str:
    """Return a table of a tensor's losses on held-out texts; empty without its file."""
    rows = []
    with suppress(CheckpointError, KeyError, TypeError, AttributeError, ValueError):
        for stage, texts in read_json_object(run / AGREEMENT_NAME).items():
            for text, row in texts.items():
                numbers = f"{row['loss']:.4f} | {row['rise']:+.4f} | {row['kl']:.4f}"
                rows.append(f"| {stage} | {text} | {numbers} | {row['top1']:.1%} |")
    names = "stage | held-out text | loss, nats a token | above the original | KL | same top token"
    return "\n".join([f"| {names} |", "|---|---|---|---|---|---|", *rows]) if rows else ""


def _table(head: str, values: Mapping[str, Any]) -> str:
    """Return a table of the numbers and words; nested values are left out."""
    rows = [
        f"| {name} | {f'{value:.5g}' if isinstance(value, float) else value} |".replace("\n", " ")
        for name, value in values.items()
        if isinstance(value, int | float | str) and not name.startswith("_")
    ]
    return "\n".join([f"| {head} | value |", "|---|---|", *rows])
