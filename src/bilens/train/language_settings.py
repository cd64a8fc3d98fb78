"""How language models are trained, and presets of size and training; quick to import."""

from dataclasses import dataclass, field
from typing import Literal

from bilens.errors import BilensError
from bilens.nn.language_settings import LanguageSettings
from bilens.settings import Count, Positive
from bilens.train.trainer_settings import TrainerSettings

__all__ = ["PRESETS", "LanguageTraining", "OptimizerName", "Preset", "check_precision"]

OptimizerName = Literal[
    "adamw_torch", "adamw_torch_fused", "muon", "adafactor", "adagrad", "rmsprop", "sgd"
]
"""muon: for the matrices inside blocks, with AdamW for all else. The others are named as
`transformers.TrainingArguments(optim=...)` names them."""


@dataclass(frozen=True)
class LanguageTraining(TrainerSettings):
    """How to train a language model. The defaults are Table 3 of Pearce et al. 2024.

    The learning rate falls linearly to zero.

    Attributes:
        epochs: passes over the training set.
        evaluate_every: steps between validations, besides the last; none: one after each pass.
        seed: of the initial weights and of the order of the texts.
        optimizer: muon (with AdamW for embeddings and norms), or one that transformers knows.
        evaluate_texts: texts of a validation, the first ones; none: all of them.
        target_loss: the training ends at the first validation whose loss is no larger.
    """

    epochs: Positive = 5
    optimizer: OptimizerName = "adamw_torch"
    evaluate_texts: Count | None = None
    target_loss: float | None = None


@dataclass(frozen=True)
class Preset:
    """A size of model and the training that goes with it.

    Attributes:
        model: its sizes and parts.
        training: how it is trained.
    """

    model: LanguageSettings = field(default_factory=LanguageSettings)
    training: LanguageTraining = field(default_factory=LanguageTraining)


PRESETS = {
    "grammar": Preset(
        LanguageSettings(vocab_size=72, d_model=64, n_heads=2, d_hidden=128, n_ctx=32),
        LanguageTraining(epochs=5, batch_size=64, learning_rate=5e-3),
    ),
    "tiny": Preset(
        LanguageSettings(d_model=256, n_heads=4, d_hidden=768, n_ctx=128),
        LanguageTraining(epochs=2, batch_size=32, learning_rate=3e-3, warmup=0.02),
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


def check_precision(attention: str, precision: str) -> None:
    """See that the scores of an attention fit into the numbers of a precision.

    Raises:
        BilensError: products of scores leave the range of float16.
    """
    if precision == "fp16" and attention in ("squared", "bilinear"):
        raise BilensError(
            f"precision='fp16' with attention={attention!r}: products of scores leave the range of "
            "float16; expected precision='bf16' or 'float32'"
        )
