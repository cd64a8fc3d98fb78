"""A tracker that gets the metrics of a training besides the run's own metrics.jsonl."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from accelerate import tracking
else:  # It takes a second to import, and most trainings have no tracker.
    tracking = lazy_import("accelerate.tracking")

__all__ = ["Tracker", "check_tracker", "open_tracker"]

Tracker = Literal["none", "tensorboard", "wandb", "trackio"]


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
