"""Sizes of language models, and the trainings that go with them."""

from dataclasses import dataclass, field

from bilens.nn.settings import LanguageSettings
from bilens.train.settings import LanguageTraining


@dataclass(frozen=True)
class Preset:
    """A size of model and the training that goes with it.

    Attributes:
        model: architecture and sizes of the model.
        training: settings of its training.
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
            epochs=1, batch_size=512, warmup=0.02, accumulate=4, precision="bf16", optimizer="muon"
        ),
    ),
}
"""Presets by name.

- grammar: the synthetic grammar, in a few minutes.
- tiny: stories, in minutes on two cores.
- paper: Table 3 of Pearce et al. 2024, for a GPU.
- 500m: the size of the models in the post on tensor-transformer variants, for several GPUs.

500m has 498 million parameters: 2 x 50,304 x 1152 in embedding and unembedding, and in each of
18 blocks 4 x 1152² of attention and 3 x 1152 x 4608 of the MLP. Bilinear attention adds 2 x 1152² a
block, which is 9.6 %; the post says 10 %. Its schedule is a start: no model of this size was
trained with it."""
