"""How a gated model is annealed into a bilinear one; quick to import."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from bilens.errors import BilensError
from bilens.train.language_settings import Precision, Tracker

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
class AnnealTraining:
    """How to anneal a model. The defaults are Table 4 of Pearce et al. 2024.

    Attributes:
        schedule: how beta falls: linear, cosine, zero (bilinear from the start), or held (it does
            not fall, and the model is trained as it is).
        tokens: to train on, all in all.
        annealing: share of the training in which beta falls; for the rest it stays at the end.
        length: tokens of a text.
        batch_size: texts in a step of the optimizer, over all processes and accumulated steps.
        learning_rate: of AdamW.
        decay: how the learning rate falls to zero by the end: none (it does not), linear or cosine.
        warmup: share of the steps in which the learning rate rises from zero.
        weight_decay: of AdamW.
        accumulate: parts that each process does its share of a batch in, one after another.
        precision: float32, or bf16 or fp16 for mixed precision.
        checkpointing: work the activations out twice instead of keeping them.
        log_every: steps between records of loss and beta.
        evaluate_every: steps between validations; none but the last by default.
        save_every: steps between checkpoints.
        report_to: none, or the tracker that gets the metrics too; it has to be installed.
        seed: of the order of the texts.
    """

    schedule: ScheduleName = "linear"
    tokens: int = 105_000_000
    annealing: float = 1.0
    length: int = 512
    batch_size: int = 8
    learning_rate: float = 3e-6
    decay: DecayName = "none"
    warmup: float = 0.0
    weight_decay: float = 0.0
    accumulate: int = 1
    precision: Precision = "float32"
    checkpointing: bool = False
    log_every: int = 50
    evaluate_every: int | None = None
    save_every: int = 500
    report_to: Tracker = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, names in (("schedule", ScheduleName), ("decay", DecayName)):
            if getattr(self, name) not in get_args(names):
                known = ", ".join(get_args(names))
                raise BilensError(f"{name}={getattr(self, name)!r}, expected one of {known}")
        for name in ("batch_size", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise BilensError(f"{name}={getattr(self, name)}, expected at least 1")
        if self.tokens < self.batch_size * self.length:
            raise BilensError(
                f"tokens={self.tokens}, expected at least {self.batch_size * self.length}, one "
                f"step of batch_size={self.batch_size} texts of length={self.length}"
            )
        if not self.learning_rate > 0:
            raise BilensError(f"learning_rate={self.learning_rate}, expected more than 0")
        if not 0 <= self.warmup < 1:
            raise BilensError(f"warmup={self.warmup}, expected a share from 0 to below 1")
        if not 0 < self.annealing <= 1:
            raise BilensError(f"annealing={self.annealing}, expected a share above 0 and up to 1")

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return self.tokens // (self.batch_size * self.length)
