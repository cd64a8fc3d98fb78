"""How a gated model is annealed into a bilinear one; quick to import."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from bilens.errors import BilensError
from bilens.settings import Between, Count, NotNegative, Positive, Size
from bilens.train.trainer_settings import TrainerSettings

__all__ = ["SCHEDULES", "AnnealTraining", "DecayName", "ScheduleName"]

ScheduleName = Literal["linear", "cosine", "zero", "held"]

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "zero": lambda progress: 0.0,
    "held": lambda progress: 1.0,
}
"""The share of the first beta that is left, by the share of the annealing that is done: falling
evenly or along half a cosine; none from the start; or all, which trains the model as it is."""
DecayName = Literal["none", "linear", "cosine"]
"""How a learning rate falls to zero, if it does."""


@dataclass(frozen=True)
class AnnealTraining(TrainerSettings):
    """How to anneal a model. The defaults are Table 4 of Pearce et al. 2024.

    Attributes:
        schedule: how beta falls: linear, cosine, zero (bilinear from the start), or held (it does
            not fall, and the model is trained as it is).
        tokens: to train on, all in all.
        annealing: share of the training in which beta falls; for the rest it stays at the end.
        length: tokens of a text.
        learning_rate: of AdamW.
        decay: how the learning rate falls to zero by the end: none (it does not, as in the paper),
            linear or cosine.
        checkpointing: work the activations out twice instead of keeping them.
        evaluate_every: steps between validations; none but the last by default.
        seed: of the order of the texts.
    """

    schedule: ScheduleName = "linear"
    tokens: Count = 105_000_000
    annealing: Annotated[float, Between(0, 1, above=True)] = 1.0
    length: Size = 512
    batch_size: Count = 8
    learning_rate: Positive = 3e-6
    decay: DecayName = "none"
    weight_decay: NotNegative = 0.0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < self.batch_size * self.length:
            raise BilensError(
                f"tokens={self.tokens}, expected at least {self.batch_size * self.length}, one "
                f"step of batch_size={self.batch_size} texts of length={self.length}"
            )

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return self.tokens // (self.batch_size * self.length)
