"""Everything a stopped training needs to go on as if it had never stopped, in one file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bilens.errors import CheckpointError
from bilens.files import write_safetensors

__all__ = ["STATE_NAME", "TrainingState"]

STATE_NAME = "training_state.safetensors"


@dataclass
class TrainingState:
    """Where a training stands.

    Attributes:
        epoch: epochs finished.
        step: steps finished in the epoch that is under way.
        loss_sum: of the steps of that epoch.
        correct: samples of that epoch classified correctly while training.
        seconds: time spent in finished and unfinished epochs so far.
        history: one record of metrics for each finished epoch.
    """

    epoch: int
    step: int
    loss_sum: Tensor
    correct: Tensor
    seconds: float
    history: list[dict[str, Any]]

    @classmethod
    def fresh(cls, device: torch.device) -> "TrainingState":
        """Before the first step."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(0, 0, zero, zero.clone(), 0.0, [])

    def save(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        settings: dict[str, Any],
    ) -> None:
        """Write the state with the model's and the optimizer's tensors and the generator's."""
        tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
        for number, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in slots.items()}
        tensors |= {
            "generator": generator.get_state(),
            "loss_sum": self.loss_sum,
            "correct": self.correct,
        }
        record = {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "settings": settings,
        }
        write_safetensors(path, tensors, {"record": json.dumps(record)})

    @classmethod
    def load(
        cls,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        settings: dict[str, Any],
    ) -> "TrainingState":
        """Put a saved state back into the model, the optimizer and the generator.

        Raises:
            CheckpointError: there is no state, it is damaged, or it belongs to other settings.
        """
        if not path.is_file():
            raise CheckpointError(
                f"There is nothing to resume: {path} does not exist. Train without --resume."
            )
        try:
            with safe_open(path, "pt") as file:
                record = json.loads(file.metadata()["record"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); train again without --resume"
            ) from error
        _check_settings(path, record["settings"], settings)
        _restore(model, optimizer, tensors)
        generator.set_state(tensors["generator"])
        device = next(model.parameters()).device
        return cls(
            record["epoch"],
            record["step"],
            tensors["loss_sum"].to(device),
            tensors["correct"].to(device),
            record["seconds"],
            record["history"],
        )


def _check_settings(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted(before.keys() | now.keys()):
        grown = name == "epochs" and now[name] >= before[name]
        if before.get(name) != now.get(name) and not grown:
            raise CheckpointError(
                f"{path} was trained with {name}={before.get(name)!r}, not {now.get(name)!r}. "
                "Resume with the same settings (epochs alone may grow), or train elsewhere."
            )


def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    prefix = "model."
    model.load_state_dict(
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    )
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, slot = name.split(".")
            slots.setdefault(int(number), {})[slot] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
