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
        learning_rate: at the start; it falls linearly to zero.
        weight_decay: on matrices.
        warmup: share of the steps in which the learning rate rises from zero.
        accumulate: parts that each process does its share of a batch in, one after another.
        precision: float32, or bf16 or fp16 for mixed precision.
        log_every: steps between records of the loss.
        save_every: steps between checkpoints, each with what resuming needs.
        report_to: none, or the tracker that gets the metrics too; it has to be installed.
        seed: of the initial weights and of the order of the texts.
        optimizer: muon, for matrices inside the blocks, with AdamW for all else; or a name that
            `transformers.TrainingArguments(optim=...)` knows.
        evaluate_every: steps between validations; None for one after each pass.
        evaluate_texts: texts of a validation, the first ones; None for all of them.
        target_loss: the training ends at the first validation whose loss is no larger.
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
    evaluate_every: int | None = None
    evaluate_texts: int | None = None
    target_loss: float | None = None

    def __post_init__(self) -> None:
        counts = ("batch_size", "accumulate", "log_every", "save_every")
        for name in (*counts, "evaluate_every", "evaluate_texts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BilensError(f"{name}={value}, expected at least 1")
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
    "500m": Preset(
        {
            "vocab_size": 50_304,
            "d_model": 1152,
            "n_layers": 18,
            "n_heads": 9,
            "d_hidden": 4608,
            "n_ctx": 1024,
            "norm": "rms",
            "qk_norm": True,
        },
        LanguageTraining(
            epochs=1,
            batch_size=512,
            warmup=0.02,
            accumulate=4,
            precision="bf16",
            optimizer="muon",
        ),
    ),
}
"""By name: for the synthetic grammar in a few minutes; for stories in minutes on two cores; Table 3
of Pearce et al. 2024, for a GPU; and the size of the models of the post on tensor-transformer
variants, for several.

The last has 498 million parameters: 2 x 50,304 x 1152 in embedding and unembedding, and in each of
18 blocks 4 x 1152² of attention and 3 x 1152 x 4608 of the MLP. Bilinear attention adds 2 x 1152² a
block, which is 9.6 %; the post says 10 %. Its schedule is a start, and no model of this size was
trained with it."""
