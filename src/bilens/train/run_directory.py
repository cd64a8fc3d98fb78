"""The directory of a training: its settings, its metrics and the checkpoints that it goes on from.

Whatever moment a training is killed at, what it left is whole: a checkpoint is written to the side
with the checksums of its files, and renamed.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bilens.errors import CheckpointError
from bilens.files import (
    UNFINISHED,
    file_errors,
    only_process_in,
    read_json,
    read_json_object,
    temporary_beside,
    write_json,
    write_safetensors,
    write_text,
)
from bilens.model_card import CARD_NAME, model_card
from bilens.nn.checkpoint import CONFIG_NAME, WEIGHTS_NAME, fetch, read_config
from bilens.progress import tell
from bilens.train.tracker import check_tracker, open_tracker

__all__ = [
    "CHECKPOINTS",
    "METRICS_NAME",
    "TRAINING_NAME",
    "RunDirectory",
    "is_begun",
    "is_finished",
    "open_run",
    "part",
    "read_metrics",
    "read_training",
]

TRAINING_NAME = "training.json"
"""The file in a run that says what it was trained on and with, and whether it has ended."""
METRICS_NAME = "metrics.jsonl"
"""The file in a run with a line for each record of its metrics."""
CHECKPOINTS = "checkpoints"
"""The folder in a run that holds its last two checkpoints."""

DRAFTS = f"{UNFINISHED}{CHECKPOINTS}"
MANIFEST = "manifest.json"
KEPT = 2
STATE_NAME = "training_state.safetensors"
OWN = ("torch", "finished")


@dataclass
class RunDirectory:
    """A run that is being written.

    Attributes:
        path: where it is.
        settings: of the training, such as JSON holds them.
        finished: whether the training has ended.
        track: hands a record of the metrics to the tracker.
    """

    path: Path
    settings: dict[str, Any]
    finished: bool = False
    track: Callable[[dict[str, Any]], None] = field(default=lambda record: None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes are handed a run without its tracker, which one alone may write to."""
        return RunDirectory, (self.path, self.settings, self.finished)

    def draft(self, step: int) -> Path:
        """The folder that the files of a checkpoint are written to first."""
        return self.path / DRAFTS / f"checkpoint-{step}"

    def keep(self, draft: Path) -> None:
        """Make a checkpoint of what was written to its draft, and remove the oldest."""
        write_json(draft / MANIFEST, _checksums(draft))
        target = self.path / CHECKPOINTS / draft.name
        with file_errors(target):
            target.parent.mkdir(exist_ok=True)
            if target.exists():  # stopped behind the last step of an epoch, and saved there again
                self._remove(target)
            draft.rename(target)
            draft.parent.rmdir()
        for old in self._checkpoints()[KEPT:]:
            self._remove(old)

    def save_state(
        self, step: int, record: Mapping[str, Any], **parts: Mapping[str, Tensor]
    ) -> None:
        """Make a checkpoint of named tensors in parts, and of a record such as JSON holds them."""
        draft = self.draft(step)
        tensors = {f"{kind}.{name}": t for kind, part in parts.items() for name, t in part.items()}
        write_safetensors(draft / STATE_NAME, tensors, {"record": json.dumps(record)})
        self.keep(draft)

    def load_state(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The record of the newest checkpoint, and its tensors by part and name."""
        checkpoint = self.newest_checkpoint()
        if checkpoint is None:
            return None
        with safe_open(checkpoint / STATE_NAME, "pt", str(device)) as file:
            # Copied, as the memory of a mapped file is aligned otherwise, and sums would differ.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return json.loads(file.metadata()["record"]), tensors

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is as it was written; damaged ones are removed."""
        for checkpoint in self._checkpoints():
            if _is_whole(checkpoint):
                return checkpoint
            tell(f"{checkpoint} is damaged or incomplete and is passed over.")
            self._remove(checkpoint)
        tell(f"{self.path} has no checkpoint; the training starts from its beginning.")
        return None

    def start_metrics(self, records: list[dict[str, Any]]) -> None:
        """Leave these records alone in the metrics."""
        write_text(self.path / METRICS_NAME, "".join(map(_line, records)))

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append a record to the metrics."""
        path = self.path / METRICS_NAME
        with file_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        self.track(record)

    def finish(self) -> None:
        """Note that the training has ended; everything else has to be written before."""
        self.finished = True
        self.write_settings()
        card = self.path / CARD_NAME
        with file_errors(card):
            model_card(read_config(self.path), self.path).save(card)

    def write_settings(self) -> None:
        """Write the settings, for people and for whoever resumes."""
        own = dict(zip(OWN, (torch.__version__, self.finished), strict=True))
        write_json(self.path / TRAINING_NAME, {**self.settings, **own})

    def _checkpoints(self) -> list[Path]:
        """The newest first."""
        found = (self.path / CHECKPOINTS).glob("checkpoint-*")
        steps = {path: path.name.removeprefix("checkpoint-") for path in found}
        whole = [path for path, step in steps.items() if step.isdigit()]
        return sorted(whole, key=lambda path: int(steps[path]), reverse=True)

    def _remove(self, checkpoint: Path) -> None:
        with file_errors(checkpoint, "removed"):
            # First from its place, so that a half-removed one is never found.
            shutil.rmtree(checkpoint.rename(temporary_beside(self.path / checkpoint.name)))


@contextmanager
def open_run(
    path: Path, settings: dict[str, Any], *, resume: bool, length: str | None = None
) -> Iterator[RunDirectory]:
    """Begin a run or go on with it, and keep others out as long as the block runs.

    Args:
        path: its directory.
        settings: of the training; one that is resumed must have the same.
        resume: go on with a training that was begun there.
        length: the setting that says how long the training takes, where it may grow.

    Raises:
        CheckpointError: there is a training and `resume` was not asked for, or none and it was; it
            had other settings; another process is at work there; or the system refuses.
        BilensError: the tracker is not installed.
    """
    settings = json.loads(json.dumps(settings))
    tracker = settings.get("report_to", "none")
    check_tracker(tracker)
    with only_process_in(path):
        taken = [n for n in (TRAINING_NAME, CONFIG_NAME, WEIGHTS_NAME) if (path / n).exists()]
        if taken and not resume:
            raise CheckpointError(
                f"{path} holds {' and '.join(taken)} already. Go on with that training by --resume "
                "(resume=True in Python), or choose another --output; to train again from the "
                "start, delete the folder first."
            )
        if resume and TRAINING_NAME not in taken:
            raise CheckpointError(
                f"There is nothing to resume in {path}: no training was begun there. Train without "
                "--resume."
            )
        run = RunDirectory(path, settings)
        if resume:
            before = read_json_object(path / TRAINING_NAME)
            finished = before.pop("finished", False)
            before.pop("torch", None)
            _check_same(path, before, settings, length)
            run.finished = finished and before == settings
        if run.finished:
            tell(f"{path} is finished: there is nothing left to train.")
            tracker = "none"
        else:
            run.write_settings()
        with open_tracker(tracker, path, settings) as run.track:
            yield run


def is_begun(run: Path) -> bool:
    """Whether a training was begun in a directory, so that it can be resumed."""
    return (run / TRAINING_NAME).is_file()


def is_finished(run: Path) -> bool:
    """Whether the training in a directory has ended; CheckpointError if it is damaged."""
    return is_begun(run) and bool(read_json_object(run / TRAINING_NAME).get("finished"))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, in order.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    return read_json(run / METRICS_NAME, lines=True)


def read_training(source: str | Path, **hub: Any) -> dict[str, Any]:
    """What a run, a directory or a repository that holds all of it, was trained on and with.

    `hub` is passed to `huggingface_hub.hf_hub_download`. Raises CheckpointError if it does not say.
    """
    try:
        settings = read_json_object(fetch(source, TRAINING_NAME, **hub))
        settings["data"]
    except (KeyError, CheckpointError) as error:
        raise CheckpointError(
            f"{Path(source) / TRAINING_NAME} is missing or damaged, so the data that {source} was "
            "trained on is unknown; expected a directory that `bilens train` wrote"
        ) from error
    return settings


def part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of one part by their names."""
    start = f"{kind}."
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def _check_same(
    path: Path, before: dict[str, Any], now: dict[str, Any], length: str | None
) -> None:
    old, new = _flat(before), _flat(now)
    differing = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    if length in differing and old.get(length, 0) < new[length]:
        differing.remove(length)
    if differing:
        was, is_ = (
            ", ".join(f"{name}={some.get(name)!r}" for name in differing) for some in (old, new)
        )
        growing = f" ({length} alone may grow)" if length else ""
        raise CheckpointError(
            f"{path} was trained with {was}, not {is_}. Resume with the same settings{growing}, or "
            "choose another --output."
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by their own names, those of the model among them."""
    model = settings.get("model")
    return {**settings, **model, "model": None} if isinstance(model, dict) else settings


def _checksums(checkpoint: Path) -> dict[str, str]:
    sums = {}
    with file_errors(checkpoint, "read"):
        for path in sorted(checkpoint.rglob("*")):
            if path.is_file() and path.name != MANIFEST:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                sums[str(path.relative_to(checkpoint))] = digest
    return sums


def _is_whole(checkpoint: Path) -> bool:
    try:
        expected = read_json_object(checkpoint / MANIFEST)
    except CheckpointError:
        return False
    return bool(expected) and expected == _checksums(checkpoint)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
