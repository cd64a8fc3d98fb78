"""Settings of trainings, and presets; without imports of the libraries that train."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from bilens.errors import BilensError
from bilens.nn.settings import LanguageSettings
from bilens.settings import Between, CheckedSettings, Count, NotNegative, Positive, Seed, Size

Precision = Literal["float32", "bf16", "fp16"]
Tracker = Literal["none", "tensorboard", "wandb", "trackio"]
ScheduleName = Literal["linear", "cosine", "zero", "held"]

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "zero": lambda progress: 0.0,
    "held": lambda progress: 1.0,
}
"""Remaining share of the first beta, as a function of the finished share of the annealing.

linear and cosine fall to 0, zero is 0 from the start, and held stays at 1."""
OWN_TEXT = "own text"
"""Name of the data of a training on text that the model drew."""
DecayName = Literal["none", "linear", "cosine"]
"""Schedule of a learning rate that falls to zero."""
OptimizerName = Literal[
    "adamw_torch", "adamw_torch_fused", "muon", "adafactor", "adagrad", "rmsprop", "sgd"
]
"""muon: for the matrices inside blocks, with AdamW for all other weights. The other names are those
of `transformers.TrainingArguments(optim=...)`."""


@dataclass(frozen=True)
class ClassifierTraining(CheckedSettings):
    """Settings of the training of an image classifier.

    The defaults are Table 2 of Pearce et al. 2024.

    Attributes:
        epochs: passes over the training set.
        batch_size: images in a step.
        learning_rate: learning rate of AdamW in the first epoch.
        decay: factor on the learning rate after each epoch.
        weight_decay: weight decay of AdamW; 0.5 for MNIST and 1.0 for Fashion-MNIST in the paper.
        input_noise: Gaussian noise on the pixels, in standard deviations of the image's pixels.
        latent_noise: Gaussian noise on the inputs of the embedding, of every layer and of the
            unembedding, in standard deviations of the vector's elements.
        report_to: tracker that receives the metrics too, or none; it has to be installed.
        seed: seed of the initial weights, the order of the images and the noise.
    """

    epochs: Count = 20
    batch_size: Count = 100
    learning_rate: Positive = 1e-3
    decay: Positive = 0.85
    weight_decay: NotNegative = 0.5
    input_noise: NotNegative = 1.0
    latent_noise: NotNegative = 0.0
    report_to: Tracker = "none"
    seed: Seed = 0


@dataclass(frozen=True)
class TrainerSettings(CheckedSettings):
    """Settings that all trainings through the Trainer share.

    Attributes:
        batch_size: texts in a step of the optimizer, over all processes and accumulated parts.
        learning_rate: the highest learning rate.
        weight_decay: weight decay of matrices.
        warmup: share of the steps in which the learning rate rises from zero.
        accumulate: parts into which each process splits its share of a batch.
        precision: float32, or bf16 or fp16 for mixed precision.
        log_every: steps between records of the loss.
        evaluate_every: steps between validations, besides the last.
        save_every: steps between checkpoints.
        report_to: tracker that receives the metrics too, or none; it has to be installed.
        seed: seed of all random numbers.
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


@dataclass(frozen=True)
class Distillation(TrainerSettings):
    """Settings of the training of one layer towards the outputs of the layer that it replaces.

    Attributes:
        steps: steps of Adam for each layer; 0 for none.
        batch_size: samples in a step: tokens for an MLP, texts for attention.
        learning_rate: at the start. It falls to zero along half a cosine.
    """

    steps: Annotated[int, Between(0, 10**15)] = 200
    batch_size: Count = 512
    learning_rate: Positive = 3e-3
    weight_decay: NotNegative = 0.0


