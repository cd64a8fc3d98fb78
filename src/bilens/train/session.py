"""The moving parts of a training in plain PyTorch, and how they are saved and resumed."""

from typing import Any

import torch

from bilens.nn.checkpoint import Checkpointed
from bilens.train.run_directory import RunDirectory, part


class Session:
    """A model, its optimizer, the generator of its random numbers, and the place of the training.

    Args:
        model: model in training.
        optimizer: optimizer of all its parameters.
        generator: source of all random numbers after the initial weights.
        place: the position as JSON values, such as the number of finished steps.
    """

    def __init__(
        self,
        model: Checkpointed,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        place: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.generator = model, optimizer, generator
        self.place = place

    def load(self, run: RunDirectory) -> None:
        """Resume from the newest checkpoint, if any."""
        state = run.load_state(next(self.model.parameters()).device)
        if state is None:
            return
        place, tensors = state
        self.check(place, run)
        self.place = place
        self.model.load_state_dict(part(tensors, "model"))
        for name, weight in self.model.named_parameters():
            self.optimizer.state[weight] = part(tensors, f"optimizer.{name}")
        self.generator.set_state(tensors["generator.state"].cpu())

    def check(self, place: dict[str, Any], run: RunDirectory) -> None:
        """Raise CheckpointError if this training cannot resume from a stored place."""

    def save(self, run: RunDirectory, step: int) -> None:
        """Write a checkpoint."""
        slots = {}
        for name, weight in self.model.named_parameters():
            for slot, value in self.optimizer.state[weight].items():
                slots[f"{name}.{slot}"] = value
        run.save_state(
            step,
            self.place,
            model=self.model.state_dict(),
            optimizer=slots,
            generator={"state": self.generator.get_state()},
        )


def initialised(model_class: type[Any], config: Any, seed: int) -> Any:
    """Return a new model whose weights are drawn from a seed alone."""
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model
