"""The directory of a training: its settings, its metrics and the checkpoints that it goes on from.

Whatever moment a training is killed at, what it left is whole: a checkpoint is written to the side
with the checksums of its files, and renamed.
"""

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from bilens.errors import BilensError, CheckpointError
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
from bilens.lazy_imports import lazy_import
from bilens.model_card import CARD_NAME, model_card
from bilens.nn.checkpoint import CONFIG_NAME, WEIGHTS_NAME, fetch, read_config
from bilens.progress import print_status

if TYPE_CHECKING:
    from accelerate import tracking
else:  # It takes a second to import, and most trainings have no tracker.
    tracking = lazy_import("accelerate.tracking")

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
            print_status(f"{checkpoint} is damaged or incomplete and is passed over.")
            self._remove(checkpoint)
        print_status(f"{self.path} has no checkpoint; the training starts from its beginning.")
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
            print_status(f"{path} is finished: there is nothing left to train.")
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


def check_tracker(name: str) -> None:
    """See that a tracker is installed.

    Raises:
        BilensError: it is not.
    """
    if name != "none" and find_spec(name) is None:
        raise BilensError(
            f"report_to={name!r} needs the package {name}: pip install {name}, or leave "
            "report_to out; the metrics are in metrics.jsonl anyway"
        )


@contextmanager
def open_tracker(
    name: str, run: Path, settings: dict[str, Any]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Tell a tracker the settings of a training, and then every record that it is called with.

    Args:
        name: none, or that of the tracker.
        run: directory of the training, by whose name it is known; TensorBoard's files go into it.
        settings: of the training.
    """
    if name == "none":
        yield lambda record: None
        return
    config = {key: str(value) for key, value in settings.items()}
    own: dict[str, dict[str, Any]] = {
        "tensorboard": {"logging_dir": run},
        "wandb": {"name": run.name, "dir": run, "reinit": "create_new", "config": config},
        "trackio": {"name": run.name, "config": config},
    }
    project = name if name == "tensorboard" else "bilens"
    tracking.PartialState()  # wandb's and trackio's log through it as they start
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **own[name])
    tracker.start()
    if name == "tensorboard":
        tracker.store_init_configuration(config)
    try:
        yield lambda record: tracker.log(record, step=int(record.get("step", record["epoch"])))
    finally:
        tracker.finish()


class Interrupt:
    """Whether ctrl-C was pressed."""

    requested = False


@contextmanager
def interrupt_between_steps() -> Iterator[Interrupt]:
    """Turn ctrl-C into a request that the loop inside the block looks at between steps.

    A second ctrl-C interrupts at once. Outside of the main thread nothing changes, since Python
    delivers signals there alone.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