@dataclass(frozen=True)
class AnnealTraining(TrainerSettings):
    """Settings of the annealing of a model. The defaults are Table 4 of Pearce et al. 2024.

    Attributes:
        schedule: schedule of beta: linear, cosine, zero (bilinear from the start), or held (beta
            does not fall).
        tokens: total number of tokens to train on.
        annealing: share of the training in which beta falls; afterwards it stays at its end.
        length: tokens of a text.
        learning_rate: learning rate of AdamW.
        decay: schedule of the learning rate: none (constant, as in the paper),
            linear or cosine.
        checkpointing: compute the activations twice instead of storing them.
        evaluate_every: steps between validations; only the last by default.
        seed: seed of the order of the texts.
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


@dataclass(frozen=True)
class TensoriseTraining(TrainerSettings):
    """Settings of `bilens tensorise`.

    Attributes:
        attention: squared, or softmax to keep attention as it is.
        mlp: bilinear, or gated to keep the MLPs as they are.
        tokens: tokens of the last stage, in which all weights learn; 0 leaves it out.
        length: tokens of a text.
        calibration_tokens: tokens of own text for the first two stages.
        layer_steps: steps of Adam by which each layer with linear gates learns by itself.
        pattern_steps: steps of Adam by which all patterns learn.
        pattern_batch: texts in each of them.
        data_share: largest share of given texts among those of the last stage.
        sample_batch: texts that are drawn from the model at once.
        learning_rate: highest learning rate of the last stage. It falls to zero.
        checkpointing: compute the activations of the last stage twice instead of storing them.
    """

    attention: Literal["squared", "softmax"] = "squared"
    mlp: Literal["bilinear", "gated"] = "bilinear"
    tokens: Annotated[int, Between(0, 10**15)] = 20_000_000
    length: Size = 256
    calibration_tokens: Count = 2**20
    layer_steps: Annotated[int, Between(0)] = 200
    pattern_steps: Count = 400
    pattern_batch: Count = 16
    data_share: Annotated[float, Between(0, 1)] = 0.5
    sample_batch: Count = 256
    batch_size: Count = 32
    learning_rate: Positive = 3e-4
    weight_decay: NotNegative = 0.0
    warmup: Annotated[float, Between(0, 1, below=True)] = 0.02
    checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration_tokens < 4 * self.length:
            raise BilensError(
                f"calibration_tokens={self.calibration_tokens}, expected at least "
                f"{4 * self.length}, four texts of length={self.length}"
            )

    @property
    def steps(self) -> int:
        """Number of steps of the last stage."""
        return self.tokens // (self.batch_size * self.length)


@dataclass(frozen=True)
class LanguageTraining(TrainerSettings):
    """Settings of the training of a language model.

    The defaults are Table 3 of Pearce et al. 2024. The learning rate falls linearly to zero.

    Attributes:
        epochs: passes over the training set.
        evaluate_every: steps between validations, besides the last; by default one after each pass.
        seed: seed of the initial weights and of the order of the texts.
        optimizer: muon (with AdamW for embeddings and norms), or an optimizer of transformers.
        evaluate_texts: number of texts in a validation, from the first; all by default.
        target_loss: the training ends at the first validation whose loss is no larger.
    """

    epochs: Positive = 5
    optimizer: OptimizerName = "adamw_torch"
    evaluate_texts: Count | None = None
    target_loss: float | None = None


def check_precision(attention: str, precision: str) -> None:
    """Raise BilensError if products of scores leave the range of float16."""
    if precision == "fp16" and attention in ("squared", "bilinear"):
        raise BilensError(
            f"precision='fp16' with attention={attention!r}: products of scores leave the range of "
            "float16; expected precision='bf16' or 'float32'"
        )


@dataclass(frozen=True)
class Preset:
    """A size of model and the training that goes with it."""

    model: LanguageSettings = field(default_factory=LanguageSettings)
    training: LanguageTraining = field(default_factory=LanguageTraining)


PresetName = Literal["grammar", "tiny", "story", "paper", "500m"]
PRESETS = {
    "grammar": Preset(
        LanguageSettings(vocab_size=72, d_model=64, n_heads=2, d_hidden=128, n_ctx=32),
        LanguageTraining(epochs=5, batch_size=64, learning_rate=5e-3),
    ),
    "tiny": Preset(
        LanguageSettings(d_model=256, n_heads=4, d_hidden=768, n_ctx=128),
        LanguageTraining(epochs=2, batch_size=32, learning_rate=3e-3, warmup=0.02),
    ),
    "story": Preset(
        LanguageSettings(
            vocab_size=2048, d_model=256, n_layers=4, n_heads=4, d_hidden=640, n_ctx=256, norm="rms"
        ),
        LanguageTraining(
            epochs=5,
            batch_size=16,
            learning_rate=3e-3,
            warmup=0.05,
            precision="bf16",
            optimizer="muon",
        ),
    ),
    "paper": Preset(),
    "500m": Preset(
        LanguageSettings(
            vocab_size=50_304,
            d_model=1152,
            n_layers=18,
            n_heads=9,
            d_hidden=4608,
            n_ctx=1024,
            norm="rms",
            qk_norm=True,
        ),
        LanguageTraining(
            epochs=1, batch_size=512, warmup=0.02, accumulate=4, precision="bf16", optimizer="muon"
        ),
    ),
}
"""Presets by name.

- grammar: the synthetic grammar, in a few minutes.
- tiny: stories, in minutes on two cores.
- story: the model that comes with bilens, `bilens.load("story")`, in an hour and a half on one core
  with instructions for bfloat16.
- paper: Table 3 of Pearce et al. 2024, for a GPU.
- 500m: the size of the models in the post on tensor-transformer variants, for several GPUs.

500m has 498 million parameters: 2 x 50,304 x 1152 in embedding and unembedding, and in each of
18 blocks 4 x 1152² of attention and 3 x 1152 x 4608 of the MLP. Bilinear attention adds 2 x 1152² a
block, which is 9.6 %; the post says 10 %. Its schedule is a start: no model of this size was
trained with it."""
