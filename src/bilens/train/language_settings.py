"""How language models are trained, and presets of size and training; quick to import."""

from dataclasses import dataclass, field
from typing import Any, Literal

from bilens.errors import BilensError

__all__ = ["PRESETS", "LanguageTraining", "Precision", "Preset", "Tracker"]

Precision = Literal["float32", "bf16", "fp16"]
Tracker = Literal["none", "tensorboard", "wandb"]


@dataclass(frozen=True)
class LanguageTraining:
    """How to train a language model. The defaults are Table 3 of Pearce et al. 2024.

    Attributes:
        epochs: passes over the training set.
        batch_size: texts in a step of the optimizer, over all processes and accumulated steps.
        learning_rate: of AdamW at the start; it falls linearly to zero.
        weight_decay: of AdamW, on matrices.
        warmup: share of the steps in which the learning rate rises from zero.
        accumulate: parts that each process does its share of a batch in, one after another.
        precision: float32, or bf16 or fp16 for mixed precision.
        log_every: steps between records of the loss.
        save_every: steps between checkpoints, each with what resuming needs.
        report_to: none, or the tracker that gets the metrics too; it has to be installed.
        seed: of the initial weights and of the order of the texts.
        optimizer: a name that `transformers.TrainingArguments(optim=...)` knows.
    """

    epochs: float = 5
    batch_size: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: float = 0.0
    accumulate: int = 1
    precision: Precision = "float32"
    log_every: int = 50
    save_every: int = 500
    report_to: Tracker = "none"
    seed: int = 0
    optimizer: str = "adamw_torch"

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise BilensError(f"{name}={getattr(self, name)}, expected at least 1")
        for name in ("epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                raise BilensError(f"{name}={getattr(self, name)}, expected more than 0")
        for name in ("weight_decay", "seed"):
            if not getattr(self, name) >= 0:
                raise BilensError(f"{name}={getattr(self, name)}, expected 0 or more")
        if not 0 <= self.warmup < 1:
            raise BilensError(f"warmup={self.warmup}, expected a share from 0 to below 1")


@dataclass(frozen=True)
class Preset:
    """A size of model and the training that goes with it.

    Attributes:
        model: settings of `LanguageConfig` that differ from its defaults.
        training: how it is trained.
    """

    model: dict[str, Any] = field(default_factory=dict)
    training: LanguageTraining = field(default_factory=LanguageTraining)


PRESETS = {
    "grammar": Preset(
        {"vocab_size": 72, "d_model": 64, "n_heads": 2, "d_hidden": 128, "n_ctx": 32},
        LanguageTraining(epochs=5, batch_size=64, learning_rate=5e-3),
    ),
    "tiny": Preset(
        {"d_model": 256, "n_heads": 4, "d_hidden": 768, "n_ctx": 128},
        LanguageTraining(epochs=2, batch_size=32, learning_rate=3e-3, warmup=0.02),
    ),
    "paper": Preset(),
}
"""By name: for the synthetic grammar in a few minutes; for stories in minutes on two cores; and
Table 3 of Pearce et al. 2024, for a GPU."""
