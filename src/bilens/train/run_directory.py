"""The directory of a training with its settings, metrics and checkpoints; trackers and ctrl-C.

A training may be killed at any moment without damage to its directory. A checkpoint is written
under another name, with the checksums of its files, and renamed when it is complete.
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
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from bilens import files
from bilens.errors import BilensError, CheckpointError
from bilens.lazy_imports import lazy_import
from bilens.nn.card import CARD_NAME, model_card
from bilens.nn.checkpoint import CONFIG_NAME, WEIGHTS_NAME, fetch, read_config
from bilens.progress import logger

if TYPE_CHECKING:
    from accelerate import tracking
else:  # It takes a second to import, and most trainings have no tracker.
    tracking = lazy_import("accelerate.tracking", install=".[train]")

TRAINING_NAME = "training.json"
"""File in a run with its data set, its settings, and a flag for a finished training."""
METRICS_NAME = "metrics.jsonl"
"""File in a run with a line for each record of its metrics."""
PROVENANCE = ("data", "data_dir", "data_seed", "data_digest")
"""Entries of that file about the data: where it was, the seed of its split, and its digest."""
CHECKPOINTS = "checkpoints"
"""Folder in a run with its last two checkpoints."""

MANIFEST = "manifest.json"
STATE_NAME = "training_state.safetensors"


@dataclass
class RunDirectory:
    """A run that is being written."""

    path: Path
    settings: dict[str, Any]
    finished: bool = False
    track: Callable[[dict[str, Any]], None] = field(default=lambda record: None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the run without its tracker, which only one process may write to."""
        return RunDirectory, (self.path, self.settings, self.finished)

    def draft(self, step: int) -> Path:
        """Return the folder in which the files of a checkpoint are written first."""
        return self.path / f"{files.UNFINISHED}{CHECKPOINTS}" / f"checkpoint-{step}"

    def keep(self, draft: Path) -> None:
        """Turn a draft into a checkpoint, and remove all but the last two."""
        files.write_json(draft / MANIFEST, _checksums(draft))
        target = self.path / CHECKPOINTS / draft.name
        with files.file_errors(target):
            target.parent.mkdir(exist_ok=True)
            if target.exists():  # stopped after the last step of an epoch, and saved there again
                self._remove(target)
            draft.rename(target)
            draft.parent.rmdir()
        for old in self._checkpoints()[2:]:
            self._remove(old)

    def save_state(
        self, step: int, record: Mapping[str, Any], **parts: Mapping[str, Tensor]
    ) -> None:
        """Write a checkpoint with named tensors in parts and a record of JSON values."""
        draft = self.draft(step)
        tensors = {f"{kind}.{name}": t for kind, part in parts.items() for name, t in part.items()}
        files.write_safetensors(draft / STATE_NAME, tensors, {"record": json.dumps(record)})
        self.keep(draft)

    def load_state(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the record of the newest checkpoint, and its tensors by part and name."""
        checkpoint = self.newest_checkpoint()
        if checkpoint is None:
            return None
        with safe_open(checkpoint / STATE_NAME, "pt", str(device)) as file:
            # Copied: a mapped file is aligned differently, so that sums would differ in their bits.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return json.loads(file.metadata()["record"]), tensors

    def newest_checkpoint(self) -> Path | None:
        """Return the newest intact checkpoint; damaged ones are removed."""
        for checkpoint in self._checkpoints():
            if _is_intact(checkpoint):
                return checkpoint
            logger.warning("%s is damaged or incomplete; using an earlier one.", checkpoint)
            self._remove(checkpoint)
        logger.info("%s has no checkpoint; the training starts from the beginning.", self.path)
        return None

    def start_metrics(self, records: list[dict[str, Any]]) -> None:
        """Replace the metrics with these records."""
        files.write_text(self.path / METRICS_NAME, "".join(map(_line, records)))

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append a record to the metrics."""
        path = self.path / METRICS_NAME
        with files.file_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        self.track(record)

    def finish(self) -> None:
        """Mark the training as finished; everything else has to be written before."""
        self.finished = True
        self.write_settings()
        if (self.path / CONFIG_NAME).exists():  # parts of models have none
            card = model_card(read_config(self.path), self.path)
            files.write_text(self.path / CARD_NAME, str(card))

    def write_settings(self) -> None:
        """Write the settings, with the version of torch and the state of the training."""
        state = {"torch": torch.__version__, "finished": self.finished}
        files.write_json(self.path / TRAINING_NAME, {**self.settings, **state})

    def _checkpoints(self) -> list[Path]:
        """Return all checkpoints, the newest first."""
        paths = (self.path / CHECKPOINTS).glob("checkpoint-*")
        steps = {path: path.name.removeprefix("checkpoint-") for path in paths}
        numeric = [path for path, step in steps.items() if step.isdigit()]
        return sorted(numeric, key=lambda path: int(steps[path]), reverse=True)

    def _remove(self, checkpoint: Path) -> None:
        with files.file_errors(checkpoint, "removed"):
            # Renamed first, so that a partly removed checkpoint is never read.
            shutil.rmtree(checkpoint.rename(files.temporary_beside(self.path / checkpoint.name)))


@contextmanager
def open_run(
    path: Path, settings: dict[str, Any], *, resume: bool, length: str | None = None
) -> Iterator[RunDirectory]:
    """Begin or resume a run, and lock it against other processes inside the block.

    A resumed training must have the same settings, of which only `length` may grow.

    Raises:
        CheckpointError: `path` holds a training and `resume` is False, or no training and it is
            True. Or the training has other settings, another process uses it, or the system
            refuses access.
        BilensError: the tracker is not installed.
    """
    settings = json.loads(json.dumps(settings))
    tracker = settings.get("report_to", "none")
    _check_tracker(tracker)  # before there is a folder
    with only_process_in(path):
        check_begin(path, resume=resume, report_to=tracker)
        run = RunDirectory(path, settings)
        if resume:
            before = files.read_json_object(path / TRAINING_NAME)
            is_finished = before.pop("finished", False)
            before.pop("torch", None)
            _check_same(path, before, settings, length)
            run.finished = is_finished and _without_data(before) == _without_data(settings)
        if run.finished:
            logger.info("%s is finished: nothing is left to train.", path)
            tracker = "none"
        else:
            run.write_settings()
        with open_tracker(tracker, path, settings) as run.track:
            yield run


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run directory as long as the block runs.

    The lock is the system's and ends with the process. Files that this process or a killed one left
    unfinished are removed.

    Raises:
        CheckpointError: another process works there, or the system refuses.
    """
    with files.file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise CheckpointError(
                f"Another process is at work in {folder}. Wait until it has ended, or "
                "choose another folder."
            ) from error
    try:
        files.remove_unfinished(folder)
        yield
    finally:
        files.remove_unfinished(folder)
        lock.release()


def _check_tracker(report_to: str) -> None:
    if report_to != "none" and find_spec(report_to) is None:
        raise BilensError(
            f"report_to={report_to!r} needs the package {report_to}: pip install {report_to}, or "
            "leave report_to out; the metrics are in metrics.jsonl anyway"
        )


def check_begin(run: Path, *, resume: bool, report_to: str = "none") -> None:
    """Raise unless a training can begin in a directory, or resume there: before data are read.

    Raises:
        CheckpointError: as `open_run`.
        BilensError: the tracker is not installed.
    """
    _check_tracker(report_to)
    if not resume:
        check_free(run)
    elif not is_begun(run):
        raise CheckpointError(
            f"Nothing to resume in {run}: no training was begun there. Train without --resume."
        )


def check_free(run: Path) -> None:
    """Raise CheckpointError if a directory holds a training or a model."""
    names = (TRAINING_NAME, CONFIG_NAME, WEIGHTS_NAME)
    existing = [name for name in names if (run / name).exists()]
    if existing:
        raise CheckpointError(
            f"{run} holds {' and '.join(existing)} already. Resume that training with "
            "resume=True, or choose another --output; to train again from the "
            "start, delete the folder first."
        )


def is_begun(run: Path) -> bool:
    """Return True if a directory holds a training, which can be resumed."""
    return (run / TRAINING_NAME).is_file()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, in order.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    return files.read_json(run / METRICS_NAME, lines=True)


def last_loss(run: str | Path | None) -> float | None:
    """Return the last validation loss of a training, in nats a token; None without a record."""
    if run is None or not (Path(run) / METRICS_NAME).is_file():
        return None
    losses = [record["eval_loss"] for record in read_metrics(Path(run)) if "eval_loss" in record]
    return losses[-1] if losses else None


def read_training(source: str | Path, **hub: Any) -> dict[str, Any]:
    """Return the data set and the settings of a run, a directory or a complete repository.

    `hub` is passed to `huggingface_hub.hf_hub_download`. Raises CheckpointError if the settings
    are missing or damaged.
    """
    try:
        settings = files.read_json_object(fetch(source, TRAINING_NAME, **hub))
        settings["data"]
    except (KeyError, CheckpointError) as error:
        raise CheckpointError(
            f"{Path(source) / TRAINING_NAME} is missing or damaged, so the data that {source} was "
            "trained on is unknown; expected a directory written by `bilens train`"
        ) from error
    return settings


def part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the tensors of one part by their names."""
    start = f"{kind}."
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def _check_same(
    path: Path, before: dict[str, Any], now: dict[str, Any], length: str | None
) -> None:
    if is_other_data(before, now):
        raise CheckpointError(
            f"{path} was trained on other data, {before.get('data')} as it was then, than "
            f"{now.get('data')} as it is now. Resume with the same data, or choose another "
            "--output."
        )
    old, new = _flat(_without_data(before)), _flat(_without_data(now))
    names = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    if length in names and old.get(length, 0) < new[length]:
        names.remove(length)
    if names:
        was = ", ".join(f"{name}={old.get(name)!r}" for name in names)
        is_ = ", ".join(f"{name}={new.get(name)!r}" for name in names)
        hint = f" (only {length} may grow)" if length else ""
        raise CheckpointError(
            f"{path} was trained with {was}, not {is_}. Resume with the same settings{hint}, or "
            "choose another --output."
        )


def is_other_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two records name different data: by the digests, else by the names."""
    old, new = (record.get("data_digest") for record in (before, now))
    if old and new:
        return bool(old != new)
    # Records of earlier versions have the last part of a path, and no digest.
    return Path(str(before.get("data"))).name != Path(str(now.get("data"))).name


def _without_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in PROVENANCE}


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings in one dictionary, those of the model included."""
    model = settings.get("model")
    return {**settings, **model, "model": None} if isinstance(model, dict) else settings


def _checksums(checkpoint: Path) -> dict[str, str]:
    sums = {}
    with files.file_errors(checkpoint, "read"):
        for path in sorted(checkpoint.rglob("*")):
            if path.is_file() and path.name != MANIFEST:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                sums[str(path.relative_to(checkpoint))] = digest
    return sums


def _is_intact(checkpoint: Path) -> bool:
    try:
        expected = files.read_json_object(checkpoint / MANIFEST)
    except CheckpointError:
        return False
    return bool(expected) and expected == _checksums(checkpoint)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


@contextmanager
def open_tracker(
    name: str, run: Path, settings: dict[str, Any]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Send the settings of a training to a tracker, and yield the function that sends a record.

    The run's directory names the training; TensorBoard's files go into it.
    """
    if name == "none":
        yield lambda record: None
        return
    config = {key: str(value) for key, value in settings.items()}
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"logging_dir": run},
        "wandb": {"name": run.name, "dir": run, "reinit": "create_new", "config": config},
        "trackio": {"name": run.name, "config": config},
    }
    project = name if name == "tensorboard" else "bilens"
    tracking.PartialState()  # the trackers of wandb and trackio log through it at their start
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options[name])
    tracker.start()
    if name == "tensorboard":
        tracker.store_init_configuration(config)
    try:
        yield lambda record: tracker.log(record, step=int(record.get("step", record["epoch"])))
    finally:
        tracker.finish()


@contextmanager
def interrupt_between_steps() -> Iterator[threading.Event]:
    """Turn ctrl-C into a flag that the loop inside the block reads between steps.

    A second ctrl-C interrupts at once. Outside of the main thread nothing changes, since Python
    delivers signals only there.
    """
    interrupt = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
