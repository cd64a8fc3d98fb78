"""What every training through the Hugging Face Trainer is told; quick to import."""

from dataclasses import dataclass
from typing import Annotated, Literal

from bilens.settings import Between, Count, NotNegative, Positive, Seed, check_settings
from bilens.train.tracker import Tracker

__all__ = ["Precision", "TrainerSettings"]

Precision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True)
class TrainerSettings:
    """What trainings through the Trainer have in common.

    Attributes:
        batch_size: texts in a step of the optimizer, over all processes and accumulated parts.
        learning_rate: the highest.
        weight_decay: on matrices.
        warmup: share of the steps in which the learning rate rises from zero.
        accumulate: parts that each process does its share of a batch in, one after another.
        precision: float32, or bf16 or fp16 for mixed precision.
        log_every: steps between records of the loss.
        evaluate_every: steps between validations, besides the last.
        save_every: steps between checkpoints, each with what resuming needs.
        report_to: none, or the tracker that gets the metrics too; it has to be installed.
        seed: of all that is drawn.
    """

    batch_size: Count = 128
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.1
    warmup: Annotated[float, Between(0, 1, below=True)] = 0.0
    accumulate: Count = 1
    precision: Precision = "float32"
    log_every: Count = 50
    evaluate_every: Count | None = None
    save_every: Count = 500
    report_to: Tracker = "none"
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_settings(self)
