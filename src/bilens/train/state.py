"""Everything a stopped training needs to go on as if it had never stopped, in one file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bilens.errors import CheckpointError
from bilens.files import write_json, write_safetensors
from bilens.nn.checkpoint import fetch

__all__ = ["STATE_NAME", "TRAINING_NAME", "TrainingState", "read_training"]

STATE_NAME = "training_state.safetensors"
"""The file in a run that resuming goes on from."""

TRAINING_NAME = "training.json"
"""The file in a run that says what it was trained on and with."""


def read_training(source: str | Path, **hub: Any) -> dict[str, Any]:
    """What a run was trained on and with.

    Args:
        source: its directory, or a repository that holds all of it.
        hub: passed to `huggingface_hub.hf_hub_download`: revision, token, cache_dir, ...

    Raises:
        CheckpointError: it does not say.
    """
    try:
        settings = json.loads(fetch(source, TRAINING_NAME, **hub).read_text(encoding="utf-8"))
        settings["data"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{Path(source) / TRAINING_NAME} is missing or damaged, so the data that {source} was "
            "trained on is unknown; expected a directory that `bilens train` wrote"
        ) from error
    found: dict[str, Any] = settings
    return found


@dataclass(frozen=True, eq=False)
class TrainingState:
    """What the next step of a training depends on.

    Attributes:
        model: what is trained.
        optimizer: over the model's parameters.
        generator: of all that is drawn while training.
        settings: of the training, such as JSON holds them; one that is resumed must have the same.
        length: the setting that says how long it takes, which alone may grow.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    settings: dict[str, Any]
    length: str

    def save(self, run: Path, record: dict[str, Any]) -> None:
        """Write the state, and the settings once more for people to read.

        Args:
            run: directory to write to.
            record: where the training stands: tensors, and what JSON holds.
        """
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in slots.items()}
        tensors["generator"] = self.generator.get_state()
        tensors |= {name: value for name, value in record.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in record.items() if name not in tensors}
        text = json.dumps({**plain, "settings": self.settings})
        write_json(run / TRAINING_NAME, {**self.settings, "torch": torch.__version__})
        write_safetensors(run / STATE_NAME, tensors, {"record": text})

    def load(self, run: Path) -> dict[str, Any]:
        """Put a saved state back into the model, the optimizer and the generator.

        Returns:
            The record it was saved with, tensors on the device of the model.

        Raises:
            CheckpointError: there is no state, it is damaged, or it belongs to other settings.
        """
        path = run / STATE_NAME
        if not path.is_file():
            raise CheckpointError(
                f"There is nothing to resume: {path} does not exist. Train without --resume."
            )
        try:
            with safe_open(path, "pt") as file:
                record = dict(json.loads(file.metadata()["record"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            before = dict(record.pop("settings"))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); train again without --resume"
            ) from error
        self._check_settings(path, before)
        try:
            rest = self._restore(tensors)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not fit the model ({error}); train again without --resume"
            ) from error
        device = next(self.model.parameters()).device
        return record | {name: tensor.to(device) for name, tensor in rest.items()}

    def _check_settings(self, path: Path, settings: dict[str, Any]) -> None:
        for name in sorted(settings.keys() | self.settings.keys()):
            before, now = settings.get(name), self.settings.get(name)
            grown = name == self.length and before is not None and now >= before
            if before != now and not grown:
                raise CheckpointError(
                    f"{path} was trained with {name}={before!r}, not {now!r}. Resume with the "
                    f"same settings ({self.length} alone may grow), or train elsewhere."
                )

    def _restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hand each tensor to its owner, and give back those that are the record's."""
        weights: dict[str, Tensor] = {}
        slots: dict[int, dict[str, Tensor]] = {}
        rest: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            owner, _, part = name.partition(".")
            if owner == "model":
                weights[part] = tensor
            elif owner == "optimizer":
                number, _, slot = part.partition(".")
                slots.setdefault(int(number), {})[slot] = tensor
            else:
                rest[name] = tensor
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.generator.set_state(rest.pop("generator"))
        return rest
