"""The Hugging Face hub, the folders that replace it, and the cards of models, their README.md."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, constants, errors, get_session

from bilens.errors import CheckpointError, DataError
from bilens.files import read_json_object, write_text
from bilens.lazy_imports import datasets

HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # of its http client

_LOCK = RLock()


def hub_options(source: str | Path) -> dict[str, Any]:
    """Return options of a download: for a repository only kept files, if the hub does not answer.

    Without them Hugging Face's libraries ask six times, over 23 seconds, and print every failure.
    """
    silent = not Path(source).exists() and not constants.HF_HUB_OFFLINE and not _answers()
    return {"local_files_only": True} if silent else {}


def place_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options of a loading that say where files are, for each of its files."""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download")
    return {name: options[name] for name in names if name in options}


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
def hub_split(repository: str, split: str, instead: str, **how: Any) -> Iterator[Any]:
    """Open a split of a data set of the hub, or the copy of it in the cache of `datasets`.

    `instead` are files that would do as well, for errors; `how` goes to `datasets.load_dataset`.

    Raises:
        DataError: the hub is out of reach, also inside the block, or has other data.
    """
    reached = (OSError, HTTPError, datasets.exceptions.DatasetsError)
    try:
        try:
            with _hub_asked_once():
                rows = datasets.load_dataset(repository, split=split, **how)
        except (ValueError, KeyError) as error:  # a split or a file that it does not have
            raise datasets.exceptions.DatasetsError(str(error)) from error
        yield rows
    except reached as error:
        raise DataError(
            f"{repository}, split {split}, could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Connect to the hub, or put {instead} into a "
            "folder and name it: --data-dir (data_dir), or BILENS_DATA."
        ) from error


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
    about, code, task = ABOUT[library]
    processing = settings.get("bilens_processing") or {}
    biases = ["added_biases"] if processing.get("added_biases") else []
    reasons = {kind, *settings, *biases} & WHY_NOT.keys()
    plain = WHY_NOT[reasons.pop()] if reasons else PLAIN.format(repo_id)
    data = ModelCardData(library_name=library, pipeline_tag=task, tags=["bilens", kind])
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {title or 'A model'}\n\n{about}.",
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
